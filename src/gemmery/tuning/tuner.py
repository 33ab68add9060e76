"""Measuring configs: `tune` for one call, `tune_problems` for many problems.

The candidates are configs that the model predicts to be near the best. They are compiled in other processes while this
one measures, and each time is stored at once, so an interruption loses nothing. The fastest few are measured again, in
turns, because two times on a GPU are only comparable if they were taken side by side.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import devices
from ..api import plan
from ..dtypes import Precision
from ..launch.padding import launched
from ..launch.plan import runs_on
from ..problem import Config, Problem
from ..product.cache import forget
from ..schedules import bind
from ..select import Cost, rank
from ..select.keys import device_text, to_dict
from ..select.store import Store, current
from .meter import Meter, Refused
from .stopwatch import Watch
from .workers import WORTH_WORKERS, Target, Workers

#: Configs whose predicted time is more than this many times the best prediction are not measured.
PRUNE = 1.5
#: The most configs of each schedule: some have hundreds of tiles, and the model is off by a few percent.
PER_SCHEDULE = 16
#: The fastest are measured again: their largest number, their largest time relative to the first, and the number of
#: turns.
FINALISTS, NEAR, TURNS = 4, 1.06, 4

AnyConfig = Config | dict[str, Any] | str
#: The reason for which a compiler died on a config for a problem; None if it did not die.
Deaths = Callable[[Problem, Config], str | None]


@dataclass(frozen=True)
class Progress:
    """The progress of a tuning run, after each config.

    Attributes:
        problem: what is being tuned; it is number `number` of `problems`, from 1.
        config, seconds: what was measured last, and its time; None if it can't run.
        done, total: configs that are finished, and all configs.
        left: seconds that the rest will take at the present pace.
    """

    problem: Problem
    number: int
    problems: int
    config: Config
    seconds: float | None
    done: int
    total: int
    left: float


@dataclass
class TuneResult:
    """Measured times of a problem's configs.

    Attributes:
        problem: the problem that was tuned; for a product that copies its matrices, the product of the copies.
        untuned: the config that is chosen without timings.
        seconds: the time of one cold launch of each config that was measured, now or before; the fastest first.
        refused: configs that can't run the problem here, with the reason.
        unmeasured: candidates that were not reached.
        measured: the number of configs that were measured now.
        failure: the reason why measuring ended early; "" if it did not.
    """

    problem: Problem
    untuned: Config
    seconds: dict[Config, float] = field(default_factory=dict)
    refused: dict[Config, str] = field(default_factory=dict)
    unmeasured: list[Config] = field(default_factory=list)
    measured: int = 0
    failure: str = ""

    @property
    def best(self) -> Config | None:
        """The fastest config; None if none was measured."""
        return next(iter(self.seconds), None)

    @property
    def gain(self) -> float | None:
        """The time of the untuned config divided by that of the best; None if one of them was not measured."""
        if self.best is None or self.untuned not in self.seconds:
            return None
        return self.seconds[self.untuned] / self.seconds[self.best]

    def asdict(self) -> dict[str, Any]:
        """All fields as plain values, for JSON."""
        return {
            "problem": to_dict(self.problem),
            "device": device_text(self.problem.device),
            "untuned": str(self.untuned),
            "best": None if self.best is None else str(self.best),
            "gain": self.gain,
            "seconds": {str(config): seconds for config, seconds in self.seconds.items()},
            "refused": {str(config): reason for config, reason in self.refused.items()},
            "unmeasured": [str(config) for config in self.unmeasured],
            "measured": self.measured,
            "failure": self.failure,
        }

    def __str__(self) -> str:
        lines = [f"{self.problem} on {self.problem.device.name}"]
        for config, seconds in self.seconds.items():
            mark = "  untuned" if config == self.untuned else ""
            lines.append(f"{config!s:58} {seconds * 1e6:10.1f} µs{mark}")
        lines += [f"{config!s:58} {reason}" for config, reason in self.refused.items()]
        if self.unmeasured:
            lines.append(f"{len(self.unmeasured)} not measured{': ' + self.failure if self.failure else ''}")
        return "\n".join(lines)


def tune(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: Precision = "ieee",
    fast_accum: bool = False,
    configs: Iterable[AnyConfig] | None = None,
    exhaustive: bool = False,
    again: bool = False,
    seconds: float | None = None,
    progress: Callable[[Progress], object] | None = None,
) -> TuneResult:
    """Measure the configs that may suit a call of `matmul`. Later calls with the same layout use the fastest.

    The arguments before `configs` are those of `gemmery.matmul`. Only their layouts matter: tensors of the same layouts
    with random values are measured. Each timing is written to the user's store at once, so Ctrl-C loses none, and the
    next run continues where this one ended. Existing Plans keep their config, and so do batch-invariant calls, whose
    config may not depend on M.

    Args:
        configs: measure these, and the config that is chosen without tuning. By default, all configs that are
            predicted to take at most 1.5 times as long as the best.
        exhaustive: measure every config of the space.
        again: also measure configs that were measured before.
        seconds: start no measurement after this time.
        progress: called after each config.

    Returns:
        All timings of this problem, old and new.

    Raises:
        ValueError: no GPU runs this call, so there is nothing to measure; an operand is packed or sparse; or a config
            does not suit the call.

    Example:
        >>> import torch, gemmery
        >>> a, b = torch.randn(64, 32), torch.randn(32, 16)
        >>> if torch.cuda.is_available():
        ...     assert gemmery.tune(a.cuda(), b.cuda()).best is not None
    """
    found = plan(a, b, bias=bias, out=out, out_dtype=out_dtype, precision=precision, fast_accum=fast_accum)
    if found is None or found.config is None:
        raise ValueError(f"tune: no kernel runs for a on {a.device}, so there is nothing to measure")
    if found.problem.fusion is not None:
        # The store can't describe these.
        raise ValueError(
            "tune: an operand is packed or sparse; only products of dense tensors are tuned. config= pins a kernel"
        )
    with torch.cuda.device(a.device) if a.is_cuda else contextlib.nullcontext():
        (result,) = tune_problems(
            [found.problem], configs=configs, exhaustive=exhaustive, again=again, seconds=seconds, progress=progress
        )  # fmt: skip
    return result


def tune_problems(
    problems: Iterable[Problem],
    *,
    configs: Iterable[AnyConfig] | None = None,
    exhaustive: bool = False,
    again: bool = False,
    seconds: float | None = None,
    progress: Callable[[Progress], object] | None = None,
    each: Callable[[TuneResult], object] | None = None,
    watch: Watch | None = None,
    clock: Callable[[], float] = time.monotonic,
    workers: int | None = None,
) -> list[TuneResult]:
    """Tune problems on the current GPU; everything else is as for `tune`.

    Args:
        problems: each is tuned once; where matrices are copied, the product of the copies is. Left out are problems
            that no kernel runs on their device, and batch-invariant ones, which have one config for all M.
        each: called with each problem's result.
        watch: what measures; a `stopwatch.Stopwatch` by default.
        clock: tells the time, in seconds, for `seconds` and for the time left.
        workers: processes that compile, see `workers.Workers`; 0 compiles in this one.
    """
    if seconds is not None and not seconds >= 0:
        raise ValueError(f"tune: seconds is {seconds}; it must be at least 0")
    meter = Meter(watch)
    wanted = None if configs is None else [Config.of(config) for config in configs]
    store = current() or Store(None, "it is turned off by GEMMERY_STORE")
    tunable = [problem for problem in problems if runs_on(problem) and not problem.batch_invariant]
    tasks = [
        _Task.of(problem, store, wanted, exhaustive, again)
        for problem in dict.fromkeys(map(launched, tunable))
    ]
    run = _Run(meter, store, tasks, clock, seconds, progress)
    try:
        with _compiling(tasks, workers) as deaths:
            results = []
            for number, task in enumerate(tasks, 1):
                results.append(run.tune(number, task, deaths))
                if each is not None:
                    each(results[-1])
            return results
    finally:
        # Calls from now on ask the selector again, which finds the new timings.
        forget()


@dataclass
class _Task:
    """A problem, what it runs with untuned, and the configs to measure in their order."""

    problem: Problem
    untuned: Config
    todo: list[Config]

    @classmethod
    def of(
        cls, problem: Problem, store: Store, wanted: list[Config] | None, exhaustive: bool, again: bool
    ) -> _Task:
        ranked = rank(problem)
        first = ranked[0][0]
        if wanted is None:
            candidates = [config for config, _ in ranked] if exhaustive else _promising(ranked)
        else:
            # The untuned choice with them: without it, the best of these might be slower than no tuning.
            candidates = list(dict.fromkeys([first, *wanted]))
            for config in candidates:
                bind(problem, config)  # says what does not suit
        known = store.timings(problem)
        return cls(problem, first, [config for config in candidates if again or config not in known])


def _promising(ranked: list[tuple[Config, Cost]]) -> list[Config]:
    """The configs that are worth measuring."""
    limit = min(cost.total for _, cost in ranked) * PRUNE
    near = [config for config, cost in ranked if cost.total <= limit]
    seen: Counter[str] = Counter()
    found = []
    for config in near:
        seen[config.schedule] += 1
        if seen[config.schedule] <= PER_SCHEDULE:
            found.append(config)
    return found


class _Run:
    """One run of the tuner over its tasks."""

    def __init__(
        self, meter: Meter, store: Store, tasks: list[_Task], clock: Callable[[], float], seconds: float | None,
        progress: Callable[[Progress], object] | None,
    ) -> None:  # fmt: skip
        self.meter, self.store, self.tasks, self.clock, self.progress = meter, store, tasks, clock, progress
        self.begun, self.seconds = clock(), seconds
        self.done, self.total = 0, sum(len(task.todo) for task in tasks)

    def tune(self, number: int, task: _Task, deaths: Deaths) -> TuneResult:
        """Measure the configs of a task, and then the fastest again."""
        left = list(task.todo)
        died: dict[Config, str] = {}
        failure = ""
        try:
            while left and not self._is_late():
                # Not kept in the store: a process may have been killed for reasons that are not the config's.
                if death := deaths(task.problem, left[0]):
                    died[left[0]] = death
                else:
                    self._measure(task.problem, left[0])
                self._report(number, task.problem, left.pop(0))
            if len(left) < len(task.todo):
                self._measure_best_again(task.problem)
        except torch.OutOfMemoryError:
            failure = "the problem's tensors do not fit into the GPU's memory"
        self.done += len(left)
        known = self.store.timings(task.problem)
        return TuneResult(
            task.problem,
            task.untuned,
            {config: timing.seconds for config, timing in known.items() if timing.seconds is not None},
            {config: timing.note for config, timing in known.items() if timing.seconds is None} | died,
            left,
            len(task.todo) - len(left),
            failure or ("the time was over" if left else ""),
        )

    def _is_late(self) -> bool:
        return self.seconds is not None and self.clock() - self.begun >= self.seconds

    def _measure(self, problem: Problem, config: Config) -> None:
        try:
            self.store.record(problem, config, self.meter.seconds(problem, config))
        except Refused as refusal:
            self.store.record(problem, config, None, str(refusal))

    def _measure_best_again(self, problem: Problem) -> None:
        """Replace the times of the quickest, new ones and old ones, by medians of turns in which all were measured."""
        known = {c: t.seconds for c, t in self.store.timings(problem).items() if t.seconds is not None}
        limit = min(known.values(), default=0.0) * NEAR
        finalists = [config for config, seconds in known.items() if seconds <= limit][:FINALISTS]
        figures: dict[Config, list[float]] = {config: [] for config in finalists}
        for _ in range(TURNS if len(finalists) > 1 else 0):
            if self._is_late():
                return
            for config in random.sample(finalists, len(finalists)):
                try:
                    figures[config].append(self.meter.seconds(problem, config))
                except Refused as refusal:
                    # A timing that was brought from elsewhere, of a config that does not run here.
                    self.store.record(problem, config, None, str(refusal))
                    finalists.remove(config)
            for config in finalists:
                self.store.record(problem, config, statistics.median(figures[config]))

    def _report(self, number: int, problem: Problem, config: Config) -> None:
        self.done += 1
        if self.progress is None:
            return
        timing = self.store.timings(problem).get(config)
        left = (self.clock() - self.begun) / self.done * (self.total - self.done)
        seconds = None if timing is None else timing.seconds
        self.progress(
            Progress(problem, number, len(self.tasks), config, seconds, self.done, self.total, left)
        )


@contextlib.contextmanager
def _compiling(tasks: list[_Task], count: int | None) -> Iterator[Deaths]:
    """Has the candidates compiled by `count` other processes, if that is worthwhile."""
    jobs = [(task.problem, config) for task in tasks for config in task.todo]
    few = len(jobs) < WORTH_WORKERS if count is None else count == 0
    if few or devices.INTERPRETED:
        yield lambda problem, config: None
        return
    with Workers(Target.active(), count) as pool:
        compiled: dict[tuple[Problem, Config], Future[str | None]] = {job: pool.submit(*job) for job in jobs}
        yield lambda problem, config: compiled[problem, config].result()
