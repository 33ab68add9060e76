"""A linear layer and the cross entropy of its outputs, as one module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..losses import Reduction, check_numbers, linear_cross_entropy
from ..precision import AskedPrecision
from .linear import Linear


class LinearCrossEntropy(nn.Module):
    """A head and its loss, `cross_entropy(linear(input), target)`, by `gemmery.linear_cross_entropy`.

    Parameters and their names are those of torch's `LinearCrossEntropyLoss`. `linear` is a `gemmery.nn.Linear`. Call it
    to compute logits, as in sampling.

    Args:
        in_features, num_classes: K and C.
        bias: whether the logits have a bias.
        device, dtype: of the parameters, as for torch.nn.Linear.
        weight: (C,), a factor for each class; a buffer.
        reduction, ignore_index, label_smoothing, softcap, z_loss, chunk_size, precision: see
            `gemmery.linear_cross_entropy`.

    Raises:
        ValueError: a number is out of range, or the shape of `weight` is not (C,).
        TypeError: an argument is not a number.

    Example:
        >>> import torch, gemmery.nn
        >>> loss = gemmery.nn.LinearCrossEntropy(16, 100, label_smoothing=0.1)
        >>> hidden, target = torch.randn(2, 5, 16), torch.randint(100, (2, 5))
        >>> loss(hidden, target).backward()
        >>> loss.linear.weight.grad.shape
        torch.Size([100, 16])
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        weight: Tensor | None = None,
        reduction: Reduction = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
        chunk_size: int | None = None,
        precision: AskedPrecision = "ieee",
    ) -> None:
        super().__init__()
        check_numbers(
            type(self).__name__, reduction, ignore_index, label_smoothing, softcap, z_loss, chunk_size
        )
        if weight is not None and tuple(weight.shape) != (num_classes,):
            raise ValueError(
                f"{type(self).__name__}: weight is {tuple(weight.shape)}; it must be ({num_classes},)"
            )
        self.linear = Linear(in_features, num_classes, bias, device, dtype, precision=precision)
        self.register_buffer("weight", weight)
        self.reduction, self.ignore_index, self.label_smoothing = reduction, ignore_index, label_smoothing
        self.softcap, self.z_loss, self.chunk_size = softcap, z_loss, chunk_size

    @classmethod
    def from_linear(cls, head: nn.Linear, **options: Any) -> LinearCrossEntropy:
        """A loss that shares the parameters of an existing layer, such as a model's `lm_head`.

        Args:
            head: the layer.
            options: the arguments of the class other than sizes, types and devices.
        """
        made = cls(head.in_features, head.out_features, device="meta", **options)
        made.linear = Linear.from_torch(head, precision=made.linear.precision)
        return made

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """(..., in_features) and (...) to the loss."""
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            linear_bias=self.linear.bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            z_loss=self.z_loss,
            chunk_size=self.chunk_size,
            precision=self.linear.precision,
        )

    def extra_repr(self) -> str:
        """The options that differ from their defaults."""
        given = {
            "reduction": (self.reduction, "mean"), "ignore_index": (self.ignore_index, None),
            "label_smoothing": (self.label_smoothing, 0.0), "softcap": (self.softcap, None),
            "z_loss": (self.z_loss, 0.0), "chunk_size": (self.chunk_size, None),
        }  # fmt: skip
        return ", ".join(f"{name}={value!r}" for name, (value, usual) in given.items() if value != usual)
