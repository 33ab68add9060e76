"""A matrix as it is, maybe with a function that its blocks go through as they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..epilogues.device import loader_with
from ..kernels import operands as loaders
from .base import Access, Layout, Multiply, Operand, Spec, Traced, batch_axes, negated
from .scalars import traced_arguments

if TYPE_CHECKING:
    from ..problem import Problem
    from ..product.prologue import Prologue

#: Types that autocast changes.
AUTOCAST = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Dense(Spec):
    """A matrix of any strides."""

    def usual(self, row: int, col: int) -> Dense:
        return Dense(self.dtype, (), row, col, True)

    def suits_tma(self, problem: Problem, is_b: bool) -> bool:
        """By the rules of `takes_tma`; the distance of halves of columns in each tile has to follow them, too."""
        if not self.takes_tma(problem.batch):
            return False
        if not (is_b and problem.paired):
            return True
        distance = self.half_stride(problem) * self.dtype.itemsize
        return distance > 0 and distance % 16 == 0 and distance < 1 << 40

    def half_stride(self, problem: Problem) -> int:
        """Elements from the left half of its columns to the right one."""
        return problem.out_n * self.col

    def access(self, problem: Problem, is_b: bool, tma: bool) -> Access:
        rows, cols = (problem.K, problem.N) if is_b else (problem.M, problem.K)
        half = self.half_stride(problem) if is_b and problem.paired else None
        return DenseAccess(self, rows, cols, problem.batch, tma, half, self.prologue)


class DenseOperand(Operand):
    """A matrix.

    Args:
        tensor: (..., M, K) or (..., K, N).
        prologue: a function that is applied to it on its way into the product; see `product.prologue`.
        buffers: see `Operand.buffers`; not with a prologue.
    """

    def __init__(
        self, tensor: Tensor, prologue: Prologue | None = None, buffers: Sequence[Tensor] = ()
    ) -> None:
        self.matrix, self.prologue, self.buffers = tensor, prologue, tuple(buffers)
        self.tensors = (tensor, *(() if prologue is None else prologue.tensors), *self.buffers)

    @property
    def _traced(self) -> Any:
        """The prologue as a device function, or None."""
        return None if self.prologue is None else self.prologue.program(self.matrix)

    @property
    def values(self) -> tuple[Any, ...]:
        """The matrix, and the prologue's arguments, numbers included."""
        return (self.matrix, *(() if self.prologue is None else self.prologue.inputs))

    @property
    def launched(self) -> tuple[Tensor, ...]:  # type: ignore[override]  # only where it is asked for
        """The matrix, and the tensors that the prologue reads."""
        return tuple([self.values[place] for place in self.places])

    @property
    def places(self) -> tuple[int, ...]:  # type: ignore[override]
        """See `Operand.places`."""
        traced = self._traced
        return (0,) if traced is None else (0, *[1 + i for i in traced.inputs])

    @property
    def number_places(self) -> tuple[int, ...]:
        """The places of the prologue's numbers among `values`."""
        traced = self._traced
        return () if traced is None else tuple([1 + i for i in traced.numbers])

    @property
    def is_dense(self) -> bool:
        """It is, if it has no prologue."""
        return self.prologue is None

    def named(self, name: str) -> list[tuple[str, Tensor]]:
        own = () if self.prologue is None else self.prologue.tensors
        return [(name, self.matrix), *[("a tensor of the prologue", x) for x in own]]

    def lowered(self, op: str, names: tuple[str, str], dtype: torch.dtype) -> Operand:
        """See `Operand.lowered`; the prologue comes before the operand is rounded."""
        if self.matrix.dtype == dtype or self.matrix.dtype not in AUTOCAST:
            return self
        return DenseOperand(self.prologue_applied().matrix.to(dtype), None, self.buffers)

    def in_torch(self) -> Tensor:
        return self.matrix if self.prologue is None else self.prologue.in_torch(self.matrix)

    def with_prologue(self, prologue: Prologue) -> Operand:
        return DenseOperand(self.matrix, prologue)

    def accumulating(self, buffers: Sequence[Tensor]) -> Operand:
        return DenseOperand(self.matrix, None, buffers)

    def prologue_applied(self) -> Operand:
        return self if self.prologue is None else DenseOperand(self.in_torch())

    def along(self) -> list[tuple[Tensor, int]]:
        """Tensors that the prologue reads, over the matrix."""
        columns = self.matrix.shape[-1]
        return [(x, x.shape[-1] if x.dim() and x.shape[-1] != 1 else columns) for x in self.launched[1:]]

    def spec(self, matrix: Spec, along: Sequence[Layout], problem: Problem) -> Spec:
        traced = self._traced
        if traced is None:
            return matrix
        return replace(matrix, prologue=Traced(traced.source, tuple(along), len(traced.numbers)))

    @property
    def text(self) -> str:
        return "dense"

    def axes(self, rows: str, columns: str) -> list[tuple[str, ...]]:
        if self.matrix.dim() == 1:
            return [("K",)]
        return [(*batch_axes(self.matrix, 2), rows, columns)]

    def mapped(self, dims: Sequence[int | None], rank: int, size: int, everywhere: bool) -> Operand:
        return DenseOperand(leading(self.matrix, dims[0], rank, size, everywhere))

    def gradients(
        self, a: Tensor, grad: Tensor, multiply: Multiply, needs: tuple[bool, Sequence[bool]]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """`grad @ b.mT` and `a.mT @ grad`, summed over the dimensions that were broadcast."""
        of_a = multiply(grad, DenseOperand(self.matrix.mT)).sum_to_size(a.shape) if needs[0] else None
        return of_a, [gradient_of(self.matrix, a, grad, multiply) if needs[1][0] else None]


class ExtendedOperand(DenseOperand):
    """A matrix without a prologue, and more tensors, all of which a launch receives.

    `tensors` are the first of `values`, in the same order.
    """

    @property
    def places(self) -> tuple[int, ...]:  # type: ignore[override]
        """See `Operand.places`."""
        return tuple(range(len(self.tensors)))

    @property
    def is_dense(self) -> bool:
        return False

    def named(self, name: str) -> list[tuple[str, Tensor]]:
        return [(name, self.matrix)]

    def along(self) -> list[tuple[Tensor, int]]:
        return []


def gradient_of(b: Tensor, a: Tensor, grad: Tensor, multiply: Multiply) -> Tensor:
    """The gradient of `a @ b` with respect to b."""
    if b.dim() == 2 and a.dim() > 2:
        # One weight for all: the sum over the batch is part of the product's K.
        a, grad = a.flatten(0, -2), grad.flatten(0, -2)
    return multiply(a.mT, DenseOperand(grad)).sum_to_size(b.shape)


def leading(x: Tensor, dim: int | None, rank: int, size: int, everywhere: bool = False) -> Tensor:
    """A tensor whose mapped dimension comes first, followed by ones so that it broadcasts with `rank` dimensions.

    Args:
        everywhere: whether a tensor that is not mapped gets that dimension, too.
    """
    if dim is None:
        if not everywhere:
            return x
        x, dim = x.unsqueeze(0), 0
    x = x.movedim(dim, 0)
    x = x.reshape(x.shape[0], *[1] * (rank + 1 - x.dim()), *x.shape[1:])
    return x.expand(size, *x.shape[1:])


class DenseAccess(Access):
    """The loader and the store of a matrix, and its argument: a pointer with strides, or a descriptor.

    Attributes:
        half_stride: elements from the left half of its columns to the right one where tiles pair them, or None.
        prologue: the function that is applied to its blocks as they are loaded, or None.
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

    def gathering(self) -> DenseAccess:
        assert not self.tma
        self.gathers = True
        return self

    def loader(self) -> Any:
        plain = self._plain_loader()
        if self.prologue is None:
            return plain
        own = len(self.strides) + self.gathers
        return loader_with(self.prologue.source, own, self.taken - own, plain)

    @property
    def taken(self) -> int:
        """The number of its loader's `strides`, including the arguments after them."""
        own = len(self.strides) + self.gathers
        return own + (4 * len(self.prologue.operands) + self.prologue.numbers if self.prologue else 0)

    def _plain_loader(self) -> Any:
        if self.gathers:
            return loaders.load_gathered
        if self.half_stride is not None:
            if not self.tma:
                return loaders.load_strided_pairs
            return loaders.load_tma_pairs_transposed if self.transposed else loaders.load_tma_pairs
        if not self.tma:
            return loaders.load_strided
        return loaders.load_tma_transposed if self.transposed else loaders.load_tma

    def store(self) -> Any:
        """The device function that stores a block."""
        if not self.tma:
            return loaders.store_strided
        return loaders.store_tma_transposed if self.transposed else loaders.store_tma

    def argument(self, tensors: Sequence[Tensor], block_rows: int, block_cols: int) -> Any:
        tensor = tensors[0]
        if not self.tma:
            return tensor
        if self.half_stride is not None:
            return self._paired(tensor, block_rows, block_cols)
        shape, strides, block = [self.rows, self.cols], [self.layout.row, 1], [block_rows, block_cols]
        if self.transposed:
            shape, strides, block = [self.cols, self.rows], [self.layout.col, 1], [block_cols, block_rows]
        return TensorDescriptor(tensor, *self._batched(shape, strides, block))

    def _batched(self, shape: list[Any], strides: list[Any], block: list[int]) -> tuple[list[Any], ...]:
        """A descriptor's shape, strides and block with those of the batch."""
        if not self.batch:
            return shape, strides, block
        step = self.layout.steps[0]
        return [self.batch[0] if step else 1, *shape], [step or strides[0], *strides], [1, *block]

    def _paired(self, tensor: Tensor, block_rows: int, block_cols: int) -> TensorDescriptor:
        """With the halves of the columns as a separate dimension."""
        cols, half = self.cols // 2, block_cols // 2
        if self.transposed:
            strides = [self.half_stride, self.layout.col, 1]
            shape, block = [2, cols, self.rows], [2, half, block_rows]
        else:
            strides = [self.layout.row, self.half_stride, 1]
            shape, block = [self.rows, 2, cols], [block_rows, 2, half]
        return TensorDescriptor(tensor, *self._batched(shape, strides, block))

    def behind_strides(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Any, ...]:
        """The prologue's arguments."""
        return () if self.prologue is None else traced_arguments(self.prologue, tensors[1:], numbers)
