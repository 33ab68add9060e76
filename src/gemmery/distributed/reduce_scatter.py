"""Products that are summed over ranks: each rank gets some rows of the sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..epilogues.function import Epilogue, memoised
from ..formats.weight import PackedWeight
from ..precision import AskedPrecision, resolved
from ..problem import Config
from ..product.run import checked, product
from ..product.shape import operand_names
from ..product.spec import NONE, Functions, Options, OutTypes
from .calls import (
    as_autocast,
    as_batch,
    as_matrices,
    checked_group,
    columns_of,
    dimension,
    finished,
    given_up,
    is_differentiated,
    moved,
    of_gradients,
    outside_compiler,
    shared_memory,
    tensors_of,
    unpermuted,
)
from .collectives import Gathered, Scattered
from .exchange import PARTIALS
from .gathered import product_of
from .rows import LEAST_PIECE, PartialSums, for_rows, gathering, words_of

#: Rows of pieces are multiples of this, as large tiles have.
ROW_GRAIN = 256
#: The depth K at which an H200 takes about as long to compute a 16-bit element (700 TFLOP/s) as a copy engine takes to
#: send it to another GPU (350 GB/s). It is a little less than that, because a short wait costs less than another
#: kernel. `benchmarks/results/looks/scatter_pieces-bf16.json` has the times of other pieces.
BALANCED_DEPTH = 1800
#: The attribute of an epilogue that keeps the result of `with_received`, so that nothing else holds its tensors.
_OWN = "__gemmery_with_received__"


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

    Each rank computes the rows of the other ranks first. Copy engines send them to their ranks, in the type of `a`,
    while the next rows are computed. The rank's own rows come last. Their kernel adds the partial sums of the other
    ranks in float32, and the epilogue receives the sum. This requires 2 to 8 GPUs of one host that can access each
    other's memory, and at most 1 GiB of partial sums. In all other cases, and under torch.compile, which breaks its
    graph there, the call is a product, a reduce-scatter of float32, and the epilogue in torch.

    The rules for calls are those of `all_gather_matmul`. The gradients of `a` and `b` are those of the rank's own
    columns. Random numbers of an epilogue depend on the position in the rank's own rows, so give each rank a different
    seed.

    Args:
        a: (..., M, ..., K), of the rank.
        b: (K, N), of the rank; or a packed or sparse weight (N, K).
        scatter_dim: the dimension of the result that is sharded over the ranks; not its last one.
        group: the ranks; all of the default group if None.
        bias, epilogue, args: as for `gemmery.matmul`, of this rank's rows of the result.
        out_dtype, precision, config: as for `gemmery.matmul`.
        batch_invariant: as for `gemmery.matmul`, of each rank's product. The sum of a row also depends on which rank
            has it.

    Returns:
        This rank's rows of the results of `gemmery.matmul` for the operands of all ranks, side by side along K.

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


def _scatter(
    op: str, a: Any, b: Any, bias: Any, functions: Functions, options: Options, group: dist.ProcessGroup | None,
    dim: int,
) -> Any:  # fmt: skip
    """A call in eager mode."""
    name = f"{op}_reduce_scatter"
    group = checked_group(name, op, a, b, group)
    dim = dimension(name, op, "scatter_dim", a, b, dim)
    ranks = group.size()
    if ranks == 1:
        return product(op, a, b, bias, functions, None, options)
    first_name = operand_names(op)[0]
    if a.shape[dim] % ranks:
        raise ValueError(
            f"{name}: {first_name} is {tuple(a.shape)}; its dimension {dim} must be a multiple of the {ranks} ranks"
        )
    a = as_autocast(a)
    lead = [*a.shape[:dim], a.shape[dim] // ranks, *a.shape[dim + 1 : -1]]
    first = [lead[dim], *lead[:dim], *lead[dim + 1 :]]
    matrices = as_matrices(dim, torch.Size(lead), bias, functions)
    x = moved(a, dim)
    if matrices is None:
        rows = a.narrow(dim, 0, lead[dim])
        call = checked(op, rows, b, bias, functions, None, options)
        partial = product(op, x, b, None, NONE, None, options._replace(out_dtype=call.wide))
        total = Scattered.apply(partial, group).reshape(*first, partial.shape[-1]).movedim(0, dim)  # type: ignore[no-untyped-call]
        return finished(op, rows, b, bias, functions, options, total)
    if is_differentiated(x, b, *matrices, options):
        made = _ScatteredProduct.apply(x, b, op, options, group)  # type: ignore[no-untyped-call]
    else:
        made = scattered_product(op, x, b, *matrices, options, group)
    return as_batch(made, first, dim)


def scattered_product(
    op: str, x: Tensor, b: Any, bias: Any, functions: Functions, options: Options, group: dist.ProcessGroup
) -> Any:  # fmt: skip
    """A product with a first operand that is one matrix."""
    ranks = group.size()
    rows, columns = x.shape[0] // ranks, columns_of(op, b)
    dtype = x.dtype if x.dtype.is_floating_point else torch.int32
    shared = None
    if rows and columns and x.shape[-1] and words_of(ranks * rows, columns, dtype) <= PARTIALS.most:
        shared = shared_memory(x, tensors_of(x, b, bias, functions), group)
    if shared is None:
        call = checked(op, x[:rows], b, bias, functions, None, options)
        partial = product(op, x, b, None, NONE, None, options._replace(out_dtype=call.wide))
        total = Scattered.apply(partial, group)  # type: ignore[no-untyped-call]
        return finished(op, x[:rows], b, bias, functions, options, total)
    x, b = unpermuted(x, b)
    of_partial = options._replace(out_dtype=dtype)

    def launched() -> Any:
        sums = PartialSums(f"{op}_reduce_scatter", shared, rows, columns, dtype)
        try:
            for step in range(1, ranks):
                owner = (shared.rank + step) % ranks
                for first, count in pieces(rows, columns, x.shape[-1]):
                    part = x.narrow(0, owner * rows + first, count)
                    part = product(op, part, b, None, NONE, None, of_partial)
                    sums.send(owner, first, part, first + count == rows)
            own = sums.behind(x.narrow(0, shared.rank * rows, rows))
            return product(op, own, b, bias, with_received(functions, sums.received), None, options)
        finally:
            sums.end()

    return given_up(shared, launched)


@functools.lru_cache(1024)
def pieces(rows: int, columns: int, depth: int) -> tuple[tuple[int, int], ...]:
    """The first row and the number of rows of each product of a rank's rows; each is sent when it is computed.

    Each has half of the remaining rows, so that it has been sent when the next ones are computed, as long as both
    halves fill a GPU. The last piece is sent while the first tiles of the next product are computed. Rows that can be
    sent in that time are not cut, because each further kernel takes some time to begin and to end.

    Args:
        depth: K.
    """
    most = LEAST_PIECE * depth // BALANCED_DEPTH
    found, first = [], 0
    while (rows - first) * columns > most:
        half = (rows - first) // 2 // ROW_GRAIN * ROW_GRAIN
        if half * columns < LEAST_PIECE:
            break
        found.append((first, half))
        first += half
    return *found, (first, rows - first)


def with_received(functions: Functions, received: Sequence[Tensor]) -> Functions:
    """An epilogue of the sum, given that of this rank and those that others have sent."""
    function = None if functions.epilogue is None else memoised(functions.epilogue)
    count = len(received)
    if function is None:
        made = _sum_of(count)
    elif isinstance(function, Epilogue):
        own = function.__dict__.setdefault(_OWN, {})
        made = own.get(count) or own.setdefault(count, _with_received(function, count))
    else:
        made = _with_received(function, count)
    return functions._replace(epilogue=made, args=(*received, *functions.args))


@functools.cache
def _sum_of(count: int) -> Epilogue[..., Any]:
    return _with_received(None, count)


def _with_received(function: Any, count: int) -> Epilogue[..., Any]:
    def of_sum(acc: Tensor, *given: Any) -> Any:
        for part in given[:count]:
            acc = acc + part
        return acc if function is None else function(acc, *given[count:])

    return Epilogue(of_sum)


class _ScatteredProduct(torch.autograd.Function):
    """A bare product whose rows are scattered. Its backward pass gathers their gradient, which both products read."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, b: Tensor, op: str, options: Options, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(x, b)
        ctx.op, ctx.group, ctx.options = op, group, of_gradients(options)
        made: Tensor = scattered_product(op, x, b, None, NONE, options, group)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, b = ctx.saved_tensors
        grad, options = grad.to(x.dtype), ctx.options
        back = b if ctx.op == "linear" else b.mT

        def of_weight(whole: Tensor) -> Tensor | None:
            if not ctx.needs_input_grad[1]:
                return None
            left, right = (whole.mT, x) if ctx.op == "linear" else (x.mT, whole)
            made: Tensor = product("matmul", left, right, None, NONE, None, options)
            return made.to(b.dtype)

        needs_x = ctx.needs_input_grad[0]
        shared = for_rows(grad, b, None, NONE, ctx.group)
        if shared is None:
            whole = Gathered.apply(grad, ctx.group)  # type: ignore[no-untyped-call]
            of_x = product("matmul", whole, back, None, NONE, None, options) if needs_x else None
            return of_x, of_weight(whole), None, None, None
        with gathering(f"{ctx.op}_reduce_scatter", grad, shared) as rows:
            of_x = product_of(rows, "matmul", back, None, NONE, options) if needs_x else None
        return of_x, of_weight(rows.whole()) if ctx.needs_input_grad[1] else None, None, None, None
