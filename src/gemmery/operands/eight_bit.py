"""The base of 8-bit matrices with scales, for any kind of scale."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Operand


class EightBitOperand(Operand):
    """8-bit numbers that stand for `matrix * scale`.

    Attributes:
        scale: see the kinds.
    """

    scale: Tensor

    @property
    def default(self) -> torch.dtype:
        """The type of results does not depend on that of the numbers."""
        return torch.bfloat16

    @property
    def is_differentiable(self) -> bool:
        """No gradients go through 8-bit numbers."""
        return False

    def named(self, name: str) -> list[tuple[str, Tensor]]:
        return [(name, self.matrix), (f"{name}'s scales", self.scale)]
