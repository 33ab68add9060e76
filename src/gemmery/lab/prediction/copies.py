"""Copies that torch makes of matrices, before or after a product, and their time.

`Tensor.copy_` reads a source in the order of its destination. If the source's elements are adjacent in that order, or
nearly so, a copy is a stream; if each is far from the one before, each takes a separate sector of memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...devices import Device

#: Bytes that memory moves at least.
SECTOR = 32


@dataclass(frozen=True)
class Copies:
    """The bytes that copies move.

    Attributes:
        straight: bytes of copies that are streams, read and written.
        turned: bytes of the others, with a sector for each element that is read.
        launches: how many copies there are.
    """

    straight: float = 0.0
    turned: float = 0.0
    launches: int = 0

    @classmethod
    def of(cls, elements: int, itemsize: int, stride: int, launches: int = 1) -> Copies:
        """Copies of a matrix.

        Args:
            stride: elements between neighbors of the destination's rows in the source.
        """
        if stride * itemsize < SECTOR // 2:
            return cls(straight=2.0 * itemsize * elements * launches, launches=launches)
        return cls(turned=float((SECTOR + itemsize) * elements * launches), launches=launches)

    def __add__(self, other: Copies) -> Copies:
        return Copies(
            self.straight + other.straight, self.turned + other.turned, self.launches + other.launches
        )

    def parts(self, device: Device) -> dict[str, float]:
        """Seconds at the whole bandwidth, and the launches, for `seconds`."""
        return {
            "copies_straight": self.straight / device.bandwidth,
            "copies_turned": self.turned / device.bandwidth,
            "copies": float(self.launches),
        }


def seconds(parts: Mapping[str, Any], c: Mapping[str, float]) -> Any:
    """The time of copies, from their parts, as numbers or arrays, and the constants of a GPU."""
    return (
        parts["copies_straight"] / c["copy_straight"]
        + parts["copies_turned"] / c["copy_turned"]
        + parts["copies"] * c["copy_launch"]
    )
