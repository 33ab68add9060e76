"""The result of a suite's run: its rows with all rounds, their summary, versions and GPU, as one JSON file."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..files import read_json, write_json
from ..tuning import stopwatch
from . import timing
from .peers import OURS
from .suites import Row
from .timing import Round

#: By regime and peer, see `summarise`.
Summary = dict[str, dict[str, dict[str, Any]]]


@dataclass
class Result:
    """A suite's results.

    Attributes:
        dtype: of `suites.DTYPES`, or `MIXED` where each row has its own.
        header: what ran where and when, by what protocol.
        rows: by row its shape, plan, errors, all rounds' times in seconds, and their summary; "left_out" names peers
            that have no such product and says why; "error" is there where the row failed.
    """

    suite: str
    dtype: str
    header: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """Names of the rows that could not be measured."""
        return [row["name"] for row in self.rows if "error" in row]

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all; directories are made."""
        data = {"suite": self.suite, "dtype": self.dtype, **self.header, "summary": summarise(self.rows)}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, data | {"rows": self.rows}, ensure_ascii=False)


#: The type of a suite in which every row has its own.
MIXED = "mixed"


def summarise(rows: Iterable[Mapping[str, Any]], keep: Callable[[Mapping[str, Any]], bool] = bool) -> Summary:
    """By regime and peer: geometric mean, 10th percentile and worst of the rows' median ratios, and how many these are.

    Args:
        rows: records as in `Result.rows`.
        keep: says which rows count; all by default.
    """
    found: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for row in filter(keep, rows):
        for regime, figures in row.get("summary", {}).items():
            for peer, ratio in figures["ratio"].items():
                found.setdefault(regime, {}).setdefault(peer, []).append((ratio["median"], row["name"]))
    return {
        regime: {
            peer: {
                "geomean": timing.geometric_mean([value for value, _ in pairs]),
                "p10": timing.percentile([value for value, _ in pairs], 10),
                "worst": min(pairs)[0],
                "worst_row": min(pairs)[1],
                "rows": len(pairs),
            }
            for peer, pairs in peers.items()
        }
        for regime, peers in found.items()
    }


# --- reading what was written ---------------------------------------------------------------------------------------

#: The keys of every result.
_NEEDED = ("suite", "dtype", "gpu", "triton", "peers", "protocol", "summary", "rows")
#: The version of Triton that results are of where they do not say.
TRITON = "3.6"


def read(path: Path) -> dict[str, Any]:
    """A result as `Result.save` wrote it, with the rows' summaries computed again from their rounds, so that one rule
    applies to all.

    Raises:
        ValueError: the file is not a result.
    """
    data = read_json(path)
    if not isinstance(data, dict) or (missing := set(_NEEDED) - set(data)):
        lacks = ", ".join(sorted(missing)) if isinstance(data, dict) else "everything"
        raise ValueError(f"{path.name} is not a benchmark result: it lacks {lacks}")
    for row in data["rows"]:
        if "rounds" in row:
            us = row.get("roofline_us")
            roofline = None if us is None else us * 1e-6
            row["summary"] = summarise_row(row["rounds"], Row.of(row).flops, roofline, data["peers"])
    return data


def triton_version(result: Mapping[str, Any]) -> str:
    """The version of Triton that a result was measured with, as 3.6."""
    return ".".join(result["triton"].split(".")[:2])


def kind(result: Mapping[str, Any]) -> str:
    """The type, the version of Triton where it is not `TRITON`, the seed of rows that are not the suite's own, and
    whether ours was tuned beforehand."""
    version = triton_version(result)
    words = [result["dtype"], *([f"Triton {version}"] if version != TRITON else [])]
    words += [f"seed {result['drawn']}"] if "drawn" in result else []
    return ", ".join([*words, *(["tuned"] if result.get("tuned") else [])])


def regimes(result: Mapping[str, Any]) -> list[str]:
    """The regimes that a result was measured in."""
    return list(result["protocol"]["regimes"])


def run_line(result: Mapping[str, Any]) -> str:
    """The GPU, the versions and the date of a run."""
    return (
        f"{result['gpu']}, torch {result['torch']}, Triton {result['triton']}, CUDA {result['cuda']}, commit "
        f"{result['commit']}, {result['date'][:10]}, {result['protocol']['rounds']} rounds"
    )


@dataclass(frozen=True)
class FusedCost:
    """The time of a fused product compared with the same product without the fused function.

    Attributes:
        name, bare: of the two rows.
        us, bare_us: our times, medians over the rounds of rows that were measured one after the other: these two have
            no round in common.
    """

    name: str
    bare: str
    us: float
    bare_us: float

    @property
    def ratio(self) -> float:
        """The time of the fused product divided by the plain product's."""
        return self.us / self.bare_us


def fused_costs(rows: Sequence[Mapping[str, Any]], regime: str, ours: str = OURS) -> list[FusedCost]:
    """The cost of each fused row of a suite whose bare product is another row, measured in `regime`."""

    def product(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in ("M", "N", "K", "dtype", "weight", "scales"))

    found = {
        (product(row), row.get("epilogue", "")): (row["name"], row["summary"][regime]["median_us"][ours])
        for row in rows
        if regime in row.get("summary", {})
    }
    costs = []
    for (same, epilogue), (name, us) in found.items():
        if epilogue and (same, "") in found:
            bare, bare_us = found[same, ""]
            costs.append(FusedCost(name, bare, us, bare_us))
    return costs


#: Rounds are in two groups if our times have a gap larger than this part, with at least this number of rounds on each
#: side.
GAP, LEAST_ROUNDS = 0.04, 2


def row_round(rounds: Sequence[Round], peers: Sequence[str], ours: str = OURS) -> Round:
    """The round that a row's times are shown of: the one with the median ratio to the first peer that was measured.

    So a time and a ratio that stand side by side are of one round. Without a peer it is the round with our median time;
    of an even number of rounds, the one below the middle.
    """
    peer = next((name for name in peers if name in rounds[0]), None)
    ranked = sorted(rounds, key=lambda times: times[ours] if peer is None else times[peer] / times[ours])
    return ranked[(len(ranked) - 1) // 2]


def two_groups(rounds: Sequence[Round], ours: str = OURS) -> tuple[list[float], list[float]] | None:
    """Our times, ascending, in two groups, see `GAP`; None if they are one.

    A GPU has more than one clock, and a row that was measured at two of them has a median that says little.
    """
    times = sorted(each[ours] for each in rounds)
    gaps = {place: high / low - 1 for place, (low, high) in enumerate(itertools.pairwise(times), 1)}
    inner = {place: gap for place, gap in gaps.items() if LEAST_ROUNDS <= place <= len(times) - LEAST_ROUNDS}
    widest = max(inner, key=inner.__getitem__, default=None)
    return None if widest is None or inner[widest] <= GAP else (times[:widest], times[widest:])


def summarise_row(
    rounds: Mapping[str, Sequence[Round]], flops: int, roofline: float | None, peers: Sequence[str]
) -> dict[str, Any]:
    """By regime: each method's time and rate, its share of the roofline, and the ratio of each peer to ours.

    "us" is what is shown as a row's time, see `row_round`; "spread_us" are the least and the largest over the rounds,
    "median_us" the medians, by which rows are compared with each other. All are microseconds.

    Args:
        rounds: by regime, as `timing.measure` gives them.
        flops: operations of the product.
        roofline: the least seconds that the device allows for it, if known.
        peers: the first of them that was measured decides of which round the times are.
    """
    found: dict[str, Any] = {}
    for regime, each in rounds.items():
        shown = row_round(each, peers)
        times = {name: shown[name] for name in sorted(shown)}
        every = {name: [one[name] * 1e6 for one in each] for name in times}
        figures: dict[str, Any] = {
            "us": {name: seconds * 1e6 for name, seconds in times.items()},
            "spread_us": {name: [min(us), max(us)] for name, us in every.items()},
            "median_us": {name: statistics.median(us) for name, us in every.items()},
        }
        if regime != "host":  # whose time is not spent on the product
            figures["tflops"] = {name: flops / seconds / 1e12 for name, seconds in times.items()}
            if roofline is not None:
                figures["roofline"] = {name: roofline / seconds for name, seconds in times.items()}
        figures["ratio"] = {peer: asdict(timing.ratio(each, peer, OURS)) for peer in times if peer != OURS}
        found[regime] = figures
    return found


def commit() -> str:
    """The commit of the measured code, "-dirty" if changed since: GEMMERY_COMMIT, or what git says, or "unknown"."""
    if given := os.environ.get("GEMMERY_COMMIT"):
        return given
    root = Path(__file__).resolve().parents[3]
    # An installed copy may be inside another repository, whose commit is meaningless.
    top = _git(root, "rev-parse", "--show-toplevel")
    name = _git(root, "rev-parse", "--short", "HEAD")
    if not top or not name or Path(top).resolve() != root:
        return "unknown"
    # Only the measured code counts: results and tables are written to benchmarks/ between two runs.
    changed = _git(root, "status", "--porcelain", "--", "src", "tutorials")
    return name if changed == "" else f"{name}-dirty"


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def describe_run(
    seed: int, rounds: int, regimes: Sequence[str], device: str, peers: Sequence[str]
) -> dict[str, Any]:
    """A result's header."""
    import torch
    import triton

    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or torch.version.hip or "none",
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "ours": OURS,
        "peers": list(peers),
        "protocol": {
            "rounds": rounds,
            "regimes": list(regimes),
            "burst": {
                "launches": stopwatch.BURST_MOST,
                "sleep_s": stopwatch.SLEEP,
                "flush_bytes": stopwatch.FLUSH_BYTES,
            },
            "steady": {"load_s": timing.LOAD, "timed_s": timing.TIMED},
            "graph": {
                "calls": timing.GRAPH_CALLS,
                "load_s": timing.GRAPH_LOAD,
                "timed_s": timing.GRAPH_TIMED,
            },
            "host": {"calls": timing.HOST_CALLS, "repeats": timing.HOST_REPEATS},
        },
    }
