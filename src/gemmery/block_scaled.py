"""Products of operands whose scales change along K: every step of the sum is scaled in the kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import fused
from .call import check, make_call
from .dispatch import Options, needs_dispatcher
from .formats.scaled import BLOCK, MX_BLOCK, ScaledTensor
from .fused_ops import dispatched


def product(
    a: ScaledTensor, b: ScaledTensor, function: Callable[..., Any], args: Sequence[Any], out: Tensor | None,
    options: Options,
) -> Any:  # fmt: skip
    """`function(dequantize(a) @ dequantize(b).T, *args)` by a kernel; the factors are known to fit each other.

    Args:
        a: (..., M, K), with scales of any kind; "128x128" for a matrix.
        b: (N, K), with scales of any kind; of 32 columns only if a has none of 128.
    """
    how = options._replace(out_dtype=None)
    call = make_call("linear", a.data, b.data, None, function, args, options.out_dtype, how)
    step = MX_BLOCK if "1x32" in (a.kind, b.kind) else BLOCK
    (left, rows), (right, columns) = _by_steps(a, step), _by_steps(b, step)
    if b.kind == "tensor":
        # The same for all blocks, which the kernel reads but once.
        right, columns = right.expand(-(-b.shape[0] // BLOCK), -1), BLOCK
    call = replace(call, scales=(left, right, rows, columns, step))
    check(call)
    if needs_dispatcher((out, *call.tensors)):
        return dispatched(call, out)
    return fused.run(call, out)


def _by_steps(x: ScaledTensor, step: int) -> tuple[Tensor, int]:
    """One factor for each row, or for so many, and each step of so many columns along K."""
    if x.kind == "1x32":
        # Triton has no such type.
        return x.scale.view(torch.uint8), 1
    if x.kind == "128x128":
        return x.scale, BLOCK
    scale = x.scale.reshape(1, 1) if x.kind == "tensor" else x.scale
    if x.kind == "1x128":
        return scale, 1
    return scale.expand(*scale.shape[:-1], -(-x.shape[-1] // step)), 1
