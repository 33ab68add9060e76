"""`@triton.jit` functions as epilogues."""

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional as F

import gemmery
from gemmery import epilogues


@triton.jit
def chosen(acc, row, col, full, single, number):
    x = acc * row + col
    return tl.where(x > 0, x, full) * single + number


def in_torch(acc, row, col, full, single, number):
    x = acc * row + col
    return torch.where(x > 0, x, full) * single + number


@triton.jit
def doubled(acc):
    return acc + acc


@pytest.fixture
def given():
    torch.manual_seed(0)
    args = (torch.rand(37, 1), torch.randn(33), torch.randn(37, 33), torch.tensor(2.0), 0.25)
    return torch.randn(37, 20), torch.randn(33, 20), args


@pytest.mark.parametrize(
    "made", (chosen, epilogues.device_function(chosen, in_torch), gemmery.epilogue(chosen))
)
def test_every_kind_of_argument(made, given):
    x, w, args = given
    y = gemmery.linear(x, w, epilogue=made, args=args)
    torch.testing.assert_close(y, in_torch(x @ w.T, *args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
def test_types(dtype):
    x, w = torch.ones(3, 16, dtype=dtype), torch.ones(5, 16, dtype=dtype)
    y = gemmery.linear(x, w, torch.ones(5, dtype=dtype), epilogue=doubled)
    assert torch.equal(y, torch.full((3, 5), 34, dtype=dtype))


def test_as_a_prologue(given):
    x, w, _ = given
    y = gemmery.linear(x, w, prologue=doubled)
    torch.testing.assert_close(y, 2 * x @ w.T, rtol=1e-4, atol=1e-4)


def test_within_a_traced_function(given):
    x, w, _ = given
    twice = epilogues.device_function(doubled)

    def function(acc):
        gate, up = acc.chunk(2, -1)
        return F.silu(twice(gate)) * up, acc.square().sum(-1)

    w = torch.cat((w, w))
    y, squares = gemmery.linear(x, w, epilogue=function)
    gate, up = (x @ w.T).chunk(2, -1)
    torch.testing.assert_close(y, F.silu(2 * gate) * up, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(squares, (x @ w.T).square().sum(-1), rtol=1e-4, atol=1e-3)


def test_compiled(given):
    x, w, args = given
    made = gemmery.epilogue(chosen)
    step = torch.compile(
        lambda x, w, *args: gemmery.linear(x, w, epilogue=made, args=args),
        fullgraph=True,
        backend="aot_eager",
    )
    torch.testing.assert_close(step(x, w, *args), in_torch(x @ w.T, *args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("made", (doubled, epilogues.device_function(doubled, lambda acc: acc + acc)))
def test_there_is_no_gradient(made, given):
    x, w, _ = given
    with pytest.raises(ValueError, match="doubled is device code, which has no gradient"):
        gemmery.linear(x.requires_grad_(), w, epilogue=made).sum().backward()


def test_two_functions_of_one_name(given):
    x, w, _ = given

    first = epilogues.device_function(doubled)
    second = epilogues.device_function(doubled, lambda acc: 2 * acc)
    assert torch.equal(gemmery.linear(x, w, epilogue=first), gemmery.linear(x, w, epilogue=second))


def test_a_traced_function_is_not_one():
    with pytest.raises(TypeError, match="must be a @triton"):
        epilogues.device_function(lambda acc: acc)


def test_a_half_is_no_block(given):
    x, w, _ = given
    twice = epilogues.device_function(doubled)
    with pytest.raises(epilogues.Untraceable, match="device code"):
        gemmery.linear(x, torch.cat((w, w)), epilogue=lambda acc: (twice(acc), acc.chunk(2, -1)[0]))
