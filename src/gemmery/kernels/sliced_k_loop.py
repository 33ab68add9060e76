"""The assembly of `kernels.sliced_k`: how warps load and multiply their share of a packed weight's strips.

A strip is 16 rows of the weight. A program has bundles of `bundle` strips; a unit is a bundle and `DEPTH` numbers
along K, and is multiplied by one warp, which loads activations once for the whole bundle. All warps go through K in
chunks, whose activations are in shared memory. They divide the units of each chunk evenly among themselves. So a warp
has a range of units, of one bundle or of two. These bundles are the same in every chunk, since they depend only on the
ratio of bundles to warps.

A warp has its own slots for the words of its next units, and does not wait for other warps'. Words and activations
are copied by `cp.async.bulk`, which takes the hint that words are read once. They then leave L2 first, before data
that is still to be written back to memory. PTX has the same hint for `cp.async`, but an H200 fails there with an
illegal instruction.
"""

from typing import NamedTuple

from . import any_width_packed as packed
from .any_width_packed import PIECES, STEP, STRIP, StageFormat
from .any_width_stage import LINE_BYTES

#: Rows of activations, which are columns of a sum.
COLUMNS = 8
#: Numbers along K of a unit, and how many of `any_width_packed`'s steps these are.
DEPTH, STEPS = 128, 128 // STEP
#: Bytes of a row of activations in a unit, and of one of a partial sum, which threads then store without conflicts.
ROW, SUM_ROW = 2 * DEPTH, 4 * (STRIP + 4)
#: Bytes that a thread copies at a time. Rows of activations are longer by as much, so that `ldmatrix` has no conflicts.
COPY = 16
#: Chunks of activations that there may be room for.
MOST_CHUNKS = 4
#: The instruction for bulk copies.
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


class Shape(NamedTuple):
    """The parameters of the assembly.

    Attributes:
        format: the weight's format.
        kind: the type of activations, as PTX names it.
        bundle: strips of a unit.
        warps: a power of two.
        slots: slots of each warp.
        x_bytes: of shared memory, for activations.
        spans: whether a warp may have units of two bundles: whether `bundles` does not divide `warps`.
    """

    format: StageFormat
    kind: str
    bundle: int
    warps: int
    slots: int
    x_bytes: int
    spans: bool

    @property
    def words(self) -> int:
        """Bytes of the words of a strip in a unit."""
        return STEPS * self.format.words

    @property
    def groups(self) -> int:
        """Groups along K of a unit."""
        return max(DEPTH // self.format.group, 1) if self.format.group else 0

    @property
    def params_row(self) -> int:
        """Bytes of one group's scales or shifts of a unit."""
        return 2 * STRIP * self.bundle

    @property
    def params(self) -> int:
        """Bytes of all group parameters of a unit."""
        return self.params_row * self.groups * len(self.format.kinds)

    @property
    def slot(self) -> int:
        """Bytes of a slot."""
        return self.bundle * self.words + self.params

    @property
    def barriers_at(self) -> int:
        """The place of the barriers, after activations and slots."""
        return self.x_bytes + self.warps * self.slots * self.slot

    @property
    def bytes(self) -> int:
        """Bytes of shared memory."""
        return self.barriers_at + 8 * (MOST_CHUNKS + self.warps * self.slots)

    @property
    def sums(self) -> int:
        """Elements of a partial sum that each thread holds."""
        return self.bundle * COLUMNS // 2

    @property
    def sum_bytes(self) -> int:
        """Bytes of the partial sum of a strip."""
        return SUM_ROW * COLUMNS


def _wait(barrier: str, phase: str) -> str:
    """Assembly that waits for a barrier's phase."""
    return (
        f"{{ .reg .pred done;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [{barrier}], {phase};"
        "@done bra DONE; bra WAIT;\nDONE: }"
    )


# ---------------------------------------------------------------------------------------------------------------------
# A warp's share


def _ends(size: str) -> str:
    """Assembly that finds a warp's first and last unit, `low` and `high`, in a chunk with a given number of units per
    bundle.
    """
    return (
        f"mul.lo.s32 low, begins, {size}; shr.u32 low, low, log_warps; mul.lo.s32 high, ends, {size};"
        "shr.u32 high, high, log_warps;"
    )


def _first_range(size: str, start: str, count: str) -> str:
    """Assembly that finds where a warp's units of its first bundle start in a chunk, and how many these are."""
    return (
        f"{{ .reg .b32 low, high; {_ends(size)} mul.lo.s32 {count}, first_bundle, {size};"
        f"sub.s32 {start}, low, {count}; sub.s32 high, high, {count}; min.s32 {count}, high, {size};"
        f"sub.s32 {count}, {count}, {start}; }}"
    )


def _second_range(size: str, start: str, count: str) -> str:
    """Assembly that finds the same of its second bundle: none if it has only one."""
    return (
        f"{{ .reg .b32 low, high; {_ends(size)} mul.lo.s32 {count}, second_bundle, {size};"
        f"sub.s32 {count}, high, {count}; @!has_second mov.b32 {count}, 0; mov.b32 {start}, 0; }}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Loads


def _fetch(s: Shape) -> str:
    """Assembly that begins to copy a warp's next unit into the slot at `to`, and advances to the unit after it.

    A thread copies the words of a strip, if there is one for it. `arrives` is the slot's barrier.
    """
    lines = [
        f"mul.lo.s32 left, next_bundle, {s.bundle}; sub.s32 left, strips, left; min.s32 left, left, {s.bundle};"
        "max.s32 left, left, 0; setp.lt.and.s32 there, lane, left, fetching;"
        f"cvt.u32.u64 size, strip_bytes; mul.lo.s32 place, next_unit, {s.words}; sub.s32 size, size, place;"
        f"min.s32 size, size, {s.words}; mul.lo.s32 place, size, left; and.pred other, is_first, fetching;"
        "@other mbarrier.arrive.expect_tx.shared::cta.b64 _, [arrives], place; bar.warp.sync 0xffffffff;"
        f"mad.lo.s32 place, lane, {s.words}, to;"
        f"@there {BULK}.L2::cache_hint [place], [next_words], size, [arrives], policy;"
    ]
    if s.format.blocks > 1:
        # The last step may end before its last block does, and the strip's words with it. Zeros take their place.
        block = 4 * LINE_BYTES
        lines.append(
            f"and.b32 place, size, {block}; setp.ne.and.s32 other, place, 0, fetching;"
            f"mad.lo.s32 place, lane, {COPY}, to; add.s32 place, place, size; mov.b32 row, 0;"
        )
        lines += [
            f"@other st.shared.v4.b32 [place + {s.words * i}], {{row, row, row, row}};"
            for i in range(s.bundle)
        ]
        # A later copy into the same bytes must come after these.
        lines.append("@other fence.proxy.async.shared::cta;")
    if s.format.group:
        shift = s.format.group.bit_length() - 1
        lines.append(
            f"shl.b32 first, next_unit, {DEPTH.bit_length() - 1}; shr.u32 first, first, {shift};"
            f"mul.wide.s32 at, next_bundle, {s.params_row}; shl.b32 left, left, 1;"
        )
        for i in range(_copies(s)):
            lines.append(
                f"add.s32 row, first, own_group{i}; setp.lt.s32 other, row, groups; selp.b32 size, {COPY}, 0, other;"
                f"mul.wide.s32 from, row, params_row; add.s64 from, from, own_params{i}; add.s64 from, from, at;"
                f"setp.lt.and.s32 there, own_place, left, has_params; and.pred there, there, fetching;"
                f"add.s32 place, to, own_slot;"
                f"@there cp.async.cg.shared.global [place + {COPY * 32 * i}], [from], {COPY}, size;"
            )
    return (
        "{ .reg .pred there, other, second; .reg .b32 place, row, size, left, first; .reg .b64 from, at;"
        f"{''.join(lines)} cp.async.commit_group; add.s64 next_words, next_words, {s.words};"
        "add.s32 next_unit, next_unit, 1; sub.s32 next_left, next_left, 1;"
        f"setp.gt.s32 there, next_left, 0; @!there bra SEEK; bra.uni FOUND; {_seek(s, 'SEEK', 'FOUND')} }}"
    )


def _seek(s: Shape, entry: str, done: str) -> str:
    """Assembly that goes on to the next range of units that is not empty, or ends with `fetching` false."""
    return (
        f"\n{entry}: @!fetching bra {done}; setp.eq.s32 second, next_range, 0; @second bra SECOND;"
        "add.s32 next_chunk, next_chunk, chunk; setp.lt.s32 fetching, next_chunk, units;"
        f"@!fetching bra {done};\nFIRST: sub.s32 size, units, next_chunk; min.s32 size, size, chunk;"
        f"{_first_range('size', 'row', 'next_left')} mov.b32 next_range, 0; mov.b32 next_bundle, first_bundle;"
        f"bra.uni PLACE;\nSECOND: sub.s32 size, units, next_chunk; min.s32 size, size, chunk;"
        f"{_second_range('size', 'row', 'next_left')} mov.b32 next_range, 1; mov.b32 next_bundle, second_bundle;"
        f"\nPLACE: setp.gt.s32 there, next_left, 0; @!there bra {entry};"
        "add.s32 next_unit, row, next_chunk; add.s32 next_unit, next_unit, first_unit;"
        f"mul.wide.s32 from, next_unit, {s.words}; add.s64 next_words, own_words, from;"
        f"mul.wide.s32 from, next_bundle, {s.bundle}; mad.lo.s64 next_words, from, strip_bytes, next_words;\n{done}:"
    )


def _copies(s: Shape) -> int:
    """The largest number of copies of group parameters that a thread makes for a unit."""
    return -(-s.params // (32 * COPY))


def _own_params(s: Shape) -> str:
    """Assembly that finds which group parameters a thread copies: 16 bytes of a group's scales or shifts at a time."""
    if not s.format.group:
        return ""
    each, log = s.params_row // COPY, s.groups.bit_length() - 1
    lines = [
        f".reg .b64 own_params<{_copies(s)}>; .reg .b32 own_group<{_copies(s)}>, own_place, own_slot;"
        f"and.b32 own_place, lane, {each - 1}; setp.lt.u32 has_params, lane, {s.params // COPY};"
        f"mad.lo.s32 own_slot, lane, {COPY}, {s.bundle * s.words};"
    ]
    for i in range(_copies(s)):
        lines.append(
            f"shr.u32 size, lane, {each.bit_length() - 1}; add.s32 size, size, {32 // each * i};"
            f"and.b32 own_group{i}, size, {s.groups - 1}; shr.u32 size, size, {log}; setp.ne.s32 there, size, 0;"
            f"mov.b64 own_params{i}, scales; @there mov.b64 own_params{i}, shifts;"
            f"mul.wide.s32 wide, own_place, {COPY};"
            f"add.s64 own_params{i}, own_params{i}, wide; mul.wide.s32 wide, strip, {2 * STRIP};"
            f"add.s64 own_params{i}, own_params{i}, wide;"
        )
    return "".join(lines)


def _load_chunk() -> str:
    """Assembly that begins to copy the activations of the chunk from `at` on, in the first warp: a row for each thread.

    Rows past M have no space: the bytes that are read in their place affect only columns of the sum that are not
    stored. Numbers past K are set to zero. `at` counts from `first_unit`, and `load_buffer` is the chunk's buffer.
    """
    return (
        "{ .reg .pred there; .reg .b32 to, bar, bytes, all, last; .reg .b64 from, wide;"
        f"sub.s32 all, units, at; min.s32 all, all, chunk; mul.lo.s32 all, all, {ROW}; add.s32 bytes, at, first_unit;"
        f"mul.lo.s32 bytes, bytes, {DEPTH}; mul.wide.s32 wide, bytes, 2; sub.s32 bytes, k, bytes;"
        "mul.lo.s32 bytes, bytes, 2; min.s32 bytes, bytes, all; mad.lo.s32 bar, load_buffer, 8, barriers;"
        "mul.lo.s32 last, bytes, rows; @is_first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], last;"
        "bar.warp.sync 0xffffffff; mad.lo.s32 to, load_buffer, buffer_bytes, memory; mad.lo.s32 to, lane, pitch, to;"
        "add.s64 wide, wide, x; cvt.s64.s32 from, lane; mad.lo.s64 from, from, x_stride, wide;"
        f"setp.lt.s32 there, lane, rows; @there {BULK} [to], [from], bytes, [bar];"
        "add.s32 last, to, all; add.s32 to, to, bytes; mov.b32 bytes, 0;"
        "\nZERO: setp.lt.and.s32 there, to, last, there; @!there bra END;"
        "st.shared.v4.b32 [to], {bytes, bytes, bytes, bytes}; add.s32 to, to, 16; bra ZERO;"
        "\nEND: bar.warp.sync 0xffffffff;"
        "add.s32 at, at, chunk; add.s32 load_buffer, load_buffer, 1; setp.ge.s32 there, load_buffer, buffers;"
        "@there mov.b32 load_buffer, 0; }"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Products


def _multiply(s: Shape) -> str:
    """Assembly that multiplies a unit: its words are at `words_at`, its group parameters at `params_at`, and its
    activations at `line`. A unit at the end of K may have one step less.
    """
    lines = [
        f"{{ {packed.registers(s.format, s.bundle)} .reg .b32 b<8>, steps; .reg .pred ends;"
        f"sub.s32 steps, k, unit_k; setp.le.s32 ends, steps, {STEP};"
    ]
    for step in range(STEPS):
        if step:
            lines.append("@ends bra DONE;")
        lines += [_load_words(s, step), _load_activations(step)]
        if s.format.group and (not step or s.format.group < DEPTH):
            lines.append(_load_params(s, step))
            lines.append(packed.prepare(s.format, s.kind, s.bundle))
        lines += [_products(s, piece) for piece in range(PIECES)]
    return "".join(lines) + "\nDONE: }"


def _load_words(s: Shape, step: int) -> str:
    """Assembly that loads a thread's words of a step."""
    return "".join(
        f"ld.shared.v4.b32 {{{', '.join(packed.words_of(s.format, i, block))}}},"
        f" [words_at + {s.words * i + s.format.words * step + 4 * LINE_BYTES * block}];"
        for i in range(s.bundle)
        for block in range(s.format.blocks)
    )


def _load_params(s: Shape, step: int) -> str:
    """Assembly that loads a thread's group parameters of a step: of its row, and of the row 8 below it."""
    return "".join(
        f"ld.shared.b16 number, [params_at + {at + 2 * STRIP * i + STRIP * half}];"
        f"mov.b32 {kind.name}{packed.suffix(i, group, half)}, {{number, number}};"
        for which, kind in enumerate(s.format.kinds)
        for group in range(s.format.groups)
        for at in [s.params_row * (s.groups * which + s.format.groups * step + group)]
        for i in range(s.bundle)
        for half in range(2)
    )


def _load_activations(step: int) -> str:
    """Assembly that loads a thread's share of a step's activations."""
    return "".join(
        f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{', '.join(f'b{4 * half + j}' for j in range(4))}}},"
        f" [line + {2 * STEP * step + STEP * half}];"
        for half in range(2)
    )


def _products(s: Shape, piece: int) -> str:
    """Assembly that unpacks one of a step's pieces, see `packed.pieces_of`, and multiplies it."""
    lines = [packed.unpacked(s.format, s.kind, s.bundle, piece)]
    for i in range(s.bundle):
        sums = ", ".join(f"sum{4 * i + j}" for j in range(4))
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{s.kind}.{s.kind}.f32 {{{sums}}},"
            f" {{{', '.join(packed.pieces_of(i, piece))}}}, {{b{2 * piece}, b{2 * piece + 1}}}, {{{sums}}};"
        )
    return "".join(lines)


def _store_sums(s: Shape, index: str) -> str:
    """Assembly that stores a thread's numbers of a partial sum as the `index`-th one."""
    lines = [
        f"st.shared.f32 [own + {s.sum_bytes * i + SUM_ROW * (j % 2) + 32 * (j // 2)}], sum{4 * i + j};"
        for i in range(s.bundle)
        for j in range(4)
    ]
    return (
        f"{{ .reg .b32 own, place; shr.u32 place, lane, 2; mad.lo.s32 own, {index}, {s.sum_bytes * s.bundle}, memory;"
        "mad.lo.s32 own, place, 4, own; and.b32 place, lane, 3;"
        f"mad.lo.s32 own, place, {2 * SUM_ROW}, own; {''.join(lines)} }}"
    )


def _swap(s: Shape) -> str:
    """Assembly that swaps the sums of both of a warp's bundles."""
    if not s.spans:
        return ""
    return "".join(
        f"mov.b32 swapped, sum{i}; mov.b32 sum{i}, other{i}; mov.b32 other{i}, swapped;"
        for i in range(s.sums)
    )


# ---------------------------------------------------------------------------------------------------------------------
# The whole


def _begin(s: Shape) -> str:
    """Assembly that finds a warp's share and a thread's places, and makes the barriers."""
    return (
        "mov.u32 thread, %tid.x; shr.u32 warp, thread, 5; and.b32 lane, thread, 31; mov.b32 memory, global_smem;"
        f"mov.b32 log_warps, {s.warps.bit_length() - 1}; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
        "setp.eq.s32 is_first, lane, 0; setp.eq.s32 loads, warp, 0;"
        # A warp's range of units, in parts of a unit and bundle, and its bundles.
        "mul.lo.s32 begins, warp, bundles; add.s32 ends, begins, bundles; shr.u32 first_bundle, begins, log_warps;"
        "shr.u32 second_bundle, ends, log_warps; setp.ne.s32 has_second, first_bundle, second_bundle;"
        f"add.s32 barriers, memory, {s.barriers_at}; mad.lo.s32 full_at, warp, {8 * s.slots}, barriers;"
        f"add.s32 full_at, full_at, {8 * MOST_CHUNKS}; mad.lo.s32 slots_at, warp, {s.slots * s.slot}, memory;"
        f"add.s32 slots_at, slots_at, {s.x_bytes}; add.s32 slots_end, slots_at, {s.slots * s.slot};"
        + "".join(f"@is_first mbarrier.init.shared::cta.b64 [full_at + {8 * i}], 1;" for i in range(s.slots))
        + "setp.eq.s32 there, thread, 0;"
        + "".join(
            f"@there mbarrier.init.shared::cta.b64 [barriers + {8 * i}], 1;" for i in range(MOST_CHUNKS)
        )
        + "fence.mbarrier_init.release.cluster; bar.warp.sync 0xffffffff;"
        # The address of a strip's first word, for a thread that copies the words.
        "add.s32 size, strip, lane; cvt.s64.s32 from, size; mad.lo.s64 own_words, from, strip_bytes, words;"
        f"{_own_params(s)} shr.u32 own_param, lane, 2; shl.b32 own_param, own_param, 1;"
        f"add.s32 own_param, own_param, {s.bundle * s.words};"
        # `ldmatrix` takes 16 bytes of a row of activations at a time: numbers 0 to 7 along K of eight rows, 8 to 15 ...
        f"mad.lo.s32 pitch, chunk, {ROW}, {COPY}; "
        "mul.lo.s32 buffer_bytes, pitch, rows; and.b32 own_line, lane, 7; mul.lo.s32 own_line, own_line, pitch;"
        "shr.u32 size, lane, 3; mad.lo.s32 own_line, size, 16, own_line;"
        + "".join(f"mov.f32 sum{i}, 0f00000000;" for i in range(s.sums))
        + "".join(f"mov.f32 other{i}, 0f00000000;" for i in range(s.sums) if s.spans)
    )


def _chunk(s: Shape) -> str:
    """Assembly of a warp's units of a chunk, whose number of units for a bundle is `size`."""
    second = (
        f"{_swap(s)} setp.eq.s32 more, range, 0; mov.b32 range, 1; {_second_range('size', 'start', 'row')}"
        "mov.b32 left, row; @more bra RANGE;"
    )
    return (
        f"mov.b32 range, 0; {_first_range('size', 'start', 'left')}"
        f"\nRANGE: mad.lo.s32 line, start, {ROW}, line_at; add.s32 unit_k, at_chunk, first_unit;"
        f"add.s32 unit_k, unit_k, start; mul.lo.s32 unit_k, unit_k, {DEPTH}; setp.gt.s32 more, left, 0; @!more bra END;"
        f"\nUNIT: {_wait('full', 'phase')} cp.async.wait_group {s.slots - 2}; bar.warp.sync 0xffffffff; {_fetch(s)}"
        f"mad.lo.s32 words_at, lane, 16, slot; add.s32 params_at, slot, own_param; {_multiply(s)}"
        f"add.s32 line, line, {ROW}; add.s32 unit_k, unit_k, {DEPTH};"
        f"mov.b32 to, slot; mov.b32 arrives, full; add.s32 slot, slot, {s.slot}; add.s32 full, full, 8;"
        "setp.ge.s32 more, slot, slots_end; @more mov.b32 slot, slots_at; @more mov.b32 full, full_at;"
        "@more xor.b32 phase, phase, 1; sub.s32 left, left, 1; setp.gt.s32 more, left, 0; @more bra UNIT;"
        f"\nEND: {second if s.spans else ''}"
    )


def assembly(s: Shape) -> str:
    """The assembly, whose operands are those of `multiply_strips` from $1 on."""
    longs = ("words", "scales", "shifts", "x", "strip_bytes", "x_stride")
    numbers = (
        "rows", "k", "strip", "strips", "bundles", "first_unit", "units", "chunk", "buffers", "groups", "params_row",
    )  # fmt: skip
    given = "".join(f"mov.b64 {name}, ${1 + i};" for i, name in enumerate(longs)) + "".join(
        f"mov.b32 {name}, ${1 + len(longs) + i};" for i, name in enumerate(numbers)
    )
    last = (
        f"{_swap(s)} @!has_second bra STORED; add.s32 row, warp, second_bundle; {_store_sums(s, 'row')}"
        if s.spans
        else ""
    )
    return (
        f"{{ .reg .b64 {', '.join(longs)}; .reg .b32 {', '.join(numbers)}; {given}"
        ".reg .pred fetching, has_second, has_params, is_first, loads, more, there, second;"
        ".reg .b32 memory, barriers, thread, warp, lane, log_warps, begins, ends, first_bundle, second_bundle,"
        "own_line, own_param, pitch, buffer_bytes, to, arrives, slot, slots_at, slots_end, full, full_at, phase,"
        "size, at, load_buffer, buffer, buffer_phase, line_at, at_chunk, range, left, start, line, words_at, params_at,"
        "row, unit_k, swapped, next_chunk, next_range, next_left, next_unit, next_bundle, done;"
        ".reg .b64 policy, own_words, next_words, from, wide;"
        f".reg .f32 sum<{s.sums}>, other<{s.sums}>; {_begin(s)}"
        # The first units, and the first chunks: all but one of those that there is room for.
        "mov.b32 next_chunk, 0; setp.gt.s32 fetching, units, 0; mov.b32 next_left, 0; mov.b32 next_unit, 0;"
        f"mov.b64 next_words, own_words; bra.uni FIRST; {_seek(s, 'SEEK', 'FOUND')}"
        "mov.b32 at, 0; mov.b32 load_buffer, 0; mov.b32 done, 1; @!loads bra LOADED;"
        f"\nLOAD: {_load_chunk()} add.s32 done, done, 1; setp.lt.s32 more, done, buffers;"
        "setp.lt.and.s32 more, at, units, more; @more bra LOAD;"
        "\nLOADED: mov.b32 to, slots_at; mov.b32 arrives, full_at; mov.b32 done, 0;"
        f"\nAHEAD: {_fetch(s)} add.s32 to, to, {s.slot}; add.s32 arrives, arrives, 8;"
        f"add.s32 done, done, 1; setp.lt.s32 more, done, {s.slots - 1}; @more bra AHEAD;"
        "mov.b32 slot, slots_at; mov.b32 full, full_at; mov.b32 phase, 0; mov.b32 buffer, 0; mov.b32 buffer_phase, 0;"
        "mov.b32 at_chunk, 0;"
        # All warps are done with the chunk before.
        f"\nCHUNK: bar.sync 0; setp.lt.and.s32 more, at, units, loads; @!more bra HERE; {_load_chunk()}"
        f"\nHERE: sub.s32 size, units, at_chunk; min.s32 size, size, chunk; mad.lo.s32 row, buffer, 8, barriers;"
        f"{_wait('row', 'buffer_phase')} mad.lo.s32 line_at, buffer, buffer_bytes, own_line;"
        f"add.s32 line_at, line_at, memory; {_chunk(s)}"
        "add.s32 buffer, buffer, 1; setp.ge.s32 more, buffer, buffers; @more mov.b32 buffer, 0;"
        "@more xor.b32 buffer_phase, buffer_phase, 1;"
        "add.s32 at_chunk, at_chunk, chunk; setp.lt.s32 more, at_chunk, units; @more bra CHUNK;"
        # Partial sums take the place of the activations. Their order is that of bundles, and of warps in each.
        f"bar.sync 0; add.s32 row, warp, first_bundle; {_store_sums(s, 'row')} {last}"
        "\nSTORED: bar.sync 0; mov.b32 $0, 0; }"
    )
