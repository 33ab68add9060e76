"""Steps along K: the product of a block of A and a block of B is added to a tile's sum.

All steps have the signature

    multiply(x, y, acc, loaded, SWAP, PRECISION, IMPRECISE_ACC) -> acc

`x` is the block of A as its loader gives it, `y` that of B, and `acc` the sum, transposed with `SWAP`. Beside it there
may be

    load_step(args, shape, sizes, batch, row, col, k, ROWS, COLS, STEP) -> loaded

which loads further data of a step before the wait for the two blocks. `args` is its tuple of pointers and strides,
`shape` is (M, N, K), and (row, col, k) is where the step of `ROWS` by `COLS` by `STEP` begins.
"""

import triton
import triton.language as tl

from .numerics import dot


@triton.jit
def add_product(x, y, acc, loaded, SWAP: tl.constexpr, PRECISION: tl.constexpr, IMPRECISE_ACC: tl.constexpr):
    """`acc + x @ y`, or with `SWAP` its transpose."""
    first = y.T if SWAP else x
    second = x.T if SWAP else y
    return dot(first, second, acc, PRECISION, IMPRECISE_ACC)
