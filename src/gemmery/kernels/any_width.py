"""The matrix product with tiles whose width is any multiple of 8, which fill waves as cuBLAS's tiles do.

For Hopper, in Gluon. Its tensor cores multiply 64 rows of one operand by n columns of the other for every n that is a
multiple of 8 (`wgmma` of PTX), but a tensor of Triton has a power of two of elements. So the instruction is written as
inline assembly, and an accumulator is a tuple of tensors of 64 by 8, each of which is four numbers a thread, as `wgmma`
has them.

The operand on the side of the 64 rows is X, the other one is Y. X is A and Y is B; with SWAP it is the other way
round, the tile comes out transposed, and n cuts M. A tile has X_ROWS by n elements.

One warp (`produce`) loads blocks of both into a ring of stages, which it runs ahead in across tiles. For each step
along K it has one load of X and one of Y, of as many rows as the tile has: any number, since it belongs to the tensor
map. Warpgroups, which are four warps each (`consume`), multiply. They share a tile, each with its own rows of X, or
with PINGPONG take tiles in turn: while one multiplies, the other one stores. These are CUTLASS's cooperative and
ping-pong schedules (github.com/NVIDIA/cutlass).

The ring holds the blocks of X of all stages, and then those of Y. Each stage has two barriers: `full` is complete when
its blocks have arrived, `free` when all warps have read them. `turn` says which warpgroup may multiply.
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


# ---------------------------------------------------------------------------------------------------------------------
# wgmma


def _value(x):
    return getattr(x, "value", x)


@builtin
def shared_at(AT, _semantic=None):
    """The address of what lies `AT` bytes behind the beginning of shared memory, where the ring is.

    `schedules.any_width` makes sure in the compiled kernel that it is there.
    """
    return gl.inline_asm_elementwise(
        f"{{ .reg .b32 first; mov.b32 first, global_smem; add.s32 $0, first, {_value(AT)}; }}", "=r", [],
        dtype=gl.int32, is_pure=True, pack=1, _semantic=_semantic,
    )  # fmt: skip


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


@gluon.jit
def full(ring, stage):
    """The barrier of a stage whose blocks arrive."""
    return ring[0].index(ring[1] + stage)


@gluon.jit
def free(ring, stage):
    """The barrier of a stage that is read."""
    return ring[0].index(ring[1] + STAGES + stage)


@gluon.jit
def turn_of(ring, GROUP: gl.constexpr):
    """The barrier of a warpgroup that waits for its turn."""
    return ring[0].index(ring[1] + 2 * STAGES + GROUP)


@builtin
def wait(barrier, phase, _semantic=None):
    """Waits, each thread on its own, until the phase of this parity of the barrier with that address is complete.

    Before Gluon's own, all threads of a warpgroup meet.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred done;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2; @!done bra AGAIN;"
        "mov.b32 $0, 0; }",
        "=r,r,r", [barrier, phase], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@builtin
def release(stage, arrives, AT, _semantic=None):
    """Says that a warp has read a stage, if it `arrives`, at its barrier `free`.

    Args:
        AT: where these barriers begin, see `shared_at`.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred one; .reg .b32 at; elect.sync _|one, 0xffffffff; setp.ne.and.s32 one, $2, 0, one;"
        f"mov.b32 at, global_smem; mad.lo.s32 at, $1, 8, at;"
        f"@one mbarrier.arrive.shared::cta.b64 _, [at + {_value(AT)}]; mov.b32 $0, 0; }}",
        "=r,r,r", [stage, arrives], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


def _loads(to, row, k, rows, box, MAP, TURNED):
    """Assembly that begins to load an operand's block of a stage, `box` rows at a time.

    The last box ends where the block does, and may have rows of the one before it.

    Args:
        to, row, k, rows, box: registers; see `load_stage`.
        MAP: the number of the kernel's parameter that is the operand's tensor map.
        TURNED: whether adjacent elements lie along the rows and not along K.
    """
    at = f"{{n, {k}}}" if TURNED else f"{{{k}, n}}"
    return (
        f"{{ .reg .pred more; .reg .b64 map; .reg .b32 first, n, to; mov.b64 map, gemm_any_width_param_{MAP};"
        "cvta.param.u64 map, map; mov.b32 first, 0;\n"
        f"NEXT: sub.s32 n, {rows}, {box}; min.s32 n, n, first; mad.lo.s32 to, n, {2 * STEP.value}, {to};"
        f"add.s32 n, n, {row};"
        f"cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [to], [map, {at}], [arrived];"
        f"add.s32 first, first, {box}; setp.lt.s32 more, first, {rows}; @more bra NEXT; }}"
    )


@builtin
def load_stage(
    arrived, count, k, to_x, row, x_rows, x_box, to_y, col, y_rows, y_box, X_TURNED, Y_TURNED, _semantic=None
):
    """One thread of a warp begins to load a stage's blocks of X and Y.

    Gluon's own instruction loads powers of two; of a width that is none it would take several, one after the other,
    and the tensor cores would wait for them.

    Args:
        arrived: the address of the stage's barrier `full`.
        count: bytes that arrive there.
        k, row, col: where the blocks begin along K, in X and in Y.
        to_x, to_y: the addresses of the blocks.
        x_rows, y_rows: of the blocks.
        x_box, y_box: rows that the tensor maps load at a time.
        X_TURNED, Y_TURNED: whether adjacent elements lie along the rows and not along K.
    """
    x = _loads("$4", "$5", "$3", "$6", "$7", 0, _value(X_TURNED))
    y = _loads("$8", "$9", "$3", "$10", "$11", 5, _value(Y_TURNED))
    gl.inline_asm_elementwise(
        "{ .reg .pred one; .reg .b32 arrived; elect.sync _|one, 0xffffffff; @!one bra DONE; mov.b32 arrived, $1;"
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [arrived], $2; {x} {y}\nDONE: mov.b32 $0, 0; }}",
        ",".join(["=r"] + ["r"] * 11), [arrived, count, k, to_x, row, x_rows, x_box, to_y, col, y_rows, y_box],
        dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@gluon.jit
def corner(unit, state, shape, tile, PLACE: gl.constexpr, X_ROWS: gl.constexpr, SWAP: gl.constexpr):
    """Where a unit begins in X and in Y, the end of its rows of the output, and its range of K.

    The last tile along each side is moved back so that it ends where the operand does, if the operand is as large as a
    tile. TMA fills rows outside an operand with zeros, at a tenth of the speed of loads. Two tiles then share elements,
    and both store them, with the same bits.
    """
    width, band_m = tile[0], tile[1]
    if SWAP:
        _, col, row, end, first_k, last_k = PLACE(unit, state, shape, width, X_ROWS, band_m)
    else:
        _, row, col, end, first_k, last_k = PLACE(unit, state, shape, X_ROWS, width, band_m)
    x_rows = shape[1] if SWAP else shape[0]
    y_rows = shape[0] if SWAP else shape[1]
    row = gl.minimum(row, gl.maximum(x_rows - X_ROWS, 0))
    col = gl.minimum(col, gl.maximum(y_rows - width, 0))
    return row, col, end, first_k, last_k


@gluon.jit
def produce(
    ring, shape, state, tile, boxes, PLACE: gl.constexpr, X_ROWS: gl.constexpr, SWAP: gl.constexpr,
    X_TURNED: gl.constexpr, Y_TURNED: gl.constexpr, RING_BYTES: gl.constexpr,
):  # fmt: skip
    """Loads what `consume` multiplies, in the same order."""
    stages, y_blocks = ring[2], ring[3]
    width = tile[0]
    x_box, y_box = boxes
    count = (gl.cdiv(X_ROWS, x_box) * x_box + gl.cdiv(width, y_box) * y_box) * (STEP * 2)
    stage = gl.to_tensor(0)
    # The parity before the first: what has not been used yet is free.
    phase = gl.to_tensor(1)
    for unit in range(gl.program_id(0), state[0], gl.num_programs(0)):
        row, col, _, first_k, last_k = corner(unit, state, shape, tile, PLACE, X_ROWS, SWAP)
        for k in range(first_k, last_k, STEP):
            arrived = shared_at(RING_BYTES) + stage * 8
            wait(arrived + 8 * STAGES, phase)
            to_x = shared_at(0) + stage * (X_ROWS * STEP * 2)
            to_y = shared_at(0) + stages * (X_ROWS * STEP * 2) + stage * y_blocks * (64 * STEP * 2)
            load_stage(
                arrived, count, k, to_x, row, X_ROWS, x_box, to_y, col, width, y_box, X_TURNED, Y_TURNED
            )
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
    WIDTHS: gl.constexpr, X_TURNED: gl.constexpr, Y_TURNED: gl.constexpr, RING_BYTES: gl.constexpr,
):  # fmt: skip
    """The K loop of one warpgroup, from `first_k` to `last_k`, at least a step.

    Args:
        heads: matrix descriptors of its X and of Y in the first stage.
        width: of the tile.
    """
    stages, y_blocks = ring[2], ring[3]
    gl.assume(first_k < last_k)
    for k in range(first_k, last_k, STEP):
        wait(shared_at(RING_BYTES) + stage * 8, phase)
        # 64 rows of 64 numbers are 512 units of 16 bytes.
        own_x = heads[0] + stage * (X_ROWS // 64 * 512)
        own_y = heads[1] + stage * y_blocks * 512
        adds = gl.where(k > first_k, 1, 0)
        acc = multiply(acc, own_x, own_y, adds, width, KIND, WIDTHS, X_TURNED, Y_TURNED)
        # This step's products stay under way, so those of the step before are done with their blocks.
        acc = wgmma_wait(acc, 1)
        before = gl.where(stage == 0, stages - 1, stage - 1)
        release(before, adds, RING_BYTES + 8 * STAGES)
        stage, phase = following(stage, phase, stages)
    return acc, stage, phase


@gluon.jit
def last_step_done(acc, ring, stage, RING_BYTES: gl.constexpr):
    """Waits for the last products of the K loop."""
    acc = wgmma_wait(acc, 0)
    before = gl.where(stage == 0, ring[2] - 1, stage - 1)
    release(before, 1, RING_BYTES + 8 * STAGES)
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
    PART: gl.constexpr, RING_BYTES: gl.constexpr,
):  # fmt: skip
    """One warpgroup's part of the work."""
    stages = ring[2]
    OWN: gl.constexpr = X_ROWS if PINGPONG else X_ROWS // GROUPS
    FIRST: gl.constexpr = 0 if PINGPONG else GROUP * OWN
    address = shared_at(0)
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
            zeros_of(OWN // 64 * WIDTHS[-1] // 8), heads, ring, first_k, last_k, stage, phase,
            tile[0], KIND, X_ROWS, WIDTHS, X_TURNED, Y_TURNED, RING_BYTES,
        )  # fmt: skip
        if PINGPONG:
            mbarrier.arrive(turn_of(ring, 1 - GROUP))
        acc = last_step_done(acc, ring, stage, RING_BYTES)
        finish_tile(
            acc, out, staging, args, (end, shape[1]), row + FIRST, col, tile[0], GROUP, EPILOGUE, CAST, SWAP, WIDTHS,
            BUFFERS, PART,
        )  # fmt: skip
        if PINGPONG:
            # The stages of the tile between are the other warpgroup's.
            stage, phase = later(stage, phase, steps, stages)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "M", "N", "K", "tiles", "width", "band_m", "x_box", "y_box", "stages", "y_blocks",
    ]
)  # fmt: skip
def gemm_any_width(
    x, y, out, M, N, K, tiles, width, band_m, x_box, y_box, stages, y_blocks, place_args, args,
    PLACE: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr, KIND: gl.constexpr, X_ROWS: gl.constexpr,
    LEAST: gl.constexpr, MOST: gl.constexpr, EACH: gl.constexpr, RING_ROWS: gl.constexpr,
    GROUPS: gl.constexpr, SWAP: gl.constexpr, PINGPONG: gl.constexpr, X_TURNED: gl.constexpr, Y_TURNED: gl.constexpr,
    BUFFERS: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, SOURCE: gl.constexpr,
):  # fmt: skip
    """As many programs as run at once, which take tiles in turn.

    Args:
        x, y: descriptors of X and of Y. Only their tensor maps are used.
        out: descriptor of the part of the output that is stored at a time: 64 rows of X by some of Y.
        width: rows of Y in a tile, a multiple of `EACH` from `LEAST` to `MOST`.
        band_m: the height of a tile band, see `order`.
        x_box, y_box: rows that the tensor maps load at a time.
        stages, y_blocks: how many stages there are, at most `STAGES`, and how many 64 rows of Y each has room for.
        PLACE: `place.whole_tile`.
        RING_ROWS: rows of all stages, at least.
        GROUPS: warpgroups that multiply: 1, 2 or 3; 2 with PINGPONG.
        BUFFERS: parts of the output that each warpgroup has room for.
        REGISTERS, LOADER_REGISTERS: of a thread in all warpgroups but the first, and of the loader's.
        SOURCE: tells versions of this file apart.
    """
    shape = (M, N, K)
    state = (tiles, place_args)
    tile = (width, band_m)
    boxes = (x_box, y_box)
    WIDTHS: gl.constexpr = widths_of(LEAST, MOST, EACH)
    PART: gl.constexpr = out.block_type.shape[0 if SWAP else 1]
    RING_BYTES: gl.constexpr = RING_ROWS * (STEP * 2)
    # The ring and then its barriers, in units of 8 bytes. It is the largest, so that shared memory begins with it.
    memory = gl.allocate_shared_memory(
        gl.int64, [RING_BYTES // 8 + 2 * STAGES + 2, 1], mbarrier.MBarrierLayout()
    )
    staging = gl.allocate_shared_memory(out.dtype, [GROUPS * BUFFERS] + out.block_type.shape, out.layout)  # noqa: RUF005
    ring = (memory, RING_BYTES // 8, stages, y_blocks)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full(ring, stage), count=1)
        # Four warps of each warpgroup that reads it.
        mbarrier.init(free(ring, stage), count=4 * (1 if PINGPONG else GROUPS))
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
                        WIDTHS, SWAP, PINGPONG, X_TURNED, Y_TURNED, BUFFERS, PART, RING_BYTES,
                    ),
                ),
                (
                    produce,
                    (ring, shape, state, tile, boxes, PLACE, X_ROWS, SWAP, X_TURNED, Y_TURNED, RING_BYTES),
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
                        WIDTHS, SWAP, PINGPONG, X_TURNED, Y_TURNED, BUFFERS, PART, RING_BYTES,
                    ),
                ),
                (
                    consume,
                    (
                        out, staging, ring, args, shape, state, tile, 1, GROUPS, PLACE, EPILOGUE, CAST, KIND, X_ROWS,
                        WIDTHS, SWAP, PINGPONG, X_TURNED, Y_TURNED, BUFFERS, PART, RING_BYTES,
                    ),
                ),
                (
                    produce,
                    (ring, shape, state, tile, boxes, PLACE, X_ROWS, SWAP, X_TURNED, Y_TURNED, RING_BYTES),
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
                        WIDTHS, SWAP, PINGPONG, X_TURNED, Y_TURNED, BUFFERS, PART, RING_BYTES,
                    ),
                ),
                (
                    consume,
                    (
                        out, staging, ring, args, shape, state, tile, 1, GROUPS, PLACE, EPILOGUE, CAST, KIND, X_ROWS,
                        WIDTHS, SWAP, PINGPONG, X_TURNED, Y_TURNED, BUFFERS, PART, RING_BYTES,
                    ),
                ),
                (
                    consume,
                    (
                        out, staging, ring, args, shape, state, tile, 2, GROUPS, PLACE, EPILOGUE, CAST, KIND, X_ROWS,
                        WIDTHS, SWAP, PINGPONG, X_TURNED, Y_TURNED, BUFFERS, PART, RING_BYTES,
                    ),
                ),
                (
                    produce,
                    (ring, shape, state, tile, boxes, PLACE, X_ROWS, SWAP, X_TURNED, Y_TURNED, RING_BYTES),
                ),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    # What only assembly uses in between must not be given to anything else.
    mbarrier.invalidate(full(ring, 0))
