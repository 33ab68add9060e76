"""A second operand that is two matrices side by side, such as the weights of gate and up."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..epilogues.device import compiled
from ..kernels.operands import part_columns
from .base import Access, Layout, Multiply, Operand, Spec, batch_axes
from .dense import Dense, DenseAccess, DenseOperand, gradient_of, leading

if TYPE_CHECKING:
    from ..devices import Device
    from ..problem import Problem


@dataclass(frozen=True, slots=True)
class Pair(Dense):
    """Two matrices of the same strides, the left and the right half of the columns; the layout is the left one's.

    Attributes:
        distance: elements from the left half to the right one, which need not be of one allocation.
    """

    distance: int = 0

    @property
    def alternates(self) -> bool:
        """Whether columns of both halves alternate in one matrix, as gpt-oss has gate and up."""
        return self.distance > 0 and self.col == 2 * self.distance

    @property
    def whole(self) -> Dense:
        """That matrix."""
        return Dense(self.dtype, self.steps, self.row, self.distance, self.aligned)

    def alike(self) -> Pair:
        """See `Spec.alike`: the distance of the halves hardly matters."""
        if self.alternates:
            return self
        # Loads and descriptors depend on the divisors of the distance, and on whether it fits into 32 bits.
        distance = (self.distance % 16 or 16) + (self.distance >> 31 > 0) * (1 << 31)
        return replace(self, distance=distance)

    def half_stride(self, problem: Problem) -> int:
        """See `Dense.half_stride`."""
        return self.distance

    def suits_tma(self, problem: Problem, is_b: bool) -> bool:
        if self.alternates:
            return self.whole.takes_tma(problem.batch)
        return Dense.suits_tma(self, problem, is_b)

    def access(self, problem: Problem, is_b: bool, tma: bool) -> Access:
        """See `Spec.access`; alternating columns are loaded as they are."""
        if self.alternates:
            return DenseAccess(self.whole, problem.K, problem.N, problem.batch, tma)
        return Dense.access(self, problem, is_b, tma)

    def of_sum(self, epilogue: Any, device: Device) -> Any:
        """See `Spec.of_sum`: alternating columns are put side by side for the epilogue."""
        return _parted(epilogue) if self.alternates else epilogue


_PARTED = """\
def parted_{name}(
    acc, args, shape, sizes, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr
):
    return EPILOGUE(PART(acc), args, shape, sizes, batch, row, col, ROWS, COLS, WIDE)
"""


@functools.lru_cache(1024)
def _parted(epilogue: Any) -> Any:
    return compiled(_PARTED.format(name=epilogue.__name__), {"EPILOGUE": epilogue, "PART": part_columns})


class PairOperand(Operand):
    """The two halves of a second operand's columns, (..., K, N / 2) each.

    Args:
        swapped: whether `matrix` is the right half; only for kernels.
        buffers: see `Operand.buffers`.
    """

    def __init__(
        self, left: Tensor, right: Tensor, swapped: bool = False, buffers: Sequence[Tensor] = ()
    ) -> None:
        self.tensors, self.swapped = (left, right, *buffers), swapped
        self.both, self.buffers = (left, right), tuple(buffers)
        self.matrix = right if swapped else left
        self.launched, self.places = (self.matrix,), (int(swapped),)

    @property
    def values(self) -> tuple[Any, ...]:
        return self.both

    @property
    def form(self) -> tuple[Any, ...]:
        """Bytes from the left half to the right one; negative if the right one comes first in memory."""
        left, right = self.both
        return "pair", right.data_ptr() - left.data_ptr()

    @property
    def halves(self) -> int:
        """They are two."""
        return 2

    def named(self, name: str) -> list[tuple[str, Tensor]]:
        return [(name, x) for x in self.both]

    def lowered(self, op: str, names: tuple[str, str], dtype: torch.dtype) -> Operand:
        left, right = (DenseOperand(x).lowered(op, names, dtype).matrix for x in self.both)
        return PairOperand(left, right, False, self.buffers)

    def in_torch(self) -> Tensor:
        return torch.cat(self.both, dim=-1)

    def accumulating(self, buffers: Sequence[Tensor]) -> Operand:
        return PairOperand(*self.both, False, buffers)

    def parts(self) -> list[Operand]:
        buffers: list[tuple[Tensor, ...]] = [(x,) for x in self.buffers] or [(), ()]
        return [DenseOperand(x, None, own) for x, own in zip(self.both, buffers, strict=True)]

    def ordered(self) -> Operand:
        left, right = self.both
        return PairOperand(left, right, right.data_ptr() < left.data_ptr(), self.buffers)

    @property
    def distance(self) -> int:
        """Elements from the first half in memory to the other one."""
        other = self.both[not self.swapped]
        return (other.data_ptr() - self.matrix.data_ptr()) // self.matrix.element_size()

    def spec(self, matrix: Spec, along: Sequence[Layout], problem: Problem) -> Spec:
        m = matrix
        return Pair(m.dtype, m.steps, m.row, m.col, m.aligned, None, self.distance)

    @property
    def text(self) -> str:
        return "pair"

    def axes(self, rows: str, columns: str) -> list[tuple[str, ...]]:
        return [(*batch_axes(x, 2), rows, columns) for x in self.both]

    def mapped(self, dims: Sequence[int | None], rank: int, size: int, everywhere: bool) -> Operand:
        everywhere = everywhere or any(dim is not None for dim in dims)
        left, right = (leading(x, d, rank, size, everywhere) for x, d in zip(self.tensors, dims, strict=True))
        if left.stride() != right.stride():
            # Only one half is mapped, or the halves are mapped along different dimensions. A kernel reads both in the
            # same way.
            left, right = left.contiguous(), right.contiguous()
        return PairOperand(left, right)

    def gradients(
        self, a: Tensor, grad: Tensor, multiply: Multiply, needs: tuple[bool, Sequence[bool]]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """See `Operand.gradients`; a is one matrix for both halves."""
        left, right = self.both
        halves = grad.chunk(2, dim=-1)
        of_a = None
        if needs[0]:
            of_a = multiply(halves[0], DenseOperand(left.mT))
            of_a = multiply(halves[1], DenseOperand(right.mT), of_a).sum_to_size(a.shape)
        return of_a, [
            gradient_of(b, a, g, multiply) if wanted else None
            for b, g, wanted in zip(self.both, halves, needs[1][:2], strict=True)
        ]
