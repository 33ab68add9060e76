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
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.ir import ChoiceCaller

from ..tuning.stopwatch import Stopwatch, cold_seconds

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
    measure = _on_the_gpu(out.device) if in_graph else _as_inductor
    again = dict.fromkeys(finalists, math.inf)
    for _ in range(TURNS):
        for choice in finalists:
            again[choice] = min(again[choice], measure(choice, args, out))
    if in_graph and finalists:
        like = (templates or finalists)[0]
        host = max(0.0, times[like] / 1e3 - again[like])
        again = {choice: host + found for choice, found in again.items()}
    return again


Measure = Callable[[Any, Sequence[Any], Tensor], float]


def _as_inductor(choice: Any, args: Sequence[Any], out: Tensor) -> float:
    """The time of a choice in seconds."""
    return float(choice.benchmark(*args, out=out)) / 1e3


def _on_the_gpu(device: torch.device) -> Measure:
    """A function that returns the same without the time of the host, with inputs that are not in L2."""
    with torch.cuda.device(device):
        watch = Stopwatch()

    def measure(choice: Any, args: Sequence[Any], out: Tensor) -> float:
        with torch.cuda.device(device):
            return cold_seconds(watch, choice.bmreq.make_run_fn(*args, out=out))

    return measure
