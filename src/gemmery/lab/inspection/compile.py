"""Compiles a problem's kernel for a GPU that need not be there, as a plan does."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from triton.runtime.errors import OutOfResources

from ...devices import ARCHS, TABLE, Device
from ...launch.cross_compile import compiling_for
from ...launch.padding import worth_copying
from ...launch.plan import Plan, compile_first_fitting, runs_on
from ...problem import Config, Problem
from ...schedules.binding import Binding
from ...select import candidates
from ...select.samples import arguments
from ...select.shapes import device_named
from .resources import Usage, usage


@dataclass(frozen=True)
class Built:
    """A compiled kernel with its problem and target.

    Attributes:
        problem: the kernel's problem: the requested one, or that on copies of some of its matrices.
        copies: names of these, of "a" and "b".
        binding: of the config.
        compiled: as Triton has it.
        usage: what it takes.
        given: whether the config was given, alone or with a plan, and not chosen here.
        passed: other configs that were compiled and are not taken, and why.
        seconds: that compiling took, which is little where Triton's cache has the kernel.
    """

    problem: Problem
    copies: tuple[str, ...]
    binding: Binding
    compiled: Any
    usage: Usage
    given: bool
    passed: dict[Config, str]
    seconds: float


def build(problem: Problem, config: Config | None = None) -> Built:
    """The kernel for a problem, with a config or the one that gemmery takes.

    Raises:
        ValueError: the config does not suit the problem, none fits, the GPU lacks the instructions, or kernels are
            interpreted in this process.
    """
    if not runs_on(problem):
        raise ValueError(
            f"{problem.device.name} lacks the instructions for {problem}: torch's reference runs, no kernel"
        )
    begun = time.perf_counter()
    padded = worth_copying(problem) if config is None and not problem.paired else None
    if padded is not None:
        problem = padded.problem
    choices = candidates(problem) if config is None else [config]
    with compiling_for(problem.device.arch):
        found = compile_first_fitting(
            problem, choices, arguments(problem, "meta"), _examiner(problem, config), config is not None
        )
    seconds = time.perf_counter() - begun
    copies = () if padded is None else padded.names
    return Built(
        problem, copies, found.binding, found.compiled, usage(found.compiled), config is not None, found.passed,
        seconds,
    )  # fmt: skip


def _examiner(problem: Problem, config: Config | None) -> Any:
    """Checks a compiled kernel's shared memory as the driver would, unless its config was given; returns its spills."""

    def examine(compiled: Any) -> int:
        took, room = usage(compiled), problem.device.target.shared
        if took.shared > room and config is None:
            raise OutOfResources(took.shared, room, "shared memory")
        return took.spilled // 4

    return examine


def built(plan: Plan) -> Built:
    """The kernel of a plan; compiled now where the plan was not made for a GPU of this machine.

    Raises:
        ValueError: the plan runs torch's reference.
    """
    binding, compiled = plan._binding, plan._compiled
    if binding is None:
        raise ValueError(f"{plan}: there is no kernel")
    if compiled is None:
        return build(binding.problem, binding.config)
    return Built(binding.problem, plan.copies, binding, compiled, usage(compiled), True, {}, 0.0)


def device_of(device: str | None, target: str | None) -> Device:
    """A GPU of the device table by its name or by its architecture; by default the current one's, or an H200's row.

    Raises:
        ValueError: there is none, or the two do not match.
    """
    if target is None:
        return device_named(device)
    known = [name for name, arch in ARCHS.items() if arch.multiprocessor is not None]
    if target not in known:
        raise ValueError(f"target is {target!r}; it must be one of {', '.join(known)}")
    if device is None:
        return next(row for row in TABLE.values() if row.arch == target)
    row = device_named(device)
    if row.arch != target:
        raise ValueError(
            f"device is {device!r}, which is of target {row.arch}, and target is {target!r}; give one"
        )
    return row
