"""Between the public functions and a Plan: checks once per shape, a cache, and the choice of the way to run.

A call goes straight to its plan in eager inference. Under torch.compile, with gradients, inside a dispatch mode or with
tensor subclasses it goes through the operators of `ops` instead, whose implementation comes back here.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import devices, reference
from .layout import broadcast_batch, make_problem, overlap, overlaps_itself, same_layout
from .plan import PLANS, Plan, make_plan
from .problem import DTYPE_NAMES, FP8, OUT_DTYPES, PRECISIONS, Config, Precision, config_text

Number = int | float
_PLAIN = (Tensor, torch.nn.Parameter)
_AUTOCAST_DEVICES = ("cpu", "cuda")
_AUTOCAST = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that is known of a call once shapes, strides and types are.

    Attributes:
        shape, dtype: of the result.
        plan: what to launch; None where the result is empty or the torch reference serves (CPU tensors).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    plan: Plan | None


_prepared: dict[Any, Prepared] = {}
_lock = threading.Lock()


def check_tensor(op: str, name: str, value: object) -> None:
    """TypeError unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; it must be a torch.Tensor")
    if value.layout != torch.strided:
        raise TypeError(f"{op}: {name} is sparse ({value.layout}); it must be a strided tensor")


def check_rank(op: str, name: str, value: Tensor, rank: int) -> None:
    """ValueError unless a tensor has `rank` dimensions."""
    check_tensor(op, name, value)
    if value.dim() != rank:
        raise ValueError(f"{op}: {name} is {tuple(value.shape)}; it must have {rank} dimensions")


def operand_names(op: str) -> tuple[str, str, str]:
    """What an operation's user calls the two factors and the addend, for messages."""
    if op == "linear":
        return "x", "weight", "bias"
    return "a", "b", "input" if op == "addmm" else "bias"


def check_tensors(op: str, a: object, b: object, addend: object, out: object) -> None:
    """TypeError unless the factors are tensors, and the addend and `out` are tensors or None."""
    first, second, third = operand_names(op)
    check_tensor(op, first, a)
    check_tensor(op, second, b)
    for name, value in ((third, addend), ("out", out)):
        if value is not None:
            check_tensor(op, name, value)


def result_shape(op: str, a: Tensor, b: Tensor) -> tuple[int, ...]:
    """The shape of `a @ b` by torch.matmul's rules; ValueError where they do not fit."""
    for name, tensor in zip(operand_names(op), (a, b), strict=False):
        if tensor.dim() == 0:
            raise ValueError(f"{op}: {name} is a scalar; it must have at least one dimension")
    what = f"{op}: a is {tuple(a.shape)} and b is {tuple(b.shape)}"
    if op == "linear":
        what = f"linear: x is {tuple(a.shape)} and weight is {tuple(b.t().shape)}"
    inner_a, inner_b = a.shape[-1], b.shape[-2] if b.dim() > 1 else b.shape[0]
    if inner_a != inner_b:
        raise ValueError(f"{what}: inner sizes {inner_a} and {inner_b} differ")
    try:
        batch = broadcast_batch(a.shape[:-2], b.shape[:-2])
    except RuntimeError as error:
        raise ValueError(f"{what}: batch dimensions do not broadcast") from error
    rows = (a.shape[-2],) if a.dim() > 1 else ()
    cols = (b.shape[-1],) if b.dim() > 1 else ()
    return (*batch, *rows, *cols)


def result_dtype(op: str, a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The type of the result; TypeError where the operands' types, or the one asked for, are not supported."""
    first, second, _ = operand_names(op)
    for name, tensor in ((first, a), (second, b)):
        if tensor.dtype not in OUT_DTYPES:
            known = ", ".join(str(dtype) for dtype in OUT_DTYPES)
            raise TypeError(f"{op}: {name} is {tensor.dtype}; supported are {known}")
    if a.dtype != b.dtype and not (a.dtype in FP8 and b.dtype in FP8):
        raise TypeError(f"{op}: {first} is {a.dtype} and {second} is {b.dtype}; they must have one type")
    allowed = OUT_DTYPES[a.dtype]
    if out_dtype is not None and out_dtype not in allowed:
        names = ", ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"{op}: out_dtype is {out_dtype}; for {a.dtype} operands it can be {names}")
    return out_dtype or allowed[0]


def _check_addend(op: str, addend: Tensor, shape: tuple[int, ...], a: Tensor) -> None:
    name = operand_names(op)[2]
    if addend.dtype not in DTYPE_NAMES or addend.dtype in FP8:
        raise TypeError(f"{op}: {name} is {addend.dtype}, which cannot be added to a product of {a.dtype}")
    if (a.dtype == torch.int8) == addend.dtype.is_floating_point:
        raise TypeError(
            f"{op}: {name} is {addend.dtype} and a is {a.dtype}; both must be integers or neither"
        )
    try:
        fits = tuple(torch.broadcast_shapes(tuple(addend.shape), shape)) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"{op}: {name} is {tuple(addend.shape)}; it must broadcast to the result, {shape}")


def _check_out(op: str, out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(out.shape) != shape:
        raise ValueError(f"{op}: out is {tuple(out.shape)}; the result is {shape}")
    if out.dtype != dtype:
        raise TypeError(f"{op}: out is {out.dtype}; the result is {dtype}")


def check_scalars(op: str, a: Tensor, alpha: Number, beta: Number) -> None:
    """TypeError or ValueError unless alpha and beta are real Python numbers that suit the operands' type."""
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not isinstance(value, int | float | torch.SymInt | torch.SymFloat):
            raise TypeError(f"{op}: {name} is a {type(value).__name__}; it must be a Python number")
        if a.dtype == torch.int8 and not (abs(value) < 1 << 31 and value == int(value)):
            raise TypeError(f"{op}: {name} is {value}; for int8 operands it must be an integer of 32 bits")
        least, most = (1e-23, 1e38) if a.dtype == torch.float64 else (0.0, torch.finfo(torch.float32).max)
        if value != 0 and abs(value) < math.inf and not least <= abs(value) <= most:
            raise ValueError(
                f"{op}: {name} is {value}; it must be 0 or between {least:g} and {most:g} in size"
            )


def check(
    op: str, a: Tensor, b: Tensor, addend: Tensor | None, alpha: Number, beta: Number, out: Tensor | None,
    out_dtype: torch.dtype | None, precision: str,
) -> tuple[tuple[int, ...], torch.dtype]:  # fmt: skip
    """Everything that can be said of the arguments without looking at memory; returns the result's shape and type.

    Works on fake tensors with symbolic sizes. Raises ValueError or TypeError that say what was given.
    """
    if out_dtype is None and isinstance(out, Tensor):
        out_dtype = out.dtype
    shape, dtype = result_shape(op, a, b), result_dtype(op, a, b, out_dtype)
    check_scalars(op, a, alpha, beta)
    if precision not in PRECISIONS:
        raise ValueError(f"{op}: precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    if addend is not None:
        _check_addend(op, addend, shape, a)
    if out is not None:
        _check_out(op, out, shape, dtype)
    first, *others = operand_names(op)
    for name, tensor in zip((*others, "out"), (b, addend, out), strict=True):
        if tensor is not None and tensor.device != a.device:
            raise ValueError(
                f"{op}: {first} is on {a.device} and {name} on {tensor.device}; they must be on one device"
            )
    return shape, dtype


def _check_overlap(op: str, out: Tensor, a: Tensor, b: Tensor, addend: Tensor | None) -> None:
    if overlaps_itself(out):
        raise ValueError(
            f"{op}: out has strides {out.stride()} for {tuple(out.shape)}: its elements overlap one another"
        )
    for name, tensor in zip(operand_names(op), (a, b, addend), strict=True):
        # An addend that is the output itself is read where it is written, by the same program, before the write.
        harmless = tensor is None or (tensor is addend and same_layout(out, tensor))
        if not harmless and overlap(out, tensor):  # type: ignore[arg-type]
            raise ValueError(f"{op}: out and {name} share memory")


def _matrices(
    a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The operands as (batches of) matrices: a vector a is one row, a vector b one column."""
    vector_a, vector_b = a.dim() == 1, b.dim() == 1
    if addend is not None:
        addend = addend.expand(out.shape)
    if vector_b:
        b, out = b.unsqueeze(-1), out.unsqueeze(-1)
        addend = None if addend is None else addend.unsqueeze(-1)
    if vector_a:
        a, out = a.unsqueeze(0), out.unsqueeze(-2)
        addend = None if addend is None else addend.unsqueeze(-2)
    return a, b, out, addend


def prepare(
    op: str, a: Tensor, b: Tensor, addend: Tensor | None, alpha: Number, beta: Number, out: Tensor | None,
    out_dtype: torch.dtype | None, precision: Precision, fast_accum: bool, config: Config | dict[str, Any] | str | None,
) -> Prepared:  # fmt: skip
    """Check a call and find its plan, compiled; nothing is launched."""
    check_tensors(op, a, b, addend, out)
    pinned = None if config is None else Config.of(config)
    shape, dtype = check(op, a, b, addend, alpha, beta, out, out_dtype, precision)
    device = devices.current(a.device)
    if 0 in shape or device is None:
        return Prepared(shape, dtype, None)
    result = torch.empty(shape, dtype=dtype, device=a.device) if out is None else out
    if beta == 0:
        addend = None
    a2, b2, out2, addend2 = _matrices(a, b, result, addend)
    scaled = alpha != 1 or (addend is not None and beta != 1)
    if precision not in device.target.precisions:
        precision = "ieee"
    problem = make_problem(
        a2, b2, out2, addend2, scaled=scaled, precision=precision, fast_accum=fast_accum, device=device
    )
    return Prepared(shape, dtype, make_plan(problem, pinned, a, b, result, addend, alpha, beta))


def _layout(tensor: Tensor | None) -> Any:
    """What of a tensor decides which code runs."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 15


def eager(
    op: str, a: Tensor, b: Tensor, addend: Tensor | None, alpha: Number, beta: Number, out: Tensor | None,
    out_dtype: torch.dtype | None, precision: Precision, fast_accum: bool, config: Config | dict[str, Any] | str | None,
) -> Tensor:  # fmt: skip
    """Run a call on plain tensors, without autograd and without torch's dispatcher."""
    if alpha != 1 or beta != 1:
        check_scalars(op, a, alpha, beta)
    pinned = None if config is None else Config.of(config)
    key = (
        _layout(a), _layout(b), _layout(addend), _layout(out), alpha == 1, beta == 1, beta == 0,
        out_dtype, precision, fast_accum, pinned,
    )  # fmt: skip
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = prepare(op, a, b, addend, alpha, beta, out, out_dtype, precision, fast_accum, pinned)
        with _lock:
            if len(_prepared) >= PLANS:
                for stale in list(_prepared)[: PLANS // 2]:
                    del _prepared[stale]
            _prepared[key] = prepared
    if out is not None:
        _check_overlap(op, out, a, b, addend if beta != 0 else None)
    result = torch.empty(prepared.shape, dtype=prepared.dtype, device=a.device) if out is None else out
    if prepared.plan is not None:
        prepared.plan(a, b, result, addend if beta != 0 else None, alpha, beta)
    elif result.numel():
        result.copy_(reference.gemm(a, b, addend, alpha=alpha, beta=beta, out_dtype=prepared.dtype))
        return result
    if out is not None:
        # Autograd must see that a tensor was written behind its back.
        torch.autograd.graph.increment_version(out)
    return result


def _needs_dispatcher(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether something in torch wants to see the call: the compiler, autograd, a mode, a transform, a subclass."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return True
    grad = torch.is_grad_enabled()
    return any(
        tensor is not None
        and (
            type(tensor) not in _PLAIN or (grad and tensor.requires_grad) or tensor.is_neg() or tensor.is_meta
        )
        for tensor in tensors
    )


def _check_forward_mode(op: str, tensors: tuple[Tensor | None, ...]) -> None:
    """Forward-mode derivatives are not there: say so, and never return a product without its tangent."""
    if torch.autograd.forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return
    for tensor in tensors:
        if tensor is not None and torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(f"{op}: no forward-mode derivative; use reverse mode (backward, vjp)")


def _autocast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return tensor.to(dtype) if tensor is not None and tensor.dtype in _AUTOCAST else tensor


def run(
    op: str, a: Tensor, b: Tensor, addend: Tensor | None, alpha: Number, beta: Number, out: Tensor | None,
    out_dtype: torch.dtype | None, precision: Precision, fast_accum: bool, config: Config | dict[str, Any] | str | None,
) -> Tensor:  # fmt: skip
    """A call as the user made it, by whichever way it has to go."""
    check_tensors(op, a, b, addend, out)
    tensors = (a, b, addend, out)
    device = a.device.type
    if out is None and device in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
        lower = torch.get_autocast_dtype(device)
        a, b, addend = _autocast(a, lower), _autocast(b, lower), _autocast(addend, lower)  # type: ignore[assignment]
    _check_forward_mode(op, tensors)
    if not _needs_dispatcher(tensors):
        return eager(op, a, b, addend, alpha, beta, out, out_dtype, precision, fast_accum, config)
    check(op, a, b, addend, alpha, beta, out, out_dtype, precision)
    text = config_text(config)
    if out is None:
        product: Tensor = torch.ops.gemmery.gemm(
            a, b, addend, alpha, beta, out_dtype, precision, fast_accum, text
        )
        return product
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise ValueError(f"{op}: out= does not support gradients, but one of the arguments requires them")
    torch.ops.gemmery.gemm_out(a, b, addend, alpha, beta, precision, fast_accum, text, out)
    return out
