"""The bench on a simulated GPU: inputs, the check of results, a whole suite, the command."""

import io
import json
import math
import os
import random
import subprocess

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from gemmery import cli
from gemmery.lab import bench, peers, suites, timing
from gemmery.lab import inputs as inputs_of
from gemmery.lab import results as results_of
from gemmery.lab.inputs import WrongResult, check, make_inputs, relative_error, sample_rows, tf32_allowed
from gemmery.lab.peers import cublas, gemmery_call
from gemmery.lab.prediction import recorded
from gemmery.lab.suites import Row
from tests.host.simulated import ROWS, on, suite

# --- inputs and check -----------------------------------------------------------------------------------------------


def test_inputs_depend_on_seed_and_row_alone():
    row = Row("r", 8, 16, 24)
    first, same, other = (make_inputs(row, "fp32", seed, "cpu") for seed in (1, 1, 2))
    assert torch.equal(first.a, same.a)
    assert torch.equal(first.b, same.b)
    assert not torch.equal(first.a, other.a)
    assert not torch.equal(first.a, make_inputs(Row("s", 8, 16, 24), "fp32", 1, "cpu").a)


def test_sample_rows_leaves_no_tile_out():
    assert sample_rows(100, random.Random(0)) == list(range(100))
    for m in (513, 4097, 16384):
        rows = sample_rows(m, random.Random(0))
        assert len(set(rows)) == inputs_of.CHECKED_ROWS
        assert {row // 64 for row in rows} == set(range(math.ceil(m / 64)))


@pytest.fixture
def inputs():
    return make_inputs(Row("r", 40, 30, 50, batch=(2,), a="col+odd"), "fp32", 5, "cpu")


def test_check_passes_what_is_right(inputs, monkeypatch):
    monkeypatch.setattr(inputs_of, "CHECKED_COLUMNS", 7)  # so that the columns take several steps
    assert 0 < check(cublas(inputs), inputs, range(40)) < 1e-6


def test_relative_error_is_over_all_columns(inputs, monkeypatch):
    torch.matmul(inputs.a, inputs.b, out=inputs.out)
    inputs.out.mul_(1.25)
    for columns in (7, 8192):
        monkeypatch.setattr(inputs_of, "CHECKED_COLUMNS", columns)
        assert relative_error(inputs, [3, 17]) == pytest.approx(0.25, rel=1e-5)


def test_check_finds_an_element_that_was_not_written(inputs):
    def call():
        whole = inputs.a @ inputs.b
        whole[1, 39, 29] = inputs.out[1, 39, 29]  # what was there before
        inputs.out.copy_(whole)

    with pytest.raises(WrongResult, match=r"^1 of 2400 elements"):
        check(call, inputs, [0, 1])


def test_check_finds_a_wrong_row(inputs):
    def call():
        torch.matmul(inputs.a, inputs.b, out=inputs.out)
        inputs.out[0, 7] += 1

    with pytest.raises(WrongResult, match="relative error"):
        check(call, inputs, range(40))


def test_tf32_is_allowed_inside_only():
    before = torch.backends.cuda.matmul.allow_tf32

    def leave_early():
        with tf32_allowed(not before):
            raise KeyError(torch.backends.cuda.matmul.allow_tf32)

    with pytest.raises(KeyError, match=str(not before)):
        leave_early()
    assert torch.backends.cuda.matmul.allow_tf32 is before


def test_check_takes_a_result_that_is_returned(inputs):
    assert check(lambda: inputs.a @ inputs.b, inputs, range(40)) < 1e-6


def test_check_refuses_an_output_that_was_laid_out_anew(inputs):
    def call():
        inputs.out.set_((inputs.a @ inputs.b).mT.contiguous().mT)

    with pytest.raises(WrongResult, match="has another layout, with strides"):
        check(call, inputs, range(40))


@pytest.mark.parametrize("kind", suites.DTYPES)
def test_every_type_is_checked(kind):
    made = make_inputs(Row("r", 32, 48, 64), kind, 1, "cpu")
    exact = (made.a.double() @ made.b.double()).to(made.kind.out)
    assert (made.a.dtype, made.out.dtype) == (made.kind.dtype, made.kind.out)
    assert check(lambda: exact, made, range(32)) <= made.kind.tolerance
    with pytest.raises(WrongResult, match="48 of 1536"):
        check(lambda: torch.cat([made.out[:1], exact[1:]]), made, range(32))
    with pytest.raises(WrongResult, match="relative error"):
        check(lambda: (exact.double() * 1.1).to(exact.dtype), made, range(32))


def test_int8_reaches_both_ends():
    a = make_inputs(Row("r", 64, 64, 64), "int8", 1, "cpu").a
    assert (a.min(), a.max()) == (-128, 127)


# --- a whole suite --------------------------------------------------------------------------------------------------


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
    assert data["tuned"] is False
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
    result = suite(
        gpu, watch, path=path, regimes=["burst"], peers={"torch": on(gpu, broken, "torch", 150e-6)}
    )
    assert result.failed == ["batched"]
    assert "WrongResult" in capsys.readouterr().err
    rows = json.loads(path.read_text())["rows"]
    assert rows[1]["error"] == "WrongResult: torch: 1 of 128 elements were not written or are not finite"
    assert "rounds" not in rows[1]
    assert ["rounds" in row for row in rows] == [True, False, True]


def test_a_peer_without_such_a_product_is_left_out_and_said_to_be(gpu, watch):
    def picky(inputs):
        if inputs.a.dim() == 3:
            raise peers.Unsuited("no batches")
        if inputs.row.name == "odd":
            raise RuntimeError("misaligned\naddress")
        return cublas(inputs)

    console = Console(file=io.StringIO(), width=250)
    two = {"torch": on(gpu, cublas, "torch", 150e-6), "picky": on(gpu, picky, "picky", 100e-6)}
    result = suite(gpu, watch, peers=two, regimes=["burst"], console=console)
    assert result.failed == []
    left = [row["left_out"] for row in result.rows]
    assert left == [{}, {"picky": "no batches"}, {"picky": "RuntimeError: misaligned address"}]
    assert [set(row["summary"]["burst"]["ratio"]) for row in result.rows] == [
        {"torch", "picky"},
        {"torch"},
        {"torch"},
    ]
    counted = results_of.summarise(result.rows)["burst"]
    assert (counted["torch"]["rows"], counted["picky"]["rows"]) == (3, 1)
    shown = console.file.getvalue()
    assert "picky left out of batched: no batches" in shown
    assert "picky left out of odd: RuntimeError: misaligned address" in shown
    assert "–" in next(line for line in shown.splitlines() if line.startswith("batched"))


def test_a_plan_gives_the_share_of_the_roofline(gpu, watch):
    class Fake:
        def roofline(self):
            return 50e-6

        def __str__(self):
            return "a plan"

    console = Console(file=io.StringIO(), width=250)
    result = suite(gpu, watch, regimes=["burst", "host"], planned=lambda inputs: Fake(), console=console)
    for row in result.rows:
        assert (row["plan"], row["roofline_us"]) == ("a plan", pytest.approx(50))
        assert row["summary"]["burst"]["roofline"] == pytest.approx(
            {"gemmery": 0.25, "torch": 1 / 3}, rel=0.01
        )
        # The host's time is not spent on the product.
        assert set(row["summary"]["host"]) == {"us", "spread_us", "median_us", "ratio"}
        assert row["summary"]["host"]["us"]["gemmery"] == pytest.approx(5, rel=0.01)
    assert "25%" in console.file.getvalue()


def test_parts_of_a_suite_have_their_summary(gpu, watch):
    console = Console(file=io.StringIO(), width=250)
    rows = [Row("few M=2", 2, 8, 8), Row("more M=65", 65, 8, 8)]
    bench.run_suite(
        "decode", dtype="fp32", rows=rows, regimes=["burst"], rounds=1, watch=watch, device="cpu", console=console,
        ours=on(gpu, gemmery_call, "gemmery", 1e-4), peers={"torch": on(gpu, cublas, "torch", 2e-4)},
    )  # fmt: skip
    shown = console.file.getvalue()
    for name, rows_of in (("decode", 2), ("decode_small", 1), ("decode_mid", 1)):
        assert f"{name}, torch, burst: geometric mean 2.000" in shown
        assert f"{rows_of} rows" in shown


def test_rows_with_types_of_their_own_need_no_other(gpu, watch):
    rows = [Row("a", 32, 16, 32, dtype="int8"), Row("b", 8, 8, 8, dtype="fp64")]
    result = suite(gpu, watch, rows=rows, dtype="mixed", regimes=["burst"], rounds=1)
    assert result.failed == []
    assert [row["dtype"] for row in result.rows] == ["int8", "fp64"]
    with pytest.raises(ValueError, match="dtype is 'mixed'"):
        suite(gpu, watch, rows=[*rows, Row("c", 8, 8, 8)], dtype="mixed")


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


# --- what stands for a row's rounds ---------------------------------------------------------------------------------

ROUNDS = [
    {"gemmery": 1.0, "cublas": 1.3, "compile": 1.0}, {"gemmery": 2.0, "cublas": 2.2, "compile": 1.0},
    {"gemmery": 3.0, "cublas": 2.7, "compile": 1.0},
]  # fmt: skip


def test_a_rows_times_are_of_the_round_with_the_median_ratio_to_the_first_peer():
    assert results_of.row_round(ROUNDS, ["cublas", "compile"]) == ROUNDS[1]
    assert results_of.row_round(ROUNDS, ["absent", "cublas"]) == ROUNDS[1]
    assert results_of.row_round(ROUNDS[:2], ["cublas"]) == ROUNDS[1]
    shuffled = [
        {"gemmery": x, "cublas": y} for x, y in ((5.0, 6.0), (1.0, 1.1), (2.0, 1.8), (9.0, 9.9), (3.0, 9.0))
    ]
    assert results_of.row_round(shuffled, ["cublas"])["gemmery"] in (1.0, 9.0)
    assert results_of.row_round(shuffled, []) == {"gemmery": 3.0, "cublas": 9.0}


def test_a_summary_has_that_rounds_times_their_spread_and_the_medians():
    found = results_of.summarise_row({"burst": ROUNDS}, 12, 1.0, ["cublas"])["burst"]
    assert found["us"] == pytest.approx({"gemmery": 2e6, "cublas": 2.2e6, "compile": 1e6})
    assert found["us"]["cublas"] / found["us"]["gemmery"] == pytest.approx(found["ratio"]["cublas"]["median"])
    assert found["spread_us"]["cublas"] == pytest.approx([1.3e6, 2.7e6])
    assert found["median_us"]["cublas"] == pytest.approx(2.2e6)
    assert found["roofline"]["gemmery"] == pytest.approx(0.5)
    assert found["tflops"]["gemmery"] == pytest.approx(6e-12)


@pytest.mark.parametrize(
    ("times", "groups"),
    [
        ([1.0, 1.1, 1.11, 1.0, 1.1], ([1.0, 1.0], [1.1, 1.1, 1.11])),
        ([1.0, 1.3, 1.01, 1.0, 1.02], None),  # one round alone is no group
        ([1.0, 1.01, 1.04, 1.05, 1.02], None),  # no gap of over 4 %
        ([1.0, 1.1, 1.0], None),  # too few rounds for two groups
    ],
)
def test_rounds_in_two_groups(times, groups):
    assert results_of.two_groups([{"gemmery": time, "cublas": 1.0} for time in times]) == groups


def test_what_was_written_by_an_earlier_rule_is_read_by_this_one(gpu, watch, tmp_path):
    path = tmp_path / "r.json"
    suite(gpu, watch, path=path, regimes=["burst"])
    data = json.loads(path.read_text())
    want = [row["summary"] for row in data["rows"]]
    for row in data["rows"]:
        row["summary"] = {"burst": {"us": {"gemmery": 1.0, "torch": 1.0}, "ratio": {}}}
    path.write_text(json.dumps(data))
    for row, summary in zip(results_of.read(path)["rows"], want, strict=True):
        assert row["summary"]["burst"] == summary["burst"] | {"us": pytest.approx(summary["burst"]["us"])}


def test_times_and_ratios_of_all_recorded_results_belong_together():
    """A peer's time over ours, as they are shown, is the ratio that is shown beside them."""
    files = sorted(recorded.folder().glob("*.json"))
    assert files
    for data in map(results_of.read, files):
        for row in data["rows"]:
            for regime, figures in row.get("summary", {}).items():
                first = next((peer for peer in data["peers"] if peer in figures["us"]), None)
                if first is None:
                    # torch refuses some shapes with scales of blocks.
                    assert set(row["left_out"]) == set(data["peers"]), (data["suite"], row["name"])
                    continue
                ratio = figures["us"][first] / figures["us"]["gemmery"]
                if len(row["rounds"][regime]) % 2:
                    assert ratio == pytest.approx(figures["ratio"][first]["median"]), (
                        data["suite"],
                        row["name"],
                    )


# --- what ran -------------------------------------------------------------------------------------------------------


def git(folder, *words):
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false", *words],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip


def test_commit(tmp_path, monkeypatch):
    monkeypatch.delenv("GEMMERY_COMMIT", raising=False)
    source = tmp_path / "src" / "gemmery" / "lab" / "results.py"
    source.parent.mkdir(parents=True)
    source.write_text("1")
    monkeypatch.setattr(results_of, "__file__", str(source))
    assert results_of.commit() == "unknown"
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "x")
    clean = results_of.commit()
    assert clean != "unknown"
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "r.json").write_text("{}")
    assert results_of.commit() == clean
    source.write_text("2")
    assert results_of.commit() == f"{clean}-dirty"
    # A copy installed inside another repository is not of its commit.
    inside = tmp_path / "venv" / "lib" / "python" / "gemmery" / "lab" / "results.py"
    monkeypatch.setattr(results_of, "__file__", str(inside))
    inside.parent.mkdir(parents=True)
    assert results_of.commit() == "unknown"
    monkeypatch.setenv("GEMMERY_COMMIT", "abc")
    assert results_of.commit() == "abc"


# --- the command ----------------------------------------------------------------------------------------------------


def command(*words):
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["bench", *words])


def test_list_shows_the_rows_that_the_options_leave():
    ran = command("--suite", "llm", "--rows", "Llama-3-70B.*M=1024", "--list")
    assert ran.exit_code == 0
    wanted = [row.name for row in suites.load("llm") if "Llama-3-70B" in row.name and row.M == 1024]
    assert ran.stdout.count("Llama-3-70B") == len(wanted) > 0
    assert all(name in ran.stdout for name in wanted)


def test_list_as_json(tmp_path):
    file = tmp_path / "rows.json"
    assert command("--suite", "llm", "--list", "--json", str(file)).exit_code == 0
    found = json.loads(file.read_text(encoding="utf-8"))["suites"]
    assert [suite["suite"] for suite in found] == ["llm"]
    assert [row["name"] for row in found[0]["rows"]] == [row.name for row in suites.load("llm")]
    assert all(suite["seconds"] > 0 for suite in found)


def test_results_go_to_files():
    ran = command("--suite", "llm", "--json", "-")
    assert ran.exit_code == 2
    assert "give a .json file" in ran.output


def test_shapes_of_the_user_are_rows_like_those_of_suites(gpu, watch, tmp_path):
    request = bench.Request(shapes=("96x64x128", "2x16x64x32"), dtypes=("bf16", "fp16"), json=tmp_path)
    one, two = bench.runs(request)
    assert [row.shape for row in one.rows] == ["96×64×128", "2×16×64×32"]
    assert (one.suite, one.path) == ("shapes", tmp_path / "shapes-bf16.json")
    assert (two.dtype, two.rows) == ("fp16", one.rows)
    both = bench.runs(bench.Request(suites=("square",), shapes=("8x8x8",)))
    assert [run.suite for run in both] == ["square", "shapes"]
    measured = suite(gpu, watch, rows=one.rows)
    assert [row["name"] for row in measured.rows] == ["96x64x128", "2x16x64x32"]
    assert measured.failed == []
    listed = command("--list", "--shapes", "96x64x128")
    assert listed.exit_code == 0
    assert "96×64×128" in listed.stdout
    assert "square" not in listed.stdout


def test_list_alone_shows_every_suite():
    ran = command("--list")
    assert ran.exit_code == 0
    assert all(f"{name}, " in ran.stdout for name in suites.whole())


@pytest.fixture
def asked(monkeypatch):
    """What the command would have run."""
    seen = []
    monkeypatch.setattr(bench, "bench", lambda request, planned: seen.append((request, planned)) or 0)
    return seen


def test_options_take_several_names(asked, tmp_path):
    ran = command(
        "--suite", "square,decode_mid", "--suite", "dtypes", "--dtype", "bf16,fp16", "--against", "cublas,seed",
        "--steady-rows", "all", "--rounds", "7", "--seed", "3", "--out", str(tmp_path / "new"),
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    ((request, planned),) = asked
    assert (list(request.against), request.rounds, request.seed, request.steady_rows) == (
        ["cublas", "seed"],
        7,
        3,
        None,
    )
    found = [(run.suite, run.dtype, run.path.name) for run in planned]
    assert found == [
        ("square", "bf16", "square-bf16.json"), ("square", "fp16", "square-fp16.json"),
        ("decode_mid", "bf16", "decode_mid-bf16.json"), ("decode_mid", "fp16", "decode_mid-fp16.json"),
        ("dtypes", "mixed", "dtypes-mixed.json"),
    ]  # fmt: skip
    assert {run.path.parent for run in planned} == {tmp_path / "new"}


def test_a_suite_brings_its_regimes(asked):
    command("--suite", "launch,launch_plan,odd")
    command("--suite", "launch", "--regimes", "burst,steady")
    regimes = [tuple(run.regimes) for _, planned in asked for run in planned]
    assert regimes == [("host", "graph"), ("host", "graph"), ("burst", "steady"), ("burst", "steady")]


@pytest.mark.parametrize("before", [None, "1"])
def test_ours_is_measured_as_it_ships_unless_tuned_is_asked_for(watch, monkeypatch, tmp_path, before):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "Stopwatch", lambda: watch)
    monkeypatch.delenv("GEMMERY_STORE", raising=False)
    if before is not None:
        monkeypatch.setenv("GEMMERY_STORE", before)
    seen = []

    def run_suite(name, **options):
        seen.append((os.environ.get("GEMMERY_STORE"), options["tuned"], options["path"].name))
        return results_of.Result(name, options["dtype"], {})

    monkeypatch.setattr(bench, "run_suite", run_suite)
    for tuned in (False, True):
        request = bench.Request(["square"], tuned=tuned, json=tmp_path)
        assert bench.bench(request, bench.runs(request)) == 0
        assert os.environ.get("GEMMERY_STORE") == before
    assert seen == [("0", False, "square-bf16.json"), (before, True, "square-bf16-tuned.json")]


def test_random_products_of_any_seed(asked, tmp_path):
    words = "--suite", "random_mid,square", "--json", str(tmp_path)
    assert command(*words, "--seed", "7").exit_code == 0
    assert command(*words, "--seed", "7", "--count", "30").exit_code == 0
    assert command(*words, "--count", "2").exit_code == 0
    assert command(*words, "--count", "2").exit_code == 0
    (own, _), (drawn, square), (new, _), (newer, _) = [planned for _, planned in asked]
    assert (own.rows, own.drawn, own.path.name) == (suites.load("random_mid"), None, "random_mid-bf16.json")
    assert (drawn.rows, drawn.drawn) == (suites.drawn("random_mid", 7, 30), 7)
    assert (drawn.path.name, tuple(drawn.regimes)) == ("random_mid-bf16-seed7.json", ("burst",))
    assert (square.rows, square.drawn, square.path.name) == (suites.load("square"), None, "square-bf16.json")
    # Without a seed it is one that nobody knew before.
    assert new.rows == suites.drawn("random_mid", new.drawn, 2)
    assert new.drawn != newer.drawn


def test_random_products_with_a_type_of_their_own(asked, tmp_path):
    several = "--suite", "random_fp8,random_int4", "--dtype", "bf16,fp16"
    command(*several, "--seed", "7", "--count", "2", "--json", str(tmp_path))
    command("--suite", "random_fp8_blocks", "--json", str(tmp_path))
    drawn, own = [planned for _, planned in asked]
    assert [run.path.name for run in drawn] == [
        "random_fp8-mixed-seed7.json", "random_int4-bf16-seed7.json", "random_int4-fp16-seed7.json",
    ]  # fmt: skip
    assert drawn[0].rows == suites.drawn("random_fp8", 7, 2)
    assert [(run.path.name, run.rows, tuple(run.regimes)) for run in own] == [
        ("random_fp8_blocks-mixed.json", suites.load("random_fp8_blocks"), ("burst",)),
    ]


def test_a_result_says_which_seed_its_rows_are_of(gpu, watch, tmp_path):
    path = tmp_path / "r.json"
    suite(gpu, watch, path=path, regimes=["burst"], rounds=1, drawn=7)
    assert results_of.kind(results_of.read(path) | {"triton": "3.6.0"}) == "fp32, seed 7"
    suite(gpu, watch, path=path, regimes=["burst"], rounds=1)
    assert results_of.kind(results_of.read(path) | {"triton": "3.6.0"}) == "fp32"


def test_a_summary_has_the_tenth_percentile(gpu, watch):
    console = Console(file=io.StringIO(), width=250)
    result = suite(gpu, watch, regimes=["burst"], console=console)
    ratios = [row["summary"]["burst"]["ratio"]["torch"]["median"] for row in result.rows]
    tenth = timing.percentile(ratios, 10)
    assert results_of.summarise(result.rows)["burst"]["torch"]["p10"] == tenth
    assert f"10th percentile {tenth:.3f}, worst {min(ratios):.3f}" in console.file.getvalue()


def test_all_is_every_suite_that_is_no_part(asked):
    command("--suite", "all")
    assert [run.suite for run in asked[0][1]] == suites.whole()


def test_more_steady_rows_are_expected_to_take_longer():
    few, every = (
        bench.runs(request)[0].seconds(request)
        for request in (bench.Request(["llm"]), bench.Request(["llm"], steady_rows=None))
    )
    assert every - few == pytest.approx(16 * 2 * 5 * 0.6, rel=0.1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--suite", "cube"], "unknown suite cube; there are all, bmm"),
        (["--suite", "square", "--dtype", "half"], "unknown dtype half"),
        (
            ["--suite", "square", "--against", "mkl"],
            "unknown peer mkl; there are cublas, compile, compile_default, seed",
        ),
        (["--suite", "square", "--regimes", "bust"], "regimes bust given"),
        (["--suite", "square", "--steady-rows", "some"], "give a number, or 'all'"),
        (["--suite", "square", "--rows", "nothing"], "no row's name matches 'nothing'"),
        (["--suite", "square", "--rows", "("], "not a regular expression"),
        (["--suite", "square,llm", "--json", "x.json"], "x.json is one file, and there are 2 results"),
        (["--suite", "square", "--json", "absent/x.json"], "there is no directory"),
        (["--suite", "square", "--rounds", "0"], "--rounds"),
        (["--suite", "square,llm", "--count", "3"], "count is for suites of random products: random_decode"),
        (["--suite", "random_mid", "--count", "0"], "--count"),
        ([], "give shapes, or a suite"),
        (["--shapes", "96x11008"], "shape is '96x11008'; it must be MxNxK"),
        (["--shapes", "0x64x64"], "M is 0; it must be an integer from 1"),
        (["--shapes", "٩٦x64x64"], "shape is '٩٦x64x64'; it must be MxNxK"),
        (["--shapes", "96x64x64,8x8x8,096×64x64"], "shape 96x64x64 is given again, as 096×64x64"),
        (["--suite", "square", "--steady-rows", "٣"], "'٣' is not a number of rows"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(asked, words, message):
    ran = command(*words)
    assert ran.exit_code == 2
    assert message in " ".join(ran.output.replace("│", " ").split())
    assert asked == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path):
    ran = command("--suite", "square", "--json", str(tmp_path))
    assert ran.exit_code == 2
    assert "no GPU" in ran.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("failing", "status"), [(None, 0), ("b", 1)])
def test_the_command_runs_suite_after_suite(gpu, watch, monkeypatch, tmp_path, capsys, failing, status):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "Stopwatch", lambda: watch)
    ran = []

    def run_suite(name, **options):
        assert os.environ["GEMMERY_STORE"] == "0"
        assert not options["tuned"]
        ran.append((name, options["dtype"], options["path"], set(options["peers"]), options["watch"]))
        return results_of.Result(
            name, options["dtype"], {}, [{"name": "b"} | ({"error": "x"} if failing else {})]
        )

    monkeypatch.setattr(bench, "run_suite", run_suite)
    request = bench.Request(["square", "odd"], against=["cublas", "compile"], json=tmp_path)
    assert bench.bench(request, bench.runs(request)) == status
    assert ran == [
        (name, "bf16", tmp_path / f"{name}-bf16.json", {"cublas", "compile"}, watch)
        for name in ("square", "odd")
    ]
    assert ("failed: odd, bf16: b" in capsys.readouterr().err) == bool(failing)
