"""Quantizing: the largest magnitude of each line, the scale that follows from it, and the line as small numbers.

A line is `span` adjacent columns of a row that share a scale, or a part of them. A row has `groups` lines, the last of
which may be shorter. Blocks of lines go along the rows, or `DOWN` through rows that are neighbors in memory. x has
any strides, as `operands` has them; what is written is contiguous.

Magnitudes are compared as integers: the bits of float32 numbers without sign have the order of the numbers. A NaN is
then the largest of all, as in torch; a maximum of floats would lose it.
"""

import triton
import triton.language as tl

from .numerics import cast, widen
from .operands import batch_offset
from .overlap import let_next_begin, wait_for_earlier
from .scales import as_fp32


@triton.jit
def find_lines(block, rows, groups, LINES: tl.constexpr, DOWN: tl.constexpr):
    """The rows of a block's lines and their places in the row, each (LINES,), and which of them exist."""
    block = tl.cast(block, tl.int64)
    if DOWN:
        # All lines are at one place of adjacent rows, which the compiler can see.
        across = tl.cdiv(rows, LINES)
        row = block % across * LINES + tl.arange(0, LINES)
        return row, tl.zeros((LINES,), tl.int64) + block // across, row < rows
    else:
        first = block * LINES
        # One division of 64 bits for all lines, since they lie close to the first one.
        place = (first % groups).to(tl.int32) + tl.arange(0, LINES)
        row = first // groups + place // groups
        return row, (place % groups).to(tl.int64), row < rows


@triton.jit
def find_rows(x, rows, M, sizes, strides):
    """Pointers to the first elements of rows, which are counted through a batch."""
    steps, stride_row, _ = strides
    if len(sizes) == 0:
        return x + rows * stride_row
    else:
        return x + batch_offset(rows // M, sizes, steps) + rows % M * stride_row


@triton.jit
def load_lines(
    starts, places, inside, at, K, span, stride, LINES: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr
):
    """A block (LINES, COLS) of lines from their element `at` on as float32, with zeros outside; and the stored block.

    Returns:
        The elements, their columns and which of them exist.
    """
    cols = at + tl.arange(0, COLS)[None, :]
    if WIDE:
        cols = cols.to(tl.int64)
    else:
        places = places.to(tl.int32)
    columns = places[:, None] * span + cols
    exist = inside[:, None] & (cols < span) & (columns < K)
    block = tl.load(starts[:, None] + columns * stride, mask=exist, other=0.0)
    return widen(block), columns, exist


@triton.jit
def magnitudes(x):
    """The magnitudes of float32 numbers, as integers in the same order."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def scale_of(magnitude, LARGEST: tl.constexpr):
    """The scale with which the largest magnitude becomes the largest number; 1 if all numbers are 0."""
    scale = tl.div_rn(magnitude.to(tl.float32, bitcast=True), tl.full(magnitude.shape, LARGEST, tl.float32))
    return tl.where(scale == 0, 1.0, scale)


@triton.jit
def power_of(magnitude, EXPONENT: tl.constexpr):
    """The stored form of a scale of the MX formats, and the scale: the magnitude's power of two divided by 2^EXPONENT.

    The stored form is the exponent plus 127: 127 for a magnitude of 0, and 255, which is NaN, if it is not finite.
    """
    own = magnitude >> 23
    exponent = tl.where(own == 255, 255, tl.maximum(own - EXPONENT, 0))
    exponent = tl.where(magnitude == 0, 127, exponent).to(tl.uint8)
    return exponent, as_fp32(exponent)


@triton.jit
def line_scale(magnitude, LARGEST: tl.constexpr, EXPONENT: tl.constexpr):
    """The stored form of the scale of lines, and the scale; a power of two unless EXPONENT is None."""
    if EXPONENT is None:
        scale = scale_of(magnitude, LARGEST)
        return scale, scale
    else:
        return power_of(magnitude, EXPONENT)


@triton.jit
def quantized(x, scale, LARGEST: tl.constexpr, DTYPE: tl.constexpr):
    """float32 numbers divided by their scale, rounded to nearest even and clamped to the largest number."""
    scale = tl.broadcast_to(scale, x.shape)
    # Rounded correctly, as in torch; Triton's own quotient is an estimate.
    quotient = tl.div_rn(x, scale)
    # A NaN passes both comparisons.
    quotient = tl.where(quotient > LARGEST, LARGEST, tl.where(quotient < -LARGEST, -LARGEST, quotient))
    if tl.int8 == DTYPE:
        quotient = tl.where(quotient == quotient, quotient, 0.0)
        # Beside 3/2 * 2^23, float32 has no fractions: adding that rounds.
        return ((quotient + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        return cast(quotient, DTYPE)


@triton.jit(do_not_specialize=["rows", "M"])
def quantize_lines(
    x, data, scales, rows, groups, span, M, K, sizes, strides,
    LARGEST: tl.constexpr, EXPONENT: tl.constexpr, DTYPE: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr,
    WHOLE: tl.constexpr, DOWN: tl.constexpr, WIDE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Each line has its own scale, and a program computes a block of lines; each element of `WHOLE` lines is read once.

    Longer lines are read twice, the second time from a cache. For `EXPONENT` see `line_scale`.
    """
    wait_for_earlier(OVERLAPS)
    line, places, inside = find_lines(tl.program_id(0), rows, groups, LINES, DOWN)
    starts = find_rows(x, line, M, sizes, strides)
    ends = data + line * K
    if WHOLE:
        block, columns, exist = load_lines(starts, places, inside, 0, K, span, strides[2], LINES, COLS, WIDE)
        kept, scale = line_scale(tl.max(magnitudes(block), 1), LARGEST, EXPONENT)
        result = quantized(block, scale[:, None], LARGEST, DTYPE)
        tl.store(ends[:, None] + columns, result, mask=exist)
    else:
        most = tl.zeros((LINES, COLS), tl.int32)
        for at in range(0, span, COLS):
            block, _, _ = load_lines(starts, places, inside, at, K, span, strides[2], LINES, COLS, WIDE)
            most = tl.maximum(most, magnitudes(block))
        kept, scale = line_scale(tl.max(most, 1), LARGEST, EXPONENT)
        for at in range(0, span, COLS):
            block, columns, exist = load_lines(
                starts, places, inside, at, K, span, strides[2], LINES, COLS, WIDE
            )
            result = quantized(block, scale[:, None], LARGEST, DTYPE)
            tl.store(ends[:, None] + columns, result, mask=exist)
    let_next_begin(OVERLAPS)
    tl.store(scales + line * groups + places, kept, mask=inside)


@triton.jit(do_not_specialize=["rows", "blocks", "M"])
def largest_magnitudes(
    x, maxima, blocks, rows, groups, span, M, K, sizes, strides,
    LINES: tl.constexpr, COLS: tl.constexpr, DOWN: tl.constexpr, WIDE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Stores, for each program, the largest magnitude in its blocks of lines."""
    wait_for_earlier(OVERLAPS)
    most = tl.zeros((LINES, COLS), tl.int32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        line, places, inside = find_lines(block, rows, groups, LINES, DOWN)
        starts = find_rows(x, line, M, sizes, strides)
        part, _, _ = load_lines(starts, places, inside, 0, K, span, strides[2], LINES, COLS, WIDE)
        most = tl.maximum(most, magnitudes(part))
    let_next_begin(OVERLAPS)
    largest = tl.max(tl.max(most, 1), 0)
    tl.store(maxima + tl.program_id(0), largest.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["rows", "found", "M"])
def quantize_known(
    x, data, scales, maxima, found, rows, groups, span, M, K, sizes, strides,
    LARGEST: tl.constexpr, DTYPE: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr, FOUND: tl.constexpr,
    DOWN: tl.constexpr, WIDE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Lines whose largest magnitudes are known: one a row, or, of all together, the largest of the `found` maxima.

    Args:
        FOUND: a power of two that is not below `found`; 0 if there is one a row.
    """
    wait_for_earlier(OVERLAPS)
    line, places, inside = find_lines(tl.program_id(0), rows, groups, LINES, DOWN)
    starts = find_rows(x, line, M, sizes, strides)
    if FOUND == 0:
        # The user may give the magnitude, so a zero may have a sign.
        scale = scale_of(magnitudes(tl.load(maxima + line, mask=inside, other=0.0)), LARGEST)
        tl.store(scales + line, scale, mask=inside & (places == 0))
    else:
        each = tl.arange(0, FOUND)
        most = tl.max(magnitudes(tl.load(maxima + each, mask=each < found, other=0.0)), 0)
        scale = scale_of(tl.zeros((LINES,), tl.int32) + most, LARGEST)
        # All programs find the same.
        one = tl.arange(0, LINES) + tl.program_id(0) == 0
        tl.store(scales + tl.zeros((LINES,), tl.int32), scale, mask=one)
    block, columns, exist = load_lines(starts, places, inside, 0, K, span, strides[2], LINES, COLS, WIDE)
    let_next_begin(OVERLAPS)
    result = quantized(block, scale[:, None], LARGEST, DTYPE)
    tl.store((data + line * K)[:, None] + columns, result, mask=exist)
