"""Gradients without a kernel: torch differentiates the function, which runs once, as the user wrote it."""

import pytest
import torch
from torch.nn import functional as F

import gemmery


def values(*shape, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).requires_grad_(grad)


class Holder:
    scale = torch.nn.Parameter(torch.ones(12))


ACTIVATION = torch.nn.PReLU()
PARAMETERS = [torch.nn.Parameter(torch.ones(12))]
#: Functions that reach a parameter by other ways than args and closures.
REACHED = {
    "a module in a function": (lambda acc: ACTIVATION(acc), ACTIVATION.weight),
    "a module": (ACTIVATION, ACTIVATION.weight),
    "a list": (lambda acc: acc * PARAMETERS[0], PARAMETERS[0]),
    "a class": (lambda acc: acc * Holder.scale, Holder.scale),
}


@pytest.mark.parametrize("prebuilt", (False, True), ids=("plain", "prebuilt"))
@pytest.mark.parametrize("of_weight", (False, True), ids=("of x", "of the weight"))
@pytest.mark.parametrize(("function", "parameter"), REACHED.values(), ids=REACHED)
def test_parameters_that_a_function_reaches_get_gradients(function, parameter, of_weight, prebuilt):
    x, w = values(5, 8, grad=not of_weight), values(12, 8, seed=1, grad=of_weight)
    given = gemmery.epilogue(function) if prebuilt else function
    leaves = (w if of_weight else x, parameter)
    found = torch.autograd.grad(gemmery.linear(x, w, epilogue=given).square().sum(), leaves)
    want = torch.autograd.grad(function(F.linear(x, w)).square().sum(), leaves)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pair", (False, True), ids=("one weight", "two"))
def test_a_function_that_draws_at_random_runs_once(pair):
    x, bias = values(64, 16, grad=True), torch.zeros(64, 32, requires_grad=True)
    weight = (values(32, 16, seed=1), values(32, 16, seed=2)) if pair else values(32, 16, seed=1)

    def function(acc, r):
        return F.dropout((acc.chunk(2, -1)[0] if pair else acc) + r, 0.5)

    y = gemmery.linear(x, weight, epilogue=function, args=(bias,))
    (mask,) = torch.autograd.grad(y.sum(), bias)
    assert torch.equal(mask != 0, y != 0)


def test_a_function_that_asks_whether_gradients_are_recorded():
    function = lambda acc: acc * (2.0 if torch.is_grad_enabled() else 3.0)  # noqa: E731
    x, w = values(5, 8, grad=True), values(12, 8, seed=1)
    y = gemmery.linear(x, w, epilogue=function)
    torch.testing.assert_close(y, 2 * F.linear(x, w))
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, 2 * w.sum(0).expand(5, 8))
    with torch.no_grad():
        torch.testing.assert_close(gemmery.linear(x, w, epilogue=function), 3 * F.linear(x, w))


def test_compiled_code_draws_once():
    @gemmery.epilogue
    def dropped(acc, r):
        return F.dropout(acc + r, 0.5)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x, w, r):
        return gemmery.linear(x, w, epilogue=dropped, args=(r,))

    x, w, r = values(64, 16, grad=True), values(32, 16, seed=1), torch.zeros(64, 32, requires_grad=True)
    y = step(x, w, r)
    (mask,) = torch.autograd.grad(y.sum(), r)
    assert torch.equal(mask != 0, y != 0)


def test_the_type_and_tuples_are_those_without_gradients():
    x, w = values(5, 8).bfloat16(), values(12, 8, seed=1).bfloat16()
    for function in (torch.relu, lambda acc: (acc, acc.half(), acc.sum(-1)), lambda acc: (acc,)):
        plain = gemmery.linear(x, w, epilogue=function)
        graded = gemmery.linear(x.clone().requires_grad_(), w, epilogue=function)
        assert type(plain) is type(graded)
        for a, b in zip(*((y if isinstance(y, tuple) else (y,)) for y in (plain, graded)), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b.detach(), rtol=0, atol=0)
