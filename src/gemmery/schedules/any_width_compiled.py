"""Checks of compiled kernels for tiles of any width: properties on which their assembly relies.

See `kernels.any_width`, and `AnyWidthBinding`, which makes these checks.
"""

from __future__ import annotations

import re
from typing import Any

#: The machine code of a wait for products, with how many may stay in flight.
PENDING = re.compile(rb"\xc5\x79\x00\x00\x00\x80\x00\x00.(.)", re.DOTALL)


def waits_for_each(compiled: Any) -> bool:
    """Whether each product of a kernel waits for the one before.

    The assembler makes them wait in about a fifth of the kernels that unpack a weight, "due to insufficient register
    resources for the wgmma pipeline" (its message C7511). We do not know why: with its cases in another order, the
    same kernel often has no such waits. Triton does not keep the message, so the machine code is searched. This is
    quicker than another run of the assembler, as in `lab.targets.serialised`.
    """
    return set(PENDING.findall(compiled.asm["cubin"])) == {b"\0"}


def check_memory(llir: str, size: int, barriers: int) -> None:
    """RuntimeError unless the first `size` bytes of shared memory are the slots', `barriers` follow them, and
    everything else follows these; or if assembly expects the ring or the barriers elsewhere.

    All other data is at constant offsets. If anything were before the slots, its offset would be less than their size,
    since nothing else is as large.

    Args:
        llir: the kernel in LLVM's language.
    """
    first = re.search(r"mbarrier\.inval.*@global_smem, i32 (\d+)", llir)
    if first is None or int(first[1]) != size:
        raise RuntimeError(f"the barriers are not {size} bytes after the beginning of shared memory")
    end = size + 8 * barriers
    named = [int(at) for at in re.findall(r"mov\.b32 first, global_smem; add\.s32 \$0, first, (\d+);", llir)]
    if size not in named or max(named) > size:
        raise RuntimeError(
            f"the kernel's assembly looks for barriers elsewhere than {size} bytes after the beginning of shared memory"
        )
    others = [line for line in llir.splitlines() if "mbarrier" not in line]
    # A barrier whose number is computed is counted from the first one.
    found = {int(at) for line in others for at in re.findall(r"@global_smem, i32 (\d+)", line)}
    offsets = found - {size}
    if not offsets or min(offsets) < end:
        raise RuntimeError(
            f"{size} bytes of slots and the barriers do not have shared memory's first bytes alone"
        )
