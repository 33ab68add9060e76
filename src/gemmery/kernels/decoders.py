"""Packed weights: from words in memory to a block of numbers in registers, on the way to the tensor cores.

Two adjacent words hold numbers of one row: each has every eighth column, from one of two adjacent columns on
(`formats.packing`). So the n-th numbers of all words are a block of an eighth of the columns. To put these blocks side
by side moves no number from one thread to another: the result has the layout in which the tensor cores take their left
operand.

A format is a decoder, a `@triton.jit` function

    decode(words, PART, RUNS, DTYPE, ASM, WAIT) -> (first, second)

which gives the numbers `2 PART` and `2 PART + 1` of every column in `DTYPE`, fp16 or bf16, in blocks of the words'
shape. All of them are in one word of two. `RUNS` tells where: for each number of a word, its runs of adjacent bits as
(first bit, mask, place), see `formats.packing.runs`. `ASM` is the compute capability of the GPU whose PTX the decoder
may use; that PTX is written for the format's order. With 0 the decoder is plain Triton, and the weight has the same
bits.

With few rows of A, unpacking is most of a kernel's work, so every instruction counts. In fp16, an integer's bits
become the lowest bits of the number 1024, which adds `bias_of` to it. bf16 has no room for 8 bits there. But in a
number whose other bits are 0, they stand for the integer times a power of two, because the smallest normal numbers are
as far apart as the subnormal ones. `exponent_of` is that power. The multiplication by the scale, which is needed
anyway, compensates most of it, also for the zero. The rest, since bf16 ends at 2^128, is `unit_of`; the epilogue
multiplies the sum by it. Powers of two are exact, so nothing else changes.

On Hopper, wgmma reads its left operand from registers while the program goes on, and Triton (3.6 to 3.9) computes the
next step's operand without waiting for that. A decoder therefore begins with a wait for the products that may still
read the registers that it will write: all but the last `WAIT`. Since each part of a step has its own wait, most of the
work is done while the products of the step before are in flight.

A decoder's PTX is declared pure, since the compiler moves the layout of a dot's operand only through pure operations.
So the compiler may move a wait to a later place, where more products are in flight, but not after the use of the
decoder's results. tests/compile checks the order in the code.
"""

import struct
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .numerics import cast

#: Triton 3.6 launches a step along K in pieces of 16 columns, one that came later in two halves.
FINE_STEPS = tl.constexpr(tuple(int(x) for x in triton.__version__.split(".")[:2]) < (3, 7))


@triton.constexpr_function
def _text(dtype):
    return "bf16" if dtype == tl.bfloat16 else "fp16"


@triton.constexpr_function
def bias_of(code, dtype):
    """The number that a decoder adds to the numbers of a code. It costs nothing, and is subtracted with the zero."""
    return 1024 if code == "int" and _text(dtype) == "fp16" else 0


#: With PTX, bf16 numbers of some codes come times 2^-UNIT to the tensor cores, and the sum is multiplied by 2^UNIT.
#: That is exact for scales below 2^(UNIT - 5), see `formats.tensor.LARGEST_SCALE`, and for numbers and their products
#: down to 2^(UNIT - 126); below, they lose digits as subnormal numbers do.
UNIT = tl.constexpr(40)
#: By code and bits: a decoder's first and second number are 2^-exponent times the code's.
_EXPONENTS = tl.constexpr({("int", 4): (133, 129), ("int", 8): (133, 133), ("e2m1", 4): (126, 126)})


@triton.constexpr_function
def unit_of(code, bits, dtype, asm):
    """The exponent of two by which a code's numbers are too small in the tensor cores; 0 if they are exact."""
    return UNIT.value if asm and (code, bits) in _EXPONENTS.value and _text(dtype) == "bf16" else 0


@triton.constexpr_function
def exponent_of(code, bits, which):
    """The power of two by which a decoder's first (0) or second (1) number is too small, where `unit_of` is not 0."""
    return _EXPONENTS.value[code, bits][which]


@triton.constexpr_function
def power(exponent):
    """A power of two."""
    return 2.0**exponent


@triton.constexpr_function
def wait_of(part, parts, blocks):
    """The number of the last products that may be in flight while this part of a step of `blocks` blocks is written."""
    if FINE_STEPS.value:
        return parts - 1 - part
    # Two halves: a part in the first one may be written as soon as that is done.
    return 1 if 2 * ((blocks - 1) * parts + part) < blocks * parts else 0


@triton.constexpr_function
def _begin(wait):
    return "" if wait < 0 else f"wgmma.wait_group.sync.aligned {wait};\n"


@triton.constexpr_function
def _arithmetic(op, dtype, asm, result, x, y):
    """PTX for `x - y` or `x * y`, two numbers at a time; before Hopper, bf16 has nothing but fused multiply-adds."""
    if _text(dtype) == "fp16" or asm >= 90:
        suffix = {"bf16": "bf16x2", "fp16": "f16x2"}[_text(dtype)]
        return f"{op}.{suffix} {result}, {x}, {y};\n"
    if op == "sub":
        return f"{{.reg .b32 one;\nmov.b32 one, 0xBF80BF80;\nfma.rn.bf16x2 {result}, {y}, one, {x};}}\n"
    return f"{{.reg .b32 none;\nmov.b32 none, 0x80008000;\nfma.rn.bf16x2 {result}, {x}, {y}, none;}}\n"


@triton.constexpr_function
def two_of(op, dtype, asm):
    """PTX for two numbers at a time."""
    if op == "fma":
        suffix = {"bf16": "bf16x2", "fp16": "f16x2"}[_text(dtype)]
        return f"fma.rn.{suffix} $0, $1, $2, $3;"
    return _arithmetic(op, dtype, asm, "$0", "$1", "$2")


@triton.jit
def from_words(PTX: tl.constexpr, words, DTYPE: tl.constexpr):
    """Two blocks of numbers by PTX for two words at a time."""
    if tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            PTX, "=r,=r,r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            PTX, "=r,=r,r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def from_pairs(PTX: tl.constexpr, CONSTRAINTS: tl.constexpr, values, DTYPE: tl.constexpr):
    """A block of numbers by PTX for two numbers of each of several blocks at a time."""
    if tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(PTX, CONSTRAINTS, values, dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(PTX, CONSTRAINTS, values, dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def subtract(x, y, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """`x - y`, rounded to `DTYPE`."""
    if ASM:
        PTX: tl.constexpr = two_of("sub", DTYPE, ASM)
        return from_pairs(PTX, "=r,r,r", (x, y), DTYPE)
    else:
        return cast(x.to(tl.float32) - y.to(tl.float32), DTYPE)


@triton.jit
def multiply(x, y, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """`x * y`, rounded to `DTYPE`; y may be fp32."""
    if y.dtype == tl.float32:
        return cast(x.to(tl.float32) * y, DTYPE)
    elif ASM:
        PTX: tl.constexpr = two_of("mul", DTYPE, ASM)
        return from_pairs(PTX, "=r,r,r", (x, y), DTYPE)
    else:
        return cast(x.to(tl.float32) * y.to(tl.float32), DTYPE)


@triton.jit
def multiply_add(x, y, z, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """`x * y + z`, rounded to `DTYPE` once."""
    if ASM:
        PTX: tl.constexpr = two_of("fma", DTYPE, ASM)
        return from_pairs(PTX, "=r,r,r,r", (x, y, z), DTYPE)
    else:
        product = x.to(tl.float32) * y.to(tl.float32)
        z = z.to(tl.float32)
        total = product + z
        # The exact sum is `total + left` (Knuth's two-sum). If fp32 cut something off, its last bit is set, so the
        # second rounding can't mistake a number near the midpoint for the midpoint.
        of_z = total - product
        left = (product - (total - of_z)) + (z - of_z)
        bits = total.to(tl.int32, bitcast=True)
        towards = tl.where((left > 0) == (total > 0), 1, -1)
        odd = tl.where((left != 0) & (left == left) & (bits & 1 == 0), bits + towards, bits)
        return cast(odd.to(tl.float32, bitcast=True), DTYPE)


@triton.constexpr_function
def count_of(runs, number):
    """The number of runs of bits in a number."""
    return len(runs[number])


@triton.constexpr_function
def of_run(runs, number, i, what):
    """The first bit (0), the mask (1) or the place (2) of one run."""
    return runs[number][i][what]


@triton.jit
def code_of(words, NUMBER: tl.constexpr, RUNS: tl.constexpr):
    """The code of a number of each word, as int32."""
    code = words & 0
    for i in tl.static_range(count_of(RUNS, NUMBER)):
        bits = (words >> of_run(RUNS, NUMBER, i, 2)) & of_run(RUNS, NUMBER, i, 1)
        code |= bits << of_run(RUNS, NUMBER, i, 0)
    return code


@triton.jit
def codes_of(words, PART: tl.constexpr, BITS: tl.constexpr, RUNS: tl.constexpr):
    """The codes of the numbers `2 PART` and `2 PART + 1` of every column, as int32, in blocks of the words' shape."""
    HALF: tl.constexpr = 16 // BITS
    AT: tl.constexpr = 2 * PART % HALF
    first, second = words.reshape(words.numel // 2, 2).split()
    own = first if 2 * PART < HALF else second
    one = tl.join(code_of(own, AT, RUNS), code_of(own, HALF + AT, RUNS))
    two = tl.join(code_of(own, AT + 1, RUNS), code_of(own, HALF + AT + 1, RUNS))
    return one.reshape(words.shape), two.reshape(words.shape)


@triton.constexpr_function
def word_of(part, bits):
    """The index of the word, of two, that has the numbers of a part."""
    return "$2" if 2 * part < 16 // bits else "$3"


# ---------------------------------------------------------------------------------------------------------------------
# Integers


@triton.constexpr_function
def ptx_of_nibbles(part, dtype, wait):
    """Two numbers of 4 bits of two columns, as pairs: on top of 1024 (fp16), or as the lowest bits (bf16)."""
    lines = [f"{{\n.reg .b32 x;\n{_begin(wait)}mov.b32 x, {word_of(part, 4)};\n"]
    if part % 2:
        lines.append("shr.b32 x, x, 8;\n")
    if _text(dtype) == "bf16":
        lines.append("and.b32 $0, x, 0x000F000F;\nand.b32 $1, x, 0x00F000F0;\n")
    else:
        lines.append("lop3.b32 $0, x, 0x000F000F, 0x64006400, 0xEA;\nshr.b32 x, x, 4;\n")
        lines.append("lop3.b32 $1, x, 0x000F000F, 0x64006400, 0xEA;\n")
    return "".join(lines) + "}"


@triton.constexpr_function
def ptx_of_bytes(part, dtype, wait):
    """Two bytes of two columns, as pairs: on top of 1024 (fp16), or as the lowest bits (bf16)."""
    lines = [f"{{\n.reg .b32 x;\n{_begin(wait)}mov.b32 x, {word_of(part, 8)};\n"]
    if _text(dtype) == "bf16":
        lines.append("and.b32 $0, x, 0x00FF00FF;\nprmt.b32 $1, x, 0, 0x4341;\n")
    else:
        lines.append("lop3.b32 $0, x, 0x00FF00FF, 0x64006400, 0xEA;\n")
        lines.append("prmt.b32 $1, x, 0x64646464, 0x4341;\n")
    return "".join(lines) + "}"


@triton.jit
def decode_int(
    words, PART: tl.constexpr, RUNS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, WAIT: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Integers from 0 on."""
    if ASM:
        PTX: tl.constexpr = (
            ptx_of_nibbles(PART, DTYPE, WAIT) if BITS == 4 else ptx_of_bytes(PART, DTYPE, WAIT)
        )
        return from_words(PTX, words, DTYPE)
    else:
        BIAS: tl.constexpr = bias_of("int", DTYPE)
        first, second = codes_of(words, PART, BITS, RUNS)
        return cast((first + BIAS).to(tl.float32), DTYPE), cast((second + BIAS).to(tl.float32), DTYPE)


@triton.jit
def decode_int4(
    words, PART: tl.constexpr, RUNS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, WAIT: tl.constexpr
):
    """Integers from 0 to 15."""
    return decode_int(words, PART, RUNS, DTYPE, ASM, WAIT, 4)


@triton.jit
def decode_int8(
    words, PART: tl.constexpr, RUNS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, WAIT: tl.constexpr
):
    """Integers from 0 to 255."""
    return decode_int(words, PART, RUNS, DTYPE, ASM, WAIT, 8)


# ---------------------------------------------------------------------------------------------------------------------
# Floating point: the bits go to their places, and a power of two sets the exponent right, subnormal numbers included


@triton.constexpr_function
def _twice(value):
    return f"0x{value:04X}{value:04X}"


@triton.constexpr_function
def ptx_of_e2m1(part, dtype, wait):
    """Two numbers of 4 bits of two columns, as pairs; times 2^-126 in bf16.

    `formats.base.ORDERS` has three of four numbers as bf16 wants them, sign and exponent apart, each three bits below
    the one before: one shift and a mask. The last one's bits are 13, 14, 10 and 11. After a shift by ten, one product
    moves bits 3 and 4 to 6 and 7, bit 0 to 8, and bit 1 to 15: three shifts at once, whose results do not overlap. In
    fp16, for which the order was not made, all bits but the sign lie three bits higher.
    """
    lines = [f"{{\n.reg .b32 x, y, u;\n{_begin(wait)}mov.b32 x, {word_of(part, 4)};\n"]
    placed = (
        "mov.b32 y, x;\n", "shl.b32 y, x, 3;\n", "shl.b32 y, x, 6;\n",
        f"shr.b32 y, x, 10;\nand.b32 y, y, 0x001B001B;\nmul.lo.u32 y, y, {(1 << 3) + (1 << 8) + (1 << 14)};\n",
    )  # fmt: skip
    for which in (0, 1):
        lines.append(placed[2 * (part % 2) + which])
        if _text(dtype) == "bf16":
            lines.append(f"and.b32 ${which}, y, 0x81C081C0;\n")
        else:
            lines.append("shl.b32 u, y, 3;\nand.b32 u, u, 0x0E000E00;\nlop3.b32 y, y, 0x80008000, u, 0xEA;\n")
            # 2^14, of which the exponent lacks that much.
            lines.append(f"mov.b32 u, 0x74007400;\nmul.f16x2 ${which}, y, u;\n")
    return "".join(lines) + "}"


@triton.jit
def from_e2m1(code):
    """A code's number in fp32."""
    sign = (code & 8) << 28
    # As the exponent's and the mantissa's bits of fp32; 2^126 compensates the biases.
    size = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def decode_e2m1(
    words, PART: tl.constexpr, RUNS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, WAIT: tl.constexpr
):
    """0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    if ASM:
        PTX: tl.constexpr = ptx_of_e2m1(PART, DTYPE, WAIT)
        return from_words(PTX, words, DTYPE)
    else:
        first, second = codes_of(words, PART, 4, RUNS)
        return cast(from_e2m1(first), DTYPE), cast(from_e2m1(second), DTYPE)


@triton.constexpr_function
def ptx_of_fp8_conversion(part, dtype, wait, e4m3):
    """Two bytes of two columns, as pairs, by the GPU's conversion to fp16, which is exact; and on to bf16."""
    lines = [
        f"{{\n.reg .b32 x, p;\n.reg .b16 u, v;\n.reg .f32 s, t;\n{_begin(wait)}"
        f"mov.b32 x, {word_of(part, 8)};\n"
    ]
    for which in (0, 1):
        result = "p" if _text(dtype) == "bf16" else f"${which}"
        lines.append("mov.b32 {u, v}, x;\n")
        lines.append(f"cvt.rn.f16x2.{'e4m3x2' if e4m3 else 'e5m2x2'} {result}, {'uv'[which]};\n")
        if _text(dtype) == "bf16":
            lines.append("mov.b32 {u, v}, p;\ncvt.f32.f16 s, u;\ncvt.f32.f16 t, v;\n")
            lines.append(f"cvt.rn.bf16x2.f32 ${which}, t, s;\n")
    return "".join(lines) + "}"


@triton.constexpr_function
def ptx_of_fp8(part, dtype, wait, asm, e4m3):
    """Two bytes of two columns, as pairs, for GPUs that don't know fp8.

    After a shift, the largest exponent of the narrow type is an ordinary one of the wider type. An addition makes
    codes that are not numbers carry into a separate bit, from which the wider type's largest exponent is made.
    """
    bf16 = _text(dtype) == "bf16"
    lines = [f"{{\n.reg .b32 x, u, n, c;\n{_begin(wait)}"]
    # The byte of each of two columns, twice.
    spread = [f"prmt.b32 x, {word_of(part, 8)}, 0, {selector};\n" for selector in ("0x1100", "0x3322")]
    if not e4m3 and not bf16:
        # The upper half of an fp16.
        for which in (0, 1):
            lines.append(f"{spread[which]}and.b32 ${which}, x, 0xFF00FF00;\n")
        return "".join(lines) + "}"
    # The shift of the magnitude down from the upper byte; its bits there; the addend that carries; the carry; the
    # factor of the carry that fills the exponent; the power of two.
    shift, mask, step, carry, fill, power = {
        (True, True): (4, 0x07F0, 0x0010, 0x0800, 15, 0x7B80),
        (True, False): (1, 0x3F80, 0x0080, 0x4000, 1, 0x5C00),
        (False, True): (3, 0x0FE0, 0x0080, 0x1000, 7, 0x7780),
    }[e4m3, bf16]
    lines.append(f"mov.b32 c, {_twice(power)};\n")
    for which in (0, 1):
        lines.append(
            f"{spread[which]}shr.b32 u, x, {shift};\nand.b32 u, u, {_twice(mask)};\n"
            f"add.u32 n, u, {_twice(step)};\nand.b32 n, n, {_twice(carry)};\n"
            f"mad.lo.u32 u, n, {fill}, u;\n"
            "lop3.b32 u, x, 0x80008000, u, 0xEA;\n" + _arithmetic("mul", dtype, asm, f"${which}", "u", "c")
        )
    return "".join(lines) + "}"


@triton.jit
def from_fp8(code, E4M3: tl.constexpr):
    """A byte's number in fp32."""
    sign = (code & 0x80) << 24
    if E4M3:
        size = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        size = tl.where((code & 0x7F) == 0x7F, float("nan"), size)
    else:
        size = ((code & 0x7F) << 21).to(tl.float32, bitcast=True) * 5.192296858534828e33
        size = tl.where((code & 0x7F) == 0x7C, float("inf"), size)
        size = tl.where((code & 0x7F) > 0x7C, float("nan"), size)
    return (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def decode_fp8(
    words, PART: tl.constexpr, RUNS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, WAIT: tl.constexpr,
    E4M3: tl.constexpr,
):  # fmt: skip
    """The numbers of fp8, infinities and NaN among them."""
    if ASM:
        PTX: tl.constexpr = (
            ptx_of_fp8(PART, DTYPE, WAIT, ASM, E4M3)
            if ASM < 89
            else ptx_of_fp8_conversion(PART, DTYPE, WAIT, E4M3)
        )
        return from_words(PTX, words, DTYPE)
    else:
        first, second = codes_of(words, PART, 8, RUNS)
        return cast(from_fp8(first, E4M3), DTYPE), cast(from_fp8(second, E4M3), DTYPE)


@triton.jit
def decode_e4m3(
    words, PART: tl.constexpr, RUNS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, WAIT: tl.constexpr
):
    """fp8 with 4 bits of exponent."""
    return decode_fp8(words, PART, RUNS, DTYPE, ASM, WAIT, True)


@triton.jit
def decode_e5m2(
    words, PART: tl.constexpr, RUNS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, WAIT: tl.constexpr
):
    """fp8 with 5 bits of exponent."""
    return decode_fp8(words, PART, RUNS, DTYPE, ASM, WAIT, False)


# ---------------------------------------------------------------------------------------------------------------------
# A table of numbers

#: `formats.base.NF4` in the order of `NF4_STORED`.
NF4 = tl.constexpr((
    -1.0, -0.6961928009986877, -0.39491748809814453, -0.09105003625154495, 0.16093020141124725,
    0.44070982933044434, 1.0, 0.7229568362236023, -0.18477343022823334, -0.5250730514526367,
    -0.28444138169288635, 0.33791524171829224, 0.0, 0.07958029955625534, 0.24611230194568634, 0.5626170039176941,
))  # fmt: skip


def _planes(kind):
    """The table's lower and upper bytes, four to a word; no number in it is subnormal, or between two."""
    bits = []
    for value in NF4.value:
        single = struct.unpack("<I", struct.pack("<f", value))[0]
        half = struct.unpack("<H", struct.pack("<e", value))[0]
        bits.append((single + 0x7FFF + (single >> 16 & 1)) >> 16 if kind == "bf16" else half)
    planes = []
    for shift in (0, 8):
        plane = [number >> shift & 0xFF for number in bits]
        if kind == "bf16":
            # `ptx_of_nf4` adds the upper half to it.
            plane[:8] = [byte - other for byte, other in zip(plane[:8], plane[8:], strict=True)]
            assert all(0 <= byte < 128 for byte in plane[:8])
        planes += [sum(plane[4 * i + j] << 8 * j for j in range(4)) for i in range(4)]
    return tuple(planes)


NF4_BF16, NF4_FP16 = tl.constexpr(_planes("bf16")), tl.constexpr(_planes("fp16"))


@triton.constexpr_function
def ptx_of_nf4(part, dtype, wait):
    """Two numbers of 4 bits of two columns, as pairs, looked up by prmt: eight bytes at a time, by three bits.

    If a fourth bit is set, prmt returns eight copies of the byte's sign in its place. In bf16 no byte of the table's
    lower half has its sign set, so a look-up there returns 0 for a code of the upper half. Without the fourth bit, a
    look-up in the upper half always returns a byte. By the choice of `NF4_STORED` the bytes of a number are never
    smaller than those of the number 8 after it, and at most 127 larger. So the lower half holds what is missing, and
    the sum of both look-ups is right. In fp16 no choice makes it so, and a mask tells the halves apart.

    All this takes instructions of the unit for logic and shifts. The sum does not, since the units that multiply can
    do it. Neither does the shift by half a word, which is written as a product of half words.

    prmt takes one constant, and the assembler would move the other one into a register for each look-up. The sum of
    the constant and a 0 that the assembler cannot know (whether the lane's number is over 31) is computed once and
    kept.
    """
    lines = [
        f"{{\n.reg .b32 x, y, m, a, b, l, h, none;\n{_begin(wait)}mov.b32 x, {word_of(part, 4)};\n"
        "mov.u32 none, %lanemask_lt;\nshr.u32 none, none, 31;\nand.b32 y, x, 0x77777777;\n"
    ]
    if part % 2:
        lines.append("dp2a.lo.u32.u32 x, x, 0x100, 0;\ndp2a.lo.u32.u32 y, y, 0x100, 0;\n")
    if _text(dtype) == "bf16":
        words = NF4_BF16.value
        both = "add.u32 {}, a, b;\n"
    else:
        words = NF4_FP16.value
        # A byte of ones for every number of the table's upper half.
        lines.append("shr.b32 m, x, 3;\nand.b32 m, m, 0x1111;\nprmt.b32 m, 0xFF00, 0, m;\nmov.b32 x, y;\n")
        both = "lop3.b32 {}, m, b, a, 0xCA;\n"
    for name, at in (("l", 0), ("h", 4)):
        lines.append(
            f"add.u32 a, none, {words[at]};\nprmt.b32 a, a, {words[at + 1]}, x;\n"
            f"add.u32 b, none, {words[at + 2]};\nprmt.b32 b, b, {words[at + 3]}, y;\n" + both.format(name)
        )
    return "".join(lines) + "prmt.b32 $0, l, h, 0x5140;\nprmt.b32 $1, l, h, 0x7362;\n}"


@triton.jit
def from_nf4(code):
    """A code's number in fp32."""
    value = tl.full(code.shape, 0.0, tl.float32)
    for i in tl.static_range(16):
        value = tl.where(code == i, NF4[i], value)
    return value


@triton.jit
def decode_nf4(
    words, PART: tl.constexpr, RUNS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, WAIT: tl.constexpr
):
    """Quantiles of a normal distribution, rounded to `DTYPE`."""
    if ASM:
        PTX: tl.constexpr = ptx_of_nf4(PART, DTYPE, WAIT)
        return from_words(PTX, words, DTYPE)
    else:
        first, second = codes_of(words, PART, 4, RUNS)
        return cast(from_nf4(first), DTYPE), cast(from_nf4(second), DTYPE)


class Decoder(NamedTuple):
    """A kernel's decoder of a kind of code.

    Attributes:
        device: the decoder, a `@triton.jit` function as above.
        assembly: writes its PTX of a part, for tiles of any width; takes part, dtype and wait.
    """

    device: Any
    assembly: Callable[[int, tl.dtype, int], str]


#: By `Format.code` and bits, which distinguish the two kinds of integers.
DECODERS = {
    ("int", 4): Decoder(decode_int4, ptx_of_nibbles),
    ("int", 8): Decoder(decode_int8, ptx_of_bytes),
    ("e2m1", 4): Decoder(decode_e2m1, ptx_of_e2m1),
    ("nf4", 4): Decoder(decode_nf4, ptx_of_nf4),
    ("e4m3", 8): Decoder(decode_e4m3, partial(ptx_of_fp8_conversion, e4m3=True)),
    ("e5m2", 8): Decoder(decode_e5m2, partial(ptx_of_fp8_conversion, e4m3=False)),
}
