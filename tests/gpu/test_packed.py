"""Packed weights: exact decoding, right against float64 in every tile and format, no copy of the weight, composed."""

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional as F

import gemmery
from gemmery import epilogues, schedules
from gemmery.formats import from_codes
from gemmery.formats.base import FORMATS
from gemmery.formats.packing import pack, runs
from gemmery.kernels import decoders
from gemmery.kernels.numerics import INTERPRETED
from gemmery.select.space import tiles_of
from tests.gpu.common import DEVICE, DRY, HALVES, matrix, needs_cuda, rng, size, values, wide

pytestmark = pytest.mark.gpu

#: Formats with what is asked for besides, one of each way through the kernel.
KINDS = {
    "int4": ("int4", {}),
    "int4 32": ("int4", {"group_size": 32}),
    "int4 16": ("int4", {"group_size": 16}),
    "int4 64 zeros": ("int4", {"group_size": 64, "symmetric": False}),
    "int4 channel": ("int4", {"group_size": 0}),
    "int8": ("int8", {}),
    "int8 64": ("int8", {"group_size": 64}),
    "int8 32 zeros": ("int8", {"group_size": 32, "symmetric": False}),
    "e4m3": ("e4m3", {}),
    "e4m3 tensor": ("e4m3", {"scale": "tensor"}),
    "e4m3 block": ("e4m3", {"scale": "block"}),
    "e5m2": ("e5m2", {}),
    "mxfp4": ("mxfp4", {}),
    "nvfp4": ("nvfp4", {}),
    "nf4": ("nf4", {}),
}


def weight(kind, n, k, dtype, batch=()):
    format, options = KINDS[kind]
    return gemmery.quantize(values((*batch, n, k), torch.float32) / 4, format, dtype=dtype, **options)


def relative(result, want):
    assert result.isfinite().all()
    return ((wide(result) - want).norm() / want.norm()).item()


def assert_right(x, w, bound=1.05):
    """Both with a result that is hardly rounded, and against what torch makes of the dequantised weight."""
    # In two factors as the kernel has them: what it computes with, and the channel's scale behind the sum.
    full = w.dequantize(torch.float64)
    want = wide(x) @ full.mT
    result = gemmery.linear(x, w) if w.dim() == 2 else gemmery.bmm(x, w)
    theirs = x @ w.dequantize().mT if DEVICE != "cpu" else want.to(x.dtype)
    assert relative(result, want) <= bound * relative(theirs, want) + 1e-5
    single = gemmery.linear(x, w, out_dtype=torch.float32) if w.dim() == 2 else result
    if w.dim() == 2:
        assert relative(single, want) <= 1e-5


# ---------------------------------------------------------------------------------------------------------------------
# Decoding


@triton.jit
def decode_all(
    words,
    out,
    DECODE: tl.constexpr,
    PART: tl.constexpr,
    RUNS: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    at = tl.arange(0, 256)
    first, second = DECODE(tl.load(words + at), PART, RUNS, DTYPE, ASM, -1)
    tl.store(out + at, first)
    tl.store(out + 256 + at, second)


def decoded(format, dtype, part, asm):
    """All codes of a format through a decoder, at every place in a word, and those of 256 columns by number."""
    half = 16 // format.bits
    generator = torch.Generator().manual_seed(part)
    codes = torch.stack([torch.randperm(256, generator=generator) for _ in range(2 * half)], 1)
    codes = codes % (1 << format.bits)
    # Two columns, two words, numbers of a column in a word.
    column, number = torch.arange(2).reshape(2, 1, 1), torch.arange(half)
    bit = torch.arange(format.bits)
    place = torch.tensor(format.order)[format.bits * (half * column + number).unsqueeze(-1) + bit]
    bits = codes.reshape(128, 2, 2, half, 1) >> bit & 1
    words = (bits << place).sum((1, 3, 4)).flatten()
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).to(DEVICE)
    out = torch.empty(2, 256, dtype=dtype, device=DEVICE)
    function, kind = (
        decoders.DECODERS[format.code, format.bits].device,
        getattr(tl, str(dtype).removeprefix("torch.")),
    )
    decode_all[(1,)](words, out, function, part, runs(format.order, format.bits), kind, asm)
    return out.cpu(), codes[:, 2 * part : 2 * part + 2].mT


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_code(name, dtype):
    format = FORMATS[name]
    capability = 0
    if not DRY:
        major, minor = torch.cuda.get_device_capability()
        capability = 10 * major + minor
    for part in range(16 // format.bits):
        for asm in sorted({0, 80, capability} if capability else {0}):
            got, codes = decoded(format, dtype, part, asm)
            kind = getattr(tl, str(dtype).removeprefix("torch."))
            want = format.stored_values[codes].double() + decoders.bias_of(format.code, kind)
            if decoders.unit_of(format.code, format.bits, kind, asm):
                exponents = [decoders.exponent_of(format.code, format.bits, which) for which in (0, 1)]
                want = want * torch.tensor([2.0**-x for x in exponents], dtype=torch.double)[:, None]
            # Bit for bit, NaN apart, of which there are many.
            want = want.to(dtype)
            assert torch.equal(got.isnan(), want.isnan()), (part, asm)
            same = got.view(torch.int16) == want.view(torch.int16)
            assert (same | want.isnan() | ((want == 0) & (got == 0))).all(), (
                part,
                asm,
                codes[~same],
                got[~same],
                want[~same],
            )


@triton.jit
def arithmetic(x, y, z, out, DTYPE: tl.constexpr, ASM: tl.constexpr, COUNT: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    n = tl.num_programs(0) * COUNT
    a, b, c = tl.load(x + at), tl.load(y + at), tl.load(z + at)
    tl.store(out + at, decoders.subtract(a, b, DTYPE, ASM))
    tl.store(out + n + at, decoders.multiply(a, b, DTYPE, ASM))
    tl.store(out + 2 * n + at, decoders.multiply_add(a, b, c, DTYPE, ASM))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_arithmetic_is_the_same_in_ptx(dtype):
    rng("packed arithmetic", dtype)
    count = 1 << (10 if DRY else 20)
    # Products near the middle of two numbers, and addends far below: where rounding twice would show.
    x, y = values((count,), dtype), values((count,), dtype)
    z = values((count,), dtype) * (2.0 ** torch.randint(-16, 3, (count,), device=DEVICE)).to(dtype)
    found = []
    for asm in (0,) if INTERPRETED.value else (0, 80, 90):
        out = torch.empty(3, count, dtype=dtype, device=DEVICE)
        kind = tl.bfloat16 if dtype == torch.bfloat16 else tl.float16
        arithmetic[(count // 1024,)](x, y, z, out, kind, asm, 1024)
        found.append(out)
    want = torch.stack([
        x.double() - y.double(), x.double() * y.double(), x.double() * y.double() + z.double()
    ])  # fmt: skip
    assert all(torch.equal(x, found[0]) for x in found[1:])
    # torch rounds double to 16 bits by way of float32, so only to a unit in the last place here.
    assert (found[0].double() - want).abs().le(want.abs() * 2.0**-8 + 1e-7).all()


# ---------------------------------------------------------------------------------------------------------------------
# Products


@pytest.mark.parametrize("exponent", [-40, -20, 30, 34])
@pytest.mark.parametrize("name", ["int4", "int8", "mxfp4"])
def test_scales_of_all_sizes(name, exponent):
    """Powers of two that kernels put in and take out again leave nothing behind."""
    rng("packed scales", name, exponent)
    m, n, k = 24, 64, size(512)
    codes = torch.randint(0, 1 << FORMATS[name].bits, (n, k), dtype=torch.uint8, device=DEVICE)
    scales = (1 + torch.rand(n, k // 32, device=DEVICE) / 2).bfloat16()
    x = values((m, k), torch.bfloat16)
    near = gemmery.linear(x, from_codes(codes, name, scales=scales), out_dtype=torch.float32)
    far = gemmery.linear(x, from_codes(codes, name, scales=scales * 2.0**exponent), out_dtype=torch.float32)
    assert torch.equal(far, near * 2.0**exponent)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(3))
def test_random_shapes(kind, dtype, number):
    r = rng("packed", kind, dtype, number)
    m = size([r.randrange(1, 17), r.randrange(17, 200), r.randrange(200, 600)][number])
    n, k = size(r.randrange(1, 1000)), size(r.randrange(64, 1500))
    if number == 1:
        k = k // 16 * 16  # what descriptors take
    x = values((m, k), dtype) if number else values((k, m), dtype).t()
    assert_right(x, weight(kind, n, k, dtype))


def configs():
    """All tiles for packed weights that every Triton has, once each, and with K cut; `test_specialized` has the others."""
    rows = []
    for kind in ("packed4", "packed8"):
        for tile in tiles_of("interpreter" if DRY else "hopper", kind):
            if schedules.of(tile.config.schedule).universal:
                rows.append((kind, tile.config))
                rows += [(kind, replace(tile.config, split_k=3))] * tile.splits
    return rows


@pytest.mark.parametrize(("kind", "config"), configs(), ids=str)
def test_every_tile(kind, config):
    """In a product long enough that unpacking runs ahead of the tensor cores, several times over."""
    rng("packed tiles", kind, config)
    x = values((size(1030), size(2048)), torch.bfloat16)
    for name in ("int4", "nf4") if kind == "packed4" else ("int8", "e4m3 block"):
        w = weight(name, size(2064), size(2048), torch.bfloat16)
        want = wide(x) @ w.dequantize(torch.float64).mT
        first = gemmery.linear(x, w, config=config, out_dtype=torch.float32)
        assert relative(first, want) <= 1e-5
        for _ in range(1 if DRY else 5):
            assert torch.equal(gemmery.linear(x, w, config=config, out_dtype=torch.float32), first)


@pytest.mark.parametrize("kind", ["int4", "int8", "e4m3", "mxfp4"])
def test_many_rows(kind):
    """As `test_every_tile`, with what the selector takes."""
    rng("packed rows", kind)
    for m in (1, 16, 64, 128, 256, 512, 1024, 4096):
        x = values((size(m), size(4096)), torch.bfloat16)
        assert_right(x, weight(kind, size(4096), size(4096), torch.bfloat16))


def gated(acc, bias, residual):
    gate, up = (acc + bias).chunk(2, dim=-1)
    return F.silu(gate) * up + residual


@pytest.mark.parametrize("kind", ["int4", "int8", "e4m3", "nvfp4", "int8 32 zeros"])
@pytest.mark.parametrize("m", [1, 16, 100, 600])
def test_epilogues(kind, m):
    rng("packed epilogues", kind, m)
    m, n, k = size(m), 2 * size(512), size(1024)
    x, w = values((m, k), torch.bfloat16), weight(kind, n, k, torch.bfloat16)
    product = wide(x) @ w.dequantize(torch.float64).mT
    args = (values((n,), torch.bfloat16), matrix(m, n // 2, torch.bfloat16))
    result = gemmery.linear(x, w, epilogue=gated, args=args)
    assert relative(result, gated(product, *map(wide, args))) <= 6e-3
    bias = values((n,), torch.bfloat16)
    result = gemmery.linear(x, w, bias, epilogue=epilogues.gelu)
    assert relative(result, F.gelu(product + wide(bias))) <= 6e-3
    result, rows = gemmery.linear(x, w, epilogue=lambda acc: (acc, acc.sum(-1)), out_dtype=torch.float32)
    assert relative(result, product) <= 1e-5
    assert (wide(rows) - product.sum(-1)).abs().max() <= 1e-4 * product.abs().sum(-1).max()


@pytest.mark.parametrize("kind", ["int4", "e4m3", "nvfp4"])
def test_batches(kind):
    rng("packed batches", kind)
    w = weight(kind, size(300), size(512), torch.bfloat16, (5,))
    x = values((5, size(70), size(512)), torch.bfloat16)
    assert_right(x, w)
    shared = weight(kind, size(300), size(512), torch.bfloat16)
    assert_right(x, shared)


@needs_cuda
def test_no_copy_is_made():
    """Peak memory of a layer is its packed weight, what goes in and what comes out."""
    w = gemmery.quantize(values((8192, 8192), torch.bfloat16), "int4")
    assert w.nbytes <= 8192 * 8192 // 2 * 1.04
    for m in (1, 300, 4096):
        x = values((m, 8192), torch.bfloat16)
        gemmery.linear(x, w)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = gemmery.linear(x, w)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= math.ceil(out.nbytes / 512) * 512 + 512, m


@needs_cuda
def test_graph_and_autograd():
    rng("packed graph")
    w = weight("int4", 512, 768, torch.bfloat16)
    x = values((20, 768), torch.bfloat16)
    want = gemmery.linear(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gemmery.linear(x, w)
    result.zero_()
    graph.replay()
    assert torch.equal(result, want)
    x.requires_grad_()
    out = gemmery.linear(x, w, epilogue=epilogues.gelu)
    grad = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, x, grad)
    (right,) = torch.autograd.grad(F.gelu((x @ w.dequantize().mT).float()).bfloat16(), x, grad)
    assert relative(got, wide(right)) <= 2e-2


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    """torch.compile around packed weights: bare, fused, and the gradient of the activations."""
    rng("packed compiled")
    q, e = weight("int4", 512, 1024, torch.bfloat16), weight("e4m3", 256, 512, torch.bfloat16)
    gelu = gemmery.epilogue(epilogues.gelu)

    def layer(x):
        hidden = gemmery.linear(x, q, epilogue=gelu)
        return gemmery.linear(hidden, e) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    for m in (3, 64, 200):
        x = values((m, 1024), torch.bfloat16).requires_grad_()
        got, want = compiled(x), layer(x)
        assert relative(got, wide(want)) < 1e-3
        (found,) = torch.autograd.grad(got.float().square().sum(), x)
        (expected,) = torch.autograd.grad(want.float().square().sum(), x)
        assert relative(found, wide(expected)) < 1e-2


def test_codes_come_as_they_were_packed():
    """Beside the decoders, the order in memory: each weight apart, by a product with the unit matrix."""
    codes = torch.randint(0, 16, (64, 128), dtype=torch.uint8, device=DEVICE)
    w = gemmery.QuantizedTensor(
        (64, 128), "int4", pack(codes, 4, FORMATS["int4"].order), dtype=torch.bfloat16
    )
    unit = torch.eye(128, dtype=torch.bfloat16, device=DEVICE)
    assert torch.equal(gemmery.linear(unit, w), (codes.float() - 8).bfloat16().t())
