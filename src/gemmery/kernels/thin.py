"""The product of two thin matrices, which is added to the sum of the large product; see `operands.adapted`.

It is added to the accumulator where a tile ends, before the epilogue. So it is not rounded before, and no matrix of its
size is stored.

In Triton's kernels it is one more `tl.dot`. In Gluon's kernels all shared memory is used, so a warp loads its part of
both matrices straight into registers. If the elements of a block are distributed among threads as `wgmma` leaves them,
in squares of 8 by 8, the instruction is `mma.sync`, whose results have this layout. Other blocks are those of few rows,
to which the products of columns and rows are added one by one.
"""

from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from .any_width_acc import BLOCK8, columns_of, in_block
from .dialect import value_of
from .fused import as_type
from .numerics import dot
from .operands import load_strided
from .ranks import numbers_along
from .rings import column_halves

#: See `dialect.in_gluon`.
IN_GLUON = tl.constexpr(False)
#: Elements along the thin matrices' short side that are multiplied at a time.
SPAN = tl.constexpr(32)


# ---------------------------------------------------------------------------------------------------------------------
# In Triton's kernels, and in blocks of few rows


@constexpr_function
def span_of(rank):
    """The elements along the short side of a block: a power of two from 16 to `SPAN`."""
    return min(max(16, 1 << (rank - 1).bit_length()), SPAN.value)


@triton.jit
def add_blocks(
    acc,
    left,
    right,
    strides,
    shape,
    row,
    col,
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`acc` and the product of its rows of `left` and its columns of `right`; see `with_product`."""
    left_row, left_col, right_row, right_col = strides
    STEP: tl.constexpr = span_of(RANK)
    CHECK: tl.constexpr = RANK % STEP != 0
    for k in tl.static_range(0, RANK, STEP):
        x = load_strided(
            left, (shape[0], RANK), ((), left_row, left_col), (), 0, row, k, acc.shape[0], STEP, True, CHECK, WIDE
        )  # fmt: skip
        y = load_strided(
            right, (RANK, shape[1]), ((), right_row, right_col), (), 0, k, col, STEP, acc.shape[1], CHECK, True, WIDE
        )  # fmt: skip
        acc = dot(x, y, acc, PRECISION, -1)
    return acc


@triton.jit
def add_columns(acc, left, right, strides, shape, row, col, RANK: tl.constexpr):
    """The same, column by column of `left`: for blocks that no instruction multiplies."""
    left_row, left_col, right_row, right_col = strides
    rows = row + numbers_along(acc, 0)
    cols = col + numbers_along(acc, 1)
    at_left = left + rows.to(tl.int64) * left_row
    at_right = right + cols.to(tl.int64) * right_col
    for first in range(0, RANK, 16):
        # All loads of these are in flight together.
        for i in tl.static_range(16):
            k = tl.cast(first + i, tl.int64)
            x = tl.load(at_left + k * left_col, mask=(rows < shape[0]) & (k < RANK), other=0.0)
            y = tl.load(at_right + k * right_row, mask=(cols < shape[1]) & (k < RANK), other=0.0)
            acc += as_type(x, acc.dtype)[:, None] * as_type(y, acc.dtype)[None, :]
    return acc


# ---------------------------------------------------------------------------------------------------------------------
# In accumulators of `wgmma`


@constexpr_function
def fragments_of(kind):
    """The layout of a block of Gluon: 1 as `wgmma` of four warps leaves it, 2 the transpose of it, or 0."""
    layout: Any = kind.layout
    rows, columns = kind.shape
    if isinstance(layout, gl.NVMMADistributedLayout):
        is_plain = layout.version[0] == 3 and list(layout.warps_per_cta) == [4, 1]
        return int(is_plain and rows == 64 and layout.instr_shape[1] == columns)
    if not isinstance(layout, gl.DistributedLinearLayout):
        return 0
    found = [[list(x) for x in part] for part in (layout.reg_bases, layout.lane_bases, layout.warp_bases)]
    for kind, turned in ((1, False), (2, True)):
        size = rows if turned else columns
        # Two columns and the row 8 below; then the other groups of eight columns.
        across = [[0, 8 << i] for i in range((size // 8).bit_length() - 1)]
        bases = [[[0, 1], [8, 0], *across], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]]
        if found == ([[x[::-1] for x in part] for part in bases] if turned else bases):
            return kind
    return 0


@gluon.jit
def eights_of(block):
    """The columns of a block in blocks of 8, as accumulators are; no number moves."""
    if block.shape[1] == 8:
        return (gl.convert_layout(block, BLOCK8, assert_trivial=True),)
    else:
        left, right = column_halves(block)
        return eights_of(left) + eights_of(right)


def fragments_text(count, rank, words, kind):
    """The assembly of `multiply_fragments`.

    The order of numbers along the short side is the same for X and for Y, but not theirs in memory, so that each thread
    loads adjacent ones. Addresses are computed here, since the compiler would compute parts of them before the K loop
    and keep them in registers.

    Args:
        count: blocks of the accumulator.
        rank, words, kind: see `multiply_fragments`.
    """
    # Every operand comes four times, a register for each number of a thread.
    x, y, x_step, y_step, x_room, y_room = (f"${8 * count + 4 * i}" for i in range(6))
    each = 8 * words
    lines = [
        # A warp has 16 rows, and a thread of it the row that is its number divided by 4, and the row 8 below it.
        "mov.u32 quad, %tid.x; shr.u32 warp, quad, 5; and.b32 warp, warp, 3; shr.u32 row, quad, 2; and.b32 row, row, 7;"
        f"and.b32 quad, quad, 3; mul.lo.s32 behind, quad, {4 * words}; cvt.u64.u32 y, behind; add.s64 x0, y, {x};"
        f"add.s64 y_first, y, {y}; mad.wide.s32 y_first, row, {y_step}, y_first; sub.s32 room, {y_room}, row;"
        f"mad.lo.s32 row, warp, 16, row; mad.wide.s32 x0, row, {x_step}, x0; mad.wide.s32 x1, {x_step}, 8, x0;"
        f"sub.s32 row, {x_room}, row; setp.gt.s32 in0, row, 0; setp.gt.s32 in1, row, 8;"
    ]
    for first in range(0, rank, SPAN.value):
        steps = range(first, min(rank, first + SPAN.value), each)
        lines += _loads("a", (0, 2), "in0", "x0", steps, each, rank)
        lines += _loads("a", (1, 3), "in1", "x1", steps, each, rank)
        lines.append("mov.b64 y, y_first;")
        for block in range(count):
            lines.append(f"setp.gt.s32 iny, room, {8 * block};")
            lines += _loads("b", (0, 1), "iny", "y", steps, each, rank)
            sums = ", ".join(f"${4 * block + i}" for i in range(4))
            for i in range(len(steps) * each // 16):
                lines.append(
                    f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{sums}}},"
                    f" {{a{i}_0, a{i}_1, a{i}_2, a{i}_3}}, {{b{i}_0, b{i}_1}}, {{{sums}}};"
                )
            lines.append(f"mad.wide.s32 y, {y_step}, 8, y;")
    names = [
        f"{name}{i}_{j}"
        for name, n in (("a", 4), ("b", 2))
        for i in range(SPAN.value // 16)
        for j in range(n)
    ]
    return (
        "{ .reg .pred in0, in1, iny, some; .reg .b64 x0, x1, y, y_first; .reg .b32 quad, warp, row, behind, room;"
        f".reg .b32 {', '.join(names)}; {' '.join(lines)} }}"
    )


def _loads(name, numbers, inside, at, steps, each, rank):
    """Assembly that loads a thread's numbers of one row, and 0 beyond the matrix, into the registers of fragments.

    Args:
        name, numbers: of the registers, and which ones of each fragment, which has 16 numbers of the short side.
        inside: a predicate: whether the row exists.
        at: a register with the numbers' address.
        steps: where loads begin along the short side; four threads load `each` numbers together.
    """
    lines = []
    for i, k in enumerate(steps):
        pieces = range(i * each // 16, (i + 1) * each // 16)
        registers = [f"{name}{piece}_{number}" for piece in pieces for number in numbers]
        lines += [f"mov.b32 {register}, 0;" for register in registers]
        predicate = inside
        if k + each > rank:
            lines.append(f"setp.lt.and.s32 some, quad, {(rank - k) * 4 // each}, {inside};")
            predicate = "some"
        lines.append(
            f"@{predicate} ld.global.v{len(registers)}.b32 {{{', '.join(registers)}}}, [{at} + {2 * k}];"
        )
    return lines


@builtin
def multiply_fragments(acc, x, y, x_step, y_step, x_room, y_room, RANK, WORDS, KIND, _semantic=None):
    """Adds the product of 64 rows of X and 8 of Y to each block of an accumulator; both have adjacent short sides.

    All arguments but `acc` are blocks, see `in_block`.

    Args:
        acc: the blocks, of 64 rows by 8.
        x, y: the addresses of the first rows.
        x_step, y_step: bytes from one row to the next.
        x_room, y_room: how many rows there are from the first one on.
        RANK: numbers along the short side, a multiple of 4.
        WORDS: pairs of numbers that a thread loads at a time, 2 or 4.
        KIND: the type of the numbers, as PTX names it.
    """
    count = len(acc.values)
    made = gl.inline_asm_elementwise(
        fragments_text(count, value_of(RANK), value_of(WORDS), value_of(KIND)),
        ",".join(["=f"] * (4 * count) + [str(i) for i in range(4 * count)] + ["l"] * 8 + ["r"] * 16),
        [*acc.values, x, y, x_step, y_step, x_room, y_room],
        dtype=[gl.float32] * count, is_pure=True, pack=4, _semantic=_semantic,
    )  # fmt: skip
    return gl.tuple(list(made))


@gluon.jit
def add_fragments(
    acc, x, y, x_stride, y_stride, x_end, y_end, x_first, y_first, RANK: gl.constexpr, WORDS: gl.constexpr
):
    """A block of 64 rows of X by some of Y, and their product; both have adjacent short sides.

    Args:
        x_stride, y_stride: elements from one row to the next.
        x_end, y_end: how many rows there are.
        x_first, y_first: where the block's begin.
    """
    KIND: gl.constexpr = "f16" if x.dtype.element_ty == gl.float16 else "bf16"
    LAYOUT: gl.constexpr = acc.type.layout
    at_x = gl.cast(x, gl.int64) + gl.cast(x_first, gl.int64) * (2 * x_stride)
    at_y = gl.cast(y, gl.int64) + gl.cast(y_first, gl.int64) * (2 * y_stride)
    made = multiply_fragments(
        eights_of(acc), in_block(at_x), in_block(at_y), in_block(gl.to_tensor(2 * x_stride)),
        in_block(gl.to_tensor(2 * y_stride)), in_block(gl.to_tensor(x_end - x_first)),
        in_block(gl.to_tensor(y_end - y_first)), RANK, WORDS, KIND,
    )  # fmt: skip
    return gl.convert_layout(columns_of(made), LAYOUT, assert_trivial=True)


@triton.jit
def add_in_registers(acc, left, right, strides, shape, row, col, RANK: tl.constexpr, WORDS: tl.constexpr):
    """`add_blocks` in Gluon's kernels."""
    FRAGMENTS: tl.constexpr = fragments_of(acc.type) if WORDS > 0 else 0
    left_row, right_col = strides[0], strides[3]
    if FRAGMENTS == 1:
        return add_fragments(acc, left, right, left_row, right_col, shape[0], shape[1], row, col, RANK, WORDS)
    elif FRAGMENTS == 2:
        turned = add_fragments(
            acc.permute(1, 0), right, left, right_col, left_row, shape[1], shape[0], col, row, RANK, WORDS
        )  # fmt: skip
        return tl.convert_layout(turned.permute(1, 0), acc.type.layout, assert_trivial=True)
    else:
        return add_columns(acc, left, right, strides, shape, row, col, RANK)


# ---------------------------------------------------------------------------------------------------------------------
# The epilogue


@triton.jit
def with_product(
    acc, args, shape, sizes, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr,
    EPILOGUE: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr, SCALED: tl.constexpr, AHEAD: tl.constexpr,
    WIDE_STRIDES: tl.constexpr, WORDS: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """An epilogue of the sum and a product of thin matrices.

    Args:
        args: the matrices `left`, (M, RANK), and `right`, (RANK, N); their strides; with SCALED the scales of the sum's
            columns and their stride; and the epilogue's own. With AHEAD a pair of these and of what the epilogue has
            read ahead.
        WIDE_STRIDES: whether an offset within a block can pass 2^31 elements.
        WORDS: see `multiply_fragments`; 0 if threads can load neither 2 nor 4.
        SOURCE: identifies the version of this file, which writes assembly.
    """
    read = None
    given = args
    if AHEAD:
        given, read = args
    left, right = given[0], given[1]
    strides = (given[2], given[3], given[4], given[5])
    if SCALED:
        cols = col + numbers_along(acc, 1)
        scales = tl.load(given[6] + cols.to(tl.int64) * given[7], mask=cols < shape[1], other=0.0)
        acc = acc * as_type(scales, acc.dtype)[None, :]
    if IN_GLUON:
        acc = add_in_registers(acc, left, right, strides, shape, row, col, RANK, WORDS)
    elif ROWS < 16 or COLS < 16:
        acc = add_columns(acc, left, right, strides, shape, row, col, RANK)
    else:
        acc = add_blocks(acc, left, right, strides, shape, row, col, RANK, PRECISION, WIDE_STRIDES)
    own = given[8 if SCALED else 6 :]
    if AHEAD:
        own = (own, read)
    return EPILOGUE(acc, own, shape, sizes, batch, row, col, ROWS, COLS, WIDE)
