"""gemmery: GEMM for PyTorch, written in Triton."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._command import PutOffError, put_off
from ._missing import advised

try:
    put_off()
    from .api import addmm, bmm, linear, matmul, plan
    from .epilogues.function import epilogue
    from .invariant import batch_invariant
    from .launch.plan import Plan
    from .problem import Config, Problem
except PutOffError:
    pass  # the command line loads these before it runs anything: see `_load`
except ImportError as missing:
    raise advised(missing) from missing

if TYPE_CHECKING:
    from . import moe, nn
    from .activations import quantize_activations
    from .blocks import sampled_addmm
    from .formats import QuantizedTensor, SparseTensor, quantize, sparsify
    from .formats.scaled import ScaledTensor
    from .grouped import grouped_linear, grouped_mm
    from .launch.explain import explain
    from .lora import lora_linear
    from .losses import linear_cross_entropy
    from .scaled import scaled_matmul
    from .tuning.tuner import tune
    from .tuning.warm import warmup

__version__ = "0.1.0"

__all__ = [
    "Config", "Plan", "Problem", "QuantizedTensor", "ScaledTensor", "SparseTensor", "addmm", "batch_invariant", "bmm",
    "epilogue", "explain", "grouped_linear", "grouped_mm", "linear", "linear_cross_entropy", "lora_linear", "matmul",
    "moe", "nn", "plan", "quantize", "quantize_activations", "sampled_addmm", "scaled_matmul", "sparsify", "tune",
    "warmup",
]  # fmt: skip

#: The modules of rarely needed names, which are imported on first use.
_LATER = {
    "QuantizedTensor": ".formats.tensor", "ScaledTensor": ".formats.scaled", "SparseTensor": ".formats.sparse",
    "explain": ".launch.explain", "grouped_linear": ".grouped", "grouped_mm": ".grouped",
    "linear_cross_entropy": ".losses", "lora_linear": ".lora", "moe": ".moe", "nn": ".nn",
    "quantize": ".formats.quantize", "quantize_activations": ".activations", "sampled_addmm": ".blocks",
    "scaled_matmul": ".scaled", "sparsify": ".formats.sparse", "tune": ".tuning.tuner", "warmup": ".tuning.warm",
}  # fmt: skip


def _load() -> None:
    """Run the deferred part of `import gemmery`, for the command."""
    try:
        eager = import_module("._eager", __name__)
    except ImportError as missing:
        advice = advised(missing)
        if advice is missing:
            raise
        raise SystemExit(f"Error: {advice}") from missing
    globals().update({name: getattr(eager, name) for name in eager.__all__})


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_LATER[name], __name__)
    # Kept, so that the next access does not come here.
    globals()[name] = found = module if name in ("moe", "nn") else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "epilogues"])
