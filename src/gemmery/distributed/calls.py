"""Common parts of the products of several ranks: their arguments, and whether kernels can use the ranks' memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import devices
from ..dtensors import is_sharded
from ..epilogues.function import Epilogue, captured_of, memoised
from ..epilogues.results import returned
from ..formats.weight import PackedWeight
from ..operands.dense import AUTOCAST
from ..product.check import check_not_packed, check_second, check_tensor
from ..product.epilogue import outputs_of, program
from ..product.run import checked
from ..product.seen import PLAIN, autocast_dtype, is_followed, needs_dispatcher, wants_gradient
from ..product.shape import OF_WEIGHTS, operand_names
from ..product.spec import Functions, Options
from .exchange import Shared, shared_by

#: Types of operands that kernels support: their products are summed in 32 bits.
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8)
#: The attribute of an Epilogue that keeps whether it draws random numbers.
_DRAWS = "__gemmery_draws__"


def outside_compiler(function: Callable[..., Any], *args: Any) -> Any:
    """A call at which torch.compile breaks its graph."""
    if is_dynamo_compiling() or is_followed():
        from ..product.compiled import uncompiled

        return uncompiled(function, *args)
    return function(*args)


def checked_group(name: str, op: str, a: Any, b: Any, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The process group of a call.

    Args:
        name: the user's name for the function.
        op: the product that is part of it.

    Raises:
        TypeError: an operand is of a kind that it does not accept, or the group is not a process group.
        ValueError: this process is not in the group.
        RuntimeError: there is no process group.
    """
    first, second, _ = operand_names(op)
    check_tensor(name, first, a)
    check_not_packed(name, first, a)
    check_second(op, b, takes_pair=False)
    if is_sharded([a, b]):
        raise TypeError(
            f"{name}: {first} or {second} is a DTensor; use gemmery.{op}, or give the local tensors (to_local)"
        )
    if not dist.is_initialized():
        raise RuntimeError(f"{name}: there is no process group; call torch.distributed.init_process_group")
    group = dist.group.WORLD if group is None else group
    assert group is not None
    if group == dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise ValueError(f"{name}: this process is not in the group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{name}: group is a {type(group).__name__}; it must be a ProcessGroup, as mesh.get_group() returns it"
        )
    return group


def captured(functions: Functions) -> Sequence[Tensor]:
    """The tensors that the epilogue holds."""
    return () if functions.epilogue is None else captured_of(functions.epilogue)[1].tensors


def tensors_of(a: Tensor, b: Any, bias: Any, functions: Functions) -> list[Tensor]:
    """All tensors that go in."""
    of_b = b.parts().values() if isinstance(b, PackedWeight) else (b,)
    return [x for x in (a, *of_b, bias, *functions.args, *captured(functions)) if isinstance(x, Tensor)]


def shared_memory(a: Tensor, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Shared | None:
    """The memory that the ranks share, if a kernel can use it; the same answer on all ranks."""
    if a.dtype not in TYPES or devices.current(a.device) is None or needs_dispatcher(tensors):
        return None
    shared = shared_by(group, a.device)
    return shared if shared.works else None


def moved(x: Any, dim: int) -> Any:
    """A value with a dimension moved to the front, and its rows as those of one matrix, if it has rows."""
    if not isinstance(x, Tensor) or x.dim() < 2 or (x.dim() == 2 and dim == 0):
        return x
    return x.movedim(dim, 0).reshape(-1, x.shape[-1])


def as_matrices(dim: int, lead: torch.Size, bias: Any, functions: Functions) -> tuple[Any, Functions] | None:
    """Bias and functions of a product whose rows become those of one matrix; None if it takes a batch.

    If this depended on strides, ranks could differ.

    Args:
        dim: the dimension that comes first.
        lead: the dimensions of the result before its columns.
    """
    if len(lead) == 1:
        return bias, functions
    own = captured(functions)
    rows = [x for x in (bias, *functions.args, *own) if isinstance(x, Tensor) and x.dim() > 1]
    if any(x.shape[:-1] != lead for x in rows) or any(x.dim() > 1 for x in own):
        return None
    return moved(bias, dim), functions._replace(args=tuple([moved(x, dim) for x in functions.args]))


def as_batch(made: Any, lead: Sequence[int], dim: int) -> Any:
    """The results of a product of one matrix, with the dimensions of the result restored.

    Args:
        lead: those before its columns, the one that came first at the beginning.
        dim: its place in the result.
    """
    if len(lead) == 1:
        return made
    results = [
        x.reshape(*lead, *x.shape[1:]).movedim(0, dim) for x in (made if isinstance(made, tuple) else (made,))
    ]
    return tuple(results) if isinstance(made, tuple) else results[0]


def finished(
    op: str, a: Tensor, b: Any, bias: Any, functions: Functions, options: Options, total: Tensor
) -> Any:
    """The epilogue of a sum, in torch.

    Args:
        a: a first operand of as many rows as the sum has.
    """
    call = checked(op, a, b, bias, functions, None, options)
    if call.does_nothing:
        return total.to(options.out_dtype or call.b.default)  # type: ignore[arg-type]
    return returned(*outputs_of(replace(call, outer=()), total))


def columns_of(op: str, b: Any) -> int:
    """Columns of a product, of which b, without a batch, is the second operand."""
    of_weight = op in OF_WEIGHTS or isinstance(b, PackedWeight)
    return int(b.shape[-2 if of_weight else -1])


def has_own_rows(op: str, x: Tensor, b: Any, bias: Any, functions: Functions, options: Options) -> bool:
    """Whether some rows of a product of matrices can be computed as a product of their own.

    They cannot if the epilogue holds a matrix, of which only some rows belong to them, or if it draws random numbers,
    which depend on the place in the whole product.
    """
    if functions.epilogue is None:
        return True
    if any(t.dim() > 1 for t in captured(functions)):
        return False
    function = memoised(functions.epilogue)
    # The answer is the same for each call of an Epilogue.
    own = function.__dict__ if isinstance(function, Epilogue) else {}
    if _DRAWS not in own:
        own[_DRAWS] = "uniform(" in program(checked(op, x, b, bias, functions, None, options)).source
    return not own[_DRAWS]


def of_some_rows(bias: Any, functions: Functions, first: int, count: int, rows: int) -> tuple[Any, Functions]:
    """Bias and functions of the product of some rows of a matrix.

    Args:
        first, count: the first row, and how many.
        rows: the number of rows of the whole matrix. A bias or an argument with as many rows is narrowed.
    """

    if bias is None and not functions.args:
        return bias, functions

    def narrowed(value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.dim() == 2 and value.shape[0] == rows
        return value.narrow(0, first, count) if has_rows else value

    return narrowed(bias), functions._replace(args=tuple([narrowed(value) for value in functions.args]))


def unpermuted(a: Tensor, b: Any) -> tuple[Tensor, Any]:
    """Operands of the same product; a packed one has its columns in order."""
    if isinstance(b, PackedWeight) and b.permutation is not None:
        return a.index_select(-1, b.permutation), b.unpermuted()
    return a, b


def given_up(shared: Shared, function: Callable[[], Any]) -> Any:
    """A launch for which other ranks wait; if it fails on this one, later calls raise an error."""
    place = shared.device
    try:
        # Triton launches on the current GPU.
        with torch.cuda.device(place.index) if place.type == "cuda" else contextlib.nullcontext():
            return function()
    except (TypeError, ValueError):
        # An error of the arguments, before any launch; it is the same on all ranks.
        raise
    except BaseException:
        shared.give_up()
        raise


def dimension(name: str, op: str, argument: str, a: Tensor, b: Any, dim: int) -> int:
    """A dimension of a first operand, counted from 0.

    Raises:
        ValueError: there is no such dimension, or it is the last one; or b is a batch.
    """
    first, second, _ = operand_names(op)
    if a.dim() < 2:
        raise ValueError(f"{name}: {first} is {tuple(a.shape)}; it must have at least 2 dimensions")
    if b.dim() != 2:
        raise ValueError(f"{name}: {second} is {tuple(b.shape)}; it must be a matrix")
    if not -a.dim() <= dim < a.dim() or dim % a.dim() == a.dim() - 1:
        raise ValueError(
            f"{name}: {argument} is {dim} and {first} is {tuple(a.shape)}; it must be a dimension of {first} before "
            "the last one"
        )
    return dim % a.dim()


def as_autocast(a: Tensor) -> Tensor:
    """A first operand in autocast's type."""
    dtype = autocast_dtype(a.device)
    return a if dtype is None or a.dtype not in AUTOCAST else a.to(dtype)


def is_differentiated(x: Tensor, b: Any, bias: Any, functions: Functions, options: Options) -> bool:
    """Whether a product has gradients for which kernels also gather and scatter rows."""
    bare = bias is None and functions.epilogue is None and options.out_dtype in (None, x.dtype)
    plain = type(x) in PLAIN and type(b) in PLAIN and x.dtype == b.dtype and x.dtype in AUTOCAST
    return bare and plain and options.config is None and wants_gradient((x, b))


def of_gradients(options: Options) -> Options:
    """The options of the products that are gradients."""
    return options._replace(out_dtype=None)
