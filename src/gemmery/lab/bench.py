"""Runs suites: makes inputs, checks every method against float64, times them, writes the results down.

The protocol is that of `timing`: ratios of times taken within a round, in its regimes.
"""

from __future__ import annotations

import os
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..select.shapes import check_sizes, sizes
from ..tuning.stopwatch import Call, Stopwatch
from . import suites, timing
from .display import Display
from .inputs import (
    KINDS,
    Inputs,
    Unsuited,
    WrongResult,
    check,
    least_seconds,
    make_inputs,
    sample_rows,
    tf32_allowed,
)
from .libraries import LIBRARIES, SLACK
from .peers import OURS, PEERS, Method, gemmery_call, gemmery_plan
from .results import MIXED, Result, describe_run, summarise_row
from .suites import Row

if TYPE_CHECKING:
    from rich.console import Console

    from ..launch.plan import Plan

#: Rows of a suite that are timed in steady too, by default: one takes several seconds.
STEADY_ROWS = 8


# --- one row --------------------------------------------------------------------------------------------------------


def make_calls(
    methods: Mapping[str, Method], inputs: Inputs, checked: Sequence[int]
) -> tuple[dict[str, Call], dict[str, float], dict[str, str]]:
    """Every method's call, checked.

    Returns:
        The calls, their errors, and why each peer that is missing from them was left out.

    Raises:
        WrongResult: a method's result is wrong; other libraries' are left out instead.
        Exception: the error of gemmery's method.
    """
    calls, errors, left_out = {}, {}, {}
    for name, method in methods.items():
        try:
            call = method(inputs)
            errors[name] = check(call, inputs, checked, SLACK if name in LIBRARIES else 1)
            calls[name] = call
        except WrongResult as error:
            if name in LIBRARIES:
                left_out[name] = f"wrong result: {error}"
                continue
            raise WrongResult(f"{name}: {error}") from error
        except Exception as error:
            if name == OURS:
                raise
            # Kept in the results and shown: a peer without such a product says so in many ways.
            text = " ".join(str(error).split())[:200]
            left_out[name] = text if isinstance(error, Unsuited) else f"{type(error).__name__}: {text}"
    return calls, errors, left_out


def run_row(
    row: Row, dtype: str, methods: Mapping[str, Method], *, planned: Callable[[Inputs], Plan | None], seed: int,
    rounds: int, regimes: Sequence[str], watch: Stopwatch, device: str,
) -> dict[str, Any]:  # fmt: skip
    """Check and time one row; returns what `Result.rows` holds of it.

    Raises:
        WrongResult: a method's result is wrong.
    """
    inputs = make_inputs(row, dtype, seed, device)
    with tf32_allowed(inputs.kind.precision == "tf32"):
        calls, errors, left_out = make_calls(methods, inputs, sample_rows(row.M, random.Random(seed)))
        compared = timing.measure(calls, rounds=rounds, seed=seed, regimes=regimes, watch=watch)
    plan = planned(inputs)
    roofline = least_seconds(inputs) if inputs.scaled else plan.roofline() if plan else None
    unplanned = "" if inputs.scaled else "torch reference"
    return {
        "plan": unplanned if plan is None else str(plan),
        "roofline_us": None if roofline is None else roofline * 1e6,
        "errors": errors,
        "left_out": left_out,
        "steady_graphs": compared.graphed,
        "rounds": compared.rounds,
        "summary": summarise_row(
            compared.rounds, row.flops, roofline, [name for name in methods if name != OURS]
        ),
    }


# --- one suite ------------------------------------------------------------------------------------------------------


def run_suite(
    name: str,
    *,
    dtype: str = "bf16",
    regimes: Sequence[str] = timing.KERNEL_REGIMES,
    rounds: int = 5,
    ours: Method = gemmery_call,
    peers: Mapping[str, Method] | None = None,
    rows: Sequence[Row] | None = None,
    steady_rows: int | None = STEADY_ROWS,
    seed: int | None = None,
    tuned: bool = False,
    drawn: int | None = None,
    planned: Callable[[Inputs], Plan | None] = gemmery_plan,
    path: Path | None = None,
    console: Console | None = None,
    watch: Stopwatch | None = None,
    device: str = "cuda",
) -> Result:
    """Measure a suite and show a table while it grows.

    Args:
        name: of the suite, see `suites.names`.
        dtype: of `suites.DTYPES`, for rows without one; `MIXED` if all have one.
        regimes: some of `timing.REGIMES`.
        rounds: per row and regime.
        ours, peers: the methods; the vendor's BLAS is the peer by default.
        rows: the suite's rows to run; all by default.
        steady_rows: how many rows, spread over `rows`, are timed in steady; None for all.
        seed: of inputs and orders; a new one by default.
        tuned: what the results say of ours: whether it was tuned beforehand.
        drawn: what they say of the rows: the seed that these were drawn from, where they are not the suite's own.
        planned: the plan of our method for given inputs.
        path: where the results go, as JSON, after each row.
        watch: the stopwatch; a new one by default.
        device: "cuda", or "cpu" for a test with a watch that needs no GPU.

    Returns:
        The results. A row that fails (a wrong result, no memory, no kernel) is there with its error; the others run.

    Raises:
        ValueError: an unknown suite, dtype or regime, or no rows.
    """
    rows = suites.load(name) if rows is None else list(rows)
    if not rows:
        raise ValueError(f"suite {name}: no row is left to run")
    if dtype not in KINDS and not (dtype == MIXED and all(row.dtype for row in rows)):
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(KINDS)}")
    timing.check_protocol(regimes, rounds)
    methods = {OURS: ours, **({"cublas": PEERS["cublas"]} if peers is None else peers)}
    seed = random.SystemRandom().getrandbits(31) if seed is None else seed
    watch = Stopwatch() if watch is None else watch
    steady = {row.name for row in (rows if steady_rows is None else suites.spread(rows, steady_rows))}
    if set(regimes) == {"steady"}:
        rows = [row for row in rows if row.name in steady]

    header = describe_run(seed, rounds, regimes, device, [peer for peer in methods if peer != OURS])
    result = Result(name, dtype, header | {"tuned": tuned} | ({} if drawn is None else {"drawn": drawn}))
    with Display(result, len(rows), console) as display:
        for row in rows:
            display.begin(row)
            kind = row.dtype or dtype
            wanted = [regime for regime in regimes if regime != "steady" or row.name in steady]
            record = {key: value for key, value in asdict(row).items() if value not in (None, False)}
            record["dtype"] = kind
            try:
                record |= run_row(
                    row, kind, methods, planned=planned, seed=seed, rounds=rounds, regimes=wanted, watch=watch,
                    device=device,
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


# --- the command ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """The request of `gemmery bench`.

    Attributes:
        suites: names, or "all" for every suite that is not part of another.
        shapes: texts such as 64x4096x4096: products of a Linear of these sizes, (M, K) by a weight (N, K), measured
            like a suite.
        dtypes: for rows without one.
        against: names of `PEERS`.
        regimes: of `timing.REGIMES`; those of the suite if empty.
        steady_rows: of each suite; None for all.
        rows: a regular expression that is searched for in rows' names.
        count: how many rows the suites of random products draw from `seed`; None for the rows that they have.
        tuned: whether timings of this machine's store may choose configs; else gemmery is measured as it ships.
        json: a file for a single result, or a directory that gets a file for each suite and type.
    """

    suites: Sequence[str] = ()
    shapes: Sequence[str] = ()
    dtypes: Sequence[str] = ("bf16",)
    against: Sequence[str] = ("cublas",)
    regimes: Sequence[str] = ()
    rounds: int = 5
    steady_rows: int | None = STEADY_ROWS
    rows: str = ""
    seed: int | None = None
    count: int | None = None
    tuned: bool = False
    json: Path | None = None


@dataclass(frozen=True)
class Run:
    """One suite in one type, and where its result goes.

    Attributes:
        drawn: the seed that the rows were drawn from; None if they are the suite's own.
    """

    suite: str
    dtype: str
    rows: list[Row]
    regimes: Sequence[str]
    path: Path | None
    drawn: int | None = None

    def seconds(self, request: Request) -> float:
        """About how long it keeps the GPU, without compilation."""
        few = self.rows if request.steady_rows is None else suites.spread(self.rows, request.steady_rows)
        methods = 1 + len(request.against)
        return sum(
            len(few if regime == "steady" else self.rows)
            * timing.expected_seconds(methods, rounds=request.rounds, regimes=[regime])
            for regime in self.regimes
        )


def runs(request: Request) -> list[Run]:
    """The runs of a request.

    Raises:
        ValueError: a name is unknown, nothing is left to run, or several results would go to one file.
    """
    for what, given, known in (
        ("suite", request.suites, ["all", *suites.names()]),
        ("dtype", request.dtypes, list(KINDS)),
        ("peer", request.against, list(PEERS)),
    ):
        if unknown := [word for word in given if word not in known]:
            raise ValueError(f"unknown {what} {', '.join(unknown)}; there are {', '.join(known)}")
    timing.check_protocol(request.regimes, request.rounds)
    try:
        wanted = re.compile(request.rows)
    except re.error as error:
        raise ValueError(f"rows {request.rows!r} is not a regular expression: {error}") from error
    shapes = {suites.SHAPES: rows_of(request.shapes)} if request.shapes else {}
    asked = suites.whole() if "all" in request.suites else list(dict.fromkeys(request.suites))
    if request.count is not None and not set(asked) & set(suites.RANDOM):
        raise ValueError(f"count is for suites of random products: {', '.join(suites.RANDOM)}")
    seed = random.SystemRandom().getrandbits(31) if request.seed is None else request.seed
    found: list[Run] = []
    for name in [*asked, *shapes]:
        drawn = seed if request.count is not None and name in suites.RANDOM else None
        if name in shapes:
            rows = shapes[name]
        else:
            rows = suites.load(name) if drawn is None else suites.drawn(name, drawn, request.count or 0)
        rows = [row for row in rows if wanted.search(row.name)]
        if not rows:
            raise ValueError(f"suite {name}: no row's name matches {request.rows!r}")
        regimes = request.regimes or suites.REGIMES.get(suites.source(name), timing.KERNEL_REGIMES)
        for dtype in [MIXED] if all(row.dtype for row in rows) else dict.fromkeys(request.dtypes):
            found.append(Run(name, dtype, rows, regimes, _path(request, name, dtype, drawn), drawn))
    if request.json is not None and request.json.suffix == ".json" and len(found) > 1:
        raise ValueError(f"{request.json} is one file, and there are {len(found)} results; name a directory")
    return found


def rows_of(shapes: Sequence[str]) -> list[Row]:
    """Rows of sizes that a user gives as texts: products of a Linear, or batches of them.

    Raises:
        ValueError: a text is of another form, a size is one that no kernel takes, or two texts have the same sizes.
    """
    rows: list[Row] = []
    for text in shapes:
        *batch, M, N, K = sizes(text)
        check_sizes(M, N, K, batch)
        if len(batch) > len(suites.BATCH_NAMES):
            raise ValueError(
                f"shape is {text!r}; it must have at most {len(suites.BATCH_NAMES)} sizes before M, N and K"
            )
        row = Row(text, M, N, K, batch=tuple(batch))
        if same := [one.name for one in rows if one.shape == row.shape]:
            raise ValueError(f"shape {same[0]} is given again, as {text}; give each shape once")
        rows.append(row)
    return rows


def _path(request: Request, suite: str, dtype: str, drawn: int | None) -> Path | None:
    given = request.json
    if given is None or given.suffix == ".json":
        return given
    words = [
        suite,
        dtype,
        *([] if drawn is None else [f"seed{drawn}"]),
        *(["tuned"] if request.tuned else []),
    ]
    return given / f"{'-'.join(words)}.json"


@contextmanager
def _store(used: bool) -> Iterator[None]:
    """With `used` False, timings that were taken on this machine choose no config inside the block."""
    before = os.environ.get("GEMMERY_STORE")
    if not used:
        os.environ["GEMMERY_STORE"] = "0"
    try:
        yield
    finally:
        if before is not None:
            os.environ["GEMMERY_STORE"] = before
        elif not used:
            del os.environ["GEMMERY_STORE"]


def show(request: Request, planned: Sequence[Run]) -> None:
    """`gemmery bench --list`: print the rows and about how long they take; measure nothing."""
    for run in planned:
        kinds = "/".join(run.regimes)
        print(
            f"{run.suite}, {run.dtype}: {len(run.rows)} rows, about {run.seconds(request):.0f} s in {kinds}. "
            f"{suites.about(run.suite)}"
        )
        for row in run.rows:
            extra = "".join(
                f", {word}"
                for word in (
                    row.dtype, row.weight, row.scales and f"scales of {row.scales}", row.epilogue,
                    row.call if row.call != "matmul_out" else "",
                )
                if word
            )  # fmt: skip
            print(f"  {row.name:56} {row.shape:24} A {row.a}, B {row.b}, out {row.out}{extra}")


def listed(request: Request, planned: Sequence[Run]) -> list[dict[str, Any]]:
    """The same as plain values, for JSON; times in seconds."""
    return [
        {
            "suite": run.suite, "dtype": run.dtype, "about": suites.about(run.suite), "regimes": list(run.regimes),
            "seconds": run.seconds(request), "rows": [asdict(row) for row in run.rows],
        }
        for run in planned
    ]  # fmt: skip


def bench(request: Request, planned: Sequence[Run]) -> int:
    """`gemmery bench`: run suites one after the other.

    Returns:
        The exit status: 0, 1 if rows failed, 2 if nothing could be run.
    """
    if not torch.cuda.is_available():
        print("no GPU that torch can use: nothing to measure (--list shows the rows)", file=sys.stderr)
        return 2
    watch, failed = Stopwatch(), []
    peers = {name: PEERS[name] for name in request.against}
    for run in planned:
        where = "" if run.path is None else f", to {run.path}"
        print(
            f"{run.suite}, {run.dtype}: {len(run.rows)} rows, about {run.seconds(request):.0f} s{where}",
            flush=True,
        )
        with _store(request.tuned):
            result = run_suite(
                run.suite, dtype=run.dtype, rows=run.rows, regimes=run.regimes, rounds=request.rounds, peers=peers,
                steady_rows=request.steady_rows, seed=request.seed, tuned=request.tuned, drawn=run.drawn, path=run.path,
                watch=watch,
            )  # fmt: skip
        failed += [f"{run.suite}, {run.dtype}: {row}" for row in result.failed]
    for row in failed:
        print(f"failed: {row}", file=sys.stderr)
    return 1 if failed else 0
