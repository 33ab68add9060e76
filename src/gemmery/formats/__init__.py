"""Weights of few bits: formats, quantising, and the tensor that holds them."""

from .base import FORMATS, Format
from .codes import from_codes
from .files import load_safetensors, save_safetensors
from .quantize import quantize
from .tensor import QuantizedTensor

__all__ = [
    "FORMATS",
    "Format",
    "QuantizedTensor",
    "from_codes",
    "load_safetensors",
    "quantize",
    "save_safetensors",
]
