"""Rung 6: matmul with autotuned configs.

In rung 5, the tile of 128 x 128 x 64, the 8 warps and the 3 stages were chosen by hand. The best choice depends on the
GPU and on the problem:

- *Tile*. A larger one loads less per operation. But the accumulator is in registers (128 x 256 float32 numbers are 128
  registers in each of 256 threads), and a small problem has too few large tiles to keep all processors busy.
- *Warps*. They share the tile. With too few, a thread needs too many registers. With too many, each one has little to
  do.
- *Stages*. The number of K steps whose blocks are in shared memory at once. More stages hide more latency and take more
  shared memory: stages x (BLOCK_M + BLOCK_N) x BLOCK_K x 2 bytes.
- *Group*. The shape of the tiles in flight, as in rung 5.

These choices interact and are hard to predict. So measure them: `triton.autotune` compiles the kernel for each config,
times all of them in the first call with a new *key*, and remembers the fastest one for this key until the process
ends.

        config:   128x256   256x128   128x128   128x64 ...
        first call with M, N, K:  time, time, time, time ... -> winner
        later calls with the same M, N, K: winner, at once

The key must contain everything on which the choice depends: here the sizes, and the strides, which decide the width of
loads. With a key that is too fine, the tuner runs all the time: in a model with changing sequence lengths, each new
length is a new M. With a key that is too coarse, a bad choice stays. In both cases, the first call takes seconds. For
these reasons, a library has tables and a model of the machine instead. To learn about the machine, tuning is the right
tool.

A config that needs more shared memory than the GPU has is not an error. The tuner treats it as infinitely slow.

In the interpreter, there is nothing to measure, so a fixed config is used.

Tuning by measurement: Whaley and Dongarra, "Automatically Tuned Linear Algebra Software", SC 1998.

**What it gained, and why.** At 4096 and 8192, the tuner chooses a tile of 128 x 256 x 64 with 8 warps, and the rung is
1.14 and 1.16 times as fast as rung 5. A step computes twice as many products with 12 copies instead of 8, and hardly
more other instructions.

The wide tile needs one line of the kernel, `tl.assume(K > 0)`. The table of configs shows the effect of each at 4096.
Rung 5's config without this line takes 277 µs. The line alone gains 3 %: 269 µs. The list of configs alone gains 4 %:
without the line, its fastest tile is 256 x 128 x 64, with 265 µs. Together they gain 16 %: 128 x 256 x 64 with 3 stages
takes 232 µs, and 291 µs without the line. With it, the compiler leaves the four products of a step in flight while the
next step begins, with one wait, `WARPGROUP.DEPBAR gsb0 0x1`. Without it, the compiler waits for each product before it
issues the next one, with four waits, `gsb0 0x0`. The line also helps at odd sizes: each step reloads one register
instead of 15, and the rung is 1.4 times as fast as rung 5.

*Where it loses.* It reaches 0.81 of cuBLAS at 4096 and 0.84 of cuBLAS at 8192, and no config in the table reaches more
at 4096. A tuner only finds configs in its list; the next rungs change the kernel. It also cannot see small differences,
since it measures each config once, for a tenth of a second. At 4096 it takes four stages, and three at 8192. Measured
side by side at 4096, three stages are the faster choice: 232 µs against 234 µs. At 4001x4099x4093 the rung reaches 0.81
of cuBLAS, and rung 4 reaches 0.88.
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

NUMBER = 6
TITLE = "matmul with autotuned configs"


def config(block_m: int, block_n: int, block_k: int, group: int, warps: int, stages: int) -> triton.Config:
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": group}
    return triton.Config(blocks, num_warps=warps, num_stages=stages)


CONFIGS = [
    config(128, 256, 64, 8, warps=8, stages=4),
    config(128, 256, 64, 8, warps=8, stages=3),
    config(256, 128, 64, 8, warps=8, stages=4),
    config(128, 128, 64, 8, warps=8, stages=4),
    config(128, 128, 64, 8, warps=8, stages=3),
    config(64, 128, 64, 8, warps=4, stages=4),
    config(64, 64, 64, 8, warps=4, stages=4),
    # For rows that begin at odd addresses: there the larger ones spill.
    config(128, 128, 32, 1, warps=8, stages=3),
    config(64, 128, 64, 1, warps=8, stages=3),
]
FIXED = {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP": 2}


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, out_ptr, M, N, K,
    a_stride_m, a_stride_k, b_stride_k, b_stride_n, out_stride_m, out_stride_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    tile_m, tile_n = tl.swizzle2d(tile // tiles_n, tile % tiles_n, tiles_m, tiles_n, GROUP)
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

    tl.assume(K > 0)  # new in this rung, and worth a seventh of the time of wide tiles
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


@functools.cache
def tuned() -> Any:
    """The kernel with a tuner around it. Usually a decorator; here made at the first call, since it wants a GPU."""
    key = ["M", "N", "K", "a_stride_m", "a_stride_k", "b_stride_k", "b_stride_n"]
    return triton.autotune(configs=CONFIGS, key=key)(matmul_kernel)


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b for float16 matrices of any size and strides, with the fastest of the configs."""
    M, N, K = product_sizes(a, b)
    out = output(out, a, M, N)
    if K == 0:  # the kernel assumes that K > 0
        return out.zero_()

    # The grid depends on the tile, which the tuner chooses: so it is a function of the config.
    def grid(config: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(N, config["BLOCK_N"]),)

    arguments = (a, b, out, M, N, K, *a.stride(), *b.stride(), *out.stride())
    if INTERPRETED:
        matmul_kernel[grid](*arguments, **FIXED)
    else:
        tuned()[grid](*arguments)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Predict before you run, and exercises


def memory_answer() -> str:
    found = [f"{stages}: {solved_shared_bytes(128, 256, 64, stages)}" for stages in (3, 4, 5)]
    return f"{', '.join(found)} bytes; a program may have 232448, so four fit."


def register_answer() -> str:
    return f"{128 * 256 // 256} of 255 with 8 warps, and {128 * 256 // 128} with 4, which leaves none for addresses."


def stall_answer() -> str:
    seconds = 100 * len(CONFIGS) * 0.13
    return f"{len(CONFIGS)} configs, each timed for about 0.13 s: {seconds:.0f} s in total, plus one compilation."


QUESTIONS = (
    Question("A tile of 128 x 256 x 64: how much shared memory do 3, 4 and 5 stages take?", memory_answer),
    Question(
        "How many registers of a thread does its accumulator take, with 8 warps and with 4?", register_answer
    ),
    Question(
        "A model runs with 100 different values of M. How long does tuning take in their first calls?",
        stall_answer,
    ),
)


def shared_bytes(block_m: int, block_n: int, block_k: int, stages: int) -> int:
    """Exercise 1: the shared memory of a pipeline of float16 blocks."""
    raise NotImplementedError("each stage has a block of a and a block of b")


def check_shared_bytes(answer: Callable[[int, int, int, int], int]) -> None:
    assert answer(128, 128, 64, 3) == 98304
    assert answer(128, 256, 64, 4) == 196608


def fitting(
    configs: Sequence[tuple[int, int, int, int, int]], shared: int
) -> list[tuple[int, int, int, int, int]]:
    """Exercise 2: the configs, each (block_m, block_n, block_k, warps, stages), that a tuner need not even compile.

    Keep those whose pipeline fits into `shared` bytes, and whose accumulator leaves half of 255 registers.
    """
    raise NotImplementedError("a thread has block_m * block_n / (32 * warps) numbers of the accumulator")


def check_fitting(answer: Callable[..., list[tuple[int, int, int, int, int]]]) -> None:
    configs = [(128, 256, 64, 8, 4), (128, 256, 64, 8, 5), (128, 256, 64, 4, 3), (64, 64, 64, 4, 4)]
    assert answer(configs, 232448) == [configs[0], configs[3]], "an H200"
    assert answer(configs, 101376) == [configs[3]], "a GeForce of the RTX 40 series"


# ---------------------------------------------------------------------------------------------------------------------
# The check and the measurement


def check() -> list[Row]:
    rows = []
    sizes = [(64, 128, 64), (100, 190, 70), (1, 65, 33)]
    if not INTERPRETED:
        sizes += [(512, 768, 256), (301, 403, 205)]
    for m, n, k in sizes:
        a, b = normal(m, k), normal(n, k).T
        out = matmul(a, b, out=poisoned(m, n))
        rows += compare("rung 6", f"{m}x{n}x{k}", out, a @ b, a.double() @ b.double(), 5e-4)
    return rows


def bench() -> list[Row]:
    before = rung(5)
    rows = bench_products(
        ((4096, 4096, 4096), (8192, 8192, 8192), (4001, 4099, 4093)),
        [
            ("rung 6", "this", lambda a, w, out: matmul(a, w.T, out)),
            ("rung 5", "before", lambda a, w, out: before.matmul(a, w.T, out)),
            ("torch", "torch", lambda a, w, out: torch.matmul(a, w.T, out=out)),
        ],
    )
    print_winners(tuned())
    return rows


def print_winners(tuner: Any) -> None:
    print("\nWinners by M, N, K")
    for key, winner in tuner.cache.items():
        print(f"  {'x'.join(str(size) for size in key[:3]):>14}  {winner}")


def main(arguments: Sequence[str] | None = None) -> Record:
    return run(NUMBER, TITLE, check, bench, arguments, QUESTIONS, EXERCISES)


# ---------------------------------------------------------------------------------------------------------------------
# Solutions of the exercises


def solved_shared_bytes(block_m: int, block_n: int, block_k: int, stages: int) -> int:
    return stages * (block_m + block_n) * block_k * 2


def solved_fitting(
    configs: Sequence[tuple[int, int, int, int, int]], shared: int
) -> list[tuple[int, int, int, int, int]]:
    return [
        (m, n, k, warps, stages)
        for m, n, k, warps, stages in configs
        if solved_shared_bytes(m, n, k, stages) <= shared and m * n / (32 * warps) <= 128
    ]


EXERCISES = (
    Exercise(shared_bytes, solved_shared_bytes, check_shared_bytes),
    Exercise(fitting, solved_fitting, check_fitting),
)


if __name__ == "__main__":
    main()
