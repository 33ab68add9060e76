"""Tensors that are sharded, for code that runs where nobody has imported torch.distributed."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import Tensor


def is_sharded(tensors: Iterable[Tensor]) -> bool:
    """Whether one of the tensors is a DTensor; without importing what these are."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors)
