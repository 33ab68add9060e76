"""Products with an epilogue as operators: what torch.compile, autograd and dispatch modes see of them.

`torch.ops.gemmery.fused` is a call flattened into what an operator can take: tensors, numbers, and the epilogue by its
name. Its gradient is made of `torch.ops.gemmery.fused_backward`, the epilogue's vector-Jacobian product, and two
products.

What is saved for the backward pass: a, b, the epilogue's arguments, and, where the vector-Jacobian product needs it,
the bare product in the operands' type, which the same kernel writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.compiler import is_compiling

from . import backward, devices, fused
from .call import Call, check, outputs_of
from .dispatch import Options, OutTypes, check_forward_mode
from .epilogues.check import warn
from .epilogues.function import Held, hold, named
from .epilogues.identity import Captured
from .ops import LIBRARY, factor_gradients, gemm, in_transform
from .problem import config_text
from .results import returned
from .unfused import unfused

_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor? right, Tensor[] tensors, Scalar[] numbers, str kinds, str epilogue, int biases, "
    "str out_dtype, str precision, bool fast_accum, bool batch_invariant, str? config, Tensor[] scales, int[] scaling"
)
LIBRARY.define(f"fused({_ARGUMENTS}, bool save) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
LIBRARY.define(
    f"fused_backward({_ARGUMENTS}, Tensor? product, Tensor[] grads, int[] given, bool[] wanted) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)


# ---------------------------------------------------------------------------------------------------------------------
# A call as an operator's arguments, and back


#: Before the letters of a call from compiled code, which has no tensors of the epilogue's closure behind its own.
FROM_COMPILED = "c"


def flatten(inputs: Sequence[Any]) -> tuple[list[Tensor], list[float], str]:
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
            numbers.append(value)
            kinds += "i" if isinstance(value, int) else "f"
        else:
            raise TypeError(
                f"epilogue: an argument is a {type(value).__name__}; with gradients and under torch.compile, arguments "
                f"are tensors, numbers, True, False and None"
            )
    return tensors, numbers, kinds


def unflatten(tensors: Sequence[Tensor], numbers: Sequence[float], kinds: str) -> list[Any]:
    """What `flatten` was given."""
    left, counted = iter(tensors), iter(numbers)
    constants = {"N": None, "T": True, "F": False}
    values: list[Any] = []
    for kind in kinds.removeprefix(FROM_COMPILED):
        if kind == "t":
            values.append(next(left))
        elif kind in "fi":
            number = next(counted)
            values.append(float(number) if kind == "f" else int(number))
        else:
            values.append(constants[kind])
    return values


def type_text(out_dtype: OutTypes) -> str:
    """Types as an operator's argument."""
    types = out_dtype if isinstance(out_dtype, tuple) else (out_dtype,)
    names = ",".join(["" if x is None else str(x).removeprefix("torch.") for x in types])
    return names + ("," if isinstance(out_dtype, tuple) else "")


def type_of_text(text: str) -> OutTypes:
    """Types from an operator's argument."""
    types = tuple([getattr(torch, name) if name else None for name in text.split(",")])
    return types[:-1] if "," in text else types[0]


def check_outside(captured: Captured) -> None:
    """ValueError if a function from compiled code has tensors that the compiler does not know of."""
    if captured.count:
        raise ValueError(
            "epilogue: under torch.compile its tensors have to come through args, not from its closure"
        )


def call_of(
    a: Tensor, b: Tensor, right: Tensor | None, tensors: Sequence[Tensor], numbers: Sequence[float], kinds: str,
    epilogue: str, biases: int, out_dtype: str, precision: Any, fast_accum: bool, batch_invariant: bool,
    config: str | None, scales: Sequence[Tensor], scaling: Sequence[int],
) -> Call:  # fmt: skip
    """The call that an operator was given."""
    captured = held_by(epilogue, kinds).captured
    inputs = tuple(unflatten(tensors, numbers, kinds))
    function = captured.rebuild(inputs[len(inputs) - captured.count :])
    return Call(
        "gemm", a, b, function, captured, inputs, biases, type_of_text(out_dtype),
        Options(None, precision, fast_accum, batch_invariant, config), right,
        scales=(*scales, *scaling) if scales else None,  # type: ignore[arg-type]  # two and three
    )  # fmt: skip


def held_by(name: str, kinds: str) -> Held:
    """Returns the function that an operator names as its epilogue.

    Raises:
        ValueError: it is from compiled code and has tensors that the compiler does not know of.
        RuntimeError: it is from compiled code, and a number of it has changed since.
    """
    held: Held = named(name)
    if kinds.startswith(FROM_COMPILED):
        check_outside(held.captured)
        held.check_unchanged()
    return held


def _run(call: Call, name: str, save: bool, results: Any) -> list[Tensor]:
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
    call = call_of(*flat)
    return apart(_run(call, flat[6], save, fused.results_of), call.tensors)


def _fused_fake(*arguments: Any) -> list[Tensor]:
    *flat, save = arguments
    call = call_of(*flat)
    check(call)
    return fake_results(call, flat[6], save)


def fake_results(call: Call, name: str, save: bool) -> list[Tensor]:
    """What has the shapes and types of a call's results, with `save` of what is saved behind them, too."""
    product = call.a.new_empty(call.shape, dtype=call.summed)

    def results(call: Call) -> tuple[list[Tensor], bool]:
        # In a thread of its own torch dispatches as it does for users, whose functions may use torch.func.
        with ThreadPoolExecutor(1) as thread:
            made, many = thread.submit(_outputs_of, call, product).result()
        return [x.new_empty(x.shape) for x in made], many

    return _run(call, name, save, results)


def apart(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results of which none shares memory with another or with an input, as operators have to return them."""
    taken = {x.untyped_storage().data_ptr() for x in inputs}
    kept = []
    for x in results:
        at = x.untyped_storage().data_ptr()
        kept.append(x.clone() if at in taken and x.numel() else x)
        taken.add(at)
    return kept


def _outputs_of(call: Call, product: Tensor) -> tuple[list[Tensor], bool]:
    with detect_fake_mode(product) or nullcontext(), torch.no_grad():
        return outputs_of(call, product, call.inputs)


def _fused_backward(*arguments: Any) -> list[Tensor]:
    *flat, product, grads, given, wanted = arguments
    call = call_of(*flat)
    found = backward.run(call, product, placed(grads, given), wanted)
    return apart(found, [*call.tensors, *grads, *([] if product is None else [product])])


def _fused_backward_fake(*arguments: Any) -> list[Tensor]:
    *flat, _, _, _, wanted = arguments
    call = call_of(*flat)
    shape = call.shape
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
    a, b, right, tensors, *rest, save = inputs
    epilogue = rest[2]
    if not a.dtype.is_floating_point or a.dtype.itemsize == 1:
        raise TypeError(f"gemm: no gradient for {a.dtype} operands, but one of the arguments requires it")
    if not save:
        raise RuntimeError("gemmery.fused: gradients are asked for, and nothing was saved for them")
    ctx.save_for_backward(a, b, right, *tensors, output[-1])
    ctx.mark_non_differentiable(output[-1])
    ctx.rest, ctx.tensors = rest, len(tensors)
    # Compiled kernels find the epilogue by its name as long as somebody holds it.
    ctx.epilogue = named(epilogue)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    """Of a, b and the tensors; see `backward`."""
    a, b, right, *tensors, product = ctx.saved_tensors
    of_results = list(grads)[:-1]
    given = [g for g in of_results if g is not None]
    *needs, needs_tensors = ctx.needs_input_grad[:4]
    wanted = (
        list(needs_tensors) if isinstance(needs_tensors, list | tuple) else [x.requires_grad for x in tensors]
    )
    # torch takes a list of numbers for one value, unless it is empty.
    rest: tuple[Any, ...] = (None if ctx.rest[0] else [], *[None] * 8, [], [], None)
    if not given:
        return None, None, None, [None] * len(tensors), *rest
    of_product, *of_tensors = torch.ops.gemmery.fused_backward(
        a,
        b,
        right,
        tensors,
        *ctx.rest,
        product if product.dim() > 1 else None,
        given,
        [int(g is not None) for g in of_results],
        wanted,
    )
    precision, _, batch_invariant = ctx.rest[5:8]
    of_factors = _of_factors(a, b, right, of_product, (precision, False, batch_invariant), needs)
    left = iter(of_tensors)
    return *of_factors, [next(left) if w else None for w in wanted], *rest


def _of_factors(
    a: Tensor, b: Tensor, right: Tensor | None, grad: Tensor, how: tuple[Any, ...], needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of a, b and right, where b and right are the halves of the second factor, or b is all of it."""
    needs_a, needs_b, needs_right = needs
    if right is None:
        return *factor_gradients(a, b, grad, 1, how, (needs_a, needs_b)), None
    halves = grad.chunk(2, dim=-1)
    grad_a, grad_b = factor_gradients(a, b, halves[0], 1, how, (needs_a, needs_b))
    _, grad_right = factor_gradients(a, right, halves[1], 1, how, (False, needs_right))
    if grad_a is not None:
        # a is one matrix for both.
        grad_a = gemm(halves[1], right.mT, grad_a, 1, 1, None, *how, None)
    return grad_a, grad_b, grad_right


torch.library.register_autograd("gemmery::fused", _gradients, setup_context=_save, lib=LIBRARY)


# ---------------------------------------------------------------------------------------------------------------------
# The ways in


def runs_again(captured: Captured, device: torch.device) -> bool:
    """Whether a gradient can run a function again: as it was, and in a kernel, which draws no random numbers."""
    return captured.key is not None and devices.current(device) is not None


def dispatched(call: Call, out: Tensor | None) -> Any:
    """A call that something in torch wants to see, outside the compiler."""
    check_forward_mode(call.op, tuple(call.tensors))
    if out is not None:
        what = "an epilogue" if call.weight is None else "a packed weight"
        raise ValueError(
            f"{call.op}: out= with {what} does not support gradients, transforms, modes and subclasses of tensors; use "
            f"what is returned"
        )
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in call.tensors)
    if (
        call.weight is not None
        or (grad and not runs_again(call.captured, call.a.device))
        or _is_differentiated()
    ):
        if call.a.device.type == "cpu" and call.captured.key is not None:
            warn(call)
        return unfused(call)
    tensors, numbers, kinds = flatten(call.inputs)
    held, how = hold(call.captured), call.options
    results = torch.ops.gemmery.fused(
        call.a, call.b, call.right, tensors, numbers, kinds, held.name, call.biases, type_text(call.out_dtype),
        how.precision, how.fast_accum, how.batch_invariant, config_text(how.config), *_scaling(call), grad,
    )  # fmt: skip
    return returned(list(results)[: len(results) - grad], held.many)


def _is_differentiated() -> bool:
    """Whether torch.func differentiates what is called, at whatever level: it takes bare products."""
    if not in_transform():
        return False
    from torch._C._functorch import TransformType
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

    return any(x.key() == TransformType.Grad for x in retrieve_all_functorch_interpreters())


def _scaling(call: Call) -> tuple[list[Tensor], list[int]]:
    """A call's scales of blocks as an operator's arguments."""
    if call.scales is None:
        return [], []
    left, right, *scaling = call.scales
    return [left, right], scaling
