"""Feed-forward blocks of Hugging Face's transformers, fused: what `swap` puts in their places, and how it knows them.

A replacement keeps the original's children by name and its parameters as objects, so that state dicts, adapters that
look for `gate_proj` and tied weights go on working. The original is not touched: it is what an undo puts back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from .activations import Activation, recognised
from .fused_product import FusedProduct, activated_product, gated_product
from .linear import Linear, inherit, own_code
from .mlp import MLP, GatedMLP, activated, gated_block


class FusedGatedMLP(nn.Module):
    """Hugging Face's `down_proj(act_fn(gate_proj(x)) * up_proj(x))` with all that is elementwise inside a product.

    Made by `gemmery.nn.swap`. Layers that get hooks later, and adapters put in their places, are called as modules.

    Attributes:
        original: the name of the class in whose place it is.
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
        """What runs in the place of `gate_proj` and `up_proj`, or None."""
        names = ("gate_proj", "up_proj")
        return gated_product(names, self.gate_proj, self.up_proj, self.activation, self.act_fn)

    def extra_repr(self) -> str:
        """What it was, and the activation's name."""
        return f"{self.original}, activation={self.activation.name}"


class FusedIntermediate(nn.Module):
    """Hugging Face's `intermediate_act_fn(dense(x))` as one product.

    Made by `gemmery.nn.swap`. A layer that gets hooks later, and an adapter put in its place, are called as modules.

    Attributes:
        original: the name of the class in whose place it is.
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
        """What runs in the place of `dense`, or None."""
        return activated_product("dense", self.dense, self.activation, self.intermediate_act_fn)

    def extra_repr(self) -> str:
        """What it was, and the activation's name."""
        return f"{self.original}, activation={self.activation.name}"


def _take_over(new: nn.Module, block: nn.Module, layers: Mapping[str, Linear]) -> None:
    """Give a replacement the block's children in their order, its layers swapped, and its other attributes."""
    for name, child in block._modules.items():
        new._modules[name] = layers.get(name, child)
    inherit(new, block)


FusedBlock = FusedGatedMLP | FusedIntermediate
#: All modules that run layers of theirs as one product; each says as which.
Block = MLP | GatedMLP | FusedBlock


# ---------------------------------------------------------------------------------------------------------------------
# Recognising


class Family:
    """A kind of block: how it is made, and how it is known.

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
        """Whether a module has the attributes of one, whatever it does with them."""
        return all(isinstance(block._modules.get(name), nn.Module) for name in self.layers) and hasattr(
            block, self.act
        )


#: A class comes in here when its forward has been read; a test reads it again in the release that is installed.
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
    return _mismatch(block) if kind.fused is FusedGatedMLP else None


def _is_known(kind: Family, cls: type) -> bool:
    """By the class's name and package; and its forward must be its own and use the block's children only."""
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
        return "its gate_proj and up_proj have two shapes"
    if gate.weight.device != up.weight.device or gate.weight.dtype != up.weight.dtype:
        return "its gate_proj and up_proj are on two devices, or of two types"
    return None


def fuse(kind: Family, block: nn.Module, layers: Mapping[str, Linear]) -> FusedBlock:
    """The replacement of a block that nothing speaks against.

    Args:
        layers: what replaces its linear layers.
    """
    known = recognised(getattr(block, kind.act))
    assert known is not None
    return kind.fused(block, layers, known)
