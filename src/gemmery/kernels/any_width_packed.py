"""Packed weights in tiles of any width: how a stage holds them, and the assembly that unpacks them.

The weight is X, the operand with 64 rows for each `wgmma`, which takes it from registers. A stage has its words, as
`formats.packing` deals them out to threads, and its group parameters: scales, then shifts, for 64 rows of X at a time,
and of these for one group after the other. A thread has 16 bytes of words for each 64 rows and 64 numbers along K (twice
as many for 8 bits), which become its part of the four operands that `wgmma` wants for a step. The tensor cores multiply
one of them while the next one is unpacked. This is the order of CUTLASS's mixed-input kernels
(github.com/NVIDIA/cutlass).

The arithmetic is that of `kernels.packed`, so that a weight has the same bits in all schedules.
"""

import struct
from typing import NamedTuple

import triton.language as tl

from . import decoders

#: Numbers along K of a step, and of the operand of one `wgmma`.
STEP, PIECES = 64, 4
#: Rows whose group parameters lie together.
ROWS = 64


class Format(NamedTuple):
    """What the assembly has to know of a packed weight.

    Attributes:
        code, bits: which number a code stands for, and how long it is; see `formats.base.Format`.
        group: numbers along K that share group parameters, a power of two; 0 where there are none.
        shifts: "zeros", "offsets" or "" for nothing.
        zero: the code that stands for 0, where there are no zero points.
    """

    code: str
    bits: int
    group: int
    shifts: str
    zero: int

    @classmethod
    def of(cls, text: str) -> "Format":
        """The format that `str` has written down."""
        code, bits, group, shifts, zero = text.split("/")
        return cls(code, int(bits), int(group), shifts, int(zero))

    def __str__(self) -> str:
        return "/".join(map(str, self))

    @property
    def words(self) -> int:
        """Bytes of the words of 16 rows and a step."""
        return 16 * STEP * self.bits // 8

    @property
    def groups(self) -> int:
        """Groups of a step."""
        return max(STEP // self.group, 1) if self.group else 0

    @property
    def params(self) -> int:
        """Bytes of the scales, or of the shifts, of 64 rows and a step."""
        return 2 * ROWS * self.groups

    @property
    def kinds(self) -> int:
        """Kinds of group parameters: scales, and shifts where there are any."""
        return bool(self.group) + bool(self.shifts)


def x_bytes(rows: int, format: Format | None) -> int:
    """Bytes that so many rows of X have in a stage: of the operand, or of its words where it is packed."""
    return rows * 128 if format is None else rows // 16 * format.words


def params_bytes(rows: int, format: Format | None) -> int:
    """Bytes of the group parameters of so many rows of X in a stage."""
    return 0 if format is None else rows // ROWS * format.params * format.kinds


def load_params(format: Format, rows: int, box: str, maps: tuple[int, ...], row: str, k: str) -> str:
    """Assembly that begins to load a stage's group parameters.

    Args:
        rows: of X.
        box: rows that the tensor maps load at a time where a step has one group; otherwise these are 64.
        maps: the numbers of the kernel's parameters that are the tensor maps of scales and of shifts.
        row, k: registers that say where the step begins.

    The stage's place comes in register `params`, its barrier in `at`.
    """
    load = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    each = box if format.groups == 1 else str(ROWS)
    lines = [
        "{ .reg .pred more; .reg .b64 map; .reg .b32 row, last, group, to; mov.b32 to, params;"
        # A division by a constant would take the loader's thread longer than all else.
        f"shr.u32 group, {k}, {format.group.bit_length() - 1};"
    ]
    lines += [
        f"{{ mov.b64 map, gemm_any_width_param_{number}; cvta.param.u64 map, map; mov.b32 row, {row};"
        f"add.s32 last, {row}, {rows};\nNEXT: {load} [to], [map, {{row, group}}], [at];"
        f"mad.lo.s32 to, {each}, {2 * format.groups}, to; add.s32 row, row, {each};"
        "setp.lt.s32 more, row, last; @more bra NEXT; }"
        for number in maps
    ]
    return " ".join([*lines, "}"])


def begin(format: Format, rows: int, first: int, stages: str, width: str) -> str:
    """Assembly that finds a thread's place in the first stage, which `step` counts from.

    Args:
        rows: of X in a stage.
        first: the first of the warpgroup's rows.
        stages, width: registers.
    """
    stage = x_bytes(rows, format)
    return (
        ".reg .b32 warp, lane, line, place, params, first_params; mov.u32 lane, %tid.x; shr.u32 warp, lane, 5;"
        "and.b32 warp, warp, 3; and.b32 lane, lane, 31;"
        # Group parameters come behind both operands' blocks of all stages. A warp has 16 of 64 rows, and a thread the row
        # that is its number divided by 4, and that 8 behind it.
        f"mad.lo.s32 params, {width}, 128, {stage}; mul.lo.s32 first_params, params, {stages};"
        f"mov.b32 params, global_smem; add.s32 first_params, first_params, params; shr.u32 params, lane, 2;"
        f"mad.lo.s32 params, warp, 16, params; mad.lo.s32 first_params, params, 2, first_params;"
        f"add.s32 first_params, first_params, {first // ROWS * format.params};"
        # A warp has a strip. TMA moves the 16 bytes of a line by as many places as the line's number has in 8.
        f"shr.u32 line, lane, 3; mad.lo.s32 line, warp, {format.words // 128}, line; and.b32 place, line, 7;"
        "xor.b32 lane, lane, place; and.b32 lane, lane, 7; mul.lo.s32 place, lane, 16; mad.lo.s32 place, line, 128, place;"
    )


def registers(format: Format) -> str:
    """Declares registers: a step's, for two times 64 rows."""
    names = [f"{name}{i}_{j}_" for name in ("scale", "shift", "left", "right", "zero") for i in range(2) for j in range(4)]
    return (
        f".reg .b32 word<{8 * format.bits}>, piece<{8 * PIECES}>, constant<3>; .reg .b16 number, other; .reg .f32 wide;"
        f".reg .b32 {', '.join(f'{name}<2>' for name in names)};"
    )


def load(format: Format, rows: int, own: int) -> str:
    """Assembly that loads a thread's words and group parameters of a stage.

    Args:
        rows: of X in a stage, of which the warpgroup has `own` times 64.

    Register `x` is where the warpgroup's words are, in units of 16 bytes, and `stage` the stage's number.
    """
    each = format.bits
    lines = []
    for block in range(each // 4):
        # Four lines further.
        lines.append(f"shl.b32 own, x, 4; xor.b32 params, place, {64 * block}; add.s32 own, own, params;")
        for i in range(own):
            names = ", ".join(f"word{2 * each * i + 4 * block + j}" for j in range(4))
            lines.append(f"ld.shared.v4.b32 {{{names}}}, [own + {4 * format.words * i + 512 * block}];")
    if format.group:
        lines.append(f"mad.lo.s32 params, stage, {params_bytes(rows, format)}, first_params;")
        for kind in range(format.kinds):
            lines += [
                f"ld.shared.b16 number, [params + {rows // ROWS * format.params * kind + format.params * i + 128 * j + 16 * half}];"
                f"mov.b32 {('scale', 'shift')[kind]}{i}_{j}_{half}, {{number, number}};"
                for i in range(own)
                for j in range(format.groups)
                for half in range(2)
            ]
    return "".join(lines)


def _arithmetic(op: str, kind: str, result: str, *operands: str | float) -> str:
    """Assembly of an operation on pairs of numbers; a number among the operands is there twice."""
    lines, names = [], []
    for i, operand in enumerate(operands):
        # No operand of these may be a constant.
        if not isinstance(operand, str):
            form = "<e" if kind == "f16" else "<f"
            bits = int.from_bytes(struct.pack(form, operand)[-2:], "little")
            lines.append(f"mov.b32 constant{i}, 0x{bits:04x}{bits:04x};")
            operand = f"constant{i}"
        names.append(operand)
    return "".join([*lines, f"{op}.{kind}x2 {result}, {', '.join(names)};"])


def prepare(format: Format, kind: str, own: int) -> str:
    """Assembly that turns group parameters into what `unpacked` multiplies by and adds."""
    dtype = tl.float16 if kind == "f16" else tl.bfloat16
    unit, left, right = _powers(format, dtype)
    each = [f"{i}_{j}_{half}" for i in range(own) for j in range(format.groups) for half in range(2)]
    lines = []
    if unit and not format.shifts and format.group:
        for name in each:
            lines.append(_arithmetic("mul", kind, f"left{name}", f"scale{name}", 2.0 ** (left - unit)))
            lines.append(_arithmetic("mul", kind, f"right{name}", f"scale{name}", 2.0 ** (right - unit)))
            if _zero(format):
                zero = -_zero(format) * 2.0**-unit
                lines.append(_arithmetic("mul", kind, f"zero{name}", f"scale{name}", zero))
    elif unit and format.shifts:
        factor = 2.0**-unit if format.shifts == "offsets" else -(2.0**-unit)
        lines += [_arithmetic("mul", kind, f"shift{name}", f"shift{name}", factor) for name in each]
    elif format.shifts == "zeros" and (bias := decoders.bias_of(format.code, dtype)):
        # In fp32, and rounded, as `kernels.packed` does it.
        for name in each:
            lines.append(
                f"mov.b32 {{number, other}}, shift{name}; cvt.f32.{kind} wide, number;"
                f"add.f32 wide, wide, {_single(bias)}; cvt.rn.{kind}.f32 number, wide; mov.b32 shift{name}, {{number, number}};"
            )
    return "".join(lines)


def _single(value: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def _zero(format: Format) -> int:
    """Others have their zero in the decoder's table."""
    return format.zero if format.code == "int" else 0


def _powers(format: Format, dtype: tl.dtype) -> tuple[int, int, int]:
    """See `decoders.unit_of` and `decoders.exponent_of`, for a GPU of sm_90."""
    unit = decoders.unit_of(format.code, format.bits, dtype, 90)
    if not unit:
        return 0, 0, 0
    return unit, *(decoders.exponent_of(format.code, format.bits, which) for which in (0, 1))  # type: ignore[return-value]


def unpacked(format: Format, kind: str, own: int, piece: int) -> str:
    """Assembly that unpacks a thread's part of one of a step's four operands, for each 64 rows: see `pieces_of`."""
    dtype = tl.float16 if kind == "f16" else tl.bfloat16
    parts = 16 // format.bits
    block, part = divmod(piece, parts)
    text = _decoder(format, dtype, part)
    lines = []
    for i in range(own):
        for half in range(2):
            word = 2 * format.bits * i + 4 * block + 2 * half
            results = pieces_of(i, piece)[half], pieces_of(i, piece)[2 + half]
            own_text = text
            for old, new in zip(("$0", "$1", "$2", "$3"), (*results, f"word{word}", f"word{word + 1}"), strict=True):
                own_text = own_text.replace(old, new)
            lines.append(own_text)
            name = f"{i}_{piece * format.groups // PIECES}_{half}"
            lines += [_number(format, kind, dtype, result, name, which) for which, result in enumerate(results)]
    return "".join(lines)


def pieces_of(i: int, piece: int) -> list[str]:
    """The registers of the operand of 64 rows for one `wgmma`: of row g and of that 8 behind it, and 8 further along K."""
    return [f"piece{4 * (PIECES * i + piece) + j}" for j in range(4)]


def _decoder(format: Format, dtype: tl.dtype, part: int) -> str:
    """The decoder's assembly: two words in $2 and $3, pairs of numbers in $0 and $1."""
    text: str
    if format.code == "int":
        ptx = decoders.ptx_of_nibbles if format.bits == 4 else decoders.ptx_of_bytes
        text = ptx(part, dtype, -1)
    elif format.code in ("e4m3", "e5m2"):
        text = decoders.ptx_of_fp8_conversion(part, dtype, -1, format.code == "e4m3")
    else:
        text = {"e2m1": decoders.ptx_of_e2m1, "nf4": decoders.ptx_of_nf4}[format.code](part, dtype, -1)
    return text


def _number(format: Format, kind: str, dtype: tl.dtype, x: str, name: str, which: int) -> str:
    """Assembly that makes numbers of what the decoder gives, as `packed.number` and `packed.biased` do.

    Args:
        x: the register of a pair.
        name: which group parameters are its own.
        which: whether it is the decoder's first or second result.
    """
    unit, *exponents = _powers(format, dtype)
    zero, scale, shift = _zero(format), f"scale{name}", f"shift{name}"
    scaled = _arithmetic("mul", kind, x, x, scale) if format.group else ""
    if format.shifts == "offsets":
        scaled = _arithmetic("fma.rn", kind, x, x, scale, shift)
    if not unit:
        subtracted = shift if format.shifts == "zeros" else float(decoders.bias_of(format.code, dtype) + zero)
        return (_arithmetic("sub", kind, x, x, subtracted) if subtracted else "") + scaled
    factor = 2.0 ** (exponents[which] - unit)
    if format.shifts:
        added = shift if format.shifts == "zeros" else -zero * 2.0**-unit
        return _arithmetic("fma.rn", kind, x, x, factor, added) + scaled
    if format.group:
        own, added = f"{('left', 'right')[which]}{name}", f"zero{name}"
    else:
        own, added = factor, -zero * 2.0**-unit
    return _arithmetic("fma.rn", kind, x, x, own, added) if zero else _arithmetic("mul", kind, x, x, own)
