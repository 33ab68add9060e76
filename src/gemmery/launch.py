"""From a Problem and a Config to a Triton kernel with its arguments.

A `Binding` is what is fixed once both are known: the kernel, its compile-time parts and the grid. The same binding
serves a launch, a compilation for the GPU at hand, and a cross-compilation with tensors on the meta device.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import scale_access
from .epilogues.device import function, loader_with, with_constants
from .epilogues.table import TYPES
from .kernels import epilogues, gemm, place, steps
from .kernels import operands as access
from .kernels import pointwise as kernels_pointwise
from .layout import fold_blocks
from .packed_access import PackedAccess, asm_of, of_sum, refusal
from .problem import FP8, Config, Fusion, Operand, Problem, accumulator
from .results import Results
from .waves import Split, Waves
from .workspace import WORKSPACES, Workspace

_TL: dict[torch.dtype, Any] = {dtype: getattr(tl, name.removeprefix("tl.")) for dtype, name in TYPES.items()}
#: fp8 products are promoted to the fp32 accumulator after this many steps along K, as cuBLAS does in its accurate mode.
PROMOTE_EVERY = 128
#: TMA takes blocks of at most this many elements along each dimension.
_BOX = 256


def describable(operand: Operand, batch: tuple[int, ...]) -> bool:
    """Whether a matrix can be read through a tensor descriptor: TMA's rules on strides and addresses."""
    item = operand.dtype.itemsize
    outer = operand.row if operand.col == 1 else operand.col
    return (
        operand.aligned
        and 1 in (operand.row, operand.col)
        and outer > 0
        and len(batch) <= 1
        and all(stride * item % 16 == 0 and stride * item < 1 << 40 for stride in (outer, *operand.steps))
    )


def described(problem: Problem) -> bool:
    """Whether descriptors can read both factors of a problem here: their layouts, and coordinates of 32 bits."""
    p = problem
    return (
        p.device.target.tma
        and p.K > 0
        and max(p.M, p.N, p.K) < 1 << 31
        and describable(p.a, p.batch)
        and (_packed_describable(p) if p.packing else describable(p.b, p.batch))
        and (not p.paired or p.packing is not None or _pairs_describable(p))
    )


def _packed_describable(problem: Problem) -> bool:
    """A descriptor over halves of packed columns has no dimension for a batch."""
    aligned = problem.b.aligned and all(x.aligned for x in problem.shared)
    return aligned and not (problem.paired and problem.batch)


def between(problem: Problem) -> int | None:
    """Elements from the left half of B's columns to the right one, where tiles pair them; else None."""
    if problem.fusion is None or not problem.fusion.paired:
        return None
    return problem.out_n * problem.b.col if problem.fusion.between is None else problem.fusion.between


def _pairs_describable(problem: Problem) -> bool:
    distance = (between(problem) or 0) * problem.b.dtype.itemsize
    return not problem.batch and distance > 0 and distance % 16 == 0 and distance < 1 << 40


def storable(operand: Operand, rows: int, cols: int, batch: tuple[int, ...]) -> bool:
    """Whether a matrix can also be written through a tensor descriptor.

    TMA writes whole 16-byte units: where a row of the matrix ends within one, it would write into what lies behind.
    """
    adjacent = cols if operand.col == 1 else rows
    whole = operand.dtype != torch.bool and adjacent * operand.dtype.itemsize % 16 == 0
    return whole and describable(operand, batch)


def promotes(problem: Problem) -> bool:
    """Whether partial sums are promoted to fp32 on the way: fp8 on Hopper, whose tensor cores sum with fewer bits."""
    accurate = problem.scales is None and not problem.fast_accum
    return problem.a.dtype in FP8 and accurate and problem.device.target.family == "hopper"


def _steps(operand: Operand, described: bool) -> tuple[int, ...]:
    # Negated, see `kernels.operands`.
    return tuple(-int(step != 0) if described else -step for step in operand.steps)


class _Access:
    """How one matrix reaches the kernel: as a pointer with strides, or as a descriptor.

    Attributes:
        between: elements from the left half of its columns to the right one where tiles pair them, or None.
        prologue: what becomes of its blocks as they are loaded, or None.
    """

    def __init__(
        self, operand: Operand, rows: int, cols: int, batch: tuple[int, ...], described: bool,
        between: int | None = None, prologue: Fusion | None = None,
    ) -> None:  # fmt: skip
        self.operand, self.rows, self.cols, self.batch, self.described = operand, rows, cols, batch, described
        self.transposed = described and operand.col != 1
        self.between, self.prologue = between, prologue
        self.strides: tuple[Any, ...] = (_steps(operand, described), operand.row, operand.col)
        if between is not None:
            self.strides = (*self.strides, between)

    def loader(self) -> Any:
        plain = self._plain_loader()
        if self.prologue is None:
            return plain
        taken = 4 * len(self.prologue.operands) + self.prologue.numbers
        return loader_with(self.prologue.source, taken, plain)

    def _plain_loader(self) -> Any:
        if self.between is not None:
            if not self.described:
                return access.load_strided_pairs
            return access.load_tma_pairs_transposed if self.transposed else access.load_tma_pairs
        if not self.described:
            return access.load_strided
        return access.load_tma_transposed if self.transposed else access.load_tma

    def store(self) -> Any:
        if not self.described:
            return access.store_strided
        return access.store_tma_transposed if self.transposed else access.store_tma

    def argument(self, tensor: Tensor, block_rows: int, block_cols: int) -> Any:
        if not self.described:
            return tensor
        if self.between is not None:
            return self._paired(tensor, block_rows, block_cols)
        shape, strides, block = [self.rows, self.cols], [self.operand.row, 1], [block_rows, block_cols]
        if self.transposed:
            shape, strides, block = [self.cols, self.rows], [self.operand.col, 1], [block_cols, block_rows]
        if self.batch:
            step = self.operand.steps[0]
            shape = [self.batch[0] if step else 1, *shape]
            strides = [step or strides[0], *strides]
            block = [1, *block]
        return TensorDescriptor(tensor, shape, strides, block)

    def _paired(self, tensor: Tensor, block_rows: int, block_cols: int) -> TensorDescriptor:
        """Over the halves of the columns as a dimension of their own."""
        cols, half = self.cols // 2, block_cols // 2
        if self.transposed:
            strides = [self.between, self.operand.col, 1]
            return TensorDescriptor(tensor, [2, cols, self.rows], strides, [2, half, block_rows])
        strides = [self.operand.row, self.between, 1]
        return TensorDescriptor(tensor, [self.rows, 2, cols], strides, [block_rows, 2, half])


def _parts(value: float) -> tuple[float, float, float]:
    """A scalar operand as the kernels take it: three single-precision floats that add up to a double.

    What single precision can't hold is infinite, as in torch. An integer's parts are integers, and it is not rounded.
    """
    if isinstance(value, int) and 1 << 53 < abs(value) <= 1 << 63:
        return float(value >> 40 << 40), float((value >> 16 & 0xFFFFFF) << 16), float(value & 0xFFFF)
    if not abs(value) <= torch.finfo(torch.float32).max:
        return value * math.inf, 0.0, 0.0
    high = _single(value)
    middle = _single(value - high)
    return high, middle, value - high - middle


def _single(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def epilogue_of(problem: Problem) -> Any:
    """The device function of a problem's epilogue."""
    own = problem.fusion
    return _of_sum(problem, getattr(epilogues, problem.epilogue) if own is None else function(own.source))


def _of_sum(problem: Problem, epilogue: Any) -> Any:
    """An epilogue, given the sum as the kernel has it."""
    if problem.packing is None:
        return epilogue
    return of_sum(epilogue, problem.packing, problem.b.dtype, asm_of(problem))


def phases(problem: Problem) -> tuple[Any, Any]:
    """The device functions of a problem's epilogue: what loads a matrix that it reads ahead, or None, and the rest."""
    if problem.fusion is None or problem.fusion.ahead is None:
        return None, epilogue_of(problem)
    before, rest = problem.fusion.ahead
    return function(before), _of_sum(problem, function(rest))


def _traced_arguments(fusion: Fusion, tensors: Sequence[Any], numbers: Sequence[float]) -> tuple[Any, ...]:
    """What a traced function is given, of tensors and numbers that begin with its own."""
    count = len(fusion.operands)
    strides = [part for x in fusion.operands for part in (_steps(x, False), x.row, x.col)]
    return (*tensors[:count], *strides, *map(_parts, numbers[: fusion.numbers]))


def prologue_arguments(problem: Problem, *given: Any) -> tuple[Any, ...]:
    """What a problem's prologue is given, which is behind what its epilogue is."""
    if problem.fusion is None or problem.fusion.prologue is None:
        return ()
    tensors, numbers = given
    own, before = problem.fusion, problem.fusion.prologue
    return _traced_arguments(before, tensors[len(own.operands) :], numbers[own.numbers :])


def epilogue_arguments(problem: Problem, slot: int, *given: Any) -> tuple[Any, ...]:
    """What a problem's epilogue is given: pointers, strides and numbers, in the order in which it takes them.

    Args:
        slot: columns of the output for which a fused epilogue leaves one part of a row's reduction.
        given: see `Binding.arguments`.
    """
    if problem.fusion is not None:
        tensors, numbers = given
        slots = (slot,) if problem.fusion.reduces else ()
        own = _traced_arguments(problem.fusion, tensors, numbers)
        return (*own, *slots)
    addend, alpha, beta = (list(given) + [None, 1, 1][len(given) :])[:3]
    if problem.epilogue == "identity":
        return ()
    if problem.epilogue == "scale":
        return (_parts(alpha),)
    assert problem.addend is not None
    if problem.epilogue == "add_row":
        return (addend, problem.addend.col)
    layout = (_steps(problem.addend, False), problem.addend.row, problem.addend.col)
    return (_parts(alpha), _parts(beta), addend, layout)


def spans(problem: Problem, config: Config) -> bool:
    """Whether every tile of a config is as wide as a problem's product."""
    main_n, rest_n = columns_of(problem, config)
    return main_n >= problem.N and not rest_n and config.tail == 1


def columns_of(problem: Problem, config: Config) -> tuple[int, int]:
    """Columns of a tile that are one block of the kernel, and those of the second block beside it, or 0.

    Where steps are scaled, a tile that is stored in halves is also summed in halves, one after the other: a step's
    product then takes half the registers, and a second program fits beside the first, which multiplies while the
    first one scales.
    """
    if scale_access.by_steps(problem) and config.split_store:
        return config.block_n // 2, config.block_n // 2
    return config.main_n, config.rest_n


def _subtiles(problem: Problem, config: Config) -> int:
    """In how many subtiles the epilogue and the store of a block come."""
    if (
        not config.split_store
        or scale_access.by_steps(problem)
        or (problem.fusion is not None and problem.fusion.whole)
    ):
        return 1
    if problem.paired:
        # Half of a tile's columns are stored then, and parts of K are added by columns.
        return 2 if problem.wants_pieces and config.split_k == 1 and config.main_n >= 128 else 1
    return 4 if problem.wants_pieces and config.main_n >= 128 else 2


class Binding:
    """A kernel with everything fixed but the tensors.

    Attributes:
        kernel: the `@triton.jit` function.
        constants: its constexpr parameters and the compiler's options.
        grid: programs along x, y, z.
    """

    def __init__(self, problem: Problem, config: Config) -> None:
        p, c = problem, config
        self.problem, self.config = problem, config
        self.main_n, self.rest_n = columns_of(p, c)
        by_descriptor = c.loader == "descriptor"
        if by_descriptor and p.K == 0:
            raise ValueError(f"config {c}: loader 'descriptor' needs K > 0")
        if by_descriptor and not described(p):
            raise ValueError(
                f"config {c}: loader 'descriptor' needs TMA, and a and b with one unit stride, other strides and "
                f"addresses that are multiples of 16 bytes, at most one batch dimension, and sizes below 2^31; "
                f"given {p}"
            )
        if by_descriptor and max(c.block_m, self.main_n, c.block_k, c.tail_k) > _BOX:
            raise ValueError(
                f"config {c}: loader 'descriptor' takes blocks of at most {_BOX} along each side"
            )
        if p.scales is not None and (c.schedule != "tile" or not p.scales.takes(c.block_k) or c.rest_n):
            steps = f"{'a block_k that is a multiple of' if p.scales.exact else 'block_k'} {p.scales.step}"
            raise ValueError(
                f"config {c}: such factors along K need the tile schedule, {steps} and a block_n that is a power of two"
            )
        if p.fusion is not None and p.fusion.whole and not spans(p, c):
            raise ValueError(
                f"config {c}: an epilogue that uses reduced rows again needs whole tiles of at least {p.N} columns"
            )
        if p.packing is not None and (reason := refusal(p, c)):
            raise ValueError(f"config {c}: {reason}")
        self.a = _Access(p.a, p.M, p.K, p.batch, by_descriptor, prologue=p.fusion and p.fusion.prologue)
        self.b: _Access | PackedAccess = (
            PackedAccess(p, by_descriptor)
            if p.packing is not None
            else _Access(p.b, p.K, p.N, p.batch, by_descriptor, between(p))
        )
        # A tensor that stands in for an output has strides of 0, which no descriptor takes.
        stored = by_descriptor and storable(p.out, p.M, p.out_n, p.batch)
        self.out = _Access(p.out, p.M, p.out_n, p.batch, stored)
        self.subtiles = _subtiles(p, c)
        # A small tile has half the columns.
        self.tail_subtiles = 2 if self.subtiles == 4 and c.block_n // c.tail_n >= 64 else 1
        self.waves = Waves.of(p, c)
        self.split = Split.of(p, c)
        parts = self.split.parts if self.split else 1
        if self.waves.units * parts >= 1 << 31:
            raise ValueError(
                f"{p} takes {self.waves.units * parts} programs of config {c}; at most 2^31 - 1 fit into a launch"
            )
        self.persistent = c.schedule == "persistent"
        self.kernel = gemm.gemm_persistent if self.persistent else gemm.gemm_tiles
        programs = max(self.waves.tiles * parts, self.waves.parts)
        self.grid = (min(programs, p.device.sms) if self.persistent else programs, 1, 1)
        self.constants = self._constants()

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
        if p.fusion is not None and p.fusion.prologue is not None:
            reach += [x.row * c.block_m + x.col * step for x in p.fusion.prologue.operands]
        return max(reach) >= 1 << 31

    def _loaders(self) -> tuple[Any, Any]:
        """The device functions that load blocks of A and B."""
        p, of_a, of_b = self.problem, self.a.loader(), self.b.loader()
        if p.scales is None or not p.scales.exact:
            return of_a, of_b
        step = p.scales.step
        return (
            scale_access.loader(of_a, len(self.a.strides), step, of_columns=False),
            scale_access.loader(of_b, len(self.b.strides), step, of_columns=True, paired=p.paired),
        )

    def _constants(self) -> dict[str, Any]:
        p, c = self.problem, self.config
        prefetch, epilogue = phases(p)
        load_a, load_b = self._loaders()
        by_steps = p.scales is not None and scale_access.by_steps(p)
        load_step, multiply = scale_access.step(p) if by_steps else (None, steps.add_product)
        constants: dict[str, Any] = {
            "LOAD_A": load_a,
            "LOAD_B": load_b,
            "LOAD_STEP": load_step,
            "MULTIPLY": multiply,
            "PREFETCH": prefetch,
            "EPILOGUE": epilogue,
            "STORE": access.store_nothing
            if p.fusion is not None and not p.fusion.stores
            else self.out.store(),
            "BLOCK_M": c.block_m,
            "BLOCK_N": self.main_n,
            "BLOCK_K": c.block_k,
            "BAND_M": c.group_m,
            "EPILOGUE_SUBTILES": self.subtiles,
            "PAIRED": p.paired,
            "CHECK_K": p.K == 0 or p.K % c.block_k != 0,
            "WIDE": self._wide(),
            "ACC": tl.float32 if by_steps else _TL[accumulator(p.a.dtype)],
            "OUT": _TL[p.out.dtype],
            "PRECISION": p.precision,
            "IMPRECISE_ACC": min(PROMOTE_EVERY, c.block_k) if promotes(p) else -1,
            "num_warps": c.num_warps,
            "num_stages": c.num_stages,
        }
        if self.persistent:
            constants["PLACE"] = place.whole_tile if c.tail == 1 else place.inner_tile
            constants["TAIL_PLACE"] = self._tail_place()
            constants["FLATTEN"] = c.loader == "descriptor"
            constants["TAIL_M"] = c.tail_m
            constants["TAIL_N"] = c.tail_n
            constants["TAIL_K"] = c.tail_k
            constants["TAIL_SUBTILES"] = self.tail_subtiles
            constants["CHECK_TAIL_K"] = p.K == 0 or p.K % c.tail_k != 0
        else:
            constants["PLACE"] = place.single_tile if self.split is None else place.split_tile
            constants["REST_N"] = self.rest_n
            constants["SWAP"] = c.swap
        return constants

    def _tail_place(self) -> Any:
        """The device function that places small tiles, or None where there are none."""
        c = self.config
        if c.tail == 1:
            return None
        return with_constants(place.tail_tile, PARTS_M=c.tail_m, PARTS_N=c.tail_n)

    def arguments(self, a: Tensor, b: Tensor, out: Tensor, *given: Any) -> list[Any]:
        """The kernel's run-time arguments for tensors laid out as the problem says.

        Args:
            given: for the epilogue: addend (None), alpha (1) and beta (1), or for a fused one tensors and numbers; what
                belongs to a packed b are the last tensors.
        """
        p, c, waves = self.problem, self.config, self.waves
        matrices = [
            self.a.argument(a, c.block_m, c.block_k),
            self.b.argument(b, c.block_k, self.main_n),
            self.out.argument(out, c.block_m, self._stored(self.main_n)),
        ]
        before_a, before_b, group_params, step_args = self._loading(*given)
        strides = [(*self.a.strides, *before_a), (*self.b.strides, *before_b), self.out.strides]
        sizes = [p.M, p.N, p.K, p.batch, *strides]
        epilogue_args = epilogue_arguments(p, self.slot, *given)
        if self.persistent:
            tail = self._tail_arguments(a, b, out)
            units = [waves.tiles, waves.parts, waves.cut, waves.strips]
            return [*matrices, *tail, *sizes, *units, (), step_args, epilogue_args]
        rest = [None, None]
        if self.rest_n:
            columns = self.rest_n // 2 if p.paired else self.rest_n
            rest = [self.b.argument(b, c.block_k, self.rest_n), self.out.argument(out, c.block_m, columns)]
        part_k, workspace = 0, None
        if self.split is not None:
            part_k, workspace = self.split.length, self.workspace(a.device)
        units = [waves.tiles, part_k]
        return [*matrices, *rest, *group_params, *sizes, *units, (), step_args, epilogue_args, workspace]

    def _loading(self, *given: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], list[Any], tuple[Any, ...]]:
        """What loaders of A and of B take behind the strides, `b_scales` and `b_shifts`, and what LOAD_STEP takes."""
        p, c = self.problem, self.config
        before = prologue_arguments(p, *given)
        if not p.shared:
            return before, (), [None, None], ()
        belonging = given[0][len(given[0]) - len(p.shared) :]
        if isinstance(self.b, PackedAccess):
            return before, (), self.b.shared(belonging, c.block_k, c.block_n), ()
        assert not before, "no call has a prologue beside factors along K"
        if scale_access.by_steps(p):
            return (), (), [None, None], scale_access.of_steps(p, belonging)
        return *scale_access.arguments(p, belonging), [None, None], ()

    @property
    def room(self) -> tuple[int, int]:
        """Bytes in which parts of tiles meet, and counters of their arrivals; none where tiles are not cut."""
        if self.split is None:
            return 0, 0
        elements = self.split.parts * self.waves.tiles * self.config.block_m * self.config.block_n
        return elements * self._summed.itemsize, self.waves.tiles

    @property
    def _summed(self) -> torch.dtype:
        """The type of the sum."""
        return torch.float32 if self.problem.scales is not None else accumulator(self.problem.a.dtype)

    def workspace(self, device: torch.device) -> Workspace:
        """The tensors in which parts of tiles meet, free for the next launch on the current stream."""
        partials, arrivals = WORKSPACES.get(device, *self.room)
        return partials.view(self._summed), arrivals

    def _tail_arguments(self, a: Tensor, b: Tensor, out: Tensor) -> list[Any]:
        """a, b and out as the small tiles of the tail see them."""
        c = self.config
        if c.tail == 1:
            return [None, None, None]
        rows, columns = c.block_m // c.tail_m, c.block_n // c.tail_n
        return [
            self.a.argument(a, rows, c.tail_k),
            self.b.argument(b, c.tail_k, columns),
            self.out.argument(out, rows, columns // (2 if self.problem.paired else self.tail_subtiles)),
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
        """Columns of the output that are stored at a time, of a block of so many columns of the product."""
        return columns // (self.subtiles * (2 if self.problem.paired else 1))

    def launch(self, *tensors: Any) -> None:
        """Launch on the current device and stream; arguments as for `arguments`."""
        self.kernel[self.grid](*self.arguments(*tensors), **self.constants)

    def compile(self, *tensors: Any) -> Any:
        """Compile without launching, for the active driver's target; tensors may be on the meta device."""
        return self.kernel.warmup(*self.arguments(*tensors), grid=self.grid, **self.constants)


def bind(problem: Problem, config: Config) -> Binding:
    """The binding of a problem and a config, of the kernel that the config is for.

    Raises:
        ValueError: the config does not suit the problem, or does not run here.
    """
    if config.schedule == "cluster":
        from .clusters import ClusterBinding

        return ClusterBinding(problem, config)
    if config.schedule == "specialized":
        from .specialized import SpecializedBinding

        return SpecializedBinding(problem, config)
    return Binding(problem, config)


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes a tensor's GPU the current one, also for a thread that has not used it yet."""
    if not tensor.is_cuda:
        return contextlib.nullcontext()
    if tensor.device.index == torch.cuda.current_device():
        # Binds the GPU's context to the thread; Triton encodes tensor maps without asking whether there is one.
        torch.cuda.set_device(tensor.device)
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


#: Rows and columns of the blocks that `pointwise` walks over.
_BLOCK = (32, 128)


def pointwise(results: Results, first: Tensor, inputs: Sequence[Any]) -> list[Tensor]:
    """A program over blocks of a matrix in memory, without a product: its results.

    Args:
        results: of the program for `first`.
        inputs: the program's, after `first`.
    """
    made = results.program
    rows, columns = _BLOCK
    tensors = results.allocate(first.device, -(-first.shape[-1] // columns))
    out, extras = results.main(tensors), results.extras(inputs, tensors)
    width = first.shape[-1]
    batch, M, (its, to, *operands) = fold_blocks(first, [(out, width), *results.widths(extras)])
    strides = [part for x in operands for part in (_steps(x, False), x.row, x.col)]
    slots = (columns,) if results.reduces else ()
    args = (*extras, *strides, *map(_parts, results.numbers(inputs)), *slots)
    wide = max(x.row * rows + x.col * columns for x in (its, to, *operands)) >= 1 << 31
    matrices = math.prod(batch)
    grid = (matrices * -(-M // rows) * -(-width // columns),)
    if grid[0]:
        with on_device(first):
            kernels_pointwise.pointwise[grid](
                first, out, args, M, width, batch, *[(_steps(x, False), x.row, x.col) for x in (its, to)],
                EPILOGUE=function(made.source), ACC=_TL[results.wide], OUT=_TL[out.dtype],
                STORE=access.store_nothing if made.main is None else access.store_strided,
                BLOCK_M=rows, BLOCK_N=columns, WIDE=wide, num_warps=4,
            )  # fmt: skip
    return results.finish(tensors)
