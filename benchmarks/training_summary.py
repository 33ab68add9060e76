"""The tables of the results of `linear_cross_entropy.py` and `lora.py`, for docs/training.md and docs/adapters.md."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.records import Data, read_folder, run_line, table

LOSS_HEAD = ["tokens × classes × features", "method", "ms", "Liger / this", "MiB", "of the least"]
LOSS_ABOUT = (
    "Forward and backward pass in bf16, called from Python: the median of the rounds, and Liger's time divided by that "
    "of the row in the same round. MiB is the peak of one call beside its inputs; of this, the gradient of the weight "
    "takes classes × features. Liger sums the weight's gradient up in 16 bits, except where the row says 32 bits. "
    '"Columns" are a `chunk_size`. An empty field was not measured.'
)
LORA_HEAD = [
    "weight, rank, adapter, M × N × K", "method", "µs", "this / gemmery", "µs in a graph", "this / gemmery", "MiB",
]  # fmt: skip
LORA_ABOUT = (
    "Forward and backward pass in bf16: the median of the rounds, called from Python and in a CUDA graph, and the time "
    "of the row divided by gemmery's in the same round. MiB is the peak of one call beside its inputs. `bitsandbytes` "
    "is its `matmul_4bit` with an adapter in torch. `peft's` has the copy and the conversions of peft's `Linear4bit`. "
    "`dequantize, torch` unpacks with gemmery's kernel and multiplies with cuBLAS. An empty field was not measured."
)


def read(folder: Path) -> list[Data]:
    """The results, by date; ValueError names a file that is none."""
    return read_folder(
        folder / "training", {"step", "protocol", "triton"}, "linear_cross_entropy.py or lora.py"
    )


def loss_lines(results: Sequence[Data]) -> list[list[str]]:
    """A line for each size and method."""
    found = []
    for result in (x for x in results if x["step"].startswith("time-")):
        rows = {name: row for name, row in result["methods"].items() if "median" in row}
        least = min((row["peak"] for row in rows.values() if "peak" in row), default=0)
        size = " × ".join(map(str, result["size"]))
        for name, row in sorted(rows.items(), key=lambda item: item[1]["median"]):
            ratio = f"**{row['liger / this']:.3f}**" if "liger / this" in row else ""
            memory = (
                [f"{row['peak'] / 2**20:.0f}", f"{row['peak'] / least:.2f}"] if "peak" in row else ["", ""]
            )
            found.append([size, name, f"{row['median'] * 1e3:.2f}", ratio, *memory])
    return found


def lora_lines(results: Sequence[Data]) -> list[list[str]]:
    """A line for each weight and method."""
    found = []
    for result in (x for x in results if x["step"] == "lora-time"):
        for label, rows in result["cases"].items():
            timed = {name: row for name, row in rows.items() if "median" in row}
            for name, row in sorted(timed.items(), key=lambda item: item[1]["median"]):
                graph = ["", ""]
                if row["graph"]:
                    micros = statistics.median(row["graph"]) * 1e6
                    graph = [f"{micros:.0f}", f"**{row['this / ours, graph']:.2f}**"]
                memory = f"{row['peak'] / 2**20:.0f}" if "peak" in row else ""
                found.append(
                    [
                        label,
                        name,
                        f"{row['median'] * 1e6:.0f}",
                        f"**{row['this / ours']:.2f}**",
                        *graph,
                        memory,
                    ]
                )
    return found


def places(results: Sequence[Data], *steps: str) -> str:
    """Where the results of steps are from, which begin so."""
    chosen = [x for x in results if x["step"].startswith(steps)]
    return "\n".join(f"- `{x['step']}`: {run_line(x)}{_how(x)}." for x in chosen)


def _how(result: Data) -> str:
    """How a result was measured, where the script that is named did not."""
    return f", by {result['how'].removesuffix('.')}" if "how" in result else ""


def losses(folder: Path) -> str:
    """Everything between the marks of docs/training.md; "" without results."""
    results = read(folder)
    lines = loss_lines(results)
    return _text(LOSS_HEAD, lines, "llrrrr", LOSS_ABOUT, places(results, "time-")) if lines else ""


def adapters(folder: Path) -> str:
    """Everything between the marks of docs/adapters.md; "" without results."""
    results = read(folder)
    lines = lora_lines(results)
    return _text(LORA_HEAD, lines, "llrrrrr", LORA_ABOUT, places(results, "lora-time")) if lines else ""


def _text(head: list[str], lines: list[list[str]], columns: str, *below: str) -> str:
    return "\n\n".join([table(head, lines, columns), *below])
