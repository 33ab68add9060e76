"""Calls with an epilogue that are easy to get wrong: sizes of 1, functions that look alike, integers, what is checked."""

import functools
import types

import pytest
import torch
from torch.nn import functional as F

import gemmery
from gemmery import epilogues

pytestmark = pytest.mark.slow


def values(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


A, B = values(12, 16), values(16, 20, seed=1)
P = A @ B


@pytest.mark.parametrize("shape", ((4, 1), (4, 2), (1, 8), (1, 1)))
def test_one_row_in_a_batch(shape):
    """Rows of a batch become rows of one matrix, whose operands go from row to row with them."""
    x, w, r = values(*shape, 32), values(16, 32, seed=1), values(*shape, 16, seed=2)
    want = x @ w.T
    for y in (
        gemmery.linear(x, w, epilogue=epilogues.residual, args=(r,)),
        gemmery.linear(x, w, r, epilogue=lambda acc: acc),
        gemmery.linear(x, w, epilogue=lambda acc, r: acc + r, args=(r,)),
    ):
        torch.testing.assert_close(y, want + r, rtol=1e-4, atol=1e-4)
    s, full = values(*shape, 1, seed=3), values(*shape, 32, seed=4)
    y = gemmery.linear(x, w, epilogue=epilogues.row_scale, args=(s,))
    torch.testing.assert_close(y, want * s, rtol=1e-4, atol=1e-4)
    y = gemmery.linear(x, w, prologue=lambda x, f: x + f, prologue_args=(full,))
    torch.testing.assert_close(y, (x + full) @ w.T, rtol=1e-4, atol=1e-4)
    block = gemmery.nn.GatedMLP(32, 24)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    gate, up = block.gate_up.weight.chunk(2)
    want = F.linear(F.silu(inputs[1] @ gate.T) * (inputs[1] @ up.T), block.down.weight)
    grads = [
        torch.autograd.grad(y.square().sum(), x)[0]
        for y, x in zip((block(inputs[0]), want), inputs, strict=True)
    ]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def double(x):
    return x * 2


def shift(x):
    return x + 1


def test_compositions_of_the_same_functions():
    for chain in ((double, shift, double), (double, shift, shift), (shift, double, double)):
        want = functools.reduce(lambda x, f: f(x), chain, P)
        y = gemmery.matmul(A, B, epilogue=epilogues.compose(*chain))
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)


def times(function, factor):
    @functools.wraps(function)
    def inner(x):
        return function(x) * factor

    return inner


def test_wrapped_functions_are_what_they_are():
    for factor in (2.0, 3.0):
        y = gemmery.matmul(A, B, epilogue=times(F.silu, factor))
        torch.testing.assert_close(y, F.silu(P) * factor, rtol=1e-4, atol=1e-4)


class Settings:
    factor = 2.0


MODULE = types.ModuleType("settings_of_a_test")
MODULE.factor = 2.0


@pytest.mark.parametrize("owner", (Settings, MODULE), ids=("class", "module"))
def test_attributes_are_never_stale(owner, monkeypatch):
    made = gemmery.epilogue(lambda acc: acc * owner.factor)
    for factor in (2.0, 5.0):
        monkeypatch.setattr(owner, "factor", factor)
        torch.testing.assert_close(gemmery.matmul(A, B, epilogue=made), P * factor, rtol=1e-4, atol=1e-4)


def test_functions_as_arguments():
    for i in range(20):

        def scaled(x, factor=float(i)):
            return x * factor

        y = gemmery.matmul(A, B, epilogue=lambda acc, f: f(acc), args=(scaled,))
        torch.testing.assert_close(y, P * i, rtol=1e-4, atol=1e-4)


class Holder:
    value = 1.0

    def __init__(self, value):
        self.value = value


def test_objects_as_arguments():
    held = Holder(2.0)
    for value in (2.0, 3.0):
        held.value = value
        y = gemmery.matmul(A, B, epilogue=lambda acc, h: acc * h.value, args=(held,))
        torch.testing.assert_close(y, P * value, rtol=1e-4, atol=1e-4)


def test_a_branch_on_a_size_is_refused():
    with pytest.raises(epilogues.Untraceable, match="for other sizes"):
        gemmery.matmul(A, B, epilogue=lambda acc: acc * 2 if acc.shape[-1] < 64 else acc)


INTEGERS = {
    "relu": torch.relu,
    "remainder": lambda p: p % 1000,
    "negative remainder": lambda p: -p % 7,
    "and": lambda p: p & 255,
    "or": lambda p: p | 3,
    "not": lambda p: ~p,
    "scaled": lambda p: p * 0.5,
    "compared": lambda p: torch.where(p > 0, p, -p),
    "clamped": lambda p: p.clamp(-1000, 1000),
}


@pytest.mark.parametrize("function", INTEGERS.values(), ids=INTEGERS)
def test_integers_are_exact(function):
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-128, 128, s, dtype=torch.int8, generator=generator) for s in ((8, 2048), (2048, 10))
    )
    product = a.int() @ b.int()
    y, want = gemmery.matmul(a, b, epilogue=function), function(product)
    assert y.dtype == want.dtype
    assert torch.equal(y, want)


def test_numbers_with_integers():
    a, b = torch.ones(3, 8, dtype=torch.int8), torch.ones(8, 5, dtype=torch.int8)
    y = gemmery.matmul(a, b, epilogue=lambda acc, s: acc * s, args=(0.5,))
    assert y.dtype == torch.float32
    assert torch.equal(y, torch.full((3, 5), 4.0))


def test_seeds_of_62_bits_with_gradients():
    seed = (1 << 62) + 12345
    plain = gemmery.matmul(A, B, epilogue=epilogues.dropout, args=(0.5, seed))
    with_gradient = gemmery.matmul(
        A.clone().requires_grad_(), B, epilogue=epilogues.dropout, args=(0.5, seed)
    )
    assert torch.equal(plain, with_gradient.detach())


def test_random_numbers_are_no_prologue():
    with pytest.raises(epilogues.Untraceable, match="random numbers"):
        gemmery.matmul(A, B, prologue=lambda a: epilogues.dropout(a, 0.5, 1))


def test_out_is_looked_at_in_every_call():
    square, out = values(16, 16), torch.empty(16, 16)
    for _ in range(2):
        gemmery.matmul(square, square, epilogue=torch.relu, out=out)
        with pytest.raises(ValueError, match="share memory"):
            gemmery.matmul(square, square, epilogue=torch.relu, out=square)


def test_tangents_are_not_lost():
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda a: gemmery.matmul(a, B, epilogue=torch.relu), (A,), (A,))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_types_of_one_column(dtype):
    a, b = A.to(dtype), B.to(dtype)
    assert gemmery.matmul(a, b[:, :1], epilogue=torch.relu).dtype == dtype
    assert gemmery.matmul(a, b[:, :2], epilogue=epilogues.swiglu).dtype == dtype


def test_results_of_every_type():
    assert torch.equal(gemmery.matmul(A, B, epilogue=lambda acc: acc > 0), P > 0)
    for dtype in (torch.uint8, torch.int16, torch.int64, torch.int8):
        y = gemmery.matmul(A, B, epilogue=lambda acc: (acc > 0).to(dtype))  # noqa: B023
        assert torch.equal(y, (P > 0).to(dtype))


def test_a_result_that_is_the_product_has_a_gradient():
    x = A.clone().requires_grad_()
    y, row = gemmery.matmul(x, B, epilogue=epilogues.logsumexp)
    (grad,) = torch.autograd.grad((row - y[:, 0]).sum(), x)
    z = A.clone().requires_grad_()
    product = z @ B
    (want,) = torch.autograd.grad((product.logsumexp(-1) - product[:, 0]).sum(), z)
    torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    (
        ({"precision": "tf23"}, ValueError, "precision is 'tf23'"),
        ({"out_dtype": torch.complex64}, TypeError, "results can be"),
        (
            {"b": (B[:, :10], B[:, 10:]), "bias": (torch.ones(1), torch.ones(1))},
            ValueError,
            r"bias\[0\] is \(1,\)",
        ),
    ),
)
def test_errors(given, error, message):
    with pytest.raises(error, match=message):
        gemmery.matmul(**({"a": A, "b": B, "epilogue": epilogues.swiglu} | given))


def test_a_config_may_be_a_dict():
    config = {"block_m": 16, "block_n": 16, "block_k": 16, "num_warps": 4, "num_stages": 2}
    for _ in range(2):
        y = gemmery.matmul(A, B, epilogue=torch.relu, config=config)
        torch.testing.assert_close(y, torch.relu(P), rtol=1e-4, atol=1e-4)


def test_compiled_code_sees_autocast_and_closures():
    made = gemmery.epilogue(torch.relu)
    step = torch.compile(
        lambda a, b: gemmery.matmul(a, b, epilogue=made), fullgraph=True, backend="aot_eager"
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert step(A, B).dtype == torch.bfloat16
    row = torch.ones(20)
    holding = gemmery.epilogue(lambda acc, k=1.0: acc * row + k)
    step = torch.compile(
        lambda a, b, t: gemmery.matmul(a, b, epilogue=holding, args=(t,)), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match="have to come through args"):
        step(A, B, torch.ones(20))


def _derivative(t):
    return torch.func.jvp(lambda x: x * x, (t,), (torch.ones_like(t),))[1]


ARITHMETIC = {
    "rsub": lambda acc, r: torch.rsub(acc, r, alpha=2.0),
    "rsub of a number": lambda acc, r: torch.rsub(acc, 3, alpha=2) + r,
    "by zero": lambda acc, r: acc / 0.0 + r,
    "softplus of much": lambda acc, r: F.softplus(acc * 1e37, 4.0) + r,
    "softplus of doubles": lambda acc, r: F.softplus(acc, 2.0) + r,
    "softplus soon": lambda acc, r: F.softplus(acc, 1.0, 0.5) + r,
    "a derivative": lambda acc, r: _derivative(acc) + r,
    "expm1 of much": lambda acc, r: torch.expm1(acc.abs().clamp(max=1) * 88) + r,
}


@pytest.mark.parametrize("function", ARITHMETIC.values(), ids=ARITHMETIC)
def test_arithmetic_of_a_function(function):
    row = torch.randn(20)
    y = gemmery.matmul(A, B, epilogue=function, args=(row,))
    torch.testing.assert_close(y, function(P, row), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("divisor", [41, 47.0, 97.0])
def test_a_quotient_of_whole_numbers_is_whole(divisor):
    """Also by a number or a tensor of one element: quantising functions round it down."""
    a = torch.arange(4096.0).reshape(64, 64)
    eye = torch.eye(64)
    for s in (divisor, torch.tensor([float(divisor)])):
        y = gemmery.matmul(a, eye, epilogue=lambda acc, s: torch.floor(acc / s), args=(s,))
        assert torch.equal(y, torch.floor(a / s))
