"""Copies of matrices whose layout is slow to load: misaligned rows, or elements that are not adjacent along K.

Tensor descriptors, and wide loads in general, need adjacent elements and rows that begin at multiples of 16 bytes.
Some tensor cores need the elements of 8-bit and TF32 operands to be adjacent along K. If a matrix has another layout,
a product that reads it many times is faster on a copy. `worth_copying` predicts whether the copy pays; a plan tells
which matrices it copies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import select
from ..operands import Dense, Layout, Spec
from ..problem import Problem

#: Rows of a copy begin at multiples of this many elements.
_PITCH = 16
#: The part of the memory bandwidth that a copy reaches, and a transposing copy; and the time of its launch in seconds.
_COPY_RATE, _TRANSPOSE_RATE, _COPY_LAUNCH = 0.4, 0.15, 4e-6


@dataclass(frozen=True)
class Copy:
    """The copy of a matrix, or of a batch of them.

    Attributes:
        sizes, strides: of the matrix as it is, in elements; a broadcast batch is copied once.
        shape: of the memory of the copy.
        transposed: whether a column's elements are adjacent in the copy and not a row's.
        operand: the layout of the copy.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool
    operand: Dense

    @classmethod
    def of(cls, operand: Layout, rows: int, cols: int, batch: tuple[int, ...], transposed: bool) -> Copy:
        """The copy of a matrix, with the elements of a column adjacent or those of a row."""
        outer, inner = (cols, rows) if transposed else (rows, cols)
        pitch = -(-inner // _PITCH) * _PITCH
        counts = tuple(size if step else 1 for size, step in zip(batch, operand.steps, strict=True))
        steps, step = [], outer * pitch
        for count, old in zip(reversed(counts), reversed(operand.steps), strict=True):
            steps.append(step if old else 0)
            step *= count
        row, col = (1, pitch) if transposed else (pitch, 1)
        return cls(
            sizes=(*counts, rows, cols),
            strides=(*operand.steps, operand.row, operand.col),
            shape=(*counts, outer, pitch),
            transposed=transposed,
            operand=Dense(operand.dtype, tuple(reversed(steps)), row, col, True),
        )

    @property
    def bytes(self) -> int:
        """Bytes that the copying reads and writes."""
        return 2 * self.operand.dtype.itemsize * torch.Size(self.sizes).numel()

    def seconds(self, bandwidth: float) -> float:
        """Predicted time of the copy for a memory bandwidth in bytes per second."""
        along = self.strides[-2 if self.transposed else -1] == 1
        return self.bytes / (bandwidth * (_COPY_RATE if along else _TRANSPOSE_RATE)) + _COPY_LAUNCH

    def memory(self, device: torch.device) -> Tensor:
        """Uninitialised memory for a copy."""
        return torch.empty(self.shape, dtype=self.operand.dtype, device=device)

    def __call__(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor with the layout of the original operand."""
        source = tensor.as_strided(self.sizes, self.strides)
        memory = self.memory(tensor.device)
        view = memory.mT if self.transposed else memory
        view[..., : self.sizes[-2], : self.sizes[-1]].copy_(source)
        return memory


@dataclass(frozen=True)
class Padded:
    """A problem on copies of some of its matrices.

    Attributes:
        problem: the problem with the copies instead of the matrices.
        a, b: the copies, None for a matrix that is read where it is.
    """

    problem: Problem
    a: Copy | None
    b: Copy | None

    @property
    def names(self) -> tuple[str, ...]:
        """The matrices that are copied, of "a" and "b"."""
        return tuple(name for name, copy in (("a", self.a), ("b", self.b)) if copy is not None)

    @property
    def seconds(self) -> float:
        """Predicted time of the copying."""
        bandwidth = self.problem.device.bandwidth
        return sum(copy.seconds(bandwidth) for copy in (self.a, self.b) if copy is not None)


def padded(problem: Problem) -> Padded | None:
    """The problem on copies of the matrices that are slow to read; None if there are none, or a copy would not help."""
    p = problem
    if not p.device.target.tma or p.K == 0 or len(p.batch) > 1 or p.ragged:
        return None
    if not (p.a.takes_copies and p.b.takes_copies):
        return None
    if p.paired:  # a copy would separate the halves of columns
        return None
    a = b = None
    mn_major = select.mn_major(p)
    if mn_major.a or not p.a.takes_tma(p.batch):
        a = Copy.of(p.a, p.M, p.K, p.batch, not mn_major.a and p.a.row == 1 and p.a.col != 1)
    # The steps of packed and sparse weights count matrices.
    if not p.b.is_encoded and (mn_major.b or not p.b.takes_tma(p.batch)):
        b = Copy.of(p.b, p.K, p.N, p.batch, mn_major.b or (p.b.row == 1 and p.b.col != 1))
    if a is None and b is None:
        return None
    copied = replace(p, a=_as_copied(p.a, a), b=_as_copied(p.b, b))
    return Padded(copied, a, b)


def _as_copied(spec: Spec, copy: Copy | None) -> Spec:
    """An operand whose matrix is a copy."""
    if copy is None:
        return spec
    to = copy.operand
    return replace(spec, steps=to.steps, row=to.row, col=to.col, aligned=to.aligned)


def worth_copying(problem: Problem) -> Padded | None:
    """The problem on copies, if that is predicted to be faster, copies included; otherwise None."""
    found = padded(problem)
    # A copy changes the order of the sum, and whether it pays depends on M.
    if found is None or problem.batch_invariant:
        return None
    quicker = select.best_time(found.problem) + found.seconds < select.best_time(problem)
    return found if quicker else None


def launched(problem: Problem) -> Problem:
    """The problem for which a kernel is launched: itself, or the problem on copies if these pay."""
    found = worth_copying(problem)
    return problem if found is None else found.problem
