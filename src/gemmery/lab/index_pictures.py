"""The offsets of one program's pointers as heat maps: on the whole matrices, and lane by lane."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .figures import COLOURS, SEQUENCE, figure, whole_ticks
from .indices import ASTRAY, BEYOND, Accesses, Block

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

#: Colors of lanes that are masked off, neither of which is in the map of offsets.
MASKED = {ASTRAY: "#d9d9d9", BEYOND: COLOURS[1]}
#: The most points per side of a picture of a whole matrix.
POINTS = 200
#: The most rows and columns of lanes that are drawn with their offsets.
NUMBERED = 16


def picture(found: Accesses) -> Figure:
    """For A, B and C: above the matrix with the block in it, below the block's lanes."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    with figure(12, 9, f"{found.where}: {found.conclusion}") as made:
        whole, lanes = made.subplots(2, 3)
        for block, above, below in zip(found.blocks, whole, lanes, strict=True):
            _matrix(above, found, block)
            bar = made.colorbar(_block(below, block), ax=below, label="offset, elements", location="bottom")
            bar.locator = MaxNLocator(4)
            bar.formatter = FuncFormatter(lambda offset, _: f"{offset:.0f}")
            bar.update_ticks()
        made.supxlabel(_key(found), x=0.01, ha="left", fontsize=9)
    return made


def _key(found: Accesses) -> str:
    """The legend of the colors."""
    said = [
        "above: each matrix, brighter where the offset is larger; framed: the block; dashed: all steps along K"
    ]
    if any((~block.mask).any() for block in found.blocks):
        said.append(
            "below, masked off: gray is between the matrix's first and last element in memory, orange before "
            "or after them"
        )
    return "\n".join(said)


def _matrix(axes: Axes, found: Accesses, block: Block) -> None:
    """The offsets of a whole matrix, and where the block lies on it."""
    from matplotlib.patches import Rectangle

    rows, cols = block.shape
    (height, width) = block.offsets.shape
    down, across = (_sampled(size) for size in block.shape)
    offsets = block.start + down[:, None] * block.strides[0] + across[None, :] * block.strides[1]
    if offsets.size:
        axes.imshow(offsets, cmap=SEQUENCE, aspect="auto", interpolation="nearest", extent=(0, cols, rows, 0))
    for colour, line in (("black", 3.5), ("white", 1.5)):
        axes.add_patch(
            Rectangle(
                (block.col, block.row), width, height, facecolor="none", edgecolor=colour, linewidth=line, clip_on=False
            )
        )  # fmt: skip
    s, n = found.schedule, found.unit
    first, count = int(s.first_k[n]), found.steps * int(s.step[n])
    strips = {"A": (first, block.row, count, height), "B": (block.col, first, width, count)}
    if block.name in strips:
        x, y, dx, dy = strips[block.name]
        axes.add_patch(
            Rectangle((x, y), dx, dy, facecolor="none", edgecolor="white", linewidth=1, linestyle="--")
        )
    axes.set_xlim(0, max(cols, block.col + width))
    axes.set_ylim(max(rows, block.row + height), 0)
    axes.set_xticks(whole_ticks(cols + 1))
    axes.set_yticks(whole_ticks(rows + 1))
    axes.set_box_aspect(float(np.clip(rows / max(cols, 1), 0.6, 1.4)))
    axes.set_title(
        f"{block.name} is {rows}×{cols}, {block.order}:\nstrides {block.strides[0]} and {block.strides[1]}"
    )
    names = {"A": ("m", "k"), "B": ("k", "n"), "C": ("m", "n")}[block.name]
    axes.set_ylabel(names[0])
    axes.set_xlabel(names[1])
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)


def _sampled(size: int) -> np.ndarray:
    """At most `POINTS` places, evenly spread over `size`."""
    return np.unique(np.linspace(0, max(size - 1, 0), min(size, POINTS)).astype(np.int64))


def _block(axes: Axes, block: Block) -> AxesImage:
    """The lanes of a block, colored by their offset or, if they are masked off, by the reason."""
    from matplotlib.colors import ListedColormap

    rows, cols = block.offsets.shape
    inside = np.where(block.mask, block.offsets, np.nan)
    image = axes.imshow(inside, cmap=SEQUENCE, aspect="auto", interpolation="nearest")
    outside = np.where(block.mask, np.nan, block.lanes)
    axes.imshow(
        outside, cmap=ListedColormap([MASKED[ASTRAY], MASKED[BEYOND]]), vmin=ASTRAY, vmax=BEYOND, aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    if max(rows, cols) <= NUMBERED:
        size = 6 if max(rows, cols) > 8 else 8
        middle = (block.offsets.min() + block.offsets.max()) / 2
        for (row, col), offset in np.ndenumerate(block.offsets):
            colour = "white" if block.mask[row, col] and offset < middle else "black"
            axes.text(col, row, str(offset), ha="center", va="center", fontsize=size, color=colour)
    axes.set_box_aspect(float(np.clip(rows / cols, 0.6, 1.4)))
    off = int((~block.mask).sum())
    axes.set_title(
        f"{block.name}[{block.row}:{block.row + rows}, {block.col}:{block.col + cols}]: "
        f"{f'{off} elements masked off' if off else 'all elements inside'}\n"
        f"offset {block.corner} + i·{block.strides[0]} + j·{block.strides[1]}"
    )
    axes.set_yticks(whole_ticks(rows))
    axes.set_xticks(whole_ticks(cols))
    axes.set_ylabel("i")
    axes.set_xlabel("j")
    return image
