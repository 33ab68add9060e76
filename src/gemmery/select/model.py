"""A simple analytic model of a GEMM's time.

A multiprocessor works through its share of the tiles one after the other; a step along K takes as long as the slower of
the tensor cores and the way from L2, and the whole product at least as long as its bytes take from memory. It is
built to rank configs, with inputs from the device table and the space; its parts are kept so that a choice can be explained.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import Problem
from .space import Tile

#: Seconds that a tile costs besides its K loop: filling the pipeline, and epilogue and store.
TILE_OVERHEAD = {"tile": 2.5e-6, "persistent": 1.2e-6}
#: L2 gives this many times the bandwidth of device memory.
L2_OVER_MEMORY = 2.2
#: Part of the memory bandwidth that a long stream reaches.
STREAM = 0.88
#: Seconds from the start of a launch to its first instruction, and from the last to the end.
LAUNCH = 3e-6


@dataclass(frozen=True)
class Cost:
    """Predicted time of a config in seconds, and its parts.

    Attributes:
        total: what configs are ranked by.
        compute: K steps at the tensor cores' rate, on the busiest multiprocessor.
        l2: the same steps at L2's bandwidth.
        memory: each distinct byte once, at the memory's bandwidth.
        overhead: launch, pipeline fill, epilogues and stores.
        waves: tiles on the busiest multiprocessor.
    """

    total: float
    compute: float
    l2: float
    memory: float
    overhead: float
    waves: int


def cost(problem: Problem, tile: Tile) -> Cost:
    """The predicted cost of running `problem` with one row of the space."""
    p, c, device = problem, tile.config, problem.device
    tiles = p.matrices * -(-p.M // c.block_m) * -(-p.N // c.block_n)
    waves = -(-tiles // device.sms)
    steps = -(-p.K // c.block_k)
    rate = device.rate(p.a.dtype, p.precision) * device.achieved / device.sms
    step_flops = 2 * c.block_m * c.block_n * c.block_k
    step_bytes = (c.block_m * p.a.dtype.itemsize + c.block_n * p.b.dtype.itemsize) * c.block_k
    busy = min(tiles, device.sms)
    compute = waves * steps * step_flops / (rate * tile.efficiency)
    l2 = waves * steps * step_bytes * busy / (device.bandwidth * L2_OVER_MEMORY)
    memory = p.bytes / (device.bandwidth * STREAM)
    overhead = LAUNCH + waves * TILE_OVERHEAD[c.schedule]
    return Cost(max(compute, l2, memory) + overhead, compute, l2, memory, overhead, waves)
