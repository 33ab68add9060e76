"""A matrix as it is, maybe with a function that its blocks go through as they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..epilogues.device import loader_with
from ..kernels import operands as loaders
from .base import Access, Layout, Spec, Traced, negated
from .scalars import traced_arguments

if TYPE_CHECKING:
    from ..problem import Problem


@dataclass(frozen=True, slots=True)
class Dense(Spec):
    """A matrix of any strides."""

    def usual(self, row: int, col: int) -> Dense:
        """See `Spec.usual`."""
        return Dense(self.dtype, (), row, col, True)

    def suits_tma(self, problem: Problem, is_b: bool) -> bool:
        """By the rules of `takes_tma`; with halves of columns in each tile, these have to be apart as it wants."""
        if not self.takes_tma(problem.batch):
            return False
        if not (is_b and problem.paired):
            return True
        distance = self.half_stride(problem) * self.dtype.itemsize
        return not problem.batch and distance > 0 and distance % 16 == 0 and distance < 1 << 40

    def half_stride(self, problem: Problem) -> int:
        """Elements from the left half of its columns to the right one."""
        return problem.out_n * self.col

    def access(self, problem: Problem, is_b: bool, tma: bool) -> Access:
        """See `Spec.access`."""
        rows, cols = (problem.K, problem.N) if is_b else (problem.M, problem.K)
        half = self.half_stride(problem) if is_b and problem.paired else None
        return DenseAccess(self, rows, cols, problem.batch, tma, half, self.prologue)


class DenseAccess(Access):
    """How one matrix reaches the kernel, to be loaded or stored: as a pointer with strides, or as a descriptor.

    Attributes:
        half_stride: elements from the left half of its columns to the right one where tiles pair them, or None.
        prologue: what becomes of its blocks as they are loaded, or None.
    """

    def __init__(
        self, layout: Layout, rows: int, cols: int, batch: tuple[int, ...], tma: bool,
        half_stride: int | None = None, prologue: Traced | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.rows, self.cols, self.batch, self.tma = layout, rows, cols, batch, tma
        self.transposed = tma and layout.col != 1
        self.half_stride, self.prologue = half_stride, prologue
        self.strides = (negated(layout, tma), layout.row, layout.col)
        if half_stride is not None:
            self.strides = (*self.strides, half_stride)

    def loader(self) -> Any:
        """See `Access.loader`."""
        plain = self._plain_loader()
        if self.prologue is None:
            return plain
        taken = 4 * len(self.prologue.operands) + self.prologue.numbers
        return loader_with(self.prologue.source, taken, plain)

    def _plain_loader(self) -> Any:
        if self.half_stride is not None:
            if not self.tma:
                return loaders.load_strided_pairs
            return (
                loaders.load_described_pairs_transposed if self.transposed else loaders.load_described_pairs
            )
        if not self.tma:
            return loaders.load_strided
        return loaders.load_described_transposed if self.transposed else loaders.load_described

    def store(self) -> Any:
        """The device function that stores a block."""
        if not self.tma:
            return loaders.store_strided
        return loaders.store_described_transposed if self.transposed else loaders.store_described

    def argument(self, tensors: Sequence[Tensor], block_rows: int, block_cols: int) -> Any:
        """See `Access.argument`."""
        tensor = tensors[0]
        if not self.tma:
            return tensor
        if self.half_stride is not None:
            return self._paired(tensor, block_rows, block_cols)
        shape, strides, block = [self.rows, self.cols], [self.layout.row, 1], [block_rows, block_cols]
        if self.transposed:
            shape, strides, block = [self.cols, self.rows], [self.layout.col, 1], [block_cols, block_rows]
        if self.batch:
            step = self.layout.steps[0]
            shape = [self.batch[0] if step else 1, *shape]
            strides = [step or strides[0], *strides]
            block = [1, *block]
        return TensorDescriptor(tensor, shape, strides, block)

    def _paired(self, tensor: Tensor, block_rows: int, block_cols: int) -> TensorDescriptor:
        """Over the halves of the columns as a dimension of their own."""
        cols, half = self.cols // 2, block_cols // 2
        if self.transposed:
            strides = [self.half_stride, self.layout.col, 1]
            return TensorDescriptor(tensor, [2, cols, self.rows], strides, [2, half, block_rows])
        strides = [self.layout.row, self.half_stride, 1]
        return TensorDescriptor(tensor, [self.rows, 2, cols], strides, [block_rows, 2, half])

    def behind_strides(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Any, ...]:
        """What the prologue is given."""
        return () if self.prologue is None else traced_arguments(self.prologue, tensors[1:], numbers)
