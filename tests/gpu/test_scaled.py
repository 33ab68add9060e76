"""Quantising, bit for bit as in torch, and products of quantised factors: each element within its bound of float64."""

import math

import pytest
import torch
from torch.nn import functional as F

import gemmery
from gemmery import activations, epilogues
from gemmery.activations import FORMATS, reference
from gemmery.formats.scaled import BLOCK, ScaledTensor
from tests.gpu.common import (
    DEVICE,
    DRY,
    FP8,
    HALVES,
    ROUNDING,
    TINY,
    Layout,
    inner_error,
    needs_cuda,
    place,
    rng,
    size,
    some_layout,
    values,
    wide,
)  # fmt: skip

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")]

PERS = ("token", "block", "tensor")
INPUTS = (*HALVES, torch.float32)
NAN, INFINITY, F32 = math.nan, math.inf, torch.float32


def bits(x):
    return x.contiguous().view(torch.uint8 if x.dtype.itemsize == 1 else torch.int32)


def assert_same(got, want):
    """The same numbers and scales, bit for bit; of NaN there are many."""
    assert got.kind == want.kind
    for name, x, y in (("data", got.data, want.data), ("scale", got.scale, want.scale)):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert x.is_contiguous()
        missing = y.float().isnan()
        assert torch.equal(x.float().isnan(), missing), name
        wrong = (bits(x) != bits(y)) & ~missing
        assert not wrong.any(), (name, int(wrong.sum()), wrong.nonzero()[0].tolist())


# ---------------------------------------------------------------------------------------------------------------------
# Quantising


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("per", PERS)
@pytest.mark.parametrize("number", range(4))
def test_quantising_random_layouts(per, format, dtype, number):
    r = rng("quantising", per, format, dtype, number)
    lead = tuple([r.randint(1, 4) for _ in range(r.choice((0, 0, 1, 2)))])
    shape = (*lead, r.choice((1, 3, size(r.randint(1, 3000)))), size(r.randint(1, r.choice((40, 700, 9000)))))
    x = place(shape, dtype, some_layout(r, shape, dtype.itemsize)).view
    assert_same(gemmery.quantize_activations(x, format, per=per), reference(x, format, per=per))
    if per != "block":
        amax = x.float().abs().amax(-1) * 0.9
        got = gemmery.quantize_activations(x, format, per=per, amax=amax)
        assert_same(got, reference(x, format, per=per, amax=amax))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("per", PERS)
@pytest.mark.parametrize(
    "k", [1, 16, 64, 100, 128, 1000, 4096, 5120, 7168, 14336, 16384, 16400, 32768, 65536]
)
def test_quantising_usual_widths(per, format, k):
    rng("widths", per, format, k)
    for m in (1, size(300)):
        x = values((m, size(k)), torch.bfloat16)
        assert_same(gemmery.quantize_activations(x, format, per=per), reference(x, format, per=per))
        x = x.t().contiguous().t()
        assert_same(gemmery.quantize_activations(x, format, per=per), reference(x, format, per=per))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("per", PERS)
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_quantising_all_magnitudes(per, format, dtype):
    """From the smallest subnormals to infinity, with zeros and NaN; all of a 16-bit type's values."""
    if dtype.itemsize == 2:
        x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device=DEVICE).view(dtype)
        x = x[torch.randperm(x.numel(), device=DEVICE)].view(128, 512)
    else:
        exponents = torch.randint(-150, 128, (128, 1), device=DEVICE)
        x = torch.randn(128, 512, device=DEVICE).double().mul(2.0**exponents).float()
        x[5, 3], x[6, 300], x[7, 511] = NAN, INFINITY, -INFINITY
    for y in (x, torch.where(x.isfinite(), x, 0), x.sort(0).values, x.sort(1).values):
        y[9] = 0
        q = gemmery.quantize_activations(y, format, per=per)
        assert_same(q, reference(y, format, per=per))
        there = reference(y.cpu(), format, per=per)
        assert_same(q.to("cpu"), there)


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("number", range(4))
def test_quantising_to_mx(format, dtype, number):
    """Random layouts, and magnitudes from the smallest subnormals to infinity."""
    r = rng("mx", format, dtype, number)
    lead = tuple([r.randint(1, 4) for _ in range(r.choice((0, 0, 1, 2)))])
    shape = (*lead, r.choice((1, 3, size(r.randint(1, 3000)))), size(r.randint(1, r.choice((40, 700, 9000)))))
    x = place(shape, dtype, some_layout(r, shape, dtype.itemsize)).view
    exponents = torch.randint(-150, 128, shape[:-1], device=DEVICE)[..., None]
    for y in (x, (x.double() * 2.0**exponents).to(dtype)):
        q = gemmery.quantize_activations(y, format, per="mx")
        assert_same(q, reference(y, format, per="mx"))
        assert_same(q.to("cpu"), reference(y.cpu(), format, per="mx"))


def with_blocks(r, shape, dtype, kind):
    """Random numbers, and scales of random layouts for each block of `kind`."""
    data = place(shape, dtype, some_layout(r, shape, 1)).view
    steps = -(-shape[-1] // 128)
    scales = {
        "1x128": (*shape[:-1], steps), "128x128": (*shape[:-2], -(-shape[-2] // 128), steps), "row": (*shape[:-1], 1),
    }[kind]  # fmt: skip
    scale = place(scales, torch.float32, some_layout(r, scales, 4)).view
    return ScaledTensor(data, scale)


@pytest.mark.parametrize(
    "kinds", [("1x128", "128x128"), ("1x128", "1x128"), ("row", "128x128"), ("128x128", "1x128")]
)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("number", range(6))
def test_products_of_blocks(kinds, dtype, number):
    """Random layouts, and from the third on such as descriptors take, of all sizes."""
    r = rng("blocks", kinds, dtype, number)
    m = (1, 16, 64, size(r.randint(65, 200)), size(r.randint(200, 900)), size(r.randint(900, 3000)))[number]
    n, k = size(r.randint(1, 2000)), size(r.randint(1, 3000))
    if number < 2:
        a, b = with_blocks(r, (m, k), dtype, kinds[0]), with_blocks(r, (n, k), dtype, kinds[1])
    else:
        n, k = 32 * -(-n // 32), 128 * -(-k // 128)
        x, w = torch.randn(m, k, device=DEVICE), torch.randn(n, k, device=DEVICE)
        name = "int8" if dtype == torch.int8 else "e4m3"
        numbers = [gemmery.quantize_activations(t, name, per="token").data for t in (x, w)]
        a, b = (
            ScaledTensor(data, with_blocks(r, data.shape, dtype, kind).scale)
            for data, kind in zip(numbers, kinds, strict=True)
        )
    bias = values((n,), torch.float32)
    for _ in range(2):  # the short way, the second time
        assert_product(gemmery.scaled_matmul(a, b), a, b, fast_accum=dtype != torch.int8)
        result = gemmery.scaled_matmul(a, b, bias=bias, out_dtype=torch.float32)
        assert_product(result, a, b, bias, fast_accum=dtype != torch.int8)
    if n % 2 == 0:
        small = ScaledTensor(a.data, a.scale * 2.0**-12)
        want = epilogues.swiglu(small.dequantize(torch.float64) @ b.dequantize(torch.float64).mT)
        result = gemmery.scaled_matmul(small, b, epilogue=epilogues.swiglu)
        assert ((wide(result) - want).norm() / want.norm()).item() < 6e-3


@pytest.mark.parametrize("kinds", [("mx", "mx"), ("mx", "token"), ("tensor", "mx")])
@pytest.mark.parametrize("types", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
@pytest.mark.parametrize("number", range(6))
def test_products_of_mx(kinds, types, number):
    """Numbers of random layouts, and from the third on such as descriptors take, of all sizes."""
    r = rng("products of mx", kinds, types, number)
    m = (1, 16, 64, size(r.randint(65, 200)), size(r.randint(200, 900)), size(r.randint(900, 3000)))[number]
    n, k = size(r.randint(1, 2000)), size(r.randint(1, 3000))
    if number >= 2:
        n, k = 32 * -(-n // 32), 128 * -(-k // 128)
    shapes = (m, k), (n, k)
    x, w = (values(shape, torch.float32) * 2.0 ** r.randint(-20, 20) for shape in shapes)
    a, b = (
        gemmery.quantize_activations(t, format, per=per)
        for t, format, per in zip((x, w), types, kinds, strict=True)
    )
    if number < 2:
        a, b = (ScaledTensor(t.data.mT.contiguous().mT, t.scale) for t in (a, b))
    bias = values((n,), torch.float32)
    for _ in range(2):  # the short way, the second time
        assert_product(gemmery.scaled_matmul(a, b), a, b, fast_accum=True)
        result = gemmery.scaled_matmul(a, b, bias=bias, out_dtype=torch.float32)
        assert_product(result, a, b, bias, fast_accum=True)


@needs_cuda
@pytest.mark.parametrize("per", PERS)
@pytest.mark.parametrize("turned", [False, True])
def test_quantising_over_two_to_the_31_elements(per, turned):
    m, k = (1 << 16) + 7, (1 << 15) + 64
    x = torch.zeros((k, m) if turned else (m, k), dtype=torch.bfloat16, device=DEVICE)
    x = x.t() if turned else x
    rows = torch.tensor([0, 1, 40000, m // 2, m - 2, m - 1], device=DEVICE)
    for row in rows.tolist():
        x[row] = torch.randn(k, device=DEVICE)
    x[m - 1, k - 1] = 30.0
    q = gemmery.quantize_activations(x, per=per)
    some = ScaledTensor(q.data[rows], q.scale if per == "tensor" else q.scale[rows])
    assert_same(some, reference(x[rows], per=per))
    empty = torch.ones(m, dtype=torch.bool, device=DEVICE)
    empty[rows] = False
    assert not q.data.view(torch.uint8)[empty].any()
    if per != "tensor":
        assert (q.scale[empty] == 1).all()


@needs_cuda
def test_quantising_a_row_of_two_to_the_31_elements():
    k = (1 << 31) + 100
    x = torch.zeros((1, k), dtype=torch.float16, device=DEVICE)
    x[0, -1], x[0, 5] = -7.0, 2.0
    for per in PERS:
        q = gemmery.quantize_activations(x, "int8", per=per)
        assert q.data[0, -1] == -127
        assert q.data.count_nonzero() == 2
        assert q.data[0, 5] == (127 if per == "block" else 36)


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_outside_is_written(format):
    rng("outside", format)
    dense = Layout((1, 0))
    for m, k in ((33, 129), (1, 1), (5, 4097), (70, 20000)):
        m, k = size(m), size(k)
        x = values((m, k), torch.bfloat16)
        for span in (BLOCK, k):
            groups = -(-k // span)
            data, scale = (
                place((m, n), t, dense, filled=False) for n, t in ((k, FORMATS[format][0]), (groups, F32))
            )
            activations._cast_lines(x, data.view, scale.view, format, span)
            want = reference(x, format, per="token" if span == k else "block")
            assert torch.equal(bits(data.view), bits(want.data))
            assert torch.equal(scale.view, want.scale)
            data.assert_outside_unchanged()
            scale.assert_outside_unchanged()
        data, scale = (
            place(s, t, dense, filled=False) for s, t in (((m, k), FORMATS[format][0]), ((1, 1), F32))
        )
        activations._cast_known(x, data.view, scale.view.view(()), activations._maxima(x), format)
        assert torch.equal(bits(data.view), bits(reference(x, format, per="tensor").data))
        data.assert_outside_unchanged()
        scale.assert_outside_unchanged()


def test_magnitudes_from_the_product_before():
    rng("amax")
    x, w = values((size(500), 512), torch.bfloat16), values((size(768), 512), torch.bfloat16)
    y, amax = gemmery.linear(x, w, epilogue=epilogues.with_row_amax)
    for per in ("token", "tensor"):
        assert_same(gemmery.quantize_activations(y, per=per, amax=amax), reference(y, per=per, amax=amax))
    scale = torch.tensor(0.25, device=DEVICE)
    static = ScaledTensor(gemmery.linear(x, w, epilogue=epilogues.static_fp8, args=(scale,)), scale)
    assert ((static.dequantize() - y.float()).norm() / y.float().norm()).item() < 0.04


# ---------------------------------------------------------------------------------------------------------------------
# Products


def assert_product(result, a, b, bias=None, fast_accum=False):
    """Each element within what sums, factors and rounding may cost."""
    left, right = a.dequantize(torch.float64), b.dequantize(torch.float64).mT
    want, terms = left @ right, left.abs() @ right.abs()
    sums = 0.0 if a.dtype == torch.int8 else inner_error(a.dtype, a.shape[-1], fast_accum=fast_accum)
    # An int32 is rounded to float32; then two factors and a sum.
    slack = terms * (sums + 2.0**-21)
    if bias is not None:
        want = want + wide(bias)
        slack = slack + wide(bias).abs() * 2.0**-22
    assert result.shape == want.shape
    once = ROUNDING[result.dtype]
    allowed = slack * (1 + once) + once * want.abs() + TINY[result.dtype]
    bad = ~((wide(result) - want).abs() <= allowed)
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(bad.sum())} of {bad.numel()} elements of {a.kind} {tuple(a.shape)} by {b.kind} {tuple(b.shape)} are "
            f"wrong, the first at {where}: {result[where].item()} for {want[where].item()}, allowed "
            f"{allowed[where].item()}, terms {terms[where].item()}"
        )


def scaled(r, shape, dtype, kind):
    """Random numbers and scales of random layouts, amid poison."""
    data = place(shape, dtype, some_layout(r, shape, 1)).view
    if kind == "tensor":
        return ScaledTensor(data, torch.rand((), device=DEVICE) + 0.01)
    rows = (*shape[:-1], 1)
    scale = place(rows, torch.float32, some_layout(r, rows, 4)).view
    return ScaledTensor(data, scale)


TYPES = [(t, t) for t in (*FP8, torch.int8)] + [FP8, FP8[::-1]]


@pytest.mark.parametrize("fast_accum", [False, True])
@pytest.mark.parametrize(("first", "second"), TYPES, ids=str)
@pytest.mark.parametrize(
    "kinds", [(x, y) for x in ("row", "tensor") for y in ("row", "tensor")], ids="-".join
)
@pytest.mark.parametrize("number", range(4))
def test_products_of_random_layouts(first, second, kinds, fast_accum, number):
    r = rng("scaled", first, second, kinds, fast_accum, number)
    m = r.choice((1, 2, 16, size(r.randint(1, 700))))
    n, k = size(r.randint(1, 900)), size(r.randint(1, 1500))
    if number % 2:
        n, k = 16 * -(-n // 16), 16 * -(-k // 16)
    lead = tuple([r.randint(1, 3) for _ in range(r.choice((0, 0, 1, 2)))])
    a, b = scaled(r, (*lead, m, k), first, kinds[0]), scaled(r, (n, k), second, kinds[1])
    result = gemmery.scaled_matmul(a, b, fast_accum=fast_accum)
    assert result.dtype == torch.bfloat16
    assert_product(result, a, b, fast_accum=fast_accum)
    shape = r.choice(((n,), (m, 1), (1,), (m, n)))
    bias = values(shape, torch.float32)
    result = gemmery.scaled_matmul(a, b, bias=bias, out_dtype=torch.float32, fast_accum=fast_accum)
    assert_product(result, a, b, bias, fast_accum)
    placed = place(
        (*lead, m, n), torch.float16, Layout(tuple(range(len(lead) + 2))[::-1], 1, 3), filled=False
    )
    gemmery.scaled_matmul(a, b, out=placed.view, fast_accum=fast_accum, epilogue=lambda acc: acc * 2.0**-12)
    placed.assert_outside_unchanged()
    small = ScaledTensor(a.data, a.scale * 2.0**-12)
    assert_product(placed.view, small, b, fast_accum=fast_accum)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("m", [1, 16, 64, 100, 256, 1000, 4096])
def test_usual_products(format, m):
    """Quantised activations by quantised weights, at sizes at which all kinds of tiles and of K loops come up."""
    rng("usual", format, m)
    for n, k in ((1024, 4096), (4096, 1024), (2048, 7168)):
        x, w = values((size(m), size(k)), torch.bfloat16), values((size(n), size(k)), torch.bfloat16)
        for per in ("token", "tensor"):
            a = gemmery.quantize_activations(x, format, per=per)
            b = gemmery.quantize_activations(w, format, per=per)
            for fast_accum in (False, True):
                assert_product(
                    gemmery.scaled_matmul(a, b, fast_accum=fast_accum), a, b, fast_accum=fast_accum
                )
        exact = wide(x) @ wide(w).t()
        error = ((wide(gemmery.scaled_matmul(a, b)) - exact).norm() / exact.norm()).item()
        assert error < {"e4m3": 0.05, "e5m2": 0.1, "int8": 0.03}[format]


@gemmery.epilogue
def gated(acc, residual):
    gate, up = acc.chunk(2, -1)
    return F.silu(gate) * up + residual


@pytest.mark.parametrize("format", FORMATS)
def test_epilogues(format):
    rng("scaled epilogues", format)
    m, n, k = size(300), size(512), size(640)
    a = gemmery.quantize_activations(values((m, k), torch.bfloat16) / 8, format)
    b = gemmery.quantize_activations(values((n, k), torch.bfloat16) / 8, format)
    bias, residual = values((n,), torch.bfloat16), values((m, n // 2), torch.bfloat16)
    product = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    for _ in range(3):  # the short way, from the second time on
        result = gemmery.scaled_matmul(a, b, bias=bias, epilogue=gated, args=(residual,))
        want = gated(product + wide(bias), wide(residual))
        assert result.dtype == torch.bfloat16
        assert ((wide(result) - want).norm() / want.norm()).item() < 6e-3
        assert_product(gemmery.scaled_matmul(a, b), a, b)
        assert_product(gemmery.scaled_matmul(a, b, bias=bias), a, b, bias)
    y, amax = gemmery.scaled_matmul(a, b, epilogue=epilogues.with_row_amax)
    assert (y.dtype, amax.dtype) == (torch.bfloat16, torch.float32)
    assert_product(y, a, b)
    torch.testing.assert_close(amax.double(), product.abs().amax(-1), rtol=1e-2, atol=0)
    last = torch.tensor(0.05, device=DEVICE)
    result = ScaledTensor(gemmery.scaled_matmul(a, b, epilogue=epilogues.static_fp8, args=(last,)), last)
    limit = product.abs() * 2.0**-3.9 + 0.05 * 2.0**-9 + 2e-2
    assert ((wide(result.dequantize()) - product.clamp(-22.4, 22.4)).abs() <= limit).all()


@needs_cuda
def test_it_agrees_with_torch():
    """The same scales, in the same words, as `torch._scaled_mm`."""
    rng("torch's")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("torch has no fp8 products here")
    a = gemmery.quantize_activations(values((256, 1024), torch.bfloat16), per="tensor")
    b = gemmery.quantize_activations(values((512, 1024), torch.bfloat16), per="tensor")
    for fast_accum in (False, True):
        want = torch._scaled_mm(
            a.data, b.data.t(), scale_a=a.scale, scale_b=b.scale, out_dtype=torch.bfloat16, use_fast_accum=fast_accum
        )  # fmt: skip
        result = gemmery.scaled_matmul(a, b, fast_accum=fast_accum)
        torch.testing.assert_close(result, want, rtol=1.6e-2, atol=0.1)
        assert_product(result, a, b, fast_accum=fast_accum)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    def layer(x, data, scale, residual):
        a = gemmery.quantize_activations(x)
        return gemmery.scaled_matmul(a, ScaledTensor(data, scale), epilogue=gated, args=(residual,))

    b = gemmery.quantize_activations(values((size(256), size(256)), torch.bfloat16))
    compiled = torch.compile(
        layer, fullgraph=True, dynamic=dynamic, backend="aot_eager" if DRY else "inductor"
    )
    for m in (16, 48, 1) if dynamic else (16,):
        x, residual = values((m, size(256)), torch.bfloat16), values((m, size(256) // 2), torch.bfloat16)
        want = layer(x, b.data, b.scale, residual)
        torch.testing.assert_close(compiled(x, b.data, b.scale, residual), want, rtol=1e-2, atol=1e-2)


@needs_cuda
def test_captured():
    """A graph of quantising and the product, replayed on other values."""
    x = values((64, 1024), torch.bfloat16)
    b = gemmery.quantize_activations(values((512, 1024), torch.bfloat16))

    def layer():
        return [
            gemmery.scaled_matmul(gemmery.quantize_activations(x, per=per), b) for per in ("token", "tensor")
        ]

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = layer()
    x.copy_(values(x.shape, x.dtype))
    graph.replay()
    assert all(torch.equal(got, want) for got, want in zip(results, layer(), strict=True))


@needs_cuda
def test_another_gpu_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x, w = values((64, 256), torch.bfloat16).to("cuda:1"), values((128, 256), torch.bfloat16).to("cuda:1")
    for per in PERS:
        assert_same(gemmery.quantize_activations(x, per=per), reference(x, per=per))
    a, b = gemmery.quantize_activations(x), gemmery.quantize_activations(w)
    assert gemmery.scaled_matmul(a, b).device == x.device
    assert_product(gemmery.scaled_matmul(a, b), a, b)
