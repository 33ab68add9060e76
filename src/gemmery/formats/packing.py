"""The order in which packed numbers lie in memory, which is that in which the tensor cores' threads want them.

A warp holds a 16 x 16 block of a matrix multiply's left operand in fragments: lane `4 g + q` has rows `g` and `g + 8`
and columns `2 q`, `2 q + 1`, `2 q + 8` and `2 q + 9` (PTX ISA, wgmma and mma, register fragments). A strip of 16 rows
is cut into blocks of `8 P` columns, where `P` numbers fit into a word of 32 bits. Of such a block each lane holds four
words, which lie side by side: of row `g` and then of row `g + 8` those for columns `2 q` and `2 q + 1` modulo 8. Word
`(row, r)` has the numbers of columns `r`, `r + 8`, `r + 16`, ... of the block, the first in its lowest bits. So a lane
reads 16 bytes, and no number ever changes its lane.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Rows of a strip, and words of a line, which is 128 bytes long.
STRIP, LINE = 16, 32


def block_columns(bits: int) -> int:
    """Columns of a block: what one lane's four words have of a row, times its share of the lanes."""
    return 8 * (32 // bits)


def padded(rows: int, columns: int, bits: int) -> tuple[int, int]:
    """A matrix's sizes rounded up to whole strips and blocks."""
    step = block_columns(bits)
    return -(-rows // STRIP) * STRIP, -(-columns // step) * step


def pack(codes: Tensor, bits: int) -> Tensor:
    """Numbers of `bits` bits as words.

    Args:
        codes: (..., N, K), uint8, each below `2**bits`.
        bits: 2, 4 or 8.

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
    # Strip, half of it, g, block, number in the word, q, odd or even.
    parts = codes.reshape(*lead, N // 16, 2, 8, K // (8 * per), per, 4, 2)
    d = len(lead)
    parts = parts.permute(*range(d), *(d + i for i in (0, 3, 2, 5, 1, 6, 4)))
    words = torch.zeros(parts.shape[:-1], dtype=torch.int32, device=codes.device)
    for i in range(per):
        words |= parts[..., i].to(torch.int32) << (bits * i)
    return words.reshape(*lead, N // STRIP, K // (8 * per) * 4, LINE)


def unpack(words: Tensor, bits: int, rows: int, columns: int) -> Tensor:
    """What `pack` packed: uint8, (..., rows, columns)."""
    *lead, strips, lines, _ = words.shape
    per = 32 // bits
    parts = words.reshape(*lead, strips, lines // 4, 8, 4, 2, 2, 1)
    shifts = torch.arange(per, device=words.device, dtype=torch.int32) * bits
    codes = ((parts >> shifts) & ((1 << bits) - 1)).to(torch.uint8)
    # As they were: strip, half, g, block, number in the word, q, odd or even.
    d = len(lead)
    codes = codes.permute(*range(d), *(d + i for i in (0, 4, 2, 1, 6, 3, 5)))
    return codes.reshape(*lead, strips * STRIP, lines // 4 * block_columns(bits))[..., :rows, :columns]
