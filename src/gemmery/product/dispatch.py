"""A checked call in eager mode that a part of torch must see: as the operator, or in two steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import devices
from ..dtensors import is_sharded
from ..epilogues.function import hold
from ..epilogues.identity import Captured
from ..epilogues.results import returned
from ..operands import DenseOperand, Operand, rebuild
from .check import check_out, check_scattered, result_dtype
from .compute import inside
from .epilogue import outputs_of
from .flat import arguments_of
from .fusible import warn
from .gradients import Product, plain_product
from .seen import (
    check_forward_mode,
    in_transform,
    is_differentiated,
    needs_dispatcher,
    wants_gradient,
)
from .spec import Call, unchanged

if TYPE_CHECKING:
    from .sharded import Sharding


def dispatched(call: Call, out: Tensor | None, key: Any = None) -> Any:
    """A checked call that a part of torch must see, outside the compiler.

    Args:
        key: the key under which a product of DTensors is remembered; None if it cannot be.
    """
    tensors = call.tensors
    check_forward_mode(call.op, tensors)
    if is_sharded(tensors if out is None else (out, *tensors)):
        return _dispatched_parts(call, out, key)
    grad = wants_gradient(tensors)
    if out is not None:
        return _dispatched_out(call, out)
    if grad and not (call.a.is_differentiable and call.b.is_differentiable):
        raise TypeError(
            f"{call.op}: no gradient for {call.dtype} operands, but one of the arguments requires it"
        )
    if call.ready or (call.function is unchanged and not is_differentiated()):
        return whole(call)
    if (grad and not runs_again(call.captured, call.device)) or is_differentiated():
        if call.device.type == "cpu" and call.captured.key is not None:
            warn(call)
        return unfused(call)
    held = hold(call.captured)
    results = torch.ops.gemmery.product(*arguments_of(call, held.name), grad)
    return returned(list(results)[: len(results) - grad], held.many)


def runs_again(captured: Captured, device: torch.device) -> bool:
    """Whether a gradient can run a function again: unchanged, and in a kernel without random numbers."""
    return captured.key is not None and devices.current(device) is not None


def whole(call: Call, is_compiled: bool = False) -> Any:
    """A call without a user's function, as one operator; written so that torch.compile can trace it."""
    a, b, inputs = call.a, call.b, list(call.inputs)
    vector_a, vector_b = a.matrix.dim() == 1, b.matrix.dim() == 1
    if vector_a or vector_b:
        # A vector a is one row, a vector b one column; the operator has matrices.
        if inputs:
            addend = inputs[0].expand(call.shape)
            addend = addend.unsqueeze(-1) if vector_b else addend
            inputs = [addend.unsqueeze(-2) if vector_a and addend.dim() > 1 else addend]
        a = DenseOperand(a.matrix.unsqueeze(0)) if vector_a else a
        b = DenseOperand(b.matrix.unsqueeze(-1)) if vector_b else b
        call = replace(call, op="matmul", a=a, b=b, inputs=tuple(inputs))
    if in_transform() and call.ready:
        tensors, *flat = arguments_of(call, "")
        made = Product.apply(tuple(flat), *tensors)  # type: ignore[no-untyped-call]
    else:
        (made,) = torch.ops.gemmery.product(*arguments_of(call, "", is_compiled), False)
    made = made.squeeze(-1) if vector_b else made
    return made.squeeze(-2 if not vector_b else -1) if vector_a else made


def unfused(call: Call) -> Any:
    """A product in two steps: the bare product, which is an operator, then the function, in torch.

    The function runs once, as the user wrote it, and its gradient is torch's. Gradients are computed this way if there
    is no kernel, if the function cannot be run again unchanged, and if torch.func differentiates.
    """
    call = call.prologue_applied()
    how, a = call.options._replace(out_dtype=call.wide), call.a.unscattered()
    products = [plain_product(a, part, how, call.op) for part in call.b.parts()]
    product = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
    if call.does_nothing:
        made = product.to(call.options.out_dtype or call.b.default)  # type: ignore[arg-type]  # one, without a function
        return call.a.finished([made])[0]
    # The operator has multiplied by the operands' scales.
    results, many = outputs_of(replace(call, outer=()), product)
    check_scattered(call, len(results))
    return returned(call.a.finished(results), many)


class _Eager:
    """The computation of a product's local parts outside the compiler; see `sharded.Ways`."""

    def __init__(self, key: Any) -> None:
        self.key = key

    def part(self, operand: Operand, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Operand:
        return rebuild(operand.text, tensors, sizes)

    def run(self, call: Call) -> Any:
        if needs_dispatcher(call.tensors):
            return dispatched(call, None)
        return returned(*inside(call))

    def bare(self, call: Call) -> Tensor:
        made: Tensor = self.run(call)
        return made

    def behind(self, call: Call, product: Tensor) -> Any:
        return returned(*outputs_of(call, product))

    def behaviour(self, call: Call) -> str:
        # It imports torch.distributed.tensor, which takes a second.
        from .sharded import behaviour

        return "" if call.function is unchanged else behaviour(call)

    def remember(self, call: Call, how: Sharding, results: Sequence[Tensor], many: bool) -> None:
        if self.key is not None:
            from .repeated import remember

            remember(self.key, call, how, results, many)


def _dispatched_parts(call: Call, out: Tensor | None, key: Any) -> Any:
    """A product of DTensors."""
    if out is not None:
        raise ValueError(f"{call.op}: out= does not support DTensors; use the returned tensor")
    from .sharded import sharded

    return sharded(call, _Eager(key))


def _dispatched_out(call: Call, out: Tensor) -> Tensor:
    if not call.ready:
        by_blocks = call.a.by_blocks or call.b.by_blocks
        what = "a packed weight" if call.b.is_packed else "groups" if call.a.is_ragged else "an epilogue"
        what = "a block-sparse operand" if by_blocks else what
        raise ValueError(
            f"{call.op}: out= with {what} does not support gradients, transforms, dispatch modes and tensor "
            "subclasses; use the returned tensor"
        )
    if wants_gradient((*call.tensors, out)):
        raise ValueError(
            f"{call.op}: out= does not support gradients, but one of the arguments requires them"
        )
    check_out(call, out, (call.shape, result_dtype(call.op, call.dtype, call.options.out_dtype)))
    torch.ops.gemmery.product_out(*arguments_of(call, ""), out)
    return out
