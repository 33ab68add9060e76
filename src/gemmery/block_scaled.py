"""Products of operands whose scales change along K: every step of the sum is scaled in the kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from . import fused
from .call import check, make_call
from .dispatch import Options
from .formats.scaled import ScaledTensor
from .problem import SCALED_EVERY


def product(
    a: ScaledTensor, b: ScaledTensor, function: Callable[..., Any], args: Sequence[Any], out: Tensor | None,
    options: Options,
) -> Any:  # fmt: skip
    """`function(dequantize(a) @ dequantize(b).T, *args)` by a kernel; the factors are known to fit each other.

    Args:
        a: (..., M, K), with scales of any kind; "128x128" for a matrix.
        b: (N, K), with scales of any kind.
    """
    how = options._replace(out_dtype=None)
    call = make_call("linear", a.data, b.data, None, function, args, options.out_dtype, how)
    (left, rows), (right, columns) = _by_steps(a), _by_steps(b)
    if b.kind == "tensor":
        # The same for all blocks, which the kernel reads but once.
        right, columns = right.expand(-(-b.shape[0] // SCALED_EVERY), -1), SCALED_EVERY
    call = replace(call, scales=(left, right, rows, columns))
    check(call)
    return fused.run(call, out)


def _by_steps(x: ScaledTensor) -> tuple[Tensor, int]:
    """One factor for each row, or for so many, and each step along K."""
    if x.kind == "128x128":
        return x.scale, SCALED_EVERY
    scale = x.scale.reshape(1, 1) if x.kind == "tensor" else x.scale
    return scale.expand(*scale.shape[:-1], -(-x.shape[-1] // SCALED_EVERY)), 1
