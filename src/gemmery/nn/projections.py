"""The query, key and value projections of attention as one product: the replacement of quantized ones.

The projections remain modules in their places, so the code of the attention runs unchanged, and adapters and state
dicts find them. They share a layer with the rows of all three; each result is a part of its product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..formats import pieces
from ..formats.tensor import QuantizedTensor
from .linear import own_code
from .packed import PackedLinear
from .quantized import QuantizedLinear
from .stacking import parameters_of, rows_of, why_not_stacked

#: The projections of attention that have one input, in the order of their calls.
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
#: The name of the layer with the rows of all of them.
WHOLE = "qkv_proj"
_NAMES = (
    "LlamaAttention MistralAttention MinistralAttention Ministral3Attention MixtralAttention Qwen2Attention "
    "Qwen2MoeAttention Qwen3Attention Qwen3MoeAttention GemmaAttention Gemma2Attention Gemma3Attention "
    "GraniteAttention"
)
#: Attention of transformers whose forward calls the three projections with its first argument, and then views their
#: results as heads. A class comes in here when its forward has been read; a test reads it again in the release that is
#: installed.
CLASSES = frozenset(_NAMES.split())

#: The versions of an input and a bias, whether gradients are recorded, and whether inference mode is on.
_State = tuple[int, int, bool, bool]


class StackedLinear(QuantizedLinear):
    """The rows of several layers, as one layer that multiplies by all of them.

    State dicts have the entries of these layers, see `StackedPart`, and none of this one.

    Attributes:
        names: of the layers, as the module that has them calls them.
        sizes: the rows of each.
        kept: the first layer's last input, what its product depended on besides, see `_state`, and the products by
            index of the layers that are called next; None after the last one.
        pending: what a state dict has had for some of the layers, by index and kind, and can't be one weight with the
            rows of the others yet.
    """

    def __init__(self, layers: Mapping[str, QuantizedLinear]) -> None:
        weight, bias = parameters_of(layers)
        first, *_ = layers.values()
        super().__init__(weight, bias, batch_invariant=first.batch_invariant)
        self.train(first.training)
        self.names = [*layers]
        self.sizes = [layer.out_features for layer in layers.values()]
        self.kept: tuple[Tensor, _State, dict[int, Tensor]] | None = None
        self.pending: dict[int, dict[str, Tensor]] = {}

    def product_of(self, index: int, x: Tensor) -> Tensor:
        """The product of x and the rows of one layer.

        The first layer multiplies by all rows. Those that are called next with the same tensor take their columns, if
        it has not been changed in place. In eager mode a change is seen by torch's version of the tensor, which
        inference tensors do not have. Gradients of the parts go through one product: use one backward pass for all.
        """
        if self.pending:
            raise RuntimeError(
                f"{', '.join(self.names)} are one packed weight, and load_state_dict was given other formats for some "
                "of them; load all of them"
            )
        kept, state = self.kept if index else None, self._state(x)
        if kept is not None and kept[0] is x and kept[1] == state and index in kept[2]:
            # Once only: the caller may change it in place.
            rest = {i: y for i, y in kept[2].items() if i != index}
            self.kept = (x, state, rest) if rest else None
            return kept[2][index]
        # The parts do not overlap, so each may be changed in place, which autograd forbids for those of `split`.
        parts = torch.unsafe_split_with_sizes(self(x), self.sizes, -1)
        if index == 0:
            self.kept = (x, state, dict(enumerate(parts[1:], 1)))
        return parts[index]

    def _state(self, x: Tensor) -> _State:
        """The state by which a kept product is valid, besides x and the weight. Compiled code can't read versions."""
        if is_compiling():
            return 0, 0, torch.is_grad_enabled(), False
        bias = self._parameters["bias"]
        versions = _version(x), 0 if bias is None else _version(bias)
        return *versions, torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def rows(self, index: int) -> slice:
        """The rows of a layer in the merged weight."""
        begin = sum(self.sizes[:index])
        return slice(begin, begin + self.sizes[index])

    def entry(self, index: int, kind: str) -> Tensor | None:
        """A copy of a layer's weight or bias; slicing copies a weight."""
        whole: Tensor | None = getattr(self, kind)
        if whole is None:
            return None
        found = whole.detach()[self.rows(index)]
        return found.clone() if kind == "bias" else found

    def load(
        self, index: int, given: dict[str, Tensor], local_metadata: dict[str, Any], error_msgs: list[str]
    ) -> None:
        """Loads the entries of a state dict for a layer, at once or when those of the others are loaded too."""
        self.pending[index] = given
        if self._why_pending() is None:
            entries = {kind: self._entries(kind) for kind in ("weight", "bias")}
            whole = {kind: torch.cat(parts) for kind, parts in entries.items() if parts}
            self.pending.clear()
            self.kept = None
            super()._load_from_state_dict(whole, "", local_metadata, True, [], [], error_msgs)

    def _entries(self, kind: str) -> list[Tensor]:
        """The weights or biases of all layers, those that are pending among them; none where there is no bias."""
        given = [self.pending.get(i, {}).get(kind) for i in range(len(self.sizes))]
        found = [self.entry(i, kind) if x is None else x for i, x in enumerate(given)]
        return [x for x in found if x is not None]

    def _why_pending(self) -> str | None:
        reason = pieces.why_not_stacked(cast("list[QuantizedTensor]", self._entries("weight")))
        devices = {x.device for x in self._entries("bias")}
        return "the biases are on several devices" if reason is None and len(devices) > 1 else reason

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        # The layers come before, and have loaded it.
        if strict:
            unexpected_keys.extend(key for key in state_dict if key.startswith(prefix))
        if self.pending:
            error_msgs.append(f"{', '.join(self.names)} can't be one packed weight: {self._why_pending()}")
            self.pending.clear()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Nothing, because the layers load it."""

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.kept = None
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call,no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"kept": None}


def _version(x: Tensor) -> int:
    """A number that changes when a tensor is changed in place; 0 for an inference tensor, whose changes torch does not
    count.
    """
    return 0 if x.is_inference() else x._version


class StackedPart(PackedLinear):
    """One of several quantized layers whose rows are one packed weight, in the place where the layer was.

    Its `weight` and `bias` are copies of its rows, as are its entries of state dicts. It loads them as the layer did.

    Attributes:
        whole: the layer with all rows. It is not a child of this module, but of the module that has both.
        index: which of the layers this is, in the order of their calls.
    """

    KIND = QuantizedTensor

    whole: StackedLinear

    def __init__(self, whole: StackedLinear, index: int, training: bool) -> None:
        nn.Module.__init__(self)
        self.__dict__["whole"] = whole
        self.index = index
        self.in_features, self.out_features = whole.in_features, whole.sizes[index]
        self.batch_invariant = whole.batch_invariant
        self.train(training)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features), as a view of the product that the layers share."""
        return self.whole.product_of(self.index, input)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # no parameter here
        """A copy of the layer's rows."""
        found = self.whole.entry(self.index, "weight")
        assert found is not None
        return found

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """A copy of the layer's bias."""
        return self.whole.entry(self.index, "bias")

    def alone(self) -> QuantizedLinear:
        """A layer with a copy of the rows."""
        rows = self.whole.rows(self.index)
        return rows_of(self.whole, rows.start, rows.stop).train(self.training)

    def described(self) -> str:
        """The weight's format, and the layers that it is merged with."""
        return f"{self.whole.described()}, one weight with {' and '.join(self.others)}"

    @property
    def others(self) -> list[str]:
        """The names of the layers that it is merged with."""
        return [name for i, name in enumerate(self.whole.names) if i != self.index]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for kind in ("weight", "bias"):
            value = self.whole.entry(self.index, kind)
            if value is not None:
                destination[prefix + kind] = value

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        own = {kind: x for kind in ("weight", "bias") if (x := getattr(self, kind)) is not None}
        given = {}
        for kind, x in own.items():
            value = state_dict.get(prefix + kind)
            if value is None:
                missing_keys.extend([prefix + kind] * strict)
            elif getattr(value, "shape", None) != x.shape or isinstance(value, QuantizedTensor) != (
                kind == "weight"
            ):
                error_msgs.append(f"{prefix}{kind} is {value!r}; it must be such as {x!r}")
            else:
                # Like torch, which copies into the existing tensor, or assigns the given one.
                is_assigned = local_metadata.get("assign_to_params_buffers", False)
                given[kind] = value if is_assigned else value.to(x.device)
        if strict:
            known = {prefix + kind for kind in own}
            unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in known)
        if given:
            self.whole.load(self.index, given, local_metadata, error_msgs)


def projections_of(module: nn.Module) -> dict[str, nn.Module | None] | None:
    """The projections of a module of attention that is known; None for any other module."""
    cls = type(module)
    if cls.__name__ not in CLASSES or not cls.__module__.startswith("transformers.models."):
        return None
    code: Any = getattr(cls.__dict__.get("forward"), "__code__", None)
    if code is None or not {*PROJECTIONS} <= {*code.co_names} or WHOLE in module._modules:
        return None
    return {name: module._modules.get(name) for name in PROJECTIONS}


def why_not(module: nn.Module, layers: Mapping[str, nn.Module | None]) -> str | None:
    """Why the quantized projections of attention are not merged; None if they can be."""
    if "forward" in module.__dict__:
        return "its forward was replaced"
    for name, layer in layers.items():
        reason = None if layer is None else own_code(layer)
        if reason is not None:
            return f"of its {name}: {reason}"
    return why_not_stacked(layers)


def projected(layers: Mapping[str, QuantizedLinear]) -> tuple[StackedLinear, dict[str, StackedPart]]:
    """The layer with the rows of all projections, and the replacement of each, by name."""
    whole = StackedLinear(layers)
    return whole, {
        name: StackedPart(whole, i, layer.training) for i, (name, layer) in enumerate(layers.items())
    }
