"""Tensor and expert parallelism: packed weights that are sharded, and styles for `parallelize_module` that shard them.

Products of DTensors need nothing from here. It imports torch.distributed, and is imported by its name alone.
"""

from .state import flat_state_dict, load_flat_state_dict
from .styles import ColwiseParallel, ExpertParallel, FeedForwardParallel, RowwiseParallel
from .weights import distribute_weight, full_weight

__all__ = [
    "ColwiseParallel", "ExpertParallel", "FeedForwardParallel", "RowwiseParallel", "distribute_weight",
    "flat_state_dict", "full_weight", "load_flat_state_dict",
]  # fmt: skip
