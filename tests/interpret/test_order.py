"""Tile orders: every tile of every matrix once, and one matrix after the other."""

import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from gemmery.kernels import order


@triton.jit
def _record(out, tiles_m, tiles_n, ORDER: tl.constexpr, GROUP: tl.constexpr):
    tile = tl.program_id(0)
    batch, row, col = ORDER(tile, tiles_m, tiles_n, GROUP)
    tl.store(out + 3 * tile, batch)
    tl.store(out + 3 * tile + 1, row)
    tl.store(out + 3 * tile + 2, col)


def visits(batch, tiles_m, tiles_n, group):
    """(batch, row, column) of every tile, in the order of their numbers."""
    out = torch.full((batch * tiles_m * tiles_n, 3), -1, dtype=torch.int32)
    _record[(len(out),)](out, tiles_m, tiles_n, order.grouped, group)
    return [tuple(visit) for visit in out.tolist()]


extents = st.integers(1, 7)


@given(st.integers(1, 3), extents, extents, st.integers(1, 12))
def test_every_tile_once(batch, tiles_m, tiles_n, group):
    seen = visits(batch, tiles_m, tiles_n, group)
    assert sorted(seen) == [(z, m, n) for z in range(batch) for m in range(tiles_m) for n in range(tiles_n)]
    assert [visit[0] for visit in seen] == sorted(visit[0] for visit in seen)


@given(extents, extents, st.integers(1, 12))
def test_bands_of_group_rows(tiles_m, tiles_n, group):
    """A band is finished before the next begins, and inside it a column before the next column."""
    seen = [(m // group, n, m) for _, m, n in visits(1, tiles_m, tiles_n, group)]
    assert seen == sorted(seen)


def test_a_group_of_one_is_row_major():
    assert visits(1, 3, 4, 1) == [(0, m, n) for m in range(3) for n in range(4)]
