"""Products with a packed weight, from the call on: `fused` computes them; this is what torch wants besides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import fused
from .call import Factor, added
from .dispatch import OptionValues, check_tensor, lowered, operand_names, result_dtype
from .dtypes import accumulator
from .epilogues.function import Epilogue
from .formats.tensor import QuantizedTensor
from .problem import config_text
from .results import returned
from .unfused import behind, packed_product


def is_packed(b: Any) -> bool:
    """Whether a second factor is packed."""
    return isinstance(b, QuantizedTensor)


def product(
    op: str, a: Tensor, b: QuantizedTensor, bias: Factor | None, functions: tuple[Any, ...], out: Tensor | None,
    options: OptionValues,
) -> Any:  # fmt: skip
    """`a @ b.dequantize().mT` with what a user has done to it; arguments are those of `fused.product`.

    Gradients with respect to a, the bias and arguments go through torch, on the dequantised weight; a packed weight has
    none.
    """
    _check(op, a, b)
    if functions[0] is None and not functions[1]:
        functions = (fused.UNCHANGED, (), *functions[2:])
        if out is not None and options[0] is None:
            options = (out.dtype, *options[1:])
        if options[0] is not None:
            # Without an epilogue, what a product can be.
            result_dtype(op, b, b, options[0])
    if b.permutation is not None and a.shape[-1] == b.shape[-1]:
        a, functions = _before(a, functions)
        a = a.index_select(-1, b.permutation)
        # What the compiler sees of a weight are its parts, and it can't follow how one is put together.
        b = b if is_compiling() else b.with_parts(b.parts() | {"permutation": None})
    run = _compiled if is_compiling() else fused.product
    if a.dim() > 1:
        return run(op, a, b, bias, functions, out, options)
    # A vector is one row; what comes back has no rows.
    made = run(op, a.unsqueeze(0), b, bias, functions, None if out is None else out.unsqueeze(-2), options)
    if out is not None:
        return out
    rank = b.dim()
    rows = [x.squeeze(-2 if x.dim() == rank else -1) for x in _parts(made)]
    return tuple(rows) if isinstance(made, tuple) else rows[0]


def _check(op: str, a: Any, b: QuantizedTensor) -> None:
    """TypeError or ValueError for ranks that the operation does not take; the rest is for `call.check` to say."""
    first, second, _ = operand_names(op)
    check_tensor(op, first, a)
    if isinstance(a, QuantizedTensor):
        raise TypeError(f"{op}: {first} is packed; only {second} can be")
    if a.dim() == 0:
        raise ValueError(f"{op}: {first} is a scalar; it must have at least one dimension")
    if op == "linear" and b.dim() != 2:
        raise ValueError(f"linear: weight is {tuple(b.shape)}; packed, it must be (N, K); use matmul or bmm")
    if op != "bmm":
        return
    for name, tensor in ((first, a), (second, b)):
        if tensor.dim() != 3:
            raise ValueError(f"bmm: {name} is {tuple(tensor.shape)}; it must have 3 dimensions")
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"bmm: a is {tuple(a.shape)} and b is {tuple(b.shape)}: batch sizes differ")


def _before(a: Tensor, functions: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
    """The first factor with its prologue applied in torch, and the other functions."""
    epilogue, args, prologue, prologue_args = functions
    if prologue is None:
        return a, functions
    return prologue(a.to(accumulator(a.dtype)), *prologue_args).to(a.dtype), (epilogue, args, None, ())


def _parts(value: Any) -> Sequence[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


# ---------------------------------------------------------------------------------------------------------------------
# Where torch looks on


def _compiled(
    op: str, a: Tensor, b: QuantizedTensor, bias: Factor | None, functions: tuple[Any, ...], out: Tensor | None,
    options: OptionValues,
) -> Any:  # fmt: skip
    """A call in code that torch.compile traces: with gradients biases and the epilogue are code that it compiles."""
    epilogue, args, prologue, prologue_args = fused.completed(op, fused.Functions(*functions))
    if not isinstance(epilogue, Epilogue):
        raise TypeError(
            f"{op}: under torch.compile, epilogue must be what gemmery.epilogue(f) returned, made outside of "
            f"compiled code"
        )
    if out is not None:
        raise ValueError(f"{op}: out= with a packed weight can't be compiled; use what is returned")
    a, _ = _before(a, (None, (), prologue, prologue_args))
    biases = added(op, bias)
    if torch.is_autocast_enabled(a.device.type):
        dtype = torch.get_autocast_dtype(a.device.type)
        fused.check_autocast(op, b, dtype)
        a, *biases = [lowered(x, dtype) for x in (a, *biases)]
    out_dtype, *how = options
    if functions[0] is fused.UNCHANGED and not biases and not isinstance(out_dtype, tuple):
        return packed_product(op, a, b, options)
    if not (torch.is_grad_enabled() and any([_wants(x) for x in (a, *biases, *args)])):
        return _compiled_whole(op, a, b, biases, epilogue, args, options)
    product = packed_product(op, a, b, (accumulator(b.dtype), *how))
    return behind(op, product, biases, epilogue, args, b.dtype, out_dtype)


def _wants(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _compiled_whole(
    op: str, a: Tensor, b: QuantizedTensor, biases: Sequence[Tensor], epilogue: Epilogue[Any, Any],
    args: Sequence[Any], options: OptionValues,
) -> Any:  # fmt: skip
    """The same without gradients, where the kernel does all of it."""
    from .compiled import held_name
    from .fused_ops import flatten, type_text
    from .packed_ops import flat

    out_dtype, *how, config = options
    results = torch.ops.gemmery.packed_fused(
        a, *flat(b), op, *flatten([*biases, *args]), held_name(epilogue.name, ""), len(biases), type_text(out_dtype),
        *how, config_text(config),
    )  # fmt: skip
    return returned(results, len(results) > 1)
