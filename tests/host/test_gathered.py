"""The rows that are multiplied together where the rows of all ranks are gathered."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmery.distributed.gathered import LEAST_COLUMNS, moved_rows, others, ranges
from gemmery.distributed.rows import LEAST_PIECE, TILE


@pytest.mark.parametrize(
    ("rank", "ranks", "elements", "want"),
    [
        (0, 2, 1, [(1, 2)]),
        (1, 2, LEAST_PIECE, [(0, 1)]),
        (1, 4, LEAST_PIECE, [(2, 3), (3, 4), (0, 1)]),
        (1, 4, LEAST_PIECE // 2, [(2, 4), (0, 1)]),
        (2, 8, LEAST_PIECE // 3, [(3, 6), (6, 8), (0, 2)]),
        (7, 8, 1, [(0, 7)]),
    ],
)
def test_groups_of_ranks(rank, ranks, elements, want):
    assert others(rank, ranks, elements) == want


@given(st.integers(2, 8), st.integers(0, 7), st.integers(1, 2 * LEAST_PIECE))
def test_all_others_come_once_in_the_order_of_their_arrival(ranks, rank, elements):
    rank %= ranks
    groups = others(rank, ranks, elements)
    assert [other for first, last in groups for other in range(first, last)] == [
        (rank + step) % ranks for step in range(1, ranks)
    ]
    for first, last in groups[:-1]:
        assert (last - first) * elements >= LEAST_PIECE or last == ranks


@pytest.mark.parametrize(
    ("count", "columns", "want"),
    [
        # 9.5 and 10 waves instead of 10 and 10.
        (8192, 5120, 256),
        # 2 and 3 waves instead of 2.5 and 2.5, whose last tiles are cut.
        (2048, 5120, 384),
        # 5 and 5 waves.
        (4096, 5120, 0),
        # Fewer than two waves.
        (1024, 5120, 0),
        (0, 8192, 0),
        # 4.5 and 5 waves instead of 5 and 5, but the rows may take longer to arrive.
        (8192, 2560, 0),
    ],
)
def test_moved_rows(count, columns, want):
    assert moved_rows(count, columns, 132) == want


@given(st.integers(0, 1 << 15), st.integers(1, 1 << 15), st.integers(1, 200))
def test_rows_are_moved_only_where_waves_are_saved(count, columns, sms):
    def waves(rows):
        whole, rest = divmod(-(-rows // TILE[0]) * -(-columns // TILE[1]), sms)
        return whole + (0.55 if 0 < rest <= sms / 2 else rest > 0)

    def both(moved):
        return waves(count - moved) + waves(count + moved)

    moved = moved_rows(count, columns, sms)
    assert moved % TILE[0] == 0
    assert 5 * moved <= count
    assert not moved or both(moved) < both(0)
    if waves(count) > 2 and columns >= LEAST_COLUMNS:
        for other in range(0, count // 5 + 1, TILE[0]):
            assert both(other) > both(moved) - 1e-6 + 0.01 * (other < moved)


@given(
    st.integers(2, 8),
    st.integers(0, 7),
    st.integers(0, 1 << 15),
    st.integers(1, 1 << 14),
    st.sampled_from([0, 132]),
)
def test_ranges_have_each_row_once(ranks, rank, count, columns, sms):
    rank %= ranks
    (first, last), *rest = ranges(rank, ranks, count, columns, sms)
    assert rank * count <= first <= last <= (rank + 1) * count
    assert last - first == count - (moved_rows(count, columns, sms) if ranks == 2 and sms else 0)
    found = sorted([(first, last), *rest])
    assert [end for _, end in found] == [begin for begin, _ in found[1:]] + [ranks * count]
    assert found[0][0] == 0
