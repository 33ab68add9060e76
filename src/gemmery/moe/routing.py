"""Routing: which row of a grouped product each choice of a token is, and the sum of a token's rows.

Nothing here waits for the GPU, and only the results depend on the ids, so a CUDA graph may be replayed with others.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import devices
from ..devices import on_device, overlap_on
from ..dtypes import accumulator
from ..kernels import routing as kernels
from ..product.check import check_tensor
from ..product.operator import LIBRARY
from ..product.seen import check_forward_mode, needs_dispatcher
from ..schedules.binding import TL

_IDS = (torch.int32, torch.int64)
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Most assignments, and columns of y: indices of a block that is not full fit in int32, too.
_MOST = (1 << 31) - 1024
_MOST_GROUPS = 1 << 24
#: Ids that are compared with all others, in one launch, as long as there are no more comparisons than this.
_FEW = 1 << 25
#: Rows and ids that a program of that launch compares at a time, 16 pairs in each thread of eight warps.
_ROWS, _COLS = 8, 512
#: Ids of a block, each of which is compared with all others; more of them make a smaller table.
_BLOCK, _LARGE_BLOCK = 128, 256
#: The least number of groups with large blocks.
_MANY_GROUPS = 512
#: Ids with which those of a block are compared at a time.
_OTHERS = 32
#: Groups that a program counts, and blocks whose counts a program sums up at a time.
_BINS, _CHUNK = 1024, 1024
#: Bytes of a row in a program that combines rows: 16 in a thread of its four warps.
_WIDTH = 2048
#: Most choices of a token whose rows are loaded at once.
_CHOICES = 16


class Routing(NamedTuple):
    """The rows of the assignments. An assignment is one choice of a token; its number is `token * k + choice`.

    Attributes:
        offs: (num_groups,), the ends of the groups among the rows. The tail follows the last end.
        counts: (num_groups,), the number of rows of each group.
        order: (T * k,), the assignment of each row.
        inverse: (T * k,), the row of each assignment.
        token: (T * k,), the token of each row.
        shape: the shape of the ids, (..., k).
    """

    offs: Tensor
    counts: Tensor
    order: Tensor
    inverse: Tensor
    token: Tensor
    shape: tuple[int, ...]


def route(top_k_index: Tensor, num_groups: int) -> Routing:
    """Sort the choices of tokens by group, for a grouped product with a gather.

    The order is stable: the rows of a group are in the order of the assignments. Ids outside `0..num_groups - 1`, which
    Hugging Face uses under expert parallelism, go to the tail after the last group, in their order.

    On a GPU, few assignments take one kernel, which ranks them by comparison. Many take three kernels, a counting sort
    of blocks (Knuth, The Art of Computer Programming, volume 3, section 5.2; Satish, Harris and Garland, IPDPS 2009).
    The host does not wait for them, and repeated runs give the same order.

    Args:
        top_k_index: (..., k), int32 or int64, any strides: the chosen groups of each token.
        num_groups: the number of groups, from 1 to 2^24.

    Returns:
        A `Routing` of int32 tensors on the ids' device.

    Raises:
        TypeError: top_k_index is not a tensor of int32 or int64, or num_groups is not an int.
        ValueError: top_k_index has no dimensions or more than 2^31 - 1024 elements, or num_groups is out of range.

    Example:
        >>> import torch
        >>> from gemmery.moe import route
        >>> routing = route(torch.tensor([[2, 0], [0, 3], [2, 2]]), 3)
        >>> routing.offs, routing.counts
        (tensor([2, 2, 5], dtype=torch.int32), tensor([2, 0, 3], dtype=torch.int32))
        >>> routing.order
        tensor([1, 2, 0, 4, 5, 3], dtype=torch.int32)
        >>> routing.token
        tensor([0, 1, 0, 2, 2, 1], dtype=torch.int32)
    """
    _check_ids(top_k_index, num_groups)
    shape = tuple(top_k_index.shape)
    ids = _matrix(top_k_index)
    run = torch.ops.gemmery.moe_route if needs_dispatcher((ids,)) else _route
    offs, counts, order, inverse, token = run(ids, num_groups)
    return Routing(offs, counts, order, inverse, token, shape)


def combine(y: Tensor, routing: Routing, top_k_weights: Tensor | None = None) -> Tensor:
    """The weighted sum of each token's rows: `out[t] = sum_j top_k_weights[t, j] * y[inverse[t * k + j]]`.

    Sums are accumulated in float32 (float64 for float64), in the order of j, and rounded once. Rows of the tail count
    as 0: they are not read, so a NaN in them or in their weights does not affect a sum.

    On a GPU, this is one kernel, and so is each gradient: of y, zero in the tail, and of top_k_weights, summed over the
    columns. There are no atomics, so repeated runs give the same bits.

    Args:
        y: (T * k, H) in float16, bfloat16, float32 or float64, any strides: the rows in the order of `routing`.
        routing: the result of `route`.
        top_k_weights: (..., k), the shape of the ids, in one of these types; ones by default.

    Returns:
        (..., H), contiguous, in y's type. Zeros if k is 0.

    Raises:
        TypeError: an argument is not a tensor of such a type, or routing is not a `Routing`.
        ValueError: shapes or devices do not fit.
        NotImplementedError: a second derivative or a forward-mode derivative is required.

    Example:
        >>> import torch
        >>> from gemmery.moe import combine, route
        >>> routing = route(torch.tensor([[1, 0], [0, 1]]), 2)
        >>> y = torch.tensor([[1.0], [2.0], [10.0], [20.0]])  # two rows of group 0, then two of group 1
        >>> combine(y, routing, torch.tensor([[0.5, 1.0], [1.0, 0.5]]))
        tensor([[ 6.],
                [12.]])
    """
    _check_rows(y, routing, top_k_weights)
    check_forward_mode("combine", (y, top_k_weights))
    *lead, k = routing.shape
    weights = None if top_k_weights is None else _matrix(top_k_weights)
    seen = needs_dispatcher((y, weights, routing.inverse))
    run = torch.ops.gemmery.moe_combine if seen else _combine
    out: Tensor = run(y, weights, routing.inverse, routing.offs, math.prod(lead), k)
    return out if len(lead) == 1 else out.reshape(*lead, y.shape[1])


def _matrix(x: Tensor) -> Tensor:
    """(..., k) as (T, k)."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


def check_id_type(op: str, top_k_index: Tensor, more: str = "") -> None:
    """TypeError, whose message ends with `more`, unless ids are integers of 32 or 64 bits."""
    if top_k_index.dtype not in _IDS:
        raise TypeError(
            f"{op}: top_k_index is {top_k_index.dtype}; it must be torch.int32 or torch.int64{more}"
        )


def _check_ids(top_k_index: Tensor, num_groups: int) -> None:
    check_tensor("route", "top_k_index", top_k_index)
    check_id_type("route", top_k_index)
    if top_k_index.dim() == 0:
        raise ValueError("route: top_k_index is (); it must be (..., k)")
    if top_k_index.numel() > _MOST:
        raise ValueError(
            f"route: top_k_index is {tuple(top_k_index.shape)}; it must have at most 2^31 - 1024 elements"
        )
    if isinstance(num_groups, bool) or not isinstance(num_groups, int | torch.SymInt):
        raise TypeError(f"route: num_groups is a {type(num_groups).__name__}; it must be an int")
    if not 1 <= num_groups <= _MOST_GROUPS:
        raise ValueError(f"route: num_groups is {num_groups}; it must be from 1 to 2^24")


def _check_rows(y: Tensor, routing: Routing, weights: Tensor | None) -> None:
    check_tensor("combine", "y", y)
    if not isinstance(routing, Routing):
        raise TypeError(
            f"combine: routing is a {type(routing).__name__}; it must be the result of gemmery.moe.route"
        )
    rows = routing.inverse.shape[0]
    if y.dim() != 2 or y.shape[0] != rows:
        raise ValueError(f"combine: y is {tuple(y.shape)}; it must be ({rows}, H), a row for each assignment")
    if y.shape[1] > _MOST:
        raise ValueError(f"combine: y is {tuple(y.shape)}; it must have at most 2^31 - 1024 columns")
    given = [("y", y)]
    if weights is not None:
        check_tensor("combine", "top_k_weights", weights)
        if tuple(weights.shape) != tuple(routing.shape):
            raise ValueError(
                f"combine: top_k_weights is {tuple(weights.shape)} and the ids were {tuple(routing.shape)}; they must "
                "have the same shape"
            )
        given.append(("top_k_weights", weights))
    for name, x in given:
        if x.dtype not in _TYPES:
            raise TypeError(f"combine: {name} is {x.dtype}; it must be one of {', '.join(map(str, _TYPES))}")
        if x.device != routing.inverse.device:
            raise ValueError(
                f"combine: {name} is on {x.device} and routing on {routing.inverse.device}; they must be on the same "
                "device"
            )


# ---------------------------------------------------------------------------------------------------------------------
# The meaning


def reference_route(ids: Tensor, num_groups: int) -> tuple[Tensor, ...]:
    """The meaning of `route` for ids (T, k): the tensors of a `Routing`."""
    flat = ids.flatten()
    groups = torch.where((flat >= 0) & (flat < num_groups), flat, num_groups)
    ordered, order = groups.sort(stable=True)
    offs = torch.searchsorted(
        ordered, torch.arange(num_groups, device=ids.device, dtype=ids.dtype), right=True
    )
    counts = offs.diff(prepend=offs.new_zeros(1))
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=ids.device))
    return tuple(x.to(torch.int32) for x in (offs, counts, order, inverse, order // max(ids.shape[1], 1)))


def reference_combine(
    y: Tensor, weights: Tensor | None, inverse: Tensor, offs: Tensor, tokens: int, k: int
) -> Tensor:
    """The meaning of `combine` for weights (T, k)."""
    wide = accumulator(y.dtype)
    total = y.new_zeros((tokens, y.shape[1]), dtype=wide)
    for rows, here, weight in _choices(weights, inverse, offs, tokens, k, wide):
        total += weight * torch.where(here, y[rows].to(wide), 0)
    return total.to(y.dtype)


def reference_spread(grad: Tensor, weights: Tensor | None, inverse: Tensor, offs: Tensor, k: int) -> Tensor:
    """The meaning of the gradient of y."""
    tokens, columns = grad.shape
    wide = accumulator(grad.dtype)
    out = grad.new_empty((tokens * k, columns))
    for rows, here, weight in _choices(weights, inverse, offs, tokens, k, wide):
        out[rows] = torch.where(here, weight * grad.to(wide), 0).to(grad.dtype)
    return out


def reference_dots(
    grad: Tensor, y: Tensor, inverse: Tensor, offs: Tensor, k: int, dtype: torch.dtype
) -> Tensor:
    """The meaning of the gradient of the weights."""
    tokens = grad.shape[0]
    wide = accumulator(y.dtype)
    out = grad.new_empty((tokens, k), dtype=dtype)
    for j, (rows, here, _) in enumerate(_choices(None, inverse, offs, tokens, k, wide)):
        out[:, j] = torch.where(here, grad.to(wide) * y[rows].to(wide), 0).sum(1).to(dtype)
    return out


def _choices(
    weights: Tensor | None, inverse: Tensor, offs: Tensor, tokens: int, k: int, wide: torch.dtype
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each choice: the tokens' rows, which of them are not of the tail, and their weights; these are (T, 1)."""
    rows = inverse.reshape(tokens, k)
    here = rows < offs[-1]
    factors = here.to(wide) if weights is None else torch.where(here, weights.to(wide), 0)
    return [(rows[:, j].long(), here[:, j, None], factors[:, j, None]) for j in range(k)]


# ---------------------------------------------------------------------------------------------------------------------
# Running


def _runs(x: Tensor) -> bool:
    """Whether kernels run on a tensor's device."""
    return devices.current(x.device) is not None


def _route(ids: Tensor, num_groups: int) -> tuple[Tensor, ...]:
    if not _runs(ids):
        return reference_route(ids, num_groups)
    count, made = ids.numel(), _empty(ids, num_groups)
    given = (num_groups, _layout(ids))
    with on_device(ids):
        if count * (count + 2 * num_groups) > _FEW:
            _sort_blocks(ids, made, *given)
        else:
            grid = -(-count // _ROWS) - (-num_groups // _ROWS)
            k = max(ids.shape[1], 1)
            kernels.route_few[(grid,)](
                ids, *made, count, k, *given, ROWS=_ROWS, COLS=_COLS, **overlap_on(ids), num_warps=8
            )
    return made


def _layout(ids: Tensor) -> tuple[int, int, int]:
    """Columns and strides; one column if rows follow one another, which saves a division."""
    (_, k), (row, col) = ids.shape, ids.stride()
    return (1, col, 0) if row == k * col or ids.shape[0] == 1 else (max(k, 1), row, col)


def _sort_blocks(ids: Tensor, made: tuple[Tensor, ...], groups: int, layout: tuple[int, int, int]) -> None:
    """Many ids: count those of each block, sum up the counts, and place those of each block."""
    offs, counts, order, inverse, token = made
    count, k = ids.shape[0] * ids.shape[1], ids.shape[1]
    size = _BLOCK if groups < _MANY_GROUPS else _LARGE_BLOCK
    overlap = overlap_on(ids)
    bins = min(max(32, 1 << groups.bit_length()), _BINS)
    blocks = -(-count // size)
    table, before = (offs.new_empty((groups + 1, blocks)) for _ in range(2))
    # No more threads than ids on any target.
    kernels.count_blocks[(blocks, groups // bins + 1)](
        ids, table, count, blocks, groups, layout, BLOCK=size, BINS=bins, **overlap, num_warps=size // 64
    )
    kernels.sum_blocks[(groups + 1,)](table, before, offs, counts, blocks, groups, CHUNK=_CHUNK, **overlap)
    kernels.place_blocks[(blocks,)](
        ids, before, offs, order, inverse, token, count, blocks, k, groups, layout, BLOCK=size, COLS=_OTHERS,
        **overlap, num_warps=size // 32,
    )  # fmt: skip


def _empty(ids: Tensor, num_groups: int) -> tuple[Tensor, ...]:
    count = ids.shape[0] * ids.shape[1]
    sizes = (num_groups, num_groups, count, count, count)
    return tuple(ids.new_empty(size, dtype=torch.int32) for size in sizes)


def _combine(y: Tensor, weights: Tensor | None, inverse: Tensor, offs: Tensor, tokens: int, k: int) -> Tensor:
    if not _runs(y):
        return reference_combine(y, weights, inverse, offs, tokens, k)
    columns = y.shape[1]
    if not y.numel():
        return y.new_zeros((tokens, columns))
    out = y.new_empty((tokens, columns))
    with on_device(y):
        kernels.combine_rows[_grid(out)](
            y, weights, inverse, offs, out, offs.shape[0], columns, y.stride(), _strides(weights), **_choices_of(k),
            **_widths(y), **overlap_on(y),
        )  # fmt: skip
    return out


def _spread(grad: Tensor, weights: Tensor | None, inverse: Tensor, offs: Tensor, k: int) -> Tensor:
    if not _runs(grad):
        return reference_spread(grad, weights, inverse, offs, k)
    tokens, columns = grad.shape
    out = grad.new_empty((tokens * k, columns))
    if out.numel():
        with on_device(grad):
            kernels.spread_rows[_grid(grad)](
                grad, weights, inverse, offs, out, offs.shape[0], columns, grad.stride(), _strides(weights),
                **_choices_of(k), **_widths(grad), **overlap_on(grad),
            )  # fmt: skip
    return out


def _dots(grad: Tensor, y: Tensor, inverse: Tensor, offs: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    if not _runs(grad):
        return reference_dots(grad, y, inverse, offs, k, dtype)
    tokens, columns = grad.shape
    out = grad.new_empty((tokens, k), dtype=dtype)
    if out.numel():
        with on_device(grad):
            kernels.dot_rows[(out.numel(),)](
                grad, y, inverse, offs, out, k, offs.shape[0], columns, grad.stride(), y.stride(), **_widths(y),
                **overlap_on(grad),
            )  # fmt: skip
    return out


def _widths(x: Tensor) -> dict[str, Any]:
    cols = min(max(16, 1 << (x.shape[1] - 1).bit_length()), _WIDTH // x.itemsize)
    return {"WIDE": TL[accumulator(x.dtype)], "COLS": cols}


def _grid(x: Tensor) -> tuple[int]:
    """Programs for blocks of columns of all rows."""
    return (x.shape[0] * -(-x.shape[1] // _widths(x)["COLS"]),)


def _strides(weights: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if weights is None else weights.stride()


def _choices_of(k: int) -> dict[str, int]:
    return {"K": k, "CHOICES": k if k <= _CHOICES else _CHOICES // 2}


# ---------------------------------------------------------------------------------------------------------------------
# The operators, for autograd, torch.compile and dispatch modes


def _combine_fake(
    y: Tensor, weights: Tensor | None, inverse: Tensor, offs: Tensor, tokens: int, k: int
) -> Tensor:
    return y.new_empty((tokens, y.shape[1]))


def _spread_fake(grad: Tensor, weights: Tensor | None, inverse: Tensor, offs: Tensor, k: int) -> Tensor:
    return grad.new_empty((inverse.shape[0], grad.shape[1]))


def _dots_fake(grad: Tensor, y: Tensor, inverse: Tensor, offs: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    return grad.new_empty((grad.shape[0], k), dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, weights, inverse, offs, _, ctx.k = inputs
    ctx.dtype = None if weights is None else weights.dtype
    needs_y, needs_weights = ctx.needs_input_grad[:2]
    ctx.save_for_backward(y if needs_weights else None, weights if needs_y else None, inverse, offs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    y, weights, inverse, offs = ctx.saved_tensors
    needs_y, needs_weights = ctx.needs_input_grad[:2]
    of_y = torch.ops.gemmery.moe_spread(grad, weights, inverse, offs, ctx.k) if needs_y else None
    of_weights = None
    if needs_weights:
        of_weights = torch.ops.gemmery.moe_dots(grad, y, inverse, offs, ctx.k, ctx.dtype)
    return of_y, of_weights, None, None, None, None


def _no_second(ctx: Any, grad: Tensor) -> None:
    raise NotImplementedError(
        "combine: second derivatives are not supported; call backward or torch.autograd.grad without create_graph=True"
    )


_ROUTED = "Tensor inverse, Tensor offs"
#: By name: the schema, what runs, and the function that gives only shapes and types.
_OPERATORS: dict[str, tuple[str, Any, Any]] = {
    "moe_route": (
        "(Tensor ids, SymInt num_groups) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _route, _empty,
    ),
    "moe_combine": (
        f"(Tensor y, Tensor? weights, {_ROUTED}, SymInt tokens, SymInt k) -> Tensor", _combine, _combine_fake,
    ),
    "moe_spread": (
        f"(Tensor grad, Tensor? weights, {_ROUTED}, SymInt k) -> Tensor", _spread, _spread_fake,
    ),
    "moe_dots": (
        f"(Tensor grad, Tensor y, {_ROUTED}, SymInt k, ScalarType dtype) -> Tensor", _dots, _dots_fake,
    ),
}  # fmt: skip
for _name, (_schema, _run, _fake) in _OPERATORS.items():
    LIBRARY.define(_name + _schema, tags=torch.Tag.pt2_compliant_tag)
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _run, _key)
    torch.library.register_fake(f"gemmery::{_name}", _fake, lib=LIBRARY)
torch.library.register_autograd("gemmery::moe_combine", _gradients, setup_context=_save, lib=LIBRARY)
for _name in ("moe_spread", "moe_dots"):
    torch.library.register_autograd(f"gemmery::{_name}", _no_second, lib=LIBRARY)
