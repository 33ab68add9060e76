"""Runs a suite: makes inputs, checks every method against float64, times them, writes the results down.

The protocol is that of `timing`: ratios of times taken within a round, in the regimes "burst" and "steady".
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import suites, timing
from .suites import Row
from .timing import Call, Stopwatch

if TYPE_CHECKING:
    from rich.console import Console

OURS = "gemmery"
#: By name of `suites.DTYPES`: torch's type and the precision that gemmery is asked for.
DTYPES: dict[str, tuple[torch.dtype, str]] = {
    "bf16": (torch.bfloat16, "ieee"),
    "fp16": (torch.float16, "ieee"),
    "fp32": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "fp64": (torch.float64, "ieee"),
}
#: The largest ‖out − ref‖ / ‖ref‖ that counts as right: a few times what rounding inputs or result costs.
TOLERANCES = {"bf16": 4e-3, "fp16": 1e-3, "fp32": 1e-5, "tf32": 2e-3, "fp64": 1e-13}
#: Rows of the output that are compared in float64, and columns at a time.
CHECKED_ROWS, CHECKED_COLUMNS = 512, 8192
#: Rows of a suite that are timed in steady too, by default: one takes several seconds.
STEADY_ROWS = 8
#: M = N = K of the product whose host time is taken.
TINY = 128


class WrongResult(Exception):
    """A method's result is not that of the product: it is not timed."""


@dataclass(frozen=True)
class Inputs:
    """What a method gets.

    Attributes:
        a, b: (..., M, K) and (..., K, N).
        out: (..., M, N), the same for all methods.
        precision: "ieee" or "tf32".
    """

    a: Tensor
    b: Tensor
    out: Tensor
    precision: str


#: Makes a method's call for given inputs.
Method = Callable[[Inputs], Call]


def gemmery_matmul(inputs: Inputs) -> Call:
    """`gemmery.matmul` as a user calls it."""
    import gemmery

    a, b, out, precision = inputs.a, inputs.b, inputs.out, inputs.precision
    return lambda: gemmery.matmul(a, b, out=out, precision=precision)  # type: ignore[arg-type]


def torch_matmul(inputs: Inputs) -> Call:
    """`torch.matmul`, which is the vendor's BLAS."""
    a, b, out = inputs.a, inputs.b, inputs.out
    return lambda: torch.matmul(a, b, out=out)


def gemmery_plan(inputs: Inputs) -> str:
    """What `gemmery.matmul` does for these inputs, in words."""
    import gemmery

    plan = gemmery.plan(inputs.a, inputs.b, out=inputs.out, precision=inputs.precision)  # type: ignore[arg-type]
    return "torch reference" if plan is None else str(plan)


# --- inputs ---------------------------------------------------------------------------------------------------------


def make_matrix(
    batch: Sequence[int], rows: int, cols: int, layout: str, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """A (*batch, rows, cols) tensor of random normal numbers, in memory as `layout`, of `suites.LAYOUTS`, says."""
    order, _, view = layout.partition("+")
    outer, inner = (rows, cols) if order == "row" else (cols, rows)
    length = {"": inner, "pad": inner + 64, "odd": inner + 1, "step": 2 * inner}[view]
    buffer = torch.randn(*batch, outer, length, dtype=dtype, device=generator.device, generator=generator)
    if view == "step":
        matrix = buffer[..., ::2]
    else:
        start = 1 if view == "odd" else 0
        matrix = buffer[..., start : start + inner]
    return matrix if order == "row" else matrix.mT


def make_inputs(row: Row, dtype: str, seed: int, device: str = "cuda") -> Inputs:
    """Random inputs of a row, the same for the same seed whatever other rows are run."""
    generator = torch.Generator(device).manual_seed(seed ^ zlib.crc32(row.name.encode()))
    torch_dtype, precision = DTYPES[dtype]
    a = make_matrix(row.batch, row.M, row.K, row.a, torch_dtype, generator)
    b = make_matrix(row.batch, row.K, row.N, row.b, torch_dtype, generator)
    out = make_matrix(row.batch, row.M, row.N, row.out, torch_dtype, generator)
    return Inputs(a, b, out, precision)


@contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Whether torch's own float32 products may use TF32, inside the block."""
    flags = torch.backends.cuda.matmul
    before = flags.allow_tf32
    flags.allow_tf32 = allowed
    try:
        yield
    finally:
        flags.allow_tf32 = before


# --- check ----------------------------------------------------------------------------------------------------------


def sample_rows(M: int, rng: random.Random) -> list[int]:
    """All of M rows, or `CHECKED_ROWS`: a random one from each of as many bands, so that no tile is left out."""
    if M <= CHECKED_ROWS:
        return list(range(M))
    edges = [M * i // CHECKED_ROWS for i in range(CHECKED_ROWS + 1)]
    rows = [rng.randrange(low, high) for low, high in itertools.pairwise(edges)]
    # The last tile may be a single row, and is the likeliest to be wrong.
    return [*rows[:-1], M - 1]


def relative_error(inputs: Inputs, rows: Sequence[int]) -> float:
    """‖out − ref‖ / ‖ref‖ over some rows of the output, against the product in float64."""
    index = torch.tensor(rows, device=inputs.a.device)
    left = inputs.a.index_select(-2, index).double()
    wrong = norm = 0.0
    for start in range(0, inputs.b.shape[-1], CHECKED_COLUMNS):
        columns = slice(start, start + CHECKED_COLUMNS)
        reference = left @ inputs.b[..., columns].double()
        got = inputs.out[..., columns].index_select(-2, index).double()
        wrong += (got - reference).square().sum().item()
        norm += reference.square().sum().item()
    return math.sqrt(wrong / norm)


def check(call: Call, inputs: Inputs, rows: Sequence[int], tolerance: float) -> float:
    """Run a method once into an output full of NaN and compare.

    Returns:
        The relative error over `rows`.

    Raises:
        WrongResult: it is over the tolerance, or anything in the whole output is not finite.
    """
    inputs.out.fill_(math.nan)
    call()
    left = inputs.out.numel() - int(torch.isfinite(inputs.out).sum().item())
    if left:
        raise WrongResult(f"{left} of {inputs.out.numel()} elements were not written or are not finite")
    error = relative_error(inputs, rows)
    if not error <= tolerance:  # written this way round, NaN fails too
        raise WrongResult(f"relative error {error:.2e} is over {tolerance:.0e}")
    return error


# --- results --------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """A suite's results.

    Attributes:
        header: what ran where and when, by what protocol.
        rows: by row its shape, plan, errors, all rounds' times in seconds, and their summary; "error" where it failed.
    """

    suite: str
    dtype: str
    header: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """Names of the rows that could not be measured."""
        return [row["name"] for row in self.rows if "error" in row]

    def summary(self) -> dict[str, dict[str, dict[str, Any]]]:
        """By regime and peer: geometric mean and worst of the rows' median ratios, and how many rows they are."""
        found: dict[str, dict[str, list[tuple[float, str]]]] = {}
        for row in self.rows:
            for regime, figures in row.get("summary", {}).items():
                for peer, ratio in figures["ratio"].items():
                    pair = (ratio["median"], row["name"])
                    found.setdefault(regime, {}).setdefault(peer, []).append(pair)
        return {
            regime: {
                peer: {
                    "geomean": timing.geometric_mean([value for value, _ in pairs]),
                    "worst": min(pairs)[0],
                    "worst_row": min(pairs)[1],
                    "rows": len(pairs),
                }
                for peer, pairs in peers.items()
            }
            for regime, peers in found.items()
        }

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all; directories are made."""
        data = {"suite": self.suite, "dtype": self.dtype, **self.header, "summary": self.summary()}
        text = json.dumps(data | {"rows": self.rows}, indent=1, ensure_ascii=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(path)


def commit() -> str:
    """The commit of the measured code, "-dirty" if changed since: GEMMERY_COMMIT, or what git says, or "unknown"."""
    if given := os.environ.get("GEMMERY_COMMIT"):
        return given
    root = Path(__file__).resolve().parents[3]
    # An installed copy may lie inside some other repository, whose commit would say nothing.
    top = _git(root, "rev-parse", "--show-toplevel")
    name = _git(root, "rev-parse", "--short", "HEAD")
    if not top or not name or Path(top).resolve() != root:
        return "unknown"
    # Results lie beside the code; writing them changes nothing of what is measured.
    changed = _git(root, "status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results")
    return name if changed == "" else f"{name}-dirty"


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _describe_run(
    seed: int, rounds: int, regimes: Sequence[str], device: str, peers: Sequence[str]
) -> dict[str, Any]:
    import triton

    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or torch.version.hip or "none",
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "ours": OURS,
        "peers": list(peers),
        "protocol": {
            "rounds": rounds,
            "regimes": list(regimes),
            "burst": {
                "launches": timing.BURST_MOST,
                "sleep_s": timing.SLEEP,
                "flush_bytes": timing.FLUSH_BYTES,
            },
            "steady": {"load_s": timing.LOAD, "timed_s": timing.TIMED},
        },
    }


# --- running --------------------------------------------------------------------------------------------------------


def run_row(
    row: Row, dtype: str, methods: Mapping[str, Method], *, describe: Callable[[Inputs], str], seed: int,
    rounds: int, regimes: Sequence[str], watch: Stopwatch, device: str,
) -> dict[str, Any]:  # fmt: skip
    """Check and time one row; returns what `Result.rows` holds of it.

    Raises:
        WrongResult: a method's result is wrong.
    """
    inputs = make_inputs(row, dtype, seed, device)
    calls = {name: method(inputs) for name, method in methods.items()}
    checked = sample_rows(row.M, random.Random(seed))
    errors = {}
    with tf32_allowed(inputs.precision == "tf32"):
        for name, call in calls.items():
            try:
                errors[name] = check(call, inputs, checked, TOLERANCES[dtype])
            except WrongResult as error:
                raise WrongResult(f"{name}: {error}") from error
        compared = timing.measure(calls, rounds=rounds, seed=seed, regimes=regimes, watch=watch)
    return {
        "plan": describe(inputs),
        "errors": errors,
        "steady_graphs": compared.graphed,
        "rounds": compared.rounds,
        "summary": {regime: _summarise(times, row.flops) for regime, times in compared.rounds.items()},
    }


def _summarise(rounds: Sequence[timing.Round], flops: int) -> dict[str, Any]:
    times = {name: timing.median_time(rounds, name) for name in sorted(rounds[0])}
    peers = [name for name in times if name != OURS]
    return {
        "us": {name: seconds * 1e6 for name, seconds in times.items()},
        "tflops": {name: flops / seconds / 1e12 for name, seconds in times.items()},
        "ratio": {peer: asdict(timing.ratio(rounds, peer, OURS)) for peer in peers},
    }


def host_times(
    methods: Mapping[str, Method], dtype: str, *, seed: int, watch: Stopwatch, device: str = "cuda"
) -> dict[str, float]:
    """Microseconds of host time per call of each method, for a product so small that the GPU is never behind."""
    inputs = make_inputs(Row("host time", TINY, TINY, TINY), dtype, seed, device)
    return {name: timing.host_time(method(inputs), watch=watch) * 1e6 for name, method in methods.items()}


def run_suite(
    name: str,
    *,
    dtype: str = "bf16",
    regimes: Sequence[str] = timing.REGIMES,
    rounds: int = 5,
    ours: Method = gemmery_matmul,
    peers: Mapping[str, Method] | None = None,
    rows: Sequence[Row] | None = None,
    steady_rows: int | None = STEADY_ROWS,
    seed: int | None = None,
    describe: Callable[[Inputs], str] = gemmery_plan,
    path: Path | None = None,
    console: Console | None = None,
    watch: Stopwatch | None = None,
    device: str = "cuda",
) -> Result:
    """Measure a suite and show a table while it grows.

    Args:
        name: of the suite, see `suites.names`.
        dtype: of `suites.DTYPES`, for rows that do not have one of their own.
        regimes: some of `timing.REGIMES`.
        rounds: per row and regime.
        ours, peers: the methods; `torch.matmul` is the peer by default.
        rows: the suite's rows to run; all by default.
        steady_rows: how many rows, spread over `rows`, are timed in steady; None for all.
        seed: of inputs and orders; a new one by default.
        describe: says what our method does for given inputs.
        path: where the results go, as JSON, after each row.
        watch: the stopwatch; a new one by default.
        device: "cuda", or "cpu" for a test with a watch that needs no GPU.

    Returns:
        The results. A row that fails (a wrong result, no memory, no kernel) is there with its error; the others run.

    Raises:
        ValueError: an unknown suite, dtype or regime, or no rows.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    rows = suites.load(name) if rows is None else list(rows)
    if not rows:
        raise ValueError(f"suite {name}: no row is left to run")
    timing.check_protocol(regimes, rounds)
    methods = {OURS: ours, **({"torch": torch_matmul} if peers is None else peers)}
    seed = random.SystemRandom().getrandbits(31) if seed is None else seed
    watch = Stopwatch() if watch is None else watch
    steady = {row.name for row in (rows if steady_rows is None else suites.spread(rows, steady_rows))}
    if set(regimes) == {"steady"}:
        rows = [row for row in rows if row.name in steady]

    result = Result(
        name, dtype, _describe_run(seed, rounds, regimes, device, [m for m in methods if m != OURS])
    )
    result.header["host_us"] = host_times(methods, dtype, seed=seed, watch=watch, device=device)
    with Display(result, len(rows), console) as display:
        for row in rows:
            display.begin(row)
            wanted = [regime for regime in regimes if regime != "steady" or row.name in steady]
            record = {"dtype": dtype} | {
                key: value for key, value in asdict(row).items() if value is not None
            }
            try:
                record |= run_row(
                    row, row.dtype or dtype, methods, describe=describe, seed=seed, rounds=rounds, regimes=wanted,
                    watch=watch, device=device,
                )  # fmt: skip
            except Exception as error:
                # Kept in the results, shown, and the cause of a failing exit; the other rows do not depend on it.
                traceback.print_exc(file=sys.stderr)
                record["error"] = f"{type(error).__name__}: {error}"
            result.rows.append(record)
            if path is not None:
                result.save(path)
            if device == "cuda":
                torch.cuda.empty_cache()
            display.end(record)
    return result


# --- display --------------------------------------------------------------------------------------------------------


class Display(AbstractContextManager["Display"]):
    """A table that grows with the rows over a progress bar; where output is no terminal, one line per row at once."""

    def __init__(self, result: Result, total: int, console: Console | None) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.console = Console() if console is None else console
        self.result = result
        self.peers: list[str] = result.header["peers"]
        self.regimes: list[str] = result.header["protocol"]["regimes"]
        self.table = self._table()
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self.task = self.progress.add_task(result.suite, total=total)
        self.live: Live | None = None
        if self.console.is_terminal:
            view = Group(self.table, self.progress)
            self.live = Live(view, console=self.console, vertical_overflow="visible", refresh_per_second=4)

    def _table(self) -> Any:
        from rich.table import Table

        header = self.result.header
        host = ", ".join(f"{name} {us:.1f}" for name, us in header["host_us"].items())
        table = Table(
            title=f"{self.result.suite}, {self.result.dtype}, {header['gpu']}, {header['commit']}",
            caption=f"host time per call, µs: {host}; a ratio is a peer's time / ours",
        )
        table.add_column("row")
        table.add_column("M×N×K")
        for heading in (f"{OURS} µs", "TFLOP/s", *self._headings(), "error"):
            table.add_column(heading, justify="right")
        return table

    def _headings(self) -> list[str]:
        return [f"{peer} {regime}" for peer in self.peers for regime in self.regimes]

    def __enter__(self) -> Display:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()
        else:
            self.console.print(self.table)
        for regime, peers in self.result.summary().items():
            for peer, figures in peers.items():
                self.console.print(
                    f"{peer}, {regime}: geometric mean {figures['geomean']:.3f}, worst {figures['worst']:.3f}"
                    f" ({figures['worst_row']}), {figures['rows']} rows",
                    highlight=False, markup=False,
                )  # fmt: skip

    def begin(self, row: Row) -> None:
        """Show which row is running."""
        self.progress.update(self.task, description=row.name)

    def end(self, record: dict[str, Any]) -> None:
        """Add a row's record."""
        from rich.markup import escape

        cells = self._cells(record)
        self.table.add_row(*map(escape, cells))
        self.progress.advance(self.task)
        if self.live is None:
            self.console.print(
                "  ".join(cells), record.get("plan", ""), markup=False, highlight=False, soft_wrap=True
            )

    def _cells(self, record: dict[str, Any]) -> list[str]:
        shape = "×".join(str(size) for size in (*record["batch"], record["M"], record["N"], record["K"]))
        if "error" in record:
            blanks = [""] * (2 + len(self._headings()))
            return [record["name"], shape, *blanks, record["error"]]
        summary = record["summary"]
        first = next(iter(summary.values()), None)
        cells = [record["name"], shape]
        cells += ["", ""] if first is None else [f"{first['us'][OURS]:.1f}", f"{first['tflops'][OURS]:.1f}"]
        for peer in self.peers:
            for regime in self.regimes:
                ratio = summary[regime]["ratio"][peer] if regime in summary else None
                cells.append(
                    "" if ratio is None else f"{ratio['median']:.3f} ({ratio['min']:.3f}–{ratio['max']:.3f})"
                )
        return [*cells, f"{record['errors'][OURS]:.1e}"]
