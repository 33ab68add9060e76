"""Pictures of what `gemmery bench` measured; the numbers in them are those of `bench_series`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import bench_series
from .bench_series import Mark, Result, Series, label, rows_of
from .figures import COLOURS, FAINT, INK, check_name, figure, save
from .results import read, regimes, run_line
from .timing import geometric_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Ratios beyond these are drawn at the edge, as triangles.
LOWEST, HIGHEST = 0.5, 2.0
#: About as many rows stand side by side in a line.
MOST_ROWS = 120
#: Panels side by side.
ACROSS = 3
#: Marks and lines of the regimes.
MARKS = {"burst": "o", "steady": "s", "graph": "D", "host": "P"}
LINES: dict[str, Literal["-", "--", ":", "-."]] = {"burst": "-", "steady": "--", "graph": ":", "host": "-."}
_RATIO_TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0)


# --- throughput over size, and time over M --------------------------------------------------------------------------


def draw_throughput(results: Sequence[Result], path: Path) -> None:
    """Throughput of every method over the size of its products, a panel for each result."""
    found = [bench_series.throughput(result) for result in results]
    panels = [_Panel(label(result), series) for result, series in zip(results, found, strict=True) if series]
    made = _curves(
        panels, "Throughput over size", "size of a cube of as many operations", "10¹² operations / s", results
    )
    save(made, path)


def draw_scaling(results: Sequence[Result], path: Path) -> None:
    """Time of every method over M, a panel for each N and K that were measured with several M."""
    panels: dict[str, list[Series]] = {}
    for result in results:
        for series in bench_series.scaling(result):
            panels.setdefault(f"{label(result)}: {series.of}", []).append(series)
    shown = [_Panel(text, [_in_us(one) for one in series]) for text, series in panels.items()]
    made = _curves(shown, "Time over the number of rows", "M", "µs", results, logarithmic=True)
    save(made, path)


def _in_us(series: Series) -> Series:
    marks = [Mark(m.name, m.x, m.middle * 1e6, m.low * 1e6, m.high * 1e6) for m in series.marks]
    return replace(series, marks=tuple(marks))


@dataclass(frozen=True)
class _Panel:
    title: str
    series: Sequence[Series]


def _curves(
    panels: Sequence[_Panel], title: str, x: str, y: str, results: Sequence[Result], logarithmic: bool = False
) -> Figure:
    """Panels of lines with their spread."""
    down = -(-len(panels) // ACROSS)
    across = min(len(panels), ACROSS)
    methods = list(dict.fromkeys(series.method for panel in panels for series in panel.series))
    colours = dict(zip(methods, _colours(len(methods)), strict=True))
    # Title and legend share a line, for which one panel alone is too narrow.
    with figure(max(9, 1 + 4 * across), 3.2 * down + 0.9, title) as made:
        grid = made.subplots(down, across, squeeze=False)
        for axes, panel in zip(grid.flat, panels, strict=False):
            for series in panel.series:
                _curve(axes, series, colours[series.method])
            axes.set_title(panel.title)
            axes.set_xscale("log", base=2)
            if logarithmic:
                _logarithmic(axes, [mark.middle for series in panel.series for mark in series.marks])
            else:
                axes.set_ylim(bottom=0)
            _sizes(axes, {mark.x for series in panel.series for mark in series.marks})
            axes.grid(color=FAINT, linewidth=0.4)
            axes.set_xlabel(x)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes in grid[:, 0]:
            axes.set_ylabel(y)
        everything = [series for panel in panels for series in panel.series]
        _legend(made, colours, {one.regime for one in everything}, any(one.joined for one in everything))
        _sources(made, results)
    return made


def _colours(count: int) -> list[str]:
    """The first colors; from the seventh on, they repeat."""
    return [COLOURS[place % len(COLOURS)] for place in range(count)]


def _curve(axes: Axes, series: Series, colour: str) -> None:
    x, y = [mark.x for mark in series.marks], [mark.middle for mark in series.marks]
    axes.errorbar(
        x, y, yerr=_spread(series.marks), linestyle=LINES[series.regime] if series.joined else "",
        marker=MARKS[series.regime], color=colour, markersize=3, linewidth=1, elinewidth=0.7,
    )  # fmt: skip


def _spread(marks: Iterable[Mark]) -> list[list[float]]:
    """The distances of the least and the largest from the median, for `errorbar`."""
    listed = list(marks)
    below = [max(mark.middle - mark.low, 0) for mark in listed]
    return [below, [max(mark.high - mark.middle, 0) for mark in listed]]


def _sizes(axes: Axes, sizes: set[float]) -> None:
    """Ticks at the sizes themselves where these are few whole numbers."""
    from matplotlib.ticker import FixedLocator, NullLocator

    whole = sorted(round(size) for size in sizes)
    if len(whole) > 12 or any(abs(size - round(size)) > 1e-6 * size for size in sizes):
        return
    axes.xaxis.set_major_locator(FixedLocator(whole))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(size) for size in whole], rotation=45, ha="right")


def _logarithmic(axes: Axes, values: Sequence[float]) -> None:
    """A scale with plain numbers, more of them where the values are close."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    subs = (1, 2, 5) if max(values) > 10 * min(values) else range(1, 10)
    axes.set_yscale("log", base=10)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=[float(sub) for sub in subs]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _legend(made: Figure, colours: dict[str, str], used: set[str], joined: bool = False) -> None:
    from matplotlib.lines import Line2D

    known = [regime for regime in MARKS if regime in used]
    entries = [
        Line2D([], [], color=colour, marker=MARKS[regime], markersize=3, linestyle=LINES[regime] if joined else "",
               label=f"{method}, {regime}")
        for method, colour in colours.items() for regime in known
    ]  # fmt: skip
    made.legend(handles=entries, loc="outside upper right", ncols=max(len(known), min(len(entries), 4)))


def _sources(made: Figure, results: Sequence[Result]) -> None:
    """The versions and the GPU, in small letters at the lower edge, for which room is left."""
    lines = list(dict.fromkeys(run_line(result) for result in results))
    room = (0.1 * len(lines) + 0.05) / made.get_figheight()
    made.set_layout_engine("constrained", rect=(0, room, 1, 1 - room))
    made.text(0.01, 0.03 / made.get_figheight(), "\n".join(lines), fontsize=6, color=INK, va="bottom")


# --- ratios of a result ---------------------------------------------------------------------------------------------


def draw_shapes(results: Sequence[Result], path: Path) -> None:
    """The ratio of every peer's time to ours for every row, a line a row, with the rounds' spread."""
    shown = [(result, bench_series.ratios(result)) for result in results]
    shown = [(result, series) for result, series in shown if series]
    heights = [len(rows_of(result)) for result, _ in shown]
    peers = list(dict.fromkeys(one.method for _, series in shown for one in series))
    colours = dict(zip(peers, _colours(len(peers)), strict=True))
    with figure(8, 0.19 * sum(heights) + 0.5 * len(shown) + 0.9, "Time of a peer / time of gemmery") as made:
        grid = made.subplots(len(shown), 1, squeeze=False, height_ratios=heights)
        for axes, (result, series) in zip(grid[:, 0], shown, strict=True):
            _ratio_lines(axes, result, series, colours)
        _legend(made, colours, {one.regime for _, series in shown for one in series})
        _sources(made, results)
    save(made, path)


def _ratio_lines(axes: Axes, result: Result, series: Sequence[Series], colours: dict[str, str]) -> None:
    names = [row["name"] for row in rows_of(result)]
    for place, one in enumerate(series):
        shift = (place - (len(series) - 1) / 2) * 0.7 / len(series)
        axes.errorbar(
            [mark.middle for mark in one.marks], [mark.x + shift for mark in one.marks], xerr=_spread(one.marks),
            fmt=MARKS[one.regime], color=colours[one.method], markersize=3, elinewidth=0.7,
        )  # fmt: skip
    axes.axvline(1.0, color=INK, linewidth=0.8, zorder=1)
    axes.set_xscale("log", base=2)
    _ratio_axis(axes.xaxis, max(mark.high for one in series for mark in one.marks))
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="x", color=FAINT, linewidth=0.4)
    axes.set_title(label(result))
    axes.set_xlabel("slower  ←  ratio  →  faster")


def _ratio_axis(axis: Any, highest: float) -> None:
    """Ticks of ratios; powers of two where some are over `HIGHEST`."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    more = [2.0**power for power in range(2, 12) if 2.0**power <= highest]
    few = [0.5, 0.75, 1.0, 1.5, 2.0, *more]
    axis.set_major_locator(FixedLocator(few if more else list(_RATIO_TICKS)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))


# --- the ratios of many results -------------------------------------------------------------------------------------


def draw_ratios(results: Sequence[Result], path: Path) -> None:
    """All rows side by side, suite after suite: the median ratio to the first peer, with the rounds' spread."""
    from matplotlib.lines import Line2D

    lines = _lines([result for result in results if rows_of(result)])
    used = [regime for regime in MARKS if any(regime in regimes(result) for result in results)]
    title = "Time of the first peer / time of gemmery, row by row"
    with figure(12, 3.4 * len(lines) + 0.6, title) as made:
        panels = made.subplots(len(lines), 1, squeeze=False)
        for axes, shown in zip(panels[:, 0], lines, strict=True):
            _ratio_line(axes, shown)
        marks = [
            Line2D([], [], marker=MARKS[regime], color=_colour_of(regime), linestyle="", label=regime)
            for regime in used
        ]
        marks.append(Line2D([], [], color=INK, linewidth=2, label="geometric mean"))
        made.legend(handles=marks, loc="outside upper right", ncols=len(marks))
    save(made, path)


def _colour_of(regime: str) -> str:
    return COLOURS[list(MARKS).index(regime)]


def _lines(results: Sequence[Result]) -> list[list[Result]]:
    """Results one after the other, in lines of about the same number of rows."""
    total = sum(len(result["rows"]) for result in results)
    share = total / -(-total // MOST_ROWS)
    lines: list[list[Result]] = []
    so_far = 0
    for result in results:
        if so_far >= share * len(lines):
            lines.append([])
        lines[-1].append(result)
        so_far += len(result["rows"])
    return lines


def _ratio_line(axes: Axes, results: Sequence[Result]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    start = 0.0
    for place, result in enumerate(results):
        count = len(rows_of(result))
        if place % 2:
            axes.axvspan(start - 1, start + count, color="#f4f4f4", zorder=0)
        axes.text(
            start + (count - 1) / 2,
            HIGHEST * 1.06,
            label(result).replace(", ", "\n", 1),
            ha="center",
            va="bottom",
        )
        first = [series for series in bench_series.ratios(result) if series.method == result["peers"][0]]
        for nth, series in enumerate(first):
            _ratio_marks(axes, series, start, (nth - (len(first) - 1) / 2) * 0.36, count)
        start += count + 1
    axes.axhline(1.0, color=INK, linewidth=0.8, zorder=1)
    axes.set_yscale("log", base=2)
    axes.set_ylim(LOWEST * 0.97, HIGHEST * 1.03)
    axes.yaxis.set_major_locator(FixedLocator(_RATIO_TICKS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticklabels([f"{tick:.1f}" for tick in _RATIO_TICKS])
    axes.grid(axis="y", color=FAINT, linewidth=0.4)
    axes.set_xlim(-1, start - 1)
    axes.set_xticks([])
    axes.set_ylabel("slower  ←  ratio  →  faster")


def _ratio_marks(axes: Axes, series: Series, start: float, shift: float, count: int) -> None:
    """The marks of a result in one regime, and their geometric mean."""
    colour = _colour_of(series.regime)
    inside = [mark for mark in series.marks if LOWEST <= mark.middle <= HIGHEST]
    axes.errorbar(
        [start + mark.x + shift for mark in inside], [mark.middle for mark in inside], yerr=_spread(inside),
        fmt=MARKS[series.regime], color=colour, markersize=3, elinewidth=0.7, zorder=3,
    )  # fmt: skip
    for mark in series.marks:
        if mark not in inside:
            _at_the_edge(axes, mark, start + mark.x + shift, colour, numbered=shift <= 0)
    mean = geometric_mean([mark.middle for mark in series.marks])
    edges = [start - 0.5, start + count - 0.5]
    axes.plot(edges, [mean, mean], color=colour, linewidth=2, alpha=0.5, zorder=2)


def _at_the_edge(axes: Axes, mark: Mark, x: float, colour: str, numbered: bool) -> None:
    """A triangle for a ratio beyond the axis; a number for each row, not for each regime."""
    high = mark.middle > HIGHEST
    y = HIGHEST if high else LOWEST
    axes.plot(x, y, "^" if high else "v", color=colour, markersize=5, zorder=3, clip_on=False)
    if numbered:
        axes.annotate(
            f"{mark.middle:.2f}", (x, y), xytext=(0, -5 if high else 5), textcoords="offset points", rotation=90,
            fontsize=7, color=INK, ha="center", va="top" if high else "bottom",
        )  # fmt: skip


# --- the command ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of picture: what it shows of a result, and how it is drawn."""

    series: Callable[[Result], list[Series]]
    draw: Callable[[Sequence[Result], Path], None]


#: By name. `ratios` is for many results, `shapes` for a few.
KINDS = {
    "throughput": Kind(bench_series.throughput, draw_throughput),
    "shapes": Kind(bench_series.ratios, draw_shapes),
    "scaling": Kind(bench_series.scaling, draw_scaling),
    "ratios": Kind(bench_series.ratios, draw_ratios),
}


def plot(files: Sequence[Path], kinds: Sequence[str], out: Path) -> dict[str, Any]:
    """Draw results.

    Args:
        files: results of `gemmery bench`.
        kinds: of `KINDS`; all but `ratios` where none is named. Of several, each is written beside `out`, with its
            name before the ending.
        out: a file .png or .svg.

    Returns:
        For each kind the file and the series that are in it; no file where the results have none of these.

    Raises:
        ValueError: a file is not a result, a kind is unknown, or `out` has another ending.
        FileNotFoundError: there is no such directory.
    """
    check_name(out)
    unknown = [name for name in kinds if name not in KINDS]
    if unknown:
        raise ValueError(f"there is no kind of picture {unknown[0]!r}; there are {', '.join(KINDS)}")
    results = [read(path) for path in files]
    wanted = list(kinds) or [name for name in KINDS if name != "ratios"]
    found: dict[str, Any] = {}
    for name in wanted:
        series = [one for result in results for one in KINDS[name].series(result)]
        place = out if len(wanted) == 1 else out.with_name(f"{out.stem}-{name}{out.suffix}")
        if series:
            KINDS[name].draw(results, place)
        found[name] = {"file": str(place) if series else None, "series": [one.asdict() for one in series]}
    return found
