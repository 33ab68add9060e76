"""A linear layer with a quantised weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..api import linear
from ..formats.base import Format
from ..formats.quantize import quantize as quantize_tensor
from ..formats.tensor import QuantizedTensor


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is quantised, computed by `gemmery.linear`.

    The weight is a parameter without gradient; gradients reach the input and the bias. The input is brought to the
    weight's type, and the result back to the input's. A state dict has the `QuantizedTensor` under "weight"; loading
    one takes any quantised weight of the layer's sizes, also of another format. `gemmery.formats.save_safetensors`
    writes such state dicts.

    Args:
        weight: a `gemmery.QuantizedTensor`, (out_features, in_features); a parameter of one is shared.
        bias: (out_features,), a parameter if it is to be trained.
        batch_invariant: whether a row of the result has the same bits in every batch, see `gemmery.matmul`.

    Raises:
        TypeError, ValueError: the weight is no quantised matrix, or the bias does not fit it.

    Example:
        >>> import torch, gemmery.nn
        >>> layer = gemmery.nn.QuantizedLinear(gemmery.quantize(torch.randn(16, 64), "int4", group_size=32))
        >>> layer
        QuantizedLinear(in_features=64, out_features=16, bias=False, format=int4, group_size=32)
        >>> layer(torch.randn(4, 64)).shape
        torch.Size([4, 16])
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    in_features: int
    out_features: int

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, batch_invariant: bool = False) -> None:
        super().__init__()
        if not isinstance(weight, QuantizedTensor):
            raise TypeError(
                f"QuantizedLinear: weight is a {type(weight).__name__}; it must be a QuantizedTensor, "
                "see gemmery.quantize"
            )
        if weight.dim() != 2:
            raise ValueError(
                f"QuantizedLinear: weight is {tuple(weight.shape)}; it must be (out_features, in_features)"
            )
        self.out_features, self.in_features = weight.shape
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise ValueError(
                f"QuantizedLinear: bias is {tuple(bias.shape)} and weight {tuple(weight.shape)}; bias must be "
                f"{(self.out_features,)}"
            )
        self.batch_invariant = batch_invariant
        self.weight = _parameter(weight)
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias, requires_grad=False)
        self.register_parameter("bias", bias)

    @classmethod
    def from_linear(
        cls, layer: nn.Linear, format: Format | str, *, batch_invariant: bool = False, **options: Any
    ) -> QuantizedLinear:
        """A layer with the quantised weight of a plain one, and its bias, the same parameter.

        Args:
            layer: of any floating type.
            format, options: as for `gemmery.quantize`.

        Example:
            >>> import torch, gemmery.nn
            >>> gemmery.nn.QuantizedLinear.from_linear(torch.nn.Linear(64, 16), "e4m3")
            QuantizedLinear(in_features=64, out_features=16, bias=True, format=e4m3)
        """
        weight = quantize_tensor(layer.weight.detach(), format, **options)
        made = cls(weight, layer.bias, batch_invariant=batch_invariant)
        return made.train(layer.training)

    @property
    def quantized(self) -> QuantizedTensor:
        """The weight, by its real type."""
        return self.weight  # type: ignore[return-value]  # a parameter of a tensor subclass is of that class

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features).

        Raises:
            TypeError: the input is not of a floating type, to which the result would be cut off.
        """
        if not input.dtype.is_floating_point:
            raise TypeError(f"QuantizedLinear: the input is {input.dtype}; it must be of a floating type")
        weight, bias = self.weight, self.bias
        x = input.to(weight.dtype)
        if bias is not None and bias.dtype != weight.dtype:
            bias = bias.to(weight.dtype)  # type: ignore[assignment]  # not a parameter, but used as a tensor
        output: Tensor = linear(x, weight, bias, batch_invariant=self.batch_invariant)
        return output.to(input.dtype)

    def extra_repr(self) -> str:
        """The layer's sizes, and what its weight is."""
        weight = self.quantized
        group = f", group_size={weight.group_size}" if weight.group_size else ""
        extra = ", batch_invariant=True" if self.batch_invariant else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"format={weight.format.name}{group}{extra}"
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        given = state_dict.get(f"{prefix}weight")
        is_assigned = local_metadata.get("assign_to_params_buffers", False)
        if not is_assigned and isinstance(given, QuantizedTensor) and given.shape == self.weight.shape:
            # torch would copy, which needs the same format, type and groups. The parameter stays the object that it is,
            # which other layers may share.
            torch.utils.swap_tensors(self.weight, _parameter(given.to(self.weight.device).clone()))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def _parameter(weight: Tensor) -> nn.Parameter:
    # One that is a parameter already may be shared with other layers.
    return weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
