"""The tuner's decisions, with a meter that only pretends: what it measures, keeps, skips, and survives."""

import contextlib
import json
import statistics

import pytest
import torch

import gemmery
from gemmery import Config
from gemmery.launch import padding
from gemmery.launch.explain import explain_problem
from gemmery.select import candidates, keys, rank, store
from gemmery.tuning import tuner
from gemmery.tuning.meter import Refused
from gemmery.tuning.tuner import tune_problems
from gemmery.tuning.workers import WORTH_WORKERS
from tests.problems import make

P = make(4096, 4096, 4096, device="NVIDIA H200", dtype=torch.bfloat16)
RANKED = [config for config, _ in rank(P)]


class Meter:
    """Stands for a GPU: `times` by config, and `after` what happens in a measurement, given how many came before."""

    def __init__(self, times=None, after=None):
        self.times = times or {}
        self.after = after
        self.calls = []

    def seconds(self, problem, config):
        if self.after is not None:
            self.after(len(self.calls))
        self.calls.append((problem, config))
        seconds = self.times.get(config, 1e-3)
        if isinstance(seconds, str):
            raise Refused(seconds)
        return seconds() if callable(seconds) else seconds

    @property
    def first(self):
        """Configs in the order in which they were first measured."""
        return list(dict.fromkeys(config for _, config in self.calls))


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """A store of this test's own."""
    monkeypatch.setenv("GEMMERY_STORE", "1")
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path))
    return store.current()


@pytest.fixture
def tune(monkeypatch):
    """Tunes problems with a meter."""

    def run(meter, problems=(P,), **options):
        monkeypatch.setattr(tuner, "Meter", lambda watch: meter)
        return tune_problems(problems, **{"workers": 0} | options)

    return run


def apart(step=1e-3):
    """Times so far apart that nothing has to be measured again; the last of the ranking is the quickest."""
    return {config: step * (len(RANKED) - place) for place, config in enumerate(RANKED)}


# ---------------------------------------------------------------------------------------------------------------------
# What is measured


def test_what_the_model_predicts_near_the_best_is_measured_in_its_order(tune):
    meter = Meter(apart())
    (result,) = tune(meter)
    limit = min(cost.total for _, cost in rank(P)) * tuner.PRUNE
    near = [config for config, cost in rank(P) if cost.total <= limit]
    for name in {config.schedule for config in near}:
        left_out = [config for config in near if config.schedule == name][tuner.PER_SCHEDULE :]
        near = [config for config in near if config not in left_out]
    assert 1 < len(near) < len(RANKED)
    assert meter.first == near
    assert result.best == near[-1]
    assert result.untuned == near[0]
    assert result.gain == pytest.approx(apart()[near[0]] / apart()[near[-1]])
    assert (result.measured, result.unmeasured, result.failure) == (len(near), [], "")
    assert list(result.seconds.values()) == sorted(result.seconds.values())


def test_exhaustive_measures_the_whole_space(tune):
    meter = Meter(apart())
    (result,) = tune(meter, exhaustive=True)
    assert meter.first == RANKED
    assert result.best == RANKED[-1]
    assert candidates(P)[0] == RANKED[-1]


def test_configs_that_are_asked_for_and_the_one_they_must_beat(tune):
    own = Config(64, 64, 32, group_m=5)
    meter = Meter({own: 1e-4, RANKED[0]: 2e-4})
    (result,) = tune(meter, configs=[str(own), own.asdict()])
    assert meter.first == [RANKED[0], own]
    assert result.best == own
    assert candidates(P)[0] == own


def test_a_config_that_does_not_suit_is_an_error_before_any_measurement(tune):
    meter = Meter()
    misaligned = make(128, 128, 129, device="NVIDIA H200")
    with pytest.raises(ValueError, match="descriptor"):
        tune(meter, [misaligned], configs=[Config(64, 64, 64, loader="descriptor")])
    assert meter.calls == []


def test_each_problem_is_tuned_once_and_some_are_left_out(tune):
    meter = Meter(apart())
    invariant = make(4096, 4096, 4096, device="NVIDIA H200", batch_invariant=True)
    reference = make(device="AMD Radeon RX 7900 XTX", dtype=torch.float8_e5m2, out_dtype=torch.float16)
    results = tune(meter, [P, invariant, reference, P])
    assert [result.problem for result in results] == [P]


def test_of_a_product_that_copies_its_matrices_the_product_of_the_copies_is_tuned(tune):
    p = make(4096, 4096, 4096, device="NVIDIA H200", dtype=torch.bfloat16, pad=1, start=1)
    copied = padding.launched(p)
    assert gemmery.Plan(p).copies
    assert copied != p
    quick = rank(copied)[1][0]
    meter = Meter({quick: 0.1e-3})
    (result,) = tune(meter, [p, copied])
    assert {problem for problem, _ in meter.calls} == {result.problem} == {copied}
    assert gemmery.Plan(p).config == quick
    assert explain_problem(p).choices[0].measured == 0.1e-3
    assert "copied first" in str(explain_problem(p))


# ---------------------------------------------------------------------------------------------------------------------
# What is kept


def test_each_timing_is_in_the_store_before_the_next_is_taken(tune, kept):
    seen, few = [], RANKED[:20]
    tune(Meter(apart(), after=lambda number: seen.append(len(kept.timings(P)))), configs=few)
    assert seen[: len(few)] == list(range(len(few)))


@pytest.mark.slow
def test_what_is_known_is_not_measured_again_unless_asked(tune):
    (first,) = tune(Meter(apart()), exhaustive=True)
    again = Meter(apart())
    (result,) = tune(again, exhaustive=True)
    assert again.calls == []
    assert result.measured == 0
    assert result.seconds == first.seconds
    more = Meter(apart(2e-3))
    (result,) = tune(more, exhaustive=True, again=True)
    assert more.first == RANKED
    assert result.seconds == apart(2e-3)


def test_a_new_config_does_not_throw_the_others_away(tune):
    tune(Meter(apart()), exhaustive=True)
    new = Config(64, 64, 32, group_m=5)
    meter = Meter(apart() | {new: 1.0})
    (result,) = tune(meter, configs=[new])
    assert meter.first == [new]
    assert result.seconds == apart() | {new: 1.0}


@pytest.mark.parametrize("where", ["file", "memory"])
def test_an_interruption_loses_nothing(tune, kept, monkeypatch, where):
    if where == "memory":
        own = store.Store(None)
        monkeypatch.setattr(store, "current", lambda: own)
        monkeypatch.setattr(tuner, "current", store.current)
        store.current()._said.add("write")

    def stop(number):
        if number == 3:
            raise KeyboardInterrupt

    forgotten = []
    monkeypatch.setattr(tuner, "forget", lambda: forgotten.append(1))
    with pytest.raises(KeyboardInterrupt):
        tune(Meter(apart(), after=stop), exhaustive=True)
    assert list(store.current().timings(P)) == RANKED[:3][::-1]
    assert candidates(P)[0] == RANKED[2]
    assert forgotten == [1]
    meter = Meter(apart())
    (result,) = tune(meter, exhaustive=True)
    assert meter.first == RANKED[3:]
    assert result.seconds == apart()


def test_configs_that_can_not_run_are_remembered_with_their_reason(tune):
    times = apart() | {RANKED[1]: "spills 7 words of registers"}
    meter = Meter(times)
    (result,) = tune(meter, exhaustive=True)
    assert result.refused == {RANKED[1]: "spills 7 words of registers"}
    assert RANKED[1] not in result.seconds
    assert "spills 7 words" in str(result)
    again = Meter(times)
    tune(again, exhaustive=True)
    assert again.calls == []


def test_a_store_that_is_turned_off_keeps_nothing(tune, kept, monkeypatch):
    monkeypatch.setenv("GEMMERY_STORE", "0")
    with pytest.warns(RuntimeWarning, match="GEMMERY_STORE"):
        (result,) = tune(Meter(apart()), exhaustive=True)
    assert result.seconds == apart()
    assert kept.timings(P) == {}


# ---------------------------------------------------------------------------------------------------------------------
# The quickest again


def test_the_quickest_are_measured_again_side_by_side(tune):
    """The first figure of one was a lucky one, and that of another came from an earlier, slower day."""
    lucky, earlier, slow = RANKED[1], RANKED[2], RANKED[3]
    base = dict.fromkeys(RANKED, 5e-3) | {slow: 2e-3}
    tune(Meter(base | {earlier: 1.02e-3}), configs=[earlier])
    figures = iter([0.98e-3])
    meter = Meter(base | {lucky: lambda: next(figures, 1.05e-3), earlier: 0.9e-3})
    (result,) = tune(meter, configs=[lucky, slow])
    counts = {config: sum(config == called for _, called in meter.calls) for config in (lucky, earlier, slow)}
    assert counts == {lucky: 1 + tuner.TURNS, earlier: tuner.TURNS, slow: 1}
    assert result.best == earlier
    assert result.seconds[lucky] == 1.05e-3
    assert result.seconds[earlier] == 0.9e-3


def test_a_figure_that_is_out_of_line_does_not_count(tune):
    drawn = iter([1.0e-3, 1.01e-3, 9e-3, 1.02e-3, 1.03e-3])
    meter = Meter(dict.fromkeys(RANKED, 5e-3) | {RANKED[0]: lambda: next(drawn), RANKED[1]: 1.04e-3})
    (result,) = tune(meter, configs=RANKED[:2])
    assert result.seconds[RANKED[0]] == statistics.median([1.01e-3, 9e-3, 1.02e-3, 1.03e-3])


def test_no_more_than_a_few_are_measured_again(tune):
    meter = Meter()
    tune(meter, exhaustive=True)
    assert len(meter.calls) == len(RANKED) + tuner.FINALISTS * tuner.TURNS


# ---------------------------------------------------------------------------------------------------------------------
# Time, progress, trouble


class Clock:
    """A clock that a measurement takes forward by `step` seconds."""

    def __init__(self, step):
        self.now, self.step = 100.0, step

    def __call__(self):
        return self.now

    def tick(self, number):
        self.now += self.step


def test_no_measurement_begins_after_its_time(tune):
    clock = Clock(10)
    (result,) = tune(Meter(apart(), after=clock.tick), exhaustive=True, seconds=35, clock=clock)
    assert result.measured == 4
    assert result.unmeasured == RANKED[4:]
    assert result.failure == "the time was over"
    assert f"{len(RANKED) - 4} not measured" in str(result)
    (rest,) = tune(Meter(apart()), exhaustive=True)
    assert rest.measured == len(RANKED) - 4


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_a_time_that_is_none(tune, seconds):
    with pytest.raises(ValueError, match="seconds is"):
        tune(Meter(), seconds=seconds)


def test_progress_and_the_time_left(tune):
    clock, seen = Clock(2), []
    other = make(64, 4096, 4096, device="NVIDIA H200", dtype=torch.bfloat16)
    tune(Meter(apart() | {RANKED[1]: "no"}, after=clock.tick), [P, other], clock=clock, progress=seen.append)
    total = seen[0].total
    assert [one.done for one in seen] == list(range(1, total + 1))
    assert {one.number: one.problem for one in seen} == {1: P, 2: other}
    assert {one.problems for one in seen} == {2}
    assert (seen[0].config, seen[0].seconds) == (RANKED[0], apart()[RANKED[0]])
    assert (seen[1].config, seen[1].seconds) == (RANKED[1], None)
    assert seen[0].left == 2 * (total - 1)
    assert seen[-1].left == 0


def test_a_problem_that_does_not_fit_into_memory_does_not_end_the_run(tune):
    other = make(64, 4096, 4096, device="NVIDIA H200", dtype=torch.bfloat16)

    def full(number):
        if number == 0:
            meter.calls.append((P, None))
            raise torch.OutOfMemoryError("CUDA out of memory")

    meter = Meter(after=full)
    first, second = tune(meter, [P, other])
    assert "memory" in first.failure
    assert first.measured == 0
    assert first.best is None
    assert first.gain is None
    assert second.best is not None


def test_a_compiler_that_died_costs_its_config_alone_and_is_asked_again(tune, monkeypatch):
    @contextlib.contextmanager
    def compiling(tasks, count):
        yield lambda problem, config: "it died" if config == RANKED[1] else None

    with monkeypatch.context() as patch:
        patch.setattr(tuner, "_compiling", compiling)
        meter = Meter(apart())
        (result,) = tune(meter, exhaustive=True)
    assert result.refused == {RANKED[1]: "it died"}
    assert RANKED[1] not in meter.first
    again = Meter(apart())
    tune(again, exhaustive=True)
    assert again.first == [RANKED[1]]


def test_few_kernels_and_interpreted_ones_need_no_workers(monkeypatch):
    monkeypatch.setattr(tuner, "Workers", None)  # would fail
    task = tuner._Task(P, RANKED[0], RANKED[: WORTH_WORKERS - 1])
    with tuner._compiling([task], None) as deaths:
        assert deaths(P, RANKED[0]) is None
    task = tuner._Task(P, RANKED[0], RANKED)
    with tuner._compiling([task], 0) as deaths:
        assert deaths(P, RANKED[0]) is None


def test_the_result_as_text_and_as_json(tune):
    (result,) = tune(Meter(apart()), exhaustive=True)
    text = str(result)
    assert str(P) in text
    assert "NVIDIA H200" in text
    (line,) = [line for line in text.splitlines() if "untuned" in line]
    assert str(RANKED[0]) in line
    values = json.loads(json.dumps(result.asdict()))
    assert keys.from_dict(values["problem"], P.device) == P
    assert values["best"] == str(RANKED[-1])
    assert values["gain"] == result.gain
    assert {Config.of(text): seconds for text, seconds in values["seconds"].items()} == apart()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_there_is_nothing_to_measure():
    with pytest.raises(ValueError, match="nothing to measure"):
        gemmery.tune(torch.ones(4, 8), torch.ones(8, 4))
    with pytest.raises(ValueError, match="no GPU"):
        tune_problems([P])
