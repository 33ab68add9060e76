"""Epilogues in the kernel, through the interpreter: each against the same function in float64 on the exact product."""

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import gemmery
from gemmery import Config, epilogues
from gemmery.epilogues import random
from gemmery.kernels import fused as device
from tests.oracle import FP8, ROUNDING, Layout, layouts, operand, place, product, sizes, values

TYPES = (torch.float32, torch.bfloat16, torch.float64)
M, N, K = 70, 96, 50
ROWS = Layout((1, 0), (1, 1), rounded=True)
COLS = Layout((0, 1), (1, 1), rounded=True)


def tuple_of(x):
    return x if isinstance(x, tuple) else (x,)


def wide(x):
    """An argument in the oracle's arithmetic."""
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def assert_close(result, want, inner):
    """Up to one rounding to the result's type, and 128 of the accumulator's of the largest element."""
    assert result.shape == want.shape
    if result.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        step = 2.0 ** -(3 if result.dtype == torch.float8_e4m3fn else 2)
        want = want.double()
        error = (result.double() - want).abs()
        # A sum beside a tie may go to the other side.
        assert (error <= step * want.abs() + 2.0**-9).all()
        assert (error > 0).double().mean() < 0.02
        return
    error = (result.double() - want.double()).abs()
    largest = want.double().abs().max().clamp_min(1)
    most = ROUNDING[result.dtype] * want.double().abs() + 128 * inner * largest
    assert (error <= most).all(), f"off by {error.max()}, {(error / most).max()} times what is allowed"


def check(function, a, b, args=(), types=None, oracle=None, call=gemmery.matmul, **kwargs):
    """A product with an epilogue against `oracle`, which is the function itself unless something else is given."""
    results = tuple_of(call(a, b, epilogue=function, args=args, **kwargs))
    exact = product(a, b.mT if call is gemmery.linear else b)
    wants = tuple_of((oracle or function)(exact, *map(wide, args)))
    assert len(results) == len(wants)
    inner = ROUNDING[torch.float64 if a.dtype == torch.float64 else torch.float32]
    types = types or [a.dtype] * len(results)
    for result, want, dtype in zip(results, wants, types, strict=True):
        assert result.dtype == dtype
        assert_close(result, want, inner)
    return results


def operands(dtype, m=M, n=N, k=K, batch=(), first=ROWS, second=ROWS):
    if batch:
        return values((*batch, m, k), dtype, 1), values((*batch, k, n), dtype, 2)
    return place((m, k), dtype, first, values((m, k), dtype, 1)).view, place(
        (k, n), dtype, second, values((k, n), dtype, 2)
    ).view


#: Name: function, its arguments for a product of m rows and n columns, whether it halves the columns.
LIBRARY = {
    "bias": (epilogues.bias, lambda m, n, t: (values((n,), t, 3),), False),
    "relu": (epilogues.relu, None, False),
    "relu_squared": (epilogues.relu_squared, None, False),
    "gelu": (epilogues.gelu, None, False),
    "gelu_tanh": (epilogues.gelu_tanh, None, False),
    "silu": (epilogues.silu, None, False),
    "sigmoid": (epilogues.sigmoid, None, False),
    "tanh": (epilogues.tanh, None, False),
    "softcap": (epilogues.softcap, lambda m, n, t: (3.0,), False),
    "swiglu": (epilogues.swiglu, None, True),
    "geglu": (epilogues.geglu, None, True),
    "reglu": (epilogues.reglu, None, True),
    "residual": (epilogues.residual, lambda m, n, t: (values((m, n), t, 3),), False),
    "row_scale": (epilogues.row_scale, lambda m, n, t: (values((m, 1), t, 3),), False),
    "column_scale": (epilogues.column_scale, lambda m, n, t: (values((n,), t, 3),), False),
    "scaled": (epilogues.scaled, lambda m, n, t: (0.1, values((m, n), t, 3).t().contiguous().t(), -2), False),
    "cast_fp8": (epilogues.cast_fp8, lambda m, n, t: (20.0,), False),
    "static_fp8": (epilogues.static_fp8, lambda m, n, t: (0.05,), False),
    "with_row_amax": (epilogues.with_row_amax, None, False),
    "logsumexp": (epilogues.logsumexp, None, False),
    "dropout": (epilogues.dropout, lambda m, n, t: (0.3, (1 << 62) + 12345), False),
    "compose": (
        epilogues.compose(epilogues.bias, epilogues.swiglu, epilogues.row_scale),
        lambda m, n, t: (values((n,), t, 3), values((m, 1), t, 4)),
        True,
    ),
}


def arguments(name, m, n, dtype):
    make = LIBRARY[name][1]
    return make(m, n, dtype) if make else ()


def result_types(name, dtype):
    inner = torch.float64 if dtype == torch.float64 else torch.float32
    kept = [dtype, inner]
    types = {
        "cast_fp8": [torch.float8_e4m3fn, inner],
        "static_fp8": [torch.float8_e4m3fn],
        "with_row_amax": kept,
    }
    return {**types, "logsumexp": kept}.get(name)


# ---------------------------------------------------------------------------------------------------------------------
# Reduced rows used again, where a tile is as wide as the product


def rms_norm(acc, gain):
    return acc * torch.rsqrt(acc.square().mean(-1, keepdim=True) + 1e-5) * gain


def layer_norm(acc):
    centred = acc - acc.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1).unsqueeze(-1) + 1e-5)


def centred_gate(acc):
    gate, up = acc.chunk(2, -1)
    gated = torch.relu(gate) * up
    return gated - gated.mean(-1, keepdim=True) + acc.mean(-1, keepdim=True)


WHOLE = {
    "softmax": lambda acc: acc.softmax(-1),
    "log_softmax": lambda acc: acc.log_softmax(-1),
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "torch's rms_norm": lambda acc, gain: F.rms_norm(acc, acc.shape[-1:], gain, 1e-5),
    "torch's layer_norm": lambda acc, gain: F.layer_norm(acc, acc.shape[-1:], gain, gain - 1),
    "returned as well": lambda acc: (acc / acc.abs().amax(-1, keepdim=True), acc.abs().amax(-1)),
    "gated": centred_gate,
    "rounded": lambda acc: acc - acc.logsumexp(-1, keepdim=True).to(torch.float16),
}


@pytest.mark.parametrize(
    ("name", "dtype", "columns"),
    [
        *((name, torch.bfloat16, 50) for name in WHOLE),
        *(("returned as well", dtype, 64) for dtype in TYPES),
        *(("gated", dtype, 2) for dtype in TYPES),
    ],
)
def test_reduced_rows_may_be_used_again_in_a_tile_as_wide_as_the_product(name, dtype, columns):
    a, b = operands(dtype, 37, columns)
    args = (
        (torch.rand(columns) + 0.5,) if name in ("rms_norm", "torch's rms_norm", "torch's layer_norm") else ()
    )
    types = [dtype, torch.float64 if dtype == torch.float64 else torch.float32]
    check(WHOLE[name], a, b, args, types if name == "returned as well" else [dtype])


@pytest.mark.parametrize("name", ["softmax", "rms_norm", "torch's layer_norm", "gated"])
def test_their_gradients(name):
    a, b = (x.double() for x in operands(torch.float64, 7, 12))
    args = (torch.rand(12, dtype=torch.float64) + 0.5,) if "_norm" in name else ()
    x = a.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: gemmery.matmul(x, b, epilogue=WHOLE[name], args=args), (x,), fast_mode=True
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["torch's rms_norm", "torch's layer_norm"])
def test_gains_of_norms_have_gradients(name, dtype):
    a, b = operands(dtype, 9, 48)
    given = a, b, (torch.rand(48) + 0.5).to(dtype)
    ours, theirs = ([x.detach().to(kind).requires_grad_() for x in given] for kind in (dtype, torch.float64))
    found = gemmery.matmul(*ours[:2], epilogue=WHOLE[name], args=ours[2:])
    want = WHOLE[name](theirs[0] @ theirs[1], theirs[2])
    up = torch.randn_like(found)
    made = torch.autograd.grad(found, ours, up)
    for x, y in zip(made, torch.autograd.grad(want, theirs, up.double()), strict=True):
        assert (x.double() - y).norm() <= (2e-2 if dtype == torch.bfloat16 else 1e-5) * y.norm()


@pytest.mark.parametrize(
    "config", [Config(16, 64, 32, split_k=3), Config(32, 64, 16, split_store=True)], ids=str
)
def test_they_take_any_config_with_tiles_that_wide(config):
    a, b = operands(torch.bfloat16, 70, 60)
    check(WHOLE["softmax"], a, b, config=config)
    with pytest.raises(ValueError, match="needs whole tiles of at least 60 columns"):
        gemmery.matmul(a, b, epilogue=WHOLE["softmax"], config=Config(16, 32, 32))


def test_wide_rows_are_refused():
    a, b = operands(torch.bfloat16, 5, 300)
    with pytest.raises(epilogues.Untraceable, match="a row of more than 256 columns"):
        gemmery.matmul(a, b, epilogue=WHOLE["rms_norm"], args=(torch.ones(300),))
    with pytest.raises(ValueError, match=r"no tile is as wide as 256 columns.*the widest has 64"):
        gemmery.matmul(a, b[:, :256], epilogue=WHOLE["softmax"])
    with pytest.raises(ValueError, match="batch_invariant=True"):
        gemmery.matmul(a, b[:, :32], epilogue=WHOLE["softmax"], batch_invariant=True)


# ---------------------------------------------------------------------------------------------------------------------
# What is loaded ahead


AHEAD = {
    "residual": lambda acc, r: acc + r,
    "used twice": lambda acc, r: torch.where(r > 0, acc * r, r),
    "with others": lambda acc, r, row: acc * row + r * 2,
    "gated": lambda acc, r: torch.relu(acc.chunk(2, -1)[0]) * acc.chunk(2, -1)[1] - r,
    "two results": lambda acc, r: (acc + 1, r * 1.0),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("pieces", "schedule", "dtype"),
    [
        (1, "tile", torch.int8), (2, "tile", torch.bfloat16), (4, "tile", torch.bfloat16),
        (2, "persistent", torch.int8), (4, "persistent", torch.bfloat16), (4, "persistent", torch.float32),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", AHEAD)
def test_a_matrix_is_loaded_while_others_of_its_blocks_are_stored(name, dtype, schedule, pieces):
    """In as many pieces, ragged in both directions; an fp32 matrix is not loaded ahead."""
    columns = 300 if name == "gated" else 150
    a, b = torch.randn(70, 40).bfloat16(), torch.randn(40, columns).bfloat16()
    r = torch.randn(70, 150).mul(8).to(dtype)
    args = (r, torch.randn(150)) if name == "with others" else (r,)
    types = [torch.bfloat16] * (2 if name == "two results" else 1)
    config = Config(32, 128 if pieces > 2 else 64, 32, schedule=schedule, split_store=pieces > 1)
    check(AHEAD[name], a, b, args, types, config=config)


# ---------------------------------------------------------------------------------------------------------------------
# The ready-made ones


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", LIBRARY)
def test_library(name, dtype):
    check(LIBRARY[name][0], *operands(dtype), arguments(name, M, N, dtype), result_types(name, dtype))


@pytest.mark.parametrize("name", [name for name, (_, _, halves) in LIBRARY.items() if not halves])
def test_library_with_an_odd_number_of_columns(name):
    a, b = operands(torch.float32, 33, 77, 20)
    args = arguments(name, 33, 77, torch.float32)
    check(LIBRARY[name][0], a, b, args, result_types(name, torch.float32))


@pytest.mark.parametrize(("first", "second"), ((ROWS, COLS), (COLS, ROWS), (COLS, COLS)))
@pytest.mark.parametrize("name", ("compose", "scaled", "logsumexp"))
def test_library_on_columns(name, first, second):
    a, b = operands(torch.bfloat16, first=first, second=second)
    args = arguments(name, M, N, torch.bfloat16)
    check(LIBRARY[name][0], a, b, args, result_types(name, torch.bfloat16))


@pytest.mark.parametrize("name", LIBRARY)
def test_library_on_a_batch(name):
    a, b = operands(torch.float32, 20, 48, 30, (3,))
    args = arguments(name, 20, 48, torch.float32)
    types = result_types(name, torch.float32)
    check(LIBRARY[name][0], a, b, args, types)
    check(LIBRARY[name][0], a, b, args, types, call=gemmery.bmm)


@pytest.mark.parametrize("name", ("compose", "dropout", "logsumexp"))
def test_library_behind_linear(name):
    x, weight = values((2, 35, 50), torch.float32, 1), values((96, 50), torch.float32, 2)
    args = arguments(name, 35, 96, torch.float32)
    check(LIBRARY[name][0], x, weight, args, result_types(name, torch.float32), None, gemmery.linear)


def test_batches_of_arguments():
    a, b = values((2, 3, 20, 30), torch.float32, 1), values((3, 30, 40), torch.float32, 2)
    for shape in ((2, 3, 20, 40), (2, 1, 20, 40), (3, 1, 40), (2, 1, 1, 1), (3, 20, 1), (20, 40), (), (1, 1)):
        check(epilogues.residual, a, b, (values(shape, torch.float32, 3),))
    paired = values((2, 1, 20, 40), torch.float32, 3)
    check(lambda acc, r: epilogues.swiglu(acc + r), a, b, (paired,))
    check(lambda acc, r: epilogues.swiglu(acc) + r, a, b, (values((3, 20, 20), torch.float32, 3),))


CONFIGS = {
    "tile": Config(32, 32, 32),
    "persistent": Config(32, 32, 32, schedule="persistent"),
    "tail": Config(32, 64, 32, schedule="persistent", tail=2),
    "tail of eight": Config(64, 64, 32, schedule="persistent", tail=8),
    "split-K": Config(32, 32, 16, split_k=3),
    "swap": Config(32, 64, 32, swap=True),
    "96": Config(32, 96, 32),
    "descriptor/2": Config(32, 64, 32, loader="descriptor", split_store=True),
    "pointer/2, persistent": Config(32, 64, 32, schedule="persistent", split_store=True),
    "all at once": Config(16, 48, 16, loader="descriptor", split_k=2, swap=True),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_configs(config):
    a, b = operands(torch.bfloat16, 70, 208)
    row, column, matrix = (
        values(s, torch.bfloat16, i) for i, s in enumerate(((208,), (70, 1), (70, 104)), 3)
    )
    function = epilogues.compose(epilogues.bias, epilogues.swiglu, epilogues.row_scale, epilogues.residual)
    check(function, a, b, (row, column, matrix), config=config)
    check(
        lambda acc, b: (torch.relu(acc + b), acc.amax(-1), acc.sum(-1), acc.logsumexp(-1), acc + 1),
        a, b, (row,), [torch.bfloat16, *[torch.float32] * 3, torch.bfloat16], config=config,
    )  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_dropout_does_not_depend_on_the_config(config):
    a, b = operands(torch.float32, 70, 208)
    kept = gemmery.matmul(a, b, epilogue=epilogues.dropout, args=(0.4, -7), config=config) != 0
    assert torch.equal(kept, random.uniform(kept, -7) >= 0.4)
    # A kernel of its own, in which p and the seed are constants.
    again = gemmery.matmul(a, b, epilogue=lambda acc: epilogues.dropout(acc, 0.4, -7), config=config) != 0
    assert torch.equal(kept, again)


# ---------------------------------------------------------------------------------------------------------------------
# Kinds of operands, in any layout

EXTENTS, SEEDS = sizes(100).filter(bool), st.integers(0, 2**32 - 1)


def any_result(draw, shape, dtype):
    """A place for a result, in a layout of its own."""
    return place(shape, dtype, draw(layouts(len(shape), shared=False)))


def scaled_rows(acc, column, row, residual):
    scaled = acc * column * row + residual
    return torch.relu(scaled), scaled.abs().amax(-1)


def scales(draw, m, n, dtype, seed):
    """What `scaled_rows` takes: factors of rows and columns, and a matrix."""
    return [operand(draw, shape, dtype, seed + i) for i, shape in enumerate(((m, 1), (n,), (m, n)), 2)]


@settings(max_examples=15)
@given(st.data(), EXTENTS, EXTENTS, sizes(100), st.booleans(), SEEDS)
def test_fp8_operands(data, m, n, k, fast_accum, seed):
    a, b = (operand(data.draw, s, data.draw(st.sampled_from(FP8)), seed) for s in ((m, k), (k, n)))
    args = scales(data.draw, m, n, torch.float32, seed)
    types = [torch.bfloat16, torch.float32]
    check(scaled_rows, a, b, args, types, fast_accum=fast_accum)
    # Fit for the next product of this kind.
    check(epilogues.cast_fp8, a, b, (0.5,), [torch.float8_e4m3fn, torch.float32])
    placed = any_result(data.draw, (m, n), torch.float16)
    gemmery.matmul(
        a, b, epilogue=epilogues.column_scale, args=args[1:2], out=placed.view, out_dtype=torch.float16
    )
    placed.assert_outside_unchanged()
    assert_close(placed.view, product(a, b) * args[1].double(), ROUNDING[torch.float32])


@pytest.mark.slow
@settings(max_examples=15)
@given(st.data(), EXTENTS, EXTENTS, sizes(100), SEEDS)
def test_int8_operands(data, m, n, k, seed):
    """The function sees sums in int32; scales make floating point of them."""
    a, b = (operand(data.draw, s, torch.int8, seed + i) for i, s in enumerate(((m, k), (k, n))))
    exact = product(a, b)
    column, row, residual = scales(data.draw, m, n, torch.float32, seed)

    def dequantised(acc, column, row, residual):
        assert acc.dtype == torch.int32
        value = acc * column * row + residual
        return value.to(torch.bfloat16), value.amax(-1)

    found = gemmery.matmul(a, b, epilogue=dequantised, args=(column, row, residual))
    wide = exact * column.double() * row.double() + residual.double()
    assert [x.dtype for x in found] == [torch.bfloat16, torch.float32]
    assert_close(found[0], wide, ROUNDING[torch.float32])
    assert_close(found[1], wide.amax(-1), ROUNDING[torch.float32])
    # What stays integer is exact.
    added = operand(data.draw, (n,), torch.int32, seed + 9)
    placed = any_result(data.draw, (m, n), torch.int32)
    gemmery.matmul(
        a, b, epilogue=lambda acc, x: torch.maximum(acc + x, -acc) - 7, args=(added,), out=placed.view
    )
    placed.assert_outside_unchanged()
    assert torch.equal(placed.view.long(), torch.maximum(exact + added.long(), -exact) - 7)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.data(), EXTENTS, EXTENTS, sizes(100), st.sampled_from(("tf32", "tf32x3")), SEEDS)
def test_float32_operands_in_tf32(data, m, n, k, precision, seed):
    """The interpreter multiplies in single precision; that the kernel was asked for another, the plan says."""
    a, b = (operand(data.draw, s, torch.float32, seed + i) for i, s in enumerate(((m, k), (k, n))))
    args = scales(data.draw, m, n, torch.float32, seed)
    check(scaled_rows, a, b, args, precision=precision)
    wide = operand(data.draw, (k, 2 * n), torch.float32, seed + 5)
    check(epilogues.swiglu, a, wide, precision=precision)
    plan = gemmery.plan(a, b, epilogue=scaled_rows, args=args, precision=precision)
    assert plan.problem.precision == precision


# ---------------------------------------------------------------------------------------------------------------------
# Results


def test_each_result_has_its_type():
    a, b = operands(torch.bfloat16)

    def function(acc):
        gate, up = acc.chunk(2, -1)
        return gate * up, acc, gate.to(torch.float16), acc.to(torch.float8_e5m2), acc > 0

    types = [torch.bfloat16, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.bool]
    results = gemmery.matmul(a, b, epilogue=function)
    assert [x.dtype for x in results] == types
    wants = function(product(a, b).float())
    for result, want in zip(results[:-1], wants, strict=False):
        assert_close(result, want, ROUNDING[torch.float32])
    assert (results[-1] == wants[-1]).double().mean() > 0.999
    asked = (torch.float32, None, None, torch.float32, None)
    types = [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.bool]
    assert [x.dtype for x in gemmery.matmul(a, b, epilogue=function, out_dtype=asked)] == types
    assert gemmery.matmul(a, b, epilogue=epilogues.relu, out_dtype=torch.float32).dtype == torch.float32


@pytest.mark.sampled(7)
@pytest.mark.parametrize("keepdim", (False, True))
@pytest.mark.parametrize("half", (False, True))
@pytest.mark.parametrize("kind", ("sum", "mean", "amax", "amin", "logsumexp"))
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_reductions(dtype, kind, half, keepdim):
    a, b = operands(dtype, 37, 150 if half else 75, 30)

    def function(acc):
        rows = acc.chunk(2, -1)[1] if half else acc
        return torch.sigmoid(rows), getattr(rows, kind)(-1, keepdim=keepdim)

    inner = torch.float64 if dtype == torch.float64 else torch.float32
    for config in (None, Config(32, 32, 32)):
        check(function, a, b, (), [dtype, inner], config=config)


def test_the_whole_product_reduced_beside_a_half():
    a, b = operands(torch.float32, 20, 150)

    def function(acc):
        gate, up = acc.chunk(2, -1)
        return gate * up, acc.sum(-1), acc.abs().amax(-1), gate.mean(-1), acc.logsumexp(-1)

    check(function, a, b, config=Config(16, 64, 32))


def test_reductions_of_what_is_not_finite():
    x = values((6, 40), torch.float32)
    x[0, 3], x[1, 5], x[2, :], x[3, 7], x[4, 20:] = math.inf, math.nan, -math.inf, -math.inf, 3e38
    results = gemmery.matmul(
        torch.zeros(6, 1), torch.zeros(1, 40), args=(x,),
        epilogue=lambda acc, x: (acc + x, (acc + x).amax(-1), (acc + x).amin(-1), (acc + x).logsumexp(-1)),
        config=Config(16, 16, 16),
    )  # fmt: skip
    for result, want in zip(results, (x, x.amax(-1), x.amin(-1), x.logsumexp(-1)), strict=True):
        assert torch.allclose(result, want, equal_nan=True)


def test_casts_to_fp8():
    """Every neighbourhood of a tie, subnormals, signs of zero, what is too large, infinity and NaN, to the bit."""
    finite = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        numbers = finite.view(dtype).float()
        numbers = numbers[numbers.isfinite()].sort().values
        middle = (numbers[1:] + numbers[:-1]) / 2
        eps = 2.0**-20
        x = torch.cat([numbers, middle, middle * (1 + eps), middle * (1 - eps), torch.tensor([math.nan])])
        result = gemmery.matmul(
            torch.zeros(1, 1),
            torch.zeros(1, len(x)),
            epilogue=lambda acc, x, t=dtype: (acc * 0 + x).to(t),
            args=(x,),
        )
        want = x.to(dtype)[None]
        same = result.view(torch.uint8) == want.view(torch.uint8)
        # Adding 0 takes the sign of a zero, and a NaN's bits mean nothing.
        assert (same | (result.float().isnan() & want.float().isnan()) | (x == 0)).all()
    beyond = torch.tensor([449.0, 500, 1e30, math.inf, -449, -math.inf])
    result = gemmery.matmul(
        torch.zeros(1, 1),
        torch.zeros(1, 6),
        epilogue=lambda acc, x: (acc + x).to(torch.float8_e4m3fn),
        args=(beyond,),
    )
    assert result.float().flatten().tolist() == [448] * 4 + [-448] * 2


def test_out():
    a, b = operands(torch.float32)
    placed = place((M, N // 2), torch.float32, Layout((0, 1), (2, 3), 1))
    assert gemmery.matmul(a, b, epilogue=epilogues.swiglu, out=placed.view) is placed.view
    placed.assert_outside_unchanged()
    assert_close(placed.view, epilogues.swiglu(product(a, b)), ROUNDING[torch.float32])


def test_bias_comes_first():
    a, b = operands(torch.float32)
    bias = values((N,), torch.float32, 3)
    check(
        epilogues.relu_squared, a, b, bias=bias, oracle=lambda acc: epilogues.relu_squared(acc + bias.double())
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# What comes from outside


def test_closures():
    a, b = operands(torch.float32)
    row, factor = values((N,), torch.float32, 3), 0.5

    def inner(x):
        return x * factor + row

    check(lambda acc: torch.tanh(inner(acc)), a, b, oracle=lambda acc: torch.tanh(acc * 0.5 + row.double()))
    row = row + 1
    check(lambda acc: torch.tanh(inner(acc)), a, b, oracle=lambda acc: torch.tanh(acc * 0.5 + row.double()))
    factor = 2.0
    check(lambda acc: torch.tanh(inner(acc)), a, b, oracle=lambda acc: torch.tanh(acc * 2 + row.double()))


def test_compose_over_closures():
    a, b = operands(torch.float32)
    row = values((N,), torch.float32, 3)
    chained = epilogues.compose(torch.relu, lambda acc: acc + row, gemmery.epilogue(epilogues.swiglu))
    check(chained, a, b, oracle=lambda acc: epilogues.swiglu(torch.relu(acc) + row.double()))


def test_numbers_come_with_every_call():
    a, b = operands(torch.float64, 5, 6, 7)
    for number in (0.1, -0.0, 1e-20, 3, 2**24 + 1, -(2**53) - 1):
        check(lambda acc, x: acc * x, a, b, (number,))


@pytest.mark.parametrize("seed", (0, 1, -1, 2**24 + 1, 2**53 + 1, 2**63 - 1, -(2**63), 0x123456789ABCDEF1))
def test_seeds_keep_all_their_bits(seed):
    want = random.uniform(torch.empty(20, 30), seed)
    a, b = torch.zeros(20, 1), torch.zeros(1, 30)
    function = lambda acc, s: acc + random.uniform(acc, s)  # noqa: E731
    assert torch.equal(gemmery.matmul(a, b, epilogue=function, args=(seed,)), want)
    assert torch.equal(gemmery.matmul(a, b, epilogue=function, args=(torch.tensor(seed),)), want)
    assert torch.equal(gemmery.matmul(a, b, epilogue=lambda acc: function(acc, seed)), want)


# ---------------------------------------------------------------------------------------------------------------------
# Random numbers


@triton.jit
def _philox(out, counter, key, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    c0, c1, c2, c3 = (tl.load(counter + 4 * i + j).to(tl.uint32) for j in range(4))
    k0 = tl.load(key + 2 * i).to(tl.uint32)
    k1 = tl.load(key + 2 * i + 1).to(tl.uint32)
    c0, c1, c2, c3 = tl.philox_impl(c0, c1, c2, c3, k0, k1)
    tl.store(out + 4 * i, c0.to(tl.int64))
    tl.store(out + 4 * i + 1, c1.to(tl.int64))
    tl.store(out + 4 * i + 2, c2.to(tl.int64))
    tl.store(out + 4 * i + 3, c3.to(tl.int64))


@triton.jit
def _uniform(out, seed, first, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(out + i, device.uniform(tl.load(seed), i.to(tl.int64) + tl.load(first)))


def test_philox_is_tritons():
    counter, key = torch.randint(1 << 32, (64, 4)), torch.randint(1 << 32, (64, 2))
    counter[0], key[0] = 0, 0
    counter[1], key[1] = 0xFFFFFFFF, 0xFFFFFFFF
    out = torch.empty(64, 4, dtype=torch.int64)
    _philox[1,](out, counter, key, 64)
    assert torch.equal(torch.stack(random.philox(counter.unbind(-1), key.unbind(-1)), -1), out)


def test_uniform_is_the_kernels():
    for seed in (0, 42, -3, 2**40 + 17):
        out = torch.empty(1024)
        _uniform[1,](out, torch.tensor(seed), torch.tensor(0), 1024)
        assert torch.equal(out, random.uniform(torch.empty(2, 16, 32), seed).flatten())
        assert out.min() >= 0
        assert out.max() < 1
        assert abs(out.mean() - 0.5) < 0.05


def test_dropout_of_halves():
    """Elements are counted in the result, not in the product."""
    a, b = operands(torch.float32)
    function = epilogues.compose(epilogues.reglu, epilogues.dropout)
    check(function, a, b, (0.25, 9))


PIECES = (
    "32x128x32-g8-w4-s2-persistent-descriptor/2", "32x128x32-g8-w4-s2-persistent-descriptor/2-t2",
    "32x128x32-g8-w4-s2-tile-pointer/2", "32x256x32-g8-w4-s2-tile-pointer/2-k2",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("config", PIECES)
@pytest.mark.parametrize(("m", "n", "k"), ((40, 256, 64), (70, 380, 72)))
def test_tiles_in_pieces(config, m, n, k):
    """Epilogues that read and write whole matrices go over a tile in pieces; with paired columns, in pairs."""
    x, w = values((m, k), torch.float32, 1), values((n, k), torch.float32, 2)
    full, wide = values((m, n), torch.float32, 3), values((m, 2 * n), torch.float32, 4)

    def spread(acc, r, pair):
        left, right = pair.chunk(2, -1)
        return acc + r, torch.cat((acc * right, acc * left), -1), (acc * r).sum(-1)

    def gated(acc):
        gate, up = acc.chunk(2, -1)
        return torch.sigmoid(gate) * up, acc, up.amax(-1)

    for function, args in ((spread, (full, wide)), (gated, ())):
        results = gemmery.linear(x, w, epilogue=function, args=args, config=config)
        for result, want in zip(results, function(x.double() @ w.double().T, *args), strict=True):
            torch.testing.assert_close(result.double(), want.double(), rtol=1e-4, atol=1e-3)
