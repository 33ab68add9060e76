"""Loaders of packed weights, with the signature of `operands`' loaders: a block comes as numbers in fp16 or bf16.

`x` is (words, scales, shifts), each a pointer or a tensor descriptor, or the words alone if there are no scales;
shifts may be None. Scales and shifts are the group parameters. A quantization group is some rows of K. The matrix is
(K, N), as products have it, and its words are of its transpose: (matrices, strips, lines, 32), see `formats.packing`.
Scales and shifts are (matrices, groups, columns). `strides` is (steps, strips, lines, groups, columns): steps of the
batch in matrices, negated, and the sizes just named.

A loader is made for a format by `packed_access`, which gives these functions their last arguments. `unpack` also serves
kernels that load the words in another way, see `specialized`.
"""

import triton
import triton.language as tl

from .decoders import bias_of, exponent_of, multiply, multiply_add, power, subtract, unit_of, wait_of
from .numerics import cast
from .operands import batch_offset


@triton.jit
def load_words(
    words, matrix, strips, lines, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, PER: tl.constexpr,
    TMA: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """The words of the block with corner (row, col), (strips, lines, 32).

    With `PAIRED`, half of the columns come from the matrix's left half, from `col // 2` on, and half from its right
    half.
    """
    STRIPS: tl.constexpr = COLS // 16
    LINES: tl.constexpr = ROWS // (2 * PER)
    line = row // (2 * PER)
    if TMA:
        if PAIRED:
            return words.load([0, col // 32, line, 0]).reshape(STRIPS, LINES, 32)
        else:
            return words.load([matrix * strips + col // 16, line, 0])
    else:
        strip = tl.arange(0, STRIPS)
        inside = tl.full((STRIPS,), 1, tl.int1)
        if PAIRED:
            half = strips // 2
            inside = col // 32 + strip % (STRIPS // 2) < half
            strip = strip // (STRIPS // 2) * half + col // 32 + strip % (STRIPS // 2)
        else:
            strip = col // 16 + strip
            inside = strip < strips
        place = line * 32 + tl.arange(0, LINES * 32)
        pointers = words + (matrix * strips + strip).to(tl.int64)[:, None] * (lines * 32) + place[None, :]
        own = tl.load(pointers, mask=inside[:, None] & (place < lines * 32)[None, :], other=0)
        return own.reshape(STRIPS, LINES, 32)


@triton.jit
def load_group_params(
    x, group, end, col, columns, GROUPS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """Group parameters, (GROUPS, COLS), from group number `group` and column `col` on."""
    if TMA:
        if PAIRED:
            return x.load([group, 0, col // 2]).reshape(GROUPS, COLS)
        else:
            return x.load([group, col])
    else:
        column = tl.arange(0, COLS)
        if PAIRED:
            half = columns // 2
            inside = col // 2 + column % (COLS // 2) < half
            column = column // (COLS // 2) * half + col // 2 + column % (COLS // 2)
        else:
            column = col + column
            inside = column < columns
        row = group + tl.arange(0, GROUPS)
        pointers = x + row.to(tl.int64)[:, None] * columns + column[None, :]
        return tl.load(pointers, mask=(row < end)[:, None] & inside[None, :], other=0.0)


@triton.jit
def spread(params, PART: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr):
    """The group parameters for one part of each word: (groups, rows) as (rows, words)."""
    GROUPS: tl.constexpr = params.shape[0]
    ROWS: tl.constexpr = params.shape[1]
    values = params.T
    if GROUPS <= BLOCKS:
        EACH: tl.constexpr = 8 * BLOCKS // GROUPS
        values = tl.broadcast_to(values.reshape(ROWS, GROUPS, 1), (ROWS, GROUPS, EACH))
    else:
        PIECES: tl.constexpr = GROUPS // BLOCKS
        values = values.reshape(ROWS, BLOCKS, PIECES)
        if PIECES == 4:
            even, odd = values.reshape(ROWS, BLOCKS, 2, 2).split()
            values = even if PART % 2 == 0 else odd
            first, second = values.split()
            values = first if PART < 2 else second
        else:
            first, second = values.split()
            values = first if 2 * PART < PARTS else second
        values = tl.broadcast_to(values.reshape(ROWS, BLOCKS, 1), (ROWS, BLOCKS, 8))
    return values.reshape(ROWS, 8 * BLOCKS)


@triton.jit
def full_like(x, VALUE: tl.constexpr, DTYPE: tl.constexpr):
    """A block of one number."""
    return tl.full(x.shape, VALUE, tl.float32).to(DTYPE)


@triton.jit
def scaled(x, scale, shift, OFFSETS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """A number minus its zero, times the scale, plus the offset, as far as the format has them."""
    if scale is None:
        return x
    elif OFFSETS:
        return multiply_add(x, scale, shift, DTYPE, ASM)
    else:
        return multiply(x, scale, DTYPE, ASM)


@triton.jit
def number(
    x, scale, shift, EXPONENT: tl.constexpr, UNIT: tl.constexpr, ZERO: tl.constexpr, OFFSETS: tl.constexpr,
    DTYPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A number as `formats.tensor` defines it, times 2^-UNIT. `x` is the code's number times 2^-EXPONENT."""
    multiplier = full_like(x, power(EXPONENT - UNIT), DTYPE)
    zero = full_like(x, -ZERO * power(-UNIT), DTYPE)
    if shift is None and (scale is None or scale.dtype == DTYPE):
        if scale is not None:
            # The same for many numbers.
            multiplier = multiply(scale, multiplier, DTYPE, ASM)
            zero = multiply(scale, zero, DTYPE, ASM)
        if ZERO != 0:
            return multiply_add(x, multiplier, zero, DTYPE, ASM)
        else:
            return multiply(x, multiplier, DTYPE, ASM)
    else:
        if shift is not None:
            SIGN: tl.constexpr = 1.0 if OFFSETS else -1.0
            shift = multiply(shift, full_like(x, SIGN * power(-UNIT), DTYPE), DTYPE, ASM)
            if not OFFSETS:
                zero = shift
        return scaled(multiply_add(x, multiplier, zero, DTYPE, ASM), scale, shift, OFFSETS, DTYPE, ASM)


@triton.jit
def biased(
    x, scale, shift, BIAS: tl.constexpr, ZERO: tl.constexpr, OFFSETS: tl.constexpr, DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """A number as `formats.tensor` defines it. `x` is the code's number plus BIAS."""
    if shift is not None and not OFFSETS:
        zero = shift
        if BIAS != 0:
            zero = cast(zero.to(tl.float32) + BIAS, DTYPE)
        x = subtract(x, zero, DTYPE, ASM)
    elif BIAS + ZERO != 0:
        x = subtract(x, full_like(x, BIAS + ZERO, DTYPE), DTYPE, ASM)
    return scaled(x, scale, shift, OFFSETS, DTYPE, ASM)


@triton.jit
def numbers(
    words, scale, shift, PART: tl.constexpr, PER: tl.constexpr, BLOCKS: tl.constexpr, DECODE: tl.constexpr,
    RUNS: tl.constexpr, CODE: tl.constexpr, ZERO: tl.constexpr, OFFSETS: tl.constexpr, DTYPE: tl.constexpr,
    ASM: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Two numbers of each column, in blocks of the words' shape, given the scales and shifts of the words."""
    WAIT: tl.constexpr = wait_of(PART, PER // 2, BLOCKS) if WAITS else -1
    UNIT: tl.constexpr = unit_of(CODE, 32 // PER, DTYPE, ASM)
    # The decoder's table already has the zero of other numbers.
    OWN: tl.constexpr = ZERO if CODE == "int" else 0
    first, second = DECODE(words, PART, RUNS, DTYPE, ASM, WAIT)
    if UNIT > 0:
        LEFT: tl.constexpr = exponent_of(CODE, 32 // PER, 0)
        RIGHT: tl.constexpr = exponent_of(CODE, 32 // PER, 1)
        first = number(first, scale, shift, LEFT, UNIT, OWN, OFFSETS, DTYPE, ASM)
        second = number(second, scale, shift, RIGHT, UNIT, OWN, OFFSETS, DTYPE, ASM)
    else:
        BIAS: tl.constexpr = bias_of(CODE, DTYPE)
        first = biased(first, scale, shift, BIAS, OWN, OFFSETS, DTYPE, ASM)
        second = biased(second, scale, shift, BIAS, OWN, OFFSETS, DTYPE, ASM)
    return first, second


@triton.jit
def part_of(
    words, scale, shift, PART: tl.constexpr, SPREAD: tl.constexpr, PER: tl.constexpr, BLOCKS: tl.constexpr,
    DECODE: tl.constexpr, RUNS: tl.constexpr, CODE: tl.constexpr, ZERO: tl.constexpr, OFFSETS: tl.constexpr,
    DTYPE: tl.constexpr, ASM: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """The numbers `2 PART` and `2 PART + 1` of each column, joined."""
    own_scale = None if scale is None else SPREAD(scale, PART, PER // 2, BLOCKS)
    own_shift = None if shift is None else SPREAD(shift, PART, PER // 2, BLOCKS)
    first, second = numbers(
        words, own_scale, own_shift, PART, PER, BLOCKS, DECODE, RUNS, CODE, ZERO, OFFSETS, DTYPE, ASM, WAITS
    )
    return tl.join(first, second)


@triton.jit
def unpack(
    words, scale, shift, ROWS: tl.constexpr, COLS: tl.constexpr, SPREAD: tl.constexpr,
    DECODE: tl.constexpr, RUNS: tl.constexpr, CODE: tl.constexpr, PER: tl.constexpr, ZERO: tl.constexpr,
    OFFSETS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """A block of words, (COLS, words of a row) as `of_rows` gives them, as numbers, (COLS, ROWS), times 2^-`unit_of`.

    Args:
        scale, shift: the block's group parameters, in the form that `SPREAD` takes.
        SPREAD: `SPREAD(params, PART, PARTS, BLOCKS)` gives what concerns a part of each word, (COLS, words).
        DECODE: of `decoders`, for the kind of number CODE, whose bits are placed in words by RUNS.
        PER: numbers in a word.
        ZERO: code that stands for 0, where there are no zero points.
        OFFSETS: whether shifts are added after the scale, or are zero points and subtracted before it.
        WAITS: whether products may be reading the registers; see `decoders`.
    """
    BLOCKS: tl.constexpr = ROWS // (8 * PER)
    ab = part_of(
        words, scale, shift, 0, SPREAD, PER, BLOCKS, DECODE, RUNS, CODE, ZERO, OFFSETS, DTYPE, ASM, WAITS
    )
    cd = part_of(
        words, scale, shift, 1, SPREAD, PER, BLOCKS, DECODE, RUNS, CODE, ZERO, OFFSETS, DTYPE, ASM, WAITS
    )
    block = tl.join(ab, cd)
    if PER == 4:
        block = block.reshape(COLS, BLOCKS, 8, 2, 2).permute(0, 1, 4, 3, 2)
    else:
        ef = part_of(
            words, scale, shift, 2, SPREAD, PER, BLOCKS, DECODE, RUNS, CODE, ZERO, OFFSETS, DTYPE, ASM, WAITS
        )
        gh = part_of(
            words, scale, shift, 3, SPREAD, PER, BLOCKS, DECODE, RUNS, CODE, ZERO, OFFSETS, DTYPE, ASM, WAITS
        )
        block = tl.join(block, tl.join(ef, gh))
        block = block.reshape(COLS, BLOCKS, 8, 2, 2, 2).permute(0, 1, 5, 4, 3, 2)
    return block.reshape(COLS, ROWS)


@triton.jit
def of_rows(own, ROWS: tl.constexpr, COLS: tl.constexpr, PER: tl.constexpr):
    """Words in the order of memory, (strips, lines, 32), as (COLS, words of a row)."""
    BLOCKS: tl.constexpr = ROWS // (8 * PER)
    # Strip, block, g, q, half, odd or even; then rows by words.
    words = own.reshape(COLS // 16, BLOCKS, 8, 4, 2, 2).permute(0, 4, 2, 1, 3, 5)
    return words.reshape(COLS, 8 * BLOCKS)


@triton.jit
def load_packed(
    x, shape, strides, sizes, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, CHECK_ROWS: tl.constexpr,
    CHECK_COLS: tl.constexpr, WIDE: tl.constexpr,
    UNPACK: tl.constexpr, PER: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """A block of a packed matrix.

    Beyond the matrix the numbers are finite. A product multiplies them by zeros, or does not store their results.

    Args:
        UNPACK: `unpack`, made for the format.
        PER: numbers in a word.
        GROUP: rows (of K) that share a scale; 0 if none do.
        TMA: whether x has tensor descriptors.
    """
    EVERY: tl.constexpr = GROUP if GROUP > 0 else ROWS
    GROUPS: tl.constexpr = ROWS // EVERY if ROWS > EVERY else 1
    words, scales, shifts = x if GROUP > 0 else (x, None, None)
    steps, strips, lines, groups, columns = strides
    matrix = batch_offset(batch, sizes, steps).to(tl.int32)
    own = load_words(words, matrix, strips, lines, row, col, ROWS, COLS, PER, TMA, PAIRED)
    group = matrix * groups + row // EVERY
    end = (matrix + 1) * groups
    scale = (
        None
        if scales is None
        else load_group_params(scales, group, end, col, columns, GROUPS, COLS, TMA, PAIRED)
    )
    shift = (
        None
        if shifts is None
        else load_group_params(shifts, group, end, col, columns, GROUPS, COLS, TMA, PAIRED)
    )
    return UNPACK(of_rows(own, ROWS, COLS, PER), scale, shift, ROWS, COLS, spread).T
