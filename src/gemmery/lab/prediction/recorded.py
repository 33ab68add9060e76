"""Recorded measurements as problems with their times: results of `gemmery bench`, and the selector's tables."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...devices import TABLE, Device
from ...problem import Config, Problem
from ...schedules import REGISTRY
from ...select import measured
from ...select.space import kind_of, row_of, tiles_of
from .. import results
from ..abstract import of_row
from ..suites import RANDOM, Row

#: The name of the vendor's BLAS among the peers of the bench.
CUBLAS = "cublas"


@dataclass(frozen=True)
class Recorded:
    """A row of a result.

    Attributes:
        suite: the suite's name, with its type where it is run in several, and the version of Triton that is not 3.6.
        row, dtype: what was measured.
        problem: the row's, on the GPU that it was measured on.
        config: what ran; None if the result does not say, or names one that this version does not have.
        copied: whether matrices were copied before; None if the result does not say.
        seconds: by method, the median over the rounds; spread: the least and the largest.
    """

    suite: str
    row: Row
    dtype: str
    problem: Problem
    config: Config | None
    copied: bool | None
    seconds: dict[str, float]
    spread: dict[str, tuple[float, float]]

    @property
    def outdated(self) -> bool:
        """Whether what ran is no config of this version, so that its time says nothing of this version's kernels."""
        return _is_outdated(self.config, self.copied)

    @property
    def shape(self) -> tuple[int, ...]:
        """The key of rows that are held out together."""
        return self.row.M, self.row.N, self.row.K


def folder() -> Path | None:
    """benchmarks/results of the repository that contains this package; None if it is installed elsewhere."""
    found = Path(__file__).resolve().parents[4] / "benchmarks" / "results"
    return found if found.is_dir() else None


def device_of(name: str) -> Device | None:
    """The row of the device table for a GPU by the name that its driver gives."""
    words = f" {name.replace('-', ' ')} "
    return next((row for row in TABLE.values() if words.startswith(f" {row.name} ")), None)


def read_result(path: Path, regime: str = "burst") -> list[Recorded]:
    """The rows of a result that were measured in a regime; none where its GPU is not in the device table.

    Raises:
        ValueError: the file is not a result of `gemmery bench`.
    """
    data = results.read(path)
    device = device_of(data["gpu"])
    if device is None:
        return []
    measured_rows = [row for row in data["rows"] if regime in row.get("summary", {})]
    return [_recorded(path.stem, row, regime, device) for row in measured_rows]


def _recorded(suite: str, record: dict[str, Any], regime: str, device: Device) -> Recorded:
    row = Row.of(record)
    config, copied = _chosen(record)
    summary = record["summary"][regime]
    return Recorded(
        suite=suite, row=row, dtype=record["dtype"], problem=of_row(row, record["dtype"], device),
        config=config, copied=copied,
        seconds={method: us * 1e-6 for method, us in summary["median_us"].items()},
        spread={method: (least * 1e-6, most * 1e-6) for method, (least, most) in summary["spread_us"].items()},
    )  # fmt: skip


def _chosen(record: dict[str, Any]) -> tuple[Config | None, bool | None]:
    """The config that a row's plan names, and whether matrices were copied; see `Recorded`."""
    _, _, chosen = record.get("plan", "").partition(": ")
    words = chosen.split(", ")
    return (_config(words[0]), len(words) > 1) if chosen else (None, None)


def _is_outdated(config: Config | None, copied: bool | None) -> bool:
    return config is None and copied is not None


def _config(text: str) -> Config | None:
    """The config of a text; None for a text of an earlier version that is not a valid config any more."""
    try:
        return Config.of(text)
    except ValueError:
        return None


def read_results(place: Path, regime: str = "burst") -> list[Recorded]:
    """All rows of a folder's results, except those of `suites.RANDOM`, which are never fitted.

    Raises:
        ValueError: a JSON file in it is not a result.
    """
    return [row for path in fitted(place) for row in read_result(path, regime)]


def fitted(place: Path) -> list[Path]:
    """The results in a folder that may be fitted to; ValueError as for `read_results`."""
    return [path for path in sorted(place.glob("*.json")) if results.read(path)["suite"] not in RANDOM]


def standing(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a result in the regime "burst", without those whose config this version does not have."""
    rows = [row for row in result["rows"] if "burst" in row.get("summary", {})]
    return [row for row in rows if not _is_outdated(*_chosen(row))]


def newest_last(place: Path) -> list[tuple[Path, dict[str, Any]]]:
    """A folder's results, ordered so that the last one with a row counts.

    Those of a Triton that has the same schedules as the one here come after the others, and then the later ones.

    Raises:
        ValueError: a JSON file in it is not a result.
    """
    found = [(path, results.read(path)) for path in sorted(place.glob("*.json"))]

    def order(one: tuple[Path, dict[str, Any]]) -> tuple[bool, str]:
        _, result = one
        version = ".".join(result["triton"].split(".")[:2])
        alike = all(
            (version in schedule.versions) == schedule.available()
            for schedule in REGISTRY.values()
            if schedule.versions
        )
        return alike, str(result.get("date", ""))

    return sorted(found, key=order)


@dataclass(frozen=True)
class Measured:
    """The recorded times of a product.

    Attributes:
        seconds: by method, of the round that the ratio is of; spread: the least and the largest of all rounds.
        config: gemmery's kernel, "" if the result does not say.
        source: the result's file, with the version of Triton and the day.
    """

    seconds: dict[str, float]
    spread: dict[str, tuple[float, float]]
    config: str
    source: str


@functools.cache
def _by_sizes(place: Path, device: Device) -> dict[tuple[int, int, int], list[tuple[str, dict[str, Any]]]]:
    """A folder's rows of a GPU that are `standing`, by M, N and K, with the source of each."""
    found: dict[tuple[int, int, int], list[tuple[str, dict[str, Any]]]] = {}
    for path, result in newest_last(place):
        if device_of(result["gpu"]) == device:
            source = f"{path.name}, Triton {result['triton']}, {str(result.get('date', ''))[:10]}"
            for row in standing(result):
                found.setdefault((row["M"], row["N"], row["K"]), []).append((source, row))
    return found


def measured_of(problem: Problem) -> Measured | None:
    """The recorded times of exactly this product on its GPU; None if there are none, or no results are available."""
    place = folder()
    if place is None:
        return None
    rows = _by_sizes(place, problem.device).get((problem.M, problem.N, problem.K), [])
    for source, record in reversed(rows):
        row = _recorded("", record, "burst", problem.device)
        if row.problem == problem:
            # Of the round that the row's ratio is of, as the tables show it.
            shown = record["summary"]["burst"]["us"]
            seconds = {name: shown[name] * 1e-6 for name in ("gemmery", CUBLAS) if name in row.seconds}
            spread = {name: row.spread[name] for name in seconds}
            return Measured(seconds, spread, "" if row.config is None else str(row.config), source)
    return None


@dataclass(frozen=True)
class Timed:
    """A config's time for a problem in a table of the selector."""

    table: str
    problem: Problem
    config: Config
    seconds: float


def tables(device: Device) -> list[measured.TableFile]:
    """The selector's tables of a device, except those of the Triton that streams, which have the same shapes."""
    return [table for table in measured.tables_of(device) if not table.suffix.endswith("-streamed")]


def read_tables(device: Device) -> Iterator[Timed]:
    """For each shape of the selector's tables of a device, the config that was the quickest."""
    for path, name, _ in tables(device):
        data = json.loads(path.read_text(encoding="utf-8"))
        for shape, times in zip(data["shapes"], data["microseconds"], strict=True):
            problem = measured._problem(shape, device, torch.bfloat16, name)
            known = {row_of(tile.config) for tile in tiles_of(device.target.family, kind_of(problem))}
            timed = [
                (us, config)
                for us, config in zip(times, data["configs"], strict=True)
                if us is not None and row_of(Config.of(config)) in known
            ]
            if timed:
                us, config = min(timed)
                yield Timed(path.stem, problem, Config.of(config), float(measured.seconds_of(us, name)))
