"""The tables of the results of `peers.py` and `generation.py`, for docs/when-to-use-what.md."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.records import Data, read_folder, run_line, table
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
    "The second and the fourth number are the time of bf16 with torch.compile divided by the method's in the same "
    "round: the median, with the smallest and the largest in parentheses. All methods run in a CUDA graph, with a "
    "static cache. The attention is `grouped_attention` of `benchmarks/generation.py`, or torch's where sdpa is named. "
    "An int4 head is that of the output embeddings; otherwise they are bf16. In gemmery's models, q, k and v are one "
    "weight, as `swap` makes them. In others they are where the name says so; there the benchmark does this."
)
#: What is common to the names of ours and of others.
BF16, TORCHAO, HEAD_IN_INT4 = "bf16", "torchao", "int4 head"
#: What all methods are compared with.
BASE = "bf16, torch.compile"


def read(folder: Path) -> tuple[list[Data], list[Data]]:
    """The results of peers.py and those of generation.py; ValueError names a file that is none."""
    found = []
    for name, needed in (("peers", {"part", "entries", "libraries"}), ("generation", {"entries", "layers"})):
        found.append(read_folder(folder / name, needed, f"{name}.py"))
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
    times, kind = entry["times"], entry["kind"]
    what = f"{kind}, {entry['name'].removeprefix(kind.split()[0] + ' ')}"
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
            cells.append(_ratio(times, BASE, name) if there and BASE in times and name != BASE else "")
        made.append(cells)
    return made


def bars(result: Data) -> str:
    """The fastest of ours with each head beside the fastest in bf16, and the fastest of torchao with the same head."""
    found = []
    for entry in result["entries"]:
        times = entry["times"]
        lines = []
        for packed in (False, True):
            ours = _fastest(times, OURS, packed)
            for other in (_fastest(times, BF16, False), _fastest(times, TORCHAO, packed)):
                if ours and other:
                    lines.append(f'- "{other}" takes {_ratio(times, other, ours)} times "{ours}".')
        reasons: dict[str, list[str]] = {}
        for name, why in entry.get("left_out", {}).items():
            reasons.setdefault(why, []).append(f'"{name}"')
        lines += [f"- Missing: {' and '.join(names)}, {why}." for why, names in reasons.items()]
        found.append(f"{entry['name']}:\n\n" + "\n".join(lines))
    return "\n\n".join(found)


def _fastest(times: dict[str, list[float]], group: str, packed: bool) -> str | None:
    """The fastest method of a group, with output embeddings in int4 or in bf16."""
    names = [name for name in times if name.startswith(group) and (HEAD_IN_INT4 in name) == packed]
    return min(names, key=lambda name: statistics.median(times[name]), default=None)


def page(folder: Path) -> str:
    """Everything between the marks of docs/when-to-use-what.md; "" without results."""
    products, generation = read(folder)
    parts = []
    if products:
        parts += ["### Products", table(HEAD, lines(products), "llrrr"), ABOUT, places(products)]
    for result in generation:
        parts += ["### A model", table(STEPS_HEAD, step_lines(result), "lr"), ABOUT_STEPS, bars(result)]
        parts.append(places([result]))
    return "\n\n".join(parts)
