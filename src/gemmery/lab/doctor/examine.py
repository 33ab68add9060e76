"""The examination as a whole: facts, trials, findings."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ...files import write_json
from .checks import findings
from .machine import facts
from .show import show
from .trials import trials


def doctor(json_path: Path | None = None) -> int:
    """Examine this machine and print the findings.

    Args:
        json_path: where to write the same as JSON.

    Returns:
        The exit status: 0, or 1 where something is broken.
    """
    found = examine()
    if json_path is not None:
        write_json(json_path, found)
    show(found, Console())
    return 1 if found["broken"] else 0


def examine() -> dict[str, Any]:
    """Everything that the doctor finds, as plain values.

    Beside the facts, "trials" are products that were tried, "limits" what works less well than it could and "broken"
    what must be repaired: each with the finding, what runs or follows instead, and advice.
    """
    found = facts()
    found["trials"] = [asdict(trial) for trial in trials(found["gpus"])]
    all_findings = findings(found)
    for name, broken in (("limits", False), ("broken", True)):
        found[name] = [
            {"what": one.what, "instead": one.instead, "advice": one.advice}
            for one in all_findings
            if one.broken is broken
        ]
    return found
