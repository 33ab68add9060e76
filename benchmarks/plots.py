"""Draw benchmarks/results/*.json: the README's lines, the ratio of every row, and throughput over size.

python benchmarks/plots.py               write groups.png, ratios.png and square.png beside the results
python benchmarks/plots.py --out DIR     or elsewhere

The same pictures of any results, and others: gemmery plot.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import sparse_summary  # noqa: E402
from benchmarks.records import RESULTS, Data, Pooled, groups, read_results, versions  # noqa: E402
from gemmery.lab.bench_plots import draw_ratios, draw_throughput  # noqa: E402
from gemmery.lab.figures import COLOURS, FAINT, INK, figure, save  # noqa: E402

#: Ratios beyond these are drawn at the edge, as triangles.
LOWEST, HIGHEST = 0.33, 4.0
TICKS = (0.33, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0)


def draw_groups(results: Sequence[Data], path: Path) -> None:
    """The README's table as a picture: a dot for each row, a bar for the geometric mean."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    found = groups(results)
    shown = versions(found)
    colours = dict(zip(shown, COLOURS, strict=False))
    title = "Time of another implementation / time of gemmery"
    with figure(10, 0.42 * len(found) + 1.1, title) as made:
        axes = made.subplots()
        for place, (_, each) in enumerate(found):
            for nth, version in enumerate(version for version in shown if version in each):
                lane = place + (nth - (len(each) - 1) / 2) * 0.36
                _dots(axes, each[version], lane, colours[version])
        axes.axvline(1.0, color=INK, linewidth=0.8, zorder=1)
        axes.set_xscale("log", base=2)
        axes.set_xlim(LOWEST * 0.97, HIGHEST * 1.03)
        axes.xaxis.set_major_locator(FixedLocator(TICKS))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_yticks(range(len(found)), [group.title.partition(", against")[0] for group, _ in found])
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.grid(axis="x", color=FAINT, linewidth=0.4)
        axes.set_xlabel("slower  ←  a dot for each product, a bar for their geometric mean  →  faster")
        lines = [
            Line2D(
                [],
                [],
                marker="o",
                markersize=3,
                linestyle="",
                color=colours[version],
                label=f"Triton {version}",
            )
            for version in shown
        ]
        made.legend(handles=lines, loc="outside upper right", ncols=len(lines))
    save(made, path)


def _dots(axes: Any, pooled: Pooled, lane: float, colour: str) -> None:
    """The rows of a group with one version of Triton, at a height of their own."""
    for marker, ratios in (
        ("<", [LOWEST for ratio in pooled.ratios if ratio < LOWEST]),
        ("o", [ratio for ratio in pooled.ratios if LOWEST <= ratio <= HIGHEST]),
        (">", [HIGHEST for ratio in pooled.ratios if ratio > HIGHEST]),
    ):
        axes.plot(ratios, [lane] * len(ratios), marker, color=colour, markersize=3, alpha=0.55, clip_on=False)
    mean = pooled.figures["geomean"]
    axes.plot([mean, mean], [lane - 0.17, lane + 0.17], color=colour, linewidth=2.5, solid_capstyle="butt")


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
        of_sparse = sparse_summary.read(options.results)
    except ValueError as error:
        print(f"plots: {error}", file=sys.stderr)
        return 2
    square = [result for result in results if result["suite"] == "square"]
    if not results:
        print(f"plots: no results in {options.results}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    if groups([*results, *of_sparse]):
        draw_groups([*results, *of_sparse], out / "groups.png")
    draw_ratios(results, out / "ratios.png")
    if square:
        draw_throughput(square, out / "square.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
