"""gemmery: GEMM for PyTorch, written in Triton."""

from typing import TYPE_CHECKING, Any

from . import ops as _ops  # noqa: F401  (registers torch.ops.gemmery)
from .api import addmm, bmm, linear, matmul, plan
from .plan import Plan
from .problem import Config, Problem

if TYPE_CHECKING:
    from .select.explain import explain
    from .select.tuner import tune
    from .select.warm import warmup

__version__ = "0.1.0"

__all__ = [
    "Config", "Plan", "Problem", "addmm", "bmm", "explain", "linear", "matmul", "plan", "tune", "warmup",
]  # fmt: skip

#: Where the names are that a program seldom needs, and that are imported when it does.
_LATER = {"explain": "explain", "tune": "tuner", "warmup": "warm"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".select.{_LATER[name]}", __name__), name)
