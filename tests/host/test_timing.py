"""The measuring code, on a simulated GPU."""

import numpy
import pytest

from gemmery.lab import timing
from gemmery.tuning import stopwatch
from tests.host.simulated import HZ


def test_sleep_is_calibrated(watch):
    assert watch.cycles == pytest.approx(HZ, rel=0.01)


def test_cold_times_the_gpu_alone_after_sleep_and_flush(gpu, watch):
    gpu.trace.clear()
    assert watch.cold(gpu.kernel("k", 40e-6, host=30e-6), 3) == pytest.approx([40e-6] * 3)
    assert gpu.trace == ["sleep", "flush", "k"] * 3


def test_cold_repeats_a_launch_that_came_late(gpu, watch):
    """A host that takes longer than the sleep would end up in the figure."""
    gpu.trace.clear()
    times = watch.cold(gpu.kernel("k", 40e-6, host=3e-3), 2)
    assert times == pytest.approx([40e-6] * 2)
    assert gpu.trace.count("k") > 2


def test_what_comes_before_a_single_call_is_not_timed(gpu, watch):
    gpu.trace.clear()
    before, call = gpu.kernel("before", 70e-6, host=5e-6), gpu.kernel("k", 40e-6, host=30e-6)
    assert watch.single(call, 1e-3, before) == (pytest.approx(40e-6), False)
    assert gpu.trace == ["sleep", "flush", "before", "k"]
    assert watch.single(gpu.kernel("k", 40e-6, host=3e-3), 1e-3)[1] is True


def test_cold_refuses_a_call_that_synchronizes(gpu, watch):
    def call():
        gpu.launch("k", 40e-6)
        gpu.synchronize()

    with pytest.raises(RuntimeError, match="does it synchronize"):
        watch.cold(call, 1)


def test_burst_is_the_median_of_the_launches(gpu, watch):
    times = iter([9e-6, 1e-6, 2e-6, 3e-6, 4e-6, 5e-6, 100e-6])
    assert timing._burst(watch, gpu.kernel("k", lambda: next(times)), 7) == pytest.approx(4e-6)


def test_slow_calls_get_fewer_burst_launches():
    assert stopwatch.burst_launches(20e-6) == stopwatch.BURST_MOST
    assert stopwatch.burst_launches(12e-3) == 4
    assert stopwatch.burst_launches(1.0) == stopwatch.BURST_FEWEST


def test_estimate(gpu, watch):
    light = watch.estimate(gpu.kernel("k", 50e-6, host=10e-6))
    assert light.seconds == pytest.approx(50e-6, rel=0.01)
    assert not light.host_bound
    assert watch.estimate(gpu.kernel("k", 5e-6, host=20e-6)).host_bound
    slow = watch.estimate(gpu.kernel("k", 0.2, host=20e-6))
    assert slow.seconds == pytest.approx(0.2, rel=0.01)
    assert not slow.host_bound


def test_compare_runs_every_method_each_round_in_new_orders(gpu, watch):
    methods = {name: gpu.kernel(name, us * 1e-6) for name, us in {"a": 40, "b": 50, "c": 60}.items()}
    timed = timing.compare(methods, rounds=8, seed=1, watch=watch)
    assert set(timed) == {"burst", "steady"}
    for rounds in timed.values():
        assert len(rounds) == 8
        assert len({tuple(times) for times in rounds}) > 2
        for times in rounds:
            assert times == pytest.approx({"a": 40e-6, "b": 50e-6, "c": 60e-6}, rel=0.01)
    again = timing.compare(methods, rounds=8, seed=1, watch=watch)
    assert [list(times) for times in again["burst"]] == [list(times) for times in timed["burst"]]


class Heated:
    """A kernel that slows down once it has itself kept the GPU busy for a while."""

    def __init__(self, gpu, name, cold, hot):
        self.gpu, self.name, self.cold, self.hot = gpu, name, cold, hot

    def __call__(self):
        busy = 0.0
        if getattr(self.gpu, "runner", None) is self:
            busy = self.gpu.free - self.gpu.since
        else:
            self.gpu.runner, self.gpu.since = self, max(self.gpu.free, self.gpu.host)
        self.gpu.launch(self.name, self.hot if busy > 0.2 else self.cold)


def test_steady_times_a_method_heated_by_itself(gpu, watch):
    methods = {"a": Heated(gpu, "a", 100e-6, 125e-6), "b": Heated(gpu, "b", 200e-6, 210e-6)}
    timed = timing.compare(methods, rounds=3, seed=3, watch=watch, regimes=["steady"])
    firsts = [times for times in timed["steady"] if list(times) == ["b", "a"]]
    assert firsts, "the seed must give a round in which a follows b"
    for times in firsts:
        assert times["a"] == pytest.approx(125e-6, rel=0.01)


def test_steady_loads_then_times_without_a_gap(gpu, watch):
    gpu.trace.clear()
    begun = gpu.free
    figure = timing._loaded(watch, gpu.kernel("k", 100e-6), 100e-6, 1, timing.LOAD, timing.TIMED)
    assert figure == pytest.approx(100e-6)
    assert len(gpu.trace) == 2500 + 3500
    assert gpu.free - begun == pytest.approx(0.6, rel=0.01)


def test_steady_of_host_bound_methods_goes_through_graphs(gpu, watch):
    """The GPU would wait for the host, and the figure would be the host's."""
    methods = {"light": gpu.kernel("light", 5e-6, host=20e-6), "heavy": gpu.kernel("heavy", 100e-6)}
    found = timing.measure(methods, rounds=2, seed=0, watch=watch)
    assert found.graphed
    for times in found.rounds["steady"]:
        assert times == pytest.approx({"light": 5e-6, "heavy": 100e-6}, rel=0.01)
    assert not timing.measure({"heavy": methods["heavy"]}, rounds=1, watch=watch).graphed


@pytest.mark.parametrize("regimes", [timing.KERNEL_REGIMES, ("graph",), ("host",)])
def test_expected_seconds_is_about_right(gpu, watch, regimes):
    for seconds in (5e-6, 12e-3) if regimes != ("host",) else (5e-6,):
        begun = gpu.clock()
        methods = {name: gpu.kernel(name, seconds, host=15e-6) for name in "ab"}
        timing.compare(methods, rounds=3, regimes=regimes, watch=watch)
        expected = timing.expected_seconds(2, rounds=3, regimes=regimes, seconds=seconds)
        assert gpu.clock() - begun == pytest.approx(expected, rel=0.25)


def test_host_time_has_no_gpu_time_in_it(gpu, watch):
    assert timing.host_time(gpu.kernel("k", 3e-6, host=8e-6), watch=watch) == pytest.approx(8e-6)


def test_graph_and_host_are_regimes_like_the_others(gpu, watch):
    """In a graph the host's part of a call is gone, in the host's figure the GPU's part is."""
    methods = {"a": gpu.kernel("a", 2e-6, host=20e-6), "b": gpu.kernel("b", 3e-6, host=8e-6)}
    found = timing.measure(methods, rounds=4, seed=5, regimes=("graph", "host"), watch=watch)
    assert set(found.rounds) == {"graph", "host"}
    assert not found.graphed
    for rounds in found.rounds.values():
        assert len(rounds) == 4
        assert len({tuple(times) for times in rounds}) == 2
    for graph, host in zip(found.rounds["graph"], found.rounds["host"], strict=True):
        assert graph == pytest.approx({"a": 2e-6, "b": 3e-6}, rel=0.02)
        assert host == pytest.approx({"a": 20e-6, "b": 8e-6}, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": {}}, "no method"),
        ({"methods": {"a": print}, "rounds": 0}, "0 rounds"),
        (
            {"methods": {"a": print}, "regimes": ["bust"]},
            "regimes bust given; there are burst, steady, graph, host",
        ),
    ],
)
def test_compare_says_what_is_wrong(watch, arguments, message):
    with pytest.raises(ValueError, match=message):
        timing.compare(watch=watch, **arguments)


def test_ratio_is_taken_within_rounds():
    rounds = [{"us": 1.0, "peer": 2.0}, {"us": 2.0, "peer": 2.0}, {"peer": 9.0, "us": 3.0}]
    assert timing.ratio(rounds, "peer", "us") == timing.Ratio(median=2.0, min=1.0, max=3.0)


@pytest.mark.parametrize("count", [1, 2, 11, 24])
def test_percentile_is_numpys(count):
    values = [1 + (7 * i % count) ** 2 for i in range(count)]
    for percent in (0, 10, 50, 100):
        assert timing.percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))
    with pytest.raises(ValueError, match="at least one"):
        timing.percentile([], 10)


def test_geometric_mean():
    assert timing.geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)
    for wrong in ([], [1.0, 0.0]):
        with pytest.raises(ValueError, match="positive"):
            timing.geometric_mean(wrong)
