"""Rung 4: matmul of any strides and any sizes, with three masks.

Rung 3 requires contiguous matrices, and sizes that are multiples of the block. This rung accepts any torch matrix.

**Strides.** The element (i, j) of a matrix lies at `base + i * stride_0 + j * stride_1`. A transposed matrix is the
same memory with the strides exchanged. A slice of every second column has a doubled stride. A row repeated by `expand`
has a stride of
0. A kernel that takes both strides of each matrix handles all of them without a copy. From here on, b is (K, N), as in
`a @ b`, and a Linear's weight is passed as `w.T`.

The speed depends on the layout. If adjacent elements of a block are adjacent in memory, a thread loads eight float16
numbers at once. Triton detects this: it compiles a separate kernel for arguments that are 1 or multiples of 16, and
derives the width of loads from them. With an odd K, rows start at odd addresses, and each number is loaded separately.

**Masks.** Three dimensions can end within a block, so there are three masks:

             N                       1. rows of a and out that lie below M
       +-----+--:                    2. columns of b and out that lie right of N
       |     |  :                    3. the end of K, in a and in b: here the missing numbers must be
       +-----+--:    M                  loaded as 0, since they go into every sum of the tile
       |     |  :
       +-----+--:                    Without mask 3 the result is wrong; without 1 and 2 the program reads
       :.....:..:                    and writes memory that belongs to somebody else.

The first two masks do not change in the loop. Only the third is computed in each step.

**Large matrices.** An offset of over 2**31 elements does not fit 32 bits. All addresses in 64 bits would take twice
the registers. Here only the tile's corner has 64 bits, and offsets within the tile have 32.

The cost is addresses and masks in the loop. On Hopper, the threads make the copies instead of the TMA unit. For sizes
that rung 3 supports, this rung is not faster. Its gain is generality.

Every Triton or CUDA kernel has such strides and masks. BLAS libraries for CPUs solve the same problem by packing: Van
Zee and van de Geijn, "BLIS: A Framework for Rapidly Instantiating BLAS Functionality", TOMS 2015.

**What it gained, and why.** It accepts any matrix, and takes 4 to 6 % longer for matrices that rung 3 accepts too.
`benchmarks/ladder_code.py` shows why: the copies are the same, eight times 16 bytes. But a step has 102 other
instructions instead of 66: the masks, and the increments of 64-bit pointers.

*Where it loses.* At 4001x4099x4093 it takes more than four times as long as at 4096. K is odd, so rows begin at odd
addresses. Each number is loaded separately: 64 loads of 2 bytes and 64 writes to shared memory replace eight copies.
The loads pass through registers, and a thread uses all 255. So nothing is loaded while the tensor cores work: shared
memory holds a single step, and each step waits for all of its products. cuBLAS has the same problem. It takes five
times as long as at 4096, and this kernel reaches 0.88 of its speed. *If you choose the sizes, choose multiples of 8.*
"""

from collections.abc import Callable, Sequence

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

NUMBER = 4
TITLE = "matmul of any strides, with three masks"

TILE_M, TILE_N, TILE_K = (32, 32, 32) if INTERPRETED else (128, 128, 64)


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, out_ptr, M, N, K,
    a_stride_m, a_stride_k, b_stride_k, b_stride_n, out_stride_m, out_stride_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BLOCK_M
    col = tl.program_id(0) * BLOCK_N
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row_inside = row + m < M
    col_inside = col + n < N

    # The corner of the tile in 64 bits, the places within it in 32.
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


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b for float16 matrices of any size and strides."""
    M, N, K = product_sizes(a, b)
    out = output(out, a, M, N)
    grid = (triton.cdiv(N, TILE_N), triton.cdiv(M, TILE_M))
    if grid[1] > 65535:
        raise ValueError(f"{grid[1]} rows of tiles: CUDA's grids end at 65535 in y; rung 5 takes more")
    matmul_kernel[grid](
        a, b, out, M, N, K, *a.stride(), *b.stride(), *out.stride(),
        BLOCK_M=TILE_M, BLOCK_N=TILE_N, BLOCK_K=TILE_K, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Predict before you run, and exercises


def offset_answer() -> str:
    import numpy as np

    b = np.arange(20).reshape(4, 5).T[:, ::2]
    strides = tuple(stride // b.itemsize for stride in b.strides)
    at = 3 * strides[0] + strides[1]
    return f"Strides {strides}, so (3, 1) is at 3 * {strides[0]} + 1 * {strides[1]} = {at}: numpy has {b[3, 1]} there."


def width_answer() -> str:
    return (
        "16 bytes with K = 4096, 2 with 4093: rows begin at multiples of 8186 bytes. Eight times as many loads, "
        "and `cp.async` takes 4 bytes at least, so nothing is loaded ahead. `gemmery indices` draws the loads."
    )


def waste_answer() -> str:
    tiles = triton.cdiv(4001, 128) * triton.cdiv(4099, 128)
    return f"{tiles * 128 * 128 / (4001 * 4099) - 1:.1%}: masks cost little here. The width of the loads costs more."


QUESTIONS = (
    Question(
        "b = arange(20).reshape(4, 5).T[:, ::2]: what are its strides, and which number is b[3, 1]?",
        offset_answer,
    ),
    Question("How many bytes does a thread load at once if K is 4096, and if it is 4093?", width_answer),
    Question("How much of the work of 128 x 128 tiles lies outside an output of 4001 x 4099?", waste_answer),
)


def offset(i: int, j: int, strides: tuple[int, int]) -> int:
    """Exercise 1: the place of the element (i, j), in elements from the base."""
    raise NotImplementedError("one product for each dimension")


def check_offset(answer: Callable[[int, int, tuple[int, int]], int]) -> None:
    base = torch.arange(48)
    views = base.reshape(6, 8), base.reshape(6, 8).T, base.reshape(6, 8)[:, ::3], base[:8].expand(6, 8)
    for view in views:
        strides = view.stride(0), view.stride(1)
        assert answer(5, 2, strides) == view[5, 2], f"strides {strides}"


def load_bytes(row_stride: int, itemsize: int) -> int:
    """Exercise 2: the bytes that a thread can load at once from rows with adjacent elements: 16, 8, 4 or 2."""
    raise NotImplementedError("every row must begin at a multiple of it; the base begins at one of 16")


def check_load_bytes(answer: Callable[[int, int], int]) -> None:
    for stride, expected in ((4096, 16), (4092, 8), (4094, 4), (4093, 2)):
        assert answer(stride, 2) == expected, f"rows of {stride} float16 numbers: {expected} bytes"


# ---------------------------------------------------------------------------------------------------------------------
# The check and the measurement


def check() -> list[Row]:
    rows = []
    for m, n, k in (
        (TILE_M, 2 * TILE_N, TILE_K),
        (1, 7, 5),
        (37, 71, 101),
        (TILE_M + 1, TILE_N - 1, 2 * TILE_K + 1),
    ):
        a, b = normal(m, k), normal(k, n)
        out = matmul(a, b, out=poisoned(m, n))
        rows += compare("rung 4", f"{m}x{n}x{k}", out, a @ b, a.double() @ b.double(), 5e-4)

    m, n, k = 45, 70, 83
    layouts = {
        "both transposed": (normal(k, m).T, normal(n, k).T, poisoned(m, n)),
        "out transposed": (normal(m, k), normal(k, n), poisoned(n, m).T),
        "every second column": (
            normal(m, 2 * k)[:, ::2],
            normal(k, 2 * n)[:, ::2],
            poisoned(m, 2 * n)[:, ::2],
        ),
        "a repeated row": (normal(1, k).expand(m, k), normal(k, n), poisoned(m, n)),
    }
    for name, (a, b, out) in layouts.items():
        matmul(a, b, out=out)
        rows += compare("rung 4", f"{m}x{n}x{k}, {name}", out, a @ b, a.double() @ b.double(), 5e-4)
    return rows


def bench() -> list[Row]:
    this = ("rung 4", "this", lambda a, w, out: matmul(a, w.T, out))
    peer = ("torch", "torch", lambda a, w, out: torch.matmul(a, w.T, out=out))
    before = ("rung 3", "before", rung(3).matmul)
    return [
        *bench_products(((4096, 4096, 4096), (8192, 8192, 8192)), [this, before, peer]),
        *bench_products(((4001, 4099, 4093),), [this, peer]),  # rung 3 refuses these
    ]


def main(arguments: Sequence[str] | None = None) -> Record:
    return run(NUMBER, TITLE, check, bench, arguments, QUESTIONS, EXERCISES)


# ---------------------------------------------------------------------------------------------------------------------
# Solutions of the exercises


def solved_offset(i: int, j: int, strides: tuple[int, int]) -> int:
    return i * strides[0] + j * strides[1]


def solved_load_bytes(row_stride: int, itemsize: int) -> int:
    return next(width for width in (16, 8, 4, 2) if row_stride * itemsize % width == 0)


EXERCISES = (
    Exercise(offset, solved_offset, check_offset),
    Exercise(load_bytes, solved_load_bytes, check_load_bytes),
)


if __name__ == "__main__":
    main()
