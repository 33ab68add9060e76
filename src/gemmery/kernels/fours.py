"""Partial sums that are stored and loaded four at a time, as the tensor cores leave them; see `ranks`.

Of 16 by 8 numbers of an accumulator each lane of a warp has four, in two rows that are 8 apart. They lie side by side
in the memory that ranks exchange them through. So a warp's stores are of 512 adjacent bytes, which cross the links
between GPUs in the fewest packets, and a thread needs one address for four numbers.
"""

from typing import Any

import triton
import triton.language as tl
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from .dialect import value_of

#: Rows of an accumulator that a warpgroup has, and bytes of a square of 16 by 8.
ROWS, BYTES = tl.constexpr(64), tl.constexpr(512)
#: Assembly that makes `at` the address of a thread's four numbers in the squares of a block, given operands for the
#: address of its first square, the bytes from one row of squares to the next, and those to the square.
_ADDRESS = (
    ".reg .b64 at, far; .reg .b32 warp, lane; mov.u32 warp, %tid.x; shr.u32 warp, warp, 5; and.b32 warp, warp, 3;"
    "mov.u32 lane, %laneid; mad.lo.u32 lane, lane, 16, {square}; cvt.u64.u32 far, lane;"
    "mad.wide.u32 at, warp, {row}, {first}; add.s64 at, at, far;"
)


@constexpr_function
def in_fours(kind, COLS):
    """Whether a block's numbers are those of whole squares, none of which are paired, and lie with threads so."""
    layout: Any = getattr(kind, "layout", None)
    return (
        isinstance(layout, gl.NVMMADistributedLayout) and kind.shape[0] == ROWS.value and kind.shape[1] == COLS
    )


@triton.jit
def place_of(rows, cols, squares):
    """Where elements lie, given their rows and columns and how many squares there are side by side."""
    square = (rows // 16 * squares)[:, None] + (cols // 8)[None, :]
    return square * 128 + (rows % 8 * 16 + rows // 8 % 2 * 2)[:, None] + (cols % 8 // 2 * 4 + cols % 2)[None, :]


@builtin
def store_fours(bits, first, row, square, end, _semantic=None):
    """Stores a block.

    Args:
        bits: 64 by some, of 32 bits each.
        first: the address of the first square, in a block.
        row: bytes from a row of squares to the next one, in a block.
        square: of each element, the bytes to its square from that below which it is in the first column, in a block.
        end: the bytes to the first square that does not exist, in a block.
    """
    address = _ADDRESS.format(first="$8", row="$12", square="$16")
    return gl.inline_asm_elementwise(
        f"{{ .reg .pred inside; {address} setp.lt.s32 inside, $16, $20;"
        "@inside st.global.v4.b32 [at], {$4, $5, $6, $7}; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }",
        ",".join(["=r"] * 4 + ["r"] * 4 + ["l"] * 4 + ["r"] * 12), [bits, first, row, square, end],
        dtype=gl.int32, is_pure=False, pack=4, _semantic=_semantic,
    )  # fmt: skip


@builtin
def look_at_fours(first, row, square, end, _semantic=None):
    """Loads a block that another rank stores, whether it is there or not; nobody waits for the loads here.

    Args:
        first, row, square, end: see `store_fours`.
    """
    address = _ADDRESS.format(first="$4", row="$8", square="$12")
    return gl.inline_asm_elementwise(
        f"{{ .reg .pred inside; {address} setp.lt.s32 inside, $12, $16;"
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
        "@inside ld.volatile.global.v4.b32 {$0, $1, $2, $3}, [at]; }",
        ",".join(["=&r"] * 4 + ["l"] * 4 + ["r"] * 12), [first, row, square, end],
        dtype=gl.int32, is_pure=False, pack=4, _semantic=_semantic,
    )  # fmt: skip


@builtin
def take_fours(
    bits, first, row, square, end, time, broken, failed, EMPTY, MISSING, RANK, _semantic=None
):  # fmt: skip
    """A block that another rank stores, whose places are empty afterwards. Waits for what was not there before.

    Args:
        bits: of `look_at_fours`.
        first, row, square, end: see `store_fours`.
        time: when to give up, by `ranks.time_now`, in a block.
        broken, failed: addresses, see `ranks.arrived`, in blocks.
        EMPTY, MISSING: see `ranks`.
        RANK: the other rank.
    """
    address = _ADDRESS.format(first="$8", row="$12", square="$16")
    empty, missing, own = value_of(EMPTY), value_of(MISSING), range(4)
    moved = "".join(f"mov.b32 ${i}, ${4 + i};" for i in own)
    one_is = f"setp.eq.s32 want, $0, {empty};"
    one_is += "".join(f"setp.eq.or.s32 want, ${i}, {empty}, want;" for i in own[1:])
    failing = "".join(f"setp.eq.s32 want, ${i}, {empty}; @want mov.b32 ${i}, {missing};" for i in own)
    return gl.inline_asm_elementwise(
        f"{{ .reg .pred want; .reg .b64 now; .reg .b32 number; {address} {moved}"
        f"setp.ge.s32 want, $16, $20; @want bra DONE; {one_is} @!want bra THERE;"
        f"\nLOOK: ld.volatile.global.v4.b32 {{$0, $1, $2, $3}}, [at]; {one_is} @!want bra THERE;"
        f"mov.u64 now, %globaltimer; setp.lt.u64 want, now, $24; @want bra LOOK; {failing}"
        f"mov.b32 number, 1; st.global.b32 [$28], number; mov.b32 number, {value_of(RANK) + 1};"
        "st.global.b32 [$32], number;"
        f"\nTHERE: mov.b32 number, {empty}; st.global.v4.b32 [at], {{number, number, number, number}};\nDONE: }}",
        ",".join(["=&r"] * 4 + ["r"] * 4 + ["l"] * 4 + ["r"] * 12 + ["l"] * 12),
        [bits, first, row, square, end, time, broken, failed],
        dtype=gl.int32, is_pure=False, pack=4, _semantic=_semantic,
    )  # fmt: skip
