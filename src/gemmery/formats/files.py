"""Files of safetensors that hold plain and quantised tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .tensor import QuantizedTensor

#: The entry of a file's metadata that says which tensors are parts of a quantised one.
KEY = "gemmery"
VERSION = 1


def save_safetensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors, plain and quantised ones, to a file of safetensors.

    A quantised tensor `name` is stored as plain ones `name.words`, `name.scales` and so on, which any reader of
    safetensors sees, and what else it needs is in the file's metadata under "gemmery", as JSON. A tensor under several
    names, as tied weights are, is stored under the first of them; the others are noted there as well.

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
    aliases: dict[str, str] = {}
    # Names by what memory they are, and storages that are in the file: safetensors takes none twice.
    stored: dict[tuple[Any, ...], str] = {}
    storages: set[tuple[torch.device, int]] = set()
    for name, tensor in tensors.items():
        parts = {name: tensor}
        if isinstance(tensor, QuantizedTensor):
            parts, quantized[name] = tensor.to_tensors(f"{name}.")
        if taken := parts.keys() & (plain.keys() | aliases.keys()):
            raise ValueError(f"save_safetensors: two tensors would be stored as {sorted(taken)[0]!r}")
        for key, value in parts.items():
            memory = _memory(value)
            if memory is not None and memory in stored:
                aliases[key] = stored[memory]
                continue
            kept = value.detach().contiguous()
            if memory is not None:
                stored[memory] = key
                # Another part of memory that is in the file already.
                kept = kept.clone() if memory[:2] in storages else kept
                storages.add(memory[:2])
            plain[key] = kept
    about: dict[str, Any] = {"version": VERSION, "tensors": quantized}
    if aliases:
        about["aliases"] = aliases
    save_file(plain, path, metadata={"format": "pt", KEY: json.dumps(about)})


def _memory(x: Tensor) -> tuple[Any, ...] | None:
    """What two tensors have in common if and only if they are one; None where there is nothing to share."""
    if x.layout != torch.strided or not x.numel() or x.device.type == "meta":
        return None
    view = (x.storage_offset(), tuple(x.shape), x.stride(), x.dtype, x.is_conj(), x.is_neg())
    return x.device, x.untyped_storage().data_ptr(), *view


def load_safetensors(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Tensors of a file of safetensors, quantised ones as `save_safetensors` was given them.

    What was one tensor under several names is so again.

    Args:
        path: the file; one that something else wrote gives plain tensors.
        device: where they go.

    Raises:
        ImportError: the package safetensors is not installed.
        ValueError: the file, or words in it, are of another version of gemmery, or parts of a tensor are missing.

    Example: see `save_safetensors`.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt", device=str(device)) as file:
        about = json.loads((file.metadata() or {}).get(KEY, f'{{"version": {VERSION}, "tensors": {{}}}}'))
        plain = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
    if about["version"] != VERSION:
        raise ValueError(
            f"load_safetensors: {path} is of version {about['version']}; this gemmery reads {VERSION}"
        )
    plain |= {name: plain[source] for name, source in about.get("aliases", {}).items()}
    result: dict[str, Tensor] = {}
    made: dict[tuple[Any, ...], QuantizedTensor] = {}
    for name, texts in about["tensors"].items():
        weight = QuantizedTensor.from_tensors(plain, texts, f"{name}.")
        parts = tuple((part, id(value)) for part, value in weight.parts().items())
        result[name] = weight = made.setdefault((parts, *sorted(texts.items())), weight)
        for part in weight.parts():
            del plain[f"{name}.{part}"]
    return plain | result
