"""The matrix product: a program that computes a tile, for two schedules.

`out[z] = epilogue(a[z] @ b[z])` for z over the batch, with a of (M, K), b of (K, N), out of (M, N). To compute a tile,
a row of blocks of A is multiplied by a column of blocks of B. `gemm_tiles` starts one program for each tile. In
`gemm_persistent`, as many programs as the GPU holds take all tiles in turn. The parts are constexpr functions: PLACE
(see `place`), PART (see `parts`), LOAD_A, LOAD_B and STORE (see `operands`), LOAD_STEP and MULTIPLY (see `steps`),
PREFETCH and EPILOGUE (see `epilogues`). With PAIRED, LOAD_B loads columns of both halves of B for each tile, and the
epilogue makes one column of two.

Both kernels take, besides the matrices and their strides,

- `place_args`, `step_args` and `args`: run-time arguments of PLACE, of LOAD_STEP and of the epilogue.
- M, N, K and `sizes`, the shape of the batch.
- M_MULTIPLE: M is a multiple of it. Loads of adjacent elements along M need this, since Triton compiles no separate
  kernels for values of M.
- the numbers of units. They are parameters, because Triton would compile a kernel for each value of numbers in a
  tuple. PLACE gets them in one tuple, `state`.
"""

import triton
import triton.language as tl

from .numerics import cast
from .operands import beside, column_halves
from .overlap import begin_tiles, let_next_begin, wait_for_earlier
from .parts import add_partials, last_to_arrive, store_partial


@triton.jit
def multiple(x, of: tl.constexpr):
    """The same number, marked as a multiple for the compiler. `tl.multiple_of` takes no arguments of a kernel."""
    return x // of * of


@triton.jit
def sum_steps(
    inputs, shape, sizes, place, LOAD_A: tl.constexpr, LOAD_B: tl.constexpr, LOAD_STEP: tl.constexpr,
    MULTIPLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REST_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr, CHECK_K: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    IMPRECISE_ACC: tl.constexpr,
):  # fmt: skip
    """The K loop: a tile of the product, summed in type `ACC` over its range of K.

    Returns its first `BLOCK_N` columns and, where `REST_N` is not 0, the `REST_N` next ones: a tile as wide as two
    powers of two together. With `SWAP` the tensor cores see the transposed product, so that few rows lie on their
    narrow side.

    Args:
        inputs: (a, b, b_rest, a_strides, b_strides, step_args), see `gemm_tiles`.
        place: what PLACE gives.
    """
    a, b, b_rest, a_strides, b_strides, step_args = inputs
    batch, row, col, end, first_k, last_k = place
    _, N, K = shape
    stop = tl.maximum(last_k, first_k + 1)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), ACC)
    # Without a rest there is nothing to carry; a small constant takes its place.
    REST: tl.constexpr = REST_N if REST_N > 0 else 1
    rest = tl.zeros((REST, BLOCK_M) if SWAP else (BLOCK_M, REST), ACC)
    # If the loop could be empty, the path around it would join the accumulators while wgmma still writes them, and the
    # assembler would wait for every single product.
    tl.assume(first_k < stop)
    for k in range(first_k, stop, BLOCK_K):
        loaded = None
        loaded_rest = None
        if LOAD_STEP is not None:
            # Begun before the wait for the blocks, so that both loads overlap.
            loaded = LOAD_STEP(step_args, (end, N, K), sizes, batch, row, col, k, BLOCK_M, BLOCK_N, BLOCK_K)
            if REST_N > 0:
                loaded_rest = LOAD_STEP(
                    step_args, (end, N, K), sizes, batch, row, col + BLOCK_N, k, BLOCK_M, REST_N, BLOCK_K
                )  # fmt: skip
        x = LOAD_A(a, (end, last_k), a_strides, sizes, batch, row, k, BLOCK_M, BLOCK_K, True, CHECK_K, WIDE)
        y = LOAD_B(b, (last_k, N), b_strides, sizes, batch, k, col, BLOCK_K, BLOCK_N, CHECK_K, True, WIDE)
        acc = MULTIPLY(x, y, acc, loaded, SWAP, PRECISION, IMPRECISE_ACC)
        if REST_N > 0:
            # The wait overlaps with the first product. A load before that product costs a tenth of the rate at 128 x
            # 192.
            z = LOAD_B(
                b_rest, (last_k, N), b_strides, sizes, batch, k, col + BLOCK_N, BLOCK_K, REST_N, CHECK_K, True, WIDE
            )  # fmt: skip
            rest = MULTIPLY(x, z, rest, loaded_rest, SWAP, PRECISION, IMPRECISE_ACC)
    return acc.T if SWAP else acc, rest.T if SWAP else rest


@triton.jit
def finish_block(
    acc, output, shape, sizes, batch, row, col, COLS: tl.constexpr,
    EPILOGUE: tl.constexpr, STORE: tl.constexpr, OUT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Epilogue, cast and store of one block, which becomes `COLS` columns of the output from column `col` on.

    `output` is (out, out_strides, args) and `shape` that of the output.
    """
    out, out_strides, args = output
    ROWS: tl.constexpr = acc.shape[0]
    value = EPILOGUE(acc, args, shape, sizes, batch, row, col, ROWS, COLS, WIDE)
    STORE(out, shape, out_strides, sizes, batch, row, col, cast(value, OUT), ROWS, COLS, WIDE)


@triton.jit
def subtiles_of(block, COUNT: tl.constexpr, PAIRED: tl.constexpr):
    """The columns of a block in `COUNT` blocks; where they are `PAIRED`, each has both columns of a pair."""
    if COUNT == 1:
        return (block,)
    else:
        left, right = column_halves(block)
        if PAIRED:
            left_first, left_second = column_halves(left)
            right_first, right_second = column_halves(right)
            left = beside(left_first, right_first)
            right = beside(left_second, right_second)
        return subtiles_of(left, COUNT // 2, PAIRED) + subtiles_of(right, COUNT // 2, PAIRED)


@triton.jit
def finish(
    acc, output, shape, sizes, place, part,
    PREFETCH: tl.constexpr, EPILOGUE: tl.constexpr, STORE: tl.constexpr, OUT: tl.constexpr, WIDE: tl.constexpr,
    PAIRED: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """Epilogue and store of a tile in 1, 2 or 4 subtiles. Each one is loaded while the previous ones are stored.

    Less staging memory buys another pipeline stage, and an epilogue that reads and writes much needs fewer registers.

    Args:
        output: (out, out_strides, args), see `gemm_tiles`.
        part: the part of the tile in `acc`, see `parts`, to which the other parts are added first; None for a whole
            tile.
    """
    out, out_strides, args = output
    batch, row, col, end, _, _ = place
    # Two columns of the product make one of the output.
    EACH: tl.constexpr = 2 if PAIRED else 1
    ROWS: tl.constexpr = acc.shape[0]
    COLS: tl.constexpr = acc.shape[1]
    WIDTH: tl.constexpr = COLS // SUBTILES
    shape = (end, shape[1] // EACH)
    blocks = subtiles_of(acc, SUBTILES, PAIRED)
    loaded = ()
    # The matrix that the epilogue reads is loaded two subtiles ahead.
    for i in tl.static_range(-2, SUBTILES):
        if i >= 0:
            block = blocks[i]
            if part is not None:
                block = add_partials(block, part, i * WIDTH, COLS)
            finish_block(
                block, (out, out_strides, args if PREFETCH is None else (args, loaded[i])), shape, sizes, batch,
                row, (col + i * WIDTH) // EACH, WIDTH // EACH, EPILOGUE, STORE, OUT, WIDE,
            )  # fmt: skip
        if PREFETCH is not None and i + 2 < SUBTILES:
            next_col = (col + (i + 2) * WIDTH) // EACH
            loaded += (PREFETCH(args, shape, sizes, batch, row, next_col, ROWS, WIDTH // EACH, WIDE),)  # type: ignore[assignment]


@triton.jit
def clear(
    output,
    shape,
    sizes,
    place,
    STORE: tl.constexpr,
    OUT: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Store zeros in place of a tile, which becomes `COLS` columns of the output.

    `output` is (out, out_strides), `shape` that of the output, and the place's column is one of it.
    """
    out, out_strides = output
    _, row, col, end, _, _ = place
    STORE(
        out, (end, shape[1]), out_strides, sizes, 0, row, col, tl.zeros((ROWS, COLS), OUT), ROWS, COLS, WIDE
    )


@triton.jit(do_not_specialize=["M", "tiles", "part_k"])
def gemm_tiles(
    a, b, out, b_rest, out_rest, b_scales, b_shifts, M, N, K, sizes, a_strides, b_strides, out_strides,
    tiles, part_k, place_args, step_args, args, workspace,
    PLACE: tl.constexpr, PART: tl.constexpr, LOAD_A: tl.constexpr, LOAD_B: tl.constexpr, LOAD_STEP: tl.constexpr,
    MULTIPLY: tl.constexpr, PREFETCH: tl.constexpr, EPILOGUE: tl.constexpr, STORE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REST_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND_M: tl.constexpr,
    SWAP: tl.constexpr, PAIRED: tl.constexpr, EPILOGUE_SUBTILES: tl.constexpr, CHECK_K: tl.constexpr,
    WIDE: tl.constexpr, ACC: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr, IMPRECISE_ACC: tl.constexpr,
    M_MULTIPLE: tl.constexpr, RAGGED: tl.constexpr, OVERLAPS: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """One program for each tile; with a workspace, one for each `part_k` of a tile's K, see `parts`.

    PLACE's `state` is (tiles, part_k, place_args).

    Args:
        b_rest, out_rest: b and out again, with descriptors for blocks of `REST_N` columns.
        b_scales, b_shifts: the group parameters of b if it has packed numbers, see `packed`; otherwise None.
        workspace: (partials, semaphores), or None if tiles are not cut.
        PART: where tiles are cut, which part of which tile a program has; otherwise not used.
        RAGGED: "rows" where PLACE is `place.tile_of_rows`, "k" where it is `place.part_of_ranges`, otherwise "". The
            host does not know the groups, so it starts as many programs as there can be units. Rows after the last
            group become 0.
        OVERLAPS: see `overlap.wait_for_earlier`.
        SOURCE: identifies the version of the file that writes assembly.
    """
    begin_tiles(a, b, OVERLAPS)
    M = multiple(M, M_MULTIPLE)
    shape = (M, N, K)
    unit = tl.program_id(0)
    right = b if b_scales is None else (b, b_scales, b_shifts)
    state = (tiles, part_k, place_args)
    place = PLACE(unit, state, shape, BLOCK_M, BLOCK_N + REST_N, BAND_M)
    if RAGGED != "":  # noqa: SIM102  # the first is decided while compiling
        if place[1] >= place[3]:
            return
    if RAGGED == "rows":
        batch, row, col, end, first_k, last_k = place
        if batch == place_args[1]:
            EACH: tl.constexpr = 2 if PAIRED else 1
            clear(
                (out, out_strides), (M, N // EACH), sizes, (0, row, col // EACH, end, 0, 0), STORE, OUT, WIDE, BLOCK_M,
                (BLOCK_N + REST_N) // EACH,
            )  # fmt: skip
            return
    acc, rest = sum_steps(
        (a, right, b_rest, a_strides, b_strides, step_args), shape, sizes, place, LOAD_A, LOAD_B, LOAD_STEP, MULTIPLY,
        BLOCK_M, BLOCK_N, REST_N, BLOCK_K, SWAP, CHECK_K, WIDE, ACC, PRECISION, IMPRECISE_ACC,
    )  # fmt: skip
    part = None
    rest_part = None
    last = True
    if workspace is not None:
        partials, semaphores = workspace
        SIZE: tl.constexpr = BLOCK_M * (BLOCK_N + REST_N)
        own, parts, tile, before = PART(unit, state, shape, place)
        partials += tl.cast(before, tl.int64) * SIZE
        part = (partials, own, parts, tile, tiles, SIZE)
        if REST_N > 0:
            rest_part = (partials + BLOCK_M * BLOCK_N, own, parts, tile, tiles, SIZE)
        last = parts == 1
        if parts > 1:
            store_partial(acc, part)
            if REST_N > 0:
                store_partial(rest, rest_part)
            last = last_to_arrive(semaphores, part)
    let_next_begin(OVERLAPS)
    if last:
        finish(
            acc, (out, out_strides, args), shape, sizes, place, part, PREFETCH, EPILOGUE, STORE, OUT, WIDE, PAIRED,
            EPILOGUE_SUBTILES,
        )  # fmt: skip
        if REST_N > 0:
            batch, row, col, end, first_k, last_k = place
            finish(
                rest, (out_rest, out_strides, args), shape, sizes, (batch, row, col + BLOCK_N, end, first_k, last_k),
                rest_part, PREFETCH, EPILOGUE, STORE, OUT, WIDE, PAIRED, 1,
            )  # fmt: skip


@triton.jit
def walk(
    units, a, b, out, a_strides, b_strides, out_strides, state, step_args, args, shape, sizes,
    PLACE: tl.constexpr, LOAD_A: tl.constexpr, LOAD_B: tl.constexpr, LOAD_STEP: tl.constexpr, MULTIPLY: tl.constexpr,
    PREFETCH: tl.constexpr, EPILOGUE: tl.constexpr, STORE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS_M: tl.constexpr, PARTS_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND_M: tl.constexpr, PAIRED: tl.constexpr,
    SUBTILES: tl.constexpr, CHECK_K: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr, OUT: tl.constexpr,
    PRECISION: tl.constexpr, IMPRECISE_ACC: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Distributes `units` tiles, of BLOCK_M / PARTS_M by BLOCK_N / PARTS_N each, to all programs in turn.

    `FLATTEN` fuses the tile loop with the K loop, so that the next tile's loads start under this tile's epilogue.
    """
    # Put together here: Triton 3.6 loses strides of 1 in tuples of tuples that it passes on twice.
    inputs = (a, b, None, a_strides, b_strides, step_args)
    output = (out, out_strides, args)
    for unit in tl.range(tl.program_id(0), units, tl.num_programs(0), flatten=FLATTEN):
        place = PLACE(unit, state, shape, BLOCK_M, BLOCK_N, BAND_M)
        acc, _ = sum_steps(
            inputs, shape, sizes, place, LOAD_A, LOAD_B, LOAD_STEP, MULTIPLY, BLOCK_M // PARTS_M, BLOCK_N // PARTS_N,
            0, BLOCK_K, False, CHECK_K, WIDE, ACC, PRECISION, IMPRECISE_ACC,
        )  # fmt: skip
        finish(acc, output, shape, sizes, place, None, PREFETCH, EPILOGUE, STORE, OUT, WIDE, PAIRED, SUBTILES)


@triton.jit(do_not_specialize=["M", "tiles", "tail_tiles", "cut", "strips"])
def gemm_persistent(
    a, b, out, a_tail, b_tail, out_tail, M, N, K, sizes, a_strides, b_strides, out_strides,
    tiles, tail_tiles, cut, strips, place_args, step_args, args,
    PLACE: tl.constexpr, TAIL_PLACE: tl.constexpr, LOAD_A: tl.constexpr, LOAD_B: tl.constexpr,
    LOAD_STEP: tl.constexpr, MULTIPLY: tl.constexpr, PREFETCH: tl.constexpr, EPILOGUE: tl.constexpr,
    STORE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND_M: tl.constexpr,
    PAIRED: tl.constexpr, EPILOGUE_SUBTILES: tl.constexpr, CHECK_K: tl.constexpr, WIDE: tl.constexpr,
    ACC: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr, IMPRECISE_ACC: tl.constexpr, FLATTEN: tl.constexpr,
    TAIL_M: tl.constexpr, TAIL_N: tl.constexpr, TAIL_K: tl.constexpr, CHECK_TAIL_K: tl.constexpr,
    TAIL_SUBTILES: tl.constexpr, M_MULTIPLE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """As many programs as run at once, each taking every num_programs-th tile.

    With a TAIL_PLACE, work that does not fill a wave of whole tiles is cut into `tail_tiles` small ones of `BLOCK_M /
    TAIL_M` by `BLOCK_N / TAIL_N`. They follow `tiles` whole ones: first the last `cut` whole tiles in small ones,
    then the columns that BLOCK_N does not divide, with `strips` small tiles for each row of them. Steps along K are
    then `TAIL_K`: a small tile computes little per step, and longer steps keep as many bytes in flight. `a_tail`,
    `b_tail` and `out_tail` are the matrices again, since a descriptor has the size of its blocks built in.

    PLACE's and TAIL_PLACE's `state` is (tiles, tail_tiles, cut, strips, place_args).
    """
    wait_for_earlier(OVERLAPS)
    state = (tiles, tail_tiles, cut, strips, place_args)
    M = multiple(M, M_MULTIPLE)
    walk(
        tiles, a, b, out, a_strides, b_strides, out_strides, state, step_args, args, (M, N, K), sizes,
        PLACE, LOAD_A, LOAD_B, LOAD_STEP, MULTIPLY, PREFETCH, EPILOGUE, STORE, BLOCK_M, BLOCK_N, 1, 1, BLOCK_K, BAND_M,
        PAIRED, EPILOGUE_SUBTILES, CHECK_K, WIDE, ACC, OUT, PRECISION, IMPRECISE_ACC, FLATTEN,
    )  # fmt: skip
    if TAIL_PLACE is not None:
        walk(
            tail_tiles, a_tail, b_tail, out_tail, a_strides, b_strides, out_strides, state, step_args, args,
            (M, N, K), sizes,
            TAIL_PLACE, LOAD_A, LOAD_B, LOAD_STEP, MULTIPLY, PREFETCH, EPILOGUE, STORE, BLOCK_M, BLOCK_N, TAIL_M,
            TAIL_N, TAIL_K, BAND_M, PAIRED, TAIL_SUBTILES, CHECK_TAIL_K, WIDE, ACC, OUT, PRECISION, IMPRECISE_ACC,
            FLATTEN,
        )  # fmt: skip
    let_next_begin(OVERLAPS)
