"""The commands `tune` and `warmup`: their requests, their progress on a terminal, their results as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from .. import devices
from ..devices import Device
from ..dtypes import DTYPE_NAMES, OUT_DTYPES, Precision
from ..files import read_json, write_json
from ..layout import make_problem
from ..problem import Problem
from ..select import log, store
from ..select.shapes import dtype_named, problem_of, sizes
from ..tuning.tuner import Progress, TuneResult, tune_problems
from ..tuning.warm import MOST_ROWS, Weight
from ..tuning.warm import warmup as compile_all
from . import suites
from .inputs import KINDS, make_operand
from .suites import Row

#: Exit statuses: there is nothing to do here, and the user pressed Ctrl-C.
NOTHING, INTERRUPTED = 2, 130


@dataclass(frozen=True)
class Kind:
    """The meaning of a type's name on the command line."""

    dtype: torch.dtype
    precision: Precision = "ieee"
    fast_accum: bool = False


def kind_named(name: str) -> Kind:
    """A type by its name in the bench, or the short name of torch's type.

    Raises:
        ValueError: there is none.
    """
    if name in KINDS:
        return Kind(KINDS[name].dtype, KINDS[name].precision, KINDS[name].fast_accum)
    try:
        return Kind(dtype_named(name))
    except ValueError:
        short = [name for dtype, name in DTYPE_NAMES.items() if dtype in OUT_DTYPES]
        known = ", ".join(dict.fromkeys([*KINDS, *short]))
        raise ValueError(f"dtype is {name!r}; it must be one of {known}") from None


# --- what to tune ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """The request of `gemmery tune`.

    Attributes:
        suites, shapes: names of suites, and texts such as 64x4096x4096 or 8x64x4096x4096 with a batch.
        log: a file that GEMMERY_LOG made.
        dtypes, layout, bias: of the shapes; types also of suites whose rows have none.
    """

    suites: Sequence[str] = ()
    shapes: Sequence[str] = ()
    log: Path | None = None
    dtypes: Sequence[str] = ("bf16",)
    layout: str = "NT"
    bias: bool = False

    def problems(self, device: Device) -> list[Problem]:
        """The problems, each once.

        Raises:
            ValueError: a suite, shape, type or line of the log is invalid.
            OSError: the log can't be read.
        """
        kinds = [kind_named(name) for name in self.dtypes]
        found: list[Problem] = []
        for name in self.suites:
            if name in suites.RANDOM:
                raise ValueError(
                    f"suite {name}: it can't be tuned, because it measures untuned shapes; name another "
                    "suite, or shapes"
                )
            for row in suites.load(name):
                found += [
                    problem_of_row(row, kind, device)
                    for kind in ([kind_named(row.dtype)] if row.dtype else kinds)
                ]
        for text in self.shapes:
            *batch, M, N, K = sizes(text)
            found += [
                problem_of(
                    M, N, K, dtype=kind.dtype, layout=self.layout, batch=batch, bias=self.bias,
                    precision=kind.precision, fast_accum=kind.fast_accum, device=device,
                )
                for kind in kinds
            ]  # fmt: skip
        if self.log is not None:
            found += log.read(self.log, device)
        return list(dict.fromkeys(found))


def problem_of_row(row: Row, kind: Kind, device: Device) -> Problem:
    """The problem of a row of a suite."""

    def operand(name: str, dtype: torch.dtype) -> torch.Tensor:
        return make_operand(row, name, lambda shape: torch.empty(tuple(shape), dtype=dtype, device="meta"))

    a, b = operand("a", kind.dtype), operand("b", kind.dtype)
    out = operand("out", OUT_DTYPES[kind.dtype][0])
    precision = kind.precision if kind.precision in device.target.precisions else "ieee"
    return make_problem(
        a, b, out, None, scaled=False, precision=precision, fast_accum=kind.fast_accum,
        batch_invariant=row.batch_invariant, device=device,
    )  # fmt: skip


# --- gemmery tune ---------------------------------------------------------------------------------------------------


def gpu_here() -> Device | None:
    """The current GPU's row of the device table; None if there is no GPU, or kernels are interpreted."""
    if devices.INTERPRETED or not torch.cuda.is_available():
        return None
    return devices.current(torch.device("cuda"))


def tune(
    problems: Sequence[Problem], *, exhaustive: bool = False, again: bool = False, seconds: float | None = None,
    json_path: Path | None = None, console: Console | None = None,
) -> int:  # fmt: skip
    """Tune problems on the current GPU, as `tune_problems` does; returns the exit status."""
    console = Console() if console is None else console
    if gpu_here() is None:
        console.print("No GPU here, so there is nothing to measure.")
        M, N, K = (problems[0].M, problems[0].N, problems[0].K) if problems else (4096, 4096, 4096)
        console.print(
            f"Run gemmery explain {M} {N} {K} --device H200 to see the untuned choice.", soft_wrap=True
        )
        return NOTHING
    results: list[TuneResult] = []
    status = 0
    with _TuneDisplay(console, results) as display:
        try:
            tune_problems(
                problems, exhaustive=exhaustive, again=again, seconds=seconds, progress=display.progress,
                each=display.end,
            )  # fmt: skip
        except KeyboardInterrupt:
            status = INTERRUPTED
    _say_where(console, status)
    _write(json_path, [result.asdict() for result in results])
    return status


def _write(path: Path | None, values: object) -> None:
    if path is not None:
        write_json(path, values)


class _TuneDisplay:
    """A line for each problem that is done, over a bar with the time left."""

    def __init__(self, console: Console, results: list[TuneResult]) -> None:
        self.console, self.results = console, results
        self.bar = Bar(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"), console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self.task: TaskID | None = None

    def __enter__(self) -> _TuneDisplay:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        gains = [result.gain for result in self.results if result.gain is not None]
        if gains:
            mean = math.exp(sum(map(math.log, gains)) / len(gains))
            said = f"untuned / tuned time: geometric mean {mean:.3f}, largest {max(gains):.3f}"
            self.console.print(f"{len(gains)} problems, {said}", highlight=False)

    def progress(self, state: Progress) -> None:
        """Show how far the run is."""
        p = state.problem
        text = f"{state.number} of {state.problems}: {p.M}x{p.N}x{p.K}"
        left = f"{duration(state.left)} left"
        if self.task is None:
            self.task = self.bar.add_task(text, total=state.total, left=left)
        self.bar.update(self.task, completed=state.done, total=state.total, description=text, left=left)

    def end(self, result: TuneResult) -> None:
        """Print a problem's result."""
        self.results.append(result)
        self.console.print(line(result), markup=False, highlight=False, soft_wrap=True)


def line(result: TuneResult) -> str:
    """A result in one line."""
    said = [str(result.problem)]
    if result.best is None:
        said.append("nothing measured")
    else:
        said.append(f"{result.best} {result.seconds[result.best] * 1e6:.1f} µs")
    if result.gain is not None:
        said.append(
            "as untuned" if result.best == result.untuned else f"{result.gain:.3f} times as fast as untuned"
        )
    said.append(f"{result.measured} of {len(result.seconds)} timings new")
    if result.refused:
        said.append(f"{len(result.refused)} can't run")
    if result.unmeasured:
        said.append(f"{len(result.unmeasured)} not measured: {result.failure}")
    return "; ".join(said)


def duration(seconds: float) -> str:
    """A time in words: 45 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _say_where(console: Console, status: int) -> None:
    kept = store.current()
    where = "nowhere: GEMMERY_STORE turns the store off" if kept is None else f"in {kept.path or 'memory'}"
    said = f"Timings are kept {where}."
    if status == INTERRUPTED:
        said = f"Interrupted. {said} The same command goes on from here."
    console.print(said, markup=False, highlight=False, soft_wrap=True)


# --- gemmery warmup -------------------------------------------------------------------------------------------------


def warmup(
    weights: Sequence[Weight], *, max_m: int = MOST_ROWS, json_path: Path | None = None,
    console: Console | None = None,
) -> int:  # fmt: skip
    """Compile all kernels for weights, as `gemmery.warmup` does; returns the exit status."""
    console = Console() if console is None else console
    if not torch.cuda.is_available() and not devices.INTERPRETED:
        console.print("No GPU here, so there is nothing to compile for.")
        return NOTHING
    with _bar(console) as (bar, task):
        warmed = compile_all(
            *weights, max_m=max_m,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    table = Table("weight", "N×K", "type", "kernels", "configs")
    for entry in warmed:
        p, configs = entry.problem, "\n".join(map(str, entry.kernels))
        table.add_row(
            ", ".join(entry.names), f"{p.N}×{p.K}", DTYPE_NAMES[p.b.dtype], str(len(entry.kernels)), configs
        )
    console.print(table)
    _write(json_path, [entry.asdict() for entry in warmed])
    return 0


def read_weights(path: Path, dtype: str = "bf16") -> list[Weight]:
    """The weights of a file, a JSON list of descriptions; `dtype` is the type of those that name none.

    Raises:
        ValueError: the file or the type is not valid.
        OSError: the file can't be read.
    """
    data = read_json(path)
    if not isinstance(data, list) or not data:
        raise ValueError(
            f'{path}: must be a list of weights, such as [{{"name": "qkv", "N": 6144, "K": 4096}}]'
        )
    kind = kind_named(dtype)
    weights = []
    for number, values in enumerate(data, 1):
        try:
            weight = Weight.of(values, kind.dtype)
            asked = "precision" in values or "dtype" in values
            weights.append(weight if asked else replace(weight, precision=kind.precision))
        except ValueError as error:
            raise ValueError(f"{path}, weight {number}: {error}") from error
    return weights


@contextmanager
def _bar(console: Console) -> Iterator[tuple[Bar, TaskID]]:
    columns: Iterable[Any] = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar, bar.add_task("numbers of rows", total=None)
