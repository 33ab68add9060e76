"""What a product means at its edges: broadcasting, nothing to sum, nothing to write, NaN, and no copies."""

import itertools
import math

import pytest
import torch

import gemmery
from gemmery.launch import padding
from gemmery.product import compute
from gemmery.product.cache import forget
from tests.oracle import DTYPES, FLOATS, HALVES, Layout, assert_product, default_out, place, values

SHAPES = (
    (5,), (3, 5), (1, 3, 5), (2, 3, 5), (4, 1, 3, 5), (1, 2, 3, 5), (4, 2, 3, 5), (2, 1, 2, 3, 5), (1, 4, 1, 3, 5),
)  # fmt: skip


def flip(shape):
    """The shape of a right operand for a left one: (..., K, N) for (..., M, K)."""
    return (*shape[:-2], *shape[-2:][::-1])


@pytest.mark.parametrize(("left", "right"), list(itertools.product(SHAPES, map(flip, SHAPES))), ids=str)
def test_shapes_are_those_of_torch(left, right):
    a, b = values(left, torch.float64, 1), values(right, torch.float64, 2)
    try:
        want = torch.matmul(a, b)
    except RuntimeError:
        with pytest.raises(ValueError, match="batch dimensions do not broadcast") as caught:
            gemmery.matmul(a, b)
        assert str(left) in str(caught.value)
        assert str(right) in str(caught.value)
        return
    result = gemmery.matmul(a, b)
    assert result.shape == want.shape
    assert_product(result, a, b)


@pytest.mark.parametrize("right", ((5,), (5, 3), (2, 5, 3)), ids=str)
@pytest.mark.parametrize("left", ((5,), (3, 5), (2, 3, 5)), ids=str)
def test_bias_and_out_of_any_rank(left, right):
    a, b = values(left, torch.float32, 1), values(right, torch.float32, 2)
    shape = torch.matmul(a, b).shape
    for i in range(len(shape) + 1):
        bias = values(shape[i:], torch.float32, 3)
        out = torch.full(shape, math.nan)
        result = gemmery.matmul(a, b, bias=bias, out=out)
        assert result is out
        assert_product(result, a, b, bias)


# ---------------------------------------------------------------------------------------------------------------------
# No copies


@pytest.fixture
def no_copies(monkeypatch):
    """Whatever would copy an operand fails."""

    def refuse(*args, **kwargs):
        raise AssertionError("an operand was copied")

    for name in ("contiguous", "clone", "reshape", "repeat", "copy_", "to"):
        monkeypatch.setattr(torch.Tensor, name, refuse)


BROADCAST = [
    ((3, 1, 8, 16), (1, 4, 16, 8)),
    ((1, 4, 8, 16), (3, 1, 16, 8)),
    ((3, 4, 8, 16), (4, 16, 8)),
    ((3, 1, 8, 16), (3, 4, 16, 8)),
    ((8, 16), (3, 16, 8)),
]


@pytest.mark.parametrize(("left", "right"), BROADCAST, ids=str)
def test_broadcast_batches_are_steps_of_zero(left, right, no_copies):
    a, b = torch.ones(left), torch.ones(right)
    problem = gemmery.plan(a, b).problem
    assert 0 in problem.a.steps + problem.b.steps
    result = gemmery.matmul(a, b)
    assert result.shape == (*torch.broadcast_shapes(left[:-2], right[:-2]), 8, 8)
    assert (result == 16).all()


STRANGE = {
    "columns": lambda: torch.ones(64, 48).t(),
    "steps": lambda: torch.ones(96, 200)[::2, ::3][:, :64],
    "one row": lambda: torch.ones(64).expand(48, 64),
    "misaligned": lambda: torch.ones(48 * 64 + 1)[1:].view(48, 64),
    "heads": lambda: torch.ones(48, 4, 64).transpose(0, 1),
}


@pytest.fixture
def read_where_they_are(monkeypatch):
    """No copies of matrices that are slow to read: see `padding`, and test_padding for those."""
    monkeypatch.setattr(padding, "worth_copying", lambda problem: None)
    forget()
    yield
    forget()


@pytest.mark.parametrize("name", STRANGE)
def test_no_layout_has_to_be_copied(name, no_copies, read_where_they_are, monkeypatch):
    a = STRANGE[name]()
    b = torch.ones(40, 64).t()
    bias = torch.ones(80)[::2]
    out = torch.empty(*a.shape[:-2], 40, 48).mT
    made = []
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *args, **kwargs: made.append(empty(*args, **kwargs)) or made[-1]
    )
    assert gemmery.matmul(a, b, bias=bias, out=out) is out
    assert made == []
    fresh = gemmery.matmul(a, b, bias=bias)
    assert made[-1] is fresh
    assert {tensor.shape for tensor in made} == {fresh.shape}
    assert torch.equal(fresh, out)
    assert (fresh == 65).all()


def test_leading_dimensions_of_a_linear_layer_are_rows():
    x, weight = torch.ones(6, 5, 4, 32), torch.ones(16, 32)
    problem = gemmery.plan(x, weight.t()).problem
    assert (problem.M, problem.batch) == (120, ())


# ---------------------------------------------------------------------------------------------------------------------
# Nothing to sum, nothing to write


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_empty_sum_is_zero(dtype):
    a, b = torch.empty(3, 0).to(dtype), torch.empty(0, 5).to(dtype)
    c = values((3, 5), default_out(dtype), 1)
    out = place((3, 5), default_out(dtype), Layout((1, 0), (1, 2)))
    assert torch.equal(gemmery.matmul(a, b), torch.zeros(3, 5, dtype=default_out(dtype)))
    assert not gemmery.matmul(a, b, out=out.view).any()
    out.assert_outside_unchanged()
    assert torch.equal(gemmery.matmul(a, b, bias=c[0]), c[:1].expand(3, 5))
    assert_product(gemmery.addmm(c, a, b, alpha=5, beta=-2), a, b, c, 5, -2)
    assert not gemmery.addmm(c, a, b, beta=0).any()
    assert gemmery.matmul(a[0], b[:, 0]) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("left", "right"),
    [((0, 4), (4, 5)), ((3, 4), (4, 0)), ((0, 4), (4, 0)), ((0, 0), (0, 0)), ((0, 3, 4), (4, 5)), ((2, 0, 4), (2, 4, 5)),
     ((1, 3, 4), (0, 4, 5)), ((0, 4), (4,)), ((4,), (4, 0))],
    ids=str,
)  # fmt: skip
def test_nothing_to_write(left, right, dtype):
    a, b = torch.empty(left).to(dtype), torch.empty(right).to(dtype)
    want = torch.matmul(torch.empty(left), torch.empty(right)).shape
    result = gemmery.matmul(a, b, bias=torch.zeros((), dtype=default_out(dtype)))
    assert (result.shape, result.dtype) == (want, default_out(dtype))
    assert gemmery.plan(a, b) is None
    out = torch.empty(want, dtype=default_out(dtype))
    assert gemmery.matmul(a, b, out=out) is out


# ---------------------------------------------------------------------------------------------------------------------
# Factors


@pytest.mark.parametrize("alpha", (1, 2))
@pytest.mark.parametrize("shape", ((20, 24), (24,), (20, 1)), ids=str)
def test_beta_zero_does_not_read(shape, alpha):
    a, b = values((20, 30), torch.float32, 1), values((30, 24), torch.float32, 2)
    c = torch.full(shape, math.nan)
    assert_product(gemmery.addmm(c, a, b, alpha=alpha, beta=0), a, b, None, alpha)
    out = torch.full((20, 24), math.nan)
    assert_product(gemmery.addmm(out, a, b, alpha=alpha, beta=0.0, out=out), a, b, None, alpha)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_alpha_zero_still_multiplies():
    """As arithmetic says, and unlike beta: 0 times infinity is NaN."""
    a, b = torch.ones(2, 3), torch.ones(3, 2)
    a[0, 0] = math.inf
    result = gemmery.addmm(torch.ones(2, 2), a, b, alpha=0)
    assert result[0].isnan().all()
    assert torch.equal(result[1], torch.ones(2))


def test_factors_of_one_plan_vary():
    """Plans are shared between factors; the numbers are not."""
    a, b, c = (values((20, 20), torch.float32, i) for i in range(3))
    for alpha, beta in ((2, 3), (2.5, 3), (-1, 0.5), (1, 1), (1, 3), (2, 1), (2, 0), (1, 0), (0, 1)):
        for addend in (c, c[0], c[:, :1]):
            assert_product(gemmery.addmm(addend, a, b, alpha=alpha, beta=beta), a, b, addend, alpha, beta)


@pytest.mark.parametrize("name", ("alpha", "beta"))
def test_integers_refuse_fractions_also_after_a_call_that_was_right(name):
    """The second call has the first one's layout, and must not take its word for the factor."""
    a, b = values((11, 13), torch.int8, 1), values((13, 17), torch.int8, 2)
    c = torch.zeros(11, 17, dtype=torch.int32)
    gemmery.addmm(c, a, b, **{name: 2})
    for fraction in (2.5, math.nan, math.inf):
        with pytest.raises(TypeError, match=rf"addmm: {name} is {fraction}"):
            gemmery.addmm(c, a, b, **{name: fraction})


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
@pytest.mark.parametrize("factor", (math.inf, -math.inf, math.nan, 1e38, 1e-40, 1e-50))
@pytest.mark.parametrize("name", ("alpha", "beta"))
def test_factors_at_the_ends_of_float32(name, factor):
    """What float32 makes of them, as in torch: infinite, subnormal, zero."""
    a, b, c = torch.ones(3, 4), torch.ones(4, 5), torch.ones(3, 5)
    want = torch.addmm(c, a, b, **{name: factor})
    torch.testing.assert_close(
        gemmery.addmm(c, a, b, **{name: factor}), want, equal_nan=True, rtol=0, atol=1e-45
    )


@pytest.mark.parametrize("name", ("alpha", "beta"))
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=str)
def test_factors_beyond_float32_are_refused(name, dtype):
    """As torch does, and under a name."""
    a = torch.ones(4, 4, dtype=dtype)
    with pytest.raises(ValueError, match=rf"addmm: {name} is 1e\+39"):
        gemmery.addmm(a, a, a, **{name: 1e39})


def test_bool_and_integral_floats_are_integers():
    a, b = values((4, 5), torch.int8, 1), values((5, 3), torch.int8, 2)
    c = values((4, 3), torch.int32, 3) // 1000
    assert_product(gemmery.addmm(c, a, b, alpha=2.0, beta=True), a, b, c, 2, 1)


# ---------------------------------------------------------------------------------------------------------------------
# NaN and infinity


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # what numpy says of it
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_and_infinity_go_where_torch_lets_them_go(dtype):
    a, b = values((70, 40), dtype, 1).double(), values((40, 66), dtype, 2).double()
    a[3, 5] = math.nan
    b[7, 60] = math.nan
    if dtype != torch.float8_e4m3fn:  # which has no infinity
        a[65, 39] = math.inf
        a[20, 1], b[1, 2] = -math.inf, 0  # their product is NaN
    want = torch.matmul(a, b)
    for config in (None, "32x32x32-g3-w4-s3-persistent-pointer/2-t2"):
        result = gemmery.matmul(a.to(dtype), b.to(dtype), config=config).double()
        assert torch.equal(result.isnan(), want.isnan())
        assert torch.equal(result.isinf(), want.isinf())
        assert torch.equal(result[result.isinf()], want[want.isinf()])
    assert want.isnan().any(0).sum() == 66


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_sum_that_does_not_fit_is_infinite(dtype):
    largest = torch.finfo(dtype).max
    a = torch.tensor([[largest], [-largest], [1.0]], dtype=dtype)
    b = torch.tensor([[1.0, 2.0]], dtype=dtype)
    want = torch.tensor([[largest, math.inf], [-largest, -math.inf], [1, 2]], dtype=dtype)
    assert torch.equal(gemmery.matmul(a, b), want)


def test_nan_survives_the_cast_to_bfloat16():
    """All bits of a NaN set: rounding them up would carry into the sign and give zero."""
    a = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32).unsqueeze(1)
    result = gemmery.matmul(a, torch.ones(1, 2), out_dtype=torch.bfloat16)
    assert result.isnan().all()


# ---------------------------------------------------------------------------------------------------------------------
# Memory that is shared


@pytest.mark.parametrize(
    "variant", ("tile-pointer/2", "tile-descriptor", "persistent-pointer", "persistent-descriptor/2-t2")
)
@pytest.mark.parametrize("shape", ((1, 1), (17, 40), (40, 100)), ids=str)
@pytest.mark.parametrize(("alpha", "beta"), ((1, 1), (2, -0.5)))
def test_out_may_be_the_input(shape, variant, alpha, beta):
    m, n = shape
    rows = Layout((1, 0), (1, 1), rounded=True)
    a, b, c = (values(size, torch.float32, i) for i, size in enumerate(((m, 7), (7, n), (m, n))))
    a, b = (place(x.shape, torch.float32, rows, x).view for x in (a, b))
    for layout in (rows, Layout((0, 1), (2, 1), 3)):
        placed = place((m, n), torch.float32, layout, c)
        config = f"16x32x16-g2-w4-s2-{variant}"
        gemmery.addmm(placed.view, a, b, alpha=alpha, beta=beta, out=placed.view, config=config)
        placed.assert_outside_unchanged()
        assert_product(placed.view, a, b, c, alpha, beta)


def test_operands_may_share_memory_with_one_another():
    a = values((50, 50), torch.float32, 1)
    assert_product(gemmery.addmm(a, a, a.t(), beta=2), a, a.t(), a, 1, 2)


def test_conjugate_views_are_resolved():
    """The imaginary part of a conjugate is negated when it is read, not in memory."""
    numbers = torch.complex(values((20, 20), torch.float32, 1), values((20, 20), torch.float32, 2))
    x, y = numbers.conj().imag, values((20, 20), torch.float32, 3)
    assert x.is_neg()
    copied = x.clone()
    assert not copied.is_neg()
    assert_product(gemmery.matmul(x, y), copied, y)
    assert_product(gemmery.matmul(y, x.t()), y, copied.t())
    assert_product(gemmery.matmul(y, y, bias=x), y, y, copied)


# ---------------------------------------------------------------------------------------------------------------------
# Cached plans


def test_a_cached_call_is_not_prepared_again(monkeypatch):
    a, b = values((9, 21), torch.float16, 1), values((21, 10), torch.float16, 2)
    first = gemmery.matmul(a, b)
    monkeypatch.setattr(compute, "prepare", None)
    assert torch.equal(gemmery.matmul(a.clone(), b.clone()), first)


def test_layouts_of_one_shape_have_plans_of_their_own():
    """Same shapes and types, other strides and addresses, in turn."""
    kinds = [
        Layout((1, 0), (1, 1), rounded=True), Layout((0, 1), (1, 1), rounded=True), Layout((1, 0), (2, 1)),
        Layout((1, 0), (1, 1), 1), Layout((1, 0), (1, 1), shared=frozenset({0})),
    ]  # fmt: skip
    for left, right in itertools.product(kinds, kinds):
        a = place((33, 33), torch.float16, left, values((33, 33), torch.float16, 1)).view
        b = place((33, 33), torch.float16, right, values((33, 33), torch.float16, 2)).view
        assert_product(gemmery.matmul(a, b), a, b)
