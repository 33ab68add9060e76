"""Packed weights whose tensors are DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ..formats.weight import PackedWeight
from ..product.build import weight_operand
from ..product.sharded import check_parts, placed

W = TypeVar("W", bound=PackedWeight)


def distribute_weight(
    weight: W, device_mesh: DeviceMesh, placements: Sequence[Placement], *, src_data_rank: int | None = 0
) -> W:
    """Shard a packed weight over ranks, as torch's `distribute_tensor` shards a plain tensor.

    The result is a weight of the same shape, whose words, scales and other parts are DTensors. Products with a DTensor
    as x accept it.

    Args:
        weight: a `QuantizedTensor` or a `SparseTensor`, (*batch, N, K), whole on each rank.
        device_mesh: the devices.
        placements: for each dimension of the mesh, `Shard(-2)` for rows (N), `Shard(-1)` for columns (K), those of a
            batch dimension, or `Replicate()`. Each part has a multiple of 16 rows, or of the columns of a block of
            words and of a group; of a sparse weight of 32 rows, or of 64 columns and a group; see
            `QuantizedTensor.shard`.
        src_data_rank: the rank whose weight is used; None for each rank's own weight.

    Raises:
        TypeError: `weight` is not a packed weight.
        ValueError: the weight can't be split at these positions, or the split is along columns that are permuted
            (act-order).

    Example:
        >>> import torch, gemmery
        >>> from torch.distributed.tensor import Shard
        >>> from gemmery.distributed import distribute_weight
        >>> w = gemmery.quantize(torch.randn(64, 256), "int4", group_size=64)
        >>> distribute_weight(w, mesh, [Shard(-2)]).words.placements  # doctest: +SKIP
        (Shard(dim=0),)
    """
    if not isinstance(weight, PackedWeight):
        raise TypeError(
            f"distribute_weight: weight is a {type(weight).__name__}; it must be a QuantizedTensor or a SparseTensor, "
            "and others are for torch's distribute_tensor"
        )
    if isinstance(next(iter(weight.parts().values())), DTensor):
        raise ValueError(f"distribute_weight: {weight!r} is distributed already")
    if len(placements) != device_mesh.ndim:
        raise ValueError(
            f"distribute_weight: there are {len(placements)} placements for a mesh of {device_mesh.ndim} dimensions"
        )
    axes = [_axis(weight, placement) for placement in placements]
    operand = weight_operand(weight.unpermuted())
    check_parts(f"distribute_weight: {weight!r}", operand, device_mesh, axes)
    if weight.permutation is not None and "K" in axes:
        raise ValueError(
            f"distribute_weight: the columns of {weight!r} are packed in a different order (GPTQ's act-order): it "
            "can be sharded by its rows alone"
        )
    names = [name for name in weight.parts() if name != "permutation"]
    own = dict(zip(names, operand.axes("K", "N"), strict=True))
    found = {}
    for name, part in weight.parts().items():
        where = placed(own.get(name, ()), axes)
        found[name] = distribute_tensor(part, device_mesh, where, src_data_rank=src_data_rank)
    return weight.with_parts(found)


def full_weight(weight: W) -> W:
    """Gather a weight that `distribute_weight` has sharded, on each rank. Any other weight is returned unchanged."""
    parts = weight.parts()
    if not any(isinstance(x, DTensor) for x in parts.values()):
        return weight
    return weight.with_parts(
        {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in parts.items()}
    )


def _axis(weight: PackedWeight, placement: Placement) -> str:
    if isinstance(placement, Replicate):
        return ""
    if not isinstance(placement, Shard) or not -weight.dim() <= placement.dim < weight.dim():
        raise ValueError(
            f"distribute_weight: a placement is {placement}; it must be Replicate(), or Shard of one of the "
            f"{weight.dim()} dimensions"
        )
    count = weight.dim() - 2
    return (*[f"b-{count - i}" for i in range(count)], "N", "K")[placement.dim]
