"""The operators that torch's own machinery sees: `torch.ops.gemmery.gemm` and `gemm_out`.

Registered with `torch.library.Library`, which costs less a call than `custom_op`. They carry fake implementations
(shapes and types, for torch.compile and export) and gradients; eager inference goes past them (see `dispatch`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import Number, Options, check, eager

LIBRARY = torch.library.Library("gemmery", "DEF")
LIBRARY.define(
    "gemm(Tensor a, Tensor b, Tensor? addend, Scalar alpha, Scalar beta, ScalarType? out_dtype, str precision, "
    "bool fast_accum, bool batch_invariant, str? config) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
LIBRARY.define(
    "gemm_out(Tensor a, Tensor b, Tensor? addend, Scalar alpha, Scalar beta, str precision, bool fast_accum, "
    "bool batch_invariant, str? config, Tensor(a!) out) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)


def _gemm(
    a: Tensor, b: Tensor, addend: Tensor | None, alpha: Number, beta: Number, out_dtype: torch.dtype | None,
    precision: Any, fast_accum: bool, batch_invariant: bool, config: str | None,
) -> Tensor:  # fmt: skip
    options = Options(out_dtype, precision, fast_accum, batch_invariant, config)
    return eager("gemm", a, b, addend, alpha, beta, None, options)


def _gemm_out(
    a: Tensor, b: Tensor, addend: Tensor | None, alpha: Number, beta: Number, precision: Any, fast_accum: bool,
    batch_invariant: bool, config: str | None, out: Tensor,
) -> None:  # fmt: skip
    options = Options(out.dtype, precision, fast_accum, batch_invariant, config)
    eager("gemm", a, b, addend, alpha, beta, out, options)


for _key in ("CPU", "CUDA"):
    LIBRARY.impl("gemm", _gemm, _key)
    LIBRARY.impl("gemm_out", _gemm_out, _key)


@torch.library.register_fake("gemmery::gemm", lib=LIBRARY)
def _gemm_fake(
    a: Tensor, b: Tensor, addend: Tensor | None, alpha: Number, beta: Number, out_dtype: torch.dtype | None,
    precision: Any, fast_accum: bool, batch_invariant: bool, config: str | None,
) -> Tensor:  # fmt: skip
    shape, dtype = check("gemm", a, b, addend, alpha, beta, None, Options(out_dtype, precision))
    return a.new_empty(shape, dtype=dtype)


@torch.library.register_fake("gemmery::gemm_out", lib=LIBRARY)
def _gemm_out_fake(
    a: Tensor, b: Tensor, addend: Tensor | None, alpha: Number, beta: Number, precision: Any, fast_accum: bool,
    batch_invariant: bool, config: str | None, out: Tensor,
) -> None:  # fmt: skip
    check("gemm", a, b, addend, alpha, beta, out, Options(out.dtype, precision))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, addend, alpha, beta, _, precision, _, batch_invariant, _ = inputs
    if not a.dtype.is_floating_point or a.dtype.itemsize == 1:
        raise TypeError(f"gemm: no gradient for {a.dtype} operands, but one of the arguments requires it")
    ctx.save_for_backward(a, b)
    ctx.alpha, ctx.beta, ctx.how = alpha, beta, (precision, False, batch_invariant)
    ctx.addend = None if addend is None else (addend.shape, addend.dtype)


def _product(a: Tensor, b: Tensor, alpha: Number, how: tuple[Any, ...]) -> Tensor:
    product: Tensor = torch.ops.gemmery.gemm(a, b, None, alpha, 1, None, *how, None)
    return product


def factor_gradients(
    a: Tensor, b: Tensor, grad: Tensor, alpha: Number, how: tuple[Any, ...], needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """`grad @ b.mT` and `a.mT @ grad`, each where it is needed, summed over the dimensions that were broadcast."""
    grad_a = grad_b = None
    # A vector a is one row and a vector b one column; the gradient gets the dimensions that the result lost.
    g = grad.to(a.dtype)
    g = g.unsqueeze(-1) if b.dim() == 1 else g
    g = g.unsqueeze(-2) if a.dim() == 1 else g
    left = a.unsqueeze(0) if a.dim() == 1 else a
    right = b.unsqueeze(-1) if b.dim() == 1 else b
    if needs[0]:
        grad_a = _product(g, right.mT, alpha, how).sum_to_size(left.shape).reshape(a.shape)
    if needs[1]:
        if right.dim() == 2 and left.dim() > 2:
            # One weight for all: the sum over the batch is part of the product's K.
            left, g = left.flatten(0, -2), g.flatten(0, -2)
        grad_b = _product(left.mT, g, alpha, how).sum_to_size(right.shape).reshape(b.shape)
    return grad_a, grad_b


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Of a, b and what was added; a and b are saved."""
    a, b = ctx.saved_tensors
    grad_a, grad_b = factor_gradients(a, b, grad, ctx.alpha, ctx.how, ctx.needs_input_grad[:2])
    grad_addend = None
    if ctx.needs_input_grad[2]:
        shape, dtype = ctx.addend
        scaled = grad if ctx.beta == 1 else grad * ctx.beta
        grad_addend = scaled.sum_to_size(shape).to(dtype)
    return grad_a, grad_b, grad_addend, None, None, None, None, None, None, None


torch.library.register_autograd("gemmery::gemm", _gradients, setup_context=_save, lib=LIBRARY)
