"""The bench of packed weights and scaled operands on CPU tensors, with stand-ins for what needs a GPU."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import gemmery
from benchmarks import records, suite_tables
from gemmery.formats import quantize
from gemmery.lab import bench, libraries, peers, suites
from gemmery.lab import inputs as inputs_of
from gemmery.lab.inputs import Bare, Unsuited, WrongResult, check, make_inputs
from gemmery.lab.results import fused_costs, summarise_row
from gemmery.lab.suites import Row
from tests.host.simulated import on

WEIGHT = Row("w", 24, 48, 256, weight="int4", call="linear")
SCALED = Row("s", 32, 256, 256, scales="row", dtype="fp8", call="matmul")


def made(row=WEIGHT, dtype=None):
    return make_inputs(row, dtype or row.dtype or "bf16", 3, "cpu")


# --- inputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [*suites.WEIGHTS, "int4/32", "int8/64"])
def test_a_packed_weight_is_compared_with_what_it_stands_for(weight):
    inputs = made(dataclasses.replace(WEIGHT, weight=weight))
    name, group = inputs.row.packing
    assert inputs.weight.format.name == name
    assert group is None or inputs.weight.group_size == group
    assert inputs.b.dtype == torch.bfloat16
    assert inputs.b.mT.is_contiguous()
    assert torch.equal(inputs.exact[1], inputs.weight.dequantize(torch.float32).mT)
    assert 0 < check(lambda: F.linear(inputs.a, inputs.b.mT), inputs, range(24)) < 4e-3
    # Another rounding of the same weight is another product.
    other = quantize(inputs.b.mT * 1.05, "nf4" if name == "int4" else "int4", group_size=32).dequantize()
    with pytest.raises(WrongResult, match="relative error"):
        check(lambda: F.linear(inputs.a, other), inputs, range(24))


def test_a_packed_weight_with_something_behind_it():
    inputs = made(dataclasses.replace(WEIGHT, epilogue="swiglu"))
    assert inputs.out.shape == (24, 24)
    assert check(peers.cublas(inputs), inputs, range(24)) < 1.2e-2
    inputs = made(dataclasses.replace(WEIGHT, epilogue="bias_gelu"))
    assert [x.shape for x in inputs.args] == [(48,)]
    assert check(peers.cublas(inputs), inputs, range(24)) < 1.2e-2


@pytest.mark.parametrize(
    ("scales", "kinds", "shapes"),
    [
        ("tensor", ("tensor", "tensor"), [(), ()]),
        ("row", ("row", "row"), [(32, 1), (256, 1)]),
        ("block", ("1x128", "128x128"), [(32, 2), (2, 2)]),
        ("mx", ("1x32", "1x32"), [(32, 8), (256, 8)]),
    ],
)
def test_scaled_operands(scales, kinds, shapes):
    inputs = made(dataclasses.replace(SCALED, scales=scales))
    assert tuple(x.kind for x in inputs.scaled) == kinds
    assert [tuple(x.scale.shape) for x in inputs.scaled] == shapes
    assert inputs.a.dtype == inputs.b.dtype == torch.float8_e4m3fn
    assert inputs.b.shape == (256, 256)
    assert inputs.b.stride() == (1, 256)
    assert inputs.out.dtype == torch.bfloat16
    a, b = inputs.exact
    assert check(lambda: a @ b, inputs, range(32)) < 4e-3
    # They stand for what was quantised, to within fp8's rounding.
    assert 0.9 < b.std() < 1.1
    with pytest.raises(WrongResult, match="relative error"):
        check(lambda: inputs.a.float() @ inputs.b.float(), inputs, range(32))


def test_blocks_of_a_weight_have_their_own_scales():
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    x[128:, :128] *= 1000
    data, scale = inputs_of.square_blocks(x)
    assert scale.shape == (2, 3)
    near = data.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert ((near - x).abs() <= 0.0625 * x.abs() + scale.max() * 2**-9).all()


def test_the_least_time_of_scaled_operands(monkeypatch):
    inputs = made(SCALED)
    device = SimpleNamespace(bandwidth=1e9, rate=lambda dtype: 1e30)
    monkeypatch.setattr(inputs_of.devices, "current", lambda _: device)
    assert inputs_of.least_seconds(inputs) == pytest.approx((32 * 256 + 256 * 256 + 32 * 256 * 2) / 1e9)
    device.rate = {torch.float8_e4m3fn: 1e6}.__getitem__
    assert inputs_of.least_seconds(inputs) == pytest.approx(SCALED.flops / 1e6)
    monkeypatch.setattr(inputs_of.devices, "current", lambda _: None)
    assert inputs_of.least_seconds(inputs) is None


# --- ours and torch -------------------------------------------------------------------------------------------------


def test_ours_gets_the_packed_weight(monkeypatch):
    seen = []
    for name in ("linear", "plan"):
        monkeypatch.setattr(gemmery, name, lambda *a, **words: seen.append((a, words)))
    for epilogue in ("", "bias_gelu"):
        inputs = made(dataclasses.replace(WEIGHT, epilogue=epilogue))
        peers.gemmery_call(inputs)()
        peers.gemmery_plan(inputs)
        for (a, weight), words in seen[-2:]:
            assert a is inputs.a
            assert weight is inputs.weight
            assert set(words) == ({"epilogue", "args"} if epilogue else set())


@pytest.mark.parametrize("kind", ["fp8", "fp8fast", "int8"])
def test_ours_gets_both_scaled_operands(monkeypatch, kind):
    seen = []
    monkeypatch.setattr(gemmery, "scaled_matmul", lambda *a, **words: seen.append((a, words)), raising=False)
    inputs = made(dataclasses.replace(SCALED, dtype=kind))
    peers.gemmery_call(inputs)()
    assert seen[0][0] == inputs.scaled
    assert seen[0][1] == ({"fast_accum": True} if kind == "fp8fast" else {})
    assert peers.gemmery_plan(inputs) is None


def one_block_size_scales(t, scale):
    """ATen's conditions, from ScaledBlas.cpp, on the scales of (R, K) numbers: of rows' parts or of square blocks."""
    rows, parts = t.shape[0], -(-t.shape[1] // 128)
    if scale.shape == (rows, parts) and scale.stride() == (1, rows):
        return "1x128"
    if scale.shape == (-(-rows // 128), parts) and scale.stride() == (-(-parts // 4) * 4, 1):
        return "128x128"
    return "none"


def test_mx_is_compared_with_the_same_numbers_in_bf16():
    inputs = made(dataclasses.replace(SCALED, scales="mx"))
    call = peers.cublas(inputs)
    assert [x.dtype for x in call.args] == [torch.bfloat16, torch.bfloat16]
    assert torch.equal(call.args[0].float(), inputs.exact[0])
    assert torch.equal(call.args[1].float(), inputs.exact[1])
    assert check(call, inputs, range(32)) < 4e-3
    assert check(peers.gemmery_call(inputs), inputs, range(32)) < 4e-3


@pytest.mark.parametrize("scales", [scales for scales in suites.SCALES if scales != "mx"])
@pytest.mark.parametrize("kind", ["fp8", "fp8fast"])
@pytest.mark.parametrize(("M", "K"), [(32, 512), (30, 384), (1, 1152), (36, 256)])
def test_torch_gets_scales_as_it_wants_them(monkeypatch, scales, kind, M, K):
    def scaled_mm(a, b, *, scale_a, scale_b, out_dtype, use_fast_accum):
        if scales == "block":
            assert a.shape[0] == -(-M // 4) * 4
            assert one_block_size_scales(a, scale_a) == "1x128"
            assert one_block_size_scales(b.mT, scale_b.mT) == "128x128"
            assert not use_fast_accum
            scale_a = scale_a.repeat_interleave(128, 1)
            scale_b = scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
        else:
            wanted = ((), ()) if scales == "tensor" else ((a.shape[0], 1), (1, b.shape[1]))
            assert (tuple(scale_a.shape), tuple(scale_b.shape)) == wanted
            assert scale_a.is_contiguous()
            assert scale_b.is_contiguous()
            assert use_fast_accum == (kind == "fp8fast")
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    inputs = made(dataclasses.replace(SCALED, scales=scales, dtype=kind, M=M, K=K))
    assert check(peers.cublas(inputs), inputs, range(M)) < 4e-3
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    assert check(peers.compiled(inputs), inputs, range(M)) < 4e-3


def test_int8_with_scales_is_timed_bare_and_checked_with_them(monkeypatch):
    inputs = made(dataclasses.replace(SCALED, dtype="int8"))
    call = peers.cublas(inputs)
    assert isinstance(call, Bare)
    assert call().dtype == torch.int32
    assert check(call, inputs, range(32)) < 4e-3
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    assert check(peers.compiled(inputs), inputs, range(32)) < 4e-3


def test_the_tutorials_have_no_quantized_operands():
    for inputs in (made(), made(SCALED)):
        with pytest.raises(Unsuited, match="two plain matrices"):
            peers.seed(inputs)


# --- other libraries ------------------------------------------------------------------------------------------------


@pytest.fixture
def tinygemm(monkeypatch):
    """tinygemm's two operators on the CPU: torch has the product there for numbers that are not in pairs."""
    aten = torch.ops.aten

    def convert(pairs, inner_tiles):
        assert (pairs.dtype, inner_tiles) == (torch.uint8, 8)
        assert pairs.is_contiguous()
        codes = torch.stack([pairs >> 4, pairs & 15], -1).flatten(-2)
        return aten._convert_weight_to_int4pack_for_cpu(codes.int(), inner_tiles)

    def multiply(a, tiles, group, parameters):
        assert parameters.is_contiguous()
        return aten._weight_int4pack_mm_for_cpu(a, tiles, group, parameters)

    monkeypatch.setattr(aten, "_convert_weight_to_int4pack", convert)
    monkeypatch.setattr(aten, "_weight_int4pack_mm", multiply)


@pytest.mark.parametrize("weight", ["int4", "int4/32"])
def test_tinygemm_multiplies_the_same_codes(tinygemm, weight):
    inputs = made(dataclasses.replace(WEIGHT, N=64, weight=weight))
    assert check(libraries.tinygemm(inputs), inputs, range(24)) < 4e-3


class FakeInt4:
    def __init__(self, tiles, parameters, block, shape):
        self.parts = tiles, block[1], parameters
        self.shape = shape

    @classmethod
    def __torch_function__(cls, func, types, args, kwargs=None):
        a, weight = args
        assert func is F.linear
        assert tuple(weight.shape) == (64, 256)
        tiles, group, parameters = weight.parts
        return torch.ops.aten._weight_int4pack_mm(a, tiles, group, parameters)


class FakeInt8:
    def __init__(self, qdata, scale, block_size, dtype):
        assert (qdata.dtype, scale.dtype, dtype) == (torch.int8, torch.float32, torch.bfloat16)
        assert tuple(scale.shape) == (qdata.shape[0], 1)
        assert block_size == [1, qdata.shape[1]]
        self.value = (qdata * scale).to(dtype)

    @classmethod
    def __torch_function__(cls, func, types, args, kwargs=None):
        return func(args[0], args[1].value)


def test_torchao_gets_the_same_codes(tinygemm, monkeypatch):
    fake = SimpleNamespace(Int4TilePackedTo4dTensor=FakeInt4, Int8Tensor=FakeInt8)
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(quantization=fake))
    monkeypatch.setitem(sys.modules, "torchao.quantization", fake)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for weight in ("int4", "int8"):
        inputs = made(dataclasses.replace(WEIGHT, N=64, weight=weight))
        assert check(libraries.torchao(inputs), inputs, range(24)) < 4e-3


class FakeGemlite:
    """gemlite's helpers, with what they say that their arguments mean."""

    def __init__(self, device, dtype):
        self.dtype = dtype

    def from_weights(self, W_q, scales, zeros=None, W_nbits=8, group_size=None):
        assert W_q.is_contiguous()
        if zeros is None:
            assert W_q.dtype in (torch.int8, torch.float8_e4m3fn)
            value = W_q.float() * scales
        else:
            assert (W_q.dtype, W_nbits, scales.dtype, zeros.dtype) == (torch.uint8, 4, self.dtype, self.dtype)
            assert W_q.max() < 16
            groups = W_q.float().unflatten(1, (-1, group_size))
            value = ((groups - zeros.float()[..., None]) * scales.float()[..., None]).flatten(1)
        return lambda x: F.linear(x, value.to(self.dtype))


@pytest.mark.parametrize("weight", ["int4", "int4/32", "int8", "e4m3"])
def test_gemlite_gets_the_same_codes(monkeypatch, weight):
    helper = SimpleNamespace(A16Wn=FakeGemlite, A16W8_INT8=FakeGemlite, A16W8_FP8=FakeGemlite)
    monkeypatch.setattr(libraries, "_gemlite", lambda: SimpleNamespace(helper=helper))
    inputs = made(dataclasses.replace(WEIGHT, weight=weight))
    assert check(libraries.gemlite(inputs), inputs, range(24)) < 4e-3


@pytest.mark.parametrize("name", ["torchao", "gemlite"])
def test_a_library_that_is_not_there_is_left_out_and_said_to_be(monkeypatch, name):
    libraries._gemlite.cache_clear()
    for module in [name, *(x for x in sys.modules if x.startswith(f"{name}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Unsuited, match=rf"{name}.* can't be imported: ModuleNotFoundError"):
        libraries.LIBRARIES[name](made())


@pytest.mark.parametrize("name", libraries.LIBRARIES)
def test_libraries_say_which_rows_they_have(name):
    method = libraries.LIBRARIES[name]
    for row in (SCALED, dataclasses.replace(WEIGHT, weight="nf4"), Row("plain", 8, 8, 8)):
        with pytest.raises(Unsuited, match=r"is measured on weights in int4"):
            method(made(row))
    with pytest.raises(Unsuited, match="has no epilogue"):
        method(made(dataclasses.replace(WEIGHT, epilogue="swiglu")))


def test_a_library_that_is_wrong_costs_no_row():
    inputs = made()
    exact = F.linear(inputs.a, inputs.b.mT)
    methods = {
        "gemmery": lambda _: lambda: exact,
        # Over the tolerance, but not over what is allowed to those that round more often.
        "tinygemm": lambda _: lambda: exact * 1.01,
        "gemlite": lambda _: lambda: exact * 1.1,
    }
    calls, errors, left_out = bench.make_calls(methods, inputs, range(24))
    assert set(calls) == set(errors) == {"gemmery", "tinygemm"}
    assert left_out["gemlite"].startswith("wrong result: relative error")
    with pytest.raises(WrongResult, match=r"^cublas: relative error"):
        bench.make_calls({"cublas": methods["tinygemm"]}, inputs, range(24))


# --- a whole suite, and its tables ----------------------------------------------------------------------------------


@pytest.fixture
def measured(gpu, watch, tmp_path):
    """Results of three rows of packed weights: ours takes 100 µs, 110 with something behind it, and torch 200."""

    def ours(seconds):
        return on(gpu, peers.cublas, "gemmery", seconds)

    rows = [
        dataclasses.replace(WEIGHT, name="bare"),
        dataclasses.replace(WEIGHT, name="fused", epilogue="bias_gelu"),
        dataclasses.replace(WEIGHT, name="fused alone", N=32, epilogue="swiglu"),
    ]
    return bench.run_suite(
        "lowbit_fused", rows=rows, regimes=["burst"], rounds=1, watch=watch, device="cpu", path=tmp_path / "r.json",
        ours=lambda inputs: ours(110e-6 if inputs.row.epilogue else 100e-6)(inputs),
        peers={"torch": on(gpu, peers.cublas, "torch", 200e-6)},
    )  # fmt: skip


def test_a_suite_of_packed_weights(measured):
    assert measured.failed == []
    assert [row["plan"] for row in measured.rows] == ["torch reference"] * 3
    assert [row["weight"] for row in measured.rows] == ["int4"] * 3
    assert Row.of(measured.rows[0]).packing == ("int4", 128)


def test_scaled_operands_have_no_plan_but_a_least_time(gpu, watch, monkeypatch):
    monkeypatch.setattr(bench, "least_seconds", lambda inputs: 50e-6)
    row = dataclasses.replace(SCALED, dtype="int8")
    measured = bench.run_suite(
        "scaled", rows=[row], dtype="mixed", regimes=["burst"], rounds=1, watch=watch, device="cpu",
        ours=on(gpu, lambda x: lambda: (x.exact[0] @ x.exact[1]).bfloat16(), "gemmery", 100e-6), peers={},
    )  # fmt: skip
    (record,) = measured.rows
    assert (record["plan"], record["roofline_us"]) == ("", 50)
    assert record["summary"]["burst"]["roofline"]["gemmery"] == pytest.approx(0.5, rel=0.01)


def test_fused_products_are_compared_with_bare_ones(measured):
    (cost,) = fused_costs(measured.rows, "burst")
    assert (cost.name, cost.bare) == ("fused", "bare")
    assert cost.ratio == pytest.approx(1.1, rel=0.01)
    assert fused_costs(measured.rows, "steady") == []
    result = {
        "suite": "lowbit_fused",
        "rows": measured.rows,
        **measured.header,
        "dtype": "bf16",
        "triton": "3.6.0",
    }
    text = "\n".join(suite_tables.lowbit([result]))
    assert "| fused | bare | burst | 110.0 | 100.0 | **1.100** |" in text
    assert "Fused / bare, burst: 1.100 in the geometric mean, 1.100 at most." in text
    text = "\n".join(suite_tables.lowbit([result | {"triton": "3.9.0"}]))
    assert "| fused | bare | burst, Triton 3.9 | 110.0 | 100.0 | **1.100** |" in text
    assert "Fused / bare, burst, Triton 3.9: 1.100 in the geometric mean" in text


def test_both_files_have_the_tables(measured, tmp_path):
    (result,) = records.read_results(tmp_path)
    summary = suite_tables.summary([result])
    assert "| torch | **1.877** | 1.818 | 1.818 (fused alone) |" in summary
    version = ".".join(result["triton"].split(".")[:2])
    assert f"| fused | bare | burst{'' if version == '3.6' else f', Triton {version}'} |" in summary
    rows = suite_tables.every_row([result])
    assert "## lowbit_fused, bf16" in rows
    assert "| fused alone | 24×32×256 |" in rows


def test_formats_are_set_beside_int4():
    def row(weight, M, us):
        times = {"gemmery": us * 1e-6, "cublas": 44e-6}
        return {
            "name": f"{weight} M={M}", "M": M, "N": 8192, "K": 8192, "weight": weight,
            "summary": {"burst": summarise_row({"burst": [times]}, 1, None, [])["burst"]},
        }  # fmt: skip

    rows = [row("int4", 16, 20.0), row("int4", 64, 22.0), row("nf4", 16, 23.0)]
    result = {
        "suite": "lowbit_formats", "dtype": "bf16", "triton": "3.9.0", "ours": "gemmery", "peers": ["cublas"],
        "protocol": {"regimes": ["burst"]}, "rows": rows,
    }  # fmt: skip
    heading, _, first, second = suite_tables.lowbit([result])[0].splitlines()
    assert heading == "| weights, 8192 × 8192 | regime | M = 16 | M = 64 |"
    assert first == "| int4 | burst, Triton 3.9 | 20.0, 2.20 | 22.0, 2.00 |"
    assert second == "| nf4 | burst, Triton 3.9 | 23.0, 1.91, +15% | – |"


def test_the_list_of_rows_says_how_they_are_quantized(capsys):
    request = bench.Request(["lowbit_fused", "scaled"], rows="swiglu M=16|row 4096")
    bench.show(request, bench.runs(request))
    shown = capsys.readouterr().out
    assert ", int4, swiglu, linear" in shown
    assert ", fp8fast, scales of row, matmul" in shown
