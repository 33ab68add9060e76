"""Products that are summed over two GPUs in their kernel; see tests/summed.py."""

import pytest
import torch

from tests import ranks as processes
from tests import summed
from tests.gpu.common import DRY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DRY and torch.cuda.device_count() < 2, reason="there are no two GPUs"),
]
HERE = processes.Place() if DRY else processes.Place("cuda")
CONFIGS = (
    "16x64x64-g0-w4-s12-cooperative-descriptor-swap",
    "64x64x64-g0-w4-s12-cooperative-descriptor-k2-swap",
    "32x64x64-g0-w4-s8-cooperative-descriptor-swap",
    "64x64x64-g0-w4-s4-cooperative-descriptor",
    "16x64x64-g8-w4-s4-tile-descriptor-k2-swap",
    "16x16x64-g8-w8-s2-tile-pointer",
    "64x128x64-g8-w8-s3-tile-pointer/2",
)


@pytest.fixture(scope="module")
def ranks():
    made = processes.Ranks(HERE)
    yield made
    made.stop()


@pytest.mark.parametrize("function", summed.PRODUCTS, ids=lambda x: x.__name__)
def test_products(ranks, function):
    ranks(function)


@pytest.mark.skipif(DRY, reason="Gluon's kernels need a GPU")
@pytest.mark.parametrize("config", CONFIGS)
def test_schedules(ranks, config):
    # Tiles of any width must not overlap here.
    ranks(summed.configs, (config,), 64 if "cooperative" in config else 72)


@pytest.mark.parametrize("kind", summed.KINDS)
def test_packed_weights(ranks, kind):
    ranks(summed.packed, kind)


def test_a_rank_that_is_late(ranks):
    ranks(summed.late, 1.0)


@pytest.mark.skipif(DRY, reason="CUDA graphs need a GPU")
def test_graphs(ranks):
    ranks(summed.graphs)


def test_a_rank_that_is_missing():
    made = processes.Ranks(HERE)
    try:
        seconds = made(summed.missing, 1.0)
    finally:
        made.stop()
    assert seconds[0] < 10


def test_a_call_that_fails_on_one_rank():
    made = processes.Ranks(HERE)
    try:
        made(summed.failing)
    finally:
        made.stop()
