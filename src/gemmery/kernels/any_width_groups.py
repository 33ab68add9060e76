"""Groups of rows in tiles of any width; see `any_width`.

A program's next tile may be many groups ahead: with few rows, most groups are empty or have one row of tiles. So all
programs count the rows of tiles before each group once, and keep them in shared memory. The warp that places tiles then
finds a tile's group by bisection. A search in memory from group to group would take longer than the loads of a short
tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .any_width_order import got, put
from .order import banded, quotient

#: The number of groups of which the rows of tiles before are kept, a power of two; and 8-byte words of shared memory.
#: Of more groups, every second is kept, or every fourth, and so on.
MOST = gl.constexpr(512)
WORDS = gl.constexpr(256)


@gluon.jit
def shift_of(groups):
    """Groups whose number is a multiple of 2 to this power are kept."""
    shift = groups * 0
    while groups >> shift > MOST:
        shift += 1
    return shift


@gluon.jit
def keep(table, group, groups, before):
    """Keeps the rows of tiles before some groups, from the second one on, in the table; see `place.group_of`.

    The rows after the last group are one more group.
    """
    shift = shift_of(groups)
    entry = (group >> shift) - 1
    is_kept = (entry >= 0) & (entry + 1 << shift == group) & (group <= groups)
    put(table + 4 * entry, before, gl.where(is_kept, 1, 0))


@gluon.jit
def kept_before(table, tile, groups):
    """The last group whose number is kept, or 0, that does not begin after a row of tiles; and the rows before it."""
    shift = shift_of(groups)
    count = groups >> shift
    found = tile * 0
    before = tile * 0
    for i in gl.static_range(10):
        entry = found + (MOST >> i)
        value = got(table + 4 * (gl.minimum(entry, count) - 1))
        is_before = (entry <= count) & (value <= tile)
        found = gl.where(is_before, entry, found)
        before = gl.where(is_before, value, before)
    return found << shift, before


@gluon.jit
def end_of(group, offs, groups, M):
    """The end of a group's rows. It lies within all rows, even if the ends of groups do not."""
    end = gl.load(offs + group, mask=group < groups, other=M)
    return gl.maximum(gl.minimum(end, M), 0)


@gluon.jit
def next_tile_of_rows(unit, state, shape, BLOCK_M, BLOCK_N, band_m, known):
    """As `place.tile_of_rows`; `state` is that of `place.sized_tile`, with the divisors of `BLOCK_M` and of the tiles
    along N in the first and the last place, and then `place_args`.

    Rows after the last group have a range of K after that of all operands, of the same length. A unit beyond the last
    tile has an empty range.

    Args:
        known: the table, see `keep`; and of an earlier unit, or of this one, the group, the rows of tiles before it,
            its first row and its end, as `place.group_of` says.

    Returns: The place, and the same of this unit.
    """
    M, _, K = shape
    tiles_n, divisors = state[5], state[6]
    offs, groups = state[7]
    table, group, before, begin, end = known
    tile = quotient(unit, divisors[3])
    tiles = quotient(end - begin + BLOCK_M - 1, divisors[0])
    if (tile >= before + tiles) & (group < groups):
        group, before = kept_before(table, tile, groups)
        begin = gl.where(group > 0, end_of(gl.maximum(group - 1, 0), offs, groups, M), 0)
        end = gl.maximum(end_of(group, offs, groups, M), begin)
        tiles = quotient(end - begin + BLOCK_M - 1, divisors[0])
        # Groups that are not kept.
        while (tile >= before + tiles) & (group < groups):
            group, before, begin = group + 1, before + tiles, end
            end = gl.maximum(end_of(group, offs, groups, M), begin)
            tiles = quotient(end - begin + BLOCK_M - 1, divisors[0])
    tile_m, tile_n = banded(unit - before * tiles_n, gl.maximum(tiles, 1), tiles_n, band_m)
    first_k = gl.where(group < groups, 0, K)
    last_k = gl.where(unit < state[0], first_k + K, first_k)
    place = (group, begin + tile_m * BLOCK_M, tile_n * BLOCK_N, end, first_k, last_k)
    return place, (table, group, before, begin, end)
