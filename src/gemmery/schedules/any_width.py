"""Programs in which one warp loads and warpgroups multiply tiles of any width; see `kernels.any_width`.

Two schedules: in one the warpgroups share a tile, in the other one they take tiles in turn.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
import triton

from ..kernels import place
from ..kernels.numerics import cast
from ..operands import Dense
from .base import Schedule
from .binding import Binding, epilogue_arguments, epilogue_of, sorted_tensors, storable, suits_tma
from .cost import OVERLAP, Costs, Given
from .walk import Walk, in_turn, whole_tiles

if TYPE_CHECKING:
    from ..problem import Config, Problem
    from ..select.space import Space

#: Rows of X that a `wgmma` multiplies, and its step along K; columns of Y that are stored at a time.
ROWS, STEP, WIDTH = 64, 64, 64
#: Bytes of shared memory for barriers.
BARRIERS = 1024
#: By the number of warpgroups: registers of a thread in all but the first one, and of the loader's.
REGISTERS = {1: (0, 40), 2: (232, 40), 3: (160, 32)}
#: By the same: numbers of the accumulator that a thread has registers for.
ACCUMULATORS = {1: 128, 2: 176, 3: 100}
#: Of the model of its time, fitted to 377 times of random products on an H200: part of the tensor cores' rate, and what
#: a narrow instruction takes more, in columns.
EFFICIENCY, EDGE = 0.917, 7.9
#: Share of the bandwidth from L2 of one multiprocessor and of all together; how sharply it or the tensor cores decide;
#: seconds from asking for bytes until they are there.
INTAKE, L2, MIX, LATENCY = 1.25, 1.22, 4.6, 1.2e-6
#: What a tenfold time costs for the clock, which power lowers, and from how many seconds on.
SLOWING, LONG = 0.027, 3e-5
#: Share of the bandwidth of stores; seconds around a launch and around a tile.
STORE, START, TILE = 1.1, 5.98e-6, 0.17e-6
#: The model is off by 5 %, and of so many configs the best is one that it thinks too well of. On 26 random products of
#: a seed that nothing was fitted to, it preferred these tiles 25 times without this factor, 6 of them wrongly, and 18
#: times with it, 3 of them wrongly; the worst took 1.21 and 1.12 times as long.
DOUBT = 1.035


class Sides(NamedTuple):
    """The sizes and the layouts of X and Y, the tensor cores' operands; see `kernels.any_width`.

    Attributes:
        x_rows, y_rows: of a tile.
        x_turned, y_turned: whether adjacent elements of an operand lie along its rows, and not along K.
    """

    x_rows: int
    y_rows: int
    x_turned: bool
    y_turned: bool

    @classmethod
    def of(cls, problem: Problem, config: Config) -> Sides:
        a_turned, b_turned = problem.a.col != 1, problem.b.row != 1
        if config.swap:
            return cls(config.block_n, config.block_m, b_turned, a_turned)
        return cls(config.block_m, config.block_n, a_turned, b_turned)


class AnyWidth(Schedule):
    """One program on each multiprocessor, which takes tiles in turn.

    Attributes:
        takes_turns: whether warpgroups take tiles in turn, and do not share them.
    """

    universal = False
    title = "tiles of any width"
    archs = ("sm_90",)
    # Those whose Gluon has the names that the kernel is written in.
    versions = ("3.6", "3.7", "3.8", "3.9")
    reason = "run where `gemmery tune` has found them quicker, or by config="
    overlaps_stores = True
    is_predicted = True
    takes_turns: ClassVar[bool] = False

    def suits(self, problem: Problem) -> bool:
        p = problem
        return (
            self.runs_on(p.device.target)
            and not (p.batch or p.paired or p.batch_invariant)
            and type(p.a) is type(p.b) is Dense
            and all(operand.dtype.itemsize == 2 for operand in (p.a, p.b, p.out))
            and suits_tma(p)
            and p.out.col == 1
            and storable(p.out, p.M, p.N, ())
            and _epilogue_suits(p)
        )

    def takes(self, config: Config, a_turned: bool, b_turned: bool, reads: bool) -> bool:
        c = config
        y_rows, y_turned = (c.block_m, a_turned) if c.swap else (c.block_n, b_turned)
        # Of a box of 64 a part would be loaded for nothing; such products took up to twice as long.
        return not (y_turned and y_rows % ROWS) and not (reads and y_rows % 16)

    def check_sizes(self, config: Config) -> None:
        c, warps = config, ((8,) if self.takes_turns else (4, 8, 12))
        if c.loader != "descriptor" or c.block_k != STEP or c.num_warps not in warps:
            raise ValueError(
                f"Config: the {self.name} schedule needs the descriptor loader, block_k {STEP} and "
                f"{' or '.join(map(str, warps))} warps"
            )
        x, y = (c.block_n, c.block_m) if c.swap else (c.block_m, c.block_n)
        groups = c.num_warps // 4
        own = x if self.takes_turns else x // groups
        if x % (own or 1) or own not in (ROWS, 2 * ROWS):
            raise ValueError(
                f"Config: the {self.name} schedule needs {ROWS} or {2 * ROWS} rows for each warpgroup of 4 warps"
            )
        if y % 8 or not 16 <= y <= 256 or own * y // 128 > ACCUMULATORS[groups]:
            raise ValueError(
                f"Config: the {self.name} schedule needs a width that is a multiple of 8 from 16 to "
                f"{min(256, ACCUMULATORS[groups] * 128 // own)}"
            )

    def refusal(self, problem: Problem, config: Config) -> str | None:
        p, c = problem, config
        if not self.suits(p):
            return (
                f"schedule {self.name!r} needs Triton {', '.join(self.versions)}, a GPU of sm_90, fp16 or bf16, K > 0, "
                f"no batch, no batch invariance, operands that suit the descriptor loader, and an output with adjacent "
                f"columns and rows of whole 16-byte units; given {p} on {p.device.arch} with Triton "
                f"{triton.__version__}"
            )
        if not self.takes(c, p.a.col != 1, p.b.row != 1, bool(p.extras)):
            return (
                f"an operand whose adjacent elements lie along N or M needs a width that is a multiple of {ROWS}, and "
                f"an epilogue that reads tensors one that is a multiple of 16"
            )
        return None

    def bind(self, problem: Problem, config: Config) -> Binding:
        return AnyWidthBinding(problem, config, self.takes_turns)

    def at_once(self, problem: Problem, config: Config) -> int:
        return problem.device.sms

    def costs(self, problem: Problem, space: Space, given: Given) -> Costs:
        """See `Schedule.costs`."""
        p, s, device = problem, space, problem.device
        rows, memory, rate = given
        x, y = np.where(s.swap, s.block_n, s.block_m), np.where(s.swap, s.block_m, s.block_n)
        steps = -(-max(p.K, 1) // STEP)
        tiles = -(-rows // s.block_m) * -(-p.N // s.block_n)
        turns = -(-tiles // device.sms)
        compute = turns * steps * 2.0 * x * y * STEP / (rate * EFFICIENCY) * (1 + EDGE / y)
        share = np.minimum(INTAKE, L2 * device.sms / np.minimum(tiles, device.sms)) * device.sm_bandwidth
        l2 = turns * steps * (x + y) * STEP * 2.0 / share
        loop = (compute**MIX + l2**MIX) ** (1 / MIX)
        loop = np.maximum(loop, turns * steps * LATENCY / (s.num_stages - 1))
        loop = loop * (1 + SLOWING * np.log10(np.maximum(loop / LONG, 1)))
        body = (loop**OVERLAP + memory**OVERLAP) ** (1 / OVERLAP)
        own = x if self.takes_turns else x / (s.num_warps // 4)
        store = own * y * 2.0 / device.store_bandwidth * STORE
        once = START + turns * TILE + store * (1 if self.takes_turns else turns)
        total = (body + once) * DOUBT
        nothing = np.zeros_like(total)
        return Costs(total, compute, l2, memory, once, nothing, np.zeros(1), turns * np.ones_like(total))

    def walk(self, problem: Problem, config: Config) -> Walk:
        p, c = problem, config
        tiles = _tiles(p, c)
        programs = min(tiles, p.device.sms)
        program, turn = in_turn(tiles, programs)
        columns = whole_tiles(p, c, np.arange(tiles), -(-p.N // c.block_n))
        return Walk(programs, p.device.sms, program=program, turn=turn, **columns)


class Cooperative(AnyWidth):
    """Warpgroups share a tile."""

    name = "cooperative"
    about = "as many programs as run at once; one warp loads, warpgroups share a tile of any width"
    knobs = frozenset({"swap", "rest_n"})


class PingPong(AnyWidth):
    """Warpgroups take tiles in turn: one multiplies while the other one stores."""

    name = "pingpong"
    about = "as many programs as run at once; one warp loads, two warpgroups take tiles of any width in turn"
    knobs = frozenset({"swap", "rest_n"})
    takes_turns = True


def _epilogue_suits(problem: Problem) -> bool:
    """Whether an epilogue asks for nothing but its block, and for no offsets beyond 32 bits in it."""
    p, f = problem, problem.fusion
    plain = f is None or (f.stores and not (f.reduces or f.whole or p.a.prologue))
    return plain and all((x.row + x.col) * 256 < 1 << 31 for x in p.extras)


def _tiles(problem: Problem, config: Config) -> int:
    return -(-problem.M // config.block_m) * -(-problem.N // config.block_n)


def width_of(problem: Problem, config: Config) -> int:
    """Columns of Y that are stored at a time. Where an epilogue reads matrices they divide the tile's."""
    rows = config.block_m if config.swap else config.block_n
    most = WIDTH
    while most > rows or (problem.extras and rows % most and most > 16):
        most //= 2
    return most


def descriptor(tensor: Any, shape: Sequence[int], stride: int, block: Sequence[int]) -> Any:
    """A tensor descriptor as Gluon takes it, swizzled by as many bytes as a row of the block has, up to 128."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(min(128, block[1] * 2), 16, 2)
    return TensorDescriptor(tensor, list(shape), [stride, 1], list(block), layout)


class AnyWidthBinding(Binding):
    """A `Binding` of the kernel for tiles of any width."""

    def __init__(self, problem: Problem, config: Config, takes_turns: bool) -> None:
        from triton.experimental.gluon import language as gl

        from ..kernels import any_width, dialect

        p, c = problem, config
        self.problem, self.config = p, c
        self.split = None
        self.kernel = any_width.gemm_any_width
        self.tiles = _tiles(p, c)
        self.grid = (min(self.tiles, p.device.sms), 1, 1)
        self.sides = Sides.of(p, c)
        groups = c.num_warps // 4
        registers, loader = REGISTERS[groups]
        self.constants = {
            "PLACE": dialect.in_gluon(place.whole_tile),
            "EPILOGUE": dialect.in_gluon(epilogue_of(p)),
            "CAST": dialect.in_gluon(cast),
            "KIND": "f16" if p.a.dtype == torch.float16 else "bf16",
            "X_ROWS": self.sides.x_rows,
            "Y_ROWS": self.sides.y_rows,
            "STAGES": c.num_stages,
            "GROUPS": groups,
            "SWAP": c.swap,
            "PINGPONG": takes_turns,
            "X_TURNED": self.sides.x_turned,
            "Y_TURNED": self.sides.y_turned,
            "BUFFERS": buffers(p, c),
            "REGISTERS": registers,
            "LOADER_REGISTERS": loader,
            "RING": gl.NVMMASharedLayout(128, 16, 2),
            "SOURCE": source(),
            # Those of the first warpgroup; the compiler adds those of the others.
            "num_warps": 4,
        }

    def compile(self, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> Any:
        """See `Binding.compile`.

        Raises:
            RuntimeError: the ring does not lie where this version's kernel has to look for it.
        """
        from triton.experimental.gluon import language as gl

        compiled = super().compile(tensors, numbers)
        if not hasattr(gl, "inline_asm"):
            check_ring(compiled.asm["llir"], self.config.num_stages * stage_bytes(self.problem, self.config))
        return compiled

    def arguments(self, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> list[Any]:
        """The kernel's run-time arguments, as for `Binding.arguments`."""
        from ..kernels.any_width import boxes, largest_box

        p, c, sides = self.problem, self.config, self.sides
        (a,), (b,), out, extras = sorted_tensors(p, tensors)
        largest = largest_box.fn(sides.y_rows, sides.x_turned or sides.y_turned)
        sizes = sorted({box[0] for box in boxes.fn(sides.y_rows, largest, sides.y_turned)}, reverse=True)
        ys = [self._operand(a if c.swap else b, is_b=not c.swap, rows=rows) for rows in sizes]
        width = width_of(p, c)
        block = (width, ROWS) if c.swap else (ROWS, width)
        return [
            self._operand(b if c.swap else a, is_b=c.swap, rows=largest), *[*ys, None, None, None][:4],
            descriptor(out, (p.M, p.N), p.out.row, block), p.M, p.N, p.K, self.tiles,
            c.group_m, (), epilogue_arguments(p, width, extras, numbers),
        ]  # fmt: skip

    def _operand(self, tensor: Any, is_b: bool, rows: int) -> Any:
        """The descriptor of an operand's boxes of so many rows."""
        p = self.problem
        # Strides along K and along the rows.
        along, across, size = (p.b.row, p.b.col, p.N) if is_b else (p.a.col, p.a.row, p.M)
        if along != 1:
            return descriptor(tensor, (p.K, size), along, (STEP, ROWS))
        return descriptor(tensor, (size, p.K), across, (rows, STEP))


@functools.cache
def source() -> str:
    """A digest of the kernel's file: Triton does not notice a change in what writes its assembly."""
    from ..kernels import any_width

    return hashlib.sha256(Path(any_width.__file__).read_bytes()).hexdigest()[:16]


def stage_bytes(problem: Problem, config: Config) -> int:
    """Bytes of a stage."""
    from ..kernels.any_width import stage_rows

    sides = Sides.of(problem, config)
    return int(stage_rows.fn(sides.x_rows, sides.y_rows, sides.x_turned or sides.y_turned)) * STEP * 2


def buffers(problem: Problem, config: Config) -> int:
    """Parts of the output that each warpgroup has room for: two where there is the memory."""
    c = config
    left = problem.device.target.shared - BARRIERS - c.num_stages * stage_bytes(problem, c)
    return 2 if left >= 2 * (c.num_warps // 4) * ROWS * width_of(problem, c) * 2 else 1


def check_ring(llir: str, size: int) -> None:
    """RuntimeError unless the first `size` bytes of shared memory are the ring's.

    Whatever else there is, is found at constant offsets behind it. If something stood before the ring, the ring's own
    offset would be one of less than its size, since nothing else is as large.

    Args:
        llir: the kernel in LLVM's language.
    """
    offsets = [int(found) for found in re.findall(r"@global_smem, i32 (\d+)", llir)]
    if not offsets or min(offsets) < size:
        raise RuntimeError(f"the ring of {size} bytes does not begin where shared memory does")


COOPERATIVE, PINGPONG = Cooperative(), PingPong()
