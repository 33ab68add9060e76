"""What torch's transforms need of `torch.ops.gemmery.fused`: second derivatives, and a rule for vmap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import backward
from .epilogues.function import named
from .fused_ops import call_of, placed
from .ops import LIBRARY, gemm

#: Of an operator's arguments, those before the last of a call's own that are neither operands nor tensors.
_REST = 11
#: Where scales are among these.
_SCALES = 9


# ---------------------------------------------------------------------------------------------------------------------
# Second derivatives


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    a, b, right, tensors, *rest, _, grads, given, wanted = inputs
    ctx.save_for_backward(a, b, right, *tensors, *grads)
    ctx.rest, ctx.tensors, ctx.given, ctx.wanted = rest, len(tensors), given, wanted
    ctx.epilogue = named(rest[2])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, of_results: list[Tensor | None]) -> tuple[Any, ...]:
    """Of what the backward pass was given, by torch, which runs that pass again on the product of a and b."""
    count = 3 + ctx.tensors
    with torch.enable_grad():
        # Views: one of these tensors may have been computed from another, which must not count here.
        inputs = [None if x is None else x.view_as(x) for x in ctx.saved_tensors]
        results = _again(ctx, inputs[:3], inputs[3:count], inputs[count:])
    found = _derivatives(results, inputs, of_results)
    numbers, given, wanted = map(_no_gradients, (ctx.rest[0], ctx.given, ctx.wanted))
    others = [None] * (_REST - 3)
    return *found[:3], found[3:count], numbers, *others, [], [], None, found[count:], given, wanted


def _no_gradients(values: Sequence[Any]) -> list[None] | None:
    # torch takes a list of numbers for one value, unless it is empty.
    return None if values else []


def _again(ctx: Any, operands: Sequence[Any], tensors: Sequence[Any], grads: Sequence[Any]) -> list[Tensor]:
    biases, _, precision, _, batch_invariant = ctx.rest[3:8]
    a, *halves = [x for x in operands if x is not None]
    how = (precision, False, batch_invariant, None)
    product = torch.cat([gemm(a, b, None, 1, 1, None, *how) for b in halves], dim=-1)
    if biases:
        product = product + torch.cat(list(tensors[:biases]), dim=-1)
    first, second, right = operands
    call = call_of(first, second, right, tensors, *ctx.rest)
    return backward.by_torch(call, product, placed(grads, ctx.given), ctx.wanted)


def _derivatives(
    results: Sequence[Tensor], inputs: Sequence[Tensor | None], of_results: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of inputs from those of results; None where there is none."""
    asked = [i for i, x in enumerate(inputs) if x is not None and x.requires_grad]
    pairs = [(y, g) for y, g in zip(results, of_results, strict=True) if g is not None and y.requires_grad]
    if not pairs or not asked:
        return [None] * len(inputs)
    found = torch.autograd.grad(
        [y for y, _ in pairs], [x for x in inputs if x is not None and x.requires_grad], [g for _, g in pairs],
        allow_unused=True, create_graph=torch.is_grad_enabled(),
    )  # fmt: skip
    known = dict(zip(asked, found, strict=True))
    return [known.get(i) for i in range(len(inputs))]


torch.library.register_autograd("gemmery::fused_backward", _gradients, setup_context=_save, lib=LIBRARY)


# ---------------------------------------------------------------------------------------------------------------------
# vmap: the dimension that it hides becomes a batch dimension of the product


def leading(x: Tensor, dim: int | None, rank: int, size: int, everywhere: bool = False) -> Tensor:
    """A tensor whose mapped dimension comes first, before as many others as make it broadcast with `rank` of them.

    Args:
        everywhere: give a tensor that is not mapped that dimension, too.
    """
    if dim is None:
        if not everywhere:
            return x
        x, dim = x.unsqueeze(0), 0
    x = x.movedim(dim, 0)
    x = x.reshape(x.shape[0], *[1] * (rank + 1 - x.dim()), *x.shape[1:])
    return x.expand(size, *x.shape[1:])


def _rank(x: Tensor, dim: int | None) -> int:
    return x.dim() - (dim is not None)


def _fused_vmap(
    info: Any, in_dims: Any, a: Tensor, b: Tensor, right: Tensor | None, tensors: Sequence[Tensor], *rest: Any
) -> Any:
    of_a, of_b, of_right, of_tensors = in_dims[:4]
    if rest[_SCALES]:
        raise NotImplementedError(
            "vmap: operands with scales of blocks can't be mapped; give them a batch dimension"
        )
    of_tensors = of_tensors or [None] * len(tensors)
    rank = max(_rank(a, of_a), _rank(b, of_b))
    mapped = of_b is not None or of_right is not None
    b = leading(b, of_b, rank, info.batch_size, everywhere=mapped)
    # The product has the dimension in any case.
    a = leading(a, of_a, rank, info.batch_size, everywhere=not mapped)
    tensors = [leading(x, d, rank, info.batch_size) for x, d in zip(tensors, of_tensors, strict=True)]
    if right is not None:
        right = leading(right, of_right, rank, info.batch_size, everywhere=mapped)
        if right.stride() != b.stride():
            # Only one half is mapped, or they are along other dimensions: a kernel reads both in one way.
            b, right = b.contiguous(), right.contiguous()
    results = torch.ops.gemmery.fused(a, b, right, tensors, *rest)
    return results, [0 if x.dim() > 1 else None for x in results]


torch.library.register_vmap("gemmery::fused", _fused_vmap, lib=LIBRARY)
