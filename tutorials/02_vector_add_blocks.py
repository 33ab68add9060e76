"""Rung 2: vector add with a block window.

Rung 1 built 1024 addresses and 1024 mask bits by hand. Here the kernel describes the tensor once (its base, shape and
strides) and then asks for a *window* of it. Triton computes addresses and bounds.

    tensor    |--------------------------------------------|
    window            |---------|
                      ^offset    shape of the block

For a vector this saves a line. For matrices it saves the error-prone part of the kernel. It also tells the compiler
that the addresses form a rectangle, as hardware for block copies requires (rung 8).

Triton has had two kinds of window:

- *Block pointers*, `tl.make_block_ptr`: a pointer with a shape. The compiler turns them into ordinary addresses and
  masks, with 64-bit arithmetic. They are deprecated in Triton 3.7 and removed in 3.9.
- *Tensor descriptors*: the same idea as an object. On NVIDIA GPUs since Hopper, the TMA unit reads the descriptor and
  copies the block from memory to shared memory by itself. On other GPUs, Triton turns a descriptor into addresses and
  masks. These are slower than your own, because Triton then knows nothing about the strides. The hardware has
  conditions: the base and all strides but the last must be multiples of 16 bytes, and the last stride must be one
  element.

This rung has a kernel for each kind, and uses block pointers if the installed Triton supports them. Do not expect a
gain over rung 1: memory was already the limit, and TMA's path through shared memory pays only if a block is used more
than once.

The second lesson of this rung is the cost of a call outside its kernel. `add(x, y)` allocates its output, and
`add(x, y, out)` is given one. On the device, both take the same time, since PyTorch's allocator reuses memory from
earlier calls. They differ in host time: a few microseconds of Python and C++ before the kernel is queued. For a small
vector, only host time counts, so the benchmark measures it, too. A descriptor also costs host time, because it is
encoded at each launch.

Block pointers: the documentation of `tl.make_block_ptr` up to Triton 3.7. The TMA unit: NVIDIA, "H100 Tensor Core GPU
Architecture", 2022, and the CUDA driver API under "Tensor Map Object Management".

**What it gained, and why.** Nothing on the device: block pointers, descriptors and the masks of rung 1 take the same
time to within 1 % where the vector is long, since all of them wait for the memory.

*Where it loses.* With 1024 elements, only host time matters. Triton takes 23 µs to launch the kernel with block
pointers and 40 µs with three descriptors, where torch.add takes 8 µs. A kernel that runs for less than that should not
be launched alone: fuse it with its neighbor, or capture the launches in a CUDA graph.
"""

import time
import warnings
from collections.abc import Callable, Sequence

from _common import (
    HAS_BLOCK_POINTERS,
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
    rung,
    time_us,
)

# isort: split
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

NUMBER = 2
TITLE = "vector add with a block window"
BLOCK = 1024

WINDOWS = ("block pointer", "descriptor") if HAS_BLOCK_POINTERS else ("descriptor",)
# The text above says it once; Triton 3.7 would say it at every compilation.
warnings.filterwarnings("ignore", message="tl.make_block_ptr is deprecated")


@triton.jit
def add_block_pointers(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    x = tl.make_block_ptr(x_ptr, shape=(n,), strides=(1,), offsets=(start,), block_shape=(BLOCK,), order=(0,))
    y = tl.make_block_ptr(y_ptr, shape=(n,), strides=(1,), offsets=(start,), block_shape=(BLOCK,), order=(0,))
    out = tl.make_block_ptr(
        out_ptr, shape=(n,), strides=(1,), offsets=(start,), block_shape=(BLOCK,), order=(0,)
    )
    # boundary_check names the dimensions in which the window may stick out of the tensor.
    total = tl.load(x, boundary_check=(0,)) + tl.load(y, boundary_check=(0,))
    tl.store(out, total, boundary_check=(0,))


@triton.jit
def add_descriptors(x, y, out):
    # The descriptors were made on the host, and they know their block. Bounds are always checked.
    start = tl.program_id(0) * x.block_shape[0]
    out.store([start], x.load([start]) + y.load([start]))


def add(
    x: torch.Tensor, y: torch.Tensor, out: torch.Tensor | None = None, window: str = WINDOWS[0]
) -> torch.Tensor:
    """x + y for two contiguous vectors of one dtype."""
    if x.dim() != 1 or x.shape != y.shape or x.dtype != y.dtype or x.device != y.device:
        raise ValueError(
            f"wanted two vectors of one length, dtype and device, got {tuple(x.shape)} of {x.dtype} on {x.device} "
            f"and {tuple(y.shape)} of {y.dtype} on {y.device}"
        )
    if window not in WINDOWS:
        raise ValueError(f"window {window!r}: this Triton has {', '.join(WINDOWS)}")
    out = output(out, x, *x.shape)
    if not (x.is_contiguous() and y.is_contiguous() and out.is_contiguous()):
        raise ValueError("this rung takes contiguous vectors")
    n = x.numel()
    if n > 2**31 - BLOCK:
        raise ValueError(f"the offset of a window has 32 bits, too few for {n} elements")
    if n == 0:
        return out
    grid = (triton.cdiv(n, BLOCK),)
    if window == "block pointer":
        add_block_pointers[grid](x, y, out, n, BLOCK=BLOCK)
    else:
        if any(t.data_ptr() % 16 for t in (x, y, out)):
            raise ValueError("a descriptor needs memory that starts at a multiple of 16 bytes")
        add_descriptors[grid](*(TensorDescriptor(t, [n], [1], [BLOCK]) for t in (x, y, out)))
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Predict before you run, and exercises


def window_answer() -> str:
    outside = [index for index in range(7168, 7168 + BLOCK) if index >= 7919]
    return f"{len(outside)}: those from {outside[0]} to {outside[-1]}. They load as 0 and are not stored."


def strides_answer() -> str:
    return (
        "No: its rows are 4093 * 2 bytes apart, which is not a multiple of 16. Block pointers and masks work."
    )


def host_answer() -> str:
    return "The host: 23 us, or 40 with descriptors, while the memory transfers 12288 bytes in 3 ns."


QUESTIONS = (
    Question(
        "A vector has 7919 elements. How many of the window of 1024 at offset 7168 lie outside?",
        window_answer,
    ),
    Question("Can a descriptor describe a float16 matrix with strides (4093, 1)?", strides_answer),
    Question("The addition of 1024 numbers: which takes longer, the host or the memory?", host_answer),
)


def offsets(
    corner: tuple[int, int], block: tuple[int, int], shape: tuple[int, int]
) -> list[list[int | None]]:
    """Exercise 1: the offsets of a window's elements in a contiguous matrix, row by row; None for those outside."""
    raise NotImplementedError("the element (i, j) of a matrix with C columns is at offset i * C + j")


def check_offsets(answer: Callable[..., list[list[int | None]]]) -> None:
    assert answer((0, 0), (2, 2), (5, 10)) == [[0, 1], [10, 11]], "the window at the beginning"
    assert answer((4, 8), (2, 3), (5, 10)) == [[48, 49, None], [None, None, None]], "a window that sticks out"


def takes(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, address: int) -> bool:
    """Exercise 2: whether the TMA unit can load a tensor."""
    raise NotImplementedError(
        "the address, all strides but the last, and the last one have conditions; see the text"
    )


def check_takes(answer: Callable[..., bool]) -> None:
    assert answer((64, 64), (64, 1), 2, 0x1000), "a contiguous matrix"
    assert answer((64, 60), (64, 1), 2, 0x1010), "columns of a wider one"
    assert not answer((64, 64), (1, 64), 2, 0x1000), "a transposed one"
    assert not answer((64, 60), (60, 1), 2, 0x1000), "rows of 120 bytes"
    assert not answer((64, 64), (64, 1), 2, 0x1002), "one that begins at its second element"


# ---------------------------------------------------------------------------------------------------------------------
# The check and the measurement


def check() -> list[Row]:
    rows = []
    for window in WINDOWS:
        for n in (1, 1000, 2 * BLOCK, 2 * BLOCK + 1, 7919):
            x, y = normal(n, dtype=torch.float32), normal(n, dtype=torch.float32)
            out = add(x, y, out=poisoned(n, dtype=torch.float32), window=window)
            rows += compare(f"rung 2, {window}", str(n), out, x + y, x.double() + y.double(), 1e-7)
    return rows


def host_us(call: Callable[[], object], calls: int = 2000) -> float:
    """Host time of a call: how long Python is busy, without waiting for the device between calls."""
    for _ in range(100):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def bench() -> list[Row]:
    before = rung(1)
    rows = []
    for n in (2**20, 2**24, 2**26):
        x, y = normal(n, dtype=torch.float32), normal(n, dtype=torch.float32)
        out = poisoned(n, dtype=torch.float32)
        source = normal(n + n // 2, dtype=torch.float32)  # a copy of this moves as many bytes as the addition
        target = torch.empty_like(source)
        contenders: list[tuple[str, str, Callable[[], object]]] = [
            (f"rung 2, {WINDOWS[0]}", "this", lambda x=x, y=y, out=out: add(x, y, out)),
            ("rung 2, new output", "other", lambda x=x, y=y: add(x, y)),
            ("rung 1", "before", lambda x=x, y=y, out=out: before.add(x, y, out)),
            ("torch.add", "torch", lambda x=x, y=y, out=out: torch.add(x, y, out=out)),
            ("torch.add, new output", "other", lambda x=x, y=y: torch.add(x, y)),
            ("torch copy_", "copy", lambda source=source, target=target: target.copy_(source)),
        ]
        for window in WINDOWS[1:]:
            call = lambda x=x, y=y, out=out, window=window: add(x, y, out, window)  # noqa: E731
            contenders.insert(1, (f"rung 2, {window}", "other", call))
        add(x, y, out)
        error = relative_error(out, x.double() + y.double())
        times = time_us([call for _, _, call in contenders])
        for (name, role, _), t in zip(contenders, times, strict=True):
            rate = 3 * 4 * n / t / 1e3
            rows.append(Row(name, role, f"{n} fp32", t, rate, "GB/s", error if role == "this" else None))

    x, y = normal(BLOCK, dtype=torch.float32), normal(BLOCK, dtype=torch.float32)
    out = torch.empty_like(x)
    contenders = [
        (f"rung 2, {WINDOWS[0]}", "this", lambda: add(x, y, out)),
        *((f"rung 2, {w}", "other", lambda w=w: add(x, y, out, w)) for w in WINDOWS[1:]),
        ("rung 2, new output", "other", lambda: add(x, y)),
        ("rung 1", "before", lambda: before.add(x, y, out)),
        ("torch.add", "torch", lambda: torch.add(x, y, out=out)),
        ("torch.add, new output", "other", lambda: torch.add(x, y)),
    ]
    rows += [Row(name, role, f"{BLOCK} fp32, host time", host_us(call)) for name, role, call in contenders]
    return rows


def main(arguments: Sequence[str] | None = None) -> Record:
    return run(NUMBER, TITLE, check, bench, arguments, QUESTIONS, EXERCISES)


# ---------------------------------------------------------------------------------------------------------------------
# Solutions of the exercises


def solved_offsets(
    corner: tuple[int, int], block: tuple[int, int], shape: tuple[int, int]
) -> list[list[int | None]]:
    return [
        [
            i * shape[1] + j if i < shape[0] and j < shape[1] else None
            for j in range(corner[1], corner[1] + block[1])
        ]
        for i in range(corner[0], corner[0] + block[0])
    ]


def solved_takes(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, address: int) -> bool:
    return strides[-1] == 1 and not any(
        x % 16 for x in (address, *(stride * itemsize for stride in strides[:-1]))
    )


EXERCISES = (
    Exercise(offsets, solved_offsets, check_offsets),
    Exercise(takes, solved_takes, check_takes),
)


if __name__ == "__main__":
    main()
