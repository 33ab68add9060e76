"""Which tile is computed when, and by which program: the kernels' tile order and schedules, in numpy.

`visits` is `kernels.order.grouped` for all tiles at once. `Schedule` is what a launch makes of it: `kernels.gemm` with
one program a tile and with persistent programs, whose tail is cut into small tiles, and `kernels.cluster`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..problem import Config, Problem
from ..schedules.waves import Split, Waves
from ..schedules.work import Work
from ..select.model import _resident
from ..select.space import DEALT, Space, Tile

Ints = np.ndarray
#: Rows, columns and step along K of a tile.
Sizes = tuple[int, int, int]

#: The orders that have names; all are the kernels' one order with bands of 1, of all or of some rows of tiles.
ORDERS = ("row", "column", "grouped")


#: Units of work that fit into a schedule: its arrays then take a GB.
MOST_UNITS = 1 << 24


def band(order: str, tiles_m: int, group_size: int) -> int:
    """Rows of tiles in a band, `GROUP` in `kernels.order`, for an order by its name.

    Raises:
        ValueError: there is no such order, or `group_size` is none.
    """
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}; it must be one of {', '.join(ORDERS)}")
    if group_size < 1:
        raise ValueError(f"group_size is {group_size}; it must be at least 1")
    return {"row": 1, "column": max(tiles_m, 1), "grouped": group_size}[order]


def visits(tiles_m: int, tiles_n: int, order: str = "grouped", group_size: int = 8) -> Ints:
    """The tiles of a matrix in the order of their numbers: an array (tiles, 2) of rows and columns of tiles.

    Args:
        tiles_m, tiles_n: rows and columns of tiles.
        order: "row", "column" or "grouped": column by column within bands of `group_size` rows of tiles, the last of
            which may be narrower.

    Raises:
        ValueError: there is no such order, or a number is too small.

    Example:
        >>> visits(3, 2, "grouped", 2).tolist()
        [[0, 0], [1, 0], [0, 1], [1, 1], [2, 0], [2, 1]]
    """
    for name, tiles in (("tiles_m", tiles_m), ("tiles_n", tiles_n)):
        if tiles < 1:
            raise ValueError(f"{name} is {tiles}; it must be at least 1")
    group = band(order, tiles_m, group_size)
    _, rows, columns = _places(np.arange(tiles_m * tiles_n), tiles_m, tiles_n, group)
    return np.stack([rows, columns], axis=1)


def _places(tile: Ints, tiles_m: int, tiles_n: int, group: int) -> tuple[Ints, Ints, Ints]:
    """The batch, row and column of tiles by their numbers; in step with `kernels.order.grouped`."""
    batch, tile = np.divmod(tile, max(tiles_m * tiles_n, 1))
    first = tile // (group * max(tiles_n, 1)) * group
    rows = np.minimum(tiles_m - first, group)
    within = tile - first * tiles_n
    return batch, first + within % rows, within // rows


def programs_at_once(problem: Problem, config: Config) -> int:
    """How many programs of a config a GPU holds at once; clusters count as one. What the selector's model reckons."""
    device = problem.device
    if config.schedule in DEALT:
        return max(device.sms // config.ctas, 1)
    stage = (config.block_m * problem.a.dtype.itemsize + config.block_n * problem.b.bits / 8) * config.block_k
    resident = _resident(problem, Space.of([(config, Tile(config, 1.0), 0)]), np.array([stage], dtype=float))
    return device.sms * int(resident[0])


@dataclass(frozen=True, eq=False)
class Schedule:
    """The work of a launch; each array has an entry for every unit of it: a tile, or a part of one.

    Attributes:
        programs: how many are started.
        at_once: how many run at the same time, see `programs_at_once`.
        program, turn: which program computes a unit, and as the how-manieth of its own, from 0.
        batch, row, col: where it lies: its matrix and its corner, in elements.
        rows, cols: its extent, part of which may lie outside of the matrix.
        first_k, last_k, step: which part of K it sums up, and the step of its K loop.
    """

    programs: int
    at_once: int
    program: Ints
    turn: Ints
    batch: Ints
    row: Ints
    col: Ints
    rows: Ints
    cols: Ints
    first_k: Ints
    last_k: Ints
    step: Ints

    @property
    def wave(self) -> Ints:
        """When: programs beyond those that run at once begin when these are done."""
        return np.asarray(self.program // self.at_once + self.turn)

    def __len__(self) -> int:
        return len(self.program)

    @classmethod
    def of(cls, problem: Problem, config: Config) -> Schedule:
        """The schedule of a problem, as it is launched, with a config.

        Raises:
            ValueError: it has more units than `MOST_UNITS`.
        """
        work, split = Waves.of(problem, config), Split.of(problem, config)
        _check_count(work.units * (1 if split is None else split.parts))
        make = {"tile": _of_tiles, "persistent": _of_persistent, **dict.fromkeys(DEALT, _of_work)}
        return make[config.schedule](problem, config)

    @classmethod
    def plain(cls, problem: Problem, tile: Sizes, group_size: int = 8) -> Schedule:
        """One program a tile, of any size, with a tile on each multiprocessor at once.

        Raises:
            ValueError: a size is none, or there are more tiles than `MOST_UNITS`.
        """
        for name, size in zip(
            ("block_m", "block_n", "block_k", "group_size"), (*tile, group_size), strict=True
        ):
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1")
        tiles_m, tiles_n = -(-problem.M // tile[0]), -(-problem.N // tile[1])
        _check_count(problem.matrices * tiles_m * tiles_n)
        program = np.arange(problem.matrices * tiles_m * tiles_n)
        columns = _whole(problem, tile, group_size, program, tiles_n)
        return cls(len(program), problem.device.sms, program=program, turn=np.zeros_like(program), **columns)


def _check_count(units: int) -> None:
    if units > MOST_UNITS:
        raise ValueError(
            f"{units} tiles are more than the {MOST_UNITS} of which there is a schedule; give a larger tile"
        )


def _whole(problem: Problem, tile: Sizes, group: int, number: Ints, tiles_n: int) -> dict[str, Ints]:
    """Where whole tiles lie, by their numbers."""
    block_m, block_n, block_k = tile
    batch, rows, columns = _places(number, -(-problem.M // block_m), tiles_n, group)
    return {
        "batch": batch, "row": rows * block_m, "col": columns * block_n,
        "rows": np.full_like(number, block_m), "cols": np.full_like(number, block_n),
        "first_k": np.zeros_like(number), "last_k": np.full_like(number, problem.K),
        "step": np.full_like(number, block_k),
    }  # fmt: skip


def _of_config(problem: Problem, config: Config, number: Ints, tiles_n: int) -> dict[str, Ints]:
    """The same for a config's tiles."""
    return _whole(problem, (config.block_m, config.block_n, config.block_k), config.group_m, number, tiles_n)


def _dealt(units: int, programs: int) -> tuple[Ints, Ints]:
    """Programs and turns of units that programs take in turn."""
    turn, program = np.divmod(np.arange(units), max(programs, 1))
    return program, turn


def _of_tiles(problem: Problem, config: Config) -> Schedule:
    """A program for each tile, or for each part of a tile's K: first the first part of every tile."""
    tiles = Waves.of(problem, config).tiles
    split = Split.of(problem, config)
    parts = 1 if split is None else split.parts
    program = np.arange(tiles * parts)
    columns = _of_config(problem, config, program % max(tiles, 1), -(-problem.N // config.block_n))
    if split is not None:
        columns["first_k"] = program // tiles * split.length
        columns["last_k"] = np.minimum(columns["first_k"] + split.length, problem.K)
    at_once = programs_at_once(problem, config)
    return Schedule(len(program), at_once, program=program, turn=np.zeros_like(program), **columns)


def _of_persistent(problem: Problem, config: Config) -> Schedule:
    """Whole tiles dealt out to as many programs as run at once, and behind them the small tiles of the tail."""
    work = Waves.of(problem, config)
    at_once = programs_at_once(problem, config)
    programs = min(max(work.tiles, work.parts), at_once)
    tiles_n = -(-problem.N // config.block_n) if config.tail_n == 1 else problem.N // config.block_n
    program, turn = _dealt(work.tiles, programs)
    columns = _of_config(problem, config, np.arange(work.tiles), tiles_n)
    if work.parts:
        small = _small_tiles(problem, config, work, tiles_n)
        columns = {name: np.concatenate([columns[name], small[name]]) for name in columns}
        own, turns = _dealt(work.parts, programs)
        before = np.bincount(program, minlength=programs)
        program, turn = np.concatenate([program, own]), np.concatenate([turn, before[own] + turns])
    return Schedule(programs, at_once, program=program, turn=turn, **columns)


def _small_tiles(problem: Problem, config: Config, work: Waves, tiles_n: int) -> dict[str, Ints]:
    """Where the parts of cut tiles lie, and behind them those of the ragged columns; as `kernels.gemm.small_tile`."""
    c, tiles_m = config, -(-problem.M // config.block_m)
    unit = np.arange(work.cut * c.tail)
    columns = _of_config(problem, c, work.tiles + unit // c.tail, tiles_n)
    strip, part_n = np.divmod(np.arange(work.parts - len(unit)), max(work.strips, 1))
    strips = {
        "batch": strip // (tiles_m * c.tail_m), "row": strip // c.tail_m % tiles_m * c.block_m,
        "col": np.full_like(strip, tiles_n * c.block_n),
    }  # fmt: skip
    columns = {name: np.concatenate([columns[name], values]) for name, values in strips.items()}
    part_m = np.concatenate([unit % c.tail_m, strip % c.tail_m])
    part_n = np.concatenate([unit % c.tail // c.tail_m, part_n])
    rows, cols = c.block_m // c.tail_m, c.block_n // c.tail_n
    return columns | {
        "row": columns["row"] + part_m * rows, "col": columns["col"] + part_n * cols,
        "rows": np.full_like(part_m, rows), "cols": np.full_like(part_m, cols),
        "first_k": np.zeros_like(part_m), "last_k": np.full_like(part_m, problem.K),
        "step": np.full_like(part_m, c.tail_k),
    }  # fmt: skip


def _of_work(problem: Problem, config: Config) -> Schedule:
    """Programs that take whole tiles in turn, then a narrow tile or their share of the steps of tiles cut along K."""
    p, c = problem, config
    tiles_n = -(-p.N // c.block_n)
    steps = -(-p.K // c.block_k)
    at_once = programs_at_once(p, c)
    split = c.split_k if Split.of(p, c) else 1
    work = Work.divide(-(-p.M // c.block_m) * tiles_n, steps, at_once, c.tail, split)
    program, turn = _dealt(work.whole, work.programs)
    columns = _of_config(p, c, np.arange(work.whole), tiles_n)
    before = np.bincount(program, minlength=work.programs)
    own, behind, more = _rest_of_work(p, c, work, tiles_n)
    return Schedule(
        work.programs, at_once, program=np.concatenate([program, own]),
        turn=np.concatenate([turn, before[own] + behind]),
        **{name: np.concatenate([columns[name], more[name]]) for name in columns},
    )  # fmt: skip


def _rest_of_work(
    problem: Problem, config: Config, work: Work, tiles_n: int
) -> tuple[Ints, Ints, dict[str, Ints]]:
    """What does not fill a wave: programs, their turns behind the whole tiles, and where the units lie."""
    c = config
    if work.tail:
        part = np.arange(work.tail)
        columns = _of_config(problem, c, work.whole + part // c.tail, tiles_n)
        cols = c.block_n // c.tail
        columns["col"] += part % c.tail * cols
        columns["cols"] = np.full_like(part, cols)
        return *_dealt(work.tail, work.programs), columns
    program = np.arange(work.cut * work.parts)
    columns = _of_config(problem, c, work.whole + program // work.parts, tiles_n)
    columns["first_k"] = program % work.parts * work.chunk * c.block_k
    columns["last_k"] = np.minimum(columns["first_k"] + work.chunk * c.block_k, problem.K)
    return program, np.zeros_like(program), columns
