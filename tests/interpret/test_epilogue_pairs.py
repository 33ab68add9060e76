"""A second operand in two parts, which an epilogue halves again: wherever the parts lie, with all that surrounds a call."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import gemmery
from gemmery import Config, epilogues
from gemmery.operands import Dense
from tests.oracle import ROUNDING, layouts, operand, place, sizes, values

# What these tests are about does not depend on Triton's version.
pytestmark = pytest.mark.slow

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
#: Where the left part lies in a buffer of three parts, and where the right one.
PLACES = {"before": (0, 1), "apart": (0, 2), "behind": (1, 0), "far behind": (2, 0), "twice": (1, 1)}
H, K = 48, 40


def parts(where, dtype=torch.float32, columns=False, h=H, k=K):
    """Two weights (h, k) in one buffer, by rows or by columns."""
    buffer = values((3, k, h) if columns else (3, h, k), dtype, 1)
    left, right = (buffer[i].t() if columns else buffer[i] for i in PLACES[where])
    return left, right


def swiglu(acc):
    gate, up = acc.chunk(2, -1)
    return F.silu(gate) * up


def everything(acc, row, residual):
    """All that an epilogue can make of halves: from each, from both, reduced and as wide as the product."""
    gate, up = (acc + row).chunk(2, -1)
    return torch.tanh(gate) * up + residual, acc, gate.amax(-1), up.sum(-1), acc.square().mean(-1), up - gate


def exact(function, x, pair, *args, bias=None):
    wide = x.double() @ torch.cat(pair).double().t()
    wide = wide if bias is None else wide + bias.double()
    return function(wide, *[t.double() for t in args])


def assert_close(results, wants, dtype):
    results, wants = (y if isinstance(y, tuple) else (y,) for y in (results, wants))
    assert len(results) == len(wants)
    inner = ROUNDING[torch.float64 if dtype == torch.float64 else torch.float32]
    for result, want in zip(results, wants, strict=True):
        assert result.shape == want.shape
        allowed = ROUNDING[result.dtype] * want.abs() + 128 * inner * want.abs().max().clamp_min(1)
        assert ((result.double() - want).abs() <= allowed).all()


# ---------------------------------------------------------------------------------------------------------------------
# Values


@pytest.mark.sampled(7)
@pytest.mark.parametrize("rows", (1, 16, 70))
@pytest.mark.parametrize("columns", (False, True))
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wherever_the_parts_lie(dtype, where, columns, rows):
    x, pair = values((rows, K), dtype), parts(where, dtype, columns)
    result = gemmery.linear(x, pair, epilogue=swiglu)
    assert result.dtype == dtype
    assert_close(result, exact(swiglu, x, pair), dtype)
    assert torch.equal(gemmery.matmul(x, tuple(w.t() for w in pair), epilogue=swiglu), result)
    assert torch.equal(gemmery.linear(x, list(pair), epilogue=swiglu), result)


CONFIGS = {
    "pointer": Config(32, 32, 32),
    "descriptor": Config(32, 64, 32, loader="descriptor"),
    "persistent": Config(32, 64, 32, schedule="persistent", loader="descriptor", split_store=True, tail=2),
    "split-K": Config(32, 32, 16, split_k=3),
    "swap": Config(32, 64, 32, swap=True),
    "96": Config(32, 96, 32, loader="descriptor"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "where", [where for where in PLACES if where != "twice"]
)  # no stride of a descriptor is 0
def test_all_that_an_epilogue_makes_of_halves(where, config):
    x, pair = values((70, K), torch.bfloat16), parts(where, torch.bfloat16)
    args = values((2 * H,), torch.bfloat16, 3), values((70, H), torch.bfloat16, 4)
    results = gemmery.linear(x, pair, epilogue=everything, args=args, config=config)
    assert_close(results, exact(everything, x, pair, *args), torch.bfloat16)


def test_the_parts_of_one_weight_are_that_weight():
    """The same bits, and the same problem but for where the right half is."""
    weight, x = values((2 * H, K), torch.bfloat16, 1), values((33, K), torch.bfloat16)
    pair = weight.chunk(2)
    assert torch.equal(gemmery.linear(x, pair, epilogue=swiglu), gemmery.linear(x, weight, epilogue=swiglu))
    one = gemmery.plan(x, weight.t(), epilogue=swiglu).problem
    two = gemmery.plan(x, tuple(w.t() for w in pair), epilogue=swiglu).problem
    assert (one.N, one.out_n) == (two.N, two.out_n)
    assert (type(one.b), one.b.row, one.b.col, one.b.aligned) == (Dense, two.b.row, two.b.col, two.b.aligned)
    assert two.b.distance == H * K


def test_kernels_count_upwards_in_memory():
    x = values((8, K), torch.float32)
    for where, distance in (("before", 1), ("behind", 1), ("far behind", 2), ("twice", 0)):
        pair = tuple(w.t() for w in parts(where))
        assert gemmery.plan(x, pair, epilogue=swiglu).problem.b.distance == distance * H * K


@settings(max_examples=25)
@given(st.data(), sizes(70).filter(bool), sizes(60).filter(bool), sizes(60), st.integers(0, 2**32 - 1))
def test_any_layout(data, m, h, k, seed):
    dtype = data.draw(st.sampled_from(DTYPES))
    x, layout = operand(data.draw, (m, k), dtype, seed), data.draw(layouts(2))
    pair = tuple(place((h, k), dtype, layout, values((h, k), dtype, seed + i)).view for i in (1, 2))
    bias = operand(data.draw, (2 * h,), dtype, seed + 3)
    residual = operand(data.draw, (m, h), dtype, seed + 4)
    placed = place((m, h), dtype, data.draw(layouts(2, shared=False)))

    def gated(acc, residual):
        gate, up = acc.chunk(2, -1)
        return gate * torch.relu(up) + residual

    gemmery.linear(x, pair, bias, epilogue=gated, args=(residual,), out=placed.view)
    placed.assert_outside_unchanged()
    assert_close(placed.view, exact(gated, x, pair, residual, bias=bias), dtype)


BIASES = {
    "none": lambda b: None,
    "one for both": lambda b: b,
    "a pair": lambda b: b.chunk(2),
    "a pair, elsewhere": lambda b: (b[:H].clone(), b[H:].clone()),
    "a pair, the same": lambda b: (b[:H], b[:H]),
    "a pair of rows": lambda b: (b[None, :H], b[None, H:]),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", BIASES)
def test_biases(kind, where):
    x, pair = values((9, K), torch.float32), parts(where)
    bias = BIASES[kind](values((2 * H,), torch.float32, 3))
    whole = torch.cat(bias, -1) if isinstance(bias, tuple) else bias
    result = gemmery.linear(x, pair, bias, epilogue=swiglu)
    assert_close(result, exact(swiglu, x, pair, bias=whole), torch.float32)
    turned = tuple(w.t() for w in pair)
    assert torch.equal(gemmery.matmul(x, turned, bias=bias, epilogue=swiglu), result)


def test_more_rows_than_two_dimensions_have():
    x, pair = values((2, 3, 5, K), torch.float32), parts("behind")
    assert_close(gemmery.linear(x, pair, epilogue=swiglu), exact(swiglu, x, pair), torch.float32)
    assert gemmery.linear(x[:, :0], pair, epilogue=swiglu).shape == (2, 0, 5, H)
    column = values((3, 5, 1), torch.float32, 2)
    scaled = epilogues.compose(swiglu, epilogues.row_scale)
    result = gemmery.linear(x, pair, epilogue=scaled, args=(column,))
    assert_close(result, exact(scaled, x, pair, column), torch.float32)


@pytest.mark.parametrize("where", PLACES)
def test_eight_bits(where):
    x = torch.randint(-128, 128, (20, K), dtype=torch.int8)
    buffer = torch.randint(-128, 128, (3, H, K), dtype=torch.int8)
    pair, row = tuple(buffer[i] for i in PLACES[where]), values((2 * H,), torch.float32, 2) / 1e3

    def gated(acc, row):
        gate, up = (acc * row).chunk(2, -1)
        return torch.tanh(gate) * up

    found = gemmery.linear(x, pair, epilogue=gated, args=(row,), out_dtype=torch.float32)
    assert_close(found, exact(gated, x, pair, row), torch.float32)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients, autocast, torch.compile


def leaves(where, bias="a pair", dtype=torch.float64):
    """x and the parts with their biases, in float64; one tensor for both where they are the same."""
    x = values((3, 5), dtype).requires_grad_()
    left, right = (w.detach().requires_grad_() for w in parts(where, dtype, h=4, k=5))
    right = left if where == "twice" else right
    b = values((8,), dtype, 3)
    biases = [
        t.clone().requires_grad_() for t in {"none": (), "one for both": (b,), "a pair": b.chunk(2)}[bias]
    ]
    return x, left, right, *biases


def ours(x, left, right, *biases):
    bias = None if not biases else biases[0] if len(biases) == 1 else biases
    return gemmery.linear(x, (left, right), bias, epilogue=swiglu)


def theirs(x, left, right, *biases):
    return swiglu(F.linear(x, torch.cat((left, right)), torch.cat(biases) if biases else None))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("bias", ("none", "one for both", "a pair"))
@pytest.mark.parametrize("where", PLACES)
def test_gradients(where, bias):
    inputs = leaves(where, bias)
    if where == "behind":
        assert torch.autograd.gradcheck(ours, inputs, fast_mode=True)
    grads = torch.autograd.grad(ours(*inputs).square().sum(), inputs)
    torch.testing.assert_close(grads, torch.autograd.grad(theirs(*inputs).square().sum(), inputs))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ("behind", "twice"))
def test_second_derivatives(where):
    assert torch.autograd.gradgradcheck(ours, leaves(where), fast_mode=True)


@pytest.mark.parametrize("wanted", range(5))
def test_gradients_of_some(wanted):
    inputs = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(leaves("behind"))]
    (grad,) = torch.autograd.grad(ours(*inputs).square().sum(), inputs[wanted])
    (want,) = torch.autograd.grad(theirs(*inputs).square().sum(), inputs[wanted])
    torch.testing.assert_close(grad, want)


@pytest.mark.parametrize("where", ("before", "behind", "twice"))
def test_autocast(where):
    inputs = leaves(where, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = ours(*inputs)
    assert y.dtype == torch.bfloat16
    low = [t.detach().bfloat16() for t in inputs]
    assert torch.equal(y, ours(*low))
    grads = torch.autograd.grad(y.float().square().sum(), inputs)
    assert [g.dtype for g in grads] == [torch.float32] * len(grads)
    for grad, want in zip(grads, torch.autograd.grad(theirs(*inputs).square().sum(), inputs), strict=True):
        assert (grad - want).norm() <= 0.03 * want.norm()


OF_HALVES = gemmery.epilogue(swiglu)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("where", PLACES)
def test_compiled(where, dynamic):
    torch._dynamo.reset()
    _, left, right, *biases = leaves(where)

    def layer(x):
        return gemmery.linear(x * 2, (left, right), tuple(biases), epilogue=OF_HALVES).sin()

    step = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 4, 7):
        x = values((rows, 5), torch.float64, rows).requires_grad_()
        inputs = (x, left, right, *biases)
        y, want = step(x), theirs(x * 2, left, right, *biases).sin()
        torch.testing.assert_close(y, want)
        grads = torch.autograd.grad(y.square().sum(), inputs)
        torch.testing.assert_close(grads, torch.autograd.grad(want.square().sum(), inputs))
        with torch.no_grad():
            torch.testing.assert_close(step(x), want)


@pytest.mark.parametrize(
    "dims", ((0, None, None), (0, 0, 0), (None, 0, 0), (0, 0, None), (None, None, 0)), ids=str
)
def test_vmap(dims):
    shapes = (3, 5), (4, 5), (4, 5)
    inputs = [
        values((2, *s) if d == 0 else s, torch.float64, i)
        for i, (s, d) in enumerate(zip(shapes, dims, strict=True))
    ]
    torch.testing.assert_close(torch.vmap(ours, dims)(*inputs), torch.vmap(theirs, dims)(*inputs))


def test_vmap_along_other_dimensions():
    x, left, right = (values(s, torch.float64, i) for i, s in enumerate(((3, 2, 5), (4, 5, 2), (2, 4, 5))))
    dims = (1, 2, 0)
    torch.testing.assert_close(
        torch.vmap(ours, dims)(x, left, right), torch.vmap(theirs, dims)(x, left, right)
    )


# ---------------------------------------------------------------------------------------------------------------------
# What can't be


def test_parts_do_not_go_with_everything():
    x, (left, right) = values((6, K), torch.float32), parts("apart")
    cases = [
        ((left,), {}, TypeError, "weight is a tuple of 1; it must be a tensor, or a pair"),
        ((left, right, left), {}, TypeError, "weight is a tuple of 3"),
        ((left, "right"), {}, TypeError, r"weight\[1\] is a str"),
        ((left, right[:-2]), {}, ValueError, r"halves of weight are \(48, 40\) and \(46, 40\)"),
        ((left, right.t()), {}, ValueError, r"\(48, 40\) and \(40, 48\)"),
        ((left[None], right[None]), {}, ValueError, r"weight is \(1, 48, 40\)"),
        ((left[0], right[0]), {}, ValueError, "must be matrices of one shape"),
        ((left, right.half()), {}, ValueError, "torch.float32 on cpu and torch.float16 on cpu"),
        ((left.half(), right.half()), {}, TypeError, "float16"),
        ((left, right.t().contiguous().t()), {}, ValueError, "halves of weight have the strides"),
        ((left, right), {"epilogue": epilogues.relu}, ValueError, "halves the product's columns; relu does not"),
        ((left, right), {"bias": (left[:, 0],) * 3}, TypeError, "bias is a tuple of 3"),
        ((left, right), {"bias": (left[:, 0], 1)}, TypeError, r"bias\[1\] is an? int"),
        ((left, right), {"bias": (left[:7, 0], right[:7, 0])}, ValueError, r"bias\[0\] is \(7,\)"),
        ((left, right), {"out": torch.empty(6, 2 * H)}, ValueError, r"out is \(6, 96\); the result is \(6, 48\)"),
        ((left, right), {"out": left[:6, :1].expand(6, H)}, ValueError, "overlap"),
    ]  # fmt: skip
    for pair, options, error, message in cases:
        with pytest.raises(error, match=message):
            gemmery.linear(x, pair, **({"epilogue": swiglu} | options))
    with pytest.raises(ValueError, match="must be matrices of one shape"):
        gemmery.matmul(x, (left.t()[None], right.t()[None]), epilogue=swiglu)
    square = parts("behind", k=H)
    for out in square:
        with pytest.raises(ValueError, match="out and weight share memory"):
            gemmery.linear(values((H, H), torch.float32), square, epilogue=swiglu, out=out)


def test_parts_are_an_epilogues():
    x, (left, right) = values((6, K), torch.float32), parts("apart")
    for call in (
        lambda: gemmery.linear(x, (left, right)),
        lambda: gemmery.matmul(x, (left.t(), right.t())),
    ):
        with pytest.raises(TypeError, match=re.compile("is a pair")):
            call()
