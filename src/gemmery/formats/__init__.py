"""Weights of few bits: formats, quantizing, and the tensor that holds them."""

from typing import TYPE_CHECKING, Any

from .base import FORMATS, Format
from .codes import from_codes
from .files import load_safetensors, save_safetensors
from .quantize import quantize
from .sparse import SparseTensor, sparsify
from .tensor import QuantizedTensor

if TYPE_CHECKING:
    from .checkpoints import read_weight

__all__ = [
    "FORMATS",
    "Format",
    "QuantizedTensor",
    "SparseTensor",
    "from_codes",
    "load_safetensors",
    "quantize",
    "read_weight",
    "save_safetensors",
    "sparsify",
]


def __getattr__(name: str) -> Any:
    # The readers are imported when one is used: `import gemmery` imports this package.
    if name != "read_weight":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .checkpoints import read_weight

    globals()[name] = read_weight
    return read_weight
