"""A matrix that the epilogue reads, in tiles of any width; see `any_width`.

The matrix is divided into the same parts as the output. TMA loads each part into a free slot of shared memory. The
first parts are loaded into the warpgroup's own slots before the K loop. In a program's last tile, the other parts are
prefetched into L2 at the same time, and each is loaded into its slot in the ring after the K loop. In other tiles, a
part is loaded into one of the warpgroup's own slots as soon as the part before it has been stored.

Each warpgroup has `OF_GROUP` barriers after the others, at which parts arrive: one for each of its own slots, which is
used repeatedly, and one for each part that comes into the ring.

A tile's `place` is (row, col, width): where the warpgroup's part of it begins, in X and in Y, and its width.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .any_width_load import issue, maps_of, shared_at
from .any_width_loop import STAGES
from .any_width_stage import Stage
from .dialect import value_of

#: Barriers of each warpgroup, and which is the first of the parts that come into the ring.
OF_GROUP, IN_RING = gl.constexpr(8), gl.constexpr(2)


def map_of(format: Stage | None, X_FORM: str, Y_FORM: str) -> int:
    """The number of the kernel's parameter that is the matrix's tensor map.

    Args:
        format: of a packed or sparse weight, or None; the maps of its parameters come before.
        X_FORM, Y_FORM: the forms of the operands.
    """
    number: int = maps_of(X_FORM, Y_FORM, format).matrix
    return number


@gluon.constexpr_function
def barriers_of(GIVEN, GROUPS):
    """The number of barriers for parts."""
    return 0 if GIVEN is None else OF_GROUP.value * GROUPS


@builtin
def read_into(at, arrived, warp, row, col, BYTES, MAP, _semantic=None):
    """A warp begins to read a part into a slot, once its own stores have left it.

    Args:
        at: the slot's place, in bytes from the beginning of shared memory.
        arrived: the address of the barrier at which the part arrives.
        row, col: where the part begins in the matrix.
        BYTES: of the part.
        MAP: see `map_of`.
    """
    issue(
        "mov.b32 at, global_smem; add.s32 at, at, $2; @own cp.async.bulk.wait_group.read 0;"
        f"@own mbarrier.arrive.expect_tx.shared::cta.b64 _, [$3], {value_of(BYTES)};"
        "@own cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [at], [map, {$5, $4}], [$3];",
        warp, [at, arrived, row, col], value_of(MAP), _semantic=_semantic,
    )  # fmt: skip


@builtin
def fetch(warp, row, col, MAP, _semantic=None):
    """A warp begins to fetch a part into L2; see `read_into`."""
    issue(
        "@own cp.async.bulk.prefetch.tensor.2d.L2.global [map, {$3, $2}];", warp, [row, col], value_of(MAP),
        _semantic=_semantic,
    )  # fmt: skip


@gluon.jit
def corner_of(part, place, SWAP: gl.constexpr, EACH: gl.constexpr, PART: gl.constexpr):
    """The place in the matrix at which a part begins.

    Args:
        EACH: columns of the product that make one of the output.
        PART: columns of Y in a part, of which the last ones may overlap those before.
    """
    row, col, width = place
    parts = gl.cdiv(width, PART)
    m = part // parts
    at_row = row + 64 * m
    at_col = col + gl.minimum((part - m * parts) * PART, width - PART)
    if SWAP:
        at_row, at_col = at_col, at_row
    return at_row, at_col // EACH


@gluon.jit
def read(
    out, part, place, slot, which, warp, MAP: gl.constexpr, GROUP: gl.constexpr, SWAP: gl.constexpr,
    EACH: gl.constexpr, PART: gl.constexpr, BARRIERS_AT: gl.constexpr,
):  # fmt: skip
    """Begins to read a part into a slot; it arrives at barrier number `which` of the warpgroup's."""
    BYTES: gl.constexpr = out.block_type.shape[0] * out.block_type.shape[1] * 2
    row, col = corner_of(part, place, SWAP, EACH, PART)
    arrived = shared_at(BARRIERS_AT) + 8 * (2 * STAGES + 4 + OF_GROUP * GROUP + which)
    # A pair's slot has room for both numbers.
    read_into(slot * (BYTES * EACH), arrived, warp, row, col, BYTES, MAP)


@gluon.jit
def read_first(
    out, place, total, taken, own_slot, is_last, MAP: gl.constexpr, GROUP: gl.constexpr, SWAP: gl.constexpr,
    EACH: gl.constexpr, BUFFERS: gl.constexpr, PART: gl.constexpr, BARRIERS_AT: gl.constexpr,
):  # fmt: skip
    """Begins to read a tile's first parts, and fetches the others of the program's last tile.

    Args:
        total: parts of the tile.
        taken: parts of the warpgroup's tiles before.
        own_slot: the first of the warpgroup's `BUFFERS` own slots.
        is_last: whether this is the program's last tile.
    """
    for part in range(total):
        if part < BUFFERS:
            own = (taken + part) % BUFFERS
            read(out, part, place, own_slot + own, own, own, MAP, GROUP, SWAP, EACH, PART, BARRIERS_AT)
        elif is_last:
            row, col = corner_of(part, place, SWAP, EACH, PART)
            fetch(part % 4, row, col, MAP)


@gluon.jit
def read_others(
    out, part, place, total, taken, own_slot, spread, ring_slots, MAP: gl.constexpr, GROUP: gl.constexpr,
    SWAP: gl.constexpr, EACH: gl.constexpr, BUFFERS: gl.constexpr, PART: gl.constexpr, BARRIERS_AT: gl.constexpr,
):  # fmt: skip
    """Begins to read as much as is possible before a part is finished; arguments are those of `read_first`.

    Args:
        part: the part that is finished next.
        spread: whether each part has a slot in the ring.
        ring_slots: (the first of these slots, slots from one part to the next, from 64 rows of X to the next).
    """
    if spread:
        first, each, every = ring_slots
        parts = gl.cdiv(place[2], PART)
        if part == 0:
            for other in range(BUFFERS, total):
                m = other // parts
                slot = first + m * every + (other - m * parts) * each
                which = IN_RING + other - BUFFERS
                read(out, other, place, slot, which, other % 4, MAP, GROUP, SWAP, EACH, PART, BARRIERS_AT)
    else:
        other = part - 1 + BUFFERS
        if (part > 0) & (other < total):
            # Into the slot of the part before.
            own = (taken + other) % BUFFERS
            read(out, other, place, own_slot + own, own, own, MAP, GROUP, SWAP, EACH, PART, BARRIERS_AT)


@gluon.jit
def block_of(
    ring, slots, part, taken, own_slot, spread, slot, like, DTYPE: gl.constexpr, GROUP: gl.constexpr,
    EACH: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """A part of the matrix in the accumulator's layout, once it has arrived.

    Args:
        slot: the part's slot in the ring, if it has one.
        like: a block of the accumulator.
        DTYPE: the matrix's type; elements of the slots have as many bytes.
    """
    own = (taken + part) % BUFFERS
    in_ring = spread & (part >= BUFFERS)
    which = gl.where(in_ring, IN_RING + part - BUFFERS, own)
    phase = gl.where(in_ring, 0, (taken + part) // BUFFERS & 1)
    mbarrier.wait(ring[0].index(2 * STAGES + 4 + OF_GROUP * GROUP + which), phase)
    place = gl.where(in_ring, slot, own_slot + own)
    return slots.index(place * EACH).load(like.type.layout).to(DTYPE, bitcast=True)
