"""`predict`: the expected time of a product, and its distance to the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ...problem import Config, Problem
from . import ours, recorded, vendor
from .calibration import COVERAGE, Calibration, calibration_of, mark_of
from .recorded import Measured
from .residuals import Samples

#: The parts of a time that grow with the product; the others are what it costs besides.
BINDING = ("compute", "l2", "memory")
#: The bounds of a kernel, in words.
BOUND_WORDS = {
    "compute": "bound by arithmetic", "l2": "bound by reads from L2", "memory": "bound by memory",
    "overhead": "mostly overhead",
}  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """The expected time of a product. Times are in seconds, of a single launch with its inputs in no cache.

    Attributes:
        problem: the product.
        gemmery: gemmery's time; None if the GPU lacks the instructions and torch's reference runs.
        cublas: the time of the vendor's BLAS as torch calls it, with the copies that torch makes and the elementwise
            kernels after it; None if torch has no such product. For a packed weight, it is the product with the 16-bit
            weight.
        roofline: the least time that the data sheet allows: the larger of arithmetic and memory traffic.
        bound: what gemmery's kernel waits for most: "compute", "l2", "memory", or "overhead" if these are less than
            half; "" if there is no kernel.
        config: the name of gemmery's config.
        copies: the matrices, of "a" and "b", that gemmery copies first.
        tiles: the number of tiles of the product; 0 if there is no kernel.
        waves: the number of tiles on the busiest multiprocessor; a part of a split tile counts as a tile.
        cost: the parts of gemmery's time, which overlap: compute, l2, memory, overhead, reduction, copies, correction.
        cublas_cost: the parts of the vendor's time, and elementwise.
        calls: the kernels that torch launches, in words.
        interval: by "gemmery" and "cublas", the seconds between which `calibration.COVERAGE` of the measurements of
            such products are; empty for a GPU on which nothing was measured.
        expected_error: by "gemmery" and "cublas", the relative error that half of such predictions stay below; empty
            for a GPU on which nothing was measured.
        basis: the basis of the prediction, in words.
        measured_on: the GPU whose measurements correct it; None if there are none of this GPU.
        recorded: the measured times of exactly this product; None if there are none.
    """

    problem: Problem
    gemmery: float | None
    cublas: float | None
    roofline: float
    bound: str
    config: str
    copies: tuple[str, ...]
    tiles: int
    waves: float
    cost: dict[str, float]
    cublas_cost: dict[str, float]
    calls: tuple[str, ...]
    interval: dict[str, tuple[float, float]]
    expected_error: dict[str, float]
    basis: str
    measured_on: str | None
    recorded: Measured | None

    @property
    def mark(self) -> str:
        """A note that nothing was measured on the GPU; "" if something was."""
        return mark_of(self.problem.device)

    @property
    def winner(self) -> str | None:
        """The faster implementation, "gemmery" or "cublas"; None if this can't be decided.

        It is decided by the recorded times if both exist, and otherwise by the predicted ones: by intervals, or ranges
        over the rounds, that do not overlap.
        """
        measured = {} if self.recorded is None else self.recorded.spread
        ends = measured if len(measured) == 2 else self.interval
        if len(ends) < 2:
            return None
        (low, high), (other_low, other_high) = ends["gemmery"], ends["cublas"]
        return "gemmery" if high < other_low else "cublas" if other_high < low else None

    @property
    def limit(self) -> str:
        """The limit by the data sheet: "compute" or "memory". `bound` is what the kernel waits for."""
        return (
            "compute"
            if arithmetic(self.problem) >= self.problem.bytes / self.problem.device.bandwidth
            else "memory"
        )

    @property
    def vendor(self) -> str:
        """The name of the vendor's BLAS."""
        return "cuBLAS" if self.problem.device.target.backend == "cuda" else "hipBLASLt"

    @property
    def binding(self) -> str:
        """The bound of gemmery's kernel, and the data sheet's limit if it differs; "" if there is no kernel."""
        if not self.bound:
            return ""
        said = BOUND_WORDS[self.bound]
        if self.bound == self.limit:
            return said
        limit = {"compute": "arithmetic", "memory": "memory"}[self.limit]
        return f"{said}, where a perfect kernel would be by {limit}"

    @property
    def verdict(self) -> str:
        """The faster implementation, in words, or why this can't be decided; "" if one of the two has no time."""
        if self.ratio is None:
            return ""
        if self.winner is not None:
            name = "gemmery" if self.winner == "gemmery" else self.vendor
            by = "measured" if self.recorded is not None and len(self.recorded.spread) == 2 else "predicted"
            return f"{name} is the faster one, {by}"
        if self.mark:
            return "which one is faster is not known"
        return "too close to call"

    @property
    def room(self) -> float | None:
        """The part of gemmery's time above the roofline: 0.25 if a perfect kernel would take a quarter less."""
        return None if self.gemmery is None else 1 - self.roofline / self.gemmery

    @property
    def ratio(self) -> float | None:
        """The vendor's time divided by gemmery's: above 1, gemmery is faster."""
        return None if self.gemmery is None or self.cublas is None else self.cublas / self.gemmery

    @property
    def intensity(self) -> float:
        """Operations per byte of the least traffic."""
        return self.problem.flops / self.problem.bytes

    def asdict(self) -> dict[str, Any]:
        """All fields as plain values, for JSON; times in seconds."""
        p = self.problem
        return {
            "problem": str(p),
            "device": p.device.name,
            **{name: getattr(p, name) for name in ("M", "N", "K", "flops", "bytes")},
            "batch": list(p.batch),
            "gemmery": self.gemmery,
            "cublas": self.cublas,
            "vendor": self.vendor,
            "roofline": self.roofline,
            "room": self.room,
            "ratio": self.ratio,
            "intensity": self.intensity,
            "bound": self.bound,
            "limit": self.limit,
            "winner": self.winner,
            "interval": {name: list(ends) for name, ends in self.interval.items()},
            "coverage": COVERAGE,
            "recorded": None if self.recorded is None else asdict(self.recorded),
            "measured": not self.mark,
            "mark": self.mark,
            "note": p.device.note,
            "config": self.config,
            "copies": list(self.copies),
            "tiles": self.tiles,
            "waves": self.waves,
            "cost": self.cost,
            "cublas_cost": self.cublas_cost,
            "calls": list(self.calls),
            "expected_error": self.expected_error,
            "basis": self.basis,
            "measured_on": self.measured_on,
        }


def arithmetic(problem: Problem) -> float:
    """The seconds of a product's operations at the datasheet's rate, of 2:4 weights at that of sparse tensor cores."""
    p = problem
    rate = p.device.rate(p.a.dtype, p.precision)
    return p.flops / (2 * rate if p.b.is_sparse and p.device.target.backend == "cuda" else rate)


def roofline(problem: Problem) -> float:
    """The least seconds that the datasheet allows: the larger of arithmetic and memory traffic.

    Inputs are in no cache, so that each distinct byte of them comes from memory. The output might stay in L2 for a
    while, but no recorded time of any product is below this, and no prediction is either.
    """
    return max(arithmetic(problem), problem.bytes / problem.device.bandwidth)


def predict(problem: Problem, config: Config | str | None = None) -> Prediction:
    """Predict a product's time for gemmery and for the vendor's BLAS. Needs no GPU.

    The model consists of waves, tensor cores, L2, memory and fixed costs, with constants that are fitted to
    measurements. On the GPU that was measured, it is corrected by its errors on similar products.

    Args:
        problem: the product and the GPU; `lab.abstract.abstract_problem` creates one from sizes and names.
        config: the config of the kernel; by default the one that gemmery chooses. A given config runs without copies.

    Raises:
        ValueError: no kernel can run the problem, or the given config is not among those that are considered for it.

    Example:
        >>> from gemmery.devices import TABLE
        >>> from gemmery.lab.abstract import abstract_problem
        >>> p = predict(abstract_problem(4096, 4096, 4096, device=TABLE["NVIDIA H200"]))
        >>> p.roofline < p.gemmery < 2 * p.roofline
        True
    """
    known, measured = calibration_of(problem.device)
    launched = ours.launch(problem, None if config is None else Config.of(config))
    mine = _Time() if launched is None else _ours(launched, known, measured)
    times = recorded.measured_of(problem)
    if times is not None and config is not None and times.config != str(Config.of(config)):
        times = None
    found = vendor.route(problem)
    theirs = _Time() if found is None else _vendor(found, known, measured)
    errors = {
        name: time.error for name, time in (("gemmery", mine), ("cublas", theirs)) if time.error is not None
    }
    intervals = {
        name: time.interval
        for name, time in (("gemmery", mine), ("cublas", theirs))
        if time.interval is not None
    }
    return Prediction(
        problem=problem,
        gemmery=mine.seconds,
        cublas=theirs.seconds,
        roofline=roofline(problem),
        bound=_bound(mine),
        config="torch reference" if launched is None else str(launched.config),
        copies=() if launched is None else launched.names,
        tiles=0 if launched is None else _tiles(launched),
        waves=0.0 if launched is None else ours.cost_of(launched.product, launched.config).waves,
        cost=mine.cost,
        cublas_cost=theirs.cost,
        calls=theirs.calls,
        interval=intervals,
        expected_error=errors,
        basis=_basis(problem, known, measured),
        measured_on=known.gpu if measured else None,
        recorded=times,
    )


def _tiles(launched: ours.Launch) -> int:
    p, c = launched.product, launched.config
    return p.matrices * -(-p.M // c.block_m) * -(-p.N // c.block_n)


@dataclass(frozen=True)
class _Time:
    """A predicted time; None if there is none."""

    seconds: float | None = None
    cost: dict[str, float] = field(default_factory=dict)
    calls: tuple[str, ...] = ()
    error: float | None = None
    interval: tuple[float, float] | None = None


def _ours(launched: ours.Launch, known: Calibration, measured: bool) -> _Time:
    c, parts = known.constants["gemmery"], ours.parts(launched)
    return _corrected(
        float(ours.seconds(parts, c)), roofline(launched.problem), ours.cost(parts, c), (), ours.features(launched),
        "gemmery", known, measured,
    )  # fmt: skip


def _vendor(found: vendor.Route, known: Calibration, measured: bool) -> _Time:
    c, parts = known.constants["cublas"], vendor.parts(found)
    rate = vendor.rate(found, c)
    cost, tile = vendor.cost(parts, rate, c)
    calls = [f"copy of {name}" for name in found.copied] + [f"product in tiles of {tile}"]
    if found.kernels:
        calls.append(f"{found.kernels} elementwise kernel{'s' if found.kernels > 1 else ''}")
    least = max(roofline(found.problem), parts["read"])
    return _corrected(
        float(vendor.seconds(parts, rate, c)), least, cost, tuple(calls), vendor.features(found), "cublas", known,
        measured,
    )  # fmt: skip


def _corrected(
    law: float, least: float, cost: dict[str, float], calls: tuple[str, ...],
    features: tuple[Sequence[float], Sequence[str]], method: str, known: Calibration, measured: bool,
) -> _Time:  # fmt: skip
    """A law's time with what measurements of similar products add, and not below what the datasheet allows."""
    if not measured:
        seconds = max(law, least)
        return _Time(seconds, cost | {"correction": seconds - law}, calls)
    mean, deviation = known.corrections[method](Samples.of([features]))
    seconds = max(law * float(np.exp(mean[0])), least)
    # Errors are those of predicted over measured time.
    off = known.wide[method] * float(deviation[0])
    return _Time(
        seconds,
        cost | {"correction": seconds - law},
        calls,
        known.half[method] * float(deviation[0]),
        (max(seconds / (1 + off), least), seconds / max(1 - off, 0.1)),
    )


def _bound(time: _Time) -> str:
    if time.seconds is None:
        return ""
    part = max(BINDING, key=lambda name: time.cost[name])
    return part if time.cost[part] >= 0.5 * time.seconds else "overhead"


def _basis(problem: Problem, known: Calibration, measured: bool) -> str:
    if measured:
        counts = " and ".join(f"{known.samples[name]} of {name}" for name in known.samples)
        return f"a model fitted to measurements on an {known.gpu} and corrected by them: {counts}"
    return (
        f"a model with constants that were fitted on an {known.gpu}, as parts of the datasheet's rates of the "
        f"{problem.device.name}, which has not been measured"
    )
