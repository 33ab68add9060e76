"""gemmery's own time of a product: the config that would run, and a law of its time.

The law is the selector's (`select.model`) with terms that the selector can omit, because they are the same for all
configs that it compares, or rare: copies, loads and stores of single elements, rows that straddle sectors, a chip that
gets too warm. Its constants are fitted, see `calibration`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ... import schedules, select
from ...launch import padding
from ...launch.plan import runs_on
from ...operands import Layout
from ...problem import Config, Problem
from ...schedules.cost import OVERLAP, Cost
from ...select.model import costs
from ...select.space import Space, Tile, kind_of, row_of, tiles_of
from . import copies
from .copies import SECTOR, Copies

#: Bytes of the widest load.
WIDE = 16

#: The constants before the fit; bandwidths as parts of the datasheet's, times in seconds.
#:
#: turned_a, fma, fma_turned: how many times as long the tensor cores, or what stands for them, take where A is loaded
#:     by pointers across K, for fp32 in FMA, and for that with a B that lies across N.
#: straddle: how many times as many bytes L2 gives where rows begin within a sector.
#: again: part of a program's start and store that shows, beyond that of the first on a multiprocessor.
#: turn: the least time of a tile of a persistent program; pointer_turn: what it costs besides without descriptors,
#:     when stores and the next loads do not overlap.
#: loads, stores, stores_apart: part of the bandwidth with which elements are loaded and stored one by one.
#: copy_straight, copy_turned, copy_launch: of torch's copies.
#: warm, throttle: the time after which a chip that multiplies as fast as it can lowers its clock, and by how much.
START: dict[str, float] = {
    "turned_a": 3.0, "fma": 1.2, "fma_turned": 1.6, "straddle": 2.0, "again": 0.3, "turn": 1.0e-6,
    "pointer_turn": 1.5e-6, "loads": 0.1, "stores": 0.7, "stores_apart": 1.0, "copy_straight": 0.4, "copy_turned": 1.0,
    "copy_launch": 3e-6, "warm": 2.5e-3, "throttle": 1.2,
}  # fmt: skip
#: Of these, the constants that a fit does not change, because only a single shape depends on them.
GIVEN = ("warm",)


@dataclass(frozen=True)
class Launch:
    """gemmery's launch for a problem.

    Attributes:
        product: the problem, on copies of matrices that are slow to read.
        config: the kernel's knobs.
        copies: what is copied before, and the names of these matrices.
    """

    problem: Problem
    product: Problem
    config: Config
    copies: Copies
    names: tuple[str, ...]


def _adjacent(operand: Layout) -> bool:
    return 1 in (operand.row, operand.col)


def granule(operand: Layout) -> int:
    """Bytes that a load along the adjacent elements of a matrix can have, at most 16."""
    item = operand.dtype.itemsize
    if not _adjacent(operand):
        return item
    outer = operand.row if operand.col == 1 else operand.col
    start = WIDE if operand.aligned else item
    return math.gcd(start, *(step * item for step in (outer, *operand.steps)))


def fits(problem: Problem, config: Config) -> bool:
    """Whether a config's kernel fits besides what it needs for an output that is stored element by element.

    The largest tiles leave neither the shared memory nor the registers for that; a plan finds that out by compiling.
    """
    if granule(problem.out) >= WIDE and problem.out_n * problem.out.dtype.itemsize % WIDE == 0:
        return True
    area = config.block_m * config.block_n
    return area < 128 * 256 and area <= 128 * problem.device.target.warp_size * config.num_warps


def launch(problem: Problem, config: Config | None = None, copied: bool | None = None) -> Launch | None:
    """gemmery's launch for a problem; None if the torch reference runs.

    Args:
        config: a given config, instead of the one that is chosen.
        copied: whether matrices that are slow to read are copied; by default, where that is predicted to pay.

    Raises:
        ValueError: no kernel can run it, or not with this config.
    """
    if not runs_on(problem):
        return None
    if copied is None:
        padded = None if problem.paired or config is not None else padding.worth_copying(problem)
    else:
        padded = padding.padded(problem) if copied else None
    product = problem if padded is None else padded.problem
    if config is None:
        found = select.candidates(product)
        config = next((one for one in found if fits(product, one)), found[0])
    moved = Copies()
    names: tuple[str, ...] = ()
    if padded is not None:
        names = padded.names
        for copy in (padded.a, padded.b):
            if copy is not None:
                item = copy.operand.dtype.itemsize
                stride = copy.strides[-2 if copy.transposed else -1]
                moved += Copies.of(copy.bytes // (2 * item), item, stride)
    return Launch(problem, product, config, moved, names)


@functools.cache
def _tiles(family: str, kind: str) -> dict[Config, Tile]:
    return {row_of(tile.config): tile for tile in tiles_of(family, kind)}


def cost_of(problem: Problem, config: Config) -> Cost:
    """The cost of a config by the selector's model, not corrected by measurements.

    Raises:
        ValueError: the config is not in the space of the problem's kind.
    """
    tiles = _tiles(problem.device.target.family, kind_of(problem))
    tile = tiles.get(row_of(config))
    if tile is None:
        raise ValueError(f"config {config} is not among those that are considered for {problem}")
    return costs(problem, Space.of([(config, tile, 0)]))[0]


def parts(launched: Launch) -> dict[str, float]:
    """The terms of the law `seconds`, as numbers; most are seconds at the datasheet's rates."""
    p, c = launched.product, launched.config
    schedule = schedules.of(c.schedule)
    cost, device = cost_of(p, c), p.device
    store = c.block_m * c.block_n * p.out.dtype.itemsize / device.store_bandwidth
    first = device.delays.launch + device.delays.start + (0.0 if schedule.overlaps_stores else store)
    pointers = c.loader == "pointer"
    half = p.a.dtype.itemsize == 2
    fma = p.a.dtype == torch.float32 and p.precision == "ieee" and device.target.backend == "cuda"
    return {
        "compute": cost.compute,
        "l2": cost.l2,
        "memory": cost.memory,
        "body": cost.total - cost.overhead - cost.reduction,
        "first": min(first, cost.overhead),
        "again": max(cost.overhead - first, 0.0),
        "reduction": cost.reduction,
        "turns": schedule.turns(p, c),
        "pointer_turns": cost.waves if schedule.overlaps_stores and pointers else 0.0,
        "turned_a": float(pointers and half and p.a.col != 1 and p.a.row == 1),
        "fma": float(fma),
        "fma_turned": float(fma and p.b.row == 1),
        "straddles": float(not pointers and any(_straddles(x) for x in (p.a, p.b)) and not p.b.is_encoded),
        "loads": cost.waves * p.K * _loads(p, c) / device.sm_bandwidth if pointers else 0.0,
        **_stores(p),
        "multiplies": float(p.a.dtype.itemsize <= 2),
        **launched.copies.parts(device),
    }


def _straddles(operand: Layout) -> bool:
    outer = operand.row if operand.col == 1 else operand.col
    return outer * operand.dtype.itemsize % SECTOR != 0


def _loads(problem: Problem, config: Config) -> float:
    """Bytes, for each step along K, of elements that are loaded in smaller pieces than 16 bytes."""
    total = 0.0
    for operand, size in ((problem.a, config.block_m), (problem.b, config.block_n)):
        if operand.unpacks:
            continue
        item = operand.dtype.itemsize
        if not _adjacent(operand):
            total += size * min(SECTOR, item * min(operand.row, operand.col))
        elif (wide := granule(operand)) < WIDE:
            total += size * item * item / wide
    return total


def _stores(problem: Problem) -> dict[str, float]:
    """Seconds of storing the output in smaller pieces than 16 bytes, at the whole bandwidth of memory."""
    out, item = problem.out, problem.out.dtype.itemsize
    elements = problem.matrices * problem.M * problem.out_n
    single = granule(out) < WIDE or problem.out_n * item % WIDE != 0
    apart = not _adjacent(out)
    return {
        "stores": elements * item / problem.device.bandwidth if single and not apart else 0.0,
        # A sector is read and written for each.
        "stores_apart": elements * 2.0 * SECTOR / problem.device.bandwidth if apart else 0.0,
    }


def seconds(parts: Mapping[str, Any], c: Mapping[str, float]) -> Any:
    """The law: seconds of a launch with the copies before it, given its parts, as numbers or arrays."""
    law = _law(parts, c)
    return law["kernel"] + copies.seconds(parts, c)


def _law(parts: Mapping[str, Any], c: Mapping[str, float]) -> dict[str, Any]:
    slower = np.where(parts["turned_a"], c["turned_a"], 1.0)
    slower = (
        slower * np.where(parts["fma"], c["fma"], 1.0) * np.where(parts["fma_turned"], c["fma_turned"], 1.0)
    )
    compute = parts["compute"] * slower
    l2 = parts["l2"] * np.where(parts["straddles"], c["straddle"], 1.0)
    memory = parts["memory"]
    # The time other than memory's in the selector's model: the larger of the two, and the time that a tail of small
    # tiles adds.
    busy = np.maximum(parts["body"] ** OVERLAP - memory**OVERLAP, 0.0) ** (1 / OVERLAP)
    busy = np.maximum.reduce([busy, compute, l2, parts["loads"] / c["loads"]])
    body = (busy**OVERLAP + memory**OVERLAP) ** (1 / OVERLAP)
    body = np.maximum(body, parts["turns"] * c["turn"])
    overhead = parts["first"] + parts["again"] * c["again"] + parts["pointer_turns"] * c["pointer_turn"]
    overhead = overhead + parts["stores"] / c["stores"] + parts["stores_apart"] / c["stores_apart"]
    kernel = body + overhead + parts["reduction"]
    hot = (parts["multiplies"] > 0) & (compute > memory)
    kernel = throttled(kernel, hot, c)
    return {"compute": compute, "l2": l2, "memory": memory, "overhead": overhead, "kernel": kernel}


def throttled(kernel: Any, hot: Any, c: Mapping[str, float]) -> Any:
    """A kernel's time where a chip that multiplies for long has to lower its clock."""
    return kernel + np.where(hot, np.maximum(kernel - c["warm"], 0.0) * (c["throttle"] - 1), 0.0)


def cost(parts: Mapping[str, float], c: Mapping[str, float]) -> dict[str, float]:
    """The parts of a predicted time in seconds, which overlap."""
    law = _law(parts, c)
    return {
        **{name: float(law[name]) for name in ("compute", "l2", "memory", "overhead")},
        "reduction": parts["reduction"],
        "copies": float(copies.seconds(parts, c)),
    }


# --- what a correction looks at -------------------------------------------------------------------------------------


def features(launched: Launch) -> tuple[list[float], list[str]]:
    """Numbers, and words, by which launches are alike; see `residuals`."""
    p, c = launched.product, launched.config
    numbers = [
        math.log2(max(size, 1)) for size in (p.M, p.N, p.K, p.matrices, c.block_m, c.block_n, c.split_k)
    ]
    numbers += [math.log2(c.block_k) / 2, c.num_stages / 4]
    pieces = "single" if c.loader == "pointer" and _loads(p, c) else ""
    kind = kind_of(p) + (" by steps" if p.b.is_scaled else "")
    words = [
        kind,
        p.b.format,
        f"{c.loader} {pieces}".strip(),
        c.schedule + (" tail" if c.tail > 1 else ""),
        "wide" if not any(_stores(p).values()) else "single",
        _fused(p),
    ]
    return numbers, words


def _fused(problem: Problem) -> str:
    """The kind of an epilogue, by what it costs."""
    fusion = problem.fusion
    if fusion is None:
        return ""
    if fusion.paired:
        return "halves"
    if any(operand.row and operand.col for operand in fusion.operands):
        return "matrix"
    elementwise = any(word in fusion.source for word in ("gelu", "silu", "maximum", "tanh", "exp"))
    return "function" if elementwise else ""
