"""Rung 1: vector add with pointers and a mask.

The smallest complete Triton kernel. A launch starts many *programs*; all run the same code and tell themselves apart
by `tl.program_id`. A program does not handle one element, as a CUDA thread would, but a whole *block*. Values in the
kernel are arrays of `BLOCK` elements, and the compiler spreads them over the program's threads.

    element    0        1024       2048      n-1
               |---------|----------|---------|  :  :
    program         0          1         2    ^--^
                                              masked: these addresses are out of bounds

A pointer plus an array of integers is an array of pointers. `n` is rarely a multiple of the block, so the last program
would run past the end. A *mask* selects the elements that exist. Masked elements are neither loaded nor stored.

How fast can it be? Each element costs 12 bytes of traffic (two loads and one store of four bytes) and one addition. A
GPU does hundreds of additions in the time of one such transfer, so memory bandwidth alone decides. So compare the
kernel with a plain copy on the same machine in the same run: no kernel moves bytes much faster than one that does
nothing else. This simple kernel is as fast as the copy, so later rungs cannot gain anything on large vectors. Matrix
products, from rung 3 on, are different.

Further reading. The programming model: Tillet, Kung, Cox, "Triton: An Intermediate Language and Compiler for Tiled
Neural Network Computations", MAPL 2019. The limits of a machine: Williams, Waterman, Patterson, "Roofline", CACM 2009.

**What it gained, and why.** On an H200, the kernel moves 4.2 TB/s if the vector is long, as much as torch's addition
and 2 % more than a plain copy. Nothing is left to gain.

*Where it loses.* 2**20 elements are 12.6 MB, which take 3 µs at that rate. The kernel, torch's addition and the copy
all take 8 µs. The rest is the latency of the launch and of the memory, and the tail of the last programs.
"""

from collections.abc import Callable, Sequence

from _common import (
    Exercise,
    Question,
    Record,
    Row,
    compare,
    normal,
    output,
    poisoned,
    relative_error,
    run,
    time_us,
)

# isort: split
import torch
import triton
import triton.language as tl

NUMBER = 1
TITLE = "vector add with pointers and a mask"
BLOCK = 1024


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    # tl.program_id has 32 bits, as CUDA's block numbers have.
    # Beyond 2**31 elements, the index would overflow.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)
    inside = index < n
    x = tl.load(x_ptr + index, mask=inside)
    y = tl.load(y_ptr + index, mask=inside)
    tl.store(out_ptr + index, x + y, mask=inside)


def add(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x + y for two contiguous tensors of one shape and dtype."""
    if x.shape != y.shape or x.dtype != y.dtype or x.device != y.device:
        raise ValueError(
            f"wanted two tensors of one shape, dtype and device, got {tuple(x.shape)} of {x.dtype} on {x.device} "
            f"and {tuple(y.shape)} of {y.dtype} on {y.device}"
        )
    out = output(out, x, *x.shape)
    if not (x.is_contiguous() and y.is_contiguous() and out.is_contiguous()):
        raise ValueError("this rung walks through memory element by element: the tensors must be contiguous")
    n = x.numel()
    add_kernel[(triton.cdiv(n, BLOCK),)](x, y, out, n, BLOCK=BLOCK)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Predict before you run, and exercises


def programs_answer() -> str:
    n = 10_000_000
    programs = triton.cdiv(n, BLOCK)
    return f"{programs} programs. The last one masks {programs * BLOCK - n} of its {BLOCK} elements."


def time_answer() -> str:
    n = 2**26
    return f"12 bytes an element are {12 * n / 1e6:.0f} MB: {12 * n / BANDWIDTH * 1e6:.0f} us."


def launch_answer() -> str:
    n = 5e-6 * BANDWIDTH / 12
    return f"{n / 1e6:.1f} million elements. A shorter vector takes the time of the launch, however fast the kernel is."


BANDWIDTH = 4.2e12  # bytes a second that an H200 reads and writes
QUESTIONS = (
    Question(
        "Blocks of 1024 and 10 million elements: how many programs, and how many masked elements?",
        programs_answer,
    ),
    Question("At 4.2 TB/s, how long does the addition of 2**26 float32 numbers take?", time_answer),
    Question(
        "A launch takes about 5 us. From how many elements on does the memory take longer?", launch_answer
    ),
)


def masked(n: int, block: int) -> int:
    """Exercise 1: how many elements the last program masks."""
    raise NotImplementedError("count the programs first, then what they have room for")


def check_masked(answer: Callable[[int, int], int]) -> None:
    for n, block in ((1, 1024), (1024, 1024), (1025, 1024), (7919, 256)):
        inside = sum(
            program * block + i < n for program in range(triton.cdiv(n, block)) for i in range(block)
        )
        assert answer(n, block) == triton.cdiv(n, block) * block - inside, (
            f"{n} elements in blocks of {block}"
        )


def place_of(index: int, block: int) -> tuple[int, int]:
    """Exercise 2: the program that adds an element, and the element's place in the program's block."""
    raise NotImplementedError("turn `start + tl.arange(0, BLOCK)` around")


def check_place_of(answer: Callable[[int, int], tuple[int, int]]) -> None:
    for index in (0, 1023, 1024, 2**31 + 5):
        program, place = answer(index, 1024)
        assert 0 <= place < 1024, f"element {index}: a block has places 0 to 1023"
        assert program * 1024 + place == index, f"element {index}: that is another one's place"


# ---------------------------------------------------------------------------------------------------------------------
# The check and the measurement


def check() -> list[Row]:
    rows = []
    # One element, less than a block, exactly blocks, one more than blocks, a prime.
    for n in (1, 1000, 2 * BLOCK, 2 * BLOCK + 1, 7919):
        x, y = normal(n, dtype=torch.float32), normal(n, dtype=torch.float32)
        out = add(x, y, out=poisoned(n, dtype=torch.float32))
        rows += compare("rung 1", str(n), out, x + y, x.double() + y.double(), 1e-7)
    return rows


def bench() -> list[Row]:
    rows = []
    for n in (2**20, 2**24, 2**26):
        x, y = normal(n, dtype=torch.float32), normal(n, dtype=torch.float32)
        out = add(x, y, out=poisoned(n, dtype=torch.float32))
        error = relative_error(out, x.double() + y.double())
        # A copy of 1.5 n elements reads and writes as many bytes as the addition of n.
        source = normal(n + n // 2, dtype=torch.float32)
        target = torch.empty_like(source)
        names = (("rung 1", "this", error), ("torch.add", "torch", None), ("torch copy_", "copy", None))
        times = time_us(
            [
                lambda x=x, y=y, out=out: add(x, y, out),
                lambda x=x, y=y, out=out: torch.add(x, y, out=out),
                lambda source=source, target=target: target.copy_(source),
            ]
        )
        for (name, role, wrong), t in zip(names, times, strict=True):
            rows.append(Row(name, role, f"{n} fp32", t, 3 * 4 * n / t / 1e3, "GB/s", wrong))
    return rows


def main(arguments: Sequence[str] | None = None) -> Record:
    return run(NUMBER, TITLE, check, bench, arguments, QUESTIONS, EXERCISES)


# ---------------------------------------------------------------------------------------------------------------------
# Solutions of the exercises


def solved_masked(n: int, block: int) -> int:
    return triton.cdiv(n, block) * block - n


def solved_place_of(index: int, block: int) -> tuple[int, int]:
    return index // block, index % block


EXERCISES = (
    Exercise(masked, solved_masked, check_masked),
    Exercise(place_of, solved_place_of, check_place_of),
)


if __name__ == "__main__":
    main()
