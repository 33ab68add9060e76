"""Whether a part of torch has to see a call: the compiler, autograd, a mode, a transform or a subclass."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

PLAIN = (Tensor, torch.nn.Parameter)
_AUTOCAST_DEVICES = ("cpu", "cuda")


def needs_dispatcher(tensors: Iterable[Tensor | None], *, records: bool = True) -> bool:
    """Whether a part of torch has to see a call with these tensors.

    Args:
        records: whether that is so where autograd records the call, and nothing else wants to see it.
    """
    if is_compiling() or _len_torch_dispatch_stack() or _are_functorch_transforms_active():
        return True
    grad = records and torch.is_grad_enabled()
    # A loop: a generator takes the host twice as long.
    for x in tensors:
        if x is not None and (type(x) not in PLAIN or (grad and x.requires_grad) or x.is_neg() or x.is_meta):
            return True
    return False


def wants_gradient(tensors: Iterable[Tensor | None]) -> bool:
    """Whether gradients are recorded for a call with these tensors."""
    return torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in tensors])


def is_followed() -> bool:
    """Whether the compiler examines each function that Python runs, as it does at a graph break."""
    compiler = sys.modules.get("torch._C._dynamo.eval_frame") if "torch._dynamo" in sys.modules else None
    return compiler is not None and callable(compiler.get_eval_frame_callback())


def in_transform() -> bool:
    """Whether a transform of torch.func has to see an operator. The compiler traces these by itself."""
    return not is_compiling() and _are_functorch_transforms_active()


def is_differentiated() -> bool:
    """Whether torch.func differentiates the call, at any level; it needs bare products."""
    if not in_transform():
        return False
    from torch._C._functorch import TransformType
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

    return any(x.key() == TransformType.Grad for x in retrieve_all_functorch_interpreters())


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The type that autocast asks for on a device; None without it."""
    kind = device.type
    asks = kind in _AUTOCAST_DEVICES and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if asks else None


def check_forward_mode(op: str, tensors: Iterable[Tensor | None]) -> None:
    """Raises an error for forward-mode derivatives, which are not supported, instead of dropping the tangent."""
    if forward_ad._current_level < 0 or is_compiling():
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(f"{op}: no forward-mode derivative; use reverse mode (backward, vjp)")
