"""Draw benchmarks/results/*.json: the ratio of every row, and throughput over size.

python benchmarks/plots.py               write ratios.png and square.png beside the results
python benchmarks/plots.py --out DIR     or elsewhere
"""

import argparse
import itertools
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.records import RESULTS, Data, kind, read_results, regimes, run_line  # noqa: E402
from gemmery.lab.timing import geometric_mean  # noqa: E402

#: Ratios beyond these are drawn at the edge, as triangles.
LOWEST, HIGHEST = 0.5, 2.0
#: About as many rows stand side by side in a line.
MOST_ROWS = 120
#: Colours that are told apart in print and by colour-blind readers, in the order in which they are used.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, FAINT = "#333333", "#bbbbbb"
REGIMES = dict(zip(("burst", "steady", "graph", "host"), zip("osDP", COLOURS, strict=False), strict=True))

mpl.rcParams.update({
    "font.size": 9, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "figure.dpi": 150,
})  # fmt: skip


# --- the ratio of every row -----------------------------------------------------------------------------------------


def draw_ratios(results: list[Data], path: Path) -> None:
    """All rows side by side, suite after suite: the median ratio to the first peer, with the rounds' spread."""
    results = [result for result in results if any("summary" in row for row in result["rows"])]
    lines = _lines(results)
    figure, panels = plt.subplots(len(lines), 1, figsize=(12, 3.4 * len(lines) + 0.4), squeeze=False)
    for axes, shown in zip(panels[:, 0], lines, strict=True):
        _ratio_line(axes, shown)
    used = [regime for regime in REGIMES if any(regime in regimes(result) for result in results)]
    marks = [
        Line2D([], [], marker=REGIMES[regime][0], color=REGIMES[regime][1], linestyle="", label=regime)
        for regime in used
    ]
    marks.append(Line2D([], [], color=INK, linewidth=2, label="geometric mean"))
    figure.legend(handles=marks, loc="upper right", ncols=len(marks), bbox_to_anchor=(0.99, 1.0))
    figure.suptitle(
        "time of the fastest peer / time of gemmery, row by row",
        x=0.01,
        ha="left",
        y=0.99,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.985))
    figure.savefig(path)
    plt.close(figure)


def _lines(results: list[Data]) -> list[list[Data]]:
    """Results one after the other, in lines of about the same number of rows."""
    total = sum(len(result["rows"]) for result in results)
    share = total / -(-total // MOST_ROWS)
    lines: list[list[Data]] = []
    so_far = 0
    for result in results:
        if so_far >= share * len(lines):
            lines.append([])
        lines[-1].append(result)
        so_far += len(result["rows"])
    return lines


def _ratio_line(axes: Axes, results: list[Data]) -> None:
    start = 0.0
    for place, result in enumerate(results):
        rows = [row for row in result["rows"] if "summary" in row]
        if place % 2:
            axes.axvspan(start - 1, start + len(rows), color="#f4f4f4", zorder=0)
        axes.text(
            start + (len(rows) - 1) / 2, HIGHEST * 1.06, f"{result['suite'].replace('_', ' ')}\n{kind(result)}",
            ha="center", va="bottom",
        )  # fmt: skip
        shown = regimes(result)
        for nth, regime in enumerate(shown):
            shift = (nth - (len(shown) - 1) / 2) * 0.36
            _ratio_marks(axes, rows, regime, result["peers"][0], start, shift)
        start += len(rows) + 1
    axes.axhline(1.0, color=INK, linewidth=0.8, zorder=1)
    axes.set_yscale("log", base=2)
    axes.set_ylim(LOWEST * 0.97, HIGHEST * 1.03)
    ticks = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticklabels([f"{tick:.1f}" for tick in ticks])
    axes.grid(axis="y", color=FAINT, linewidth=0.4)
    axes.set_xlim(-1, start - 1)
    axes.set_xticks([])
    axes.set_ylabel("slower  ←  ratio  →  faster")


def _ratio_marks(axes: Axes, rows: list[Data], regime: str, peer: str, start: float, shift: float) -> None:
    marker, colour = REGIMES[regime]
    found = [
        (start + place + shift, row["summary"][regime]["ratio"][peer])
        for place, row in enumerate(rows)
        if peer in row["summary"].get(regime, {}).get("ratio", {})
    ]
    inside = [(x, ratio) for x, ratio in found if LOWEST <= ratio["median"] <= HIGHEST]
    axes.errorbar(
        [x for x, _ in inside], [ratio["median"] for _, ratio in inside],
        yerr=[
            [ratio["median"] - ratio["min"] for _, ratio in inside],
            [ratio["max"] - ratio["median"] for _, ratio in inside],
        ],
        fmt=marker, color=colour, markersize=3, elinewidth=0.7, zorder=3,
    )  # fmt: skip
    for x, ratio in found:
        if not LOWEST <= ratio["median"] <= HIGHEST:
            high = ratio["median"] > HIGHEST
            y = HIGHEST if high else LOWEST
            axes.plot(x, y, "^" if high else "v", color=colour, markersize=5, zorder=3, clip_on=False)
            if shift <= 0:  # a number for each row, not for each regime
                axes.annotate(
                    f"{ratio['median']:.2f}", (x, y), xytext=(0, -5 if high else 5), textcoords="offset points",
                    rotation=90, fontsize=7, color=INK, ha="center", va="top" if high else "bottom",
                )  # fmt: skip
    if found:
        mean = geometric_mean([ratio["median"] for _, ratio in found])
        edges = [start - 0.5, start + len(rows) - 0.5]
        axes.plot(edges, [mean, mean], color=colour, linewidth=2, alpha=0.5, zorder=2)


# --- throughput over size -------------------------------------------------------------------------------------------


def _median_round(row: Data, regime: str, ours: str, peer: str) -> dict[str, float]:
    """All methods' seconds in the round with the median ratio: figures that belong together, unlike all medians."""
    rounds = row.get("rounds", {}).get(regime, [])
    ranked = sorted(rounds, key=lambda times: times.get(peer, times[ours]) / times[ours])
    return ranked[(len(ranked) - 1) // 2] if ranked else {}


def draw_square(results: list[Data], path: Path) -> None:
    """Throughput of every method over the size of square products, a panel for each type."""
    figure, panels = plt.subplots(1, len(results), figsize=(6 * len(results), 4), squeeze=False, sharey=True)
    for axes, result in zip(panels[0], results, strict=True):
        methods = (result["ours"], *result["peers"])
        for (colour, method), (regime, style) in itertools.product(
            zip(COLOURS, methods, strict=False), (("burst", "-"), ("steady", "--"))
        ):
            points = []
            for row in result["rows"]:
                times = _median_round(row, regime, *methods[:2])
                if method in times:
                    points.append((row["M"], 2 * row["M"] ** 3 / times[method] / 1e12))
            if points:
                label = f"{method}, {regime}"
                axes.plot(
                    *zip(*points, strict=True), style, marker="o", markersize=3, color=colour, label=label
                )
        sizes = [row["M"] for row in result["rows"]]
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([str(size) for size in sizes], rotation=45, ha="right")
        axes.set_title(f"square, {kind(result)}", loc="left")
        axes.set_xlabel("M = N = K")
        axes.grid(color=FAINT, linewidth=0.4)
        axes.legend(loc="lower right")
    panels[0][0].set_ylabel("TFLOP/s")
    panels[0][0].set_ylim(bottom=0)
    figure.text(0.01, 0.005, run_line(results[0]), fontsize=6, color=INK)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 if the pictures were written, 2 if there is nothing to draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: beside the results")
    options = parser.parse_args(arguments)
    out = options.out or options.results
    try:
        results = read_results(options.results)
    except ValueError as error:
        print(f"plots: {error}", file=sys.stderr)
        return 2
    square = [result for result in results if result["suite"] == "square"]
    if not results:
        print(f"plots: no results in {options.results}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    draw_ratios(results, out / "ratios.png")
    if square:
        draw_square(square, out / "square.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
