"""A linear layer with a quantized weight."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..formats.base import Format
from ..formats.quantize import quantize as quantize_tensor
from ..formats.tensor import QuantizedTensor
from .packed import PackedLinear, check_linear


class QuantizedLinear(PackedLinear):
    """A linear layer with a quantized weight, computed by `gemmery.linear`.

    The weight is a parameter without a gradient; gradients reach the input and the bias. The input is cast to the
    weight's dtype, and the result back to that of the input. A state dict contains the `QuantizedTensor` as "weight".
    Loading one accepts any quantized weight of the layer's size, also in another format.
    `gemmery.formats.save_safetensors` writes such state dicts.

    Args:
        weight: a `gemmery.QuantizedTensor`, (out_features, in_features); a parameter is shared.
        bias: (out_features,); a parameter if it should be trained.
        batch_invariant: whether a row of the result has the same bits in every batch, see `gemmery.matmul`.

    Raises:
        TypeError, ValueError: the weight is not a quantized matrix, or the bias does not fit it.

    Example:
        >>> import torch, gemmery.nn
        >>> layer = gemmery.nn.QuantizedLinear(gemmery.quantize(torch.randn(16, 64), "int4", group_size=32))
        >>> layer
        QuantizedLinear(in_features=64, out_features=16, bias=False, format=int4, group_size=32)
        >>> layer(torch.randn(4, 64)).shape
        torch.Size([4, 16])
    """

    KIND = QuantizedTensor

    @classmethod
    def from_linear(
        cls, layer: nn.Linear, format: Format | str, *, batch_invariant: bool = False, **options: Any
    ) -> QuantizedLinear:
        """A layer with the quantized weight of a plain layer, and its bias, the same parameter.

        Args:
            layer: of any floating-point type.
            format, options: as for `gemmery.quantize`.

        Example:
            >>> import torch, gemmery.nn
            >>> gemmery.nn.QuantizedLinear.from_linear(torch.nn.Linear(64, 16), "e4m3")
            QuantizedLinear(in_features=64, out_features=16, bias=True, format=e4m3)
        """
        check_linear("QuantizedLinear.from_linear", layer)
        weight = quantize_tensor(layer.weight.detach(), format, **options)
        made = cls(weight, layer.bias, batch_invariant=batch_invariant)
        return made.train(layer.training)

    @property
    def quantized(self) -> QuantizedTensor:
        """The weight, by its real type."""
        return self.weight  # type: ignore[return-value]  # a parameter of a tensor subclass is of that class

    def described(self) -> str:
        """The weight's format and the columns that share a scale."""
        weight = self.quantized
        group = f", group_size={weight.group_size}" if weight.group_size else ""
        return f"{weight.form}{group}"
