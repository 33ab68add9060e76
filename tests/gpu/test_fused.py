"""Traced epilogues: right against float64 on random shapes and layouts, in every schedule, with gradients, compiled, in graphs."""

import math

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional as F

import gemmery
from gemmery import epilogues
from gemmery.product import cache, vjp
from tests.gpu.common import DEVICE, DRY, LAYOUTS, matrix, needs_cuda, operands, rng, size, values, wide

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6, torch.float64: 1e-14}
DTYPES = tuple(TOLERANCE)


def gated(acc, bias, residual):
    gate, up = (acc + bias).chunk(2, dim=-1)
    return F.silu(gate) * up + residual


def several(acc, residual, column):
    value = (acc * column + residual).tanh()
    return value, acc.sum(-1), (acc * acc).mean(-1, keepdim=True), acc.amax(-1), acc.logsumexp(-1), acc.relu()


def assert_right(results, want, dtype, name=""):
    results = results if isinstance(results, tuple) else (results,)
    want = want if isinstance(want, tuple) else (want,)
    assert len(results) == len(want)
    for i, (result, expected) in enumerate(zip(results, want, strict=True)):
        assert result.shape == expected.shape
        assert result.isfinite().all(), (name, i)
        error = ((wide(result) - expected).norm() / expected.norm()).item()
        limit = TOLERANCE[dtype] if result.dim() == expected.dim() else TOLERANCE[torch.float32]
        assert error <= limit, (name, i, error)


def exact(function, a, b, args):
    return function(wide(a) @ wide(b), *[wide(x) if isinstance(x, torch.Tensor) else x for x in args])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(3))
def test_random_shapes(dtype, layout, number):
    r = rng("fused", dtype, layout, number)
    m, k = size(r.randrange(1, 700)), size(r.randrange(1, 700))
    n = 2 * size(r.randrange(1, 500)) if number else 16 * size(r.randrange(1, 60))
    a, b = operands(m, n, k, layout, dtype)
    args = (values((n,), dtype), matrix(m, n // 2, dtype, r.choice("NT")))
    assert_right(gemmery.matmul(a, b, epilogue=gated, args=args), exact(gated, a, b, args), dtype, (m, n, k))
    args = (matrix(m, n, dtype, r.choice("NT")), values((m, 1), dtype))
    assert_right(
        gemmery.matmul(a, b, epilogue=several, args=args), exact(several, a, b, args), dtype, (m, n, k)
    )


CONFIGS = (
    "128x256x64-g16-w8-s4-persistent-descriptor/2",
    "128x256x64-g16-w8-s4-persistent-descriptor/2-t2",
    "128x256x64-g16-w8-s3-persistent-descriptor/2",
    "128x256x64-g16-w8-s3-persistent-descriptor/2-t4",
    "128x128x64-g8-w8-s3-tile-descriptor-k3",
    "64x192x64-g8-w4-s3-tile-descriptor",
    "16x64x128-g8-w4-s3-tile-descriptor-swap-k2".replace("-swap-k2", "-k2-swap"),
    "64x64x64-g8-w4-s3-tile-pointer",
    "128x256x64-g16-w8-s3-persistent-pointer",
)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_schedule(config, layout):
    rng("fused configs", config, layout)
    m, n, k = size(1104), size(2080), size(528)
    a, b = operands(m, n, k, layout, torch.bfloat16)
    args = (values((n,), torch.bfloat16), matrix(m, n // 2, torch.bfloat16))
    result = gemmery.matmul(a, b, epilogue=gated, args=args, config=config)
    assert_right(result, exact(gated, a, b, args), torch.bfloat16)
    args = (matrix(m, n, torch.bfloat16, "T"), values((m, 1), torch.bfloat16))
    result = gemmery.matmul(a, b, epilogue=several, args=args, config=config)
    assert_right(result, exact(several, a, b, args), torch.bfloat16)
    again = gemmery.matmul(a, b, epilogue=several, args=args, config=config)
    assert all(torch.equal(x, y) for x, y in zip(result, again, strict=True))


@pytest.mark.parametrize(
    "name",
    ["relu", "relu_squared", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "swiglu", "geglu", "reglu"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ready_made(name, dtype):
    function = getattr(epilogues, name)
    a, b = operands(size(300), size(512), size(256), "NT", dtype)
    assert_right(gemmery.matmul(a, b, epilogue=function), exact(function, a, b, ()), dtype)


@pytest.mark.parametrize(
    "function",
    [F.softplus, F.elu, F.mish, F.hardswish, F.logsigmoid, torch.expm1, torch.erf],
    ids=lambda function: function.__name__,
)
def test_torch_functions(function):
    a, b = operands(size(200), size(300), 64, "NT", torch.float32)
    b = b / 16
    assert_right(
        gemmery.matmul(a, b, epilogue=lambda acc: function(acc)), exact(function, a, b, ()), torch.float32
    )


def rms_norm(acc, gain):
    return F.rms_norm(acc, acc.shape[-1:], gain, 1e-5)


def layer_norm(acc, gain):
    return F.layer_norm(acc, acc.shape[-1:], gain, gain - 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("function", [rms_norm, layer_norm])
def test_norms(function, dtype):
    """A tile contains whole rows, also where the columns do not fill it. Gradients are those of torch."""
    # Tiles of float32 have at most 64 columns.
    for n in (48, 64) if DRY or dtype == torch.float32 else (64, 200, 256):
        a, b = operands(size(300), n, size(512), "NN", dtype)
        gain = values((n,), dtype)
        assert_right(
            gemmery.matmul(a, b, epilogue=function, args=(gain,)), exact(function, a, b, (gain,)), dtype
        )
        ours = [x.detach().requires_grad_() for x in (a, b, gain)]
        theirs = [wide(x).requires_grad_() for x in (a, b, gain)]
        found = gemmery.matmul(*ours[:2], epilogue=function, args=ours[2:])
        up = values(found.shape, dtype)
        want = function(theirs[0] @ theirs[1], theirs[2])
        made = torch.autograd.grad(found, ours, up)
        for x, y in zip(made, torch.autograd.grad(want, theirs, wide(up)), strict=True):
            assert ((wide(x) - y).norm() / y.norm()).item() < 4 * TOLERANCE[dtype]


def test_batches_and_int8():
    a, b = values((3, 1, size(120), 64), torch.float16), values((4, 64, size(96)), torch.float16)
    args = (values((4, 1, size(96)), torch.float16), values((3, 1, size(120), 1), torch.float16))
    result = gemmery.matmul(a, b, epilogue=several, args=args)
    assert_right(result, exact(several, a, b, args), torch.float16)
    a, b = operands(size(256), size(384), size(512), "NT", torch.int8)
    scale = values((size(384),), torch.float32).abs()
    result = gemmery.matmul(a, b, epilogue=lambda acc, s: (acc * s).to(torch.bfloat16), args=(scale,))
    assert_right(result, exact(lambda acc, s: acc * s, a, b, (scale,)), torch.bfloat16)


def test_dropout_agrees_with_the_cpu():
    def dropped(acc, seed):
        return epilogues.dropout(acc, 0.3, seed)

    a, b = operands(size(300), size(500), 64, "NT", torch.float32)
    result = gemmery.matmul(a, b, epilogue=dropped, args=(1234567,))
    want = dropped(torch.ones(result.shape), 1234567)
    assert torch.equal(result.cpu() != 0, want != 0)
    assert abs((result == 0).float().mean().item() - 0.3) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("function", [gated, several], ids=["gated", "several"])
def test_gradients(function, dtype):
    m, n, k = size(200), size(384), size(128)
    rng("fused gradients", function.__name__, dtype)
    x, w = values((m, k), dtype).requires_grad_(), values((n, k), dtype).requires_grad_()
    if function is gated:
        args = (values((n,), dtype), values((m, n // 2), dtype))
    else:
        args = (values((m, n), dtype), values((m, 1), dtype))
    leaves = [x, w, *[t.requires_grad_() for t in args]]
    results = gemmery.linear(x, w, epilogue=function, args=args)
    results = results if isinstance(results, tuple) else (results,)
    incoming = [values(y.shape, torch.float32).to(y.dtype) for y in results]
    found = torch.autograd.grad(results, leaves, incoming)
    exact_leaves = [wide(t.detach()).requires_grad_() for t in leaves]
    want = function(exact_leaves[0] @ exact_leaves[1].t(), *exact_leaves[2:])
    want = want if isinstance(want, tuple) else (want,)
    expected = torch.autograd.grad(want, exact_leaves, [wide(g) for g in incoming])
    limit = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
    for name, got, right in zip("xwabcd", found, expected, strict=False):
        assert got.dtype == dtype
        assert ((wide(got) - right).norm() / right.norm()).item() <= limit, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 16, 100, 1000])
@pytest.mark.parametrize("up_first", [False, True])
def test_pairs_of_weights(dtype, m, up_first):
    """Gate and up as two matrices of one allocation, in either order, through descriptors and pointers."""
    rng("pairs", dtype, m, up_first)
    for n, k in ((size(512), size(384)), (100, 50)):
        weights = values((2, n, k), dtype)
        gate, up = weights[int(up_first)], weights[int(not up_first)]
        x, residual = values((size(m), k), dtype), values((size(m), n), dtype)
        args = (values((2 * n,), dtype), residual)
        result = gemmery.linear(x, (gate, up), epilogue=gated, args=args)
        assert_right(result, exact(gated, x, torch.cat((gate, up)).t(), args), dtype, (m, n, k))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("m", [1, 16, 100, 1000])
def test_pairs_of_allocations(dtype, m):
    """Gate and up wherever the allocator put them: each is once what comes first in memory."""
    rng("pairs of allocations", dtype, m)
    n, k = size(512), size(384)
    first, second = values((n, k), dtype), values((n, k), dtype)
    b, c = values((n,), dtype), values((n,), dtype)
    x = values((size(m), k), dtype)
    for pair, biases in (((first, second), (b, c)), ((second, first), (c, b))):
        result = gemmery.linear(x, pair, biases, epilogue=epilogues.swiglu)
        gate, up = (wide(x) @ wide(w).t() + wide(bias) for w, bias in zip(pair, biases, strict=True))
        assert_right(result, F.silu(gate) * up, dtype, m)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 16, 100, 1000])
@pytest.mark.parametrize("k", [512, 200, 99])
def test_prologues(dtype, m, k):
    """A row scale, a column weight and a whole matrix on A, with what it makes of the zeros beyond K kept out."""
    rng("prologues", dtype, m, k)
    m, n, k = size(m), size(500), size(k)
    a, b = operands(m, n, k, "NT", dtype)
    args = (values((m, 1), dtype), values((k,), torch.float32), matrix(m, k, dtype, "T"))

    def function(a, s, g, r):
        return torch.log(2 + (a * s * g + r).square())

    def before(a):
        # Rounded as an operand is.
        return wide(function(wide(a), *[wide(x) for x in args]).to(dtype))

    def small(acc):
        # A sine of large numbers would show each error of the sums as one of its own.
        return torch.sin(acc / 32)

    result = gemmery.matmul(a, b, prologue=function, prologue_args=args, epilogue=small)
    assert_right(result, small(before(a) @ wide(b)), dtype, (m, n, k))


@triton.jit
def leaky(acc, row, slope):
    return tl.where(acc > 0, acc + row, acc * slope)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_device_functions(dtype):
    rng("device functions", dtype)
    a, b = operands(size(300), size(500), 128, "NT", dtype)
    row = values((b.shape[-1],), dtype)
    exactly = wide(a) @ wide(b)
    want = torch.where(exactly > 0, exactly + wide(row), exactly * 0.25)
    assert_right(gemmery.matmul(a, b, epilogue=leaky, args=(row, 0.25)), want, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("m", [1, 100, 1000])
@pytest.mark.parametrize("kind", ["mlp", "stacked", "two"])
def test_feed_forward_blocks(kind, m, dtype):
    rng("feed forward", kind, m, dtype)
    width, hidden = size(256), size(640)
    how = {"device": values((1,), dtype).device, "dtype": dtype}
    if kind == "mlp":
        block = gemmery.nn.MLP(width, hidden, activation="gelu", **how)
    else:
        block = gemmery.nn.GatedMLP(width, hidden, stacked=kind == "stacked", **how)
    x = values((size(m), width), dtype).requires_grad_()
    incoming = values((size(m), width), dtype)
    found = torch.autograd.grad(block(x), (x, *block.parameters()), incoming)
    leaves = [wide(t.detach()).requires_grad_() for t in (x, *block.parameters())]
    named = dict(zip(["x", *dict(block.named_parameters())], leaves, strict=True))
    if kind == "mlp":
        inner = F.gelu(F.linear(named["x"], named["up.weight"], named["up.bias"]))
        want = F.linear(inner, named["down.weight"], named["down.bias"])
    else:
        first = named.get("gate_up.weight")
        gate, up = first.chunk(2) if first is not None else (named["gate.weight"], named["up.weight"])
        want = F.linear(F.silu(F.linear(named["x"], gate)) * F.linear(named["x"], up), named["down.weight"])
    expected = torch.autograd.grad(want, leaves, wide(incoming))
    limit = {torch.bfloat16: 2e-2, torch.float32: 1e-5}[dtype]
    for name, got, right in zip(named, found, expected, strict=True):
        assert ((wide(got) - right).norm() / right.norm()).item() <= limit, name


@pytest.mark.parametrize("m", [256, 1000])
@pytest.mark.parametrize("stacked", [False, True])
def test_kernels_of_a_gated_block(stacked, m, monkeypatch):
    """One product with an epilogue forward, one backward, and no elementwise kernel of ours."""
    rng("kernels of a gated block", stacked, m)
    ran = []
    launch = cache.launch

    def noted(known, *given):
        if known.plan.problem.fusion is not None:
            ran.append(known.plan.problem)
        return launch(known, *given)

    monkeypatch.setattr(cache, "launch", noted)
    monkeypatch.setattr(vjp, "pointwise", lambda *_: pytest.fail("an elementwise kernel ran"))
    # A size of its own: a call that was seen before does not pass here.
    width, hidden = size(256), size(704 if stacked else 768)
    block = gemmery.nn.GatedMLP(width, hidden, stacked=stacked, device=DEVICE, dtype=torch.bfloat16)
    x = values((size(m), width), torch.bfloat16).requires_grad_()
    y = block(x)
    assert [p.out_n for p in ran] == [hidden]
    first = block.gate_up.weight.chunk(2) if stacked else (block.gate.weight, block.up.weight)
    gate, up = (F.linear(wide(x), wide(w)) for w in first)
    assert_right(y.detach(), F.linear(F.silu(gate) * up, wide(block.down.weight)).detach(), torch.bfloat16)
    ran.clear()
    y.backward(values(y.shape, torch.bfloat16))
    assert [(p.M, p.K) for p in ran] == [(size(m), width)]


def normed(acc, gain):
    return acc * torch.rsqrt(acc.square().mean(-1, keepdim=True) + 1e-5) * gain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("n", [50, 64] if DRY else [50, 64, 128, 200, 256])
@pytest.mark.parametrize("m", [1, 16, 100, 1000])
def test_reduced_rows_used_again(m, n, dtype):
    """Softmax and a norm, in tiles as wide as the product; IEEE single precision has none beyond 64 columns."""
    rng("whole rows", m, n, dtype)
    if dtype == torch.float32 and n > 64:
        with pytest.raises(ValueError, match="no tile is as wide"):
            gemmery.matmul(
                values((m, 64), dtype), values((64, n), dtype), epilogue=normed, args=(values((n,), dtype),)
            )
        return
    a, b = operands(size(m), n, size(300), "NT", dtype)
    gain = values((n,), dtype)
    assert_right(
        gemmery.matmul(a, b, epilogue=normed, args=(gain,)), exact(normed, a, b, (gain,)), dtype, (m, n)
    )

    def chances(acc):
        return (acc / 16).softmax(-1)

    assert_right(gemmery.matmul(a, b, epilogue=chances), exact(chances, a, b, ()), dtype, (m, n))


_swiglu = gemmery.epilogue(epilogues.swiglu)


@needs_cuda
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    def layer(x, w, v):
        return gemmery.linear(gemmery.linear(x * 2, w, epilogue=_swiglu), v).sin()

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    w, v = (values(s, torch.float32).requires_grad_() for s in ((512, 256), (256, 256)))
    for m in (64, 100):
        x = values((m, 256), torch.float32).requires_grad_()
        found = torch.autograd.grad(compiled(x, w, v).sum(), (x, w, v))
        want = torch.autograd.grad(layer(x, w, v).sum(), (x, w, v))
        for got, right in zip(found, want, strict=True):
            assert torch.allclose(got, right, rtol=1e-3, atol=1e-3 * right.abs().max().item())


@needs_cuda
def test_in_a_graph():
    a, b = operands(256, 1024, 512, "NT", torch.bfloat16)
    args = (values((256, 1024), torch.bfloat16), values((256, 1), torch.bfloat16))
    want = gemmery.matmul(a, b, epilogue=several, args=args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gemmery.matmul(a, b, epilogue=several, args=args)
    for x in captured:
        x.zero_()
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(captured, want, strict=True))


@needs_cuda
def test_nothing_is_allocated_but_the_results():
    a, b = operands(2048, 4096, 512, "NT", torch.bfloat16)
    gemmery.matmul(a, b, epilogue=_swiglu)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    # As asked for: what the allocator gives may be a block of its own that is larger.
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = gemmery.matmul(a, b, epilogue=_swiglu)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    assert peak - before == math.prod(result.shape) * 2


@needs_cuda
def test_the_short_way_is_taken():
    a, b = operands(256, 1024, 512, "NT", torch.bfloat16)
    plan = gemmery.plan(a, b, epilogue=epilogues.bias, args=(values((1024,), torch.bfloat16),))
    assert plan.direct is not None
    assert plan.resources().spills == 0
