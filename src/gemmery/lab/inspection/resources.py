"""The resources of a multiprocessor that a compiled kernel uses, read from its machine code, without a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ...launch.occupancy import tensor_memory
from .sass import run_tool


@dataclass(frozen=True)
class Usage:
    """The resources of one program.

    Attributes:
        registers: per thread; on AMD vector registers, accumulation registers among them.
        spilled: bytes per thread in local memory, where registers go that there is no room for.
        shared: bytes of shared memory.
        tensor_memory: columns of tensor memory, on GPUs that have it.
        warps: of the program.
    """

    registers: int
    spilled: int
    shared: int
    tensor_memory: int
    warps: int


def usage(compiled: Any) -> Usage:
    """The resources of a kernel that Triton has compiled.

    Raises:
        OSError: the tool that reads the machine code can't be run.
        RuntimeError: it can't read the code.
    """
    read = _of_cubin(compiled.asm["cubin"]) if "cubin" in compiled.asm else _of_amdgcn(compiled.asm["amdgcn"])
    meta = compiled.metadata
    return Usage(*read, int(meta.shared), tensor_memory(compiled), int(meta.num_warps))


def _of_cubin(cubin: bytes) -> tuple[int, int]:
    text = run_tool("cuobjdump", cubin, "--dump-resource-usage")
    found = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def _of_amdgcn(text: str) -> tuple[int, int]:
    counts = {key: int(n) for key, n in re.findall(r"\.(\w+_count|private_segment_fixed_size): *(\d+)", text)}
    spilled = 4 * (counts.get("vgpr_spill_count", 0) + counts.get("sgpr_spill_count", 0))
    return counts["vgpr_count"], max(spilled, counts.get("private_segment_fixed_size", 0))
