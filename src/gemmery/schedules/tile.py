"""A program for each tile, or for each part of a tile that is cut along K; see `kernels.gemm.gemm_tiles`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .base import Forms, Schedule
from .binding import Binding, promotes, refusal_of
from .cost import (
    OVERLAP,
    TAIL_EFFICIENCY,
    Costs,
    Floats,
    Given,
    Stream,
    added,
    calls_of,
    filled,
    fitted,
    stage_bytes,
)
from .walk import Walk, whole_tiles
from .waves import Split, Waves, cut_last_wave

if TYPE_CHECKING:
    from ..problem import Config, Problem
    from ..select.space import Space

#: Of problems that are `fitted`: the stream of blocks from memory, and the seconds by which a launch takes less than
#: `Delays` says. Measured on an H200, and used for all GPUs.
MEMORY, SOONER = Stream(long=0.913, short=0.433, ramp=40e-6), 0.75e-6
#: Of the same problems with a traced epilogue: its seconds, and those for each function call of a thread beyond 64,
#: whose code is unrolled; and of fp8 that is promoted, the seconds that a step of 256 columns of a small tile takes
#: more. Fitted to 50 random products of up to 17 us on an H200 (`looks/short_choices-mixed.json`).
TRACED, UNROLLED, MOST_CALLS, PROMOTED, SMALL = 0.6e-6, 2.5e-8, 64, 0.13e-6, 64 * 64
#: Of packed weights: the part of a program's time that each other program on its multiprocessor adds. While one
#: unpacks, another one multiplies. Fitted to 22 random products with int4 (`looks/short_choices-mixed.json`).
BESIDE = 0.7
#: Of groups of rows: the seconds in which a program finds its group; how long the stream from memory takes beside that
#: of a plain product; the least rows of a tile whose loads from L2 take longer, and how much; and the least area of a
#: tile, with how much faster such tiles are than in plain products. Fitted to random products on an H200
#: (`looks/grouped_times-bf16.json`; those of L2 to `looks/grouped_times2-bf16.json`, and the last one to
#: `looks/grouped_turns-bf16.json`).
FIND, STREAM, TALL, GROUPED_L2, LARGE, FASTER = 1.2e-6, 0.88, 64, 1.3, 128 * 256, 1.05
#: Of gathered rows: how much faster tiles of at least that area are than in plain products, and the seconds for each
#: element that is loaded. Fitted to the products of gathered rows in `looks/grouped_times-bf16.json`.
FASTER_GATHERED, GATHER = 1.25, 6e-12
#: The time of ranges of K that are cut, divided by the predicted time; measured on an H200 for 1 to 8 ranges
#: (`looks/grouped_ranges-bf16.json`).
CUT_RANGES = 1.3
#: Registers of a thread besides its accumulators; registers and threads of a multiprocessor.
OTHER_REGISTERS, REGISTERS, THREADS = 45, 65536, 2048


class Tile(Schedule):
    """A program for each tile."""

    name = "tile"
    about = "a program for each tile"
    knobs = frozenset({"split_k", "split_store", "swap", "rest_n"})
    splits: tuple[int, ...] = (2, 3, 4, 5, 6, 8, 12, 16)
    awaits: ClassVar[bool] = True

    def takes(self, config: Config, forms: Forms) -> bool:
        # Descriptors do not know where a range of K ends.
        if forms.ragged == "k":
            return config.loader == "pointer" and not config.rest_n
        return not forms.ragged or (not config.rest_n and config.split_k == 1)

    def considers(self, problem: Problem, rows: Floats, config: Config | Space) -> np.ndarray:
        """See `Schedule.considers`.

        A tile whose width is the sum of two powers of two loads two blocks of B. If B has adjacent elements along N, of
        which a block is outside, such tiles took up to 1.26 times as long as predicted
        (`benchmarks/results/looks/turned_tiles-bf16-triton3.9.json`).
        """
        p, found = problem, super().considers(problem, rows, config)
        if p.b.col != 1 or p.b.row == 1:
            return found
        width = np.asarray(config.block_n)
        return np.asarray(found & ((width & (width - 1) == 0) | (p.N % width == 0)))

    def refusal(self, problem: Problem, config: Config) -> str | None:
        if not self.takes(config, Forms.of(problem)):
            return (
                "products in groups need a block_n that is a power of two; of groups of rows split_k 1, of ranges of K "
                "the pointer loader"
            )
        return refusal_of(problem, config)

    def bind(self, problem: Problem, config: Config) -> Binding:
        return Binding(problem, config)

    def costs(self, problem: Problem, space: Space, given: Given) -> Costs:
        """See `Schedule.costs`.

        A multiprocessor computes its share of the tiles, as many at a time as it has room for. A step along K takes as
        long as the slower of the tensor cores and the loads from L2, which are slower if few bytes are in flight.
        """
        p, s, device = problem, space, problem.device
        memory, rate = given.memory, given.rate
        item, item_b = p.a.dtype.itemsize, p.b.bits / 8
        stage = stage_bytes(p, s)
        tiles, _, _, small = cut_last_wave(
            given.tile_rows(p.matrices, s.block_m), p.N, s.block_n, s.tail_m, s.tail_n, device.sms
        )
        steps = -(-max(p.K, 1) // s.block_k)
        each = -(-steps // s.split_k)
        parts = -(-steps // each)
        # In uneven ranges, the last part is half as long on average.
        units = tiles * (parts + 0.5 * (given.ragged == "k") * (parts > 1))
        work = np.ceil(units / device.sms)
        # No multiprocessor ends before its longest tile does.
        own_steps = np.maximum(work * each, np.where(parts > 1, each, steps * given.longest(p.matrices)))
        together = np.clip(work, 1, self.resident(p, s, stage))

        in_flight = together * np.maximum(s.num_stages - 1, 0.5) * stage / device.delays.latency
        area = s.block_m * s.block_n
        large = FASTER_GATHERED if given.gathers else FASTER
        faster = np.where((area >= LARGE) & given.in_groups, large, 1.0)
        compute = own_steps * 2.0 * area * s.block_k / (rate * s.efficiency * faster)
        compute = compute + given.gathers * own_steps * GATHER * s.block_m * s.block_k
        if p.b.unpacks:
            compute = compute * (1 + BESIDE * (together - 1)) / together
        l2_bandwidth_per_sm = device.sm_bandwidth
        l2 = own_steps * stage / np.minimum(l2_bandwidth_per_sm, in_flight)
        l2 = l2 * np.where((s.block_m >= TALL) & given.in_groups, GROUPED_L2, 1.0)
        # The tail's small tiles, one after the other.
        cuts = s.tail_m * s.tail_n
        turns = np.ceil(small / device.sms)
        small_compute = 2.0 * area / cuts * p.K / (rate * TAIL_EFFICIENCY)
        small_l2 = (s.block_m / s.tail_m * item + s.block_n / s.tail_n * item_b) * p.K / l2_bandwidth_per_sm
        tail = turns * np.maximum(small_compute, small_l2) + (small > 0) * device.delays.tail

        # A tile with much outside the operands ends late.
        late = each * filled(p, s, given) - np.maximum(compute, l2) / np.maximum(work, 1)
        busy = np.maximum(compute, l2) + np.maximum(late, 0) + tail
        # In large tiles other warps multiply meanwhile.
        busy = busy + promotes(p) * own_steps * PROMOTED * s.block_k / 256 * np.minimum(1, SMALL / area)
        store = area * p.out.dtype.itemsize / device.store_bandwidth
        rounds = np.ceil(work / together)
        around = self.around(work, together, device.delays.start, store)
        if given.in_groups and not p.b.unpacks:
            # Programs start and store while others wait for memory, except for one round.
            around = around / rounds
            busy = busy + around * (rounds - 1)
        stream, sooner = (MEMORY.seconds(memory), SOONER) if fitted(p) else (memory, 0.0)
        stream = stream * (STREAM if given.in_groups else 1.0)
        body = (busy**OVERLAP + stream**OVERLAP) ** (1 / OVERLAP)
        once = device.delays.launch - sooner + around
        once = once + FIND * (given.in_groups | ((given.ragged == "k") & (parts > 1)))
        once = once + work / parts * area * self.epilogue(p, s, together) + _traced(p, s)
        reduction = np.where(
            parts > 1, device.delays.reduction + parts * area * 4.0 / device.store_bandwidth, 0.0
        )
        slower = np.where((parts > 1) & (given.ragged == "k"), CUT_RANGES, 1.0)
        total = (body + once + reduction) * slower
        return Costs(
            total, compute + turns * small_compute, l2 + turns * small_l2, memory, once, reduction, np.zeros(1),
            work / parts + turns / cuts,
        )  # fmt: skip

    def resident(self, problem: Problem, columns: Space | Config, stage: Any) -> Any:
        """Programs that a multiprocessor holds at once.

        Args:
            columns: the configs, or one.
            stage: bytes of a step along K.
        """
        s = columns
        area = s.block_m * s.block_n
        staging = area * problem.out.dtype.itemsize / (1 + s.split_store)
        # The tile is stored through the memory that its blocks were loaded into.
        loaded = stage * s.num_stages
        if problem.b.unpacks:
            # A block of a packed weight is in registers before the last stage is loaded.
            loaded = loaded - s.block_n * s.block_k * problem.b.bits / 8
        shared = np.maximum(loaded, staging) + 1024
        threads = s.num_warps * problem.device.target.warp_size
        registers = (area / threads + OTHER_REGISTERS) * threads
        fit = np.minimum(problem.device.target.shared / shared, REGISTERS / registers)
        fit = np.minimum(fit, THREADS // threads)
        return np.maximum(np.floor(fit), 1)

    def has_room(self, problem: Problem, space: Space) -> np.ndarray:
        """See `Schedule.has_room`. A tile of wide elements that is stored at once has memory beside its stages.

        That is what Triton 3.7 compiles for Hopper. A transposed tile is stored through its stages' memory, as others.
        """
        p, s = problem, space
        stages = stage_bytes(p, s) * s.num_stages
        is_beside = (
            p.out.dtype.itemsize > 2 and p.a.dtype.itemsize <= 2 and p.fusion is None and p.addend is None
        )
        stored = s.block_m * s.block_n * p.out.dtype.itemsize * ~s.split_store * ~s.swap * is_beside
        return np.asarray((stages + stored < p.device.target.shared) | (s.loader != "descriptor"))

    def around(self, work: Floats, together: Floats, start: float, store: Floats) -> Floats:
        """Seconds before the first step and after the last one of the tiles of a multiprocessor."""
        return np.asarray(np.ceil(work / together) * (start + store))

    def epilogue(self, problem: Problem, space: Space, together: Floats) -> Floats:
        """Seconds that an epilogue adds for an element. Programs beside this one multiply meanwhile.

        Args:
            together: programs that a multiprocessor holds at once.
        """
        return np.asarray(added(problem, space) * (together == 1))

    def at_once(self, problem: Problem, config: Config) -> int:
        c = config
        return problem.device.sms * int(self.resident(problem, c, float(stage_bytes(problem, c))))

    def walk(self, problem: Problem, config: Config) -> Walk:
        """First the first part along K of every tile."""
        tiles = Waves.of(problem, config).tiles
        split = Split.of(problem, config)
        parts = 1 if split is None else split.parts
        program = np.arange(tiles * parts)
        tiles_n, band = -(-problem.N // config.block_n), self.band(problem, config)
        columns = whole_tiles(problem, config, program % max(tiles, 1), tiles_n, band)
        if split is not None:
            columns["first_k"] = program // tiles * split.length
            columns["last_k"] = np.minimum(columns["first_k"] + split.length, problem.K)
        at_once = self.at_once(problem, config)
        return Walk(len(program), at_once, program=program, turn=np.zeros_like(program), **columns)

    def cuts(self, problem: Problem, config: Config) -> list[str]:
        split = Split.of(problem, config)
        if split is None:
            return []
        return [f"K is cut into {split.parts} parts for separate programs; drawn uncut"]


def _traced(problem: Problem, space: Space) -> Floats:
    """Seconds that a traced epilogue adds to a launch."""
    p, s = problem, space
    if p.fusion is None or not fitted(p):
        return np.zeros(1)
    calls = calls_of(p) * s.block_m * s.block_n / (s.num_warps * p.device.target.warp_size)
    return np.asarray(TRACED + UNROLLED * np.maximum(calls - MOST_CALLS, 0))


TILE = Tile()
