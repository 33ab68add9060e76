"""Epilogues: torch functions over a product that run inside the kernel that makes it."""

from .check import check
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

__all__ = [
    "Epilogue", "Untraceable", "bias", "cast_fp8", "check", "column_scale", "compose", "device_function", "dropout",
    "geglu", "gelu", "gelu_tanh", "logsumexp", "reglu", "relu", "relu_squared", "residual", "row_scale", "scaled",
    "sigmoid", "silu", "softcap", "static_fp8", "swiglu", "tanh", "with_row_amax",
]  # fmt: skip
