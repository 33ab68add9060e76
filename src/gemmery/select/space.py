"""The declared space of configs: for every family of GPUs and every kind of operand, the tiles worth considering.

A row says how large a part of the device's achievable rate the tile's main loop reaches once it is running, which is a
measured number where the family was measured (Hopper, on an H200) and an estimate elsewhere. Nothing here looks at the
problem's size; that is the model's work. Every row compiles without spills on every architecture of its family, which
`make check-targets` proves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..launch import describable
from ..problem import Config, Problem

Kind = str


@dataclass(frozen=True)
class Tile:
    """A config with its share of the rate that a long product achieves on the device."""

    config: Config
    efficiency: float


def kind_of(dtype: torch.dtype, precision: str) -> Kind:
    """The column of the space: operands that want the same tiles."""
    if dtype == torch.float64:
        return "fp64"
    if dtype == torch.float32:
        return precision
    return "byte" if dtype.itemsize == 1 else "half"


def _tiles(loader: str, schedule: str, rows: str) -> tuple[Tile, ...]:
    """Rows of `MxNxK warps stages efficiency [split]`."""
    tiles = []
    for line in rows.strip().splitlines():
        shape, warps, stages, efficiency, *rest = line.split()
        m, n, k = map(int, shape.split("x"))
        config = Config(
            m, n, k, num_warps=int(warps), num_stages=int(stages), schedule=schedule, loader=loader,  # type: ignore[arg-type]
            split_store="split" in rest,
        )  # fmt: skip
        tiles.append(Tile(config, float(efficiency)))
    return tuple(tiles)


SPACE: dict[str, dict[Kind, tuple[Tile, ...]]] = {
    "hopper": {
        "half": (
            *_tiles("descriptor", "persistent", """
                128x256x64 8 4 1.00 split
                128x256x64 8 3 0.98
                128x128x64 8 4 0.90
            """),
            *_tiles("descriptor", "tile", """
                128x256x64 8 4 0.96 split
                128x128x64 8 4 0.86
                128x64x64  4 4 0.66
                64x128x64  4 4 0.66
                64x64x128  4 4 0.45
                64x32x128  4 4 0.25
            """),
            *_tiles("pointer", "tile", """
                128x256x64 8 3 0.72
                128x128x64 8 3 0.65
                128x64x64  4 3 0.50
                64x128x64  4 3 0.50
                64x64x64   4 4 0.35
                16x64x128  4 3 0.12
            """),
        ),
        "byte": (
            *_tiles("descriptor", "persistent", """
                128x256x128 8 3 1.00 split
                128x128x128 8 4 0.90
            """),
            *_tiles("descriptor", "tile", """
                128x64x128 4 4 0.60
                64x64x128  4 4 0.40
            """),
            *_tiles("pointer", "tile", """
                128x128x64 8 3 0.50
                64x64x128  4 3 0.30
                16x64x128  4 3 0.10
            """),
        ),
        "tf32": (
            *_tiles("descriptor", "persistent", """
                128x256x32 8 3 1.00
                128x128x32 8 4 0.90
            """),
            *_tiles("descriptor", "tile", "64x64x64 4 3 0.50"),
            *_tiles("pointer", "tile", """
                128x128x32 8 3 0.60
                64x64x32   4 3 0.35
                16x64x64   4 3 0.10
            """),
        ),
        "tf32x3": (
            *_tiles("descriptor", "persistent", "128x128x32 8 3 0.90"),
            *_tiles("pointer", "tile", """
                128x64x32 4 3 0.60
                64x64x32  4 3 0.40
                16x64x64  4 3 0.10
            """),
        ),
        "ieee": _tiles("pointer", "tile", """
            128x128x16 8 3 0.80
            64x64x16   4 3 0.60
            32x32x32   4 3 0.30
        """),
        "fp64": _tiles("pointer", "tile", """
            64x64x16 4 3 0.80
            32x32x32 4 3 0.40
        """),
    },
    "interpreter": {
        kind: (
            *_tiles("descriptor", "persistent", "64x64x64 4 3 1.0 split"),
            *_tiles("pointer", "tile", "64x64x64 4 3 0.9"),
            *_tiles("pointer", "persistent", "32x64x32 4 3 0.5"),
        )
        for kind in ("half", "byte", "tf32", "tf32x3", "ieee", "fp64")
    },
}  # fmt: skip

#: Band heights considered for every tile.
GROUPS = (8,)


def configs(problem: Problem) -> Iterator[Tile]:
    """The rows of the space that can run a problem at all: its family, its kind, and its layout's loaders."""
    family = problem.device.target.family
    described = (
        problem.device.target.tma
        and problem.K > 0
        and describable(problem.a, problem.batch)
        and describable(problem.b, problem.batch)
    )
    for tile in SPACE[family][kind_of(problem.a.dtype, problem.precision)]:
        if tile.config.loader == "pointer" or described:
            for group in GROUPS:
                yield replace(tile, config=replace(tile.config, group_m=group))
