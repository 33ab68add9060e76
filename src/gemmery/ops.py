"""The operators that torch's own machinery sees: `torch.ops.gemmery.gemm` and `gemm_out`.

Registered with `torch.library.Library`, which costs less a call than `custom_op`. They carry fake implementations
(shapes and types, for torch.compile and export) and gradients; eager inference goes past them (see `dispatch`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch.compiler import is_compiling

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


def gemm(
    a: Tensor,
    b: Tensor,
    addend: Tensor | None,
    alpha: Number,
    beta: Number,
    out_dtype: torch.dtype | None,
    *how: Any,
) -> Tensor:
    """The operator, which torch.func's transforms differentiate too; arguments are the operator's."""
    run = Gemm.apply if in_transform() else torch.ops.gemmery.gemm
    product: Tensor = run(a, b, addend, alpha, beta, out_dtype, *how)
    return product


def in_transform() -> bool:
    """Whether a transform of torch.func is to see an operator; the compiler follows these by itself."""
    return not is_compiling() and _are_functorch_transforms_active()


def _product(a: Tensor, b: Tensor, alpha: Number, how: tuple[Any, ...]) -> Tensor:
    return gemm(a, b, None, alpha, 1, None, *how, None)


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


# ---------------------------------------------------------------------------------------------------------------------
# torch.func: its gradients don't take what `register_autograd` makes of an operator, and its vmap needs a rule


def _mapped_first(x: Tensor, dim: int | None) -> Tensor:
    return x.unsqueeze(0) if dim is None else x.movedim(dim, 0)


def _with_rank(x: Tensor, rank: int) -> Tensor:
    """A tensor with dimensions of 1 behind its first, so that it has so many."""
    return x.reshape(x.shape[0], *[1] * (rank - x.dim()), *x.shape[1:])


def _vmap(
    info: Any, in_dims: Any, a: Tensor, b: Tensor, addend: Tensor | None, *rest: Any
) -> tuple[Tensor, int]:
    """A product with the mapped dimension as the first of its batch."""
    a, b = (_mapped_first(x, dim) for x, dim in zip((a, b), in_dims, strict=False))
    vector_a, vector_b = a.dim() == 2, b.dim() == 2
    a, b = a.unsqueeze(-2) if vector_a else a, b.unsqueeze(-1) if vector_b else b
    rank = max(a.dim(), b.dim())
    a, b = _with_rank(a, rank), _with_rank(b, rank)
    if a.shape[0] == b.shape[0] == 1:
        # What is added alone is mapped.
        a = a.expand(info.batch_size, *a.shape[1:])
    if addend is not None:
        addend = _with_rank(_mapped_first(addend, in_dims[2]), rank - vector_a - vector_b)
        addend = addend.unsqueeze(-1) if vector_b else addend
        addend = addend.unsqueeze(-2) if vector_a else addend
    product = gemm(a, b, addend, *rest)
    product = product.squeeze(-1) if vector_b else product
    return product.squeeze(-2 if not vector_b else -1) if vector_a else product, 0


torch.library.register_vmap("gemmery::gemm", _vmap, lib=LIBRARY)


def for_transforms(operator: Any, save: Any, gradients: Any, vmap: Any) -> Any:
    """An operator as torch.func takes it; arguments are those with which it is registered."""

    def forward(*arguments: Any) -> Any:
        return operator(*arguments)

    # Static methods, each of which torch asks whether it is there.
    parts = {"forward": forward, "setup_context": save, "backward": gradients, "vmap": vmap}
    return type(operator.__name__, (torch.autograd.Function,), {k: staticmethod(v) for k, v in parts.items()})


Gemm = for_transforms(torch.ops.gemmery.gemm.default, _save, _gradients, _vmap)
