"""As many programs as run at once, each with a share of the tiles that is fixed before the launch.

Tiles that would not fill a last wave may be cut along K, so that all programs end at about the same time. `Work.divide`
divides the tiles of a launch, `Work.divide_many` those of many configs for the model of their time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .base import Schedule
from .cost import OVERLAP, STORE, STREAM, Costs, Given, thin_seconds
from .walk import Ints, Walk, in_turn, whole_tiles
from .waves import Split

if TYPE_CHECKING:
    from ..problem import Config, Problem
    from ..select.space import Space

#: Part of B that is read again for every further row of tiles, where programs take different parts of K.
AGAIN = 0.25


@dataclass(frozen=True, slots=True)
class Work:
    """The division of tiles between programs.

    Attributes:
        programs: how many there are.
        whole: tiles that are computed whole, by the programs in turn.
        cut: other tiles, cut along K.
        parts: of a tile that is cut along K, each for a program.
        chunk: steps of a part; the last one may have fewer.
    """

    programs: int
    whole: int
    cut: int = 0
    parts: int = 1
    chunk: int = 1

    @classmethod
    def divide(cls, tiles: int, steps: int, most: int, split: int = 1) -> Work:
        """Tiles of `steps` steps along K for at most `most` programs at a time.

        Tiles that would not fill a last wave are cut along K into `split` parts each, if there are no more parts than
        programs.
        """
        whole = tiles // most * most
        rest = tiles - whole
        if rest and split > 1:
            chunk = -(-steps // split)
            parts = -(-steps // chunk)
            if chunk < steps and rest * parts <= most:
                return cls(most if whole else rest * parts, whole, rest, parts, chunk)
        return cls(min(tiles, most), tiles)

    @staticmethod
    def divide_many(
        tiles: Any, steps: Any, most: Any, split: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The same for arrays, with the numbers that decide the time.

        Returns:
            Whole tiles on the busiest program; the steps that it has of tiles that are cut along K, 0 if none is;
            and the parts of such a tile.
        """
        whole, rest = tiles // most, tiles % most
        chunk = -(-steps // split)
        parts = -(-steps // chunk)
        cut = (rest > 0) & (split > 1) & (chunk < steps) & (rest * parts <= most)
        return whole + ((rest > 0) & ~cut), np.where(cut, chunk, 0), np.where(cut, parts, 1)

    def partials(self, block_m: int, block_n: int) -> int:
        """Floats of workspace that cut tiles need."""
        return self.cut * self.parts * block_m * block_n

    def units(self, block_k: int) -> tuple[int, int, int, int]:
        """The numbers that kernels take: whole tiles, units after them, parts of a cut tile, K in a part."""
        return self.whole, self.cut * self.parts, self.parts, self.chunk * block_k

    def counters(self, pieces: int) -> int:
        """Counters that cut tiles need: one for each piece of a tile, of which each warpgroup has one."""
        return self.cut * pieces


class PersistentStatic(Schedule):
    """The base of schedules that divide their tiles as `Work` does."""

    universal = False
    splits: tuple[int, ...] = (2, 3, 4)
    overlaps_stores = True

    def work(self, problem: Problem, config: Config) -> Work:
        """The work of a launch."""
        p, c = problem, config
        tiles = p.tile_rows(c.block_m) * -(-p.N // c.block_n)
        steps = -(-p.K // c.block_k)
        return Work.divide(tiles, steps, self.at_once(p, c), c.split_k if Split.of(p, c) else 1)

    def at_once(self, problem: Problem, config: Config) -> int:
        """A program on each multiprocessor."""
        return problem.device.sms

    def costs(self, problem: Problem, space: Space, given: Given) -> Costs:
        p, s, device = problem, space, problem.device
        rows, memory, rate = given.rows, given.memory, given.rate
        item, item_b = p.a.dtype.itemsize, p.b.bits / 8
        taken_in = (s.block_m * item + s.block_n * item_b) * s.block_k
        area = s.block_m * s.block_n
        tiles = given.tile_rows(p.matrices, s.block_m) * -(-p.N // s.block_n)
        steps = -(-max(p.K, 1) // s.block_k)
        whole, chunk, parts = Work.divide_many(tiles, steps, device.sms, s.split_k)
        own_steps = whole * steps + chunk
        compute = own_steps * (2.0 * area * s.block_k / (rate * s.efficiency))
        l2 = own_steps * (taken_in / device.sm_bandwidth)
        # Rows of tiles pass the same block of B at different times where some tiles are cut along K; L2 holds on to a
        # part.
        again = np.where(chunk > 0, -(-rows // s.block_m) - 1, 0) * (p.N * p.K * item_b * AGAIN)
        memory = memory + again / (device.bandwidth * STREAM)
        body = (np.maximum(compute, l2) ** OVERLAP + memory**OVERLAP) ** (1 / OVERLAP)
        store = area * p.out.dtype.itemsize / device.store_bandwidth
        turns = whole + (chunk > 0)
        # Two warpgroups share a tile.
        thin = turns * thin_seconds(p, area / 2)
        once = device.delays.launch + device.delays.start + turns * store * STORE + thin
        reduction = np.where(
            chunk > 0, device.delays.reduction + parts * area * 4.0 / device.store_bandwidth, 0.0
        )
        waves = whole + chunk / steps
        return Costs(body + once + reduction, compute, l2, memory, once, reduction, np.zeros(1), waves)

    def cut_units(self, work: Work, unit: Ints) -> tuple[Ints, Ints]:
        """Returns, for each unit after the whole tiles, the number of its cut tile and of its part."""
        tile, part = np.divmod(unit, work.parts)
        return tile, part

    def walk(self, problem: Problem, config: Config) -> Walk:
        """Whole tiles in turn, then a share of the steps of tiles that are cut along K."""
        p, c = problem, config
        tiles_n = -(-p.N // c.block_n)
        work = self.work(p, c)
        program, turn = in_turn(work.whole, work.programs)
        band = self.band(p, c)
        columns = whole_tiles(p, c, np.arange(work.whole), tiles_n, band)
        before = np.bincount(program, minlength=work.programs)
        own = np.arange(work.cut * work.parts)
        tile, part = self.cut_units(work, own)
        more = whole_tiles(p, c, work.whole + tile, tiles_n, band)
        more["first_k"] = part * work.chunk * c.block_k
        more["last_k"] = np.minimum(more["first_k"] + work.chunk * c.block_k, p.K)
        return Walk(
            work.programs, self.at_once(p, c), program=np.concatenate([program, own]),
            turn=np.concatenate([turn, before[own]]),
            **{name: np.concatenate([columns[name], more[name]]) for name in columns},
        )  # fmt: skip
