"""The ladder of tutorials: run every rung and show what each gained over the one before and relative to torch."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from ..files import write_json


@dataclass(frozen=True)
class Row:
    """One line of a rung's record; `role` is "this", "before", "torch", "copy" or "other"."""

    name: str
    role: str
    shape: str
    time_us: float | None
    rate: float | None
    unit: str
    error: float | None


@dataclass(frozen=True)
class Record:
    """The results of one run of a rung; written by the tutorials' `--json`."""

    number: int
    title: str
    device: str
    interpreted: bool
    torch: str
    triton: str
    seed: int
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Failure:
    """A rung that failed, with everything that it printed."""

    number: int
    title: str
    status: int
    output: str


@dataclass(frozen=True)
class Gain:
    """A rung's time for one shape beside the rung before it and torch, where these did the same work."""

    shape: str
    time_us: float
    rate: float | None
    unit: str
    over_before: float | None
    over_torch: float | None
    over_copy: float | None


def tutorial_files() -> dict[int, Path]:
    """The rungs by their number: packaged with the library, or in the repository that it is installed from."""
    here = Path(__file__).resolve()
    for folder in (here.parents[1] / "_tutorials", here.parents[3] / "tutorials"):
        files = sorted(folder.glob("[0-9][0-9]_*.py"))
        if files:
            return {int(path.name[:2]): path for path in files}
    raise FileNotFoundError(f"no tutorials beside {here.parents[1]}: the installation is incomplete")


def read_record(text: str) -> Record:
    """A record from the JSON that a rung writes."""
    data: dict[str, Any] = json.loads(text)
    rows = tuple(Row(**row) for row in data.pop("rows"))
    return Record(rows=rows, **data)


def run_rung(number: int, path: Path, say: Callable[[str], object] = lambda line: None) -> Record | Failure:
    """Run one rung in a separate process, because a process interprets all kernels or none.

    Args:
        number: the rung's number.
        path: its file.
        say: is given each line that the rung prints, as soon as it is there.
    """
    title = path.stem[3:].replace("_", " ")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "record.json"
        # A packaged rung is in a folder that may be read-only, and a checkout should stay clean.
        printed: list[str] = []
        with subprocess.Popen(
            [sys.executable, "-B", "-u", str(path), "--json", str(result)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        ) as running:
            for line in running.stdout or ():
                printed.append(line)
                say(line.removesuffix("\n"))
        if running.returncode or not result.exists():
            return Failure(number, title, running.returncode, "".join(printed))
        return read_record(result.read_text(encoding="utf-8"))


def gains(rows: Iterable[Row]) -> list[Gain]:
    """The gain of a rung, shape by shape. Ratios are speeds: over 1 means that the rung is faster."""
    times: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.time_us is not None:
            times.setdefault(row.shape, {}).setdefault(row.role, row)

    def faster(roles: dict[str, Row], role: str) -> float | None:
        mine, other = roles["this"].time_us, roles[role].time_us if role in roles else None
        return other / mine if mine and other else None

    return [
        Gain(
            shape,
            this.time_us,
            this.rate,
            this.unit,
            faster(roles, "before"),
            faster(roles, "torch"),
            faster(roles, "copy"),
        )
        for shape, roles in times.items()
        if (this := roles.get("this")) is not None and this.time_us is not None
    ]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _mean(values: Iterable[float | None]) -> str:
    """Geometric mean of the ratios that there are."""
    present = [value for value in values if value]
    return _ratio(statistics.geometric_mean(present)) if present else ""


def timing_table(records: Sequence[Record]) -> Table:
    """The table for a GPU: time and rate of each rung, and its speed beside the rung before, torch and a copy."""
    table = Table(box=box.SIMPLE_HEAD, title="Speed of each rung; ratios over 1 are gains")
    for name in ("rung", "shape"):
        table.add_column(name)
    for name in ("time", "rate", "over the rung before", "over torch", "over a copy"):
        table.add_column(name, justify="right")
    for record in records:
        found = gains(record.rows)
        for i, gain in enumerate(found):
            table.add_row(
                f"{record.number} {record.title}" if i == 0 else "",
                gain.shape,
                f"{gain.time_us:.1f} us",
                f"{gain.rate:.0f} {gain.unit}" if gain.rate is not None else "",
                _ratio(gain.over_before),
                _ratio(gain.over_torch),
                _ratio(gain.over_copy),
            )
        # Host time is another quantity and stays out of the mean.
        on_device = [gain for gain in found if gain.rate is not None]
        if len(on_device) > 1:
            table.add_row(
                "",
                "geometric mean",
                "",
                "",
                _mean(gain.over_before for gain in on_device),
                _mean(gain.over_torch for gain in on_device),
                _mean(gain.over_copy for gain in on_device),
                style="bold",
            )
        table.add_section()
    return table


def check_table(records: Sequence[Record]) -> Table:
    """The table without a GPU: how many results were compared, and the worst error beside torch's worst."""
    table = Table(box=box.SIMPLE_HEAD, title="Results checked against float64")
    table.add_column("rung")
    for name in ("checks", "worst error", "torch's worst"):
        table.add_column(name, justify="right")
    for record in records:
        errors = {
            role: [row.error for row in record.rows if row.role == role and row.error is not None]
            for role in ("this", "torch")
        }
        table.add_row(
            f"{record.number} {record.title}",
            str(len(errors["this"])),
            *(f"{max(errors[role]):.2e}" if errors[role] else "" for role in ("this", "torch")),
        )
    return table


def run_ladder(only: Sequence[int] = (), console: Console | None = None) -> list[Record | Failure]:
    """Run the rungs of these numbers, or all, one after the other, with a progress bar on the console.

    Rungs that are asked for by number print what they print as programs, with their questions and answers.
    """
    files = tutorial_files()
    unknown = sorted(set(only) - files.keys())
    if unknown:
        raise ValueError(f"no rung {', '.join(map(str, unknown))}: there are {min(files)} to {max(files)}")
    numbers = sorted(set(only)) or sorted(files)
    results: list[Record | Failure] = []
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    console = console or Console()

    def say(line: str) -> None:
        if only:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(numbers))
        for number in numbers:
            progress.update(task, description=f"{files[number].name}")
            results.append(run_rung(number, files[number], say))
            progress.advance(task)
    return results


def ladder(rungs: Sequence[int] = (), json_path: Path | None = None) -> int:
    """`gemmery ladder`: run the rungs, print what each gained, write the records; 0 if all went through.

    A failure prints what the rung has printed, unless that was shown while it ran.
    """
    console = Console()
    try:
        results = run_ladder(rungs, console)
    except (ValueError, FileNotFoundError) as error:
        console.print(f"ladder: {error}", style="red", markup=False)
        return 2
    records = [result for result in results if isinstance(result, Record)]
    failures = [result for result in results if isinstance(result, Failure)]

    if records:
        first = records[0]
        console.print(f"{first.device}, torch {first.torch}, Triton {first.triton}", highlight=False)
        timed = [record for record in records if not record.interpreted]
        if timed:
            console.print(timing_table(timed))
        else:
            console.print("The rungs ran through Triton's interpreter, so there is nothing to time.")
        console.print(check_table(records))
    for failure in failures:
        console.rule(
            f"rung {failure.number}, {failure.title}: failed with status {failure.status}", style="red"
        )
        if not rungs:
            console.print(failure.output, markup=False, highlight=False)
    if json_path is not None:
        write_json(json_path, [asdict(record) for record in records])
    return 1 if failures else 0
