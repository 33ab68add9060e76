"""Kernels on a rank's parts of DTensors; the placements of several ranks are tests/host's."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gemmery
from gemmery.distributed import distribute_weight


@pytest.fixture(scope="module")
def mesh():
    """A mesh of this process alone: parts are the whole, and placements are what they are on many."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


PLACES = ((Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(1), Shard(1)))


@pytest.mark.parametrize("epilogue", (None, torch.relu), ids=("bare", "relu"))
def test_dense(mesh, epilogue):
    x, w, b = torch.randn(6, 64), torch.randn(32, 64), torch.randn(32)
    for px, pw in PLACES:
        whole = [t.clone().requires_grad_() for t in (x, w, b)]
        want = torch.nn.functional.linear(*whole)
        want = want if epilogue is None else epilogue(want)
        want.sum().backward()
        parts = [
            distribute_tensor(t, mesh, [p]).requires_grad_()
            for t, p in zip((x, w, b), (px, pw, Replicate()), strict=True)
        ]
        made = gemmery.linear(*parts, epilogue=epilogue)
        torch.testing.assert_close(made.full_tensor(), want, rtol=1e-4, atol=1e-4)
        made.full_tensor().sum().backward()
        for part, t in zip(parts, whole, strict=True):
            torch.testing.assert_close(part.grad.full_tensor(), t.grad, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            assert made.full_tensor().equal(gemmery.linear(*parts, epilogue=epilogue).full_tensor())


@pytest.mark.slow
def test_packed(mesh):
    weights = (
        gemmery.quantize(torch.randn(64, 128).bfloat16() / 8, "int4", group_size=32),
        gemmery.sparsify(torch.randn(64, 128).bfloat16() / 8),
    )
    x = torch.randn(4, 128).bfloat16()
    for weight, (px, pw), epilogue in itertools.product(weights, PLACES, (None, torch.relu)):
        made = gemmery.linear(
            distribute_tensor(x, mesh, [px]), distribute_weight(weight, mesh, [pw]), epilogue=epilogue
        )
        want = gemmery.linear(x, weight, epilogue=epilogue)
        torch.testing.assert_close(made.full_tensor(), want, rtol=2e-2, atol=2e-2)
