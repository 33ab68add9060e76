"""Occupancy: the programs of a kernel that run on one multiprocessor at a time, and the resource that limits them.

The rules are those of NVIDIA's occupancy calculator (CUDA C++ programming guide, "Multiprocessor level") and, for AMD,
of LLVM's AMDGPU back end: a warp stays in one part of the multiprocessor, which has its registers for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..devices import Arch

#: Columns of Blackwell's tensor memory in a multiprocessor.
_TENSOR_MEMORY = 512
#: The unit, in bytes, in which shared memory is allocated.
_UNIT = 128


@dataclass(frozen=True)
class Occupancy:
    """The programs that run on one multiprocessor (a compute unit on AMD) at a time.

    Attributes:
        programs: of the kernel; 0 if not even one fits.
        warps: of these programs.
        most: warps that a multiprocessor can hold.
        limits: the number of programs that each resource would allow, by its name.
    """

    programs: int
    warps: int
    most: int
    limits: dict[str, int]

    @property
    def limited_by(self) -> tuple[str, ...]:
        """The resources that allow no further program."""
        return tuple(name for name, programs in self.limits.items() if programs == self.programs)


def occupancy(
    arch: Arch, registers: int, shared: int, warps: int, tensor_memory: int = 0
) -> Occupancy | None:
    """A kernel's occupancy; None if it is unknown, as with the interpreter.

    Args:
        registers: per thread.
        shared: bytes of shared memory per program.
        warps: per program.
        tensor_memory: columns of tensor memory per program.

    Example:
        >>> from gemmery.devices import ARCHS
        >>> found = occupancy(ARCHS["sm_90"], registers=168, shared=98304, warps=8)
        >>> found.programs, found.warps, found.limited_by
        (1, 8, ('registers',))
    """
    sm = arch.multiprocessor
    if sm is None:
        return None
    of_registers = min(sm.registers // _up(max(registers, 1), sm.granule), sm.warps) * sm.parts
    limits = {
        "registers": of_registers // warps,
        "warps": sm.warps * sm.parts // warps,
        "programs": sm.programs,
    }
    if shared + sm.reserved:
        limits["shared memory"] = 0 if shared > arch.shared else sm.shared // _up(shared + sm.reserved, _UNIT)
    if tensor_memory:
        limits["tensor memory"] = _TENSOR_MEMORY // tensor_memory
    programs = min(limits.values())
    return Occupancy(programs, programs * warps, sm.warps * sm.parts, limits)


def tensor_memory(compiled: Any) -> int:
    """Columns of tensor memory that a compiled kernel takes; 0 without tensor memory."""
    return int(getattr(compiled.metadata, "tmem_size", None) or 0)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
