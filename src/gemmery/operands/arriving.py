"""A first operand whose products wait for other GPUs: for rows of it, or for data that the epilogue reads.

See `kernels.shards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..epilogues.device import with_constants
from ..kernels import operands as loaders
from ..kernels import shards
from .base import Access, Layout, Operand, Spec
from .dense import Dense, DenseAccess, DenseOperand

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
        of_rows: whether each rank sends a shard of the rows, one behind the other, and a tile waits for the rank whose
            rows it has. Otherwise each tile waits for all ranks.
    """

    flags: Tensor
    calls: Tensor
    rank: int
    ranks: int
    failed: int
    patience: int
    of_rows: bool = True


class ArrivingRows(NamedTuple):
    """Rows that arrive, as `product.run.product` accepts them.

    Attributes:
        own: this rank's shard, if it is not part of the matrix: contiguous, as the matrix is, and aligned.
    """

    matrix: Tensor
    arrivals: Arrivals
    own: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Arriving(Dense):
    """A matrix, maybe with one shard of rows for each rank, of equal size.

    Attributes:
        rank, ranks, of_rows: see `Arrivals`.
        is_apart: see `Spec.apart`.
    """

    rank: int = 0
    ranks: int = 1
    of_rows: bool = True
    is_apart: bool = False

    @property
    def arrives(self) -> bool:
        return True

    @property
    def apart(self) -> bool:
        return self.is_apart

    @property
    def shards(self) -> int:
        return self.ranks if self.of_rows else 1

    @property
    def takes_copies(self) -> bool:
        """The rows are not there yet."""
        return False

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The matrix, this rank's shard if it is in separate memory, `Arrivals.flags` and `Arrivals.calls`."""
        number = Layout(torch.int32, (), 0, 1, True)
        return (self, *((replace(self, is_apart=False),) if self.apart else ()), number, number)

    @property
    def numbers(self) -> int:
        """`Arrivals.failed` and `Arrivals.patience`."""
        return 2

    def shapes(self, rows: int, cols: int, batch: tuple[int, ...], is_b: bool) -> list[tuple[int, ...]]:
        own = [(*batch, rows // self.ranks, cols)] if self.apart else []
        return [(*batch, rows, cols), *own, (1, self.ranks), (1, 1)]

    def access(self, problem: Problem, is_b: bool, tma: bool) -> Access:
        return ArrivingAccess(self, problem.M, problem.K, problem.batch, tma)

    def __str__(self) -> str:
        apart = ", own apart" if self.apart else ""
        return f"{Spec.__str__(self)} {'from' if self.of_rows else 'behind'} {self.ranks} ranks{apart}"


class ArrivingAccess(DenseAccess):
    """The loader of such a matrix, whose PLACE waits."""

    layout: Arriving

    def _plain_loader(self) -> Any:
        spec = self.layout
        if not spec.apart:
            return super()._plain_loader()
        assert not self.tma
        return with_constants(loaders.load_apart, RANK=spec.rank, RANKS=spec.ranks)

    def behind_strides(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Any, ...]:
        """This rank's shard, if it is in separate memory."""
        return (tensors[1],) if self.layout.apart else ()

    def place(self, own: Any, is_cut: bool) -> Any:
        spec = self.layout
        if not spec.of_rows:
            return with_constants(shards.tile_behind, PLACE=own, RANK=spec.rank, RANKS=spec.ranks)
        # Tensor maps are chosen by a mark, pointers by the row.
        return with_constants(
            shards.arriving_tile, PLACE=own, RANK=spec.rank, RANKS=spec.ranks, MARKS=spec.apart and self.tma
        )

    def ready(self) -> Any:
        spec = self.layout
        return None if spec.of_rows else with_constants(shards.all_there, RANK=spec.rank, RANKS=spec.ranks)

    def place_args(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Any, ...]:
        return (*tensors[1 + self.layout.apart :], *numbers)


class ArrivingOperand(DenseOperand):
    """Such a matrix.

    Args:
        matrix: (M, K).
        own: see `ArrivingRows`.
    """

    def __init__(self, matrix: Tensor, arrivals: Arrivals, own: Tensor | None = None) -> None:
        super().__init__(matrix)
        self.arrivals, self.own = arrivals, own
        self.tensors = (matrix, *(() if own is None else (own,)), arrivals.flags, arrivals.calls)

    @property
    def values(self) -> tuple[Any, ...]:
        e = self.arrivals
        return *self.tensors, e.failed, e.patience

    @property
    def places(self) -> tuple[int, ...]:  # type: ignore[override]
        """See `Operand.places`."""
        return tuple(range(len(self.tensors)))

    @property
    def number_places(self) -> tuple[int, ...]:
        """Those of `Arrivals.failed` and `Arrivals.patience`."""
        first = len(self.tensors)
        return first, first + 1

    @property
    def is_dense(self) -> bool:
        """It has more than a matrix."""
        return False

    def named(self, name: str) -> list[tuple[str, Tensor]]:
        return [(name, self.matrix)]

    def lowered(self, op: str, names: tuple[str, str], dtype: torch.dtype) -> Operand:
        """See `Operand.lowered`; a matrix is converted to autocast's type before it is sent."""
        return self

    def along(self) -> list[tuple[Tensor, int]]:
        return []

    def spec(self, matrix: Spec, along: Sequence[Layout], problem: Problem) -> Spec:
        m, e = matrix, self.arrivals
        return Arriving(
            m.dtype, m.steps, m.row, m.col, m.aligned, None, e.rank, e.ranks, e.of_rows, self.own is not None
        )  # fmt: skip

    @property
    def text(self) -> str:
        """Part of a call's key. No operator takes such operands."""
        e = self.arrivals
        return f"arriving:{e.rank}:{e.ranks}:{e.of_rows}:{self.own is not None}"
