"""A first operand whose columns are spread over several GPUs: the product is the sum over all of them.

The sum is part of the kernel; see `kernels.ranks`. The epilogue is given the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..epilogues.device import with_constants
from ..kernels import ranks
from .base import Layout, Operand, Spec
from .dense import Dense, ExtendedOperand

if TYPE_CHECKING:
    from ..problem import Problem

#: The number of rows from which on ranks send each other partial sums that are rounded to the type of the operands, if
#: the result is rounded, too: the time is then that of the bytes.
ROUNDED = 64
#: Those types, as `kernels.ranks` names them.
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
#: The most rows for `sliced_k`, whose accumulators are along rows. Most other schedules swap operands.
SLICED = 8


class Exchange(NamedTuple):
    """The memory in which ranks exchange partial sums.

    Attributes:
        buffers: one of each rank, (2, ranks, size), int32, each of which all ranks can write.
        uses: (size / 64 + 1,), int32: the number of products that each 8 by 8 elements have been part of, and whether
            an exchange failed.
        rank: this one.
        size: places for a product's elements; see `places_of`.
        failed: the address of an int32 that the GPU writes and the host reads: 0, or 1 + the rank that was missing.
        patience: microseconds for which a block waits for the partial sums of another rank.
    """

    buffers: tuple[Tensor, ...]
    uses: Tensor
    rank: int
    size: int
    failed: int
    patience: int


def places_of(rows: int, columns: int) -> int:
    """The places that a product of this many rows and columns takes, in squares of 8 by 8 of two halves of columns."""
    return -(-rows // 8) * -(-columns // 16) * 128


class SummedOver(NamedTuple):
    """A first operand whose product is summed over ranks, as public functions pass it on."""

    matrix: Tensor
    exchange: Exchange


@dataclass(frozen=True, slots=True)
class Summed(Dense):
    """A matrix of which each rank has some columns.

    Attributes:
        rank, size: see `Exchange`.
        ranks: how many there are.
        scale: the layout of the scales of the rank's columns of the product, or None.
        exchanged: the layouts of the ranks' buffers and of `Exchange.uses`.
    """

    rank: int = 0
    ranks: int = 1
    size: int = 0
    scale: Layout | None = None
    exchanged: tuple[Layout, ...] = ()

    @property
    def is_summed(self) -> bool:
        """It is."""
        return True

    @property
    def takes_copies(self) -> bool:
        """A copy would be a matrix of one rank."""
        return False

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The matrix, the exchanged tensors, and the scales."""
        return (self, *self.exchanged, *(() if self.scale is None else (self.scale,)))

    @property
    def numbers(self) -> int:
        """`Exchange.failed` and `Exchange.patience`."""
        return 2

    def shapes(self, rows: int, cols: int, batch: tuple[int, ...], is_b: bool) -> list[tuple[int, ...]]:
        buffers = [(1, 2 * self.ranks * self.size)] * self.ranks
        scale = [] if self.scale is None else [(1, self.size)]
        return [(*batch, rows, cols), *buffers, (1, self.size // 64 + 1), *scale]

    def of_partial_sum(self, problem: Problem, epilogue: Any, reads_ahead: bool) -> Any:
        # The layout of squares must be the same on all ranks, so it follows from the number of rows.
        p = problem
        halves = self.dtype in NAMES and p.out.dtype.itemsize == 2
        rounds = halves and p.M >= ROUNDED and not p.batch_invariant
        return with_constants(
            ranks.of_ranks, EPILOGUE=epilogue, RANK=self.rank, RANKS=self.ranks, SCALED=self.scale is not None,
            AHEAD=reads_ahead, TURNED=problem.M > SLICED, HALF=NAMES[self.dtype] if rounds else None,
        )  # fmt: skip

    def before_sum(self, prefetch: Any) -> Any:
        return with_constants(
            ranks.before_sum, PREFETCH=prefetch, FIRST=self.ranks + 5 + (self.scale is not None)
        )

    def sum_arguments(
        self, problem: Problem, tensors: Sequence[Any], numbers: Sequence[float]
    ) -> tuple[Any, ...]:
        return (*tensors[1:], self.size, problem.N, *numbers[len(numbers) - 2 :])

    def __str__(self) -> str:
        return f"{Spec.__str__(self)} summed over {self.ranks} ranks"


class SummedOperand(ExtendedOperand):
    """A matrix of which each rank has some columns.

    Args:
        matrix: (..., M, K) of this rank.
        exchange: the memory in which partial sums meet.
        scale: (N,), by which the rank's columns of the product are multiplied before the sum; or None.
    """

    def __init__(self, matrix: Tensor, exchange: Exchange, scale: Tensor | None = None) -> None:
        self.exchange, self.scale = exchange, scale
        super().__init__(matrix)
        self.exchanged = (*exchange.buffers, exchange.uses)
        self.tensors = (matrix, *self.exchanged, *(() if scale is None else (scale,)))

    @property
    def values(self) -> tuple[Any, ...]:
        e = self.exchange
        return self.matrix, *self.exchanged, self.scale, e.failed, e.patience

    @property
    def number_places(self) -> tuple[int, ...]:
        """Those of `Exchange.failed` and `Exchange.patience`."""
        first = 2 + len(self.exchanged)
        return first, first + 1

    def lowered(self, op: str, names: tuple[str, str], dtype: torch.dtype) -> Operand:
        matrix = super().lowered(op, names, dtype).matrix
        return self if matrix is self.matrix else SummedOperand(matrix, self.exchange, self.scale)

    def spec(self, matrix: Spec, along: Sequence[Layout], problem: Problem) -> Spec:
        m, e = matrix, self.exchange
        exchanged = tuple([Layout(torch.int32, (), 0, 1, True)] * len(self.exchanged))
        scale = self.scale
        of_scale = None if scale is None else Layout(scale.dtype, (), 0, 1, scale.data_ptr() % 16 == 0)
        return Summed(
            m.dtype, m.steps, m.row, m.col, m.aligned, None, e.rank, len(e.buffers), e.size, of_scale,
            exchanged,
        )  # fmt: skip

    @property
    def text(self) -> str:
        """Part of a call's key. No operator takes such operands."""
        e = self.exchange
        return f"summed:{e.rank}:{len(e.buffers)}:{e.size}"
