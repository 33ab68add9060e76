"""Results of `gemmery bench` as series of numbers: what the pictures in `bench_plots` show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .results import kind, regimes
from .suites import Row

#: A result as `results.read` gives it.
Result = Mapping[str, Any]
#: Regimes in which a kernel's throughput is measured, as opposed to the host's time.
RATES = ("burst", "steady", "graph")
#: Numbers of rows of otherwise equal products that make a line over M.
LEAST_SIZES = 3


@dataclass(frozen=True)
class Mark:
    """A figure with its spread over the rounds.

    Attributes:
        name: of the row.
        x: what it is drawn over; a row's place where nothing else is.
        middle, low, high: what stands for all rounds (see `results.row_round` for times), the least and the largest.
    """

    name: str
    x: float
    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class Series:
    """Marks of one method in one regime.

    Attributes:
        of: the product that all have in common, or the result; see the function that made it.
        joined: whether the marks are of products that differ in x alone, so that a line through them means something.
    """

    of: str
    method: str
    regime: str
    marks: tuple[Mark, ...]
    joined: bool = False

    def asdict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def label(result: Result) -> str:
    """A result in words: suite, type and what else tells it apart."""
    return f"{result['suite'].replace('_', ' ')}, {kind(result)}"


def rows_of(result: Result) -> list[Mapping[str, Any]]:
    """The rows that were measured."""
    return [row for row in result["rows"] if "summary" in row]


def methods_of(result: Result) -> list[str]:
    """Ours and its peers."""
    return [result["ours"], *result["peers"]]


def seconds(name: str, x: float, row: Mapping[str, Any], regime: str, method: str) -> Mark | None:
    """A row's time; None if the method was not measured in this regime."""
    if method not in row["summary"].get(regime, {}).get("us", {}):
        return None
    figures = row["summary"][regime]
    low, high = figures["spread_us"][method]
    return Mark(name, x, figures["us"][method] * 1e-6, low * 1e-6, high * 1e-6)


def throughput(result: Result) -> list[Series]:
    """10¹² operations per second over size; marks' x is the size of a cube of as many operations."""
    found = []
    cubes = all(row["M"] == row["N"] == row["K"] and not row["batch"] for row in rows_of(result))
    for regime in [regime for regime in regimes(result) if regime in RATES]:
        for method in methods_of(result):
            marks = []
            for row in rows_of(result):
                time = seconds(row["name"], 0.0, row, regime, method)
                if time is not None:
                    flops = Row.of(row).flops
                    rates = [flops / each / 1e12 for each in (time.middle, time.high, time.low)]
                    marks.append(Mark(time.name, (flops / 2) ** (1 / 3), *rates))
            if marks:
                marks.sort(key=lambda mark: mark.x)
                found.append(Series(label(result), method, regime, tuple(marks), joined=cubes))
    return found


def ratios(result: Result) -> list[Series]:
    """The time of each peer over ours, round by round; marks' x is the row's place in the result."""
    found = []
    for regime in regimes(result):
        for peer in result["peers"]:
            marks = []
            for place, row in enumerate(rows_of(result)):
                ratio = row["summary"].get(regime, {}).get("ratio", {}).get(peer)
                if ratio is not None:
                    marks.append(Mark(row["name"], place, ratio["median"], ratio["min"], ratio["max"]))
            if marks:
                found.append(Series(label(result), peer, regime, tuple(marks)))
    return found


def scaling(result: Result) -> list[Series]:
    """Seconds over M for products that differ in M alone, where there are at least `LEAST_SIZES` of these."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows_of(result):
        groups.setdefault(_but_rows(row), []).append(row)
    found = []
    for same in groups.values():
        if len({row["M"] for row in same}) < LEAST_SIZES:
            continue
        for regime in [regime for regime in regimes(result) if regime in RATES]:
            found += list(_over_rows(result, same, regime))
    return found


def _over_rows(result: Result, rows: Sequence[Mapping[str, Any]], regime: str) -> Iterator[Series]:
    of = _common(rows[0])
    for method in methods_of(result):
        times = [seconds(row["name"], row["M"], row, regime, method) for row in rows]
        marks = sorted((time for time in times if time is not None), key=lambda mark: mark.x)
        if len(marks) >= LEAST_SIZES:
            yield Series(of, method, regime, tuple(marks), joined=True)


def _but_rows(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """All that makes a product, but its number of rows."""
    names = ("N", "K", "a", "b", "out", "dtype", "call", "batch_invariant", "epilogue", "weight", "scales")
    return (tuple(row["batch"]), *(row.get(name) for name in names))


def _common(row: Mapping[str, Any]) -> str:
    """The properties that products of different M share, in words."""
    sizes = "×".join(str(size) for size in (*row["batch"], "M", row["N"], row["K"]))
    more = [row.get("weight"), row.get("scales"), (row.get("epilogue") or "").replace("_", " ")]
    return ", ".join([f"{sizes} {row['dtype']}", *(word for word in more if word)])
