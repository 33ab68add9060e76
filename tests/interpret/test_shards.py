"""Products whose rows are sharded over two ranks, whose kernels run in the interpreter and share files."""

import pytest
import torch
import triton
import triton.language as tl

from gemmery.epilogues.device import with_constants
from gemmery.kernels import place
from gemmery.kernels import shards as device
from tests import ranks as processes
from tests import shards

# One worker starts the processes.
pytestmark = pytest.mark.xdist_group("shards")
CONFIGS = (
    "64x32x32-g8-w4-s2-tile-pointer",
    "32x64x32-g8-w4-s2-tile-descriptor-swap",
    "16x48x32-g8-w4-s2-tile-pointer/2",
    "64x128x32-g1-w4-s2-tile-descriptor/2",
)


@pytest.fixture(scope="module")
def ranks():
    made = processes.Ranks()
    yield made
    made.stop()


@pytest.mark.parametrize("function", shards.PRODUCTS, ids=lambda x: x.__name__)
def test_products(ranks, function):
    ranks(function)


@pytest.mark.parametrize("config", CONFIGS)
def test_schedules(ranks, config):
    ranks(shards.configs, (config,))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", shards.KINDS)
def test_packed_weights(ranks, kind):
    ranks(shards.packed, kind)


@pytest.mark.slow
def test_a_rank_that_is_late(ranks):
    ranks(shards.late, 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("all_gather_linear", "linear_reduce_scatter"))
def test_a_rank_that_is_missing(name):
    # Its process group can't be used any more.
    made = processes.Ranks()
    try:
        seconds = made(shards.missing, 1.0, name)
    finally:
        made.stop()
    assert seconds[0] < 60


@triton.jit
def _walk(
    rows, cols, shape, units, PLACE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr
):  # fmt: skip
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        _, row, col, _, _, _ = PLACE(unit, (units, 0, ()), shape, BLOCK_M, BLOCK_N, BAND)
        tl.store(rows + unit, row)
        tl.store(cols + unit, col)


def _order(rank, count, programs, M, N):
    """The shards and the tiles in them that a rank visits, in order."""
    own = with_constants(device.owned_tile, PLACE=place.whole_tile, RANK=rank, RANKS=count)
    units = M // 32 * -(-N // 48)
    rows, cols = torch.zeros(2, units, dtype=torch.int32)
    _walk[(programs,)](rows, cols, (M, N, 64), units, PLACE=own, BLOCK_M=32, BLOCK_N=48, BAND=2)
    share = M // count
    return [(row // share, (row % share, col)) for row, col in zip(rows.tolist(), cols.tolist(), strict=True)]


@pytest.mark.parametrize("count", (2, 3, 8))
@pytest.mark.parametrize("programs", (1, 5, 12))
def test_order_of_owned_rows(count, programs):
    """Ranks visit each tile once, and no tile of their own before all others have sent theirs."""
    orders = [_order(rank, count, programs, 128 * count, 160) for rank in range(count)]
    for rank, order in enumerate(orders):
        assert len(set(order)) == len(order) == 16 * count
        own = [(i, tile) for i, (shard, tile) in enumerate(order) if shard == rank]
        for other in {*range(count)} - {rank}:
            sent = {tile: i for i, (shard, tile) in enumerate(orders[other]) if shard == rank}
            assert all(sent[tile] < i for i, tile in own)
