"""Shared by the layouts: codes of a few bits in words and bytes, groups of columns, and checks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def words_to_codes(words: Tensor, bits: int, dim: int) -> Tensor:
    """Codes that lie in words of 32 bits, the first in the lowest bits.

    Args:
        words: int32, of any shape.
        bits: a divisor of 32, of 8 at most.
        dim: along which the codes of a word follow each other.

    Returns:
        uint8, `32 / bits` times as long along `dim`.

    Example:
        >>> import torch
        >>> words_to_codes(torch.tensor([[0x76543210]], dtype=torch.int32), 4, dim=1)
        tensor([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.uint8)
    """
    dim %= words.dim()
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    # The shift of a negative word inserts ones, which the mask removes.
    parts = words.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (words.dim() - dim - 1))
    return (parts & ((1 << bits) - 1)).to(torch.uint8).flatten(dim, dim + 1)


def nibbles(packed: Tensor, *, high_first: bool = False) -> Tensor:
    """The two 4-bit codes of each byte, side by side.

    Args:
        packed: (..., C), uint8.
        high_first: whether the first code is in the upper half.

    Returns:
        uint8, (..., 2 C).

    Example:
        >>> import torch
        >>> nibbles(torch.tensor([0x21, 0x43], dtype=torch.uint8))
        tensor([1, 2, 3, 4], dtype=torch.uint8)
    """
    low, high = packed & 15, packed >> 4
    return torch.stack((high, low) if high_first else (low, high), dim=-1).flatten(-2)


def is_size(value: object) -> bool:
    """Whether a value of a configuration is a whole number that a size can be."""
    return type(value) is int and 0 <= value < 1 << 31


def is_number(value: object) -> bool:
    """Whether a value of a configuration is a finite number."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def settings_of(where: str, value: object) -> dict[str, Any]:
    """A value of a configuration that must be an object.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {value!r}; it must be an object")
    return dict(value)


def check_dims(source: str, name: str, tensor: Tensor, wanted: int) -> None:
    """Raise a ValueError unless a tensor has this number of dimensions."""
    if tensor.dim() != wanted:
        raise ValueError(f"{source}: {name} is {tuple(tensor.shape)}; it must have {wanted} dimensions")


def check_dtype(source: str, name: str, tensor: Tensor, *wanted: torch.dtype) -> None:
    """Raise a ValueError unless a tensor has one of the given types."""
    if tensor.dtype not in wanted:
        names = " or ".join(str(x).removeprefix("torch.") for x in wanted)
        raise ValueError(
            f"{source}: {name} is {str(tensor.dtype).removeprefix('torch.')}; it must be {names}"
        )


def check_shape(source: str, name: str, tensor: Tensor, wanted: tuple[int, ...], why: str) -> None:
    """Raise a ValueError unless a tensor has this shape."""
    if tuple(tensor.shape) != wanted:
        raise ValueError(f"{source}: {name} is {tuple(tensor.shape)}; {why}, it must be {wanted}")


def group_size_of(source: str, columns: int, groups: int, given: int | None) -> int:
    """Columns of a group: what was given, if it is true, and else what follows from the number of groups.

    Args:
        given: as configurations have it: None, or -1 for one group over all columns.

    Raises:
        ValueError: the groups do not cover the columns, or their size does not follow from their number.
    """
    if given is not None and given > 0:
        if -(-columns // given) != groups:
            raise ValueError(
                f"{source}: group_size is {given}, so that {columns} columns have {-(-columns // given)} groups; "
                f"the scales are of {groups}"
            )
        return given
    if groups < 1 or columns % groups:
        raise ValueError(
            f"{source}: {columns} columns are not a multiple of {groups} groups; give group_size"
        )
    return columns // groups


def order_of(source: str, g_idx: Tensor, groups: int, group_size: int) -> Tensor | None:
    """The order of columns in which groups are contiguous, from each column's group; None if they are already.

    Act-order quantizes columns by importance and stores them in the layer's order, with the group of each.

    Args:
        g_idx: (K,), of integers: the group of each column.

    Returns:
        int64, (K,): column k in the new order is column `order[k]` of the layer.

    Raises:
        ValueError: groups do not exist or are of different sizes.

    Example:
        >>> import torch
        >>> order_of("example", torch.tensor([1, 0, 1, 0]), 2, 2)
        tensor([1, 3, 0, 2])
    """
    g_idx = g_idx.long()
    columns = g_idx.numel()
    if torch.equal(g_idx, torch.arange(columns, device=g_idx.device) // group_size):
        return None
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        raise ValueError(
            f"{source}: g_idx has values from {low} to {high}; there are {groups} groups, counted from 0"
        )
    counts = torch.bincount(g_idx, minlength=groups)
    wanted = torch.full_like(counts, group_size)
    wanted[-1] = columns - group_size * (groups - 1)
    if not torch.equal(counts, wanted):
        raise ValueError(
            f"{source}: g_idx has groups of {int(counts.min())} to {int(counts.max())} columns; "
            f"they must be all of {group_size}, to be contiguous after a permutation"
        )
    return g_idx.argsort(stable=True)
