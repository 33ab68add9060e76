"""Modules: torch.nn's, with products by gemmery, and a swap for existing models."""

from .activations import Activation, activation
from .cross_entropy import LinearCrossEntropy
from .experts import Experts
from .hugging_face import register_experts
from .linear import Linear
from .mlp import MLP, GatedMLP, activated_linear, gated_linear, stacked_gated_linear
from .quantized import QuantizedLinear
from .quantizing import quantize
from .sparse import PrunedLinear, SparseLinear
from .sparsifying import sparsify
from .swap import Swapped, swap

__all__ = [
    "MLP", "Activation", "Experts", "GatedMLP", "Linear", "LinearCrossEntropy", "PrunedLinear", "QuantizedLinear",
    "SparseLinear", "Swapped", "activated_linear", "activation", "gated_linear", "quantize", "register_experts",
    "sparsify", "stacked_gated_linear", "swap",
]  # fmt: skip
