"""Empty tensors, made in as little time as can be."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def maker(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """A function that makes a contiguous tensor: past the dispatcher where torch has a way, for the current GPU."""
    empty = functools.partial(torch.empty, shape, dtype=dtype, device=device)
    quick = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) if device.type == "cuda" else None
    if quick is None:
        return empty
    strides = torch.empty(shape, device="meta").stride()
    if torch.cuda.device_count() == 1:
        return functools.partial(quick, shape, strides, dtype)
    current = torch._C._cuda_getDevice
    return lambda: quick(shape, strides, dtype) if current() == device.index else empty()
