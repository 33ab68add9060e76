"""Why a config is chosen: the best candidates of a product with the predicted cost of each part, on any known GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ..dtypes import Precision
from ..problem import Config, Problem
from ..select import Cost, candidates, rank, store
from ..select.keys import device_text, to_dict
from ..select.shapes import device_named, problem_of
from .padding import worth_copying
from .plan import runs_on

#: The parts of a predicted time, in seconds.
PARTS = tuple(field.name for field in fields(Cost) if field.name not in ("total", "waves"))
#: The parts that grow with the product; the others are fixed costs.
BINDING = ("compute", "l2", "memory")


@dataclass(frozen=True)
class Choice:
    """One candidate.

    Attributes:
        cost: the prediction of the model; None for a measured config outside the space.
        measured: seconds, if the store has a timing for exactly this problem, device and version.
    """

    config: Config
    cost: Cost | None
    measured: float | None


@dataclass(frozen=True)
class Explanation:
    """The config that runs a problem, and its alternatives; `str` gives a table.

    Attributes:
        choices: the best candidates, first the one that runs; empty if the torch reference runs.
        untuned: the config that would run without timings of this problem.
        considered: the number of configs that can run it.
        copies: the matrices, of "a" and "b", that are copied first, because the kernel reads copies faster. The choices
            are for the product of the copies.
        copying: predicted seconds of the copies.
        quicker: a config that is predicted to be faster than all choices, but is not used because its kernel is not
            among those that serve every M; see `shortlist`.
    """

    problem: Problem
    choices: tuple[Choice, ...]
    untuned: Config | None
    considered: int
    copies: tuple[str, ...] = ()
    copying: float = 0.0
    quicker: Choice | None = None

    @property
    def reasons(self) -> list[str]:
        """Plain sentences that explain why the first is chosen."""
        if not self.choices:
            return [f"torch reference: {self.problem.device.name} lacks the instructions"]
        first, *others = self.choices
        if first.cost is None:
            return [f"the first is the fastest measured config; without timings it would be {self.untuned}"]
        sentences = [_what_binds(self.problem, first.cost)]
        if self.copies:
            sentences.append(
                f"{' and '.join(self.copies)} copied first: {self.copying * 1e6:.1f} µs predicted"
            )
        if first.config != self.untuned:
            sentences.append(
                f"the first is the fastest measured config; without timings it would be {self.untuned}"
            )
        predicted = [(choice.config, choice.cost) for choice in others if choice.cost is not None]
        slower = [(config, cost) for config, cost in predicted if cost.total > first.cost.total]
        if slower:
            sentences.append(_what_is_gained(first.cost, *slower[0]))
        if self.quicker is not None and self.quicker.cost is not None:
            less = 1 - self.quicker.cost.total / first.cost.total
            sentences.append(
                f"{self.quicker.config} is predicted to take {less:.1%} less, but its kernel is not among the few that "
                f"serve every number of rows; pin it with config="
            )
        return sentences

    def asdict(self) -> dict[str, Any]:
        """All fields as plain values, for JSON; times in seconds. An epilogue is given in words."""
        return {
            "problem": str(self.problem) if self.problem.fusion is not None else to_dict(self.problem),
            "device": device_text(self.problem.device),
            "considered": self.considered,
            "untuned": None if self.untuned is None else str(self.untuned),
            "copies": list(self.copies),
            "copying": self.copying,
            "choices": [
                {
                    "config": str(choice.config),
                    "predicted": None if choice.cost is None else {
                        field.name: getattr(choice.cost, field.name) for field in fields(Cost)
                    },
                    "measured": choice.measured,
                }
                for choice in self.choices
            ],
            "quicker": None if self.quicker is None else str(self.quicker.config),
            "reasons": self.reasons,
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"{self.problem} on {self.problem.device.name}"]
        if self.choices:
            width = max(len(str(choice.config)) for choice in self.choices)
            heads = " ".join(f"{name:>9}" for name in ("total", *PARTS))
            lines.append(f"{'µs predicted':{width}} {heads}  waves  measured")
            lines += [self._line(choice, width) for choice in self.choices]
        return "\n".join([*lines, *self.reasons])

    def _line(self, choice: Choice, width: int) -> str:
        measured = "" if choice.measured is None else f"{choice.measured * 1e6:9.1f}"
        if choice.cost is None:
            return f"{choice.config!s:{width}} {'':{10 * (len(PARTS) + 1) + 5}} {measured}".rstrip()
        times = " ".join(f"{getattr(choice.cost, name) * 1e6:9.1f}" for name in ("total", *PARTS))
        return f"{choice.config!s:{width}} {times} {choice.cost.waves:6.2f} {measured}".rstrip()


def _what_binds(problem: Problem, cost: Cost) -> str:
    part = max((*BINDING, "overhead"), key=lambda name: getattr(cost, name))
    waves = f"at most {cost.waves:.2f} tiles on each of {problem.device.sms} multiprocessors"
    if part == "overhead":
        return f"overhead dominates: {cost.overhead * 1e6:.1f} of {cost.total * 1e6:.1f} µs; {waves}"
    share = getattr(cost, part) / cost.total
    return f"bound by {part}, {share:.0%} of {cost.total * 1e6:.1f} µs; {waves}"


def _what_is_gained(first: Cost, config: Config, cost: Cost) -> str:
    more = {name: getattr(cost, name) - getattr(first, name) for name in PARTS}
    part = max(more, key=lambda name: more[name])
    slower = cost.total / first.total - 1
    time = f"{more[part] * 1e6:+.1f} µs, part of which overlaps"
    return f"{config} is predicted to take {slower:.1%} longer, above all by {part} ({time})"


def _by_time(choice: Choice) -> tuple[bool, float]:
    """Measured ones first, then by predicted time."""
    predicted = math.inf if choice.cost is None else choice.cost.total
    return choice.measured is None, predicted if choice.measured is None else choice.measured


def explain_problem(problem: Problem, top: int = 5) -> Explanation:
    """The explanation of a problem, with its `top` best candidates."""
    if top < 1:
        raise ValueError(f"explain: top is {top}; it must be at least 1")
    if not runs_on(problem):
        return Explanation(problem, (), None, 0)
    padded = worth_copying(problem)
    product = problem if padded is None else padded.problem
    costs = dict(rank(product))
    # Timings are of bare products; see `select.candidates`.
    timings = None if problem.fusion is not None else store.current()
    measured = {} if timings is None else timings.timings(product)
    # The config that runs comes first, even if another one is predicted to be faster; see `quicker`.
    runs, *others = [
        Choice(config, costs.get(config), measured[config].seconds if config in measured else None)
        for config in candidates(product)[:top]
    ]
    choices = (runs, *sorted(others, key=_by_time))
    untuned, best = next(iter(costs)), min(costs, key=lambda config: costs[config].total)
    quicker = Choice(best, costs[best], None) if costs[best].total < costs[untuned].total else None
    found = Explanation(problem, choices, untuned, len(costs), quicker=quicker)
    return found if padded is None else replace(found, copies=padded.names, copying=padded.seconds)


def explain(
    M: int,
    N: int,
    K: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    layout: str = "NT",
    batch: Sequence[int] = (),
    bias: bool = False,
    precision: Precision = "ieee",
    fast_accum: bool = False,
    batch_invariant: bool = False,
    device: str | None = None,
    top: int = 5,
) -> Explanation:
    """The config that runs a product of these sizes on a GPU, and why. Needs neither the GPU nor tensors.

    Args:
        M, N, K: (*batch, M, K) times (*batch, K, N), contiguous and aligned.
        layout: two letters, for a and b: N for row-major and T for column-major. A Linear's weight is a T as b.
        bias: whether N numbers are added to each row.
        device: a GPU of the device table, by its name or a part of it; by default the current one, or an H200.
        top: the number of candidates to show.

    The other arguments are those of `gemmery.matmul`.

    Returns:
        The candidates with the predicted cost of each part, and the time if it was measured. Print it.

    Raises:
        ValueError: a size, layout, precision or device is invalid.
        TypeError: a type is not supported.

    Example:
        >>> import gemmery
        >>> print(gemmery.explain(4096, 4096, 4096, device="H200", top=1))  # doctest: +ELLIPSIS
        4096x4096x4096 bf16[row] @ bf16[col] -> bf16[row] on NVIDIA H200
        µs predicted ...
    """
    problem = problem_of(
        M, N, K, dtype=dtype, out_dtype=out_dtype, layout=layout, batch=batch, bias=bias, precision=precision,
        fast_accum=fast_accum, batch_invariant=batch_invariant, device=device_named(device),
    )  # fmt: skip
    return explain_problem(problem, top)
