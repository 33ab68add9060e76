"""Kernels and gradients of functions whose values change, or that can't be known: what ran is what is differentiated."""

import types
from collections import namedtuple

import pytest
import torch
from torch.nn import functional as F

import gemmery
from gemmery import devices

# What these tests are about does not depend on Triton's version.
pytestmark = pytest.mark.slow


def values(*shape, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_(grad)


X, W = values(5, 8), values(12, 8, seed=1)
SETTINGS = types.ModuleType("settings")
SETTINGS.inner = types.ModuleType("inner")


def test_kernels_are_used_here():
    assert devices.current(X.device) is not None


def test_an_exponent_that_changes_before_the_backward_pass():
    """The product is not saved where the gradient does not look at it: of the exponent that it had."""
    x, p = X.clone().requires_grad_(), 1
    y = gemmery.linear(x, W, epilogue=lambda acc: acc**p)
    p = 2
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, W.sum(0).expand(5, 8))


def test_second_derivatives_are_those_of_the_call():
    x = X.clone().requires_grad_()
    SETTINGS.inner.k = 2.0
    made = gemmery.epilogue(lambda acc: torch.tanh(acc * SETTINGS.inner.k))
    y = gemmery.linear(x, W, epilogue=made)
    want = torch.tanh(F.linear(x, W) * 2.0)
    SETTINGS.inner.k = 5.0
    for result in (y, want):
        (first,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        if result is y:
            found = second
    torch.testing.assert_close(found, second, rtol=1e-6, atol=1e-6)


def test_checkpointed_calls_run_as_they_are_run():
    from torch.utils.checkpoint import checkpoint

    x, k = X.clone().requires_grad_(), 2.0
    y = checkpoint(
        lambda x: gemmery.linear(x, W, epilogue=lambda acc: torch.tanh(acc * k)), x, use_reentrant=False
    )
    (grad,) = torch.autograd.grad(y.sum(), x)
    (want,) = torch.autograd.grad(torch.tanh(F.linear(x, W) * k).sum(), x)
    torch.testing.assert_close(grad, want, rtol=1e-6, atol=1e-6)


def test_the_product_may_be_changed_in_place():
    x, r = X.clone().requires_grad_(), values(5, 12, seed=2, grad=True)
    for function in (
        lambda acc, r: acc.relu_() * r,
        lambda acc, r: (acc.mul_(2).add_(r), acc.logsumexp(-1))[0],
        lambda acc, r: (torch.sigmoid(acc.mul_(r)), acc.amax(-1)),
    ):
        results = [f(x, r) for f in (
            lambda x, r: gemmery.linear(x, W, epilogue=function, args=(r,)),  # noqa: B023
            lambda x, r: function(F.linear(x, W).clone(), r),  # noqa: B023
        )]  # fmt: skip
        grads = []
        for y in results:
            parts = y if isinstance(y, tuple) else (y,)
            grads.append(torch.autograd.grad(sum(p.square().sum() for p in parts), (x, r), allow_unused=True))
        for found, want in zip(*grads, strict=True):
            assert (found is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


class Act:
    """An activation with a number of its own, which is not looked at."""

    def __init__(self, k):
        self.k = k

    def __call__(self, acc):
        return torch.tanh(acc * self.k)


def test_objects_are_differentiated_by_torch():
    act, x = Act(2.0), X.clone().requires_grad_()
    y = gemmery.linear(x, W, epilogue=act)
    want = act(F.linear(x, W))
    act.k = 5.0
    (grad,), (expected,) = (torch.autograd.grad(r.sum(), x) for r in (y, want))
    torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-6)


def test_whether_gradients_are_recorded_is_what_the_caller_sees():
    function = lambda acc: acc * (2.0 if torch.is_grad_enabled() else 3.0)  # noqa: E731
    product = F.linear(X, W)
    for _ in range(2):
        torch.testing.assert_close(gemmery.linear(X, W, epilogue=function), product * 2)
        with torch.no_grad():
            torch.testing.assert_close(gemmery.linear(X, W, epilogue=function), product * 3)
    x = X.clone().requires_grad_()
    y = gemmery.linear(x, W, epilogue=function)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y.detach(), product * 2)
    torch.testing.assert_close(grad, 2 * W.sum(0).expand(5, 8))


def test_values_of_arguments_are_told_apart():
    one, other = namedtuple("One", "scale shift")(2.0, 3.0), namedtuple("Other", "shift scale")(2.0, 3.0)
    for pair in (one, other):
        y = gemmery.linear(X, W, epilogue=lambda acc, c: acc * c.scale, args=(pair,))
        torch.testing.assert_close(y, F.linear(X, W) * pair.scale)


# ---------------------------------------------------------------------------------------------------------------------
# Compiled code


@pytest.mark.parametrize("graded", (False, True), ids=("without gradients", "with gradients"))
def test_compiled_code_says_when_a_value_has_changed(graded):
    k = 2.0
    made = gemmery.epilogue(lambda acc: torch.tanh(acc * k))
    step = torch.compile(lambda x: gemmery.linear(x, W, epilogue=made), fullgraph=True, backend="aot_eager")
    x = X.clone().requires_grad_(graded)
    y, want = step(x), torch.tanh(F.linear(x, W) * k)
    torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-6)
    k = 3.0
    if graded:
        with pytest.raises(RuntimeError, match="other values than when it was compiled"):
            torch.autograd.grad(y.sum(), x)
    with pytest.raises(RuntimeError, match="other values than when it was compiled"):
        step(x)
    torch.compiler.reset()
    torch.testing.assert_close(step(x), torch.tanh(F.linear(x, W) * k), rtol=1e-6, atol=1e-6)


def test_compiled_code_compiles_a_function_that_is_not_known():
    act = Act(2.0)
    made = gemmery.epilogue(lambda acc, r: act(acc) + r)
    step = torch.compile(
        lambda x, b, r: gemmery.linear(x, W, b, epilogue=made, args=(r,)), fullgraph=True, backend="aot_eager"
    )
    leaves = X.clone().requires_grad_(), values(12, seed=3, grad=True), values(5, 12, seed=2, grad=True)
    found = torch.autograd.grad(step(*leaves).square().sum(), leaves)
    x, b, r = leaves
    want = torch.autograd.grad((torch.tanh(F.linear(x, W, b) * 2.0) + r).square().sum(), leaves)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
