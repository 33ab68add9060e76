"""Programs in which one warp loads and warpgroups multiply tiles of any width; see `kernels.any_width`.

Two schedules: in one the warpgroups share a tile, in the other one they take tiles in turn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton

from ..devices import ARCHS
from ..epilogues.device import function
from ..formats.packing import LINE, STRIP
from ..formats.scaled import BLOCK
from ..kernels import any_width_packed as packed
from ..kernels import place
from ..kernels.any_width_load import LAST_ROW
from ..kernels.numerics import cast
from ..operands import Dense, DenseAccess, Ragged
from ..operands.packed import Packed, PackedAccess
from ..operands.pair import Pair
from ..operands.scaled import Scaled
from . import any_width_cost
from .any_width_compiled import check_maps, check_memory, waits_for_each
from .base import Forms
from .binding import (
    BOX,
    TL,
    Binding,
    digest,
    epilogue_arguments,
    epilogue_of,
    needs_only_its_block,
    phases,
    promotes,
    sorted_tensors,
    storable,
    suits_tma,
)  # fmt: skip
from .cost import Costs, Floats, Given, functions_of
from .persistent_static import PersistentStatic, Work
from .walk import Ints, divisor
from .waves import Split

if TYPE_CHECKING:
    from ..problem import Config, Problem
    from ..select.space import Space

#: Rows of X that a `wgmma` multiplies; bytes of a row of a stage.
ROWS, ROW = 64, 128
#: Rows that come from one half of a weight in two halves, before as many of the other half; and the least width where
#: these are Y, since TMA stores at least half as many columns.
EIGHT, LEAST_PAIRS = 8, 32
#: Columns of Y that are stored at a time, at most.
PART = 64
#: Bytes of shared memory, and of those for barriers.
SHARED, BARRIERS = ARCHS["sm_90"].shared, 1024
#: The largest K: the kernel counts in 32 bits, and past it by less than a step.
MOST_K = (1 << 31) - 1024
#: The most units: `order.quotient` divides numbers below 2^30.
MOST_UNITS = (1 << 30) - 1
#: Stages that are enough.
MOST_STAGES = 12
#: By the number of warpgroups: registers of a thread in all but the first one, and of the loader's.
REGISTERS = {1: (0, 40), 2: (232, 40), 3: (160, 32)}
#: By the same: numbers of the accumulator that a thread has registers for; and of a warpgroup that takes turns.
ACCUMULATORS, IN_TURNS = {1: 128, 2: 160, 3: 96}, 144
#: Of the accumulator where a step's sum has as many registers again, and where there are scales besides.
PROMOTED, SCALED = {1: 96, 2: 88, 3: 64}, {1: 88, 2: 80, 3: 48}
#: And where X is a packed weight, of which a step's operands are in registers.
PACKED = {1: 128, 2: 144, 3: 96}
#: The widths that share a kernel where X is a packed weight and each warpgroup has 64 rows of it, by the number of
#: warpgroups. The more widths a kernel has, the more often its products wait for each other, see `waits_for_each`.
PACKED_WIDTHS = {
    1: (range(64, 129, 16),),
    2: (range(64, 129, 16), range(144, 193, 16), range(208, 257, 16)),
    3: (range(64, 97, 16), range(112, 145, 16), range(160, 193, 16)),
}
#: The fewest stages with a packed weight: a step's words are read while the step before is multiplied, and the stage
#: before that is free afterwards.
LEAST_PACKED = 3
#: How much larger than all else an operand has to be to leave L2 first. Measured on an H200.
STREAMED = 1.5

#: The height of bands, as a part of that with the least to read; and the height where several bands are in flight.
BAND, LOW_BAND = 0.75, 2

#: The form of an operand, see `kernels.any_width`. The form of Y decides which multiples a tile's width can be. TMA
#: loads 64 turned rows at a time; with other widths part of them was not needed, and took up to twice as long.
Form = Literal[
    "rows", "turned", "pairs", "packed", "many rows", "many turned", "grouped rows", "ranged turned"
]
EACH: dict[Form, int] = {
    "rows": 8, "turned": ROWS, "pairs": 2 * EIGHT, "many rows": 8, "many turned": ROWS, "grouped rows": 8,
    "ranged turned": ROWS,
}  # fmt: skip
#: The form of matrices of a batch, by that of one.
MANY: dict[Form, Form] = {"rows": "many rows", "turned": "many turned"}
#: Rows in the outer dimensions along which groups and ranges have their ends, see `any_width_finish.store_slot`; and
#: elements from one row of the outermost to the next, and one row more.
MOST_ROWS, APART = (1 << 31) - 1, 1 << 34

#: Types of operands, as PTX names them.
KINDS = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


class Tile(NamedTuple):
    """A config's tile, of X and Y, the tensor cores' operands; see `kernels.any_width`.

    Attributes:
        x, y: rows of both in a tile.
        groups: warpgroups.
        own: rows of X of each.
    """

    x: int
    y: int
    groups: int
    own: int

    @classmethod
    def of(cls, config: Config, takes_turns: bool) -> Tile:
        x, y = (config.block_n, config.block_m) if config.swap else (config.block_m, config.block_n)
        groups = config.num_warps // 4
        return cls(x, y, groups, x if takes_turns or not groups else x // groups)

    def widest(self, numbers: dict[int, int] | None = None) -> int:
        """The largest width that a kernel for this X has registers for.

        Args:
            numbers: see `numbers_for`.
        """
        if numbers is not None:
            most = numbers[self.groups]
        else:
            most = ACCUMULATORS[self.groups] if self.own < self.x or self.groups == 1 else IN_TURNS
        return min(256, most * 128 // self.own)

    @property
    def each(self) -> int:
        """Widths are multiples of this. A kernel has code for each width, and more code takes longer to compile."""
        return 8 if self.own == ROWS and self.groups < 3 else 16

    def widths(self, of_x: Form, of_y: Form, numbers: dict[int, int] | None) -> tuple[int, ...]:
        """The widths that this tile's kernel has code for; its own is among them.

        Args:
            of_x, of_y: the forms of X and of Y.
            numbers: see `numbers_for`.
        """
        # A narrow tile stores fewer columns at a time.
        found: Sequence[int] = (self.y,)
        if of_x == "packed" and self.own == ROWS:
            found = next((widths for widths in PACKED_WIDTHS[self.groups] if self.y in widths), found)
        elif of_x != "packed" and self.y >= PART:
            found = range(PART, self.widest(numbers) + 1, self.each)
        return tuple(width for width in found if width % EACH[of_y] == 0)

    @property
    def part(self) -> int:
        """Columns of Y that are stored at a time. The last ones may overlap those before."""
        return min(PART, 1 << (self.y.bit_length() - 1))

    @property
    def buffers(self) -> int:
        """Parts of the output that each warpgroup has room for beside the ring. Stages of large tiles need the rest."""
        return 2 if self.x <= 2 * ROWS else 1

    @property
    def ring_rows(self) -> int:
        """Rows that there is shared memory for, beside the parts of the output."""
        stored = self.groups * self.buffers * ROWS * self.part * 2
        return (SHARED - BARRIERS - stored) // ROW // ROWS * ROWS

    @property
    def slots(self) -> int:
        """Parts of the output that there is room for, in the ring and beside it."""
        return self.ring_rows // self.part + self.groups * self.buffers

    @property
    def most_parts(self) -> int:
        """Parts of a tile that is cut along K. The warpgroup that adds them up has one, and the ring the others."""
        return 1 + self.ring_rows // self.groups * ROW // (self.own * self.y * 4)

    def most_stages(self, format: packed.StageFormat | None = None) -> int:
        """Stages that there is room for.

        Args:
            format: of X, if that is a packed weight.
        """
        each = packed.x_bytes(self.x, format) + self.y * ROW + packed.params_bytes(self.x, format)
        return min(MOST_STAGES, self.ring_rows * ROW // each)


def forms_of(config: Config, forms: Forms) -> tuple[Form, Form]:
    """How X and Y lie, see `kernels.any_width`."""
    if forms.ragged == "k":
        return "ranged turned", "ranged turned"
    a: Form = "turned" if forms.a_turned else "rows"
    b: Form = (
        "packed" if forms.packed else "turned" if forms.b_turned else "pairs" if forms.paired else "rows"
    )
    if forms.batched:
        a, b = a if forms.ragged else MANY[a], MANY[b]
    if forms.ragged:
        a = "grouped rows"
    return (b, a) if config.swap else (a, b)


class AnyWidth(PersistentStatic):
    """One program on each multiprocessor, which takes tiles in turn.

    Attributes:
        takes_turns: whether warpgroups take tiles in turn, and do not share them.
    """

    title = "tiles of any width"
    archs = ("sm_90",)
    # Those whose Gluon has the names that the kernel is written in.
    versions = ("3.6", "3.7", "3.8", "3.9")
    reason = "chosen where it is predicted to be the fastest"
    # Of few tiles, narrow ones have room for many parts.
    splits = (2, 3, 4, 6, 8, 11)
    sizes_bands = True
    fits = ("packed int4",)
    takes_turns: ClassVar[bool] = False

    def suits(self, problem: Problem) -> bool:
        p = problem
        return (
            self.runs_on(p.device.target)
            and p.K <= MOST_K
            and _operands_suit(p)
            and (_groups_suit(p) if p.ragged else not p.batch or _batch_suits(p))
            and all(operand.dtype in KINDS for operand in (p.a, p.b))
            and p.out.dtype in (torch.float16, torch.bfloat16)
            and (p.a.dtype.itemsize == 2 or (p.a.col == 1 and p.b.row == 1))
            and suits_tma(p)
            and p.out.col == 1
            and storable(p.out, p.M, p.out_n, p.batch)
            and (not p.paired or (p.b.row == 1 and p.out_n % EIGHT == 0))
            and _epilogue_suits(p)
        )

    def takes(self, config: Config, forms: Forms) -> bool:
        return self._untaken(config, forms) is None

    def considers(self, problem: Problem, rows: Floats) -> np.ndarray:
        # A row that is added to one row may be the output itself, of which some is stored twice.
        return (np.asarray(rows) > 1) | (problem.epilogue != "add_row")

    def tile(self, config: Config) -> Tile:
        """The tile of a config."""
        return Tile.of(config, self.takes_turns)

    def code(self, config: Config, forms: Forms) -> object:
        tile = self.tile(config)
        # Here widths tell kernels apart; fp8 that is promoted or scaled has fewer of them.
        return config.swap, tile.x, tile.groups, tile.widths(*forms_of(config, forms), None)

    def check_sizes(self, config: Config) -> None:
        c, warps = config, ((8,) if self.takes_turns else (4, 8, 12))
        if c.loader != "descriptor" or c.block_k not in (ROW // 2, ROW) or c.num_warps not in warps:
            raise ValueError(
                f"Config: the {self.name} schedule needs the descriptor loader, block_k {ROW // 2} or {ROW} and "
                f"{' or '.join(map(str, warps))} warps"
            )
        tile = self.tile(c)
        if tile.own not in (ROWS, 2 * ROWS) or tile.x % tile.own:
            raise ValueError(
                f"Config: the {self.name} schedule needs {ROWS} or {2 * ROWS} rows for each warpgroup of 4 warps"
            )
        if tile.y % tile.each or not 16 <= tile.y <= tile.widest():
            raise ValueError(
                f"Config: the {self.name} schedule needs a width that is a multiple of {tile.each} from 16 to "
                f"{tile.widest()}"
            )
        if c.num_stages < 2:
            # A stage is free when the product of the next one has begun.
            raise ValueError(
                f"Config: num_stages is {c.num_stages}; the {self.name} schedule needs at least 2"
            )
        # Words of a packed weight leave room for more stages, so the rest is up to `refusal`.
        if c.num_stages > MOST_STAGES:
            raise ValueError(f"Config: num_stages is {c.num_stages}; there are barriers for {MOST_STAGES}")

    def refusal(self, problem: Problem, config: Config) -> str | None:
        p, c = problem, config
        if not self.suits(p):
            return (
                f"schedule {self.name!r} needs Triton {', '.join(self.versions)}, a GPU of sm_90, operands of fp16, "
                f"bf16 or fp8 and an output of fp16 or bf16, K from 1 to {MOST_K}, an epilogue with at most one more "
                f"matrix, of 16 bits with adjacent columns, operands that suit the descriptor loader, "
                f"in a batch plain products of 16-bit matrices, with one dimension and no shared matrix, "
                f"fp8 with adjacent elements along K, an output with adjacent columns and rows of whole 16-byte units, "
                f"of a weight in two halves rows with adjacent elements and a multiple of {EIGHT} in each, of a packed "
                f"weight no halves, groups of a power of two from "
                f"{STRIP} on and scales in the type of a, and of fp8 scales for {BLOCK} of K and {BLOCK} of N; given "
                f"{p} on {p.device.arch} with Triton {triton.__version__}"
            )
        if c.block_k * p.a.dtype.itemsize != ROW:
            return f"{p.a.dtype} needs block_k {ROW // p.a.dtype.itemsize}"
        if (units := sum(self.work(p, c).units(c.block_k)[:2])) > MOST_UNITS:
            return f"the kernel counts tiles and parts of tiles to {MOST_UNITS}; there are {units}"
        if p.batch_invariant and c.split_k > 1:
            return "whether a tile is cut along K depends on the number of rows"
        if p.b.by_steps and (c.swap or self.tile(c).own != ROWS):
            return f"scales along K need {ROWS} rows for each warpgroup and no swap"
        widest = self.tile(c).widest(numbers_for(p))
        if self.tile(c).y > widest:
            kind = "a packed weight" if p.b.is_packed else "fp8 that is promoted or scaled"
            return f"{kind} leaves registers for a width of {widest}"
        if not self.considers(p, np.asarray(p.M)):
            return "a row that is added to one row may be the output itself, of which some is stored twice"
        return self._untaken(c, Forms.of(p))

    def _untaken(self, config: Config, forms: Forms) -> str | None:
        """Why operands that lie so can't be cut into a config's tiles; None if they can."""
        c, tile, (_, y_form) = config, self.tile(config), forms_of(config, forms)
        if y_form == "packed":
            return "packed weights need swap"
        if c.block_k == ROW and (forms.a_turned or forms.b_turned):
            return "operands of 8 bits need adjacent elements along K"
        if forms.packed and c.num_stages < LEAST_PACKED:
            return f"num_stages is {c.num_stages}; packed weights need at least {LEAST_PACKED}"
        if c.num_stages > (most := tile.most_stages(forms.packed)):
            return f"num_stages is {c.num_stages}; of this tile there is shared memory for {most}"
        if (forms.batched or forms.ragged) and c.split_k > 1:
            return "tiles of a batch are not cut along K"
        if forms.ragged == "k" and self.takes_turns:
            return "warpgroups take turns where all tiles have as many steps; ranges of K differ"
        if c.split_k > tile.most_parts:
            return f"the ring has room for the partial sums of {tile.most_parts} parts; given {c.split_k}"
        if tile.y % EACH[y_form]:
            kind = (
                "a weight in two halves"
                if y_form == "pairs"
                else "an operand with adjacent elements along N or M"
            )
            return f"{kind} needs a width that is a multiple of {EACH[y_form]}"
        if y_form == "pairs" and tile.part < LEAST_PAIRS:
            return f"a weight in two halves needs a width from {LEAST_PAIRS} on"
        return None

    def band(self, problem: Problem, config: Config) -> int:
        """The height of the bands: the config's, or one by the sizes.

        The tiles in flight read least where they cover as many bytes of A as of B. If a band of that height has fewer
        tiles than there are multiprocessors, several bands are in flight, and low ones are better. Bands have about
        equal heights. Measured on an H200 (`any_width_bands-bf16.json`).
        """
        p, c = problem, config
        tiles_m, tiles_n = -(-p.M // c.block_m), -(-p.N // c.block_n)
        if c.group_m:
            return min(c.group_m, tiles_m)
        shape = (c.block_n * p.b.bits) / (c.block_m * p.a.bits)
        height = BAND * math.sqrt(p.device.sms * shape)
        if height * tiles_n <= p.device.sms:
            return min(LOW_BAND, tiles_m)
        return -(-tiles_m // max(1, round(tiles_m / height)))

    def cut_units(self, work: Work, unit: Ints) -> tuple[Ints, Ints]:
        # As `kernels.order.part_of`.
        part, tile = np.divmod(unit, max(1, work.cut))
        return tile, part

    def bind(self, problem: Problem, config: Config) -> Binding:
        return AnyWidthBinding(
            problem,
            config,
            self.work(problem, config),
            self.tile(config),
            self.band(problem, config),
            self.takes_turns,
        )

    def costs(self, problem: Problem, space: Space, given: Given) -> Costs:
        return any_width_cost.costs(problem, space, given, self.takes_turns)


class Cooperative(AnyWidth):
    """Warpgroups share a tile."""

    name = "cooperative"
    about = "as many programs as run at once; one warp loads, warpgroups share a tile of any width"
    knobs = frozenset({"swap", "rest_n", "split_k"})

    def cuts(self, problem: Problem, config: Config) -> list[str]:
        return ["what fills no last wave is cut along K"] if config.split_k > 1 else []


class PingPong(AnyWidth):
    """Warpgroups take tiles in turn: one multiplies while the other one stores."""

    name = "pingpong"
    about = "as many programs as run at once; one warp loads, two warpgroups take tiles of any width in turn"
    knobs = frozenset({"swap", "rest_n"})
    takes_turns = True


def _operands_suit(problem: Problem) -> bool:
    """Whether operands are matrices, one of which may be packed, or fp8 with scales for as many columns of K as a step
    has.
    """
    a, b = problem.a, problem.b
    if isinstance(b, Packed):
        return type(a) is Dense and bool(b.staged) and not problem.paired
    if problem.ragged:
        return type(b) is Dense
    if isinstance(b, Pair) and b.alternates:
        return False
    if not isinstance(a, Scaled) or not isinstance(b, Scaled):
        return type(a) is Dense and type(b) in (Dense, Pair)
    # The kernel's assembly loads fp32.
    scales = all(operand.scale.dtype == torch.float32 for operand in (a, b))
    return scales and b.by_steps and b.step == BLOCK and b.every % BLOCK == 0 and not problem.paired


def _batch_suits(problem: Problem) -> bool:
    """Whether a batch is of plain products, each of matrices of its own."""
    p = problem
    bare = type(p.a) is Dense and type(p.b) is Dense and p.a.dtype.itemsize == 2 and p.epilogue == "identity"
    return bare and len(p.batch) == 1 and all(p.a.steps) and all(p.b.steps)


def _groups_suit(problem: Problem) -> bool:
    """Whether groups are of rows of 16-bit numbers that stay where they are, with an epilogue of vectors at most.

    Ranges of K need operands that are turned, as those of a weight's gradient are, and a bare product.
    """
    p = problem
    if not isinstance(p.a, Ragged) or p.a.by_pointers or p.a.scatters or p.paired or p.a.dtype.itemsize != 2:
        return False
    if p.fusion is None or p.fusion.matrix_operands or p.fusion.draws:
        return False
    # So that the outermost step of each tensor map is positive.
    if p.ragged == "rows":
        return bool(max(p.M, p.out.row) < LAST_ROW.value)
    turned = p.a.row == p.b.col == 1 and p.a.col > 1 and p.b.row > 1
    return turned and not p.fusion.operands and bool(max(p.K, p.a.col, p.b.row) < LAST_ROW.value)


def numbers_for(problem: Problem) -> dict[int, int] | None:
    """By the number of warpgroups, the numbers of an accumulator that a thread may have; None for the usual ones."""
    if problem.b.is_packed:
        return PACKED
    return SCALED if problem.b.by_steps else PROMOTED if promotes(problem) else None


def every_of(problem: Problem) -> tuple[int, int] | None:
    """Rows of A and columns of B that share a scale along K, if there are such scales."""
    a, b = problem.a, problem.b
    return (a.every, b.every) if isinstance(a, Scaled) and isinstance(b, Scaled) else None


def _epilogue_suits(problem: Problem) -> bool:
    """Whether an epilogue asks for nothing but its block, few registers, and no offsets beyond 32 bits in it.

    It may read or write one more matrix, which comes or leaves part by part. Registers spill beside an accumulator
    where there are more. A matrix that is added to a bare product may be the output itself, of which some columns are
    stored twice.
    """
    p = problem
    if p.epilogue == "add_matrix" or (p.wants_subtiles and not _has_one_matrix(p)):
        return False
    return needs_only_its_block(p)


def _has_one_matrix(problem: Problem) -> bool:
    """Whether one matrix is all that takes an epilogue many registers, and it passes through a part's slot."""
    p, fusion = problem, problem.fusion
    if fusion is None or fusion.draws or fusion.matrix is None:
        return False
    matrix = fusion.matrix
    if fusion.both and isinstance(p.b, Packed):
        # It compiles, but has not run on a GPU.
        return False
    suits = matrix.takes_tma(()) if fusion.ahead else storable(matrix, p.M, p.out_n, ())
    return matrix.col == 1 and matrix.dtype.itemsize == 2 and suits


def descriptor(
    tensor: Any, shape: Sequence[int], strides: Sequence[int], block: Sequence[int], swizzle: int = ROW
) -> Any:
    """A tensor descriptor as Gluon takes it, swizzled by as many bytes as a row of the block has, up to `swizzle`."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    item = tensor.dtype.itemsize
    layout = gl.NVMMASharedLayout(min(swizzle, block[-1] * item), 8 * item, len(block))
    return TensorDescriptor(tensor, list(shape), list(strides), list(block), layout)


class AnyWidthBinding(Binding):
    """A `Binding` of the kernel for tiles of any width."""

    # Where a tile ends; `tests/compile` looks into the loops of the machine code.
    harmless_spills = 56

    def __init__(
        self, problem: Problem, config: Config, work: Work, tile: Tile, band: int, takes_turns: bool
    ) -> None:
        from ..kernels import any_width, dialect

        p, c = problem, config
        self.problem, self.config, self.tile = p, c, tile
        self.a, self.b = p.a.access(p, is_b=False, tma=True), p.b.access(p, is_b=True, tma=True)
        self.split = Split.of(p, c)
        self.work, self.band = work, band
        self.kernel = any_width.gemm_any_width
        self.grid = (self.work.programs, 1, 1)
        self.forms, self.format = forms_of(c, Forms.of(p)), p.b.staged
        self.part = tile.part
        self.widths = tile.widths(*self.forms, numbers_for(p))
        registers, loader = REGISTERS[tile.groups]
        x, y = (p.b.dtype, p.a.dtype) if c.swap else (p.a.dtype, p.b.dtype)
        given, second = self._matrix_map()
        epilogue = self._epilogue(given, second)
        self.constants = {
            "PLACE": dialect.in_gluon(self.place),
            "GROUP_OF": dialect.in_gluon(self.a.group_of()) if p.ragged == "rows" else None,
            "GIVEN": given,
            "SECOND": second,
            "EPILOGUE": dialect.in_gluon(epilogue),
            "CAST": dialect.in_gluon(cast),
            "KIND": f"{KINDS[x]}.{KINDS[y]}",
            "PROMOTES": p.b.by_steps or promotes(p),
            "EVERY": every_of(p),
            "X_ROWS": tile.x,
            "WIDTHS": self.widths,
            "RING_ROWS": tile.ring_rows,
            "GROUPS": tile.groups,
            "SWAP": c.swap,
            "LOOPS": self._loops(takes_turns, given, second),
            "PINGPONG": takes_turns,
            "FORMAT": str(self.format) if self.format else None,
            "X_FORM": self.forms[0],
            "Y_FORM": self.forms[1],
            "BUFFERS": tile.buffers,
            "REGISTERS": registers,
            "LOADER_REGISTERS": loader,
            "SOURCE": source(),
            # Those of the first warpgroup; the compiler adds those of the others.
            "num_warps": 4,
        }

    @property
    def place(self) -> Any:
        """`PLACE` of the kernel."""
        if self.problem.ragged:
            return place.next_tile_of_rows if self.problem.ragged == "rows" else place.sized_tile_of_ranges
        if self.problem.batch:
            return place.sized_tile_of_batch
        return place.sized_tile if self.split is None else place.sized_part

    def _loops(self, takes_turns: bool, given: object, second: object) -> bool:
        """`LOOPS` of the kernel, as far as it gained on an H200 (`any_width_epilogues-bf16`).

        It was not measured where a matrix is read. Three warpgroups have no registers for two results beside an
        accumulator that stays whole.
        """
        p = self.problem
        suits = given is None and not (second is not None and self.tile.groups > 2)
        return functions_of(p) > 0 and not takes_turns and not p.paired and suits

    def _epilogue(self, given: object, second: object) -> Any:
        """The function of a part's block: with a matrix, it takes the matrix's block too, or returns it."""
        p = self.problem
        if given is not None:
            return phases(p)[1]
        if second is not None and p.fusion is not None:
            return p.b.of_sum(function(p.fusion.both), p.device)
        return epilogue_of(p)

    def _matrix_map(self) -> tuple[tuple[int, Any] | None, int | None]:
        """`GIVEN` and `SECOND` of the kernel."""
        from ..kernels import any_width_given

        fusion = self.problem.fusion
        if fusion is None or fusion.matrix is None:
            return None, None
        number = any_width_given.map_of(self.format, *self.forms)
        return (None, number) if fusion.both else ((number, TL[fusion.matrix.dtype]), None)

    def compile(self, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> Any:
        """See `Binding.compile`.

        If products wait for each other in a kernel for several widths, it is compiled again with its widths in other
        orders, and at last for this tile's width alone.
        """
        compiled = super().compile(tensors, numbers)
        present = self.constants["WIDTHS"]
        if self.format is None or len(present) == 1:
            return compiled
        if compiled not in _ORDERS:
            _ORDERS[compiled] = self._order(compiled, tensors, numbers)
        widths = _ORDERS[compiled] or (self.tile.y,)
        if widths == present:
            return compiled
        self.constants["WIDTHS"] = widths
        return super().compile(tensors, numbers)

    def _order(self, compiled: Any, tensors: Sequence[Any], numbers: Sequence[float]) -> tuple[int, ...]:
        """The widths in an order with which products do not wait for each other; () if there is none.

        Args:
            compiled: the kernel with the widths in the present order.
        """
        present: tuple[int, ...] = self.constants["WIDTHS"]
        for first in range(len(present)):
            widths = present[first:] + present[:first]
            if first:
                self.constants["WIDTHS"] = widths
                compiled = super().compile(tensors, numbers)
            if not waits_for_each(compiled):
                return widths
        return ()

    def check(self, compiled: Any) -> None:
        """RuntimeError unless the ring, its barriers and the tensor maps are where the kernel's assembly looks."""
        from ..kernels import any_width_given

        check_maps(compiled.asm["ptx"])
        barriers = (
            2 * MOST_STAGES + 4 + any_width_given.barriers_of(self.constants["GIVEN"], self.tile.groups)
        )
        check_memory(compiled.asm["llir"], self.tile.slots * self.tile.part * ROW, barriers)

    def arguments(self, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> list[Any]:
        """The kernel's run-time arguments, as for `Binding.arguments`."""
        return self._arguments(tensors, numbers, (ROWS, self.part))

    def direct_arguments(self, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> list[Any]:
        """See `Binding.direct_arguments`."""
        x, y = (
            ROWS if form.endswith("turned") or rows > BOX else rows
            for form, rows in zip(self.forms, (self.tile.x, self.tile.y), strict=True)
        )
        return self._arguments(tensors, numbers, (x, y))

    def _arguments(
        self, tensors: Sequence[Any], numbers: Sequence[float], boxes: tuple[int, ...]
    ) -> list[Any]:
        """The kernel's arguments, with tensor maps that load so many rows of X and of Y at a time."""
        p, c, tile = self.problem, self.config, self.tile
        of_a, of_b, out, extras = sorted_tensors(p, tensors)
        a, b = of_a[0], of_b[0]
        step_args = (*self.a.step_scales(of_a), *self.b.step_scales(of_b))
        # Both numbers of a pair make one.
        rows, columns = (self.part, ROWS) if c.swap else (ROWS, self.part)
        block = rows, columns * p.out_n // p.N
        x, y = (b, a) if c.swap else (a, b)
        whole, cut, *parts = self.work.units(c.block_k)
        loaded = [-(-rows // box) * box for rows, box in zip((tile.x, tile.y), boxes, strict=True)]
        x_size = packed.x_bytes(loaded[0], self.format) + packed.params_bytes(tile.x, self.format)
        workspace = None if self.split is None else self.workspace(out.device)
        tiles_m, tiles_n, band = -(-p.M // c.block_m), -(-p.N // c.block_n), self.band
        last_band = tiles_m - (tiles_m - 1) // band * band
        # Groups need the divisors of the rows of a tile, and of the tiles along N. A batch needs that of a matrix's
        # tiles, others that of those which are cut along K.
        is_grouped = p.ragged == "rows"
        counted = tiles_n if is_grouped else tiles_m * tiles_n if p.batch or p.ragged else self.work.cut
        area = c.block_m if is_grouped else band * tiles_n
        divisors = map(divisor, (area, band, last_band, max(1, counted)))
        return [
            self._operand(x, c.swap, ROWS, boxes[0]), self._operand(y, not c.swap, self.part, boxes[1]),
            self._output(out, block), *self._params(of_b, boxes[0]),
            self._matrix(extras, block), p.M, p.N, p.K, whole + cut, whole, *parts,
            tiles_m, tiles_n, *divisors, tile.y, band, boxes[0], x_size, boxes[1], loaded[1] * ROW, self.streams,
            c.num_stages, self.a.place_args(of_a), step_args, epilogue_arguments(p, self.part, extras, numbers),
            workspace,
        ]  # fmt: skip

    def _output(self, out: Any, block: tuple[int, int]) -> Any:
        """The descriptor of the output, for blocks that are stored at a time."""
        p = self.problem
        if p.ragged == "rows":
            shape, row = (MOST_ROWS, MOST_ROWS, LAST_ROW.value, p.out_n), p.out.row
            return descriptor(out, shape, (APART - row, row, row, 1), (1, 1, *block))
        # Ranges of K are always a batch.
        batch, steps = (p.batch, p.out.steps) if p.batch or not p.ragged else ((1,), (p.out.row,))
        many = (1,) * len(batch)
        return descriptor(out, (*batch, p.M, p.out_n), (*steps, p.out.row, 1), (*many, *block))

    def _matrix(self, extras: Sequence[Any], block: Sequence[int]) -> Any:
        """The descriptor of the one matrix that the epilogue reads or writes; None where there is none."""
        p = self.problem
        if p.fusion is None or p.fusion.place is None or p.fusion.matrix is None:
            return None
        return descriptor(extras[p.fusion.place], (p.M, p.out_n), (p.fusion.matrix.row, 1), block)

    @property
    def streams(self) -> int:
        """Which operand is the first to leave L2: 1 for X, 2 for Y, 0 for neither.

        An operand that is most of what is read and written takes the place of its own kind there, rather than of what
        other kernels have written, which would have to go to memory first. Otherwise both are read again, and stay in
        L2.
        """
        p = self.problem
        if p.ragged:
            return 0
        a, b = (rows * p.K * x.bits / 8 for rows, x in ((p.M, p.a), (p.N, p.b)))
        out = p.M * p.out_n * p.out.dtype.itemsize
        first, last = (2, 1) if self.config.swap else (1, 2)
        if a > STREAMED * (b + out):
            return first
        return last if b > STREAMED * (a + out) else 0

    @property
    def workspace_size(self) -> tuple[int, int]:
        """Bytes in which parts of tiles meet, and counters of their arrivals; none where no tile is cut."""
        w, tile = self.work, self.tile
        return w.partials(tile.x, tile.y) * torch.float32.itemsize, w.counters(tile.groups)

    def _operand(self, tensor: Any, is_b: bool, rows: int, box: int) -> Any:
        """The descriptor of an operand: its type has blocks of so many rows, its tensor map loads `box` at a time."""
        p, step = self.problem, self.config.block_k
        if is_b and isinstance(self.b, PackedAccess):
            return self._words(tensor, self.b, rows, box)
        # Strides along K and along the rows.
        along, across, size = (p.b.row, p.b.col, p.N) if is_b else (p.a.col, p.a.row, p.M)
        # Groups of rows lie in one matrix.
        batch, steps = (p.batch, (p.b if is_b else p.a).steps) if is_b or not p.ragged else ((), ())
        many = [1] * len(batch)
        if p.ragged == "k":
            shape, block = (MOST_ROWS, MOST_ROWS, LAST_ROW.value, size), (1, 1, step, ROWS)
            return descriptor(tensor, shape, (APART - along, along, along, 1), block)
        if along != 1:
            return descriptor(tensor, (*batch, p.K, size), (*steps, along, 1), (*many, step, ROWS))
        if not (is_b and p.paired):
            made = descriptor(tensor, (*batch, size, p.K), (*steps, across, 1), (*many, rows, step))
            made.box = [*many, box, step]
            return made
        # Eight rows of one half, then eight of the other.
        assert isinstance(self.b, DenseAccess)
        assert self.b.half_stride is not None
        both = 2 * EIGHT
        shape, strides = (size // both, 2, EIGHT, p.K), (EIGHT * across, self.b.half_stride, across, 1)
        made = descriptor(tensor, shape, strides, (rows // both, 2, EIGHT, step))
        made.box = [box // both, 2, EIGHT, step]
        return made

    def _words(self, tensor: Any, own: PackedAccess, rows: int, box: int) -> Any:
        """The descriptor of a packed weight's words, as `_operand`."""
        assert self.format is not None
        lines = self.format.words // ROW
        shape, strides = (own.strips, own.lines, LINE), (own.lines * LINE, LINE, 1)
        made = descriptor(tensor, shape, strides, (rows // STRIP, lines, LINE))
        made.box = [box // STRIP, lines, LINE]
        return made

    def _params(self, tensors: Sequence[Any], box: int) -> list[Any]:
        """The descriptors of scales and of shifts, of `box` rows of X at a time; None where there are none."""
        found: list[Any] = [None, None]
        if isinstance(self.b, PackedAccess) and self.format is not None:
            shape, block = (self.b.groups, self.b.columns), (max(self.format.groups, 1), ROWS)
            for i, each in enumerate(tensors[1:]):
                made = descriptor(each, shape, (self.b.columns, 1), block, swizzle=0)
                made.box = [block[0], box if block[0] == 1 else ROWS]
                found[i] = made
        return found


@functools.cache
def source() -> str:
    """The `digest` of the kernel's files."""
    from ..kernels import (
        any_width,
        any_width_acc,
        any_width_cut,
        any_width_finish,
        any_width_given,
        any_width_load,
        any_width_loop,
        decoders,
    )

    return digest(
        any_width, any_width_acc, any_width_cut, any_width_finish, any_width_given, any_width_load, any_width_loop,
        packed, decoders,
    )  # fmt: skip


#: By a kernel for several widths of a packed weight, its widths in the order that does well; see `_order`.
_ORDERS: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()


COOPERATIVE, PINGPONG = Cooperative(), PingPong()
