"""The decoders' PTX, run by a small emulator: each code of a packed weight as the number that it stands for.

An emulator of the few instructions that decoders use, written from the PTX ISA; tests/gpu has the same of the GPU.
"""

import re

import pytest
import torch
import triton.language as tl

from gemmery.formats import packing
from gemmery.formats.base import FORMATS
from gemmery.kernels import any_width_sparse, decoders

BITS32 = 0xFFFFFFFF
TYPES = {"bf16": (tl.bfloat16, torch.bfloat16), "fp16": (tl.float16, torch.float16)}


def number(bits, dtype):
    """A number of 16 bits."""
    return torch.tensor(bits - 65536 if bits > 32767 else bits).to(torch.int16).view(dtype).double().item()


def bits_of(value, dtype):
    """The 16 bits of a number, which fp32 holds."""
    return torch.tensor(value, dtype=torch.float64).float().to(dtype).view(torch.int16).item() & 0xFFFF


def halves(function, dtype, *operands):
    """An instruction for two numbers at a time."""
    both = [[number(x >> shift & 0xFFFF, dtype) for x in operands] for shift in (0, 16)]
    low, high = (bits_of(function(*each), dtype) for each in both)
    return low | high << 16


def prmt(a, b, selectors):
    """Four bytes of eight; a selector's fourth bit asks for the byte's sign in all places."""
    source, result = a | b << 32, 0
    for i in range(4):
        selector = selectors >> 4 * i & 15
        byte = source >> 8 * (selector & 7) & 0xFF
        result |= (0xFF * (byte >> 7) if selector & 8 else byte) << 8 * i
    return result


def lop3(a, b, c, table):
    """Any function of three bits."""
    index = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(32))
    return sum((table >> k & 1) << i for i, k in enumerate(index))


def from_fp8(bits, dtype):
    """Two fp8 numbers as two of fp16."""
    both = torch.tensor([bits & 0xFF, bits >> 8], dtype=torch.uint8).view(dtype).half().view(torch.int16)
    return sum((x & 0xFFFF) << shift for x, shift in zip(both.tolist(), (0, 16), strict=True))


OPERATIONS = {
    "mov": lambda a: a,
    "shr": lambda a, n: a >> n,
    "shl": lambda a, n: a << n,
    "and": lambda a, b: a & b,
    "add": lambda a, b: a + b,
    "prmt": prmt,
    "lop3": lop3,
    "mad.lo": lambda a, b, c: a * b + c,
    "mul.lo": lambda a, b: a * b,
    "dp2a.lo": lambda a, b, c: (a & 0xFFFF) * (b & 0xFF) + (a >> 16) * (b >> 8 & 0xFF) + c,
    "mul.bf16x2": lambda a, b: halves(lambda x, y: x * y, torch.bfloat16, a, b),
    "mul.rn.bf16x2": lambda a, b: halves(lambda x, y: x * y, torch.bfloat16, a, b),
    "mul.f16x2": lambda a, b: halves(lambda x, y: x * y, torch.float16, a, b),
    "sub.rn.bf16x2": lambda a, b: halves(lambda x, y: x - y, torch.bfloat16, a, b),
    "sub.rn.f16x2": lambda a, b: halves(lambda x, y: x - y, torch.float16, a, b),
    "cvt.u32.u16": lambda a: a & 0xFFFF,
    "fma.rn.bf16x2": lambda a, b, c: halves(lambda x, y, z: x * y + z, torch.bfloat16, a, b, c),
    "cvt.rn.f16x2.e4m3x2": lambda a: from_fp8(a, torch.float8_e4m3fn),
    "cvt.rn.f16x2.e5m2x2": lambda a: from_fp8(a, torch.float8_e5m2),
    "cvt.f32.f16": lambda a: number(a, torch.float16),
    "cvt.rn.bf16x2.f32": lambda high, low: bits_of(low, torch.bfloat16) | bits_of(high, torch.bfloat16) << 16,
}


def run(text, words):
    """What a decoder's PTX makes of two words."""
    registers = {"$2": words[0], "$3": words[1], "%lanemask_lt": 0x7FFF}
    # A vector of two, in braces, is what its parts are called.
    text = re.sub(r"mov\.b32 \{(\w+), (\w+)\}, (\w+);", r"and.b32 \1, \3, 0xFFFF; shr.b32 \2, \3, 16;", text)
    for line in re.sub(r"[{}]", "", text).split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, operands = line.split(None, 1)
        target, *given = (x.strip() for x in operands.split(","))
        values = [registers[x] if x in registers else int(x, 0) for x in given]
        operation = OPERATIONS.get(name) or OPERATIONS[re.sub(r"(\.u32|\.b32)+$", "", name)]
        result = operation(*values)
        registers[target] = result & BITS32 if isinstance(result, int) else result
    return registers["$0"], registers["$1"]


def ptx_of(format, part, dtype, asm):
    if format.name in ("e4m3", "e5m2") and asm < 89:
        return decoders.ptx_of_fp8(part, dtype, -1, asm, format.name == "e4m3")
    return decoders.DECODERS[format.code, format.bits].assembly(part, dtype, -1)


@pytest.mark.parametrize("asm", [80, 90])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_ptx_gives_the_numbers_of_a_packed_weight(name, dtype, asm):
    format, (kind, torch_type) = FORMATS[name], TYPES[dtype]
    columns = packing.block_columns(format.bits)
    unit = decoders.unit_of(format.code, format.bits, kind, asm)
    powers = [decoders.exponent_of(format.code, format.bits, i) if unit else 0 for i in (0, 1)]
    bias = decoders.bias_of(format.code, kind)
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 1 << format.bits, (16, columns), generator=generator).to(torch.uint8)
    codes.flatten()[: 1 << format.bits] = torch.arange(1 << format.bits, dtype=torch.uint8)
    values = format.stored_values.double() + bias
    words = packing.pack(codes, format.bits, format.order).reshape(32, 2, 2)
    for lane in range(32):
        g, q = divmod(lane, 4)
        for half in (0, 1):
            pair = [word & BITS32 for word in words[lane, half].tolist()]
            for part in range(16 // format.bits):
                found = run(ptx_of(format, part, kind, asm), pair)
                for which in (0, 1):
                    column = 2 * q + 8 * (2 * part + which)
                    own = values[codes[g + 8 * half, column : column + 2].long()] * 2.0 ** -powers[which]
                    got = torch.tensor([number(found[which] >> s & 0xFFFF, torch_type) for s in (0, 16)])
                    torch.testing.assert_close(
                        got.double(), own.to(torch_type).double(), rtol=0, atol=0, equal_nan=True
                    )


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("code", any_width_sparse.DECODE)
def test_kept_numbers_of_8_bits_are_widened_exactly(code, kind):
    stored = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}[code]
    widened = torch.bfloat16 if kind == "bf16" else torch.float16
    want = torch.arange(256, dtype=torch.uint8).view(stored).double()
    text = f"{any_width_sparse.DECODE[code]('$0', '$2', kind)} mov.b32 $1, 0;"
    for low in range(256):
        high = 37 * low % 256
        found, _ = run(text, [low | high << 8, 0])
        for which, shift in ((low, 0), (high, 16)):
            if not want[which].isnan():
                assert found >> shift & 0xFFFF == bits_of(want[which].item(), widened)
