"""A 2:4 sparse weight: the kept numbers, and metadata that says where they are; see `formats.sparse`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..epilogues.device import with_constants
from ..formats.kept import CODES
from ..formats.sparse import BLOCK, GROUP, INNER, SparseTensor, padded, unpacked_metadata
from ..formats.sparse import COLUMNS as CUT_COLUMNS
from ..formats.sparse import ROWS as CUT_ROWS
from ..kernels import sparse as loaders
from ..kernels.any_width_sparse import DECODE, UNSWIZZLED, SparseStage
from ..kernels.any_width_stage import ROWS
from .base import Access, Layout, Multiply, Operand, Spec, StageMap, batch_axes, negated, refuse_gradients
from .dense import AUTOCAST, DenseOperand, gradient_of
from .packed import meta_proxy, shape_of_part

if TYPE_CHECKING:
    from ..problem import Config, Problem


@dataclass(frozen=True, slots=True)
class Sparse(Spec):
    """The kept numbers of a 2:4 sparse matrix; the layout is that of these, with steps in matrices.

    Attributes:
        matrices: how many are contiguous in memory.
        metadata: the layout of the metadata.
        code: the type of numbers of 8 or 4 bits, see `formats.sparse.SparseTensor`; "" for those of 16 bits. The
            matrix may have the same type, or one of 16 bits.
        group: rows of B, along K, that share a scale; 0 if none do.
        scales: the layout of the scales, where there are any.
    """

    matrices: int = 1
    metadata: Layout | None = None
    code: str = ""
    group: int = 0
    scales: Layout | None = None

    @classmethod
    def of(
        cls, dtype: torch.dtype, code: str = "", group: int = 0, *, N: int, K: int, steps: tuple[int, ...] = (),
        matrices: int = 1, aligned: Sequence[bool] = (True, True, True),
    ) -> Sparse:  # fmt: skip
        """The spec of a weight (N, K).

        Args:
            aligned: whether the addresses of values, metadata and scales are multiples of 16 bytes.
        """
        rows, columns = padded(N, K)
        metadata = Layout(torch.int32, (), rows, 1, aligned[1])
        scales = Layout(dtype, (), rows, 1, aligned[2]) if group else None
        col = columns // CODES[code].each
        return cls(dtype, steps, 1, col, aligned[0], None, matrices, metadata, code, group, scales)

    @property
    def is_8_bit(self) -> bool:
        """Whether the matrix is fp8, as the activations then are, too."""
        return self.dtype.itemsize == 1

    @property
    def decodes(self) -> bool:
        """Whether numbers of 8 or 4 bits are widened to 16."""
        return bool(self.code) and not self.is_8_bit

    @property
    def kind(self) -> str:
        if self.is_8_bit:
            return "sparse fp8"
        return f"sparse{CODES[self.code].bits}" if self.code else "sparse"

    @property
    def format(self) -> str:
        """The type of the kept numbers, and how many of them share a scale."""
        return f"{self.code}/{self.group}" if self.group else self.code

    @property
    def stored(self) -> torch.dtype:
        return torch.int8 if self.code else self.dtype

    @property
    def is_sparse(self) -> bool:
        return True

    @property
    def bits(self) -> float:
        """Bits for a number of the matrix: half of those of a kept number, and of its place."""
        return self.stored.itemsize * 8 / CODES[self.code].each + 1

    def strides_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Values and metadata are contiguous."""
        return torch.empty(shape, device="meta").stride()

    @property
    def staged(self) -> SparseStage | None:
        """See `Spec.staged`. Numbers of 4 bits have none, and fp8 whose last step lacks metadata."""
        if self.is_8_bit:
            return SparseStage(fp8=True) if self.col * CODES[self.code].each % FP8_STEP == 0 else None
        return SparseStage(self.code) if not self.code or self.code in DECODE else None

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The values, then the metadata and the scales, if there are any."""
        assert self.metadata is not None
        return (self, self.metadata, *([self.scales] if self.scales else []))

    def shapes(self, rows: int, cols: int, batch: tuple[int, ...], is_b: bool) -> list[tuple[int, ...]]:
        N, K = padded(cols, rows)
        # The layouts of metadata and scales have no steps between matrices.
        shared = [(self.matrices * -(-rows // self.group), N)] if self.group else []
        return [(self.matrices, N, K // CODES[self.code].each), (self.matrices * K // BLOCK, N), *shared]

    def bytes(self, rows: int, cols: int, batch: tuple[int, ...]) -> int:
        """Of each matrix that there is, with metadata and scales."""
        count = 1
        for size in batch:
            count *= size
        groups = -(-rows // self.group) if self.group else 0
        return int(min(count, self.matrices) * cols * (rows * self.bits / 8 + groups * self.dtype.itemsize))

    def usual(self, row: int, col: int) -> Sparse:
        assert self.metadata is not None
        metadata = replace(self.metadata, row=0, aligned=True)
        scales = replace(self.scales, row=0, aligned=True) if self.scales else None
        return replace(
            self, steps=(), row=row, col=col, aligned=True, matrices=1, metadata=metadata, scales=scales
        )

    def suits_tma(self, problem: Problem, is_b: bool) -> bool:
        """A descriptor over halves of the columns has no dimension for a batch."""
        assert self.metadata is not None
        return self.aligned and self.metadata.aligned and not (problem.paired and problem.batch)

    @property
    def has_aligned_rows(self) -> bool:
        return self.aligned

    def refusal(self, problem: Problem, config: Config) -> str | None:
        if not config.swap or config.rest_n:
            return "sparse weights need swap=True and, in the tile schedule, a block_n that is a power of two"
        if config.block_k % BLOCK:
            return f"block_k must be a multiple of {BLOCK} for sparse weights"
        least = LEAST_BOX * CODES[self.code].each // self.stored.itemsize
        if config.loader == "descriptor" and config.block_k < least:
            return f"block_k must be at least {least} for descriptors of sparse weights of {self.code}"
        return None

    def access(self, problem: Problem, is_b: bool, tma: bool) -> SparseAccess:
        return SparseAccess(self, problem, tma)

    def __str__(self) -> str:
        group = f"/{self.group}" if self.group else ""
        return f"{self.code or Layout.__str__(self)}{group}/2:4"


#: The device function that decodes kept numbers in registers, by the code's name.
DECODERS = {
    "": loaders.decode_stored,
    "e4m3": loaders.decode_e4m3,
    "int8": loaders.decode_int8,
    "int4": loaders.decode_int4,
}
#: Bytes of a row that a tensor descriptor loads at least.
LEAST_BOX = 16
#: Columns of a step of fp8 in `schedules.any_width`.
FP8_STEP = 128
#: Rows of each half of a weight in two halves that are adjacent.
HALF = 8


class SparseAccess(Access):
    """The loader of a sparse weight and its arguments."""

    def __init__(self, spec: Sparse, problem: Problem, tma: bool) -> None:
        self.spec, self.tma, self.paired = spec, tma, problem.paired
        self.rows, self.columns = padded(problem.N, problem.K)
        groups = -(-problem.K // spec.group) if spec.group else 0
        self.strides = (negated(spec), self.rows, self.columns // BLOCK, groups)

    def loader(self) -> Any:
        dtype = str(self.spec.dtype).removeprefix("torch.")
        code = "" if self.spec.is_8_bit else self.spec.code
        return loader(self.tma, self.paired, code, self.spec.group, dtype)

    def argument(self, tensors: Sequence[Tensor], block_rows: int, block_cols: int) -> Any:
        """The values."""
        values = tensors[0]
        if not self.tma:
            return values
        each = CODES[self.spec.code].each
        row, block = self.columns // each, [block_cols, block_rows // each]
        if self.paired:
            half = self.rows // 2
            shape, strides = [2, half, row], [half * row, row, 1]
            return TensorDescriptor(values, shape, strides, [2, block[0] // 2, block[1]])
        return TensorDescriptor(values, [self.spec.matrices * self.rows, row], [row, 1], block)

    def group_params(self, tensors: Sequence[Tensor], block_rows: int, block_cols: int) -> list[Any]:
        """The metadata, and the scales."""
        return [tensors[1], tensors[2] if self.spec.group else None]

    def stage_maps(self, tensors: Sequence[Tensor], box: int, step: int) -> list[StageMap]:
        return [self._kept(tensors[0], box, step), self._metadata(tensors[1], box, step)]

    def _kept(self, values: Tensor, box: int, step: int) -> StageMap:
        """The tensor map of kept numbers for stages."""
        each = CODES[self.spec.code].each
        row, columns = self.columns // each, step // each
        is_swizzled = columns * values.element_size() > UNSWIZZLED
        if not self.paired:
            shape, strides = (self.rows, row), (row, 1)
            return StageMap(values, shape, strides, (ROWS, columns), (box, columns), is_swizzled)
        both, half = 2 * HALF, self.rows // 2 * row
        return StageMap(
            values, (self.rows // both, 2, HALF, row), (HALF * row, half, row, 1), (ROWS // both, 2, HALF, columns),
            (box // both, 2, HALF, columns), is_swizzled,
        )  # fmt: skip

    def _metadata(self, words: Tensor, box: int, step: int) -> StageMap:
        """The tensor map of metadata for stages."""
        rows, count, blocks = self.rows, self.columns // BLOCK, step // BLOCK
        if not self.paired:
            shape, strides, behind = (rows // BLOCK, count, BLOCK), (BLOCK, rows, 1), (blocks, BLOCK)
            return StageMap(words, shape, strides, (ROWS // BLOCK, *behind), (box // BLOCK, *behind))
        both, of_half = 2 * BLOCK, (2, blocks, BLOCK)
        return StageMap(
            words, (rows // both, 2, count, BLOCK), (BLOCK, rows // 2, rows, 1), (ROWS // both, *of_half),
            (box // both, *of_half),
        )  # fmt: skip


@functools.cache
def loader(tma: bool, paired: bool, code: str, group: int, dtype: str) -> Any:
    """The loader of a kind of sparse weights; see `kernels.sparse.load_sparse`.

    Args:
        code: the code that is decoded; "" for numbers that stay as they are.
    """
    return with_constants(
        loaders.load_sparse, TMA=tma, PAIRED=paired, DECODE=DECODERS[code], EACH=CODES[code].each, GROUP=group,
        DTYPE=dtype,
    )  # fmt: skip


class SparseOperand(Operand):
    """A sparse weight (*batch, N, K) as the second operand, or its transpose.

    Args:
        weight: the weight.
        transposed: the operand is the weight as it is, (*batch, N, K), as for gradients.
    """

    def __init__(self, weight: SparseTensor, transposed: bool = False) -> None:
        self.weight, self.transposed = weight, transposed
        self.matrix = meta_proxy(weight, weight.values.device, transposed)
        self._parts = (weight.values, weight.metadata, weight.scales, weight.channel)
        self.tensors = tuple([x for x in self._parts if x is not None])
        self.places = (0, 1) if weight.scales is None else (0, 1, 2)
        self.launched = self.tensors[: len(self.places)]

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
        if channel is None or self.transposed or not self.has_outer:
            return None
        return channel if channel.dim() == 1 else channel.unsqueeze(-2)

    @property
    def outer_place(self) -> int:
        return INNER.index("channel")

    def named(self, name: str) -> list[tuple[str, Tensor]]:
        own = zip(INNER, self._parts, strict=True)
        return [(f"{name}'s {part}", x) for part, x in own if x is not None]

    def lowered(self, op: str, names: tuple[str, str], dtype: torch.dtype) -> Operand:
        if self.weight.dtype != dtype and self.weight.dtype in AUTOCAST:
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
        """A transpose is expanded, and is short-lived."""
        return DenseOperand(self.in_torch()) if self.transposed else self

    def spec(self, matrix: Spec, along: Sequence[Layout], problem: Problem) -> Spec:
        w = self.weight
        return Sparse.of(
            w.dtype, w.code, w.group_size, N=problem.N, K=problem.K, steps=matrix.steps,
            matrices=w.shape[:-2].numel(), aligned=[*[x.data_ptr() % 16 == 0 for x in self.launched], True],
        )  # fmt: skip

    @property
    def text(self) -> str:
        dtype = str(self.weight.dtype).removeprefix("torch.")
        there = "".join(["0" if x is None else "1" for x in self._parts])
        return f"sparse:{'T' if self.transposed else 'N'}:{self.weight.code}:{dtype}:{there}"

    @property
    def sizes(self) -> list[int]:
        """The group size, and the weight's shape."""
        return [self.weight.group_size, *self.weight.shape]

    @classmethod
    def rebuild(cls, facts: Sequence[str], tensors: Sequence[Tensor], sizes: Sequence[int]) -> SparseOperand:
        """See `operands.rebuild`."""
        transposed, code, dtype, there = facts
        group_size, *shape = sizes
        left = iter(tensors)
        inner = {
            name: next(left) if is_there == "1" else None for name, is_there in zip(INNER, there, strict=True)
        }
        weight = SparseTensor._assemble(tuple(shape), inner, code, getattr(torch, dtype), int(group_size))
        return cls(weight, transposed == "T")

    def axes(self, rows: str, columns: str) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = []
        for name, x in zip(INNER, self._parts, strict=True):
            if x is None:
                continue
            if name == "channel":
                found.append((*batch_axes(x, 1), columns) if self.weight._is_per_row else ("",))
            else:
                own = (columns, rows) if name == "values" else (rows, columns)
                found.append((*batch_axes(x, 2), *own))
        return found

    def sizes_of_part(self, parts: Callable[[str], int]) -> list[int]:
        return [self.weight.group_size, *shape_of_part(self.weight, parts)]

    def grain(self, axis: str) -> int:
        if axis == "K":
            return math.lcm(CUT_COLUMNS, self.weight.group_size or 1)
        return CUT_ROWS if axis == "N" else 1

    def mapped(self, dims: Sequence[int | None], rank: int, size: int, everywhere: bool) -> Operand:
        if any(dim is not None for dim in dims):
            raise NotImplementedError(
                "vmap: a sparse weight can't be mapped; map over x, or use a batch of weights"
            )
        return self

    def gradients(
        self, a: Tensor, grad: Tensor, multiply: Multiply, needs: tuple[bool, Sequence[bool]]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """The gradients of a, and of the kept numbers: those of the dense weight in their places."""
        refuse_gradients(self.named("the weight"), [needs[1][0] and bool(self.weight.code), *needs[1][1:]])
        of_a: Tensor | None = None
        of_tensors: list[Tensor | None] = [None] * len(self.tensors)
        if needs[0]:
            other = SparseOperand(self.weight, not self.transposed)
            of_a = multiply(grad, other).sum_to_size(a.shape)
        if needs[1][0]:
            found = gradient_of(self.matrix, a, grad, multiply)
            found = found if self.transposed else found.mT
            channel = self.weight.channel
            # The product is that of numbers multiplied by the channel of their row.
            found = found if channel is None else found * channel.unsqueeze(-1)
            of_tensors[0] = sampled(found, self.weight)
        return of_a, of_tensors


def sampled(dense: Tensor, weight: SparseTensor) -> Tensor:
    """The numbers of a matrix (*batch, N, K) in the places that a weight keeps, in the order of its values."""
    rows, columns = padded(*weight.shape[-2:])
    N, K = weight.shape[-2:]
    whole = torch.nn.functional.pad(dense, (0, columns - K, 0, rows - N))
    nibbles = unpacked_metadata(weight.metadata).to(torch.int64)
    at = torch.stack([nibbles & 3, nibbles >> 2], -1)
    found: Tensor = whole.unflatten(-1, (-1, GROUP)).gather(-1, at).flatten(-2)
    return found.to(weight.dtype)
