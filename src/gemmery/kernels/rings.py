"""What the kernels with a loading warp have in common: the ring of stages, and tiles cut along K between programs.

Programs take whole tiles in turn. The tiles that would not fill a last wave may be cut along K, into pieces of `chunk`
steps, one a program; each such tile counts as `virtual` steps, see `clusters.Work`. A piece that is not a whole tile is
left in a workspace, and whoever finishes its piece of a tile last adds all of them up. The scheme is stream-K's (Osama
et al., 2023, arXiv:2301.03598).
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
def own_steps(cut, virtual, chunk):
    """This program's steps of the tiles that are cut along K: the first and the one after the last, and their tiles."""
    first = min(gl.program_id(0) * chunk, cut * virtual)
    last = min(first + chunk, cut * virtual)
    return first, last, first // virtual, gl.where(first < last, gl.cdiv(last, virtual), 0)


@gluon.jit
def slot(program, chunk, begin):
    """Where a program leaves its part of the tile whose steps begin at `begin`.

    A program has at most two parts that are not whole tiles, one that begins a tile and one that does not.
    """
    return 2 * program + (program * chunk <= begin).to(gl.int32)


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
def add_pieces(acc, begin, first, last, chunk, partials, ROOM: gl.constexpr, col, COLS: gl.constexpr):
    """The sum of a tile's pieces, of which `acc` is this program's, or of some columns of them."""
    LAYOUT: gl.constexpr = acc.type.layout
    if acc.shape[1] > 64:
        # A part at a time: there are no registers for two whole tiles.
        left, right = column_halves(acc)
        left = add_pieces(left, begin, first, last, chunk, partials, ROOM, col, COLS)
        right = add_pieces(right, begin, first, last, chunk, partials, ROOM, col + acc.shape[1] // 2, COLS)
        return gl.convert_layout(beside(left, right), LAYOUT, assert_trivial=True)
    else:
        places = partials + offsets(acc, col, COLS)
        if last - first == 1:
            # The sum of two is the same in either order.
            other = slot(first + last - gl.program_id(0), chunk, begin)
            acc += gl.load(places + other.to(gl.int64) * ROOM, cache_modifier=".cg")
        else:
            acc = gl.zeros(acc.shape, gl.float32, LAYOUT)
            for each in range(first, last + 1):
                part = slot(each, chunk, begin)
                acc += gl.load(places + part.to(gl.int64) * ROOM, cache_modifier=".cg")
        return acc


@gluon.jit
def combine(
    acc,
    begin,
    steps,
    chunk,
    partials,
    counter,
    TAKE_TICKET: gl.constexpr,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Adds up a tile's pieces, in order, in the program that finishes its piece last; nobody waits.

    Where warps of one program have a part of the tile each, they do this on their own.

    Args:
        begin: the tile's first step among all steps of cut tiles; it has `steps`.
        counter: counts the pieces that are done. 0 before, and afterwards.
        TAKE_TICKET: `take_ticket(counter, others)` says whether `others` have been counted before, and then begins
            again.
        PART, PARTS: which part of how many `acc` is.

    Returns:
        The sum, and whether this is the program that has it.
    """
    COLS: gl.constexpr = acc.shape[1]
    SIZE: gl.constexpr = acc.shape[0] * COLS
    ROOM: gl.constexpr = PARTS * SIZE
    own = partials + PART * SIZE
    first = begin // chunk
    last = (begin + steps - 1) // chunk
    place = slot(gl.program_id(0), chunk, begin).to(gl.int64) * ROOM
    gl.store(own + place + offsets(acc, 0, COLS), acc)
    done = TAKE_TICKET(counter, last - first)
    if done:
        acc = add_pieces(acc, begin, first, last, chunk, own, ROOM, 0, COLS)
    return acc, done
