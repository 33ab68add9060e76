"""The command line: `gemmery --help` lists the commands.

A command imports what it needs when it runs, so that `--help` and a mistyped option answer at once. Each module here
has the commands of one subject; importing it adds them to `app`.
"""

from __future__ import annotations

import sys
from typing import Annotated

from .options import app  # isort: skip  (first, since it says what is missing where typer is)

import typer

from . import starting, choosing, predicting, inspecting, pictures, serving, storing, measuring  # isort: skip  (the order of --help)

__all__ = [
    "app", "choosing", "inspecting", "main", "measuring", "pictures", "predicting", "serving", "starting", "storing",
]  # fmt: skip


def _print_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"gemmery {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """GEMM for PyTorch, written in Triton."""
    if not {"-h", "--help"} & set(sys.argv):
        from .. import _load

        _load()


def main() -> None:
    """The entry point of the `gemmery` command."""
    from ..files import WriteError

    try:
        app(prog_name="gemmery")
    except WriteError as error:
        # An error that no check finds before the work, such as a full disk.
        raise SystemExit(f"Error: {error}") from error
