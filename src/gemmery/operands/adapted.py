"""A first operand with an adapter: the product of two thin matrices is added to its product, as in LoRA.

`(x, left, right) @ w` is `x @ w + left @ right`. The kernel adds the thin product to its accumulators, see
`kernels.thin`. The epilogue receives the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..epilogues.device import digest, with_constants
from ..kernels import ranks, thin
from .base import Layout, Operand, Spec
from .dense import Dense, DenseOperand, ExtendedOperand

if TYPE_CHECKING:
    from ..problem import Problem

#: Rows or columns of a block, at most.
_BLOCK = 512


class WithAdapter(NamedTuple):
    """A first operand with an adapter, as `product.run.product` accepts it.

    Attributes:
        matrix: (M, K).
        left, right: (M, r) and (r, N), in the type of the matrix.
    """

    matrix: Tensor
    left: Tensor
    right: Tensor


@dataclass(frozen=True, slots=True)
class Adapted(Dense):
    """A matrix with an adapter.

    Attributes:
        rank: columns of the left thin matrix.
        width: columns of the right one, and of the product.
        thin: the layouts of both.
        scale: the layout of the scales of the product's columns, or None.
    """

    rank: int = 0
    width: int = 0
    thin: tuple[Layout, ...] = ()
    scale: Layout | None = None

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The matrix, both thin matrices, and the scales."""
        return (self, *self.thin, *(() if self.scale is None else (self.scale,)))

    @property
    def adapter_rank(self) -> int:
        return self.rank

    @property
    def words(self) -> int:
        """Pairs of adjacent numbers along the short side that a thread can load at a time: 4, 2 or, if not 2, 0."""
        left, right = self.thin
        if self.dtype.itemsize != 2 or not (left.col == right.row == 1 and left.aligned and right.aligned):
            return 0
        if self.rank % 32 == 0 and left.row % 8 == right.col % 8 == 0:
            return 4
        return 0 if any(step % 4 for step in (self.rank, left.row, right.col)) else 2

    @property
    def suits_registers(self) -> bool:
        return self.words > 0

    def bytes(self, rows: int, cols: int, batch: tuple[int, ...]) -> int:
        """See `Layout.bytes`; with those of the thin matrices."""
        return Dense.bytes(self, rows, cols, batch) + self.dtype.itemsize * self.rank * (rows + self.width)

    def shapes(self, rows: int, cols: int, batch: tuple[int, ...], is_b: bool) -> list[tuple[int, ...]]:
        scale = [] if self.scale is None else [(1, self.width)]
        return [(*batch, rows, cols), (rows, self.rank), (self.rank, self.width), *scale]

    def of_partial_sum(self, problem: Problem, epilogue: Any, reads_ahead: bool) -> Any:
        left, right = self.thin
        steps = left.row, left.col, right.row, right.col
        return with_constants(
            thin.with_product, EPILOGUE=epilogue, RANK=self.rank, PRECISION=problem.precision,
            SCALED=self.scale is not None, AHEAD=reads_ahead, WIDE_STRIDES=max(steps) * _BLOCK >= 1 << 31,
            WORDS=self.words, SOURCE=digest(thin),
        )  # fmt: skip

    def before_sum(self, prefetch: Any) -> Any:
        return with_constants(ranks.before_sum, PREFETCH=prefetch, FIRST=6 if self.scale is None else 8)

    def sum_arguments(
        self, problem: Problem, tensors: Sequence[Any], numbers: Sequence[float]
    ) -> tuple[Any, ...]:
        left, right = self.thin
        scale = () if self.scale is None else (tensors[3], self.scale.col)
        return (*tensors[1:3], left.row, left.col, right.row, right.col, *scale)

    def __str__(self) -> str:
        return f"{Spec.__str__(self)} with an adapter of rank {self.rank}"


class AdaptedOperand(ExtendedOperand):
    """A matrix with an adapter.

    Args:
        matrix: (M, K).
        left, right: (M, r) and (r, N), in the type of the matrix.
        scale: (N,), by which the product without the adapter is multiplied; or None.
    """

    def __init__(self, matrix: Tensor, left: Tensor, right: Tensor, scale: Tensor | None = None) -> None:
        super().__init__(matrix)
        # One number for all is the same for each column.
        self.left, self.right = left, right
        self.scale = scale = None if scale is None else scale.expand(right.shape[1])
        self.tensors = (matrix, left, right, *(() if scale is None else (scale,)))

    @property
    def values(self) -> tuple[Any, ...]:
        return self.matrix, self.left, self.right, self.scale

    def named(self, name: str) -> list[tuple[str, Tensor]]:
        return [(name, self.matrix), (f"{name}'s adapter", self.left), (f"{name}'s adapter", self.right)]

    def lowered(self, op: str, names: tuple[str, str], dtype: torch.dtype) -> Operand:
        matrix = super().lowered(op, names, dtype).matrix
        if matrix is self.matrix:
            return self
        return AdaptedOperand(matrix, self.left.to(dtype), self.right.to(dtype), self.scale)

    def multiplied(self, b: Operand, dtype: torch.dtype, by_rows: bool) -> Tensor:
        """See `Operand.multiplied`."""
        product = super().multiplied(b, dtype, by_rows)
        if self.scale is not None:
            product = product * self.scale.to(dtype)
        return product + DenseOperand(self.left).multiplied(DenseOperand(self.right), dtype, by_rows)

    def spec(self, matrix: Spec, along: Sequence[Layout], problem: Problem) -> Spec:
        m, scale = matrix, self.scale
        of_scale = (
            None if scale is None else Layout(scale.dtype, (), 0, scale.stride(0), scale.data_ptr() % 16 == 0)
        )
        rank, columns = self.right.shape
        return Adapted(
            m.dtype, m.steps, m.row, m.col, m.aligned, None, rank, columns, (_layout(self.left), _layout(self.right)),
            of_scale,
        )  # fmt: skip

    @property
    def text(self) -> str:
        """Part of a call's key. No operator takes such operands."""
        return "adapted"


def _layout(x: Tensor) -> Layout:
    row, col = x.stride()
    return Layout(x.dtype, (), row, col, x.data_ptr() % 16 == 0)
