"""Tensors that are sharded, for code that runs without an import of torch.distributed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def is_sharded(values: Iterable[Any]) -> bool:
    """Whether one of the values, or of those in a pair among them, is a DTensor; without importing what these are."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(
        is_sharded(x) if isinstance(x, tuple | list) else isinstance(x, module.DTensor) for x in values
    )
