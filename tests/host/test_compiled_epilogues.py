"""Functions as epilogues in code under torch.compile: which ones are taken as they are, and what becomes of the others."""

import functools

import pytest
import torch
from torch.nn import functional as F

import gemmery

X, W = torch.randn(5, 16), torch.randn(8, 16)
SCALE = 3.0


@pytest.fixture(autouse=True)
def _afresh():
    """Compiled code of the tests before counts for the limit of recompilations."""
    torch.compiler.reset()


def doubled(acc):
    return acc * 2


def scaled_by_global(acc):
    return acc * SCALE


def scaled_by_closure(number):
    return lambda acc: acc * number


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "epilogue",
    [F.gelu, torch.relu, doubled, scaled_by_global, lambda acc: acc.sigmoid(), gemmery.epilogues.silu],
)
@pytest.mark.parametrize("grad", [False, True])
def test_functions_without_a_closure(epilogue, grad):
    x = X.clone().requires_grad_(grad)
    made = compiled(lambda x: gemmery.linear(x, W, epilogue=epilogue))(x)
    torch.testing.assert_close(made, epilogue(x @ W.T))
    if grad:
        torch.testing.assert_close(
            torch.autograd.grad(made.sum(), x), torch.autograd.grad(epilogue(x @ W.T).sum(), x)
        )


def test_a_function_that_is_made_in_compiled_code():
    made = compiled(lambda x, r: gemmery.linear(x, W, epilogue=lambda acc, r: acc.tanh() * r, args=(r,)))
    r = torch.randn(5, 8)
    torch.testing.assert_close(made(X, r), (X @ W.T).tanh() * r)


def test_another_function_is_compiled_again():
    layer = compiled(lambda x, epilogue: gemmery.linear(x, W, epilogue=epilogue))
    for epilogue in (F.gelu, doubled, torch.relu, doubled):
        torch.testing.assert_close(layer(X, epilogue), epilogue(X @ W.T))


def test_a_global_that_changed(monkeypatch):
    layer = compiled(lambda x: gemmery.linear(x, W, epilogue=scaled_by_global))
    torch.testing.assert_close(layer(X), X @ W.T * 3)
    monkeypatch.setattr(f"{__name__}.SCALE", 4.0)
    with pytest.raises(RuntimeError, match="captures other values than when it was compiled"):
        layer(X)


@pytest.mark.parametrize(
    ("epilogue", "what"),
    [
        (scaled_by_closure(2), "an epilogue with a closure"),
        (lambda acc, k=2: acc * k, "an epilogue with defaults"),
        (functools.partial(F.gelu, approximate="tanh"), "an epilogue that is a partial"),
        (torch.nn.GELU(), "an epilogue that is a GELU"),
    ],
)
def test_what_the_compiler_does_not_watch(epilogue, what):
    # Dynamo guards a function by its code, so that it would run the first of two closures for both.
    with pytest.raises(Exception, match=f"{what} must be the result of gemmery.epilogue"):
        compiled(lambda x: gemmery.linear(x, W, epilogue=epilogue))(X)
    wrapped = gemmery.epilogue(epilogue)
    layer = compiled(lambda x: gemmery.linear(x, W, epilogue=wrapped))
    torch.testing.assert_close(layer(X), epilogue(X @ W.T))
