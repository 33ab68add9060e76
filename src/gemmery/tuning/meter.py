"""Timing one config of a problem: its kernel is launched alone and cold, as in the burst regime of `gemmery bench`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from triton.errors import TritonError

from .. import devices
from ..launch.plan import Plan
from ..problem import Config, Problem
from ..select.samples import Sample, sample
from .stopwatch import Stopwatch, Watch, cold_seconds


class Refused(Exception):
    """A config can't run a problem on this GPU; the text says why."""


class Meter:
    """Times configs of one problem after the other, on the current GPU.

    Args:
        watch: measures; by default a new stopwatch.

    Raises:
        ValueError: there is no GPU, and no watch that would do without.
    """

    def __init__(self, watch: Watch | None = None) -> None:
        here = torch.cuda.is_available() and not devices.INTERPRETED
        if watch is None:
            if not here:
                why = "kernels are interpreted" if devices.INTERPRETED else "there is no GPU"
                raise ValueError(f"tune: {why} here, so there is nothing to measure")
            watch = Stopwatch()
        self._watch = watch
        self._device = torch.device("cuda", torch.cuda.current_device()) if here else torch.device("cpu")
        self._problem: Problem | None = None
        self._sample: Sample | None = None
        self._calls: dict[Config, Callable[[], object]] = {}

    def seconds(self, problem: Problem, config: Config) -> float:
        """Time of a launch.

        Raises:
            Refused: the kernel does not compile, fit or run without spilled registers.
        """
        if problem != self._problem:
            self._begin(problem)
        call = self._calls.get(config) or self._call(config)
        return cold_seconds(self._watch, call)

    def _begin(self, problem: Problem) -> None:
        row = devices.current(self._device)
        if row != problem.device:
            has = "no GPU" if row is None else row.name
            raise ValueError(f"tune: the problem is for {problem.device.name}, and here is {has}")
        # The last problem's tensors go first: both together may not fit.
        self._calls.clear()
        self._sample = self._problem = None
        self._sample = sample(problem, self._device, seed=0)
        self._problem = problem

    def _call(self, config: Config) -> Callable[[], object]:
        assert self._problem is not None
        assert self._sample is not None
        try:
            plan = Plan(self._problem, config)
            plan.fit(*self._sample.given, pinned=True)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, RuntimeError, TritonError) as error:
            # Any error of a compiler or a driver ends this config, not the run.
            reason = " ".join(str(error.__cause__ or error).split())
            raise Refused(reason[:200] or type(error).__name__) from error
        resources = plan.resources()
        if resources is not None and resources.spills:
            raise Refused(f"spills {resources.spills} words of registers")
        call = self._calls[config] = partial(plan, *self._sample)
        return call
