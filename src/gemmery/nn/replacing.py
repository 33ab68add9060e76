"""A walk over a model that puts layers with packed weights in the place of plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import cast

from torch import Tensor, nn

from ..formats.weight import PackedWeight
from . import hugging_face, projections, transposed
from .blocks import FusedGatedMLP, PackedGatedMLP, why_not_halves
from .experts import Experts
from .linear import Linear, own_code
from .packed import PackedLinear
from .quantized import QuantizedLinear
from .sparse import SparseLinear
from .swap import ALONE, Slot, Swapped, changed, is_linear, why_not
from .transposed import TransposedLinear


def matches(path: str, pattern: str) -> bool:
    """Whether a pattern is a module's name, or its end, or that of a module that it is in.

    Example:
        >>> matches("model.lm_head", "lm_head"), matches("model.layers.0.mlp.gate", "layers.*.gate")
        (True, True)
        >>> matches("visual.blocks.0.fc", "visual"), matches("model.gate_proj", "gate")
        (True, False)
    """
    return fnmatchcase(f".{path}.", f"*.{pattern}.*")


@dataclass(frozen=True)
class Packing:
    """The way in which weights are packed.

    Attributes:
        caller: the function's name, for errors.
        pack: makes a packed weight of a plain one; a ValueError or TypeError says why it can't.
        layer: the class of the layers that hold such weights.
        skip: names of what is left, see `quantize`.
        batch_invariant: see `gemmery.matmul`.
        strip: rows of which halves of experts' gate and up have a multiple.
        trained: whether layers that are trained with a sparse weight are replaced, by what their `to_inference` gives.
        matches: whether a module's name is meant by one of `skip`.
    """

    caller: str
    pack: Callable[[Tensor], PackedWeight]
    layer: type[PackedLinear]
    skip: Iterable[str]
    batch_invariant: bool
    strip: int
    trained: bool = False
    matches: Callable[[str, str], bool] = matches

    def check(self, model: nn.Module) -> None:
        """Errors about the arguments that all such functions have."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"{self.caller}: model is a {type(model).__name__}; it must be a torch.nn.Module")
        if isinstance(self.skip, str):
            raise TypeError(
                f"{self.caller}: skip is the string {self.skip!r}; it must be a sequence of names, such as "
                f"({self.skip!r},)"
            )


def replace(model: nn.Module, packing: Packing) -> Swapped:
    """Replaces the linear layers and the experts inside a model, in place; see `quantize`."""
    report = planned(model, packing)
    report._install()
    return report


def planned(model: nn.Module, packing: Packing) -> Swapped:
    """The plan of `replace`, with all replacements; the model is not changed."""
    walk = _Walk(packing, tuple(packing.skip), _owners(model))
    if is_layer(model):
        walk.report.left.append(("", ALONE))
    # Including a module's other names, which are other places.
    for path, module in model.named_modules(remove_duplicate=False):
        if path and (is_layer(module) or is_experts(module)):
            prefix, _, name = path.rpartition(".")
            walk.meet(module, path, model.get_submodule(prefix), name)
    if issubclass(packing.layer, QuantizedLinear):
        walk.stack(model)
        walk.project(model)
    # The default may name a layer that a model lacks; a layer that the user names must exist.
    for pattern in walk.skip:
        if pattern not in walk.used and pattern != "lm_head":
            walk.report.left.append((pattern, "named in skip, but no linear layer has this name"))
    return walk.report


def packed(module: nn.Module, packing: Packing) -> PackedLinear | Experts | str:
    """The replacement of one layer or module of experts, or why there is none."""
    return _Walk(packing, (), {}).replacement(module)


@dataclass
class _Walk:
    """One pass over a model, which records the replacements and changes nothing.

    Attributes:
        owners: names of modules that are not linear layers, by the ids of their parameters. made: what replaces a
            layer,
        or None, by its id.
        weights: packed ones, by the ids of the plain ones.
        used: the entries of `skip` that name a layer.
    """

    how: Packing
    skip: tuple[str, ...]
    owners: dict[int, str]
    report: Swapped = field(default_factory=Swapped)
    made: dict[int, PackedLinear | Experts | None] = field(default_factory=dict)
    weights: dict[int, nn.Parameter] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def meet(self, layer: nn.Module, path: str, parent: nn.Module, name: str) -> None:
        """Decide about a layer at its first place, and record its place."""
        if id(layer) not in self.made:
            after = self.reason(layer, path) or self.replacement(layer)
            if isinstance(after, str):
                self.report.left.append((path, after))
            else:
                own = isinstance(layer, nn.Linear) and not isinstance(layer, SparseLinear)
                self.report.replaced.append((path, "Linear" if own else type(layer).__name__))
            self.made[id(layer)] = None if isinstance(after, str) else after
        found = self.made[id(layer)]
        if found is not None:
            self.report._slots.append(Slot(path, parent, name, layer, found))

    def stack(self, model: nn.Module) -> None:
        """Keep fused blocks fused: gate and up that are both quantized become one weight."""
        made: dict[int, PackedGatedMLP | None] = {}
        for path, block in model.named_modules(remove_duplicate=False):
            if type(block) is not FusedGatedMLP or not path:
                continue
            if id(block) not in made:
                made[id(block)] = self.stacked(block)
            after = made[id(block)]
            if after is not None:
                prefix, _, name = path.rpartition(".")
                self.report._slots.append(Slot(path, model.get_submodule(prefix), name, block, after))

    def stacked(self, block: FusedGatedMLP) -> PackedGatedMLP | None:
        """The replacement of a fused block; None if its layers are replaced one by one, or not at all."""
        layers = {
            name: self.made.get(id(child)) or child
            for name, child in block._modules.items()
            if child is not None
        }
        halves = {name: layers[name] for name in PackedGatedMLP.HALVES}
        if own_code(block) is not None or why_not_halves(halves) is not None:
            return None
        after = PackedGatedMLP(block, layers, block.activation)
        slots = self.report._slots
        slots[:] = [slot for slot in slots if slot.parent is not block]
        # Weights that were packed only for these are not needed any more.
        kept = {id(slot.before) for slot in slots}
        for name in PackedGatedMLP.HALVES:
            layer = block._modules[name]
            if layer is not None and id(layer) not in kept:
                self.made[id(layer)] = None
                self.weights.pop(id(layer.weight), None)
        return after

    def project(self, model: nn.Module) -> None:
        """In a model that was swapped, the projections of attention that are all quantized become one weight."""
        for path, module in model.named_modules():
            before = projections.projections_of(module)
            if before is None or not all(type(layer) is Linear for layer in before.values()):
                continue
            layers = {name: self.made.get(id(layer)) for name, layer in before.items()}
            slots = self.report._slots
            places = [slot for slot in slots if slot.parent is module and slot.name in layers]
            elsewhere = {id(slot.before) for slot in slots if slot not in places}
            # A layer with another place remains one layer.
            if projections.why_not(module, layers) is None and elsewhere.isdisjoint(map(id, before.values())):
                slots[:] = [slot for slot in slots if slot not in places]
                self.report._project(module, path, layers)

    def reason(self, layer: nn.Module, path: str) -> str | None:
        """The reason not to pack a layer; None to pack it."""
        if isinstance(layer, PackedLinear):
            return f"it is {layer.KIND.state} already"
        if isinstance(layer, Experts):
            weights: list[Tensor | None] = [*layer._parameters.values()]
            for weight in weights:
                if isinstance(weight, PackedWeight):
                    return f"it is {weight.state} already"
        named = [x for x in self.skip if self.how.matches(path, x)]
        self.used.update(named)
        pattern = next(iter(named), None)
        if pattern is not None:
            return f"skipped by name ({pattern!r})"
        if is_experts(layer):
            return own_code(layer) if isinstance(layer, Experts) else hugging_face.refusal(layer)
        if transposed.resembles(layer):
            return transposed.refusal(layer) or self.owned(layer)
        is_ours = type(layer) is Linear or (self.how.trained and type(layer) is SparseLinear)
        reason = changed(layer) if is_ours else why_not(layer)
        return reason or self.owned(layer)

    def owned(self, layer: nn.Module) -> str | None:
        """The reason not to pack a weight that another layer shares and keeps; None if there is no such layer."""
        owner = self.owners.get(id(layer.weight))
        return None if owner is None else f"its weight is shared with {owner}"

    def replacement(self, layer: nn.Module) -> PackedLinear | Experts | str:
        """The replacement of a layer, or why there is none."""
        if is_experts(layer):
            return self.experts(layer)
        if id(layer.weight) not in self.weights:
            try:
                weight = self.pack(layer)
            except (ValueError, TypeError) as error:
                return str(error)
            self.weights[id(layer.weight)] = nn.Parameter(weight, requires_grad=False)
        own = isinstance(layer, Linear | SparseLinear | TransposedLinear) and layer.batch_invariant
        invariant = self.how.batch_invariant or own
        bias = layer._parameters["bias"]
        after = self.how.layer(self.weights[id(layer.weight)], bias, batch_invariant=invariant)
        return after.train(layer.training)

    def pack(self, layer: nn.Module) -> PackedWeight:
        """A layer's packed weight, (out_features, in_features)."""
        if isinstance(layer, SparseLinear):
            return layer.pruned()
        weight = cast(Tensor, layer.weight).detach()
        return self.how.pack(weight.t().contiguous() if transposed.resembles(layer) else weight)

    def experts(self, module: nn.Module) -> Experts | str:
        """The replacement of experts, or why there is none."""
        found = module if isinstance(module, Experts) else hugging_face.stacked(module)
        if isinstance(found, str):
            return found
        strip = self.how.strip
        if found.gated and found.hidden_features % strip:
            return f"its gate has {found.hidden_features} rows; a packed gate must have a multiple of {strip}"
        weights = (getattr(found, found.first), found.down_proj)
        try:
            first, down = (self.how.pack(x.detach()) for x in weights)
        except (ValueError, TypeError) as error:
            return str(error)
        after = Experts.of(
            first, down, getattr(found, f"{found.first}_bias"), found.down_proj_bias, activation=found.activation,
            gated=found.gated, precision=found.precision,
            batch_invariant=self.how.batch_invariant or found.batch_invariant,
        )  # fmt: skip
        return after.train(module.training)


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a linear layer, of torch or with a transposed weight."""
    return is_linear(module) or transposed.resembles(module)


def is_experts(module: nn.Module) -> bool:
    """Whether a module is one of experts, gemmery's or Hugging Face's."""
    return isinstance(module, Experts) or hugging_face.resembles(module)


def _owners(model: nn.Module) -> dict[int, str]:
    found: dict[int, str] = {}
    for path, module in model.named_modules():
        if not is_layer(module):
            for parameter in module._parameters.values():
                found.setdefault(id(parameter), path or "the model itself")
    return found
