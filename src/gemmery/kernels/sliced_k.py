"""The product of a few rows and a packed weight, in which the warps of a program share out K.

With few rows, a product takes about as long as its weight takes from memory. So all multiprocessors have to load all
the time, and equally much. A program has some strips of 16 rows of the weight, as many as divide the weight evenly
among multiprocessors. Its warps divide K among themselves; each loads and multiplies its own part, see `sliced_k_loop`.
The program then adds up the partial sums of its warps in shared memory, in a fixed order. CUTLASS calls this sliced-K,
and Marlin does it for int4 weights (github.com/IST-DASLab/marlin).

Each warp issues its own products by `mma.sync`. `wgmma` would make four warps wait for each other.

For Hopper, in Gluon, since the loop is assembly. Its arithmetic is that of `kernels.packed`, except for the order of
the sum.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from . import any_width_packed, sliced_k_loop
from .any_width_packed import StageFormat
from .dialect import value_of
from .order import part_of, quotient
from .rings import last_to_arrive, let_next_begin, sum_of_partials, wait_for_earlier
from .sliced_k_loop import Shape, assembly

#: Rows of a strip; bytes of a row of a partial sum.
STRIP, SUM_ROW = gl.constexpr(any_width_packed.STRIP), gl.constexpr(sliced_k_loop.SUM_ROW)
#: Rows of activations; numbers along K of a unit.
COLUMNS, DEPTH = gl.constexpr(sliced_k_loop.COLUMNS), gl.constexpr(sliced_k_loop.DEPTH)
#: Strips whose sums are finished at a time: 64 columns of the output.
TOGETHER = gl.constexpr(4)


@builtin
def multiply_strips(
    words, scales, shifts, x, strip_bytes, x_stride, rows, k, strip, strips, bundles, first_unit, units, chunk,
    buffers, groups, params_row, FORMAT, KIND, BUNDLE, WARPS, SLOTS, X_BYTES, SPANS, _semantic=None,
):  # fmt: skip
    """Leaves the partial sums of a program's strips in shared memory, see `sums_of`.

    Args:
        words, scales, shifts: the addresses of the weight's; ignored where the format has none.
        x: the address of the first row of activations.
        strip_bytes: of the words of a strip.
        x_stride: bytes from one row of activations to the next.
        rows: of activations, at most 8.
        k: columns of the activations.
        strip, strips: the program's first strip, and how many it has.
        bundles: of a full tile, at most one for each warp; the last tile may have fewer strips.
        first_unit, units: its range of K.
        chunk: units of a chunk.
        buffers: chunks that there is room for, up to `sliced_k_loop.MOST_CHUNKS`; 1 only if one chunk has all units.
        groups: groups along K.
        params_row: bytes from one group's parameters to the next one's.
        FORMAT, KIND, BUNDLE, WARPS, SLOTS, X_BYTES, SPANS: see `Shape`.
    """
    shape = Shape(
        StageFormat.of(value_of(FORMAT)), *map(value_of, (KIND, BUNDLE, WARPS, SLOTS, X_BYTES, SPANS))
    )
    gl.inline_asm_elementwise(
        assembly(shape), ",".join(["=r"] + ["l"] * 6 + ["r"] * 11),
        [
            words, scales, shifts, x, strip_bytes, x_stride, rows, k, strip, strips, bundles, first_unit, units, chunk,
            buffers, groups, params_row,
        ],
        dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@builtin
def partial_sums(at, count, STRIDE, _semantic=None):
    """The sums of numbers in shared memory.

    Args:
        at: a block with the address of the first number of each sum, from where shared memory begins.
        count: a block with how many numbers there are.
        STRIDE: bytes from one to the next.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred more; .reg .b32 at, left; .reg .f32 each<4>; mov.b32 at, global_smem; add.s32 at, at, $1;"
        "mov.b32 left, $2; mov.f32 $0, 0f00000000;\nNEXT:"
        # Four loads are on their way at a time.
        + "".join(
            f"setp.gt.s32 more, left, {i}; mov.f32 each{i}, 0f00000000;"
            f"@more ld.shared.f32 each{i}, [at + {i * value_of(STRIDE)}];"
            for i in range(4)
        )
        + "".join(f"add.f32 $0, $0, each{i};" for i in range(4))
        + f"add.s32 at, at, {4 * value_of(STRIDE)}; sub.s32 left, left, 4; setp.gt.s32 more, left, 0;"
        "@more bra NEXT; }",
        "=&f,r,r", [at, count], dtype=gl.float32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@builtin
def same_program(_semantic=None):
    """The number of the program, read again, so that values computed from it need not stay in registers."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic
    )


@gluon.jit
def sums_of(
    first, strips, bundles_divisor, BUNDLE: gl.constexpr, WARPS: gl.constexpr, SPANS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """The sums of some strips, as a block of `COLUMNS` rows of the output by 16 of its columns for each strip.

    The partial sum that a warp has of a bundle is the one whose number is the sum of theirs: a warp has one bundle, or
    two that follow each other.

    Args:
        first: the first of these strips; after the program's last strip, that strip is repeated.
        strips: the program's.
        bundles_divisor: the divisor of the number of bundles, see `order.quotient`.
        SPANS: see `multiply_strips`.
    """
    rows = gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT))[:, None]
    cols = gl.arange(0, TOGETHER * STRIP, gl.SliceLayout(0, LAYOUT))[None, :]
    strip = gl.minimum(first + cols // STRIP, strips - 1)
    bundle = strip // BUNDLE
    # Warp w has parts of bundles from w * bundles // WARPS on to (w + 1) * bundles // WARPS.
    before = bundle * WARPS
    high = quotient(before + WARPS - 1, bundles_divisor)
    # With `SPANS`, the warp before may have a part as well.
    low = quotient(gl.maximum(before - 1, 0) if SPANS else before, bundles_divisor)
    SIZE: gl.constexpr = SUM_ROW * COLUMNS
    at = ((low + bundle) * BUNDLE + strip % BUNDLE) * SIZE + cols % STRIP * 4 + rows * SUM_ROW
    return partial_sums(at, high - low + 1 + rows * 0, SIZE * BUNDLE)


@gluon.jit
def store_block(acc, out, strides, args, shape, row, col, EPILOGUE: gl.constexpr, CAST: gl.constexpr):
    """Epilogue and store of a block of the output that begins at `row` and `col`."""
    LAYOUT: gl.constexpr = acc.type.layout
    value = EPILOGUE(acc, args, shape, (), 0, row, col, acc.shape[0], acc.shape[1], False)
    rows = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    cols = col + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    places = out + rows.to(gl.int64) * strides[0] + cols.to(gl.int64) * strides[1]
    gl.store(places, CAST(value, out.dtype.element_ty), mask=(rows < shape[0]) & (cols < shape[1]))


@gluon.jit
def corner(unit, state, shape, strips, PLACE: gl.constexpr):
    """The row and the column where a unit of work begins, how many strips it has, and its range of K."""
    _, row, col, _, first_k, last_k = PLACE(unit, state, shape, COLUMNS, strips * STRIP, 1)
    return row, col, gl.minimum(strips, gl.cdiv(shape[1] - col, STRIP)), first_k, last_k


@gluon.jit
def finish(
    out, strides, args, workspace, unit, counts, shape, place, BUNDLE: gl.constexpr, WARPS: gl.constexpr,
    SPANS: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr,
):  # fmt: skip
    """Adds up the partial sums of a program's warps, then those of a tile's parts, in the part that is done last.

    Args:
        counts: (tiles, their parts, divisors of the numbers of tiles and of bundles).
        shape: (rows of the output, end of the program's columns).
        place: (row, column, the program's strips, strips of a full tile).
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [WARPS, 1], [1, 0])
    WIDTH: gl.constexpr = TOGETHER * STRIP
    row, col, own, strips = place
    tiles, parts, tiles_divisor, bundles_divisor = counts
    if workspace is not None:
        partials, semaphores = workspace
        part, tile = part_of(unit, tiles, tiles_divisor)
        rows = gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT))[:, None]
        cols = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
        size = COLUMNS * gl.cdiv(strips, TOGETHER) * WIDTH
        places = partials + gl.cast(tile * parts, gl.int64) * size + rows * WIDTH + cols
        for first in range(0, own, TOGETHER):
            acc = sums_of(first, own, bundles_divisor, BUNDLE, WARPS, SPANS, LAYOUT)
            gl.store(places + gl.cast(part, gl.int64) * size + first * (COLUMNS * STRIP), acc)
        if last_to_arrive(semaphores + tile, parts - 1):
            for first in range(0, own, TOGETHER):
                acc = sum_of_partials(places + first * (COLUMNS * STRIP), parts, size)
                store_block(acc, out, strides, args, shape, row, col + first * STRIP, EPILOGUE, CAST)
    else:
        for first in range(0, own, TOGETHER):
            acc = sums_of(first, own, bundles_divisor, BUNDLE, WARPS, SPANS, LAYOUT)
            store_block(acc, out, strides, args, shape, row, col + first * STRIP, EPILOGUE, CAST)


@gluon.jit(
    do_not_specialize=[
        "M", "N", "K", "tiles", "parts", "part_k", "tiles_n", "tiles_divisor", "row_divisor", "bundles_divisor",
        "x_stride", "out_row", "strips", "chunk", "buffers", "groups",
    ]
)  # fmt: skip
def gemm_sliced_k(
    x, words, scales, shifts, out, M, N, K, tiles, parts, part_k, tiles_n, tiles_divisor, row_divisor, bundles_divisor,
    x_stride, out_row, out_col, strips, chunk, buffers, groups, strip_bytes, args, workspace,
    PLACE: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr, KIND: gl.constexpr, FORMAT: gl.constexpr,
    BUNDLE: gl.constexpr, SPANS: gl.constexpr, SLOTS: gl.constexpr, X_BYTES: gl.constexpr, BYTES: gl.constexpr,
    WARPS: gl.constexpr, OVERLAPS: gl.constexpr, SOURCE: gl.constexpr,
):  # fmt: skip
    """A program for each tile of some strips, or for each part of one that is cut along K.

    Args:
        x: pointer to rows of activations, whose elements are adjacent.
        words, scales, shifts: pointers to those of a packed weight; None for those that it lacks.
        tiles: along both M and N.
        parts, part_k: of each tile along K, and K in a part.
        tiles_n, tiles_divisor, row_divisor: see `place.counted_part`.
        bundles_divisor: see `sums_of`.
        x_stride, out_row, out_col: strides of the activations' rows, and of the output.
        strips: of a tile.
        chunk, buffers, groups, strip_bytes: see `multiply_strips`.
        workspace: (partials, semaphores): memory for an fp32 tile a part, and zeros, one for each tile, which are zeros
            again afterwards. None if no tile is cut.
        PLACE: `place.counted_part`.
        FORMAT, KIND, BUNDLE, SPANS, SLOTS, X_BYTES: see `multiply_strips`.
        BYTES: of shared memory, in all; whole KiB.
        WARPS: `num_warps`.
        OVERLAPS: see `overlap.wait_for_earlier`.
        SOURCE: tells versions of the files apart that write assembly.
    """
    wait_for_earlier(OVERLAPS)
    # Nothing else is as large, so shared memory begins with it.
    memory = gl.allocate_shared_memory(gl.int32, [BYTES // 1024, 256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sizes, state = (M, N, K), (tiles, part_k, tiles_n, (tiles_divisor, row_divisor))
    row, col, own, first_k, last_k = corner(gl.program_id(0), state, sizes, strips, PLACE)
    bundles = gl.cdiv(strips, BUNDLE)
    nothing = gl.cast(0, gl.int64)
    multiply_strips(
        gl.cast(words, gl.int64), nothing if scales is None else gl.cast(scales, gl.int64),
        nothing if shifts is None else gl.cast(shifts, gl.int64),
        gl.cast(x, gl.int64) + gl.cast(row, gl.int64) * x_stride * 2, gl.cast(strip_bytes, gl.int64),
        gl.cast(x_stride, gl.int64) * 2, gl.minimum(M - row, COLUMNS), K, col // STRIP, own, bundles, first_k // DEPTH,
        gl.cdiv(last_k - first_k, DEPTH), chunk, buffers, groups, gl.cdiv(N, STRIP) * (2 * STRIP), FORMAT, KIND, BUNDLE,
        WARPS, SLOTS, X_BYTES, SPANS,
    )  # fmt: skip
    let_next_begin(OVERLAPS)
    unit = same_program()
    row, col, own, _, _ = corner(unit, state, sizes, strips, PLACE)
    # Columns after the program's last strip belong to another program.
    shape = (M, gl.minimum(N, col + own * STRIP))
    place = (row, col, own, strips)
    finish(
        out,
        (out_row, out_col),
        args,
        workspace,
        unit,
        (tiles, parts, tiles_divisor, bundles_divisor),
        shape,
        place,
        BUNDLE,
        WARPS,
        SPANS,
        EPILOGUE,
        CAST,
    )
    # Only assembly uses this memory. The store keeps the compiler from removing it or giving it to something else.
    memory.index(BYTES // 1024 - 1).store(
        gl.zeros([256], gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    )
    memory._keep_alive()
