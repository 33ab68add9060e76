"""The order in which packed numbers lie in memory, which is that in which the tensor cores' threads want them.

A warp holds a 16 x 16 block of a matrix multiply's left operand in fragments: lane `4 g + q` has rows `g` and `g + 8`
and columns `2 q`, `2 q + 1`, `2 q + 8` and `2 q + 9` (PTX ISA, wgmma and mma, register fragments). A strip of 16 rows
is cut into blocks of `8 P` columns, where `P` numbers fit into a word of 32 bits. Of such a block each lane holds four
words, which lie side by side: two of row `g` and then two of row `g + 8`, with the numbers of columns `2 q` and
`2 q + 1` modulo 8. So a lane reads 16 bytes, and no number ever changes its lane.

The tensor cores take numbers of adjacent columns in pairs. So the first of two words has the first half of both
columns' numbers and the second one the rest: all that a pair is made of lies in one word. There are two orders in it,
from the lowest bits on: the even column's numbers and then the odd one's, 16 bits apart, or those of both `in_turn`.
Which of them a format has is what its decoder takes fewest instructions for.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Of the order of numbers in words, which is stored with them. In version 1 each word had one column's numbers.
VERSION = 2
#: Rows of a strip, and words of a line, which is 128 bytes long.
STRIP, LINE = 16, 32


def block_columns(bits: int) -> int:
    """Columns of a block: what one lane's four words have of a row, times its share of the lanes."""
    return 8 * (32 // bits)


def padded(rows: int, columns: int, bits: int) -> tuple[int, int]:
    """A matrix's sizes rounded up to whole strips and blocks."""
    step = block_columns(bits)
    return -(-rows // STRIP) * STRIP, -(-columns // step) * step


def pack(codes: Tensor, bits: int, in_turn: bool = False) -> Tensor:
    """Numbers of `bits` bits as words.

    Args:
        codes: (..., N, K), uint8, each below `2**bits`.
        bits: 2, 4 or 8.
        in_turn: whether a word has the numbers of two columns in turn, see above and `Format.in_turn`.

    Returns:
        int32, (..., strips, lines, 32): four lines a block of columns. What pads the matrix is code 0.

    Example:
        >>> import torch
        >>> pack(torch.ones(16, 64, dtype=torch.uint8), 4).shape
        torch.Size([1, 4, 32])
    """
    if bits not in (2, 4, 8):
        raise ValueError(f"pack: bits is {bits}; words hold numbers of 2, 4 or 8 bits")
    *lead, rows, columns = codes.shape
    N, K = padded(rows, columns, bits)
    codes = torch.nn.functional.pad(codes, (0, K - columns, 0, N - rows))
    per = 32 // bits
    # Strip, half of it, g, block, first or second word, number of a column in the word, q, odd or even.
    parts = codes.reshape(*lead, N // 16, 2, 8, K // (8 * per), 2, per // 2, 4, 2)
    d = len(lead)
    inside = (5, 7) if in_turn else (7, 5)
    parts = parts.permute(*range(d), *(d + i for i in (0, 3, 2, 6, 1, 4, *inside))).flatten(-2)
    words = torch.zeros(parts.shape[:-1], dtype=torch.int32, device=codes.device)
    for i in range(per):
        words |= parts[..., i].to(torch.int32) << (bits * i)
    return words.reshape(*lead, N // STRIP, K // (8 * per) * 4, LINE)


def unpack(words: Tensor, bits: int, rows: int, columns: int, in_turn: bool = False) -> Tensor:
    """What `pack` packed: uint8, (..., rows, columns)."""
    *lead, strips, lines, _ = words.shape
    per = 32 // bits
    parts = words.reshape(*lead, strips, lines // 4, 8, 4, 2, 2, 1)
    shifts = torch.arange(per, device=words.device, dtype=torch.int32) * bits
    codes = ((parts >> shifts) & ((1 << bits) - 1)).to(torch.uint8)
    codes = codes.unflatten(-1, (per // 2, 2) if in_turn else (2, per // 2))
    # As they were: strip, half, g, block, first or second word, number of a column in the word, q, odd or even.
    d = len(lead)
    number, odd = (6, 7) if in_turn else (7, 6)
    codes = codes.permute(*range(d), *(d + i for i in (0, 4, 2, 1, 5, number, 3, odd)))
    result: Tensor = codes.reshape(*lead, strips * STRIP, lines // 4 * block_columns(bits))[
        ..., :rows, :columns
    ]
    return result
