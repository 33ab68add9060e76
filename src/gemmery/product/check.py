"""Checks of a product before it runs. Errors state what was given and what is required.

No check looks at memory, so all of them also work on fake tensors with symbolic sizes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..dtypes import DTYPE_NAMES, FP8, OUT_DTYPES, PRECISIONS
from ..epilogues.identity import Captured
from ..formats.scaled import ScaledTensor
from ..formats.sparse import SparseTensor
from ..formats.weight import PackedWeight
from ..layout import overlap, overlaps_itself, same_layout
from .shape import OF_WEIGHTS, operand_names
from .spec import Call, Number, OutTypes, unchanged

#: The numbers of dimensions that operations require.
_RANKS = {"addmm": 2, "bmm": 3}
#: Kinds of scales that multiply whole rows and columns of the product.
OUTER_KINDS = ("tensor", "row")
#: Operations whose first operand may be a `ScaledTensor`, groups aside.
_OF_SCALED = ("scaled_matmul", "plan")


def check_tensor(op: str, name: str, value: object) -> None:
    """Raises TypeError unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        hint = "; did you mean epilogue=?" if name == "bias" and callable(value) else ""
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; it must be a torch.Tensor{hint}")
    if isinstance(value, torch.sparse.SparseSemiStructuredTensor):
        raise TypeError(
            f"{op}: {name} is torch's semi-structured tensor; make a gemmery.SparseTensor of it by gemmery.sparsify"
        )
    # The compiler can't ask that in a backward pass; the operator does.
    if not is_compiling() and value.layout != torch.strided:
        raise TypeError(f"{op}: {name} is sparse ({value.layout}); it must be a strided tensor")


def check_second(op: str, b: Any, takes_pair: bool) -> None:
    """TypeError unless the second operand is a tensor, or a pair where there is an epilogue to halve columns."""
    second = operand_names(op)[1]
    if isinstance(b, tuple | list) and len(b) == 2 and not takes_pair:
        raise TypeError(
            f"{op}: {second} is a pair, which requires an epilogue that halves the product's columns, such as "
            "gemmery.epilogues.swiglu"
        )
    if not isinstance(b, tuple | list) or not takes_pair:
        check_tensor(op, second, b)
        return
    if len(b) != 2:
        raise TypeError(
            f"{op}: {second} is a tuple of {len(b)}; it must be a tensor, or a pair of tensors for the left and the "
            "right columns"
        )
    for i, half in enumerate(b):
        check_tensor(op, f"{second}[{i}]", half)
        if isinstance(half, PackedWeight):
            raise TypeError(
                f"{op}: {second}[{i}] is packed; halves of packed columns must be one tensor, so quantize their "
                "concatenation"
            )


def check_not_packed(op: str, name: str, value: object, which: str = "the second operand") -> None:
    """Raises TypeError for a packed weight that is not the second operand; messages call it `which`."""
    if isinstance(value, PackedWeight):
        raise TypeError(
            f"{op}: {name} is a {type(value).__name__}; sparse and quantized weights must be {which}"
        )


def moved(value: Any, a: Tensor) -> Any:
    """An input on the operands' device: a tensor of no dimensions may be on the CPU, as in torch."""
    moves = (
        isinstance(value, Tensor)
        and value.dim() == 0
        and value.device != a.device
        and value.device.type == "cpu"
    )
    return value.to(a.device) if moves else value


# ---------------------------------------------------------------------------------------------------------------------
# Shapes and types


def check_types(op: str, a: Tensor, b: Tensor) -> None:
    """Raises TypeError if the operands' types are not supported, or do not match."""
    first, second, _ = operand_names(op)
    for name, tensor in ((first, a), (second, b)):
        if tensor.dtype not in OUT_DTYPES:
            known = ", ".join(str(dtype) for dtype in OUT_DTYPES)
            raise TypeError(f"{op}: {name} is {tensor.dtype}; it must be one of {known}")
    if a.dtype != b.dtype and not (a.dtype in FP8 and b.dtype in FP8):
        raise TypeError(
            f"{op}: {first} is {a.dtype} and {second} is {b.dtype}; they must have the same type: use "
            f"{first}.to({second}.dtype)"
        )


def check_kinds(op: str, a: ScaledTensor, b: ScaledTensor) -> None:
    """Raises ValueError if the operands' scales are for blocks of different sizes."""
    first, second, _ = operand_names(op)
    if "1x32" in (a.kind, b.kind) and not {a.kind, b.kind}.isdisjoint(("1x128", "128x128")):
        raise ValueError(
            f"{op}: {first} has scales {a.kind} and {second} {b.kind}; with 1x32, the other's must be 1x32, row or "
            "tensor"
        )


def check_scaled(op: str, a: Any, b: Any) -> None:
    """Raises TypeError or ValueError unless the operands of a scaled product match."""
    if op not in _OF_SCALED:
        first = operand_names(op)[0]
        raise TypeError(f"{op}: {first} is a ScaledTensor; multiply it by gemmery.scaled_matmul")
    if not isinstance(a, ScaledTensor):
        raise TypeError(
            f"{op}: a is a {type(a).__name__}; it must be a gemmery.ScaledTensor, as gemmery.quantize_activations makes"
        )
    if isinstance(b, SparseTensor):
        _check_sparse(op, a, b)
        of_b = torch.float8_e4m3fn
    elif isinstance(b, ScaledTensor):
        check_kinds(op, a, b)
        of_b = b.dtype
    else:
        raise TypeError(
            f"{op}: b is a {type(b).__name__}; it must be a gemmery.ScaledTensor, or a gemmery.SparseTensor of e4m3"
        )
    if len(b.shape) != 2:
        raise ValueError(f"{op}: b is {tuple(b.shape)}; it must be (N, K)")
    if a.kind == "128x128" and len(a.shape) > 2:
        raise ValueError(f"{op}: a is {tuple(a.shape)} with scales 128x128; with these it must be (M, K)")
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"{op}: a is {tuple(a.shape)} and b is {tuple(b.shape)}: "
            f"inner sizes {a.shape[-1]} and {b.shape[-1]} differ"
        )
    if a.dtype != of_b and not (a.dtype in FP8 and of_b in FP8):
        raise TypeError(f"{op}: a is {a.dtype} and b is {of_b}; they must have the same type, or both be fp8")
    if a.device != b.device:
        raise ValueError(f"{op}: a is on {a.device} and b on {b.device}; they must be on the same device")


def _check_sparse(op: str, a: ScaledTensor, b: SparseTensor) -> None:
    """Raises TypeError or ValueError unless a sparse weight's numbers match a's scales."""
    if b.code != "e4m3":
        raise TypeError(
            f"{op}: b keeps elements of {b.code or b.dtype}; a sparse b must keep e4m3: "
            'use gemmery.quantize(gemmery.sparsify(w), "e4m3")'
        )
    if a.kind not in OUTER_KINDS:
        raise ValueError(
            f"{op}: a has scales {a.kind}; with a sparse b, there must be one scale, or one per row"
        )


def check_not_fp8(op: str, a: Tensor, b: PackedWeight) -> None:
    """Raises TypeError for fp8 activations with a sparse weight of e4m3, which are for `scaled_matmul`."""
    if a.dtype in FP8 and isinstance(b, SparseTensor) and b.code == "e4m3":
        first, second, _ = operand_names(op)
        raise TypeError(
            f"{op}: {first} is {a.dtype} and {second} is a {b.dtype} weight that keeps e4m3; multiply fp8 by "
            f"gemmery.scaled_matmul, with {first} from gemmery.quantize_activations, or give {first} in {b.dtype}"
        )


def result_dtype(op: str, dtype: torch.dtype, out_dtype: OutTypes) -> torch.dtype:
    """The type of a bare product of operands of a type; raises TypeError for an unsupported one."""
    allowed = OUT_DTYPES[dtype]
    if out_dtype is None:
        return allowed[0]
    if isinstance(out_dtype, tuple) or out_dtype not in allowed:
        names = ", ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"{op}: out_dtype is {out_dtype}; for {dtype} operands it can be {names}")
    return out_dtype


def check_ranks(op: str, a: Tensor, b: Tensor) -> None:
    """Raises ValueError unless the operands have the dimensions that the operation requires."""
    first, second, _ = operand_names(op)
    rank = _RANKS.get(op)
    if rank is not None:
        for name, tensor in ((first, a), (second, b)):
            if tensor.dim() != rank:
                raise ValueError(f"{op}: {name} is {tuple(tensor.shape)}; it must have {rank} dimensions")
    if op == "bmm" and a.shape[0] != b.shape[0]:
        raise ValueError(f"bmm: a is {tuple(a.shape)} and b is {tuple(b.shape)}: batch sizes differ")


def check_matrices(op: str, a: Tensor, b: Tensor) -> None:
    """Raises ValueError for a vector, which only a plain product accepts."""
    if min(a.dim(), b.dim()) < 2:
        first, second, _ = operand_names(op)
        raise ValueError(
            f"{op}: {first} and {second} must be matrices or batches of them; only products without an epilogue or a "
            "prologue support vectors"
        )


_REAL = (int, float, torch.SymInt, torch.SymFloat)
_LARGEST = torch.finfo(torch.float32).max


def check_scalars(op: str, a: Tensor, alpha: Number, beta: Number) -> None:
    """TypeError or ValueError unless alpha and beta are real Python numbers that suit the operands' type."""
    dtype = a.dtype
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not isinstance(value, _REAL):
            raise TypeError(f"{op}: {name} is a {type(value).__name__}; it must be a Python number")
        if dtype == torch.int8 and not (abs(value) < 1 << 31 and value == int(value)):
            raise TypeError(f"{op}: {name} is {value}; for int8 operands it must be an integer of 32 bits")
        least, most = (1e-23, 1e38) if dtype == torch.float64 else (0.0, _LARGEST)
        if value != 0 and abs(value) < math.inf and not least <= abs(value) <= most:
            raise ValueError(
                f"{op}: {name} is {value}; it must be 0 or between {least:g} and {most:g} in size"
            )


def check_addend(op: str, addend: Tensor, shape: tuple[int, ...], a: Tensor) -> None:
    """TypeError or ValueError unless a tensor can be added to a bare product."""
    name = operand_names(op)[2]
    check_tensor(op, name, addend)
    check_not_packed(op, name, addend)
    if addend.dtype not in DTYPE_NAMES or addend.dtype in FP8:
        raise TypeError(
            f"{op}: {name} is {addend.dtype}, which cannot be added to a product of {a.dtype}; use "
            f"{name}.to({result_dtype(op, a.dtype, None)})"
        )
    if (a.dtype == torch.int8) == addend.dtype.is_floating_point:
        raise TypeError(
            f"{op}: {name} is {addend.dtype} and a is {a.dtype}; both must be integers or neither"
        )
    try:
        fits = tuple(torch.broadcast_shapes(tuple(addend.shape), shape)) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"{op}: {name} is {tuple(addend.shape)}; it must broadcast to the result, {shape}")


def check_device(op: str, name: str, tensor: Tensor, a: Tensor) -> None:
    """ValueError unless a tensor is where the first operand is."""
    if tensor.device != a.device:
        first = operand_names(op)[0]
        raise ValueError(
            f"{op}: {first} is on {a.device} and {name} on {tensor.device}; they must be on the same device"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Whole calls


def check(call: Call) -> None:
    """Raises ValueError or TypeError unless a call's tensors fit each other."""
    op, a, b = call.op, call.a.matrix, call.b.matrix
    _, second, third = operand_names(op)
    if call.options.precision not in PRECISIONS:
        raise ValueError(
            f"{op}: precision is {call.options.precision!r}; it must be one of {', '.join(PRECISIONS)}, torch"
        )
    shape = call.shape
    if call.b.halves > 1:
        _check_halves(op, 3 if call.a.is_ragged else 2, *call.b.tensors[:2])
    if not call.ready:
        check_matrices(op, a, b)
    check_types(op, a, b)
    check_scalars(op, a, call.alpha, call.beta)
    if call.ready:
        result_dtype(op, call.dtype, call.options.out_dtype)
        for addend in call.inputs:
            check_addend(op, addend, shape, a)
            check_device(op, third, addend, a)
    check_device(op, second, b, a)
    if not call.ready:
        _check_inputs(call, shape)


def _check_halves(op: str, rank: int, left: Tensor, right: Tensor) -> None:
    name = operand_names(op)[1]
    if left.dim() != rank or right.shape != left.shape:
        shapes = [tuple((x.mT if op in OF_WEIGHTS and x.dim() > 1 else x).shape) for x in (left, right)]
        raise ValueError(
            f"{op}: the halves of {name} are {shapes[0]} and {shapes[1]}; they must be "
            f"{'matrices' if rank == 2 else 'batches of matrices'} of one shape"
        )
    if right.dtype != left.dtype or right.device != left.device:
        raise ValueError(
            f"{op}: the halves of {name} are {left.dtype} on {left.device} and {right.dtype} on {right.device}; "
            f"they must have the same type and device"
        )


def _check_inputs(call: Call, shape: tuple[int, ...]) -> None:
    op, a = call.op, call.a.matrix
    for i, value in enumerate(call.given):
        if isinstance(value, Tensor):
            check_tensor(op, input_name(call, i), value)
            if value.device != a.device:
                raise ValueError(
                    f"{op}: {input_name(call, i)} is on {value.device} and {operand_names(op)[0]} on {a.device}"
                )
            names = dimensions(call, i, value, shape)
            if i < call.lead and call.biases == 1 and call.b.halves == 2 and names[-1:] == ("N/2",):
                raise ValueError(f"{op}: bias is {tuple(value.shape)}; it must be a pair, as the weights are")
            if len(call.outer) <= i < call.lead and call.biases == 2 and names[-1:] != ("N/2",):
                raise ValueError(
                    f"{op}: {input_name(call, i)} is {tuple(value.shape)}; the halves' are ({shape[-1] // 2},)"
                )
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"{op}: {input_name(call, i)} is {value}; integers must fit in 64 bits")
        elif isinstance(value, int | float) and not isinstance(value, bool) and a.dtype == torch.float64:
            check_scalars(op, a, value, 1)


def input_name(call: Call, i: int) -> str:
    """The user's name for an argument of the epilogue."""
    i -= len(call.outer)
    if i < call.biases:
        return "an operand's scale" if i < 0 else "bias" if call.biases == 1 else f"bias[{i}]"
    own = len(call.own)
    position = i - call.biases
    return f"args[{position}]" if position < own else captured_name(call.captured, "epilogue", position - own)


def captured_name(captured: Captured, role: str, i: int) -> str:
    """The user's name for a tensor that a function takes from outside.

    Args:
        role: what the function is, "epilogue" or "prologue".
    """
    return f"the {role}'s variable {captured.names[i]}"


def dimensions(call: Call, i: int, tensor: Tensor, shape: tuple[int, ...]) -> tuple[str, ...]:
    """A tensor's dimensions by the product's names, or ValueError.

    Inputs for groups of rows, (G, 1, columns), have the names of a single row.
    """
    of_groups = call.a.is_ragged and tensor.dim() == len(shape) + 1 == 3
    if of_groups and tensor.shape[0] == call.a.matrix.shape[0] and tensor.shape[1] == 1:
        return dimensions(call, i, torch.empty(tensor.shape[1:], device="meta"), shape)
    if tensor.dim() > len(shape):
        raise ValueError(f"{call.op}: {input_name(call, i)} is {tuple(tensor.shape)}; the product is {shape}")
    names: list[str] = []
    N = shape[-1]
    # One of a pair of biases is as wide as half of the product, even if that is one column.
    half = call.biases == 2 and len(call.outer) <= i < call.lead
    for place in range(1, tensor.dim() + 1):
        size, full = tensor.shape[-place], shape[-place]
        # A size equal to the product's counts as such, even if it is 1: rows of a batch may become rows of one matrix.
        if place == 1:
            # Compared one by one: under torch.compile sizes are symbols. One column is every column's before it is
            # one half of two.
            if size == N:
                name = "N"
            elif size == 1 and not half:
                name = "1"
            else:
                name = "2N" if size == 2 * N and N > 1 else "N/2" if 2 * size == N else ""
        else:
            name = ("M" if place == 2 else f"b{len(shape) - place}") if size == full else ""
        names.append(name or ("1" if size == 1 else ""))
        if not names[-1]:
            raise ValueError(
                f"{call.op}: {input_name(call, i)} is {tuple(tensor.shape)}; it must broadcast to the product, "
                f"{shape}, or to that with half or twice the columns"
            )
    return tuple(names[::-1])


def check_out(
    call: Call, out: Tensor, found: tuple[tuple[int, ...], torch.dtype] | None, many: bool = False
) -> None:
    """Raises ValueError or TypeError unless a result can be written to a tensor.

    Args:
        found: shape and type of the first result; None if it is not a matrix.
        many: whether a tuple is returned.
    """
    op = call.op
    check_tensor(op, "out", out)
    check_not_packed(op, "out", out)
    if many or found is None:
        raise ValueError(f"{op}: out= requires an epilogue that returns one matrix; use the returned tensors")
    shape, dtype = found
    if tuple(out.shape) != shape:
        raise ValueError(f"{op}: out is {tuple(out.shape)}; the result is {shape}")
    if out.dtype != dtype:
        raise TypeError(f"{op}: out is {out.dtype}; the result is {dtype}")
    check_device(op, "out", out, call.a.matrix)


def may_be_sum(call: Call, out: Tensor) -> bool:
    """Whether the only addend of a product with a traced epilogue may be the output itself.

    Each element is read where it is written. But kernels that store some elements of 16 bits twice would add to them
    twice.
    """
    stays = call.function is unchanged and not call.a.scatters
    return stays and call.biases == 1 == len(call.inputs) and out.dtype.itemsize > 2


def check_scattered(call: Call, count: int) -> None:
    """Raises ValueError if rows of several results would be scattered: a kernel scatters only the first one."""
    if count > 1 and call.a.scatters:
        raise ValueError(f"{call.op}: scatter takes an epilogue with one result; this one returns {count}")


def check_memory(call: Call, out: Tensor) -> None:
    """Raises ValueError if elements of `out` overlap one another or an input."""
    if overlaps_itself(out):
        raise ValueError(
            f"{call.op}: out has strides {out.stride()} for {tuple(out.shape)}: its elements overlap one another"
        )
    first, second, third = operand_names(call.op)
    named = [*call.a.named(first), *call.b.named(second)]
    if call.ready:
        # An addend that is the output itself is read where it is written, by the same program, before the write.
        named += [(third, x) for x in call.inputs if call.beta != 0 and not same_layout(out, x)]
    else:
        lead = len(call.outer)
        is_sum = may_be_sum(call, out)
        for i, x in enumerate(call.inputs):
            if isinstance(x, Tensor) and not (is_sum and same_layout(out, x)):
                named.append((input_name(call, lead + i), x))
    for name, tensor in named:
        if overlap(out, tensor):
            raise ValueError(f"{call.op}: out and {name} share memory")
