"""Operators as functions of simpler ones: torch's decompositions, except for the most common activations and their
gradients.

Torch's decompositions import its compiler, which takes about a second, when the first of them runs. Those here are the
same formulas.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .table import CONSTANTS

aten = torch.ops.aten

#: Reductions that can't be computed from partial sums and maxima.
_WHOLE = ("logsumexp", "mean", "var", "std", "linalg_vector_norm", "norm", "any", "all")
#: Operators that the lowering supports directly.
_KNOWN = (
    *CONSTANTS, "gelu", "silu", "softplus", "clamp_min", "clamp_max", "rsub", "split", "square", "where",
)  # fmt: skip
#: Types whose arithmetic torch does not widen in these functions.
_WIDE = (torch.float32, torch.float64)


def _silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return grad * s * (1 + x * (1 - s))


def _sigmoid_backward(grad: Tensor, y: Tensor) -> Tensor:
    return grad * (y * (1 - y))


def _tanh_backward(grad: Tensor, y: Tensor) -> Tensor:
    return grad * (1 - y * y)


def _threshold_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    return torch.where(x <= threshold, 0, grad)


def _gelu_backward(grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "none":
        normal = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        density = torch.exp(x * x * -0.5) * (0.5 * math.sqrt(2 / math.pi))
        return grad * (normal + x * density)
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(scale * (x + cubic * (x * x * x)))
    slope = scale * (1 + 3 * cubic * (x * x))
    return grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)


def _softplus_backward(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    scaled = x if beta == 1 else x * beta
    return torch.where(scaled > threshold, grad, grad * torch.sigmoid(scaled))


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = x if x.dtype in _WIDE else x.float()
    powers = torch.exp(wide - torch.amax(wide, dim, keepdim=True))
    return (powers / powers.sum(dim, keepdim=True)).to(x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = x if x.dtype in _WIDE else x.float()
    # The largest is subtracted first, because large numbers would absorb the logarithm of the sum.
    below = wide - torch.amax(wide, dim, keepdim=True)
    return (below - torch.log(torch.exp(below).sum(dim, keepdim=True))).to(x.dtype)


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    if tuple(normalized_shape) != input.shape[-1:]:
        # Over several dimensions, or an error of torch.
        return torch.layer_norm(input, normalized_shape, weight, bias, eps, cudnn_enable)
    wide = input if input.dtype in _WIDE else input.float()
    off = wide - wide.mean(-1, keepdim=True)
    normed = off * torch.rsqrt((off * off).mean(-1, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight
    return (normed if bias is None else normed + bias).to(input.dtype)


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:  # fmt: skip
    # The same with a weight of another type, of which torch warns.
    return torch.rms_norm(input, normalized_shape, None if weight is None else weight.to(input.dtype), eps)


class Composed(TorchFunctionMode):
    """A mode in which functions are composed of simpler ones before autograd sees them.

    Autograd's own formula for `layer_norm` requires parameters that are vectors. In the backward pass of an epilogue,
    they are as large as the product: the sum over rows follows the kernel. Parameters may be of another type than the
    product, as those of a model in bfloat16 are.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _COMPOSED.get(func, func)(*args, **(kwargs or {}))


_COMPOSED: dict[Any, Callable[..., Any]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
}
#: Of any type.
_OWN: dict[Any, Callable[..., Any]] = {
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
}
#: Of types whose arithmetic torch does not widen.
_QUICK: dict[Any, Callable[..., Tensor]] = {
    aten.silu_backward.default: _silu_backward,
    aten.sigmoid_backward.default: _sigmoid_backward,
    aten.tanh_backward.default: _tanh_backward,
    aten.threshold_backward.default: _threshold_backward,
    aten.gelu_backward.default: _gelu_backward,
    aten.softplus_backward.default: _softplus_backward,
}


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """For each operator that is composed of others, the function that composes it."""
    from torch._decomp import core_aten_decompositions, get_decompositions

    table = dict(core_aten_decompositions())
    more = [
        aten.elu, aten.elu_backward, aten.gelu_backward, aten.hardtanh, aten.hardtanh_backward, aten.leaky_relu,
        aten.leaky_relu_backward, aten.sigmoid_backward, aten.silu_backward, aten.tanh_backward,
    ]  # fmt: skip
    table.update(get_decompositions(more))
    kept = {
        op: how
        for op, how in table.items()
        if op.name().split("::")[1].split(".")[0] not in (*_WHOLE, *_KNOWN)
    }
    return kept | _OWN | {op: _if_wide(quick, kept[op]) for op, quick in _QUICK.items()}


def _if_wide(quick: Callable[..., Any], general: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (quick if first.dtype in _WIDE else general)(first, *args, **kwargs)

    return chosen
