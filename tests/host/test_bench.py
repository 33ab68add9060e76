"""The measuring code, on a simulated GPU: a queue with its own clock beside the host's."""

import io
import json
import math
import random
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import readme_tables, run
from gemmery.lab import bench, suites, timing
from gemmery.lab.suites import Row

HZ = 1.98e9


class FakeEvent:
    def __init__(self, gpu):
        self.gpu, self.at = gpu, None

    def record(self):
        self.at = max(self.gpu.host, self.gpu.free)

    def query(self):
        return self.gpu.host >= self.at

    def synchronize(self):
        self.gpu.host = max(self.gpu.host, self.at)

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


class FakeGraph:
    def __init__(self, gpu):
        self.gpu, self.work = gpu, []

    def replay(self):
        self.gpu.launch("replay", sum(seconds for _, seconds in self.work), host=10e-6)


class FakeGpu:
    """Stands for torch.cuda: `host` is the host's time, `free` the time at which the GPU's queue is empty."""

    def __init__(self):
        self.host = self.free = 0.0
        self.trace = []
        self.capture = None

    def launch(self, name, seconds, host=5e-6):
        self.host += host
        self.trace.append(name)
        if self.capture is None:
            self.free = max(self.host, self.free) + seconds
        else:
            self.capture.work.append((name, seconds))

    def kernel(self, name, seconds, host=5e-6):
        return lambda: self.launch(name, seconds() if callable(seconds) else seconds, host)

    def _sleep(self, cycles):
        self.launch("sleep", cycles / HZ)

    def flush(self):
        self.launch("flush", 60e-6)

    def clock(self):
        return self.host

    def Event(self, enable_timing):
        assert enable_timing
        return FakeEvent(self)

    def CUDAGraph(self):
        return FakeGraph(self)

    @contextmanager
    def graph(self, recorded):
        self.capture = recorded
        yield
        self.capture = None

    def synchronize(self):
        self.host = max(self.host, self.free)


@pytest.fixture
def gpu():
    return FakeGpu()


@pytest.fixture
def watch(gpu):
    return timing.Stopwatch(cuda=gpu, clock=gpu.clock, flush=gpu.flush)


# --- timing ---------------------------------------------------------------------------------------------------------


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


def test_cold_refuses_a_call_that_synchronises(gpu, watch):
    def call():
        gpu.launch("k", 40e-6)
        gpu.synchronize()

    with pytest.raises(RuntimeError, match="does it synchronise"):
        watch.cold(call, 1)


def test_burst_is_the_median_of_the_launches(gpu, watch):
    times = iter([9e-6, 1e-6, 2e-6, 3e-6, 4e-6, 5e-6, 100e-6])
    assert timing._burst(watch, gpu.kernel("k", lambda: next(times)), 7) == pytest.approx(4e-6)


def test_slow_calls_get_fewer_burst_launches():
    assert timing.burst_launches(20e-6) == timing.BURST_MOST
    assert timing.burst_launches(12e-3) == 4
    assert timing.burst_launches(1.0) == timing.BURST_FEWEST


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
    figure = timing._steady(watch, gpu.kernel("k", 100e-6), 100e-6, 1)
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


def test_expected_seconds_is_about_right(gpu, watch):
    for seconds in (50e-6, 12e-3):
        begun = gpu.clock()
        timing.compare({"a": gpu.kernel("a", seconds), "b": gpu.kernel("b", seconds)}, rounds=3, watch=watch)
        assert gpu.clock() - begun == pytest.approx(
            timing.expected_seconds(2, rounds=3, seconds=seconds), rel=0.15
        )


def test_host_time_has_no_gpu_time_in_it(gpu, watch):
    assert timing.host_time(gpu.kernel("k", 3e-6, host=8e-6), watch=watch) == pytest.approx(8e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": {}}, "no method"),
        ({"methods": {"a": print}, "rounds": 0}, "0 rounds"),
        ({"methods": {"a": print}, "regimes": ["bust"]}, "regimes bust given; there are burst, steady"),
    ],
)
def test_compare_says_what_is_wrong(watch, arguments, message):
    with pytest.raises(ValueError, match=message):
        timing.compare(watch=watch, **arguments)


def test_ratio_is_taken_within_rounds():
    rounds = [{"us": 1.0, "peer": 2.0}, {"us": 2.0, "peer": 2.0}, {"peer": 9.0, "us": 3.0}]
    assert timing.ratio(rounds, "peer", "us") == timing.Ratio(median=2.0, min=1.0, max=3.0)


def test_geometric_mean():
    assert timing.geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)
    for wrong in ([], [1.0, 0.0]):
        with pytest.raises(ValueError, match="positive"):
            timing.geometric_mean(wrong)


# --- suites ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", suites.names())
def test_suites_are_valid(name):
    assert 1 <= len(suites.load(name)) <= suites.MOST_ROWS


def test_the_suites_of_the_protocol_are_there():
    assert {"square", "llm", "llm_large", "decode", "odd", "layouts"} <= set(suites.names())
    assert {row.M for row in suites.load("llm")} == {512, 1024, 2048, 4096, 8192}
    assert all(1 <= row.M <= 256 for row in suites.load("decode"))
    orders = {(row.a, row.b, row.M) for row in suites.load("layouts")}
    assert {(a, b, n) for a in ("row", "col") for b in ("row", "col") for n in (4096, 8192)} <= orders


#: hidden size, feed-forward size, heads, key-value heads, head size.
MODELS = {
    "Llama-3-8B": (4096, 14336, 32, 8, 128),
    "Llama-3-70B": (8192, 28672, 64, 8, 128),
    "Qwen3-8B": (4096, 12288, 32, 8, 128),
    "Qwen3-32B": (5120, 25600, 64, 8, 128),
}


def projections(model):
    """(N, K) of each projection, from the model's configuration."""
    if model == "DeepSeek-V3":
        hidden, dense, expert, heads, q_rank, kv_rank, nope, rope, v = (
            7168,
            18432,
            2048,
            128,
            1536,
            512,
            128,
            64,
            128,
        )
        return {
            "qkv_a": (q_rank + kv_rank + rope, hidden),
            "q_b": (heads * (nope + rope), q_rank),
            "kv_b": (heads * (nope + v), kv_rank),
            "o": (hidden, heads * v),
            "gate_up": (2 * dense, hidden),
            "down": (hidden, dense),
            "shared_gate_up": (2 * expert, hidden),
            "shared_down": (hidden, expert),
        }
    hidden, inner, heads, kv_heads, size = MODELS[model]
    return {
        "qkv": ((heads + 2 * kv_heads) * size, hidden),
        "o": (hidden, heads * size),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


@pytest.mark.parametrize("name", ["llm", "decode"])
def test_projections_are_those_of_the_models(name):
    models = set()
    for row in suites.load(name):
        model, projection, m = row.name.split(" ")
        assert projections(model)[projection] == (row.N, row.K), row.name
        assert m == f"M={row.M}"
        models.add(model)
    assert models == {*MODELS, "DeepSeek-V3"}


def test_llm_large_is_the_large_part_of_llm():
    large, whole = suites.load("llm_large"), suites.load("llm")
    assert large == [
        row for row in whole if row.M >= 1024 and math.ceil(row.M / 128) * math.ceil(row.N / 256) >= 132
    ]
    assert 0 < len(large) < len(whole)


GOOD = {"name": "x", "M": 1, "N": 2, "K": 3}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (7, r"^s.json, row 2: 7 given"),
        ({"name": "y", "M": 1, "N": 2}, r"^s.json, row 2: without K"),
        (GOOD | {"name": "y", "k": 3}, r"^s.json, row 2: unknown k"),
        (GOOD | {"name": ""}, r"^s.json, row 2: name is ''"),
        (GOOD, r"^s.json, row 2: there is already a row named 'x'"),
        (GOOD | {"name": "y", "M": 0}, r"^s.json, row 2 \(y\): M is 0"),
        (GOOD | {"name": "y", "M": True}, r"^s.json, row 2 \(y\): M is True"),
        (GOOD | {"name": "y", "K": 3.0}, r"^s.json, row 2 \(y\): K is 3.0"),
        (GOOD | {"name": "y", "batch": 4}, r"^s.json, row 2 \(y\): batch is 4"),
        (GOOD | {"name": "y", "a": "T"}, r"^s.json, row 2 \(y\): a is 'T'"),
        (GOOD | {"name": "y", "dtype": "half"}, r"^s.json, row 2 \(y\): dtype is 'half'"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, row, message):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"about": "", "rows": [GOOD, row]}))
    with pytest.raises(ValueError, match=message):
        suites.read(path)


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": []}', '{"about": "", "rows": []}'])
def test_a_wrong_file_is_named(tmp_path, text):
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^s\.json"):
        suites.read(path)


def test_too_many_rows_are_refused(tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"about": "", "rows": [GOOD | {"name": str(i)} for i in range(25)]}))
    with pytest.raises(ValueError, match="25 rows; there must be 1 to 24"):
        suites.read(path)


def test_an_unknown_suite_is_refused():
    with pytest.raises(ValueError, match="no suite 'squares'; there are decode"):
        suites.load("squares")


def test_spread_keeps_the_ends():
    rows = suites.load("llm")
    some = suites.spread(rows, 8)
    assert len({row.name for row in some}) == 8
    assert (some[0], some[-1]) == (rows[0], rows[-1])
    assert suites.spread(rows, 99) == rows
    assert suites.spread(rows, 1) == rows[:1]
    assert suites.spread(rows, 0) == []


def test_suites_need_neither_torch_nor_triton():
    code = (
        "import importlib.util, sys\n"
        "sys.modules['torch'] = sys.modules['triton'] = None\n"
        f"spec = importlib.util.spec_from_file_location('suites', {suites.__file__!r})\n"
        "module = sys.modules['suites'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(len(module.load('square')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(suites.load("square"))


# --- inputs and check -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "strides"),
    [
        ("row", (48, 1)), ("col", (1, 32)), ("row+pad", (112, 1)), ("col+pad", (1, 96)),
        ("row+odd", (49, 1)), ("col+odd", (1, 33)), ("row+step", (96, 2)), ("col+step", (2, 64)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("batch", [(), (3,)])
def test_make_matrix(layout, strides, batch):
    matrix = bench.make_matrix(batch, 32, 48, layout, torch.float32, torch.Generator().manual_seed(0))
    assert matrix.shape == (*batch, 32, 48)
    assert matrix.stride()[-2:] == strides
    assert matrix.storage_offset() == (1 if layout.endswith("odd") else 0)
    assert 0.8 < matrix.std() < 1.2


def test_inputs_depend_on_seed_and_row_alone():
    row = Row("r", 8, 16, 24)
    first, same, other = (bench.make_inputs(row, "fp32", seed, "cpu") for seed in (1, 1, 2))
    assert torch.equal(first.a, same.a)
    assert torch.equal(first.b, same.b)
    assert not torch.equal(first.a, other.a)
    assert not torch.equal(first.a, bench.make_inputs(Row("s", 8, 16, 24), "fp32", 1, "cpu").a)


def test_sample_rows_leaves_no_tile_out():
    assert bench.sample_rows(100, random.Random(0)) == list(range(100))
    for m in (513, 4097, 16384):
        rows = bench.sample_rows(m, random.Random(0))
        assert len(set(rows)) == bench.CHECKED_ROWS
        assert {row // 64 for row in rows} == set(range(math.ceil(m / 64)))


@pytest.fixture
def inputs():
    return bench.make_inputs(Row("r", 40, 30, 50, batch=(2,), a="col+odd"), "fp32", 5, "cpu")


def test_check_passes_what_is_right(inputs, monkeypatch):
    monkeypatch.setattr(bench, "CHECKED_COLUMNS", 7)  # so that the columns take several steps
    assert 0 < bench.check(bench.torch_matmul(inputs), inputs, range(40), 1e-5) < 1e-6


def test_relative_error_is_over_all_columns(inputs, monkeypatch):
    torch.matmul(inputs.a, inputs.b, out=inputs.out)
    inputs.out.mul_(1.25)
    for columns in (7, 8192):
        monkeypatch.setattr(bench, "CHECKED_COLUMNS", columns)
        assert bench.relative_error(inputs, [3, 17]) == pytest.approx(0.25, rel=1e-5)


def test_check_finds_an_element_that_was_not_written(inputs):
    def call():
        whole = inputs.a @ inputs.b
        whole[1, 39, 29] = inputs.out[1, 39, 29]  # what was there before
        inputs.out.copy_(whole)

    with pytest.raises(bench.WrongResult, match=r"^1 of 2400 elements"):
        bench.check(call, inputs, [0, 1], 1e-5)


def test_check_finds_a_wrong_row(inputs):
    def call():
        torch.matmul(inputs.a, inputs.b, out=inputs.out)
        inputs.out[0, 7] += 1

    with pytest.raises(bench.WrongResult, match="relative error"):
        bench.check(call, inputs, range(40), 1e-5)


def test_tf32_is_allowed_inside_only():
    before = torch.backends.cuda.matmul.allow_tf32

    def leave_early():
        with bench.tf32_allowed(not before):
            raise KeyError(torch.backends.cuda.matmul.allow_tf32)

    with pytest.raises(KeyError, match=str(not before)):
        leave_early()
    assert torch.backends.cuda.matmul.allow_tf32 is before


# --- a whole suite --------------------------------------------------------------------------------------------------

ROWS = [
    Row("small", 16, 24, 32),
    Row("batched", 8, 8, 8, batch=(2,), b="row"),
    Row("odd", 7, 5, 3, a="col+odd"),
]


def on(gpu, method, name, seconds):
    """A method that computes on the CPU and takes its time on the simulated GPU."""

    def make(inputs):
        call = method(inputs)

        def timed():
            # Results do not change after the check; thousands of timed calls need not compute them again.
            if torch.isnan(inputs.out).any():
                call()
            gpu.launch(name, seconds)

        return timed

    return make


def suite(gpu, watch, **options):
    settings = {
        "dtype": "fp32", "rounds": 2, "rows": ROWS, "seed": 11, "watch": watch, "device": "cpu",
        "ours": on(gpu, bench.gemmery_matmul, "gemmery", 200e-6),
        "peers": {"torch": on(gpu, bench.torch_matmul, "torch", 150e-6)},
        "console": Console(file=io.StringIO(), width=200),
    }  # fmt: skip
    return bench.run_suite("tiny", **(settings | options))


def test_run_suite(gpu, watch, tmp_path, monkeypatch):
    monkeypatch.setenv("GEMMERY_COMMIT", "abc1234")
    path = tmp_path / "results" / "tiny-fp32.json"
    console = Console(file=io.StringIO(), width=200)
    result = suite(gpu, watch, path=path, steady_rows=2, console=console)
    assert result.failed == []
    data = json.loads(path.read_text())
    assert (data["suite"], data["dtype"], data["seed"], data["commit"]) == ("tiny", "fp32", 11, "abc1234")
    assert data["torch"] == torch.__version__
    assert data["protocol"]["rounds"] == 2
    assert set(data["host_us"]) == {"gemmery", "torch"}
    small, batched, odd = data["rows"]
    assert [row["name"] for row in data["rows"]] == ["small", "batched", "odd"]
    assert "steady" in small["rounds"]
    assert "steady" not in batched["rounds"]
    assert "steady" in odd["rounds"]
    for row in data["rows"]:
        assert 0 < row["errors"]["gemmery"] < 1e-6
        assert row["plan"] == "torch reference"
        assert len(row["rounds"]["burst"]) == 2
        assert row["summary"]["burst"]["ratio"]["torch"]["median"] == pytest.approx(0.75, rel=0.01)
    assert small["summary"]["burst"]["us"]["gemmery"] == pytest.approx(200, rel=0.01)
    assert small["summary"]["burst"]["tflops"]["torch"] == pytest.approx(
        2 * 16 * 24 * 32 / 150e-6 / 1e12, rel=0.01
    )
    assert data["summary"]["burst"]["torch"]["geomean"] == pytest.approx(0.75, rel=0.01)
    assert (data["summary"]["burst"]["torch"]["rows"], data["summary"]["steady"]["torch"]["rows"]) == (3, 2)
    shown = console.file.getvalue()
    for text in ("small", "2×8×8×8", "200.0", "0.750", "geometric mean"):
        assert text in shown


def test_a_failing_row_is_kept_and_the_others_run(gpu, watch, tmp_path, capsys):
    def broken(inputs):
        def call():
            torch.matmul(inputs.a, inputs.b, out=inputs.out)
            if inputs.a.dim() == 3:
                inputs.out[0, 0, 0] = math.nan

        return call

    path = tmp_path / "r.json"
    peers = {"torch": on(gpu, broken, "torch", 150e-6)}
    result = suite(gpu, watch, path=path, regimes=["burst"], peers=peers)
    assert result.failed == ["batched"]
    assert "WrongResult" in capsys.readouterr().err
    rows = json.loads(path.read_text())["rows"]
    assert rows[1]["error"] == "WrongResult: torch: 1 of 128 elements were not written or are not finite"
    assert "rounds" not in rows[1]
    assert ["rounds" in row for row in rows] == [True, False, True]


def test_steady_alone_runs_its_rows_alone(gpu, watch):
    result = suite(gpu, watch, regimes=["steady"], steady_rows=1, rounds=1)
    assert [row["name"] for row in result.rows] == ["small"]


def test_seeds_are_new_each_run(gpu, watch):
    runs = [suite(gpu, watch, rows=ROWS[:1], regimes=["burst"], rounds=1, seed=None) for _ in range(2)]
    assert runs[0].header["seed"] != runs[1].header["seed"]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dtype": "half"}, "dtype is 'half'"), ({"rows": []}, "no row"), ({"regimes": ["b"]}, "regimes b")],
)
def test_run_suite_says_what_is_wrong(gpu, watch, options, message):
    with pytest.raises(ValueError, match=message):
        suite(gpu, watch, **options)


def test_a_terminal_gets_a_live_table(gpu, watch):
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    suite(gpu, watch, regimes=["burst"], console=console)
    assert "batched" in console.file.getvalue()


def git(folder, *words):
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false", *words],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip


def test_commit(tmp_path, monkeypatch):
    monkeypatch.delenv("GEMMERY_COMMIT", raising=False)
    source = tmp_path / "src" / "gemmery" / "lab" / "bench.py"
    source.parent.mkdir(parents=True)
    source.write_text("1")
    monkeypatch.setattr(bench, "__file__", str(source))
    assert bench.commit() == "unknown"
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "x")
    clean = bench.commit()
    assert clean != "unknown"
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "r.json").write_text("{}")
    assert bench.commit() == clean
    source.write_text("2")
    assert bench.commit() == f"{clean}-dirty"
    # A copy installed inside another repository is not of its commit.
    inside = tmp_path / "venv" / "lib" / "python" / "gemmery" / "lab" / "bench.py"
    monkeypatch.setattr(bench, "__file__", str(inside))
    inside.parent.mkdir(parents=True)
    assert bench.commit() == "unknown"
    monkeypatch.setenv("GEMMERY_COMMIT", "abc")
    assert bench.commit() == "abc"


# --- the scripts ----------------------------------------------------------------------------------------------------


def test_run_lists_the_rows_that_the_options_leave(capsys):
    options = ["--suite", "llm", "--rows", "Llama-3-70B", "--min-m", "1024", "--min-tiles", "300", "--list"]
    assert run.main(options) == 0
    shown = capsys.readouterr().out
    wanted = [
        row.name
        for row in suites.load("llm")
        if "Llama-3-70B" in row.name and row.M >= 1024 and row.tiles() >= 300
    ]
    assert shown.count("Llama-3-70B") == len(wanted) > 0
    assert all(name in shown for name in wanted)


def test_run_expects_more_time_for_more_steady_rows():
    few, every = (
        run.parser().parse_args(["--suite", "llm", "--steady-rows", number]) for number in ("8", "all")
    )
    rows = suites.load("llm")
    difference = run.expected(rows, every) - run.expected(rows, few)
    assert difference == pytest.approx(16 * 2 * 5 * 0.6, rel=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--suite", "square", "llm", "--json-name", "x.json", "--list"], "one file"),
        (["--suite", "square", "--rows", "nothing", "--list"], "no row of square is left"),
    ],
)
def test_run_refuses_what_makes_no_sense(capsys, options, message):
    assert run.main(options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--suite", "cube"], ["--suite", "llm", "--steady-rows", "some"], []])
def test_run_refuses_unknown_words(capsys, options):
    with pytest.raises(SystemExit) as stopped:
        run.main(options)
    assert stopped.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_run_without_a_gpu_measures_nothing(tmp_path, capsys):
    assert run.main(["--suite", "square", "--out", str(tmp_path)]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def results(gpu, watch, tmp_path, monkeypatch):
    """A folder with two results, one of which has a failed row, and a README with marks."""
    monkeypatch.setenv("GEMMERY_COMMIT", "abc1234")

    def failing(inputs):
        if inputs.a.dim() == 3:
            raise RuntimeError("no | kernel\nfits")
        return bench.gemmery_matmul(inputs)

    folder = tmp_path / "results"
    suite(gpu, watch, path=folder / "a.json", ours=on(gpu, failing, "gemmery", 200e-6), rounds=1)
    result = suite(gpu, watch, path=folder / "b.json", rounds=1, regimes=["burst"])
    result.suite = "square"
    result.save(folder / "b.json")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{readme_tables.BEGIN}\nold\n{readme_tables.END}\nafter\n")
    return ["--results", str(folder), "--readme", str(readme)], readme, folder


def test_readme_tables(results):
    options, readme, _ = results
    assert readme_tables.main([*options, "--check"]) == 1
    assert "old" in readme.read_text()
    assert readme_tables.main(options) == 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert readme_tables.main([*options, "--check"]) == 0
    assert readme_tables.main(options) == 0
    assert readme.read_text() == text


def test_readme_tables_show_every_row(results):
    options, readme, _ = results
    assert readme_tables.main(options) == 0
    square, tiny = readme.read_text().split("### ")[1:]
    assert square.startswith("square, fp32")
    lines = [line for line in tiny.splitlines() if line.startswith("|")]
    assert lines[0] == (
        "| row | M×N×K | gemmery µs (burst) | torch µs (burst) | torch / gemmery, burst | torch / gemmery, steady |"
    )
    small, batched, odd = lines[2:]
    # Slower than its peer, and in the table all the same.
    assert small == "| small | 16×24×32 | 200.0 | 150.0 | 0.750 (0.750–0.750) | 0.750 (0.750–0.750) |"
    assert batched == "| batched | 2×8×8×8 | failed: RuntimeError: no \\| kernel fits |  |  |  |"
    assert odd.startswith("| odd |")
    assert "Burst: geometric mean **0.750**, worst 0.750" in tiny
    assert ", 2 rows." in tiny
    assert f"torch {torch.__version__}" in tiny
    assert "commit abc1234" in tiny
    assert "steady" not in square


def test_readme_tables_notice_new_results(results):
    options, _, folder = results
    assert readme_tables.main(options) == 0
    data = json.loads((folder / "b.json").read_text())
    data["rows"][0]["summary"]["burst"]["us"]["gemmery"] = 123.4
    (folder / "b.json").write_text(json.dumps(data))
    assert readme_tables.main([*options, "--check"]) == 1


def test_readme_tables_need_marks_and_results(results, capsys):
    options, readme, folder = results
    (folder / "c.json").write_text('{"suite": "x"}')
    assert readme_tables.main(options) == 2
    assert "c.json is no benchmark result" in capsys.readouterr().err
    (folder / "c.json").unlink()
    readme.write_text("no marks")
    assert readme_tables.main(options) == 2
    assert readme.read_text() == "no marks"


def test_readme_without_results(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"{readme_tables.BEGIN}{readme_tables.END}")
    assert readme_tables.main(["--results", str(tmp_path / "none"), "--readme", str(readme)]) == 0
    assert "No results yet" in readme.read_text()
    assert Path(readme_tables.ROOT / "benchmarks" / "readme_tables.py").exists()
