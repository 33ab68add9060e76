"""`gemmery store`: the timings that `tune` has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Commands, JsonFile, app, place_for_json, told, write_json

store_app = Commands(
    within="store", help="Show, export or import the timings that tune has measured.", no_args_is_help=True
)
app.add_typer(store_app, name="store")


@store_app.command("show")
def store_show(json: JsonFile = None) -> None:
    """Say where the timings are, and how many there are of which device and version."""
    from ..lab.timings import show

    contents = show()
    write_json(json, contents)


@store_app.command("export")
def store_export(
    file: Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, callback=place_for_json)],
    from_log: Annotated[
        Path | None, typer.Option(metavar="LOG", help="Only the problems that GEMMERY_LOG=LOG has noted.", exists=True)
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also timings of other versions of Triton and of the kernels.")
    ] = False,
) -> None:  # fmt: skip
    """Write timings to a JSON file, to ship with a model."""
    from ..lab.timings import export

    with told():
        count = export(file, log_path=from_log, everything=everything)
    typer.echo(f"{count} timings written to {file}")


@store_app.command("import")
def store_import(
    file: Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, exists=True)],
) -> None:
    """Take over the timings of a JSON file, but for those that were measured here later."""
    from ..lab.timings import take

    with told():
        count = take(file)
    typer.echo(f"{count} timings taken from {file}")
