"""Products of groups: `gemmery.grouped_mm` and `gemmery.grouped_linear`, for mixture-of-experts layers."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.compiler import is_compiling

from .api import bmm
from .epilogues.function import Epilogue, captured_of, function_of, memoised
from .formats.scaled import ScaledTensor
from .formats.weight import PackedWeight
from .layout import overlaps_itself
from .operands.ragged import Axis, Groups
from .precision import AskedPrecision, resolved
from .problem import Config
from .product.check import OUTER_KINDS, check_kinds, check_not_packed, check_tensor, check_types
from .product.prologue import apply_prologue
from .product.run import product
from .product.seen import PLAIN, autocast_dtype, wants_gradient
from .product.shape import OF_WEIGHTS, operand_names, transposed_hint
from .product.spec import Factor, Functions, OutTypes

#: Ask the GPU whether `offs` is valid, at the price of a synchronization with every call.
CHECKS_OFFSETS = os.environ.get("GEMMERY_CHECK_OFFSETS", "0") not in ("", "0")


def grouped_mm(
    mat_a: Tensor | ScaledTensor,
    mat_b: Factor | ScaledTensor,
    *,
    offs: Tensor | None = None,
    bias: Factor | None = None,
    gather: Tensor | None = None,
    scatter: Tensor | None = None,
    row_scale: Tensor | None = None,
    epilogue: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    prologue: Callable[..., Any] | None = None,
    prologue_args: Sequence[Any] = (),
    out: Tensor | None = None,
    accumulate: bool = False,
    out_dtype: OutTypes = None,
    precision: AskedPrecision = "ieee",
    fast_accum: bool = False,
    batch_invariant: bool = False,
    config: Config | dict[str, Any] | str | None = None,
) -> Any:
    """Products of G groups, as torch's `grouped_mm`. The ranks of the operands determine what is grouped:

    - (R, K) and (G, K, N): groups of rows. Rows `offs[g - 1]` to `offs[g]` are multiplied by matrix g; the result is
      (R, N). Rows after the last group are 0.
    - (G, M, K) and (K, R): groups of columns; the result is (M, R).
    - (M, K) and (K, N): ranges of K; the result is (G, M, N). It is 0 for an empty range.
    - (G, M, K) and (G, K, N): a batch, without `offs`.

    Only the GPU reads `offs`. The host does not wait for it, and a CUDA graph can be replayed with other groups.

    Args:
        mat_a, mat_b: two matrices or batches, of any strides, in one type, on one device. With groups of rows, `mat_b`
            may be a packed or sparse weight (G, N, K), or a pair, see `gemmery.matmul`. Both may be a
            `gemmery.ScaledTensor` of fp8 or int8, of shapes (R, K) and (G, N, K), with the scales that
            `gemmery.scaled_matmul` supports.
        offs: (G,), int32, on the operands' device: the end of each group. It must not decrease; two equal ends make an
            empty group. The last end may be less than the number of rows.
        bias: with groups of rows (G, N), or (N,) for all groups. For a pair, also a pair.
        gather: (R,), int32: the row of `mat_a` that each row of the product reads. `mat_a` is not copied, and may have
            another number of rows than R. It is not read after the last group.
        scatter: (R,), int32: the row of the result that each row of the product writes. No row may occur twice. The
            epilogue must have one result.
        row_scale: (R,), floating point: a scale for each row of the product, wherever it is stored. It is applied after
            the epilogue and before rounding (under torch.compile, after rounding). It does not apply to reduced rows.
        epilogue: a torch function of the product, (R, N), and `args`, as for `gemmery.matmul`.
        args: tensors that broadcast to (R, N). (G, 1, N) and (G, 1, 1) are one row, or one number, per group.
        prologue: an elementwise torch function of `mat_a` and `prologue_args`, see `gemmery.matmul`; with groups of
            rows, and in a batch. If rows are gathered and it reads tensors, it runs before the product on all rows of
            `mat_a`. These tensors always broadcast to `mat_a`.
        prologue_args: see `gemmery.matmul`.
        out: the tensor for the result, any strides; not with groups of columns.
        accumulate: with ranges of K, add the products to `out`, which is float32 (float64 for float64), and return it.
            Operands that require gradients are not supported.
        out_dtype, precision, fast_accum, batch_invariant, config: see `gemmery.matmul`.

    Returns:
        The product, accumulated in float32 (float64 for float64, int32 for int8) and rounded once, or the result of the
            epilogue.

    Raises:
        ValueError: shapes or devices do not fit. The order of `offs` and the indices in `gather` and `scatter` are
            checked on the CPU. On a GPU, this would have to wait for the GPU, and happens only if the environment
            variable GEMMERY_CHECK_OFFSETS is 1. With an `offs` that is out of order, kernels never access memory out of
            bounds, and the result is undefined.
        TypeError: a type is not supported, or two types differ.

    Example:
        >>> import torch, gemmery
        >>> x, w = torch.randn(6, 8), torch.randn(3, 8, 4)
        >>> y = gemmery.grouped_mm(x, w, offs=torch.tensor([2, 2, 5], dtype=torch.int32))
        >>> y.shape, bool((y[5] == 0).all())
        (torch.Size([6, 4]), True)
        >>> torch.testing.assert_close(y[2:5], x[2:5] @ w[2])
    """
    op = "grouped_mm"
    numbers = mat_a.data if isinstance(mat_a, ScaledTensor) else mat_a
    check_tensor(op, "mat_a", numbers)
    check_not_packed(op, "mat_a", numbers)
    ranks = (numbers.dim(), _rank(op, mat_b))
    functions = Functions(epilogue, args, prologue, prologue_args)
    options = (out_dtype, resolved(precision, numbers), fast_accum, batch_invariant, config)
    behind = {"gather": gather, "scatter": scatter, "row_scale": row_scale}
    if ranks == (2, 3):
        _refuse(op, "groups of rows", {"accumulate": accumulate or None})
        return _of_rows(op, mat_a, mat_b, offs, bias, behind, functions, out, options)
    if ranks not in ((3, 2), (2, 2), (3, 3)):
        raise ValueError(
            f"{op}: mat_a has {ranks[0]} dimensions and mat_b {ranks[1]}; both must have 2 or 3 dimensions"
        )
    if not isinstance(mat_a, Tensor) or not isinstance(mat_b, Tensor) or isinstance(mat_b, PackedWeight):
        raise TypeError(f"{op}: mat_a and mat_b must be plain tensors where groups are not of rows")
    _check_operands(op, mat_a, mat_b, mat_b.shape[-2])
    given = {"bias": bias, **behind, "epilogue": epilogue, "prologue": prologue}
    if ranks == (3, 3):
        _refuse(op, "a batch", {"offs": offs, "bias": bias, **behind, "accumulate": accumulate or None})
        return bmm(
            mat_a, mat_b, epilogue=epilogue, args=args, prologue=prologue, prologue_args=prologue_args, out=out,
            out_dtype=out_dtype, precision=precision, fast_accum=fast_accum, batch_invariant=batch_invariant,
            config=config,
        )  # fmt: skip
    if ranks == (3, 2):
        _refuse(op, "groups of columns", {**given, "out": out, "accumulate": accumulate or None})
        made = _of_rows(op, mat_b.mT, mat_a.mT, offs, None, {}, functions, None, options)
        return made.mT
    _refuse(op, "ranges of K", given)
    groups = _groups(op, mat_a, offs, "k", mat_a.shape[1])
    if accumulate:
        if out is None:
            raise ValueError(f"{op}: out is missing; accumulate=True adds to it")
        check_sum(op, "out", out, mat_a, (groups.offs.shape[0], mat_a.shape[0], mat_b.shape[1]))
    return product(op, groups, mat_b, out if accumulate else None, functions, out, options)


def grouped_linear(
    x: Tensor | ScaledTensor,
    weight: Factor | ScaledTensor,
    bias: Factor | None = None,
    *,
    offs: Tensor,
    gather: Tensor | None = None,
    scatter: Tensor | None = None,
    row_scale: Tensor | None = None,
    epilogue: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    prologue: Callable[..., Any] | None = None,
    prologue_args: Sequence[Any] = (),
    out: Tensor | None = None,
    out_dtype: OutTypes = None,
    weight_grad: Factor | None = None,
    precision: AskedPrecision = "ieee",
    fast_accum: bool = False,
    batch_invariant: bool = False,
    config: Config | dict[str, Any] | str | None = None,
) -> Any:
    """`x[rows of group g] @ weight[g].T + bias[g]` for G groups of rows, such as the tokens of experts.

    Args:
        x: (R, K), with the rows of each group together, in the order of the groups. With `gather`, any number of rows
            in any order.
        weight: (G, N, K); or a pair of such tensors, as (gate, up) with an epilogue that halves the columns; or packed;
            or, if x is a `gemmery.ScaledTensor`, a ScaledTensor.
        bias: (G, N), or (N,) for all groups. For a pair, also a pair.
        weight_grad: a float32 tensor (float64 for float64) of the weight's shape, any strides; for a pair, also a pair.
            The backward pass adds the weight's gradient to it, without rounding, and autograd has no gradient for the
            weight. Use it to accumulate gradients over micro-batches, like Megatron-LM's `main_grad`. The backward pass
            uses exactly this tensor, even if it has been replaced in the meantime. Hooks on the weight receive None,
            tensors from which the weight was computed receive no gradient, and wrappers that reduce `weight.grad` find
            none. Without gradients, nothing is added. torch.compile breaks its graph at the call.

    The other arguments, the result (R, N) and the errors are those of `grouped_mm`, except that there is no
    `accumulate`.

    Example:
        >>> import torch, gemmery
        >>> x, gate, up = torch.randn(5, 8), torch.randn(2, 4, 8), torch.randn(2, 4, 8)
        >>> offs = torch.tensor([3, 5], dtype=torch.int32)
        >>> y = gemmery.grouped_linear(x, (gate, up), offs=offs, epilogue=gemmery.epilogues.swiglu)
        >>> torch.testing.assert_close(y[:3], torch.nn.functional.silu(x[:3] @ gate[0].T) * (x[:3] @ up[0].T))
    """
    if weight_grad is not None and is_compiling():
        # It imports the compiler, which takes a second.
        from .product.compiled import uncompiled

        made: Any = uncompiled(
            grouped_linear, x, weight, bias, offs=offs, gather=gather, scatter=scatter, row_scale=row_scale,
            epilogue=epilogue, args=args, prologue=prologue, prologue_args=prologue_args, out=out, out_dtype=out_dtype,
            weight_grad=weight_grad, precision=precision, fast_accum=fast_accum, batch_invariant=batch_invariant,
            config=config,
        )  # fmt: skip
        return made
    op = "grouped_linear"
    numbers = x.data if isinstance(x, ScaledTensor) else x
    check_tensor(op, "x", numbers)
    check_not_packed(op, "x", numbers)
    if (numbers.dim(), rank := _rank(op, weight)) != (2, 3):
        raise ValueError(
            f"{op}: x has {numbers.dim()} dimensions and weight {rank}; they must be (R, K) and (G, N, K)"
        )
    options = (out_dtype, resolved(precision, numbers), fast_accum, batch_invariant, config)
    behind = {"gather": gather, "scatter": scatter, "row_scale": row_scale}
    buffers = _buffers(op, weight, weight_grad)
    return _of_rows(
        op, x, weight, offs, bias, behind, Functions(epilogue, args, prologue, prologue_args), out, options, buffers
    )  # fmt: skip


def _rank(op: str, second: Any) -> int:
    """Dimensions of the second operand, or of its halves."""
    first = second[0] if isinstance(second, tuple | list) and second else second
    first = first.data if isinstance(first, ScaledTensor) else first
    check_tensor(op, operand_names(op)[1], first)
    rank: int = first.dim()
    return rank


def _refuse(op: str, what: str, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{op}: {name} is given with {what}; these operands do not support it")


def _of_rows(
    op: str, x: Any, weight: Any, offs: Any, bias: Any, behind: dict[str, Any], functions: Functions,
    out: Tensor | None, options: tuple[Any, ...], weight_grad: tuple[Tensor, ...] = (),
) -> Any:  # fmt: skip
    """A product of groups of rows."""
    _check_scaled(op, x, weight, functions)
    gather, scatter, row_scale = (behind.get(name) for name in ("gather", "scatter", "row_scale"))
    is_permuted = isinstance(weight, PackedWeight) and weight.permutation is not None
    if is_permuted or (gather is not None and _reads_tensors(functions)) or is_compiling():
        x, functions = apply_prologue(x, functions)
    if is_permuted:
        x = x.index_select(-1, weight.permutation)
        weight = weight.with_parts(weight.parts() | {"permutation": None})
    numbers = x.data if isinstance(x, ScaledTensor) else x
    rows = x.shape[0]
    first = weight[0] if isinstance(weight, tuple | list) else weight
    of_weight = op in OF_WEIGHTS or isinstance(weight, PackedWeight | ScaledTensor)
    _check_operands(op, numbers, first, first.shape[-1 if of_weight else -2])
    if gather is not None:
        _check_indices(op, "gather", gather, numbers, None)
        rows = gather.shape[0]
    if scatter is not None:
        _check_indices(op, "scatter", scatter, numbers, rows)
    groups = _groups(op, numbers, offs, "rows", rows, first.shape[0])
    _check_numbers(op, offs, {"gather": (gather, x.shape[0]), "scatter": (scatter, rows)})
    scale = _gathered_scales(x, weight, gather)
    groups = groups._replace(
        matrix=x, gather=gather, scatter=scatter, scale=scale, weight_grad=weight_grad
    )  # fmt: skip
    bias = _of_groups(op, bias, first.shape[0], first.shape[-2 if of_weight else -1])
    if row_scale is None:
        return product(op, groups, weight, bias, functions, out, options)
    _check_row_scale(op, row_scale, rows, functions.epilogue)
    if is_compiling():
        # The compiler knows epilogues that were made before, and fuses the operators after them itself.
        return _times_rows(
            product(op, groups, weight, bias, functions, out, options), row_scale, scatter, out
        )
    scaled = _with_row_scale(functions.epilogue)
    functions = functions._replace(epilogue=scaled, args=(*functions.args, row_scale.unsqueeze(-1)))
    return product(op, groups, weight, bias, functions, out, options)


def _check_operands(op: str, x: Tensor, weight: Any, inner: int) -> None:
    """ValueError unless the operands have the same size along K; TypeError for types that do not match.

    Args:
        inner: those of the weight.
    """
    first, second, _ = operand_names(op)
    if x.shape[-1] != inner:
        is_plain = isinstance(weight, Tensor) and not isinstance(weight, PackedWeight)
        hint = transposed_hint(op, x.shape[-1], weight.shape) if is_plain and weight.dim() == 3 else ""
        raise ValueError(
            f"{op}: {first} is {tuple(x.shape)} and {second} is {tuple(weight.shape)}: inner sizes {x.shape[-1]} and "
            f"{inner} differ{hint}"
        )
    if (
        isinstance(weight, Tensor)
        and not isinstance(weight, PackedWeight)
        and autocast_dtype(x.device) is None
    ):
        check_types(op, x, weight)


def _check_row_scale(op: str, row_scale: Any, rows: int, epilogue: Any) -> None:
    check_tensor(op, "row_scale", row_scale)
    if row_scale.shape != (rows,):
        raise ValueError(f"{op}: row_scale is {tuple(row_scale.shape)}; it must be ({rows},)")
    if not row_scale.dtype.is_floating_point:
        raise TypeError(f"{op}: row_scale is {row_scale.dtype}; it must be a floating-point type")
    if epilogue is not None and not callable(epilogue):
        raise TypeError(f"{op}: epilogue is a {type(epilogue).__name__}; it must be a function")


def _check_scaled(op: str, x: Any, weight: Any, functions: Functions) -> None:
    """TypeError or ValueError unless both operands have matching scales, or neither has."""
    first, second, _ = operand_names(op)
    scaled = [isinstance(x, ScaledTensor), isinstance(weight, ScaledTensor)]
    if not any(scaled):
        return
    if not all(scaled):
        pair = f"; {second} is a pair, which has no scales" if isinstance(weight, tuple | list) else ""
        raise TypeError(f"{op}: {first} and {second} must both be a gemmery.ScaledTensor, or neither{pair}")
    if functions.prologue is not None:
        raise TypeError(f"{op}: a prologue takes floating-point operands; {first} is a gemmery.ScaledTensor")
    check_kinds(op, x, weight)


def _buffers(op: str, weight: Any, weight_grad: Any) -> tuple[Tensor, ...]:
    """The tensors to which the gradients of a weight's matrices are added; () without them, or without gradients.

    Raises:
        ValueError: shapes or devices do not fit, or nothing could be added.
        TypeError: a type does not fit.
    """
    if weight_grad is None:
        return ()
    halves, buffers = [list(x) if isinstance(x, tuple | list) else [x] for x in (weight, weight_grad)]
    if len(halves) != len(buffers):
        raise TypeError(f"{op}: weight_grad must be a pair for a pair of weights, and otherwise one tensor")
    if _are_functorch_transforms_active() or _len_torch_dispatch_stack():
        raise ValueError(
            f"{op}: weight_grad works only with autograd, not in torch.func or inside a dispatch mode"
        )
    for half, buffer in zip(halves, buffers, strict=True):
        if isinstance(half, PackedWeight | ScaledTensor):
            raise TypeError(
                f"{op}: weight_grad is given, but the weight is packed or scaled, and has no gradient"
            )
        check_sum(op, "weight_grad", buffer, half, tuple(half.shape))
        if buffer.untyped_storage().data_ptr() == half.untyped_storage().data_ptr() != 0:
            raise ValueError(f"{op}: weight_grad shares memory with the weight; give a separate tensor")
    if not wants_gradient(halves):
        return ()
    # Autograd does not check its content, so another backward pass may have changed it.
    return tuple([x.data for x in buffers])


def check_sum(op: str, name: str, given: Any, like: Tensor, shape: tuple[int, ...]) -> None:
    """ValueError or TypeError unless products of operands, of a shape, can be added to the given tensor."""
    check_tensor(op, name, given)
    if tuple(given.shape) != shape:
        raise ValueError(f"{op}: {name} is {tuple(given.shape)}; it must be {shape}")
    wanted = torch.float64 if like.dtype == torch.float64 else torch.float32
    if given.dtype != wanted:
        raise TypeError(f"{op}: {name} is {given.dtype}; it must be {wanted}")
    if given.device != like.device:
        raise ValueError(f"{op}: {name} is on {given.device} and the operands are on {like.device}")
    if overlaps_itself(given):
        raise ValueError(f"{op}: {name} has strides {given.stride()}: its elements overlap one another")


def _reads_tensors(functions: Functions) -> bool:
    """Whether a prologue reads other tensors, whose rows are not those of the product."""
    if functions.prologue is None:
        return False
    captured = captured_of(functions.prologue)[1]
    return any(isinstance(value, Tensor) for value in (*functions.prologue_args, *captured.tensors))


def _gathered_scales(x: Any, weight: Any, gather: Tensor | None) -> Tensor | None:
    """The scales of gathered rows by which the product is multiplied; None if the matrix's own do."""
    if gather is None or not isinstance(x, ScaledTensor) or x.kind != "row" or weight.kind not in OUTER_KINDS:
        return None
    # Behind the last group, a number need not be that of a row.
    return x.scale.index_select(0, gather.clamp(0, max(x.shape[0] - 1, 0)))


def _times_rows(made: Any, row_scale: Tensor, scatter: Tensor | None, out: Tensor | None) -> Any:
    """The matrices among the results, with each row multiplied at its place in the result."""
    if scatter is not None:
        row_scale = torch.zeros_like(row_scale).index_copy(0, scatter.long(), row_scale)
    scale = row_scale.unsqueeze(-1)
    if out is not None:
        return out.mul_(scale)
    results = made if isinstance(made, tuple) else (made,)
    scaled = tuple([(x * scale).to(x.dtype) if x.dim() > 1 else x for x in results])
    return scaled if isinstance(made, tuple) else scaled[0]


def _check_indices(op: str, name: str, value: Any, x: Tensor, rows: int | None) -> None:
    check_tensor(op, name, value)
    if value.dim() != 1 or (rows is not None and value.shape[0] != rows):
        wanted = "one dimension" if rows is None else f"the shape ({rows},), a number for each row"
        raise ValueError(f"{op}: {name} is {tuple(value.shape)}; it must have {wanted}")
    if value.dtype != torch.int32:
        how = "; use offs.int(), or cumsum with dtype=torch.int32" if name == "offs" else ""
        raise TypeError(f"{op}: {name} is {value.dtype}; it must be torch.int32{how}")
    if value.device != x.device:
        raise ValueError(f"{op}: {name} is on {value.device} and {operand_names(op)[0]} on {x.device}")
    if not value.is_contiguous():
        raise ValueError(f"{op}: {name} has a stride of {value.stride(0)}; it must be contiguous")


def _groups(op: str, x: Tensor, offs: Any, axis: Axis, most: int, count: int | None = None) -> Groups:
    """The first operand, with checked ends of groups.

    Args:
        most: the largest end that there can be.
        count: how many groups there must be.
    """
    if offs is None:
        raise ValueError(f"{op}: offs is missing; it must contain the end of each group, as torch.int32")
    check_tensor(op, "offs", offs)
    if offs.dim() != 1 or (count is not None and offs.shape[0] != count):
        wanted = (
            "one dimension"
            if count is None
            else f"the shape ({count},), the end of each group, without a leading 0"
        )
        raise ValueError(f"{op}: offs is {tuple(offs.shape)}; it must have {wanted}")
    _check_indices(op, "offs", offs, x, None)
    if _looks_at(offs):
        ends = [0, *offs.tolist()]
        if any(i > j for i, j in itertools.pairwise(ends)) or ends[-1] > most:
            raise ValueError(
                f"{op}: offs is {ends[1:]}; it has the ends of the groups, not their sizes, so it must not decrease, "
                f"and its last element must be at most {most}"
            )
    return Groups(x, offs, axis)


def _looks_at(x: Tensor) -> bool:
    """Whether the numbers in a tensor are checked: they are on the CPU, or the user accepts the wait."""
    return (CHECKS_OFFSETS or x.device.type == "cpu") and not is_compiling() and type(x) in PLAIN


def _check_numbers(op: str, offs: Tensor, given: dict[str, tuple[Tensor | None, int]]) -> None:
    """ValueError for numbers of rows that there are not, as far as they belong to groups; by name, with how many."""
    for name, (numbers, most) in given.items():
        if numbers is None or not _looks_at(numbers) or not _looks_at(offs) or not offs.shape[0]:
            continue
        # All rows have a place in the result, including those after the last group.
        used = numbers if name == "scatter" else numbers[: int(offs[-1])]
        if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < most:
            outside = used[(used < 0) | (used >= most)]
            raise ValueError(
                f"{op}: {name} contains {int(outside[0])}; its numbers must be from 0 to {most - 1}"
            )
        if name == "scatter" and numbers.unique().numel() < numbers.numel():
            raise ValueError(
                f"{op}: scatter contains a row twice; each row of the product needs a different row of the result"
            )


def _of_groups(op: str, bias: Any, count: int, columns: int) -> Any:
    """A bias, or each of a pair, with a row for each group if it has groups.

    Args:
        count, columns: of the weight's groups, and rows of the weight, or of each of a pair.
    """
    if isinstance(bias, tuple | list):
        return tuple([_of_groups(op, x, count, x.shape[-1] if isinstance(x, Tensor) else 0) for x in bias])
    if not isinstance(bias, Tensor) or bias.dim() != 2:
        return bias
    if bias.shape[0] != count or bias.shape[1] not in (1, columns, 2 * columns):
        raise ValueError(f"{op}: bias is {tuple(bias.shape)}; it must be {(count, columns)} or {(columns,)}")
    return bias.unsqueeze(1)


def _with_row_scale(epilogue: Any) -> Epilogue[..., Any]:
    """An epilogue, or none, with its matrices multiplied by an additional argument."""
    if epilogue is None or isinstance(epilogue, Epilogue):
        return _row_scaled(epilogue)
    known = memoised(epilogue)
    return _row_scaled(known) if isinstance(known, Epilogue) else _row_scaled.__wrapped__(known)


@functools.lru_cache(256)
def _row_scaled(known: Any) -> Epilogue[..., Any]:
    return Epilogue(functools.partial(_scaled, function_of(known)))


def _scaled(function: Callable[..., Any] | None, product: Tensor, *args: Any) -> Any:
    """An epilogue after a function, or alone: it multiplies each row of the matrices among the results by the last
    argument.
    """
    *own, scale = args
    made = product if function is None else function(product, *own)
    many = isinstance(made, tuple | list)
    # In the type of the function's result, for any type of scale.
    results = [
        (x * scale).to(x.dtype) if x.dim() == product.dim() else x for x in (made if many else (made,))
    ]
    return tuple(results) if many else results[0]
