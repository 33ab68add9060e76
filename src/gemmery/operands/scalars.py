"""Numbers and strides as traced device functions take them."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch

from .base import Traced, negated


def parts(value: float) -> tuple[float, float, float]:
    """A scalar as the kernels take it: three single-precision floats that add up to a double.

    Numbers beyond single precision's range are infinite, as in torch. An integer's parts are integers, so it is not
    rounded.
    """
    if isinstance(value, int) and 1 << 53 < abs(value) <= 1 << 63:
        return float(value >> 40 << 40), float((value >> 16 & 0xFFFFFF) << 16), float(value & 0xFFFF)
    if not abs(value) <= torch.finfo(torch.float32).max:
        return value * math.inf, 0.0, 0.0
    high = _single(value)
    middle = _single(value - high)
    return high, middle, value - high - middle


def _single(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def traced_arguments(traced: Traced, tensors: Sequence[Any], numbers: Sequence[float]) -> tuple[Any, ...]:
    """A traced function's arguments: its tensors, their strides, its numbers."""
    strides = [part for x in traced.operands for part in (negated(x), x.row, x.col)]
    return (*tensors, *strides, *map(parts, numbers))
