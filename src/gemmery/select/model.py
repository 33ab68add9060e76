"""A simple analytic model of a GEMM's time.

A multiprocessor works through its share of the tiles one after the other; a step along K takes as long as the slower of
the tensor cores and the way from L2, and the whole product at least as long as its bytes take from memory. It is
built to rank configs, with inputs from the device table and the space; its parts are kept to explain a choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import Problem
from ..waves import Waves
from .space import Tile

#: Seconds that a tile costs besides its K loop: filling the pipeline, and epilogue and store.
TILE_OVERHEAD = {"tile": 2.5e-6, "persistent": 1.2e-6}
#: L2 gives this many times the bandwidth of device memory.
L2_OVER_MEMORY = 2.2
#: Part of the memory bandwidth that a long stream reaches.
STREAM = 0.88
#: Seconds from the start of a launch to its first instruction, and from the last to the end.
LAUNCH = 3e-6


#: Seconds between the whole tiles and a tail of narrow ones: the pipeline runs empty and is filled again.
TAIL_OVERHEAD = 4e-6


@dataclass(frozen=True)
class Cost:
    """Predicted time of a config in seconds, and its parts.

    Attributes:
        total: what configs are ranked by.
        compute: K steps at the tensor cores' rate, on the busiest multiprocessor.
        l2: the same steps at L2's bandwidth.
        memory: each distinct byte once, at the memory's bandwidth.
        overhead: launch, pipeline fill, epilogues and stores.
        waves: tiles on the busiest multiprocessor; a tail counts as the part of a tile that it is.
    """

    total: float
    compute: float
    l2: float
    memory: float
    overhead: float
    waves: float


@dataclass(frozen=True)
class _Wave:
    """`count` tiles of one size on the busiest multiprocessor, one after the other."""

    count: int
    rows: int
    columns: int

    def compute(self, problem: Problem, tile: Tile) -> float:
        """Seconds of arithmetic."""
        device = problem.device
        rate = device.rate(problem.a.dtype, problem.precision) * device.achieved / device.sms
        return self.count * 2 * self.rows * self.columns * _padded_k(problem, tile) / (rate * tile.efficiency)

    def l2(self, problem: Problem, tile: Tile) -> float:
        """Seconds of traffic from L2, of which one multiprocessor gets no more than its share when others are idle."""
        step = self.rows * problem.a.dtype.itemsize + self.columns * problem.b.dtype.itemsize
        rate = problem.device.bandwidth * L2_OVER_MEMORY / problem.device.sms
        return self.count * step * _padded_k(problem, tile) / rate


def _padded_k(problem: Problem, tile: Tile) -> int:
    return -(-problem.K // tile.config.block_k) * tile.config.block_k


def _waves(problem: Problem, tile: Tile) -> list[_Wave]:
    """How the tiles fall on the multiprocessors: whole ones, and the tail's small ones."""
    c, sms = tile.config, problem.device.sms
    work = Waves.of(problem, c)
    kinds = ((work.tiles, c.block_m, c.block_n), (work.parts, c.block_m // c.tail_m, c.block_n // c.tail_n))
    return [_Wave(-(-count // sms), rows, columns) for count, rows, columns in kinds if count]


def cost(problem: Problem, tile: Tile) -> Cost:
    """The predicted cost of running `problem` with one row of the space."""
    p, c = problem, tile.config
    waves = _waves(p, tile)
    compute = [wave.compute(p, tile) for wave in waves]
    l2 = [wave.l2(p, tile) for wave in waves]
    memory = p.bytes / (p.device.bandwidth * STREAM)
    whole = sum(wave.count * wave.rows * wave.columns for wave in waves) / (c.block_m * c.block_n)
    overhead = LAUNCH + (len(waves) - 1) * TAIL_OVERHEAD + whole * TILE_OVERHEAD[c.schedule]
    busy = sum(max(pair) for pair in zip(compute, l2, strict=True))
    return Cost(max(busy, memory) + overhead, sum(compute), sum(l2), memory, overhead, whole)
