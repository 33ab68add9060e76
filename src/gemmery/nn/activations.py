"""Activations as epilogues, made once each: code under torch.compile takes only epilogues that exist before it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..epilogues import library
from ..epilogues.function import Epilogue
from .feed_forward import Differentiable

Elementwise = Callable[[Tensor], Tensor]


def _gated(function: Elementwise, acc: Tensor) -> Tensor:
    gate, up = acc.chunk(2, dim=-1)
    return function(gate) * up


@dataclass(frozen=True, eq=False)
class Activation:
    """An elementwise function in the two forms that a feed-forward block fuses; see `activation`.

    Attributes:
        name: the printed name.
        alone: f(acc).
        gated: f(gate) * up, of a product (..., 2 * hidden) with these halves; the result is half as wide.
        alone_with_gradient, gated_with_gradient: both, for blocks that compute their own gradients.
    """

    name: str
    alone: Epilogue[..., Tensor]
    gated: Epilogue[..., Tensor]
    alone_with_gradient: Differentiable = field(repr=False)
    gated_with_gradient: Differentiable = field(repr=False)
    #: The argument from which `activation` recreates it, in another process or for a copy.
    source: Any = field(repr=False)

    def __call__(self, x: Tensor) -> Tensor:
        """The function itself, in torch: (...) to (...)."""
        return self.alone(x)

    def __reduce__(self) -> Any:
        return activation, (self.source,)


def _make(name: str, function: Elementwise, source: Any) -> Activation:
    # Partials of functions that never change: two of them with the same function are the same epilogue.
    gated = functools.partial(_gated, function)
    return Activation(
        name, Epilogue(function), Epilogue(gated), Differentiable(function), Differentiable(gated), source
    )


_FUNCTIONS: dict[str, Elementwise] = {
    "silu": library.silu,
    "gelu": library.gelu,
    "gelu_tanh": library.gelu_tanh,
    "relu": library.relu,
    "relu_squared": library.relu_squared,
}

#: The activations that have names.
ACTIVATIONS: dict[str, Activation] = {
    name: _make(name, function, name) for name, function in _FUNCTIONS.items()
}

#: Their other names: those of Hugging Face's ACT2FN, which configurations give as `hidden_act`.
ALIASES: dict[str, str] = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu2": "relu_squared",
}

_TORCH: tuple[tuple[Any, str], ...] = (
    (F.silu, "silu"), (F.gelu, "gelu"), (F.relu, "relu"), (torch.relu, "relu"),
    *((function, name) for name, function in _FUNCTIONS.items()),
)  # fmt: skip

#: Hugging Face's classes of modules that compute one; torch's are in `_of_module`. Whether they call torch's
#: function or write it out themselves, it is the same function.
_HUGGING_FACE: dict[str, str] = {
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "ReLUSquaredActivation": "relu_squared",
}


def _of_module(module: nn.Module) -> str | None:
    kind = type(module)
    if kind is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(module.approximate)  # type: ignore[call-overload, no-any-return]
    if kind in (nn.SiLU, nn.ReLU):
        return "silu" if kind is nn.SiLU else "relu"
    return _HUGGING_FACE.get(kind.__name__) if kind.__module__ == "transformers.activations" else None


def recognised(given: Any) -> Activation | None:
    """The activation in the table that a name, a torch function or an activation module stands for, or None.

    Args:
        given: such as "gelu_new", torch.nn.functional.silu or an instance of Hugging Face's GELUActivation. A module
            counts by its exact type; the caller checks for hooks.

    Example:
        >>> import torch
        >>> recognised("gelu_pytorch_tanh").name, recognised(torch.nn.SiLU()).name, recognised(torch.nn.Mish())
        ('gelu_tanh', 'silu', None)
    """
    if isinstance(given, str):
        return ACTIVATIONS.get(ALIASES.get(given, given))
    if isinstance(given, nn.Module):
        name = _of_module(given)
        return None if name is None else ACTIVATIONS[name]
    if isinstance(given, Activation):
        return given
    if isinstance(given, Epilogue):
        given = given.__gemmery_epilogue__
    name = next((name for function, name in _TORCH if function is given), None)
    return None if name is None else ACTIVATIONS[name]


def activation(given: str | Callable[..., Tensor] | Activation) -> Activation:
    """An activation from its name, or from an elementwise torch function.

    Args:
        given: "silu" ("swish"), "gelu" (by erf), "gelu_tanh" ("gelu_new", "gelu_pytorch_tanh"), "relu" or
            "relu_squared" ("relu2"); a function of one tensor that returns one of the same shape; or an epilogue of
            such a function.

    Raises:
        ValueError: no activation has this name.
        TypeError: it is neither a name nor a function, or it is a module without a known name.

    Example:
        >>> import torch
        >>> activation("swish").name
        'silu'
        >>> activation(lambda x: x.clamp(0, 6))(torch.tensor([-1.0, 7.0]))
        tensor([0., 6.])
    """
    known = recognised(given)
    if known is not None:
        return known
    if isinstance(given, str):
        names = ", ".join(sorted({*ACTIVATIONS, *ALIASES}))
        raise ValueError(f"activation is {given!r}; it must be a function or one of {names}")
    if isinstance(given, nn.Module):
        # One with parameters would lose them: they are not the block's.
        raise TypeError(
            f"activation is the module {type(given).__name__}; it must be a name or a function of a tensor"
        )
    if not callable(given):
        raise TypeError(
            f"activation is a {type(given).__name__}; it must be a name or a function of a tensor"
        )
    return _of_function(given)


@functools.lru_cache(maxsize=64)
def _of_function(function: Callable[..., Tensor]) -> Activation:
    """One object per function while it is cached, so that calls need not create epilogues."""
    return _make(getattr(function, "__name__", type(function).__name__), function, function)
