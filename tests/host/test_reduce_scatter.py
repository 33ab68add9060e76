"""The pieces in which the rows of another rank are computed and sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmery.distributed.reduce_scatter import BALANCED_DEPTH, LEAST_PIECE, ROW_GRAIN, pieces


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "want"),
    [
        (2048, 8192, 4096, [1024, 1024]),
        (8192, 8192, 4096, [4096, 2048, 1024, 1024]),
        (2048, 8192, 1024, [1024, 512, 512]),
        (2048, 8192, 14336, [2048]),
        (512, 8192, 4096, [512]),
    ],
)
def test_pieces_of_products(rows, columns, depth, want):
    """A deep product is cut less often, because its first tiles take as long as a larger piece is sent."""
    assert [count for _, count in pieces(rows, columns, depth)] == want


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 20_000))
def test_pieces_are_all_rows_and_fill_a_gpu(rows, columns, depth):
    """All but the last have half of what remained, and what is left is short, or can't be cut."""
    end = 0
    *cut, (last, left) = pieces(rows, columns, depth)
    for first, count in cut:
        assert first == end
        assert count == (rows - first) // 2 // ROW_GRAIN * ROW_GRAIN
        assert count * columns >= LEAST_PIECE
        end += count
    assert last == end
    assert last + left == rows
    assert (
        left * columns <= LEAST_PIECE * depth / BALANCED_DEPTH
        or left // 2 // ROW_GRAIN * ROW_GRAIN * columns < LEAST_PIECE
    )
