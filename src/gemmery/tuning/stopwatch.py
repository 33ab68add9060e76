"""A stopwatch for calls on a GPU: many in a row, or single ones that find nothing in its caches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

Call = Callable[[], object]

#: Seconds that the GPU sleeps before a burst launch, so that the host is done with queueing the launch when it starts.
SLEEP = 1e-3
#: Launches per burst figure: the most, the fewest, and the seconds that decide in between.
BURST_MOST, BURST_FEWEST, BURST_SECONDS = 7, 3, 0.05
#: Least bytes of the buffer whose writing empties the L2 cache.
FLUSH_BYTES = 256 << 20

_LONGEST_SLEEP = 64e-3
#: Seconds over which the time of a call is estimated, and calls beyond which an estimate goes no further.
ESTIMATE, _ESTIMATE_CALLS = 10e-3, 4096
#: A call that keeps the host busy for a larger part of its time than this may leave the GPU waiting.
_HOST_BOUND = 0.8


@dataclass(frozen=True)
class Estimate:
    """A first idea of a call.

    Attributes:
        seconds: per call in a row of calls, the larger of the GPU's and the host's part.
        host_bound: whether the host takes about as long to queue the call as the GPU takes to run it.
    """

    seconds: float
    host_bound: bool


class Watch(Protocol):
    """The part of `Stopwatch` with which single calls are timed."""

    def estimate(self, call: Call) -> Estimate:
        """A first idea of a call's time."""

    def cold(self, call: Call, launches: int) -> list[float]:
        """Seconds of `launches` single calls, each with caches that hold none of its inputs."""


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
            seconds, is_late = self.single(call, rest)
            if not is_late:
                times.append(seconds)
                continue
            rest *= 2
            if rest > _LONGEST_SLEEP:
                raise RuntimeError(
                    f"a call is still not queued after {_LONGEST_SLEEP * 1e3:.0f} ms: does it synchronize with the GPU?"
                )
        return times

    def single(self, call: Call, rest: float, before: Call | None = None) -> tuple[float, bool]:
        """Time a single call after a sleep, with an L2 cache that holds none of its inputs.

        Args:
            rest: seconds for which the GPU sleeps.
            before: queues work between the sleep and the call, which is not timed.

        Returns:
            The seconds, and whether the GPU got to the start before the host had queued the end, so that the host's
            time is in them.
        """
        start, end = self.cuda.Event(enable_timing=True), self.cuda.Event(enable_timing=True)
        self.cuda._sleep(round(rest * self.cycles))
        self.flush()
        if before is not None:
            before()
        start.record()
        call()
        end.record()
        is_late = start.query()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, is_late

    def estimate(self, call: Call) -> Estimate:
        """About the time that a call takes; calls it once before, so that compilation is not in it."""
        call()
        self.cuda.synchronize()
        count = 1
        while True:
            seconds, queued = self.span(call, count)
            if seconds >= ESTIMATE or count >= _ESTIMATE_CALLS:
                return Estimate(seconds / count, queued > _HOST_BOUND * seconds)
            count *= 4

    def graph(self, call: Call, calls: int) -> Call:
        """A function that replays `calls` calls as one CUDA graph, which takes almost no host time."""
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


def cold_seconds(watch: Watch, call: Call) -> float:
    """The median time of single calls, as many as suit the time of one; the first call is not timed."""
    return statistics.median(watch.cold(call, burst_launches(watch.estimate(call).seconds)))


def burst_launches(seconds: float) -> int:
    """Launches in one burst figure of a call that takes `seconds`: fewer if it is slow."""
    return max(BURST_FEWEST, min(BURST_MOST, int(BURST_SECONDS / seconds))) if seconds > 0 else BURST_MOST
