"""Products of DTensors: each rank computes its part of the product from its parts of the inputs.

For each dimension of the device mesh, one dimension of the product is sharded: rows (M), columns (N), a batch
dimension, the sum (K), or none. The placements of the second operand decide which, then those of the first. All inputs
are redistributed to match, each rank computes the product of its local tensors like any other, and the results become
DTensors. Both steps are differentiable, so that the gradients are those of the local product, and torch.compile traces
all of this.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..epilogues import Untraceable
from ..epilogues.results import returned
from ..operands import Operand
from .build import NOTHING
from .check import input_name
from .epilogue import program
from .shape import operand_names
from .spec import Call, unchanged

#: Advice for users whose epilogue cannot run on parts of a product.
_INSTEAD = "redistribute {what} to Replicate(), or apply the function to the result"


def placed(axes: tuple[str, ...], roles: Sequence[str]) -> list[Placement]:
    """The placements of a tensor for a sharded product.

    Args:
        axes: the dimension of the product for each of its dimensions; see `Operand.axes`.
        roles: for each dimension of the mesh, which one is sharded; "" for none.
    """
    return [Shard(axes.index(role)) if role and role in axes else Replicate() for role in roles]


@dataclass(frozen=True)
class Sharding:
    """The sharding of a product.

    Attributes:
        mesh: the devices.
        roles: for each dimension of the mesh, the dimension of the product that is sharded along it, see
            `Operand.axes`; "" if all ranks compute the same.
        names: the dimensions of the product.
        axes: for each of the call's tensors, which dimensions of the product its dimensions are.
    """

    mesh: DeviceMesh
    roles: tuple[str, ...]
    names: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]

    def wanted(self, i: int) -> list[Placement]:
        """The required placements of one of the call's tensors."""
        return placed(self.axes[i], self.roles)

    def of_gradient(self, i: int) -> list[Placement]:
        """The placements of a local tensor's gradient: each rank has that of its part of the product."""
        own = placed(self.axes[i], self.roles)
        return [
            x if isinstance(x, Shard) or role in ("", "K") else Partial()
            for x, role in zip(own, self.roles, strict=True)
        ]

    def of_result(self) -> list[Placement]:
        """The placements of results. A sharded dimension that results do not have is summed over."""
        return [
            Shard(self.names.index(role)) if role in self.names else Partial() if role else Replicate()
            for role in self.roles
        ]

    def summed(self) -> Sharding:
        """The same after the sum, which all ranks have as a whole."""
        return replace(self, roles=tuple(["" if role == "K" else role for role in self.roles]))


class Ways(Protocol):
    """The computation of local products: in eager mode, or in code that torch.compile traces."""

    def part(self, operand: Operand, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Operand:
        """An operand made of a rank's parts of another operand's tensors, with `sizes` instead of its own."""

    def run(self, call: Call) -> Any:
        """The results of a call with local tensors."""

    def bare(self, call: Call) -> Tensor:
        """The product of a call with local tensors that has no function."""

    def behind(self, call: Call, product: Tensor) -> Any:
        """The results of a call's function on a product, in torch."""

    def behaviour(self, call: Call) -> str:
        """See `behaviour`; "" for a call without a function."""

    def remember(self, call: Call, how: Sharding, results: Sequence[Tensor], many: bool) -> None:
        """Keep the sharding of a call whose results are those of local products."""


def sharded(call: Call, ways: Ways) -> Any:
    """The results of a call with DTensors among its tensors.

    Raises:
        TypeError: a tensor is not a DTensor.
        ValueError: the operands or the epilogue can't be sharded in this way.
    """
    how = sharding_of(call)
    if call.b.is_packed:
        check_parts(f"{call.op}: {operand_names(call.op)[1]}", call.b, how.mesh, how.roles)
    does = ways.behaviour(call)
    if does:
        check_epilogue(call, how, does)
    is_local = not (does and "K" in how.roles)
    if is_local:
        made = ways.run(_local(call, how, ways, adds_once=not does))
    else:
        # The function needs the whole sum.
        made = _behind_sum(call, how, ways)
        how = how.summed()
    many = isinstance(made, tuple)
    results = list(made) if isinstance(made, tuple) else [made]
    placements = how.of_result()
    found = [from_local(x, how.mesh, placements, _whole_shape(call, how, does, x)) for x in results]
    if is_local:
        ways.remember(call, how, found, many)
    return returned(found, many)


def sharding_of(call: Call) -> Sharding:
    """The sharding of a call."""
    axes = _axes(call)
    mesh = _mesh(call)
    of_a, of_b = len(call.a.tensors), len(call.b.tensors)
    tensors = call.tensors
    roles = []
    for i in range(mesh.ndim):
        role = _role(tensors[of_a : of_a + of_b], axes[of_a : of_a + of_b], i)
        roles.append(role or _role(tensors[:of_a], axes[:of_a], i))
    return Sharding(mesh, tuple(roles), _names(call), tuple(axes))


def _mesh(call: Call) -> DeviceMesh:
    named = [*call.a.named(operand_names(call.op)[0]), *call.b.named(operand_names(call.op)[1])]
    given = enumerate(call.inputs, len(call.outer))
    named += [(input_name(call, i), x) for i, x in given if isinstance(x, Tensor)]
    return mesh_of(call.op, named)


def mesh_of(op: str, named: Sequence[tuple[str, Tensor]]) -> DeviceMesh:
    """The mesh of tensors with their names; at least one of them is a DTensor.

    Raises:
        TypeError: another one is a plain tensor, and not a number.
        ValueError: they are on several meshes, or this rank is not on it.
    """
    mesh = None
    found = next((name, x) for name, x in named if isinstance(x, DTensor))
    for name, x in named:
        if not isinstance(x, DTensor):
            if x.dim():
                raise TypeError(
                    f"{op}: {found[0]} is a DTensor and {name} a plain tensor; convert it too, with torch's "
                    "distribute_tensor or DTensor.from_local, or a packed weight with "
                    "gemmery.distributed.distribute_weight"
                )
        elif mesh is None:
            mesh = x.device_mesh
        elif x.device_mesh != mesh:
            raise ValueError(
                f"{op}: {found[0]} is on {mesh} and {name} on {x.device_mesh}; they must be on the same mesh"
            )
    assert mesh is not None
    if mesh.get_coordinate() is None:
        raise ValueError(f"{op}: this rank is not part of {mesh}, on which {found[0]} is")
    return mesh


def _names(call: Call) -> tuple[str, ...]:
    """The dimensions of the product; a vector has no rows, or no columns."""
    rows = ("M",) if call.a.matrix.dim() > 1 else ()
    columns = ("N",) if call.b.matrix.dim() > 1 else ()
    batch = len(call.shape) - len(rows) - len(columns)
    return (*[f"b-{batch - i}" for i in range(batch)], *rows, *columns)


def _axes(call: Call) -> list[tuple[str, ...]]:
    """For each of the call's tensors, which dimensions of the product its dimensions are."""
    found = []
    for operand, names in ((call.a, ("M", "K")), (call.b, ("K", "N"))):
        axes = operand.axes(*names)
        if len(axes) != len(operand.tensors):
            raise ValueError(
                f"{call.op}: a product of DTensors can't have groups, block-sparse operands or scales of blocks; call "
                "it on each rank's part (to_local)"
            )
        found += axes
    return found + [_axes_of_input(call, x) for x in call.inputs if isinstance(x, Tensor)]


def _axes_of_input(call: Call, x: Tensor) -> tuple[str, ...]:
    """The same of a bias or an epilogue's argument, which broadcasts to the product or has half its columns."""
    names, shape = _names(call), call.shape
    halved = call.b.halves == 2
    axes = []
    for place in range(x.dim(), 0, -1):
        name, full, size = names[-place], shape[-place], x.shape[-place]
        if name == "N" and halved:
            # Each of two adjacent weights is sharded, and so are the two halves of the product.
            axes.append("N" if 2 * size == full else "" if size == 1 else "2N")
        else:
            axes.append(name if size == full else "")
    return tuple(axes)


def _role(tensors: Sequence[Tensor], axes: Sequence[tuple[str, ...]], i: int) -> str:
    """The dimension of the product along which an operand is sharded in a dimension of the mesh; "" for none."""
    for x, own in zip(tensors, axes, strict=True):
        placement = x.placements[i] if isinstance(x, DTensor) else None
        # In torch 2.11, `type(placement) is Shard` is False in code that torch.compile traces.
        if isinstance(placement, Shard) and own[placement.dim]:
            return own[placement.dim]
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# What can't be sharded


def behaviour(call: Call) -> str:
    """The use of the product by an epilogue: "elementwise", "halves", or in words why it needs the whole product."""
    try:
        made = program(call)
    except Untraceable as error:
        return str(error)
    if "uniform(" in made.source:
        return "it draws random numbers, which differ with the place in the whole product"
    if any(x.kept is not None for x in made.outputs):
        return "it returns something that is not of the product's shape"
    if made.whole or any(x.reduced is not None for x in made.outputs):
        return "reduces"
    if made.paired:
        return "halves" if all(x.columns == "N/2" for x in made.outputs) else "it returns both halves"
    return "elementwise"


def check_epilogue(call: Call, how: Sharding, does: str) -> None:
    """Raises ValueError if an epilogue cannot run on these parts of the product.

    Args:
        does: see `behaviour`.
    """
    roles = [role for role in how.roles if role not in ("", "K")]
    weight = operand_names(call.op)[1]
    if does not in ("elementwise", "halves", "reduces") and roles:
        raise ValueError(
            f"{call.op}: the product is sharded along {_text(roles)} and the epilogue needs all of it: {does}; "
            + _INSTEAD.format(what="the operands")
        )
    if "N" not in roles:
        return
    if does == "reduces":
        raise ValueError(
            f"{call.op}: {weight} is sharded along the product's columns, and the epilogue reduces its rows; "
            + _INSTEAD.format(what=weight)
        )
    if does == "halves" and call.b.halves == 1:
        raise ValueError(
            f"{call.op}: {weight} is sharded along the product's columns, and the epilogue halves them, so that no "
            f"rank has both halves; give {weight} as a pair of DTensors, one for each half (of a GatedMLP: "
            "stacked=False), or " + _INSTEAD.format(what=weight)
        )
    if call.b.halves == 2 and (does != "halves" or any("2N" in own for own in how.axes)):
        raise ValueError(
            f"{call.op}: the halves of {weight} are sharded along the product's columns; the epilogue must halve "
            "these, as gemmery.epilogues.swiglu does, and its arguments have as many columns as one half"
        )


def _text(roles: Sequence[str]) -> str:
    words = {"M": "its rows", "N": "its columns"}
    return " and ".join(dict.fromkeys(words.get(role, "its batch") for role in roles))


def check_parts(name: str, operand: Operand, mesh: DeviceMesh, roles: Sequence[str]) -> None:
    """Raises ValueError if a packed second operand cannot be cut into the parts.

    Args:
        name: what messages call it.
        roles: see `Sharding`.
    """
    sizes = dict(zip((*_batch_names(operand), "K", "N"), operand.matrix.shape, strict=True))
    for axis in sizes.keys() & set(roles):
        grain, size, parts = operand.grain(axis), sizes[axis], parts_of(mesh, roles, axis)
        if grain and parts > 1 and size % (parts * grain):
            what = {"N": "rows", "K": "columns"}.get(axis, "matrices")
            raise ValueError(
                f"{name} has {size} {what} and is sharded into {parts} parts; each must have a multiple of {grain}"
            )


def parts_of(mesh: DeviceMesh, roles: Sequence[str], role: str) -> int:
    """The number of parts into which a dimension of a product is cut."""
    # A list: the compiler can't follow a generator here.
    return math.prod([mesh.size(i) for i, each in enumerate(roles) if each == role])


def _batch_names(operand: Operand) -> tuple[str, ...]:
    count = operand.matrix.dim() - 2
    return tuple([f"b-{count - i}" for i in range(count)])


# ---------------------------------------------------------------------------------------------------------------------
# To local tensors and back


def local_tensors(call: Call, how: Sharding, adds_once: bool) -> list[Tensor]:
    """Each rank's parts of the call's tensors.

    Args:
        adds_once: whether addends of a partial sum are added on one rank, and zeros on the others.
    """
    operands = len(call.a.tensors) + len(call.b.tensors)
    found = []
    for i, x in enumerate(call.tensors):
        local = to_local(x, how.wanted(i), how.of_gradient(i))
        if adds_once and i >= operands and "K" in how.roles:
            local = _Once.apply(local, adds_here(how))  # type: ignore[no-untyped-call]
        found.append(local)
    return found


def adds_here(how: Sharding) -> bool:
    """Whether this is the rank that adds the addends to its partial sum."""
    at = how.mesh.get_coordinate()
    assert at is not None
    return all([at[i] == 0 for i, role in enumerate(how.roles) if role == "K"])


def to_local(x: Tensor, wanted: list[Placement], of_gradient: list[Placement]) -> Tensor:
    """A rank's part of a tensor with the required placements.

    Args:
        of_gradient: the placements of the parts' gradients.
    """
    if not isinstance(x, DTensor):
        return x  # a number
    is_there = list(x.placements) == wanted
    if is_compiling():
        # The compiler knows these, and has no second derivatives.
        x = x if is_there else x.redistribute(placements=wanted)
        local: Tensor = x.to_local(grad_placements=of_gradient)
        return local
    x = x if is_there else _Moved.apply(x, wanted)  # type: ignore[no-untyped-call]
    return _Part.apply(x, of_gradient)  # type: ignore[no-untyped-call, no-any-return]


def from_local(x: Tensor, mesh: DeviceMesh, placements: list[Placement], shape: tuple[int, ...]) -> Tensor:
    """A rank's part as a DTensor of a shape. Parts may differ in size."""
    if is_compiling():
        return _made(x, mesh, placements, shape)
    # To parts of a sum the gradient is that of the sum.
    of_gradient = [Replicate() if place.is_partial() else place for place in placements]
    return _Whole.apply(x, mesh, placements, shape, of_gradient)  # type: ignore[no-untyped-call, no-any-return]


def _made(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]) -> Tensor:
    strides = [1] if shape else []
    for size in shape[:0:-1]:
        strides.append(strides[-1] * max(size, 1))
    # torch takes an empty shape for none.
    sizes: dict[str, Any] = {"shape": torch.Size(shape), "stride": tuple(strides[::-1])} if shape else {}
    made: Tensor = DTensor.from_local(x, mesh, placements, run_check=False, **sizes)
    return made


class _Moved(torch.autograd.Function):
    """A DTensor with other placements, with derivatives of all orders.

    `redistribute` has no second derivatives in torch 2.11: they lack the part that passes through it.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor, placements: Sequence[Placement]) -> DTensor:
        ctx.placements = x.placements
        return x.redistribute(placements=placements)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None]:
        # To parts of a sum the gradient is that of the sum.
        wanted = [
            Replicate() if place.is_partial() and not own.is_partial() else place
            for own, place in zip(grad.placements, ctx.placements, strict=True)
        ]
        return _Moved.apply(grad, wanted), None  # type: ignore[no-untyped-call]


class _Part(torch.autograd.Function):
    """A DTensor's local tensor. Its gradient is a `_Whole`, whose gradient is this again, so that all orders are right.

    torch's `to_local` and `from_local` do not handle the placements of partial sums' second derivatives.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor, of_gradient: list[Placement]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.placements, ctx.shape, ctx.of_gradient = (
            x.device_mesh,
            x.placements,
            x.shape,
            of_gradient,
        )
        local = x.to_local()
        local = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        made = _Whole.apply(grad, ctx.mesh, ctx.of_gradient, tuple(ctx.shape), ctx.placements)  # type: ignore[no-untyped-call]
        return made, None


class _Whole(torch.autograd.Function):
    """A DTensor of local tensors; see `_Part`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...],
        of_gradient: Sequence[Placement],
    ) -> Tensor:  # fmt: skip
        ctx.placements, ctx.of_gradient = placements, of_gradient
        return _made(x, mesh, placements, shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:
        if list(grad.placements) != list(ctx.of_gradient):
            grad = _Moved.apply(grad, ctx.of_gradient)  # type: ignore[no-untyped-call]
        return _Part.apply(grad, ctx.placements), None, None, None, None  # type: ignore[no-untyped-call]


class _Once(torch.autograd.Function):
    """An addend of a sum of which each rank has a part: the addend on one rank, 0 on the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_first: bool) -> Tensor:
        ctx.is_first = is_first
        return x.view_as(x) if is_first else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Everywhere.apply(grad, ctx.is_first), None  # type: ignore[no-untyped-call]


class _Everywhere(torch.autograd.Function):
    """The gradient of `_Once`: that of the sum, which is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, is_first: bool) -> Tensor:
        ctx.is_first = is_first
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Once.apply(grad, ctx.is_first), None  # type: ignore[no-untyped-call]


def _local(call: Call, how: Sharding, ways: Ways, adds_once: bool = False) -> Call:
    """The call with each rank's parts."""
    tensors = local_tensors(call, how, adds_once)
    of_a, of_b = len(call.a.tensors), len(call.b.tensors)
    a = ways.part(call.a, tensors[:of_a], call.a.sizes)
    sizes = call.b.sizes_of_part(functools.partial(parts_of, how.mesh, how.roles))
    b = ways.part(call.b, tensors[of_a : of_a + of_b], sizes)
    left = iter(tensors[of_a + of_b :])
    inputs = tuple([next(left) if isinstance(x, Tensor) else x for x in call.inputs])
    outer = tuple([x for x in (a.outer, b.outer) if x is not None])
    return replace(call, a=a, b=b, inputs=inputs, outer=outer)


def _behind_sum(call: Call, how: Sharding, ways: Ways) -> Any:
    """The results of an epilogue if each rank has a partial sum: the parts are added, then it runs in torch."""
    local = _local(call, how, ways)
    options = local.options._replace(out_dtype=call.wide)
    products = [
        ways.bare(
            replace(
                local, b=part, function=unchanged, captured=NOTHING, inputs=(), biases=0, options=options,
                ready=local.a.is_dense and part.is_dense,
            )
        )
        for part in local.b.parts()
    ]  # fmt: skip
    product = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
    parts = from_local(product, how.mesh, how.of_result(), call.shape)
    summed = how.summed().of_result()
    # The operator has multiplied by the operands' scales.
    return ways.behind(replace(local, outer=()), to_local(parts, summed, summed))


def _whole_shape(call: Call, how: Sharding, does: str, local: Tensor) -> tuple[int, ...]:
    """The shape of a result of which each rank has a part."""
    shape = call.shape
    if not any(how.roles):
        return tuple(local.shape)
    if not does:
        return shape
    if local.dim() < len(shape):
        return shape[:-1]
    return (*shape[:-1], shape[-1] // call.b.halves if "N" in how.roles else local.shape[-1])
