"""The rows of all ranks, which a product reads while they arrive; see `kernels.shards`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..kernels.ranks import next_product
from ..kernels.shards import collect, place_shard
from ..operands import Arrivals, ArrivingRows
from .exchange import RESULTS, ROWS, Memory, Shared

#: Elements that a program copies.
BLOCK = 4096


class _Views(NamedTuple):
    """A buffer's memory for the rows of a call, and what sends them.

    Attributes:
        whole: all rows, on this rank.
        shards: this rank's shard, on every rank.
        arrived: where every rank has the number of the last call whose shard of this rank has arrived.
        arrivals: see `ArrivingRows`.
        place: launches `place_shard`, given a shard and for how long it waits.
    """

    whole: Tensor
    shards: tuple[Tensor, ...]
    arrived: tuple[Tensor, ...]
    arrivals: Arrivals
    place: Callable[[Tensor, int], object]


def collected(op: str, results: Sequence[Tensor], shared: Shared) -> tuple[Tensor, ...]:
    """The rows of all ranks, one shard behind the other, in memory of their own.

    Args:
        results: each (rows, ...), of the same shape and type on all ranks, with the rank's own rows of a sum over the
            ranks. A rank has these once all ranks have computed it, and so have collected what they collected before.
    """
    rows = results[0].shape[0]
    # In 32-bit words, at multiples of 16 bytes.
    sizes = [-(-words_of(1, x.numel(), x.dtype) // 4) * 4 for x in results]
    memory = shared.memory(op, RESULTS, sum(sizes))
    key = tuple([(x.shape, x.dtype) for x in results])
    views = memory.views.get(key)
    if views is None:
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        views = memory.views[key] = (
            [[buffer[at : at + size].view(x.dtype)[: x.numel()] for buffer in memory.buffers]
             for x, at, size in zip(results, begins, sizes, strict=True)],
            tuple([buffer[memory.size :] for buffer in memory.buffers]),
        )  # fmt: skip
    shards, finished = views
    for x, each in zip(results, shards, strict=True):
        each[shared.rank].copy_(x.reshape(-1))
    next_product[(1,)](memory.counters)
    made = []
    for x, each in zip(results, shards, strict=True):
        whole, columns = x.new_empty(shared.ranks * rows, *x.shape[1:]), x.numel() // rows
        grid = (shared.ranks * triton.cdiv(x.numel(), BLOCK),)
        collect[grid](
            whole, tuple(each), finished, memory.counters, memory.failures.data_ptr(), rows, columns, columns,
            shared.patience, RANK=shared.rank, RANKS=shared.ranks, BLOCK=BLOCK,
        )  # fmt: skip
        made.append(whole)
    return tuple(made)


def words_of(rows: int, columns: int, dtype: torch.dtype) -> int:
    """The size of memory for so many rows; see `exchange.ROWS`."""
    return -(-rows * columns * dtype.itemsize // 4)


@contextmanager
def arriving(op: str, x: Tensor, shared: Shared) -> Iterator[ArrivingRows]:
    """The rows of all ranks, one shard behind the other, as an operand that waits for them.

    The other ranks' shards arrive while what is inside runs. Afterwards all of them are there, until the next call.

    Args:
        x: (rows, columns), of the same shape and type on all ranks.
    """
    rows, columns = x.shape
    memory = shared.memory(op, ROWS, words_of(shared.ranks * rows, columns, x.dtype))
    # What decides which kernel copies the shard.
    key = rows, columns, x.dtype, x.stride(), x.data_ptr() % 16
    views = memory.views.get(key)
    if views is None:
        views = memory.views[key] = _views(shared, memory, x)
    patience = shared.patience
    views.place(x, patience)
    _push(shared, memory, views)
    try:
        yield ArrivingRows(views.whole, views.arrivals._replace(patience=patience))
    finally:
        if x.is_cuda:
            torch.cuda.current_stream(x.device).wait_event(shared.sent)


def _views(shared: Shared, memory: Memory, x: Tensor) -> _Views:
    rank, ranks, (rows, columns) = shared.rank, shared.ranks, x.shape
    wholes = [
        buffer[: memory.size].view(x.dtype)[: ranks * rows * columns].view(-1, columns)
        for buffer in memory.buffers
    ]
    shards = tuple([whole[rank * rows : (rank + 1) * rows] for whole in wholes])
    numbers = [buffer[memory.size :].view(2, ranks) for buffer in memory.buffers]
    begun = tuple([each[1] for each in numbers])
    failed = memory.failures.data_ptr()
    arrivals = Arrivals(numbers[rank][0], memory.counters, rank, ranks, failed, shared.patience)
    grid = (rows * triton.cdiv(columns, BLOCK), 1, 1)
    strides, constants = x.stride(), (rank, ranks, BLOCK)

    def arguments(x: Tensor, patience: int) -> tuple[Any, ...]:
        return x, shards[rank], begun, memory.counters, failed, rows, columns, *strides, patience, *constants

    if not x.is_cuda:
        launch = place_shard[grid]
    else:
        # Triton's own way from a call to the kernel takes the host as long as all the rest of a call.
        launch = place_shard.warmup(*arguments(x, shared.patience), grid=grid)[grid]
    return _Views(
        wholes[rank], shards, tuple([each[0, rank : rank + 1] for each in numbers]), arrivals,
        lambda x, patience: launch(*arguments(x, patience)),
    )  # fmt: skip


def _push(shared: Shared, memory: Memory, views: _Views) -> None:
    """Send this rank's shard to all others, and behind it the number of the call; by copy engines on a GPU.

    A shard goes first to the rank that visits it first.
    """
    own = views.shards[shared.rank]
    others = [(shared.rank - step) % shared.ranks for step in range(1, shared.ranks)]
    if not own.is_cuda:
        for rank in others:
            views.shards[rank].copy_(own)
            views.arrived[rank].copy_(memory.counters)
        return
    main, side = torch.cuda.current_stream(own.device), shared.side
    shared.placed.record(main)
    side.wait_event(shared.placed)
    torch.cuda.set_stream(side)
    try:
        for rank in others:
            views.shards[rank].copy_(own, non_blocking=True)
            views.arrived[rank].copy_(memory.counters, non_blocking=True)
        shared.sent.record(side)
    finally:
        torch.cuda.set_stream(main)
