"""The product of few rows and a 2:4 sparse weight by `mma.sp`, in which the warps of a program share out N and K.

With few rows, a product takes about as long as its weight takes from memory. A warp has a block of 32 rows of the
weight and, of each step of the program, 128 columns. It reads kept numbers and metadata as they are stored, straight
into the registers from which the tensor cores take them; see `sparse_fragments`. It loads several steps at a time, so
that a short product waits for memory only once. When a step has been multiplied, a later one is loaded into its
registers. The activations of these steps go through shared memory, because each lane needs words that are not adjacent.
At the end, the sums of warps that share K are added up, in a fixed order.

For GPUs whose tensor cores have `mma.sp`, in Gluon, since each lane has to have the right registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .order import part_of
from .rings import applied, barrier, combine, let_next_begin, wait_for_earlier
from .sparse_fragments import (
    BLOCK,
    DEPTH,
    INSTRUCTIONS,
    KEPT,
    NO_PLACES,
    WORDS,
    activations_of_step,
    fragment,
    multiplied,
    of_instructions,
    words_of_step,
)


@gluon.constexpr_function
def along(layout, dim, rank):
    """The layout of the numbers along one dimension of a block."""
    for other in reversed(range(rank)):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def block_of(col, blocks, N_WARPS: gl.constexpr, PAIRED: gl.constexpr, LAYOUT: gl.constexpr):
    """The number of the 32 rows of the weight that each warp has, as a block with five dimensions.

    Behind the last rows there is nothing to store, so warps that would have those take the last ones.

    Args:
        col: the program's first column of the product.
        blocks: times 32 rows of the weight.
        PAIRED: whether half of the warps have rows of the upper half of the weight, and the others of the lower one.
    """
    warp = gl.arange(0, N_WARPS, along(LAYOUT, 1, 5))[None, :, None, None, None]
    if PAIRED:
        HALF: gl.constexpr = N_WARPS // 2
        inside = gl.minimum(col // (2 * BLOCK) + warp % HALF, blocks // 2 - 1)
        return warp // HALF * (blocks // 2) + inside
    else:
        return gl.minimum(col // BLOCK + warp, blocks - 1)


@gluon.jit
def kept_places(block, steps, strip: gl.constexpr, K_WARPS: gl.constexpr, LAYOUT: gl.constexpr):
    """The places of a lane's words of kept numbers of 16 rows, and the first column of each part.

    Parts are of row g, of row g + 8, and of both 64 columns further on.

    Args:
        block: see `block_of`.
        steps: times 32 columns of the weight.
        strip: which 16 of the 32 rows.
    """
    warp = gl.arange(0, K_WARPS, along(LAYOUT, 0, 5))[:, None, None, None, None]
    lane = gl.arange(0, 32, along(LAYOUT, 2, 5))[None, None, :, None, None]
    part = gl.arange(0, 4, along(LAYOUT, 3, 5))[None, None, None, :, None]
    word = gl.arange(0, INSTRUCTIONS, along(LAYOUT, 4, 5))[None, None, None, None, :]
    row = block * BLOCK + strip * (BLOCK // 2) + part % 2 * 8 + lane // 4
    column = warp * DEPTH + part // 2 * (DEPTH // 2)
    return row * (steps * KEPT) + column // 4 + lane % 4 * INSTRUCTIONS + word, column


@gluon.jit
def metadata_places(block, blocks, K_WARPS: gl.constexpr, LAYOUT: gl.constexpr):
    """The same of a lane's words of metadata. Parts are of 32 columns each, of which each word has 16.

    Args:
        blocks: see `block_of`.
    """
    warp = gl.arange(0, K_WARPS, along(LAYOUT, 0, 5))[:, None, None, None, None]
    lane = gl.arange(0, 32, along(LAYOUT, 2, 5))[None, None, :, None, None]
    part = gl.arange(0, 2, along(LAYOUT, 3, 5))[None, None, None, :, None]
    word = gl.arange(0, 2, along(LAYOUT, 4, 5))[None, None, None, None, :]
    column = warp * DEPTH + lane % 2 * (DEPTH // 2)
    line = column // 32 + part
    return (line * blocks + block) * BLOCK + lane // 4 * 4 + lane % 4 // 2 * 2 + word, column


@gluon.jit
def load_weight(given, k, end):
    """A lane's words of the step from column `k` on: of kept numbers of both 16 rows, and of metadata.

    Args:
        given: (kept numbers, metadata, the places of both 16 rows, columns, places of metadata, columns, blocks).
        end: of the columns.
    """
    words, metadata, upper, lower, columns, places, own, blocks = given
    inside = k + columns < end
    # With an eviction policy, the assembler of Triton 3.6 and 3.7 makes one before each load, which takes long.
    first = gl.load(words + k // 4 + upper, mask=inside, other=0)
    second = gl.load(words + k // 4 + lower, mask=inside, other=0)
    places = metadata + k // 32 * (blocks * BLOCK) + places
    bits = gl.load(places, mask=k + own < end, other=NO_PLACES)
    return first, second, bits


@gluon.jit
def load_activations(x, k, end, K, rows, x_row, LAYOUT: gl.constexpr, SHAPE: gl.constexpr):
    """A step's activations from column `k` on, a block (rows, words); zeros if the step is not before `end`."""
    row = gl.arange(0, SHAPE[0], gl.SliceLayout(1, LAYOUT))[:, None]
    column = k + gl.arange(0, SHAPE[1], gl.SliceLayout(0, LAYOUT))[None, :]
    block = gl.load(
        x + row.to(gl.int64) * x_row + column, mask=(row < rows) & (column < K) & (k < end), other=0
    )
    even, odd = block.to(gl.int16, bitcast=True).reshape([SHAPE[0], SHAPE[1] // 2, 2]).split()
    return (even.to(gl.int32) & 0xFFFF) | (odd.to(gl.int32) << 16)


@gluon.jit
def load_steps(
    x, first, end, K, rows, x_row, LAYOUT: gl.constexpr, SHAPE: gl.constexpr, COUNT: gl.constexpr
):  # fmt: skip
    """The activations of `COUNT` steps from `first` on; see `load_activations`."""
    loaded = ()
    for i in gl.static_range(COUNT):
        loaded += (load_activations(x, (first + i) * SHAPE[1], end, K, rows, x_row, LAYOUT, SHAPE),)  # type: ignore[assignment]
    return loaded


@gluon.jit
def ordered(words, K_WARPS: gl.constexpr):
    """A step's activations, those of one instruction after those of the other; see `sparse_fragments`."""
    ROWS: gl.constexpr = words.shape[0]
    parts = words.reshape([ROWS, K_WARPS, 4, 2, INSTRUCTIONS, 2]).permute((4, 0, 1, 2, 3, 5))
    return parts.reshape([INSTRUCTIONS * ROWS, K_WARPS * WORDS])


@gluon.jit
def fourths(words):
    """A block of pairs of pairs as four blocks, in the order of their elements."""
    even, odd = words.split()
    first, third = even.split()
    second, fourth = odd.split()
    return first, second, third, fourth


@gluon.jit
def fragment_of(activations, j: gl.constexpr, like):
    """The activations of instruction `j`, which all warps along N have; `like` is a fragment of sums."""
    K_WARPS: gl.constexpr = like.shape[0]
    TILES: gl.constexpr = like.shape[3]
    LAYOUT: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    words = activations.slice(j * TILES * 8, TILES * 8).load(
        activations_of_step(K_WARPS, like.shape[1], TILES)
    )
    own = words.reshape([TILES, 8, K_WARPS, 4, 4]).permute((2, 1, 4, 0, 3)).reshape([K_WARPS, 32, TILES, 4])
    return gl.expand_dims(gl.convert_layout(own, LAYOUT, assert_trivial=True), 1)


@gluon.jit
def multiply_step(acc, weight, activations, KIND: gl.constexpr):
    """The sums of both 16 rows of each warp's block, with the products of a step.

    Args:
        acc: fragments of both.
        weight: see `load_weight`.
        activations: shared memory with those of the step by instruction.
    """
    upper, lower = acc
    LAYOUT: gl.constexpr = upper.type.layout
    KEPT_LAYOUT: gl.constexpr = gl.SliceLayout(3, LAYOUT)
    PLACES_LAYOUT: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, LAYOUT))
    WORDS_SHAPE: gl.constexpr = [upper.shape[0], upper.shape[1], 32, 4, 2, 2]
    first = fourths(weight[0].reshape(WORDS_SHAPE))
    second = fourths(weight[1].reshape(WORDS_SHAPE))
    w0, w1, w2, w3 = fourths(weight[2])
    places = of_instructions(w0, w1, w2, w3)
    for j in gl.static_range(INSTRUCTIONS):
        x = fragment_of(activations, j, upper)
        bits = gl.convert_layout(places[j], PLACES_LAYOUT, assert_trivial=True)
        bits = gl.expand_dims(gl.expand_dims(bits, 3), 4)
        kept = gl.expand_dims(gl.convert_layout(first[j], KEPT_LAYOUT, assert_trivial=True), 3)
        upper = multiplied(upper, kept, x, bits, KIND, 0)
        kept = gl.expand_dims(gl.convert_layout(second[j], KEPT_LAYOUT, assert_trivial=True), 3)
        lower = multiplied(lower, kept, x, bits, KIND, 1)
    return upper, lower


@gluon.jit
def block_of_sums(acc):
    """The sums of all warps, as a block (warps along K times rows of activations, rows of the weight)."""
    upper, lower = acc
    K_WARPS: gl.constexpr = upper.shape[0]
    N_WARPS: gl.constexpr = upper.shape[1]
    TILES: gl.constexpr = upper.shape[3]
    # Warps along K and N, g, t, tile, row g or g + 8, column 2 t or 2 t + 1, and which 16 rows.
    each = gl.join(upper, lower).reshape([K_WARPS, N_WARPS, 8, 4, TILES, 2, 2, 2])
    return each.permute((0, 4, 3, 6, 1, 7, 5, 2)).reshape([K_WARPS * TILES * 8, N_WARPS * BLOCK])


@gluon.jit
def sum_of_warps(acc, LAYOUT: gl.constexpr):
    """The sum over the warps that share K, a block (rows of activations, rows of the weight)."""
    K_WARPS: gl.constexpr = acc[0].shape[0]
    ROWS: gl.constexpr = acc[0].shape[3] * 8
    blocks = block_of_sums(acc)
    # Lanes of a warp store to every second row, and to eight columns.
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    shared = gl.allocate_shared_memory(gl.float32, blocks.shape, SWIZZLED, blocks)
    total = shared.slice(0, ROWS).load(LAYOUT)
    for i in gl.static_range(1, K_WARPS):
        total += shared.slice(i * ROWS, ROWS).load(LAYOUT)
    return total


@gluon.jit
def multiply(
    x, words, metadata, first, last, end, rows, K, col, sizes,
    KIND: gl.constexpr, ROWS: gl.constexpr, K_WARPS: gl.constexpr, N_WARPS: gl.constexpr, PAIRED: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """The sums of a program's tile, over steps from `first` on to `last`, in fragments of all warps.

    Args:
        x: pointer to the tile's first row of activations.
        words, metadata: pointers to the weight's, by words.
        end: of the columns that it sums.
        rows, K: of activations.
        col: the program's first column of the product.
        sizes: (from one row of activations to the next, times 32 rows, and times 32 columns, of the weight).
        AHEAD: how many steps are loaded at a time.
    """
    x_row, blocks, steps = sizes
    TILES: gl.constexpr = ROWS // 8
    WARPS: gl.constexpr = K_WARPS * N_WARPS
    STEP: gl.constexpr = K_WARPS * DEPTH
    DOWN: gl.constexpr = WARPS if WARPS < ROWS // 2 else ROWS // 2
    X_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [DOWN, WARPS // DOWN], [1, 0])
    LAYOUT: gl.constexpr = fragment(K_WARPS, N_WARPS, TILES)
    WORDS_LAYOUT: gl.constexpr = words_of_step(K_WARPS, N_WARPS, 4, 4)
    PLACES_LAYOUT: gl.constexpr = words_of_step(K_WARPS, N_WARPS, 2, 2)
    block = block_of(col, blocks, N_WARPS, PAIRED, WORDS_LAYOUT)
    upper, columns = kept_places(block, steps, 0, K_WARPS, WORDS_LAYOUT)
    lower, _ = kept_places(block, steps, 1, K_WARPS, WORDS_LAYOUT)
    block = block_of(col, blocks, N_WARPS, PAIRED, PLACES_LAYOUT)
    places, behind = metadata_places(block, blocks, K_WARPS, PLACES_LAYOUT)
    given = (words, metadata, upper, lower, columns, places, behind, blocks)
    # A row of an instruction has 64 bytes for each warp along K. Swizzled, `ldmatrix` has no conflicts.
    PHASE: gl.constexpr = 2 if K_WARPS == 1 else 1
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(4, PHASE, 8 // PHASE, [1, 0])
    staged = gl.allocate_shared_memory(gl.int32, [AHEAD, INSTRUCTIONS * ROWS, K_WARPS * WORDS], SWIZZLED)
    zeros = gl.zeros([K_WARPS, N_WARPS, 32, TILES, 4], gl.float32, LAYOUT)
    acc = (zeros, zeros)
    ahead = load_steps(x, first, end, K, rows, x_row, X_LAYOUT, [ROWS, STEP], AHEAD)
    weight = ()
    for i in gl.static_range(AHEAD):
        weight += (load_weight(given, (first + i) * STEP, end),)  # type: ignore[assignment]
    for step in range(first, last, AHEAD):
        # All warps have read what is there.
        barrier()
        for i in gl.static_range(AHEAD):
            staged.index(i).store(ordered(ahead[i], K_WARPS))
        barrier()
        ahead = load_steps(x, step + AHEAD, end, K, rows, x_row, X_LAYOUT, [ROWS, STEP], AHEAD)
        following = ()
        for i in gl.static_range(AHEAD):
            acc = multiply_step(acc, weight[i], staged.index(i), KIND)
            following += (load_weight(given, (step + AHEAD + i) * STEP, end),)  # type: ignore[assignment]
        weight = following
    return acc


@gluon.jit
def store_tile(
    acc, out, strides, args, shape, row, col, EPILOGUE: gl.constexpr, CAST: gl.constexpr, PAIRED: gl.constexpr
):
    """Epilogue and store of a tile."""
    EACH: gl.constexpr = 2 if PAIRED else 1
    LAYOUT: gl.constexpr = acc.type.layout
    value = applied(acc, args, shape, row, col, EPILOGUE, PAIRED)
    value = gl.convert_layout(value, LAYOUT)
    rows = row + gl.arange(0, value.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    cols = col // EACH + gl.arange(0, value.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    places = out + rows.to(gl.int64) * strides[0] + cols.to(gl.int64) * strides[1]
    gl.store(places, CAST(value, out.dtype.element_ty), mask=(rows < shape[0]) & (cols < shape[1] // EACH))


@gluon.jit(
    do_not_specialize=["M", "tiles", "parts", "part_k", "tiles_n", "tiles_divisor", "row_divisor", "blocks", "steps"]
)  # fmt: skip
def gemm_sliced_sparse(
    x, values, metadata, out, M, N, K, tiles, parts, part_k, tiles_n, tiles_divisor, row_divisor, x_row, out_row,
    out_col, blocks, steps, args, workspace,
    PLACE: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr, KIND: gl.constexpr, ROWS: gl.constexpr,
    K_WARPS: gl.constexpr, N_WARPS: gl.constexpr, PAIRED: gl.constexpr, AHEAD: gl.constexpr,
    OVERLAPS: gl.constexpr,
):  # fmt: skip
    """A program for each tile, or for each part of one that is cut along K.

    Args:
        x: pointer to rows of activations, whose elements are adjacent.
        values, metadata: pointers to those of the weight.
        tiles: along both M and N.
        parts, part_k: of each tile along K, and K in a part.
        tiles_n, tiles_divisor, row_divisor: see `place.counted_part`.
        x_row, out_row, out_col: strides of the activations' rows, and of the output.
        blocks, steps: times 32 rows, and times 32 columns, that the weight has in memory.
        workspace: see `kernels.gemm`; None if no tile is cut.
        PLACE: `place.counted_part`.
        KIND: the type of the numbers, as PTX names it.
        ROWS: of a tile.
        K_WARPS, N_WARPS: how many warps share K, and N.
        PAIRED: see `block_of`.
        AHEAD: see `multiply`.
        OVERLAPS: see `overlap.wait_for_earlier`.
    """
    wait_for_earlier(OVERLAPS)
    STEP: gl.constexpr = K_WARPS * DEPTH
    unit = gl.program_id(0)
    shape = (M, N, K)
    state = (tiles, part_k, tiles_n, (tiles_divisor, row_divisor))
    _, row, col, _, first_k, last_k = PLACE(unit, state, shape, ROWS, N_WARPS * BLOCK, 1)
    kept = gl.cast(values, gl.pointer_type(gl.int32), bitcast=True)
    acc = multiply(
        x + gl.cast(row, gl.int64) * x_row, kept, metadata, first_k // STEP, gl.cdiv(last_k, STEP), last_k, M - row, K,
        col, (x_row, blocks, steps), KIND, ROWS, K_WARPS, N_WARPS, PAIRED, AHEAD,
    )  # fmt: skip
    let_next_begin(OVERLAPS)
    # Its columns from 32 on are in other registers, so that halves of them are.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [K_WARPS * N_WARPS, 1], [1, 0])
    acc = sum_of_warps(acc, LAYOUT)
    done = True
    if workspace is not None:
        partials, semaphores = workspace
        _, tile = part_of(unit, tiles, tiles_divisor)
        acc, done = combine(acc, unit, tile, tiles, parts, partials, semaphores + tile, 0, 1)
    if done:
        store_tile(acc, out, (out_row, out_col), args, shape, row, col, EPILOGUE, CAST, PAIRED)
