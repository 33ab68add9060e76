"""The one style of the lab's pictures, and how they are written: PNG or SVG, by the file's name.

    with figure(8, 4, "twice as fast") as made:
        axes = made.subplots()
        axes.plot([1, 2], [3, 4], color=COLOURS[0])
    save(made, Path("line.svg"))

matplotlib is imported when a figure is made, and without pyplot: there is no window and no list of open figures.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import check_place, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Colors that are told apart in print and by color-blind readers, in the order in which they are used; the palette
#: of Okabe and Ito.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
#: Text and axes; grid lines and background.
INK, FAINT = "#333333", "#bbbbbb"
#: The color map of quantities, dark first; even steps for every reader, in print too.
SEQUENCE = "viridis"
#: The formats that `save` writes.
PICTURES = (".png", ".svg")

#: Any, because matplotlib's types name every key.
STYLE: Any = {
    "font.size": 9, "axes.titlesize": 9, "axes.titlelocation": "left", "axes.edgecolor": INK, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False, "figure.dpi": 150, "savefig.dpi": "figure", "svg.fonttype": "none",
    "svg.hashsalt": "gemmery",
}  # fmt: skip


@contextmanager
def figure(width: float, height: float, title: str = "") -> Iterator[Figure]:
    """An empty figure of a given size in inches; everything that is drawn inside the `with` has the lab's style.

    `title` stands over all panels: one sentence, which says what the picture shows.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with mpl.rc_context(STYLE):
        made = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.08))
        if title:
            # About as many letters of this size go on an inch.
            made.suptitle(textwrap.fill(title, int(width * 12)), x=0.01, ha="left", fontsize=11, color=INK)
        yield made


def whole_ticks(size: int, most: int = 6) -> list[int]:
    """At most `most` whole numbers from 0 to below `size`, a round number apart."""
    steps = (base * 10**power for power in range(19) for base in (1, 2, 5))
    return list(range(0, size, next(step for step in steps if size <= step * most)))


def check_name(path: Path, endings: Sequence[str] = PICTURES) -> None:
    """Ask, before the work, whether a picture can be written to `path`.

    Raises:
        ValueError: the name ends in none of `endings`.
        OSError: there is no such directory, or it can't be written to.
    """
    if path.suffix.lower() not in endings:
        wanted = " or ".join([", ".join(endings[:-1]), endings[-1]] if len(endings) > 1 else endings)
        raise ValueError(f"{path}: the name of a picture must end in {wanted}")
    check_place(path)


def save(made: Figure, path: Path) -> None:
    """Write a figure as PNG or SVG, by the ending of `path`; the same figure gives the same bytes.

    Raises:
        ValueError, OSError: see `check_name`.
    """
    import matplotlib as mpl

    check_name(path)
    with mpl.rc_context(STYLE), replacing(path) as part:
        # A date would make each file of the same picture another one.
        made.savefig(part, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
