"""The tables of the results of `compiled.py`, for docs/compile.md."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.records import Data, read_folder, run_lines, table
from gemmery.lab import timing

HEAD = [
    "block", "max-autotune / with gemmery", "max-autotune", "with gemmery", "products with gemmery", "compiled, s",
    "measured, s", "added, s",
]  # fmt: skip
PRODUCTS = ["product, M × N × K", "gemmery", "cuBLAS", "fastest template", "calls gemmery"]
ABOUT = (
    "Times of a block are in µs per call, the median of the rounds. The ratio is taken within each round: the median, "
    "with the smallest and the largest in parentheses; above 1, the block is faster with gemmery. Seconds are of the "
    "compilation: those in which gemmery's kernel is compiled, in a thread beside Inductor's templates; those of its "
    "measurement; each for the distinct product that takes longest. Added is what the first call takes longer with "
    'gemmery, divided by the number of distinct products. Where "compiled" is empty, the kernel was compiled in the '
    "measurement. Other empty fields were not measured."
)
ABOUT_PRODUCTS = (
    "Times of products are in µs, measured while Inductor compiled the block. Where gemmery is the fastest and not "
    "called, it is so by less than the margin, or a template with the operators behind the product was faster than "
    "gemmery and another kernel. Rows without the last column are from Inductor's log of a block that was not timed, "
    "because the run ended."
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
        *(_longest(entry, step) for step in ("precompile", "benchmark")), _added(entry, peer, ours),
    ]  # fmt: skip


def _longest(entry: Data, step: str) -> str:
    return f"{max(x[step] for x in entry['added'].values()):.2f}" if _has(entry, step) else ""


def _has(entry: Data, step: str) -> bool:
    return all(step in x for x in entry["added"].values())


def _added(entry: Data, peer: str, ours: str) -> str:
    if "first_call" not in entry:
        return ""
    return f"{(entry['first_call'][ours] - entry['first_call'][peer]) / len(entry['products']):.2f}"


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


def page(folder: Path) -> str:
    """Everything between the marks of docs/compile.md; "" without results."""
    results = read(folder)
    if not results:
        return ""
    return "\n\n".join([
        table(HEAD, lines(results), "lr"), ABOUT, table(PRODUCTS, product_lines(results), "lr"), ABOUT_PRODUCTS,
        places(results),
    ])  # fmt: skip
