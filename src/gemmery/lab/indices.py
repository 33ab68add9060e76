"""The offsets that one program's pointers hold: what `kernels.operands` computes, in numpy, for inspection.

`accesses` says for one program of a launch, and one step of its K loop, which elements of A and B it loads and which of
C it stores: a `Block` of offsets, in elements from the matrix's first, with the lanes that are masked off because they
lie outside of the matrix. Gathering through them from a matrix's memory gives the block that the kernel sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..dtypes import OUT_DTYPES, Precision
from ..launch.plan import runs_on
from ..layout import make_problem
from ..operands import Layout
from ..problem import Config, Problem
from ..schedules import bind
from ..schedules.walk import Sizes, Walk
from ..select.shapes import LAYOUTS, device_named
from .prediction.ours import launch
from .tile_order import plain_walk, walk

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Ints = np.ndarray

#: The cases of a lane: it is in the matrix; it is outside, and without its mask would touch memory between the
#: matrix's first and its last element, most often another element; or it would touch memory before or after them.
INSIDE, ASTRAY, BEYOND = 0, 1, 2
#: The largest offset that 32 bits hold.
NARROW = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class Block:
    """The lanes of one load or store.

    Attributes:
        name: "A", "B" or "C".
        shape: rows and columns of the matrix.
        strides: elements from one row to the next and from one column to the next.
        start: elements from the first one of the tensor to the first one of this matrix in its batch.
        row, col: the corner of the block.
        offsets: from the tensor's first element, for every lane (rows, columns); 64 bits.
        mask: the lanes that are loaded or stored, which are inside the matrix.
        lanes: what each lane would access without the mask: `INSIDE`, `ASTRAY` or `BEYOND`.
    """

    name: str
    shape: tuple[int, int]
    strides: tuple[int, int]
    start: int
    row: int
    col: int
    offsets: Ints
    mask: np.ndarray
    lanes: np.ndarray

    @property
    def order(self) -> str:
        """The order by the strides: "row-major", "column-major", or "strided" if no neighbors are adjacent."""
        return "row-major" if self.strides[1] == 1 else "column-major" if self.strides[0] == 1 else "strided"

    @property
    def corner(self) -> int:
        """The offset of the block's first lane."""
        return self.start + self.row * self.strides[0] + self.col * self.strides[1]

    def asdict(self) -> dict[str, Any]:
        """All fields as plain values, for JSON."""
        inside = self.offsets[self.mask]
        return {
            "name": self.name, "shape": list(self.shape), "strides": list(self.strides), "start": self.start,
            "row": self.row, "col": self.col, "corner": self.corner, "block": list(self.offsets.shape),
            "masked_off": int((~self.mask).sum()), "astray": int((self.lanes == ASTRAY).sum()),
            "beyond": int((self.lanes == BEYOND).sum()), "first": int(inside.min()) if inside.size else None,
            "last": int(inside.max()) if inside.size else None, "offsets": self.offsets.tolist(),
            "mask": self.mask.tolist(), "lanes": self.lanes.tolist(),
        }  # fmt: skip


def block(
    name: str, operand: Layout, shape: tuple[int, int], batch: tuple[int, ...], matrix: int,
    corner: tuple[int, int], extent: tuple[int, int],
) -> Block:  # fmt: skip
    """The lanes of a block of `extent` with its first one at `corner`, of matrix number `matrix` of a batch."""
    (row, col), (rows, cols) = corner, extent
    places = np.unravel_index(matrix, batch) if batch else ()
    start = int(sum(int(place) * step for place, step in zip(places, operand.steps, strict=True)))
    down, across = row + np.arange(rows)[:, None], col + np.arange(cols)[None, :]
    offsets = start + down * np.int64(operand.row) + across * np.int64(operand.col)
    mask = (down < shape[0]) & (across < shape[1])
    # The span of the matrix's own elements.
    reach = [
        (size - 1) * stride for size, stride in zip(shape, (operand.row, operand.col), strict=True) if size
    ]
    low, high = start + sum(min(step, 0) for step in reach), start + sum(max(step, 0) for step in reach)
    near = (offsets >= low) & (offsets <= high) & (min(shape) > 0)
    lanes = np.where(mask, INSIDE, np.where(near, ASTRAY, BEYOND))
    return Block(name, shape, (operand.row, operand.col), start, row, col, offsets, mask, lanes)


@dataclass(frozen=True)
class Accesses:
    """The loads of one program in one K step, and its stores at the end.

    Attributes:
        schedule: the schedule of the launch.
        unit: the number of the tile, or part of a tile, that is computed.
        step: the K step, from 0.
        a, b, c: the blocks.
    """

    problem: Problem
    schedule: Walk
    unit: int
    step: int
    a: Block
    b: Block
    c: Block

    @property
    def blocks(self) -> tuple[Block, Block, Block]:
        """All three blocks."""
        return self.a, self.b, self.c

    @property
    def steps(self) -> int:
        """The number of K steps of the unit."""
        return _steps(self.schedule, self.unit)

    @property
    def where(self) -> str:
        """The program, tile and step, in a sentence."""
        s, n = self.schedule, self.unit
        turns = int((s.program == s.program[n]).sum())
        own = f", its tile {s.turn[n] + 1} of {turns}" if turns > 1 else ""
        matrix = f" of matrix {s.batch[n]}" if self.problem.batch else ""
        return (
            f"program {s.program[n]} of {s.programs}{own}: C[{_span(s.row[n], s.rows[n])}, "
            f"{_span(s.col[n], s.cols[n])}]{matrix}, step {self.step + 1} of {self.steps} along K"
        )

    @property
    def conclusion(self) -> str:
        """The number of masked lanes, in a sentence."""
        off = {block.name: int((~block.mask).sum()) for block in self.blocks}
        total = sum(block.mask.size for block in self.blocks)
        if not any(off.values()):
            return f"all {total} elements are inside of their matrices"
        said = ", ".join(f"{count} of {name}" for name, count in off.items() if count)
        return f"masked off because they are outside their matrices: {said}, of {total} elements"

    def asdict(self) -> dict[str, Any]:
        """All fields as plain values, for JSON; offsets in elements."""
        p, s, n = self.problem, self.schedule, self.unit
        return {
            "M": p.M, "N": p.N, "K": p.K, "batch": list(p.batch), "programs": s.programs,
            "program": int(s.program[n]), "turn": int(s.turn[n]), "matrix": int(s.batch[n]), "step": self.step,
            "steps": self.steps, "first_k": int(s.first_k[n]), "last_k": int(s.last_k[n]),
            "blocks": {block.name: block.asdict() for block in self.blocks},
        }  # fmt: skip


def _span(first: int, count: int) -> str:
    return f"{first}:{first + count}"


def _steps(schedule: Walk, unit: int) -> int:
    # If K is 0, the kernels' loop makes one step, which is masked off.
    return max(-(-int(schedule.last_k[unit] - schedule.first_k[unit]) // int(schedule.step[unit])), 1)


def accesses(problem: Problem, schedule: Walk, pid: int, *, turn: int = 0, step: int = 0) -> Accesses:
    """The loads and stores of one program of a launch.

    Args:
        pid: the number of the program, `tl.program_id(0)`.
        turn: which of its tiles, from 0, if programs are persistent.
        step: which K step of the tile, from 0.

    Raises:
        ValueError: there is no such program, tile or step.

    Example: the second of two programs, whose tile extends one column beyond the matrix.

        >>> problem = problem_of_strides(2, 3, 2, layout="NN")
        >>> found = accesses(problem, plain_walk(problem, (2, 2, 2)), pid=1)
        >>> found.b.offsets.tolist(), found.b.mask.tolist()
        ([[2, 3], [5, 6]], [[True, False], [True, False]])
    """
    if not 0 <= pid < schedule.programs:
        raise ValueError(f"pid is {pid}; there are {schedule.programs} programs, from 0")
    own = np.flatnonzero(schedule.program == pid)
    if not 0 <= turn < len(own):
        raise ValueError(f"turn is {turn}; program {pid} has {len(own)} tiles, from 0")
    unit = int(own[np.argsort(schedule.turn[own])][turn])
    steps = _steps(schedule, unit)
    if not 0 <= step < steps:
        raise ValueError(f"step is {step}; the K loop has {steps} steps, from 0")
    names = ("batch", "row", "col", "rows", "cols", "step", "first_k")
    matrix, row, col, rows, cols, depth, first_k = (int(getattr(schedule, name)[unit]) for name in names)
    k = first_k + step * depth
    p = problem
    return Accesses(
        p, schedule, unit, step,
        block("A", p.a, (p.M, p.K), p.batch, matrix, (row, k), (rows, depth)),
        block("B", p.b, (p.K, p.N), p.batch, matrix, (k, col), (depth, cols)),
        block("C", p.out, (p.M, p.N), p.batch, matrix, (row, col), (rows, cols)),
    )  # fmt: skip


def problem_of_strides(
    M: int, N: int, K: int, *, dtype: torch.dtype = torch.bfloat16, layout: str = "NT", batch: Sequence[int] = (),
    strides_a: Sequence[int] | None = None, strides_b: Sequence[int] | None = None,
    strides_c: Sequence[int] | None = None, precision: Precision = "ieee", fast_accum: bool = False,
    device: str | None = None,
) -> Problem:  # fmt: skip
    """The problem of a product of tensors with strides of any kind, as a call with such tensors makes it.

    Args:
        layout: for a and then b, N for row-major and T for column-major, where strides are not given.
        batch: leading dimensions of all three.
        strides_a, strides_b, strides_c: in elements, of (*batch, M, K), (*batch, K, N) and (*batch, M, N).
        precision, fast_accum: as for `gemmery.matmul`; they decide only which config is chosen.
        device: a GPU of the device table by its name or a part of it; by default the current one, or else an H200.

    Raises:
        ValueError: a size, the layout or strides are invalid.
        TypeError: the type is not supported.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
    if dtype not in OUT_DTYPES:
        raise TypeError(f"dtype is {dtype}; it must be one of {', '.join(map(str, OUT_DTYPES))}")
    for name, size in (("M", M), ("N", N), ("K", K), *(("batch", size) for size in batch)):
        if size < (name != "K"):
            raise ValueError(f"{name} is {size}; it must be at least {int(name != 'K')}")
    row = device_named(device)

    def tensor(
        name: str, rows: int, cols: int, dtype: torch.dtype, order: str, strides: Sequence[int] | None
    ) -> torch.Tensor:
        shape = (*batch, rows, cols)
        if strides is None:
            stored = (*batch, rows, cols) if order == "N" else (*batch, cols, rows)
            whole = torch.empty(stored, dtype=dtype, device="meta")
            return whole if order == "N" else whole.mT
        if len(strides) != len(shape) or min(strides) < 0:
            raise ValueError(f"strides of {name} are {tuple(strides)}; {len(shape)} of at least 0 are needed")
        return torch.empty_strided(shape, tuple(strides), dtype=dtype, device="meta")

    return make_problem(
        tensor("A", M, K, dtype, layout[0], strides_a), tensor("B", K, N, dtype, layout[1], strides_b),
        tensor("C", M, N, OUT_DTYPES[dtype][0], "N", strides_c), None, scaled=False, fast_accum=fast_accum, device=row,
        precision=precision if precision in row.target.precisions else "ieee",
    )  # fmt: skip


def schedule_of(
    problem: Problem,
    *,
    tile: Sizes | None = None,
    group_size: int | None = None,
    config: Config | str | None = None,
) -> Walk:
    """The schedule of a tile of one's own, of a config, or by default of the config that gemmery chooses.

    Args:
        tile: rows, columns and step along K, any numbers, with one program per tile.
        group_size: rows of tiles in a band; by default the config's, or 8 for a given tile.

    Raises:
        ValueError: there are both a tile and a config, the config does not suit the problem, or gemmery has no kernel
            for it.
    """
    if tile is not None:
        if config is not None:
            raise ValueError(f"tile {tile} and config {config} are given; give one of them")
        return plain_walk(problem, tile, 8 if group_size is None else group_size)
    if config is None:
        if not runs_on(problem):
            raise ValueError(
                f"{problem} runs through the torch reference on {problem.device.name}; give a tile"
            )
        # Of the given tensors: copies have other offsets.
        chosen = launch(problem, copied=False)
        assert chosen is not None  # runs_on
        config = chosen.config
    found = Config.of(config)
    if group_size is not None:
        found = replace(found, group_m=group_size)
    bind(problem, found)
    return walk(problem, found)


# --- as text ---------------------------------------------------------------------------------------------------------

#: Signs of lanes that are masked off, before their offsets.
SIGNS = {INSIDE: "", ASTRAY: "~", BEYOND: "!"}
STYLES = {INSIDE: "", ASTRAY: "yellow", BEYOND: "red"}


def show(found: Accesses, console: Console, edge: int = 4) -> None:
    """Print accesses on a terminal: of each block `edge` rows and columns of lanes at its beginning and its end."""
    p = found.problem
    said = [str(p), found.where, found.conclusion]
    console.print("\n".join(said), markup=False, highlight=False, soft_wrap=True)
    for block in found.blocks:
        console.print()
        for line in described(block):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print(_lanes(block, edge), soft_wrap=True)
    if any((~block.mask).any() for block in found.blocks):
        console.print(
            "\nmasked off: ~ is between the matrix's first and last element in memory, ! before or after them",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip


def described(block: Block) -> list[str]:
    """A block's place, its offsets as a formula, and its peculiarities, in lines."""
    (down, across), (rows, cols) = block.strides, block.offsets.shape
    start = f"{block.start} + " if block.start else ""
    lines = [
        f"{block.name}[{_span(block.row, rows)}, {_span(block.col, cols)}] of {block.shape}, strides {block.strides}, "
        f"{block.order}",
        f"offset[i, j] = {start}({block.row} + i)·{down} + ({block.col} + j)·{across} = {block.corner} + i·{down} "
        f"+ j·{across}",
    ]
    off = int((~block.mask).sum())
    if off:
        astray = int((block.lanes == ASTRAY).sum())
        lines.append(f"masked off: {off} of {block.mask.size} elements, {astray} ~ and {off - astray} !")
    largest = int(block.offsets.max())
    if largest > NARROW:
        reach = int(np.ptp(block.offsets))
        inner = "and so do those within the block" if reach > NARROW else "those within the block fit into 32"
        lines.append(f"offsets up to {largest} need 64 bits, {inner}")
    return lines


def _lanes(block: Block, edge: int) -> Text:
    """The offsets at the edges of a block, with the signs of those that are masked off."""
    from rich.text import Text

    rows, cols = (_edges(count, edge) for count in block.offsets.shape)
    cells = [[("i \\ j", "dim"), *((_number(col), "dim") for col in cols)]]
    for row in rows:
        line = [(_number(row), "dim")]
        for col in cols:
            if row is None or col is None:
                line.append(("…", "dim"))
            else:
                lane = int(block.lanes[row, col])
                line.append((f"{SIGNS[lane]}{block.offsets[row, col]}", STYLES[lane]))
        cells.append(line)
    widths = [max(len(text) for text, _ in column) for column in zip(*cells, strict=True)]
    padded = [
        Text("  ").join(
            Text(f"{text:>{width}}", style) for (text, style), width in zip(line, widths, strict=True)
        )
        for line in cells
    ]
    return Text("\n").join(padded)


def _number(place: int | None) -> str:
    return "…" if place is None else str(place)


def _edges(count: int, edge: int) -> list[int | None]:
    """The first and the last numbers below `count`, and None for those between."""
    if count <= 2 * edge + 1:
        return list(range(count))
    return [*range(edge), None, *range(count - edge, count)]
