"""Calls with an epilogue that are easy to get wrong: sizes of 1, functions that look alike, integers, what is checked."""

import functools
import math
import operator
import types

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import gemmery
from gemmery import epilogues

pytestmark = pytest.mark.slow


def values(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
    with pytest.raises(epilogues.Untraceable, match="depends on the sizes"):
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
    with pytest.raises(Exception, match="pass its tensors through args"):
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


# ---------------------------------------------------------------------------------------------------------------------
# Numbers at their edges, as torch has them

EDGES = (0.0, -0.0, 1.0, -1.0, 0.1, 1.5, -3.0, 88.0, 16777217.0, 1e20, 1e-40, math.inf, -math.inf, math.nan)


def every_pair(numbers, dtype):
    x = torch.tensor(numbers, dtype=dtype)
    return x[:, None].expand(len(x), len(x)).contiguous(), x.expand(len(x), len(x)).contiguous()


def on_arguments(function, *args):
    """A function of arguments alone, in a kernel."""
    a, b = torch.zeros(args[0].shape[0], 1), torch.zeros(1, args[0].shape[1])
    return gemmery.matmul(a, b, epilogue=lambda acc, *given: function(*given), args=args)


def assert_same(result, want):
    assert result.dtype == want.dtype
    torch.testing.assert_close(result, want, rtol=0, atol=0, equal_nan=True)
    known = ~want.isnan() if want.is_floating_point() else torch.ones_like(want, dtype=torch.bool)
    assert torch.equal(torch.signbit(result)[known], torch.signbit(want)[known])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinity
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_remainders_are_exact(dtype):
    bits = torch.int32 if dtype == torch.float32 else torch.int64
    limits = torch.iinfo(bits)
    any_bits = torch.randint(
        limits.min, limits.max, (40,), dtype=bits, generator=torch.Generator().manual_seed(0)
    )
    x, y = every_pair([*EDGES, torch.finfo(dtype).max, *any_bits.view(dtype).tolist()], dtype)
    a, b = torch.zeros(x.shape[0], 1, dtype=dtype), torch.zeros(1, x.shape[1], dtype=dtype)
    run = lambda f: gemmery.matmul(a, b, epilogue=lambda acc, x, y: f(x, y), args=(x, y))  # noqa: E731
    # torch's vector instructions give up on large quotients; NumPy calls the C library.
    left = np.fmod(x.numpy(), y.numpy())
    assert_same(run(torch.fmod), torch.from_numpy(left))
    moved = np.where((left != 0) & ((left < 0) != (y.numpy() < 0)), left + y.numpy(), left)
    assert_same(run(operator.mod), torch.from_numpy(moved))
    for mode in ("floor", "trunc"):
        divide = functools.partial(torch.div, rounding_mode=mode)
        torch.testing.assert_close(run(divide), divide(x, y), rtol=0, atol=0, equal_nan=True)


def test_remainders_by_numbers():
    for function in (
        lambda p: p % 0.1, lambda p: 7 % p, lambda p: p % math.inf, lambda p: p // 0.3, lambda p: torch.fmod(p, -1.5),
    ):  # fmt: skip
        acc = gemmery.matmul(A, B)
        assert_same(gemmery.matmul(A, B, epilogue=function), function(acc))


SMALL = {
    "add": operator.add,
    "mul": operator.mul,
    "alpha": lambda x, y: torch.sub(x, y, alpha=3),
    "constant": lambda x, y: x + 200,
    "remainder": operator.mod,
    "fmod": torch.fmod,
    "quotient": operator.floordiv,
    "not": lambda x, y: ~x ^ y,
    "clamp": lambda x, y: x.clamp(-20, 30),
    "compared": lambda x, y: (x > -1) & (y < 300),
    "sign": lambda x, y: x.sign(),
    "power": lambda x, y: x**3 + y**0 + x.square(),
    "where": lambda x, y: torch.where(x > y, x, -1),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of integers that wrap
@pytest.mark.parametrize("dtype", (torch.uint8, torch.int8, torch.int16, torch.int64), ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_integers_wrap(name, dtype):
    limits = torch.iinfo(dtype)
    numbers = [limits.min, limits.max, 1, 3, 7, 100, *([-1, -3, -100] if limits.min else [])]
    x, y = every_pair([n for n in numbers if n], dtype)
    assert_same(on_arguments(SMALL[name], x, y), SMALL[name](x, y))


BOOLS = {
    "add": operator.add,
    "alpha": lambda x, y: torch.add(x, y, alpha=2),
    "no alpha": lambda x, y: torch.add(x, y, alpha=0),
    "mul": operator.mul,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "less": operator.lt,
    "at least": operator.ge,
    "xor": operator.xor,
    "sign": lambda x, y: x.sign(),
    "with integers": lambda x, y: x + 1 - y * 2,
    "where": lambda x, y: torch.where(x, y, True),
    "sum": lambda x, y: x.sum(-1),
    "amax": lambda x, y: (x & y).amax(-1),
    "amin": lambda x, y: y.amin(-1),
}


@pytest.mark.parametrize("name", BOOLS)
def test_arithmetic_of_bools(name):
    x, y = every_pair([True, False], torch.bool)
    result, want = on_arguments(BOOLS[name], x, y), BOOLS[name](x, y)
    assert result.dtype == want.dtype
    assert torch.equal(result, want)


@pytest.mark.parametrize(
    "k", (torch.tensor(1.0), torch.tensor(-1, dtype=torch.int8), torch.tensor([[0.0]])), ids=str
)
def test_numbers_and_blocks_are_compared_together(k):
    def function(acc, k):
        return torch.where((k > 0) & (acc > 0) | torch.logical_not(k), acc, -1)

    y = gemmery.matmul(A, B, epilogue=function, args=(k,))
    torch.testing.assert_close(y, function(P, k), rtol=1e-4, atol=1e-4)


def test_a_tensor_of_16_bits_is_compared_in_them():
    r = torch.tensor([0.1, 0.5, 0.3, 1.0]).bfloat16().repeat(5)
    for function in (lambda r: r == 0.1, lambda r: r > 0.3, lambda r: r <= torch.full((), 0.1)):
        y = gemmery.matmul(A, B, epilogue=lambda acc, r: (acc == acc) & function(r), args=(r,))  # noqa: B023
        assert torch.equal(y, function(r).expand(12, 20))


@pytest.mark.parametrize("number", (math.inf, -math.inf, math.nan, 0.0, 2.5))
def test_powers_and_signs_of_what_is_no_number(number):
    a, b = torch.full((3, 1), number), torch.ones(1, 4)
    for function in (lambda acc: acc**0, torch.sign, lambda acc: acc**2):
        assert_same(gemmery.matmul(a, b, epilogue=function), function(a @ b))


@pytest.mark.parametrize("shift", (0.0, 1e3, 1e5))
def test_log_softmax_of_large_numbers(shift):
    a = torch.cat([A, torch.full((12, 1), shift)], 1)
    b = torch.cat([B, torch.ones(1, 20)])
    logits = gemmery.matmul(a, b)  # the very sums
    result = gemmery.matmul(a, b, epilogue=lambda acc: acc.log_softmax(-1))
    want = logits.double().log_softmax(-1)
    assert (result - want).abs().max() <= 4 * (logits.log_softmax(-1) - want).abs().max() + 1e-6


@pytest.mark.parametrize("columns", (1, 2, 3, 20))
def test_kept_rows_have_the_type_of_sums(columns):
    y = gemmery.matmul(
        A.bfloat16(), B[:, :columns].bfloat16(), epilogue=lambda acc: acc.sum(-1, keepdim=True)
    )
    assert (y.shape, y.dtype) == ((12, 1), torch.float32)


@pytest.mark.parametrize(
    "shape", ((5, 8), (8,), (1, 8), (5, 1), (), (2, 1, 8), (1, 5, 8), (2, 5, 1), (5, 4)), ids=str
)
def test_results_of_arguments_alone_have_their_own_shapes(shape):
    a, b, r = values(2, 5, 4), values(4, 8, seed=1), values(*shape, seed=2)

    def function(acc, r):
        own = acc.chunk(2, -1)[0] + r if shape == (5, 4) else acc * 1
        rows = (r.square().sum(-1), r.amax(-1, keepdim=True)) if shape[-1:] in ((8,), (4,)) else ()
        return own, r * 2, *rows

    results = gemmery.matmul(a, b, epilogue=function, args=(r,))
    for result, want in zip(results, function(a @ b, r), strict=True):
        assert (result.shape, result.dtype) == (want.shape, want.dtype)
        torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-4)
    # And their gradients.
    leaf = r.clone().requires_grad_()
    results = gemmery.matmul(a, b, epilogue=function, args=(leaf,))
    (grad,) = torch.autograd.grad(sum(x.square().sum() for x in results), leaf)
    leaf = r.clone().requires_grad_()
    (want,) = torch.autograd.grad(sum(x.square().sum() for x in function(a @ b, leaf)), leaf)
    torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", (torch.bfloat16, torch.float16, torch.float32))
def test_what_is_saved_for_gradients_has_the_type_of_each_call(first):
    """The same function behind products in one type, and then in others."""
    for dtype in (first, torch.float32, torch.float16, torch.bfloat16):
        x, w = (
            values(8, 16, dtype=dtype).requires_grad_(),
            values(12, 16, seed=1, dtype=dtype).requires_grad_(),
        )
        grad = values(8, 6, seed=2, dtype=dtype)
        got = torch.autograd.grad(gemmery.linear(x, w, epilogue=epilogues.swiglu), (x, w), grad)
        x, w = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
        gate, up = (x @ w.T).chunk(2, -1)
        want = torch.autograd.grad(F.silu(gate) * up, (x, w), grad.double())
        limit = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        for ours, theirs in zip(got, want, strict=True):
            assert (ours.double() - theirs).abs().max() <= limit * theirs.abs().max()


def test_results_in_other_types_may_have_no_gradient():
    """An earlier call whose results were integers does not decide whether the product is saved."""

    def function(acc):
        return torch.sin(acc), acc * 2

    leaf = A.clone().requires_grad_()
    gemmery.matmul(leaf, B, epilogue=function, out_dtype=(torch.int8, None))
    first, _ = gemmery.matmul(leaf, B, epilogue=function)
    (got,) = torch.autograd.grad(first.sum(), leaf)
    (want,) = torch.autograd.grad(torch.sin(leaf @ B).sum(), leaf)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_integers_are_rounded_to_the_type_that_they_are_combined_in():
    whole, half = torch.full((12, 20), 2049, dtype=torch.int32), torch.full((12, 20), 3.0).half()
    assert_same(on_arguments(torch.fmod, whole, half), torch.fmod(whole, half))
    large = torch.full((12, 20), (1 << 24) + 1)
    y = gemmery.matmul(A.double(), B.double(), epilogue=lambda acc, r: r / 1, args=(large,))
    assert_same(y, large / 1)


def test_casts_of_reduced_rows_are_rounded_in_turn():
    for function in (
        lambda acc: acc.amax(-1).to(torch.float16).to(torch.float32),
        lambda acc: acc.to(torch.float16).amin(-1),
        lambda acc: (acc.amax(-1, keepdim=True) * 10).to(torch.int64),
        lambda acc: acc.amax(-1).to(torch.int32),
        lambda acc: acc - acc.amax(-1, keepdim=True).to(torch.int64),
    ):
        exact = gemmery.matmul(A, B)
        assert_same(gemmery.matmul(A, B, epilogue=function), function(exact))
