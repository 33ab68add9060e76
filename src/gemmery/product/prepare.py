"""From a call to its launch: its problem, its compiled plan, and the places of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .. import devices
from ..allocation import maker
from ..devices import Device
from ..epilogues.lower import Program
from ..epilogues.results import Results
from ..launch.plan import Plan, make_plan, runs_on
from ..layout import extent_bytes, fold, make_problem
from ..problem import Config, Fusion, Problem
from .cache import Known
from .check import check_memory, check_out, check_scattered, may_be_sum, result_dtype
from .epilogue import output_types, program
from .shape import operand_names
from .spec import Call


def prepare(call: Call, out: Tensor | None) -> Known:
    """The launch of a checked call for which there is a kernel. Nothing is launched."""
    return _ready(call, out) if call.ready else _traced(call, out)


def _plan(call: Call, problem: Problem, tensors: list[Any], numbers: tuple[float, ...]) -> Plan:
    pinned = None if call.options.config is None else Config.of(call.options.config)
    return make_plan(problem, pinned, tensors, numbers)


def _how(call: Call, device: Device) -> dict[str, Any]:
    """The fields of a problem that come from the call's options."""
    options = call.options
    return {
        "precision": options.precision if options.precision in device.target.precisions else "ieee",
        "fast_accum": options.fast_accum,
        # Sums of integers are the same in any order.
        "batch_invariant": options.batch_invariant and call.dtype.is_floating_point,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Products with a ready-made epilogue


def _ready(call: Call, out: Tensor | None) -> Known:
    shape, dtype = call.shape, result_dtype(call.op, call.dtype, call.options.out_dtype)
    if out is not None:
        check_out(call, out, (shape, dtype))
        check_memory(call, out)
    a, b = call.a.matrix, call.b.matrix
    make = maker(shape, dtype, a.device)
    result = make() if out is None else out
    addend = call.inputs[0] if call.inputs and call.beta != 0 else None
    problem, tensors = problem_of_ready(call, result, addend)
    plan = _plan(call, problem, tensors, (call.alpha, call.beta))
    places = (0, 1, -1) if addend is None else (0, 1, -1, 2)
    return Known(
        plan,
        itemgetter(*places),
        None,
        (make,),
        None,
        False,
        _extents((a, b, *call.inputs)),
        extent_bytes(result),
        2,
    )


def problem_of_ready(call: Call, out: Tensor, addend: Tensor | None) -> tuple[Problem, list[Tensor]]:
    """The problem of a product without a traced epilogue, and its launch's tensors."""
    a, b, result, added = _matrices(call.a.matrix, call.b.matrix, out, addend)
    device = _device(call)
    scaled = call.alpha != 1 or (addend is not None and call.beta != 1)
    problem = make_problem(a, b, result, added, scaled=scaled, device=device, **_how(call, device))
    return problem, [a, b, result] if added is None else [a, b, result, added]


def _extents(values: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """See `Known.extents`; empty tensors overlap nothing."""
    sizes = [extent_bytes(x) if isinstance(x, Tensor) else 0 for x in values]
    return tuple([(i, size) for i, size in enumerate(sizes) if size])


def _device(call: Call) -> Device:
    device = devices.current(call.device)
    assert device is not None
    return device


def _matrices(
    a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The operands as (batches of) matrices: a vector a is one row, a vector b one column."""
    vector_a, vector_b = a.dim() == 1, b.dim() == 1
    if addend is not None and (vector_a or vector_b):
        addend = addend.expand(out.shape)
    if vector_b:
        b, out = b.unsqueeze(-1), out.unsqueeze(-1)
        addend = None if addend is None else addend.unsqueeze(-1)
    if vector_a:
        a, out = a.unsqueeze(0), out.unsqueeze(-2)
        # A vector that is added to each row stays one.
        addend = addend if addend is None or addend.dim() == 1 else addend.unsqueeze(-2)
    return a, b, out, addend


# ---------------------------------------------------------------------------------------------------------------------
# Products with a traced epilogue


def _traced(call: Call, out: Tensor | None) -> Known:
    made = program(call)
    check_scattered(call, len(made.outputs) - call.saves)
    results = Results(made, call.shape, _types(call, made), call.summed, call.a.is_ragged)
    if out is not None:
        check_out(call, out, results.whole[0], made.many)
        check_memory(call, out)
    check_fused(call, made)
    tensors = results.allocate(call.device, 1, out)
    problem = problem_of_traced(call, results, tensors, _device(call))
    if not runs_on(problem):
        raise ValueError(
            f"{call.op}: {problem.device.name} has no instructions for {call.dtype}, which an epilogue needs"
        )
    places, numbers = _places(call, results)
    values, flat = call.values, results.flat(tensors)
    given = [values[i] if i >= 0 else flat[~i] for i in places]
    plan = _plan(call, problem, given, tuple([values[i] for i in numbers]))
    plain = results.makers(call.device)[::-1] if results.is_plain else ()
    sum_place = len(values) - len(call.inputs) if may_be_sum(call, flat[0]) else -1
    return Known(
        plan, itemgetter(*places), numbers, plain, None if results.is_plain else results, made.many, _extents(values),
        extent_bytes(flat[0]), sum_place,
    )  # fmt: skip


def results_of(call: Call) -> tuple[list[tuple[tuple[int, ...], torch.dtype] | None], bool]:
    """The shapes and types of a checked call's results, None for reduced rows, and whether they are a tuple."""
    if call.ready:
        return [(call.shape, result_dtype(call.op, call.dtype, call.options.out_dtype))], False
    made = program(call)
    return Results(made, call.shape, _types(call, made), call.summed, call.a.is_ragged).whole, made.many


def _types(call: Call, made: Program) -> tuple[torch.dtype, ...]:
    return tuple(output_types(call, [(x.dtype, x.matrix) for x in made.outputs]))


def problem_of_traced(call: Call, results: Results, tensors: list[Any], device: Device) -> Problem:
    """The problem of a product with a traced epilogue, on a device.

    Args:
        tensors: the results of `Results.allocate`.
    """
    made = results.program
    extras = results.widths(results.extras(call.given, tensors))
    plain, layouts = fold(call.a, call.b, results.main(tensors), extras, device)
    fusion = Fusion(
        made.source, tuple(layouts), len(made.numbers), made.paired, results.reduces, made.main is not None,
        made.ahead, made.both, made.place, made.whole,
    )  # fmt: skip
    return replace(plain, epilogue="fused", fusion=fusion, **_how(call, device))


def _places(call: Call, results: Results) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Places of a launch's tensors, see `Known.pick`, and of its numbers among the call's values."""
    made, before_b = results.program, len(call.a.values)
    before_inputs = before_b + len(call.b.values)
    outer = [i + x.outer_place for x, i in ((call.a, 0), (call.b, before_b)) if x.outer is not None]

    def given(i: int) -> int:
        return outer[i] if i < len(outer) else before_inputs + i - len(outer)

    places = (
        *call.a.places, *[before_b + i for i in call.b.places], ~results.main_place,
        *[given(i) for i in made.inputs], *[~i for i in results.written_places],
    )  # fmt: skip
    return places, (*[given(i) for i in made.numbers], *call.a.number_places)


def check_fused(call: Call, made: Program) -> None:
    """Raises ValueError for a traceable epilogue if no kernel supports it with these operands and options."""
    _check_invariant(call, made)
    _check_pairing(call, made)


def _check_invariant(call: Call, made: Program) -> None:
    sums = any(x.reduced and x.reduced.kind not in ("amax", "amin") for x in made.outputs)
    if call.options.batch_invariant and (sums or made.whole):
        raise ValueError(
            f"{call.op}: batch_invariant=True with an epilogue that sums rows: the order of the sum depends on the "
            "tile; return the matrix, and sum its rows after the product"
        )


def _check_pairing(call: Call, made: Program) -> None:
    """Raises ValueError for halves of columns that the epilogue's kernel cannot read."""
    name = operand_names(call.op)[1]
    if made.paired and call.shape[-1] % (2 * call.b.strip) and call.b.is_packed:
        raise ValueError(
            f"{call.op}: the packed weight has {call.shape[-1]} rows; for an epilogue that halves the columns of the "
            f"product they must be a multiple of {2 * call.b.strip}"
        )
    if call.b.by_blocks and made.paired:
        raise ValueError(
            f"{call.op}: {name} is block-sparse; with an epilogue that halves the product's columns it must be dense"
        )
    if call.b.halves == 1:
        return
    left, right = [x.matrix for x in call.b.parts()]
    if not made.paired:
        raise ValueError(
            f"{call.op}: {name} is a pair, which requires an epilogue that halves the product's columns; "
            f"{getattr(call.function, '__name__', 'this one')} does not"
        )
    if right.stride() != left.stride():
        raise ValueError(
            f"{call.op}: the halves of {name} have the strides {left.stride()} and {right.stride()}; "
            f"a kernel needs the same strides, so copy one to the layout of the other"
        )
