"""Common parts of the kernels with a loading warp: the ring of stages, and tiles cut along K between programs.

Programs take whole tiles in turn. The tiles that would not fill a last wave may be cut along K into `parts`, one per
program; see `schedules.persistent_static.Work`. Each partial sum is stored in a workspace, and the last program to
finish its part of a tile adds all of them up, as in stream-K (Osama et al., 2023, arXiv:2301.03598).

The kernels' numbers are separate parameters, because Triton compiles separate kernels for some values of numbers in
tuples. Within a kernel they travel together: `shape` is (M, N, K), and PLACE's `state`, see `place`, is (tiles, tail
units, parts, part_k, place_args).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import tma

from . import operands, overlap
from .dialect import in_gluon, value_of

#: The cache policy for blocks that are read once: they replace each other in L2, and not data that will be written
#: back or read again. None with versions that cannot pass it to TMA.
READ_ONCE = gl.constexpr(
    hopper.CachePolicy(l2=hopper.FractionalEvictionPolicy("evict_first", 1.0))
    if hasattr(hopper, "CachePolicy")
    else None
)

# Names that differ between Triton 3.6 and later versions.
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

column_halves = in_gluon(operands.column_halves)
beside = in_gluon(operands.beside)
wait_for_earlier = in_gluon(overlap.wait_for_earlier)
let_next_begin = in_gluon(overlap.let_next_begin)


@builtin
def begin_roles(
    multiply, given, constants, load, loaded, GROUPS, LOADERS, REGISTERS, LOADER_REGISTERS, place=None, placed=None,
    _semantic=None, _generator=None,
):  # fmt: skip
    """Gives each warpgroup and the other warps their role.

    Args:
        multiply: run by warpgroup `i` as `multiply(*given, i, *constants)`.
        load: run by the loading warps as `load(*loaded)`.
        LOADERS: how many warps load.
        REGISTERS, LOADER_REGISTERS: registers of a thread in all warpgroups but the first, and in the other warps.
        place: run by one more warp as `place(*placed)`; None for no such warp.
    """
    roles = [
        (multiply, gl.tuple([*given.values, gl.constexpr(i), *constants.values]))
        for i in range(value_of(GROUPS))
    ]
    others = len(roles) - 1
    # The placing warp is in the same warpgroup as the loading warps, so it has as many registers.
    more = [] if value_of(place) is None else [(place, placed)]
    gl.warp_specialize(
        [*roles, (load, loaded), *more], [4] * others + [LOADERS] + [1] * len(more),
        [REGISTERS] * others + [LOADER_REGISTERS] * (1 + len(more)), _semantic=_semantic, _generator=_generator,
    )  # fmt: skip


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
def offsets(acc, col, COLS: gl.constexpr):
    """The offsets of a block's elements in a tile of `COLS` columns; the block has the columns from `col` on.

    In blocks of 8 by 8, the layout of a warp's accumulators: each of its accesses is then to 256 adjacent bytes.
    """
    LAYOUT: gl.constexpr = acc.type.layout
    rows = gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    cols = gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))[None, :] + col
    return (rows // 8 * (COLS // 8) + cols // 8) * 64 + rows % 8 * 8 + cols % 8


@gluon.jit
def add_partials(acc, own, first, step, parts, partials, SIZE: gl.constexpr, col, COLS: gl.constexpr):
    """The sum of a tile's parts, of which `acc` is the one in place `own`, or of some columns of them.

    Args:
        first, step: the place of the first part, and from one part's to the next one's.
        SIZE: elements of a place.
    """
    LAYOUT: gl.constexpr = acc.type.layout
    if acc.shape[1] > 64:
        # Some columns at a time: there are no registers for two whole tiles.
        left, right = column_halves(acc)
        left = add_partials(left, own, first, step, parts, partials, SIZE, col, COLS)
        right = add_partials(right, own, first, step, parts, partials, SIZE, col + acc.shape[1] // 2, COLS)
        return gl.convert_layout(beside(left, right), LAYOUT, assert_trivial=True)
    else:
        places = partials + offsets(acc, col, COLS)
        if parts == 2:
            # The sum of two is the same in either order.
            other = 2 * first + step - own
            acc += gl.load(places + gl.cast(other, gl.int64) * SIZE, cache_modifier=".cg")
        else:
            acc = sum_of_partials(
                places + gl.cast(first, gl.int64) * SIZE, parts, gl.cast(step, gl.int64) * SIZE
            )
        return acc


@gluon.jit
def sum_of_partials(places, parts, size):
    """The sum of a tile's parts, in order.

    Args:
        places: pointers to the elements of the first part, a block.
        size: elements from a part to the next one.
    """
    # Small blocks leave registers for several loads in flight.
    AT_ONCE: gl.constexpr = 4 if places.numel <= 2048 else 1
    LAYOUT: gl.constexpr = places.type.layout
    acc = gl.zeros(places.shape, gl.float32, LAYOUT)
    for part in range(0, parts, AT_ONCE):
        if AT_ONCE == 1:
            acc += gl.load(places + gl.cast(part, gl.int64) * size, cache_modifier=".cg")
        else:
            loaded = ()
            for i in gl.static_range(AT_ONCE):
                there = gl.full(places.shape, part + i, gl.int32, LAYOUT) < parts
                at = places + gl.cast(part + i, gl.int64) * size
                loaded += (gl.load(at, mask=there, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
            for i in gl.static_range(AT_ONCE):
                acc += loaded[i]
    return acc


@gluon.jit
def last_to_arrive(semaphore, others):
    """Counts a warpgroup once all its threads are here, and says whether `others` came before it.

    If so, the semaphore is 0 again, as it was before the first one.
    """
    barrier()
    last = gl.atomic_add(semaphore, 1, sem="acq_rel") == others
    if last:
        gl.store(semaphore, 0)
    return last


@gluon.jit
def combine(acc, own, first, step, parts, partials, semaphore, PIECE: gl.constexpr, PIECES: gl.constexpr):
    """Adds up a tile's parts, in order, in the program that finishes its part last; no program waits.

    If each warpgroup of a program has a piece of the tile, each one does this by itself.

    Args:
        own, first, step: the place of this part in the workspace, that of the tile's first part, and from one part's to
            the next one's.
        semaphore: counts the finished parts. It is 0 before and afterwards.
        PIECE, PIECES: which piece of how many `acc` is.

    Returns:
        The sum, and whether this is the program that has it.
    """
    COLS: gl.constexpr = acc.shape[1]
    OWN: gl.constexpr = acc.shape[0] * COLS
    SIZE: gl.constexpr = PIECES * OWN
    pieces = partials + PIECE * OWN
    gl.store(pieces + gl.cast(own, gl.int64) * SIZE + offsets(acc, 0, COLS), acc)
    done = last_to_arrive(semaphore, parts - 1)
    if done:
        acc = add_partials(acc, own, first, step, parts, pieces, SIZE, 0, COLS)
    return acc, done


@gluon.jit
def halves_beside(block):
    """A block whose columns are of both halves by eights as one with the halves side by side; no number moves."""
    rows: gl.constexpr = block.shape[0]
    cols: gl.constexpr = block.shape[1]
    left, right = block.reshape([rows, cols // 16, 2, 8]).permute((0, 1, 3, 2)).split()
    return beside(left.reshape([rows, cols // 2]), right.reshape([rows, cols // 2]))


@gluon.jit
def upright(acc, SWAP: gl.constexpr, PAIRED: gl.constexpr):
    """A subtile's accumulator as the output has it. No number moves.

    Args:
        SWAP: whether the accumulator is transposed.
        PAIRED: see `finish`.
    """
    block = acc.permute((1, 0)) if SWAP else acc
    if PAIRED:
        block = halves_beside(block)
    return block


@gluon.jit
def applied(
    block, args, shape, row, col, EPILOGUE: gl.constexpr, PAIRED: gl.constexpr, IN_BATCH: gl.constexpr = False
):  # fmt: skip
    """Applies the epilogue to what `upright` gives; arguments are those of `finish`.

    Args:
        IN_BATCH: whether `shape` has two more numbers: which matrix of a batch this is, and how many there are.
    """
    EACH: gl.constexpr = 2 if PAIRED else 1
    ROWS: gl.constexpr = block.shape[0]
    COLS: gl.constexpr = block.shape[1] // EACH
    sizes = ()
    batch = 0
    if IN_BATCH:
        sizes = (shape[3],)  # type: ignore[assignment]
        batch = gl.minimum(shape[2], shape[3] - 1)
    return EPILOGUE(
        block, args, (shape[0], shape[1] // EACH), sizes, batch, row, col // EACH, ROWS, COLS, False
    )


@gluon.jit
def finish(
    acc, out, staged, args, shape, row, col, EPILOGUE: gl.constexpr, CAST: gl.constexpr, PAIRED: gl.constexpr
):  # fmt: skip
    """Epilogue and store of a tile's transposed accumulator, in subtiles as large as the output's descriptor takes.

    Args:
        staged: shared memory for a subtile.
        shape: (end of the rows, columns of the product, ...).
        CAST: `cast(value, dtype)` rounds what the epilogue returns.
        PAIRED: whether two columns of the product make one of the output; they are in the accumulator by eights.
    """
    if acc.shape[1] > out.block_type.shape[0]:
        HALF: gl.constexpr = acc.shape[1] // 2
        left, right = column_halves(acc)
        finish(left, out, staged, args, shape, row, col, EPILOGUE, CAST, PAIRED)
        finish(right, out, staged, args, shape, row + HALF, col, EPILOGUE, CAST, PAIRED)
    else:
        value = CAST(applied(upright(acc, True, PAIRED), args, shape, row, col, EPILOGUE, PAIRED), out.dtype)
        tma.store_wait(0)
        staged.store(value)
        hopper.fence_async_shared()
        _store(out, [row, col // (2 if PAIRED else 1)], staged)
