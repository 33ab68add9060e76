"""Products of rows that are sharded over ranks: every rank gets the product of all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..formats.weight import PackedWeight
from ..precision import AskedPrecision, resolved
from ..problem import Config
from ..product.run import product
from ..product.spec import NONE, Functions, Options, OutTypes
from .calls import (
    as_autocast,
    as_batch,
    as_matrices,
    checked_group,
    dimension,
    given_up,
    is_differentiated,
    moved,
    of_gradients,
    outside_compiler,
    unpermuted,
)
from .collectives import Gathered
from .gathered import has_parts, product_of
from .reduce_scatter import scattered_product
from .rows import for_rows, gathering


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
    """`gemmery.matmul` of the rows of all ranks: each has a shard of `a`, and every rank gets the whole product.

    The rank's own rows, or most of them, are multiplied first, while the copy engines of the GPUs send the other
    shards. The rows of the other ranks are multiplied when they have arrived. This requires 2 to 8 GPUs of one host
    that can access each other's memory, and at most 1 GiB of rows in total. In all other cases, with an epilogue that
    holds a matrix or draws random numbers, and under torch.compile, which breaks its graph there, the call is an
    all-gather followed by a product.

    All ranks make the same calls in the same order, with shards of the same shape and type, and the same tensors
    require gradients on all ranks. The first call of a group, and a call with more rows than before, allocates memory
    and waits for all ranks; make such a call before capturing a CUDA graph. Products of one group must not run in two
    streams at the same time.

    `matmul_reduce_scatter` computes the gradient of `a`: each rank receives its shard of the sum over the ranks.

    Args:
        a: (..., M / ranks, ..., K), this rank's shard.
        b: (K, N), of the rank; or a packed or sparse weight (N, K).
        gather_dim: the dimension of `a` that is sharded; not its last one.
        group: the ranks; all of the default group if None.
        bias, epilogue, args, out_dtype, precision, batch_invariant: as for `gemmery.matmul` of the whole.
        config: as for `gemmery.matmul`, of each of the products into which this one is divided.

    Returns:
        The results of `gemmery.matmul` for the shards of all ranks, concatenated along `gather_dim`.

    Raises:
        ValueError, TypeError: as for `gemmery.matmul`. The other ranks then wait until the timeout.
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
    """`gemmery.linear` of the rows of all ranks: a Linear whose input and weight are sharded by rows.

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


def _gather(
    op: str, a: Any, b: Any, bias: Any, functions: Functions, options: Options, group: dist.ProcessGroup | None,
    dim: int,
) -> Any:  # fmt: skip
    """A call in eager mode."""
    name = f"all_gather_{op}"
    group = checked_group(name, op, a, b, group)
    dim = dimension(name, op, "gather_dim", a, b, dim)
    ranks = group.size()
    if ranks == 1:
        return product(op, a, b, bias, functions, None, options)
    a = as_autocast(a)
    lead = [*a.shape[:dim], ranks * a.shape[dim], *a.shape[dim + 1 : -1]]
    first = [lead[dim], *lead[:dim], *lead[dim + 1 :]]
    matrices = as_matrices(dim, torch.Size(lead), bias, functions)
    x = moved(a, dim)
    if matrices is None:
        whole = Gathered.apply(x, group).reshape(*first, a.shape[-1]).movedim(0, dim)  # type: ignore[no-untyped-call]
        return product(op, whole, b, bias, functions, None, options)
    if is_differentiated(x, b, *matrices, options):
        made = _GatheredProduct.apply(x, b, op, options, group)  # type: ignore[no-untyped-call]
    else:
        made = _gathered_product(op, x, b, *matrices, options, group)
    return as_batch(made, first, dim)


def _gathered_product(
    op: str, x: Tensor, b: Any, bias: Any, functions: Functions, options: Options, group: dist.ProcessGroup
) -> Any:  # fmt: skip
    """A product with a first operand that is one matrix."""
    shared = for_rows(x, b, bias, functions, group)
    if shared is None or not has_parts(shared, op, x, b, bias, functions, options):
        whole = Gathered.apply(x, group)  # type: ignore[no-untyped-call]
        return product(op, whole, b, bias, functions, None, options)
    x, b = unpermuted(x, b)

    def launched() -> Any:
        with gathering(f"all_gather_{op}", x, shared) as rows:
            return product_of(rows, op, b, bias, functions, options)

    return given_up(shared, launched)


class _GatheredProduct(torch.autograd.Function):
    """A bare product of gathered rows. Its backward pass gathers them again, while it computes their gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, b: Tensor, op: str, options: Options, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(x, b)
        ctx.op, ctx.group, ctx.options = op, group, of_gradients(options)
        made: Tensor = _gathered_product(op, x, b, None, NONE, options, group)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, b = ctx.saved_tensors
        grad, group, options = grad.to(x.dtype), ctx.group, ctx.options
        back = b if ctx.op == "linear" else b.mT
        if not ctx.needs_input_grad[1]:
            return scattered_product("matmul", grad, back, None, NONE, options, group), None, None, None, None

        def of_weight(whole: Tensor) -> Tensor:
            left, right = (grad.mT, whole) if ctx.op == "linear" else (whole.mT, grad)
            made: Tensor = product("matmul", left, right, None, NONE, None, options)
            return made.to(b.dtype)

        def of_rows() -> Tensor | None:
            if not ctx.needs_input_grad[0]:
                return None
            made: Tensor = scattered_product("matmul", grad, back, None, NONE, options, group)
            return made

        shared = for_rows(x, b, None, NONE, group)
        if shared is None:
            whole = Gathered.apply(x, group)  # type: ignore[no-untyped-call]
            return of_rows(), of_weight(whole), None, None, None
        with gathering(f"all_gather_{ctx.op}", x, shared) as rows:
            of_x = of_rows()
        return of_x, of_weight(rows.whole()), None, None, None
