"""Fair timing of several methods of one computation against each other.

A GPU at its power limit runs slower, and a kernel that is timed after a light one gets the power that was left unused.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..tuning.stopwatch import ESTIMATE, SLEEP, Call, Estimate, Stopwatch, burst_launches

#: By method, the function that takes a figure of it, in seconds per call.
Figures = dict[str, Callable[[], float]]
#: Seconds by method, in the order in which the methods ran.
Round = dict[str, float]

#: All regimes, and those of a kernel.
REGIMES = ("burst", "steady", "graph", "host")
KERNEL_REGIMES = ("burst", "steady")
#: Seconds of load and of timing in a steady figure.
LOAD, TIMED = 0.25, 0.35
#: Calls in one CUDA graph, and seconds of load and of timing of its replays in a graph figure.
GRAPH_CALLS = 32
GRAPH_LOAD, GRAPH_TIMED = 10e-3, 30e-3
#: Calls in a row in a host figure, fewer than a stream's queue takes so that the host never waits for it, and how many
#: such rows it is the median of.
HOST_CALLS, HOST_REPEATS = 1000, 3
#: Seconds that an eager call keeps the host busy, about.
_HOST_SECONDS = 15e-6


@dataclass(frozen=True)
class Comparison:
    """The result of `measure`.

    Attributes:
        rounds: by regime, one dict of seconds per call for each round.
        graphed: whether the steady figures come from CUDA graphs, because some method is bound by the host.
    """

    rounds: dict[str, list[Round]]
    graphed: bool


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
    estimate = 2 * ESTIMATE + seconds
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

    Graphs for all or for none: a graph's launches follow each other a little faster, which would favor some.
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
        RuntimeError: a method synchronizes with the GPU.
    """
    return measure(methods, rounds=rounds, seed=seed, regimes=regimes, watch=watch).rounds


def host_time(call: Call, *, watch: Stopwatch) -> float:
    """Seconds that the host is busy with one call: the median of several rows of calls without synchronization."""
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
