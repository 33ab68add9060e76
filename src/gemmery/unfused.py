"""A product with an epilogue in two steps: the bare product, which is an operator, then the function, in torch.

The function runs once, as the user wrote it, and its gradient is torch's. Gradients go this way where there is no
kernel, where the function can't be run again as it was, and for packed weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .call import Call, described, kept_types, output_types, outputs_of
from .dispatch import OutTypes
from .dtypes import accumulator
from .formats.tensor import QuantizedTensor
from .ops import gemm, in_transform
from .problem import config_text
from .results import returned


def unfused(call: Call) -> Any:
    """What the function of a call returns."""
    call = call.opened()
    if call.does_nothing:
        (dtype,) = output_types(call, [(call.summed, True)])
        return product_of(call, dtype)
    # The operator has multiplied by the channel's scale.
    rest = replace(call, weight=None, inputs=call.inputs[call.scaled :])
    results, many = outputs_of(rest, product_of(call, call.summed))
    return returned(results, many)


def product_of(call: Call, dtype: torch.dtype) -> Tensor:
    """A call's bare product, without biases, in a type."""
    _, *how, config = call.options
    if call.weight is not None:
        return packed_product(call.op, call.a, call.weight, (dtype, *how, config))
    text = config_text(config)
    halves = [gemm(call.a, b, None, 1, 1, dtype, *how, text) for b in (call.b, call.right) if b is not None]
    return halves[0] if len(halves) == 1 else torch.cat(halves, dim=-1)


def packed_product(op: str, a: Tensor, b: QuantizedTensor, options: Sequence[Any]) -> Tensor:
    """A product with a packed weight and nothing behind it, as an operator; options as `dispatch.Options`."""
    from .packed_ops import Packed, flat

    *how, config = options
    run = Packed.apply if in_transform() else torch.ops.gemmery.packed
    made: Tensor = run(a, *flat(b), op, *how, config_text(config))
    return made


def behind(
    op: str, product: Tensor, biases: Sequence[Tensor], epilogue: Any, args: Sequence[Any], dtype: torch.dtype,
    out_dtype: OutTypes,
) -> Any:  # fmt: skip
    """What an epilogue makes of a product in code that torch.compile traces, where it is compiled with that code.

    Args:
        product: in the type of sums.
        dtype: the operands'.
    """
    for part in biases and [biases[0] if len(biases) == 1 else torch.cat(list(biases), -1)]:
        product = product + part
    made = epilogue(product, *args)
    many = isinstance(made, tuple | list)
    results = list(made) if many else [made]
    types = kept_types(op, described(results, product), accumulator(dtype), dtype, out_dtype)
    results = [x.to(kind) for x, kind in zip(results, types, strict=True)]
    return returned(results, many)
