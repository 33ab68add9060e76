"""The short way of a product with a prebuilt epilogue, with a stand-in for the way into the driver."""

import ctypes
import functools

import pytest
import torch
from torch.nn import functional as F

import gemmery
from gemmery import epilogues
from gemmery.product import cache, compute

# What these tests are about does not depend on Triton's version.
pytestmark = pytest.mark.slow


def at_address(address, like):
    """A tensor of a layout over memory that belongs to somebody else."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    memory = (ctypes.c_uint8 * (count * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


@pytest.fixture
def entered(monkeypatch):
    """Calls that went the short way, which launches the interpreted kernel on the addresses that it has."""
    calls, known_calls = [], {}
    prepare = compute.prepare

    def with_direct(call, out):
        known = prepare(call, out)
        plan, binding, results = known.plan, known.plan._binding, known.results
        if results is None:
            made = [make() for make in known.makers]
        else:
            made = results.flat(results.allocate(call.device, plan.slots if results.reduces else 1))
        values = call.values
        layouts = known.pick([*values, *made[::-1]])

        def direct(addresses, numbers):
            tensors = [at_address(at, like) for at, like in zip(addresses, layouts, strict=True)]
            binding.launch(tensors, numbers)
            return True

        plan.direct = direct
        return known

    def counted(key):
        found = known_calls.get(key)
        if found is not None:
            calls.append(key)
        return found

    monkeypatch.setattr(compute, "prepare", with_direct)
    monkeypatch.setattr(cache, "_known", known_calls)
    monkeypatch.setattr(cache, "find", counted)
    return calls


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, W, BIAS = values(12, 16), values(20, 16, seed=1), values(20, seed=2)


def check(entered, count, call, want):
    before = len(entered)
    torch.testing.assert_close(call(), want, rtol=1e-4, atol=1e-4)
    assert len(entered) - before == count


def test_second_calls_go_the_short_way(entered):
    made = gemmery.epilogue(lambda acc, r, k: torch.relu(acc + r) * k)
    full = values(12, 20, seed=3)
    for i, k in enumerate((1.0, 2.5, 3.0)):
        want = torch.relu(F.linear(X, W, BIAS) + full) * k
        check(
            entered, int(i > 0), lambda k=k: gemmery.linear(X, W, BIAS, epilogue=made, args=(full, k)), want
        )
    # Other tensors of the same layouts.
    other = values(12, 20, seed=4)
    want = torch.relu(F.linear(2 * X, W, BIAS) + other) * 4
    check(entered, 1, lambda: gemmery.linear(2 * X, W, BIAS, epilogue=made, args=(other, 4.0)), want)


def test_without_a_bias_and_by_matmul(entered):
    made = gemmery.epilogue(epilogues.residual)
    full = values(12, 20, seed=3)
    for i in range(2):
        check(entered, i, lambda: gemmery.matmul(X, W.T, epilogue=made, args=(full,)), X @ W.T + full)
    check(entered, 0, lambda: gemmery.linear(X, W, epilogue=made, args=(full,)), X @ W.T + full)


def test_several_results(entered):
    made = gemmery.epilogue(lambda acc, c: (acc.chunk(2, -1)[0] + c, acc * 2))
    row = values(10, seed=5)
    for i in range(3):
        results = gemmery.linear(X, W, epilogue=made, args=(row,))
        assert isinstance(results, tuple)
        torch.testing.assert_close(results[0], (X @ W.T)[:, :10] + row, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(results[1], 2 * (X @ W.T), rtol=1e-4, atol=1e-4)
        assert len(entered) >= i


SHIFT = values(20, seed=6)
FACTOR = 2.0


def helper(acc):
    return acc * FACTOR


def test_what_a_function_takes_from_outside_is_never_stale(entered, monkeypatch):
    added, made = 1.0, None

    def function(acc):
        return helper(acc) + SHIFT + added

    made = gemmery.epilogue(function)

    def run():
        return gemmery.linear(X, W, epilogue=made)

    for i in range(3):
        check(entered, int(i > 0), run, X @ W.T * 2 + SHIFT + 1)
    added = 5.0
    for i in range(3):
        check(entered, int(i > 0), run, X @ W.T * 2 + SHIFT + 5)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    for i in range(3):
        check(entered, int(i > 0), run, X @ W.T * 3 + SHIFT + 5)
    fresh = values(20, seed=7)
    monkeypatch.setitem(globals(), "SHIFT", fresh)
    for i in range(3):
        check(entered, int(i > 0), run, X @ W.T * 3 + fresh + 5)
    fresh += 1  # read at every call
    check(entered, 1, run, X @ W.T * 3 + fresh + 5)
    monkeypatch.setitem(globals(), "helper", lambda acc: -acc)
    for i in range(3):
        check(entered, int(i > 0), run, -(X @ W.T) + fresh + 5)


def test_defaults_are_never_stale(entered):
    def function(acc, k=2.0):
        return acc * k

    made = gemmery.epilogue(function)
    for i in range(2):
        check(entered, i, lambda: gemmery.linear(X, W, epilogue=made), X @ W.T * 2)
    function.__defaults__ = (3.0,)
    for i in range(2):
        check(entered, i, lambda: gemmery.linear(X, W, epilogue=made), X @ W.T * 3)


def test_other_calls_are_not_taken_for_it(entered):
    made = gemmery.epilogue(epilogues.bias)
    run = lambda x, w, b, **how: gemmery.linear(x, w, epilogue=made, args=(b,), **how)  # noqa: E731
    for i in range(2):
        check(entered, i, lambda: run(X, W, BIAS), X @ W.T + BIAS)
    column = values(12, 1, seed=8)
    wide = values(12, 40, seed=9)[:, ::2]
    others = (
        (X, W, column), (X, W, values(12, 20, seed=9)), (X, W, wide), (X[:5], W, BIAS), (X.t().contiguous().t(), W, BIAS),
        (X, W[:, :16].clone()[::2], BIAS[::2]), (X, W, 2.0), (X, W, 2), (X, W, True),
    )  # fmt: skip
    for x, w, b in others:
        check(entered, 0, lambda x=x, w=w, b=b: run(x, w, b), x @ w.T + b)
    assert run(X, W, BIAS, out_dtype=torch.float16).dtype == torch.float16
    out = torch.empty(12, 20)
    assert run(X, W, BIAS, out=out) is out
    x = X.clone().requires_grad_()
    assert run(x, W, BIAS).requires_grad
    with torch.no_grad():
        check(entered, 1, lambda: run(x, W, BIAS), X @ W.T + BIAS)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(X, W, BIAS).dtype == torch.bfloat16


def test_misaligned_tensors_are_calls_of_their_own(entered):
    made = gemmery.epilogue(epilogues.bias)
    gemmery.linear(X, W, epilogue=made, args=(BIAS,))
    shifted = values(21, seed=2)[1:]
    for i in range(3):
        check(
            entered,
            int(i > 0),
            lambda: gemmery.linear(X, W, epilogue=made, args=(shifted,)),
            X @ W.T + shifted,
        )


@pytest.mark.parametrize(
    ("function", "want"),
    (
        (lambda acc: (acc, acc.sum(-1)), lambda p: (p, p.sum(-1))),
        (lambda acc: acc.amax(-1), lambda p: p.amax(-1)),
        (lambda acc: (acc, acc), lambda p: (p, p)),
    ),
)
def test_results_that_take_more_go_the_short_way_too(entered, function, want):
    made = gemmery.epilogue(function)
    for i in range(3):
        check(entered, int(i > 0), lambda: gemmery.linear(X, W, epilogue=made), want(X @ W.T))


@pytest.mark.parametrize(
    ("format", "options"),
    [("int4", {"group_size": 64}), ("int4", {"group_size": 64, "symmetric": False}), ("int8", {})],
    ids=["scales", "zeros", "channel"],
)
def test_packed_weights(entered, format, options):
    x, bias = torch.randn(5, 128).bfloat16(), torch.randn(32)
    residual = torch.randn(5, 32).bfloat16()
    add = gemmery.epilogue(epilogues.residual)
    for number in range(3):
        w = gemmery.quantize(torch.randn(32, 128), format, **options)
        full = x.float() @ w.dequantize(torch.float32).T
        results = (
            (gemmery.linear(x, w), full),
            (gemmery.linear(x, w, bias), full + bias),
            (gemmery.linear(x, w, epilogue=add, args=(residual,)), full + residual),
            (gemmery.linear(x, w, bias, epilogue=add, args=(residual,)), full + bias + residual),
        )
        for got, want in results:
            assert torch.allclose(got.float(), want, rtol=2e-2, atol=2e-2)
        assert len(entered) == 4 * number
    # Other scales in the place of these are other calls.
    wide = gemmery.formats.from_codes(
        torch.zeros(32, 128, dtype=torch.uint8), format, scales=torch.rand(32, 2), group_size=64,
        dtype=torch.bfloat16,
    )  # fmt: skip
    before = len(entered)
    gemmery.linear(x, wide)
    assert len(entered) == before


def test_a_factor_for_each_row_or_one_for_all(entered):
    x, full = torch.randn(5, 128).bfloat16(), torch.randn(32, 128)
    for _ in range(2):
        for scale in ("tensor", "channel"):
            w = gemmery.quantize(full, "e4m3", scale=scale)
            want = x.float() @ w.dequantize(torch.float32).T
            assert torch.allclose(gemmery.linear(x, w).float(), want, rtol=2e-2, atol=2e-2)
    assert len(entered) == 2


def test_what_ran_under_autocast_is_not_learned(entered, monkeypatch):
    """The kernel read other tensors than those that were given."""
    made = gemmery.epilogue(torch.relu)
    with torch.autocast("cpu", torch.bfloat16):
        assert gemmery.linear(X, W, epilogue=made).dtype == torch.bfloat16
    want = torch.relu(F.linear(X, W))
    check(entered, 0, lambda: gemmery.linear(X, W, epilogue=made), want)
    check(entered, 1, lambda: gemmery.linear(X, W, epilogue=made), want)


@pytest.mark.parametrize(
    "make",
    (
        lambda: F.gelu,
        lambda: lambda acc: torch.relu(acc) * 2,
        lambda: (lambda k: lambda acc: acc * k)(3.0),
        lambda: functools.partial(F.gelu, approximate="tanh"),
    ),
    ids=("builtin", "lambda", "closure", "partial"),
)
def test_plain_functions_are_as_short_as_prebuilt_ones(entered, make):
    """Also where the function is made anew for every call."""
    for i in range(3):
        check(entered, int(i > 0), lambda: gemmery.linear(X, W, epilogue=make()), make()(X @ W.T))


def test_a_closure_that_changes_is_never_stale(entered):
    k = 2.0

    def function(acc):
        return acc * k

    for value in (2.0, 3.0, 2.0, -0.0, 0.0):
        k = value
        for _ in range(2):
            torch.testing.assert_close(
                gemmery.linear(X, W, epilogue=function), X @ W.T * k, rtol=1e-4, atol=1e-4
            )
