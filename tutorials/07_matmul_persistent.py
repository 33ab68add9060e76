"""Rung 7: persistent matmul, a loop over tiles in NUM_SMS programs.

So far each tile had a program of its own. A program has a beginning, in which it computes addresses and waits for its
first blocks with the tensor cores idle, and an end, in which it converts and stores. Starting the next program costs
some time again. And programs start in waves: 512 tiles on 132 processors are three full waves and a fourth that is
mostly full.

A *persistent* kernel starts as many programs as the GPU has processors (SMs), and each takes tile after tile:

    one program a tile                     persistent

    SM 0  |start|K loop|end| |start|...    SM 0  |start| K loop of tile 0 |end| K loop of tile 132 |end| ...
    SM 1  |start|K loop|end| |start|...    SM 1  |start| K loop of tile 1 |end| K loop of tile 133 |end| ...

The tiles that run at the same time are the same as before, so the grouped order keeps its point.

With `flatten=True` in `tl.range` the compiler makes one loop out of the loop over tiles and the loop over K. Then there
is no end of a K loop at which the pipeline runs empty: while the last blocks of a tile are multiplied, the first
ones of the next are already being loaded.

With pointers, as here, this need not gain anything, and it may even lose. A flattened step also decides whether a new
tile begins, all that the addresses are made of stays in registers for the next tile (255 a thread is all there are),
and several programs on one SM, which used to hide each other's beginning and end, are now one. So whether the loop is
flattened is one of the choices that the tuner measures. The loop is the ground for the next rung, in which addresses
take no registers.

Persistent threads: Gupta, Stuart, Owens, "A Study of Persistent Threads Style GPU Programming for GPGPU Workloads",
InPar 2012. What else can be done about the last wave: Osama et al., "Stream-K", PPoPP 2023.
"""

import functools
from collections.abc import Sequence
from typing import Any

from _common import (
    INTERPRETED,
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
        (128, 256, 64, 8, 3),
        (256, 128, 64, 8, 3),
        (128, 128, 64, 8, 3),
        (64, 128, 64, 4, 4),
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
    programs = num_sms(a.device)

    def grid(config: dict[str, Any]) -> tuple[int]:
        return (min(programs, triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(N, config["BLOCK_N"])),)

    arguments = (a, b, out, M, N, K, *a.stride(), *b.stride(), *out.stride())
    if INTERPRETED:
        matmul_kernel[grid](*arguments, **FIXED, NUM_SMS=programs)
    else:
        tuned()[grid](*arguments, NUM_SMS=programs)
    return out


def check() -> list[Row]:
    rows = []
    # Fewer tiles than programs, as many as divide, a remainder.
    for m, n, k in ((30, 40, 70), (96, 64, 64), (100, 130, 45)):
        a, b = normal(m, k), normal(n, k).T
        out = matmul(a, b, out=poisoned(m, n))
        rows += compare("rung 7", f"{m}x{n}x{k}", out, a @ b, a.double() @ b.double(), 5e-4)
    if not INTERPRETED:
        # The sizes above are a tile or two to a GPU. Here each program takes several.
        m, n, k = 3001, 4001, 150
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
    return run(NUMBER, TITLE, check, bench, arguments)


if __name__ == "__main__":
    main()
