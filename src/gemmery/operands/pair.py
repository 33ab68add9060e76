"""A second operand that is two matrices side by side, such as the weights of gate and up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .dense import Dense

if TYPE_CHECKING:
    from ..problem import Problem


@dataclass(frozen=True, slots=True)
class Pair(Dense):
    """Two matrices of the same strides, the left and the right half of the columns; the layout is the left one's.

    Attributes:
        distance: elements from the left half to the right one, which need not be of one allocation.
    """

    distance: int = 0

    def alike(self) -> Pair:
        """See `Spec.alike`: it hardly matters how far apart the halves are."""
        # The distance's divisors, which loads and descriptors look at, and whether it takes 32 bits.
        distance = (self.distance % 16 or 16) + (self.distance >> 31 > 0) * (1 << 31)
        return replace(self, distance=distance)

    def half_stride(self, problem: Problem) -> int:
        """See `Dense.half_stride`."""
        return self.distance
