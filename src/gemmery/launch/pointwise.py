"""A traced epilogue over a matrix in memory, without a product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..devices import on_device, overlap_on
from ..epilogues.device import function
from ..kernels import operands as access
from ..kernels import pointwise as kernel
from ..layout import fold_blocks
from ..operands import Traced
from ..operands.base import negated
from ..operands.scalars import traced_arguments
from ..schedules.binding import TL

if TYPE_CHECKING:
    from ..epilogues.results import Results

#: Rows and columns of the blocks that `pointwise` walks over.
_BLOCK = (32, 128)


def pointwise(results: Results, first: Tensor, inputs: Sequence[Any]) -> list[Tensor]:
    """The results of a program over blocks of a matrix in memory, without a product.

    Args:
        results: of the program for `first`.
        inputs: the program's, after `first`.
    """
    made = results.program
    rows, columns = _BLOCK
    tensors = results.allocate(first.device, -(-first.shape[-1] // columns))
    out, extras = results.main(tensors), results.extras(inputs, tensors)
    width = first.shape[-1]
    batch, M, (its, to, *operands) = fold_blocks(first, [(out, width), *results.widths(extras)])
    traced = Traced(made.source, tuple(operands))
    slots = (columns,) if results.reduces else ()
    args = (*traced_arguments(traced, extras, results.numbers(inputs)), *slots)
    wide = max(x.row * rows + x.col * columns for x in (its, to, *operands)) >= 1 << 31
    matrices = math.prod(batch)
    grid = (matrices * -(-M // rows) * -(-width // columns),)
    if grid[0]:
        with on_device(first):
            kernel.pointwise[grid](
                first, out, args, M, width, batch, *[(negated(x), x.row, x.col) for x in (its, to)],
                EPILOGUE=function(made.source), ACC=TL[results.wide], OUT=TL[out.dtype],
                STORE=access.store_nothing if made.main is None else access.store_strided,
                BLOCK_M=rows, BLOCK_N=columns, WIDE=wide, **overlap_on(first), num_warps=4,
            )  # fmt: skip
    return results.finish(tensors)
