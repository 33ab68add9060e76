"""The matrix product: one tile program, two schedules.

`out[z] = epilogue(a[z] @ b[z])` for z over the batch, with a of (M, K), b of (K, N), out of (M, N). A tile program is
one product of a row of blocks of A with a column of blocks of B; `gemm_tiles` starts one program a tile and
`gemm_persistent` lets as many programs as the machine holds walk over all tiles. The parts come in as constexpr
functions: ORDER (see `order`), LOAD_A, LOAD_B and STORE (see `operands`), EPILOGUE and AHEAD (see `epilogues`). With
PAIRED, LOAD_B gives each tile columns of both halves of B, and the epilogue makes one column of two.
"""

import triton
import triton.language as tl

from .numerics import cast, dot
from .operands import beside, column_halves
from .parts import add_parts, arrive, leave_part
from .scales import factors, factors_of_columns, multiplied


@triton.jit
def add_step(
    x, y, acc, left, right, SWAP: tl.constexpr, PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr, IMPRECISE_ACC: tl.constexpr,
):  # fmt: skip
    """`acc + x @ y`, or with `SWAP` its transpose; times the factors of x's rows and y's columns where there are any.

    `PRODUCT` is the type of a scaled step's product.
    """
    first = y.T if SWAP else x
    second = x.T if SWAP else y
    if left is None:
        return dot(first, second, acc, PRECISION, IMPRECISE_ACC)
    else:
        part = dot(first, second, tl.zeros(acc.shape, PRODUCT), PRECISION, IMPRECISE_ACC)
        return acc + multiplied(part, left, right, SWAP)


@triton.jit
def multiply(
    a, b, b_rest, scales, M, N, K, sizes, a_strides, b_strides, batch, row, col, first_k, last_k,
    LOAD_A: tl.constexpr, LOAD_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REST_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr,
    CHECK_K: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, IMPRECISE_ACC: tl.constexpr, SHARED_M: tl.constexpr, SHARED_N: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """The K loop: the tile with corner (row, col) of the product over `first_k` to `last_k`, in the accumulator's type.

    Returns its first `BLOCK_N` columns and, where `REST_N` is not 0, the `REST_N` next ones: a tile as wide as two
    powers of two together. With `SWAP` the tensor cores see the transposed product, so that few rows lie on their
    narrow side. With `scales`, factors that `SHARED_M` rows of A and `SHARED_N` columns of B share and the columns of
    a step, the sum is fp32.
    """
    SUM: tl.constexpr = ACC if SHARED_M == 0 else tl.float32
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), SUM)
    # Without a rest there is nothing to carry; a small constant takes its place.
    REST: tl.constexpr = REST_N if REST_N > 0 else 1
    rest = tl.zeros((REST, BLOCK_M) if SWAP else (BLOCK_M, REST), SUM)
    # Were the loop possibly empty, its way around would join the accumulators while wgmma still writes them, and the
    # assembler would then wait for every single one.
    tl.assume(first_k < last_k)
    for k in range(first_k, last_k, BLOCK_K):
        left = None
        right = None
        right_rest = None
        if SHARED_M > 0:
            # Before the operands are waited for, so that they come meanwhile.
            at_a, steps_a, row_a, col_a, at_b, steps_b, row_b, col_b = scales
            left = factors(at_a, steps_a, row_a, col_a, sizes, batch, row, k, M, BLOCK_M, SHARED_M, BLOCK_K)
            right = factors_of_columns(
                at_b, steps_b, row_b, col_b, sizes, batch, col, k, N, BLOCK_N, SHARED_N, BLOCK_K, PAIRED
            )  # fmt: skip
            if REST_N > 0:
                right_rest = factors_of_columns(
                    at_b, steps_b, row_b, col_b, sizes, batch, col + BLOCK_N, k, N, REST_N, SHARED_N, BLOCK_K, PAIRED
                )  # fmt: skip
        x = LOAD_A(a, (M, K), a_strides, sizes, batch, row, k, BLOCK_M, BLOCK_K, True, CHECK_K, WIDE)
        y = LOAD_B(b, (K, N), b_strides, sizes, batch, k, col, BLOCK_K, BLOCK_N, CHECK_K, True, WIDE)
        acc = add_step(
            x, y, acc, left, right, SWAP, ACC, PRECISION, IMPRECISE_ACC,
        )  # fmt: skip
        if REST_N > 0:
            # Waited for under the first product: loaded before it, it costs a tenth of the rate at 128 x 192.
            z = LOAD_B(
                b_rest, (K, N), b_strides, sizes, batch, k, col + BLOCK_N, BLOCK_K, REST_N, CHECK_K, True, WIDE
            )  # fmt: skip
            rest = add_step(
                x, z, rest, left, right_rest, SWAP, ACC, PRECISION, IMPRECISE_ACC,
            )  # fmt: skip
    return acc.T if SWAP else acc, rest.T if SWAP else rest


@triton.jit
def finish_block(
    acc, out, args, M, N, sizes, out_strides, batch, row, col,
    EPILOGUE: tl.constexpr, STORE: tl.constexpr, OUT: tl.constexpr, WIDE: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Epilogue, cast and store of one block; `PAIRED` where two columns of the product make one of the output."""
    rows: tl.constexpr = acc.shape[0]
    cols: tl.constexpr = acc.shape[1] // 2 if PAIRED else acc.shape[1]
    if PAIRED:
        N = N // 2
        col = col // 2
    value = EPILOGUE(acc, args, (M, N), sizes, batch, row, col, rows, cols, WIDE)
    STORE(out, (M, N), out_strides, sizes, batch, row, col, cast(value, OUT), rows, cols, WIDE)


@triton.jit
def pieces_of(block, PAIRED: tl.constexpr):
    """A block as two; where its columns are `PAIRED`, each has both columns of a pair."""
    left, right = column_halves(block)
    if PAIRED:
        left_first, left_second = column_halves(left)
        right_first, right_second = column_halves(right)
        left = beside(left_first, right_first)
        right = beside(left_second, right_second)
    return left, right


@triton.jit
def load_ahead(
    args, M, N, sizes, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr,
    AHEAD: tl.constexpr, WIDE: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """What the epilogue of the product's block with corner (row, col) needs of memory."""
    if PAIRED:
        return AHEAD(args, (M, N // 2), sizes, batch, row, col // 2, ROWS, COLS // 2, WIDE)
    else:
        return AHEAD(args, (M, N), sizes, batch, row, col, ROWS, COLS, WIDE)


@triton.jit
def finish_piece(
    piece, out, args, M, N, sizes, out_strides, batch, row, col, place, partials, first, COLS: tl.constexpr,
    EPILOGUE: tl.constexpr, STORE: tl.constexpr, OUT: tl.constexpr, WIDE: tl.constexpr, PAIRED: tl.constexpr,
    SPLIT_K: tl.constexpr,
):  # fmt: skip
    """Epilogue and store of the columns from `first` on of a tile of `COLS`, whose other parts are added first."""
    if SPLIT_K:
        piece = add_parts(piece, place, partials, first, COLS)
    finish_block(
        piece, out, args, M, N, sizes, out_strides, batch, row, col + first, EPILOGUE, STORE, OUT, WIDE, PAIRED
    )  # fmt: skip


@triton.jit
def finish(
    acc, out, args, M, N, sizes, out_strides, batch, row, col, place, partials,
    EPILOGUE: tl.constexpr, AHEAD: tl.constexpr, STORE: tl.constexpr, OUT: tl.constexpr, WIDE: tl.constexpr,
    PAIRED: tl.constexpr, PIECES: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """Epilogue and store of a tile, whole or in 2 or 4 pieces, each of which loads while those before it are stored.

    Less staging memory buys another pipeline stage, and an epilogue that reads and writes much needs fewer registers.
    With `SPLIT_K` the tile's other parts are added first.
    """
    ROWS: tl.constexpr = acc.shape[0]
    COLS: tl.constexpr = acc.shape[1]
    PART: tl.constexpr = COLS // PIECES
    args_0 = args if AHEAD is None else (
        args, load_ahead(args, M, N, sizes, batch, row, col, ROWS, PART, AHEAD, WIDE, PAIRED)
    )  # fmt: skip
    if PIECES == 1:
        finish_piece(
            acc, out, args_0, M, N, sizes, out_strides, batch, row, col, place, partials, 0, COLS,
            EPILOGUE, STORE, OUT, WIDE, PAIRED, SPLIT_K,
        )  # fmt: skip
    else:
        args_1 = args if AHEAD is None else (
            args, load_ahead(args, M, N, sizes, batch, row, col + PART, ROWS, PART, AHEAD, WIDE, PAIRED)
        )  # fmt: skip
        left, right = pieces_of(acc, PAIRED)
        if PIECES == 2:
            finish_piece(
                left, out, args_0, M, N, sizes, out_strides, batch, row, col, place, partials, 0, COLS,
                EPILOGUE, STORE, OUT, WIDE, PAIRED, SPLIT_K,
            )  # fmt: skip
            finish_piece(
                right, out, args_1, M, N, sizes, out_strides, batch, row, col, place, partials, PART, COLS,
                EPILOGUE, STORE, OUT, WIDE, PAIRED, SPLIT_K,
            )  # fmt: skip
        else:
            piece_0, piece_1 = pieces_of(left, PAIRED)
            piece_2, piece_3 = pieces_of(right, PAIRED)
            finish_piece(
                piece_0, out, args_0, M, N, sizes, out_strides, batch, row, col, place, partials, 0, COLS,
                EPILOGUE, STORE, OUT, WIDE, PAIRED, SPLIT_K,
            )  # fmt: skip
            args_2 = args if AHEAD is None else (
                args, load_ahead(args, M, N, sizes, batch, row, col + 2 * PART, ROWS, PART, AHEAD, WIDE, PAIRED)
            )  # fmt: skip
            finish_piece(
                piece_1, out, args_1, M, N, sizes, out_strides, batch, row, col, place, partials, PART, COLS,
                EPILOGUE, STORE, OUT, WIDE, PAIRED, SPLIT_K,
            )  # fmt: skip
            args_3 = args if AHEAD is None else (
                args, load_ahead(args, M, N, sizes, batch, row, col + 3 * PART, ROWS, PART, AHEAD, WIDE, PAIRED)
            )  # fmt: skip
            finish_piece(
                piece_2, out, args_2, M, N, sizes, out_strides, batch, row, col, place, partials, 2 * PART, COLS,
                EPILOGUE, STORE, OUT, WIDE, PAIRED, SPLIT_K,
            )  # fmt: skip
            finish_piece(
                piece_3, out, args_3, M, N, sizes, out_strides, batch, row, col, place, partials, 3 * PART, COLS,
                EPILOGUE, STORE, OUT, WIDE, PAIRED, SPLIT_K,
            )  # fmt: skip


@triton.jit(do_not_specialize=["M", "tiles", "part_k"])
def gemm_tiles(
    a, b, out, b_rest, out_rest, b_scales, b_shifts, scales, args, M, N, K, sizes, a_strides, b_strides, out_strides,
    tiles, part_k, partials, arrivals,
    ORDER: tl.constexpr, LOAD_A: tl.constexpr, LOAD_B: tl.constexpr, EPILOGUE: tl.constexpr, AHEAD: tl.constexpr,
    STORE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REST_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SWAP: tl.constexpr, PIECES: tl.constexpr, CHECK_K: tl.constexpr, WIDE: tl.constexpr,
    ACC: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr, IMPRECISE_ACC: tl.constexpr,
    PAIRED: tl.constexpr, SPLIT_K: tl.constexpr, PACKED: tl.constexpr, SHARED_M: tl.constexpr, SHARED_N: tl.constexpr,
):  # fmt: skip
    """One program a tile, or with `SPLIT_K` one for every `part_k` of a tile's K; see `parts`.

    `b_rest` and `out_rest` are b and out again, with descriptors for blocks of `REST_N` columns. `PACKED` where b is
    the words of packed numbers, to which `b_scales` and `b_shifts` belong; see `packed`. `scales` are factors that
    change along K, which `SHARED_M` rows and `SHARED_N` columns share; see `scales`.
    """
    right = (b, b_scales, b_shifts) if PACKED else b
    part = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    batch, tile_m, tile_n = ORDER(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N + REST_N), GROUP_M)
    row = tile_m * BLOCK_M
    col = tile_n * (BLOCK_N + REST_N)
    acc, rest = multiply(
        a, right, b_rest, scales, M, N, K, sizes, a_strides, b_strides, batch, row, col,
        part * part_k if SPLIT_K else 0, min(part * part_k + part_k, K) if SPLIT_K else tl.maximum(K, 1),
        LOAD_A, LOAD_B, BLOCK_M, BLOCK_N, REST_N, BLOCK_K, SWAP, CHECK_K, WIDE, ACC, PRECISION, IMPRECISE_ACC,
        SHARED_M, SHARED_N, PAIRED,
    )  # fmt: skip
    place = (part, tl.num_programs(0) // tiles, tile, tiles, BLOCK_M * (BLOCK_N + REST_N))
    last = True
    if SPLIT_K:
        leave_part(acc, place, partials)
        if REST_N > 0:
            leave_part(rest, place, partials + BLOCK_M * BLOCK_N)
        last = arrive(place, arrivals)
    if last:
        finish(
            acc, out, args, M, N, sizes, out_strides, batch, row, col, place, partials,
            EPILOGUE, AHEAD, STORE, OUT, WIDE, PAIRED, PIECES, SPLIT_K,
        )  # fmt: skip
        if REST_N > 0:
            finish(
                rest, out_rest, args, M, N, sizes, out_strides, batch, row, col + BLOCK_N, place,
                partials + BLOCK_M * BLOCK_N if SPLIT_K else partials,
                EPILOGUE, AHEAD, STORE, OUT, WIDE, PAIRED, 1, SPLIT_K,
            )  # fmt: skip


@triton.jit
def whole_tile(
    unit, first, cut, strips, tiles_m, tiles_n,
    ORDER: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS_M: tl.constexpr, PARTS_N: tl.constexpr,
):  # fmt: skip
    """Where tile number `unit` lies: its batch, and the row and column of its corner.

    Takes what `small_tile` takes, so that `walk` can be given either.
    """
    batch, tile_m, tile_n = ORDER(unit, tiles_m, tiles_n, GROUP_M)
    return batch, tile_m * BLOCK_M, tile_n * BLOCK_N


@triton.jit
def small_tile(
    unit, first, cut, strips, tiles_m, tiles_n,
    ORDER: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS_M: tl.constexpr, PARTS_N: tl.constexpr,
):  # fmt: skip
    """Where part number `unit` of the tail lies: first the parts of whole tiles, then those of the ragged columns.

    `strips` is 0 where there are no ragged columns; then no unit gets past the parts of whole tiles.
    """
    PARTS: tl.constexpr = PARTS_M * PARTS_N
    if unit < cut * PARTS:
        batch, tile_m, tile_n = ORDER(first + unit // PARTS, tiles_m, tiles_n, GROUP_M)
        part_m = unit % PARTS_M
        part_n = unit % PARTS // PARTS_M
    else:
        strip = (unit - cut * PARTS) // strips
        batch = strip // (tiles_m * PARTS_M)
        tile_m = strip // PARTS_M % tiles_m
        tile_n = tile_m * 0 + tiles_n
        part_m = strip % PARTS_M
        part_n = (unit - cut * PARTS) % strips
    row = tile_m * BLOCK_M + part_m * (BLOCK_M // PARTS_M)
    return batch, row, tile_n * BLOCK_N + part_n * (BLOCK_N // PARTS_N)


@triton.jit
def walk(
    a, b, out, args, M, N, K, sizes, a_strides, b_strides, out_strides, units, first, cut, strips, tiles_m, tiles_n,
    PLACE: tl.constexpr, ORDER: tl.constexpr, LOAD_A: tl.constexpr, LOAD_B: tl.constexpr, EPILOGUE: tl.constexpr,
    AHEAD: tl.constexpr, STORE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, PIECES: tl.constexpr, CHECK_K: tl.constexpr, WIDE: tl.constexpr,
    ACC: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr, IMPRECISE_ACC: tl.constexpr,
    PAIRED: tl.constexpr, FLATTEN: tl.constexpr, PARTS_M: tl.constexpr, PARTS_N: tl.constexpr,
):  # fmt: skip
    """Deals `units` tiles, of BLOCK_M / PARTS_M by BLOCK_N / PARTS_N each, out to all programs in turn.

    `FLATTEN` fuses the tile loop with the K loop, so that the next tile's loads start under this tile's epilogue.
    """
    for unit in tl.range(tl.program_id(0), units, tl.num_programs(0), flatten=FLATTEN):
        batch, row, col = PLACE(
            unit, first, cut, strips, tiles_m, tiles_n, ORDER, GROUP_M, BLOCK_M, BLOCK_N, PARTS_M, PARTS_N
        )
        acc, _ = multiply(
            a, b, None, None, M, N, K, sizes, a_strides, b_strides, batch, row, col, 0, tl.maximum(K, 1),
            LOAD_A, LOAD_B, BLOCK_M // PARTS_M, BLOCK_N // PARTS_N, 0, BLOCK_K, False, CHECK_K, WIDE, ACC,
            PRECISION, IMPRECISE_ACC, 0, 0, PAIRED,
        )  # fmt: skip
        finish(
            acc, out, args, M, N, sizes, out_strides, batch, row, col, None, None,
            EPILOGUE, AHEAD, STORE, OUT, WIDE, PAIRED, PIECES, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "tiles", "cut", "strips", "parts"])
def gemm_persistent(
    a, b, out, a_tail, b_tail, out_tail, args, M, N, K, sizes, a_strides, b_strides, out_strides,
    tiles, cut, strips, parts,
    ORDER: tl.constexpr, LOAD_A: tl.constexpr, LOAD_B: tl.constexpr, EPILOGUE: tl.constexpr, AHEAD: tl.constexpr,
    STORE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PIECES: tl.constexpr, CHECK_K: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr, OUT: tl.constexpr,
    PRECISION: tl.constexpr, IMPRECISE_ACC: tl.constexpr, PAIRED: tl.constexpr, FLATTEN: tl.constexpr,
    TAIL_M: tl.constexpr, TAIL_N: tl.constexpr, TAIL_K: tl.constexpr, CHECK_TAIL_K: tl.constexpr,
    TAIL_PIECES: tl.constexpr,
):  # fmt: skip
    """As many programs as run at once, each taking every num_programs-th tile.

    With `TAIL_N` above 1, what does not fill a wave of whole tiles goes in small ones, of `BLOCK_M / TAIL_M` by
    `BLOCK_N / TAIL_N`: the last `cut` whole tiles, cut up, and the columns that BLOCK_N does not divide, `strips` small
    tiles to a row of them; these are `parts` small tiles in all, behind `tiles` whole ones. Steps along K are then
    `TAIL_K`: a small tile computes little per step, and longer steps keep as many bytes in flight. `a_tail`, `b_tail`
    and `out_tail` are the matrices again, since a descriptor has the size of its blocks built in.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N) if TAIL_N == 1 else N // BLOCK_N
    walk(
        a, b, out, args, M, N, K, sizes, a_strides, b_strides, out_strides, tiles, tiles, cut, strips, tiles_m, tiles_n,
        whole_tile, ORDER, LOAD_A, LOAD_B, EPILOGUE, AHEAD, STORE, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
        PIECES, CHECK_K, WIDE, ACC, OUT, PRECISION, IMPRECISE_ACC, PAIRED, FLATTEN, 1, 1,
    )  # fmt: skip
    if TAIL_N > 1:
        walk(
            a_tail, b_tail, out_tail, args, M, N, K, sizes, a_strides, b_strides, out_strides, parts, tiles,
            cut, strips, tiles_m, tiles_n,
            small_tile, ORDER, LOAD_A, LOAD_B, EPILOGUE, AHEAD, STORE, BLOCK_M, BLOCK_N, TAIL_K, GROUP_M,
            TAIL_PIECES, CHECK_TAIL_K, WIDE, ACC, OUT, PRECISION, IMPRECISE_ACC, PAIRED, FLATTEN, TAIL_M, TAIL_N,
        )  # fmt: skip
