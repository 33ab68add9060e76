"""Products of the rows of all ranks: the others' arrive while this rank's own are multiplied."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..devices import current
from ..dtypes import OUT_DTYPES
from ..product.prepare import results_of
from ..product.run import checked, product
from ..product.seen import PLAIN, autocast_dtype
from ..product.spec import Functions, Options
from .calls import columns_of, has_own_rows, of_some_rows
from .exchange import Shared
from .rows import LEAST_PIECE, TILE, GatheredRows


def has_parts(
    shared: Shared, op: str, x: Tensor, b: Any, bias: Any, functions: Functions, options: Options
) -> bool:
    """Whether the product of all ranks' rows can be computed in parts, given this rank's rows."""
    if functions.epilogue is None:
        return True
    count = x.shape[0]
    own = of_some_rows(bias, functions, shared.rank * count, count, shared.ranks * count)
    return has_own_rows(op, x, b, *own, options)


def product_of(rows: GatheredRows, op: str, b: Any, bias: Any, functions: Functions, options: Options) -> Any:
    """The product of the rows of all ranks: first of this rank's, then of the others', in the order of their arrival.

    A kernel that waits itself would need one launch, but only some schedules could have it, and the rank's own rows
    would first have to be copied to where the others arrive.
    """
    count, device = rows.own.shape[0], current(rows.own.device)
    assert device is not None
    each = ranges(rows.rank, rows.ranks, count, columns_of(op, b), device.sms)
    start, end = rows.rank * count, (rows.rank + 1) * count
    if start < each[0][0]:
        rows.place(start, each[0][0])
    if each[0][1] < end:
        rows.place(each[0][1], end)
    whole = _result(rows, op, b, bias, functions, options)
    made = []
    for first, last in each:
        where = first, last - first
        out = None if whole is None else whole.narrow(0, *where)
        given = of_some_rows(bias, functions, *where, rows.ranks * count)
        made.append((first, product(op, rows.of(first, last), b, *given, out, options)))
    return _joined([part for _, part in sorted(made, key=lambda x: x[0])]) if whole is None else whole


@functools.lru_cache(1024)
def ranges(rank: int, ranks: int, count: int, columns: int, sms: int) -> tuple[tuple[int, int], ...]:
    """The first row of each product, and the one after its last: of this rank's rows, then of the others'.

    Some of the rank's own rows come with those of a neighbor if the tiles of both products then take fewer waves.

    Args:
        count: rows of a rank.
        columns: of the product.
        sms: multiprocessors.
    """
    groups = [(first * count, last * count) for first, last in others(rank, ranks, count * columns)]
    start, end = rank * count, (rank + 1) * count
    is_last = rank == ranks - 1
    first, last = groups[-1 if is_last else 0]
    moved = moved_rows(count, last - first, columns, sms)
    if is_last:
        groups[-1] = first, last + moved
        start += moved
    else:
        groups[0] = first - moved, last
        end -= moved
    return (start, end), *groups


def moved_rows(own: int, theirs: int, columns: int, sms: int) -> int:
    """How many of a rank's own rows are multiplied with those of others, not before them, so that waves are full.

    A last wave with up to half of a wave's tiles counts as 0.55, because its tiles can be cut. At most a fifth of the
    own rows are moved, which leaves enough to multiply until the others have arrived.
    """
    rows, across = TILE[0], -(-columns // TILE[1])

    def cost(count: int) -> int:
        waves, rest = divmod(-(-count // rows) * across, sms)
        return 20 * waves + (0 if rest == 0 else 11 if 2 * rest <= sms else 20)

    if -(-own // rows) * across < 2 * sms:
        # Such products have other tiles.
        return 0
    counts = range(0, own // 5 + 1, rows)
    return min(counts, key=lambda moved: cost(own - moved) + cost(theirs + moved))


def others(rank: int, ranks: int, elements: int) -> list[tuple[int, int]]:
    """The other ranks in the order in which their rows arrive, in groups whose rows are multiplied together.

    Ranks that follow one another are a group until its product fills a GPU.

    Args:
        elements: of the product of a rank's rows.

    Returns:
        The first rank of each group, and the one after its last.
    """
    found: list[tuple[int, int]] = []
    for step in range(1, ranks):
        other = (rank + step) % ranks
        if found and found[-1][1] == other and (other - found[-1][0]) * elements < LEAST_PIECE:
            found[-1] = found[-1][0], other + 1
        else:
            found.append((other, other + 1))
    return found


def _result(
    rows: GatheredRows, op: str, b: Any, bias: Any, functions: Functions, options: Options
) -> Tensor | None:
    """Memory for the result, part of which each product fills; None if the result is not a single matrix."""
    own, count = rows.own, rows.own.shape[0]
    total = rows.ranks * count
    if autocast_dtype(own.device) is not None:
        # A product with memory for its result does not convert its operands.
        return None
    if functions.epilogue is None and bias is None and type(b) in PLAIN:
        # To check the call would take longer than the rest.
        dtype = options.out_dtype or OUT_DTYPES[own.dtype][0]
        assert isinstance(dtype, torch.dtype)
        return own.new_empty(total, columns_of(op, b), dtype=dtype)
    given = of_some_rows(bias, functions, rows.rank * count, count, total)
    found, many = results_of(checked(op, own, b, *given, None, options))
    if many or found[0] is None:
        return None
    shape, dtype = found[0]
    return own.new_empty(total, shape[-1], dtype=dtype)


def _joined(parts: list[Any]) -> Any:
    """Results of all rows, given those of consecutive ones."""
    if not isinstance(parts[0], tuple):
        return torch.cat(parts)
    return tuple([torch.cat(each) for each in zip(*parts, strict=True)])
