"""Places: from the number of a unit of work to its corner and its range of K.

All places have the signature

    place(unit, state, shape, BLOCK_M, BLOCK_N, band_m) -> (batch, row, col, end, first_k, last_k)

and give the batch, the row and the column of the unit's corner, the end of the rows that it may touch, and its range of
K. `state` is the kernel's numbers of units, as each kernel's docstring lists them, and then the place's own tuple of
run-time arguments, `place_args`, which may hold pointers. `shape` is (M, N, K), tiles are of `BLOCK_M` by `BLOCK_N`,
and `band_m` is the height of a tile band, see `order`.

A unit's range of K may be empty. Loaders then return zeros for the single step that kernels always take.
"""

import triton
import triton.language as tl

from .order import banded, divided, grouped, part_of, quotient

#: Whether this is the copy for Gluon's kernels, see `dialect.in_gluon`.
IN_GLUON = tl.constexpr(False)


@triton.jit
def numbered(COUNT: tl.constexpr):
    """The numbers from 0 on. In Gluon's kernels each of four warps has all of them."""
    if IN_GLUON:
        return tl.arange(0, COUNT, tl.BlockedLayout([COUNT // 32 if COUNT > 32 else 1], [32], [4], [0]))
    else:
        return tl.arange(0, COUNT)


@triton.jit
def whole_tile(unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m):
    """Tile number `unit`, over all of K."""
    M, N, K = shape
    batch, tile_m, tile_n = grouped(unit, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), band_m)
    return batch, tile_m * BLOCK_M, tile_n * BLOCK_N, M, 0, K


@triton.jit
def single_tile(unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m):
    """Tile number `unit`, over all of K, if each program has one tile. `state` begins with the number of tiles.

    The remainder equals `unit`. Without the division, ptxas allocates registers differently, and a tf32 kernel for
    sm_80 spills some.
    """
    return whole_tile(unit % state[0], state, shape, BLOCK_M, BLOCK_N, band_m)


@triton.jit
def split_tile(unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m):
    """Part `unit // tiles` of tile `unit % tiles`: `part_k` of K. `state` begins with (tiles, part_k)."""
    tiles, part_k = state[0], state[1]
    batch, row, col, end, _, _ = whole_tile(unit % tiles, state, shape, BLOCK_M, BLOCK_N, band_m)
    first_k = unit // tiles * part_k
    return batch, row, col, end, first_k, min(first_k + part_k, shape[2])


@triton.jit
def counted_part(unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m):
    """Part `unit // tiles` of tile `unit % tiles`, in plain row-major order and without divisions.

    A product without a batch, in which a tile that is not cut has one part. `state` is (tiles, part_k, tiles along N,
    divisors), and the divisors are those of both numbers of tiles.
    """
    tiles, part_k, tiles_n, divisors = state
    part, tile = part_of(unit, tiles, divisors[0])
    tile_m = quotient(tile, divisors[1])
    first_k = part * part_k
    return (
        0,
        tile_m * BLOCK_M,
        (tile - tile_m * tiles_n) * BLOCK_N,
        shape[0],
        first_k,
        min(first_k + part_k, shape[2]),
    )


@triton.jit
def inner_tile(unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m):
    """Tile number `unit` of the tiles that have all of their columns; `tail_tile` places the other columns."""
    M, N, K = shape
    batch, tile_m, tile_n = grouped(unit, tl.cdiv(M, BLOCK_M), N // BLOCK_N, band_m)
    return batch, tile_m * BLOCK_M, tile_n * BLOCK_N, M, 0, K


@triton.jit
def tail_tile(
    unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m,
    PARTS_M: tl.constexpr, PARTS_N: tl.constexpr,
):  # fmt: skip
    """Small tile number `unit`: first the parts of whole tiles, then those of the columns that `inner_tile` leaves.

    A tile is cut into `PARTS_M` by `PARTS_N`. `state` begins with (whole tiles, small tiles, whole tiles that are cut,
    small tiles to a row of the columns left). If the last is 0, all units are parts of whole tiles.
    """
    M, N, K = shape
    PARTS: tl.constexpr = PARTS_M * PARTS_N
    tiles, _, cut, strips, _ = state
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = N // BLOCK_N
    if unit < cut * PARTS:
        batch, tile_m, tile_n = grouped(tiles + unit // PARTS, tiles_m, tiles_n, band_m)
        part_m = unit % PARTS_M
        part_n = unit % PARTS // PARTS_M
    else:
        strip = (unit - cut * PARTS) // strips
        batch = strip // (tiles_m * PARTS_M)
        tile_m = strip // PARTS_M % tiles_m
        tile_n = tile_m * 0 + tiles_n
        part_m = strip % PARTS_M
        part_n = (unit - cut * PARTS) % strips
    row = tile_m * BLOCK_M + part_m * (BLOCK_M // PARTS_M)
    return batch, row, tile_n * BLOCK_N + part_n * (BLOCK_N // PARTS_N), M, 0, K


@triton.jit
def tail_chunk(unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m):
    """Part `unit % parts` of a tile after the whole ones: `part_k` of K.

    `state` begins with (whole tiles, units after them, parts, part_k).
    """
    parts, part_k = state[2], state[3]
    tile = state[0] + unit // parts
    batch, row, col, end, _, _ = whole_tile(tile, state, shape, BLOCK_M, BLOCK_N, band_m)
    first_k = unit % parts * part_k
    return batch, row, col, end, first_k, min(first_k + part_k, shape[2])


@triton.jit
def sized_tile(unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m):
    """Tile number `unit`, over all of K, of a product without a batch.

    `state` is (units, whole tiles, parts, part_k, tiles along M, tiles along N, divisors, place_args), so none are
    counted here. The divisors are those of `order.divided`, and that of the tiles after the whole ones.
    """
    tile_m, tile_n = divided(unit, state[4], state[5], band_m, state[6])
    return 0, tile_m * BLOCK_M, tile_n * BLOCK_N, shape[0], 0, shape[2]


@triton.jit
def sized_tile_of_batch(unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m):
    """The same of a batch. The last divisor is the number of a matrix's tiles."""
    batch = quotient(unit, state[6][3])
    tile = unit - batch * state[4] * state[5]
    _, row, col, end, first_k, last_k = sized_tile(tile, state, shape, BLOCK_M, BLOCK_N, band_m)
    return batch, row, col, end, first_k, last_k


@triton.jit
def sized_part(unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m):
    """The same, but units after the whole tiles are parts of tiles, `part_k` of K each; see `order.part_of`."""
    _, whole, _, part_k, tiles_m, tiles_n, divisors, _ = state
    part, cut_tile = part_of(tl.maximum(unit - whole, 0), tiles_m * tiles_n - whole, divisors[3])
    tile_m, tile_n = divided(tl.minimum(unit, whole) + cut_tile, tiles_m, tiles_n, band_m, divisors)
    first_k = part * part_k
    last_k = tl.where(unit < whole, shape[2], tl.minimum(first_k + part_k, shape[2]))
    return 0, tile_m * BLOCK_M, tile_n * BLOCK_N, shape[0], first_k, last_k


@triton.jit
def sized_part_of_cluster(unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m):
    """The same if all tiles are cut, and units are the parts of one tile, then those of the next."""
    _, _, parts, part_k, tiles_m, tiles_n, divisors, _ = state
    tile = quotient(unit, divisors[3])
    tile_m, tile_n = divided(tile, tiles_m, tiles_n, band_m, divisors)
    first_k = (unit - tile * parts) * part_k
    return 0, tile_m * BLOCK_M, tile_n * BLOCK_N, shape[0], first_k, tl.minimum(first_k + part_k, shape[2])


@triton.jit
def group_of(
    tile, offs, groups, M, BLOCK_M, SCAN: tl.constexpr, ALL: tl.constexpr, LEAST: tl.constexpr,
    KEEP: tl.constexpr = None, kept=None,
):  # fmt: skip
    """The group to which a row of tiles belongs, where groups of rows follow one another.

    Rows after the last group form one more group, number `groups`. A row of tiles after these has no rows.

    Args:
        tile: the number of the row of tiles. Each group begins with a new one.
        offs: where the ends of the groups are, which do not decrease.
        M: the end of all rows.
        SCAN: the number of groups that are examined together, a power of two.
        ALL: whether these are all groups, including the rows after the last one.
        LEAST: the rows of tiles of an empty group.
        KEEP: keeps the rows of tiles before each group, given `kept`, the groups, their number and these rows; or None.

    Returns:
        The group, its first row of tiles, its first row and its end; and how many rows of tiles there are.
    """
    # Two counts are in each number, so that warps exchange fewer sums.
    found = tl.cast(tile * 0, tl.int64)
    rows = found
    total = tile * 0
    for chunk in range(0, 1 if ALL else groups + 1, SCAN):
        group = chunk + numbered(SCAN)
        begins = tl.load(offs + group - 1, mask=(group > 0) & (group <= groups), other=0)
        ends = tl.load(offs + group, mask=group < groups, other=0)
        # So no row outside is touched, even if the ends are wrong.
        begins = tl.where(group > groups, M, tl.maximum(tl.minimum(begins, M), 0))
        ends = tl.where(group >= groups, M, tl.maximum(tl.minimum(ends, M), 0))
        tiles = tl.cdiv(tl.maximum(ends - begins, 0), BLOCK_M)
        if LEAST > 0:
            tiles = tl.where(group < groups, tl.maximum(tiles, LEAST), 0)
        before = total + tl.cumsum(tiles, 0) - tiles
        if KEEP is not None:
            KEEP(kept, group, groups, before)
        # At most one group of all is here.
        here = (before <= tile) & (tile < before + tiles)
        found += tl.sum(tl.where(here, (group + 1).to(tl.int64) << 32 | before, 0), 0)
        rows += tl.sum(tl.where(here, begins.to(tl.int64) << 32 | ends, 0), 0)
        total += tl.sum(tiles, 0)
    none = found == 0
    group = tl.where(none, groups + 1, (found >> 32).to(tl.int32) - 1)
    first = tl.where(none, tile, found.to(tl.int32))
    return group, first, (rows >> 32).to(tl.int32), rows.to(tl.int32), total


@triton.jit
def tile_of_rows(
    unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m, SCAN: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Tile number `unit` of groups of rows, group after group; see `group_of`.

    The batch is the group. A group's weight is read once, because its tiles are consecutive. `place_args` is
    (offs, groups). A unit beyond the last tile begins at the end of its rows.
    """
    M, N, K = shape
    offs, groups = state[2]
    tiles_n = tl.cdiv(N, BLOCK_N)
    group, first, begin, end, _ = group_of(unit // tiles_n, offs, groups, M, BLOCK_M, SCAN, ALL, 0)
    tiles_m = tl.maximum(tl.cdiv(end - begin, BLOCK_M), 1)
    tile_n = unit - first * tiles_n
    tile_m = tile_n * 0
    # Few rows make one row of tiles. Skipping the divisions of `banded` then saves 2 % of the time of short products.
    if tiles_m > 1:
        tile_m, tile_n = banded(tile_n, tiles_m, tiles_n, band_m)
    return group, begin + tile_m * BLOCK_M, tile_n * BLOCK_N, end, 0, K


@triton.jit
def range_of(batch, offs, K):
    """The beginning and the end of a matrix's range of K. They lie within K, even if the ends of the ranges do not."""
    begin = tl.maximum(tl.minimum(tl.load(offs + batch - 1, mask=batch > 0, other=0), K), 0)
    return begin, tl.maximum(tl.minimum(tl.load(offs + batch), K), begin)


@triton.jit
def tile_of_ranges(unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m):
    """Tile number `unit` of a batch whose matrices have consecutive ranges of K.

    `place_args` is (offs, groups), with the ends of the ranges.
    """
    offs = state[2][0]
    batch, row, col, end, _, K = whole_tile(unit, state, shape, BLOCK_M, BLOCK_N, band_m)
    first_k = tl.load(offs + batch - 1, mask=batch > 0, other=0)
    last_k = tl.load(offs + batch)
    return batch, row, col, end, tl.maximum(tl.minimum(first_k, K), 0), tl.minimum(last_k, K)


@triton.jit
def part_of_ranges(
    unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m, SCAN: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Part of a tile of such a batch: `part_k` of its matrix's range of K, or the rest of it; see `parts.of_range`.

    A range has at least one part. Units are the tiles of the first part, then those of the second, and so on, so that
    programs that start together load the same blocks. `state` is (tiles of a matrix, part_k, place_args). A unit
    beyond the last part begins at the end of its rows. If the ends are not in order, there can be too many parts. Then
    all units begin there, since a tile with a part that no program has would never be finished.
    """
    M, N, K = shape
    tiles, part_k = state[0], state[1]
    offs, groups = state[2]
    group, first, begin, end, parts = group_of(unit // tiles, offs, groups, K, part_k, SCAN, ALL, 1)
    tile_m, tile_n = banded(unit % tiles, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), band_m)
    row = tl.where((group < groups) & (parts <= tl.num_programs(0) // tiles), tile_m * BLOCK_M, M)
    first_k = begin + (unit // tiles - first) * part_k
    return group, row, tile_n * BLOCK_N, M, first_k, tl.minimum(first_k + part_k, end)


@triton.jit
def sized_tile_of_ranges(unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m):
    """As `sized_tile_of_batch`, of a batch whose matrices each have a range of K; `state` ends with `place_args`.

    The end that is returned is that of the range. An empty range has one step, after its end.
    """
    batch, row, col, _, _, K = sized_tile_of_batch(unit, state, shape, BLOCK_M, BLOCK_N, band_m)
    first_k, end = range_of(batch, state[7][0], K)
    return batch, row, col, end, first_k, tl.maximum(end, first_k + 1)
