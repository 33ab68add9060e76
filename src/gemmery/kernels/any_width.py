"""The matrix product with tiles whose width is any multiple of 8, as cuBLAS has them, so that tiles fill whole waves.

For Hopper, in Gluon. Its tensor cores multiply 64 rows of one operand by n columns of the other for every n that is a
multiple of 8 (`wgmma` of PTX), but a tensor of Triton has a power of two of elements. So the instruction is written as
inline assembly, and an accumulator is a tuple of tensors of 64 by 8, each of which is four numbers a thread, as `wgmma`
has them.

The operand on the side of the 64 rows is X, the other one is Y. X is A and Y is B; with SWAP it is the other way
round, the tile comes out transposed, and n cuts M. A tile has X_ROWS by n elements.

One warp (`produce`; two for small tiles) loads blocks of both into a ring of stages. It runs ahead, also from one tile
into the next. For each step along K it issues one load of X and one of Y. A load has as many rows as the tile, which
can be any number, because it is part of the tensor map. If X is a packed weight, there is one more load for each kind
of group parameters. Warpgroups, which are four warps each (`consume`), multiply. They share a tile, each with its own
rows of X, except that the last two may share some: then X_ROWS is no multiple of 64, and these rows are stored twice,
with the same bits. With PINGPONG they take tiles in turn: while one multiplies, the other one stores. These are
CUTLASS's cooperative and ping-pong schedules (github.com/NVIDIA/cutlass).

The ring holds the blocks of X of all stages, then those of Y, and then group parameters. Each stage has two barriers:
`full` is complete when its blocks have arrived, `free` when all warps have read them. `turn` says which warpgroup may
multiply. `unused` is complete when no warpgroup reads the ring any more. One more warp (`place_tiles`) finds out where
the program's tiles are, see `any_width_places`. Programs of clusters have one tile, and no such warp.

Where the tiles at the end of Y would begin one more wave, they are edge tiles: all columns are loaded, but only those
that are left, or a few more, are multiplied and stored. They come last, see `edge_of`.

A tile goes to memory in parts of 64 rows of X by some of Y, through slots of shared memory. Each warpgroup has its own
slots. A program's last tile has a slot for each part, in the ring. With CLUSTERED, each program of a cluster stores
some of the parts, see `any_width_cluster`.

An operand has a form, which determines the coordinates of its tensor map: "rows" are (k, row), "turned" is (row, k,
64 rows), where adjacent elements are along the rows, "pairs" are (k, row of 8, half, eight), "packed" is (word, line,
strip), see `any_width_packed`, "sparse" is (kept number, row), see `any_width_sparse`, and "sparse pairs" is both. Rows
of a pair come from its two halves in turn, eight at a time, so that both numbers that make one of the output are in one
thread. A load of "turned" rows begins at any row; its last coordinate, which is always 0, counts blocks of 64 rows.
"many rows" and "many turned" are for a batch of matrices and have one more coordinate, the number of the matrix.
"grouped rows" are for an A whose rows are in groups, each multiplied by its own matrix of B; see `any_width_groups`.
"ranged turned" are for operands of which each product of a batch has a range of K. Tiles of a batch are not cut along
K.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from . import any_width_given as given
from . import any_width_stage
from .any_width_acc import BLOCK8, in_block
from .any_width_cluster import LOADERS, arrive_in_cluster, finish_in_cluster
from .any_width_cut import combine
from .any_width_finish import finish_tile, slots_of
from .any_width_groups import WORDS as GROUP_WORDS
from .any_width_groups import keep
from .any_width_load import (
    ROW,
    ahead_of,
    begin,
    in_groups,
    in_ranges,
    is_paired,
    is_turned,
    load_steps,
    loaders_of,
    prefetch_maps,
    prefetch_vectors,
    shared_at,
    unused,
)
from .any_width_loop import STAGES, multiply_steps, step_of, x_bytes_of
from .any_width_order import WORDS as ORDER_WORDS
from .any_width_order import in_order, put_in_order
from .any_width_places import WORDS as PLACE_WORDS
from .any_width_places import post_place, take_next, take_place
from .order import quotient
from .rings import barrier, begin_roles, let_next_begin, wait_for_earlier

# ---------------------------------------------------------------------------------------------------------------------
# The ring


@gluon.jit
def matrix_descriptor(address, CHUNK: gl.constexpr):
    """The lower half of a matrix descriptor of PTX: the address and the layout of a block in shared memory.

    Args:
        CHUNK: bytes from one 64 to the next, where adjacent elements are along the rows.
    """
    # The upper bits of an address say which program of a cluster has the memory.
    return (address & 0x3FFFF) >> 4 | (CHUNK // 16 << 16)


@gluon.jit
def turn_at(GROUP: gl.constexpr, BARRIERS_AT: gl.constexpr):
    """The address of the barrier of a warpgroup's turn."""
    return shared_at(BARRIERS_AT) + 8 * (2 * STAGES + GROUP)


#: For device code.
own_rows = gluon.constexpr_function(any_width_stage.own_rows)


@gluon.constexpr_function
def first_row(X_ROWS, OWN, GROUP):
    """The first of a warpgroup's rows of X. The last warpgroup may share rows with the one before."""
    return min(GROUP * OWN, X_ROWS - OWN)


@builtin
def computed(value, _semantic=None):
    """Returns the same number, of which the compiler knows nothing.

    So it does not compute it after the loop that follows, or make a copy of a loop for its first value.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic
    )


@gluon.jit
def later(stage, phase, steps, ring):
    """The stage of the ring that is `steps` later, and the parity to wait for there; see `rings.later`."""
    stage += steps
    rounds = quotient(stage, ring[2])
    return stage - rounds * ring[1], phase ^ (rounds & 1)


@gluon.jit
def edge_of(unit, state):
    """Which edge tile a unit is; negative if it is a whole one.

    Edge tiles are those at the end of Y, of which fewer columns are multiplied. Unit `p + t * programs` is turn number
    t of program p. In turn number `full` the first `more` programs still have a whole tile. From this turn on, the
    other programs take edge tiles.
    """
    programs, divisor = gl.num_programs(0), state[6][3]
    turn, full = quotient(unit, divisor), quotient(state[1], divisor)
    more = state[1] - full * programs
    return unit - turn * programs - more + (turn - full) * (programs - more)


@gluon.jit
def end_of_units(state, shape, X_ROWS: gl.constexpr, SWAP: gl.constexpr):
    """The end of a program's units, if the last of them may be edge tiles; see `edge_of`."""
    units, whole = state[0], state[1]
    programs = gl.num_programs(0)
    more = whole - quotient(whole, state[6][3]) * programs
    # The program's unit in the last turn. It may not have one there.
    last = gl.program_id(0) + units - programs
    there = edge_of(last, state) * X_ROWS < (shape[1] if SWAP else shape[0])
    end = gl.where(there, last, last - programs) + 1
    return gl.where((units > whole) & (gl.program_id(0) >= more), end, whole)


@gluon.jit
def corner(
    unit, known, state, shape, tile, PLACE: gl.constexpr, EDGES: gl.constexpr, X_ROWS: gl.constexpr,
    SWAP: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr,
):  # fmt: skip
    """The corner of a unit in X and in Y, the end of its rows of the output, its range of K, and its matrix.

    If an operand is at least as large as a tile, the last tile along each side is moved back, so that it ends where
    the operand ends. Otherwise TMA would fill the rows outside with zeros, at a tenth of the speed of loads. Two tiles
    then share elements, and both store them, with the same bits. A tile that is cut along K has different bits, so it
    is not moved back over whole tiles. Neither is a tile at the end of a group of rows.

    All columns of an edge tile are loaded, so its corner is that of a whole tile that ends where Y ends. `consume`
    skips the first columns.

    Args:
        known: what was found out about an earlier unit in groups of rows, see `any_width_groups.next_tile_of_rows`; the
            address of the table that `in_order` takes, for ranges of K; or (). The same of this unit is returned last.
    """
    width, band_m = tile[0], tile[1]
    GROUPED: gl.constexpr = in_groups(X_FORM, Y_FORM)
    edge = -1
    if EDGES:
        edge = edge_of(unit, state)
        unit = gl.minimum(unit, state[1] - 1)
    if SWAP:
        place, known = placed(unit, known, state, shape, width, X_ROWS, band_m, PLACE, X_FORM, Y_FORM)
        batch, col, row, end, first_k, last_k = place
    else:
        place, known = placed(unit, known, state, shape, X_ROWS, width, band_m, PLACE, X_FORM, Y_FORM)
        batch, row, col, end, first_k, last_k = place
    x_rows = shape[1] if SWAP else shape[0]
    if X_FORM == "packed":
        # Words are of 16 rows each.
        x_rows = gl.cdiv(x_rows, 16) * 16
    if X_FORM == "sparse":
        # Metadata is of 32 rows.
        x_rows = gl.cdiv(x_rows, 32) * 32
    y_rows = shape[0] if SWAP else shape[1]
    if EDGES:
        row = gl.where(edge < 0, row, edge * X_ROWS)
        col = gl.where(edge < 0, col, y_rows)
    # Where there are edge tiles, no tile is cut along K. `AnyWidthBinding._rows_at_a_time` relies on these moves.
    moves = EDGES | (unit < state[1]) | (state[1] == 0)
    if SWAP or not GROUPED:
        row = gl.where(moves, gl.minimum(row, gl.maximum(x_rows - X_ROWS, 0)), row)
    if not (SWAP and GROUPED):
        col = gl.where(moves, gl.minimum(col, gl.maximum(y_rows - width, 0)), col)
    return row, col, end, first_k, last_k, batch, known


@gluon.jit
def placed(
    unit, known, state, shape, ROWS, COLS, band_m, PLACE: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr
):  # fmt: skip
    """The result of PLACE for a unit, and the state for the next unit."""
    if in_groups(X_FORM, Y_FORM):
        return PLACE(unit, state, shape, ROWS, COLS, band_m, known)
    else:
        if in_ranges(X_FORM, Y_FORM):
            unit = in_order(unit, state, known[0])
        return PLACE(unit, state, shape, ROWS, COLS, band_m), known


@gluon.jit
def place_tiles(
    ring, first, shape, state, tile, PLACE: gl.constexpr, EDGES: gl.constexpr, X_ROWS: gl.constexpr,
    STEP: gl.constexpr, SWAP: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr, BARRIERS_AT: gl.constexpr,
    PLACES: gl.constexpr,
):  # fmt: skip
    """Finds and posts the places of the program's tiles but the first, which all warps know.

    Args:
        first: what `corner` says of the program's first unit.
    """
    row, col, end, first_k, last_k, batch, known = first
    stage, phase = later(gl.to_tensor(0), gl.to_tensor(0), gl.cdiv(last_k - first_k, STEP), ring)
    units = state[0]
    if EDGES:
        units = end_of_units(state, shape, X_ROWS, SWAP)
    places_at = shared_at(BARRIERS_AT) + 8 * PLACES
    number = gl.to_tensor(0)
    for unit in range(gl.program_id(0) + gl.num_programs(0), units, gl.num_programs(0)):
        row, col, end, first_k, last_k, batch, known = corner(
            unit, known, state, shape, tile, PLACE, EDGES, X_ROWS, SWAP, X_FORM, Y_FORM
        )
        steps = gl.cdiv(last_k - first_k, STEP)
        post_place(places_at, number, (row, col, end, batch), first_k, steps, stage, phase)
        stage, phase = later(stage, phase, steps, ring)
        number += 1


@gluon.jit
def produce(
    ring, first, shape, state, tile, loads, vectors, EDGES: gl.constexpr, X_ROWS: gl.constexpr, STEP: gl.constexpr,
    SWAP: gl.constexpr, CLUSTERED: gl.constexpr, FORMAT: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr,
    BARRIERS_AT: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """Loads the blocks that `consume` multiplies, in the same order, after those that `begin` has loaded.

    Args:
        first: what `corner` says of the program's first unit.
        vectors: (x_vectors, y_vectors), see `gemm_any_width`.
    """
    if CLUSTERED:
        arrive_in_cluster()
    x_box, x_size, y_box, y_size, streams = loads
    stage = gl.to_tensor(0)
    # The parity of the phase before the first one: an unused stage is free.
    phase = gl.to_tensor(1)
    row, col, end, first_k, last_k, batch, _ = first
    ahead = gl.minimum(gl.minimum(ring[1], ahead_of(X_ROWS)), gl.cdiv(last_k - first_k, STEP))
    stage, phase = later(stage, phase, ahead, ring)
    first_k += ahead * STEP
    units = state[0]
    if EDGES:
        units = end_of_units(state, shape, X_ROWS, SWAP)
    places_at = shared_at(BARRIERS_AT) + 8 * PLACES
    number = gl.to_tensor(0)
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        # Otherwise the epilogue would have to wait for memory.
        prefetch_vectors(vectors[0], row, X_ROWS, shape[1] if SWAP else shape[0])
        prefetch_vectors(vectors[1], col, tile[0], shape[0] if SWAP else shape[1])
        load_steps(
            shared_at(BARRIERS_AT), stage, phase, ring[1], first_k, last_k, row, x_box, x_size, col, tile[0], y_box,
            y_size, streams, end if in_ranges(X_FORM, Y_FORM) else batch, X_ROWS, STEP, FORMAT, X_FORM, Y_FORM,
            CLUSTERED,
        )  # fmt: skip
        # A program of a cluster has one tile.
        if not CLUSTERED:
            stage, phase = later(stage, phase, gl.cdiv(last_k - first_k, STEP), ring)
            if unit + gl.num_programs(0) < units:
                row, col, end, batch, first_k, steps = take_next(places_at, number)
                last_k = first_k + steps * STEP
            number += 1
            # Otherwise the compiler makes a second copy of the loads for the first tile.
            first_k = computed(first_k)


# ---------------------------------------------------------------------------------------------------------------------
# The sum


@gluon.jit
def sum_steps(
    heads, ring, steps, stage, phase, y_rows, width, turn, scales, KIND: gl.constexpr, PROMOTES: gl.constexpr,
    N_DIVISOR: gl.constexpr, X_ROWS: gl.constexpr, FIRST: gl.constexpr, OWN: gl.constexpr, WIDTHS: gl.constexpr,
    PART: gl.constexpr, FORMAT: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr, PINGPONG: gl.constexpr,
    BARRIERS_AT: gl.constexpr,
):  # fmt: skip
    """The sum of a warpgroup's products of some steps, at least one, as `multiply_steps` gives it.

    Args:
        heads: where its X and Y are in the first stage, see `multiply_steps`.
        y_rows, width: rows of Y in a stage, and how many of them are multiplied.
        turn: see `multiply_steps`; any numbers without PINGPONG.
        scales, FORMAT: see `multiply_steps`.
        FIRST, OWN: the first of its rows of X, and how many these are.
        PART: columns of Y that are read at a time.
    """
    return multiply_steps(
        in_block(shared_at(BARRIERS_AT)), in_block(stage), in_block(phase), in_block(ring[1]), in_block(steps),
        in_block(heads[0]), in_block(heads[1]), in_block(y_rows), in_block(width),
        (in_block(turn[0]), in_block(turn[1]), in_block(turn[2])), scales, X_ROWS, FIRST, OWN, KIND, PROMOTES,
        N_DIVISOR, FORMAT, X_FORM, Y_FORM, WIDTHS, PART, PINGPONG,
    )  # fmt: skip


@gluon.jit
def scales_of(step_args, row, col, shape, first_k, EVERY_M: gl.constexpr, EVERY_N: gl.constexpr):
    """Where the scales of 64 rows of A and of a tile's columns of B are, each in a block.

    A span is 128 columns of B from a multiple of 128 on. A tile touches up to three.

    Args:
        step_args: the scales, as `kernels.scales` takes them, of a step each.
        row, col: where rows and columns begin, in a matrix of `shape`; `col` is a multiple of 16.
        first_k: where the steps begin.
        EVERY_M, EVERY_N: rows and columns that share a scale; the latter in multiples of 128.

    Returns:
        The addresses of A's and of B's scales; the byte offsets of the first step's scales, for the rows and for three
        spans; the byte strides from one step to the next, for A and for B; and the number of blocks of 8 columns in the
        first span.
    """
    at_a, _, row_a, k_a, at_b, _, row_b, k_b = step_args
    low = first_k // 128
    # Rows and columns outside have some scale.
    rows = gl.minimum(row + gl.arange(0, 64, gl.SliceLayout(1, BLOCK8)), shape[0] - 1) // EVERY_M
    of_rows = gl.expand_dims((rows * row_a + low * k_a).to(gl.int32) * 4, 1)
    of_rows = of_rows + gl.zeros([64, 8], gl.int32, BLOCK8)
    of_spans = ()
    for i in gl.static_range(3):
        column = gl.minimum(col // 128 + i, (shape[1] - 1) // 128) * 128 // EVERY_N
        of_spans += (in_block((column * row_b + low * k_b).to(gl.int32) * 4),)  # type: ignore[assignment]
    bases = (in_block(gl.cast(at_a, gl.int64)), in_block(gl.cast(at_b, gl.int64)))
    strides = (in_block(gl.cast(k_a, gl.int32) * 4), in_block(gl.cast(k_b, gl.int32) * 4))
    return bases + (of_rows,) + of_spans + strides + (in_block(16 - col % 128 // 8),)  # noqa: RUF005


# ---------------------------------------------------------------------------------------------------------------------
# The kernel


@gluon.constexpr_function
def table_words(X_FORM, Y_FORM):
    """Words of 8 bytes of the table of groups of rows, or of the order of ranges of K."""
    if in_groups(X_FORM, Y_FORM):
        return GROUP_WORDS.value
    return ORDER_WORDS.value if in_ranges(X_FORM, Y_FORM) else 0


@gluon.jit
def heads_of(
    stages, FIRST: gl.constexpr, X_ROWS: gl.constexpr, FORMAT: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr
):  # fmt: skip
    """The places in the ring of a warpgroup's rows of X, from `FIRST` on, and of Y's rows, as `sum_steps` takes
    them.
    """
    address = shared_at(0)
    # In units of 16 bytes.
    OWN_AT: gl.constexpr = x_bytes_of(FIRST, FORMAT) // 16
    X_BLOCK: gl.constexpr = x_bytes_of(X_ROWS, FORMAT) // 16
    head_x = (
        address >> 4 if X_FORM == "packed" else matrix_descriptor(address, 8192 if is_turned(X_FORM) else 16)
    )
    head_y = matrix_descriptor(address, 8192 if is_turned(Y_FORM) else 16)
    return head_x + OWN_AT, head_y + stages * X_BLOCK


@gluon.jit
def consume(
    out, slots, ring, first, step_args, args, workspace, shape, state, tile, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    EDGES: gl.constexpr, READY: gl.constexpr, GIVEN: gl.constexpr, SECOND: gl.constexpr, EPILOGUE: gl.constexpr,
    CAST: gl.constexpr, KIND: gl.constexpr, PROMOTES: gl.constexpr, EVERY: gl.constexpr, X_ROWS: gl.constexpr,
    WIDTHS: gl.constexpr, SWAP: gl.constexpr, CLUSTERED: gl.constexpr, LOOPS: gl.constexpr, PINGPONG: gl.constexpr,
    FORMAT: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr, BUFFERS: gl.constexpr, PART: gl.constexpr,
    RING_BYTES: gl.constexpr, BARRIERS_AT: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """One warpgroup's part of the work.

    Args:
        first: what `corner` says of the program's first unit.
    """
    if CLUSTERED:
        arrive_in_cluster()
    stages, width = ring[1], tile[0]
    units, whole, parts = state[0], state[1], state[2]
    if EDGES:
        units = end_of_units(state, shape, X_ROWS, SWAP)
    # Columns of an edge tile that are loaded and not multiplied.
    skipped = 0
    OWN: gl.constexpr = X_ROWS if PINGPONG else own_rows(X_ROWS, GROUPS)
    FIRST: gl.constexpr = 0 if PINGPONG else first_row(X_ROWS, OWN, GROUP)
    EACH: gl.constexpr = 2 if is_paired(X_FORM, Y_FORM) else 1
    heads = heads_of(stages, FIRST, X_ROWS, FORMAT, X_FORM, Y_FORM)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    # There is no turn before the first one.
    turn = gl.to_tensor(1 - GROUP)
    own = gl.program_id(0)
    programs = gl.num_programs(0)
    every = programs
    row, col, end, first_k, last_k, batch, _ = first
    steps = gl.cdiv(last_k - first_k, step_of(KIND, FORMAT))
    places_at = shared_at(BARRIERS_AT) + 8 * PLACES
    # Of the last tile's place. All warps know that of the program's first tile, so it is not posted.
    number = gl.to_tensor(-1)
    if PINGPONG:
        own += GROUP * every
        every *= 2
        if GROUP == 1:
            number = gl.to_tensor(0)
            if own < units:
                row, col, end, batch, first_k, steps, stage, phase = take_place(places_at, number)
    if own >= units:
        mbarrier.arrive(unused(ring))
    own_slot = RING_BYTES // (128 * PART) + GROUP * BUFFERS
    taken = 0
    total = 0
    if GIVEN is not None:
        taken = gl.to_tensor(0)
        total = OWN // 64 * gl.cdiv(width, PART)
    if GIVEN is not None or SECOND is not None or CLUSTERED:
        # A constant would put its offset among those by which the compiled kernel is checked.
        own_slot = computed(gl.to_tensor(own_slot))
    for unit in range(own, units, every):
        if EDGES:
            width = gl.where(unit < whole, tile[0], tile[2])
            skipped = tile[0] - width
            col += skipped
            if GIVEN is not None:
                total = OWN // 64 * gl.cdiv(width, PART)
        # Once the program's first tile has waited, all that other GPUs send is there.
        if GIVEN is not None and (EDGES | (unit < whole)) and (READY is None or unit != own):
            given.read_first(
                out, (row + FIRST, col, width), total, taken, own_slot, unit + programs >= units, GIVEN[0], GROUP,
                SWAP, EACH, BUFFERS, PART, BARRIERS_AT,
            )  # fmt: skip
        scales = ()
        N_DIVISOR: gl.constexpr = 0 if EVERY is None else EVERY[2]
        if EVERY is not None:
            scales = scales_of(step_args, row + FIRST, col, (end, shape[1]), first_k, EVERY[0], EVERY[1])
        acc = sum_steps(
            (heads[0], heads[1] + 8 * skipped), ring, steps, stage, phase, tile[0], width,
            (turn_at(GROUP, BARRIERS_AT), turn, turn_at(1 - GROUP, BARRIERS_AT)), scales, KIND, PROMOTES, N_DIVISOR,
            X_ROWS, FIRST, OWN, WIDTHS, PART, FORMAT, X_FORM, Y_FORM, PINGPONG, BARRIERS_AT,
        )  # fmt: skip
        if PINGPONG:
            turn = turn ^ 1
        if READY is not None and unit == own:
            READY(state[7])
            if GIVEN is not None and (EDGES | (unit < whole)):
                given.read_first(
                    out, (row + FIRST, col, width), total, taken, own_slot, unit + programs >= units, GIVEN[0], GROUP,
                    SWAP, EACH, BUFFERS, PART, BARRIERS_AT,
                )  # fmt: skip
        if unit + every >= units:
            # One thread arrives, for all four warps.
            barrier()
            mbarrier.arrive(unused(ring))
        of_output = (end, shape[1], batch)
        if in_groups(X_FORM, Y_FORM):
            of_output += (state[7][1],)  # type: ignore[assignment]
        if in_ranges(X_FORM, Y_FORM):
            of_output = (shape[0], shape[1], batch)
        if CLUSTERED:
            finish_in_cluster(
                acc, out, slots, ring, args, of_output, row + FIRST, col, width, (parts, state[6][3]), own_slot, GROUP,
                EPILOGUE, CAST, SWAP, X_FORM, Y_FORM, OWN, BUFFERS, PART, RING_BYTES, BARRIERS_AT,
            )  # fmt: skip
        else:
            done = unit >= 0
            cut = None
            if workspace is not None:
                cut = (unit >= whole, 0, parts, 0, 0)
                if unit >= whole:
                    done, cut = combine(
                        acc, unit, ring, state, workspace, width, OWN, PART, GROUP, GROUPS, RING_BYTES
                    )
                    if GIVEN is not None and done:
                        given.read_first(
                            out, (row + FIRST, col, width), total, taken, own_slot, False, GIVEN[0], GROUP, SWAP, EACH,
                            BUFFERS, PART, BARRIERS_AT,
                        )  # fmt: skip
            spread, first_slot = slots_of(
                ring, unit + programs >= units, unit < whole, width, own_slot, workspace is not None,
                0 if PINGPONG else GROUP * OWN, PINGPONG, X_FORM, SECOND, X_ROWS, PART,
            )  # fmt: skip
            if done:
                finish_tile(
                    acc, out, slots, ring, args, of_output, row + FIRST, col, width, spread,
                    first_slot, own_slot, cut, taken, GIVEN, SECOND, GROUP, EPILOGUE, CAST, SWAP, LOOPS, X_FORM, Y_FORM,
                    OWN, X_ROWS, BUFFERS, PART, BARRIERS_AT,
                )  # fmt: skip
                if GIVEN is not None:
                    taken += total
        number += 2 if PINGPONG else 1
        # With PINGPONG, the tile between is the other warpgroup's.
        if unit + every < units:
            row, col, end, batch, first_k, steps, stage, phase = take_place(places_at, number)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "M", "N", "K", "units", "whole", "parts", "part_k", "tiles_m", "tiles_n", "area_divisor", "band_divisor",
        "last_divisor", "cut_divisor", "width", "band_m", "edge", "x_box", "x_size", "y_box", "y_size", "streams",
        "stages", "stages_divisor",
    ]
)  # fmt: skip
def gemm_any_width(
    x, y, out, scales, shifts, matrix, M, N, K, units, whole, parts, part_k, tiles_m, tiles_n, area_divisor,
    band_divisor, last_divisor, cut_divisor, width, band_m, edge, x_box, x_size, y_box, y_size, streams, stages,
    stages_divisor, place_args, step_args, args, workspace, x_vectors, y_vectors,
    PLACE: gl.constexpr, EDGES: gl.constexpr, READY: gl.constexpr, GROUP_OF: gl.constexpr, GIVEN: gl.constexpr,
    SECOND: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr,
    KIND: gl.constexpr, PROMOTES: gl.constexpr, EVERY: gl.constexpr, X_ROWS: gl.constexpr, WIDTHS: gl.constexpr,
    RING_ROWS: gl.constexpr, GROUPS: gl.constexpr, SWAP: gl.constexpr, CLUSTERED: gl.constexpr, LOOPS: gl.constexpr,
    PINGPONG: gl.constexpr, FORMAT: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr, BUFFERS: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, OVERLAPS: gl.constexpr, SOURCE: gl.constexpr,
):  # fmt: skip
    """The kernel: as many programs as run at once process units in turn, first whole tiles, then edge tiles or parts of
    tiles.

    Args:
        x, y: descriptors of X and of Y. Only their tensor maps are used.
        out: descriptor of a part of the output, 64 rows of X by some of Y, which is stored at a time.
        scales, shifts: descriptors of a packed weight's group parameters, where it has them. Only their tensor maps
            are used.
        matrix: descriptor of a matrix that the epilogue reads or writes, as `out`; None if there is none. Only its
            tensor map is used.
        units, whole: how many units there are, and how many of them are whole tiles. With edge tiles, `units` is the
            end of the last turn.
        parts, part_k: the number of parts along K into which each other tile is cut, and the size of a part.
        tiles_m, tiles_n: tiles along M and N, without edge tiles.
        area_divisor, band_divisor, last_divisor, cut_divisor: what PLACE divides by, see `place.sized_tile` and
            `place.sized_tile_of_batch`. The last one is that of a cluster's programs in clusters, and of all programs
            with EDGES. Were they in a tuple, Triton would compile a kernel for each of their values.
        width: rows of Y in a tile, one of WIDTHS.
        band_m: the height of a tile band, see `order`.
        edge: rows of Y that an edge tile multiplies, one of WIDTHS.
        x_box, y_box: rows that the tensor maps load at a time.
        x_size, y_size: see `load_steps`.
        streams: 1 if X is the first to leave L2, 2 if Y is, 0 if neither is.
        stages, stages_divisor: the number of stages, at most `STAGES`, and its divisor, see `order.quotient`.
        place_args: (offs, groups) of groups of rows, with which `units` is as many as there can be, and of ranges of
            K; otherwise ().
        step_args, args: run-time arguments of `scales_of` and of the epilogue.
        workspace: (partials, semaphores): memory for an fp32 tile a part, and zeros, one for each tile that is cut and
            warpgroup, which are zeros again afterwards. None if no tile is cut, and in clusters.
        x_vectors, y_vectors: vectors along X and along Y that the epilogue reads. A tile's elements are prefetched.
        PLACE: `place.sized_tile`, `place.sized_part` with a workspace, `place.sized_part_of_cluster`,
            `place.sized_tile_of_batch`, `any_width_groups.next_tile_of_rows`, or `place.sized_tile_of_ranges`.
        EDGES: whether the last units may be edge tiles, see `edge_of`.
        READY: waits, given `place_args`, for data that the epilogue reads, see `shards.all_there`; None if there is
            nothing to wait for.
        GROUP_OF: `place.group_of`, or None without groups.
        GIVEN: of the one matrix that the epilogue reads, the number of the parameter that is its tensor map, and its
            type; None if it reads none.
        SECOND: the same number, where the matrix is a second result; otherwise None.
        KIND, PROMOTES, WIDTHS: see `multiply_steps`.
        EVERY: rows of A and columns of B that share a scale along K, and gcd(N, 128); None if there are no such
            scales.
        RING_ROWS: rows of all stages, at least.
        GROUPS: warpgroups that multiply: 1, 2 or 3; 2 with PINGPONG.
        CLUSTERED: whether the programs that have the parts of a tile are a cluster, see `any_width_cluster`.
        LOOPS: see `finish_tile`.
        FORMAT: see `multiply_steps`.
        X_FORM, Y_FORM: the forms of the operands.
        BUFFERS: slots that each warpgroup has beside the ring.
        REGISTERS, LOADER_REGISTERS: of a thread in all warpgroups but the first, and in the other warps.
        OVERLAPS: see `overlap.wait_for_earlier`.
        SOURCE: identifies the version of the files that write assembly.
    """
    prefetch_maps(FORMAT, X_FORM, Y_FORM)
    wait_for_earlier(OVERLAPS)
    shape = (M, N, K)
    divisors = (area_divisor, band_divisor, last_divisor, cut_divisor)
    tile = (width, band_m, edge)
    loads = (x_box, x_size, y_box, y_size, streams)
    PAIRED: gl.constexpr = is_paired(X_FORM, Y_FORM)
    PART: gl.constexpr = out.block_type.shape[-2] if SWAP else out.block_type.shape[-1] * (2 if PAIRED else 1)
    STEP: gl.constexpr = step_of(KIND, FORMAT)
    RING_BYTES: gl.constexpr = RING_ROWS * ROW
    SLOT: gl.constexpr = 64 * PART * 2
    SLOTS: gl.constexpr = RING_BYTES // SLOT + GROUPS * BUFFERS
    # The ring and the warpgroups' slots. They are the largest, so that shared memory begins with them.
    COUNT: gl.constexpr = SLOTS * (2 if PAIRED else 1)
    ROWS: gl.constexpr = out.block_type.shape[-2]
    COLS: gl.constexpr = out.block_type.shape[-1]
    # The output's layout without the batch.
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(out.layout.swizzle_byte_width, out.layout.element_bitwidth, 2)
    slots = gl.allocate_shared_memory(out.dtype, [COUNT, ROWS, COLS], LAYOUT)
    PARTS: gl.constexpr = given.barriers_of(GIVEN, GROUPS) + (GROUPS if CLUSTERED else 0)
    # The places of tiles follow them, and a table of the groups or of the ranges' order.
    PLACES: gl.constexpr = 2 * STAGES + 4 + PARTS
    COUNTED: gl.constexpr = PLACES + PLACE_WORDS
    TABLE: gl.constexpr = table_words(X_FORM, Y_FORM)
    barriers = gl.allocate_shared_memory(gl.int64, [COUNTED + TABLE, 1], mbarrier.MBarrierLayout())
    BARRIERS_AT: gl.constexpr = SLOTS * SLOT
    ring = (barriers, stages, stages_divisor)
    table = shared_at(BARRIERS_AT) + 8 * COUNTED
    known = ()
    if in_groups(X_FORM, Y_FORM):
        tile_row = quotient(gl.program_id(0), cut_divisor)
        group, before, begins, ends, tile_rows = GROUP_OF(
            tile_row, place_args[0], place_args[1], M, width if SWAP else X_ROWS, keep, table
        )
        known = (table, group, before, begins, ends)  # type: ignore[assignment]
        units = tile_rows * tiles_n
        whole = units
    if in_ranges(X_FORM, Y_FORM):
        known = (table,)  # type: ignore[assignment]
        # The ring is free until the first loads.
        put_in_order(table, shared_at(0), place_args[0], place_args[1], K, tiles_m * tiles_n)
    state = (units, whole, parts, part_k, tiles_m, tiles_n, divisors, place_args)
    # A program begins with a whole tile.
    first = corner(gl.program_id(0), known, state, shape, tile, PLACE, False, X_ROWS, SWAP, X_FORM, Y_FORM)
    row, col, end, first_k, last_k, batch, _ = first
    extra = end if in_ranges(X_FORM, Y_FORM) else batch
    last_ahead = gl.minimum(last_k, first_k + gl.minimum(stages, ahead_of(X_ROWS)) * STEP)
    # Four warps of each warpgroup read a stage.
    begin(
        shared_at(BARRIERS_AT), stages, first_k, last_ahead, row, x_box, x_size, col, width, y_box, y_size, streams,
        extra, 4 * (1 if PINGPONG else GROUPS), GROUPS, X_ROWS, STEP, FORMAT, X_FORM, Y_FORM, PARTS,
    )  # fmt: skip
    begin_roles(
        consume,
        (out, slots, ring, first, step_args, args, workspace, shape, state, tile),
        (
            GROUPS, EDGES, READY, GIVEN, SECOND, EPILOGUE, CAST, KIND, PROMOTES, EVERY, X_ROWS, WIDTHS, SWAP, CLUSTERED,
            LOOPS, PINGPONG, FORMAT, X_FORM, Y_FORM, BUFFERS, PART, RING_BYTES, BARRIERS_AT, PLACES,
        ),
        produce,
        (
            ring, first, shape, state, tile, loads, (x_vectors, y_vectors), EDGES, X_ROWS, STEP, SWAP, CLUSTERED,
            FORMAT, X_FORM, Y_FORM, BARRIERS_AT, PLACES,
        ),
        GROUPS, LOADERS if CLUSTERED else loaders_of(X_ROWS), REGISTERS, LOADER_REGISTERS,
        None if CLUSTERED else place_tiles,
        (
            ring, first, shape, state, tile, PLACE, EDGES, X_ROWS, STEP, SWAP, X_FORM, Y_FORM, BARRIERS_AT, PLACES,
        ),
    )  # fmt: skip
    let_next_begin(OVERLAPS)
    # Only assembly uses this memory in between, so the compiler must not give it to anything else.
    mbarrier.invalidate(barriers.index(0))
