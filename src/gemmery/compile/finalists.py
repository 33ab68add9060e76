"""The kernels that may be the fastest are measured again, in turn, before Inductor chooses.

Inductor measures each kernel once, and torch's kernels first, when the GPU has waited for the compiler: its clock may
be low, or it has power to spare. First times of one kernel in two processes were up to 13 percent apart. The time of a
short kernel can include that of the host, which launches gemmery's and torch's kernels through more Python than
Inductor's templates. The host takes no part in a CUDA graph. With graphs, a launch is therefore queued while the GPU
sleeps, and the time is that of the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.ir import ChoiceCaller

from ..tuning.stopwatch import Stopwatch, burst_launches

#: Turns in which the finalists are measured.
TURNS = 2
#: The fastest of Inductor's templates are finalists, so many of them.
TEMPLATES = 2


def seconds(
    ours: ChoiceCaller, torchs: Sequence[ChoiceCaller], times: dict[ChoiceCaller, float], args: Sequence[Any],
    out: Tensor,
) -> dict[ChoiceCaller, float]:  # fmt: skip
    """The least times of the finalists in a few turns: gemmery, torch's kernels, and the fastest templates.

    With CUDA graphs, the same host time is added to all of them: as much as Inductor measured of the fastest template.
    So they can be compared with templates that are not measured again, and with those that Inductor fuses later.

    Args:
        times: what Inductor measured, in milliseconds. A kernel that failed has an infinite time, and keeps it.
        args, out: the inputs and the output with which it measured.
    """
    works = [choice for choice in times if math.isfinite(times[choice])]
    # Other choices, such as a graph of several kernels, have no request for one kernel.
    templates = [
        x for x in works if x is not ours and x not in torchs and getattr(x, "bmreq", None) is not None
    ]
    templates = sorted(templates, key=times.__getitem__)[:TEMPLATES]
    finalists = [x for x in works if x is ours or x in torchs] + templates
    in_graph = bool(config.triton.cudagraphs) and out.is_cuda
    measures = (_on_the_gpu if in_graph else _as_inductor)(finalists, args, out)
    again = dict.fromkeys(finalists, math.inf)
    for _ in range(TURNS):
        for choice in finalists:
            again[choice] = min(again[choice], measures[choice]())
    if in_graph and finalists:
        like = (templates or finalists)[0]
        host = max(0.0, times[like] / 1e3 - again[like])
        again = {choice: host + found for choice, found in again.items()}
    return again


Measures = dict[ChoiceCaller, Callable[[], float]]


def _as_inductor(choices: Sequence[ChoiceCaller], args: Sequence[Any], out: Tensor) -> Measures:
    """For each choice a function that returns its time in seconds."""

    def measure(choice: ChoiceCaller) -> float:
        return float(choice.benchmark(*args, out=out)) / 1e3

    return {choice: partial(measure, choice) for choice in choices}


def _on_the_gpu(choices: Sequence[ChoiceCaller], args: Sequence[Any], out: Tensor) -> Measures:
    """The same, without the time of the host, for calls whose inputs are not in L2."""
    with torch.cuda.device(out.device):
        watch = Stopwatch()

    def measure(call: Callable[[], object], launches: int) -> float:
        with torch.cuda.device(out.device):
            return sorted(watch.cold(call, launches))[launches // 2]

    made: Measures = {}
    for choice in choices:
        call = choice.bmreq.make_run_fn(*args, out=out)  # type: ignore[attr-defined]  # of each kind of finalist
        with torch.cuda.device(out.device):
            made[choice] = partial(measure, call, burst_launches(watch.estimate(call).seconds))
    return made
