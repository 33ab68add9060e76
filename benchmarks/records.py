"""Reads the results under benchmarks/results/, for the scripts beside it."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
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
    "BEST", "RESULTS", "Bar", "Data", "Group", "Pooled", "bar_of", "cell", "groups", "kind", "newest_first", "parts",
    "peers", "read_folder", "read_models", "read_results", "regimes", "row_round", "run_line", "table", "three",
    "two_groups", "versions",
]  # fmt: skip
RESULTS = ROOT / "benchmarks" / "results"
#: Suites in the order in which they are shown; others follow by name.
ORDER = (
    "square", "llm", "llm_large", "decode", "layouts", "views", "bmm", "dtypes", "invariant", "odd", "strided",
    "fused", "lowbit", "lowbit_formats", "lowbit_fused", "scaled", "scaled_accurate", "scaled_mx", "launch",
    *suites.RANDOM,
)  # fmt: skip

Data = dict[str, Any]
#: What the fastest peer of each row is called, where there are several.
BEST = "the best"


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
        title: what they are, and what they are measured against.
        suites: whose rows are taken together.
        regime: in which the ratios were taken.
        peer: which of the peers they are beside.
        keep: says which rows count; all by default.
    """

    title: str
    suites: tuple[str, ...]
    regime: str = "burst"
    peer: str = BEST
    keep: Callable[[Data], bool] = bool


#: The README's table: the first `MOST_GROUPS` of these that have results.
GROUPS = (
    Group("random models, 1 to 64 rows, against cuBLAS", ("random_decode",)),
    Group("the same, 65 to 511 rows", ("random_mid",)),
    Group("the same, 512 to 8192 rows", ("random_prefill",)),
    Group("the same with gradients", ("random_backward",)),
    Group("random models, batch-invariant, against cuBLAS, which is not", ("random_invariant",)),
    Group(
        "random models, fused activation, bias or residual, against the best of torch and torch.compile",
        ("random_swiglu", "random_bias_gelu", "random_bias_residual"),
    ),
    Group("random models, int4 weights, 1 to 64 rows, against bf16 ones", ("random_int4_small",)),
    Group("the same, 256 to 8192 rows", ("random_int4",)),
    Group(
        "random models, fp8 with scales, against torch",
        ("random_fp8", "random_fp8_accurate", "random_fp8_blocks"),
    ),
    Group("known models, 512 to 8192 rows, against cuBLAS", ("llm",)),
    Group("fused activation or bias, against the best of torch and torch.compile", ("fused",)),
    Group("int4 weights, against bf16 ones and tinygemm", ("lowbit",)),
    Group("fp8 and int8 with scales, against torch", ("scaled", "scaled_accurate")),
    Group("MXFP8, against bf16", ("scaled_mx",)),
    Group("odd sizes, strided operands, views of batches, against torch", ("odd", "strided", "views")),
    Group("known models, 1 to 384 rows, against cuBLAS", ("decode",)),
    Group("batch-invariant, against cuBLAS, which is not", ("invariant",)),
    Group("fp32, fp64, int8 and fp8, against torch", ("dtypes",)),
    Group("host time of a call, against torch", ("launch",), "host"),
)
MOST_GROUPS = 14
#: The GPU that README's table is about. Other pages name that of each result.
GPU = "NVIDIA H200"
#: Lines below those, always shown: of suites that `sparse_summary` makes of its results.
SPARSE_GROUPS = (
    Group("random models, 2:4 weights, 1 to 64 rows, against dense cuBLAS", ("sparse_decode",), peer="dense torch"),
    Group("the same, 1024 rows and more", ("sparse_prefill",), peer="dense torch"),
    Group(
        "block-sparse (blocks of 64, 90 % zero), against the best of dense cuBLAS and torch",
        ("blocks", "blocks_random"),
        keep=lambda row: row["block"] == 64 and row["sparsity"] == 0.9,
    ),
)  # fmt: skip
#: The parts of `models.py` in the order in which they are shown.
MODELS = ("gated", "llama", "costs", "first", "host")


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
                f"models/{path.name} is not a result of models.py: it lacks {', '.join(sorted(missing))}"
            )
        found[data["part"]] = data
    return [found[part] for part in (*MODELS, *sorted(set(found) - set(MODELS))) if part in found]


def read_folder(folder: Path, needed: set[str], script: str) -> list[Data]:
    """The results that a script wrote into a folder, by date; none where there is no folder.

    Raises:
        ValueError: a file lacks a needed entry; it is named.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or needed - set(data):
            raise ValueError(f"{folder.name}/{path.name} is not a result of {script}")
        found.append(data)
    return sorted(found, key=lambda data: data["date"])


def newest_triton_first(results: Iterable[Data]) -> list[Data]:
    """Results by their version of Triton."""
    return sorted(results, key=lambda one: [int(x) for x in one["triton"].split(".")], reverse=True)


def run_lines(results: Iterable[Data], before: str = "") -> str:
    """A list of where results are from; `before` stands before each."""
    return "\n".join(f"- {before}{run_line(result)}." for result in results)


def cell(text: str) -> str:
    """A text as one cell: neither bars nor line ends may split it."""
    return " ".join(text.replace("|", "\\|").split())


def table(head: list[str], rows: list[list[str]], columns: str) -> str:
    """A table whose columns are aligned as their letters say, l or r; the last letter stands for the rest."""
    letters = columns + columns[-1] * (len(head) - len(columns))
    rule = ["---:" if letter == "r" else "---" for letter in letters]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *rows])


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
    """The groups that `GPU` has results of, each with its rows by version of Triton.

    These are `MOST_GROUPS` of the first, and `SPARSE_GROUPS`.
    """
    return [*_groups(GROUPS, results)[:MOST_GROUPS], *_groups(SPARSE_GROUPS, results)]


def _groups(of: Sequence[Group], results: Sequence[Data]) -> list[tuple[Group, dict[str, Pooled]]]:
    found = []
    for group in of:
        rows: dict[str, list[Data]] = {}
        for result in results:
            if (
                result["suite"] in group.suites
                and result["dtype"] in ("bf16", "mixed")
                and not result.get("tuned")
                and result["gpu"] == GPU
            ):
                own = (_with_best(row) for row in result["rows"] if group.keep(row))
                rows.setdefault(triton_version(result), []).extend(own)
        if pooled := {version: one for version, each in rows.items() if (one := _pooled(each, group))}:
            found.append((group, pooled))
    return found


def _pooled(rows: Sequence[Data], group: Group) -> Pooled | None:
    figures = summarise(rows).get(group.regime, {}).get(group.peer)
    measured = (row["summary"][group.regime]["ratio"] for row in rows if group.regime in row["summary"])
    return (
        None
        if figures is None
        else Pooled([one[group.peer]["median"] for one in measured if group.peer in one], figures)
    )


def three(figures: Data) -> str:
    """The geometric mean, the 10th percentile and the worst of figures, as tables show them."""
    return f"**{figures['geomean']:.2f}** · {figures['p10']:.2f} · {figures['worst']:.2f}"


def newest_first(versions: Iterable[str]) -> list[str]:
    """Versions such as 3.9 and 3.10, each once, the newest first."""
    return sorted(set(versions), key=lambda version: [*map(int, version.split("."))], reverse=True)


def versions(found: Sequence[tuple[Group, dict[str, Pooled]]]) -> list[str]:
    """The versions of Triton among them, the newest first."""
    return newest_first(version for _, each in found for version in each)
