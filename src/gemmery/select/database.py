"""The SQLite file behind the store: reading, writing, and what to do with a file that is broken.

Imported only once there is a file or something to write. A connection lives for one short transaction, so that none is
ever carried across a fork or shared by threads. The rollback journal is SQLite's default one: unlike a write-ahead log
it works on network file systems, and in directories that can only be read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

Row = tuple[Any, ...]
_T = TypeVar("_T")

COLUMNS = ("device", "triton", "source", "problem", "config", "seconds", "note", "measured")
#: How many of the columns tell rows apart.
KEYS = 5
_CREATE = """
CREATE TABLE timings (
    device TEXT NOT NULL, triton TEXT NOT NULL, source TEXT NOT NULL, problem TEXT NOT NULL, config TEXT NOT NULL,
    seconds REAL, note TEXT NOT NULL, measured REAL NOT NULL,
    PRIMARY KEY (device, triton, source, problem, config)
) WITHOUT ROWID
"""
_INSERT = (
    f"INSERT INTO timings VALUES ({', '.join('?' for _ in COLUMNS)}) "
    f"ON CONFLICT ({', '.join(COLUMNS[:KEYS])}) DO UPDATE SET "
    f"{', '.join(f'{name} = excluded.{name}' for name in COLUMNS[KEYS:])}"
)
_IF_NEWER = " WHERE excluded.measured > timings.measured"
#: Seconds to wait for other processes; who only looks would rather do without.
_READ_WAIT, _WRITE_WAIT = 0.5, 60.0
#: SQLite's primary codes for a file that is damaged, and for one that is no database.
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
#: What SQLite says where another process has set the file aside since it was opened here: SQLITE_READONLY_DBMOVED, or
#: an input/output error where there is no new file yet. Nothing was written, and the next attempt opens the new one.
_MOVED, _GONE = 1032, 10
#: Attempts at a transaction.
_ATTEMPTS = 5
#: Ends of the names of files that lie beside a database and belong to it.
_COMPANIONS = ("-journal", "-wal", "-shm")


class Unusable(OSError):
    """The file can't be read or written, for now or at all."""


class _WrongTables(Exception):
    """A database whose tables are not the store's."""


def select(path: Path, **wanted: str) -> list[Row]:
    """The rows whose columns have the wanted values; none where the file is missing, empty or was broken.

    Raises:
        Unusable: the file is there and can't be read.
    """
    where = " AND ".join(f"{name} = ?" for name in wanted) or "1"
    sql = f"SELECT {', '.join(COLUMNS)} FROM timings WHERE {where}"

    def read(connection: sqlite3.Connection) -> list[Row]:
        connection.execute("BEGIN")
        return connection.execute(sql, tuple(wanted.values())).fetchall() if _has_tables(connection) else []

    try:
        return _run(path, "rw", _READ_WAIT, read)
    except Unusable:
        if path.exists():
            raise
        return []


def insert(path: Path, rows: Sequence[Row], *, if_newer: bool = False) -> None:
    """Write rows in one transaction, over those with the same keys; makes file and directory.

    Args:
        if_newer: only over those that were measured before.

    Raises:
        OSError: the file can't be written, or its directory not be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(connection: sqlite3.Connection) -> None:
        # The lock for writing from the start: two readers that both wanted to go on to write would never get there.
        connection.execute("BEGIN IMMEDIATE")
        if not _has_tables(connection):
            connection.execute(_CREATE)
        connection.executemany(_INSERT + _IF_NEWER if if_newer else _INSERT, rows)
        connection.execute("COMMIT")

    _run(path, "rwc", _WRITE_WAIT, write)


def _run(path: Path, mode: str, wait: float, work: Callable[[sqlite3.Connection], _T]) -> _T:
    """Work on a connection of its own; a file that turns out broken is set aside, and work begins again."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with contextlib.closing(
                sqlite3.connect(uri, uri=True, timeout=wait, isolation_level=None)
            ) as connection:
                return work(connection)
        except (sqlite3.Error, _WrongTables) as error:
            if attempt == _ATTEMPTS or not (_is_broken(error) or _was_moved(error)):
                raise Unusable(str(error)) from error
            if _is_broken(error):
                _set_aside(path, error)
    raise AssertionError("the last attempt returns or raises")


def _has_tables(connection: sqlite3.Connection) -> bool:
    """Whether the database is the store's, rather than a new and empty one; _WrongTables where it is neither.

    Within a transaction: a file that another process fills between the two questions would look like neither.
    """
    columns = tuple(row[1] for row in connection.execute("PRAGMA table_info(timings)"))
    if columns == COLUMNS:
        return True
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise _WrongTables("its tables are not those of a store of timings")
    return False


def _is_broken(error: Exception) -> bool:
    if isinstance(error, _WrongTables):
        return True
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _BROKEN


def _was_moved(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", 0)
    return code == _MOVED or code & 0xFF == _GONE


def _set_aside(path: Path, error: Exception) -> None:
    """Rename a broken file, so that a new one can take its place; one process does it.

    Raises:
        Unusable: the directory can't be written.
    """
    try:
        with _locked(path.parent):
            if _is_sound(path):
                return  # another process was here first
            name = f"{path.name}.broken-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
            # Its companions first: a journal left behind would be played back into the next file of this name.
            for end in (*_COMPANIONS, ""):
                with contextlib.suppress(FileNotFoundError):
                    path.with_name(path.name + end).rename(path.with_name(name + end))
    except OSError as refusal:
        raise Unusable(f"it is broken ({error}) and can't be renamed: {refusal}") from error
    warnings.warn(
        f"gemmery: the store of timings {path} is broken ({error}); it is now {name}, and a new one is begun",
        RuntimeWarning,
        stacklevel=2,
    )


def _is_sound(path: Path) -> bool:
    if not path.exists():
        return True
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None)
        ) as connection:
            connection.execute("BEGIN")
            _has_tables(connection)
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
    except (sqlite3.Error, _WrongTables) as error:
        if not _is_broken(error):
            raise Unusable(str(error)) from error
        return False


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds a lock of the directory's, against other processes and threads."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
