"""Further tables of packed weights: the formats, and fused products against bare ones."""

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.records import Data, kind, regimes
from gemmery.lab.results import fused_costs


def label(result: Data) -> str:
    """What tells a result from others of its suite and type, as `, Triton 3.9`; empty for the usual one."""
    return kind(result).removeprefix(result["dtype"])


def format_cell(own: Data, base: Data | None, ours: str) -> str:
    """A row's time, the vendor's over it, and how it compares to `base`, of what there is of these."""
    if ours not in own.get("us", {}):
        return "–"
    texts = [f"{own['us'][ours]:.1f}"]
    if "cublas" in own["ratio"]:
        texts.append(f"{own['ratio']['cublas']['median']:.2f}")
    if base is not None and ours in base.get("median_us", {}):
        texts.append(f"{own['median_us'][ours] / base['median_us'][ours] - 1:+.0%}")
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
            cells = [format_cell(own, base_cell, result["ours"]) for own, base_cell in pairs]
            lines.append([weight, regime + label(result), *cells])
    return lines


def format_heading(results: Sequence[Data]) -> list[str]:
    """The heading of `format_rows`."""
    return ["weights, 8192 × 8192", "regime", *[f"M = {M}" for M in _counts(results)]]


def _counts(results: Sequence[Data]) -> list[int]:
    return sorted({row["M"] for result in results for row in result["rows"]})


#: What is said under that table.
ABOUT_FORMATS = (
    "A cell shows the time of the format in µs, the time of cuBLAS in bf16 divided by it, and how much longer its "
    "median over the rounds is than that of int4 in the same run."
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
                    f"{regime}{label(result)}: {mean:.3f} in the geometric mean, {worst:.3f} at most"
                )
    return f"Times are medians over the rounds. Fused / bare, {'; '.join(texts)}." if texts else ""
