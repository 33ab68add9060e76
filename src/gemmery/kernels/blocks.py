"""Block-sparse operands on the device: the K steps of a tile, and the places of their blocks.

A product with a block-sparse operand counts along K in stored blocks. A line is a block row of the first operand or a
block column of the second one; its blocks are adjacent in memory. PLACE gives a tile the range of its line.
Functions of the loaders, `at`, then find the place of a step in each operand's memory:

    at(shape, batch, row, col, table, ROWS, COLS) -> (rows, cols, row, col)

They take the arguments of loaders, see `operands`, and a table with the places of blocks. They return the shape and
the corner for the loader of the matrix in memory. A range may be empty. Its only step lies outside every matrix, so
that loaders return zeros.
"""

import triton
import triton.language as tl

from .order import grouped

#: A row or a column outside every matrix: tensor descriptors of block-sparse operands end here.
OUTSIDE = tl.constexpr(1 << 30)


@triton.jit
def line_of(lines, place, BLOCK: tl.constexpr):
    """The first element of the line that is visited in this place, and its range along K."""
    line = tl.load(lines + 3 * place)
    first = tl.load(lines + 3 * place + 1)
    last = tl.load(lines + 3 * place + 2)
    return line * BLOCK, first * BLOCK, last * BLOCK


@triton.jit
def tile_of_block_rows(
    unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m, BLOCK: tl.constexpr
):
    """Tile number `unit` where the first operand is block-sparse, see `place`. `place_args` is (lines,)."""
    M, N = shape[0], shape[1]
    lines = state[len(state) - 1][0]
    EACH: tl.constexpr = BLOCK // BLOCK_M
    batch, tile_m, tile_n = grouped(unit, M // BLOCK_M, tl.cdiv(N, BLOCK_N), band_m)
    row, first_k, last_k = line_of(lines, tile_m // EACH, BLOCK)
    return batch, row + tile_m % EACH * BLOCK_M, tile_n * BLOCK_N, M, first_k, last_k


@triton.jit
def tile_of_block_columns(
    unit, state, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, band_m, BLOCK: tl.constexpr
):
    """The same where the second operand is."""
    M, N = shape[0], shape[1]
    lines = state[len(state) - 1][0]
    EACH: tl.constexpr = BLOCK // BLOCK_N
    batch, tile_m, tile_n = grouped(unit, tl.cdiv(M, BLOCK_M), N // BLOCK_N, band_m)
    col, first_k, last_k = line_of(lines, tile_n // EACH, BLOCK)
    return batch, tile_m * BLOCK_M, col + tile_n % EACH * BLOCK_N, M, first_k, last_k


@triton.jit
def within(x, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The place of `SIZE` elements from `x` on within their block. The compiler sees its divisors."""
    if SIZE == BLOCK:
        return x * 0
    else:
        return x % BLOCK // SIZE * SIZE


@triton.jit
def found(k, stop, table, BLOCK: tl.constexpr):
    """Whether a step along K is in its tile's range, and the offset of its block, by the table if there is one."""
    inside = k < stop
    block = k // BLOCK
    if table is not None:
        block = tl.load(table + block, mask=inside, other=0)
    return inside, tl.where(inside, block * BLOCK, OUTSIDE)


@triton.jit
def at_columns(shape, batch, row, col, table, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr):
    """A dense first operand: the columns of the block that the table has."""
    inside, first = found(col, shape[1], table, BLOCK)
    col = first + within(col, COLS, BLOCK)
    return shape[0], tl.where(inside, col + COLS, 0), row, col


@triton.jit
def at_rows(shape, batch, row, col, table, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr):
    """A dense second operand: the rows of that block."""
    inside, first = found(row, shape[0], table, BLOCK)
    row = first + within(row, ROWS, BLOCK)
    return tl.where(inside, row + ROWS, 0), shape[1], row, col


@triton.jit
def at_stored(
    shape, batch, row, col, table, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, IS_B: tl.constexpr,
    TALL: tl.constexpr,
):  # fmt: skip
    """The block-sparse operand: the stored block with the number that the table has, or with the step's own one.

    All stored blocks are one matrix, stacked vertically if they are `TALL`, and otherwise horizontally.
    """
    if IS_B:
        inside, first = found(row, shape[0], table, BLOCK)
    else:
        inside, first = found(col, shape[1], table, BLOCK)
    row = within(row, ROWS, BLOCK)
    col = within(col, COLS, BLOCK)
    if TALL:
        row += first
    else:
        col += first
    return tl.where(inside, row + ROWS, 0), tl.where(inside, col + COLS, 0), row, col


@triton.jit
def at_picked(
    shape,
    batch,
    row,
    col,
    table,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_B: tl.constexpr,
):
    """A dense operand of sampled blocks: product number `batch` takes one block of its rows, or of its columns."""
    first = tl.load(table + batch) * BLOCK
    if IS_B:
        return shape[0], first + shape[1], row, first + col
    else:
        return first + shape[0], shape[1], first + row, col
