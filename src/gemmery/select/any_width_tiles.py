"""The rows of tiles of any width, see `kernels.any_width`.

Matrices have a row for every width from `PART` on that fits into registers and shared memory. For products of a few
rows they have narrow tiles, each with its own kernel. Packed weights have no narrow tiles. The rows are made from the
sizes of tiles, since there are too many to write down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..kernels.any_width_packed import STEP, StageFormat
from ..kernels.any_width_sparse import SparseStage
from ..kernels.any_width_stage import Stage
from ..schedules.any_width import COOPERATIVE, PINGPONG
from ..schedules.any_width_tile import (
    BARE,
    PART,
    PLAIN8,
    PROMOTED,
    ROW,
    ROWS,
    WHOLE_SPANS,
    Numbers,
    Tile,
    rules_of,
)
from ..schedules.cluster import CLUSTER

#: Rows of X, warpgroups, and rows of X of each.
Sizes = tuple[tuple[int, int, int], ...]
#: Of tiles that warpgroups share, and of those that they take in turn.
SHARED_TILES = ((64, 1, 64), (128, 2, 64), (192, 3, 64), (256, 2, 128))
#: Rows of X in tiles that are also cut along K. If there are few tiles, none is large.
CUT = (64, 128)
TURNS = ((128, 2, 128),)
#: Columns of narrow tiles, and their sizes. Few rows of Y are multiplied so fast that only the loads take time, which
#: are fastest if the rows of X make as many tiles as there are multiprocessors.
NARROW = (16, 32, 64)
NARROW_TILES = ((64, 1, 64), (96, 2, 64), (128, 2, 64), (160, 3, 64), (192, 3, 64))
#: Rows of X, warpgroups and columns of tiles for clusters; and for packed weights, which have more kernels.
CLUSTERS = ((64, 1, (16, 32, 64)), (96, 2, (16, 32, 64)), (128, 2, (32, 64, 128)))
PACKED_CLUSTERS = ((64, 1, (64, 80, 96, 112, 128, 144)), (128, 2, (64, 96, 128, 160)))
#: Fewer stages do not keep the tensor cores busy.
LEAST_STAGES = 3


class Offer(NamedTuple):
    """The tiles for weights that have a `Stage`, which are X: the tiles of `schedules` that are worth considering.

    Attributes:
        stages: the weights' stages, those first of which most fit into the ring.
        shared, turns: sizes of tiles that warpgroups share, and of those that they take in turn.
        narrow: whether there are the tiles of `NARROW_TILES`.
        short: the stage of these and of clusters' tiles, if it is another one.
        widest, alone: the largest width, and that of a tile with a single warpgroup.
        numbers: see `schedules.any_width_tile.numbers_for`, where the stage's rules do not say it.
    """

    stages: tuple[Stage, ...]
    shared: Sizes = SHARED_TILES
    turns: Sizes = ()
    narrow: bool = False
    short: Stage | None = None
    widest: int = 256
    alone: int = 256
    numbers: Numbers | None = None


#: Each warpgroup has 64 rows.
_SMALL = tuple(size for size in SHARED_TILES if size[2] == ROWS)


def packed(bits: int) -> Offer:
    """For packed weights with numbers of this many bits.

    A warpgroup that has a tile alone takes up to a fifth longer than predicted with more than 128 columns. Small groups
    have more parameters, for which some tiles have fewer stages.
    """
    stages = tuple([StageFormat("", bits, group, "zeros", 0) for group in (STEP, STEP // 4)])
    return Offer(stages, turns=TURNS, alone=128)


#: For packed weights with long steps. Wider tiles are not faster with them: their products take so long that a step's
#: other instructions delay none (`packed_long_steps-bf16-triton3.9.json`).
PACKED_LONG = Offer(
    tuple([StageFormat("", 4, group, "zeros", 0, wide=True) for group in (2 * STEP, STEP)]),
    turns=TURNS, widest=128, alone=128,
)  # fmt: skip

#: For 2:4 sparse weights of 16 bits, and for those of 8 bits that are widened to 16, which have 64 rows for each
#: warpgroup.
SPARSE = Offer((SparseStage(),), narrow=True, short=SparseStage(wide=True))
SPARSE8 = Offer((SparseStage("e4m3"),), shared=_SMALL, narrow=True, short=SparseStage("e4m3", wide=True))
#: For 2:4 sparse weights with fp8 activations. With scales after the product, tiles of 128 rows for each warpgroup
#: spill: 208 bytes with Triton 3.9, and 248 with 3.6.
SPARSE_FP8 = Offer((SparseStage(fp8=True),), _SMALL, narrow=True)
SPARSE_FP8_ACCURATE = SPARSE_FP8._replace(numbers=PROMOTED)


def _rows(sizes: Sizes, step: int, numbers: Numbers, offer: Offer | None = None) -> list[str]:
    """The rows of tiles of these sizes, with as many stages as fit.

    Args:
        offer: of weights that have a `Stage`.
    """
    lines: list[str] = []
    for x, groups, own in sizes:
        for y in _widths(Tile(x, 0, groups, own), numbers, offer):
            stages_of = offer.stages if offer else (None,)
            most = [Tile(x, y, groups, own).most_stages(stage) for stage in stages_of]
            for stages in dict.fromkeys(most):
                if stages < LEAST_STAGES:
                    continue
                is_cut = x in CUT and own == ROWS and y not in Tile(x, y, groups, own).wider(numbers)
                cut = " splits" if is_cut else ""
                if offer is None:
                    lines.append(f"{x}x{y}x{step} 0 {4 * groups} {stages} 1.0{cut}")
                lines.append(f"{y}x{x}x{step} 0 {4 * groups} {stages} 1.0 swap{cut}")
    return lines


def _widths(tile: Tile, numbers: Numbers, offer: Offer | None) -> Sequence[int]:
    """The widths of tiles with this many rows of X."""
    if offer is None:
        usual = range(PART, tile.widest(numbers) + 1, tile.each_of(rules_of(None), numbers))
        return *usual, *tile.wider(numbers)
    widest = min(tile.widest(numbers), offer.widest if tile.groups > 1 else offer.alone)
    return range(PART, widest + 1, tile.each_of(rules_of(offer.stages[0])))


def _narrow(step: int, numbers: Numbers, stage: Stage | None = None) -> list[str]:
    """The rows of narrow tiles.

    Args:
        stage: of a weight, which is X; None for matrices.
    """
    lines = []
    for x, groups, own in NARROW_TILES:
        for tile in (Tile(x, y, groups, own) for y in NARROW):
            # `_rows` has tiles of 64 columns whose warpgroups share no rows; with long steps, they were not measured.
            if tile.y <= tile.widest(numbers) and (tile.y < PART or tile.shares):
                behind = f"{step} 0 {4 * groups} {tile.most_stages(stage)} 1.0"
                lines.append(f"{tile.y}x{x}x{behind} swap splits")
    return lines


def _clusters(step: int, numbers: Numbers, stage: Stage | None = None) -> list[str]:
    """The rows of tiles for clusters.

    Args:
        stage: of a weight, which is X; None for matrices.
    """
    lines = []
    for x, groups, widths in PACKED_CLUSTERS if isinstance(stage, StageFormat) else CLUSTERS:
        for y in widths:
            tile = Tile(x, y, groups, ROWS, clustered=True)
            if y > tile.widest(numbers) or tile.most_stages(stage) < LEAST_STAGES:
                continue
            behind = f"{step} 0 {4 * groups} {tile.most_stages(stage)} 1.0"
            lines.append(f"{y}x{x}x{behind} swap splits")
            if stage is None and y == ROWS:
                lines.append(f"{x}x{y}x{behind} splits")
    return lines


def rows(item: int, numbers: Numbers | None = None) -> dict[tuple[str, str], str]:
    """The rows of all schedules.

    Args:
        item: bytes of an element of the operands.
        numbers: see `schedules.any_width_tile.numbers_for`; None for those of most tiles.
    """
    step = ROW // item
    numbers = numbers or (BARE if item > 1 else PLAIN8)
    # With 16-bit operands they give the bits of other schedules, as was measured; fp8 was not measured.
    apart = "" if item > 1 else " apart"
    shared = [*_rows(SHARED_TILES, step, numbers), *_narrow(step, numbers)]
    turns = _rows(TURNS, step, numbers)
    found = {
        ("descriptor", schedule.name): "\n".join(f"{line}{apart}" for line in lines)
        for schedule, lines in ((COOPERATIVE, shared), (PINGPONG, turns))
    }
    found["descriptor", CLUSTER.name] = "\n".join(f"{line} apart" for line in _clusters(step, numbers))
    return found


def scaled_rows() -> dict[tuple[str, str], str]:
    """The rows for fp8 whose steps are multiplied by scales."""
    lines = [f"{line} apart" for line in _rows(_SMALL, ROW, WHOLE_SPANS) if "swap" not in line]
    return {("descriptor", COOPERATIVE.name): "\n".join(lines)}


def staged_rows(*offers: Offer) -> dict[tuple[str, str], str]:
    """The rows for weights that have a `Stage`."""
    shared, turns, clusters = [], [], []
    for offer in offers:
        numbers = offer.numbers or rules_of(offer.stages[0]).numbers
        short = offer.short or offer.stages[0]
        narrow = _narrow(short.step, numbers, short) if offer.narrow else []
        shared += [*_rows(offer.shared, offer.stages[0].step, numbers, offer), *narrow]
        turns += _rows(offer.turns, offer.stages[0].step, numbers, offer)
        clusters += _clusters(short.step, numbers, short)
    return {
        ("descriptor", schedule.name): "\n".join(f"{line} apart" for line in lines)
        for schedule, lines in ((COOPERATIVE, shared), (PINGPONG, turns), (CLUSTER, clusters))
        if lines
    }
