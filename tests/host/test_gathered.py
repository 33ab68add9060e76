"""The groups of ranks whose rows are multiplied together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmery.distributed.gathered import others
from gemmery.distributed.rows import LEAST_PIECE


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
