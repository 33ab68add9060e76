"""The suites, as data: what must be in them, how a wrong file is refused, how a row becomes tensors."""

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gemmery.formats import FORMATS
from gemmery.formats.scaled import BLOCK
from gemmery.lab import fusions, inputs, suites
from gemmery.lab.suites import Row


@pytest.mark.parametrize("name", suites.names())
def test_suites_are_valid(name):
    assert 1 <= len(suites.load(name)) <= suites.MOST_ROWS


def test_the_suites_of_the_protocol_are_there():
    wanted = {
        "square",
        "llm",
        "decode",
        "odd",
        "layouts",
        "views",
        "strided",
        "bmm",
        "dtypes",
        "invariant",
        "fused",
        "lowbit",
        "lowbit_formats",
        "lowbit_fused",
        "scaled",
        "scaled_accurate",
        "scaled_mx",
        "launch",
        "random_decode",
        "random_mid",
        "random_prefill",
        "random_backward",
        "random_invariant",
        "random_swiglu",
        "random_bias_gelu",
        "random_bias_residual",
        "random_int4_small",
        "random_int4",
        "random_fp8",
        "random_fp8_accurate",
        "random_fp8_blocks",
    }
    assert wanted == set(suites.whole())
    sizes = {1024, 1536, 2048, 3072, 4096, 5120, 6144, 8192, 12288, 16384}
    assert sizes <= {row.M for row in suites.load("square")}
    assert {row.M for row in suites.load("llm")} == {512, 1024, 2048, 4096, 8192}
    orders = {(row.a, row.b, row.M) for row in suites.load("layouts")}
    assert {(a, b, n) for a in ("row", "col") for b in ("row", "col") for n in (4096, 8192)} <= orders
    kinds = {(row.dtype, row.M) for row in suites.load("dtypes")}
    assert {
        (kind, n) for kind in ("int8", "tf32", "fp32", "fp64", "fp8", "fp8fast") for n in (4096, 8192)
    } <= kinds
    assert {row.call for row in suites.load("launch")} == set(suites.CALLS)


def test_parts_are_what_the_bars_speak_of():
    small, mid = suites.load("decode_small"), suites.load("decode_mid")
    assert {row.name for row in small + mid} == {row.name for row in suites.load("decode")}
    assert {row.M for row in small} == {1, 4, 8, 16, 32, 64}
    assert {96, 128, 192, 256, 384} == {row.M for row in mid}
    for part in (small, mid):
        assert len(part) >= 8
        assert len({row.name.split()[0] for row in part}) == 5
    assert {(row.a, row.b) for row in suites.load("layouts_plain")} == {
        ("row", "row"),
        ("col", "row"),
        ("col", "col"),
    }
    assert {(row.matrices, row.M, row.N, row.K) for row in suites.load("bmm_cubes")} == {
        (512, 128, 128, 128), (64, 1024, 1024, 1024), (4096, 64, 64, 64),
    }  # fmt: skip
    assert {row.name for row in suites.load("dtypes_int8_tf32")} == {
        "int8 4096",
        "int8 8192",
        "tf32 4096",
        "tf32 8192",
    }
    assert {row.call for row in suites.load("launch_out") + suites.load("launch_plan")} == {
        "matmul_out",
        "plan",
    }


def test_packed_weights_are_those_of_the_protocol():
    rows = suites.load("lowbit")
    assert {row.packing for row in rows} == {("int4", 128)}
    sizes = {
        (N, K): {row.M for row in rows if (row.N, row.K) == (N, K)} for _, _, N, K in map(shape_of, rows)
    }
    decode = {1, 16, 64, 256, 1024, 4096}
    assert sizes == {
        (8192, 8192): {1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192},
        (14336, 4096): decode,
        (4096, 14336): decode,
    }
    formats = {(row.weight, row.M) for row in suites.load("lowbit_formats")}
    assert formats == set(
        itertools.product(("int4", "int8", "e4m3", "mxfp4", "nvfp4", "nf4"), (16, 64, 512, 4096))
    )
    parts = [suites.load(name) for name in ("lowbit_small", "lowbit_mid", "lowbit_large")]
    assert sum(map(len, parts)) == len(rows)
    for name in suites.names():
        assert all(row.call == "linear" for row in suites.load(name) if row.weight)


def shape_of(row):
    return row.name, row.M, row.N, row.K


def test_each_fused_row_of_packed_weights_has_its_bare_one():
    rows = suites.load("lowbit_fused")
    bare = {(row.M, row.N, row.K, row.weight) for row in rows if not row.epilogue}
    fused = [row for row in rows if row.epilogue]
    assert {(row.epilogue, row.weight, row.M) for row in fused} == set(
        itertools.product(("swiglu", "bias_gelu"), ("int4", "e4m3"), (16, 512, 4096))
    )
    assert all((row.M, row.N, row.K, row.weight) in bare for row in fused)


def test_scaled_operands_are_those_of_the_protocol():
    shapes = {(4096, 4096, 4096), *((M, 8192, 8192) for M in (16, 64, 128, 512, 2048, 8192))}
    found = {}
    for row in suites.load("scaled") + suites.load("scaled_accurate"):
        found.setdefault((row.dtype, row.scales), set()).add((row.M, row.N, row.K))
    assert {key: found.pop(key) for key in itertools.product(("fp8", "fp8fast"), ("tensor", "row"))} == {
        key: shapes for key in itertools.product(("fp8", "fp8fast"), ("tensor", "row"))
    }
    assert found.pop(("fp8", "block")) == shapes
    assert {size for size, *_ in found.pop(("int8", "row"))} == {2048, 3072, 4096, 6144, 8192}
    assert not found
    assert {(row.dtype, row.scales) for row in suites.load("scaled_mx")} == {("fp8", "mx")}


def test_packing_of_a_weight():
    assert Row("x", 1, 2, 3, weight="int4").packing == ("int4", 128)
    assert Row("x", 1, 2, 3, weight="int4/32").packing == ("int4", 32)
    assert Row("x", 1, 2, 3, weight="nf4").packing == ("nf4", None)
    assert set(suites.WEIGHTS) == set(FORMATS)


def test_blocks_are_those_of_scaled_operands():
    """The suites say so without importing them, which needs torch."""
    assert suites.BLOCK == BLOCK


def test_the_invariant_suite_takes_from_both_of_its_sources():
    rows = suites.load("invariant")
    assert len(rows) == suites.MOST_ROWS
    assert all(row.batch_invariant for row in rows)
    names = {row.name for row in rows}
    assert len(names) == len(rows)
    for source in ("llm", "decode"):
        assert len(names & {row.name for row in suites.load(source)}) == len(rows) // 2


def test_every_suite_says_what_it_is():
    for name in suites.names():
        assert suites.about(name).endswith(".")
    assert suites.about("decode_mid") == "Part of decode."
    assert suites.about("random_mid").startswith("Products of random transformers, unless")
    assert "transformers with epilogue swiglu, call linear, unless" in suites.about("random_swiglu")
    assert "transformers with batch_invariant, unless" in suites.about("random_invariant")


def test_rows_come_back_from_their_records():
    for name in suites.whole():
        for row in suites.load(name):
            record = json.loads(json.dumps(dataclasses.asdict(row)))
            assert Row.of(record | {"plan": "x"}) == row


#: hidden size, feed-forward size, heads, key-value heads, head size.
MODELS = {
    "Llama-3-8B": (4096, 14336, 32, 8, 128),
    "Llama-3-70B": (8192, 28672, 64, 8, 128),
    "Qwen3-8B": (4096, 12288, 32, 8, 128),
    "Qwen3-32B": (5120, 25600, 64, 8, 128),
}


def projections(model):
    """(N, K) of each projection, from the model's configuration."""
    if model == "DeepSeek-V3":
        hidden, dense, expert, heads, q_rank, kv_rank, nope, rope, v = (
            7168,
            18432,
            2048,
            128,
            1536,
            512,
            128,
            64,
            128,
        )
        return {
            "qkv_a": (q_rank + kv_rank + rope, hidden),
            "q_b": (heads * (nope + rope), q_rank),
            "kv_b": (heads * (nope + v), kv_rank),
            "o": (hidden, heads * v),
            "gate_up": (2 * dense, hidden),
            "down": (hidden, dense),
            "shared_gate_up": (2 * expert, hidden),
            "shared_down": (hidden, expert),
        }
    hidden, inner, heads, kv_heads, size = MODELS[model]
    return {
        "qkv": ((heads + 2 * kv_heads) * size, hidden),
        "o": (hidden, heads * size),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


@pytest.mark.parametrize("name", ["llm", "decode"])
def test_projections_are_those_of_the_models(name):
    models = set()
    for row in suites.load(name):
        model, projection, m = row.name.split(" ")
        assert projections(model)[projection] == (row.N, row.K), row.name
        assert m == f"M={row.M}"
        models.add(model)
    assert models == {*MODELS, "DeepSeek-V3"}


def test_llm_large_is_the_large_part_of_llm():
    large, whole = suites.load("llm_large"), suites.load("llm")
    assert large == [
        row for row in whole if row.M >= 1024 and math.ceil(row.M / 128) * math.ceil(row.N / 256) >= 132
    ]
    assert 0 < len(large) < len(whole)


GOOD = {"name": "x", "M": 1, "N": 2, "K": 3}
LINEAR = GOOD | {"name": "y", "call": "linear"}
SCALED = GOOD | {"name": "y", "call": "matmul"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (7, r"^s.json, row 2: 7 given"),
        ({"name": "y", "M": 1, "N": 2}, r"^s.json, row 2: without K"),
        (GOOD | {"name": "y", "k": 3}, r"^s.json, row 2: unknown k"),
        (GOOD | {"name": ""}, r"^s.json, row 2: name is ''"),
        (GOOD, r"^s.json, row 2: there is already a row named 'x'"),
        (GOOD | {"name": "y", "M": 0}, r"^s.json, row 2 \(y\): M is 0"),
        (GOOD | {"name": "y", "M": True}, r"^s.json, row 2 \(y\): M is True"),
        (GOOD | {"name": "y", "K": 3.0}, r"^s.json, row 2 \(y\): K is 3.0"),
        (GOOD | {"name": "y", "batch": 4}, r"^s.json, row 2 \(y\): batch is 4"),
        (GOOD | {"name": "y", "a": "T"}, r"^s.json, row 2 \(y\): a is 'T'"),
        (GOOD | {"name": "y", "batch": [1, 2, 3, 4]}, r"^s.json, row 2 \(y\): batch is \[1, 2, 3, 4\]"),
        (GOOD | {"name": "y", "a": "x m k"}, r"^s.json, row 2 \(y\): a is 'x m k'"),
        (GOOD | {"name": "y", "a": "m n"}, r"^s.json, row 2 \(y\): a is 'm n'"),
        (GOOD | {"name": "y", "a": "m m k"}, r"^s.json, row 2 \(y\): a is 'm m k'"),
        (GOOD | {"name": "y", "a": "m k 0"}, r"^s.json, row 2 \(y\): a is 'm k 0'"),
        (GOOD | {"name": "y", "batch": [2], "out": "m n"}, r"^s.json, row 2 \(y\): out is 'm n'"),
        (GOOD | {"name": "y", "call": "mm"}, r"^s.json, row 2 \(y\): call is 'mm'"),
        (GOOD | {"name": "y", "batch_invariant": 2}, r"^s.json, row 2 \(y\): batch_invariant is 2"),
        (GOOD | {"name": "y", "dtype": "half"}, r"^s.json, row 2 \(y\): dtype is 'half'"),
        (LINEAR | {"weight": "int3"}, r"^s.json, row 2 \(y\): weight is 'int3'; .* int4/32"),
        (LINEAR | {"weight": "int4/x"}, r"^s.json, row 2 \(y\): weight is 'int4/x'"),
        (LINEAR | {"weight": "int4/0"}, r"^s.json, row 2 \(y\): weight is 'int4/0'"),
        (LINEAR | {"weight": 4}, r"^s.json, row 2 \(y\): weight is 4"),
        (LINEAR | {"weight": "int4", "b": "row"}, r"^s.json, row 2 \(y\): operands that are quantized"),
        (LINEAR | {"weight": "int4", "call": "plan"}, r"^s.json, row 2 \(y\): operands that are quantized"),
        (LINEAR | {"weight": "int4", "scales": "row"}, r"^s.json, row 2 \(y\): operands that are quantized"),
        (LINEAR | {"scales": "rows"}, r"^s.json, row 2 \(y\): scales is 'rows'"),
        (LINEAR | {"scales": "row", "dtype": "fp8"}, r"^s.json, row 2 \(y\): operands that are quantized"),
        (SCALED | {"scales": "row"}, r"^s.json, row 2 \(y\): scales are for dtype"),
        (
            SCALED | {"scales": "row", "dtype": "fp8", "epilogue": "bias"},
            r"^s.json, row 2 \(y\): scales are for",
        ),
    ],
)
def test_a_wrong_row_is_named(tmp_path, row, message):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"about": "", "rows": [GOOD, row]}))
    with pytest.raises(ValueError, match=message):
        suites.read(path)


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": []}', '{"about": "", "rows": []}'])
def test_a_wrong_file_is_named(tmp_path, text):
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^s\.json"):
        suites.read(path)


def test_too_many_rows_are_refused(tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"about": "", "rows": [GOOD | {"name": str(i)} for i in range(25)]}))
    with pytest.raises(ValueError, match="25 rows; there must be 1 to 24"):
        suites.read(path)


def test_an_unknown_suite_is_refused():
    with pytest.raises(ValueError, match="no suite 'squares'; there are bmm"):
        suites.load("squares")


def test_epilogues_are_those_that_are_measured():
    """The suites name them without importing what they are, which needs torch."""
    assert set(suites.EPILOGUES) == set(fusions.FUSIONS)
    assert {row.epilogue for row in suites.load("fused")} <= set(suites.EPILOGUES)


def test_spread_keeps_the_ends():
    rows = suites.load("llm")
    some = suites.spread(rows, 8)
    assert len({row.name for row in some}) == 8
    assert (some[0], some[-1]) == (rows[0], rows[-1])
    assert suites.spread(rows, 99) == rows
    assert suites.spread(rows, 1) == rows[:1]
    assert suites.spread(rows, 0) == []


def test_suites_need_neither_torch_nor_triton():
    code = (
        "import sys, types\n"
        "sys.modules['torch'] = sys.modules['triton'] = None\n"
        "lab = sys.modules['lab'] = types.ModuleType('lab')\n"  # gemmery itself needs torch
        f"lab.__path__ = [{str(Path(suites.__file__).parent)!r}]\n"
        "from lab import suites\n"
        "print(len(suites.load('square')), len(suites.load('random_mid')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(suites.load(name))) for name in ("square", "random_mid")]


# --- rows as tensors ------------------------------------------------------------------------------------------------


def empty(shape):
    """Strides without memory: suites have gigabytes."""
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize(
    ("layout", "strides"),
    [
        ("row", (48, 1)), ("col", (1, 32)), ("row+pad", (112, 1)), ("col+pad", (1, 96)),
        ("row+odd", (49, 1)), ("col+odd", (1, 33)), ("row+step", (96, 2)), ("col+step", (2, 64)),
        ("row+half", (24, 1)), ("col+half", (1, 16)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("batch", [(), (3,)])
def test_make_matrix(layout, strides, batch):
    matrix = inputs.make_matrix(batch, 32, 48, layout, torch.empty)
    assert matrix.shape == (*batch, 32, 48)
    assert matrix.stride()[-2:] == strides
    assert matrix.storage_offset() == (1 if layout.endswith("odd") else 0)


@pytest.mark.parametrize(
    ("order", "shape", "strides"),
    [
        ("x m y k", (2, 3, 8, 4), (96, 4, 12, 1)),  # (B, S, H, D) with heads first
        ("x m 5 y k", (2, 3, 8, 4), (480, 4, 60, 1)),  # the same in a buffer of five
        ("x m y k 7", (2, 3, 8, 4), (672, 28, 84, 7)),
        ("y k m", (3, 8, 4), (32, 1, 8)),  # shared by all of x
        ("x k m", (2, 1, 8, 4), (32, 32, 1, 8)),  # shared by all of y
        ("m k", (8, 4), (4, 1)),
    ],
)
def test_make_ordered(order, shape, strides):
    view = inputs.make_ordered({"x": 2, "y": 3, "m": 8, "k": 4}, order, torch.empty)
    assert view.shape == shape
    assert [step for step, size in zip(view.stride(), view.shape, strict=True) if size > 1] == [
        step for step, size in zip(strides, shape, strict=True) if size > 1
    ]
    assert view.storage_offset() == 0


def test_an_order_is_a_view_of_its_buffer():
    buffer = torch.arange(2 * 8 * 3 * 4).reshape(2, 8, 3, 4)
    view = inputs.make_ordered({"x": 2, "y": 3, "m": 8, "k": 4}, "x m y k", lambda _: buffer)
    assert torch.equal(view, buffer.transpose(1, 2))


@pytest.mark.parametrize("name", suites.whole())
def test_every_row_is_a_product(name):
    for row in suites.load(name):
        a, b, out = (inputs.make_operand(row, operand, empty) for operand in ("a", "b", "out"))
        assert torch.matmul(a, b).shape == out.shape == (*row.batch, row.M, row.N), row.name


def one_step(steps, sizes):
    """Whether batch dimensions can be walked through as one."""
    walked = [(step, size) for step, size in zip(steps, sizes, strict=True) if size > 1]
    return all(outer == inner * size for (outer, _), (inner, size) in itertools.pairwise(walked))


def copied_by_torch(matrix, batch):
    """Whether torch.matmul copies an operand: it reshapes a batch to one dimension, and BLAS wants for each matrix one
    stride of 1 and the other at least as long as the rows."""
    matrix = matrix.expand(*batch, *matrix.shape[-2:])
    *steps, row, col = matrix.stride()
    rows, cols = matrix.shape[-2:]
    blas = (col == 1 and row >= cols) or (row == 1 and col >= rows)
    return not blas or not one_step(steps, batch)


def test_views_are_what_torch_copies_for_all_their_unit_strides():
    for row in suites.load("views"):
        operands = [inputs.make_operand(row, operand, empty) for operand in ("a", "b", "out")]
        assert all(1 in operand.stride()[-2:] for operand in operands), row.name
        assert any(copied_by_torch(operand, row.batch) for operand in operands), row.name


@pytest.mark.parametrize("name", ["square", "llm", "decode", "layouts"])
def test_other_suites_are_not_copied(name):
    for row in suites.load(name):
        operands = [inputs.make_operand(row, operand, empty) for operand in ("a", "b", "out")]
        assert not any(copied_by_torch(operand, row.batch) for operand in operands), row.name


def test_the_rule_for_copies_is_that_of_reshape():
    """Where the batch dimensions have no common stride, torch.Tensor.reshape, which torch.matmul goes through, copies."""
    for order in ("x y m k", "x m y k", "m x y k", "x m 3 y k", "y x m k", "x m k"):
        matrix = inputs.make_ordered({"x": 2, "y": 3, "m": 8, "k": 4}, order, torch.empty)
        flat = matrix.expand(2, 3, 8, 4).reshape(6, 8, 4)
        assert copied_by_torch(matrix, (2, 3)) == (flat.data_ptr() != matrix.data_ptr()), order
