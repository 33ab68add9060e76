"""A packed weight, written out as the dense matrix that it stands for."""

import triton
import triton.language as tl

from .numerics import cast
from .overlap import let_next_begin, wait_for_earlier


@triton.jit(do_not_specialize=["N"])
def unpack_weight(
    packed, channel, out, N, K, strides, sizes,
    LOAD: tl.constexpr, FACTOR: tl.constexpr, PER_ROW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    DTYPE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Writes a block of `COLS` rows of N by `ROWS` columns of K per program to `out`, (matrices, N, K), contiguous.

    Args:
        packed, strides, sizes: what `LOAD` takes as `x`, `strides` and `sizes`; it loads (ROWS, COLS) blocks of (K, N).
        channel: a float32 number for each row of N, or one for all, or None.
        FACTOR: a power of two, by which what `LOAD` gives is multiplied.
        PER_ROW: whether each row of N has its own `channel`.
    """
    wait_for_earlier(OVERLAPS)
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
    let_next_begin(OVERLAPS)
    columns = row + tl.arange(0, ROWS)
    inside = (at < N)[:, None] & (columns < K)[None, :]
    tl.store(out + place[:, None] * K + columns[None, :], cast(value, DTYPE), mask=inside)
