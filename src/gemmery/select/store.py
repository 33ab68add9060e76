"""The store of measured timings, in a file of the user's cache directory.

A row is the time of a config on a problem, for a device, a version of Triton and the kernels' source (see `keys`). So
a new config adds to the timings, and a changed kernel is measured again. A look-up never creates anything, and costs
one `stat` if there is no file. If nothing can be written, in a read-only home or without one, timings are kept in
memory.

The directory is GEMMERY_CACHE_DIR, or else the user's cache; GEMMERY_STORE=0 turns the store off.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..problem import Config, Problem
from .keys import Key, key_of

#: The file's name has the version of its tables, so that versions of gemmery with other tables use other files.
FILE = "timings-1.sqlite"


class Timing(NamedTuple):
    """The timing of a config on a problem.

    Attributes:
        seconds: one launch, cold; None if the config cannot run the problem here.
        note: why it can't.
        measured: when, in seconds since 1970.
    """

    seconds: float | None
    note: str = ""
    measured: float = 0.0

    @classmethod
    def of(cls, seconds: object, note: object, measured: object) -> Timing:
        """A timing made of values from a file.

        Raises:
            ValueError: `Store.record` does not keep such an entry.
        """
        if seconds is not None:
            seconds = _positive("seconds", seconds)
        if not isinstance(note, str):
            raise ValueError(f"a timing's note is {note!r}; it must be a text")
        return cls(seconds, note, _positive("measured", measured))


def _positive(name: str, value: object) -> float:
    # Compared before it is converted: a whole number can be too large for that.
    if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:  # type: ignore[operator]
        raise ValueError(f"a timing's {name} is {_shown(value)}; it must be a number, at least 0 and finite")
    return float(value)  # type: ignore[arg-type]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:40]}..."


class Row(NamedTuple):
    """A line of the store: its key, the config's text, and its timing."""

    key: Key
    config: str
    timing: Timing


class Store:
    """Timings in a file, or in memory if the file cannot be written.

    Args:
        path: the file; None for a store in memory alone.
        why: the reason why there is no file, for a warning on writing.
    """

    def __init__(self, path: Path | None, why: str = "there is no home directory") -> None:
        self.path, self.why = path, why
        self._memory: dict[Key, dict[str, Timing]] = {}
        self._said: set[str] = set()
        self._read = functools.lru_cache(4096)(self._query)

    def timings(self, problem: Problem) -> dict[Config, Timing]:
        """The timings of exactly this problem, on its device and with this version; the fastest first."""
        stamp = self._stamp()
        if stamp is None and not self._memory:
            return {}
        key = key_of(problem)
        found = dict(self._read(stamp, key)) if stamp is not None else {}
        found |= self._memory.get(key, {})
        known = [(config, timing) for text, timing in found.items() if (config := _config(text)) is not None]
        return dict(sorted(known, key=lambda entry: (entry[1].seconds is None, entry[1].seconds or 0.0)))

    def best(self, problem: Problem) -> Config | None:
        """The fastest of the configs that were measured for exactly this problem; None if there are none."""
        for config, timing in self.timings(problem).items():
            return config if timing.seconds is not None else None
        return None

    def rows(self) -> list[Row]:
        """Everything in the store, of all devices and versions, in the order of its keys."""
        found = {(row.key, row.config): row for row in self._select()}
        for key, configs in self._memory.items():
            found |= {(key, text): Row(key, text, timing) for text, timing in configs.items()}
        return [found[place] for place in sorted(found)]

    def record(self, problem: Problem, config: Config, seconds: float | None, note: str = "") -> None:
        """Keep a config's time on a problem, or None if it cannot run. Replaces an earlier entry."""
        self.add([Row(key_of(problem), str(config), Timing(seconds, note, time.time()))])

    def add(self, rows: Sequence[Row], *, if_newer: bool = False) -> None:
        """Keep rows, in the file or else in memory.

        Args:
            if_newer: replace only entries that were measured earlier.
        """
        if self.path is None:
            self._say("write", f"{self.why}; timings last as long as this process")
        else:
            try:
                from . import database

                database.insert(
                    self.path, [(*row.key, row.config, *row.timing) for row in rows], if_newer=if_newer
                )
                return
            except (OSError, ImportError) as error:
                self._say(
                    "write", f"{self.path} can't be written; timings last as long as this process: {error}"
                )
        for row in rows:
            known = self._memory.setdefault(row.key, {})
            if not (if_newer and row.config in known and row.timing.measured <= known[row.config].measured):
                known[row.config] = row.timing

    def _stamp(self) -> tuple[int, int, int] | None:
        """An identity of the file's state; None if there is no file."""
        if self.path is None:
            return None
        try:
            status = os.stat(self.path)
        except OSError:
            # The file is missing, or its directory cannot be entered. In both cases there is nothing to read.
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _query(self, stamp: tuple[int, int, int], key: Key) -> tuple[tuple[str, Timing], ...]:
        """A problem's configs; memoized for each state of the file."""
        return tuple((row.config, row.timing) for row in self._select(**key._asdict()))

    def _select(self, **wanted: str) -> list[Row]:
        if self._stamp() is None:
            return []
        assert self.path is not None
        try:
            from . import database

            rows = database.select(self.path, **wanted)
        except (OSError, ImportError) as error:
            self._say("read", f"{self.path} can't be read and is not used: {error}")
            return []
        return [Row(Key(*row[:4]), row[4], Timing(*row[5:])) for row in rows]

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warnings.warn(f"gemmery: the store of timings: {text}", RuntimeWarning, stacklevel=4)


def _config(text: str) -> Config | None:
    try:
        return Config.of(text)
    except (ValueError, TypeError):
        # Written by a version of gemmery with other knobs, and for it to use.
        return None


def current() -> Store | None:
    """The store of this process's environment; None if it is turned off."""
    if os.environ.get("GEMMERY_STORE", "1").lower() in ("0", "off", "false", "no"):
        return None
    directory = os.environ.get("GEMMERY_CACHE_DIR")
    return _at(directory, os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"))


@functools.lru_cache(16)
def _at(directory: str | None, cache: str | None, home: str | None) -> Store:
    """The store in a directory, otherwise in the user's cache directory, which depends on the other two."""
    place = Path(directory) if directory else _user_cache()
    return Store(place / FILE if place is not None else None)


def _user_cache() -> Path | None:
    """gemmery's directory in the user's cache; None if there is no home directory."""
    try:
        from platformdirs import user_cache_dir

        place = user_cache_dir("gemmery")
    except RuntimeError:
        return None  # what some of its versions say where there is no home
    except ModuleNotFoundError:
        place = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "gemmery")
    # A relative path, or one with its tilde: the home directory is unknown.
    return Path(place) if os.path.isabs(place) else None
