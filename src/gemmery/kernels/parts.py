"""Cutting tiles along K, and adding their partial sums up within the same launch.

A program that has summed its part of a tile stores the partial sum in the workspace and counts itself at the tile's
semaphore. The program that arrives last adds all partial sums and goes on as if it had computed the tile alone. No
program waits. The partial sums are added in the order of K, whichever program arrives last, so the result is always
the same. Afterwards the semaphore is zero again. Stream-K uses a semaphore in the same way (Osama et al., 2023,
arXiv:2301.03598).

`part` is (partials, part, parts, tile, tiles, size): the memory of partial sums, the number of this part and of the
parts of a tile, the number of this tile and of all tiles, and the elements of a partial sum. The partial sum of this
part has the number `part * tiles + tile`.

A function `PART(unit, state, shape, place) -> (part, parts, tile, before)` returns them. It gets the arguments of
PLACE, see `place`, and its result. `before` counts the partial sums that lie before the first one of this numbering.
"""

import triton
import triton.language as tl

from .place import range_of


@triton.jit
def of_tile(unit, state, shape, place):
    """PART if all tiles have the same number of parts; `state` begins with (tiles, part_k)."""
    tiles = state[0]
    return unit // tiles, tl.num_programs(0) // tiles, unit % tiles, 0


@triton.jit
def of_range(unit, state, shape, place):
    """PART if each tile has a range of K, which is cut into as many parts of `part_k` as it needs.

    PLACE is `place.part_of_ranges`. No two partial sums share a place: before those of a matrix there is room for
    one of each matrix before it, and for one of each whole part of the ranges before its own.
    """
    tiles, part_k = state[0], state[1]
    batch, first_k = place[0], place[4]
    begin, end = range_of(batch, state[2][0], shape[2])
    parts = tl.maximum(tl.cdiv(end - begin, part_k), 1)
    return (first_k - begin) // part_k, parts, batch * tiles + unit % tiles, begin // part_k * tiles


@triton.jit
def partial_offset(index, part):
    """The offset in the workspace of the tile's partial sum number `index`."""
    _, _, _, tile, tiles, size = part
    return tl.cast(index * tiles + tile, tl.int64) * size


@triton.jit
def store_partial(block, part):
    """Store the partial sum of this part of a tile in the workspace."""
    rows: tl.constexpr = block.shape[0]
    cols: tl.constexpr = block.shape[1]
    inside = tl.arange(0, rows)[:, None] * cols + tl.arange(0, cols)[None, :]
    tl.store(part[0] + partial_offset(part[1], part) + inside, block)


@triton.jit
def last_to_arrive(semaphores, part):
    """Count this program's part; returns whether all others had arrived before."""
    _, _, parts, tile, _, _ = part
    # All threads' stores come before the one thread's release.
    tl.debug_barrier()
    last = tl.atomic_add(semaphores + tile, 1, sem="acq_rel") == parts - 1
    if last:
        tl.store(semaphores + tile, 0)
    return last


@triton.jit
def load_partial(index, part, inside):
    """The partial sum that another program stored, or zeros if there is no such part.

    The load bypasses the L1 cache, which does not see the writes of other multiprocessors.
    """
    there = index + inside * 0 < part[2]
    return tl.load(
        part[0] + partial_offset(index, part) + inside, mask=there, other=0.0, cache_modifier=".cg"
    )


@triton.jit
def add_partials(block, part, col, COLS: tl.constexpr):
    """The sum of all parts, of which `block` is this program's: columns from `col` on of the data of `store_partial`.

    `COLS` is the width of the block that was stored.
    """
    rows: tl.constexpr = block.shape[0]
    cols: tl.constexpr = block.shape[1]
    inside = tl.arange(0, rows)[:, None] * COLS + col + tl.arange(0, cols)[None, :]
    parts = part[2]
    if parts == 2:
        # A sum of two does not depend on their order, and this program still has one of them.
        block += load_partial(1 - part[1], part, inside)
    elif parts > 2:
        block = sum_of_partials(part, inside, block.dtype)
    return block


@triton.jit
def sum_of_partials(part, inside, ACC: tl.constexpr):
    """The sum of all parts in the order of K, of elements at offsets `inside`."""
    block = tl.zeros(inside.shape, ACC)
    if inside.numel <= 8192:
        # Small blocks leave registers for several loads in flight.
        for i in range(0, part[2], 4):
            first = load_partial(i, part, inside)
            second = load_partial(i + 1, part, inside)
            third = load_partial(i + 2, part, inside)
            fourth = load_partial(i + 3, part, inside)
            block = block + first + second + third + fourth
    else:
        for i in range(0, part[2]):
            block += load_partial(i, part, inside)
    return block
