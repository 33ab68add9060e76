"""The command line: `gemmery --help` lists the commands.

A command imports what it needs when it runs, so that `--help` and a mistyped option answer at once. Each module here
has the commands of one subject; importing it adds them to `app`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
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
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """GEMM for PyTorch, written in Triton."""
    if not {"-h", "--help"} & set(sys.argv):
        from .. import _load

        _load()


def spread(words: Sequence[str]) -> list[str]:
    """The words of a command line, with sizes as all output has them, 16x8192x8192, as the three that commands take.

    Values of options stay as they are.
    """
    found: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        sizes = re.fullmatch(r"\d+x\d+x\d+", word) and not before.startswith("-")
        found += word.split("x") if sizes else [word]
    return found


def main() -> None:
    """The entry point of the `gemmery` command."""
    from ..files import WriteError

    try:
        app(spread(sys.argv[1:]), prog_name="gemmery")
    except WriteError as error:
        # What no check could tell before the work, such as a full disk.
        raise SystemExit(f"Error: {error}") from error
