"""Programs in which one warp loads and warpgroups multiply tiles of any width; see `kernels.any_width`.

Two schedules: in one the warpgroups share a tile, in the other one they take tiles in turn. For a third one, with
clusters of programs, see `cluster`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from ..formats.packing import STRIP
from ..formats.scaled import BLOCK
from ..kernels.any_width_load import LAST_ROW
from ..kernels.any_width_scales import SPAN
from ..kernels.any_width_stage import own_rows
from ..operands import Dense, Ragged
from ..operands.pair import Pair
from ..operands.scaled import Scaled
from . import any_width_cost, any_width_edge
from .any_width_binding import AnyWidthBinding
from .any_width_edge import Edges
from .any_width_tile import (
    CLUSTER_PART,
    EACH,
    EIGHT,
    KINDS,
    LEAST_PACKED,
    LEAST_PAIRS,
    MOST_STAGES,
    PART,
    PLAIN,
    PROMOTED,
    ROW,
    ROWS,
    RULES,
    SCALED,
    SHARED_ROWS,
    SHARING,
    WHOLE_SPANS,
    Numbers,
    Rules,
    Tile,
    each_of,
    forms_of,
    numbers_for,
    rules_of,
)  # fmt: skip
from .base import Forms
from .binding import SHORT_ROWS, Binding, needs_only_its_block, storable, suits_tma
from .cost import Costs, Floats, Given
from .persistent_static import PersistentStatic, Work
from .walk import Ints, Walk, uncounted

if TYPE_CHECKING:
    from ..problem import Config, Problem
    from ..select.space import Space

#: The largest K: the kernel counts in 32 bits, and past it by less than a step.
MOST_K = (1 << 31) - 1024
#: The largest offset of a scale along K, in bytes; offsets have 32 bits.
MOST_OFFSET = (1 << 31) - 4
#: The height of bands if several are in flight.
LOW_BAND = 2
#: Numbers of an accumulator if a step's sum has separate registers.
_PROMOTED = (PROMOTED, SCALED, WHOLE_SPANS)


class AnyWidth(PersistentStatic):
    """One program on each multiprocessor, which takes tiles in turn.

    Attributes:
        takes_turns: whether warpgroups take tiles in turn instead of sharing them.
        clustered: whether the programs that have a tile's parts along K are a cluster.
        binding: of its launches.
    """

    title = "tiles of any width"
    archs = ("sm_90",)
    # Those whose Gluon has the names that the kernel is written in.
    versions = ("3.6", "3.7", "3.8", "3.9")
    reason = "chosen where it is predicted to be the fastest"
    # If there are few tiles, narrow ones have room for many parts.
    splits: tuple[int, ...] = (2, 3, 4, 6, 8, 11)
    sizes_bands = True
    awaits = True
    fits = ("packed int4",)
    takes_turns: ClassVar[bool] = False
    clustered: ClassVar[bool] = False
    binding: ClassVar[type[AnyWidthBinding]] = AnyWidthBinding

    def needs(self, problem: Problem) -> Iterator[tuple[bool, str]]:
        p = problem
        yield from super().needs(p)
        yield 0 < p.K <= MOST_K, f"K from 1 to {MOST_K}"
        yield (
            _operands_suit(p),
            f"matrices; of a packed weight no halves, groups of a power of two from {STRIP} on and scales in the type "
            f"of a; of a sparse weight kept numbers of 16 or 8 bits; of fp8 fp32 scales for {BLOCK} of K and {BLOCK} "
            f"of N, of up to {MOST_OFFSET} bytes, and N a multiple of {SCALED.each}",
        )
        if p.ragged:
            yield _groups_suit(p), "groups of 16-bit matrices, with an epilogue of vectors at most"
        else:
            yield (
                not p.batch or _batch_suits(p),
                "in a batch plain products of 16-bit matrices, with one dimension and no shared matrix",
            )
        yield all(operand.dtype in KINDS for operand in (p.a, p.b)), "operands of fp16, bf16 or fp8"
        yield p.out.dtype in (torch.float16, torch.bfloat16), "an output of fp16 or bf16"
        yield (
            p.a.dtype.itemsize == 2 or (p.a.col == 1 and p.b.row == 1),
            "fp8 with adjacent elements along K",
        )
        yield suits_tma(p), "operands that suit the descriptor loader"
        yield p.a.suits_registers, SHORT_ROWS
        yield (
            not p.paired or (p.b.row == 1 and p.out_n % EIGHT == 0),
            f"of a weight in two halves rows with adjacent elements and a multiple of {EIGHT} in each",
        )
        yield (
            p.out.col == 1 and storable(p.out, p.M, p.out_n, p.batch),
            "an output with adjacent columns and rows of whole 16-byte units",
        )
        yield _epilogue_suits(p), "an epilogue with at most one more matrix, of 16 bits with adjacent columns"

    def takes(self, config: Config, forms: Forms) -> bool:
        return self._untaken(config, forms) is None

    def considers(self, problem: Problem, rows: Floats, config: Config | Space) -> np.ndarray:
        found: np.ndarray = _stores_suit(problem, rows, config) & self._registers_suit(problem, config)
        return found & _scales_suit(problem, rows, config) if problem.b.by_steps else found

    def _registers_suit(self, problem: Problem, config: Config | Space) -> np.ndarray:
        """Whether there are registers for tiles of the table, which has those of bare products."""
        p, c, numbers = problem, config, numbers_for(problem)
        if numbers is not PLAIN:
            return np.asarray(True)
        x, y = np.where(c.swap, c.block_n, c.block_m), np.where(c.swap, c.block_m, c.block_n)
        groups = np.asarray(c.num_warps) // 4
        own = x if self.takes_turns else own_rows(x, groups)
        by_groups = np.array([0, *(numbers.by_groups[each] for each in (1, 2, 3))])
        most = numbers.in_turns if self.takes_turns else by_groups[groups]
        is_multiple = y % each_of(own, groups, rules_of(p.b.staged), numbers) == 0
        return np.asarray((y * own <= most * 2 * ROWS) & (is_multiple | (y < PART)))

    def repeats(self, problem: Problem, rows: Ints, config: Config | Space) -> np.ndarray:
        """See `Schedule.repeats`; `any_width.corner` moves the last tiles, and their last parts may overlap."""
        c = config
        moves_m, moves_n = [
            (size > block) & (size % block > 0) for size, block in ((rows, c.block_m), (problem.N, c.block_n))
        ]
        width = np.where(c.swap, c.block_m, c.block_n)
        part = np.minimum(CLUSTER_PART if self.clustered else PART, 1 << np.log2(width).astype(int))
        x = np.where(c.swap, c.block_n, c.block_m)
        return np.asarray(moves_m | moves_n | (width % part > 0) | (x % ROWS > 0))

    def tile(self, config: Config) -> Tile:
        """The tile of a config."""
        return Tile.of(config, self.takes_turns)._replace(clustered=self.clustered)

    def code(self, config: Config, forms: Forms) -> object:
        tile = self.tile(config)
        # Widths tell kernels apart. The usual ones do so for promoted fp8, too, which has fewer.
        numbers = WHOLE_SPANS if forms.by_steps else rules_of(forms.packed).numbers
        widths = tile.widths(forms.packed, forms_of(config.swap, forms)[1], numbers)
        return config.swap, config.block_k, tile.x, tile.groups, widths

    def check_sizes(self, config: Config) -> None:
        c, warps = config, ((8,) if self.takes_turns else (4, 8, 12))
        if c.loader != "descriptor" or c.block_k not in (ROW // 2, ROW) or c.num_warps not in warps:
            raise ValueError(
                f"Config: the {self.name} schedule needs the descriptor loader, block_k {ROW // 2} or {ROW} and "
                f"{' or '.join(map(str, warps))} warps"
            )
        tile = self.tile(c)
        twice = (1 if self.takes_turns else tile.groups) * tile.own - tile.x
        if tile.own not in (ROWS, 2 * ROWS) or twice not in ((0, SHARED_ROWS) if tile.own == ROWS else (0,)):
            raise ValueError(
                f"Config: the {self.name} schedule needs {ROWS} or {2 * ROWS} rows for each warpgroup of 4 warps, or "
                f"{ROWS} of which the last two share {SHARED_ROWS}"
            )
        # The operands decide which of these a config may have.
        rules = [each for each in RULES.values() if each.takes_turns or not self.takes_turns]
        each = min(each.each or tile.each_of(RULES[""]) for each in rules)
        widest = max(tile.widest(each.numbers) for each in rules)
        if tile.y % each or not 16 <= tile.y <= widest:
            raise ValueError(
                f"Config: the {self.name} schedule needs a width that is a multiple of {each} from 16 to {widest}"
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
        if (unsuited := self.unsuited(p)) is not None:
            return unsuited
        if p.b.staged is None and c.block_k * p.a.dtype.itemsize != ROW:
            return f"{p.a.dtype} needs block_k {ROW // p.a.dtype.itemsize}"
        if (many := uncounted(sum(self.work(p, c).units(c.block_k)[:2]))) is not None:
            return many
        if p.batch_invariant and c.split_k > 1:
            return "whether a tile is cut along K depends on the number of rows"
        if p.b.by_steps and (c.swap or self.tile(c).own != ROWS):
            return f"scales along K need {ROWS} rows for each warpgroup and no swap"
        rules, numbers = rules_of(p.b.staged), numbers_for(p)
        if (turns := self._wait_too_often(rules)) is not None:
            return turns
        if self.tile(c).own > rules.own:
            return f"{rules.about} needs {rules.own} rows for each warpgroup"
        if not self.tile(c).fits(numbers):
            return self._too_wide(self.tile(c), rules, numbers)
        if c.split_k > 1 and self.tile(c).y in self.tile(c).wider(numbers):
            return f"with scales along K, tiles of {self.tile(c).y} columns are not cut along K"
        if self.tile(c).shares and p.fusion is not None and p.fusion.matrix is not None:
            return "an epilogue that reads or writes another matrix needs warpgroups that share no rows"
        if p.a.is_summed and self.repeats(p, np.asarray(p.M), c):
            return "a sum over ranks needs tiles and parts of tiles that do not overlap"
        if p.b.by_steps and not _scales_suit(p, np.asarray(p.M), c):
            return f"offsets of scales along K reach up to {MOST_OFFSET} bytes"
        if not _stores_suit(p, np.asarray(p.M), c):
            return "a row that is added to one row may be the output itself, of which some is stored twice"
        return self._untaken(c, Forms.of(p), numbers)

    def _too_wide(self, tile: Tile, rules: Rules, numbers: Numbers) -> str:
        """The reason why there are no registers for a tile."""
        rows = f"{tile.own} rows for each warpgroup"
        kind = "fp8 that is promoted or scaled" if numbers in _PROMOTED else rules.about or rows
        widest, wider = tile.widest(numbers), tile.wider(numbers)
        widths = [f"a width of {widest}"] * (widest > 0) + [f"one of {width}" for width in wider]
        if not widths:
            return f"{kind} leaves no registers for {tile.groups} warpgroups"
        return f"{kind} leaves registers for {' or '.join(widths)}"

    def _wait_too_often(self, rules: Rules) -> str | None:
        """The reason why warpgroups don't take turns with a kind of X; None if they can, or share tiles."""
        if self.takes_turns and not rules.takes_turns:
            return f"warpgroups that take turns wait too often for products with {rules.about}"
        return None

    def _untaken(self, config: Config, forms: Forms, numbers: Numbers | None = None) -> str | None:
        """The reason why operands with these layouts cannot be cut into a config's tiles; None if they can.

        Args:
            numbers: see `numbers_for`.
        """
        c, tile, rules = config, self.tile(config), rules_of(forms.packed)
        _, y_form = forms_of(config.swap, forms)
        stage = forms.packed and forms.packed.of_step(c.block_k)
        if forms.packed is not None and stage is None:
            return f"{rules.name} weights have no steps of {c.block_k} columns"
        if stage is not None and stage.y_blocks > 1 and y_form != "rows":
            return f"steps of {c.block_k} columns need activations with adjacent elements along K"
        if forms.packed is not None and not c.swap:
            return f"{rules.name} weights need swap"
        if tile.y % (each := tile.each_of(rules, numbers)):
            return f"{tile.own} rows for each of {tile.groups} warpgroups need a width that is a multiple of {each}"
        if c.block_k == ROW and forms.packed is None and (forms.a_turned or forms.b_turned):
            return "operands of 8 bits need adjacent elements along K"
        if forms.packed and c.num_stages < LEAST_PACKED:
            return f"num_stages is {c.num_stages}; packed and sparse weights need at least {LEAST_PACKED}"
        if c.num_stages > (most := tile.most_stages(stage)):
            return f"num_stages is {c.num_stages}; of this tile there is shared memory for {most}"
        if tile.shares and forms_of(config.swap, forms)[0] not in SHARING:
            return f"warpgroups can share rows of {', '.join(SHARING)}"
        if (forms.batched or forms.ragged) and c.split_k > 1:
            return "tiles of a batch are not cut along K"
        if c.split_k > tile.most_parts:
            return f"the ring has room for the partial sums of {tile.most_parts} parts; given {c.split_k}"
        if tile.y % EACH[y_form]:
            kind = (
                "a weight in two halves"
                if y_form == "pairs"
                else "an operand with adjacent elements along N or M"
            )
            return f"{kind} needs a width that is a multiple of {EACH[y_form]}"
        if (turns := self._wait_too_often(rules)) is not None:
            return turns
        if y_form == "pairs" and tile.part < LEAST_PAIRS:
            return f"a weight in two halves needs a width from {LEAST_PAIRS} on"
        return None

    def band(self, problem: Problem, config: Config) -> int:
        """The height of the bands: the config's, or one by the sizes.

        The tiles in flight read least if they cover as many bytes of A as of B. If a band of that height has fewer
        tiles than there are multiprocessors, several bands are in flight, and low ones are better. Bands have about
        equal heights. Measured on an H200 (`any_width_bands-bf16.json`).
        """
        p, c = problem, config
        tiles_m, tiles_n = -(-p.M // c.block_m), -(-p.N // c.block_n)
        if c.group_m:
            return min(c.group_m, tiles_m)
        shape = (c.block_n * p.b.bits) / (c.block_m * p.a.bits)
        height = rules_of(p.b.staged).band * math.sqrt(p.device.sms * shape)
        if height * tiles_n <= p.device.sms:
            return min(LOW_BAND, tiles_m)
        return -(-tiles_m // max(1, round(tiles_m / height)))

    def cut_units(self, work: Work, unit: Ints) -> tuple[Ints, Ints]:
        # As `kernels.order.part_of`.
        part, tile = np.divmod(unit, max(1, work.cut))
        return tile, part

    def bind(self, problem: Problem, config: Config) -> Binding:
        work, tile, band = self.work(problem, config), self.tile(config), self.band(problem, config)
        return self.binding(problem, config, work, tile, band, self.takes_turns)

    def costs(self, problem: Problem, space: Space, given: Given) -> Costs:
        return any_width_cost.costs(problem, space, given, self.takes_turns, self.clustered)


class Cooperative(AnyWidth):
    """Warpgroups share a tile."""

    name = "cooperative"
    about = "as many programs as run at once; one warp loads, warpgroups share a tile of any width"
    knobs = frozenset({"swap", "rest_n", "split_k"})

    def cuts(self, problem: Problem, config: Config) -> list[str]:
        if config.split_k > 1:
            return ["what fills no last wave is cut along K"]
        edges = Edges.of(problem, config, np.asarray(problem.M))
        return [f"edge tiles multiply {edges.width} columns"] if edges.width else []

    def walk(self, problem: Problem, config: Config) -> Walk:
        edges = Edges.of(problem, config, np.asarray(problem.M))
        if not edges.width:
            return super().walk(problem, config)
        return any_width_edge.walk(problem, config, self.band(problem, config), edges)


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
    if Forms.of(problem).packed is not None:
        return isinstance(a, Dense) and not problem.batch
    if problem.ragged:
        return type(b) is Dense
    if isinstance(b, Pair) and b.alternates:
        return False
    if not isinstance(a, Scaled) or not isinstance(b, Scaled):
        return isinstance(a, Dense) and type(b) in (Dense, Pair)
    # The kernel's assembly loads fp32.
    scales = all(operand.scale.dtype == torch.float32 for operand in (a, b))
    scales = scales and bool(_last_scale(b, problem.N, problem.K) <= MOST_OFFSET)
    blocks = b.by_steps and b.step == BLOCK and b.every % BLOCK == 0 and not problem.paired
    return scales and blocks and problem.N % SCALED.each == 0


def _last_scale(operand: Scaled, rows: Ints | int, K: int) -> Ints:
    """The offset of the last scale of so many rows of A, or columns of B, in bytes."""
    scale, lines = operand.scale, (np.asarray(rows, np.int64) - 1) // operand.every
    return np.asarray(4 * (lines * scale.row + (K - 1) // operand.step * scale.col))


def _stores_suit(problem: Problem, rows: Floats, config: Config | Space) -> np.ndarray:
    """Whether what an epilogue reads and stores allows for a tile; see `AnyWidth.considers`."""
    p, x = problem, np.where(config.swap, config.block_n, config.block_m)
    # A row that is added to a single row may be the output itself, part of which is stored twice.
    added = (np.asarray(rows) > 1) | (p.epilogue != "add_row")
    # An epilogue's matrix needs warpgroups that share no rows.
    matrix = (x % ROWS == 0) | (p.fusion is None or p.fusion.matrix is None)
    return np.asarray(added & matrix)


def _scales_suit(problem: Problem, rows: Floats, config: Config | Space) -> np.ndarray:
    """Whether the scales along K allow for so many rows and for a tile; see `AnyWidth.considers`."""
    p = problem
    assert isinstance(p.a, Scaled)
    found = _last_scale(p.a, np.asarray(rows, np.int64), p.K) <= MOST_OFFSET
    if p.N % SPAN == 0:
        return np.asarray(found)
    # The table also has wide tiles, which need N to be a multiple of 128.
    most = np.array([0, *(SCALED.by_groups[groups] * 2 for groups in (1, 2, 3))])
    return np.asarray(found & (config.block_n <= most[np.asarray(config.num_warps) // 4]))


def _batch_suits(problem: Problem) -> bool:
    """Whether the products of a batch are plain products, each with its own matrices."""
    p = problem
    bare = type(p.a) is Dense and type(p.b) is Dense and p.a.dtype.itemsize == 2 and p.epilogue == "identity"
    return bare and len(p.batch) == 1 and all(p.a.steps) and all(p.b.steps)


def _groups_suit(problem: Problem) -> bool:
    """Whether groups are of rows of 16-bit numbers that are not gathered or scattered, with an epilogue of vectors at
    most.

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


def _epilogue_suits(problem: Problem) -> bool:
    """Whether an epilogue reads only its block, takes few registers, and needs no offsets beyond 32 bits.

    It may read or write one more matrix, part by part. With more matrices, registers would spill beside the
    accumulator. A matrix that is added to a bare product may be the output itself, of which some columns are stored
    twice.
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
    if fusion.both and not rules_of(p.b.staged).has_second:
        return False
    suits = matrix.takes_tma(()) if fusion.ahead else storable(matrix, p.M, p.out_n, ())
    return matrix.col == 1 and matrix.dtype.itemsize == 2 and suits


COOPERATIVE, PINGPONG = Cooperative(), PingPong()
