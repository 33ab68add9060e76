"""Which config runs a problem: a declared space (`space`), ranked by a model (`model`)."""

from __future__ import annotations

from ..problem import Config, Problem
from .model import Cost, cost
from .space import configs

__all__ = ["Cost", "rank"]


def rank(problem: Problem) -> list[tuple[Config, Cost]]:
    """Every config that can run the problem with its predicted cost, best first."""
    costs = [(tile.config, cost(problem, tile)) for tile in configs(problem)]
    return sorted(costs, key=lambda entry: entry[1].total)
