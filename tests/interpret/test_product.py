"""The products through the interpreter, over shapes, layouts, types, factors and batches, with canaries around the output."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gemmery
from tests.oracle import (
    DTYPES,
    FP8,
    HALVES,
    Layout,
    assert_product,
    default_out,
    layouts,
    operand,
    output,
    place,
    sizes,
    values,
)  # fmt: skip

dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**32 - 1)
FACTORS = (0, 1, -1, 2, 0.1, -0.75)


def other_type(draw, dtype):
    """The second operand's type: the first's, or for fp8 either of the two."""
    return draw(st.sampled_from(FP8)) if dtype in FP8 else dtype


def out_type(draw, dtype):
    """A type for the result, None for the default, and what that comes to."""
    choices = {torch.float64: (None, torch.float32), torch.int8: (None, torch.int32)}
    others = (None, torch.float32, torch.float16, torch.bfloat16)
    asked = draw(st.sampled_from(choices.get(dtype, others)))
    return asked, asked or default_out(dtype)


def addend_type(draw, dtype):
    """A type that may be added to a product of `dtype`."""
    if dtype == torch.int8:
        return draw(st.sampled_from((torch.int8, torch.int32)))
    return draw(st.sampled_from((*HALVES, torch.float32, torch.float64)))


def factor(draw, dtype):
    return draw(st.integers(-3, 3)) if dtype == torch.int8 else draw(st.sampled_from(FACTORS))


def call(draw, function, shape, dtype, *args, **kwargs):
    """Call with or without `out`, in a layout of its own; checks all memory around it."""
    placed = output(draw, shape, dtype)
    if placed is None:
        return function(*args, **kwargs)
    result = function(*args, out=placed.view, **kwargs)
    assert result is placed.view
    placed.assert_outside_unchanged()
    return result


@given(st.data(), dtypes, sizes(), sizes(), sizes(), seeds)
def test_matmul_of_matrices(data, dtype, m, n, k, seed):
    a = operand(data.draw, (m, k), dtype, seed)
    b = operand(data.draw, (k, n), other_type(data.draw, dtype), seed + 1)
    bias = None
    if data.draw(st.booleans()):
        shape = data.draw(st.sampled_from(((n,), (1, n), (m, 1), (m, n), (1,), ())))
        bias = operand(data.draw, shape, addend_type(data.draw, dtype), seed + 2)
    asked, given_type = out_type(data.draw, dtype)
    result = call(data.draw, gemmery.matmul, (m, n), given_type, a, b, bias=bias, out_dtype=asked)
    assert_product(result, a, b, bias, dtype=given_type)


@given(st.data(), dtypes, sizes(100), sizes(100), sizes(100), seeds)
def test_matmul_of_batches(data, dtype, m, n, k, seed):
    batch = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    # Each operand has a tail of the batch dimensions, with ones where the other decides.
    shapes = []
    for rows, cols in ((m, k), (k, n)):
        own = [data.draw(st.sampled_from((size, 1))) for size in batch]
        shapes.append((*own[data.draw(st.integers(0, len(own))) :], rows, cols))
    a = operand(data.draw, shapes[0], dtype, seed)
    b = operand(data.draw, shapes[1], other_type(data.draw, dtype), seed + 1)
    shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), m, n)
    bias = None
    if data.draw(st.booleans()):
        own = tuple(data.draw(st.sampled_from((size, 1))) for size in shape)
        bias = operand(
            data.draw, own[data.draw(st.integers(0, len(own))) :], addend_type(data.draw, dtype), seed + 2
        )
    result = call(data.draw, gemmery.matmul, shape, default_out(dtype), a, b, bias=bias)
    assert_product(result, a, b, bias)


@given(st.data(), dtypes, st.lists(st.integers(0, 5), max_size=3), sizes(), sizes(), seeds)
def test_linear(data, dtype, lead, n, k, seed):
    x = operand(data.draw, (*lead, k), dtype, seed)
    weight = operand(data.draw, (n, k), other_type(data.draw, dtype), seed + 1)
    bias = (
        operand(data.draw, (n,), addend_type(data.draw, dtype), seed + 2)
        if data.draw(st.booleans())
        else None
    )
    asked, given_type = out_type(data.draw, dtype)
    result = call(data.draw, gemmery.linear, (*lead, n), given_type, x, weight, bias, out_dtype=asked)
    assert_product(result, x, weight.t(), bias, dtype=given_type)


@pytest.mark.slow
@given(st.data(), dtypes, sizes(), sizes(), sizes(), seeds)
def test_addmm(data, dtype, m, n, k, seed):
    a = operand(data.draw, (m, k), dtype, seed)
    b = operand(data.draw, (k, n), other_type(data.draw, dtype), seed + 1)
    alpha, beta = factor(data.draw, dtype), factor(data.draw, dtype)
    asked, given_type = out_type(data.draw, dtype)
    shape = data.draw(st.sampled_from(((m, n), (m, n), (n,), (m, 1), (1, n), ())))
    c = operand(data.draw, shape, addend_type(data.draw, dtype), seed + 2)
    result = call(
        data.draw, gemmery.addmm, (m, n), given_type, c, a, b, alpha=alpha, beta=beta, out_dtype=asked
    )
    assert_product(result, a, b, c, alpha, beta, dtype=given_type)


@pytest.mark.slow
@given(st.data(), dtypes, sizes(), sizes(), sizes(), seeds)
def test_addmm_in_place(data, dtype, m, n, k, seed):
    a = operand(data.draw, (m, k), dtype, seed)
    b = operand(data.draw, (k, n), other_type(data.draw, dtype), seed + 1)
    alpha, beta = factor(data.draw, dtype), factor(data.draw, dtype)
    given_type = default_out(dtype)
    c = values((m, n), given_type, seed + 2)
    placed = place((m, n), given_type, data.draw(layouts(2, shared=False)), c)
    result = gemmery.addmm(placed.view, a, b, alpha=alpha, beta=beta, out=placed.view)
    assert result is placed.view
    placed.assert_outside_unchanged()
    assert_product(result, a, b, c, alpha, beta)


@given(st.data(), dtypes, st.integers(0, 5), sizes(100), sizes(100), sizes(100), seeds)
def test_bmm(data, dtype, count, m, n, k, seed):
    a = operand(data.draw, (count, m, k), dtype, seed)
    b = operand(data.draw, (count, k, n), other_type(data.draw, dtype), seed + 1)
    result = call(data.draw, gemmery.bmm, (count, m, n), default_out(dtype), a, b)
    assert_product(result, a, b)


# ---------------------------------------------------------------------------------------------------------------------
# The same by name: what a reader looks for first


VIEWS = {
    "row-major": lambda x: x(90, 70),
    "column-major": lambda x: x(70, 90).t(),
    "every second row": lambda x: x(180, 70)[::2],
    "every third column": lambda x: x(90, 210)[:, 1::3],
    "steps both ways": lambda x: x(180, 212)[::2, 2::3],
    "steps, transposed": lambda x: x(212, 180)[2::3, ::2].t(),
    "a slice inside": lambda x: x(100, 100)[5:95, 7:77],
    "one row for all": lambda x: x(1, 70).expand(90, 70),
    "one column for all": lambda x: x(90, 1).expand(90, 70),
    "one number for all": lambda x: x(1, 1).expand(90, 70),
    "off by one element": lambda x: x(90 * 70 + 1)[1:].view(90, 70),
    "rows that overlap": lambda x: x(200).as_strided((90, 70), (1, 1)),
    "a diagonal's rows": lambda x: x(90, 90, 70).diagonal(dim1=0, dim2=1).t(),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", (torch.float16, torch.int8), ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_views(name, dtype):
    a = VIEWS[name](lambda *shape: values(shape, dtype, 1))
    b = VIEWS[name](lambda *shape: values(shape, dtype, 2))
    assert a.shape == b.shape == (90, 70)
    assert_product(gemmery.matmul(a, b.t()), a, b.t())
    assert_product(gemmery.matmul(a.t(), b), a.t(), b)


@pytest.mark.parametrize("order", ((0, 1, 2, 3), (1, 0, 2, 3), (2, 0, 1, 3), (3, 2, 1, 0), (0, 3, 1, 2)))
def test_permuted_batches(order):
    """A batch whose dimensions are not where they were made: heads beside positions, as in attention."""
    shape = (2, 3, 40, 24)
    stored = tuple(shape[dim] for dim in order)
    back = tuple(order.index(dim) for dim in range(4))
    a = values(stored, torch.float32, 1).permute(back)
    b = values(stored, torch.float32, 2).permute(back).mT
    assert a.shape == shape
    assert_product(gemmery.matmul(a, b), a, b)


@pytest.mark.parametrize("precision", ("ieee", "tf32", "tf32x3"))
def test_precision_of_float32(precision):
    """The interpreter multiplies in float32 whatever is asked; what is asked has to arrive, and to be right."""
    a, b = values((70, 90), torch.float32, 1), values((90, 50), torch.float32, 2)
    assert_product(gemmery.matmul(a, b, precision=precision), a, b)
    plan = gemmery.plan(a, b, precision=precision)
    assert plan.problem.precision == precision


def test_float64_factors_keep_all_their_bits():
    """Triton passes a Python float as float32; 0.1 must not lose 29 bits on the way."""
    a, b, c = (values(shape, torch.float64, i) for i, shape in enumerate(((20, 30), (30, 10), (20, 10))))
    assert_product(gemmery.addmm(c, a, b, alpha=0.1, beta=1 / 3), a, b, c, 0.1, 1 / 3)


def test_int32_sums_are_exact_beyond_24_bits():
    a = torch.full((3, 2000), 127, dtype=torch.int8)
    b = torch.full((2000, 5), -127, dtype=torch.int8)
    c = torch.full((3, 5), (1 << 24) + 1, dtype=torch.int32)
    for alpha, beta in ((1, 1), (3, 2), (3.0, 2.0), (-1, -5)):
        assert_product(gemmery.addmm(c, a, b, alpha=alpha, beta=beta), a, b, c, int(alpha), int(beta))


def test_rounding_is_to_nearest_even_once():
    """Ties between neighbours of the output's type, which truncation, double rounding and rounding up each get wrong."""
    for dtype in HALVES:
        ulp = 2 * torch.finfo(dtype).eps / 2
        # 1 + j ulp / 2 + a nudge below float32's sight of a half: sums of three exact products.
        ones = torch.ones(1, 3)
        columns = [[1.0, j * ulp / 2, nudge] for j in range(9) for nudge in (-(2.0**-20), 0.0, 2.0**-20)]
        b = torch.tensor(columns).t().contiguous()
        want = (ones.double() @ b.double()).to(dtype)
        assert torch.equal(gemmery.matmul(ones, b, out_dtype=dtype), want)


def test_offsets_beyond_31_bits():
    """Rows 2^30 elements apart, in memory of which all but a few pages is never touched."""
    step = 1 << 30
    memory = torch.empty(3 * step, dtype=torch.int8)
    a, b = memory.as_strided((3, 40), (step, 1)), memory.as_strided((40, 3), (1, step), 64)
    a.copy_(values(a.shape, torch.int8, 1))
    b.copy_(values(b.shape, torch.int8, 2))
    for config in (None, "16x16x32-g1-w4-s2-tile-pointer"):
        assert_product(gemmery.matmul(a, b, config=config), a, b)
    out = torch.empty(2 * step + 64, dtype=torch.float16).as_strided((3, 3), (step, 1))
    x, y = values((3, 40), torch.float16, 1), values((40, 3), torch.float16, 2)
    assert_product(gemmery.matmul(x, y, out=out), x, y)


def test_canaries_see_a_write_outside():
    """The tests' own instruments: a layout holds its values, and one stray write is seen."""
    layout = Layout((0, 1), (2, 3), 1)
    placed = place((5, 7), torch.float32, layout, values((5, 7), torch.float32))
    assert torch.equal(placed.view, values((5, 7), torch.float32))
    placed.view.zero_()
    placed.assert_outside_unchanged()
    placed.buffer[placed.view.storage_offset() + 1] = 0
    with pytest.raises(AssertionError, match="1 elements outside"):
        placed.assert_outside_unchanged()
