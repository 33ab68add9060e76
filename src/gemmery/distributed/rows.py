"""Rows that the ranks of a process group send each other while they multiply; see `kernels.shards`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from ..kernels.shards import begin_call, collect, wait_for_ranks
from ..launch import bound
from ..operands import Arrivals, AwaitingRows
from ..product.spec import Functions
from .calls import shared_memory, tensors_of
from .exchange import PARTIALS, RESULTS, ROWS, Memory, Shared

#: Elements that a program copies.
BLOCK = 4096
#: Rows and columns of the tiles that most large products have.
TILE = 128, 256
#: Elements of the least product that fills a GPU: about as many tiles as an H200 has multiprocessors.
LEAST_PIECE = 120 * TILE[0] * TILE[1]


class Numbers(NamedTuple):
    """The numbers after a buffer of `exchange.ROWS` and similar kinds, one for each rank.

    Attributes:
        flags: on each rank, the last call for which each of the ranks has sent all its data to this one.
        begun: on each rank, the last call that each of the ranks has begun.
    """

    flags: tuple[Tensor, ...]
    begun: tuple[Tensor, ...]

    @classmethod
    def of(cls, memory: Memory) -> Numbers:
        """Those of a memory."""
        both = [buffer[memory.size :].view(2, -1) for buffer in memory.buffers]
        return cls(tuple([x[0] for x in both]), tuple([x[1] for x in both]))

    def arrivals(self, shared: Shared, memory: Memory) -> Arrivals:
        """The counters for which the product of a call waits."""
        rank, failed = shared.rank, memory.failures.data_ptr()
        return Arrivals(self.flags[rank], memory.counters, rank, shared.ranks, failed, shared.patience)


def words_of(rows: int, columns: int, dtype: torch.dtype) -> int:
    """The size of memory for this many rows; see `exchange.ROWS`."""
    return -(-rows * columns * dtype.itemsize // 4)


# ---------------------------------------------------------------------------------------------------------------------
# Rows of all ranks


class _Rows(NamedTuple):
    """A buffer's memory for the rows of a call, and the means to send them.

    Attributes:
        whole: all rows, on this rank.
        shards: this rank's shard, on every rank.
        sent: the numbers that tell, on every rank, that this rank's shard was sent.
        begin: launches `begin_call`.
        part: a function that gives some of `whole`, from one row to the one before another, and a function that
            launches `wait_for_ranks` for the ranks whose rows these are.
    """

    whole: Tensor
    shards: tuple[Tensor, ...]
    sent: tuple[Tensor, ...]
    begin: Callable[[], None]
    part: Callable[[int, int], tuple[Tensor, Callable[[], None]]]


class GatheredRows:
    """The rows of all ranks: this rank's own, and those of the others, which arrive while the own ones are multiplied.

    Attributes:
        own: this rank's rows, (rows, columns).
        rank, ranks: this rank, and the number of ranks.
    """

    def __init__(self, shared: Shared, views: _Rows, own: Tensor) -> None:
        self.own, self.rank, self.ranks = own, shared.rank, shared.ranks
        self._views, self._shared = views, shared

    def place(self, first: int, last: int) -> None:
        """Copy some of this rank's rows to where those of the others arrive, in parallel with later work.

        Args:
            first, last: the first row and the one after the last, counted over all ranks.
        """
        start = self.rank * self.own.shape[0]
        with self._shared.beside():
            self._views.whole[first:last].copy_(self.own[first - start : last - start], non_blocking=True)

    def of(self, first: int, last: int) -> Tensor:
        """Rows of all ranks, from the first on and before the last.

        The rank's own rows are returned in place. Otherwise, later work waits until those of other ranks have arrived,
        and own ones that were placed are there.
        """
        rows, start = self.own.shape[0], self.rank * self.own.shape[0]
        if start <= first and last <= start + rows:
            count = last - first
            return self.own if count == rows else self.own.narrow(0, first - start, count)
        if first < start + rows and start < last:
            self._shared.join()
        part, wait = self._views.part(first, last)
        wait()
        return part

    def whole(self) -> Tensor:
        """The matrix of all rows; later work waits for them."""
        rows = self.own.shape[0]
        whole, wait = self._views.part(0, self.ranks * rows)
        whole.narrow(0, self.rank * rows, rows).copy_(self.own)
        wait()
        return whole


def for_rows(x: Tensor, b: Any, bias: Any, functions: Functions, group: dist.ProcessGroup) -> Shared | None:
    """The memory through which rows are gathered while they are multiplied; None if they are gathered before."""
    ranks, (rows, columns) = group.size(), x.shape
    if not columns or not rows or words_of(ranks * rows, columns, x.dtype) > ROWS.most:
        return None
    return shared_memory(x, tensors_of(x, b, bias, functions), group)


@contextmanager
def gathering(op: str, x: Tensor, shared: Shared) -> Iterator[GatheredRows]:
    """The rows of all ranks. They are sent while the body of the context runs, and stay there until the next call.

    Args:
        x: (rows, columns), of the same shape and type on all ranks.
    """
    # The copy engines send adjacent rows.
    own = x.contiguous()
    rows, columns = own.shape
    memory = shared.memory(op, ROWS, words_of(shared.ranks * rows, columns, own.dtype))
    views: _Rows = memory.view(
        (rows, columns, own.dtype, shared.patience), lambda: _rows(shared, memory, own)
    )
    views.begin()
    with shared.beside():
        # First to the rank that visits it first.
        for step in range(1, shared.ranks):
            rank = (shared.rank - step) % shared.ranks
            views.shards[rank].copy_(own, non_blocking=True)
            views.sent[rank].copy_(memory.counters, non_blocking=True)
    try:
        yield GatheredRows(shared, views, own)
    finally:
        shared.join()


@torch.inference_mode(False)
def _rows(shared: Shared, memory: Memory, x: Tensor) -> _Rows:
    rank, ranks, (rows, columns) = shared.rank, shared.ranks, x.shape
    wholes = [
        buffer[: memory.size].view(x.dtype)[: ranks * rows * columns].view(-1, columns)
        for buffer in memory.buffers
    ]
    numbers, patience, failed = Numbers.of(memory), shared.patience, memory.failures.data_ptr()

    @functools.cache
    @torch.inference_mode(False)
    def part(first: int, last: int) -> tuple[Tensor, Callable[[], None]]:
        ends = first // rows, -(-last // rows)
        wait = bound.same(
            wait_for_ranks, (numbers.flags[rank], memory.counters), lambda x: (*x, failed, *ends, patience),
            {"RANK": rank},
        )  # fmt: skip
        return wholes[rank].narrow(0, first, last - first), wait

    return _Rows(
        wholes[rank], tuple([whole[rank * rows : (rank + 1) * rows] for whole in wholes]),
        tuple([each[rank : rank + 1] for each in numbers.flags]),
        _beginning(shared, memory, numbers, waits=True), part,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Sums of a rank's rows


class Partials(NamedTuple):
    """Memory for the partial sums of a call, and the means to send them.

    Attributes:
        sends: this rank's, (rows, columns), on every rank.
        sent: the numbers that tell, on every rank, that these were sent.
        received: those of the other ranks, on this one, in the order of the ranks.
        arrivals: see `AwaitingRows`.
        begin: launches `begin_call`.
    """

    sends: tuple[Tensor, ...]
    sent: tuple[Tensor, ...]
    received: tuple[Tensor, ...]
    arrivals: Arrivals
    begin: Callable[[], None]


class PartialSums:
    """The partial sums of a call, of each rank's rows.

    Attributes:
        received: see `Partials`.
    """

    def __init__(self, op: str, shared: Shared, rows: int, columns: int, dtype: torch.dtype) -> None:
        self._shared = shared
        self._memory = shared.memory(op, PARTIALS, words_of(shared.ranks * rows, columns, dtype))
        key = rows, columns, dtype
        make = functools.partial(_partials, shared, self._memory, *key)
        self._views: Partials = self._memory.view((*key, shared.patience), make)
        self.received = self._views.received
        # The data that is being sent, which the allocator must not reuse.
        self._sent: list[Tensor] = []

    def send(self, rank: int, first: int, part: Tensor, is_last: bool) -> None:
        """Send some of a rank's rows to it.

        The call begins with the first rows: while a rank computes these, the others may still read earlier data.

        Args:
            first: the first of them.
            is_last: whether these are its last rows.
        """
        views = self._views
        if not self._sent:
            views.begin()
        self._sent.append(part)
        with self._shared.beside():
            views.sends[rank].narrow(0, first, part.shape[0]).copy_(part, non_blocking=True)
            if is_last:
                views.sent[rank].copy_(self._memory.counters, non_blocking=True)

    def behind(self, x: Tensor) -> AwaitingRows:
        """An operand for whose products tiles wait for `received`."""
        return AwaitingRows(x, self._views.arrivals)

    def end(self) -> None:
        """Makes later work wait until all rows are sent."""
        if self._sent:
            self._shared.join()


@torch.inference_mode(False)
def _partials(shared: Shared, memory: Memory, rows: int, columns: int, dtype: torch.dtype) -> Partials:
    rank, ranks = shared.rank, shared.ranks
    wholes = [
        buffer[: memory.size].view(dtype)[: ranks * rows * columns].view(ranks, rows, columns)
        for buffer in memory.buffers
    ]
    numbers = Numbers.of(memory)
    return Partials(
        tuple([whole[rank] for whole in wholes]), tuple([each[rank : rank + 1] for each in numbers.flags]),
        tuple([wholes[rank][other] for other in range(ranks) if other != rank]),
        numbers.arrivals(shared, memory), _beginning(shared, memory, numbers, waits=True),
    )  # fmt: skip


def _beginning(shared: Shared, memory: Memory, numbers: Numbers, waits: bool) -> Callable[[], None]:
    """A function that launches `begin_call`."""
    failed, patience = memory.failures.data_ptr(), shared.patience
    return bound.same(
        begin_call, (*numbers.begun, memory.counters), lambda x: (tuple(x[:-1]), x[-1], failed, patience),
        {"RANK": shared.rank, "RANKS": shared.ranks, "WAITS": waits},
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Results of all ranks


class _Results(NamedTuple):
    """Memory for the results of a call, of each rank's rows.

    Attributes:
        shards: of each result, those of every rank.
        begun: see `Numbers`.
        begin: launches `begin_call`.
    """

    shards: list[tuple[Tensor, ...]]
    begun: tuple[Tensor, ...]
    begin: Callable[[], None]


def collected(op: str, results: Sequence[Tensor], shared: Shared) -> tuple[Tensor, ...]:
    """The rows of all ranks, shard after shard, in separate memory.

    Args:
        results: each (rows, ...), of the same shape and type on all ranks, with the rank's own rows of a sum over the
            ranks. A rank has these once all ranks have computed the sum, and so have collected the results before it.
    """
    rows = results[0].shape[0]
    # In 32-bit words, at multiples of 16 bytes.
    sizes = [-(-words_of(1, x.numel(), x.dtype) // 4) * 4 for x in results]
    memory = shared.memory(op, RESULTS, sum(sizes))
    key = shared.patience, *[(x.shape, x.dtype) for x in results]
    views: _Results = memory.view(key, lambda: _results(shared, memory, results, sizes))
    for x, each in zip(results, views.shards, strict=True):
        each[shared.rank].copy_(x.reshape(-1))
    views.begin()
    made = []
    for x, each in zip(results, views.shards, strict=True):
        whole = x.new_empty(shared.ranks * rows, *x.shape[1:])
        grid = (shared.ranks * triton.cdiv(x.numel(), BLOCK),)
        collect[grid](
            whole, each, views.begun, memory.counters, memory.failures.data_ptr(), rows, x.numel() // rows,
            shared.patience, RANK=shared.rank, RANKS=shared.ranks, BLOCK=BLOCK,
        )  # fmt: skip
        made.append(whole)
    return tuple(made)


@torch.inference_mode(False)
def _results(shared: Shared, memory: Memory, results: Sequence[Tensor], sizes: Sequence[int]) -> _Results:
    shards, at = [], 0
    for x, size in zip(results, sizes, strict=True):
        shards.append(tuple([each[at : at + size].view(x.dtype)[: x.numel()] for each in memory.buffers]))
        at += size
    numbers = Numbers.of(memory)
    return _Results(shards, numbers.begun, _beginning(shared, memory, numbers, waits=False))
