"""Experts of DTensors: each rank computes the sums over the experts that it holds, for the tokens that it has.

For each dimension of the device mesh the experts are sharded, or the tokens, or nothing. If the experts are sharded, a
rank counts its own from 0. Choices of experts on other ranks get ids outside that range, go to the tail after all
groups and add nothing, so the result is a part of the sum. All of it is differentiable, and torch.compile traces it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from ..formats.weight import PackedWeight
from ..product.build import weight_operand
from ..product.sharded import Sharding, from_local, mesh_of, to_local

#: The experts, along which the products of a token are summed; see `Operand.axes`.
EXPERTS = "E"


def tensors_of(given: Iterable[tuple[str, Any]]) -> list[tuple[str, Tensor]]:
    """The existing tensors, by name; for a packed weight or a pair, its parts."""
    found: list[tuple[str, Tensor]] = []
    for name, value in given:
        if isinstance(value, PackedWeight):
            found += [(f"{name}'s {part}", x) for part, x in value.parts().items()]
        elif isinstance(value, tuple | list):
            found += tensors_of([(f"{name}[{i}]", x) for i, x in enumerate(value)])
        elif isinstance(value, Tensor):
            found.append((name, value))
    return found


def experts_of_parts(
    run: Callable[..., Tensor],
    tokens: dict[str, Tensor | None],
    parameters: dict[str, Any],
    sums: dict[str, Any],
    columns: int,
) -> Tensor:
    """The experts of DTensors.

    Args:
        run: computes those of a rank's parts, which it is given by their names.
        tokens: x, the chosen experts and the weights of the router; what is sharded of them are dimensions of tokens.
        parameters: weights and biases, whose first dimension is that of the experts.
        sums: to what the gradients of weights are added, by the weights' names with "_grad".
        columns: of the result.

    Raises:
        TypeError: a tensor is not a DTensor.
        ValueError: the tensors are on several meshes or sharded in another way, or a rank would have no expert.
    """
    of_experts, of_tokens = tensors_of(parameters.items()), tensors_of(tokens.items())
    mesh = mesh_of("experts", [*of_tokens, *of_experts, *tensors_of(sums.items())])
    _check_placements(of_experts)
    x = tokens["x"]
    assert x is not None
    names = tuple([f"t-{i}" for i in range(x.dim() - 1, 0, -1)])
    roles = tuple([_role(of_experts, of_tokens, names, i) for i in range(mesh.ndim)])
    start, count = held(mesh, roles, parameters["down"].shape[0])

    def part(value: Any, axes: tuple[str, ...]) -> Any:
        if isinstance(value, tuple | list):
            return tuple([part(x, axes) for x in value])
        if isinstance(value, PackedWeight):
            # Its tensors have the batch dimension, or are shared by all experts.
            own = dict(zip(value.parts(), weight_operand(value.unpermuted()).axes("", ""), strict=False))
            inner = {
                name: part(x, tuple([EXPERTS if axis == "b-1" else "" for axis in own.get(name, ())]))
                for name, x in value.parts().items()
            }
            return value.with_parts(inner, (count, *value.shape[1:]))
        if not isinstance(value, Tensor):
            return value
        how = Sharding(mesh, roles, names, (axes,))
        return to_local(value, how.wanted(0), how.of_gradient(0))

    given = {name: part(value, (*names, "")) for name, value in tokens.items()}
    given["top_k_index"] = given["top_k_index"] - start
    given |= {name: part(value, (EXPERTS, "", "")) for name, value in parameters.items()}
    of_weight = Sharding(mesh, roles, names, ((EXPERTS, "", ""),)).of_gradient(0)
    given |= {name: _part_of_sum(name, value, of_weight) for name, value in sums.items()}
    placements = Sharding(mesh, roles, names, ()).of_result()
    return from_local(run(**given), mesh, placements, (*x.shape[:-1], columns))


def _part_of_sum(name: str, value: Any, wanted: list[Placement]) -> Any:
    """A rank's part of the tensor to which a weight's gradient is added, in the same memory."""
    if isinstance(value, tuple | list):
        return tuple([_part_of_sum(name, x, wanted) for x in value])
    if not isinstance(value, DTensor):
        return value
    if list(value.placements) != wanted:
        raise ValueError(
            f"experts: {name} is placed {value.placements}; it must be placed as the gradient is: {tuple(wanted)}"
        )
    return value.to_local()


def _check_placements(tensors: list[tuple[str, Tensor]]) -> None:
    """ValueError for a weight or a bias that is sharded other than along the experts."""
    for name, x in tensors:
        for placement in x.placements if isinstance(x, DTensor) else ():
            if not placement.is_replicate() and not (isinstance(placement, Shard) and placement.dim == 0):
                raise ValueError(
                    f"experts: {name} is placed {placement}; weights and biases must be sharded along the experts, "
                    "Shard(0), or Replicate()"
                )


def _role(
    of_experts: list[tuple[str, Tensor]], of_tokens: list[tuple[str, Tensor]], names: tuple[str, ...], i: int
) -> str:
    """The sharded dimension in a dimension of the mesh: the experts, a dimension of the tokens, or "" for none."""
    for _, x in of_experts:
        if isinstance(x, DTensor) and x.placements[i].is_shard():
            return EXPERTS
    for _, x in of_tokens:
        placement = x.placements[i] if isinstance(x, DTensor) else None
        if isinstance(placement, Shard) and placement.dim < len(names):
            return names[placement.dim]
    return ""


def held(mesh: DeviceMesh, roles: tuple[str, ...], count: int) -> tuple[int, int]:
    """The number of the first expert that this rank holds, and how many it holds.

    Args:
        count: of all experts.

    Raises:
        ValueError: a rank has no expert.
    """
    at = mesh.get_coordinate()
    assert at is not None
    start, least, size = 0, count, count
    for i, role in enumerate(roles):
        if role == EXPERTS:
            parts = mesh.size(i)
            # As torch splits: the first parts are the larger ones.
            each, least_each = -(-size // parts), -(-least // parts)
            least -= least_each * (parts - 1)
            first = min(each * at[i], size)
            start, size = start + first, min(each, size - first)
    if least < 1:
        raise ValueError(
            f"experts: {count} experts are sharded over {mesh}, which leaves a rank without one; use fewer ranks"
        )
    return start, size
