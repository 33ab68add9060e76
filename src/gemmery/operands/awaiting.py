"""A first operand whose products wait for other GPUs: their epilogue reads data that these send.

See `kernels.shards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..epilogues.device import with_constants
from ..kernels import shards
from .base import Access, Layout, Operand, Spec
from .dense import Dense, DenseAccess, ExtendedOperand

if TYPE_CHECKING:
    from ..problem import Problem


class Arrivals(NamedTuple):
    """Counters by which other ranks signal that they have sent their data.

    Attributes:
        flags: (ranks,), int32: the last call for which each rank has sent its data.
        calls: (1,), int32: the number of this call.
        rank, ranks: this rank, and the number of ranks.
        failed: the address of an int32 that the GPU writes and the host reads: 0, or 1 + the rank that was missing.
        patience: microseconds for which a tile waits.
    """

    flags: Tensor
    calls: Tensor
    rank: int
    ranks: int
    failed: int
    patience: int


class AwaitingRows(NamedTuple):
    """Rows whose products wait, as `product.run.product` accepts them."""

    matrix: Tensor
    arrivals: Arrivals


@dataclass(frozen=True, slots=True)
class Awaiting(Dense):
    """A matrix whose products wait.

    Attributes:
        rank, ranks: see `Arrivals`.
    """

    rank: int = 0
    ranks: int = 1

    @property
    def awaits(self) -> bool:
        return True

    @property
    def takes_copies(self) -> bool:
        """A copy would be a plain matrix, whose products do not wait."""
        return False

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The matrix, `Arrivals.flags` and `Arrivals.calls`."""
        number = Layout(torch.int32, (), 0, 1, True)
        return (self, number, number)

    @property
    def numbers(self) -> int:
        """`Arrivals.failed` and `Arrivals.patience`."""
        return 2

    def shapes(self, rows: int, cols: int, batch: tuple[int, ...], is_b: bool) -> list[tuple[int, ...]]:
        return [(*batch, rows, cols), (1, self.ranks), (1, 1)]

    def access(self, problem: Problem, is_b: bool, tma: bool) -> Access:
        return AwaitingAccess(self, problem.M, problem.K, problem.batch, tma)

    def __str__(self) -> str:
        return f"{Spec.__str__(self)} behind {self.ranks} ranks"


class AwaitingAccess(DenseAccess):
    """The loader of such a matrix, whose PLACE waits."""

    layout: Awaiting

    def place(self, own: Any, is_cut: bool) -> Any:
        spec = self.layout
        return with_constants(shards.tile_behind, PLACE=own, RANK=spec.rank, RANKS=spec.ranks)

    def ready(self) -> Any:
        return with_constants(shards.all_there, RANK=self.layout.rank, RANKS=self.layout.ranks)

    def place_args(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Any, ...]:
        return (*tensors[1:], *numbers)


class AwaitingOperand(ExtendedOperand):
    """A matrix, (M, K), whose products wait."""

    def __init__(self, matrix: Tensor, arrivals: Arrivals) -> None:
        super().__init__(matrix)
        self.arrivals = arrivals
        self.tensors = (matrix, arrivals.flags, arrivals.calls)

    @property
    def values(self) -> tuple[Any, ...]:
        e = self.arrivals
        return *self.tensors, e.failed, e.patience

    @property
    def number_places(self) -> tuple[int, ...]:
        """Those of `Arrivals.failed` and `Arrivals.patience`."""
        first = len(self.tensors)
        return first, first + 1

    def lowered(self, op: str, names: tuple[str, str], dtype: torch.dtype) -> Operand:
        """See `Operand.lowered`; `distributed.calls.as_autocast` has converted the matrix."""
        return self

    def spec(self, matrix: Spec, along: Sequence[Layout], problem: Problem) -> Spec:
        m, e = matrix, self.arrivals
        return Awaiting(m.dtype, m.steps, m.row, m.col, m.aligned, None, e.rank, e.ranks)

    @property
    def text(self) -> str:
        """Part of a call's key. No operator takes such operands."""
        return f"awaiting:{self.arrivals.rank}:{self.arrivals.ranks}"
