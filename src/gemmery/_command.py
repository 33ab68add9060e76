"""Whether this process is gemmery's command line."""

import sys
from pathlib import PurePath


def is_command() -> bool:
    """Whether this process is the command `gemmery` or `python -m gemmery`, whose --help needs no torch.

    The command loads the rest before it runs anything, so only the time of --help differs.
    """
    if sys.argv[:1] == ["-m"]:  # as long as Python looks for the module to run
        rest = sys.orig_argv
        return "-m" in rest and rest[rest.index("-m") + 1 :][:1] in (["gemmery"], ["gemmery.cli"])
    return PurePath(sys.argv[0] if sys.argv else "").name == "gemmery"


class PutOffError(Exception):
    """Tells `gemmery/__init__.py` that this process is the command line, which loads the products later."""


def put_off() -> None:
    """Raise PutOffError in the command line's process. (mypy orders imports within `try`, but not within `if`.)"""
    if is_command():
        raise PutOffError
