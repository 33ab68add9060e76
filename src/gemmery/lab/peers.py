"""The methods that are measured: gemmery and its peers. Each makes, for a row's inputs, a call without arguments."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..tuning.stopwatch import Call
from .fusions import FUSIONS, in_torch
from .inputs import Bare, Inputs, Unsuited
from .libraries import LIBRARIES

if TYPE_CHECKING:
    from ..launch.plan import Plan

OURS = "gemmery"
#: Makes a method's call for given inputs.
Method = Callable[[Inputs], Call]


# --- gemmery --------------------------------------------------------------------------------------------------------


def _asked(inputs: Inputs) -> dict[str, Any]:
    """The keywords that differ from a plain call, so that a plain call is measured as a user writes it."""
    asked = {
        "precision": inputs.kind.precision,
        "fast_accum": inputs.kind.fast_accum,
        "batch_invariant": inputs.row.batch_invariant,
    }
    return {name: value for name, value in asked.items() if value not in ("ieee", False)}


def gemmery_call(inputs: Inputs) -> Call:
    """gemmery as the row calls it."""
    import gemmery

    a, b, out, asked = inputs.a, inputs.b, inputs.out, _asked(inputs)
    if inputs.scaled is not None:
        return partial(gemmery.scaled_matmul, *inputs.scaled, **asked)
    weight = b.mT if inputs.weight is None else inputs.weight
    if inputs.row.epilogue:
        epilogue = gemmery.epilogue(FUSIONS[inputs.row.epilogue].function)
        return partial(gemmery.linear, a, weight, epilogue=epilogue, args=inputs.args, **asked)
    match inputs.row.call:
        case "matmul":
            return partial(gemmery.matmul, a, b, **asked)
        case "linear":
            return partial(gemmery.linear, a, weight, **asked)
        case "plan":
            plan = gemmery_plan(inputs)
            if plan is None:
                raise Unsuited("gemmery launches nothing for these tensors, so there is no plan to hold")
            return partial(plan, a, b, out)
    return partial(gemmery.matmul, a, b, out=out, **asked)


def gemmery_plan(inputs: Inputs) -> Plan | None:
    """gemmery's plan for these inputs; None if the torch reference runs, or if there is no plan for the scales."""
    import gemmery

    if inputs.scaled is not None:
        return None
    words = _asked(inputs)
    if inputs.row.epilogue:
        words |= {"epilogue": FUSIONS[inputs.row.epilogue].function, "args": inputs.args}
    elif inputs.weight is None:
        words["out"] = inputs.out
    return gemmery.plan(inputs.a, inputs.b if inputs.weight is None else inputs.weight, **words)


# --- torch ----------------------------------------------------------------------------------------------------------


def _product(inputs: Inputs) -> Callable[..., Tensor]:
    """torch's function of a and b for a type: the one that uses the type's instructions."""
    dtype = inputs.kind.dtype
    if inputs.scaled is not None:
        return _scaled_product(inputs)
    if dtype.itemsize > 1:
        return torch.matmul
    name = "torch._int_mm" if dtype == torch.int8 else "torch._scaled_mm"
    if inputs.row.batch:
        raise Unsuited(f"{name} multiplies two matrices, no batches")
    if dtype == torch.int8:
        return torch._int_mm
    one = torch.ones((), device=inputs.a.device)
    return partial(
        torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=inputs.kind.out, use_fast_accum=inputs.kind.fast_accum
    )  # fmt: skip


def _scaled_product(inputs: Inputs) -> Callable[..., Tensor]:
    """torch's product of a and b with the row's scales."""
    assert inputs.scaled is not None
    scale_a, scale_b = (operand.scale for operand in inputs.scaled)
    if inputs.kind.dtype == torch.int8:
        return partial(_int8_with_scales, scale_a=scale_a, scale_b=scale_b)
    fast = inputs.kind.fast_accum
    if inputs.row.scales == "block":
        # cuBLAS on Hopper takes a's scales with the rows innermost in memory, and the transpose of those of b as
        # (N, K), with a stride between rows that is a multiple of `MULTIPLE`.
        # Each block is summed at the tensor cores' own precision, and torch raises an error for any other precision.
        scale_a, fast = _filled_up(scale_a, 0).mT.contiguous().mT, False
        scale_b = _filled_up(scale_b, 1)[:, : scale_b.shape[1]]
    product = partial(
        torch._scaled_mm, scale_a=scale_a, scale_b=scale_b.mT if scale_b.dim() else scale_b,
        out_dtype=inputs.kind.out, use_fast_accum=fast,
    )  # fmt: skip
    M = inputs.row.M
    return partial(_first_rows, product, M) if inputs.row.scales == "block" and M % MULTIPLE else product


#: With scales of blocks, cuBLAS needs a multiple of this for the rows of a and for the stride of b's scales.
MULTIPLE = 4


def _filled_up(x: Tensor, dim: int) -> Tensor:
    """A matrix padded with zeros, so that a dimension is a multiple of `MULTIPLE`."""
    missing = -x.shape[dim] % MULTIPLE
    if not missing:
        return x
    sizes = [size + (missing if place == dim else 0) for place, size in enumerate(x.shape)]
    filled = x.new_zeros(sizes)
    filled.narrow(dim, 0, x.shape[dim]).copy_(x)
    return filled


def _first_rows(product: Callable[..., Tensor], rows: int, a: Tensor, b: Tensor) -> Tensor:
    return product(a, b)[:rows]


def _factors(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The operands of torch's product. Filling up a is not timed, since it happens here."""
    return _filled_up(inputs.a, 0) if inputs.row.scales == "block" else inputs.a, inputs.b


def _with_scales(sums: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return (sums.float() * scale_a * scale_b.mT).to(torch.bfloat16)


def _int8_with_scales(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return _with_scales(torch._int_mm(a, b), scale_a, scale_b)


def cublas(inputs: Inputs) -> Call:
    """torch, which is the vendor's BLAS: the call of the same kind as ours, an epilogue operator by operator.

    A packed weight is multiplied unpacked, and so is MXFP8, which torch supports only on Blackwell: bf16 holds its
    numbers. int8 with scales is the bare product, because torch has no product with scales.
    """
    if inputs.scaled is not None and inputs.row.scales == "mx":
        left, right = (operand.dequantize(torch.bfloat16) for operand in inputs.scaled)
        return partial(torch.matmul, left, right.mT, out=inputs.out)
    if inputs.scaled is not None and inputs.kind.dtype == torch.int8:
        scale_a, scale_b = (operand.scale for operand in inputs.scaled)
        finish = partial(_with_scales, scale_a=scale_a, scale_b=scale_b)
        return Bare(partial(torch._int_mm, inputs.a, inputs.b), finish)
    if inputs.row.epilogue:
        return partial(in_torch(FUSIONS[inputs.row.epilogue].function), inputs.a, inputs.b.mT, *inputs.args)
    product, call = _product(inputs), inputs.row.call
    if call == "linear":
        return partial(torch.nn.functional.linear, inputs.a, inputs.b.mT)
    if call == "matmul":
        return partial(product, *_factors(inputs))
    return partial(product, inputs.a, inputs.b, out=inputs.out)


def compiled(inputs: Inputs, mode: str = "max-autotune-no-cudagraphs") -> Call:
    """torch.compile of the product and the function after it, with its search over templates and the vendor's BLAS."""
    # Without it, the eighth shape in a process would run uncompiled.
    torch._dynamo.reset()
    if inputs.row.epilogue:
        function = in_torch(FUSIONS[inputs.row.epilogue].function)
        best = torch.compile(function, mode=mode, dynamic=False, fullgraph=True)
        return partial(best, inputs.a, inputs.b.mT, *inputs.args)
    multiply = _product(inputs)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return multiply(a, b)

    best = torch.compile(product, mode=mode, dynamic=False, fullgraph=True)
    return partial(best, *_factors(inputs))


# --- the tutorials --------------------------------------------------------------------------------------------------


@functools.cache
def _rung(number: int) -> Any:
    """A tutorial as a module, imported from its folder, as when it runs by itself."""
    from .ladder import tutorial_files

    folder = str(tutorial_files()[number].parent)
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("_common").rung(number)
    finally:
        sys.path.remove(folder)


def seed(inputs: Inputs) -> Call:
    """The tutorials' kernels: rung 8, with descriptors, if it supports the operands, else the autotuned rung 6."""
    a, b, out = inputs.a, inputs.b, inputs.out
    if inputs.row.batch or inputs.row.epilogue or inputs.row.quantized:
        raise Unsuited("the tutorials multiply two plain matrices, without batches or epilogues")
    calls: tuple[Call, ...] = (
        lambda: _rung(8).matmul(a, b.mT, out),
        lambda: _rung(6).matmul(a, b, out),
    )
    refusal = ""
    for call in calls:
        try:
            call()
        except ValueError as error:  # a rung's error for operands that it does not support
            refusal = str(error)
        else:
            return call
    raise Unsuited(refusal)


PEERS: dict[str, Method] = {
    "cublas": cublas,
    "compile": compiled,
    "compile_default": partial(compiled, mode="default"),
    "seed": seed,
    **LIBRARIES,
}
