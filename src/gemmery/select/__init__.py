"""The choice of a config for a problem.

This is the fastest config that was measured here for exactly this problem (`store`). Without a measurement, it is the
first of a declared space (`space`), ranked by a model (`model`) and corrected by shipped measurements (`measured`).
"""

from __future__ import annotations

import numpy as np

from ..problem import Config, Problem
from ..schedules import bind
from . import measured, shortlist, store
from .model import Cost, Costs, costs
from .space import Space, mn_major

__all__ = ["Cost", "best_time", "candidates", "mn_major", "rank"]


def _predict(problem: Problem) -> tuple[Space, Costs, np.ndarray]:
    """The configs that can run a problem, their predicted costs, and their order, best first.

    Configs whose kernels are on the shortlist for all M come before the others, and those that are not chosen untuned
    come last.
    """
    space = shortlist.allowed(problem)
    stand_in = problem.predicted
    rows = np.array([[stand_in.M]])
    considered = space.considered(stand_in, rows)[0]
    if not considered.all():
        space = space.where(considered)
    factor = measured.factor(stand_in, space, rows)
    predicted = costs(stand_in, space, a=problem.a).corrected(np.broadcast_to(factor, (1, len(space)))[0])
    others = ~np.isin(space.kernel, list(shortlist.of(problem)))
    return space, predicted, np.lexsort((predicted.total, others, ~space.chosen(problem)))


def rank(problem: Problem) -> list[tuple[Config, Cost]]:
    """Every config that can run the problem with its predicted cost, in the order in which they are tried."""
    space, predicted, order = _predict(problem)
    return [(space.configs[i], predicted[i]) for i in order.tolist()]


def best_time(problem: Problem) -> float:
    """The predicted time of the config that is tried first, in seconds."""
    _, predicted, order = _predict(problem)
    return float(predicted.total[order[0]])


def candidates(problem: Problem) -> list[Config]:
    """The configs to try for a problem, best first: the fastest one measured for it, then the ranking."""
    space, _, order = _predict(problem)
    ranked = [space.configs[i] for i in order.tolist()]
    # A batch-invariant result needs one config for every M, but a timing is for one M.
    timings = None if problem.batch_invariant or problem.fusion is not None else store.current()
    tuned = None if timings is None else timings.best(problem)
    if tuned is None or not (tuned in ranked or _suits(problem, tuned)):
        return ranked
    return [tuned, *(config for config in ranked if config != tuned)]


def _suits(problem: Problem, config: Config) -> bool:
    try:
        bind(problem, config)
    except ValueError:
        # The timing comes from another machine, since it cannot have been measured here.
        return False
    return True
