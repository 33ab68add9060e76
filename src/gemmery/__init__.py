"""gemmery: GEMM for PyTorch, written in Triton."""

from . import ops as _ops  # noqa: F401  (registers torch.ops.gemmery)
from .api import addmm, bmm, linear, matmul, plan
from .plan import Plan
from .problem import Config, Problem

__version__ = "0.1.0"

__all__ = ["Config", "Plan", "Problem", "addmm", "bmm", "linear", "matmul", "plan"]
