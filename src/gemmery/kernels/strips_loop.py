"""The assembly of `kernels.strips`: how warps load and multiply their share of a packed weight's strips.

A program has some strips of 16 rows of the weight. Strip by strip, it has as many units as there are steps along K. All
warps go through K in chunks, whose activations are in shared memory, and share out the units of one chunk after the
other evenly, so a warp has a range of units, of one strip or of two. Which strips it has is the same in every chunk,
since it depends on the ratio of strips to warps alone.

A warp has slots of its own for the words of its next units, and waits for nobody else's. Words and activations are
copied by `cp.async.bulk`, which can be told that words are read once: then they leave L2 first, and not what is still to
be written back to memory. (`cp.async` can be told so too, but an H200 calls that an illegal instruction.)
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from . import any_width_packed as packed
from .any_width_packed import LINE_BYTES, PIECES, STEP, STRIP, StageFormat
from .dialect import value_of

#: Bytes of a row of activations in a step, and of one of a partial sum, which threads then store without conflicts.
ROW, SUM_ROW = 2 * STEP, 4 * (STRIP + 4)
#: Bytes that a thread copies at a time, and by which rows of activations are longer, so that `ldmatrix` has no conflicts.
UNIT = 16
#: Steps of a slot.
STEPS = 2
#: Chunks of activations that there may be room for.
MOST_CHUNKS = 4

#: What copies without threads' help.
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


def slot_bytes(format: StageFormat) -> int:
    """Bytes of a slot: a strip's words and group parameters of some steps."""
    return STEPS * (format.words + params_bytes(format))


def params_bytes(format: StageFormat) -> int:
    """Bytes of a strip's group parameters of a step."""
    return 2 * STRIP * format.groups * len(format.kinds)


def barrier_bytes(warps: int, slots: int) -> int:
    """Bytes of all barriers: of the chunks, and of each warp's slots."""
    return 8 * (MOST_CHUNKS + warps * slots)


def _wait(barrier: str, phase: str) -> str:
    """Assembly that waits for a barrier's phase."""
    return (
        f"{{ .reg .pred done;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [{barrier}], {phase}; @done bra DONE;"
        "bra WAIT;\nDONE: }"
    )


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
    """Assembly that begins to copy a warp's next units into the slot at `to`, and goes on to the units behind them.

    `arrives` is the slot's barrier.
    """
    words = STEPS * format.words
    lines = [
        f"min.s32 count, next_left, {STEPS}; @!fetching mov.b32 count, 0;"
        f"mul.lo.s32 bytes, count, {format.words}; setp.ne.s32 there, bytes, 0;"
    ]
    if format.blocks > 1:
        # The last step may end before its last block does, and the strip's words with it. Zeros take the place of these.
        lines.append(
            f"cvt.u32.u64 row, strip_bytes; mul.lo.s32 mine, next_step, {format.words}; sub.s32 row, row, mine;"
            "min.s32 row, row, bytes; setp.lt.s32 second, row, bytes; mov.b32 bytes, row;"
            "mad.lo.s32 mine, lane, 16, to; add.s32 mine, mine, bytes; and.pred second, second, there;"
            "mov.b32 row, 0; @second st.shared.v4.b32 [mine], {row, row, row, row};"
        )
    lines.append(
        "and.pred second, there, is_first; @second mbarrier.arrive.expect_tx.shared::cta.b64 _, [arrives], bytes;"
        f"@second {BULK}.L2::cache_hint [to], [next_words], bytes, [arrives], policy;"
    )
    if format.group:
        shift = format.group.bit_length() - 1
        lines.append(
            f"add.s32 row, next_step, own_step; shl.b32 row, row, {STEP.bit_length() - 1}; shr.u32 row, row, {shift};"
            "add.s32 row, row, own_group; setp.lt.s32 there, row, groups;"
            f"selp.b32 mine, {UNIT}, 0, there; mul.wide.s32 from, row, params_row;"
            "add.s64 from, from, own_params; mul.wide.s32 at, next_strip, 32; add.s64 from, from, at;"
            "setp.lt.s32 there, own_step, count; add.s32 row, to, own_slot;"
            f"@there cp.async.cg.shared.global [row], [from], {UNIT}, mine;"
        )
    return (
        "{ .reg .pred there, second; .reg .b32 mine, row, size, count, bytes; .reg .b64 from, at;"
        f"{''.join(lines)} cp.async.commit_group; add.s64 next_words, next_words, {words};"
        f"add.s32 next_step, next_step, {STEPS}; sub.s32 next_left, next_left, {STEPS};"
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


def _load_chunk() -> str:
    """Assembly that begins to copy the activations of the chunk from `at` on, in the first warp: a row for each thread.

    Rows that do not exist are left as they are: each makes nothing but its own column of the sum. What is behind K
    becomes zeros. `at` counts from `first_step`, and `load_buffer` is the chunk's buffer.
    """
    return (
        "{ .reg .pred there; .reg .b32 to, bar, bytes, all, last; .reg .b64 from, wide;"
        "sub.s32 all, steps, at; min.s32 all, all, chunk; mul.lo.s32 all, all, 128; add.s32 bytes, at, first_step;"
        f"mul.lo.s32 bytes, bytes, {STEP}; mul.wide.s32 wide, bytes, 2; sub.s32 bytes, k, bytes; mul.lo.s32 bytes, bytes, 2;"
        "min.s32 bytes, bytes, all; mad.lo.s32 bar, load_buffer, 8, barriers; mul.lo.s32 last, bytes, rows;"
        "@is_first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], last; bar.warp.sync 0xffffffff;"
        "mad.lo.s32 to, load_buffer, buffer_bytes, memory; mad.lo.s32 to, lane, pitch, to;"
        "add.s64 wide, wide, x; cvt.s64.s32 from, lane; mad.lo.s64 from, from, x_stride, wide;"
        f"setp.lt.s32 there, lane, rows; @there {BULK} [to], [from], bytes, [bar];"
        "add.s32 last, to, all; add.s32 to, to, bytes; mov.b32 bytes, 0;"
        "\nZERO: setp.lt.and.s32 there, to, last, there; @!there bra END;"
        "st.shared.v4.b32 [to], {bytes, bytes, bytes, bytes}; add.s32 to, to, 16; bra ZERO;\nEND: bar.warp.sync 0xffffffff;"
        "add.s32 at, at, chunk; add.s32 load_buffer, load_buffer, 1; setp.ge.s32 there, load_buffer, buffers;"
        "@there mov.b32 load_buffer, 0; }"
    )


def _multiply(format: StageFormat, kind: str, columns: int) -> str:
    """Assembly that multiplies a unit: its words are at `words_at`, its group parameters at `params_at`, its activations
    at `line`.
    """
    blocks = columns // 8
    words = "".join(
        f"ld.shared.v4.b32 {{{', '.join(f'word{4 * block + j}' for j in range(4))}}}, [words_at + {4 * LINE_BYTES * block}];"
        for block in range(format.blocks)
    )
    params = "".join(
        f"ld.shared.b16 number, [params_at + {32 * (format.groups * which + group) + STRIP * half}];"
        f"mov.b32 {name}0_{group}_{half}, {{number, number}};"
        for which, name in enumerate(format.kinds)
        for group in range(format.groups)
        for half in range(2)
    )
    loads = "".join(
        f"{f'add.s32 near, near, eight_rows;' if block and not half else ''}"
        f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{', '.join(f'b{8 * block + 4 * half + j}' for j in range(4))}}},"
        f" [near + {64 * half}];"
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
        f"{{ {packed.registers(format, 1)} .reg .b32 b<{8 * blocks}>, near; {words} {params} mov.b32 near, line;"
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
    slot = slot_bytes(format)
    ring = slots * slot
    longs = ("words", "scales", "shifts", "x", "strip_bytes", "x_stride")
    numbers = ("rows", "k", "strip", "strips", "first_step", "steps", "chunk", "buffers", "groups", "params_row")
    given = "".join(f"mov.b64 {name}, ${1 + i};" for i, name in enumerate(longs)) + "".join(
        f"mov.b32 {name}, ${1 + len(longs) + i};" for i, name in enumerate(numbers)
    )
    sums = range(columns // 2)
    return (
        f"{{ .reg .b64 {', '.join(longs)}; .reg .b32 {', '.join(numbers)}; {given}"
        ".reg .pred fetching, has_second, is_first, loads, more, there, second;"
        ".reg .b32 memory, barriers, thread, warp, lane, log_warps, begins, ends, first_strip, second_strip, own_line,"
        "own_param, own_group, own_step, own_slot, pitch, eight_rows, buffer_bytes, to, arrives, slot, slots_at, slots_end,"
        "full, full_at, phase, size, at, load_buffer, buffer, buffer_phase, line_at, at_chunk, segment, left, start, count,"
        "line, words_at, params_at, row, swapped, next_chunk, next_segment, next_left, next_step, next_strip, done;"
        ".reg .b64 policy, own_words, own_params, next_words, from, wide;"
        f".reg .f32 sum<{columns // 2}>, other<{columns // 2}>;"
        "mov.u32 thread, %tid.x; shr.u32 warp, thread, 5; and.b32 lane, thread, 31; mov.b32 memory, global_smem;"
        f"mov.b32 log_warps, {warps.bit_length() - 1}; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
        "setp.eq.s32 is_first, lane, 0; setp.eq.s32 loads, warp, 0;"
        # A warp's range of units, in parts of a unit per step and strip, and its strips.
        "mul.lo.s32 begins, warp, strips; add.s32 ends, begins, strips; shr.u32 first_strip, begins, log_warps;"
        "shr.u32 second_strip, ends, log_warps; setp.ne.s32 has_second, first_strip, second_strip;"
        # Its slots and their barriers.
        f"add.s32 barriers, memory, {x_bytes + warps * ring}; mad.lo.s32 full_at, warp, {8 * slots}, barriers;"
        f"add.s32 full_at, full_at, {8 * MOST_CHUNKS}; mad.lo.s32 slots_at, warp, {ring}, memory;"
        f"add.s32 slots_at, slots_at, {x_bytes}; add.s32 slots_end, slots_at, {ring};"
        + "".join(f"@is_first mbarrier.init.shared::cta.b64 [full_at + {8 * i}], 1;" for i in range(slots))
        + "setp.eq.s32 there, thread, 0;"
        + "".join(f"@there mbarrier.init.shared::cta.b64 [barriers + {8 * i}], 1;" for i in range(MOST_CHUNKS))
        + "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff;"
        # A thread's place in them, and in rows of activations, of which `ldmatrix` takes 16 bytes at a time: of eight rows
        # those of numbers 0 to 7 along K, then of 8 to 15...
        f"cvt.s64.s32 from, strip; mad.lo.s64 own_words, from, strip_bytes, words; {_own_params(format)}"
        f"shr.u32 own_param, lane, 2; shl.b32 own_param, own_param, 1; add.s32 own_param, own_param, {STEPS * format.words};"
        f"mad.lo.s32 pitch, chunk, {ROW}, {UNIT}; shl.b32 eight_rows, pitch, 3; mul.lo.s32 buffer_bytes, pitch, {columns};"
        "and.b32 own_line, lane, 7; mul.lo.s32 own_line, own_line, pitch; shr.u32 size, lane, 3;"
        "mad.lo.s32 own_line, size, 16, own_line;"
        f"{''.join(f'mov.f32 sum{i}, 0f00000000; mov.f32 other{i}, 0f00000000;' for i in sums)}"
        # The first units, and the first chunks: all but one of those that there is room for.
        "mov.b32 next_chunk, 0; setp.gt.s32 fetching, steps, 0; mov.b32 next_left, 0; mov.b32 next_step, 0;"
        f"mov.b64 next_words, own_words; bra.uni FIRST; {_seek(format, 'SEEK', 'FOUND')}"
        "mov.b32 at, 0; mov.b32 load_buffer, 0; mov.b32 done, 1; @!loads bra LOADED;"
        f"\nLOAD: {_load_chunk()} add.s32 done, done, 1; setp.lt.s32 more, done, buffers;"
        "setp.lt.and.s32 more, at, steps, more; @more bra LOAD;"
        f"\nLOADED: mov.b32 to, slots_at; mov.b32 arrives, full_at; mov.b32 done, 0;"
        f"\nAHEAD: {_fetch(format)} add.s32 to, to, {slot}; add.s32 arrives, arrives, 8;"
        f"add.s32 done, done, 1; setp.lt.s32 more, done, {slots - 1}; @more bra AHEAD;"
        "mov.b32 slot, slots_at; mov.b32 full, full_at; mov.b32 phase, 0; mov.b32 buffer, 0; mov.b32 buffer_phase, 0;"
        "mov.b32 at_chunk, 0;"
        # A chunk. All warps are done with the one before.
        "\nCHUNK: bar.sync 0; setp.lt.and.s32 more, at, steps, loads; @!more bra HERE;"
        f"{_load_chunk()}"
        f"\nHERE: sub.s32 size, steps, at_chunk; min.s32 size, size, chunk; mad.lo.s32 row, buffer, 8, barriers;"
        f"{_wait('row', 'buffer_phase')} mad.lo.s32 line_at, buffer, buffer_bytes, own_line;"
        "add.s32 line_at, line_at, memory;"
        f"mov.b32 segment, 0; {_first_segment('size', 'start', 'left')}"
        f"\nSEGMENT: mad.lo.s32 line, start, {ROW}, line_at; setp.gt.s32 more, left, 0; @!more bra END;"
        f"\nSLOT: {_wait('full', 'phase')} cp.async.wait_group {slots - 2}; bar.warp.sync 0xffffffff; {_fetch(format)}"
        f"min.s32 count, left, {STEPS}; mad.lo.s32 words_at, lane, 16, slot; add.s32 params_at, slot, own_param;"
        f"sub.s32 left, left, {STEPS};"
        f"\nUNIT: {_multiply(format, kind, columns)} add.s32 words_at, words_at, {format.words};"
        f"add.s32 params_at, params_at, {params_bytes(format)}; add.s32 line, line, {ROW}; sub.s32 count, count, 1;"
        "setp.gt.s32 more, count, 0; @more bra UNIT;"
        f"mov.b32 to, slot; mov.b32 arrives, full; add.s32 slot, slot, {slot}; add.s32 full, full, 8;"
        "setp.ge.s32 more, slot, slots_end; @more mov.b32 slot, slots_at; @more mov.b32 full, full_at;"
        "@more xor.b32 phase, phase, 1; setp.gt.s32 more, left, 0; @more bra SLOT;"
        f"\nEND: {_swap(columns)} setp.eq.s32 more, segment, 0; mov.b32 segment, 1;"
        f"{_second_segment('size', 'start', 'row')} mov.b32 left, row; @more bra SEGMENT;"
        "add.s32 buffer, buffer, 1; setp.ge.s32 more, buffer, buffers; @more mov.b32 buffer, 0;"
        "@more xor.b32 buffer_phase, buffer_phase, 1;"
        "add.s32 at_chunk, at_chunk, chunk; setp.lt.s32 more, at_chunk, steps; @more bra CHUNK;"
        # Partial sums take the place of the activations. Their order is that of strips, and of warps in each.
        f"bar.sync 0; add.s32 row, warp, first_strip; {_store_sums(columns, 'row')} {_swap(columns)}"
        f"@!has_second bra STORED; add.s32 row, warp, second_strip; {_store_sums(columns, 'row')}"
        "\nSTORED: bar.sync 0; mov.b32 $0, 0; }"
    )


def _own_params(format: StageFormat) -> str:
    """Assembly that finds which group parameters a thread copies: 16 bytes of a group's scales or shifts in a step."""
    if not format.group:
        return "mov.b64 own_params, 0; mov.b32 own_group, 0; mov.b32 own_slot, 0; mov.b32 own_step, 0;"
    log, both = format.groups.bit_length() - 1, len(format.kinds) - 1
    chosen = (
        f"shr.u32 own_slot, lane, {1 + log}; and.b32 own_slot, own_slot, 1; setp.ne.s32 there, own_slot, 0;"
        "@there mov.b64 own_params, shifts;"
        if both
        else ""
    )
    return (
        f"mov.b64 own_params, scales; {chosen} shr.u32 own_step, lane, {1 + log + both};"
        f"shr.u32 own_group, lane, 1; and.b32 own_group, own_group, {format.groups - 1};"
        "and.b32 own_slot, lane, 1; mul.wide.u32 wide, own_slot, 16; add.s64 own_params, own_params, wide;"
        "mul.wide.s32 wide, strip, 32; add.s64 own_params, own_params, wide;"
        f"mul.lo.s32 own_slot, lane, {UNIT}; add.s32 own_slot, own_slot, {STEPS * format.words};"
    )


@builtin
def multiply_strips(
    words, scales, shifts, x, strip_bytes, x_stride, rows, k, strip, strips, first_step, steps, chunk, buffers,
    groups, params_row, FORMAT, KIND, COLUMNS, WARPS, SLOTS, X_BYTES, _semantic=None,
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
        chunk: steps of a chunk.
        buffers: chunks that there is room for in `X_BYTES`, at most `MOST_CHUNKS`; 1 only where one chunk has all steps.
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
        text, ",".join(["=r"] + ["l"] * 6 + ["r"] * 10),
        [
            words, scales, shifts, x, strip_bytes, x_stride, rows, k, strip, strips, first_step, steps, chunk, buffers,
            groups, params_row,
        ],
        dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip
