"""Tensor parallelism: packed weights that are sharded, and styles for `parallelize_module` that shard them.

Products of DTensors need nothing from here. Import it by its name, after `torch.distributed` is initialised or before.
"""

from .styles import ColwiseParallel, FeedForwardParallel, RowwiseParallel
from .weights import distribute_weight, full_weight

__all__ = ["ColwiseParallel", "FeedForwardParallel", "RowwiseParallel", "distribute_weight", "full_weight"]
