"""A Linear layer whose product runs through gemmery."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ..api import linear
from ..problem import Precision


class Linear(nn.Linear):
    """torch.nn.Linear, computed by `gemmery.linear`.

    A subclass: parameters, initialisation, state dict and `isinstance` checks are torch's own.

    Args:
        in_features, out_features, bias, device, dtype: as for torch.nn.Linear.
        precision: how float32 is multiplied, see `gemmery.matmul`.
        batch_invariant: whether a row of the result has the same bits in every batch, see `gemmery.matmul`.

    Example:
        >>> import torch, gemmery.nn
        >>> gemmery.nn.Linear(8, 16)(torch.randn(4, 8)).shape
        torch.Size([4, 16])
    """

    precision: Precision
    batch_invariant: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        precision: Precision = "ieee",
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.precision, self.batch_invariant = precision, batch_invariant

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        return linear(
            input, self.weight, self.bias, precision=self.precision, batch_invariant=self.batch_invariant
        )

    def extra_repr(self) -> str:
        """The layer's sizes, and its precision and batch-invariance where they are not the default."""
        extra = "" if self.precision == "ieee" else f", precision={self.precision!r}"
        extra += ", batch_invariant=True" if self.batch_invariant else ""
        return super().extra_repr() + extra

    @classmethod
    def from_torch(
        cls, module: nn.Linear, *, precision: Precision = "ieee", batch_invariant: bool = False
    ) -> Linear:
        """A gemmery layer that shares the parameters of a torch one."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = module.in_features, module.out_features
        layer.precision, layer.batch_invariant = precision, batch_invariant
        layer.register_parameter("weight", cast(nn.Parameter, module.weight))
        layer.register_parameter("bias", cast("nn.Parameter | None", module.bias))
        layer.train(module.training)
        return layer


def swap(model: nn.Module, *, precision: Precision = "ieee", batch_invariant: bool = False) -> int:
    """Replace every torch.nn.Linear inside `model` by a gemmery.nn.Linear with the same parameters, in place.

    Layers that are something else than a plain nn.Linear (subclasses, layers with hooks, parametrisations or a patched
    forward) are left alone, since their behaviour lies in code that a replacement would lose.

    Returns:
        How many layers were replaced.

    Example:
        >>> import torch, gemmery.nn
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> gemmery.nn.swap(model)
        2
    """
    swapped: dict[int, Linear] = {}
    for module in list(model.modules()):
        # Not named_children, which leaves out a layer's second name.
        for name, child in list(module._modules.items()):
            if type(child) is nn.Linear and not _has_own_code(child):
                if id(child) not in swapped:
                    swapped[id(child)] = Linear.from_torch(
                        child, precision=precision, batch_invariant=batch_invariant
                    )
                setattr(module, name, swapped[id(child)])
    return len(swapped)


def _has_own_code(module: nn.Module) -> bool:
    if "forward" in module.__dict__:
        return True
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(len(kind) for kind in hooks)
