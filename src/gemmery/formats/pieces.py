"""Pieces of a quantized weight, of its batch, of its rows and of its columns; and the concatenated rows of several.

Rows and columns are copied, all of their tensors: of those that groups share, a cut is not contiguous, and a piece that
shared its words alone would be half written by `copy_`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import packing

if TYPE_CHECKING:
    from .tensor import QuantizedTensor


def is_per_row(weight: QuantizedTensor) -> bool:
    """Whether `channel` has a number for each row, instead of one for all.

    Of a matrix with one row both are (1,) and mean the same; it counts as one for all.
    """
    channel = weight.channel
    return channel is not None and channel.ndim == weight.ndim - 1 and tuple(channel.shape) != (1,)


def of_batch(
    weight: QuantizedTensor, batch: tuple[int, ...], take: Callable[[Tensor], Tensor]
) -> QuantizedTensor:
    """A weight of the parts that `take` takes of every tensor's leading dimensions, which become `batch`."""
    inner = weight.parts()
    for name in inner.keys() - {"permutation"}:
        if name != "channel" or is_per_row(weight):
            inner[name] = take(inner[name]).contiguous()
    return weight.with_parts(inner, (*batch, *weight.shape[-2:]))


def rows(weight: QuantizedTensor, start: int, stop: int, caller: str = "slice") -> QuantizedTensor:
    """Rows from `start` to before `stop`, which must be multiples of 16 or the end."""
    *batch, N, K = weight.shape
    if start % packing.STRIP or (stop % packing.STRIP and stop != N):
        raise ValueError(
            f"{caller}: rows {start} to {stop} of {weight!r}: it can only be sliced at multiples of {packing.STRIP}"
        )
    inner = weight.parts()
    first, last = start // packing.STRIP, -(-stop // packing.STRIP)
    inner["words"] = inner["words"][..., first:last, :, :].clone(memory_format=torch.contiguous_format)
    for name in inner.keys() & {"scales", "zeros", "offsets"}:
        inner[name] = inner[name][..., first * packing.STRIP : last * packing.STRIP].clone(
            memory_format=torch.contiguous_format
        )
    if "channel" in inner:
        part = inner["channel"][..., start:stop] if is_per_row(weight) else inner["channel"]
        inner["channel"] = part.clone(memory_format=torch.contiguous_format)
    return weight.with_parts(inner, (*batch, stop - start, K))


def columns(weight: QuantizedTensor, start: int, stop: int, caller: str = "slice") -> QuantizedTensor:
    """Columns from `start` to before `stop`, multiples of a block's and a group's columns or the end."""
    *batch, N, K = weight.shape
    block = packing.block_columns(weight.format.bits)
    step = math.lcm(block, weight.group_size or 1)
    if start % step or (stop % step and stop != K):
        raise ValueError(
            f"{caller}: columns {start} to {stop} of {weight!r}: it can only be sliced at multiples of {step}, "
            f"for its words have {block} columns and its groups {weight.group_size or 'no'}"
        )
    inner = weight.parts()
    inner["words"] = inner["words"][..., start // block * 4 : -(-stop // block) * 4, :].clone(
        memory_format=torch.contiguous_format
    )
    for name in inner.keys() & {"scales", "zeros", "offsets"}:
        size = weight.group_size
        inner[name] = inner[name][..., start // size : -(-stop // size), :].clone(
            memory_format=torch.contiguous_format
        )
    if "channel" in inner:
        inner["channel"] = inner["channel"].clone()
    if weight.permutation is not None:
        inner["permutation"] = _of_permutation(weight.permutation, start, stop, caller)
    return weight.with_parts(inner, (*batch, N, stop - start))


def why_not_stacked(weights: Sequence[QuantizedTensor]) -> str | None:
    """Why rows of several weights can't be one weight; None if they can.

    Example:
        >>> import torch, gemmery
        >>> why_not_stacked([gemmery.quantize(torch.ones(8, 32), "int8"), gemmery.quantize(torch.ones(8, 32), "int8")])
        'weight 0 has 8 rows; all but the last one must have a multiple of 16'
    """
    first, *others = weights
    for i, other in enumerate(others, 1):
        for name, own, its in (
            ("format", first.format_name, other.format_name),
            ("group_size", first.group_size, other.group_size),
            ("dtype", first.dtype, other.dtype),
            ("device", first.device, other.device),
            ("shape but for rows", _but_rows(first), _but_rows(other)),
            ("parts", _kinds(first), _kinds(other)),
        ):
            if own != its:
                return f"weight 0 has {name} {own} and weight {i} {its}; they must be the same"
        if first.permutation is not None and not _equal(first.permutation, other.permutation):
            return f"weights 0 and {i} store their columns in two orders (GPTQ's act-order)"
    for i, weight in enumerate(weights[:-1]):
        if weight.shape[-2] % packing.STRIP:
            rows = weight.shape[-2]
            return f"weight {i} has {rows} rows; all but the last one must have a multiple of {packing.STRIP}"
    return None


def stacked_rows(weights: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """One weight with the rows of several, those of the first one first; what `rows` takes apart again.

    Numbers keep their bits. A scale for all of a weight becomes one for each of its rows.

    Raises:
        ValueError: see `why_not_stacked`.
    """
    reason = why_not_stacked(weights)
    if reason is not None:
        raise ValueError(f"cat: {reason}")
    first = weights[0]
    inner = first.parts()
    inner["words"] = torch.cat([x.words for x in weights], -3)
    for name in inner.keys() & {"scales", "zeros", "offsets"}:
        inner[name] = torch.cat([x.parts()[name] for x in weights], -1)
    if "channel" in inner:
        inner["channel"] = torch.cat([_by_row(x) for x in weights], -1)
    *batch, _, K = first.shape
    return first.with_parts(inner, (*batch, sum(x.shape[-2] for x in weights), K))


def put_rows(weight: QuantizedTensor, start: int, piece: QuantizedTensor) -> None:
    """Writes rows that were made separately into a weight, from row `start` on, a multiple of 16."""
    first = start // packing.STRIP
    inner, given = weight.parts(), piece.parts()
    inner["words"][..., first : first + given["words"].shape[-3], :, :] = given["words"]
    for name in inner.keys() & {"scales", "zeros", "offsets"}:
        inner[name][..., start : start + given[name].shape[-1]] = given[name]
    if "channel" in inner:
        inner["channel"][..., start : start + piece.shape[-2]] = given["channel"]


def _but_rows(weight: QuantizedTensor) -> tuple[int, ...]:
    return (*weight.shape[:-2], weight.shape[-1])


def _kinds(weight: QuantizedTensor) -> dict[str, torch.dtype]:
    return {name: part.dtype for name, part in weight.parts().items()}


def _equal(a: Tensor, b: Tensor | None) -> bool:
    # On meta there is nothing to compare.
    return b is not None and (a is b or (a.device.type != "meta" and a.equal(b)))


def _by_row(weight: QuantizedTensor) -> Tensor:
    channel = weight.channel
    assert channel is not None
    return channel if is_per_row(weight) else channel.expand(weight.shape[:-1])


def _of_permutation(permutation: Tensor, start: int, stop: int, caller: str) -> Tensor:
    part = permutation[start:stop] - start
    if stop > start and (int(part.min()) < 0 or int(part.max()) >= stop - start):
        raise ValueError(
            f"{caller}: columns {start} to {stop} are packed in an order (GPTQ's act-order) that takes columns from "
            "elsewhere in the weight: such a weight can only be split along its rows"
        )
    return part
