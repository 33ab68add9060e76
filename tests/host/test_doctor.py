"""What the doctor makes of machines that are not at hand: each has one thing that is not as it should be."""

import copy
import io
import sqlite3
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from gemmery import devices
from gemmery.lab.doctor import checks, machine, trials
from gemmery.lab.doctor.checks import findings
from gemmery.lab.doctor.show import show
from gemmery.problem import Config
from gemmery.schedules.specialized import SPECIALIZED
from gemmery.select import store
from tests.problems import make

ROOT = Path(__file__).resolve().parents[2]


def gpu(monkeypatch, name, sms=None):
    """The facts of a GPU as the driver would name it."""
    row = next((row for row in devices.TABLE.values() if name in row.name), None)
    properties = SimpleNamespace(
        name=name if row is None else row.name, total_memory=80 << 30,
        multi_processor_count=sms or (row.sms if row else 10),
    )  # fmt: skip
    if row is not None:
        row = devices._matching(properties.name, row.arch, properties.multi_processor_count, row.l2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(devices, "current", lambda place: row)
    return machine._gpu(0)


@pytest.fixture
def sound(monkeypatch):
    """The facts of a machine with an H200 on which nothing is missing."""
    return {
        "versions": {"gemmery": "0.1.0", "torch": "2.13.0+cu130", "triton": "3.9.0", "numpy": "2.4.6"},
        "optional": dict.fromkeys(machine.OPTIONAL, "1.0"),
        "python": {"version": "3.11.7", "platform": "Linux"},
        "torch": {"cuda": "13.0", "hip": None},
        "variables": {},
        "drivers": ["NVIDIA"],
        "no_gpu": None,
        "kernels": "compiled",
        "gpus": [gpu(monkeypatch, "NVIDIA H200")],
        "targets": [],
        "tools": {"c compiler": "/usr/bin/gcc", "Python.h": "/usr/include/Python.h", "ptxas": "/usr/bin/ptxas"},
        "short_launch": True,
        "cache": {"path": "/home/me/.triton/cache", "writable": True, "free": 1 << 40},
        "store": {
            "path": "/home/me/.cache/gemmery/timings-1.sqlite", "on": True, "error": None, "writable": True,
            "timings": {"NVIDIA H200 (132 SMs)": 7}, "stale": {}, "set_aside": [],
        },
        "trials": [{"device": "cuda:0", "dtype": "float16", "ran": "", "error": 1e-4, "failure": None}],
    }  # fmt: skip


def changed(facts, path, value):
    """The same facts with another value at a path such as "tools.ptxas"."""
    facts = copy.deepcopy(facts)
    *way, last = path.split(".")
    place = facts
    for key in way:
        place = place[int(key) if key.isdigit() else key]
    place[last] = value
    return facts


def test_nothing_is_found_on_a_sound_machine(sound):
    assert findings(sound) == []
    assert set(sound) - {"trials"} == set(machine.facts())
    assert set(sound["store"]) == set(machine.facts()["store"])
    assert set(sound["cache"]) == set(machine.facts()["cache"])
    assert set(sound["tools"]) == set(machine.facts()["tools"])


#: What is not as it should be; then words of what the doctor says it is and of its advice, and whether it is broken.
FAKED = {
    "old torch": ("versions.torch", "2.10.1", "torch is 2.10.1", "torch>=2.11", True),
    "old triton": ("versions.triton", "3.5.0", "triton is 3.5.0", "triton>=3.6", True),
    "unknown launcher": ("short_launch", False, "enter kernels of Triton 3.9.0", "CUDA graph", False),
    "no compiler": ("tools.c compiler", None, "no C compiler", "CC", True),
    "no headers": ("tools.Python.h", None, "no Python.h", "python3-dev", True),
    "no assembler": ("tools.ptxas", None, "no ptxas", "TRITON_PTXAS_PATH", True),
    "cache that can't be written": ("cache.writable", False, "can't be written", "TRITON_CACHE_DIR", True),
    "full disk": ("cache.free", 10 << 20, "10 MiB", "make room", False),
    "store off": ("store.on", False, "turned off", "GEMMERY_STORE", False),
    "no home": ("store.path", None, "no home", "GEMMERY_CACHE_DIR", False),
    "unreadable store": ("store.error", "disk I/O error", "disk I/O error", "gemmery store import", False),
    "read-only store": ("store.writable", False, "can't be written", "GEMMERY_CACHE_DIR", False),
    "broken stores": ("store.set_aside", ["/a/x.broken-1"], "1 broken stores", "/a/x.broken-1", False),
    "no pictures": ("optional.matplotlib", None, "no matplotlib", "gemmery[cli]", False),
    "no page": ("optional.starlette", None, "no starlette", "gemmery[lab]", False),
    "no demo": ("optional.transformers", None, "no transformers", "gemmery[demo]", False),
    "slow variable": ("variables", {"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING=1", "unset", False),
    "failed trial": ("trials.0.failure", "relative error 1.0", "relative error 1.0", "doctor --json", True),
    "no shipped times": ("gpus.0.tables", [], "no measured times", "gemmery tune", False),
}  # fmt: skip


@pytest.mark.parametrize("case", FAKED)
def test_a_fault_is_found_with_an_advice(sound, case):
    path, value, what, advice, broken = FAKED[case]
    if path == "tools.Python.h":
        facts = copy.deepcopy(sound)
        facts["tools"]["Python.h"] = value
    else:
        facts = changed(sound, path, value)
    found = [one for one in findings(facts) if what in one.what]
    assert len(found) == 1, findings(facts)
    assert advice in found[0].advice
    assert found[0].instead
    assert found[0].broken is broken
    # An old Triton lacks more than its age; all else leads to one finding.
    assert len(findings(facts)) == 1 or case == "old triton"


def test_without_a_gpu_nothing_of_a_compiler_is_broken(sound):
    facts = changed(sound, "gpus", []) | {
        "kernels": "reference",
        "drivers": [],
        "tools": dict.fromkeys(sound["tools"]),
    }
    found = findings(facts)
    assert {one.what for one in found} == {"no GPU", "no C compiler", "no Python.h", "no ptxas that runs"}
    assert not any(one.broken for one in found)


@pytest.mark.parametrize(
    ("more", "what", "advice", "broken"),
    [
        ({"torch": {"cuda": None, "hip": None}}, "built for the CPU", "pytorch.org", True),
        ({"no_gpu": "the driver is too old"}, "the driver is too old", "CUDA 13.0", True),
        (
            {"variables": {"CUDA_VISIBLE_DEVICES": ""}, "no_gpu": "none"},
            "CUDA_VISIBLE_DEVICES hides",
            "unset",
            False,
        ),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_told(sound, more, what, advice, broken):
    facts = changed(sound, "gpus", []) | {"kernels": "reference"} | more
    (found,) = [one for one in findings(facts) if what in one.what]
    assert advice in found.advice
    assert found.broken is broken


def test_triton_that_can_not_interpret_with_this_numpy(sound):
    facts = changed(sound, "versions.triton", "3.6.0")
    (found,) = [one for one in findings(facts) if "interpret" in one.what]
    assert not found.broken
    assert "numpy<2.4" in found.advice
    (found,) = [one for one in findings(facts | {"kernels": "interpreted"}) if "numpy" in one.what]
    assert found.broken
    assert not [one for one in findings(changed(facts, "versions.numpy", "2.3.5")) if "numpy" in one.what]


def test_interpreted_kernels_are_told(sound):
    (found,) = findings(sound | {"kernels": "interpreted"})
    assert "interpreted" in found.what
    assert "unset TRITON_INTERPRET" in found.advice


@pytest.mark.parametrize(
    "arch", [name for name, arch in devices.ARCHS.items() if arch.multiprocessor is not None]
)
def test_what_an_architecture_lacks_is_told_with_an_advice(monkeypatch, sound, arch):
    row = next(row for row in devices.TABLE.values() if row.arch == arch)
    facts = sound | {"gpus": [gpu(monkeypatch, row.name)]}
    whats = {one.what.removeprefix("GPU 0: "): one for one in findings(facts)}
    for lack in devices.lacks(arch):
        assert whats[lack.what].advice == lack.advice
        assert lack.advice
    assert ("no tensor descriptors in hardware" in whats) == (not devices.ARCHS[arch].tma)
    assert any("no measured times" in what for what in whats) == (row.name != "NVIDIA H200")


def test_a_gpu_without_a_row_and_one_of_an_unknown_architecture(monkeypatch, sound):
    facts = sound | {"gpus": [gpu(monkeypatch, "NVIDIA H200", sms=66)]}
    (found,) = [one for one in findings(facts) if "no row in the device table" in one.what]
    assert "66 multiprocessors" in found.what
    assert "docs/extending.md" in found.advice
    (found,) = findings(sound | {"gpus": [gpu(monkeypatch, "NVIDIA T4")]})
    assert "architecture" in found.what
    assert "torch reference" in found.instead
    assert (ROOT / "docs" / "extending.md").is_file()


def test_how_each_architecture_runs_what_not_all_can(monkeypatch):
    def how(name):
        return machine.runs(devices.ARCHS[name])

    assert how("sm_80")["fp8 e4m3"] == "torch's reference"
    assert how("sm_80")["fp8 e5m2"] == how("sm_89")["fp8 e4m3"] == "tensor cores"
    assert how("gfx942")["fp8 e4m3"] == "as fp16"
    assert how("gfx942")["tf32"] == "as ieee"
    assert how("sm_80")["loads"] == "pointers"
    assert "TMA" in how("sm_90")["loads"]
    assert "nvfp4" in how("sm_86")["packed weights"]
    for there in (True, False):
        monkeypatch.setattr(SPECIALIZED, "available", lambda there=there: there)
        assert how("sm_90")["specialised warps"].startswith("chosen") is there
        assert how("sm_100")["specialised warps"].startswith("none")


def test_shipped_tables_are_found(monkeypatch):
    assert "half" in gpu(monkeypatch, "NVIDIA H200")["tables"]
    assert gpu(monkeypatch, "NVIDIA L4")["tables"] == []


def test_stale_timings_are_told(sound):
    store = sound["store"] | {"timings": {}, "stale": {"NVIDIA H200 (132 SMs)": 5, "NVIDIA L4 (58 SMs)": 2}}
    (found,) = findings(sound | {"store": store})
    assert "5 timings" in found.what
    assert "gemmery tune" in found.advice
    fresh = store | {"timings": {"NVIDIA H200 (132 SMs)": 1}}
    assert findings(sound | {"store": fresh}) == []


def test_the_store_is_looked_at(monkeypatch, tmp_path):
    monkeypatch.delenv("GEMMERY_STORE")
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path))
    assert machine._store() == {
        "path": str(tmp_path / store.FILE), "on": True, "error": None, "writable": True, "timings": {}, "stale": {},
        "set_aside": [],
    }  # fmt: skip
    problem = make(64, 64, 64, device="NVIDIA H200")
    store.current().record(problem, Config(64, 64, 64), 1e-5)
    assert machine._store()["timings"] == {"NVIDIA H200 (132 SMs)": 1}
    with sqlite3.connect(tmp_path / store.FILE) as connection:
        connection.execute("UPDATE timings SET triton = '0.1'")
    found = machine._store()
    assert (found["timings"], found["stale"]) == ({}, {"NVIDIA H200 (132 SMs)": 1})
    (tmp_path / store.FILE).write_bytes(b"this is no database, and longer than its header would be" * 20)
    found = machine._store()
    assert "broken" in found["error"]
    assert len(found["set_aside"]) == 1


def test_a_store_behind_a_file_can_not_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("GEMMERY_STORE")
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path / "file" / "gemmery"))
    assert machine._store()["writable"] is False
    assert machine.writable(tmp_path / "new" / "newer")
    monkeypatch.setenv("GEMMERY_STORE", "0")
    assert machine._store()["on"] is False


def test_tools_are_looked_for(monkeypatch):
    assert "CUDA" in machine._tools()["ptxas"]
    monkeypatch.setenv("CC", "no-such-compiler")
    assert machine._tools()["c compiler"] is None
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")

    def missing(arch):
        raise RuntimeError("Cannot find ptxas")

    monkeypatch.setattr(compiler, "get_ptxas", missing)
    assert machine._tools()["ptxas"] is None


def test_packages_are_those_of_the_extras():
    """Every package of an extra that users install has a part that tells what is missing without it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        (extra, wanted.split(">")[0].split("[")[0])
        for extra, packages in extras.items()
        if extra not in ("dev", "docs")
        for wanted in packages
        if not wanted.startswith("gemmery[")
    }
    assert named == {(part.extra, package) for part in checks.PARTS for package in part.packages}
    assert set(machine.OPTIONAL) == {package for _, package in named}


def test_what_is_found_on_a_gpu_is_shown(monkeypatch, sound):
    facts = changed(sound, "tools.ptxas", None)
    facts["gpus"].append(gpu(monkeypatch, "NVIDIA L4") | {"index": 1})
    facts["targets"] = machine.facts()["targets"]
    found = [vars(one) for one in findings(facts)]
    facts["limits"] = [one for one in found if not one["broken"]]
    facts["broken"] = [one for one in found if one["broken"]]
    file = io.StringIO()
    show(facts, Console(file=file, width=200))
    printed = file.getvalue()
    for one in found:
        assert f"- {one['what']}: {one['instead']}" in printed
        assert one["advice"] in printed
    assert "NVIDIA L4" in printed
    assert "GPU 0, specialised warps" in printed
    assert "7 of NVIDIA H200" in printed
    assert "nothing is broken" not in printed


def test_trials_say_what_is_wrong(monkeypatch):
    monkeypatch.setattr(trials.gemmery, "matmul", lambda a, b: torch.zeros(a.shape[0], 53))
    found = {trial.dtype: trial.failure for trial in trials.trials([])}
    assert set(found) == {"float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "int4 weight"}
    assert all("relative error" in failure for failure in found.values())
