"""Rows in shards, one for each of several GPUs: in which order a rank visits them, and how it waits for them.

A product of rows that all ranks have a shard of begins with the rank's own shard, while the others arrive: the copy
engines of the other GPUs write them into a buffer of this one, each followed by the number of the call. Tiles wait for
that number. A product whose rows are summed over ranks, and then belong to one rank each, begins with rows of others.
Both orders keep the links busy while the tensor cores are. Tiles have rows of one shard. Flux (arxiv.org/abs/2406.06858) and QuACK's all-gather
(github.com/Dao-AILab/quack) work likewise.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from .ranks import LOOKS, time_now

#: See `dialect.in_gluon`.
IN_GLUON = tl.constexpr(False)


@triton.jit
def of_shard(
    tile, shard, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m, PLACE: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """The place of a tile, see `place`, of those that have rows of one shard. Tile bands have rows of one, too."""
    batch, row, col, end, first_k, last_k = PLACE(tile, state, shape, BLOCK_M, BLOCK_N, band_m)
    return batch, row + shard * (shape[0] // RANKS), col, end, first_k, last_k


@triton.jit
def owned_tile(
    unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m, PLACE: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """A place where a rank sends the sums of others' rows to these, and stores its own; see `ranks.of_ranks`.

    First come as many tiles of others as there are programs. Then a rank's own tiles come between those, so that it
    sends all the time. The others have sent theirs by then: they compute tiles in the same order. What is left at the
    end are own tiles. No tile waits for one behind it, so there is no deadlock.

    There is no batch. Its place has the first of the rank's own rows, at which the output begins.
    """
    OTHERS: tl.constexpr = RANKS - 1
    programs = tl.num_programs(0)
    rows = shape[0] // RANKS
    # Of one shard.
    tiles = rows // BLOCK_M * tl.cdiv(shape[1], BLOCK_N)
    ahead = tl.minimum(tl.cdiv(programs, OTHERS), tiles)
    behind = unit - ahead * OTHERS
    group = behind // RANKS
    # A program that sends in one turn has a tile of its own in the next one.
    turn = (ahead * OTHERS + group * RANKS) // programs
    which = (behind - group * RANKS + turn) % RANKS
    mixed = tiles - ahead
    is_own = (behind >= 0) & ((group >= mixed) | (which == OTHERS))
    sent = tl.where(behind < 0, unit, ahead * OTHERS + group * OTHERS + which)
    own = tl.where(group >= mixed, behind - mixed * OTHERS, group)
    tile = tl.where(is_own, own, sent // OTHERS)
    shard = tl.where(is_own, RANK, (RANK + 1 + sent % OTHERS) % RANKS)
    _, row, col, end, first_k, last_k = of_shard(
        tile, shard, state, shape, BLOCK_M, BLOCK_N, band_m, PLACE, RANKS
    )
    return RANK * rows, row, col, end, first_k, last_k


@triton.jit
def store_owned(
    x, shape, strides, sizes, batch, row, col, value, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr,
    STORE: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """A block of the product to an output of the rank's own rows, if it is of these; `batch` is that of `owned_tile`."""
    rows = shape[0] // RANKS
    row -= batch
    if (row >= 0) & (row < rows):
        STORE(x, (rows, shape[1]), strides, sizes, 0, row, col, value, ROWS, COLS, WIDE)


@triton.jit
def arriving_tile(
    unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m, PLACE: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """A place of an order that begins with the rank's own rows, see `place`. Returns once the rows are there.

    `place_args` is (flags, calls, failed, patience), see `operands.arriving`.
    """
    batch, row, col, end, first_k, last_k = PLACE(unit, state, shape, BLOCK_M, BLOCK_N, band_m)
    row += RANK * (shape[0] // RANKS)
    row = tl.where(row < shape[0], row, row - shape[0])
    shard = row // (shape[0] // RANKS)
    # A unit beyond the last one may have no rows.
    if (shard != RANK) & (shard < RANKS):
        flags, calls, failed, patience = state[len(state) - 1]
        wait_for(flags + shard, tl.load(calls), failed, shard, patience)
    return batch, row, col, end, first_k, last_k


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
    if left > 0:
        tl.store(tl.cast(failed, tl.pointer_type(tl.int32)), rank + 1)
        # Later tiles then do not wait.
        tl.store(flag, call)


@builtin
def looked_at(flag, call, end, _semantic=None):
    """How many calls a flag is behind; each thread looks until there are none, or the time is `end`.

    What is loaded through tensor maps afterwards is what was written before the flag.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred more; .reg .b64 now;\nLOOK: ld.acquire.sys.global.b32 $0, [$1]; sub.s32 $0, $2, $0;"
        "setp.le.s32 more, $0, 0; @more bra DONE; mov.u64 now, %globaltimer; setp.lt.u64 more, now, $3;"
        "@more bra LOOK;\nDONE: fence.proxy.async; }",
        "=&r,l,r,l", [flag, call, end], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "patience"])
def collect(
    whole, shards, finished, calls, failed, rows, cols, stride, patience, RANK: tl.constexpr, RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies the shards of all ranks into one matrix, row by row, each once its rank is done with it.

    Args:
        whole: (RANKS * rows, cols), with rows `stride` elements apart.
        shards: (rows, cols) of each rank, one row behind the other.
        finished: for each rank a pointer to `RANKS` numbers: the last call that each of the ranks has finished.
        calls: a pointer to the number of this call.
        failed, patience: see `wait_for`.
    """
    block = tl.program_id(0)
    # The rank's own shard comes first, for which nobody waits.
    turn = block // tl.cdiv(rows * cols, BLOCK)
    call = tl.load(calls)
    if block == 0:
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                tl.atomic_xchg(finished[rank] + RANK, call, sem="release", scope="sys")
    at = (block - turn * tl.cdiv(rows * cols, BLOCK)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows.to(tl.int64) * cols
    for step in tl.static_range(RANKS):
        if turn == step:
            FROM: tl.constexpr = (RANK + step) % RANKS
            if FROM != RANK:
                wait_for(finished[RANK] + FROM, call, failed, FROM, patience)
            values = tl.load(shards[FROM] + at, mask=inside)
            row = at // cols
            tl.store(whole + (row + FROM * rows) * stride + at - row * cols, values, mask=inside)


@triton.jit(do_not_specialize=["rows", "patience"])
def place_shard(
    x, shard, begun, calls, failed, rows, cols, stride_row, stride_col, patience, RANK: tl.constexpr,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies this rank's shard to where all ranks' rows meet, counts the call, and waits until all ranks have begun it.

    Afterwards the others read nothing that was there before, and may be sent this call's shard.

    Args:
        x: (rows, cols), with strides.
        shard: the same of the buffer, row by row.
        begun: for each rank a pointer to `RANKS` numbers: the last call that each of the ranks has begun.
        calls: a pointer to the number of the last call.
        failed, patience: see `wait_for`.
    """
    block = tl.program_id(0)
    across = tl.cdiv(cols, BLOCK)
    row = (block // across).to(tl.int64)
    cols_of = block % across * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows) & (cols_of < cols)
    call = tl.load(calls) + 1
    if block == 0:
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                tl.atomic_xchg(begun[rank] + RANK, call, sem="release", scope="sys")
    values = tl.load(x + row * stride_row + cols_of.to(tl.int64) * stride_col, mask=inside)
    tl.store(shard + row * cols + cols_of, values, mask=inside)
    if block == 0:
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                wait_for(begun[RANK] + rank, call, failed, rank, patience)
        # Only this program reads it.
        tl.store(calls, call)
