"""The definition of every operation, in plain torch.

It is the path for CPU tensors, the oracle of the tests and the documentation of the semantics. Each definition is
deliberately short: it guarantees values, not speed.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .dtypes import OUT_DTYPES, accumulator


def gemm(
    a: Tensor,
    b: Tensor,
    addend: Tensor | None = None,
    *,
    alpha: float = 1,
    beta: float = 1,
    out_dtype: torch.dtype | None = None,
    by_rows: bool = False,
    exact: bool = False,
) -> Tensor:
    """`alpha * (a @ b) + beta * addend` with torch.matmul's broadcasting, accumulated in a wider type and rounded once.

    Args:
        a: (..., M, K) or (K,).
        b: (..., K, N) or (K,).
        addend: a tensor that broadcasts to the result, or None; not read if `beta` is 0.
        out_dtype: the type of the result; None means the default output type of the operands.
        by_rows: multiply each row separately, so that its bits depend neither on the other rows nor on their number.
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
        product = (_multiply_rows if by_rows else torch.matmul)(a.to(wide), b.to(wide))
    if alpha != 1:
        product = product * alpha
    if addend is not None and beta != 0:
        product = product + (addend.to(wide) if beta == 1 else addend.to(wide) * beta)
    if exact:
        return product
    return product.to(out_dtype or OUT_DTYPES[a.dtype][0])


def _multiply_rows(a: Tensor, b: Tensor) -> Tensor:
    """`torch.matmul(a, b)`, one row at a time."""
    rows = a if a.dim() > 1 else a.unsqueeze(0)
    matrices = b if b.dim() > 1 else b.unsqueeze(-1)
    batch = torch.broadcast_shapes(rows.shape[:-2], matrices.shape[:-2])
    rows = rows.expand(*batch, *rows.shape[-2:])
    matrices = matrices.expand(*batch, *matrices.shape[-2:])
    product = rows.new_empty((*rows.shape[:-1], matrices.shape[-1]))
    for place in itertools.product(*map(range, batch)):
        # A BLAS's choice of kernel may depend on addresses; all fresh copies have the same alignment.
        matrix = matrices[place].clone()
        for i, row in enumerate(rows[place]):
            product[(*place, i)] = torch.matmul(row.clone(memory_format=torch.contiguous_format), matrix)
    product = product if a.dim() > 1 else product.squeeze(-2)
    return product if b.dim() > 1 else product.squeeze(-1)
