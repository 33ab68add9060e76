"""From a user's arguments to a `Call`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..epilogues.function import Epilogue, captured_of
from ..formats.blocks import is_blocks, stored
from ..formats.scaled import BLOCK, MX_BLOCK, ScaledTensor
from ..formats.sparse import SparseTensor
from ..formats.tensor import QuantizedTensor
from ..formats.weight import PackedWeight
from ..operands import (
    AdaptedOperand,
    AwaitingOperand,
    AwaitingRows,
    BlocksOperand,
    DenseOperand,
    Groups,
    Operand,
    PackedOperand,
    PairOperand,
    PickedOperand,
    RaggedOperand,
    RowScaledOperand,
    Sampled,
    ScaledOperand,
    SparseOperand,
    SummedOperand,
    SummedOver,
    WithAdapter,
)
from . import prologue
from .check import (
    OUTER_KINDS,
    check_not_fp8,
    check_not_packed,
    check_ranks,
    check_scaled,
    check_second,
    check_tensor,
    moved,
)
from .shape import OF_WEIGHTS, operand_names
from .spec import Call, Factor, Functions, Number, Options, unchanged

#: The epilogue of products without one; created and captured once.
UNCHANGED = Epilogue(unchanged)
NOTHING = UNCHANGED.captured


def make_call(
    op: str, a: Any, b: Any, bias: Any, functions: Functions, options: Options, alpha: Number = 1, beta: Number = 1
) -> Call:  # fmt: skip
    """A call from a user's arguments. `check.check` then checks whether they fit each other.

    Args:
        a: a matrix, or a `ScaledTensor`.
        b: the second operand of `op`: a matrix, the two halves of its columns, or a packed or scaled weight.
        bias: a tensor, or one for each half.

    Raises:
        TypeError: an argument is of a kind that products or epilogues do not accept.
        ValueError: the operation does not accept operands with these numbers of dimensions.
    """
    epilogue, args, before, before_args = functions
    _check_functions(op, functions)
    left, right = operands_of(op, a, b, takes_pair=epilogue is not None)
    ready = epilogue is None and before is None and left.is_dense and right.is_dense
    function, captured = captured_of(UNCHANGED if epilogue is None else epilogue)
    biases = ([] if bias is None else [bias]) if ready else added(op, bias)
    matrix = left.matrix
    inputs = tuple([moved(x, matrix) for x in (*biases, *args, *captured.tensors)])
    if before is not None:
        # A prologue sees the whole matrix, and not a group.
        whole = left.inner.matrix if isinstance(left, RaggedOperand) else matrix
        left = left.with_prologue(prologue.make(op, whole, before, before_args))
    outer = tuple([x for x in (left.outer, right.outer) if x is not None])
    return Call(op, left, right, function, captured, inputs, len(biases), options, alpha, beta, ready, outer)


def _check_functions(op: str, functions: Functions) -> None:
    epilogue, args, before, before_args = functions
    if isinstance(args, Tensor) or not isinstance(args, tuple | list):
        raise TypeError(
            f"{op}: args is a {type(args).__name__}; it must be a tuple of the epilogue's arguments"
        )
    if before is None and before_args:
        raise TypeError(
            f"{op}: prologue_args are given without a prologue; give prologue= too, or leave them out"
        )
    if epilogue is None and args:
        raise TypeError(f"{op}: args are given without an epilogue; give epilogue= too, or leave them out")


def added(op: str, bias: Factor | None) -> list[Tensor]:
    """No bias, one, or those of both halves of the columns; raises TypeError for anything else."""
    parts: list[Any] = [] if bias is None else list(bias) if isinstance(bias, tuple | list) else [bias]
    for i, part in enumerate(parts):
        check_tensor(op, "bias" if len(parts) == 1 else f"bias[{i}]", part)
    if len(parts) > 2:
        raise TypeError(
            f"{op}: bias is a tuple of {len(parts)}; it must be a tensor, or a pair of tensors for the left and the "
            "right columns"
        )
    return parts


def right_matrix(op: str, b: Tensor) -> Tensor:
    """The second operand as a product has it: for linear the transpose of the weight.

    Raises:
        ValueError: linear's weight has more than two dimensions.
    """
    if op not in OF_WEIGHTS:
        return b
    if op == "grouped_linear":
        return b.mT
    if b.dim() > 2:
        raise ValueError(f"linear: weight is {tuple(b.shape)}; it must be (N, K) or (K,)")
    return b.t()


def operands_of(op: str, a: Any, b: Any, takes_pair: bool) -> tuple[Operand, Operand]:
    """The operands, given a user's arguments."""
    if isinstance(a, ScaledTensor):
        check_scaled(op, a, b)
        return scaled_operands(a, b)
    first = operand_names(op)[0]
    if isinstance(a, Groups):
        return _groups(op, a, b, takes_pair)
    if isinstance(a, SummedOver):
        left, right = operands_of(op, a.matrix, b, takes_pair)
        # Each rank has separate scales for its columns.
        return SummedOperand(left.matrix, a.exchange, right.outer), right.without_outer()
    if isinstance(a, WithAdapter):
        left, right = operands_of(op, a.matrix, b, takes_pair)
        # The adapter is added after the scales of the weight's rows.
        return AdaptedOperand(left.matrix, a.left, a.right, right.outer), right.without_outer()
    if isinstance(a, AwaitingRows):
        return AwaitingOperand(a.matrix, a.arrivals), operands_of(op, a.matrix, b, takes_pair)[1]
    if isinstance(a, Sampled):
        return PickedOperand(a.matrix, a.stored, False), PickedOperand(b.matrix, b.stored, True)
    if is_blocks(a) or is_blocks(b):
        return block_operands(op, a, b)
    check_tensor(op, first, a)
    check_not_packed(op, first, a)
    check_second(op, b, takes_pair)
    if isinstance(b, PackedWeight):
        check_packed(op, a, b)
    right = _second(op, b)
    if right.is_dense:
        check_ranks(op, a, right.matrix)
    return DenseOperand(a), right


def block_operands(op: str, a: Any, b: Any) -> tuple[Operand, Operand]:
    """The operands of a product with one block-sparse matrix."""
    first, second, _ = operand_names(op)
    if is_blocks(a) and is_blocks(b):
        raise TypeError(f"{op}: {first} and {second} are both block-sparse; one of them must be dense")
    name, other = (second, a) if is_blocks(b) else (first, b)
    which = first if other is a else second
    if isinstance(other, tuple | list):
        raise TypeError(f"{op}: {name} is block-sparse; {which} must be one tensor")
    check_tensor(op, which, other)
    check_not_packed(op, which, other, "a product of dense operands")
    if op == "bmm":
        raise ValueError(f"bmm: {name} is block-sparse; use matmul, which takes a batch of {which}")
    if other.dim() < 2:
        raise ValueError(
            f"{op}: {which} is {tuple(other.shape)}; with a block-sparse {name} it must be a matrix"
        )
    sparse = stored(op, name, a if is_blocks(a) else b)
    if is_blocks(a):
        right = right_matrix(op, b)
        return BlocksOperand(sparse, is_b=False), DenseOperand(right)
    return DenseOperand(a), BlocksOperand(sparse.mT if op in OF_WEIGHTS else sparse, is_b=True)


def _groups(op: str, a: Groups, b: Any, takes_pair: bool) -> tuple[Operand, Operand]:
    """The operands of a product of groups."""
    inner: Operand
    if isinstance(a.matrix, ScaledTensor):
        inner, right = scaled_operands(a.matrix, b)
        if a.scale is not None:
            inner = RowScaledOperand(a.matrix.data, a.scale)
    else:
        check_second(op, b, takes_pair)
        inner, right = DenseOperand(a.matrix), _second(op, b)
        if a.weight_grad:
            right = right.accumulating([right_matrix(op, x) for x in a.weight_grad])
    return RaggedOperand(inner, a.offs, a.axis, a.gather, a.scatter), right


def weight_operand(weight: PackedWeight) -> Operand:
    """The second operand that a packed weight without a permutation is."""
    return PackedOperand(weight) if isinstance(weight, QuantizedTensor) else SparseOperand(weight)  # type: ignore[arg-type]


def _second(op: str, b: Any) -> Operand:
    if isinstance(b, PackedWeight):
        return weight_operand(b)
    if isinstance(b, tuple | list):
        return PairOperand(right_matrix(op, b[0]), right_matrix(op, b[1]))
    return DenseOperand(right_matrix(op, b))


def check_packed(op: str, a: Tensor, b: PackedWeight) -> None:
    """Raises an error for dimensions and types that the operation does not accept with a packed weight."""
    check_not_fp8(op, a, b)
    if op == "linear" and b.dim() != 2:
        raise ValueError(f"linear: weight is {tuple(b.shape)}; packed, it must be (N, K); use matmul or bmm")
    if op == "bmm":
        check_ranks(op, a, b)


def scaled_operands(a: ScaledTensor, b: ScaledTensor | SparseTensor) -> tuple[Operand, Operand]:
    """The operands of `a.dequantize() @ b.dequantize().mT`, which fit each other.

    Args:
        b: (N, K), or (G, N, K) for groups; or a sparse weight of fp8.
    """
    if isinstance(b, SparseTensor):
        return RowScaledOperand(a.data, a.row_factors), SparseOperand(b.in_code())
    if a.kind in OUTER_KINDS and b.kind in OUTER_KINDS:
        factors = b.column_factors
        if factors.dim() > 1:
            # For groups, one for each of their rows.
            factors = factors.unsqueeze(-2)
        return RowScaledOperand(a.data, a.row_factors), RowScaledOperand(b.data.mT, factors)
    if a.shape[-1] == 0:
        # If K is 0, there are no scales to read, either.
        one = torch.ones((), device=a.device)
        return RowScaledOperand(a.data, one), RowScaledOperand(b.data.mT, one)
    step = MX_BLOCK if "1x32" in (a.kind, b.kind) else BLOCK
    (left, rows), (right, columns) = by_steps(a, step), by_steps(b, step)
    if a.kind == "tensor":
        left = left.expand(a.shape[-2], -1)
    if b.kind == "tensor":
        # One scale for all blocks, which the kernel reads only once.
        right, columns = right.expand(-(-b.shape[-2] // BLOCK), -1), BLOCK
    power_of_two = left.dtype == right.dtype == torch.uint8
    return (
        ScaledOperand(a.data, left, rows, step, power_of_two, is_b=False),
        ScaledOperand(b.data.mT, right, columns, step, power_of_two, is_b=True),
    )


def by_steps(x: ScaledTensor, step: int) -> tuple[Tensor, int]:
    """One scale for each row, or for several rows, and for each step of some columns along K."""
    if x.kind == "128x128":
        return x.scale, BLOCK
    if x.kind in ("1x128", "1x32"):
        return x.stored_scale, 1
    scale = x.scale.reshape(1, 1) if x.kind == "tensor" else x.scale
    return scale.expand(*scale.shape[:-1], -(-x.shape[-1] // step)), 1


def lowered(call: Call, dtype: torch.dtype) -> Call:
    """The call with operands and biases in autocast's type."""
    names = operand_names(call.op)[:2]
    biases = [DenseOperand(x).lowered(call.op, names, dtype).matrix for x in call.inputs[: call.biases]]
    return replace(
        call, a=call.a.lowered(call.op, names, dtype), b=call.b.lowered(call.op, names, dtype),
        inputs=(*biases, *call.inputs[call.biases :]),
    )  # fmt: skip
