"""Imports the products, and registers gemmery's operators with torch: for the command line, which does it late."""

from . import torch_op as _torch_op  # noqa: F401  (registers torch.ops.gemmery.product)
from .api import addmm, bmm, linear, matmul, plan
from .epilogues.function import epilogue
from .invariant import batch_invariant
from .launch.plan import Plan
from .problem import Config, Problem

__all__ = [
    "Config", "Plan", "Problem", "addmm", "batch_invariant", "bmm", "epilogue", "linear", "matmul", "plan",
]  # fmt: skip
