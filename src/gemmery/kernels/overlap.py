"""Launches that begin while the launch before them ends: programmatic dependent launch, from Hopper on.

The programs of such a launch take the multiprocessors that the last programs of the launch before leave, and wait there
for its end. Without it, a multiprocessor has nothing to do between its last program of one launch and its first of the
next. CUTLASS and QuACK (github.com/Dao-AILab/quack) launch their kernels so, too.

A kernel waits before anything else, since it may read what an earlier launch writes, and may write what it reads. That
holds for all earlier launches: one that is not waited for here has ended before the one that is.
"""

import triton
import triton.language as tl


@triton.jit
def wait_for_earlier(OVERLAPS: tl.constexpr):
    """Waits until all earlier launches have ended, and lets the next launch begin.

    Args:
        OVERLAPS: whether the launch may begin before the ones before it have ended; see `Arch.overlap`.
    """
    if OVERLAPS:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
