"""Products inside an operator of several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from .. import devices


@contextlib.contextmanager
def inner_products(x: Tensor) -> Iterator[None]:
    """Products without gradients, in the types that they are given, on the device of x."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False), devices.on_device(x):
        yield
