"""Launches that begin before earlier ones have ended: programmatic dependent launch, on Hopper and later.

The programs of such a launch start as soon as there is room for them, and wait until all earlier launches have ended.
Without it, the GPU does nothing from the end of one launch to the first program of the next: about half a microsecond
in a CUDA graph, and a microsecond or more in a stream. CUTLASS and QuACK (github.com/Dao-AILab/quack) launch their
kernels in the same way.

A kernel waits before it accesses memory, because it may read what earlier launches write, and write what they read. It
lets the next launch begin only when little of its own work is left. If the next launch began at once, its programs
would fill the multiprocessors that have room first, several on one, and leave others empty: on an H200, short products
ran at 0.8 of their speed in the worst case (`benchmarks/results/looks/overlap-bf16-triton3.9.json`).
"""

import triton
import triton.language as tl
from triton.language.core import builtin


@triton.jit
def wait_for_earlier(OVERLAPS: tl.constexpr):
    """Waits until the previous launch has ended and what it has written is visible.

    The same holds for all earlier launches, because each of them waited before it let the next one begin.

    Args:
        OVERLAPS: whether launches of the kernel may begin before earlier ones have ended; see `Arch.overlap`.
    """
    if OVERLAPS:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def begin_tiles(a, b, OVERLAPS: tl.constexpr):
    """As `wait_for_earlier`, for `gemm_tiles`. Meanwhile, the tensor maps of its operands are fetched."""
    if OVERLAPS:
        prefetch_maps(a, b)
    wait_for_earlier(OVERLAPS)


@builtin
def prefetch_maps(a, b, _semantic=None):
    """Prefetches those of the first two parameters of `gemm_tiles` that are tensor maps, in one thread.

    Tensor maps do not change, so this does not have to wait for earlier launches. Otherwise the first load of each
    operand would wait for its map.
    """
    maps, number = "", 0
    for operand in (a, b):
        parameters: list[object] = []
        operand._flatten_ir(parameters)
        if isinstance(operand, tl.tensor_descriptor):
            maps += f"mov.b64 map, gemm_tiles_param_{number}; cvta.param.u64 map, map; @first prefetch.tensormap [map];"
        number += len(parameters)
    tl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 thread; .reg .b64 map; mov.u32 thread, %tid.x; setp.eq.s32 first, thread, 0;"
        f"{maps} mov.b32 $0, 0; }}",
        "=r", [], dtype=tl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    """Lets the next launch begin once all programs have come to this point or have ended."""
    if OVERLAPS:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip
