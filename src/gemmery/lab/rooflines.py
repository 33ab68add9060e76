"""Rooflines of a GPU with products: the datasheet's limits, predictions and measurements.

The model is that of S. Williams, A. Waterman and D. Patterson, "Roofline: an insightful visual performance model for
multicore architectures", CACM 52 (2009): a product runs at no more than the peak rate, and at no more than its
operations per byte times the bandwidth of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..devices import Device
from ..problem import Problem
from ..select.shapes import check_sizes, short_name
from . import suites
from .abstract import abstract_problem, of_row
from .inputs import KINDS
from .prediction import predict, recorded
from .prediction.calibration import mark_of
from .suites import Row

#: Names of types with a rate, and the name of the rate.
UNITS = {
    "bf16": "bf16, fp16", "tf32": "TF32", "fp32": "fp32", "fp64": "fp64", "fp8": "fp8", "int8": "int8",
}  # fmt: skip
#: Other names of types that run at one of these rates.
SAME = {"fp16": "bf16", "fp8fast": "fp8"}


def break_even(rate: float, bandwidth: float, moved: float = 6) -> float:
    """The size M = N = K of a square product that computes as long as it reads A and B and writes the output.

    That is the M with `M**2 * moved / bandwidth = 2 * M**3 / rate`: there the operations per byte, `2 * M / moved`, are
    those of the ridge, `rate / bandwidth`. Smaller products wait for memory, larger ones for the arithmetic.

    Args:
        rate: operations per second; a multiply-add is two.
        bandwidth: bytes per second.
        moved: bytes of an element of A, of one of B and of one of the output together: 6 where all have 16 bits.

    Raises:
        ValueError: an argument is not positive.

    Example:
        >>> round(break_even(rate=71e12, bandwidth=936e9))  # bf16 on an RTX 3090, 75.9 operations per byte
        228
    """
    for name, value in (("rate", rate), ("bandwidth", bandwidth), ("moved", moved)):
        if value <= 0:
            raise ValueError(f"break_even: {name} is {value}; it must be positive")
    return moved * rate / (2 * bandwidth)


@dataclass(frozen=True)
class Roof:
    """The roofline of a type.

    Attributes:
        dtype: its name in the bench; label: in words.
        rate: peak, operations per second; bandwidth: of memory, bytes per second.
        ridge: operations per byte at which both limits meet.
        break_even: the size of a square product with that many operations per byte, see the function.
    """

    dtype: str
    label: str
    rate: float
    bandwidth: float
    ridge: float
    break_even: float


@dataclass(frozen=True)
class Point:
    """A product under its roof.

    Attributes:
        name: of the suite's row, or the sizes; suite: "" for sizes.
        dtype: as the bench calls it.
        intensity: operations per byte of the least traffic.
        flops: operations.
        roofline: seconds that the datasheet allows.
        predicted: seconds by "gemmery" and "cublas"; None if there is no such product.
        measured: the same where a result has it, see `results.row_round`; spread: least and largest.
    """

    name: str
    suite: str
    problem: str
    dtype: str
    intensity: float
    flops: int
    roofline: float
    predicted: dict[str, float | None]
    measured: dict[str, float]
    spread: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Rooflines:
    """The rooflines of a GPU, one for each rate that it has, and the products on them."""

    device: Device
    roofs: tuple[Roof, ...]
    points: tuple[Point, ...]

    @property
    def mark(self) -> str:
        """That nothing was measured on the GPU; "" if something was."""
        return mark_of(self.device)

    def asdict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON; times in seconds."""
        return {
            "device": self.device.name,
            "measured": not self.mark,
            "mark": self.mark,
            "roofs": [asdict(roof) for roof in self.roofs],
            "points": [asdict(point) for point in self.points],
        }

    def __str__(self) -> str:
        lines = [f"*** {self.mark} ***"] if self.mark else []
        lines.append(f"{self.device.name}: memory {self.device.bandwidth / 1e9:.0f} GB/s")
        lines += [
            f"  {roof.label:12} {roof.rate / 1e12:7.1f} T{'OP' if roof.dtype == 'int8' else 'FLOP'}/s, ridge at "
            f"{roof.ridge:6.1f} per byte, break-even at M = N = K = {roof.break_even:.0f}"
            for roof in self.roofs
        ]
        if self.points:
            width = max(len(point.name) for point in self.points)
            lines += [
                "",
                f"{'':{width}} {'per byte':>9} {'roofline µs':>12}  part of it reached, predicted (measured)",
            ]
            lines += [f"{point.name:{width}} {_line(point)}" for point in self.points]
        return "\n".join(lines)


def _line(point: Point) -> str:
    said = []
    for method, seconds in point.predicted.items():
        if seconds is not None:
            found = point.measured.get(method)
            measured = f" ({_share(point.roofline / found)})" if found else ""
            said.append(f"{method} {_share(point.roofline / seconds)}{measured}")
    micros = point.roofline * 1e6
    return f"{point.intensity:9.1f} {micros:12.{1 if micros >= 1 else 3}f}  {', '.join(said)}"


def _share(value: float) -> str:
    """A part of 1; those of products that are all latency need a digit that is not 0."""
    return f"{value:.0%}" if value >= 0.01 else f"{100 * value:.1g}%"


def roof_of(device: Device, dtype: str) -> Roof:
    """The roofline of a type, which may be any of the bench's."""
    dtype = SAME.get(dtype, dtype)
    kind = KINDS[dtype]
    precision = kind.precision if kind.precision in device.target.precisions else "ieee"
    rate = device.rate(kind.dtype, precision)
    # A product of one element moves one of each matrix.
    even = break_even(rate, device.bandwidth, abstract_problem(1, 1, 1, dtype=dtype, device=device).bytes)
    return Roof(dtype, UNITS[dtype], rate, device.bandwidth, rate / device.bandwidth, even)


def roofs_of(device: Device) -> Iterator[Roof]:
    """The rooflines of a GPU; a type without units has none."""
    own = {"bf16": device.fp16, "tf32": device.tf32, "fp32": device.fp32, "fp64": device.fp64, "fp8": device.fp8,
           "int8": device.int8}  # fmt: skip
    return (roof_of(device, dtype) for dtype, rate in own.items() if rate)


def rooflines(
    device: Device,
    shapes: Sequence[tuple[int, int, int]] = (),
    suite_names: Sequence[str] = (),
    dtype: str = "bf16",
    results: Path | None = None,
) -> Rooflines:
    """The rooflines of a GPU, with products on them.

    Args:
        shapes: M, N and K of products with a weight (N, K) in `dtype`.
        suite_names: suites whose rows are shown; rows without a type are in `dtype`.
        results: a folder of results, of which those of this GPU are shown; None for predictions alone.

    Raises:
        ValueError: a size, a type or a suite is invalid, or a JSON file in the folder is not a result.
    """
    dtype = short_name(dtype)
    if dtype not in KINDS:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(KINDS)}")
    known = Known({} if results is None else results_of(device, results))
    found = []
    for shape in shapes:
        row = Row("×".join(map(str, shape)), *shape)
        problem = abstract_problem(*shape, dtype=dtype, device=device)
        found.append(_point(row.name, "", dtype, problem, known.plain(row, dtype)))
    for name in suite_names:
        for row in suites.load(name):
            kind = row.dtype or dtype
            measured = known.row(suites.source(name), row, kind)
            found.append(_point(row.name, name, kind, of_row(row, kind, device), measured))
    return Rooflines(device, tuple(roofs_of(device)), tuple(found))


def triples(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Sizes one after the other as products.

    Raises: ValueError: their number is not a multiple of three.
    """
    if len(sizes) % 3:
        raise ValueError(f"{len(sizes)} sizes given; M, N and K are wanted, for each product")
    found = [(sizes[i], sizes[i + 1], sizes[i + 2]) for i in range(0, len(sizes), 3)]
    for M, N, K in found:
        check_sizes(M, N, K)
    return found


def results_of(device: Device, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By suite, the rows of a folder's results that a GPU was timed on, and that are `recorded.standing`.

    Of several results of a row the last in the list counts, see `recorded.newest_last`.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for _, result in recorded.newest_last(folder):
        if recorded.device_of(result["gpu"]) == device:
            found.setdefault(result["suite"], []).extend(recorded.standing(result))
    return found


@dataclass(frozen=True)
class Known:
    """The measured results, by suite, see `results_of`."""

    rows: dict[str, list[dict[str, Any]]]

    def row(self, suite: str, row: Row, dtype: str) -> dict[str, Any] | None:
        """A suite's row in a type."""
        found = [one for one in self.rows.get(suite, []) if (one["name"], one["dtype"]) == (row.name, dtype)]
        return found[-1] if found else None

    def plain(self, row: Row, dtype: str) -> dict[str, Any] | None:
        """A row of any suite that is the same product, called in the same way."""
        wanted = replace(row, dtype=dtype)
        everything = (one for rows in self.rows.values() for one in rows)
        sizes = (one for one in everything if (one["M"], one["N"], one["K"]) == (row.M, row.N, row.K))
        found = [one for one in sizes if replace(Row.of(one), name=row.name) == wanted]
        return found[-1] if found else None


def _point(name: str, suite: str, dtype: str, problem: Problem, row: dict[str, Any] | None = None) -> Point:
    prediction = predict(problem)
    figures = {"us": {}, "spread_us": {}} if row is None else row["summary"]["burst"]
    return Point(
        name=name,
        suite=suite,
        problem=str(problem),
        dtype=dtype,
        intensity=prediction.intensity,
        flops=problem.flops,
        roofline=prediction.roofline,
        predicted={"gemmery": prediction.gemmery, "cublas": prediction.cublas},
        measured={method: us * 1e-6 for method, us in figures["us"].items()},
        spread={method: (low * 1e-6, high * 1e-6) for method, (low, high) in figures["spread_us"].items()},
    )
