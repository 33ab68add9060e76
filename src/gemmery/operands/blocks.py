"""Block-sparse operands, and dense operands from which blocks are sampled.

A product with a block-sparse operand steps through the stored blocks of one line of it. The place of a tile is that
line, see `kernels.blocks`, and both operands' loaders look up where the blocks are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..epilogues.device import compiled, with_constants
from ..formats.blocks import Lines, Stored
from ..kernels import blocks as device
from .base import Access, Layout, Multiply, Operand, Spec
from .dense import AUTOCAST, Dense, DenseAccess, DenseOperand

if TYPE_CHECKING:
    from ..problem import Config, Problem

_LOADER = """\
def load_{name}(
    x, shape, strides, sizes, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, CHECK_ROWS: tl.constexpr,
    CHECK_COLS: tl.constexpr, WIDE: tl.constexpr
):
    {layout}{table} = strides
    rows, cols, row, col = AT(shape, batch, row, col, {given}, ROWS, COLS)
    return LOAD(x, (rows, cols), ({layout}), {batch}, row, col, ROWS, COLS, CHECK_ROWS, CHECK_COLS, WIDE)
"""


@functools.lru_cache(1024)
def located(load: Any, strides: int, at: Any, has_table: bool, has_batch: bool) -> Any:
    """A loader, see `kernels.operands`, of blocks that are elsewhere; see `kernels.blocks`.

    Args:
        load: loads them there.
        strides: how many it takes.
        at: finds their places, with a table if one follows the strides.
        has_batch: whether `load` loads from a batch, as the product has one.
    """
    text = _LOADER.format(
        name=f"{load.__name__}_{at.__name__}", layout="".join(f"stride_{i}, " for i in range(strides)),
        table="table" if has_table else "", given="table" if has_table else "None",
        batch="sizes, batch" if has_batch else "(), 0",
    )  # fmt: skip
    return compiled(text, {"LOAD": load, "AT": at})


class Located(Access):
    """A loader of blocks that are elsewhere.

    Attributes:
        inner: the matrix in memory.
        at: see `located`.
        table: the place of the table among the tensors; -1 if it is the other operand's, None for none.
    """

    def __init__(self, inner: DenseAccess, at: Any, table: int | None, has_batch: bool) -> None:
        self.inner, self.at, self.table, self.has_batch = inner, at, table, has_batch
        self.strides = inner.strides

    def loader(self) -> Any:
        return located(self.inner.loader(), self.inner.taken, self.at, self.table is not None, self.has_batch)

    def argument(self, tensors: Sequence[Tensor], block_rows: int, block_cols: int) -> Any:
        return self.inner.argument(tensors, block_rows, block_cols)

    def behind_strides(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Any, ...]:
        """The arguments of the matrix's loader, and the table, unless the other operand has it."""
        own = self.inner.behind_strides(tensors, numbers)
        return own if self.table is None or self.table < 0 else (*own, tensors[self.table])


# ---------------------------------------------------------------------------------------------------------------------
# Block-sparse operands


def rounded(steps: float) -> int:
    """A number of steps, rounded to the next of 1, 2, 3, 4, 6, 8, 12, ..., so that similar patterns share a plan."""
    size = 1
    while size < steps:
        size = size * 3 // 2 if size & (size - 1) == 0 and size > 1 else size * 4 // 3 if size > 1 else 2
    return size


@dataclass(frozen=True, slots=True)
class Blocks(Spec):
    """A block-sparse matrix; the layout is that of its stored blocks as one matrix.

    Attributes:
        block: rows and columns of a block.
        is_b: whether it is the second operand.
        average: blocks of a line on average, `rounded`.
        tables: the layouts of `formats.blocks.Lines`.
    """

    block: int = 0
    is_b: bool = False
    average: int = 0
    tables: tuple[Layout, ...] = ()

    @property
    def kind(self) -> str:
        """See `select.block_tiles`."""
        wide = " wide" if self.dtype.itemsize > 2 else ""
        return f"block {'columns' if self.is_b else 'rows'} {self.block}{wide}"

    @property
    def by_blocks(self) -> bool:
        """It is."""
        return True

    @property
    def mean_k(self) -> int:
        """See `Spec.mean_k`."""
        return self.average * self.block

    @property
    def takes_copies(self) -> bool:
        """It cannot: its matrix is not in memory."""
        return False

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Those of the stored blocks and of the tables."""
        return (self, *self.tables)

    @property
    def is_tall(self) -> bool:
        """Whether stored blocks are one below the other, and not side by side."""
        return self.col == 1

    @property
    def has_slots(self) -> bool:
        """Whether blocks are stored in another order than that of visits."""
        return len(self.tables) > 2

    def strides_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.block * self.block, self.row, self.col)

    def shapes(self, rows: int, cols: int, batch: tuple[int, ...], is_b: bool) -> list[tuple[int, ...]]:
        """See `Spec.shapes`; of a pattern with as many blocks in each line."""
        lines = (cols if is_b else rows) // self.block
        count = max(lines * self.average, 1)
        tables = [(*batch, 1, size) for size in (3 * lines, count, count)][: len(self.tables)]
        return [(count, self.block, self.block), *tables]

    def bytes(self, rows: int, cols: int, batch: tuple[int, ...]) -> int:
        """See `Layout.bytes`."""
        return (cols if self.is_b else rows) * self.average * self.block * self.dtype.itemsize

    def usual(self, row: int, col: int) -> Spec:
        row, col = (self.block, 1) if col == 1 else (1, self.block)
        tables = tuple([replace(x, steps=()) for x in self.tables])
        return replace(self, steps=(), row=row, col=col, aligned=True, tables=tables)

    def suits_tma(self, problem: Problem, is_b: bool) -> bool:
        """Rows of blocks are of 32 bytes or more."""
        return self.aligned

    def refusal(self, problem: Problem, config: Config) -> str | None:
        c, side = config, "block_n" if self.is_b else "block_m"
        if self.block % getattr(c, side) or self.block % c.block_k:
            return f"blocks of {self.block}x{self.block} need {side} and block_k that divide {self.block}"
        if c.split_k > 1 or c.tail > 1 or c.rest_n:
            return "block-sparse operands need split_k 1, tail 1 and a block_n that is a power of two"
        if self.is_b and problem.paired:
            return "columns of a block-sparse operand can't be paired"
        return None

    def access(self, problem: Problem, is_b: bool, tma: bool) -> Access:
        return BlocksAccess(self, tma)

    def __str__(self) -> str:
        about = f"{self.average} of {self.block}x{self.block} a {'column' if self.is_b else 'row'}"
        return f"{Spec.__str__(self)} sparse blocks ({about})"


class BlocksAccess(Located):
    """The loader of stored blocks, and the places of tiles."""

    def __init__(self, spec: Blocks, tma: bool) -> None:
        outside = device.OUTSIDE.value
        rows, cols = (outside, spec.block) if spec.is_tall else (spec.block, outside)
        matrix = DenseAccess(replace(spec, steps=()), rows, cols, (), tma)
        at = with_constants(device.at_stored, BLOCK=spec.block, IS_B=spec.is_b, TALL=spec.is_tall)
        super().__init__(matrix, at, 3 if spec.has_slots else None, has_batch=False)
        self.spec = spec

    def leading(self, other: Access) -> Access:
        """The other operand's, with the blocks along K that this one has."""
        assert isinstance(other, DenseAccess)
        at = with_constants(device.at_columns if self.spec.is_b else device.at_rows, BLOCK=self.spec.block)
        return Located(other, at, -1, has_batch=True)

    def given(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """See `Access.given`: the blocks along K."""
        return (tensors[2],)

    def place(self, own: Any, is_cut: bool) -> Any:
        mine = device.tile_of_block_columns if self.spec.is_b else device.tile_of_block_rows
        return with_constants(mine, BLOCK=self.spec.block)

    def place_args(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Any, ...]:
        return (tensors[1],)


class BlocksOperand(Operand):
    """A block-sparse matrix.

    Args:
        stored: (M, K) of the first operand or (K, N) of the second.
    """

    def __init__(self, stored: Stored, is_b: bool) -> None:
        self.stored, self.is_b = stored, is_b
        values = stored.values
        self.tensors = (values, stored.compressed, stored.plain)
        self.block = values.shape[-1]
        rows, cols = [size * self.block for size in stored.blocks]
        self.matrix = values.new_empty(()).expand(rows, cols)
        self.has_slots = stored.by_rows == is_b
        self.places = (0, 1, 2, 3) if self.has_slots else (0, 1, 2)

    @property
    def lines(self) -> Lines:
        """The order in which a product visits its lines."""
        pattern = self.stored.pattern
        return pattern.across if self.has_slots else pattern.along

    @property
    def values(self) -> tuple[Any, ...]:
        """The stored blocks, of which there is at least one, and the tables."""
        values, lines = self.stored.values, self.lines
        if values.shape[0] == 0:
            values = values.new_zeros(1, self.block, self.block)
        return (values, *(lines if self.has_slots else lines[:2]))

    @property
    def launched(self) -> tuple[Tensor, ...]:  # type: ignore[override]  # only where it is asked for
        """The same."""
        return self.values

    @property
    def keeps_rows(self) -> bool:
        """As the first operand."""
        return not self.is_b

    @property
    def by_blocks(self) -> bool:
        """It is."""
        return True

    def named(self, name: str) -> list[tuple[str, Tensor]]:
        return list(
            zip((name, f"the indices of {name}", f"the indices of {name}"), self.tensors, strict=True)
        )

    def lowered(self, op: str, names: tuple[str, str], dtype: torch.dtype) -> Operand:
        if self.matrix.dtype == dtype or self.matrix.dtype not in AUTOCAST:
            return self
        return BlocksOperand(self.stored._replace(values=self.stored.values.to(dtype)), self.is_b)

    def with_prologue(self, prologue: Any) -> Operand:
        raise TypeError(
            "a prologue applies only to a dense operand; apply it to the values of a block-sparse one"
        )

    def in_torch(self) -> Tensor:
        s, block = self.stored, self.block
        lines, places = s.pattern.lines_of, s.pattern.places_of
        rows, cols = (lines, places) if s.by_rows else (places, lines)
        count = s.values.shape[0]
        whole = s.values.new_zeros(*s.blocks, block, block)
        whole = whole.index_put((rows[:count].long(), cols[:count].long()), s.values, accumulate=True)
        return whole.permute(0, 2, 1, 3).reshape(self.matrix.shape)

    def spec(self, matrix: Spec, along: Sequence[Layout], problem: Problem) -> Spec:
        values, *tables = self.values
        steps = matrix.steps
        lines = max(self.stored.blocks[self.is_b], 1)
        row, col = values.stride()[1:]
        return Blocks(
            values.dtype, steps, row, col, values.data_ptr() % 16 == 0, None, self.block, self.is_b,
            rounded(self.stored.values.shape[0] / lines), tuple([Layout(x.dtype, steps, 0, 1, True) for x in tables]),
        )  # fmt: skip

    # --- for the operator --------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        s = self.stored
        return f"blocks:{int(self.is_b)}:{int(s.by_rows)}:{s.blocks[0]}:{s.blocks[1]}"

    @classmethod
    def rebuild(cls, facts: Sequence[str], tensors: Sequence[Tensor], sizes: Sequence[int]) -> BlocksOperand:
        """See `operands.rebuild`."""
        is_b, by_rows, rows, cols = map(int, facts)
        values, compressed, plain = tensors
        return cls(Stored(values, compressed, plain, (rows, cols), bool(by_rows)), bool(is_b))

    def mapped(self, dims: Sequence[int | None], rank: int, size: int, everywhere: bool) -> Operand:
        raise NotImplementedError("vmap: a product with a block-sparse operand can't be mapped")

    def gradients(
        self, a: Tensor, grad: Tensor, multiply: Multiply, needs: tuple[bool, Sequence[bool]]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """`grad @ b.mT`, and the blocks of `a.mT @ grad` that are stored."""
        of_a = multiply(grad, BlocksOperand(self.stored.mT, True)) if needs[0] else None
        of_values = None
        if needs[1][0]:
            x, y = (t if t.dim() == 2 else t.flatten(0, -2) for t in (a, grad))
            of_values = self._sampled(x.mT, y, multiply)
        return of_a, [of_values, None, None]

    def gradients_with(
        self, b: Operand, grad: Tensor, multiply: Multiply, needs: tuple[Sequence[bool], Sequence[bool]]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The same for the first operand: `a.mT @ grad`, and blocks of `grad @ b.mT`."""
        of_b: list[Tensor | None] = [None] * len(b.tensors)
        if needs[1][0]:
            of_b[0] = multiply(BlocksOperand(self.stored.mT, False), DenseOperand(grad))
        of_values = None
        if needs[0][0]:
            x, y = grad, b.matrix.mT
            if x.dim() > 2:
                # The sum over the batch is part of the product's K.
                x, y = x.movedim(-2, 0).flatten(1), y.flatten(0, -2)
            of_values = self._sampled(x, y, multiply)
        return [of_values, None, None], of_b

    def _sampled(self, x: Tensor, y: Tensor, multiply: Multiply) -> Tensor:
        """The stored blocks of `x @ y`."""
        first, second = (PickedOperand(z, self.stored, is_b) for z, is_b in ((x, False), (y, True)))
        return multiply(first, second)


# ---------------------------------------------------------------------------------------------------------------------
# Sampled blocks


class Sampled(NamedTuple):
    """An operand of sampled blocks, as public functions hand it on.

    Attributes:
        matrix: (M, K) or (K, N).
        stored: the pattern of the blocks.
    """

    matrix: Tensor
    stored: Stored


@dataclass(frozen=True, slots=True)
class Picked(Dense):
    """A matrix from which each product of a batch takes one block of rows or columns; the layout is the matrix's.

    Attributes:
        block: rows of the first operand's blocks, columns of the second one's.
        extent: the matrix's.
        table: the layout of the blocks' numbers.
    """

    block: int = 0
    extent: int = 0
    table: Layout | None = None

    @property
    def takes_copies(self) -> bool:
        """It does not: copies are of a batch of matrices."""
        return False

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Those of the matrix and of the blocks' numbers."""
        assert self.table is not None
        return (self, self.table)

    def bytes(self, rows: int, cols: int, batch: tuple[int, ...]) -> int:
        """See `Layout.bytes`: the matrix."""
        return self.extent * (rows if cols == self.block else cols) * self.dtype.itemsize

    def suits_tma(self, problem: Problem, is_b: bool) -> bool:
        return replace(self, steps=()).takes_tma(())

    def access(self, problem: Problem, is_b: bool, tma: bool) -> Access:
        rows, cols = (problem.K, self.extent) if is_b else (self.extent, problem.K)
        at = with_constants(device.at_picked, BLOCK=self.block, IS_B=is_b)
        return Located(DenseAccess(replace(self, steps=()), rows, cols, (), tma), at, 1, has_batch=False)

    def __str__(self) -> str:
        return f"{Dense.__str__(self)} by blocks of {self.block}"


class PickedOperand(Operand):
    """A matrix as an operand of a batch of products, one for each stored block of a block-sparse matrix.

    Args:
        source: (M, K) of the first operand or (K, N) of the second.
        stored: the matrix with the pattern. Only the shape of its values counts.
    """

    places = (0, 1)

    def __init__(self, source: Tensor, stored: Stored, is_b: bool) -> None:
        self.source, self.stored, self.is_b = source, stored, is_b
        self.tensors = (source, stored.compressed, stored.plain)
        count, self.block = stored.plain.shape[0], source.shape[is_b] // max(stored.blocks[is_b], 1)
        inner = source.shape[not is_b]
        shape = (count, inner, self.block) if is_b else (count, self.block, inner)
        self.matrix = source.new_empty(()).expand(shape)

    @property
    def values(self) -> tuple[Any, ...]:
        """The matrix, and the numbers of its blocks."""
        pattern = self.stored.pattern
        # Of the first operand, block rows.
        return self.source, pattern.lines_of if self.stored.by_rows != self.is_b else pattern.places_of

    @property
    def launched(self) -> tuple[Tensor, ...]:  # type: ignore[override]  # only where it is asked for
        """The same."""
        return self.values

    @property
    def keeps_rows(self) -> bool:
        """It does: each block is a separate product."""
        return True

    def named(self, name: str) -> list[tuple[str, Tensor]]:
        return [(name, self.source)]

    def lowered(self, op: str, names: tuple[str, str], dtype: torch.dtype) -> Operand:
        if self.source.dtype == dtype or self.source.dtype not in AUTOCAST:
            return self
        return PickedOperand(self.source.to(dtype), self.stored, self.is_b)

    def in_torch(self) -> Tensor:
        source, table = self.values
        blocks: Tensor = source.unflatten(int(self.is_b), (self.stored.blocks[self.is_b], self.block))
        taken: Tensor = blocks.index_select(int(self.is_b), table[: self.matrix.shape[0]])
        return taken.movedim(1, 0) if self.is_b else taken

    def spec(self, matrix: Spec, along: Sequence[Layout], problem: Problem) -> Spec:
        x, steps = self.source, matrix.steps
        table = Layout(torch.int32, steps, 0, 1, True)
        row, col = x.stride()
        aligned = x.data_ptr() % 16 == 0
        return Picked(x.dtype, steps, row, col, aligned, None, self.block, x.shape[self.is_b], table)

    # --- for the operator --------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        s = self.stored
        return f"picked:{int(self.is_b)}:{int(s.by_rows)}:{s.blocks[0]}:{s.blocks[1]}"

    @classmethod
    def rebuild(cls, facts: Sequence[str], tensors: Sequence[Tensor], sizes: Sequence[int]) -> PickedOperand:
        """See `operands.rebuild`."""
        is_b, by_rows, rows, cols = map(int, facts)
        source, compressed, plain = tensors
        return cls(source, Stored(source, compressed, plain, (rows, cols), bool(by_rows)), bool(is_b))

    def mapped(self, dims: Sequence[int | None], rank: int, size: int, everywhere: bool) -> Operand:
        raise NotImplementedError("vmap: a product of sampled blocks can't be mapped")

    def gradients_with(
        self, b: Operand, grad: Tensor, multiply: Multiply, needs: tuple[Sequence[bool], Sequence[bool]]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Products with the block-sparse matrix of the gradients of blocks."""
        assert isinstance(b, PickedOperand)
        blocks = self.stored._replace(values=grad.contiguous())
        of_a = of_b = None
        if needs[0][0]:
            of_a = multiply(BlocksOperand(blocks, False), DenseOperand(b.source.mT))
        if needs[1][0]:
            of_b = multiply(self.source.mT, BlocksOperand(blocks, True))
        return [of_a, None, None], [of_b, None, None]
