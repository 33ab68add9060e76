"""Consecutive groups of rows, or ranges of K, of one matrix, each for its own matrix of a batch.

Only the GPU knows where the groups end. A product of groups of rows is a product of a batch that shares its first
operand and its result. Each row belongs to one matrix of the batch, and the place of a unit of work tells which one,
see `kernels.place`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from .. import devices, reference
from ..epilogues.device import with_constants
from ..kernels import place
from .base import Access, Layout, Multiply, Operand, Spec
from .dense import DenseOperand
from .gathered import GatheredOperand

if TYPE_CHECKING:
    from ..formats.scaled import ScaledTensor
    from ..problem import Config, Problem
    from ..product.prologue import Prologue

#: The kinds of groups: rows of the product, or ranges of K.
Axis = Literal["rows", "k"]
#: The most groups that a program examines together.
SCAN = 1024


class Groups(NamedTuple):
    """A first operand in groups, as public functions pass it on.

    Attributes:
        matrix: (R, K), or (M, K) where ranges of K are groups.
        offs: (G,), int32, the end of each group.
        axis: what the groups are of.
        gather: (R,), int32, the row of `matrix` that each row of the product reads; None for its own.
        scatter: (R,), int32, the row of the result that each row of the product becomes; None for its own.
        scale: (R, 1), float32, the scales of gathered rows, which replace the matrix's; None to use the matrix's.
        weight_grad: buffers to which the gradients of the second operand's matrices are added, laid out as these; or
            none.
    """

    matrix: Tensor | ScaledTensor
    offs: Tensor
    axis: Axis = "rows"
    gather: Tensor | None = None
    scatter: Tensor | None = None
    scale: Tensor | None = None
    weight_grad: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Ragged(Spec):
    """A matrix in groups; the layout is that of a batch of matrices, all in the same memory.

    Attributes:
        inner: the matrix without groups, of the same layout.
        axis: what the groups are of.
        gathers, scatters: whether rows are read from, and stored to, other rows than those with their numbers.
        indices: the layouts of the ends of groups, and of the numbers of rows.
    """

    inner: Spec | None = None
    axis: Axis = "rows"
    gathers: bool = False
    scatters: bool = False
    indices: tuple[Layout, ...] = ()

    @property
    def ragged(self) -> str:
        return self.axis

    @property
    def ungrouped(self) -> Spec:
        """See `Spec.ungrouped`."""
        assert self.inner is not None
        return self.inner

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Those of the matrix, then the ends of groups and the numbers of rows."""
        return (*self.ungrouped.layouts, *self.indices)

    @property
    def is_scaled(self) -> bool:
        """Whether the matrix's scales change along K."""
        return self.ungrouped.is_scaled

    @property
    def by_steps(self) -> bool:
        """See `Spec.by_steps`."""
        return self.ungrouped.by_steps

    @property
    def summed(self) -> torch.dtype:
        """See `Spec.summed`."""
        return self.ungrouped.summed

    def usual(self, row: int, col: int) -> Spec:
        """One without groups."""
        return self.ungrouped.usual(row, col)

    def refusal(self, problem: Problem, config: Config) -> str | None:
        return self.ungrouped.refusal(problem, config)

    def suits_tma(self, problem: Problem, is_b: bool) -> bool:
        """Gathered rows come through pointers in any case, so they have no further needs."""
        return self.by_pointers or self.ungrouped.suits_tma(problem, is_b)

    @property
    def by_pointers(self) -> bool:
        """Whether TMA can't load its blocks: gathered rows, and groups that are adjacent.

        A group may begin anywhere, but along adjacent elements TMA loads only from multiples of 16 bytes.
        """
        return self.gathers or (self.axis == "rows" and self.col != 1)

    def access(self, problem: Problem, is_b: bool, tma: bool) -> Access:
        return RaggedAccess(self, problem, tma and not self.by_pointers)

    def __str__(self) -> str:
        marks = " gathered" * self.gathers + " scattered" * self.scatters
        return f"{self.ungrouped} in groups of {'K' if self.axis == 'k' else 'rows'}{marks}"


class RaggedAccess(Access):
    """The loader of a matrix in groups, and the places of its units of work."""

    def __init__(self, spec: Ragged, problem: Problem, tma: bool) -> None:
        inner = spec.ungrouped.access(problem, is_b=False, tma=tma)
        self.inner = inner.gathering() if spec.gathers else inner
        self.strides = inner.strides
        self.spec, self.groups = spec, problem.matrices
        self.gathers, self.scatters = spec.gathers, spec.scatters
        # The place of the groups' ends among the tensors.
        self.first = len(spec.ungrouped.layouts)

    def loader(self) -> Any:
        return self.inner.loader()

    def argument(self, tensors: Sequence[Tensor], block_rows: int, block_cols: int) -> Any:
        return self.inner.argument(tensors, block_rows, block_cols)

    def behind_strides(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Any, ...]:
        """The numbers of gathered rows, then what the matrix's loader takes."""
        return (*self._gathered(tensors), *self.inner.behind_strides(tensors[: self.first], numbers))

    def step_scales(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The matrix's, then those of the gathered rows' numbers."""
        scales = self.inner.step_scales(tensors[: self.first])
        return (*scales, *self._gathered(tensors)) if scales else ()

    def _gathered(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        return (tensors[self.first + 1],) if self.gathers else ()

    def place(self, own: Any, is_cut: bool) -> Any:
        if self.spec.axis == "k":
            return with_constants(place.part_of_ranges, **self._scan) if is_cut else place.tile_of_ranges
        return with_constants(place.tile_of_rows, **self._scan)

    def group_of(self) -> Any:
        return with_constants(place.group_of, **self._scan, LEAST=0)

    @property
    def _scan(self) -> dict[str, Any]:
        """How groups are examined, see `place.group_of`: the rows after the last one are one more."""
        count = self.groups + 1
        scan = min(int(triton.next_power_of_2(count)), SCAN)
        return {"SCAN": scan, "ALL": count <= scan}

    def place_args(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Any, ...]:
        return tensors[self.first], self.groups

    def scattered(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The arguments of a store after its strides: the numbers of the result's rows, if it needs them."""
        return (tensors[-1],) if self.spec.scatters else ()


class RaggedOperand(Operand):
    """A matrix in groups as the first operand.

    Args:
        inner: (R, K), or (M, K) where ranges of K are groups; without a prologue if rows are gathered.
        offs, axis, gather, scatter: see `Groups`.
    """

    def __init__(
        self, inner: Operand, offs: Tensor, axis: Axis = "rows", gather: Tensor | None = None,
        scatter: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.inner, self.offs, self.axis, self.gather, self.scatter = inner, offs, axis, gather, scatter
        self.indices = tuple([x for x in (offs, gather, scatter) if x is not None])
        self.tensors = (*inner.tensors, *self.indices)
        self.groups, matrix = offs.shape[0], inner.matrix
        rows = matrix.shape[0] if gather is None else gather.shape[0]
        if gather is None:
            self.matrix = matrix.expand(self.groups, *matrix.shape)
        else:
            # It has the shape of the gathered matrix; the spec has the strides.
            self.matrix = matrix.new_empty(()).expand(self.groups, rows, matrix.shape[1])

    @property
    def launched(self) -> tuple[Tensor, ...]:  # type: ignore[override]  # only where it is asked for
        """The matrix's, then the ends of groups and the numbers of rows."""
        return (*self.inner.launched, *self.indices)

    @property
    def places(self) -> tuple[int, ...]:  # type: ignore[override]
        """See `Operand.places`."""
        first = len(self.inner.values)
        there = [i for i, x in enumerate((self.offs, self.gather, self.scatter)) if x is not None]
        return (*self.inner.places, *[first + i for i in there])

    @property
    def values(self) -> tuple[Any, ...]:
        return *self.inner.values, self.offs, self.gather, self.scatter

    @property
    def number_places(self) -> tuple[int, ...]:
        return self.inner.number_places

    @property
    def outer(self) -> Tensor | None:
        """Scales of the rows."""
        return self.inner.outer

    @property
    def outer_place(self) -> int:
        return self.inner.outer_place

    @property
    def is_ragged(self) -> bool:
        """It is."""
        return True

    @property
    def scatters(self) -> bool:
        """See `Operand.scatters`."""
        return self.scatter is not None

    @property
    def rows(self) -> int:
        """Of the product."""
        return self.matrix.shape[-2]

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See `Operand.shape_of`: groups of rows are in one matrix."""
        return shape if self.axis == "k" else shape[-2:]

    def named(self, name: str) -> list[tuple[str, Tensor]]:
        indices = (("offs", self.offs), ("gather", self.gather), ("scatter", self.scatter))
        return [*self.inner.named(name), *[(n, x) for n, x in indices if x is not None]]

    def of(self, inner: Operand) -> RaggedOperand:
        """Another matrix in the same groups."""
        return RaggedOperand(inner, self.offs, self.axis, self.gather, self.scatter)

    def lowered(self, op: str, names: tuple[str, str], dtype: torch.dtype) -> Operand:
        return self.of(self.inner.lowered(op, names, dtype))

    def with_prologue(self, prologue: Prologue) -> Operand:
        return self.of(self.inner.with_prologue(prologue))

    def prologue_applied(self) -> Operand:
        return self.of(self.inner.prologue_applied())

    def along(self) -> list[tuple[Tensor, int]]:
        """Those of the matrix, unless its rows are not those of the product."""
        return [] if self.gather is not None else self.inner.along()

    def spec(self, matrix: Spec, along: Sequence[Layout], problem: Problem) -> Spec:
        m, steps = matrix, (0,) * len(problem.batch)
        if self.gather is not None:
            inner = self.inner.matrix
            m = replace(m, row=inner.stride(0), col=inner.stride(1), aligned=inner.data_ptr() % 16 == 0)
        m = self.inner.spec(m, along, problem)
        indices = tuple([Layout(x.dtype, steps, 0, 1, x.data_ptr() % 16 == 0) for x in self.indices])
        gathers, scatters = self.gather is not None, self.scatter is not None
        return Ragged(
            m.dtype, m.steps, m.row, m.col, m.aligned, m.prologue, m, self.axis, gathers, scatters, indices
        )

    # --- in torch ----------------------------------------------------------------------------------------------------

    def multiplied(self, b: Operand, dtype: torch.dtype, by_rows: bool) -> Tensor:
        """See `Operand.multiplied`: group by group."""
        if 0 in self.matrix.shape[:-1] or b.matrix.shape[-1] == 0:
            # Does not read the ends, since that would wait for the GPU.
            shape = (*self.shape_of(self.matrix.shape)[:-1], b.matrix.shape[-1] * b.halves)
            return self.offs.new_zeros(shape, dtype=dtype)
        x = self.gathered()
        right, ends = b.in_torch(), self.offs.tolist()
        bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        if self.axis == "k":
            groups = [
                reference.gemm(x[:, i:j], right[i:j], out_dtype=dtype, by_rows=by_rows) for i, j in bounds
            ]
            return torch.stack(groups)
        groups = [
            reference.gemm(x[i:j], right[g], out_dtype=dtype, by_rows=by_rows) for g, (i, j) in enumerate(bounds)
        ]  # fmt: skip
        return torch.cat([*groups, x.new_zeros((x.shape[0] - ends[-1], right.shape[-1]), dtype=dtype)])

    def sources(self) -> Tensor:
        """(R,), `gather` for rows of groups, and 0 for those after them, where `gather` need not be defined."""
        assert self.gather is not None
        return self.gather.long().masked_fill(self.behind().squeeze(-1), 0)

    def gathered(self) -> Tensor:
        """(R, K), the rows of the product."""
        x = self.inner.in_torch()
        if self.gather is not None and x.shape[0] == 0:
            # Then there are no rows in groups.
            return x.new_zeros(self.rows, x.shape[1])
        return x if self.gather is None else x.index_select(0, self.sources())

    def group_of_rows(self) -> Tensor:
        """(R,), the group of each row; the last one for rows after all groups."""
        rows = torch.arange(self.rows, device=self.offs.device, dtype=torch.int32)
        found = torch.searchsorted(self.offs, rows, right=True, out_int32=True)
        return found.clamp(max=max(self.groups - 1, 0))

    def of_rows(self, value: Any) -> Any:
        """See `Operand.of_rows`: what belongs to groups, (G, 1, ...), becomes what belongs to rows."""
        if self.axis == "k" or not isinstance(value, Tensor) or value.dim() != 3:
            return value
        if self.groups == 0:
            return value.new_zeros(self.rows, value.shape[-1])
        return value.squeeze(1).index_select(0, self.group_of_rows())

    def behind(self) -> Tensor:
        """(R, 1), whether a row is after the last group."""
        rows = torch.arange(self.rows, device=self.offs.device, dtype=torch.int32)
        end = self.offs[-1:] if self.groups else self.offs.new_zeros(1)
        return (rows >= end).unsqueeze(-1)

    def finished(self, results: Sequence[Tensor], is_scattered: bool = True) -> list[Tensor]:
        if self.axis == "k":
            return list(results)
        behind = self.behind()
        cleared = [x.masked_fill(behind if x.dim() > 1 else behind.squeeze(-1), 0) for x in results]
        if self.scatter is None or not is_scattered:
            return cleared
        return [torch.zeros_like(x).index_copy(0, self.scatter.long(), x) for x in cleared]

    def of_results(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        if self.scatter is None:
            return list(grads)
        return [None if g is None else g.index_select(0, self.scatter) for g in grads]

    def unscattered(self) -> Operand:
        if self.scatter is None:
            return self
        return RaggedOperand(self.inner, self.offs, self.axis, self.gather)

    # --- for the operator --------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        there = "".join([str(int(x is not None)) for x in (self.gather, self.scatter)])
        return f"ragged:{self.axis}:{there}:{self.inner.text}"

    @classmethod
    def rebuild(cls, facts: Sequence[str], tensors: Sequence[Tensor], sizes: Sequence[int]) -> RaggedOperand:
        """See `operands.rebuild`."""
        from . import rebuild

        axis, there, *inner = facts
        first = len(tensors) - 1 - there.count("1")
        offs, *left = tensors[first:]
        numbers = iter(left)
        gather, scatter = (next(numbers) if is_there == "1" else None for is_there in there)
        matrix = rebuild(":".join(inner), tensors[:first], ())
        return cls(matrix, offs, "k" if axis == "k" else "rows", gather, scatter)

    def mapped(self, dims: Sequence[int | None], rank: int, size: int, everywhere: bool) -> Operand:
        raise NotImplementedError("vmap: a grouped product can't be mapped")

    def gradients_with(
        self, b: Operand, grad: Tensor, multiply: Multiply, needs: tuple[Sequence[bool], Sequence[bool]]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """See `Operand.gradients_with`."""
        of_rest: list[Tensor | None] = [None] * (len(self.tensors) - 1)
        if self.axis == "k":
            return self._of_ranges(b, grad, multiply, needs, of_rest)

        def of_groups(
            x: Tensor | Operand, y: Operand, addend: Tensor | None = None, into: Tensor | None = None
        ) -> Tensor:
            assert isinstance(x, Tensor)
            assert into is None
            return multiply(RaggedOperand(DenseOperand(x), self.offs), y, addend)

        of_a, matrix = None, self.inner.matrix
        if needs[0][0]:
            like = matrix.new_empty(()).expand(self.rows, matrix.shape[1])
            of_a = b.gradients(like, grad, of_groups, (True, [False] * len(b.tensors)))[0]
            if matrix.shape[0] == 0:
                # Then no row of the product is in a group.
                of_a = torch.zeros_like(matrix)
            elif self.gather is not None and of_a is not None:
                # Several rows of the product may read the same row. This function sorts, so it is deterministic.
                of_a = torch.zeros_like(matrix).index_put((self.sources(),), of_a, accumulate=True)
        halves = grad.chunk(b.halves, dim=-1)
        of_b: list[Tensor | None] = [None] * len(b.tensors)
        if any(needs[1]):
            x = self._rows_read()
            for i, (weight, half) in enumerate(zip(b.parts(), halves, strict=True)):
                of_b[i] = self._of_weight(x, weight, half, multiply) if needs[1][i] else None
        return [of_a, *of_rest], of_b

    def _rows_read(self) -> Operand:
        """The rows that the product read, as the second operand of the gradients of its weights.

        If TMA can load a copy of them, the copy costs less time than loads of gathered rows: on an H200 the gradients
        take 0.61 to 0.83 of the time, in 8 products of mixture-of-experts layers (`grouped_ranges-bf16`).
        """
        device = devices.current(self.matrix.device)
        copies = device is None or (device.target.tma and self.matrix.dtype.itemsize == 2)
        if self.gather is None or copies or torch.is_grad_enabled():
            return DenseOperand(self.gathered())
        return GatheredOperand(self.inner.in_torch(), self.gather)

    def _of_weight(self, x: Operand, weight: Operand, grad: Tensor, multiply: Multiply) -> Tensor | None:
        """The gradient of one matrix for each group, laid out as these are; None if it goes to a buffer."""
        into = weight.buffers[0] if weight.buffers else None
        like = weight.matrix if into is None else into
        if like.stride(-2) == 1 and like.stride(-1) != 1:
            left = RaggedOperand(DenseOperand(grad.mT), self.offs, "k")
            made = multiply(left, x, into=None if into is None else into.mT).mT
        else:
            left = RaggedOperand(DenseOperand(x.in_torch().mT), self.offs, "k")
            made = multiply(left, DenseOperand(grad), into=into)
        return made if into is None else None

    def _of_ranges(
        self, b: Operand, grad: Tensor, multiply: Multiply, needs: tuple[Sequence[bool], Sequence[bool]],
        of_rest: list[Tensor | None],
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:  # fmt: skip
        """Both operands' gradients are products in groups of rows: those of K."""
        of_a = of_b = None
        if needs[0][0]:
            of_a = multiply(RaggedOperand(DenseOperand(b.matrix), self.offs), DenseOperand(grad.mT)).mT
        if needs[1][0]:
            of_b = multiply(RaggedOperand(DenseOperand(self.inner.matrix.mT), self.offs), DenseOperand(grad))
        return [of_a, *of_rest], [of_b]

    def summed_over_groups(
        self, grad: Tensor, like: Tensor, multiply: Callable[[Operand, Operand], Tensor]
    ) -> Tensor | None:
        if self.axis == "k" or like.dim() != 3:
            return None
        wide = grad.float() if grad.dtype.itemsize < 4 and like.shape[-1] == 1 else grad
        columns = wide.sum(-1, keepdim=True) if like.shape[-1] == 1 else wide
        ones = columns.new_ones(()).expand(1, self.rows)
        return multiply(RaggedOperand(DenseOperand(ones), self.offs, "k"), DenseOperand(columns)).to(
            like.dtype
        )
