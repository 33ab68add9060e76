"""Tiles of any width that are cut along K; see `any_width`.

`rings.combine` adds parts up in registers, but an accumulator of any width leaves none. Here, the last warpgroup to
store its part of a tile copies the other parts into the ring, and adds them up while it finishes the tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from . import order
from .any_width_acc import in_block, sums_of, zeros_of
from .any_width_load import shared_at, unused
from .dialect import in_gluon, value_of
from .rings import last_to_arrive

part_of = in_gluon(order.part_of)


@builtin
def store_partial(acc, to, width, OWN, PART, _semantic=None):
    """Stores a warpgroup's accumulator in memory, each thread 16 bytes at a time.

    Args:
        acc: what `multiply_steps` gives.
        to: the address, in a block as `BLOCK8` has them.
        width: the tile's width, likewise in a block.
        OWN, PART: see `multiply_steps`.
    """
    blocks, of_part, rows = len(acc.values), value_of(PART) // 8, value_of(OWN) // 64
    to_, width_ = f"${4 + 4 * blocks}", f"${8 + 4 * blocks}"
    lines = []
    for i in range(0, blocks, of_part):
        row, first = divmod(8 * i, 8 * blocks // rows)
        # The last part may store some blocks again.
        lines.append(
            f"sub.s32 of, {width_}, {8 * of_part}; min.s32 of, of, {first}; mad.lo.s32 of, {width_}, {row}, of;"
            f"mad.lo.s32 of, of, 256, thread; cvt.s64.s32 at, of; add.s64 at, at, {to_};"
            f"setp.gt.s32 own, {width_}, {first};"
        )
        lines += [
            f"@own st.global.v4.f32 [at + {2048 * j}], {{{', '.join(f'${4 * (1 + i + j) + n}' for n in range(4))}}};"
            for j in range(of_part)
        ]
    gl.inline_asm_elementwise(
        "{ .reg .pred own; .reg .b32 thread, of; .reg .b64 at; mov.u32 thread, %tid.x; and.b32 thread, thread, 127;"
        f"shl.b32 thread, thread, 4; {''.join(lines)} {''.join(f'mov.b32 ${i}, 0;' for i in range(4))} }}",
        ",".join(["=r"] * 4 + ["f"] * (4 * blocks) + ["l"] * 4 + ["r"] * 4), [*acc.values, to, width],
        dtype=gl.int32, is_pure=False, pack=4, _semantic=_semantic,
    )  # fmt: skip


@builtin
def fetch_partial(to, at, size, _semantic=None):
    """Begins to copy what a warpgroup has stored into shared memory; each thread will read what it copies.

    Args:
        to, at: the addresses in shared and in global memory.
        size: in bytes.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred more; .reg .b32 thread, to, done; .reg .b64 at; mov.u32 thread, %tid.x;"
        "and.b32 thread, thread, 127; mad.lo.s32 to, thread, 16, $1; mad.wide.s32 at, thread, 16, $2;"
        "mov.b32 done, 0;\nNEXT: cp.async.cg.shared.global [to], [at], 16; add.s32 to, to, 2048; add.s64 at, at, 2048;"
        "add.s32 done, done, 2048; setp.lt.s32 more, done, $3; @more bra NEXT; mov.b32 $0, 0; }",
        "=r,r,l,r", [to, at, size], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@builtin
def fetched(_semantic=None):
    """Waits until this thread's copies have arrived."""
    gl.inline_asm_elementwise(
        "cp.async.wait_all; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@builtin
def add_fetched(blocks, at, _semantic=None):
    """Adds fetched numbers to some blocks of an accumulator. Their address in shared memory comes in a block."""
    numbers = 4 * len(blocks.values)
    lines = [
        f"ld.shared.v4.f32 {{n0, n1, n2, n3}}, [at + {2048 * i}];"
        + "".join(f"add.f32 ${4 * i + j}, ${4 * i + j}, n{j};" for j in range(4))
        for i in range(len(blocks.values))
    ]
    constraints = ["=f"] * numbers + [str(i) for i in range(numbers)] + ["r"] * 4
    made = gl.inline_asm_elementwise(
        "{ .reg .f32 n0, n1, n2, n3; .reg .b32 thread, at; mov.u32 thread, %tid.x; and.b32 thread, thread, 127;"
        f"mad.lo.s32 at, thread, 16, ${2 * numbers}; {''.join(lines)} }}",
        ",".join(constraints), [*blocks.values, at],
        dtype=[gl.float32] * len(blocks.values), is_pure=False, pack=4, _semantic=_semantic,
    )  # fmt: skip
    return gl.tuple(list(made))


@gluon.jit
def combine(
    acc, unit, ring, state, workspace, width, OWN: gl.constexpr, PART: gl.constexpr, GROUP: gl.constexpr,
    GROUPS: gl.constexpr, RING_BYTES: gl.constexpr,
):  # fmt: skip
    """Stores a part of a tile. The last warpgroup to do so copies the other parts into the ring; none waits.

    Returns:
        Whether this warpgroup is the last one, and the argument `cut` of `summed`.
    """
    whole, parts = state[1], state[2]
    partials, semaphores = workspace
    # Bytes of a warpgroup's partial sum.
    size = OWN * width * 4
    own, tile = part_of(unit - whole, state[4] * state[5] - whole, state[6][3])
    first = gl.cast(partials, gl.int64) + gl.cast(tile * parts * GROUPS + GROUP, gl.int64) * size
    to = first + gl.cast(own * GROUPS, gl.int64) * size
    store_partial(acc, in_block(to), in_block(width), OWN, PART)
    done = last_to_arrive(semaphores + tile * GROUPS + GROUP, parts - 1)
    # Each warpgroup has its share of the ring, in whole rows.
    address = shared_at(GROUP * (RING_BYTES // 128 // GROUPS * 128))
    if done:
        mbarrier.wait(unused(ring), 0)
        for i in range(parts - 1):
            other = gl.where(i < own, i, i + 1)
            fetch_partial(address + i * size, first + gl.cast(other * GROUPS, gl.int64) * size, size)
        fetched()
    return done, (unit >= whole, own, parts, address, size)


@gluon.jit
def summed(blocks, cut, first):
    """Adds up, in order, the parts of some accumulator blocks, one of which this warpgroup has in registers.

    Args:
        cut: (whether the tile is cut, which part this is, how many there are, where the others are, size of one).
        first: which the first of the blocks is.
    """
    is_cut, own, parts, address, size = cut
    if is_cut:
        total = zeros_of(len(blocks))
        for part in range(parts):
            if part == own:
                total = sums_of(total, blocks)
            else:
                at = address + gl.where(part < own, part, part - 1) * size + first * 2048
                total = add_fetched(total, in_block(at))
        blocks = total
    return blocks
