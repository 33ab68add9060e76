"""The key of a timing: the problem as text, the device, Triton's version and the kernels' source.

A problem's text is JSON with its fields in a fixed order, without fields at their defaults. So a new field of
`Problem` with a default does not change the keys of existing timings.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

from ..devices import Device
from ..dtypes import DTYPE_NAMES, PRECISIONS
from ..operands import Dense, Layout
from ..problem import Problem

#: The files that decide the code of a kernel and its launch. A timing counts only for the same text of these files.
SOURCES = ("kernels/*.py", "operands/*.py", "schedules/*.py")

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_OPERANDS = ("a", "b", "out", "addend")


class Key(NamedTuple):
    """The key of a problem's timings."""

    device: str
    triton: str
    source: str
    problem: str


def key_of(problem: Problem) -> Key:
    """The key of a problem's timings in this version of gemmery and Triton."""
    import triton

    return Key(device_text(problem.device), triton.__version__, source(), to_text(problem))


def device_text(device: Device) -> str:
    """A device's name with its number of multiprocessors, which distinguishes variants and partitions of a model."""
    return f"{device.name} ({device.sms} SMs)"


@functools.cache
def source(root: Path = Path(__file__).parents[1]) -> str:
    """A hash of the files that decide which code runs, in 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for file in sorted(root.glob(pattern)):
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def to_dict(problem: Problem) -> dict[str, Any]:
    """A problem without its device as plain values for JSON; the inverse of `from_dict`."""
    values: dict[str, Any] = {}
    for field in fields(Problem):
        value = getattr(problem, field.name)
        if field.name == "device" or value == field.default:
            continue
        if isinstance(value, Layout):
            values[field.name] = {
                "dtype": DTYPE_NAMES[value.dtype], "steps": list(value.steps),
                "row": value.row, "col": value.col, "aligned": value.aligned,
            }  # fmt: skip
        else:
            values[field.name] = list(value) if isinstance(value, tuple) else value
    return values


def to_text(problem: Problem) -> str:
    """A problem without its device as one line of JSON, the same for equal problems."""
    return json.dumps(to_dict(problem), separators=(",", ":"))


def from_dict(values: Any, device: Device) -> Problem:
    """The problem that `to_dict` described, on a device.

    Raises:
        ValueError: the values do not describe a problem.
    """
    if not isinstance(values, dict):
        raise ValueError(f"a problem is an object with M, N, K, ...; given {values!r}")
    known = {field.name: field for field in fields(Problem) if field.name != "device"}
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"a problem has no {', '.join(unknown)}")
    needed = [name for name, field in known.items() if field.default is MISSING]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"a problem without {', '.join(missing)}")
    if not _sizes(values["batch"]):
        raise ValueError(f"a problem's batch is a list of sizes; given {values['batch']!r}")
    made: dict[str, Any] = {"batch": tuple(values["batch"])}
    for name in values.keys() - made.keys():
        if name in _OPERANDS:
            made[name] = _layout(name, values[name], len(made["batch"]))
        else:
            made[name] = _plain(name, values[name], 0 if name in needed else known[name].default)
    if made.get("precision", "ieee") not in PRECISIONS:
        raise ValueError(
            f"a problem's precision is one of {', '.join(PRECISIONS)}; given {made['precision']!r}"
        )
    return Problem(device=device, **made)


def _plain(name: str, value: Any, like: object) -> Any:
    if type(value) is not type(like):
        raise ValueError(f"a problem's {name} is of type {type(like).__name__}; given {value!r}")
    if type(value) is int and value < 0:
        raise ValueError(f"a problem's {name} is at least 0; given {value}")
    return value


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _layout(name: str, value: Any, batch: int) -> Layout:
    names = {field.name for field in fields(Layout)}
    if not isinstance(value, dict) or set(value) != names:
        raise ValueError(f"a problem's {name} is an object with {', '.join(sorted(names))}; given {value!r}")
    if not isinstance(value["dtype"], str) or value["dtype"] not in _DTYPES:
        raise ValueError(f"a problem's {name} has a dtype of {', '.join(_DTYPES)}; given {value['dtype']!r}")
    if not _sizes([value["row"], value["col"]]) or not _sizes(value["steps"]) or len(value["steps"]) != batch:
        raise ValueError(
            f"a problem's {name} has strides of at least 0, one a batch dimension; given {value!r}"
        )
    if type(value["aligned"]) is not bool:
        raise ValueError(f"a problem's {name} is aligned or not, true or false; given {value['aligned']!r}")
    return (Layout if name == "addend" else Dense)(
        _DTYPES[value["dtype"]], tuple(value["steps"]), value["row"], value["col"], value["aligned"]
    )
