"""The time and the program of each tile: the kernels' tile order and schedules, in numpy.

`visits` is `kernels.order.grouped` for all tiles at once; `walk` is what a launch makes of it, see `Schedule.walk`.
"""

from __future__ import annotations

import numpy as np

from .. import schedules
from ..problem import Config, Problem
from ..schedules.walk import Ints, Sizes, Walk, places, tiles_of
from ..schedules.waves import Split, Waves

#: The orders that have names; all are the kernels' one order with bands of 1, of all or of some rows of tiles.
ORDERS = ("row", "column", "grouped")


#: Units of work that fit into a walk: its arrays then take a GB.
MOST_UNITS = 1 << 24


def band(order: str, tiles_m: int, group_size: int) -> int:
    """Rows of tiles in a band, `band_m` in `kernels.order`, for an order by its name.

    Raises:
        ValueError: there is no such order, or `group_size` is invalid.
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
        order: "row", "column" or "grouped": column by column within bands of `group_size` rows of tiles; the last band
            may be lower.

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
    _, rows, columns = places(np.arange(tiles_m * tiles_n), tiles_m, tiles_n, group)
    return np.stack([rows, columns], axis=1)


def programs_at_once(problem: Problem, config: Config) -> int:
    """The number of programs of a config that a GPU holds at once, as the selector's model computes it."""
    return schedules.of(config.schedule).at_once(problem, config)


def walk(problem: Problem, config: Config) -> Walk:
    """The work of a problem, as it is launched, with a config.

    Raises:
        ValueError: it has more units than `MOST_UNITS`.
    """
    work, split = Waves.of(problem, config), Split.of(problem, config)
    _check_count(work.units * (1 if split is None else split.parts))
    return schedules.of(config.schedule).walk(problem, config)


def plain_walk(problem: Problem, tile: Sizes, group_size: int = 8) -> Walk:
    """One program a tile, of any size, with a tile on each multiprocessor at once.

    Raises:
        ValueError: a size is invalid, or there are more tiles than `MOST_UNITS`.
    """
    for name, size in zip(("block_m", "block_n", "block_k", "group_size"), (*tile, group_size), strict=True):
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    tiles_m, tiles_n = -(-problem.M // tile[0]), -(-problem.N // tile[1])
    _check_count(problem.matrices * tiles_m * tiles_n)
    program = np.arange(problem.matrices * tiles_m * tiles_n)
    columns = tiles_of(problem, tile, group_size, program, tiles_n)
    return Walk(len(program), problem.device.sms, program=program, turn=np.zeros_like(program), **columns)


def _check_count(units: int) -> None:
    if units > MOST_UNITS:
        raise ValueError(
            f"{units} tiles are more than the {MOST_UNITS} of which there is a schedule; give a larger tile"
        )
