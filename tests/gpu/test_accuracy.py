"""Accuracy at real sizes: no less accurate than torch.matmul for fp16 and bf16, within stated bounds for the rest.

Errors are those of a whole result, |out - want| / |want| in the Frobenius norm, against a product in float64 (fp64:
in the 80-bit numbers of the CPU). With at least 10^5 elements and normal operands such an error hardly varies from
run to run, so that bounds may be close to what is expected.
"""

import math

import numpy as np
import pytest
import torch

import gemmery
from tests.gpu.common import DEVICE, DRY, FP8, HALVES, LAYOUTS, error, needs_cuda, operands, size, wide

pytestmark = pytest.mark.gpu

#: (M, N, K) and layouts: squares; sizes that no vector load divides; strides of 16 bytes but not of 16 elements; few
#: rows.
SHAPES = {
    (4096, 4096, 4096): LAYOUTS,
    (4095, 4097, 1023): LAYOUTS,
    (5000, 2008, 3000): ("NT", "NN"),
    (1, 131072, 512): ("NT", "NN"),
    (7, 20011, 4096): ("NT",),
    (16, 8192, 8192): ("NT",),
    (100, 1112, 2000): ("NT", "TN"),
    (333, 335, 8192): ("NT",),
    (648, 5000, 72): ("TT",),
}
PROBLEMS = [(shape, layout) for shape, layouts in SHAPES.items() for layout in layouts]


def shaped(shape):
    m, n, k = map(size, shape)
    assert DRY or m * n >= 10**5
    return m, n, k


def assert_takes_what_there_is(a, b, **kwargs):
    """The chosen plan's kernel keeps nothing in local memory and fits a multiprocessor."""
    if DRY:
        return
    resources = gemmery.plan(a, b, **kwargs).resources()
    assert resources.spills == 0
    assert 0 < resources.registers <= 255
    assert resources.shared <= torch.cuda.get_device_properties(a.device).shared_memory_per_block_optin


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("shape", "layout"), PROBLEMS, ids=str)
def test_16_bit_is_as_accurate_as_torch(shape, layout, dtype):
    a, b = operands(*shaped(shape), layout, dtype)
    want = wide(a) @ wide(b)
    ours, torchs = error(gemmery.matmul(a, b), want), error(torch.matmul(a, b), want)
    assert ours <= 1.01 * torchs
    assert_takes_what_there_is(a, b)


@pytest.fixture
def tf32_switch():
    """torch's own switch for TF32 products, which a test may set."""
    before = torch.backends.cuda.matmul.allow_tf32
    yield torch.backends.cuda.matmul
    torch.backends.cuda.matmul.allow_tf32 = before


FP32_BOUNDS = {
    # K roundings, each of a part of 2^-24 of a sum that grows as sqrt(k): in norm 0.3 sqrt(K) 2^-24 for normal
    # operands.
    "ieee": lambda k: math.sqrt(k + 1) * 2.0**-24,
    # Operands are cut to 10 bits. That loses between 0 and 2^-10 of each, 3.5e-4 in the mean, and always towards
    # zero: every product is too small by 7e-4 and scatters a little. Whatever K is, that is 7.8e-4. The sums add K
    # times 2^-26 or so.
    "tf32": lambda k: 2.0**-10 + k * 2.0**-26,
    # Three products of 10-bit halves leave 2^-22 or so of each product, and each block's sum is added in fp32.
    "tf32x3": lambda k: math.sqrt(k + 1) * 2.0**-24 + 2.0**-20,
}


@pytest.mark.parametrize("precision", FP32_BOUNDS)
@pytest.mark.parametrize(
    ("shape", "layout"),
    [((1024, 1024, 4096), "NT"), ((999, 1001, 777), "NN"), ((33, 5000, 2048), "TN")],
    ids=str,
)
def test_fp32(shape, layout, precision, tf32_switch):
    a, b = operands(*shaped(shape), layout, torch.float32)
    want = wide(a) @ wide(b)
    tf32_switch.allow_tf32 = precision == "tf32"
    torchs = error(torch.matmul(a, b), want)
    assert error(gemmery.matmul(a, b, precision=precision), want) <= max(
        1.01 * torchs, FP32_BOUNDS[precision](a.shape[1])
    )
    assert_takes_what_there_is(a, b, precision=precision)


@needs_cuda
def test_fp32_is_ieee_whatever_torch_allows(tf32_switch):
    """The switch for torch's own products changes nothing here, and "tf32" really is TF32."""
    a, b = operands(1024, 1024, 1024, "NT", torch.float32)
    want = wide(a) @ wide(b)
    tf32_switch.allow_tf32 = True
    assert error(gemmery.matmul(a, b), want) < 2.0**-18
    assert error(gemmery.matmul(a, b, precision="tf32"), want) > 2.0**-13


@pytest.mark.parametrize(("shape", "layout"), [((320, 352, 1000), "NT"), ((333, 301, 257), "NN")], ids=str)
def test_fp64(shape, layout):
    a, b = operands(*shaped(shape), layout, torch.float64)
    assert np.finfo(np.longdouble).eps < 2.0**-60, "this machine's long double is no better than a double"
    want = a.cpu().numpy().astype(np.longdouble) @ b.cpu().numpy().astype(np.longdouble)

    def measured(out):
        return float(np.linalg.norm(out.cpu().numpy() - want) / np.linalg.norm(want))

    # As for fp32: 0.3 sqrt(K) roundings of 2^-53 are expected.
    bound = math.sqrt(a.shape[1] + 1) * 2.0**-53
    assert measured(gemmery.matmul(a, b)) <= max(1.01 * measured(torch.matmul(a, b)), bound)
    assert_takes_what_there_is(a, b)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((2048, 2048, 2048), "NT"),
        ((1000, 513, 301), "NN"),
        ((5, 30000, 1024), "NT"),
        ((777, 640, 1280), "TT"),
    ],
    ids=str,
)
def test_int8_is_exact(shape, layout):
    a, b = operands(*shaped(shape), layout, torch.int8)
    out = gemmery.matmul(a, b)
    assert out.dtype == torch.int32
    # A float64 holds every one of these sums.
    assert torch.equal(wide(out), wide(a) @ wide(b))
    assert_takes_what_there_is(a, b)


#: Rounding to bfloat16 costs 1.7e-3 in norm for normal results.
BFLOAT16 = 2.0**-9
#: What the sums may cost before rounding. Hopper's tensor cores line the products of an instruction up with the
#: largest and keep 13 bits. Over 128 steps, after which the sum goes to fp32, that comes to about 6e-4 whatever K is
#: ("accurate"). Over all of K ("fast") the sum itself is cut 2^-13 and less at each of K / 32 instructions; all in
#: one direction is the worst.
FP8_SUMS = {False: lambda k: 2.0**-9, True: lambda k: 2.0**-9 + k / 32 * 2.0**-13}


@pytest.mark.parametrize("fast_accum", [False, True], ids=["accurate", "fast"])
@pytest.mark.parametrize(
    ("shape", "layout", "a_dtype", "b_dtype"),
    [((2048, 1024, 4096), "NT", a, b) for a in FP8 for b in FP8]
    + [((1001, 999, 1003), "NN", FP8[0], FP8[1]), ((16, 8192, 2048), "NT", FP8[0], FP8[0])],
    ids=str,
)
def test_fp8(shape, layout, a_dtype, b_dtype, fast_accum):
    m, n, k = shaped(shape)
    a, b = operands(m, n, k, layout, a_dtype, b_dtype)
    want = wide(a) @ wide(b)
    sums = FP8_SUMS[fast_accum](k)
    rounded = error(gemmery.matmul(a, b, fast_accum=fast_accum), want)
    assert rounded <= math.hypot(BFLOAT16, sums)
    assert error(gemmery.matmul(a, b, fast_accum=fast_accum, out_dtype=torch.float32), want) <= sums
    # Two e5m2 operands and sizes that are no multiples of 16 are more than cuBLAS does.
    if not (DRY or fast_accum or a_dtype == b_dtype == torch.float8_e5m2 or m % 16 or n % 16 or k % 16):
        one = torch.ones((), device=DEVICE)
        scaled = torch._scaled_mm(
            a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=False
        )
        assert rounded <= 1.01 * error(scaled, want)
    assert_takes_what_there_is(a, b, fast_accum=fast_accum)
