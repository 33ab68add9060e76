"""The table of the results of `all_reduce.py`, for docs/distributed.md."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.records import Data, newest_triton_first, read_folder, run_lines
from gemmery.lab import timing

HEAD = [
    "weight, M × N × K of a rank", "ratio", "Triton", "gemmery", "cuBLAS + NCCL", "cuBLAS + symm_mem",
    "gemmery + symm_mem",
]  # fmt: skip
ABOUT = (
    "Times are in µs per call, in a CUDA graph of 20 or more calls, on the slower rank, with weights that do not fit "
    "into L2. symm_mem is the faster of torch's one-shot and two-shot all-reduce. The ratio is the time of the faster "
    "cuBLAS variant divided by gemmery's in the same round: the median, with the smallest and the largest in "
    "parentheses. cuBLAS has a bf16 weight. The last column is `gemmery.linear` with symm_mem, in two kernels; it was "
    "measured with packed weights."
)


def read(folder: Path) -> list[Data]:
    """The results, the newest Triton's first; ValueError names a file that is none."""
    found = read_folder(folder / "distributed", {"rows", "protocol", "triton"}, "all_reduce.py")
    return newest_triton_first(found)


def lines(results: Sequence[Data]) -> list[list[str]]:
    """A line for each row and version of Triton."""
    names = dict.fromkeys(row["name"] for result in results for row in result["rows"])
    return [
        _line(row, result)
        for name in names
        for result in results
        for row in result["rows"]
        if row["name"] == name and "graph" in row["seconds"]
    ]


def _line(row: Data, result: Data) -> list[str]:
    rounds = row["seconds"]["graph"]
    median = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    symmetric, own = (_quickest(median, product) for product in ("cublas", "gemmery"))
    assert symmetric is not None
    peer = min(("cublas + nccl", symmetric), key=median.__getitem__)
    ratio = timing.ratio(rounds, peer, result["ours"])
    kind, sizes = row["name"].rsplit(" ", 1)
    return [
        f"{kind}, {sizes.replace('x', ' × ')}", f"**{ratio.median:.2f}** ({ratio.min:.2f}–{ratio.max:.2f})",
        ".".join(result["triton"].split(".")[:2]),
        *[f"{median[x] * 1e6:.1f}" for x in (result["ours"], "cublas + nccl", symmetric)],
        "" if own is None else f"{median[own] * 1e6:.1f}",
    ]  # fmt: skip


def _quickest(median: dict[str, float], product: str) -> str | None:
    """The faster one of torch's all-reduces behind a product, by name; None where neither was measured."""
    names = [name for name in (f"{product} + one_shot", f"{product} + two_shot") if name in median]
    return min(names, key=median.__getitem__) if names else None


def places(results: Sequence[Data]) -> str:
    """Where the results are from."""
    return run_lines(results, "Two GPUs: ")
