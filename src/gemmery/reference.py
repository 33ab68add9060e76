"""What every operation means, in plain torch.

The path for CPU tensors, the oracle of the tests and the documentation of the semantics. Each definition is short on
purpose: it promises values, not speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .problem import OUT_DTYPES, accumulator


def gemm(
    a: Tensor,
    b: Tensor,
    addend: Tensor | None = None,
    *,
    alpha: float = 1,
    beta: float = 1,
    out_dtype: torch.dtype | None = None,
    exact: bool = False,
) -> Tensor:
    """`alpha * (a @ b) + beta * addend` with torch.matmul's broadcasting, summed wide and rounded once at the end.

    Args:
        a: (..., M, K) or (K,).
        b: (..., K, N) or (K,).
        addend: anything that broadcasts to the result, or None; not looked at where `beta` is 0.
        out_dtype: type of the result; the operands' default output type if None.
        exact: compute in fp64 (int64 for int8) and return that, for use as an oracle.
    """
    wide = accumulator(a.dtype)
    if exact:
        wide = torch.int64 if a.dtype == torch.int8 else torch.float64
    if a.dtype == torch.int8:
        alpha, beta = int(alpha), int(beta)
    if a.dtype == torch.int8 and a.is_cuda:
        # torch has no integer product there; doubles hold these sums exactly.
        product = torch.matmul(a.double(), b.double()).to(wide)
    else:
        product = torch.matmul(a.to(wide), b.to(wide))
    if alpha != 1:
        product = product * alpha
    if addend is not None and beta != 0:
        product = product + (addend.to(wide) if beta == 1 else addend.to(wide) * beta)
    if exact:
        return product
    return product.to(out_dtype or OUT_DTYPES[a.dtype][0])
