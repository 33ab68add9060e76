"""The numbers that packed codes stand for, bit for bit as the kernels compute them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import packing
from .base import FORMATS

if TYPE_CHECKING:
    from .tensor import QuantizedTensor

#: The values of codes in words, as Python numbers: code under torch.compile can't use a tensor made before, and can't
#: keep one.
VALUES = {name: tuple(format.stored_values.tolist()) for name, format in FORMATS.items()}


def dequantize(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """The weight as (*batch, N, K) of type `dtype`, columns in their logical order."""
    result = numbers(weight)
    if weight.permutation is not None:
        result = result[..., weight.permutation.argsort()]
    if weight.channel is not None:
        result = result.float() * weight.channel.unsqueeze(-1)
    return result.to(dtype)


def numbers(weight: QuantizedTensor) -> Tensor:
    """The numbers that the tensor cores receive: (*batch, N, K) of the weight's type, with columns in packed order."""
    dtype, format = weight.dtype, weight.format
    rows, columns = weight.shape[-2:]
    codes = packing.unpack(weight.words, format.bits, rows, columns, format.order)
    values = torch.tensor(VALUES[format.name], device=codes.device).to(dtype)
    if weight.zeros is None and format.code == "int":
        values = values - format.zero
    result = values[codes.long()]
    if weight.zeros is not None:
        result = result - spread(weight, weight.zeros)
    if weight.scales is None:
        return result
    scales = spread(weight, weight.scales)
    if weight.offsets is None:
        return (result * scales).to(dtype)
    return rounded_sum(result.double() * scales.double(), spread(weight, weight.offsets).double(), dtype)


def spread(weight: QuantizedTensor, shared: Tensor) -> Tensor:
    """The parameters of groups, (*batch, groups, Np), as (*batch, N, K)."""
    rows, columns = weight.shape[-2:]
    each = shared.transpose(-1, -2)[..., :rows, :]
    return each.repeat_interleave(weight.group_size, -1)[..., :columns]


def rounded_sum(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`a + b` of float64, rounded once to a type of 16 bits, as a fused multiply-add rounds.

    torch goes from float64 to 16 bits through float32, which rounds twice. The intermediate result is rounded to odd
    here instead, after which the second rounding is correct (Boldo and Melquiond, 2008).
    """
    total = a + b
    part = total - a
    lost = (a - (total - part)) + (b - part)  # exactly what float64 did not hold (Knuth's TwoSum)
    near = total.float()
    error = (total - near.double()) + lost
    is_even = (near.view(torch.int32) & 1) == 0
    beyond = torch.where(error > 0, torch.inf, -torch.inf).to(near.dtype)
    is_moved = is_even & (error != 0) & total.isfinite() & near.isfinite()
    return torch.where(is_moved, torch.nextafter(near, beyond), near).to(dtype)
