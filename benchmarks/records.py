"""Reads the results under benchmarks/results/, for the scripts beside it."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What is described is this checkout, not a copy that happens to be installed.
sys.path.insert(0, str(ROOT / "src"))

from gemmery.lab import suites  # noqa: E402
from gemmery.lab.results import Summary, kind, read, regimes, run_line, summarise  # noqa: E402

__all__ = [
    "RESULTS", "Bar", "Data", "bar_of", "kind", "parts", "peers", "read_models", "read_results", "regimes", "run_line",
]  # fmt: skip
RESULTS = ROOT / "benchmarks" / "results"
#: Suites in the order in which they are shown; others follow by name.
ORDER = (
    "square", "llm", "llm_large", "decode", "layouts", "views", "bmm", "dtypes", "invariant", "odd", "strided",
    "fused", "lowbit", "lowbit_formats", "lowbit_fused", "scaled", "scaled_accurate", "scaled_mx", "launch",
    "random_decode", "random_mid", "random_prefill", "random_backward",
)  # fmt: skip

Data = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """What a suite, or a part of one, has to reach against its peer, or against the `BEST` of several.

    Attributes:
        geomean, worst: least ratios, as geometric mean and in the worst row.
        regimes, kinds: where it counts; see `kind`.
    """

    geomean: float
    worst: float | None
    regimes: tuple[str, ...] = ("burst", "steady")
    kinds: tuple[str, ...] = ("bf16", "mixed")


BARS = {
    "square": [Bar(1.01, 0.96, kinds=("bf16", "fp16"))],
    "llm": [Bar(1.01, 0.95)],
    "decode_small": [Bar(1.02, 0.96)],
    # Newer versions of Triton have clusters.
    "decode_mid": [Bar(0.93, 0.85), Bar(0.99, 0.93, kinds=("bf16, Triton 3.9",))],
    "layouts_plain": [Bar(1.00, 0.93)],
    "views": [Bar(1.20, 0.93)],
    "bmm_cubes": [Bar(1.00, 0.93)],
    "dtypes_int8_tf32": [Bar(0.95, 0.90)],
    "invariant": [Bar(0.92, 0.80)],
    "fused_swiglu": [Bar(1.06, 1.02)],
    "fused_swiglu_small": [Bar(1.03, 1.03)],
    "fused_bias": [Bar(1.03, 0.99)],
    # At most 1.2 and 0.8 times the host time of torch.
    "launch_out": [Bar(1 / 1.2, None, regimes=("host",))],
    "launch_plan": [Bar(1 / 0.8, None, regimes=("host",))],
}
#: The parts of `models.py` in the order in which they are shown.
MODELS = ("gated", "llama", "costs", "first", "host")
#: What the fastest peer of each row is called, where there are several.
BEST = "the best"


def read_results(folder: Path) -> list[Data]:
    """All results of a folder in the order in which they are shown; ValueError names a file that is none."""
    results = [read(path) for path in sorted(folder.glob("*.json"))]
    return sorted(results, key=_place)


def read_models(folder: Path) -> list[Data]:
    """What `models.py` wrote, in the order in which it is shown; ValueError names a file that is not of it."""
    found = {}
    for path in sorted((folder / "models").glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if missing := {"part", "entries", "protocol", "commit"} - set(data):
            raise ValueError(
                f"models/{path.name} is no result of models.py: it is without {', '.join(sorted(missing))}"
            )
        found[data["part"]] = data
    return [found[part] for part in (*MODELS, *sorted(set(found) - set(MODELS))) if part in found]


def _place(result: Data) -> tuple[int, str, str]:
    suite = result["suite"]
    return (ORDER.index(suite) if suite in ORDER else len(ORDER), suite, kind(result))


def bar_of(name: str, result: Data, regime: str) -> Bar | None:
    """The bar of a suite, or of a part of one, that counts for a result."""
    found = [bar for bar in BARS.get(name, ()) if regime in bar.regimes and kind(result) in bar.kinds]
    return found[0] if found else None


def peers(result: Data) -> list[str]:
    """What ours is compared with; last what bars are about."""
    return [*result["peers"], BEST] if len(result["peers"]) > 1 else list(result["peers"])


def _with_best(row: Data) -> Data:
    """A row with its fastest peer as one more."""
    summary = {}
    for regime, figures in row.get("summary", {}).items():
        ratios = figures["ratio"]
        best = {BEST: min(ratios.values(), key=lambda ratio: ratio["median"])} if ratios else {}
        summary[regime] = figures | {"ratio": ratios | best}
    return row | {"summary": summary}


def parts(result: Data) -> list[tuple[str, Summary]]:
    """The suite and those parts of it of which rows were measured: name and summary of each."""
    rows = [_with_best(row) for row in result["rows"]] if len(result["peers"]) > 1 else result["rows"]
    found = [(result["suite"], summarise(rows))]
    for name, (whole, keep) in suites.PARTS.items():
        if whole == result["suite"]:
            found.append((name, summarise(rows, lambda row, keep=keep: keep(suites.Row.of(row)))))
    return [(name, summary) for name, summary in found if summary]
