"""A cluster of programs for each tile, which sum its parts along K; see `kernels.any_width_cluster`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernels import place
from ..kernels.any_width_cluster import MOST
from ..operands import Dense
from ..operands.scaled import Scaled
from . import cluster_launch
from .any_width import AnyWidth
from .any_width_binding import AnyWidthBinding
from .any_width_tile import Numbers, Tile
from .base import Forms
from .persistent_static import PersistentStatic, Work
from .walk import Ints

if TYPE_CHECKING:
    from ..problem import Config, Problem
    from ..select.space import Space
    from .cost import Floats


class ClusterBinding(AnyWidthBinding):
    """A `Binding` whose programs have one part of a tile each, and no workspace."""

    def __init__(
        self, problem: Problem, config: Config, work: Work, tile: Tile, band: int, takes_turns: bool
    ) -> None:
        super().__init__(problem, config, work, tile, band, takes_turns)
        self.split, self.cluster = None, work.parts
        self.grid = (work.programs // work.parts, 1, 1)

    @property
    def place(self) -> Any:
        """`PLACE` of the kernel."""
        own = place.sized_part_of_cluster
        return own if self.a.ready() is not None else self.a.place(own, True)

    @property
    def parts_barriers(self) -> int:
        """Barriers at which a warpgroup's sums arrive."""
        return self.tile.groups

    @property
    def counted(self) -> int:
        """What PLACE divides by last."""
        return self.work.parts

    def _loops(self, takes_turns: bool, given: object, second: object) -> bool:
        # Parts are always in a loop.
        return False

    def launch(self, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> None:
        given = dict(zip(self.kernel.arg_names, self.arguments(tensors, numbers), strict=False))
        arguments = [(given | self.constants)[name] for name in self.kernel.arg_names]
        cluster_launch.launch(self.compile(tensors, numbers), self.grid, self.cluster, arguments)


class Cluster(AnyWidth):
    """All tiles are cut along K. Each program has a part, and those of a tile are a cluster."""

    name = "cluster"
    about = (
        "a cluster of programs for each tile of any width, which sum its parts along K through shared memory"
    )
    knobs = frozenset({"swap", "rest_n", "split_k"})
    splits = (2, 3, 4, 6, 8)
    clustered = True
    binding = ClusterBinding

    def needs(self, problem: Problem) -> Iterator[tuple[bool, str]]:
        p = problem
        yield from super().needs(p)
        yield not p.batch and not p.ragged, "one matrix, since tiles of a batch are not cut along K"
        yield p.fusion is None or p.fusion.matrix is None, "an epilogue that reads and writes no other matrix"
        yield (
            type(p.a) in (Dense, Scaled),
            "activations without an adapter that do not come from other ranks, since no GPU has run those in clusters",
        )

    def considers(self, problem: Problem, rows: Floats, config: Config | Space) -> np.ndarray:
        c = config
        tiles = -(-np.asarray(rows, int) // c.block_m) * -(-problem.N // c.block_n)
        whole, chunk, _ = Work.divide_many(tiles, -(-problem.K // c.block_k), problem.device.sms, c.split_k)
        return np.asarray(super().considers(problem, rows, config) & (whole == 0) & (chunk > 0))

    def refusal(self, problem: Problem, config: Config) -> str | None:
        if (reason := super().refusal(problem, config)) is not None:
            return reason
        work = self.work(problem, config)
        if work.whole or not work.cut:
            tiles, most = work.whole + work.cut, self.at_once(problem, config)
            return f"each of {tiles} tiles needs several steps along K, and parts of all tiles at most {most} programs"
        return None

    def _untaken(self, config: Config, forms: Forms, numbers: Numbers | None = None) -> str | None:
        if not 2 <= config.split_k <= MOST.value:
            return f"split_k is {config.split_k}; a cluster has 2 to {MOST.value} programs"
        return super()._untaken(config, forms, numbers)

    def cut_units(self, work: Work, unit: Ints) -> tuple[Ints, Ints]:
        # The programs of a cluster have adjacent numbers.
        return PersistentStatic.cut_units(self, work, unit)

    def cuts(self, problem: Problem, config: Config) -> list[str]:
        return ["all tiles are cut along K"]


CLUSTER = Cluster()
