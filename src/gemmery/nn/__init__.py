"""Modules: torch.nn's, with their products done by gemmery, and a swap for models that exist."""

from .activations import Activation, activation
from .linear import Linear
from .mlp import MLP, GatedMLP, activated_linear, gated_linear, stacked_gated_linear
from .quantized import QuantizedLinear
from .quantizing import quantize
from .swap import Swapped, swap

__all__ = [
    "MLP", "Activation", "GatedMLP", "Linear", "QuantizedLinear", "Swapped", "activated_linear", "activation",
    "gated_linear", "quantize", "stacked_gated_linear", "swap",
]  # fmt: skip
