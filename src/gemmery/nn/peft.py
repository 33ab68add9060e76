"""Adapters of Hugging Face's peft on layers of gemmery: each is one call with its layer, see `gemmery.lora_linear`.

Only this module needs peft; nothing else of gemmery imports it.

    import gemmery.nn.peft
    gemmery.nn.quantize(model, "nf4")
    model = peft.get_peft_model(model, gemmery.nn.peft.register(peft.LoraConfig(r=16, target_modules=["q_proj"])))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..formats.weight import PackedWeight
from ..lora import lora_linear
from ..precision import AskedPrecision
from ..product.seen import autocast_dtype
from .linear import Linear, is_untouched
from .packed import PackedLinear, is_plain_packed
from .projections import WHOLE, StackedLinear

try:
    from peft import LoraConfig
    from peft.tuners.lora import layer as lora_layers
except ImportError as found:
    raise ImportError(f"gemmery.nn.peft: it needs peft: {found}") from found

__all__ = ["LoraLinear", "fuse", "register"]


def register(config: LoraConfig) -> LoraConfig:
    """Add gemmery's layers, which peft does not know, to a configuration of peft.

    The layers are `gemmery.nn.QuantizedLinear`, `SparseLinear` and `Linear`. For other layers, peft chooses as before.
    peft does not save this with a configuration: to load an adapter, register its configuration again:
    `PeftModel.from_pretrained(model, path, config=register(LoraConfig.from_pretrained(path)))`.

    Args:
        config: the configuration of the adapters. Name the layers in `target_modules`: its "all-linear" does not find
            packed ones.

    Returns:
        The same configuration.

    Raises:
        TypeError: it is not a peft.LoraConfig.

    Example:
        >>> import torch, peft, gemmery.nn.peft  # doctest: +SKIP
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32))
        >>> _ = gemmery.nn.quantize(model, "nf4")
        >>> config = gemmery.nn.peft.register(peft.LoraConfig(r=8, target_modules=["0"]))
        >>> type(peft.get_peft_model(model, config).base_model.model[0])
        <class 'gemmery.nn.peft.LoraLinear'>
    """
    if not isinstance(config, LoraConfig):
        raise TypeError(f"register: config is a {type(config).__name__}; it must be a peft.LoraConfig")
    config._register_custom_module({PackedLinear: LoraLinear, Linear: LoraLinear})
    return config


def fuse(model: nn.Module) -> list[str]:
    """Fuse the adapters that peft has added to plain `torch.nn.Linear` layers with their layers, in place.

    Parameters, state dicts and peft's functions for the model do not change. Adapters of layers with another class or
    another kind of weight are left in place.

    Returns:
        The names of the layers that changed.
    """
    changed = []
    for name, module in model.named_modules():
        if type(module) is lora_layers.Linear and _is_dense(module.base_layer):
            module.__class__ = LoraLinear
            changed.append(name)
    return changed


def _is_dense(layer: nn.Module) -> bool:
    """Whether a layer is torch's or gemmery's own linear one, with a weight that is a plain tensor."""
    return type(layer) in (nn.Linear, Linear) and type(layer.weight) is nn.Parameter


class LoraLinear(lora_layers.Linear):  # type: ignore[misc]  # peft has no types
    """peft's layer with adapters, computed by `gemmery.lora_linear` where the result is the same.

    This is the case with one active adapter, with or without dropout, or with several without dropout, which are
    combined. It includes a bias in the adapter, and autocast. peft's own forward runs with disabled or merged adapters,
    `adapter_names`, variants such as DoRA, and hooks on the inner layers.

    The adapter is multiplied in the type of the layer's weight, or autocast's, as in peft under autocast, even if its
    parameters are float32. They receive float32 gradients. An adapter can't be merged into a packed weight (`merge`).
    """

    def __init__(self, base_layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        if isinstance(base_layer, StackedLinear):
            names = ", ".join(base_layer.names)
            raise ValueError(
                f"the layer with the rows of {names} can't have an adapter, for attention calls these and not it; name "
                f"them in target_modules, and it in exclude_modules ({WHOLE!r}) if a pattern matches it too"
            )
        super().__init__(base_layer, *args, **kwargs)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        base = self.base_layer
        names = [] if args or kwargs else self._fusible()
        if not names or not x.dtype.is_floating_point:
            made: Tensor = super().forward(x, *args, **kwargs)
            return made
        rows = x.to(base.weight.dtype) if isinstance(base, PackedLinear) else x
        dropped = [self._dropped(name, rows) for name in names]
        if len(names) > 1 and any(value is not None for value in dropped):
            made = super().forward(x)
            return made
        a, b, bias, scale = self._adapter(names, autocast_dtype(x.device) or rows.dtype)
        precision: AskedPrecision = getattr(base, "precision", "torch")
        made = lora_linear(
            rows, base.weight, a, b, bias, scale=scale, lora_x=dropped[0], precision=precision,
            batch_invariant=getattr(base, "batch_invariant", False),
        )  # fmt: skip
        return made.to(x.dtype) if isinstance(base, PackedLinear) else made

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """As peft's.

        Raises:
            NotImplementedError: the weight is packed.
        """
        weight = self.get_base_layer().weight
        if isinstance(weight, PackedWeight):
            raise NotImplementedError(
                f"merge: the layer's weight is packed ({weight.form}), which can't take an adapter in; keep the "
                "adapter apart, or merge it into the dense model and quantize that"
            )
        super().merge(safe_merge, adapter_names)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int | None, int | None]:
        # peft warns about a class that it does not know.
        if isinstance(module, PackedLinear):
            return module.in_features, module.out_features
        found: tuple[int | None, int | None] = super()._get_in_out_features(module)
        return found

    def _fusible(self) -> list[str]:
        """The active adapters, if one call can compute them with the layer; else none."""
        base = self.base_layer
        is_plain = _is_dense(base) and is_untouched(base)
        if (
            self.disable_adapters
            or self.merged
            or self.fan_in_fan_out
            or not (is_plain or is_plain_packed(base))
        ):
            return []
        names = [name for name in self.active_adapters if name in self.lora_A]
        for name in names:
            layers = self.lora_A[name], self.lora_B[name]
            is_usual = all(type(layer) is nn.Linear and is_untouched(layer) for layer in layers)
            if name in self.lora_variant or not is_usual:
                return []
        return names

    def _dropped(self, name: str, x: Tensor) -> Tensor | None:
        """x after an adapter's dropout; None if there is no dropout."""
        dropout = self.lora_dropout[name]
        stays = isinstance(dropout, nn.Identity) or (
            isinstance(dropout, nn.Dropout) and not (dropout.training and dropout.p)
        )
        return None if stays and is_untouched(dropout) else dropout(x)

    def _adapter(self, names: list[str], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, float]:
        """Both factors of all adapters together, the sum of all biases, and the scale."""
        first = [self.lora_A[name].weight for name in names]
        second = [self.lora_B[name].weight for name in names]
        scale = float(self.scaling[names[0]])
        if len(names) > 1:
            second = [x * self.scaling[name] for x, name in zip(second, names, strict=True)]
            first, second, scale = [torch.cat(first)], [torch.cat(second, 1)], 1.0
        bias: Tensor | None = self.base_layer.bias
        for name in names:
            own = self.lora_B[name].bias
            if own is not None:
                own = own * self.scaling[name]
                bias = own if bias is None else bias + own
        made = [None if x is None else _typed(x, dtype) for x in (first[0], second[0], bias)]
        return made[0], made[1], made[2], scale  # type: ignore[return-value]  # the factors are there


def _typed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A small tensor in a type that `lora_linear` takes with x of `dtype`."""
    return x if x.dtype == dtype or (x.dtype == torch.float32 and dtype.itemsize == 2) else x.to(dtype)
