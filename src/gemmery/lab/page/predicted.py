"""The parts of an answer that come from a prediction: the times, the config and why, the roofline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ... import schedules
from ...launch.explain import Explanation
from ...problem import Config, Problem
from ..prediction import Prediction
from . import texts

#: The names of the parts of a predicted time.
PART_WORDS = {
    "compute": "arithmetic", "l2": "reads from L2", "memory": "memory", "overhead": "launch, pipeline, stores",
    "reduction": "adding partial sums", "copies": "copies", "correction": "correction by measurements",
}  # fmt: skip
#: Times that would be shown as 0.00 µs.
NOTHING = 5e-9


def _integers(problem: Problem) -> bool:
    return problem.a.dtype == torch.int8


# --- times -----------------------------------------------------------------------------------------------------------


def times(found: Prediction) -> dict[str, Any]:
    """The predicted times and their comparison."""
    rows = {"gemmery": found.gemmery, "cublas": found.cublas, "roofline": found.roofline}
    longest = max(seconds for seconds in rows.values() if seconds is not None)
    made: dict[str, Any] = {
        name: None
        if seconds is None
        else {**texts.seconds(seconds), "share": seconds / longest, "rate": _rate(found.problem, seconds)}
        for name, seconds in rows.items()
    }
    room, ratio = found.room, found.ratio
    return made | {
        "room": None if room is None else texts.part(room),
        "reached": None if room is None else texts.part(1 - room),
        "ratio": None if ratio is None else texts.times(ratio),
        "verdict": found.verdict,
        "bound": found.binding,
        "mark": found.mark,
        "recorded": _recorded(found),
        "calls": f"torch launches: {', '.join(found.calls)}." if found.calls else "",
        "basis": _basis(found),
    }


def _recorded(found: Prediction) -> str:
    """The times that were measured of the product, in a sentence; "" if there are none."""
    if found.recorded is None:
        return ""
    names = {"gemmery": "gemmery", "cublas": found.vendor}
    times = [f"{names[name]} {texts.seconds(x)['text']}" for name, x in found.recorded.seconds.items()]
    return f"Measured: {', '.join(times)} ({found.recorded.source}). The figures below are predicted."


def _rate(problem: Problem, seconds: float) -> texts.Figure:
    return texts.rate(problem.flops / seconds, _integers(problem))


def _basis(found: Prediction) -> str:
    """The basis of the times, and the error of such predictions against measurements."""
    names = {"gemmery": "gemmery", "cublas": found.vendor}
    errors = [f"{texts.part(x)['text']} for {names[name]}" for name, x in found.expected_error.items()]
    near = f"half of such predictions are off by less than {' and '.join(errors)}" if errors else ""
    said = "; ".join(filter(None, (found.basis, near, found.problem.device.note)))
    return f"{said[0].upper()}{said[1:]}." if said else ""


def summary(found: Prediction) -> list[dict[str, str]]:
    """The answer in a few words, each number with its name; first, where nothing was measured, that."""
    rows = [
        ("gemmery", found.gemmery),
        (found.vendor, found.cublas),
        ("roofline", found.roofline),
    ]
    said = [
        {"name": name, "text": texts.seconds(seconds)["text"]}
        for name, seconds in rows
        if seconds is not None
    ]
    marks = [{"name": "", "text": found.mark}] if found.mark else []
    room = [] if found.room is None else [{"name": "room", "text": texts.part(found.room)["text"]}]
    return [*marks, *said, *room]


# --- the config ------------------------------------------------------------------------------------------------------


def choice(why: Explanation, found: Prediction) -> dict[str, Any]:
    """The chosen config, the alternatives, and the reasons."""
    return {
        "config": found.config if why.choices else None,
        "knobs": knobs(found.problem, Config.of(found.config)) if why.choices else [],
        "reasons": reasons(why, found),
        "parts": _parts(found.cost),
        "chosen_over": f"The best {len(why.choices)} of {texts.count(why.considered, 'config')}",
        "note": "By the selector's model, which is faster and simpler than the one above:"
        if why.choices
        else "",
        "candidates": [
            {
                "config": str(x.config),
                "predicted": None if x.cost is None else texts.seconds(x.cost.total),
                "measured": None if x.measured is None else texts.seconds(x.measured),
            }
            for x in why.choices
        ],
    }


def reasons(why: Explanation, found: Prediction) -> list[str]:
    """Why the config is chosen, which need not be the selector's first."""
    if not why.choices or str(why.choices[0].config) == found.config:
        return why.reasons
    first = f"the selector's first, {why.choices[0].config}, leaves no room for an output stored element by element"
    return [first, *why.reasons]


def _parts(cost: dict[str, float]) -> list[dict[str, Any]]:
    """The parts of a predicted time that are not nothing; they overlap, so that they do not add up to it."""
    largest = max((abs(x) for x in cost.values()), default=0.0)
    return [
        {
            "name": name,
            "text": PART_WORDS.get(name, name),
            "share": abs(value) / largest,
            "seconds": texts.seconds(value),
        }
        for name, value in cost.items()
        if abs(value) >= NOTHING
    ]


def knobs(problem: Problem, config: Config) -> list[dict[str, str]]:
    """The knobs of a problem's config with their meaning; those that are off are left out."""
    return [{"name": name, "value": value, "about": about} for name, value, about in _knobs(problem, config)]


def _knobs(problem: Problem, c: Config) -> Iterator[tuple[str, str, str]]:
    loaders = {"pointer": "any strides", "descriptor": "tensor descriptors (TMA)"}
    yield "tile", f"{c.block_m} × {c.block_n} × {c.block_k}", "rows, columns, K step"
    schedule = schedules.of(c.schedule)
    yield "group_m", str(schedule.band(problem, c)), "rows of tiles in a band"
    yield "num_warps", str(c.num_warps), "warps in a program"
    yield "num_stages", str(c.num_stages), "blocks of A and B in flight"
    yield "schedule", c.schedule, schedule.about
    yield "loader", c.loader, loaders[c.loader]
    if c.split_k > 1:
        yield "split_k", str(c.split_k), "parts of K, added within the launch"
    if c.tail > 1:
        yield "tail", str(c.tail), "parts of a tile that would not fill the last wave"
    if c.split_store:
        yield "split_store", "yes", "a tile is stored as two halves, which leaves room for a stage"
    if c.swap:
        yield "swap", "yes", "the transposed product, with few rows on the narrow side"
    if c.stream:
        yield "stream", "yes", "B is read once and need not stay in L2 (of specialized, from Triton 3.9 on)"


# --- the roofline ----------------------------------------------------------------------------------------------------


def roofline(found: Prediction) -> dict[str, Any]:
    """The device's roof, and the product's place under it, in operations per byte and operations per second."""
    p, device = found.problem, found.problem.device
    peak, integers = device.rate(p.a.dtype, p.precision), _integers(p)
    ridge = peak / device.bandwidth
    points: list[dict[str, Any]] = [
        {"name": name, "rate": _rate(p, seconds)}
        for name, seconds in (("gemmery", found.gemmery), ("cublas", found.cublas))
        if seconds is not None
    ]
    x = _decades([found.intensity, ridge, 1.0, 1e3])
    y = _decades([x[0] * device.bandwidth * 10, peak, *(point["rate"]["value"] for point in points)])
    start = max(x[0], y[0] / device.bandwidth)
    operations = "OP" if integers else "FLOP"
    side = "arithmetic" if found.limit == "compute" else "memory"
    # The headline's words for a kernel whose bound differs from the roofline's.
    but = (
        "" if found.bound in ("", found.limit) else f", but this kernel is {found.binding.partition(',')[0]}"
    )
    return {
        "where": f"{texts.rate(peak, integers)['text']}, {texts.bandwidth(device.bandwidth)['text']}",
        "text": f"{texts.digits(found.intensity)} {operations} per byte, and the ridge is at {texts.digits(ridge)}: "
        f"by the data sheet, {side} is the limit{but}.",
        "mark": found.mark,
        "intensity": {"value": found.intensity, "text": texts.digits(found.intensity)},
        "attainable": texts.rate(p.flops / found.roofline, integers),
        "points": points,
        "roof": [[start, start * device.bandwidth], [ridge, peak], [x[1], peak]],
        "x": _axis(x, f"{operations} per byte", lambda value: f"{value:g}"),
        "y": _axis(y, f"T{operations}/s", lambda value: f"{value / 1e12:g}"),
    }


def _decades(values: list[float]) -> tuple[float, float]:
    """Powers of ten around values."""
    low, high = min(values), max(values)
    return 10.0 ** math.floor(math.log10(low) + 1e-9), 10.0 ** math.ceil(math.log10(high * 1.1) - 1e-9)


def _axis(ends: tuple[float, float], unit: str, name: Callable[[float], str]) -> dict[str, Any]:
    first, last = (round(math.log10(end)) for end in ends)
    ticks = [{"value": 10.0**power, "text": name(10.0**power)} for power in range(first, last + 1)]
    return {"from": ends[0], "to": ends[1], "unit": unit, "ticks": ticks}
