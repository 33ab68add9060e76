"""What the summary says besides of packed weights: against QuACK's figures, and what is fused beside what is bare."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.records import Data, kind, regimes
from gemmery.lab.results import fused_costs


@dataclass(frozen=True)
class Quoted:
    """Another library's time on an H200, and cuBLAS's in bf16 for the same product beside it, both in µs."""

    us: float
    cublas_us: float


#: QuACK with int4 weights (groups of 128), N = K = 8192, by M: shared/BENCHMARKS.md, "What peers do there". It is not
#: run here, so its time now is taken to be the same part of cuBLAS's as then. cuBLAS's are the middles of what is given
#: there; for M = 1 that of M = 16, which reads the same weights, and for M = 1024 that of 4096³, as many operations.
QUACK = {
    1: Quoted(21.9, 44.0),
    16: Quoted(21.5, 44.0),
    64: Quoted(26.0, 46.0),
    128: Quoted(32.5, 45.5),
    1024: Quoted(167.0, 183.5),
}
#: What is said under the table.
ABOUT_QUACK = (
    "QuACK was not run here: its time is computed, as the same part of cuBLAS's bf16 time as when both were measured "
    f"on an H200 and QuACK took {', '.join(f'{x.us:g}' for x in QUACK.values())} µs at "
    f"M = {', '.join(map(str, QUACK))}."
)


def label(result: Data) -> str:
    """What tells a result from others of its suite and type, as `, Triton 3.9`; empty for the usual one."""
    return kind(result).removeprefix(result["dtype"])


def quack_us(row: Data, regime: str) -> float | None:
    """QuACK's time for a row of int4 weights, in units of this run's cuBLAS; None where it has no figure."""
    quoted = QUACK.get(row["M"])
    us = row.get("summary", {}).get(regime, {}).get("us", {}).get("cublas")
    plain = row.get("weight") in ("int4", "int4/128") and not row.get("epilogue")
    if quoted is None or us is None or not plain or (row["N"], row["K"]) != (8192, 8192):
        return None
    return float(quoted.us / quoted.cublas_us * us)


def int4_rows(result: Data) -> list[list[str]]:
    """A line for each row of 8192 by 8192 and regime: all times, and QuACK's as it is taken to be."""
    ours, lines = result["ours"], []
    for row in result["rows"]:
        if (row["N"], row["K"]) != (8192, 8192) or row.get("epilogue"):
            continue
        for regime in regimes(result):
            times = row.get("summary", {}).get(regime, {}).get("us", {})
            if ours not in times:
                continue
            quack = quack_us(row, regime)
            shown = [f"{times[name]:.1f}" if name in times else "–" for name in (ours, *result["peers"])]
            against = ["", ""] if quack is None else [f"{quack:.1f}", f"{quack / times[ours]:.3f}"]
            lines.append([str(row["M"]), regime, *shown, *against])
    return lines


def int4_heading(result: Data) -> list[str]:
    """The heading of `int4_rows`."""
    names = [f"{name} µs" for name in (result["ours"], *result["peers"])]
    return [
        f"int4 × 8192 × 8192{label(result)}, M",
        "regime",
        *names,
        "QuACK µs, computed",
        "QuACK / gemmery, computed",
    ]


def format_cell(own: Data, base: Data | None, ours: str) -> str:
    """A row's time, the vendor's over it, and how it compares to `base`, of what there is of these."""
    if ours not in own.get("us", {}):
        return "–"
    texts = [f"{own['us'][ours]:.1f}"]
    if "cublas" in own["ratio"]:
        texts.append(f"{own['ratio']['cublas']['median']:.2f}")
    if base is not None and ours in base.get("us", {}):
        texts.append(f"{own['us'][ours] / base['us'][ours] - 1:+.0%}")
    return ", ".join(texts)


def format_rows(results: Sequence[Data]) -> list[list[str]]:
    """A line for each format, regime and result, with a cell for each number of rows of x."""
    counts = _counts(results)
    lines = []
    for result, regime in [(each, regime) for each in results for regime in regimes(each)]:
        found = {(row["weight"], row["M"]): row.get("summary", {}).get(regime, {}) for row in result["rows"]}
        for weight in dict.fromkeys(row["weight"] for row in result["rows"]):
            base = "" if weight == "int4" else "int4"
            pairs = [(found.get((weight, M), {}), found.get((base, M))) for M in counts]
            cells = [format_cell(own, beside, result["ours"]) for own, beside in pairs]
            lines.append([weight, regime + label(result), *cells])
    return lines


def format_heading(results: Sequence[Data]) -> list[str]:
    """The heading of `format_rows`."""
    return ["weights, 8192 × 8192", "regime", *[f"M = {M}" for M in _counts(results)]]


def _counts(results: Sequence[Data]) -> list[int]:
    return sorted({row["M"] for result in results for row in result["rows"]})


#: What is said under that table.
ABOUT_FORMATS = (
    "Of each format the time in µs, cuBLAS's in bf16 over it, and by how much it is longer than int4's in the same run "
    "(medians)."
)


def fused_rows(results: Sequence[Data]) -> list[list[str]]:
    """A line for each fused product whose bare one was measured as well."""
    return [
        [
            cost.name,
            cost.bare,
            regime + label(result),
            f"{cost.us:.1f}",
            f"{cost.bare_us:.1f}",
            f"**{cost.ratio:.3f}**",
        ]
        for result in results
        for regime in regimes(result)
        for cost in fused_costs(result["rows"], regime, result["ours"])
    ]


FUSED_HEADING = ["fused, packed weights", "bare", "regime", "fused µs", "bare µs", "fused / bare"]


def geomeans(results: Iterable[Data]) -> str:
    """Geometric mean of fused over bare, by regime, as a sentence; empty where nothing was measured."""
    texts = []
    for result in results:
        for regime in regimes(result):
            ratios = [cost.ratio for cost in fused_costs(result["rows"], regime, result["ours"])]
            if ratios:
                mean, worst = statistics.geometric_mean(ratios), max(ratios)
                texts.append(
                    f"{regime}{label(result)}: {mean:.3f} in the geometric mean, at most {worst:.3f}"
                )
    return f"Fused over bare, {'; '.join(texts)}." if texts else ""
