"""Hugging Face's RMSNorms by torch's kernel: their replacements, and how `swap` recognizes them.

They are written as half a dozen elementwise operators, which without a compiler took a sixth of a Llama's time at
8192 tokens. torch has the same in one kernel.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from ..dtensors import is_sharded
from .linear import inherit, own_code

#: A class is added here once its forward has been checked; a test checks it in the installed release.
CLASSES = frozenset(
    (
        "LlamaRMSNorm", "MistralRMSNorm", "MinistralRMSNorm", "Ministral3RMSNorm", "MixtralRMSNorm", "Qwen2RMSNorm",
        "Qwen2MoeRMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm",
    )
)  # fmt: skip
#: All names that such a forward uses.
_NAMES = {"dtype", "to", "torch", "float32", "pow", "mean", "rsqrt", "variance_epsilon", "weight"}


class FusedRMSNorm(nn.Module):
    """Hugging Face's `weight * (x / sqrt(mean(x ** 2) + eps))` as one kernel, `torch.nn.functional.rms_norm`.

    Made by `gemmery.nn.swap`. It rounds once, after the weight; the original also rounds before it.

    Attributes:
        weight: (N,), the original's.
        original: the name of the replaced class. variance_epsilon: the addend of the mean.
    """

    weight: nn.Parameter
    variance_epsilon: float

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.original = type(norm).__name__
        self.register_parameter("weight", norm._parameters["weight"])
        inherit(self, norm)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., N) to (..., N), in the type that torch gives the product of x and the weight."""
        weight, eps = self.weight, self.variance_epsilon
        # Under autocast on a GPU it gives single precision.
        if weight.dtype != hidden_states.dtype:
            return weight * functional.rms_norm(hidden_states, weight.shape, eps=eps).to(hidden_states.dtype)
        return functional.rms_norm(hidden_states, weight.shape, weight, eps).to(hidden_states.dtype)

    def extra_repr(self) -> str:
        """The class that it replaces, its size and its epsilon."""
        return f"{self.original}, {tuple(self.weight.shape)}, eps={self.variance_epsilon}"


def resembles(module: nn.Module) -> bool:
    """Whether a module has the attributes of such a norm, regardless of their use."""
    return isinstance(module._parameters.get("weight"), Tensor) and hasattr(module, "variance_epsilon")


def refusal(norm: nn.Module) -> str | None:
    """Why a module that looks like such a norm is not replaced; None if it can be."""
    cls = type(norm)
    code: Any = getattr(cls.__dict__.get("forward"), "__code__", None)
    known = cls.__name__ in CLASSES and cls.__module__.startswith("transformers.models.")
    if not known or code is None or set(code.co_names) != _NAMES:
        return f"a {cls.__module__}.{cls.__qualname__}, whose forward is not known"
    if norm._modules or norm._buffers or set(norm._parameters) != {"weight"}:
        return "it has more than its class gives it"
    if is_sharded(norm.parameters()):
        return "its weight is a DTensor; call this before the model is sharded"
    if type(norm.weight) is not nn.Parameter:
        return f"its weight is a {type(norm.weight).__name__}, not a plain parameter"
    return own_code(norm)
