"""Products of two quantized operands: `gemmery.scaled_matmul`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .formats.scaled import ScaledTensor
from .formats.sparse import SparseTensor
from .problem import Config
from .product.check import check_scaled, check_tensor
from .product.run import product
from .product.spec import OutTypes


def scaled_matmul(
    a: ScaledTensor,
    b: ScaledTensor | SparseTensor,
    *,
    bias: Tensor | None = None,
    epilogue: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    out: Tensor | None = None,
    out_dtype: OutTypes = None,
    fast_accum: bool = False,
    batch_invariant: bool = False,
    config: Config | dict[str, Any] | str | None = None,
) -> Any:
    """`a.dequantize() @ b.dequantize().T + bias` (`b.dense().T` for a sparse b), without dequantizing either.

    The product of the stored elements is accumulated in float32 (int32, exactly, for int8) and multiplied by the scales
    of a and b. Bias and epilogue follow in float32, and the result is rounded once.

    Args:
        a: (..., M, K), with a scale per tensor or per row. It may have a scale per 128 columns if b has block scales,
            or per 32 columns.
        b: (N, K), like a Linear's weight, in a's type; the two fp8 types may be mixed. For fp8 with a scale per tensor
            or per row, it may be a 2:4 sparse weight of e4m3, as `quantize(sparsify(w), "e4m3")` returns.
        bias: (N,) or a shape that broadcasts to the product.
        epilogue: a torch function of the scaled product (with the bias) and `args`, as in `matmul`. An `Epilogue` from
            `gemmery.epilogue` is looked up faster.
        args: see `matmul`.
        out: see `matmul`.
        out_dtype: the type of the result, bfloat16 by default; a result that the epilogue has cast keeps its type.
        fast_accum: whether fp8 products are accumulated at the tensor cores' own precision, as `torch._scaled_mm` does
            with `use_fast_accum=True`. Otherwise, partial sums are promoted to float32 every 128 columns, or every 256
            columns of a sparse weight, of which 128 are kept.
        batch_invariant, config: see `matmul`.

    Returns:
        (..., M, N), or the result of the epilogue. Every layout and size is supported; torch restricts both.

    Raises:
        TypeError: an operand is not one of these, the types do not match, or a gradient is required.
        ValueError: shapes or devices do not fit, one operand has a scale per 32 columns and the other per 128, or the
            GPU has no instructions for the type.

    Example:
        >>> import torch, gemmery
        >>> x, w = torch.ones(2, 32), torch.ones(3, 32)
        >>> a, b = (gemmery.quantize_activations(t) for t in (x, w))
        >>> gemmery.scaled_matmul(a, b, epilogue=torch.neg)
        tensor([[-32., -32., -32.],
                [-32., -32., -32.]], dtype=torch.bfloat16)
    """
    _check(a, b, bias, epilogue, args)
    options = (out_dtype, "ieee", fast_accum, batch_invariant, config)
    return product("scaled_matmul", a, b, bias, (epilogue, args, None, ()), out, options)


def _check(a: Any, b: Any, bias: Any, epilogue: Any, args: Any) -> None:
    """TypeError or ValueError unless the operands and the bias go together; the rest is for `product` to say."""
    op = "scaled_matmul"
    check_scaled(op, a, b)
    if epilogue is not None and not callable(epilogue):
        raise TypeError(f"{op}: epilogue is a {type(epilogue).__name__}; it must be a function")
    if isinstance(args, Tensor) or not isinstance(args, tuple | list):
        raise TypeError(
            f"{op}: args is a {type(args).__name__}; it must be a tuple of the epilogue's arguments"
        )
    if epilogue is None and args:
        raise TypeError(f"{op}: args are given without an epilogue; give epilogue= too, or leave them out")
    if bias is not None:
        _check_bias(bias, (*a.shape[:-1], b.shape[0]))
    of_b = (b.channel,) if isinstance(b, SparseTensor) else (b.data, b.scale)
    tensors = (a.data, a.scale, *of_b, bias, *args)
    if torch.is_grad_enabled() and any([isinstance(x, Tensor) and x.requires_grad for x in tensors]):
        raise TypeError(f"{op}: no gradient for {a.dtype} operands, but one of the arguments requires it")


def _check_bias(bias: Any, shape: tuple[int, ...]) -> None:
    op = "scaled_matmul"
    check_tensor(op, "bias", bias)
    if bias.dim() <= len(shape):
        pairs = zip(reversed(bias.shape), reversed(shape), strict=False)
        if all([size in (1, full) for size, full in pairs]):
            return
    raise ValueError(f"{op}: bias is {tuple(bias.shape)}; it must broadcast to the product, {shape}")
