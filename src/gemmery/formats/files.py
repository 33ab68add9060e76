"""Files of safetensors that hold plain and quantized tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..files import parse_json, replacing
from .weight import PackedWeight

#: The entry of a file's metadata that says which tensors are parts of a quantized one.
KEY = "gemmery"
VERSION = 1


def save_safetensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Write plain, quantized and sparse tensors to a safetensors file.

    A quantized or sparse tensor `name` is stored as plain tensors `name.words`, `name.scales` and so on, which every
    reader of safetensors sees. The file's metadata contain everything else under "gemmery", as JSON. A tensor under
    several names, such as a tied weight, is stored under the first; the metadata list the others.

    Args:
        path: the file. An existing file is replaced when everything has been written, and is unchanged after an error.
        tensors: by name, such as a module's `state_dict()`.

    Raises:
        ImportError: the package safetensors is not installed.
        OSError: the file can't be written.
        TypeError: `path` is not a path, `tensors` is not a mapping, or one of its values is not a tensor.
        ValueError: the name of a tensor is that of a part of another one.

    Example:
        >>> import tempfile, torch, gemmery
        >>> from gemmery.formats import load_safetensors, save_safetensors
        >>> with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        ...     weight = gemmery.quantize(torch.ones(16, 32), "mxfp4")
        ...     save_safetensors(file.name, {"up": weight, "bias": torch.ones(16)})
        ...     sorted(load_safetensors(file.name))
        ['bias', 'up']
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if not isinstance(path, str | os.PathLike) or not isinstance(tensors, Mapping):
        raise TypeError(
            f"save_safetensors: path is a {type(path).__name__} and tensors a {type(tensors).__name__}; the order is "
            "save_safetensors(path, tensors), a path and a mapping of names to tensors"
        )
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(
                f"save_safetensors: tensors[{name!r}] is a {type(tensor).__name__}; names must be texts and all "
                "values tensors"
            )
    plain: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    # Names by what memory they are, and storages that are in the file: safetensors takes none twice.
    stored: dict[tuple[Any, ...], str] = {}
    storages: set[tuple[torch.device, int]] = set()
    flat, quantized = flattened(tensors, "save_safetensors")
    for key, value in flat.items():
        memory = _memory(value)
        if memory is not None and memory in stored:
            aliases[key] = stored[memory]
            continue
        # A conjugated or negated view is written as plain numbers.
        kept = value.detach().resolve_conj().resolve_neg().contiguous()
        if memory is not None:
            stored[memory] = key
            # Another part of memory that is in the file already.
            kept = kept.clone() if memory[:2] in storages else kept
            storages.add(memory[:2])
        plain[key] = kept
    about = metadata_text(quantized, aliases)
    with replacing(path) as part:
        try:
            save_file(plain, part, metadata={"format": "pt", KEY: about})
        except SafetensorError as error:
            raise OSError(str(error)) from error


def flattened(
    tensors: Mapping[str, Tensor], caller: str
) -> tuple[dict[str, Tensor], dict[str, dict[str, str]]]:
    """Plain tensors by name, those of packed ones among them, and the texts of each packed one.

    Raises:
        ValueError: a tensor's name is that of a part of another one.
    """
    plain: dict[str, Tensor] = {}
    quantized: dict[str, dict[str, str]] = {}
    for name, tensor in tensors.items():
        parts = {name: tensor}
        if isinstance(tensor, PackedWeight):
            parts, quantized[name] = tensor.to_tensors(f"{name}.")
        if taken := parts.keys() & plain.keys():
            raise ValueError(f"{caller}: two tensors would be stored as {sorted(taken)[0]!r}")
        plain |= parts
    return plain, quantized


def metadata_text(
    quantized: Mapping[str, Mapping[str, str]], aliases: Mapping[str, str] | None = None
) -> str:
    """The text of a file's metadata under `KEY`.

    Args:
        quantized: the texts of each packed tensor, see `flattened`.
        aliases: by name the tensor of the file that it is as well.
    """
    about: dict[str, Any] = {"version": VERSION, "tensors": quantized}
    if aliases:
        about["aliases"] = aliases
    return json.dumps(about)


def texts_of_file(path: str | os.PathLike[str]) -> dict[str, Mapping[str, str]]:
    """The texts of each packed tensor that a file's metadata names; tensors may be in other files.

    Raises:
        ValueError: the metadata is not as `metadata_text` writes it.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        text, names = (file.metadata() or {}).get(KEY), list(file.keys())
    return dict(_About.of(text, names, str(path)).tensors)


def _memory(x: Tensor) -> tuple[Any, ...] | None:
    """A value that is equal for two tensors if they are the same view of the same memory; None for a tensor without
    memory.
    """
    if x.layout != torch.strided or not x.numel() or x.device.type == "meta":
        return None
    view = (x.storage_offset(), tuple(x.shape), x.stride(), x.dtype, x.is_conj(), x.is_neg())
    return x.device, x.untyped_storage().data_ptr(), *view


def load_safetensors(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Load the tensors of a safetensors file; quantized tensors as `save_safetensors` received them.

    A tensor that was saved under several names is one tensor again.

    Args:
        path: the file. A file from another program gives plain tensors.
        device: the device of the tensors.

    Raises:
        ImportError: the package safetensors is not installed.
        OSError: the file can't be read.
        ValueError: the file is damaged, it or words in it belong to another version of gemmery, or parts of a tensor
            are missing; the message names the file. Values are not checked, because safetensors has no checksums.

    Example: see `save_safetensors`.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            text = (file.metadata() or {}).get(KEY)
            plain = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
    except SafetensorError as error:
        raise ValueError(f"load_safetensors: {path} is not a safetensors file: {error}") from error
    about = _About.of(text, plain, f"load_safetensors: {path}")
    plain |= {name: plain[source] for name, source in about.aliases.items()}
    result: dict[str, PackedWeight] = {}
    made: dict[tuple[Any, ...], PackedWeight] = {}
    for name, texts in about.tensors.items():
        try:
            weight = PackedWeight.from_tensors(plain, texts, f"{name}.")
        except (ValueError, TypeError) as error:
            raise ValueError(f"load_safetensors: {path}, tensor {name!r}: {error}") from error
        parts = tuple((part, id(value)) for part, value in weight.parts().items())
        result[name] = weight = made.setdefault((parts, *sorted(texts.items())), weight)
    for name, weight in result.items():
        for part in weight.parts():
            del plain[f"{name}.{part}"]
    return plain | result


@dataclass(frozen=True)
class _About:
    """The parsed metadata of a file under `KEY`.

    Attributes:
        tensors: by the name of a packed weight the texts of `PackedWeight.to_tensors`.
        aliases: by name the tensor of the file that it is as well.
    """

    tensors: Mapping[str, Mapping[str, str]]
    aliases: Mapping[str, str]

    @classmethod
    def of(cls, text: str | None, names: Collection[str], where: str) -> _About:
        """The metadata of a file with tensors of these names.

        Args:
            text: None for a file that something else wrote.

        Raises:
            ValueError: it is not as `save_safetensors` writes it.
        """
        if text is None:
            return cls({}, {})
        where = f"{where}: the metadata under {KEY!r}"
        about = parse_json(text, where)
        if not isinstance(about, dict) or type(about.get("version")) is not int:
            raise ValueError(f"{where}: there is no version, a whole number")
        if about["version"] != VERSION:
            raise ValueError(f"{where} is of version {about['version']}; this gemmery reads {VERSION}")
        tensors, aliases = about.get("tensors"), about.get("aliases", {})
        if not (isinstance(tensors, dict) and all(map(_is_texts, tensors.values()))):
            raise ValueError(f"{where}: there are no tensors, an object that has an object of texts for each")
        if not _is_texts(aliases):
            raise ValueError(f"{where}: aliases are {aliases!r}; they must be an object of names")
        if unknown := sorted({*aliases.values()} - {*names}):
            raise ValueError(f"{where}: an alias is of {unknown[0]!r}, which is not a tensor of the file")
        if taken := sorted((aliases.keys() | tensors.keys()) & {*names}):
            raise ValueError(f"{where}: {taken[0]!r} is the name of a tensor of the file already")
        return cls(tensors, aliases)


def _is_texts(values: object) -> bool:
    return isinstance(values, dict) and all(isinstance(text, str) for text in values.values())
