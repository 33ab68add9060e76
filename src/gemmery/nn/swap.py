"""Replacement of an existing model's modules by gemmery's, and its reversal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..dtensors import is_sharded
from ..precision import AskedPrecision
from . import blocks, foreign, hugging_face, norms, projections, transposed
from .blocks import FusedGatedMLP, FusedIntermediate, PackedGatedMLP
from .experts import Experts
from .hugging_face import FusedExperts
from .linear import Linear, is_plain, own_code
from .norms import FusedRMSNorm
from .packed import PackedLinear
from .projections import StackedLinear, StackedPart
from .quantized import QuantizedLinear
from .sparse import SparseLinear
from .transposed import TransposedLinear

#: Why a model that is itself a layer is left.
ALONE = "it is not inside a module, so it can't be replaced; wrap it, as in torch.nn.Sequential(model)"

#: Modules that are the result of an earlier swap.
_OURS = (
    Experts, FusedExperts, FusedGatedMLP, FusedIntermediate, FusedRMSNorm, PackedGatedMLP, PackedLinear, SparseLinear,
    TransposedLinear,
)  # fmt: skip
#: The most names of one kind in a summary.
_NAMED = 3


@dataclass(frozen=True)
class Slot:
    """A place in a model: the name of a child, the former module and the present one."""

    path: str
    parent: nn.Module
    name: str
    before: nn.Module
    after: nn.Module


@dataclass(eq=False)
class Swapped:
    """The result of `swap`. As a number, and in comparisons with one, it is the number of modules that were replaced.

    It keeps the replaced modules, whose parameters are those of their replacements. Layers that were replaced by
    quantized or sparse layers keep their own parameters, which take memory as long as this object lives.

    Attributes:
        replaced: (qualified name, former kind) of each module, in the model's order. A module with several names
            appears under the first one, and the layers of a block that was replaced as a whole are part of it.
        left: (qualified name, reason) of each module that was left in place: linear layers, including Hugging Face's
            Conv1D; other modules that multiply by weights (torch's attention, recurrent and bilinear ones); and
            feed-forward blocks, norms and experts that resemble the known ones.

    Example:
        >>> import torch, gemmery.nn
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).bfloat16()
        >>> hook = model[2].register_forward_hook(lambda module, args, output: None)
        >>> report = gemmery.nn.swap(model)
        >>> print(report)
        1 replaced: 1 Linear
        1 left
          2: it has hooks
        >>> report.undo()
        >>> type(model[0])
        <class 'torch.nn.modules.linear.Linear'>
    """

    replaced: list[tuple[str, str]] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    _slots: list[Slot] = field(default_factory=list, repr=False)
    #: New children: the parent module, the name, and the child.
    _added: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list, repr=False)

    def __len__(self) -> int:
        return len(self.replaced)

    def __int__(self) -> int:
        return len(self.replaced)

    __index__ = __int__

    def __eq__(self, other: object) -> bool:
        return len(self) == other if isinstance(other, int) else self is other

    __hash__ = object.__hash__

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for _, what in self.replaced:
            counts[what] = counts.get(what, 0) + 1
        head = f"{len(self.replaced)} replaced"
        lines = [
            head + (": " if counts else "") + ", ".join(f"{count} {what}" for what, count in counts.items())
        ]
        reasons: dict[str, list[str]] = {}
        for name, why in self.left:
            reasons.setdefault(why, []).append(name or "the model itself")
        if reasons:
            lines.append(f"{len(self.left)} left")
        for why, names in reasons.items():
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            lines.append(f"  {', '.join(names[:_NAMED])}{more}: {why}")
        return "\n".join(lines)

    def undo(self) -> None:
        """Restore the original modules, as the same objects.

        They receive the current parameters, training flags and hooks of their replacements, so training, moving and
        loading in between are kept. Layers that were replaced by quantized or sparse layers come back with their former
        weights, on their former device. A second undo does nothing.

        Raises:
            ValueError: a replacement is missing, or its layers have changed; nothing was restored.
        """
        for slot in self._slots:
            found = slot.parent._modules.get(slot.name)
            if found is not slot.after:
                kind = "nothing" if found is None else f"a {type(found).__name__}"
                raise ValueError(
                    f"undo: at {slot.path} there is {kind}, not what swap put there; nothing was undone"
                )
        pairs = {id(slot.after): (slot.path, slot.before, slot.after) for slot in self._slots}
        for path, before, after in pairs.values():
            for name, child in after._modules.items():
                kinds = (Linear, QuantizedLinear) if isinstance(after, PackedGatedMLP) else (Linear,)
                if child is not before._modules.get(name) and type(child) not in kinds:
                    raise ValueError(
                        f"undo: at {path}.{name} there is a {type(child).__name__}, not what swap put there; "
                        "nothing was undone"
                    )
        for _, before, after in pairs.values():
            _restore(before, after)
        for slot in self._slots:
            slot.parent._modules[slot.name] = slot.before
        for parent, name, child in self._added:
            if parent._modules.get(name) is child:
                del parent._modules[name]
        self._slots.clear()
        self._added.clear()

    def _install(self) -> None:
        """Puts all replacements into their places, at once and last: an error before leaves the model as it was."""
        for slot in self._slots:
            slot.parent._modules[slot.name] = slot.after
        for parent, name, child in self._added:
            parent._modules[name] = child

    def _project(self, module: nn.Module, path: str, layers: Mapping[str, nn.Module | None]) -> StackedLinear:
        """Records that projections of attention become one layer.

        Args:
            layers: quantized ones, by name, which can be merged.
        """
        found = {name: x for name, x in layers.items() if isinstance(x, QuantizedLinear)}
        whole, parts = projections.projected(found)
        for name, part in parts.items():
            before = module._modules[name]
            assert before is not None
            self._slots.append(Slot(f"{path}.{name}" if path else name, module, name, before, part))
        self._added.append((module, projections.WHOLE, whole))
        return whole


#: The state of every module of torch: parameters, buffers, hooks, the training flag. Children apart.
_STATE = tuple(name for name in nn.Module().__dict__ if name != "_modules")
#: The part of the state that a layer with another weight takes over: the training flag and the hooks.
_CALLING = tuple(
    name for name in _STATE if not name.startswith(("_parameters", "_buffers", "_non_persistent"))
)


def _restore(before: nn.Module, after: nn.Module) -> None:
    if isinstance(after, PackedLinear) or (isinstance(after, Experts) and after.packed):
        for name in _CALLING:
            before.__dict__[name] = after.__dict__[name]
        if isinstance(after, StackedPart):
            _restore_bias(before, after)
        return
    if isinstance(after, PackedGatedMLP):
        _restore_halves(before, after)
    for name in _STATE:
        # The same dictionaries, so that handles can remove hooks.
        before.__dict__[name] = after.__dict__[name]
    for name, child in after._modules.items():
        original = before._modules.get(name)
        if original is not child and original is not None and child is not None:
            _restore(original, child)


def _restore_halves(before: nn.Module, after: PackedGatedMLP) -> None:
    """Give gate and up the flag and the biases of their merged layer."""
    for name, half in after.halves().items():
        layer = before._modules[name]
        assert layer is not None
        layer.train(half.training)
        _restore_bias(layer, half)


def _restore_bias(before: nn.Module, after: PackedLinear) -> None:
    """Give a layer the bias that has been part of another one."""
    bias = before._parameters["bias"]
    found = after.whole.bias if isinstance(after, StackedPart) else after.bias
    if bias is not None and found is not None and after.bias is not None:
        with torch.no_grad():
            bias.copy_(after.bias)
        bias.requires_grad_(found.requires_grad)


def swap(
    model: nn.Module,
    *,
    precision: AskedPrecision | None = None,
    batch_invariant: bool = False,
    fuse: bool = True,
) -> Swapped:
    """Replace the modules inside `model` that gemmery can compute by its own modules with the same parameters, in
    place.

    The following are replaced:

    - every torch.nn.Linear, by a gemmery.nn.Linear, and GPT-2's Conv1D, whose weight stays transposed;
    - the feed-forward blocks of Hugging Face's Llama, Mistral, Qwen and Gemma (gate, up, activation, down) and of BERT
      and its relatives (dense and activation), by blocks whose activation runs inside a product;
    - the query, key and value projections of Hugging Face's Llama, Mistral, Mixtral, Qwen, Gemma and Granite if they
      are already quantized: their rows become one packed weight, and one product;
    - the experts of Hugging Face's mixtures that transformers decorates with `use_experts_implementation`, which
      `gemmery.moe.experts` computes, see `register_experts`;
    - the RMSNorms of Llama, Mistral and Qwen, by torch's own, one kernel instead of six;
    - the quantized linear layers of other libraries, by gemmery.nn.QuantizedLinear, with the same weights in gemmery's
      format: GPTQ's and AWQ's (of AutoGPTQ, GPTQModel and AutoAWQ, unless a kernel has reordered them), bitsandbytes'
      Linear4bit (nf4) and Linear8bitLt, compressed-tensors' compressed layers, torchao's weights, and Hugging Face's
      FP8Linear. If such a layer also rounds activations to 8 bits, gemmery does not. Its entries in state dicts become
      gemmery's.

    Names, state dicts, tied and shared parameters, training flags and `requires_grad` do not change, with two
    exceptions. In a block whose layers are already quantized, gate and up become one layer `gate_up_proj`, whose packed
    weight contains the rows of both. In attention, quantized projections stay modules by their names, for adapters, but
    their parameters are those of one more layer `qkv_proj`. State dicts still contain gate and up, and all projections.

    The report gives a reason for everything that is left in place: layers and blocks with code that a replacement would
    lose (subclasses, hooks, parametrizations, a patched forward), other quantized layers and weights that are not plain
    tensors, and blocks and norms of other classes. The layers of such a block are replaced one by one.

    Args:
        model: of any dtype and on any device; whether a product is supported is checked when it runs.
        precision: how float32 is multiplied, see `gemmery.matmul`. By default, modules with float32 weights are left to
            torch, whose own products are faster there. With `batch_invariant`, or if a precision is given, they are
            replaced. `"torch"` uses torch's setting (`torch.set_float32_matmul_precision`) at each call.
        batch_invariant: whether a row of a product has the same bits in every batch, see `gemmery.matmul`.
        fuse: whether blocks, experts and norms are replaced, and projections become one; False replaces only layers. A
            fused sum is not rounded before its activation, and larger products may add up in another order, so results
            in 16 bits differ from those of the model by rounding.

    Returns:
        The modules that were replaced and left; its `undo()` restores the model.

    Raises:
        TypeError: `model` is not a module, or it is a scripted one.

    Example:
        >>> import torch, gemmery.nn
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).bfloat16()
        >>> len(gemmery.nn.swap(model))
        2
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"swap: model is a {type(model).__name__}; it must be a torch.nn.Module")
    keeps_float32 = precision is None and not batch_invariant
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "swap: model is a torch.jit.ScriptModule, whose code is fixed; swap it before it is scripted"
        )
    walk = _Walk(precision or "torch", batch_invariant, fuse, keeps_float32)
    known = (blocks.family(model) is not None, norms.resembles(model), hugging_face.resembles(model))
    is_layer = is_linear(model) or transposed.resembles(model)
    replaceable = any(known) or isinstance(model, _OURS)
    if is_layer or foreign.recognise(model) is not None or (fuse and replaceable):
        walk.report.left.append(("", ALONE))
    if not isinstance(model, _OURS):
        if fuse:
            walk.projections(model, "")
        walk.children(model, "")
    walk.report._install()
    return walk.report


@dataclass
class _Walk:
    """One pass over a model, which records the replacements and changes nothing.

    Attributes:
        keeps_float32: whether layers with float32 weights stay torch's.
        layers: the replacements of linear layers, by their ids, including those inside blocks.
        places: the replacements of modules in all their places, by their ids.
        seen: ids of the modules that were met.
    """

    precision: AskedPrecision
    batch_invariant: bool
    fuse: bool
    keeps_float32: bool
    report: Swapped = field(default_factory=Swapped)
    layers: dict[int, Linear] = field(default_factory=dict)
    places: dict[int, nn.Module] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    def children(self, parent: nn.Module, prefix: str) -> None:
        # Not named_children, which omits a module's second name.
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            path = f"{prefix}{name}"
            if id(child) not in self.seen:
                self.seen.add(id(child))
                self.meet(child, path)
            after = self.places.get(id(child))
            if after is not None:
                self.report._slots.append(Slot(path, parent, name, child, after))

    def meet(self, module: nn.Module, path: str) -> None:
        """Decide about a module that is seen for the first time."""
        report = self.report
        if isinstance(module, _OURS):
            report.left.append((path, "already a gemmery module"))
            return
        if isinstance(module, torch.jit.ScriptModule):
            report.left.append((path, "it is a torch.jit.ScriptModule, whose code is fixed"))
            return
        if is_other_product(module):
            cls = type(module)
            report.left.append(
                (path, f"it is a {cls.__module__}.{cls.__qualname__}, which has no replacement")
            )
        found = foreign.recognise(module)
        if found is not None:
            self.other(module, path, found)
            return
        if is_linear(module):
            reason = self.why_not(module)
            if reason is None:
                self.places[id(module)] = self.layer(module)
                report.replaced.append((path, "Linear"))
            else:
                report.left.append((path, reason))
        if transposed.resembles(module):
            self.transposed(module, path)
        if self.fuse and norms.resembles(module):
            self.norm(module, path)
        if self.fuse and hugging_face.resembles(module) and self.experts(module, path):
            return
        if self.fuse:
            self.projections(module, path)
        kind = blocks.family(module) if self.fuse else None
        if kind is not None and self.block(kind, module, path):
            return
        self.children(module, f"{path}.")

    def block(self, kind: blocks.Family, module: nn.Module, path: str) -> bool:
        """Replace a module as a whole, if possible."""
        reason = blocks.refusal(kind, module, self.why_not_in_block)
        if reason is not None:
            self.report.left.append((path, reason))
            return False
        layers = {name: self.layer(module._modules[name]) for name in kind.layers}
        after = blocks.fuse(kind, module, layers)
        self.places[id(module)] = after
        how = after.activation.name
        if isinstance(after, PackedGatedMLP):
            how += f", {after.gate_up_proj.quantized.format.name}"
        self.report.replaced.append((path, f"{type(module).__name__} ({how})"))
        return True

    def projections(self, module: nn.Module, path: str) -> None:
        """Make the quantized projections of attention one weight, if possible."""
        layers = projections.projections_of(module)
        if layers is None or not all(type(x) is QuantizedLinear for x in layers.values()):
            return
        reason = projections.why_not(module, layers)
        if reason is None and not self.seen.isdisjoint(id(x) for x in layers.values()):
            reason = "its projections are layers of another module too"
        if reason is not None:
            self.report.left.append((path, reason))
            return
        whole = self.report._project(module, path, layers)
        self.seen |= {id(x) for x in layers.values()}
        format = whole.quantized.format.name
        self.report.replaced.append((path, f"{type(module).__name__} (q, k and v, {format})"))

    def experts(self, module: nn.Module, path: str) -> bool:
        """Replace experts, if possible."""
        reason = hugging_face.refusal(module) or self.why_not_in_float32(module.down_proj)
        if reason is not None:
            self.report.left.append((path, reason))
            return False
        self.places[id(module)] = FusedExperts(module, self.precision, self.batch_invariant)
        where = "" if hugging_face.fusible(module) else " (activation in torch)"
        self.report.replaced.append((path, f"{type(module).__name__}{where}"))
        return True

    def transposed(self, module: nn.Module, path: str) -> None:
        """Replace a Conv1D, if possible."""
        reason = transposed.refusal(module) or self.why_not_in_float32(module.weight)
        if reason is not None:
            self.report.left.append((path, reason))
            return
        self.places[id(module)] = TransposedLinear(module, self.precision, self.batch_invariant)
        self.report.replaced.append((path, type(module).__name__))

    def norm(self, module: nn.Module, path: str) -> None:
        """Replace a norm, if possible."""
        reason = norms.refusal(module)
        if reason is not None:
            self.report.left.append((path, reason))
            return
        self.places[id(module)] = FusedRMSNorm(module)
        self.report.replaced.append((path, type(module).__name__))

    def other(self, module: nn.Module, path: str, found: foreign.Foreign) -> None:
        """Replace another library's quantized layer, if possible."""
        after = foreign.replacement(module, found, self.batch_invariant)
        if isinstance(after, str):
            self.report.left.append((path, after))
            return
        self.places[id(module)] = after
        self.report.replaced.append((path, f"{type(module).__name__} ({after.quantized.format.name})"))

    def why_not(self, module: nn.Module) -> str | None:
        """Why a linear layer is not replaced; None if it can be."""
        return why_not(module) or self.why_not_in_float32(module.weight)

    def why_not_in_float32(self, weight: object) -> str | None:
        """Why a module with a weight of float32 is not replaced; None for other types, or if it can be."""
        if self.keeps_float32 and cast(Tensor, weight).dtype == torch.float32:
            return "its weight is float32, which torch multiplies faster; give a precision to replace it"
        return None

    def why_not_in_block(self, module: nn.Module) -> str | None:
        """The same of a layer of a block, which can be fused around layers that are gemmery's already."""
        if type(module) is QuantizedLinear:
            return own_code(module)
        return None if is_plain(module) else self.why_not(module)

    def layer(self, module: nn.Module | None) -> Linear | QuantizedLinear:
        """The replacement of a linear layer, one for all its places; one that is gemmery's stays."""
        if isinstance(module, QuantizedLinear):
            return module
        assert isinstance(module, nn.Linear)
        if type(module) is Linear:
            return module
        if id(module) not in self.layers:
            self.layers[id(module)] = Linear.from_torch(
                module, precision=self.precision, batch_invariant=self.batch_invariant
            )
        return self.layers[id(module)]


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer of some kind, by torch's class or by the attributes that all of them have."""
    if isinstance(module, nn.Linear):
        return True
    sizes = (getattr(module, name, None) for name in ("in_features", "out_features"))
    # Not a module that contains a layer and changes its output, such as an adapter.
    holds = any(isinstance(inner, nn.Linear) for inner in module.modules())
    return not holds and all(isinstance(size, int) for size in sizes)


#: torch's modules that contain weights to multiply by, and are not linear layers.
_OTHERS = (nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


def is_other_product(module: nn.Module) -> bool:
    """Whether a module multiplies by a weight, and is not a linear layer, Conv1D or convolution."""
    return isinstance(module, _OTHERS)


def why_not(module: nn.Module) -> str | None:
    """Why a linear layer is not replaced; None if it can be."""
    cls = type(module)
    if cls is Linear:
        return "already a gemmery module"
    if parametrize.is_parametrized(module):
        return "it is parametrized"
    if cls is not nn.Linear:
        return f"it is a {cls.__module__}.{cls.__qualname__}, not torch's own Linear"
    return changed(module)


def changed(module: nn.Module) -> str | None:
    """The properties of a linear layer of exactly this class that a replacement would lose; None if there are none."""
    if is_sharded([x for x in module._parameters.values() if x is not None]):
        return "its parameters are DTensors; call this before the model is sharded"
    code = own_code(module)
    if code is not None:
        return code
    if module._modules or module._buffers or set(module._parameters) != {"weight", "bias"}:
        return "it has other parameters, buffers or children than a Linear"
    for name, parameter in module._parameters.items():
        if type(parameter) is not nn.Parameter and not (name == "bias" and parameter is None):
            return f"its {name} is a {type(parameter).__name__}, not a plain parameter"
    return None
