"""From tensors' shapes and strides to a Problem: broadcasting, folding and merging of dimensions.

No data is read or copied here; a broadcast dimension is a stride of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .devices import Device
from .dtypes import Precision
from .operands import Dense, DenseOperand, Layout, Operand
from .problem import Problem


@dataclass
class _Strides:
    """The strides of one operand over (batch..., rows, cols) while dimensions are being folded."""

    steps: list[int]
    row: int
    col: int


def _expand(tensor: Tensor, batch: Sequence[int], rows: int, cols: int) -> _Strides:
    *steps, row, col = tensor.expand(*batch, rows, cols).stride()
    # A vector is the same for one row as for many; torch gives a new dimension of size 1 the stride of a matrix.
    return _Strides(steps, row if tensor.dim() > 1 else 0, col)


def _drop_unit(sizes: list[int], operands: list[_Strides]) -> None:
    for i in range(len(sizes) - 1, -1, -1):
        if sizes[i] == 1:
            del sizes[i]
            for operand in operands:
                del operand.steps[i]


def _merge(sizes: list[int], operands: list[_Strides]) -> None:
    """Join neighboring batch dimensions that every operand walks through as one."""
    for i in range(len(sizes) - 2, -1, -1):
        if all(operand.steps[i] == operand.steps[i + 1] * sizes[i + 1] for operand in operands):
            sizes[i] *= sizes[i + 1]
            del sizes[i + 1]
            for operand in operands:
                del operand.steps[i]


def _fold_rows(sizes: list[int], M: int, walkers: list[_Strides], b: _Strides) -> int:
    """Take the last batch dimensions into M where B is shared over them: a linear layer's leading dimensions."""
    while sizes and b.steps[-1] == 0 and (
        M == 1 or all(operand.steps[-1] == operand.row * M for operand in walkers)
    ):  # fmt: skip
        for operand in walkers:
            step = operand.steps.pop()
            operand.row = step if M == 1 else operand.row
        b.steps.pop()
        M *= sizes.pop()
    return M


def _round_up(extent: int) -> int:
    return max(16, (extent + 15) // 16 * 16)


def _matrix(tensor: Tensor, strides: _Strides, rows: int, cols: int) -> Dense:
    """Give dimensions of extent 1 a stride that suits a tensor descriptor: it is never walked."""
    row, col = strides.row, strides.col
    if cols == 1:
        col = _round_up(rows) if row == 1 else 1
    if rows == 1:
        row = _round_up(cols) if col == 1 else 1
    return Dense(tensor.dtype, tuple(strides.steps), row, col, tensor.data_ptr() % 16 == 0)


def _layout(tensor: Tensor, strides: _Strides) -> Layout:
    return Layout(tensor.dtype, tuple(strides.steps), strides.row, strides.col, tensor.data_ptr() % 16 == 0)


def make_problem(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    addend: Tensor | None,
    *,
    scaled: bool,
    precision: Precision,
    fast_accum: bool,
    batch_invariant: bool = False,
    device: Device,
) -> Problem:
    """The Problem of `out = [alpha *] a @ b [+ addend]` for tensors whose shapes are known to fit.

    Args:
        a: (..., M, K); b: (..., K, N); out: (..., M, N) with the broadcast batch; addend: broadcasts to out.
        scaled: whether the product or the addend comes with a factor other than 1.
    """
    extras = [] if addend is None else [(addend, b.shape[-1])]
    plain, layouts = fold(DenseOperand(a), DenseOperand(b), out, extras, device)
    epilogue = "scale" if scaled else "identity"
    added = layouts[0] if layouts else None
    if added is not None:
        one_row = plain.M == 1 or added.row == 0
        epilogue = "add_row" if not scaled and one_row and not any(added.steps) else "add_matrix"
    return replace(
        plain, epilogue=epilogue, addend=added, precision=precision, fast_accum=fast_accum,
        # Sums of integers are the same in any order.
        batch_invariant=batch_invariant and a.dtype.is_floating_point,
    )  # fmt: skip


def fold(
    a: Operand, b: Operand, out: Tensor, extras: Sequence[tuple[Tensor, int]], device: Device
) -> tuple[Problem, list[Layout]]:
    """The Problem of the bare product, with as few batch dimensions as can be, and the layouts of `extras` in it.

    Args:
        out: (..., M, columns) with the broadcast batch, or without where all matrices of it are one.
        extras: what the epilogue reads and writes besides, each with the columns that it has or is broadcast to.
    """
    left, right = a.matrix, b.matrix
    M, K = left.shape[-2:]
    columns = right.shape[-1]
    # The result of groups of rows is one matrix for all.
    sizes = list((left if a.is_ragged else out).shape[:-2])
    others = [*extras, *a.along()]
    of_a, of_b = _expand(left, sizes, M, K), _expand(right, sizes, K, columns)
    of_out = _expand(out, sizes, M, out.shape[-1])
    of_others = [_expand(tensor, sizes, M, width) for tensor, width in others]
    for (tensor, _), strides in zip(others, of_others, strict=True):
        if a.is_ragged and tensor.dim() > 2 and tensor.shape[-2] == 1:
            # For groups, the same for their rows, even if there is only one row.
            strides.row = 0
    walkers = [of_a, of_out, *of_others]
    _drop_unit(sizes, [*walkers, of_b])
    _merge(sizes, [*walkers, of_b])
    rows = M if a.keeps_rows else _fold_rows(sizes, M, walkers, of_b)
    layouts = [_layout(tensor, x) for (tensor, _), x in zip(others, of_others, strict=True)]
    N = columns * b.halves
    plain = Problem(
        M=rows, N=N, K=K, batch=tuple(sizes), device=device,
        a=_matrix(left, of_a, rows, K), b=_matrix(right, of_b, K, N), out=_matrix(out, of_out, rows, out.shape[-1]),
    )  # fmt: skip
    count = len(extras)
    specs = a.spec(plain.a, layouts[count:], plain), b.spec(plain.b, [], plain)
    return replace(plain, a=specs[0], b=specs[1]), layouts[:count]


def fold_blocks(
    first: Tensor, others: Sequence[tuple[Tensor, int]]
) -> tuple[tuple[int, ...], int, list[Layout]]:
    """The batch, the rows and the layouts of matrices that are walked over together, `first` before the others.

    Args:
        others: each with the columns that it has or is broadcast to.
    """
    *sizes, M, N = first.shape
    tensors = [(first, N), *others]
    walkers = [_expand(tensor, sizes, M, columns) for tensor, columns in tensors]
    shared = _Strides([0] * len(sizes), 0, 0)
    _drop_unit(sizes, [*walkers, shared])
    _merge(sizes, [*walkers, shared])
    M = _fold_rows(sizes, M, walkers, shared)
    operands = [_layout(tensor, x) for (tensor, _), x in zip(tensors, walkers, strict=True)]
    return tuple(sizes), M, operands


def extent_bytes(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two indices may lead to one element; layouts that interleave beyond recognition count as such."""
    if tensor.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


class _Bytes:
    """Presents a tensor's layout to numpy, which compares addresses and never reads them."""

    def __init__(self, tensor: Tensor) -> None:
        item = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * item for stride in tensor.stride()),
            "typestr": f"|V{item}",
        }


def overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one device share a byte; exact, for any strides.

    Cases that numpy gives up on as too hard count as shared.
    """
    import numpy as np

    start, other = first.data_ptr(), second.data_ptr()
    if start + extent_bytes(first) <= other or other + extent_bytes(second) <= start:
        return False
    try:
        return bool(np.shares_memory(np.asarray(_Bytes(first)), np.asarray(_Bytes(second)), max_work=10**6))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def same_layout(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same elements in the same places."""
    return (
        first.data_ptr() == second.data_ptr()
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.dtype == second.dtype
    )


def broadcast_batch(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """torch.broadcast_shapes for batch dimensions, as a tuple."""
    first, second = tuple(a), tuple(b)
    if not first or not second or first == second:
        # torch's own function imports sympy, which takes half a second of a process's first call.
        return first or second
    return tuple(torch.broadcast_shapes(first, second))
