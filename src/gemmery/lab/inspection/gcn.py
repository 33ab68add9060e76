"""Reads AMD's machine code as LLVM writes it into Triton's `amdgcn`.

Mnemonics are those of the CDNA3 and RDNA3 instruction set architecture guides. The text has no addresses: instructions
are numbered.
"""

from __future__ import annotations

import re

from .code import Code, Instruction, all_but

#: Kinds of mnemonics, by their beginnings or endings; the first that fits counts.
_KINDS = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"v_s?mfma|v_smfmac|v_s?wmma|v_swmmac", "tensor"),
        (r"(global|buffer)_load.*_lds_|buffer_load\w* .*\blds\b", "copy"),
        (r"scratch_", "spill"),
        (r"\w+_atomic", "store"),
        (r"(global|buffer|flat)_load", "load"),
        (r"ds_(read|load)", "read"),
        (r"ds_(write|store)", "write"),
        (r"(global|buffer|flat)_store", "store"),
        (r"s_(waitcnt|wait|barrier|sleep)|(buffer|global)_(wb|inv|gl\d_inv)", "wait"),
        (
            r"s_(c?branch|endpgm|nop|setprio|delay_alu|setpc|swappc|getpc|clause|set_inst_prefetch|inst_prefetch|icache|code_end|sendmsg"
            r"|trap)",
            "control",
        ),
        (r"v_cvt_|v_pack_", "convert"),
        (r"v_\w+_b?f(16|32|64)\b|v_\w+_b?f(16|32|64)_", "float"),
        (r"[vs]_|ds_", "integer"),
    )
)

_LINE = re.compile(r"\s+([a-z]\w+)(?:\s+(.*?))?\s*(?:;.*|//.*)?$")
_LABEL = re.compile(r"(\.LBB\w+):")
_SOURCE = re.compile(r"\s+\.loc\s+.*; (?:.*/)?([^/\s]+?):(\d+):\d+")
_SHAPE = re.compile(r"_(\d+)x(\d+)x(\d+)")
#: The bits that a lane moves, by the end of a mnemonic; twice that if it has two addresses.
_WIDTH = re.compile(r"_(?:dword(x\d)?|[us]?(byte|short)|[uibf]?(8|16|32|64|96|128))(?:_d16(?:_hi)?)?$")
_TWO = re.compile(r"ds_(read|write|load|store)_?2")

_WAITS = {
    "vmcnt": "accesses to global memory",
    "lgkmcnt": "accesses to shared memory",
    "vscnt": "stores to global memory",
}


def read(text: str) -> Code:
    """The code in a text of `amdgcn`; what follows the kernel's end is left out."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    source = ""
    for line in text.splitlines():
        if line.startswith(".Lfunc_end"):
            break
        if found := _LABEL.match(line):
            labels[found[1]] = len(instructions)
        elif found := _SOURCE.match(line):
            source = f"{found[1]}:{found[2]}"
        elif (found := _LINE.match(line)) and "_" in found[1]:
            instructions.append(_instruction(len(instructions), found[1], found[2] or "", source))
    return Code(tuple(instructions), labels)


def _instruction(number: int, opcode: str, operands: str, source: str) -> Instruction:
    text = f"{opcode} {operands}"
    kind = next((kind for pattern, kind in _KINDS if pattern.match(text)), "other")
    branches = opcode == "s_branch" or opcode.startswith("s_cbranch")
    falls = not (opcode in ("s_branch", "s_endpgm") or opcode.startswith("s_setpc"))
    found = _SHAPE.search(opcode) if kind == "tensor" else None
    shape = (int(found[1]), int(found[2]), int(found[3])) if found else None
    moves = kind in ("copy", "load", "read", "write", "store", "spill")
    return Instruction(
        number, "", opcode, operands, kind, operands if branches else "", falls, _bits(opcode) if moves else 0, shape,
        source, _note(opcode, operands),
    )  # fmt: skip


def _bits(opcode: str) -> int:
    found = _WIDTH.search(opcode)
    if found is None:
        # Atomics say nothing of 32 bits.
        return 64 if opcode.endswith("_x2") else 32
    several, short, bits = found.groups()
    words = 32 * int(several[1:] if several else 1)
    width = {"byte": 8, "short": 16}[short] if short else int(bits or words)
    return 2 * width if _TWO.match(opcode) else width


def _note(opcode: str, operands: str) -> str:
    if opcode == "s_barrier":
        return "all warps of the program meet"
    if opcode != "s_waitcnt":
        return ""
    found = re.findall(r"(\w+)\((\d+)\)", operands)
    waits = [all_but(int(number), _WAITS[name]) for name, number in found if name in _WAITS]
    return f"waits for {' and '.join(waits)}" if waits else ""
