"""Products whose rows are sharded over two GPUs; see tests/shards.py."""

import pytest
import torch

from tests import ranks as processes
from tests import shards
from tests.gpu.common import DRY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DRY and torch.cuda.device_count() < 2, reason="there are no two GPUs"),
]
HERE = processes.Place() if DRY else processes.Place("cuda")
CONFIGS = (
    "128x128x64-g0-w8-s4-cooperative-descriptor",
    "128x128x64-g0-w8-s4-pingpong-descriptor",
    "64x64x64-g0-w4-s4-cooperative-descriptor-k2",
    "128x64x64-g0-w4-s4-cooperative-descriptor-swap",
    "64x64x64-g8-w4-s4-tile-descriptor",
    "64x64x64-g8-w4-s4-tile-pointer-k2",
)


@pytest.fixture(scope="module")
def ranks():
    made = processes.Ranks(HERE)
    yield made
    made.stop()


@pytest.mark.parametrize("function", shards.PRODUCTS, ids=lambda x: x.__name__)
def test_products(ranks, function):
    ranks(function)


@pytest.mark.skipif(DRY, reason="Gluon's kernels need a GPU")
@pytest.mark.parametrize("config", CONFIGS)
def test_schedules(ranks, config):
    ranks(shards.configs, (config,), 128)


@pytest.mark.parametrize("kind", shards.KINDS)
def test_packed_weights(ranks, kind):
    ranks(shards.packed, kind)


def test_a_rank_that_is_late(ranks):
    ranks(shards.late, 1.0)


@pytest.mark.parametrize("name", ["all_gather_linear", "linear_reduce_scatter"])
def test_a_rank_that_is_missing(name):
    made = processes.Ranks(HERE)
    try:
        seconds = made(shards.missing, 3.0, name)
    finally:
        made.stop()
    assert seconds[0] < 60
