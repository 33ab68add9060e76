"""Loaders of 2:4 sparse weights, with the signature of `operands`' loaders: a block comes with its zeros between.

`x` is (values, metadata, None), as `formats.sparse` has them; values come by a pointer or a tensor descriptor, metadata
by a pointer. The matrix is (K, N), as products have it, and what is stored is its transpose: values are
(matrices, rows, K / 2), metadata (matrices, K / 32, rows). `strides` is (steps, rows, blocks): steps of the batch in
matrices, negated, the rows that are stored of a matrix, and its blocks of 32 columns. Beyond the matrix there are
zeros.
"""

import triton
import triton.language as tl

from .numerics import cast
from .operands import batch_offset


@triton.jit
def own_rows(col, rows, COLS: tl.constexpr, PAIRED: tl.constexpr):
    """The rows of what is stored for the columns of a block of (K, N).

    With `PAIRED`, half of them are of the upper half of the rows, from `col // 2` on, and half of the lower one.
    """
    n = tl.arange(0, COLS)
    if PAIRED:
        HALF: tl.constexpr = COLS // 2
        inside = col // 2 + n % HALF
        return n // HALF * (rows // 2) + inside, inside < rows // 2
    else:
        return col + n, col + n < rows


@triton.jit
def load_values(
    values, matrix, rows, blocks, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """The kept numbers of a block, (COLS, ROWS / 2)."""
    HALF: tl.constexpr = ROWS // 2
    if TMA:
        if PAIRED:
            return values.load([0, col // 2, row // 2]).reshape(COLS, HALF)
        else:
            return values.load([matrix * rows + col, row // 2])
    else:
        n, inside = own_rows(col, rows, COLS, PAIRED)
        k = row // 2 + tl.arange(0, HALF)
        pointers = values + (matrix.to(tl.int64) * rows + n)[:, None] * (16 * blocks) + k[None, :]
        return tl.load(pointers, mask=inside[:, None] & (k < 16 * blocks)[None, :], other=0)


@triton.jit
def load_places(
    metadata, matrix, rows, blocks, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, PAIRED: tl.constexpr
):  # fmt: skip
    """The metadata of a block, four bits for each four numbers, (COLS, ROWS / 4)."""
    n, inside = own_rows(col, rows, COLS, PAIRED)
    # Of 16 columns each.
    part = row // 16 + tl.arange(0, ROWS // 16)
    in_block = n % 32 // 16 * 2 + n % 8 * 4 + n // 32 * 32
    word = (part // 2)[None, :] * rows + (in_block[:, None] + (part % 2)[None, :])
    pointers = metadata + matrix.to(tl.int64) * blocks * rows + word
    words = tl.load(pointers, mask=inside[:, None] & (part < 2 * blocks)[None, :], other=0)
    halves = words >> (n % 16 // 8 * 16)[:, None]
    bits = (halves[:, :, None] >> (4 * tl.arange(0, 4))[None, None, :]) & 15
    return bits.reshape(COLS, ROWS // 4)


@triton.jit
def number_of(x, CODE: tl.constexpr, DTYPE: tl.constexpr):
    """Kept numbers in the matrix's type, of their codes if they have 8 bits."""
    if CODE == "e4m3":
        # Sign, exponent and mantissa as float16 has them, whose exponent counts from 2^-8 of e4m3's.
        bits = x.to(tl.int16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return cast(half.to(tl.float32) * 256.0, DTYPE)
    elif CODE == "int8":
        return cast(x.to(tl.float32), DTYPE)
    else:
        return x


@triton.jit
def load_sparse(
    x, shape, strides, sizes, batch, row, col,
    ROWS: tl.constexpr, COLS: tl.constexpr, CHECK_ROWS: tl.constexpr, CHECK_COLS: tl.constexpr, WIDE: tl.constexpr,
    TMA: tl.constexpr, PAIRED: tl.constexpr, CODE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A block of (ROWS, COLS) of the matrix.

    `operands.sparse` gives it its last arguments.

    Args:
        TMA: whether values come through a descriptor, over (matrices * rows, K / 2), or with PAIRED over
            (2, rows / 2, K / 2).
        PAIRED: see `own_rows`.
        CODE: what 8-bit numbers stand for; "" for those that stay as they are.
        DTYPE: of the matrix, as a text. Kept numbers of fp8 are loaded as integers.
    """
    values, metadata, _ = x
    steps, rows, blocks = strides
    KIND: tl.constexpr = tl.float16 if DTYPE == "float16" else tl.bfloat16
    matrix = batch_offset(batch, sizes, steps).to(tl.int32)
    kept = load_values(values, matrix, rows, blocks, row, col, ROWS, COLS, TMA, PAIRED)
    places = load_places(metadata, matrix, rows, blocks, row, col, ROWS, COLS, PAIRED)
    first, second = number_of(kept, CODE, KIND).reshape(COLS, ROWS // 4, 2).split()
    at_first = places & 3
    at_second = places >> 2
    zero = tl.zeros_like(first)
    even = tl.join(
        tl.where(at_first == 0, first, tl.where(at_second == 0, second, zero)),
        tl.where(at_first == 2, first, tl.where(at_second == 2, second, zero)),
    )
    odd = tl.join(
        tl.where(at_first == 1, first, tl.where(at_second == 1, second, zero)),
        tl.where(at_first == 3, first, tl.where(at_second == 3, second, zero)),
    )
    block = tl.join(even, odd).reshape(COLS, ROWS).T
    if DTYPE == "float8_e4m3fn":
        block = block.to(tl.float8e4nv, bitcast=True)
    return block
