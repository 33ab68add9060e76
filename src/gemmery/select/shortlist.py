"""A few kernels that serve every number of rows of a weight.

Problems that differ only in M could each have their own kernel. Instead, all of them share a shortlist: the `KERNELS`
kernels that together come nearest to the best one for every M.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from ..devices import Device
from ..dtypes import OUT_DTYPES, Precision
from ..operands import Layout, Spec
from ..problem import Problem
from ..schedules.binding import spans
from . import measured
from .model import costs
from .space import Space, everywhere, space_of

#: The number of kernels that serve all M of otherwise equal problems.
KERNELS = 6
#: The same for packed weights, for which the best tile changes faster with M.
PACKED_KERNELS = 10
#: The extra weight of larger losses in the choice of a shortlist.
SHARPNESS = 30.0
#: Problems whose shortlists are kept.
KEPT = 4096
#: N and K of the weight for which the fastest class of batch-invariant configs is chosen.
WEIGHT = (4096, 4096)
#: The numbers of rows for which a shortlist is made. They lie close together, since how tiles fill the multiprocessors
#: changes from one to the next.
ROWS = np.array([
    1, 2, 4, 8, 16, 24, 32, 48, 64, 72, 80, 88, 96, 104, 112, 120, 128, 144, 160, 176, 192, 208, 224, 240, 256, 288,
    320, 352, 384, 416, 448, 480, 512, 576, 640, 704, 768, 832, 896, 960, 1024, 1152, 1280, 1408, 1536, 1664, 1792,
    1920, 2048, 2304, 2560, 2816, 3072, 3328, 3584, 3840, 4096, 5120, 6144, 7168, 8192,
])[:, None]  # fmt: skip
#: Numbers of rows in all groups together, of products that touch few of many groups.
FEW = (1, 2, 4, 8, 16, 32, 64)
#: The weight of each of `ROWS`, which compensates their uneven distances.
WEIGHTS = np.where(ROWS <= 64, 1.0, 0.5)


def of(problem: Problem) -> frozenset[int]:
    """The kernels, by their numbers in `Space`, for a problem and all that differ from it in M alone; memoized.

    If A is stored by columns, as in a weight's gradient, M is a size of the weight and K the number of rows. These have
    all kernels: their best one changes little with K.
    """
    return _of(replace(problem, M=1))


@functools.lru_cache(KEPT)
def _of(problem: Problem) -> frozenset[int]:
    space, a = allowed(problem), problem.a
    kernels = np.unique(space.kernel[space.chosen(problem)])
    if a.row == 1 and a.col != 1 and not problem.ragged:
        return frozenset(kernels.tolist())
    logs, weights = _all_log_times(problem, space)
    # The best config of each kernel. Configs of a kernel differ only in the number of parts of K.
    best = np.stack([logs[:, space.kernel == kernel].min(axis=1) for kernel in kernels], axis=1)
    count = PACKED_KERNELS if problem.b.unpacks else KERNELS
    return frozenset(kernels[_cover(best, count, weights)].tolist())


def _all_log_times(problem: Problem, space: Space) -> tuple[np.ndarray, np.ndarray]:
    """`_log_times` for all numbers of rows of a shortlist, and the weight of each of them.

    For groups of rows, these are the average rows of a group, and then few rows in total, which touch few groups.
    """
    if problem.ragged != "rows":
        return _log_times(problem.predicted, space, a=problem.a), WEIGHTS
    few = [R for R in FEW if problem.matrices > R]
    stand_ins = [replace(problem, M=R).predicted for R in (problem.matrices, *few)]
    logs = [_log_times(stand_ins[0], space, ROWS, a=problem.a)]
    logs += [_log_times(x, space, np.array([[x.M]]), a=problem.a) for x in stand_ins[1:]]
    return np.concatenate(logs), np.concatenate([WEIGHTS, np.ones((len(few), 1))])


def _log_times(
    problem: Problem, space: Space, rows: np.ndarray = ROWS, *, a: Spec | None = None
) -> np.ndarray:  # fmt: skip
    """The logarithm of the predicted time for each of some numbers of rows and each config; see `model.costs`."""
    least = np.array([[replace(problem, M=int(M)).bytes] for M in rows[:, 0]], dtype=float)
    times: np.ndarray = costs(problem, space, rows, least, a).total * measured.factor(problem, space, rows)
    return np.log(np.where(space.considered(problem, rows), times, np.inf))


def allowed(problem: Problem) -> Space:
    """The configs that can run a problem; only one class if its rows' bits must not depend on the batch."""
    space = space_of(problem)
    if problem.fusion is not None and problem.fusion.whole:
        widest = max([problem.b.columns(config)[0] for config in space.configs], default=0)
        space = space.where(np.array([spans(problem, config) for config in space.configs], bool))
        if not len(space):
            raise ValueError(
                f"{problem}: no tile is as wide as {problem.N} columns, which an epilogue that uses a reduced row "
                f"again needs; the widest has {widest}. Return the reduced row, and use it after the product"
            )
    if not problem.batch_invariant:
        return space
    p, K = problem, WEIGHT[1]
    number = numerics(p.device, p.precision, p.fast_accum, p.a.usual(K, 1), p.b.usual(1, K))
    return space.where(space.numerics == number)


@functools.cache
def numerics(device: Device, precision: Precision, fast_accum: bool, a: Spec, b: Spec) -> int:
    """The class of configs, as in `space.Tile`, for all products of two operands that must be batch-invariant.

    It is a class with a config for every layout, since the layouts that descriptors support change with the number of
    rows. Of several, it is the fastest one for a weight of `WEIGHT`. So an element's bits depend neither on sizes nor
    on layouts.
    """
    N, K = WEIGHT
    problem = Problem(
        M=1, N=N, K=K, batch=(), device=device, precision=precision, fast_accum=fast_accum,
        a=a, b=b, out=Layout(OUT_DTYPES[a.dtype][0], (), N, 1, True), batch_invariant=True,
    )  # fmt: skip
    space = space_of(problem)
    logs = _log_times(problem, space)
    means = {number: logs[:, space.numerics == number].min(axis=1).mean() for number in everywhere(problem)}
    return min(means, key=means.__getitem__)


def _cover(logs: np.ndarray, count: int, weights: np.ndarray | float = 1.0) -> list[int]:
    """Columns of an array, at most `count`, whose joint minimum is close to that of all columns.

    They are found greedily. Then each is replaced by a better one, if there is one, given the others.

    Args:
        weights: (rows, 1), the weight of each row.
    """
    loss = logs - logs.min(axis=1, keepdims=True)
    # One number of rows with a large loss is worse than many with a small one.
    loss = weights * (loss + SHARPNESS * loss**2)
    chosen: list[int] = []
    for _ in range(min(count, logs.shape[1])):
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
