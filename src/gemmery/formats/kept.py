"""The storage of a 2:4 sparse weight's kept numbers: a table with a row for each code."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def in_halves(numbers: Tensor) -> Tensor:
    """Integers from -8 to 7, (..., 2 n), two in a byte: int8, (..., n), the first of two in the lower half.

    Example:
        >>> in_halves(torch.tensor([1, 2, -1, 7])).tolist()
        [33, 127]
    """
    first, second = numbers.to(torch.int8).unflatten(-1, (-1, 2)).unbind(-1)
    found: Tensor = (first & 15) | (second << 4)
    return found


def from_halves(values: Tensor) -> Tensor:
    """The inverse of `in_halves`: int8, (..., 2 n).

    Example:
        >>> from_halves(torch.tensor([33, 127], dtype=torch.int8)).tolist()
        [1, 2, -1, 7]
    """
    return torch.stack([(values << 4) >> 4, values >> 4], -1).flatten(-2)


def _same(x: Tensor) -> Tensor:
    return x


def _to_e4m3(numbers: Tensor) -> Tensor:
    return numbers.to(torch.float8_e4m3fn).view(torch.int8)


def _from_e4m3(values: Tensor) -> Tensor:
    return values.view(torch.float8_e4m3fn)


def _is_nan_of_e4m3(values: Tensor) -> Tensor:
    return (values & 0x7F) == 0x7F


def _to_int8(numbers: Tensor) -> Tensor:
    return numbers.round().to(torch.int8)


def _to_int4(numbers: Tensor) -> Tensor:
    return in_halves(numbers.round())


@dataclass(frozen=True)
class Code:
    """A storage code of kept numbers. `operands.sparse.DECODERS` has the device function for each code.

    Attributes:
        name: as in `SparseTensor.code`; "" for numbers of 16 bits, which are stored as they are.
        bits: of a kept number.
        each: columns of which one element of `values` has the kept numbers.
        largest: the largest number that there is.
        to_values: makes elements of `values` of numbers from -largest to largest, or of integers from -largest - 1.
        to_numbers: makes numbers of elements of `values`, in a type that holds them exactly.
        has_groups: whether groups of columns can have scales.
        is_nan: says of each element of `values` whether it is NaN; None if there is no such code.
    """

    name: str
    bits: int
    each: int
    largest: float
    to_values: Callable[[Tensor], Tensor] = _same
    to_numbers: Callable[[Tensor], Tensor] = _same
    has_groups: bool = False
    is_nan: Callable[[Tensor], Tensor] | None = None


#: By name. A weight of a code other than "" has `values` of int8.
CODES = {
    code.name: code
    for code in (
        Code("", 16, 2, math.inf),
        Code("e4m3", 8, 2, 448.0, _to_e4m3, _from_e4m3, is_nan=_is_nan_of_e4m3),
        Code("int8", 8, 2, 127.0, _to_int8),
        Code("int4", 4, 4, 7.0, _to_int4, from_halves, has_groups=True),
    )
}
#: The names of codes of fewer than 16 bits.
NAMES = tuple(name for name in CODES if name)
