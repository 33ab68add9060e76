"""Products that are summed over two ranks, whose kernels run in the interpreter and share files."""

import pytest

from tests import ranks as processes
from tests import summed

# One worker starts the processes.
pytestmark = pytest.mark.xdist_group("all-reduce")
CONFIGS = (
    "16x32x32-g8-w4-s2-tile-pointer",
    "16x64x32-g8-w4-s2-tile-descriptor-k3-swap",
    "32x48x32-g8-w4-s2-tile-pointer/2",
    "128x128x32-g8-w4-s2-tile-pointer",
    "64x128x32-g8-w4-s2-tile-pointer",
    "512x16x32-g8-w8-s2-tile-pointer",
)


@pytest.fixture(scope="module")
def ranks():
    made = processes.Ranks()
    yield made
    made.stop()


@pytest.mark.slow
@pytest.mark.parametrize("function", summed.PRODUCTS, ids=lambda x: x.__name__)
def test_products(ranks, function):
    ranks(function)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("config", CONFIGS)
def test_schedules(ranks, config):
    ranks(summed.configs, (config,))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", summed.KINDS)
def test_packed_weights(ranks, kind):
    ranks(summed.packed, kind)


@pytest.mark.slow
def test_a_rank_that_is_late(ranks):
    ranks(summed.late, 0.5)


@pytest.mark.slow
def test_a_rank_that_is_missing():
    # Its process group can't be used any more.
    made = processes.Ranks()
    try:
        seconds = made(summed.missing, 1.0)
    finally:
        made.stop()
    assert seconds[0] < 60


@pytest.mark.slow
def test_a_call_that_fails_on_one_rank():
    made = processes.Ranks()
    try:
        made(summed.failing)
    finally:
        made.stop()
