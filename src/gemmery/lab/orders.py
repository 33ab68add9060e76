"""Tile orders side by side: what each reads first, and what it reads from memory through L2.

`Launch` is how a product is cut into tiles and how many of them are computed at once; `compare` puts numbers to the
orders in which its tiles may be visited. `order_pictures` draws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import schedules
from ..devices import Device
from ..dtypes import Precision
from ..launch.plan import runs_on
from ..problem import Config, Problem
from ..schedules.walk import Walk
from ..select.shapes import device_named, problem_of
from . import l2
from .l2 import Traffic
from .prediction.ours import launch
from .prediction.predict import arithmetic
from .tile_order import band, programs_at_once, visits, walk

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: The most tiles in a picture; with more, it shows nothing and takes long.
MOST_TILES = 1 << 18
#: Group sizes that are compared, of those that a matrix has rows of tiles for.
GROUP_SIZES = (2, 4, 8, 16, 32)
#: The most rows and columns of tiles for which the text shows the number of each tile.
NUMBERED = 12


@dataclass(frozen=True)
class Launch:
    """A product, cut into tiles.

    Attributes:
        tile: rows, columns and step along K of a tile.
        group_size: rows of tiles in a band of the grouped order.
        programs: how many tiles are computed at once; a wave.
        l2: bytes of the cache.
        itemsize: bytes of an element of A and B.
        config: what gemmery chooses for the product; None if the tile was given.
        schedule: what each program of that config computes; None if the tile was given.
        notes: what the figures leave out, in sentences.
        arithmetic: seconds of the product's operations at the datasheet's rate; 0 if the tile was given.
    """

    M: int
    N: int
    K: int
    device: Device
    tile: tuple[int, int, int]
    group_size: int
    programs: int
    l2: int
    itemsize: int
    config: Config | None = None
    schedule: Walk | None = None
    notes: tuple[str, ...] = ()
    arithmetic: float = 0.0

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return -(-self.M // self.tile[0]), -(-self.N // self.tile[1])

    @property
    def steps(self) -> int:
        """Blocks of A, and of B, that a tile needs."""
        return -(-self.K // self.tile[2])

    @property
    def waves(self) -> int:
        """The number of waves: in each, as many tiles are computed as fit at once, in the last perhaps fewer."""
        return -(-self.tiles[0] * self.tiles[1] // self.programs)

    def __str__(self) -> str:
        (tiles_m, tiles_n), (bm, bn, bk) = self.tiles, self.tile
        return (
            f"{self.M}×{self.N}×{self.K} on {self.device.name}: {tiles_m}×{tiles_n} tiles of {bm}×{bn}, "
            f"{self.steps} steps of {bk} along K, {self.programs} tiles at once"
        )


def launch_of(
    M: int, N: int, K: int, *, dtype: torch.dtype = torch.bfloat16, layout: str = "NT", precision: Precision = "ieee",
    fast_accum: bool = False, device: str | None = None, tile: tuple[int, int, int] | None = None,
    group_size: int | None = None, programs: int | None = None, l2_bytes: int | None = None,
) -> Launch:  # fmt: skip
    """A product on a GPU as gemmery would run it, or with a tile of one's own.

    Args:
        layout: for a and then b, N for row-major and T for column-major.
        device: a GPU of the device table by its name or a part of it; by default the current one, or else an H200.
        tile: rows, columns and step along K, any numbers; by default those of the config that gemmery chooses.
        group_size: rows of tiles in a band; by default the config's, or 8 for a tile of one's own.
        programs: tiles computed at once; by default as many as the config's programs that fit, or with a tile of one's
            own, the GPU's multiprocessors.
        l2_bytes: size of the cache; by default the GPU's.

    Raises:
        ValueError: a size is invalid, there are too many tiles, or gemmery has no kernel for the product there.
    """
    for name, value in (
        ("group_size", group_size),
        ("programs", programs),
        *(("tile", size) for size in tile or ()),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    for name, size in (("M", M), ("N", N), ("K", K)):
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    row = device_named(device)
    problem = problem_of(
        M, N, K, dtype=dtype, layout=layout, precision=precision, fast_accum=fast_accum, device=row
    )
    cache = row.l2 if l2_bytes is None else l2_bytes
    if tile is not None:
        made = Launch(
            M, N, K, row, tile, group_size or 8, programs or row.sms, cache, problem.a.dtype.itemsize
        )
    else:
        made = _chosen(problem, group_size, programs, cache)
    if made.tiles[0] * made.tiles[1] > MOST_TILES:
        count = f"{made.tiles[0]}×{made.tiles[1]} tiles"
        raise ValueError(f"{count} are more than the {MOST_TILES} that can be shown; give a larger tile")
    return made


def _chosen(problem: Problem, group_size: int | None, programs: int | None, cache: int) -> Launch:
    if not runs_on(problem):
        raise ValueError(
            f"{problem} runs through the torch reference on {problem.device.name}, which has no tiles; give a tile"
        )
    chosen = launch(problem)
    assert chosen is not None  # runs_on
    product, config = chosen.product, chosen.config
    if group_size is not None:
        config = replace(config, group_m=group_size)
    schedule = schedules.of(config.schedule)
    return Launch(
        problem.M, problem.N, problem.K, problem.device, (config.block_m, config.block_n, config.block_k),
        schedule.band(product, config), programs or programs_at_once(product, config), cache, problem.a.dtype.itemsize,
        config, walk(product, config), tuple(schedule.cuts(product, config)), arithmetic(problem),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Order:
    """One order of a launch's tiles.

    Attributes:
        name: "row", "column" or "grouped".
        group_size: rows of tiles in a band: 1 for "row" and all for "column".
        visits: row and column of the tile that is visited as the nth, (tiles, 2).
        first: the number of tiles that the next two describe.
        first_rows, first_columns: the rows and columns of tiles that contain these, whose blocks of A and B they read.
        steps: blocks of A in a row of tiles, and of B in a column.
        traffic: of the whole launch.
    """

    name: str
    group_size: int
    visits: np.ndarray
    first: int
    first_rows: np.ndarray
    first_columns: np.ndarray
    steps: int
    traffic: Traffic

    @property
    def first_blocks(self) -> tuple[int, int]:
        """Different blocks of A and of B that the first tiles read."""
        return len(self.first_rows) * self.steps, len(self.first_columns) * self.steps

    @property
    def label(self) -> str:
        """The name, with the group size where it is the order's own."""
        return {"row": "row by row", "column": "column by column"}.get(
            self.name, f"in groups of {self.group_size}"
        )

    def asdict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        a, b = self.first_blocks
        return {
            "order": self.name, "group_size": self.group_size,
            "first": {
                "tiles": self.first, "rows": self.first_rows.tolist(), "columns": self.first_columns.tolist(),
                "blocks_a": a, "blocks_b": b, "blocks": a + b,
            },
            "traffic": self.traffic.asdict(), "wave_memory": list(self.traffic.wave_memory),
            "visits": self.visits.tolist(),
        }  # fmt: skip


def order_of(launch: Launch, name: str, group_size: int, first: int) -> Order:
    """An order of a launch's tiles by its name, with what its first tiles read."""
    tiles_m, tiles_n = launch.tiles
    seen = visits(tiles_m, tiles_n, name, group_size)
    traffic = l2.simulate(
        launch.M, launch.N, launch.K, tile=launch.tile, order=name, group_size=group_size, itemsize_a=launch.itemsize,
        itemsize_b=launch.itemsize, programs=launch.programs, l2=launch.l2,
    )  # fmt: skip
    rows, columns = map(np.unique, seen[:first].T)
    return Order(
        name,
        band(name, tiles_m, group_size),
        seen,
        min(first, len(seen)),
        rows,
        columns,
        launch.steps,
        traffic,
    )


@dataclass(frozen=True)
class Comparison:
    """Orders of one launch.

    Attributes:
        shown: those that were asked for.
        table: these and others, by group size.
    """

    launch: Launch
    shown: tuple[Order, ...]
    table: tuple[Order, ...]

    @property
    def conclusion(self) -> str:
        """The effect of the choice among the shown orders, in a sentence."""
        best = min(self.shown, key=lambda order: order.traffic.memory)
        worst = max(self.shown, key=lambda order: order.traffic.memory)
        if self.launch.waves == 1:
            return self._first_conclusion()
        if best.traffic.memory == worst.traffic.memory:
            times = best.traffic.memory / best.traffic.least
            each = "A and B once each" if times == 1 else f"A and B {times:.1f} times over"
            return f"{amount(best.traffic.memory)} are read from memory in either order: {each}"
        return (
            f"{best.label}, {amount(best.traffic.memory)} are read from memory; {worst.label}, "
            f"{amount(worst.traffic.memory)}: {worst.traffic.memory / best.traffic.memory:.2f} times as much"
        )

    @property
    def reason(self) -> str:
        """Why the chosen group size is not the one with the least traffic; "" if it is, or nothing was chosen."""
        it = self.launch
        if it.config is None:
            return ""
        own = next(x for x in self.table if (x.name, x.group_size) == ("grouped", it.group_size))
        best = min(self.table, key=lambda order: order.traffic.memory)
        more = own.traffic.memory - best.traffic.memory
        if more <= 0:
            return ""
        times = f"{more / it.device.bandwidth * 1e6:.2g} µs at the memory's peak, beside {it.arithmetic * 1e6:.3g} µs"
        whence = "belong to the tile in the table of tiles" if it.config.group_m else "follow from the sizes"
        return (
            f"the choice does not weigh this traffic: groups of {it.group_size} {whence}; "
            f"{best.label}, {amount(more)} less are read, {times} of arithmetic at the peak rate"
        )

    def _first_conclusion(self) -> str:
        """The same where all tiles are computed at once, so that only a part of them can differ."""
        said = "all tiles are computed at once: their order changes nothing"
        few = min(self.shown, key=lambda order: sum(order.first_blocks))
        many = max(self.shown, key=lambda order: sum(order.first_blocks))
        if sum(few.first_blocks) == sum(many.first_blocks):
            return said
        return (
            f"{said}; the first {few.first} alone read {sum(few.first_blocks)} blocks {few.label}, "
            f"{sum(many.first_blocks)} {many.label}"
        )

    def asdict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON; sizes in bytes, and `schedule` a list for every unit of work."""
        it = self.launch
        names = (
            "program",
            "turn",
            "wave",
            "batch",
            "row",
            "col",
            "rows",
            "cols",
            "first_k",
            "last_k",
            "step",
        )
        units = it.schedule and {name: getattr(it.schedule, name).tolist() for name in names}
        return {
            "M": it.M, "N": it.N, "K": it.K, "device": it.device.name,
            "config": None if it.config is None else str(it.config), "tile": list(it.tile),
            "group_size": it.group_size, "tiles": list(it.tiles), "steps": it.steps, "programs": it.programs,
            "waves": it.waves, "l2": it.l2, "notes": list(it.notes), "conclusion": self.conclusion,
            "reason": self.reason,
            "orders": [order.asdict() for order in self.shown],
            "table": [
                {"order": order.name, "group_size": order.group_size} | order.traffic.asdict() for order in self.table
            ],
            "schedule": units,
        }  # fmt: skip


def compare(
    launch: Launch, orders: Sequence[str] = ("row", "grouped"), first: int | None = None
) -> Comparison:
    """The orders of a launch's tiles with what they read.

    Args:
        orders: names of those to show, see `tile_order.ORDERS`.
        first: the number of tiles at the beginning whose blocks are counted; by default one wave.

    Raises:
        ValueError: there is no such order, or `first` is too small.

    Example: the nine by nine blocks of Triton's tutorial, whose first nine tiles read 90 blocks or 54:

        >>> launch = launch_of(144, 144, 144, tile=(16, 16, 16), group_size=3, device="H200")
        >>> [sum(order.first_blocks) for order in compare(launch, first=9).shown]
        [90, 54]
    """
    if first is not None and first < 1:
        raise ValueError(f"first is {first}; it must be at least 1")
    if not orders:
        raise ValueError("no order is named")
    first = launch.programs if first is None else first
    shown = tuple(order_of(launch, name, launch.group_size, first) for name in dict.fromkeys(orders))
    sizes = sorted({*(size for size in GROUP_SIZES if size < launch.tiles[0]), launch.group_size})
    others = [("row", 1), *(("grouped", size) for size in sizes), ("column", launch.tiles[0])]
    return Comparison(launch, shown, tuple(order_of(launch, name, size, first) for name, size in others))


def amount(size: float) -> str:
    """Bytes in words, in three digits: 1.20 GB, 830 MB; as `amount` in order.html."""
    for unit, bytes_of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= bytes_of:
            count = size / bytes_of
            return f"{count:#.3g}".removesuffix(".") + f" {unit}" if count < 999.5 else f"{count:.0f} {unit}"
    return f"{size:.0f} bytes"


# --- as text ---------------------------------------------------------------------------------------------------------


def show(comparison: Comparison, console: Console) -> None:
    """Print a comparison on a terminal."""
    it = comparison.launch
    said = [str(it)]
    if it.config is not None:
        said.append(f"config {it.config}")
    said += [*it.notes, comparison.conclusion]
    if comparison.reason:
        said.append(comparison.reason)
    console.print("\n".join(said), markup=False, highlight=False, soft_wrap=True)
    if max(it.tiles) <= NUMBERED:
        console.print(_numbers(comparison))
    console.print(_first_table(comparison))
    console.print(_cache_table(comparison))


def _numbers(comparison: Comparison) -> Table:
    """The number of each tile in each order, those of the first ones bright."""
    from rich.table import Table

    table = Table.grid(padding=(0, 4))
    texts = []
    for order in comparison.shown:
        number = np.empty(comparison.launch.tiles, dtype=int)
        number[tuple(order.visits.T)] = np.arange(len(order.visits))
        width = len(str(number.max()))
        lines = [
            " ".join(f"[{'bold' if n < order.first else 'dim'}]{n:{width}}[/]" for n in row)
            for row in number.tolist()
        ]
        texts.append("\n".join([f"[underline]{order.label}[/]", *lines]))
        table.add_column()
    table.add_row(*texts)
    return table


def _first_table(comparison: Comparison) -> Table:
    from rich.table import Table

    first = comparison.shown[0].first
    table = Table(title=f"what the first {first} tiles read, in different blocks", title_justify="left")
    table.add_column("order", no_wrap=True)
    for heading in ("rows of A × steps", "columns of B × steps", "blocks"):
        table.add_column(heading, justify="right")
    for order in comparison.shown:
        rows, columns = len(order.first_rows), len(order.first_columns)
        table.add_row(
            order.label, f"{rows} × {order.steps}", f"{columns} × {order.steps}", str(sum(order.first_blocks))
        )
    return table


def _cache_table(comparison: Comparison) -> Table:
    from rich.table import Table

    it = comparison.launch
    table = Table(
        title=f"a simulated L2 of {it.l2 / 2**20:.3g} MB; the product asks it for "
        f"{amount(comparison.table[0].traffic.requested)}",
        title_justify="left",
    )
    table.add_column("order", no_wrap=True)
    for heading in ("hits", "hits of A", "hits of B", "from memory", "of the least"):
        table.add_column(heading, justify="right")
    for order in comparison.table:
        traffic = order.traffic
        chosen = order.name == "grouped" and order.group_size == it.group_size
        table.add_row(
            f"{order.label}{' ←' if chosen else ''}", f"{traffic.hit_rate:.1%}", f"{traffic.hit_rate_a:.1%}",
            f"{traffic.hit_rate_b:.1%}", amount(traffic.memory), f"{traffic.memory / traffic.least:.2f} ×",
        )  # fmt: skip
    return table
