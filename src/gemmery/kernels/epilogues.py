"""Epilogues: what happens to a block of the product before it is stored.

An epilogue has the signature

    epilogue(acc, args, shape, sizes, batch, row, col, ROWS, COLS, WIDE) -> block

`acc` is the block in the accumulator's type, `args` the epilogue's own tuple of pointers, strides and scalars, and
the rest says where the block lies, as for the stores in `operands`. Beside it there may be

    prefetch(args, shape, sizes, batch, row, col, ROWS, COLS, WIDE) -> block

which loads something that the epilogue needs while other blocks are worked on; then it is given (args, block) for args.
"""

import triton
import triton.language as tl

from .operands import load_strided


@triton.jit
def scalar(parts, DTYPE: tl.constexpr):
    """A scalar operand in the accumulator's type.

    Triton passes Python floats as fp32 and compiles one kernel for all their values, unlike for integers. So the host
    passes a double as three floats that add up to it.
    """
    high, middle, low = parts
    total = tl.cast(high, tl.float64) + tl.cast(middle, tl.float64) + tl.cast(low, tl.float64)
    return total.to(DTYPE)


@triton.jit
def identity(
    acc, args, shape, sizes, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr
):
    """The product itself."""
    return acc


@triton.jit
def scale(
    acc, args, shape, sizes, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr
):
    """`alpha * acc`; args = (alpha,)."""
    return acc * scalar(args[0], acc.dtype)


@triton.jit
def add_row(
    acc, args, shape, sizes, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr
):
    """`acc + bias`, the same vector for every row; args = (bias pointer, stride)."""
    bias, stride = args
    cols = col + tl.arange(0, COLS)
    offsets = cols.to(tl.int64) * stride
    return acc + tl.load(bias + offsets, mask=cols < shape[1], other=0.0).to(acc.dtype)[None, :]


@triton.jit
def add_matrix(
    acc, args, shape, sizes, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr
):
    """`alpha * acc + beta * c` with c of any strides; args = (alpha, beta, c pointer, c strides)."""
    alpha, beta, c, strides = args
    addend = load_strided(c, shape, strides, sizes, batch, row, col, ROWS, COLS, True, True, WIDE)
    scaled = addend.to(acc.dtype) * scalar(beta, acc.dtype)
    if acc.dtype.is_floating():
        # The compiler may fuse either product with the sum, which leaves it unrounded, and not the same one in each
        # kernel.
        return tl.fma(acc, scalar(alpha, acc.dtype), scaled)
    return acc * scalar(alpha, acc.dtype) + scaled
