"""A first operand with an adapter through the interpreter: every way of a tile's end, weights with scales, and the cache."""

import pytest
import torch

import gemmery
from gemmery import lora
from gemmery.operands import WithAdapter
from gemmery.product.run import plan, product
from gemmery.product.spec import NONE, Functions, Options
from tests.lora import dense, errors, inputs

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
LIMITS = {F16: 1e-3, BF16: 5e-3, F32: 1e-6, F64: 1e-15}


def operands(M, N, K, r, dtype):
    torch.manual_seed(0)
    x, left = torch.randn(M, K).to(dtype), torch.randn(M, r).to(dtype)
    return x, (torch.randn(N, K) * max(K, 1) ** -0.5).to(dtype), left, torch.randn(N, r).to(dtype).mT


def error(x, weight, left, right, bias=None, **options):
    found = product("linear", WithAdapter(x, left, right), weight, bias, NONE, None, Options(**options))
    wanted = x.double() @ dense(weight).T + left.double() @ right.double()
    wanted = wanted if bias is None else wanted + bias.double()
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", [
    "64x64x64-g8-w4-s2-tile-pointer-k2", "64x64x32-g8-w4-s2-tile-pointer/2", "64x64x32-g8-w4-s2-tile-pointer-swap",
    "64x96x32-g8-w4-s2-tile-pointer", "16x16x32-g8-w4-s2-tile-pointer/2",
])  # fmt: skip
def test_every_way_of_a_tiles_end(config):
    x, weight, left, right = operands(70, 130, 200, 24, F16)
    assert error(x, weight, left, right, config=config) < LIMITS[F16]
    turned = left.mT.contiguous().mT, right.contiguous()
    assert error(x, weight, *turned, config=config) < LIMITS[F16]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(("K", "r"), [(40, 5), (40, 70), (0, 3)])
def test_types_and_ranks(dtype, K, r):
    x, weight, left, right = operands(21, 34, K, r, dtype)
    for _ in range(2):
        assert error(x, weight, left, right, torch.randn(34).to(dtype)) < LIMITS[dtype]


@pytest.mark.parametrize("format", ["int8", "e4m3", "nvfp4", "2:4"])
def test_scales_of_the_weights_rows_leave_the_adapter_alone(format):
    x, weight, left, right = operands(9, 48, 128, 8, BF16)
    made = gemmery.sparsify(weight) if format == "2:4" else gemmery.quantize(weight, format)
    for _ in range(2):
        assert error(x, made, left, right) < LIMITS[BF16]


def test_autocast_rounds_the_adapter_too():
    x, weight, left, right = operands(21, 34, 40, 5, F32)
    with torch.autocast("cpu", torch.bfloat16):
        found = error(x, weight, left, right)
    assert LIMITS[F32] < found < LIMITS[BF16]


def test_an_epilogue_is_given_the_sum():
    x, weight, left, right = operands(21, 34, 40, 5, F32)
    functions = Functions(lambda acc, y: torch.relu(acc) + y, (torch.randn(21, 34),))
    found = product("linear", WithAdapter(x, left, right), weight, None, functions, None, Options())
    torch.testing.assert_close(found, torch.relu(x @ weight.T + left @ right) + functions.args[0])


def test_schedules_that_cannot_add_it_say_so():
    given = operands(64, 64, 64, 16, BF16)
    options = Options(config="64x64x32-g8-w4-s2-persistent-pointer")
    with pytest.raises(ValueError, match="schedule 'persistent' needs a product without an adapter"):
        plan("linear", WithAdapter(given[0], *given[2:]), given[1], None, NONE, None, options)


@pytest.mark.parametrize("format", ["dense", "int4"])
def test_a_product_of_its_own_for_high_ranks(format, monkeypatch):
    """Both ways; the one that is rounded in between is no better."""
    found = []
    for most in (lora.MOST_RANK, 0):
        monkeypatch.setattr(lora, "MOST_RANK", most)
        torch.manual_seed(0)
        found.append(errors(*inputs(21, 48, 128, 8, BF16, format=format, case="bias")))
    (kernel, of_x, *_), (apart, of_x_apart, *_) = found
    assert max(kernel, of_x) < 5e-3
    assert kernel < apart < 5e-3
    assert of_x < of_x_apart < 5e-3
