"""`gemmery bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import app, place_for_json, words, write_json
from .products import SIZES


def _steady_rows(text: str) -> str:
    if text != "all" and not (text.isascii() and text.isdigit()):
        raise typer.BadParameter(f"{text!r} is not a number of rows; give a number, or 'all'")
    return text


def _place_for_results(path: Path | None) -> Path | None:
    return place_for_json(path) if path is not None and path.suffix == ".json" else path


@app.command()
def bench(
    suite: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Suites to measure: all, or names that --list shows.")
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(metavar="MxNxK", help="Your own sizes, of a Linear, or BxMxNxK with a batch. " + SIZES),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE", help="Type of rows without one: bf16 (default), fp16, ..."),
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
        typer.Option(
            metavar="REGIME",
            help="burst, steady, graph, host. Default: burst and steady, unless the suite says otherwise.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(
        min=1,
        help="Rounds per row and regime. Fewer than 5 give only a rough result.",
    )] = 5,
    steady_rows: Annotated[
        str,
        typer.Option(
            metavar="N|all", callback=_steady_rows,
            help="Number of rows of a suite that are timed in steady, evenly spaced.",
        ),
    ] = "8",
    rows: Annotated[str, typer.Option(metavar="REGEX", help="Measure only rows whose name matches.")] = "",
    seed: Annotated[int | None, typer.Option(help="Seed of inputs and orders. Default: a new one.")] = None,
    count: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="In random suites, draw N rows from --seed instead of the suite's own."),
    ] = None,
    tuned: Annotated[
        bool, typer.Option("--tuned", help="Use the timings in this machine's store. Default: gemmery as it ships.")
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option(
            "--json", "--out", metavar="FILE|DIR", callback=_place_for_results,
            help="Write the result to this .json file, or each result to a file in this directory.",
        ),
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="Show the rows and about how long they take, and measure nothing.")
    ] = False,
) -> None:  # fmt: skip
    """Measure suites of products, or your own shapes, against other implementations, on the GPU of this machine.

    Options accept several names, separated by commas or repeated: --suite square,llm --dtype bf16 --dtype fp16.
    """
    if not (suite or shapes or listing):
        raise typer.BadParameter(
            "give shapes, or a suite; --list shows their names", param_hint="--shapes or --suite"
        )
    if json == Path("-") and not listing:
        raise typer.BadParameter(
            "results need a file: give a .json file, or a directory", param_hint="--json"
        )
    from ..lab.bench import Request, listed, runs, show
    from ..lab.bench import bench as run
    from ..select.shapes import short_name

    request = Request(
        suites=words(suite) or ([] if shapes else ["all"]),
        shapes=words(shapes),
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
