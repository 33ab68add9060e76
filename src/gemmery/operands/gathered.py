"""A second operand whose rows are selected from a matrix by their numbers, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .base import Access, Layout, Multiply, Operand, Spec
from .dense import Dense, DenseAccess

if TYPE_CHECKING:
    from ..problem import Problem


@dataclass(frozen=True, slots=True)
class Gathered(Dense):
    """A matrix whose rows are selected from another one; the layout is that of the other one.

    Attributes:
        numbers_of: the layout of the rows' numbers.
    """

    numbers_of: Layout | None = None

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Those of the matrix and of the rows' numbers."""
        assert self.numbers_of is not None
        return (self, self.numbers_of)

    def suits_tma(self, problem: Problem, is_b: bool) -> bool:
        """TMA has no gather before Blackwell."""
        return False

    def access(self, problem: Problem, is_b: bool, tma: bool) -> Access:
        assert is_b
        return GatheredAccess(self, problem.K, problem.N, problem.batch, tma).gathering()

    def __str__(self) -> str:
        return f"{Dense.__str__(self)} gathered"


class GatheredAccess(DenseAccess):
    """The loader of gathered rows."""

    def behind_strides(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Any, ...]:
        """The rows' numbers."""
        return (tensors[1],)


class GatheredOperand(Operand):
    """Rows of a matrix as the second operand of a product of ranges of K.

    Args:
        source: (rows, N).
        numbers: (K,), int32, the row of `source` for each row of the operand. They are read along K.
    """

    def __init__(self, source: Tensor, numbers: Tensor) -> None:
        self.source, self.numbers = source, numbers
        self.tensors = self.launched = (source, numbers)
        self.places = (0, 1)
        self.matrix = source.new_empty(()).expand(numbers.shape[0], source.shape[1])

    def named(self, name: str) -> list[tuple[str, Tensor]]:
        return [(name, self.source), ("gather", self.numbers)]

    def in_torch(self) -> Tensor:
        # Numbers after the last group need not be valid, and their rows are not used.
        rows = self.source.shape[0]
        if rows == 0:
            return self.source.new_zeros(self.numbers.shape[0], self.source.shape[1])
        return self.source.index_select(0, self.numbers.clamp(0, rows - 1))

    def spec(self, matrix: Spec, along: Sequence[Layout], problem: Problem) -> Spec:
        m, x = matrix, self.source
        numbers = Layout(self.numbers.dtype, m.steps, 0, 1, self.numbers.data_ptr() % 16 == 0)
        return Gathered(m.dtype, m.steps, x.stride(0), x.stride(1), x.data_ptr() % 16 == 0, None, numbers)

    @property
    def text(self) -> str:
        return "gathered"

    def mapped(self, dims: Sequence[int | None], rank: int, size: int, everywhere: bool) -> Operand:
        raise NotImplementedError("vmap: a product of gathered rows can't be mapped")

    def gradients(
        self, a: Tensor, grad: Tensor, multiply: Multiply, needs: tuple[bool, Sequence[bool]]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        raise NotImplementedError("a product of gathered rows, of a backward pass, has no derivative")
