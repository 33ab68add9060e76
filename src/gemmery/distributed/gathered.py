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

#: Columns of a product of 16-bit numbers that takes about twice as long as to send its rows over NVLink, on an H200.
LEAST_COLUMNS = 4096


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
    """The product of the rows of all ranks, in parts: first of this rank's, then of the others', as they arrive.

    A kernel that waits itself would need one launch, but only some schedules could have it, and all of the rank's own
    rows would first have to be copied to where the others arrive.
    """
    count = rows.own.shape[0]
    parts = parts_of(rows, op, b, options)
    start, end = rows.rank * count, (rows.rank + 1) * count
    if start < parts[0][0]:
        rows.place(start, parts[0][0])
    if parts[0][1] < end:
        rows.place(parts[0][1], end)
    whole = _result(rows, op, b, bias, functions, options)
    made = []
    for first, last in parts:
        where = first, last - first
        out = None if whole is None else whole.narrow(0, *where)
        given = of_some_rows(bias, functions, *where, rows.ranks * count)
        made.append((first, product(op, rows.of(first, last), b, *given, out, options)))
    return _joined([part for _, part in sorted(made, key=lambda x: x[0])]) if whole is None else whole


def parts_of(rows: GatheredRows, op: str, b: Any, options: Options) -> tuple[tuple[int, int], ...]:
    """The rows of each product, counted over all ranks: the first one, and the one after the last."""
    device, columns = current(rows.own.device), columns_of(op, b)
    assert device is not None
    # Other products have other tiles.
    usual = rows.own.dtype.itemsize == 2 and type(b) in PLAIN and options.config is None
    return ranges(rows.rank, rows.ranks, rows.own.shape[0], columns, device.sms if usual else 0)


@functools.lru_cache(1024)
def ranges(rank: int, ranks: int, count: int, columns: int, sms: int) -> tuple[tuple[int, int], ...]:
    """The same, given sizes.

    With two ranks, some of the rank's own rows are multiplied together with the other's if the tiles of both products
    then take fewer waves. With more ranks, their copies would wait until this rank has sent its rows to all others.

    Args:
        count: rows of a rank.
        columns: of the product.
        sms: multiprocessors; 0 if no rows may be moved.
    """
    if ranks > 2 or not sms:
        groups = [(first * count, last * count) for first, last in others(rank, ranks, count * columns)]
        return (rank * count, (rank + 1) * count), *groups
    moved = moved_rows(count, columns, sms)
    lower, upper = (0, count - moved), (count - moved, 2 * count)
    return (lower, upper) if rank == 0 else ((count + moved, 2 * count), (0, count + moved))


def moved_rows(count: int, columns: int, sms: int) -> int:
    """How many of one rank's rows are multiplied together with the other's, and not before them.

    A last wave that is at most half full counts as 0.55, because its tiles can be cut. At most a fifth of the rows are
    moved, and only in products with so many columns that the other's rows arrive while the rest is multiplied.

    Args:
        count, columns, sms: see `ranges`.
    """

    def tiles(count: int) -> int:
        return -(-count // TILE[0]) * -(-columns // TILE[1])

    def cost(count: int) -> int:
        waves, rest = divmod(tiles(count), sms)
        return 20 * waves + (0 if rest == 0 else 11 if 2 * rest <= sms else 20)

    if columns < LEAST_COLUMNS or tiles(count) < 2 * sms:
        # Smaller products have other tiles.
        return 0
    counts = range(0, count // 5 + 1, TILE[0])
    return min(counts, key=lambda moved: cost(count - moved) + cost(count + moved))


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
