"""Styles for torch's `parallelize_module` that know gemmery's modules."""
from typing import Any
class ColwiseParallel: pass
class RowwiseParallel: pass
class FeedForwardParallel: pass
