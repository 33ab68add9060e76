"""torch's operators on a packed weight: moves, copies and slices, but no arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import return_and_correct_aliasing

if TYPE_CHECKING:
    from .weight import PackedWeight

aten = torch.ops.aten


def call(cls: type[PackedWeight], func: Any, args: Any, kwargs: Any) -> Any:
    """An operator of torch with a packed weight among its arguments."""
    operator = _OPERATORS.get(func)
    if operator is None:
        # In inference mode operators come here before torch has taken them apart.
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if func is aten.cat.default and all(type(x) is cls for x in args[0]):
        return _cat(cls, *args, **kwargs)
    if operator is None or not isinstance(args[0], cls):
        weight = next(
            (x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, cls)), None
        )
        if func is aten.copy_.default:
            raise TypeError(
                f"copy_: a plain tensor can't take {weight!r}, but its {cls.plain}(). To load a state dict that has "
                f"such weights, {cls.prepared_by}"
            )
        use = "it can be the weight of gemmery.linear"
        if func in _TRANSPOSES:
            use = "gemmery.linear, matmul and bmm take it as it is, (*batch, N, K), not transposed"
        if func in _SPLITS:
            use = (
                "gemmery.distributed shards it for tensor parallelism, fully_shard leaves it whole with "
                "ignored_params, and its shard() is one part"
            )
        raise NotImplementedError(
            f"{func}: not defined for {weight!r}; {use}, and its {cls.plain}() is a plain tensor"
        )
    return operator(func, *args, **kwargs)


def _each(
    weight: PackedWeight, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
) -> PackedWeight:
    return weight.with_parts({name: change(x) for name, x in weight.parts().items()}, dtype=dtype)


def _detach(func: Any, weight: PackedWeight) -> Any:
    result = _each(weight, lambda x: x.detach())
    return return_and_correct_aliasing(func, (weight,), {}, result)


def _as_strided(func: Any, weight: PackedWeight, size: Any, stride: Any, offset: int | None = None) -> Any:
    """For torch.compile, which makes a graph's result that is an alias of its input in this way."""
    if (tuple(size), tuple(stride), offset or 0) != (tuple(weight.shape), weight.stride(), 0):
        raise NotImplementedError(f"as_strided: {weight!r} has fixed strides")
    return _detach(aten.detach.default, weight)


def _clone(func: Any, weight: PackedWeight, *, memory_format: Any = None) -> PackedWeight:
    return _each(weight, lambda x: x.clone())


def _empty_like(
    func: Any,
    weight: PackedWeight,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **options: Any,
) -> PackedWeight:
    if dtype not in (None, weight.dtype):
        raise ValueError(f"empty_like: dtype is {dtype} and the weight {weight!r}; they must be the same")
    return _each(weight, lambda x: torch.empty_like(x, device=device))


def _to_copy(
    func: Any,
    weight: PackedWeight,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    non_blocking: bool = False,
    **options: Any,
) -> PackedWeight:
    if dtype not in (None, torch.float16, torch.bfloat16):
        raise ValueError(
            f"to: dtype is {dtype}; {weight!r} can be of torch.float16 or torch.bfloat16, and its "
            f"{weight.plain}({dtype}) is a plain tensor"
        )
    if dtype not in (None, weight.dtype):
        weight = weight.in_type(dtype)
    # Always a copy: this operator is not called where there is nothing to do.
    return _each(weight, lambda x: x.to(device=device, non_blocking=non_blocking, copy=True))


def converted(
    caller: str, name: str, values: Tensor, dtype: torch.dtype, *, may_vanish: bool = False
) -> Tensor:
    """Scales, zeros or offsets in a type of 16 bits; an error where that changes what they mean.

    That is where a number becomes infinite, a scale becomes 0 (unless it may), or a zero point is rounded. Not checked
    on the meta device and under tracing, where there are no values.
    """
    result = values.to(dtype)
    if result.dtype == values.dtype or has_no_values(values):
        return result
    wide = values if values.is_floating_point() and values.itemsize > 1 else values.float()
    is_bad = result.isinf() & ~wide.isinf()
    if name == "scales" and not may_vanish:
        is_bad = is_bad | ((result == 0) & (wide != 0))
    if name == "zeros":
        is_bad = is_bad | (result.to(wide.dtype) != wide)
    if is_bad.any():
        value = wide[is_bad][0].item()
        became = result[is_bad][0].item()
        raise ValueError(f"{caller}: {name} have {value:g}, which would become {became:g} in {dtype}")
    return result


def has_no_values(x: Tensor) -> bool:
    """Whether a tensor is on the meta device or traced, so that its numbers can't be looked at."""
    # While the compiler infers shapes, torch before 2.12 does not report that it compiles.
    return x.device.type == "meta" or torch.compiler.is_compiling() or is_fake(x)


def _copy(func: Any, weight: PackedWeight, source: Any, non_blocking: bool = False) -> Any:
    if type(source) is not type(weight):
        raise TypeError(
            f"copy_: the source is a {type(source).__name__} and the weight {weight!r}; see {weight.made_by}. "
            "Load a state dict of dense weights before the model's layers are replaced"
        )
    old, new = (_layout(x) for x in (weight, source))
    if old != new:
        differing = ", ".join(
            f"{key} {new.get(key)} for {old.get(key)}" for key in old | new if old.get(key) != new.get(key)
        )
        raise ValueError(f"copy_: the layout differs from that of {weight!r}: {differing}")
    parts = source.parts()
    for name, part in weight.parts().items():
        part.copy_(parts[name], non_blocking)
    return return_and_correct_aliasing(func, (weight, source), {}, weight)


def _layout(weight: PackedWeight) -> dict[str, Any]:
    """The properties in which two weights must agree for one to be copied into the other."""
    about = {
        "shape": tuple(weight.shape),
        "dtype": weight.dtype,
    }
    return about | weight.about() | {name: (tuple(x.shape), x.dtype) for name, x in weight.parts().items()}


def _select(func: Any, weight: PackedWeight, dim: int, index: int) -> PackedWeight:
    axis = dim % weight.ndim
    if axis >= weight.ndim - 2:
        raise NotImplementedError(
            f"select: dimension {dim} of {weight!r} is not a batch dimension; use a slice"
        )
    batch = list(weight.shape[:-2])
    del batch[axis]
    return weight.of_batch(tuple(batch), lambda x: x.select(axis, index))


def _slice(
    func: Any,
    weight: PackedWeight,
    dim: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> Any:
    axis = dim % weight.ndim
    part = range(weight.shape[axis])[start:stop:step]
    if axis < weight.ndim - 2:
        batch = list(weight.shape[:-2])
        batch[axis] = len(part)
        return weight.of_batch(tuple(batch), lambda x: x[(slice(None),) * axis + (slice(start, stop, step),)])
    if step != 1:
        raise ValueError(f"slice: rows and columns of {weight!r} can only be sliced with step 1, not {step}")
    if len(part) == weight.shape[axis]:
        return return_and_correct_aliasing(func, (weight,), {}, _each(weight, lambda x: x.detach()))
    cut = weight.cut_rows if axis == weight.ndim - 2 else weight.cut_columns
    return cut(part.start, max(part.start, part.stop))


def _cat(cls: type[PackedWeight], weights: list[PackedWeight], dim: int = 0) -> PackedWeight:
    first = weights[0]
    if dim % first.ndim != first.ndim - 2:
        raise NotImplementedError(
            f"cat: dim is {dim} of {first!r}; packed weights can only be concatenated along rows, -2"
        )
    return cls.stack_rows(weights)


def _unbind(func: Any, weight: PackedWeight, dim: int = 0) -> list[PackedWeight]:
    return [_select(func, weight, dim, i) for i in range(weight.shape[dim])]


_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
_TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)
_OPERATORS: dict[Any, Callable[..., Any]] = {
    aten._to_copy.default: _to_copy,
    aten.alias.default: _detach,
    aten.as_strided.default: _as_strided,
    aten.clone.default: _clone,
    aten.copy_.default: _copy,
    aten.detach.default: _detach,
    aten.empty_like.default: _empty_like,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.unbind.int: _unbind,
}
