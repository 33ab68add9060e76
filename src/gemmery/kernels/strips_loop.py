"""The assembly of `kernels.strips`: how warps load and multiply their share of a packed weight's strips.

A program has some strips of 16 rows of the weight. Strip by strip, it has as many units as there are steps along K,
which its warps share out evenly, so a warp has a range of units, of one strip or of two. Where the activations do not
fit into shared memory at once, all warps go through K in chunks, and share out the units of one chunk after the other.
Which strips a warp has is the same in every chunk, since it depends on the ratio of strips to warps alone.

A warp copies the words of its next units into slots of its own, each thread those that it will read, so words need no
barrier. The group parameters, which threads read of each other, need one of the warp.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from . import any_width_packed as packed
from .any_width_packed import LINE_BYTES, PIECES, STEP, STRIP, StageFormat
from .dialect import value_of

#: Bytes of a row of activations in a step, and of one of a partial sum, which threads then store without conflicts.
ROW, SUM_ROW = 2 * STEP, 4 * (STRIP + 4)
#: Bytes that a thread copies at a time.
UNIT = 16


def slot_bytes(format: StageFormat) -> int:
    """Bytes of a slot: a strip's words and group parameters of a step."""
    return format.words + params_bytes(format)


def params_bytes(format: StageFormat) -> int:
    """Bytes of a strip's group parameters of a step."""
    return 2 * STRIP * format.groups * len(format.kinds)


def _segments(size: str) -> str:
    """Assembly that finds a warp's first and last unit, `low` and `high`, of all strips' in a chunk of so many steps."""
    return (
        f"mul.lo.s32 low, begins, {size}; shr.u32 low, low, log_warps; mul.lo.s32 high, ends, {size};"
        "shr.u32 high, high, log_warps;"
    )


def _first_segment(size: str, start: str, count: str) -> str:
    """Assembly that finds where a warp's steps of its first strip start in a chunk, and how many these are."""
    return (
        f"{{ .reg .b32 low, high; {_segments(size)} mul.lo.s32 {count}, first_strip, {size};"
        f"sub.s32 {start}, low, {count}; sub.s32 high, high, {count}; min.s32 {count}, high, {size};"
        f"sub.s32 {count}, {count}, {start}; }}"
    )


def _second_segment(size: str, start: str, count: str) -> str:
    """Assembly that finds the same of its second strip: none if it has only one."""
    return (
        f"{{ .reg .b32 low, high; {_segments(size)} mul.lo.s32 {count}, second_strip, {size};"
        f"sub.s32 {count}, high, {count}; @!has_second mov.b32 {count}, 0; mov.b32 {start}, 0; }}"
    )


def _fetch(format: StageFormat) -> str:
    """Assembly that begins to copy what the next unit needs into the slot at `to`, and goes on to the unit behind it."""
    copy = "cp.async.cg.shared.global"
    lines = []
    for block in range(format.blocks):
        at = 4 * LINE_BYTES * block
        if block == 0:
            lines.append(f"@fetching {copy} [mine], [next_words], {UNIT};")
            continue
        # The last step may end before this block does; then the block behind it is another strip's.
        each = STEP // format.blocks * block
        lines.append(
            f"mad.lo.s32 size, next_step, {STEP}, {each}; setp.lt.s32 there, size, k; selp.b32 size, {UNIT}, 0, there;"
            f"@fetching {copy} [mine + {at}], [next_words + {at}], {UNIT}, size;"
        )
    if format.group:
        shift = format.group.bit_length() - 1
        lines.append(
            f"shl.b32 row, next_step, {STEP.bit_length() - 1}; shr.u32 row, row, {shift}; add.s32 row, row, own_group;"
            f"setp.lt.s32 there, row, groups; selp.b32 size, {UNIT}, 0, there; mul.wide.s32 from, row, params_row;"
            "add.s64 from, from, own_params; mul.wide.s32 at, next_strip, 32; add.s64 from, from, at;"
            "and.pred there, fetching, has_params; add.s32 mine, to, own_slot;"
            f"@there {copy} [mine], [from], {UNIT}, size;"
        )
    return (
        "{ .reg .pred there, second; .reg .b32 mine, row, size; .reg .b64 from, at; mad.lo.s32 mine, lane, 16, to;"
        f"{''.join(lines)} cp.async.commit_group; add.s64 next_words, next_words, {format.words};"
        "add.s32 next_step, next_step, 1; sub.s32 next_left, next_left, 1;"
        f"setp.gt.s32 there, next_left, 0; @!there bra SEEK; bra.uni FOUND; {_seek(format, 'SEEK', 'FOUND')} }}"
    )


def _seek(format: StageFormat, entry: str, done: str) -> str:
    """Assembly that goes on to the next range of units that is not empty, or ends with `fetching` false."""
    return (
        f"\n{entry}: @!fetching bra {done}; setp.eq.s32 second, next_segment, 0; @second bra SECOND;"
        "add.s32 next_chunk, next_chunk, chunk; setp.lt.s32 fetching, next_chunk, steps;"
        f"@!fetching bra {done};\nFIRST: sub.s32 size, steps, next_chunk; min.s32 size, size, chunk;"
        f"{_first_segment('size', 'row', 'next_left')} mov.b32 next_segment, 0; mov.b32 next_strip, first_strip;"
        f"bra.uni PLACE;\nSECOND: sub.s32 size, steps, next_chunk; min.s32 size, size, chunk;"
        f"{_second_segment('size', 'row', 'next_left')} mov.b32 next_segment, 1; mov.b32 next_strip, second_strip;"
        f"\nPLACE: setp.gt.s32 there, next_left, 0; @!there bra {entry};"
        "add.s32 next_step, row, next_chunk; add.s32 next_step, next_step, first_step;"
        f"mul.wide.s32 from, next_step, {format.words}; add.s64 next_words, own_words, from;"
        f"cvt.s64.s32 from, next_strip; mad.lo.s64 next_words, from, strip_bytes, next_words;\n{done}:"
    )


def _copy_activations(columns: int, threads: int) -> str:
    """Assembly that begins to copy a chunk of `size` steps from step `from_step` on to `to`: 16 bytes at a time.

    Rows are swizzled as `ldmatrix` reads them without conflicts. Those that do not exist are left as they are: a row of
    activations makes nothing but its own column of the sum. What is behind K becomes zeros.
    """
    return (
        "{ .reg .pred more, there; .reg .b32 row, unit, last, place, line, at, bytes; .reg .b64 row_from, from, wide;"
        "shl.b32 last, size, 3; mov.b32 row, 0; mov.b64 row_from, x;"
        "\nROW: mov.b32 unit, thread; setp.lt.s32 more, unit, last; @!more bra END;"
        "\nNEXT: and.b32 place, unit, 7; and.b32 line, row, 7; xor.b32 place, place, line; shr.u32 line, unit, 3;"
        f"mad.lo.s32 line, line, {ROW * columns}, to; mad.lo.s32 line, row, {ROW}, line;"
        "mad.lo.s32 line, place, 16, line;"
        f"mad.lo.s32 at, from_step, {STEP}, 0; mad.lo.s32 at, unit, 8, at; setp.lt.s32 there, at, k;"
        "selp.b32 bytes, 16, 0, there; mul.wide.s32 wide, at, 2; add.s64 from, row_from, wide;"
        "cp.async.cg.shared.global [line], [from], 16, bytes;"
        f"add.s32 unit, unit, {threads}; setp.lt.s32 more, unit, last; @more bra NEXT;"
        "\nEND: add.s64 row_from, row_from, x_stride; add.s32 row, row, 1; setp.lt.s32 more, row, rows; @more bra ROW;"
        "cp.async.commit_group; }"
    )


def _multiply(format: StageFormat, kind: str, columns: int) -> str:
    """Assembly that multiplies a unit: its slot is at `slot`, its activations are at `line`."""
    blocks = columns // 8
    words = "".join(
        f"ld.shared.v4.b32 {{{', '.join(f'word{4 * block + j}' for j in range(4))}}}, [own + {4 * LINE_BYTES * block}];"
        for block in range(format.blocks)
    )
    params = "".join(
        f"ld.shared.b16 number, [own + {format.words + 32 * (format.groups * which + group) + STRIP * half}];"
        f"mov.b32 {name}0_{group}_{half}, {{number, number}};"
        for which, name in enumerate(format.kinds)
        for group in range(format.groups)
        for half in range(2)
    )
    loads = "".join(
        f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{', '.join(f'b{8 * block + 4 * half + j}' for j in range(4))}}},"
        f" [{('near', 'far')[half]} + {8 * ROW * block}];"
        for block in range(blocks)
        for half in range(2)
    )
    products = []
    for piece in range(PIECES):
        products.append(packed.unpacked(format, kind, 1, piece))
        for block in range(blocks):
            sums = ", ".join(f"sum{4 * block + j}" for j in range(4))
            b = 8 * block + 2 * piece
            products.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{sums}}},"
                f" {{{', '.join(packed.pieces_of(0, piece))}}}, {{b{b}, b{b + 1}}}, {{{sums}}};"
            )
    return (
        f"{{ {packed.registers(format, 1)} .reg .b32 b<{8 * blocks}>, own, near, far;"
        f"mad.lo.s32 own, lane, 16, slot; {words} add.s32 own, slot, own_param; {params}"
        "add.s32 near, line, own_line; xor.b32 far, own_line, 64; add.s32 far, far, line;"
        f"{loads} {packed.prepare(format, kind, 1)} {''.join(products)} }}"
    )


def _store_sums(columns: int, index: str) -> str:
    """Assembly that stores a thread's numbers of a partial sum as the `index`-th one."""
    lines = [
        f"st.shared.f32 [own + {SUM_ROW * (8 * (i // 4) + i % 2) + 32 * (i // 2 % 2)}], sum{i};"
        for i in range(columns // 2)
    ]
    return (
        f"{{ .reg .b32 own, place; shr.u32 place, lane, 2; mad.lo.s32 own, {index}, {SUM_ROW * columns}, memory;"
        "mad.lo.s32 own, place, 4, own; and.b32 place, lane, 3;"
        f"mad.lo.s32 own, place, {2 * SUM_ROW}, own; {''.join(lines)} }}"
    )


def _swap(columns: int) -> str:
    """Assembly that swaps the sums of both of a warp's strips."""
    return "".join(
        f"mov.b32 swapped, sum{i}; mov.b32 sum{i}, other{i}; mov.b32 other{i}, swapped;"
        for i in range(columns // 2)
    )


def assembly(format: StageFormat, kind: str, columns: int, warps: int, slots: int, x_bytes: int) -> str:
    """The assembly, whose operands are those of `multiply_strips` from $1 on."""
    slot, threads = slot_bytes(format), 32 * warps
    ring = slots * slot
    count = len(format.kinds) * 2 * format.groups
    longs = ("words", "scales", "shifts", "x", "strip_bytes", "x_stride")
    numbers = ("rows", "k", "strip", "strips", "first_step", "steps", "chunk", "groups", "params_row")
    given = "".join(f"mov.b64 {name}, ${1 + i};" for i, name in enumerate(longs)) + "".join(
        f"mov.b32 {name}, ${1 + len(longs) + i};" for i, name in enumerate(numbers)
    )
    return (
        f"{{ .reg .b64 {', '.join(longs)}; .reg .b32 {', '.join(numbers)}; {given}"
        ".reg .pred fetching, has_second, has_params, more, there;"
        ".reg .b32 memory, thread, warp, lane, log_warps, begins, ends, first_strip, second_strip, own_line, own_param,"
        "own_group, own_slot, to, slot, slots_at, slots_end, size, from_step, buffer, at_chunk, segment, left, start, line,"
        "row, swapped, next_chunk, next_segment, next_left, next_step, next_strip, done, next_size;"
        ".reg .b64 own_words, own_params, next_words, from, wide;"
        f".reg .f32 sum<{columns // 2}>, other<{columns // 2}>; .reg .pred second;"
        f"mov.u32 thread, %tid.x; shr.u32 warp, thread, 5; and.b32 lane, thread, 31; mov.b32 memory, global_smem;"
        f"mov.b32 log_warps, {warps.bit_length() - 1};"
        # A warp's range of units, in parts of a unit per step and strip, and its strips.
        "mul.lo.s32 begins, warp, strips; add.s32 ends, begins, strips; shr.u32 first_strip, begins, log_warps;"
        "shr.u32 second_strip, ends, log_warps; setp.ne.s32 has_second, first_strip, second_strip;"
        # Its slots, and a thread's place in them: the words and group parameters that it copies and reads.
        f"mad.lo.s32 slots_at, warp, {ring}, memory; add.s32 slots_at, slots_at, {x_bytes};"
        f"add.s32 slots_end, slots_at, {ring}; cvt.s64.s32 from, strip; mad.lo.s64 own_words, from, strip_bytes, words;"
        "mul.wide.s32 wide, lane, 16; add.s64 own_words, own_words, wide; shr.u32 own_param, lane, 2;"
        f"shl.b32 own_param, own_param, 1; {_own_params(format)} setp.lt.u32 has_params, lane, {count};"
        # Of activations `ldmatrix` takes a row's 16 bytes: of 8 rows those of numbers 0 to 7 along K, then 8 to 15...
        f"and.b32 own_line, lane, 7; shr.u32 size, lane, 3; xor.b32 size, size, own_line; mul.lo.s32 own_line, own_line, {ROW};"
        "mad.lo.s32 own_line, size, 16, own_line;"
        f"{''.join(f'mov.f32 sum{i}, 0f00000000; mov.f32 other{i}, 0f00000000;' for i in range(columns // 2))}"
        # The first chunk's activations, and the first units.
        "mov.b32 buffer, memory; mov.b32 to, buffer; mov.b32 from_step, first_step; min.s32 size, chunk, steps;"
        f"{_copy_activations(columns, threads)}"
        "mov.b32 next_chunk, 0; setp.gt.s32 fetching, steps, 0; mov.b32 next_left, 0; mov.b32 next_step, 0;"
        f"mov.b64 next_words, own_words; bra.uni FIRST; {_seek(format, 'SEEK', 'FOUND')}"
        f"mov.b32 to, slots_at; mov.b32 done, 0;\nAHEAD: {_fetch(format)} add.s32 to, to, {slot};"
        f"add.s32 done, done, 1; setp.lt.s32 more, done, {slots - 1}; @more bra AHEAD;"
        "mov.b32 slot, slots_at; mov.b32 at_chunk, 0;"
        f"cp.async.wait_group {slots - 1};"
        # A chunk.
        "\nCHUNK: bar.sync 0; sub.s32 size, steps, at_chunk; min.s32 size, size, chunk;"
        "add.s32 next_size, at_chunk, chunk; setp.lt.s32 more, next_size, steps; @!more bra HERE;"
        "{ .reg .b32 size, from_step, to; sub.s32 size, steps, next_size; min.s32 size, size, chunk;"
        "add.s32 from_step, next_size, first_step;"
        f"mad.lo.s32 to, chunk, {ROW * columns}, memory; setp.eq.s32 there, buffer, memory; @!there mov.b32 to, memory;"
        f"{_copy_activations(columns, threads)} }}"
        f"\nHERE: mov.b32 segment, 0; mov.b32 done, 0; {_first_segment('size', 'start', 'left')}"
        f"\nSEGMENT: mad.lo.s32 line, start, {ROW * columns}, buffer; add.s32 done, done, left;"
        "setp.gt.s32 more, left, 0; @!more bra END;"
        f"\nUNIT: cp.async.wait_group {slots - 2}; bar.warp.sync 0xffffffff; {_fetch(format)}"
        f"{_multiply(format, kind, columns)}"
        f"mov.b32 to, slot; add.s32 slot, slot, {slot}; setp.ge.s32 more, slot, slots_end; @more mov.b32 slot, slots_at;"
        f"add.s32 line, line, {ROW * columns}; sub.s32 left, left, 1; setp.gt.s32 more, left, 0; @more bra UNIT;"
        f"\nEND: {_swap(columns)} setp.eq.s32 more, segment, 0; mov.b32 segment, 1;"
        f"{_second_segment('size', 'start', 'row')} mov.b32 left, row; @more bra SEGMENT;"
        # The next chunk's activations were asked for before all but the last of this warp's copies, if it had enough.
        f"setp.lt.s32 more, done, {slots}; @more cp.async.wait_all;"
        f"mad.lo.s32 to, chunk, {ROW * columns}, memory; setp.eq.s32 there, buffer, memory; mov.b32 buffer, memory;"
        "@there mov.b32 buffer, to; mov.b32 to, slot;"
        f"setp.eq.s32 there, slot, slots_at; @there mov.b32 to, slots_end; sub.s32 to, to, {slot};"
        "add.s32 at_chunk, at_chunk, chunk; setp.lt.s32 more, at_chunk, steps; @more bra CHUNK;"
        # Partial sums take the place of the activations. Their order is that of strips, and of warps in each.
        f"bar.sync 0; add.s32 row, warp, first_strip; {_store_sums(columns, 'row')} {_swap(columns)}"
        f"@!has_second bra STORED; add.s32 row, warp, second_strip; {_store_sums(columns, 'row')}"
        "\nSTORED: bar.sync 0; mov.b32 $0, 0; }"
    )


def _own_params(format: StageFormat) -> str:
    """Assembly that finds which group parameters a thread copies, 16 bytes of a group's scales or shifts, and where."""
    if not format.group:
        return "mov.b64 own_params, 0; mov.b32 own_group, 0; mov.b32 own_slot, 0;"
    log = format.groups.bit_length() - 1
    chosen = (
        f"shr.u32 own_slot, lane, {1 + log}; setp.ne.s32 there, own_slot, 0; @there mov.b64 own_params, shifts;"
        if format.shifts
        else ""
    )
    return (
        f"mov.b64 own_params, scales; {chosen} shr.u32 own_group, lane, 1; and.b32 own_group, own_group, {format.groups - 1};"
        "and.b32 own_slot, lane, 1; mul.wide.u32 wide, own_slot, 16; add.s64 own_params, own_params, wide;"
        "mul.wide.s32 wide, strip, 32; add.s64 own_params, own_params, wide;"
        f"mul.lo.s32 own_slot, lane, {UNIT}; add.s32 own_slot, own_slot, {format.words};"
    )


@builtin
def multiply_strips(
    words, scales, shifts, x, strip_bytes, x_stride, rows, k, strip, strips, first_step, steps, chunk, groups,
    params_row, FORMAT, KIND, COLUMNS, WARPS, SLOTS, X_BYTES, _semantic=None,
):  # fmt: skip
    """Leaves the partial sums of a program's strips in shared memory, see `strips.partial_sums`.

    Args:
        words, scales, shifts: addresses of the weight's; of what there is not, any number.
        x: the address of the first row of activations.
        strip_bytes: of the words of a strip.
        x_stride: bytes from one row of activations to the next.
        rows: of activations, at most `COLUMNS`.
        k: columns of the activations.
        strip, strips: the program's first strip, and how many it has, at most `WARPS`.
        first_step, steps: its range of K.
        chunk: steps of a chunk, of which there is room for two in `X_BYTES`; or all steps.
        groups: groups along K.
        params_row: bytes from one group's parameters to the next one's.
        FORMAT: see `any_width_packed.StageFormat`.
        KIND: the type of activations, as PTX names it.
        COLUMNS: of a sum, one for each row of activations; a multiple of 8.
        SLOTS: of a warp.
        X_BYTES: of shared memory, for activations.
    """
    text = assembly(
        StageFormat.of(value_of(FORMAT)), value_of(KIND), value_of(COLUMNS), value_of(WARPS), value_of(SLOTS),
        value_of(X_BYTES),
    )  # fmt: skip
    gl.inline_asm_elementwise(
        text, ",".join(["=r"] + ["l"] * 6 + ["r"] * 9),
        [
            words, scales, shifts, x, strip_bytes, x_stride, rows, k, strip, strips, first_step, steps, chunk, groups,
            params_row,
        ],
        dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip
