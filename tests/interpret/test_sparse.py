"""Kernels for 2:4 sparse weights in the interpreter: odd sizes, epilogues, halves, batches, K cut in parts, gradients."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import gemmery
from gemmery import epilogues
from gemmery.operands.sparse import sampled
from gemmery.product import cache
from tests.interpret.test_quick import entered  # noqa: F401  (a fixture)

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
#: (M, N, K): one row, odd sizes, N and K that are no multiples of 32 and 64, and more than a tile of rows.
SHAPES = [(1, 32, 64), (1, 33, 100), (5, 40, 96), (3, 17, 76), (20, 70, 136), (67, 96, 192)]


def values(*shape, seed=0, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight(*shape, dtype=BF16, **options):
    return gemmery.sparsify(values(*shape, seed=1, dtype=dtype) / 8, **options)


def int4(*shape, group_size=32, dtype=BF16):
    return gemmery.quantize(weight(*shape, dtype=dtype), "int4", group_size=group_size)


def scaled(w, per_row=True):
    """A weight with a channel, as checkpoints of 8 bits give it."""
    channel = (
        torch.rand((*w.shape[:-1],) if per_row else (1,), generator=torch.Generator().manual_seed(5)) + 0.5
    )
    return w.with_parts(w.parts() | {"channel": channel})


def wide(x, w):
    return x.double() @ w.dense(F64).mT


def near(y, want, dtype=BF16):
    assert y.dtype == dtype
    assert y.shape == want.shape
    bound = {BF16: 4e-3, F16: 1e-3, F32: 1e-5}[dtype]
    assert ((y.double() - want).norm() / want.norm()).item() <= bound


@gemmery.epilogue
def gated(acc, r):
    gate, up = acc.chunk(2, dim=-1)
    return F.silu(gate) * up + r


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_products(m, n, k, dtype):
    x, w = values(m, k, dtype=dtype), weight(n, k, dtype=dtype)
    near(gemmery.linear(x, w, out_dtype=F32), wide(x, w), F32)


@pytest.mark.parametrize("method", ["magnitude", "transposable"])
def test_which_numbers_are_kept_is_all_the_same_to_kernels(method):
    x, w = values(7, 96), weight(40, 96, method=method)
    near(gemmery.linear(x, w, out_dtype=F32), wide(x, w), F32)


@pytest.mark.parametrize("turned", [False, True])
def test_layouts_of_x(turned):
    w = weight(24, 132)
    x = values(132, 7).t() if turned else values(7, 300)[:, 3:267:2]
    near(gemmery.linear(x, w), wide(x, w))
    out = torch.empty(24, 7, dtype=BF16).t()
    gemmery.linear(x, w, values(24), out=out)
    near(out, wide(x, w) + values(24))


def test_one_row_without_a_dimension_for_it():
    x, w, bias = values(100), weight(33, 100), values(33)
    near(gemmery.linear(x, w), wide(x, w))
    near(gemmery.linear(x, w, bias), wide(x, w) + bias)


@pytest.mark.parametrize("m", [1, 18])
def test_pairs_and_epilogues(m):
    x, w, r = values(m, 96), weight(64, 96), values(m, 32, seed=2)
    want = wide(x, w)
    near(gemmery.linear(x, w, epilogue=gated, args=(r,)), gated(want, r.double()))
    near(gemmery.linear(x, w, values(64), epilogue=epilogues.swiglu), epilogues.swiglu(want + values(64)))
    halves = (values(32), values(32, seed=3))
    near(gemmery.linear(x, w, halves, epilogue=epilogues.swiglu), epilogues.swiglu(want + torch.cat(halves)))
    near(gemmery.linear(x, w, values(64), epilogue=F.gelu), F.gelu(want + values(64)))
    y, sums = gemmery.linear(x, w, epilogue=lambda acc: (acc, acc.sum(-1)), out_dtype=F32)
    near(y, want, F32)
    torch.testing.assert_close(sums.double(), want.sum(-1), rtol=1e-4, atol=1e-4)


def test_a_prologue():
    x, w, scale = values(5, 96), weight(40, 96), values(96, dtype=F32)
    near(gemmery.linear(x, w, prologue=torch.mul, prologue_args=(scale,)), wide((x * scale).to(BF16), w))


@pytest.mark.parametrize("per_row", [True, False])
def test_a_channel(per_row):
    x, w, bias = values(5, 100), scaled(weight(40, 100), per_row), values(40)
    near(gemmery.linear(x, w, out_dtype=F32), wide(x, w), F32)
    near(gemmery.linear(x, w, bias, epilogue=epilogues.gelu), F.gelu(wide(x, w) + bias))
    near(gemmery.linear(values(5, 96), scaled(weight(64, 96), per_row), epilogue=epilogues.swiglu),
         epilogues.swiglu(wide(values(5, 96), scaled(weight(64, 96), per_row))))  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("group_size", [0, 32, 128])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 33, 100), (17, 40, 260), (64, 33, 140)])
def test_int4(m, n, k, group_size, dtype):
    x, w = values(m, k, dtype=dtype), int4(n, k, group_size=group_size, dtype=dtype)
    near(gemmery.linear(x, w, out_dtype=F32), wide(x, w), F32)


@pytest.mark.parametrize("m", [1, 18])
@pytest.mark.parametrize("group_size", [0, 32])
def test_int4_with_epilogues(m, group_size):
    x, w, bias = values(m, 100), int4(128, 100, group_size=group_size), values(128)
    near(gemmery.linear(x, w, bias, epilogue=F.gelu), F.gelu(wide(x, w) + bias))
    near(gemmery.linear(x, w, bias, epilogue=epilogues.swiglu), epilogues.swiglu(wide(x, w) + bias))


@pytest.mark.slow
def test_int4_in_every_tile():
    """Steps of 32 and more columns, in groups that are longer and shorter, and K in parts."""
    from gemmery.select.space import tiles_of

    x = values(20, 400)
    for group_size in (32, 64, 256):
        w = int4(70, 400, group_size=group_size)
        for tile in tiles_of("interpreter", "sparse4"):
            for parts in (1, 2) if tile.splits else (1,):
                config = replace(tile.config, split_k=parts)
                near(gemmery.linear(x, w, config=config, out_dtype=F32), wide(x, w), F32)
    narrow = gemmery.Config(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=3, swap=True)
    near(gemmery.linear(x, w, config=narrow, out_dtype=F32), wide(x, w), F32)
    with pytest.raises(
        ValueError, match="block_k must be at least 64 for descriptors of sparse weights of int4"
    ):
        gemmery.linear(x, w, config=replace(narrow, loader="descriptor"))


def test_int4_batches_and_groups():
    x, w = values(3, 5, 196), int4(3, 40, 196)
    near(gemmery.bmm(x, w), wide(x, w))
    near(gemmery.matmul(x[0], w), wide(x[0], w))
    near(gemmery.linear(x[1], w[1]), wide(x[1], w[1]))
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    want = torch.cat([wide(x[0, :2], w[0]), wide(x[0, 2:], w[2])])
    near(gemmery.grouped_linear(x[0], w, offs=offs), want)


def test_int4_gradients_of_x():
    x, w, grad = values(6, 100).requires_grad_(), scaled(int4(33, 100)), values(6, 33, seed=7)
    gemmery.linear(x, w, epilogue=F.silu).backward(grad)
    leaf = x.detach().double().requires_grad_()
    F.silu(leaf @ w.dense(F64).T).backward(grad.double())
    near(x.grad, leaf.grad, BF16)


def test_a_repeated_call_sees_its_own_scales():
    x, w, other = values(5, 100), int4(33, 100), int4(33, 100)
    other.scales.mul_(2)
    results = [gemmery.linear(x, y, out_dtype=F32) for y in (w, other, w, other)]
    near(results[1], wide(x, other), F32)
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    assert torch.equal(2 * results[0], results[1])


def test_int4_compiled():
    w = int4(40, 100)
    function = lambda x, w: gemmery.linear(x, w)  # noqa: E731
    made = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = values(5, 100)
    assert torch.equal(made(x, w), function(x, w))


def fp8(m, n, k, format="e4m3", per="token", seed=0):
    """Activations of fp8, a weight that keeps numbers of e4m3, and their product."""
    x = gemmery.quantize_activations(values(m, k, seed=seed, dtype=F32), format, per=per)
    w = gemmery.quantize(weight(n, k), "e4m3")
    return x, w, x.dequantize(F64) @ w.dense(F64).T


@pytest.mark.parametrize(("format", "per"), [("e4m3", "token"), ("e4m3", "tensor"), ("e5m2", "token")])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 33, 100), (33, 40, 260), (5, 64, 128), (3, 17, 76)])
def test_fp8(m, n, k, format, per):
    x, w, want = fp8(m, n, k, format, per)
    bias, r = values(n), values(m, n, seed=3)
    near(gemmery.scaled_matmul(x, w), want)
    near(gemmery.scaled_matmul(x, w, fast_accum=True, out_dtype=F32), want, F32)
    near(gemmery.scaled_matmul(x, w, bias=bias, out_dtype=F16), want + bias, F16)
    y = gemmery.scaled_matmul(x, w, bias=bias, epilogue=lambda acc, r: F.silu(acc) + r, args=(r,))
    near(y, F.silu(want + bias) + r)


@pytest.mark.parametrize("m", [1, 33])
def test_fp8_in_halves(m):
    x, w, want = fp8(m, 64, 100)
    near(gemmery.scaled_matmul(x, w, epilogue=epilogues.swiglu), epilogues.swiglu(want))


def test_fp8_in_every_tile():
    from gemmery.select.space import tiles_of

    x, w, want = fp8(20, 70, 400)
    for tile in tiles_of("interpreter", "sparse fp8"):
        for parts in (1, 2) if tile.splits else (1,):
            config = replace(tile.config, split_k=parts)
            near(gemmery.scaled_matmul(x, w, config=config, out_dtype=F32), want, F32)


def test_fp8_of_any_strides():
    """Numbers and scales of x that lie otherwise, a batch of rows, and a result that lies otherwise."""
    x, w, _ = fp8(24, 40, 100)
    turned = gemmery.ScaledTensor(x.data.mT.contiguous().mT, x.scale.repeat_interleave(2, 0)[::2])
    cut = gemmery.ScaledTensor(x.data[::2], x.scale[::2])
    batch = gemmery.ScaledTensor(x.data.view(4, 6, 100), x.scale.view(4, 6, 1))
    swapped = gemmery.ScaledTensor(batch.data.transpose(0, 1), batch.scale.transpose(0, 1))
    for a in (turned, cut, batch, swapped):
        want = a.dequantize(F64) @ w.dense(F64).T
        near(gemmery.scaled_matmul(a, w, bias=values(40)), want + values(40))
        out = torch.full((40, *want.shape[:-1]), torch.nan, dtype=F32).movedim(0, -1)
        assert gemmery.scaled_matmul(a, w, out=out) is out
        near(out, want, F32)


def test_repeated_calls_with_fp8_see_their_own_scales(entered):  # noqa: F811
    """They go the short way, with other numbers, scales and metadata; a scale of another kind is another call."""
    calls = [fp8(12, 40, 100, seed=seed) for seed in range(3)]
    x, w, want = calls[1]
    halved = gemmery.ScaledTensor(x.data, x.scale / 2)
    tripled = w.with_parts(w.parts() | {"channel": w.channel * 3})
    other = gemmery.quantize(weight(40, 100, method="transposable"), "e4m3")
    calls += [
        (halved, w, want / 2),
        (x, tripled, want * 3),
        (x, other, x.dequantize(F64) @ other.dense(F64).T),
    ]
    for i, (a, b, wanted) in enumerate(calls):
        near(gemmery.scaled_matmul(a, b), wanted)
        assert len(entered) == i
    whole = gemmery.ScaledTensor(x.data, torch.tensor(0.5))
    near(gemmery.scaled_matmul(whole, w), whole.dequantize(F64) @ w.dense(F64).T)
    near(gemmery.scaled_matmul(x, w, fast_accum=True), want)
    assert len(entered) == len(calls) - 1
    assert len(cache._known) == 3


def test_halves_that_no_kernel_reads():
    x, w = values(5, 64), weight(48, 64)
    with pytest.raises(ValueError, match=r"48 rows; .* must be a multiple of 64"):
        gemmery.linear(x, w, epilogue=epilogues.swiglu)


@pytest.mark.parametrize("parts", [2, 3])
def test_k_in_parts(parts):
    x, w = values(6, 400), weight(32, 400)
    config = gemmery.plan(x, w, out_dtype=F32).config
    cut = gemmery.Config(**{**{f: getattr(config, f) for f in config.__dataclass_fields__}, "split_k": parts})
    near(gemmery.linear(x, w, config=cut, out_dtype=F32), wide(x, w), F32)
    near(gemmery.linear(x, w, config=cut, epilogue=epilogues.gelu), F.gelu(wide(x, w)))


@pytest.mark.parametrize("has_channel", [False, True])
def test_batches(has_channel):
    w = weight(3, 20, 96)
    w = scaled(w) if has_channel else w
    x = values(3, 5, 96)
    near(gemmery.bmm(x, w), wide(x, w))
    near(gemmery.matmul(x[0], w), wide(x[0], w))
    near(gemmery.matmul(values(2, 3, 1, 96), w), wide(values(2, 3, 1, 96), w))
    near(gemmery.linear(x, w[1]), wide(x, w[1]))
    # Of x, whose rows are not aligned, a copy may be read; of the weight none.
    w, x = weight(3, 40, 196), values(3, 5, 196)
    near(gemmery.bmm(x, scaled(w) if has_channel else w), wide(x, scaled(w) if has_channel else w))


def test_batch_invariant():
    x, w = values(33, 96), weight(24, 96)
    whole = gemmery.linear(x, w, batch_invariant=True)
    near(whole, wide(x, w))
    assert torch.equal(gemmery.linear(x[7:8], w, batch_invariant=True), whole[7:8])


def test_out():
    x, w, bias = values(5, 100), weight(33, 100), values(33)
    out = torch.full((5, 33), torch.nan, dtype=BF16)
    assert gemmery.linear(x, w, bias, out=out) is out
    near(out, wide(x, w) + bias)


@pytest.mark.parametrize("has_channel", [False, True])
@pytest.mark.parametrize("epilogue", [None, F.silu])
def test_gradients(epilogue, has_channel):
    x, bias, w = values(6, 100).requires_grad_(), values(33).requires_grad_(), weight(33, 100)
    w = scaled(w) if has_channel else w
    w.values.requires_grad_()
    grad = values(6, 33, seed=7)
    gemmery.linear(x, w, bias, **({} if epilogue is None else {"epilogue": epilogue})).backward(grad)
    leaves = [t.detach().double().requires_grad_() for t in (x, w.unscaled().dense(), bias)]
    channel = 1 if w.channel is None else w.channel.double()
    want = (leaves[0] @ leaves[1].T) * channel + leaves[2]
    (want if epilogue is None else epilogue(want)).backward(grad.double())
    near(x.grad, leaves[0].grad, BF16)
    near(bias.grad, leaves[2].grad, BF16)
    of_values = sampled(leaves[1].grad, w).double()
    assert (w.values.grad.double() - of_values).norm() < 1e-2 * of_values.norm()


def test_gradients_of_a_batch():
    x, w = values(3, 5, 96).requires_grad_(), weight(3, 20, 96)
    w.values.requires_grad_()
    gemmery.bmm(x, w).sum().backward()
    near(x.grad, w.dense(F64).sum(1, keepdim=True).expand(3, 5, 96))
    of_values = sampled(x.detach().double().sum(1, keepdim=True).expand(3, 20, 96), w).double()
    assert (w.values.grad.double() - of_values).norm() < 1e-2 * of_values.norm()


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    w, bias = weight(24, 96), values(24)
    gelu = gemmery.epilogue(epilogues.gelu)
    function = lambda x: (gemmery.linear(x, w), gemmery.linear(x, w, bias, epilogue=gelu))  # noqa: E731
    made = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for m in (5, 7):
        x = values(m, 96)
        assert all(torch.equal(got, want) for got, want in zip(made(x), function(x), strict=True))
    x = x.requires_grad_()
    grads = [torch.autograd.grad(f(x)[1].float().sum(), x)[0] for f in (made, function)]
    torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("method", ["magnitude", "transposable"])
def test_a_layer_that_is_trained(method):
    """Both products of `SparseLinear` in kernels, and the gradient of its dense weight."""
    layer = gemmery.nn.SparseLinear(100, 36, method=method, dtype=BF16)
    x, grad = values(6, 100).requires_grad_(), values(6, 36, seed=7)
    layer(x).backward(grad)
    w = layer.pruned()
    near(layer(x), wide(x.detach(), w) + layer.bias.detach())
    near(x.grad, grad.double() @ w.dense(F64))
    near(layer.weight.grad, grad.double().T @ x.detach().double())
