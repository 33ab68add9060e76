"""Launches of programs in clusters.

Triton launches a kernel in clusters if it is compiled for them, and then distributes each of its blocks over a cluster.
Kernels that use clusters in their own way are compiled without them, and launched here with as many programs in a
cluster as a launch needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton


def in_clusters(compiled: Any, cluster: int) -> tuple[int, int, int]:
    """What Triton's launchers are told about a compiled kernel: warps, programs in a cluster, and shared memory.

    Args:
        cluster: programs in a cluster. The launch's grid is then of clusters.
    """
    warps, _, shared = compiled.packed_metadata
    return warps, cluster, shared


def launch(compiled: Any, grid: tuple[int, int, int], cluster: int, arguments: Sequence[Any]) -> None:
    """Launches a compiled kernel on the current device and stream, as `compiled[grid]` does.

    Args:
        arguments: all of the kernel's, constants among them.

    Raises:
        RuntimeError: the kernel has scratch memory.
    """
    compiled._init_handles()
    # Triton would make memory for as many programs as there are clusters.
    if any(getattr(compiled.run, f"{name}_scratch_size", 0) for name in ("global", "profile")):
        raise RuntimeError(
            "a kernel with scratch memory, such as an instrumented one, does not run in clusters"
        )
    active, knobs = triton.runtime.driver.active, triton.knobs.runtime
    stream = active.get_current_stream(active.get_current_device())
    compiled.run(
        *grid, stream, compiled.function, in_clusters(compiled, cluster),
        compiled.launch_metadata(grid, stream, *arguments), knobs.launch_enter_hook, knobs.launch_exit_hook, *arguments,
    )  # fmt: skip
