"""The ready-made epilogues: torch functions of a product that run inside the kernel that computes it.

Each is a few lines of torch over the product `acc`, (..., M, N) in the accumulator's type. Further arguments come
through `args`. They are plain functions: call them in your own function, or chain them with `compose`.

Example:
    >>> import torch, gemmery
    >>> from gemmery import epilogues
    >>> x, w = torch.ones(2, 3), torch.ones(4, 3)
    >>> gemmery.linear(x, w, epilogue=epilogues.softcap, args=(2.0,))
    tensor([[1.8103, 1.8103, 1.8103, 1.8103],
            [1.8103, 1.8103, 1.8103, 1.8103]])
    >>> gate_and_up = torch.cat([torch.ones(2, 3), torch.full((2, 3), 2.0)])
    >>> gemmery.linear(x, gate_and_up, epilogue=epilogues.swiglu)
    tensor([[17.1463, 17.1463],
            [17.1463, 17.1463]])
    >>> norm = torch.tensor([[0.5], [2.0]])
    >>> scaled_then_added = epilogues.compose(epilogues.row_scale, epilogues.residual)
    >>> gemmery.linear(x, w, epilogue=scaled_then_added, args=(norm, torch.ones(2, 4)))
    tensor([[2.5000, 2.5000, 2.5000, 2.5000],
            [7.0000, 7.0000, 7.0000, 7.0000]])
    >>> def shifted(acc, b):
    ...     return epilogues.relu(epilogues.bias(acc, b))
    >>> gemmery.linear(x, w, epilogue=shifted, args=(torch.arange(-4.0, 0),))
    tensor([[0., 0., 1., 2.],
            [0., 0., 1., 2.]])
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import random

Number = float | Tensor

# ---------------------------------------------------------------------------------------------------------------------
# Sums and factors


def bias(acc: Tensor, b: Tensor) -> Tensor:
    """`acc + b`, with b of shape (N,)."""
    return acc + b


def residual(acc: Tensor, r: Tensor) -> Tensor:
    """`acc + r`, with r of shape (..., M, N)."""
    return acc + r


def scaled(acc: Tensor, alpha: Number, c: Tensor, beta: Number) -> Tensor:
    """`alpha * acc + beta * c`, with c of shape (..., M, N) or a shape that broadcasts to it."""
    return alpha * acc + beta * c


def row_scale(acc: Tensor, s: Tensor) -> Tensor:
    """`acc * s`, with s of shape (..., M, 1): a scale for each row."""
    return acc * s


def column_scale(acc: Tensor, s: Tensor) -> Tensor:
    """`acc * s`, with s of shape (N,): a scale for each column."""
    return acc * s


# ---------------------------------------------------------------------------------------------------------------------
# Activations


def relu(acc: Tensor) -> Tensor:
    """`max(acc, 0)`."""
    return torch.relu(acc)


def relu_squared(acc: Tensor) -> Tensor:
    """`max(acc, 0) ** 2`."""
    return torch.relu(acc).square()


def gelu(acc: Tensor) -> Tensor:
    """GELU by the error function, torch's default."""
    return functional.gelu(acc)


def gelu_tanh(acc: Tensor) -> Tensor:
    """GELU's approximation by tanh."""
    return functional.gelu(acc, approximate="tanh")


def silu(acc: Tensor) -> Tensor:
    """`acc * sigmoid(acc)`, also called swish."""
    return functional.silu(acc)


def sigmoid(acc: Tensor) -> Tensor:
    """`1 / (1 + exp(-acc))`."""
    return torch.sigmoid(acc)


def tanh(acc: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return torch.tanh(acc)


def softcap(acc: Tensor, cap: Number) -> Tensor:
    """`cap * tanh(acc / cap)`: between -cap and cap, and approximately acc near 0."""
    return cap * torch.tanh(acc * (1 / cap))


# ---------------------------------------------------------------------------------------------------------------------
# Gates: the product's columns are those of the gate, then those of the gated layer


def swiglu(acc: Tensor) -> Tensor:
    """`silu(gate) * up`, where gate and up are the halves of acc's columns; (..., M, N / 2)."""
    gate, up = acc.chunk(2, -1)
    return functional.silu(gate) * up


def geglu(acc: Tensor) -> Tensor:
    """`gelu(gate) * up`, where gate and up are the halves of acc's columns; (..., M, N / 2)."""
    gate, up = acc.chunk(2, -1)
    return functional.gelu(gate) * up


def reglu(acc: Tensor) -> Tensor:
    """`relu(gate) * up`, where gate and up are the halves of acc's columns; (..., M, N / 2)."""
    gate, up = acc.chunk(2, -1)
    return torch.relu(gate) * up


# ---------------------------------------------------------------------------------------------------------------------
# Several results


def cast_fp8(acc: Tensor, scale: Number) -> tuple[Tensor, Tensor]:
    """`acc * scale` as e4m3, clamped at ±448, and the largest magnitude of each row of acc, (..., M), for the next
    scale.
    """
    largest = torch.finfo(torch.float8_e4m3fn).max
    return (acc * scale).clamp(-largest, largest).to(torch.float8_e4m3fn), acc.abs().amax(-1)


def static_fp8(acc: Tensor, scale: Number) -> Tensor:
    """`acc / scale` as e4m3, clamped at ±448: quantized with a scale that is known in advance ("static").

    With a scale of shape (), the result and the scale are an operand of the next product, without a kernel in between.
    acc is multiplied by the reciprocal of the scale, so the last bit before rounding may differ from that of a
    quotient.

    Example:
        >>> import torch, gemmery
        >>> x, w, scale = torch.ones(2, 4), torch.ones(3, 4), torch.tensor(0.5)
        >>> gemmery.ScaledTensor(gemmery.linear(x, w, epilogue=static_fp8, args=(scale,)), scale).dequantize()
        tensor([[4., 4., 4.],
                [4., 4., 4.]])
    """
    largest = torch.finfo(torch.float8_e4m3fn).max
    return (acc * (1 / scale)).clamp(-largest, largest).to(torch.float8_e4m3fn)


def with_row_amax(acc: Tensor) -> tuple[Tensor, Tensor]:
    """acc unchanged, and the largest magnitude of each row, (..., M), for `quantize_activations(..., amax=)`.

    `quantize_activations` then reads the result once instead of twice: with one scale for the whole tensor, and with
    rows that are longer than a program holds (16384). The magnitude is that of the sums before rounding, so scales
    differ from those of the rounded result in the last place.

    Example:
        >>> import torch, gemmery
        >>> x, w = torch.ones(2, 4), torch.ones(3, 4)
        >>> y, amax = gemmery.linear(x, w, epilogue=with_row_amax)
        >>> gemmery.quantize_activations(y, per="tensor", amax=amax).scale
        tensor(0.0089)
    """
    return acc, acc.abs().amax(-1)


def logsumexp(acc: Tensor) -> tuple[Tensor, Tensor]:
    """acc unchanged, and the logarithm of each row's sum of exponentials, (..., M), for a softmax or its loss."""
    return acc, acc.logsumexp(-1)


# ---------------------------------------------------------------------------------------------------------------------
# Dropout


def dropout(acc: Tensor, p: Number, seed: int | Tensor) -> Tensor:
    """Zero with probability p, in [0, 1), and `acc / (1 - p)` otherwise.

    The seed and the position of an element in the result determine which elements are zero. They are the same on every
    device, for every config and in the backward pass. Use a different seed for each tensor.

    Args:
        seed: 64 bits, as an integer or an int64 tensor of shape ().
    """
    if not isinstance(p, Tensor) and not 0 <= p < 1:
        raise ValueError(f"dropout: p is {p}; it must be at least 0 and less than 1")
    # In single precision, like the value that it is compared with.
    bound = p.to(torch.float32) if isinstance(p, Tensor) else p
    return torch.where(random.uniform(acc, seed) >= bound, acc * (1 / (1 - p)), 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Composition


def compose(*functions: Callable[..., Any]) -> Callable[..., Any]:
    """One epilogue from several.

    The first function receives the product, and each following one the result of the previous function.

    `args` are distributed in order: each function receives as many as it has positional parameters, without a default,
    after the first.

    Raises:
        TypeError: there is no function, or one takes a variable number of arguments. When called: the number of
            arguments is not that of the functions together, or a function other than the last returns several results.

    Example:
        >>> import torch
        >>> b, s = torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([[1.0], [2.0]])
        >>> compose(bias, relu, row_scale)(torch.zeros(2, 3), b, s)
        tensor([[0., 0., 1.],
                [0., 0., 2.]])
    """
    if not functions:
        raise TypeError("compose: no function is given; give at least one")
    steps: list[tuple[Callable[..., Any], int]] = []
    for function in functions:
        function = getattr(function, "__gemmery_epilogue__", function)
        if isinstance(function, functools.partial) and function.func is _chained:
            steps += function.args[0]
        else:
            steps.append((function, _further(function)))
    # A partial and not a closure: `identity` inspects it, and recognizes two partials of the same functions.
    made = functools.partial(_chained, tuple(steps))
    made.__name__ = f"compose({', '.join(_name(step) for step, _ in steps)})"  # type: ignore[attr-defined]
    return made


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _further(function: Callable[..., Any]) -> int:
    """The number of a function's positional parameters without a default, after the first."""
    if not callable(function):
        raise TypeError(f"compose: given a {type(function).__name__}; it must be a function")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return 0  # a built-in function such as torch.relu
    if any(x.kind is x.VAR_POSITIONAL for x in parameters):
        raise TypeError(
            f"compose: {_name(function)} takes a variable number of arguments; wrap it in a function with named "
            "arguments"
        )
    own = [x for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    if not own:
        raise TypeError(f"compose: {_name(function)} takes no argument; the first must be the product")
    return sum(x.default is x.empty for x in own[1:])


def _chained(steps: tuple[tuple[Callable[..., Any], int], ...], acc: Any, *args: Any) -> Any:
    wanted = sum(count for _, count in steps)
    if len(args) != wanted:
        each = ", ".join(f"{_name(function)} {count}" for function, count in steps)
        raise TypeError(
            f"compose: given {len(args)} arguments after the product; the functions take {wanted}: {each}"
        )
    before = ""
    for function, count in steps:
        if isinstance(acc, tuple | list):
            raise TypeError(
                f"compose: {before} returns {len(acc)} results; only the last function may return several"
            )
        acc, args, before = function(acc, *args[:count]), args[count:], _name(function)
    return acc
