"""Quantising the linear layers of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ..formats.base import Format
from ..formats.quantize import Scale
from ..formats.quantize import quantize as quantize_tensor
from ..formats.tensor import QuantizedTensor, lookup
from .linear import Linear
from .quantized import QuantizedLinear, is_quantizable, owners_of, why_not_quantized
from .swap import Slot, Swapped, changed


def quantize(
    model: nn.Module, format: Format | str = "int4", *, group_size: int | None = None,
    skip: Iterable[str] = ("lm_head",), symmetric: bool = True, scale: Scale = "channel",
    dtype: torch.dtype | None = None, batch_invariant: bool = False,
) -> Swapped:  # fmt: skip
    """Replace the plain linear layers inside a model by quantised ones, rounded to nearest, in place.

    These are every torch.nn.Linear and gemmery.nn.Linear; they become gemmery.nn.QuantizedLinear and keep their biases.
    Layers that share a weight share the quantised one. Left alone, each with a reason in the report, are those that
    `skip` names, those whose weight is also another module's, such as an embedding's, those with code that a
    replacement would lose, and those whose weight the format can't hold.

    Args:
        model: of any floating type and on any device.
        format, group_size, symmetric, scale, dtype: as for `gemmery.quantize`.
        skip: names of layers, or of modules whose layers are left: whole parts of qualified names, in which * stands
            for anything. "lm_head" is that at any depth, "layers.0" all of the first layer.
        batch_invariant: see `gemmery.matmul`.

    Returns:
        What was replaced and what was left, with a way back. As long as this report lives, so do the weights that were
        replaced.

    Raises:
        TypeError: `model` is not a module, or `skip` is a string.
        ValueError: there is no such format.

    Example:
        >>> import torch, gemmery.nn
        >>> model = torch.nn.ModuleDict({"up": torch.nn.Linear(64, 32), "lm_head": torch.nn.Linear(32, 100)})
        >>> print(gemmery.nn.quantize(model, "int4", group_size=32))
        1 replaced: 1 Linear
        1 left
          lm_head: it is to be skipped ('lm_head')
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize: model is a {type(model).__name__}; it must be a torch.nn.Module")
    if isinstance(skip, str):
        raise TypeError(f"quantize: skip is the string {skip!r}; it must be several, such as ({skip!r},)")
    format, patterns, report = lookup("quantize", format), tuple(skip), Swapped()
    owners = owners_of(model)
    weights: dict[int, QuantizedTensor] = {}
    made: dict[int, QuantizedLinear | None] = {}
    if is_quantizable(model):
        report.left.append(("", "it is not inside a module, so that nothing can take its place"))
    for path, parent, name, layer in _layers(model):
        if id(layer) not in made:
            reason: str | None = why_not_quantized(layer, path, patterns, owners) or changed(layer)
            try:
                if reason is None and id(layer.weight) not in weights:
                    weights[id(layer.weight)] = quantize_tensor(
                        layer.weight.detach(), format, group_size=group_size, symmetric=symmetric, scale=scale,
                        dtype=dtype,
                    )  # fmt: skip
            except ValueError as error:
                reason = str(error)
            made[id(layer)] = (
                None if reason else _replacement(layer, weights[id(layer.weight)], batch_invariant)
            )
            if reason:
                report.left.append((path, reason))
            else:
                report.replaced.append((path, "Linear"))
        after = made[id(layer)]
        if after is not None:
            report._slots.append(Slot(path, parent, name, layer, after))
    # All at once and last: an error before leaves the model as it was.
    for slot in report._slots:
        slot.parent._modules[slot.name] = slot.after
    return report


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Linear]]:
    """Linear layers with a plain weight in all their places: qualified name, parent, name there, and the layer."""
    for prefix, parent in model.named_modules():
        for name, child in parent._modules.items():
            if child is not None and is_quantizable(child):
                yield f"{prefix}.{name}" if prefix else name, parent, name, child  # type: ignore[misc]


def _replacement(layer: nn.Linear, weight: QuantizedTensor, batch_invariant: bool) -> QuantizedLinear:
    batch_invariant = batch_invariant or (isinstance(layer, Linear) and layer.batch_invariant)
    after = QuantizedLinear(weight, layer.bias, batch_invariant=batch_invariant)
    return after.train(layer.training)
