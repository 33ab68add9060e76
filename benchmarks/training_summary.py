"""The tables of the results of `linear_cross_entropy.py` and `lora.py`, for docs/training.md and docs/adapters.md."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.records import Data, read_folder, run_line

LOSS_HEAD = ["tokens × classes × features", "method", "ms", "Liger / this", "MiB", "of the least"]
LOSS_ABOUT = (
    "Forward and backward pass in bf16, called from Python: the median of the rounds, and Liger's time divided by that "
    "of the row in the same round. MiB is the peak of one call beside its inputs; of this, the gradient of the weight "
    "takes classes × features. Liger sums the weight's gradient up in 16 bits, except where the row says 32 bits. "
    '"Columns" are a `chunk_size`.'
)
LORA_HEAD = [
    "weight, rank, adapter, M × N × K", "method", "µs", "this / gemmery", "µs in a graph", "this / gemmery", "MiB",
]  # fmt: skip
LORA_ABOUT = (
    "Forward and backward pass in bf16: the median of the rounds, called from Python and in a CUDA graph, and the time "
    "of the row divided by gemmery's in the same round. MiB is the peak of one call beside its inputs. `bitsandbytes` "
    "is its `matmul_4bit` with an adapter in torch. `peft's` has the copy and the conversions of peft's `Linear4bit`. "
    "`dequantize, torch` unpacks with gemmery's kernel and multiplies with cuBLAS."
)


def read(folder: Path) -> list[Data]:
    """The results, by date; ValueError names a file that is none."""
    if not (folder / "training").is_dir():
        return []
    return read_folder(
        folder / "training", {"step", "protocol", "triton"}, "linear_cross_entropy.py or lora.py"
    )


def loss_lines(results: Sequence[Data]) -> list[list[str]]:
    """A line for each size and method."""
    found = []
    for result in (x for x in results if x["step"].startswith("time-")):
        rows = {name: row for name, row in result["methods"].items() if row["rounds"]}
        least = min(row["peak"] for row in rows.values())
        size = " × ".join(map(str, result["size"]))
        for name, row in sorted(rows.items(), key=lambda item: item[1]["median"]):
            ratio = row.get("liger / this")
            found.append([
                size, name, f"{row['median'] * 1e3:.2f}", "" if ratio is None else f"**{ratio:.3f}**",
                f"{row['peak'] / 2**20:.0f}", f"{row['peak'] / least:.2f}",
            ])  # fmt: skip
    return found


def lora_lines(results: Sequence[Data]) -> list[list[str]]:
    """A line for each weight and method."""
    found = []
    for result in (x for x in results if x["step"] == "lora-time"):
        for label, rows in result["cases"].items():
            timed = {name: row for name, row in rows.items() if row["rounds"]}
            for name, row in sorted(timed.items(), key=lambda item: item[1]["median"]):
                graph = f"{statistics.median(row['graph']) * 1e6:.0f}" if row["graph"] else ""
                of_graph = f"**{row['this / ours, graph']:.2f}**" if row["graph"] else ""
                found.append([
                    label, name, f"{row['median'] * 1e6:.0f}", f"**{row['this / ours']:.2f}**", graph, of_graph,
                    f"{row['peak'] / 2**20:.0f}",
                ])  # fmt: skip
    return found


def places(results: Sequence[Data], *steps: str) -> str:
    """Where the results of steps are from, which begin so."""
    return "\n".join(f"- `{x['step']}`: {run_line(x)}." for x in results if x["step"].startswith(steps))
