"""The table of the results of `sharded_model.py`, for docs/distributed.md."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.records import Data, newest_triton_first, read_folder, run_lines
from gemmery.lab import timing

HEAD = ["call", "ratio", "Triton", "gemmery", "torch"]
ABOUT = (
    "A Llama of {billions:.1f} billion parameters from transformers, on two GPUs. torch uses its own `ColwiseParallel` "
    "and `RowwiseParallel`, with NCCL. gemmery is the swapped model with `RowwiseParallel(overlap=True)` and "
    "`FeedForwardParallel(overlap=True)`. Times are in ms per call, on the slower rank. The ratio is torch's time "
    "divided by gemmery's in the same round: the median, with the smallest and the largest in parentheses."
)
REGIMES = {"graph": "CUDA graph", "eager": "from Python"}


def read(folder: Path) -> list[Data]:
    """The results, the newest Triton's first; ValueError names a file that is none."""
    found = read_folder(folder / "sharded_model", {"rows", "protocol", "triton"}, "sharded_model.py")
    return newest_triton_first(found)


def lines(results: Sequence[Data]) -> list[list[str]]:
    """A line for each row, regime and version of Triton."""
    names = dict.fromkeys(row["name"] for result in results for row in result["rows"])
    return [
        _line(row, regime, result)
        for name in names
        for regime in REGIMES
        for result in results
        for row in result["rows"]
        if row["name"] == name and regime in row["seconds"]
    ]


def _line(row: Data, regime: str, result: Data) -> list[str]:
    rounds = row["seconds"][regime]
    ratio = timing.ratio(rounds, "torch", "gemmery")
    median = {name: statistics.median(each[name] for each in rounds) * 1e3 for name in rounds[0]}
    return [
        f"{row['name']}, {REGIMES[regime]}", f"**{ratio.median:.2f}** ({ratio.min:.2f}–{ratio.max:.2f})",
        ".".join(result["triton"].split(".")[:2]), f"{median['gemmery']:.2f}", f"{median['torch']:.2f}",
    ]  # fmt: skip


def about(results: Sequence[Data]) -> str:
    """The text about the table."""
    return ABOUT.format(billions=results[0]["parameters"] / 1e9)


def places(results: Sequence[Data]) -> str:
    """Where the results are from."""
    return run_lines(results, "Two GPUs: ")
