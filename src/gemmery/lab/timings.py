"""The command `store`: what the store of timings holds, and its way out to JSON and in again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import triton
from rich.console import Console
from rich.table import Table

from ..devices import TABLE
from ..launch.padding import launched
from ..launch.plan import runs_on
from ..select import exchange, log
from ..select.keys import Key, device_text, source, to_text
from ..select.store import Store, current
from .tuning import gpu_here


def _store() -> Store:
    kept = current()
    if kept is None:
        raise ValueError("the store is disabled by GEMMERY_STORE=0; unset it")
    return kept


def is_current(key: Key) -> bool:
    """Whether timings under a key count with this Triton and these kernels."""
    return key.triton == triton.__version__ and key.source == source()


def show(console: Console | None = None) -> dict[str, Any]:
    """Print what the store holds; returns the same as plain values."""
    console = Console() if console is None else console
    kept = current()
    rows = [] if kept is None else kept.rows()
    place = None if kept is None or kept.path is None else str(kept.path)
    where = place or (
        "nowhere: GEMMERY_STORE turns the store off" if kept is None else "nowhere: there is no home"
    )
    console.print(where, markup=False, highlight=False, soft_wrap=True)
    timings = Counter(row.key[:3] for row in rows)
    problems = Counter(key[:3] for key in {row.key for row in rows})
    sets = [
        {
            "device": device, "triton": version, "source": text, "problems": problems[device, version, text],
            "timings": count, "current": is_current(Key(device, version, text, "")),
        }
        for (device, version, text), count in sorted(timings.items())
    ]  # fmt: skip
    table = Table("device", "Triton", "kernels", "problems", "timings", "used by this version")
    for one in sets:
        table.add_row(*(str(one[name]) for name in ("device", "triton", "source", "problems", "timings")),
                      "yes" if one["current"] else "no")  # fmt: skip
    if sets:
        console.print(table)
    else:
        console.print("no timings")
    return {"path": place, "sets": sets}


def export(path: Path, *, log_path: Path | None = None, everything: bool = False) -> int:
    """Write timings to a JSON file.

    Args:
        log_path: only of the problems in this log.
        everything: also those of other versions.

    Returns:
        How many.

    Raises:
        ValueError: the store is turned off, or the log is not valid.
        OSError: a file can't be read or written.
    """
    noted = None if log_path is None else _noted(log_path)

    def keep(key: Key) -> bool:
        return (everything or is_current(key)) and (noted is None or (key.device, key.problem) in noted)

    return exchange.export_json(path, _store(), keep)


def _noted(log_path: Path) -> set[tuple[str, str]]:
    """The problems of a log as the store calls them, on every device that it may have timings of."""
    known = {device_text(device): device for device in (gpu_here(), *TABLE.values()) if device is not None}
    return {
        (name, to_text(launched(problem)))
        for name, device in known.items()
        for problem in log.read(log_path, device)
        if runs_on(problem)
    }


def take(path: Path) -> int:
    """Take over the timings of a JSON file; returns how many it has.

    Raises:
        ValueError: the file is not valid, or the store is turned off.
        OSError: it can't be read.
    """
    return exchange.import_json(path, _store())
