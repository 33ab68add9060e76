"""Rung 12: sparse weights, from a mask to the sparse tensor cores.

A weight is 2:4 sparse if at most two of each four adjacent numbers along K are not 0.

    dense      1.5 -0.2  0.1 -0.9    0.3  0.8 -1.1  0.0
    pruned     1.5   0    0  -0.9     0   0.8 -1.1   0      the two largest of each four
    kept       1.5 -0.9              0.8 -1.1               half of the numbers
    places      0    3                1    2                and two bits for each

Step 1, a mask. The product of the pruned weight is still a dense product. It reads and multiplies all numbers,
including the zeros, in the same time. A mask alone saves nothing.

Step 2, compressed storage. `compress` keeps two numbers of each four, and a code of 4 bits: `i0 | i1 << 2`, where `i0
< i1` are their places. With numbers of 16 bits, that is 2 · 16 + 4 = 36 bits instead of 64: 9/16 of the bytes.
`expanded_kernel` reads these and restores the zeros in registers. It multiplies as much as before, and the expansion
is additional work. So it can pay only if the time is spent on reading the weight, as with few rows of x.

Step 3, the sparse tensor cores. Since compute capability 8.0, they can skip the zeros. `mma.sp.m16n8k32` multiplies 16
x 32 numbers of the weight, given as the 16 x 16 kept ones, by 32 x 8 numbers of x. It does as many multiplications as
the dense m16n8k16, for twice its K. The code of each kept number selects its factor:

    out[row, col] += kept[row, j] * x[4 * (j // 2) + place[row, j], col]     j < 16

Only the left operand can be sparse. So the weight is on the left, and the product is w @ x.T, the transpose of the
result. PTX takes the operands in registers of the 32 threads of a warp, its *lanes*. The first picture (on this rung's
page of the documentation) shows which lane has which numbers. In the code, these functions define it: `place_in_a`,
`place_in_b`, `place_in_c` and `place_in_codes`.

    lane = 4 g + t    g = 0 .. 7: a row of w, or of x; t = 0 .. 3: a place along K
    A, kept of w      4 registers of 2: columns 2 t, 2 t + 1 of row g; of g + 8; 8 on
    B, a tile of x    4 registers of 2: k = 2 t, 2 t + 1 of column g; 8, 16, 24 on
    C and D, sums     4 registers of 1: columns 2 t, 2 t + 1 of row g; of g + 8
    codes             1 register of 8: columns 16 t .. 16 t + 15 of row g; of g + 8

The four lanes of a row have codes for 64 columns, and one instruction multiplies 32. Its *selector*, a constant,
selects the lanes whose codes it reads: 0 for t = 0 and 1, and 1 for t = 2 and 3. So one register of codes serves two
instructions. The second picture on that page shows which lane has which codes. A code with two equal places is
undefined.

Triton does not specify which thread has which element of a tensor. Gluon, the language below it, does, because its
layouts are explicit. The operands of `mma_sp_kernel` are tensors of (tiles, warps, 32 lanes, 4 registers), with
exactly that layout. Inline assembly takes 4 elements at a time and issues the instruction. The weight is packed in
this order beforehand, so that each lane loads its 16 bytes at once. Each warp computes a part of K, and the parts are
added at the end. The kernel is simple and not the fastest: a faster one would load x through shared memory, and ahead
of time.

`mma_sp` emulates the instruction in torch, as PTX defines it, with the registers of all 32 lanes. It is checked on
every machine, and replaces the kernel if no GPU has the instruction. The rung prints which one ran.

PTX has two forms of the instruction. This one, `mma.sp::ordered_metadata`, promises that `i0 < i1`. It needs PTX 8.5,
which Triton 3.6 and newer emit for all GPUs. NVIDIA's manual warns that the other form may be much slower on some
GPUs.

Step 4, gemmery. In the library, a sparse weight is an operand like any other, with epilogues and gradients:

    import gemmery
    s = gemmery.sparsify(w, "2:4")
    out = gemmery.linear(a, s)

On Hopper its kernel issues `wgmma.sp`. Four warps together multiply 64 rows of the weight by as many rows of x as the
tile has, up to 256, and tiles need not be a power of two wide. The kept numbers and x come from shared memory, into
which the TMA unit of rung 8 loads them. Only the codes go through registers. On other GPUs, the kernels expand the
weight as in step 2. docs/sparse.md has more.

When does 2:4 pay? The codes reduce the savings:

    numbers of     bits a weight, dense     2:4
    16 bits                          16       9
     8 bits                           8       5
     4 bits                           4       3

With few rows of x, as in decoding, the time is spent on reading the weight, and 2:4 can reduce it to 9/16 at best.
`int4` without sparsity reads less than half of that, and rounding to `int4` usually costs less accuracy than pruning
half of the numbers: docs/low-bit.md. With many rows, as in prefill and in training, the time is spent in the tensor
cores. There, `int4` gains nothing, since its numbers are multiplied in 16 bits, and 2:4 takes half of the steps, so it
is at most twice as fast. Pruning a trained model by magnitude alone loses accuracy, often too much: 2:4 is for models
that were trained or calibrated for it. Do not use either without measuring the quality of the model.

The pattern: Mishra et al., "Accelerating Sparse Deep Neural Networks", 2021. The instruction: NVIDIA, "PTX ISA",
mma.sp.

**What it gained, and why.** With one row of x, the kernel of step 3 takes 32 µs, and torch's dense product 49 µs.
Reading the weight alone would take 18 µs. `benchmarks/ladder_code.py` shows how the kernel loads the weight: each lane
loads 16 bytes at a time, eight such loads are in flight at once, and a step has only 35 other instructions. gemmery's
kernel takes 28 µs. With 4096 rows, where the tensor cores are the limit, it is 1.4 times as fast as torch.

*Where it loses.* Step 2, the expansion in registers, takes 103 µs with one row, twice as long as the dense product. A
step has 662 other instructions, and the kernel waits for each product before it expands the next columns. Step 3 takes
1.4 times as long as torch with 16 rows, 61 µs against 44 µs, and seven times as long with 64 rows. It loads x in pieces
of 4 bytes: with 64 rows, a step has 260 loads of 4 bytes for 64 products, and each of the 512 programs loads all of x
again. It also needs 180 registers, so only one program fits on a multiprocessor, instead of four. The kernel of step 4
loads x into shared memory, where all warps use it, and takes 30 µs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    run,
    rung,
)

# isort: split
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NUMBER = 12
TITLE = "sparse weights, from a mask to mma.sp"

before = rung(8)  # the dense product, for the comparison


# ---------------------------------------------------------------------------------------------------------------------
# Step 1: a mask


def prune(w: torch.Tensor) -> torch.Tensor:
    """The weight, (N, K), with 0 in place of all but the two largest of each four numbers along K."""
    fours = w.unflatten(-1, (-1, 4))
    kept = fours.abs().topk(2).indices
    return torch.zeros_like(fours).scatter(-1, kept, fours.gather(-1, kept)).flatten(-2)


# ---------------------------------------------------------------------------------------------------------------------
# Step 2: compressed storage


@dataclass(frozen=True)
class Compressed:
    """The kept numbers of a weight, and where they were."""

    values: torch.Tensor  # float16, (N, K / 2)
    words: torch.Tensor  # int16, (N, K / 16): four codes each, of 16 columns, the first in the lowest bits

    def codes(self) -> torch.Tensor:
        """The code of each four, (N, K / 4)."""
        return from_words(self.words, 4).flatten(-2)


def compress(w: torch.Tensor) -> Compressed:
    """A pruned weight, without its zeros."""
    if w.dim() != 2 or w.dtype != torch.float16 or w.shape[0] % 16 or w.shape[1] % 64 or 0 in w.shape:
        raise ValueError(f"wanted float16 (N, K), multiples of 16 and 64, got {tuple(w.shape)} of {w.dtype}")
    fours = w.unflatten(-1, (-1, 4))
    most = int((fours != 0).sum(-1).max())
    if most > 2:
        raise ValueError(f"the weight is not 2:4 sparse: {most} of four adjacent numbers are not 0")
    # Numbers other than 0 come first; then the order along K is restored, so that i0 < i1 even if one of the two is 0.
    places = (fours == 0).to(torch.int8).argsort(dim=-1, stable=True)[..., :2].sort(-1).values
    codes = places[..., 0] | places[..., 1] << 2
    return Compressed(
        fours.gather(-1, places).flatten(-2), in_words(codes.unflatten(-1, (-1, 4)), torch.int16)
    )


def in_words(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The 4-bit codes of the last dimension, one above the other, in one integer."""
    return (codes << 4 * torch.arange(codes.shape[-1], device=codes.device)).sum(-1).to(dtype)


def from_words(words: torch.Tensor, count: int) -> torch.Tensor:
    """The codes in each integer, in a new last dimension."""
    return words.long()[..., None] >> 4 * torch.arange(count, device=words.device) & 15


@triton.jit
def expand(values, words):
    """The weight's block with its zeros, (BLOCK_N, BLOCK_K), of kept numbers and words of four codes."""
    N: tl.constexpr = values.shape[0]
    FOURS: tl.constexpr = values.shape[1] // 2
    code = (words[:, :, None] >> 4 * tl.arange(0, 4)[None, None, :]).reshape(N, FOURS)
    i0, i1 = code & 3, code >> 2 & 3
    first, second = values.reshape(N, FOURS, 2).split()
    zero = tl.zeros_like(first)
    # The value at each of the four places.
    p0 = tl.where(i0 == 0, first, zero)  # the second one is never at 0,
    p1 = tl.where(i0 == 1, first, tl.where(i1 == 1, second, zero))
    p2 = tl.where(i0 == 2, first, tl.where(i1 == 2, second, zero))
    p3 = tl.where(i1 == 3, second, zero)  # and the first one never at 3
    # `join` puts two tensors side by side in a new last dimension: (p0, p2) and (p1, p3) make p0, p1, p2, p3.
    return tl.join(tl.join(p0, p2), tl.join(p1, p3)).reshape(N, 4 * FOURS)


@triton.jit
def expanded_kernel(
    a, values, words, out, M, N, K, a_row, out_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_m, inside_n = (m < M)[:, None], (n < N)[:, None]
    a_rows = a + m.to(tl.int64)[:, None] * a_row
    value_rows = values + n.to(tl.int64)[:, None] * (K // 2)
    word_rows = words + n.to(tl.int64)[:, None] * (K // 16)

    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, K, BLOCK_K):
        value = tl.load(value_rows + k // 2 + tl.arange(0, BLOCK_K // 2)[None, :], mask=inside_n, other=0.0)
        word = tl.load(word_rows + k // 16 + tl.arange(0, BLOCK_K // 16)[None, :], mask=inside_n, other=0)
        x = tl.load(a_rows + k + tl.arange(0, BLOCK_K)[None, :], mask=inside_m, other=0.0)
        # On the left, where its 64 rows fill the tensor cores, as few rows of x would not.
        acc = tl.dot(expand(value, word), x.T, acc)
    tl.store(
        out + m.to(tl.int64)[:, None] * out_row + n[None, :], acc.T.to(tl.float16), mask=inside_m & inside_n.T
    )


def expanded(a: torch.Tensor, w: Compressed, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ w.T, the weight expanded in registers."""
    N, K = w.values.shape[0], 2 * w.values.shape[1]
    M = rows_of(a, K)
    out = output(out, a, M, N)
    block_m = min(64, max(16, triton.next_power_of_2(M)))
    expanded_kernel[(triton.cdiv(N, 64), triton.cdiv(M, block_m))](
        a, w.values, w.words, out, M, N, K, a.stride(0), out.stride(0),
        BLOCK_M=block_m, BLOCK_N=64, BLOCK_K=128 if K % 128 == 0 else 64, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


def rows_of(a: torch.Tensor, K: int) -> int:
    """M; a ValueError that names what does not fit."""
    if a.dim() != 2 or a.shape[1] != K or not a.shape[0] or a.dtype != torch.float16:
        raise ValueError(f"wanted float16 (M, {K}), M > 0, got {tuple(a.shape)} of {a.dtype}")
    if not a.is_contiguous() or a.data_ptr() % 16:
        raise ValueError("a must be contiguous and begin at a multiple of 16 bytes")
    return a.shape[0]


# ---------------------------------------------------------------------------------------------------------------------
# Step 3: which lane has what. The functions take integers, tensors of torch, and in a kernel tensors of Gluon.


def place_in_a(lane, register, half):
    """Row and column, of 16 x 16 kept numbers: in the lower half of a lane's register of A, or the upper one."""
    return lane // 4 + 8 * (register % 2), 2 * (lane % 4) + half + 8 * (register // 2)


def place_in_b(lane, register, half):
    """k and column, of 32 x 8, in the same way."""
    return 2 * (lane % 4) + half + 8 * register, lane // 4


def place_in_c(lane, register):
    """Row and column, of 16 x 8: one float32 a register."""
    return lane // 4 + 8 * (register // 2), 2 * (lane % 4) + register % 2


def place_in_codes(lane, nibble):
    """Row and four, of 16 x 16: the four bits at 4 * nibble of a lane's word, for 64 columns."""
    return lane // 4 + 8 * (nibble // 4), 4 * (lane % 4) + nibble % 4


def indices(*sizes: int, device: torch.device) -> list[torch.Tensor]:
    """Along each of these dimensions, the index of every element."""
    return list(torch.meshgrid(*(torch.arange(size, device=device) for size in sizes), indexing="ij"))


@dataclass(frozen=True)
class Fragments:
    """A compressed weight in the order of the lanes."""

    a: torch.Tensor  # int32, (N / 16, K / 32, 32 lanes, 4 registers)
    codes: torch.Tensor  # int32, (N / 16, K / 64, 32 lanes)


def fragments(w: Compressed) -> Fragments:
    """The weight as the lanes want it: gathered once, by the functions above."""
    device = w.values.device
    # Strips of 16 rows, steps of 32 columns, 16 rows, 16 kept numbers.
    a = w.values.unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).transpose(1, 2)
    a = a[(..., *place_in_a(*indices(32, 4, 2, device=device)))].contiguous().view(torch.int32).squeeze(-1)
    # Strips, steps of 64, 16 rows, 16 codes.
    codes = w.codes().unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).transpose(1, 2)
    codes = codes[(..., *place_in_codes(*indices(32, 8, device=device)))]
    return Fragments(a, in_words(codes, torch.int32))


# ---------------------------------------------------------------------------------------------------------------------
# Step 3: what the instruction does, in torch


def mma_sp(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, codes: torch.Tensor, selector: int
) -> torch.Tensor:
    """One mma.sp.m16n8k32: words of A and B and numbers of C, (..., 32, 4), words of codes, (..., 32); D as C."""
    device = a.device
    kept = a.new_zeros(*a.shape[:-2], 16, 16, dtype=torch.float32)
    kept[(..., *place_in_a(*indices(32, 4, 2, device=device)))] = halves(a)
    x = b.new_zeros(*b.shape[:-2], 32, 8, dtype=torch.float32)
    x[(..., *place_in_b(*indices(32, 4, 2, device=device)))] = halves(b)

    code = codes.new_zeros(*codes.shape[:-1], 16, 16, dtype=torch.long)
    code[(..., *place_in_codes(*indices(32, 8, device=device)))] = from_words(codes, 8)
    # The selector's half of them, and for each kept number the row of x that it meets.
    code = code[..., 8 * selector : 8 * selector + 8]
    row = 4 * torch.arange(8, device=device)[:, None] + torch.stack((code & 3, code >> 2), -1)
    met = torch.take_along_dim(x, row.flatten(-3)[..., None], dim=-2).unflatten(-2, (16, 16))

    d = torch.einsum("...rj,...rjn->...rn", kept, met)
    return c + d[(..., *place_in_c(*indices(32, 4, device=device)))]


def halves(words: torch.Tensor) -> torch.Tensor:
    """The two float16 numbers of each word, in a new last dimension."""
    return words.contiguous().view(torch.float16).unflatten(-1, (-1, 2)).float()


def emulated(a: torch.Tensor, w: Fragments, out: torch.Tensor) -> torch.Tensor:
    """a @ w.T as the kernel below has it, with `mma_sp` for the instruction: all strips and tiles at once."""
    (M, K), device = a.shape, a.device
    tiles = torch.nn.functional.pad(a, (0, 0, 0, -M % 8)).unflatten(0, (-1, 8)).unflatten(2, (-1, 32))
    k, row = place_in_b(*indices(32, 4, 2, device=device))
    # Steps of 32, tiles, lanes, registers.
    b = tiles.permute(2, 0, 3, 1)[..., k, row].contiguous().view(torch.int32).squeeze(-1)
    strips = w.a.shape[0]
    d = torch.zeros(strips, tiles.shape[0], 32, 4, device=device)
    for step in range(K // 32):
        codes = w.codes[:, None, step // 2]
        d = mma_sp(w.a[:, None, step], b[None, step], d, codes, selector=step % 2)
    n, m = place_in_c(*indices(32, 4, device=device))
    whole = d.new_empty(strips, tiles.shape[0], 16, 8)
    whole[..., n, m] = d
    out.copy_(whole.permute(1, 3, 0, 2).reshape(-1, 16 * strips)[:M])
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Step 3: the instruction itself

INSTRUCTION = "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32"

# For kernels.
PLACE_IN_B, PLACE_IN_C = gluon.jit(place_in_b), gluon.jit(place_in_c)


@gluon.constexpr_function
def assembly(selector):
    """D, A, B and C are 4 registers each. The codes' one register comes 4 times, once for each element."""
    return f"{INSTRUCTION} {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9,$10,$11}}, {{$12,$13,$14,$15}}, $16, {selector};"


@gluon.constexpr_function
def lanes(tiles, warps):
    """A tensor (tiles, warps, 32 lanes, 4 registers) as its indices say: each thread has all tiles' registers."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], *([2**i, 0, 0, 0] for i in range(tiles.bit_length() - 1))],
        lane_bases=[[0, 0, 2**i, 0] for i in range(5)],
        warp_bases=[[0, 2**i, 0, 0] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[tiles, warps, 32, 4],
    )


@gluon.constexpr_function
def along(layout, dim):
    """The layout of a vector along one dimension of `layout`."""
    for other in (3, 2, 1, 0):
        layout = layout if other == dim else gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def index(size: gl.constexpr, dim: gl.constexpr, layout: gl.constexpr):
    """0, 1, 2, ... along one of four dimensions; the others have size 1."""
    i = gl.arange(0, size, along(layout, dim))
    for other in gl.static_range(4):
        if other != dim:
            i = gl.expand_dims(i, other)
    return i


@gluon.jit
def issue_mma_sp(a, b, c, codes, selector: gl.constexpr):
    # "0" to "3": C comes in the registers in which D goes out.
    return gl.inline_asm_elementwise(
        assembly(selector), "=f,=f,=f,=f,r,r,r,r,r,r,r,r,0,1,2,3,r,r,r,r", [a, b, c, codes],
        dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def mma_sp_kernel(a, codes, x, out, M, N, K, TILES: gl.constexpr, STEPS: gl.constexpr):
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = lanes(TILES, WARPS)
    tile, warp = index(TILES, 0, LANES), index(WARPS, 1, LANES)
    lane, register = index(32, 2, LANES), index(4, 3, LANES)

    # Each warp computes a part of K: `part` steps of 64 columns.
    part = K // 64 // WARPS
    step = gl.program_id(0).to(gl.int64) * (K // 64) + warp * part
    a += step * 256 + lane * 4 + register
    codes += step * 32 + lane
    k, row = PLACE_IN_B(lane, register, 0)
    row += gl.program_id(1) * (8 * TILES) + 8 * tile
    x += row.to(gl.int64) * (K // 2) + warp * (part * 32) + k // 2  # two numbers are a word

    acc = gl.zeros([TILES, WARPS, 32, 4], gl.float32, LANES)
    for _ in range(0, part, STEPS):
        # All loads of several steps first, so that they are in flight at once.
        words, tiles, metadata = (), (), ()
        for i in gl.static_range(STEPS):
            metadata += (gl.load(codes + i * 32),)
        for i in gl.static_range(2 * STEPS):
            words += (gl.load(a + i * 128),)
            tiles += (gl.load(x + i * 16, mask=row < M, other=0),)
        for i in gl.static_range(2 * STEPS):
            acc = issue_mma_sp(words[i], tiles[i], acc, metadata[i // 2], i % 2)
        a += STEPS * 256
        codes += STEPS * 32
        x += STEPS * 32

    acc = gl.expand_dims(gl.sum(acc, 1), 1)  # over the warps
    n, m = PLACE_IN_C(lane, register)
    n += gl.program_id(0) * 16
    m += gl.program_id(1) * (8 * TILES) + 8 * tile
    gl.store(out + m.to(gl.int64) * N + n, acc.to(gl.float16), mask=m < M)


def has_mma_sp() -> bool:
    """Whether kernels run here on a GPU that has the instruction."""
    return not INTERPRETED and torch.version.cuda is not None and torch.cuda.get_device_capability() >= (8, 0)


def matmul(a: torch.Tensor, w: Fragments, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ w.T by mma.sp, or where there is no such GPU by its emulation."""
    N, K = 16 * w.a.shape[0], 32 * w.a.shape[1]
    M = rows_of(a, K)
    out = output(out, a, M, N)
    if not out.is_contiguous():
        raise ValueError("out must be contiguous")
    if not has_mma_sp():
        return emulated(a, w, out)
    tiles = min(8, triton.next_power_of_2(triton.cdiv(M, 8)))
    warps = math.gcd(K // 64, 8)
    mma_sp_kernel[(N // 16, triton.cdiv(M, 8 * tiles))](
        w.a, w.codes, a.view(torch.int32), out, M, N, K,
        TILES=tiles, STEPS=math.gcd(K // 64 // warps, 4), num_warps=warps,
    )  # fmt: skip
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Predict before you run, and exercises


def bytes_answer() -> str:
    found = (f"{bits} bits: {8192 * 8192 * bits / 8 / 4.2e12 * 1e6:.1f} us" for bits in (16, 9))
    return f"{'; '.join(found)}. With few rows, 16/9 is the most that 2:4 can gain."


def code_answer() -> str:
    return f"{solved_code([0, 0.8, 0, -1.1])}: place 1 in bits 0 and 1, place 3 in bits 2 and 3."


def lane_answer() -> str:
    lane, register, half = solved_lane_of(9, 5)
    return f"Lane {lane}, in the {'upper' if half else 'lower'} half of register {register}."


QUESTIONS = (
    Question(
        "A weight of 8192 x 8192 float16 numbers, dense and 2:4: how long does reading it take at 4.2 TB/s?",
        bytes_answer,
    ),
    Question("What is the code of 0, 0.8, 0, -1.1?", code_answer),
    Question("Which lane has the kept number at row 9, column 5 of A, and where?", lane_answer),
)


def code(four: Sequence[float]) -> int:
    """Exercise 1: the code of four numbers, two of which are not 0."""
    raise NotImplementedError("the places of the two, the first in the lower bits")


def check_code(answer: Callable[[Sequence[float]], int]) -> None:
    w = prune(torch.randn(16, 64)).half()
    fours, codes = w.unflatten(1, (-1, 4)), compress(w).codes()
    for row, four in ((0, 0), (3, 7), (15, 15)):
        assert answer(fours[row, four].tolist()) == codes[row, four], f"{fours[row, four].tolist()}"


def lane_of(row: int, column: int) -> tuple[int, int, int]:
    """Exercise 2: the lane, the register and the half of it (0 or 1) that hold a kept number of A."""
    raise NotImplementedError("turn `place_in_a` around")


def check_lane_of(answer: Callable[[int, int], tuple[int, int, int]]) -> None:
    for row in range(16):
        for column in range(16):
            assert place_in_a(*answer(row, column)) == (row, column), f"row {row}, column {column}"


# ---------------------------------------------------------------------------------------------------------------------
# The check and the measurement


def results(a: torch.Tensor, w: torch.Tensor) -> dict[str, torch.Tensor]:
    """The product of a pruned weight, step by step."""
    import gemmery

    def out() -> torch.Tensor:
        return poisoned(a.shape[0], w.shape[0])

    compressed = compress(w)
    packed = fragments(compressed)
    found = {
        "1 masked, rung 8": before.matmul(a, w, out()),
        "2 expanded in registers": expanded(a, compressed, out()),
        "3 mma.sp, emulated": emulated(a, packed, out()),
    }
    if has_mma_sp():
        found["3 mma.sp"] = matmul(a, packed, out())
    return found | {"4 gemmery": gemmery.linear(a, gemmery.sparsify(w, "2:4"), out=out())}


def check() -> list[Row]:
    if has_mma_sp():
        print("mma.sp runs on this GPU, and its emulation in torch is checked, too.")
    else:
        print("No GPU here has mma.sp, so its emulation in torch is checked.")
    rows = []
    for m, n, k in [(5, 64, 128), (16, 32, 192), (33, 80, 256)]:
        a, w = normal(m, k), prune(normal(n, k, scale=k**-0.5))
        peer, exact, shape = a @ w.T, a.double() @ w.double().T, f"{m}x{n}x{k}"
        compared = [compare(name, shape, result, peer, exact, 5e-4) for name, result in results(a, w).items()]
        # torch's product is the same beside each.
        rows += [*(own for own, _ in compared), compared[0][1]]
    return rows


def bench() -> list[Row]:
    """Rates count the zeros too, so that all methods have one measure."""
    rows = []
    for m, n, k in ((1, 8192, 8192), (16, 8192, 8192), (64, 8192, 8192)):
        w = prune(normal(n, k, scale=k**-0.5))
        rows += bench_products(((m, n, k),), few_rows(w), weight=lambda *_, w=w: w)
    w = prune(normal(4096, 4096, scale=4096**-0.5))
    return rows + bench_products(((4096, 4096, 4096),), many_rows(w), weight=lambda *_: w)


def few_rows(w: torch.Tensor) -> list[tuple[str, str, Product]]:
    """The products to time if reading the weight takes most of the time. Weights are packed beforehand, once."""
    compressed = compress(w)
    packed = fragments(compressed)
    contenders: list[tuple[str, str, Product]] = [
        ("rung 8, masked weight", "before", before.matmul),
        ("torch, masked weight", "torch", lambda a, w, out: torch.matmul(a, w.T, out=out)),
        ("step 2, expanded in registers", "other", lambda a, _, out: expanded(a, compressed, out)),
        many_rows(w)[0],
    ]
    if has_mma_sp():
        contenders.insert(0, ("rung 12, mma.sp", "this", lambda a, _, out: matmul(a, packed, out)))
    return contenders


def many_rows(w: torch.Tensor) -> list[tuple[str, str, Product]]:
    """The products to time if the tensor cores limit the speed; the kernels of this file are not made for that."""
    import gemmery

    sparse = gemmery.sparsify(w, "2:4")
    return [
        ("step 4, gemmery.linear", "other", lambda a, _, out: gemmery.linear(a, sparse, out=out)),
        ("torch, masked weight", "other", lambda a, w, out: torch.matmul(a, w.T, out=out)),
    ]


def main(arguments: Sequence[str] | None = None) -> Record:
    return run(NUMBER, TITLE, check, bench, arguments, QUESTIONS, EXERCISES)


# ---------------------------------------------------------------------------------------------------------------------
# Solutions of the exercises


def solved_code(four: Sequence[float]) -> int:
    first, second = (place for place, number in enumerate(four) if number)
    return first | second << 2


def solved_lane_of(row: int, column: int) -> tuple[int, int, int]:
    return 4 * (row % 8) + column % 8 // 2, row // 8 + 2 * (column // 8), column % 2


EXERCISES = (
    Exercise(code, solved_code, check_code),
    Exercise(lane_of, solved_lane_of, check_lane_of),
)


if __name__ == "__main__":
    main()
