"""Weights of other libraries' checkpoints: read exactly.

Three kinds of tests: of layouts that numpy packs here, bit by bit and independently; of files that the libraries
themselves have made (tests/data/checkpoints, see make.py there); and of the libraries where they are installed.
"""

import importlib.util
import json
import re
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gemmery.formats import QuantizedTensor, SparseTensor
from gemmery.formats.base import NF4
from gemmery.formats.checkpoints import (
    read_awq,
    read_bnb,
    read_bnb_state,
    read_compressed_tensors,
    read_fp8,
    read_fp8_blocks,
    read_gptq,
    read_marlin24,
    read_mxfp4,
    read_nvfp4,
    read_sparse24,
    read_torchao,
    read_weight,
)
from gemmery.formats.checkpoints.bitsandbytes import read_nf4
from gemmery.formats.checkpoints.torchao import untile

DATA = Path(__file__).resolve().parents[1] / "data" / "checkpoints"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def words(codes, bits, axis):
    """int32 with consecutive codes along an axis, the first in the lowest bits; one code at a time."""
    codes = np.moveaxis(np.asarray(codes).astype(np.uint64), axis, 0)
    per = 32 // bits
    out = np.zeros((codes.shape[0] // per, *codes.shape[1:]), dtype=np.uint64)
    for i in range(codes.shape[0]):
        out[i // per] |= codes[i] << np.uint64(bits * (i % per))
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(out.astype(np.uint32).view(np.int32), 0, axis)))


def scales_of(rng, *shape):
    """Scales that fp16 and bf16 both hold, so that products are exact enough to compare bits."""
    return np.ldexp(rng.integers(1, 8, shape).astype(np.float32), -5)


def tensor(x, dtype=None):
    return (
        torch.from_numpy(np.ascontiguousarray(x))
        if dtype is None
        else torch.from_numpy(np.ascontiguousarray(x)).to(dtype)
    )


def check(weight, expected, dtype=torch.bfloat16):
    """Bits: what is expected is rounded once to the weight's type."""
    assert weight.dtype == dtype
    assert weight.shape == expected.shape
    assert weight.dequantize().equal(tensor(np.asarray(expected, dtype=np.float32)).to(dtype))


# --- GPTQ and AWQ


def gptq(rng, bits, K=128, N=32, groups=4, g_idx=None, minus_one=True):
    codes = rng.integers(0, 1 << bits, (K, N))
    zeros = rng.integers(0, 1 << bits, (groups, N))
    scales = scales_of(rng, groups, N)
    stored = (zeros - minus_one) % (1 << bits)
    index = np.arange(K) // (K // groups) if g_idx is None else g_idx
    w = np.empty((N, K), dtype=np.float32)
    for k in range(K):
        w[:, k] = (codes[k] - zeros[index[k]]) * scales[index[k]]
    return (words(codes, bits, 0), words(stored, bits, 1), tensor(scales, torch.float16)), w


@pytest.mark.parametrize("minus_one", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq(rng, bits, minus_one):
    tensors, w = gptq(rng, bits, minus_one=minus_one)
    check(read_gptq(*tensors, zeros_minus_one=minus_one), w, torch.float16)
    sorted_idx = torch.arange(128) // 32
    weight = read_gptq(*tensors, sorted_idx.int(), zeros_minus_one=minus_one)
    check(weight, w, torch.float16)
    assert weight.permutation is None


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_with_act_order(rng, bits):
    g_idx = rng.permutation(np.arange(128) // 32)
    tensors, w = gptq(rng, bits, g_idx=g_idx)
    weight = read_gptq(*tensors, tensor(g_idx, torch.int32))
    check(weight, w, torch.float16)
    assert weight.permutation.equal(tensor(np.argsort(g_idx, kind="stable")))
    assert weight.group_size == 32


def test_gptq_with_a_short_last_group(rng):
    g_idx = np.arange(160) // 64
    tensors, w = gptq(rng, 4, K=160, groups=3, g_idx=g_idx)
    check(read_gptq(*tensors, tensor(g_idx), group_size=64), w, torch.float16)
    with pytest.raises(
        ValueError, match="read_gptq: 160 columns are not a multiple of 3 groups; give group_size"
    ):
        read_gptq(*tensors)


def test_symmetric_gptq_has_no_zero_points_and_one_group_is_a_channel(rng):
    codes, scales = rng.integers(0, 16, (128, 32)), scales_of(rng, 4, 32)
    qweight, qzeros = words(codes, 4, 0), words(np.full((4, 32), 7), 4, 1)
    weight = read_gptq(qweight, qzeros, tensor(scales, torch.float16))
    check(weight, ((codes - 8) * scales.repeat(32, 0)).T, torch.float16)
    assert weight.zeros is None
    weight = read_gptq(qweight, qzeros[:1], tensor(scales[:1], torch.float16), group_size=-1)
    check(weight, ((codes - 8) * scales[:1]).T, torch.float16)
    assert weight.scales is None
    assert weight.channel is not None


def test_gptq_in_another_type_keeps_the_scales(rng):
    (qweight, qzeros, scales), _ = gptq(rng, 4)
    scales = scales * 1.001  # what bfloat16 does not hold
    exact = read_gptq(qweight, qzeros, scales.float()).dequantize(torch.float32)
    weight = read_gptq(qweight, qzeros, scales, dtype=torch.bfloat16)
    assert weight.scales.dtype == torch.float32
    assert weight.dequantize().equal(exact.bfloat16())


def test_errors_of_gptq(rng):
    (qweight, qzeros, scales), _ = gptq(rng, 4)
    with pytest.raises(ValueError, match=r"qweight is int64; it must be int32"):
        read_gptq(qweight.long(), qzeros, scales)
    with pytest.raises(
        ValueError, match=r"qweight is \(16, 16\); with scales of \(4, 32\), it must be \(16, 32\)"
    ):
        read_gptq(qweight[:, :16], qzeros, scales)
    with pytest.raises(ValueError, match="a zero point has 2 bits; it must be 4 or 8"):
        read_gptq(qweight, qzeros[:, :2], scales)
    with pytest.raises(ValueError, match=r"g_idx is \(64,\); with 128 inputs, it must be \(128,\)"):
        read_gptq(qweight, qzeros, scales, torch.zeros(64))
    uneven = torch.arange(128) // 32
    uneven[0] = 1
    with pytest.raises(ValueError, match="groups of 31 to 33 columns; they must be all of 32"):
        read_gptq(qweight, qzeros, scales, uneven)
    with pytest.raises(ValueError, match="values from 0 to 7; there are 4 groups"):
        read_gptq(qweight, qzeros, scales, torch.arange(128) // 16)
    with pytest.raises(
        ValueError, match="group_size is 64, so that 128 columns have 2 groups; the scales are of 4"
    ):
        read_gptq(qweight, qzeros, scales, group_size=64)


def awq_words(codes):
    """Along the last axis: bits 4 i of a word have column order[i] of its eight."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    out = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
    for column in range(out.shape[1]):
        for i, place in enumerate(order):
            out[:, column] |= codes[:, 8 * column + place].astype(np.uint32) << np.uint32(4 * i)
    return tensor(out.view(np.int32))


def test_awq(rng):
    codes, zeros = rng.integers(0, 16, (128, 32)), rng.integers(0, 16, (4, 32))
    scales = scales_of(rng, 4, 32)
    w = ((codes - zeros.repeat(32, 0)) * scales.repeat(32, 0)).T
    half = tensor(scales, torch.float16)
    check(read_awq(awq_words(codes), awq_words(zeros), half), w, torch.float16)
    check(read_awq(awq_words(codes), None, half), ((codes - 8) * scales.repeat(32, 0)).T, torch.float16)
    tensors = {"a.qweight": awq_words(codes), "a.qzeros": awq_words(zeros), "a.scales": half}
    check(read_weight(tensors, "a", {"quant_method": "awq", "group_size": 32}), w, torch.float16)
    with pytest.raises(ValueError, match="version is 'gemv'; only 'gemm' is known"):
        read_weight(tensors, "a", {"quant_method": "awq", "version": "GEMV"})
    with pytest.raises(ValueError, match=r"qweight is \(128, 3\).*must be \(128, 4\)"):
        read_awq(awq_words(codes)[:, :3], None, half)


# --- bitsandbytes


def nf4_bytes(codes):
    flat = codes.reshape(-1).astype(np.uint8)
    return tensor((flat[0::2] << 4) | flat[1::2])[:, None]


def nf4_values(codes, dtype=torch.bfloat16):
    """The table is rounded to the weight's type before it is scaled, which is what a kernel does."""
    return torch.tensor(NF4).to(dtype).float().numpy()[codes]


@pytest.mark.parametrize(
    "columns, blocksize, group", [(128, 64, 64), (96, 64, 32), (64, 128, 0), (48, 64, 16)]
)
def test_nf4(rng, columns, blocksize, group):
    codes = rng.integers(0, 16, (16, columns))
    blocks = -(-16 * columns // blocksize)
    absmax = scales_of(rng, blocks)
    w = nf4_values(codes) * absmax.repeat(blocksize)[: 16 * columns].reshape(16, columns)
    weight = read_nf4(nf4_bytes(codes), tensor(absmax), shape=(16, columns), blocksize=blocksize)
    check(weight, w)
    assert weight.group_size == group


def bnb_tensors(rng, double):
    codes, absmax = rng.integers(0, 16, (32, 128)), scales_of(rng, 64)
    rest = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [32, 128]}
    tensors = {
        "weight": nf4_bytes(codes),
        "weight.absmax": tensor(absmax),
        "weight.quant_map": torch.tensor(NF4),
    }
    if double:
        values = np.sort(rng.standard_normal(256)).astype(np.float32)
        small, nested = rng.integers(0, 256, 64), scales_of(rng, 2)
        absmax = values[small] * nested.repeat(32) + np.float32(0.25)
        rest |= {"nested_blocksize": 32, "nested_dtype": "float32", "nested_offset": 0.25}
        tensors |= {
            "weight.absmax": tensor(small.astype(np.uint8)), "weight.nested_absmax": tensor(nested),
            "weight.nested_quant_map": tensor(values),
        }  # fmt: skip
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(
        list(json.dumps(rest).encode()), dtype=torch.uint8
    )
    return tensors, nf4_values(codes) * absmax.repeat(64).reshape(32, 128)


@pytest.mark.parametrize("double", [False, True])
def test_bnb(rng, double):
    tensors, w = bnb_tensors(rng, double)
    check(read_bnb(tensors), w)
    check(read_weight({f"x.{name}": t for name, t in tensors.items()}, "x"), w)


def test_bnb_that_is_stored_in_another_type(rng):
    tensors, w = bnb_tensors(rng, False)
    tensors["weight"] = tensors["weight"].flatten().view(torch.bfloat16)[:, None]
    check(read_bnb(tensors), w)


def test_bnb_int8(rng):
    codes, largest = rng.integers(-127, 128, (32, 128)), scales_of(rng, 32)
    weight = read_bnb({"weight": tensor(codes.astype(np.int8)), "SCB": tensor(largest)})
    exact = codes * (largest / np.float32(127))[:, None]
    check(weight, exact, torch.float16)


@pytest.mark.parametrize("number", range(5))
def test_bnb_int8_in_the_order_of_tiles_is_refused(rng, number):
    weight = tensor(rng.integers(-128, 128, (32, 64)), torch.int8)
    tensors = {"l.weight": weight, "l.SCB": torch.full((32,), 127.0), "l.weight_format": torch.tensor(number)}
    if number == 0:
        check(read_weight(tensors, "l"), weight.numpy(), torch.float16)
    else:
        with pytest.raises(ValueError, match=r"weight_format is .*; it must be 'row'"):
            read_weight(tensors, "l")


def test_errors_of_bnb(rng):
    tensors, _ = bnb_tensors(rng, True)
    with pytest.raises(ValueError, match=r"nested_absmax of weight is missing"):
        read_bnb({name: t for name, t in tensors.items() if name != "weight.nested_absmax"})
    with pytest.raises(
        ValueError, match=r"there is weight; there must be weight.quant_state.bitsandbytes__nf4, or SCB"
    ):
        read_bnb({"weight": tensors["weight"]})
    with pytest.raises(ValueError, match="blocks of 64 in rows of 24 make groups of 8 columns"):
        read_nf4(torch.zeros(192, dtype=torch.uint8), torch.ones(6), shape=(16, 24), blocksize=64)
    with pytest.raises(
        ValueError, match=r"100 bytes and 8 scales; a weight of \(16, 32\) in blocks of 64 has 256 and 8"
    ):
        read_nf4(torch.zeros(100, dtype=torch.uint8), torch.ones(8), shape=(16, 32), blocksize=64)
    state = SimpleNamespace(quant_type="fp4", code=torch.tensor(NF4))
    with pytest.raises(ValueError, match="quant_type is 'fp4'; only 'nf4' is known"):
        read_bnb_state(torch.zeros(1), state)
    with pytest.raises(ValueError, match="repacked for bitsandbytes' CPU kernel"):
        read_bnb_state(torch.zeros(1), SimpleNamespace(packing_format_for_cpu=True))


# --- compressed-tensors


@pytest.mark.parametrize("columns", [128, 192])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["group", "zeros", "channel", "tensor", "order"])
def test_packed_integers(rng, kind, bits, columns):
    # Rows that end inside a word, but where groups are to divide them.
    columns = columns if kind in ("group", "zeros", "order") else columns - 28
    rows, size = 32, {128: 32, 192: 64}.get(columns, columns)
    half = 1 << (bits - 1)
    numbers = rng.integers(-half, half, (rows, columns))
    groups = columns // size
    scales = scales_of(rng, *((1,) if kind == "tensor" else (rows, groups)))
    g_idx = rng.permutation(np.arange(columns) // size) if kind == "order" else np.arange(columns) // size
    zeros = (
        rng.integers(-half, half, (rows, groups)) if kind == "zeros" else np.zeros((rows, groups), dtype=int)
    )
    padded = np.pad(numbers + half, ((0, 0), (0, -columns % (32 // bits))))
    tensors = {
        "weight_packed": words(padded, bits, 1), "weight_scale": tensor(scales, torch.bfloat16),
        "weight_shape": torch.tensor([rows, columns]),
    }  # fmt: skip
    if kind == "zeros":
        tensors["weight_zero_point"] = words(zeros + half, bits, 0)
    if kind == "order":
        tensors["weight_g_idx"] = tensor(g_idx)
    w = (numbers - zeros[:, g_idx]) * (scales if kind == "tensor" else scales[:, g_idx])
    check(read_compressed_tensors(tensors), w)


def scheme(*bits):
    groups = {f"group_{i}": {"weights": {"num_bits": b, "strategy": "channel"}} for i, b in enumerate(bits)}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize("columns", [3, 4, 32, 64])
@pytest.mark.parametrize("bits", [(4,), (8,), (3,), (2,), (4, 8), (3, 4), ()])
def test_the_configuration_says_how_many_bits_packed_integers_have(rng, bits, columns):
    """Words are of each of these bits in turn; only those that shapes and the configuration tell are read."""
    for packed in bits or (4, 8):
        per = 32 // packed
        codes = rng.integers(0, 1 << packed, (16, columns))
        padded = np.pad(codes, ((0, 0), (0, -columns % per))).astype(np.uint64).reshape(16, -1, per)
        joined = (
            (padded << (packed * np.arange(per, dtype=np.uint64))).sum(-1).astype(np.uint32).view(np.int32)
        )
        tensors = {
            "weight_packed": tensor(joined),
            "weight_scale": torch.ones(16, 1),
            "weight_shape": torch.tensor([16, columns]),
        }
        possible = [b for b in bits or (4, 8) if -(-columns // (32 // b)) == joined.shape[1]]
        if possible == [packed] and packed in (4, 8):
            check(read_weight(tensors, "", scheme(*bits)), codes - (1 << packed - 1))
        else:
            with pytest.raises(ValueError, match=r"give num_bits|are not supported"):
                read_weight(tensors, "", scheme(*bits))


@pytest.mark.parametrize("size", [25, 24, 8])
def test_groups_for_which_there_is_no_kernel(rng, size):
    columns = 4 * size
    text = f"read_{{}}: the checkpoint's group_size is {size}; it must be a power of two of at least 16"
    numbers, scales = rng.integers(-8, 8, (32, columns)), scales_of(rng, 32, 4)
    tensors = {
        "weight_packed": words(np.pad(numbers + 8, ((0, 0), (0, -columns % 8))), 4, 1),
        "weight_scale": tensor(scales, torch.bfloat16), "weight_shape": torch.tensor([32, columns]),
    }  # fmt: skip
    for given in (None, size):
        with pytest.raises(ValueError, match=text.format("compressed_tensors")):
            read_compressed_tensors(tensors, group_size=given)
    with pytest.raises(ValueError, match=text.format("fp8_blocks")):
        read_fp8_blocks(fp8(rng, 32, columns)[0], torch.ones(1, 4), block=(128, size))
    weight = made_up(
        "Int8Tensor", qdata=tensor(numbers.astype(np.int8)), scale=tensor(scales), block_size=[1, size]
    )
    with pytest.raises(ValueError, match=text.format("torchao")):
        read_torchao(weight)
    qzeros, half = torch.zeros(4, 4, dtype=torch.int32), torch.ones(4, 32, dtype=torch.float16)
    with pytest.raises(ValueError, match=text.format("awq")):
        read_awq(torch.zeros(columns, 4, dtype=torch.int32), qzeros, half)
    if columns % 8 == 0:
        with pytest.raises(ValueError, match=text.format("gptq")):
            read_gptq(torch.zeros(columns // 8, 32, dtype=torch.int32), qzeros, half)


# --- compressed-tensors' sparse weights


def kept_of(rng, rows, columns):
    """A mask with two of each four."""
    order = rng.random((rows, columns // 4, 4)).argsort(-1)
    return (order < 2).reshape(rows, columns)


def bits_of(mask):
    """A bit for each column, the first in the lowest; one bit at a time."""
    rows, columns = mask.shape
    out = np.zeros((rows, -(-columns // 8)), dtype=np.uint8)
    for k in range(columns):
        out[:, k // 8] |= mask[:, k].astype(np.uint8) << (k % 8)
    return out


def sparse24(rng, rows, columns, dtype=torch.bfloat16, flat=False):
    mask = kept_of(rng, rows, columns)
    numbers = rng.integers(-100, 101, (rows, columns // 2)).astype(np.float32)
    dense = np.zeros((rows, columns), dtype=np.float32)
    dense[mask] = numbers.ravel()
    shape = torch.tensor([rows, columns])
    tensors = {
        "compressed": tensor(numbers, dtype), "bitmask": tensor(bits_of(mask)), "shape": shape if flat else shape[:, None],
    }  # fmt: skip
    return tensors, dense


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows, columns", [(16, 128), (7, 20), (1, 4)])
def test_sparse24(rng, rows, columns, dtype):
    tensors, dense = sparse24(rng, rows, columns, dtype, flat=rows == 7)
    for weight in (read_sparse24(tensors), read_weight({f"l.{n}": x for n, x in tensors.items()}, "l")):
        assert isinstance(weight, SparseTensor)
        assert weight.dtype == (dtype if dtype != torch.float32 else torch.bfloat16)
        assert weight.dense(torch.float32).equal(tensor(dense))


@pytest.mark.parametrize("shape", [(), (1,), (16,), (16, 1)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_sparse24_of_8_bits(rng, dtype, shape):
    tensors, dense = sparse24(rng, 16, 32)
    tensors["compressed"] = tensors["compressed"].to(dtype)
    if dtype != torch.int8:
        dense = tensor(dense).to(dtype).float().numpy()
    tensors["weight_scale"] = torch.as_tensor(scales_of(rng, *shape)).bfloat16()
    tensors["weight_zero_point"] = torch.zeros(shape, dtype=torch.int8)
    weight = read_weight(tensors, "", {"quant_method": "compressed-tensors"})
    scales = tensors["weight_scale"].float().reshape(-1, 1)
    assert weight.dense(torch.float32).equal(tensor(dense) * scales)
    tensors["weight_zero_point"] = torch.ones(shape, dtype=torch.int8)
    with pytest.raises(ValueError, match="weight_zero_point is not 0"):
        read_weight(tensors, "")


def test_errors_of_sparse24(rng):
    tensors, _ = sparse24(rng, 16, 32)
    with pytest.raises(ValueError, match="read_sparse24: there is no bitmask; there must be compressed"):
        read_sparse24({"compressed": tensors["compressed"], "shape": tensors["shape"]})
    with pytest.raises(
        ValueError, match=r"bitmask is \(16, 3\); with a weight of \(16, 32\), it must be \(16, 4\)"
    ):
        read_sparse24(tensors | {"bitmask": tensors["bitmask"][:, :3]})
    with pytest.raises(ValueError, match=r"compressed is \(16, 15\)"):
        read_sparse24(tensors | {"compressed": tensors["compressed"][:, :15]})
    with pytest.raises(ValueError, match=r"shape is \(3,\); it must be \(2,\) or \(2, 1\)"):
        read_sparse24(tensors | {"shape": torch.tensor([1, 16, 32])})
    with pytest.raises(ValueError, match=r"the weight is \(16, 30\); its columns must be a multiple of 4"):
        read_sparse24(tensors | {"shape": torch.tensor([16, 30])})
    bits = tensors["bitmask"].clone()
    bits[3, 1] = 0b01110011
    with pytest.raises(ValueError, match="has 3 of row 3, columns 12 to 15; it must have two of each four"):
        read_sparse24(tensors | {"bitmask": bits})
    with pytest.raises(ValueError, match=r"compressed is torch\.int8 and weight_scale is missing"):
        read_sparse24(tensors | {"compressed": tensors["compressed"].to(torch.int8)})
    with pytest.raises(
        ValueError, match=r"compressed is torch\.bfloat16 with weight_scale; it must be fp8 or int8"
    ):
        read_sparse24(tensors | {"weight_scale": torch.ones(1)})
    small = tensors | {"compressed": tensors["compressed"].to(torch.int8), "weight_scale": torch.ones(16, 2)}
    with pytest.raises(ValueError, match=r"weight_scale is \(16, 2\); with 16 rows"):
        read_sparse24(small)
    with pytest.raises(ValueError, match="quant_method is 'gptq', and the tensors are those of"):
        read_weight(tensors, "", {"quant_method": "gptq"})
    big = tensors | {"compressed": torch.full((16, 16), 1e20).bfloat16()}
    with pytest.raises(ValueError, match=r"compressed have 9.97277e\+19, which would become inf in"):
        read_sparse24(big, dtype=torch.float16)


def marlin24(rng, bits, rows, columns, groups):
    """One number at a time, from where lanes of a warp find it."""
    half, mask = 1 << (bits - 1), kept_of(rng, rows, columns)
    numbers = np.where(mask, rng.integers(-half, half, (rows, columns)), 0)
    scales = scales_of(rng, rows, groups)
    order = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3]
    # Codes by the column of the kept ones, and places in words of a row of 16 kept columns.
    kept = numbers[mask].reshape(rows, columns // 2).T + half
    packed = np.zeros((columns // 32, rows * bits // 2), dtype=np.uint32)
    for at in np.ndindex(columns // 32, rows * 16):
        tile, lane, rest = at[1] // 1024, at[1] % 1024 // 32, at[1] % 32
        rest = rest // len(order) * len(order) + order[rest % len(order)]
        step, block, row = rest // 8, rest // 4 % 2, rest % 4
        k = 2 * (lane % 4) + row % 2 + 8 * (row // 2)
        n = 64 * tile + 16 * (lane // 8) + 8 * (lane // 4 % 2) + 4 * block + step
        per = 32 // bits
        packed[at[0], at[1] // per] |= np.uint32(int(kept[16 * at[0] + k, n]) << (bits * (at[1] % per)))
    # Metadata by blocks of 64 rows: two columns of words side by side, swapped where bit 2 of the row is set.
    meta = np.zeros((columns // 32, 2 * rows), dtype=np.uint16)
    for n, k in np.ndindex(rows, columns // 4):
        first, second = mask[n, 4 * k : 4 * k + 4].nonzero()[0]
        word, half_of = k // 4 % 2, n // 4 % 2
        place = n // 64 * 64 + n // 2 % 2 * 32 + n // 8 % 8 * 4 + n % 2 * 2 + word
        meta[k // 8, 2 * place + half_of] |= np.uint16((first | second << 2) << (4 * (k % 4)))
    stored = scales.T.copy()
    if groups > 2:
        for n in range(rows):
            stored[:, n] = scales[n // 8 * 8 + [0, 4, 1, 5, 2, 6, 3, 7][n % 8]]
    tensors = {
        "weight_packed": tensor(packed.view(np.int32)), "meta": tensor(meta.view(np.int16)),
        "scale_packed": tensor(stored, torch.float16),
    }  # fmt: skip
    return tensors, numbers * scales.repeat(columns // groups, 1)


@pytest.mark.parametrize("rows, columns, groups", [(64, 32, 1), (128, 64, 1), (64, 256, 2), (64, 384, 3)])
@pytest.mark.parametrize("bits", [4, 8])
def test_marlin24(rng, bits, rows, columns, groups):
    tensors, w = marlin24(rng, bits, rows, columns, groups)
    config = scheme(bits)
    config["config_groups"]["group_0"]["weights"]["group_size"] = 128 if groups > 1 else None
    weight = read_weight({f"l.{name}": x for name, x in tensors.items()}, "l", config)
    if bits == 8 and groups > 1:
        # Sparse weights of 8 bits have no groups.
        check(weight, w, torch.float16)
        assert (weight.format.name, weight.group_size) == ("int8", 128)
        return
    assert isinstance(weight, SparseTensor)
    assert (weight.code, weight.group_size) == (f"int{bits}", 128 if groups > 1 else 0)
    assert weight.dtype == torch.float16
    assert weight.dense().equal(tensor(np.asarray(w, dtype=np.float32)).half())
    per_group = 2 * rows * groups if groups > 1 else 4 * rows
    # Of two numbers of the matrix one is kept, with two bits for its place.
    assert weight.nbytes == rows * (columns + -columns % 64) * (bits + 2) // 16 + per_group


def test_marlin24_with_scales_that_a_sparse_weight_does_not_hold(rng):
    tensors, _ = marlin24(rng, 4, 64, 256, 2)
    scale = tensors["scale_packed"].float() * (1 + 2**-10)
    packed, meta = tensors["weight_packed"], tensors["meta"]
    wide = read_marlin24(packed, scale, meta, group_size=128, dtype=torch.bfloat16)
    assert isinstance(wide, QuantizedTensor)
    assert wide.scales.dtype == torch.float32
    exact = read_marlin24(packed, scale.bfloat16(), meta, group_size=128)
    assert isinstance(exact, SparseTensor)
    assert exact.dtype == torch.bfloat16
    small = read_marlin24(packed, torch.ones(16, 64).half(), meta, group_size=16)
    assert isinstance(small, QuantizedTensor)
    assert small.group_size == 16
    with pytest.raises(ValueError, match="group_size is 64, so that 256 columns have 4 groups"):
        read_marlin24(packed, tensors["scale_packed"], meta, group_size=64)


def test_errors_of_marlin24(rng):
    tensors, _ = marlin24(rng, 4, 64, 64, 1)
    packed, scale, meta = (tensors[name] for name in ("weight_packed", "scale_packed", "meta"))
    with pytest.raises(
        ValueError, match=r"weight_packed is \(2, 64\); .* it must be \(2, 128\) for 4 bits or"
    ):
        read_marlin24(packed[:, :64], scale, meta)
    with pytest.raises(
        ValueError, match=r"meta is \(2, 64\); it must be \(K / 32, 2 N\), where N is a multiple"
    ):
        read_marlin24(packed, scale, meta[:, :64])
    with pytest.raises(ValueError, match=r"scale_packed is \(1, 32\); it must be \(groups, 64\)"):
        read_marlin24(packed, scale[:, :32], meta)
    with pytest.raises(ValueError, match="meta is int32; it must be int16"):
        read_marlin24(packed, scale, meta.int())
    with pytest.raises(ValueError, match="num_bits is 8 in the configuration; the tensors have 4"):
        read_weight(tensors, "", scheme(8))
    for nibble in (0b0000, 0b0101, 0b1010, 0b1111, 0b0001):
        wrong = meta.clone()
        wrong[0, 0] = (int(wrong[0, 0]) & ~15) | nibble
        with pytest.raises(
            ValueError, match="read_marlin24: in the metadata, row 0, columns 0 to 3 have the"
        ):
            read_marlin24(packed, scale, wrong)


# --- compressed-tensors' integers and fp8


@pytest.mark.parametrize("kind", ["channel", "tensor", "zeros"])
def test_int8(rng, kind):
    numbers = rng.integers(-128, 128, (32, 64))
    scales = scales_of(rng, *((1,) if kind == "tensor" else (32, 1)))
    tensors = {"weight": tensor(numbers.astype(np.int8)), "weight_scale": tensor(scales)}
    if kind == "zeros":
        zeros = rng.integers(-128, 128, (32, 1))
        tensors["weight_zero_point"] = tensor(zeros.astype(np.int8))
        numbers = numbers - zeros
    check(read_compressed_tensors(tensors), numbers * scales)


def fp8(rng, *shape):
    """Bytes that are no NaN, and their values."""
    codes = tensor(rng.integers(0, 256, shape).astype(np.uint8))
    codes[(codes & 127) == 127] = 0
    sign, exponent, mantissa = codes.numpy() >> 7, (codes.numpy() >> 3) & 15, codes.numpy() & 7
    plain = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7)
    )
    return codes.view(torch.float8_e4m3fn), np.where(sign == 1, -plain, plain).astype(np.float32)


@pytest.mark.parametrize("shape", [(), (1,), (32,), (32, 1), (32, 4)])
def test_fp8(rng, shape):
    weight, values = fp8(rng, 32, 64)
    scales = scales_of(rng, *shape)
    spread = (
        scales[:, None] if shape == (32,) else scales.repeat(64 // shape[1], 1) if len(shape) == 2 else scales
    )
    check(read_fp8(weight, torch.as_tensor(scales)), values * spread)
    check(
        read_compressed_tensors({"weight": weight, "weight_scale": torch.as_tensor(scales)}), values * spread
    )


@pytest.mark.parametrize("rows, columns", [(256, 256), (160, 320), (32, 64)])
def test_fp8_blocks(rng, rows, columns):
    weight, values = fp8(rng, rows, columns)
    scales = scales_of(rng, -(-rows // 128), -(-columns // 128)) * 1.01
    w = values * np.float32(scales).repeat(128, 0).repeat(128, 1)[:rows, :columns]
    check(read_fp8_blocks(weight, tensor(scales).float()), w)
    check(read_weight({"m.weight": weight, "m.weight_scale_inv": tensor(scales).float()}, "m"), w)
    powers = np.exp2(np.floor(np.log2(scales))).astype(np.float32)
    w = values * powers.repeat(128, 0).repeat(128, 1)[:rows, :columns]
    check(read_fp8_blocks(weight, tensor(powers).to(torch.float8_e8m0fnu)), w)


def test_fp8_blocks_of_other_sizes(rng):
    weight, values = fp8(rng, 64, 128)
    scales = scales_of(rng, 2, 2)
    config = {"quant_method": "fp8", "weight_block_size": [32, 64]}
    tensors = {"weight": weight, "weight_scale_inv": tensor(scales)}
    check(read_weight(tensors, "", config), values * scales.repeat(32, 0).repeat(64, 1))
    with pytest.raises(
        ValueError, match=r"scale is \(2, 2\); with a weight of \(64, 128\) in blocks of \(128, 128\)"
    ):
        read_fp8_blocks(weight, tensor(scales))


def e2m1_bytes(codes):
    return tensor((codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8))


@pytest.mark.parametrize("reciprocal", [True, False])
def test_nvfp4(rng, reciprocal):
    codes = rng.integers(0, 16, (32, 64))
    scales, whole = scales_of(rng, 32, 4), 4.0
    packed, scale = e2m1_bytes(codes), tensor(scales).to(torch.float8_e4m3fn)
    w = E2M1[codes] * scales.repeat(16, 1) * (1 / whole if reciprocal else whole)
    check(read_nvfp4(packed, scale, torch.tensor([whole]), reciprocal=reciprocal), w)
    names = (
        ("weight_packed", "weight_scale", "weight_global_scale")
        if reciprocal
        else ("weight", "weight_scale", "weight_scale_2")
    )
    tensors = dict(zip(names, (packed, scale, torch.tensor([whole])), strict=True))
    check(read_weight(tensors, ""), w)


def test_mxfp4_of_experts(rng):
    codes, exponents = rng.integers(0, 16, (3, 32, 2, 32)), rng.integers(110, 140, (3, 32, 2))
    w = (E2M1[codes] * np.exp2(exponents[..., None] - 127.0)).reshape(3, 32, 64)
    blocks, scales = e2m1_bytes(codes), tensor(exponents.astype(np.uint8))
    weight = read_weight({"experts.up_blocks": blocks, "experts.up_scales": scales}, "experts.up")
    check(weight, w)
    assert blocks.shape == (3, 32, 2, 16)
    tensors = {"weight_packed": blocks[1].flatten(-2), "weight_scale": scales[1]}
    check(read_weight(tensors, ""), w[1])


def test_mxfp4_at_the_ends_of_its_scales():
    blocks = torch.full((16, 3, 16), 0x22, dtype=torch.uint8)
    weight = read_mxfp4(blocks, torch.tensor([0, 127, 255], dtype=torch.uint8).expand(16, 3))
    assert weight.dequantize(torch.float32)[0, ::32][:2].equal(torch.tensor([2.0**-127, 1.0]))
    assert weight.dequantize()[:, 64:].isnan().all()


# --- torchao, whose classes are made up here


def made_up(name, **attributes):
    return type(name, (), {"zero_point": None, "dtype": torch.bfloat16, **attributes})()


def test_torchao_int4(rng):
    numbers = rng.integers(-8, 8, (32, 64))
    scales, offsets = scales_of(rng, 4, 32), scales_of(rng, 4, 32)
    packed = ((numbers[:, 0::2] & 15) | ((numbers[:, 1::2] & 15) << 4)).astype(np.uint8).view(np.int8)
    weight = made_up(
        "Int4Tensor", qdata=tensor(packed), scale=tensor(scales, torch.bfloat16),
        zero_point=tensor(offsets, torch.bfloat16), block_size=[1, 16], shape=(32, 64),
    )  # fmt: skip
    check(read_torchao(weight), numbers * scales.T.repeat(16, 1) + offsets.T.repeat(16, 1))
    check(read_weight({"a.weight": weight}, "a"), numbers * scales.T.repeat(16, 1) + offsets.T.repeat(16, 1))
    weight.act_pre_scale = torch.ones(1)
    with pytest.raises(ValueError, match="act_pre_scale"):
        read_torchao(weight)


def test_torchao_int4_of_experts(rng):
    numbers = rng.integers(-8, 8, (3, 32, 64))
    scales, offsets = scales_of(rng, 3, 4, 32), scales_of(rng, 3, 4, 32)
    packed = ((numbers[..., 0::2] & 15) | ((numbers[..., 1::2] & 15) << 4)).astype(np.uint8).view(np.int8)
    weight = made_up(
        "Int4Tensor", qdata=tensor(packed), scale=tensor(scales, torch.bfloat16),
        zero_point=tensor(offsets, torch.bfloat16), block_size=[1, 1, 16], shape=(3, 32, 64),
    )  # fmt: skip
    spread = [x.swapaxes(1, 2).repeat(16, 2) for x in (scales, offsets)]
    check(read_torchao(weight), numbers * spread[0] + spread[1])


@pytest.mark.parametrize("zeros", [None, 0, 5])
@pytest.mark.parametrize("block", [[1, 64], [32, 64], [1, 32]])
def test_torchao_int8(rng, block, zeros):
    numbers = rng.integers(-100, 100, (32, 64))
    shape = (32 // block[0], 64 // block[1])
    scales = scales_of(rng, *shape)
    points = None if zeros is None else torch.full(shape, zeros, dtype=torch.int8)
    weight = made_up(
        "Int8Tensor",
        qdata=tensor(numbers.astype(np.int8)),
        scale=tensor(scales),
        zero_point=points,
        block_size=block,
    )
    read = read_torchao(weight)
    check(read, (numbers - (zeros or 0)) * scales.repeat(block[0], 0).repeat(block[1], 1))
    assert (read.channel is not None) == (not zeros and block[1] == 64)
    wrapped = made_up("LinearActivationQuantizedTensor", original_weight_tensor=weight)
    assert read_torchao(wrapped).dequantize().equal(read.dequantize())


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_torchao_intx(rng, bits):
    half = 1 << (bits - 1)
    numbers, zeros = rng.integers(-half, half, (32, 64)), rng.integers(-half, half, (32, 2))
    scales = scales_of(rng, 32, 2)
    weight = made_up(
        "IntxUnpackedToInt8Tensor", qdata=tensor(numbers.astype(np.int8)), scale=tensor(scales, torch.bfloat16),
        zero_point=tensor(zeros.astype(np.int8)), block_size=(1, 32), target_dtype=f"torch.int{bits}",
    )  # fmt: skip
    read = read_torchao(weight)
    check(read, (numbers - zeros.repeat(32, 1)) * scales.repeat(32, 1))
    assert read.format.name == ("int8" if bits == 8 else "int4")
    if bits < 8:  # 16 bits hold what is added to those
        weight.zero_point = tensor(zeros + 0.5, torch.bfloat16)
        check(read_torchao(weight), (numbers - zeros.repeat(32, 1) - 0.5) * scales.repeat(32, 1))


def test_torchao_float8(rng):
    weight, values = fp8(rng, 32, 64)
    for shape in ((32, 1), (1, 1)):
        scales = scales_of(rng, *shape)
        check(read_torchao(made_up("Float8Tensor", qdata=weight, scale=tensor(scales))), values * scales)


def test_torchao_float8_in_blocks_that_end_early(rng):
    weight, values = fp8(rng, 48, 80)
    scales = scales_of(rng, 2, 3)
    read = read_torchao(
        made_up("Float8Tensor", qdata=weight, scale=tensor(scales, torch.bfloat16), block_size=[32, 32])
    )
    check(read, values * scales.repeat(32, 0).repeat(32, 1)[:48, :80])


def tiled(codes, tiles):
    """As torch's documentation of tinygemm's layout has it, a lane and a word at a time."""
    rows, columns = codes.shape
    out = np.zeros((rows // 8, columns // (tiles * 16), 32, tiles // 2), dtype=np.uint32)
    for i, j, lane, pair in np.ndindex(out.shape):
        row, first = 8 * i + lane // 4, (j * tiles + 2 * pair) * 16 + lane % 4 * 2
        own = [codes[row, first + k] for k in (0, 1, 8, 9, 16, 17, 24, 25)]
        for place, v in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            out[i, j, lane, pair] |= np.uint32(own[v] << (4 * place))
    return tensor(out.view(np.int32))


@pytest.mark.parametrize("tiles", [2, 4, 8])
def test_torchao_tiled(rng, tiles):
    codes = rng.integers(0, 16, (16, 256))
    assert untile(tiled(codes, tiles)).equal(tensor(codes.astype(np.uint8)))


@pytest.mark.parametrize("older", [False, True])
def test_torchao_int4_for_tensor_cores(rng, older):
    # Padded, as the library pads to 1024 columns.
    codes, both = rng.integers(0, 16, (16, 256)), scales_of(rng, 8, 16, 2)
    w = (codes - 8) * both[..., 0].T.repeat(32, 1) + both[..., 1].T.repeat(32, 1)
    packed, both = tiled(codes, 8), tensor(both, torch.bfloat16)
    about = {"block_size": (1, 32), "shape": (16, 192)}
    if older:
        inner = SimpleNamespace(packed_weight=packed, scale_and_zero=both)
        weight = made_up("AffineQuantizedTensor", tensor_impl=inner, **about)
    else:
        weight = made_up("Int4TilePackedTo4dTensor", qdata=packed, scale_and_zero=both, **about)
    check(read_torchao(weight), w[:, :192])


@pytest.mark.parametrize("domain", ["INT", "FLOAT"])
def test_older_torchao(rng, domain):
    codes, scales = rng.integers(0, 16, (32, 64)), scales_of(rng, 32, 2)
    zeros = scales_of(rng, 32, 2) if domain == "FLOAT" else rng.integers(0, 16, (32, 2))
    inner = SimpleNamespace(
        int_data=tensor(codes.astype(np.uint8)),
        scale=tensor(scales, torch.bfloat16),
        zero_point=tensor(zeros),
    )
    weight = made_up(
        "AffineQuantizedTensor", layout_tensor=inner, block_size=(1, 32), quant_min=0, quant_max=15,
        zero_point_domain=SimpleNamespace(name=domain), shape=(32, 64),
    )  # fmt: skip
    spread = scales.repeat(32, 1)
    w = (
        (codes - 8) * spread + zeros.repeat(32, 1)
        if domain == "FLOAT"
        else (codes - zeros.repeat(32, 1)) * spread
    )
    check(read_torchao(weight), w)


def older_of_three_bits(rng, scales, zeros, high=7):
    inner = SimpleNamespace(
        int_data=tensor(rng.integers(0, high + 1, (32, 64)).astype(np.uint8)),
        scale=tensor(scales), zero_point=tensor(zeros),
    )  # fmt: skip
    return made_up(
        "AffineQuantizedTensor", tensor_impl=inner, block_size=(1, 32), quant_min=0, quant_max=high,
        zero_point_domain=SimpleNamespace(name="FLOAT"), shape=(32, 64),
    )  # fmt: skip


@pytest.mark.parametrize("high", [7, 14])
def test_older_torchao_with_another_middle(rng, high):
    """Offsets take it up where they hold it, to the bit."""
    scales, zeros = scales_of(rng, 32, 2), scales_of(rng, 32, 2)
    weight = older_of_three_bits(rng, scales, zeros, high)
    numbers = weight.tensor_impl.int_data.numpy() - (high + 1) / 2  # torchao's mid_point, not always whole
    read = read_torchao(weight)
    check(read, (numbers * scales.repeat(32, 1) + zeros.repeat(32, 1)).astype(np.float32))
    assert read.zeros is None
    weight = older_of_three_bits(rng, scales, zeros + np.float32(2**-12), high)
    middle = re.escape(f"{(high + 1) / 2:g} stands for zero_point; it must be 8 that does")
    with pytest.raises(
        ValueError, match=rf"quant_min is 0 and quant_max {high}, so that {middle}.* exact in"
    ):
        read_torchao(weight)


def test_scales_with_offsets_are_of_the_weights_type(rng):
    scales = (1 + rng.random((32, 2)) / 3).astype(np.float32)  # more bits than bfloat16 has
    zeros = scales_of(rng, 32, 2)
    read = read_torchao(older_of_three_bits(rng, scales, zeros, high=15))
    assert read.scales.dtype == read.offsets.dtype == torch.bfloat16
    assert read.scales[:, :32].T.equal(tensor(scales, torch.bfloat16))
    with pytest.raises(ValueError, match=r"read_torchao: scales have .* would become inf in torch.float16"):
        read_torchao(older_of_three_bits(rng, scales * 1e6, zeros, high=15), dtype=torch.float16)


def test_older_torchao_int8(rng):
    numbers, scales = rng.integers(-128, 128, (32, 64)), scales_of(rng, 32)
    inner = SimpleNamespace(
        int_data=tensor(numbers.astype(np.int8)), scale=tensor(scales), zero_point=torch.zeros(32)
    )
    weight = made_up(
        "AffineQuantizedTensor", tensor_impl=inner, block_size=(1, 64), quant_min=None, quant_max=None,
        zero_point_domain=SimpleNamespace(name="INT"), shape=(32, 64),
    )  # fmt: skip
    check(read_torchao(weight), numbers * scales[:, None])


def test_errors_of_torchao():
    with pytest.raises(ValueError, match="the weight is a Int5Tensor; known are Int4Tensor"):
        read_torchao(made_up("Int5Tensor"))
    weight = made_up(
        "AffineQuantizedTensor", tensor_impl=made_up("MarlinSparseAQTTensorImpl"), block_size=(1, 32)
    )
    with pytest.raises(ValueError, match="is a MarlinSparseAQTTensorImpl; it must be plain"):
        read_torchao(weight)


# --- which reader


def test_the_configuration_tells_gptqs_versions_apart(rng):
    (qweight, qzeros, scales), w = gptq(rng, 4, minus_one=False)
    tensors = {"a.qweight": qweight, "a.qzeros": qzeros, "a.scales": scales}
    check(
        read_weight(tensors, "a", {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}), w, torch.float16
    )
    assert not read_weight(tensors, "a").dequantize().equal(tensor(w, torch.float16))


def test_a_configuration_may_be_an_object_and_a_method_tell_the_version(rng):
    (qweight, qzeros, scales), w = gptq(rng, 4, minus_one=False)
    tensors = {"a.qweight": qweight, "a.qzeros": qzeros, "a.scales": scales}
    kind = Enum("Method", {"GPTQ": "gptq"})
    config = {"quant_method": kind.GPTQ, "bits": 4, "format": "gptq", "checkpoint_format": "gptq_v2"}
    for given in (
        {"quant_method": "gptq_v2"}, SimpleNamespace(to_dict=lambda: config), config | {"group_size": 32},
        # A model's own, with that in it.
        {"model_type": "llama", "quantization_config": config},
        SimpleNamespace(to_dict=lambda: {"quantization_config": SimpleNamespace(to_dict=lambda: config)}),
        {"quant_method": "gptq_v2", "checkpoint_format": "gptq_v2"}, {"bits": 8, "dynamic": {"a": {"bits": 4}}} | {
            "format": "gptq_v2"
        },
    ):  # fmt: skip
        check(read_weight(tensors, "a", given), w, torch.float16)
    with pytest.raises(TypeError, match=r"config is a str; it must be a mapping, or have to_dict\(\)"):
        read_weight(tensors, "a", "gptq")
    with pytest.raises(TypeError, match="tensors is a list; it must be a mapping of names to tensors"):
        read_weight(list(tensors.items()), "a")
    for prefix in ("a.", "a.qweight"):
        with pytest.raises(ValueError, match="a prefix is the layer's name, without"):
            read_weight(tensors, prefix)


@pytest.mark.parametrize(
    "config, text",
    [
        ({"bits": 8}, "bits is 8 in the configuration; the tensors have 4"),
        ({"bits": 3}, "bits is 3 in the configuration; the tensors have 4"),
        ({"quant_method": "awq"}, "quant_method is 'awq', and the tensors are GPTQ's; it must be 'gptq' or"),
        ({"quant_method": "hqq"}, "quant_method is 'hqq', and the tensors are GPTQ's"),
        ({"desc_act": True}, "desc_act is True in the configuration, and the layer has no g_idx"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; it must be 'gptq' or 'gptq_v2'"),
        (
            {"quant_method": "gptq_v2", "checkpoint_format": "gptq"},
            "quant_method is 'gptq_v2' and checkpoint_format is 'gptq'",
        ),
    ],
)
def test_a_configuration_that_contradicts_the_tensors(rng, config, text):
    (qweight, qzeros, scales), _ = gptq(rng, 4)
    with pytest.raises(ValueError, match=text):
        read_weight({"qweight": qweight, "qzeros": qzeros, "scales": scales}, "", config)


def test_a_configuration_of_another_method(rng):
    weight, _ = fp8(rng, 32, 64)
    scaled = {"weight": weight, "weight_scale": torch.tensor(0.5)}
    inverse = {"weight": weight, "weight_scale_inv": torch.tensor(0.5)}
    blocks = {"_blocks": torch.zeros(32, 1, 16, dtype=torch.uint8), "_scales": torch.zeros(32, 1).byte()}
    awq = {"qweight": torch.zeros(64, 4).int(), "scales": torch.ones(1, 32)}
    for tensors in (scaled, inverse, blocks, awq):
        read_weight(tensors, "")
        with pytest.raises(ValueError, match="quant_method is 'gptq', and the tensors are"):
            read_weight(tensors, "", {"quant_method": "gptq"})
    with pytest.raises(ValueError, match="bits is 8 in the configuration; the tensors have 4"):
        read_weight(awq, "", {"quant_method": "awq", "w_bit": 8})


def test_a_weight_that_nothing_reads():
    tensors = {"a.weight": torch.ones(16, 32), "a.bias": torch.ones(16)}
    with pytest.raises(
        ValueError, match=r"at 'a' there is weight \(float32, \(16, 32\)\), which is not a packed weight"
    ):
        read_weight(tensors, "a")
    with pytest.raises(ValueError, match=r"at 'b' there is nothing.*quant_method is 'vptq'"):
        read_weight(tensors, "b", {"quant_method": "vptq"})
    with pytest.raises(ValueError, match=r"at 'a.w' there are a.weight, and no tensor of a known format"):
        read_weight(tensors, "a.w")
    with pytest.raises(ValueError, match="a has qweight and no scales"):
        read_weight({"a.qweight": torch.ones(1, 1, dtype=torch.int32)}, "a")
    with pytest.raises(ValueError, match="must be weight_scale and one of weight_packed and weight"):
        read_compressed_tensors({"weight": torch.ones(1)})


# --- what the libraries made


def stored(path):
    safe_open = pytest.importorskip("safetensors").safe_open
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["about"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
    return tensors, about


def compare(weight, expected, name):
    """Bits, but for NF4: bitsandbytes does not round its table to 16 bits before it scales, and kernels do."""
    ours = weight.dense() if isinstance(weight, SparseTensor) else weight.dequantize()
    assert ours.dtype == expected.dtype
    if "nf4" in name:
        torch.testing.assert_close(ours, expected, rtol=2**-7, atol=0)
    else:
        assert ours.equal(expected)


FILES = sorted(DATA.glob("*.safetensors"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_of_the_libraries(path):
    tensors, about = stored(path)
    expected = tensors.pop("expected")
    if "class" in about:
        attributes = {name.removeprefix("layer."): x for name, x in tensors.items()}
        attributes |= {"block_size": about["block_size"], "target_dtype": about.get("target_dtype")}
        weight = read_torchao(made_up(about["class"], **attributes))
    else:
        weight = read_weight(tensors, "layer", about.get("config"))
    compare(weight, expected, path.stem)


def test_there_are_files_of_each_library():
    assert {path.stem.split("-")[0] for path in FILES} == {"awq", "bnb", "compressed", "gptq", "torchao"}


@pytest.fixture(scope="module")
def make():
    spec = importlib.util.spec_from_file_location("checkpoints_make", DATA / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("double", [False, True])
def test_bitsandbytes_itself(make, double):
    pytest.importorskip("bitsandbytes")
    tensors, _ = make.bnb(double)
    expected = tensors.pop("expected")
    weight = read_weight(tensors, "layer")
    compare(weight, expected, "nf4")
    layer = make.bnb_linear(double)
    assert read_bnb_state(layer.weight, layer.weight.quant_state).dequantize().equal(weight.dequantize())


COMPRESSED = [
    "int4", "int4-zeros", "int8-packed", "int8", "int8-zeros", "fp8-tensor", "fp8-channel", "fp8-block", "nvfp4", "mxfp4",
]  # fmt: skip


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_itself(make, name):
    pytest.importorskip("compressed_tensors")
    assert sorted(COMPRESSED) == sorted(make.COMPRESSED)
    format, options = make.COMPRESSED[name]
    tensors, about = make.compressed(format, **options)
    expected = tensors.pop("expected")
    compare(read_weight(tensors, "layer", about["config"]), expected, name)


@pytest.mark.parametrize("kind", ["int8", "intx4", "intx8", "float8"])
def test_torchao_itself(make, kind):
    pytest.importorskip("torchao")
    weight = make.torchao_weight(kind)
    assert read_weight({"a.weight": weight}, "a").dequantize().equal(weight.dequantize())


def test_torchao_int4_itself(rng):
    int4 = pytest.importorskip("torchao.quantization.quantize_.workflows.int4.int4_tensor")
    numbers, scales = rng.integers(-8, 8, (32, 64)), scales_of(rng, 4, 32)
    packed = ((numbers[:, 0::2] & 15) | ((numbers[:, 1::2] & 15) << 4)).astype(np.uint8).view(np.int8)
    # Quantising needs another library; the class itself does not.
    scale, zero = tensor(scales, torch.bfloat16), torch.zeros(4, 32, dtype=torch.bfloat16)
    weight = int4.Int4Tensor(tensor(packed), scale, zero, [1, 16], torch.Size((32, 64)))
    check(read_weight({"weight": weight}, ""), numbers * scales.T.repeat(16, 1))
