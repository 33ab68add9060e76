"""A matrix of 8-bit numbers whose scales change along K. Each step of the sum is scaled, or each block that is loaded.

If all scales are powers of two, loaders multiply the numbers by them, in bf16; otherwise the product of each K step is
multiplied before it is added to the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..epilogues.device import compiled, with_constants
from ..formats.scaled import BLOCK, E8M0
from ..kernels import scales
from .base import Access, Layout, Operand, Spec, negated
from .dense import Dense, DenseAccess, leading
from .eight_bit import EightBitOperand

if TYPE_CHECKING:
    from ..problem import Config, Problem

#: A placeholder where the layout of scales does not matter.
_ANY = Layout(torch.float32, (), 1, 1, True)


@dataclass(frozen=True, slots=True)
class Scaled(Spec):
    """A matrix with scales over (rows, K) of A or (columns, K) of B.

    Attributes:
        scale: the layout of the scales: a row of them for `every` rows of A, or columns of B.
        every: how many share one.
        step: columns of K that share one, of `formats.scaled`, `BLOCK` or `MX_BLOCK`.
        power_of_two: whether the scales of both operands are powers of two. Then fp8 numbers can be multiplied by them
            in bf16 without rounding, from 2^-133 to below 2^128, the range of bf16.
    """

    scale: Layout = _ANY
    every: int = 1
    step: int = BLOCK
    power_of_two: bool = False

    @property
    def kind(self) -> str:
        if self.power_of_two:
            return "mx"
        return "scaled" if self.step == BLOCK else f"scaled{self.step}"

    @property
    def note(self) -> str:
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
        own, along = (cols, rows) if is_b else (rows, cols)
        return [(*batch, rows, cols), (*batch, -(-own // self.every), -(-along // self.step))]

    def usual(self, row: int, col: int) -> Scaled:
        return replace(self, steps=(), row=row, col=col, aligned=True, scale=_ANY)

    def suits_tma(self, problem: Problem, is_b: bool) -> bool:
        """As for a plain matrix."""
        return self._plain.suits_tma(problem, is_b)

    @property
    def _plain(self) -> Dense:
        return Dense(self.dtype, self.steps, self.row, self.col, self.aligned)

    def refusal(self, problem: Problem, config: Config) -> str | None:
        fits = config.block_k % self.step == 0 if self.power_of_two else config.block_k == self.step
        if config.schedule == "tile" and fits and not config.rest_n:
            return None
        steps = f"{'a block_k that is a multiple of' if self.power_of_two else 'block_k'} {self.step}"
        return f"such scales along K need the tile schedule, {steps} and a block_n that is a power of two"

    def columns(self, config: Config) -> tuple[int, int]:
        """See `Spec.columns`.

        If steps are scaled, a tile that is stored in halves is also summed in halves, one after the other. A step's
        product then takes half the registers, so that a second program fits, which multiplies while the first one
        scales.
        """
        if self.by_steps and config.split_store:
            return config.block_n // 2, config.block_n // 2
        return config.main_n, config.rest_n

    def k_step(self, problem: Problem) -> tuple[Any, Any]:
        if not self.by_steps:
            return self._plain.k_step(problem)
        a = problem.a.ungrouped
        assert isinstance(a, Scaled)
        load = with_constants(
            scales.load_scales, EVERY_M=a.every, EVERY_N=self.every, PAIRED=problem.paired,
            RAGGED=bool(problem.ragged), GATHERS=problem.a.gathers,
        )  # fmt: skip
        return load, scales.add_scaled_product

    def access(self, problem: Problem, is_b: bool, tma: bool) -> Access:
        plain = self._plain.access(problem, is_b, tma)
        assert isinstance(plain, DenseAccess)
        return ScaledAccess(self, plain, is_b, problem.paired)


class ScaledAccess(Access):
    """The loader of a matrix with scales along K, and its arguments."""

    def __init__(self, spec: Scaled, plain: DenseAccess, is_b: bool, paired: bool) -> None:
        self.spec, self.plain, self.is_b, self.paired = spec, plain, is_b, paired
        self.strides = plain.strides

    def gathering(self) -> ScaledAccess:
        self.plain.gathering()
        self.gathers = True
        return self

    def loader(self) -> Any:
        load = self.plain.loader()
        if self.spec.by_steps:
            return load
        return _loader(
            load, len(self.strides), self.gathers, self.spec.step, self.is_b, self.is_b and self.paired
        )

    def argument(self, tensors: Sequence[Tensor], block_rows: int, block_cols: int) -> Any:
        return self.plain.argument(tensors, block_rows, block_cols)

    def behind_strides(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Any, ...]:
        """The scales, if the loader multiplies by them."""
        return () if self.spec.by_steps else self._scales(tensors)

    def step_scales(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
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
    {layout}, scale, of_batch, of_row, of_k = strides
    # Before the block is waited for, so that they come meanwhile.
    powers = powers_of_{of}(
        scale, of_batch, of_row, of_k, {numbers}, shape, sizes, batch, row, col, ROWS, COLS, {step}, {paired}
    )
    block = LOAD(x, shape, ({layout}), sizes, batch, row, col, ROWS, COLS, CHECK_ROWS, CHECK_COLS, WIDE)
    return {of}_in_bf16(block, powers)
"""


@functools.lru_cache(1024)
def _loader(load: Any, strides: int, gathers: bool, step: int, of_columns: bool, paired: bool) -> Any:
    """A loader of blocks, see `kernels.operands`, whose numbers are multiplied by their scales in bf16.

    Args:
        load: loads the blocks, from its number of `strides`; those of the scales follow them.
        gathers: whether the numbers of gathered rows are among the strides, after the others.
        step: elements along K that share a scale.
        of_columns: whether the matrix is B, whose columns have scales, and which may be `paired`.
    """
    of = "columns" if of_columns else "rows"
    layout = ", ".join(f"stride_{i}" for i in range(strides + gathers))
    numbers = f"stride_{strides}" if gathers else "None"
    text = _LOADER.format(load=load.__name__, of=of, layout=layout, numbers=numbers, step=step, paired=paired)
    names = (f"powers_of_{of}", f"{of}_in_bf16")
    return compiled(text, {"LOAD": load} | {name: getattr(scales, name) for name in names})


class ScaledOperand(EightBitOperand):
    """8-bit numbers with scales along K, as (..., M, K) or, of a weight (N, K), as (K, N).

    Args:
        data: the numbers, as the product has them.
        scale: (..., R, steps) for rows of A or columns of B; float32, or e8m0 as uint8.
        every, step, power_of_two: see `Scaled`.
        is_b: whether it is the second operand.
    """

    def __init__(
        self, data: Tensor, scale: Tensor, every: int, step: int, power_of_two: bool, is_b: bool
    ) -> None:
        self.matrix, self.scale, self.is_b = data, scale, is_b
        self.every, self.step, self.power_of_two = every, step, power_of_two
        self.tensors = self.launched = (data, scale)
        self.places = (0, 1)

    @property
    def summed(self) -> torch.dtype:
        """Whatever the numbers are."""
        return torch.float32

    def in_torch(self) -> Tensor:
        """The numbers times their scales, in float32."""
        data = self.matrix.mT if self.is_b else self.matrix
        rows, columns = data.shape[-2:]
        scale = exponents(self.scale) if self.scale.dtype == torch.uint8 else self.scale
        spread = scale.repeat_interleave(self.step, -1)[..., :columns]
        if self.every > 1:
            spread = spread.repeat_interleave(self.every, -2)[..., :rows, :]
        wide = data.to(torch.float32) * spread
        return wide.mT if self.is_b else wide

    def along(self) -> list[tuple[Tensor, int]]:
        """A's scales, where each row has its own."""
        return [] if self.is_b or self.every > 1 else [(self.scale, self.scale.shape[-1])]

    def spec(self, matrix: Spec, along: Sequence[Layout], problem: Problem) -> Spec:
        m, scale = matrix, self.scale
        if along:
            (layout,) = along
        else:
            # The same for a whole batch, unless it has groups, each with its own.
            *steps, row, col = scale.stride()
            of_batch = tuple(steps or [0] * len(problem.batch)) if problem.batch else ()
            layout = Layout(scale.dtype, of_batch, row, col, scale.data_ptr() % 16 == 0)
        return Scaled(
            m.dtype, m.steps, m.row, m.col, m.aligned, None, layout, self.every, self.step, self.power_of_two
        )

    @property
    def text(self) -> str:
        return text_of(self.every, self.step, self.power_of_two, self.is_b)

    @classmethod
    def rebuild(cls, facts: Sequence[str], tensors: Sequence[Tensor], sizes: Sequence[int]) -> ScaledOperand:
        """See `operands.rebuild`."""
        every, step, power_of_two, side = facts
        data, scale = tensors
        return cls(data, scale, int(every), int(step), power_of_two == "1", side == "b")

    def mapped(self, dims: Sequence[int | None], rank: int, size: int, everywhere: bool) -> Operand:
        shares = self.is_b or self.every > 1
        if shares and any(dim is not None for dim in dims):
            raise NotImplementedError(
                "vmap: a weight with scales of blocks can't be mapped; give it a batch dimension"
            )
        data = leading(self.matrix, dims[0], rank, size, everywhere)
        scale = self.scale if shares else leading(self.scale, dims[1], rank, size, everywhere)
        return ScaledOperand(data, scale, self.every, self.step, self.power_of_two, self.is_b)


def text_of(every: int, step: int, power_of_two: bool, is_b: bool) -> str:
    """`ScaledOperand.text`; written so that torch.compile can trace it."""
    return f"scaled:{every}:{step}:{int(power_of_two)}:{'b' if is_b else 'a'}"


def exponents(scale: Tensor) -> Tensor:
    """Bytes of e8m0 as float32."""
    return scale.view(E8M0).to(torch.float32)
