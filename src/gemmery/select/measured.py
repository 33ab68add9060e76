"""Measurements on a GPU that correct the model.

A table holds the times of a space's configs for a number of shapes. For another shape, a config's prediction is
multiplied by the ratio of its measured to its predicted times, averaged over the shapes nearby (a Nadaraya-Watson
kernel regression in the logarithms of the sizes). Far from all measurements, the model is not corrected. For packed
weights, not every tile is timed with every number of rows. A config without a time gets the average ratio of its
schedule's configs that were timed nearby, and a little more: otherwise it would be preferred wherever the model is too
optimistic.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from .. import schedules
from ..devices import Device
from ..operands import Dense, Packed, Spec
from ..problem import Config, Problem
from .model import costs
from .space import Space, kind_of, space_of
from .tiles import FAMILIES

TABLES = Path(__file__).with_name("tables")
#: The reach of a measurement, in doublings of a size or of the parts along K.
REACH = 0.8
#: The same, in doublings of a size, for products of at most this many seconds at the tensor cores' rate. Their time
#: depends on how tiles fill the multiprocessors, which differs between sizes.
REACH_SHORT, SHORT = 0.25, 30e-6
#: The same for packed weights, for which the best tile changes faster: its rows of A decide how often the weight is
#: unpacked. Here it is how much nearer a shape must be to count for more; the nearest shapes reach `FAR_PACKED`.
REACH_PACKED, FAR_PACKED = 0.2, 1.5
#: Seconds by which times in tables of packed weights are longer than `Stopwatch`'s, to which the models of other
#: schedules are fitted: 72 configs had 0.88 µs more in the median (0.32 to 1.86, 10th and 90th percentile). Most
#: launches followed one of another kernel, so they probably had to fetch their code.
OTHER_CODE = 0.8e-6
#: The weight of the model itself; a measurement of the same shape has 1.
PRIOR = 0.3
#: The logarithm of a further factor for a config of a packed weight that was not timed, since there was a reason not
#: to time it, such as too few registers. A schedule without any time gets the same factor, unless its model is fitted
#: to the format, see `Schedule.fits`.
DOUBT = 0.1


#: Formats of packed weights that have their own tables, with the bits of a number and the size of a group. Other
#: formats with the same bits use the first of these, whose tiles they share.
PACKED = {
    "int4": (4, 128),
    "int8": (8, 0),
    "e4m3": (8, 0),
    "mxfp4": (4, 32),
    "nvfp4": (4, 16),
    "nf4": (4, 64),
}


def table_name(problem: Problem) -> str:
    """The name of the table that corrects a problem: that of its kind of operand, or of its format."""
    b = problem.b
    if not b.unpacks:
        return kind_of(problem)
    alike = (name for name, (bits, _) in PACKED.items() if bits == b.bits)
    return f"packed {b.format if b.format in PACKED else next(alike, b.format)}"


def _is_packed(name: str) -> bool:
    """Whether a table with this `table_name` is for packed weights."""
    return name.startswith("packed ")


class TableFile(NamedTuple):
    """A shipped table: its file, its `table_name`, and its suffix of `Schedule.tables`."""

    path: Path
    name: str
    suffix: str


def file_name(gpu: str, name: str, suffix: str = "") -> str:
    """The name of a table's file, by the GPU's name, the `table_name`, and an entry of `Schedule.tables`."""
    return "-".join(part.replace(" ", "-") for part in (gpu.lower(), name, suffix) if part) + ".json"


def tables_of(device: Device) -> list[TableFile]:
    """The tables of a device."""
    names = [*FAMILIES[device.target.family], *(f"packed {format}" for format in PACKED)]
    files = [
        TableFile(TABLES / file_name(device.name, name, suffix), name, suffix)
        for name in names
        for suffix in ("", *(each for schedule in schedules.REGISTRY.values() for each in schedule.tables))
    ]
    return sorted(table for table in files if table.path.is_file())


def _problem(shape: Sequence[int], device: Device, dtype: Any, name: str) -> Problem:
    """A product of aligned matrices, A and the output in rows and B a weight (N, K)."""
    batch, M, N, K = shape
    sizes = (batch,) if batch > 1 else ()

    def matrix(rows: int, cols: int, transposed: bool) -> Dense:
        steps = (rows * cols,) if sizes else ()
        return Dense(dtype, steps, *((1, rows) if transposed else (cols, 1)), True)

    b: Spec = matrix(K, N, True)
    if _is_packed(name):
        format = name.removeprefix("packed ")
        b = Packed.of(dtype, format, *PACKED[format], N=N, K=K, steps=b.steps, matrices=batch)
    return Problem(
        M=M, N=N, K=K, batch=sizes, device=device, a=matrix(M, K, False), b=b, out=matrix(M, N, False)
    )


@dataclass(frozen=True, eq=False)
class Table:
    """Measurements of one kind of operand on one device.

    Attributes:
        column: by config, its place among the columns.
        schedules: (configs,), the schedule that each has.
        places: (shapes, 3), logarithms of rows in all matrices, N and K.
        known: (shapes, configs), 1 where there is a measurement.
        residuals: (shapes, configs), logarithm of measured over predicted time; 0 if there is none.
        near: (configs, configs), the weight of each config for another one of its row, which cuts K into other parts.
        reach, far: see `REACH` and `REACH_PACKED`.
        found: what `_find` found.
        name: its `table_name`.
    """

    column: dict[Config, int]
    schedules: np.ndarray
    places: np.ndarray
    known: np.ndarray
    residuals: np.ndarray
    near: np.ndarray
    reach: float = REACH
    far: float = REACH
    name: str = ""
    found: WeakKeyDictionary[Space, tuple[list[str], np.ndarray, np.ndarray]] = field(
        default_factory=WeakKeyDictionary
    )

    @classmethod
    def read(cls, path: Path, device: Device, dtype: Any, *more: Path, name: str = "half") -> Table:
        """The table of files: shapes as [batch, M, N, K], configs, and microseconds by shape and config or null."""
        parts = [json.loads(each.read_text(encoding="utf-8")) for each in (path, *more)]
        space = space_of(_problem(parts[0]["shapes"][0], device, dtype, name))
        rows: dict[tuple[int, ...], np.ndarray] = {}
        for data in parts:
            for shape, found in zip(map(tuple, data["shapes"]), _times(data, space, name), strict=True):
                # For each shape, a later file replaces an earlier one.
                rows[shape] = np.where(np.isnan(found), rows.get(shape, np.nan), found)
        shapes, times = list(rows), np.stack(list(rows.values()))
        # Most tiles of any width are in no table.
        timed = np.isfinite(times).any(axis=0)
        space, times = space.where(timed), times[:, timed]
        predicted = np.stack([costs(_problem(s, device, dtype, name), space).total for s in shapes])
        residuals = np.log(times / predicted)
        known = np.isfinite(residuals)
        batch, M, N, K = np.array(shapes, dtype=float).T
        row = np.unique([id(tile) for tile in space.tiles], return_inverse=True)[1]
        apart = np.subtract.outer(np.log2(space.split_k), np.log2(space.split_k))
        packed = _is_packed(name)
        reach, far = (REACH_PACKED, FAR_PACKED) if packed else (REACH, REACH)
        near = np.equal.outer(row, row) * np.exp(-(apart**2) / (2 * reach**2))
        return cls(
            column={config: place for place, config in enumerate(space.configs)},
            schedules=space.schedule,
            places=np.log2(np.stack([batch * M, N, K], axis=1)),
            known=known.astype(float),
            residuals=np.where(known, residuals, 0.0),
            near=near,
            reach=reach,
            far=far,
            name=name,
        )

    @property
    def partial(self) -> bool:
        """Whether some configs were not timed at each shape, and get the corrections of the others."""
        return _is_packed(self.name)

    def factor(self, problem: Problem, space: Space, M: np.ndarray) -> np.ndarray:
        """The factors of predictions for `M` rows, of shape (m, 1): an array of (m, configs)."""
        rows = np.log2(np.maximum(M * problem.matrices, 1))
        fixed = np.log2([max(problem.N, 1), max(problem.K, 1)])
        here = np.concatenate([rows, np.broadcast_to(fixed, (len(rows), 2))], axis=1)
        apart = ((here[:, None, :] - self.places[None, :, :]) ** 2).sum(axis=2)
        if space not in self.found:
            self.found[space] = self._find(space)
        present, of, columns = self.found[space]
        least = problem.matrices * 2.0 * M * problem.N * problem.K / problem.device.rate(problem.a.dtype)
        reach = np.where((least <= SHORT) & (not self.partial), REACH_SHORT, self.reach)
        parts = [self._log(apart, reach, schedule) for schedule in present]
        return np.asarray(np.exp(np.stack(parts)[of, :, columns].T))

    def _find(self, space: Space) -> tuple[list[str], np.ndarray, np.ndarray]:
        """The schedules of a space, and of each config the number of its own, and its column: -1 if it has none."""
        present = sorted(space.by_schedule)
        of = np.array([present.index(schedule) for schedule in space.schedule.tolist()])
        return present, of, np.array([self.column.get(config, -1) for config in space.configs])

    def _log(self, apart: np.ndarray, reach: np.ndarray, schedule: str) -> np.ndarray:
        """Logarithms of factors by shape and config. Only those of one schedule are valid.

        The times of other schedules are not used for this one, which not every Triton has. Without times, it gets
        `DOUBT`.

        Args:
            apart: (m, shapes), squares of distances.
            reach: (m, 1).
        """
        own = self.schedules == schedule
        there = self.known[:, own].any(axis=1)
        if not there.any():
            is_doubted = self.partial and self.name not in schedules.of(schedule).fits
            return np.full((len(apart), len(own) + 1), DOUBT * is_doubted)
        apart, known, residuals = apart[:, there], self.known[there] * own, self.residuals[there] * own
        nearest = apart.min(axis=1, keepdims=True)
        far = self.far if self.partial else reach
        weights = np.exp(-(apart - nearest) / (2 * reach**2) - nearest / (2 * far**2))
        known, residuals = weights @ known, weights @ residuals
        # The part that a config's own times do not determine, up to the model's weight, is taken from all configs.
        total = known.sum(axis=1, keepdims=True)
        typical = (residuals.sum(axis=1, keepdims=True) + DOUBT * total) / (total + PRIOR) * self.partial
        each = (residuals @ self.near + PRIOR * typical) / (known @ self.near + PRIOR)
        return np.concatenate([each, typical], axis=1)


def seconds_of(microseconds: Any, name: str) -> np.ndarray:
    """The seconds in a table with this `table_name`, NaN if there is no measurement; see `OTHER_CODE`."""
    seconds: np.ndarray = np.array(microseconds, dtype=float) * 1e-6
    return seconds - OTHER_CODE if _is_packed(name) else seconds


def _times(data: dict[str, Any], space: Space, name: str) -> np.ndarray:
    """Seconds by a file's shapes and a space's configs, NaN where there is no measurement."""
    times = seconds_of(data["microseconds"], name)
    names = {text: place for place, text in enumerate(data["configs"])}
    chosen = [names.get(str(config), -1) for config in space.configs]
    return np.where(np.array(chosen) >= 0, times[:, chosen], np.nan)


def table_of(device: Device, name: str, dtype: Any) -> Table | None:
    """The table of a device with this `table_name`; None if nothing was measured."""
    suffixes = tuple(each for schedule in schedules.REGISTRY.values() for each in schedule.own_tables())
    return _table_of(device, name, dtype, suffixes)


@functools.cache
def _table_of(device: Device, name: str, dtype: Any, suffixes: tuple[str, ...]) -> Table | None:
    """The table of a file, and of the files for schedules that not every Triton has."""
    path, *more = (TABLES / file_name(device.name, name, suffix) for suffix in ("", *suffixes))
    if not path.is_file():
        return None
    return Table.read(path, device, dtype, *(each for each in more if each.is_file()), name=name)


def factor(problem: Problem, space: Space, M: np.ndarray) -> np.ndarray | float:
    """The factors of the model's predictions for `M` rows, of shape (m, 1); 1 if nothing was measured."""
    table = table_of(problem.device, table_name(problem), problem.a.dtype)
    return 1.0 if table is None else table.factor(problem, space, M)
