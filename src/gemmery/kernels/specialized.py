"""The matrix product with specialised warps: one loads, and groups of four multiply, each at its own pace.

For Hopper, in Gluon. A group multiplies 64 rows of what the tensor cores take on their left. Between two products it
has work to do on its own: it unpacks a weight's words, or multiplies a step's product by its factors and adds it to the
sum. Groups do not wait for each other, so the tensor cores work for one while the other does that. This is how
CUTLASS's mixed-input kernels and DeepGEMM (github.com/deepseek-ai/DeepGEMM) keep the tensor cores busy.

The warp that loads (`produce`) and the groups (`consume`) share the `ring`: blocks of A and B for each stage of the
pipeline, of a packed weight's scales and shifts where there are any, and for each stage two barriers. `full` is
complete when all blocks have arrived, `free` when all groups that use them have.

MULTIPLY is the K loop, and FACT_0, FACT_1 and FACT_2 are its own last three parameters, see `multiply_packed` and
`multiply_scaled`: Triton hashes functions as parameters, but not in a tuple. With SWAP it gives the transposed product,
and the groups divide the tile's columns between them, otherwise its rows.

Of a tile of 64 columns of a packed weight each group has all, and they take turns along K, a step each; in the end the
first one adds the other one's sum to its own. So there can be as many tiles as multiprocessors where tiles of 128
columns would have to be cut along K between programs, whose parts meet in memory: with few rows, that takes up to a
tenth of the time. Each stage is one group's, for which there must be an even number of them: a barrier only tells the
parity of uses, and to a group that is ahead the use before its own, by the other one, would look like its own.

With PAIRED the columns of a tile are of both halves of a packed weight, and two of them make one of the output.

`work` is (M, N, K, whole, cut, parts, chunk): sizes, and how tiles are divided between programs, see `rings`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .dialect import in_gluon
from .packed import of_rows
from .rings import READ_ONCE, beside, column_halves, combine, following, later, own_part

OF_ROWS = in_gluon(of_rows)

#: Rows of the tensor cores' left operand that a group multiplies; groups; registers of a thread in the second group and
#: of the loader's. The first group has what is left, 224.
ROWS, GROUPS, REGISTERS, LOADER_REGISTERS = (gl.constexpr(x) for x in (64, 2, 232, 48))

# Names that differ between versions of Triton: these are of 3.6 and of later ones.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def corner(
    tile, M, N, ORDER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr
):
    """Row and column at which a tile begins."""
    _, tile_m, tile_n = ORDER(tile, gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), GROUP_M)
    return tile_m * BLOCK_M, tile_n * BLOCK_N


@gluon.jit
def copy_shared(
    x, blocks, arrived, group, col, groups, columns, WIDTH: gl.constexpr, PAIRED: gl.constexpr
):  # fmt: skip
    """Copies what groups share, from number `group` on, into a stage; `arrived` is not complete before it is there.

    There are a few bytes of it for each column, which TMA has no layout for.
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
    a, b, extra, ring, row, col, low, high, stage, phase,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PER: gl.constexpr, GROUP: gl.constexpr,
    PAIRED: gl.constexpr, STREAM: gl.constexpr, ROTATE: gl.constexpr,
):  # fmt: skip
    """Loads the blocks of one tile, from step `low` to `high` along K, as far ahead as there are stages.

    With ROTATE each column of tiles begins at another step, and goes around. They want the same block of A otherwise,
    and where that is a single row, all of them would ask one slice of L2 for it.

    With GROUP `extra` is (scales, shifts, groups, columns): two matrices with a row for each group, the second of which
    may be None, and their sizes.
    """
    a_blocks, b_blocks, scale_blocks, shift_blocks, full, free = ring
    ahead = col // BLOCK_N % (high - low) if ROTATE else 0
    for step in range(low, high):
        k = (step + ahead) * BLOCK_K
        if ROTATE:
            k = gl.where(step + ahead < high, k, k - (high - low) * BLOCK_K)
        mbarrier.wait(free.index(stage), phase)
        arrived = full.index(stage)
        if GROUP > 0:
            scales, shifts, groups, columns = extra
            group = k // GROUP
            copy_shared(
                scales, scale_blocks.index(stage), arrived, group, col, groups, columns, BLOCK_N, PAIRED
            )  # fmt: skip
            if shifts is not None:
                copy_shared(
                    shifts, shift_blocks.index(stage), arrived, group, col, groups, columns, BLOCK_N, PAIRED
                )  # fmt: skip
        mbarrier.expect(arrived, a.block_type.nbytes + b.block_type.nbytes)
        _load(a, [row, k], arrived, a_blocks.index(stage))
        if PAIRED:
            load_b(b, [0, col // 32, k // (2 * PER), 0], arrived, b_blocks.index(stage), STREAM)
        elif PER > 0:
            load_b(b, [col // 16, k // (2 * PER), 0], arrived, b_blocks.index(stage), STREAM)
        else:
            load_b(b, [col, k], arrived, b_blocks.index(stage), STREAM)
        stage, phase = following(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def produce(
    a, b, extra, ring, work, ORDER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, PER: gl.constexpr, GROUP: gl.constexpr, PAIRED: gl.constexpr,
    SPLIT: gl.constexpr, STREAM: gl.constexpr, ROTATE: gl.constexpr,
):  # fmt: skip
    """Loads what `consume` multiplies, in the same order.

    Args:
        PER, GROUP: numbers in a word of B, 0 if it is not packed, and along K with one scale, 0 if there are none.
    """
    M, N, K, whole, cut, parts, chunk = work
    steps = gl.cdiv(K, BLOCK_K)
    stage = gl.to_tensor(0)
    # The parity before the first: what has not been used yet is free.
    phase = gl.to_tensor(1)
    for tile in range(gl.program_id(0), whole, gl.num_programs(0)):
        row, col = corner(tile, M, N, ORDER, BLOCK_M, BLOCK_N, GROUP_M)
        stage, phase = load(
            a, b, extra, ring, row, col, 0, steps, stage, phase, BLOCK_N, BLOCK_K, STAGES, PER, GROUP, PAIRED, STREAM,
            ROTATE,
        )  # fmt: skip
    if SPLIT:
        tile, low, high = own_part(parts, chunk, steps)
        if tile < cut:
            row, col = corner(whole + tile, M, N, ORDER, BLOCK_M, BLOCK_N, GROUP_M)
            stage, phase = load(
                a, b, extra, ring, row, col, low, high, stage, phase, BLOCK_N, BLOCK_K, STAGES, PER, GROUP, PAIRED,
                STREAM, ROTATE,
            )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Packed weights


@gluon.constexpr_function
def words_layout(lines, paired):
    """A group's words, as `formats.packing` deals them out to threads: (strips, lines, 32).

    Where columns are `paired`, (2, strips, lines, 32), a thread has words of columns as far apart as the halves, where
    it otherwise has words of columns that are eight apart.
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
    """The same words as rows by groups by words of a group, to which what groups share is spread."""
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
    blocks, GROUP_NUMBER: gl.constexpr, K: gl.constexpr, COLS: gl.constexpr, PER: gl.constexpr,
    PAIRED: gl.constexpr,
):  # fmt: skip
    """A group's words of a stage, those of `COLS` numbers along K from `K` on, as rows of 64 columns.

    With `PAIRED` columns of both halves by eights.
    """
    LINES: gl.constexpr = COLS // (2 * PER)
    LAYOUT: gl.constexpr = words_layout(LINES, PAIRED)
    BLOCKS: gl.constexpr = COLS // (8 * PER)
    if PAIRED:
        own = blocks.slice(2 * GROUP_NUMBER, 2, 1).slice(K // (2 * PER), LINES, 2).load(LAYOUT)
        # Half of the columns, strip, block, g, q, eight, odd or even.
        words = own.reshape([2, 2, BLOCKS, 8, 4, 2, 2]).permute((1, 5, 0, 3, 2, 4, 6))
        return words.reshape([ROWS, 8 * BLOCKS])
    else:
        own = blocks.slice(4 * GROUP_NUMBER, 4).slice(K // (2 * PER), LINES, 1).load(LAYOUT)
        return OF_ROWS(own, COLS, ROWS, PER)


@gluon.constexpr_function
def shared_layout(groups, paired):
    """What a group of warps has of a stage's groups, (groups, 64): for each word's row what belongs to it.

    Where columns are `paired`, (groups, 2, 32).
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
    """What groups share, (rows, groups), where `spread` wants it; no number moves."""
    LAYOUT: gl.constexpr = gl.SliceLayout(2, spread_layout(BLOCKS, piece.shape[1]))
    return gl.convert_layout(piece, LAYOUT, assert_trivial=True)


@gluon.jit
def own_shared(
    blocks, GROUP_NUMBER: gl.constexpr, K: gl.constexpr, COLS: gl.constexpr, PER: gl.constexpr, GROUP: gl.constexpr,
    PAIRED: gl.constexpr,
):  # fmt: skip
    """What the groups of `own_words` share, (rows, groups): one for each piece of a block of words with own groups."""
    COUNT: gl.constexpr = COLS // GROUP if COLS > GROUP else 1
    BLOCKS: gl.constexpr = COLS // (8 * PER)
    blocks = blocks.slice(K // GROUP, COUNT, 0)
    LAYOUT: gl.constexpr = shared_layout(COUNT, PAIRED)
    if PAIRED:
        own = blocks.slice(ROWS // 2 * GROUP_NUMBER, ROWS // 2, 2).load(LAYOUT)
        # Half of the columns, strip, g.
        rows = own.reshape([COUNT, 2, 4, 8]).permute((2, 1, 3, 0)).reshape([ROWS, COUNT])
    else:
        rows = blocks.slice(ROWS * GROUP_NUMBER, ROWS, 1).load(LAYOUT).permute((1, 0))
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
    """What concerns a part of each word: (rows, groups) as (rows, words); see `packed.unpack`."""
    piece = pieces[PART * len(pieces) // PARTS]
    LAYOUT: gl.constexpr = spread_layout(BLOCKS, piece.shape[1])
    EACH: gl.constexpr = 8 * BLOCKS // piece.shape[1]
    like = gl.full([piece.shape[0], piece.shape[1], EACH], 0, piece.dtype, LAYOUT)
    value, _ = gl.broadcast(gl.expand_dims(piece, 2), like)
    return value.reshape([piece.shape[0], 8 * BLOCKS])


@gluon.jit
def own_weight(
    ring, stage, GROUP_NUMBER: gl.constexpr, K: gl.constexpr, COLS: gl.constexpr, PAIRED: gl.constexpr,
    UNPACK: gl.constexpr, PER: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A group's 64 columns of a stage, as numbers: `COLS` of them along K, from `K` on."""
    _, b_blocks, scale_blocks, shift_blocks, _, _ = ring
    words = own_words(b_blocks.index(stage), GROUP_NUMBER, K, COLS, PER, PAIRED)
    scale = (
        None
        if scale_blocks is None
        else own_shared(scale_blocks.index(stage), GROUP_NUMBER, K, COLS, PER, GROUP, PAIRED)
    )
    shift = (
        None
        if shift_blocks is None
        else own_shared(shift_blocks.index(stage), GROUP_NUMBER, K, COLS, PER, GROUP, PAIRED)
    )
    return UNPACK(words, scale, shift, COLS, ROWS, spread)


@gluon.jit
def multiply_packed(
    ring, extra, M, N, row, col, low, high, stage, phase, GROUP_NUMBER: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    PAIRED: gl.constexpr, TURNS: gl.constexpr, UNPACK: gl.constexpr, PER: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """64 columns of a tile, from step `low` to `high` along K: the transposed product with a packed weight.

    Where groups take turns, every other step of it.

    A step is unpacked in pieces of eight lines of words, the least that can be cut out of shared memory, and the tensor
    cores work on one while the next is unpacked.

    Args:
        extra: what `load` takes; it has come with the stage.
        UNPACK: `packed.unpack`, made for the format, whose words hold `PER` numbers.
        GROUP: numbers along K that share a scale; 0 where none do.
    """
    a_blocks, _, _, _, full, free = ring
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    COLS: gl.constexpr = min(BLOCK_K, 16 * PER)
    PLACE: gl.constexpr = 0 if TURNS else GROUP_NUMBER
    EVERY: gl.constexpr = GROUPS if TURNS else 1
    after = later(stage, phase, high - low, STAGES)
    # Odd stages are the second group's, whether the tile begins with one or not.
    first = (STAGES + GROUP_NUMBER - stage) % EVERY
    stage, phase = later(stage, phase, first, STAGES)
    acc = gl.zeros([ROWS, BLOCK_M], gl.float32, ACC)
    if not TURNS:
        # Else there is a way around the loop, on which what comes behind it is computed in advance, and apart.
        gl.assume(low < high)
    for _ in range(low + first, high, EVERY):
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
# Factors that change along K


@gluon.jit
def add_scaled(acc, part, factor):
    """`acc + part * factor`, a factor a row, before the next product.

    The compiler would leave the sums for later, when more products are under way, for which there are no registers.
    """
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [part, gl.expand_dims(factor, 1), acc],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def factor_of_columns(pointer, col, stride, EVERY: gl.constexpr, N, more):
    """The one factor of up to 128 columns from `col` on; those of a tile's second half may lie behind the matrix."""
    return gl.load(pointer + gl.cast(col // EVERY, gl.int64) * stride, mask=more & (col < N), other=0.0)


@gluon.jit
def multiply_scaled(
    ring, extra, M, N, row, col, low, high, stage, phase, GROUP_NUMBER: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    PAIRED: gl.constexpr, TURNS: gl.constexpr, SHARED_M: gl.constexpr, SHARED_N: gl.constexpr, UNUSED: gl.constexpr,
):  # fmt: skip
    """64 rows of a tile, from step `low` to `high` along K: each step's product is scaled before it is added.

    A tile of 256 columns is summed in halves, one after the other: a step's product then takes half the registers.

    Args:
        extra: the factors, as `scales` takes them, of a step of K each.
        SHARED_M, SHARED_N: rows and columns that share a factor; the latter in multiples of 128.
        PAIRED, TURNS, UNUSED: there as `multiply_packed` has as many.
    """
    a_blocks, b_blocks, _, _, full, free = ring
    at_a, _, row_a, step_a, at_b, _, row_b, step_b = extra
    HALVED: gl.constexpr = BLOCK_N > 128
    COLS: gl.constexpr = BLOCK_N // 2 if HALVED else BLOCK_N
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32])
    rows = row + ROWS * GROUP_NUMBER + gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
    inside = rows < M
    of_rows = at_a + (rows // SHARED_M).to(gl.int64) * row_a + gl.cast(low, gl.int64) * step_a
    of_columns = at_b + gl.cast(low, gl.int64) * step_b
    acc = gl.zeros([ROWS, COLS], gl.float32, ACC)
    rest = gl.zeros([ROWS, COLS], gl.float32, ACC)
    part = gl.zeros([ROWS, COLS], gl.float32, ACC)
    left = gl.load(of_rows, mask=inside, other=0.0)
    right = factor_of_columns(of_columns, col, row_b, SHARED_N, N, True)
    right_rest = factor_of_columns(of_columns, col + COLS, row_b, SHARED_N, N, True) if HALVED else right
    for step in range(low, high):
        factor = left * right
        factor_rest = left * right_rest
        # A step ahead, so that they are there when they are needed.
        more = step + 1 < high
        of_rows += step_a
        of_columns += step_b
        left = gl.load(of_rows, mask=inside & more, other=0.0)
        right = factor_of_columns(of_columns, col, row_b, SHARED_N, N, more)
        if HALVED:
            right_rest = factor_of_columns(of_columns, col + COLS, row_b, SHARED_N, N, more)
        mbarrier.wait(full.index(stage), phase)
        x = a_blocks.index(stage).slice(ROWS * GROUP_NUMBER, ROWS)
        y = b_blocks.index(stage)
        if HALVED:
            part = hopper.warpgroup_mma(
                x, y.slice(0, COLS).permute((1, 0)), part, use_acc=False, is_async=True
            )
            part = hopper.warpgroup_mma_wait(0, deps=[part])
            acc = add_scaled(acc, part, factor)
            part = hopper.warpgroup_mma(
                x, y.slice(COLS, COLS).permute((1, 0)), part, use_acc=False, is_async=True
            )
            part = hopper.warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(free.index(stage))
            rest = add_scaled(rest, part, factor_rest)
        else:
            part = hopper.warpgroup_mma(x, y.permute((1, 0)), part, use_acc=False, is_async=True)
            part = hopper.warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(free.index(stage))
            acc = add_scaled(acc, part, factor)
        stage, phase = following(stage, phase, STAGES)
    return beside(acc, rest) if HALVED else acc, stage, phase


# ---------------------------------------------------------------------------------------------------------------------
# What comes after the K loop


@gluon.jit
def take_ticket(counter, others):
    """Counts a group in once all its threads are here, and says whether `others` came before it; see `rings`."""
    _barrier()
    last = gl.atomic_add(counter, 1, sem="acq_rel") == others
    if last:
        gl.store(counter, 0)
    return last


@gluon.jit
def joined(acc, meeting, parity, GROUP_NUMBER: gl.constexpr):
    """Adds the sums of groups that have taken turns, in the first one; the other one's stays what it was.

    Args:
        meeting: shared memory for a tile, and two barriers: whether it has been given there, and taken.
        parity: that of `given` to wait for; it is another one for the next tile.
    """
    room, given, taken = meeting
    if GROUP_NUMBER > 0:
        mbarrier.wait(taken, parity ^ 1)
        room.store(acc)
        mbarrier.arrive(given)
    else:
        mbarrier.wait(given, parity)
        acc += room.load(acc.type.layout)
        mbarrier.arrive(taken)
    return acc, parity ^ 1


@gluon.jit
def halves_beside(block):
    """A block whose columns are of both halves by eights as one with the halves side by side; no number moves."""
    rows: gl.constexpr = block.shape[0]
    cols: gl.constexpr = block.shape[1]
    left, right = block.reshape([rows, cols // 16, 2, 8]).permute((0, 1, 3, 2)).split()
    return beside(left.reshape([rows, cols // 2]), right.reshape([rows, cols // 2]))


@gluon.jit
def finish(
    acc, out, staged, args, M, N, row, col, EPILOGUE: gl.constexpr, CAST: gl.constexpr, SWAP: gl.constexpr,
    PAIRED: gl.constexpr,
):  # fmt: skip
    """Epilogue and store of a group's part of a tile, in pieces as large as the output's descriptor takes them."""
    DIM: gl.constexpr = 0 if SWAP else 1
    if acc.shape[1] > out.block_type.shape[DIM]:
        HALF: gl.constexpr = acc.shape[1] // 2
        left, right = column_halves(acc)
        finish(left, out, staged, args, M, N, row, col, EPILOGUE, CAST, SWAP, PAIRED)
        if SWAP:
            finish(right, out, staged, args, M, N, row + HALF, col, EPILOGUE, CAST, SWAP, PAIRED)
        else:
            finish(right, out, staged, args, M, N, row, col + HALF, EPILOGUE, CAST, SWAP, PAIRED)
    else:
        block = acc.permute((1, 0)) if SWAP else acc
        BETWEEN: gl.constexpr = 2 if PAIRED else 1
        if PAIRED:
            block = halves_beside(block)
        height: gl.constexpr = block.shape[0]
        width: gl.constexpr = block.shape[1] // BETWEEN
        at = col // BETWEEN
        value = EPILOGUE(block, args, (M, N // BETWEEN), (), 0, row, at, height, width, False)
        tma.store_wait(0)
        staged.store(CAST(value, out.dtype))
        hopper.fence_async_shared()
        _store(out, [row, at], staged)


@gluon.jit
def consume(
    out, staging, ring, meeting, extra, args, partials, counters, work, GROUP_NUMBER: gl.constexpr,
    MULTIPLY: gl.constexpr, FACT_0: gl.constexpr, FACT_1: gl.constexpr, FACT_2: gl.constexpr, ORDER: gl.constexpr,
    EPILOGUE: gl.constexpr, CAST: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, SWAP: gl.constexpr, PAIRED: gl.constexpr, SPLIT: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """One group's part of the work: first of whole tiles, then of parts along K."""
    M, N, K, whole, cut, parts, chunk = work
    steps = gl.cdiv(K, BLOCK_K)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    parity = gl.to_tensor(0)
    DOWN: gl.constexpr = 0 if SWAP else ROWS * GROUP_NUMBER
    RIGHT: gl.constexpr = ROWS * GROUP_NUMBER if SWAP and not TURNS else 0
    # Which piece of how many of a tile is this group's to finish.
    PIECE: gl.constexpr = 0 if TURNS else GROUP_NUMBER
    PIECES: gl.constexpr = 1 if TURNS else GROUPS
    staged = staging.index(PIECE)
    for tile in range(gl.program_id(0), whole, gl.num_programs(0)):
        row, col = corner(tile, M, N, ORDER, BLOCK_M, BLOCK_N, GROUP_M)
        acc, stage, phase = MULTIPLY(
            ring, extra, M, N, row, col, 0, steps, stage, phase, GROUP_NUMBER, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            PAIRED, TURNS, FACT_0, FACT_1, FACT_2,
        )  # fmt: skip
        if TURNS:
            acc, parity = joined(acc, meeting, parity, GROUP_NUMBER)
        if PIECE == GROUP_NUMBER:
            finish(acc, out, staged, args, M, N, row + DOWN, col + RIGHT, EPILOGUE, CAST, SWAP, PAIRED)
    if SPLIT:
        tile, low, high = own_part(parts, chunk, steps)
        if tile < cut:
            row, col = corner(whole + tile, M, N, ORDER, BLOCK_M, BLOCK_N, GROUP_M)
            acc, stage, phase = MULTIPLY(
                ring, extra, M, N, row, col, low, high, stage, phase, GROUP_NUMBER, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
                PAIRED, TURNS, FACT_0, FACT_1, FACT_2,
            )  # fmt: skip
            if TURNS:
                acc, parity = joined(acc, meeting, parity, GROUP_NUMBER)
            if PIECE == GROUP_NUMBER:
                counter = counters + tile * PIECES + PIECE
                acc, done = combine(acc, tile, parts, partials, counter, take_ticket, PIECE, PIECES)
                if done:
                    finish(
                        acc, out, staged, args, M, N, row + DOWN, col + RIGHT, EPILOGUE, CAST, SWAP, PAIRED,
                    )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def room_for_shared(
    x, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, PAIRED: gl.constexpr
):  # fmt: skip
    """Shared memory for what the groups of a step share, in each stage."""
    COUNT: gl.constexpr = BLOCK_K // GROUP if BLOCK_K > GROUP else 1
    DTYPE: gl.constexpr = x.dtype.element_ty
    if PAIRED:
        HALVES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        return gl.allocate_shared_memory(DTYPE, [STAGES, COUNT, 2, BLOCK_N // 2], HALVES)
    else:
        LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        return gl.allocate_shared_memory(DTYPE, [STAGES, COUNT, BLOCK_N], LAYOUT)


@gluon.jit(do_not_specialize=["M", "N", "K", "whole", "cut", "parts", "chunk"])
def gemm_specialized(
    a, b, out, extra, args, partials, counters, M, N, K, whole, cut, parts, chunk,
    MULTIPLY: gl.constexpr, FACT_0: gl.constexpr, FACT_1: gl.constexpr, FACT_2: gl.constexpr, PER: gl.constexpr,
    GROUP: gl.constexpr, ORDER: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    SWAP: gl.constexpr, PAIRED: gl.constexpr, SPLIT: gl.constexpr, STREAM: gl.constexpr, ROTATE: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """As many programs as run at once, each taking every num_programs-th of the first `whole` tiles.

    With `SPLIT` the other tiles are divided along K, `cut` tiles in `parts` of `chunk` steps, one a program; see
    `rings`. `partials` has room for an fp32 tile a part; `counters` are zeros, one a cut tile and group that
    finishes a piece of it, and zeros again afterwards.

    Args:
        a, b, out: descriptors: of blocks of A (M, K), of B's transpose (N, K) or of its words, and of pieces of a
            group's part of the output.
        extra: MULTIPLY's.
        PER: numbers in a word of B, 0 where it is not packed.
        GROUP: numbers along K with one scale, 0 where there are none.
        args: the epilogue's.
        CAST: `cast(value, dtype)` rounds what the epilogue returns.
        STREAM: whether B is read once and leaves L2 first.
        ROTATE: whether columns of tiles begin at different steps along K; see `load`.
        TURNS: whether groups take turns along K.
    """
    work = (M, N, K, whole, cut, parts, chunk)
    a_blocks = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)  # noqa: RUF005
    b_blocks = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)  # noqa: RUF005
    PIECES: gl.constexpr = 1 if TURNS else GROUPS
    staging = gl.allocate_shared_memory(out.dtype, [PIECES] + out.block_type.shape, out.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=PIECES)
    meeting: gl.constexpr = None
    if TURNS:
        LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        room = gl.allocate_shared_memory(gl.float32, [ROWS, BLOCK_M], LAYOUT)
        given = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(given, count=1)
        mbarrier.init(taken, count=1)
        meeting = (room, given, taken)
    hopper.fence_async_shared()
    scale_blocks: gl.constexpr = None
    shift_blocks: gl.constexpr = None
    if GROUP > 0:
        scale_blocks = room_for_shared(extra[0], STAGES, BLOCK_N, BLOCK_K, GROUP, PAIRED)
        if extra[1] is not None:
            shift_blocks = room_for_shared(extra[1], STAGES, BLOCK_N, BLOCK_K, GROUP, PAIRED)
    ring = (a_blocks, b_blocks, scale_blocks, shift_blocks, full, free)
    gl.warp_specialize(
        [
            (
                consume,
                (
                    out, staging, ring, meeting, extra, args, partials, counters, work, 0, MULTIPLY, FACT_0, FACT_1,
                    FACT_2, ORDER, EPILOGUE, CAST, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, SWAP, PAIRED, SPLIT,
                    TURNS,
                ),
            ),
            (
                consume,
                (
                    out, staging, ring, meeting, extra, args, partials, counters, work, 1, MULTIPLY, FACT_0, FACT_1,
                    FACT_2, ORDER, EPILOGUE, CAST, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, SWAP, PAIRED, SPLIT,
                    TURNS,
                ),
            ),
            (
                produce,
                (
                    a, b, extra, ring, work, ORDER, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, PER, GROUP, PAIRED,
                    SPLIT, STREAM, ROTATE,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
