"""Tensor and expert parallelism: packed weights that are sharded, styles for `parallelize_module` that shard them, and
products that are summed over ranks.

Products of DTensors do not need this module. It imports torch.distributed, and is imported by its name alone.
"""

from .all_gather import all_gather_linear, all_gather_matmul
from .all_reduce import linear_all_reduce, matmul_all_reduce
from .exchange import check, set_timeout
from .reduce_scatter import linear_reduce_scatter, matmul_reduce_scatter
from .state import flat_state_dict, load_flat_state_dict
from .styles import ColwiseParallel, ExpertParallel, FeedForwardParallel, RowwiseParallel
from .weights import distribute_weight, full_weight

__all__ = [
    "ColwiseParallel", "ExpertParallel", "FeedForwardParallel", "RowwiseParallel", "all_gather_linear",
    "all_gather_matmul", "check", "distribute_weight", "flat_state_dict", "full_weight", "linear_all_reduce",
    "linear_reduce_scatter", "load_flat_state_dict", "matmul_all_reduce", "matmul_reduce_scatter", "set_timeout",
]  # fmt: skip
