"""The places of tiles in groups of rows, one unit after another."""

import itertools
import types

import pytest

from gemmery.kernels import order, place

BLOCK_M, BLOCK_N, COLUMNS, K = 16, 32, 96, 40


def next_tile_of_rows(offs):
    """The device function, which runs on the host: `offs` is a list, and a divisor is a number."""

    def load(at, mask, other):
        return offs[at] if mask else other

    tl = types.SimpleNamespace(
        load=load, where=lambda condition, x, y: x if condition else y, maximum=max, minimum=min,
        static_range=range, int32=int,
    )  # fmt: skip
    names = {"tl": tl, "quotient": lambda x, divisor: x // divisor, "AHEAD": place.AHEAD.value}
    names["banded"] = types.FunctionType(order.banded.fn.__code__, {"min": min})
    return types.FunctionType(place.next_tile_of_rows.fn.__code__, names)


@pytest.mark.parametrize(
    "counts",
    [
        [40, 1, 16, 0, 17],
        [5, *[0] * 29, 3, *[0] * 30, 18],
        [*[0] * 9, 70, *[0] * 8, 1, *[0] * 7],
        [0] * 20,
        [33],
    ],
)
@pytest.mark.parametrize("programs", [1, 4])
@pytest.mark.parametrize("rest", [0, 21])
def test_units_find_their_groups_one_after_another(counts, programs, rest):
    offs, tiles_n = list(itertools.accumulate(counts)), COLUMNS // BLOCK_N
    groups, M = len(counts), offs[-1] + rest
    # The rows after the last group have a range of K after that of the operands.
    expected = [
        (group, row, BLOCK_N * column, end, K * (group == groups), K * (1 + (group == groups)))
        for group, (begin, end) in enumerate(itertools.pairwise([0, *offs, M]))
        for column, row in itertools.product(range(tiles_n), range(begin, end, BLOCK_M))
    ]
    units, following = len(expected), next_tile_of_rows(offs)
    # A unit beyond the last tile has nothing to load.
    (*_, first_k, last_k), _ = following(
        units, (units, *[None] * 4, tiles_n, (BLOCK_M, None, None, tiles_n), (0, groups)), (M, COLUMNS, K), BLOCK_M,
        BLOCK_N, M + 1, (0, 0, 0, offs[0]),
    )  # fmt: skip
    assert first_k == last_k
    state = (units, units, 1, 0, 0, tiles_n, (BLOCK_M, None, None, tiles_n), (0, groups))
    found = {}
    for first in range(min(programs, units)):
        known = (0, 0, 0, offs[0])
        for unit in range(first, units, programs):
            found[unit], known = following(unit, state, (M, COLUMNS, K), BLOCK_M, BLOCK_N, M, known)
    assert [found[unit] for unit in range(units)] == expected
