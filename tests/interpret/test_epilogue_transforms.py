"""Products with an epilogue under torch's transforms: derivatives of higher order, and vmap."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import gemmery
from gemmery import epilogues

# What these tests are about does not depend on Triton's version.
pytestmark = pytest.mark.slow


def values(*shape, seed=0, dtype=torch.float64, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_(grad)


def gated(acc, r):
    g, u = acc.chunk(2, -1)
    return torch.sigmoid(g) * u * r


def two(acc, r):
    return gated(acc, r), acc.square().sum(-1)


FUNCTIONS = {"matrix": gated, "matrix and row": two}


def leaves():
    return [values(*shape, seed=i, grad=True) for i, shape in enumerate([(3, 4), (6, 4), (6,), (3, 3)])]


def ours(function):
    return lambda x, w, b, r: gemmery.linear(x, w, b, epilogue=function, args=(r,))


def theirs(function):
    return lambda x, w, b, r: function(F.linear(x, w, b), r)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_second_derivatives(function):
    assert torch.autograd.gradgradcheck(ours(function), leaves(), fast_mode=True)


def test_second_derivatives_of_some():
    x, w, b, r = leaves()
    assert torch.autograd.gradgradcheck(
        lambda w, r: gemmery.linear(x.detach(), w, b.detach(), epilogue=gated, args=(r,)),
        (w, r),
        fast_mode=True,
    )


def test_second_derivatives_without_a_bias():
    x, w, *_ = leaves()
    assert torch.autograd.gradgradcheck(
        lambda x, w: gemmery.linear(x, w, epilogue=epilogues.silu), (x, w), fast_mode=True
    )
    # A function whose first derivative does not look at the product.
    c = values(3, 6, seed=9, grad=True)
    assert torch.autograd.gradgradcheck(
        lambda x, w, c: gemmery.linear(x, w, epilogue=lambda acc, c: acc * c, args=(c,)),
        (x, w, c),
        fast_mode=True,
    )


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_third_derivatives(function):
    inputs = leaves()

    def third(product):
        made = product(*inputs)
        y = sum(t.square().sum() for t in (made if isinstance(made, tuple) else (made,)))
        for power in (3, 2):
            grads = torch.autograd.grad(y, inputs, create_graph=True)
            y = sum(g.pow(power).sum() for g in grads)
        return torch.autograd.grad(y, inputs)

    for grad, want in zip(third(ours(function)), third(theirs(function)), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-8, atol=1e-8)


MAPPED = [dims for dims in itertools.product((0, None), repeat=4) if dims != (None,) * 4]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("dims", MAPPED, ids=str)
def test_vmap(dims, function):
    shapes = [(3, 4), (6, 4), (6,), (3, 3)]
    inputs = [
        values(*((5,) if d == 0 else ()), *s, seed=i)
        for i, (s, d) in enumerate(zip(shapes, dims, strict=True))
    ]
    results = torch.vmap(ours(function), dims)(*inputs)
    wanted = torch.vmap(theirs(function), dims)(*inputs)
    torch.testing.assert_close(results, wanted)


def test_vmap_of_batches_over_other_dimensions():
    x, w, r = values(2, 3, 7, 4), values(6, 7, 4, seed=1), values(3, 6, 7, seed=2)
    results = torch.vmap(
        lambda x, w, r: gemmery.linear(x, w, epilogue=epilogues.residual, args=(r,)), (2, 1, 2)
    )(x, w, r)
    wanted = torch.vmap(lambda x, w, r: F.linear(x, w) + r, (2, 1, 2))(x, w, r)
    torch.testing.assert_close(results, wanted)


def test_vmap_in_vmap():
    x, w = values(2, 5, 3, 4), values(5, 6, 4, seed=1)
    mapped = torch.vmap(torch.vmap(lambda x, w: gemmery.linear(x, w, epilogue=epilogues.swiglu)), (0, None))
    g, u = (x @ w.mT).chunk(2, -1)
    torch.testing.assert_close(mapped(x, w), F.silu(g) * u)


def test_gradients_of_what_was_mapped():
    x, w = values(5, 3, 4, grad=True), values(6, 4, seed=1, grad=True)
    y = torch.vmap(lambda x: gemmery.linear(x, w, epilogue=epilogues.gelu))(x)
    grads = torch.autograd.grad(y.square().sum(), (x, w))
    wanted = torch.autograd.grad(F.gelu(x @ w.mT).square().sum(), (x, w))
    torch.testing.assert_close(grads, wanted)


def test_transforms_that_are_not_there_say_so():
    x, w = values(3, 4, grad=True), values(6, 4, seed=1, grad=True)
    y = gemmery.linear(x, w, epilogue=epilogues.gelu)
    with pytest.raises(RuntimeError, match="Batching rule"):
        torch.autograd.grad(y, x, torch.ones(2, *y.shape, dtype=y.dtype), is_grads_batched=True)
