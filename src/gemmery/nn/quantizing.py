"""Quantising the linear layers and the experts of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ..formats.base import Format
from ..formats.packing import STRIP
from ..formats.quantize import Scale
from ..formats.quantize import quantize as quantize_tensor
from ..formats.tensor import lookup
from . import hugging_face
from .experts import Experts
from .linear import Linear, own_code
from .quantized import QuantizedLinear
from .swap import Slot, Swapped, changed, is_linear, why_not


def quantize(
    model: nn.Module, format: Format | str = "int4", *, group_size: int | None = None,
    skip: Iterable[str] = ("lm_head",), symmetric: bool = True, scale: Scale = "channel",
    dtype: torch.dtype | None = None, batch_invariant: bool = False,
) -> Swapped:  # fmt: skip
    """Replace the plain linear layers and the experts inside a model by quantised ones, rounded to nearest, in place.

    Every torch.nn.Linear and gemmery.nn.Linear becomes a gemmery.nn.QuantizedLinear and keeps its bias. Layers that
    share a weight share the quantised one. Experts, which are gemmery.nn.Experts and those that `swap` replaces, become
    gemmery.nn.Experts with packed weights. Left alone, each with a reason in the report, are those that `skip` names,
    those whose weight is also another module's, such as an embedding's, those with code that a replacement would lose,
    experts whose activation can't be part of a product, and those whose weight the format can't hold.

    Args:
        model: of any floating type and on any device.
        format, group_size, symmetric, scale, dtype: as for `gemmery.quantize`.
        skip: names of layers or experts, or of modules in which these are left: whole parts of qualified names, in
            which * stands for anything. "lm_head" is that at any depth, "layers.0" all of the first layer. The report
            says which others than "lm_head" name no layer.
        batch_invariant: see `gemmery.matmul`.

    Returns:
        What was replaced and what was left, with a way back. As long as this report lives, so do the weights that were
        replaced.

    Raises:
        TypeError: `model` is not a module, or `skip` is a string.
        ValueError: there is no such format, or it does not go with the other arguments.

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
    options: dict[str, Any] = {
        "group_size": group_size,
        "symmetric": symmetric,
        "scale": scale,
        "dtype": dtype,
    }
    quantize_tensor(torch.zeros(16, 16), format, **options)  # for its errors about arguments
    walk = _Walk(lookup("quantize", format), tuple(skip), options, batch_invariant, _owners(model))
    if is_linear(model):
        walk.report.left.append(("", "it is not inside a module, so that nothing can take its place"))
    # With a module's other names, which lead to other places.
    for path, module in model.named_modules(remove_duplicate=False):
        if path and (is_linear(module) or is_experts(module)):
            prefix, _, name = path.rpartition(".")
            walk.meet(module, path, model.get_submodule(prefix), name)
    # The default may name a layer that a model has not; what is asked for should be there.
    for pattern in walk.skip:
        if pattern not in walk.used and pattern != "lm_head":
            walk.report.left.append((pattern, "it was to be skipped, and no linear layer is called that"))
    # All at once and last: an error before leaves the model as it was.
    for slot in walk.report._slots:
        slot.parent._modules[slot.name] = slot.after
    return walk.report


@dataclass
class _Walk:
    """One pass over a model, which notes what is to be replaced and changes nothing.

    Attributes:
        options: for `gemmery.quantize`.
        owners: names of modules that are no linear layers, by the ids of their own parameters.
        made: what replaces a layer, or None, by its id.
        weights: quantised ones, by the ids of the plain ones.
        used: what of `skip` names a layer.
    """

    format: Format
    skip: tuple[str, ...]
    options: dict[str, Any]
    batch_invariant: bool
    owners: dict[int, str]
    report: Swapped = field(default_factory=Swapped)
    made: dict[int, QuantizedLinear | Experts | None] = field(default_factory=dict)
    weights: dict[int, nn.Parameter] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def meet(self, layer: nn.Module, path: str, parent: nn.Module, name: str) -> None:
        """Decide about a layer where it is seen for the first time, and note its place."""
        if id(layer) not in self.made:
            after = self.reason(layer, path) or self.replacement(layer)
            if isinstance(after, str):
                self.report.left.append((path, after))
            else:
                what = type(layer).__name__ if isinstance(after, Experts) else "Linear"
                self.report.replaced.append((path, what))
            self.made[id(layer)] = None if isinstance(after, str) else after
        found = self.made[id(layer)]
        if found is not None:
            self.report._slots.append(Slot(path, parent, name, layer, found))

    def reason(self, layer: nn.Module, path: str) -> str | None:
        """Why a layer is not to be quantised; None if it is."""
        if isinstance(layer, QuantizedLinear) or (isinstance(layer, Experts) and layer.packed):
            return "it is quantised already"
        named = [x for x in self.skip if matches(path, x)]
        self.used.update(named)
        pattern = next(iter(named), None)
        if pattern is not None:
            return f"it is to be skipped ({pattern!r})"
        if is_experts(layer):
            return own_code(layer) if isinstance(layer, Experts) else hugging_face.refusal(layer)
        reason = changed(layer) if type(layer) is Linear else why_not(layer)
        if reason is not None:
            return reason
        owner = self.owners.get(id(layer.weight))
        return None if owner is None else f"its weight is also that of {owner}"

    def replacement(self, layer: nn.Module) -> QuantizedLinear | Experts | str:
        """What takes a layer's place, or why nothing does."""
        if is_experts(layer):
            return self.experts(layer)
        assert isinstance(layer, nn.Linear)
        if id(layer.weight) not in self.weights:
            try:
                weight = quantize_tensor(layer.weight.detach(), self.format, **self.options)
            except (ValueError, TypeError) as error:
                return str(error)
            self.weights[id(layer.weight)] = nn.Parameter(weight, requires_grad=False)
        invariant = self.batch_invariant or (isinstance(layer, Linear) and layer.batch_invariant)
        after = QuantizedLinear(self.weights[id(layer.weight)], layer.bias, batch_invariant=invariant)
        return after.train(layer.training)

    def experts(self, module: nn.Module) -> Experts | str:
        """What takes the place of experts, or why nothing does."""
        found = module if isinstance(module, Experts) else hugging_face.stacked(module)
        if isinstance(found, str):
            return found
        if found.gated and found.hidden_features % STRIP:
            return f"its gate has {found.hidden_features} rows; packed they must be a multiple of {STRIP}"
        weights = (getattr(found, found.first), found.down_proj)
        try:
            first, down = (quantize_tensor(x.detach(), self.format, **self.options) for x in weights)
        except (ValueError, TypeError) as error:
            return str(error)
        after = Experts.of(
            first, down, getattr(found, f"{found.first}_bias"), found.down_proj_bias, activation=found.activation,
            gated=found.gated, precision=found.precision,
            batch_invariant=self.batch_invariant or found.batch_invariant,
        )  # fmt: skip
        return after.train(module.training)


def is_experts(module: nn.Module) -> bool:
    """Whether a module is one of experts, gemmery's or Hugging Face's."""
    return isinstance(module, Experts) or hugging_face.resembles(module)


def matches(path: str, pattern: str) -> bool:
    """Whether a pattern is a module's name, or its end, or that of a module that it is in.

    Example:
        >>> matches("model.lm_head", "lm_head"), matches("model.layers.0.mlp.gate", "layers.*.gate")
        (True, True)
        >>> matches("visual.blocks.0.fc", "visual"), matches("model.gate_proj", "gate")
        (True, False)
    """
    return fnmatchcase(f".{path}.", f"*.{pattern}.*")


def _owners(model: nn.Module) -> dict[int, str]:
    found: dict[int, str] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            for parameter in module._parameters.values():
                found.setdefault(id(parameter), path or "the model itself")
    return found
