"""The sum of the partial sums of several GPUs, each of which has a range of K; see `operands.summed`.

Every rank stores its partial sum of a block straight into the memory of every other rank, waits for theirs, and adds
all of them up in the order of the ranks. So all ranks have the same bits, whichever comes first. A partial sum is its
own signal: a place is `EMPTY` until a number is stored there, and `EMPTY` again once the number has been read. No
flags and no fences are needed, since four bytes arrive together. The all-reduce for few rows of FlashInfer and
TensorRT-LLM, which they call "Lamport", works likewise (github.com/flashinfer-ai/flashinfer).

With many rows, the time is that of the bytes on their way. A place then holds two partial sums of 16 bits each: every
rank rounds its own as well, so all ranks still add up the same numbers.

For each rank an element has two places, which products use in turn. When a rank stores into a place for the second
time, it has received all partial sums of the product in between. The other ranks sent these after they had finished
the product before, so they had emptied the place. `uses` counts the products that a square of 8 by 8 elements has been
part of. It is the same on all ranks, as long as they compute the same products in the same order.
"""

from typing import Any

import triton
import triton.language as tl
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from .dialect import value_of
from .operands import beside, column_halves
from .rings import barrier

#: The bits of an empty place: -0.0 as fp32, and the least int32, which is never a sum of products.
EMPTY = tl.constexpr(-(1 << 31))
#: The bits of a NaN in fp32, and of two in fp16 and in bf16, for numbers that did not arrive.
MISSING = tl.constexpr(0x7FC07FC0)
#: Elements that are sent and received at a time, limited by registers: by a warpgroup, and by a block of other kernels.
TOGETHER, TOGETHER_IN_BLOCKS = tl.constexpr(1024), tl.constexpr(2048)
#: The number of times that a block checks for partial sums in two microseconds. An H200 took 0.45 µs for a look.
LOOKS = tl.constexpr(5)
#: See `dialect.in_gluon`.
IN_GLUON = tl.constexpr(False)


@triton.jit
def numbers_along(acc, DIM: tl.constexpr):
    """The numbers of a block's rows, or of its columns, laid out as Gluon wants them."""
    if IN_GLUON:
        return tl.arange(0, acc.shape[DIM], tl.SliceLayout(1 - DIM, acc.type.layout))
    else:
        return tl.arange(0, acc.shape[DIM])


@constexpr_function
def parts_rows(kind):
    """Whether a block of a type is split by rows: a thread has elements in both halves of the rows, but not of the
    columns.

    Only Gluon's types tell the layout.
    """
    layout: Any = getattr(kind, "layout", None)
    sliced = []
    while hasattr(layout, "parent"):
        sliced.append(layout.dim)
        layout = layout.parent
    bases = getattr(layout, "reg_bases", [])
    for dim in sliced[::-1]:
        bases = [base[:dim] + base[dim + 1 :] for base in bases]
    rows, columns = kind.shape
    # Squares of 8 by 8 stay whole.
    return columns < 16 or ([rows // 2, 0] in bases and [0, columns // 2] not in bases)


@triton.jit
def halves(acc):
    """Two halves of a block, without moving data between threads, and the numbers of the second's row and column."""
    if parts_rows(acc.type):
        first, second = column_halves(acc.permute(1, 0))
        return first.permute(1, 0), second.permute(1, 0), acc.shape[0] // 2, 0
    else:
        first, second = column_halves(acc)
        return first, second, 0, acc.shape[1] // 2


@triton.jit
def together(first, second, like):
    """Joins the results of `halves`."""
    if parts_rows(like.type):
        made = beside(first.permute(1, 0), second.permute(1, 0)).permute(1, 0)
    else:
        made = beside(first, second)
    if IN_GLUON:
        made = tl.convert_layout(made, like.type.layout, assert_trivial=True)
    return made


@constexpr_function
def packs(kind, HALF):
    """Whether the `halves` of a block of a type become two numbers in each place, of type `HALF`: "fp16" or "bf16"."""
    if HALF is None:
        return False
    dim = 0 if parts_rows(kind) else 1
    layout: Any = getattr(kind, "layout", None)
    if layout is None:
        return kind.shape[dim] >= 16
    half = [0, 0]
    half[dim] = kind.shape[dim] // 2
    return half[dim] >= 8 and half in getattr(layout, "reg_bases", [])


@triton.jit
def packed(low, high, HALF: tl.constexpr):
    """Two blocks of fp32, rounded to `HALF`, as the bits of one."""
    KIND: tl.constexpr = tl.bfloat16 if HALF == "bf16" else tl.float16
    low = low.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = high.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return (high | low).to(tl.float32, bitcast=True)


@triton.jit
def unpacked(bits, HALF: tl.constexpr):
    """The two numbers in each of some bits; see `packed`."""
    KIND: tl.constexpr = tl.bfloat16 if HALF == "bf16" else tl.float16
    low = bits.to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
    high = (bits >> 16).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
    return low, high


@builtin
def computed_anew(value, _semantic=None):
    """The same number. Values computed from it are computed again, and not kept in registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic
    )


@builtin
def time_now(like, _semantic=None):
    """The GPU's clock in nanoseconds, of 64 bits.

    Args:
        like: a number that keeps the compiler from reading the clock earlier.
    """
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,r", [like], dtype=gl.int64, is_pure=False, pack=1, _semantic=_semantic
    )  # fmt: skip


@builtin
def waited_for(bits, places, end, _semantic=None, _generator=None):
    """The bits that are stored in places, once they are not empty; each thread waits for its own.

    Args:
        bits: `EMPTY` where they are wanted, something else where not.
        end: when to give up, by `time_now`, in a block.
    """
    threads = 32 * value_of(gl.num_warps(_semantic=_semantic, _generator=_generator))
    each = max(1, min(8, bits.numel.value // threads))
    own = range(each)
    look = [
        f"setp.eq.s32 want, ${i}, {EMPTY.value}; @want ld.volatile.global.b32 ${i}, [${2 * each + i}];"
        for i in own
    ]
    more = [f"setp.eq.or.s32 want, ${i}, {EMPTY.value}, want;" for i in own[1:]]
    return gl.inline_asm_elementwise(
        f"{{ .reg .pred want; .reg .b64 now;\nLOOK: {''.join(look)}"
        f"setp.eq.s32 want, $0, {EMPTY.value}; {''.join(more)} @!want bra DONE;"
        f"mov.u64 now, %globaltimer; setp.lt.u64 want, now, ${3 * each}; @want bra LOOK;\nDONE: }}",
        ",".join(["=&r"] * each + [str(i) for i in own] + ["l"] * (2 * each)), [bits, places, end],
        dtype=gl.int32, is_pure=False, pack=each, _semantic=_semantic,
    )  # fmt: skip


@triton.jit
def is_any(condition):
    """Whether a condition holds for an element of a block."""
    return tl.max(tl.max(condition.to(tl.int32), 1), 0) > 0


@triton.jit
def arrived(places, inside, end, broken, failed, RANK: tl.constexpr):
    """The bits that a rank stores in places, which are empty afterwards.

    Args:
        end: in Gluon when to give up, see `time_now`; elsewhere after how many microseconds.
        broken, failed: where it says that they did not come: on this GPU, and where the host sees it.
    """
    if IN_GLUON:
        # A vote would take shared memory, all of which belongs to the assembly.
        bits = waited_for(tl.where(inside, EMPTY, 0), places, end + inside.to(tl.int64) * 0)
        # Another thread may wait for the same elements.
        barrier()
    else:
        bits = tl.load(places, mask=inside, other=0, volatile=True)
        left = tl.where(tl.load(broken, volatile=True) == 0, tl.cast(end, tl.int64) * LOOKS // 2, 0)
        while is_any(bits == EMPTY) & (left > 0):
            bits = tl.load(places, mask=inside, other=0, volatile=True)
            left -= 1
        # Of threads with the same element, one votes; the others may not have seen the number yet.
        unseen = inside & (bits == EMPTY)
        bits = tl.where(unseen, tl.load(places, mask=unseen, other=0, volatile=True), bits)
        tl.debug_barrier()
    missing = bits == EMPTY
    # Later blocks then do not wait.
    tl.store(broken + bits * 0, 1, mask=missing)
    tl.store(tl.cast(failed, tl.pointer_type(tl.int32)) + bits * 0, RANK + 1, mask=missing)
    tl.store(places, bits * 0 + EMPTY, mask=inside)
    return tl.where(missing, MISSING, bits)


@triton.jit
def places_of(
    acc, column, uses, shape, row, col, size, N, COLS: tl.constexpr, RANKS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """The places in a buffer of the elements of some columns of a block, which of them exist, and their counters.

    In squares of 8 by 8, the layout of a warp's accumulators: each of its stores is then to 256 adjacent bytes. Squares
    have a counter each.

    Args:
        acc, column: the columns, which begin with the block's number `column`.
        uses: the counters.
        shape, row, col, COLS: as an epilogue has them of the whole block. If columns are paired, it has twice as many.
        size: places of a rank.
        N: columns of the product.
        TURNED: whether adjacent elements of a square are along its columns; the same on all ranks.
    """
    # Tiles have a multiple of 8 rows, and rows that do not exist have places, too. So several are stored at a time.
    rows = row // 8 * 8 + numbers_along(acc, 0)
    cols = column + numbers_along(acc, 1)
    in_half = col + cols % COLS
    inside = (rows // 8 * 8 < shape[0])[:, None] & (in_half < shape[1])[None, :]
    # Of `shape`, some kernels pass on where their own columns end. Each half begins with separate squares.
    half = (N + 15) // 16
    square = (rows // 8 * (2 * half))[:, None] + (in_half // 8 + cols // COLS * half)[None, :]
    cols = in_half
    if TURNED:
        at = square * 64 + (cols % 8 * 8)[None, :] + (rows % 8)[:, None]
    else:
        at = square * 64 + (rows % 8 * 8)[:, None] + (cols % 8)[None, :]
    used = tl.load(uses + square, mask=inside, other=0)
    # At most 2^31 places: 32 bits take fewer registers.
    return (used & 1) * (size * RANKS) + at, inside, uses + square, used


@triton.jit
def bits_of(acc):
    """The bits of partial sums, none of which are `EMPTY`: 0 stands for -0."""
    bits = acc.to(tl.int32, bitcast=True)
    return tl.where(bits == EMPTY, 0, bits)


@triton.jit
def send(
    acc, column, buffers, uses, shape, row, col, size, N, COLS: tl.constexpr, RANK: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Store this rank's partial sums in the memory of all others; see `places_of`."""
    if acc.numel > (TOGETHER if IN_GLUON else TOGETHER_IN_BLOCKS):
        first, second, rows, columns = halves(acc)
        send(first, column, buffers, uses, shape, row, col, size, N, COLS, RANK, TURNED)
        send(second, column + columns, buffers, uses, shape, row + rows, col, size, N, COLS, RANK, TURNED)
    else:
        first, inside, _, _ = places_of(
            acc, column, uses, shape, row, col, size, N, COLS, len(buffers), TURNED
        )
        own = bits_of(acc)
        for rank in tl.static_range(len(buffers)):
            if rank != RANK:
                tl.store(buffers[rank] + first + RANK * size, own, mask=inside)


@triton.jit
def receive(
    acc, column, buffers, uses, failed, end, shape, row, col, size, N, COLS: tl.constexpr, RANK: tl.constexpr,
    TURNED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The sum of this rank's partial sums and those that the others store here; see `places_of` and `arrived`.

    With `HALF`, `acc` is what `packed` returns, and there are two sums: those of the first numbers, and of the second.
    """
    if acc.numel > (TOGETHER if IN_GLUON else TOGETHER_IN_BLOCKS):
        first, second, rows, columns = halves(acc)
        right, below = column + columns, row + rows
        first = receive(
            first, column, buffers, uses, failed, end, shape, row, col, size, N, COLS, RANK, TURNED, HALF
        )
        second = receive(
            second, right, buffers, uses, failed, end, shape, below, col, size, N, COLS, RANK, TURNED, HALF
        )
        if HALF is None:
            return together(first, second, acc)
        else:
            return together(first[0], second[0], acc), together(first[1], second[1], acc)
    else:
        broken = uses + size // 64
        # As in `computed_anew`: the compiler does not know that this adds 0.
        if IN_GLUON:
            row = computed_anew(row)
        else:
            row += tl.minimum(tl.load(broken, volatile=True), 0)
        first, inside, counters, used = places_of(
            acc, column, uses, shape, row, col, size, N, COLS, len(buffers), TURNED
        )  # fmt: skip
        # All threads read the counters before any thread increments one.
        if IN_GLUON:
            barrier()
        else:
            tl.debug_barrier()
        own = bits_of(acc)
        total = acc
        upper = acc
        for rank in tl.static_range(len(buffers)):
            bits = own
            if rank != RANK:
                bits = arrived(buffers[RANK] + first + rank * size, inside, end, broken, failed, rank)
            if HALF is None:
                part = bits.to(acc.dtype, bitcast=True)
            else:
                part, high = unpacked(bits, HALF)
                upper = high if rank == 0 else upper + high
            if rank == 0:
                total = part
            else:
                total += part
        tl.store(counters, used + 1, mask=inside)
        if HALF is None:
            return total
        else:
            return total, upper


@triton.jit
def of_ranks(
    acc, args, shape, sizes, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr,
    EPILOGUE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, SCALED: tl.constexpr, AHEAD: tl.constexpr,
    TURNED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """An epilogue of the sum over all ranks. With `HALF`, partial sums are rounded to this type, see `packs`.

    Args:
        args: the ranks' buffers, `uses`, with SCALED the scales of this rank's columns, the places of a rank, columns
            of the product, `failed` and `patience`; and the epilogue's own. With AHEAD a pair of these and of what the
            epilogue has read ahead.
    """
    read = None
    given = args
    if AHEAD:
        given, read = args
    FACTS: tl.constexpr = RANKS + 1 + SCALED
    size, N, failed, patience = given[FACTS], given[FACTS + 1], given[FACTS + 2], given[FACTS + 3]
    buffers, uses = given[:RANKS], given[RANKS]
    if SCALED:
        cols = numbers_along(acc, 1)
        in_half = col + cols % COLS
        places = given[RANKS + 1] + in_half + cols // COLS * (N // 2)
        acc = acc.to(tl.float32) * tl.load(places, mask=in_half < shape[1], other=0.0).to(tl.float32)[None, :]
    PACKS: tl.constexpr = packs(acc.type, HALF)
    mine = acc
    if PACKS:
        low, high, _, _ = halves(acc)
        mine = packed(low, high, HALF)
    send(mine, 0, buffers, uses, shape, row, col, size, N, COLS, RANK, TURNED)
    end = patience
    if IN_GLUON:
        # After an exchange has failed, kernels do not wait any more.
        patience = tl.where(tl.load(uses + size // 64, volatile=True) == 0, patience, 0)
        end = time_now(row) + patience.to(tl.int64) * 1000
    OF: tl.constexpr = HALF if PACKS else None
    total = receive(mine, 0, buffers, uses, failed, end, shape, row, col, size, N, COLS, RANK, TURNED, OF)
    if PACKS:
        total = together(total[0], total[1], acc)
    own = given[FACTS + 4 :]
    if AHEAD:
        own = (own, read)
    return EPILOGUE(total, own, shape, sizes, batch, row, col, ROWS, COLS, WIDE)


@triton.jit
def before_sum(
    args, shape, sizes, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr,
    PREFETCH: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """The values that an epilogue reads ahead. Its own arguments begin at number `FIRST`."""
    return PREFETCH(args[FIRST:], shape, sizes, batch, row, col, ROWS, COLS, WIDE)
