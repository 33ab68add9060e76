"""Quantising and products of quantised factors by their kernels: against the reference and float64."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import gemmery
from gemmery import activations, epilogues
from gemmery.activations import FORMATS, reference
from gemmery.product import cache
from tests.interpret.test_quick import entered  # noqa: F401  (a fixture)

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
NAN, INFINITY = float("nan"), float("inf")

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    # What differs between versions of Triton is tested with the epilogues and the kernels of products.
    pytest.mark.slow,
]


def values(shape, dtype=F32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same(got, want):
    """The same numbers and scales, bit for bit; of NaN there are many."""
    assert got.kind == want.kind
    assert got.data.is_contiguous()
    assert got.scale.is_contiguous()
    for x, y in ((got.data, want.data), (got.scale, want.scale)):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        missing = y.float().isnan()
        assert torch.equal(x.float().isnan(), missing)
        bits = torch.uint8 if x.dtype.itemsize == 1 else torch.int32
        assert torch.equal(x.view(bits)[~missing], y.contiguous().view(bits)[~missing])


# ---------------------------------------------------------------------------------------------------------------------
# Quantising

SHAPES = {
    "one": lambda t: values((1, 1), t),
    "odd": lambda t: values((3, 5), t),
    "blocks": lambda t: values((40, 128), t),
    "parts of blocks": lambda t: values((2, 3, 300), t),
    "many rows": lambda t: values((700, 3), t),
    "columns": lambda t: values((300, 70), t).t(),
    "batch of columns": lambda t: values((2, 200, 33), t).mT,
    "slices": lambda t: values((4, 3, 9, 300), t)[:, ::2, 1::3, 1:280:2],
    "broadcast": lambda t: values((4, 1, 60), t).expand(4, 5, 60),
    "one column": lambda t: values((50, 7), t)[:, 3:4],
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float16, BF16, F32], ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("per", ["token", "block", "tensor"])
@pytest.mark.parametrize("shape", SHAPES)
def test_quantising(shape, per, format, dtype):
    x = SHAPES[shape](dtype)
    assert_same(gemmery.quantize_activations(x, format, per=per), reference(x, format, per=per))
    if per != "block":
        amax = x.float().abs().amax(-1) * 0.9
        got = gemmery.quantize_activations(x, format, per=per, amax=amax)
        assert_same(got, reference(x, format, per=per, amax=amax))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float16, BF16, F32], ids=str)
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_quantising_to_mx(shape, format, dtype):
    x = SHAPES[shape](dtype)
    assert_same(gemmery.quantize_activations(x, format, per="mx"), reference(x, format, per="mx"))


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_all_exponents(format):
    """From the smallest subnormals on, and what is not finite."""
    x = values((300, 64)) * 2.0 ** torch.arange(-150, 150)[:, None].double()
    x = x.float()
    x[7], x[8, 3], x[9, 40] = 0, NAN, -INFINITY
    assert x[-1].isinf().any()
    assert_same(gemmery.quantize_activations(x, format, per="mx"), reference(x, format, per="mx"))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("per", ["token", "block", "tensor"])
def test_values_that_are_not_common(format, per):
    x = values((8, 300))
    x[0], x[1, 128:256] = 0, 0
    x[2, 7], x[3, 200], x[4, 0] = NAN, INFINITY, -INFINITY
    x[5] *= 1e-42
    x[6, 3], x[7] = 1e30, 3e38 * x[7].sign()
    for rows in (x, x[:2], x[5:]):
        assert_same(gemmery.quantize_activations(rows, format, per=per), reference(rows, format, per=per))


@pytest.mark.parametrize("per", ["token", "block", "tensor"])
@pytest.mark.parametrize("turned", [False, True])
def test_long_rows(per, turned, monkeypatch):
    """Rows that no program holds as a whole, with their largest element anywhere."""
    monkeypatch.setattr(activations, "_WHOLE", 512)
    monkeypatch.setattr(activations, "_PART", 256)
    for length in (512, 513, 768, 1300):
        for at in (0, length // 2, length - 1):
            x = values((length, 3)).t() if turned else values((3, length))
            x[1, at] = -100
            x[2, at] = NAN
            assert_same(gemmery.quantize_activations(x, per=per), reference(x, per=per))
    x = values((2, activations._WHOLE + 1))
    assert_same(gemmery.quantize_activations(x), reference(x))


@pytest.mark.parametrize("turned", [False, True])
def test_more_blocks_than_programs_that_look_for_the_largest(turned, monkeypatch):
    monkeypatch.setattr(activations, "_FINDERS", 3)
    monkeypatch.setattr(activations, "_TILE", 1024)
    x = values((30, 1000)) if not turned else values((1000, 30)).t()
    for row in (0, 20, 29):
        x[row, 999] = 10 + row
        assert_same(gemmery.quantize_activations(x, per="tensor"), reference(x, per="tensor"))


@pytest.mark.parametrize("per", ["token", "block", "tensor"])
def test_nothing_beside_x_is_read_or_written(per):
    """What lies around x is NaN."""
    whole = torch.full((7, 400), NAN)
    whole[1:6, 50:350] = values((5, 300))
    x = whole[1:6, 50:350]
    assert_same(gemmery.quantize_activations(x, per=per), reference(x.clone(), per=per))


@pytest.mark.parametrize("per", ["token", "block", "tensor"])
def test_strides_that_pass_32_bits(per):
    x = torch.empty_strided(
        (3, 150), (1, 1 << 23), dtype=torch.float16
    )  # of which few pages are ever touched
    x.copy_(values((3, 150)))
    assert activations._walk(x, None).constants["WIDE"]
    assert not activations._walk(x.contiguous(), None).constants["WIDE"]
    assert_same(gemmery.quantize_activations(x, per=per), reference(x.contiguous(), per=per))


def test_a_product_leaves_what_quantising_needs():
    x, w = values((6, 40), BF16), values((20, 40), BF16, 1)
    y, amax = gemmery.linear(x, w, epilogue=epilogues.with_row_amax)
    for per in ("token", "tensor"):
        q = gemmery.quantize_activations(y, per=per, amax=amax)
        assert_same(q, reference(y, per=per, amax=amax))
        assert ((q.dequantize() - y.float()).norm() / y.float().norm()) < 0.04
    scale = torch.tensor(0.25)
    static = gemmery.ScaledTensor(gemmery.linear(x, w, epilogue=epilogues.static_fp8, args=(scale,)), scale)
    assert ((static.dequantize() - y.float()).norm() / y.float().norm()) < 0.04


# ---------------------------------------------------------------------------------------------------------------------
# Products


def near(y, want, dtype=BF16):
    assert y.dtype == dtype
    assert y.shape == want.shape
    assert ((y.double() - want).norm() / want.norm()).item() < {BF16: 4e-3, F32: 1e-6}[dtype]


@gemmery.epilogue
def gelu_and_add(acc, r):
    return F.gelu(acc) + r


PRODUCTS = [(1, 1, 16), (1, 2, 40), (2, 1, 130), (3, 2, 17), (5, 7, 33), (1, 64, 64), (40, 70, 96)]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("per_a", ["token", "tensor"])
@pytest.mark.parametrize("per_b", ["token", "tensor"])
@pytest.mark.parametrize(("m", "n", "k"), PRODUCTS)
def test_products(format, per_a, per_b, m, n, k):
    a = gemmery.quantize_activations(values((m, k)), format, per=per_a)
    b = gemmery.quantize_activations(values((n, k), seed=1), format, per=per_b)
    want = a.dequantize(F64) @ b.dequantize(F64).T
    near(gemmery.scaled_matmul(a, b), want)
    near(gemmery.scaled_matmul(a, b, fast_accum=True, out_dtype=F32), want, F32)
    bias, r = values((n,), seed=2), values((m, n), seed=3)
    near(gemmery.scaled_matmul(a, b, bias=bias), want + bias)
    y = gemmery.scaled_matmul(a, b, bias=bias, epilogue=gelu_and_add, args=(r,), out_dtype=F32)
    near(y, F.gelu(want + bias) + r, F32)
    out = torch.empty(n, m, dtype=F32).t()
    gemmery.scaled_matmul(a, b, bias=values((m, 1), seed=4), out=out)
    near(out, want + values((m, 1), seed=4), F32)


@pytest.mark.parametrize("format", FORMATS)
def test_layouts(format):
    """Numbers and scales of any strides, in batches that fold into rows and batches that don't."""
    a = gemmery.quantize_activations(values((2, 3, 5, 48)), format)
    b = gemmery.quantize_activations(values((20, 48), seed=1), format)

    def turned(x):
        return gemmery.ScaledTensor(x.data.mT.contiguous().mT, x.scale.repeat_interleave(2, -2)[..., ::2, :])

    def every_other(x):
        return gemmery.ScaledTensor(x.data[..., 1::2, ::3], x.scale[..., 1::2, :])

    for left in (a, turned(a), every_other(a)):
        for right in (b, turned(b), every_other(b)):
            if left.shape[-1] != right.shape[-1]:
                continue
            want = left.dequantize(F64) @ right.dequantize(F64).T
            near(gemmery.scaled_matmul(left, right), want)
            bias = values(want.shape[1:])
            near(gemmery.scaled_matmul(left, right, bias=bias), want + bias)


def test_types_of_results():
    for format in FORMATS:
        a = gemmery.quantize_activations(values((3, 40)), format)
        b = gemmery.quantize_activations(values((4, 40)), format)
        kept = lambda acc: (acc, acc.to(torch.float16), acc.sum(-1), acc > 0)  # noqa: E731
        types = lambda **how: [y.dtype for y in gemmery.scaled_matmul(a, b, epilogue=kept, **how)]  # noqa: B023, E731
        assert types() == [BF16, torch.float16, F32, torch.bool]
        assert types(out_dtype=(F32, None, None, None)) == [F32, torch.float16, F32, torch.bool]
        assert types(out_dtype=(None, F32, None, None)) == [BF16, F32, F32, torch.bool]


def test_gates_and_rows_used_again():
    a = gemmery.quantize_activations(values((9, 40)), "int8")
    b = gemmery.quantize_activations(values((32, 40), seed=1), "int8")
    want = a.dequantize(F64) @ b.dequantize(F64).T
    near(gemmery.scaled_matmul(a, b, epilogue=epilogues.swiglu), epilogues.swiglu(want))
    near(gemmery.scaled_matmul(a, b, epilogue=lambda acc: acc.softmax(-1)), want.softmax(-1))


def test_batch_invariant():
    a = gemmery.quantize_activations(values((40, 64)))
    b = gemmery.quantize_activations(values((24, 64), seed=1))
    whole = gemmery.scaled_matmul(a, b, batch_invariant=True)
    one = gemmery.ScaledTensor(a.data[7:8], a.scale[7:8])
    assert torch.equal(gemmery.scaled_matmul(one, b, batch_invariant=True), whole[7:8])


def test_second_calls_go_the_short_way(entered):  # noqa: F811
    a = gemmery.quantize_activations(values((12, 16)))
    b = gemmery.quantize_activations(values((20, 16), seed=1))
    want = a.dequantize(F64) @ b.dequantize(F64).T
    bias, r = values((20,)), values((12, 20))
    calls = (
        lambda: near(gemmery.scaled_matmul(a, b), want),
        lambda: near(gemmery.scaled_matmul(a, b, bias=bias), want + bias),
        lambda: near(gemmery.scaled_matmul(a, b, epilogue=gelu_and_add, args=(r,)), F.gelu(want) + r),
    )
    for call in calls:
        before = len(entered)
        call()
        assert len(entered) == before
        call()
        assert len(entered) == before + 1
    assert len(cache._known) == len(calls)


def test_blocks_of_no_columns():
    a, b = (gemmery.quantize_activations(torch.empty(n, 0), "int8", per="block") for n in (4, 8))
    assert torch.equal(gemmery.scaled_matmul(a, b), torch.zeros(4, 8, dtype=BF16))


def with_blocks(rows, k, kind, format, batch=()):
    """Random numbers, with a scale for each block of `kind`."""
    data = gemmery.quantize_activations(values((*batch, rows, k)), format).data
    down = {"1x128": rows, "128x128": -(-rows // 128), "row": rows}[kind]
    return gemmery.ScaledTensor(
        data, values((*batch, down, 1 if kind == "row" else -(-k // 128)), seed=7).abs() + 0.5
    )


def check_product(a, b, config):
    """The product of two scaled factors by one config: bare, with an epilogue that takes tensors, and with pairs."""
    m, n = a.data.shape[0], b.data.shape[0]
    want = a.dequantize(F64) @ b.dequantize(F64).T
    near(gemmery.scaled_matmul(a, b, config=config), want)
    bias, r = values((n,), seed=2), values((m, n), seed=3)
    y = gemmery.scaled_matmul(a, b, bias=bias, epilogue=gelu_and_add, args=(r,), out_dtype=F32, config=config)
    near(y, F.gelu(want + bias) + r, F32)
    near(gemmery.scaled_matmul(a, b, epilogue=epilogues.swiglu, config=config), epilogues.swiglu(want))


#: One for each schedule of a scaled step: whole tiles, tiles in halves, transposed ones, and K cut into parts.
BLOCKED = (
    None, "32x64x128-g4-w4-s2-tile-pointer", "32x64x128-g4-w4-s2-tile-pointer/2", "16x64x128-g4-w4-s2-tile-pointer-k2",
    "16x64x128-g4-w4-s2-tile-pointer/2-swap", "32x32x128-g4-w4-s2-tile-descriptor/2-k2",
)  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("config", BLOCKED)
@pytest.mark.parametrize(
    "kinds", [("1x128", "128x128"), ("1x128", "1x128"), ("row", "128x128"), ("128x128", "1x128")]
)
def test_blocks(kinds, config):
    for m, n, k, format in ((3, 272, 400, "e4m3"), (40, 144, 128, "int8")):
        a, b = with_blocks(m, k, kinds[0], format), with_blocks(n, k, kinds[1], format)
        check_product(a, b, config)


#: The same for steps of 32 columns, and with powers of two for longer ones.
BLOCKED_32 = tuple([config and config.replace("x128-", "x32-") for config in BLOCKED])
BLOCKED_MX = tuple([config and config.replace("x128-", "x64-") for config in BLOCKED])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kinds", "config"),
    [
        *itertools.product([("token", "mx"), ("mx", "tensor")], BLOCKED_32),
        *itertools.product([("mx", "mx")], (*BLOCKED_MX, *BLOCKED[1:3])),
    ],
)
def test_mx(kinds, config):
    for m, n, k, formats in ((3, 80, 112, ("e4m3", "e5m2")), (40, 64, 96, ("e4m3", "e4m3"))):
        a, b = (
            gemmery.quantize_activations(values((rows, k), seed=rows) * 10, format, per=per)
            for rows, format, per in zip((m, n), formats, kinds, strict=True)
        )
        check_product(a, b, config)


def test_a_batch_of_mx():
    a = gemmery.quantize_activations(values((3, 5, 96)) * 10, per="mx")
    b = gemmery.quantize_activations(values((8, 96), seed=1), per="mx")
    y = gemmery.scaled_matmul(a, b)
    assert y.shape == (3, 5, 8)
    near(y, a.dequantize(F64) @ b.dequantize(F64).T)
    turned = gemmery.ScaledTensor(a.data.transpose(0, 1), a.scale.transpose(0, 1))
    assert torch.equal(gemmery.scaled_matmul(turned, b), y.transpose(0, 1))


def test_mx_numbers_that_are_none_spoil_their_row():
    data = torch.ones(6, 64).to(torch.float8_e5m2)
    data[1, 3], data[2, 40] = float("nan"), float("inf")
    scale = torch.full((6, 2), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    b = gemmery.ScaledTensor(torch.ones(4, 64).to(torch.float8_e5m2), scale[:4])
    y = gemmery.scaled_matmul(gemmery.ScaledTensor(data, scale), b, out_dtype=F32)
    assert y[1].isnan().all()
    assert y[2].eq(float("inf")).all()
    assert y[[0, 3, 4, 5]].eq(64).all()


@pytest.mark.parametrize("per", ["token", "block", "mx"])
def test_a_call_that_was_seen_before(per):
    a, b = (gemmery.quantize_activations(values((n, 256)), per=per) for n in (4, 8))
    first = gemmery.scaled_matmul(a, b)
    assert torch.equal(gemmery.scaled_matmul(a, b), first)


def test_all_powers_of_two():
    """Each exponent beside 1; NaN is NaN in its own row and column alone."""
    exponents = torch.arange(256, dtype=torch.uint8).view(256, 1)
    ones = torch.ones(256, 32).to(torch.float8_e4m3fn)
    a = gemmery.ScaledTensor(ones, exponents.view(torch.float8_e8m0fnu))
    b = gemmery.ScaledTensor(ones[:1], torch.full((1, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    y = gemmery.scaled_matmul(a, b, out_dtype=F32)[:, 0]
    assert torch.equal(y[:123], 2.0 ** torch.arange(-122, 1).float())
    assert torch.equal(y[:250], a.dequantize()[:250].sum(-1))
    assert y[255].isnan()
    assert not y[:255].isnan().any()


def test_configs_of_another_step_are_refused():
    a, b = (gemmery.quantize_activations(values((n, 256)), per="mx") for n in (4, 8))
    with pytest.raises(ValueError, match="need the tile schedule, a block_k that is a multiple of 32"):
        gemmery.scaled_matmul(a, b, config="32x64x16-g4-w4-s2-tile-pointer")
    with pytest.raises(ValueError, match="and a block_n that is a power of two"):
        gemmery.scaled_matmul(a, b, config="64x192x64-g4-w4-s2-tile-pointer")
    b = gemmery.quantize_activations(values((8, 256)), per="token")
    with pytest.raises(ValueError, match="need the tile schedule, block_k 32"):
        gemmery.scaled_matmul(a, b, config=BLOCKED[1])
