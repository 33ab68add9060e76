"""Linear layers of tensor-parallel models that communicate while they multiply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..formats.weight import PackedWeight
from ..nn.linear import Linear
from ..nn.packed import PackedLinear
from .all_gather import all_gather_linear
from .all_reduce import linear_all_reduce
from .reduce_scatter import linear_reduce_scatter


class Overlap(NamedTuple):
    """The method of an overlapping layer.

    Attributes:
        mesh: the ranks.
        placement: of its input, if rows are gathered; otherwise of its output.
        is_local: whether the output is a plain tensor.
        how: `precision` and `batch_invariant` of gemmery's layers.
    """

    mesh: DeviceMesh
    placement: Placement
    is_local: bool
    how: dict[str, Any]

    @property
    def group(self) -> dist.ProcessGroup:
        """The mesh's process group, which can't be copied or pickled."""
        return self.mesh.get_group()


class _Overlapping(nn.Module):
    """Comes before a layer's own class.

    Attributes:
        ARGUMENT: the argument of a style that places rows.
        PLACEMENTS: its supported values, and their description.
        SHARDED: the sharded dimension of the weight.
        OF_BIAS: the placement of the gradient that each rank has for a replicated bias.
    """

    ARGUMENT: ClassVar[str] = "output_layouts"
    SHARDED: ClassVar[int] = 1
    OF_BIAS: ClassVar[Placement] = Replicate()
    PLACEMENTS: ClassVar[tuple[type[Placement], str]]

    weight: nn.Parameter
    bias: nn.Parameter | None
    overlap: Overlap

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class can't be found by a name.
        made: Any = super().__reduce_ex__(2)
        kind, own = type(self).__bases__
        return _rebuilt, (kind, own), *made[2:]

    def _computed(
        self, product: Callable[..., Tensor], input: Tensor, wanted: Placement, **where: int
    ) -> Tensor:
        """A product of this rank's parts of the input and of the parameters."""
        how = self.overlap
        x = input.redistribute(placements=[wanted]).to_local() if isinstance(input, DTensor) else input
        weight, bias = self.weight, None if self.bias is None else _local(self.bias, self.OF_BIAS)
        if not isinstance(weight, PackedWeight):
            return product(x, _local(weight), bias, group=how.group, **where, **how.how)
        # Types as in `nn.packed`.
        bias = None if bias is None else bias.to(weight.dtype)
        own = self._part(weight)
        return product(x.to(weight.dtype), own, bias, group=how.group, **where, **how.how).to(x.dtype)

    def _part(self, weight: PackedWeight) -> PackedWeight:
        """This rank's part of a packed weight. All ranks have equal parts, see `distribute_weight`."""
        shape = list(weight.shape)
        shape[self.SHARDED] //= self.overlap.mesh.size()
        return weight.with_parts({name: _local(x) for name, x in weight.parts().items()}, shape)

    def _output(self, y: Tensor, placement: Placement) -> Tensor:
        how = self.overlap
        if how.is_local:
            return y
        if placement != Shard(y.dim() - 1):
            return DTensor.from_local(y, how.mesh, [placement], run_check=False)
        # Ranks may have different numbers of columns.
        y, whole = y.contiguous(), torch.empty(*y.shape[:-1], self.weight.shape[0], device="meta")
        return DTensor.from_local(
            y, how.mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )


class GathersInput(_Overlapping):
    """A layer with some rows of the weight, whose input is gathered along its rows."""

    ARGUMENT, SHARDED = "input_layouts", 0
    PLACEMENTS = Shard, "Shard(dim) of the dimension whose rows are gathered, such as Shard(1) of a sequence"

    def forward(self, input: Tensor) -> Tensor:
        """This rank's columns of all rows, of this rank's rows."""
        rows, ranks = cast(Shard, self.overlap.placement), self.overlap.mesh.size()
        if isinstance(input, DTensor) and input.shape[rows.dim] % ranks:
            raise ValueError(
                f"ColwiseParallel: input is {tuple(input.shape)}; with overlap=True its dimension {rows.dim} must be a "
                f"multiple of the {ranks} ranks"
            )
        y = self._computed(all_gather_linear, input, rows, gather_dim=rows.dim)
        return self._output(y, Shard(y.dim() - 1))


class ScattersOutput(_Overlapping):
    """A layer with some columns of the weight, whose sum is scattered along its rows."""

    # Each rank adds the bias to its own rows.
    OF_BIAS = Partial()
    PLACEMENTS = Shard, "Shard(dim) of the dimension whose rows are scattered, such as Shard(1) of a sequence"

    def forward(self, input: Tensor) -> Tensor:
        """This rank's rows of the sum, of this rank's columns."""
        rows = cast(Shard, self.overlap.placement)
        y = self._computed(linear_reduce_scatter, input, Shard(input.dim() - 1), scatter_dim=rows.dim)
        return self._output(y, rows)


class SumsOutput(_Overlapping):
    """A layer with some columns of the weight, whose sum all ranks have."""

    PLACEMENTS = Replicate, "Shard(dim) or Replicate()"

    def forward(self, input: Tensor) -> Tensor:
        """All rows of the sum, of this rank's columns."""
        y = self._computed(linear_all_reduce, input, Shard(input.dim() - 1))
        return self._output(y, self.overlap.placement)


def overlapping(
    style: str,
    module: nn.Module,
    mesh: DeviceMesh,
    kind: type[_Overlapping],
    placement: Placement,
    is_local: bool,
) -> nn.Linear | PackedLinear:
    """Changes a layer's class so that `forward` overlaps, as torch's `fully_shard` changes modules.

    Args:
        style: its name for users.
        placement: of its input, or of its output.

    Raises:
        TypeError: it is not a linear layer, or it is a subclass with its own `forward`.
        ValueError: the placement does not suit this kind, the mesh has more than one dimension, or ranks would have
            different numbers of columns of the weight.
    """
    own = type(module)
    is_dense = isinstance(module, nn.Linear) and own.forward in (nn.Linear.forward, Linear.forward)
    if not is_dense and not (isinstance(module, PackedLinear) and module.runs_product):
        raise TypeError(
            f"{style}: module is a {own.__name__}; with overlap=True it must be a torch.nn.Linear, a "
            "gemmery.nn.Linear, a QuantizedLinear or a PrunedLinear"
        )
    wanted, text = kind.PLACEMENTS
    if not isinstance(placement, wanted):
        raise ValueError(f"{style}: {kind.ARGUMENT} is {placement!r}; with overlap=True it must be {text}")
    if mesh.ndim != 1:
        raise ValueError(f"{style}: the mesh has {mesh.ndim} dimensions; with overlap=True it must have one")
    columns = cast(Tensor, module.weight).shape[1]
    if kind.SHARDED == 1 and columns % mesh.size():
        # Ranks would choose different kernels, which then wait for each other in vain.
        raise ValueError(
            f"{style}: the weight has {columns} columns; with overlap=True they must be a multiple of the "
            f"{mesh.size()} ranks"
        )
    how: dict[str, Any] = {}
    if isinstance(module, Linear):
        how["precision"] = module.precision
    if isinstance(module, Linear | PackedLinear):
        how["batch_invariant"] = module.batch_invariant
    module.overlap = Overlap(mesh, placement, is_local, how)  # type: ignore[assignment]
    module.__class__ = _class_of(kind, own)
    return cast("nn.Linear | PackedLinear", module)


_classes: dict[tuple[type, type], type[nn.Module]] = {}


def _class_of(kind: type[_Overlapping], own: type[nn.Module]) -> type[nn.Module]:
    """The class of an overlapping layer whose own class is `own`."""
    found = _classes.get((kind, own))
    if found is None:
        found = _classes[kind, own] = type(f"{kind.__name__}{own.__name__}", (kind, own), {})
    return found


def _rebuilt(kind: type[_Overlapping], own: type[nn.Module]) -> nn.Module:
    """A layer without its state, as `copy` and `pickle` make it."""
    made = _class_of(kind, own)
    return made.__new__(made)


def _local(parameter: Tensor, of_replicated: Placement | None = None) -> Tensor:
    """This rank's part of a parameter.

    Args:
        of_replicated: the placement of its gradient, if it is replicated.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    placements = [of_replicated or x if isinstance(x, Replicate) else x for x in parameter.placements]
    return parameter.to_local(grad_placements=placements)
