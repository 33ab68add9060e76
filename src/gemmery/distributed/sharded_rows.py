"""Products whose rows are sharded over ranks: in front of the product, which gathers them, or behind it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..epilogues.function import Epilogue, memoised
from ..formats.weight import PackedWeight
from ..operands import ArrivingRows
from ..operands.dense import AUTOCAST
from ..precision import AskedPrecision, resolved
from ..problem import Config
from ..product.run import checked, product
from ..product.seen import PLAIN, autocast_dtype, wants_gradient
from ..product.shape import operand_names
from ..product.spec import NONE, Functions, Options, OutTypes
from ..select.shortlist import SHARD
from .calls import (
    as_batch,
    as_matrices,
    checked_group,
    columns_of,
    finished,
    given_up,
    moved,
    outside_compiler,
    shared_memory,
    tensors_of,
    unpermuted,
)
from .exchange import PARTIALS, ROWS, Shared
from .rows import PartialSums, arriving, words_of

#: Elements of the least product that fills a GPU: twice as many tiles of 128 by 256 as an H200 has multiprocessors,
#: about. Rows of pieces are multiples of `ROW_GRAIN`, as large tiles have.
LEAST_PIECE, ROW_GRAIN = 240 * 128 * 256, 256
#: Types of first operands that kernels take.
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8)


def all_gather_matmul(
    a: Tensor,
    b: Tensor | PackedWeight,
    *,
    gather_dim: int = 0,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    epilogue: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    out_dtype: OutTypes = None,
    precision: AskedPrecision = "ieee",
    batch_invariant: bool = False,
    config: Config | dict[str, Any] | str | None = None,
) -> Any:
    """`gemmery.matmul` of the rows of all ranks: each has a shard of `a`, and all have the product of the whole.

    The product begins with the rank's own rows, while the copy engines of the GPUs exchange the others. Its tiles wait
    for theirs. That takes GPUs of one host that reach each other's memory, up to 8, a multiple of 64 rows on each, and
    at most 1 GiB of rows in all. Elsewhere, and under torch.compile, which it interrupts, it is an all-gather and a
    product.

    All ranks call it together, in the same order, with shards of the same shape and type. The first call of a group,
    and one with more rows than before, allocate memory and wait for all ranks: make such a call before a CUDA graph is
    captured. Products of one group must not run in two streams at the same time.

    The gradient of `a` is summed over the ranks, each of which then has that of its shard, by `matmul_reduce_scatter`.

    Args:
        a: (..., M / ranks, ..., K), this rank's shard.
        b: (K, N), of the rank; or a packed or sparse weight (N, K).
        gather_dim: the dimension of `a` that is sharded; not its last one.
        group: the ranks; all of the default group if None.
        bias, epilogue, args, out_dtype, precision, batch_invariant, config: as for `gemmery.matmul` of the whole.

    Returns:
        What `gemmery.matmul` returns for the shards of all ranks, one behind the other along `gather_dim`.

    Raises:
        ValueError, TypeError: as for `gemmery.matmul`. The other ranks then wait in vain.
        RuntimeError: there is no process group; or a rank did not arrive at an earlier product, see `set_timeout`.

    Example:
        >>> import torch
        >>> from gemmery.distributed import all_gather_matmul
        >>> all_gather_matmul(torch.ones(64, 32), torch.ones(32, 8)).shape  # of two ranks  # doctest: +SKIP
        torch.Size([128, 8])
    """
    options = Options(out_dtype, resolved(precision, a), False, batch_invariant, config)
    return outside_compiler(
        _gather, "matmul", a, b, bias, Functions(epilogue, args), options, group, gather_dim
    )


def all_gather_linear(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    *,
    gather_dim: int = 0,
    group: dist.ProcessGroup | None = None,
    epilogue: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    out_dtype: OutTypes = None,
    precision: AskedPrecision = "ieee",
    batch_invariant: bool = False,
    config: Config | dict[str, Any] | str | None = None,
) -> Any:
    """`gemmery.linear` of the rows of all ranks: a Linear whose input is sharded by rows, and its weight by rows, too.

    Args:
        x: (..., M / ranks, ..., K), this rank's shard.
        weight: (N, K), of the rank; or packed or sparse, (N, K).
        bias: (N,), of the rank.

    The other arguments, the result and the errors are those of `all_gather_matmul`.

    Example:
        >>> import torch
        >>> from gemmery.distributed import all_gather_linear
        >>> all_gather_linear(torch.ones(64, 32), torch.ones(8, 32)).shape  # of two ranks  # doctest: +SKIP
        torch.Size([128, 8])
    """
    options = Options(out_dtype, resolved(precision, x), False, batch_invariant, config)
    functions = Functions(epilogue, args)
    return outside_compiler(_gather, "linear", x, weight, bias, functions, options, group, gather_dim)


def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor | PackedWeight,
    *,
    scatter_dim: int = 0,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    epilogue: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    out_dtype: OutTypes = None,
    precision: AskedPrecision = "ieee",
    batch_invariant: bool = False,
    config: Config | dict[str, Any] | str | None = None,
) -> Any:
    """This rank's rows of the sum over all ranks of `a @ b`: `gemmery.matmul` with columns of `a` sharded.

    A rank computes the other ranks' rows first, and copy engines send it to them while it goes on, in the type of `a`. The
    product of its own rows comes last, whose kernel adds what it was sent to its own sum, in float32. The epilogue sees
    that sum. That takes GPUs of one host that reach each other's memory, up to 8, and at most 1 GiB of partial sums.
    Elsewhere, and under torch.compile, which it interrupts, it is a product, a reduce-scatter of float32, and the
    epilogue.

    For how ranks call it, see `all_gather_matmul`. The gradients of `a` and `b` are those of the rank's own columns.

    Args:
        a: (..., M, ..., K), of the rank.
        b: (K, N), of the rank; or a packed or sparse weight (N, K).
        scatter_dim: the dimension of the result that is sharded over the ranks; not its last one.
        group: the ranks; all of the default group if None.
        bias, epilogue, args: as for `gemmery.matmul`, of this rank's rows of the result.
        out_dtype, precision, batch_invariant, config: as for `gemmery.matmul`.

    Returns:
        This rank's rows of what `gemmery.matmul` returns for the operands of all ranks, side by side along K.

    Raises:
        ValueError, TypeError: as for `gemmery.matmul`; or the ranks do not divide the rows.
        RuntimeError: there is no process group; or a rank did not arrive at an earlier product, see `set_timeout`.

    Example:
        >>> import torch
        >>> from gemmery.distributed import matmul_reduce_scatter
        >>> matmul_reduce_scatter(torch.ones(128, 32), torch.ones(32, 8)).shape  # of two ranks  # doctest: +SKIP
        torch.Size([64, 8])
    """
    options = Options(out_dtype, resolved(precision, a), False, batch_invariant, config)
    return outside_compiler(
        _scatter, "matmul", a, b, bias, Functions(epilogue, args), options, group, scatter_dim
    )


def linear_reduce_scatter(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    *,
    scatter_dim: int = 0,
    group: dist.ProcessGroup | None = None,
    epilogue: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    out_dtype: OutTypes = None,
    precision: AskedPrecision = "ieee",
    batch_invariant: bool = False,
    config: Config | dict[str, Any] | str | None = None,
) -> Any:
    """This rank's rows of the sum over all ranks of `x @ weight.T`, plus the bias.

    Args:
        x: (..., M, ..., K), of the rank.
        weight: (N, K), of the rank; or packed or sparse, (N, K).
        bias: (N,), the same on all ranks, which is added once.

    The other arguments, the result and the errors are those of `matmul_reduce_scatter`.

    Example:
        >>> import torch
        >>> from gemmery.distributed import linear_reduce_scatter
        >>> linear_reduce_scatter(torch.ones(128, 32), torch.ones(8, 32)).shape  # of two ranks  # doctest: +SKIP
        torch.Size([64, 8])
    """
    options = Options(out_dtype, resolved(precision, x), False, batch_invariant, config)
    functions = Functions(epilogue, args)
    return outside_compiler(_scatter, "linear", x, weight, bias, functions, options, group, scatter_dim)


# ---------------------------------------------------------------------------------------------------------------------
# Rows that are gathered


def _gather(
    op: str, a: Any, b: Any, bias: Any, functions: Functions, options: Options, group: dist.ProcessGroup | None,
    dim: int,
) -> Any:  # fmt: skip
    """A call outside the compiler."""
    name = f"all_gather_{op}"
    group = checked_group(name, op, a, b, group)
    dim = _dimension(name, op, "gather_dim", a, b, dim)
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return product(op, a, b, bias, functions, None, options)
    a = _as_autocast(a)
    lead = [*a.shape[:dim], ranks * a.shape[dim], *a.shape[dim + 1 : -1]]
    first = [lead[dim], *lead[:dim], *lead[dim + 1 :]]
    matrices = as_matrices(dim, torch.Size(lead), bias, functions)
    x = moved(a, dim)
    if matrices is None:
        whole = _Gathered.apply(x, group).reshape(*first, a.shape[-1]).movedim(0, dim)  # type: ignore[no-untyped-call]
        return product(op, whole, b, bias, functions, None, options)
    if _is_differentiated(x, b, *matrices, options):
        made = _GatheredProduct.apply(x, b, op, options, group)  # type: ignore[no-untyped-call]
    else:
        made = _gathered_product(op, x, b, *matrices, options, group)
    return as_batch(made, first, dim)


def _gathered_product(
    op: str, x: Tensor, b: Any, bias: Any, functions: Functions, options: Options, group: dist.ProcessGroup
) -> Any:  # fmt: skip
    """A product with a first operand that is one matrix."""
    shared = _for_rows(x, b, bias, functions, group)
    if shared is None:
        whole = _Gathered.apply(x, group)  # type: ignore[no-untyped-call]
        return product(op, whole, b, bias, functions, None, options)
    x, b = unpermuted(x, b)

    def launched() -> Any:
        with arriving(f"all_gather_{op}", x, shared) as rows:
            return product(op, rows, b, bias, functions, None, options)

    return given_up(shared, launched)


def _for_rows(
    x: Tensor, b: Any, bias: Any, functions: Functions, group: dist.ProcessGroup
) -> Shared | None:
    """The memory through which rows are gathered while they are multiplied; None where they are gathered before."""
    ranks, (rows, columns) = dist.get_world_size(group), x.shape
    if not columns or not rows or rows % SHARD or words_of(ranks * rows, columns, x.dtype) > ROWS.most:
        return None
    return shared_memory(x, tensors_of(x, b, bias, functions), group, _TYPES)


class _Gathered(torch.autograd.Function):
    """The shards of all ranks, one behind the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scattered_sum(grad, ctx.group), None


class _GatheredProduct(torch.autograd.Function):
    """A bare product of gathered rows. Its backward gathers them again, while it computes their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, b: Tensor, op: str, options: Options, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, b)
        ctx.op, ctx.group, ctx.options = op, group, _of_gradients(options)
        made: Tensor = _gathered_product(op, x, b, None, NONE, options, group)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, b = ctx.saved_tensors
        grad, group, options = grad.to(x.dtype), ctx.group, ctx.options
        back = b if ctx.op == "linear" else b.mT
        of_x, of_b = None, None
        if not ctx.needs_input_grad[1]:
            return scattered_product("matmul", grad, back, None, NONE, options, group), None, None, None, None

        def of_weight(whole: Tensor) -> Tensor:
            pair = (grad.mT, whole) if ctx.op == "linear" else (whole.mT, grad)
            made: Tensor = product("matmul", *pair, None, NONE, None, options)
            return made.to(b.dtype)

        def of_rows() -> Tensor | None:
            if not ctx.needs_input_grad[0]:
                return None
            made: Tensor = scattered_product("matmul", grad, back, None, NONE, options, group)
            return made

        shared = _for_rows(x, b, None, NONE, group)
        if shared is None:
            whole = _Gathered.apply(x, group)  # type: ignore[no-untyped-call]
            return of_rows(), of_weight(whole), None, None, None
        with arriving(f"all_gather_{ctx.op}", x, shared) as rows:
            of_x = of_rows()
        of_b = of_weight(rows.matrix)
        return of_x, of_b, None, None, None


# ---------------------------------------------------------------------------------------------------------------------
# Rows that are scattered


def _scatter(
    op: str, a: Any, b: Any, bias: Any, functions: Functions, options: Options, group: dist.ProcessGroup | None,
    dim: int,
) -> Any:  # fmt: skip
    """A call outside the compiler."""
    name = f"{op}_reduce_scatter"
    group = checked_group(name, op, a, b, group)
    dim = _dimension(name, op, "scatter_dim", a, b, dim)
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return product(op, a, b, bias, functions, None, options)
    first_name = operand_names(op)[0]
    if a.shape[dim] % ranks:
        raise ValueError(
            f"{name}: {first_name} is {tuple(a.shape)}; its dimension {dim} must be a multiple of the {ranks} ranks"
        )
    a = _as_autocast(a)
    lead = [*a.shape[:dim], a.shape[dim] // ranks, *a.shape[dim + 1 : -1]]
    first = [lead[dim], *lead[:dim], *lead[dim + 1 :]]
    matrices = as_matrices(dim, torch.Size(lead), bias, functions)
    x = moved(a, dim)
    if matrices is None:
        rows = a.narrow(dim, 0, lead[dim])
        call = checked(op, rows, b, bias, functions, None, options)
        partial = product(op, x, b, None, NONE, None, options._replace(out_dtype=call.wide))
        total = _Scattered.apply(partial, group).reshape(*first, partial.shape[-1]).movedim(0, dim)  # type: ignore[no-untyped-call]
        return finished(op, rows, b, bias, functions, options, total)
    if _is_differentiated(x, b, *matrices, options):
        made = _ScatteredProduct.apply(x, b, op, options, group)  # type: ignore[no-untyped-call]
    else:
        made = scattered_product(op, x, b, *matrices, options, group)
    return as_batch(made, first, dim)


def scattered_product(
    op: str, x: Tensor, b: Any, bias: Any, functions: Functions, options: Options, group: dist.ProcessGroup
) -> Any:  # fmt: skip
    """A product with a first operand that is one matrix."""
    ranks = dist.get_world_size(group)
    rows, columns = x.shape[0] // ranks, columns_of(op, b)
    dtype = x.dtype if x.dtype.is_floating_point else torch.int32
    shared = None
    if rows and columns and x.shape[-1] and words_of(ranks * rows, columns, dtype) <= PARTIALS.most:
        shared = shared_memory(x, tensors_of(x, b, bias, functions), group, _TYPES)
    if shared is None:
        call = checked(op, x[:rows], b, bias, functions, None, options)
        partial = product(op, x, b, None, NONE, None, options._replace(out_dtype=call.wide))
        total = _Scattered.apply(partial, group)  # type: ignore[no-untyped-call]
        return finished(op, x[:rows], b, bias, functions, options, total)
    x, b = unpermuted(x, b)

    def launched() -> Any:
        sums = PartialSums(f"{op}_reduce_scatter", shared, rows, columns, dtype)
        try:
            for step in range(1, ranks):
                owner = (shared.rank + step) % ranks
                for first, count in pieces(rows, columns):
                    part = x.narrow(0, owner * rows + first, count)
                    part = product(op, part, b, None, NONE, None, options._replace(out_dtype=dtype))
                    sums.send(owner, first, part, first + count == rows)
            own = sums.behind(x.narrow(0, shared.rank * rows, rows))
            return product(op, own, b, bias, with_received(functions, sums.received), None, options)
        finally:
            sums.end()

    return given_up(shared, launched)


def pieces(rows: int, columns: int) -> list[tuple[int, int]]:
    """The first and the number of rows of the products that a rank's rows are sent after, one behind the other.

    Each has half of what is left, so that it has been sent when the next ones are computed. That goes on as long as
    both halves fill a GPU.
    """
    found, first = [], 0
    while (half := (rows - first) // 2 // ROW_GRAIN * ROW_GRAIN) * columns >= LEAST_PIECE:
        found.append((first, half))
        first += half
    return [*found, (first, rows - first)]


def with_received(functions: Functions, received: Sequence[Tensor]) -> Functions:
    """An epilogue of the sum, given that of this rank and those that others have sent."""
    function = None if functions.epilogue is None else memoised(functions.epilogue)
    return functions._replace(epilogue=_with_received(function, len(received)), args=(*received, *functions.args))


@functools.lru_cache(256)
def _with_received(function: Any, count: int) -> Epilogue:
    def of_sum(acc: Tensor, *given: Any) -> Any:
        for part in given[:count]:
            acc = acc + part
        return acc if function is None else function(acc, *given[count:])

    return Epilogue(of_sum)


def _scattered_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of the sum over the ranks."""
    total = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_tensor(total, x.contiguous(), group=group)
    return total


class _Scattered(torch.autograd.Function):
    """This rank's rows of the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered_sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Gathered.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]


class _ScatteredProduct(torch.autograd.Function):
    """A bare product whose rows are scattered. Its backward gathers their gradient, which both products read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, b: Tensor, op: str, options: Options, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, b)
        ctx.op, ctx.group, ctx.options = op, group, _of_gradients(options)
        made: Tensor = scattered_product(op, x, b, None, NONE, options, group)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, b = ctx.saved_tensors
        grad, options = grad.to(x.dtype), ctx.options
        back = b if ctx.op == "linear" else b.mT

        def of_rows(rows: Any) -> Tensor | None:
            if not ctx.needs_input_grad[0]:
                return None
            made: Tensor = product("matmul", rows, back, None, NONE, None, options)
            return made

        def of_weight(whole: Tensor) -> Tensor | None:
            if not ctx.needs_input_grad[1]:
                return None
            pair = (whole.mT, x) if ctx.op == "linear" else (x.mT, whole)
            made: Tensor = product("matmul", *pair, None, NONE, None, options)
            return made.to(b.dtype)

        shared = _for_rows(grad, b, None, NONE, ctx.group)
        if shared is None:
            whole = _Gathered.apply(grad, ctx.group)  # type: ignore[no-untyped-call]
            return of_rows(whole), of_weight(whole), None, None, None
        with arriving(f"{ctx.op}_reduce_scatter", grad, shared) as rows:
            of_x = of_rows(rows)
        return of_x, of_weight(rows.matrix), None, None, None


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


def _dimension(name: str, op: str, argument: str, a: Tensor, b: Any, dim: int) -> int:
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


def _as_autocast(a: Tensor) -> Tensor:
    """A first operand in the type that autocast asks for."""
    dtype = autocast_dtype(a.device)
    return a if dtype is None or a.dtype not in AUTOCAST else a.to(dtype)


def _is_differentiated(x: Tensor, b: Any, bias: Any, functions: Functions, options: Options) -> bool:
    """Whether a product has gradients, and is one of those for whose gradients kernels gather and scatter rows, too."""
    bare = bias is None and functions.epilogue is None and options.out_dtype in (None, x.dtype)
    plain = type(x) in PLAIN and type(b) in PLAIN and x.dtype == b.dtype and x.dtype in AUTOCAST
    return bare and plain and options.config is None and wants_gradient((x, b))


def _of_gradients(options: Options) -> Options:
    """The options of the products that are gradients."""
    return options._replace(out_dtype=None)
