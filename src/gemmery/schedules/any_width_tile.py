"""The tiles of any width: their rows of X and Y, and the memory and registers for them; see `kernels.any_width`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from ..devices import ARCHS
from ..kernels.any_width_cluster import MOST
from ..kernels.any_width_scales import SPAN
from ..kernels.any_width_stage import own_rows, params_bytes, x_bytes, y_blocks_of
from ..operands.scaled import Scaled
from .base import Forms
from .binding import promotes

if TYPE_CHECKING:
    from ..kernels.any_width_stage import Stage
    from ..problem import Config, Problem

#: Rows of X that a `wgmma` multiplies; bytes of a row of a stage.
ROWS, ROW = 64, 128
#: Rows of X that the last two warpgroups of a tile may share. Metadata of sparse weights is of as many rows.
SHARED_ROWS = 32
#: Rows that come from one half of a weight in two halves, before as many of the other half; and the least width where
#: these are Y, since TMA stores at least half as many columns.
EIGHT, LEAST_PAIRS = 8, 32
#: Columns of Y that are stored at a time, at most; and if a cluster's programs share a tile's columns.
PART, CLUSTER_PART = 64, 16
#: Bytes of shared memory, and of those for barriers and the places of tiles.
SHARED, BARRIERS = ARCHS["sm_90"].shared, 1536
#: The most stages that are useful.
MOST_STAGES = 12
#: The widths that share a kernel where X is a packed weight and each warpgroup has 64 rows of it, by the number of
#: warpgroups. The more widths a kernel has, the more often its products wait for each other, see `waits_for_each`.
PACKED_WIDTHS = {
    1: (range(64, 129, 8),),
    2: (range(64, 129, 8), range(136, 193, 8), range(200, 257, 8)),
    3: (range(64, 105, 8), range(112, 129, 8), range(136, 193, 8)),
}
#: The fewest stages with a weight that has a `Stage`: a step's numbers are read while the step before is multiplied,
#: and the stage before that is free afterwards.
LEAST_PACKED = 3
#: The height of bands, as a part of the height with which the least is read.
BAND = 0.75

#: The form of an operand, see `kernels.any_width`. The form of Y decides which multiples a tile's width can be. TMA
#: loads blocks of 64 turned rows; with other widths part of them was not needed, and took up to twice as long.
Form = Literal[
    "rows",
    "turned",
    "pairs",
    "packed",
    "sparse",
    "sparse pairs",
    "many rows",
    "many turned",
    "grouped rows",
    "ranged turned",
]
#: The forms of X of which two warpgroups can share `SHARED_ROWS` rows.
SHARING: tuple[Form, ...] = ("rows", "pairs", "sparse")
EACH: dict[Form, int] = {
    "rows": 8, "turned": ROWS, "pairs": 2 * EIGHT, "many rows": 8, "many turned": ROWS, "grouped rows": 8,
    "ranged turned": ROWS,
}  # fmt: skip
#: The form of matrices of a batch, by that of one.
MANY: dict[Form, Form] = {"rows": "many rows", "turned": "many turned"}

#: Types of operands, as PTX names them.
KINDS = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


class Numbers(NamedTuple):
    """The accumulators that a kernel has registers for.

    Attributes:
        by_groups: by the number of warpgroups, numbers of an accumulator that a thread may have.
        in_turns: the same of a warpgroup that takes turns.
        each: widths are multiples of this power of two, too.
        by_eight: whether widths of three warpgroups may be any multiples of 8, if each has 64 rows of X.
        wide: by the number of warpgroups that share a tile, further widths above these, for 64 rows of X for each of
            them. Each width has a kernel of its own.
    """

    by_groups: dict[int, int]
    in_turns: int = 0
    each: int = 1
    by_eight: bool = False
    wide: Mapping[int, tuple[int, ...]] = MappingProxyType({})


#: Of plain matrices of 16 bits and of 8 bits. The latter have scales, for which registers would spill.
PLAIN = Numbers({1: 128, 2: 160, 3: 96}, in_turns=192)
#: Of matrices of 16 bits, if the product is stored as it is. With a bias, the K loops of these tiles would have spills.
BARE = Numbers({1: 128, 2: 192, 3: 96}, in_turns=192, by_eight=True)
PLAIN8 = PLAIN._replace(in_turns=144)
#: If a step's sum takes as many registers again, and if there are also scales, which 16 columns share.
PROMOTED = Numbers({1: 96, 2: 88, 3: 64}, in_turns=88)
SCALED = Numbers({1: 88, 2: 80, 3: 0}, in_turns=80, each=16)
#: The same if N is a multiple of 128. Wide tiles then touch two spans at most and need few masks.
WHOLE_SPANS = SCALED._replace(wide={2: (192, 256), 3: (128,)})


class Rules(NamedTuple):
    """The tiles that are possible for a kind of X; the defaults are those of a plain matrix.

    Attributes:
        name, about: X in messages, if it is not a plain matrix.
        numbers: the accumulators.
        each: widths are multiples of it with one or two warpgroups; None for those of `each_of`.
        own: the most rows of X of a warpgroup.
        shared: by the number of warpgroups, the widths that share a kernel where each of them has 64 rows; others have
            a kernel of their own. In some orders of the widths, products wait for each other. None if all widths share
            one kernel without such waits.
        takes_turns: whether warpgroups may take tiles in turn.
        has_second: whether an epilogue may write a second result.
        band: see `BAND`.
    """

    name: str = ""
    about: str = ""
    numbers: Numbers = BARE
    each: int | None = None
    own: int = 2 * ROWS
    shared: dict[int, tuple[range, ...]] | None = None
    takes_turns: bool = True
    has_second: bool = True
    band: float = BAND


#: The tiles of sparse weights are limited by the bandwidth of shared memory. Large tiles need less of it, so they have
#: the largest accumulators, and gain most from widths between. Warpgroups that take turns wait too often for products.
_SPARSE = Rules(
    "sparse", "a sparse weight", numbers=Numbers({1: 128, 2: 176, 3: 96}), each=8, takes_turns=False, band=0.6
)
#: By `Stage.kind`, and "" for plain matrices.
RULES = {
    "": Rules(),
    # A step's operands are in registers. A second result compiles, but has not run on a GPU.
    "packed": Rules(
        "packed",
        "a packed weight",
        numbers=Numbers({1: 128, 2: 144, 3: 96}, in_turns=144, by_eight=True),
        shared=PACKED_WIDTHS,
        has_second=False,
    ),
    "sparse": _SPARSE,
    # Warpgroups that decode numbers have registers for 64 rows each.
    "sparse decoded": _SPARSE._replace(about="a sparse weight whose numbers are decoded", own=ROWS),
}


def rules_of(stage: Stage | None) -> Rules:
    """The rules for X with a `Stage`, or for a plain matrix."""
    return RULES["" if stage is None else stage.kind]


class Tile(NamedTuple):
    """A config's tile, of X and Y, the tensor cores' operands; see `kernels.any_width`.

    Attributes:
        x, y: rows of both in a tile.
        groups: warpgroups.
        own: rows of X of each.
        clustered: whether the programs that have the tile's parts along K are a cluster.
    """

    x: int
    y: int
    groups: int
    own: int
    clustered: bool = False

    @classmethod
    def of(cls, config: Config, takes_turns: bool) -> Tile:
        x, y = (config.block_n, config.block_m) if config.swap else (config.block_m, config.block_n)
        groups = config.num_warps // 4
        return cls(x, y, groups, x if takes_turns or not groups else own_rows(x, groups))

    @property
    def shares(self) -> bool:
        """Whether the last two warpgroups share rows of X."""
        return self.x % ROWS > 0

    @property
    def multiplied(self) -> int:
        """Rows of X that are multiplied, of which two warpgroups may share some."""
        return self.x if self.own == self.x else self.groups * self.own

    def widest(self, numbers: Numbers) -> int:
        """The largest width that a kernel for this X has registers for.

        Args:
            numbers: see `numbers_for`.
        """
        takes_turns = self.own == self.x and self.groups > 1
        most = numbers.in_turns if takes_turns else numbers.by_groups[self.groups]
        return min(256, most * 128 // self.own)

    def wider(self, numbers: Numbers) -> tuple[int, ...]:
        """The widths above `widest` that are possible for this X; see `Numbers.wide`."""
        return numbers.wide.get(self.groups, ()) if self.x == self.groups * ROWS else ()

    def fits(self, numbers: Numbers) -> bool:
        """Whether a kernel has registers for this tile."""
        return self.y <= self.widest(numbers) or self.y in self.wider(numbers)

    def each_of(self, rules: Rules, numbers: Numbers | None = None) -> int:
        """The number that divides all widths of this tile, see `each_of`."""
        return int(each_of(self.own, self.groups, rules, numbers))

    def widths(self, stage: Stage | None, of_y: Form, numbers: Numbers) -> tuple[int, ...]:
        """The widths that this tile's kernel has code for; its own is among them.

        Args:
            stage: of X; None for a plain matrix.
            of_y: the form of Y.
            numbers: see `numbers_for`.
        """
        rules = rules_of(stage)
        if self.clustered:
            # A launch of clusters is short, and so is its code.
            return (self.y,)
        # A narrow tile stores fewer columns at a time.
        found: Sequence[int] = (self.y,)
        if rules.shared is None:
            if self.y >= PART and self.y not in self.wider(numbers):
                found = range(PART, self.widest(numbers) + 1, self.each_of(rules, numbers))
        elif self.own == ROWS:
            found = next((widths for widths in rules.shared[self.groups] if self.y in widths), found)
        return tuple(width for width in found if width % EACH[of_y] == 0)

    @property
    def part(self) -> int:
        """Columns of Y that are stored at a time. The last ones may overlap those before."""
        return min(CLUSTER_PART if self.clustered else PART, 1 << (self.y.bit_length() - 1))

    @property
    def buffers(self) -> int:
        """Parts of the output for which a warpgroup has room beside the ring. Stages of large tiles need the rest."""
        return 2 if self.x <= 2 * ROWS else 1

    @property
    def ring_rows(self) -> int:
        """Rows for which there is shared memory, beside the parts of the output."""
        stored = self.groups * self.buffers * ROWS * self.part * 2
        return (SHARED - BARRIERS - stored) // ROW // ROWS * ROWS

    @property
    def slots(self) -> int:
        """Parts of the output for which there is room, in the ring and beside it."""
        return self.ring_rows // self.part + self.groups * self.buffers

    @property
    def most_parts(self) -> int:
        """Parts of a tile that is cut along K. The warpgroup that adds them up has one, and the ring the others."""
        if self.clustered:
            return int(MOST.value)
        return 1 + self.ring_rows // self.groups * ROW // (self.own * self.y * 4)

    def most_stages(self, format: Stage | None = None) -> int:
        """Stages for which there is room.

        Args:
            format: of X; None of a plain matrix.
        """
        each = x_bytes(self.x, format) + self.y * ROW * y_blocks_of(format) + params_bytes(self.x, format)
        return min(MOST_STAGES, (self.ring_rows * ROW - self.received) // each)

    @property
    def received(self) -> int:
        """Bytes at the end of the ring for what the programs of the largest cluster send."""
        if not self.clustered:
            return 0
        parts = -(-self.y // self.part)
        most = max(programs * -(-parts // programs) for programs in range(2, MOST.value + 1))
        return self.multiplied * most * self.part * torch.float32.itemsize


def each_of(own: Any, groups: Any, rules: Rules, numbers: Numbers | None = None) -> Any:
    """The number that divides all widths of a tile, or an array of such numbers.

    A kernel has code for each width, and more code takes longer to compile.

    Args:
        own, groups: rows of X of a warpgroup, and warpgroups.
        numbers: see `numbers_for`; None for the smallest number of any problem.
    """
    by_eight = (rules.numbers if numbers is None else numbers).by_eight
    each = np.where((own == ROWS) & (by_eight | (np.asarray(groups) < 3)), 8, 16)
    if rules.each is not None:
        each = np.where(np.asarray(groups) > 2, each, rules.each)
    return np.maximum(each, 1 if numbers is None else numbers.each)


def forms_of(swap: bool, forms: Forms) -> tuple[Form, Form]:
    """The forms of X and Y, see `kernels.any_width`."""
    if forms.ragged == "k":
        return "ranged turned", "ranged turned"
    a: Form = "turned" if forms.a_turned else "rows"
    b: Form = "turned" if forms.b_turned else "pairs" if forms.paired else "rows"
    if forms.packed is not None:
        b = forms.packed.form
    if forms.batched:
        a, b = a if forms.ragged else MANY[a], MANY[b]
    if forms.ragged:
        a = "grouped rows"
    return (b, a) if swap else (a, b)


def numbers_for(problem: Problem) -> Numbers:
    """The accumulators of a problem's kernels."""
    if problem.b.by_steps:
        return SCALED if problem.N % SPAN else WHOLE_SPANS
    if promotes(problem):
        return PROMOTED
    if problem.b.staged is not None:
        return rules_of(problem.b.staged).numbers
    if problem.a.dtype.itemsize == 1:
        return PLAIN8
    is_bare = problem.epilogue == "identity" and not problem.batch and not problem.ragged
    return BARE if is_bare else PLAIN


def every_of(problem: Problem) -> tuple[int, int, int] | None:
    """Rows of A and columns of B that share a scale along K, if there are such scales, and gcd(N, 128)."""
    a, b = problem.a, problem.b
    if not isinstance(a, Scaled) or not isinstance(b, Scaled):
        return None
    return a.every, b.every, math.gcd(problem.N, SPAN)
