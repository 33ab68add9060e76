"""Block-sparse matrices: torch's BSR and BSC tensors in the form for products, and the data that is prepared once per
pattern.

A pattern says which blocks are stored. A product visits it line by line: block columns of its second operand, or block
rows of its first one. `Pattern` has the tables for both, and for blocks that are sampled, and is kept as long as the
indices are in memory.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

#: Sizes of blocks that kernels take.
SIZES = (16, 32, 64, 128)
#: Types of values.
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LAYOUTS = (torch.sparse_bsr, torch.sparse_bsc)


class Stored(NamedTuple):
    """A block-sparse matrix.

    Attributes:
        values: (count, block, block), each block as in the matrix, row- or column-major.
        compressed: the index of each line's first block, and after the last line the number of blocks.
        plain: (count,), the place of each block in its line.
        blocks: of the matrix, along its rows' and its columns' direction.
        by_rows: whether lines are block rows, as in BSR; otherwise block columns.
        prepared: its pattern, where that was looked up already.
    """

    values: Tensor
    compressed: Tensor
    plain: Tensor
    blocks: tuple[int, int]
    by_rows: bool
    prepared: Pattern | None = None

    @property
    def mT(self) -> Stored:
        """The transpose."""
        return Stored(
            self.values.mT, self.compressed, self.plain, self.blocks[::-1], not self.by_rows, self.prepared
        )

    @property
    def pattern(self) -> Pattern:
        """The data that is prepared from its indices."""
        # A call comes through `stored` first. If an operator or autograd passes only the tensors, their version differs
        # from the sparse tensor's, and another comparison would wait for the GPU.
        return self.prepared or _met(self.compressed, self.plain, self.blocks[self.by_rows])


class Lines(NamedTuple):
    """The order in which a product visits the lines of a block-sparse operand.

    Attributes:
        lines: (lines, 3), int32, for each line in the order of visits its number and the range of its steps. The
            longest comes first, so that none is left for the end.
        steps: for each step the block along K.
        slots: for each step the number of the stored block; None if that is the step's own.
    """

    lines: Tensor
    steps: Tensor
    slots: Tensor | None


class Pattern:
    """The tables of a pattern.

    Args:
        compressed, plain: see `Stored`.
        across: the number of blocks in a line, stored or not.
    """

    def __init__(self, compressed: Tensor, plain: Tensor, across: int) -> None:
        # Copies, so that the kept object does not keep the indices.
        self._ends, self._plain = (x.to(torch.int32, copy=True) for x in (compressed, plain))
        self._across = across

    def has(self, compressed: Tensor, plain: Tensor) -> bool:
        """Whether it is the pattern of indices, which have its shapes. It waits for the GPU."""
        return torch.equal(self._ends, compressed.int()) and torch.equal(self._plain, plain.int())

    def check(self, what: str) -> None:
        """ValueError unless indices are in order and within the matrix. It waits for the GPU."""
        ends, plain = self._ends, self._plain
        right = (ends[:1] == 0).all() & (ends[-1:] == len(plain)).all() & (ends.diff() >= 0).all()
        inside = (plain >= 0).all() & (plain < self._across).all()
        found = torch.stack([right, inside]).tolist()
        if not found[0]:
            raise ValueError(
                f"{what}: its compressed indices must begin with 0, end with {len(plain)} and not decrease"
            )
        if not found[1]:
            raise ValueError(f"{what}: its plain indices must be from 0 to {self._across - 1}")

    def prepare(self) -> None:
        """Makes all tables, and waits for the GPU: later products may be on any stream."""
        _ = self.along, self.across
        if self._ends.is_cuda:
            torch.cuda.current_stream(self._ends.device).synchronize()

    @functools.cached_property
    def lines_of(self) -> Tensor:
        """(count,), int32, the line of each stored block."""
        numbers = torch.arange(len(self._ends) - 1, device=self._ends.device, dtype=torch.int32)
        return _table(torch.repeat_interleave(numbers, self._ends.diff(), output_size=len(self._plain)))

    @functools.cached_property
    def places_of(self) -> Tensor:
        """(count,), int32, where each stored block stands in its line."""
        return _table(self._plain)

    @functools.cached_property
    def along(self) -> Lines:
        """Visits of the lines that the indices are compressed along."""
        return Lines(_visits(self._ends), self.places_of, None)

    @functools.cached_property
    def across(self) -> Lines:
        """Visits of the lines in the other direction: those of the transposed pattern."""
        places, slots = torch.sort(self._plain, stable=True)
        numbers = torch.arange(self._across + 1, device=slots.device, dtype=torch.int32)
        ends = torch.searchsorted(places, numbers, out_int32=True)
        lines = self.lines_of[slots] if len(slots) else self.lines_of
        return Lines(_visits(ends), _table(lines), _table(slots))


def _visits(ends: Tensor) -> Tensor:
    """`Lines.lines`, of where lines begin and the last one ends."""
    order = torch.argsort(ends.diff(), descending=True, stable=True)
    return torch.stack([order, ends[:-1][order], ends[1:][order]], dim=1).int().contiguous()


def _table(numbers: Tensor) -> Tensor:
    """A table that kernels read, with memory even if no block is stored."""
    return numbers.int().contiguous() if len(numbers) else numbers.new_zeros(1, dtype=torch.int32)


# ---------------------------------------------------------------------------------------------------------------------
# What is kept


class _Kept(NamedTuple):
    """A pattern, and what its indices are known by.

    Attributes:
        version, counter: of the sparse tensor that was looked at last, see `_counter_of`; None if it has none.
        numbers: keep the numbers of the storages from later ones.
        ends: forget the pattern when a storage is freed.
    """

    pattern: Pattern
    version: int | None
    counter: weakref.ref[Tensor] | None
    numbers: tuple[StorageWeakRef, ...]
    ends: tuple[weakref.ref[Any], ...]

    def is_of(self, x: Tensor) -> bool:
        """Whether the indices of a sparse tensor, in this memory, can't have changed through it."""
        version = _version_of(x)
        if version is None or version != self.version:
            return False
        # Two tensors that count for themselves are comparable only before the first change.
        return version == 0 or (self.counter is not None and self.counter() is _counter_of(x))


_patterns: dict[Any, _Kept] = {}


def pattern_of(x: Tensor, compressed: Tensor, plain: Tensor, across: int, what: str) -> Pattern:
    """The pattern of a sparse tensor, kept until the memory of its indices is freed or they change in place.

    A sparse tensor gives its indices as new tensors every time, so they are recognized by their memory. It waits
    for the GPU where the pattern is new or the tensor has changed.

    Args:
        compressed, plain: the indices of x.
        what: how messages call the matrix.

    Raises:
        ValueError: indices are out of order.
        RuntimeError: it would have to wait, and a CUDA graph is being captured.
    """
    key = (_look(compressed), _look(plain), across)
    kept = _patterns.get(key)
    if kept is not None and kept.is_of(x):
        return kept.pattern
    version = _version_of(x)
    if _is_capturing(compressed):
        raise RuntimeError(f"{what}: {_not_captured(kept is not None, version)}")
    # A sparse tensor has one version for its values and its indices.
    if kept is not None and kept.pattern.has(compressed, plain):
        pattern = kept.pattern
    else:
        pattern = _prepared(compressed, plain, across, what)
    _keep(key, pattern, compressed, plain, x, version)
    return pattern


def _met(compressed: Tensor, plain: Tensor, across: int) -> Pattern:
    """The last pattern of this memory; a new one for unknown indices."""
    key = (_look(compressed), _look(plain), across)
    kept = _patterns.get(key)
    if kept is not None:
        return kept.pattern
    if _is_capturing(compressed):
        raise RuntimeError(f"block-sparse: {_not_captured(False, None)}")
    pattern = _prepared(compressed, plain, across, "block-sparse")
    _keep(key, pattern, compressed, plain, None, None)
    return pattern


def _prepared(compressed: Tensor, plain: Tensor, across: int, what: str) -> Pattern:
    pattern = Pattern(compressed, plain, across)
    pattern.check(what)
    pattern.prepare()
    return pattern


def _keep(
    key: Any, pattern: Pattern, compressed: Tensor, plain: Tensor, x: Tensor | None, version: int | None
) -> None:
    storages = compressed.untyped_storage(), plain.untyped_storage()
    # torch keeps a storage's Python object as long as the storage.
    ends = tuple([weakref.ref(storage, lambda _: _patterns.pop(key, None)) for storage in storages])
    numbers = tuple([StorageWeakRef(storage) for storage in storages])
    _patterns[key] = _Kept(
        pattern, version, None if x is None else weakref.ref(_counter_of(x)), numbers, ends
    )


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _not_captured(is_met: bool, version: int | None) -> str:
    """Why indices can't be looked at while a CUDA graph is captured, and what to do."""
    if not is_met:
        return "the pattern is new, and its preparation can't be captured; call it once before capture"
    if version is None:
        return (
            "it was made in inference mode, so its indices are compared at each call, which can't be captured; make it "
            "outside inference mode"
        )
    return "the values or the indices have changed since the last call; call it once before capture"


def _look(x: Tensor) -> Any:
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype


def _version_of(x: Tensor) -> int | None:
    """The number of writes to a tensor; None for a tensor without a counter, as in inference mode."""
    return None if x.is_inference() else x._version


def _counter_of(x: Tensor) -> Tensor:
    """The tensor whose version another has: a transposed one has that of the tensor that it is a view of."""
    return x if x._base is None else x._base


class _Known(NamedTuple):
    tensor: weakref.ref[Tensor]
    version: int
    stored: Stored


#: The prepared patterns of sparse tensors, by the objects' ids.
_known: dict[int, _Known] = {}


def is_blocks(x: Any) -> bool:
    """Whether something is a block-sparse tensor; compiled code has none."""
    # The compiler can't ask for a layout in a backward pass.
    return isinstance(x, Tensor) and not torch.compiler.is_compiling() and x.layout in LAYOUTS


def known(x: Tensor) -> Stored | None:
    """`stored` of a known tensor that has not changed since; not while gradients are recorded."""
    found = _known.get(id(x))
    if found is None or found.tensor() is not x or (torch.is_grad_enabled() and x.requires_grad):
        return None
    return found.stored if found.version == _version_of(x) else None


def stored(op: str, name: str, x: Tensor) -> Stored:
    """A BSR or BSC tensor, checked. For a new pattern, it waits for the GPU.

    Raises:
        ValueError: its blocks are not square, of a size that there is no kernel for, or it is a batch; or its indices
            are out of order.
        TypeError: its values are of a type that there is no kernel for.
    """
    found = known(x)
    if found is not None and not torch.is_grad_enabled():
        return found
    if found is None:
        if x.dim() != 2:
            raise ValueError(
                f"{op}: {name} is {tuple(x.shape)}; block-sparse, it must be a matrix and no batch"
            )
        # The kept object must not be a view of the tensor, because the tensor would then be kept too.
        found = _checked(op, name, x.data, x)
        if (version := _version_of(x)) is not None and not x.requires_grad:
            number = id(x)
            _known[number] = _Known(weakref.ref(x, lambda _: _known.pop(number, None)), version, found)
    if not torch.is_grad_enabled():
        return found
    # From the tensor itself: its values may have a gradient, and autograd sees changes before a backward pass.
    values, compressed, plain = _parts(x)
    return found._replace(values=values, compressed=compressed, plain=plain)


def _checked(op: str, name: str, data: Tensor, x: Tensor) -> Stored:
    """The stored blocks of a matrix, given its data; see `stored` for errors."""
    shape = data.values().shape
    if len(shape) != 3 or shape[1] != shape[2] or shape[1] not in SIZES:
        sizes = ", ".join([f"{size}x{size}" for size in SIZES])
        given = "x".join(map(str, shape[1:]))
        raise ValueError(f"{op}: {name} has blocks of {given}; they must be one of {sizes}")
    if data.dtype not in TYPES:
        types = ", ".join([str(dtype) for dtype in TYPES])
        raise TypeError(f"{op}: {name} is block-sparse and {data.dtype}; its type must be one of {types}")
    count, block = shape[:2]
    if max(count * block, *data.shape) >= 1 << 30:
        raise ValueError(
            f"{op}: {name} is {tuple(data.shape)} with {count} blocks of {block}x{block}; rows, columns, and rows of "
            f"all blocks must be fewer than 2^30; split the matrix"
        )
    by_rows = data.layout == torch.sparse_bsr
    values, compressed, plain = _parts(data)
    blocks = (data.shape[0] // block, data.shape[1] // block)
    pattern = pattern_of(x, compressed, plain, blocks[by_rows], f"{op}: {name}")
    return Stored(values, compressed, plain, blocks, by_rows, pattern)


def _parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The values of a matrix, each block row- or column-major, and its indices."""
    values, block = x.values(), x.values().shape[-1]
    if values.stride() not in ((block * block, block, 1), (block * block, 1, block)):
        values = values.contiguous()
    if x.layout == torch.sparse_bsr:
        return values, x.crow_indices(), x.col_indices()
    return values, x.ccol_indices(), x.row_indices()
