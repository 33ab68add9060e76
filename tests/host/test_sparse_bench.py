"""The scripts that measure 2:4 and block-sparse weights: their rows, and the tables of their results."""

import json
import sys

import pytest
import torch

from benchmarks import blocks, plots, power, readme_tables, records, sparse, sparse_summary
from gemmery.lab import suites

HEADER = {
    "gpu": "NVIDIA H200", "torch": "2", "triton": "3.6.0", "cuda": "13", "commit": "c", "date": "2026-01-02T03", "seed": 7,
    "ours": "gemmery", "peers": [], "protocol": {"rounds": 3, "regimes": ["burst"]},
}  # fmt: skip


def entry(name, m, n, k, **peers):
    """A row of `sparse.py` in which gemmery takes 10 µs, or a microsecond less or more."""
    rounds = [
        {"gemmery": ours} | {x.replace("_", " "): y for x, y in peers.items()} for ours in (9.0, 10.0, 11.0)
    ]
    rounds = [{label: us * 1e-6 for label, us in one.items()} for one in rounds]
    return {
        "name": name, "M": m, "N": n, "K": k, "errors": {}, "config": "64x64", "predicted": {}, "seconds": {"burst": rounds},
    }  # fmt: skip


def of_blocks(row, seconds, **more):
    """A row of `blocks.py`."""
    seconds = {label: us * 1e-6 for label, us in seconds.items()}
    record = {
        "name": row.name,
        "M": row.M,
        "N": row.N,
        "K": row.K,
        "block": row.block,
        "sparsity": row.sparsity,
    }
    record |= {"op": row.op, "dtype": row.dtype, "dense": row.dense, "torch": row.torch}
    return {
        "row": record, "blocks": 8, "config": "256x64", "seconds": seconds, "speeds": {}, "failed": {}, "waits": [],
    } | more  # fmt: skip


SPARSE = [
    entry("decode 1x8192x8192", 1, 8192, 8192, torch=17.0, cusparselt=18.0, **{"64x64x64-config": 1.0}),
    entry("prefill 512x8192x8192", 512, 8192, 8192, torch=13.0, cusparselt=9.0),
    entry("fp8 fast 4096x11008x4096", 4096, 11008, 4096, torch=13.0, torch_rows=12.0, dense=14.0),
    entry("int4 decode 16x8192x8192", 16, 8192, 8192, torch=30.0, dense=9.0),
    entry("random decode 3x64x96", 3, 64, 96, torch=10.0, cusparselt=20.0),
    entry("random decode 5x64x96", 5, 64, 96, torch=40.0),
    entry("random prefill 1024x64x96", 1024, 64, 96, torch=12.0, cusparselt=20.0),
]
FIRST, SECOND, *_ = blocks.ROWS
RANDOM, *_ = blocks.random_rows(0)
BLOCKS = [
    of_blocks(FIRST, {"gemmery": 10.0, "cuBLAS, dense": 45.0, "torch, F.linear": 30.0, "torch, bsr_dense_addmm": 20.0}),
    {"row": of_blocks(SECOND, {})["row"], "wrong": "ValueError: off | by 1", "passed": False},
    of_blocks(RANDOM, {"gemmery": 10.0, "cuBLAS, dense": 30.0}),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A folder of results of both scripts with two versions of Triton."""
    write(tmp_path, "a", SPARSE)
    write(tmp_path, "b", [entry("decode 1x8192x8192", 1, 8192, 8192, torch=15.0)], triton="3.9.0")
    write(tmp_path, "c", BLOCKS, name="entries")
    return tmp_path


def write(folder, file, rows, name="rows", **header):
    path = folder / "sparse" / f"{file}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(HEADER | header | {name: rows}))


def cells(text):
    """The lines of tables as lists of cells."""
    return [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]


def test_lines_are_about_rows_that_are_measured():
    names = {row.name for row in (*sparse.SUITE, *blocks.ROWS)} | {""}
    lines = [line for page in sparse_summary.LINES.values() for line in page]
    named = {line.row for line in lines}
    assert named <= names | {name.removeprefix("bar: ") for name in names}
    for line in lines:
        assert line.suite in sparse_summary.SUITES
        assert set(line.peers) <= set(sparse_summary.SUITES[line.suite].values())
    # The bars of blocks are those that the script itself reports.
    for row in blocks.ROWS:
        own = [
            line for line in lines if line.suite == "blocks" and line.row == row.name.removeprefix("bar: ")
        ]
        assert [line.least or 0.0 for line in own] == [row.dense, row.torch], row.name


def test_groups_of_the_readme_are_of_these_suites():
    for group in records.SPARSE_GROUPS:
        assert set(group.suites) <= set(sparse_summary.SUITES)
        assert not set(group.suites) & set(suites.names())
        assert group.peer in {records.BEST, *sparse_summary.SUITES[group.suites[0]].values()}


def test_rows_are_divided_into_suites(folder):
    results = sparse_summary.read(folder)
    found = [
        (one["suite"], records.kind(one), [row["name"].partition(",")[0] for row in one["rows"]])
        for one in results
    ]
    assert found == [
        ("sparse", "bf16", ["decode 1x8192x8192", "prefill 512x8192x8192"]),
        ("sparse", "bf16, Triton 3.9", ["decode 1x8192x8192"]),
        ("sparse_codes", "mixed", ["int4 decode 16x8192x8192"]),
        ("sparse_fp8", "mixed", ["fp8 fast 4096x11008x4096"]),
        ("sparse_decode", "bf16, seed 7", ["random decode 3x64x96", "random decode 5x64x96"]),
        ("sparse_prefill", "bf16, seed 7", ["random prefill 1024x64x96"]),
        ("blocks", "mixed", ["blocks of 64", "blocks of 128"]),
        ("blocks_random", "mixed, seed 7", [RANDOM.name]),
    ]  # fmt: skip
    # Configs that were timed beside are no peers.
    assert results[0]["peers"] == ["dense torch", "cuSPARSELt"]
    ratio = results[0]["rows"][0]["summary"]["burst"]["ratio"]["dense torch"]
    assert ratio == {
        "median": pytest.approx(1.7),
        "min": pytest.approx(17 / 11),
        "max": pytest.approx(17 / 9),
    }


def test_all_files_are_written(folder, capsys):
    pages = {
        name: folder / f"{name}.md" for name in ("readme", "page", "grouped", "sparse", "blocks", "rows")
    }
    for path in pages.values():
        path.write_text(f"top\n{readme_tables.BEGIN}\nold\n{readme_tables.END}\n")
    options = [word for name, path in pages.items() for word in (f"--{name}", str(path))]
    # Without results of theirs, pages stay as they are.
    assert readme_tables.main(["--results", str(folder / "none"), *options]) == 0
    assert all("old" in pages[name].read_text() for name in ("grouped", "sparse", "blocks"))
    options += ["--results", str(folder)]
    assert readme_tables.main([*options, "--check"]) == 1
    assert readme_tables.main(options) == 0
    assert readme_tables.main([*options, "--check"]) == 0
    assert cells(pages["sparse"].read_text()) == [
        ["product", "against", "Triton 3.9", "Triton 3.6", "bar", "rows"],
        ["---", "---", "---:", "---:", "---", "---:"],
        ["bf16, 1×8192×8192", "dense torch", "**1.50** (1.36–1.67)", "**1.70** (1.55–1.89)",
         "≥ 1.55: **missed** with Triton 3.9", "1"],
        ["bf16, 1×8192×8192", "cuSPARSELt", "", "**1.80** (1.64–2.00)", "", "1"],
        ["bf16, 512×8192×8192", "dense torch", "", "**1.30** (1.18–1.44)", "≥ 1.20: met", "1"],
        ["bf16, 512×8192×8192", "cuSPARSELt", "", "**0.90** (0.82–1.00)", "≥ 1.00: **missed**", "1"],
        ["bf16, random models, 1 to 64 rows", "dense torch", "", "**2.00** · 1.30 · 1.00", "≥ 1.40: met", "2"],
        ["bf16, random models, 1 to 64 rows", "cuSPARSELt", "", "**2.00** · 2.00 · 2.00", "", "1"],
        ["bf16, random models, 1024 rows and more", "dense torch", "", "**1.20** · 1.20 · 1.20", "≥ 1.15: met", "1"],
        ["bf16, random models, 1024 rows and more", "cuSPARSELt", "", "**2.00** · 2.00 · 2.00", "", "1"],
        ["fp8 with fast sums, 4096×11008×4096", "dense torch or dense torch by rows", "", "**1.20** (1.09–1.33)",
         "≥ 1.05: met", "1"],
        ["int4 weights, 16×8192×8192", "dense gemmery", "", "**0.90** (0.82–1.00)", "≥ 1.05: **missed**", "1"],
    ]  # fmt: skip
    text = pages["blocks"].read_text()
    assert [line[1:] for line in cells(text)[2:]] == [
        ["dense cuBLAS", "**4.50** (4.50–4.50)", "≥ 4.00: met", "1"],
        ["torch's BSR", "**2.00** (2.00–2.00)", "≥ 1.30: met", "1"],
        ["dense cuBLAS", "failed", "≥ 1.40: **missed**", "0, 1 failed"],
        ["torch's BSR", "failed", "≥ 1.30: **missed**", "0, 1 failed"],
        ["dense cuBLAS", "**3.00** · 3.00 · 3.00", "", "1"],
    ]
    assert (
        "- NVIDIA H200, torch 2, Triton 3.6.0, CUDA 13, commit c, 2026-01-02, 3 rounds: 3 products." in text
    )
    assert "The bar is a goal for the ratio, set in advance." in text
    rows = pages["rows"].read_text()
    assert "## sparse_decode, bf16, seed 7" in rows
    assert (
        "sparse_decode, burst, dense torch: geometric mean **2.000**, 10th percentile 1.300, worst 1.000 ("
        in rows
    )
    assert (
        "x @ w.T, blocks of 128, 50 % zeros, bf16 | 4096×8192×8192 | failed: ValueError: off \\| by 1 |"
        in rows
    )
    assert [[line[0], line[-2]] for line in cells(pages["readme"].read_text())[2:]] == [
        ["random models, 2:4 weights, 1 to 64 rows, against dense cuBLAS", "**2.00** · 1.30 · 1.00"],
        ["the same, 1024 rows and more", "**1.20** · 1.20 · 1.20"],
        [
            "block-sparse (blocks of 64, 90 % zero), against the best of dense cuBLAS and torch",
            "**2.00** · 2.00 · 2.00",
        ],
    ]
    # A page that is not there is no error; a file that is no result is one.
    pages["blocks"].unlink()
    assert readme_tables.main([*options, "--check"]) == 0
    (folder / "sparse" / "odd.json").write_text("{}")
    assert readme_tables.main(options) == 2
    assert "sparse/odd.json is not a result of sparse.py or blocks.py" in capsys.readouterr().err


def test_the_picture_has_what_the_readme_has(folder):
    plots.draw_groups(sparse_summary.read(folder), folder / "groups.svg")
    assert "random models, 2:4 weights, 1 to 64 rows" in (folder / "groups.svg").read_text()


def test_what_was_measured_again_counts_once(folder):
    again = entry("decode 1x8192x8192", 1, 8192, 8192, torch=20.0)
    write(folder, "0", [again], date="2026-02-01")
    results = [one for one in sparse_summary.read(folder) if one["suite"] == "sparse"]
    line = sparse_summary.LINES["sparse"][0]
    found = sparse_summary.found(line, [one for one in results if one["triton"] == "3.6.0"])
    assert (found.count, found.figures["geomean"]) == ("1", pytest.approx(2.0))
    assert [len(one["rows"]) for one in results] == [1, 1, 1]


def test_rounds_of_blocks_are_taken_where_they_are_there(folder):
    rounds = [{"gemmery": us * 1e-6, "cuBLAS, dense": 40e-6, "64x64": 1e-6} for us in (8.0, 10.0, 20.0)]
    seconds = {"gemmery": 10.0, "cuBLAS, dense": 40.0, "torch, F.linear": 30.0, "64x64": 1.0}
    write(folder, "c", [of_blocks(FIRST, seconds, rounds=rounds, waits=["torch, F.linear"])], "entries")
    *_, result = sparse_summary.read(folder)
    assert result["rows"][0]["summary"]["burst"]["ratio"] == {
        "dense cuBLAS": {"median": pytest.approx(4), "min": pytest.approx(2), "max": pytest.approx(5)},
        # A call that waits for the GPU has one time for all rounds.
        "torch's BSR": {"median": pytest.approx(3), "min": pytest.approx(1.5), "max": pytest.approx(3.75)},
    }


def test_rows_are_listed_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["sparse.py", "--list", "--seed", "3", "--count", "2", "--rows", "int4,random"]
    )
    assert sparse.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert lines[0].startswith("Row(name='int4 decode 1x8192x8192', M=1, ")


@pytest.mark.parametrize("script", [sparse, blocks, power])
def test_without_a_gpu_nothing_is_measured(script, monkeypatch, capsys):
    name = script.__name__.removeprefix("benchmarks.")
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main() == 2
    assert capsys.readouterr().err == f"{name}: there is no GPU to measure\n"
