"""Reads NVIDIA's machine code as `nvdisasm` writes it.

The meaning of mnemonics is from NVIDIA's list (CUDA Binary Utilities, "Instruction Set Reference"). The shapes of a
warp-wide product are from the PTX ISA, and are parts of the mnemonics' names.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .code import Code, Instruction, all_but

#: Kinds of mnemonics, up to their first dot. A uniform one (of a whole warp) is of the kind that it has without its U.
_MNEMONICS = {
    "tensor": "HMMA IMMA DMMA QMMA OMMA BMMA HGMMA IGMMA QGMMA BGMMA UTCHMMA UTCIMMA UTCQMMA UTCOMMA",
    "copy": "LDGSTS UTMALDG UBLKCP UTMAPF UBLKPF UTCCP",
    "load": "LDG LD LDGMC",
    "read": "LDS LDSM LDTM",
    "write": "STS STSM STTM STAS ATOMS",
    "store": "STG ST RED REDG REDAS ATOM ATOMG UTMASTG UTMAREDG UBLKRED",
    "spill": "LDL STL",
    "wait": (
        "BAR DEPBAR LDGDEPBAR UTMACMDFLUSH SYNCS ARRIVES WARPSYNC WARPGROUP WARPGROUPSET MEMBAR FENCE ERRBAR CGAERRBAR "
        "CCTL CCTLL CCTLT UTMACCTL UTCBAR UCGABAR_ARV UCGABAR_WAIT NANOSLEEP B2R ACQBULK YIELD ENDCOLLECTIVE"
    ),
    "float": (
        "FADD FADD2 FADD32I FCHK FFMA FFMA2 FFMA32I FMNMX FMNMX3 FMUL FMUL2 FMUL32I FSEL FSET FSETP FSWZADD MUFU HADD2 "
        "HADD2_32I HFMA2 HFMA2_32I HMNMX2 HMUL2 HMUL2_32I HSET2 HSETP2 DADD DFMA DMUL DSETP"
    ),
    "convert": "F2F F2FP F2I F2IP FRND I2F I2FP I2I I2IP",
    "integer": (
        "IMAD IADD IADD3 IADD32I VIADD VIADDMNMX VIMNMX VIMNMX3 VHMNMX VABSDIFF VABSDIFF4 IABS IMNMX IMUL IMUL32I "
        "ISCADD ISCADD32I ISETP IDP IDP4A LEA LOP LOP3 LOP32I SHF SHL SHR SEL SGXT BMSK BREV FLO POPC PRMT MOV MOV32I "
        "MOVM SHFL PLOP3 PSETP P2R R2P R2UR UP2UR UR2UP S2R S2UR CS2R CS2UR REDUX CREDUX VOTE VOTEU ELECT MATCH QSPC "
        "LDC LDCU GETLMEMBASE SETLMEMBASE SETCTAID LEPC"
    ),
    "control": (
        "BRA BRX BRXU JMP JMX JMXU EXIT RET CALL BSSY BSYNC BREAK BMOV BPT KILL NOP RPCMOV PMTRIG PREEXIT USETMAXREG "
        "USETSHMSZ UTCATOMSWS UVIRTCOUNT"
    ),
}
_KINDS = {word: kind for kind, words in _MNEMONICS.items() for word in words.split()}

_LINE = re.compile(r"\s+/\*([0-9a-f]+)\*/\s+(?:(@!?\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"([.$\w]+):\s*$")
_SOURCE = re.compile(r'\s*//## File "(?:.*/)?(.*?)", line (\d+)')
_TARGET = re.compile(r"`\((.*?)\)")
#: Modifiers that say how much a lane moves; without one it is 32 bits. Of matrices: how many of 8 by 8.
_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
_MATRICES = {"4": 128, "2": 64}
_MOVES = (
    "LDGSTS",
    "LDG",
    "LD",
    "LDS",
    "LDL",
    "STS",
    "STG",
    "ST",
    "STL",
    "RED",
    "REDG",
    "ATOM",
    "ATOMG",
    "ATOMS",
)
#: Shapes of products of one warp, which are written without separators.
_SHAPES = {
    "884": (8, 8, 4), "1684": (16, 8, 4), "1688": (16, 8, 8), "16816": (16, 8, 16), "16832": (16, 8, 32),
    "16864": (16, 8, 64), "8816": (8, 8, 16), "8832": (8, 8, 32), "168128": (16, 8, 128),
}  # fmt: skip

#: The effects of instructions that their names do not show. A number in a group that is waited for is put into words.
_NOTES = tuple(
    (re.compile(pattern), note)
    for pattern, note in (
        (r"LDGDEPBAR", "ends a group of copies"),
        (r"DEPBAR\.LE SB0, (0x\w+)", "groups of copies"),
        (r"UTMALDG", "one thread has TMA copy a block to shared memory"),
        (r"UTMASTG", "one thread has TMA store a block"),
        (r"UTMACMDFLUSH", "ends a group of TMA's stores"),
        (r"SYNCS\.PHASECHK", "waits for a barrier in memory: a block has come, or its place is free"),
        (r"SYNCS\.ARRIVE\.TRANS64", "tells a barrier in memory how many bytes to wait for"),
        (r"SYNCS\.EXCH", "sets up a barrier in memory"),
        (r"WARPGROUP\.ARRIVE", "wgmma may use the registers from here on"),
        (r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\w+)", "groups of wgmma"),
        (r"\wGMMA\S* R\d+, gdesc", "both factors from shared memory"),
        (r"\wGMMA\S* R\d+, R\d+, gdesc", "the left factor from registers"),
        (r"\wGMMA.*gsb0", "ends a group of wgmma"),
        (r"UTCBAR", "has a barrier in memory told when the products are done"),
        (r"UTC\wMMA", "one thread starts it for all; the sum stays in tensor memory"),
        (r"BAR\.SYNC", "all warps of the program meet"),
        (r"BAR\.ARV", "this warp has arrived, and goes on"),
        (r"STL", "a register is spilled"),
        (r"LDL", "a spilled register comes back"),
    )
)


def run_tool(name: str, cubin: bytes, *options: str) -> str:
    """The output of one of the CUDA tools that Triton ships for a cubin.

    Raises:
        OSError: the tool can't be run.
        RuntimeError: it can't read the cubin.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([str(tool), *options, file.name], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{name} can't read the code: {(run.stderr or run.stdout).strip()}")
    return run.stdout


def disassemble(cubin: bytes) -> str:
    """A cubin's code as text, with the lines of the source; errors are those of `run_tool`."""
    # The tool's analysis of data flow takes half of its time, for remarks on a stack that Triton's kernels do not have.
    return run_tool("nvdisasm", cubin, "--print-code", "--no-dataflow", "--print-line-info")


def read(text: str) -> Code:
    """The code in a text of `disassemble`."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    source = ""
    for line in text.splitlines():
        if found := _LINE.match(line):
            instructions.append(_instruction(int(found[1], 16), found[2] or "", found[3], found[4], source))
        elif found := _LABEL.match(line):
            labels[found[1]] = len(instructions)
        elif found := _SOURCE.match(line):
            source = f"{found[1]}:{found[2]}"
    return Code(tuple(instructions), labels)


def _instruction(address: int, guard: str, opcode: str, operands: str, source: str) -> Instruction:
    name, *modifiers = opcode.split(".")
    kind = _kind(name)
    if guard in ("@!PT", "@!UPT"):
        return Instruction(address, guard, opcode, operands, "control", source=source, note="never runs")
    goes_to, falls = "", True
    if name in ("BRA", "JMP"):
        goes_to = "".join(_TARGET.findall(operands))
        falls = bool(guard) or not operands.startswith("`")
    elif name in ("EXIT", "RET", "BRX", "BRXU", "JMX", "JMXU", "KILL"):
        falls = bool(guard)
    note = _note(f"{opcode} {operands}")
    bits = _bits(name, modifiers)
    shape = _shape(modifiers) if kind == "tensor" else None
    return Instruction(address, guard, opcode, operands, kind, goes_to, falls, bits, shape, source, note)


def _kind(name: str) -> str:
    return _KINDS.get(name) or _KINDS.get(name.removeprefix("U"), "other")


def _bits(name: str, modifiers: Iterable[str]) -> int:
    if name in ("LDSM", "STSM"):
        return next((_MATRICES[x] for x in modifiers if x in _MATRICES), 32)
    if name not in _MOVES:
        return 0
    return next((_WIDTHS[x] for x in modifiers if x in _WIDTHS), 32)


def _shape(modifiers: Iterable[str]) -> tuple[int, int, int] | None:
    for word in modifiers:
        if word in _SHAPES:
            return _SHAPES[word]
        if re.fullmatch(r"\d+x\d+x\d+", word):
            m, n, k = map(int, word.split("x"))
            return m, n, k
    return None


def _note(text: str) -> str:
    notes = []
    for pattern, note in _NOTES:
        if found := pattern.match(text):
            number = found.groups()
            notes.append(f"waits for {all_but(int(number[0], 16), note)}" if number else note)
    return "; ".join(notes)
