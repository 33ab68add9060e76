"""Products with an epilogue as operators: what torch.compile, autograd and dispatch modes see of them.

`torch.ops.gemmery.fused` is a call flattened into what an operator can take: tensors, numbers, and the epilogue by its
name. Its gradient is made of `torch.ops.gemmery.fused_backward`, the epilogue's vector-Jacobian product, and two
products.

What is saved for the backward pass: a, b, the epilogue's arguments, and, where the vector-Jacobian product needs it,
the bare product in the operands' type, which the same kernel writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import backward, fused
from .dispatch import Options, OutTypes, check_forward_mode, result_shape, right_factor
from .epilogues.function import Epilogue, named
from .epilogues.identity import capture
from .ops import LIBRARY, factor_gradients
from .problem import accumulator, config_text

_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor[] tensors, float[] numbers, str kinds, str epilogue, bool biased, str out_dtype, "
    "str precision, bool fast_accum, bool batch_invariant, str? config"
)
LIBRARY.define(f"fused({_ARGUMENTS}, bool save) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
LIBRARY.define(
    f"fused_backward({_ARGUMENTS}, Tensor? product, Tensor[] grads, int[] given, bool[] wanted) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)


# ---------------------------------------------------------------------------------------------------------------------
# A call as an operator's arguments, and back


def _flatten(inputs: Sequence[Any]) -> tuple[list[Tensor], list[float], str]:
    """Tensors, numbers, and a letter for each input: t, f(loat), i(nt), N(one), T(rue) or F(alse)."""
    tensors, numbers, kinds = [], [], ""
    for value in inputs:
        if isinstance(value, Tensor):
            tensors.append(value)
            kinds += "t"
        elif value is None:
            kinds += "N"
        elif isinstance(value, bool):
            kinds += "T" if value else "F"
        elif isinstance(value, int | float):
            numbers.append(float(value))
            kinds += "i" if isinstance(value, int) else "f"
        else:
            raise TypeError(
                f"epilogue: an argument is a {type(value).__name__}; with gradients and under torch.compile, arguments "
                f"are tensors, numbers, True, False and None"
            )
    return tensors, numbers, kinds


def _unflatten(tensors: Sequence[Tensor], numbers: Sequence[float], kinds: str) -> list[Any]:
    left, counted = iter(tensors), iter(numbers)
    constants = {"N": None, "T": True, "F": False}
    values: list[Any] = []
    for kind in kinds:
        if kind == "t":
            values.append(next(left))
        elif kind in "fi":
            number = next(counted)
            values.append(number if kind == "f" else int(number))
        else:
            values.append(constants[kind])
    return values


def _type_text(out_dtype: OutTypes) -> str:
    """Types as an operator's argument."""
    types = out_dtype if isinstance(out_dtype, tuple) else (out_dtype,)
    names = ",".join(["" if x is None else str(x).removeprefix("torch.") for x in types])
    return names + ("," if isinstance(out_dtype, tuple) else "")


def _types(text: str) -> OutTypes:
    types = tuple([getattr(torch, name) if name else None for name in text.split(",")])
    return types[:-1] if "," in text else types[0]


def call_of(
    a: Tensor, b: Tensor, tensors: Sequence[Tensor], numbers: Sequence[float], kinds: str, epilogue: str, biased: bool,
    out_dtype: str, precision: Any, fast_accum: bool, batch_invariant: bool, config: str | None,
) -> fused.Call:  # fmt: skip
    """The call that an operator was given."""
    function = named(epilogue).__gemmery_epilogue__
    captured = capture(function)
    return fused.Call(
        "gemm", a, b, function, captured, tuple(_unflatten(tensors, numbers, kinds)), biased, _types(out_dtype),
        Options(None, precision, fast_accum, batch_invariant, config),
    )  # fmt: skip


def _run(call: fused.Call, name: str, save: bool, results: Any) -> list[Tensor]:
    """A call's results, and with `save` what is saved of the product behind them: nothing where it is not needed.

    Args:
        results: computes a call.
    """
    saves = save and backward.needs_product(call)
    made, many = results(replace(call, saves=saves))
    # For those who come from outside the compiler, and know the epilogue.
    named(name).many = many
    if len(made) == 1 + saves and many and is_compiling():
        raise ValueError("epilogue: under torch.compile, return the tensor itself, not a tuple of one")
    return made if saves or not save else [*made, call.a.new_empty(0)]


# ---------------------------------------------------------------------------------------------------------------------
# The operators


def _fused(*arguments: Any) -> list[Tensor]:
    *flat, save = arguments
    return _run(call_of(*flat), flat[5], save, fused.results_of)


def _fused_fake(*arguments: Any) -> list[Tensor]:
    *flat, save = arguments
    call = call_of(*flat)
    if len(call.captured.tensors) and flat[4].count("t") != len(flat[2]):
        raise ValueError(
            "epilogue: under torch.compile its tensors have to come through args, not from its closure"
        )
    fused.check(call)
    shape = result_shape("gemm", call.a, call.b)
    product = call.a.new_empty(shape, dtype=accumulator(call.a.dtype))

    def results(call: fused.Call) -> tuple[list[Tensor], bool]:
        made, many = fused.outputs_of(call, product, call.inputs)
        return [x.new_empty(x.shape) for x in made], many

    return _run(call, flat[5], save, results)


def _fused_backward(*arguments: Any) -> list[Tensor]:
    *flat, product, grads, given, wanted = arguments
    return backward.run(call_of(*flat), product, placed(grads, given), wanted)


def _fused_backward_fake(*arguments: Any) -> list[Tensor]:
    *flat, _, _, _, wanted = arguments
    call = call_of(*flat)
    shape = result_shape("gemm", call.a, call.b)
    tensors = [x for x in call.inputs if isinstance(x, Tensor)]
    return [
        call.a.new_empty(shape),
        *[
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for x, w in zip(tensors, wanted, strict=True)
            if w
        ],
    ]


def placed(grads: Sequence[Tensor], given: Sequence[int]) -> list[Tensor | None]:
    """Gradients of all results, None for those that nothing depends on."""
    left = iter(grads)
    return [next(left) if there else None for there in given]


for _key in ("CPU", "CUDA"):
    LIBRARY.impl("fused", _fused, _key)
    LIBRARY.impl("fused_backward", _fused_backward, _key)
torch.library.register_fake("gemmery::fused", _fused_fake, lib=LIBRARY)
torch.library.register_fake("gemmery::fused_backward", _fused_backward_fake, lib=LIBRARY)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    a, b, tensors, *rest, save = inputs
    epilogue = rest[2]
    if not a.dtype.is_floating_point or a.dtype.itemsize == 1:
        raise TypeError(f"gemm: no gradient for {a.dtype} operands, but one of the arguments requires it")
    if not save:
        raise RuntimeError("gemmery.fused: gradients are asked for, and nothing was saved for them")
    ctx.save_for_backward(a, b, *tensors, output[-1])
    ctx.mark_non_differentiable(output[-1])
    ctx.rest, ctx.tensors = rest, len(tensors)
    # Compiled kernels find the epilogue by its name as long as somebody holds it.
    ctx.epilogue = named(epilogue)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    """Of a, b and the tensors; see `backward`."""
    a, b, *tensors, product = ctx.saved_tensors
    of_results = list(grads)[:-1]
    given = [g for g in of_results if g is not None]
    needs_a, needs_b, needs_tensors = ctx.needs_input_grad[:3]
    wanted = (
        list(needs_tensors) if isinstance(needs_tensors, list | tuple) else [x.requires_grad for x in tensors]
    )
    # torch takes a list of numbers for one value, unless it is empty.
    rest: tuple[Any, ...] = (None if ctx.rest[0] else [], *[None] * 9)
    if not given:
        return None, None, [None] * len(tensors), *rest
    of_product, *of_tensors = torch.ops.gemmery.fused_backward(
        a,
        b,
        tensors,
        *ctx.rest,
        product if product.dim() > 1 else None,
        given,
        [int(g is not None) for g in of_results],
        wanted,
    )
    _, _, _, _, _, precision, _, batch_invariant, _ = ctx.rest
    grad_a, grad_b = factor_gradients(
        a, b, of_product, 1, (precision, False, batch_invariant), (needs_a, needs_b)
    )
    left = iter(of_tensors)
    return grad_a, grad_b, [next(left) if w else None for w in wanted], *rest


torch.library.register_autograd("gemmery::fused", _gradients, setup_context=_save, lib=LIBRARY)


# ---------------------------------------------------------------------------------------------------------------------
# The ways in


def _finished(results: list[Tensor], many: bool) -> Any:
    return tuple(results) if many else results[0]


def dispatched(call: fused.Call, epilogue: Any, out: Tensor | None) -> Any:
    """A call that something in torch wants to see, outside the compiler."""
    tensors, numbers, kinds = _flatten(call.inputs)
    check_forward_mode(call.op, (call.a, call.b, *tensors))
    if out is not None:
        raise ValueError(
            f"{call.op}: out= does not support gradients, but one of the arguments requires them"
        )
    held = epilogue if isinstance(epilogue, Epilogue) else Epilogue(call.function)
    how = call.options
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (call.a, call.b, *tensors))
    results = torch.ops.gemmery.fused(
        call.a, call.b, tensors, numbers, kinds, held.name, call.biased, _type_text(call.out_dtype), how.precision,
        how.fast_accum, how.batch_invariant, config_text(how.config), grad,
    )  # fmt: skip
    return _finished(list(results)[: len(results) - grad], held.many)


def compiled(
    op: str, a: Tensor, b: Tensor, bias: Tensor | None, epilogue: Any, args: Sequence[Any], out: Tensor | None,
    out_dtype: OutTypes, how: Options,
) -> Any:  # fmt: skip
    """A call in code that torch.compile traces."""
    if not isinstance(epilogue, Epilogue):
        raise TypeError(
            f"{op}: under torch.compile, epilogue must be what gemmery.epilogue(f) returned, made outside of "
            f"compiled code"
        )
    if out is not None:
        raise ValueError(f"{op}: out= with an epilogue can't be compiled; use what is returned")
    b = right_factor(op, b)
    tensors, numbers, kinds = _flatten([*([] if bias is None else [bias]), *args])
    grad = torch.is_grad_enabled() and any([x.requires_grad for x in (a, b, *tensors)])
    results = torch.ops.gemmery.fused(
        a, b, tensors, numbers, kinds, epilogue.name, bias is not None, _type_text(out_dtype), how.precision,
        how.fast_accum, how.batch_invariant, config_text(how.config), grad,
    )  # fmt: skip
    kept = list(results)[: len(results) - 1] if grad else list(results)
    return _finished(kept, len(kept) > 1)
