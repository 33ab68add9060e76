"""Between the public functions and a Plan: checks once per shape, a cache, and the choice of the way to run.

A call goes straight to its plan in eager inference. Under torch.compile, with gradients, inside a dispatch mode or with
tensor subclasses it goes through the operators of `ops` instead, whose implementation comes back here.

`run` and `eager` are on the way of every call, and their time is the user's: what a call has in common with one before
is looked up (`Prepared`), and only what can differ between the two is looked at.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _increment_version, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from . import devices, reference
from .dtypes import DTYPE_NAMES, FP8, OUT_DTYPES, PRECISIONS, Precision
from .formats.tensor import QuantizedTensor
from .launch.direct import Launch
from .launch.plan import PLANS, Plan, forget_plans, make_plan
from .layout import broadcast_batch, extent_bytes, make_problem, overlap, overlaps_itself, same_layout
from .problem import Config, config_text

Number = int | float
_PLAIN = (Tensor, torch.nn.Parameter)
_AUTOCAST_DEVICES = ("cpu", "cuda")
_AUTOCAST = (torch.float16, torch.bfloat16, torch.float32)


#: A type for the result, or with an epilogue one for each of its results.
OutTypes = torch.dtype | tuple[torch.dtype | None, ...] | None


class Options(NamedTuple):
    """How a product is to be computed, in the words of `api.matmul`."""

    out_dtype: OutTypes = None
    precision: Precision = "ieee"
    fast_accum: bool = False
    batch_invariant: bool = False
    config: Config | dict[str, Any] | str | None = None


#: Options as they come with a call: a plain tuple is made in no time.
OptionValues = tuple[OutTypes, Precision, bool, bool, Config | dict[str, Any] | str | None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that is known of a call once shapes, strides and types are.

    Attributes:
        shape, dtype: of the result.
        plan: what to launch; None where the result is empty or the torch reference serves (CPU tensors).
        direct: the plan's short way, if it has one.
        empty: makes a tensor for the result.
        extents: bytes from the first element to the end of the last, of a, b, the addend and the result.
        by_rows: how the reference multiplies, if it serves.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    plan: Plan | None
    direct: Launch | None
    empty: Callable[[], Tensor]
    extents: tuple[int, int, int, int]
    by_rows: bool = False


_prepared: dict[Any, Prepared] = {}
_lock = threading.Lock()


def forget() -> None:
    """Drop what is memoised of calls and plans, so that the next call of each shape asks the selector again."""
    forget_plans()
    with _lock:
        _prepared.clear()


def check_tensor(op: str, name: str, value: object) -> None:
    """TypeError unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; it must be a torch.Tensor")
    # The compiler can't ask that in a backward pass; the operator does.
    if not is_compiling() and value.layout != torch.strided:
        raise TypeError(f"{op}: {name} is sparse ({value.layout}); it must be a strided tensor")


def moved(value: Any, a: Tensor) -> Any:
    """An input on the operands' device: a tensor of no dimensions may be on the CPU, as in torch."""
    moves = (
        isinstance(value, Tensor)
        and value.dim() == 0
        and value.device != a.device
        and value.device.type == "cpu"
    )
    return value.to(a.device) if moves else value


def operand_names(op: str) -> tuple[str, str, str]:
    """What an operation's user calls the two factors and the addend, for messages."""
    if op == "linear":
        return "x", "weight", "bias"
    return "a", "b", "input" if op == "addmm" else "bias"


def check_tensors(op: str, a: object, b: object, addend: object, out: object) -> None:
    """TypeError unless the factors are tensors, and the addend and `out` are tensors or None."""
    first, second, third = operand_names(op)
    check_tensor(op, first, a)
    if isinstance(b, tuple | list) and len(b) == 2:
        raise TypeError(
            f"{op}: {second} is in two parts, which takes an epilogue that halves the product's columns, such as "
            "gemmery.epilogues.swiglu"
        )
    check_tensor(op, second, b)
    for name, value in ((third, addend), ("out", out)):
        if value is not None:
            check_tensor(op, name, value)
    for name, value in ((first, a), (third, addend), ("out", out)):
        if isinstance(value, QuantizedTensor):
            raise TypeError(f"{op}: {name} is packed; only the second factor can be")


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


def result_dtype(op: str, a: Tensor, b: Tensor, out_dtype: OutTypes) -> torch.dtype:
    """The type of the result; TypeError where the operands' types, or the one asked for, are not supported."""
    first, second, _ = operand_names(op)
    for name, tensor in ((first, a), (second, b)):
        if tensor.dtype not in OUT_DTYPES:
            known = ", ".join(str(dtype) for dtype in OUT_DTYPES)
            raise TypeError(f"{op}: {name} is {tensor.dtype}; supported are {known}")
    if a.dtype != b.dtype and not (a.dtype in FP8 and b.dtype in FP8):
        raise TypeError(
            f"{op}: {first} is {a.dtype} and {second} is {b.dtype}; they must have one type, as by "
            f"{first}.to({second}.dtype)"
        )
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


def _check_ranks(op: str, a: Tensor, b: Tensor) -> None:
    rank = {"addmm": 2, "bmm": 3}.get(op)
    if rank is None:
        return
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() != rank:
            raise ValueError(f"{op}: {name} is {tuple(tensor.shape)}; it must have {rank} dimensions")
    if op == "bmm" and a.shape[0] != b.shape[0]:
        raise ValueError(f"bmm: a is {tuple(a.shape)} and b is {tuple(b.shape)}: batch sizes differ")


def check(
    op: str, a: Tensor, b: Tensor, addend: Tensor | None, alpha: Number, beta: Number, out: Tensor | None,
    options: Options,
) -> tuple[tuple[int, ...], torch.dtype]:  # fmt: skip
    """Everything that can be said of the arguments without looking at memory; returns the result's shape and type.

    Works on fake tensors with symbolic sizes. Raises ValueError or TypeError that say what was given.
    """
    out_dtype, precision = options.out_dtype, options.precision
    _check_ranks(op, a, b)
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


def right_factor(op: str, b: Tensor) -> Tensor:
    """The second factor as a matrix product has it: for linear the transpose of the weight.

    Raises:
        ValueError: linear's weight has more than two dimensions.
    """
    if op != "linear":
        return b
    if b.dim() > 2:
        raise ValueError(f"linear: weight is {tuple(b.shape)}; it must be (N, K) or (K,)")
    return b.t()


def maker(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """What makes a contiguous tensor: past the dispatcher where torch has a way, for the current GPU."""
    empty = functools.partial(torch.empty, shape, dtype=dtype, device=device)
    quick = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) if device.type == "cuda" else None
    if quick is None:
        return empty
    strides = torch.empty(shape, device="meta").stride()
    if torch.cuda.device_count() == 1:
        return functools.partial(quick, shape, strides, dtype)
    current = torch._C._cuda_getDevice
    return lambda: quick(shape, strides, dtype) if current() == device.index else empty()


def prepare(
    op: str, a: Tensor, b: Tensor, addend: Tensor | None, alpha: Number, beta: Number, out: Tensor | None,
    options: Options,
) -> Prepared:  # fmt: skip
    """Check a call and find its plan, compiled; nothing is launched."""
    check_tensors(op, a, b, addend, out)
    b = right_factor(op, b)
    pinned = None if options.config is None else Config.of(options.config)
    shape, dtype = check(op, a, b, addend, alpha, beta, out, options)
    if out is not None and overlaps_itself(out):
        raise ValueError(
            f"{op}: out has strides {out.stride()} for {tuple(out.shape)}: its elements overlap one another"
        )
    make = maker(shape, dtype, a.device)
    device = devices.current(a.device)
    result = make() if out is None else out
    extents = tuple(0 if tensor is None else extent_bytes(tensor) for tensor in (a, b, addend, result))
    if 0 in shape or device is None:
        by_rows = options.batch_invariant and a.dtype.is_floating_point
        return Prepared(shape, dtype, None, None, make, extents, by_rows)  # type: ignore[arg-type]
    if beta == 0:
        addend = None
    a2, b2, out2, addend2 = _matrices(a, b, result, addend)
    scaled = alpha != 1 or (addend is not None and beta != 1)
    problem = make_problem(
        a2, b2, out2, addend2, scaled=scaled,
        precision=options.precision if options.precision in device.target.precisions else "ieee",
        fast_accum=options.fast_accum, batch_invariant=options.batch_invariant, device=device,
    )  # fmt: skip
    tensors = (a, b, result) if addend is None else (a, b, result, addend)
    plan = make_plan(problem, pinned, tensors, (alpha, beta))
    return Prepared(shape, dtype, plan, plan.direct, make, extents)  # type: ignore[arg-type]


def _remember(key: Any, prepared: Prepared) -> Prepared:
    with _lock:
        if len(_prepared) >= PLANS:
            for stale in list(_prepared)[: PLANS // 2]:
                del _prepared[stale]
        _prepared[key] = prepared
    return prepared


def _layout(tensor: Tensor, address: int) -> Any:
    """What of a tensor decides which code runs."""
    # Tensors without data, which may be on any device, have no address; its number tells the others' devices apart.
    device = tensor.get_device() if address else tensor.device
    return tensor.shape, tensor.stride(), tensor.dtype, device, address & 15


def eager(
    op: str, a: Tensor, b: Tensor, addend: Tensor | None, alpha: Number, beta: Number, out: Tensor | None,
    options: OptionValues,
) -> Tensor:  # fmt: skip
    """Run a call on plain tensors, without autograd and without torch's dispatcher."""
    # Types first: a tensor of 1 is equal to 1 as well.
    plain = type(alpha) is int and type(beta) is int and alpha == 1 and beta == 1
    if not plain:
        check_scalars(op, a, alpha, beta)
    if options[-1] is not None and not isinstance(options[-1], str):
        # A string is as good a key, and parsing it at every call would take longer than the call.
        options = (*options[:-1], Config.of(options[-1]))
    try:
        at_a, at_b = a.data_ptr(), b.data_ptr()
        at_addend = 0 if addend is None else addend.data_ptr()
        at_out = 0 if out is None else out.data_ptr()
        key = (
            op, _layout(a, at_a), _layout(b, at_b), None if addend is None else _layout(addend, at_addend),
            None if out is None else _layout(out, at_out), plain or (alpha == 1, beta == 1, beta == 0), options,
        )  # fmt: skip
    except RuntimeError:
        check_tensors(op, a, b, addend, out)  # says what sparse tensors lack
        raise
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _remember(key, prepare(op, a, b, addend, alpha, beta, out, Options(*options)))
    if beta == 0:
        addend = None
    if out is None:
        result = prepared.empty()
        at_out = result.data_ptr()
    else:
        result = out
        of_a, of_b, of_addend, of_out = prepared.extents
        end = at_out + of_out
        if (
            (at_a < end and at_out < at_a + of_a)
            or (at_b < end and at_out < at_b + of_b)
            or (
                addend is not None
                and addend is not out
                and at_addend < end
                and at_out < at_addend + of_addend
            )
        ):
            _check_overlap(op, out, a, b, addend)
    direct = prepared.direct
    addresses = (at_a, at_b, at_out) if addend is None else (at_a, at_b, at_out, at_addend)
    if direct is None or not direct(addresses, (alpha, beta)):
        _run_plan(prepared, a, right_factor(op, b), result, addend, alpha, beta)
    if out is not None:
        # Autograd must see that a tensor was written behind its back.
        _increment_version((out,))
    return result


def _run_plan(
    prepared: Prepared, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None, alpha: Number, beta: Number
) -> None:
    if prepared.plan is not None:
        prepared.plan(a, b, out, addend, alpha, beta)
    elif out.numel():
        out.copy_(
            reference.gemm(
                a, b, addend, alpha=alpha, beta=beta, out_dtype=prepared.dtype, by_rows=prepared.by_rows
            )
        )


def _is_plain(a: Tensor, b: Tensor, addend: Tensor | None, out: Tensor | None) -> bool:
    """Whether nothing in torch wants to see the call: no mode, no transform, no autocast, no subclass, no gradient."""
    if (
        type(a) not in _PLAIN
        or type(b) not in _PLAIN
        or (addend is not None and type(addend) not in _PLAIN)
        or (out is not None and type(out) not in _PLAIN)
        or _len_torch_dispatch_stack()
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or (out is None and torch.is_autocast_enabled("cuda" if a.is_cuda else "cpu"))
        or a.is_meta
        or b.is_meta
        or a.is_neg()
        or b.is_neg()
        or (addend is not None and addend.is_neg())
        or (out is not None and out.is_neg())
    ):
        return False
    return not torch.is_grad_enabled() or not (
        a.requires_grad
        or b.requires_grad
        or (addend is not None and addend.requires_grad)
        or (out is not None and out.requires_grad)
    )


def needs_dispatcher(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether something in torch wants to see the call: the compiler, autograd, a mode, a transform, a subclass."""
    if is_compiling():
        return True
    if _len_torch_dispatch_stack() or _are_functorch_transforms_active():
        return True
    grad = torch.is_grad_enabled()
    return any(
        tensor is not None
        and (
            type(tensor) not in _PLAIN or (grad and tensor.requires_grad) or tensor.is_neg() or tensor.is_meta
        )
        for tensor in tensors
    )


def check_forward_mode(op: str, tensors: tuple[Tensor | None, ...]) -> None:
    """Forward-mode derivatives are not there: say so, and never return a product without its tangent."""
    if forward_ad._current_level < 0 or is_compiling():
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(f"{op}: no forward-mode derivative; use reverse mode (backward, vjp)")


def lowered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in the type that autocast asks for."""
    return tensor.to(dtype) if tensor.dtype in _AUTOCAST else tensor


def run(
    op: str, a: Tensor, b: Tensor, addend: Tensor | None, alpha: Number, beta: Number, out: Tensor | None,
    options: OptionValues,
) -> Tensor:  # fmt: skip
    """A call as the user made it, by whichever way it has to go."""
    if not is_compiling() and _is_plain(a, b, addend, out):
        return eager(op, a, b, addend, alpha, beta, out, options)
    return _run_seen(op, a, b, addend, alpha, beta, out, Options(*options))


def _run_seen(
    op: str, a: Tensor, b: Tensor, addend: Tensor | None, alpha: Number, beta: Number, out: Tensor | None,
    options: Options,
) -> Tensor:  # fmt: skip
    """A call that something in torch may want to see."""
    check_tensors(op, a, b, addend, out)
    tensors = (a, b, addend, out)
    device = a.device.type
    if out is None and device in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
        lower = torch.get_autocast_dtype(device)
        a, b = lowered(a, lower), lowered(b, lower)
        addend = None if addend is None else lowered(addend, lower)
    check_forward_mode(op, tensors)
    if not needs_dispatcher(tensors):
        return eager(op, a, b, addend, alpha, beta, out, options)
    b = right_factor(op, b)
    check(op, a, b, addend, alpha, beta, out, options)
    out_dtype, *how, config = options
    text = config_text(config)
    if out is None:
        from .ops import gemm

        return gemm(a, b, addend, alpha, beta, out_dtype, *how, text)  # type: ignore[arg-type]  # one, `check` says
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise ValueError(f"{op}: out= does not support gradients, but one of the arguments requires them")
    torch.ops.gemmery.gemm_out(a, b, addend, alpha, beta, *how, text, out)
    return out
