"""Shared by all commands: the application, `--json`, the reading of options, and the report of mistakes."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    import typer.core
except ModuleNotFoundError as error:
    if sys.argv[1:] == ["--version"]:
        from .. import __version__

        print(f"gemmery {__version__}")
        raise SystemExit(0) from None
    raise SystemExit("gemmery's command line needs typer and rich: pip install 'gemmery[cli]'") from error

from .examples import epilog


def spread(words: Sequence[str]) -> list[str]:
    """Returns the words of a command line, with sizes such as 16x8192x8192 as the three numbers that commands take.

    All output has sizes in this form. Values of options do not change.
    """
    found: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        sizes = re.fullmatch(r"\d+x\d+x\d+", word) and not before.startswith("-")
        found += word.split("x") if sizes else [word]
    return found


class Group(typer.core.TyperGroup):
    """A group of commands that take sizes in two forms; see `spread`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the words as Click does."""
        return super().parse_args(ctx, spread(args))


class Commands(typer.Typer):
    """Commands whose help ends with their examples; a command without examples is an error.

    Args:
        within: the words between `gemmery` and the names of the commands; "" for none.
    """

    def __init__(self, *, within: str = "", **options: Any) -> None:
        super().__init__(epilog=epilog(within), cls=Group, **options)
        self.within = within

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """As Typer's; `name` is the function's without one."""

        def register(function: Any) -> Any:
            words = f"{self.within} {name or function.__name__}".strip()
            text = _filled(inspect.getdoc(function) or "")
            add = super(Commands, self).command(name, help=text, epilog=epilog(words), **options)
            return add(function)

        return register


def _filled(text: str) -> str:
    """The text with each paragraph in one line, for help to wrap at the terminal's width; except those after a \\b."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(each if each.startswith("\b") else each.replace("\n", " ") for each in paragraphs)


app = Commands(
    help="GEMM for PyTorch, written in Triton.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def place_for_json(path: Path | None) -> Path | None:
    """The callback of `--json`: a file in a directory that exists; "-" is standard output, then text goes elsewhere."""
    if path == Path("-"):
        sys.stdout.flush()
        sys.stdout = sys.stderr
        return Path("/dev/stdout")
    if path is not None:
        from ..files import check_place

        # Before the work, not after a minute of it.
        with told():
            check_place(path)
    return path


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        dir_okay=False,
        callback=place_for_json,
        help="Write everything that is printed, and more, to this JSON file; - is standard output.",
    ),
]


def interpret_without_gpu() -> None:
    """Without a GPU, start this command again with Triton's interpreter on, unless TRITON_INTERPRET says otherwise.

    Triton decides at a kernel's definition whether it is interpreted, and the kernels are already defined when a
    command runs. So a new process replaces this one.
    """
    import torch

    if "TRITON_INTERPRET" in os.environ or torch.cuda.is_available():
        return
    typer.echo("No GPU found: the kernels run in Triton's interpreter on the CPU (TRITON_INTERPRET=1).")
    sys.stdout.flush()
    command = [sys.executable, "-m", "gemmery", *sys.argv[1:]]
    os.execve(sys.executable, command, os.environ | {"TRITON_INTERPRET": "1"})


def words(given: list[str] | None) -> list[str]:
    """The words of an option that may be repeated or hold several between commas."""
    return [word for text in given or [] for word in text.split(",") if word]


@contextmanager
def told() -> Iterator[None]:
    """Report a user's mistake in one line, without a traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


def write_json(path: Path | None, values: object) -> None:
    """Write plain values to the file of `--json`, if one was given."""
    if path is not None:
        from .. import files

        files.write_json(path, values)
