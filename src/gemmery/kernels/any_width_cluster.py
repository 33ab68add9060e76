"""Tiles of any width whose parts along K are summed by a cluster of programs; see `any_width`.

Each program has one part of one tile, and the programs that have the parts of a tile are a cluster. They run at the
same time and can store into each other's shared memory. Each of them finishes some of the tile's columns: it receives
what all programs have summed for these columns, and adds the sums up in the order of the parts. On an H200, this takes
0.2 us, and a meeting through global memory, as in `any_width_cut`, 1.8 us.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from . import order
from .any_width_acc import in_block
from .any_width_finish import finish_part
from .any_width_load import shared_at
from .any_width_loop import STAGES
from .dialect import in_gluon, value_of

quotient = in_gluon(order.quotient)

#: The most programs of a cluster that every GPU with clusters runs.
MOST = gl.constexpr(8)
#: Bytes of a block of 64 by 8 sums.
BLOCK_BYTES = gl.constexpr(2048)
#: Loading warps of programs in clusters. All threads of a program have to arrive at the cluster's barrier. Triton would
#: pad fewer loading warps to a warpgroup with warps that never arrive.
LOADERS = gl.constexpr(4)


def _in_each_thread(assembly, _semantic, is_pure=False):
    """The number that assembly makes in each thread, in $0."""
    return gl.inline_asm_elementwise(
        assembly, "=r", [], dtype=gl.int32, is_pure=is_pure, pack=1, _semantic=_semantic
    )


@builtin
def arrive_in_cluster(_semantic=None):
    """Arrives at the cluster's barrier, once in each thread of a program.

    The threads that have initialized barriers have made this visible by a fence. A release here would wait for all of
    a thread's memory operations.
    """
    _in_each_thread("barrier.cluster.arrive.relaxed.aligned; mov.b32 $0, 0;", _semantic)


@builtin
def wait_for_cluster(_semantic=None):
    """Waits until all threads of the cluster have arrived."""
    _in_each_thread("barrier.cluster.wait.acquire.aligned; mov.b32 $0, 0;", _semantic)


@builtin
def rank_in_cluster(_semantic=None):
    """The number of the program in its cluster, which is that of its part."""
    return _in_each_thread("mov.u32 $0, %cluster_ctarank;", _semantic, is_pure=True)


@builtin
def send_parts(acc, to, arrived, turns, awaited, OWN, PART, _semantic=None):
    """Stores each part of an accumulator into the shared memory of the program that finishes it, this one included.

    Program number `i` of the cluster finishes `turns` parts of each 64 rows of X, from number `i * turns` on.

    Args:
        acc: what `multiply_steps` gives.
        to: the address in each program's shared memory where the parts that this program sends begin, in a block as
            `BLOCK8` has them; likewise the others.
        arrived: the address of the barrier at which they arrive.
        awaited: bytes that this warpgroup will receive.
        OWN, PART: see `multiply_steps`.
    """
    blocks, of_part, rows = len(acc.values), value_of(PART) // 8, value_of(OWN) // 64
    parts = blocks // rows // of_part
    to_, arrived_, turns_, awaited_ = (f"${4 * (1 + blocks + i)}" for i in range(4))
    lines = []
    for row in range(rows):
        lines.append("mov.b32 target, 0; mov.b32 turn, 0;")
        for part in range(parts):
            lines.append(
                f"mad.lo.s32 at, turns, {row}, turn; mad.lo.s32 at, at, {of_part * BLOCK_BYTES.value}, first;"
                f"mapa.shared::cluster.u32 at, at, target; mapa.shared::cluster.u32 there, {arrived_}, target;"
            )
            for i in range(of_part):
                number = 4 * (1 + (row * parts + part) * of_part + i)
                lines.append(
                    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
                    f" [at + {i * BLOCK_BYTES.value}], {{{', '.join(f'${number + n}' for n in range(4))}}}, [there];"
                )
            lines.append(
                "add.s32 turn, turn, 1; setp.eq.s32 last, turn, turns; @last mov.b32 turn, 0;"
                "@last add.s32 target, target, 1;"
            )
    numbers = [to, arrived, turns, awaited]
    gl.inline_asm_elementwise(
        "{ .reg .pred own, last; .reg .b32 thread, first, at, there, turns, turn, target; mov.u32 thread, %tid.x;"
        f"and.b32 thread, thread, 127; mad.lo.s32 first, thread, 16, {to_}; mov.b32 turns, {turns_};"
        f"setp.eq.s32 own, thread, 0; @own mbarrier.arrive.expect_tx.shared::cta.b64 _, [{arrived_}], {awaited_};"
        f"{''.join(lines)} {''.join(f'mov.b32 ${i}, 0;' for i in range(4))} }}",
        ",".join(["=r"] * 4 + ["f"] * (4 * blocks) + ["r"] * (4 * len(numbers))), [*acc.values, *numbers],
        dtype=gl.int32, is_pure=False, pack=4, _semantic=_semantic,
    )  # fmt: skip


@builtin
def received(at, size, programs, PART, _semantic=None):
    """The blocks of a part, summed over the programs of a cluster in their order.

    Args:
        at: the address in shared memory where the first program's blocks are, in a block as `BLOCK8` has them; likewise
            the others.
        size: bytes from one program's to those of the next.
        programs: how many there are.
    """
    blocks = value_of(PART) // 8
    count = 4 * blocks
    at_, size_, programs_ = (f"${count + 4 * i}" for i in range(3))
    lines = [f"mov.f32 ${i}, 0f00000000;" for i in range(count)]
    for program in range(MOST.value):
        numbers = [f"n{count * (program % 4) + i}" for i in range(count)]
        # The loads of four programs are in flight together.
        if program % 4 == 0:
            ahead = range(program, program + 4)
            for i in ahead:
                lines += [f"mov.f32 n{count * (i % 4) + j}, 0f00000000;" for j in range(count)]
                lines.append(f"setp.gt.s32 there, {programs_}, {i};")
                lines += [
                    f"@there ld.shared.v4.f32 {{{', '.join(f'n{count * (i % 4) + 4 * j + n}' for n in range(4))}}},"
                    f" [at + {BLOCK_BYTES.value * j}];"
                    for j in range(blocks)
                ]
                lines.append(f"add.s32 at, at, {size_};")
        lines += [f"add.f32 ${i}, ${i}, {number};" for i, number in enumerate(numbers)]
        if program == 3:
            lines.append(f"setp.le.s32 there, {programs_}, 4; @there bra DONE;")
    made = gl.inline_asm_elementwise(
        f"{{ .reg .pred there; .reg .f32 n<{4 * count}>; .reg .b32 at, thread; mov.u32 thread, %tid.x;"
        f"and.b32 thread, thread, 127; mad.lo.s32 at, thread, 16, {at_}; {''.join(lines)}\nDONE: }}",
        ",".join(["=&f"] * count + ["r"] * 12), [at, size, programs],
        dtype=[gl.float32] * blocks, is_pure=False, pack=4, _semantic=_semantic,
    )  # fmt: skip
    return gl.tuple(list(made))


@gluon.jit
def finish_in_cluster(
    acc, out, slots, ring, args, shape, row, col, width, cluster, own_slot, GROUP: gl.constexpr,
    EPILOGUE: gl.constexpr, CAST: gl.constexpr, SWAP: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr,
    OWN: gl.constexpr, BUFFERS: gl.constexpr, PART: gl.constexpr, RING_BYTES: gl.constexpr, BARRIERS_AT: gl.constexpr,
):  # fmt: skip
    """Sends a warpgroup's sums to the programs that finish them, and finishes its own share of the tile.

    The sums come into the end of the ring, where a launch has no stages.

    Args:
        row, col, width, own_slot: see `any_width_finish.finish_tile`.
        cluster: how many programs it has, and the divisor of this, see `order.quotient`.
    """
    ROWS: gl.constexpr = OWN // 64
    BYTES: gl.constexpr = PART // 8 * BLOCK_BYTES
    BARRIER: gl.constexpr = 2 * STAGES + 4 + GROUP
    rank = rank_in_cluster()
    parts = gl.cdiv(width, PART)
    programs = cluster[0]
    turns = quotient(parts + programs - 1, cluster[1])
    size = ROWS * turns * BYTES
    first = rank * turns
    own = gl.maximum(gl.minimum(parts - first, turns), 0)
    at = shared_at(RING_BYTES) - (GROUP + 1) * programs * size
    wait_for_cluster()
    send_parts(
        acc, in_block(at + rank * size), in_block(shared_at(BARRIERS_AT) + 8 * BARRIER), in_block(turns),
        in_block(programs * ROWS * own * BYTES), OWN, PART,
    )  # fmt: skip
    mbarrier.wait(ring[0].index(BARRIER), 0)
    for m in gl.static_range(ROWS):
        for i in range(own):
            blocks = received(
                in_block(at + (m * turns + i) * BYTES), in_block(size), in_block(programs), PART
            )
            finish_part(
                blocks, out, slots, ring, own_slot, own_slot, gl.to_tensor(False), m * own + i, 0, 0, args, shape,
                row + 64 * m, col + gl.minimum((first + i) * PART, width - PART), None, None, GROUP, EPILOGUE, CAST,
                SWAP, X_FORM, Y_FORM, BUFFERS,
            )  # fmt: skip
