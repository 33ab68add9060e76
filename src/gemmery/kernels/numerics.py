"""The arithmetic that differs between a GPU and Triton's interpreter, in one place: the dot and the final cast."""

import triton
import triton.language as tl
from triton import knobs

# Whether a function is interpreted is decided when `@triton.jit` runs, so this is a constant of the process.
INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def widen(x):
    """A 16-bit or fp8 block as fp32.

    The interpreter's own conversion of fp8 makes numbers of infinity and NaN, and that of bf16 loses subnormal ones.
    """
    if x.dtype == tl.float8e5:
        # The upper half of an fp16, bit for bit.
        return (x.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif x.dtype == tl.float8e4nv:
        magnitude = x.to(tl.uint8, bitcast=True) & 0x7F
        return tl.where(magnitude == 0x7F, float("nan"), x.to(tl.float32))
    elif INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, IMPRECISE_ACC: tl.constexpr):
    """`acc + a @ b` in the accumulator's type.

    The interpreter multiplies the raw bits of bf16 and fp8, so both are widened first there. It multiplies with NumPy,
    whose sums can depend on a row's place in the tile. So it sums a step in double precision and rounds the sum once.
    A row then has the same bits in every batch, as with tensor cores.
    """
    if INTERPRETED and a.dtype.is_floating() and a.dtype.primitive_bitwidth < 64:
        part = tl.dot(widen(a).to(tl.float64), widen(b).to(tl.float64), out_dtype=tl.float64)
        return acc + part.to(acc.dtype)
    if IMPRECISE_ACC < 0:
        return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    return tl.dot(
        a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype, max_num_imprecise_acc=IMPRECISE_ACC
    )


@triton.jit
def to_fp8(x, DTYPE: tl.constexpr):
    """fp32 as fp8 in the interpreter, whose own way rounds ties up, cuts subnormals off and has no NaN in e4m3."""
    E4M3: tl.constexpr = tl.float8e4nv == DTYPE
    fraction: tl.constexpr = 3 if E4M3 else 2
    least: tl.constexpr = 127 - 6 if E4M3 else 127 - 14
    largest: tl.constexpr = 448.0 if E4M3 else 57344.0
    size = tl.abs(x)
    exponent = tl.maximum((size.to(tl.uint32, bitcast=True) >> 23).to(tl.int32), least)
    # Beside 3/2 * 2^23 units of the result's last place, fp32 has nothing smaller: adding that rounds.
    beside = (tl.minimum(exponent + 23 - fraction, 254) << 23 | 0x400000).to(tl.float32, bitcast=True)
    rounded = (size + beside) - beside
    rounded = tl.where(size >= 65536.0, 65536.0, rounded)
    rounded = tl.where(rounded > largest, largest if E4M3 else float("inf"), rounded)
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
    signed = (rounded.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True).to(DTYPE)
    missing = tl.full(x.shape, 0x7F, tl.uint8).to(DTYPE, bitcast=True)
    return tl.where(x == x, signed, missing)


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """`x` in the type of the output, rounded to nearest even everywhere.

    The interpreter truncates fp32 to bf16; there the rounding is written out on the bits. NaN stays NaN. Numbers too
    large for e4m3 become ±448, as in torch and by the hardware's conversion.
    """
    if INTERPRETED and DTYPE.is_fp8():
        return to_fp8(x.to(tl.float32), DTYPE)
    if INTERPRETED and tl.bfloat16 == DTYPE:
        x = x.to(tl.float32)
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x == x, rounded, bits | 0x400000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    if x.dtype == tl.float64 and DTYPE.is_fp8():
        # Triton has no other way, and torch also goes through single precision.
        x = x.to(tl.float32)
    return x.to(DTYPE)
