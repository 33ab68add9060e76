"""Loaders of 2:4 sparse weights, with the signature of `operands`' loaders: a block comes with its zeros.

`x` is (values, metadata, scales), as `formats.sparse` has them; values come by a pointer or a tensor descriptor,
metadata and scales, which may be None, by a pointer. The matrix is (K, N), as products have it, and what is stored is
its transpose: values are (matrices, rows, K / 2), or of int4 (matrices, rows, K / 4), metadata (matrices, K / 32, rows)
and scales (matrices, groups, rows). `strides` is (steps, rows, blocks, groups): steps of the batch in matrices,
negated, the rows that are stored of a matrix, its blocks of 32 columns and its groups. Beyond the matrix there are
zeros.
"""

import triton
import triton.language as tl

from .numerics import cast, widen
from .operands import batch_offset
from .packed import load_group_params


@triton.jit
def own_rows(col, rows, COLS: tl.constexpr, PAIRED: tl.constexpr):
    """The stored rows for the columns of a block of (K, N).

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
    PAIRED: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """The kept numbers of a block as they are stored, one value for EACH columns, (COLS, ROWS / EACH)."""
    OWN: tl.constexpr = ROWS // EACH
    if TMA:
        if PAIRED:
            return values.load([0, col // 2, row // EACH]).reshape(COLS, OWN)
        else:
            return values.load([matrix * rows + col, row // EACH])
    else:
        n, inside = own_rows(col, rows, COLS, PAIRED)
        k = row // EACH + tl.arange(0, OWN)
        pointers = values + (matrix.to(tl.int64) * rows + n)[:, None] * (32 // EACH * blocks) + k[None, :]
        return tl.load(pointers, mask=inside[:, None] & (k < 32 // EACH * blocks)[None, :], other=0)


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
def load_scales(
    scales, matrix, rows, groups, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, PAIRED: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The scale of each four columns of a block, (COLS, ROWS / 4)."""
    GROUPS: tl.constexpr = ROWS // GROUP if ROWS > GROUP else 1
    EACH: tl.constexpr = ROWS // 4 // GROUPS
    group = matrix * groups + row // GROUP
    own = load_group_params(scales, group, (matrix + 1) * groups, col, rows, GROUPS, COLS, False, PAIRED)
    spread = tl.broadcast_to(own.T.reshape(COLS, GROUPS, 1), (COLS, GROUPS, EACH))
    return spread.reshape(COLS, ROWS // 4)


@triton.jit
def placed(x, places):
    """Bytes with two integers each as words with those of four columns, of four bits each, with 8 added."""
    both = x.to(tl.int32)
    first = (both & 15) << ((places & 3) * 4)
    second = ((both >> 4) & 15) << (places & 12)
    return (first | second) ^ 0x8888


@triton.jit
def integer_at(words, scale, PLACE: tl.constexpr):
    """One of the integers of `placed`, times a scale if there is one, in float32."""
    # The lower bits of a floating-point number from 2^23 on: conversions of integers would take longer.
    bits = ((words >> (4 * PLACE)) & 15) | 0x4B000000
    number = bits.to(tl.float32, bitcast=True) - 8388616.0
    if scale is not None:
        # The product is exact.
        number *= widen(scale)
    return number


@triton.jit
def expanded(kept, places):
    """The numbers of each four columns, of the two that are kept: four blocks of (COLS, ROWS / 4)."""
    COLS: tl.constexpr = places.shape[0]
    first, second = kept.reshape(COLS, places.shape[1], 2).split()
    at_first = places & 3
    at_second = places >> 2
    zero = tl.zeros_like(first)
    return (
        tl.where(at_first == 0, first, tl.where(at_second == 0, second, zero)),
        tl.where(at_first == 1, first, tl.where(at_second == 1, second, zero)),
        tl.where(at_first == 2, first, tl.where(at_second == 2, second, zero)),
        tl.where(at_first == 3, first, tl.where(at_second == 3, second, zero)),
    )


# Decoders, one for each code of `formats.kept`: from the stored values, their places and the scale of each four
# columns, which may be None, to the numbers of the first, the second, the third and the fourth column of each four.
# They have the matrix's type, or float32, which is rounded to it afterwards.


@triton.jit
def decode_stored(kept, places, scale, KIND: tl.constexpr):
    """Numbers of 16 bits, or the bits of fp8, unchanged."""
    return expanded(kept, places)


@triton.jit
def decode_e4m3(kept, places, scale, KIND: tl.constexpr):
    """Decodes e4m3. There is no NaN among the codes: it would become 480."""
    # Sign, exponent and mantissa as float16 has them, whose exponent counts from 2^-8 of e4m3's.
    bits = kept.to(tl.int16)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return expanded(cast(half.to(tl.float32) * 256.0, KIND), places)


@triton.jit
def decode_int8(kept, places, scale, KIND: tl.constexpr):
    """Decodes integers of 8 bits."""
    return expanded(cast(kept.to(tl.float32), KIND), places)


@triton.jit
def decode_int4(kept, places, scale, KIND: tl.constexpr):
    """Decodes integers of 4 bits, times their scale."""
    words = placed(kept, places)
    a = integer_at(words, scale, 0)
    c = integer_at(words, scale, 2)
    b = integer_at(words, scale, 1)
    d = integer_at(words, scale, 3)
    return a, b, c, d


@triton.jit
def load_sparse(
    x, shape, strides, sizes, batch, row, col,
    ROWS: tl.constexpr, COLS: tl.constexpr, CHECK_ROWS: tl.constexpr, CHECK_COLS: tl.constexpr, WIDE: tl.constexpr,
    TMA: tl.constexpr, PAIRED: tl.constexpr, DECODE: tl.constexpr, EACH: tl.constexpr, GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """A block of (ROWS, COLS) of the matrix.

    `operands.sparse` gives it its last arguments.

    Args:
        TMA: whether values come through a descriptor, over (matrices * rows, K / 2), or with PAIRED over
            (2, rows / 2, K / 2).
        PAIRED: see `own_rows`.
        DECODE: a decoder, see above.
        EACH: columns of which one of the values has the kept numbers.
        GROUP: rows (of K) that share a scale; 0 if none do.
        DTYPE: of the matrix, as a text. Kept numbers of fp8 are loaded as integers.
    """
    values, metadata, scales = x
    steps, rows, blocks, groups = strides
    KIND: tl.constexpr = tl.float16 if DTYPE == "float16" else tl.bfloat16
    matrix = batch_offset(batch, sizes, steps).to(tl.int32)
    kept = load_values(values, matrix, rows, blocks, row, col, ROWS, COLS, TMA, PAIRED, EACH)
    places = load_places(metadata, matrix, rows, blocks, row, col, ROWS, COLS, PAIRED)
    scale = None
    if GROUP > 0:
        scale = load_scales(scales, matrix, rows, groups, row, col, ROWS, COLS, PAIRED, GROUP)
    a, b, c, d = DECODE(kept, places, scale, KIND)
    block = tl.join(tl.join(a, c), tl.join(b, d)).reshape(COLS, ROWS).T
    if block.dtype == tl.float32:
        # Rounded last: for sm_100 Triton (3.7) moves a reshape that is the last step into shared memory, and then
        # rejects its layout.
        block = cast(block, KIND)
    if DTYPE == "float8_e4m3fn":
        block = block.to(tl.float8e4nv, bitcast=True)
    return block
