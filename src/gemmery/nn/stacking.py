"""Quantized layers of one input as one layer, whose packed weight contains the rows of all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..dtensors import is_sharded
from ..formats import pieces
from .quantized import QuantizedLinear


def why_not_stacked(layers: Mapping[str, nn.Module | None]) -> str | None:
    """Why layers, by name, can't be one quantized layer; None if they can."""
    *first, last = layers
    names = f"its {', '.join(first)} and {last}"
    found: list[QuantizedLinear] = []
    for layer in layers.values():
        if not isinstance(layer, QuantizedLinear):
            return f"{names} are not all quantized"
        if is_sharded(layer.quantized.parts().values()):
            return "its weights are DTensors; call this before the model is sharded"
        found.append(layer)
    if len({(layer.bias is None, layer.batch_invariant) for layer in found}) > 1:
        return f"{names} differ in their bias or batch_invariant"
    if len({layer.bias.requires_grad for layer in found if layer.bias is not None}) > 1:
        return f"the biases of {names} differ in requires_grad"
    reason = pieces.why_not_stacked([layer.quantized for layer in found])
    return None if reason is None else f"{names} can't be one packed weight: {reason}"


def parameters_of(layers: Mapping[str, QuantizedLinear]) -> tuple[Tensor, nn.Parameter | None]:
    """The weight and the bias of layers as one; `why_not_stacked` gives reasons against it."""
    found = [*layers.values()]
    biases = [layer.bias.detach() for layer in found if layer.bias is not None]
    first = found[0].bias
    bias = None if first is None else nn.Parameter(torch.cat(biases), first.requires_grad)
    return torch.cat([layer.weight.detach() for layer in found]), bias


def rows_of(layer: QuantizedLinear, begin: int, end: int) -> QuantizedLinear:
    """A layer with some of the rows, which are copies."""
    bias = None
    if layer.bias is not None:
        bias = nn.Parameter(layer.bias.detach()[begin:end].clone(), layer.bias.requires_grad)
    weight = layer.weight.detach()[begin:end]
    return QuantizedLinear(weight, bias, batch_invariant=layer.batch_invariant).train(layer.training)
