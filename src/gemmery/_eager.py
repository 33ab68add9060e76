"""Imports the products, and registers gemmery's operators with torch: for the command line, which does it late."""

from . import fused_transforms as _fused_transforms  # noqa: F401  (with fused_ops registers torch.ops.gemmery.fused)
from . import ops as _ops  # noqa: F401  (registers torch.ops.gemmery)
from . import packed_ops as _packed_ops  # noqa: F401  (registers torch.ops.gemmery.packed)
from .api import addmm, bmm, linear, matmul, plan
from .epilogues.function import epilogue
from .invariant import batch_invariant
from .launch.plan import Plan
from .problem import Config, Problem

__all__ = [
    "Config", "Plan", "Problem", "addmm", "batch_invariant", "bmm", "epilogue", "linear", "matmul", "plan",
]  # fmt: skip
