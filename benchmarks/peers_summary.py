"""The tables of the results of `peers.py` and `generation.py`, for docs/when-to-use-what.md."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.records import Data, read_folder, run_line
from gemmery.lab import timing

OURS = "gemmery"
HEAD = ["product, M×N×K", "beside", "ratio", "gemmery, µs", "the other, µs"]
ABOUT = (
    "A ratio is the other's time divided by gemmery's in the same round: the median, with the smallest and the largest "
    "in parentheses. Above 1, gemmery is faster. Times are medians. cuBLAS is torch's own product: `_scaled_mm` for "
    "fp8, and in 16 bits where weights are packed. torch.compile has `max-autotune`, except for the loss."
)
STEPS_HEAD = ["method", "1 row, µs a token", "over bf16", "16 rows, µs a token", "over bf16"]
ABOUT_STEPS = (
    "The second and the fourth number are the time of bf16 divided by the method's, in the same round. All models have "
    "the same attention, a static cache and a CUDA graph, and all but one are compiled with `max-autotune`."
)
#: What ours is compared with, likewise: name, ours, the other.
BARS = (
    ("bf16", "gemmery int4", "bf16"),
    ("bf16, with the head in int4", "gemmery int4, int4 head", "bf16"),
    ("bf16, q, k and v as one in both", "gemmery int4, qkv as one", "bf16, qkv as one"),
    ("bf16, q, k and v as one in both, the head in int4", "gemmery int4, qkv as one, int4 head", "bf16, qkv as one"),
    ("torchao's int4", "gemmery int4", "torchao int4"),
    ("torchao's int4, both heads in int4", "gemmery int4, int4 head", "torchao int4, int4 head"),
    (
        "torchao's int4, both heads in int4, q, k and v as one",
        "gemmery int4, qkv as one, int4 head", "torchao int4, qkv as one, int4 head",
    ),
)  # fmt: skip


def read(folder: Path) -> tuple[list[Data], list[Data]]:
    """The results of peers.py and those of generation.py; ValueError names a file that is none."""
    found = []
    for name, needed in (("peers", {"part", "entries", "libraries"}), ("generation", {"entries", "layers"})):
        path = folder / name
        found.append(read_folder(path, needed, f"{name}.py") if path.is_dir() else [])
    return found[0], found[1]


def lines(results: Sequence[Data]) -> list[list[str]]:
    """A line for each row and other library, in the order of measurement."""
    order = ("products", "linear8", "groups", "loss")
    made = []
    for result in sorted(results, key=lambda one: order.index(one["part"])):
        for entry in result["entries"]:
            made += _rows(entry)
    return made


def _rows(entry: Data) -> list[list[str]]:
    times, what = entry["times"], f"{entry['kind']}: {entry['name']}"
    found = []
    for name in times:
        if name != OURS:
            found.append(
                [
                    what,
                    name,
                    _ratio(times, name, OURS),
                    _microseconds(times[OURS]),
                    _microseconds(times[name]),
                ]
            )
    for name, why in entry["left_out"].items():
        found.append(
            [what, name, "left out", _microseconds(times[OURS]), " ".join(why.replace("|", "/").split())[:80]]
        )
    for name, bytes_ in entry.get("peak_bytes", {}).items():
        if name != OURS:
            both = (entry["peak_bytes"][OURS], bytes_)
            memory = [f"{x / 2**20:.0f} MiB" for x in both]
            found.append([f"{what}, memory", name, f"**{both[1] / both[0]:.2f}**", *memory])
    return found


def _microseconds(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e6:.1f}"


def _ratio(times: dict[str, list[float]], peer: str, ours: str) -> str:
    rounds = [{peer: x, ours: y} for x, y in zip(times[peer], times[ours], strict=True)]
    ratio = timing.ratio(rounds, peer, ours)
    return f"**{ratio.median:.2f}** ({ratio.min:.2f}–{ratio.max:.2f})"


def places(results: Sequence[Data]) -> str:
    """Where the results are from, and the versions of the other libraries."""
    found = dict.fromkeys(
        f"- {run_line(one)}; {', '.join(f'{name} {x}' for name, x in one.get('libraries', {}).items())}."
        for one in results
    )
    return "\n".join(found).replace("; .", ".")


def step_lines(result: Data) -> list[list[str]]:
    """A line for each method, with all numbers of rows."""
    entries = {entry["batch"]: entry["times"] for entry in result["entries"]}
    names = dict.fromkeys(name for times in entries.values() for name in times)
    made = []
    for name in names:
        cells = [name]
        for batch in (1, 16):
            times = entries.get(batch, {})
            there = name in times
            cells.append(_microseconds(times[name]) if there else "")
            cells.append(_ratio(times, "bf16", name) if there and "bf16" in times and name != "bf16" else "")
        made.append(cells)
    return made


def bars(result: Data) -> str:
    """Ours beside others that have the same."""
    found = []
    for title, ours, other in BARS:
        parts = [
            f"{_ratio(entry['times'], other, ours)} with {entry['batch']} row{'s' * (entry['batch'] > 1)}"
            for entry in result["entries"]
            if ours in entry["times"] and other in entry["times"]
        ]
        if parts:
            found.append(f"- Beside {title}: {', '.join(parts)}.")
    return "\n".join(found)
