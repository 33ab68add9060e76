"""The tables of the results of `compiled.py`, for docs/compile.md."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.records import Data, read_folder, run_lines
from gemmery.lab import timing

HEAD = [
    "block", "max-autotune / with gemmery", "max-autotune", "with gemmery", "products with gemmery", "longest added",
]  # fmt: skip
PRODUCTS = ["product, M × N × K", "gemmery", "cuBLAS", "fastest template", "calls gemmery"]
ABOUT = (
    "Times of a block are in µs per call, the median of the rounds. The ratio is taken within each round: the median, "
    "with the smallest and the largest in parentheses; above 1, the block is faster with gemmery. The last column is "
    "the longest time that one distinct product adds to the compilation, which is the time to compile and measure "
    "gemmery's kernel."
)
ABOUT_PRODUCTS = (
    "Times of products are in µs. Inductor measured each of them once while it compiled the block. Where gemmery is "
    "the fastest and is not called, a template with fused operators was faster than gemmery followed by another "
    "kernel. Rows without the last column are from Inductor's log of a block that was not timed, because the run "
    "ended."
)


def read(folder: Path) -> list[Data]:
    """The results by date; ValueError names a file that is none."""
    return read_folder(folder / "compiled", {"entries", "protocol"}, "compiled.py")


def lines(results: Sequence[Data]) -> list[list[str]]:
    """A line for each block."""
    return [_line(entry, result) for result in results for entry in result["entries"]]


def _line(entry: Data, result: Data) -> list[str]:
    (peer,), ours = result["peers"], result["ours"]
    ratio = timing.ratio(entry["rounds"], peer, ours)
    times = [f"{statistics.median(x[name] for x in entry['rounds']) * 1e6:.1f}" for name in (peer, ours)]
    used, count = (sum(x[key] for x in entry["products"]) for key in ("used", "count"))
    return [
        entry["name"], f"**{ratio.median:.3f}** ({ratio.min:.3f}–{ratio.max:.3f})", *times, f"{used} of {count}",
        f"{max(entry['added'].values()):.2f} s",
    ]  # fmt: skip


def product_lines(results: Sequence[Data]) -> list[list[str]]:
    """A line for each distinct product."""
    return [
        _product(row)
        for result in results
        for row in [x for entry in result["entries"] for x in entry["products"]] + result.get("from_log", [])
    ]


def _product(row: Data) -> list[str]:
    ours = f"gemmery_{row['op']}"
    # A bias may be added by either of two functions of cuBLAS.
    cublas = [row["times"][name] for name in (row["op"], f"bias_{row['op']}") if name in row["times"]]
    templates = [seconds for name, seconds in row["times"].items() if name.startswith("triton")]
    # A log has the ten fastest choices.
    times = [f"{min(x) * 1e6:.1f}" if x else "" for x in ([row["times"][ours]], cublas, templates)]
    called = f"{row['used']} of {row['count']}" if "count" in row else ""
    return [f"{row['op']}, {' × '.join(map(str, row['shape']))}", *times, called]


def places(results: Sequence[Data]) -> str:
    """Where the results are from."""
    return run_lines(results)
