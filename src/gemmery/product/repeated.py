"""Products of DTensors that look like an earlier one: the product of each rank's parts is computed at once.

If nothing had to be redistributed and no gradient is recorded, the sharding of a call and the placements of its
results are kept for later calls like it. Then only the product of the local tensors remains, which is a product like
any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from ..epilogues.results import returned
from ..formats.weight import PackedWeight
from ..memo import keep
from .seen import PLAIN
from .sharded import Sharding, adds_here, parts_of
from .spec import Call, Functions


@dataclass(frozen=True, slots=True)
class Repeated:
    """The common properties of calls that look alike.

    Attributes:
        specs: torch's specs of the results.
        many: whether they are a tuple.
        adds: whether this rank adds biases; another one adds zeros to its part of a sum.
        shape: of the part of a packed weight.
        meshes: the meshes of the inputs. A key has their ids, so they must live as long as the key.
    """

    specs: tuple[Any, ...]
    many: bool
    adds: bool
    shape: tuple[int, ...]
    meshes: tuple[Any, ...]


_known: dict[Any, Repeated] = {}
find = _known.get


def look(given: Sequence[Any], grad: bool) -> list[Any] | None:
    """The properties of a call's values that decide its sharding; None if it must be examined again.

    Args:
        grad: whether gradients are recorded.
    """
    looks: list[Any] = []
    for x in given:
        kind = type(x)
        if kind is DTensor:
            if grad and x.requires_grad:
                return None
            looks.append((x.shape, x.dtype, x.placements, id(x.device_mesh)))
        elif kind in PLAIN:
            if x.dim() or (grad and x.requires_grad):
                return None
            looks.append((x.dtype, x.device))
        elif kind is float or kind is int:
            looks.append(kind)
        elif x is None or kind is bool:
            looks.append(x)
        else:
            return None
    return looks


def remember(key: Any, call: Call, how: Sharding, results: Sequence[Tensor], many: bool) -> None:
    """Keep how a call was sharded, if nothing was redistributed."""
    tensors = [(i, x) for i, x in enumerate(call.tensors) if isinstance(x, DTensor)]
    if any(list(x.placements) != how.wanted(i) for i, x in tensors):
        return
    shape: tuple[int, ...] = ()
    if call.b.is_packed:
        *batch, inner, columns = call.b.matrix.shape
        names = [f"b-{i}" for i in range(len(batch), 0, -1)]
        sizes = zip((*names, "N", "K"), (*batch, columns, inner), strict=True)
        shape = tuple([size // parts_of(how.mesh, how.roles, name) for name, size in sizes])
    specs = tuple([x._spec for x in results if isinstance(x, DTensor)])
    meshes = tuple([x.device_mesh for _, x in tensors])
    keep(_known, key, Repeated(specs, many, adds_here(how), shape, meshes))


def again(
    known: Repeated, product: Callable[..., Any], op: str, a: Any, b: Any, bias: Any, functions: Functions,
    options: Any, scalars: Any,
) -> Any:  # fmt: skip
    """The results of a call like an earlier one.

    Args:
        product: `run.product`, which has the other arguments.
    """
    with torch.no_grad():
        added = _part(bias, ())
        if not known.adds and added is not None:
            added = (
                tuple([torch.zeros_like(x) for x in added])
                if isinstance(added, tuple)
                else torch.zeros_like(added)
            )
        if functions.args:
            functions = functions._replace(args=tuple([_part(x, ()) for x in functions.args]))
        made = product(op, _part(a, ()), _part(b, known.shape), added, functions, None, options, scalars)
        results = made if known.many else (made,)
        # As torch's operators create them; `from_local` takes ten times as long.
        found = [DTensor(x, spec, requires_grad=False) for x, spec in zip(results, known.specs, strict=True)]
    return returned(found, known.many)


def _part(x: Any, shape: tuple[int, ...]) -> Any:
    """This rank's part.

    Args:
        shape: of the part of a packed weight.
    """
    if isinstance(x, PackedWeight):
        return x.with_parts({name: _part(part, ()) for name, part in x.parts().items()}, shape)
    if isinstance(x, tuple | list):
        return tuple([_part(each, ()) for each in x])
    if not isinstance(x, DTensor):
        return x
    local = x.to_local()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local
