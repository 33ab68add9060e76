"""Rung 7: persistent matmul, a loop over tiles in NUM_SMS programs.

So far, each tile had its own program. At its beginning, a program computes addresses and waits for its first blocks,
while the tensor cores are idle. At its end, it converts and stores the tile. The start of the next program takes time,
too. And programs run in waves: 512 tiles on 132 processors are three full waves and a fourth that is mostly full.

A *persistent* kernel starts as many programs as the GPU has processors (SMs), and each of them computes several tiles:

    one program a tile                     persistent

    SM 0  |start|K loop|end| |start|...    SM 0  |start| K loop of tile 0 |end| K loop of tile 132 |end| ...
    SM 1  |start|K loop|end| |start|...    SM 1  |start| K loop of tile 1 |end| K loop of tile 133 |end| ...

The same tiles run at the same time as before, so the grouped order remains useful.

With `flatten=True` in `tl.range`, the compiler merges the loop over tiles and the loop over K into one. The pipeline
then does not run empty at the end of a tile: while its last blocks are multiplied, the first blocks of the next tile
are already being loaded.

This does not help with every tile. A flattened step also has to test whether a new tile begins. All parts of the
addresses stay in registers for the next tile, and a thread has only 255. And several programs on an SM, which would
hide each other's beginning and end, are now one. So the tuner measures both ways.

Persistent threads: Gupta, Stuart, Owens, "A Study of Persistent Threads Style GPU Programming for GPGPU Workloads",
InPar 2012. Another solution for the last wave: Osama et al., "Stream-K", PPoPP 2023.

**What it gained, and why.** It is 1.15 times as fast as rung 6 at 4096 and at 8192, and reaches 0.95 and 0.99 of
cuBLAS. The gain comes from flattening, not from the loop over tiles. With the same tile of 128 x 256 x 64 and 3 stages,
at 4096:

    rung 6, a program a tile      232 µs
    persistent, two loops         268 µs
    persistent, flattened         202 µs        torch: 189 µs

With this tile, one program fills an SM, so the tensor cores are idle while it begins and ends. Persistent programs
alone do not change this, and they keep the addresses of both loops in registers: all 255. Flattened, the copies of the
next tile begin while the last ones of this tile are multiplied.

*Where it loses.* With a tile of 128 x 128 and 3 stages, two programs fit on an SM and hide each other's beginning and
end. So flattening gains only 2 % there, from 269 µs in rung 6 to 264. With 4 stages, only one program fits, and rung 6
takes 330 µs. At 4001x4099x4093 the rung takes 1.1 times as long as rung 6: there, nothing is copied ahead, so
flattening cannot help, and even a tile of 128 x 128 spills 904 bytes. At 3072 there are 288 tiles of 128 x 256. They
form 2.2 waves, but take the time of 3: 0.74 of cuBLAS. Rung 10 solves this. At 1024 the rung reaches 0.49 of cuBLAS,
and rung 6 reaches 0.65 of cuBLAS. The list has smaller tiles, but the record does not name the one that the tuner took.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from _common import (
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

NUMBER = 7
TITLE = "persistent matmul over NUM_SMS programs"


def config(
    block_m: int, block_n: int, block_k: int, group: int, flatten: bool, warps: int, stages: int
) -> triton.Config:
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": group, "FLATTEN": flatten}
    return triton.Config(blocks, num_warps=warps, num_stages=stages)


CONFIGS = [
    config(block_m, block_n, block_k, 8, flatten, warps, stages)
    for block_m, block_n, block_k, warps, stages in (
        (128, 256, 64, 8, 4),
        (128, 256, 64, 8, 3),
        (256, 128, 64, 8, 4),
        (128, 128, 64, 8, 4),
        (64, 128, 64, 4, 4),
        (64, 128, 32, 8, 3),  # for rows that begin at odd addresses
    )
    for flatten in (False, True)
]
FIXED = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP": 2, "FLATTEN": True}


@functools.cache
def num_sms(device: torch.device) -> int:
    """Processors of the GPU. The interpreter has none; few programs make each take several tiles."""
    return 3 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, out_ptr, M, N, K,
    a_stride_m, a_stride_k, b_stride_k, b_stride_n, out_stride_m, out_stride_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    FLATTEN: tl.constexpr, NUM_SMS: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)

    tl.assume(K > 0)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, NUM_SMS, flatten=FLATTEN):
        tile_m, tile_n = tl.swizzle2d(tile // tiles_n, tile % tiles_n, tiles_m, tiles_n, GROUP)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        row_inside = row + m < M
        col_inside = col + n < N
        # New pointers instead of changed ones: the arguments are needed again for the next tile.
        a_corner = a_ptr + row.to(tl.int64) * a_stride_m
        b_corner = b_ptr + col.to(tl.int64) * b_stride_n
        out_corner = out_ptr + row.to(tl.int64) * out_stride_m + col.to(tl.int64) * out_stride_n
        a_block = a_corner + m[:, None] * a_stride_m + k[None, :] * a_stride_k
        b_block = b_corner + k[:, None] * b_stride_k + n[None, :] * b_stride_n

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            k_inside = start + k < K
            a = tl.load(a_block, mask=row_inside[:, None] & k_inside[None, :], other=0.0)
            b = tl.load(b_block, mask=k_inside[:, None] & col_inside[None, :], other=0.0)
            acc = tl.dot(a, b, acc)
            a_block += BLOCK_K * a_stride_k
            b_block += BLOCK_K * b_stride_k

        out_block = out_corner + m[:, None] * out_stride_m + n[None, :] * out_stride_n
        tl.store(out_block, acc.to(tl.float16), mask=row_inside[:, None] & col_inside[None, :])


@functools.cache
def tuned() -> Any:
    key = ["M", "N", "K", "a_stride_m", "a_stride_k", "b_stride_k", "b_stride_n"]
    return triton.autotune(configs=CONFIGS, key=key)(matmul_kernel)


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b for float16 matrices of any size and strides, on as many programs as there are SMs."""
    M, N, K = product_sizes(a, b)
    out = output(out, a, M, N)
    if K == 0:
        return out.zero_()
    programs = num_sms(a.device)

    def grid(config: dict[str, Any]) -> tuple[int]:
        return (min(programs, triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(N, config["BLOCK_N"])),)

    arguments = (a, b, out, M, N, K, *a.stride(), *b.stride(), *out.stride())
    if INTERPRETED:
        matmul_kernel[grid](*arguments, **FIXED, NUM_SMS=programs)
    else:
        tuned()[grid](*arguments, NUM_SMS=programs)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Predict before you run, and exercises


def tiles_answer() -> str:
    return f"{', '.join(map(str, solved_tiles_of(5, 512, 132)))}: the others, from number 116 on, have three."


def waves_answer() -> str:
    found = []
    for m, n in ((4096, 4096), (4001, 4099)):
        tiles = triton.cdiv(m, 128) * triton.cdiv(n, 256)
        found.append(f"{m} x {n}: {tiles} tiles, {tiles / 132:.2f} waves, {solved_busy(tiles, 132):.0%} busy")
    return "; ".join(found) + ". The loop over tiles does not change that."


QUESTIONS = (
    Question("512 tiles on 132 programs: which does program 5 compute?", tiles_answer),
    Question(
        "Tiles of 128 x 256: how busy are 132 programs with 4096 x 4096, and with 4001 x 4099?", waves_answer
    ),
)


def tiles_of(program: int, tiles: int, programs: int) -> list[int]:
    """Exercise 1: the tiles that a program computes, in order."""
    raise NotImplementedError("the kernel's loop over tiles, as a list")


def check_tiles_of(answer: Callable[[int, int, int], list[int]]) -> None:
    for tiles, programs in ((512, 132), (100, 132), (264, 132)):
        found = [answer(program, tiles, programs) for program in range(programs)]
        assert sorted(tile for own in found for tile in own) == list(range(tiles)), (
            f"{tiles} tiles on {programs} programs: each one once"
        )
        assert max(map(len, found)) - min(map(len, found)) <= 1, "no program has two more than another"


def busy(tiles: int, programs: int) -> float:
    """Exercise 2: the part of the programs' time in which they compute tiles, if all tiles take the same time."""
    raise NotImplementedError("the time is that of the program with the most tiles")


def check_busy(answer: Callable[[int, int], float]) -> None:
    assert answer(264, 132) == 1, "two whole waves"
    assert answer(133, 132) == 133 / 264, "a wave and one tile"
    assert answer(33, 132) == 0.25, "a fourth of a wave"


# ---------------------------------------------------------------------------------------------------------------------
# The check and the measurement


def check() -> list[Row]:
    rows = []
    # Fewer tiles than programs, as many as divide, a remainder.
    for m, n, k in ((30, 40, 70), (96, 64, 64), (100, 130, 45)):
        a, b = normal(m, k), normal(n, k).T
        out = matmul(a, b, out=poisoned(m, n))
        rows += compare("rung 7", f"{m}x{n}x{k}", out, a @ b, a.double() @ b.double(), 5e-4)
    if not INTERPRETED:
        # The sizes above are a tile or two to a GPU. Here each program takes several.
        for m, n, k in ((3001, 4001, 151), (3072, 4096, 160)):
            a, b = normal(m, k), normal(n, k).T
            out = matmul(a, b, out=poisoned(m, n))
            rows += compare("rung 7", f"{m}x{n}x{k}", out, a @ b, a.double() @ b.double(), 5e-4)
    return rows


def bench() -> list[Row]:
    before = rung(6)
    rows = bench_products(
        ((4096, 4096, 4096), (8192, 8192, 8192), (4001, 4099, 4093)),
        [
            ("rung 7", "this", lambda a, w, out: matmul(a, w.T, out)),
            ("rung 6", "before", lambda a, w, out: before.matmul(a, w.T, out)),
            ("torch", "torch", lambda a, w, out: torch.matmul(a, w.T, out=out)),
        ],
    )
    before.print_winners(tuned())
    return rows


def main(arguments: Sequence[str] | None = None) -> Record:
    return run(NUMBER, TITLE, check, bench, arguments, QUESTIONS, EXERCISES)


# ---------------------------------------------------------------------------------------------------------------------
# Solutions of the exercises


def solved_tiles_of(program: int, tiles: int, programs: int) -> list[int]:
    return list(range(program, tiles, programs))


def solved_busy(tiles: int, programs: int) -> float:
    return tiles / (triton.cdiv(tiles, programs) * programs)


EXERCISES = (
    Exercise(tiles_of, solved_tiles_of, check_tiles_of),
    Exercise(busy, solved_busy, check_busy),
)


if __name__ == "__main__":
    main()
