"""A linear layer with an adapter through the interpreter, and the kernel that unpacks its weight."""

import pytest
import torch

import gemmery
from gemmery import lora
from gemmery.operands.packed import LowRank, unpacked
from tests.lora import CASES, WEIGHTS, errors, inputs

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("format", ["dense", "int4", "nf4"])
def test_result_and_gradients(format, case):
    assert max(errors(*inputs((3, 7), 48, 200, 8, BF16, format=format, adapter=F32, case=case))) < 1e-2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("format", ["int4", "nf4", "nvfp4", "e4m3"])
def test_the_backward_pass_adds_the_adapter_to_the_unpacked_weight(format, case, monkeypatch):
    merged = []
    monkeypatch.setattr(lora, "unpacked", lambda *given: merged.append(len(given)) or unpacked(*given))
    assert max(errors(*inputs((3, 47), 48, 136, 8, BF16, format=format, adapter=F32, case=case))) < 1e-2
    # With the adapter; where a multiplies another matrix, without.
    assert merged == ([1] if "dropout" in case else [2])


def test_an_adapter_much_smaller_than_the_weight_changes_the_result():
    x, weight = torch.randn(160, 128).bfloat16(), gemmery.quantize(torch.ones(32, 128), "int4", group_size=64)
    a, b = torch.randn(4, 128).bfloat16().float(), torch.randn(32, 4)
    # At most half a unit in the last place of ones.
    b *= 2.0**-9 / (b @ a).abs().max()
    with torch.no_grad():
        without = gemmery.linear(x, weight).double()
        found = gemmery.lora_linear(x, weight, a, b).double() - without
    wanted = x.double() @ a.bfloat16().double().T @ b.bfloat16().double().T
    assert float((found * wanted).sum() / wanted.square().sum()) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("rank", [1, 5, 40, 100])
def test_a_product_of_low_rank_is_added_before_rounding(rank):
    dense, left, right = torch.randn(40, 200), torch.randn(40, rank).half(), torch.randn(rank, 200).half()
    weight = gemmery.quantize(dense, "int4", group_size=128, dtype=F16)
    found = unpacked(weight, LowRank(left, right, 1e-3))
    wanted = weight.dequantize(F64) + 1e-3 * left.double() @ right.double()
    torch.testing.assert_close(found.double(), wanted, rtol=2.0**-10.9, atol=1e-6)


@pytest.mark.parametrize("format", sorted(set(WEIGHTS) - {"dense", "int4", "nf4"}))
def test_formats(format):
    assert max(errors(*inputs(5, 32, 128, 4, F16, format=format))) < 2e-3


@pytest.mark.parametrize(("dtype", "limit"), [(F32, 1e-6), (F64, 1e-14)], ids=str)
def test_types(dtype, limit):
    assert max(errors(*inputs(21, 48, 40, 3, dtype, case="bias, dropout"))) < limit


def test_a_row_has_the_same_bits_in_every_batch():
    x, weight, others = inputs(37, 32, 128, 8, BF16, format="int4")
    with torch.no_grad():
        whole = gemmery.lora_linear(x, weight, **others, batch_invariant=True)
        for rows in (slice(0, 1), slice(5, 9)):
            part = gemmery.lora_linear(x[rows], weight, **others, batch_invariant=True)
            assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("int4", {}), ("int4", {"group_size": 32, "symmetric": False}), ("int4", {"group_size": 128}), ("int8", {}),
        ("int8", {"group_size": 16}), ("nf4", {"group_size": 16}), ("mxfp4", {}), ("nvfp4", {}), ("e4m3", {}),
        ("e5m2", {}),
    ],
)  # fmt: skip
def test_an_unpacked_weight_has_the_bits_that_it_stands_for(format, options, dtype):
    for shape in ((40, 200), (2, 16, 64), (1, 300)):
        weight = gemmery.quantize(torch.randn(shape), format, dtype=dtype, **options)
        assert torch.equal(unpacked(weight), weight.dequantize()), shape
    assert unpacked(gemmery.quantize(torch.randn(0, 64), format, dtype=dtype, **options)).shape == (0, 64)
