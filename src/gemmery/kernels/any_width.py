"""The matrix product with tiles whose width is any multiple of 8, which fill waves as cuBLAS's tiles do.

For Hopper, in Gluon. Its tensor cores multiply 64 rows of one operand by n columns of the other for every n that is a
multiple of 8 (`wgmma` of PTX), but a tensor of Triton has a power of two of elements. So the instruction is written as
inline assembly, and an accumulator is a tuple of tensors of 64 by 8, each of which is four numbers a thread, as `wgmma`
has them.

The operand on the side of the 64 rows is X, the other one is Y. X is A and Y is B; with SWAP it is the other way
round, the tile comes out transposed, and n cuts M. A tile has X_ROWS by n elements.

One warp (`produce`) loads blocks of both into a ring of stages, which it runs ahead in across tiles. For each step
along K it has one load of X and one of Y, of as many rows as the tile has: any number, since it belongs to the tensor
map. If X is a packed weight, there is one more for each kind of group parameters. Warpgroups, which are four warps each
(`consume`), multiply. They share a tile, each with its own rows of X, or with PINGPONG take tiles in turn: while one
multiplies, the other one stores. These are CUTLASS's cooperative and ping-pong schedules (github.com/NVIDIA/cutlass).

The ring holds the blocks of X of all stages, then those of Y, and then group parameters. Each stage has two barriers:
`full` is complete when its blocks have arrived, `free` when all warps have read them. `turn` says which warpgroup may
multiply. `unused` is complete when no warpgroup reads the ring any more.

A tile goes to memory in parts of 64 rows of X by some of Y, through slots of shared memory. Each warpgroup has some
slots of its own. A program's last tile has a slot for each part, in the ring.

Operands have a form, which says what the coordinates of their tensor maps are: "rows" are (k, row), "turned" is
(row, k), where adjacent elements lie along the rows, "pairs" are (k, row of 8, half, eight), and "packed" is (word,
line, strip), see `any_width_packed`. Rows of a pair come from its two halves in turn, eight at a time, so that both
numbers that make one of the output are in one thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from . import any_width_packed as packed
from .any_width_loop import (
    STAGES,
    WAIT,
    format_of,
    multiply_steps,
    releasing,
    step_of,
    switch,
    value_of,
    x_bytes_of,
)
from .rings import barrier, beside, last_to_arrive, later, rounded

#: Bytes of a row of a stage, which is what TMA swizzles.
ROW = gl.constexpr(128)
#: The accumulator of a warpgroup for 8 columns.
BLOCK8 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))


# ---------------------------------------------------------------------------------------------------------------------
# wgmma


@builtin
def shared_at(AT, _semantic=None):
    """The address of what lies `AT` bytes behind the beginning of shared memory, where the ring is.

    `schedules.any_width` makes sure in the compiled kernel that it is there.
    """
    return gl.inline_asm_elementwise(
        f"{{ .reg .b32 first; mov.b32 first, global_smem; add.s32 $0, first, {value_of(AT)}; }}", "=r", [],
        dtype=gl.int32, is_pure=True, pack=1, _semantic=_semantic,
    )  # fmt: skip


@builtin
def wgmma_wait(acc, LEFT, _semantic=None):
    """Waits until no more than `LEFT` products are under way."""
    numbers = 4 * len(acc.values)
    constraints = ["=f"] * numbers + [str(i) for i in range(numbers)]
    made = gl.inline_asm_elementwise(
        f"wgmma.wait_group.sync.aligned {value_of(LEFT)};", ",".join(constraints), list(acc.values),
        dtype=[gl.float32] * len(acc.values), is_pure=False, pack=4, _semantic=_semantic,
    )  # fmt: skip
    return gl.tuple(list(made))


@builtin
def blocks_of(acc, FIRST, COUNT, _semantic=None):
    """Some of an accumulator's blocks of 8 columns."""
    return gl.tuple(list(acc.values)[value_of(FIRST) : value_of(FIRST) + value_of(COUNT)])


@builtin
def last_blocks(acc, width, COUNT, WIDTHS, _semantic=None):
    """The last `COUNT` blocks of 8 columns of those that `width` columns have.

    Args:
        WIDTHS: what `width` may be, in order.
    """
    numbers, made = 4 * len(acc.values), 4 * value_of(COUNT)
    widths = [value_of(width) for width in value_of(WIDTHS)]
    cases = [
        " ".join(f"mov.b32 ${i}, ${made + each // 2 - made + i};" for i in range(made)) for each in widths
    ]
    constraints = ["=&f"] * made + ["f"] * numbers + ["r"] * 4
    found = gl.inline_asm_elementwise(
        switch(f"${made + numbers}", widths, cases), ",".join(constraints), [*acc.values, width],
        dtype=[gl.float32] * value_of(COUNT), is_pure=True, pack=4, _semantic=_semantic,
    )  # fmt: skip
    return gl.tuple(list(found))


@gluon.jit
def matrix_descriptor(address, CHUNK: gl.constexpr):
    """The lower half of what PTX calls a matrix descriptor: where a block lies in shared memory, and how.

    Args:
        CHUNK: bytes from one 64 to the next, where adjacent elements lie along the rows.
    """
    return (address >> 4) | (CHUNK // 16 << 16)


# ---------------------------------------------------------------------------------------------------------------------
# The ring


@gluon.constexpr_function
def widths_of(least, most, each):
    """The widths that a compiled kernel has code for."""
    return list(range(least, most + 1, each))


#: Dimensions of the tensor map of an operand of each form.
_DIMS = {"rows": 2, "turned": 2, "pairs": 4, "packed": 3}


def _maps(X_FORM, Y_FORM):
    """The numbers of the kernel's parameters that are tensor maps: of X, of Y, of the output, of scales and of shifts.

    The sizes and strides of each are parameters, too.
    """
    behind_x, behind_y = (1 + 2 * _DIMS[value_of(form)] for form in (X_FORM, Y_FORM))
    out = behind_x + behind_y
    return 0, behind_x, out, out + 5, out + 10


@gluon.jit
def turn_of(ring, GROUP: gl.constexpr):
    """The barrier of a warpgroup that waits for its turn."""
    return ring[0].index(2 * STAGES + GROUP)


@gluon.jit
def unused(ring):
    """The barrier at which warpgroups arrive once they no longer read the ring."""
    return ring[0].index(2 * STAGES + 2)


@builtin
def begin(stages, READERS, GROUPS, AT, X_FORM, Y_FORM, _semantic=None):
    """Fetches the tensor maps, and makes all barriers, a fourth of them in each warp.

    The hardware makes one after the other. The first load of a launch waits for both.

    Args:
        stages: how many there are.
        READERS, GROUPS: arrivals at `free` and at `unused`; there is one at `full` and at a warpgroup's turn.
        AT: where the barriers begin, see `shared_at`.
        X_FORM, Y_FORM: how the operands lie.
    """
    maps = "".join(
        f"setp.eq.u32 own, thread, {32 * i}; mov.b64 map, gemm_any_width_param_{number}; cvta.param.u64 map, map;"
        "@own prefetch.tensormap [map];"
        for i, number in enumerate(_maps(X_FORM, Y_FORM)[:3])
    )
    most = STAGES.value
    # Warp w makes barriers w, w + 4, ..., a thread each: `full` of all stages, then `free`, then the other four.
    choice = "".join(
        f"setp.ge.s32 own, number, {first}; @own mov.b32 count, {count}; @own mov.b32 moved, {by};"
        for first, by, count in (
            ("0", "0", 1), ("$1", "free", value_of(READERS)), ("both", "others", 1),
            ("last", "others", value_of(GROUPS)),
        )
    )  # fmt: skip
    gl.inline_asm_elementwise(
        f"{{ .reg .pred own; .reg .b32 thread, number, count, both, last, free, others, moved, at; .reg .b64 map;"
        f"mov.u32 thread, %tid.x; {maps}"
        "shr.u32 at, thread, 5; and.b32 number, thread, 31; mad.lo.s32 number, number, 4, at;"
        "add.s32 both, $1, $1; add.s32 last, both, 2;"
        # How far barriers of a kind are from where they would be without room for more stages.
        f"sub.s32 free, {most}, $1; sub.s32 others, {2 * most}, both; {choice}"
        "add.s32 moved, moved, number; mov.b32 at, global_smem; mad.lo.s32 at, moved, 8, at;"
        # The last two, of which one is `any_width_loop.NOWHERE`'s, are alike.
        "add.s32 last, last, 1; setp.le.s32 own, number, last;"
        f"@own mbarrier.init.shared::cta.b64 [at + {value_of(AT)}], count; mov.b32 $0, 0; }}",
        "=r,r", [stages], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@builtin
def computed(value, _semantic=None):
    """Returns the same number, and keeps the compiler from computing it after a loop that follows."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic
    )


@builtin
def release(barrier, _semantic=None):
    """Says that a warp has read a stage, given the address of its barrier `full`."""
    gl.inline_asm_elementwise(
        f"{{ .reg .pred one; {releasing('$1')} mov.b32 $0, 0; }}",
        "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


def _loads(operand, row, k, rows, box, MAP, FORM, each):
    """Assembly that begins to load an operand's block of a stage, `box` rows at a time; mostly that is all of them.

    The last box ends where the block does, and may have rows of the one before it.

    Args:
        operand: "x" or "y", a register that says where the block goes. Predicate `x_streams` or `y_streams` says
            whether it is the first to leave L2, `x_more` or `y_more` whether there are several boxes.
        row, k, rows, box: registers; see `load_steps`.
        MAP: the number of the kernel's parameter that is the operand's tensor map.
        FORM: how the operand lies.
        each: bytes of a row.
    """

    def load(to, row):
        at, before = {
            "rows": (f"{{{k}, {row}}}", ""),
            "turned": (f"{{{row}, {k}}}", ""),
            "pairs": (f"{{{k}, zero, zero, eight}}", f"mov.b32 zero, 0; shr.u32 eight, {row}, 4;"),
            # A row has 8 bytes for each bit of a number, and 16 rows have a line for each 64 bits.
            "packed": (
                "{zero, line, strip}",
                f"mov.b32 zero, 0; shr.u32 line, {k}, {6 - (each // 8).bit_length() + 1}; shr.u32 strip, {row}, 4;",
            ),
        }[FORM]
        load = f"cp.async.bulk.tensor.{_DIMS[FORM]}d.shared::cluster.global.mbarrier::complete_tx::bytes"
        # An explicit `evict_normal` slows loads of blocks that many programs read.
        return (
            f"{before} @{operand}_streams {load}.L2::cache_hint [{to}], [map, {at}], [at], policy;"
            f"@!{operand}_streams {load} [{to}], [map, {at}], [at];"
        )

    return (
        f"{{ .reg .pred more; .reg .b64 map; .reg .b32 last, first, n, to, zero, eight, line, strip;"
        f"mov.b64 map, gemm_any_width_param_{MAP}; cvta.param.u64 map, map; {load(operand, row)}"
        f"@!{operand}_more bra LOADED; sub.s32 last, {rows}, {box}; mov.b32 first, {box};\n"
        f"NEXT: min.s32 n, first, last; mad.lo.s32 to, n, {each}, {operand}; add.s32 n, n, {row};"
        f"{load('to', 'n')} add.s32 first, first, {box}; setp.lt.s32 more, first, {rows}; @more bra NEXT;\nLOADED: }}"
    )


@builtin
def load_steps(
    full, stage, phase, stages, k, last_k, row, x_box, col, width, y_box, count, streams, X_ROWS, STEP, FORMAT,
    X_FORM, Y_FORM, AHEAD, _semantic=None,
):  # fmt: skip
    """One thread loads the blocks of X and Y of some steps, each into its stage.

    Gluon's own load takes a power of two of rows. Another width would need several, one after the other, and the tensor
    cores would wait for them.

    Args:
        full: the address of the first stage's barrier at which they arrive.
        stage, phase: of the first step; see `rings.later`.
        k, last_k: where the steps begin and end along K.
        row, col: where the blocks begin in X and in Y.
        width: rows of Y.
        x_box, y_box: rows that the tensor maps load at a time.
        count: bytes of a step's blocks, and those that boxes load twice.
        streams: 1 where X is the first to leave L2, 2 where Y is, 0 where neither is.
        STEP: elements along K of a step.
        FORMAT: see `multiply_steps`.
        X_FORM, Y_FORM: how the operands lie.
        AHEAD: True before warps have their roles: the stages are unused, so there is nothing to wait for, and the first
            warp of the warpgroup loads. False in the loader's warp.
    """
    full_, stage_, phase_, stages_, k_, last_, row_, x_box_, col_, width_, y_box_, count_, streams_ = (
        f"${i}" for i in range(1, 14)
    )
    rows, format = value_of(X_ROWS), format_of(FORMAT)
    x_bytes, params_bytes = packed.x_bytes(rows, format), packed.params_bytes(rows, format)
    x_map, y_map, _, *of_params = _maps(X_FORM, Y_FORM)
    x = _loads("x", row_, "k", str(rows), x_box_, x_map, value_of(X_FORM), x_bytes // rows)
    y = _loads("y", col_, "k", width_, y_box_, y_map, value_of(Y_FORM), ROW.value)
    params = ""
    if params_bytes:
        params = (
            f"mad.lo.s32 params, stage, {params_bytes}, params_first;"
            f"{packed.load_params(format, rows, x_box_, of_params[: len(format.kinds)], row_, 'k')}"
        )
    if value_of(AHEAD):
        alone, free = "mov.u32 at, %tid.x; setp.ge.u32 one, at, 32; @one bra DONE;", ""
    else:
        alone, free = "", WAIT.format(barrier=f"at + {8 * STAGES.value}", phase="phase")
    setup = (
        f"{alone} elect.sync _|one, 0xffffffff; @!one bra DONE;"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
        f"setp.eq.s32 x_streams, {streams_}, 1; setp.eq.s32 y_streams, {streams_}, 2;"
        f"setp.lt.s32 x_more, {x_box_}, {rows}; setp.lt.s32 y_more, {y_box_}, {width_};"
        f"mov.b32 stage, {stage_}; mov.b32 phase, {phase_}; mov.b32 k, {k_}; mad.lo.s32 at, stage, 8, {full_};"
        f"mov.b32 x_first, global_smem; mad.lo.s32 y_first, {stages_}, {x_bytes}, x_first;"
        f"mul.lo.s32 y_bytes, {width_}, {ROW.value}; mad.lo.s32 params_first, {stages_}, y_bytes, y_first;"
        f"mad.lo.s32 x, stage, {x_bytes}, x_first; mad.lo.s32 y, stage, y_bytes, y_first;"
    )
    go_on = (
        f"add.s32 k, k, {value_of(STEP)}; add.s32 at, at, 8; add.s32 x, x, {x_bytes}; add.s32 y, y, y_bytes;"
        f"add.s32 stage, stage, 1; setp.ge.s32 wraps, stage, {stages_};"
        f"@wraps mov.b32 stage, 0; @wraps mov.b32 at, {full_}; @wraps mov.b32 x, x_first; @wraps mov.b32 y, y_first;"
        "@wraps xor.b32 phase, phase, 1; bra STEP;"
    )
    gl.inline_asm_elementwise(
        "{ .reg .pred one, done, wraps, ends, x_streams, y_streams, x_more, y_more; .reg .b64 policy;"
        f".reg .b32 stage, phase, at, k, x, y, x_first, y_first, y_bytes, params, params_first; {setup}\n"
        f"STEP: setp.ge.s32 ends, k, {last_}; @ends bra DONE; {free}"
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [at], {count_}; {x} {y} {params} {go_on}\n"
        "DONE: mov.b32 $0, 0; }",
        ",".join(["=r"] + ["r"] * 13),
        [full, stage, phase, stages, k, last_k, row, x_box, col, width, y_box, count, streams],
        dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@gluon.jit
def corner(
    unit, state, shape, tile, PLACE: gl.constexpr, X_ROWS: gl.constexpr, SWAP: gl.constexpr, X_FORM: gl.constexpr
):  # fmt: skip
    """Where a unit begins in X and in Y, the end of its rows of the output, and its range of K.

    The last tile along each side is moved back so that it ends where the operand does, if the operand is as large as a
    tile. TMA fills rows outside an operand with zeros, at a tenth of the speed of loads. Two tiles then share elements,
    and both store them, with the same bits. A tile that is cut along K has other bits than a whole one, so behind whole
    tiles it stays where it is.
    """
    width, band_m = tile[0], tile[1]
    if SWAP:
        _, col, row, end, first_k, last_k = PLACE(unit, state, shape, width, X_ROWS, band_m)
    else:
        _, row, col, end, first_k, last_k = PLACE(unit, state, shape, X_ROWS, width, band_m)
    x_rows = shape[1] if SWAP else shape[0]
    if X_FORM == "packed":
        # Words are of 16 rows each.
        x_rows = gl.cdiv(x_rows, 16) * 16
    y_rows = shape[0] if SWAP else shape[1]
    moves = (unit < state[1]) | (state[1] == 0)
    row = gl.where(moves, gl.minimum(row, gl.maximum(x_rows - X_ROWS, 0)), row)
    col = gl.where(moves, gl.minimum(col, gl.maximum(y_rows - width, 0)), col)
    return row, col, end, first_k, last_k


@gluon.jit
def load_ahead(
    ring, shape, state, tile, loads, PLACE: gl.constexpr, X_ROWS: gl.constexpr, STEP: gl.constexpr,
    SWAP: gl.constexpr, FORMAT: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr, BARRIERS_AT: gl.constexpr,
):  # fmt: skip
    """Loads the first steps of the program's first unit, as many as there are stages, before warps have their roles."""
    stages = ring[1]
    x_box, y_box, count, streams = loads
    row, col, _, first_k, last_k = corner(gl.program_id(0), state, shape, tile, PLACE, X_ROWS, SWAP, X_FORM)
    barrier()
    last_k = first_k + gl.minimum(last_k - first_k, stages * STEP)
    load_steps(
        shared_at(BARRIERS_AT), 0, 0, stages, first_k, last_k, row, x_box, col, tile[0], y_box, count, streams, X_ROWS,
        STEP, FORMAT, X_FORM, Y_FORM, True,
    )  # fmt: skip


@gluon.jit
def produce(
    ring, shape, state, tile, loads, PLACE: gl.constexpr, X_ROWS: gl.constexpr, STEP: gl.constexpr,
    SWAP: gl.constexpr, FORMAT: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr, BARRIERS_AT: gl.constexpr,
):  # fmt: skip
    """Loads what `consume` multiplies, in the same order, behind what `load_ahead` does."""
    stages = ring[1]
    x_box, y_box, count, streams = loads
    stage = gl.to_tensor(0)
    # The parity before the first: what has not been used yet is free.
    phase = gl.to_tensor(1)
    for unit in range(gl.program_id(0), state[0], gl.num_programs(0)):
        row, col, _, first_k, last_k = corner(unit, state, shape, tile, PLACE, X_ROWS, SWAP, X_FORM)
        steps = gl.cdiv(last_k - first_k, STEP)
        if unit == gl.program_id(0):
            ahead = gl.minimum(stages, steps)
            first_k += ahead * STEP
            steps -= ahead
            stage, phase = later(stage, phase, ahead, stages)
        load_steps(
            shared_at(BARRIERS_AT), stage, phase, stages, first_k, last_k, row, x_box, col, tile[0], y_box, count,
            streams, X_ROWS, STEP, FORMAT, X_FORM, Y_FORM, False,
        )  # fmt: skip
        stage, phase = later(stage, phase, steps, stages)


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
def sum_steps(
    heads, ring, first_k, last_k, stage, phase, width, scales, COUNT: gl.constexpr, KIND: gl.constexpr,
    PROMOTES: gl.constexpr, X_ROWS: gl.constexpr, FIRST: gl.constexpr, WIDTHS: gl.constexpr, FORMAT: gl.constexpr,
    X_FORM: gl.constexpr, Y_FORM: gl.constexpr, BARRIERS_AT: gl.constexpr,
):  # fmt: skip
    """The sum of a warpgroup's products from `first_k` to `last_k`, at least a step.

    Args:
        heads: where its X and Y are in the first stage, see `multiply_steps`.
        width: of the tile.
        scales, FORMAT: see `multiply_steps`.
        FIRST: the first of its rows of X.
        COUNT: blocks of 8 columns.
    """
    steps = gl.cdiv(last_k - first_k, step_of(KIND))
    acc = multiply_steps(
        zeros_of(COUNT), in_block(shared_at(BARRIERS_AT)), in_block(stage), in_block(phase), in_block(ring[1]),
        in_block(steps), in_block(heads[0]), in_block(heads[1]), in_block(width), scales, X_ROWS, FIRST, KIND,
        PROMOTES, FORMAT, X_FORM, Y_FORM, WIDTHS,
    )  # fmt: skip
    stage, phase = later(stage, phase, steps, ring[1])
    return acc, stage, phase


@gluon.jit
def scales_of(step_args, row, col, shape, first_k, EVERY_M: gl.constexpr, EVERY_N: gl.constexpr):
    """The addresses of the scales of 64 rows of A and of a tile's columns of B, each in a block.

    A span is 128 columns of B from a multiple of 128 on. A tile touches up to three.

    Args:
        step_args: the scales, as `kernels.scales` takes them, of a step each.
        row, col: where rows and columns begin, in a matrix of `shape`.
        first_k: where the steps begin.
        EVERY_M, EVERY_N: rows and columns that share a scale; the latter in multiples of 128.

    Returns:
        The addresses of the first step's scales, of the rows and of three spans; the bytes to the next step's, for rows
        and for spans; and the number of blocks of 8 columns in the first span.
    """
    at_a, _, row_a, k_a, at_b, _, row_b, k_b = step_args
    nothing = gl.zeros([64, 8], gl.int64, BLOCK8)
    low = gl.cast(first_k // 128, gl.int64)
    # Rows and columns outside have some scale.
    rows = gl.minimum(row + gl.arange(0, 64, gl.SliceLayout(1, BLOCK8)), shape[0] - 1) // EVERY_M
    of_rows = gl.cast(at_a, gl.int64) + (rows.to(gl.int64) * row_a + low * k_a) * 4
    made = (gl.expand_dims(of_rows, 1) + nothing,)
    for i in gl.static_range(3):
        column = gl.minimum(col // 128 + i, (shape[1] - 1) // 128) * 128 // EVERY_N
        made += (nothing + (gl.cast(at_b, gl.int64) + (gl.cast(column, gl.int64) * row_b + low * k_b) * 4),)  # type: ignore[assignment]
    return made + ((nothing + k_a) * 4, (nothing + k_b) * 4, in_block(16 - col % 128 // 8))  # noqa: RUF005


@gluon.jit
def in_block(value):
    """A number in each place of a block of an accumulator, as assembly takes it that also takes some of these."""
    return gl.full([64, 8], value, value.dtype, BLOCK8)


@gluon.jit
def last_step_done(acc, ring, stage, BARRIERS_AT: gl.constexpr):
    """Waits for the last products of the K loop."""
    acc = wgmma_wait(acc, 0)
    before = gl.where(stage == 0, ring[1] - 1, stage - 1)
    release(shared_at(BARRIERS_AT) + before * 8)
    return acc


# ---------------------------------------------------------------------------------------------------------------------
# Tiles that are cut along K


@builtin
def store_partial(acc, to, width, COUNT, _semantic=None):
    """Stores a warpgroup's accumulator in memory, each thread 16 bytes at a time.

    Args:
        to: the address, in a block as `BLOCK8` has them.
        width: the tile's width, likewise in a block. Columns beyond it are not stored.
        COUNT: blocks of 8 columns for each 64 rows of X.
    """
    blocks, count = len(acc.values), value_of(COUNT)
    to_, columns = f"${4 + 4 * blocks}", f"${8 + 4 * blocks}"
    lines = [
        (
            ""
            if i % count
            else f"mad.lo.s32 of, {columns}, {256 * (i // count)}, thread; cvt.s64.s32 at, of; add.s64 at, at, {to_};"
        )
        + f"setp.gt.s32 own, {columns}, {8 * (i % count)}; @own st.global.v4.f32 [at + {2048 * (i % count)}],"
        f" {{{', '.join(f'${4 + 4 * i + j}' for j in range(4))}}};"
        for i in range(blocks)
    ]
    gl.inline_asm_elementwise(
        "{ .reg .pred own; .reg .b32 thread, of; .reg .b64 at; mov.u32 thread, %tid.x; and.b32 thread, thread, 127;"
        f"shl.b32 thread, thread, 4; {''.join(lines)} {''.join(f'mov.b32 ${i}, 0;' for i in range(4))} }}",
        ",".join(["=r"] * 4 + ["f"] * (4 * blocks) + ["l"] * 4 + ["r"] * 4), [*acc.values, to, width],
        dtype=gl.int32, is_pure=False, pack=4, _semantic=_semantic,
    )  # fmt: skip


@builtin
def fetch_partial(to, at, size, _semantic=None):
    """Begins to copy what a warpgroup has stored into shared memory; each thread will read what it copies.

    Args:
        to, at: the addresses in shared and in global memory.
        size: in bytes.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred more; .reg .b32 thread, to, done; .reg .b64 at; mov.u32 thread, %tid.x;"
        "and.b32 thread, thread, 127; mad.lo.s32 to, thread, 16, $1; mad.wide.s32 at, thread, 16, $2;"
        "mov.b32 done, 0;\nNEXT: cp.async.cg.shared.global [to], [at], 16; add.s32 to, to, 2048; add.s64 at, at, 2048;"
        "add.s32 done, done, 2048; setp.lt.s32 more, done, $3; @more bra NEXT; mov.b32 $0, 0; }",
        "=r,r,l,r", [to, at, size], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@builtin
def fetched(_semantic=None):
    """Waits until this thread's copies have arrived."""
    gl.inline_asm_elementwise(
        "cp.async.wait_all; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@builtin
def add_fetched(blocks, at, _semantic=None):
    """Adds fetched numbers to some blocks of an accumulator. Their address in shared memory comes in a block."""
    numbers = 4 * len(blocks.values)
    lines = [
        f"ld.shared.v4.f32 {{n0, n1, n2, n3}}, [at + {2048 * i}];"
        + "".join(f"add.f32 ${4 * i + j}, ${4 * i + j}, n{j};" for j in range(4))
        for i in range(len(blocks.values))
    ]
    constraints = ["=f"] * numbers + [str(i) for i in range(numbers)] + ["r"] * 4
    made = gl.inline_asm_elementwise(
        "{ .reg .f32 n0, n1, n2, n3; .reg .b32 thread, at; mov.u32 thread, %tid.x; and.b32 thread, thread, 127;"
        f"mad.lo.s32 at, thread, 16, ${2 * numbers}; {''.join(lines)} }}",
        ",".join(constraints), [*blocks.values, at],
        dtype=[gl.float32] * len(blocks.values), is_pure=False, pack=4, _semantic=_semantic,
    )  # fmt: skip
    return gl.tuple(list(made))


@gluon.jit
def combine(
    acc, unit, ring, state, workspace, width, GROUP: gl.constexpr, GROUPS: gl.constexpr, COUNT: gl.constexpr,
    RING_BYTES: gl.constexpr,
):  # fmt: skip
    """Stores a part of a tile. The warpgroup that does so last copies the other parts into the ring; nobody waits.

    `rings.combine` adds parts up in registers, of which an accumulator of this width leaves none.

    Returns:
        Whether this warpgroup is the last one, and what `summed` takes.
    """
    whole, parts = state[1], state[2]
    partials, semaphores = workspace
    # Bytes of a warpgroup's partial sum.
    size = len(acc) // COUNT * width * 256
    number = unit - whole
    tile = number // parts
    own = number % parts
    first = gl.cast(partials, gl.int64) + gl.cast(tile * parts * GROUPS + GROUP, gl.int64) * size
    to = first + gl.cast(own * GROUPS, gl.int64) * size
    store_partial(acc, in_block(to), in_block(width), COUNT)
    done = last_to_arrive(semaphores + tile * GROUPS + GROUP, parts - 1)
    # Each warpgroup has its share of the ring, in whole rows.
    address = shared_at(GROUP * (RING_BYTES // 128 // GROUPS * 128))
    if done:
        mbarrier.wait(unused(ring), 0)
        for i in range(parts - 1):
            other = gl.where(i < own, i, i + 1)
            fetch_partial(address + i * size, first + gl.cast(other * GROUPS, gl.int64) * size, size)
        fetched()
    return done, (unit >= whole, own, parts, address, size)


@gluon.jit
def summed(blocks, cut, first):
    """Adds up, in order, the parts of some of the accumulator's blocks, of which this warpgroup has one in registers.

    Args:
        cut: (whether the tile is cut, which part this is, how many there are, where the others are, size of one).
        first: which the first of the blocks is.
    """
    is_cut, own, parts, address, size = cut
    if is_cut:
        total = zeros_of(len(blocks))
        for part in range(parts):
            if part == own:
                total = sums_of(total, blocks)
            else:
                at = address + gl.where(part < own, part, part - 1) * size + first * 2048
                total = add_fetched(total, in_block(at))
        blocks = total
    return blocks


@gluon.jit
def sums_of(left, right):
    """The sums of two accumulators' blocks."""
    made = ()
    for i in gl.static_range(len(left)):
        made += (left[i] + right[i],)  # type: ignore[assignment]
    return made


# ---------------------------------------------------------------------------------------------------------------------
# What comes after the K loop


@gluon.jit
def columns_of(blocks):
    """Blocks of 8 columns, a power of two of them, as one tensor; no number moves."""
    COUNT: gl.constexpr = len(blocks)
    if COUNT == 1:
        return blocks[0]
    else:
        left = columns_of(blocks_of(blocks, 0, COUNT // 2))
        right = columns_of(blocks_of(blocks, COUNT // 2, COUNT // 2))
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8 * COUNT, 16])
        return gl.convert_layout(beside(left, right), LAYOUT, assert_trivial=True)


@builtin
def store_slot(at, warp, row, col, X_FORM, Y_FORM, _semantic=None):
    """One thread of a warp begins to store a part of the output from a slot.

    Args:
        at: where the slot is, in bytes behind the beginning of shared memory.
        row, col: where the part begins.
        X_FORM, Y_FORM: how the operands lie.
    """
    number = _maps(X_FORM, Y_FORM)[2]
    gl.inline_asm_elementwise(
        "{ .reg .pred own, one; .reg .b32 warp, at; .reg .b64 map; elect.sync _|one, 0xffffffff; mov.u32 warp, %tid.x;"
        "shr.u32 warp, warp, 5; and.b32 warp, warp, 3; setp.eq.and.u32 own, warp, $2, one; mov.b32 at, global_smem;"
        f"add.s32 at, at, $1; mov.b64 map, gemm_any_width_param_{number}; cvta.param.u64 map, map;"
        "@own cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [map, {$4, $3}], [at];"
        "@own cp.async.bulk.commit_group; mov.b32 $0, 0; }",
        "=r,r,r,r,r", [at, warp, row, col], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@builtin
def wait_for_slot(warp, _semantic=None):
    """Waits, in one warp, until its stores have read their slots."""
    gl.inline_asm_elementwise(
        "{ .reg .pred own; .reg .b32 warp; mov.u32 warp, %tid.x; shr.u32 warp, warp, 5; and.b32 warp, warp, 3;"
        "setp.eq.u32 own, warp, $1; @own cp.async.bulk.wait_group.read 0; mov.b32 $0, 0; }",
        "=r,r", [warp], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@gluon.jit
def finish_part(
    blocks, out, slots, first_slot, spread, number, in_ring, args, shape, row, col, EPILOGUE: gl.constexpr,
    CAST: gl.constexpr, SWAP: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Epilogue and store of 64 rows of X by some of Y, which begin at `row` and `col`, through a slot.

    Args:
        first_slot, spread: see `finish_tile`.
        number: which part of the tile this is.
        in_ring: the part's slot, counted from the first, where parts are spread over the ring.
    """
    PAIRED: gl.constexpr = X_FORM == "pairs" or Y_FORM == "pairs"
    # A pair's slot has room for both numbers.
    SLOT: gl.constexpr = out.block_type.shape[0] * out.block_type.shape[1] * (4 if PAIRED else 2)
    slot = first_slot + gl.where(spread, in_ring, number % BUFFERS)
    # Issuing a store takes a while, so warps take turns.
    warp = gl.where(spread, number % 4, number % BUFFERS)
    at_row, at_col = row, col
    if SWAP:
        at_row, at_col = col, row
    value, at_row, at_col = rounded(
        columns_of(blocks), out, args, shape, at_row, at_col, EPILOGUE, CAST, SWAP, PAIRED
    )
    if spread == 0:
        # This warp may still be storing an earlier part from the slot.
        wait_for_slot(warp)
        barrier()
    slots.index(slot * (2 if PAIRED else 1)).store(value)
    hopper.fence_async_shared()
    barrier()
    store_slot(slot * SLOT, warp, at_row, at_col, X_FORM, Y_FORM)


@gluon.jit
def finish_tile(
    acc, out, slots, args, shape, row, col, width, spread, first_slot, cut, EPILOGUE: gl.constexpr, CAST: gl.constexpr,
    SWAP: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr, WIDTHS: gl.constexpr, X_ROWS: gl.constexpr,
    BUFFERS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Epilogue and store of a warpgroup's part of a tile, `PART` columns at a time.

    The last columns may overlap those before, and are stored twice then, with the same bits.

    Args:
        spread: whether each part has a slot of its own, in the ring, where this warpgroup's rows of X were: 64 rows of
            X have one in each stage. Words are smaller, so all parts lie side by side there. Otherwise parts
            take the warpgroup's `BUFFERS` in turn.
        first_slot: the first of these slots.
        cut: see `summed`; None where no tile is cut.
    """
    COUNT: gl.constexpr = WIDTHS[-1] // 8
    WHOLE: gl.constexpr = WIDTHS[-1] // PART
    # Slots of 64 rows of X, and of a stage's.
    OWN: gl.constexpr = 64 // PART
    STAGE: gl.constexpr = 1 if X_FORM == "packed" else X_ROWS // PART
    whole = width // PART
    parts = gl.cdiv(width, PART)
    own = OWN
    if X_FORM == "packed":
        own = parts
    for m in gl.static_range(len(acc) // COUNT):
        for i in gl.static_range(WHOLE):
            if i < whole:
                blocks = blocks_of(acc, m * COUNT + i * PART // 8, PART // 8)
                if cut is not None:
                    blocks = summed(blocks, cut, m * (width // 8) + i * PART // 8)
                finish_part(
                    blocks, out, slots, first_slot, spread, m * parts + i, m * own + i * STAGE, args, shape,
                    row + 64 * m, col + i * PART, EPILOGUE, CAST, SWAP, X_FORM, Y_FORM, BUFFERS,
                )  # fmt: skip
        if whole < parts:
            behind = last_blocks(blocks_of(acc, m * COUNT, COUNT), in_block(width), PART // 8, WIDTHS)
            if cut is not None:
                behind = summed(behind, cut, m * (width // 8) + width // 8 - PART // 8)
            finish_part(
                behind, out, slots, first_slot, spread, m * parts + whole, m * own + whole * STAGE, args, shape,
                row + 64 * m, col + width - PART, EPILOGUE, CAST, SWAP, X_FORM, Y_FORM, BUFFERS,
            )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The kernel


@gluon.jit
def consume(
    out, slots, ring, step_args, args, workspace, shape, state, tile, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    PLACE: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr, KIND: gl.constexpr, PROMOTES: gl.constexpr,
    EVERY: gl.constexpr, X_ROWS: gl.constexpr, WIDTHS: gl.constexpr, SWAP: gl.constexpr, PINGPONG: gl.constexpr,
    FORMAT: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr, BUFFERS: gl.constexpr, PART: gl.constexpr,
    RING_BYTES: gl.constexpr, BARRIERS_AT: gl.constexpr,
):  # fmt: skip
    """One warpgroup's part of the work."""
    stages, width = ring[1], tile[0]
    units, whole, parts = state[0], state[1], state[2]
    OWN: gl.constexpr = X_ROWS if PINGPONG else X_ROWS // GROUPS
    FIRST: gl.constexpr = 0 if PINGPONG else GROUP * OWN
    COUNT: gl.constexpr = WIDTHS[-1] // 8
    address = shared_at(0)
    # In units of 16 bytes.
    OWN_AT: gl.constexpr = x_bytes_of(FIRST, FORMAT) // 16
    X_BLOCK: gl.constexpr = x_bytes_of(X_ROWS, FORMAT) // 16
    head_x = (
        address >> 4 if X_FORM == "packed" else matrix_descriptor(address, 8192 if X_FORM == "turned" else 16)
    )
    heads = (
        head_x + OWN_AT,
        matrix_descriptor(address, 8192 if Y_FORM == "turned" else 16) + stages * X_BLOCK,
    )
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    every = programs
    steps = gl.cdiv(shape[2], step_of(KIND))
    if PINGPONG:
        first += GROUP * every
        every *= 2
        if GROUP == 1:
            stage, phase = later(stage, phase, steps, stages)
    if first >= units:
        mbarrier.arrive(unused(ring))
    for unit in range(first, units, every):
        row, col, end, first_k, last_k = corner(unit, state, shape, tile, PLACE, X_ROWS, SWAP, X_FORM)
        row, col = computed(row), computed(col)
        if PINGPONG:
            mbarrier.wait(turn_of(ring, GROUP), turn)
            turn = turn ^ 1
        scales = ()
        if EVERY is not None:
            scales = scales_of(step_args, row + FIRST, col, (end, shape[1]), first_k, EVERY[0], EVERY[1])
        acc, stage, phase = sum_steps(
            heads, ring, first_k, last_k, stage, phase, width, scales, OWN // 64 * COUNT, KIND, PROMOTES, X_ROWS,
            FIRST, WIDTHS, FORMAT, X_FORM, Y_FORM, BARRIERS_AT,
        )  # fmt: skip
        if PINGPONG:
            mbarrier.arrive(turn_of(ring, 1 - GROUP))
        if not PROMOTES:
            acc = last_step_done(acc, ring, stage, BARRIERS_AT)
        if unit + every >= units:
            # One thread arrives, for all four warps.
            barrier()
            mbarrier.arrive(unused(ring))
        done = unit >= 0
        cut = None
        # The program's last tile: nothing is loaded any more.
        spread = unit + programs >= units
        if X_FORM != "packed":
            spread = spread & (gl.cdiv(width, PART) <= stages)
        if workspace is not None:
            cut = (unit >= whole, 0, parts, 0, 0)
            if unit >= whole:
                done, cut = combine(
                    acc, unit, ring, state, workspace, width, GROUP, GROUPS, COUNT, RING_BYTES
                )
            spread = spread & (unit < whole)
        in_ring = FIRST // PART
        if X_FORM == "packed":
            in_ring = FIRST // 64 * gl.cdiv(width, PART)
        first_slot = gl.where(spread, in_ring, RING_BYTES // (128 * PART) + GROUP * BUFFERS)
        if spread:
            if PINGPONG or X_FORM == "packed":
                # Other warpgroups read what is there.
                mbarrier.wait(unused(ring), 0)
            barrier()
        if done:
            finish_tile(
                acc, out, slots, args, (end, shape[1]), row + FIRST, col, width, spread, first_slot, cut, EPILOGUE,
                CAST, SWAP, X_FORM, Y_FORM, WIDTHS, X_ROWS, BUFFERS, PART,
            )  # fmt: skip
        if PINGPONG:
            # The stages of the tile between are the other warpgroup's.
            stage, phase = later(stage, phase, steps, stages)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "M", "N", "K", "units", "whole", "parts", "part_k", "tiles_m", "tiles_n", "width", "band_m", "x_box", "y_box",
        "step_bytes", "streams", "stages",
    ]
)  # fmt: skip
def gemm_any_width(
    x, y, out, scales, shifts, M, N, K, units, whole, parts, part_k, tiles_m, tiles_n, width, band_m, x_box, y_box,
    step_bytes, streams, stages, place_args, step_args, args, workspace,
    PLACE: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr, KIND: gl.constexpr, PROMOTES: gl.constexpr,
    EVERY: gl.constexpr, X_ROWS: gl.constexpr, LEAST: gl.constexpr, MOST: gl.constexpr, EACH: gl.constexpr,
    RING_ROWS: gl.constexpr, GROUPS: gl.constexpr, SWAP: gl.constexpr, PINGPONG: gl.constexpr, FORMAT: gl.constexpr,
    X_FORM: gl.constexpr, Y_FORM: gl.constexpr, BUFFERS: gl.constexpr, REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr, SOURCE: gl.constexpr,
):  # fmt: skip
    """As many programs as run at once, which take units in turn: whole tiles, and then parts of tiles.

    Args:
        x, y: descriptors of X and of Y. Only their tensor maps are used.
        out: descriptor of the part of the output that is stored at a time, which is of 64 rows of X by some of Y.
        scales, shifts: descriptors of the group parameters of a packed weight, as far as it has some. Only their tensor
            maps are used.
        units, whole: how many units there are, and how many of them are whole tiles.
        parts, part_k: in how many parts each of the other tiles is cut along K, and K in a part.
        tiles_m, tiles_n: tiles along M and N.
        width: rows of Y in a tile, a multiple of `EACH` from `LEAST` to `MOST`.
        band_m: the height of a tile band, see `order`.
        x_box, y_box: rows that the tensor maps load at a time.
        step_bytes: bytes that are loaded in a step along K, of which boxes may load some twice.
        streams: 1 where X is the first to leave L2, 2 where Y is, 0 where neither is.
        stages: how many there are, at most `STAGES`.
        place_args, step_args, args: run-time arguments of PLACE, of `scales_of` and of the epilogue.
        workspace: (partials, semaphores): memory for an fp32 tile a part, and zeros, one for each tile that is cut and
            warpgroup, which are zeros again afterwards. None where no tile is cut.
        PLACE: `place.sized_tile`, or `place.sized_part` with a workspace.
        KIND, PROMOTES: see `multiply_steps`.
        EVERY: rows of A and columns of B that share a scale along K; None where there are no such scales.
        RING_ROWS: rows of all stages, at least.
        GROUPS: warpgroups that multiply: 1, 2 or 3; 2 with PINGPONG.
        FORMAT: see `multiply_steps`.
        X_FORM, Y_FORM: how the operands lie.
        BUFFERS: slots that each warpgroup has beside the ring.
        REGISTERS, LOADER_REGISTERS: of a thread in all warpgroups but the first, and of the loader's.
        SOURCE: tells versions of the files apart that write assembly.
    """
    shape = (M, N, K)
    state = (units, whole, parts, part_k, tiles_m, tiles_n, place_args)
    tile = (width, band_m)
    loads = (x_box, y_box, step_bytes, streams)
    WIDTHS: gl.constexpr = widths_of(LEAST, MOST, EACH)
    PAIRED: gl.constexpr = X_FORM == "pairs" or Y_FORM == "pairs"
    PART: gl.constexpr = out.block_type.shape[0] if SWAP else out.block_type.shape[1] * (2 if PAIRED else 1)
    STEP: gl.constexpr = step_of(KIND)
    RING_BYTES: gl.constexpr = RING_ROWS * ROW
    SLOT: gl.constexpr = 64 * PART * 2
    SLOTS: gl.constexpr = RING_BYTES // SLOT + GROUPS * BUFFERS
    # The ring and the warpgroups' slots. They are the largest, so that shared memory begins with them.
    COUNT: gl.constexpr = SLOTS * (2 if PAIRED else 1)
    slots = gl.allocate_shared_memory(out.dtype, [COUNT] + out.block_type.shape, out.layout)  # noqa: RUF005
    barriers = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 4, 1], mbarrier.MBarrierLayout())
    BARRIERS_AT: gl.constexpr = SLOTS * SLOT
    ring = (barriers, stages)
    # Four warps of each warpgroup read a stage.
    begin(stages, 4 * (1 if PINGPONG else GROUPS), GROUPS, BARRIERS_AT, X_FORM, Y_FORM)
    hopper.fence_async_shared()
    load_ahead(
        ring, shape, state, tile, loads, PLACE, X_ROWS, STEP, SWAP, FORMAT, X_FORM, Y_FORM, BARRIERS_AT
    )
    if PINGPONG:
        mbarrier.arrive(turn_of(ring, 0))
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (
                    consume,
                    (
                        out, slots, ring, step_args, args, workspace, shape, state, tile, 0, GROUPS, PLACE, EPILOGUE,
                        CAST, KIND, PROMOTES, EVERY, X_ROWS, WIDTHS, SWAP, PINGPONG, FORMAT, X_FORM, Y_FORM, BUFFERS,
                        PART, RING_BYTES, BARRIERS_AT,
                    ),
                ),
                (
                    produce,
                    (ring, shape, state, tile, loads, PLACE, X_ROWS, STEP, SWAP, FORMAT, X_FORM, Y_FORM, BARRIERS_AT),
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
                        out, slots, ring, step_args, args, workspace, shape, state, tile, 0, GROUPS, PLACE, EPILOGUE,
                        CAST, KIND, PROMOTES, EVERY, X_ROWS, WIDTHS, SWAP, PINGPONG, FORMAT, X_FORM, Y_FORM, BUFFERS,
                        PART, RING_BYTES, BARRIERS_AT,
                    ),
                ),
                (
                    consume,
                    (
                        out, slots, ring, step_args, args, workspace, shape, state, tile, 1, GROUPS, PLACE, EPILOGUE,
                        CAST, KIND, PROMOTES, EVERY, X_ROWS, WIDTHS, SWAP, PINGPONG, FORMAT, X_FORM, Y_FORM, BUFFERS,
                        PART, RING_BYTES, BARRIERS_AT,
                    ),
                ),
                (
                    produce,
                    (ring, shape, state, tile, loads, PLACE, X_ROWS, STEP, SWAP, FORMAT, X_FORM, Y_FORM, BARRIERS_AT),
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
                        out, slots, ring, step_args, args, workspace, shape, state, tile, 0, GROUPS, PLACE, EPILOGUE,
                        CAST, KIND, PROMOTES, EVERY, X_ROWS, WIDTHS, SWAP, PINGPONG, FORMAT, X_FORM, Y_FORM, BUFFERS,
                        PART, RING_BYTES, BARRIERS_AT,
                    ),
                ),
                (
                    consume,
                    (
                        out, slots, ring, step_args, args, workspace, shape, state, tile, 1, GROUPS, PLACE, EPILOGUE,
                        CAST, KIND, PROMOTES, EVERY, X_ROWS, WIDTHS, SWAP, PINGPONG, FORMAT, X_FORM, Y_FORM, BUFFERS,
                        PART, RING_BYTES, BARRIERS_AT,
                    ),
                ),
                (
                    consume,
                    (
                        out, slots, ring, step_args, args, workspace, shape, state, tile, 2, GROUPS, PLACE, EPILOGUE,
                        CAST, KIND, PROMOTES, EVERY, X_ROWS, WIDTHS, SWAP, PINGPONG, FORMAT, X_FORM, Y_FORM, BUFFERS,
                        PART, RING_BYTES, BARRIERS_AT,
                    ),
                ),
                (
                    produce,
                    (ring, shape, state, tile, loads, PLACE, X_ROWS, STEP, SWAP, FORMAT, X_FORM, Y_FORM, BARRIERS_AT),
                ),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    # What only assembly uses in between must not be given to anything else.
    mbarrier.invalidate(barriers.index(0))
