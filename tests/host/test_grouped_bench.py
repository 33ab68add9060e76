"""The script that measures products of groups: its rows, its checks on the CPU, and the tables of its results."""

import itertools
import json
import math
import os
import random
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import grouped, grouped_peers, grouped_rows, grouped_summary, readme_tables
from benchmarks.grouped_peers import Liger, PatientStopwatch, Peers, Quack, Waiting
from benchmarks.grouped_rows import PARTS, Row
from gemmery.select.shapes import device_named

TINY = Row("tiny", 64, 32, 6, 2, 12, "gini 0.2")
OSS = Row("oss", 64, 32, 6, 2, 12, "uniform", "gpt-oss")


# --- rows -----------------------------------------------------------------------------------------------------------


def test_the_suite_has_what_bars_are_about():
    rows = grouped_rows.suite()
    assert len(rows) == 18
    by_name = {row.name: row for row in rows}
    assert by_name["Qwen3-30B T=64"].measures() == [*PARTS["bare"], "block", *PARTS["packed"], "routing"]
    assert by_name["Qwen3-30B T=64"].regimes() == ("graph", "burst")
    assert by_name["Qwen3-30B T=32768 zipf"].measures()[2:] == [
        *PARTS["gradients"],
        "block",
        "step",
        "memory",
    ]
    assert by_name["4 groups, 7168x4096"].measures() == ["up dW"]
    for kind in grouped_summary.KINDS:
        assert any(
            kind.has({"part": grouped_rows.part_of(what), "row": row.record()})
            for row in rows
            for what in row.measures()
        ), kind.title
    assert all(Row.of(row.record()) == row for row in rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": 3}, "unknown columns"),
        ({"also": ["everything"]}, "measures unknown everything"),
        ({"only": ["up dZ"]}, "measures unknown up dZ"),
        ({"style": "odd"}, "style 'odd'"),
        ({"k": 7}, "k at most E"),
        ({"imbalance": "gini"}, "imbalance is 'gini'"),
    ],
)
def test_rows_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        Row.of(TINY.record() | change)


def test_random_rows_are_those_of_their_seed():
    rows = grouped_rows.draw(5, 24)
    assert rows[:7] == grouped_rows.draw(5, 7)
    assert rows != grouped_rows.draw(6, 24)
    assert len({row.name for row in rows}) == 24
    assert all(1 <= row.T <= 256 for row in rows[::2])
    assert all(2048 <= row.T <= 32768 for row in rows[1::2])
    assert all(Row.of(row.record()) == row for row in rows)
    assert all(grouped_rows.needed_bytes(row, what) < 139 * 2**30 for row in rows for what in row.measures())


def gini(values):
    ranked = sorted(values)
    return (
        2 * sum((i + 1) * x for i, x in enumerate(ranked)) / len(ranked) / sum(ranked) - 1 - 1 / len(ranked)
    )


def test_shares_are_as_uneven_as_asked():
    assert grouped_rows.shares("uniform", 4, 0) == [0.25] * 4
    assert gini(grouped_rows.shares("gini 0.2", 4096, 1)) == pytest.approx(0.2, abs=0.02)
    hot = grouped_rows.shares("hot", 128, 1)
    assert (hot.count(0.0), max(hot)) == (40, pytest.approx(0.25))
    zipf = sorted(grouped_rows.shares("zipf", 8, 1), reverse=True)
    assert zipf[0] / zipf[3] == pytest.approx(4)
    assert sum(zipf) == pytest.approx(1)


@pytest.mark.parametrize("imbalance", ["uniform", "gini 0.2", "zipf", "hot", "near"])
def test_choices_are_of_experts(imbalance):
    row = Row("r", 64, 64, 16, 1 if imbalance == "near" else 4, 512, imbalance)
    top = grouped_rows.choices(row, 3)
    assert top.shape == (row.T, row.k)
    assert torch.equal(top, grouped_rows.choices(row, 3))
    counts = grouped_rows.counts_of(top, row.E)
    assert sum(counts) == row.rows
    if imbalance == "hot":
        assert (counts.count(0), max(counts) > 0.2 * row.rows) == (5, True)
    else:
        assert all(len(set(ids)) == row.k for ids in top.tolist())
    if imbalance == "near":
        assert all(0.5 * 32 < count < 2 * 32 for count in counts)


def test_bytes_and_turns():
    assert grouped_rows.touched([0, 3, 1]) == 2
    assert grouped_rows.floor_us([0, 3, 1, 0], 4 * 4_300_000) == pytest.approx(2.0)
    # Less than the cache holds is read once in four caches; more is read in one turn.
    assert grouped_rows.turns(60 << 20, 128, 32) == [0, 32, 64, 96]
    assert grouped_rows.turns(1, 128, 32)[:2] == [0, 4]
    assert grouped_rows.turns(1, 4, 32) == [0, 1, 2, 3]
    assert grouped_rows.turns(1 << 40, 128, 32) == [0]
    assert grouped_rows.moved([1, 2, 3, 4], 1) == [4, 1, 2, 3]
    assert not grouped_rows.batched_fits(Row("r", 4096, 14336, 8, 2, 256))


def test_sampled_rows_are_of_their_groups():
    counts = [0, 5, 0, 1, 40, 3, 0]
    found = grouped_rows.sampled(counts, random.Random(0))
    assert list(found) == [1, 3, 4, 5]
    assert found[3] == [5]
    assert {6, 45} <= set(found[4]) <= set(range(6, 46))
    assert grouped_rows.sampled([0, 0], random.Random(0)) == {}
    many = grouped_rows.sampled([1] * 100 + [7] + [2] * 100, random.Random(0))
    assert {0, 100, 200} <= set(many)
    assert len(many) <= 16


# --- measurements, on the CPU -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "what"),
    [(TINY, what) for what in itertools.chain(*PARTS.values()) if what != "memory"]
    + [(OSS, "block"), (OSS, "step")],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_every_method_computes_the_same(row, what):
    inputs = grouped.Inputs(row, 1, "cpu")
    with torch.set_grad_enabled(what == "step"):
        task = grouped.task_of(inputs, what)
        calls, errors, left_out = grouped.checked_calls(task)
    assert left_out == {}
    assert list(calls) == list(task.methods)
    assert next(iter(calls)) == "gemmery"
    assert all(0 < error < task.tolerance for error in errors.values())
    # Choices are moved where little is read.
    assert len(task.methods["gemmery"]) == (
        1 if grouped_rows.part_of(what) in ("gradients", "step", "routing") else 6
    )


def test_wrong_results_are_not_timed():
    task = grouped.bare(grouped.Inputs(TINY, 1, "cpu"), "up")
    right = task.methods["torch"]
    task.methods["torch"] = [lambda call=call: 1.1 * call() for call in right]
    assert "relative error" in grouped.checked_calls(task)[2]["torch"]
    task.methods["gemmery"] = [lambda call=call: call() * math.nan for call in right]
    with pytest.raises(grouped.WrongResult, match="not finite"):
        grouped.checked_calls(task)


def test_gradients_of_empty_groups_are_looked_at():
    row = Row("few", 64, 32, 8, 1, 3)
    inputs = grouped.Inputs(row, 1, "cpu")
    assert 0 in inputs.counts
    task = grouped.gradient(inputs, "up dW")
    grouped.checked_calls(task)
    right = task.methods["gemmery"][0]
    task.methods["gemmery"] = [lambda: right() + 1]
    with pytest.raises(grouped.WrongResult, match="empty group"):
        grouped.checked_calls(task)


def test_calls_come_in_turn():
    call = grouped.InTurn([lambda: 1, lambda: 2])
    assert [call() for _ in range(3)] == [1, 2, 1]


def test_plans_are_looked_up_without_a_gpu():
    device = device_named("NVIDIA H200")
    row = grouped_rows.suite()[0]
    with grouped.abstract(device), torch.no_grad():
        inputs = grouped.Inputs(row, 0, "meta")
        up, gathered = (grouped.task_of(inputs, what).plans()[0].problem for what in ("up", "block"))
    assert (up.M, up.N, up.K, up.matrices) == (8, 1536, 2048, 128)
    assert up.device == device
    assert gathered != up
    wanted = [
        (row, what)
        for row in (TINY, OSS)
        for what in (*row.measures(), "up dX", "down dW", "int4 up", "step")
    ]
    # Both have the same bare products, and blocks of their own. The second product of one is "down"; the other's has
    # a bias.
    assert len(grouped.problems_of(wanted, device)) == 5 + 1 + 2


# --- libraries ------------------------------------------------------------------------------------------------------


class QuackInTorch:
    """QuACK's functions as their documentation says, with its orders of rows, columns and sizes."""

    def __init__(self):
        self.tuned = []

    def gemm(self, A, B, bias=None, cu_seqlens_m=None, cu_seqlens_k=None, tuned=True):
        self.tuned.append(tuned)
        starts = cu_seqlens_k if cu_seqlens_m is None else cu_seqlens_m
        assert starts.dtype == torch.int32
        assert starts[0] == 0
        bounds = list(itertools.pairwise(starts.tolist()))
        if cu_seqlens_m is None:
            # Rows along M, and along N.
            assert (A.stride(0), B.stride(1)) == (1, 1)
            parts = [A[:, begin:end].float() @ B[begin:end].float() for begin, end in bounds]
            return torch.stack(parts).to(A.dtype)
        assert A.shape[0] == bounds[-1][1]
        parts = [A[begin:end].float() @ B[group].float() for group, (begin, end) in enumerate(bounds)]
        if bias is not None:
            parts = [part + bias[group].float() for group, part in enumerate(parts)]
        return torch.cat(parts).to(A.dtype)

    def gemm_gated(self, A, B, bias=None, activation=None, cu_seqlens_m=None, A_idx=None, store_preact=True,
                   concat_layout=None, tuned=True):  # fmt: skip
        assert A_idx.dtype == torch.int32
        assert not store_preact
        y = self.gemm(A[A_idx], B, bias, cu_seqlens_m, None, tuned).float()
        gate, up = y.chunk(2, -1) if concat_layout == ("B",) else (y[:, ::2], y[:, 1::2])
        if activation == "swiglu_oai":
            return None, (gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(A.dtype)
        assert activation == "swiglu"
        return None, (torch.nn.functional.silu(gate) * up).to(A.dtype)


class LigerInTorch:
    """Liger's function, whose gradients are torch's."""

    class LigerFusedMoEFunction:
        @staticmethod
        def apply(x, gate_up, down, index, weights):
            assert index.dtype == torch.int32
            return grouped.Experts(gate_up, down).by_groups(x, index.long(), weights)


def libraries(is_tuned=False):
    return Peers(
        is_tuned=is_tuned, quack=Quack(QuackInTorch(), is_tuned), liger=Liger(LigerInTorch(), is_tuned)
    )


@pytest.mark.parametrize(
    ("row", "what", "names"),
    [(TINY, what, ["quack"]) for what in (*PARTS["bare"], *PARTS["gradients"])]
    + [(TINY, "block", ["quack", "liger"]), (OSS, "block", ["quack", "liger"]), (TINY, "step", ["liger"])]
    + [(TINY, "int4 up", []), (TINY, "routing", [])],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "name", ""),
)
def test_libraries_compute_the_same(row, what, names):
    with torch.set_grad_enabled(what == "step"):
        task = grouped.task_of(grouped.Inputs(row, 1, "cpu"), what, libraries())
        calls, errors, left_out = grouped.checked_calls(task)
    assert [name for name in task.methods if grouped_summary.library_of(name)] == names
    without = {"liger": "NotImplementedError: Liger has no experts with biases"} if row is OSS else {}
    assert left_out == without
    assert set(calls) == set(errors) == set(task.methods) - set(without)
    # Only one of them waits for the GPU.
    assert [name for name, call in calls.items() if isinstance(call, Waiting)] == [
        name for name in names if name == "liger" and name not in without
    ]


def test_libraries_are_tuned_where_that_is_asked_for():
    for is_tuned in (False, True):
        peers = libraries(is_tuned)
        (call,) = grouped.gradient(grouped.Inputs(TINY, 1, "cpu"), "up dX", peers).methods[
            peers.name("quack")
        ]
        call()
        assert peers.quack.module.tuned == [is_tuned]
    assert peers.name("quack") == "quack-tuned"
    assert grouped_summary.library_of("quack-tuned") == "quack"
    assert grouped_summary.library_of("grouped_mm") == grouped_summary.library_of("gemmery") == ""


def test_tuning_starts_anew_for_each_block(monkeypatch):
    kernel = SimpleNamespace(configs=[1, 2], cache={(64, 32): 1})
    kernels = SimpleNamespace(kernel=kernel, other=3)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_moe_kernels", kernels)
    weights = grouped.Inputs(TINY, 1, "cpu").experts.tensors
    libraries().blocks(weights, has_gradient=True)
    assert kernel.cache
    libraries(is_tuned=True).blocks(weights, has_gradient=True)
    assert not kernel.cache


def test_libraries_are_found_or_said_to_be_absent(monkeypatch):
    monkeypatch.setenv("LIGER_FUSED_MOE_AUTOTUNE", "1")
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", QuackInTorch())
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", None)
    peers = grouped_peers.find()
    assert os.environ["LIGER_FUSED_MOE_AUTOTUNE"] == "0"
    assert (peers.quack is None, peers.liger, list(peers.versions)) == (False, None, ["quack"])
    assert "liger" in peers.absent
    assert str(peers).startswith("libraries: quack of an unknown version; no liger: ")
    assert str(grouped_peers.find([])) == "libraries: none"


def test_calls_that_wait_are_timed_but_in_no_graph(gpu):
    watch = PatientStopwatch(cuda=gpu, clock=gpu.clock, flush=gpu.flush)

    def waits():
        gpu.launch("first", 10e-6)
        gpu.synchronize()
        gpu.launch("second", 10e-6, host=40e-6)

    calls = {"gemmery": gpu.kernel("gemmery", 50e-6), "liger": Waiting(waits)}
    found, left_out = grouped.timed(calls, ["graph", "burst"], 2, 1, watch)
    assert [set(times) for times in found["graph"]] == [{"gemmery"}] * 2
    assert left_out == {"liger (graph)": grouped_peers.NO_GRAPH}
    # The GPU waits for the host between the two kernels, and that counts.
    assert all(times["liger"] == pytest.approx(60e-6) for times in found["burst"])
    assert all(times["gemmery"] == pytest.approx(50e-6) for times in found["burst"])
    with pytest.raises(RuntimeError, match="synchronize"):
        watch.cold(waits, 1)


def test_a_library_that_cannot_be_timed_is_left_out(gpu, watch):
    def fails():
        if gpu.capture is not None:
            raise RuntimeError("not while capturing")
        gpu.launch("quack", 70e-6)

    calls = {"gemmery": gpu.kernel("gemmery", 50e-6), "torch": gpu.kernel("torch", 60e-6), "quack": fails}
    found, left_out = grouped.timed(calls, ["graph", "burst"], 2, 1, watch)
    assert set(found["graph"][0]) == {"gemmery", "torch"}
    assert set(found["burst"][0]) == set(calls)
    assert left_out == {"quack (graph)": "RuntimeError: not while capturing"}
    # What is no library's fault stays an error.
    with pytest.raises(RuntimeError, match="capturing"):
        grouped.timed({"gemmery": fails}, ["graph"], 2, 1, watch)


# --- the command ----------------------------------------------------------------------------------------------------


def entry(row, what, times, **more):
    """One of a run in which rounds had these times in µs, by regime and method."""
    rounds = {regime: [{name: us * 1e-6 for name, us in each.items()}] * 3 for regime, each in times.items()}
    part = grouped_rows.part_of(what)
    return {
        "name": row.name,
        "measure": what,
        "part": part,
        "row": row.record(),
        "rounds": rounds,
        "us": times,
    } | more


def result(entries, triton="3.9.0", date="2026-01-02T03:04:05"):
    header = {"gpu": "G", "torch": "2", "triton": triton, "cuda": "13", "commit": "abc", "date": date}
    return header | {"protocol": {"rounds": 3}, "entries": entries}


def test_rows_are_listed_without_a_gpu(capsys, tmp_path):
    assert grouped.main(["--list", "--rows", "Mixtral|^9/", "--seed", "9", "--count", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == [f"Mixtral-8x7B T={T}" for T in (1, 64, 4096)]
    assert lines[-1].startswith("5 rows, ")
    path = tmp_path / "known.json"
    row = grouped_rows.suite()[0]
    path.write_text(
        json.dumps(result([entry(row, "up", {}), entry(row, "down", {}) | {"us": None, "error": "no"}]))
    )
    options = ["--rows", "T=1$", "--parts", "bare", "--without", str(path)]
    wanted = [(row.name, what) for row, what in grouped.wanted_of(grouped.arguments_of(options))]
    assert ("Qwen3-30B T=1", "up") not in wanted
    assert ("Mixtral-8x7B T=1", "up") in wanted


@pytest.fixture
def run(monkeypatch, gpu, watch, tmp_path):
    """Runs the command on the CPU, its two rows timed by a simulated GPU; gives its status and what it wrote."""
    times = {"gemmery": 100e-6, "torch": 150e-6, "grouped_mm": 200e-6, "batched_mm": 300e-6, "bf16": 250e-6}
    real_inputs, real_task = grouped.Inputs, grouped.task_of

    def task_of(inputs, what, peers=grouped.NONE):
        if inputs.row.name == "broken" and what == "down":
            raise RuntimeError("no kernel")
        task = real_task(inputs, what, peers)
        for name, calls in task.methods.items():
            # Results do not change: thousands of timed calls need not compute them again.
            results = [call() for call in calls]
            task.methods[name] = [
                lambda name=name, result=result: [gpu.launch(name, times[name]), result][1]
                for result in results
            ]
        return task

    small = [Row("small", 64, 32, 6, 2, 64), Row("broken", 64, 32, 6, 2, 2048, only=("up", "down", "step"))]
    monkeypatch.setattr(grouped_rows, "suite", lambda: small)
    monkeypatch.setattr(grouped, "Inputs", lambda row, seed: real_inputs(row, seed, "cpu"))
    monkeypatch.setattr(grouped, "task_of", task_of)
    monkeypatch.setattr(grouped, "PatientStopwatch", lambda: watch)
    monkeypatch.setenv("LIGER_FUSED_MOE_AUTOTUNE", "1")
    monkeypatch.setattr(grouped, "describe_run", lambda *given: result([]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 30))
    path = tmp_path / "out.json"

    def main(*words):
        status = grouped.main(["--processes", "0", "--rounds", "2", "--output", str(path), *words])
        return status, json.loads(path.read_text())

    return main


@pytest.mark.slow
def test_a_run_is_written(run, capsys, monkeypatch):
    status, data = run("--inputs", "3")
    assert status == 1
    entries = {(one["name"], one["measure"]): one for one in data["entries"]}
    names = ["up", "down", "block", "int4 up", "int4 down", "mxfp4 up", "mxfp4 down", "routing"]
    assert list(entries) == [("small", name) for name in names] + [
        ("broken", name) for name in ("up", "down", "step")
    ]
    assert entries["broken", "down"]["error"] == "RuntimeError: no kernel"
    up = entries["small", "up"]
    assert list(up["us"]) == ["graph", "burst"]
    assert grouped_summary.best_ratio(up, "graph") == pytest.approx(1.5, rel=0.05)
    assert up["errors"].keys() == {"gemmery", "torch"}
    assert (up["turns"], up["touched"]) == (6, 6)
    # Libraries are no dependency of anything: here they are not installed.
    assert data["libraries"] == {}
    assert list(data["absent"]) == list(grouped_summary.LIBRARIES)
    assert grouped_summary.best_ratio(entries["small", "int4 up"], "burst") == pytest.approx(2.5, rel=0.05)
    assert list(entries["broken", "step"]["rounds"]) == ["burst"]
    assert "against Hugging Face's best: 1 rows, mean" in capsys.readouterr().out
    # What does not fit is left out, with the reason; nothing is begun behind the limit.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 1000))
    status, data = run("--rows", "small", "--parts", "bare")
    assert status == 0
    assert [one["skipped"] for one in data["entries"]] == ["needs about 0 GiB, 0 are free"] * 2
    status, data = run("--limit", "-1")
    assert (status, data["entries"]) == (0, [])
    assert "11 of 11 measurements were not begun" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--parts", "bare,odd"], ["--peers", "odd"], ["--no-suite"]])
def test_options_are_checked(words, capsys):
    with pytest.raises(SystemExit):
        grouped.main(words)
    assert words[0] in capsys.readouterr().err


def test_a_line_says_what_was_measured():
    one = entry(
        TINY,
        "up",
        {"graph": {"gemmery": 10.0, "torch": 15.0}},
        floor_us=5.0,
        configs=["c"],
        left_out={"compile": "why"},
    )
    line, other = grouped.line_of(one).splitlines()
    assert line.split() == [
        "tiny",
        "up",
        "graph",
        "gemmery",
        "10.0",
        "torch",
        "15.0",
        "ratio",
        "1.500",
        "floor",
        "0.50",
        "c",
    ]
    assert other.endswith("without compile: why")
    assert grouped.line_of({"name": "a", "measure": "up", "skipped": "large"}).endswith("skipped: large")


# --- tables ---------------------------------------------------------------------------------------------------------

FEW, MANY = Row("few", 64, 32, 6, 2, 64), Row("many", 64, 32, 6, 2, 32768)
ENTRIES = [
    entry(FEW, "up", {"graph": {"gemmery": 10.0, "torch": 20.0, "compile": 16.0}, "burst": {"gemmery": 1.0, "torch": 9.0}}, floor_us=7.0),
    entry(FEW, "down", {"graph": {"gemmery": 10.0, "torch": 12.5}}, floor_us=4.0),
    entry(MANY, "up", {"burst": {"gemmery": 10.0, "torch": 11.0}}),
    entry(MANY, "down", {}, error="RuntimeError: no | kernel"),
    entry(FEW, "routing", {"graph": {"gemmery": 9.0, "torch": 40.0}}),
    entry(MANY, "memory", {}, bytes={"gemmery": 2 << 20, "grouped_mm": 3 << 20}),
]  # fmt: skip


def test_values_of_an_entry():
    assert grouped_summary.best_ratio(ENTRIES[0], "graph") == pytest.approx(1.6)
    assert grouped_summary.best_ratio(ENTRIES[0], "burst") == pytest.approx(9)
    assert grouped_summary.floor_share(ENTRIES[0], "graph") == pytest.approx(0.7)
    assert grouped_summary.ours_us(ENTRIES[4], "graph") == pytest.approx(9)
    assert grouped_summary.memory_ratio(ENTRIES[5], "") == pytest.approx(1.5)
    for value in (grouped_summary.best_ratio, grouped_summary.floor_share, grouped_summary.ours_us):
        assert value(ENTRIES[3], "burst") is None


def test_kinds_have_their_bars():
    found = {kind.title: grouped_summary.figures(kind, ENTRIES) for kind in grouped_summary.KINDS}
    verdicts = {
        kind.title: grouped_summary.verdict(kind, found[kind.title])
        for kind in grouped_summary.KINDS
        if found[kind.title]
    }
    assert verdicts == {
        "up and down, T ≥ 2048, against the best of torch": "≥ 1.05, 0.97: **missed**",
        "up and down, T ≤ 256, against the best of torch": "≥ 1.40, 1.10: met",
        "the same, against one read of the used weights at 4.3 TB/s": "≥ 0.65, 0.50: **missed**",
        "route and combine, T = 64, in µs": "≤ 12: met",
        "peak memory of forward and backward, T = 32768, against the least of torch": "> 1: met",
    }
    few = found["up and down, T ≤ 256, against the best of torch"]
    assert (few.geomean, few.worst) == (pytest.approx(2**0.5), pytest.approx(1.25))
    assert (few.worst_row, few.count) == ("few, down", "2")
    # A row that failed keeps the bar from being met.
    assert found["up and down, T ≥ 2048, against the best of torch"].count == "1, 1 failed"
    report = grouped_summary.report(ENTRIES)
    assert (
        "T ≤ 256, against the best of torch: 2 rows, mean 1.414 p10 1.285 worst 1.250 (few, down) ≥ 1.40, 1.10: met"
        in report
    )
    assert grouped_summary.report([]) == "nothing was measured"
    assert "1 failed" in grouped_summary.report(ENTRIES[3:4])


def test_libraries_are_lines_of_their_own():
    times = {"burst": {"gemmery": 10.0, "torch": 12.0, "quack": 9.0, "quack-tuned": 8.0}}
    entries = [
        entry(MANY, "up", times),
        entry(MANY, "memory", {}, bytes={"gemmery": 4, "grouped_mm": 8, "liger": 6}, left_out={"x": "y"}),
    ]
    found = {kind.title: grouped_summary.figures(kind, entries) for kind in grouped_summary.KINDS}
    assert {title: figures.worst for title, figures in found.items() if figures} == {
        "up and down, T ≥ 2048, against the best of torch": pytest.approx(1.2),
        "up and down, T ≥ 2048, against QuACK": pytest.approx(0.8),
        "peak memory of forward and backward, T = 32768, against the least of torch": pytest.approx(2),
        "peak memory of forward and backward, T = 32768, against Liger": pytest.approx(1.5),
    }
    # The best peer of a row is the best of all.
    assert grouped_summary.best_ratio(entries[0], "burst") == pytest.approx(0.8)
    assert grouped_summary.row_lines(entries)[0][4] == "quack-tuned"
    assert "without x: y" in grouped.line_of(entries[1])


def test_what_was_measured_again_counts_once():
    older = result([ENTRIES[2], ENTRIES[4]], date="2026-01-01")
    again = entry(MANY, "up", {"burst": {"gemmery": 10.0, "torch": 12.0}})
    newer = result([again, {"skipped": "large"}], date="2026-01-03")
    pooled = grouped_summary.pooled([older, newer, result([ENTRIES[0]], "3.10.1")])
    assert list(pooled) == ["3.10", "3.9"]
    assert pooled["3.9"] == [again, ENTRIES[4]]


def test_tables_are_written_where_there_are_results(tmp_path):
    folder = tmp_path / "results"
    pages = {name: tmp_path / f"{name}.md" for name in ("readme", "page", "grouped", "rows")}
    for name in ("readme", "page", "grouped"):
        pages[name].write_text(f"top\n{readme_tables.BEGIN}\nold\n{readme_tables.END}\n")
    options = ["--results", str(folder)]
    options += [word for name, path in pages.items() for word in (f"--{name}", str(path))]
    assert readme_tables.main(options) == 0
    assert "old" in pages["grouped"].read_text()
    for version in ("3.6.0", "3.9.0"):
        grouped.save(folder / "grouped" / f"{version}.json", result(ENTRIES, version), ENTRIES)
    assert readme_tables.main([*options, "--check"]) == 1
    assert readme_tables.main(options) == 0
    assert readme_tables.main([*options, "--check"]) == 0
    text = pages["grouped"].read_text()
    assert "| products and peer | Triton 3.9 | Triton 3.6 | rows |" in text
    assert (
        "| up and down, T ≤ 256, against the best of torch | **1.41** · 1.25 | **1.41** · 1.25 | 2 |" in text
    )
    assert "| route and combine, T = 64, in µs | **9.0** · 9.0 | **9.0** · 9.0 | 1 |" in text
    assert "G, torch 2, Triton 3.6.0" in text
    rows = pages["rows"].read_text()
    assert "## grouped, Triton 3.9" in rows
    assert "| few | up | graph | 10.0 | compile | 16.0 | 1.600 | 0.70 |" in rows
    assert "| many | down | failed: RuntimeError: no \\| kernel |" in rows
    assert "| many | memory | peak | 2 MiB | grouped_mm | 3 MiB | 1.500 |" in rows
    # A page that is not there yet is no error; a file that is no result is one.
    pages["grouped"].unlink()
    assert readme_tables.main([*options, "--check"]) == 0
    (folder / "grouped" / "odd.json").write_text("{}")
    assert readme_tables.main(options) == 2
