"""The ladder's pictures: drawn from the rungs' own arithmetic, as SVG that takes the page's colours."""

from __future__ import annotations

import ast
import html
import io
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from typer.testing import CliRunner

from gemmery.cli import app
from gemmery.lab import ladder
from gemmery.lab.figures import COLOURS, FAINT, INK, STYLE, figure
from gemmery.lab.tile_order import visits

BLUE, RED, GREEN, PINK, ORANGE, SKY = COLOURS
#: For a seventh line; of Paul Tol's palettes for colour-blind readers.
DARK = "#882255"


# --- pages ----------------------------------------------------------------------------------------------------------


def svg(made: Figure, caption: str) -> str:
    """A figure as an element of a page, in the colours of its text."""
    written = io.StringIO()
    with mpl.rc_context(STYLE):
        made.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    drawn = written.getvalue()
    drawn = drawn[drawn.index("<svg") :].replace(INK, "currentColor")
    drawn = re.sub(
        r'<svg ([^>]*?)height="[\d.]+pt"([^>]*?)width="([\d.]+)pt"', r'<svg \1\2style="width:\3pt"', drawn
    )
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    # In a line, so that Markdown leaves it alone.
    drawn = re.sub(r"\s*\n\s*", " ", drawn).replace(
        "<svg ", f'<svg role="img" aria-label="{html.escape(caption)}" ', 1
    )
    return f'<figure class="drawing">{drawn}<figcaption>{html.escape(caption)}</figcaption></figure>'


@contextmanager
def panels(width: float, height: float, count: int = 1) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure with panels side by side and no axes."""
    with figure(width, height) as made:
        drawn = made.subplots(1, count, squeeze=False)[0]
        for axes in drawn:
            axes.set_axis_off()
        yield made, list(drawn)


def fit(axes: Axes, rows: float, columns: float) -> None:
    """Show this many cells, the first at the top left, and all of them square."""
    axes.set(xlim=(-0.1, columns + 0.1), ylim=(rows + 0.1, -0.1), aspect="equal")


def cell(axes: Axes, row: float, column: float, text: object = "", fill: str = "none", *, outside: bool = False,
         height: float = 1, width: float = 1) -> None:  # fmt: skip
    """A box with a text; hatched where it is masked."""
    how = {"hatch": "////", "edgecolor": FAINT} if outside else {"edgecolor": INK}
    box = Rectangle((column, row), width, height, facecolor=fill, alpha=None if fill == "none" else 0.55, linewidth=0.6,
                    **how)  # fmt: skip
    axes.add_patch(box)
    colour = FAINT if outside else INK
    axes.text(
        column + width / 2, row + height / 2, str(text), ha="center", va="center", fontsize=7, color=colour
    )


def label(axes: Axes, row: float, column: float, text: str, **how: object) -> None:
    """A text, beginning at a place."""
    axes.text(column, row, text, **({"va": "center", "fontsize": 8} | how))


# --- the rungs ------------------------------------------------------------------------------------------------------


def vector() -> Figure:
    """Rung 1: the indices of every program of a launch, and which of them the mask leaves out."""
    n, block = 22, 8
    with panels(7.2, 1.5) as (made, (axes,)):
        programs = -(-n // block)
        fit(axes, programs, 19)
        for program in range(programs):
            label(axes, program + 0.5, 0, f"program {program}: {program} · {block} + arange({block})")
            for lane, index in enumerate(program * block + np.arange(block)):
                cell(axes, program, 11 + lane, index, COLOURS[program], outside=index >= n)
    return made


def window() -> Figure:
    """Rung 2: a window on a matrix, by the offset of its corner, with what lies outside."""
    rows, columns, high, wide, corner = 5, 10, 4, 4, (2, 7)
    with panels(7.2, 2.6) as (made, (axes,)):
        fit(axes, 6, 20)
        for row in range(rows):
            for column in range(columns):
                cell(axes, row, column, row * columns + column)
        for row, column in np.ndindex(high, wide):
            at = corner[0] + row, corner[1] + column
            outside = at[0] >= rows or at[1] >= columns
            cell(axes, *at, "" if not outside else "0", BLUE if not outside else "none", outside=outside)
        for line, said in enumerate((
            f"shape ({rows}, {columns}), strides ({columns}, 1)", f"block ({high}, {wide}) at offset {corner}",
            "what lies outside loads as 0, and is not stored",
        )):  # fmt: skip
            label(axes, 1.5 + line, 11.8, said)
    return made


def walk() -> Figure:
    """Rung 3: which elements one program loads in each step along K; numbers are offsets in memory."""
    M, N, K, block = 6, 8, 8, 2
    tile_m, tile_n = 1, 2
    with panels(7.2, 3.0, 2) as (made, drawn):
        for axes, name, size, tile in zip(
            drawn, ("a, (M, K)", "w, (N, K)"), (M, N), (tile_m, tile_n), strict=True
        ):
            fit(axes, 8.8, K)
            label(axes, 0.3, 0, f"{name}: rows {tile * block} and {tile * block + 1}", fontsize=9)
            for row, column in np.ndindex(size, K):
                mine = row // block == tile
                cell(axes, row + 0.8, column, row * K + column, COLOURS[column // block] if mine else "none")
    return made


def masks() -> Figure:
    """Rung 4: the last tile of a product whose sizes no block divides, in its last step along K."""
    M, N, K, block = 7, 6, 5, 4
    with panels(7.2, 3.1, 3) as (made, drawn):
        for axes, name, sizes, strides in zip(
            drawn, ("a: masks 1 and 3", "b, transposed: masks 3 and 2", "out: masks 1 and 2"),
            ((M, K), (K, N), (M, N)), ((K, 1), (1, K), (N, 1)), strict=True,
        ):  # fmt: skip
            fit(axes, 8.8, 8)
            label(axes, 0.3, 0, name, fontsize=9)
            for row, column in np.ndindex(8, 8):
                inside = row < sizes[0] and column < sizes[1]
                if row // block and column // block:
                    offset = row * strides[0] + column * strides[1]
                    cell(axes, row + 0.8, column, offset, BLUE if inside else "none", outside=not inside)
                elif inside:
                    cell(axes, row + 0.8, column)
    return made


def order() -> Figure:
    """Rung 5: when each tile is visited, and the blocks that the first wave reads, in both orders."""
    tiles, at_once = 8, 8
    with panels(7.2, 4.0, 2) as (made, drawn):
        for axes, name, group in zip(drawn, ("row by row", "groups of 4 rows"), (1, 4), strict=True):
            fit(axes, tiles + 2.4, tiles + 1.6)
            places = visits(tiles, tiles, "grouped", group)
            wave = places[:at_once]
            rows, columns = {int(row) for row, _ in wave}, {int(column) for _, column in wave}
            count = len(rows) + len(columns)
            label(
                axes, 0.3, 0, f"{name}: {len(rows)} of a + {len(columns)} of b = {count} blocks", fontsize=9
            )
            for time, (row, column) in enumerate(places):
                cell(axes, row + 2.4, column + 1.6, time, BLUE if time < at_once else "none")
            for place in range(tiles):
                cell(axes, place + 2.4, 0.3, "a", ORANGE if place in rows else "none")
                cell(axes, 1.1, place + 1.6, "b", ORANGE if place in columns else "none")
    return made


def configs() -> Figure:
    """Rung 6: what the tuner chooses between: bytes from L2 for each operation, and shared memory, of every tile."""
    tiles = ((64, 64, 64, 4), (64, 128, 64, 4), (128, 128, 32, 4), (128, 128, 64, 3), (128, 128, 64, 4),
             (128, 256, 64, 3))  # fmt: skip
    with figure(7.2, 2.6) as made:
        left, right = made.subplots(1, 2, sharey=True)
        names = [f"{m}x{n}x{k}, {stages} stages" for m, n, k, stages in tiles]
        left.barh(names, [2 * (m + n) / (2 * m * n) * 1000 for m, n, _, _ in tiles], color=BLUE)
        left.set_title("bytes loaded for 1000 operations")
        right.barh(names, [stages * (m + n) * k * 2 / 1024 for m, n, k, stages in tiles], color=ORANGE)
        right.axvline(227, color=INK, linewidth=0.8, linestyle="--")
        right.set_title("KB of shared memory; dashed: what an H200 has")
    return made


def persistent() -> Figure:
    """Rung 7: the parts of a program's time, one program a tile and persistent; not to scale."""
    parts = (("start", 1.0, ORANGE), ("K loop", 5.0, BLUE), ("end", 1.0, GREEN))
    with panels(7.2, 2.1) as (made, (axes,)):
        axes.set(xlim=(0, 30), ylim=(5.6, -0.6))
        for line, (name, flattened) in enumerate(
            (("one program a tile", False), ("persistent, flattened", True))
        ):
            label(axes, line * 3 - 0.2, 0, name)
            at = 0.0
            for tile in range(3):
                for part, length, colour in parts:
                    # The next tile's first loads run under the end of this one.
                    if flattened and part == "start" and tile:
                        continue
                    cell(axes, line * 3 + 0.4, at, f"{part} {tile}" if part == "K loop" else part, colour, width=length,
                         height=1.2)  # fmt: skip
                    at += length
                at += 0.0 if flattened else 0.6
            label(axes, line * 3 + 1.0, at + 0.4, "…")
    return made


def shared() -> Figure:
    """Rung 8: shared memory of the pipeline and of the tile on its way out, for what was considered."""
    choices = (("3 stages, whole tile", 3, 1), ("4 stages, whole tile", 4, 1), ("4 stages, half tiles", 4, 2))
    with figure(7.2, 1.9) as made:
        axes = made.subplots()
        names = [name for name, _, _ in choices]
        pipeline = np.array([stages * (128 + 256) * 64 * 2 for _, stages, _ in choices])
        store = np.array([128 * 256 * 2 // halves for _, _, halves in choices])
        axes.barh(names, pipeline / 1024, color=BLUE, label="pipeline")
        axes.barh(names, store / 1024, left=pipeline / 1024, color=ORANGE, label="tile on its way out")
        axes.axvline(227, color=INK, linewidth=0.8, linestyle="--", label="what an H200 has")
        axes.invert_yaxis()
        axes.set_xlabel("KB of shared memory, tile 128x256x64")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return made


def passes() -> Figure:
    """Rung 9: bytes of the output that are moved, separate and fused."""
    size = 4096 * 14336 * 2 / 1e6
    steps = (("product", 1, BLUE), ("bias: read", 1, SKY), ("bias: write", 1, SKY), ("gelu: read", 1, GREEN),
             ("gelu: write", 1, GREEN))  # fmt: skip
    with figure(7.2, 1.7) as made:
        axes = made.subplots()
        at = 0.0
        for name, count, colour in steps:
            axes.barh("separate", count * size, left=at, color=colour, edgecolor="white")
            axes.text(at + size / 2, 0, name, ha="center", va="center", fontsize=7, color="white")
            at += count * size
        axes.barh("fused", size, color=BLUE, edgecolor="white")
        axes.text(size / 2, 1, "result", ha="center", va="center", fontsize=7, color="white")
        axes.invert_yaxis()
        axes.set_xlabel("MB to and from memory for an output of 4096 x 14336 in float16")
    return made


def boxes(
    axes: Axes, corner: tuple[float, float], held: Iterable[tuple[int, int, list[tuple[int, int]]]]
) -> None:
    """A box for each lane and number of a colour: around the places of which these are, a row and a column each."""
    for lane, colour, places in held:
        rows, columns = zip(*places, strict=True)
        high, wide = max(rows) - min(rows) + 1, max(columns) - min(columns) + 1
        assert len(set(places)) == high * wide, "what a box is of must be side by side"
        cell(axes, corner[0] + min(rows), corner[1] + min(columns), lane, COLOURS[colour], height=high,
             width=wide)  # fmt: skip


def registers(
    place: Callable[..., tuple[int, int]], halves: int
) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Of 32 lanes with 4 registers each: the lane, the register, and where its numbers belong."""
    for lane, register in np.ndindex(32, 4):
        more = [(half,) for half in range(halves)] if halves > 1 else [()]
        yield lane, register, [place(lane, register, *half) for half in more]


def roles() -> Figure:
    """Rung 10: what the producer and two consumers do, in turns; not to scale."""
    tiles, step, stored = 4, 4.0, 2.6
    with panels(7.2, 2.3) as (made, (axes,)):
        axes.set(xlim=(0, 26), ylim=(5.4, -0.2))
        for line, name in enumerate(("producer", "consumer 0", "consumer 1")):
            label(axes, 1.8 * line + 0.6, 0, name)
        for tile in range(tiles):
            begun = 6.4 + tile * step
            colour = COLOURS[tile]
            cell(axes, 0, begun - 2, f"load tile {tile}", colour, width=step, height=1.2)
            line = 1.8 * (1 + tile % 2)
            cell(axes, line, begun, f"multiply tile {tile}", colour, width=step, height=1.2)
            cell(axes, line, begun + step, "store", width=stored, height=1.2)
    return made


def words() -> Figure:
    """Rung 11: which columns of a step a word has, and at which bits."""
    shown = 3
    with panels(7.2, 2.3) as (made, (axes,)):
        fit(axes, 10.6, 34)
        for run in range(4):
            label(axes, 0.5 + 1.3 * run, 0, f"columns {16 * run} to {16 * run + 15}", fontsize=7)
            for column in range(16):
                word = column // 2
                cell(
                    axes,
                    1.3 * run,
                    9 + 1.5 * column,
                    word,
                    COLOURS[run] if word == shown else "none",
                    width=1.5,
                )
        label(axes, 6.6, 9, "the step's 64 columns, and the word that has each", fontsize=7)
        label(axes, 8.9, 0, f"word {shown}: columns", fontsize=7)
        for i in range(8):
            run, neighbour = divmod(i, 2)
            cell(axes, 8.4, 9 + 3 * i, 16 * run + 2 * shown + neighbour, COLOURS[run], width=3)
            label(axes, 9.9, 9.2 + 3 * i, f"bits {4 * i}–{4 * i + 3}", fontsize=6)
    return made


def fragments() -> Figure:
    """Rung 12: which lane has which numbers of A, B and D."""
    in_a, in_b, in_d = functions(12, "place_in_a", "place_in_b", "place_in_c")
    with panels(7.2, 4.7) as (made, (axes,)):
        fit(axes, 27.6, 45)
        label(axes, 0.4, 0, "A: 16 rows of w, 16 kept numbers of each")
        label(axes, 0.4, 19, "D: 16 rows of w, 8 rows of x")
        label(axes, 18.6, 0, "B, transposed: 8 rows of x, 32 columns")
        boxes(axes, (1.2, 0), registers(in_a, 2))
        boxes(axes, (1.2, 19), registers(in_d, 1))
        boxes(
            axes,
            (19.4, 0),
            ((*held, [place[::-1] for place in places]) for *held, places in registers(in_b, 2)),
        )
        label(axes, 19.9, 34, "number: lane")
        for register in range(4):
            cell(axes, 21.4 + 1.4 * register, 34, "", COLOURS[register])
            label(axes, 21.9 + 1.4 * register, 35.4, f"register {register}")
    return made


def codes() -> Figure:
    """Rung 12: which lane's word has which codes, and one word in full."""
    (in_codes,) = functions(12, "place_in_codes")
    shown = 6
    with panels(7.2, 3.5) as (made, (axes,)):
        fit(axes, 18.4, 38)
        for t in range(4):
            _, four = in_codes(t, 0)
            label(axes, 0.4, four + 2, f"selector {four // 8}", ha="center", fontsize=7)
            label(axes, 1.3, four + 2, f"columns {4 * four}–{4 * four + 15}", ha="center", fontsize=6)
        for lane, upper in np.ndindex(32, 2):
            places = [in_codes(lane, 4 * upper + nibble) for nibble in range(4)]
            boxes(axes, (2, 0), [(lane, places[0][1] // 8, places)])
        label(axes, 1.3, 20, f"the word of lane {shown}: bits, and the codes there", fontsize=8)
        for nibble in range(8):
            row, four = in_codes(shown, nibble)
            cell(
                axes,
                2 + 2 * nibble,
                20,
                f"{4 * nibble} to {4 * nibble + 3}",
                COLOURS[four // 8],
                height=2,
                width=4,
            )
            label(axes, 3 + 2 * nibble, 24.6, f"row {row}, columns {4 * four} to {4 * four + 3}", fontsize=7)
    return made


def functions(number: int, *names: str) -> list[Callable[..., Any]]:
    """Functions of a rung that need nothing around them; to import the rung would turn Triton's interpreter on."""
    path = ladder.tutorial_files()[number]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    found: dict[str, Any] = {}
    exec(compile(tree, path, "exec"), found)
    return [found[name] for name in names]


# --- what is shown where ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawing:
    """A rung's picture and what it shows."""

    draw: Callable[[], Figure]
    caption: str


DRAWINGS: dict[int, list[Drawing]] = {
    1: [Drawing(vector, "22 elements in blocks of 8, with the indices of each program. Hatched elements are masked.")],
    2: [Drawing(window, "A window on a matrix is defined by its shape, its block and the offset of its corner.")],
    3: [Drawing(walk, "The blocks that the program of the tile at row 1, column 2 loads, with one color per step along "
                      "K. Numbers are offsets in memory.")],
    4: [Drawing(masks, "The last step of the program of the last tile: 7 x 6 x 5 in blocks of 4. Numbers are offsets, "
                       "computed from the strides. Hatched elements are masked.")],
    5: [Drawing(order, "The number of each tile in both orders. Blue: the first 8 tiles, which run at the same time. "
                       "Orange: the blocks of a and b that they read.")],
    6: [Drawing(configs, "A larger tile loads fewer bytes per operation, and takes more shared memory.")],
    7: [Drawing(persistent, "The parts of a program's time, not to scale. With flattening, the loads of the next tile "
                            "start before the current tile ends.")],
    8: [Drawing(shared, "The fourth stage fits if the tile is stored in halves.")],
    9: [Drawing(passes, "Memory traffic of the output, pass by pass.")],
    10: [Drawing(roles, "Taking turns, not to scale. While one consumer stores, the other one multiplies, and the "
                        "producer loads the tile after that.")],
    11: [Drawing(words, "A step of 64 columns and its 8 words. Each word has two adjacent columns of every 16.")],
    12: [Drawing(fragments, "The numbers that each of the 32 lanes holds for mma.sp.m16n8k32, in four registers."),
         Drawing(codes, "The codes of 16 rows and 64 columns: each cell shows four codes and the lane whose word has "
                        "them; one word is shown in full. The selector of an instruction determines the two lanes of "
                        "each row whose codes it reads.")],
}  # fmt: skip


def shown(number: int) -> str:
    """A rung's pictures, as elements of its page."""
    return "\n\n".join(svg(drawing.draw(), drawing.caption) for drawing in DRAWINGS[number])


def of_all(records: Mapping[int, ladder.Record]) -> str:
    """The rate of each matmul rung beside torch's in the same run, at the shapes that several have."""
    shapes = ("4096x4096x4096", "8192x8192x8192")
    numbers = [number for number, record in records.items() if any(gain.shape in shapes and gain.over_torch for gain in
               ladder.gains(record.rows))]  # fmt: skip
    with figure(7.2, 2.8) as made:
        axes = made.subplots()
        for place, shape in enumerate(shapes):
            ratios = [
                next(
                    (gain.over_torch for gain in ladder.gains(records[number].rows) if gain.shape == shape),
                    None,
                )
                for number in numbers
            ]
            at = [x + (place - 0.5) * 0.4 for x, ratio in enumerate(ratios) if ratio is not None]
            bars = axes.bar(
                at, [ratio for ratio in ratios if ratio is not None], 0.38, color=COLOURS[place], label=shape
            )
            axes.bar_label(bars, fmt="%.2f", fontsize=7, color=INK)
        axes.axhline(1, color=INK, linewidth=0.8)
        axes.set_xticks(range(len(numbers)), [f"rung {number}" for number in numbers])
        axes.set_ylabel("speed, torch = 1")
        axes.legend(loc="upper center", ncols=2, bbox_to_anchor=(0.5, 1.2))
    return svg(
        made,
        "Speed of each rung relative to torch's product (for rung 9, its addmm and gelu) in the same run.",
    )


def of_sizes(sizes: Mapping[str, Mapping[str, Any]]) -> str:
    """The rate of each rung, of torch and of gemmery, over the size of square products."""
    numbers = sorted(map(int, sizes))
    with figure(7.2, 3.6) as made:
        axes = made.subplots()
        for place, name in enumerate(sizes[str(numbers[0])]["us"]):
            ours = name.startswith("rung")
            rates = [2 * n**3 / sizes[str(n)]["us"][name] / 1e6 for n in numbers]
            axes.plot(
                numbers, rates, color=(*COLOURS, DARK)[place] if ours else INK, marker="o", markersize=3,
                linewidth=1.2 if ours else 1.8, linestyle="--" if name == "gemmery" else "-",
                label="cuBLAS, by torch" if name == "torch" else name,
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, map(str, numbers))
        axes.minorticks_off()
        axes.set(xlabel="M = N = K, float16", ylabel="TFLOP/s", ylim=(0, None))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return svg(made, "Speed over the size of square products, all rungs of the product beside cuBLAS.")


# --- what commands make -----------------------------------------------------------------------------------------------


def of_command(command: str, option: str, ending: str) -> str:
    """The file that a command of gemmery writes to where `option` says.

    Raises:
        ValueError: the command has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / f"made{ending}"
        ran = CliRunner().invoke(app, [*shlex.split(command), option, str(out)], prog_name="gemmery")
        if ran.exit_code or not out.exists():
            raise ValueError(f"gemmery {command} has failed: {ran.exception!r}\n{ran.output}")
        return out.read_text(encoding="utf-8")
