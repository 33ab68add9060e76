"""How factors that change along K reach the kernel: to scale the sums of steps, or the numbers as they are loaded."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .epilogues.device import compiled, with_constants
from .kernels import scales
from .problem import Operand, Problem

_LOADER = """\
def {load}_{of}_{step}_{paired}(
    x, shape, strides, sizes, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, CHECK_ROWS: tl.constexpr,
    CHECK_COLS: tl.constexpr, WIDE: tl.constexpr
):
    {layout}, factors, of_batch, of_row, of_k = strides
    # Before the block is waited for, so that they come meanwhile.
    powers = powers_of_{of}(
        factors, of_batch, of_row, of_k, shape, sizes, batch, row, col, ROWS, COLS, {step}, {paired}
    )
    block = LOAD(x, shape, ({layout}), sizes, batch, row, col, ROWS, COLS, CHECK_ROWS, CHECK_COLS, WIDE)
    return {of}_in_bf16(block, powers)
"""


def by_steps(problem: Problem) -> bool:
    """Whether the product of each step along K is multiplied by factors."""
    return problem.scales is not None and not problem.scales.exact


@functools.lru_cache(1024)
def loader(load: Any, strides: int, step: int, of_columns: bool, paired: bool = False) -> Any:
    """A loader of blocks, see `kernels.operands`, whose numbers are multiplied by their factors in bf16.

    Args:
        load: loads the blocks, given so many `strides`; those of the factors come behind them.
        step: elements along K that share a factor.
        of_columns: whether the matrix is B, whose columns have factors, and which may be `paired`.
    """
    of = "columns" if of_columns else "rows"
    layout = ", ".join(f"stride_{i}" for i in range(strides))
    text = _LOADER.format(load=load.__name__, of=of, layout=layout, step=step, paired=paired)
    names = (f"powers_of_{of}", f"{of}_in_bf16")
    return compiled(text, {"LOAD": load} | {name: getattr(scales, name) for name in names})


def step(problem: Problem) -> tuple[Any, Any]:
    """LOAD_STEP and MULTIPLY of a scaled step along K, see `kernels.steps`."""
    assert problem.scales is not None
    load = with_constants(
        scales.load_scales,
        EVERY_M=problem.scales.a_every,
        EVERY_N=problem.scales.b_every,
        PAIRED=problem.paired,
    )
    return load, scales.add_scaled_product


def arguments(problem: Problem, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The factors of A and those of B, each as a pointer and strides, see `kernels.scales`."""
    assert problem.scales is not None
    of_a, of_b = tensors
    return _factors(of_a, problem.scales.a), _factors(of_b, problem.scales.b)


def of_steps(problem: Problem, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The factors of both, as kernels take them that scale the sums of steps."""
    of_a, of_b = arguments(problem, tensors)
    # Flat: Triton 3.6 fails on a nested tuple in which an integer is 1.
    return *of_a, *of_b


def _factors(tensor: Tensor, x: Operand) -> tuple[Any, ...]:
    # Negated, see `kernels.operands`.
    return tensor, tuple(-step for step in x.steps), x.row, x.col
