"""The declared space of configs: which rows of `tiles` can run a problem. Nothing here looks at the problem's size."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import schedules
from ..problem import Config, Problem
from ..schedules.base import Forms
from ..schedules.binding import promotes, suits_tma
from .tiles import ALIKE, FAMILIES

#: Columns of a space that are fields of its configs.
_COLUMNS = (
    "block_m", "block_n", "block_k", "num_warps", "num_stages", "tail_m", "tail_n", "split_k", "split_store",
    "swap", "schedule", "loader",
)  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """A config with its share of the rate that a long product achieves on the device.

    Attributes:
        aligned: considered only if every row of the operands begins at a multiple of 16 elements, since misaligned
            loads take more registers than this tile leaves.
        splits: also considered with its tiles cut along K.
        strided: considered only for matrices that descriptors can't take.
        blocks: considered only where the end of a tile takes much, see `Problem.wants_room`.
        numerics: configs of one kind with the same number here give the same bits, as long as K is not cut.
    """

    config: Config
    efficiency: float
    aligned: bool = False
    splits: bool = False
    strided: bool = False
    blocks: bool = False
    numerics: int = 0


def kind_of(problem: Problem) -> str:
    """The part of a family's tiles for operands that use the same ones."""
    dtype = problem.a.dtype
    if kind := problem.b.kind or problem.a.kind:
        return f"{kind}{' accurate' * promotes(problem)}"
    if dtype == torch.float32:
        return problem.precision
    if dtype == torch.float64:
        return "fp64"
    if dtype == torch.int8:
        return "int8"
    if dtype.itemsize > 1:
        return "half"
    return "fp8 accurate" if promotes(problem) else "fp8"


@functools.cache
def tiles_of(family: str, kind: str) -> tuple[Tile, ...]:
    """The rows of a family for one kind of operand."""
    lines = [
        (line, loader, schedule)
        for (loader, schedule), rows in FAMILIES[family][kind].items()
        for line in rows.strip().splitlines()
    ]
    alike = family in ALIKE
    return tuple(_tile(*line, number, alike) for number, line in enumerate(lines))


def row_of(config: Config) -> Config:
    """The properties that a config shares with its whole row of tiles, cut or not, and streaming or not."""
    return replace(config, split_k=1, stream=False)


def _tile(line: str, loader: str, schedule: str, number: int, alike: bool) -> Tile:
    shape, group, warps, stages, efficiency, *words = line.split()
    m, n, k = map(int, shape.split("x"))
    tails = [int(word.removeprefix("tail=")) for word in words if word.startswith("tail=")]
    config = Config(
        m, n, k, group_m=int(group), num_warps=int(warps), num_stages=int(stages),
        schedule=schedule, loader=loader,  # type: ignore[arg-type]
        split_store="split" in words, tail=tails[0] if tails else 1, swap="swap" in words,
        stream="stream" in words,
    )  # fmt: skip
    marks = {name: name in words for name in ("aligned", "splits", "strided", "blocks")}
    numerics = 0 if alike and "apart" not in words else 1 + number
    return Tile(config, float(efficiency), **marks, numerics=numerics)


@dataclass(frozen=True, eq=False)
class Space:
    """Configs as columns, with one element for each config, for arithmetic on all at once.

    Attributes:
        configs, tiles: the configs, and the rows of the table that they come from.
        kernel: configs with the same number here run the same compiled kernel; but see `AnyWidthBinding.compile`.

    The other columns are those of `Config` and `Tile`, by their names.
    """

    configs: tuple[Config, ...]
    tiles: tuple[Tile, ...]
    kernel: np.ndarray
    block_m: np.ndarray
    block_n: np.ndarray
    block_k: np.ndarray
    num_warps: np.ndarray
    num_stages: np.ndarray
    tail_m: np.ndarray
    tail_n: np.ndarray
    split_k: np.ndarray
    split_store: np.ndarray
    swap: np.ndarray
    schedule: np.ndarray
    loader: np.ndarray
    numerics: np.ndarray
    efficiency: np.ndarray

    @classmethod
    def of(cls, entries: list[tuple[Config, Tile, int]]) -> Space:
        """The columns of configs with their rows and their kernels' numbers."""
        columns = {name: np.array([getattr(config, name) for config, _, _ in entries]) for name in _COLUMNS}
        return cls(
            configs=tuple(config for config, _, _ in entries),
            tiles=tuple(tile for _, tile, _ in entries),
            kernel=np.array([number for _, _, number in entries]),
            numerics=np.array([tile.numerics for _, tile, _ in entries]),
            efficiency=np.array([tile.efficiency for _, tile, _ in entries]),
            **columns,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.configs)

    def where(self, keep: np.ndarray) -> Space:
        """The configs for which `keep` is true."""
        index = np.flatnonzero(keep)
        values: dict[str, Any] = {}
        for field in fields(self):
            column = getattr(self, field.name)
            values[field.name] = (
                column[index] if isinstance(column, np.ndarray) else tuple(column[i] for i in index)
            )
        return Space(**values)

    @functools.cached_property
    def by_schedule(self) -> dict[str, tuple[np.ndarray, Space]]:
        """For each schedule in the space, the places of its configs, and the space of only these."""
        found = {}
        for name in dict.fromkeys(self.schedule.tolist()):
            own = self.schedule == name
            found[name] = (np.flatnonzero(own), self if own.all() else self.where(own))
        return found

    def chosen(self, problem: Problem) -> np.ndarray:
        """A mask of the configs that may be chosen untuned, see `Schedule.chosen_on`."""
        found = np.ones(len(self), bool)
        for name, (places, _) in self.by_schedule.items():
            found[places] = schedules.of(name).is_chosen_on(problem.device.target)
        return found

    def considered(self, problem: Problem, M: np.ndarray) -> np.ndarray:
        """Whether configs are considered for these numbers of rows, of shape (m, 1): an array of (m, configs)."""
        found = np.ones((len(M), len(self)), bool)
        for name, (places, own) in self.by_schedule.items():
            schedule = schedules.of(name)
            found[:, places] = schedule.considers(problem, M, own) & schedule.has_room(problem, own)
            if problem.a.is_summed:
                found[:, places] &= ~schedule.repeats(problem, M, own)
        return found


@functools.lru_cache(256)
def _space(
    family: str,
    kind: str,
    tma: bool,
    aligned: bool,
    whole: bool,
    names: tuple[str, ...],
    forms: Forms,
    blocks: bool = False,
) -> Space:
    """All configs for a kind of operand and what is known of its layout.

    Args:
        whole: leave out configs that cut K.
        names: schedules that are considered.
        forms: the forms of the operands.
        blocks: see `Problem.wants_room`.
    """
    entries = []
    codes: dict[object, int] = {}
    for row, tile in enumerate(tiles_of(family, kind)):
        if tile.config.schedule not in names:
            continue
        schedule = schedules.of(tile.config.schedule)
        is_split = "split_k" in schedule.knobs and (tile.splits or forms.ragged == "k") and not whole
        splits = schedule.splits if is_split else ()
        found = [replace(tile.config, split_k=parts) for parts in (1, *splits)]
        found = [each for each in found if schedule.takes(each, forms)]
        if not found:
            continue
        code = schedule.code(found[0], forms)
        number = codes.setdefault(row if code is None else (tile.config.schedule, code), row)
        # Tiles of ranges of K are loaded through pointers, if the kernels for tiles of any width do not support them.
        avoided = tma and tile.strided and forms.ragged != "k"
        loads = not avoided if tile.config.loader == "pointer" else tma
        if loads and (aligned or not tile.aligned) and (blocks or not tile.blocks):
            entries += [(each, tile, 2 * number + (each.split_k > 1)) for each in found]
    return Space.of(entries)


class MNMajor(NamedTuple):
    """The operands whose adjacent elements are along M or N, where the tensor cores need them along K."""

    a: bool
    b: bool


def mn_major(problem: Problem) -> MNMajor:
    """The operands that must be transposed in registers: on Hopper, those that are not 16-bit."""
    narrow = problem.a.dtype.itemsize == 1 or kind_of(problem).startswith("tf32")
    transposed = problem.device.target.family == "hopper" and narrow
    return MNMajor(transposed and problem.a.col != 1, transposed and problem.b.row != 1)


def space_of(problem: Problem) -> Space:
    """The configs that can run a problem at all: its family, its kind, its layout's loaders and its schedules."""
    return _space(
        problem.device.target.family,
        kind_of(problem),
        suits_tma(problem),
        problem.a.has_aligned_rows and problem.b.has_aligned_rows,
        problem.batch_invariant or problem.K == 0,
        tuple(name for name, schedule in schedules.REGISTRY.items() if schedule.suits(problem)),
        Forms.of(problem),
        problem.wants_room,
    )


def everywhere(problem: Problem) -> frozenset[int]:
    """The numbers in `Space.numerics` that exist for every layout of a problem's matrices."""
    target = problem.device.target
    # These take all forms.
    names = tuple(name for name, schedule in schedules.REGISTRY.items() if schedule.universal)
    spaces = [
        _space(target.family, kind_of(problem), tma, aligned, True, names, Forms.of(problem))
        for tma in {False, target.tma}
        for aligned in (False, True)
    ]
    return frozenset.intersection(*(frozenset(space.numerics.tolist()) for space in spaces))


def configs(problem: Problem) -> Iterator[Tile]:
    """The rows that can run a problem at all, each once as it is, and once with K cut where it may be."""
    space, seen = space_of(problem), set()
    for config, tile, kernel in zip(space.configs, space.tiles, space.kernel.tolist(), strict=True):
        if kernel not in seen:
            seen.add(kernel)
            yield replace(tile, config=config)
