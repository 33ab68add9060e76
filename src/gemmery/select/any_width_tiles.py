"""The rows of tiles of any width, see `kernels.any_width`.

Matrices have a row for every width from `PART` on that fits into registers and shared memory. They have two narrower
tiles for products of a few rows, each with a kernel of its own. Packed weights have fewer widths, and no narrow tiles.
The rows are made from the sizes of tiles, since there are too many to write down.
"""

from __future__ import annotations

from ..kernels.any_width_packed import STEP, AnyStage, StageFormat
from ..kernels.any_width_sparse import SparseStage
from ..schedules.any_width import COOPERATIVE, PINGPONG
from ..schedules.any_width_tile import PACKED, PART, ROW, ROWS, SCALED, SPARSE, Tile

#: Rows of X, warpgroups, and rows of X of each: of tiles that warpgroups share, and of those that they take in turn.
SHARED_TILES = ((64, 1, 64), (128, 2, 64), (192, 3, 64), (256, 2, 128))
#: Rows of X of tiles that are also cut along K: of few tiles, none is large.
CUT = (64, 128)
TURNS = ((128, 2, 128),)
#: Columns of narrow tiles, of 64 rows of X.
NARROW = (16, 32)
#: Widths of tiles with a packed weight are multiples of this, so that few widths share a kernel. A warpgroup
#: that has a tile alone takes up to a fifth longer than predicted with more columns than `ALONE`.
STEP_PACKED, ALONE = 16, 128
#: Fewer stages do not keep the tensor cores busy.
LEAST_STAGES = 3
#: See `schedules.any_width_tile.numbers_for`.
Numbers = dict[int, int] | None


def _rows(
    sizes: tuple[tuple[int, int, int], ...], step: int, numbers: Numbers, *formats: AnyStage
) -> list[str]:
    """The rows of tiles of these sizes, with as many stages as there is room for.

    Args:
        formats: of packed or sparse weights, if there are any, those for which there are rows; most stages come first.
    """
    lines: list[str] = []
    for x, groups, own in sizes:
        for y in _widths(Tile(x, 0, groups, own), numbers, formats):
            most = [Tile(x, y, groups, own).most_stages(format) for format in formats or (None,)]
            for stages in dict.fromkeys(most):
                if stages < LEAST_STAGES:
                    continue
                cut = " splits" if x in CUT and own == ROWS else ""
                if not formats:
                    lines.append(f"{x}x{y}x{step} 0 {4 * groups} {stages} 1.0{cut}")
                lines.append(f"{y}x{x}x{step} 0 {4 * groups} {stages} 1.0 swap{cut}")
    return lines


def _widths(tile: Tile, numbers: Numbers, formats: tuple[AnyStage, ...]) -> range:
    """The widths of tiles with so many rows of X."""
    widest = tile.widest(numbers)
    if any(isinstance(format, StageFormat) for format in formats):
        return range(PART, (widest if tile.groups > 1 else ALONE) + 1, STEP_PACKED)
    return range(PART, widest + 1, tile.each_of(is_sparse=bool(formats)))


def rows(item: int, numbers: Numbers = None) -> dict[tuple[str, str], str]:
    """The rows of both schedules.

    Args:
        item: bytes of an element of the operands.
        numbers: see `schedules.any_width_tile.numbers_for`.
    """
    step = ROW // item
    narrow = [f"{y}x{ROWS}x{step} 0 4 {Tile(ROWS, y, 1, ROWS).most_stages()} 1.0 swap splits" for y in NARROW]
    # Of 16-bit operands they give the bits of other schedules, which was measured; of fp8 it was not.
    apart = "" if item > 1 else " apart"
    shared, turns = [*_rows(SHARED_TILES, step, numbers), *narrow], _rows(TURNS, step, numbers)
    return {
        ("descriptor", schedule.name): "\n".join(f"{line}{apart}" for line in lines)
        for schedule, lines in ((COOPERATIVE, shared), (PINGPONG, turns))
    }


def scaled_rows() -> dict[tuple[str, str], str]:
    """The rows for fp8 whose steps are multiplied by scales."""
    sizes = tuple(size for size in SHARED_TILES if size[2] == ROWS)
    lines = [f"{line} apart" for line in _rows(sizes, ROW, SCALED) if "swap" not in line]
    return {("descriptor", COOPERATIVE.name): "\n".join(lines)}


def packed_rows(bits: int) -> dict[tuple[str, str], str]:
    """The rows for packed weights, which are X.

    Args:
        bits: of a number.
    """
    # Small groups have more parameters, for which some tiles have fewer stages.
    formats = [StageFormat("", bits, group, "zeros", 0) for group in (STEP, STEP // 4)]
    return {
        ("descriptor", schedule.name): "\n".join(
            f"{line} apart" for line in _rows(sizes, STEP, PACKED, *formats)
        )
        for schedule, sizes in ((COOPERATIVE, SHARED_TILES), (PINGPONG, TURNS))
    }


def sparse_rows(format: SparseStage, numbers: Numbers = SPARSE) -> dict[tuple[str, str], str]:
    """The rows for 2:4 sparse weights, which are X. No warpgroups take turns.

    Args:
        numbers: see `schedules.any_width_tile.numbers_for`.
    """
    # Warpgroups that decode numbers have registers for 64 rows each. With scales behind the product, those of 128 rows
    # spill; with Triton 3.9, the largest was a fifth slower than tiles of three warpgroups.
    sizes = tuple(size for size in SHARED_TILES if not (format.code or format.fp8) or size[2] == ROWS)
    step = ROW if format.fp8 else STEP
    # A step of few bytes takes the loading warp as long as one of many.
    narrow = [
        f"{y}x{x}x{step} 0 {4 * groups} {Tile(x, y, groups, ROWS).most_stages(format)} 1.0 swap splits"
        for x, groups, _ in sizes[: 1 if format.fp8 else 2]
        for y in NARROW
    ]
    lines = [*_rows(sizes, step, numbers, format), *narrow]
    return {("descriptor", COOPERATIVE.name): "\n".join(f"{line} apart" for line in lines)}
