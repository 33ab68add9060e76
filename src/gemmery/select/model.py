"""An analytic model of a GEMM's time, for all configs of a space at once.

A multiprocessor works through its share of the tiles, as many at a time as it has room for; a step along K takes as
long as the slower of the tensor cores and the way from L2, which is narrower where few bytes are in flight. The product
takes at least about as long as its bytes take from memory. To that come what a program costs besides its K loop, and
the adding-up of tiles that are cut along K. All inputs come from the device table and the space; the parts are kept to
explain a choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..problem import Problem
from ..schedules.waves import cut_last_wave
from ..schedules.work import Work
from .space import Space, across

#: How two things that mostly overlap add up: the root of the sum of their powers. Fitted on an H200.
OVERLAP = 2.25
#: Part of the memory bandwidth that a long stream reaches.
STREAM = 0.855
#: Registers of a thread besides its accumulators; registers and threads of a multiprocessor.
OTHER_REGISTERS, REGISTERS, THREADS = 45, 65536, 2048
#: Part of the whole tile's rate that a small tile of the tail reaches.
TAIL_EFFICIENCY = 0.8
#: Part of B that is read again for every further row of tiles, where clusters take different parts of K.
AGAIN = 0.25
#: Part of the rate that is left where operands have to be turned in registers.
TURNED = 0.15

Floats = np.ndarray


@dataclass(frozen=True)
class Cost:
    """Predicted time of a config in seconds, and its parts, which overlap.

    Attributes:
        total: what configs are ranked by.
        compute: K steps at the tensor cores' rate, on the busiest multiprocessor.
        l2: the same steps at the rate at which it takes in bytes.
        memory: each distinct byte once, at the memory's bandwidth.
        overhead: launch, pipeline fill, epilogues and stores.
        reduction: leaving and adding up the parts of tiles that are cut along K.
        correction: what the measured times of similar products add, see `measured`; 0 where there are none.
        waves: tiles on the busiest multiprocessor; a part of a tile counts as such.
    """

    total: float
    compute: float
    l2: float
    memory: float
    overhead: float
    reduction: float
    correction: float
    waves: float


@dataclass(frozen=True, eq=False)
class Costs:
    """The same for all configs of a space, as arrays of shape (..., configs)."""

    total: Floats
    compute: Floats
    l2: Floats
    memory: Floats
    overhead: Floats
    reduction: Floats
    correction: Floats
    waves: Floats

    def corrected(self, factor: Floats) -> Costs:
        """With totals multiplied by what was measured."""
        return replace(self, total=self.total * factor, correction=self.total * (factor - 1))

    def where(self, choose: np.ndarray, others: Costs) -> Costs:
        """Those of `others` where `choose` is true."""
        names = self.__dataclass_fields__
        return Costs(*(np.where(choose, getattr(others, name), getattr(self, name)) for name in names))

    def __getitem__(self, index: int) -> Cost:
        """The costs of one config."""
        values = (getattr(self, name) for name in Cost.__dataclass_fields__)
        return Cost(*(float(np.broadcast_to(value, self.total.shape)[index]) for value in values))


def _resident(problem: Problem, space: Space, stage: Floats) -> Floats:
    """Programs of a config that a multiprocessor holds at once."""
    area = space.block_m * space.block_n
    staging = area * problem.out.dtype.itemsize / (1 + space.split_store)
    pipeline = stage * space.num_stages
    # A persistent program loads its next tile while it stores this one; others use the same memory for both.
    shared = np.where(space.persistent, pipeline + staging, np.maximum(pipeline, staging)) + 1024
    threads = space.num_warps * problem.device.target.warp_size
    registers = (area / threads + OTHER_REGISTERS) * threads
    fit = np.minimum(problem.device.target.shared / shared, REGISTERS / registers)
    fit = np.minimum(fit, THREADS // threads)
    return np.where(space.persistent, 1, np.maximum(np.floor(fit), 1))


def costs(
    problem: Problem, space: Space, M: Floats | None = None, least_bytes: Floats | None = None
) -> Costs:
    """The predicted costs of running `problem` with each config of a space.

    Args:
        M: numbers of rows, as a column, to predict for instead of the problem's; then `least_bytes` are their bytes.
    """
    p, s, device = problem, space, problem.device
    rows = np.asarray(p.M if M is None else M)
    item = p.a.dtype.itemsize
    item_b = p.b.bits / 8
    stage = (s.block_m * item + s.block_n * item_b) * s.block_k * 1.0
    tiles, _, _, small = cut_last_wave(
        p.matrices * -(-rows // s.block_m), p.N, s.block_n, s.tail_m, s.tail_n, device.sms
    )
    steps = -(-max(p.K, 1) // s.block_k)
    each = -(-steps // s.split_k)
    parts = -(-steps // each)
    work = np.ceil(tiles * parts / device.sms)
    together = np.clip(work, 1, _resident(p, s, stage))

    rate = device.rate(p.a.dtype, p.precision) * device.achieved / device.sms
    if any(across(p)):
        rate *= TURNED
    intake = device.sm_bandwidth
    in_flight = together * np.maximum(s.num_stages - 1, 0.5) * stage / device.delays.latency
    area = s.block_m * s.block_n
    compute = work * each * 2.0 * area * s.block_k / (rate * s.efficiency)
    l2 = work * each * stage / np.minimum(intake, in_flight)
    # The tail's small tiles, one after the other.
    cuts = s.tail_m * s.tail_n
    turns = np.ceil(small / device.sms)
    small_compute = 2.0 * area / cuts * p.K / (rate * TAIL_EFFICIENCY)
    small_l2 = (s.block_m / s.tail_m * item + s.block_n / s.tail_n * item_b) * p.K / intake
    tail = turns * np.maximum(small_compute, small_l2) + (small > 0) * device.delays.tail

    bytes_moved = np.asarray(p.bytes if least_bytes is None else least_bytes, dtype=float)
    memory = bytes_moved / (device.bandwidth * STREAM)
    busy = np.maximum(compute, l2) + tail
    body = (busy**OVERLAP + memory**OVERLAP) ** (1 / OVERLAP)
    store = area * p.out.dtype.itemsize / device.store_bandwidth
    once = device.delays.launch + np.where(
        s.persistent,
        device.delays.start + work * store * 0.3,
        np.ceil(work / together) * (device.delays.start + store),
    )
    reduction = np.where(
        parts > 1, device.delays.reduction + parts * area * 4.0 / device.store_bandwidth, 0.0
    )
    waves = work / parts + turns / cuts
    total = body + once + reduction
    predicted = Costs(
        total,
        compute + turns * small_compute,
        l2 + turns * small_l2,
        memory,
        once,
        reduction,
        np.zeros(1),
        waves,
    )
    return predicted.where(s.dealt, _of_dealt(p, s, rows, item_b, memory)) if s.dealt.any() else predicted


def _of_dealt(problem: Problem, space: Space, rows: Floats, item_b: float, memory: Floats) -> Costs:
    """The costs of a space's configs if their work is divided as `Work` does; see `space.DEALT`.

    Args:
        item_b: bytes of one of B's numbers.
        memory: the time that the memory takes.
    """
    p, s, device = problem, space, problem.device
    item = p.a.dtype.itemsize
    ctas = s.cluster_m * s.cluster_n
    own_m, own_n = s.block_m // s.cluster_m, s.block_n // s.cluster_n
    # What CTAs of a cluster share is read once.
    from_a, from_b = own_m / s.cluster_n * item, own_n / s.cluster_m * item_b
    taken_in = (from_a + from_b) * s.block_k
    area = own_m * own_n
    tiles = -(-rows // s.block_m) * -(-p.N // s.block_n)
    steps = -(-max(p.K, 1) // s.block_k)
    whole, small, chunk, parts = Work.divide_many(tiles, steps, device.sms // ctas, s.tail_n, s.split_k)
    rate = device.rate(p.a.dtype, p.precision) * device.achieved / device.sms
    compute_step = 2.0 * area * s.block_k / (rate * s.efficiency)
    l2_step = taken_in / device.sm_bandwidth
    long = whole * steps + chunk
    part = 1 / s.tail_n
    # Rows of tiles pass the same block of B at different times where some tiles are cut along K; L2 holds on to a part.
    again = np.where(chunk > 0, -(-rows // s.block_m) - 1, 0) * (p.N * p.K * item_b * AGAIN)
    memory = memory + again / (device.bandwidth * STREAM)
    # A narrower tile computes less for the same rows of A.
    compute = long * compute_step + small * steps * compute_step * part / TAIL_EFFICIENCY
    l2 = long * l2_step + small * steps * l2_step * (from_a + from_b * part) / (from_a + from_b)
    body = (np.maximum(compute, l2) ** OVERLAP + memory**OVERLAP) ** (1 / OVERLAP)
    store = area * p.out.dtype.itemsize / device.store_bandwidth
    turns = whole + (chunk > 0) + small * part
    once = device.delays.launch + device.delays.start + turns * store * 0.3
    reduction = np.where(
        chunk > 0, device.delays.reduction + parts * area * 4.0 / device.store_bandwidth, 0.0
    )
    waves = whole + chunk / steps + small * part
    return Costs(body + once + reduction, compute, l2, memory, once, reduction, np.zeros(1), waves)
