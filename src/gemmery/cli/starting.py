"""`gemmery demo`, `ladder` and `doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import JsonFile, app, interpret_without_gpu


@app.command()
def demo(json: JsonFile = None) -> None:
    """Run a sentence model with every linear layer through gemmery, and compare it with torch."""
    interpret_without_gpu()
    from ..lab.demo import demo as run

    raise typer.Exit(run(json))


@app.command()
def ladder(
    rungs: Annotated[
        list[int] | None, typer.Argument(metavar="RUNG", help="Numbers of the rungs to run. Default: all.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Run the tutorials, from a vector add to the kernels of the library, and check and measure each one.

    Rungs given by number also print their questions and answers.
    """
    interpret_without_gpu()
    from ..lab.ladder import ladder as run

    raise typer.Exit(run(rungs or [], json))


@app.command()
def doctor(json: JsonFile = None) -> None:
    """Show what this machine has, what it can't run, what runs instead, and how to fix it."""
    from ..lab.doctor import doctor as run

    raise typer.Exit(run(json))
