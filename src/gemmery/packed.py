"""Products with a packed weight, from the call on: `fused` computes them; this is what torch wants besides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import fused
from .call import Factor
from .dispatch import OptionValues, check_tensor
from .formats.tensor import QuantizedTensor


def is_packed(b: Any) -> bool:
    """Whether a second factor is packed."""
    return isinstance(b, QuantizedTensor)


def product(
    op: str, a: Tensor, b: QuantizedTensor, bias: Factor | None, functions: tuple[Any, ...], out: Tensor | None,
    options: OptionValues,
) -> Any:  # fmt: skip
    """`a @ b.dequantize().mT` with what a user has done to it; arguments are those of `fused.product`.

    Gradients with respect to a and the bias go through torch, on the dequantised weight; a packed weight has none.
    """
    check_tensor(op, "x" if op == "linear" else "a", a)
    if functions[0] is None and not functions[1]:
        functions = (fused.UNCHANGED, (), *functions[2:])
    if torch.is_grad_enabled() and any(_wants(x) for x in (a, bias, *functions[1], *functions[3])):
        if out is not None:
            raise ValueError(f"{op}: out= does not support gradients, but one of the arguments requires them")
        return _with_gradients(op, a, b, bias, functions, options)
    return _plain(op, a, b, bias, functions, out, options)


def _wants(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _plain(
    op: str, a: Tensor, b: QuantizedTensor, bias: Factor | None, functions: tuple[Any, ...], out: Tensor | None,
    options: OptionValues,
) -> Any:  # fmt: skip
    if b.permutation is not None:
        a, b = a.index_select(-1, b.permutation), b.with_parts(b.parts() | {"permutation": None})
    if a.dim() == 1 and op != "bmm":
        # A vector is one row; what comes back has no rows.
        row = fused.product(op, a.unsqueeze(0), b, bias, functions, _row(out), options)
        return tuple([x.squeeze(0) for x in row]) if isinstance(row, tuple) else row.squeeze(0)
    return fused.product(op, a, b, bias, functions, out, options)


def _row(out: Tensor | None) -> Tensor | None:
    return None if out is None else out.unsqueeze(0)


class _Linear(torch.autograd.Function):
    """A bare product, whose gradient with respect to a is computed with the dequantised weight, which lives briefly."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, op: str, b: QuantizedTensor, options: OptionValues) -> Tensor:
        ctx.weight = b
        result: Tensor = _plain(op, a, b, None, (fused.UNCHANGED, (), None, ()), None, options)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weight = ctx.weight.dequantize()
        return (grads[0].to(weight.dtype) @ weight).to(grads[0].dtype), None, None, None


def _with_gradients(
    op: str,
    a: Tensor,
    b: QuantizedTensor,
    bias: Factor | None,
    functions: tuple[Any, ...],
    options: OptionValues,
) -> Any:
    """The product by the kernel, and what comes behind it in torch, so that autograd sees it."""
    epilogue, args, prologue, prologue_args = functions
    if prologue is not None:
        a = prologue(a.float(), *prologue_args).to(a.dtype)
    out_dtype, *how = options
    product = _Linear.apply(a, op, b, (torch.float32, *how))  # type: ignore[no-untyped-call]
    for part in _parts(bias):
        product = product + part
    made = epilogue(product, *args)
    kept = a.dtype if out_dtype is None else out_dtype
    cast = [x.to(kept) if x.dtype == torch.float32 else x for x in _parts(made)]
    return tuple(cast) if isinstance(made, tuple) else cast[0]


def _parts(value: Any) -> Sequence[Any]:
    return [] if value is None else list(value) if isinstance(value, tuple | list) else [value]
