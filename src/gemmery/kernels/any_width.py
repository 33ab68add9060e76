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
its blocks have arrived, `free` when all warps have read them. `turn` says which warpgroup may multiply. `unused` is
complete when no warpgroup reads the ring any more.

A tile goes to memory in parts of 64 rows of X by some of Y, through slots of shared memory. Each warpgroup has some
slots of its own. A program's last tile has a slot for each part, in the ring.

Operands have a form, which says what the coordinates of their tensor maps are: "rows" are (k, row), "turned" is
(row, k), where adjacent elements lie along the rows, and "pairs" are (k, row of 8, half, eight). Rows of a
pair come from its two halves in turn, eight at a time, so that both numbers that make one of the output are in one
thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .rings import barrier, beside, last_to_arrive, later, rounded

#: Bytes of a row of a stage, which is what TMA swizzles.
ROW = gl.constexpr(128)
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


@gluon.constexpr_function
def step_of(KIND):
    """Elements along K of a stage."""
    return 64 if "16" in KIND else 128


#: The upper half of all matrix descriptors: swizzled by 128 bytes, 1024 bytes from one 8 rows to the next.
_HEAD = 1 << 30 | 64
#: Assembly that waits, each thread on its own, until the phase of this parity of a barrier is complete. Before Gluon's
#: own, all threads of a warpgroup meet.
_WAIT = "\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [{barrier}], {phase}; @!done bra AGAIN;"


def _release(stage, arrives):
    """Assembly that says that a warp has read a stage, at its barrier `free`.

    Args:
        stage: the address of the stage's barrier `full`.
        arrives: a predicate.
    """
    return (
        f"elect.sync _|one, 0xffffffff; and.pred one, one, {arrives};"
        f"@one mbarrier.arrive.shared::cta.b64 _, [{stage} + {8 * STAGES.value}];"
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


def _products(sums, KIND, turned, adds):
    """Assembly that begins a step's products, of what registers x and y describe.

    Args:
        sums: for each 64 rows of X the registers of the sums.
        KIND, turned: see `multiply_steps`; `turned` is of X and of Y.
        adds: whether the step is added to what the registers have: a predicate, or 0.
    """
    # A fourth of a step along K is 32 bytes further, or 16 rows; in units of 16 bytes.
    x_step, y_step = (128 if each else 2 for each in turned)
    wide = "16" in KIND
    # Only operands of 16 bits can be turned.
    behind = f", {int(turned[0])}, {int(turned[1])}" if wide else ""
    lines = ["wgmma.fence.sync.aligned;"]
    for row, registers in enumerate(sums):
        for i in range(4):
            # 64 rows of 128 bytes are 512 units, however they lie.
            lines.append(
                f"add.s32 own, x, {512 * row + i * x_step}; mov.b64 own_x, {{own, {_HEAD}}};"
                f"add.s32 own, y, {i * y_step}; mov.b64 own_y, {{own, {_HEAD}}};"
                f"wgmma.mma_async.sync.aligned.m64n{2 * len(registers)}k{16 if wide else 32}.f32.{KIND}"
                f" {{{', '.join(registers)}}}, own_x, own_y, {'1' if i else adds}, 1, 1{behind};"
            )
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned;"])


def _step(sums, KIND, turned):
    """Assembly of a step's products, and of the release of the stage that they are the last to read.

    Args:
        sums: for each 64 rows of X the registers of the accumulator.
        KIND, turned: see `multiply_steps`.
    """
    # This step's products stay under way, so those of the step before are done with their blocks.
    return (
        f"{_products(sums, KIND, turned, 'adds')} wgmma.wait_group.sync.aligned 1;"
        f"{_release('before', 'adds')} setp.eq.s32 adds, 0, 0;"
    )


def _promoted_step(sums, KIND, spans):
    """As `_step`, but the products have registers of their own, which are then added to the accumulator.

    Other warpgroups multiply meanwhile.

    Args:
        spans: how many spans of columns a tile can touch, see `scales_of`; 0 where there are no scales.
    """
    own = [
        [f"n{len(registers) * row + i}" for i in range(len(registers))] for row, registers in enumerate(sums)
    ]
    pieces = list(zip(sums, own, strict=True))
    if spans:
        before, added = _scales(spans), "".join(_scaled_sums(*piece) for piece in pieces)
    else:
        before = ""
        added = "".join(f"add.f32 {x}, {x}, {y};" for piece in pieces for x, y in zip(*piece, strict=True))
    return (
        f"{{ .reg .f32 n<{sum(map(len, own))}>; {_products(own, KIND, (False, False), '0')} {before}"
        f"wgmma.wait_group.sync.aligned 0; {_release('at', 'always')} {added} }}"
    )


def _scales(spans):
    """Assembly that multiplies the scales of a thread's two rows by those of all spans, and loads the next step's."""
    return (
        "".join(f"mul.f32 both{i}{j}, row{i}, col{j};" for i in range(2) for j in range(spans))
        + "setp.gt.s32 more, left, 1;"
        + "".join(
            f"add.s64 at_{kind}{i}, at_{kind}{i}, {kind}_step; @more ld.global.f32 {kind}{i}, [at_{kind}{i}];"
            for kind, count in (("row", 2), ("col", spans))
            for i in range(count)
        )
    )


def _scaled_sums(totals, numbers):
    """Assembly that multiplies a step's numbers by their scales and adds them.

    The tile's first span has `ahead` blocks of 8 columns. The blocks behind them have the scale of the next span.
    """
    lines = []
    for block in range(len(totals) // 4):
        # A span has 16 blocks.
        span = block // 16
        lines.append(f"setp.le.s32 less, ahead, {block % 16};")
        for row in range(2):
            lines.append(f"selp.f32 scale, both{row}{span + 1}, both{row}{span}, less;")
            lines += [
                f"fma.rn.f32 {totals[i]}, {numbers[i]}, scale, {totals[i]};"
                for i in range(4 * block + 2 * row, 4 * block + 2 * row + 2)
            ]
    return "".join(lines)


def _scales_of(first, spans):
    """Assembly that declares the registers for scales, and loads those of the first step.

    Args:
        first: the number of the first register of what `scales_of` gives.
    """
    at = {"row0": first, "row1": first + 2} | {f"col{j}": first + 4 + 4 * j for j in range(spans)}
    loads = "".join(f"mov.b64 at_{name}, ${i}; ld.global.f32 {name}, [at_{name}];" for name, i in at.items())
    return (
        ".reg .pred less; .reg .f32 row0, row1, col0, col1, col2, scale;"
        ".reg .f32 both00, both01, both02, both10, both11, both12;"
        ".reg .b64 at_row0, at_row1, at_col0, at_col1, at_col2, row_step, col_step; .reg .b32 ahead;"
        f"mov.b64 row_step, ${first + 16}; mov.b64 col_step, ${first + 20}; mov.b32 ahead, ${first + 24}; {loads}"
    )


@builtin
def multiply_steps(
    acc, full, stage, phase, stages, steps, head_x, head_y, width, scales, X_ROWS, KIND, PROMOTES, X_FORM, Y_FORM,
    WIDTHS, _semantic=None,
):  # fmt: skip
    """The K loop of a warpgroup: the sum of the products of some rows of X and `width` of Y, of at least one step.

    The products of the last step are still under way, see `last_step_done`, unless they are promoted. All arguments but
    `acc` are blocks, see `in_block`. The loop is within the assembly, since one around several pieces of assembly takes
    longer.

    Args:
        acc: zeros, for each 64 rows of X as many blocks as the largest width has. Those behind `width` stay so.
        full: the address of the first stage's barrier.
        stage, phase: of the first step; see `rings.later`.
        steps: how many there are.
        head_x, head_y: matrix descriptors of the first stage's blocks, see `matrix_descriptor`.
        KIND: the types of X and of Y, as PTX names them, with a point between them.
        scales: what `scales_of` gives for steps that are multiplied by scales, which are promoted; (), where none is.
        PROMOTES: whether each step is summed by itself and then added. Tensor cores sum fp8 with 14 bits.
        X_FORM, Y_FORM: how the operands lie.
        WIDTHS: what `width` may be, in order.
    """
    widths = [_value(width) for width in _value(WIDTHS)]
    numbers = 4 * len(acc.values)
    # Every operand comes four times, a register for each number of a thread.
    full_, stage_, phase_, stages_, steps_, x_, y_, width_ = (f"${2 * numbers + 4 * i}" for i in range(8))
    turned = _value(X_FORM) == "turned", _value(Y_FORM) == "turned"
    # A row of 128 bytes is 8 units of 16.
    x_rows = 8 * _value(X_ROWS)
    go_on = (
        f"mov.b32 before, at; add.s32 at, at, 8; add.s32 x, x, {x_rows}; add.s32 y, y, y_rows;"
        f"add.s32 stage, stage, 1; setp.ge.s32 wraps, stage, {stages_};"
        f"@wraps mov.b32 stage, 0; @wraps mov.b32 at, {full_}; @wraps mov.b32 x, {x_}; @wraps mov.b32 y, {y_};"
        "@wraps xor.b32 phase, phase, 1; sub.s32 left, left, 1; setp.gt.s32 more, left, 0; @more bra.uni STEP;"
    )
    arrived, kind = _WAIT.format(barrier="at", phase="phase"), _value(KIND)
    # A tile may begin within a span.
    spans = 1 + -(-widths[-1] // 128) if len(scales) else 0
    cases = []
    for each in widths:
        sums = [[f"${first + i}" for i in range(each // 2)] for first in range(0, numbers, widths[-1] // 2)]
        step = _promoted_step(sums, kind, spans) if _value(PROMOTES) else _step(sums, kind, turned)
        cases.append(f"{{\nSTEP: {arrived} {step} {go_on} }}")
    constraints = ["=f"] * numbers + [str(i) for i in range(numbers)] + ["r"] * 32
    constraints += ["l"] * 24 + ["r"] * 4 if spans else []
    made = gl.inline_asm_elementwise(
        f"{{ {_scales_of(2 * numbers + 32, spans) if spans else ''}"
        ".reg .pred adds, always, done, one, wraps, more; .reg .b64 own_x, own_y; setp.eq.s32 always, 0, 0;"
        ".reg .b32 stage, phase, at, before, left, x, y, y_rows, own;"
        f"mov.b32 stage, {stage_}; mov.b32 phase, {phase_}; mov.b32 left, {steps_}; setp.ne.s32 adds, 0, 0;"
        f"mad.lo.s32 at, stage, 8, {full_}; mov.b32 before, at; mad.lo.s32 x, stage, {x_rows}, {x_};"
        f"mul.lo.s32 y_rows, {width_}, 8; mad.lo.s32 y, stage, y_rows, {y_};"
        f"{_switch(width_, widths, cases)} }}",
        ",".join(constraints),
        [*acc.values, full, stage, phase, stages, steps, head_x, head_y, width, *scales],
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


def _maps(X_FORM, Y_FORM):
    """The numbers of the kernel's parameters that are the tensor maps of X, of Y and of the output.

    The sizes and strides of each are parameters, too.
    """
    behind_x, behind_y = (9 if _value(form) == "pairs" else 5 for form in (X_FORM, Y_FORM))
    return 0, behind_x, behind_x + behind_y


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
        for i, number in enumerate(_maps(X_FORM, Y_FORM))
    )
    most = STAGES.value
    # Warp w makes barriers w, w + 4, ..., a thread each: `full` of all stages, then `free`, then the other three.
    choice = "".join(
        f"setp.ge.s32 own, number, {first}; @own mov.b32 count, {count}; @own mov.b32 moved, {by};"
        for first, by, count in (
            ("0", "0", 1), ("$1", "free", _value(READERS)), ("both", "others", 1),
            ("last", "others", _value(GROUPS)),
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
        "setp.le.s32 own, number, last;"
        f"@own mbarrier.init.shared::cta.b64 [at + {_value(AT)}], count; mov.b32 $0, 0; }}",
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
        f"{{ .reg .pred one, arrives; setp.eq.s32 arrives, 0, 0; {_release('$1', 'arrives')} mov.b32 $0, 0; }}",
        "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


def _loads(to, row, k, rows, box, MAP, FORM, streams):
    """Assembly that begins to load an operand's block of a stage, `box` rows at a time; mostly that is all of them.

    The last box ends where the block does, and may have rows of the one before it.

    Args:
        to, row, k, rows, box: registers; see `load_steps`.
        MAP: the number of the kernel's parameter that is the operand's tensor map.
        FORM: how the operand lies.
        streams: the predicate that says whether the operand is the first to leave L2.
    """

    def load(to, row):
        dims, at, before = {
            "rows": (2, f"{{{k}, {row}}}", ""),
            "turned": (2, f"{{{row}, {k}}}", ""),
            "pairs": (4, f"{{{k}, zero, zero, eight}}", f"mov.b32 zero, 0; shr.u32 eight, {row}, 4;"),
        }[FORM]
        load = f"cp.async.bulk.tensor.{dims}d.shared::cluster.global.mbarrier::complete_tx::bytes"
        return (
            f"{before} @{streams} {load}.L2::cache_hint [{to}], [map, {at}], [at], policy;"
            f"@!{streams} {load} [{to}], [map, {at}], [at];"
        )

    return (
        f"{{ .reg .pred more; .reg .b64 map; .reg .b32 last, first, n, to, zero, eight;"
        f"mov.b64 map, gemm_any_width_param_{MAP}; cvta.param.u64 map, map; {load(to, row)}"
        f"sub.s32 last, {rows}, {box}; setp.gt.s32 more, last, 0;"
        f"@!more bra LOADED; mov.b32 first, {box};\n"
        f"NEXT: min.s32 n, first, last; mad.lo.s32 to, n, {ROW.value}, {to}; add.s32 n, n, {row};"
        f"{load('to', 'n')} add.s32 first, first, {box}; setp.lt.s32 more, first, {rows}; @more bra NEXT;\nLOADED: }}"
    )


@builtin
def load_steps(
    full, stage, phase, stages, k, last_k, row, x_box, col, width, y_box, count, streams, X_ROWS, STEP,
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
        X_FORM, Y_FORM: how the operands lie.
        AHEAD: True before warps have their roles: the stages are unused, so there is nothing to wait for, and the first
            warp of the warpgroup loads. False in the loader's warp.
    """
    full_, stage_, phase_, stages_, k_, last_, row_, x_box_, col_, width_, y_box_, count_, streams_ = (
        f"${i}" for i in range(1, 14)
    )
    x_bytes = _value(X_ROWS) * ROW.value
    x_map, y_map, _ = _maps(X_FORM, Y_FORM)
    x = _loads("x", row_, "k", str(_value(X_ROWS)), x_box_, x_map, _value(X_FORM), "x_streams")
    y = _loads("y", col_, "k", width_, y_box_, y_map, _value(Y_FORM), "y_streams")
    if _value(AHEAD):
        alone, free = "mov.u32 at, %tid.x; setp.ge.u32 one, at, 32; @one bra DONE;", ""
    else:
        alone, free = "", _WAIT.format(barrier=f"at + {8 * STAGES.value}", phase="phase")
    setup = (
        f"{alone} elect.sync _|one, 0xffffffff; @!one bra DONE;"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
        f"setp.eq.s32 x_streams, {streams_}, 1; setp.eq.s32 y_streams, {streams_}, 2;"
        f"mov.b32 stage, {stage_}; mov.b32 phase, {phase_}; mov.b32 k, {k_}; mad.lo.s32 at, stage, 8, {full_};"
        f"mov.b32 x_first, global_smem; mad.lo.s32 y_first, {stages_}, {x_bytes}, x_first;"
        f"mul.lo.s32 y_bytes, {width_}, {ROW.value};"
        f"mad.lo.s32 x, stage, {x_bytes}, x_first; mad.lo.s32 y, stage, y_bytes, y_first;"
    )
    go_on = (
        f"add.s32 k, k, {_value(STEP)}; add.s32 at, at, 8; add.s32 x, x, {x_bytes}; add.s32 y, y, y_bytes;"
        f"add.s32 stage, stage, 1; setp.ge.s32 wraps, stage, {stages_};"
        f"@wraps mov.b32 stage, 0; @wraps mov.b32 at, {full_}; @wraps mov.b32 x, x_first; @wraps mov.b32 y, y_first;"
        "@wraps xor.b32 phase, phase, 1; bra STEP;"
    )
    gl.inline_asm_elementwise(
        "{ .reg .pred one, done, wraps, ends, x_streams, y_streams; .reg .b64 policy;"
        f".reg .b32 stage, phase, at, k, x, y, x_first, y_first, y_bytes; {setup}\n"
        f"STEP: setp.ge.s32 ends, k, {last_}; @ends bra DONE; {free}"
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [at], {count_}; {x} {y} {go_on}\nDONE: mov.b32 $0, 0; }}",
        ",".join(["=r"] + ["r"] * 13),
        [full, stage, phase, stages, k, last_k, row, x_box, col, width, y_box, count, streams],
        dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@gluon.jit
def corner(unit, state, shape, tile, PLACE: gl.constexpr, X_ROWS: gl.constexpr, SWAP: gl.constexpr):
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
    y_rows = shape[0] if SWAP else shape[1]
    moves = (unit < state[1]) | (state[1] == 0)
    row = gl.where(moves, gl.minimum(row, gl.maximum(x_rows - X_ROWS, 0)), row)
    col = gl.where(moves, gl.minimum(col, gl.maximum(y_rows - width, 0)), col)
    return row, col, end, first_k, last_k


@gluon.jit
def load_ahead(
    ring, shape, state, tile, loads, PLACE: gl.constexpr, X_ROWS: gl.constexpr, STEP: gl.constexpr,
    SWAP: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr, BARRIERS_AT: gl.constexpr,
):  # fmt: skip
    """Loads the first steps of the program's first unit, as many as there are stages, before warps have their roles."""
    stages = ring[1]
    x_box, y_box, count, streams = loads
    row, col, _, first_k, last_k = corner(gl.program_id(0), state, shape, tile, PLACE, X_ROWS, SWAP)
    barrier()
    last_k = first_k + gl.minimum(last_k - first_k, stages * STEP)
    load_steps(
        shared_at(BARRIERS_AT), 0, 0, stages, first_k, last_k, row, x_box, col, tile[0], y_box, count, streams, X_ROWS,
        STEP, X_FORM, Y_FORM, True,
    )  # fmt: skip


@gluon.jit
def produce(
    ring, shape, state, tile, loads, PLACE: gl.constexpr, X_ROWS: gl.constexpr, STEP: gl.constexpr,
    SWAP: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr, BARRIERS_AT: gl.constexpr,
):  # fmt: skip
    """Loads what `consume` multiplies, in the same order, behind what `load_ahead` does."""
    stages = ring[1]
    x_box, y_box, count, streams = loads
    stage = gl.to_tensor(0)
    # The parity before the first: what has not been used yet is free.
    phase = gl.to_tensor(1)
    for unit in range(gl.program_id(0), state[0], gl.num_programs(0)):
        row, col, _, first_k, last_k = corner(unit, state, shape, tile, PLACE, X_ROWS, SWAP)
        steps = gl.cdiv(last_k - first_k, STEP)
        if unit == gl.program_id(0):
            ahead = gl.minimum(stages, steps)
            first_k += ahead * STEP
            steps -= ahead
            stage, phase = later(stage, phase, ahead, stages)
        load_steps(
            shared_at(BARRIERS_AT), stage, phase, stages, first_k, last_k, row, x_box, col, tile[0], y_box, count,
            streams, X_ROWS, STEP, X_FORM, Y_FORM, False,
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
    PROMOTES: gl.constexpr, X_ROWS: gl.constexpr, WIDTHS: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr,
    BARRIERS_AT: gl.constexpr,
):  # fmt: skip
    """The sum of a warpgroup's products from `first_k` to `last_k`, at least a step.

    Args:
        heads: matrix descriptors of its X and of Y in the first stage.
        width: of the tile.
        scales: see `multiply_steps`.
        COUNT: blocks of 8 columns.
    """
    steps = gl.cdiv(last_k - first_k, step_of(KIND))
    acc = multiply_steps(
        zeros_of(COUNT), in_block(shared_at(BARRIERS_AT)), in_block(stage), in_block(phase), in_block(ring[1]),
        in_block(steps), in_block(heads[0]), in_block(heads[1]), in_block(width), scales, X_ROWS, KIND, PROMOTES,
        X_FORM, Y_FORM, WIDTHS,
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
    blocks, count = len(acc.values), _value(COUNT)
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
            X have one in each stage. Otherwise parts take the warpgroup's `BUFFERS` in turn.
        first_slot: the first of these slots.
        cut: see `summed`; None where no tile is cut.
    """
    COUNT: gl.constexpr = WIDTHS[-1] // 8
    WHOLE: gl.constexpr = WIDTHS[-1] // PART
    # Slots of 64 rows of X, and of a stage's.
    OWN: gl.constexpr = 64 // PART
    STAGE: gl.constexpr = X_ROWS // PART
    whole = width // PART
    parts = gl.cdiv(width, PART)
    for m in gl.static_range(len(acc) // COUNT):
        for i in gl.static_range(WHOLE):
            if i < whole:
                blocks = blocks_of(acc, m * COUNT + i * PART // 8, PART // 8)
                if cut is not None:
                    blocks = summed(blocks, cut, m * (width // 8) + i * PART // 8)
                finish_part(
                    blocks, out, slots, first_slot, spread, m * parts + i, m * OWN + i * STAGE, args, shape,
                    row + 64 * m, col + i * PART, EPILOGUE, CAST, SWAP, X_FORM, Y_FORM, BUFFERS,
                )  # fmt: skip
        if whole < parts:
            behind = last_blocks(blocks_of(acc, m * COUNT, COUNT), in_block(width), PART // 8, WIDTHS)
            if cut is not None:
                behind = summed(behind, cut, m * (width // 8) + width // 8 - PART // 8)
            finish_part(
                behind, out, slots, first_slot, spread, m * parts + whole, m * OWN + whole * STAGE, args, shape,
                row + 64 * m, col + width - PART, EPILOGUE, CAST, SWAP, X_FORM, Y_FORM, BUFFERS,
            )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The kernel


@gluon.jit
def consume(
    out, slots, ring, step_args, args, workspace, shape, state, tile, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    PLACE: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr, KIND: gl.constexpr, PROMOTES: gl.constexpr,
    EVERY: gl.constexpr, X_ROWS: gl.constexpr, WIDTHS: gl.constexpr, SWAP: gl.constexpr, PINGPONG: gl.constexpr,
    X_FORM: gl.constexpr, Y_FORM: gl.constexpr, BUFFERS: gl.constexpr, PART: gl.constexpr, RING_BYTES: gl.constexpr,
    BARRIERS_AT: gl.constexpr,
):  # fmt: skip
    """One warpgroup's part of the work."""
    stages, width = ring[1], tile[0]
    units, whole, parts = state[0], state[1], state[2]
    OWN: gl.constexpr = X_ROWS if PINGPONG else X_ROWS // GROUPS
    FIRST: gl.constexpr = 0 if PINGPONG else GROUP * OWN
    COUNT: gl.constexpr = WIDTHS[-1] // 8
    address = shared_at(0)
    # A row of a stage is 128 bytes.
    heads = (
        matrix_descriptor(address, 8192 if X_FORM == "turned" else 16) + FIRST * 8,
        matrix_descriptor(address, 8192 if Y_FORM == "turned" else 16) + stages * (X_ROWS * 8),
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
        row, col, end, first_k, last_k = corner(unit, state, shape, tile, PLACE, X_ROWS, SWAP)
        row, col = computed(row), computed(col)
        if PINGPONG:
            mbarrier.wait(turn_of(ring, GROUP), turn)
            turn = turn ^ 1
        scales = ()
        if EVERY is not None:
            scales = scales_of(step_args, row + FIRST, col, (end, shape[1]), first_k, EVERY[0], EVERY[1])
        acc, stage, phase = sum_steps(
            heads, ring, first_k, last_k, stage, phase, width, scales, OWN // 64 * COUNT, KIND, PROMOTES, X_ROWS,
            WIDTHS, X_FORM, Y_FORM, BARRIERS_AT,
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
        spread = (unit + programs >= units) & (gl.cdiv(width, PART) <= stages)
        if workspace is not None:
            cut = (unit >= whole, 0, parts, 0, 0)
            if unit >= whole:
                done, cut = combine(
                    acc, unit, ring, state, workspace, width, GROUP, GROUPS, COUNT, RING_BYTES
                )
            spread = spread & (unit < whole)
        first_slot = gl.where(spread, FIRST // PART, RING_BYTES // (128 * PART) + GROUP * BUFFERS)
        if spread:
            if PINGPONG:
                # The other warpgroup has read the same rows of X.
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
    x, y, out, M, N, K, units, whole, parts, part_k, tiles_m, tiles_n, width, band_m, x_box, y_box, step_bytes, streams,
    stages, place_args, step_args, args, workspace,
    PLACE: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr, KIND: gl.constexpr, PROMOTES: gl.constexpr,
    EVERY: gl.constexpr, X_ROWS: gl.constexpr, LEAST: gl.constexpr, MOST: gl.constexpr, EACH: gl.constexpr,
    RING_ROWS: gl.constexpr, GROUPS: gl.constexpr, SWAP: gl.constexpr, PINGPONG: gl.constexpr, X_FORM: gl.constexpr,
    Y_FORM: gl.constexpr, BUFFERS: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
    SOURCE: gl.constexpr,
):  # fmt: skip
    """As many programs as run at once, which take units in turn: whole tiles, and then parts of tiles.

    Args:
        x, y: descriptors of X and of Y. Only their tensor maps are used.
        out: descriptor of the part of the output that is stored at a time, which is of 64 rows of X by some of Y.
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
        X_FORM, Y_FORM: how the operands lie.
        BUFFERS: slots that each warpgroup has beside the ring.
        REGISTERS, LOADER_REGISTERS: of a thread in all warpgroups but the first, and of the loader's.
        SOURCE: tells versions of this file apart.
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
    barriers = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 3, 1], mbarrier.MBarrierLayout())
    BARRIERS_AT: gl.constexpr = SLOTS * SLOT
    ring = (barriers, stages)
    # Four warps of each warpgroup read a stage.
    begin(stages, 4 * (1 if PINGPONG else GROUPS), GROUPS, BARRIERS_AT, X_FORM, Y_FORM)
    hopper.fence_async_shared()
    load_ahead(ring, shape, state, tile, loads, PLACE, X_ROWS, STEP, SWAP, X_FORM, Y_FORM, BARRIERS_AT)
    if PINGPONG:
        mbarrier.arrive(turn_of(ring, 0))
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (
                    consume,
                    (
                        out, slots, ring, step_args, args, workspace, shape, state, tile, 0, GROUPS, PLACE, EPILOGUE,
                        CAST, KIND, PROMOTES, EVERY, X_ROWS, WIDTHS, SWAP, PINGPONG, X_FORM, Y_FORM,
                        BUFFERS, PART, RING_BYTES, BARRIERS_AT,
                    ),
                ),
                (
                    produce,
                    (ring, shape, state, tile, loads, PLACE, X_ROWS, STEP, SWAP, X_FORM, Y_FORM, BARRIERS_AT),
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
                        CAST, KIND, PROMOTES, EVERY, X_ROWS, WIDTHS, SWAP, PINGPONG, X_FORM, Y_FORM,
                        BUFFERS, PART, RING_BYTES, BARRIERS_AT,
                    ),
                ),
                (
                    consume,
                    (
                        out, slots, ring, step_args, args, workspace, shape, state, tile, 1, GROUPS, PLACE, EPILOGUE,
                        CAST, KIND, PROMOTES, EVERY, X_ROWS, WIDTHS, SWAP, PINGPONG, X_FORM, Y_FORM,
                        BUFFERS, PART, RING_BYTES, BARRIERS_AT,
                    ),
                ),
                (
                    produce,
                    (ring, shape, state, tile, loads, PLACE, X_ROWS, STEP, SWAP, X_FORM, Y_FORM, BARRIERS_AT),
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
                        CAST, KIND, PROMOTES, EVERY, X_ROWS, WIDTHS, SWAP, PINGPONG, X_FORM, Y_FORM,
                        BUFFERS, PART, RING_BYTES, BARRIERS_AT,
                    ),
                ),
                (
                    consume,
                    (
                        out, slots, ring, step_args, args, workspace, shape, state, tile, 1, GROUPS, PLACE, EPILOGUE,
                        CAST, KIND, PROMOTES, EVERY, X_ROWS, WIDTHS, SWAP, PINGPONG, X_FORM, Y_FORM,
                        BUFFERS, PART, RING_BYTES, BARRIERS_AT,
                    ),
                ),
                (
                    consume,
                    (
                        out, slots, ring, step_args, args, workspace, shape, state, tile, 2, GROUPS, PLACE, EPILOGUE,
                        CAST, KIND, PROMOTES, EVERY, X_ROWS, WIDTHS, SWAP, PINGPONG, X_FORM, Y_FORM,
                        BUFFERS, PART, RING_BYTES, BARRIERS_AT,
                    ),
                ),
                (
                    produce,
                    (ring, shape, state, tile, loads, PLACE, X_ROWS, STEP, SWAP, X_FORM, Y_FORM, BARRIERS_AT),
                ),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    # What only assembly uses in between must not be given to anything else.
    mbarrier.invalidate(barriers.index(0))
