"""Weights as other libraries store them, read into a `QuantizedTensor` or `SparseTensor` without a change of value.

One file a source, and `read.py`, which tells them apart. None of the libraries is imported: their tensors are known by
their names, shapes and attributes. Only the weight is read; some libraries also round activations when they multiply,
but gemmery does not.
"""

from .bitsandbytes import read_bnb, read_bnb_state
from .compressed_tensors import read_compressed_tensors
from .fp8 import read_fp8, read_fp8_blocks
from .gptq import read_awq, read_gptq
from .microscaling import read_mxfp4, read_nvfp4
from .read import read_weight
from .sparse import read_marlin24, read_sparse24
from .torchao import read_torchao

__all__ = [
    "read_awq", "read_bnb", "read_bnb_state", "read_compressed_tensors", "read_fp8", "read_fp8_blocks", "read_gptq",
    "read_marlin24", "read_mxfp4", "read_nvfp4", "read_sparse24", "read_torchao", "read_weight",
]  # fmt: skip
