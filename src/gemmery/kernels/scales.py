"""Block scales: scales that change along K, by which each step's product is multiplied before it is added to the sum.

If all scales are powers of two, loaders multiply the numbers by them, in bf16. A step can then be longer than the
columns that share a scale, and its product is one of bf16. This is exact within the range of bf16: a number below
2^-133 becomes 0, for any scale of the other operand, and a number from 2^128 on becomes infinite.

`scales` is (pointer, steps, stride_row, stride_k) for A and then the same for B: the scale of row `i` for the columns
`BLOCK` of K from `k` on is at `i // EVERY * stride_row + k // BLOCK * stride_k`; steps are those of the batch, negated.
Loaders take those of their own matrix after its strides, see `operands.scaled`.
The scheme is DeepSeek-V3's (arXiv:2412.19437, section 3.3.2), whose activations have a scale for 1 x 128 elements and
whose weights one for 128 x 128. Blocks of 32, with powers of two, are those of the OCP Microscaling formats (MX,
specification 1.0).
"""

import triton
import triton.language as tl

from .numerics import INTERPRETED, cast, dot, widen
from .operands import batch_offset


@triton.jit
def as_fp32(scale):
    """A scale in fp32. One of 8 bits is the exponent of a power of two (e8m0), or 255 for NaN."""
    if scale.dtype == tl.uint8:
        bits = scale.to(tl.int32) << 23
        bits = tl.where(scale == 0, 0x00400000, tl.where(scale == 255, 0x7FC00000, bits))
        return bits.to(tl.float32, bitcast=True)
    else:
        return scale


@triton.jit
def scales_of_rows(
    pointer, steps, stride_row, stride_k, sizes, batch, row, k, rows, ROWS: tl.constexpr, EVERY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The scales of `ROWS` rows from `row` on: (ROWS,), or a single number where all of them share one."""
    start = pointer + batch_offset(batch, sizes, steps) + tl.cast(k // BLOCK, tl.int64) * stride_k
    if EVERY % ROWS == 0 and EVERY >= ROWS:
        # The second half of a tile may begin after the last column.
        own = tl.load(start + tl.cast(row // EVERY, tl.int64) * stride_row, mask=row < rows, other=0)
    else:
        index = row + tl.arange(0, ROWS)
        own = tl.load(start + (index // EVERY).to(tl.int64) * stride_row, mask=index < rows, other=0)
    return as_fp32(own)


@triton.jit
def scales_at(
    pointer, steps, stride_row, stride_k, sizes, batch, index, inside, k, EVERY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The scales of the rows with the numbers `index`, of which there are those that are `inside`."""
    start = pointer + batch_offset(batch, sizes, steps) + tl.cast(k // BLOCK, tl.int64) * stride_k
    return as_fp32(tl.load(start + (index // EVERY).to(tl.int64) * stride_row, mask=inside, other=0))


@triton.jit
def scales_of_columns(
    pointer, steps, stride_row, stride_k, sizes, batch, col, k, N, COLS: tl.constexpr, EVERY: tl.constexpr,
    BLOCK: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """The scales of a tile's columns of B; with `PAIRED` half of these are of its right half, as they are loaded."""
    if PAIRED:
        index, inside = columns_of(col, N, COLS, PAIRED)
        return scales_at(pointer, steps, stride_row, stride_k, sizes, batch, index, inside, k, EVERY, BLOCK)
    else:
        return scales_of_rows(
            pointer, steps, stride_row, stride_k, sizes, batch, col, k, N, COLS, EVERY, BLOCK
        )


@triton.jit
def load_scales(
    args, shape, sizes, batch, row, col, k, ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
    EVERY_M: tl.constexpr, EVERY_N: tl.constexpr, PAIRED: tl.constexpr, RAGGED: tl.constexpr,
    GATHERS: tl.constexpr,
):  # fmt: skip
    """The scales of a step's rows and columns, see `steps`; `EVERY_M` rows of A or `EVERY_N` columns of B share one.

    Args:
        RAGGED: whether A has groups of rows, whose tiles may begin at any row.
        GATHERS: whether rows are gathered by numbers, which follow the scales of A.
    """
    M, N, _ = shape
    if GATHERS:
        at_a, steps_a, row_a, k_a, numbers, at_b, steps_b, row_b, k_b = args
    else:
        at_a, steps_a, row_a, k_a, at_b, steps_b, row_b, k_b = args
        numbers = None
    if RAGGED:
        index, inside = rows_of(row, M, ROWS, numbers)
        left = scales_at(at_a, steps_a, row_a, k_a, sizes, batch, index, inside, k, EVERY_M, STEP)
    else:
        left = scales_of_rows(at_a, steps_a, row_a, k_a, sizes, batch, row, k, M, ROWS, EVERY_M, STEP)
    right = scales_of_columns(at_b, steps_b, row_b, k_b, sizes, batch, col, k, N, COLS, EVERY_N, STEP, PAIRED)
    return left, right


@triton.jit
def add_scaled_product(
    x, y, acc, loaded, SWAP: tl.constexpr, PRECISION: tl.constexpr, IMPRECISE_ACC: tl.constexpr
):
    """`acc + x @ y * scales`, or with `SWAP` its transpose; `loaded` is what `load_scales` gives."""
    left, right = loaded
    PRODUCT: tl.constexpr = tl.int32 if x.dtype.is_int() else tl.float32
    first = y.T if SWAP else x
    second = x.T if SWAP else y
    product = dot(first, second, tl.zeros(acc.shape, PRODUCT), PRECISION, IMPRECISE_ACC)
    return acc + scaled(product, left, right, SWAP)


@triton.jit
def rows_of(row, rows, ROWS: tl.constexpr, numbers):
    """The rows of a block, and which of them there are; `numbers` says where gathered rows come from, or is None."""
    index = row + tl.arange(0, ROWS)
    inside = index < rows
    if numbers is not None:
        index = tl.load(numbers + index, mask=inside, other=0)
    return index, inside


@triton.jit
def columns_of(col, N, COLS: tl.constexpr, PAIRED: tl.constexpr):
    """A tile's columns of B, and which of them there are; with `PAIRED` half of them are of the right half."""
    if PAIRED:
        HALF: tl.constexpr = COLS // 2
        place = tl.arange(0, COLS)
        column = col // 2 + place % HALF
        return column + place // HALF * (N // 2), column < N // 2
    else:
        return rows_of(col, N, COLS, None)


@triton.jit
def powers(
    pointer, steps, stride_row, stride_k, sizes, batch, index, inside, k, K, COLS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Exponents of scales, bytes of e8m0, one for `STEP` of `COLS` columns of K from `k` on.

    Args:
        index, inside: a block's rows, and which of them there are.
    """
    step = k // STEP + tl.arange(0, COLS // STEP)
    places = index.to(tl.int64)[:, None] * stride_row + step.to(tl.int64)[None, :] * stride_k
    there = inside[:, None] & (step < tl.cdiv(K, STEP))[None, :]
    return tl.load(pointer + batch_offset(batch, sizes, steps) + places, mask=there, other=127)


@triton.jit
def powers_of_rows(
    pointer, steps, stride_row, stride_k, numbers, shape, sizes, batch, row, col, ROWS: tl.constexpr,
    COLS: tl.constexpr, STEP: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Those of a block of A (M, K) whose corner is (row, col), see `rows_of`. Its rows are never `PAIRED`."""
    rows, inside = rows_of(row, shape[0], ROWS, numbers)
    return powers(pointer, steps, stride_row, stride_k, sizes, batch, rows, inside, col, shape[1], COLS, STEP)


@triton.jit
def powers_of_columns(
    pointer, steps, stride_row, stride_k, numbers, shape, sizes, batch, row, col, ROWS: tl.constexpr,
    COLS: tl.constexpr, STEP: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Those of a block of B (K, N), whose columns may be `PAIRED`. `numbers` is None."""
    columns, inside = columns_of(col, shape[1], COLS, PAIRED)
    return powers(
        pointer, steps, stride_row, stride_k, sizes, batch, columns, inside, row, shape[0], ROWS, STEP
    )


@triton.jit
def rows_in_bf16(x, exponents):
    """A block of fp8 numbers times their scales, powers of two: exact within the range of bf16."""
    ROWS: tl.constexpr = x.shape[0]
    COLS: tl.constexpr = x.shape[1]
    STEPS: tl.constexpr = exponents.shape[1]
    numbers = widen(x) if INTERPRETED else x.to(tl.float32)
    numbers = numbers.reshape(ROWS, STEPS, COLS // STEPS) * as_fp32(exponents)[:, :, None]
    return cast(numbers, tl.bfloat16).reshape(ROWS, COLS)


@triton.jit
def columns_in_bf16(x, exponents):
    """The same where scales are the columns'."""
    return rows_in_bf16(x.T, exponents).T


@triton.jit
def as_column(x):
    """Scales of rows, in the shape that multiplies a block."""
    if x.type.is_block():
        return x[:, None]
    else:
        return x


@triton.jit
def as_row(x):
    """Scales of columns."""
    if x.type.is_block():
        return x[None, :]
    else:
        return x


@triton.jit
def scaled(product, left, right, SWAP: tl.constexpr):
    """A step's product, (rows, columns) or with `SWAP` the other way round, times the scales of both."""
    product = product.to(tl.float32)
    if SWAP:
        return product * (as_row(left) * as_column(right))
    else:
        return product * (as_column(left) * as_row(right))
