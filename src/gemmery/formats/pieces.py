"""Pieces of a quantised weight: of its batch, of its rows and of its columns.

Rows and columns are copied, all of their tensors: of those that groups share, a cut is not contiguous, and a piece that
shared its words alone would be half written by `copy_`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    """What `take` takes of every tensor's leading dimensions, which leaves `batch` of them."""
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
            f"{caller}: rows {start} to {stop} of {weight!r}: it can be cut only at multiples of {packing.STRIP}"
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
            f"{caller}: columns {start} to {stop} of {weight!r}: it can be cut only at multiples of {step}, "
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


def _of_permutation(permutation: Tensor, start: int, stop: int, caller: str) -> Tensor:
    part = permutation[start:stop] - start
    if stop > start and (int(part.min()) < 0 or int(part.max()) >= stop - start):
        raise ValueError(
            f"{caller}: columns {start} to {stop} are packed in an order (GPTQ's act-order) that takes columns from "
            "elsewhere in the weight: such a weight can be cut along its rows alone"
        )
    return part
