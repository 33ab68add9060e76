"""Few kernels for a weight that is met with every number of rows.

Of two problems that differ in M alone, each could have a kernel of its own. For all of them together only a shortlist
is used: the `KERNELS` kernels that together come nearest to the best one for every M.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from ..problem import Problem
from . import measured
from .model import costs
from .space import Space, space_of

#: Kernels that serve all M of otherwise equal problems.
KERNELS = 8
#: How much larger losses count more in the choice of a shortlist.
SHARPNESS = 30.0
#: Problems whose shortlists are kept.
KEPT = 4096
#: The numbers of rows for which a shortlist is made.
ROWS = np.array([
    1, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536,
    1792, 2048, 2560, 3072, 3584, 4096, 6144, 8192,
])[:, None]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Shortlist:
    """What is chosen for all M at once.

    Attributes:
        kernels: numbers of the kernels, as in `Space`.
        numerics: the configs that may run where a row's bits must not depend on M, as in `space.Tile`.
    """

    kernels: frozenset[int]
    numerics: int


def of(problem: Problem) -> Shortlist:
    """The shortlist of a problem and all that differ from it in M alone; memoised."""
    return _of(replace(problem, M=1))


@functools.lru_cache(KEPT)
def _of(problem: Problem) -> Shortlist:
    space = space_of(problem)
    least = np.array([[replace(problem, M=int(M)).bytes] for M in ROWS[:, 0]], dtype=float)
    total = costs(problem, space, ROWS, least).total * measured.factor(problem, space, ROWS)
    logs = np.log(total)
    numerics = _best_numerics(space, logs)
    if problem.batch_invariant:
        logs = np.where(space.numerics == numerics, logs, np.inf)
    kernels = np.unique(space.kernel[np.isfinite(logs[0])])
    # The best config of each kernel; they differ in how many parts K is cut into, which is no other code.
    best = np.stack([logs[:, space.kernel == kernel].min(axis=1) for kernel in kernels], axis=1)
    return Shortlist(frozenset(kernels[_cover(best)].tolist()), numerics)


def _best_numerics(space: Space, logs: np.ndarray) -> int:
    """The class of configs whose best members are quickest over all rows."""
    classes = np.unique(space.numerics)
    means = [logs[:, space.numerics == number].min(axis=1).mean() for number in classes]
    return int(classes[int(np.argmin(means))])


def _cover(logs: np.ndarray) -> list[int]:
    """Columns of an array, `KERNELS` at most, whose minimum over them is little above that over all.

    Found greedily, and then each is exchanged for a better one where there is one, given the others.
    """
    loss = logs - logs.min(axis=1, keepdims=True)
    # One number of rows with a large loss is worse than many with a small one.
    loss = loss + SHARPNESS * loss**2
    chosen: list[int] = []
    for _ in range(min(KERNELS, logs.shape[1])):
        chosen.append(_best_addition(loss, chosen))
    for _ in range(2):
        for place in range(len(chosen)):
            others = chosen[:place] + chosen[place + 1 :]
            chosen[place] = _best_addition(loss, others)
    return chosen


def _best_addition(loss: np.ndarray, chosen: list[int]) -> int:
    reached = loss[:, chosen].min(axis=1, keepdims=True) if chosen else np.full((len(loss), 1), np.inf)
    sums = np.minimum(reached, loss).sum(axis=0)
    sums[chosen] = np.inf
    return int(np.argmin(sums))
