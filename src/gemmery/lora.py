"""A linear layer with a low-rank adapter as one call: `gemmery.lora_linear`.

Forward there are two products: `u = scale * x @ a.T`, thin; and the large one, whose kernel adds `u @ b.T` to its
accumulators. Backward, `v = scale * g @ b` is thin, `v.T @ x` and `u.T @ g` are the gradients of a and b, and that of x
is `g @ weight`, whose kernel adds `v @ a`. So no matrix as large as x or the result is written and read again. The
backward pass needs x and u, which are kept.

For high ranks, and where rows must have the same bits in every batch, `u @ b.T` and `v @ a` are separate products,
which the epilogue of the large product adds; see `_in_kernel`.

u and v are (r, M), so that each thin product has r rows, as that of a few tokens with a weight. They are stored with
adjacent elements along r, as threads of the large product load them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .api import linear, matmul
from .dtensors import is_sharded
from .dtypes import accumulator
from .epilogues.function import Epilogue
from .epilogues.library import residual
from .formats.weight import PackedWeight
from .launch.unpacking import unpacked
from .operands import DenseOperand, Operand, PackedOperand, WithAdapter, rebuild
from .precision import AskedPrecision, resolved
from .product.build import weight_operand
from .product.check import check_not_packed, check_tensor
from .product.inner import inner_products
from .product.operator import LIBRARY
from .product.run import product
from .product.seen import autocast_dtype, check_forward_mode, in_transform, needs_dispatcher, wants_gradient
from .product.spec import NONE
from .product.spec import Options as How

_OP = "lora_linear"
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
RESIDUAL = Epilogue(residual)
#: The highest rank for which the large product's kernel adds the thin one.
MOST_RANK = 128


def lora_linear(
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    lora_x: Tensor | None = None,
    precision: AskedPrecision = "ieee",
    batch_invariant: bool = False,
) -> Tensor:
    """`x @ weight.T + bias + scale * (x @ a.T) @ b.T`: a linear layer with a LoRA adapter, in three products.

    Low-rank adaptation: Hu et al., "LoRA", 2021. With a 4-bit weight, this is QLoRA (Dettmers et al., 2023). The
    adapter's part is added in the epilogue of the large product, before rounding. The backward pass adds the two
    gradients of x in the same way. The forward pass multiplies a packed weight without unpacking it. In the backward
    pass, one kernel unpacks it, and the copy is freed after the product. The backward pass needs x, or `lora_x`, and
    `x @ a.T`, which are kept.

    x, a, b, bias and `lora_x` receive gradients. The weight is usually frozen; a dense weight that requires a gradient
    receives one, from separate products.

    Args:
        x: (..., K) in float16, bfloat16, float32 or float64, any strides.
        weight: (N, K), of the same type; dense, or a `gemmery.QuantizedTensor` or `gemmery.SparseTensor`.
        a: (r, K), of x's type or float32: rounded to x's type for the products. Its gradient has its type, from float32
            sums. The shape is that of `lora_A.weight` in peft.
        b: (N, r), as a; `lora_B.weight` in peft.
        bias: (N,), as a.
        scale: a number, such as `lora_alpha / r`.
        lora_x: the tensor that a multiplies instead of x, of the same shape and type, such as x after a dropout.
        precision: how float32 is multiplied, see `gemmery.matmul`.
        batch_invariant: see `gemmery.matmul`; of the forward pass.

    Returns:
        (..., N), of x's type.

    Raises:
        ValueError: shapes or devices do not fit, or a tensor is a DTensor.
        TypeError: a type is not supported, or two types do not match.
        NotImplementedError: a second derivative or a forward-mode derivative is required.

    Example:
        >>> import torch, gemmery
        >>> _ = torch.manual_seed(0)
        >>> x, a, b = torch.randn(5, 64), torch.randn(8, 64, requires_grad=True), torch.zeros(32, 8)
        >>> weight = gemmery.quantize(torch.randn(32, 64), "nf4")
        >>> y = gemmery.lora_linear(x.bfloat16(), weight, a, b.requires_grad_(), scale=2.0)
        >>> y.float().square().sum().backward()
        >>> y.dtype, b.grad.shape, b.grad.dtype
        (torch.bfloat16, torch.Size([32, 8]), torch.float32)
    """
    operand, permutation = None, None
    if isinstance(weight, PackedWeight):
        permutation = weight.permutation
        operand = weight_operand(weight if permutation is None else weight.unpermuted())
    given = _given(x, weight, a, b, bias, lora_x, operand)
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"{_OP}: scale is a {type(scale).__name__}; it must be a number")
    dtype = autocast_dtype(x.device)
    if dtype is not None and x.dtype != torch.float64:
        x, weight, a, b, bias, lora_x = _lowered(x, weight, a, b, bias, lora_x, operand, dtype)
        given = _given(x, weight, a, b, bias, lora_x, operand)
    _check_types(given)
    _check_shapes(**given)
    check_forward_mode(_OP, (x, a, b, bias, lora_x))
    if permutation is not None:
        if lora_x is None:
            a = a.index_select(-1, permutation)
        x = x.index_select(-1, permutation)
    how = resolved(precision, x)
    operand = DenseOperand(weight.mT) if operand is None else operand
    options = Options(float(scale), how, batch_invariant)
    if in_transform() or wants_gradient(operand.tensors):
        y = _composed(_rows(x), weight, a, b, bias, _rows(lora_x), options)
    elif needs_dispatcher((x, a, b, bias, lora_x, *operand.tensors), records=False):
        parts = list(operand.tensors), operand.sizes, operand.text
        y, _ = torch.ops.gemmery.lora_linear(_rows(x), *parts, a, b, bias, _rows(lora_x), *options)
    elif wants_gradient((x, a, b, bias, lora_x)):
        return _Recorded.apply(operand, options, x, a, b, bias, lora_x)  # type: ignore[no-untyped-call,no-any-return]
    else:
        y, _ = _forward(operand, _rows(x), a, b, bias, _rows(lora_x), options)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], b.shape[0])


def _rows(x: Any) -> Any:
    """A tensor as a matrix (M, K); None if there is none."""
    return x if x is None or x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


class Options(NamedTuple):
    """Of `lora_linear`."""

    scale: float
    precision: AskedPrecision
    batch_invariant: bool


def _composed(
    x: Tensor, weight: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, lora_x: Tensor | None, options: Options
) -> Tensor:  # fmt: skip
    """The same in products that are differentiated separately, for transforms and weights with a gradient."""
    how: dict[str, Any] = {"precision": options.precision, "batch_invariant": options.batch_invariant}
    # The columns of x are in its order already.
    weight = weight.unpermuted() if isinstance(weight, PackedWeight) else weight
    with torch.autocast(x.device.type, enabled=False):
        u = linear(x if lora_x is None else lora_x, a.to(x.dtype), **how) * options.scale
        z = linear(u, b.to(x.dtype), None if bias is None else bias.to(x.dtype), **how)
        made: Tensor = linear(x, weight, z, **how)
    return made


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


def _given(
    x: Tensor, weight: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, lora_x: Tensor | None,
    operand: Operand | None,
) -> dict[str, Tensor]:  # fmt: skip
    """The tensors by name, with checked types and devices; a packed weight is replaced by one tensor."""
    # Reading a property of a subclass of Tensor takes a microsecond.
    given = {"x": x, "weight": weight if operand is None else operand.matrix.mT, "a": a, "b": b}
    given |= {name: value for name, value in (("bias", bias), ("lora_x", lora_x)) if value is not None}
    if is_sharded((*given.values(), *(() if operand is None else operand.tensors))):
        raise ValueError(
            f"{_OP}: a tensor is a DTensor; give local ones (to_local), or use gemmery.linear for each product"
        )
    device = x.device if isinstance(x, Tensor) else None
    for name, value in given.items():
        if name != "weight":
            check_not_packed(_OP, name, value, "the weight")
        check_tensor(_OP, name, value)
        if value.device != device:
            raise ValueError(
                f"{_OP}: x is on {x.device} and {name} on {value.device}; they must be on one device"
            )
    return given


def _lowered(
    x: Tensor, weight: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, lora_x: Tensor | None,
    operand: Operand | None, dtype: torch.dtype,
) -> tuple[Any, ...]:  # fmt: skip
    """Tensors in the type that autocast asks for, except those of float32 which are rounded later."""
    if operand is not None:
        operand.lowered(_OP, ("x", "weight"), dtype)
    else:
        weight = weight.to(dtype)
    small = [None if t is None else t if t.dtype == torch.float32 else t.to(dtype) for t in (a, b, bias)]
    return x.to(dtype), weight, *small, None if lora_x is None else lora_x.to(dtype)


def _check_types(given: dict[str, Tensor]) -> None:
    kind = given["x"].dtype
    if kind not in _TYPES:
        raise TypeError(f"{_OP}: x is {kind}; it must be one of {', '.join(map(str, _TYPES))}")
    for name, value in given.items():
        may_be_wide = name in ("a", "b", "bias") and kind.itemsize == 2
        if value.dtype != kind and not (may_be_wide and value.dtype == torch.float32):
            if name == "weight":
                raise TypeError(
                    f"{_OP}: x is {kind} and weight is {value.dtype}; they must have the same type: "
                    "use x.to(weight.dtype)"
                )
            wanted = f"{kind} or torch.float32" if may_be_wide else f"{kind}"
            raise TypeError(f"{_OP}: x is {kind} and {name} is {value.dtype}; {name} must be {wanted}")


def _check_shapes(
    x: Tensor, weight: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, lora_x: Tensor | None = None
) -> None:
    if weight.dim() != 2:
        raise ValueError(f"{_OP}: weight is {tuple(weight.shape)}; it must be (N, K)")
    N, K = weight.shape
    if x.dim() == 0 or x.shape[-1] != K:
        raise ValueError(
            f"{_OP}: x is {tuple(x.shape)} and weight {tuple(weight.shape)}; x must be (..., {K})"
        )
    if a.dim() != 2 or a.shape[1] != K:
        raise ValueError(f"{_OP}: a is {tuple(a.shape)} and weight {tuple(weight.shape)}; a must be (r, {K})")
    if b.dim() != 2 or b.shape[0] != N or b.shape[1] != a.shape[0]:
        raise ValueError(
            f"{_OP}: b is {tuple(b.shape)}, a {tuple(a.shape)} and weight {tuple(weight.shape)}; b must be "
            f"({N}, {a.shape[0]})"
        )
    if bias is not None and tuple(bias.shape) != (N,):
        raise ValueError(f"{_OP}: bias is {tuple(bias.shape)}; it must be ({N},)")
    if lora_x is not None and lora_x.shape != x.shape:
        raise ValueError(f"{_OP}: lora_x is {tuple(lora_x.shape)} and x {tuple(x.shape)}; they must be alike")


# ---------------------------------------------------------------------------------------------------------------------
# Running


def _thin(factor: Tensor, x: Tensor, scale: float, precision: Any, batch_invariant: bool = False) -> Tensor:
    """`scale * factor @ x.T`, (r, M), with adjacent elements along r."""
    if batch_invariant:
        # Each row of x must be a row of a product.
        rows: Tensor = matmul(x, factor.mT, precision=precision, batch_invariant=True) * scale
        return rows.mT
    made = x.new_empty(x.shape[0], factor.shape[0]).mT
    product("addmm", factor, x.mT, None, NONE, made, How(precision=precision), (scale, 0))
    return made


def _forward(
    operand: Operand, x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, lora_x: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result (M, N), and u (r, M)."""
    scale, precision, batch_invariant = options
    kind = x.dtype
    with inner_products(x):
        a, b, bias = a.to(kind), b.to(kind), None if bias is None else bias.to(kind)
        u = _thin(a, x if lora_x is None else lora_x, scale, precision, batch_invariant)
        weight = operand.matrix.mT if operand.is_dense else operand.weight  # type: ignore[attr-defined]  # of a packed one
        how = How(precision=precision, batch_invariant=batch_invariant)  # type: ignore[arg-type]
        return _sum("linear", x, weight, u, b.mT, bias, None, how), u


def _in_kernel(rank: int, how: How) -> bool:
    """Whether the kernel of the large product adds the thin one.

    For high ranks, its loads from L2 take longer than a separate product. Kernels differ in the order in which they
    add.
    """
    return rank <= MOST_RANK and not how.batch_invariant


def _sum(
    op: str, x: Tensor, weight: Any, thin: Tensor, factor: Tensor, bias: Tensor | None, out: Tensor | None, how: How
) -> Tensor:  # fmt: skip
    """A product of x and a weight, and `thin.T @ factor` and a bias, rounded once.

    Args:
        thin, factor: (r, M), and (r, N) of any type.
    """
    if _in_kernel(len(thin), how):
        adapted = WithAdapter(x, thin.mT, _short_rows(factor, x.dtype))
        made: Tensor = product(op, adapted, weight, bias, NONE, out, how)
        return made
    z = product("matmul", thin.mT, factor.to(x.dtype), bias, NONE, None, how)
    # Not to z itself: kernels that may store an element twice could not add to it.
    made = product(op, x, weight, None, (RESIDUAL, (z,), None, ()), out, how)
    return made


def _short_rows(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """(r, N) in a type, with adjacent elements along r."""
    made = factor.mT
    if made.dtype == dtype and made.is_contiguous():
        return factor
    return torch.empty(made.shape, dtype=dtype, device=made.device).copy_(made).mT


def _run(
    x: Tensor, weight: list[Tensor], sizes: list[int], text: str, a: Tensor, b: Tensor, bias: Tensor | None,
    lora_x: Tensor | None, scale: float, precision: AskedPrecision, batch_invariant: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`_forward`, as the operator has it."""
    options = Options(scale, precision, batch_invariant)
    return _forward(rebuild(text, weight, sizes), x, a, b, bias, lora_x, options)


def _turned(b: Tensor, dtype: torch.dtype) -> Tensor:
    """b.T in another type; if it is copied, in the order that products read fastest."""
    return b.mT if b.dtype == dtype else torch.empty(b.mT.shape, dtype=dtype, device=b.device).copy_(b.mT)


def _unpacked(operand: Operand) -> Tensor:
    """The weight (N, K)."""
    if operand.is_dense:
        return operand.matrix.mT
    if isinstance(operand, PackedOperand):
        return unpacked(operand.weight)
    return type(operand)(operand.weight, True).loadable().matrix  # type: ignore[attr-defined,call-arg]  # of a packed one


def _backward(
    operand: Operand, grad: Tensor, x: Tensor | None, a: Tensor, b: Tensor, u: Tensor | None, bias: Tensor | None,
    scale: float, precision: AskedPrecision, apart: bool, wanted: list[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of x, a, b, bias and `lora_x`; None for those that are not requested.

    Args:
        x: what a multiplied; not needed without a's gradient.
        u: not needed without b's gradient.
        apart: whether a multiplied something else than the weight.
    """
    of_x, of_a, of_b, of_bias, of_lora_x = _empty(grad, a, b, bias, wanted)
    kind = grad.dtype
    how: dict[str, Any] = {"precision": precision}
    with inner_products(grad):
        needs_v = wanted[1] or wanted[4] or (wanted[0] and not apart)
        v = _thin(_turned(b, kind), grad, scale, precision) if needs_v else grad.new_empty(0)
        if wanted[2]:
            assert u is not None
            product("matmul", u, grad, None, NONE, of_b.mT, How(b.dtype, **how))
        if wanted[3]:
            of_bias.copy_(grad.sum(0, dtype=accumulator(kind)))
        if wanted[1]:
            assert x is not None
            product("matmul", v, x, None, NONE, of_a, How(a.dtype, **how))
        if wanted[4]:
            matmul(v.mT, a.to(kind), out=of_lora_x, **how)
        if wanted[0] and not apart:
            _sum("matmul", grad, _unpacked(operand), v, a, None, of_x, How(precision=precision))  # type: ignore[arg-type]
        elif wanted[0]:
            matmul(grad, _unpacked(operand), out=of_x, **how)
    return [of_x, of_a, of_b, of_bias, of_lora_x]


def _run_backward(
    grad: Tensor, x: Tensor | None, weight: list[Tensor], sizes: list[int], text: str, *others: Any
) -> list[Tensor]:
    """`_backward`, as the operator has it: gradients that are not requested are empty."""
    found = _backward(rebuild(text, weight, sizes), grad, x, *others)
    return [grad.new_empty(0) if value is None else value for value in found]


def _empty(grad: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, wanted: list[bool]) -> list[Any]:
    """The requested gradients, uninitialized; None for the others."""
    x_shape, kind = (grad.shape[0], a.shape[1]), grad.dtype
    shapes: list[Any] = [x_shape, a.shape, b.shape, (b.shape[0],), x_shape]
    types = [kind, a.dtype, b.dtype, kind if bias is None else bias.dtype, kind]
    return [
        grad.new_empty(shape, dtype=dtype) if needed else None
        for shape, dtype, needed in zip(shapes, types, wanted, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Where autograd alone wants to see a call, which takes the host a third of the operators' time


class _Recorded(torch.autograd.Function):
    """`_forward` and `_backward`, as autograd records them."""

    @staticmethod
    def forward(
        ctx: Any, operand: Operand, options: Options, x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None,
        lora_x: Tensor | None,
    ) -> Tensor:  # fmt: skip
        y, u = _forward(operand, _rows(x), a, b, bias, _rows(lora_x), options)
        # Not the operand, whose tensors autograd would then not free after the backward pass.
        ctx.kind, ctx.options = (operand.text, operand.sizes), options
        _keep(ctx, x, operand.tensors, a, b, bias, lora_x, u, ctx.needs_input_grad[3])
        # Not a view, because torch forbids in-place changes of a view that a function returns.
        return y if x.dim() == 2 else y.view(*x.shape[:-1], b.shape[0]).data

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return (None,) * 7
        own, a, b, u, *parts = ctx.saved_tensors
        (text, sizes), wanted = ctx.kind, list(ctx.needs_input_grad[2:])
        given = a, b, u, ctx.bias_like, ctx.options.scale, ctx.options.precision, ctx.apart, wanted
        rows = _rows(grad)
        if torch.is_grad_enabled() or needs_dispatcher((grad,), records=False):
            # torch knows that the operator has no gradient, and modes see it.
            made = torch.ops.gemmery.lora_backward(rows, _rows(own), parts, sizes, text, *given)
            found = [value if needed else None for value, needed in zip(made, wanted, strict=True)]
        else:
            found = _backward(rebuild(text, parts, sizes), rows, _rows(own), *given)
        if grad.dim() != 2:
            like_x = *grad.shape[:-1], a.shape[1]
            found = [x.view(like_x) if i in (0, 4) and x is not None else x for i, x in enumerate(found)]
        return None, None, *found


def _keep(
    ctx: Any, x: Tensor, weight: Sequence[Tensor], a: Tensor, b: Tensor, bias: Tensor | None, lora_x: Tensor | None,
    u: Tensor | None, needs_a: bool,
) -> None:  # fmt: skip
    """Keep what a backward pass needs."""
    ctx.apart, ctx.bias_like = lora_x is not None, None if bias is None else bias.new_empty(0)
    own = x if lora_x is None else lora_x
    ctx.save_for_backward(own if needs_a else None, a, b, u, *weight)
    ctx.set_materialize_grads(False)


# ---------------------------------------------------------------------------------------------------------------------
# The operators, for autograd, torch.compile and dispatch modes


def _run_fake(
    x: Tensor, weight: list[Tensor], sizes: list[int], text: str, a: Tensor, b: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], b.shape[0]), x.new_empty(x.shape[0], a.shape[0]).mT


def _backward_fake(grad: Tensor, *others: Any) -> list[Tensor]:
    _, _, _, _, a, b, _, bias, _, _, _, wanted = others
    return [grad.new_empty(0) if x is None else x for x in _empty(grad, a, b, bias, wanted)]


def _needs(ctx: Any) -> list[bool]:
    """Whether the gradients of x, a, b, bias and `lora_x` are asked for."""
    needs = ctx.needs_input_grad
    return [bool(needs[i]) for i in (0, 4, 5, 6, 7)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, ctx.sizes, ctx.text, a, b, bias, lora_x, ctx.scale, ctx.precision, _ = inputs
    _keep(ctx, x, weight, a, b, bias, lora_x, output[1] if b.requires_grad else None, a.requires_grad)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    own, a, b, u, *weight = ctx.saved_tensors
    # torch treats a list of numbers as one value, unless it is empty.
    sizes: list[Any] | None = None if ctx.sizes else []
    parts = [None] * len(weight)
    if grad is None:
        return None, parts, sizes, *[None] * 8
    wanted = _needs(ctx)
    found = torch.ops.gemmery.lora_backward(
        grad,
        own,
        weight,
        ctx.sizes,
        ctx.text,
        a,
        b,
        u,
        ctx.bias_like,
        ctx.scale,
        ctx.precision,
        ctx.apart,
        wanted,
    )
    of_x, *others = [value if needed else None for value, needed in zip(found, wanted, strict=True)]
    return of_x, parts, sizes, None, *others, None, None, None


def _no_second(ctx: Any, grads: list[Tensor]) -> None:
    raise NotImplementedError(
        f"{_OP}: no gradient of a gradient; call backward or torch.autograd.grad without create_graph=True"
    )


_WEIGHT = "Tensor[] weight, SymInt[] sizes, str text, Tensor a, Tensor b"
#: By name: the schema, what runs, and the function that gives only shapes and types.
_OPERATORS: dict[str, tuple[str, Any, Any]] = {
    "lora_linear": (
        f"(Tensor x, {_WEIGHT}, Tensor? bias, Tensor? lora_x, float scale, str precision, bool batch_invariant) -> "
        "(Tensor, Tensor)",
        _run,
        _run_fake,
    ),
    "lora_backward": (
        f"(Tensor grad, Tensor? x, {_WEIGHT}, Tensor? u, Tensor? bias, float scale, str precision, bool apart, "
        "bool[] wanted) -> Tensor[]",
        _run_backward,
        _backward_fake,
    ),
}
for _name, (_schema, _function, _fake) in _OPERATORS.items():
    LIBRARY.define(_name + _schema, tags=torch.Tag.pt2_compliant_tag)
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _function, _key)
    torch.library.register_fake(f"gemmery::{_name}", _fake, lib=LIBRARY)
torch.library.register_autograd("gemmery::lora_linear", _gradients, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd(
    "gemmery::lora_backward", _no_second, setup_context=lambda ctx, inputs, output: None, lib=LIBRARY
)
