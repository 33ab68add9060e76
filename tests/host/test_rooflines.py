"""Rooflines: break-even sizes, points under them, and the picture."""

import json

import pytest
from typer.testing import CliRunner

from gemmery import devices
from gemmery.cli import app
from gemmery.lab import roofline_pictures, rooflines, suites
from gemmery.lab.prediction import recorded
from gemmery.lab.rooflines import break_even

H200, RTX3090 = (devices.TABLE[name] for name in ("NVIDIA H200", "NVIDIA GeForce RTX 3090"))
#: Bytes of an element of A, of B and of the output together.
MOVED = {"bf16": 6, "tf32": 12, "fp32": 12, "fp64": 24, "fp8": 4, "int8": 6}


@pytest.mark.parametrize(
    "device", [d for n, d in devices.TABLE.items() if n != "interpreter"], ids=lambda d: d.name
)
def test_the_break_even_product_lies_at_the_ridge(device):
    for roof in rooflines.roofs_of(device):
        size = round(roof.break_even)
        near = 1 + 1 / size
        below, above = (
            rooflines.rooflines(device, [(m, m, m)], dtype=roof.dtype) for m in (size // 2, 2 * size)
        )
        assert 2 * below.points[0].intensity / roof.ridge == pytest.approx(1, rel=4 / size)
        assert below.points[0].intensity < roof.ridge / near < roof.ridge * near < above.points[0].intensity
        # The sentence of the table says the same sizes.
        line = next(line for line in str(below).splitlines() if roof.label in line)
        assert f"break-even at M = N = K = {roof.break_even:.0f}" in line
        assert f"ridge at {roof.ridge:6.1f} per byte" in line


def test_computing_takes_as_long_as_reading_and_writing_at_the_break_even():
    for rate, bandwidth, moved in ((71e12, 936e9, 6), (989e12, 4800e9, 6), (1979e12, 4800e9, 4)):
        size = break_even(rate, bandwidth, moved)
        assert size**2 * moved / bandwidth == pytest.approx(2 * size**3 / rate)


def test_the_picture_bends_where_the_break_even_product_lies():
    found = rooflines.rooflines(H200)
    for axes in roofline_pictures.picture(found).axes:
        bends = [line.get_xydata()[1][0] for line in axes.lines if len(line.get_xydata()) == 3]
        assert {
            round(2 * roof.break_even / moved, 6) for roof in found.roofs if (moved := MOVED[roof.dtype])
        } == {round(bend, 6) for bend in bends}


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"bandwidth": -1.0}, {"moved": 0}], ids=str)
def test_break_even_of_nothing(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        break_even(**({"rate": 1e12, "bandwidth": 1e12} | wrong))


def test_every_rate_of_a_gpu_has_a_roof():
    found = {roof.dtype: roof for roof in rooflines.roofs_of(RTX3090)}
    assert set(found) == {"bf16", "tf32", "fp32", "fp64", "int8"}
    assert found["bf16"].rate == RTX3090.fp16
    assert found["bf16"].ridge == RTX3090.fp16 / RTX3090.bandwidth
    assert found["bf16"].break_even == break_even(RTX3090.fp16, RTX3090.bandwidth)
    assert rooflines.roof_of(H200, "fp8fast").rate == H200.fp8


def test_points_are_under_the_roof_and_carry_what_was_measured():
    found = rooflines.rooflines(H200, [(4096, 4096, 4096)], ["decode_small"], results=recorded.folder())
    first, *rest = found.points
    assert [point.name for point in rest] == [row.name for row in suites.load("decode_small")]
    for point in found.points:
        assert set(point.measured) >= {"gemmery", "cublas"}
        for method in ("gemmery", "cublas"):
            low, high = point.spread[method]
            assert point.roofline < low <= point.measured[method] <= high
            assert abs(point.predicted[method] / point.measured[method] - 1) < 0.25
    assert first.intensity == 2 * 4096**3 / (3 * 2 * 4096**2)


def test_a_folder_of_results_decides_what_counts_as_measured(tmp_path):
    source = recorded.folder() / "square-bf16.json"
    data = json.loads(source.read_text())
    (tmp_path / "square.json").write_text(json.dumps(data | {"rows": data["rows"][:2]}))
    found = rooflines.rooflines(H200, suite_names=["square"], results=tmp_path)
    assert [bool(point.measured) for point in found.points] == [True, True] + [False] * 9
    # Of another type, or another GPU, nothing is known there.
    for device, dtype in ((H200, "fp16"), (RTX3090, "bf16")):
        found = rooflines.rooflines(device, suite_names=["square"], dtype=dtype, results=tmp_path)
        assert not any(point.measured for point in found.points)
        assert all(point.predicted["gemmery"] for point in found.points)
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match=r"other.json is not a benchmark result"):
        rooflines.rooflines(H200, suite_names=["square"], results=tmp_path)


@pytest.mark.slow
def test_the_picture_has_roofs_of_what_is_in_it(tmp_path):
    results = recorded.folder()
    for device, names, texts in (
        (H200, ["square"], ["bf16, fp16: 989", "206", "gemmery, measured", "the suite square"]),
        (H200, ["dtypes", "square"], ["fp8, int8: 1979", "TF32: 494", "fp32, fp64: 67", "dtypes and square"]),
        (RTX3090, [], ["NOT MEASURED", "bf16, fp16: 71", "int8: 284", "TF32, fp32: 36", "fp64: 0.56"]),
    ):
        path = tmp_path / "picture.svg"
        roofline_pictures.draw(rooflines.rooflines(device, suite_names=names, results=results), path)
        text = path.read_text()
        assert [word for word in texts if word not in text] == []


def test_marks_of_the_picture_are_at_the_numbers():
    found = rooflines.rooflines(H200, [(4096, 4096, 4096)])
    (axes,) = roofline_pictures.picture(found).axes
    marks = {tuple(line.get_xydata()[0]) for line in axes.lines if len(line.get_xydata()) == 1}
    (point,) = found.points
    assert marks == {(point.intensity, point.flops / seconds / 1e12) for seconds in point.predicted.values()}
    (roof,) = [line.get_xydata() for line in axes.lines if len(line.get_xydata()) == 3]
    assert roof[1].tolist() == [H200.fp16 / H200.bandwidth, H200.fp16 / 1e12]
    assert roof[0][1] == pytest.approx(roof[0][0] * H200.bandwidth / 1e12)


def test_the_command(tmp_path):
    picture, numbers = tmp_path / "r.png", tmp_path / "r.json"
    words = [
        "roofline",
        "4096",
        "4096",
        "4096",
        "--suite",
        "square",
        "--device",
        "H200",
        "--out",
        str(picture),
    ]
    done = CliRunner().invoke(app, [*words, "--json", str(numbers)])
    assert done.exit_code == 0, done.output
    assert f"break-even at M = N = K = {break_even(H200.fp16, H200.bandwidth):.0f}" in done.output
    assert "4096×4096×4096" in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(numbers.read_text())
    assert len(found["points"]) == 12
    assert found["roofs"][0]["ridge"] == H200.fp16 / H200.bandwidth


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["4096", "4096"], "2 sizes given"),
        (["--suite", "none"], "there is no suite 'none'"),
        (["--dtype", "bf17"], "dtype is 'bf17'"),
        (["--out", "picture.gif"], "must end in .png or .svg"),
        (["1", "0", "1"], "N is 0"),
    ],
)
def test_mistakes_are_told_in_a_line(words, said):
    done = CliRunner().invoke(app, ["roofline", "--device", "H200", *words])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_a_product_that_is_all_latency_is_not_said_to_take_no_time():
    words = ["roofline", "64", "64", "64", "--device", "H200"]
    shown = CliRunner().invoke(app, words).output.splitlines()[-1].replace(",", "").split()
    assert shown[2] == "0.005"
    assert all(0 < float(share.removesuffix("%")) < 1 for share in shown[4::2])
