"""A matrix of 8-bit numbers whose scales change along K: every step of the sum is scaled, or each block that is loaded.

Where all scales are powers of two, loaders multiply the numbers themselves by them, in bf16; otherwise the product of
each step along K is multiplied before it is added to the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..epilogues.device import compiled
from ..formats.scaled import BLOCK
from ..kernels import scales
from .base import Access, Layout, Spec, negated
from .dense import Dense, DenseAccess

if TYPE_CHECKING:
    from ..problem import Config, Problem

#: What stands for the layout of scales where it has no say.
_ANY = Layout(torch.float32, (), 1, 1, True)


@dataclass(frozen=True, slots=True)
class Scaled(Spec):
    """A matrix with scales over (rows, K) of A or (columns, K) of B.

    Attributes:
        scale: the scales' layout: a row of them for `every` rows of A, or columns of B.
        every: how many share one.
        step: columns of K that share one, of `formats.scaled`, `BLOCK` or `MX_BLOCK`.
        power_of_two: whether those of both operands are powers of two, by which numbers of fp8 can be multiplied in
            bf16 without rounding; from 2^-133 on, that is, and below 2^128: bf16 ends there.
    """

    scale: Layout = _ANY
    every: int = 1
    step: int = BLOCK
    power_of_two: bool = False

    @property
    def kind(self) -> str:
        """See `Spec.kind`."""
        if self.power_of_two:
            return "mx"
        return "scaled" if self.step == BLOCK else f"scaled{self.step}"

    @property
    def note(self) -> str:
        """See `Spec.note`."""
        return " scaled along K"

    @property
    def is_scaled(self) -> bool:
        """They do."""
        return True

    @property
    def by_steps(self) -> bool:
        """Whether the product of each step along K is multiplied by scales."""
        return not self.power_of_two

    @property
    def summed(self) -> torch.dtype:
        """Whatever the numbers are."""
        return torch.float32

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The matrix, and its scales."""
        return self, self.scale

    def shapes(self, rows: int, cols: int, batch: tuple[int, ...], is_b: bool) -> list[tuple[int, ...]]:
        """See `Spec.shapes`."""
        own, along = (cols, rows) if is_b else (rows, cols)
        return [(*batch, rows, cols), (*batch, -(-own // self.every), -(-along // self.step))]

    def usual(self, row: int, col: int) -> Scaled:
        """See `Spec.usual`."""
        return replace(self, steps=(), row=row, col=col, aligned=True, scale=_ANY)

    def suits_tma(self, problem: Problem, is_b: bool) -> bool:
        """As for a plain matrix."""
        return self._plain.suits_tma(problem, is_b)

    @property
    def _plain(self) -> Dense:
        return Dense(self.dtype, self.steps, self.row, self.col, self.aligned)

    def refusal(self, problem: Problem, config: Config) -> str | None:
        """See `Spec.refusal`."""
        fits = config.block_k % self.step == 0 if self.power_of_two else config.block_k == self.step
        if config.schedule == "tile" and fits and not config.rest_n:
            return None
        steps = f"{'a block_k that is a multiple of' if self.power_of_two else 'block_k'} {self.step}"
        return f"such scales along K need the tile schedule, {steps} and a block_n that is a power of two"

    def columns(self, config: Config) -> tuple[int, int]:
        """See `Spec.columns`.

        Where steps are scaled, a tile that is stored in halves is also summed in halves, one after the other: a step's
        product then takes half the registers, and a second program fits beside the first, which multiplies while the
        first one scales.
        """
        if self.by_steps and config.split_store:
            return config.block_n // 2, config.block_n // 2
        return config.main_n, config.rest_n

    def access(self, problem: Problem, is_b: bool, tma: bool) -> Access:
        """See `Spec.access`."""
        plain = self._plain.access(problem, is_b, tma)
        assert isinstance(plain, DenseAccess)
        return ScaledAccess(self, plain, is_b, problem.paired)


class ScaledAccess(Access):
    """How a matrix with scales along K reaches the kernel."""

    def __init__(self, spec: Scaled, plain: DenseAccess, is_b: bool, paired: bool) -> None:
        self.spec, self.plain, self.is_b, self.paired = spec, plain, is_b, paired
        self.strides = plain.strides

    def loader(self) -> Any:
        """See `Access.loader`."""
        load = self.plain.loader()
        if self.spec.by_steps:
            return load
        return _loader(load, len(self.strides), self.spec.step, self.is_b, self.is_b and self.paired)

    def argument(self, tensors: Sequence[Tensor], block_rows: int, block_cols: int) -> Any:
        """See `Access.argument`."""
        return self.plain.argument(tensors, block_rows, block_cols)

    def behind_strides(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Any, ...]:
        """The scales, where the loader multiplies by them."""
        return () if self.spec.by_steps else self._scales(tensors)

    def step_scales(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """See `Access.step_scales`."""
        return self._scales(tensors) if self.spec.by_steps else ()

    def _scales(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """As a pointer and strides, see `kernels.scales`."""
        x = self.spec.scale
        return tensors[1], negated(x), x.row, x.col


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


@functools.lru_cache(1024)
def _loader(load: Any, strides: int, step: int, of_columns: bool, paired: bool) -> Any:
    """A loader of blocks, see `kernels.operands`, whose numbers are multiplied by their scales in bf16.

    Args:
        load: loads the blocks, given so many `strides`; those of the scales come behind them.
        step: elements along K that share a scale.
        of_columns: whether the matrix is B, whose columns have scales, and which may be `paired`.
    """
    of = "columns" if of_columns else "rows"
    layout = ", ".join(f"stride_{i}" for i in range(strides))
    text = _LOADER.format(load=load.__name__, of=of, layout=layout, step=step, paired=paired)
    names = (f"powers_of_{of}", f"{of}_in_bf16")
    return compiled(text, {"LOAD": load} | {name: getattr(scales, name) for name in names})
