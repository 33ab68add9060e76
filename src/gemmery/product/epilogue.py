"""A product's epilogue: its device function, the types of its results, and its results in torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..epilogues.lower import WHOLE, Program
from ..epilogues.programs import lowered_program
from ..epilogues.table import TYPES
from ..epilogues.trace import stand_ins
from .check import dimensions
from .spec import Call, OutTypes

#: The types that results can have.
_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES)


def program(call: Call) -> Program:
    """The call's epilogue as a device function, traced at its first use.

    Raises:
        epilogues.Untraceable: the function cannot be part of a kernel.
    """
    shape, key = call.shape, None
    if call.captured.key is not None:
        saved = call.dtype if call.saves else None
        key = (call.captured.key, len(call.outer), call.biases, call.b.swapped, saved)

    @functools.wraps(call.function)
    def function(product: Tensor, *given: Any) -> tuple[list[Tensor], bool]:
        return call.apply(product, given, rebuilt=True)

    dims = [
        dimensions(call, i, x, shape) if isinstance(x, Tensor) else None for i, x in enumerate(call.given)
    ]
    return lowered_program(
        function, key, call.summed, shape, call.given, dims, call.device, narrow=shape[-1] <= WHOLE
    )


def outputs_of(call: Call, product: Tensor, given: Sequence[Any] | None = None) -> tuple[list[Tensor], bool]:
    """The function's results on a product in torch, cast as the kernel would; and whether it returned a tuple."""
    results, many = call.apply(product, call.given if given is None else given, given is not None)
    if not results or not all(isinstance(x, Tensor) for x in results):
        what = "something that is not a tensor" if results else "no tensor"
        raise TypeError(f"{call.op}: the epilogue returns {what}")
    columns = _columns_of_wide(call) if product.shape[-1] <= 2 else None
    types = output_types(call, types_of(results, product, columns))
    return [x.to(dtype) for x, dtype in zip(results, types, strict=True)], many


def types_of(
    results: Sequence[Tensor], product: Tensor, columns: Sequence[int] | None = None
) -> list[tuple[torch.dtype, bool]]:
    """The types of a function's results, and which of them are matrices and not the product's reduced rows.

    Args:
        columns: of the results of a wide product, where they are known. In a product of one column or two, its number
            of columns does not distinguish a row with a kept dimension from a matrix.
    """
    narrow = product.shape[-1] <= 2 and columns is None
    widths = [x.shape[-1] if x.dim() else 1 for x in results] if columns is None else columns
    return [
        (x.dtype, x.dim() == product.dim() and (narrow or width != 1))
        for x, width in zip(results, widths, strict=True)
    ]


def _columns_of_wide(call: Call) -> list[int] | None:
    """The columns of a call's results where the product is wide; None if the function fails there."""
    sizes = stand_ins(len(call.shape), bool(call.shape[-1] % 2))[0]

    def columns() -> list[int] | None:
        meta = [
            torch.empty(sizes.of(dimensions(call, i, x, call.shape)), dtype=x.dtype, device="meta")
            if isinstance(x, Tensor)
            else x
            for i, x in enumerate(call.given)
        ]
        product = torch.empty((*sizes.batch, sizes.M, sizes.N), dtype=call.summed, device="meta")
        try:
            return [x.shape[-1] if x.dim() else 1 for x in call.apply(product, meta, rebuilt=True)[0]]
        except (RuntimeError, ValueError, TypeError, IndexError):
            return None  # it depends on the sizes

    # In a separate thread, modes and the like around the call are not active.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(columns).result()


def output_types(call: Call, outputs: Sequence[tuple[torch.dtype, bool]]) -> list[torch.dtype]:
    """The types of results, given those that the function returns, and which of them are matrices.

    Matrices in the accumulator's type are cast to the type of a product, or to the requested one. Reduced rows, and
    results that the function has cast, stay as they are.
    """
    if call.saves:
        return [*output_types(replace(call, saves=False), outputs[:-1]), call.dtype]
    return kept_types(call.op, outputs, call.wide, call.b.default, call.options.out_dtype)


def kept_types(
    op: str,
    outputs: Sequence[tuple[torch.dtype, bool]],
    wide: torch.dtype,
    default: torch.dtype,
    out_dtype: OutTypes,
) -> list[torch.dtype]:
    """The same for a product that was summed in one type and has another type by default."""
    asked = out_dtype if isinstance(out_dtype, tuple) else (out_dtype,) * len(outputs)
    if len(asked) != len(outputs):
        raise ValueError(f"{op}: out_dtype names {len(asked)} types; the epilogue returns {len(outputs)}")
    types = []
    for (dtype, matrix), choice in zip(outputs, asked, strict=True):
        kept = default if dtype == wide and matrix else dtype
        if choice is not None and choice not in TYPES:
            raise TypeError(f"{op}: out_dtype is {choice}; an epilogue's results can be {_NAMES}")
        types.append(choice if choice is not None and (matrix or isinstance(out_dtype, tuple)) else kept)
    return types
