"""The predicted time of tiles of any width, see `kernels.any_width`.

Its numbers are fitted to times of random products on an H200
(`benchmarks/results/looks/any_width_times-bf16.json`); those of epilogues and of fp8 to others
(`any_width_kinds-mixed.json`, `any_width_epilogues-bf16.json`), and those of packed weights to int4's
(`any_width_packed-bf16.json`, `any_width_pieces-bf16.json`, `packed_long_steps-bf16-triton3.9.json`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..kernels.any_width_scales import SPAN, WIDEST_PIECE
from ..kernels.any_width_stage import LINE_BYTES, own_rows
from .any_width_edge import Edges
from .binding import promotes
from .cost import FILL, FILLED, FUNCTION, Costs, Floats, Given, Stream, along, calls_of, fitted, thin_seconds
from .persistent_static import Work

if TYPE_CHECKING:
    from ..problem import Problem
    from ..select.space import Space

#: The part of the tensor cores' rate that is reached, and the additional time of a narrow instruction, in columns.
EFFICIENCY, EDGE = 0.9345, 18.8
#: EDGE's counterpart where both operands have adjacent elements along their rows, which narrow instructions read more
#: slowly from shared memory: products take 1 + (TURNED / width)^2 times as long. Measured on 7 random products and on
#: ranges of K (`turns_ready-bf16.json`, `grouped_times2-bf16.json`).
TURNED = 20.0
#: The factor of the products of matrices if warpgroups take turns, measured on 10 random products
#: (`turns_ready-bf16.json`). Ranges of K do not have it: long ones are faster in shared tiles (`places-bf16.json`).
IN_TURNS = 0.98
#: The factor of the products' time if each step's sum is promoted, and if it is also scaled; for 1, 2 and 3
#: warpgroups, since the others multiply while one adds.
PROMOTING, SCALING = (1.57, 1.14, 1.04), (1.41, 1.05, 0.98)
#: With scales: the fixed time of a step's piece, in columns; what each halving of the columns that share a scale adds
#: to SCALING; and the slowdown of kernels that can cut tiles along K. Fitted with SCALING to 34 random products
#: (`scaled_tiles-mixed-triton3.9`).
SCALED_EDGE, MASKING, SCALED_CUT = 21.0, 0.023, 1.04
#: For products with a 2:4 sparse weight: their time as a part of that of dense ones, if only Y is read from shared
#: memory; and seconds at a launch's start for each warpgroup but the first, with kept numbers of 16 and of 8 bits.
SPARSE, SPARSE_GROUP, SPARSE8_GROUP = 0.41, 0.5e-6, 0.95e-6
#: For numbers that are read from shared memory: columns of Y, and rows of X, with which X and all stores take as long
#: as Y.
SPARSE_Y, SPARSE_X = 68, 64
#: The least seconds of a step with kept numbers of 8 bits that are widened to 16, of one warpgroup; the share that each
#: other warpgroup adds, and the factor of a long step (`sparse8_long_steps-triton3.9.json`).
SPARSE8_STEP, SPARSE8_OTHERS, SPARSE8_LONG = 1.57e-7, 0.4, 1.5
#: The slowdown of loads from L2 for each doubling of A and B beyond L2's size, with a sparse weight. Dense
#: products, which take longer themselves, do not show this.
BEYOND = 0.3
#: Rows of X that a warpgroup unpacks at a time.
ROWS = 64
#: Seconds of a step in which a packed weight is unpacked: once, by several warpgroups and by one alone, and for each 64
#: rows. The exponent with which they and the products add up.
UNPACK, UNPACK_ALONE, UNPACK_ROWS, UNPACK_OVERLAP = 1.02e-7, 1.02e-7, 6.05e-8, 3.67
#: The factors of the seconds once for a long step, by several warpgroups and by one alone.
UNPACK_LONG, UNPACK_LONG_ALONE = 1.2, 1.45
#: The part of `EFFICIENCY` that these products reach, with 64 rows for each warpgroup and with 128.
UNPACK_EFFICIENCY = (0.979, 0.946)
#: Seconds at a launch's start for each warpgroup, which has more code to fetch, and those that a kernel for one width
#: saves there.
UNPACK_START, ONE_WIDTH = 4.7e-7, 0.447e-6
#: Share of the bandwidth from L2 of one multiprocessor and of all together; seconds from asking for bytes until they
#: are there.
INTAKE, L2, LATENCY = 1.170, 0.998, 1.21e-6
#: The least part of `FILL` that a row outside an operand takes, however few programs ask for such rows. Measured on an
#: H200: 3.9 to 4.4 ns a row where 40 and 64 programs multiply 16 rows by 4096x4096 in tiles of 64 rows
#: (`benchmarks/results/looks/thin-bf16.json`).
FILL_ALONE = 0.61
#: The exponent with which the products and the loads from L2 add up.
JOINT = 16.0
#: The slowdown for each tenfold time, because power lowers the clock, and the seconds from which it applies.
SLOWING, LONG = 0.0185, 3e-5
#: Tiles with more rows of X take less power, so that long products are faster: the part of the time that 128 more rows
#: save, and the seconds in which a product saves half of that. Fitted to 336 random products of 16 bits on an H200
#: (`benchmarks/results/looks/broad_tiles-bf16-triton3.9.json`). Groups were not measured.
BROAD, POWER = 0.046, 4e-5
#: The stream of blocks from memory. The sum of its time and the loop's, which mostly overlap.
MEMORY, OVERLAP = Stream(long=1.077, short=1.475, ramp=3.35e-6), 3.92
#: The factor of the stream's time by the kind of groups. With groups of rows, most bytes are those of weights, which
#: are read; with ranges of K, most are those of results, and to write takes longer. These and the next ones are fitted
#: to 36 random products on an H200 (`grouped_times2-bf16.json`).
IN_GROUPS = {"": 1.0, "rows": 0.9, "k": 1.35}
#: Of ranges of K: if the columns of a tile are no multiple of the first, its stores take the second times as long.
EVEN_COLUMNS, UNEVEN = 128, 1.1
#: Of groups of rows: the factor of the loads from L2.
GROUPED_L2 = 1.06
#: Seconds around a launch. Seconds around a tile and share of the time that its store takes alone, where warpgroups
#: share tiles. If warpgroups take turns, seconds between tiles, and seconds around the last one, of whose store
#: `LAST_STORE` counts.
START = 4.21e-6
TILE, STORE = 0.660e-6, 1.325
TURN, LAST, LAST_STORE = 0.297e-6, 0.944e-6, 0.668
#: Seconds by which tiles of 64 rows of X start sooner, since six of their steps are loaded at once and no start has
#: divisions (`any_width_cluster-bf16.json`).
SOONER = 0.15e-6
#: Seconds by which those with long steps start later than that (`sparse_short-bf16-triton3.9.json`).
LONG_START = 0.25e-6
#: Seconds that a tile takes more where its epilogue reads a vector, and where tiles are taken in turn; there, if the
#: operands are fp8, the program's last tile takes `VECTOR_LAST` more (`vectors_prefetched-mixed.json`).
VECTOR, VECTOR_IN_TURN, VECTOR_LAST = 1.04e-6, 0.6e-6, 1.2e-6
#: For matrices of fp8 whose steps are not promoted, the additional seconds for each part of all tiles but the last; and
#: where tiles are taken in turn, all the seconds that the epilogue of a part takes, during which the other warpgroup
#: multiplies. Fitted to 61 times of random products (`any_width_kinds-mixed.json`,
#: `random_seed608-mixed-triton3.9.json`, `random_seed611-mixed-triton3.9.json`).
VECTOR8_PART, VECTOR8_TURN = 0.51e-6, 1.1e-6
#: `VECTOR` for 16-bit operands, where the vector is that of the rows of X; and where it is that of the rows of Y, once
#: and for each part of a tile, which reads another piece of it.
VECTOR_X, VECTOR_Y, VECTOR_PART = 0.65e-6, 0.2e-6, 0.65e-6
#: `VECTOR` for a cluster, each of whose programs finishes a few parts (`short_choices-mixed.json`).
CLUSTERED_VECTOR = 0.2e-6
#: If warpgroups take turns, each part has its code, and more code takes longer to fetch: the
#: seconds for the square of the parts of a program's last tile.
CODE = 0.33e-6
#: Seconds for each part but the first of a tile whose epilogue reads a matrix.
MATRIX = 0.6e-6
#: Elements of a part; and the exponent with which rows outside take longer, where a step has several blocks of each
#: row of Y. Fitted to 140 times of 34 products of 2:4 weights on an H200
#: (`sparse_short-bf16-triton3.9.json`).
PART, LONG_FILL = 64 * 64, 0.5
#: Seconds that parts of a tile take to meet, beside the time of their bytes, and how often each byte is on its way.
REDUCTION, TIMES = 0.8e-6, 3.10
#: The additional seconds of the first with a packed weight; and in a cluster, those for each column of a tile with one
#: warpgroup (`short_choices-mixed.json`).
PACKED_REDUCTION, PACKED_CLUSTERED = 0.763e-6, 0.83e-8
#: The same for a cluster, through shared memory, and its stream of blocks from memory. The shares of multiprocessors
#: that clusters of up to 8 programs have at the same time, and seconds until later clusters start. Fitted to 470 times
#: of 75 products (`any_width_cluster-bf16.json`).
CLUSTERED, CLUSTERED_TIMES = 0.458e-6, 3.59
CLUSTER_MEMORY = Stream(long=1.034, short=0.774, ramp=3.66e-6)
CLUSTERS, AGAIN = np.array([1.0, 1.0, 1.0, 0.82, 0.91, 0.82, 0.775, 0.775, 0.91]), 0.992e-6
#: Seconds in which a program finds its first groups of rows, where warpgroups share tiles and where they take turns.
#: Fitted to 30 random products of few rows (`grouped_few-bf16-triton3.9.json`).
FIND, FIND_IN_TURN = 3.9e-6, 5.0e-6
#: The additional seconds of a kernel that could cut tiles but does not: it has more code.
IDLE = 1.01


class Terms(NamedTuple):
    """The terms of the model that depend on the kind of X; a row of `TERMS`.

    Attributes:
        products: the time of the products of a program, given the problem, the space, what they take at
            `EFFICIENCY`, the program's steps, rows of X and of Y, and warpgroups that share a tile.
        start: seconds at a launch's start, given the problem, the space and the same warpgroups.
        step: the least seconds of a step, given the same.
        beyond: by how much loads from L2 slow down, see `BEYOND`.
    """

    products: Callable[[Problem, Space, Floats, Floats, Floats, Floats, Floats], Floats]
    start: Callable[[Problem, Space, Floats], Floats]
    step: Callable[[Problem, Space, Floats], Floats] = lambda p, s, groups: np.asarray(0.0)
    beyond: float = 0.0


def _of_matrix(
    p: Problem, s: Space, compute: Floats, steps: Floats, x: Floats, y: Floats, groups: Floats
) -> Floats:
    """`Terms.products` of plain matrices."""
    turned = TURNED if p.a.col != 1 and p.b.row != 1 else 0.0
    seconds: Floats = compute * (1 + EDGE / y) * (1 + (turned / y) ** 2) * _summing(p, s, groups, y)
    return seconds


def _of_packed(
    p: Problem, s: Space, compute: Floats, steps: Floats, x: Floats, y: Floats, groups: Floats
) -> Floats:
    """`Terms.products` of a packed weight, which is unpacked meanwhile."""
    products = compute / np.where(x > ROWS * groups, UNPACK_EFFICIENCY[1], UNPACK_EFFICIENCY[0])
    halves = _blocks_of_y(p, s)
    short = np.where(x > ROWS, UNPACK, UNPACK_ALONE)
    long = short * np.where(x > ROWS, UNPACK_LONG, UNPACK_LONG_ALONE)
    unpack = steps * (np.where(halves > 1, long, short) + UNPACK_ROWS * halves * x / ROWS)
    seconds: Floats = (products**UNPACK_OVERLAP + unpack**UNPACK_OVERLAP) ** (1 / UNPACK_OVERLAP)
    return seconds


def _of_sparse(
    p: Problem, s: Space, compute: Floats, steps: Floats, x: Floats, y: Floats, groups: Floats
) -> Floats:
    """`Terms.products` of a sparse weight.

    Shared memory has as much bandwidth as the products of Y alone take. X is read too, and both are written.
    """
    seconds: Floats = compute * SPARSE * (1 + SPARSE_Y / y + SPARSE_X / x) * _summing(p, s, groups, y)
    return seconds


def _start_of_sparse(p: Problem, s: Space, groups: Floats) -> Floats:
    """`Terms.start` of a sparse weight."""
    both_wide = p.a.bits == 16 and p.b.staged is not None and p.b.staged.kind == "sparse"
    seconds: Floats = START + (SPARSE_GROUP if both_wide else SPARSE8_GROUP) * (groups - 1)
    return seconds


def _step_of_sparse8(p: Problem, s: Space, groups: Floats) -> Floats:
    """`Terms.step` of a sparse weight whose numbers are widened."""
    seconds: Floats = SPARSE8_STEP * (1 + SPARSE8_OTHERS * (groups - 1))
    return np.asarray(seconds * np.where(_blocks_of_y(p, s) > 1, SPARSE8_LONG, 1.0))


_SPARSE = Terms(_of_sparse, _start_of_sparse, beyond=BEYOND)
#: By `Stage.kind`, and "" for plain matrices.
TERMS = {
    "": Terms(_of_matrix, lambda p, s, groups: np.asarray(START)),
    "packed": Terms(_of_packed, lambda p, s, groups: START + UNPACK_START * s.num_warps / 4 - ONE_WIDTH),
    "sparse": _SPARSE,
    "sparse decoded": _SPARSE._replace(step=_step_of_sparse8),
}


def costs(problem: Problem, space: Space, given: Given, takes_turns: bool, clustered: bool) -> Costs:
    """The predicted costs of a space's configs, see `Schedule.costs`.

    Args:
        takes_turns: whether warpgroups take tiles in turn instead of sharing them.
        clustered: whether the programs that have a tile's parts are a cluster.
    """
    p, s, device, staged = problem, space, problem.device, problem.b.staged
    terms = TERMS["" if staged is None else staged.kind]
    x, y = np.where(s.swap, s.block_n, s.block_m), np.where(s.swap, s.block_m, s.block_n)
    groups = np.ones_like(s.num_warps) if takes_turns else s.num_warps // 4
    # Rows that two warpgroups share are multiplied and stored twice.
    multiplied = own_rows(x, groups) * groups
    steps = -(-max(p.K, 1) // s.block_k)
    tiles = given.tile_rows(p.matrices, s.block_m) * -(-p.N // s.block_n)
    whole, chunk, parts = Work.divide_many(tiles, steps, device.sms, s.split_k)
    if not takes_turns and not clustered:
        edges = Edges.of(p, s, given.rows)
        whole = np.where(edges.width > 0, edges.waves, whole)
    turns = whole + (chunk > 0)
    own_steps = np.maximum(whole * steps + chunk, steps * given.longest(p.matrices) * (whole > 0))
    busy = np.minimum(np.where(whole > 0, tiles, tiles * parts), device.sms)
    compute = own_steps * 2.0 * multiplied * y * s.block_k / (given.rate * EFFICIENCY)
    compute = terms.products(p, s, compute, own_steps, multiplied, y, groups)
    share = np.minimum(INTAKE, L2 * device.sms / busy) * device.sm_bandwidth
    # A packed or sparse weight, which is X, has fewer bytes to load.
    loaded = x * (p.b.bits / p.a.bits) + y
    l2 = own_steps * loaded * (s.block_k * p.a.bits / 8) / share
    l2 = l2 * _l2_factor(p, given, terms.beyond)
    if takes_turns and staged is None and given.ragged != "k":
        compute = compute * IN_TURNS
    loop = (compute**JOINT + l2**JOINT) ** (1 / JOINT)
    loop = np.maximum(loop, own_steps * _least_of_step(p, s, given.rows_inside(p.matrices), x, y, busy))
    loop = np.maximum(loop, own_steps * terms.step(p, s, groups))
    loop = loop * (1 + SLOWING * np.log10(np.maximum(loop / LONG, 1)))
    if staged is None and p.a.bits == 16 and not given.ragged:
        loop = loop * (1 - BROAD * np.maximum(x / (2 * ROWS) - 1, 0) * loop / (loop + POWER))
    stream, least = _stream(p, s, given, tiles, clustered)
    together = np.where(chunk > 0, whole, tiles // device.sms) * steps
    waits = _waits(stream, loop, together / own_steps, together * device.sms / (tiles * steps))
    elements = multiplied / groups * y
    results = 1 if p.fusion is None or p.fusion.matrix is None or p.fusion.both is None else 2
    store = elements * 2.0 * results / device.store_bandwidth
    epilogue = _epilogue_seconds(p, s, multiplied * y, elements, takes_turns, clustered)
    around = (TURN if takes_turns else TILE + store * STORE) + epilogue
    loop = loop + _scales_of_fp8(p, loop, turns, elements / PART, takes_turns)
    # Loads run ahead across tiles: only the time around the last tile is not overlapped with memory.
    loop = loop + (turns - 1) * around
    body = np.maximum((loop**OVERLAP + stream**OVERLAP) ** (1 / OVERLAP), np.maximum(waits, least))
    is_long = p.b.is_sparse & (_blocks_of_y(p, s) > 1)
    start = terms.start(p, s, groups)
    if given.in_groups:
        start = start + (FIND_IN_TURN if takes_turns else FIND)
    start = start - (SOONER - LONG_START * is_long) * (x == ROWS)
    last = LAST + store * LAST_STORE + epilogue + _code_seconds(p, elements)
    if takes_turns and p.a.bits == 8 and any(along(p)):
        last = last + VECTOR_LAST
    once = start + (last if takes_turns else around)
    moved = multiplied * y * 4.0 / device.sm_bandwidth
    meeting = REDUCTION + p.b.unpacks * PACKED_REDUCTION + TIMES * parts * moved
    if clustered:
        later = busy > CLUSTERS[np.minimum(parts, len(CLUSTERS) - 1)] * device.sms
        meeting = CLUSTERED + CLUSTERED_TIMES * moved + later * (body + AGAIN)
        meeting = meeting + p.b.unpacks * PACKED_CLUSTERED * y / groups
    reduction = np.where(chunk > 0, meeting, 0.0)
    # So a tile that is not cut gets the kernel without that code.
    idle = np.where((s.split_k > 1) & (chunk == 0), IDLE, 1.0)
    total = (body + once + reduction) * idle
    return Costs(total, compute, l2, given.memory, once, reduction, np.zeros(1), turns * np.ones_like(total))


def _stream(
    problem: Problem, space: Space, given: Given, tiles: Floats, clustered: bool
) -> tuple[Floats, Floats]:
    """The seconds of the stream from memory and to it, which overlap with the loop, and the least seconds of both.

    Args:
        tiles: how many there are in all matrices.
    """
    p, s = problem, space
    seconds = (CLUSTER_MEMORY if clustered else MEMORY).seconds(given.memory) * IN_GROUPS[given.ragged]
    if given.ragged != "k":
        return seconds, seconds
    # What tiles have in common is written by each of them.
    seconds = seconds * tiles * s.block_m * s.block_n / (p.matrices * given.rows * p.N)
    return seconds, seconds * np.where(s.block_n % EVEN_COLUMNS > 0, UNEVEN, 1.0)


def _l2_factor(problem: Problem, given: Given, beyond: float) -> Floats:
    """The factor of the time of loads from L2: `BEYOND` if it has no room for both operands, and `GROUPED_L2`."""
    p = problem
    both = (given.rows * p.a.bits + p.N * p.b.bits) * p.K / 8
    factor: Floats = 1 + beyond * np.log2(np.maximum(both / p.device.l2, 1))
    return factor * (GROUPED_L2 if given.in_groups else 1.0)


def _summing(problem: Problem, space: Space, groups: Floats, y: Floats) -> Floats:
    """The factor by which promotion or scaling slows the products.

    Args:
        groups: warpgroups that share a tile.
        y: columns of the tile.
    """
    if not problem.b.by_steps:
        by_groups = PROMOTING if promotes(problem) else (1.0, 1.0, 1.0)
        return np.asarray(np.asarray(by_groups)[groups - 1])
    piece = np.where(y > WIDEST_PIECE, SPAN, y)
    # As `any_width_scales.starts_of`.
    halvings = np.log2(SPAN / np.gcd(np.asarray(y, int), math.gcd(problem.N, SPAN)))
    factor = np.asarray(SCALING)[groups - 1] + SCALED_EDGE / piece + MASKING * halvings
    return np.asarray(factor * np.where(space.split_k > 1, SCALED_CUT, 1.0))


def _least_of_step(
    problem: Problem, space: Space, rows: Floats, x: Floats, y: Floats, busy: Floats
) -> Floats:
    """The least seconds of a step: until its bytes have arrived, and for rows outside the operands.

    Tiles are moved into the operands, unless an operand is smaller than a tile. Then all programs ask for rows outside
    it.

    Args:
        busy: programs that have tiles.
    """
    x_rows = np.where(space.swap, problem.N, rows)
    y_rows = np.where(space.swap, rows, problem.N)
    asking = np.maximum(np.minimum(1, busy / (FILLED * problem.device.sms)), FILL_ALONE)
    outside = np.maximum(x - x_rows, y - y_rows) * FILL * asking
    if problem.b.is_sparse:
        outside = outside * _blocks_of_y(problem, space) ** LONG_FILL
    seconds: Floats = np.maximum(LATENCY / (space.num_stages - 1), outside)
    return seconds


def _blocks_of_y(problem: Problem, space: Space) -> Floats:
    """Blocks of each row of Y in a step, see `Stage.y_blocks`."""
    blocks: Floats = space.block_k * problem.a.bits / (8 * LINE_BYTES)
    return blocks


def _waits(stream: Floats, loop: Floats, together: Floats, streamed: Floats) -> Floats:
    """The least time if only some programs have the last steps.

    A program does not load faster after others have ended.

    Args:
        together: the share of the busiest program's steps during which all programs run.
        streamed: the share of all bytes that are loaded by then.
    """
    seconds: Floats = stream * np.minimum(streamed, 1) + loop * (1 - together)
    return seconds


def _epilogue_seconds(
    problem: Problem, space: Space, area: Floats, elements: Floats, takes_turns: bool, clustered: bool
) -> Floats:
    """The seconds that an epilogue adds to a tile.

    Args:
        area: elements of the tile.
        elements: of a warpgroup's part of it.
    """
    p = problem
    seconds: Floats = area * (FUNCTION * calls_of(p)) + thin_seconds(p, elements)
    of_rows, of_columns = along(p)
    if clustered:
        seconds = seconds + (of_rows or of_columns) * CLUSTERED_VECTOR
    elif takes_turns or not fitted(p):
        seconds = seconds + (of_rows or of_columns) * (VECTOR_IN_TURN if takes_turns else VECTOR)
    elif of_rows or of_columns:
        along_y = np.where(space.swap, of_rows, of_columns)
        parts = np.maximum(elements / PART, 1)
        seconds = seconds + np.where(along_y, VECTOR_Y + VECTOR_PART * parts, VECTOR_X)
    if p.fusion is not None and p.fusion.matrix is not None:
        seconds = seconds + MATRIX * np.maximum(elements / PART - 1, 0)
    return seconds


def _scales_of_fp8(problem: Problem, loop: Floats, turns: Floats, parts: Floats, takes_turns: bool) -> Floats:
    """The seconds that scales of rows add before the last tile, for matrices of fp8 whose steps are not promoted.

    Args:
        loop: the seconds of the products of all tiles.
        turns: the tiles of the busiest program.
        parts: of a warpgroup's tile.
    """
    p = problem
    if p.a.bits != 8 or p.b.staged is not None or promotes(p) or not any(along(p)):
        return np.zeros(1)
    if not takes_turns:
        return np.asarray((turns - 1) * parts * VECTOR8_PART)
    # A warpgroup multiplies half of the tiles, and each next one when it has stored the one before.
    each = loop / turns
    return np.asarray(np.maximum(turns - 2, 0) * np.maximum(parts * VECTOR8_TURN - each, 0) / 2)


def _code_seconds(problem: Problem, elements: Floats) -> Floats:
    """The seconds that fetching the code of an epilogue's functions adds if warpgroups take tiles in turn.

    Args:
        elements: of a warpgroup's tile.
    """
    seconds: Floats = CODE * (calls_of(problem) * elements / PART) ** 2
    return seconds
