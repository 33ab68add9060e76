"""Products whose K is spread over ranks: each has some columns of the operands, and all have the whole sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import devices
from ..dtensors import is_sharded
from ..epilogues.function import captured_of
from ..epilogues.results import returned
from ..formats.weight import PackedWeight
from ..operands import SummedOver
from ..operands.summed import places_of
from ..precision import AskedPrecision, resolved
from ..problem import Config
from ..product.check import check_not_packed, check_second, check_tensor
from ..product.epilogue import outputs_of
from ..product.run import checked, product
from ..product.seen import is_followed, needs_dispatcher
from ..product.shape import OF_WEIGHTS, operand_names
from ..product.spec import NONE, Functions, Options, OutTypes
from .exchange import MOST, Shared, shared_by

#: Types of operands whose products are summed in 32 bits.
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8)


def matmul_all_reduce(
    a: Tensor,
    b: Tensor | PackedWeight,
    *,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    epilogue: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    out_dtype: OutTypes = None,
    precision: AskedPrecision = "ieee",
    batch_invariant: bool = False,
    config: Config | dict[str, Any] | str | None = None,
) -> Any:
    """The sum over all ranks of `a @ b`, on every rank: `gemmery.matmul` with columns of `a` and rows of `b` sharded.

    With few rows it is one kernel. Each rank stores the partial sums of its tiles, in float32, into the memory of the
    others, and adds up those of all ranks in the order of the ranks: the result is rounded once and has the same bits
    on every rank. The epilogue sees the sum. That takes GPUs of one host that reach each other's memory, up to 8, and
    at most 2^23 elements of the product (1024 rows of 8192 columns). Elsewhere, with gradients and under torch.compile,
    which it interrupts, it is a product, an all-reduce of float32, and the epilogue.

    All ranks call it together, in the same order, with operands of the same shapes, strides and types, and the same
    `bias`, `args` and `config`. Gradients are recorded on all ranks or on none. The first call of a group, and one with
    a larger product than before, allocate memory and wait for all ranks: make such a call before a CUDA graph is
    captured. Products of one group must not run in two streams at the same time.

    The gradient of `a` and of `b` is that of the rank's own columns, as all ranks go on with the same result.

    Args:
        a: (..., M, K), of the rank.
        b: (..., K, N), of the rank; or a packed or sparse weight (N, K).
        group: the ranks; all of the default group if None.
        bias, epilogue, args, out_dtype, precision, batch_invariant, config: as for `gemmery.matmul`.

    Returns:
        What `gemmery.matmul` returns of the operands of all ranks, side by side along K.

    Raises:
        ValueError, TypeError: as for `gemmery.matmul`. The other ranks then wait in vain.
        RuntimeError: there is no process group; or a rank did not arrive at an earlier product, see `set_timeout`.

    Example:
        >>> import torch
        >>> from gemmery.distributed import matmul_all_reduce
        >>> matmul_all_reduce(torch.ones(2, 64), torch.ones(64, 8)).shape  # doctest: +SKIP
        torch.Size([2, 8])
    """
    how = resolved(precision, a)
    options = Options(out_dtype, how, False, batch_invariant, config)
    return _all_reduced("matmul", a, b, bias, Functions(epilogue, args), options, group)


def linear_all_reduce(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    epilogue: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    out_dtype: OutTypes = None,
    precision: AskedPrecision = "ieee",
    batch_invariant: bool = False,
    config: Config | dict[str, Any] | str | None = None,
) -> Any:
    """The sum over all ranks of `x @ weight.T`, plus the bias: a Linear whose weight is sharded by its columns.

    Args:
        x: (..., K), of the rank.
        weight: (N, K), of the rank; or packed or sparse, (N, K).
        bias: (N,), the same on all ranks, which is added once.

    The other arguments, the result and the errors are those of `matmul_all_reduce`.

    Example:
        >>> import torch
        >>> from gemmery.distributed import linear_all_reduce
        >>> linear_all_reduce(torch.ones(2, 64), torch.ones(8, 64)).shape  # doctest: +SKIP
        torch.Size([2, 8])
    """
    how = resolved(precision, x)
    options = Options(out_dtype, how, False, batch_invariant, config)
    return _all_reduced("linear", x, weight, bias, Functions(epilogue, args), options, group)


def _all_reduced(
    op: str, a: Any, b: Any, bias: Any, functions: Functions, options: Options, group: dist.ProcessGroup | None
) -> Any:  # fmt: skip
    if is_dynamo_compiling() or is_followed():
        from ..product.compiled import uncompiled

        return uncompiled(_outside, op, a, b, bias, functions, options, group)
    return _outside(op, a, b, bias, functions, options, group)


def _outside(
    op: str, a: Any, b: Any, bias: Any, functions: Functions, options: Options, group: dist.ProcessGroup | None
) -> Any:  # fmt: skip
    """A call outside the compiler."""
    first, second, _ = operand_names(op)
    check_tensor(op, first, a)
    check_not_packed(op, first, a)
    check_second(op, b, takes_pair=False)
    if is_sharded([a, b]):
        raise TypeError(
            f"{op}_all_reduce: {first} or {second} is a DTensor; use gemmery.{op}, or give the local tensors (to_local)"
        )
    if not dist.is_initialized():
        raise RuntimeError(
            f"{op}_all_reduce: there is no process group; call torch.distributed.init_process_group"
        )
    group = dist.group.WORLD if group is None else group
    assert group is not None
    if dist.get_world_size(group) == 1:
        return product(op, a, b, bias, functions, None, options)
    if a.dim() == 1 and b.dim() == 2:
        made = _outside(op, a.unsqueeze(0), b, bias, functions, options, group)
        return tuple([x.squeeze(0) for x in made]) if isinstance(made, tuple) else made.squeeze(0)
    tensors = _tensors(a, b, bias, functions)
    shared = _shared(a, tensors, group)
    places = _places(op, a, b)
    if shared is None or not 0 < places <= MOST or not a.shape[-1]:
        return _in_steps(op, a, b, bias, functions, options, group)
    if a.dim() == 2:
        return _in_kernel(op, a, b, bias, functions, options, shared, places)
    return _of_batch(op, a, b, bias, functions, options, group, shared, places)


def _in_kernel(
    op: str, a: Tensor, b: Any, bias: Any, functions: Functions, options: Options, shared: Shared, places: int
) -> Any:  # fmt: skip
    """The product and its sum as one kernel."""
    if isinstance(b, PackedWeight) and b.permutation is not None:
        a, b = a.index_select(-1, b.permutation), b.unpermuted()
    exchange = shared.exchange(f"{op}_all_reduce", places)
    try:
        return product(op, SummedOver(a, exchange), b, bias, functions, None, options)
    except (TypeError, ValueError):
        # Of arguments, before anything was launched; all ranks have the same.
        raise
    except BaseException:
        shared.give_up()
        raise


def _of_batch(
    op: str, a: Tensor, b: Any, bias: Any, functions: Functions, options: Options, group: dist.ProcessGroup,
    shared: Shared, places: int,
) -> Any:  # fmt: skip
    """The same where x has a batch, which becomes rows of one matrix, as do the arguments.

    Left to strides, it might become that on some ranks alone.
    """
    lead = a.shape[:-1]
    captured = _captured(functions)
    rows = [x for x in (bias, *functions.args, *captured) if isinstance(x, Tensor) and x.dim() > 1]
    if any(x.shape[:-1] != lead for x in rows) or any(x.dim() > 1 for x in captured):
        return _in_steps(op, a, b, bias, functions, options, group)

    def flat(x: Any) -> Any:
        return x.reshape(-1, x.shape[-1]) if isinstance(x, Tensor) and x.dim() > 1 else x

    functions = functions._replace(args=tuple([flat(x) for x in functions.args]))
    made = _in_kernel(op, flat(a), b, flat(bias), functions, options, shared, places)
    results = [x.reshape(*lead, *x.shape[1:]) for x in (made if isinstance(made, tuple) else (made,))]
    return tuple(results) if isinstance(made, tuple) else results[0]


def _places(op: str, a: Tensor, b: Any) -> int:
    """Places that the product takes, see `operands.summed.places_of`; 0 where b has a batch."""
    if b.dim() != 2:
        return 0
    of_weight = op in OF_WEIGHTS or isinstance(b, PackedWeight)
    return places_of(a.shape[:-1].numel(), b.shape[-2 if of_weight else -1])


def _tensors(a: Tensor, b: Any, bias: Any, functions: Functions) -> list[Tensor]:
    """All tensors that go in."""
    of_b = b.parts().values() if isinstance(b, PackedWeight) else (b,)
    return [x for x in (a, *of_b, bias, *functions.args, *_captured(functions)) if isinstance(x, Tensor)]


def _captured(functions: Functions) -> Sequence[Tensor]:
    """The tensors that the epilogue holds."""
    return () if functions.epilogue is None else captured_of(functions.epilogue)[1].tensors


def _shared(a: Tensor, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Shared | None:
    """The memory that the ranks share, where a kernel can use it; the same answer on all ranks."""
    if a.dtype not in _TYPES or devices.current(a.device) is None or needs_dispatcher(tensors):
        return None
    shared = shared_by(group, a.device)
    return shared if shared.works else None


def _in_steps(
    op: str, a: Any, b: Any, bias: Any, functions: Functions, options: Options, group: dist.ProcessGroup
) -> Any:
    """The product of each rank, their sum by the process group, and the epilogue in torch."""
    call = checked(op, a, b, bias, functions, None, options)
    partial = product(op, a, b, None, NONE, None, options._replace(out_dtype=call.wide))
    total = _Sum.apply(partial, group)  # type: ignore[no-untyped-call]
    if call.does_nothing:
        return total.to(options.out_dtype or call.b.default)
    return returned(*outputs_of(replace(call, outer=()), total))


class _Sum(torch.autograd.Function):
    """The sum over ranks. Each rank's gradient is that of the result, with which all ranks go on."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = partial.clone() if partial.requires_grad else partial
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
