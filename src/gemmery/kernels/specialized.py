"""The matrix product with specialized warps: one loads, and warpgroups multiply, each at its own pace.

For Hopper, in Gluon. A warpgroup, which is four warps, multiplies 64 rows of what the tensor cores take on their left.
Between two products it unpacks a weight's words. Warpgroups do not wait for each other, so the tensor cores work for
one while the other unpacks. This is how CUTLASS's mixed-input kernels keep the tensor cores busy.

The warp that loads (`produce`) and the warpgroups (`consume`) share the `ring`: blocks of A and B for each stage of the
pipeline, of the weight's group parameters where there are any, which are its scales and shifts, and for each stage two
barriers. `full` is complete when all blocks have arrived, `free` when all warpgroups that use them have.

MULTIPLY is the K loop of a warpgroup,

    multiply(
        ring, step_args, shape, row, col, first_k, last_k, stage, phase, WARPGROUP, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        PAIRED, TURNS,
    ) -> (acc, stage, phase)

from `first_k` to `last_k`; `multiply_packed` is made into it by fixing its last parameters. It gives the transposed
product, and the warpgroups divide the tile's columns between them.

In a tile of 64 columns, each warpgroup has all columns, and they take turns along K, a step each. In the end the first
one adds the other one's sum to its own. So there are enough tiles for all multiprocessors where tiles of 128 columns
would have to be cut along K between programs. The parts of such tiles meet in memory, which takes up to a tenth of the
time with few rows. Each stage belongs to one warpgroup, so the number of stages must be even: a barrier only tells the
parity of uses, and a warpgroup that is ahead would mistake the other one's use for its own.

With PAIRED the columns of a tile come from both halves of the weight, and two of them make one of the output.

`shape` and `state` say what there is to do, see `rings`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .dialect import in_gluon
from .packed import of_rows
from .rings import (
    READ_ONCE,
    begin_roles,
    combine,
    finish,
    following,
    later,
    let_next_begin,
    wait_for_earlier,
)

OF_ROWS = in_gluon(of_rows)

#: Rows of the tensor cores' left operand that a warpgroup multiplies; warpgroups; registers of a thread in the second
#: one and of the loader's. The first one has the rest, 224.
ROWS, WARPGROUPS, REGISTERS, LOADER_REGISTERS = (gl.constexpr(x) for x in (64, 2, 232, 48))

# Names that differ between versions of Triton: these are of 3.6 and of later ones.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def copy_group_params(
    x, blocks, arrived, group, col, groups, columns, WIDTH: gl.constexpr, PAIRED: gl.constexpr
):  # fmt: skip
    """Copies group parameters, from number `group` on, into a stage; `arrived` is not complete before they are there.

    There are only a few bytes of them for each column, for which TMA has no layout.
    """
    VECTOR: gl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    if PAIRED:
        HALVES: gl.constexpr = gl.BlockedLayout(
            [1, 1, VECTOR], [32 * VECTOR // WIDTH, 2, WIDTH // 2 // VECTOR], [1, 1, 1], [2, 1, 0]
        )
        row = (
            gl.arange(0, blocks.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, HALVES)))[:, None, None] + group
        )
        half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))[None, :, None]
        column = (
            gl.arange(0, WIDTH // 2, gl.SliceLayout(0, gl.SliceLayout(1, HALVES)))[None, None, :] + col // 2
        )
        # The last term is true, and gives the mask the shape of the copy.
        mask = (row < groups) & (column < columns // 2) & (half < 2)
        _copy(blocks, x + row * columns + half * (columns // 2) + column, mask)
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout(
            [1, VECTOR], [32 * VECTOR // WIDTH, WIDTH // VECTOR], [1, 1], [1, 0]
        )
        row = gl.arange(0, blocks.shape[0], gl.SliceLayout(1, LAYOUT))[:, None] + group
        column = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :] + col
        _copy(blocks, x + row * columns + column, (row < groups) & (column < columns))
    async_copy.mbarrier_arrive(arrived)


@gluon.jit
def load_b(b, place, arrived, block, STREAM: gl.constexpr):
    """Loads a block of B. With `STREAM` it is read once, and is the first to leave L2."""
    if STREAM:
        _load(b, place, arrived, block, cache_policy=READ_ONCE)
    else:
        _load(b, place, arrived, block)


@gluon.jit
def load(
    a, b, step_args, ring, row, col, first_k, last_k, stage, phase,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PER: gl.constexpr, GROUP: gl.constexpr,
    PAIRED: gl.constexpr, STREAM: gl.constexpr, ROTATE: gl.constexpr,
):  # fmt: skip
    """Loads the blocks of one tile, from `first_k` to `last_k`, as far ahead as there are stages.

    With ROTATE each column of tiles begins at another step, and wraps around. Otherwise all would need the same block
    of A at once, and if that is a single row, all would read it from one slice of L2.

    With GROUP `step_args` is (scales, shifts, groups, columns): two matrices with a row for each group, the second of
    which may be None, and their sizes.
    """
    a_blocks, b_blocks, scale_blocks, shift_blocks, full, free = ring
    steps = gl.cdiv(last_k - first_k, BLOCK_K)
    ahead = col // BLOCK_N % steps * BLOCK_K if ROTATE else 0
    for own_k in range(first_k, last_k, BLOCK_K):
        k = own_k + ahead
        if ROTATE:
            k = gl.where(k < last_k, k, k - steps * BLOCK_K)
        mbarrier.wait(free.index(stage), phase)
        arrived = full.index(stage)
        if GROUP > 0:
            scales, shifts, groups, columns = step_args
            group = k // GROUP
            copy_group_params(
                scales, scale_blocks.index(stage), arrived, group, col, groups, columns, BLOCK_N, PAIRED
            )  # fmt: skip
            if shifts is not None:
                copy_group_params(
                    shifts, shift_blocks.index(stage), arrived, group, col, groups, columns, BLOCK_N, PAIRED
                )  # fmt: skip
        mbarrier.expect(arrived, a.block_type.nbytes + b.block_type.nbytes)
        _load(a, [row, k], arrived, a_blocks.index(stage))
        if PAIRED:
            load_b(b, [0, col // 32, k // (2 * PER), 0], arrived, b_blocks.index(stage), STREAM)
        else:
            load_b(b, [col // 16, k // (2 * PER), 0], arrived, b_blocks.index(stage), STREAM)
        stage, phase = following(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def produce(
    a, b, step_args, ring, shape, state, PLACE: gl.constexpr, TAIL_PLACE: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BAND_M: gl.constexpr, STAGES: gl.constexpr, PER: gl.constexpr,
    GROUP: gl.constexpr, PAIRED: gl.constexpr, SPLIT: gl.constexpr, STREAM: gl.constexpr, ROTATE: gl.constexpr,
):  # fmt: skip
    """Loads what `consume` multiplies, in the same order.

    Args:
        PER: numbers in a word of B.
        GROUP: numbers along K with one scale, 0 if there are none.
    """
    tiles, tail_units = state[0], state[1]
    stage = gl.to_tensor(0)
    # The parity before the first: what has not been used yet is free.
    phase = gl.to_tensor(1)
    for unit in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, row, col, _, first_k, last_k = PLACE(unit, state, shape, BLOCK_M, BLOCK_N, BAND_M)
        stage, phase = load(
            a, b, step_args, ring, row, col, first_k, last_k, stage, phase, BLOCK_N, BLOCK_K, STAGES, PER, GROUP,
            PAIRED, STREAM, ROTATE,
        )  # fmt: skip
    if SPLIT:
        unit = gl.program_id(0)
        if unit < tail_units:
            _, row, col, _, first_k, last_k = TAIL_PLACE(unit, state, shape, BLOCK_M, BLOCK_N, BAND_M)
            stage, phase = load(
                a, b, step_args, ring, row, col, first_k, last_k, stage, phase, BLOCK_N, BLOCK_K, STAGES, PER, GROUP,
                PAIRED, STREAM, ROTATE,
            )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Packed weights


@gluon.constexpr_function
def words_layout(lines, paired):
    """A warpgroup's words, as `formats.packing` deals them out to threads: (strips, lines, 32).

    If columns are `paired`, (2, strips, lines, 32), a thread has words of columns as far apart as the halves, and
    otherwise of columns that are eight apart.
    """
    more = [4 << i for i in range((lines // 4).bit_length() - 1)]
    if paired:
        return gl.DistributedLinearLayout(
            reg_bases=[[0, 0, 0, 1], [1, 0, 0, 0], *([0, 0, block, 0] for block in more)],
            lane_bases=[[0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 0, 16], [0, 0, 1, 0], [0, 0, 2, 0]],
            warp_bases=[[0, 0, 0, 2], [0, 1, 0, 0]],
            block_bases=[],
            shape=[2, 2, lines, 32],
        )
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], *([0, block, 0] for block in more)],
        lane_bases=[[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0]],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, lines, 32],
    )


@gluon.constexpr_function
def spread_layout(blocks, groups):
    """The same words as rows by groups by words of a group, to which group parameters are spread."""
    each = 8 * blocks // groups

    def at(row, word):
        return [row, word // each, word % each]

    return gl.DistributedLinearLayout(
        reg_bases=[at(0, 1), at(8, 0), *(at(0, 8 << i) for i in range(blocks.bit_length() - 1))],
        lane_bases=[at(0, 2), at(0, 4), at(1, 0), at(2, 0), at(4, 0)],
        warp_bases=[at(16, 0), at(32, 0)],
        block_bases=[],
        shape=[64, groups, each],
    )


@gluon.jit
def own_words(
    blocks, WARPGROUP: gl.constexpr, K: gl.constexpr, COLS: gl.constexpr, PER: gl.constexpr,
    PAIRED: gl.constexpr,
):  # fmt: skip
    """A warpgroup's words of a stage, those of `COLS` numbers along K from `K` on, as rows of 64 columns.

    With `PAIRED` columns of both halves by eights.
    """
    LINES: gl.constexpr = COLS // (2 * PER)
    LAYOUT: gl.constexpr = words_layout(LINES, PAIRED)
    BLOCKS: gl.constexpr = COLS // (8 * PER)
    if PAIRED:
        own = blocks.slice(2 * WARPGROUP, 2, 1).slice(K // (2 * PER), LINES, 2).load(LAYOUT)
        # Half of the columns, strip, block, g, q, eight, odd or even.
        words = own.reshape([2, 2, BLOCKS, 8, 4, 2, 2]).permute((1, 5, 0, 3, 2, 4, 6))
        return words.reshape([ROWS, 8 * BLOCKS])
    else:
        own = blocks.slice(4 * WARPGROUP, 4).slice(K // (2 * PER), LINES, 1).load(LAYOUT)
        return OF_ROWS(own, COLS, ROWS, PER)


@gluon.constexpr_function
def group_params_layout(groups, paired):
    """A warpgroup's group parameters of a stage, (groups, 64): for each word's row what belongs to it.

    If columns are `paired`, (groups, 2, 32).
    """
    more = [1 << i for i in range(groups.bit_length() - 1)]
    if paired:
        return gl.DistributedLinearLayout(
            reg_bases=[[0, 1, 0], *([group, 0, 0] for group in more)],
            lane_bases=[[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
            warp_bases=[[0, 0, 8], [0, 0, 16]],
            block_bases=[],
            shape=[groups, 2, 32],
        )
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 8], *([group, 0] for group in more)],
        lane_bases=[[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 16], [0, 32]],
        block_bases=[],
        shape=[groups, 64],
    )


@gluon.jit
def as_rows(piece, BLOCKS: gl.constexpr):
    """Group parameters, (rows, groups), where `spread` wants them; no number moves."""
    LAYOUT: gl.constexpr = gl.SliceLayout(2, spread_layout(BLOCKS, piece.shape[1]))
    return gl.convert_layout(piece, LAYOUT, assert_trivial=True)


@gluon.jit
def own_group_params(
    blocks, WARPGROUP: gl.constexpr, K: gl.constexpr, COLS: gl.constexpr, PER: gl.constexpr, GROUP: gl.constexpr,
    PAIRED: gl.constexpr,
):  # fmt: skip
    """The group parameters of `own_words`, (rows, groups): one for each piece of a block of words with own groups."""
    COUNT: gl.constexpr = COLS // GROUP if COLS > GROUP else 1
    BLOCKS: gl.constexpr = COLS // (8 * PER)
    blocks = blocks.slice(K // GROUP, COUNT, 0)
    LAYOUT: gl.constexpr = group_params_layout(COUNT, PAIRED)
    if PAIRED:
        own = blocks.slice(ROWS // 2 * WARPGROUP, ROWS // 2, 2).load(LAYOUT)
        # Half of the columns, strip, g.
        rows = own.reshape([COUNT, 2, 4, 8]).permute((2, 1, 3, 0)).reshape([ROWS, COUNT])
    else:
        rows = blocks.slice(ROWS * WARPGROUP, ROWS, 1).load(LAYOUT).permute((1, 0))
    if GROUP >= 8 * PER:
        return (as_rows(rows, BLOCKS),)
    elif GROUP == 4 * PER:
        first, second = rows.reshape([ROWS, BLOCKS, 2]).split()
        return (as_rows(first, BLOCKS), as_rows(second, BLOCKS))
    else:
        even, odd = rows.reshape([ROWS, BLOCKS, 2, 2]).split()
        first, third = even.split()
        second, fourth = odd.split()
        return (
            as_rows(first, BLOCKS),
            as_rows(second, BLOCKS),
            as_rows(third, BLOCKS),
            as_rows(fourth, BLOCKS),
        )


@gluon.jit
def spread(pieces, PART: gl.constexpr, PARTS: gl.constexpr, BLOCKS: gl.constexpr):
    """The scales or shifts of a part of each word: (rows, groups) as (rows, words); see `packed.unpack`."""
    piece = pieces[PART * len(pieces) // PARTS]
    LAYOUT: gl.constexpr = spread_layout(BLOCKS, piece.shape[1])
    EACH: gl.constexpr = 8 * BLOCKS // piece.shape[1]
    like = gl.full([piece.shape[0], piece.shape[1], EACH], 0, piece.dtype, LAYOUT)
    value, _ = gl.broadcast(gl.expand_dims(piece, 2), like)
    return value.reshape([piece.shape[0], 8 * BLOCKS])


@gluon.jit
def own_weight(
    ring, stage, WARPGROUP: gl.constexpr, K: gl.constexpr, COLS: gl.constexpr, PAIRED: gl.constexpr,
    UNPACK: gl.constexpr, PER: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A warpgroup's 64 columns of a stage, as numbers: `COLS` of them along K, from `K` on."""
    _, b_blocks, scale_blocks, shift_blocks, _, _ = ring
    words = own_words(b_blocks.index(stage), WARPGROUP, K, COLS, PER, PAIRED)
    scale = (
        None
        if scale_blocks is None
        else own_group_params(scale_blocks.index(stage), WARPGROUP, K, COLS, PER, GROUP, PAIRED)
    )
    shift = (
        None
        if shift_blocks is None
        else own_group_params(shift_blocks.index(stage), WARPGROUP, K, COLS, PER, GROUP, PAIRED)
    )
    return UNPACK(words, scale, shift, COLS, ROWS, spread)


@gluon.jit
def multiply_packed(
    ring, step_args, shape, row, col, first_k, last_k, stage, phase, WARPGROUP: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    PAIRED: gl.constexpr, TURNS: gl.constexpr, UNPACK: gl.constexpr, PER: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """64 columns of a tile, from `first_k` to `last_k`: the transposed product with a packed weight.

    If warpgroups take turns, every other step of it.

    A step is unpacked in pieces of eight lines of words, the least that can be cut out of shared memory, and the tensor
    cores work on one while the next is unpacked.

    Args:
        step_args: what `load` takes; it has come with the stage.
        UNPACK: `packed.unpack`, made for the format, whose words hold `PER` numbers.
        GROUP: numbers along K that share a scale; 0 if none do.
    """
    a_blocks, _, _, _, full, free = ring
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    COLS: gl.constexpr = min(BLOCK_K, 16 * PER)
    PLACE: gl.constexpr = 0 if TURNS else WARPGROUP
    EVERY: gl.constexpr = WARPGROUPS if TURNS else 1
    after = later(stage, phase, gl.cdiv(last_k - first_k, BLOCK_K), STAGES)
    # Odd stages are the second warpgroup's, whether the tile begins with one or not.
    first = (STAGES + WARPGROUP - stage) % EVERY
    stage, phase = later(stage, phase, first, STAGES)
    acc = gl.zeros([ROWS, BLOCK_M], gl.float32, ACC)
    if not TURNS:
        # Otherwise there is a path around the loop, for which the code after it is computed in advance and separately.
        gl.assume(first_k < last_k)
    for _ in range(first_k + first * BLOCK_K, last_k, EVERY * BLOCK_K):
        mbarrier.wait(full.index(stage), phase)
        weights = ()
        for k in gl.static_range(0, BLOCK_K, COLS):
            weight = own_weight(ring, stage, PLACE, k, COLS, PAIRED, UNPACK, PER, GROUP)
            weight = gl.convert_layout(weight, LEFT, assert_trivial=True)
            x = a_blocks.index(stage).slice(k, COLS, 1)
            acc = hopper.warpgroup_mma(weight, x.permute((1, 0)), acc, is_async=True)
            weights += (weight,)  # type: ignore[assignment]
        # The tensor cores read the pieces from registers, which keep them until then.
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,) + weights)[0]  # noqa: RUF005
        mbarrier.arrive(free.index(stage))
        for _ in gl.static_range(EVERY):
            stage, phase = following(stage, phase, STAGES)
    return acc, after[0], after[1]


# ---------------------------------------------------------------------------------------------------------------------
# After the K loop


@gluon.jit
def joined(acc, meeting, parity, WARPGROUP: gl.constexpr):
    """Adds the sums of warpgroups that have taken turns, in the first one; the other one's does not change.

    Args:
        meeting: shared memory for a tile's sum, and two barriers: whether it has been stored there, and taken.
        parity: that of `stored` to wait for; it is another one for the next tile.
    """
    sums, stored, taken = meeting
    if WARPGROUP > 0:
        mbarrier.wait(taken, parity ^ 1)
        sums.store(acc)
        mbarrier.arrive(stored)
    else:
        mbarrier.wait(stored, parity)
        acc += sums.load(acc.type.layout)
        mbarrier.arrive(taken)
    return acc, parity ^ 1


@gluon.jit
def consume(
    out, staging, ring, meeting, step_args, args, workspace, shape, state, WARPGROUP: gl.constexpr, PLACE: gl.constexpr,
    TAIL_PLACE: gl.constexpr, MULTIPLY: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BAND_M: gl.constexpr, STAGES: gl.constexpr,
    PAIRED: gl.constexpr, SPLIT: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """One warpgroup's part of the work: first of whole tiles, then of parts along K."""
    N, K = shape[1], shape[2]
    tiles, tail_units, parts = state[0], state[1], state[2]
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    parity = gl.to_tensor(0)
    RIGHT: gl.constexpr = 0 if TURNS else ROWS * WARPGROUP
    # The index of the piece of a tile that this warpgroup finishes, and the number of pieces.
    PIECE: gl.constexpr = 0 if TURNS else WARPGROUP
    PIECES: gl.constexpr = 1 if TURNS else WARPGROUPS
    staged = staging.index(PIECE)
    for unit in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, row, col, end, first_k, last_k = PLACE(unit, state, shape, BLOCK_M, BLOCK_N, BAND_M)
        acc, stage, phase = MULTIPLY(
            ring, step_args, (end, N, K), row, col, first_k, last_k, stage, phase, WARPGROUP, BLOCK_M, BLOCK_N, BLOCK_K,
            STAGES, PAIRED, TURNS,
        )  # fmt: skip
        if TURNS:
            acc, parity = joined(acc, meeting, parity, WARPGROUP)
        if PIECE == WARPGROUP:
            finish(acc, out, staged, args, (end, N), row, col + RIGHT, EPILOGUE, CAST, PAIRED)
    if SPLIT:
        partials, semaphores = workspace
        unit = gl.program_id(0)
        if unit < tail_units:
            _, row, col, end, first_k, last_k = TAIL_PLACE(unit, state, shape, BLOCK_M, BLOCK_N, BAND_M)
            acc, stage, phase = MULTIPLY(
                ring, step_args, (end, N, K), row, col, first_k, last_k, stage, phase, WARPGROUP, BLOCK_M, BLOCK_N,
                BLOCK_K, STAGES, PAIRED, TURNS,
            )  # fmt: skip
            if TURNS:
                acc, parity = joined(acc, meeting, parity, WARPGROUP)
            if PIECE == WARPGROUP:
                tile = unit // parts
                semaphore = semaphores + tile * PIECES + PIECE
                acc, done = combine(acc, unit, tile * parts, 1, parts, partials, semaphore, PIECE, PIECES)
                if done:
                    finish(acc, out, staged, args, (end, N), row, col + RIGHT, EPILOGUE, CAST, PAIRED)
    tma.store_wait(0)


@gluon.jit
def allocate_group_params(
    x, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, PAIRED: gl.constexpr
):  # fmt: skip
    """Shared memory for the group parameters of a step, in each stage."""
    COUNT: gl.constexpr = BLOCK_K // GROUP if BLOCK_K > GROUP else 1
    DTYPE: gl.constexpr = x.dtype.element_ty
    if PAIRED:
        HALVES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        return gl.allocate_shared_memory(DTYPE, [STAGES, COUNT, 2, BLOCK_N // 2], HALVES)
    else:
        LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        return gl.allocate_shared_memory(DTYPE, [STAGES, COUNT, BLOCK_N], LAYOUT)


@gluon.jit(do_not_specialize=["M", "N", "K", "tiles", "tail_units", "parts", "part_k"])
def gemm_specialized(
    a, b, out, M, N, K, tiles, tail_units, parts, part_k, place_args, step_args, args, workspace,
    PLACE: gl.constexpr, TAIL_PLACE: gl.constexpr, MULTIPLY: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BAND_M: gl.constexpr, STAGES: gl.constexpr,
    PER: gl.constexpr, GROUP: gl.constexpr, PAIRED: gl.constexpr, STREAM: gl.constexpr, ROTATE: gl.constexpr,
    TURNS: gl.constexpr, OVERLAPS: gl.constexpr, SOURCE: gl.constexpr,
):  # fmt: skip
    """As many programs as run at once, each taking every num_programs-th of the first `tiles` tiles, which stay whole.

    With a workspace the other tiles are divided along K into `tail_units`, each tile in `parts` of `part_k`, one a
    program; see `rings`.

    Args:
        a, b, out: descriptors: of blocks of A (M, K), of the words of B's transpose (N, K), and of subtiles of a
            warpgroup's part of the output.
        place_args, step_args, args: run-time arguments of PLACE and TAIL_PLACE, of MULTIPLY, and of the epilogue.
        workspace: (partials, semaphores): memory for an fp32 tile a part, and zeros, one a cut tile and warpgroup that
            finishes a piece of it, which are zeros again afterwards. None if no tile is cut.
        CAST: `cast(value, dtype)` rounds what the epilogue returns.
        PER: numbers in a word of B.
        GROUP: numbers along K with one scale, 0 if there are none.
        STREAM: whether B is read once and leaves L2 first.
        ROTATE: whether columns of tiles begin at different steps along K; see `load`.
        TURNS: whether warpgroups take turns along K.
        OVERLAPS: see `overlap.wait_for_earlier`.
        SOURCE: identifies the version of the file that gives warps their roles.
    """
    wait_for_earlier(OVERLAPS)
    shape = (M, N, K)
    state = (tiles, tail_units, parts, part_k, place_args)
    SPLIT: gl.constexpr = workspace is not None
    a_blocks = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)  # noqa: RUF005
    b_blocks = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)  # noqa: RUF005
    PIECES: gl.constexpr = 1 if TURNS else WARPGROUPS
    staging = gl.allocate_shared_memory(out.dtype, [PIECES] + out.block_type.shape, out.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=PIECES)
    meeting: gl.constexpr = None
    if TURNS:
        LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        sums = gl.allocate_shared_memory(gl.float32, [ROWS, BLOCK_M], LAYOUT)
        stored = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(stored, count=1)
        mbarrier.init(taken, count=1)
        meeting = (sums, stored, taken)
    hopper.fence_async_shared()
    scale_blocks: gl.constexpr = None
    shift_blocks: gl.constexpr = None
    if GROUP > 0:
        scale_blocks = allocate_group_params(step_args[0], STAGES, BLOCK_N, BLOCK_K, GROUP, PAIRED)
        if step_args[1] is not None:
            shift_blocks = allocate_group_params(step_args[1], STAGES, BLOCK_N, BLOCK_K, GROUP, PAIRED)
    ring = (a_blocks, b_blocks, scale_blocks, shift_blocks, full, free)
    begin_roles(
        consume,
        (out, staging, ring, meeting, step_args, args, workspace, shape, state),
        (
            PLACE, TAIL_PLACE, MULTIPLY, EPILOGUE, CAST, BLOCK_M, BLOCK_N, BLOCK_K, BAND_M, STAGES, PAIRED, SPLIT,
            TURNS,
        ),
        produce,
        (
            a, b, step_args, ring, shape, state, PLACE, TAIL_PLACE, BLOCK_M, BLOCK_N, BLOCK_K, BAND_M, STAGES, PER,
            GROUP, PAIRED, SPLIT, STREAM, ROTATE,
        ),
        WARPGROUPS, 1, REGISTERS, LOADER_REGISTERS,
    )  # fmt: skip
    let_next_begin(OVERLAPS)
