"""Tiles that are cut along K: the same bits every time, beside other streams, and in graphs."""

import pytest
import torch

import gemmery
from tests.gpu.common import DEVICE, DRY, assert_product, matrix, size

pytestmark = pytest.mark.gpu

CONFIGS = (
    "16x64x128-g8-w4-s3-tile-descriptor-k8-swap",
    "64x64x64-g8-w4-s4-tile-descriptor-k3",
    "128x128x64-g8-w8-s4-tile-descriptor-k5",
    "128x256x64-g8-w8-s4-tile-descriptor/2-k2",
    "64x64x64-g8-w4-s3-tile-pointer-k4",
)
TIMES = 3 if DRY else 200


def operands():
    a, b = matrix(size(200), size(4096), torch.bfloat16), matrix(size(4096), size(1000), torch.bfloat16, "T")
    return a, b


@pytest.mark.parametrize("config", CONFIGS)
def test_the_same_bits_every_time(config):
    a, b = operands()
    first = gemmery.matmul(a, b, config=config)
    assert_product(first, a, b)
    for _ in range(TIMES):
        assert torch.equal(gemmery.matmul(a, b, config=config), first)


@pytest.mark.skipif(DRY, reason="streams and graphs are the GPU's")
@pytest.mark.parametrize("config", CONFIGS)
def test_streams_beside_each_other(config):
    """Each stream has a workspace of its own; problems of other sizes share it in turn."""
    a, b = operands()
    small = a[:16]
    expected = gemmery.matmul(a, b, config=config), gemmery.matmul(small, b, config=config)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for _ in range(TIMES // 4):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append((gemmery.matmul(a, b, config=config), gemmery.matmul(small, b, config=config)))
    torch.cuda.synchronize()
    for pair in results:
        assert torch.equal(pair[0], expected[0])
        assert torch.equal(pair[1], expected[1])


@pytest.mark.skipif(DRY, reason="streams and graphs are the GPU's")
@pytest.mark.parametrize("config", CONFIGS)
def test_graphs_own_their_workspace(config):
    """Two graphs replayed on two streams at once, with eager launches beside them."""
    a, b = operands()
    expected = gemmery.matmul(a, b, config=config)
    graphs, outs = [], []
    for _ in range(2):
        out, graph = torch.empty_like(expected), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                gemmery.matmul(a, b, out=out, config=config)
        graphs.append(graph)
        outs.append(out)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(TIMES // 4):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = gemmery.matmul(a, b, config=config)
    torch.cuda.synchronize()
    assert torch.equal(eager, expected)
    for out in outs:
        assert torch.equal(out, expected)


@pytest.mark.skipif(DRY, reason="the device's own cost table decides")
@pytest.mark.parametrize("shape", ((4095, 4097, 1029), (1023, 1025, 2051)))
def test_odd_sizes_are_copied(shape):
    m, n, k = shape
    a = torch.randn(m, k, device=DEVICE).to(torch.bfloat16)
    b = torch.randn(n, k, device=DEVICE).to(torch.bfloat16).t()
    assert gemmery.plan(a, b).copies == ("a", "b")
    result = gemmery.matmul(a, b)
    assert_product(result, a, b)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(result)
    with torch.cuda.graph(graph):
        gemmery.matmul(a, b, out=out)
    graph.replay()
    assert torch.equal(out, result)
