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

`full` is complete when all blocks of a stage have arrived, `free` when all warpgroups that read it have. `turns` says
which warpgroup may multiply.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .rings import beside, finish, following, later

#: Elements along K of a stage, of 16 bits each: a row of 128 bytes, which is what TMA swizzles.
STEP = gl.constexpr(64)
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


@builtin
def wgmma(acc, at_x, at_y, adds, X_STEP, Y_STEP, KIND, X_TURNED, Y_TURNED, _semantic=None):
    """Begins `acc` plus, or without `adds` just, the product of 64 rows of X and n of Y, STEP along K.

    Args:
        at_x, at_y: matrix descriptors, as PTX calls what says where a block lies in shared memory, and how.
        X_STEP, Y_STEP: from one sixteen along K to the next, in units of 16 bytes.
        KIND: the operands' type, as PTX names it.
        X_TURNED, Y_TURNED: whether adjacent elements lie along the rows and not along K.
    """
    count = len(acc.values)
    numbers = 4 * count
    registers = ", ".join(f"${i}" for i in range(numbers))
    # Every operand comes four times, a register for each number of a thread.
    x, y, p = 2 * numbers, 2 * numbers + 4, 2 * numbers + 8
    lines = [f".reg .pred p; .reg .b64 x, y; setp.ne.b32 p, ${p}, 0; wgmma.fence.sync.aligned;"]
    for i in range(4):
        lines.append(
            f"add.s64 x, ${x}, {i * _value(X_STEP)}; add.s64 y, ${y}, {i * _value(Y_STEP)};"
            f"wgmma.mma_async.sync.aligned.m64n{8 * count}k16.f32.{_value(KIND)}.{_value(KIND)} {{{registers}}}, x, y,"
            f" {'1' if i else 'p'}, 1, 1, {int(_value(X_TURNED))}, {int(_value(Y_TURNED))};"
        )
    lines.append("wgmma.commit_group.sync.aligned;")
    constraints = ["=f"] * numbers + [str(i) for i in range(numbers)] + ["l"] * 8 + ["r"] * 4
    made = gl.inline_asm_elementwise(
        "{ " + "\n".join(lines) + " }", ",".join(constraints), [*acc.values, at_x, at_y, adds],
        dtype=[gl.float32] * count, is_pure=False, pack=4, _semantic=_semantic,
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
def largest_box(rows, turned):
    """Rows of the largest boxes that TMA loads: a view of the ring begins at a multiple of its size.

    So Y's rows of a stage are filled up to a multiple of it, which should not take much memory.

    Args:
        rows: of Y in a stage.
        turned: whether the adjacent elements of X or Y lie along the rows.
    """
    return 64 if turned or -rows % 64 <= 24 else 32


@gluon.constexpr_function
def boxes(rows, largest, turned):
    """(rows, offset, number of the descriptor) of the loads that make up some rows of a stage.

    Boxes are powers of two. Where the adjacent elements lie along the rows, which are a multiple of 64 then, a box has
    64 of them.
    """
    if turned:
        return [(64, at, 0) for at in range(0, rows, 64)]
    made, at, size = [], 0, largest
    while at < rows:
        while size > rows - at:
            size //= 2
        made.append((size, at))
        at += size
    sizes = sorted({size for size, _ in made}, reverse=True)
    return [(size, at, sizes.index(size)) for size, at in made]


@gluon.constexpr_function
def stage_rows(x_rows, y_rows, turned):
    """Rows of 128 bytes in a stage."""
    largest = largest_box(y_rows, turned)
    return x_rows + -(-y_rows // largest) * largest


@builtin
def view(blocks, rows, cols, layout, _semantic=None):
    """The ring as a row of blocks of a box's shape."""
    rows, cols = _value(rows), _value(cols)
    reinterpret = getattr(blocks, "_reinterpret", None) or blocks.reinterpret
    count = blocks.shape[0] * 512 // (rows * cols)
    return reinterpret(blocks.dtype, [count, rows, cols], _value(layout), _semantic=_semantic)


@gluon.jit
def load_rows(
    descriptors, blocks, arrived, first, row, k, BOXES: gl.constexpr, TURNED: gl.constexpr
):  # fmt: skip
    """Begins to load some rows of an operand into the ring, from its row `first` on."""
    for i in gl.static_range(len(BOXES)):
        own = descriptors[BOXES[i][2]]
        to = view(blocks, own.block_type.shape[0], own.block_type.shape[1], own.layout)
        to = to.index((first + BOXES[i][1]) // BOXES[i][0])
        if TURNED:
            _load(own, [k, row + BOXES[i][1]], arrived, to)
        else:
            _load(own, [row + BOXES[i][1], k], arrived, to)


@gluon.jit
def corner(
    unit, state, shape, band_m, PLACE: gl.constexpr, X_ROWS: gl.constexpr, Y_ROWS: gl.constexpr, SWAP: gl.constexpr
):  # fmt: skip
    """Where a unit begins in X and in Y, the end of its rows of the output, and its range of K."""
    if SWAP:
        _, col, row, end, first_k, last_k = PLACE(unit, state, shape, Y_ROWS, X_ROWS, band_m)
    else:
        _, row, col, end, first_k, last_k = PLACE(unit, state, shape, X_ROWS, Y_ROWS, band_m)
    return row, col, end, first_k, last_k


@gluon.jit
def produce(
    x, ys, ring, shape, state, band_m, PLACE: gl.constexpr, X_ROWS: gl.constexpr, Y_ROWS: gl.constexpr,
    STAGES: gl.constexpr, SWAP: gl.constexpr, X_TURNED: gl.constexpr, Y_TURNED: gl.constexpr,
):  # fmt: skip
    """Loads what `consume` multiplies, in the same order."""
    blocks, full, free = ring[0], ring[1], ring[2]
    TURNED: gl.constexpr = X_TURNED or Y_TURNED
    ROWS: gl.constexpr = stage_rows(X_ROWS, Y_ROWS, TURNED)
    X_BOXES: gl.constexpr = boxes(X_ROWS, largest_box(Y_ROWS, TURNED), X_TURNED)
    Y_BOXES: gl.constexpr = boxes(Y_ROWS, largest_box(Y_ROWS, TURNED), Y_TURNED)
    stage = gl.to_tensor(0)
    # The parity before the first: what has not been used yet is free.
    phase = gl.to_tensor(1)
    for unit in range(gl.program_id(0), state[0], gl.num_programs(0)):
        row, col, _, first_k, last_k = corner(unit, state, shape, band_m, PLACE, X_ROWS, Y_ROWS, SWAP)
        for k in range(first_k, last_k, STEP):
            mbarrier.wait(free.index(stage), phase)
            arrived = full.index(stage)
            mbarrier.expect(arrived, (X_ROWS + Y_ROWS) * STEP * 2)
            load_rows((x,), blocks, arrived, stage * ROWS, row, k, X_BOXES, X_TURNED)
            load_rows(ys, blocks, arrived, stage * ROWS + X_ROWS, col, k, Y_BOXES, Y_TURNED)
            stage, phase = following(stage, phase, STAGES)


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
    acc, own_x, own_y, adds, KIND: gl.constexpr, COUNT: gl.constexpr, X_TURNED: gl.constexpr, Y_TURNED: gl.constexpr
):  # fmt: skip
    """A step along K: begins to add the product of a stage's blocks to each 64 rows of the sum.

    Args:
        own_x, own_y: matrix descriptors of this stage's blocks.
        COUNT: blocks of 8 columns in 64 rows.
    """
    more = gl.full([64, 8], adds, gl.int32, BLOCK8)
    at_y = gl.full([64, 8], own_y, gl.int64, BLOCK8)
    new = ()
    for i in gl.static_range(len(acc) // COUNT):
        # 64 rows of 64 numbers are 8 KiB, however they lie.
        at_x = gl.full([64, 8], own_x + i * 512, gl.int64, BLOCK8)
        part = blocks_of(acc, i * COUNT, COUNT)
        # A sixteenth along K is 32 bytes further, or 16 rows.
        part = wgmma(
            part, at_x, at_y, more, 128 if X_TURNED else 2, 128 if Y_TURNED else 2, KIND, X_TURNED, Y_TURNED
        )
        new += part
    return new


@gluon.jit
def sum_steps(
    acc, heads, ring, first_k, last_k, stage, phase, KIND: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, X_TURNED: gl.constexpr, Y_TURNED: gl.constexpr,
):  # fmt: skip
    """The K loop of one warpgroup, from `first_k` to `last_k`, at least a step.

    Args:
        heads: matrix descriptors of its X and of Y in the first stage.
        ROWS: rows of a stage.
    """
    full, free = ring[1], ring[2]
    EACH: gl.constexpr = len(acc) // COUNT
    gl.assume(first_k < last_k)
    for k in range(first_k, last_k, STEP):
        mbarrier.wait(full.index(stage), phase)
        at = stage * (ROWS * STEP * 2 // 16)
        adds = gl.where(k > first_k, 1, 0)
        acc = multiply(acc, heads[0] + at, heads[1] + at, adds, KIND, COUNT, X_TURNED, Y_TURNED)
        # This step's products stay under way, so those of the step before are done with their blocks.
        acc = wgmma_wait(acc, EACH)
        before = gl.where(stage == 0, STAGES - 1, stage - 1)
        mbarrier.arrive(free.index(before), pred=k > first_k)
        stage, phase = following(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def last_step_done(acc, ring, stage, STAGES: gl.constexpr):
    """Waits for the last products of the K loop."""
    acc = wgmma_wait(acc, 0)
    before = gl.where(stage == 0, STAGES - 1, stage - 1)
    mbarrier.arrive(ring[2].index(before))
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
    acc, out, staged, args, shape, row, col, FIRST: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr,
    SWAP: gl.constexpr, WIDTH: gl.constexpr, PENDING: gl.constexpr,
):  # fmt: skip
    """Epilogue and store of 64 rows of X by `WIDTH` of Y, which begin at `row` and `col`.

    Args:
        FIRST: their first block in `acc`.
    """
    block = columns_of(acc, FIRST, WIDTH // 8)
    if SWAP:
        finish(block, out, staged, args, shape, col, row, EPILOGUE, CAST, SWAP, False, PENDING)
    else:
        finish(block, out, staged, args, shape, row, col, EPILOGUE, CAST, SWAP, False, PENDING)


@gluon.constexpr_function
def parts_of(rows, width):
    """Where the parts begin that are stored at a time. The last one may overlap the one before, and be stored twice."""
    return [min(at, rows - width) for at in range(0, rows, width)]


@gluon.jit
def finish_tile(
    acc, out, staging, args, shape, row, col, EPILOGUE: gl.constexpr, CAST: gl.constexpr, SWAP: gl.constexpr,
    Y_ROWS: gl.constexpr, GROUP: gl.constexpr, BUFFERS: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Epilogue and store of a warpgroup's part of a tile, a part at a time, through its own `BUFFERS` in turn."""
    AT: gl.constexpr = parts_of(Y_ROWS, WIDTH)
    COUNT: gl.constexpr = Y_ROWS // 8
    for m in gl.static_range(len(acc) // COUNT):
        for i in gl.static_range(len(AT)):
            staged = staging.index(GROUP * BUFFERS + (m * len(AT) + i) % BUFFERS)
            finish_block(
                acc, out, staged, args, shape, row + 64 * m, col + AT[i], m * COUNT + AT[i] // 8, EPILOGUE, CAST, SWAP,
                WIDTH, BUFFERS - 1,
            )  # fmt: skip


@gluon.jit
def consume(
    out, staging, ring, args, shape, state, band_m, GROUP: gl.constexpr, GROUPS: gl.constexpr, PLACE: gl.constexpr,
    EPILOGUE: gl.constexpr, CAST: gl.constexpr, KIND: gl.constexpr, X_ROWS: gl.constexpr, Y_ROWS: gl.constexpr,
    STAGES: gl.constexpr, SWAP: gl.constexpr, PINGPONG: gl.constexpr, X_TURNED: gl.constexpr, Y_TURNED: gl.constexpr,
    BUFFERS: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """One warpgroup's part of the work."""
    blocks, turns = ring[0], ring[3]
    OWN: gl.constexpr = X_ROWS if PINGPONG else X_ROWS // GROUPS
    FIRST: gl.constexpr = 0 if PINGPONG else GROUP * OWN
    COUNT: gl.constexpr = Y_ROWS // 8
    ROWS: gl.constexpr = stage_rows(X_ROWS, Y_ROWS, X_TURNED or Y_TURNED)
    address = address_of(blocks)
    # A row of a stage is 128 bytes.
    heads = (
        matrix_descriptor(address, 8192 if X_TURNED else 16) + FIRST * 8,
        matrix_descriptor(address, 8192 if Y_TURNED else 16) + X_ROWS * 8,
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
            stage, phase = later(stage, phase, steps, STAGES)
    for unit in range(first, state[0], every):
        row, col, end, first_k, last_k = corner(unit, state, shape, band_m, PLACE, X_ROWS, Y_ROWS, SWAP)
        if PINGPONG:
            mbarrier.wait(turns.index(GROUP), turn)
            turn = turn ^ 1
        acc, stage, phase = sum_steps(
            zeros_of(OWN // 64 * COUNT), heads, ring, first_k, last_k, stage, phase, KIND, COUNT, ROWS, STAGES,
            X_TURNED, Y_TURNED,
        )  # fmt: skip
        if PINGPONG:
            mbarrier.arrive(turns.index(1 - GROUP))
        acc = last_step_done(acc, ring, stage, STAGES)
        finish_tile(
            acc, out, staging, args, (end, shape[1]), row + FIRST, col, EPILOGUE, CAST, SWAP, Y_ROWS, GROUP, BUFFERS,
            WIDTH,
        )  # fmt: skip
        if PINGPONG:
            # The stages of the tile between are the other warpgroup's.
            stage, phase = later(stage, phase, steps, STAGES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K", "tiles", "band_m"])
def gemm_any_width(
    x, y0, y1, y2, y3, out, M, N, K, tiles, band_m, place_args, args,
    PLACE: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr, KIND: gl.constexpr, X_ROWS: gl.constexpr,
    Y_ROWS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, SWAP: gl.constexpr,
    PINGPONG: gl.constexpr, X_TURNED: gl.constexpr, Y_TURNED: gl.constexpr, BUFFERS: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, RING: gl.constexpr, SOURCE: gl.constexpr,
):  # fmt: skip
    """As many programs as run at once, which take tiles in turn.

    Args:
        x: descriptor of blocks of X.
        y0, y1, y2, y3: descriptors of Y's blocks, one for each size of a box, see `boxes`; or None.
        out: descriptor of the part of the output that is stored at a time: 64 rows of X by some of Y.
        band_m: the height of a tile band, see `order`.
        PLACE: `place.whole_tile`.
        GROUPS: warpgroups that multiply: 1, 2 or 3; 2 with PINGPONG.
        BUFFERS: parts of the output that each warpgroup has room for.
        REGISTERS, LOADER_REGISTERS: of a thread in all warpgroups but the first, and of the loader's.
        RING: the layout of a stage: swizzled by 128 bytes.
        SOURCE: tells versions of this file apart.
    """
    shape = (M, N, K)
    state = (tiles, place_args)
    ys = (y0, y1, y2, y3)
    ROWS: gl.constexpr = stage_rows(X_ROWS, Y_ROWS, X_TURNED or Y_TURNED)
    WIDTH: gl.constexpr = out.block_type.shape[0 if SWAP else 1]
    # The largest, so that it is where shared memory begins; see `address_of`.
    blocks = gl.allocate_shared_memory(x.dtype, [STAGES * ROWS // 8, 8, STEP], RING)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    staging = gl.allocate_shared_memory(out.dtype, [GROUPS * BUFFERS] + out.block_type.shape, out.layout)  # noqa: RUF005
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1 if PINGPONG else GROUPS)
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    if PINGPONG:
        mbarrier.arrive(turns.index(0))
    hopper.fence_async_shared()
    ring = (blocks, full, free, turns)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (
                    consume,
                    (
                        out, staging, ring, args, shape, state, band_m, 0, GROUPS, PLACE, EPILOGUE, CAST, KIND,
                        X_ROWS, Y_ROWS, STAGES, SWAP, PINGPONG, X_TURNED, Y_TURNED, BUFFERS, WIDTH,
                    ),
                ),
                (
                    produce,
                    (
                        x, ys, ring, shape, state, band_m, PLACE, X_ROWS, Y_ROWS, STAGES, SWAP, X_TURNED, Y_TURNED,
                    ),
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
                        out, staging, ring, args, shape, state, band_m, 0, GROUPS, PLACE, EPILOGUE, CAST, KIND,
                        X_ROWS, Y_ROWS, STAGES, SWAP, PINGPONG, X_TURNED, Y_TURNED, BUFFERS, WIDTH,
                    ),
                ),
                (
                    consume,
                    (
                        out, staging, ring, args, shape, state, band_m, 1, GROUPS, PLACE, EPILOGUE, CAST, KIND,
                        X_ROWS, Y_ROWS, STAGES, SWAP, PINGPONG, X_TURNED, Y_TURNED, BUFFERS, WIDTH,
                    ),
                ),
                (
                    produce,
                    (
                        x, ys, ring, shape, state, band_m, PLACE, X_ROWS, Y_ROWS, STAGES, SWAP, X_TURNED, Y_TURNED,
                    ),
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
                        out, staging, ring, args, shape, state, band_m, 0, GROUPS, PLACE, EPILOGUE, CAST, KIND,
                        X_ROWS, Y_ROWS, STAGES, SWAP, PINGPONG, X_TURNED, Y_TURNED, BUFFERS, WIDTH,
                    ),
                ),
                (
                    consume,
                    (
                        out, staging, ring, args, shape, state, band_m, 1, GROUPS, PLACE, EPILOGUE, CAST, KIND,
                        X_ROWS, Y_ROWS, STAGES, SWAP, PINGPONG, X_TURNED, Y_TURNED, BUFFERS, WIDTH,
                    ),
                ),
                (
                    consume,
                    (
                        out, staging, ring, args, shape, state, band_m, 2, GROUPS, PLACE, EPILOGUE, CAST, KIND,
                        X_ROWS, Y_ROWS, STAGES, SWAP, PINGPONG, X_TURNED, Y_TURNED, BUFFERS, WIDTH,
                    ),
                ),
                (
                    produce,
                    (
                        x, ys, ring, shape, state, band_m, PLACE, X_ROWS, Y_ROWS, STAGES, SWAP, X_TURNED, Y_TURNED,
                    ),
                ),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
