"""What the results of `grouped.py` say: its classes, their bars, and the tables made of them."""

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.grouped_rows import BLOCKS, DECODE, GRADIENTS, PACKED, PARTS, PREFILL  # noqa: E402
from benchmarks.records import cell, newest_first, read_folder, table  # noqa: E402
from gemmery.lab.results import run_line, triton_version  # noqa: E402
from gemmery.lab.timing import geometric_mean, percentile  # noqa: E402

#: Where results lie: a folder of their own in that of the others.
FOLDER = "grouped"
OURS = "gemmery"
#: Peers that are libraries of their own. All others are torch's or Hugging Face's, which the bars are about.
LIBRARIES = ("quack", "liger")

Data = dict[str, Any]


def library_of(name: str) -> str:
    """The library that a method is of, whether it is tuned or not; "" for one of ours, of torch or of Hugging Face."""
    library, *_ = name.split("-")
    return library if library in LIBRARIES else ""


def _peers(names: Iterable[str], library: str | None) -> list[str]:
    """The peers among methods; with a library, those of it, or with "" those of torch and Hugging Face."""
    return [name for name in names if name != OURS and library in (None, library_of(name))]


def best_ratio(entry: Data, regime: str, library: str | None = None) -> float | None:
    """The time of the fastest peer over ours: of each peer the median over the rounds. None where there is none.

    Args:
        library: whose peers count, see `LIBRARIES`; "" for those of torch and Hugging Face, None for all.
    """
    rounds = entry.get("rounds", {}).get(regime, [])
    peers = _peers(rounds[0] if rounds else (), library)
    return min(
        (statistics.median(one[peer] / one[OURS] for one in rounds) for peer in peers),
        default=None,
    )


def floor_share(entry: Data, regime: str) -> float | None:
    """The time of reading the touched weights once over ours; None where there is no floor."""
    time = ours_us(entry, regime)
    return None if time is None or entry.get("floor_us") is None else float(entry["floor_us"]) / time


def ours_us(entry: Data, regime: str) -> float | None:
    """Our time in microseconds, the median over the rounds."""
    rounds = entry.get("rounds", {}).get(regime, [])
    return statistics.median(one[OURS] for one in rounds) * 1e6 if rounds else None


def torch_ratio(entry: Data, regime: str) -> float | None:
    """`best_ratio` beside torch and Hugging Face."""
    return best_ratio(entry, regime, "")


def memory_ratio(entry: Data, regime: str, library: str | None = None) -> float | None:
    """The peak of the peer that needs the least over ours; of which peers, see `best_ratio`."""
    peaks = entry.get("bytes", {})
    others = [peaks[name] for name in _peers(peaks, library)]
    return min(others) / peaks[OURS] if OURS in peaks and others else None


def torch_memory_ratio(entry: Data, regime: str) -> float | None:
    """`memory_ratio` beside torch and Hugging Face."""
    return memory_ratio(entry, regime, "")


@dataclass(frozen=True)
class Kind:
    """Measurements that are one line of the tables.

    Attributes:
        title: what they are, and what they are measured against.
        part: of `grouped_rows.PARTS`.
        value: of an entry in a regime; None where it has none.
        least, most: tokens.
        regime: whose times count.
        mean, worst: the bar, for the geometric mean and for each row; None where there is none.
        is_time: whether values are microseconds, of which less is better.
    """

    title: str
    part: str
    value: Callable[[Data, str], float | None] = torch_ratio
    least: int = 1
    most: int = 1 << 62
    regime: str = "burst"
    mean: float | None = None
    worst: float | None = None
    is_time: bool = False

    def has(self, entry: Data) -> bool:
        """Whether an entry is one of them."""
        return bool(entry["part"] == self.part and self.least <= entry["row"]["T"] <= self.most)


_DECODING: Data = {"most": DECODE, "regime": "graph"}
_QUACK, _LIGER = partial(best_ratio, library="quack"), partial(best_ratio, library="liger")
_AT_64: Data = {"least": PACKED, "most": PACKED, "regime": "graph"}
KINDS = (
    Kind("up and down, T ≥ 2048, against the best of torch", "bare", least=PREFILL, mean=1.05, worst=0.97),
    Kind("up and down, T ≤ 256, against the best of torch", "bare", mean=1.4, worst=1.1, **_DECODING),
    Kind(
        "the same, against one read of the used weights at 4.3 TB/s", "bare", floor_share, mean=0.65, worst=0.5,
        **_DECODING,
    ),
    Kind("dX and dW, T ≥ 8192, against the best of torch", "gradients", least=GRADIENTS, mean=1.05, worst=0.95),
    Kind("experts with routing, T ≤ 256, against Hugging Face's best", "block", mean=1.8, worst=1.3, **_DECODING),
    Kind("experts with routing, T ≥ 4096, against Hugging Face's best", "block", least=BLOCKS, mean=1.25, worst=1.1),
    Kind("the same with gradients, T ≥ 8192", "step", least=GRADIENTS),
    Kind("int4 and mxfp4 experts, T = 64, against gemmery's in bf16", "packed", mean=1.8, worst=1.5, **_AT_64),
    Kind("mxfp4 and int4 experts, T ≥ 2048, against gemmery's in bf16", "packed", least=PREFILL),
    Kind("route and combine, T = 64, in µs", "routing", ours_us, worst=12.0, is_time=True, **_AT_64),
    Kind(
        "peak memory of forward and backward, T = 32768, against the least of torch", "memory", torch_memory_ratio,
        worst=1.0,
    ),
    Kind("up and down, T ≥ 2048, against QuACK", "bare", _QUACK, least=PREFILL),
    Kind("up and down, T ≤ 256, against QuACK", "bare", _QUACK, **_DECODING),
    Kind("dX and dW, T ≥ 8192, against QuACK", "gradients", _QUACK, least=GRADIENTS),
    Kind("experts with routing, T ≤ 256, against QuACK with torch's routing", "block", _QUACK, **_DECODING),
    Kind("experts with routing, T ≥ 4096, against QuACK with torch's routing", "block", _QUACK, least=BLOCKS),
    Kind("experts with routing, T ≤ 256 outside CUDA graphs, against Liger", "block", _LIGER, most=DECODE),
    Kind("experts with routing, T ≥ 4096, against Liger", "block", _LIGER, least=BLOCKS),
    Kind("experts with routing and gradients, T ≥ 8192, against Liger", "step", _LIGER, least=GRADIENTS),
    Kind(
        "peak memory of forward and backward, T = 32768, against Liger", "memory",
        partial(memory_ratio, library="liger"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """A kind's values in one line.

    Attributes:
        geomean, p10, worst: the 10th percentile counts from the bad end, as the worst does.
        worst_row: whose value that is.
        rows: how many there are.
        failed: how many others failed.
    """

    geomean: float
    p10: float
    worst: float
    worst_row: str
    rows: int
    failed: int

    @property
    def count(self) -> str:
        """How many rows there are, and how many failed."""
        return str(self.rows) + (f", {self.failed} failed" if self.failed else "")


def figures(kind: Kind, entries: Iterable[Data]) -> Figures | None:
    """A kind's values; None where nothing was measured."""
    own = [entry for entry in entries if kind.has(entry)]
    pairs = [
        (value, f"{entry['name']}, {entry['measure']}")
        for entry in own
        if (value := kind.value(entry, kind.regime)) is not None
    ]
    if not pairs:
        return None
    values = [value for value, _ in pairs]
    worst = (max if kind.is_time else min)(pairs)
    p10 = percentile(values, 90 if kind.is_time else 10)
    failed = sum("error" in entry for entry in own)
    return Figures(geometric_mean(values), p10, *worst, len(pairs), failed)


def verdict(kind: Kind, found: Figures) -> str:
    """A kind's bar, and whether it is met; empty where there is none."""
    if kind.worst is None:
        return ""
    if kind.is_time:
        met = found.worst <= kind.worst
        text = f"≤ {kind.worst:g}"
    else:
        # What needs less memory than every peer needs less, not as much.
        strictly = kind.value is torch_memory_ratio
        met = found.worst > kind.worst if strictly else found.worst >= kind.worst
        met = met and (kind.mean is None or found.geomean >= kind.mean)
        text = "> 1" if strictly else f"≥ {kind.mean:.2f}, {kind.worst:.2f}"
    return f"{text}: {'met' if met and not found.failed else '**missed**'}"


def report(entries: Sequence[Data]) -> str:
    """The summary that is printed behind a run."""
    lines = []
    for kind in KINDS:
        if (found := figures(kind, entries)) is not None:
            text = f"mean {found.geomean:.3f} p10 {found.p10:.3f} worst {found.worst:.3f} ({found.worst_row})"
            lines.append(
                f"{kind.title}: {found.count} rows, {text} {verdict(kind, found).replace('*', '')}".rstrip()
            )
        elif failed := sum("error" in entry for entry in entries if kind.has(entry)):
            lines.append(f"{kind.title}: {failed} failed")
    return "\n".join(lines) or "nothing was measured"


# ---------------------------------------------------------------------------------------------------------------------
# What was written


def read(folder: Path) -> list[Data]:
    """All results under a folder of results, by date; ValueError names a file that is none."""
    return read_folder(folder / FOLDER, {"entries", "triton", "gpu", "protocol", "date"}, "grouped.py")


def key(entry: Data) -> tuple[Any, ...]:
    """What tells a measurement from others."""
    row = {name: tuple(x) if isinstance(x, list) else x for name, x in entry["row"].items()}
    return (entry["name"], entry["measure"], *sorted(row.items()))


def pooled(results: Sequence[Data]) -> dict[str, list[Data]]:
    """All measurements by version of Triton, the newest version first. What was measured again counts once, as last."""
    found: dict[str, dict[tuple[Any, ...], Data]] = {}
    for result in results:
        of_version = found.setdefault(triton_version(result), {})
        for entry in result["entries"]:
            if "skipped" not in entry:
                of_version[key(entry)] = entry
    return {version: list(found[version].values()) for version in newest_first(found)}


def class_lines(results: Sequence[Data]) -> tuple[list[str], list[list[str]]]:
    """The table of the documentation: a heading, and a line for each kind with a cell for each version of Triton."""
    by_version = pooled(results)
    head = ["products and peer", *(f"Triton {version}" for version in by_version), "rows"]
    lines = []
    for kind in KINDS:
        each = [figures(kind, entries) for entries in by_version.values()]
        there = [found for found in each if found is not None]
        if there:
            counts = " or ".join(dict.fromkeys(found.count for found in there))
            lines.append([kind.title, *(_cell(kind, found) for found in each), counts])
    return head, lines


def _cell(kind: Kind, found: Figures | None) -> str:
    if found is None:
        return ""
    digits = 1 if kind.is_time else 2
    return f"**{found.geomean:.{digits}f}** · {found.worst:.{digits}f}"


ABOUT = (
    "A cell shows the geometric mean · the worst row, untuned. A ratio is the time of the fastest peer divided by "
    "gemmery's, the median over the rounds; above 1, gemmery is faster. With up to 256 tokens, the calls run in CUDA "
    "graphs, each after others that read other weights. With more tokens, each call is timed alone, with an empty L2 "
    "cache. The rows come from published models, and from random models."
)


def places(results: Sequence[Data]) -> str:
    """Where the results were measured, a line for each run."""
    lines: dict[str, int] = {}
    for result in results:
        line = run_line(result)
        lines[line] = lines.get(line, 0) + len(result["entries"])
    return "\n".join(f"- {line}: {count} measurements." for line, count in lines.items())


ROW_HEADING = [
    "row", "measured", "regime", "gemmery µs", "best peer", "peer µs", "peer / gemmery", "floor / gemmery", "config",
]  # fmt: skip


def row_lines(entries: Sequence[Data]) -> list[list[str]]:
    """A line for each measurement and regime, part by part."""
    lines = []
    for part in PARTS:
        for entry in entries:
            if entry["part"] != part:
                continue
            head = [entry["name"], entry["measure"]]
            configs = ", ".join(f"`{config}`" for config in entry.get("configs", ()))
            if "error" in entry:
                lines.append([*head, f"failed: {entry['error']}", *[""] * (len(ROW_HEADING) - 4), configs])
            elif part == "memory":
                peaks = entry["bytes"]
                peer = min((name for name in peaks if name != OURS), key=peaks.__getitem__, default="")
                cells = [
                    f"{peaks[OURS] / 2**20:.0f} MiB",
                    peer,
                    f"{peaks[peer] / 2**20:.0f} MiB" if peer else "",
                ]
                ratio = memory_ratio(entry, "")
                lines.append([*head, "peak", *cells, "" if ratio is None else f"{ratio:.3f}", "", configs])
            for regime in entry.get("rounds", {}):
                lines.append([*head, regime, *_times(entry, regime), configs])
    return lines


def _times(entry: Data, regime: str) -> list[str]:
    medians = {
        name: statistics.median(one[name] for one in entry["rounds"][regime]) * 1e6
        for name in entry["rounds"][regime][0]
    }
    peer = min((name for name in medians if name != OURS), key=medians.__getitem__, default="")
    ratio, floor = best_ratio(entry, regime), floor_share(entry, regime)
    return [
        f"{medians[OURS]:.1f}", peer, f"{medians[peer]:.1f}" if peer else "", "" if ratio is None else f"{ratio:.3f}",
        "" if floor is None else f"{floor:.2f}",
    ]  # fmt: skip


def page(folder: Path) -> str:
    """Everything between the marks of docs/grouped.md; "" without results."""
    results = read(folder)
    if not results:
        return ""
    head, lines = class_lines(results)
    return "\n\n".join([table(head, lines, "lrr"), ABOUT, places(results)])


def sections(results: Sequence[Data]) -> list[str]:
    """The headings and tables of all rows, by version of Triton."""
    return [
        "\n\n".join([
            f"## grouped, Triton {version}",
            table(
                ROW_HEADING,
                [[cell(each) for each in line] for line in row_lines(entries)],
                "lllrlrrrl",
            ),
        ])
        for version, entries in pooled(results).items()
    ]  # fmt: skip
