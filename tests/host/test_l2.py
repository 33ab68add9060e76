"""The simulated L2: against a cache that is simulated block by block, and against sums done by hand."""

import itertools
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmery.lab.l2 import simulate
from gemmery.lab.tile_order import visits


def block_by_block(M, N, K, tile, order, group_size, items, programs, l2):
    """Requested bytes of A and B, and those read from memory, with a cache that holds blocks one by one.

    Blocks of the latest step are at the end; from the front, all that were last used in the same step go together.
    """
    bm, bn, bk = tile
    seen = visits(-(-M // bm), -(-N // bn), order, group_size).tolist()
    asked, read = [0, 0], [0, 0]
    cache = OrderedDict()  # block -> (bytes, the step in which it was last used)
    clock = itertools.count()
    for first in range(0, len(seen), programs):
        wave = seen[first : first + programs]
        for k in range(0, K, bk):
            now = next(clock)
            depth = min(bk, K - k)
            there = set(cache)
            for row, column in wave:
                sizes = min(bm, M - row * bm) * depth * items[0], min(bn, N - column * bn) * depth * items[1]
                for which, place in enumerate(((0, row, k), (1, column, k))):
                    asked[which] += sizes[which]
                    if place not in there:
                        read[which] += sizes[which]
                        there.add(place)
                    cache[place] = sizes[which], now
                    cache.move_to_end(place)
            while sum(size for size, _ in cache.values()) > l2:
                oldest = next(iter(cache.values()))[1]
                for place in [place for place, (_, used) in cache.items() if used == oldest]:
                    del cache[place]
    return asked, read


@given(
    st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(1, 20)),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 7)),
    st.sampled_from(("row", "column", "grouped")),
    st.integers(1, 5),
    st.sampled_from(((2, 2), (4, 1))),
    st.integers(1, 12),
    st.integers(0, 2000),
)
def test_it_is_an_lru_cache(sizes, tile, order, group_size, items, programs, l2):
    traffic = simulate(
        *sizes, tile=tile, order=order, group_size=group_size, itemsize_a=items[0], itemsize_b=items[1],
        programs=programs, l2=l2,
    )  # fmt: skip
    asked, read = block_by_block(*sizes, tile, order, group_size, items, programs, l2)
    assert [traffic.requested_a, traffic.requested_b] == asked
    assert [traffic.memory_a, traffic.memory_b] == read
    assert sum(traffic.wave_memory) == traffic.memory
    M, N, K = sizes
    assert (traffic.least_a, traffic.least_b) == (M * K * items[0], K * N * items[1])
    assert traffic.least_a <= traffic.memory_a <= traffic.requested_a
    assert traffic.least_b <= traffic.memory_b <= traffic.requested_b


def two_by_two(**options):
    """Two by two tiles of one element and two steps along K, one program: blocks of one byte."""
    sizes = {"tile": (1, 1, 1), "itemsize_a": 1, "itemsize_b": 1, "programs": 1}
    return simulate(2, 2, 2, order="row", **(sizes | options))


def test_without_a_cache_everything_comes_from_memory():
    # Four tiles, each with two blocks of A and two of B.
    traffic = two_by_two(l2=0)
    assert (traffic.requested, traffic.memory, traffic.hit_rate) == (16, 16, 0.0)
    assert traffic.wave_memory == (4, 4, 4, 4)


def test_a_small_cache_keeps_only_the_row_of_a():
    # The tiles are (0, 0), (0, 1), (1, 0) and (1, 1). The second and the fourth find their two blocks of A, behind
    # which no more than 4 bytes were used. Column 0 of B is wanted again by the third.
    traffic = two_by_two(l2=5)
    assert (traffic.memory_a, traffic.memory_b) == (4, 8)
    assert traffic.wave_memory == (4, 2, 4, 2)


def test_each_byte_of_cache_keeps_one_more_block_of_b():
    # Bytes from the last use of a block of B on, up to the next one:
    #   (column 0, step 0): row 0, columns 0 and 1, both steps of each:                                     6
    #   (column 0, step 1): of step 1 row 0, columns 0 and 1, of step 0 rows 0 and 1, columns 0 and 1:      7
    #   (column 1, step 0): rows 0 and 1, columns 0 and 1, both steps of each:                              8
    #   (column 1, step 1): of step 1 rows 0 and 1, columns 0 and 1, of step 0 row 1, columns 0 and 1:      7
    assert [two_by_two(l2=l2).memory_b for l2 in (5, 6, 7, 8)] == [8, 7, 5, 4]
    assert two_by_two(l2=8).memory == two_by_two(l2=8).least == 8


def test_programs_of_a_wave_share_blocks_without_a_cache():
    # All four at once: in each step two blocks of A and two of B, each for two programs.
    traffic = two_by_two(l2=0, programs=4)
    assert (traffic.requested, traffic.memory, traffic.hit_rate) == (16, 8, 0.5)
    assert (traffic.hit_rate_a, traffic.hit_rate_b) == (0.5, 0.5)


def test_ragged_blocks_count_what_they_have():
    # 3 by 5 by 7 in tiles of 2 by 4 by 4: 2 by 2 tiles, each row of tiles needs all of its A twice.
    traffic = simulate(3, 5, 7, tile=(2, 4, 4), programs=1, l2=0)
    assert (traffic.requested_a, traffic.requested_b) == (2 * 3 * 7 * 2, 2 * 7 * 5 * 2)


def test_bands_read_less_than_rows_where_the_cache_is_small():
    row, grouped = (
        simulate(8192, 8192, 8192, tile=(128, 256, 64), order=order, group_size=16)
        for order in ("row", "grouped")
    )
    assert grouped.requested == row.requested
    assert grouped.memory < 0.6 * row.memory


def test_what_is_wrong_is_said():
    for wrong, said in (
        ({"tile": (0, 1, 1)}, "block_m is 0"),
        ({"programs": 0}, "programs is 0"),
        ({"l2": -1}, "l2 -1"),
        ({"order": "diagonal"}, "row, column, grouped"),
        ({"group_size": 0}, "group_size is 0"),
    ):
        with pytest.raises(ValueError, match=said):
            simulate(4, 4, 4, **({"tile": (1, 1, 1)} | wrong))
