"""Rung 5: matmul on a 1-D grid, in grouped order.

The GPU starts programs in the order of their numbers, and a few hundred run at a time. Their tiles determine the data
that the L2 cache must hold. Consider an output of 8 x 8 tiles, of which 8 run at a time:

    row by row                groups of 4 rows, column by column

    0  1  2  3  4  5  6  7    0  4  .  .  .  .  .  .
    .  .  .  .  .  .  .  .    1  5  .  .  .  .  .  .
    .  .  .  .  .  .  .  .    2  6  .  .  .  .  .  .
    .  .  .  .  .  .  .  .    3  7  .  .  .  .  .  .
    .  .  .  .  .  .  .  .    .  .  .  .  .  .  .  .

    1 row of blocks of a      4 rows of blocks of a
    8 columns of b            2 columns of b
    9 in all                  6 in all

The same work reads fewer blocks if the tiles in flight form roughly a square. So the grid becomes one-dimensional, and
the kernel computes the tile from the program's number. `GROUP` rows of tiles form a group. The tiles of a group are
taken column by column, then comes the next group. If the number of rows is not a multiple of GROUP, the last group has
fewer rows, so its columns are shorter. The `min` in the formula handles this; without it, some tiles would be computed
twice and others never.

Triton's library has this formula as `tl.swizzle2d`. This rung writes it out, checks that both give the same order, and
multiplies with either.

A one-dimensional grid also removes the limit of 65535 rows of tiles in rungs 3 and 4.

The gain depends on how much of the inputs L2 holds anyway. If the operands of all tiles in flight fit, the order
hardly matters. It matters more with larger matrices and a smaller cache.

CUTLASS calls this order threadblock swizzling. In Triton's tutorials it is called grouped ordering or super-grouping.

**What it gained, and why.** The order saves bytes, and at 16384x16384x2048 it saves time. At smaller sizes it gains
little, and the rung is slower than rung 4.

`gemmery order 16384 16384 2048 --tile 128x128x64 --programs 264` simulates the cache, for two programs on each of 132
multiprocessors. Row-by-row order reads 4.3 GB from memory, groups of 8 read 1.0 GB, and groups of 16 read 0.6 GB. The
product takes 2631 µs row by row, 2369 µs in groups of 8, and 2317 µs in groups of 16, which is 12 % less. At the
4.2 TB/s of rung 1, the memory takes 1.0 ms for the bytes of the row-by-row order, and 0.14 ms for those of groups of
16. So about a third of the memory's time that is saved shortens the product. The other two thirds were hidden: a
program copies two steps ahead, while it multiplies. Groups of 32 read the fewest bytes, 0.3 GB, and still take 2511 µs.
Bytes do not explain this; the best height is found by measuring.

At 8192x8192x8192, row-by-row order reads 2.3 GB, and groups of 8 read 1.45 GB. The memory delivers the 2.3 GB in a
fourth of the product's 2.4 ms. All group heights are within 3 % of each other.

*Where it loses.* The rung takes 7 % longer than rung 4 at 4096, and 5 % longer at 8192. The order explains at most a
part of this at 4096, and nothing at 8192. Groups of 1 are the row-by-row order of rung 4: compared with groups of 8,
they take 3 % less time at 4096, and 2 % more at 8192. The compiled code differs as well: a step has the same copies and
products, but 114 other instructions instead of 102. In the picture of speed over size, where each call comes after a
pause, the rung takes 5 to 6 % longer than rung 4 at all sizes up to 4096, and 1 % less at 8192.

At 4001x4099x4093 it takes 1.5 times as long as rung 4. The cause is not the order, which rung 6 shares, but the code.
Rung 4 just fits into the 255 registers that a thread can have. The tile's place takes a few more, and the compiler
spills 64 bytes: each step reloads 15 registers from local memory before it can compute its addresses.
`benchmarks/ladder_code.py` shows these loads as `LDL`, which reads local memory. Rung 6 avoids most of them with one
line.
"""

from collections.abc import Callable, Sequence

from _common import (
    DEVICE,
    INTERPRETED,
    Exercise,
    Question,
    Record,
    Row,
    bench_products,
    compare,
    normal,
    output,
    poisoned,
    product_sizes,
    run,
    rung,
)

# isort: split
import torch
import triton
import triton.language as tl

NUMBER = 5
TITLE = "matmul on a 1-D grid in grouped order"

TILE_M, TILE_N, TILE_K = (32, 32, 32) if INTERPRETED else (128, 128, 64)
GROUP = 3 if INTERPRETED else 8


@triton.jit
def grouped_written_out(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    tiles_in_group = GROUP * tiles_n
    group = tile // tiles_in_group
    first_row = group * GROUP
    rows = tl.minimum(tiles_m - first_row, GROUP)  # the last group may have fewer
    place = tile % tiles_in_group
    return first_row + place % rows, place // rows


@triton.jit
def grouped_by_library(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    # swizzle2d takes the place that the tile would have row by row, and returns the place in grouped order.
    return tl.swizzle2d(tile // tiles_n, tile % tiles_n, tiles_m, tiles_n, GROUP)


@triton.jit
def order_kernel(out_ptr, tiles_m, tiles_n, GROUP: tl.constexpr, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    """Write down where each tile number ends up, so that the orders can be looked at."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tiles = tiles_m * tiles_n
    tile = tl.minimum(number, tiles - 1)  # a number past the last tile would lie in a group without rows
    tile_m, tile_n = ORDER(tile, tiles_m, tiles_n, GROUP)
    tl.store(out_ptr + 2 * number, tile_m, mask=number < tiles)
    tl.store(out_ptr + 2 * number + 1, tile_n, mask=number < tiles)


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, out_ptr, M, N, K,
    a_stride_m, a_stride_k, b_stride_k, b_stride_n, out_stride_m, out_stride_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    # New in this rung: two lines. A jitted function may be a constant argument of a kernel.
    tile_m, tile_n = ORDER(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    row, col = tile_m * BLOCK_M, tile_n * BLOCK_N

    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row_inside = row + m < M
    col_inside = col + n < N
    a_ptr += row.to(tl.int64) * a_stride_m
    b_ptr += col.to(tl.int64) * b_stride_n
    out_ptr += row.to(tl.int64) * out_stride_m + col.to(tl.int64) * out_stride_n
    a_block = a_ptr + m[:, None] * a_stride_m + k[None, :] * a_stride_k
    b_block = b_ptr + k[:, None] * b_stride_k + n[None, :] * b_stride_n

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k_inside = start + k < K
        a = tl.load(a_block, mask=row_inside[:, None] & k_inside[None, :], other=0.0)
        b = tl.load(b_block, mask=k_inside[:, None] & col_inside[None, :], other=0.0)
        acc = tl.dot(a, b, acc)
        a_block += BLOCK_K * a_stride_k
        b_block += BLOCK_K * b_stride_k

    out_block = out_ptr + m[:, None] * out_stride_m + n[None, :] * out_stride_n
    tl.store(out_block, acc.to(tl.float16), mask=row_inside[:, None] & col_inside[None, :])


ORDERS = {"written out": grouped_written_out, "tl.swizzle2d": grouped_by_library}


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    order: str = "written out",
    group: int = GROUP,
) -> torch.Tensor:
    """a @ b for float16 matrices of any size and strides, tiles in grouped order."""
    M, N, K = product_sizes(a, b)
    if order not in ORDERS or group < 1:
        raise ValueError(
            f"wanted an order of {', '.join(ORDERS)} and a group of at least 1, got {order!r} and {group}"
        )
    out = output(out, a, M, N)
    matmul_kernel[(triton.cdiv(M, TILE_M) * triton.cdiv(N, TILE_N),)](
        a, b, out, M, N, K, *a.stride(), *b.stride(), *out.stride(),
        BLOCK_M=TILE_M, BLOCK_N=TILE_N, BLOCK_K=TILE_K, GROUP=group, ORDER=ORDERS[order], num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def places(tiles_m: int, tiles_n: int, group: int, order: str) -> list[tuple[int, int]]:
    """The (row, column) of each tile number, as the kernels see it."""
    out = torch.full((tiles_m * tiles_n, 2), -1, device=DEVICE, dtype=torch.int32)
    block = 256
    order_kernel[(triton.cdiv(tiles_m * tiles_n, block),)](
        out, tiles_m, tiles_n, GROUP=group, ORDER=ORDERS[order], BLOCK=block
    )
    return [(row, col) for row, col in out.tolist()]


def picture(tiles_m: int, tiles_n: int, group: int) -> str:
    """A grid with each tile's number at its place."""
    numbers = {place: tile for tile, place in enumerate(places(tiles_m, tiles_n, group, "written out"))}
    lines = ("".join(f"{numbers[row, col]:4d}" for col in range(tiles_n)) for row in range(tiles_m))
    return "\n".join(lines)


def blocks_touched(tiles_m: int, tiles_n: int, group: int, in_flight: int) -> float:
    """The average number of blocks of a and b that the tiles in flight need together for one step along K."""
    order = places(tiles_m, tiles_n, group, "written out")
    waves = [order[i : i + in_flight] for i in range(0, len(order), in_flight)]
    return sum(len({row for row, _ in wave}) + len({col for _, col in wave}) for wave in waves) / len(waves)


# ---------------------------------------------------------------------------------------------------------------------
# Predict before you run, and exercises


def place_answer() -> str:
    found = solved_place(13, 7, 6, 3)
    return f"Group 13 // 18 = 0, which begins at row 0: row 13 % 3 = 1, column 13 // 3 = 4. The formula: {found}."


def touched_answer() -> str:
    found = []
    for group in (1, 11):
        wave = [solved_place(tile, 64, 64, group) for tile in range(132)]
        rows, cols = len({row for row, _ in wave}), len({col for _, col in wave})
        found.append(f"groups of {group}: {rows} rows of a and {cols} columns of b")
    return "; ".join(found) + ". `gemmery order 8192 8192 4096` draws it."


def cache_answer() -> str:
    return (
        "4096: 2 x 34 MB, most of which 60 MB of L2 hold, so the order gains nothing. 8192: 2 x 134 MB. There it "
        "saves bytes, but no time as long as the tensor cores take longer than the memory."
    )


QUESTIONS = (
    Question("7 x 6 tiles in groups of 3: where does tile 13 lie?", place_answer),
    Question(
        "64 x 64 tiles, 132 of them at a time: which blocks do the first ones read, row by row, and in groups of 11?",
        touched_answer,
    ),
    Question(
        "An H200 has 60 MB of L2. At 4096x4096x4096 and at 8192x8192x8192, can the order gain much time?",
        cache_answer,
    ),
)


def place_of(tile: int, tiles_m: int, tiles_n: int, group: int) -> tuple[int, int]:
    """Exercise 1: the row and the column of a tile in grouped order, in Python."""
    raise NotImplementedError("the group, its first row, how many rows it has, then the place within it")


def check_place_of(answer: Callable[[int, int, int, int], tuple[int, int]]) -> None:
    for tiles_m, tiles_n, group in ((8, 8, 4), (7, 6, 3), (2, 5, 8)):
        expected = places(tiles_m, tiles_n, group, "written out")
        found = [answer(tile, tiles_m, tiles_n, group) for tile in range(tiles_m * tiles_n)]
        assert found == expected, (
            f"{tiles_m} x {tiles_n} tiles in groups of {group}: the kernel has {expected}"
        )


def best_group(in_flight: int) -> int:
    """Exercise 2: the group height for which this number of tiles, all in one full group, reads the fewest blocks."""
    raise NotImplementedError("a group of g rows has in_flight / g columns: find the least sum of both")


def check_best_group(answer: Callable[[int], int]) -> None:
    for in_flight in (16, 64, 132):
        group = answer(in_flight)
        least = min(rows + triton.cdiv(in_flight, rows) for rows in range(1, in_flight + 1))
        assert group + triton.cdiv(in_flight, group) == least, f"{in_flight} tiles: {least} blocks are enough"


# ---------------------------------------------------------------------------------------------------------------------
# The check and the measurement


def check() -> list[Row]:
    for tiles_m, tiles_n, group in ((8, 8, 4), (7, 5, 3), (1, 9, 8), (13, 1, 4), (5, 6, 1), (10, 4, 16)):
        written, library = (places(tiles_m, tiles_n, group, order) for order in ORDERS)
        if written != library:
            raise AssertionError(
                f"{tiles_m}x{tiles_n} tiles, groups of {group}: tl.swizzle2d differs from the formula"
            )
        if sorted(written) != [(row, col) for row in range(tiles_m) for col in range(tiles_n)]:
            raise AssertionError(f"{tiles_m}x{tiles_n} tiles, groups of {group}: not each tile exactly once")
    rows = []
    # In tiles: full groups, a ragged last group, fewer rows than a group.
    for m, n, k in ((2 * GROUP, 3, 1), (GROUP + 2, 2, 2), (1, 4, 3)):
        m, n, k = m * TILE_M - 5, n * TILE_N - 3, k * TILE_K + 1
        a, b = normal(m, k), normal(k, n)
        for order in ORDERS:
            out = matmul(a, b, out=poisoned(m, n), order=order)
            reference = a.double() @ b.double()
            rows += compare(f"rung 5, {order}", f"{m}x{n}x{k}", out, a @ b, reference, 5e-4)
    return rows


def bench() -> list[Row]:
    before = rung(4)
    return bench_products(
        ((4096, 4096, 4096), (8192, 8192, 8192), (4001, 4099, 4093)),
        [
            ("rung 5", "this", lambda a, w, out: matmul(a, w.T, out)),
            ("rung 5, tl.swizzle2d", "other", lambda a, w, out: matmul(a, w.T, out, order="tl.swizzle2d")),
            ("rung 4", "before", lambda a, w, out: before.matmul(a, w.T, out)),
            ("torch", "torch", lambda a, w, out: torch.matmul(a, w.T, out=out)),
        ],
    )


def main(arguments: Sequence[str] | None = None) -> Record:
    record = run(NUMBER, TITLE, check, bench, arguments, QUESTIONS, EXERCISES)
    print("\n7 x 6 tiles in groups of 3; the last group has one row")
    print(picture(7, 6, 3))
    print("\nBlocks of a and b that 128 tiles in flight need at each step, 64 x 64 tiles:")
    for group in (1, 2, 4, 8, 16, 32):
        print(f"  groups of {group:2d}: {blocks_touched(64, 64, group, 128):5.1f}")
    return record


# ---------------------------------------------------------------------------------------------------------------------
# Solutions of the exercises


def solved_place(tile: int, tiles_m: int, tiles_n: int, group: int) -> tuple[int, int]:
    first = tile // (group * tiles_n) * group
    rows = min(tiles_m - first, group)
    inside = tile % (group * tiles_n)
    return first + inside % rows, inside // rows


def solved_best_group(in_flight: int) -> int:
    return min(range(1, in_flight + 1), key=lambda group: group + triton.cdiv(in_flight, group))


EXERCISES = (
    Exercise(place_of, solved_place, check_place_of),
    Exercise(best_group, solved_best_group, check_best_group),
)


if __name__ == "__main__":
    main()
