"""Timings as JSON: to ship with a model, to bring to other machines, to read.

    {"gemmery timings": 1, "sets": [{"device": ..., "triton": ..., "source": ..., "problems": [
        {"problem": {"M": ..., ...}, "configs": {"128x128x64-...": {"seconds": 1.2e-05, "measured": ...}}}]}]}

A set counts only on its device, with its version of Triton and of gemmery's kernels, as in the store.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..devices import TABLE
from ..files import read_json, write_json
from ..problem import Config
from .keys import Key, from_dict, to_text
from .store import Row, Store, Timing

_FORMAT = "gemmery timings"


def export_json(path: Path, store: Store, keep: Callable[[Key], bool] | None = None) -> int:
    """Write a store's timings to a file.

    Args:
        path: the file, which is replaced.
        keep: whether the timings of a key are written; all by default.

    Returns:
        How many timings were written.

    Raises:
        OSError: the file can't be written.
    """
    rows = [row for row in store.rows() if keep is None or keep(row.key)]
    write_json(path, {_FORMAT: 1, "sets": _sets(rows)})
    return len(rows)


def _sets(rows: list[Row]) -> list[dict[str, Any]]:
    sets = []
    for place, of_set in itertools.groupby(sorted(rows), key=lambda row: row.key[:3]):
        problems = [
            {
                "problem": json.loads(text),
                "configs": {row.config: _values(row.timing) for row in of_problem},
            }
            for text, of_problem in itertools.groupby(of_set, key=lambda row: row.key.problem)
        ]
        sets.append(dict(zip(Key._fields, place, strict=False)) | {"problems": problems})
    return sets


def _values(timing: Timing) -> dict[str, Any]:
    return {name: value for name, value in timing._asdict().items() if name != "note" or value}


def import_json(path: Path, store: Store) -> int:
    """Add the timings of a file to a store. They replace those that were measured earlier.

    Returns:
        How many timings the file has.

    Raises:
        OSError: the file can't be read.
        ValueError: the file is not valid; the message names the place. Then nothing is added.
    """
    data = read_json(path)
    if not isinstance(data, dict) or data.get(_FORMAT) != 1 or not isinstance(data.get("sets"), list):
        raise ValueError(f'{path}: must be an object with "{_FORMAT}": 1 and "sets", a list')
    rows = []
    for number, of_set in enumerate(data["sets"], 1):
        where = f"{path}, set {number}"
        if not _fits(of_set, {"device": str, "triton": str, "source": str, "problems": list}):
            raise ValueError(f"{where}: must have device, triton and source, texts, and problems, a list")
        for position, entry in enumerate(of_set["problems"], 1):
            rows += _rows(of_set, entry, f"{where}, problem {position}")
    store.add(rows, if_newer=True)
    return len(rows)


def _rows(of_set: dict[str, Any], entry: Any, where: str) -> list[Row]:
    if not _fits(entry, {"problem": dict, "configs": dict}):
        raise ValueError(f"{where}: must have problem and configs, objects")
    try:
        # Any device is fine here, since a problem's text leaves it out.
        problem = to_text(from_dict(entry["problem"], TABLE["interpreter"]))
        configs = {str(Config.of(text)): _timing(values) for text, values in entry["configs"].items()}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error
    key = Key(of_set["device"], of_set["triton"], of_set["source"], problem)
    return [Row(key, config, timing) for config, timing in configs.items()]


def _timing(values: Any) -> Timing:
    if not isinstance(values, dict) or not {"seconds", "measured"} <= set(values) <= set(Timing._fields):
        raise ValueError(f"a timing has seconds and measured, and maybe a note; given {values!r}")
    return Timing.of(values["seconds"], values.get("note", ""), values["measured"])


def _fits(value: Any, wanted: dict[str, type]) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in wanted.items())
