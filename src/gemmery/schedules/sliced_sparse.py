"""Programs whose warps share N and K of a 2:4 sparse weight, by `mma.sp`; see `kernels.sliced_sparse`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..formats.sparse import padded
from ..kernels import place
from ..kernels.any_width_sparse import SparseStage
from ..kernels.numerics import cast
from ..operands import Dense
from ..operands.sparse import Sparse, SparseAccess
from .any_width_tile import KINDS
from .base import Forms
from .binding import (
    Binding,
    epilogue_arguments,
    epilogue_of,
    needs_only_its_block,
    overlap_of,
    sorted_tensors,
)  # fmt: skip
from .cost import Costs, Floats, Given, Stream
from .tile import Tile
from .waves import Busiest, Counts, Split

if TYPE_CHECKING:
    from ..problem import Config, Problem
    from ..select.space import Space

#: Rows of a weight that a warp has, and numbers along K of its step.
BLOCK, DEPTH = 32, 128
#: Rows of activations of a tile, and warps of a program.
ROWS, WARPS = (8, 16, 32, 64), (1, 2, 4, 8, 16)
#: An upper limit of the stored numbers of a weight, since places in it are counted in 32 bits; and of rows and
#: columns.
MOST, MOST_SIZE = 1 << 33, 1 << 30
#: Steps that a warp loads at a time, at most; see `kernels.sliced_sparse`.
AHEAD = 4
#: Registers of a thread, at most; of a multiprocessor.
MOST_REGISTERS, REGISTERS = 255, 65536

#: Seconds around a launch, the additional ones with more than two steps at a time, and those of each wave of programs
#: after the first.
START, DEEP, WAVE = 3.90e-6, 0.535e-6, 1.43e-6
#: Seconds of a multiprocessor for a warp's step with 8 rows, and those until the steps that were loaded at a time are
#: done.
STEP_TIME, WAIT = 0.0335e-6, 0.80e-6
#: Seconds that parts of a tile take to meet.
REDUCTION = 1.15e-6
#: The stream of the weight from memory; the share of the bandwidth from L2 of all multiprocessors that is reached.
MEMORY, L2 = Stream(long=1.3, short=0.45, ramp=5.0e-6), 0.538


class SlicedSparse(Tile):
    """A program for each tile, or for each part of one that is cut along K; a warp has 32 rows of the weight."""

    name = "sliced_sparse"
    about = (
        "a program for each tile of a 2:4 sparse weight, whose warps share out N and K and multiply by mma.sp"
    )
    title = "2:4 sparse weights with mma.sp"
    knobs = frozenset({"split_k", "swap"})
    universal = False
    awaits = False
    archs = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
    # Those whose Gluon has the names that the kernel is written in.
    versions = ("3.6", "3.7", "3.8", "3.9")
    reason = "chosen for 2:4 sparse weights and few rows on Hopper, where it is predicted to be fastest"
    instruction = "mma.sp::ordered_metadata"
    splits = (2, 4, 8)
    # Other GPUs have not timed it (docs/sparse.md).
    chosen_on = ("sm_90",)

    def needs(self, problem: Problem) -> Iterator[tuple[bool, str]]:
        p = problem
        yield from super().needs(p)
        yield not p.ragged and not p.batch, "a product without groups and without a batch"
        yield isinstance(p.b, Sparse) and not p.b.code, "a 2:4 sparse weight of 16 bits"
        yield p.b.has_aligned_rows, "a weight at addresses that are multiples of 16"
        yield (
            type(p.a) is Dense and p.a.dtype in (torch.float16, torch.bfloat16),
            "a matrix a of fp16 or bf16",
        )
        yield p.a.col == 1, "rows of a with adjacent elements"
        yield (
            p.K > 0 and math.prod(padded(p.N, p.K)) < MOST,
            f"a weight of 1 to {MOST - 1} numbers, as it is stored",
        )
        yield max(p.M, p.N, p.K) < MOST_SIZE, f"sizes below {MOST_SIZE}"
        yield needs_only_its_block(p), "an epilogue that reduces no rows"

    def considers(self, problem: Problem, rows: Floats, config: Config | Space) -> np.ndarray:
        return (np.asarray(rows) <= max(ROWS)) & (not problem.batch_invariant)

    def takes(self, config: Config, forms: Forms) -> bool:
        is_sparse = forms.packed == SparseStage(paired=forms.paired)
        return is_sparse and (not forms.paired or config.block_n > BLOCK)

    def check_sizes(self, config: Config) -> None:
        c = config
        if c.loader != "pointer" or not c.swap or c.num_stages > AHEAD:
            raise ValueError(
                f"Config: the {self.name} schedule needs swap, the pointer loader and at most {AHEAD} stages"
            )
        if c.block_m not in ROWS:
            raise ValueError(f"Config: block_m is {c.block_m}; the {self.name} schedule takes one of {ROWS}")
        shared = c.block_n // BLOCK * (c.block_k // DEPTH)
        if c.num_warps not in WARPS or c.block_n % BLOCK or c.block_k % DEPTH or shared != c.num_warps:
            raise ValueError(
                f"Config: {c.num_warps} warps with a tile of {c.block_n} columns and steps of {c.block_k}; in the "
                f"{self.name} schedule each warp has {BLOCK} columns and {DEPTH} of a step, and their number is one of "
                f"{WARPS}"
            )

    def refusal(self, problem: Problem, config: Config) -> str | None:
        p, c = problem, config
        if (unsuited := self.unsuited(p)) is not None:
            return unsuited
        if p.batch_invariant:
            return "the order of a sum depends on how many warps share K"
        if not self.takes(c, Forms.of(p)):
            return (
                f"block_n is {c.block_n}; of a weight in two halves, a program needs {2 * BLOCK} columns or more, "
                f"since a warp has {BLOCK} of one half"
            )
        if p.paired and p.N % (2 * BLOCK):
            return f"the weight's halves have {p.N // 2} rows each; they need a multiple of {BLOCK}"
        return Counts.of(p, c).refusal

    def bind(self, problem: Problem, config: Config) -> Binding:
        return SlicedSparseBinding(problem, config)

    def resident(self, problem: Problem, columns: Space | Config, stage: Any) -> Any:
        """See `Tile.resident`. Blocks of the weight are in registers."""
        s = columns
        sums = s.block_k // DEPTH * s.block_m * s.block_n * 4
        shared = np.maximum(s.num_stages * s.block_m * s.block_k * 2, sums) + 1024
        # As ptxas allocates them; 2 * block_m are the words of a step's activations.
        each = np.minimum(76 + s.block_m + s.num_stages * (24 + 2 * s.block_m), MOST_REGISTERS)
        fit = np.minimum(problem.device.target.shared / shared, REGISTERS / (32 * s.num_warps * each))
        return np.maximum(np.floor(fit), 1)

    def costs(self, problem: Problem, space: Space, given: Given) -> Costs:
        """See `Schedule.costs`.

        The steps of the busiest multiprocessor take at least as long as a program waits for its loads. The weight comes
        from memory; this adds to the rest. With more rows than a tile has, it comes from L2 several times. Fitted to
        times of products of up to 64 rows on an H200 (`benchmarks/results/looks/sliced_sparse-bf16.json`).
        """
        p, s, device = problem, space, problem.device
        programs, waves, parts, length, units = Busiest.of(p, s, given.rows, self.resident(p, s, None))
        compute = programs * length * s.num_warps * STEP_TIME * (s.block_m / ROWS[0])
        waits = waves * np.ceil(length / s.num_stages) * WAIT
        step = s.block_k * (s.block_m * p.a.bits + s.block_n * p.b.bits) / 8
        l2 = units * length * step / (L2 * device.sms * device.sm_bandwidth)
        once = START + DEEP * (s.num_stages > 2) + (waves - 1) * WAVE
        reduction = np.where(parts > 1, REDUCTION, 0.0)
        body = np.maximum(compute, waits) + np.maximum(MEMORY.seconds(given.memory), l2)
        return Costs(
            body + once + reduction, compute, l2, given.memory, once, reduction, np.zeros(1),
            waves * np.ones_like(body),
        )  # fmt: skip

    def band(self, problem: Problem, config: Config) -> int:
        """Tiles are not in bands."""
        return 1


class SlicedSparseBinding(Binding):
    """A `Binding` of the kernel for `mma.sp`."""

    # Some kernels spill numbers that are needed after the loop.
    harmless_spills = 8

    def __init__(self, problem: Problem, config: Config) -> None:
        from ..kernels import dialect, sliced_sparse

        p, c = problem, config
        self.problem, self.config = p, c
        self.a, self.b = p.a.access(p, is_b=False, tma=False), p.b.access(p, is_b=True, tma=False)
        self.split, self.counts = Split.of(p, c), Counts.of(p, c)
        self.kernel = sliced_sparse.gemm_sliced_sparse
        self.grid = (self.counts.tiles * self.counts.parts, 1, 1)
        self.constants = {
            "PLACE": dialect.in_gluon(place.counted_part),
            "EPILOGUE": dialect.in_gluon(epilogue_of(p)),
            "CAST": dialect.in_gluon(cast),
            "KIND": KINDS[p.a.dtype],
            "ROWS": c.block_m,
            "K_WARPS": c.block_k // DEPTH,
            "N_WARPS": c.block_n // BLOCK,
            "PAIRED": p.paired,
            "AHEAD": c.num_stages,
            **overlap_of(p),
            "num_warps": c.num_warps,
        }

    def arguments(self, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> list[Any]:
        """The kernel's run-time arguments, as for `Binding.arguments`."""
        p = self.problem
        given = sorted_tensors(p, tensors)
        a, b, out, _ = given
        assert isinstance(self.b, SparseAccess)
        workspace = None if self.split is None else self.workspace(out.device)
        return [
            a[0], *b, out, p.M, p.N, p.K, *self.counts.arguments, p.a.row, p.out.row, p.out.col,
            self.b.rows // BLOCK, self.b.columns // BLOCK, epilogue_arguments(p, 0, given, numbers), workspace,
        ]  # fmt: skip

    @property
    def workspace_size(self) -> tuple[int, int]:
        """Bytes of memory for the parts of tiles, and counters of their arrivals; none if no tile is cut."""
        if self.split is None:
            return 0, 0
        c = self.config
        tiles, parts, *_ = self.counts
        return parts * tiles * c.block_m * c.block_n * torch.float32.itemsize, tiles


SLICED_SPARSE = SlicedSparse()
