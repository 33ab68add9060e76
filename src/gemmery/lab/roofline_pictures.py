"""Rooflines as a picture: roofs as lines, products as marks under them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figures import COLOURS, FAINT, INK, figure, save
from .rooflines import Point, Roof, Rooflines, roof_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colors and marks of the methods.
METHODS = {"gemmery": (COLOURS[0], "o"), "cublas": (COLOURS[1], "s")}
LABELS = {"gemmery": "gemmery", "cublas": "the vendor's BLAS"}
#: Operations per byte that are shown where no product asks for more.
SHOWN = (4.0, 4096.0)


def draw(found: Rooflines, path: Path) -> None:
    """Draw rooflines as .png or .svg.

    Raises:
        ValueError: the name has another ending.
        FileNotFoundError: there is no such directory.
    """
    save(picture(found), path)


def picture(found: Rooflines) -> Figure:
    """Throughput over operations per byte, both logarithmic."""
    used = {roof_of(found.device, point.dtype).dtype for point in found.points}
    roofs = [roof for roof in found.roofs if not used or roof.dtype in used]
    with figure(9, 5.4, _title(found)) as made:
        axes = made.subplots()
        if found.mark:
            axes.set_title(found.mark.upper(), color="firebrick", fontweight="bold", fontsize=10)
        low, high = _range(found, roofs)
        for rate in dict.fromkeys(roof.rate for roof in roofs):
            _roof(axes, [roof for roof in roofs if roof.rate == rate], low, high)
        for point in found.points:
            _point(axes, point)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(*_heights(found, roofs, low))
        axes.set_xlabel("operations per byte of the least traffic")
        axes.set_ylabel("10¹² operations per second")
        axes.grid(color=FAINT, linewidth=0.4)
        if found.points:
            made.legend(handles=_entries(found), loc="outside lower center", ncols=4)
    return made


def _title(found: Rooflines) -> str:
    suites = list(dict.fromkeys(point.suite for point in found.points if point.suite))
    text = f"What the datasheet of the {found.device.name} allows"
    if not suites:
        return text
    *others, last = suites
    return f"{text}, with {', '.join(others)} and {last}" if others else f"{text}, with the suite {last}"


def _range(found: Rooflines, roofs: list[Roof]) -> tuple[float, float]:
    shown = [point.intensity for point in found.points] + [roof.ridge for roof in roofs]
    return min([SHOWN[0], *(x / 2 for x in shown)]), max([SHOWN[1], *(x * 2 for x in shown)])


def _heights(found: Rooflines, roofs: list[Roof], low: float) -> tuple[float, float]:
    rates = [point.flops / seconds for point in found.points for _, seconds in _times(point)]
    lowest = min([roof.bandwidth * low for roof in roofs] + rates)
    return lowest / 1.6e12, max(roof.rate for roof in roofs) * 1.6e-12


def _times(point: Point) -> list[tuple[str, float]]:
    """The times of a point that there are."""
    predicted = [(method, seconds) for method, seconds in point.predicted.items() if seconds is not None]
    return [*predicted, *((method, point.measured[method]) for method in METHODS if method in point.measured)]


def _roof(axes: Axes, roofs: list[Roof], low: float, high: float) -> None:
    """The line of types with one rate."""
    rate, bandwidth, ridge = roofs[0].rate, roofs[0].bandwidth, roofs[0].ridge
    peak = rate / 1e12
    axes.plot([low, ridge, high], [bandwidth * low / 1e12, peak, peak], color=INK, linewidth=1.2, zorder=2)
    names = ", ".join(roof.label for roof in roofs)
    axes.annotate(
        f"{names}: {_short(peak)}",
        (high, peak),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )
    axes.annotate(
        _short(ridge), (ridge, peak), xytext=(-3, 3), textcoords="offset points", ha="right", fontsize=8
    )


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _point(axes: Axes, point: Point) -> None:
    """Filled marks for measurements, with their spread, and rings for predictions."""
    for method, (colour, mark) in METHODS.items():
        x, seconds = point.intensity, point.predicted[method]
        if seconds is not None:
            axes.plot(
                x, point.flops / seconds / 1e12, mark, markersize=8, markerfacecolor="none", color=colour, alpha=0.8,
                zorder=3,
            )  # fmt: skip
        if method in point.measured:
            rate = point.flops / point.measured[method] / 1e12
            least, most = (point.flops / seconds / 1e12 for seconds in reversed(point.spread[method]))
            axes.errorbar(
                [x], [rate], yerr=[[max(rate - least, 0)], [max(most - rate, 0)]], fmt=mark, color=colour, markersize=4,
                elinewidth=0.8, zorder=4,
            )  # fmt: skip


def _entries(found: Rooflines) -> list[Any]:
    """The legend's."""
    from matplotlib.lines import Line2D

    measured = any(point.measured for point in found.points)
    entries = []
    for method, (colour, mark) in METHODS.items():
        for label, size, face in (("predicted", 8, "none"), ("measured", 4, colour))[: 1 + measured]:
            entries.append(
                Line2D(
                    [], [], marker=mark, markersize=size, markerfacecolor=face, color=colour, linestyle="",
                    label=f"{LABELS[method]}, {label}",
                )
            )  # fmt: skip
    return entries
