"""A matrix of 8-bit numbers with one scale, or one for each row: a plain matrix whose product is scaled outside."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .base import Operand, batch_axes
from .dense import leading
from .eight_bit import EightBitOperand


class RowScaledOperand(EightBitOperand):
    """8-bit numbers that stand for `data * scale`, as (..., M, K), or as (K, N) for a weight (N, K).

    Args:
        data: the numbers, as the product has them.
        scale: one number, or one for each row: () or (..., M, 1) for A, () or (N,) for B.
    """

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.matrix, self.scale = data, scale
        self.tensors, self.launched, self.places = (data, scale), (data,), (0,)

    @property
    def outer(self) -> Tensor | None:
        """The scale."""
        return self.scale

    @property
    def outer_place(self) -> int:
        return 1

    def in_torch(self) -> Tensor:
        return self.matrix

    @property
    def text(self) -> str:
        return "rows"

    @classmethod
    def rebuild(
        cls, facts: Sequence[str], tensors: Sequence[Tensor], sizes: Sequence[int]
    ) -> RowScaledOperand:
        """See `operands.rebuild`."""
        data, scale = tensors
        return cls(data, scale)

    def axes(self, rows: str, columns: str) -> list[tuple[str, ...]]:
        data, scale = self.matrix, self.scale
        own = (*batch_axes(data, 2), rows, columns)
        if scale.numel() == 1:
            return [own, ("",) * scale.dim()]
        return [own, (*batch_axes(scale, 2), rows, "") if columns == "K" else ("N",)]

    def mapped(self, dims: Sequence[int | None], rank: int, size: int, everywhere: bool) -> Operand:
        data = leading(self.matrix, dims[0], rank, size, everywhere)
        return RowScaledOperand(data, leading(self.scale, dims[1], rank, size))
