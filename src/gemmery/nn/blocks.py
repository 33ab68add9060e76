"""Fused feed-forward blocks of Hugging Face's transformers: their replacements, and how `swap` recognizes them.

A replacement keeps the original's children by name and its parameters as objects, so that state dicts, adapters that
look for `gate_proj` and tied weights continue to work. The original does not change: an undo restores it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .activations import Activation, recognised
from .fused_product import FusedProduct, activated_product, gated_product
from .linear import Linear, inherit, own_code
from .mlp import MLP, GatedMLP, activated, gated_block, stacked_block
from .quantized import QuantizedLinear
from .stacking import parameters_of, rows_of, why_not_stacked


class FusedGatedMLP(nn.Module):
    """Hugging Face's `down_proj(act_fn(gate_proj(x)) * up_proj(x))` with all elementwise operators inside a product.

    Made by `gemmery.nn.swap`. Layers that receive hooks later, and adapters that replace them, are called as modules.

    Attributes:
        original: the name of the replaced class.
        activation: what `act_fn` computes.
    """

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    act_fn: Callable[[Tensor], Tensor]

    def __init__(self, block: nn.Module, layers: Mapping[str, Linear], activation: Activation) -> None:
        super().__init__()
        self.original, self.activation = type(block).__name__, activation
        _take_over(self, block, layers)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return gated_block(self.gate_proj, self.up_proj, self.down_proj, self.activation, self.act_fn, x)

    def fused_product(self) -> FusedProduct | None:
        """The product that replaces `gate_proj` and `up_proj`, or None."""
        names = ("gate_proj", "up_proj")
        return gated_product(names, self.gate_proj, self.up_proj, self.activation, self.act_fn)

    def extra_repr(self) -> str:
        """The class that it replaces, and the activation's name."""
        return f"{self.original}, activation={self.activation.name}"


class PackedGatedMLP(nn.Module):
    """A `FusedGatedMLP` of quantized layers: gate and up are one packed weight, the gate's rows first.

    Made by `gemmery.nn.quantize` of a fused block, and by `gemmery.nn.swap` of a quantized one. State dicts have the
    entries of `gate_proj` and `up_proj`, as those of the original, and are loaded with them; these are copies. A layer
    that receives hooks later, and an adapter that replaces it, are called as modules.

    Attributes:
        original: the name of the replaced class.
        activation: what `act_fn` computes.
        replaced: the class of the block that it replaces.
    """

    gate_up_proj: QuantizedLinear
    down_proj: nn.Module
    act_fn: Callable[[Tensor], Tensor]

    #: The layers whose rows `gate_up_proj` has.
    HALVES = ("gate_proj", "up_proj")

    def __init__(self, block: nn.Module, layers: Mapping[str, nn.Module], activation: Activation) -> None:
        super().__init__()
        self.original = block.original if isinstance(block, FusedGatedMLP) else type(block).__name__
        self.activation, self.replaced = activation, type(block)
        gate, up = (layers[name] for name in self.HALVES)
        assert isinstance(gate, QuantizedLinear)
        assert isinstance(up, QuantizedLinear)
        weight, bias = parameters_of({"gate_proj": gate, "up_proj": up})
        self.gate_up_proj = QuantizedLinear(weight, bias, batch_invariant=gate.batch_invariant)
        self.gate_up_proj.train(gate.training)
        for name, child in block._modules.items():
            if name not in self.HALVES:
                self._modules[name] = layers.get(name, child)
        inherit(self, block)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return stacked_block(self.gate_up_proj, self.down_proj, self.activation, self.act_fn, x)

    def extra_repr(self) -> str:
        """The class that it replaces, and the activation's name."""
        return f"{self.original}, activation={self.activation.name}"

    def halves(self) -> dict[str, QuantizedLinear]:
        """`gate_proj` and `up_proj` as separate layers, which are copies."""
        layer = self.gate_up_proj
        rows = layer.out_features // 2
        places = ((0, rows), (rows, 2 * rows))
        return {name: rows_of(layer, *place) for name, place in zip(self.HALVES, places, strict=True)}

    def apart(self) -> nn.Module:
        """The block that this one replaces, with quantized layers."""
        made = self.replaced.__new__(self.replaced)
        nn.Module.__init__(made)
        made._modules.update(self.halves())
        made._modules.update({name: x for name, x in self._modules.items() if name != "gate_up_proj"})
        inherit(made, self)
        own = ("replaced",) if self.replaced is FusedGatedMLP else ("replaced", "original", "activation")
        for name in own:
            del made.__dict__[name]
        return made

    def state_dict(self, *args: Any, prefix: str = "", **options: Any) -> Any:
        """torch's, in which `gate_up_proj` is two layers."""
        found = super().state_dict(*args, prefix=prefix, **options)
        for kind in ("weight", "bias"):
            whole = found.pop(f"{prefix}gate_up_proj.{kind}", None)
            if whole is not None:
                rows = whole.shape[0] // 2
                for name, part in zip(self.HALVES, (whole[:rows], whole[rows:]), strict=True):
                    found[f"{prefix}{name}.{kind}"] = part
        return found

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        for kind in ("weight", "bias"):
            names = [f"{prefix}{name}.{kind}" for name in self.HALVES]
            if all(name in state_dict for name in names):
                parts = [state_dict.pop(name) for name in names]
                try:
                    state_dict[f"{prefix}gate_up_proj.{kind}"] = torch.cat(parts)
                except (ValueError, TypeError, NotImplementedError) as error:
                    error_msgs.append(f"{names[0]} and {names[1]} can't be one weight: {error}")
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class FusedIntermediate(nn.Module):
    """Hugging Face's `intermediate_act_fn(dense(x))` as one product.

    Made by `gemmery.nn.swap`. A layer that receives hooks later, and an adapter that replaces it, are called as
    modules.

    Attributes:
        original: the name of the replaced class.
        activation: what `intermediate_act_fn` computes.
    """

    dense: Linear
    intermediate_act_fn: Callable[[Tensor], Tensor]

    def __init__(self, block: nn.Module, layers: Mapping[str, Linear], activation: Activation) -> None:
        super().__init__()
        self.original, self.activation = type(block).__name__, activation
        _take_over(self, block, layers)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return activated(self.dense, self.activation, self.intermediate_act_fn, hidden_states)

    def fused_product(self) -> FusedProduct | None:
        """The product that replaces `dense`, or None."""
        return activated_product("dense", self.dense, self.activation, self.intermediate_act_fn)

    def extra_repr(self) -> str:
        """The class that it replaces, and the activation's name."""
        return f"{self.original}, activation={self.activation.name}"


def _take_over(new: nn.Module, block: nn.Module, layers: Mapping[str, Linear]) -> None:
    """Give a replacement the block's children in their order, its layers swapped, and its other attributes."""
    for name, child in block._modules.items():
        new._modules[name] = layers.get(name, child)
    inherit(new, block)


FusedBlock = FusedGatedMLP | FusedIntermediate
#: All modules that run several of their layers as one product; each names the product.
Block = MLP | GatedMLP | FusedBlock


# ---------------------------------------------------------------------------------------------------------------------
# Recognizing


class Family:
    """A kind of block: its constructor, and how it is recognized.

    Attributes:
        fused: what replaces it.
        layers: the names of its linear layers.
        act: the name of its activation.
        classes: the names of the classes whose forward is this and nothing else.
    """

    def __init__(self, fused: type[FusedBlock], layers: tuple[str, ...], act: str, classes: str) -> None:
        self.fused, self.layers, self.act = fused, layers, act
        self.classes = frozenset(classes.split())

    def resembles(self, block: nn.Module) -> bool:
        """Whether a module has the attributes of one, regardless of their use."""
        return all(isinstance(block._modules.get(name), nn.Module) for name in self.layers) and hasattr(
            block, self.act
        )


#: A class is added here once its forward has been checked; a test checks it in the installed release.
FAMILIES = (
    Family(
        FusedGatedMLP, ("gate_proj", "up_proj", "down_proj"), "act_fn",
        "LlamaMLP MistralMLP MinistralMLP Ministral3MLP Qwen2MLP Qwen2MoeMLP Qwen3MLP Qwen3MoeMLP GemmaMLP Gemma2MLP "
        "Gemma3MLP",
    ),
    Family(
        FusedIntermediate, ("dense",), "intermediate_act_fn",
        "BertIntermediate BertGenerationIntermediate RobertaIntermediate XLMRobertaIntermediate "
        "XLMRobertaXLIntermediate CamembertIntermediate ElectraIntermediate ErnieIntermediate MPNetIntermediate "
        "MegatronBertIntermediate RemBertIntermediate DebertaIntermediate DebertaV2Intermediate",
    ),
)  # fmt: skip


def family(module: nn.Module) -> Family | None:
    """The family that a module looks like, by its attributes; None for any other module."""
    return next((each for each in FAMILIES if each.resembles(module)), None)


def refusal(kind: Family, block: nn.Module, why_not: Callable[[nn.Module], str | None]) -> str | None:
    """Why a block that looks like one of a family is not fused; None if it can be.

    Args:
        kind: the family that it looks like.
        block: the module.
        why_not: the same for a linear layer.
    """
    cls = type(block)
    if not _is_known(kind, cls):
        return f"a {cls.__module__}.{cls.__qualname__}, whose forward is not known"
    code = own_code(block)
    if code is not None:
        return code
    function = getattr(block, kind.act)
    # An activation may be a module or, in a configuration, any function.
    if set(block._modules) - {kind.act} != set(kind.layers) or block._parameters or block._buffers:
        return "it has more than its class gives it"
    if recognised(function) is None:
        return f"its activation {_describe(function)} is not one of gemmery's"
    code = own_code(function) if isinstance(function, nn.Module) else None
    if code is not None:
        return f"of its activation: {code}"
    for name in kind.layers:
        reason = why_not(block._modules[name])  # type: ignore[arg-type]
        if reason is not None:
            return f"of its {name}: {reason}"
    if kind.fused is not FusedGatedMLP:
        return None
    gate, up = block._modules["gate_proj"], block._modules["up_proj"]
    assert gate is not None
    assert up is not None
    if isinstance(gate, QuantizedLinear) or isinstance(up, QuantizedLinear):
        return why_not_halves({"gate_proj": gate, "up_proj": up})
    return _mismatch(block)


def why_not_halves(layers: Mapping[str, nn.Module | None]) -> str | None:
    """Why gate and up can't be the halves of one quantized layer; None if they can."""
    reason = why_not_stacked(layers)
    if reason is None and len({x.out_features for x in layers.values() if x is not None}) > 1:
        return "its gate_proj and up_proj have different shapes"
    return reason


def _is_known(kind: Family, cls: type) -> bool:
    """By the class's name and package; the class must define its forward, which uses only the block's children."""
    if cls.__name__ not in kind.classes or not cls.__module__.startswith("transformers.models."):
        return False
    code: Any = getattr(cls.__dict__.get("forward"), "__code__", None)
    return code is not None and set(code.co_names) == {*kind.layers, kind.act}


def _describe(function: Any) -> str:
    return (
        type(function).__name__
        if isinstance(function, nn.Module)
        else getattr(function, "__name__", repr(function))
    )


def _mismatch(block: nn.Module) -> str | None:
    gate, up = block.gate_proj, block.up_proj
    assert isinstance(gate, nn.Linear)
    assert isinstance(up, nn.Linear)
    if gate.weight.shape != up.weight.shape:
        return "its gate_proj and up_proj have different shapes"
    if gate.weight.device != up.weight.device or gate.weight.dtype != up.weight.dtype:
        return "its gate_proj and up_proj differ in device or type"
    return None


def fuse(kind: Family, block: nn.Module, layers: Mapping[str, Any]) -> FusedBlock | PackedGatedMLP:
    """The replacement of a block that can be replaced.

    Args:
        layers: what replaces its linear layers.
    """
    known = recognised(getattr(block, kind.act))
    assert known is not None
    if kind.fused is FusedGatedMLP and isinstance(layers["gate_proj"], QuantizedLinear):
        return PackedGatedMLP(block, layers, known)
    return kind.fused(block, layers, known)
