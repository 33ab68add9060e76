"""Cutting tiles along K, and adding their parts up within the same launch.

A program that has summed its part of a tile leaves it in a workspace and counts its arrival; the one that arrives last
adds all parts and goes on as if it had computed the tile alone. Nobody waits. The parts are added in the order of K,
whoever comes last, so that the result is always the same, and the counter is back at zero afterwards. The scheme of
the counter is that of stream-K (Osama et al., 2023, arXiv:2301.03598).

`place` is (part, parts, tile, tiles, pitch): which part of how many of which of how many tiles, and the number of
elements for which a part has room.
"""

import triton
import triton.language as tl


@triton.jit
def part_offset(part, place):
    """Where the room of a part of the tile begins in the workspace."""
    _, _, tile, tiles, pitch = place
    return tl.cast(part * tiles + tile, tl.int64) * pitch


@triton.jit
def leave_part(block, place, partials):
    """Leave a part of a tile in the workspace."""
    rows: tl.constexpr = block.shape[0]
    cols: tl.constexpr = block.shape[1]
    inside = tl.arange(0, rows)[:, None] * cols + tl.arange(0, cols)[None, :]
    tl.store(partials + part_offset(place[0], place) + inside, block)


@triton.jit
def arrive(place, arrivals):
    """Count this program's part; returns whether all others had arrived before."""
    _, parts, tile, _, _ = place
    # All threads' stores come before the one thread's release.
    tl.debug_barrier()
    last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == parts - 1
    if last:
        tl.store(arrivals + tile, 0)
    return last


@triton.jit
def load_part(partials, part, place, inside):
    """What another program left, or zeros where there is no such part.

    Read past the first level of cache, which other multiprocessors' writes do not reach.
    """
    there = part + inside * 0 < place[1]
    return tl.load(partials + part_offset(part, place) + inside, mask=there, other=0.0, cache_modifier=".cg")


@triton.jit
def add_parts(block, place, partials, col, COLS: tl.constexpr):
    """The sum of all parts, of which `block` is this program's: columns from `col` on of what `leave_part` left.

    `COLS` is the width of the block that was left.
    """
    part, parts, _, _, _ = place
    rows: tl.constexpr = block.shape[0]
    cols: tl.constexpr = block.shape[1]
    inside = tl.arange(0, rows)[:, None] * COLS + col + tl.arange(0, cols)[None, :]
    if parts == 2:
        # A sum of two does not depend on their order, and this program still has one of them.
        block += load_part(partials, 1 - part, place, inside)
    elif rows * cols <= 8192:
        # Small blocks leave registers for several loads in flight.
        block = tl.zeros((rows, cols), block.dtype)
        for i in range(0, parts, 4):
            first = load_part(partials, i, place, inside)
            second = load_part(partials, i + 1, place, inside)
            third = load_part(partials, i + 2, place, inside)
            fourth = load_part(partials, i + 3, place, inside)
            block = block + first + second + third + fourth
    else:
        block = tl.zeros((rows, cols), block.dtype)
        for i in range(0, parts):
            block += load_part(partials, i, place, inside)
    return block
