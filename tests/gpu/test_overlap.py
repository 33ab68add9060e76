"""A launch that begins before earlier ones have ended sees what they write, and overwrites nothing that they still read."""

import pytest
import torch

import gemmery
from gemmery import moe
from tests.gpu.common import needs_cuda, size, values

pytestmark = [pytest.mark.gpu, needs_cuda]

BF16 = torch.bfloat16
#: Links of a chain. Each reads what the one before has written, and overwrites what that one has read.
LINKS = 40


def scaled(*shape):
    """Numbers with which a product is about as large as its operand."""
    return values(shape, BF16) * shape[-1] ** -0.5


def dense(rows, width):
    weights = [scaled(width, width) for _ in range(3)]
    return lambda i, x, out: gemmery.linear(x, weights[i % 3], out=out)


def packed(rows, width):
    weights = [gemmery.quantize(scaled(width, width), "int4") for _ in range(2)]
    return lambda i, x, out: gemmery.linear(x, weights[i % 2], out=out)


def mixed(rows, width):
    """Products of several kernels, and torch's operators between some of them."""
    weight, narrow = scaled(width, width), scaled(width, width + 8)[:, :width]
    words = gemmery.quantize(scaled(width, width), "int8")

    def link(i, x, out):
        if i % 5 == 3:
            return torch.mul(x, 1.0625, out=out)
        return gemmery.linear(x, (weight, narrow, words)[i % 3], out=out)

    return link


def quantized(rows, width):
    weight = gemmery.quantize_activations(scaled(width, width), "e4m3")

    def link(i, x, out):
        return gemmery.scaled_matmul(gemmery.quantize_activations(x, "e4m3"), weight, out=out)

    return link


def routed(rows, width):
    """Blocks of experts: a routing, two products and a sum each."""
    experts, k = 8, 2
    up, down = scaled(experts, 2 * 256, width) * 2, scaled(experts, width, 256) * 2
    index = torch.stack([torch.randperm(experts, device="cuda")[:k] for _ in range(rows)]).to(torch.int32)
    weights = torch.full((rows, k), 1.0 / k, dtype=BF16, device="cuda")

    def link(i, x, out):
        return torch.tanh(moe.experts(x, index.roll(i, 0), weights, up, down) + x, out=out)

    return link


@pytest.mark.parametrize("rows", [1, 24, 300])
@pytest.mark.parametrize("links", [dense, packed, mixed, quantized, routed])
def test_chain(links, rows):
    """The same bits as with a synchronization after each link, in a stream and in a CUDA graph."""
    width = size(2048)
    link, first = links(rows, width), values((rows, width), BF16)

    def chain(x, y, waits):
        x.copy_(first)
        for i in range(LINKS):
            link(i, x, y)
            if waits:
                torch.cuda.synchronize()
            x, y = y, x
        return x.clone()

    buffers = torch.empty_like(first), torch.empty_like(first)
    right = chain(*buffers, True)
    assert right.isfinite().all()
    assert right.count_nonzero() > right.numel() // 2
    for _ in range(20):
        assert torch.equal(chain(*buffers, False), right)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(*buffers, False)
    for _ in range(20):
        found.fill_(-1)
        graph.replay()
        assert torch.equal(found, right)


def test_streams():
    """Chains in several streams at once."""
    width, links = 1024, 60
    weights = [scaled(width, width) for _ in range(3)]
    first = [values((rows, width), BF16) for rows in (1, 16, 130, 700)]

    def chain(x):
        for i in range(links):
            x = gemmery.linear(x, weights[i % 3])
        return x

    right = [chain(x) for x in first]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in first]
    for _ in range(5):
        found = []
        for stream, x in zip(streams, first, strict=True):
            with torch.cuda.stream(stream):
                found.append(chain(x))
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, right))
