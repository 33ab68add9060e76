"""The results of a checked call: launched and remembered, or computed by torch where there is no kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import devices, reference
from ..operands import DenseOperand
from . import cache
from .check import check_memory, check_out, check_scattered, result_dtype
from .epilogue import outputs_of
from .fusible import warn
from .prepare import prepare
from .seen import autocast_dtype
from .spec import Call


def compute(call: Call, out: Tensor | None, key: Any = None) -> tuple[list[Tensor], bool]:
    """The results of a checked call, and whether they are a tuple. No gradients are recorded, and no mode is active.

    Args:
        key: the key under which it is remembered, if it is.
    """
    call = replace(call, b=call.b.loadable())
    # If there is no group, all rows are after the groups.
    is_empty = 0 in call.shape or 0 in call.a.matrix.shape[:-2]
    if devices.current(call.device) is None or is_empty:
        if autocast_dtype(call.device) is None:
            return _by_reference(call, out)
        # Operands have the type that autocast asks for. The reference widens them, which autocast would undo.
        with torch.autocast(call.device.type, enabled=False):
            return _by_reference(call, out)
    call = call.ordered()
    known = prepare(call, out)
    if key is not None:
        cache.remember(key, known)
    values = call.values
    addresses = [x.data_ptr() if isinstance(x, Tensor) else x for x in values]
    return cache.launch(known, addresses, values, (call.alpha, call.beta), out), known.many and out is None


def inside(call: Call, out: Tensor | None = None) -> tuple[list[Tensor], bool]:
    """The same inside an operator: a call like an earlier one is launched at once."""
    call = replace(call, b=call.b.loadable())
    with torch.no_grad():
        values = call.values
        given = values if out is None else (*values, out)
        looked = None if call.captured.key is None else cache.look(given, False)
        if looked is None:
            return compute(call, out)
        scalars = call.alpha == 1, call.beta == 1, call.beta == 0
        how = call.a.form, call.b.form, call.biases, call.saves, call.options, out is None
        key = (call.op, call.captured.number, scalars, *how, *looked[1])
        known = cache.find(key)
        if known is None or (out is not None and cache.may_overlap(known, looked[0], given, out)):
            return compute(call, out, key)
        return cache.launch(known, looked[0], values, (call.alpha, call.beta), out), known.many


def _by_reference(call: Call, out: Tensor | None) -> tuple[list[Tensor], bool]:
    call, by_rows = call.prologue_applied(), call.options.batch_invariant and call.dtype.is_floating_point
    # An empty result needs no unpacking.
    is_empty = 0 in call.shape and call.b.halves == 1
    b = DenseOperand(call.b.matrix) if is_empty else call.b
    if call.ready:
        dtype = result_dtype(call.op, call.dtype, call.options.out_dtype)
        if out is not None:
            check_out(call, out, (call.shape, dtype))
            check_memory(call, out)
        addend = call.inputs[0] if call.inputs else None
        made = reference.gemm(
            call.a.in_torch(),
            b.in_torch(),
            addend,
            alpha=call.alpha,
            beta=call.beta,
            out_dtype=dtype,
            by_rows=by_rows,
        )
        return [made if out is None else out.copy_(made)], False
    results, many = outputs_of(call, call.a.multiplied(b, call.summed, by_rows))
    check_scattered(call, len(results) - call.saves)
    results = call.a.finished(results)
    if call.device.type == "cpu":
        warn(call)
    if out is not None:
        check_out(call, out, (tuple(results[0].shape), results[0].dtype), many)
        check_memory(call, out)
        return [out.copy_(results[0])], False
    return results, many
