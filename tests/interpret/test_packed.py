"""Kernels for packed weights in the interpreter: odd sizes, every way of reading, batches, pairs, K cut in parts."""

import pytest
import torch
from torch.nn import functional as F

import gemmery
from gemmery import epilogues
from gemmery.product import cache, compute
from gemmery.schedules.binding import suits_tma

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
#: Formats with what is asked for besides, one of each way through the kernel.
KINDS = {
    "int4": ("int4", {"group_size": 32}),
    "int4 zeros": ("int4", {"group_size": 64, "symmetric": False}),
    "int4 channel": ("int4", {"group_size": 0}),
    "int8": ("int8", {}),
    "int8 zeros": ("int8", {"group_size": 32, "symmetric": False}),
    "e4m3 block": ("e4m3", {"scale": "block"}),
    "e5m2": ("e5m2", {}),
    "mxfp4": ("mxfp4", {}),
    "nvfp4": ("nvfp4", {}),
    "nf4": ("nf4", {}),
}
#: (M, N, K): one row, odd sizes, a K that is no multiple of 64, one whose rows no descriptor can read, and groups cut.
SHAPES = [(1, 16, 64), (1, 33, 100), (5, 40, 96), (3, 17, 77), (20, 70, 136)]


def values(*shape, seed=0, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight(kind, *shape, dtype=BF16):
    format, options = KINDS[kind]
    return gemmery.quantize(values(*shape, seed=1, dtype=F32) / 8, format, dtype=dtype, **options)


def wide(x, w):
    return x.double() @ w.dequantize(F64).mT


def near(y, want, dtype=BF16):
    assert y.dtype == dtype
    assert y.shape == want.shape
    bound = {BF16: 4e-3, F16: 1e-3, F32: 1e-5}[dtype]
    assert ((y.double() - want).norm() / want.norm()).item() <= bound


@gemmery.epilogue
def gated(acc, r):
    gate, up = acc.chunk(2, dim=-1)
    return F.silu(gate) * up + r


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_products(m, n, k, kind):
    dtype = F16 if n % 2 else BF16
    x, w = values(m, k, dtype=dtype), weight(kind, n, k, dtype=dtype)
    near(gemmery.linear(x, w, out_dtype=F32), wide(x, w), F32)


@pytest.mark.parametrize("turned", [False, True])
def test_layouts_of_x(turned):
    w = weight("int4", 24, 130)
    x = values(130, 7).t() if turned else values(7, 300)[:, 3:263:2]
    near(gemmery.linear(x, w), wide(x, w))
    out = torch.empty(24, 7, dtype=BF16).t()
    gemmery.linear(x, w, values(24), out=out)
    near(out, wide(x, w) + values(24))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["int4", "int8", "nvfp4"])
@pytest.mark.parametrize("m", [1, 18])
def test_pairs_and_epilogues(m, kind):
    x, w, r = values(m, 96), weight(kind, 64, 96), values(m, 32, seed=2)
    want = wide(x, w)
    near(gemmery.linear(x, w, epilogue=gated, args=(r,)), gated(want, r.double()))
    near(gemmery.linear(x, w, values(64), epilogue=epilogues.swiglu), epilogues.swiglu(want + values(64)))
    halves = (values(32), values(32, seed=3))
    near(gemmery.linear(x, w, halves, epilogue=epilogues.swiglu), epilogues.swiglu(want + torch.cat(halves)))
    y, sums = gemmery.linear(x, w, epilogue=lambda acc: (acc, acc.sum(-1)), out_dtype=F32)
    near(y, want, F32)
    torch.testing.assert_close(sums.double(), want.sum(-1), rtol=1e-4, atol=1e-4)


def test_a_column_for_two():
    x, w, rows = values(5, 64), weight("int8", 2, 64), values(5, 1, dtype=F32)
    near(gemmery.linear(x, w, epilogue=torch.mul, args=(rows,)), wide(x, w) * rows)


def test_halves_that_no_kernel_reads():
    with pytest.raises(ValueError, match=r"48 rows; .* must be a multiple of 32"):
        gemmery.linear(values(5, 64), weight("int8", 48, 64), epilogue=epilogues.swiglu)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["int4", "int8", "e4m3 block"])
@pytest.mark.parametrize("parts", [2, 3])
def test_k_in_parts(kind, parts):
    x, w = values(6, 400), weight(kind, 32, 400)
    config = gemmery.plan(x, w, out_dtype=F32).config
    cut = gemmery.Config(**{**{f: getattr(config, f) for f in config.__dataclass_fields__}, "split_k": parts})
    near(gemmery.linear(x, w, config=cut, out_dtype=F32), wide(x, w), F32)
    near(gemmery.linear(x, w, config=cut, epilogue=epilogues.gelu), F.gelu(wide(x, w)))


@pytest.mark.parametrize("kind", ["int4", "int8", "nvfp4"])
def test_batches(kind):
    w = weight(kind, 3, 20, 96)
    x = values(3, 5, 96)
    near(gemmery.bmm(x, w), wide(x, w))
    near(gemmery.matmul(x[0], w), wide(x[0], w))
    near(gemmery.matmul(values(2, 3, 1, 96), w), wide(values(2, 3, 1, 96), w))
    near(gemmery.linear(x, w[1]), wide(x, w[1]))


def test_columns_in_another_order():
    """GPTQ's act-order; a prologue sees the columns as they were."""
    order = torch.randperm(96, generator=torch.Generator().manual_seed(4))
    w = weight("int4 zeros", 20, 96)
    w = w.with_parts(w.parts() | {"permutation": order})
    x, scale = values(5, 96), values(96, dtype=F32)
    near(gemmery.linear(x, w), wide(x, w))
    near(gemmery.linear(x[0], w), wide(x[0], w))
    near(gemmery.linear(x, w, prologue=torch.mul, prologue_args=(scale,)), wide((x * scale).to(BF16), w))


def test_batch_invariant():
    x, w = values(33, 96), weight("int4", 24, 96)
    whole = gemmery.linear(x, w, batch_invariant=True)
    near(whole, wide(x, w))
    assert torch.equal(gemmery.linear(x[7:8], w, batch_invariant=True), whole[7:8])


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    w, bias = weight("int4", 24, 96), values(24)
    gelu = gemmery.epilogue(epilogues.gelu)
    function = lambda x: (gemmery.linear(x, w), gemmery.linear(x, w, bias, epilogue=gelu))  # noqa: E731
    made = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for m in (5, 7):
        x = values(m, 96)
        assert all(torch.equal(got, want) for got, want in zip(made(x), function(x), strict=True))
    x = x.requires_grad_()
    grads = [torch.autograd.grad(f(x)[1].float().sum(), x)[0] for f in (made, function)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_halves_in_a_batch(kind):
    x, w = values(3, 5, 128), weight(kind, 3, 64, 128)
    residual = values(3, 5, 32, seed=2)
    near(gemmery.bmm(x, w, epilogue=gated, args=(residual,)), gated(wide(x, w), residual.double()))
    with pytest.raises(ValueError, match="needs TMA"):
        gemmery.bmm(x, w, epilogue=epilogues.swiglu, config="32x64x64-g8-w4-s3-tile-descriptor-swap")


def test_a_channel_is_not_an_argument():
    """Both are inputs of the kernel, and of one shape."""

    @gemmery.epilogue
    def maybe(acc, r=None):
        return acc if r is None else acc * r

    x, w = values(5, 128), weight("int4 channel", 64, 128)
    near(gemmery.linear(x, w, epilogue=maybe), wide(x, w))
    row = values(1, 64, seed=3, dtype=F32)
    near(gemmery.linear(x, w.unscaled(), epilogue=maybe, args=(row,)), wide(x, w.unscaled()) * row.double())


def misaligned(tensor):
    """The same numbers four bytes further on than where memory begins."""
    step = 4 // tensor.element_size()
    room = torch.empty(tensor.numel() + step, dtype=tensor.dtype)
    return room[step:].view(tensor.shape).copy_(tensor)


def test_parts_that_are_not_aligned():
    x, w = values(5, 128), weight("int4 zeros", 64, 128)
    want, plans = wide(x, w), []
    for name in (None, "words", "scales", "zeros"):
        parts = w.parts() if name is None else w.parts() | {name: misaligned(getattr(w, name))}
        other = w.with_parts(parts)
        near(gemmery.linear(x, other), want)
        plans.append(gemmery.plan(x, other))
        assert suits_tma(plans[-1].problem) == (name is None)
    masks = [plan._misaligned for plan in plans]
    assert masks == [(15, 15, 15, 15, 15), (15, 0, 15, 15, 15), (15, 15, 0, 15, 15), (15, 15, 15, 0, 15)]


def test_the_context_manager_reaches_packed_products(monkeypatch):
    asked = []
    prepare = compute.prepare

    def noted(call, out):
        asked.append(call.options.batch_invariant)
        return prepare(call, out)

    monkeypatch.setattr(compute, "prepare", noted)
    monkeypatch.setattr(cache, "find", lambda key: None)
    x, w = values(7, 192), weight("int4", 48, 192)
    with gemmery.batch_invariant():
        gemmery.linear(x, w)
        gemmery.linear(x, w, epilogue=epilogues.gelu)
        gemmery.linear(x, values(48, 192), epilogue=epilogues.relu_squared)
    assert asked == [True, True, True]


def test_nothing_is_unpacked_for_nothing(monkeypatch):
    def refuse(*_):
        raise AssertionError("unpacked")

    w = weight("int8", 64, 128)
    monkeypatch.setattr(gemmery.QuantizedTensor, "dequantize", refuse)
    assert gemmery.linear(values(0, 128), w).shape == (0, 64)
