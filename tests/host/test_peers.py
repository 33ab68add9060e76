"""The methods of the bench on CPU tensors: that each makes the call it should, and leaves rows that it can't do."""

import dataclasses

import pytest
import torch

import gemmery
from gemmery.lab import peers, suites
from gemmery.lab.inputs import check, make_inputs
from gemmery.lab.suites import Row

ROW = Row("r", 24, 16, 32)


def made(row=ROW, dtype="fp32"):
    return make_inputs(row, dtype, 3, "cpu")


def shapes():
    """Small rows laid out like those of the suites, each layout once."""
    seen = {}
    for name in suites.whole():
        for row in suites.load(name):
            if row.quantized:
                continue
            batch = tuple(range(2, 2 + len(row.batch)))
            small = dataclasses.replace(row, M=24, N=16, K=32, batch=batch, batch_invariant=False, dtype=None)
            seen.setdefault((small.a, small.b, small.out, small.call, batch), small)
    return list(seen.values())


@pytest.mark.parametrize("row", shapes(), ids=lambda row: row.name)
@pytest.mark.parametrize("method", ["gemmery_call", "cublas"])
def test_every_layout_and_call(row, method):
    inputs = made(row)
    if row.call == "plan" and method == "gemmery_call":
        with pytest.raises(peers.Unsuited, match="no plan to hold"):
            peers.gemmery_call(inputs)
        return
    call = getattr(peers, method)(inputs)
    assert check(call, inputs, range(row.M)) < 1e-6


@pytest.mark.parametrize(
    ("row", "dtype", "asked"),
    [
        (ROW, "bf16", {}),
        (ROW, "tf32", {"precision": "tf32"}),
        (ROW, "fp8", {}),
        (ROW, "fp8fast", {"fast_accum": True}),
        (dataclasses.replace(ROW, batch_invariant=True), "bf16", {"batch_invariant": True}),
    ],
)
def test_ours_is_asked_for_what_differs_from_a_plain_call(monkeypatch, row, dtype, asked):
    seen = []
    for name in ("matmul", "linear", "plan"):
        monkeypatch.setattr(gemmery, name, lambda *_, **words: seen.append(words))
    inputs = made(row, dtype)
    peers.gemmery_call(inputs)()
    peers.gemmery_plan(inputs)
    assert seen == [{"out": inputs.out} | asked] * 2


def test_a_held_plan_is_called_and_nothing_else(monkeypatch):
    def plan(a, b, out):
        return torch.matmul(a, b, out=out)

    monkeypatch.setattr(gemmery, "plan", lambda *_, **__: plan)
    inputs = made(dataclasses.replace(ROW, call="plan"))
    call = peers.gemmery_call(inputs)
    monkeypatch.delattr(gemmery, "plan")
    monkeypatch.delattr(gemmery, "matmul")
    assert check(call, inputs, range(ROW.M)) < 1e-6


@pytest.mark.parametrize("dtype", suites.DTYPES)
def test_torch_has_a_product_for_every_type(dtype):
    inputs = made(Row("r", 32, 16, 32), dtype)
    assert check(peers.cublas(inputs), inputs, range(32)) <= inputs.kind.tolerance


@pytest.mark.parametrize(
    ("dtype", "name"), [("int8", "_int_mm"), ("fp8", "_scaled_mm"), ("fp8fast", "_scaled_mm")]
)
@pytest.mark.parametrize("method", ["cublas", "compiled"])
def test_torch_multiplies_no_batches_of_bytes(dtype, name, method):
    with pytest.raises(peers.Unsuited, match=f"torch.{name}"):
        getattr(peers, method)(made(dataclasses.replace(ROW, batch=(2,)), dtype))


def test_compile_searches_and_starts_anew_for_each_row(monkeypatch):
    seen = []

    def compile(function, **options):
        seen.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: seen.append("reset"))
    inputs = made()
    call = peers.compiled(inputs)
    assert seen == ["reset", {"mode": "max-autotune-no-cudagraphs", "dynamic": False, "fullgraph": True}]
    assert check(call, inputs, range(ROW.M)) < 1e-6


def test_names_of_the_peers():
    assert list(peers.PEERS) == [
        "cublas", "compile", "compile_default", "seed", "tinygemm", "torchao", "gemlite",
    ]  # fmt: skip
