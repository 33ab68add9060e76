"""Cross-compilation of kernels for a GPU that is not present, down to its machine code, with a driver of gemmery.

Until code is loaded, binding and specialization ask the driver only for the target.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..devices import ARCHS, INTERPRETED


class _CompilingDriver:
    """The parts of a Triton driver that compilation needs."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_device(self) -> str:
        # Within a process Triton keeps code by device, so each target gets its own device.
        return str(self.target)

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def use_target(name: str) -> None:
    """Make this process compile for an architecture of the table, from now on."""
    target = _target(name)
    use(target.backend, target.arch, target.warp_size)


def use(backend: str, number: int | str, warp_size: int) -> None:
    """Make this process compile for a GPUTarget of Triton, from now on."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(_CompilingDriver(GPUTarget(backend, number, warp_size)))


def _target(name: str) -> Any:
    from triton.backends.compiler import GPUTarget

    arch = ARCHS[name]
    number: int | str = int(name.removeprefix("sm_")) if arch.backend == "cuda" else name
    return GPUTarget(arch.backend, number, arch.warp_size)


_lock = threading.RLock()


@contextmanager
def compiling_for(name: str) -> Iterator[None]:
    """Within the context, this process compiles for an architecture of the table.

    Other threads must not launch kernels meanwhile, unless the present GPU has that architecture: they would get the
    other driver.

    Raises:
        ValueError: kernels are interpreted in this process.
    """
    from triton.runtime import driver

    if INTERPRETED:
        raise ValueError(
            "kernels are interpreted in this process and can't be compiled; unset TRITON_INTERPRET"
        )
    with _lock:
        before, target = _active(), _target(name)
        if before is not None and before.get_current_target() == target:
            yield
            return
        driver.set_active(_CompilingDriver(target))
        try:
            yield
        finally:
            # Not `reset_active`, which fails without a GPU.
            driver._active = before


def _active() -> Any:
    """The driver of this process, or None if there is no GPU."""
    from triton.backends import backends
    from triton.runtime import driver

    if driver._active is None and not any(x.driver.is_active() for x in backends.values()):
        return None
    return driver.active
