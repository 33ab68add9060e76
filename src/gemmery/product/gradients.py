"""Gradients of the operator, and gradients of these.

The backward pass keeps the tensors and, if the epilogue's vector-Jacobian product needs it, the bare product
in the operands' type, which the same kernel writes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..epilogues.function import named
from ..operands import DenseOperand, Operand
from . import vjp
from .build import NOTHING
from .compute import inside
from .flat import arguments_of, call_of, parsed
from .operator import LIBRARY, placed
from .seen import in_transform
from .spec import Call, Options, unchanged
from .vmap import mapped


class _Saved:
    """A call without its tensors, which autograd keeps for the backward pass."""

    def __init__(self, call: Call, flat: Sequence[Any]) -> None:
        if not call.dtype.is_floating_point or call.dtype.itemsize == 1:
            raise TypeError(
                f"{call.op}: no gradient for {call.dtype} operands, but one of the arguments requires it"
            )
        self.sizes, self.numbers, self.text, self.batch_invariant = flat
        # Compiled kernels find the epilogue by its name as long as it is held.
        name = parsed(self.text).epilogue
        self.epilogue = named(name) if name else None
        self.addends = [(x.shape, x.dtype) for x in call.inputs] if call.ready else []
        # Not among the tensors that autograd keeps: it may return copies of those, and they must not change meanwhile.
        self.buffers = call.b.buffers
        self.ahead = len(call.a.tensors) + len(call.b.tensors) - len(self.buffers)

    def kept(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A call's tensors without the buffers, for autograd to keep."""
        return [*tensors[: self.ahead], *tensors[self.ahead + len(self.buffers) :]]

    def whole(self, kept: Sequence[Tensor]) -> list[Tensor]:
        """A call's tensors, given those that autograd kept."""
        return [*kept[: self.ahead], *self.buffers, *kept[self.ahead :]]

    def call(self, tensors: Sequence[Tensor]) -> Call:
        """The call, rebuilt."""
        return call_of(tensors, self.sizes, self.numbers, self.text, self.batch_invariant)


def _of_epilogue(
    saved: _Saved, call: Call, tensors: Sequence[Tensor], product: Tensor | None, grads: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None]]:  # fmt: skip
    """The gradient of a bare product, None if no result is used, and those of the tensors behind the operands'.

    Args:
        call, tensors: the call, and all of its tensors.
        product: the saved product, if it was saved.
        grads: the gradients of its results, None for unused ones.
        needs: which of the tensors' gradients are needed.
    """
    of_operands = len(call.a.tensors) + len(call.b.tensors)
    wanted = list(needs[of_operands:])
    grads = call.a.of_results(grads)
    given = [g for g in grads if g is not None]
    if not given:
        return None, [None] * len(wanted)
    if call.function is unchanged and not call.biases:
        of_product, of_inputs = given[0], []
    elif call.ready:
        of_product = given[0]
        of_inputs = [_of_addend(given[0], call, x) for x, w in zip(call.inputs, wanted, strict=True) if w]
    else:
        flat = (tensors, saved.sizes, saved.numbers, saved.text, saved.batch_invariant)
        places = [int(g is not None) for g in grads]
        inputs = tensors[of_operands:]
        if any(wants and x.dim() < 3 for wants, x in zip(wanted, inputs, strict=True)):
            # Rows after all groups are unused; sums over groups ignore them.
            given = call.a.finished(given, is_scattered=False)
        of_product, *of_inputs = torch.ops.gemmery.product_backward(*flat, product, given, places, wanted)
    left = iter(of_inputs)
    return of_product, [next(left) if w else None for w in wanted]


def _of_operands(
    saved: _Saved, call: Call, of_product: Tensor | None, needs: Sequence[bool]
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of a product's operands, given that of the bare product."""
    of_a, of_b = len(call.a.tensors), len(call.b.tensors)
    if any(needs[of_a : of_a + len(saved.buffers)]) and torch.is_grad_enabled():
        raise RuntimeError(
            f"{call.op}: second derivatives are not supported with weight_grad; leave out create_graph=True"
        )
    if of_product is None:
        return [None] * (of_a + of_b)
    wants = needs[:of_a], needs[of_a : of_a + of_b]
    multiply = functools.partial(_multiply, call)
    found = call.a.gradients_with(call.b, of_product.to(call.a.matrix.dtype), multiply, wants)
    return [*found[0], *found[1]]


def _of_addend(grad: Tensor, call: Call, addend: Tensor) -> Tensor:
    scaled = grad if call.beta == 1 else grad * call.beta
    return scaled.sum_to_size(addend.shape).to(addend.dtype)


def _multiply(
    call: Call, x: Tensor | Operand, y: Operand, addend: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """A product of a backward pass, computed with the settings of the forward pass."""
    how = Options(None, call.options.precision, False, call.options.batch_invariant)
    if into is not None:
        return _added(x, y, how, into)
    return plain_product(x, y, how, "matmul", addend, call.alpha)


def _added(a: Tensor | Operand, b: Operand, options: Options, to: Tensor) -> Tensor:
    """A matrix, to which a product has been added in its own type."""
    left = a if isinstance(a, Operand) else DenseOperand(a)
    inside(Call("matmul", left, b, unchanged, NOTHING, (to,), 1, options._replace(out_dtype=to.dtype)), to)
    return to


def plain_product(
    a: Tensor | Operand, b: Operand, options: Options, op: str = "matmul", addend: Tensor | None = None,
    alpha: Any = 1,
) -> Tensor:  # fmt: skip
    """A product without an epilogue, as the operator, which torch.func's transforms differentiate too."""
    inputs = () if addend is None else (addend,)
    left = a if isinstance(a, Operand) else DenseOperand(a)
    call = Call(op, left, b, unchanged, NOTHING, inputs, len(inputs), options, alpha, 1, False, ())
    tensors, *flat = arguments_of(call, "")
    made: Tensor
    if in_transform():
        made = Product.apply(tuple(flat), *tensors)  # type: ignore[no-untyped-call]
    else:
        (made,) = torch.ops.gemmery.product(tensors, *flat, False)
    return made


def _is_asked_for(node: Any) -> bool:
    """Whether a backward pass computes the gradient of a node's tensor. It may require a gradient that is not
    requested.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # A leaf whose gradient torch.autograd.grad returns.
        return True


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, *flat, save = inputs
    call = call_of(tensors, *flat)
    ctx.saved = _Saved(call, flat)
    if ctx.saved.epilogue is not None and not save:
        raise RuntimeError("gemmery.product: gradients are required, and nothing was saved for them")
    ctx.saves = save
    ctx.save_for_backward(*ctx.saved.kept(tensors), *([output[-1]] if save else []))
    if save:
        ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    tensors, product = ctx.saved_tensors, None
    of_results = list(grads)
    if ctx.saves:
        *tensors, product = tensors
        of_results = of_results[:-1]
    tensors = ctx.saved.whole(tensors)
    needs = ctx.needs_input_grad[0]
    if not isinstance(needs, list | tuple):
        needs = [x.requires_grad for x in tensors]
    if ctx.saved.buffers:
        needs = [need and _is_asked_for(ctx.next_functions[i][0]) for i, need in enumerate(needs)]
    product = product if product is not None and product.dim() > 1 else None
    call = ctx.saved.call(tensors)
    of_product, of_others = _of_epilogue(ctx.saved, call, tensors, product, of_results, needs)
    # Frees the product, unless the graph is used again: the gradients of large weights need the memory.
    del product
    if not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()
    found = [*_of_operands(ctx.saved, call, of_product, needs), *of_others]
    # torch treats a list of numbers as one value, unless it is empty.
    return found, None if ctx.saved.sizes else [], None if ctx.saved.numbers else [], None, None, None


torch.library.register_autograd("gemmery::product", _gradients, setup_context=_save, lib=LIBRARY)


class Product(torch.autograd.Function):
    """A bare product as torch.func differentiates it, which does not use the results of `register_autograd`."""

    @staticmethod
    def forward(flat: Any, *tensors: Tensor) -> Tensor:  # noqa: D102
        (made,) = torch.ops.gemmery.product(list(tensors), *flat, False)
        return made  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: D102
        flat, *tensors = inputs
        ctx.saved = _Saved(call_of(tensors, *flat), flat)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: D102
        needs, tensors = ctx.needs_input_grad[1:], ctx.saved_tensors
        call = ctx.saved.call(tensors)
        of_product, of_others = _of_epilogue(ctx.saved, call, tensors, None, [grad], needs)
        return None, *_of_operands(ctx.saved, call, of_product, needs), *of_others

    @staticmethod
    def vmap(info: Any, in_dims: Any, flat: Any, *tensors: Tensor) -> Any:  # noqa: D102
        moved, flat = mapped(info.batch_size, list(tensors), in_dims[1:], flat)
        made = Product.apply(flat, *moved)  # type: ignore[no-untyped-call]
        return made, 0


# ---------------------------------------------------------------------------------------------------------------------
# Second derivatives


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, *flat, _, grads, given, wanted = inputs
    ctx.saved = _Saved(call_of(tensors, *flat), flat)
    ctx.count, ctx.given, ctx.wanted = len(tensors), given, wanted
    ctx.save_for_backward(*tensors, *grads)
    ctx.set_materialize_grads(False)


def _gradients_backward(ctx: Any, of_results: list[Tensor | None]) -> tuple[Any, ...]:
    """Gradients of the backward pass's inputs, by torch, which runs that pass again on the product of a and b."""
    with torch.enable_grad():
        # Views: one of these tensors may have been computed from another, which must not count here.
        inputs = [x.view_as(x) for x in ctx.saved_tensors]
        results = _again(ctx, inputs[: ctx.count], inputs[ctx.count :])
    found = _derivatives(results, inputs, of_results)
    # torch treats a list of numbers as one value, unless it is empty.
    none: list[Any] = [None if x else [] for x in (ctx.saved.sizes, ctx.saved.numbers, ctx.given, ctx.wanted)]
    return found[: ctx.count], *none[:2], None, None, None, found[ctx.count :], *none[2:]


def _again(ctx: Any, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    call = ctx.saved.call(tensors)
    how = Options(None, call.options.precision, False, call.options.batch_invariant)
    a = call.a.unscattered()
    if call.b.halves > 1:
        product = torch.cat([plain_product(a, x, how) for x in call.b.parts()], dim=-1)
    else:
        product = plain_product(a, call.b, how)
    if call.biases:
        product = product + torch.cat([call.a.of_rows(x) for x in call.inputs[: call.biases]], dim=-1)
    return vjp.by_torch(call, product, placed(grads, ctx.given), ctx.wanted)


def _derivatives(
    results: Sequence[Tensor], inputs: Sequence[Tensor], of_results: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of inputs from those of results; None if an input has none."""
    asked = [i for i, x in enumerate(inputs) if x.requires_grad]
    pairs = [(y, g) for y, g in zip(results, of_results, strict=True) if g is not None and y.requires_grad]
    if not pairs or not asked:
        return [None] * len(inputs)
    found = torch.autograd.grad(
        [y for y, _ in pairs], [inputs[i] for i in asked], [g for _, g in pairs], allow_unused=True,
        create_graph=torch.is_grad_enabled(),
    )  # fmt: skip
    known = dict(zip(asked, found, strict=True))
    return [known.get(i) for i in range(len(inputs))]


torch.library.register_autograd(
    "gemmery::product_backward", _gradients_backward, setup_context=_save_backward, lib=LIBRARY
)
