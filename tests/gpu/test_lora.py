"""A linear layer with an adapter on the GPU: formats and types against float64, bits, memory, graphs, unpacked weights."""

import pytest
import torch

import gemmery
from gemmery.launch.unpacking import unpacked
from tests.gpu.common import DEVICE, needs_cuda, size
from tests.lora import CASES, WEIGHTS, errors, inputs

pytestmark = pytest.mark.gpu

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
LIMITS = {BF16: 1e-2, F16: 2e-3, F32: 2e-5, F64: 1e-12}


def draw(rows, N, K, r, dtype, **options):
    torch.manual_seed(0)
    return inputs(size(rows), N, K, r, dtype, device=DEVICE, **options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("format", WEIGHTS)
def test_formats(format, case):
    assert max(errors(*draw(300, 192, 256, 16, BF16, format=format, adapter=F32, case=case))) < LIMITS[BF16]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("shape", [(1, 64, 128, 8), (77, 200, 129, 5), (513, 130, 320, 64)], ids=str)
def test_types_and_shapes(dtype, shape):
    assert max(errors(*draw(*shape, dtype, case="bias"))) < LIMITS[dtype]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("r", [2, 4, 24, 96, 128, 200])
@pytest.mark.parametrize("format", ["dense", "nf4", "int8"])
def test_ranks(format, r):
    """Up to `lora.MOST_RANK` the large product's kernel adds the adapter; loads into registers take multiples of 4."""
    assert max(errors(*draw(513, size(1024), 512, r, BF16, format=format, case="bias"))) < LIMITS[BF16]
    assert max(errors(*draw(5, size(1024), 512, r, BF16, format=format))) < LIMITS[BF16]


def step(x, weight, others):
    y = gemmery.lora_linear(x, weight, **others, scale=2.0)
    return [y.detach(), *torch.autograd.grad(y, [x, *others.values()], torch.ones_like(y))]


def test_the_same_bits():
    given = draw(1024, size(512), size(1024), 16, BF16, format="nf4", adapter=F32)
    first = step(*given)
    for _ in range(5):
        assert all(map(torch.equal, first, step(*given)))


@needs_cuda
@pytest.mark.parametrize("format", ["dense", "int4", "nf4"])
def test_memory(format):
    x, weight, others = draw(4096, 2048, 2048, 16, BF16, format=format)
    step(x, weight, others)
    before = torch.cuda.memory_allocated()
    y = gemmery.lora_linear(x, weight, **others, scale=2.0)
    large = 4096 * 2048 * 2
    # Besides the result there is u.
    assert torch.cuda.memory_allocated() - before <= large + 4 * 4096 * 16
    del y
    torch.cuda.reset_peak_memory_stats()
    step(x, weight, others)
    # The result and its gradient, and that of x; the unpacked weight; and small ones.
    assert torch.cuda.max_memory_allocated() - before <= 3 * large + 2048 * 2048 * 2 + (24 << 20)


@needs_cuda
def test_graph_and_no_synchronisation():
    given = draw(512, 512, 512, 16, BF16, format="int4", adapter=F32, case="bias")
    first = step(*given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step(*given)
    graph.replay()
    assert all(map(torch.equal, first, made))


@needs_cuda
@pytest.mark.parametrize("format", ["dense", "int4"])
def test_compile(format):
    x, weight, others = draw(300, 192, 256, 16, BF16, format=format, adapter=F32, case="bias")
    compiled = torch.compile(lambda x: gemmery.lora_linear(x, weight, **others, scale=2.0), fullgraph=True)
    wanted = step(x, weight, others)
    y = compiled(x)
    found = [y.detach(), *torch.autograd.grad(y, [x, *others.values()], torch.ones_like(y))]
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("format", [*WEIGHTS, "mxfp4", "e5m2", "int4 with zeros"])
def test_an_unpacked_weight_has_the_bits_that_it_stands_for(format, dtype):
    if format == "dense":
        pytest.skip("not packed")
    options = WEIGHTS.get(format) or {}
    if format == "int4 with zeros":
        format, options = "int4", {"group_size": 32, "symmetric": False}
    for shape in ((size(1000), size(1100)), (3, 48, 256), (1, 300)):
        weight = gemmery.quantize(torch.randn(shape, device=DEVICE), format, dtype=dtype, **options)
        assert torch.equal(unpacked(weight), weight.dequantize()), shape
