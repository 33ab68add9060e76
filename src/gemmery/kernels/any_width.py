"""The matrix product with tiles whose width is any multiple of 8, which fill waves as cuBLAS's tiles do.

For Hopper, in Gluon. Its tensor cores multiply 64 rows of one operand by n columns of the other for every n that is a
multiple of 8 (`wgmma` of PTX), but a tensor of Triton has a power of two of elements. So the instruction is written as
inline assembly, and an accumulator is a tuple of tensors of 64 by 8, each of which is four numbers a thread, as `wgmma`
has them.

The operand on the side of the 64 rows is X, the other one is Y. X is A and Y is B; with SWAP it is the other way
round, the tile comes out transposed, and n cuts M. A tile has X_ROWS by n elements.

One warp (`produce`) loads blocks of both into a ring of stages, which it runs ahead in across tiles. Warpgroups, which
are four warps each (`consume`), multiply. They share a tile, each with its own rows of X, or with PINGPONG take tiles
in turn: while one multiplies, the other one stores. These are CUTLASS's cooperative and ping-pong schedules
(github.com/NVIDIA/cutlass).

The blocks of X of all stages come first in the ring, and then those of Y. Of its barriers, `full` is complete when all
blocks of a stage have arrived, and `free` when all warpgroups that read it have; `turn` says which one may multiply.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .rings import beside, finish, following, later

#: Elements along K of a stage, of 16 bits each: a row of 128 bytes, which is what TMA swizzles.
STEP = gl.constexpr(64)
#: Stages that there are barriers for.
STAGES = gl.constexpr(12)
#: The accumulator of a warpgroup for 8 columns.
BLOCK8 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))

# Names that differ between versions of Triton: these are of 3.6 and of later ones.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_inline_asm = getattr(gl, "inline_asm", None)


# ---------------------------------------------------------------------------------------------------------------------
# wgmma


def _value(x):
    return getattr(x, "value", x)


@builtin
def address_of(ring, _semantic=None):
    """The address of the ring in shared memory.

    Before Triton 3.9 assembly can't be given one. There the ring has to lie where shared memory begins, which
    `schedules.any_width` makes sure of in the compiled kernel.
    """
    if _inline_asm is not None:
        return _inline_asm("mov.b32 $0, $1;", "=r,r", [ring], gl.int32, is_pure=False, _semantic=_semantic)
    return gl.inline_asm_elementwise(
        "mov.b32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1, _semantic=_semantic
    )


def _switch(index, values, cases):
    """Assembly that runs the case of the value that register `index` has, which is one of `values`, in order.

    Branches are uniform: all threads have the same value.
    """
    if len(cases) == 1:
        return cases[0]
    half = len(cases) // 2
    lower, upper = _switch(index, values[:half], cases[:half]), _switch(index, values[half:], cases[half:])
    return (
        f"{{ .reg .pred less; setp.lt.s32 less, {index}, {values[half]}; @less bra.uni LOWER; {upper} bra.uni DONE;\n"
        f"LOWER: {lower}\nDONE: }}"
    )


@builtin
def wgmma(acc, at_x, at_y, adds, width, X_STEP, Y_STEP, KIND, X_TURNED, Y_TURNED, WIDTHS, _semantic=None):
    """Begins `acc` plus, or without `adds` just, the product of some rows of X and `width` of Y, STEP along K.

    Args:
        acc: for each 64 rows of X as many blocks as the largest width has. Those behind `width` stay as they are.
        at_x, at_y: matrix descriptors, as PTX calls what says where a block lies in shared memory, and how.
        X_STEP, Y_STEP: from one sixteen along K to the next, in units of 16 bytes.
        KIND: the operands' type, as PTX names it.
        X_TURNED, Y_TURNED: whether adjacent elements lie along the rows and not along K.
        WIDTHS: what `width` may be, in order.
    """
    widths = [_value(width) for width in _value(WIDTHS)]
    numbers = 4 * len(acc.values)
    # Every operand comes four times, a register for each number of a thread.
    x, y, p, w = (2 * numbers + 4 * i for i in range(4))
    cases = []
    for each in widths:
        shape = f"m64n{each}k16.f32.{_value(KIND)}.{_value(KIND)}"
        lines = ["wgmma.fence.sync.aligned;"]
        for row, first in enumerate(range(0, numbers, widths[-1] // 2)):
            registers = ", ".join(f"${first + i}" for i in range(each // 2))
            for i in range(4):
                # 64 rows of 64 numbers are 512 units, however they lie.
                lines.append(
                    f"add.s64 x, ${x}, {512 * row + i * _value(X_STEP)}; add.s64 y, ${y}, {i * _value(Y_STEP)};"
                    f"wgmma.mma_async.sync.aligned.{shape} {{{registers}}}, x, y,"
                    f" {'1' if i else 'p'}, 1, 1, {int(_value(X_TURNED))}, {int(_value(Y_TURNED))};"
                )
        cases.append("\n".join([*lines, "wgmma.commit_group.sync.aligned;"]))
    switch = _switch(f"${w}", widths, cases)
    constraints = ["=f"] * numbers + [str(i) for i in range(numbers)] + ["l"] * 8 + ["r"] * 8
    made = gl.inline_asm_elementwise(
        f"{{ .reg .pred p; .reg .b64 x, y; setp.ne.b32 p, ${p}, 0;\n{switch} }}", ",".join(constraints),
        [*acc.values, at_x, at_y, adds, width],
        dtype=[gl.float32] * len(acc.values), is_pure=False, pack=4, _semantic=_semantic,
    )  # fmt: skip
    return gl.tuple(list(made))


@builtin
def wgmma_wait(acc, LEFT, _semantic=None):
    """Waits until no more than `LEFT` products are under way."""
    numbers = 4 * len(acc.values)
    constraints = ["=f"] * numbers + [str(i) for i in range(numbers)]
    made = gl.inline_asm_elementwise(
        f"wgmma.wait_group.sync.aligned {_value(LEFT)};", ",".join(constraints), list(acc.values),
        dtype=[gl.float32] * len(acc.values), is_pure=False, pack=4, _semantic=_semantic,
    )  # fmt: skip
    return gl.tuple(list(made))


@builtin
def blocks_of(acc, FIRST, COUNT, _semantic=None):
    """Some of an accumulator's blocks of 8 columns."""
    return gl.tuple(list(acc.values)[_value(FIRST) : _value(FIRST) + _value(COUNT)])


@builtin
def last_blocks(acc, width, COUNT, WIDTHS, _semantic=None):
    """The last `COUNT` blocks of 8 columns of those that `width` columns have.

    Args:
        WIDTHS: what `width` may be, in order.
    """
    numbers, made = 4 * len(acc.values), 4 * _value(COUNT)
    widths = [_value(width) for width in _value(WIDTHS)]
    cases = [
        " ".join(f"mov.b32 ${i}, ${made + each // 2 - made + i};" for i in range(made)) for each in widths
    ]
    constraints = ["=&f"] * made + ["f"] * numbers + ["r"] * 4
    found = gl.inline_asm_elementwise(
        _switch(f"${made + numbers}", widths, cases), ",".join(constraints), [*acc.values, width],
        dtype=[gl.float32] * _value(COUNT), is_pure=True, pack=4, _semantic=_semantic,
    )  # fmt: skip
    return gl.tuple(list(found))


@gluon.jit
def matrix_descriptor(address, CHUNK: gl.constexpr):
    """The matrix descriptor of the first stage: swizzled by 128 bytes, 1024 bytes from one 8 rows to the next.

    Args:
        CHUNK: bytes from one 64 to the next, where adjacent elements lie along the rows.
    """
    return (
        (gl.cast(address, gl.int64) >> 4)
        | (gl.cast(1, gl.int64) << 62)
        | (gl.cast(64, gl.int64) << 32)
        | (gl.cast(CHUNK // 16, gl.int64) << 16)
    )


# ---------------------------------------------------------------------------------------------------------------------
# The ring


@gluon.constexpr_function
def widths_of(least, most, each):
    """The widths that a compiled kernel has code for."""
    return list(range(least, most + 1, each))


@builtin
def view(blocks, rows, cols, layout, _semantic=None):
    """The ring as a row of blocks of a box's shape."""
    rows, cols = _value(rows), _value(cols)
    reinterpret = getattr(blocks, "_reinterpret", None) or blocks.reinterpret
    count = blocks.shape[0] * 512 // (rows * cols)
    return reinterpret(blocks.dtype, [count, rows, cols], _value(layout), _semantic=_semantic)


@gluon.constexpr_function
def some_of(values, first, end):
    """Some elements of a list."""
    return values[first:end]


@gluon.jit
def full(ring, stage):
    """The barrier of a stage whose blocks arrive."""
    return ring[1].index(stage)


@gluon.jit
def free(ring, stage):
    """The barrier of a stage that is read."""
    return ring[1].index(STAGES + stage)


@gluon.jit
def turn_of(ring, GROUP: gl.constexpr):
    """The barrier of a warpgroup that waits for its turn."""
    return ring[1].index(2 * STAGES + GROUP)


@builtin
def expect(arrived, stage, count, BARRIERS_AT, _semantic=None):
    """Says how many bytes a stage gets, which is one arrival; one thread of the warp does.

    Gluon's own instruction takes constants only.

    Args:
        arrived: the stage's barrier.
        BARRIERS_AT: where the first stage's lies behind the beginning of shared memory, as for `address_of`.
    """
    if _inline_asm is not None:
        _inline_asm(
            "{ .reg .pred p; elect.sync _|p, 0xffffffff; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1; }",
            "r,r", [arrived, count], _semantic=_semantic,
        )  # fmt: skip
        return
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 first, own; mov.b32 first, global_smem; mad.lo.s32 own, $1, 8, first;"
        "elect.sync _|p, 0xffffffff;"
        f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [own + {_value(BARRIERS_AT)}], $2; mov.b32 $0, 0; }}",
        "=r,r,r", [stage, count], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@gluon.jit
def load_box(box, blocks, arrived, at, row, k, TURNED: gl.constexpr):
    """Begins to load as many rows of an operand as the descriptor's box has into the ring, as block `at` of such."""
    to = view(blocks, box.block_type.shape[0], box.block_type.shape[1], box.layout).index(at)
    if TURNED:
        _load(box, [k, row], arrived, to)
    else:
        _load(box, [row, k], arrived, to)


@gluon.jit
def load_x(x, blocks, arrived, stage, row, k, ROWS: gl.constexpr, TURNED: gl.constexpr):
    """Begins to load `ROWS` rows of X."""
    BOX: gl.constexpr = x.block_type.shape[1 if TURNED else 0]
    for i in gl.static_range(ROWS // BOX):
        load_box(x, blocks, arrived, stage * (ROWS // BOX) + i, row + BOX * i, k, TURNED)


@gluon.jit
def load_y(ys, blocks, arrived, at, row, k, width, WIDTHS: gl.constexpr, TURNED: gl.constexpr):
    """Begins to load `width` rows of Y in boxes of 64, and then of 32, 16 and 8, at most one of each.

    Args:
        at: where they begin in the ring, in 64 rows.
    """
    for i in gl.static_range(WIDTHS[-1] // 64):
        if width >= 64 * i + 64:
            load_box(ys[0], blocks, arrived, at + i, row + 64 * i, k, TURNED)
    for i in gl.static_range(1, 4):
        # The outer condition is the compiler's.
        if ys[i] is not None:  # noqa: SIM102
            if width & (64 >> i):
                before = width & -(128 >> i)
                load_box(ys[i], blocks, arrived, (at << i) + before // (64 >> i), row + before, k, TURNED)


@gluon.jit
def corner(unit, state, shape, tile, PLACE: gl.constexpr, X_ROWS: gl.constexpr, SWAP: gl.constexpr):
    """Where a unit begins in X and in Y, the end of its rows of the output, and its range of K."""
    width, band_m = tile[0], tile[1]
    if SWAP:
        _, col, row, end, first_k, last_k = PLACE(unit, state, shape, width, X_ROWS, band_m)
    else:
        _, row, col, end, first_k, last_k = PLACE(unit, state, shape, X_ROWS, width, band_m)
    return row, col, end, first_k, last_k


@gluon.jit
def produce(
    x, ys, ring, shape, state, tile, PLACE: gl.constexpr, X_ROWS: gl.constexpr, WIDTHS: gl.constexpr,
    SWAP: gl.constexpr, X_TURNED: gl.constexpr, Y_TURNED: gl.constexpr, BARRIERS_AT: gl.constexpr,
):  # fmt: skip
    """Loads what `consume` multiplies, in the same order."""
    blocks, stages, y_blocks = ring[0], ring[2], ring[3]
    width = tile[0]
    stage = gl.to_tensor(0)
    # The parity before the first: what has not been used yet is free.
    phase = gl.to_tensor(1)
    for unit in range(gl.program_id(0), state[0], gl.num_programs(0)):
        row, col, _, first_k, last_k = corner(unit, state, shape, tile, PLACE, X_ROWS, SWAP)
        for k in range(first_k, last_k, STEP):
            mbarrier.wait(free(ring, stage), phase)
            arrived = full(ring, stage)
            expect(arrived, stage, (X_ROWS + width) * (STEP * 2), BARRIERS_AT)
            load_x(x, blocks, arrived, stage, row, k, X_ROWS, X_TURNED)
            at = stages * (X_ROWS // 64) + stage * y_blocks
            load_y(ys, blocks, arrived, at, col, k, width, WIDTHS, Y_TURNED)
            stage, phase = following(stage, phase, stages)


# ---------------------------------------------------------------------------------------------------------------------
# The sum


@gluon.jit
def zeros_of(COUNT: gl.constexpr):
    """An accumulator of `COUNT` blocks of 8 columns."""
    acc = ()
    for _ in gl.static_range(COUNT):
        acc += (gl.zeros([64, 8], gl.float32, BLOCK8),)  # type: ignore[assignment]
    return acc


@gluon.jit
def multiply(
    acc, own_x, own_y, adds, width, KIND: gl.constexpr, WIDTHS: gl.constexpr, X_TURNED: gl.constexpr,
    Y_TURNED: gl.constexpr,
):  # fmt: skip
    """A step along K: begins to add the product of a stage's blocks to the sum.

    Args:
        own_x, own_y: matrix descriptors of this stage's blocks.
        width: of the tile.
    """
    at_x = gl.full([64, 8], own_x, gl.int64, BLOCK8)
    at_y = gl.full([64, 8], own_y, gl.int64, BLOCK8)
    more = gl.full([64, 8], adds, gl.int32, BLOCK8)
    columns = gl.full([64, 8], width, gl.int32, BLOCK8)
    # A sixteenth along K is 32 bytes further, or 16 rows.
    X_STEP: gl.constexpr = 128 if X_TURNED else 2
    Y_STEP: gl.constexpr = 128 if Y_TURNED else 2
    return wgmma(acc, at_x, at_y, more, columns, X_STEP, Y_STEP, KIND, X_TURNED, Y_TURNED, WIDTHS)


@gluon.jit
def sum_steps(
    acc, heads, ring, first_k, last_k, stage, phase, width, KIND: gl.constexpr, X_ROWS: gl.constexpr,
    WIDTHS: gl.constexpr, X_TURNED: gl.constexpr, Y_TURNED: gl.constexpr,
):  # fmt: skip
    """The K loop of one warpgroup, from `first_k` to `last_k`, at least a step.

    Args:
        heads: matrix descriptors of its X and of Y in the first stage.
        width: of the tile.
    """
    stages, y_blocks = ring[2], ring[3]
    gl.assume(first_k < last_k)
    for k in range(first_k, last_k, STEP):
        mbarrier.wait(full(ring, stage), phase)
        # 64 rows of 64 numbers are 512 units of 16 bytes.
        own_x = heads[0] + stage * (X_ROWS // 64 * 512)
        own_y = heads[1] + stage * y_blocks * 512
        adds = gl.where(k > first_k, 1, 0)
        acc = multiply(acc, own_x, own_y, adds, width, KIND, WIDTHS, X_TURNED, Y_TURNED)
        # This step's products stay under way, so those of the step before are done with their blocks.
        acc = wgmma_wait(acc, 1)
        before = gl.where(stage == 0, stages - 1, stage - 1)
        mbarrier.arrive(free(ring, before), pred=k > first_k)
        stage, phase = following(stage, phase, stages)
    return acc, stage, phase


@gluon.jit
def last_step_done(acc, ring, stage):
    """Waits for the last products of the K loop."""
    acc = wgmma_wait(acc, 0)
    before = gl.where(stage == 0, ring[2] - 1, stage - 1)
    mbarrier.arrive(free(ring, before))
    return acc


# ---------------------------------------------------------------------------------------------------------------------
# What comes after the K loop


@gluon.jit
def columns_of(acc, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """`COUNT` blocks of 8 columns, a power of two, as one tensor; no number moves."""
    if COUNT == 1:
        return acc[FIRST]
    else:
        left = columns_of(acc, FIRST, COUNT // 2)
        right = columns_of(acc, FIRST + COUNT // 2, COUNT // 2)
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8 * COUNT, 16])
        return gl.convert_layout(beside(left, right), LAYOUT, assert_trivial=True)


@gluon.jit
def finish_block(
    block, out, staged, args, shape, row, col, EPILOGUE: gl.constexpr, CAST: gl.constexpr, SWAP: gl.constexpr,
    PENDING: gl.constexpr,
):  # fmt: skip
    """Epilogue and store of 64 rows of X by some of Y, which begin at `row` and `col`."""
    if SWAP:
        finish(block, out, staged, args, shape, col, row, EPILOGUE, CAST, SWAP, False, PENDING)
    else:
        finish(block, out, staged, args, shape, row, col, EPILOGUE, CAST, SWAP, False, PENDING)


@gluon.jit
def finish_tile(
    acc, out, staging, args, shape, row, col, width, GROUP: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr,
    SWAP: gl.constexpr, WIDTHS: gl.constexpr, BUFFERS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Epilogue and store of a warpgroup's part of a tile: `PART` columns at a time, through its own `BUFFERS` in turn.

    The last columns may overlap those before, and are stored twice then, with the same bits.
    """
    COUNT: gl.constexpr = WIDTHS[-1] // 8
    WHOLE: gl.constexpr = WIDTHS[-1] // PART
    whole = width // PART
    parts = gl.cdiv(width, PART)
    for m in gl.static_range(len(acc) // COUNT):
        for i in gl.static_range(WHOLE):
            if i < whole:
                block = columns_of(acc, m * COUNT + i * PART // 8, PART // 8)
                staged = staging.index(GROUP * BUFFERS + (m * parts + i) % BUFFERS)
                finish_block(
                    block, out, staged, args, shape, row + 64 * m, col + i * PART, EPILOGUE, CAST, SWAP, BUFFERS - 1
                )  # fmt: skip
        if whole < parts:
            columns = gl.full([64, 8], width, gl.int32, BLOCK8)
            last = last_blocks(blocks_of(acc, m * COUNT, COUNT), columns, PART // 8, WIDTHS)
            staged = staging.index(GROUP * BUFFERS + (m * parts + whole) % BUFFERS)
            finish_block(
                columns_of(last, 0, PART // 8), out, staged, args, shape, row + 64 * m, col + width - PART, EPILOGUE,
                CAST, SWAP, BUFFERS - 1,
            )  # fmt: skip


@gluon.jit
def consume(
    out, staging, ring, args, shape, state, tile, GROUP: gl.constexpr, GROUPS: gl.constexpr, PLACE: gl.constexpr,
    EPILOGUE: gl.constexpr, CAST: gl.constexpr, KIND: gl.constexpr, X_ROWS: gl.constexpr, WIDTHS: gl.constexpr,
    SWAP: gl.constexpr, PINGPONG: gl.constexpr, X_TURNED: gl.constexpr, Y_TURNED: gl.constexpr, BUFFERS: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """One warpgroup's part of the work."""
    blocks, stages = ring[0], ring[2]
    OWN: gl.constexpr = X_ROWS if PINGPONG else X_ROWS // GROUPS
    FIRST: gl.constexpr = 0 if PINGPONG else GROUP * OWN
    address = address_of(blocks)
    # A row of a stage is 128 bytes.
    heads = (
        matrix_descriptor(address, 8192 if X_TURNED else 16) + FIRST * 8,
        matrix_descriptor(address, 8192 if Y_TURNED else 16) + stages * (X_ROWS * 8),
    )
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    first = gl.program_id(0)
    every = gl.num_programs(0)
    steps = gl.cdiv(shape[2], STEP)
    if PINGPONG:
        first += GROUP * every
        every *= 2
        if GROUP == 1:
            stage, phase = later(stage, phase, steps, stages)
    for unit in range(first, state[0], every):
        row, col, end, first_k, last_k = corner(unit, state, shape, tile, PLACE, X_ROWS, SWAP)
        if PINGPONG:
            mbarrier.wait(turn_of(ring, GROUP), turn)
            turn = turn ^ 1
        acc, stage, phase = sum_steps(
            zeros_of(OWN // 64 * WIDTHS[-1] // 8), heads, ring, first_k, last_k, stage, phase, tile[0], KIND, X_ROWS,
            WIDTHS, X_TURNED, Y_TURNED,
        )  # fmt: skip
        if PINGPONG:
            mbarrier.arrive(turn_of(ring, 1 - GROUP))
        acc = last_step_done(acc, ring, stage)
        finish_tile(
            acc, out, staging, args, (end, shape[1]), row + FIRST, col, tile[0], GROUP, EPILOGUE, CAST, SWAP, WIDTHS,
            BUFFERS, PART,
        )  # fmt: skip
        if PINGPONG:
            # The stages of the tile between are the other warpgroup's.
            stage, phase = later(stage, phase, steps, stages)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K", "tiles", "width", "band_m", "stages", "y_blocks"])
def gemm_any_width(
    x, y64, y32, y16, y8, out, M, N, K, tiles, width, band_m, stages, y_blocks, place_args, args,
    PLACE: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr, KIND: gl.constexpr, X_ROWS: gl.constexpr,
    LEAST: gl.constexpr, MOST: gl.constexpr, EACH: gl.constexpr, RING_ROWS: gl.constexpr,
    GROUPS: gl.constexpr, SWAP: gl.constexpr, PINGPONG: gl.constexpr, X_TURNED: gl.constexpr, Y_TURNED: gl.constexpr,
    BUFFERS: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, RING: gl.constexpr,
    SOURCE: gl.constexpr,
):  # fmt: skip
    """As many programs as run at once, which take tiles in turn.

    Args:
        x: descriptor of X's blocks.
        y64, y32, y16, y8: descriptors of Y's blocks of so many rows; None for those that no width takes.
        out: descriptor of the part of the output that is stored at a time: 64 rows of X by some of Y.
        width: rows of Y in a tile, a multiple of `EACH` from `LEAST` to `MOST`.
        band_m: the height of a tile band, see `order`.
        stages, y_blocks: how many stages there are, at most `STAGES`, and how many 64 rows of Y each has room for.
        PLACE: `place.whole_tile`.
        RING_ROWS: rows of all stages, at least.
        GROUPS: warpgroups that multiply: 1, 2 or 3; 2 with PINGPONG.
        BUFFERS: parts of the output that each warpgroup has room for.
        REGISTERS, LOADER_REGISTERS: of a thread in all warpgroups but the first, and of the loader's.
        RING: the layout of a stage: swizzled by 128 bytes.
        SOURCE: tells versions of this file apart.
    """
    shape = (M, N, K)
    state = (tiles, place_args)
    tile = (width, band_m)
    ys = (y64, y32, y16, y8)
    WIDTHS: gl.constexpr = widths_of(LEAST, MOST, EACH)
    PART: gl.constexpr = out.block_type.shape[0 if SWAP else 1]
    # The largest, so that it is where shared memory begins; see `address_of`.
    blocks = gl.allocate_shared_memory(x.dtype, [RING_ROWS // 8, 8, STEP], RING)
    staging = gl.allocate_shared_memory(out.dtype, [GROUPS * BUFFERS] + out.block_type.shape, out.layout)  # noqa: RUF005
    barriers = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 2, 1], mbarrier.MBarrierLayout())
    BARRIERS_AT: gl.constexpr = (RING_ROWS * STEP + GROUPS * BUFFERS * 64 * PART) * 2
    ring = (blocks, barriers, stages, y_blocks)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full(ring, stage), count=1)
        mbarrier.init(free(ring, stage), count=1 if PINGPONG else GROUPS)
    for group in gl.static_range(2):
        mbarrier.init(turn_of(ring, group), count=1)
    if PINGPONG:
        mbarrier.arrive(turn_of(ring, 0))
    hopper.fence_async_shared()
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (
                    consume,
                    (
                        out, staging, ring, args, shape, state, tile, 0, GROUPS, PLACE, EPILOGUE, CAST, KIND, X_ROWS,
                        WIDTHS, SWAP, PINGPONG, X_TURNED, Y_TURNED, BUFFERS, PART,
                    ),
                ),
                (
                    produce,
                    (x, ys, ring, shape, state, tile, PLACE, X_ROWS, WIDTHS, SWAP, X_TURNED, Y_TURNED, BARRIERS_AT),
                ),
            ],
            [1],
            [LOADER_REGISTERS],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    consume,
                    (
                        out, staging, ring, args, shape, state, tile, 0, GROUPS, PLACE, EPILOGUE, CAST, KIND, X_ROWS,
                        WIDTHS, SWAP, PINGPONG, X_TURNED, Y_TURNED, BUFFERS, PART,
                    ),
                ),
                (
                    consume,
                    (
                        out, staging, ring, args, shape, state, tile, 1, GROUPS, PLACE, EPILOGUE, CAST, KIND, X_ROWS,
                        WIDTHS, SWAP, PINGPONG, X_TURNED, Y_TURNED, BUFFERS, PART,
                    ),
                ),
                (
                    produce,
                    (x, ys, ring, shape, state, tile, PLACE, X_ROWS, WIDTHS, SWAP, X_TURNED, Y_TURNED, BARRIERS_AT),
                ),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    consume,
                    (
                        out, staging, ring, args, shape, state, tile, 0, GROUPS, PLACE, EPILOGUE, CAST, KIND, X_ROWS,
                        WIDTHS, SWAP, PINGPONG, X_TURNED, Y_TURNED, BUFFERS, PART,
                    ),
                ),
                (
                    consume,
                    (
                        out, staging, ring, args, shape, state, tile, 1, GROUPS, PLACE, EPILOGUE, CAST, KIND, X_ROWS,
                        WIDTHS, SWAP, PINGPONG, X_TURNED, Y_TURNED, BUFFERS, PART,
                    ),
                ),
                (
                    consume,
                    (
                        out, staging, ring, args, shape, state, tile, 2, GROUPS, PLACE, EPILOGUE, CAST, KIND, X_ROWS,
                        WIDTHS, SWAP, PINGPONG, X_TURNED, Y_TURNED, BUFFERS, PART,
                    ),
                ),
                (
                    produce,
                    (x, ys, ring, shape, state, tile, PLACE, X_ROWS, WIDTHS, SWAP, X_TURNED, Y_TURNED, BARRIERS_AT),
                ),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
