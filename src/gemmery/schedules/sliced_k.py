"""Programs whose warps share some strips of 16 rows of a packed weight; see `kernels.sliced_k`."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..devices import ARCHS
from ..epilogues.device import digest
from ..formats.packing import STRIP
from ..kernels import any_width_packed as packed
from ..kernels import place
from ..kernels.any_width_stage import LINE_BYTES
from ..kernels.numerics import cast
from ..kernels.sliced_k_loop import COLUMNS, COPY, DEPTH, MOST_CHUNKS, ROW, Shape
from ..operands import Dense
from ..operands.packed import Packed, PackedAccess
from .any_width_tile import KINDS
from .base import Forms
from .binding import (
    Binding,
    epilogue_arguments,
    epilogue_of,
    needs_only_its_block,
    overlap_of,
    sorted_tensors,
    suits_tma,
)  # fmt: skip
from .cost import Costs, Floats, Given, Stream
from .tile import Tile
from .walk import Ints, divisor
from .waves import Busiest, Counts, Split

if TYPE_CHECKING:
    from ..problem import Config, Problem
    from ..select.space import Space

#: By the number of warps: bytes of shared memory for activations.
X_BYTES = {4: 48 << 10, 8: 112 << 10, 16: 96 << 10}
#: Strips of a bundle, at most; see `kernels.sliced_k_loop`.
BUNDLE = 4
#: Bits of a code times warps times strips of a bundle, at most.
WORDS = 128
#: Units of a warp in a chunk of activations.
UNITS = 3
#: Bytes of shared memory of a program, which leave some for what Triton needs.
SHARED = ARCHS["sm_90"].shared - 1024
#: The largest K and N: bytes of a strip and of a row of group parameters are counted in 32 bits.
MOST_K, MOST_N = 1 << 26, 1 << 26

#: Seconds of a multiprocessor for a strip of a unit. Seconds that a warp takes for a unit at least, and as many for
#: each of its strips. Bytes of activations that a multiprocessor gets in a second.
STRIP_TIME, WAIT, X_BANDWIDTH = 17.0e-9, 0.108e-6, 54e9
#: Seconds around a launch, those of each wave of programs after the first, and the additional seconds of a launch with
#: 16 warps.
START, WAVE, MANY_WARPS = 5.05e-6, 3.3e-6, 0.2e-6
#: Seconds that parts of a tile take to meet, and for each strip of each part.
REDUCTION, REDUCTION_STRIP = 0.712e-6, 0.025e-6
#: The stream of words from memory.
MEMORY = Stream(long=0.665, short=1.383, ramp=4.36e-6)

#: Registers of a thread. Without this limit, ptxas takes 64 and spills some, although there are more.
REGISTERS = 128


class SlicedK(Tile):
    """A program for each tile of some strips, or for each part of one that is cut along K."""

    name = "sliced_k"
    about = "a program for some strips of a packed weight, which all of its warps load and multiply"
    title = "packed weights with K shared by warps"
    knobs = frozenset({"split_k", "swap", "rest_n"})
    universal = False
    awaits = False
    archs = ("sm_90",)
    # Those whose Gluon has the names that the kernel is written in.
    versions = ("3.6", "3.7", "3.8", "3.9")
    reason = "chosen for packed weights and few rows, where it is predicted to be the fastest"
    splits = (2, 3, 4, 6, 8)
    fits = ("packed int4",)

    def needs(self, problem: Problem) -> Iterator[tuple[bool, str]]:
        p = problem
        yield from super().needs(p)
        yield not p.ragged and not p.batch, "a product without groups and without a batch"
        yield isinstance(p.b, Packed) and not p.paired, "a packed weight without halves"
        yield (
            p.b.staged is not None,
            f"a format with a decoder for it, groups of a power of two from {STRIP} on and scales in the type of a",
        )
        yield (
            isinstance(p.a, Dense) and p.a.dtype in (torch.float16, torch.bfloat16),
            "a matrix a of fp16 or bf16",
        )
        yield p.a.col == 1 and suits_tma(p), "operands in aligned rows with adjacent elements"
        yield p.K % 8 == 0 and p.K <= MOST_K, f"K a multiple of 8 up to {MOST_K}"
        yield p.N <= MOST_N, f"N up to {MOST_N}"
        yield needs_only_its_block(p), "an epilogue that reduces no rows"

    def takes(self, config: Config, forms: Forms) -> bool:
        if not isinstance(forms.packed, packed.StageFormat):
            return False
        shape = _shape(config, forms.packed)
        bundles = config.block_n // STRIP // shape.bundle
        sums = (config.num_warps + bundles) * shape.bundle * shape.sum_bytes
        return bundles <= config.num_warps and shape.bytes <= SHARED and sums <= shape.x_bytes

    def code(self, config: Config, forms: Forms) -> object:
        c, format = config, forms.packed
        assert format is not None
        bundle = int(_bundle(c.block_n, c.num_warps, format.bits))
        return bundle, _spans(c, bundle), c.num_warps, c.num_stages

    def check_sizes(self, config: Config) -> None:
        c = config
        if c.loader != "pointer" or c.num_warps not in X_BYTES or c.block_k != DEPTH or not c.swap:
            raise ValueError(
                f"Config: the {self.name} schedule needs swap, the pointer loader, block_k {DEPTH} and 4, 8 or 16 "
                f"warps"
            )
        if c.block_m != COLUMNS or c.block_n % STRIP or c.block_n < STRIP:
            raise ValueError(
                f"Config: the {self.name} schedule needs block_m {COLUMNS}, and a block_n that is a multiple of {STRIP}"
            )
        if c.num_stages < 3:
            raise ValueError(
                f"Config: num_stages is {c.num_stages}; the {self.name} schedule needs at least 3"
            )

    def refusal(self, problem: Problem, config: Config) -> str | None:
        p, c = problem, config
        if (unsuited := self.unsuited(p)) is not None:
            return unsuited
        if p.batch_invariant:
            return "the order of a sum depends on how many strips a program has"
        if not self.takes(c, Forms.of(p)):
            return (
                f"{c.num_warps} warps take no block_n of {c.block_n} with {c.num_stages} stages: there is a bundle of "
                f"strips for each warp at most, and shared memory for {SHARED} bytes"
            )
        return Counts.of(p, c).refusal

    def bind(self, problem: Problem, config: Config) -> Binding:
        return SlicedKBinding(problem, config)

    def considers(self, problem: Problem, rows: Floats, config: Config | Space) -> np.ndarray:
        return (np.asarray(rows) <= COLUMNS) & (not problem.batch_invariant)

    def costs(self, problem: Problem, space: Space, given: Given) -> Costs:
        """See `Schedule.costs`.

        A multiprocessor multiplies the units of its programs; it takes at least as long as a warp for its own. The
        activations of a program's part of K come from L2 before. The words come from memory. By measured times, this
        adds to the rest and does not overlap with it. Fitted to times of int4 on an H200
        (`benchmarks/results/looks/sliced_k-bf16.json`, and seed 101 of `choices-bf16.json`); the seconds around a
        launch to those of `sliced_k_starts-bf16.json`.
        """
        p, s = problem, space
        assert isinstance(p.b.staged, packed.StageFormat)
        bundle, strips = _bundle(s.block_n, s.num_warps, int(p.b.bits)), s.block_n / STRIP
        resident = np.array([_resident(_shape(config, p.b.staged)) for config in s.configs])
        programs, waves, parts, length, _ = Busiest.of(p, s, given.rows, resident)
        compute = programs * strips * length * STRIP_TIME
        waits = waves * np.ceil(strips / bundle * length / s.num_warps) * WAIT * (1 + bundle)
        rows = np.minimum(given.rows, s.block_m)
        l2 = programs * rows * length * (DEPTH * p.a.dtype.itemsize) / X_BANDWIDTH
        stream = MEMORY.seconds(given.memory)
        body = np.maximum(compute, waits) + l2 + stream
        reduction = np.where(parts > 1, REDUCTION + REDUCTION_STRIP * parts * strips, 0.0)
        once = START + (waves - 1) * WAVE + MANY_WARPS * (s.num_warps > 8)
        return Costs(
            body + once + reduction, compute, l2, given.memory, once, reduction, np.zeros(1),
            waves * np.ones_like(body),
        )  # fmt: skip

    def band(self, problem: Problem, config: Config) -> int:
        """Tiles are not in bands."""
        return 1

    def at_once(self, problem: Problem, config: Config) -> int:
        format = problem.b.staged
        assert isinstance(format, packed.StageFormat)
        return problem.device.sms * _resident(_shape(config, format))


def _shape(config: Config, format: packed.StageFormat, kind: str = "bf16") -> Shape:
    """The parameters of a config's assembly."""
    c = config
    bundle = int(_bundle(c.block_n, c.num_warps, format.bits))
    return Shape(format, kind, bundle, c.num_warps, c.num_stages, X_BYTES[c.num_warps], _spans(c, bundle))


def _resident(shape: Shape) -> int:
    """Programs that a multiprocessor holds at once."""
    return max(1, SHARED // (shape.bytes + 1024))


def _bundle(block_n: Ints | int, num_warps: Ints | int, bits: int) -> Ints:
    """Strips of a bundle: as many as divide those of a tile and fit into shared memory. All are powers of two."""
    most = np.minimum(BUNDLE, WORDS // (bits * np.maximum(num_warps, 8)))
    found: Ints = np.gcd(block_n // STRIP, most)
    return found


def _spans(config: Config, bundle: int) -> bool:
    """Whether a warp may have units of two bundles."""
    return config.num_warps % (config.block_n // STRIP // bundle) != 0


class SlicedKBinding(Binding):
    """A `Binding` of the kernel for strips."""

    def __init__(self, problem: Problem, config: Config) -> None:
        from ..kernels import any_width_stage, decoders, dialect, sliced_k, sliced_k_loop

        p, c = problem, config
        self.problem, self.config = p, c
        self.a, self.b = p.a.access(p, is_b=False, tma=False), p.b.access(p, is_b=True, tma=False)
        self.split, self.counts, self.format = Split.of(p, c), Counts.of(p, c), p.b.staged
        assert isinstance(self.format, packed.StageFormat)
        self.kernel = sliced_k.gemm_sliced_k
        self.grid = (self.counts.tiles * self.counts.parts, 1, 1)
        shape = _shape(c, self.format, KINDS[p.a.dtype])
        self.bundles = c.block_n // STRIP // shape.bundle
        self.constants = {
            "PLACE": dialect.in_gluon(place.counted_part),
            "EPILOGUE": dialect.in_gluon(epilogue_of(p)),
            "CAST": dialect.in_gluon(cast),
            "KIND": KINDS[p.a.dtype],
            "FORMAT": str(self.format),
            "BUNDLE": shape.bundle,
            "SPANS": shape.spans,
            "SLOTS": c.num_stages,
            "X_BYTES": shape.x_bytes,
            "BYTES": -(-shape.bytes // 1024) * 1024,
            "WARPS": c.num_warps,
            **overlap_of(p),
            "SOURCE": digest(sliced_k, sliced_k_loop, packed, any_width_stage, decoders),
            "num_warps": c.num_warps,
            "maxnreg": REGISTERS,
        }

    def check(self, compiled: Any) -> None:
        """Raises RuntimeError unless shared memory begins with the part that the kernel's assembly uses."""
        check_memory(compiled.asm["llir"], self.constants["BYTES"], compiled.metadata.shared)

    def arguments(self, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> list[Any]:
        """The kernel's run-time arguments, as for `Binding.arguments`."""
        p, c = self.problem, self.config
        given = sorted_tensors(p, tensors)
        a, b, out, _ = given
        assert isinstance(self.b, PackedAccess)
        workspace = None if self.split is None else self.workspace(out.device)
        words, *params = [*b, None, None][:3]
        assert self.format is not None
        return [
            a[0], words, *params, out, p.M, p.N, p.K, *self.counts.arguments, divisor(self.bundles), p.a.row,
            p.out.row, p.out.col, c.block_n // STRIP, *self.chunks, self.b.groups, self.b.lines * LINE_BYTES,
            epilogue_arguments(p, 0, given, numbers), workspace,
        ]  # fmt: skip

    @functools.cached_property
    def chunks(self) -> tuple[int, int]:
        """Units along K of a chunk of activations, and the number of chunks for which there is room.

        All warps have the same number of units of a chunk, if that number allows it. With fewer units warps wait for
        each other more often; with more, they wait longer for the first chunk.
        """
        c, length = self.config, self.problem.K if self.split is None else self.split.length
        units, rows = -(-length // DEPTH), min(COLUMNS, self.problem.M)
        even = c.num_warps // math.gcd(c.num_warps, self.bundles)

        def fits(chunk: int, count: int) -> bool:
            # Of the last chunk, rows are read that do not exist.
            return ((count - 1) * rows + COLUMNS) * (chunk * ROW + COPY) <= X_BYTES[c.num_warps]

        if units <= UNITS * even and fits(units, 1):
            return units, 1
        wanted = [each * even for each in range(UNITS, 0, -1)]
        least = next(chunk for chunk in range(even, 0, -1) if fits(chunk, 2))
        chunk = next((chunk for chunk in wanted if fits(chunk, 3)), least)
        return chunk, max(count for count in range(2, MOST_CHUNKS + 1) if fits(chunk, count))

    @property
    def workspace_size(self) -> tuple[int, int]:
        """Bytes of memory for the parts of tiles, and counters of their arrivals; none if no tile is cut."""
        if self.split is None:
            return 0, 0
        each = self.config.block_m * -(-self.config.block_n // 64) * 64
        return self.counts.parts * self.counts.tiles * each * torch.float32.itemsize, self.counts.tiles


def check_memory(llir: str, size: int, shared: int) -> None:
    """Raises RuntimeError unless only assembly uses the first `size` bytes of shared memory.

    The kernel itself writes only to the last KiB of them.

    Args:
        llir: the kernel in LLVM's language.
        shared: bytes of shared memory that the kernel has.
    """
    own = [line for line in llir.splitlines() if " asm " not in line and not line.startswith("@global_smem")]
    offsets = [int(found) for line in own for found in re.findall(r"@global_smem, i32 (\d+)", line)]
    first = [line for line in own if "@global_smem" in line and not re.search(r"@global_smem, i32 \d+", line)]
    if shared < size or first or not offsets or min(offsets) != size - 1024:
        raise RuntimeError(f"the first {size} bytes of shared memory are not the assembly's alone")


SLICED_K = SlicedK()
