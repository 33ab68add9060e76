"""Products whose K is sharded over ranks: each rank has some columns of the operands and receives the whole sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..formats.weight import PackedWeight
from ..operands import SummedOver
from ..operands.summed import places_of
from ..precision import AskedPrecision, resolved
from ..problem import Config
from ..product.run import checked, product
from ..product.spec import NONE, Functions, Options, OutTypes
from .calls import (
    as_autocast,
    as_batch,
    as_matrices,
    checked_group,
    columns_of,
    finished,
    given_up,
    has_own_rows,
    moved,
    of_some_rows,
    outside_compiler,
    shared_memory,
    tensors_of,
    unpermuted,
)
from .exchange import PARTIALS, SUMS, Shared
from .reduce_scatter import scattered_product
from .rows import collected

#: The number of rows from which on the sum is scattered over the ranks and its results are gathered; measured on two
#: H200.
BY_ROWS = 1024


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
    on every rank. The epilogue receives the sum. With more rows, this changes unless `batch_invariant` is set. From 64
    rows on, partial sums are rounded to the type of `a`, if that and the result have 16 bits. From 1024 rows on, each
    rank computes the sum of its own rows, as `matmul_reduce_scatter` does, and all ranks copy the results.

    Both require 2 to 8 GPUs of one host that can access each other's memory. The one kernel computes products of at
    most 2^23 elements (1024 rows of 8192 columns). In all other cases, with gradients, and under torch.compile, which
    breaks its graph there, the call is a product, an all-reduce of float32, and the epilogue in torch.

    All ranks call it together, in the same order, with operands of the same shapes, strides and types, and the same
    `bias`, `args` and `config`. Operands begin at multiples of 16 bytes on all ranks or on none. Gradients are recorded
    on all ranks or on none. The first call of a group, and one with a larger product than before, allocate memory and
    wait for all ranks: make such a call before a CUDA graph is captured. Products of one group must not run in two
    streams at the same time.

    The gradients of `a` and `b` are those of the rank's own columns, because all ranks receive the same result.

    Args:
        a: (..., M, K), of the rank.
        b: (..., K, N), of the rank; or a packed or sparse weight (N, K).
        group: the ranks; all of the default group if None.
        bias, epilogue, args, out_dtype, precision, batch_invariant, config: as for `gemmery.matmul`.

    Returns:
        The results of `gemmery.matmul` for the operands of all ranks, side by side along K.

    Raises:
        ValueError, TypeError: as for `gemmery.matmul`. The other ranks then wait until the timeout.
        RuntimeError: there is no process group; or a rank did not arrive at an earlier product, see `set_timeout`.

    Example:
        >>> import torch
        >>> from gemmery.distributed import matmul_all_reduce
        >>> matmul_all_reduce(torch.ones(2, 64), torch.ones(64, 8)).shape  # doctest: +SKIP
        torch.Size([2, 8])
    """
    how = resolved(precision, a)
    options = Options(out_dtype, how, False, batch_invariant, config)
    return outside_compiler(_all_reduced, "matmul", a, b, bias, Functions(epilogue, args), options, group)


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
    return outside_compiler(
        _all_reduced, "linear", x, weight, bias, Functions(epilogue, args), options, group
    )


def _all_reduced(
    op: str, a: Any, b: Any, bias: Any, functions: Functions, options: Options, group: dist.ProcessGroup | None
) -> Any:  # fmt: skip
    """A call in eager mode."""
    group = checked_group(f"{op}_all_reduce", op, a, b, group)
    if group.size() == 1:
        return product(op, a, b, bias, functions, None, options)
    if a.dim() == 1 and b.dim() == 2:
        made = _all_reduced(op, a.unsqueeze(0), b, bias, functions, options, group)
        return tuple([x.squeeze(0) for x in made]) if isinstance(made, tuple) else made.squeeze(0)
    shared = shared_memory(a, tensors_of(a, b, bias, functions), group)
    made = None
    if shared is not None and _places(op, a, b) and a.shape[-1]:
        made = _in_memory(op, a, b, bias, functions, options, shared, group)
    return _in_steps(op, a, b, bias, functions, options, group) if made is None else made


def _in_memory(
    op: str, a: Tensor, b: Any, bias: Any, functions: Functions, options: Options, shared: Shared,
    group: dist.ProcessGroup,
) -> Any:  # fmt: skip
    """The sum through the memory that the ranks share, or None if neither way supports the call."""
    rows = as_matrices(0, a.shape[:-1], bias, functions)
    if rows is None:
        return None
    places, x, made = _places(op, a, b), moved(as_autocast(a), 0), None
    # The rows of different ranks are rounded differently.
    if x.shape[0] >= BY_ROWS and places <= PARTIALS.most and not options.batch_invariant:
        made = _by_rows(op, x, b, *rows, options, shared, group)
    if made is None and places <= SUMS.most:
        made = _in_kernel(op, x, b, *rows, options, shared, places)
    return None if made is None else as_batch(made, a.shape[:-1], 0)


def _by_rows(
    op: str, x: Tensor, b: Any, bias: Any, functions: Functions, options: Options, shared: Shared,
    group: dist.ProcessGroup,
) -> Any:  # fmt: skip
    """The product whose sum is scattered over the ranks; the results are then gathered.

    With many rows, this sends half as much as if each rank adds up all rows. None if the ranks do not divide the rows,
    or if these do not have results of their own.
    """
    rows = x.shape[0]
    if rows % shared.ranks or not has_own_rows(op, x, b, bias, functions, options):
        return None
    count = rows // shared.ranks
    own = of_some_rows(bias, functions, shared.rank * count, count, rows)
    made = scattered_product(op, x, b, *own, options, group)
    name = f"{op}_all_reduce"
    results = made if isinstance(made, tuple) else (made,)
    whole = given_up(shared, lambda: collected(name, results, shared))
    return whole if isinstance(made, tuple) else whole[0]


def _in_kernel(
    op: str, a: Tensor, b: Any, bias: Any, functions: Functions, options: Options, shared: Shared, places: int
) -> Any:  # fmt: skip
    """The product and its sum in one kernel."""
    a, b = unpermuted(a, b)
    exchange = shared.exchange(f"{op}_all_reduce", places)
    return given_up(shared, lambda: product(op, SummedOver(a, exchange), b, bias, functions, None, options))


def _places(op: str, a: Tensor, b: Any) -> int:
    """Places that the product takes, see `operands.summed.places_of`; 0 if b has a batch."""
    return places_of(a.shape[:-1].numel(), columns_of(op, b)) if b.dim() == 2 else 0


def _in_steps(
    op: str, a: Any, b: Any, bias: Any, functions: Functions, options: Options, group: dist.ProcessGroup
) -> Any:
    """The product of each rank, their sum by the process group, and the epilogue in torch."""
    call = checked(op, a, b, bias, functions, None, options)
    partial = product(op, a, b, None, NONE, None, options._replace(out_dtype=call.wide))
    total = _Sum.apply(partial, group)  # type: ignore[no-untyped-call]
    return finished(op, a, b, bias, functions, options, total)


class _Sum(torch.autograd.Function):
    """The sum over ranks. Each rank's gradient is that of the result, since all ranks continue with it."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = partial.clone() if partial.requires_grad else partial
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
