"""The base of linear layers with a packed weight, quantized or pruned."""

from __future__ import annotations

from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from ..api import linear
from ..dtensors import is_sharded
from ..epilogues.function import Epilogue
from ..formats.weight import PackedWeight
from .linear import is_untouched


class PackedLinear(nn.Module):
    """A linear layer whose weight is a `PackedWeight`, computed by `gemmery.linear`.

    The weight is a parameter without a gradient; gradients reach the input and the bias. The input is cast to the
    weight's dtype, and the result back to that of the input.

    Attributes:
        KIND: the class of the weight.
        runs_product: whether `forward` is `product`; False in subclasses with their own `forward`.
    """

    KIND: ClassVar[type[PackedWeight]]
    runs_product: ClassVar[bool] = True

    weight: nn.Parameter
    bias: nn.Parameter | None
    in_features: int
    out_features: int

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.runs_product = cls.forward is PackedLinear.forward

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, batch_invariant: bool = False) -> None:
        super().__init__()
        own, kind = type(self).__name__, self.KIND
        if not isinstance(weight, kind):
            raise TypeError(
                f"{own}: weight is a {type(weight).__name__}; it must be a {kind.__name__}, see {kind.made_by}"
            )
        if weight.dim() != 2:
            raise ValueError(
                f"{own}: weight is {tuple(weight.shape)}; it must be (out_features, in_features)"
            )
        self.out_features, self.in_features = weight.shape
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise ValueError(
                f"{own}: bias is {tuple(bias.shape)} and weight {tuple(weight.shape)}; bias must be "
                f"{(self.out_features,)}"
            )
        self.batch_invariant = batch_invariant
        self.weight = _parameter(weight)
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias, requires_grad=False)
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features).

        Raises:
            TypeError: the type of the input is not floating point, so the result would be truncated.
        """
        return self.product(input)

    def product(self, input: Tensor, epilogue: Epilogue[..., Tensor] | None = None) -> Tensor:
        """The result of `forward`, or an epilogue of it that runs in the same kernel; hooks do not run.

        Args:
            input: (..., in_features).
            epilogue: a function of the sum, see `gemmery.linear`.
        """
        if not input.dtype.is_floating_point:
            raise TypeError(
                f"{type(self).__name__}: the input is {input.dtype}; it must be a floating-point type"
            )
        weight, bias = self.weight, self.bias
        x = input.to(weight.dtype)
        if bias is not None and bias.dtype != weight.dtype:
            bias = bias.to(weight.dtype)  # type: ignore[assignment]  # not a parameter, but used as a tensor
        if epilogue is None:
            output: Tensor = linear(x, weight, bias, batch_invariant=self.batch_invariant)
            return output.to(input.dtype)
        rows = x if x.dim() > 1 else x.unsqueeze(0)
        output = linear(rows, weight, bias, epilogue=epilogue, batch_invariant=self.batch_invariant)
        return (output if x.dim() > 1 else output.squeeze(0)).to(input.dtype)

    def described(self) -> str:
        """The description of the weight, for the layer's `repr`."""
        weight = self.weight
        assert isinstance(weight, PackedWeight)
        return weight.form

    def extra_repr(self) -> str:
        """The layer's sizes, and a description of its weight."""
        extra = ", batch_invariant=True" if self.batch_invariant else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self.described()}{extra}"
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        given = state_dict.get(f"{prefix}weight")
        is_assigned = local_metadata.get("assign_to_params_buffers", False)
        if not is_assigned and isinstance(given, self.KIND) and given.shape == self.weight.shape:
            own = self.weight
            assert isinstance(own, PackedWeight)
            check_sharded_alike(f"{prefix}weight", own, given)
            # torch would copy, which needs the same layout and type. The parameter remains the same object, which other
            # layers may share.
            torch.utils.swap_tensors(self.weight, _parameter(given.to(self.weight.device).clone()))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def is_plain_packed(module: nn.Module) -> TypeGuard[PackedLinear]:
    """Whether a module is a layer with a packed weight that does nothing but multiply when it is called."""
    return isinstance(module, PackedLinear) and module.runs_product and is_untouched(module)


def check_sharded_alike(name: str, own: PackedWeight, given: PackedWeight) -> None:
    """ValueError if only one of a layer's weight and a state dict's weight consists of DTensors."""
    if is_sharded(own.parts().values()) != is_sharded(given.parts().values()):
        raise ValueError(
            f"{name}: one of the layer's weight and the state dict's consists of DTensors; both must be sharded alike, "
            "so load a whole weight before the layer is sharded"
        )


def _parameter(weight: Tensor) -> nn.Parameter:
    # An existing parameter may be shared with other layers.
    return weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)


def check_linear(caller: str, layer: object) -> None:
    """TypeError unless a layer is a linear one."""
    if not isinstance(layer, nn.Linear):
        raise TypeError(f"{caller}: layer is a {type(layer).__name__}; it must be a torch.nn.Linear")
