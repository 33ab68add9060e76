"""Timing of several methods of one computation against each other, fairly.

A GPU at its power limit runs slower, and whoever is timed after a light kernel gets the power that was left unused.
So there are two regimes for a kernel. "burst": each launch is timed alone, after a rest, with inputs cold. "steady":
each method heats the GPU with itself before it is timed. Two more are about the call around it. "graph": the GPU's time
for one of many calls in a CUDA graph. "host": the time that the host is busy with one eager call. In all of them,
methods take turns in a new order each round, and what counts is the ratio of two methods within a round.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Call = Callable[[], object]
#: By method, what takes a figure of it, in seconds per call.
Figures = dict[str, Callable[[], float]]
#: Seconds by method, in the order in which the methods ran.
Round = dict[str, float]

#: All regimes, and those of a kernel.
REGIMES = ("burst", "steady", "graph", "host")
KERNEL_REGIMES = ("burst", "steady")
#: Seconds that the GPU sleeps before a burst launch, so that the host is done with queueing the launch when it starts.
SLEEP = 1e-3
#: Launches per burst figure: the most, the fewest, and the seconds that decide in between.
BURST_MOST, BURST_FEWEST, BURST_SECONDS = 7, 3, 0.05
#: Seconds of load and of timing in a steady figure.
LOAD, TIMED = 0.25, 0.35
#: Calls in one CUDA graph, and seconds of load and of timing of its replays in a graph figure.
GRAPH_CALLS = 32
GRAPH_LOAD, GRAPH_TIMED = 10e-3, 30e-3
#: Calls in a row in a host figure, fewer than a stream's queue takes so that the host never waits for it, and how many
#: such rows it is the median of.
HOST_CALLS, HOST_REPEATS = 1000, 3
#: Least bytes of the buffer whose writing empties the L2 cache.
FLUSH_BYTES = 256 << 20

_LONGEST_SLEEP = 64e-3
#: Seconds over which the time of a call is estimated, and calls beyond which an estimate goes no further.
_ESTIMATE, _ESTIMATE_CALLS = 10e-3, 4096
#: A call that keeps the host busy for a larger part of its time than this may leave the GPU waiting.
_HOST_BOUND = 0.8
#: Seconds that an eager call keeps the host busy, about.
_HOST_SECONDS = 15e-6


@dataclass(frozen=True)
class Estimate:
    """A first idea of a call.

    Attributes:
        seconds: per call in a row of calls, the larger of the GPU's and the host's part.
        host_bound: whether the host takes about as long to queue the call as the GPU takes to run it.
    """

    seconds: float
    host_bound: bool


@dataclass(frozen=True)
class Comparison:
    """What `measure` found.

    Attributes:
        rounds: by regime, one dict of seconds per call for each round.
        graphed: whether the steady figures come from CUDA graphs, because some method is bound by the host.
    """

    rounds: dict[str, list[Round]]
    graphed: bool


class Stopwatch:
    """Times calls on the current CUDA device.

    Args:
        cuda: `torch.cuda`, or what stands for it in a test.
        clock: the host's clock, in seconds.
        flush: empties the L2 cache, on the current stream; by default it writes a buffer several times as large.
    """

    def __init__(
        self, cuda: Any = None, clock: Callable[[], float] = time.perf_counter, flush: Call | None = None
    ) -> None:
        self.cuda = torch.cuda if cuda is None else cuda
        self.clock = clock
        self.flush = _l2_flush() if flush is None else flush
        self.cycles = self._calibrate()

    def _calibrate(self) -> float:
        """Cycles of the sleep kernel per second."""
        # An idle GPU is slow to raise its clock; calibrated at a low one, the sleep would be too short later.
        begun = self.clock()
        while self.clock() - begun < 0.1:
            self.flush()
            self.cuda.synchronize()
        cycles = 2_000_000
        return max(cycles / self.span(partial(self.cuda._sleep, cycles), 1)[0] for _ in range(5))

    def span(self, call: Call, count: int, load: int = 0) -> tuple[float, float]:
        """Time `count` calls in a row.

        Args:
            call: queues work on the current stream.
            count: calls that are timed.
            load: calls queued right before, untimed.

        Returns:
            Seconds that the GPU took for all `count` calls, and seconds that the host took to queue them.
        """
        start, end = self.cuda.Event(enable_timing=True), self.cuda.Event(enable_timing=True)
        for _ in range(load):
            call()
        start.record()
        begun = self.clock()
        for _ in range(count):
            call()
        queued = self.clock() - begun
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, queued

    def cold(self, call: Call, launches: int) -> list[float]:
        """Seconds of `launches` single calls, each after a sleep and with an L2 cache that holds none of its inputs.

        Raises:
            RuntimeError: the call holds the host so long that it can't be queued ahead of the GPU.
        """
        times: list[float] = []
        rest = SLEEP
        while len(times) < launches:
            start, end = self.cuda.Event(enable_timing=True), self.cuda.Event(enable_timing=True)
            self.cuda._sleep(round(rest * self.cycles))
            self.flush()
            start.record()
            call()
            end.record()
            late = start.query()
            end.synchronize()
            if not late:
                times.append(start.elapsed_time(end) / 1e3)
                continue
            # The GPU got to the start before the host had queued the end: the figure would have the host's time in it.
            rest *= 2
            if rest > _LONGEST_SLEEP:
                raise RuntimeError(
                    f"a call is still not queued after {_LONGEST_SLEEP * 1e3:.0f} ms: does it synchronise with the GPU?"
                )
        return times

    def estimate(self, call: Call) -> Estimate:
        """How long a call takes about; calls it once before, so that compilation is not in it."""
        call()
        self.cuda.synchronize()
        count = 1
        while True:
            seconds, queued = self.span(call, count)
            if seconds >= _ESTIMATE or count >= _ESTIMATE_CALLS:
                return Estimate(seconds / count, queued > _HOST_BOUND * seconds)
            count *= 4

    def graph(self, call: Call, calls: int) -> Call:
        """A function that replays `calls` calls as one CUDA graph, which takes the host next to no time."""
        recorded = self.cuda.CUDAGraph()
        with self.cuda.graph(recorded):
            for _ in range(calls):
                call()
        replay: Call = recorded.replay
        return replay


def _l2_flush() -> Call:
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    buffer = torch.empty(max(FLUSH_BYTES, 4 * cache) // 4, dtype=torch.int32, device="cuda")
    return buffer.zero_


def burst_launches(seconds: float) -> int:
    """Launches in one burst figure of a call that takes `seconds`: fewer where it is slow."""
    return max(BURST_FEWEST, min(BURST_MOST, int(BURST_SECONDS / seconds))) if seconds > 0 else BURST_MOST


def expected_seconds(
    methods: int, *, rounds: int = 5, regimes: Iterable[str] = KERNEL_REGIMES, seconds: float = 0.0
) -> float:
    """About how long `compare` takes: mostly 0.6 s per method and round where steady is among the regimes.

    Args:
        methods: how many are compared.
        seconds: per call.
    """
    each = {
        "burst": burst_launches(seconds) * (SLEEP + 0.1e-3 + seconds),
        "steady": max(LOAD, seconds) + max(TIMED, 2 * seconds),
        "graph": max(GRAPH_LOAD, GRAPH_CALLS * seconds) + max(GRAPH_TIMED, 2 * GRAPH_CALLS * seconds),
        "host": HOST_REPEATS * HOST_CALLS * _HOST_SECONDS,
    }
    estimate = 2 * _ESTIMATE + seconds
    return methods * (estimate + rounds * sum(each[regime] for regime in regimes))


def _burst(watch: Stopwatch, call: Call, launches: int) -> float:
    return statistics.median(watch.cold(call, launches))


def _loaded(watch: Stopwatch, call: Call, seconds: float, calls: int, load: float, timed: float) -> float:
    """Seconds per call, timed after a load of the same. `call` takes `seconds` and stands for `calls`."""
    count = max(2, round(timed / seconds))
    return watch.span(call, count, load=max(1, round(load / seconds)))[0] / (count * calls)


def _graphs(watch: Stopwatch, methods: Mapping[str, Call], load: float, timed: float) -> Figures:
    figures: Figures = {}
    for name, call in methods.items():
        replay = watch.graph(call, GRAPH_CALLS)
        seconds = watch.estimate(replay).seconds
        figures[name] = partial(_loaded, watch, replay, seconds, GRAPH_CALLS, load, timed)
    return figures


def _figures(
    regime: str, watch: Stopwatch, methods: Mapping[str, Call], estimates: Mapping[str, Estimate]
) -> Figures:
    """One function per method that takes a figure of a regime."""
    if regime == "burst":
        return {
            name: partial(_burst, watch, call, burst_launches(estimates[name].seconds))
            for name, call in methods.items()
        }
    if regime == "graph":
        return _graphs(watch, methods, GRAPH_LOAD, GRAPH_TIMED)
    if regime == "host":
        return {name: partial(host_time, call, watch=watch) for name, call in methods.items()}
    if _graphed(estimates):
        return _graphs(watch, methods, LOAD, TIMED)
    return {
        name: partial(_loaded, watch, call, estimates[name].seconds, 1, LOAD, TIMED)
        for name, call in methods.items()
    }


def _graphed(estimates: Mapping[str, Estimate]) -> bool:
    """Whether steady figures go through CUDA graphs, because the GPU would wait for some method's host.

    Graphs for all or for none: a graph's launches follow each other a little faster, which would favour some.
    """
    return any(estimate.host_bound for estimate in estimates.values())


def check_protocol(regimes: Sequence[str], rounds: int) -> None:
    """ValueError unless all regimes are of `REGIMES` and there is at least one round."""
    unknown = [regime for regime in regimes if regime not in REGIMES]
    if unknown:
        raise ValueError(f"regimes {', '.join(unknown)} given; there are {', '.join(REGIMES)}")
    if rounds < 1:
        raise ValueError(f"{rounds} rounds given; at least one is needed")


def measure(
    methods: Mapping[str, Call],
    *,
    rounds: int = 5,
    seed: int | None = None,
    regimes: Sequence[str] = KERNEL_REGIMES,
    watch: Stopwatch | None = None,
) -> Comparison:
    """As `compare`, and says how the steady figures were taken.

    Raises:
        ValueError: there is no method, no round, or a regime that is not one of `REGIMES`.
    """
    check_protocol(regimes, rounds)
    if not methods:
        raise ValueError("measure: no method given; at least one is needed")
    watch = Stopwatch() if watch is None else watch
    order = random.Random(seed)
    estimates = {name: watch.estimate(call) for name, call in methods.items()}
    timed: dict[str, list[Round]] = {}
    for regime in regimes:
        figures = _figures(regime, watch, methods, estimates)
        timed[regime] = [
            {name: figures[name]() for name in order.sample(list(figures), len(figures))}
            for _ in range(rounds)
        ]
    return Comparison(timed, "steady" in regimes and _graphed(estimates))


def compare(
    methods: Mapping[str, Call],
    *,
    rounds: int = 5,
    seed: int | None = None,
    regimes: Sequence[str] = KERNEL_REGIMES,
    watch: Stopwatch | None = None,
) -> dict[str, list[Round]]:
    """Time methods against each other on the current CUDA device.

    Args:
        methods: by name, functions that queue one launch of the method, its inputs and output fixed.
        rounds: rounds per regime; in each, all methods are timed once, in a new random order.
        seed: of those orders.
        regimes: some of `REGIMES`.
        watch: the stopwatch to use; a new one by default.

    Returns:
        By regime a list of rounds, each a dict of seconds per call by method, in the order in which they ran.

    Raises:
        ValueError: there is no method, no round, or an unknown regime.
        RuntimeError: a method synchronises with the GPU.
    """
    return measure(methods, rounds=rounds, seed=seed, regimes=regimes, watch=watch).rounds


def host_time(call: Call, *, watch: Stopwatch) -> float:
    """Seconds that the host is busy with one call: the median of several rows of calls without synchronisation."""
    for _ in range(100):
        call()
    times = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(HOST_REPEATS):
            watch.cuda.synchronize()
            begun = watch.clock()
            for _ in range(HOST_CALLS):
                call()
            times.append((watch.clock() - begun) / HOST_CALLS)
        watch.cuda.synchronize()
    finally:
        if collecting:
            gc.enable()
    return statistics.median(times)


@dataclass(frozen=True)
class Ratio:
    """Time of a peer divided by ours, over the rounds: above 1 ours is faster."""

    median: float
    min: float
    max: float


def ratio(rounds: Sequence[Round], peer: str, ours: str) -> Ratio:
    """The ratio of two methods, taken within each round; the spread is over the rounds."""
    each = [times[peer] / times[ours] for times in rounds]
    return Ratio(statistics.median(each), min(each), max(each))


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive numbers.

    Raises:
        ValueError: there are none, or one is not positive.
    """
    if not values or min(values) <= 0:
        raise ValueError(f"geometric_mean: {list(values)} given; it takes positive numbers, and at least one")
    return math.exp(statistics.fmean(math.log(value) for value in values))


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile, linear between the two values that are nearest to it, as NumPy has it.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("percentile: no values given; at least one is needed")
    ranked = sorted(values)
    place = (len(ranked) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (place - low) * (ranked[high] - ranked[low])
