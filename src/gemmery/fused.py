"""Products with a traced epilogue: from the call to the launch.

The way of a call is that of `dispatch`, with a function in it: what is known of a call once shapes, strides, types and
the function are is looked up (`Prepared`); what is made anew are outputs, and, for a function that was not seen before,
its trace and its kernel.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import devices, reference
from .dispatch import (
    Options,
    OutTypes,
    check_scalars,
    check_tensor,
    check_tensors,
    lowered,
    needs_dispatcher,
    operand_names,
    result_dtype,
    result_shape,
    right_factor,
)
from .epilogues.identity import Captured, capture
from .epilogues.lower import Program, lower
from .epilogues.trace import Number, Shape, trace
from .layout import make_fused_problem, overlap, overlaps_itself
from .plan import PLANS, Plan, make_plan, runs_on
from .problem import Config, Fusion, accumulator
from .results import Results


@dataclass(frozen=True)
class Call:
    """A product with an epilogue as it is to be computed.

    Attributes:
        function: the epilogue.
        captured: what it is, and the tensors that it takes from outside.
        inputs: its arguments after the product, those tensors behind them; plain Python values among them.
        biased: whether the first of them is added to the product before the function sees it.
        between: elements from the left half of b's columns to the right one, where these are two matrices; else 0.
        saves: whether the product that the function sees is a last result, in the operands' type, for the gradient.
    """

    op: str
    a: Tensor
    b: Tensor
    function: Callable[..., Any]
    captured: Captured
    inputs: tuple[Any, ...]
    biased: bool
    out_dtype: OutTypes
    options: Options
    between: int = 0
    saves: bool = False

    @property
    def given(self) -> tuple[Any, ...]:
        """The function's own arguments, as the caller gave them."""
        end = len(self.inputs) - len(self.captured.tensors)
        return self.inputs[int(self.biased) : end]

    def apply(self, product: Tensor, inputs: Sequence[Any], rebuilt: bool) -> tuple[list[Tensor], bool]:
        """The function's results on a product, in torch, and whether it returned a tuple.

        Args:
            rebuilt: use the last inputs in the place of the tensors that the function captured.
        """
        own = len(inputs) - len(self.captured.tensors)
        function, values = self.function, list(inputs[:own])
        if rebuilt and self.captured.tensors:
            function = self.captured.rebuild(list(inputs[own:]))
        if self.biased:
            product, values = product + values[0], values[1:]
        returned = function(product, *values)
        many = isinstance(returned, tuple | list)
        results = list(returned) if isinstance(returned, tuple | list) else [returned]
        return results + ([product.to(self.a.dtype)] if self.saves else []), many


def outputs_of(call: Call, product: Tensor, inputs: Sequence[Any] | None = None) -> tuple[list[Tensor], bool]:
    """What the function makes of a product in torch, cast as the kernel would; and whether it returned a tuple."""
    results, many = call.apply(product, call.inputs if inputs is None else inputs, inputs is not None)
    rank = product.dim()
    types = output_types(call, [(x.dtype, x.dim() == rank and x.shape[-1] != 1) for x in results])
    return [x.to(dtype) for x, dtype in zip(results, types, strict=True)], many


def output_types(call: Call, outputs: Sequence[tuple[torch.dtype, bool]]) -> list[torch.dtype]:
    """The types of results, given those that the function leaves them in and which are matrices.

    What is still in the accumulator's type becomes the type of a product, or the one that was asked for; reduced rows,
    and what the function has cast, stay.
    """
    if call.saves:
        return [*output_types(replace(call, saves=False), outputs[:-1]), call.a.dtype]
    wide = accumulator(call.a.dtype)
    asked = call.out_dtype if isinstance(call.out_dtype, tuple) else (call.out_dtype,) * len(outputs)
    if len(asked) != len(outputs):
        raise ValueError(
            f"{call.op}: out_dtype names {len(asked)} types; the epilogue returns {len(outputs)}"
        )
    default = result_dtype(call.op, call.a, call.b, None)
    # An epilogue may make numbers of any kind from integers.
    natural = {torch.int32: torch.int32}.get(default, default)
    types = []
    for (dtype, matrix), choice in zip(outputs, asked, strict=True):
        kept = natural if dtype == wide and matrix else dtype
        types.append(choice if choice is not None and (matrix or isinstance(call.out_dtype, tuple)) else kept)
    return types


def product(
    op: str, a: Tensor, b: Tensor, bias: Tensor | None, epilogue: Any, args: Sequence[Any], out: Tensor | None,
    out_dtype: OutTypes, options: Options,
) -> Any:  # fmt: skip
    """A product with an epilogue as the user called it, by whichever way it has to go."""
    if epilogue is None:
        raise TypeError(f"{op}: args are an epilogue's; there is none")
    if is_compiling():
        from .fused_ops import compiled

        return compiled(op, a, b, bias, epilogue, args, out, out_dtype, options)
    a, b, bias = _autocast(a, b, bias, out)
    call = make_call(op, a, b, bias, epilogue, args, out_dtype, options)
    if needs_dispatcher((call.a, call.b, out, *[x for x in call.inputs if isinstance(x, Tensor)])):
        from .fused_ops import dispatched

        return dispatched(call, epilogue, out)
    return run(call, out)


def plan(
    op: str, a: Tensor, b: Tensor, bias: Tensor | None, epilogue: Any, args: Sequence[Any], out: Tensor | None,
    out_dtype: OutTypes, options: Options,
) -> Plan | None:  # fmt: skip
    """What `product` with these arguments launches; None where it launches nothing. Products run it, not its `run`."""
    call = make_call(op, a, b, bias, epilogue, args, out_dtype, options)
    if devices.current(call.a.device) is None or 0 in result_shape(call.op, call.a, call.b):
        return None
    return _prepare(call, out).plan


def _autocast(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None) -> Any:
    device = a.device.type if isinstance(a, Tensor) else ""
    if out is not None or device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return a, b, bias
    lower = torch.get_autocast_dtype(device)
    return tuple(lowered(x, lower) for x in (a, b, bias))


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def make_call(
    op: str, a: Tensor, b: Tensor, bias: Tensor | None, function: Any, args: Sequence[Any], out_dtype: OutTypes,
    options: Options,
) -> Call:  # fmt: skip
    """A call from a user's arguments, checked as far as shapes go.

    Raises:
        ValueError: shapes or devices do not fit.
        TypeError: an argument is of no kind that an epilogue can take.
    """
    if isinstance(args, Tensor) or not isinstance(args, tuple | list):
        raise TypeError(
            f"{op}: args is a {type(args).__name__}; it must be a tuple of the epilogue's arguments"
        )
    check_tensors(op, a, b, bias, None)
    b = right_factor(op, b)
    captured = capture(getattr(function, "__gemmery_epilogue__", function))
    inputs = (*([] if bias is None else [bias]), *args, *captured.tensors)
    call = Call(
        op, a, b, getattr(function, "__gemmery_epilogue__", function), captured, inputs, bias is not None, out_dtype,
        options,
    )  # fmt: skip
    check(call)
    return call


def check(call: Call) -> None:
    """ValueError or TypeError unless a call's tensors fit each other."""
    op, a, b = call.op, call.a, call.b
    shape = result_shape(op, a, b)
    first, second, _ = operand_names(op)
    if a.dim() < 2 or b.dim() < 2:
        raise ValueError(f"{op}: with an epilogue, {first} and {second} must be matrices, or batches of them")
    result_dtype(op, a, b, None)
    if a.device != b.device:
        raise ValueError(
            f"{op}: {first} is on {a.device} and {second} on {b.device}; they must be on one device"
        )
    for i, value in enumerate(call.inputs):
        if isinstance(value, Tensor):
            check_tensor(op, _input_name(call, i), value)
            if value.device != a.device and value.dim():
                raise ValueError(
                    f"{op}: {_input_name(call, i)} is on {value.device} and {first} on {a.device}"
                )
            dimensions(call, i, value, shape)
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"{op}: {_input_name(call, i)} is {value}; integers must fit in 64 bits")
        elif isinstance(value, int | float) and not isinstance(value, bool) and a.dtype == torch.float64:
            check_scalars(op, a, value, 1)


def _input_name(call: Call, i: int) -> str:
    if call.biased and i == 0:
        return "bias"
    own = len(call.given)
    position = i - int(call.biased)
    return (
        f"args[{position}]"
        if position < own
        else f"a tensor of the epilogue's closure (number {position - own})"
    )


def dimensions(call: Call, i: int, tensor: Tensor, shape: tuple[int, ...]) -> tuple[str, ...]:
    """What a tensor's dimensions are in the product's, or ValueError."""
    if tensor.dim() > len(shape):
        raise ValueError(
            f"{call.op}: {_input_name(call, i)} is {tuple(tensor.shape)}; the product is {shape}"
        )
    names: list[str] = []
    N = shape[-1]
    for place in range(1, tensor.dim() + 1):
        size, full = tensor.shape[-place], shape[-place]
        if size == 1:
            names.append("1")
        elif place == 1:
            # Compared one by one: under torch.compile sizes are symbols.
            names.append("N" if size == N else "2N" if size == 2 * N else "N/2" if 2 * size == N else "")
        else:
            names.append(("M" if place == 2 else f"b{len(shape) - place}") if size == full else "")
        if not names[-1]:
            raise ValueError(
                f"{call.op}: {_input_name(call, i)} is {tuple(tensor.shape)}; it must broadcast to the product, "
                f"{shape}, or to that with half or twice the columns"
            )
    return tuple(names[::-1])


# ---------------------------------------------------------------------------------------------------------------------
# Programs


_programs: dict[Any, Program] = {}
_prepared: dict[Any, Prepared] = {}
_lock = threading.Lock()

V = TypeVar("V")


def keep(kept: dict[Any, V], key: Any, value: V) -> V:
    """The value, which is found again in `kept`; half of what is kept goes when there is too much of it."""
    with _lock:
        if len(kept) >= PLANS:
            for stale in list(kept)[: PLANS // 2]:
                del kept[stale]
        kept[key] = value
    return value


def program(call: Call) -> Program:
    """The call's epilogue as a device function; traced when it is met for the first time.

    Raises:
        epilogues.Untraceable: it can't be part of a kernel.
    """
    shape = result_shape(call.op, call.a, call.b)
    key = None if call.captured.key is None else (call.captured.key, call.biased, call.saves)

    @functools.wraps(call.function)
    def function(product: Tensor, *inputs: Any) -> tuple[list[Tensor], bool]:
        return call.apply(product, inputs, rebuilt=True)

    dims = [
        dimensions(call, i, x, shape) if isinstance(x, Tensor) else None for i, x in enumerate(call.inputs)
    ]
    return lowered_program(function, key, accumulator(call.a.dtype), shape, call.inputs, dims, call.a.device)


def lowered_program(
    function: Callable[..., tuple[list[Tensor], bool]], key: Any, dtype: torch.dtype, shape: tuple[int, ...],
    inputs: Sequence[Any], dims: Sequence[tuple[str, ...] | None], device: torch.device,
) -> Program:  # fmt: skip
    """A function of a block and other inputs as a device function; memoised by `key`, unless that is None.

    Args:
        function: gives its results and whether it returns a tuple.
        dtype, shape: of what it is given first.
        dims: of the inputs that are tensors; see `epilogues.trace.Shape`.
    """
    rank, odd = len(shape), shape[-1] % 2 == 1
    arguments: list[Any] = [Shape(dtype, (*(f"b{i}" for i in range(rank - 2)), "M", "N"))]
    places: list[int] = []
    constants: dict[int, Any] = {}
    for i, (value, its_dims) in enumerate(zip(inputs, dims, strict=True)):
        if its_dims is not None:
            arguments.append(Shape(value.dtype, its_dims))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            arguments.append(Number(isinstance(value, int)))
        else:
            constants[i] = value
            continue
        places.append(i)
    if key is not None:
        key = (key, tuple(arguments), tuple(places), repr(constants), odd, device.type)
        found: Program | None = _programs.get(key)
        if found is not None:
            return found
    many = False

    @functools.wraps(function)
    def traced(product: Tensor, *values: Any) -> tuple[Tensor, ...]:
        nonlocal many
        given = [constants.get(i) for i in range(len(inputs))]
        for place, value in zip(places, values, strict=True):
            given[place] = value
        results, many = function(product, *given)
        return tuple(results)

    graph, sizes = trace(traced, arguments, rank, odd, device)
    made = lower(graph, arguments, sizes, getattr(function, "__name__", type(function).__name__))
    # Arguments are counted from the product; inputs from 0, constants among them.
    made = replace(
        made, inputs=tuple(places[i - 1] for i in made.inputs), numbers=tuple(places[i - 1] for i in made.numbers),
        many=many,
    )  # fmt: skip
    return made if key is None else keep(_programs, key, made)


# ---------------------------------------------------------------------------------------------------------------------
# Running


@dataclass(frozen=True)
class Prepared:
    """All that is known of a call once shapes, strides, types and the function are.

    Attributes:
        results: what the program makes; see `Results`.
        plan: what is launched.
    """

    results: Results
    plan: Plan


def _layout(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.data_ptr() & 15
    if isinstance(value, int | float) and not isinstance(value, bool):
        return type(value)
    return type(value), repr(value)


def run(call: Call, out: Tensor | None = None) -> Any:
    """Compute a call: a tensor, or a tuple of them where the function returns one. No gradients are recorded."""
    results, many = results_of(call, out)
    return tuple(results) if many else results[0]


def results_of(call: Call, out: Tensor | None = None) -> tuple[list[Tensor], bool]:
    """Compute a call: its results, and whether the function returns a tuple."""
    if devices.current(call.a.device) is None or 0 in result_shape(call.op, call.a, call.b):
        return _by_reference(call, out)
    key = None
    if call.captured.key is not None:
        key = (
            call.op, call.captured.key, call.biased, _layout(call.a), _layout(call.b), *map(_layout, call.inputs),
            None if out is None else _layout(out), call.out_dtype, call.options, call.between, call.saves,
        )  # fmt: skip
    prepared = _prepared.get(key) if key is not None else None
    if prepared is None:
        prepared = _prepare(call, out)
        if key is not None:
            keep(_prepared, key, prepared)
    return _launch(call, prepared, out)


def _by_reference(call: Call, out: Tensor | None) -> tuple[list[Tensor], bool]:
    product = reference.gemm(
        call.a, call.b, out_dtype=accumulator(call.a.dtype), by_rows=call.options.batch_invariant
    )
    results, many = outputs_of(call, product)
    if out is not None:
        _check_out(call, out, [(tuple(x.shape), x.dtype) for x in results], many)
        results = [out.copy_(results[0])]
    return results, many


def _check_out(call: Call, out: Tensor, outputs: Sequence[Any], many: bool) -> None:
    op = call.op
    check_tensor(op, "out", out)
    if many or outputs[0] is None:
        raise ValueError(f"{op}: out= is for epilogues that return one matrix")
    shape, dtype = outputs[0]
    if tuple(out.shape) != shape:
        raise ValueError(f"{op}: out is {tuple(out.shape)}; the result is {shape}")
    if out.dtype != dtype:
        raise TypeError(f"{op}: out is {out.dtype}; the result is {dtype}")
    if out.device != call.a.device:
        raise ValueError(f"{op}: out is on {out.device}; the result is on {call.a.device}")
    if overlaps_itself(out):
        raise ValueError(f"{op}: out's elements overlap one another")
    for i, tensor in enumerate((call.a, call.b, *call.inputs)):
        if isinstance(tensor, Tensor) and overlap(out, tensor):
            name = operand_names(op)[i] if i < 2 else _input_name(call, i - 2)
            raise ValueError(f"{op}: out and {name} share memory")


def _prepare(call: Call, out: Tensor | None) -> Prepared:
    made = program(call)
    shape = result_shape(call.op, call.a, call.b)
    types = output_types(call, [(x.dtype, x.reduced is None) for x in made.outputs])
    results = Results(made, shape, tuple(types), accumulator(call.a.dtype))
    if out is not None:
        _check_out(call, out, results.matrices, made.many)
    options = call.options
    sums = any(x.reduced and x.reduced.kind not in ("amax", "amin") for x in made.outputs)
    if options.batch_invariant and sums:
        raise ValueError(
            f"{call.op}: batch_invariant=True with an epilogue that sums rows: the order of the sum depends on the tile"
        )
    device = devices.current(call.a.device)
    assert device is not None
    tensors = results.allocate(call.a.device, 1, out)
    main = results.main(tensors)
    extras = results.extras(call.inputs, tensors)
    problem = make_fused_problem(
        call.a, call.b, main, results.widths(extras),
        Fusion(made.source, (), len(made.numbers), made.paired, call.between, results.reduces, made.main is not None),
        fast_accum=options.fast_accum, batch_invariant=options.batch_invariant, device=device,
        precision=options.precision if options.precision in device.target.precisions else "ieee",
    )  # fmt: skip
    if not runs_on(problem):
        raise ValueError(
            f"{call.op}: {device.name} has no instructions for {call.a.dtype}, which an epilogue needs"
        )
    pinned = None if options.config is None else Config.of(options.config)
    plan = make_plan(problem, pinned, call.a, call.b, main, extras, results.numbers(call.inputs))
    return Prepared(results, plan)


def _launch(call: Call, prepared: Prepared, out: Tensor | None) -> tuple[list[Tensor], bool]:
    results, plan = prepared.results, prepared.plan
    tensors = results.allocate(call.a.device, plan.slots if results.reduces else 1, out)
    extras = results.extras(call.inputs, tensors)
    plan.run_fused(call.a, call.b, results.main(tensors), extras, results.numbers(call.inputs))
    if out is not None:
        # Autograd must see that a tensor was written behind its back.
        torch._C._increment_version((out,))
        return [out], False
    return results.apart(results.finish(tensors)), results.program.many
