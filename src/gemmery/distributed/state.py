"""State dicts of plain tensors and DTensors, which `torch.distributed.checkpoint` can write and read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..formats.weight import PackedWeight


def flat_state_dict(model: nn.Module) -> dict[str, Any]:
    """A model's state dict, in which the tensors of packed weights, and texts that describe them, replace the weights.

    The tensors are the model's own, so `torch.distributed.checkpoint.load` loads into the model. Sharded weights stay
    sharded, and can be loaded with another number of ranks.

    Example:
        >>> import torch, gemmery.nn
        >>> from gemmery.distributed import flat_state_dict
        >>> layer = gemmery.nn.QuantizedLinear(gemmery.quantize(torch.randn(16, 64), "int8"))
        >>> sorted(flat_state_dict(layer))
        ['weight.channel', 'weight.texts', 'weight.words']
    """
    found: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, PackedWeight):
            tensors, texts = value.to_tensors(f"{name}.")
            found |= {**tensors, f"{name}.texts": texts}
        else:
            found[name] = value
    return found


def load_flat_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load a state dict of `flat_state_dict` into a model with the same weights, sharded in the same way.

    Raises:
        ValueError: an entry is missing, or a weight has another format than the model's.

    Example:
        >>> import torch, gemmery.nn
        >>> from gemmery.distributed import flat_state_dict, load_flat_state_dict
        >>> one, other = (gemmery.nn.QuantizedLinear(gemmery.quantize(torch.randn(16, 64), "int8")) for _ in range(2))
        >>> load_flat_state_dict(other, flat_state_dict(one))
        >>> other.weight.dequantize().equal(one.weight.dequantize())
        True
    """
    plain: dict[str, Any] = {}
    pairs = []
    for name, value in model.state_dict().items():
        if not isinstance(value, PackedWeight):
            plain[name] = _found(state_dict, name)
            continue
        tensors, texts = value.to_tensors(f"{name}.")
        given = _found(state_dict, f"{name}.texts")
        if given != texts:
            raise ValueError(f"load_flat_state_dict: {name} is {given} there, and {texts} in the model")
        pairs += [(part, _found(state_dict, key)) for key, part in tensors.items()]
        plain[name] = value
    with torch.no_grad():
        for part, source in pairs:
            part.copy_(source)
    model.load_state_dict(plain)


def _found(state_dict: Mapping[str, Any], name: str) -> Any:
    if name not in state_dict:
        raise ValueError(f"load_flat_state_dict: there is no {name!r}")
    return state_dict[name]
