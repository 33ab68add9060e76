"""Products with a traced epilogue: from the call to the launch.

The way of a call is that of `dispatch`, with a function in it: what is known of a call once shapes, strides, types and
the function are is looked up (`Prepared`); what is made anew are outputs, and, for a function that was not seen before,
its trace and its kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import devices, prologue, quick, reference
from .call import (
    Call,
    Factor,
    check,
    dimensions,
    look_at,
    make_call,
    output_types,
    outputs_of,
    unchanged,
)
from .dispatch import (
    Options,
    OptionValues,
    check_forward_mode,
    check_tensor,
    lowered,
    needs_dispatcher,
    operand_names,
)
from .dtypes import accumulator
from .epilogues.check import warn
from .epilogues.function import Epilogue, Held
from .epilogues.identity import value_key
from .epilogues.lower import WHOLE, Program
from .formats.packing import STRIP
from .formats.tensor import QuantizedTensor
from .launch.plan import Plan, make_plan, runs_on
from .layout import make_fused_problem, overlap, overlaps_itself
from .memo import keep
from .operands import Packed, Traced
from .problem import Config, Fusion, Problem
from .programs import lowered_program
from .results import Results, returned


class Functions(NamedTuple):
    """What a user has run on the product's way, as `api.matmul` takes it."""

    epilogue: Any
    args: Sequence[Any]
    prologue: Any = None
    prologue_args: Sequence[Any] = ()


UNCHANGED = Epilogue(unchanged)


def completed(op: str, given: Functions) -> Functions:
    """The functions with an epilogue, if need be one that does nothing; TypeError for arguments of none."""
    if given.prologue is None and given.prologue_args:
        raise TypeError(f"{op}: prologue_args are a prologue's; there is none")
    if given.epilogue is not None:
        return given
    if given.args:
        raise TypeError(f"{op}: args are an epilogue's; there is none")
    return given._replace(epilogue=UNCHANGED)


def product(
    op: str, a: Tensor, b: Factor, bias: Factor | None, functions: tuple[Any, ...], out: Tensor | None,
    options: OptionValues,
) -> Any:  # fmt: skip
    """A product with functions of the user's as the user called it, by whichever way it has to go.

    Args:
        functions: see `Functions`.
        options: see `dispatch.Options`.
    """
    if is_compiling():
        return _compiled(op, a, b, bias, completed(op, Functions(*functions)), out, options)
    if options[-1] is not None and not isinstance(options[-1], str):
        options = (*options[:-1], Config.of(options[-1]))
    if out is None:
        known = quick.run(op, a, b, bias, functions, options)
        if known is not None:
            return known
    given = completed(op, Functions(*functions))
    call = _checked(op, a, b, bias, given, out, options)
    check_forward_mode(op, tuple(call.tensors))
    if needs_dispatcher((out, *call.tensors)):
        from .fused_ops import dispatched

        return dispatched(call.opened(), out)
    return _computed_and_learned(call, (a, b, bias, *given.args), given.epilogue, out, options)


def inside(
    op: str, a: Tensor, b: Factor, bias: Factor | None, epilogue: Epilogue[Any, Any] | Held, args: Sequence[Any],
    options: OptionValues,
) -> Any:  # fmt: skip
    """The same inside an operator, where everything in torch that wanted to see the call has seen it."""
    with torch.no_grad():
        known = quick.run(op, a, b, bias, (epilogue, args, None, ()), options)
        if known is not None:
            return known
        call = _checked(op, a, b, bias, Functions(epilogue, args), None, options)
        return _computed_and_learned(call, (a, b, bias, *args), epilogue, None, options)


def _computed_and_learned(
    call: Call, looked: tuple[Any, ...], epilogue: Any, out: Tensor | None, options: OptionValues
) -> Any:
    """What a call returns; the next one like it goes the short way.

    Args:
        looked: what the user gave, as `quick` looks at it.
    """
    call = call.upwards()
    prepared = _find(call, out)
    result = returned(*_computed(call, prepared, out))
    if prepared is not None and out is None and quick.may_learn(call, epilogue):
        quick.learn(call, looked, options, prepared.results, prepared.plan)
    return result


def run(call: Call, out: Tensor | None) -> Any:
    """What the function of a call returns, for one that has been checked; no gradients are recorded."""
    return returned(*_computed(call, _find(call, out), out))


def _compiled(
    op: str, a: Tensor, b: Factor, bias: Factor | None, given: Functions, out: Tensor | None, options: OptionValues
) -> Any:  # fmt: skip
    from .compiled import compiled

    how = Options(*options)
    if given.prologue is not None:
        a = given.prologue(a.to(accumulator(a.dtype)), *given.prologue_args).to(a.dtype)
    return compiled(
        op, a, b, bias, given.epilogue, given.args, out, how.out_dtype, how._replace(out_dtype=None)
    )


def plan(
    op: str, a: Tensor, b: Factor, bias: Factor | None, functions: tuple[Any, ...], out: Tensor | None,
    options: OptionValues,
) -> Plan | None:  # fmt: skip
    """What `product` with these arguments launches; None where it launches nothing. Products run it, not its `run`."""
    call = _checked(op, a, b, bias, completed(op, Functions(*functions)), out, options)
    if devices.current(call.a.device) is None or 0 in call.shape:
        return None
    return _prepare(call.upwards(), out).plan


def _checked(
    op: str, a: Tensor, b: Factor, bias: Factor | None, given: Functions, out: Tensor | None, options: OptionValues
) -> Call:  # fmt: skip
    how = Options(*options)
    call = make_call(op, a, b, bias, given.epilogue, given.args, how.out_dtype, how._replace(out_dtype=None))
    if given.prologue is not None:
        call = replace(call, prologue=prologue.make(op, call.a, given.prologue, given.prologue_args))
    call = _autocast(call, out)
    check(call)
    return call


def _autocast(call: Call, out: Tensor | None) -> Call:
    """The call with operands and biases in the type that autocast asks for."""
    device = call.a.device.type
    if out is not None or device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return call
    dtype = torch.get_autocast_dtype(device)
    check_autocast(call.op, call.weight, dtype)
    if call.a.dtype != dtype:
        # The prologue comes before the operand is rounded.
        call = call.opened()
    scale, rest = call.inputs[: call.scaled], call.inputs[call.scaled :]
    biases = [lowered(x, dtype) for x in rest[: call.biases]]
    return replace(
        call, a=lowered(call.a, dtype), b=call.b if call.weight is not None else lowered(call.b, dtype),
        right=None if call.right is None else lowered(call.right, dtype),
        inputs=(*scale, *biases, *rest[call.biases :]),
    )  # fmt: skip


def check_autocast(op: str, weight: QuantizedTensor | None, dtype: torch.dtype) -> None:
    """TypeError for a packed weight, which can't be brought to the type that autocast asks for, of another type."""
    if weight is not None and weight.dtype != dtype:
        first, second, _ = operand_names(op)
        raise TypeError(
            f"{op}: autocast brings {first} to {dtype}, and {second} is packed for {weight.dtype}; "
            f"use autocast with that type, or {second}.to({dtype})"
        )


_prepared: dict[Any, Prepared] = {}


def program(call: Call) -> Program:
    """The call's epilogue as a device function; traced when it is met for the first time.

    Raises:
        epilogues.Untraceable: it can't be part of a kernel.
    """
    shape = call.shape
    key = (
        None
        if call.captured.key is None
        else (call.captured.key, call.scaled, call.biases, call.swapped, call.saves)
    )

    @functools.wraps(call.function)
    def function(product: Tensor, *inputs: Any) -> tuple[list[Tensor], bool]:
        return call.apply(product, inputs, rebuilt=True)

    dims = [
        dimensions(call, i, x, shape) if isinstance(x, Tensor) else None for i, x in enumerate(call.inputs)
    ]
    return lowered_program(
        function,
        key,
        call.summed,
        shape,
        call.inputs,
        dims,
        call.a.device,
        narrow=shape[-1] <= WHOLE,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Running


@dataclass(frozen=True)
class Prepared:
    """All that is known of a call once shapes, strides, types and the function are.

    Attributes:
        results: what the program makes; see `Results`.
        prologue: what happens to a before, if anything does.
        plan: what is launched.
    """

    results: Results
    prologue: Program | None
    plan: Plan


def _layout(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.data_ptr() & 15
    if isinstance(value, int | float) and not isinstance(value, bool):
        return type(value)
    return value_key(value)


def _prologue_key(call: Call) -> tuple[Any, ...]:
    if call.prologue is None:
        return ()
    return call.prologue.captured.key, *map(_layout, call.prologue.inputs)


def results_of(call: Call) -> tuple[list[Tensor], bool]:
    """Compute a call: its results, and whether the function returns a tuple. No gradients are recorded."""
    call = call.upwards()
    return _computed(call, _find(call, None), None)


def _computed(call: Call, prepared: Prepared | None, out: Tensor | None) -> tuple[list[Tensor], bool]:
    return _by_reference(call, out) if prepared is None else _launch(call, prepared, out)


def _find(call: Call, out: Tensor | None) -> Prepared | None:
    """What is known of a call, which is compiled if need be; None where nothing is launched."""
    if devices.current(call.a.device) is None or 0 in call.shape:
        return None
    key = None
    inputs = tuple(map(_layout, call.inputs))
    before = _prologue_key(call)
    if call.captured.key is not None and None not in inputs and None not in before:
        key = (
            call.op, call.captured.key, call.biases, _layout(call.a), _layout(call.b), *inputs,
            None if out is None else _layout(out), call.out_dtype, call.options, call.between, call.swapped, call.saves,
            None if call.weight is None else look_at(call.weight)[1],
            None if call.scales is None else (*map(_layout, call.scales[:2]), *call.scales[2:]), *before,
        )  # fmt: skip
    prepared = _prepared.get(key) if key is not None else None
    if prepared is None:
        prepared = _prepare(call, out)
        if key is not None:
            keep(_prepared, key, prepared)
    return prepared


def _by_reference(call: Call, out: Tensor | None) -> tuple[list[Tensor], bool]:
    call, wide = call.opened(), accumulator(call.a.dtype)
    # Where there is no result, there is nothing to unpack.
    b = call.b if call.weight is None or 0 in call.shape else call.weight.unscaled().dequantize().mT
    halves = [
        reference.gemm(call.a, b, out_dtype=wide, by_rows=call.options.batch_invariant)
        for b in (b, call.right) if b is not None
    ]  # fmt: skip
    results, many = outputs_of(call, halves[0] if len(halves) == 1 else torch.cat(halves, dim=-1))
    if call.a.device.type == "cpu":
        warn(call)
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
    _check_overlap(call, out)


def _check_overlap(call: Call, out: Tensor) -> None:
    for name, tensor in call.named_tensors:
        if overlap(out, tensor):
            raise ValueError(f"{call.op}: out and {name} share memory")


def _check_pairing(call: Call, made: Program) -> None:
    """ValueError for a pair of factors that the epilogue's kernel can't read."""
    right = call.right
    if call.weight is not None and made.paired and call.shape[-1] % (2 * STRIP):
        raise ValueError(
            f"{call.op}: the packed weight has {call.shape[-1]} rows; for an epilogue that halves the columns of the "
            f"product they must be a multiple of {2 * STRIP}"
        )
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
    before = None if call.prologue is None else call.prologue.program(call.a)
    shape = call.shape
    types = output_types(call, [(x.dtype, x.matrix) for x in made.outputs])
    results = Results(made, shape, tuple(types), call.summed)
    if out is not None:
        _check_out(call, out, results.whole, made.many)
    options = call.options
    sums = any(x.reduced and x.reduced.kind not in ("amax", "amin") for x in made.outputs)
    if options.batch_invariant and (sums or made.whole):
        raise ValueError(
            f"{call.op}: batch_invariant=True with an epilogue that sums rows: the order of the sum depends on the tile"
        )
    _check_pairing(call, made)
    device = devices.current(call.a.device)
    assert device is not None
    tensors = results.allocate(call.a.device, 1, out)
    main = results.main(tensors)
    own = results.extras(call.inputs, tensors)
    read, numbers = _of_prologue(call, before)
    widths = [(x, x.shape[-1] if x.dim() and x.shape[-1] != 1 else call.a.shape[-1]) for x in read]
    fusion = Fusion(
        made.source,
        (),
        len(made.numbers),
        made.paired,
        results.reduces,
        made.main is not None,
        made.ahead,
        made.whole,
    )
    problem = make_fused_problem(
        call.a, call.b, main, [*results.widths(own), *widths], len(own), fusion,
        fast_accum=options.fast_accum, batch_invariant=options.batch_invariant, device=device,
        precision=options.precision if options.precision in device.target.precisions else "ieee",
        scales=call.scales, half_stride=call.between,
        prologue=None if before is None else Traced(before.source, (), len(before.numbers)),
    )  # fmt: skip
    if call.weight is not None:
        problem = packed(problem, call.weight)
    if not runs_on(problem):
        raise ValueError(
            f"{call.op}: {device.name} has no instructions for {call.a.dtype}, which an epilogue needs"
        )
    pinned = None if options.config is None else Config.of(options.config)
    tensors = _in_order(call, main, own, read)
    return Prepared(
        results, before, make_plan(problem, pinned, tensors, (*results.numbers(call.inputs), *numbers))
    )


def _in_order(call: Call, main: Tensor, own: Sequence[Tensor], read: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a launch, in the order of `Problem.layouts`."""
    b, belonging = right_tensors(call)
    if call.scales is not None:
        return [call.a, belonging[0], b, belonging[1], main, *own]
    return [call.a, *read, b, *belonging, main, *own]


def packed(problem: Problem, weight: QuantizedTensor) -> Problem:
    """A problem with a packed weight in the place of its stand-in."""
    shifts = "zeros" if weight.zeros is not None else "offsets" if weight.offsets is not None else ""
    wide = weight.scales is not None and weight.scales.dtype == torch.float32
    tensors = [x for x in (weight.words, weight.scales, weight.zeros, weight.offsets) if x is not None]
    b = Packed.of(
        weight.dtype, weight.format.name, weight.format.bits, weight.group_size, shifts, wide, N=problem.N, K=problem.K,
        steps=problem.b.steps, matrices=weight.shape[:-2].numel(), aligned=[x.data_ptr() % 16 == 0 for x in tensors],
    )  # fmt: skip
    return replace(problem, b=b)


def right_tensors(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What a kernel reads of the second factor, and what belongs to it, or to both factors."""
    weight = call.weight
    if weight is None:
        return call.b, () if call.scales is None else call.scales[:2]
    shared = (weight.scales, weight.zeros if weight.offsets is None else weight.offsets)
    return weight.words, tuple([x for x in shared if x is not None])


def _of_prologue(call: Call, made: Program | None) -> tuple[tuple[Tensor, ...], tuple[float, ...]]:
    """The tensors and the numbers that a call's prologue takes, in its program's order."""
    if call.prologue is None or made is None:
        return (), ()
    inputs = call.prologue.inputs
    return tuple([inputs[i] for i in made.inputs]), tuple([inputs[i] for i in made.numbers])


def _launch(call: Call, prepared: Prepared, out: Tensor | None) -> tuple[list[Tensor], bool]:
    results, plan = prepared.results, prepared.plan
    if out is not None:
        _check_overlap(call, out)
    tensors = results.allocate(call.a.device, plan.slots if results.reduces else 1, out)
    read, numbers = _of_prologue(call, prepared.prologue)
    given = _in_order(call, results.main(tensors), results.extras(call.inputs, tensors), read)
    plan.run(given, (*results.numbers(call.inputs), *numbers))
    if out is not None:
        # Autograd must see that a tensor was written behind its back.
        torch._C._increment_version((out,))
        return [out], False
    return results.apart(results.finish(tensors)), results.program.many
