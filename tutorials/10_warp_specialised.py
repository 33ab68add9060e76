"""Rung 10: a warp-specialized kernel, in which one warp loads and the others multiply.

In rung 8, every warp does everything: it requests the next blocks, waits for the current ones, multiplies, and at the
end of a tile converts and stores. The compiler interleaves these as well as it can, but all warps store at the same
time, and the tensor cores are idle meanwhile. Here, each warp has one role for the whole launch, and warps meet only
at barriers in shared memory.

    producer     one warp          asks the TMA unit for blocks of a and w, as far ahead as the ring has room
    consumers    2 warpgroups      multiply what is there, and store tiles; a warpgroup is four warps

**The ring.** Shared memory holds STAGES stages, each with the blocks of one step along K. A stage has two barriers.
`full` completes when the blocks have arrived, and `free` when they have been read.

    producer     wait free[s] -> ask for the blocks of step i -> next s          (the TMA unit arrives at full[s])
    consumer     wait full[s] -> multiply                     -> arrive at free[s] -> next s

An `mbarrier` counts arrivals. When the expected number has arrived, its *phase* ends and the next phase begins. Phases
are numbered 0, 1, 2 and so on. A wait names a phase by its *parity*, the number modulo 2, and returns once this phase
is over. One bit is enough, because a warp is never more than one phase behind.

Step i uses stage s = i % STAGES. This is use u = i // STAGES of the stage. Each use ends one phase of both barriers:

    producer     waits for phase u - 1 of free[s]: the use before has been read     parity (u + 1) % 2
    consumer     waits for phase u of full[s]: the blocks of this use are there     parity u % 2

At use 0 there is no phase -1. A new barrier treats it as over, so a wait for parity 1 returns at once. The producer
thus finds every stage free at first. It does not stop at the end of a tile, but runs ahead into the next one, so the
pipeline never runs empty between tiles.

**Taking turns.** With TURNS each consumer has whole tiles. While one multiplies, the other stores its tile and then
waits for its turn. CUTLASS calls this ping-pong. Each group has a barrier for its turn, at which the other group
arrives. Group 0 first waits for parity 1, which returns at once, and group 1 for parity 0, which is over when group 0
has multiplied its tile. Without TURNS, they share each tile, with half of its rows each. The tile can then be wider,
because its accumulator is spread over twice as many registers, and wide tiles read less. But nothing is multiplied
while the tile is stored.

    turns     group 0   multiply tile 0 | store 0         | multiply tile 2 | store 2
              group 1                   | multiply tile 1 | store 1         | multiply tile 3
    shared    both      multiply tile 0 | store 0 | multiply tile 1 | store 1

**Slots and boxes.** A tile is stored through shared memory. Each group has two *slots* of 64 x 64 numbers. It fills one
while the TMA unit copies the other one to the output. A *box* is what one load of the TMA unit brings: 64 or 128 rows
of 64 columns.

**Any width.** The tensor cores of Hopper multiply 64 rows of a by n rows of w, for every n that is a multiple of 8, up
to 256 (`wgmma` of PTX). A tensor of Triton has a power of two of elements, so `tl.dot` offers only n = 8, 16 ... 256.
Rung 8 is therefore slow if its tiles leave the last wave mostly empty. An H200 has 132 multiprocessors. A product of
1500x5760x2880 has 276 tiles of 128 x 256, which are 2.09 waves and take the time of 3. With 128 x 176 there are 396
tiles: exactly 3.00 waves, of 0.69 of the width. cuBLAS uses this tile, too. Here the instruction is inline assembly. An
accumulator is a tuple of tensors of 64 x 8. A thread has four numbers of each, in the order of the instruction's
registers.

Gluon, the language below Triton's, has explicit warp roles, barriers and layouts. `gl.warp_specialize` starts each
role in its own warps and with its own number of registers per thread: 232 for a consumer, 40 for the producer.

**An epilogue** costs nothing with TURNS, as long as it takes no longer than the other group's products: one group
computes the bias and gelu of rung 9 while the tensor cores work for the other.

**What the machine code shows.** `gemmery inspect` and the tests of this rung examine it. There are no spills. Each K
loop has one wait for the tensor cores, which leaves the newest step in flight. The ring begins at the first byte of
shared memory; the assembly relies on this, since Gluon does not expose a block's address.

Only Hopper GPUs run this kernel. On other machines, the rung runs its protocol in Python: the producer, the consumers
and the copies are interleaved at random. If a stage or a slot is overwritten or read too early, the result is wrong.

gemmery's own kernel of this kind, `src/gemmery/kernels/any_width.py`, adds the features of a library: other layouts,
batches, groups, packed and sparse weights, epilogues, tiles cut along K, and first loads that are issued before the
roles begin.

Warp specialization on GPUs: Bauer, Cook, Khailany, "CudaDMA", SC 2011. Cooperative and ping-pong kernels on Hopper:
NVIDIA, CUTLASS 3. The instructions: NVIDIA, "PTX ISA", wgmma and mbarrier.

**What it gained, and why.** It is as fast as the library's kernel: 1.01, 1.02 and 1.01 times its speed at
4096x4096x4096, 8192x8192x8192 and 1500x5760x2880, and 1.00, 1.04 and 0.98 of cuBLAS. Differences of 1 % are within the
spread: the record has the chosen tiles twice, and their times differ by up to 1.4 %. Rung 8 takes 4 to 5 % longer at
4096 and 8192 in this run, and 1 to 2 % less in the picture of speed over size. At other sizes, rung 8 can be much
slower: this kernel reaches 0.97 of cuBLAS at 3072 and rung 8 reaches 0.76, and at 1024 they reach 0.94 and 0.54. No
tile is best everywhere. For 1500x5760x2880, 176 columns fill three waves, and the tile of 256 takes 1.36 times as long.
At 2048, the tile of 176 takes a fourth longer than those of 128 and 256.

The number of waves is the first criterion for a product's tile. The loads of a stage are the second: L2 delivers a
limited number of bytes per clock to a multiprocessor, and narrow tiles need more of them for their products. A step of
112 columns takes about as long as one of 128. A stage has whole boxes of 64 rows of w, so 208 columns load as much as
256. The library loads exactly the rows of the tile. `Tile.clocks` has these two rules, with 60 bytes per clock. For
every product of the table, it finds a tile within 1.5 % of the best one measured.

Taking turns hides an epilogue. At 4096x14336x4096, the product with bias and gelu in turns takes 721 µs with 176
columns, 1 % more than the bare product with 714 µs. Shared, with 256 columns, it takes 757 µs. torch takes 839 µs for
addmm and gelu, and rung 9 takes 752 µs. At 4096x4096x4096, the product with bias and gelu takes 215 µs in turns and
222 µs shared. The choice of a tile ignores the epilogue and takes the shared one there. Rung 9 is faster, with 207 µs;
the record does not show why. These times are in the table of rung 9.

*Where it loses.* Rows of a and w should begin at multiples of 128 bytes. At 4001x4104x4088 a row has 8176 bytes. Then
most pieces of 128 bytes that the TMA unit fetches lie in two cache lines. The kernel takes 302 µs: 0.71 of cuBLAS and
0.82 of gemmery's speed. Rung 8 takes 292 µs. `Tile.clocks` does not consider such rows: it chooses 208 columns, and 256
columns take 284 µs. The table of alignments shows that loads are the limit. At 4096x4096x4088, divide the bytes that a
multiprocessor loads for all its tiles by the time:

    width 128, turns     8 waves x 64 steps x 32 KB in 323 µs    52 bytes a nanosecond
    width 176, turns     6 waves x 64 steps x 40 KB in 293 µs    54
    width 256, shared    4 waves x 64 steps x 48 KB in 244 µs    52

The rate is nearly the same for all tiles. With K = 4096, the narrow tile gets 81. cuBLAS loses nothing at
4096x4096x4088: 201 µs. Its tile has the same number of elements, and its kernel has the same number of stages. But its
name, `256x128_64x4_1x2`, shows that two multiprocessors form a cluster of 1 x 2. One load from L2 can serve both of
them, so each one loads its own 128 rows of one operand and half of the 256 rows that they share. That would be 32 KB
per step, or 42 bytes a nanosecond. At 4001x4104x4088 the name is `128x256_64x4_1x2`, so the two share the operand with
128 rows. A step would then load 40 KB, and cuBLAS loses, too: 218 µs, compared with 197 µs for K = 4096. gemmery has no
clusters. It computes the transposed product there, in tiles that fill 4.00 waves, and takes 248 µs. This kernel cannot
transpose, and needs five waves.

At 512, the kernel reaches 0.81 of gemmery's speed. Its smallest tile, 128 x 64, gives work to only 32 multiprocessors,
and the library has one of 64 x 32. At 3000x7168x4096 it reaches 0.96: it takes six waves of 224 columns, and gemmery
computes the transposed product, in six waves of 216 columns.

The first version of this kernel was wrong. Tiles of 136 and 192 columns have three parts to store, an odd number. So
each tile began with the slot in which the tile before it had ended, and filled it while it was still being stored. At
most sizes, there are enough steps between two stores to hide this. The check with three steps per tile found this
error, in one of two runs. Now the check repeats itself, and the protocol in Python includes the slots.
"""

import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from _common import (
    INTERPRETED,
    Exercise,
    Product,
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
from torch.nn import functional as F
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

NUMBER = 10
TITLE = "warp-specialised matmul with tiles of any width"

before = rung(8)  # for its checks and the comparison

# Names that differ between versions of Triton: these are of 3.6 and of later ones.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# Rows of a tile, columns along K of a step, and what PTX calls the operands' types.
ROWS, STEP = gl.constexpr(128), gl.constexpr(64)
KINDS = {torch.float16: "f16", torch.bfloat16: "bf16"}

# Eight columns of an accumulator: in each warp 16 rows, and in each thread four numbers.
BLOCK = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))


# ---------------------------------------------------------------------------------------------------------------------
# Which tile


@dataclass(frozen=True)
class Tile:
    width: int
    turns: bool

    @property
    def box(self) -> int:
        """Rows that one load brings. A stage has a whole number of boxes of w, so some rows may be loaded in vain."""
        return 128 if self.width % 128 == 0 else 64

    @property
    def stage_bytes(self) -> int:
        return (ROWS.value + triton.cdiv(self.width, self.box) * self.box) * STEP.value * 2

    @property
    def stages(self) -> int:
        """As many as fit beside the slots of the stores, 32 KB, and the barriers."""
        return (232448 - 4 * 64 * 64 * 2 - 512) // self.stage_bytes

    def tiles(self, M: int, N: int) -> int:
        return triton.cdiv(M, ROWS.value) * triton.cdiv(N, self.width)

    def clocks(self, M: int, N: int, K: int, sms: int) -> float:
        """Clocks of the busiest multiprocessor: the better tile is the one with fewer.

        A multiprocessor multiplies and adds 2048 pairs of 16-bit numbers a clock. The other two numbers are fitted to
        measurements: it gets 60 bytes a clock from L2, and a store that nothing hides takes 500 clocks.
        """
        products, loads = ROWS.value * self.width * STEP.value / 2048, self.stage_bytes / 60
        stored = 0 if self.turns else 500
        waves = math.ceil(self.tiles(M, N) / sms)
        return waves * (triton.cdiv(K, STEP.value) * max(products, loads) + stored)


# Tiles whose accumulators fit into the registers of a consumer.
TILES = [Tile(width, True) for width in range(64, 177, 8)] + [
    Tile(width, False) for width in range(64, 257, 8)
]


@functools.cache
def tile_for(M: int, N: int, K: int, sms: int) -> Tile:
    """The tile with the fewest clocks; among equal ones, the tile that loads less."""
    return min(TILES, key=lambda tile: (tile.clocks(M, N, K, sms), -tile.width))


def place(tile, tiles_m, tiles_n, band):
    """The position of a tile in the grouped order of rung 5. For integers, and in the kernel for scalars."""
    first = tile // (band * tiles_n) * band
    rows = min(tiles_m - first, band)
    inside = tile % (band * tiles_n)
    return first + inside % rows, inside // rows


# ---------------------------------------------------------------------------------------------------------------------
# The instruction


@gluon.constexpr_function
def products(KIND, WIDTH, BLOCKS):
    """Assembly that multiplies one step: 64 rows of a, BLOCKS times, by WIDTH rows of w.

    A *matrix descriptor* contains the address of a block in shared memory, in units of 16 bytes, and its layout:
    swizzled rows of 128 bytes, in groups of eight rows, 1024 bytes per group. The instruction takes 16 columns of K,
    which are 32 bytes. A tile's first one replaces what is in the registers: `setp` makes a predicate of `adds`,
    without which the instruction does not add. `wgmma.fence` orders it after earlier accesses to its registers. The
    last line waits for the step *before*.
    """
    numbers = WIDTH // 2  # of a thread, of each 64 rows
    a, w, adds = (f"${2 * BLOCKS * numbers + 4 * i}" for i in range(3))
    lines = [
        "{ .reg .pred adds; .reg .b32 low; .reg .b64 x, y;",
        f"setp.ne.s32 adds, {adds}, 0; wgmma.fence.sync.aligned;",
    ]
    for block in range(BLOCKS):
        sums = ", ".join(f"${block * numbers + i}" for i in range(numbers))
        for i in range(STEP.value // 16):
            lines += [
                f"add.s32 low, {a}, {block * 512 + i * 2}; mov.b64 x, {{low, 0x40000040}};",
                f"add.s32 low, {w}, {i * 2}; mov.b64 y, {{low, 0x40000040}};",
                f"wgmma.mma_async.sync.aligned.m64n{WIDTH}k16.f32.{KIND}.{KIND} {{{sums}}}, x, y,",
                f"{1 if i else 'adds'}, 1, 1, 0, 0;",
            ]
    return " ".join([*lines, "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1; }"])


@gluon.constexpr_function
def constraints(numbers, others):
    """The registers of the sums come in and go out; the other operands come four times, once for each number."""
    return ",".join(["=f"] * numbers + [str(i) for i in range(numbers)] + ["r"] * 4 * others)


@gluon.constexpr_function
def floats(count):
    return [gl.float32] * count


@gluon.jit
def everywhere(value):
    return gl.full([64, 8], value, gl.int32, BLOCK)


@gluon.jit
def multiply(acc, a, w, adds, KIND: gl.constexpr, WIDTH: gl.constexpr, BLOCKS: gl.constexpr):
    """Begins a step's products, and waits for those of the step before."""
    return gl.inline_asm_elementwise(
        products(KIND, WIDTH, BLOCKS), constraints(4 * len(acc), 3),
        acc + (everywhere(a), everywhere(w), everywhere(adds)),  # noqa: RUF005
        dtype=floats(len(acc)), is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def finished(acc):
    """Waits for all products."""
    return gl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0;", constraints(4 * len(acc), 0), acc, dtype=floats(len(acc)), is_pure=False,
        pack=4,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The roles

placed = gluon.jit(place)


@gluon.constexpr_function
def boxes(rows, box):
    """The number of loads for `rows` rows."""
    return (rows + box - 1) // box


@gluon.jit
def tiles_along(M, N, WIDTH: gl.constexpr):
    return gl.cdiv(M, ROWS), gl.cdiv(N, WIDTH)


@gluon.jit
def produce(a, w, ring, full, free, M, N, K, band, WIDTH: gl.constexpr, STAGES: gl.constexpr):
    BOX: gl.constexpr = a.block_type.shape[0]
    OF_A: gl.constexpr = boxes(ROWS, BOX)
    OF_W: gl.constexpr = boxes(WIDTH, BOX)
    tiles_m, tiles_n = tiles_along(M, N, WIDTH)
    step = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = placed(tile, tiles_m, tiles_n, band)
        for k in range(0, K, STEP):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), (step // STAGES + 1) % 2)
            mbarrier.expect(full.index(stage), (OF_A + OF_W) * BOX * STEP * 2)
            first = stage * (OF_A + OF_W)
            for i in gl.static_range(OF_A):
                load(a, [tile_m * ROWS + i * BOX, k], full.index(stage), ring.index(first + i))
            for i in gl.static_range(OF_W):
                load(w, [tile_n * WIDTH + i * BOX, k], full.index(stage), ring.index(first + OF_A + i))
            step += 1


@gluon.jit
def consume(
    out, bias, slots, ring, full, free, turn, M, N, K, band,
    GROUP: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
    EPILOGUE: gl.constexpr,
):  # fmt: skip
    BOX: gl.constexpr = ring.shape[1]
    STAGE_BYTES: gl.constexpr = (boxes(ROWS, BOX) + boxes(WIDTH, BOX)) * BOX * STEP * 2
    # Of 64 rows each: the whole tile, or half of it.
    BLOCKS: gl.constexpr = ROWS // 64 if TURNS else ROWS // 128
    FIRST_ROW: gl.constexpr = 0 if TURNS else GROUP * 64
    tiles_m, tiles_n = tiles_along(M, N, WIDTH)
    steps = gl.cdiv(K, STEP)

    # Of the ring's steps, this group's first one; and its first tile, and from one to the next.
    step = gl.to_tensor(0)
    own, every = gl.program_id(0), gl.num_programs(0)
    if TURNS:
        step += GROUP * steps
        own += GROUP * every
        every *= 2
    parity = gl.to_tensor(1 - GROUP)  # 1 for group 0: its first wait returns at once
    memory = gl.inline_asm_elementwise(
        "mov.b32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )

    for tile in range(own, tiles_m * tiles_n, every):
        tile_m, tile_n = placed(tile, tiles_m, tiles_n, band)
        if TURNS:
            mbarrier.wait(turn.index(GROUP), parity)
            parity ^= 1
        acc = ()
        for _ in gl.static_range(BLOCKS * WIDTH // 8):
            acc += (gl.zeros([64, 8], gl.float32, BLOCK),)
        for k in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES % 2)
            blocks = memory + stage * STAGE_BYTES
            acc = multiply(
                acc,
                lower_half(blocks + FIRST_ROW * 128),
                lower_half(blocks + ROWS * 128),
                k,
                KIND,
                WIDTH,
                BLOCKS,
            )
            # The products of the step before are done, so its stage may be loaded again.
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=k > 0)
            step += 1
        if TURNS:
            # This group's last products are in flight, so the other group's products follow them.
            mbarrier.arrive(turn.index(1 - GROUP))
        acc = finished(acc)
        mbarrier.arrive(free.index((step - 1) % STAGES))
        row, col = tile_m * ROWS + FIRST_ROW, tile_n * WIDTH
        finish(acc, out, bias, N, slots, row, col, GROUP, WIDTH, BLOCKS, EPILOGUE)
        if TURNS:
            step += steps  # the next tile's are the other group's
    tma.store_wait(0)


@gluon.jit
def lower_half(address):
    """Of a matrix descriptor; the upper half is in `products`."""
    return (address >> 4) | (1 << 16)


# ---------------------------------------------------------------------------------------------------------------------
# The epilogue and the store, 64 x 64 numbers at a time


@gluon.jit
def plain(numbers, bias, col, N):
    return numbers


P1, P2, P3, P4, P5 = (gl.constexpr(factor) for factor in rung(9).fitted())


@gluon.jit
def bias_gelu(numbers, bias, col, N):
    """The epilogue of rung 9."""
    n = col + gl.arange(0, 64, gl.SliceLayout(0, numbers.type.layout))
    x = numbers + gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
    a = gl.minimum(gl.abs(x), 6.0)
    exponent = a * (P1 + a * (P2 + a * (P3 + a * (P4 + a * P5))))
    return gl.maximum(x, 0.0) - a * gl.exp2(exponent - 1.0)


@gluon.constexpr_function
def column(part, WIDTH):
    """The first column of a part. The last part may overlap the one before, and then stores the same numbers again."""
    return min(64 * part, WIDTH - 64)


@gluon.jit
def joined(acc, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Some of an accumulator's blocks side by side, as one tensor. The assertion says that no number moves."""
    if COUNT == 1:
        return acc[FIRST]
    else:
        left, right = joined(acc, FIRST, COUNT // 2), joined(acc, FIRST + COUNT // 2, COUNT // 2)
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8 * COUNT, 16])
        both = gl.join(left, right).permute((0, 2, 1)).reshape([64, 8 * COUNT])
        return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def finish(
    acc, out, bias, N, slots, row, col,
    GROUP: gl.constexpr, WIDTH: gl.constexpr, BLOCKS: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = boxes(WIDTH, 64)
    for block in gl.static_range(BLOCKS):
        for part in gl.static_range(PARTS):
            # Two slots for each group: one is filled while the other one is stored. A tile begins with both empty. It
            # may have an odd number of parts, and then the tile before ended with the slot with which this one begins.
            slot = slots.index(2 * GROUP + (block * PARTS + part) % 2)
            numbers = joined(acc, (block * WIDTH + column(part, WIDTH)) // 8, 8)
            numbers = EPILOGUE(numbers, bias, col + column(part, WIDTH), N)
            tma.store_wait(1 if block + part else 0)
            slot.store(numbers.to(out.dtype))
            fence_async_shared()  # so that the TMA unit sees what threads have written
            store(out, [row + block * 64, col + column(part, WIDTH)], slot)


# ---------------------------------------------------------------------------------------------------------------------
# The kernel


@gluon.jit(do_not_specialize=["M", "N", "K", "band"])
def matmul_kernel(
    a, w, out, bias, M, N, K, band,
    KIND: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    BOX: gl.constexpr = a.block_type.shape[0]
    # The largest comes first, so the ring is where shared memory begins.
    ring = gl.allocate_shared_memory(
        a.dtype, [STAGES * (boxes(ROWS, BOX) + boxes(WIDTH, BOX)), BOX, STEP], a.layout
    )
    slots = gl.allocate_shared_memory(out.dtype, [4, 64, 64], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1 if TURNS else 2)  # groups that read a stage
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                consume,
                (
                    out,
                    bias,
                    slots,
                    ring,
                    full,
                    free,
                    turn,
                    M,
                    N,
                    K,
                    band,
                    0,
                    KIND,
                    WIDTH,
                    STAGES,
                    TURNS,
                    EPILOGUE,
                ),
            ),
            (
                consume,
                (
                    out,
                    bias,
                    slots,
                    ring,
                    full,
                    free,
                    turn,
                    M,
                    N,
                    K,
                    band,
                    1,
                    KIND,
                    WIDTH,
                    STAGES,
                    TURNS,
                    EPILOGUE,
                ),
            ),
            (produce, (a, w, ring, full, free, M, N, K, band, WIDTH, STAGES)),
        ],
        [4, 1],  # warps of all roles but the first, which has the kernel's num_warps
        [232, 40],  # registers of a thread
    )


def has_wgmma() -> bool:
    """Whether kernels run here on a GPU that has the instruction."""
    return not INTERPRETED and torch.version.cuda is not None and torch.cuda.get_device_capability() == (9, 0)


def descriptor(t: torch.Tensor, *block: int) -> TensorDescriptor:
    """A tensor descriptor as Gluon takes it, with a block's layout in shared memory: rows of 128 bytes, swizzled."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), list(block), layout)


def arguments(
    a: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    sms: int,
    bias: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The kernel's arguments."""
    (M, N), K = out.shape, a.shape[1]
    # So that the tiles in flight read about as many rows of a as of w.
    band = max(1, round(math.sqrt(sms * tile.width / ROWS.value)))
    return {
        "a": descriptor(a, tile.box, STEP.value), "w": descriptor(w, tile.box, STEP.value),
        "out": descriptor(out, 64, 64), "bias": bias, "M": M, "N": N, "K": K, "band": band, "KIND": KINDS[a.dtype],
        "WIDTH": tile.width, "STAGES": tile.stages, "TURNS": tile.turns,
        "EPILOGUE": plain if bias is None else bias_gelu, "num_warps": 4,
    }  # fmt: skip


def matmul(
    a: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """a @ w.T, or with a bias gelu(a @ w.T + bias), for float16 or bfloat16 a, (M, K), and w, (N, K).

    Rows are contiguous and aligned to 16 bytes.
    """
    M, N, K = product_sizes(a, w.T, tuple(KINDS))
    if tile is not None and tile not in TILES:
        raise ValueError(f"wanted a width of 64 to 256, in turns to 176, that is a multiple of 8, got {tile}")
    if bias is not None and (bias.shape != (N,) or bias.dtype != a.dtype or not bias.is_contiguous()):
        raise ValueError(
            f"bias must be contiguous, ({N},) of {a.dtype}, got {tuple(bias.shape)} of {bias.dtype}"
        )
    out = output(out, a, M, N)
    for name, t in (("a", a), ("w", w), ("out", out)):
        before.check_descriptor(name, t)
    if not has_wgmma():
        return emulated(a, w, out, tile or Tile(128, True), bias)
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    tile = tile or tile_for(M, N, K, sms)
    matmul_kernel[(min(sms, tile.tiles(M, N)),)](**arguments(a, w, out, tile, sms, bias))
    return out


# ---------------------------------------------------------------------------------------------------------------------
# The protocol in Python


class Barrier:
    """A model of an mbarrier."""

    def __init__(self, count: int) -> None:
        self.count = self.left = count
        self.phase = 0

    def arrive(self) -> None:
        self.left -= 1
        if not self.left:
            self.left = self.count
            self.phase += 1

    def is_over(self, parity: int) -> bool:
        """Whether the newest phase of this parity has ended."""
        return self.phase % 2 != parity


class Stores:
    """A group's two slots, and its stores, which read them whenever they please."""

    def __init__(self) -> None:
        self.slots = [torch.zeros(64, 64)] * 2
        self.begun = 0
        self.pending: set[int] = set()

    def begin(self, slot: int, part: torch.Tensor) -> Callable[[], None]:
        """The copy of a slot to a part of the output."""
        number = self.begun
        self.begun += 1
        self.pending.add(number)

        def copy() -> None:
            part.copy_(self.slots[slot][: part.shape[0], : part.shape[1]])
            self.pending.remove(number)

        return copy

    def is_over(self, newest: int) -> bool:
        """Whether all but the newest ones are done."""
        return all(number >= self.begun - newest for number in self.pending)


# A warp yields what it waits for: a barrier and a parity, or stores and how many of them may be in flight.
Wait = tuple[Barrier | Stores, int]
Warp = Iterator[Wait]


def interleave(warps: Sequence[Warp], copies: list[Callable[[], None]]) -> None:
    """Run warps and copies in some order that the barriers allow."""
    waits: dict[Warp, Wait | None] = dict.fromkeys(warps)
    while waits or copies:
        ready = [warp for warp, wait in waits.items() if wait is None or wait[0].is_over(wait[1])]
        if not ready and not copies:
            raise RuntimeError("deadlock: all warps wait, and nothing is on its way")
        choice = random.randrange(len(ready) + len(copies))
        if choice >= len(ready):
            copies.pop(choice - len(ready))()
            continue
        try:
            waits[ready[choice]] = next(ready[choice])
        except StopIteration:
            del waits[ready[choice]]


def emulated(
    a: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    bias: torch.Tensor | None = None,
    programs: int = 2,
    stages: int = 3,
    band: int = 2,
) -> torch.Tensor:
    """a @ w.T as the kernel computes it: the same barriers, parities and order, one program after the other."""
    (M, N), K, height = out.shape, a.shape[1], ROWS.value
    tiles = triton.cdiv(M, height), triton.cdiv(N, tile.width)
    steps, step_k = triton.cdiv(K, STEP.value), STEP.value
    # The content of a stage before its blocks arrive.
    unread = [torch.full((rows, step_k), math.nan) for rows in (height, tile.width)]
    for program in range(programs):
        ring = [list(unread) for _ in range(stages)]
        full = [Barrier(2) for _ in range(stages)]  # the copies of a and of w
        free = [Barrier(1 if tile.turns else 2) for _ in range(stages)]
        turn = [Barrier(1), Barrier(1)]
        copies: list[Callable[[], None]] = []

        def arrives(stage: int, operand: int, block: torch.Tensor, ring=ring, full=full) -> None:
            ring[stage][operand] = block
            full[stage].arrive()

        def producer(program=program, ring=ring, free=free, copies=copies, arrives=arrives) -> Warp:
            step = 0
            for number in range(program, math.prod(tiles), programs):
                tile_m, tile_n = place(number, *tiles, band)
                for k in range(0, K, step_k):
                    stage = step % stages
                    yield free[stage], (step // stages + 1) % 2
                    ring[stage][:] = unread
                    for i, (operand, rows, first) in enumerate(
                        ((a, height, tile_m), (w, tile.width, tile_n))
                    ):
                        # As the TMA unit does, with zeros where the operand ends.
                        block = torch.zeros(rows, step_k)
                        inside = operand[first * rows :][:rows, k : k + step_k]
                        block[: inside.shape[0], : inside.shape[1]] = inside
                        copies.append(functools.partial(arrives, stage, i, block))
                    step += 1

        def consumer(
            group: int, program=program, ring=ring, full=full, free=free, turn=turn, copies=copies
        ) -> Warp:
            stores = Stores()
            step, own, every, first, rows = 0, program, programs, group * 64, 64
            if tile.turns:
                step, own, every, first, rows = group * steps, own + group * every, 2 * every, 0, height
            parity = 1 - group
            for number in range(own, math.prod(tiles), every):
                tile_m, tile_n = place(number, *tiles, band)
                if tile.turns:
                    yield turn[group], parity
                    parity ^= 1
                acc = torch.zeros(())
                for k in range(steps):
                    yield full[step % stages], step // stages % 2
                    # Read as late as the hardware may read it: when the next step's products have begun.
                    if k:
                        acc = acc + product(ring[(step - 1) % stages], first, rows)
                        free[(step - 1) % stages].arrive()
                    step += 1
                if tile.turns:
                    turn[1 - group].arrive()
                acc = acc + product(ring[(step - 1) % stages], first, rows)
                free[(step - 1) % stages].arrive()
                corner = out[tile_m * height + first :, tile_n * tile.width :]
                if bias is not None:
                    inside = bias[tile_n * tile.width :][: tile.width].float()
                    acc = F.gelu(acc + F.pad(inside, (0, tile.width - len(inside))))
                parts = [(row, col) for row in range(0, rows, 64) for col in columns(tile.width)]
                for i, (row, col) in enumerate(parts):
                    yield stores, 1 if i else 0
                    stores.slots[i % 2] = acc[row : row + 64, col : col + 64]
                    copies.append(stores.begin(i % 2, corner[row : row + 64, col : col + 64]))
                if tile.turns:
                    step += steps

        interleave([producer(), consumer(0), consumer(1)], copies)
    return out


def columns(width: int) -> list[int]:
    """The first columns of the parts in which a tile is stored."""
    return [min(64 * part, width - 64) for part in range(triton.cdiv(width, 64))]


def product(stage: list[torch.Tensor], first: int, rows: int) -> torch.Tensor:
    """Of some rows of a's block in a stage, and all of w's."""
    a, w = stage
    return a[first : first + rows] @ w.T


# ---------------------------------------------------------------------------------------------------------------------
# Predict before you run, and exercises


def waves_answer() -> str:
    found = []
    for tile in (Tile(256, False), Tile(176, True)):
        tiles = tile.tiles(1500, 5760)
        waves = math.ceil(tiles / 132)
        found.append(f"width {tile.width}: {tiles} tiles, {waves} waves, {waves * tile.width} columns")
    return f"{'; '.join(found)}. The time of whole waves is that of their columns."


def ring_answer() -> str:
    tile = Tile(128, True)
    step = ROWS.value * tile.width * STEP.value / 2048
    ahead = (tile.stages - 1) * step / 1.7e3
    return (
        f"{tile.stages} stages of {tile.stage_bytes // 1024} KB. A step takes {step:.0f} clocks, so a block is asked "
        f"for {ahead:.1f} us before its use, at 1.7 GHz. A load from memory takes about 1 us."
    )


def parity_answer() -> str:
    steps, stages = 64, Tile(128, True).stages
    return (
        f"Step {steps} of the ring, the first of tile 1: stage {steps} % {stages} = {steps % stages}, used for the "
        f"{steps // stages}th time after the first, so parity {steps // stages % 2}."
    )


QUESTIONS = (
    Question(
        "An output of 1500 x 5760 in tiles of 128 x 256, or of 128 x 176: how many waves on 132 multiprocessors?",
        waves_answer,
    ),
    Question(
        "Tiles of 128 x 128: how many stages fit beside 32 KB of slots? How long before its use is a block requested?",
        ring_answer,
    ),
    Question(
        "With turns and K = 4096: for which stage and parity does the second group wait first?", parity_answer
    ),
)


def stage_and_parities(step: int, stages: int) -> tuple[int, int, int]:
    """Exercise 1: the stage of a step, and the parities for which its consumer and its producer wait."""
    raise NotImplementedError(
        "return the stage, the consumer's parity of `full`, the producer's parity of `free`"
    )


def check_stage_and_parities(answer: Callable[[int, int], tuple[int, int, int]]) -> None:
    for stages in (2, 3, 6):
        full, free = ([Barrier(1) for _ in range(stages)] for _ in range(2))
        for step in range(5 * stages):
            stage, consumer, producer = answer(step, stages)
            assert free[stage].is_over(producer), (
                f"step {step} of {stages} stages: the producer waits for ever"
            )
            assert not full[stage].is_over(consumer), f"step {step}: the consumer reads what has not arrived"
            full[stage].arrive()
            assert full[stage].is_over(consumer), f"step {step}: the consumer waits for ever"
            assert not free[stage].is_over((producer + 1) % 2), (
                f"step {step}: the producer overwrites what is read"
            )
            free[stage].arrive()


def best_width(M: int, N: int, sms: int) -> int:
    """Exercise 2: the width of 128, 136 ... 256 with the fewest columns in all waves together; of equals the widest."""
    raise NotImplementedError(
        "count tiles of 128 rows, then waves, then the columns that all waves have together"
    )


def check_best_width(answer: Callable[[int, int, int], int]) -> None:
    for (M, N), expected in {
        (1500, 5760): 176,
        (4096, 4096): 256,
        (8192, 8192): 200,
        (3072, 3072): 192,
    }.items():
        assert answer(M, N, 132) == expected, f"{M}x{N} on 132 multiprocessors: {expected} is better"


# ---------------------------------------------------------------------------------------------------------------------
# The check and the measurement


SHOWN = (Tile(128, True), Tile(176, True), Tile(256, False), Tile(192, False))
CHECKED = (*SHOWN, Tile(72, True), Tile(136, False))


def check() -> list[Row]:
    if has_wgmma():
        print("The kernel runs on this GPU, and its protocol in Python is checked, too.")
    else:
        print("No GPU here has wgmma, so the kernel's protocol is checked in Python.")
    rows = []
    for m, n, k in ((1, 8, 8), (300, 520, 200)):
        for tile in (Tile(128, True), Tile(72, True), Tile(136, False)):
            rows += compared("rung 10, emulated", m, n, k, tile, lambda a, w, out, tile, bias: emulated(
                a.cpu(), w.cpu(), out.cpu(), tile, bias if bias is None else bias.cpu()).to(a.device))  # fmt: skip
    if has_wgmma():
        for m, n, k in ((1, 8, 8), (300, 520, 200), (3001, 4008, 152), (1500, 5760, 2880)):
            for tile in CHECKED:
                rows += compared("rung 10", m, n, k, tile, matmul)
        for tile in CHECKED:
            check_repeats(tile)
    return rows


def check_repeats(tile: Tile) -> None:
    """The same bits again and again, with few steps a tile, so that every wait counts: a race would show."""
    a, w = normal(3001, 152), normal(4008, 152)
    first = matmul(a, w, tile=tile)
    for _ in range(50):
        if not torch.equal(matmul(a, w, poisoned(3001, 4008), tile), first):
            raise AssertionError(f"rung 10, {tile}: two runs differ, so a wait is missing")


def compared(name: str, m: int, n: int, k: int, tile: Tile, call: Callable[..., torch.Tensor]) -> list[Row]:
    """The errors of a product, and of one with an epilogue."""
    a, w, bias = normal(m, k), normal(n, k, scale=k**-0.5), normal(n)
    shape = f"{m}x{n}x{k}, width {tile.width}, {'turns' if tile.turns else 'shared'}"
    out = call(a, w, poisoned(m, n), tile, None)
    rows = compare(name, shape, out, a @ w.T, a.double() @ w.double().T, 5e-4)
    out = call(a, w, poisoned(m, n), tile, bias)
    peer, exact = F.gelu(F.linear(a, w, bias)), F.gelu(F.linear(a.double(), w.double(), bias.double()))
    return rows + compare(f"{name}, gelu", shape, out, peer, exact, 5e-4)


def bench() -> list[Row]:
    """The chosen tile; others, to see what the width and the turns do; and the epilogue of rung 9."""
    import gemmery

    rows = []
    for shape in ((4096, 4096, 4096), (8192, 8192, 8192), (1500, 5760, 2880), (4001, 4104, 4088)):
        contenders: list[tuple[str, str, Product]] = [
            ("rung 8", "before", before.matmul),
            ("torch", "torch", lambda a, w, out: torch.matmul(a, w.T, out=out)),
            ("gemmery", "other", lambda a, w, out: gemmery.matmul(a, w.T, out=out)),
        ]
        if has_wgmma():
            contenders.insert(0, ("rung 10", "this", matmul))
            for tile in SHOWN:
                name = f"rung 10, width {tile.width}, {'turns' if tile.turns else 'shared'}"
                call = lambda a, w, out, tile=tile: matmul(a, w, out, tile)  # noqa: E731
                contenders.append((name, "other", call))
        rows += bench_products((shape,), contenders)
    return rows


def main(arguments: Sequence[str] | None = None) -> Record:
    return run(NUMBER, TITLE, check, bench, arguments, QUESTIONS, EXERCISES)


# ---------------------------------------------------------------------------------------------------------------------
# Solutions of the exercises


def solved_stage_and_parities(step: int, stages: int) -> tuple[int, int, int]:
    return step % stages, step // stages % 2, (step // stages + 1) % 2


def solved_best_width(M: int, N: int, sms: int) -> int:
    def columns(width: int) -> int:
        return triton.cdiv(triton.cdiv(M, 128) * triton.cdiv(N, width), sms) * width

    return min(range(256, 127, -8), key=columns)


EXERCISES = (
    Exercise(stage_and_parities, solved_stage_and_parities, check_stage_and_parities),
    Exercise(best_width, solved_best_width, check_best_width),
)


if __name__ == "__main__":
    main()
