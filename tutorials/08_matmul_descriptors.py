"""Rung 8: persistent matmul with tensor descriptors.

On Hopper and later GPUs, the threads need not load blocks. One thread gives a *tensor descriptor* and a corner to the
TMA unit ("load the block at (row, k)"). The unit computes addresses, checks bounds, and copies the block to shared
memory, in the layout that the tensor cores read. When it is done, it signals a barrier. The kernel needs neither the
masks of rung 4 nor the addresses of rung 7, nor their registers.

    rung 7    256 threads: address, mask, copy |  of each 16 bytes, beside the multiplication
    rung 8    1 thread:    "block (row, k)"    |  and 256 threads only multiply

Outside the tensor, a descriptor's load returns 0 and its store drops the element, so sizes need not be multiples of
the tile. But the hardware has conditions: the last dimension is contiguous, the base and all other strides are
multiples of 16 bytes (8 float16 numbers), and no dimension is empty. All other matrices need rung 7.

The descriptors here are made on the host (`TensorDescriptor`) and passed as kernel arguments. This costs a few
microseconds of host time per launch, but nothing on the device. A kernel can also make them itself
(`tl.make_tensor_descriptor`), which needs device memory.

Now shared memory limits the depth of the pipeline:

    4 stages x (128 x 64 of a + 256 x 64 of w) x 2 bytes    196608
    the tile on its way out, 128 x 256 x 2 bytes             65536     together over the 232448 of an H200
    half the tile, 128 x 128 x 2 bytes                       32768     together 229376: fits

The store goes through shared memory as well. If the tile is stored as two halves, left and right, it takes half the
space, which leaves room for the fourth stage. `reshape`, `permute` and `split` split the accumulator without moving a
number to another thread, since each thread holds numbers of both halves.

GPUs with less shared memory use a smaller tile and fewer stages: the first config of the list below that fits. On a
GPU without a TMA unit, such as an A100, Triton turns descriptors into addresses and masks. The result is correct, but
the compiler knows nothing about the strides. So each float16 number is loaded separately and nothing is copied ahead
(the PTX has no `cp.async`). On such a GPU, rung 7 is faster.

TMA: NVIDIA, "H100 Tensor Core GPU Architecture", 2022. Persistent kernels on it: CUTLASS 3, DeepGEMM.

**What it gained, and why.** It is 3 % faster than rung 7 at 4096 and 1 % faster at 8192, and reaches 1.01 of cuBLAS at
both sizes. Other runs of the record have 0.95 to 1.03 of cuBLAS at 4096. It also needs fewer registers: 156 registers
instead of 255. A step has two requests to the TMA unit and 101 other instructions, instead of 12 copies and 193. Rung 9
needs these registers for its epilogue.

At 4001x4104x4088 it is almost five times as fast as rung 7. There, rows are multiples of 16 bytes, which is enough for
the TMA unit. A kernel with pointers is compiled for strides that are multiples of 16 *numbers*, or for any strides.
Here they are multiples of 8 numbers, so rung 7 loads each number separately.

*Where it loses.* It has one tile, 128 x 256. At 1024 there are 32 tiles for 132 multiprocessors: 0.54 of cuBLAS. At
4001x4104x4088 there are 544 tiles. They form 4.1 waves, but take the time of 5. This alone leaves 0.80 of cuBLAS, as
the product with K = 4096 shows in the table of alignments of rung 10. In addition, a row has 8176 bytes, so most of the
128-byte pieces that the TMA unit loads lie in two cache lines. Together this leaves 0.70 of cuBLAS. Rung 10 shows the
cost of such rows, and how cuBLAS avoids it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from triton.tools.tensor_descriptor import TensorDescriptor

NUMBER = 8
TITLE = "persistent matmul with tensor descriptors"


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    block_k: int
    group: int
    warps: int
    stages: int

    def shared_bytes(self) -> int:
        """The pipeline's blocks and half an output tile, two bytes a number, and some room for the barriers."""
        pipeline = self.stages * (self.block_m + self.block_n) * self.block_k
        return 2 * (pipeline + self.block_m * self.block_n // 2) + 256


CONFIGS = (
    Config(128, 256, 64, group=8, warps=8, stages=4),  # 224 KB: Hopper and data-center Blackwell
    Config(128, 128, 64, group=8, warps=8, stages=2),  # 80 KB: consumer Blackwell, and GPUs without TMA
    Config(64, 64, 64, group=8, warps=4, stages=3),
)
FIXED = Config(32, 64, 32, group=2, warps=4, stages=1)


@functools.cache
def machine(device: torch.device) -> tuple[int, Config]:
    """The number of programs that the GPU holds, and the first config that fits it. For the interpreter: few and
    small.
    """
    if INTERPRETED:
        return 3, FIXED
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    config = next((c for c in CONFIGS if c.shared_bytes() <= shared), CONFIGS[-1])
    return properties.multi_processor_count, config


@triton.jit
def matmul_kernel(
    a, w, out, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    NUM_SMS: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, NUM_SMS, flatten=True):
        tile_m, tile_n = tl.swizzle2d(tile // tiles_n, tile % tiles_n, tiles_m, tiles_n, GROUP)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(a.load([row, k]), w.load([col, k]).T, acc)

        left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
        out.store([row, col], left.to(tl.float16))
        out.store([row, col + BLOCK_N // 2], right.to(tl.float16))


def check_descriptor(name: str, t: torch.Tensor) -> None:
    """Check the hardware's requirements for a matrix with a descriptor."""
    if 0 in t.shape:
        raise ValueError(f"{name}, {tuple(t.shape)}: a descriptor has no empty dimension; rung 7 takes it")
    if t.stride(1) != 1 or t.stride(0) * t.element_size() % 16 or t.data_ptr() % 16:
        raise ValueError(
            f"{name}: a descriptor needs contiguous rows that start at multiples of 16 bytes, got strides "
            f"{t.stride()} and address {t.data_ptr():#x}; rung 7 takes any"
        )


def matmul(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ w.T for float16 matrices, a of (M, K) and w of (N, K), rows contiguous and aligned to 16 bytes."""
    M, N, K = product_sizes(a, w.T)
    for name, t in (("a", a), ("w", w)):
        check_descriptor(name, t)
    out = output(out, a, M, N)
    check_descriptor("out", out)
    sms, config = machine(a.device)
    tiles = triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n)
    matmul_kernel[(min(sms, tiles),)](
        TensorDescriptor.from_tensor(a, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(w, [config.block_n, config.block_k]),
        TensorDescriptor.from_tensor(out, [config.block_m, config.block_n // 2]),
        M, N, K,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP=config.group, NUM_SMS=sms,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Predict before you run, and exercises


def instructions_answer() -> str:
    each = 128 * 64 * 2
    return f"{each} bytes: {each // 16} loads of 16 bytes, 4 for each of 256 threads, with addresses and masks; or one."


def stages_answer() -> str:
    whole, half, fourth = (solved_stages(128, 256, 64, stored) for stored in (256, 128, 64))
    return f"At once {whole}, in halves {half}, in fourths {fourth}."


def waves_answer() -> str:
    tiles = triton.cdiv(4001, 128) * triton.cdiv(4104, 256)
    waves = triton.cdiv(tiles, 132)
    return (
        f"{tiles} tiles are {tiles / 132:.2f} waves and take the time of {waves}: {tiles / 132 / waves:.0%} at best. "
        "And its rows begin at multiples of 16 bytes only; rung 10 shows what that costs."
    )


QUESTIONS = (
    Question(
        "A block of 128 x 64 float16 numbers: how many instructions load it with pointers, and with TMA?",
        instructions_answer,
    ),
    Question(
        "How many stages of 128x256x64 fit, if a tile is stored at once, in halves, or in fourths?",
        stages_answer,
    ),
    Question("4001x4104x4088 suits the TMA unit. Why does the kernel lose to cuBLAS there?", waves_answer),
)


def stages(block_m: int, block_n: int, block_k: int, stored: int) -> int:
    """Exercise 1: how many stages fit into 232448 bytes, if `stored` columns of the tile are stored at a time."""
    raise NotImplementedError(
        "take off the stored part and 256 bytes for the barriers, then divide by a stage"
    )


def check_stages(answer: Callable[[int, int, int, int], int]) -> None:
    assert answer(128, 256, 64, 256) == 3
    assert answer(128, 256, 64, 128) == 4
    assert answer(128, 128, 64, 128) == 6


def halves(tile: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Exercise 2: the left and the right half of a tile by `reshape`, `permute` and `unbind`, as the kernel does it."""
    raise NotImplementedError(
        "the half that a column is in must become a separate dimension, and then the last one"
    )


def check_halves(answer: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
    tile = torch.arange(24).reshape(3, 8)
    left, right = answer(tile)
    assert torch.equal(left, tile[:, :4]), "the left half"
    assert torch.equal(right, tile[:, 4:]), "the right half"


# ---------------------------------------------------------------------------------------------------------------------
# The check and the measurement


def check() -> list[Row]:
    rows = []
    sizes = [(32, 64, 32), (33, 72, 40), (100, 200, 88)]
    if not INTERPRETED:
        sizes.append((3001, 4008, 152))  # several tiles a program
    for m, n, k in sizes:
        a, w = normal(m, k), normal(n, k)
        out = matmul(a, w, out=poisoned(m, n))
        rows += compare("rung 8", f"{m}x{n}x{k}", out, a @ w.T, a.double() @ w.double().T, 5e-4)
    # Columns out of wider matrices: strides that are not the sizes.
    a, w, out = normal(50, 160)[:, 8:80], normal(70, 96)[:, 16:88], poisoned(50, 80)[:, :70]
    matmul(a, w, out=out)
    rows += compare("rung 8", "50x70x72, columns of wider", out, a @ w.T, a.double() @ w.double().T, 5e-4)
    return rows


def bench() -> list[Row]:
    before = rung(7)
    return bench_products(
        # No size of the last divides by a tile; rows of 16-byte multiples they must be.
        ((4096, 4096, 4096), (8192, 8192, 8192), (4001, 4104, 4088)),
        [
            ("rung 8", "this", matmul),
            ("rung 7", "before", lambda a, w, out: before.matmul(a, w.T, out)),
            ("torch", "torch", lambda a, w, out: torch.matmul(a, w.T, out=out)),
        ],
    )


def main(arguments: Sequence[str] | None = None) -> Record:
    return run(NUMBER, TITLE, check, bench, arguments, QUESTIONS, EXERCISES)


# ---------------------------------------------------------------------------------------------------------------------
# Solutions of the exercises


def solved_stages(block_m: int, block_n: int, block_k: int, stored: int) -> int:
    return (232448 - 256 - block_m * stored * 2) // ((block_m + block_n) * block_k * 2)


def solved_halves(tile: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = tile.shape
    left, right = tile.reshape(rows, 2, cols // 2).permute(0, 2, 1).unbind(-1)
    return left, right


EXERCISES = (
    Exercise(stages, solved_stages, check_stages),
    Exercise(halves, solved_halves, check_halves),
)


if __name__ == "__main__":
    main()
