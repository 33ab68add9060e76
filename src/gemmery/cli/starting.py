"""`gemmery demo`, `ladder` and `doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import JsonFile, app, interpret_without_gpu


@app.command()
def demo(json: JsonFile = None) -> None:
    """Run a sentence model with every linear layer through gemmery and compare it with torch."""
    interpret_without_gpu()
    from ..lab.demo import demo as run

    raise typer.Exit(run(json))


@app.command()
def ladder(
    rungs: Annotated[
        list[int] | None, typer.Argument(metavar="RUNG", help="Numbers of rungs; all without.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Climb the tutorials from a vector add to a persistent kernel, each rung checked and measured."""
    interpret_without_gpu()
    from ..lab.ladder import ladder as run

    raise typer.Exit(run(rungs or [], json))


@app.command()
def doctor(json: JsonFile = None) -> None:
    """Say what this machine has, what it can't do, and what runs instead."""
    from ..lab.doctor import doctor as run

    raise typer.Exit(run(json))
