"""Custom device code in an epilogue: `@triton.jit` functions as operators that tracing passes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("gemmery", "FRAGMENT")
_LIBRARY.define("device(Tensor acc, Tensor[] args, str name) -> Tensor", tags=torch.Tag.pt2_compliant_tag)

_functions: dict[str, Any] = {}
_references: dict[str, Callable[..., Tensor] | None] = {}


def device_function(function: Any, reference: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """A `@triton.jit` function for use as an epilogue, or inside a traced one.

    It is called as `function(acc, *args)` with a block (ROWS, COLS) of its first argument. Of each other argument, it
    receives a value that broadcasts to the block: a block, a row (1, COLS), a column (ROWS, 1) or a scalar.
    Floating-point values are float32, or float64 if products accumulate in float64. It returns a block (ROWS, COLS).
    The blocks depend on the config, so the function must be elementwise. It has no gradient, and runs on a GPU or in
    Triton's interpreter.

    Args:
        function: the device function. Products also accept it directly as `epilogue=`.
        reference: the same function in torch, which runs where there is no kernel, as on the CPU.

    Raises:
        TypeError: it is not a `@triton.jit` function.

    Example:
        >>> import torch, triton, triton.language as tl, gemmery
        >>> from gemmery import epilogues
        >>> @triton.jit
        ... def leaky(acc, slope):
        ...     return tl.where(acc > 0, acc, acc * slope)
        >>> fused = epilogues.device_function(leaky, lambda acc, slope: torch.where(acc > 0, acc, acc * slope))
        >>> gemmery.matmul(-torch.ones(2, 3), torch.ones(3, 2), epilogue=fused, args=(0.5,))
        tensor([[-1.5000, -1.5000],
                [-1.5000, -1.5000]])
    """
    if not is_device_function(function):
        raise TypeError(
            f"device_function: given a {type(function).__name__}; it must be a @triton.jit function"
        )
    known = (n for n, f in _functions.items() if f is function and _references[n] is reference)
    name = next(known, None) or f"{function.fn.__name__}_{len(_functions)}"
    _functions[name], _references[name] = function, reference

    def apply(acc: Tensor, *args: Any) -> Tensor:
        tensors = [x if isinstance(x, Tensor) else acc.new_full((), x) for x in args]
        made: Tensor = torch.ops.gemmery.device(acc, tensors, name)
        return made

    apply.__name__ = function.fn.__name__
    return apply


def is_device_function(value: Any) -> bool:
    """Whether something is a `@triton.jit` function, compiled or interpreted."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    return isinstance(value, JITFunction | InterpretedFunction)


def device_name(name: str) -> str:
    """The name of a function in the text of a kernel."""
    return f"device_{name}"


def device_functions() -> dict[str, Any]:
    """All that kernels may call, by their names there."""
    return {device_name(name): function for name, function in _functions.items()}


def _in_torch(acc: Tensor, args: Sequence[Tensor], name: str) -> Tensor:
    reference = _references[name]
    if reference is None:
        raise ValueError(
            f"epilogue: {name.rpartition('_')[0]} is device code, which runs on a GPU or in Triton's interpreter; "
            f"give its torch equivalent with gemmery.epilogues.device_function(f, reference)"
        )
    return reference(acc, *args)


def _fake(acc: Tensor, args: Sequence[Tensor], name: str) -> Tensor:
    return acc.new_empty(acc.shape)


def _without_gradient(acc: Tensor, args: Sequence[Tensor], name: str) -> Tensor:
    if torch.is_grad_enabled() and any(x.requires_grad for x in (acc, *args)):
        raise ValueError(f"epilogue: {name.rpartition('_')[0]} is device code, which has no gradient")
    with torch._C._AutoDispatchBelowAutograd():
        made: Tensor = torch.ops.gemmery.device(acc, args, name)
        return made


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("device", _in_torch, _key)
_LIBRARY.impl("device", _without_gradient, "Autograd")
torch.library.register_fake("gemmery::device", _fake, lib=_LIBRARY)
