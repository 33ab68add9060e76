"""A log of a program's problems, for later tuning. GEMMERY_LOG=FILE turns it on.

Each problem is a line of JSON, appended when its plan is made, so calls with a plan cost nothing. Several processes
may write to one file. A problem whose plan was dropped is written again; `read` returns each problem once.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from dataclasses import replace
from pathlib import Path

from ..devices import Device
from ..files import parse_json
from ..problem import Problem
from .keys import device_text, from_dict, to_dict


def note(problem: Problem) -> None:
    """Append a problem to the file that GEMMERY_LOG names, if it is set."""
    path = os.environ.get("GEMMERY_LOG")
    if not path:
        return
    line = json.dumps({"problem": to_dict(problem), "device": device_text(problem.device)}) + "\n"
    try:
        # A single write to a file opened for appending, so lines of several processes do not mix.
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)
    except OSError as error:
        _say(path, str(error))


@functools.cache
def _say(path: str, error: str) -> None:
    warnings.warn(f"gemmery: GEMMERY_LOG={path} can't be written: {error}", RuntimeWarning, stacklevel=3)


def read(path: Path, device: Device) -> list[Problem]:
    """The distinct problems of a log, in their order, for `device`.

    Raises:
        OSError: the file can't be read.
        ValueError: a line is not a problem; the message names it.
    """
    problems: dict[Problem, None] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        entry = parse_json(line, where)
        try:
            problem = from_dict(entry["problem"] if isinstance(entry, dict) else entry, device)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{where}: {error}") from error
        if problem.precision not in device.target.precisions:
            problem = replace(problem, precision="ieee")
        problems[problem] = None
    return list(problems)
