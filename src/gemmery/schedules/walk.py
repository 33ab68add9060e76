"""The work of a launch as numpy arrays: which program computes each tile, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..problem import Config, Problem

Ints = np.ndarray
#: Rows, columns and step along K of a tile.
Sizes = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Walk:
    """The work of a launch; each array has an entry for every unit of it: a tile, or a part of one.

    Attributes:
        programs: how many are started.
        at_once: how many run at the same time, see `Schedule.at_once`.
        program, turn: the program that computes a unit, and the unit's number among those of the program, from 0.
        batch, row, col: its matrix and its corner, in elements.
        rows, cols: its extent, part of which may lie outside of the matrix.
        first_k, last_k, step: its range of K, and the step of its K loop.
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


def places(tile: Ints, tiles_m: int, tiles_n: int, group: int) -> tuple[Ints, Ints, Ints]:
    """The batch, row and column of tiles by their numbers; in step with `kernels.order.grouped`."""
    batch, tile = np.divmod(tile, max(tiles_m * tiles_n, 1))
    first = tile // (group * max(tiles_n, 1)) * group
    rows = np.minimum(tiles_m - first, group)
    within = tile - first * tiles_n
    return batch, first + within % rows, within // rows


def tiles_of(problem: Problem, tile: Sizes, group: int, number: Ints, tiles_n: int) -> dict[str, Ints]:
    """The places of whole tiles of a size, by their numbers."""
    block_m, block_n, block_k = tile
    batch, rows, columns = places(number, -(-problem.M // block_m), tiles_n, group)
    return {
        "batch": batch, "row": rows * block_m, "col": columns * block_n,
        "rows": np.full_like(number, block_m), "cols": np.full_like(number, block_n),
        "first_k": np.zeros_like(number), "last_k": np.full_like(number, problem.K),
        "step": np.full_like(number, block_k),
    }  # fmt: skip


def whole_tiles(problem: Problem, config: Config, number: Ints, tiles_n: int, band: int) -> dict[str, Ints]:
    """The same for a config's tiles, in bands of this height; see `Schedule.band`."""
    size = (config.block_m, config.block_n, config.block_k)
    return tiles_of(problem, size, band, number, tiles_n)


#: The most units of a launch: `kernels.order.quotient` divides numbers below 2^30.
MOST_UNITS = (1 << 30) - 1


def uncounted(units: int) -> str | None:
    """Why kernels can't count so many tiles and parts of tiles; None if they can."""
    if units <= MOST_UNITS:
        return None
    return f"the kernel counts tiles and parts of tiles to {MOST_UNITS}; there are {units}"


def divisor(number: int) -> int:
    """Encodes a divisor from 1 to 2^31 for `kernels.order.quotient`: a factor in the low 32 bits, a shift above them.

    Example:
        >>> shift, factor = divmod(divisor(7), 1 << 32)
        >>> 100 * factor >> 31 + shift
        14
    """
    shift = (number - 1).bit_length()
    return -(-(1 << 31 + shift) // number) | shift << 32


def in_turn(units: int, programs: int) -> tuple[Ints, Ints]:
    """Programs and turns of units that programs take in turn."""
    turn, program = np.divmod(np.arange(units), max(programs, 1))
    return program, turn
