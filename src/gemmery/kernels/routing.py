"""Routing of a mixture of experts: assignments sorted by group, and the sum of each token's rows.

An assignment is one choice of a token: number `token * k + choice`. A row is a place in the sorted order. Ids outside
`0..groups - 1` are those of the tail, which is one more group after the last.

Few assignments are ranked by counting the keys below each (Knuth, The Art of Computer Programming, volume 3, section
5.2, algorithm C), in one launch whose programs do not depend on each other. Many are sorted as one digit of a radix
sort is (Satish, Harris and Garland, IPDPS 2009): blocks are counted, the counts are summed up over the blocks, and
each block finds its rows. Neither uses atomics between programs, so results are the same in every run.
"""

import triton
import triton.language as tl

from .numerics import cast, widen
from .overlap import let_next_begin, wait_for_earlier

# ---------------------------------------------------------------------------------------------------------------------
# Sorting


@triton.jit
def load_ids(index, place, count, groups, layout):
    """The groups of assignments as int32: `groups` for the tail, `groups + 1` after the last assignment.

    Args:
        layout: (columns, stride_row, stride_col) of a matrix in which ids are counted along the rows.
    """
    columns, stride_row, stride_col = layout
    inside = place < count
    at = (place // columns).to(tl.int64) * stride_row + (place % columns).to(tl.int64) * stride_col
    ids = tl.load(index + at, mask=inside, other=0)
    ids = tl.where((ids >= 0) & (ids < groups), ids, groups).to(tl.int32)
    return tl.where(inside, ids, groups + 1)


@triton.jit
def store_rows(order, inverse, token, place, row, count, k):
    """Stores the rows of assignments, and the assignments and tokens of rows."""
    inside = place < count
    tl.store(inverse + place, row, mask=inside)
    tl.store(order + row, place, mask=inside)
    tl.store(token + row, place // k, mask=inside)


@triton.jit
def keys_below(limits, index, count, groups, layout, ROWS: tl.constexpr, COLS: tl.constexpr):
    """For each of (ROWS,) limits, the number of keys `group * count + assignment` below it."""
    found = tl.zeros((ROWS, COLS), tl.int32)
    for first in range(0, count, COLS):
        place = first + tl.arange(0, COLS)
        keys = load_ids(index, place, count, groups, layout) * count + place
        found += (keys[None, :] < limits[:, None]).to(tl.int32)
    return tl.sum(found, 1)


@triton.jit(do_not_specialize=["count"])
def route_few(
    index, offs, counts, order, inverse, token, count, k, groups, layout,
    ROWS: tl.constexpr, COLS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The whole routing; the first programs find rows of assignments and the others ends of groups.

    Keys are int32: `(groups + ROWS) * count` must be.
    """
    wait_for_earlier(OVERLAPS)
    # There are few programs, which leave room for others everywhere.
    let_next_begin(OVERLAPS)
    block = tl.program_id(0)
    blocks = tl.cdiv(count, ROWS)
    if block < blocks:
        place = block * ROWS + tl.arange(0, ROWS)
        keys = load_ids(index, place, count, groups, layout) * count + place
        row = keys_below(keys, index, count, groups, layout, ROWS, COLS)
        store_rows(order, inverse, token, place, row, count, k)
    else:
        group = (block - blocks) * ROWS + tl.arange(0, ROWS)
        limits = group * count
        start = keys_below(limits, index, count, groups, layout, ROWS, COLS)
        end = keys_below(limits + count, index, count, groups, layout, ROWS, COLS)
        tl.store(offs + group, end, mask=group < groups)
        tl.store(counts + group, end - start, mask=group < groups)


@triton.jit(do_not_specialize=["count", "blocks"])
def count_blocks(
    index, table, count, blocks, groups, layout, BLOCK: tl.constexpr, BINS: tl.constexpr, OVERLAPS: tl.constexpr
):  # fmt: skip
    """table[group, block] = how many ids of the block are at most the group; the tail is a group, too."""
    wait_for_earlier(OVERLAPS)
    block = tl.program_id(0)
    first = tl.program_id(1) * BINS
    place = block * BLOCK + tl.arange(0, BLOCK)
    ids = load_ids(index, place, count, groups, layout) - first
    each = tl.histogram(ids, BINS, mask=(ids >= 0) & (ids < BINS))
    at_most = tl.sum((ids < 0).to(tl.int32), 0) + tl.cumsum(each, 0)
    let_next_begin(OVERLAPS)
    group = first + tl.arange(0, BINS)
    tl.store(table + group.to(tl.int64) * blocks + block, at_most, mask=group <= groups)


@triton.jit(do_not_specialize=["blocks"])
def sum_blocks(
    table, before, offs, counts, blocks, groups, CHUNK: tl.constexpr, OVERLAPS: tl.constexpr
):  # fmt: skip
    """A group's end, its count, and how many of its assignments lie before each block. One program a group."""
    wait_for_earlier(OVERLAPS)
    group = tl.program_id(0)
    line = group.to(tl.int64) * blocks
    end = 0
    found = 0
    for first in range(0, blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        at_most = tl.load(table + line + block, mask=block < blocks, other=0)
        less = tl.load(table + line - blocks + block, mask=block < tl.where(group > 0, blocks, 0), other=0)
        own = at_most - less
        tl.store(before + line + block, found + tl.cumsum(own, 0) - own, mask=block < blocks)
        end += tl.sum(at_most, 0)
        found += tl.sum(own, 0)
    let_next_begin(OVERLAPS)
    if group < groups:
        tl.store(offs + group, end)
        tl.store(counts + group, found)


@triton.jit(do_not_specialize=["count", "blocks"])
def place_blocks(
    index, before, offs, order, inverse, token, count, blocks, k, groups, layout,
    BLOCK: tl.constexpr, COLS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Rows of a block's assignments: the group's start, plus those of the group in earlier blocks and in this one."""
    wait_for_earlier(OVERLAPS)
    block = tl.program_id(0)
    place = block * BLOCK + tl.arange(0, BLOCK)
    ids = load_ids(index, place, count, groups, layout)
    row = tl.load(offs + ids - 1, mask=(ids > 0) & (place < count), other=0)
    row += tl.load(before + ids.to(tl.int64) * blocks + block, mask=place < count, other=0)
    found = tl.zeros((BLOCK, COLS), tl.int32)
    for first in range(0, BLOCK, COLS):
        other = block * BLOCK + first + tl.arange(0, COLS)
        others = load_ids(index, other, count, groups, layout)
        found += ((others[None, :] == ids[:, None]) & (other[None, :] < place[:, None])).to(tl.int32)
    let_next_begin(OVERLAPS)
    row += tl.sum(found, 1)
    store_rows(order, inverse, token, place, row, count, k)


# ---------------------------------------------------------------------------------------------------------------------
# Combining


@triton.jit
def as_wide(x, WIDE: tl.constexpr):
    """Floating-point numbers of any type in the type of sums."""
    if x.dtype == tl.float64:
        return x.to(WIDE)
    else:
        return widen(x).to(WIDE)


@triton.jit
def load_weight(weights, token, choice, k, strides, WIDE: tl.constexpr):
    """A weight of the router; 1 if there are none."""
    if weights is None:
        return tl.full((), 1.0, WIDE)
    else:
        at = token.to(tl.int64) * strides[0] + tl.cast(choice, tl.int64) * strides[1]
        return as_wide(tl.load(weights + at, mask=choice < k, other=0.0), WIDE)


@triton.jit
def load_row(inverse, token, choice, k):
    """An assignment's row; the row after all others if there is no such choice."""
    return tl.load(inverse + token * k + choice, mask=choice < k, other=2147483647)


@triton.jit(do_not_specialize=["groups"])
def combine_rows(
    y, weights, inverse, offs, out, groups, columns, y_strides, weight_strides,
    K: tl.constexpr, CHOICES: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """out[token] = the sum of its rows times their weights, in the order of choices. One program COLS columns.

    Args:
        CHOICES: rows that are loaded at once.
    """
    wait_for_earlier(OVERLAPS)
    tiles = tl.cdiv(columns, COLS)
    token = tl.program_id(0) // tiles
    col = tl.program_id(0) % tiles * COLS + tl.arange(0, COLS)
    end = tl.load(offs + groups - 1)
    total = tl.zeros((COLS,), WIDE)
    for first in range(0, K, CHOICES):
        rows = ()
        factors = ()
        parts = ()
        for each in tl.static_range(CHOICES):
            choice = first + each
            rows += (load_row(inverse, token, choice, K),)  # type: ignore[assignment]
            factors += (load_weight(weights, token, choice, K, weight_strides, WIDE),)  # type: ignore[assignment]
        for each in tl.static_range(CHOICES):
            at = rows[each].to(tl.int64) * y_strides[0] + col.to(tl.int64) * y_strides[1]
            # The tail is not read.
            inside = col < tl.where(rows[each] < end, columns, 0)
            parts += (tl.load(y + at, mask=inside, other=0.0),)
        for each in tl.static_range(CHOICES):
            total += tl.where(rows[each] < end, factors[each], 0.0) * as_wide(parts[each], WIDE)
    let_next_begin(OVERLAPS)
    tl.store(out + token.to(tl.int64) * columns + col, cast(total, out.dtype.element_ty), mask=col < columns)


@triton.jit(do_not_specialize=["groups"])
def spread_rows(
    grad, weights, inverse, offs, out, groups, columns, grad_strides, weight_strides,
    K: tl.constexpr, CHOICES: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """out[row] = grad[token] times the row's weight, zero in the tail. One program COLS columns of a token."""
    wait_for_earlier(OVERLAPS)
    tiles = tl.cdiv(columns, COLS)
    token = tl.program_id(0) // tiles
    col = tl.program_id(0) % tiles * COLS + tl.arange(0, COLS)
    end = tl.load(offs + groups - 1)
    at = token.to(tl.int64) * grad_strides[0] + col.to(tl.int64) * grad_strides[1]
    given = as_wide(tl.load(grad + at, mask=col < columns, other=0.0), WIDE)
    for first in range(0, K, CHOICES):
        for each in tl.static_range(CHOICES):
            row = load_row(inverse, token, first + each, K)
            weight = load_weight(weights, token, first + each, K, weight_strides, WIDE)
            part = cast(tl.where(row < end, weight * given, 0.0), out.dtype.element_ty)
            inside = col < tl.where(first + each < K, columns, 0)
            tl.store(out + row.to(tl.int64) * columns + col, part, mask=inside)
    let_next_begin(OVERLAPS)


@triton.jit(do_not_specialize=["groups"])
def dot_rows(
    grad, y, inverse, offs, out, k, groups, columns, grad_strides, y_strides,
    COLS: tl.constexpr, WIDE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """out[assignment] = the product of grad[token] and y's row, summed; zero in the tail. One program an assignment."""
    wait_for_earlier(OVERLAPS)
    place = tl.program_id(0)
    token = (place // k).to(tl.int64)
    row = tl.load(inverse + place)
    width = tl.where(row < tl.load(offs + groups - 1), columns, 0)
    total = tl.zeros((COLS,), WIDE)
    for first in range(0, columns, COLS):
        col = first + tl.arange(0, COLS)
        inside = col < width
        col = col.to(tl.int64)
        given = tl.load(grad + token * grad_strides[0] + col * grad_strides[1], mask=inside, other=0.0)
        part = tl.load(y + row.to(tl.int64) * y_strides[0] + col * y_strides[1], mask=inside, other=0.0)
        total += as_wide(given, WIDE) * as_wide(part, WIDE)
    let_next_begin(OVERLAPS)
    tl.store(out + place, cast(tl.sum(total, 0), out.dtype.element_ty))
