"""Files of safetensors that hold plain and quantised tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import torch
from torch import Tensor

from .tensor import QuantizedTensor

#: The entry of a file's metadata that says which tensors are parts of a quantised one.
KEY = "gemmery"
VERSION = 1


def save_safetensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors, plain and quantised ones, to a file of safetensors.

    A quantised tensor `name` is stored as plain ones `name.words`, `name.scales` and so on, which any reader of
    safetensors sees, and what else it needs is in the file's metadata under "gemmery", as JSON.

    Args:
        path: the file, replaced if there is one.
        tensors: by name, such as a module's `state_dict()`.

    Raises:
        ImportError: the package safetensors is not installed.
        ValueError: a tensor's name is that of a part of another one.

    Example:
        >>> import tempfile, torch, gemmery
        >>> from gemmery.formats import load_safetensors, save_safetensors
        >>> with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        ...     weight = gemmery.quantize(torch.ones(16, 32), "mxfp4")
        ...     save_safetensors(file.name, {"up": weight, "bias": torch.ones(16)})
        ...     sorted(load_safetensors(file.name))
        ['bias', 'up']
    """
    from safetensors.torch import save_file

    plain: dict[str, Tensor] = {}
    quantized: dict[str, dict[str, str]] = {}
    for name, tensor in tensors.items():
        parts = {name: tensor}
        if isinstance(tensor, QuantizedTensor):
            parts, quantized[name] = tensor.to_tensors(f"{name}.")
        if taken := parts.keys() & plain.keys():
            raise ValueError(f"save_safetensors: two tensors would be stored as {sorted(taken)[0]!r}")
        plain.update({key: value.detach().contiguous() for key, value in parts.items()})
    about = json.dumps({"version": VERSION, "tensors": quantized})
    save_file(plain, path, metadata={"format": "pt", KEY: about})


def load_safetensors(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Tensors of a file of safetensors, quantised ones as `save_safetensors` was given them.

    Args:
        path: the file; one that something else wrote gives plain tensors.
        device: where they go.

    Raises:
        ImportError: the package safetensors is not installed.
        ValueError: the file is of a later version of gemmery, or parts of a tensor are missing.

    Example: see `save_safetensors`.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt", device=str(device)) as file:
        about = json.loads((file.metadata() or {}).get(KEY, '{"version": 1, "tensors": {}}'))
        plain = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
    if about["version"] != VERSION:
        raise ValueError(
            f"load_safetensors: {path} is of version {about['version']}; this gemmery reads {VERSION}"
        )
    result: dict[str, Tensor] = {}
    for name, texts in about["tensors"].items():
        result[name] = weight = QuantizedTensor.from_tensors(plain, texts, f"{name}.")
        for part in weight.parts():
            del plain[f"{name}.{part}"]
    return plain | result
