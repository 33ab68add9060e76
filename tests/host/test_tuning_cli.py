"""The commands explain, tune, warmup and store, in this process where nothing else tells."""

import json
import re
import time

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from gemmery import Config, cli, devices
from gemmery.lab import suites, tuning
from gemmery.launch.padding import launched
from gemmery.select import candidates, keys, log, rank, store
from gemmery.tuning import tuner
from gemmery.tuning.tuner import TuneResult
from tests.host.test_tuner import Meter
from tests.problems import make

H200 = devices.TABLE["NVIDIA H200"]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("GEMMERY_STORE", "1")
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path / "cache"))
    return store.current()


def run(*words):
    """A command's exit status and all that it printed, without its frames and line ends."""
    result = CliRunner().invoke(
        cli.app, [str(word) for word in words], env={"COLUMNS": "200", "TERM": "dumb"}
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, re.sub(r"[│╭╰─╮╯\s]+", " ", result.output)


# ---------------------------------------------------------------------------------------------------------------------
# explain


def test_explain(tmp_path):
    begun = time.perf_counter()
    status, said = run(
        "explain", 4096, 4096, 4096, "--device", "H200", "--top", 2, "--json", tmp_path / "e.json"
    )
    assert time.perf_counter() - begun < 5
    assert status == 0
    p = make(4096, 4096, 4096, device="NVIDIA H200", dtype=torch.bfloat16)
    best = rank(p)[0][0]
    assert str(p) in said
    assert str(best) in said
    values = json.loads((tmp_path / "e.json").read_text())
    assert values["choices"][0]["config"] == str(best)
    assert len(values["choices"]) == 2


@pytest.mark.parametrize(
    "name, short", [("bfloat16", "bf16"), ("torch.float16", "fp16"), ("float32", "fp32")]
)
def test_types_may_be_called_as_torch_calls_them(name, short):
    assert tuning.kind_named(name) == tuning.kind_named(short)


@pytest.mark.parametrize("dtype", [*suites.DTYPES, "e4m3", "e5m2"])
def test_explain_takes_the_types_of_the_bench(dtype):
    status, said = run(
        "explain", 64, 64, 64, "--dtype", dtype, "--layout", "TN", "--batch", "3,5", "--device", "h100"
    )
    assert status == 0, said
    assert "15 of 64x64x64" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((64, 64), "Missing argument"),
        ((64, 64, "k"), "not a valid integer|valid integer"),
        ((0, 64, 64), "M is 0"),
        ((64, 64, 64, "--dtype", "fp4"), "dtype is 'fp4'; it must be one of bf16, .*e5m2"),
        ((64, 64, 64, "--layout", "XY"), "layout is 'XY'"),
        ((64, 64, 64, "--device", "abacus"), "device is 'abacus'"),
        ((64, 64, 64, "--epilogue", "bias_gelu", "--bias"), "bias_gelu adds a bias already"),
        ((64, 64, 64, "--top", "0"), "top"),
        ((64, 64, 64, "--json", "/nowhere/file"), "there is no directory"),
    ],
    ids=str,
)
def test_explain_names_what_is_wrong(words, message):
    status, said = run("explain", *words)
    assert status == 2
    assert re.search(message, said), said


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("--weight", "int4", "--group-size", "64"), "@ int4/64 -> bf16[row]"),
        (("--weight", "e4m3", "--epilogue", "swiglu"), "@ e4m3 -> bf16[row] +fused"),
        (("--dtype", "e4m3", "--scales", "block"), "scaled along K on NVIDIA H200"),
    ],
)
def test_explain_knows_packed_weights_and_epilogues(words, shown, kept, tmp_path):
    kept.record(make(device="NVIDIA H200"), Config(64, 64, 64), 1e-5)
    file = tmp_path / "explained.json"
    status, said = run("explain", 64, 1024, 4096, "--device", "H200", "--top", 2, "--json", file, *words)
    assert status == 0
    assert shown in said
    assert json.loads(file.read_text())["problem"] in said
    assert len(set(re.findall(r"\d+x\d+x\d+-g\S+", said))) == 2


# ---------------------------------------------------------------------------------------------------------------------
# tune


@no_gpu
@pytest.mark.parametrize("source", [("--suite", "square"), ("--shapes", "64x64x64"), ("--from-log", "LOG")])
def test_tune_without_a_gpu_says_so(source, tmp_path, kept):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"problem": keys.to_dict(make())}))
    status, said = run("tune", *[str(path) if word == "LOG" else word for word in source])
    assert status == 2
    assert "No GPU here, so there is nothing to measure" in said
    assert not kept.path.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give suites, shapes or a log"),
        (("--suite", "nonsense"), "there is no suite 'nonsense'"),
        (("--shapes", "64x64"), "it must be MxNxK"),
        (("--shapes", "64x64x64", "--dtype", "fp4"), "dtype is 'fp4'"),
        (("--shapes", "64x64x64", "--seconds", "-1"), "seconds"),
        (("--from-log", "/nowhere/log"), "does not exist"),
    ],
    ids=str,
)
def test_tune_names_what_is_wrong(words, message):
    status, said = run("tune", *words)
    assert status == 2
    assert re.search(message, said), said


def test_a_log_that_is_none_is_an_error(tmp_path):
    (tmp_path / "log").write_text("{}\n")
    status, said = run("tune", "--from-log", tmp_path / "log")
    assert status == 2
    assert "line 1" in said


def test_the_problems_that_are_asked_for(tmp_path, monkeypatch):
    noted = make(7, 8, 9, batch=(2,), device="NVIDIA H200")
    monkeypatch.setenv("GEMMERY_LOG", str(tmp_path / "log"))
    for _ in range(2):
        log.note(noted)
    request = tuning.Request(
        shapes=["64x96×128", "5x64x96x128", "64x96x128"], log=tmp_path / "log", dtypes=["fp16", "tf32"], layout="NN",
        bias=True,
    )  # fmt: skip
    kinds = [{"dtype": torch.float16}, {"dtype": torch.float32, "precision": "tf32"}]
    shapes = [
        make(64, 96, 128, device="NVIDIA H200", layout="NN", bias=True, batch=batch, **kind)
        for batch in ((), (5,))
        for kind in kinds
    ]
    assert request.problems(H200) == [*shapes, noted]


@pytest.mark.parametrize("name", suites.RANDOM)
def test_nothing_is_tuned_on_random_products(name):
    with pytest.raises(ValueError, match=f"suite {name}: it can't be tuned"):
        tuning.Request(suites=["square", name]).problems(H200)


@pytest.mark.parametrize("name", sorted(set(suites.names()) - set(suites.RANDOM)))
def test_every_row_of_every_suite_is_a_problem(name):
    """As the bench meets it: the same problem as of its own tensors, which are made without memory here."""
    problems = tuning.Request(suites=[name]).problems(H200)
    assert problems
    rows = {(row.M * row.matrices, row.N, row.K) for row in suites.load(name)}
    assert {(p.M * p.matrices, p.N, p.K) for p in problems} == rows


def test_a_misaligned_row_is_misaligned():
    (row,) = [row for row in suites.load("strided") if row.a.endswith("+odd")][:1]
    p = tuning.problem_of_row(row, tuning.kind_named("bf16"), H200)
    assert not p.a.aligned
    assert p.b.aligned


@pytest.fixture
def gpu(monkeypatch):
    """A command line that believes in a GPU, with a meter that pretends; gives the meter's place."""
    monkeypatch.setattr(tuning, "gpu_here", lambda: H200)
    monkeypatch.setattr(tuner, "WORTH_WORKERS", 10**9)

    def pretend(meter):
        monkeypatch.setattr(tuner, "Meter", lambda watch: meter)
        return meter

    return pretend


def test_tune_prints_a_line_a_problem_and_keeps_all(gpu, tmp_path, kept):
    p, q = (make(m, 4096, 4096, device="NVIDIA H200", dtype=torch.bfloat16) for m in (4096, 512))
    quick = rank(p)[1][0]
    gpu(Meter({quick: 0.5e-3}))
    words = ("tune", "--shapes", "4096x4096x4096,512x4096x4096", "--json", tmp_path / "t.json")
    status, said = run(*words)
    assert status == 0, said
    assert f"{p}; {quick} 500.0 µs; 2.000 times as fast as untuned" in said
    assert str(q) in said
    assert "2 problems, untuned / tuned time: geometric mean" in said
    assert str(kept.path) in said
    assert candidates(p)[0] == quick
    first, second = json.loads((tmp_path / "t.json").read_text())
    assert first["best"] == str(quick)
    assert keys.from_dict(second["problem"], H200) == q
    again = gpu(Meter())
    status, said = run(*words)
    assert again.calls == []
    assert f"0 of {len(kept.timings(p))} timings new" in said
    assert run(*words, "--again")[0] == 0
    assert again.calls


@pytest.mark.slow
def test_tune_interrupted(gpu, tmp_path, kept):
    def stop(number):
        if number == 2:
            raise KeyboardInterrupt

    meter = gpu(Meter(after=stop))
    words = ("tune", "--shapes", "4096x4096x4096", "--exhaustive", "--json", tmp_path / "t.json")
    status, said = run(*words)
    assert status == 130
    assert "Interrupted. Timings are kept in" in said
    assert "goes on from here" in said
    assert len(kept.timings(meter.calls[0][0])) == 2
    assert json.loads((tmp_path / "t.json").read_text()) == []
    rest = gpu(Meter())
    assert run(*words)[0] == 0
    assert not {config for _, config in meter.calls} & set(rest.first[: len(rest.first) // 2])


def test_a_terminal_shows_the_time_left(gpu):
    gpu(Meter())
    console = Console(force_terminal=True, width=200, file=open("/dev/null", "w"), record=True)  # noqa: SIM115
    p = make(512, 4096, 4096, device="NVIDIA H200")
    assert tuning.tune([p], console=console) == 0
    console.file.close()
    assert str(p) in console.export_text()
    shown = tuning._TuneDisplay(console, [])
    shown.progress(tuner.Progress(p, 1, 3, Config(64, 64, 64), 1e-3, 5, 20, 600.0))
    (task,) = shown.bar.tasks
    assert (task.completed, task.total, task.fields["left"]) == (5, 20, "10 min left")
    assert task.description == "1 of 3: 512x4096x4096"


def test_times_in_words():
    assert [tuning.duration(s) for s in (3.4, 89, 90, 3000, 9000)] == [
        "3 s",
        "89 s",
        "2 min",
        "50 min",
        "2.5 h",
    ]


def test_a_result_in_a_line():
    p, (one, two, *_) = make(), [config for config, _ in rank(make(device="NVIDIA H200"))]
    result = TuneResult(p, one)
    assert tuning.line(result) == f"{p}; nothing measured; 0 of 0 timings new"
    result = TuneResult(p, one, {one: 1e-3}, {two: "no"}, [two], 1, "the time was over")
    expected = f"{p}; {one} 1000.0 µs; as untuned; 1 of 1 timings new; 1 can't run; 1 not measured: the time was over"
    assert tuning.line(result) == expected


# ---------------------------------------------------------------------------------------------------------------------
# warmup

GOOD = [{"name": "qkv", "N": 96, "K": 64}, {"N": 32, "K": 96, "dtype": "fp16", "bias": True}]


def test_weights_of_a_file(tmp_path):
    path = tmp_path / "weights.json"
    path.write_text(json.dumps(GOOD))
    first, second = tuning.read_weights(path, "tf32")
    assert (first.name, first.N, first.K, first.dtype, first.precision) == (
        "qkv",
        96,
        64,
        torch.float32,
        "tf32",
    )
    assert (second.dtype, second.bias, second.precision) == (torch.float16, True, "ieee")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("{}", "must be a list of weights"),
        ("[]", "must be a list of weights"),
        ('[{"N": 1, "K": 1}, {"N": 1}]', "weight 2: a weight is an object with N, K"),
        ('[{"N": 1, "K": 1, "dtype": "fp4"}]', "weight 1: dtype is 'fp4'"),
    ],
    ids=str,
)
def test_a_file_of_weights_that_is_not_valid(text, message, tmp_path):
    path = tmp_path / "weights.json"
    path.write_text(text)
    status, said = run("warmup", "--model-shapes", path)
    assert status == 2
    assert message in said


@no_gpu
def test_warmup_without_a_gpu_says_so(tmp_path):
    path = tmp_path / "weights.json"
    path.write_text(json.dumps(GOOD))
    status, said = run("warmup", "--model-shapes", path)
    assert status == 2
    assert "No GPU here, so there is nothing to compile for" in said


# ---------------------------------------------------------------------------------------------------------------------
# store


def test_store_commands(tmp_path, kept, monkeypatch):
    status, said = run("store", "show")
    assert status == 0
    assert str(kept.path) in said
    assert "no timings" in said
    for m in (1, 2):
        kept.record(make(M=m, device="NVIDIA H200"), Config(64, 64, 64), m * 1e-3)
    with monkeypatch.context() as patch:
        patch.setattr(keys, "source", lambda: "0123456789abcdef")
        kept.record(make(M=3, device="NVIDIA H200"), Config(64, 64, 64), 1e-3)
    status, said = run("store", "show", "--json", tmp_path / "show.json")
    assert "NVIDIA H200 (132 SMs)" in said
    sets = json.loads((tmp_path / "show.json").read_text())["sets"]
    assert sorted((one["problems"], one["timings"], one["current"]) for one in sets) == [
        (1, 1, False),
        (2, 2, True),
    ]

    monkeypatch.setenv("GEMMERY_LOG", str(tmp_path / "log"))
    # Strides by which the product runs on copies, and the timings are those of the copies.
    log.note(make(M=2, device="NVIDIA H200"))
    slow = make(4096, 4096, 4096, device="NVIDIA H200", pad=1)
    kept.record(launched(slow), Config(64, 64, 64), 1e-3)
    assert launched(slow) != slow
    file = tmp_path / "timings.json"
    for words, count in (((), 3), (("--all",), 4), (("--from-log", tmp_path / "log"), 1)):
        status, said = run("store", "export", file, *words)
        assert (status, f"{count} timings written" in said) == (0, True), said
    log.note(slow)
    assert "2 timings written" in run("store", "export", file, "--from-log", tmp_path / "log")[1]

    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path / "elsewhere"))
    status, said = run("store", "import", file)
    assert status == 0
    assert "2 timings taken" in said
    assert store.current().best(make(M=2, device="NVIDIA H200")) == Config(64, 64, 64)


def test_store_commands_name_what_is_wrong(tmp_path, monkeypatch):
    (tmp_path / "bad.json").write_text("[]")
    assert run("store", "import", tmp_path / "bad.json")[0] == 2
    assert run("store", "import", tmp_path / "absent.json")[0] == 2
    assert run("store", "export", "/nowhere/timings.json")[0] == 2
    monkeypatch.setenv("GEMMERY_STORE", "0")
    assert "disabled by" in run("store", "export", tmp_path / "out.json")[1]
    assert "turns the store off" in run("store", "show")[1]
