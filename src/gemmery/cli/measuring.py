"""`gemmery bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import app, place_for_json, words, write_json


def _steady_rows(text: str) -> str:
    if text != "all" and not text.isdecimal():
        raise typer.BadParameter(f"{text!r} given; a number of rows or 'all' is wanted")
    return text


def _place_for_results(path: Path | None) -> Path | None:
    return place_for_json(path) if path is not None and path.suffix == ".json" else path


@app.command()
def bench(
    suite: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="What is measured; all, or names that --list shows.")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE", help="bf16 (default), fp16, ...; for rows that have no type of their own."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PEER",
            help="cublas (default): torch; compile, compile_default: torch.compile with and without max-autotune; "
            "seed: the tutorials; tinygemm, torchao, gemlite: other libraries, for packed weights.",
        ),
    ] = None,
    regimes: Annotated[
        list[str] | None,
        typer.Option(metavar="REGIME", help="burst, steady, graph, host; the first two unless the suite differs."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Per row and regime; fewer than 5 are only a look.")] = 5,
    steady_rows: Annotated[
        str,
        typer.Option(metavar="N|all", callback=_steady_rows, help="Rows of a suite timed in steady, evenly spread."),
    ] = "8",
    rows: Annotated[str, typer.Option(metavar="REGEX", help="Only rows whose name matches.")] = "",
    seed: Annotated[int | None, typer.Option(help="Of inputs and orders; a new one without.")] = None,
    count: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Of random suites: N rows drawn from --seed instead of their own."),
    ] = None,
    tuned: Annotated[
        bool, typer.Option("--tuned", help="Let timings of this machine's store choose; else gemmery is as it ships.")
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option(
            "--json", "--out", metavar="FILE|DIR", callback=_place_for_results,
            help="Write the result to this .json file, or each to one of its own in this directory.",
        ),
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="Show the rows and about how long they take; measure nothing.")
    ] = False,
) -> None:  # fmt: skip
    """Measure suites of products against other implementations, on the GPU at hand.

    Options that name things take several between commas, or are repeated: --suite square,llm --dtype bf16 --dtype fp16.
    """
    if not suite and not listing:
        raise typer.BadParameter("name a suite, or see --list", param_hint="--suite")
    if json == Path("-") and not listing:
        raise typer.BadParameter(
            "results are kept in files: name a .json file, or a directory", param_hint="--json"
        )
    from ..lab.bench import Request, listed, runs, show
    from ..lab.bench import bench as run
    from ..select.shapes import short_name

    request = Request(
        suites=words(suite) or ["all"],
        dtypes=[short_name(name) for name in words(dtype)] or ["bf16"],
        against=words(against) or ["cublas"],
        regimes=words(regimes),
        rounds=rounds,
        steady_rows=None if steady_rows == "all" else int(steady_rows),
        rows=rows,
        seed=seed,
        count=count,
        tuned=tuned,
        json=json,
    )
    try:
        planned = runs(request)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if listing and json is not None:
        json = place_for_json(json)
        write_json(json, {"suites": listed(request, planned)})
    elif listing:
        show(request, planned)
    else:
        raise typer.Exit(run(request, planned))
