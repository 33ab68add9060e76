"""Products with a packed weight as operators: what torch.compile, autograd, transforms and modes see of them.

Operators take the tensors that a weight consists of, and what else it takes to put it together again; columns that it
has in another order are put in order before. `torch.ops.gemmery.packed` is the bare product and has gradients, which
`packed_backward` computes with the dequantised weight, which lives briefly. `packed_fused` is a product with biases
and an epilogue in the kernel; it has no gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import fused
from .call import Call, check, make_call, output_types
from .dispatch import Options, eager
from .formats.base import FORMATS
from .formats.tensor import QuantizedTensor
from .fused_ops import FROM_COMPILED, apart, fake_results, held_by, type_of_text, unflatten
from .fused_transforms import leading
from .ops import LIBRARY, for_transforms, in_transform

_WEIGHT = (
    "Tensor words, Tensor? scales, Tensor? zeros, Tensor? offsets, Tensor? channel, SymInt[] shape, str format, "
    "int group_size, ScalarType dtype"
)
#: How many arguments that is.
_PARTS = 9
_TENSORS = 5
_HOW = "str precision, bool fast_accum, bool batch_invariant, str? config"
LIBRARY.define(
    f"packed(Tensor a, {_WEIGHT}, str op, ScalarType? out_dtype, {_HOW}) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
LIBRARY.define(
    f"packed_backward(Tensor grad, {_WEIGHT}, bool batch_invariant) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
LIBRARY.define(
    f"packed_fused(Tensor a, {_WEIGHT}, str op, Tensor[] tensors, Scalar[] numbers, str kinds, str epilogue, "
    f"int biases, str out_dtype, {_HOW}) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)


def flat(weight: QuantizedTensor) -> tuple[Any, ...]:
    """A weight without permutation as arguments of an operator."""
    return (
        weight.words, weight.scales, weight.zeros, weight.offsets, weight.channel, list(weight.shape),
        weight.format_name, weight.group_size, weight.dtype,
    )  # fmt: skip


def _weight(
    words: Tensor, scales: Tensor | None, zeros: Tensor | None, offsets: Tensor | None, channel: Tensor | None,
    shape: Any, format: str, group_size: int, dtype: torch.dtype,
) -> QuantizedTensor:  # fmt: skip
    inner = {"words": words, "scales": scales, "zeros": zeros, "offsets": offsets, "channel": channel}
    return QuantizedTensor._assemble(shape, FORMATS[format], dtype, group_size, inner)


# ---------------------------------------------------------------------------------------------------------------------
# The bare product


def _packed(a: Tensor, *rest: Any) -> Tensor:
    op, *options = rest[_PARTS:]
    result: Tensor = fused.inside(op, a, _weight(*rest[:_PARTS]), None, fused.UNCHANGED, (), tuple(options))
    return result


def _packed_fake(a: Tensor, *rest: Any) -> Tensor:
    op, out_dtype, *how = rest[_PARTS:]
    options = Options(None, *how)
    call = make_call(op, a, _weight(*rest[:_PARTS]), None, fused.UNCHANGED, (), out_dtype, options)
    check(call)
    (dtype,) = output_types(call, [(call.summed, True)])
    return call.a.new_empty(call.shape, dtype=dtype)


def _packed_backward(grad: Tensor, *rest: Any) -> Tensor:
    weight = _weight(*rest[:_PARTS]).dequantize()
    options = Options(batch_invariant=rest[_PARTS])
    return eager("gemm", grad.to(weight.dtype), weight, None, 1, 1, None, options)


def _packed_backward_fake(grad: Tensor, *rest: Any) -> Tensor:
    *_, shape, _, _, dtype = rest[:_PARTS]
    batch = torch.broadcast_shapes(grad.shape[:-2], shape[:-2])
    return grad.new_empty((*batch, grad.shape[-2], shape[-1]), dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, *rest = inputs
    ctx.save_for_backward(*rest[:_TENSORS])
    ctx.shape, ctx.dtype = a.shape, a.dtype
    ctx.rest, ctx.how = rest[_TENSORS:_PARTS], rest[_PARTS:]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Of a alone: a packed weight has none."""
    *_, batch_invariant, _ = ctx.how
    of_a = None
    if ctx.needs_input_grad[0]:
        run = PackedBackward.apply if in_transform() else torch.ops.gemmery.packed_backward
        of_a = run(grad, *ctx.saved_tensors, *ctx.rest, batch_invariant)
        of_a = of_a.sum_to_size(ctx.shape)
    return of_a, *_none(ctx.rest), *[None] * len(ctx.how)


def _none(rest: Any) -> list[None]:
    return [None] * (_TENSORS + len(rest))


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, *rest = inputs
    ctx.save_for_backward(*rest[:_TENSORS])
    ctx.shape, ctx.dtype = grad.shape, grad.dtype
    ctx.rest, ctx.batch_invariant = rest[_TENSORS:_PARTS], rest[_PARTS]


def _gradients_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Of the product's gradient, in which the gradient of a is linear: the product."""
    dtype = ctx.rest[-1]
    run = Packed.apply if in_transform() else torch.ops.gemmery.packed
    again = run(
        grad.to(dtype),
        *ctx.saved_tensors,
        *ctx.rest,
        "matmul",
        torch.float32,
        "ieee",
        False,
        ctx.batch_invariant,
        None,
    )
    return again.sum_to_size(ctx.shape).to(ctx.dtype), *_none(ctx.rest), None


# ---------------------------------------------------------------------------------------------------------------------
# With an epilogue


def _arguments(a: Tensor, rest: Any) -> tuple[Any, ...]:
    """What a product takes, of what the operator was given; see `fused.inside`."""
    op, tensors, numbers, kinds, epilogue, biases, out_dtype, *how = rest[_PARTS:]
    values = unflatten(tensors, numbers, kinds)
    bias = tuple(values[:biases])
    given = bias[0] if biases == 1 else bias or None
    options = (type_of_text(out_dtype), *how)
    held = held_by(epilogue, FROM_COMPILED + kinds)
    return op, a, _weight(*rest[:_PARTS]), given, held, tuple(values[biases:]), options


def _packed_fused(a: Tensor, *rest: Any) -> list[Tensor]:
    made = fused.inside(*_arguments(a, rest))
    results = list(made) if isinstance(made, tuple) else [made]
    return apart(results, [a, *[x for x in (*rest[:_TENSORS], *rest[_PARTS + 1]) if x is not None]])


def _packed_fused_fake(a: Tensor, *rest: Any) -> list[Tensor]:
    op, a, weight, bias, epilogue, args, (out_dtype, *how) = _arguments(a, rest)
    call: Call = make_call(op, a, weight, bias, epilogue, args, out_dtype, Options(None, *how))
    check(call)
    return fake_results(call, epilogue.name, False)


for _key in ("CPU", "CUDA"):
    LIBRARY.impl("packed", _packed, _key)
    LIBRARY.impl("packed_backward", _packed_backward, _key)
    LIBRARY.impl("packed_fused", _packed_fused, _key)
torch.library.register_fake("gemmery::packed", _packed_fake, lib=LIBRARY)
torch.library.register_fake("gemmery::packed_backward", _packed_backward_fake, lib=LIBRARY)
torch.library.register_fake("gemmery::packed_fused", _packed_fused_fake, lib=LIBRARY)
torch.library.register_autograd("gemmery::packed", _gradients, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd(
    "gemmery::packed_backward", _gradients_backward, setup_context=_save_backward, lib=LIBRARY
)


# ---------------------------------------------------------------------------------------------------------------------
# vmap: the dimension that it hides becomes a batch dimension of the product


def _check_parts(in_dims: Any) -> None:
    if any(dim is not None for dim in in_dims[1 : 1 + _TENSORS]):
        raise NotImplementedError(
            "vmap: a packed weight can't be mapped; map over x, or use a batch of weights"
        )


def _first(x: Tensor, dim: int | None, rest: Any, size: int) -> Tensor:
    """The first operand with the mapped dimension, before as many others as make it broadcast with the weight."""
    rank = max(x.dim() - (dim is not None), len(rest[_TENSORS]))
    return leading(x, dim, rank, size, everywhere=True)


def _packed_vmap(info: Any, in_dims: Any, a: Tensor, *rest: Any) -> Any:
    _check_parts(in_dims)
    a = _first(a, in_dims[0], rest, info.batch_size)
    # Now it has one dimension more than its user knows of, which only a general product takes.
    run = Packed.apply if in_transform() else torch.ops.gemmery.packed
    return run(a, *rest[:_PARTS], "matmul", *rest[_PARTS + 1 :]), 0


def _packed_backward_vmap(info: Any, in_dims: Any, grad: Tensor, *rest: Any) -> Any:
    _check_parts(in_dims)
    grad = _first(grad, in_dims[0], rest, info.batch_size)
    run = PackedBackward.apply if in_transform() else torch.ops.gemmery.packed_backward
    return run(grad, *rest), 0


def _packed_fused_vmap(info: Any, in_dims: Any, a: Tensor, *rest: Any) -> Any:
    _check_parts(in_dims)
    a = _first(a, in_dims[0], rest, info.batch_size)
    tensors, others = rest[_PARTS + 1], rest[_PARTS + 2 :]
    dims = in_dims[_PARTS + 2] or [None] * len(tensors)
    tensors = [leading(x, d, a.dim() - 1, info.batch_size) for x, d in zip(tensors, dims, strict=True)]
    results = torch.ops.gemmery.packed_fused(a, *rest[:_PARTS], "matmul", tensors, *others)
    return results, [0] * len(results)


torch.library.register_vmap("gemmery::packed", _packed_vmap, lib=LIBRARY)
torch.library.register_vmap("gemmery::packed_backward", _packed_backward_vmap, lib=LIBRARY)
torch.library.register_vmap("gemmery::packed_fused", _packed_fused_vmap, lib=LIBRARY)

Packed = for_transforms(torch.ops.gemmery.packed.default, _save, _gradients, _packed_vmap)
PackedBackward = for_transforms(
    torch.ops.gemmery.packed_backward.default, _save_backward, _gradients_backward, _packed_backward_vmap
)
