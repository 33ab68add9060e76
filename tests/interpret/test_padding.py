"""Copies of matrices whose layout is slow to load: they hold the same numbers, and a plan uses and names them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gemmery
from gemmery import devices
from gemmery.launch import padding
from gemmery.layout import make_problem
from gemmery.product.cache import forget
from tests.oracle import assert_product

H200 = devices.TABLE["NVIDIA H200"]


def matrix(rows, cols, transposed, pitch, step, lead=(), dtype=torch.float32):
    """A matrix with elements `step` apart in rows that are `pitch` longer than they need be."""
    outer, inner = (cols, rows) if transposed else (rows, cols)
    buffer = torch.randn(*lead, outer, inner * step + pitch).to(dtype)
    view = buffer[..., : inner * step : step]
    return view.mT if transposed else view


sizes = st.integers(1, 40)
layouts = st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 2))


@given(sizes, sizes, sizes, layouts, layouts, st.sampled_from(((), (3,))), st.booleans())
def test_copies_hold_the_same_and_can_be_described(m, n, k, left, right, lead, shared):
    a = matrix(m, k, *left, lead)
    b = matrix(k, n, *right, () if shared else lead)
    out = torch.empty(*lead, m, n)
    problem = make_problem(
        a, b, out, None, scaled=False, precision="ieee", fast_accum=False, device=H200
    )  # fmt: skip
    found = padding.padded(problem)
    if found is None:
        assert problem.a.takes_tma(problem.batch)
        assert problem.b.takes_tma(problem.batch)
        return
    assert found.problem.a.takes_tma(problem.batch)
    assert found.problem.b.takes_tma(problem.batch)
    assert found.names == tuple(
        name for name, operand in (("a", problem.a), ("b", problem.b)) if not operand.takes_tma(problem.batch)
    )
    for copy, tensor, operand in ((found.a, a, problem.a), (found.b, b, problem.b)):
        if copy is None:
            continue
        memory = copy(tensor)
        here = memory.as_strided(copy.sizes, (*copy.operand.steps, copy.operand.row, copy.operand.col))
        there = tensor.as_strided(copy.sizes, (*operand.steps, operand.row, operand.col))
        assert torch.equal(here, there)
        assert copy.bytes == 2 * 4 * there.numel()


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("lead", ((), (2,)))
def test_products_on_copies(monkeypatch, bias, lead):
    a, b = matrix(37, 45, False, 1, 1, lead), matrix(45, 29, True, 0, 2, lead)
    added = torch.randn(29) if bias else None
    monkeypatch.setattr(padding, "worth_copying", padding.padded)
    forget()
    try:
        plan = gemmery.plan(a, b, bias=added)
        assert plan.copies == ("a", "b")
        assert "a copy of a" in str(plan)
        assert "a copy of b" in str(plan)
        product = gemmery.matmul(a, b, bias=added)
        assert_product(product, a, b, added)
        out = torch.full_like(product, float("nan"))
        gemmery.matmul(a, b, bias=added, out=out)
        assert torch.equal(out, product)
    finally:
        forget()


def test_a_copy_is_made_where_it_pays():
    """Large products of odd sizes are copied, small ones and those of few rows are not."""

    def copies(m, n, k):
        a, b, out = (
            torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((m, k), (n, k), (m, n))
        )
        found = padding.worth_copying(
            make_problem(a, b.t(), out, None, scaled=False, precision="ieee", fast_accum=False, device=H200)
        )
        return () if found is None else found.names

    assert copies(4095, 4097, 4099) == ("a", "b")
    assert copies(1, 4096, 4097) == ()
    assert copies(64, 64, 65) == ()
    assert copies(4096, 4096, 4096) == ()


def test_a_pinned_config_reads_matrices_where_they_are():
    a, b = matrix(37, 45, False, 1, 1), matrix(45, 29, True, 0, 2)
    plan = gemmery.plan(a, b, config="64x64x64-g8-w4-s3-tile-pointer")
    assert plan.copies == ()
