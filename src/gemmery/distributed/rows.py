"""The rows of all ranks, which a product reads while they arrive; see `kernels.shards`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..kernels.shards import place_shard
from ..operands import Arrivals, ArrivingRows
from .exchange import ROWS, Memory, Shared

#: Elements that a program copies.
BLOCK = 4096


class _Views(NamedTuple):
    """A buffer's memory for the rows of a call.

    Attributes:
        whole: all rows, on this rank.
        shards: this rank's shard, on every rank.
        arrived: where every rank has the number of the last call whose shard of this rank has arrived.
        flags, begun: on this rank, see `Arrivals.flags`; on every rank, see `place_shard`.
    """

    whole: Tensor
    shards: tuple[Tensor, ...]
    arrived: tuple[Tensor, ...]
    flags: Tensor
    begun: tuple[Tensor, ...]


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
    views = _views(shared, memory, rows, columns, x.dtype)
    failed, patience = memory.failures.data_ptr(), shared.patience
    grid = (rows * triton.cdiv(columns, BLOCK),)
    place_shard[grid](
        x, views.shards[shared.rank], views.begun, memory.counters, failed, rows, columns, *x.stride(), patience,
        RANK=shared.rank, RANKS=shared.ranks, BLOCK=BLOCK,
    )  # fmt: skip
    _push(shared, memory, views)
    arrivals = Arrivals(views.flags, memory.counters, shared.rank, shared.ranks, failed, patience)
    try:
        yield ArrivingRows(views.whole, arrivals)
    finally:
        if x.is_cuda:
            torch.cuda.current_stream(x.device).wait_stream(shared.side)


def _views(shared: Shared, memory: Memory, rows: int, columns: int, dtype: torch.dtype) -> _Views:
    key = rows, columns, dtype
    found = memory.views.get(key)
    if found is None:
        rank, ranks = shared.rank, shared.ranks
        wholes = [x[: memory.size].view(dtype)[: ranks * rows * columns].view(-1, columns) for x in memory.buffers]
        numbers = [x[memory.size :].view(2, ranks) for x in memory.buffers]
        found = memory.views[key] = _Views(
            wholes[rank],
            tuple([x[rank * rows : (rank + 1) * rows] for x in wholes]),
            tuple([x[0, rank : rank + 1] for x in numbers]),
            numbers[rank][0],
            tuple([x[1] for x in numbers]),
        )
    return found


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
    side = shared.side
    side.wait_stream(torch.cuda.current_stream(own.device))
    with torch.cuda.stream(side):
        for rank in others:
            views.shards[rank].copy_(own, non_blocking=True)
            views.arrived[rank].copy_(memory.counters, non_blocking=True)
