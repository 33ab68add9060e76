"""Reads the results under benchmarks/results/, for the scripts beside it."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What is described is this checkout, not a copy that happens to be installed.
sys.path.insert(0, str(ROOT / "src"))

from gemmery.lab import suites  # noqa: E402
from gemmery.lab.results import (  # noqa: E402
    Summary,
    kind,
    read,
    regimes,
    row_round,
    run_line,
    summarise,
    triton_version,
    two_groups,
)

__all__ = [
    "RESULTS", "Bar", "Data", "Group", "Pooled", "bar_of", "groups", "kind", "parts", "peers", "read_models",
    "read_results", "regimes", "row_round", "run_line", "two_groups", "versions",
]  # fmt: skip
RESULTS = ROOT / "benchmarks" / "results"
#: Suites in the order in which they are shown; others follow by name.
ORDER = (
    "square", "llm", "llm_large", "decode", "layouts", "views", "bmm", "dtypes", "invariant", "odd", "strided",
    "fused", "lowbit", "lowbit_formats", "lowbit_fused", "scaled", "scaled_accurate", "scaled_mx", "launch",
    *suites.RANDOM,
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


@dataclass(frozen=True)
class Group:
    """Suites that are one line of the README's table.

    Attributes:
        title: what they are, and what they are measured beside.
        suites: whose rows are taken together.
        regime: in which the ratios were taken.
    """

    title: str
    suites: tuple[str, ...]
    regime: str = "burst"


#: The README's table: the first `MOST_GROUPS` of these that have results.
GROUPS = (
    Group("random models, 1 to 64 rows, beside cuBLAS", ("random_decode",)),
    Group("random models, 65 to 511 rows, beside cuBLAS", ("random_mid",)),
    Group("random models, 512 to 8192 rows, beside cuBLAS", ("random_prefill",)),
    Group("the same with gradients, beside cuBLAS", ("random_backward",)),
    Group("random models, batch-invariant, beside cuBLAS that is not", ("random_invariant",)),
    Group(
        "random models, activation, bias or residual behind the product, beside the best of torch and torch.compile",
        ("random_swiglu", "random_bias_gelu", "random_bias_residual"),
    ),
    Group("random models, int4 weights, 1 to 64 rows, beside bf16 ones", ("random_int4_small",)),
    Group("random models, int4 weights, 256 to 8192 rows, beside bf16 ones", ("random_int4",)),
    Group(
        "random models, fp8 with scales, beside torch",
        ("random_fp8", "random_fp8_accurate", "random_fp8_blocks"),
    ),
    Group("known models, 512 to 8192 rows, beside cuBLAS", ("llm",)),
    Group("activation or bias behind the product, beside the best of torch and torch.compile", ("fused",)),
    Group("int4 weights, beside bf16 ones and tinygemm", ("lowbit",)),
    Group("fp8 and int8 with scales, beside torch", ("scaled", "scaled_accurate")),
    Group("MXFP8, beside bf16", ("scaled_mx",)),
    Group("odd sizes, strided operands, views of batches, beside torch", ("odd", "strided", "views")),
    Group("known models, 1 to 384 rows, beside cuBLAS", ("decode",)),
    Group("batch-invariant, beside cuBLAS that is not", ("invariant",)),
    Group("fp32, fp64, int8 and fp8, beside torch", ("dtypes",)),
    Group("host time of a call, beside torch", ("launch",), "host"),
)
MOST_GROUPS = 14
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


@dataclass(frozen=True)
class Pooled:
    """The rows of a group's suites that were measured with one version of Triton.

    Attributes:
        ratios: of each row beside the fastest of its peers, the median over the rounds.
        figures: their summary, see `gemmery.lab.results.summarise`.
    """

    ratios: list[float]
    figures: Data


def groups(results: Sequence[Data]) -> list[tuple[Group, dict[str, Pooled]]]:
    """The groups that have results, each with its rows by version of Triton; at most `MOST_GROUPS`."""
    found = []
    for group in GROUPS:
        rows: dict[str, list[Data]] = {}
        for result in results:
            if (
                result["suite"] in group.suites
                and result["dtype"] in ("bf16", "mixed")
                and not result.get("tuned")
            ):
                rows.setdefault(triton_version(result), []).extend(map(_with_best, result["rows"]))
        if pooled := {version: one for version, each in rows.items() if (one := _pooled(each, group.regime))}:
            found.append((group, pooled))
    return found[:MOST_GROUPS]


def _pooled(rows: Sequence[Data], regime: str) -> Pooled | None:
    figures = summarise(rows).get(regime, {}).get(BEST)
    measured = (row["summary"][regime]["ratio"] for row in rows if regime in row["summary"])
    return None if figures is None else Pooled([one[BEST]["median"] for one in measured if one], figures)


def versions(found: Sequence[tuple[Group, dict[str, Pooled]]]) -> list[str]:
    """The versions of Triton among them, the newest first."""
    known = {version for _, each in found for version in each}
    return sorted(known, key=lambda version: [*map(int, version.split("."))], reverse=True)
