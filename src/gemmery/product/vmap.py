"""`torch.vmap` of the operator: the dimension that it hides becomes the first of the product's batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..operands.dense import leading
from .flat import call_of, parsed
from .operator import LIBRARY


def mapped(
    size: int, tensors: list[Tensor], dims: Sequence[int | None], flat: tuple[Any, ...]
) -> tuple[list[Tensor], tuple[Any, ...]]:
    """The operator's arguments for a product with one dimension more.

    Args:
        size: the size of the dimension.
        dims: for each tensor, the place of the dimension; None if it is not mapped.
        flat: the operator's other arguments.
    """
    call, d = call_of(tensors, *flat), parsed(flat[2])
    end = d.of_a + d.of_b
    dims_a, dims_b = dims[: d.of_a], dims[d.of_a : end]
    rank = max(
        x.matrix.dim() - any(dim is not None for dim in its)
        for x, its in ((call.a, dims_a), (call.b, dims_b))
    )
    is_mapped = any(dim is not None for dim in dims_b)
    b = call.b.mapped(dims_b, rank, size, is_mapped)
    # The product always has the dimension.
    a = call.a.mapped(dims_a, rank, size, everywhere=not is_mapped)
    others = [leading(x, dim, rank, size) for x, dim in zip(tensors[end:], dims[end:], strict=True)]
    # The product now has one dimension more than the user's call, which only a general product accepts.
    sizes, numbers, text, batch_invariant = flat
    return [*a.tensors, *b.tensors, *others], (
        sizes,
        numbers,
        f"matmul|{text.split('|', 1)[1]}",
        batch_invariant,
    )


def _vmap(info: Any, in_dims: Any, tensors: list[Tensor], *rest: Any) -> Any:
    *flat, save = rest
    moved, again = mapped(info.batch_size, tensors, in_dims[0], tuple(flat))
    results = torch.ops.gemmery.product(moved, *again, save)
    return results, [0 if x.dim() > 1 else None for x in results]


torch.library.register_vmap("gemmery::product", _vmap, lib=LIBRARY)
