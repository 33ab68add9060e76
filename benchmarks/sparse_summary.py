"""The suites, the bars and the tables of the results of `sparse.py` and `blocks.py`."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.records import BEST, Data, kind, newest_first, read_folder, run_line, table, three  # noqa: E402
from gemmery.lab.results import OURS, summarise, summarise_row, triton_version  # noqa: E402
from gemmery.lab.suites import Row  # noqa: E402

#: Where results lie: a folder of their own in that of the others.
FOLDER = "sparse"
#: By the regime that bars are about.
REGIME = "burst"
#: What peers are called here, by what they are called in the files.
_TORCH, _CUSPARSELT, _DENSE, _BY_ROWS = "dense torch", "cuSPARSELt", "dense gemmery", "dense torch by rows"
_CUBLAS, _BSR = "dense cuBLAS", "torch's BSR"
_OF_BF16 = {"torch": _TORCH, "cusparselt": _CUSPARSELT}
_OF_BLOCKS = {"cuBLAS, dense": _CUBLAS, "torch": _BSR}
#: The suites that rows are divided into, each with its peers. The first peer says of which round times are shown.
SUITES = {
    "sparse": _OF_BF16,
    "sparse_codes": {"dense": _DENSE, "torch": _TORCH},
    "sparse_fp8": {"torch": _TORCH, "torch rows": _BY_ROWS, "dense": _DENSE},
    "sparse_decode": _OF_BF16,
    "sparse_prefill": _OF_BF16,
    "blocks": _OF_BLOCKS,
    "blocks_random": _OF_BLOCKS,
}
#: Which products those of a row of `blocks.py` are, of dense x and sparse w.
_OPS = {"linear": "x @ w.T", "first": "w @ x.T", "second": "x @ w", "sampled": "sampled_addmm"}


@dataclass(frozen=True)
class Line:
    """A line of a page's table.

    Attributes:
        title: what is multiplied.
        suite: of `SUITES`.
        peers: which peers it is beside; the fastest of them counts.
        row: the name of the only row, up to a comma; "" where all rows of the suite are the line.
        least: the bar, for the ratio or its geometric mean; None where there is none.
    """

    title: str
    suite: str
    peers: tuple[str, ...]
    row: str = ""
    least: float | None = None


def _beside(title: str, suite: str, row: str, **bars: float | None) -> list[Line]:
    """A line for each peer, whose label in `_PEERS` has the bar or None."""
    return [Line(title, suite, _PEERS[label], row, least) for label, least in bars.items()]


def _bf16(row: str, dense: float, cusparselt: float | None = None) -> list[Line]:
    title = f"bf16, {row.split()[1].replace('x', '×')}"
    return _beside(title, "sparse", row, dense=dense, cusparselt=cusparselt)


def _blocks(row: str, title: str, cublas: float | None = None, bsr: float | None = None) -> list[Line]:
    return _beside(title, "blocks", row, cublas=cublas, bsr=bsr)


_PEERS = {
    "dense": (_TORCH,),
    "cusparselt": (_CUSPARSELT,),
    "fp8": (_TORCH, _BY_ROWS),
    "ours": (_DENSE,),
    "cublas": (_CUBLAS,),
    "bsr": (_BSR,),
}
#: The lines of the pages.
LINES = {
    "sparse": (
        *_bf16("decode 1x8192x8192", 1.55), *_bf16("decode 16x8192x8192", 1.55), *_bf16("decode 64x8192x8192", 1.5),
        *_bf16("decode 128x8192x8192", 1.3), *_bf16("decode 16x28672x8192", 1.5),
        *_beside("bf16 with swiglu, 16×28672×4096", "sparse", "swiglu 16x28672x4096", dense=1.3),
        *_bf16("prefill 512x8192x8192", 1.2, 1.0), *_bf16("prefill 4096x4096x4096", 1.3, 1.0),
        *_bf16("prefill 4096x14336x4096", 1.4, 1.0), *_bf16("prefill 8192x8192x8192", 1.5, 1.0),
        *_beside("bf16, random models, 1 to 64 rows", "sparse_decode", "", dense=1.4, cusparselt=None),
        *_beside("bf16, random models, 1024 rows and more", "sparse_prefill", "", dense=1.15, cusparselt=None),
        *_beside("fp8 with fast sums, 4096×11008×4096", "sparse_fp8", "fp8 fast 4096x11008x4096", fp8=1.05),
        *_beside("fp8, 4096×11008×4096", "sparse_fp8", "fp8 4096x11008x4096", fp8=1.05),
        *_beside("e4m3 weights, 16×8192×8192", "sparse_codes", "e4m3 decode 16x8192x8192", ours=1.15),
        *_beside("int8 weights, 16×8192×8192", "sparse_codes", "int8 decode 16x8192x8192", ours=None),
        *_beside("int4 weights, 16×8192×8192", "sparse_codes", "int4 decode 16x8192x8192", ours=1.05),
    ),
    "blocks": (
        *_blocks("blocks of 64", "`x @ w.T`, blocks of 64, 90 % zeros, 4096×8192×8192", 4.0, 1.3),
        *_blocks("blocks of 128", "`x @ w.T`, blocks of 128, 50 % zeros, 4096×8192×8192", 1.4, 1.3),
        *_blocks("first operand", "`w @ x.T`, blocks of 64, 90 % zeros, 4096×8192×8192"),
        *_blocks("gradient of x", "`x @ w`, blocks of 64, 90 % zeros, 4096×8192×8192"),
        *_blocks("gradient of w", "`sampled_addmm`, blocks of 64, 90 % zeros, 4096×8192×8192"),
        *_blocks("blocks of 32", "`x @ w.T`, blocks of 32, 90 % zeros, 4096×4096×4096"),
        *_blocks("blocks of 16", "`x @ w.T`, blocks of 16, 90 % zeros, 4096×4096×4096"),
        *_beside("random sizes, blocks and sparsities", "blocks_random", "", cublas=None, bsr=None),
    ),
}  # fmt: skip
ABOUT = (
    "A ratio is the time of the peer divided by gemmery's in the same round; above 1, gemmery is faster. With "
    "several peers, the ratio is to the fastest. A single product shows the median over the rounds, with the "
    "smallest and the largest in parentheses. "
    "Random products show their geometric mean · 10th percentile · worst product. The bar is a goal "
    "for the ratio, set in advance. Nothing is tuned, and each launch is timed alone, with an empty L2 cache."
)


# ---------------------------------------------------------------------------------------------------------------------
# What was written


def read(folder: Path) -> list[Data]:
    """All results under a folder of results as those of `SUITES`, in the form of the other suites' results.

    A row that was measured again counts once, by its last result.

    Raises:
        ValueError: a file is no result; it is named.
    """
    needed = {"triton", "gpu", "peers", "protocol", "date", "seed"}
    files = read_folder(folder / FOLDER, needed, "sparse.py or blocks.py")
    found, known = [], set()
    for data in reversed(files):
        for suite, rows in _divided(data).items():
            names = [(triton_version(data), suite, row["name"]) for row in rows]
            rows = [row for row, name in zip(rows, names, strict=True) if name not in known]
            known.update(names)
            if rows:
                found.append(_result(suite, rows, data))
    return sorted(found, key=lambda one: ([*SUITES].index(one["suite"]), kind(one), one["date"]))


def _result(suite: str, rows: list[Data], data: Data) -> Data:
    """A suite's result out of a file."""
    header = {name: value for name, value in data.items() if name not in ("rows", "entries")}
    measured = {peer for row in rows for figures in row["summary"].values() for peer in figures["ratio"]}
    drawn = {"drawn": data["seed"]} if suite in ("sparse_decode", "sparse_prefill", "blocks_random") else {}
    dtype = "bf16" if SUITES[suite] is _OF_BF16 else "mixed"
    peers = [peer for peer in SUITES[suite].values() if peer in measured]
    return header | drawn | {"suite": suite, "dtype": dtype, "ours": OURS, "peers": peers, "rows": rows}


def _divided(data: Data) -> dict[str, list[Data]]:
    """A file's rows by suite."""
    found: dict[str, list[Data]] = {}
    for suite, row in _block_rows(data["entries"]) if "entries" in data else _sparse_rows(data["rows"]):
        found.setdefault(suite, []).append(row)
    return found


def _sparse_rows(entries: Iterable[Data]) -> Iterator[tuple[str, Data]]:
    for entry in entries:
        first, *more = entry["name"].split()
        suite = "sparse"
        if first == "random":
            suite = f"sparse_{more[0]}"
        elif first in ("e4m3", "int8", "int4"):
            suite = "sparse_codes"
        elif first == "fp8":
            suite = "sparse_fp8"
        row = {name: entry[name] for name in ("name", "M", "N", "K", "config")}
        yield suite, _row(row, entry["seconds"], SUITES[suite])


def _block_rows(entries: Iterable[Data]) -> Iterator[tuple[str, Data]]:
    for entry in entries:
        row = entry["row"]
        suite = "blocks_random" if row["name"].startswith("random") else "blocks"
        what = f"{_OPS[row['op']]}, blocks of {row['block']}, {100 * row['sparsity']:.0f} % zeros, {row['dtype']}"
        # The name of its type is another one for `Row`.
        row = {name: value for name, value in row.items() if name not in ("dtype", "dense", "torch")}
        row |= {"name": f"{row['name'].removeprefix('bar: ')}, {what}", "config": entry.get("config", "")}
        if "wrong" in entry:
            yield suite, _row(row, {}, {}) | {"error": entry["wrong"]}
            continue
        seconds, peers = entry["seconds"], dict(SUITES[suite])
        bsr = peers.pop("torch")
        # Calls that wait for the GPU have one time for all rounds. Older files have no rounds, but their medians.
        waits = {name: seconds[name] for name in entry["waits"]}
        rounds = [one | waits for one in entry.get("rounds", [seconds])]
        of_torch = [name for name in seconds if name.startswith("torch")]
        if of_torch:
            peers[min(of_torch, key=seconds.__getitem__)] = bsr
        yield suite, _row(row, {REGIME: rounds}, peers)


def _row(row: Data, times: dict[str, Sequence[dict[str, float]]], peers: dict[str, str]) -> Data:
    """A row as `gemmery.lab.results.read` gives it: configs that were timed with it are left out."""
    names = {OURS: OURS} | peers
    rounds = {
        regime: [{names[name]: seconds for name, seconds in one.items() if name in names} for one in each]
        for regime, each in times.items()
    }
    row = row | {"batch": (), "rounds": rounds}
    return row | {"summary": summarise_row(rounds, Row.of(row).flops, None, list(peers.values()))}


# ---------------------------------------------------------------------------------------------------------------------
# The tables


@dataclass(frozen=True)
class Found:
    """The results of a line with one version of Triton.

    Attributes:
        figures: of the rows' ratios beside the fastest peer, see `gemmery.lab.results.summarise`; None without rows.
        spread: the least and the largest ratio of the first row over its rounds.
        failed: how many other rows failed.
    """

    figures: Data | None
    spread: tuple[float, float]
    failed: int

    @property
    def count(self) -> str:
        """How many rows there are, and how many failed."""
        rows = self.figures["rows"] if self.figures else 0
        return str(rows) + (f", {self.failed} failed" if self.failed else "")


def found(line: Line, results: Iterable[Data]) -> Found | None:
    """The results of a line; None where it was not measured."""
    rows, failed = [], 0
    for result in results:
        for row in result["rows"] if result["suite"] == line.suite else ():
            if line.row and row["name"].partition(",")[0] != line.row:
                continue
            failed += "error" in row
            ratios = row["summary"].get(REGIME, {}).get("ratio", {})
            if own := [ratios[peer] for peer in line.peers if peer in ratios]:
                best = min(own, key=lambda ratio: ratio["median"])
                rows.append({"name": row["name"], "summary": {REGIME: {"ratio": {BEST: best}}}})
    if not rows and not failed:
        return None
    spread = rows[0]["summary"][REGIME]["ratio"][BEST] if rows else {"min": 0.0, "max": 0.0}
    figures = summarise(rows)[REGIME][BEST] if rows else None
    return Found(figures, (spread["min"], spread["max"]), failed)


def _cell(line: Line, one: Found | None) -> str:
    if one is None:
        return ""
    if one.figures is None:
        return "failed"
    if line.row:
        return f"**{one.figures['geomean']:.2f}** ({one.spread[0]:.2f}–{one.spread[1]:.2f})"
    return three(one.figures)


def verdict(line: Line, by_version: dict[str, Found | None]) -> str:
    """A line's bar, and whether it is met with each version of Triton; empty where there is none."""
    if line.least is None:
        return ""
    missed = [
        version
        for version, one in by_version.items()
        if one and (one.failed or one.figures is None or one.figures["geomean"] < line.least)
    ]
    measured = [version for version, one in by_version.items() if one]
    where = "" if missed == measured else f" with Triton {' and '.join(missed)}"
    return f"≥ {line.least:.2f}: {f'**missed**{where}' if missed else 'met'}"


def page_lines(results: Sequence[Data], page: str) -> tuple[list[str], list[list[str]]]:
    """The table of a page of `LINES`: a heading, and a line for each of its lines that has results."""
    versions = newest_first(map(triton_version, of_page(results, page)))
    head = ["product", "against", *(f"Triton {version}" for version in versions), "bar", "rows"]
    lines = []
    for line in LINES[page]:
        each = {
            version: found(line, [one for one in results if triton_version(one) == version])
            for version in versions
        }
        if there := [one for one in each.values() if one]:
            counts = " or ".join(dict.fromkeys(one.count for one in there))
            cells = [_cell(line, one) for one in each.values()]
            lines.append([line.title, " or ".join(line.peers), *cells, verdict(line, each), counts])
    return head, lines


def of_page(results: Sequence[Data], page: str) -> list[Data]:
    """The results that a page is about."""
    suites = {line.suite for line in LINES[page]}
    return [one for one in results if one["suite"] in suites]


def places(results: Sequence[Data]) -> str:
    """Where results were measured, a line for each run."""
    lines: dict[str, int] = {}
    for result in results:
        lines[run_line(result)] = lines.get(run_line(result), 0) + len(result["rows"])
    return "\n".join(f"- {line}: {count} products." for line, count in lines.items())


def page(folder: Path, name: str) -> str:
    """Everything between the marks of docs/sparse.md or docs/blocks.md, by its name; "" without results."""
    results = of_page(read(folder), name)
    if not results:
        return ""
    head, lines = page_lines(results, name)
    columns = "ll" + "r" * (len(head) - 4) + "lr"
    return "\n\n".join([table(head, lines, columns), ABOUT, places(results)])
