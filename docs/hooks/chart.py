"""The picture of the first page: the ratios of README's table, in the colours of the page's text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from docs.hooks import drawings
from docs.hooks.repository import ROOT
from gemmery.lab.figures import FAINT, INK, figure

#: A cell of the table: geometric mean, 10th percentile, worst row.
_CELL = re.compile(r"\*\*([\d.]+)\*\* · ([\d.]+) · ([\d.]+)")
#: The axis is as wide as these ratios, and has lines at those.
_FROM, _TO, _TICKS = 0.3, 2.75, (0.5, 1, 1.5, 2, 2.5)
CAPTION = (
    "Speed of gemmery relative to the implementation in parentheses, on an H200 with cold inputs and no tuning. A bar "
    "ends at the geometric mean of the rows, and the thin line at the worst row. Right of 1, gemmery is faster."
)


@dataclass(frozen=True)
class Ratio:
    """A row of the table."""

    label: str
    mean: float
    worst: float


def ratios(readme: str) -> list[Ratio]:
    """The rows of README's table; of several versions of Triton, the newest that was measured."""
    table = readme.split("<!-- results:begin -->")[1].split("<!-- results:end -->")[0]
    found = []
    for line in table.splitlines():
        if cell := _CELL.search(line):
            title, _, peer = line.split("|")[1].strip().partition(", against ")
            label = f"{title} ({peer.replace('the best of torch and', 'best of torch,')})" if peer else title
            found.append(Ratio(label, float(cell[1]), float(cell[3])))
    return found


def results() -> str:
    """The picture, as an element of a page."""
    rows = ratios((ROOT / "README.md").read_text(encoding="utf-8"))
    with figure(4.2, 0.32 * len(rows) + 0.4) as made:
        axes = made.subplots()
        for place, row in enumerate(rows):
            colour = drawings.GREEN if row.mean >= 1 else drawings.RED
            axes.barh(place, row.mean - 1, 0.3, left=1, color=colour)
            axes.plot([row.worst, row.mean], [place, place], color=INK, linewidth=0.8)
            axes.text(max(row.mean, 1) + 0.03, place, f"{row.mean:.2f}", fontsize=7, color=INK, va="center")
            # Above the bar: beside it, labels would take half of a phone's width.
            axes.text(_FROM, place - 0.38, row.label, fontsize=7, color=INK, va="center")
            for tick in _TICKS:
                axes.vlines(
                    tick,
                    place - 0.18,
                    place + 0.18,
                    color=INK if tick == 1 else FAINT,
                    linewidth=0.8,
                    zorder=0,
                )
        axes.set(xlim=(_FROM, _TO), ylim=(len(rows) - 0.5, -0.7), yticks=[], xticks=_TICKS)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(length=0, labelsize=7)
    # As drawn on a phone, and larger where there is room.
    return re.sub(
        r'style="width:[\d.]+pt"', 'style="width:min(100%, 30rem)"', drawings.svg(made, CAPTION), count=1
    )
