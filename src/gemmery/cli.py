"""The command line: `gemmery demo`, `gemmery ladder`, `gemmery doctor`.

A command imports what it needs when it runs, so that `--help` and a mistyped option answer at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
except ModuleNotFoundError as error:
    raise SystemExit("gemmery's command line needs typer and rich: pip install 'gemmery[cli]'") from error

app = typer.Typer(
    help="GEMM for PyTorch, written in Triton.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        typer.echo(f"gemmery {__version__}")
        raise typer.Exit


def _place_for_json(path: Path | None) -> Path | None:
    # Before the work, not after a minute of it.
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no directory {path.absolute().parent}")
    return path


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        dir_okay=False,
        writable=True,
        callback=_place_for_json,
        help="Write everything that is printed, and more, to this file.",
    ),
]


def _interpret_without_gpu() -> None:
    """Without a GPU, start this command again with Triton's interpreter on, unless TRITON_INTERPRET says otherwise.

    Triton decides when a kernel is defined whether it is interpreted, and the kernels are defined by the time that a
    command runs; so it takes a new process, which replaces this one.
    """
    import torch

    if "TRITON_INTERPRET" in os.environ or torch.cuda.is_available():
        return
    typer.echo("No GPU here: the kernels run in Triton's interpreter on the CPU (TRITON_INTERPRET=1).")
    sys.stdout.flush()
    command = [sys.executable, "-m", "gemmery.cli", *sys.argv[1:]]
    os.execve(sys.executable, command, os.environ | {"TRITON_INTERPRET": "1"})


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


@app.command()
def demo(json: JsonFile = None) -> None:
    """Run a sentence model with every linear layer through gemmery and compare it with torch."""
    _interpret_without_gpu()
    from .lab.demo import demo as run

    raise typer.Exit(run(json))


@app.command()
def ladder(
    rungs: Annotated[
        list[int] | None, typer.Argument(metavar="RUNG", help="Numbers of rungs; all without.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Climb the tutorials from a vector add to a persistent kernel, each rung checked and measured."""
    _interpret_without_gpu()
    from .lab.ladder import ladder as run

    raise typer.Exit(run(rungs or [], json))


@app.command()
def doctor(json: JsonFile = None) -> None:
    """Say what this machine has, what it can't do, and what runs instead."""
    from .lab.doctor import doctor as run

    raise typer.Exit(run(json))


def main() -> None:
    """The entry point of the `gemmery` command."""
    app(prog_name="gemmery")


if __name__ == "__main__":
    main()
