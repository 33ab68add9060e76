"""Products with a traced epilogue: from the call to the launch.

The way of a call is that of `dispatch`, with a function in it: what is known of a call once shapes, strides, types and
the function are is looked up (`Prepared`); what is made anew are outputs, and, for a function that was not seen before,
its trace and its kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import devices, reference
from .call import Call, Factor, check, dimensions, input_name, make_call, output_types, outputs_of
from .dispatch import Options, OutTypes, check_tensor, lowered, needs_dispatcher, operand_names
from .epilogues.lower import Program
from .layout import make_fused_problem, overlap, overlaps_itself
from .plan import Plan, make_plan, runs_on
from .problem import Config, Fusion, accumulator
from .programs import keep, lowered_program
from .results import Results


def product(
    op: str, a: Tensor, b: Factor, bias: Factor | None, epilogue: Any, args: Sequence[Any], out: Tensor | None,
    out_dtype: OutTypes, options: Options,
) -> Any:  # fmt: skip
    """A product with an epilogue as the user called it, by whichever way it has to go."""
    if epilogue is None:
        raise TypeError(f"{op}: args are an epilogue's; there is none")
    if is_compiling():
        from .fused_ops import compiled

        return compiled(op, a, b, bias, epilogue, args, out, out_dtype, options)
    call = _autocast(make_call(op, a, b, bias, epilogue, args, out_dtype, options), out)
    check(call)
    if needs_dispatcher((out, *call.tensors)):
        from .fused_ops import dispatched

        return dispatched(call, epilogue, out)
    return run(call, out)


def plan(
    op: str, a: Tensor, b: Factor, bias: Factor | None, epilogue: Any, args: Sequence[Any], out: Tensor | None,
    out_dtype: OutTypes, options: Options,
) -> Plan | None:  # fmt: skip
    """What `product` with these arguments launches; None where it launches nothing. Products run it, not its `run`."""
    call = make_call(op, a, b, bias, epilogue, args, out_dtype, options)
    check(call)
    if devices.current(call.a.device) is None or 0 in call.shape:
        return None
    return _prepare(call.upwards(), out).plan


def _autocast(call: Call, out: Tensor | None) -> Call:
    """The call with operands and biases in the type that autocast asks for."""
    device = call.a.device.type
    if out is not None or device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return call
    dtype = torch.get_autocast_dtype(device)
    biases = [lowered(x, dtype) for x in call.inputs[: call.biases]]
    return replace(
        call, a=lowered(call.a, dtype), b=lowered(call.b, dtype),
        right=None if call.right is None else lowered(call.right, dtype),
        inputs=(*biases, *call.inputs[call.biases :]),
    )  # fmt: skip


_prepared: dict[Any, Prepared] = {}


def program(call: Call) -> Program:
    """The call's epilogue as a device function; traced when it is met for the first time.

    Raises:
        epilogues.Untraceable: it can't be part of a kernel.
    """
    shape = call.shape
    key = None if call.captured.key is None else (call.captured.key, call.biases, call.swapped, call.saves)

    @functools.wraps(call.function)
    def function(product: Tensor, *inputs: Any) -> tuple[list[Tensor], bool]:
        return call.apply(product, inputs, rebuilt=True)

    dims = [
        dimensions(call, i, x, shape) if isinstance(x, Tensor) else None for i, x in enumerate(call.inputs)
    ]
    return lowered_program(function, key, accumulator(call.a.dtype), shape, call.inputs, dims, call.a.device)


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
    if devices.current(call.a.device) is None or 0 in call.shape:
        return _by_reference(call, out)
    key, call = None, call.upwards()
    if call.captured.key is not None:
        key = (
            call.op, call.captured.key, call.biases, _layout(call.a), _layout(call.b), *map(_layout, call.inputs),
            None if out is None else _layout(out), call.out_dtype, call.options, call.between, call.swapped, call.saves,
        )  # fmt: skip
    prepared = _prepared.get(key) if key is not None else None
    if prepared is None:
        prepared = _prepare(call, out)
        if key is not None:
            keep(_prepared, key, prepared)
    return _launch(call, prepared, out)


def _by_reference(call: Call, out: Tensor | None) -> tuple[list[Tensor], bool]:
    wide = accumulator(call.a.dtype)
    halves = [
        reference.gemm(call.a, b, out_dtype=wide, by_rows=call.options.batch_invariant)
        for b in (call.b, call.right) if b is not None
    ]  # fmt: skip
    results, many = outputs_of(call, halves[0] if len(halves) == 1 else torch.cat(halves, dim=-1))
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
    first, second, _ = operand_names(op)
    others = [(first, call.a), (second, call.b), (second, call.right)]
    others += [(input_name(call, i), x) for i, x in enumerate(call.inputs)]
    for name, tensor in others:
        if isinstance(tensor, Tensor) and overlap(out, tensor):
            raise ValueError(f"{op}: out and {name} share memory")


def _check_halves(call: Call, made: Program) -> None:
    right = call.right
    if right is None:
        return
    name = operand_names(call.op)[1]
    if not made.paired:
        raise ValueError(
            f"{call.op}: {name} is in two parts, which takes an epilogue that halves the product's columns; "
            f"{getattr(call.function, '__name__', 'this one')} does not"
        )
    if right.stride() != call.b.stride():
        raise ValueError(
            f"{call.op}: the halves of {name} have the strides {call.b.stride()} and {right.stride()}; "
            f"a kernel reads both in one way, so copy one to the other's layout"
        )


def _prepare(call: Call, out: Tensor | None) -> Prepared:
    made = program(call)
    shape = call.shape
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
    _check_halves(call, made)
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
