"""The backward pass of an epilogue: its vector-Jacobian product, traced like the epilogue itself.

The gradient of the product, and of the epilogue's arguments, is an elementwise function of the gradients that come in,
of the product and of the arguments. It runs as one kernel over blocks of memory (`kernels.pointwise`), from the same
lowering; sums over what was broadcast are torch's. A function whose vector-Jacobian product can't be part of a kernel,
such as one with a logsumexp, is differentiated by torch itself, operator by operator.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import devices
from ..dtypes import accumulator
from ..epilogues.programs import lowered_program
from ..epilogues.record import Untraceable
from ..epilogues.results import Results
from ..epilogues.trace import Sizes, stand_ins
from ..launch.pointwise import pointwise
from ..memo import keep
from ..operands import Operand
from .build import NOTHING
from .check import dimensions
from .epilogue import outputs_of
from .flat import arguments_of
from .spec import Call, Options, unchanged

_needs: dict[Any, bool] = {}


def needs_product(call: Call) -> bool:
    """Whether the backward pass of a call reads the product. Otherwise it need not be saved."""
    call, shape = call.without_bias(), call.shape
    dims = [
        dimensions(call, i, x, shape) if isinstance(x, Tensor) else None for i, x in enumerate(call.inputs)
    ]
    odd = bool(shape[-1] % 2)
    key = None
    if call.captured.key is not None:
        inputs = [(d, x.dtype) if d is not None else repr(x) for x, d in zip(call.inputs, dims, strict=True)]
        key = (
            call.captured.key,
            tuple(inputs),
            len(shape),
            odd,
            call.dtype,
            # Results in other types may have no gradients.
            call.options.out_dtype,
            call.device.type,
        )
        if key in _needs:
            return _needs[key]
    # The tensors that are read do not depend on sizes.
    with ThreadPoolExecutor(1) as thread:
        needed = thread.submit(_looks_at_product, call, dims, stand_ins(len(shape), odd)[0]).result()
    return needed if key is None else keep(_needs, key, needed)


def _looks_at_product(call: Call, dims: Sequence[tuple[str, ...] | None], sizes: Sizes) -> bool:
    meta = [
        x if its is None else torch.empty(sizes.of(its), dtype=x.dtype, device="meta")
        for x, its in zip(call.inputs, dims, strict=True)
    ]
    product = torch.empty((*sizes.batch, sizes.M, sizes.N), dtype=accumulator(call.dtype), device="meta")
    try:
        results, _ = outputs_of(call, product, meta)
    except (RuntimeError, ValueError, TypeError, IndexError):
        # This depends on the sizes, which are different here. In torch the function may still run.
        return True
    grads = [x if x.dtype.is_floating_point else None for x in results]
    wanted = [its is not None and x.dtype.is_floating_point for x, its in zip(call.inputs, dims, strict=True)]
    try:
        made = _program(call, _Pieces.of(call, product.to(call.dtype), grads), meta, wanted)[0]
    except Untraceable:
        return True
    return 0 in made.inputs


class _Pieces:
    """The gradients that come in as a kernel's inputs.

    Attributes:
        first: the block that the kernel walks over: the narrowest gradient of a matrix.
        others: the product, then the other gradients, reduced rows as columns.
        places: for each result, the place of its gradient among `others`; -1 for `first`, None for none.
    """

    def __init__(
        self, first: Tensor, others: list[Any], places: tuple[int | None, ...], flat: tuple[bool, ...]
    ) -> None:
        self.first, self.others, self.places, self.flat = first, others, places, flat

    @classmethod
    def of(cls, call: Call, product: Tensor | None, grads: Sequence[Tensor | None]) -> _Pieces:
        rank = len(call.shape)
        lead = tuple((call if product is None else product).shape)[:-1]
        if any(g is not None and lead not in (tuple(g.shape), tuple(g.shape[:-1])) for g in grads):
            raise Untraceable("a result has neither the product's rows nor is one of its reduced rows")
        matrices = [i for i, g in enumerate(grads) if g is not None and g.dim() == rank and g.shape[-1] > 1]
        if not matrices:
            raise Untraceable("no result that is a matrix is differentiated")
        chosen = min(matrices, key=lambda i: grads[i].shape[-1])  # type: ignore[union-attr]
        first = grads[chosen]
        assert first is not None
        others: list[Any] = [product]
        places: list[int | None] = []
        for i, g in enumerate(grads):
            if g is None or i == chosen:
                places.append(None if g is None else -1)
                continue
            places.append(len(others))
            others.append(g.unsqueeze(-1) if g.dim() < rank else g)
        flat = tuple(g is not None and g.dim() < rank for g in grads)
        return cls(first, others, tuple(places), flat)


def _program(
    call: Call, pieces: _Pieces, inputs: Sequence[Any], wanted: Sequence[bool]
) -> tuple[Any, list[Any]]:
    """The backward pass as a device function, and its inputs: the product, other gradients, the call's inputs."""
    shape = tuple(pieces.first.shape)
    count = len(pieces.others)
    full = [tuple(x.shape) if isinstance(x, Tensor) else () for x in inputs]
    # Broadcast inputs are differentiated as if they were not broadcast; the sum over them is taken afterwards.
    widths = [2 if x and x[-1] == 2 * shape[-1] else 1 for x in full]

    def function(first: Tensor, *others: Any) -> tuple[list[Tensor], bool]:
        product, given, own = others[0], others[1:count], list(others[count:])
        if product is None:
            product = first.new_empty(0)
        for i, wants in enumerate(wanted):
            if wants:
                own[i] = own[i].expand(*first.shape[:-1], widths[i] * first.shape[-1])
        grads = [None if p is None else first if p < 0 else given[p - 1] for p in pieces.places]
        of_product, of_inputs = _pulled(call, product, own, grads, pieces.flat, wanted)
        return [of_product, *of_inputs], True

    function.__name__ = f"the backward pass of {getattr(call.function, '__name__', 'the epilogue')}"
    values = [*pieces.others, *inputs]
    names = [
        dimensions(call, i - count, x, shape) if isinstance(x, Tensor) else None for i, x in enumerate(values)
    ]
    key = None
    if call.captured.key is not None:
        key = (
            "backward",
            call.captured.key,
            call.dtype,
            pieces.places,
            pieces.flat,
            tuple(wanted),
        )
    wide = accumulator(call.dtype)
    return lowered_program(function, key, wide, shape, values, names, call.device), values


def _pulled(
    call: Call, product: Tensor, inputs: Sequence[Any], grads: Sequence[Tensor | None], flat: Sequence[bool],
    wanted: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Gradients of the product, in the operands' type, and of the wanted inputs, in theirs."""
    places = [i for i, wants in enumerate(wanted) if wants]
    wide = accumulator(call.dtype)

    def function(x: Tensor, *some: Tensor) -> tuple[Tensor, ...]:
        values = list(inputs)
        for place, value in zip(places, some, strict=True):
            values[place] = value
        # A copy: the function may change the product in place.
        results, _ = call.apply(x.to(wide, copy=True), values, rebuilt=True)
        return tuple([y for y, g in zip(results, grads, strict=True) if g is not None])

    vjp: tuple[tuple[Tensor, ...], Any] = torch.func.vjp(function, product, *[inputs[i] for i in places])  # type: ignore[assignment]
    results, pull = vjp
    given = [g for g in grads if g is not None]
    flattened = [f for g, f in zip(grads, flat, strict=True) if g is not None]
    of_product, *of_inputs = pull(
        tuple([
            (g.squeeze(-1) if f and y.dim() < g.dim() else g).to(y.dtype)
            for g, f, y in zip(given, flattened, results, strict=True)
        ])
    )  # fmt: skip
    return of_product, of_inputs


def run(
    call: Call, product: Tensor | None, grads: Sequence[Tensor | None], wanted: Sequence[bool]
) -> list[Tensor]:
    """Gradients of the product, and the requested ones of the call's tensors.

    Args:
        product: the function's product, if `needs_product`.
        grads: the gradients of the results, None for unused ones.
        wanted: for each of the call's tensors.
    """
    if devices.current(call.device) is None:
        return by_torch(call, product, grads, wanted)
    wants = _of_inputs(call, wanted)
    try:
        of_product, of_inputs = _by_kernel(_of_rows(call), product, grads, wants[call.biases :])
    except Untraceable:
        return by_torch(call, product, grads, wanted)
    return _all_summed(call, of_product, of_inputs, wants)


def by_torch(
    call: Call, product: Tensor | None, grads: Sequence[Tensor | None], wanted: Sequence[bool]
) -> list[Tensor]:
    """`run`, operator by operator, so that torch can differentiate it."""
    wants = _of_inputs(call, wanted)
    if product is None:
        shape = call.shape
        product = torch.zeros((), dtype=call.dtype, device=call.device).expand(shape)
    bare = _of_rows(call)
    of_product, of_inputs = _pulled(
        bare, product, bare.inputs, grads, [False] * len(grads), wants[call.biases :]
    )
    return _all_summed(call, of_product, of_inputs, wants)


def _of_rows(call: Call) -> Call:
    """The call without biases, with inputs that broadcast to the product in torch."""
    bare = call.without_bias()
    return replace(bare, inputs=tuple([call.a.of_rows(x) for x in bare.inputs]))


def _of_inputs(call: Call, wanted: Sequence[bool]) -> list[bool]:
    """The flags of `wanted`, which are for the call's tensors, spread over all its inputs."""
    flags = iter(wanted)
    return [next(flags) if isinstance(x, Tensor) else False for x in call.inputs]


def _all_summed(
    call: Call, of_product: Tensor, of_inputs: Sequence[Tensor], wants: Sequence[bool]
) -> list[Tensor]:
    """The product's gradient, and the wanted ones of the biases, which are its sums, and of the other inputs."""
    of_biases = of_product.chunk(call.biases, dim=-1) if call.biases else ()
    grads = [g for g, wanted in zip(of_biases, wants, strict=False) if wanted] + list(of_inputs)
    tensors = [x for x, wanted in zip(call.inputs, wants, strict=True) if wanted]
    multiply = functools.partial(_multiply, call)
    found = [call.a.summed_over_groups(g, x, multiply) for g, x in zip(grads, tensors, strict=True)]
    summed = [_summed(g, x) if y is None else y for g, x, y in zip(grads, tensors, found, strict=True)]
    return [of_product, *summed]


def _multiply(call: Call, x: Operand, y: Operand) -> Tensor:
    options = Options(None, call.options.precision, False, call.options.batch_invariant)
    bare = Call("matmul", x, y, unchanged, NOTHING, (), 0, options)
    made: Tensor = torch.ops.gemmery.product(*arguments_of(bare, ""), False)[0]
    return made


def _summed(grad: Tensor, tensor: Tensor) -> Tensor:
    """A gradient summed over what was broadcast."""
    if grad.shape == tensor.shape:
        return grad.to(tensor.dtype)
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    lead = grad.dim() - tensor.dim()
    dims = [
        *range(lead),
        *(lead + i for i, size in enumerate(tensor.shape) if size == 1 and grad.shape[lead + i] != 1),
    ]
    return (
        grad.sum(dims, dtype=wide).reshape(tensor.shape).to(tensor.dtype) if dims else grad.to(tensor.dtype)
    )


def _by_kernel(
    call: Call, product: Tensor | None, grads: Sequence[Tensor | None], wants: Sequence[bool]
) -> tuple[Tensor, list[Tensor]]:
    if product is None:
        # Only its shape is used, for the width of the product.
        shape = call.shape
        product = torch.empty((), dtype=call.dtype, device=call.device).expand(shape)
    pieces = _Pieces.of(call, product, grads)
    made, values = _program(call, pieces, call.inputs, wants)
    if made.paired:
        raise Untraceable("blocks of a matrix in memory are not paired")
    types = tuple(x.dtype for x in made.outputs)
    results = Results(made, tuple(pieces.first.shape), types, accumulator(call.dtype))
    of_product, *of_inputs = pointwise(results, pieces.first, values)
    return of_product, of_inputs
