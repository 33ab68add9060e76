"""Tile orders as pictures: PNG and SVG, and as animations: GIF, and HTML with the controls of a player."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import replacing, write_text
from .figures import COLOURS, FAINT, INK, PICTURES, SEQUENCE, check_name, figure, save, whole_ticks
from .orders import Comparison, Launch, Order, amount

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

#: The formats of a comparison's picture, by the ending of the file's name.
ENDINGS = (*PICTURES, ".gif", ".html")
#: Colors of the strips of A and of B that tiles read, and of unused ones.
OF_A, OF_B, OTHERS = COLOURS[1], COLOURS[0], "#eeeeee"
#: And, in an animation, of tiles that are being computed; not in the map of times.
NOW = COLOURS[3]
#: The most pictures in a round of the animation, and the seconds for which each is shown.
FRAMES, SECONDS = 24, 0.5
#: The most rows and columns of tiles that are drawn with an outline and their number.
LINED, NUMBERED = 48, 12
#: Letters of a title in an inch.
LETTERS = 10
_PAGE = Path(__file__).with_name("order.html")


def draw(comparison: Comparison, path: Path) -> None:
    """Draw a comparison as what the ending of `path` says, of `ENDINGS`.

    Raises:
        ValueError: the name has another ending.
        OSError: there is no such directory, or the file can't be written.
    """
    check_name(path, ENDINGS)
    if path.suffix.lower() == ".html":
        write_text(path, page(comparison))
    elif path.suffix.lower() == ".gif":
        animate(comparison, path)
    else:
        save(picture(comparison), path)


# --- one picture -----------------------------------------------------------------------------------------------------


def picture(comparison: Comparison) -> Figure:
    """The whole launch and its first tiles in each order, and the hit rates of these and other orders."""
    it, shown = comparison.launch, comparison.shown
    height, width = _panel(it)
    with figure(width * len(shown) + 4, 2 * height + 0.7, _title(comparison)) as made:
        main, side = made.subfigures(1, 2, squeeze=False, width_ratios=(width * len(shown), 4))[0]
        panels = main.subplots(2, len(shown), squeeze=False)
        images = [_whole_launch(axes, it, order) for axes, order in zip(panels[0], shown, strict=True)]
        for axes, order in zip(panels[1], shown, strict=True):
            _first_tiles(axes, it, order)
        main.colorbar(images[0], ax=panels[0, :], label="tiles visited before", fraction=0.05, pad=0.02)
        _hit_rates(side.subplots(), comparison)
        least = amount(comparison.table[0].traffic.least)
        side.suptitle(
            f"read from memory through an L2 of {it.l2 / 2**20:.3g} MB\n(simulated); green: the group size in use;\n"
            f"dotted: A and B once, {least}",
            x=0.03, ha="left", fontsize=9,
        )  # fmt: skip
    return made


def _title(comparison: Comparison) -> str:
    it = comparison.launch
    return f"{it.M}×{it.N}×{it.K} on {it.device.name}: {comparison.conclusion}"


def _panel(launch: Launch) -> tuple[float, float]:
    """Inches of a matrix of tiles with its strips and titles, in the product's proportions within reason."""
    tall = float(np.clip(launch.M / launch.N, 0.3, 1.5))
    return 3.0 * min(tall, 1.2) + 0.8, 3.0 / max(tall / 1.2, 1) + 0.9


def _wrapped(launch: Launch, text: str) -> str:
    """A panel's title in lines that are no wider than the panel."""
    return textwrap.fill(text, round(LETTERS * _panel(launch)[1]))


def _whole_launch(axes: Axes, launch: Launch, order: Order) -> AxesImage:
    number = np.empty(launch.tiles, dtype=int)
    number[tuple(order.visits.T)] = np.arange(len(order.visits))
    image = axes.imshow(number, cmap=SEQUENCE, aspect="auto", interpolation="nearest")
    _write(axes, number)
    axes.set_title(_wrapped(launch, f"{order.label}: all {number.size} tiles of the output"))
    _frame(axes, launch)
    return image


def _write(axes: Axes, time: np.ndarray) -> None:
    """The numbers of tiles, those that have one, where there is room for them."""
    if max(time.shape) > NUMBERED:
        return
    bright = 0.55 * np.nanmax(time)
    for (row, column), number in np.ndenumerate(time):
        if not np.isnan(number):
            colour = "black" if number > bright else "white"
            axes.text(column, row, f"{number:.0f}", ha="center", va="center", fontsize=7, color=colour)


def _frame(axes: Axes, launch: Launch, beyond: tuple[float, float] = (0, 0)) -> None:
    """Limits and lines around tiles; `beyond` is the room for strips at the left of and above the output."""
    tiles_m, tiles_n = launch.tiles
    axes.set_xlim(-0.5 - beyond[0], tiles_n - 0.5)
    axes.set_ylim(tiles_m - 0.5, -0.5 - beyond[1])
    axes.set_box_aspect(float(np.clip(launch.M / launch.N, 0.3, 1.5)))
    axes.set_xticks(whole_ticks(tiles_n))
    axes.set_yticks(whole_ticks(tiles_m))
    axes.set_xlabel("column of tiles")
    axes.set_ylabel("row of tiles")
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
    if max(launch.tiles) <= LINED:
        axes.hlines(np.arange(tiles_m + 1) - 0.5, -0.5, tiles_n - 0.5, color="white", linewidth=0.5)
        axes.vlines(np.arange(tiles_n + 1) - 0.5, -0.5, tiles_m - 0.5, color="white", linewidth=0.5)


def _first_tiles(axes: Axes, launch: Launch, order: Order) -> None:
    """The first tiles among all, and the strips of A and B that they read."""
    time = np.full(launch.tiles, np.nan)
    time[tuple(order.visits[: order.first].T)] = np.arange(order.first)
    _tiles_and_strips(axes, launch, time, order.first_rows, order.first_columns)
    _write(axes, time)
    a, b = order.first_blocks
    wave = ", a wave," if order.first == launch.programs else ""
    text = f"the first {order.first} tiles{wave} read {a + b} blocks: {a} of A and {b} of B"
    axes.set_title(_wrapped(launch, text))


def _tiles_and_strips(
    axes: Axes, launch: Launch, time: np.ndarray, rows: np.ndarray, columns: np.ndarray
) -> list[AxesImage]:
    """Tiles colored by time, those without one gray, and beside them the strips of A and B in use."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    tiles_m, tiles_n = launch.tiles
    thick_n, thick_m = 0.07 * tiles_n, 0.07 * tiles_m * float(np.clip(launch.N / launch.M, 1 / 1.5, 1 / 0.3))
    gap_n, gap_m = thick_n * 0.4, thick_m * 0.4
    tiles = axes.imshow(
        time, cmap=colormaps[SEQUENCE].with_extremes(bad=OTHERS), aspect="auto", interpolation="nearest"
    )
    read_a, read_b = np.zeros((tiles_m, 1)), np.zeros((1, tiles_n))
    read_a[rows], read_b[:, columns] = 1, 1
    left, top = -0.5 - gap_n - thick_n, -0.5 - gap_m - thick_m
    strip_a = axes.imshow(
        read_a, cmap=ListedColormap([OTHERS, OF_A]), vmin=0, vmax=1, aspect="auto", interpolation="nearest",
        extent=(left, left + thick_n, tiles_m - 0.5, -0.5),
    )  # fmt: skip
    strip_b = axes.imshow(
        read_b, cmap=ListedColormap([OTHERS, OF_B]), vmin=0, vmax=1, aspect="auto", interpolation="nearest",
        extent=(-0.5, tiles_n - 0.5, top + thick_m, top),
    )  # fmt: skip
    axes.text(left + thick_n / 2, top + thick_m / 2, "A", color=OF_A, weight="bold", ha="center", va="center")
    axes.text(tiles_n - 0.5, top - gap_m * 0.3, "B", color=OF_B, weight="bold", ha="right", va="bottom")
    _frame(axes, launch, (gap_n + thick_n, gap_m + thick_m))
    return [tiles, strip_a, strip_b]


def _hit_rates(axes: Axes, comparison: Comparison) -> None:
    """Bars of bytes from memory, with the hit rates as numbers."""
    it, orders = comparison.launch, comparison.table
    sizes = np.array([order.traffic.memory for order in orders])
    ours = [order.name == "grouped" and order.group_size == it.group_size for order in orders]
    places = range(len(orders))
    axes.barh(places, sizes, height=0.6, color=[COLOURS[2] if own else FAINT for own in ours])
    for place, order in zip(places, orders, strict=True):
        axes.annotate(
            f"{amount(order.traffic.memory)}\n{order.traffic.hit_rate:.1%} hits", (order.traffic.memory, place),
            xytext=(4, 0), textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    axes.vlines(orders[0].traffic.least, -0.5, len(orders) - 0.5, color=INK, linewidth=1, linestyle=":")
    axes.set_xlim(0, max(sizes) * 1.35)
    # Bars of about the same thickness, however many there are.
    axes.set_ylim(max(len(orders), 8) - 0.5, -0.5)
    axes.set_yticks(places, [order.label for order in orders])
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([])
    axes.spines[["bottom", "left"]].set_visible(False)


# --- animations ------------------------------------------------------------------------------------------------------


def ends(launch: Launch) -> list[int]:
    """The number of finished tiles at the end of each step of an animation: some waves, or a part of one."""
    tiles = launch.tiles[0] * launch.tiles[1]
    many = launch.waves >= FRAMES // 4
    step = launch.programs * -(-launch.waves // FRAMES) if many else -(-tiles // FRAMES)
    return [*range(step, tiles, step), tiles]


def animate(comparison: Comparison, path: Path) -> None:
    """Write the orders side by side as an animated GIF."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    it, shown = comparison.launch, comparison.shown
    height, width = _panel(it)
    with figure(width * len(shown), height + 1.2, _title(comparison)) as made:
        made.set_dpi(100)
        canvas: Any = FigureCanvasAgg(made)
        key = "pink: tiles computed now; red and blue: blocks of A and B that they read"
        made.supxlabel(key, x=0.01, ha="left", fontsize=9)
        panels = made.subplots(1, len(shown), squeeze=False)[0]
        films = [_Film(axes, it, order) for axes, order in zip(panels, shown, strict=True)]
        made.draw_without_rendering()
        made.set_layout_engine("none")
        # The part that all pictures share is drawn once.
        for artist in (artist for film in films for artist in film.artists):
            artist.set_animated(True)
        canvas.draw()
        common = canvas.copy_from_bbox(made.bbox)
        frames, steps = [], ends(it)
        for begin, end in zip([0, *steps], [*steps, steps[-1]], strict=True):
            canvas.restore_region(common)
            for film in films:
                film.show(begin, end)
            frames.append(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))
    # The one in the middle and the last have all colors that there are.
    palette = Image.fromarray(np.concatenate([frames[len(frames) // 2], frames[-1]])).quantize()
    first, *others = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    with replacing(path) as part:
        first.save(part, save_all=True, append_images=others, duration=round(SECONDS * 1000), loop=0)


class _Film:
    """One order's panel of an animation."""

    def __init__(self, axes: Axes, launch: Launch, order: Order) -> None:
        from matplotlib.colors import ListedColormap

        self.launch, self.order, self.axes = launch, order, axes
        none = np.array([], dtype=int)
        self.tiles, self.a, self.b = _tiles_and_strips(
            axes, launch, np.full(launch.tiles, np.nan), none, none
        )
        self.tiles.set_clim(0, len(order.visits))
        self.now = axes.imshow(
            np.full(launch.tiles, np.nan), cmap=ListedColormap([NOW]), aspect="auto", interpolation="nearest"
        )
        self.memory = np.cumsum(order.traffic.wave_memory)
        self.title = axes.set_title(f"{order.label}\n ")
        self.artists = [*axes.images, *axes.collections, self.title]

    def show(self, begin: int, end: int) -> None:
        """Draw the picture in which the tiles from `begin` to `end` are computed; at the end there are none."""
        it, order = self.launch, self.order
        number = np.full(it.tiles, np.nan)
        number[tuple(order.visits[:end].T)] = np.arange(end)
        self.tiles.set_data(number)
        rows, columns = order.visits[begin:end].T
        now = np.full(it.tiles, np.nan)
        now[rows, columns] = 1
        read_a, read_b = np.zeros((it.tiles[0], 1)), np.zeros((1, it.tiles[1]))
        read_a[rows], read_b[:, columns] = 1, 1
        self.a.set_data(read_a)
        self.b.set_data(read_b)
        self.now.set_data(now)
        memory = amount(self.memory[-(-end // it.programs) - 1])
        self.title.set_text(f"{order.label}: {end} of {number.size} tiles;\n{memory} read from memory so far")
        for artist in self.artists:
            self.axes.draw_artist(artist)


def page(comparison: Comparison) -> str:
    """The orders side by side as a page of HTML that needs no other file: a player, and the table of hit rates."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    values = comparison.asdict()
    for of_order, order in zip(values["orders"], comparison.shown, strict=True):
        of_order["label"] = order.label
    for of_order, order in zip(values["table"], comparison.table, strict=True):
        of_order["label"] = order.label
    values |= {
        "title": _title(comparison), "launch": str(comparison.launch), "schedule": None,
        "colours": [to_hex(colour) for colour in colormaps[SEQUENCE](np.linspace(0, 1, 64))],
    }  # fmt: skip
    # The data must not contain the end tag of its script.
    data = json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")
    return _PAGE.read_text(encoding="utf-8").replace("DATA", data, 1)
