"""What the kernels with a loading warp have in common: the ring of stages, and tiles cut along K between programs.

Programs take whole tiles in turn. The tiles that would not fill a last wave may be cut along K, into `parts` of `chunk`
steps each, one a program; see `clusters.Work`. Each is left in a workspace, and whoever finishes its part of a tile
last adds all of them up. The scheme is stream-K's (Osama et al., 2023, arXiv:2301.03598).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from . import operands
from .dialect import in_gluon

#: For blocks that are read once. They take the place of their own kind in L2, rather than of what is still to be
#: written back or read again. None with versions that can't tell TMA so.
READ_ONCE = gl.constexpr(
    hopper.CachePolicy(l2=hopper.FractionalEvictionPolicy("evict_first", 1.0))
    if hasattr(hopper, "CachePolicy")
    else None
)

column_halves = in_gluon(operands.column_halves)
beside = in_gluon(operands.beside)


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """The next stage of the ring, and the parity to wait for there."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def later(stage, phase, steps, STAGES: gl.constexpr):
    """The stage of the ring that is `steps` later, and the parity to wait for there."""
    stage += steps
    return stage % STAGES, phase ^ (stage // STAGES & 1)


@gluon.jit
def own_part(parts, chunk, steps):
    """This program's part of the tiles that are cut along K: the tile, the first step, and the one after the last.

    Programs behind those that have a part are given a tile behind those that are cut.
    """
    low = gl.program_id(0) % parts * chunk
    return gl.program_id(0) // parts, low, min(low + chunk, steps)


@gluon.jit
def offsets(acc, col, COLS: gl.constexpr):
    """Where the elements of a block lie, of a tile of `COLS` columns of which the block's are those from `col` on.

    In blocks of 8 by 8, since a warp's accumulators lie so: each of its accesses is then to 256 adjacent bytes.
    """
    LAYOUT: gl.constexpr = acc.type.layout
    rows = gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    cols = gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))[None, :] + col
    return (rows // 8 * (COLS // 8) + cols // 8) * 64 + rows % 8 * 8 + cols % 8


@gluon.jit
def add_parts(acc, first, parts, partials, ROOM: gl.constexpr, col, COLS: gl.constexpr):
    """The sum of a tile's parts, of which `acc` is this program's, or of some columns of them.

    Args:
        first: the program that has the first part.
        ROOM: floats that a program leaves.
    """
    LAYOUT: gl.constexpr = acc.type.layout
    if acc.shape[1] > 64:
        # Some columns at a time: there are no registers for two whole tiles.
        left, right = column_halves(acc)
        left = add_parts(left, first, parts, partials, ROOM, col, COLS)
        right = add_parts(right, first, parts, partials, ROOM, col + acc.shape[1] // 2, COLS)
        return gl.convert_layout(beside(left, right), LAYOUT, assert_trivial=True)
    else:
        places = partials + offsets(acc, col, COLS)
        if parts == 2:
            # The sum of two is the same in either order.
            other = 2 * first + 1 - gl.program_id(0)
            acc += gl.load(places + gl.cast(other, gl.int64) * ROOM, cache_modifier=".cg")
        else:
            acc = gl.zeros(acc.shape, gl.float32, LAYOUT)
            for each in range(first, first + parts):
                acc += gl.load(places + gl.cast(each, gl.int64) * ROOM, cache_modifier=".cg")
        return acc


@gluon.jit
def combine(
    acc, tile, parts, partials, counter, TAKE_TICKET: gl.constexpr, PIECE: gl.constexpr, PIECES: gl.constexpr
):  # fmt: skip
    """Adds up a tile's parts, in order, in the program that finishes its part last; nobody waits.

    Where warps of one program have a piece of the tile each, they do this on their own.

    Args:
        tile: its number among those that are cut.
        counter: counts the parts that are done. 0 before, and afterwards.
        TAKE_TICKET: `take_ticket(counter, others)` says whether `others` have been counted before, and then begins
            again.
        PIECE, PIECES: which piece of how many `acc` is.

    Returns:
        The sum, and whether this is the program that has it.
    """
    COLS: gl.constexpr = acc.shape[1]
    SIZE: gl.constexpr = acc.shape[0] * COLS
    ROOM: gl.constexpr = PIECES * SIZE
    own = partials + PIECE * SIZE
    gl.store(own + gl.program_id(0).to(gl.int64) * ROOM + offsets(acc, 0, COLS), acc)
    done = TAKE_TICKET(counter, parts - 1)
    if done:
        acc = add_parts(acc, tile * parts, parts, own, ROOM, 0, COLS)
    return acc, done
