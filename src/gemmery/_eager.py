"""Imports the products, and registers gemmery's operators with torch: for the command line, which does it late."""

from .api import addmm, bmm, linear, matmul, plan
from .epilogues.function import epilogue
from .invariant import batch_invariant
from .launch.plan import Plan
from .problem import Config, Problem

__all__ = [
    "Config", "Plan", "Problem", "addmm", "batch_invariant", "bmm", "epilogue", "linear", "matmul", "plan",
]  # fmt: skip
