"""A 2:4 sparse weight: the kept numbers, and metadata that says where they are; see `formats.sparse`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..epilogues.device import with_constants
from ..formats.sparse import BLOCK, GROUP, INNER, SparseTensor, padded, unpacked_metadata
from ..kernels import sparse as loaders
from ..kernels.any_width_sparse import SparseStage
from .base import Access, Layout, Multiply, Operand, Spec, negated
from .dense import DenseOperand, gradient_of
from .packed import meta_proxy

if TYPE_CHECKING:
    from ..problem import Config, Problem


@dataclass(frozen=True, slots=True)
class Sparse(Spec):
    """Kept numbers of each four; the layout is that of these, with steps in matrices.

    Attributes:
        matrices: how many lie one behind the other in memory.
        metadata: the layout of the metadata.
        code: what 8-bit numbers are, see `formats.sparse.SparseTensor`; "" for those of 16 bits. The matrix's own type
            may be the same, or one of 16 bits.
    """

    matrices: int = 1
    metadata: Layout | None = None
    code: str = ""

    @classmethod
    def of(
        cls, dtype: torch.dtype, code: str = "", *, N: int, K: int, steps: tuple[int, ...] = (), matrices: int = 1,
        aligned: Sequence[bool] = (True, True),
    ) -> Sparse:  # fmt: skip
        """The spec of a weight (N, K).

        Args:
            aligned: whether the addresses of values and metadata are multiples of 16 bytes.
        """
        rows, columns = padded(N, K)
        metadata = Layout(torch.int32, (), rows, 1, aligned[1])
        return cls(dtype, steps, 1, columns // 2, aligned[0], None, matrices, metadata, code)

    @property
    def is_8_bit(self) -> bool:
        """Whether the matrix has the type of 8-bit numbers: activations are fp8, too."""
        return self.dtype.itemsize == 1

    @property
    def decodes(self) -> bool:
        """Whether numbers of 16 bits are made of those of 8."""
        return bool(self.code) and not self.is_8_bit

    @property
    def kind(self) -> str:
        return "sparse fp8" if self.is_8_bit else "sparse8" if self.code else "sparse"

    @property
    def stored(self) -> torch.dtype:
        return torch.int8 if self.code else self.dtype

    @property
    def is_sparse(self) -> bool:
        return True

    @property
    def bits(self) -> float:
        """Of a number of the matrix: half of one that is kept, and its place."""
        return self.stored.itemsize * 4 + 1

    def strides_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Values and metadata are contiguous."""
        return torch.empty(shape, device="meta").stride()

    @property
    def staged(self) -> SparseStage:
        """See `Spec.staged`."""
        return SparseStage(fp8=True) if self.is_8_bit else SparseStage(self.code)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The values, then the metadata."""
        assert self.metadata is not None
        return (self, self.metadata)

    def shapes(self, rows: int, cols: int, batch: tuple[int, ...], is_b: bool) -> list[tuple[int, ...]]:
        N, K = padded(cols, rows)
        # The metadata's layout has no steps between matrices.
        return [(self.matrices, N, K // 2), (self.matrices * K // BLOCK, N)]

    def bytes(self, rows: int, cols: int, batch: tuple[int, ...]) -> int:
        """Of each matrix that there is, with metadata."""
        count = 1
        for size in batch:
            count *= size
        return int(min(count, self.matrices) * cols * rows * self.bits / 8)

    def usual(self, row: int, col: int) -> Sparse:
        assert self.metadata is not None
        metadata = replace(self.metadata, row=0, aligned=True)
        return replace(self, steps=(), row=row, col=col, aligned=True, matrices=1, metadata=metadata)

    def suits_tma(self, problem: Problem, is_b: bool) -> bool:
        """A descriptor over halves of the columns has no dimension for a batch."""
        assert self.metadata is not None
        return self.aligned and self.metadata.aligned and not (problem.paired and problem.batch)

    @property
    def has_aligned_rows(self) -> bool:
        return self.aligned

    def refusal(self, problem: Problem, config: Config) -> str | None:
        if not config.swap or config.rest_n:
            return "sparse weights need swap, in the tile schedule, and a block_n that is a power of two"
        if config.block_k % BLOCK:
            return f"block_k must be a multiple of {BLOCK} for sparse weights"
        return None

    def access(self, problem: Problem, is_b: bool, tma: bool) -> SparseAccess:
        return SparseAccess(self, problem, tma)

    def __str__(self) -> str:
        return f"{self.code or Layout.__str__(self)}/2:4"


class SparseAccess(Access):
    """The loader of a sparse weight and its arguments."""

    def __init__(self, spec: Sparse, problem: Problem, tma: bool) -> None:
        self.spec, self.tma, self.paired = spec, tma, problem.paired
        self.rows, self.columns = padded(problem.N, problem.K)
        self.strides = (negated(spec), self.rows, self.columns // BLOCK)

    def loader(self) -> Any:
        dtype = str(self.spec.dtype).removeprefix("torch.")
        return loader(self.tma, self.paired, "" if self.spec.is_8_bit else self.spec.code, dtype)

    def argument(self, tensors: Sequence[Tensor], block_rows: int, block_cols: int) -> Any:
        """The values."""
        values = tensors[0]
        if not self.tma:
            return values
        row, block = self.columns // 2, [block_cols, block_rows // 2]
        if self.paired:
            half = self.rows // 2
            shape, strides = [2, half, row], [half * row, row, 1]
            return TensorDescriptor(values, shape, strides, [2, block[0] // 2, block[1]])
        return TensorDescriptor(values, [self.spec.matrices * self.rows, row], [row, 1], block)

    def group_params(self, tensors: Sequence[Tensor], block_rows: int, block_cols: int) -> list[Any]:
        """The metadata."""
        return [tensors[1], None]


@functools.cache
def loader(tma: bool, paired: bool, code: str, dtype: str) -> Any:
    """The loader of a kind of sparse weights; see `kernels.sparse.load_sparse`."""
    return with_constants(loaders.load_sparse, TMA=tma, PAIRED=paired, CODE=code, DTYPE=dtype)


class SparseOperand(Operand):
    """A sparse weight (*batch, N, K) as the second operand, or its transpose.

    Args:
        weight: the weight.
        transposed: the operand is the weight as it is, (*batch, N, K), as for gradients.
    """

    def __init__(self, weight: SparseTensor, transposed: bool = False) -> None:
        self.weight, self.transposed = weight, transposed
        like = meta_proxy(weight)
        self.matrix = like if transposed else like.mT
        self._parts = (weight.values, weight.metadata, weight.channel)
        self.tensors = tuple([x for x in self._parts if x is not None])
        self.places = (0, 1)
        self.launched = self._parts[:2]

    @property
    def values(self) -> tuple[Any, ...]:
        """Of each of `formats.sparse.INNER`, the tensor or None."""
        return self._parts

    @property
    def is_packed(self) -> bool:
        return True

    @property
    def strip(self) -> int:
        return BLOCK

    @property
    def outer(self) -> Tensor | None:
        """A number for each row of the weight."""
        channel = self.weight.channel
        if channel is None or self.transposed:
            return None
        return channel if channel.dim() == 1 else channel.unsqueeze(-2)

    @property
    def outer_place(self) -> int:
        return INNER.index("channel")

    def named(self, name: str) -> list[tuple[str, Tensor]]:
        own = zip(INNER, self._parts, strict=True)
        return [(f"{name}'s {part}", x) for part, x in own if x is not None]

    def lowered(self, op: str, names: tuple[str, str], dtype: torch.dtype) -> Operand:
        if self.weight.dtype != dtype:
            first, second = names
            raise TypeError(
                f"{op}: autocast brings {first} to {dtype}, and {second} is sparse in {self.weight.dtype}; "
                f"use autocast with that type, or {second}.to({dtype})"
            )
        return self

    def in_torch(self) -> Tensor:
        if self.transposed:
            return self.weight.dense()
        return self.weight.unscaled().dense().mT

    def loadable(self) -> Operand:
        """A transpose is expanded, and lives briefly."""
        return DenseOperand(self.in_torch()) if self.transposed else self

    def spec(self, matrix: Spec, along: Sequence[Layout], problem: Problem) -> Spec:
        w = self.weight
        aligned = [x.data_ptr() % 16 == 0 for x in (w.values, w.metadata)]
        return Sparse.of(
            w.dtype,
            w.code,
            N=problem.N,
            K=problem.K,
            steps=matrix.steps,
            matrices=w.shape[:-2].numel(),
            aligned=aligned,
        )

    @property
    def text(self) -> str:
        dtype = str(self.weight.dtype).removeprefix("torch.")
        return f"sparse:{'T' if self.transposed else 'N'}:{self.weight.code}:{dtype}"

    @property
    def sizes(self) -> list[int]:
        """The weight's shape."""
        return list(self.weight.shape)

    @classmethod
    def rebuild(cls, facts: Sequence[str], tensors: Sequence[Tensor], sizes: Sequence[int]) -> SparseOperand:
        """See `operands.rebuild`."""
        inner = dict(zip(INNER, tensors, strict=False))
        transposed, code, dtype = facts
        weight = SparseTensor._assemble(tuple(sizes), inner, code, getattr(torch, dtype))
        return cls(weight, transposed == "T")

    def mapped(self, dims: Sequence[int | None], rank: int, size: int, everywhere: bool) -> Operand:
        if any(dim is not None for dim in dims):
            raise NotImplementedError(
                "vmap: a sparse weight can't be mapped; map over x, or use a batch of weights"
            )
        return self

    def gradients(
        self, a: Tensor, grad: Tensor, multiply: Multiply, needs: tuple[bool, Sequence[bool]]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Of a, and of the kept numbers: of the dense weight's gradient, the numbers in their places."""
        of_a: Tensor | None = None
        of_tensors: list[Tensor | None] = [None] * len(self.tensors)
        if needs[0]:
            other = SparseOperand(self.weight, not self.transposed)
            of_a = multiply(grad, other).sum_to_size(a.shape)
        if needs[1][0]:
            found = gradient_of(self.matrix, a, grad, multiply)
            found = found if self.transposed else found.mT
            channel = self.weight.channel
            # The product is that of numbers times their row's channel.
            found = found if channel is None else found * channel.unsqueeze(-1)
            of_tensors[0] = sampled(found, self.weight)
        return of_a, of_tensors


def sampled(dense: Tensor, weight: SparseTensor) -> Tensor:
    """Of a matrix (*batch, N, K), the numbers in the places that a weight keeps, as its values lie."""
    rows, columns = padded(*weight.shape[-2:])
    N, K = weight.shape[-2:]
    whole = torch.nn.functional.pad(dense, (0, columns - K, 0, rows - N))
    nibbles = unpacked_metadata(weight.metadata).to(torch.int64)
    at = torch.stack([nibbles & 3, nibbles >> 2], -1)
    found: Tensor = whole.unflatten(-1, (-1, GROUP)).gather(-1, at).flatten(-2)
    return found.to(weight.dtype)
