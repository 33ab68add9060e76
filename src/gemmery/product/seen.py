"""Whether something in torch wants to see a call: the compiler, autograd, a mode, a transform, a subclass."""

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
    """Whether something in torch wants to see a call with these tensors.

    Args:
        records: whether that is so where autograd records the call, and nothing else wants to see it.
    """
    if is_compiling() or _len_torch_dispatch_stack() or _are_functorch_transforms_active():
        return True
    grad = records and torch.is_grad_enabled()
    return any(
        tensor is not None
        and (
            type(tensor) not in PLAIN or (grad and tensor.requires_grad) or tensor.is_neg() or tensor.is_meta
        )
        for tensor in tensors
    )


def wants_gradient(tensors: Iterable[Tensor]) -> bool:
    """Whether gradients are recorded of a call with these tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def is_followed() -> bool:
    """Whether the compiler looks at each function that Python runs: it does so where its graph is interrupted."""
    compiler = sys.modules.get("torch._C._dynamo.eval_frame") if "torch._dynamo" in sys.modules else None
    return compiler is not None and callable(compiler.get_eval_frame_callback())


def in_transform() -> bool:
    """Whether a transform of torch.func is to see an operator; the compiler follows these by itself."""
    return not is_compiling() and _are_functorch_transforms_active()


def is_differentiated() -> bool:
    """Whether torch.func differentiates what is called, at whatever level: it takes bare products."""
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
    """Forward-mode derivatives are not there: say so, and never return a product without its tangent."""
    if forward_ad._current_level < 0 or is_compiling():
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(f"{op}: no forward-mode derivative; use reverse mode (backward, vjp)")
