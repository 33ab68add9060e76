"""A Linear layer that gemmery computes."""

from __future__ import annotations

from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from ..api import linear
from ..precision import AskedPrecision


class Linear(nn.Linear):
    """torch.nn.Linear, computed by `gemmery.linear`.

    It is a subclass: parameters, initialization, state dict and `isinstance` checks are torch's own.

    Args:
        in_features, out_features, bias, device, dtype: as for torch.nn.Linear.
        precision: how float32 is multiplied, see `gemmery.matmul`.
        batch_invariant: whether a row of the result has the same bits in every batch, see `gemmery.matmul`.

    Example:
        >>> import torch, gemmery.nn
        >>> gemmery.nn.Linear(8, 16)(torch.randn(4, 8)).shape
        torch.Size([4, 16])
    """

    precision: AskedPrecision
    batch_invariant: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        precision: AskedPrecision = "ieee",
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.precision, self.batch_invariant = precision, batch_invariant

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        output: Tensor = linear(
            input, self.weight, self.bias, precision=self.precision, batch_invariant=self.batch_invariant
        )
        return output

    def extra_repr(self) -> str:
        """The layer's sizes, and its precision and batch invariance if they are not the default."""
        extra = "" if self.precision == "ieee" else f", precision={self.precision!r}"
        extra += ", batch_invariant=True" if self.batch_invariant else ""
        return super().extra_repr() + extra

    @classmethod
    def from_torch(
        cls, module: nn.Linear, *, precision: AskedPrecision = "ieee", batch_invariant: bool = False
    ) -> Linear:
        """A gemmery layer that shares the parameters of a torch layer, and keeps its other attributes."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = module.in_features, module.out_features
        layer.precision, layer.batch_invariant = precision, batch_invariant
        layer.register_parameter("weight", cast(nn.Parameter, module.weight))
        layer.register_parameter("bias", cast("nn.Parameter | None", module.bias))
        inherit(layer, module)
        return layer


#: The attributes with the hooks that run when a module is called.
_CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(module: nn.Module) -> TypeGuard[Linear]:
    """Whether a module is a gemmery.nn.Linear that does nothing but multiply when it is called.

    A block that reads a layer's parameters itself checks this at every call, because hooks and adapters may be added
    later.
    """
    return type(module) is Linear and is_untouched(module)


def is_untouched(module: nn.Module) -> bool:
    """Whether calling a module runs its class's forward and nothing else; a fast form of `own_code`."""
    return (
        not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and "forward" not in module.__dict__
    )


def own_code(module: nn.Module) -> str | None:
    """The code of a module's call besides its class's forward, in words; None if there is none."""
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if module.__dict__.get("_compiled_call_impl") is not None:
        return "it was compiled separately"
    if any(getattr(module, kind) for kind in _CALL_HOOKS):
        return "it has hooks"
    # The hooks that run with state dicts: a replacement would write or read another state dict.
    kinds = (
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    )
    return "it has hooks on its state dict" if any(module.__dict__.get(kind) for kind in kinds) else None


def inherit(new: nn.Module, old: nn.Module) -> None:
    """Give a replacement the attributes that others have left on a module, and its training flag."""
    for name, value in old.__dict__.items():
        if name not in new.__dict__ and name not in ("forward", "_compiled_call_impl"):
            new.__dict__[name] = value
    new.training = old.training
