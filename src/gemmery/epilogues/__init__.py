"""Epilogues: torch functions of a product that run inside its kernel."""

from typing import TYPE_CHECKING, Any

from .device_function import device_function
from .function import Epilogue
from .library import (
    bias,
    cast_fp8,
    column_scale,
    compose,
    dropout,
    geglu,
    gelu,
    gelu_tanh,
    logsumexp,
    reglu,
    relu,
    relu_squared,
    residual,
    row_scale,
    scaled,
    sigmoid,
    silu,
    softcap,
    static_fp8,
    swiglu,
    tanh,
    with_row_amax,
)
from .record import Untraceable

if TYPE_CHECKING:
    from ..product.fusible import check

__all__ = [
    "Epilogue", "Untraceable", "bias", "cast_fp8", "check", "column_scale", "compose", "device_function", "dropout",
    "geglu", "gelu", "gelu_tanh", "logsumexp", "reglu", "relu", "relu_squared", "residual", "row_scale", "scaled",
    "sigmoid", "silu", "softcap", "static_fp8", "swiglu", "tanh", "with_row_amax",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name != "check":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # It computes a product, which is a layer above this package, so it is imported on first use.
    from ..product.fusible import check

    return check
