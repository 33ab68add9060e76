"""Loaders and stores: how a block of a matrix comes from memory and goes back.

All loaders have the signature

    load(x, shape, strides, sizes, batch, row, col, ROWS, COLS, CHECK_ROWS, CHECK_COLS, WIDE)

and return the block of (ROWS, COLS) whose corner is (row, col), with zeros outside the matrix; all stores have

    store(x, shape, strides, sizes, batch, row, col, value, ROWS, COLS, WIDE)

and leave memory outside the matrix unchanged. `shape` is (rows, cols) of one matrix, `sizes` the shape of the batch,
`batch` the running number of a matrix in it, and `strides` is (steps, stride_row, stride_col), where `steps` has one
entry a batch dimension, negated: Triton 3.6 fails on a nested tuple in which an integer is 1. `x` is a pointer for the
strided functions, with strides in elements, and a tensor descriptor for the others, with a step of -1 per batch
dimension, or 0 if the operand is broadcast.
"""

import triton
import triton.language as tl


@triton.jit
def batch_offset(batch, sizes, steps):
    """The offset of matrix number `batch` of a batch of shape `sizes`, in elements; the last dimension is fastest."""
    offset = tl.cast(0, tl.int64)
    for i in tl.static_range(len(sizes) - 1, -1, -1):
        offset -= tl.cast(batch % sizes[i], tl.int64) * steps[i]
        batch = batch // sizes[i]
    return offset


@triton.jit
def block_offsets(
    row, col, stride_row, stride_col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr
):
    """Offsets of a block's elements: a 64-bit corner, and within the block 32 bits unless `WIDE`.

    The split keeps the vector arithmetic narrow and out of the K loop, where only the corner moves.
    """
    corner = tl.cast(row, tl.int64) * stride_row + tl.cast(col, tl.int64) * stride_col
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    if WIDE:
        rows = rows.to(tl.int64)
        cols = cols.to(tl.int64)
    return corner, rows * stride_row + cols * stride_col


@triton.jit
def load_strided(
    x, shape, strides, sizes, batch, row, col,
    ROWS: tl.constexpr, COLS: tl.constexpr, CHECK_ROWS: tl.constexpr, CHECK_COLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A block of a matrix of any strides, masked where `CHECK_ROWS` or `CHECK_COLS` asks for it."""
    steps, stride_row, stride_col = strides
    corner, offsets = block_offsets(row, col, stride_row, stride_col, ROWS, COLS, WIDE)
    pointers = x + batch_offset(batch, sizes, steps) + corner + offsets
    row_inside = (tl.arange(0, ROWS) < shape[0] - row)[:, None]
    col_inside = (tl.arange(0, COLS) < shape[1] - col)[None, :]
    if CHECK_ROWS and CHECK_COLS:
        return tl.load(pointers, mask=row_inside & col_inside, other=0.0)
    elif CHECK_ROWS:
        return tl.load(pointers, mask=row_inside, other=0.0)
    elif CHECK_COLS:
        return tl.load(pointers, mask=col_inside, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_gathered(
    x, shape, strides, sizes, batch, row, col,
    ROWS: tl.constexpr, COLS: tl.constexpr, CHECK_ROWS: tl.constexpr, CHECK_COLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A block whose rows are those of a matrix with certain numbers.

    `strides` has a fourth entry: where the numbers are, one for each row.
    """
    steps, stride_row, stride_col, numbers = strides
    rows = row + tl.arange(0, ROWS)
    inside = (rows < shape[0])[:, None]
    source = tl.load(numbers + rows, mask=rows < shape[0], other=0).to(tl.int64)
    cols = tl.arange(0, COLS)
    if WIDE:
        cols = cols.to(tl.int64)
    corner = batch_offset(batch, sizes, steps) + tl.cast(col, tl.int64) * stride_col
    pointers = x + corner + (source * stride_row)[:, None] + (cols * stride_col)[None, :]
    if CHECK_COLS:
        inside = inside & (cols < shape[1] - col)[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def load_tma(
    x, shape, strides, sizes, batch, row, col,
    ROWS: tl.constexpr, COLS: tl.constexpr, CHECK_ROWS: tl.constexpr, CHECK_COLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A block through a tensor descriptor over a matrix whose columns are adjacent; the hardware masks."""
    if len(sizes) == 0:
        return x.load([row, col])
    else:
        return x.load([-batch * strides[0][0], row, col]).reshape(ROWS, COLS)


@triton.jit
def load_tma_transposed(
    x, shape, strides, sizes, batch, row, col,
    ROWS: tl.constexpr, COLS: tl.constexpr, CHECK_ROWS: tl.constexpr, CHECK_COLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A block through a tensor descriptor over the transpose of a matrix whose rows are adjacent."""
    if len(sizes) == 0:
        return x.load([col, row]).T
    else:
        return x.load([-batch * strides[0][0], col, row]).reshape(COLS, ROWS).T


@triton.jit
def column_halves(acc):
    """The left and the right half of a block, without moving data between threads."""
    rows: tl.constexpr = acc.shape[0]
    cols: tl.constexpr = acc.shape[1]
    return acc.reshape(rows, 2, cols // 2).permute(0, 2, 1).split()


@triton.jit
def beside(left, right):
    """Two blocks as the left and the right half of one; what `column_halves` undoes."""
    rows: tl.constexpr = left.shape[0]
    cols: tl.constexpr = left.shape[1]
    return tl.join(left, right).permute(0, 2, 1).reshape(rows, 2 * cols)


@triton.jit
def part_columns(acc):
    """A block whose even columns become the left half, and the odd ones the right half."""
    rows: tl.constexpr = acc.shape[0]
    cols: tl.constexpr = acc.shape[1]
    left, right = acc.reshape(rows, cols // 2, 2).split()
    return beside(left, right)


@triton.jit
def load_strided_pairs(
    x, shape, strides, sizes, batch, row, col,
    ROWS: tl.constexpr, COLS: tl.constexpr, CHECK_ROWS: tl.constexpr, CHECK_COLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """As many columns of a matrix's left half, from `col // 2` on, followed by those of its right half.

    `strides` has a fourth entry: the distance between the halves, which need not be of one allocation.
    """
    steps, stride_row, stride_col, between = strides
    HALF: tl.constexpr = COLS // 2
    cols = tl.arange(0, COLS)
    right = (cols // HALF).to(tl.int64)
    column = col // 2 + cols % HALF
    rows = tl.arange(0, ROWS)
    corner = tl.cast(row, tl.int64) * stride_row
    pointers = (
        x + batch_offset(batch, sizes, steps) + corner + (rows.to(tl.int64) * stride_row)[:, None]
    ) + (column.to(tl.int64) * stride_col + right * between)[None, :]
    inside = (rows < shape[0] - row)[:, None] & (column < shape[1] // 2)[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def load_tma_pairs(
    x, shape, strides, sizes, batch, row, col,
    ROWS: tl.constexpr, COLS: tl.constexpr, CHECK_ROWS: tl.constexpr, CHECK_COLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The same through a tensor descriptor over a matrix (rows, 2, columns / 2)."""
    if len(sizes) == 0:
        return x.load([row, 0, col // 2]).reshape(ROWS, COLS)
    else:
        return x.load([-batch * strides[0][0], row, 0, col // 2]).reshape(ROWS, COLS)


@triton.jit
def load_tma_pairs_transposed(
    x, shape, strides, sizes, batch, row, col,
    ROWS: tl.constexpr, COLS: tl.constexpr, CHECK_ROWS: tl.constexpr, CHECK_COLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The same through a tensor descriptor over the transpose (2, columns / 2, rows) of a matrix with adjacent rows."""
    if len(sizes) == 0:
        return x.load([0, col // 2, row]).reshape(COLS, ROWS).T
    else:
        return x.load([-batch * strides[0][0], 0, col // 2, row]).reshape(COLS, ROWS).T


@triton.jit
def store_strided(
    x,
    shape,
    strides,
    sizes,
    batch,
    row,
    col,
    value,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A block to a matrix of any strides."""
    steps, stride_row, stride_col = strides
    corner, offsets = block_offsets(row, col, stride_row, stride_col, ROWS, COLS, WIDE)
    pointers = x + batch_offset(batch, sizes, steps) + corner + offsets
    row_inside = (tl.arange(0, ROWS) < shape[0] - row)[:, None]
    col_inside = (tl.arange(0, COLS) < shape[1] - col)[None, :]
    tl.store(pointers, value, mask=row_inside & col_inside)


@triton.jit
def store_scattered(
    x, shape, strides, sizes, batch, row, col, value, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A block whose rows go to those of a matrix with certain numbers.

    `strides` has a fourth entry: where the numbers are, one for each row of the product.
    """
    steps, stride_row, stride_col, numbers = strides
    rows = row + tl.arange(0, ROWS)
    target = tl.load(numbers + rows, mask=rows < shape[0], other=0).to(tl.int64)
    cols = (col + tl.arange(0, COLS)).to(tl.int64)
    pointers = (
        x + batch_offset(batch, sizes, steps) + (target * stride_row)[:, None] + (cols * stride_col)[None, :]
    )
    tl.store(pointers, value, mask=(rows < shape[0])[:, None] & (cols < shape[1])[None, :])


@triton.jit
def store_nothing(
    x, shape, strides, sizes, batch, row, col, value, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """For epilogues that store all of their results themselves."""
    pass


@triton.jit
def store_tma(
    x,
    shape,
    strides,
    sizes,
    batch,
    row,
    col,
    value,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A block through a tensor descriptor over a matrix whose columns are adjacent."""
    if len(sizes) == 0:
        x.store([row, col], value)
    else:
        x.store([-batch * strides[0][0], row, col], value.reshape(1, ROWS, COLS))


@triton.jit
def store_tma_transposed(
    x,
    shape,
    strides,
    sizes,
    batch,
    row,
    col,
    value,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A block through a tensor descriptor over the transpose of a matrix whose rows are adjacent."""
    if len(sizes) == 0:
        x.store([col, row], value.T)
    else:
        x.store([-batch * strides[0][0], col, row], value.T.reshape(1, COLS, ROWS))
