"""Products of two quantised factors: the scales multiply the sums, in the kernel that makes them.

A scale that a row of a, or of b, shares is a factor of a row, or a column, of the product: an epilogue, to which a bias
and the user's own are joined. With scales of blocks along K each part of a sum has another factor; that takes a kernel
of its own, see `_blocks`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import block_scaled, devices
from .api import linear
from .dispatch import Options, OutTypes, check_tensor
from .dtypes import FP8
from .epilogues.function import Epilogue, function_of, named
from .formats.scaled import ScaledTensor
from .problem import Config

#: Kinds of scales that are factors of the product's rows and columns.
_OUTSIDE = ("tensor", "row")
#: What results are where nobody says otherwise.
_DEFAULT = torch.bfloat16


def scaled_matmul(
    a: ScaledTensor,
    b: ScaledTensor,
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
    """`a.dequantize() @ b.dequantize().T + bias`, without either being dequantised.

    The product of the numbers is summed in float32 (int32, exactly, for int8) and then multiplied by a's scale and by
    b's; bias and epilogue follow in float32, and the result is rounded once.

    Args:
        a: (..., M, K); its scale is the tensor's, or its rows'; or one of 128 columns, for b with blocks, or of 32.
        b: (N, K), like a Linear's weight, in a's type; the two fp8 types may be mixed.
        bias: (N,) or anything that broadcasts to the product.
        epilogue: a torch function of the scaled product (with the bias) and `args`, as in `matmul`. One that
            `gemmery.epilogue` made is found again sooner.
        args: see `matmul`.
        out: see `matmul`.
        out_dtype: type of the result, bfloat16 by default; what an epilogue has cast keeps its type.
        fast_accum: let fp8 products be summed at the tensor cores' own precision, as `torch._scaled_mm` does with
            `use_fast_accum=True`. Without, partial sums are promoted to float32 every 128 columns.
        batch_invariant, config: see `matmul`.

    Returns:
        (..., M, N), or what the epilogue returns. Every layout and size works; torch's has its own rules for both.

    Raises:
        TypeError: a factor is not a `ScaledTensor`, types do not go together, or a gradient is asked for.
        ValueError: shapes or devices do not fit, one factor has scales of 32 columns and the other of 128, or the GPU
            has no instructions for the type.

    Example:
        >>> import torch, gemmery
        >>> x, w = torch.ones(2, 32), torch.ones(3, 32)
        >>> a, b = (gemmery.quantize_activations(t) for t in (x, w))
        >>> gemmery.scaled_matmul(a, b, epilogue=torch.neg)
        tensor([[-32., -32., -32.],
                [-32., -32., -32.]], dtype=torch.bfloat16)
    """
    _check(a, b, bias, epilogue, args)
    if out_dtype is None and out is not None:
        out_dtype = out.dtype
    if a.kind not in _OUTSIDE or b.kind not in _OUTSIDE:
        options = Options(out_dtype, "ieee", fast_accum, batch_invariant, config)
        return _blocks(a, b, bias, epilogue, args, out, options)
    # Behind the user's own, so that messages number these right.
    given = (*args, a.row_factors, b.column_factors)
    if bias is not None:
        given += (bias,)
    function: Any
    if epilogue is None:
        function = SCALED if bias is None else SCALED_BIASED
        out_dtype = out_dtype or _DEFAULT
    else:
        # What is still in float32 has another type than an int32 product, and would stay in it.
        rounds = _left_open(out_dtype) if a.data.dtype == torch.int8 else None
        function = _joined(epilogue, 2, bias is not None, rounds)
    return linear(
        a.data, b.data, epilogue=function, args=given, out=out, out_dtype=out_dtype, fast_accum=fast_accum,
        batch_invariant=batch_invariant, config=config,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Epilogues


def _scaled(acc: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return acc.to(torch.float32) * row * column


def _scaled_biased(acc: Tensor, row: Tensor, column: Tensor, bias: Tensor) -> Tensor:
    return acc.to(torch.float32) * row * column + bias


#: The usual ones, made once: a call with them goes the short way, see `quick`.
SCALED, SCALED_BIASED = Epilogue(_scaled), Epilogue(_scaled_biased)


def _after(
    function: Callable[..., Any], scales: int, biased: bool, rounds: tuple[bool, ...] | None, acc: Tensor,
    *given: Any,
) -> Any:  # fmt: skip
    """A user's epilogue behind scales and a bias, which are the last of what is given."""
    own = len(given) - scales - biased
    value = acc.to(torch.float32)
    for factor in given[own : own + scales]:
        value = value * factor
    returned = function(value + given[-1] if biased else value, *given[:own])
    if rounds is None:
        return returned
    many = isinstance(returned, tuple | list)
    results = list(returned) if many else [returned]
    which = rounds if len(rounds) == len(results) else [rounds == (True,)] * len(results)
    results = [_rounded(x, acc) if chosen else x for x, chosen in zip(results, which, strict=True)]
    return tuple(results) if many else results[0]


def _rounded(result: Any, acc: Tensor) -> Any:
    """A matrix that nobody has cast in the type that results have; reduced rows stay in float32."""
    if not isinstance(result, Tensor) or result.dtype != torch.float32 or result.dim() != acc.dim():
        return result
    return result.to(_DEFAULT) if result.shape[-1] != 1 or acc.shape[-1] <= 2 else result


def _left_open(out_dtype: OutTypes) -> tuple[bool, ...] | None:
    """Which results' types are not asked for: (True,) stands for all; None where all are."""
    if out_dtype is None:
        return (True,)
    if not isinstance(out_dtype, tuple) or None not in out_dtype:
        return None
    return tuple([dtype is None for dtype in out_dtype])


#: What was made of epilogues that live on, by what it was made for.
_made: weakref.WeakKeyDictionary[Epilogue[Any, Any], dict[Any, Epilogue[Any, Any]]] = (
    weakref.WeakKeyDictionary()
)


def _joined(epilogue: Any, scales: int, biased: bool, rounds: tuple[bool, ...] | None) -> Any:
    """A user's epilogue behind scales and a bias, as one: for a prebuilt one always the same."""
    if is_compiling():
        if not isinstance(epilogue, Epilogue):
            raise TypeError(
                "scaled_matmul: under torch.compile, epilogue must be what gemmery.epilogue(f) returned, made outside "
                "of compiled code"
            )
        return _joined_by_name(epilogue.name, scales, biased, rounds)
    return _make_joined(epilogue, scales, biased, rounds)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no types for it
def _joined_by_name(name: str, scales: int, biased: bool, rounds: tuple[bool, ...] | None) -> Any:
    """The same for the compiler, which can't follow it, and before torch 2.12 takes no objects as constants."""
    return _make_joined(named(name), scales, biased, rounds)


def _make_joined(epilogue: Any, scales: int, biased: bool, rounds: tuple[bool, ...] | None) -> Any:
    function = function_of(epilogue)
    # A partial and not a closure: `identity` looks into it, and finds that two of the same functions are the same.
    made = functools.partial(_after, function, scales, biased, rounds)
    made.__name__ = getattr(function, "__name__", type(function).__name__)  # type: ignore[attr-defined]
    if not isinstance(epilogue, Epilogue):
        return made
    known = _made.setdefault(epilogue, {})
    key = scales, biased, rounds
    if key not in known:
        known[key] = Epilogue(made)
    return known[key]


# ---------------------------------------------------------------------------------------------------------------------
# Scales of blocks along K


def _unchanged(acc: Tensor) -> Tensor:
    return acc


#: Prebuilt, as the compiler wants it.
_UNCHANGED = Epilogue(_unchanged)


def _blocks(
    a: ScaledTensor, b: ScaledTensor, bias: Tensor | None, epilogue: Callable[..., Any] | None, args: Sequence[Any],
    out: Tensor | None, options: Options,
) -> Any:  # fmt: skip
    """A product in which a scale changes along K; arguments are those of `scaled_matmul`, which has checked them."""
    given = tuple(args) if bias is None else (*args, bias)
    function = _joined(epilogue or _UNCHANGED, 0, bias is not None, _left_open(options.out_dtype))
    # Without columns of K there are no factors to read, either.
    if devices.current(a.device) is not None and not is_compiling() and a.shape[-1]:
        return block_scaled.product(a, b, function, given, out, options)
    # Otherwise by a product of what both stand for, in float32.
    return linear(
        a.dequantize(), b.dequantize(), epilogue=function, args=given, out=out, out_dtype=options.out_dtype,
        batch_invariant=options.batch_invariant, config=options.config,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def _check(a: Any, b: Any, bias: Any, epilogue: Any, args: Any) -> None:
    """TypeError or ValueError unless the factors and the bias go together; the rest is for `linear` to say."""
    op = "scaled_matmul"
    for name, value in (("a", a), ("b", b)):
        if not isinstance(value, ScaledTensor):
            raise TypeError(f"{op}: {name} is a {type(value).__name__}; it must be a gemmery.ScaledTensor")
    left, right = a.data, b.data
    if right.dim() != 2:
        raise ValueError(f"{op}: b is {tuple(right.shape)}; it must be (N, K)")
    if left.shape[-1] != right.shape[-1]:
        raise ValueError(
            f"{op}: a is {tuple(left.shape)} and b is {tuple(right.shape)}: "
            f"inner sizes {left.shape[-1]} and {right.shape[-1]} differ"
        )
    if left.dtype != right.dtype and not (left.dtype in FP8 and right.dtype in FP8):
        raise TypeError(
            f"{op}: a is {left.dtype} and b is {right.dtype}; they must have one type, or both be fp8"
        )
    if "1x32" in (a.kind, b.kind) and not {a.kind, b.kind}.isdisjoint(("1x128", "128x128")):
        raise ValueError(
            f"{op}: a has scales {a.kind} and b {b.kind}; with 1x32, the other's must be 1x32, row or tensor"
        )
    if left.device != right.device:
        raise ValueError(f"{op}: a is on {left.device} and b on {right.device}; they must be on one device")
    if epilogue is not None and not callable(epilogue):
        raise TypeError(f"{op}: epilogue is a {type(epilogue).__name__}; it must be a function")
    if isinstance(args, Tensor) or not isinstance(args, tuple | list):
        raise TypeError(
            f"{op}: args is a {type(args).__name__}; it must be a tuple of the epilogue's arguments"
        )
    if epilogue is None and args:
        raise TypeError(f"{op}: args are an epilogue's; there is none")
    if bias is not None:
        _check_bias(bias, (*left.shape[:-1], right.shape[0]))
    tensors = (left, a.scale, right, b.scale, bias, *args)
    if torch.is_grad_enabled() and any([isinstance(x, Tensor) and x.requires_grad for x in tensors]):
        raise TypeError(f"{op}: no gradient for {left.dtype} operands, but one of the arguments requires it")


def _check_bias(bias: Any, shape: tuple[int, ...]) -> None:
    op = "scaled_matmul"
    check_tensor(op, "bias", bias)
    if bias.dim() <= len(shape):
        pairs = zip(reversed(bias.shape), reversed(shape), strict=False)
        if all([size in (1, full) for size, full in pairs]):
            return
    raise ValueError(f"{op}: bias is {tuple(bias.shape)}; it must broadcast to the product, {shape}")
