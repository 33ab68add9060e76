"""The operator that torch's own machinery sees: `torch.ops.gemmery.product`.

It is registered with `torch.library.Library`, which costs less a call than `custom_op`. Fake implementations give
shapes and types to torch.compile and export. Its gradients are in `gradients`, and `torch.vmap` of it in `vmap`. Eager
inference bypasses all of this, see `run`.
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

from ..epilogues.function import named
from . import vjp
from .check import check, check_out, result_dtype
from .compute import compute, inside
from .epilogue import outputs_of
from .flat import call_of, parsed
from .spec import Call

LIBRARY = torch.library.Library("gemmery", "DEF")
_ARGUMENTS = "Tensor[] tensors, SymInt[] sizes, Scalar[] numbers, str text, bool batch_invariant"
LIBRARY.define(f"product({_ARGUMENTS}, bool save) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
LIBRARY.define(f"product_out({_ARGUMENTS}, Tensor(a!) out) -> ()", tags=torch.Tag.pt2_compliant_tag)
LIBRARY.define(
    f"product_backward({_ARGUMENTS}, Tensor? product, Tensor[] grads, int[] given, bool[] wanted) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)


def _results(call: Call, name: str, save: bool, compute: Any) -> list[Tensor]:
    """A call's results, and with `save` the saved product: nothing if it is not needed.

    Args:
        compute: computes a call's results, and whether they are a tuple.
    """
    if not name:
        made, _ = compute(call)
        return [*made, call.a.matrix.new_empty(0)] if save else made
    saves = save and vjp.needs_product(call)
    made, many = compute(replace(call, saves=saves))
    # For calls from outside the compiler, which have the epilogue.
    named(name).many = many and not (saves and len(made) == 2 and not many)
    if len(made) == 1 + saves and many and is_compiling():
        raise ValueError("epilogue: under torch.compile, return the tensor itself, not a tuple of one")
    return made if saves or not save else [*made, call.a.matrix.new_empty(0)]


def _product(*arguments: Any) -> list[Tensor]:
    *flat, save = arguments
    call = call_of(*flat)
    name = parsed(flat[3]).epilogue
    return unalias(_results(call, name, save, inside), call.tensors)


def _product_out(*arguments: Any) -> None:
    *flat, out = arguments
    with torch.no_grad():
        compute(call_of(*flat), out)


def _product_fake(*arguments: Any) -> list[Tensor]:
    *flat, save = arguments
    call = call_of(*flat)
    check(call)
    like = call.a.matrix.new_empty(call.shape, dtype=call.summed)

    def fakes(call: Call) -> tuple[list[Tensor], bool]:
        # In a separate thread, torch dispatches as for users, whose functions may use torch.func.
        with ThreadPoolExecutor(1) as thread:
            made, many = thread.submit(_outputs_of, call, like).result()
        return [x.new_empty(x.shape) for x in made], many

    return _results(call, parsed(flat[3]).epilogue, save, fakes)


def _outputs_of(call: Call, product: Tensor) -> tuple[list[Tensor], bool]:
    with detect_fake_mode(product) or nullcontext(), torch.no_grad():
        return outputs_of(call, product, call.given)


def _product_out_fake(*arguments: Any) -> None:
    *flat, out = arguments
    call = call_of(*flat)
    check(call)
    check_out(call, out, (call.shape, result_dtype(call.op, call.dtype, call.options.out_dtype)))


def unalias(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results that share no memory with each other or with an input, as operators require."""
    taken = {x.untyped_storage().data_ptr() for x in inputs}
    kept = []
    for x in results:
        at = x.untyped_storage().data_ptr()
        kept.append(x.clone() if at in taken and x.numel() else x)
        taken.add(at)
    return kept


def _product_backward(*arguments: Any) -> list[Tensor]:
    *flat, product, grads, given, wanted = arguments
    call = call_of(*flat)
    found = vjp.run(call, product, placed(grads, given), wanted)
    return unalias(found, [*call.tensors, *grads, *([] if product is None else [product])])


def _product_backward_fake(*arguments: Any) -> list[Tensor]:
    *flat, _, _, _, wanted = arguments
    call = call_of(*flat)
    tensors = [x for x in call.inputs if isinstance(x, Tensor)]
    return [
        call.a.matrix.new_empty(call.shape),
        *[
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for x, w in zip(tensors, wanted, strict=True)
            if w
        ],
    ]


def placed(grads: Sequence[Tensor], given: Sequence[int]) -> list[Tensor | None]:
    """Gradients of all results, None for unused ones."""
    left = iter(grads)
    return [next(left) if there else None for there in given]


for _key in ("CPU", "CUDA"):
    LIBRARY.impl("product", _product, _key)
    LIBRARY.impl("product_out", _product_out, _key)
    LIBRARY.impl("product_backward", _product_backward, _key)
torch.library.register_fake("gemmery::product", _product_fake, lib=LIBRARY)
torch.library.register_fake("gemmery::product_out", _product_out_fake, lib=LIBRARY)
torch.library.register_fake("gemmery::product_backward", _product_backward_fake, lib=LIBRARY)
