"""The parts of traced epilogues: loads of operands, stores of results, and torch's functions in Triton.

An epilogue sees one block of the output, with the corner (row, col), of a matrix of `shape` = (M, columns). Operands
come as a pointer with `strides` = (steps, stride_row, stride_col), see `operands`; a stride is 0 along a dimension that
is broadcast. An operand twice as wide as the output has a left (`half` 0) and a right half (1).
"""

import triton
import triton.language as tl

from .numerics import cast, widen
from .operands import batch_offset, beside, column_halves, load_strided, store_strided


@triton.jit
def whole(parts):
    """An integer operand: three floats that are integers, and add up to it. See `epilogues.scalar`."""
    high, middle, low = parts
    return tl.cast(high, tl.int64) + tl.cast(middle, tl.int64) + tl.cast(low, tl.int64)


#: Whether this is Gluon, which has a block where the accumulator has it; see `dialect.in_gluon`.
IN_GLUON = tl.constexpr(False)


@triton.jit
def load_block(
    x, strides, half: tl.constexpr, shape, sizes, batch, row, col,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A block of an operand that is a matrix."""
    first = x + tl.cast(shape[1], tl.int64) * strides[2] * half
    return load_strided(first, shape, strides, sizes, batch, row, col, ROWS, COLS, True, True, WIDE)


@triton.jit
def brought(block):
    """A block that was loaded, widened, where the accumulator has its elements.

    The block is split and joined, so that it passes through shared memory before it is widened. Otherwise Triton would
    convert the accumulator, which is wider, to the layout of the loaded block.
    """
    if not block.dtype.is_floating():
        return block
    elif IN_GLUON:
        return as_type(block, tl.float32)
    else:
        left, right = column_halves(as_type(block, tl.float32))
        return beside(left, right)


@triton.jit
def load_row(x, strides, half: tl.constexpr, shape, sizes, batch, col, COLS: tl.constexpr):
    """The part (1, COLS) of an operand that is the same for every row."""
    cols = col + tl.arange(0, COLS)
    offsets = (cols.to(tl.int64) + shape[1] * half) * strides[2]
    values = tl.load(x + batch_offset(batch, sizes, strides[0]) + offsets, mask=cols < shape[1], other=0.0)
    return values[None, :]


@triton.jit
def load_column(x, strides, shape, sizes, batch, row, ROWS: tl.constexpr):
    """The part (ROWS, 1) of an operand that is the same for every column."""
    rows = row + tl.arange(0, ROWS)
    offsets = rows.to(tl.int64) * strides[1]
    values = tl.load(x + batch_offset(batch, sizes, strides[0]) + offsets, mask=rows < shape[0], other=0.0)
    return values[:, None]


@triton.jit
def load_single(x, strides, sizes, batch):
    """An operand that is a single number for each matrix."""
    return tl.load(x + batch_offset(batch, sizes, strides[0]))


@triton.jit
def store_block(
    x, strides, half: tl.constexpr, shape, sizes, batch, row, col, value,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A block of a second output."""
    value = tl.broadcast_to(value, (ROWS, COLS))
    first = x + tl.cast(shape[1], tl.int64) * strides[2] * half
    store_strided(first, shape, strides, sizes, batch, row, col, value, ROWS, COLS, WIDE)


@triton.jit
def store_row_partials(
    x, strides, slot, shape, sizes, batch, row, col, value, NEUTRAL: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Stores the block's partial row reduction, (ROWS,).

    There is a place for every `slot` columns of the output. Further places that a wide block covers get the neutral
    value.
    """
    rows = row + tl.arange(0, ROWS)
    first = x + batch_offset(batch, sizes, strides[0]) + rows.to(tl.int64) * strides[1]
    # A half of a wide tile may lie beyond the last column. (Newer interpreters lose the type of a scalar's comparison
    # where it meets that of a block.)
    inside = rows < tl.where(col < shape[1], shape[0], 0)
    place = col // slot
    tl.store(first + tl.cast(place, tl.int64) * strides[2], value, mask=inside)
    last = tl.minimum(place + COLS // slot, tl.cdiv(shape[1], slot))
    for other in range(place + 1, last):
        neutral = tl.full((ROWS,), NEUTRAL, value.dtype)
        tl.store(first + tl.cast(other, tl.int64) * strides[2], neutral, mask=inside)


@triton.jit
def keep_inside(x, shape, col, NEUTRAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A block with a neutral value in the columns beyond the matrix."""
    inside = (col + tl.arange(0, COLS) < shape[1])[None, :]
    return tl.where(inside, tl.broadcast_to(x, (ROWS, COLS)), NEUTRAL)


@triton.jit
def row_exponentials(x, largest):
    """The sum of exp(x - largest) over each row, or of exp(x) where the largest is infinite: infinity or 0."""
    shift = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    return tl.sum(exp(x - shift[:, None]), 1)


@triton.jit
def truth(x):
    """Whether x is not 0. In a block: the interpreter loses the type of a scalar's comparison where it meets others."""
    block, _ = tl.broadcast(x, tl.zeros((1, 1), x.dtype))
    return block != 0


@triton.jit
def as_type(x, DTYPE: tl.constexpr):
    """`x.to(DTYPE)` as torch rounds, also in the interpreter."""
    if x.dtype == DTYPE:
        return x
    elif x.dtype.is_floating() and x.dtype.primitive_bitwidth < 32:
        return cast(widen(x), DTYPE)
    elif DTYPE.is_floating() and DTYPE.primitive_bitwidth < 32:
        return cast(x.to(tl.float32), DTYPE)
    elif tl.int1 == DTYPE:
        return x != 0
    else:
        return x.to(DTYPE)


# ---------------------------------------------------------------------------------------------------------------------
# torch's functions


@triton.jit
def exp(x):
    """The exponential. In single precision by the hardware's `exp2`, which makes 0 of results below 2^-126."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def decay(x):
    """`exp(-x)`, with the sign in the constant: Triton negates by a subtraction."""
    if x.dtype == tl.float64:
        return tl.exp(-x)
    return tl.exp2(x * -1.4426950408889634)


@triton.jit
def inverse(x):
    """`1 / x` of x >= 1. In single precision from the root: two instructions, where a quotient takes eight."""
    if x.dtype == tl.float64:
        return 1.0 / x
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def sigmoid(x):
    """`1 / (1 + exp(-x))`."""
    return inverse(1.0 + decay(x))


@triton.jit
def silu(x):
    """`x * sigmoid(x)`. In single precision off by less than 1e-6.

    `1 / (1 + u)` for u = exp(-|x|) is a cubic polynomial and one Newton step, whose error is centered. This takes
    arithmetic alone, since the exponential already keeps the unit for special functions busy.
    """
    if x.dtype == tl.float64:
        return x / (1.0 + tl.exp(-x))
    # Beyond 100 the exponential is 0, and infinity times that would be NaN.
    a = tl.minimum(tl.abs(x), 100.0)
    u = decay(a)
    r = 0.9982668531820394 + u * (-0.9428069035387165 + u * (0.6655094274135634 + u * -0.22183589631687686))
    return maximum(x, 0.0) - a * (u * (r * (2.0000015 - (r + r * u))))


@triton.jit
def gelu(x):
    """`x * Phi(x)`. In single precision Phi is `exp2` of a polynomial, which is half the work of an error function.

    The polynomial is fitted to log2(2 * Phi(-x)) for 0 <= x <= 5.5; the absolute error is below 3e-7. For results near
    0, the relative error is below 3e-4; `1 + erf(x)` cancels and is no better there.
    """
    if x.dtype == tl.float64:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    # Beyond 12 the polynomial, which is far below -24 there, would turn.
    a = tl.minimum(tl.abs(x), 12.0)
    p = -0.0007538731124366788 + a * 3.228114969226376e-05
    p = -0.4589253687518383 + a * (-0.0532490341025588 + a * (0.008003060854434696 + a * p))
    return maximum(x, 0.0) - a * tl.exp2(a * (-1.1511409888119317 + a * p) - 1.0)


@triton.jit
def gelu_tanh(x):
    """The approximation of `gelu` by tanh.

    In single precision `exp2` of a polynomial as in `gelu`, and off by less than 4e-7.
    """
    if x.dtype == tl.float64:
        return x / (1.0 + tl.exp(-1.5957691216057308 * x * (1.0 + 0.044715 * x * x)))
    # Beyond 12 the exponential is 0, and infinity times that would be NaN.
    a = tl.minimum(tl.abs(x), 12.0)
    p = -0.002613459211417337 + a * (0.00048108460271494664 + a * -3.0222685253138914e-05)
    p = -0.048998571350215674 + a * (0.003311074166023068 + a * (0.004159149462392779 + a * p))
    return maximum(x, 0.0) - a * tl.exp2(a * (-1.151030596277144 + a * (-0.4599234783011391 + a * p)) - 1.0)


@triton.jit
def tanh(x):
    """By the exponential, and near 0, where that would cancel, by its series."""
    if x.dtype == tl.float64:
        less = expm1(-2.0 * tl.abs(x))
        exact = -less / (2.0 + less)
        return tl.where(x < 0, -exact, exact)
    square = x * x
    # Fitted to tanh(x) / x for |x| <= 0.15, and off by less than 2^-25 there.
    near = x + x * square * (-0.3333217330049777 + square * 0.13166035852248498)
    root = tl.rsqrt(1.0 + tl.exp2(2.8853900817779268 * x))
    far = 1.0 - (2.0 * root) * root
    return tl.where(square < 0.0225, near, far)


@triton.jit
def softplus(x):
    """`log(1 + exp(x))`. In single precision log1p is a polynomial, off by less than 2^-24 between 0 and 1."""
    if x.dtype == tl.float64:
        return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))
    u = decay(tl.abs(x))
    p = -0.1366318827666373 + u * (
        0.07822527329026759 + u * (-0.029504821810889818 + u * 0.005232590159722691)
    )
    p = 0.33319095943521554 + u * (-0.24842975320758998 + u * (0.19105979745028995 + u * p))
    return maximum(x, 0.0) + u * (0.999999969876323 + u * (-0.49999493096991965 + u * p))


@triton.jit
def log1p(x):
    """Kahan's correction of log(1 + x) for what 1 + x rounds away."""
    y = 1.0 + x
    corrected = tl.log(y) * (x / tl.where(y == 1.0, 1.0, y - 1.0))
    return tl.where(y == 1.0, x, tl.where(y == float("inf"), y, corrected))


@triton.jit
def expm1(x):
    """Kahan's correction of exp(x) - 1 for what the subtraction cancels."""
    y = tl.exp(x)
    # If y is subnormal, its logarithm is not x.
    far = (y < 1e-20) | (y == float("inf"))
    log = tl.where((y == 1.0) | far, 1.0, tl.log(y))
    corrected = (y - 1.0) * (x / log)
    return tl.where(y == 1.0, x, tl.where(far, y - 1.0, corrected))


@triton.jit
def maximum(x, y):
    """The larger number; NaN if either is NaN, as in torch."""
    larger = tl.where(x > y, x, y)
    return tl.where(x != x, x, larger)


@triton.jit
def minimum(x, y):
    """The smaller number; NaN if either is NaN, as in torch."""
    smaller = tl.where(x < y, x, y)
    return tl.where(x != x, x, smaller)


@triton.jit
def exponent_and_fraction(bits, FRACTION: tl.constexpr):
    """A finite positive number's exponent, 1 for the smallest normal ones, and its significand, given its bits."""
    exponent = bits >> FRACTION
    fraction = bits & ((1 << FRACTION) - 1)
    return tl.maximum(exponent, 1), fraction + ((exponent > 0).to(tl.int64) << FRACTION)


@triton.jit
def fmod(x, y):
    """The remainder of x divided by y, with the sign of x, as in torch."""
    if x.dtype.is_floating():
        return exact_fmod(x, y)
    else:
        return x - trunc_divide(x, y) * y


@triton.jit
def exact_fmod(x, y):
    """`fmod` of floating-point numbers, by their significands, as many bits at a time as fit into 64."""
    BITS: tl.constexpr = tl.int64 if x.dtype == tl.float64 else tl.int32
    FRACTION: tl.constexpr = 52 if x.dtype == tl.float64 else 23
    # The exponent of 2^0 above the unit of the smallest numbers, and of the smallest normal power of two.
    BIAS: tl.constexpr = 1075 if x.dtype == tl.float64 else 150
    LEAST: tl.constexpr = -1022 if x.dtype == tl.float64 else -126
    STEP: tl.constexpr = 62 - FRACTION
    # In a block, because its size is needed.
    x, _ = tl.broadcast(x, tl.zeros((1, 1), x.dtype))
    x, y = tl.broadcast(x, y)
    size_x, size_y = tl.abs(x), tl.abs(y)
    is_defined = (size_x < float("inf")) & (size_y > 0)  # and not NaN
    is_left = is_defined & (size_x >= size_y)
    from_x, left = exponent_and_fraction(size_x.to(BITS, bitcast=True).to(tl.int64), FRACTION)
    from_y, whole_y = exponent_and_fraction(size_y.to(BITS, bitcast=True).to(tl.int64), FRACTION)
    shifts = tl.where(is_left, from_x - from_y, 0)
    whole_y = tl.maximum(whole_y, 1)
    left = left % whole_y
    for _ in range(tl.cdiv(tl.max(tl.max(shifts, 1), 0), STEP)):
        step = tl.minimum(shifts, STEP)
        left = (left << step) % whole_y
        shifts -= step
    left = tl.where(is_left, left, 0)
    # 2^power, in two factors where it is subnormal.
    power = from_y - BIAS
    normal = tl.maximum(power, LEAST)
    ONE: tl.constexpr = 1 - LEAST
    first = ((normal + ONE) << FRACTION).to(BITS).to(x.dtype, bitcast=True)
    second = ((power - normal + ONE) << FRACTION).to(BITS).to(x.dtype, bitcast=True)
    size = tl.where(is_left, left.to(x.dtype) * first * second, size_x)
    # With the sign that -0 has, too.
    SIGN: tl.constexpr = -(1 << 63) if x.dtype == tl.float64 else -(1 << 31)
    sign = x.to(BITS, bitcast=True) & SIGN
    result = (size.to(BITS, bitcast=True) | sign).to(x.dtype, bitcast=True)
    return tl.where(is_defined, result, float("nan"))


@triton.jit
def remainder(x, y):
    """The remainder of x divided by y, with the sign of y, as in torch."""
    rest = fmod(x, y)
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


@triton.jit
def floor_divide(x, y):
    """The quotient rounded down, as in torch."""
    if x.dtype.is_floating():
        rest = exact_fmod(x, y)
        exact = divide(x - rest, y)
        exact = tl.where((rest != 0) & ((rest < 0) != (y < 0)), exact - 1.0, exact)
        below = tl.floor(exact)
        whole = tl.where(exact - below > 0.5, below + 1.0, below)
        quotient = divide(x, y)
        return tl.where(y == 0, quotient, tl.where(exact == 0, quotient * 0.0, whole))
    else:
        whole = trunc_divide(x, y)
        rest = x - whole * y
        return tl.where((rest != 0) & ((rest < 0) != (y < 0)), whole - 1, whole)


@triton.jit
def trunc_divide(x, y):
    """The quotient rounded towards 0, as in torch."""
    if x.dtype.is_floating():
        return trunc(divide(x, y))
    elif x.dtype.is_int_unsigned():
        return x // y
    else:
        # The smallest integer divided by -1 overflows the type, which hardware may report as an error.
        return tl.where(y == -1, -x, x // tl.where(y == -1, 1, y))


@triton.jit
def divide(x, y):
    """The quotient, rounded once: `/` is two units off in single precision."""
    if x.dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x, y)


@triton.jit
def sign(x):
    """-1, 0 or 1 in x's type; 0 of NaN, as in torch."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def trunc(x):
    """Rounded towards 0."""
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def largest(x):
    """The largest number of each row; NaN if the row has one, as in torch."""
    found = tl.max(x, 1)
    if x.dtype.is_floating():
        return tl.where(tl.max((x != x).to(tl.int32), 1) > 0, float("nan"), found)
    else:
        return found


@triton.jit
def smallest(x):
    """The smallest number of each row; NaN if the row has one, as in torch."""
    found = tl.min(x, 1)
    if x.dtype.is_floating():
        return tl.where(tl.max((x != x).to(tl.int32), 1) > 0, float("nan"), found)
    else:
        return found


@triton.jit
def numbered(shape, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The number of each element of a block in the output, counted row by row through all matrices."""
    rows = (tl.cast(batch, tl.int64) * shape[0] + row) + tl.arange(0, ROWS)
    return rows[:, None] * shape[1] + (col + tl.arange(0, COLS))[None, :]


@triton.jit
def uniform(seed, numbers):
    """Numbers in [0, 1) by Philox 4x32-10 (Salmon et al., SC 2011), the counter being an element's number."""
    low = (numbers & 0xFFFFFFFF).to(tl.uint32)
    high = (numbers >> 32).to(tl.uint32)
    zero = low * 0
    key_low = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    bits, _, _, _ = tl.philox_impl(low, high, zero, zero, zero + key_low, zero + key_high)
    # The upper 24 bits fill a single-precision number exactly.
    return (bits >> 8).to(tl.float32) * 5.9604644775390625e-08
