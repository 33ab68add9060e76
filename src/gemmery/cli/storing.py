"""`gemmery store`: the timings of `gemmery tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Commands, JsonFile, app, place_for_json, told, write_json

store_app = Commands(
    within="store", help="Show, export or import the timings of gemmery tune.", no_args_is_help=True
)
app.add_typer(store_app, name="store")


@store_app.command("show")
def store_show(json: JsonFile = None) -> None:
    """Show where the timings are stored, and how many there are for each device and version."""
    from ..lab.timings import show

    contents = show()
    write_json(json, contents)


@store_app.command("export")
def store_export(
    file: Annotated[
        Path, typer.Argument(
            metavar="FILE", help="The JSON file to write.", dir_okay=False, callback=place_for_json,
        )
    ],
    from_log: Annotated[
        Path | None, typer.Option(
            metavar="LOG",
            help="Export only the problems that a program logged with GEMMERY_LOG=LOG.",
            exists=True,
        )
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also export timings of other versions of Triton and of the kernels.")
    ] = False,
) -> None:  # fmt: skip
    """Write timings to a JSON file, to ship with a model."""
    from ..lab.timings import export

    with told():
        count = export(file, log_path=from_log, everything=everything)
    typer.echo(f"{count} timings written to {file}")


@store_app.command("import")
def store_import(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", dir_okay=False, exists=True, help="A JSON file of gemmery store export."
        ),
    ],
) -> None:
    """Import the timings of a JSON file, except those that were measured later on this machine."""
    from ..lab.timings import take

    with told():
        count = take(file)
    typer.echo(f"{count} timings taken from {file}")
