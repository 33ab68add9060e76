"""A transformer's blocks on two GPUs, tensor-parallel: whole activations, a sharded sequence, and int4 weights.

    pip install .
    torchrun --nproc-per-node 2 examples/tensor_parallel.py

torch's `parallelize_module` shards the layers by a plan: the products of attention's heads and the first product of a
feed-forward block by columns, the ones behind them by rows. `gemmery.distributed` has the styles for such a plan:

- "whole": each rank has all rows between the layers. `FeedForwardParallel` keeps the activation inside the first
  product of a feed-forward block.
- "overlap": each rank has a part of the sequence between the layers. `overlap=True` sends rows while the product runs.
- "int4": as "whole", with packed weights. Each rank has its part of the words.

Every plan is compared with the blocks on one rank. Without two GPUs, the ranks are processes on the CPU, over gloo.
"""

import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn import functional as F

import gemmery.nn
from gemmery.distributed import ColwiseParallel, FeedForwardParallel, RowwiseParallel

#: Hidden size, size of a head, blocks, sequences, and their length.
SMALL, LARGE = (128, 32, 2, 2, 128), (4096, 128, 4, 2, 4096)
OVERLAPPED = {
    "first": ColwiseParallel(input_layouts=Shard(1), overlap=True),
    "last": RowwiseParallel(output_layouts=Shard(1), overlap=True),
}
PLANS: dict[str, dict[str, ParallelStyle]] = {
    "whole": {"*.qkv": ColwiseParallel(), "*.out": RowwiseParallel(), "*.mlp": FeedForwardParallel()},
    "overlap": {
        "*.qkv": OVERLAPPED["first"], "*.out": OVERLAPPED["last"],
        "*.mlp.up": OVERLAPPED["first"], "*.mlp.down": OVERLAPPED["last"],
    },
}  # fmt: skip
PLANS["int4"] = PLANS["whole"]


class Block(nn.Module):
    """Attention and a feed-forward block, each added to its input."""

    def __init__(self, hidden: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        # Rows of a head's q, k and v are together, so that each rank gets whole heads.
        self.qkv = gemmery.nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = gemmery.nn.Linear(hidden, hidden, bias=False)
        self.mlp = gemmery.nn.MLP(hidden, 4 * hidden, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, hidden) to the same; T may be the rank's part of a sequence."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, 3, self.head))
        q, k, v = heads.permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def blocks(hidden: int, head: int, count: int, device: torch.device, dtype: torch.dtype) -> nn.Sequential:
    """The same blocks on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block(hidden, head) for _ in range(count)]).to(device, dtype)


def milliseconds(function: Callable[[], Tensor]) -> float:
    """The median time of ten calls."""
    times = []
    for _ in range(12):
        dist.barrier()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1e3)
    return sorted(times[2:])[5]


@torch.no_grad()
def compare(name: str, mesh: DeviceMesh, device: torch.device, sizes: tuple[int, ...]) -> str:
    """How far a plan's result is from that of one rank, and on GPUs both times."""
    hidden, head, count, batch, length = sizes
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = blocks(hidden, head, count, device, dtype)
    if name == "int4":
        gemmery.nn.quantize(model, "int4", group_size=64)
    x = torch.randn(batch, length, hidden, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    want = model(x).float()
    alone = milliseconds(lambda: model(x)) if device.type == "cuda" else None

    parallelize_module(model, mesh, PLANS[name])
    is_sharded = name == "overlap"
    part = x.chunk(mesh.size(), dim=1)[mesh.get_local_rank()].contiguous() if is_sharded else x
    y = model(part)
    if is_sharded:
        parts = [torch.empty_like(y) for _ in range(mesh.size())]
        dist.all_gather(parts, y.contiguous())
        y = torch.cat(parts, dim=1)
    error = (y.float() - want).norm() / want.norm()
    assert error < (2e-2 if dtype == torch.bfloat16 or name == "int4" else 1e-5), error
    found = f"{name}: relative difference from one rank {error:.1e}"
    if alone is not None:
        together = milliseconds(lambda: model(part))
        found += f", {together:.2f} ms on {mesh.size()} GPUs, {alone:.2f} ms on one"
    return found


def main() -> None:
    """Run each plan."""
    if "RANK" not in os.environ:
        raise SystemExit("start this with torchrun: torchrun --nproc-per-node 2 examples/tensor_parallel.py")
    rank, count = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.cuda.device_count() >= count:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    mesh = init_device_mesh(device.type, (count,))
    for name in PLANS:
        found = compare(name, mesh, device, LARGE if device.type == "cuda" else SMALL)
        if rank == 0:
            print(found, flush=True)
    dist.destroy_process_group()
    if device.type == "cpu":
        # torch's functional collectives keep the process group. Gloo's threads sometimes abort when Python ends.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
