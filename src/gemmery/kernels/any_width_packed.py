"""Packed weights in tiles of any width: how a stage holds them, and the assembly that unpacks them.

The weight is X, the operand with 64 rows for each `wgmma`, which takes it from registers. A stage has its words, in
the order in which `formats.packing` deals them out to threads, and its group parameters: all scales, then all shifts.
These lie by 64 rows of X, and within them group by group. For each 64 rows and 64 numbers of 4 bits along K, a thread
has 16 bytes of words. They become its share of four pieces, of 16 numbers along K each. Each piece is unpacked while
the tensor cores multiply others. CUTLASS's mixed-input kernels work in this order (github.com/NVIDIA/cutlass).

The arithmetic is that of `kernels.packed`, so a weight has the same bits in all schedules.
"""

import itertools
import struct
from collections.abc import Callable
from typing import Literal, NamedTuple

import triton.language as tl

from . import decoders
from .any_width_stage import HEAD, LINE_BYTES, ROWS, Params, params_bytes, x_bytes

#: Numbers along K of a short step, and pieces in which it is multiplied. Each piece of it has its own registers.
STEP, PIECES = 64, 4
#: Rows of a strip of words.
STRIP = 16
#: The GPU whose assembly this is.
ARCH = 90


class StageFormat(NamedTuple):
    """A packed weight's format, as far as the assembly needs it; an `any_width_stage.Stage`.

    Attributes:
        code, bits: which number a code stands for, and how long it is; see `formats.base.Format`.
        group: numbers along K that share group parameters, a power of two; 0 if there are none.
        shifts: "zeros", "offsets" or "" for nothing.
        zero: the code that stands for 0, where there are no zero points.
        wide: whether a step has twice as many numbers. Each instruction of a loop delays the products, and many of
            them, such as those that wait for a stage, are needed once in a step.
    """

    code: str
    bits: int
    group: int
    shifts: str
    zero: int
    wide: bool = False

    @classmethod
    def of(cls, text: str) -> "StageFormat":
        """The inverse of the format's `str`."""
        code, bits, group, shifts, zero, wide = text.split("/")
        return cls(code, int(bits) >> bool(wide), int(group), shifts, int(zero), bool(wide))

    def __str__(self) -> str:
        bits = self.bits << self.wide
        return f"{self.code}/{bits}/{self.group}/{self.shifts}/{self.zero}/{'wide' * self.wide}"

    @property
    def kind(self) -> str:
        """See `Stage.kind`."""
        return "packed"

    @property
    def form(self) -> Literal["packed"]:
        """See `Stage.form`."""
        return "packed"

    @property
    def columns(self) -> int:
        """Of a line of words."""
        return 8 * LINE_BYTES // (STRIP * self.bits)

    @property
    def words(self) -> int:
        """Bytes of the words of a strip and a step."""
        return STRIP * self.step * self.bits // 8

    @property
    def blocks(self) -> int:
        """Blocks of words of a strip and a step, of 4 lines, of which a thread has 16 bytes."""
        return self.words // (4 * LINE_BYTES)

    @property
    def groups(self) -> int:
        """Groups of a step."""
        return max(self.step // self.group, 1) if self.group else 0

    @property
    def params(self) -> int:
        """Bytes of the scales, or of the shifts, of 64 rows and a step."""
        return 2 * ROWS * self.groups

    @property
    def kinds(self) -> tuple[Params, ...]:
        """The kinds of group parameters that there are."""
        names = ("scale", "shift")[: bool(self.group) + bool(self.shifts)]
        return tuple([Params(name, self.params, 2) for name in names])

    @property
    def step(self) -> int:
        """See `Stage.step`."""
        return STEP << self.wide

    @property
    def pieces(self) -> int:
        """Pieces of a step, in which it is multiplied."""
        return PIECES << self.wide

    @property
    def y_blocks(self) -> int:
        """See `Stage.y_blocks`."""
        return 2 if self.wide else 1

    def of_step(self, columns: int) -> "StageFormat | None":
        """See `Stage.of_step`. Long steps have 4-bit numbers, and two groups at most: registers hold all parameters."""
        found = self._replace(wide=columns == 2 * STEP)
        is_suited = not found.wide or (found.bits == 4 and found.groups <= 2)
        return found if found.step == columns and is_suited else None

    def of_halves(self, paired: bool) -> "StageFormat | None":
        """See `Stage.of_halves`."""
        return None if paired else self

    def load_params(self, rows: int, box: str, several: bool, maps: list[int], row: str, k: str) -> str:
        """See `Stage.load_params`. If a step has several groups, the tensor maps load 64 rows at a time."""
        load = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        each = box if self.groups == 1 else str(ROWS)
        # The assembler would make a slow division of one by a constant.
        group = f"shr.u32 group, {k}, {self.group.bit_length() - 1};"
        # `several` is not used: without a loop for a single load, 256x4096x4096 took 4 % longer.
        lines = [
            f"{{ mov.b64 map, gemm_any_width_param_{number}; cvta.param.u64 map, map; mov.b32 row, {row};"
            f"add.s32 last, {row}, {rows};\nNEXT: {load} [to], [map, {{row, group}}], [at];"
            f"mad.lo.s32 to, {each}, {2 * self.groups}, to; add.s32 row, row, {each};"
            "setp.lt.s32 more, row, last; @more bra NEXT; }"
            for number in maps
        ]
        declared = "{ .reg .pred more; .reg .b64 map; .reg .b32 row, last, group, to; mov.b32 to, params;"
        return f"{declared} {group} {' '.join(lines)} }}"

    def begin(self, rows: int, first: int, stages: str, y_rows: str) -> str:
        """See `Stage.begin`."""
        return (
            ".reg .b32 warp, lane, line, place, params, first_params; mov.u32 lane, %tid.x; shr.u32 warp, lane, 5;"
            "and.b32 warp, warp, 3; and.b32 lane, lane, 31;"
            # Group parameters follow both operands' blocks of all stages. A warp has 16 of 64 rows, and a thread the
            # row that is its number divided by 4, and the row 8 below it.
            f"mad.lo.s32 params, {y_rows}, {LINE_BYTES * self.y_blocks}, {x_bytes(rows, self)};"
            f"mul.lo.s32 first_params, params, {stages};"
            "mov.b32 params, global_smem; add.s32 first_params, first_params, params; shr.u32 params, lane, 2;"
            f"mad.lo.s32 params, warp, {STRIP}, params; mad.lo.s32 first_params, params, 2, first_params;"
            f"add.s32 first_params, first_params, {first // ROWS * self.params};"
            # A warp has a strip. TMA swizzles: of line i the n-th 16 bytes lie where those of number n xor i would.
            f"shr.u32 line, lane, 3; mad.lo.s32 line, warp, {self.words // LINE_BYTES}, line; and.b32 place, line, 7;"
            "xor.b32 lane, lane, place; and.b32 lane, lane, 7; mul.lo.s32 place, lane, 16;"
            f"mad.lo.s32 place, line, {LINE_BYTES}, place;"
        )

    def steps(
        self, sums: list[list[str]], KIND: str, turned: bool, promotes: bool, rows: int, arrived: str,
        release: Callable[[str], str], go_on: str, turns: str, ends: str,
    ) -> str:  # fmt: skip
        """See `Stage.steps`; X is unpacked on the way.

        A step is multiplied in pieces, one or two at a time. `PIECES` of them have separate registers, which are
        overwritten while the products of the others are in flight. In another order, or without a separate first
        step, the assembler of Triton 3.8 and older makes the products wait for each other.

        Args:
            promotes: ignored, since Y has 16 bits.
        """
        own, kind = len(sums), KIND.split(".")[0]
        # Each wait takes time, during which nothing is multiplied if there is only one warpgroup.
        count = 2 if rows == ROWS * own and not turns else 1
        parts = [range(first, first + count) for first in range(0, self.pieces, count)]
        wait = f"wgmma.wait_group.sync.aligned {PIECES // count - 1};"
        begin = f"{{ {arrived} {load(self, rows, own)}{prepare(self, kind, own)} }}"
        # In the middle of a long step, the step before is multiplied; in the middle of a short one, it is not.
        middle = release("before") if self.wide else ""
        earlier = "" if self.wide else release("earlier")
        last = f"{turns} wgmma.wait_group.sync.aligned 0; {earlier} {release('before')} {ends}"

        def made(part: range) -> str:
            return "".join(unpacked(self, kind, own, piece) for piece in part)

        def products(part: range, adds: int) -> str:
            lines = ["wgmma.fence.sync.aligned;"]
            for piece in part:
                block, place = divmod(piece, PIECES)
                lines.append(
                    f"add.s32 own, {'y_next' if block else 'y'}, {place * (128 if turned else 2)};"
                    f"mov.b64 own_y, {{own, {HEAD}}};"
                )
                lines += [
                    f"wgmma.mma_async.sync.aligned.m64n{2 * len(registers)}k16.f32.{KIND} {{{', '.join(registers)}}},"
                    f" {{{', '.join(pieces_of(row, piece))}}}, own_y, {1 if piece else adds}, 1, 1, {int(turned)};"
                    for row, registers in enumerate(sums)
                ]
            return "".join([*lines, "wgmma.commit_group.sync.aligned;"])

        def step(adds: int) -> str:
            lines = [next_block, made(parts[0]), products(parts[0], adds)]
            for part in parts[1:]:
                lines += [wait, middle if PIECES in part else "", made(part), products(part, adds)]
            return f"{''.join(lines)} mov.b32 earlier, before; {go_on}"

        next_block = "shr.u32 y_next, y_rows, 1; add.s32 y_next, y_next, y;" if self.wide else ""
        # The code of the first step is separate, so that no step has to ask whether it is the first.
        return (
            f"{{ .reg .b32 earlier, y_next; {registers(self, own)} {begin} {step(0)} @!more bra.uni DONE;\n"
            f"STEP: {begin} {wait} {earlier} {step(1)} @more bra.uni STEP;\nDONE: {last} }}"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Loads


def registers(format: StageFormat, own: int) -> str:
    """Assembly that declares the registers of a step.

    Args:
        own: how many times 64 rows the warpgroup has.
    """
    names = [
        f"{name}{suffix(*each)}"
        for name in (*(kind.name for kind in format.kinds), "left", "right", "zero")
        for each in _params_of(format, own)
    ]
    declared = f".reg .b32 {', '.join(names)};" if names else ""
    return (
        f".reg .b32 word<{4 * format.blocks * own}>, piece<{4 * PIECES * own}>, constant<3>;"
        f".reg .b16 number, other; .reg .f32 single; {declared}"
    )


def _params_of(format: StageFormat, own: int) -> list[tuple[int, int, int]]:
    """A thread's group parameters of one kind: the 64 rows, the group and the half of 16 rows of each."""
    return list(itertools.product(range(own), range(format.groups), range(2)))


def suffix(i: int, group: int, half: int) -> str:
    """The end of the name of a group parameter's register."""
    return f"{i}_{group}_{half}"


def load(format: StageFormat, rows: int, own: int) -> str:
    """Assembly that loads a thread's words and group parameters of a stage.

    Args:
        rows: of X in a stage.
        own: how many times 64 rows the warpgroup has.

    Register `x` is where the warpgroup's words are, in units of 16 bytes, and `stage` the stage's number.
    """
    lines = []
    for block in range(format.blocks):
        # Four lines further another bit of the swizzle is set.
        lines.append(
            f"shl.b32 own, x, 4; xor.b32 params, place, {64 * (block % 2)}; add.s32 own, own, params;"
        )
        for i in range(own):
            names = ", ".join(words_of(format, i, block))
            at = ROWS // STRIP * format.words * i + 4 * LINE_BYTES * block
            lines.append(f"ld.shared.v4.b32 {{{names}}}, [own + {at}];")
    if format.group:
        lines.append(f"mad.lo.s32 params, stage, {params_bytes(rows, format)}, first_params;")
    for number, kind in enumerate(format.kinds):
        of_kind = rows // ROWS * format.params * number
        for i, group, half in _params_of(format, own):
            at = of_kind + format.params * i + 2 * ROWS * group + STRIP * half
            register = f"{kind.name}{suffix(i, group, half)}"
            lines.append(f"ld.shared.b16 number, [params + {at}]; mov.b32 {register}, {{number, number}};")
    return "".join(lines)


def words_of(format: StageFormat, i: int, block: int) -> list[str]:
    """The registers of a block's words: two of a row, and two of the row 8 below it."""
    return [f"word{4 * (format.blocks * i + block) + j}" for j in range(4)]


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic


def pieces_of(i: int, piece: int) -> list[str]:
    """The registers of a piece of 64 rows: of a row, of the row 8 below it, and of both, 8 further along K."""
    return [f"piece{4 * (PIECES * i + piece % PIECES) + j}" for j in range(4)]


def prepare(format: StageFormat, kind: str, own: int) -> str:
    """Assembly that turns group parameters into what `unpacked` multiplies by and adds.

    Args:
        kind: the type of the numbers, as PTX names it.
        own: how many times 64 rows the warpgroup has.
    """
    dtype = _dtype(kind)
    unit, *exponents = _powers(format, dtype)
    bias = decoders.bias_of(format.code, dtype)
    lines = []
    for each in itertools.starmap(suffix, _params_of(format, own)):
        scale, shift = f"scale{each}", f"shift{each}"
        if unit and format.shifts:
            sign = 1 if format.shifts == "offsets" else -1
            lines.append(_arithmetic("mul", kind, shift, shift, sign * 2.0**-unit))
        elif unit:
            for name, exponent in zip(("left", "right"), exponents, strict=True):
                lines.append(_arithmetic("mul", kind, f"{name}{each}", scale, 2.0 ** (exponent - unit)))
            lines.append(_arithmetic("mul", kind, f"zero{each}", scale, -_zero(format) * 2.0**-unit))
        elif format.shifts == "zeros" and bias:
            # In fp32, and rounded, as `packed.biased` does it.
            lines.append(
                f"mov.b32 {{number, other}}, {shift}; cvt.f32.{kind} single, number;"
                f"add.f32 single, single, 0f{struct.pack('>f', bias).hex()}; cvt.rn.{kind}.f32 number, single;"
                f"mov.b32 {shift}, {{number, number}};"
            )
    return "".join(lines)


def unpacked(format: StageFormat, kind: str, own: int, piece: int) -> str:
    """Assembly that unpacks a thread's share of one of a step's pieces, see `pieces_of`, of each 64 rows."""
    block, part = divmod(piece, format.pieces // format.blocks)
    # Two words are in $2 and $3, pairs of numbers come in $0 and $1. No wait: the loop has its own.
    text = decoders.DECODERS[format.code, format.bits].assembly(part, _dtype(kind), -1)
    lines = []
    for i in range(own):
        registers = pieces_of(i, piece)
        for half in range(2):
            results, words = registers[half::2], words_of(format, i, block)[2 * half : 2 * half + 2]
            decoded = text
            for number, register in enumerate((*results, *words)):
                decoded = decoded.replace(f"${number}", register)
            lines.append(decoded)
            each = suffix(i, piece * format.groups // format.pieces, half)
            lines += [_number(format, kind, result, each, which) for which, result in enumerate(results)]
    return "".join(lines)


def _number(format: StageFormat, kind: str, x: str, each: str, which: int) -> str:
    """Assembly that turns a decoder's results into numbers, as `packed.number` and `packed.biased` do.

    Args:
        x: the register of a pair.
        each: the end of the names of its group parameters' registers.
        which: whether it is the decoder's first or second result.
    """
    dtype = _dtype(kind)
    unit, *exponents = _powers(format, dtype)
    zero, scale, shift = _zero(format), f"scale{each}", f"shift{each}"
    scaled = _arithmetic("mul", kind, x, x, scale) if format.group else ""
    if format.shifts == "offsets":
        scaled = _arithmetic("fma.rn", kind, x, x, scale, shift)
    if not unit:
        subtracted = shift if format.shifts == "zeros" else float(decoders.bias_of(format.code, dtype) + zero)
        return (_arithmetic("sub", kind, x, x, subtracted) if subtracted else "") + scaled
    factor: str | float = 2.0 ** (exponents[which] - unit)
    added: str | float = shift if format.shifts == "zeros" else -zero * 2.0**-unit
    if format.shifts:
        return _arithmetic("fma.rn", kind, x, x, factor, added) + scaled
    if format.group:
        factor, added = f"{('left', 'right')[which]}{each}", f"zero{each}"
    return (
        _arithmetic("fma.rn", kind, x, x, factor, added) if zero else _arithmetic("mul", kind, x, x, factor)
    )


def _arithmetic(op: str, kind: str, result: str, *operands: str | float) -> str:
    """Assembly of an operation on pairs of numbers. A single number is used for both of a pair."""
    lines, names = [], []
    for i, operand in enumerate(operands):
        # The instructions take registers alone.
        if isinstance(operand, str):
            names.append(operand)
        else:
            bits = struct.pack(">e" if kind == "f16" else ">f", operand)[:2].hex()
            lines.append(f"mov.b32 constant{i}, 0x{bits}{bits};")
            names.append(f"constant{i}")
    return "".join([*lines, f"{op}.{kind}x2 {result}, {', '.join(names)};"])


def _dtype(kind: str) -> tl.dtype:
    return tl.float16 if kind == "f16" else tl.bfloat16


def _zero(format: StageFormat) -> int:
    """The code that stands for 0. For numbers that are not integers, it is in the decoder's table."""
    return format.zero if format.code == "int" else 0


def _powers(format: StageFormat, dtype: tl.dtype) -> tuple[int, ...]:
    """The results of `decoders.unit_of` and, for both of a decoder's results, of `decoders.exponent_of`."""
    unit = decoders.unit_of(format.code, format.bits, dtype, ARCH)
    return unit, *(decoders.exponent_of(format.code, format.bits, which) if unit else 0 for which in (0, 1))
