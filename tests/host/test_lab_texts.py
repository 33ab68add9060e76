"""Numbers as the lab's page shows them."""

import math

import pytest

from gemmery.lab.page import texts

TIMES = [
    (0.0, "0.00 µs"), (4.2e-9, "0.00 µs"), (1.234e-6, "1.23 µs"), (9.994e-6, "9.99 µs"), (9.996e-6, "10.0 µs"),
    (12.34e-6, "12.3 µs"), (99.94e-6, "99.9 µs"), (99.96e-6, "100 µs"), (606.7e-6, "607 µs"), (999.4e-6, "999 µs"),
    (999.6e-6, "1.00 ms"), (1.5372e-3, "1.54 ms"), (0.9999, "1.00 s"), (72.0, "72.0 s"), (-9.4e-6, "−9.40 µs"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "text"), TIMES)
def test_times(value, text):
    assert texts.seconds(value) == {"value": value, "text": text}


def test_a_text_is_never_off_by_more_than_it_shows():
    units = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}
    for power in range(-60, 20):
        value = 1.07**power * 1e-3
        number, unit = texts.seconds(value)["text"].split(" ")
        assert math.isclose(float(number) * units[unit], value, rel_tol=0.0051)


SIZES = [
    (0, "0 B"),
    (512, "512 B"),
    (1536, "1.54 kB"),
    (1e6, "1.00 MB"),
    (34.5e6, "34.5 MB"),
    (2.5e12, "2.50 TB"),
]


@pytest.mark.parametrize(("value", "text"), SIZES)
def test_sizes(value, text):
    assert texts.size(value)["text"] == text
    assert texts.bandwidth(value)["text"] == f"{text}/s"


def test_rates():
    assert texts.rate(660.4e12)["text"] == "660 TFLOP/s"
    assert texts.rate(2.25e15)["text"] == "2250 TFLOP/s"
    assert texts.rate(1979e12, integers=True)["text"] == "1979 TOP/s"
    assert texts.rate(0.47e12)["text"] == "470 GFLOP/s"


PARTS = [
    (0, "0 %"),
    (0.004, "0.4 %"),
    (0.0994, "9.9 %"),
    (0.0999, "10 %"),
    (0.187, "19 %"),
    (0.996, "99.6 %"),
    (1, "100 %"),
]


@pytest.mark.parametrize(("value", "text"), PARTS)
def test_parts(value, text):
    assert texts.part(value)["text"] == text


def test_factors_and_counts():
    assert [texts.times(x)["text"] for x in (0.987, 1.02, 85.04, 171.0, 12345.6)] == [
        "0.99×", "1.02×", "85.0×", "171×", "12\u202f346×",
    ]  # fmt: skip
    assert texts.count(1, "tile") == "1 tile"
    assert texts.count(9999, "tile") == "9999 tiles"
    assert texts.count(16384, "tile") == "16\u202f384 tiles"
