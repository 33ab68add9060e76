"""Products inside an operator of several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import devices


def inner_products(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Products without gradients, in the types of their operands, on the device of x."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return _guarded(x)
    # Both contexts take more host time than a product's launch.
    return devices.on_device(x)


@contextlib.contextmanager
def _guarded(x: Tensor) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False), devices.on_device(x):
        yield
