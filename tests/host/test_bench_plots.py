"""Pictures of benchmark results, and the numbers in them."""

import json
import statistics

import pytest
from typer.testing import CliRunner

from gemmery.cli import app
from gemmery.lab import bench_plots, bench_series
from gemmery.lab.prediction import recorded
from gemmery.lab.results import read

RESULTS = recorded.folder()


def result(name):
    return read(RESULTS / f"{name}.json")


def of(series, method, regime="burst"):
    return next(one for one in series if (one.method, one.regime) == (method, regime))


def test_throughput_over_size():
    data = result("square-fp16")
    found = bench_series.throughput(data)
    assert {(one.method, one.regime) for one in found} == {
        (method, regime) for method in ("gemmery", "cublas") for regime in ("burst", "steady")
    }
    assert all(one.joined for one in found)
    marks = of(found, "gemmery").marks
    assert [round(mark.x) for mark in marks] == sorted(row["M"] for row in data["rows"])
    for mark, row in zip(marks, data["rows"], strict=True):
        rates = sorted(2 * row["M"] ** 3 / one["gemmery"] / 1e12 for one in row["rounds"]["burst"])
        assert (mark.low, mark.high) == pytest.approx((rates[0], rates[-1]))
        # The same round as in the tables, and as the ratio that is marked in the other picture.
        assert 2 * row["M"] ** 3 / mark.middle / 1e6 == pytest.approx(
            row["summary"]["burst"]["us"]["gemmery"]
        )
    # Products of any shape are no curve.
    assert not any(one.joined for one in bench_series.throughput(result("decode-bf16")))


def test_ratios_over_rows():
    data = result("fused-bf16")
    found = bench_series.ratios(data)
    assert [one.method for one in found] == data["peers"]
    for mark, row in zip(of(found, "cublas").marks, data["rows"], strict=True):
        each = [one["cublas"] / one["gemmery"] for one in row["rounds"]["burst"]]
        assert mark.name == row["name"]
        assert (mark.low, mark.middle, mark.high) == pytest.approx(
            (min(each), statistics.median(each), max(each))
        )


def test_time_over_rows_of_a_product():
    data = result("lowbit-bf16")
    found = bench_series.scaling(data)
    names = {one.of for one in found}
    assert "M×8192×8192 bf16, int4" in names
    assert len(names) == 3
    large = [one for one in found if one.of.startswith("M×8192×8192")]
    marks = of(large, "gemmery").marks
    rows = {row["M"]: row for row in data["rows"] if row["N"] == row["K"] == 8192}
    assert [mark.x for mark in marks] == sorted(rows)
    for mark in marks:
        assert (
            mark.low <= mark.middle == rows[mark.x]["summary"]["burst"]["us"]["gemmery"] * 1e-6 <= mark.high
        )
    # Epilogues, and other N and K, are other lines; two sizes are none.
    fused = {one.of for one in bench_series.scaling(result("fused-bf16"))}
    assert {"M×28672×4096 bf16, swiglu", "M×14336×4096 bf16, bias gelu"} <= fused
    assert not any("bias gelu tanh" in name for name in fused)


def test_lines_of_the_picture_share_the_rows():
    many = [{"suite": str(i), "rows": [{}] * 24} for i in range(12)]
    lines = bench_plots._lines(many)
    assert [one["suite"] for line in lines for one in line] == [str(i) for i in range(12)]
    assert {len(line) for line in lines} == {4}
    assert bench_plots._lines(many[:1]) == [many[:1]]


@pytest.mark.parametrize(
    ("kind", "names", "texts"),
    [
        ("throughput", ["square-bf16", "square-fp16"], ["square, bf16", "cublas, steady", "16384"]),
        (
            "shapes",
            ["lowbit-bf16", "launch-bf16"],
            ["8192 M=128", "tinygemm, burst", "cublas, host", "launch, bf16"],
        ),
        ("scaling", ["decode-bf16", "lowbit-bf16"], ["M×8192×8192 bf16, int4", "gemmery, burst", "4096"]),
        ("ratios", ["odd-bf16", "views-bf16"], ["views", "10.01", "geometric mean"]),
    ],
)
def test_pictures_show_the_names_and_sources(kind, names, texts, tmp_path):
    files = [RESULTS / f"{name}.json" for name in names]
    path = tmp_path / "p.svg"
    found = bench_plots.plot(files, [kind], path)
    assert list(found) == [kind]
    assert found[kind]["file"] == str(path)
    text = path.read_text()
    missing = [word for word in texts if word not in text]
    assert missing == []
    if kind != "ratios":
        assert f"commit {result(names[0])['commit']}" in text


def test_the_command_writes_a_file_for_each_kind(tmp_path):
    picture, numbers = tmp_path / "x.png", tmp_path / "x.json"
    words = ["plot", str(RESULTS / "square-bf16.json"), "--out", str(picture), "--json", str(numbers)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "scaling: not drawn: the results have no data for it" in done.output
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["x-shapes.png", "x-throughput.png"]
    found = json.loads(numbers.read_text())
    assert found["scaling"] == {"file": None, "series": []}
    marks = found["throughput"]["series"][0]["marks"]
    assert len(marks) == 11
    assert set(marks[0]) == {"name", "x", "middle", "low", "high"}
    assert (tmp_path / "x-shapes.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "x.pdf"], "must end in .png or .svg"),
        (["--out", "x.png", "--kind", "pie"], "no kind of picture 'pie'"),
        (["--out", "none/x.png"], "there is no directory"),
    ],
)
def test_mistakes_are_told_in_a_line(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["plot", str(RESULTS / "square-bf16.json"), *words])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
    (tmp_path / "no.json").write_text("{}")
    done = CliRunner().invoke(app, ["plot", str(tmp_path / "no.json"), "--out", "x.png"])
    assert done.exit_code == 2
    assert "no.json is not a benchmark result" in " ".join(done.output.split())
