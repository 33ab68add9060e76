"""The places of tiles in groups of rows, one unit after another."""

import itertools
import types

import numpy as np
import pytest

from gemmery.kernels import any_width_groups, order, place

BLOCK_M, BLOCK_N, COLUMNS, K = 16, 32, 96, 40
#: Where the table begins, and a number that is not in it.
TABLE, NOTHING = 8, -7


class Numbers(np.ndarray):
    """Numbers of the device."""

    def to(self, dtype):
        return self.astype(dtype)

    def __iadd__(self, other):
        return self + other


def numbers(values, dtype=np.int64):
    return np.asarray(values, dtype).view(Numbers)


class Device:
    """The device functions, which run on the host with shared memory: `offs` is a list, and a divisor is a number."""

    def __init__(self, offs):
        self.offs, self.memory = np.asarray(offs), np.full(any_width_groups.MOST.value + TABLE // 4, NOTHING)
        language = types.SimpleNamespace(
            load=self.load, where=lambda condition, x, y: numbers(np.where(condition, x, y)), maximum=np.maximum,
            minimum=np.minimum, static_range=range, int32=np.int32, int64=np.int64, cast=numbers, cumsum=np.cumsum,
            sum=lambda x, axis: numbers(np.sum(x)), cdiv=lambda x, y: -(-x // y),
        )  # fmt: skip
        self.names = {
            "tl": language, "gl": language, "MOST": any_width_groups.MOST.value, "put": self.put, "got": self.got,
            "quotient": lambda x, divisor: x // divisor, "numbered": lambda count: numbers(range(count)),
        }  # fmt: skip
        self.names["banded"] = types.FunctionType(order.banded.fn.__code__, {"min": min})
        functions = [getattr(any_width_groups, name) for name in FUNCTIONS] + [place.group_of]
        for function in functions:
            name = function.fn.__name__
            self.names[name] = types.FunctionType(
                function.fn.__code__, self.names, name, function.fn.__defaults__
            )

    def load(self, at, mask, other):
        return np.where(mask, self.offs[np.clip(at, 0, len(self.offs) - 1)], other)

    def put(self, at, value, is_stored):
        at, value, is_stored = np.broadcast_arrays(at, value, is_stored)
        self.memory[at[is_stored == 1] // 4] = value[is_stored == 1]

    def got(self, at):
        assert self.memory[at // 4] != NOTHING
        return self.memory[at // 4]

    def first(self, unit, tiles_n, groups, M, scan):
        """What `known` is for a program's first unit, and the rows of tiles."""
        group_of, keep = self.names["group_of"], self.names["keep"]
        *found, rows = group_of(unit // tiles_n, 0, groups, M, BLOCK_M, scan, groups < scan, 0, keep, TABLE)
        return (TABLE, *map(int, found)), int(rows)


FUNCTIONS = ("shift_of", "keep", "kept_before", "end_of", "next_tile_of_rows")
COUNTS = [
    [40, 1, 16, 0, 17],
    [5, *[0] * 29, 3, *[0] * 30, 18],
    [*[0] * 9, 70, *[0] * 8, 1, *[0] * 7],
    [0] * 20,
    [33],
    [3, 0] * 256,
    [0, *[1, 20, 0, 0, 0] * 260],
]


@pytest.mark.parametrize("counts", COUNTS, ids=len)
@pytest.mark.parametrize("programs", [1, 4, 132])
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
    device, units = Device(offs), len(expected)
    following = device.names["next_tile_of_rows"]
    state = (units, units, 1, 0, 0, tiles_n, (BLOCK_M, None, None, tiles_n), (0, groups))
    given = state, (M, COLUMNS, K), BLOCK_M, BLOCK_N, M + 1
    found = {}
    for first in range(min(programs, units)):
        known, rows = device.first(first, tiles_n, groups, M, scan=128)
        assert rows * tiles_n == units
        for unit in range(first, units, programs):
            found[unit], known = following(unit, *given, known)
    assert [tuple(map(int, found[unit])) for unit in range(units)] == expected
    # A unit beyond the last tile has nothing to load.
    known, _ = device.first(units, tiles_n, groups, M, scan=128)
    (*_, first_k, last_k), _ = following(units, *given, known)
    assert first_k == last_k
