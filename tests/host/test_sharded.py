"""Modules under torch's tensor parallelism: what can't be sharded says so."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gemmery.nn


@pytest.fixture(scope="module")
def mesh():
    """A mesh of this process alone: placements are what they are on many."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_stacked_weight_is_not_sharded_by_rows(mesh):
    x = torch.randn(4, 8)
    for plan in ({"gate_up": ColwiseParallel(), "down": RowwiseParallel()}, {"gate_up": ColwiseParallel()}):
        block = parallelize_module(gemmery.nn.GatedMLP(8, 16), mesh, plan)
        for context in (torch.no_grad(), torch.enable_grad()):
            with (
                context,
                pytest.raises(ValueError, match=r"gate and up are one weight that is sharded by rows"),
            ):
                block(x)


def test_a_function_of_a_stacked_weight_is_not_either(mesh):
    x, w = torch.randn(4, 8), torch.randn(32, 8)
    inner = distribute_tensor(x, mesh, [Replicate()])
    with pytest.raises(ValueError, match="sharded by rows"):
        gemmery.nn.stacked_gated_linear(inner, distribute_tensor(w, mesh, [Shard(0)]))
    # Columns are sums' parts; torch says that nobody has told it how.
    for place in (Shard(1), Replicate()):
        with pytest.raises(NotImplementedError, match="sharding strategy"):
            gemmery.nn.stacked_gated_linear(inner, distribute_tensor(w, mesh, [place]))


@pytest.mark.parametrize("place", (Shard(0), Shard(1), Replicate()), ids=str)
@pytest.mark.parametrize(
    "epilogue", (None, torch.relu, gemmery.epilogues.swiglu), ids=("bare", "relu", "swiglu")
)
def test_sharded_operands_are_never_taken_for_whole_ones(mesh, place, epilogue):
    x, w = (
        distribute_tensor(torch.randn(*shape), mesh, [p])
        for shape, p in (((4, 8), Replicate()), ((32, 8), place))
    )
    for grad in (False, True):
        with pytest.raises(NotImplementedError, match="sharding strategy"):
            gemmery.linear(x.detach().requires_grad_(grad), w, epilogue=epilogue)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        gemmery.linear(torch.randn(4, 8), w, epilogue=epilogue)


def test_a_part_of_a_stacked_layers_output_is_refused():
    """As of a layer of torch's in its place whose rows are dealt out."""
    block = gemmery.nn.GatedMLP(8, 16)
    block.gate_up = torch.nn.Linear(8, 16, bias=False)
    with pytest.raises(ValueError, match="16 columns and the block has 32"):
        block(torch.randn(4, 8))


def test_fsdp_gathers_a_stacked_weight(mesh):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    x = torch.randn(4, 8)
    for part in ("whole", "gate_up"):
        block = gemmery.nn.GatedMLP(8, 16)
        want = block(x).detach()
        fully_shard(block if part == "whole" else block.gate_up, mesh=mesh)
        torch.testing.assert_close(block(x).detach(), want)
