"""Functions of A that run as it is loaded: right on all shapes, types and layouts; gradients, compiled code, errors."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import gemmery
from gemmery import epilogues

CLOSE = {
    torch.float16: {"rtol": 2e-3, "atol": 2e-2},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-1},
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
}


def normed(x, scale, gain):
    return x * scale * gain


def values(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wanted(x, w, function, *args):
    """In float64, but for the rounding of what the prologue makes."""
    made = function(x.double(), *[t.double() if isinstance(t, torch.Tensor) else t for t in args])
    return made.to(x.dtype).double() @ w.double().mT


SHAPES = (((5,), 33, 17), ((40,), 64, 48), ((2, 3), 48, 40), ((1,), 16, 16), ((3,), 200, 1), ((130,), 72, 70))


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_scale_and_a_column_weight(shape, dtype):
    rows, K, N = shape
    x, w = values(*rows, K, dtype=dtype), values(N, K, seed=1, dtype=dtype)
    scale, gain = values(*rows, 1, seed=2), values(K, seed=3)
    y = gemmery.linear(x, w, prologue=normed, prologue_args=(scale, gain))
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), wanted(x, w, normed, scale, gain), **CLOSE[dtype])


@pytest.mark.parametrize(("first", "second"), list(itertools.product(("rows", "columns", "gaps"), repeat=2)))
def test_layouts(first, second):
    def laid_out(x, how):
        if how == "columns":
            return x.t().contiguous().t()
        return x if how == "rows" else F.pad(x, (0, 3))[:, :-3]

    x, w = laid_out(values(30, 48), first), laid_out(values(40, 48, seed=1), second)
    full = laid_out(values(30, 48, seed=2), second)
    y = gemmery.linear(x, w, prologue=lambda x, f: F.silu(x) + f, prologue_args=(full,))
    torch.testing.assert_close(
        y.double(), wanted(x, w, lambda x, f: F.silu(x) + f, full), **CLOSE[torch.float32]
    )


@pytest.mark.parametrize("loader", ("pointer", "descriptor"))
@pytest.mark.parametrize("schedule", ("tile", "persistent"))
def test_what_lies_beyond_k_stays_out(schedule, loader):
    """Where A ends within a block, the function is given zeros, and what it makes of them may be infinite."""
    x, w = values(20, 72).abs() + 1, values(24, 72, seed=1)
    config = f"16x16x32-g8-w4-s2-{schedule}-{loader}"
    y = gemmery.linear(x, w, prologue=torch.log, config=config)
    torch.testing.assert_close(y.double(), wanted(x, w, torch.log), **CLOSE[torch.float32])


@pytest.mark.parametrize(
    "config", ("16x64x32-g8-w4-s2-tile-pointer-swap", "32x32x16-g8-w4-s2-tile-pointer-k3")
)
def test_schedules_for_few_rows(config):
    x, w = values(9, 160), values(50, 160, seed=1)
    y = gemmery.linear(x, w, prologue=torch.exp, config=config)
    torch.testing.assert_close(y.double(), wanted(x, w, torch.exp), **CLOSE[torch.float32])


def test_batches():
    a, b, s = values(4, 1, 7, 20), values(3, 20, 9, seed=1), values(4, 1, 1, 20, seed=2)
    y = gemmery.matmul(a, b, prologue=lambda x, s: x * s, prologue_args=(s,))
    torch.testing.assert_close(y, (a * s) @ b, **CLOSE[torch.float32])
    y = gemmery.bmm(a[:, 0], b[:1].expand(4, 20, 9), prologue=torch.sigmoid)
    torch.testing.assert_close(y, torch.sigmoid(a[:, 0]) @ b[:1], **CLOSE[torch.float32])


def test_with_everything_else():
    """An epilogue with its arguments, a pair of weights, biases, a result in place, numbers and a closure."""
    x, gate, up = values(10, 24), values(12, 24, seed=1), values(12, 24, seed=2)
    biases, residual, shift = (
        (values(12, seed=3), values(12, seed=4)),
        values(10, 12, seed=5),
        values(24, seed=6),
    )
    out = torch.empty(10, 12)

    def function(acc, r, factor):
        return epilogues.swiglu(acc) * factor + r

    y = gemmery.linear(
        x, (gate, up), biases, epilogue=function, args=(residual, 0.5), out=out,
        prologue=lambda x, k: torch.relu(x * k + shift), prologue_args=(3,),
    )  # fmt: skip
    assert y is out
    before = torch.relu(x * 3 + shift)
    want = F.silu(F.linear(before, gate, biases[0])) * F.linear(before, up, biases[1]) * 0.5 + residual
    torch.testing.assert_close(y, want, **CLOSE[torch.float32])


def test_norms_scaling_inside_the_next_product():
    x, w, gain = values(20, 64), values(30, 64, seed=1), values(64, seed=2)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    y = gemmery.linear(x, w, prologue=normed, prologue_args=(scale, gain))
    torch.testing.assert_close(y, F.rms_norm(x, (64,), gain, 1e-6) @ w.T, **CLOSE[torch.float32])


@pytest.mark.slow
def test_gradients():
    x, w, gain = (
        values(*s, seed=i, dtype=torch.float64).requires_grad_() for i, s in enumerate(((4, 6), (5, 6), (6,)))
    )
    assert torch.autograd.gradcheck(
        lambda x, w, g: gemmery.linear(
            x, w, prologue=lambda x, g: F.silu(x) * g, prologue_args=(g,), epilogue=torch.tanh
        ),
        (x, w, gain),
    )


@pytest.mark.parametrize("dynamic", (False, True))
def test_compiled(dynamic):
    torch._dynamo.reset()
    step = torch.compile(
        lambda x, w, g: gemmery.linear(x, w, prologue=lambda x, g: F.silu(x) * g, prologue_args=(g,)),
        fullgraph=True, dynamic=dynamic, backend="aot_eager",
    )  # fmt: skip
    w, gain = values(5, 6, seed=1), values(6, seed=2)
    for rows in (4, 7):
        x = values(rows, 6)
        torch.testing.assert_close(step(x, w, gain), F.linear(F.silu(x) * gain, w))


def test_autocast_rounds_what_the_prologue_makes():
    x, w = values(8, 32), values(16, 32, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        y = gemmery.linear(x, w, prologue=torch.exp)
        want = F.linear(torch.exp(x), w)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, want, rtol=1e-2, atol=1e-2)


def test_closures_are_never_stale():
    x, w = values(4, 16), values(8, 16, seed=1)
    for factor in (1.0, 2.0, 1.0):
        shift = torch.full((16,), factor)
        y = gemmery.linear(x, w, prologue=lambda x: x * factor + shift)  # noqa: B023
        torch.testing.assert_close(y, (x * factor + shift) @ w.T, **CLOSE[torch.float32])


X, W = values(4, 6), values(5, 6, seed=1)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    (
        ({"prologue": lambda x: x.sum(-1)}, ValueError, "the prologue .* reduces, in aten.sum.dim_IntList, rows"),
        ({"prologue": lambda x: x.chunk(2, -1)[0]}, ValueError, "must return a tensor of its first argument's shape"),
        ({"prologue": lambda x: x[..., :3]}, ValueError, "half"),
        ({"prologue": lambda x: (x, x)}, ValueError, "returns something that is not a tensor"),
        ({"prologue": lambda x: x.softmax(-1)}, ValueError, "the prologue .* reduces, in aten.amax.default, rows"),
        ({"prologue_args": (1,)}, TypeError, "prologue_args are given without a prologue; give prologue= too, or leave them out"),
        ({"prologue": torch.relu, "args": (1,)}, TypeError, "args are given without an epilogue; give epilogue= too, or leave them out"),
        ({"prologue": normed, "prologue_args": (torch.ones(3, 1), torch.ones(6))}, ValueError, "broadcast to"),
        ({"prologue": normed, "prologue_args": torch.ones(6)}, TypeError, "must be a tuple"),
        ({"prologue": 3}, TypeError, "must be a function"),
        ({"x": X[0], "prologue": torch.relu}, ValueError, "must be matrices"),
        ({"x": X.to(torch.int8), "weight": W.to(torch.int8), "prologue": torch.relu}, TypeError, "floating-point"),
    ),
)  # fmt: skip
def test_errors(given, error, message):
    with pytest.raises(error, match=message):
        gemmery.linear(**({"x": X, "weight": W} | given))


def test_out_may_not_be_read():
    x = values(6, 6)
    with pytest.raises(ValueError, match="share memory"):
        gemmery.matmul(values(6, 6), values(6, 6), prologue=lambda a, x: a + x, prologue_args=(x,), out=x)
