"""The doctor: what this machine has, what it can't do, what runs instead, and whether a product comes out right."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sysconfig
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import gemmery

from .. import devices, reference

#: The oldest versions that are supported; pyproject.toml has the same.
OLDEST = {"torch": (2, 11), "triton": (3, 6)}

#: Packages that only parts of gemmery use.
OPTIONAL = ("matplotlib", "platformdirs", "rich", "transformers", "typer")

#: Variables that change what runs, and how.
VARIABLES = ("TRITON_INTERPRET", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH", "CUDA_VISIBLE_DEVICES", "CC")


@dataclass(frozen=True)
class Trial:
    """One product of gemmery, compared with float64.

    Attributes:
        error: ||y - exact|| / ||exact||; None where the call failed.
        failure: what it failed with, or that the error is too large; None where it is right.
    """

    device: str
    dtype: str
    ran: str
    error: float | None
    failure: str | None


def doctor(json_path: Path | None = None) -> int:
    """Examine this machine and print the findings.

    Args:
        json_path: where to write the same as JSON.

    Returns:
        The exit status: 0, or 1 where something is broken.
    """
    findings = examine()
    if json_path is not None:
        json_path.write_text(json.dumps(findings, indent=2) + "\n")
    _show(findings, Console())
    return 1 if findings["broken"] else 0


def examine() -> dict[str, Any]:
    """Everything that the doctor finds, as plain values."""
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    trials = _trials(bool(gpus))
    tools = _tools()
    on_gpu = "compiled" if any(gpu["row"] for gpu in gpus) else "reference"
    return {
        "versions": _versions(),
        "optional": {name: _installed(name) for name in OPTIONAL},
        "python": {"version": platform.python_version(), "platform": platform.platform()},
        "torch": {"cuda": torch.version.cuda, "hip": torch.version.hip},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "kernels": "interpreted" if devices.INTERPRETED else on_gpu,
        "gpus": gpus,
        "targets": _targets(),
        "tools": tools,
        "trials": [asdict(trial) for trial in trials],
        "falls_back": _falls_back(gpus),
        "broken": _broken(gpus, tools, trials),
    }


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _versions() -> dict[str, str]:
    import numpy
    import triton

    return {
        "gemmery": gemmery.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": numpy.__version__,
    }


def _gpu(index: int) -> dict[str, Any]:
    """What the driver says of a GPU, and the row of the device table that the selector takes for it."""
    properties = torch.cuda.get_device_properties(index)
    row = None if devices.INTERPRETED else devices.current(torch.device("cuda", index))
    return {
        "index": index,
        "name": properties.name,
        "memory": properties.total_memory,
        "sms": properties.multi_processor_count,
        "row": asdict(row) if row is not None else None,
        "measured": row is not None and row in devices.TABLE.values(),
    }


def _targets() -> list[dict[str, Any]]:
    """The targets of the architecture table: whether this Triton can compile for them, and what they lack."""
    from triton.backends import backends

    vendors = {"cuda": "nvidia", "hip": "amd"}
    return [
        {
            "name": arch.name,
            "compiles": vendors[arch.backend] in backends,
            "tensor_descriptors": arch.tma,
            "shared": arch.shared,
            "cannot": devices.cannot(arch.name),
        }
        for arch in devices.ARCHS.values()
        if arch.name != "interpreter"
    ]


def _tools() -> dict[str, str | None]:
    """What Triton needs beside itself to start a kernel: a C compiler and Python's headers, for its launcher."""
    from triton import knobs

    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return {
        "c compiler": compiler,
        "Python.h": str(header) if header.is_file() else None,
        "kernel cache": str(knobs.cache.dir),
    }


def _trials(gpu: bool) -> list[Trial]:
    """A small product with sizes that divide by nothing, in each type, wherever gemmery runs here."""
    if gpu and not devices.INTERPRETED:
        places = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    else:
        places = [torch.device("cpu")]
    return [
        _trial(place, dtype) for place in places for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]


def _trial(device: torch.device, dtype: torch.dtype) -> Trial:
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
        for shape in ((37, 75), (75, 53))
    )
    name = str(dtype).removeprefix("torch.")
    try:
        plan = gemmery.plan(a, b)
        y = gemmery.matmul(a, b)
    except Exception as failure:  # whatever it is, it is what the doctor is asked about
        return Trial(str(device), name, "", None, f"{type(failure).__name__}: {failure}")
    exact = reference.gemm(a.double(), b.double())
    error = float((y.double() - exact).norm() / exact.norm())
    allowed = 4 * torch.finfo(dtype).eps
    ran = str(plan.config) if plan is not None and plan.config is not None else "torch reference"
    wrong = None if error <= allowed else f"relative error {error:.1e}, at most {allowed:.1e} is right"
    return Trial(str(device), name, ran, error, wrong)


def _falls_back(gpus: list[dict[str, Any]]) -> list[str]:
    """Sentences about what this machine can't do and what runs instead."""
    if devices.INTERPRETED:
        return devices.cannot("interpreter")
    if not gpus:
        return [
            "no GPU: products of CPU tensors run through the torch reference",
            "no GPU: with TRITON_INTERPRET=1 the kernels themselves run, interpreted (demo and ladder set it)",
        ]
    sentences = []
    for gpu in gpus:
        row = gpu["row"]
        if row is None:
            lacks = ["not in the architecture table: every product runs through the torch reference"]
        else:
            lacks = devices.cannot(row["arch"])
            if not gpu["measured"]:
                lacks.append("no row of its own: the rates of its architecture's first row are used, by size")
        sentences += [f"GPU {gpu['index']}: {lack}" for lack in lacks]
    return sentences


def _broken(gpus: list[dict[str, Any]], tools: dict[str, str | None], trials: list[Trial]) -> list[str]:
    """Sentences about what has to be repaired."""
    found = []
    for name, oldest in OLDEST.items():
        has = _versions()[name]
        if tuple(int(part) for part in has.split(".")[:2]) < oldest:
            found.append(f"{name} is {has}; gemmery needs {'.'.join(map(str, oldest))} or newer")
    found += [
        f"{trial.device}, {trial.dtype}: {trial.failure}" for trial in trials if trial.failure is not None
    ]
    if gpus and not devices.INTERPRETED:
        if tools["c compiler"] is None:
            found.append("no C compiler: Triton can't build its launcher; install gcc or clang, or set CC")
        if tools["Python.h"] is None:
            found.append("no Python.h: Triton can't build its launcher; install Python's development files")
    return found


def _show(findings: dict[str, Any], console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    def heading(text: str) -> None:
        console.print(f"\n[bold]{text}[/]")

    python = findings["python"]
    say(f"Python {python['version']}, {escape(python['platform'])}")
    say(", ".join(f"{name} {has}" for name, has in findings["versions"].items()))
    say(", ".join(f"{name} {has or 'not installed'}" for name, has in findings["optional"].items()))
    toolkit = [f"{name.upper()} {has}" for name, has in findings["torch"].items() if has]
    say(f"torch was built for {', '.join(toolkit) or 'the CPU alone'}")
    for name, path in findings["tools"].items():
        say(f"{name}: {escape(path) if path else 'none'}")
    for name, value in findings["variables"].items():
        say(escape(f"{name}={value}"))

    heading("kernels")
    ways = {
        "compiled": "compiled for the GPU",
        "interpreted": "interpreted on the CPU",
        "reference": "none runs; the torch reference answers",
    }
    say(ways[findings["kernels"]])
    table = Table("device", "type", "ran")
    table.add_column("error", justify="right")
    for trial in findings["trials"]:
        error = "" if trial["error"] is None else f"{trial['error']:.1e}"
        table.add_row(trial["device"], trial["dtype"], trial["ran"], error)
    console.print(table)

    if findings["gpus"]:
        heading("GPUs, and what the selector believes of them")
        table = Table("", "name", "arch")
        for name in ("SMs", "memory", "L2", "bandwidth", "16 bit", "fp32"):
            table.add_column(name, justify="right")
        for gpu in findings["gpus"]:
            row, known = gpu["row"], ["unknown", *[""] * 4]
            sizes = (str(gpu["sms"]), f"{gpu['memory'] / 2**30:.0f} GiB")
            if row is not None:
                known = [
                    row["arch"],
                    f"{row['l2'] / 2**20:.0f} MiB",
                    f"{row['bandwidth'] / 1e12:.2f} TB/s",
                    f"{row['fp16'] / 1e12:.0f} TFLOP/s",
                    f"{row['fp32'] / 1e12:.0f} TFLOP/s",
                ]
            table.add_row(str(gpu["index"]), gpu["name"], known[0], *sizes, *known[1:])
        console.print(table)

    heading("what this machine can't do, and what runs instead")
    for sentence in findings["falls_back"] or ["nothing is missing"]:
        say(f"- {escape(sentence)}")

    heading("targets that kernels can be compiled for, here")
    for target in findings["targets"]:
        state = "" if target["compiles"] else " (this Triton has no such backend)"
        say(f"{target['name']:8} {escape('; '.join(target['cannot']) or 'everything')}{state}")

    if findings["broken"]:
        heading("[red]broken[/]")
        for sentence in findings["broken"]:
            say(f"- {escape(sentence)}")
    else:
        heading("[green]nothing is broken[/]")
