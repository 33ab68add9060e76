"""The K loop of tiles of any width, as assembly; see `any_width`.

The whole loop is assembly, since a loop around several pieces of assembly takes longer.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from .any_width_packed import StageFormat
from .any_width_scales import SPAN, WIDEST_PIECE, Scales, scaled_sums, starts_of
from .any_width_sparse import SparseStage
from .any_width_stage import HEAD, x_bytes, y_blocks_of, zeroed
from .dialect import value_of

#: Stages that there are barriers for.
STAGES = gl.constexpr(12)


#: From the first stage's barrier `full` to that of the stage before the first step, which does not exist: no thread
#: waits there.
NOWHERE = 8 * (STAGES.value + 3)


def format_of(x):
    """The `Stage` of a packed or sparse weight, of a constant that may be None."""
    text = value_of(x)
    if text is None:
        return None
    return SparseStage.of(text) or StageFormat.of(text)


@gluon.constexpr_function
def x_bytes_of(rows, FORMAT):
    """As `any_width_stage.x_bytes`, which Triton does not let it call."""
    return rows * (128 if FORMAT is None else 8 * int(FORMAT.split("/")[1]))


@gluon.constexpr_function
def step_of(KIND, FORMAT):
    """Elements along K of a stage."""
    if "16" not in KIND:
        return 128
    if FORMAT is None:
        return 64
    if not FORMAT.startswith("2:4/"):
        return 128 if FORMAT.endswith("/wide") else 64
    # The bits are `SparseStage.bits`, which are more in a long step.
    _, bits, code, *_ = FORMAT.split("/")
    return 128 if bits == ("8" if code else "16") else 64


#: Assembly that waits, each thread on its own, until the phase of this parity of a barrier is complete. Before Gluon's
#: own, all threads of a warpgroup meet.
WAIT = "\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [{barrier}], {phase}; @!done bra AGAIN;"


def releasing(stage):
    """Assembly that says that a warp has read a stage, at its barrier `free`.

    Args:
        stage: a register with the address of the stage's barrier `full`.
    """
    return f"elect.sync _|one, 0xffffffff; @one mbarrier.arrive.shared::cta.b64 _, [{stage} + {8 * STAGES.value}];"


def switch(index, values, cases):
    """Assembly that runs the case of the value that register `index` has.

    It is one of `values`. Sorted, these are a power of two apart. Their order is that of the code for the cases. All
    threads have the same value.
    """
    if len(cases) == 1:
        return cases[0]
    ordered = sorted(values)
    each = ordered[1] - ordered[0]
    assert each & (each - 1) == 0
    labels = ", ".join(f"CASE{value}" for value in ordered)
    made = "".join(
        f"\nCASE{value}: {{ {case} }} bra.uni DONE;" for value, case in zip(values, cases, strict=True)
    )
    return (
        f"{{ .reg .b32 case; sub.s32 case, {index}, {ordered[0]}; shr.u32 case, case, {each.bit_length() - 1};\n"
        f"CASES: .branchtargets {labels};\nbrx.idx.uni case, CASES; {made}\nDONE: }}"
    )


def _products(sums, KIND, turned, adds, y_skipped=0):
    """Assembly that begins a step's products of the blocks that registers x and y describe.

    Args:
        sums: for each 64 rows of X the registers of the sums.
        KIND, turned: see `multiply_steps`; `turned` is of X and of Y.
        adds: whether the step is added to what the registers have: a predicate, or 0.
        y_skipped: where Y's columns begin in its block, in units of 16 bytes.
    """
    # A fourth of a step along K is 32 bytes further, or 16 rows; in units of 16 bytes.
    x_step, y_step = (128 if each else 2 for each in turned)
    wide = "16" in KIND
    # Only operands of 16 bits can be turned.
    behind = f", {int(turned[0])}, {int(turned[1])}" if wide else ""
    lines = ["wgmma.fence.sync.aligned;"]
    # All rows are multiplied by a fourth of a step before the next fourth. In the other order, loops of 128 rows have
    # more spills with Triton 3.9.
    for i in range(4):
        for row, registers in enumerate(sums):
            # 64 rows of 128 bytes are 512 units in every form.
            lines.append(
                f"add.s32 own, x, {512 * row + i * x_step}; mov.b64 own_x, {{own, {HEAD}}};"
                f"add.s32 own, y, {y_skipped + i * y_step}; mov.b64 own_y, {{own, {HEAD}}};"
                f"wgmma.mma_async.sync.aligned.m64n{2 * len(registers)}k{16 if wide else 32}.f32.{KIND}"
                f" {{{', '.join(registers)}}}, own_x, own_y, {'1' if i else adds}, 1, 1{behind};"
            )
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned;"])


def _step(sums, KIND, turned):
    """Assembly of a step's products, which then releases the stage before, which has no more readers.

    Args:
        sums: for each 64 rows of X the registers of the accumulator.
        KIND, turned: see `multiply_steps`.
    """
    # This step's products stay in flight, so those of the step before are done with their blocks.
    return (
        f"{_products(sums, KIND, turned, 'adds')} wgmma.wait_group.sync.aligned 1;"
        f"{releasing('before')} setp.eq.s32 adds, 0, 0;"
    )


def _promoted_step(sums, KIND, places, scales):
    """As `_step`, but the products have separate registers, which are then added to the accumulator.

    Other warpgroups multiply meanwhile. A tile wider than `WIDEST_PIECE` is summed in pieces of 128 columns, one after
    the other, in the same registers.

    Args:
        places: assembly that finds the step's blocks.
        scales: multiplies the sums by their scales before, see `Scales`; None without scales.
    """
    width = 2 * len(sums[0])
    piece = SPAN if scales and width > WIDEST_PIECE else width
    own = [[f"n{piece // 2 * row + i}" for i in range(piece // 2)] for row in range(len(sums))]
    text = f".reg .f32 n<{piece // 2 * len(sums)}>; {places}"
    for col in range(0, width, piece):
        is_last = col + piece == width
        # 8 columns are 64 units of 16 bytes.
        text += _products(own, KIND, (False, False), "0", y_skipped=8 * col)
        if scales:
            text += scales.of_piece(col // SPAN, piece, is_last)
        text += f"wgmma.wait_group.sync.aligned 0; {releasing('at') if is_last else ''}"
        for row, numbers in zip(sums, own, strict=True):
            totals = row[col // 2 : (col + piece) // 2]
            if scales:
                text += scaled_sums(totals, numbers, col // SPAN, starts_of(piece, scales.divisor))
            else:
                text += "".join(f"add.f32 {x}, {x}, {y};" for x, y in zip(totals, numbers, strict=True))
    return f"{{ {text} }}"


def _by_stage(full, stages, x, y, x_block, y_rows, y_blocks):
    """Assembly that counts the steps of a loop, and keeps the places of a step's blocks in registers.

    Args:
        full, stages, x, y, y_rows: operands of `multiply_steps`.
        x_block, y_blocks: the size of X's block in units of 16 bytes, and the blocks of each row of Y.

    Returns:
        Assembly for before the loop, and assembly that goes on to the next step.
    """
    return (
        f"add.s32 before, {full}, {NOWHERE}; mad.lo.s32 x, stage, {x_block}, {x};"
        f"mul.lo.s32 y_rows, {y_rows}, {8 * y_blocks}; mad.lo.s32 y, stage, y_rows, {y};",
        f"mov.b32 before, at; add.s32 at, at, 8; add.s32 x, x, {x_block}; add.s32 y, y, y_rows;"
        f"add.s32 stage, stage, 1; setp.ge.s32 wraps, stage, {stages};"
        f"@wraps mov.b32 stage, 0; @wraps mov.b32 at, {full}; @wraps mov.b32 x, {x}; @wraps mov.b32 y, {y};"
        "@wraps xor.b32 phase, phase, 1; sub.s32 left, left, 1; setp.gt.s32 more, left, 0;",
    )


def _by_barrier(full, stages, x, y, rows, y_rows):
    """Assembly that derives the places of a step's blocks from its barrier's address, which saves registers.

    Args:
        full, stages, x, y, rows, y_rows: operands of `multiply_steps`, and the rows of X in a stage.

    Returns:
        Assembly for before the loop, assembly that finds a step's blocks, and assembly that goes on to the next step.
    """
    # Barriers are 8 bytes apart, and blocks 8 units of 16 bytes for each of their rows.
    return (
        f".reg .b32 first_x, first_y, end; mad.lo.s32 end, {stages}, 8, {full};"
        f"mul.lo.s32 first_x, {full}, {rows}; sub.s32 first_x, {x}, first_x;"
        f"mul.lo.s32 first_y, {full}, {y_rows}; sub.s32 first_y, {y}, first_y;",
        f"mad.lo.s32 x, at, {rows}, first_x; mad.lo.s32 y, at, {y_rows}, first_y;",
        f"add.s32 at, at, 8; setp.ge.s32 wraps, at, end; @wraps mov.b32 at, {full};"
        "@wraps xor.b32 phase, phase, 1; sub.s32 left, left, 1; setp.gt.s32 more, left, 0;",
    )


def _tail(registers, width, part):
    """Assembly that moves the last numbers of 64 rows of X into the registers of the last part.

    The accumulator is read in parts. If the width is not a multiple of a part, the last part overlaps the one before.

    Args:
        registers: those of all parts.
        part: columns of a part.
    """
    size, count = part // 2, width // 2
    first = -(-count // size) * size - size
    # Begins with the last one, so that none is overwritten before it has been moved.
    pairs = [(first + i, count - size + i) for i in reversed(range(size))]
    return "".join(f"mov.b32 {registers[to]}, {registers[of]};" for to, of in pairs if to != of)


@builtin
def multiply_steps(
    full, stage, phase, stages, steps, head_x, head_y, y_rows, width, turn, scales, X_ROWS, FIRST, OWN, KIND,
    PROMOTES, N_DIVISOR, FORMAT, X_FORM, Y_FORM, WIDTHS, PART, PINGPONG, _semantic=None,
):  # fmt: skip
    """The K loop of a warpgroup: the sum of the products of some rows of X and `width` of Y, of at least one step.

    All arguments are blocks, see `in_block`.

    Args:
        full: the address of the first stage's barrier.
        stage, phase: of the first step; see `any_width.later`.
        steps: how many there are.
        head_x, head_y: matrix descriptors of the first stage's blocks, see `matrix_descriptor`; of a packed weight
            where its words are, in units of 16 bytes.
        y_rows: rows of Y in a stage, of which `head_y` may skip some.
        turn: the address of the barrier of this warpgroup's turn, the parity to wait for, and the address of the
            other one's barrier; any numbers without PINGPONG.
        X_ROWS, FIRST, OWN: rows of X in a stage, the first of the warpgroup's, and how many these are.
        KIND: the types of X and of Y, as PTX names them, with a point between them.
        scales: what `scales_of` gives for steps that are multiplied by scales, which are promoted; (), where none is.
        PROMOTES: whether each step is summed separately and then added. Tensor cores sum fp8 with 14 bits.
        N_DIVISOR: see `any_width_scales.starts_of`; any number without scales.
        FORMAT: of a packed or sparse weight, which is X; see `any_width_stage.Stage`. Otherwise None.
        X_FORM, Y_FORM: the forms of the operands.
        WIDTHS: what `width` may be, in the order of the code for each.
        PART: columns of Y that are read at a time.
        PINGPONG: whether warpgroups take turns. Each warp arrives at the other one's barrier when the last products
            have begun.

    Returns:
        For each 64 rows of X as many blocks of 8 columns as the parts of the largest width have. The last part of
        `width` ends where `width` does.
    """
    widths, part = [value_of(width) for width in value_of(WIDTHS)], value_of(PART)
    # Of 64 rows of X, and of all.
    size = -(-max(widths) // part) * part // 2
    numbers = value_of(OWN) // 64 * size
    # Every operand comes four times, a register for each number of a thread.
    full_, stage_, phase_, stages_, steps_, x_, y_, y_rows_, width_, turn_at, turn_phase, next_turn = (
        f"${numbers + 4 * i}" for i in range(12)
    )
    turned = value_of(X_FORM).endswith("turned"), value_of(Y_FORM).endswith("turned")
    rows, format = value_of(X_ROWS), format_of(FORMAT)
    places = ""
    if value_of(PROMOTES) and format is None:
        begins, places, go_on = _by_barrier(full_, stages_, x_, y_, rows, y_rows_)
    else:
        x_block, y_blocks = x_bytes(rows, format) // 16, y_blocks_of(format)
        begins, go_on = _by_stage(full_, stages_, x_, y_, x_block, y_rows_, y_blocks)
    own_turn, turns = "", ""
    if value_of(PINGPONG):
        own_turn = f"{{ {WAIT.format(barrier=turn_at, phase=turn_phase)} }}"
        turns = f"elect.sync _|one, 0xffffffff; @one mbarrier.arrive.shared::cta.b64 _, [{next_turn}];"
    arrived, kind = WAIT.format(barrier="at", phase="phase"), value_of(KIND)
    cases = []
    registers = [[f"${first + i}" for i in range(size)] for first in range(0, numbers, size)]
    for each in widths:
        sums = [row[: each // 2] for row in registers]
        ends = "".join(_tail(row, each, part) for row in registers)
        if format is not None:
            given = sums, kind, turned[1], value_of(PROMOTES), rows, arrived, releasing, go_on, turns, ends
            cases.append(f"{{ {own_turn} {format.steps(*given)} }}")
            continue
        if value_of(PROMOTES):
            scaling = Scales(numbers + 48, steps_, each, value_of(N_DIVISOR)) if len(scales) else None
            first = scaling.begin() if scaling else ""
            step, last = _promoted_step(sums, kind, places, scaling), turns + ends
        else:
            first, step = "", _step(sums, kind, turned)
            last = f"{turns} wgmma.wait_group.sync.aligned 0; {releasing('before')} {ends}"
        cases.append(f"{{ {own_turn} {first}\nSTEP: {arrived} {step} {go_on} @more bra.uni STEP; {last} }}")
    before = ""
    if format is not None:
        before = format.begin(rows, value_of(FIRST), stages_, y_rows_)
    constraints = ["=&f"] * numbers + ["r"] * 48
    constraints += ["l"] * 8 + ["r"] * 28 if len(scales) else []
    made = gl.inline_asm_elementwise(
        f"{{ {before}"
        ".reg .pred adds, done, one, wraps, more; .reg .b64 own_x, own_y;"
        ".reg .b32 stage, phase, at, before, left, x, y, y_rows, own;"
        f"mov.b32 stage, {stage_}; mov.b32 phase, {phase_}; mov.b32 left, {steps_}; setp.ne.s32 adds, 0, 0;"
        f"mad.lo.s32 at, stage, 8, {full_}; {begins}{zeroed(registers)}{switch(width_, widths, cases)} }}",
        ",".join(constraints),
        [full, stage, phase, stages, steps, head_x, head_y, y_rows, width, *turn, *scales],
        dtype=[gl.float32] * (numbers // 4), is_pure=False, pack=4, _semantic=_semantic,
    )  # fmt: skip
    return gl.tuple(list(made))
