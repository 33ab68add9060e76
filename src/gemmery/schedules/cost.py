"""The predicted time of a config, and the arithmetic that all schedules share."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from ..problem import Config, Problem
    from ..select.space import Space

Floats = np.ndarray

#: The exponent with which two times that mostly overlap add up: the root of the sum of their powers. Fitted on an
#: H200.
OVERLAP = 2.25
#: Part of the memory bandwidth that a long stream reaches.
STREAM = 0.855
#: Part of a tile's store time that the program's next tile does not hide.
STORE = 0.3
#: Part of the whole tile's rate that a small tile of the tail reaches.
TAIL_EFFICIENCY = 0.8
#: Seconds that TMA takes for a row of 128 bytes outside an operand, which it fills with zeros, in a block that is in
#: part inside; and the share of the multiprocessors that ask for such rows from which on it takes as long. Fitted with
#: the model of tiles of any width.
FILL, FILLED = 7.05e-9, 0.615
#: Bytes that are stored together in shared memory along an operand's unit stride.
CHUNK = 128
#: Seconds that a function such as an activation takes for an element of a tile, and that reading or writing another
#: matrix takes. Fitted with the model of tiles of any width.
FUNCTION, ELEMENT = 0.85e-10, 0.4e-10
#: Seconds that a thread takes for each byte of a matrix that is added after the sum, while nothing else runs on its
#: multiprocessor. Fitted to a product of 8192x4096x8192 on an H200 that is added to a matrix of float32 and of bf16,
#: in up to eight configs each (`benchmarks/results/looks/added-bf16.json`).
ADDED = 1.0e-8
#: Seconds in which a warpgroup adds a product of thin matrices to 64 by 64 elements, and those for each number along
#: the short side. An H200 took 3.5 µs for 4096 by 4096 and rank 16
#: (`benchmarks/results/looks/adapters-bf16.json`).
THIN, THIN_RANK = 0.15e-6, 4e-9
#: Standard deviation of the sizes of groups over their mean, besides what chance adds. Experts of trained models have
#: Gini coefficients of 0.1 to 0.25 (arXiv:2605.20982). The representative sizes, in standard deviations.
IMBALANCE = 0.36
QUANTILES = (-1.53, -0.89, -0.49, -0.16, 0.16, 0.49, 0.89, 1.53)
#: On average, the largest of n normal numbers is about this many times sqrt(2 ln n) standard deviations, for n up to
#: 100.
LARGEST = 0.75


@dataclass(frozen=True)
class Cost:
    """Predicted time of a config in seconds, and its parts, which overlap.

    Attributes:
        total: the time by which configs are ranked.
        compute: K steps at the tensor cores' rate, on the busiest multiprocessor.
        l2: the same steps at the rate at which the multiprocessor reads from L2.
        memory: each distinct byte once, at the memory's bandwidth.
        overhead: launch, pipeline fill, epilogues and stores.
        reduction: storing and adding the partial sums of tiles that are split along K.
        correction: the seconds that measured times of similar products add, see `select.measured`; 0 if there are
            none.
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
        """With totals multiplied by the measured corrections."""
        return replace(self, total=self.total * factor, correction=self.total * (factor - 1))

    @classmethod
    def joined(cls, parts: list[tuple[Floats, Costs]]) -> Costs:
        """The costs of a space, given those of its parts, each with the places of its configs in the space."""
        if len(parts) == 1:
            return parts[0][1]
        count = sum(len(places) for places, _ in parts)
        columns = {
            name: np.empty((*parts[0][1].total.shape[:-1], count)) for name in cls.__dataclass_fields__
        }
        for places, costs in parts:
            for name, column in columns.items():
                column[..., places] = getattr(costs, name)
        return cls(**columns)

    def __getitem__(self, index: int) -> Cost:
        """The costs of one config."""
        values = (getattr(self, name) for name in Cost.__dataclass_fields__)
        return Cost(*(float(np.broadcast_to(value, self.total.shape)[index]) for value in values))


def stage_bytes(problem: Problem, columns: Space | Config) -> Any:
    """The bytes of the blocks of both operands in one step along K, for each config or for one."""
    p, c = problem, columns
    return (c.block_m * p.a.dtype.itemsize + c.block_n * p.b.bits / 8) * c.block_k


def functions_of(problem: Problem) -> int:
    """The number of functions, such as activations, that an epilogue calls.

    Products, sums and conversions of type take no time worth counting.
    """
    source = "" if problem.fusion is None else problem.fusion.source
    return len(re.findall(r"= \((?!as_type)\w+\(", source))


def calls_of(problem: Problem) -> float:
    """The number of an epilogue's function calls per element of the product."""
    return functions_of(problem) * problem.out_n / problem.N


def added(problem: Problem, space: Space) -> Floats:
    """Seconds for each element of a tile in which a matrix, or a product of thin ones, is added after the sum.

    A matrix that a traced epilogue reads has none. See `ADDED`.
    """
    area = space.block_m * space.block_n
    seconds = thin_seconds(problem, area * 4 / space.num_warps) / area
    if problem.epilogue == "add_matrix" and problem.addend is not None:
        threads = space.num_warps * problem.device.target.warp_size
        seconds = seconds + ADDED * problem.addend.dtype.itemsize / threads
    return np.asarray(seconds)


def thin_seconds(problem: Problem, elements: Floats) -> Floats:
    """Seconds in which a warpgroup adds a product of thin matrices to elements of a tile; 0 if there is none."""
    rank = problem.a.adapter_rank
    return np.asarray((THIN + THIN_RANK * rank) * np.maximum(elements / 64**2, 1) * (rank > 0))


def along(problem: Problem) -> tuple[bool, bool]:
    """Whether an epilogue reads a vector along M, and one along N."""
    of_rows, of_columns = (
        any(bool(x.row) == row and bool(x.col) != row for x in problem.extras) for row in (True, False)
    )
    return of_rows, of_columns


def fitted(problem: Problem) -> bool:
    """Whether corrections apply that were measured only on dense 16-bit matrices."""
    return not (problem.a.kind or problem.b.kind) and problem.a.dtype.itemsize == 2


def filled(problem: Problem, space: Space, given: Given) -> Floats:
    """The most seconds that TMA takes for the rows of a step that lie outside the operands; see `FILL`.

    For problems that are not `fitted` it is 0.
    """
    p, s = problem, space
    if not fitted(p):
        return np.zeros(1)
    rows = given.rows
    tiles_m, tiles_n = -(-rows // s.block_m), -(-p.N // s.block_n)
    # A tile whose width is not a power of two is loaded as two blocks.
    main = 1 << np.floor(np.log2(s.block_n)).astype(int)
    inside = p.N - (tiles_n - 1) * s.block_n
    outside_n = np.where(inside <= main, main, s.block_n) - inside
    outside_m = tiles_m * s.block_m - rows
    if given.in_groups:
        outside_m = np.maximum(s.block_m - given.rows_inside(p.matrices), 0)
    # The multiprocessors that have a tile ask for such rows together.
    busy = np.minimum(1, tiles_m * tiles_n * p.matrices / p.device.sms) / FILLED
    of_m = _outside(outside_m, p.a.col == 1, p.a.dtype.itemsize) * np.minimum(1, busy / tiles_m)
    of_n = _outside(outside_n, p.b.row == 1, p.b.bits / 8) * np.minimum(1, busy / tiles_n)
    seconds: Floats = np.maximum(of_m, of_n) * s.block_k / CHUNK * FILL * (s.loader == "descriptor")
    return seconds


def _outside(count: Floats, along_k: bool, item: float) -> Floats:
    """The bytes of a column of a block that lie outside the operand and are filled.

    Args:
        count: rows of the block outside the operand.
        along_k: whether elements along K are adjacent. Else those of different rows are, in chunks, of which one is in
            part inside.
    """
    bytes_outside = np.asarray(count * item)
    return bytes_outside if along_k else bytes_outside % CHUNK


class Stream(NamedTuple):
    """The time of a stream of blocks from memory, over that at `STREAM` of the bandwidth.

    A short stream takes longer, since data that other kernels have left in L2 is written back meanwhile.

    Attributes:
        long: in the limit of a long stream.
        short: the additional part for a short one.
        ramp: the time of a short one, in seconds.
    """

    long: float
    short: float
    ramp: float

    def seconds(self, memory: Floats) -> Floats:
        """The seconds of a stream that takes `memory` seconds at `STREAM` of the bandwidth."""
        return memory * (self.long + self.short * np.exp(-memory / self.ramp))


class Given(NamedTuple):
    """The figures from which the costs of all configs of a problem are computed.

    Attributes:
        rows: numbers of rows to predict for: a number, or a column of them.
        memory: seconds that the memory takes for each distinct byte once.
        rate: operations per second of one multiprocessor, in a long product.
        ragged: the kind of groups of uneven sizes, for which the figures are those of an average group: "rows", which
            are in one matrix for all groups, or "k"; "" for none.
        gathers: whether rows of the first operand are read by their numbers.
    """

    rows: Floats
    memory: Floats
    rate: float
    ragged: str = ""
    gathers: bool = False

    @property
    def in_groups(self) -> bool:
        """Whether rows are."""
        return self.ragged == "rows"

    def longest(self, matrices: int) -> float:
        """The largest of uneven ranges of K, relative to the average; estimated as the largest of normal numbers."""
        if self.ragged != "k" or matrices < 2:
            return 1.0
        return 1 + IMBALANCE * LARGEST * math.sqrt(2 * math.log(matrices))

    def tile_rows(self, matrices: int, block_m: Floats) -> Floats:
        """Rows of tiles in all matrices; of ragged groups, as many as there are on average.

        Args:
            block_m: rows of a tile, for each config.
        """
        if not self.in_groups:
            return np.asarray(matrices * -(-self.rows // block_m))
        mean = np.asarray(self.rows, dtype=float)
        apart = np.sqrt(mean + (IMBALANCE * mean) ** 2)
        sizes = [np.maximum(np.round(mean + z * apart), 1) for z in QUANTILES]
        return np.asarray(matrices * np.mean([np.ceil(size / block_m) for size in sizes], axis=0))

    def rows_inside(self, matrices: int) -> Floats:
        """Rows of a matrix that a tile can load; a tile of a small group loads those of the next groups."""
        return np.asarray(self.rows * matrices) if self.in_groups else self.rows
