"""Clusters of CTAs: right at ragged sizes, with every epilogue and layout, and the same bits every time."""

import pytest
import torch

import gemmery
from gemmery import devices
from gemmery.schedules.cluster import CLUSTER
from gemmery.select.shapes import problem_of
from gemmery.select.space import space_of
from tests.gpu.common import DRY, LAYOUTS, assert_product, matrix, operands, values

H200 = devices.TABLE["NVIDIA H200"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not CLUSTER.available(), reason=f"clusters need Triton {' or '.join(CLUSTER.versions)}"
    ),
    pytest.mark.skipif(
        DRY or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="clusters need a GPU of sm_90",
    ),
]

CONFIGS = [
    config
    for config in space_of(problem_of(256, 4096, 4096, device=H200)).configs
    if config.schedule == "cluster"
]
#: Rows that end within a CTA's, within a tile, with a whole tile, and with one row; columns and steps that end within.
SIZES = (
    (65, 5000, 1000),
    (100, 4104, 4104),
    (256, 8192, 512),
    (257, 5000, 4104),
    (300, 20000, 1000),
    (511, 2056, 8192),
)
TIMES = 20


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_right_and_the_same_bits_every_time(config, size):
    a, b = operands(*size, "NT", torch.bfloat16)
    first = gemmery.matmul(a, b, config=config)
    assert_product(first, a, b)
    for _ in range(TIMES):
        out = torch.full_like(first, float("nan"))
        assert torch.equal(gemmery.matmul(a, b, out=out, config=config), first)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(config, layout):
    a, b = operands(264, 5000, 4104, layout, torch.float16)
    assert_product(gemmery.matmul(a, b, config=config), a, b)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_row_is_added(config):
    a, b = operands(257, 5000, 4104, "NT", torch.bfloat16)
    bias = values((5000,), torch.bfloat16)
    got = gemmery.matmul(a, b, bias=bias, config=config).double()
    want = a.double() @ b.double() + bias.double()
    assert ((got - want).norm() / want.norm()).item() < 2**-8


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("rows", (100, 257))
def test_a_matrix_is_added_in_place(config, rows):
    """No row may be added twice, though clusters may compute rows twice."""
    a, b = operands(rows, 5000, 4104, "NT", torch.bfloat16)
    added = matrix(rows, 5000, torch.bfloat16)
    want = 1.5 * (a.double() @ b.double()) + 0.5 * added.double()
    apart = gemmery.addmm(added, a, b, alpha=1.5, beta=0.5, config=config)
    assert ((apart.double() - want).norm() / want.norm()).item() < 2**-8
    gemmery.addmm(added, a, b, alpha=1.5, beta=0.5, out=added, config=config)
    assert torch.equal(added, apart)


@pytest.mark.parametrize("config", [config for config in CONFIGS if config.split_k == 2], ids=str)
def test_graphs_and_streams(config):
    a, b = operands(128, 4096, 14336, "NT", torch.bfloat16)
    out = gemmery.matmul(a, b, config=config)
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemmery.matmul(a, b, out=out, config=config)
    beside = torch.cuda.Stream()
    for _ in range(TIMES):
        out.zero_()
        beside.wait_stream(torch.cuda.current_stream())
        graph.replay()
        with torch.cuda.stream(beside):
            other = gemmery.matmul(a, b, config=config)
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        assert torch.equal(other, expected)


def test_the_short_way_is_taken():
    a, b = operands(200, 4096, 4096, "NT", torch.bfloat16)
    plan = gemmery.plan(a, b, config=CONFIGS[0])
    assert plan.direct is not None
    out = torch.empty(200, 4096, dtype=torch.bfloat16, device=a.device)
    assert_product(plan(a, b, out), a, b)


@pytest.mark.parametrize("rows", (65, 128, 256, 500))
def test_what_is_chosen_is_right(rows):
    a, b = operands(rows, 6144, 4096, "NT", torch.bfloat16)
    assert_product(gemmery.matmul(a, b), a, b)
