"""Hugging Face's Conv1D, a linear layer with a transposed weight: what `swap` puts in its place."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..api import linear
from ..dtensors import is_sharded
from ..precision import AskedPrecision
from .linear import inherit, own_code

#: All that the forward of a Conv1D names.
_NAMES = {"size", "nf", "torch", "addmm", "bias", "view", "weight"}


class TransposedLinear(nn.Module):
    """Hugging Face's `Conv1D`, `x @ weight + bias`, computed by `gemmery.linear`.

    Made by `gemmery.nn.swap`.

    Attributes:
        weight: (in, out), the original's.
        bias: (out,), the original's.
        precision, batch_invariant: see `gemmery.matmul`.
    """

    weight: nn.Parameter
    bias: nn.Parameter
    nf: int
    nx: int

    def __init__(self, layer: nn.Module, precision: AskedPrecision, batch_invariant: bool) -> None:
        super().__init__()
        self.precision, self.batch_invariant = precision, batch_invariant
        for name in ("weight", "bias"):
            self.register_parameter(name, layer._parameters[name])
        inherit(self, layer)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        output: Tensor = linear(
            x, self.weight.t(), self.bias, precision=self.precision, batch_invariant=self.batch_invariant
        )
        return output

    def extra_repr(self) -> str:
        """The layer's sizes, and its precision and batch-invariance where they are not the default."""
        extra = "" if self.precision == "ieee" else f", precision={self.precision!r}"
        extra += ", batch_invariant=True" if self.batch_invariant else ""
        return f"nf={self.nf}, nx={self.nx}{extra}"


def resembles(module: nn.Module) -> bool:
    """Whether a module has the attributes of a Conv1D, regardless of their use."""
    sizes = (getattr(module, name, None) for name in ("nf", "nx"))
    return isinstance(module._parameters.get("weight"), Tensor) and all(
        isinstance(size, int) for size in sizes
    )


def refusal(layer: nn.Module) -> str | None:
    """Why a module that looks like a Conv1D is not replaced; None if it can be."""
    cls = type(layer)
    code: Any = getattr(cls.__dict__.get("forward"), "__code__", None)
    known = cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"
    if cls is not TransposedLinear and not (known and code is not None and set(code.co_names) == _NAMES):
        return f"it is a {cls.__module__}.{cls.__qualname__}, whose forward is not known"
    if parametrize.is_parametrized(layer):
        return "it is parametrized"
    if is_sharded([x for x in layer._parameters.values() if x is not None]):
        return "its parameters are DTensors; call this before the model is sharded"
    if layer._modules or layer._buffers or set(layer._parameters) != {"weight", "bias"}:
        return "it has other parameters, buffers or children than a Conv1D"
    for name, parameter in layer._parameters.items():
        if type(parameter) is not nn.Parameter:
            return f"its {name} is a {type(parameter).__name__}, not a plain parameter"
    return own_code(layer)
