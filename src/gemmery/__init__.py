"""gemmery: GEMM for PyTorch, written in Triton."""

import sys
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING, Any


def _is_command() -> bool:
    """Whether this process is the command `gemmery` or `python -m gemmery`, whose --help needs no torch.

    The command loads the rest before it runs anything, so that it makes no difference but for the time of --help.
    """
    if sys.argv[:1] == ["-m"]:  # as long as Python looks for the module to run
        rest = sys.orig_argv
        return "-m" in rest and rest[rest.index("-m") + 1 :][:1] in (["gemmery"], ["gemmery.cli"])
    return PurePath(sys.argv[0] if sys.argv else "").name == "gemmery"


if TYPE_CHECKING:
    from . import nn
    from .api import addmm, bmm, linear, matmul, plan
    from .epilogues.function import epilogue
    from .formats import QuantizedTensor, quantize
    from .formats.activations import quantize_activations
    from .formats.scaled import ScaledTensor
    from .invariant import batch_invariant
    from .plan import Plan
    from .problem import Config, Problem
    from .scaled import scaled_matmul
    from .select.explain import explain
    from .select.tuner import tune
    from .select.warm import warmup

__version__ = "0.1.0"

__all__ = [
    "Config", "Plan", "Problem", "QuantizedTensor", "ScaledTensor", "addmm", "batch_invariant", "bmm", "epilogue",
    "explain", "linear", "matmul", "nn", "plan", "quantize", "quantize_activations", "scaled_matmul", "tune", "warmup",
]  # fmt: skip

#: Where the names are that a program seldom needs, and that are imported when it does.
_LATER = {
    "QuantizedTensor": ".formats.tensor", "ScaledTensor": ".formats.scaled", "explain": ".select.explain", "nn": ".nn",
    "quantize": ".formats.quantize", "quantize_activations": ".formats.activations", "scaled_matmul": ".scaled",
    "tune": ".select.tuner", "warmup": ".select.warm",
}  # fmt: skip


def _load() -> None:
    """What `import gemmery` does in a program, for the command, which has put it off."""
    eager = import_module("._eager", __name__)
    globals().update({name: getattr(eager, name) for name in eager.__all__})


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_LATER[name], __name__)
    # Kept, so that the next time nobody asks here.
    globals()[name] = found = module if name == "nn" else getattr(module, name)
    return found


if not _is_command():
    _load()


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
