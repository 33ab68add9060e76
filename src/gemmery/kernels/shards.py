"""Rows in shards, one for each of several GPUs: a rank sends its shard, and the others wait for it.

A product of rows that all ranks have a shard of begins with the rank's own shard, while the others arrive: the copy
engines of the other GPUs write them into a buffer of this one, each followed by the number of the call. A kernel waits
for that number before the product of these rows. A product that is summed over ranks, and whose rows then belong to one
rank each, begins with the rows of others, which are sent to their owners likewise. The rank's own rows come last, and
each tile waits for those of the other ranks before its epilogue adds them. Flux (arxiv.org/abs/2406.06858) and QuACK's
all-gather (github.com/Dao-AILab/quack) overlap communication with products likewise; torch's async TP multiplies shard
after shard, too.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.language.target_info import cuda_capability_geq

from .numerics import INTERPRETED
from .ranks import LOOKS, time_now

#: See `dialect.in_gluon`.
IN_GLUON = tl.constexpr(False)


@triton.jit
def tile_behind(
    unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m, PLACE: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """A place, see `place`. Returns once all ranks have sent what the product's epilogue reads; see `all_there`."""
    all_there(state[len(state) - 1], RANK, RANKS)
    return PLACE(unit, state, shape, BLOCK_M, BLOCK_N, band_m)


@triton.jit
def all_there(place_args, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Waits until all ranks have sent what they send.

    `place_args` is (flags, calls, failed, patience), see `operands.awaiting`.
    """
    flags, calls, failed, patience = place_args
    call = tl.load(calls)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            wait_for(flags + rank, call, failed, rank, patience)


@triton.jit(do_not_specialize=["first", "last", "patience"])
def wait_for_ranks(flags, calls, failed, first, last, patience, RANK: tl.constexpr):
    """The same as a kernel, for some ranks: from number `first` on, before number `last`."""
    call = tl.load(calls)
    for rank in range(first, last):
        if rank != RANK:
            wait_for(flags + rank, call, failed, rank, patience)


@triton.jit
def wait_for(flag, call, failed, rank, patience):
    """Waits until a flag is a call's number, or has passed it, and makes visible what was written before it.

    Args:
        failed: where the host sees that it did not come in time.
        rank: which rank it is that sets the flag.
        patience: in microseconds, about.
    """
    if IN_GLUON:
        left = looked_at(flag, call, time_now(call) + patience.to(tl.int64) * 1000)
    else:
        looks = tl.cast(patience, tl.int64) * LOOKS // 2
        left = call - tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        while (left > 0) & (looks > 0):
            left = call - tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            looks -= 1
        if not INTERPRETED and cuda_capability_geq(9, 0):
            # Later loads through tensor maps see it, too.
            left = tl.inline_asm_elementwise(
                "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [left], dtype=tl.int32, is_pure=False, pack=1
            )
    if left > 0:
        tl.store(tl.cast(failed, tl.pointer_type(tl.int32)), rank + 1)
        # Later tiles then do not wait.
        tl.store(flag, call)


@builtin
def looked_at(flag, call, end, _semantic=None):
    """The number of calls that a flag lags; each thread polls until it is 0, or the time is `end`.

    Later loads through tensor maps see the data that was written before the flag.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred more; .reg .b64 now;\nLOOK: ld.acquire.sys.global.b32 $0, [$1]; sub.s32 $0, $2, $0;"
        "setp.le.s32 more, $0, 0; @more bra DONE; mov.u64 now, %globaltimer; setp.lt.u64 more, now, $3;"
        "@more bra LOOK;\nDONE: fence.proxy.async; }",
        "=&r,l,r,l", [flag, call, end], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@triton.jit
def tell(begun, call, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Signal to the other ranks that this one has reached a call; its earlier writes are then visible to them."""
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            tl.atomic_xchg(begun[rank] + RANK, call, sem="release", scope="sys")


@triton.jit
def meet(begun, call, failed, patience, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Wait until the other ranks have come to a call."""
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            wait_for(begun[RANK] + rank, call, failed, rank, patience)


@triton.jit(do_not_specialize=["patience"])
def begin_call(
    begun, calls, failed, patience, RANK: tl.constexpr, RANKS: tl.constexpr, WAITS: tl.constexpr
):  # fmt: skip
    """Counts a call and tells the other ranks, for which it waits with WAITS.

    Once all ranks have begun a call, they read nothing that was in the buffers before.

    Args:
        begun: for each rank a pointer to `RANKS` numbers: the last call that each of the ranks has begun.
        calls: a pointer to the number of the last call.
        failed, patience: see `wait_for`.
    """
    call = tl.load(calls) + 1
    tell(begun, call, RANK, RANKS)
    if WAITS:
        meet(begun, call, failed, patience, RANK, RANKS)
    tl.store(calls, call)


@triton.jit(do_not_specialize=["rows", "patience"])
def collect(
    whole, shards, begun, calls, failed, rows, cols, patience, RANK: tl.constexpr, RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies the shards of all ranks into one matrix, each once its rank has come to the call.

    Args:
        whole: (RANKS * rows, cols), row by row.
        shards: (rows, cols) of each rank, the same.
        begun, failed, patience: see `begin_call`.
        calls: a pointer to the number of this call.
    """
    blocks = tl.cdiv(rows * cols, BLOCK)
    # The rank's own shard comes first, without a wait.
    turn = tl.program_id(0) // blocks
    at = (tl.program_id(0) - turn * blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = rows.to(tl.int64) * cols
    call = tl.load(calls)
    for step in tl.static_range(RANKS):
        if turn == step:
            FROM: tl.constexpr = (RANK + step) % RANKS
            if FROM != RANK:
                wait_for(begun[RANK] + FROM, call, failed, FROM, patience)
            values = tl.load(shards[FROM] + at, mask=at < size)
            tl.store(whole + FROM * size + at, values, mask=at < size)
