"""Collectives of torch.distributed, with gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: torch 2.13 has new names for them.
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gathered(torch.autograd.Function):
    """The shards of all ranks, concatenated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Of a matrix of the same shape on all ranks."""
        ctx.group = group
        whole = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
        to, part = whole, x.contiguous()
        if x.dtype.is_floating_point and x.dtype.itemsize == 1:
            # Not every backend supports fp8.
            to, part = to.view(torch.uint8), part.view(torch.uint8)
        gather(to, part, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The other collective."""
        return scattered_sum(grad, ctx.group), None


def scattered_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of the sum over the ranks."""
    total = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    scatter(total, x.contiguous(), group=group)
    return total


class Scattered(torch.autograd.Function):
    """This rank's rows of the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Of a matrix of the same shape on all ranks."""
        ctx.group = group
        return scattered_sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The other collective."""
        return Gathered.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]
