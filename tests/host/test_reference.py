"""Tensors on the CPU take the reference: the same meaning, against torch and against float64."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gemmery
from gemmery import reference
from tests.oracle import (
    DTYPES,
    FP8,
    HALVES,
    assert_product,
    default_out,
    layouts,
    operand,
    output,
    place,
    product,
    sizes,
    values,
)  # fmt: skip

NUMBERS = (torch.float32, torch.float64)


@given(st.data(), st.sampled_from(DTYPES), sizes(60), sizes(60), sizes(60), st.integers(0, 2**32 - 1))
def test_products(data, dtype, m, n, k, seed):
    a = operand(data.draw, (m, k), dtype, seed)
    b = operand(data.draw, (k, n), data.draw(st.sampled_from(FP8)) if dtype in FP8 else dtype, seed + 1)
    c = values((m, n), default_out(dtype), seed + 2)
    factors = st.sampled_from((0, 1, 2, -3, 2.0) if dtype == torch.int8 else (0, 1, 0.5, -3))
    alpha, beta = data.draw(factors), data.draw(factors)
    placed = output(data.draw, (m, n), default_out(dtype))
    result = gemmery.addmm(c, a, b, alpha=alpha, beta=beta, out=None if placed is None else placed.view)
    if placed is not None:
        assert result is placed.view
        placed.assert_outside_unchanged()
    assert_product(result, a, b, c, alpha, beta)
    assert_product(gemmery.matmul(a, b), a, b)
    assert_product(gemmery.linear(a, b.t(), c[0] if m else None), a, b, c[0] if m else None)


@given(
    st.data(),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_batches(data, dtype, batch, m, k):
    a = operand(data.draw, (*batch, m, k), dtype, 1)
    b = operand(data.draw, (*(1 for _ in batch), k, 4), dtype, 2)
    assert_product(gemmery.matmul(a, b), a, b)
    assert_product(gemmery.matmul(b.mT, a.mT), b.mT, a.mT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place(dtype):
    a, b, c = values((9, 5), dtype, 1), values((5, 7), dtype, 2), values((9, 7), default_out(dtype), 3)
    out = c.clone()
    assert gemmery.addmm(out, a, b, alpha=2, beta=3, out=out) is out
    assert_product(out, a, b, c, 2, 3)


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize(
    ("left", "right"),
    list(itertools.product(((4,), (3, 4), (2, 3, 4), (5, 1, 3, 4)), ((4,), (4, 6), (2, 4, 6)))),
    ids=str,
)
def test_matmul_is_that_of_torch(left, right, dtype):
    a, b = values(left, dtype, 1), values(right, dtype, 2)
    torch.testing.assert_close(gemmery.matmul(a, b), torch.matmul(a, b))


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_the_others_are_those_of_torch(dtype):
    x, w, c = values((6, 3, 4), dtype, 1), values((5, 4), dtype, 2), values((5,), dtype, 3)
    torch.testing.assert_close(gemmery.linear(x, w, c), torch.nn.functional.linear(x, w, c))
    torch.testing.assert_close(gemmery.bmm(x, x.mT), torch.bmm(x, x.mT))
    torch.testing.assert_close(
        gemmery.addmm(c, x[0], w.t(), alpha=0.5, beta=-2), torch.addmm(c, x[0], w.t(), alpha=0.5, beta=-2)
    )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_are_summed_wide_and_rounded_once(dtype):
    """4096 ones and a half: a sum in the operands' own type stands still long before."""
    a, b = torch.ones(1, 4097, dtype=dtype), torch.ones(4097, 1, dtype=dtype)
    b[-1] = 0.5
    assert gemmery.matmul(a, b, out_dtype=torch.float32) == 4096.5
    assert gemmery.matmul(a, b, bias=torch.tensor([-4096.0]), out_dtype=torch.float32) == 0.5
    assert gemmery.matmul(a, b, bias=torch.tensor([-4096.0])) == 0.5


@pytest.mark.parametrize(("alpha", "beta"), [(3, 1), (3.0, 1), (1, 2.0), (2.0, 3.0), (True, -1.0)])
def test_integers_stay_integers(alpha, beta):
    """Beyond 2^24 an integer that goes through float32 is another one."""
    a, b = torch.full((1, 2000), 127, dtype=torch.int8), torch.full((2000, 1), 126, dtype=torch.int8)
    c = torch.full((1, 1), (1 << 24) + 1, dtype=torch.int32)
    a[0, 0] = 1
    result = gemmery.addmm(c, a, b, alpha=alpha, beta=beta)
    assert result.item() == int(alpha) * (1999 * 127 * 126 + 126) + int(beta) * c.item()


def test_beta_zero_does_not_read():
    a, b = values((3, 4), torch.float32, 1), values((4, 5), torch.float32, 2)
    c = torch.full((3, 5), torch.nan)
    assert_product(gemmery.addmm(c, a, b, beta=0), a, b)
    assert_product(gemmery.addmm(c, a, b, beta=0, out=c), a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_is_the_oracle(dtype):
    a, b, c = values((5, 7), dtype, 1), values((7, 3), dtype, 2), values((5, 3), default_out(dtype), 3)
    want = product(a, b, c, 2, -1)
    result = reference.gemm(a, b, c, alpha=2, beta=-1, exact=True)
    assert result.dtype == want.dtype
    torch.testing.assert_close(result, want)


def test_no_plan_for_what_is_not_launched():
    assert gemmery.plan(torch.ones(3, 4), torch.ones(4, 5)) is None


def test_gradients():
    a, b, c = (
        values(shape, torch.float64, i).requires_grad_() for i, shape in enumerate(((2, 3, 4), (4, 5), (5,)))
    )
    assert torch.autograd.gradcheck(lambda a, b, c: gemmery.matmul(a, b, bias=c), (a, b, c))


@given(st.data(), st.lists(st.integers(0, 4), min_size=2, max_size=4))
def test_places_hold_what_they_were_given(data, shape):
    """The tests' own instrument: any layout holds its values."""
    layout = data.draw(layouts(len(shape)))
    content = values(
        [1 if dim in layout.shared else size for dim, size in enumerate(shape)], torch.float32, 1
    )
    assert torch.equal(place(shape, torch.float32, layout, content).view, content.expand(shape))


@pytest.mark.parametrize("bias", [None, torch.ones(3)])
def test_autocast_does_not_round_sums(bias):
    """It is for operands: what the reference widens stays wide."""
    x, w = torch.full((2, 301), 1.001), torch.full((3, 301), 1.001)
    with torch.autocast("cpu", torch.bfloat16):
        y = gemmery.linear(x, w, bias, out_dtype=torch.float32)
    # All numbers are 1 in bfloat16, which has no 301.
    assert torch.equal(y, torch.full((2, 3), 301.0 if bias is None else 302.0))
