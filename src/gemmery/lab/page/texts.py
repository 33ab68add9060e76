"""Numbers as the page shows them, so that it need not know how to round or which unit suits."""

from __future__ import annotations

from typing import TypedDict


class Figure(TypedDict):
    """A number with the text that stands for it."""

    value: float
    text: str


def digits(value: float) -> str:
    """Three significant digits of a number from 1 to 1000, more of a larger one: 1.23, 12.3, 123, 1234."""
    if round(value, 2) < 10:
        return f"{value:.2f}"
    return f"{value:.1f}" if round(value, 1) < 100 else f"{value:.0f}"


def _in_units(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """A number in the largest of ascending units of which it has at least one, once it is rounded."""
    size, name = next((unit for unit in reversed(units) if abs(value) >= unit[0] * 0.9995), units[0])
    return f"{'−' if value < 0 else ''}{digits(abs(value) / size)} {name}"


def seconds(value: float) -> Figure:
    """A time: 12.3 µs, 1.54 ms, −9.40 µs."""
    return {"value": value, "text": _in_units(value, ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s")))}


def size(value: float) -> Figure:
    """Bytes, in decimal units: 34.5 MB."""
    units = ((1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"), (1e15, "PB"))
    return {"value": value, "text": f"{value:.0f} B" if value < 1e3 else _in_units(value, units)}


def bandwidth(value: float) -> Figure:
    """Bytes per second."""
    return {"value": value, "text": f"{size(value)['text']}/s"}


def rate(value: float, integers: bool = False) -> Figure:
    """Operations per second: 660 TFLOP/s, or TOP/s for integers."""
    what = "OP/s" if integers else "FLOP/s"
    units = ((1e6, f"M{what}"), (1e9, f"G{what}"), (1e12, f"T{what}"), (1e15, f"P{what}"))
    return {"value": value, "text": _in_units(value, units[:3])}


def part(value: float) -> Figure:
    """A part of a whole in percent, with a decimal where it is near either end: 87 %, 0.4 %, 99.7 %."""
    percent = 100 * value
    near = 0 < percent < 9.95 or 99 < percent < 99.95
    return {"value": value, "text": f"{percent:.{1 if near else 0}f} %"}


def times(value: float) -> Figure:
    """A factor: 1.02×, 85.0×."""
    return {"value": value, "text": f"{digits(value) if value < 1000 else grouped(round(value))}×"}


def grouped(value: int) -> str:
    """A whole number, in groups of three digits where it has five or more."""
    return str(value) if abs(value) < 10_000 else f"{value:,}".replace(",", "\u202f")


def count(value: int, one: str) -> str:
    """A number of things: 1 tile, 2048 tiles."""
    return f"{grouped(value)} {one if value == 1 else one + 's'}"
