"""From a Problem and a Config to a Triton kernel with its arguments.

A `Binding` holds all that is fixed once both are known: the kernel, its compile-time parts and the grid. The same
binding serves a launch, a compilation for the present GPU, and a cross-compilation with tensors on the meta device.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton.language as tl

from ..dtypes import FP8
from ..epilogues.device import digest, function, with_constants
from ..epilogues.table import TYPES
from ..kernels import epilogues, gemm, overlap, place
from ..kernels import operands as access
from ..kernels import parts as along_k
from ..operands import DenseAccess, Layout
from ..operands.base import negated
from ..operands.pair import Pair
from ..operands.scalars import parts, traced_arguments
from .waves import Split, Waves
from .workspace import WORKSPACES, Workspace

if TYPE_CHECKING:
    from ..problem import Config, Problem

#: Compiled kernels that `Binding.check` was given.
_CHECKED: weakref.WeakSet[Any] = weakref.WeakSet()
TL: dict[torch.dtype, Any] = {dtype: getattr(tl, name.removeprefix("tl.")) for dtype, name in TYPES.items()}
#: fp8 products are promoted to the fp32 accumulator after this many steps along K, as cuBLAS does in its accurate mode.
PROMOTE_EVERY = 128
#: 32-bit words per thread that kernels may spill after the loop, where ranks add up their partial sums.
SUM_SPILLS = 40
#: The requirement of `Spec.suits_registers`, in words.
SHORT_ROWS = (
    "thin matrices of an adapter in aligned rows with adjacent elements, whose number is a multiple of 4"
)
#: TMA takes blocks of at most this many elements along each dimension.
BOX = 256


def suits_tma(problem: Problem) -> bool:
    """Whether descriptors can read both operands of a problem here: their layouts, and coordinates of 32 bits."""
    p = problem
    return (
        p.device.target.tma
        and p.K > 0
        and max(p.M, p.N, p.K) < 1 << 31
        and p.a.suits_tma(p, is_b=False)
        and p.b.suits_tma(p, is_b=True)
    )


def storable(operand: Layout, rows: int, cols: int, batch: tuple[int, ...]) -> bool:
    """Whether a matrix can also be written through a tensor descriptor.

    TMA writes whole units of 16 bytes. If a row of the matrix ended within one, it would overwrite the data after the
    row.
    """
    adjacent = cols if operand.col == 1 else rows
    whole = operand.dtype != torch.bool and adjacent * operand.dtype.itemsize % 16 == 0
    return whole and operand.takes_tma(batch)


def promotes(problem: Problem) -> bool:
    """Whether partial sums are promoted to fp32 on the way: fp8 on Hopper, whose tensor cores sum with fewer bits."""
    accurate = not problem.b.is_scaled and not problem.fast_accum
    return problem.a.dtype in FP8 and accurate and problem.device.target.family == "hopper"


def overlap_of(problem: Problem) -> dict[str, Any]:
    """`Arch.overlap` for a problem's kernel.

    If the next launch began while a kernel waits for other GPUs, its programs would take room that another stream may
    need. The kernel might then wait in vain.
    """
    waits = problem.a.awaits or problem.a.is_summed
    return {"OVERLAPS": False} if waits else problem.device.target.overlap


def epilogue_of(problem: Problem) -> Any:
    """The device function of a problem's epilogue."""
    own = problem.fusion
    made = getattr(epilogues, problem.epilogue) if own is None else function(own.source)
    return of_sum(problem, made)


def of_sum(problem: Problem, made: Any, reads_ahead: bool = False) -> Any:
    """A device function of an epilogue, given the sum as a problem's kernel has it; see `Spec.of_partial_sum`."""
    return problem.b.of_sum(problem.a.of_partial_sum(problem, made, reads_ahead), problem.device)


def needs_only_its_block(problem: Problem) -> bool:
    """Whether an epilogue reads only its block, and needs no offsets beyond 32 bits."""
    p, f = problem, problem.fusion
    plain = f is None or (f.stores and not (f.reduces or f.whole or p.a.prologue))
    return plain and all((x.row + x.col) * BOX < 1 << 31 for x in p.extras)


def phases(problem: Problem) -> tuple[Any, Any]:
    """The device functions of a problem's epilogue: one that loads a matrix ahead, or None, and the rest."""
    if problem.fusion is None or problem.fusion.ahead is None:
        return None, epilogue_of(problem)
    before, rest = problem.fusion.ahead
    return problem.a.before_sum(function(before)), of_sum(problem, function(rest), reads_ahead=True)


def epilogue_arguments(
    problem: Problem, slot: int, tensors: Tensors, numbers: Sequence[float]
) -> tuple[Any, ...]:
    """The arguments of `epilogue_of`: pointers, strides and numbers, in the order in which it takes them.

    Args:
        slot: columns of the output for which a fused epilogue leaves one part of a row's reduction.
        tensors: the launch's.
        numbers: the epilogue's, then others; alpha and beta for one that is not traced.
    """
    own = _epilogue_arguments(problem, slot, tensors.epilogue, numbers)
    return (*problem.a.sum_arguments(problem, tensors.a, numbers), *own)


def _epilogue_arguments(
    problem: Problem, slot: int, tensors: Sequence[Any], numbers: Sequence[float]
) -> tuple[Any, ...]:
    """Those of the epilogue only, from its tensors."""
    if problem.fusion is not None:
        slots = (slot,) if problem.fusion.reduces else ()
        return (*traced_arguments(problem.fusion, tensors, numbers[: problem.fusion.numbers]), *slots)
    if problem.epilogue == "identity":
        return ()
    alpha, beta = numbers
    if problem.epilogue == "scale":
        return (parts(alpha),)
    (addend,), layout = tensors, problem.addend
    assert layout is not None
    if problem.epilogue == "add_row":
        return (addend, layout.col)
    return (parts(alpha), parts(beta), addend, (negated(layout), layout.row, layout.col))


class Tensors(NamedTuple):
    """A launch's tensors, by their owners."""

    a: Sequence[Any]
    b: Sequence[Any]
    out: Any
    epilogue: Sequence[Any]


def sorted_tensors(problem: Problem, tensors: Sequence[Any]) -> Tensors:
    """The tensors of a launch, which are in the order of `Problem.layouts`."""
    of_a, of_b = len(problem.a.layouts), len(problem.b.layouts)
    end = of_a + of_b
    return Tensors(tensors[:of_a], tensors[of_a:end], tensors[end], tensors[end + 1 :])


def spans(problem: Problem, config: Config) -> bool:
    """Whether every tile of a config is as wide as a problem's product."""
    main_n, rest_n = problem.b.columns(config)
    return main_n >= problem.N and not rest_n and config.tail == 1


def epilogue_subtiles(problem: Problem, config: Config) -> int:
    """The number of subtiles for the epilogue and the store of a block."""
    if not config.split_store or problem.b.by_steps or (problem.fusion is not None and problem.fusion.whole):
        return 1
    if isinstance(problem.b, Pair) and problem.b.alternates:
        return 1
    if problem.paired:
        # Half of a tile's columns are stored then, and parts of K are added by columns.
        return 2 if problem.wants_room and config.split_k == 1 and config.main_n >= 128 else 1
    return 4 if problem.wants_room and config.main_n >= 128 else 2


def refusal_of(problem: Problem, config: Config) -> str | None:
    """The reason why a config cannot run a problem with a kernel of `kernels.gemm`; None if it can."""
    p, c = problem, config
    tma = c.loader == "descriptor"
    if tma and p.K == 0:
        return "loader 'descriptor' needs K > 0"
    if tma and not suits_tma(p):
        return (
            f"loader 'descriptor' needs TMA, and a and b with one unit stride, other strides and addresses that are "
            f"multiples of 16 bytes, at most one batch dimension, and sizes below 2^31; given {p}"
        )
    if tma and max(c.block_m, p.b.columns(c)[0], c.block_k, c.tail_k) > BOX:
        return f"loader 'descriptor' takes blocks of at most {BOX} along each side"
    if p.fusion is not None and p.fusion.whole and not spans(p, c):
        return f"an epilogue that uses reduced rows again needs whole tiles of at least {p.N} columns"
    split = Split.of(p, c)
    units = Waves.of(p, c).units
    units = units if split is None else split.units(p, units)
    if units >= 1 << 31:
        return f"{p} takes {units} programs; at most 2^31 - 1 fit into a launch"
    return p.a.refusal(p, c) or p.b.refusal(p, c)


def loads_along_m(problem: Problem, config: Config) -> bool:
    """Whether loads through pointers are of adjacent elements of A along M, as in the gradient of a weight."""
    a = problem.a
    return config.loader == "pointer" and a.row == 1 and a.col != 1 and a.has_aligned_rows


class Binding:
    """A kernel with everything fixed but the tensors.

    Attributes:
        kernel: the `@triton.jit` function.
        constants: its constexpr parameters and the compiler's options.
        grid: programs along x, y, z.
        persistent: whether the kernel's programs take tiles in turn.
        cluster: programs of a cluster, which `grid` counts as one.
        harmless_spills: 32-bit words per thread that its kernels may spill, since they do so outside their loops.
    """

    kernel: Any = gemm.gemm_tiles
    persistent = False
    cluster = 1
    harmless_spills = 0

    def __init__(self, problem: Problem, config: Config) -> None:
        p, c = problem, config
        self.problem, self.config = problem, config
        self.main_n, self.rest_n = p.b.columns(c)
        tma = c.loader == "descriptor"
        self.a = p.a.access(p, is_b=False, tma=tma)
        self.b = p.b.access(p, is_b=True, tma=tma)
        # One of them may say which parts along K both load.
        self.a, self.b = self.b.leading(self.a), self.a.leading(self.b)
        # A tensor that stands in for an output has strides of 0, which no descriptor takes.
        # Tiles of groups of rows end where the next group begins.
        stored = tma and not p.ragged and storable(p.out, p.M, p.out_n, p.batch)
        self.out = DenseAccess(p.out, p.M, p.out_n, p.batch, stored)
        self.subtiles = epilogue_subtiles(p, c)
        # A small tile has half the columns.
        self.tail_subtiles = 2 if self.subtiles == 4 and c.block_n // c.tail_n >= 64 else 1
        self.waves = Waves.of(p, c)
        self.split = Split.of(p, c)
        tiles = self.waves.tiles
        units = tiles if self.split is None else self.split.units(p, tiles)
        self.grid = (self._programs(max(units, self.waves.parts)), 1, 1)
        self.constants = self._constants()

    @property
    def allowed_spills(self) -> int:
        """`harmless_spills`, or those of a sum over ranks."""
        return max(self.harmless_spills, SUM_SPILLS if self.problem.a.is_summed else 0)

    @property
    def takes_numbers(self) -> bool:
        """Whether numbers come with every launch."""
        return self.problem.takes_numbers

    def _programs(self, units: int) -> int:
        """The number of programs for a number of tiles, whole or small, or parts of tiles."""
        return units

    def _wide(self) -> bool:
        """Whether an offset within a block can pass 2^31 elements."""
        p, c = self.problem, self.config
        step = max(c.block_k, c.tail_k)
        reach = [
            p.a.row * c.block_m + p.a.col * step,
            p.b.row * step + p.b.col * c.block_n,
            p.out.row * c.block_m + p.out.col * c.block_n,
        ]
        reach += [extra.row * c.block_m + extra.col * c.block_n for extra in p.extras]
        if p.a.prologue is not None:
            reach += [x.row * c.block_m + x.col * step for x in p.a.prologue.operands]
        return max(reach) >= 1 << 31

    def _constants(self) -> dict[str, Any]:
        p, c = self.problem, self.config
        prefetch, epilogue = phases(p)
        load_step, multiply = p.b.k_step(p)
        constants: dict[str, Any] = {
            "LOAD_A": self.a.loader(),
            "LOAD_B": self.b.loader(),
            "LOAD_STEP": load_step,
            "MULTIPLY": multiply,
            "PREFETCH": prefetch,
            "EPILOGUE": epilogue,
            "STORE": self._store(),
            "BLOCK_M": c.block_m,
            "BLOCK_N": self.main_n,
            "BLOCK_K": c.block_k,
            "BAND_M": c.group_m,
            "EPILOGUE_SUBTILES": self.subtiles,
            "PAIRED": p.paired,
            "CHECK_K": p.K == 0 or p.K % c.block_k != 0 or p.has_ranges,
            "WIDE": self._wide(),
            "ACC": TL[p.summed],
            "OUT": TL[p.out.dtype],
            "M_MULTIPLE": 16 if loads_along_m(p, c) and p.M % 16 == 0 else 1,
            "PRECISION": p.precision,
            "IMPRECISE_ACC": min(PROMOTE_EVERY, c.block_k) if promotes(p) else -1,
            **overlap_of(p),
            "num_warps": c.num_warps,
            # Triton divides the stages between a load and the loads for which it waits, here that of the table of
            # blocks.
            "num_stages": c.num_stages * (2 if p.by_blocks else 1),
        }
        if self.persistent:
            own = place.whole_tile if c.tail == 1 else place.inner_tile
            constants["PLACE"] = self.b.place(self.a.place(own, False), False)
            constants["TAIL_PLACE"] = self._tail_place()
            constants["FLATTEN"] = c.loader == "descriptor"
            constants["TAIL_M"] = c.tail_m
            constants["TAIL_N"] = c.tail_n
            constants["TAIL_K"] = c.tail_k
            constants["TAIL_SUBTILES"] = self.tail_subtiles
            constants["CHECK_TAIL_K"] = p.K == 0 or p.K % c.tail_k != 0
        else:
            own = place.single_tile if self.split is None else place.split_tile
            is_cut = self.split is not None
            constants["PLACE"] = self.b.place(self.a.place(own, is_cut), is_cut)
            constants["PART"] = None if not is_cut else along_k.of_range if p.ragged else along_k.of_tile
            constants["RAGGED"] = p.ragged if p.ragged == "rows" or is_cut else ""
            constants["REST_N"] = self.rest_n
            constants["SWAP"] = c.swap
            constants["SOURCE"] = digest(overlap)
        return constants

    def _store(self) -> Any:
        p = self.problem
        if p.fusion is not None and not p.fusion.stores:
            return access.store_nothing
        return access.store_scattered if self.a.scatters else self.out.store()

    def _tail_place(self) -> Any:
        """The device function that places small tiles, or None if there are none."""
        c = self.config
        if c.tail == 1:
            return None
        return with_constants(place.tail_tile, PARTS_M=c.tail_m, PARTS_N=c.tail_n)

    def arguments(self, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> list[Any]:
        """The kernel's run-time arguments for tensors laid out as the problem says.

        Args:
            tensors: in the order of `Problem.layouts`.
            numbers: the epilogue's, then those of a's prologue; alpha and beta for an epilogue that is not traced.
        """
        p, c, waves = self.problem, self.config, self.waves
        given = sorted_tensors(p, tensors)
        a, b, out = given.a, given.b, given.out
        matrices = [
            self.a.argument(a, c.block_m, c.block_k),
            self.b.argument(b, c.block_k, self.main_n),
            self.out.argument((out,), c.block_m, self._stored(self.main_n)),
        ]
        own = numbers[len(numbers) - p.a.numbers :]
        strides = [
            (*self.a.strides, *self.a.behind_strides(a, own), *self.b.given(b)),
            (*self.b.strides, *self.b.behind_strides(b, ()), *self.a.given(a)),
            (*self.out.strides, *self.a.scattered(a)),
        ]
        sizes = [p.M, p.N, p.K, p.batch, *strides]
        step_args = (*self.a.step_scales(a), *self.b.step_scales(b))
        epilogue_args = epilogue_arguments(p, self.slot, given, numbers)
        place_args = self.a.place_args(a, own) or self.b.place_args(b, ())
        if self.persistent:
            tail = self._tail_arguments(a, b, out)
            units = [waves.tiles, waves.parts, waves.cut, waves.strips]
            return [*matrices, *tail, *sizes, *units, place_args, step_args, epilogue_args]
        rest = [None, None]
        if self.rest_n:
            columns = self.rest_n // 2 if p.paired else self.rest_n
            rest = [
                self.b.argument(b, c.block_k, self.rest_n), self.out.argument((out,), c.block_m, columns),
            ]  # fmt: skip
        group_params = self.b.group_params(b, c.block_k, c.block_n)
        part_k, workspace = 0, None
        if self.split is not None:
            part_k, workspace = self.split.length, self.workspace(out.device)
        tiles = waves.tiles
        if self.split is not None and self.split.of_matrices:
            tiles //= p.matrices
        units = [tiles, part_k]
        return [
            *matrices,
            *rest,
            *group_params,
            *sizes,
            *units,
            place_args,
            step_args,
            epilogue_args,
            workspace,
        ]

    @property
    def workspace_size(self) -> tuple[int, int]:
        """Bytes of memory for the parts of tiles, and counters of their arrivals; none if tiles are not cut."""
        if self.split is None:
            return 0, 0
        units = self.split.units(self.problem, self.waves.tiles)
        elements = units * self.config.block_m * self.config.block_n
        return elements * self.problem.summed.itemsize, self.waves.tiles

    def workspace(self, device: torch.device) -> Workspace:
        """The tensors for parts of tiles, free for the next launch on the current stream."""
        partials, arrivals = WORKSPACES.get(device, *self.workspace_size)
        return partials.view(self.problem.summed), arrivals

    def _tail_arguments(self, a: Sequence[Any], b: Sequence[Any], out: Any) -> list[Any]:
        """a, b and out as the small tiles of the tail see them."""
        c = self.config
        if c.tail == 1:
            return [None, None, None]
        rows, columns = c.block_m // c.tail_m, c.block_n // c.tail_n
        return [
            self.a.argument(a, rows, c.tail_k),
            self.b.argument(b, c.tail_k, columns),
            self.out.argument((out,), rows, columns // (2 if self.problem.paired else self.tail_subtiles)),
        ]

    @property
    def slot(self) -> int:
        """Columns of the narrowest block that an epilogue sees."""
        c = self.config
        wide = [
            self.main_n // self.subtiles,
            self.rest_n or self.main_n,
            c.block_n // (c.tail_n * self.tail_subtiles),
        ]
        return min(wide) // (2 if self.problem.paired else 1)

    def _stored(self, columns: int) -> int:
        """Columns of the output that are stored at a time, for a block of the product with the given columns."""
        return columns // (self.subtiles * (2 if self.problem.paired else 1))

    def launch(self, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> None:
        """Launch on the current device and stream; arguments as for `arguments`."""
        self.kernel[self.grid](*self.arguments(tensors, numbers), **self.constants)

    def direct_arguments(self, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> list[Any]:
        """The arguments of the direct launch, as those of `arguments`.

        A descriptor may have a `box` here: its tensor map loads that instead of its type's block.
        """
        return self.arguments(tensors, numbers)

    def compile(self, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> Any:
        """Compile without launching, for the active driver's target; tensors may be on the meta device.

        Raises:
            RuntimeError: see `check`.
        """
        compiled = self.kernel.warmup(*self.arguments(tensors, numbers), grid=self.grid, **self.constants)
        # A few kernels serve every number of rows.
        if compiled not in _CHECKED:
            self.check(compiled)
            _CHECKED.add(compiled)
        return compiled

    def check(self, compiled: Any) -> None:
        """Raises RuntimeError unless a compiled kernel has the properties that its source assumes."""
        check_maps(compiled.asm.get("ptx", ""))


def check_maps(ptx: str) -> None:
    """RuntimeError unless the parameters that a kernel takes for tensor maps are some.

    Args:
        ptx: the kernel in PTX.
    """
    for used in set(re.findall(r"gemm_\w+_param_\d+", ptx)):
        if re.search(rf"mov\.b64 \w+, {used};", ptx) and not re.search(
            rf"\.align \d+ \.b8 {used}\[128\]", ptx
        ):
            raise RuntimeError(f"the kernel's parameter {used} is not a tensor map")
