"""The table of the results of `sharded_rows.py`, for docs/distributed.md."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.records import Data, newest_triton_first, read_folder, run_lines
from gemmery.lab import timing

HEAD = [
    "product, M × N × K", "over NCCL", "over async TP", "single, over NCCL", "single, over async TP", "Triton",
    "gemmery", "product + NCCL", "product alone", "NCCL alone",
]  # fmt: skip
ABOUT = (
    "Gather is `all_gather_linear`; K is whole, and M is that of all ranks together. Scatter is "
    "`linear_reduce_scatter`; K is that of each rank. Times are in µs per call, in a CUDA graph, on the slower rank. "
    "The product is the faster of cuBLAS's and gemmery's. NCCL is the time of its all-gather or reduce-scatter in "
    "bf16. The first ratio is the time of product and NCCL divided by gemmery's in the same round: the median, with "
    "the smallest and the largest in parentheses. The second ratio is that of torch's async TP, which can't be "
    "captured, for calls from Python, many in a row. The next two are for single calls from Python after a pause, "
    "without the host's time."
)


def read(folder: Path) -> list[Data]:
    """The results, the newest Triton's first; ValueError names a file that is none."""
    found = read_folder(folder / "sharded_rows", {"rows", "protocol", "triton"}, "sharded_rows.py")
    return newest_triton_first(found)


def lines(results: Sequence[Data]) -> list[list[str]]:
    """A line for each row and version of Triton, by kind and size."""
    rows = [(row, result) for result in results for row in result["rows"]]
    rows.sort(key=lambda both: (both[0]["kind"], both[0]["M"]))
    return [_line(row, result) for row, result in rows if "graph" in row["seconds"]]


def _line(row: Data, result: Data) -> list[str]:
    rounds = row["seconds"]["graph"]
    median = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    ours = result["ours"]
    steps = _fastest(median, "cublas + nccl", "gemmery + nccl")
    alone = _fastest(median, "cublas alone", "gemmery alone")
    eager, single = row["seconds"]["eager"], row["seconds"]["burst"]
    return [
        f"{row['kind']}, {row['M']} × {row['N']} × {row['K']}", _ratio(rounds, steps, ours),
        _ratio(eager, "async_tp", ours), _ratio(single, steps, ours), _ratio(single, "async_tp", ours),
        ".".join(result["triton"].split(".")[:2]),
        *[f"{median[name] * 1e6:.1f}" for name in (ours, steps, alone, "nccl alone")],
    ]  # fmt: skip


def _fastest(median: dict[str, float], *names: str) -> str:
    return min(names, key=median.__getitem__)


def _ratio(rounds: Sequence[timing.Round], peer: str, ours: str) -> str:
    """A ratio with its spread, if the peer was measured."""
    if peer not in rounds[0]:
        return ""
    ratio = timing.ratio(rounds, peer, ours)
    return f"**{ratio.median:.2f}** ({ratio.min:.2f}–{ratio.max:.2f})"


def places(results: Sequence[Data]) -> str:
    """Where the results are from."""
    return run_lines(results, "Two GPUs: ")
