"""Products whose rows are sharded over two ranks, whose kernels run in the interpreter and share files."""

import pytest

from tests import ranks as processes
from tests import shards

# One worker starts the processes.
pytestmark = pytest.mark.xdist_group("shards")
CONFIGS = (
    "64x32x32-g8-w4-s2-tile-pointer",
    "32x64x32-g8-w4-s2-tile-descriptor-k3-swap",
    "16x48x32-g8-w4-s2-tile-pointer/2",
    "64x128x32-g1-w4-s2-tile-descriptor/2",
)


@pytest.fixture(scope="module")
def ranks():
    made = processes.Ranks()
    yield made
    made.stop()


@pytest.mark.slow
@pytest.mark.parametrize("function", shards.PRODUCTS, ids=lambda x: x.__name__)
def test_products(ranks, function):
    ranks(function)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", CONFIGS)
def test_schedules(ranks, config):
    ranks(shards.configs, (config,))


@pytest.mark.slow
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
