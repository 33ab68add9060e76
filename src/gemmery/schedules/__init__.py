"""Schedules: the order in which the programs of a launch compute its tiles. One module each, and a registry of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .any_width import COOPERATIVE, PINGPONG
from .base import REGISTRY, Schedule, of, register
from .cluster import CLUSTER
from .persistent import PERSISTENT
from .sliced_k import SLICED_K
from .sliced_sparse import SLICED_SPARSE
from .specialized import SPECIALIZED
from .tile import TILE

if TYPE_CHECKING:
    from ..problem import Config, Problem
    from .binding import Binding

__all__ = ["DEFAULT", "REGISTRY", "Schedule", "bind", "of", "register"]

for _schedule in (TILE, PERSISTENT, SPECIALIZED, COOPERATIVE, PINGPONG, CLUSTER, SLICED_K, SLICED_SPARSE):
    register(_schedule)
#: The schedule of a Config that names none.
DEFAULT = TILE.name


def bind(problem: Problem, config: Config) -> Binding:
    """The binding of a problem and a config, of the kernel that the config is for.

    Raises:
        ValueError: the config does not suit the problem, or does not run here.
    """
    schedule = of(config.schedule)
    if reason := schedule.refusal(problem, config):
        raise ValueError(f"config {config}: {reason}")
    return schedule.bind(problem, config)
