"""The order of packed numbers in memory, which is the order in which the tensor cores' threads need them.

A warp holds a 16 x 16 block of a matrix multiply's left operand in fragments: lane `4 g + q` has rows `g` and `g + 8`
and columns `2 q`, `2 q + 1`, `2 q + 8` and `2 q + 9` (PTX ISA, wgmma and mma, register fragments). A strip of 16 rows
is cut into blocks of `8 P` columns, where `P` numbers fit into a word of 32 bits. Of such a block each lane holds four
words, which are adjacent: two of row `g` and then two of row `g + 8`, with the numbers of columns `2 q` and
`2 q + 1` modulo 8. So a lane reads 16 bytes, and no number ever changes its lane.

The tensor cores take numbers of adjacent columns in pairs. So the first of two words has the first half of both
columns' numbers and the second one the rest: one word contains a whole pair. The format determines the
place in the word, see `formats.base.ORDERS`.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

#: Of the order of numbers in words, which is stored with them. In version 1 each word had one column's numbers, in
#: version 2 all formats had plain orders.
VERSION = 3
#: Rows of a strip, and words of a line, which is 128 bytes long.
STRIP, LINE = 16, 32
#: The places of the 32 bits of a word's numbers, from the lowest bit of each number on, the even column's numbers
#: first: each of 0 to 31 once.
Order = tuple[int, ...]
#: The even column's numbers, and the odd one's 16 bits above.
APART: Order = tuple(range(32))


def in_turn(bits: int) -> Order:
    """Numbers of both columns in turn."""
    half = 16 // bits
    return tuple(bits * (2 * n + odd) + bit for odd in (0, 1) for n in range(half) for bit in range(bits))


def block_columns(bits: int) -> int:
    """Columns of a block: what one lane's four words have of a row, times its share of the lanes."""
    return 8 * (32 // bits)


def padded(rows: int, columns: int, bits: int) -> tuple[int, int]:
    """A matrix's sizes rounded up to whole strips and blocks."""
    step = block_columns(bits)
    return -(-rows // STRIP) * STRIP, -(-columns // step) * step


def runs(order: Order, bits: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """The runs of adjacent bits of each number of a word: the first bit, a mask, and the position in the word.

    Example:
        >>> runs(in_turn(8), 8)
        (((0, 255, 0),), ((0, 255, 16),), ((0, 255, 8),), ((0, 255, 24),))
    """
    found = []
    for number in range(32 // bits):
        places = order[bits * number : bits * (number + 1)]
        starts = [bit for bit in range(bits) if bit == 0 or places[bit] != places[bit - 1] + 1]
        lengths = [end - start for start, end in zip(starts, [*starts[1:], bits], strict=True)]
        found.append(
            tuple((bit, (1 << length) - 1, places[bit]) for bit, length in zip(starts, lengths, strict=True))
        )
    return tuple(found)


def pack(codes: Tensor, bits: int, order: Order) -> Tensor:
    """Numbers of `bits` bits as words.

    Args:
        codes: (..., N, K), uint8, each below `2**bits`.
        bits: 2, 4 or 8.
        order: where a word has the bits of its numbers, as `Format.order` says.

    Returns:
        int32, (..., strips, lines, 32): four lines a block of columns. The padding is code 0.

    Raises: ValueError: words do not hold numbers of `bits` bits, or the order does not contain each of a word's bits
        once.

    Example:
        >>> import torch
        >>> pack(torch.ones(16, 64, dtype=torch.uint8), 4, APART).shape
        torch.Size([1, 4, 32])
    """
    if bits not in (2, 4, 8):
        raise ValueError(f"pack: bits is {bits}; words hold numbers of 2, 4 or 8 bits")
    if sorted(order) != list(range(32)):
        raise ValueError(f"pack: order is {order}; it must have each of 0 to 31 once")
    *lead, rows, columns = codes.shape
    N, K = padded(rows, columns, bits)
    codes = torch.nn.functional.pad(codes, (0, K - columns, 0, N - rows))
    per = 32 // bits
    # Strip, half of it, g, block, first or second word, number of a column in the word, q, odd or even.
    parts = codes.reshape(*lead, N // 16, 2, 8, K // (8 * per), 2, per // 2, 4, 2)
    d = len(lead)
    parts = parts.permute(*range(d), *(d + i for i in (0, 3, 2, 6, 1, 4, 7, 5))).flatten(-2)
    words = torch.zeros(parts.shape[:-1], dtype=torch.int32, device=codes.device)
    for number, own in enumerate(runs(order, bits)):
        for bit, mask, place in own:
            words |= (parts[..., number].to(torch.int32) >> bit & mask) << place
    return words.reshape(*lead, N // STRIP, K // (8 * per) * 4, LINE)


def unpack(words: Tensor, bits: int, rows: int, columns: int, order: Order) -> Tensor:
    """The inverse of `pack`: uint8, (..., rows, columns)."""
    *lead, strips, lines, _ = words.shape
    per = 32 // bits
    parts = words.reshape(*lead, strips, lines // 4, 8, 4, 2, 2, 1)
    # A run of every number at a time; those that have no more of them get nothing from a mask of 0.
    steps = list(itertools.zip_longest(*runs(order, bits), fillvalue=(0, 0, 0)))
    codes = torch.zeros((), dtype=torch.uint8, device=words.device)
    for step in torch.tensor(steps, dtype=torch.int32, device=words.device).unbind():
        bit, mask, place = step.unbind(1)
        codes = codes | ((parts >> place & mask) << bit).to(torch.uint8)
    codes = codes.unflatten(-1, (2, per // 2))
    # As they were: strip, half, g, block, first or second word, number of a column in the word, q, odd or even.
    d = len(lead)
    codes = codes.permute(*range(d), *(d + i for i in (0, 4, 2, 1, 5, 7, 3, 6)))
    result: Tensor = codes.reshape(*lead, strips * STRIP, lines // 4 * block_columns(bits))[
        ..., :rows, :columns
    ]
    return result


def reordered(words: Tensor, bits: int, order: Order, wanted: Order) -> Tensor:
    """Words of one order in another one."""
    *_, strips, lines, _ = words.shape
    codes = unpack(words, bits, strips * STRIP, lines // 4 * block_columns(bits), order)
    return pack(codes, bits, wanted)
