"""The declared space of configs: which rows of `tiles` can run a problem. Nothing here looks at the problem's size."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..launch import describable, promotes
from ..problem import Config, Operand, Problem
from .tiles import FAMILIES


@dataclass(frozen=True)
class Tile:
    """A config with its share of the rate that a long product achieves on the device.

    Attributes:
        aligned: considered only where every row of the operands begins at a multiple of 16 elements, since misaligned
            loads take registers that this tile does not leave.
    """

    config: Config
    efficiency: float
    aligned: bool = False


def kind_of(problem: Problem) -> str:
    """The part of a family's tiles for operands that want the same ones."""
    dtype = problem.a.dtype
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
    return tuple(
        _tile(line, loader, schedule)
        for (loader, schedule), rows in FAMILIES[family][kind].items()
        for line in rows.strip().splitlines()
    )


def _tile(line: str, loader: str, schedule: str) -> Tile:
    shape, group, warps, stages, efficiency, *words = line.split()
    m, n, k = map(int, shape.split("x"))
    tails = [int(word.removeprefix("tail=")) for word in words if word.startswith("tail=")]
    config = Config(
        m, n, k, group_m=int(group), num_warps=int(warps), num_stages=int(stages),
        schedule=schedule, loader=loader,  # type: ignore[arg-type]
        split_store="split" in words, tail=tails[0] if tails else 1,
    )  # fmt: skip
    return Tile(config, float(efficiency), "aligned" in words)


def _rows_aligned(operand: Operand) -> bool:
    outer = operand.row if operand.col == 1 else operand.col
    strides = (outer, *operand.steps)
    return operand.aligned and 1 in (operand.row, operand.col) and all(stride % 16 == 0 for stride in strides)


def configs(problem: Problem) -> Iterator[Tile]:
    """The rows that can run a problem at all: its family, its kind, and its layout's loaders."""
    operands = (problem.a, problem.b)
    target = problem.device.target
    described = target.tma and problem.K > 0 and all(describable(x, problem.batch) for x in operands)
    aligned = all(_rows_aligned(x) for x in operands)
    for tile in tiles_of(target.family, kind_of(problem)):
        if (tile.config.loader == "pointer" or described) and (aligned or not tile.aligned):
            yield tile
