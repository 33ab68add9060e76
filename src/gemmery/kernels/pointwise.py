"""An epilogue without a product: over blocks of a matrix in memory, as for the backward pass."""

import triton
import triton.language as tl

from .fused import as_type
from .gemm import finish_block
from .operands import load_strided
from .overlap import let_next_begin, wait_for_earlier


@triton.jit(do_not_specialize=["M"])
def pointwise(
    x, out, args, M, N, sizes, x_strides, out_strides,
    EPILOGUE: tl.constexpr, STORE: tl.constexpr, ACC: tl.constexpr, OUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """`out = epilogue(x)`, one program a block of (BLOCK_M, BLOCK_N)."""
    wait_for_earlier(OVERLAPS)
    across = tl.cdiv(N, BLOCK_N)
    blocks = tl.cdiv(M, BLOCK_M) * across
    batch = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    row = block // across * BLOCK_M
    col = block % across * BLOCK_N
    value = load_strided(x, (M, N), x_strides, sizes, batch, row, col, BLOCK_M, BLOCK_N, True, True, WIDE)
    let_next_begin(OVERLAPS)
    finish_block(
        as_type(value, ACC), (out, out_strides, args), (M, N), sizes, batch, row, col, BLOCK_N, EPILOGUE, STORE, OUT,
        WIDE,
    )  # fmt: skip
