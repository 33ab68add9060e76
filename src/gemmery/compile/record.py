"""A record of the products for which gemmery was offered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..memo import keep

#: The prefix of the names of gemmery's choices.
PREFIX = "gemmery_"


@dataclass
class Offer:
    """A product for which Inductor could choose gemmery.

    Attributes:
        op: "mm", "addmm" or "bmm".
        shape: M, N and K; before them the batch of a bmm.
        dtype: the type of the operands and of the result.
        strides: those of both matrices.
        times: the times by which Inductor chose, without the margin, in seconds, by the name of the choice; infinite
            where one failed. Empty if it did not measure, because there was a single choice.
        count: how many products of this kind were compiled.
        used: how many of them call gemmery. If gemmery is the fastest and is not called, the difference is less than
            the margin, or a Triton template with fused operators was faster than gemmery followed by a separate kernel.
        again: those of the kernels that were measured again, in turn; empty if Inductor's cache had the times.
    """

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[tuple[int, ...], ...]
    times: dict[str, float] = field(default_factory=dict)
    count: int = 0
    used: int = 0
    again: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """The product, gemmery's time and that of the fastest other choice, and how often gemmery is used."""
        ours = [name for name in self.times if name.startswith(PREFIX)]
        others = sorted(self.times.keys() - set(ours), key=self.times.__getitem__)
        times = ", ".join(f"{name} {self.times[name] * 1e6:.1f} µs" for name in [*ours, *others[:1]])
        sizes = " × ".join(map(str, self.shape))
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.op} {sizes}, {kind}: {times or 'not measured'}; gemmery in {self.used} of {self.count}"


_offers: dict[tuple[object, ...], Offer] = {}


def offered(op: str, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[Sequence[int]]) -> Offer:
    """The record of a product, which was offered once more."""
    key = op, tuple(shape), dtype, tuple(map(tuple, strides))
    offer = _offers.get(key) or keep(_offers, key, Offer(*key))
    offer.count += 1
    return offer


def choices() -> list[Offer]:
    """The products for which Inductor could choose gemmery in this process, with the times of all choices.

    Code from Inductor's cache was chosen earlier and does not appear.

    Example:
        >>> import gemmery.compile
        >>> for offer in gemmery.compile.choices():
        ...     print(offer)
    """
    return list(_offers.values())
