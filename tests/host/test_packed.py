"""Products with a packed weight by the reference: what is computed, what torch does with it, and what is refused."""

from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import gemmery
from gemmery import epilogues
from gemmery.formats import QuantizedTensor
from gemmery.nn import QuantizedLinear

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
N, K = 32, 128
KINDS = {
    "int4": ("int4", {"group_size": 32}),
    "int8 zeros": ("int8", {"group_size": 64, "symmetric": False}),
    "int8 channel": ("int8", {}),
    "nvfp4": ("nvfp4", {}),
    "nf4": ("nf4", {}),
}


def values(*shape, seed=0, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight(kind="int4", batch=(), n=N, k=K, dtype=BF16, order=False):
    format, options = KINDS[kind]
    w = gemmery.quantize(values(*batch, n, k, seed=1, dtype=F32) / 8, format, dtype=dtype, **options)
    if order:
        w = w.with_parts(
            w.parts() | {"permutation": torch.randperm(k, generator=torch.Generator().manual_seed(2))}
        )
    return w


def wide(x, w):
    return x.double() @ w.dequantize(F64).mT


def near(y, want, dtype=BF16):
    assert y.dtype == dtype
    assert y.shape == want.shape
    bound = {BF16: 4e-3, F16: 1e-3, F32: 1e-6}[dtype]
    assert ((y.double() - want).norm() / want.norm()).item() <= bound


def fails(error, call, *said):
    with pytest.raises(error) as caught:
        call()
    assert all(text in str(caught.value) for text in said), caught.value


@gemmery.epilogue
def gated(acc, r):
    gate, up = acc.chunk(2, dim=-1)
    return F.silu(gate) * up + r


@gemmery.epilogue
def with_sums(acc):
    return acc, acc.sum(-1), acc.to(F16)


# --- products


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("order", [False, True], ids=["", "permuted"])
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind, order, dtype):
    w = weight(kind, dtype=dtype, order=order)
    for shape in ((5, K), (2, 3, K), (1, K), (0, K)):
        x = values(*shape, dtype=dtype)
        want = wide(x, w)
        if not x.numel():
            assert gemmery.linear(x, w).shape == want.shape
            continue
        near(gemmery.linear(x, w), want, dtype)
        near(gemmery.linear(x, w, out_dtype=F32), want, F32)
        near(gemmery.matmul(x, w), want, dtype)
        near(F.linear(x, w), want, dtype)
        bias = values(N, dtype=dtype)
        near(gemmery.linear(x, w, bias), want + bias, dtype)
        near(F.linear(x, w, bias), want + bias, dtype)
        near(gemmery.linear(x, w, bias, epilogue=epilogues.gelu), F.gelu(want + bias), dtype)
        r = values(*shape[:-1], N // 2, seed=5)
        near(gemmery.linear(x, w, epilogue=gated, args=(r,)), gated(want, r.double()), dtype)


@pytest.mark.parametrize("order", [False, True], ids=["", "permuted"])
def test_vectors(order):
    x, w = values(K), weight(order=order)
    want = wide(x, w)
    near(gemmery.linear(x, w, values(N)), want + values(N))
    made = gemmery.linear(x, w, epilogue=with_sums, out_dtype=F32)
    assert [y.shape for y in made] == [(N,), (), (N,)]
    out = torch.empty(N, dtype=BF16)
    assert gemmery.linear(x, w, out=out) is out
    near(out, want)
    batch = weight("int4", (3,))
    near(gemmery.matmul(x, batch), wide(x[None], batch)[:, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_batches(kind):
    w = weight(kind, (3,))
    x = values(3, 5, K)
    near(gemmery.bmm(x, w), wide(x, w))
    near(gemmery.bmm(x, w, epilogue=epilogues.silu), F.silu(wide(x, w)))
    near(gemmery.matmul(x[0], w), wide(x[0], w))
    near(gemmery.matmul(values(2, 1, 5, K), w), wide(values(2, 1, 5, K), w))


@pytest.mark.parametrize("order", [False, True], ids=["", "permuted"])
def test_prologues_see_columns_in_their_order(order):
    x, w, scale = values(5, K), weight(order=order), values(K, dtype=F32)
    near(gemmery.linear(x, w, prologue=torch.mul, prologue_args=(scale,)), wide((x * scale).to(BF16), w))


def test_out():
    x, w = values(5, K), weight()
    out = torch.empty(N, 5, dtype=BF16).t()
    gemmery.linear(x, w, values(N), out=out)
    near(out, wide(x, w) + values(N))
    fails(ValueError, lambda: gemmery.linear(x, w, out=out.t()), "out is (32, 5); the result is (5, 32)")
    near(gemmery.linear(x, w, out=torch.empty(5, N)), wide(x, w), F32)
    fails(
        TypeError, lambda: gemmery.linear(x, w, out=torch.empty(5, N), epilogue=GELU), "out is torch.float32"
    )
    fails(ValueError, lambda: gemmery.linear(x[:, :N], weight(k=N), out=x[:, :N]), "out and x share memory")


def test_a_column_for_two():
    """A factor for each row, of a product with two columns, is no half of these."""
    x, w, rows = values(5, K), weight(n=2), values(5, 1, dtype=F32)
    near(gemmery.linear(x, w, epilogue=torch.mul, args=(rows,)), wide(x, w) * rows)
    near(gemmery.linear(x, w, rows), wide(x, w) + rows)
    near(gemmery.linear(x, w, epilogue=epilogues.swiglu), epilogues.swiglu(wide(x, w)))
    halves = (values(1), values(1, seed=1))
    near(
        gemmery.linear(x, w, halves, epilogue=epilogues.swiglu),
        epilogues.swiglu(wide(x, w) + torch.cat(halves)),
    )


# --- gradients

WAYS = {
    "bare": lambda x, w, b, r: gemmery.linear(x, w),
    "wide": lambda x, w, b, r: gemmery.linear(x, w, out_dtype=F32),
    "bias": lambda x, w, b, r: gemmery.linear(x, w, b),
    "gelu": lambda x, w, b, r: gemmery.linear(x, w, b, epilogue=GELU),
    "gated": lambda x, w, b, r: gemmery.linear(x, w, b, epilogue=gated, args=(r,)),
    "halves": lambda x, w, b, r: gemmery.linear(x, w, tuple(b.chunk(2)), epilogue=gated, args=(r,)),
    "several": lambda x, w, b, r: gemmery.linear(x, w, b, epilogue=with_sums, out_dtype=(F32, None, None)),
    "prologue": lambda x, w, b, r: gemmery.linear(x, w, prologue=torch.neg),
    "torch": lambda x, w, b, r: F.linear(x, w, b),
    "vector": lambda x, w, b, r: gemmery.linear(x[0], w, b),
}
GELU = gemmery.epilogue(epilogues.gelu)


def inputs(grad=True):
    return [y.requires_grad_(grad) for y in (values(5, K), values(N, seed=3), values(5, N // 2, seed=4))]


def all_of(results):
    return list(results) if isinstance(results, tuple | list) else [results]


def differ(way, w, given):
    x, b, r = given
    made = all_of(way(x, w, b, r))
    total = sum((y.float() * values(*y.shape, seed=7)).sum() for y in made)
    grads = torch.autograd.grad(total, given, allow_unused=True)
    return made, [g for g in grads if g is not None]


def same(made, wanted, tolerance=0.02):
    assert len(made) == len(wanted)
    for y, want in zip(made, wanted, strict=True):
        assert y.dtype == want.dtype
        assert y.shape == want.shape
        assert (y.double() - want.double()).norm() <= tolerance * want.double().norm()


@pytest.mark.parametrize("order", [False, True], ids=["", "permuted"])
@pytest.mark.parametrize("name", WAYS)
def test_gradients(name, order):
    w = weight("int8 channel", order=order)
    made, grads = differ(WAYS[name], w, inputs())
    # The same with a plain weight; and the same results without gradients.
    wanted, wanted_grads = differ(WAYS[name], w.dequantize(), inputs())
    same(made, wanted)
    same(grads, wanted_grads)
    x, b, r = inputs(grad=False)
    same(all_of(WAYS[name](x, w, b, r)), made)


def test_gradients_of_batches():
    x, w = values(5, K).requires_grad_(), weight("int4", (3,))
    g = values(3, 5, N, seed=9)
    (got,) = torch.autograd.grad(gemmery.matmul(x, w), x, g)
    same([got], torch.autograd.grad(x @ w.dequantize().mT, x, g))


def test_gradients_of_what_an_epilogue_closes_over():
    x, w, scale = values(5, K), weight(), torch.ones(N, requires_grad=True)
    made = gemmery.linear(x, w, epilogue=lambda acc: acc * scale)
    near(made, wide(x, w))
    made.float().sum().backward()
    same([scale.grad], [wide(x, w).sum(0).float()])


def test_second_derivatives():
    x, w = values(5, K).requires_grad_(), weight()
    theirs = w.dequantize()
    found = []
    for linear in (lambda: gemmery.linear(x, w, epilogue=GELU), lambda: F.gelu(x @ theirs.mT)):
        (grad,) = torch.autograd.grad(linear().float().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.float().square().sum(), x)[0])
    same(found[:1], found[1:], 0.05)


# --- torch.compile


def compiled(function, backend, dynamic=False):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("order", [False, True], ids=["", "permuted"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", WAYS)
def test_compiled(name, backend, order, grad):
    w = weight("int8 channel", order=order)
    made = compiled(WAYS[name], backend)
    if not grad:
        x, b, r = inputs(grad=False)
        same(all_of(made(x, w, b, r)), all_of(WAYS[name](x, w, b, r)), 1e-2)
        return
    results, grads = differ(made, w, inputs())
    wanted, wanted_grads = differ(WAYS[name], w, inputs())
    same(results, wanted, 1e-2)
    same(grads, wanted_grads, 1e-2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_formats(kind):
    w, x = weight(kind), values(5, K)
    assert compiled(gemmery.linear, "aot_eager")(x, w).equal(gemmery.linear(x, w))
    w, x = weight(kind, (3,)), values(3, 5, K)
    assert compiled(gemmery.bmm, "aot_eager")(x, w).equal(gemmery.bmm(x, w))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_with_any_number_of_rows(backend):
    count = 0

    def counted(graph, example):
        nonlocal count
        count += 1
        return graph

    w = weight()
    function = lambda x, w, b: gemmery.linear(x * 2, w, b, epilogue=GELU)  # noqa: E731
    made = compiled(function, counted if backend == "eager" else backend, dynamic=True)
    # None of these is a size of the weight's, which the compiler would take for the same.
    for m in (5, 7, 9, 30):
        x = values(m, K)
        same([made(x, w, values(N))], [function(x, w, values(N))], 1e-2)
    assert count <= 1


class Block(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.up = QuantizedLinear(weight(), nn.Parameter(values(N)))
        self.down = QuantizedLinear(weight("nvfp4", n=16, k=N), **how)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_modules(backend, dynamic):
    block = Block()
    made = compiled(block, backend, dynamic)
    for m in (4, 9):
        x, y = (values(m, K).requires_grad_() for _ in range(2))
        results = made(x), block(y)
        same(results[:1], results[1:], 1e-2)
        for result in results:
            result.float().square().sum().backward()
        same([x.grad], [y.grad], 2e-2)
    with torch.no_grad():
        same([made(x)], [block(x)], 1e-2)


def test_compiled_weights_that_are_made_there():
    x, w = values(5, K), weight("int8 zeros", (3,))
    first = lambda x, w: gemmery.linear(x, w[0], epilogue=GELU)  # noqa: E731
    same([compiled(first, "aot_eager")(x, w)], [first(x, w)], 1e-2)
    half = lambda x, w: gemmery.linear(x.half(), w.to(F16))  # noqa: E731
    same([compiled(half, "aot_eager")(x, w[0])], [half(x, w[0])], 1e-2)


@pytest.mark.slow
def test_compiled_vmap():
    x, w, b = values(3, 5, K), weight("int8 channel", order=True), values(3, N)
    for way in (lambda x, b: gemmery.linear(x, w), lambda x, b: gemmery.linear(x, w, b, epilogue=GELU)):
        for dims in ((0, 0), (1, None), (None, 0)):
            mapped = torch.vmap(way, dims)
            given = [y if d is not None else y[0] for y, d in zip((x, b), dims, strict=True)]
            same([compiled(mapped, "aot_eager")(*given)], [mapped(*given)], 1e-2)


def test_compiled_errors():
    x, w = values(5, K), weight()
    out = torch.empty(5, N, dtype=BF16)
    factor = 2.0
    plain = lambda acc: acc * factor  # noqa: E731
    error = Exception  # Dynamo wraps what code raises
    fails(
        error,
        lambda: compiled(lambda: gemmery.linear(x, w, epilogue=plain), "eager")(),
        "must be the result of gemmery.epilogue",
    )
    fails(
        error,
        lambda: compiled(lambda x: gemmery.linear(x, w, out=out), "eager")(x),
        "out= with a packed weight",
    )
    fails(
        error,
        lambda: compiled(lambda x: gemmery.linear(x, w), "eager")(x[:, 1:]),
        "inner sizes 127 and 128 differ",
    )


def test_exported():
    block, x = Block(), values(4, K)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(block, (x,), strict=False, dynamic_shapes=({0: batch},))
    names = [str(node.target) for node in program.graph.nodes]
    assert sum("gemmery.product" in name for name in names) == 2
    for m in (4, 9):
        same([program.module()(values(m, K))], [block(values(m, K))], 1e-2)


def test_make_fx():
    x, w, bias = values(4, K), weight(), values(N)
    function = lambda x: gemmery.linear(x, w, bias, epilogue=GELU)  # noqa: E731
    for mode in ("real", "fake"):
        if mode == "fake":
            # The weight is no input, so that it stays real.
            fails(Exception, lambda: make_fx(function, tracing_mode="fake")(x), "FakeTensor")
            continue
        graph = make_fx(function, tracing_mode=mode)(x)
        assert "gemmery.product" in graph.code
        same([graph(x + 1)], [function(x + 1)], 1e-2)


# --- autocast, modes, transforms, subclasses


def test_autocast():
    x, w, b = values(5, K, dtype=F32), weight(), values(N, dtype=F32)
    want = wide(x.to(BF16), w)
    for grad in (False, True):
        x.requires_grad_(grad)
        with torch.autocast("cpu", BF16):
            near(gemmery.linear(x, w), want)
            near(gemmery.linear(x, w, b), want + b.to(BF16))
            near(F.linear(x, w), want)
            made = compiled(lambda x: gemmery.linear(x, w, b), "aot_eager")
            near(made(x), want + b.to(BF16))
        with torch.autocast("cpu", F16):
            said = "autocast brings x to torch.float16, and weight is packed for torch.bfloat16"
            fails(TypeError, lambda: gemmery.linear(x, w), said)
            fails(Exception, lambda: compiled(lambda x: gemmery.linear(x, w), "eager")(x), said)
    fails(TypeError, lambda: gemmery.linear(x, w), "x is torch.float32 and weight is torch.bfloat16")


def test_forward_mode():
    x, w = values(5, K), weight()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        fails(NotImplementedError, lambda: gemmery.linear(dual, w), "no forward-mode derivative")
        near(gemmery.linear(x, w), wide(x, w))
    jvp = lambda: torch.func.jvp(lambda x: gemmery.linear(x, w, values(N)), (x,), (x,))  # noqa: E731
    fails(NotImplementedError, jvp, "forward")


@pytest.mark.parametrize("order", [False, True], ids=["", "permuted"])
def test_vmap(order):
    x, w = values(3, 5, K), weight("int8 channel", order=order)
    b, r = values(3, N), values(3, 5, N // 2)
    near(torch.vmap(lambda x: gemmery.linear(x, w))(x), wide(x, w))
    near(torch.vmap(lambda x: gemmery.linear(x, w), 1, 1)(x), wide(x, w))
    near(torch.vmap(lambda x: gemmery.linear(x, w))(x[0]), wide(x[0], w))
    made = torch.vmap(lambda x, b, r: gemmery.linear(x, w, b, epilogue=gated, args=(r,)))(x, b, r)
    near(made, gated(wide(x, w) + b[:, None], r.double()))
    near(torch.vmap(lambda b: gemmery.linear(x, w, b))(b), wide(x, w) + b[:, None, None])
    batch = weight("int4", (2,))
    x = values(3, 2, 5, K)
    near(torch.vmap(lambda x: gemmery.bmm(x, batch))(x), wide(x, batch))


def test_a_mapped_weight_is_refused():
    x, w = values(3, 5, K), weight("int4", (3,))
    fails(Exception, lambda: torch.vmap(gemmery.linear)(x, w), "QuantizedTensor")


def test_fake_tensors():
    x, w = values(5, K), weight("int8 channel", order=True)
    with FakeTensorMode() as mode:
        fake_x, fake_w = mode.from_tensor(x), mode.from_tensor(w)
        y = gemmery.linear(fake_x, fake_w)
        assert (type(y), y.shape, y.dtype) == (type(fake_x), (5, N), BF16)
        y, sums, half = gemmery.linear(fake_x, fake_w, epilogue=with_sums)
        assert [z.shape for z in (y, sums, half)] == [(5, N), (5,), (5, N)]
        assert [z.dtype for z in (y, sums, half)] == [BF16, F32, F16]
    # Outside of the mode, nothing of it is left.
    y = gemmery.linear(fake_x, fake_w)
    assert type(y) is type(fake_x)
    near(gemmery.linear(x, w), wide(x, w))


def test_meta_tensors():
    x, w = values(5, K, dtype=BF16).to("meta"), weight("nvfp4").to("meta")
    y = gemmery.linear(x, w, values(N).to("meta"), epilogue=GELU)
    assert (y.device.type, y.shape, y.dtype) == ("meta", (5, N), BF16)
    fails(ValueError, lambda: gemmery.linear(x, weight()), "x is on meta and weight on cpu")


class Seen(torch.Tensor):
    """A tensor that notes which operators come by."""

    calls: ClassVar = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses():
    x, w = values(5, K).as_subclass(Seen), weight()
    y = gemmery.linear(x, w, values(N))
    assert type(y) is Seen
    assert any("gemmery.product" in call for call in Seen.calls)
    near(y.as_subclass(torch.Tensor), wide(values(5, K), w) + values(N))


# --- what is refused


HALVES = weight(), weight()
WRONG = [
    (TypeError, lambda x, w: gemmery.linear(x.float(), w), "x is torch.float32 and weight is torch.bfloat16"),
    (TypeError, lambda x, w: gemmery.linear(x.half(), w), "x is torch.float16"),
    (TypeError, lambda x, w: gemmery.linear(None, w), "linear: x is a NoneType"),
    (TypeError, lambda x, w: gemmery.linear(w, w), "linear: x is a QuantizedTensor; sparse and quantized weights must be the second operand"),
    (TypeError, lambda x, w: gemmery.matmul(w, x), "matmul: a is a QuantizedTensor; sparse and quantized weights must be the second operand"),
    (TypeError, lambda x, w: gemmery.linear(x, w.dequantize(), w), "linear: bias is a QuantizedTensor; sparse and quantized weights must be the second operand"),
    (ValueError, lambda x, w: gemmery.linear(x[:, 1:], w), "x is (5, 127) and weight is (32, 128), which is (N, K): inner sizes 127 and 128 differ"),
    (ValueError, lambda x, w: gemmery.linear(x[:, 1:], weight(order=True)), "inner sizes 127 and 128 differ"),
    (ValueError, lambda x, w: gemmery.linear(x[0, 0], w), "x is a scalar"),
    (ValueError, lambda x, w: gemmery.linear(x, w.to("meta")), "x is on cpu and weight on meta"),
    (ValueError, lambda x, w: gemmery.linear(x, w, values(N - 1)), "bias is (31,); it must broadcast to the product, (5, 32)"),
    (ValueError, lambda x, w: gemmery.linear(x, w, values(N).to("meta")), "bias is on meta and x on cpu"),
    (ValueError, lambda x, w: gemmery.linear(x.requires_grad_(), w, values(N - 1)), "bias is (31,); it must broadcast"),
    (ValueError, lambda x, w: gemmery.linear(x.requires_grad_(), w, out=torch.empty(5, N, dtype=BF16)), "out= with a packed weight does not support gradients"),
    (ValueError, lambda x, w: gemmery.linear(x, weight("int4", (2,))), "linear: weight is (2, 32, 128); packed, it must be (N, K); use matmul or bmm"),
    (ValueError, lambda x, w: gemmery.bmm(x, w), "bmm: a is (5, 128); it must have 3 dimensions"),
    (ValueError, lambda x, w: gemmery.bmm(x[None], w), "bmm: b is (32, 128); it must have 3 dimensions"),
    (ValueError, lambda x, w: gemmery.bmm(x[None], weight("int4", (2,))), "batch sizes differ"),
    (TypeError, lambda x, w: gemmery.linear(x, HALVES, epilogue=epilogues.swiglu), "weight[0] is packed; halves of packed columns must be one tensor"),
    (TypeError, lambda x, w: gemmery.linear(x, HALVES), "weight"),
    (TypeError, lambda x, w: gemmery.addmm(x, x, w), "addmm: b is a QuantizedTensor; use gemmery.linear(a, b, input), or gemmery.matmul(a, b, bias=input)"),
    (TypeError, lambda x, w: gemmery.addmm(None, None, w, beta="x"), "addmm: b is a QuantizedTensor"),
    (TypeError, lambda x, w: gemmery.addmm(x, w, x), "addmm: a is a QuantizedTensor"),
    (TypeError, lambda x, w: gemmery.addmm(w, x, x), "addmm: input is a QuantizedTensor"),
    (TypeError, lambda x, w: gemmery.linear(x, w, args=(1,)), "args are given without an epilogue; give epilogue= too, or leave them out"),
    (TypeError, lambda x, w: gemmery.linear(x, w, out_dtype=torch.int8), "out_dtype is torch.int8"),
    (ValueError, lambda x, w: gemmery.linear(x, w, precision="tf16"), "precision is 'tf16'"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "call", "said"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_errors(error, call, said):
    fails(error, lambda: call(values(5, K), weight()), said)


def test_it_is_what_it_was():
    """Products leave a weight alone."""
    w = weight("int8 channel", order=True)
    before = {name: part.clone() for name, part in w.parts().items()}
    gemmery.linear(values(5, K).requires_grad_(), w).float().sum().backward()
    assert isinstance(w, QuantizedTensor)
    assert all(part.equal(before[name]) for name, part in w.parts().items())
