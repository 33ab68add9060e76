"""Edge tiles: those at the end of Y, of which fewer columns are multiplied; see `kernels.any_width`.

Y rarely ends where a tile ends. Where its last tiles would begin one more wave, they come last, and programs that have
a whole tile less than others share them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..kernels.any_width_stage import own_rows
from ..operands import Dense
from .any_width_tile import EACH, PART, PROMOTED, each_of, forms_of, numbers_for, rules_of
from .base import Forms
from .walk import MOST_UNITS, Ints, Walk, in_turn, places

if TYPE_CHECKING:
    from ..problem import Config, Problem
    from ..select.space import Space
    from .cost import Floats

#: The part of a tile's time that does not depend on how many columns are multiplied, since all of them are loaded.
#: Fitted to 32 products on an H200 (`benchmarks/results/looks/edge_tiles-mixed-triton3.9.json`).
FIXED = 0.55


class Edges(NamedTuple):
    """The edge tiles of a launch, or of each config of a space.

    The others mean nothing where `width` is 0.

    Attributes:
        width: columns of an edge tile that are multiplied; 0 if there are no edge tiles.
        turns: edge tiles of a program, at most.
        waves: the time of the busiest program, in whole tiles.
    """

    width: Ints
    turns: Ints
    waves: Floats

    @classmethod
    def of(cls, problem: Problem, config: Config | Space, rows: Floats) -> Edges:
        """The edge tiles of tiles that warpgroups share, where they save time.

        Args:
            rows: of A.
        """
        p, c, programs = problem, config, problem.device.sms
        if not may_have_edges(p):
            return cls(np.asarray(0), np.asarray(0), np.asarray(0.0))
        rows = np.asarray(rows, int)
        x, y = np.where(c.swap, c.block_n, c.block_m), np.where(c.swap, c.block_m, c.block_n)
        x_rows, y_rows = np.where(c.swap, p.N, rows), np.where(c.swap, rows, p.N)
        tiles_x, tiles_y = -(-x_rows // x), -(-y_rows // y)
        each = _each(p, c)
        left = y_rows - (tiles_y - 1) * y
        width = np.maximum(-(-left // each) * each, PART)
        full, more = np.divmod(tiles_x * (tiles_y - 1), programs)
        turns = -(-tiles_x // (programs - more))
        waves = full + np.maximum(more > 0, turns * (FIXED + (1 - FIXED) * width / y))
        saves = waves < -(-tiles_x * tiles_y // programs)
        counted = (full + turns) * programs <= MOST_UNITS
        there = (c.split_k == 1) & (full > 0) & (width < y) & saves & counted
        return cls(np.where(there, width, 0), turns, waves)


def may_have_edges(problem: Problem) -> bool:
    """Whether launches for a problem may have edge tiles: of plain matrices, with a kernel for all widths.

    Accurate fp8 has none, since ptxas would spill registers in its K loop. Neither does fp8 with scales along K, whose
    kernels rely on where tiles begin: edge tiles may begin at any multiple of 16.
    """
    p = problem
    is_plain = type(p.a) is Dense and not p.batch and not p.ragged
    return is_plain and rules_of(p.b.staged).shared is None and numbers_for(p) is not PROMOTED


def _each(problem: Problem, config: Config | Space) -> Ints:
    """The widths of which a kernel has code are multiples of this."""
    p, c, forms = problem, config, Forms.of(problem)
    x, groups = np.where(c.swap, c.block_n, c.block_m), np.asarray(c.num_warps) // 4
    each = each_of(own_rows(x, groups), groups, rules_of(p.b.staged), numbers_for(p))
    # A weight that has a `Stage` is always X.
    swapped, plain = (EACH.get(forms_of(swap, forms)[1], 1) for swap in (True, False))
    return np.asarray(np.maximum(each, np.where(c.swap, swapped, plain)))


def walk(problem: Problem, config: Config, band: int, edges: Edges) -> Walk:
    """See `Schedule.walk`: whole tiles in turn, then edge tiles; in step with `kernels.any_width.edge_of`."""
    p, c, programs = problem, config, problem.device.sms
    tiles_m, tiles_n = -(-p.M // c.block_m) - c.swap, -(-p.N // c.block_n) - (not c.swap)
    whole, edge = np.arange(tiles_m * tiles_n), np.arange(tiles_n if c.swap else tiles_m)
    _, row, col = places(whole, tiles_m, tiles_n, band)
    program, turn = in_turn(len(whole), programs)
    own, later = in_turn(len(edge), programs - len(whole) % programs)
    width = int(edges.width)
    along_x, along_y = (
        edge * (c.block_n if c.swap else c.block_m),
        np.full_like(edge, (p.M if c.swap else p.N) - width),
    )
    corners = (along_y, along_x) if c.swap else (along_x, along_y)
    sizes = (width, c.block_n) if c.swap else (c.block_m, width)

    def both(first: Ints | int, then: Ints | int) -> Ints:
        return np.concatenate([np.broadcast_to(first, whole.shape), np.broadcast_to(then, edge.shape)])

    return Walk(
        programs, programs, program=both(program, own + len(whole) % programs),
        turn=both(turn, later + len(whole) // programs), batch=both(0, 0),
        row=both(row * c.block_m, corners[0]), col=both(col * c.block_n, corners[1]), rows=both(c.block_m, sizes[0]),
        cols=both(c.block_n, sizes[1]), first_k=both(0, 0), last_k=both(p.K, p.K), step=both(c.block_k, c.block_k),
    )  # fmt: skip
