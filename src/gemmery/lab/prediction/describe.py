"""A prediction as text, for a terminal."""

from __future__ import annotations

import triton

from ...dtypes import DTYPE_NAMES
from .calibration import COVERAGE
from .predict import Prediction


def describe(found: Prediction) -> str:
    """The times side by side, their parts, the distance to the roofline, and the basis of the prediction."""
    p = found.problem
    lines = [f"{p} on {p.device.name}"]
    if found.mark:
        lines.append(f"*** {found.mark} ***")
    lines += [*_table(found), ""]
    if found.gemmery is not None:
        copies = f", {' and '.join(found.copies)} copied first" if found.copies else ""
        lines.append(f"gemmery: {found.config}{copies}; {found.binding}")
        lines.append(
            f"  {found.tiles:,} tiles, {found.waves:.2f} on the busiest of {p.device.sms} multiprocessors"
        )
        lines.append(f"  {_parts(found.cost)}")
    else:
        lines.append(f"gemmery: torch reference, because {p.device.name} lacks the instructions")
    if found.cublas is not None:
        how = f" with the weight in {DTYPE_NAMES[p.b.dtype]}" if p.b.is_encoded else ""
        lines.append(f"{found.vendor}{how}: {', '.join(found.calls)}")
        lines.append(f"  {_parts(found.cublas_cost)}")
    else:
        lines.append(f"{found.vendor}: torch has no such product")
    lines += [
        *_conclusions(found),
        f"From {found.basis}. Config chosen for Triton {triton.__version__}.",
    ]
    return "\n".join(lines)


def _table(found: Prediction) -> list[str]:
    """A line for each of the times, first those that were measured."""
    names = {"gemmery": "gemmery", "cublas": found.vendor}
    times = {} if found.recorded is None else found.recorded.seconds
    between = f"  {COVERAGE:.0%} interval" if found.interval else ""
    half = "  median error   " if found.expected_error else ""
    lines = [f"{'':19} {'µs':>9} {'TFLOP/s':>9} {'of roofline':>12}{half}{between}"]
    for name, took in times.items():
        low, high = (end * 1e6 for end in found.recorded.spread[name]) if found.recorded else (0.0, 0.0)
        label = f"{names[name]}, measured"
        rounds = f"rounds: {low:.1f} to {high:.1f} µs; shown: the one with the median ratio"
        lines.append(f"{_figures(found, label, took)}  {rounds}")
    for name, label, seconds in (
        ("gemmery", "gemmery", found.gemmery),
        ("cublas", found.vendor, found.cublas),
        ("", "roofline", found.roofline),
    ):
        if seconds is not None:
            error = f"  {f'±{found.expected_error[name]:.0%}':15}" if name in found.expected_error else ""
            if name in found.interval:
                low, high = (end * 1e6 for end in found.interval[name])
                error += f"  {low:.1f} to {high:.1f} µs"
            predicted = ", predicted" if name and times else ""
            lines.append(f"{_figures(found, label + predicted, seconds)}{error}")
    return lines


def _figures(found: Prediction, label: str, seconds: float) -> str:
    rate, part = found.problem.flops / seconds / 1e12, found.roofline / seconds
    return f"{label:19} {seconds * 1e6:9.1f} {rate:9.1f} {part:12.0%}"


def _parts(cost: dict[str, float]) -> str:
    """The parts that are something, in µs; they overlap."""
    shown = [(name, seconds * 1e6) for name, seconds in cost.items() if abs(seconds) >= 0.05e-6]
    return ", ".join(
        f"{name} {us:+.1f}" if name == "correction" else f"{name} {us:.1f}" for name, us in shown
    )


def _conclusions(found: Prediction) -> list[str]:
    lines = []
    if found.gemmery is not None and found.room is not None:
        left = (found.gemmery - found.roofline) * 1e6
        lines.append(f"room left under the roofline: {found.room:.0%} of the time, {left:.1f} µs")
    if found.ratio is not None:
        times = {} if found.recorded is None else found.recorded.seconds
        measured = f"{times['cublas'] / times['gemmery']:.2f} measured, " if len(times) == 2 else ""
        lines.append(f"{found.vendor} / gemmery: {measured}{found.ratio:.2f} predicted; {found.verdict}")
    if found.recorded is not None:
        lines.append(f"measured: {found.recorded.source}")
    if found.problem.device.note:
        lines.append(f"{found.problem.device.name}: {found.problem.device.note}")
    return lines
