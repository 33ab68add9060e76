"""Weights of few bits on the host: what codes mean, packing, quantising, and the tensor that holds them."""

import copy
import fractions
import importlib
import io
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import gemmery
from gemmery.formats import (
    FORMATS,
    QuantizedTensor,
    from_codes,
    load_safetensors,
    packing,
    quantize,
    save_safetensors,
)
from gemmery.formats.base import ORDERS, Format
from gemmery.formats.decode import rounded_sum
from gemmery.formats.quantize import nearest
from gemmery.formats.tensor import LARGEST_SCALE, LIMITED_CODES
from gemmery.kernels import decoders
from gemmery.kernels.decoders import DECODERS
from gemmery.operands import packed

BF16, FP16 = torch.bfloat16, torch.float16


def weight(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def codes_of(*shape, bits=4, seed=0):
    return torch.randint(1 << bits, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def bits_of(x):
    """What tells two tensors apart to the bit, zeros' signs and NaN included."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def same(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    number = ~(a.isnan() & b.isnan())
    assert torch.equal(bits_of(a)[number], bits_of(b)[number])


# --- formats ---------------------------------------------------------------------------------------------------------


def small_float(code, exponent_bits, mantissa_bits):
    """A code as IEEE and OCP write of it, from its fields."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits)


def e4m3(code):
    return math.nan if code & 127 == 127 else small_float(code, 4, 3)


def e5m2(code):
    if code & 127 > 124:
        return math.nan
    if code & 127 == 124:
        return math.inf if code < 128 else -math.inf
    return small_float(code, 5, 2)


def nf4(code):
    """The formula of QLoRA's code: normal quantiles, 8 from the positive and 7 from the negative side, and 0."""
    from scipy.stats import norm

    offset = 0.9677083
    positive = norm.ppf(np.linspace(offset, 0.5, 9)[:-1])
    negative = -norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
    values = np.sort(np.concatenate([positive, [0.0], negative]))
    return float((values / values.max())[code])


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "mxfp4", "nvfp4", "int4", "int8"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_code_decodes_exactly(name, dtype):
    meaning = {
        "e4m3": e4m3, "e5m2": e5m2, "mxfp4": lambda c: small_float(c, 2, 1), "nvfp4": lambda c: small_float(c, 2, 1),
        "int4": lambda c: c - 8.0, "int8": lambda c: c - 128.0,
    }[name]  # fmt: skip
    count = 1 << FORMATS[name].bits
    expected = torch.tensor([meaning(c) for c in range(count)], dtype=torch.float64)
    codes = torch.arange(count, dtype=torch.uint8).reshape(1, -1)
    result = from_codes(codes, name, dtype=dtype).dequantize(torch.float64)[0]
    same(result, expected)


def test_nf4_has_the_quantiles_of_its_paper():
    pytest.importorskip("scipy")
    expected = torch.tensor([nf4(c) for c in range(16)], dtype=torch.float64)
    assert (FORMATS["nf4"].values.double() - expected).abs().max() < 1e-6
    codes = torch.arange(16, dtype=torch.uint8).reshape(1, -1)
    same(from_codes(codes, "nf4", dtype=BF16).dequantize()[0], FORMATS["nf4"].values.to(BF16))


def test_decoders_have_the_same_nf4():
    assert torch.tensor(decoders.NF4.value).equal(FORMATS["nf4"].stored_values)


def test_the_largest_scale_is_what_kernels_can_multiply():
    """By the largest power of two that makes up for where a decoder leaves a number, which bf16 has to hold."""
    assert {code for code, _ in decoders._EXPONENTS.value} == set(LIMITED_CODES)
    for (code, bits), exponents in decoders._EXPONENTS.value.items():
        factors = torch.tensor([2.0 ** (x - decoders.UNIT.value) for x in exponents], dtype=torch.float64)
        below = torch.tensor(LARGEST_SCALE).bfloat16().nextafter(torch.tensor(0.0).bfloat16())
        assert (below.double() * factors).bfloat16().isfinite().all(), (code, bits)


def test_a_format_of_an_unknown_code_is_an_error():
    with pytest.raises(ValueError, match="Format 'odd': code is 'e3m0'; it must be one of int, e4m3"):
        _ = Format("odd", 4, "e3m0", 0, "").values
    with pytest.raises(
        ValueError, match="Format 'odd': code is 'e2m1' of 8 bits; it must be one of int of 4, int of"
    ):
        _ = Format("odd", 8, "e2m1", 0, "").order


def test_a_format_without_a_rule_can_not_be_asked_for(monkeypatch):
    odd = Format("odd", 4, "e2m1", 0, "")
    monkeypatch.setitem(FORMATS, "odd", odd)
    for format in ("odd", odd):
        with pytest.raises(ValueError, match=r"quantize: format is 'odd', which has no rule; .* int8, int4,"):
            quantize(torch.ones(16, 32), format)


def test_a_format_without_a_decoder_has_no_kernel(monkeypatch):
    monkeypatch.setitem(FORMATS, "odd", Format("odd", 8, "e2m1", 0, ""))
    with pytest.raises(NotImplementedError, match="format 'odd' has no decoder for 'e2m1' of 8 bits"):
        packed.loader(packed.Packed.of(BF16, "odd", 8, N=16, K=32), 0, False, False, False)


def test_every_format_has_a_decoder_and_a_rule():
    assert {(format.code, format.bits) for format in FORMATS.values()} == DECODERS.keys()
    assert ORDERS.keys() == DECODERS.keys()
    assert all(quantize(torch.ones(16, 128), name).format is format for name, format in FORMATS.items())


def test_the_code_that_a_format_calls_zero_stands_for_zero():
    for format in FORMATS.values():
        codes = torch.full((16, 32), format.zero, dtype=torch.uint8)
        assert not from_codes(codes, format).dequantize().any(), format.name


# --- packing ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 3), max_size=2),
    st.integers(0, 70),
    st.integers(0, 200),
    st.sampled_from([2, 4, 8]),
    st.just(packing.APART) | st.just(packing.in_turn) | st.permutations(range(32)),
)
def test_unpacking_gives_what_was_packed(batch, rows, columns, bits, order):
    order = order(bits) if callable(order) else tuple(order)
    codes = codes_of(*batch, rows, columns, bits=bits)
    words = packing.pack(codes, bits, order)
    N, K = packing.padded(rows, columns, bits)
    assert words.shape == (*batch, N // 16, K // packing.block_columns(bits) * 4, 32)
    assert words.numel() * 32 == math.prod(batch) * N * K * bits
    assert torch.equal(packing.unpack(words, bits, rows, columns, order), codes)


def test_words_of_another_order_are_refused():
    tensors, texts = quantize(torch.ones(16, 64), "int4").to_tensors()
    assert gemmery.QuantizedTensor.from_tensors(tensors, texts).shape == (16, 64)
    for version in ({}, {"packing": "1"}, {"packing": "4"}):
        old = {name: text for name, text in texts.items() if name != "packing"} | version
        with pytest.raises(
            ValueError,
            match=f"of version {version.get('packing', 1)} of their order; this gemmery reads 2 and 3",
        ):
            gemmery.QuantizedTensor.from_tensors(tensors, old)


@pytest.mark.parametrize("name", ["int4", "nf4", "e5m2", "mxfp4"])
def test_words_of_the_version_before_are_read(name):
    """Of which only e2m1's had another order: 16 bits apart, as integers."""
    weight = quantize(torch.randn(2, 40, 100), name)
    tensors, texts = weight.to_tensors("x.")
    if name == "mxfp4":
        order = FORMATS[name].order
        tensors["x.words"] = packing.reordered(tensors["x.words"], 4, order, packing.APART)
        assert not tensors["x.words"].equal(weight.words)
    read = gemmery.QuantizedTensor.from_tensors(tensors, texts | {"packing": "2"}, "x.")
    assert read.words.equal(weight.words)
    assert read.dequantize().equal(weight.dequantize())


#: Two words of the codes below, by `Format.code` and bits.
WORDS = {
    ("int", 8): (192673389, -1157447409),
    ("int", 4): (84020182, 733129247),
    ("e4m3", 8): (200702829, -1144978929),
    ("e5m2", 8): (200702829, -1144978929),
    ("e2m1", 4): (8721323, 1385941962),
    ("nf4", 4): (5967142, 716878127),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_order_of_words_is_that_of_its_version(name):
    """Another one needs another `packing.VERSION`, and `from_tensors` has to read what there is of this one."""
    format = FORMATS[name]
    codes = (torch.arange(16 * 64).pow(2) * 3 // 7).remainder(1 << format.bits).to(torch.uint8)
    words = packing.pack(codes.reshape(16, 64), format.bits, format.order)
    assert packing.VERSION == 3
    assert tuple(words[0, 0, [1, 30]].tolist()) == WORDS[format.code, format.bits]


def test_a_word_has_each_bit_once():
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    for order in (tuple(range(31)), tuple(range(16)) * 2, tuple(range(1, 33))):
        with pytest.raises(ValueError, match="it must have each of 0 to 31 once"):
            packing.pack(codes, 4, order)


@pytest.mark.parametrize("name", ["int4", "nf4", "mxfp4"])
def test_words_lie_as_packing_says(name):
    """Lane 4 g + q has four words of a block: rows g and g + 8, columns 2 q and 2 q + 1, first and second halves."""
    codes = codes_of(32, 192, bits=4, seed=1)
    order = FORMATS[name].order
    assert sorted(order) == list(range(32))
    words = packing.pack(codes, 4, order)
    for strip, block, lane, word in [(0, 0, 0, 0), (1, 2, 31, 3), (1, 0, 13, 1), (0, 1, 22, 2)]:
        g, q = divmod(lane, 4)
        row, column = 16 * strip + g + 8 * (word // 2), 64 * block + 2 * q + 32 * (word % 2)
        place = 4 * lane + word
        found = words[strip, 4 * block + place // 32, place % 32].item() & 0xFFFFFFFF
        even, odd = (codes[row, column + i : column + i + 32 : 8].tolist() for i in range(2))
        if name == "mxfp4":
            bits = [number >> bit & 1 for number in even + odd for bit in range(4)]
            assert found == sum(bit << place for bit, place in zip(bits, order, strict=True))
        else:
            in_turn = [x for both in zip(even, odd, strict=True) for x in both]
            assert [found >> 4 * i & 15 for i in range(8)] == (in_turn if name == "nf4" else even + odd)


# --- arithmetic ------------------------------------------------------------------------------------------------------


def rounded(x, dtype):
    """An exact number rounded to a type, ties to even, by fractions alone."""
    x = fractions.Fraction(x)
    mantissa, least = (8, -133) if dtype == BF16 else (11, -24)
    if not x:
        return 0.0
    exponent = math.floor(math.log2(abs(x)))
    exponent += (abs(x) >= fractions.Fraction(2) ** (exponent + 1)) - (
        abs(x) < fractions.Fraction(2) ** exponent
    )
    unit = fractions.Fraction(2) ** max(exponent - mantissa + 1, least)
    return float(round(x / unit) * unit)  # round of a fraction is to even


def meaning(q, codes, scales, zeros, offsets, channel, batch, row, column):
    """One number of a weight as QuantizedTensor's docstring defines it, in exact arithmetic."""
    dtype, name = q.dtype, q.format.name
    value = rounded(float(q.format.values[codes[(*batch, row, column)].item()]), dtype)
    zero = float(zeros[(*batch, row, column // q.group_size)]) if zeros is not None else 0.0
    if zeros is None and name in ("int4", "int8"):
        zero = q.format.zero
    value = fractions.Fraction(rounded(fractions.Fraction(value) - fractions.Fraction(zero), dtype))
    if scales is not None:
        scale = float(scales[(*batch, row, column // q.group_size)])
        product = value * fractions.Fraction(scale)
        if scales.dtype == torch.float32:
            product = fractions.Fraction(float(np.float32(float(value)) * np.float32(scale)))
        value = product
    if offsets is not None:
        value += fractions.Fraction(float(offsets[(*batch, row, column // q.group_size)]))
    value = rounded(value, dtype)
    if channel is None:
        return value
    factor = channel[(*batch, row)] if channel.numel() > 1 else channel[0]
    return float(np.float32(value) * np.float32(factor.item()))


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("parts", ["", "s", "S", "sz", "so", "sc", "C", "soc", "Sz", "SzC"])
def test_dequantize_is_the_arithmetic_that_is_documented(name, dtype, parts):
    batch, N, K, size = (2,), 20, 72, 16
    codes = codes_of(*batch, N, K, bits=FORMATS[name].bits, seed=2)
    if name in ("e4m3", "e5m2"):
        codes &= 0xBF  # no NaN, no infinities
    groups = (*batch, N, -(-K // size))
    scales = weight(*groups, seed=3, dtype=dtype) / 8 if "s" in parts else None
    scales = weight(*groups, seed=3) / 8 if "S" in parts else scales
    zeros = codes_of(*groups, seed=4).to(dtype) if "z" in parts else None
    offsets = weight(*groups, seed=5, dtype=dtype) if "o" in parts else None
    channel = weight(*batch, N, seed=6) if "c" in parts else weight(1, seed=6) if "C" in parts else None
    size = size if parts.strip("cC") else None
    q = from_codes(
        codes,
        name,
        scales=scales,
        zeros=zeros,
        offsets=offsets,
        channel=channel,
        group_size=size,
        dtype=dtype,
    )
    result = q.dequantize(torch.float64)
    rng = np.random.default_rng(7)
    for _ in range(60):
        b, row, column = (int(rng.integers(size)) for size in (2, N, K))
        expected = meaning(q, codes, scales, zeros, offsets, channel, (b,), row, column)
        assert result[b, row, column].item() == expected, (b, row, column)
    expected = result.to(dtype) if channel is None else result.float().to(dtype)
    same(q.dequantize(), expected)


@pytest.mark.parametrize("dtype, bits", [(BF16, 8), (FP16, 11)])
def test_offsets_are_added_with_one_rounding(dtype, bits):
    """Halfway between two numbers plus or minus a bit that float32, or even float64, does not hold."""
    half, ulp = 1 + 2.0**-bits, 2.0 ** (1 - bits)
    a = torch.tensor([half, half, half, 1 + 3 * 2.0**-bits, half, half], dtype=torch.float64)
    b = torch.tensor([0.0, 2.0**-40, -(2.0**-40), -(2.0**-40), 2.0**-70, -(2.0**-70)], dtype=torch.float64)
    expected = torch.tensor([1.0, 1 + ulp, 1.0, 1 + ulp, 1 + ulp, 1.0], dtype=dtype)
    same(rounded_sum(a, b, dtype), expected)
    same(rounded_sum(-a, -b, dtype), -expected)
    same(rounded_sum(b, a, dtype), expected)
    assert rounded_sum(a[:1] * torch.inf, b[:1], dtype).isinf().all()
    assert rounded_sum(a[:1] * torch.nan, b[:1], dtype).isnan().all()


def test_columns_come_back_in_their_logical_order():
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    codes, scales = codes_of(20, 96), weight(20, 3, seed=1, dtype=BF16)
    plain = from_codes(codes, "int4", scales=scales).dequantize()
    q = from_codes(codes, "int4", scales=scales, permutation=order.int())
    assert q.permutation.dtype == torch.int64
    same(q.dequantize()[:, order], plain)
    assert not torch.equal(q.dequantize(), plain)


# --- quantising ------------------------------------------------------------------------------------------------------

#: Relative error on normal numbers that a format stays below; a tenth less is too little to reach.
BOUNDS = [
    ("int8", {}, 0.01), ("int8", {"group_size": 64}, 0.008), ("int8", {"group_size": 64, "symmetric": False}, 0.008),
    ("int4", {}, 0.12), ("int4", {"group_size": 32}, 0.1), ("int4", {"group_size": 0}, 0.16),
    ("int4", {"symmetric": False}, 0.115), ("int4", {"group_size": 1024}, 0.15), ("e4m3", {}, 0.028),
    ("e4m3", {"scale": "tensor"}, 0.028), ("e4m3", {"scale": "block"}, 0.028), ("e5m2", {}, 0.055), ("mxfp4", {}, 0.13),
    ("nvfp4", {}, 0.1), ("nf4", {}, 0.1),
]  # fmt: skip


@pytest.mark.parametrize("name, options, bound", BOUNDS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_error_of_quantising_is_small(name, options, bound, dtype):
    w = weight(2, 72, 1100)
    q = quantize(w, name, dtype=dtype, **options)
    assert (q.shape, q.dtype, q.format.name) == (w.shape, dtype, name)
    error = ((q.dequantize(torch.float32) - w).norm() / w.norm()).item()
    assert bound * 0.5 < error < bound


def test_groups_and_bits_are_those_asked_for():
    w = weight(64, 256)
    for name, options, size, bits in [
        ("int4", {}, 128, 4.125), ("int4", {"group_size": 32}, 32, 4.5), ("int4", {"group_size": 0}, 0, 4.125),
        ("int8", {}, 0, 8.125), ("int8", {"group_size": 32}, 32, 8.5), ("mxfp4", {}, 32, 4.5), ("nvfp4", {}, 16, 5.0),
        ("nf4", {}, 64, 4.25), ("e4m3", {"scale": "block"}, 128, 8.25), ("e5m2", {}, 0, 8.125),
    ]:  # fmt: skip
        q = quantize(w, name, **options)
        assert q.group_size == size
        extra = 4 if name == "nvfp4" else 0
        assert (q.nbytes - extra) * 8 / w.numel() == bits, name


def test_codes_are_rounded_to_nearest_and_ties_to_even():
    w = (torch.arange(64.0) % 16 - 8).reshape(1, 64)  # integers, for which a scale of 1 is the best
    w[0, :10] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 0.49, 0.51, 6.5, 7.0, -2.5])
    for size in (0, 64):
        q = quantize(w, "int4", group_size=size)
        assert q.dequantize()[0, :10].tolist() == [0, 2, 2, 0, -2, 0, 1, 6, 7, -2]


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize("name, options, bound", BOUNDS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_quantising_on_meta(name, options, bound, dtype):
    w = weight(2, 72, 1100)
    want, q = (quantize(x, name, dtype=dtype, **options) for x in (w, w.to("meta")))
    assert q.device.type == "meta"
    assert (q.shape, q.dtype, q.format_name, q.group_size) == (
        want.shape, want.dtype, want.format_name, want.group_size,
    )  # fmt: skip
    for (a, x), (b, y) in zip(q.parts().items(), want.parts().items(), strict=True):
        assert (a, x.shape, x.dtype, x.device.type) == (b, y.shape, y.dtype, "meta")


def test_e2m1_ties_go_to_the_even_code_and_what_is_over_6_to_6():
    w = torch.zeros(2, 32)
    values = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.2500001, 0.7499999, 5.0001, 7.9, 4.0]
    w[0, :12] = torch.tensor(values)
    w[1] = -w[0]
    result = quantize(w, "mxfp4").dequantize()[:, :12]
    expected = [0, 1, 1, 2, 2, 4, 4, 0.5, 0.5, 6, 6, 4]
    assert result.tolist() == [expected, [-x for x in expected]]


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=20))
def test_nearest_is_nearest(values):
    table = FORMATS["nf4"].values * 4
    found = nearest(torch.tensor(values), table)
    distance = (torch.tensor(values).double()[:, None] - table.double()).abs()
    assert torch.allclose(distance.gather(1, found[:, None])[:, 0], distance.amin(1), atol=1e-6)


@pytest.mark.parametrize(
    "largest, scale",
    [
        (1.0, 0.25),
        (0.999, 0.125),
        (6.0, 1.0),
        (7.99, 1.0),
        (8.0, 2.0),
        (2.0**-100, 2.0**-102),
        (2.0**-126, 2.0**-127),
    ],
)
def test_mx_scales_are_floor_of_log2_less_2(largest, scale):
    q = quantize(torch.full((16, 32), -largest), "mxfp4")
    assert q.scales.dtype == BF16
    assert q.scales.unique().tolist() == [scale]


def test_nvfp4_scales_are_e4m3_numbers_and_the_largest_is_448():
    w = weight(32, 64)
    for dtype in (BF16, FP16):
        q = quantize(w, "nvfp4", dtype=dtype)
        scales = q.scales.float()
        assert torch.equal(scales.to(torch.float8_e4m3fn).float(), scales)
        assert scales.max() == 448
        assert q.channel.tolist() == [w.abs().max() / (6 * 448)]
        assert math.isclose(q.dequantize(torch.float32).abs().max(), w.abs().max(), rel_tol=1e-6)


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_zero_points_are_codes_and_zero_stays_zero(name):
    w = weight(3, 20, 100).abs() + 3
    w[..., 5] = 0
    q = quantize(w, name, group_size=32, symmetric=False)
    assert q.zeros.dtype == q.dtype
    assert torch.equal(q.zeros, q.zeros.round())
    assert q.zeros.min() >= 0
    assert q.zeros.max() < 1 << q.format.bits
    assert not q.dequantize()[..., 5].any()
    low = quantize(-w, name, group_size=32, symmetric=False)
    assert low.zeros[..., :20].max() == (1 << q.format.bits) - 1
    symmetric = quantize(w, name, group_size=32)
    assert (q.dequantize() - w).norm() < 0.7 * (symmetric.dequantize() - w).norm()


def test_largest_of_either_sign_is_kept_by_symmetric_integers():
    for name in ("int4", "int8"):
        for size in (0, 64):
            for sign in (1, -1):
                w = weight(16, 64, seed=3).clamp(-1, 1)
                w[:, 7] = sign * 4.0
                q = quantize(w, name, group_size=size)
                assert (q.dequantize()[:, 7] - sign * 4).abs().max() < 0.02


@pytest.mark.parametrize("size", [0, 128])
def test_symmetric_integers_have_the_better_of_two_scales(size):
    ternary = weight(32, 256).sign() * (weight(32, 256, seed=1) > 0) * 0.875
    same(quantize(ternary, "int4", group_size=size).dequantize(torch.float32), ternary + 0.0)
    w = weight(32, 256)
    error = (quantize(w, "int4", group_size=size).dequantize(torch.float32) - w).norm()
    grouped = w if not size else w.reshape(32, 2, 128)
    scale = grouped.abs().amax(-1, keepdim=True) / 7
    assert error < 0.95 * ((grouped / scale).round() * scale - grouped).norm()


@pytest.mark.parametrize("name, options, bound", BOUNDS)
def test_zeros_stay_zeros_and_shapes_may_be_empty(name, options, bound):
    w = weight(20, 300)
    w[3] = 0
    w[:, :128] = 0
    result = quantize(w, name, **options).dequantize()
    assert result.isfinite().all()
    assert not result[3].any()
    assert not result[:, :128].any()
    for shape in ((4, 32), (0, 64), (4, 0), (0, 4, 32)):
        zeros = torch.zeros(shape)
        q = quantize(zeros, name, **options)
        same(q.dequantize().abs(), zeros.to(BF16))
        assert QuantizedTensor.from_tensors(*q.to_tensors()).shape == shape


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite(bad):
    w = weight(16, 128)
    w[3, 5] = bad
    for name in ("int8", "int4", "mxfp4", "nvfp4", "nf4"):
        with pytest.raises(ValueError, match="NaN or infinity"):
            quantize(w, name)
    for scale in ("tensor", "channel", "block"):
        e4m3 = quantize(w, "e4m3", scale=scale).dequantize()
        assert e4m3[3, 5].isnan()
        e5m2 = quantize(w, "e5m2", scale=scale).dequantize()
        assert e5m2[3, 5].isnan() if math.isnan(bad) else e5m2[3, 5] == bad
        for result in (e4m3, e5m2):
            result[3, 5] = w[3, 5] = 0
            assert (result - w).norm() / w.norm() < 0.06
            w[3, 5] = bad


def test_fp8_scales_belong_to_what_they_should():
    w = weight(300, 200) * torch.logspace(-3, 3, 300)[:, None]
    tensor, channel, block = (quantize(w, "e4m3", scale=x) for x in ("tensor", "channel", "block"))
    assert tensor.channel.tolist() == [w.abs().max() / 448]
    assert torch.equal(channel.channel, w.abs().amax(1) / 448)
    assert (block.scales.dtype, block.scales.shape, block.channel) == (torch.float32, (2, 304), None)
    assert block.scales[1, 130] == w[128:256, 128:].abs().max() / 448
    assert block.scales[0, 299] == w[256:, :128].abs().max() / 448
    assert not block.scales[:, 300:].any()


def test_numbers_that_the_type_does_not_hold():
    big = torch.full((16, 64), 1e6)
    for name in ("int4", "mxfp4", "nf4", "nvfp4"):
        with pytest.raises(ValueError, match=r"1e\+06, which torch.float16 can't hold"):
            quantize(big, name, dtype=FP16)
        quantize(big, name)
    assert quantize(big, "int8", dtype=FP16).dequantize(torch.float32).isclose(big).all()
    with pytest.raises(ValueError, match=r"scales have 1\.45519e-11, which would become 0 in torch\.float16"):
        quantize(torch.full((16, 32), 2.0**-34), "mxfp4", dtype=FP16)
    top = torch.full((16, 64), 65504.0)
    for name in ("nf4", "mxfp4"):
        assert quantize(top, name, dtype=FP16).dequantize().isfinite().all()
    with pytest.raises(ValueError, match="code 0 of int4 is infinite in float16; use bfloat16"):
        quantize(top * torch.tensor([1.0, -1.0]).repeat(32), "int4", dtype=FP16)
    huge = torch.full((16, 64), 2.0**40)
    for name in ("int4", "mxfp4"):
        with pytest.raises(ValueError, match=f"those of {name} in bfloat16 must be below 3.43597e\\+10"):
            quantize(huge, name)
    assert quantize(huge, "int8").dequantize(torch.float32).isclose(huge).all()
    # With zeros kernels don't multiply the scale itself.
    assert quantize(huge, "int4", symmetric=False).dequantize(torch.float32).isclose(huge, rtol=1e-2).all()
    tiny = quantize(torch.full((16, 64), 1e-9), "int4", group_size=64, dtype=FP16)
    assert not tiny.dequantize().any()


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        (("int5",), ValueError, "quantize: format is 'int5'; it must be one of int8, int4,"),
        ((4,), TypeError, "format is a int"),
        (("int4", {"group_size": 48}), ValueError, "group_size is 48; with int4 it must be one of 0, 16,"),
        (("int4", {"group_size": 32.0}), TypeError, "group_size is 32.0"),
        (("nf4", {"group_size": 0}), ValueError, "with nf4"),
        (("mxfp4", {"group_size": 16}), ValueError, "with mxfp4 it must be 32"),
        (("nvfp4", {"group_size": 32}), ValueError, "with nvfp4 it must be 16"),
        (("e4m3", {"group_size": 128}), ValueError, "with scale='channel' it must be 0"),
        (("e4m3", {"scale": "row"}), ValueError, "scale is 'row'"),
        (("int8", {"scale": "tensor"}), ValueError, "is for e4m3 and e5m2"),
        (("nf4", {"symmetric": False}), ValueError, "symmetric=False is for int8 and int4"),
        (("int8", {"symmetric": False}), ValueError, "needs groups"),
        (("int8", {"symmetric": 1}), TypeError, "symmetric is 1"),
        (("int8", {"dtype": torch.float32}), ValueError, "dtype is torch.float32"),
        (("int8", {"w": torch.ones(8)}), ValueError, r"w is \(8,\)"),
        (("int8", {"w": torch.ones(8, 8, dtype=torch.int8)}), TypeError, "w is torch.int8"),
        (("int8", {"w": [[1.0]]}), TypeError, "w is a list"),
        (("int8", {"w": quantize(torch.ones(16, 32), "int8")}), TypeError, "give its dequantize"),
    ],
)
def test_errors_of_quantize(arguments, error, text):
    format, options = (*arguments, {})[:2]
    with pytest.raises(error, match=text):
        quantize(**({"w": torch.ones(16, 128), "format": format} | options))


CODES = torch.zeros(16, 64, dtype=torch.uint8)
ONES = torch.ones(16, 2)


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"codes": CODES.int()}, TypeError, "codes is torch.int32"),
        ({"codes": CODES[0]}, ValueError, r"codes is \(64,\)"),
        ({"codes": CODES + 16}, ValueError, "codes have 16; those of int4 are below 16"),
        ({"scales": torch.ones(16, 3)}, ValueError, "give a group_size"),
        ({"scales": torch.ones(16, 2), "group_size": 16}, ValueError, r"it must be \(16, 4\)"),
        ({"scales": torch.ones(16, 2), "group_size": 0}, ValueError, "group_size is 0"),
        ({"group_size": 16}, ValueError, "group_size is 16 without scales; it must be 0"),
        ({"scales": torch.ones(16, 2), "zeros": torch.ones(16, 4)}, ValueError, "zeros is"),
        (
            {"scales": ONES * torch.nan},
            ValueError,
            "scales have NaN or infinity, which int4 has no codes for",
        ),
        ({"scales": ONES * torch.inf}, ValueError, "scales have NaN or infinity"),
        ({"scales": ONES, "zeros": ONES / 2}, ValueError, "whole numbers"),
        ({"scales": ONES, "zeros": ONES * 257}, ValueError, "zeros have 257, which would become 256"),
        ({"zeros": ONES}, ValueError, "from_codes: there are zeros without scales"),
        ({"offsets": ONES}, ValueError, "from_codes: there are offsets without scales"),
        (
            {"scales": ONES, "zeros": ONES, "offsets": ONES},
            ValueError,
            r"from_codes: there are both zeros and offsets.* offsets - \(zeros - 8\) \* scales as offsets",
        ),
        (
            {"format": "nf4", "scales": ONES, "zeros": ONES, "offsets": ONES},
            ValueError,
            r" offsets - zeros \* scales as offsets",
        ),
        (
            {"scales": ONES, "offsets": ONES},
            ValueError,
            "from_codes: scales are torch.float32 with offsets; they must be torch.bfloat16",
        ),
        ({"scales": ONES.double(), "offsets": ONES}, ValueError, "scales are torch.float64 with offsets"),
        (
            {"codes": CODES[:, :48], "scales": torch.ones(16, 2)},
            ValueError,
            "from_codes: group_size is 24 with scales; it must be a power of two of at least 16",
        ),
        ({"scales": torch.ones(16, 8)}, ValueError, "group_size is 8 with scales"),
        ({"scales": torch.full((16, 2), 1e-6, dtype=BF16), "dtype": FP16}, None, ""),
        ({"scales": torch.full((16, 2), 1e-9, dtype=BF16), "dtype": FP16}, ValueError, "would become 0"),
        ({"scales": torch.full((16, 2), 1e6, dtype=BF16), "dtype": FP16}, ValueError, "would become inf"),
        ({"dtype": torch.float32}, ValueError, "dtype is torch.float32"),
        ({"channel": torch.ones(15)}, ValueError, r"channel is \(15,\); it must be \(16,\) or \(1,\)"),
        ({"permutation": torch.zeros(64, dtype=torch.int64)}, ValueError, "each of 0 to 63 once"),
        ({"permutation": torch.arange(64.0)}, TypeError, "permutation is torch.float32"),
        ({"format": "int3"}, ValueError, "from_codes: format is 'int3'"),
    ],
)
def test_errors_of_from_codes(arguments, error, text):
    arguments = {"codes": CODES, "format": "int4"} | arguments
    if error is None:
        from_codes(**arguments)
        return
    with pytest.raises(error, match=text):
        from_codes(**arguments)


def test_from_codes_takes_types_as_it_says():
    scales = weight(20, 2).abs() + 0.1
    assert from_codes(codes_of(20, 64), "int4", scales=scales).scales.dtype == torch.float32
    assert from_codes(codes_of(20, 64), "int4", scales=scales.double()).scales.dtype == torch.float32
    half = from_codes(codes_of(20, 64), "int4", scales=scales.half(), zeros=codes_of(20, 2))
    assert (half.dtype, half.scales.dtype, half.zeros.dtype) == (FP16, FP16, FP16)
    assert from_codes(codes_of(20, 64), "int4", scales=scales.half(), dtype=BF16).scales.dtype == BF16
    powers = torch.full((20, 2), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with pytest.raises(TypeError, match=r"scales are torch.uint8; .* scales.view\(torch.float8_e8m0fnu\)"):
        from_codes(codes_of(20, 64), "mxfp4", scales=powers.view(torch.uint8))
    assert from_codes(codes_of(20, 64), "mxfp4", scales=powers).scales.unique().tolist() == [0, 2.0**-7]
    assert half.scales.shape == (2, 32)
    assert half.scales.is_contiguous()
    assert not half.scales[:, 20:].any()
    assert torch.equal(half.scales[:, :20].T, scales.half())


# --- the tensor ------------------------------------------------------------------------------------------------------


def full(*batch, dtype=BF16, seed=0, zeros=False):
    """A weight with everything that one can have, 40 x 256 in groups of 64."""
    groups = (*batch, 40, 4)
    offsets = weight(*groups, seed=seed + 1, dtype=dtype)
    return from_codes(
        codes_of(*batch, 40, 256, seed=seed), "int4", scales=weight(*groups, seed=seed, dtype=dtype),
        zeros=codes_of(*groups, seed=seed) if zeros else None, offsets=None if zeros else offsets,
        channel=weight(*batch, 40, seed=seed), permutation=torch.arange(256).reshape(4, 64).flip(1).flatten(),
    )  # fmt: skip


WEIGHTS = {
    "int4": lambda: quantize(weight(40, 256), "int4"),
    "full": full,
    "zeros": lambda: full(zeros=True),
    "nvfp4": lambda: quantize(weight(2, 40, 256), "nvfp4"),
    "e4m3": lambda: quantize(weight(40, 256), "e4m3", scale="block", dtype=FP16),
}
each_weight = pytest.mark.parametrize("q", [pytest.param(f(), id=name) for name, f in WEIGHTS.items()])


def check_equal(a, b):
    assert type(a) is QuantizedTensor
    assert (a.shape, a.dtype, a.format, a.group_size) == (b.shape, b.dtype, b.format, b.group_size)
    assert a.parts().keys() == b.parts().keys()
    for name, part in a.parts().items():
        same(*(x.double() for x in (part, b.parts()[name])))
        assert part.is_contiguous()
    QuantizedTensor(
        a.shape, a.format, dtype=a.dtype, group_size=a.group_size, **a.parts()
    )  # checks that all fits


def apart(a, b):
    return all(
        x.data_ptr() != y.data_ptr() for x, y in zip(a.parts().values(), b.parts().values(), strict=True)
    )


def test_without_its_channel():
    q = full()
    assert q.unscaled().channel is None
    same(q.unscaled().dequantize(torch.float32) * q.channel[:, None], q.dequantize(torch.float32))
    plain = q.unscaled()
    assert plain.unscaled() is plain


def test_repr_and_bytes():
    q = quantize(weight(48, 256), "int4", group_size=64)
    text = "QuantizedTensor((48, 256), format=int4, group_size=64, dtype=torch.bfloat16, device='cpu', bytes=6528)"
    assert repr(q) == str(q) == text
    assert q.nbytes == 48 * 256 // 2 + 48 * 4 * 2
    assert "group_size" not in repr(quantize(weight(16, 32), "int8"))


@each_weight
def test_copies(q):
    for result in (q.clone(), copy.deepcopy(q), q.to("cpu", copy=True), pickle.loads(pickle.dumps(q))):
        check_equal(result, q)
        assert apart(result, q)
    for result in (q.detach(), q.data, q.cpu(), q.contiguous(), q.to(q.dtype), q[:]):
        check_equal(result, q)
        assert not apart(result, q)
    with torch.inference_mode():
        check_equal(q.clone().to(q.dtype), q)


@each_weight
def test_torch_save_and_load(q):
    file = io.BytesIO()
    torch.save({"a": q, "p": torch.nn.Parameter(q, requires_grad=False)}, file)
    file.seek(0)
    for result in torch.load(file, weights_only=True).values():
        check_equal(result, q)


def test_a_parameter_stays_one():
    q = full()
    p = torch.nn.Parameter(q, requires_grad=False)
    for result in (p, copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        check_equal(result, q)
        assert isinstance(result, torch.nn.Parameter)
        assert not result.requires_grad
    assert not isinstance(q, torch.nn.Parameter)
    p.loader = "mine"
    assert copy.deepcopy(p).loader == pickle.loads(pickle.dumps(p)).loader == "mine"


def test_a_copy_made_twice_in_one_deepcopy_is_one():
    q = full()
    a, b = copy.deepcopy([q, q])
    assert a is b


def test_there_is_no_gradient():
    q = full()
    for act in (q.requires_grad_, lambda: torch.nn.Parameter(q), lambda: setattr(q, "requires_grad", True)):
        with pytest.raises(
            ValueError, match="has no gradient; make parameters of it with requires_grad=False"
        ):
            act()
    assert q.requires_grad_(False) is q


def test_other_types():
    for q in (full(zeros=True), full()):
        half = q.half()
        shift = half.offsets if half.zeros is None else half.zeros
        assert (half.dtype, half.scales.dtype, shift.dtype) == (FP16,) * 3
        assert half.channel.dtype == torch.float32
        assert torch.equal(half.scales.float(), q.scales.float())
        check_equal(half.bfloat16(), q)
    block = quantize(weight(40, 256), "e4m3", scale="block")
    assert block.half().scales.dtype == torch.float32
    with pytest.raises(ValueError, match=r"to: dtype is torch.float32; .* dequantize\(torch.float32\)"):
        q.float()
    for value, became in ((1e6, "inf"), (-1e6, "-inf"), (1e-9, "0")):
        bad = from_codes(CODES, "int4", scales=torch.full((16, 2), value, dtype=BF16))
        with pytest.raises(ValueError, match=f"would become {became} in torch.float16"):
            bad.half()
    assert q.to("meta").scales.device.type == "meta"
    assert q.to("meta").half().shape == q.shape


class Layer(torch.nn.Module):
    def __init__(self, q):
        super().__init__()
        self.weight = torch.nn.Parameter(q, requires_grad=False)
        self.register_buffer("other", q.clone())

    def forward(self, x):
        return F.linear(x, self.weight)


@each_weight
def test_modules(q):
    layer, dtype = Layer(q), q.dtype
    other = Layer(q.clone())
    for part in (*other.weight.parts().values(), *other.other.parts().values()):
        part.zero_()
    version = other.weight._version
    other.load_state_dict(layer.state_dict())
    check_equal(other.weight, q)
    check_equal(other.other, q)
    assert other.weight._version > version
    other.to("meta").to_empty(device="cpu").load_state_dict(layer.state_dict())
    check_equal(other.weight, q)
    other.to("meta").load_state_dict(layer.state_dict(), assign=True)
    check_equal(other.weight, q)
    check_equal(copy.deepcopy(layer).weight, q)
    assert layer.half().weight.dtype == layer.other.dtype == FP16
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert layer.to(dtype).weight.dtype == dtype


def test_loading_another_layout_is_an_error():
    layer = Layer(quantize(weight(40, 256), "int4"))
    with pytest.raises(RuntimeError, match="group_size 64 for 128"):
        layer.load_state_dict(Layer(quantize(weight(40, 256), "int4", group_size=64)).state_dict())
    with pytest.raises(TypeError, match=r"the source is a Tensor .*see gemmery.quantize"):
        layer.weight.copy_(weight(40, 256))
    with pytest.raises(ValueError, match=r"format nf4 for int4.*|.*format nf4 for int4"):
        layer.weight.copy_(quantize(weight(40, 256), "nf4", group_size=128))


def test_data_can_be_replaced():
    a, b = full(), full(seed=5)
    p = torch.nn.Parameter(a, requires_grad=False)
    p.data = b
    check_equal(p, b)
    with pytest.raises(TypeError, match="a Tensor can't be the data"):
        p.data = torch.ones(40, 256)
    with pytest.raises(ValueError, match="must be the same"):
        p.data = b.half()


def test_batches():
    for q in (full(3), quantize(weight(3, 40, 256), "nvfp4"), full(2, 3)):
        numbers = q.dequantize()
        same(q[1].dequantize(), numbers[1])
        same(q[-1].dequantize(), numbers[-1])
        same(q[1:].dequantize(), numbers[1:])
        for part, expected in zip(q, numbers, strict=True):
            check_equal(part, part.clone())
            same(part.dequantize(), expected)
    same(q[:, 2].dequantize(), numbers[:, 2])
    same(q[1, ::2].dequantize(), numbers[1, ::2])
    with pytest.raises(IndexError):
        q[2]


def test_writing_to_one_of_a_batch_writes_to_the_batch():
    q = full(3)
    q[1].copy_(full(seed=9))
    check_equal(q[1], full(seed=9))
    same(q.dequantize()[0], full(3).dequantize()[0])


@each_weight
def test_rows(q):
    numbers = q.dequantize()
    for a, b in ((0, 16), (16, 40), (16, 32), (32, 40), (0, 0), (16, 16), (-8, None), (None, 32), (32, 999)):
        piece = q[..., a:b, :]
        same(piece.dequantize(), numbers[..., a:b, :])
        check_equal(piece, piece.clone())
        assert piece.words.data_ptr() != q.words.data_ptr() or not piece.numel()
    for a, b in ((8, 24), (16, 24), (1, None)):
        with pytest.raises(ValueError, match=f"slice: rows {a} to .* only be sliced at multiples of 16"):
            q[..., a:b, :]
    with pytest.raises(ValueError, match="step 1, not 2"):
        q[..., ::2, :]
    with pytest.raises(NotImplementedError, match="is not a batch"):
        q[..., 0, :]


@each_weight
def test_shards(q):
    numbers = q.dequantize()
    step = max(q.group_size, 64 if q.format.bits == 4 else 32)
    for count in (1, 2, 4):
        if 256 // count % step:
            with pytest.raises(ValueError, match=f"shard: columns .* only be sliced at multiples of {step}"):
                q.shard(-1, 1, count)
            continue
        for dim in (-1, q.ndim - 1):
            parts = [q.shard(dim, i, count) for i in range(count)]
            same(torch.cat([x.dequantize() for x in parts], -1), numbers)
            for part in parts:
                check_equal(part, part.clone())
    with pytest.raises(ValueError, match=r"shard: rows 0 to 20 .* only be sliced at multiples of 16"):
        q.shard(-2, 0, 2)
    with pytest.raises(ValueError, match="can't be split into 3 equal parts"):
        q.shard(-2, 0, 3)


CASES = [
    ("int8", {}), ("int8", {"group_size": 32}), ("int4", {}), ("int4", {"group_size": 32, "symmetric": False}),
    ("int4", {"group_size": 0}), ("e4m3", {}), ("e4m3", {"scale": "tensor"}), ("e5m2", {"scale": "block"}), ("mxfp4", {}),
    ("nvfp4", {}), ("nf4", {}),
]  # fmt: skip


@pytest.mark.parametrize(("format", "options"), CASES)
def test_rows_are_put_together(format, options):
    torch.manual_seed(0)
    pieces = [gemmery.quantize(torch.randn(rows, 96).bfloat16(), format, **options) for rows in (48, 16, 33)]
    whole = torch.cat(pieces)
    assert isinstance(whole, QuantizedTensor)
    assert whole.dequantize(torch.float32).equal(torch.cat([x.dequantize(torch.float32) for x in pieces]))
    for part, piece in zip((whole[:48], whole[48:64], whole[64:]), pieces, strict=True):
        assert part.words.equal(piece.words)
        assert part.dequantize().equal(piece.dequantize())
    batch = [x[None] for x in (torch.randn(16, 96), torch.randn(32, 96))]
    batch = [gemmery.quantize(x.bfloat16().repeat(2, 1, 1), format, **options) for x in batch]
    together = torch.cat(batch, -2)
    assert together.dequantize().equal(torch.cat([x.dequantize() for x in batch], -2))


def test_rows_that_can_not_be_put_together():
    a, b = (gemmery.quantize(torch.randn(rows, 64).bfloat16(), "int8") for rows in (33, 16))
    with pytest.raises(
        ValueError, match="cat: weight 0 has 33 rows; all but the last one must have a multiple of 16"
    ):
        torch.cat((a, b))
    for other, words in (
        (
            gemmery.quantize(torch.randn(16, 64).bfloat16(), "int4"),
            "weight 0 has format int8 and weight 1 int4",
        ),
        (gemmery.quantize(torch.randn(16, 64).half(), "int8"), "dtype"),
        (gemmery.quantize(torch.randn(16, 32).bfloat16(), "int8"), "shape but for rows"),
        (gemmery.quantize(torch.randn(16, 64).bfloat16(), "int8", group_size=32), "group_size"),
    ):
        with pytest.raises(ValueError, match=words):
            torch.cat((b, other))
    with pytest.raises(NotImplementedError, match="along rows, -2"):
        torch.cat((b, b), -1)
    with pytest.raises(NotImplementedError, match="not defined for"):
        torch.cat((b, torch.ones(16, 64)))


@pytest.mark.parametrize("shape", [(301, 96), (2, 3, 48, 160), (1, 33)])
@pytest.mark.parametrize(("format", "options"), CASES)
def test_large_weights_are_quantised_in_parts(format, options, shape, monkeypatch):
    module = importlib.import_module("gemmery.formats.quantize")
    torch.manual_seed(0)
    w = torch.randn(shape).bfloat16()
    whole = gemmery.quantize(w, format, **options)
    calls, of = [], module._made_of
    monkeypatch.setattr(module, "_made_of", lambda x, *more: calls.append(x.shape) or of(x, *more))
    for limit in (32 * 96, 1):
        monkeypatch.setattr(module, "PART", limit)
        calls.clear()
        parts = gemmery.quantize(w, format, **options)
        assert repr(parts) == repr(whole)
        for name, x in whole.parts().items():
            assert parts.parts()[name].equal(x), name
            assert parts.parts()[name].is_contiguous()
        apart = format != "nvfp4" and options.get("scale") != "tensor"
        assert (len(calls) > 1) == (apart and w.numel() > limit)


def test_shards_of_rows():
    q = quantize(weight(96, 128), "int4")
    for dim in (0, -2):
        same(torch.cat([q.shard(dim, i, 3).dequantize() for i in range(3)]), q.dequantize())


@pytest.mark.parametrize("name, options, bound", BOUNDS)
@pytest.mark.parametrize("rows", [1, 64])
def test_pieces_of_every_format(name, options, bound, rows):
    q = quantize(weight(rows, 2048), name, dtype=BF16, **options)
    numbers, x, count = q.dequantize(), weight(3, 2048, dtype=BF16), min(rows, 2)
    parts = [q.shard(-2, i, count) for i in range(count)]
    same(torch.cat([part.dequantize() for part in parts]), numbers)
    same(torch.cat([gemmery.linear(x, part) for part in parts], -1), gemmery.linear(x, q))
    for part in (
        *parts,
        q[: rows // 2],
        q[rows // 2 // 16 * 16 :],
        q.narrow(0, 0, rows),
        q[rows // 16 * 16 :],
    ):
        tensors, texts = part.to_tensors()
        check_equal(QuantizedTensor.from_tensors(tensors, texts), part)  # which checks its parts
    sums = 0
    for part, piece in zip([q.shard(-1, i, 2) for i in range(2)], x.chunk(2, -1), strict=True):
        sums = sums + gemmery.linear(piece, part, out_dtype=torch.float32)
        assert part.channel is None or part.channel.data_ptr() != q.channel.data_ptr()
    torch.testing.assert_close(sums, gemmery.linear(x, q, out_dtype=torch.float32), rtol=1e-4, atol=1e-3)


def test_errors_of_shard():
    q = quantize(weight(2, 32, 128), "int4", group_size=64)
    for arguments, error, text in (
        ((0, 0, 2), ValueError, "dim is 0 .* must be -2 .* or 1 or 2"), ((-4, 0, 2), ValueError, "dim is -4"),
        ((3, 0, 2), ValueError, "dim is 3"), ((-1, 2, 2), ValueError, "index is 2 and count 2"),
        ((-1, -1, 2), ValueError, "index is -1"), ((-1, 0, 0), ValueError, "count 0"),
        ((-1, 0, 2.0), TypeError, "count is 2.0"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            q.shard(*arguments)
    moved = from_codes(codes_of(16, 128), "int4", permutation=torch.arange(128).flip(0))
    with pytest.raises(ValueError, match="act-order"):
        moved.shard(-1, 0, 2)
    assert moved.shard(-1, 0, 1).shape == (16, 128)


def test_what_is_not_supported_says_so():
    q = full()
    for act in (lambda: q + 1, lambda: q.view(-1), lambda: torch.ones(2, 40) @ q, q.zero_):
        with pytest.raises(NotImplementedError, match=r"not defined for QuantizedTensor.*its dequantize\(\)"):
            act()
    with pytest.raises(
        TypeError, match=r"copy_: a plain tensor can't take QuantizedTensor.*, but its dequantize\(\)"
    ):
        torch.ones(40, 256).copy_(q)


def test_a_transpose_says_that_none_is_needed():
    q, batch = full(), full(2)
    for act in (
        lambda: q.mT,
        lambda: q.t(),
        lambda: q.T,
        lambda: batch.transpose(1, 2),
        lambda: q.permute(1, 0),
    ):
        with pytest.raises(
            NotImplementedError, match=r"matmul and bmm take it as it is, \(\*batch, N, K\), not"
        ):
            act()


def test_linear_of_torch_is_that_of_gemmery(monkeypatch):
    calls = []
    monkeypatch.setattr("gemmery.api.linear", lambda *args: calls.append(args) or "result")
    q, x, bias = full(), torch.ones(2, 256, dtype=BF16), torch.ones(40)
    assert F.linear(x, q, bias) == F.linear(input=x, weight=q, bias=bias) == "result"
    assert Layer(q)(x) == "result"
    assert [y is z for call in calls[:2] for y, z in zip(call, (x, q, bias), strict=True)] == [True] * 6
    assert calls[2][2] is None


def test_a_weight_in_shared_memory():
    q = full()
    assert q.share_memory_() is q
    assert all(x.is_shared() for x in q.parts().values())


SHARED = torch.ones(4, 48, dtype=BF16)


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"shape": (40,)}, ValueError, r"shape is \(40,\)"),
        ({"shape": (64, 256)}, ValueError, "words is"),
        ({"dtype": torch.float32}, ValueError, "dtype is torch.float32"),
        ({"words": None}, TypeError, "words is a NoneType"),
        ({"words": torch.zeros(3, 16, 32)}, TypeError, "words is torch.float32; it must be torch.int32"),
        (
            {"group_size": 0},
            ValueError,
            "QuantizedTensor: group_size is 0 with scales; it must be a power of two",
        ),
        ({"group_size": -1}, ValueError, "group_size is -1"),
        ({"group_size": 48}, ValueError, "group_size is 48 with scales"),
        (
            {"group_size": 8},
            ValueError,
            "group_size is 8 with scales; it must be a power of two of at least 16",
        ),
        ({"scales": None, "offsets": None}, ValueError, "group_size is 64 without scales; it must be 0"),
        (
            {"scales": None},
            ValueError,
            "there are offsets without scales; give scales too, which may all be 1",
        ),
        ({"scales": None, "offsets": None, "zeros": SHARED}, ValueError, "there are zeros without scales"),
        ({"scales": None, "zeros": SHARED}, ValueError, "there are zeros and offsets without scales"),
        (
            {"zeros": SHARED},
            ValueError,
            r"there are both zeros and offsets; .* offsets - \(zeros - 8\) \* scales",
        ),
        (
            {"scales": SHARED.float()},
            ValueError,
            "scales are torch.float32 with offsets; they must be torch.bfloat16",
        ),
        (
            {"scales": torch.zeros(4, 40, dtype=BF16)},
            ValueError,
            r"scales is \(4, 40\); it must be \(4, 48\)",
        ),
        ({"scales": torch.zeros(4, 48, dtype=FP16)}, TypeError, "scales is torch.float16"),
        ({"offsets": None, "zeros": torch.zeros(4, 48)}, TypeError, "zeros is torch.float32"),
        ({"offsets": torch.zeros(4, 48)}, TypeError, "offsets is torch.float32"),
        ({"scales": torch.zeros(48, 4, dtype=BF16).T}, ValueError, "must be contiguous"),
        ({"channel": torch.zeros(48)}, ValueError, "channel is"),
        ({"channel": torch.zeros(40, device="meta")}, ValueError, "channel is on meta and words on cpu"),
        ({"permutation": torch.arange(256).int()}, TypeError, "permutation is torch.int32"),
        ({"format": "int8"}, ValueError, "words is"),
    ],
)
def test_errors_of_the_constructor(change, error, text):
    q = full()
    arguments = {
        "shape": q.shape,
        "format": q.format,
        "dtype": q.dtype,
        "group_size": q.group_size,
    } | q.parts()
    QuantizedTensor(**arguments)
    with pytest.raises(error, match=text):
        QuantizedTensor(**(arguments | change))


# --- files and torch.compile -----------------------------------------------------------------------------------------


@each_weight
def test_tensors_and_texts(q):
    tensors, texts = q.to_tensors("layer.")
    assert all(type(x) is torch.Tensor for x in tensors.values())
    assert all(type(x) is str for x in texts.values())
    check_equal(QuantizedTensor.from_tensors(tensors | {"else": torch.ones(1)}, texts, "layer."), q)
    with pytest.raises(ValueError, match="there is no tensor 'words'"):
        QuantizedTensor.from_tensors(tensors, texts)
    with pytest.raises(ValueError, match="the texts have no shape"):
        QuantizedTensor.from_tensors(tensors, {k: v for k, v in texts.items() if k != "shape"}, "layer.")
    with pytest.raises(ValueError, match="dtype is 'float32'"):
        QuantizedTensor.from_tensors(tensors, texts | {"dtype": "float32"}, "layer.")


def test_files_of_safetensors(tmp_path):
    pytest.importorskip("safetensors")
    path = tmp_path / "model.safetensors"
    tensors = {name: f() for name, f in WEIGHTS.items()} | {"plain": weight(3, 4), "t": weight(4, 5).T}
    save_safetensors(path, tensors)
    result = load_safetensors(path, device="cpu")
    assert result.keys() == tensors.keys()
    for name, tensor in tensors.items():
        if name in WEIGHTS:
            check_equal(result[name], tensor)
        else:
            same(result[name], tensor)
    with pytest.raises(ValueError, match=r"two tensors would be stored as 'a\.words'"):
        save_safetensors(path, {"a": tensors["int4"], "a.words": torch.ones(1)})
    from safetensors.torch import load_file, save_file

    assert load_file(path).keys() >= {"plain", "full.words", "full.permutation"}
    save_file({"x": torch.ones(2)}, path)
    assert load_safetensors(path)["x"].tolist() == [1, 1]
    save_file({"x": torch.ones(2)}, path, metadata={"gemmery": '{"version": 2, "tensors": {}}'})
    with pytest.raises(ValueError, match="of version 2; this gemmery reads 1"):
        load_safetensors(path)


def test_scaled_tensors_in_files():
    x = gemmery.quantize_activations(weight(3, 64), "int8")
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["x"]
    assert isinstance(loaded, gemmery.ScaledTensor)
    assert loaded.kind == x.kind == "row"
    assert torch.equal(loaded.data, x.data)
    assert torch.equal(loaded.scale, x.scale)
    assert copy.deepcopy(x).dequantize().equal(x.dequantize())


def test_files_of_tensors_that_share_memory(tmp_path):
    pytest.importorskip("safetensors")
    path, q, plain = tmp_path / "model.safetensors", quantize(weight(32, 64), "int8"), weight(8, 6)
    bare, empty = q.unscaled(), torch.empty(0, 3)
    tensors = {
        "embed": plain, "head": plain.detach(), "t": plain.T, "part": plain[2:], "bits": plain.view(torch.int32),
        "a": q, "b": q.detach(), "bare": bare, "none": empty, "nothing": empty, "turned": plain.T.detach(),
    }  # fmt: skip
    save_safetensors(path, tensors)
    result = load_safetensors(path)
    assert result.keys() == tensors.keys()
    for name, tensor in tensors.items():
        if isinstance(tensor, QuantizedTensor):
            check_equal(result[name], tensor)
        else:
            assert torch.equal(result[name], tensor)
            assert result[name].dtype == tensor.dtype
    assert result["head"] is result["embed"]
    assert result["turned"] is result["t"]
    assert result["b"] is result["a"]
    assert result["bare"].words is result["a"].words
    assert result["bare"].channel is None
    with pytest.raises(ValueError, match="two tensors would be stored as 'head"):
        save_safetensors(path, {"x": plain, "head.words": plain, "head": q})
    from safetensors.torch import load_file

    assert not load_file(path).keys() & {"head", "turned", "b.words", "b.channel", "bare.words"}


@each_weight
def test_torch_compile_takes_it_as_an_input(q):
    def product(x, w):
        return x @ w.dequantize().mT, w.detach()

    x = weight(3, 256, dtype=q.dtype)
    torch._dynamo.reset()
    result, alias = torch.compile(product, backend="aot_eager", fullgraph=True)(x, q)
    same(result, product(x, q)[0])
    check_equal(alias, q)
    same(q.dequantize(), q.clone().dequantize())


@pytest.mark.slow
def test_import_is_lazy():
    code = (
        "import sys, gemmery; assert callable(gemmery.quantize) and issubclass(gemmery.QuantizedTensor, object); "
        "assert 'safetensors' not in sys.modules and {'quantize', 'QuantizedTensor'} <= set(dir(gemmery))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("zero", [-1.0, 0.5, 16.0])
def test_zero_points_are_codes(zero):
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="whole numbers from 0 to 15"):
        from_codes(codes, "int4", scales=torch.ones(16, 1), zeros=torch.full((16, 1), zero), group_size=64)


@pytest.mark.parametrize(("format", "scale"), [("int4", 1e4), ("int8", 600.0)])
def test_what_pads_stays_finite_in_float16(format, scale):
    codes, scales = torch.full((16, 64), 8, dtype=torch.uint8), torch.full((16, 1), scale)
    with pytest.raises(ValueError, match="infinite in float16; use bfloat16"):
        from_codes(codes, format, scales=scales, group_size=64, dtype=torch.float16)
    from_codes(codes, format, scales=scales, group_size=64, dtype=torch.bfloat16)
