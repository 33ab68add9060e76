"""A packed weight, written out as the dense matrix that it stands for, with a product of low rank added."""

import triton
import triton.language as tl

from .numerics import cast, dot


@triton.jit(do_not_specialize=["N"])
def unpack_weight(
    packed, channel, out, N, K, strides, sizes, added,
    LOAD: tl.constexpr, FACTOR: tl.constexpr, PER_ROW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    DTYPE: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Writes a block of `COLS` rows of N by `ROWS` columns of K per program to `out`, (matrices, N, K), contiguous.

    Args:
        packed, strides, sizes: what `LOAD` takes as `x`, `strides` and `sizes`; it loads (ROWS, COLS) blocks of (K, N).
        channel: a float32 number for each row of N, or one for all, or None.
        added: (left, right, scale, rank), of which scale * left @ right is added before anything is rounded: (N, rank)
            and (rank, K), contiguous, of one matrix; or None.
        RANKS: ranks that are multiplied at a time.
        FACTOR: a power of two, by which what `LOAD` gives is multiplied.
        PER_ROW: whether each row of N has a `channel` of its own.
    """
    across = tl.cdiv(K, ROWS)
    blocks = tl.cdiv(N, COLS) * across
    matrix = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    row = block % across * ROWS
    col = block // across * COLS
    value = LOAD(packed, (K, N), strides, sizes, matrix, row, col, ROWS, COLS, True, True, True)
    value = value.T.to(tl.float32) * FACTOR
    at = col + tl.arange(0, COLS)
    place = matrix.to(tl.int64) * N + at
    if channel is not None:
        if PER_ROW:
            value = value * tl.load(channel + place, mask=at < N, other=0.0)[:, None]
        else:
            value = value * tl.load(channel)
    columns = row + tl.arange(0, ROWS)
    if added is not None:
        left, right, scale, rank = added
        own = tl.zeros((COLS, ROWS), tl.float32)
        for first in range(0, rank, RANKS):
            ranks = first + tl.arange(0, RANKS)
            x = tl.load(
                left + at.to(tl.int64)[:, None] * rank + ranks[None, :],
                mask=(at < N)[:, None] & (ranks < rank)[None, :], other=0.0,
            )  # fmt: skip
            y = tl.load(
                right + ranks.to(tl.int64)[:, None] * K + columns[None, :],
                mask=(ranks < rank)[:, None] & (columns < K)[None, :], other=0.0,
            )  # fmt: skip
            own = dot(x, y, own, "ieee", -1)
        value += own * scale
    inside = (at < N)[:, None] & (columns < K)[None, :]
    tl.store(out + place[:, None] * K + columns[None, :], cast(value, DTYPE), mask=inside)
