"""Linear layers of tensor-parallel models that exchange their rows while they multiply."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..nn.linear import Linear
from .all_gather import all_gather_linear
from .reduce_scatter import linear_reduce_scatter


class Overlap(NamedTuple):
    """How an overlapping layer computes.

    Attributes:
        mesh, group: the ranks.
        rows: how its input, or its output, is sharded along the sequence.
        is_local: whether the output is a plain tensor.
        how: `precision` and `batch_invariant` of gemmery's layers.
    """

    mesh: DeviceMesh
    group: dist.ProcessGroup
    rows: Shard
    is_local: bool
    how: dict[str, Any]


class _Overlapping(nn.Module):
    """A base that precedes a layer's own class."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    overlap: Overlap

    def _input(self, x: Tensor, wanted: Placement) -> Tensor:
        """This rank's part of an input."""
        if not isinstance(x, DTensor):
            return x
        return x.redistribute(placements=[wanted]).to_local()

    def _output(self, y: Tensor, placement: Placement) -> Tensor:
        how = self.overlap
        return y if how.is_local else DTensor.from_local(y, how.mesh, [placement], run_check=False)


class GathersInput(_Overlapping):
    """A layer with some rows of the weight, whose input is gathered along its rows."""

    def forward(self, input: Tensor) -> Tensor:
        """This rank's columns of all rows, of this rank's rows."""
        how = self.overlap
        x = self._input(input, how.rows)
        bias = None if self.bias is None else _local(self.bias)
        y = all_gather_linear(
            x, _local(self.weight), bias, gather_dim=how.rows.dim, group=how.group, **how.how
        )
        return self._output(y, Shard(y.dim() - 1))


class ScattersOutput(_Overlapping):
    """A layer with some columns of the weight, whose sum is scattered along its rows."""

    def forward(self, input: Tensor) -> Tensor:
        """This rank's rows of the sum, of this rank's columns."""
        how = self.overlap
        x = self._input(input, Shard(input.dim() - 1))
        bias = None if self.bias is None else _local(self.bias)
        y = linear_reduce_scatter(
            x, _local(self.weight), bias, scatter_dim=how.rows.dim, group=how.group, **how.how
        )
        return self._output(y, how.rows)


def overlapping(
    style: str, module: nn.Module, mesh: DeviceMesh, kind: type[_Overlapping], rows: Placement, is_local: bool
) -> nn.Module:
    """Changes a layer's class so that `forward` overlaps, as torch's `fully_shard` changes modules.

    Args:
        style: the user's name for it.
        rows: how its input is placed, or its output.

    Raises:
        TypeError: the layer is not a dense linear layer.
        ValueError: its rows are not sharded, or the mesh has more than one dimension.
    """
    if not isinstance(module, nn.Linear) or type(module).forward not in (nn.Linear.forward, Linear.forward):
        raise TypeError(
            f"{style}: module is a {type(module).__name__}; with overlap=True it must be a torch.nn.Linear or a "
            "gemmery.nn.Linear"
        )
    if not isinstance(rows, Shard):
        which = "input_layouts" if kind is GathersInput else "output_layouts"
        raise ValueError(
            f"{style}: {which} is {rows}; with overlap=True it must be Shard(dim) of the dimension whose rows are "
            "exchanged, such as Shard(1) of a sequence"
        )
    if mesh.ndim != 1:
        raise ValueError(f"{style}: the mesh has {mesh.ndim} dimensions; with overlap=True it must have one")
    how = (
        {"precision": module.precision, "batch_invariant": module.batch_invariant}
        if isinstance(module, Linear)
        else {}
    )
    own = type(module)
    module.overlap = Overlap(mesh, mesh.get_group(), rows, is_local, how)  # type: ignore[assignment]
    module.__class__ = type(f"{kind.__name__}{own.__name__}", (kind, own), {})
    return module


def _local(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a parameter."""
    if not isinstance(parameter, DTensor):
        return parameter
    # For a replicated bias, each rank has the gradient of its rows.
    placements = [Partial() if isinstance(x, Replicate) else x for x in parameter.placements]
    return parameter.to_local(grad_placements=placements)
