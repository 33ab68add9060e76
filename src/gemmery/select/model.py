"""An analytic model of a GEMM's time, for all configs of a space at once.

Each schedule computes the costs of its configs (`Schedule.costs`). All are based on the same bounds: a product takes
about as long as its bytes take from memory, or longer, and no multiprocessor multiplies faster than its tensor cores.
All inputs come from the device table and the space. The parts are kept to explain a choice.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .. import schedules
from ..problem import Problem
from ..schedules.cost import STREAM, Cost, Costs, Floats, Given
from .space import Space, mn_major

__all__ = ["Cost", "Costs", "costs"]

#: Seconds before GPUs send each other rows, and bytes a second that they then send. Measured on two H200.
ARRIVAL, LINK = 10e-6, 380e9
#: Part of the rate that remains if operands must be transposed in registers.
TRANSPOSED = 0.15


def costs(
    problem: Problem, space: Space, M: Floats | None = None, least_bytes: Floats | None = None, ragged: str = ""
) -> Costs:  # fmt: skip
    """The predicted costs of running `problem` with each config of a space.

    Args:
        M: numbers of rows, as a column, to predict for instead of the problem's; then `least_bytes` are their bytes.
        ragged: the kind of groups, if the problem is `Problem.predicted` of one with groups.
    """
    p, device = problem, problem.device
    rate = device.rate(p.a.dtype, p.precision) * device.achieved / device.sms
    if any(mn_major(p)):
        rate *= TRANSPOSED
    bytes_moved = np.asarray(p.bytes if least_bytes is None else least_bytes, dtype=float)
    given = Given(
        np.asarray(p.M if M is None else M), bytes_moved / (device.bandwidth * STREAM), rate, ragged
    )
    made = Costs.joined([
        (places, schedules.of(name).costs(p, part, given)) for name, (places, part) in space.by_schedule.items()
    ])  # fmt: skip
    if p.a.shards == 1:
        return made
    return replace(made, total=_with_arrivals(p, space, given.rows, made.total))


def _with_arrivals(problem: Problem, space: Space, M: Floats, total: Floats) -> Floats:
    """The times of products whose rows arrive from other GPUs.

    The tiles of the last shard begin when it has arrived, and idle multiprocessors wait for it.
    """
    p, shards, sms = problem, problem.a.shards, problem.device.sms
    arrival = ARRIVAL + M * (shards - 1) / shards * p.K * p.a.dtype.itemsize / LINK
    columns = -(-p.N // space.block_n)
    waves = np.ceil(M // space.block_m * columns / sms)
    last = np.ceil(M / shards // space.block_m * columns / sms)
    return np.asarray(np.maximum(total, arrival + total * last / np.maximum(waves, 1)))
