"""The matrix product: one tile program, two schedules.

`out[z] = epilogue(a[z] @ b[z])` for z over the batch, with a of (M, K), b of (K, N), out of (M, N). A tile program is
one product of a row of blocks of A with a column of blocks of B; `gemm_tiles` starts one program a tile and
`gemm_persistent` lets as many programs as the machine holds walk over all tiles. The parts come in as constexpr
functions: ORDER (see `order`), LOAD_A, LOAD_B and STORE (see `operands`) and EPILOGUE (see `epilogues`).
"""

import triton
import triton.language as tl

from .numerics import cast, dot


@triton.jit
def multiply(
    a, b, M, N, K, sizes, a_strides, b_strides, batch, row, col,
    LOAD_A: tl.constexpr, LOAD_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    CHECK_K: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, IMPRECISE_ACC: tl.constexpr,
):  # fmt: skip
    """The K loop: the tile of the product whose corner is (row, col), in the accumulator's type."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for k in range(0, K, BLOCK_K):
        x = LOAD_A(a, (M, K), a_strides, sizes, batch, row, k, BLOCK_M, BLOCK_K, True, CHECK_K, WIDE)
        y = LOAD_B(b, (K, N), b_strides, sizes, batch, k, col, BLOCK_K, BLOCK_N, CHECK_K, True, WIDE)
        acc = dot(x, y, acc, PRECISION, IMPRECISE_ACC)
    return acc


@triton.jit
def column_halves(acc):
    """The left and the right half of a tile, without moving data between threads."""
    rows: tl.constexpr = acc.shape[0]
    cols: tl.constexpr = acc.shape[1]
    return acc.reshape(rows, 2, cols // 2).permute(0, 2, 1).split()


@triton.jit
def finish_block(
    acc, out, args, M, N, sizes, out_strides, batch, row, col,
    EPILOGUE: tl.constexpr, STORE: tl.constexpr, OUT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Epilogue, cast and store of one block."""
    rows: tl.constexpr = acc.shape[0]
    cols: tl.constexpr = acc.shape[1]
    value = EPILOGUE(acc, args, (M, N), sizes, batch, row, col, rows, cols, WIDE)
    STORE(out, (M, N), out_strides, sizes, batch, row, col, cast(value, OUT), rows, cols, WIDE)


@triton.jit
def finish(
    acc, out, args, M, N, sizes, out_strides, batch, row, col,
    EPILOGUE: tl.constexpr, STORE: tl.constexpr, OUT: tl.constexpr, WIDE: tl.constexpr, SPLIT_STORE: tl.constexpr,
):  # fmt: skip
    """Epilogue and store of a tile, whole or in two halves: half the staging memory buys another pipeline stage."""
    if SPLIT_STORE:
        left, right = column_halves(acc)
        half: tl.constexpr = acc.shape[1] // 2
        finish_block(left, out, args, M, N, sizes, out_strides, batch, row, col, EPILOGUE, STORE, OUT, WIDE)
        finish_block(
            right, out, args, M, N, sizes, out_strides, batch, row, col + half, EPILOGUE, STORE, OUT, WIDE
        )
    else:
        finish_block(acc, out, args, M, N, sizes, out_strides, batch, row, col, EPILOGUE, STORE, OUT, WIDE)


@triton.jit
def gemm_tiles(
    a, b, out, args, M, N, K, sizes, a_strides, b_strides, out_strides,
    ORDER: tl.constexpr, LOAD_A: tl.constexpr, LOAD_B: tl.constexpr, EPILOGUE: tl.constexpr, STORE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_STORE: tl.constexpr, CHECK_K: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr, OUT: tl.constexpr,
    PRECISION: tl.constexpr, IMPRECISE_ACC: tl.constexpr,
):  # fmt: skip
    """One program a tile."""
    batch, tile_m, tile_n = ORDER(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    row = tile_m * BLOCK_M
    col = tile_n * BLOCK_N
    acc = multiply(
        a, b, M, N, K, sizes, a_strides, b_strides, batch, row, col,
        LOAD_A, LOAD_B, BLOCK_M, BLOCK_N, BLOCK_K, CHECK_K, WIDE, ACC, PRECISION, IMPRECISE_ACC,
    )  # fmt: skip
    finish(acc, out, args, M, N, sizes, out_strides, batch, row, col, EPILOGUE, STORE, OUT, WIDE, SPLIT_STORE)


@triton.jit
def whole_tile(
    unit, tail, tiles_m, tiles_n,
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
    unit, tail, tiles_m, tiles_n,
    ORDER: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS_M: tl.constexpr, PARTS_N: tl.constexpr,
):  # fmt: skip
    """Where part number `unit` of the tail lies: first the parts of whole tiles, then those of the ragged columns.

    `strips` is 0 where there are no ragged columns; then no unit gets past the parts of whole tiles.
    """
    first, cut, strips, _ = tail
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
    a, b, out, args, M, N, K, sizes, a_strides, b_strides, out_strides, units, tail, tiles_m, tiles_n,
    PLACE: tl.constexpr, ORDER: tl.constexpr, LOAD_A: tl.constexpr, LOAD_B: tl.constexpr, EPILOGUE: tl.constexpr,
    STORE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT_STORE: tl.constexpr, CHECK_K: tl.constexpr, WIDE: tl.constexpr,
    ACC: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr, IMPRECISE_ACC: tl.constexpr,
    FLATTEN: tl.constexpr, PARTS_M: tl.constexpr, PARTS_N: tl.constexpr,
):  # fmt: skip
    """Deals `units` tiles, of BLOCK_M / PARTS_M by BLOCK_N / PARTS_N each, out to all programs in turn.

    `FLATTEN` fuses the tile loop with the K loop, so that the next tile's loads start under this tile's epilogue.
    """
    for unit in tl.range(tl.program_id(0), units, tl.num_programs(0), flatten=FLATTEN):
        batch, row, col = PLACE(
            unit, tail, tiles_m, tiles_n, ORDER, GROUP_M, BLOCK_M, BLOCK_N, PARTS_M, PARTS_N
        )
        acc = multiply(
            a, b, M, N, K, sizes, a_strides, b_strides, batch, row, col,
            LOAD_A, LOAD_B, BLOCK_M // PARTS_M, BLOCK_N // PARTS_N, BLOCK_K, CHECK_K, WIDE, ACC,
            PRECISION, IMPRECISE_ACC,
        )  # fmt: skip
        finish(
            acc, out, args, M, N, sizes, out_strides, batch, row, col, EPILOGUE, STORE, OUT, WIDE, SPLIT_STORE
        )


@triton.jit
def gemm_persistent(
    a, b, out, a_tail, b_tail, out_tail, args, M, N, K, sizes, a_strides, b_strides, out_strides, tiles, tail,
    ORDER: tl.constexpr, LOAD_A: tl.constexpr, LOAD_B: tl.constexpr, EPILOGUE: tl.constexpr, STORE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_STORE: tl.constexpr, CHECK_K: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr, OUT: tl.constexpr,
    PRECISION: tl.constexpr, IMPRECISE_ACC: tl.constexpr, FLATTEN: tl.constexpr,
    TAIL_M: tl.constexpr, TAIL_N: tl.constexpr, TAIL_K: tl.constexpr, CHECK_TAIL_K: tl.constexpr,
):  # fmt: skip
    """As many programs as run at once, each taking every num_programs-th tile.

    With `TAIL_N` above 1, what does not fill a wave of whole tiles goes in small ones, of `BLOCK_M / TAIL_M` by
    `BLOCK_N / TAIL_N`: the last whole tiles, cut up, and the columns that BLOCK_N does not divide. `tail` is the tuple
    (first tile that is cut, how many are, parts in a row of the ragged columns, parts in all). Steps along K are then
    `TAIL_K`: a small tile computes little per step, and longer steps keep as many bytes in flight. `a_tail`, `b_tail`
    and `out_tail` are the matrices again, since a descriptor has the size of its blocks built in.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N) if TAIL_N == 1 else N // BLOCK_N
    walk(
        a, b, out, args, M, N, K, sizes, a_strides, b_strides, out_strides, tiles, tail, tiles_m, tiles_n,
        whole_tile, ORDER, LOAD_A, LOAD_B, EPILOGUE, STORE, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
        SPLIT_STORE, CHECK_K, WIDE, ACC, OUT, PRECISION, IMPRECISE_ACC, FLATTEN, 1, 1,
    )  # fmt: skip
    if TAIL_N > 1:
        walk(
            a_tail, b_tail, out_tail, args, M, N, K, sizes, a_strides, b_strides, out_strides, tail[3], tail,
            tiles_m, tiles_n,
            small_tile, ORDER, LOAD_A, LOAD_B, EPILOGUE, STORE, BLOCK_M, BLOCK_N, TAIL_K, GROUP_M,
            False, CHECK_TAIL_K, WIDE, ACC, OUT, PRECISION, IMPRECISE_ACC, FLATTEN, TAIL_M, TAIL_N,
        )  # fmt: skip
