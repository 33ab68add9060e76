"""An analytic model of a GEMM's time, for all configs of a space at once.

Each schedule computes the costs of its configs (`Schedule.costs`). All are based on the same bounds: a product takes
about as long as its bytes take from memory, or longer, and no multiprocessor multiplies faster than its tensor cores.
All inputs come from the device table and the space. The parts are kept to explain a choice.
"""

from __future__ import annotations

import numpy as np

from .. import schedules
from ..operands import Spec
from ..problem import Problem
from ..schedules.cost import STREAM, Cost, Costs, Floats, Given
from .space import Space, mn_major

__all__ = ["Cost", "Costs", "costs"]

#: Part of the rate that remains if operands must be transposed in registers.
TRANSPOSED = 0.15


def costs(
    problem: Problem, space: Space, M: Floats | None = None, least_bytes: Floats | None = None, a: Spec | None = None
) -> Costs:  # fmt: skip
    """The predicted costs of running `problem` with each config of a space.

    Args:
        M: numbers of rows, as a column, to predict for instead of the problem's; then `least_bytes` are their bytes.
        a: the first operand of the problem of which this one is `Problem.predicted`, if that has groups.
    """
    p, device = problem, problem.device
    rate = device.rate(p.a.dtype, p.precision) * device.achieved / device.sms
    if any(mn_major(p)):
        rate *= TRANSPOSED
    bytes_moved = np.asarray(p.bytes if least_bytes is None else least_bytes, dtype=float)
    a = p.a if a is None else a
    rows, memory = np.asarray(p.M if M is None else M), bytes_moved / (device.bandwidth * STREAM)
    given = Given(rows, memory, rate, a.ragged, a.gathers)
    return Costs.joined([
        (places, schedules.of(name).costs(p, part, given)) for name, (places, part) in space.by_schedule.items()
    ])  # fmt: skip
