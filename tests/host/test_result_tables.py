"""The scripts that turn results into tables and pictures."""

import json
import math
import shutil

import pytest
import torch

from benchmarks import plots, readme_tables, records, suite_tables
from gemmery.lab import suites
from gemmery.lab.peers import Unsuited, cublas, gemmery_call
from tests.host.simulated import on, suite


@pytest.fixture
def results(gpu, watch, tmp_path, monkeypatch):
    """A folder with two results, one of which has a failed row and a peer left out of one, and two files with marks."""
    monkeypatch.setenv("GEMMERY_COMMIT", "abc1234")

    def failing(inputs):
        if inputs.a.dim() == 3:
            raise RuntimeError("no | kernel\nfits")
        return gemmery_call(inputs)

    def picky(inputs):
        if inputs.row.name == "odd":
            raise Unsuited("too | odd")
        return cublas(inputs)

    folder = tmp_path / "results"
    two = {"torch": on(gpu, cublas, "torch", 150e-6), "picky": on(gpu, picky, "picky", 300e-6)}
    suite(gpu, watch, path=folder / "a.json", ours=on(gpu, failing, "gemmery", 200e-6), peers=two, rounds=1)
    result = suite(gpu, watch, path=folder / "b.json", rounds=1, regimes=["burst"])
    result.suite = "square"
    result.dtype = "fp16"
    result.header["triton"] = "3.6.0"
    result.save(folder / "b.json")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{readme_tables.BEGIN}\nold\n{readme_tables.END}\nafter\n")
    page, rows = tmp_path / "results.md", tmp_path / "RESULTS.md"
    page.write_text(f"top\n{readme_tables.BEGIN}\nold\n{readme_tables.END}\nbottom\n")
    options = ["--results", str(folder), "--readme", str(readme), "--page", str(page), "--rows", str(rows)]
    return options, page, rows, folder


def table(text):
    """The cells of the first table of a text, without its rule."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [line.replace("\\|", "¦")[2:-2].split(" | ") for line in lines]
    return [cells[0], *cells[2:]]


def test_all_files_are_written_and_checked(results):
    options, page, rows, folder = results
    readme = folder.parent / "README.md"
    assert readme_tables.main([*options, "--check"]) == 1
    assert "old" in readme.read_text()
    assert "old" in page.read_text()
    assert not rows.exists()
    assert readme_tables.main(options) == 0
    for path, first, last in ((readme, "before\n", "after\n"), (page, "top\n", "bottom\n")):
        text = path.read_text()
        assert text.startswith(first)
        assert text.endswith(last)
        assert "old" not in text
    assert readme_tables.main([*options, "--check"]) == 0
    before = [path.read_text() for path in (readme, page, rows)]
    assert readme_tables.main(options) == 0
    assert [path.read_text() for path in (readme, page, rows)] == before
    for path in (page, rows):
        good = path.read_text()
        path.write_text(good.replace("0.750", "1.750"))
        assert readme_tables.main([*options, "--check"]) == 1
        path.write_text(good)


def test_the_summary_has_a_line_for_every_regime_and_peer(results):
    options, page, _, _ = results
    assert readme_tables.main(options) == 0
    head, square, *tiny = table(page.read_text())
    assert head == [
        "suite", "against", "geometric mean", "10th percentile", "worst row", "type", "regime", "rows", "bar",
    ]  # fmt: skip
    # Three rows are fewer than the suite has, and one below its bar is kept.
    assert square == [
        "square", "torch", "**0.750**", "0.750", "0.750 (batched)", "fp16", "burst",
        f"3 of {len(suites.load('square'))}", "≥ 1.01, 0.96: **missed**",
    ]  # fmt: skip
    assert [[line[1], *line[6:8], line[2]] for line in tiny] == [
        ["torch", "burst", "2, 1 failed", "**0.750**"],
        ["picky", "burst", "1, 1 failed", "**1.500**"],
        ["the best", "burst", "2, 1 failed", "**0.750**"],
        ["torch", "steady", "2, 1 failed", "**0.750**"],
        ["picky", "steady", "1, 1 failed", "**1.500**"],
        ["the best", "steady", "2, 1 failed", "**0.750**"],
    ]
    text = page.read_text()
    assert f"torch {torch.__version__}" in text
    assert "commit abc1234" in text
    assert "square fp16" in text


def ratios_of(suite_name, ratios, triton="3.6.0", **more):
    """A result whose rows have these ratios, row by row."""
    data = result(suite_name, bool, 1.0) | {"triton": triton, **more}
    data["rows"] = data["rows"][: len(ratios)]
    for row, ratio in zip(data["rows"], ratios, strict=True):
        row["summary"]["burst"]["ratio"]["cublas"] = dict.fromkeys(("median", "min", "max"), ratio)
    return data


def test_the_readme_has_few_lines_with_the_newest_triton_first():
    data = [
        ratios_of("llm", [0.9, 1.1, 1.0], "3.6.0"), ratios_of("decode", [1.0, 2.0], "3.6.0"),
        ratios_of("decode", [1.25], "3.10.0"), ratios_of("decode", [1.5], "3.9.0"),
        ratios_of("square", [9.0]), ratios_of("decode", [9.0], "3.9.0", tuned=True),
    ]  # fmt: skip
    head, llm, decode = table(suite_tables.few_lines(data))
    assert head == ["products and peer", "Triton 3.10", "Triton 3.9", "Triton 3.6", "rows"]
    assert llm[1:] == ["", "", "**1.00** · 0.92 · 0.90", "3"]
    assert decode[1:] == [
        "**1.25** · 1.25 · 1.25",
        "**1.50** · 1.50 · 1.50",
        "**1.41** · 1.10 · 1.00",
        "1 or 2",
    ]


def test_random_products_come_first_and_take_all_seeds_together():
    data = [ratios_of(group.suites[0], [1.0]) for group in records.GROUPS if group.regime == "burst"]
    first = [line[0] for line in table(suite_tables.few_lines(data))[1:]]
    assert len(first) == records.MOST_GROUPS
    assert (
        first == [group.title for group in records.GROUPS if group.regime == "burst"][: records.MOST_GROUPS]
    )
    grouped = [name for group in records.GROUPS for name in group.suites]
    assert grouped[: len(suites.RANDOM)] == list(suites.RANDOM)
    more = ratios_of("random_decode", [0.5, 0.5, 0.5], drawn=7)
    line = table(suite_tables.few_lines([*data, more]))[1]
    assert line[1:] == ["**0.59** · 0.50 · 0.50", "4"]
    assert [one[0] for one in table(suite_tables.few_lines([*data, more]))[1:]] == first


def test_suites_of_one_kind_of_random_product_are_one_line():
    data = [
        ratios_of("random_swiglu", [1.2]), ratios_of("random_bias_gelu", [1.2, 1.2]), ratios_of("random_fp8", [0.5]),
        ratios_of("random_fp8_blocks", [2.0]),
    ]  # fmt: skip
    data[0]["peers"].append("compile")
    data[0]["rows"][0]["summary"]["burst"]["ratio"]["compile"] = {"median": 0.6}
    for one in data[2:]:
        one["dtype"] = "mixed"
    fused, fp8 = table(suite_tables.few_lines(data))[1:]
    assert fused[1:] == ["**0.95** · 0.72 · 0.60", "3"]
    assert fp8[1:] == ["**1.00** · 0.65 · 0.50", "2"]


def test_groups_are_of_suites_and_take_the_best_peer():
    assert {name for group in records.GROUPS for name in group.suites} <= set(suites.names())
    data = ratios_of("fused", [1.2, 1.2])
    data["peers"].append("compile")
    data["rows"][0]["summary"]["burst"]["ratio"]["compile"] = {"median": 0.9}
    assert table(suite_tables.few_lines([data]))[1][1].startswith("**1.04**")


def test_every_row_is_there(results):
    options, _, rows, _ = results
    assert readme_tables.main(options) == 0
    square, tiny = rows.read_text().split("## ")[1:]
    assert square.startswith("square, fp16")
    assert "steady" not in square
    head, small, batched, odd = table(tiny)
    assert head == [
        "row", "M×N×K", "torch / gemmery, burst", "picky / gemmery, burst", "torch / gemmery, steady",
        "picky / gemmery, steady", "gemmery µs (burst)", "torch µs (burst)", "picky µs (burst)", "of roofline",
    ]  # fmt: skip
    # Slower than its peer, and in the table all the same.
    assert [cell.strip() for cell in small] == [
        "small", "16×24×32", "0.750 (0.750–0.750)", "1.500 (1.500–1.500)", "0.750 (0.750–0.750)",
        "1.500 (1.500–1.500)", "200.0 (200.0–200.0)", "150.0 (150.0–150.0)", "300.0 (300.0–300.0)", "",
    ]  # fmt: skip
    assert batched[:3] == ["batched", "2×8×8×8", "failed: RuntimeError: no ¦ kernel fits"]
    assert odd[3] == "–"
    assert odd[8] == ""
    assert "picky left out of odd: too \\| odd." in tiny
    assert "- tiny, burst, torch: geometric mean **0.750**, 10th percentile 0.750, worst 0.750 (" in tiny
    assert f"torch {torch.__version__}" in tiny


def result(suite_name, names, ratio, dtype="bf16", regime="burst"):
    """The file of a run in which every row of a suite had one ratio."""
    rows = [
        {"name": row.name, "M": row.M, "N": row.N, "K": row.K, "batch": list(row.batch), "a": row.a, "b": row.b,
         "out": row.out, "call": row.call, "dtype": row.dtype or dtype,
         "summary": {regime: {"us": {}, "ratio": {"cublas": {"median": ratio, "min": ratio, "max": ratio}}}}}
        for row in suites.load(suite_name) if names(row)
    ]  # fmt: skip
    header = {
        "gpu": records.GPU,
        "torch": "1",
        "triton": "3.6.0",
        "cuda": "3",
        "commit": "c",
        "date": "2026-01-02T03",
    }
    protocol = {"rounds": 5, "regimes": [regime]}
    return header | {
        "suite": suite_name, "dtype": dtype, "ours": "gemmery", "peers": ["cublas"], "protocol": protocol,
        "summary": {}, "rows": rows,
    }  # fmt: skip


def test_the_readme_is_about_one_gpu():
    other = result("decode", bool, 1.2) | {"gpu": "another"}
    assert records.groups([other]) == []
    assert records.groups([result("decode", bool, 1.2), other]) == records.groups(
        [result("decode", bool, 1.2)]
    )
    assert records.groups([result("decode", bool, 1.2)])


@pytest.mark.parametrize(
    ("ratio", "regime", "dtype", "small", "mid"),
    [
        (1.03, "burst", "bf16", "≥ 1.02, 0.96: met", "≥ 0.93, 0.85: met"),
        (1.00, "steady", "bf16", "≥ 1.02, 0.96: **missed**", "≥ 0.93, 0.85: met"),
        (0.90, "burst", "bf16", "≥ 1.02, 0.96: **missed**", "≥ 0.93, 0.85: **missed**"),
        (1.03, "graph", "bf16", "", ""),
        (1.03, "burst", "fp16", "", ""),
    ],
)
def test_parts_have_bars_of_their_own(ratio, regime, dtype, small, mid):
    lines = {
        line[0]: line for line in suite_tables.summary_rows(result("decode", bool, ratio, dtype, regime))
    }
    assert {name: line[-1] for name, line in lines.items()} == {
        "decode": "", "decode small": small, "decode mid": mid,
    }  # fmt: skip


def test_bars_are_about_the_best_of_several_peers():
    data = result("square", bool, 1.2)
    data["peers"].append("compile")
    for row in data["rows"]:
        ratios = row["summary"]["burst"]["ratio"]
        ratios["compile"] = ratios["cublas"] | {"median": 0.9 if row["M"] < 4096 else 1.5}
    lines = suite_tables.summary_rows(data)
    assert [(line[1], line[-1]) for line in lines[:2]] == [("cublas", ""), ("compile", "")]
    small = [row["M"] < 4096 for row in data["rows"]]
    mean = math.prod(0.9 if is_small else 1.2 for is_small in small) ** (1 / len(small))
    assert (lines[2][1], lines[2][2], lines[2][-1]) == (
        "the best",
        f"**{mean:.3f}**",
        "≥ 1.01, 0.96: **missed**",
    )


def test_a_worst_row_can_miss_a_bar():
    data = result("square", bool, 1.2)
    data["rows"][3]["summary"]["burst"]["ratio"]["cublas"]["median"] = 0.95
    ((*_, worst, _, _, _, verdict),) = suite_tables.summary_rows(data)
    assert worst == "0.950 (3072)"
    assert verdict == "≥ 1.01, 0.96: **missed**"


def test_tuned_results_are_named_so_and_meet_no_bar():
    ((*_, kind, _, _, verdict),) = suite_tables.summary_rows(result("square", bool, 1.2) | {"tuned": True})
    assert (kind, verdict) == ("bf16, tuned", "")


def test_parts_of_which_nothing_was_measured_are_not_shown():
    data = result("decode", lambda row: row.M == 1, 1.0)
    assert [line[0] for line in suite_tables.summary_rows(data)] == ["decode", "decode small"]


@pytest.mark.parametrize(
    ("regime", "ratio", "verdict"),
    [("burst", 1.2, "not all rows"), ("burst", 0.9, "**missed**"), ("steady", 1.2, "met")],
)
def test_a_bar_is_not_met_by_some_rows(regime, ratio, verdict):
    some = result("square", lambda row: row.M > 4096, ratio, regime=regime)
    ((*_, count, shown),) = suite_tables.summary_rows(some)
    assert count == f"{len(some['rows'])} of {len(suites.load('square'))}"
    assert shown == f"≥ 1.01, 0.96: {verdict}"


def test_bars_name_suites():
    assert set(records.BARS) <= set(suites.names())
    assert set(records.ORDER) == {*suites.whole(), "llm_large"}


def test_new_results_are_noticed(results):
    options, _, _, folder = results
    assert readme_tables.main(options) == 0
    data = json.loads((folder / "b.json").read_text())
    data["rows"][0]["rounds"]["burst"][0]["gemmery"] = 123.4e-6
    (folder / "b.json").write_text(json.dumps(data))
    assert readme_tables.main([*options, "--check"]) == 1


def test_rows_with_rounds_in_two_groups_are_named(results):
    options, _, rows, folder = results
    data = json.loads((folder / "b.json").read_text())
    data["rows"][0]["rounds"]["burst"] = [
        {"gemmery": us * 1e-6, "torch": 150e-6} for us in (100.0, 110.0, 101.0, 111.0, 112.0)
    ]
    (folder / "b.json").write_text(json.dumps(data))
    assert readme_tables.main(options) == 0
    square = rows.read_text().split("## ")[1]
    _, small, batched, _ = table(square)
    assert small[0] == f"small {suite_tables.TWO}"
    assert "110.0 (100.0–112.0)" in small
    assert batched[0] == "batched"
    assert "two groups, burst: small (2 at 100.0–101.0 µs, 3 at 110.0–112.0 µs)." in square


def test_times_of_models_belong_to_their_ratios():
    entry = {
        "name": "block", "held_bytes": {"gemmery": 3 << 20},
        "times": {"gemmery": [1.0, 2.0, 3.0], "eager": [1.3, 2.2, 2.7], "compile": [1.0, 1.0, 1.0]},
    }  # fmt: skip
    ours, eager, compiled = suite_tables.model_rows(entry)
    assert ours == ["block", "gemmery", "", "2 s", "", "3 MiB"]
    assert eager == ["", "eager", "1.100 (0.900–1.300)", "2.2 s", "2 s", ""]
    assert compiled[2:5] == ["0.500 (0.333–1.000)", "1 s", "2 s"]


def test_marks_and_results_are_needed(results, capsys):
    options, page, _, folder = results
    (folder / "c.json").write_text('{"suite": "x"}')
    assert readme_tables.main(options) == 2
    assert "c.json is not a benchmark result" in capsys.readouterr().err
    (folder / "c.json").unlink()
    page.write_text("no marks")
    assert readme_tables.main(options) == 2
    assert "results.md must have" in capsys.readouterr().err
    assert page.read_text() == "no marks"
    assert "old" in (folder.parent / "README.md").read_text()


def test_without_results(tmp_path):
    paths = [tmp_path / name for name in ("README.md", "results.md", "RESULTS.md")]
    for path in paths[:2]:
        path.write_text(f"{readme_tables.BEGIN}{readme_tables.END}")
    places = [
        word
        for name, path in zip(("--readme", "--page", "--rows"), paths, strict=True)
        for word in (name, str(path))
    ]
    assert readme_tables.main(["--results", str(tmp_path / "none"), *places]) == 0
    for path in paths:
        assert "No results yet" in path.read_text()
    assert plots.main(["--results", str(tmp_path / "none")]) == 2


def test_the_tables_of_this_repository_are_up_to_date():
    assert readme_tables.main(["--check"]) == 0


# --- pictures -------------------------------------------------------------------------------------------------------


def test_pictures_are_drawn(results):
    options, _, _, folder = results
    assert plots.main(options[:2]) == 0
    for name in ("ratios.png", "square.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_without_square_there_is_one_picture(results, tmp_path):
    _, _, _, folder = results
    (tmp_path / "one").mkdir()
    shutil.move(folder / "a.json", tmp_path / "one" / "a.json")
    assert plots.main(["--results", str(tmp_path / "one"), "--out", str(tmp_path / "drawn")]) == 0
    assert [path.name for path in (tmp_path / "drawn").iterdir()] == ["ratios.png"]


def test_the_picture_of_the_groups_has_every_row_of_the_table(tmp_path):
    data = [
        ratios_of("llm", [0.1, 0.9, 1.1]), ratios_of("decode", [1.0, 9.0], "3.9.0"), ratios_of("decode", [1.5], "3.6.0"),
    ]  # fmt: skip
    found = {group.suites[0]: each for group, each in records.groups(data)}
    assert found["llm"]["3.6"].ratios == [0.1, 0.9, 1.1]
    assert {version: pooled.ratios for version, pooled in found["decode"].items()} == {
        "3.9": [1.0, 9.0],
        "3.6": [1.5],
    }
    plots.draw_groups(data, tmp_path / "groups.svg")
    text = (tmp_path / "groups.svg").read_text()
    for word in ("known models, 512 to 8192 rows", "known models, 1 to 384 rows", "Triton 3.9", "Triton 3.6"):
        assert word in text
    # What is beyond the axis is drawn at its edge.
    more = [ratios_of("llm", [0.9, 0.9, 1.1]), *data[1:]]
    plots.draw_groups(more, tmp_path / "other.svg")
    assert (tmp_path / "other.svg").read_text().count("<use ") == text.count("<use ")


def test_compiled_blocks():
    """Ratios are taken within rounds, and a product that gemmery does not win is no gain."""
    from benchmarks import compiled_summary

    products = [
        {"op": "addmm", "shape": [8, 16, 32], "times": {"addmm": 4e-6, "bias_addmm": 3e-6, "gemmery_addmm": 2e-6,
         "triton_mm_1": 5e-6, "triton_mm_2": 2.5e-6}, "used": 1, "count": 2},
        {"op": "mm", "shape": [8, 16, 32], "times": {"mm": 1e-6, "gemmery_mm": 2e-6, "triton_mm_0": 9e-6}, "used": 0,
         "count": 1},
    ]  # fmt: skip
    entry = {
        "name": "a block", "products": products, "first_call": {"torch": 10.0, "gemmery": 10.5},
        "added": {"x": {"precompile": 0.5, "benchmark": 0.1}, "y": {"precompile": 1.25, "benchmark": 0.0}},
        "rounds": [{"torch": 2e-6, "gemmery": 1e-6}, {"torch": 3e-6, "gemmery": 2e-6}, {"torch": 1e-6, "gemmery": 2e-6}],
    }  # fmt: skip
    result = {
        "peers": ["torch"],
        "ours": "gemmery",
        "entries": [entry],
        "from_log": [{**products[1], "op": "mm"}],
    }
    del result["from_log"][0]["count"]
    line = ["a block", "**1.500** (0.500–2.000)", "2.0", "2.0", "1 of 3", "1.25", "0.10", "0.25"]
    assert compiled_summary.lines([result]) == [line]
    del entry["first_call"], entry["added"]["y"]["precompile"]
    assert compiled_summary.lines([result]) == [[*line[:5], "", "0.10", ""]]
    assert compiled_summary.product_lines([result]) == [
        ["addmm, 8 × 16 × 32", "2.0", "3.0", "2.5", "1 of 2"],
        ["mm, 8 × 16 × 32", "2.0", "1.0", "9.0", "0 of 1"],
        ["mm, 8 × 16 × 32", "2.0", "1.0", "9.0", ""],
    ]
