"""The operations that a user calls, with torch's names and conventions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .formats.weight import TORCH_FUNCTIONS, PackedWeight
from .launch.plan import Plan
from .precision import AskedPrecision, resolved
from .problem import Config
from .product.check import check_not_packed, check_tensor
from .product.run import plan as plan_of
from .product.run import product
from .product.spec import NONE, Factor, Functions, Number, Options, OutTypes, scalars_of


def matmul(
    a: Tensor,
    b: Factor,
    *,
    bias: Factor | None = None,
    epilogue: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    prologue: Callable[..., Any] | None = None,
    prologue_args: Sequence[Any] = (),
    out: Tensor | None = None,
    out_dtype: OutTypes = None,
    precision: AskedPrecision = "ieee",
    fast_accum: bool = False,
    batch_invariant: bool = False,
    config: Config | dict[str, Any] | str | None = None,
) -> Any:
    """The matrix product `a @ b + bias`, with the broadcasting of torch.matmul.

    Args:
        a: (..., M, K) or (K,), any strides. One of a and b may be a block-sparse matrix in torch's BSR or BSC layout,
            with square blocks of 16, 32, 64 or 128 rows.
        b: (..., K, N) or (K,), any strides, on a's device. Its type must be that of a; the two fp8 types may be mixed.
            With an epilogue that halves the columns, it may be a pair of tensors, (K, N / 2) each and with the same
            strides. A pair counts as `torch.cat(b, -1)` and is not copied: gate and up as two weights. A packed or
            sparse weight, a `gemmery.QuantizedTensor` or a `gemmery.SparseTensor`, has the shape of a Linear's weight,
            (*batch, N, K).
        bias: (N,) or a shape that broadcasts to the product; added before rounding. For a pair, also a pair.
        epilogue: a torch function of the product and `args` that runs inside the kernel, or an `Epilogue` from
            `gemmery.epilogue`. It receives the product with the bias, in the accumulator's type. `matmul` returns its
            result, one tensor or a tuple.
        args: further arguments of the epilogue: tensors that broadcast to the product, or to half or twice its columns,
            and Python values.
        prologue: an elementwise torch function of `a` and `prologue_args` that runs on `a` as it is loaded. It receives
            `a` in the accumulator's type, and its result is rounded to the type of `a`. If gradients are required,
            under torch.compile and on the CPU, it runs in torch, before the product.
        prologue_args: tensors that broadcast to `a`, and Python values.
        out: the tensor for the result, any strides, no overlap with the inputs. Its type is the type of the result, and
            may be any that `out_dtype` may be.
        out_dtype: the type of the result. The default is the type of the operands, bfloat16 for fp8 and int32 for int8;
            a result that the epilogue has cast keeps its type. For several results, it may be a tuple, in which None
            means the default.
        precision: how float32 is multiplied: "ieee" (the default, regardless of torch's `allow_tf32`), "tf32",
            "tf32x3", or "torch", which is "tf32" if `torch.backends.cuda.matmul` allows it at the call, and otherwise
            "ieee".
        fast_accum: whether fp8 products are accumulated at the tensor cores' own precision, as `torch._scaled_mm` does.
        batch_invariant: whether every row of the result has the same bits for every M, every batch and any other rows,
            at some cost in speed.
        config: a Config, its string or its dict, to use instead of the selected one.

    Returns:
        The product, accumulated in float32 (float64 for float64, int32 for int8) and rounded once.

    Raises:
        ValueError: shapes, devices or `out` do not fit, or the config can't run this problem.
        TypeError: a type is not supported, or two types differ.
        gemmery.epilogues.Untraceable: a ValueError: a kernel can't compute the epilogue.

    Example:
        >>> import torch, gemmery
        >>> x, w = torch.randn(4, 8), torch.randn(16, 8)
        >>> gemmery.matmul(x, w.T, bias=torch.zeros(16)).shape
        torch.Size([4, 16])
    """
    how = precision if precision != "torch" else resolved(precision, a)
    options = (out_dtype, how, fast_accum, batch_invariant, config)
    functions = (epilogue, args, prologue, prologue_args)
    return product("matmul", a, b, bias, functions, out, options)


def linear(
    x: Tensor,
    weight: Factor,
    bias: Factor | None = None,
    *,
    epilogue: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    prologue: Callable[..., Any] | None = None,
    prologue_args: Sequence[Any] = (),
    out: Tensor | None = None,
    out_dtype: OutTypes = None,
    precision: AskedPrecision = "ieee",
    fast_accum: bool = False,
    batch_invariant: bool = False,
    config: Config | dict[str, Any] | str | None = None,
) -> Any:
    """`x @ weight.T + bias`, as torch.nn.functional.linear.

    Args:
        x: (..., K).
        weight: (N, K), or (K,) for a single output without its dimension. It may be a pair, see `matmul`; or packed,
            sparse or block-sparse, (N, K).
        bias: (N,). For a pair, also a pair.

    The other arguments, the result and the errors are those of `matmul`.

    Example:
        >>> import torch, gemmery
        >>> gemmery.linear(torch.ones(2, 3), torch.ones(5, 3))
        tensor([[3., 3., 3., 3., 3.],
                [3., 3., 3., 3., 3.]])
    """
    how = precision if precision != "torch" else resolved(precision, x)
    options = (out_dtype, how, fast_accum, batch_invariant, config)
    functions = (epilogue, args, prologue, prologue_args)
    return product("linear", x, weight, bias, functions, out, options)


def addmm(
    input: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    beta: Number = 1,
    alpha: Number = 1,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: AskedPrecision = "ieee",
    fast_accum: bool = False,
    batch_invariant: bool = False,
    config: Config | dict[str, Any] | str | None = None,
) -> Tensor:
    """`beta * input + alpha * (a @ b)`, as torch.addmm. If beta is 0, `input` is not read, even if it contains NaN.

    Args:
        input: a shape that broadcasts to (M, N). It may be `out` itself.
        a: (M, K).
        b: (K, N). Packed and sparse weights are not supported; use `linear`, `matmul` or `bmm`.
        beta, alpha: Python numbers; integers for int8.

    The other arguments, the result and the errors are those of `matmul`.

    Example:
        >>> import torch, gemmery
        >>> gemmery.addmm(torch.ones(2, 2), torch.ones(2, 3), torch.ones(3, 2), beta=10, alpha=2)
        tensor([[16., 16.],
                [16., 16.]])
    """
    if isinstance(b, PackedWeight):
        raise TypeError(
            f"addmm: b is a {type(b).__name__}; use gemmery.linear(a, b, input), or gemmery.matmul(a, b, bias=input)"
        )
    for name, value in (("a", a), ("input", input)):
        check_not_packed("addmm", name, value, "the second operand of gemmery.linear or matmul")
    if input is None:
        check_tensor("addmm", "input", input)
    options = (out_dtype, resolved(precision, a), fast_accum, batch_invariant, config)
    made: Tensor = product("addmm", a, b, input, NONE, out, options, scalars_of(alpha, beta))
    return made


def bmm(
    a: Tensor,
    b: Tensor,
    *,
    epilogue: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    prologue: Callable[..., Any] | None = None,
    prologue_args: Sequence[Any] = (),
    out: Tensor | None = None,
    out_dtype: OutTypes = None,
    precision: AskedPrecision = "ieee",
    fast_accum: bool = False,
    batch_invariant: bool = False,
    config: Config | dict[str, Any] | str | None = None,
) -> Any:
    """A batch of products, as torch.bmm: (B, M, K) by (B, K, N). The other arguments are those of `matmul`.

    A packed or sparse weight has the shape of a batch of Linear weights, (B, N, K).

    Example:
        >>> import torch, gemmery
        >>> gemmery.bmm(torch.ones(7, 2, 3), torch.ones(7, 3, 4)).shape
        torch.Size([7, 2, 4])
    """
    how = precision if precision != "torch" else resolved(precision, a)
    options = (out_dtype, how, fast_accum, batch_invariant, config)
    functions = (epilogue, args, prologue, prologue_args)
    return product("bmm", a, b, None, functions, out, options)


def plan(
    a: Tensor,
    b: Factor,
    *,
    bias: Factor | None = None,
    epilogue: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    prologue: Callable[..., Any] | None = None,
    prologue_args: Sequence[Any] = (),
    out: Tensor | None = None,
    out_dtype: OutTypes = None,
    precision: AskedPrecision = "ieee",
    fast_accum: bool = False,
    batch_invariant: bool = False,
    config: Config | dict[str, Any] | str | None = None,
) -> Plan | None:
    """The compiled plan of a `matmul` with these arguments; None if nothing would be launched.

    Nothing is launched for an empty result, and for CPU tensors outside the interpreter, which use the reference.

    Args:
        a: (..., M, K), the first operand; a `ScaledTensor` for the plan of `scaled_matmul`.
        b: (..., K, N), the second operand. For the plan of `linear` with a dense weight (N, K), give its transpose,
            `weight.T`; give a packed or sparse weight (N, K) as it is.

    The other arguments are those of `matmul`.

    Example:
        >>> import torch, gemmery
        >>> print(gemmery.plan(torch.ones(4, 8), torch.ones(8, 16)))
        None
    """
    options = Options(out_dtype, resolved(precision, a), fast_accum, batch_invariant, config)
    return plan_of("plan", a, b, bias, Functions(epilogue, args, prologue, prologue_args), out, options)


def _as_torch(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """`F.linear` by the names that torch's has."""
    return linear(input, weight, bias)


TORCH_FUNCTIONS[F.linear] = _as_torch
