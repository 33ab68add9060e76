"""The order of the ranges of K in tiles of any width, and of the tiles in programs; see `any_width`.

A tile is as long as its range. If tiles of uneven ranges were dealt out range after range, some programs would get
more steps than others. So they are dealt out from the longest range to the shortest, and in every second round from
the last program to the first: a program that gets more in one round gets less in the next. Longest first is Graham's
rule (Bounds on multiprocessing timing anomalies, 1969).

If each range has many tiles, all programs get about the same number of them, and the order stays as it is.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import hopper

from .order import quotient
from .rings import barrier

#: The number of ranges up to which they are put into order, and of 8-byte words of shared memory for them.
MOST = gl.constexpr(512)
WORDS = gl.constexpr(256)
#: Rounds of all programs that a range's tiles take where ranges are not put into order.
ROUNDS = gl.constexpr(2)
#: Ranges that each is compared with at a time, by one thread.
EACH = gl.constexpr(32)


@builtin
def put(at, value, is_stored, _semantic=None):
    """Stores numbers in shared memory, each at its own address, where `is_stored` is 1 and not 0."""
    gl.inline_asm_elementwise(
        "{ .reg .pred stored; setp.ne.s32 stored, $3, 0; @stored st.shared.b32 [$1], $2; mov.b32 $0, 0; }", "=r,r,r,r",
        [at, value, is_stored], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@builtin
def got(at, _semantic=None):
    """A number from shared memory."""
    return gl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic
    )


@gluon.jit
def lengths_of(ranges, offs, count, K):
    """The lengths of some ranges, and -1 if there is none."""
    begins = gl.load(offs + ranges - 1, mask=(ranges > 0) & (ranges < count), other=0)
    ends = gl.load(offs + ranges, mask=ranges < count, other=0)
    begins, ends = gl.maximum(gl.minimum(begins, K), 0), gl.minimum(ends, K)
    return gl.where(ranges < count, gl.maximum(ends - begins, 0), -1)


@gluon.jit
def is_ordered(tiles, count):
    """Whether ranges with this number of tiles each are put into order."""
    return (count <= MOST) & (tiles < ROUNDS * gl.num_programs(0))


@gluon.jit
def put_in_order(table, lengths, offs, count, K, tiles):
    """Writes the numbers of all ranges to a table in shared memory, from the longest to the shortest.

    Each thread computes the lengths of a few ranges from their ends in memory. It compares them with those of all
    ranges, which are in shared memory by then.

    Args:
        table: its address.
        lengths: the address of memory for `MOST` lengths, which is free again afterwards, also for TMA.
        offs, count: where the ends of the ranges are, and how many.
        tiles: of a range.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, EACH], [32, 1], [4, 1], [1, 0])
    if is_ordered(tiles, count):
        for first in range(0, count, 128):
            own = first + gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
            put(lengths + 4 * own, lengths_of(own, offs, count, K), 1)
        barrier()
        for first in range(0, count, 128):
            own = first + gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
            own_length = got(lengths + 4 * own)
            place = gl.zeros([128], gl.int32, gl.SliceLayout(1, LAYOUT))
            for start in range(0, count, EACH):
                others = start + gl.arange(0, EACH, gl.SliceLayout(0, LAYOUT))
                length = gl.expand_dims(got(lengths + 4 * others), 0)
                known = gl.expand_dims(own_length, 1)
                is_before = gl.expand_dims(others, 0) < gl.expand_dims(own, 1)
                longer = (length > known) | ((length == known) & is_before)
                place += gl.sum(gl.where(longer, 1, 0), 1)
            put(table + 4 * place, own, gl.where(own < count, 1, 0))
        hopper.fence_async_shared()
        barrier()


@gluon.jit
def in_order(unit, state, table):
    """The number of the unit's tile among the tiles of all ranges, which are counted range after range.

    Args:
        state: as `place.sized_tile_of_batch` takes it.
    """
    tiles = state[4] * state[5]
    if is_ordered(tiles, state[7][1]):
        programs = gl.num_programs(0)
        turn = unit // programs
        own = unit - turn * programs
        reverses = (turn % 2 == 1) & ((turn + 1) * programs <= state[0])
        unit = gl.where(reverses, turn * programs + programs - 1 - own, unit)
        place = quotient(unit, state[6][3])
        unit += (got(table + 4 * place) - place) * tiles
    return unit
