"""Losses of a linear layer on the GPU: options and types against float64, the same bits, memory, graphs."""

import pytest
import torch

from gemmery import linear_cross_entropy
from gemmery.nn import LinearCrossEntropy
from tests.cross_entropy import CASES, errors, inputs
from tests.gpu.common import DEVICE, needs_cuda, size

pytestmark = pytest.mark.gpu

LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5, torch.float64: 1e-6}


def dims(rows, classes, features):
    return size(rows), size(classes), size(features)


@pytest.mark.parametrize("case", CASES)
def test_options(case):
    found = errors(
        linear_cross_entropy, case, *dims(1000, 5003, 256), torch.bfloat16, DEVICE, chunk_size=1024
    )
    assert max(found) < LIMITS[torch.bfloat16]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("shape", [(2, 300, 64), (77, 4097, 200), (513, 1000, 129)])
def test_types_and_shapes(dtype, shape):
    assert (
        max(errors(linear_cross_entropy, "bias", *dims(*shape), dtype, DEVICE, chunk_size=777))
        < LIMITS[dtype]
    )


def run(x, weight, target, **how):
    loss = linear_cross_entropy(x, weight, target, **how)
    return [loss.detach(), *torch.autograd.grad(loss, [x, weight])]


def test_the_same_bits():
    x, weight, target, *_ = inputs(*dims(2048, 16000, 512), torch.bfloat16, device=DEVICE)
    first = run(x, weight, target, chunk_size=4096)
    for _ in range(5):
        assert all(map(torch.equal, first, run(x, weight, target, chunk_size=4096)))
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(x, weight, target), first[0])


@needs_cuda
def test_no_logits_in_memory():
    x, weight, target, *_ = inputs(8192, 65536, 256, torch.bfloat16, device=DEVICE)
    run(x, weight, target)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(x, weight, target)
    # The logits would be 1 GB. There are a block, the gradients, and a part of a reduced row for each tile.
    assert torch.cuda.max_memory_allocated() - before < 320 << 20
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        linear_cross_entropy(x, weight, target)
    assert torch.cuda.max_memory_allocated() - before < 128 << 20


@needs_cuda
def test_nothing_waits_for_the_gpu():
    x, weight, target, *_ = inputs(256, 3000, 128, torch.bfloat16, device=DEVICE)
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 10.0}
    run(x, weight, target, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(x, weight, target, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_a_graph_replayed_with_other_targets():
    x, weight, target, *_ = inputs(256, 3000, 128, torch.bfloat16, device=DEVICE)
    run(x, weight, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run(x, weight, target)
    target.copy_(target.roll(1))
    graph.replay()
    assert all(map(torch.equal, made, run(x, weight, target)))


@needs_cuda
@pytest.mark.slow
def test_offsets_of_64_bits():
    # A block of 2^31 elements and more.
    x, weight, target, *_ = inputs(70000, 32768, 64, torch.bfloat16, device=DEVICE)
    for a, b in zip(
        run(x, weight, target, chunk_size=32768), run(x, weight, target, chunk_size=4096), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-6)


@needs_cuda
def test_compiled():
    module = LinearCrossEntropy(128, 3000, device=DEVICE, dtype=torch.bfloat16)
    x, _, target, *_ = inputs(256, 3000, 128, torch.bfloat16, device=DEVICE)
    compiled = torch.compile(lambda x, target: module(x.sin(), target), fullgraph=True)
    leaves = [x, module.linear.weight]
    loss, wanted = compiled(x, target), module(x.sin(), target)
    torch.testing.assert_close(loss, wanted, rtol=1e-3, atol=1e-3)
    for a, b in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-4)
