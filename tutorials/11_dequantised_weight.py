"""Rung 11: a weight of four bits, dequantized on the way to the tensor cores.

A model that generates text multiplies a few rows of x by each of its weights. Nearly all of the time is spent on
reading the weight: 8192 x 8192 numbers of 16 bits are 134 MB, which take 32 µs at 4.2 TB/s, however fast the tensor
cores are. With four bits per number, the weight has a fourth of these bytes. It stays in this form in memory and
becomes float16 only in registers.

**The format.** Along K, each GROUP of 64 numbers has a scale. A number is stored as an integer q from 0 to 15:

    w = (q - 8) * scale        scale = largest |w| of the group / 7

Each number takes 4 + 16 / 64 = 4.25 bits. There is no type for half a byte, so a word of 32 bits holds eight numbers.

**The order of the numbers.** Any order works, if packing and unpacking agree. The obvious order puts eight adjacent
numbers along K into a word. But in the block for `tl.dot`, these eight columns belong to several threads, so the
numbers would have to pass through shared memory. Here a step of 64 columns has four runs of 16, the number that a
tensor core multiplies at a time. A word has two adjacent numbers of each run:

    a step of 64 along K     0 ........ 15 | 16 ........ 31 | 32 ........ 47 | 48 ........ 63
    word j of 8 has          2 j, 2 j + 1  | 16 + 2 j, + 1  | 32 + 2 j, + 1  | 48 + 2 j, + 1
    at bits                  0 and 4       | 8 and 12       | 16 and 20      | 24 and 28

A run is made of all words, shifted by two amounts and joined. The step is a sum of four products, each of which uses
two numbers of every word.

**Four bits to float16 without a conversion.** The float16 number 1024 + q has the bits 0x6400 | q, for q < 1024. So
`(word >> shift & 15) | 0x6400`, read as a float16, is 1024 + q, and one subtraction turns it into q - 8. A conversion
from integer to float runs at a fourth of the rate of these instructions or less. Both ways are exact.

**The scale** is the same for all numbers of a row of the left operand within a group, and a group is one step. So the
sum of the step, of 64 x BLOCK_M numbers, is multiplied by it in float32, instead of the block of 64 x 64.

The weight is the left operand of `tl.dot`, as in rung 12: its 64 rows fill the tensor cores, which a few rows of x
would not. With few rows of x there are also few tiles: 8192 / 64 = 128 for 132 multiprocessors. With a smaller N, some
multiprocessors would be idle. So each tile is cut into SPLIT parts along K. Each part adds its sum to a float32 output
with `tl.atomic_add`, and a second, small kernel converts the output to float16. The order of the additions, and with
it the last bit, varies between runs. gemmery adds the parts in a fixed order instead.

When do four bits pay? As long as the time is spent on reading the weight. A product of M rows does M multiplications
for each number that is read, so from some number of rows on, the tensor cores take longer than the memory, in any
format. Beyond that number, dequantizing is only additional work, and four bits lose, as the last lines of the
measurement show.

In gemmery:

    import gemmery
    q = gemmery.quantize(w, "int4")
    out = gemmery.linear(a, q)

docs/low-bit.md has its formats, their accuracy and the kernels for many rows.

Weights of few bits: Frantar et al., "GPTQ", ICLR 2023; Lin et al., "AWQ", MLSys 2024. The trick with the exponent: Kim
et al., "Who Says Elephants Can't Run", 2022.

**What it gained, and why.** One row of x takes 36 µs, and torch with 16 bits takes 49 µs. Reading the weight alone
would take 8 µs. The instructions take longer: `benchmarks/ladder_code.py` counts about 190 of them, in each of 4 warps,
for each step of 64 x 64 numbers. There are four small products as well, and the kernel waits for each of them before it
unpacks the next 16 columns. There are 16384 such steps. Even if all multiprocessors issued instructions without a
pause, they would take 14 µs at 1.7 GHz. gemmery's kernel takes 20 µs.

*Where it loses.* By the answer to question 2, four bits could win up to 44 rows. The rung is 1.09 times as fast as
torch with 16 rows, and 0.64 times with 64. A step has about as many instructions as with one row, but its products are
four times as wide, and 64 times as many sums are added atomically. At 256 and 1024 rows the rung takes about four times
as long as torch: there, multiplying takes longer than reading the weight, the weight is unpacked again for each tile of
64 rows, and the products wait for that. gemmery's kernels gain a factor of 2.4 with one row and 1.7 with 64. With 256
and 1024 rows, they take 1 and 2 % longer than torch with 16 bits.
"""

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

NUMBER = 11
TITLE = "a weight of four bits, dequantised in registers"

GROUP = 64  # numbers along K with one scale, and those of a step
WORDS = GROUP // 8  # of a step


# ---------------------------------------------------------------------------------------------------------------------
# The format


@dataclass(frozen=True)
class Packed:
    """A weight of four bits a number."""

    words: torch.Tensor  # int32, (N, K / 8), eight of each step
    scales: torch.Tensor  # float16, (N, K / 64)

    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes


def quantise(w: torch.Tensor) -> Packed:
    """A float16 weight, (N, K), in four bits a number."""
    if w.dim() != 2 or w.dtype != torch.float16 or w.shape[0] % 64 or w.shape[1] % GROUP or 0 in w.shape:
        raise ValueError(f"wanted float16 (N, K), multiples of 64, got {tuple(w.shape)} of {w.dtype}")
    groups = w.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7).half()
    # If all numbers of a group are 0, any scale is right.
    numbers = (groups / scales.float().clamp(min=1e-7)[..., None]).round().clamp(-8, 7).int() + 8
    runs = numbers.unflatten(-1, (4, WORDS, 2)).long() << shifts(w.device)
    words = runs.sum((-3, -1))
    # The same 32 bits as int32.
    return Packed((words - ((words >> 31) << 32)).int().flatten(1), scales)


def dequantise(w: Packed) -> torch.Tensor:
    """The float32 numbers that a packed weight stands for, (N, K)."""
    words = w.words.unflatten(1, (-1, 1, WORDS, 1))
    runs = words >> shifts(words.device) & 15
    return ((runs.flatten(-3) - 8) * w.scales.float()[..., None]).flatten(1)


def shifts(device: torch.device) -> torch.Tensor:
    """The bit positions of a word's numbers: (run, 1, which of the two neighbors)."""
    return (4 * torch.arange(8, device=device)).reshape(4, 1, 2)


# ---------------------------------------------------------------------------------------------------------------------
# The kernel


@triton.jit
def as_float16(words, SHIFT: tl.constexpr):
    """The numbers at bits SHIFT to SHIFT + 3 of each word, less 8."""
    bits = ((words >> SHIFT) & 15) | 0x6400
    return bits.to(tl.uint16).to(tl.float16, bitcast=True) - 1032.0


@triton.jit
def run_of(words, RUN: tl.constexpr):
    """16 columns, of 8 words a row."""
    both = tl.join(as_float16(words, 8 * RUN), as_float16(words, 8 * RUN + 4))
    return both.reshape(words.shape[0], 2 * words.shape[1])


@triton.jit
def partial_kernel(
    a_ptr, words_ptr, scales_ptr, sums_ptr, M, N, K, a_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = STEP // 8
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < M
    words_row = words_ptr + n.to(tl.int64)[:, None] * (K // 8) + tl.arange(0, WORDS)[None, :]
    scales_row = scales_ptr + n.to(tl.int64) * (K // STEP)
    a_block = a_ptr + m.to(tl.int64)[None, :] * a_row + tl.arange(0, 2 * WORDS)[:, None]
    steps = K // STEP
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(tl.program_id(2), steps, SPLIT):
        words = tl.load(words_row + step * WORDS)
        scale = tl.load(scales_row + step).to(tl.float32)
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for i in tl.static_range(4):
            x = tl.load(a_block + step * STEP + i * 2 * WORDS, mask=inside[None, :], other=0.0)
            sums = tl.dot(run_of(words, i), x, sums)
        acc += sums * scale[:, None]
    out = sums_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    if SPLIT == 1:
        tl.store(out, acc, mask=inside[None, :])
    else:
        tl.atomic_add(out, acc, mask=inside[None, :], sem="relaxed")


def parts(M: int, N: int, K: int, block_m: int, block_n: int) -> int:
    """Into how many parts K is cut, so that there are some programs for each multiprocessor."""
    if INTERPRETED:
        return min(2, K // GROUP)
    tiles = triton.cdiv(N, block_n) * triton.cdiv(M, block_m)
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    return max(1, min(4 * sms // tiles, K // GROUP // 8))


def matmul(a: torch.Tensor, w: Packed, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ w.T for float16 a, (M, K), with adjacent columns, and a packed weight (N, K)."""
    N, K = w.words.shape[0], 8 * w.words.shape[1]
    if a.dim() != 2 or a.shape[1] != K or not a.shape[0] or a.dtype != torch.float16 or a.stride(1) != 1:
        raise ValueError(
            f"wanted float16 (M, {K}), M > 0, adjacent columns, got {tuple(a.shape)} of {a.dtype}"
        )
    M = a.shape[0]
    out = output(out, a, M, N)
    block_m, block_n = min(64, max(16, triton.next_power_of_2(M))), 64
    split = parts(M, N, K, block_m, block_n)
    sums = torch.zeros((M, N), device=a.device, dtype=torch.float32)
    partial_kernel[(N // block_n, triton.cdiv(M, block_m), split)](
        a, w.words, w.scales, sums, M, N, K, a.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, STEP=GROUP, SPLIT=split, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out.copy_(sums)


# ---------------------------------------------------------------------------------------------------------------------
# Predict before you run, and exercises

BANDWIDTH, RATE = (
    4.2e12,
    700e12,
)  # of an H200: bytes a second from memory, operations a second on random numbers


def bytes_answer() -> str:
    found = []
    for bits in (16, 4 + 16 / GROUP):
        size = 8192 * 8192 * bits / 8
        found.append(f"{bits:g} bits: {size / 1e6:.0f} MB, {1e6 * size / BANDWIDTH:.1f} us")
    return "; ".join(found) + ". x and the output, 16 rows each, are 0.5 MB together."


def rows_answer() -> str:
    found = (f"{bits:g} bits: {solved_break_even(bits, RATE, BANDWIDTH):.0f} rows" for bits in (16, 4.25))
    return "; ".join(found) + ". With more rows, the tensor cores take longer than the memory."


def bits_answer() -> str:
    value = torch.tensor(0x6400 | 5, dtype=torch.int16).view(torch.float16).item()
    return f"It is {value:g}. The last bit of a float16 from 1024 to 2048 has the value 1, so all integers fit exactly."


QUESTIONS = (
    Question(
        "A weight of 8192 x 8192 and 16 rows of x: how long does reading the weight take with 16 bits, and with 4.25?",
        bytes_answer,
    ),
    Question(
        "From how many rows of x on do the tensor cores take longer than the memory, in both cases?",
        rows_answer,
    ),
    Question(
        "Which number is the float16 with the bits 0x6400 | 5, and why is the trick exact?", bits_answer
    ),
)


def numbers_of(word: int) -> list[int]:
    """Exercise 1: the eight numbers of a word, each from -8 to 7, in the order of their columns."""
    raise NotImplementedError("take bits 0 to 3 first, then 4 to 7, ...; 8 stands for 0")


def check_numbers_of(answer: Callable[[int], list[int]]) -> None:
    w = torch.randint(-7, 8, (64, 64)).half()
    w[:, 0] = 7.0  # so that the scale is 1
    packed = quantise(w)
    for j in (0, 3, 7):
        columns = [16 * run + 2 * j + i for run in range(4) for i in range(2)]
        for row in (0, 63):
            assert answer(int(packed.words[row, j])) == w[row, columns].tolist(), f"word {j} of row {row}"


def break_even(bits: float, rate: float, bandwidth: float) -> float:
    """Exercise 2: the rows of x for which reading the weight takes as long as the multiplications."""
    raise NotImplementedError("operations for each number of the weight, and bytes for each; N and K cancel")


def check_break_even(answer: Callable[[float, float, float], float]) -> None:
    assert answer(16, 1e12, 1e12) == 1, (
        "two operations and two bytes at the same rate are done at the same time"
    )
    assert 166 < answer(16, RATE, BANDWIDTH) < 167
    assert 44 < answer(4.25, RATE, BANDWIDTH) < 45


# ---------------------------------------------------------------------------------------------------------------------
# The check and the measurement


def check() -> list[Row]:
    rows = []
    for m, n, k in ((1, 64, 64), (5, 128, 192), (17, 64, 320)):
        a, w = normal(m, k), quantise(normal(n, k, scale=k**-0.5))
        exact = a.double() @ dequantise(w).double().T
        out = matmul(a, w, poisoned(m, n))
        rows += compare("rung 11", f"{m}x{n}x{k}", out, a @ dequantise(w).half().T, exact, 5e-4)
    return rows


def bench() -> list[Row]:
    """Rates count as if the weight were float16, so that all methods have one measure."""
    import gemmery

    rows = []
    for m in (1, 16, 64, 256, 1024):
        n = k = 8192
        given = normal(n, k, scale=k**-0.5)
        packed, ours = quantise(given), gemmery.quantize(given, "int4")
        w = dequantise(packed).half()
        del given
        contenders: list[tuple[str, str, Product]] = [
            ("rung 11, 4 bits", "this", lambda a, _, out, packed=packed: matmul(a, packed, out)),
            ("rung 8, 16 bits", "before", before.matmul),
            ("torch, 16 bits", "torch", lambda a, w, out: torch.matmul(a, w.T, out=out)),
        ]
        rows += bench_products(((m, n, k),), contenders, weight=lambda *_, w=w: w)
        w = ours.dequantize()
        contenders = [
            ("gemmery, int4", "other", lambda a, _, out, ours=ours: gemmery.linear(a, ours, out=out))
        ]
        rows += bench_products(((m, n, k),), contenders, weight=lambda *_, w=w: w)
    return rows


before = rung(8)  # the product of the weight with 16 bits, for the comparison


def main(arguments: Sequence[str] | None = None) -> Record:
    return run(NUMBER, TITLE, check, bench, arguments, QUESTIONS, EXERCISES)


# ---------------------------------------------------------------------------------------------------------------------
# Solutions of the exercises


def solved_numbers_of(word: int) -> list[int]:
    return [(word >> 4 * i & 15) - 8 for i in range(8)]


def solved_break_even(bits: float, rate: float, bandwidth: float) -> float:
    return bits / 8 / bandwidth * rate / 2


EXERCISES = (
    Exercise(numbers_of, solved_numbers_of, check_numbers_of),
    Exercise(break_even, solved_break_even, check_break_even),
)


if __name__ == "__main__":
    main()
