"""Rung 3: matmul on a 2-D grid with block windows, B given as (N, K).

The product is out = a @ w.T. a is (M, K), and w is (N, K), as `torch.nn.Linear` stores its weight. In both, elements
along K are adjacent in memory.

                      N
              +-----------------+
              |     |  w  |     |     a program owns one tile of out and walks along K:
            K |     |     |     |
              |     |     |     |         acc = 0
              +-----------------+         for each block of K:
        K                                     acc += a block @ w block, transposed
    +-------+ +-----------------+         out tile = acc
    |       | |     |     |     |
    +-------+ +-----+-----+-----+
    |   a   | |     | out |     | M   the grid is as many programs as there are tiles,
    +-------+ +-----+-----+-----+     the program's two numbers are its tile's place
    |       | |     |     |     |
    +-------+ +-----------------+

Why tiles? A product has 2·M·N·K operations on M·K + N·K inputs. Without reuse, each operation would fetch its operands
from memory, and the kernel would be as slow as in rung 1. In a tile of BLOCK_M x BLOCK_N, each loaded element of a is
used BLOCK_N times, and each element of w BLOCK_M times. With 128 x 128 and numbers of two bytes, that is 64 operations
per byte, enough for the caches to keep up with the tensor cores. Larger tiles reuse more, until the accumulator no
longer fits into the registers.

`tl.dot` uses the tensor cores. It multiplies float16 blocks and sums in float32, because a float16 sum of thousands of
numbers would lose the small ones. The loop's iterations are called *steps*. The compiler *pipelines* them: with
`num_stages=3`, the blocks of the next steps are loaded while those of one step are multiplied.

To keep this first product short, windows are not checked against bounds, so M, N and K must be multiples of the block.
The next rung removes this limit. As in rung 2, there is a kernel with block pointers, and one with descriptors for
versions of Triton without block pointers. (On Hopper, descriptors use the TMA unit, which otherwise comes with rung 8.
With these versions, the figures of rungs 3 and 4 are less comparable.)

Blocking for each level of memory: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication",
TOMS 2008. For GPUs: NVIDIA's CUTLASS.

**What it gained, and why.** The first kernel reaches 0.81 of cuBLAS at 4096x4096x4096 and 0.80 at 8192x8192x8192, with
only the tensor cores and the compiler's pipeline. `benchmarks/ladder_code.py` prints the compiled code of both windows.
With block pointers, each thread copies eight times 16 bytes per step; with descriptors, one thread requests two blocks
from the TMA unit. The products are the same. So the difference at 4096, 253 µs against 220 µs, is the cost of copying
by threads: 13 %.

At 8192, descriptors gain only 3 %: 2116 µs against 2043. The instructions and the bytes of a tile are the same as at
4096. A separate look on an H200, `benchmarks/results/looks/rung3_windows-fp16.json`, shows a part of the cause: the
clock. It runs copies of both kernels many times in a row and reads the clock once for each. With descriptors, the clock
is lower: 1380 MHz instead of 1455 at 4096, and 1215 instead of 1380 at 8192. In that look, descriptors take 15 % less
time at 4096 and 8 % less at 8192, but 20 % and 19 % fewer clocks. A GPU lowers its clock to stay within its power
limit. So a kernel that multiplies more per clock may get fewer clocks, and gives back a part of its gain.

*Where it loses.* A tile of 128 x 128 is small for Hopper. Each warpgroup (four warps, which share one instruction of
Hopper's tensor cores) multiplies 64 x 128, and each number of w is used only 128 times. Rung 6 finds that twice the
width makes its kernel 1.16 times as fast. For small products, the small tile is better: at 1024 there are 64 of them
for 132 multiprocessors, but only 32 wide ones. This rung reaches 0.67 of cuBLAS there, and rung 8, which has only the
wide tile, reaches 0.54 of cuBLAS.
"""

import warnings
from collections.abc import Callable, Sequence

from _common import (
    HAS_BLOCK_POINTERS,
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
    predicted,
    product_sizes,
    run,
)

# isort: split
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

NUMBER = 3
TITLE = "matmul on a 2-D grid with block windows"

# The interpreter runs one program at a time, so there the tiles and the problems are small.
TILE_M, TILE_N, TILE_K = (32, 32, 32) if INTERPRETED else (128, 128, 64)

WINDOWS = ("block pointer", "descriptor") if HAS_BLOCK_POINTERS else ("descriptor",)
warnings.filterwarnings("ignore", message="tl.make_block_ptr is deprecated")


@triton.jit
def matmul_block_pointers(
    a_ptr, w_ptr, out_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    row = tl.program_id(1) * BLOCK_M
    col = tl.program_id(0) * BLOCK_N
    a = tl.make_block_ptr(
        a_ptr, (M, K), (K, 1), offsets=(row, 0), block_shape=(BLOCK_M, BLOCK_K), order=(1, 0)
    )
    w = tl.make_block_ptr(
        w_ptr, (N, K), (K, 1), offsets=(col, 0), block_shape=(BLOCK_N, BLOCK_K), order=(1, 0)
    )
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, K, BLOCK_K):
        # .T moves no data: it only tells the tensor cores along which dimension to read.
        acc = tl.dot(tl.load(a), tl.load(w).T, acc)
        a = tl.advance(a, (0, BLOCK_K))
        w = tl.advance(w, (0, BLOCK_K))
    out = tl.make_block_ptr(out_ptr, (M, N), (N, 1), (row, col), (BLOCK_M, BLOCK_N), order=(1, 0))
    tl.store(out, acc.to(tl.float16))


@triton.jit
def matmul_descriptors(a, w, out, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    row = tl.program_id(1) * BLOCK_M
    col = tl.program_id(0) * BLOCK_N
    tl.assume(K > 0)  # lets the compiler pipeline the loop: rung 6 explains it
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        acc = tl.dot(a.load([row, k]), w.load([col, k]).T, acc)
    out.store([row, col], acc.to(tl.float16))


def matmul(
    a: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None = None, window: str = WINDOWS[0]
) -> torch.Tensor:
    """a @ w.T for contiguous float16 matrices whose sizes are multiples of the block."""
    M, N, K = product_sizes(a, w.T)
    out = output(out, a, M, N)
    if window not in WINDOWS:
        raise ValueError(f"window {window!r}: this Triton has {', '.join(WINDOWS)}")
    if not (a.is_contiguous() and w.is_contiguous() and out.is_contiguous()):
        raise ValueError("this rung takes contiguous matrices; rung 4 takes any strides")
    if M % TILE_M or N % TILE_N or K % TILE_K or 0 in (M, N, K):
        raise ValueError(
            f"this rung takes M, N, K that are multiples of {TILE_M}, {TILE_N}, {TILE_K}, got {M}, {N}, {K}; "
            "rung 4 takes any"
        )
    if M // TILE_M > 65535:
        raise ValueError(f"{M // TILE_M} rows of tiles: CUDA's grids end at 65535 in y; rung 5 takes more")
    # Neighboring program numbers run along a row of tiles: x is the faster number.
    grid = (N // TILE_N, M // TILE_M)
    blocks = {"BLOCK_M": TILE_M, "BLOCK_N": TILE_N, "BLOCK_K": TILE_K, "num_warps": 8, "num_stages": 3}
    if window == "block pointer":
        matmul_block_pointers[grid](a, w, out, M, N, K, **blocks)
    else:
        if any(t.data_ptr() % 16 for t in (a, w, out)):
            raise ValueError("a descriptor needs memory that starts at a multiple of 16 bytes")
        matmul_descriptors[grid](
            TensorDescriptor.from_tensor(a, [TILE_M, TILE_K]),
            TensorDescriptor.from_tensor(w, [TILE_N, TILE_K]),
            TensorDescriptor.from_tensor(out, [TILE_M, TILE_N]),
            K,
            **blocks,
        )
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Predict before you run, and exercises


def loaded_answer() -> str:
    tiles = (4096 // 128) ** 2
    loaded = tiles * 4096 // 64 * (128 + 128) * 64 * 2
    distinct = 2 * 4096 * 4096 * 2
    times = loaded / distinct
    return f"{loaded / 1e9:.2f} GB of {distinct / 1e6:.0f} MB: each number comes {times:.0f} times, mostly from L2."


def bound_answer() -> str:
    depth = next(k for k in range(64, 8192, 64) if solved_intensity(4096, 4096, k) > 700e12 / 4.2e12)
    return f"From about {depth} on. `gemmery roofline 4096 4096 {depth}` draws it."


def time_answer() -> str:
    return f"{predicted(4096, 4096, 4096)}. A first kernel takes longer."


QUESTIONS = (
    Question(
        "4096x4096x4096 in tiles of 128 x 128: how many bytes do all programs load, and how many are distinct?",
        loaded_answer,
    ),
    Question(
        "From which K on does 4096x4096xK take longer to multiply than to read, at 700 TFLOP/s and 4.2 TB/s?",
        bound_answer,
    ),
    Question("How long should 4096x4096x4096 take on an H200, by `gemmery predict`?", time_answer),
)


def intensity(M: int, N: int, K: int) -> float:
    """Exercise 1: operations per byte of a product of float16 matrices, if each byte is read or written once."""
    raise NotImplementedError("2 * M * N * K operations, and two bytes for each number of a, w and out")


def check_intensity(answer: Callable[[int, int, int], float]) -> None:
    assert answer(4096, 4096, 4096) == 4096 / 3
    assert answer(1, 8192, 8192) < 1, "one row of x: hardly an operation a byte"


def tile_intensity(block_m: int, block_n: int) -> float:
    """Exercise 2: operations of a tile for each byte that it loads, for any K."""
    raise NotImplementedError("look at one column of a and one of w: block_m + block_n numbers of two bytes")


def check_tile_intensity(answer: Callable[[int, int], float]) -> None:
    assert answer(128, 128) == 64
    assert answer(64, 256) < answer(128, 128) < answer(128, 256), "square and large tiles load least"


# ---------------------------------------------------------------------------------------------------------------------
# The check and the measurement


def check() -> list[Row]:
    rows = []
    for window in WINDOWS:
        for m, n, k in ((1, 1, 1), (3, 2, 4), (2, 5, 3)):
            m, n, k = m * TILE_M, n * TILE_N, k * TILE_K
            a, w = normal(m, k), normal(n, k)
            out = matmul(a, w, out=poisoned(m, n), window=window)
            reference = a.double() @ w.double().T
            rows += compare(f"rung 3, {window}", f"{m}x{n}x{k}", out, a @ w.T, reference, 5e-4)
    return rows


def bench() -> list[Row]:
    return bench_products(
        ((4096, 4096, 4096), (8192, 8192, 8192)),
        [
            ("rung 3", "this", matmul),
            *((f"rung 3, {w}", "other", lambda a, b, out, w=w: matmul(a, b, out, w)) for w in WINDOWS[1:]),
            ("torch", "torch", lambda a, w, out: torch.matmul(a, w.T, out=out)),
        ],
    )


def main(arguments: Sequence[str] | None = None) -> Record:
    return run(NUMBER, TITLE, check, bench, arguments, QUESTIONS, EXERCISES)


# ---------------------------------------------------------------------------------------------------------------------
# Solutions of the exercises


def solved_intensity(M: int, N: int, K: int) -> float:
    return 2 * M * N * K / (2 * (M * K + N * K + M * N))


def solved_tile_intensity(block_m: int, block_n: int) -> float:
    return 2 * block_m * block_n / (2 * (block_m + block_n))


EXERCISES = (
    Exercise(intensity, solved_intensity, check_intensity),
    Exercise(tile_intensity, solved_tile_intensity, check_tile_intensity),
)


if __name__ == "__main__":
    main()
