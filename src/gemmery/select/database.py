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

from .store import Timing

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
#: SQLite's primary codes for what lies outside of the file: permissions, locks, memory, the disk. All other errors are
#: the file's own: the statements here are few, and right for the store's tables.
_OUTSIDE = (
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_ABORT, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS, sqlite3.SQLITE_AUTH,
)  # fmt: skip
#: The bytes of a database's header that say which versions may write and read it, 1 or, with a write-ahead log, 2.
_VERSIONS = slice(18, 20)
#: What SQLite says where another process has set the file aside since it was opened here: SQLITE_READONLY_DBMOVED, or
#: an input/output error where there is no new file yet. Nothing was written, and the next attempt opens the new one.
_MOVED, _GONE = 1032, 10
#: Attempts at a transaction.
_ATTEMPTS = 5
#: Ends of the names of files that lie beside a database and belong to it.
_COMPANIONS = ("-journal", "-wal", "-shm")


class Unusable(OSError):
    """The file can't be read or written, for now or at all."""


class _Damaged(Exception):
    """A database that is not the store's, or has values that nobody has written."""


def select(path: Path, **wanted: str) -> list[Row]:
    """The rows whose columns have the wanted values; none where the file is missing, empty or was broken.

    Raises:
        Unusable: the file is there and can't be read.
    """
    where = " AND ".join(f"{name} = ?" for name in wanted) or "1"
    sql = f"SELECT {', '.join(COLUMNS)} FROM timings WHERE {where}"

    def read(connection: sqlite3.Connection) -> list[Row]:
        connection.execute("BEGIN")
        found = connection.execute(sql, tuple(wanted.values())) if _has_tables(connection) else []
        return [_checked(row) for row in found]

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
        # Rows that are out of order raise no error. What is written among them would not be found again.
        elif (said := connection.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
            raise _Damaged(said)
        connection.executemany(_INSERT + _IF_NEWER if if_newer else _INSERT, rows)
        connection.execute("COMMIT")

    _run(path, "rwc", _WRITE_WAIT, write)


def _run(path: Path, mode: str, wait: float, work: Callable[[sqlite3.Connection], _T]) -> _T:
    """Work on a connection of its own; a file that turns out broken is set aside, and work begins again."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    for attempt in range(1, _ATTEMPTS + 1):
        opened = _identity(path)
        try:
            with contextlib.closing(
                sqlite3.connect(uri, uri=True, timeout=wait, isolation_level=None)
            ) as connection:
                return work(connection)
        except (sqlite3.Error, _Damaged, UnicodeDecodeError, MemoryError) as error:
            reason = _reason(error)
            if attempt == _ATTEMPTS or not (_is_broken(error, path) or _was_moved(error)):
                raise Unusable(reason) from error
            if _is_broken(error, path):
                _set_aside(path, opened, reason)
    raise AssertionError("the last attempt returns or raises")


def _has_tables(connection: sqlite3.Connection) -> bool:
    """Whether the database is the store's, rather than a new and empty one; _Damaged where it is neither.

    Within a transaction: a file that another process fills between the two questions would look like neither.
    """
    columns = tuple(row[1] for row in connection.execute("PRAGMA table_info(timings)"))
    if columns == COLUMNS:
        return True
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise _Damaged("its tables are not those of a store of timings")
    return False


def _checked(row: Row) -> Row:
    """A row as it was written, of texts and a timing; SQLite keeps any value in any column."""
    *key, seconds, note, measured = row
    if not all(isinstance(text, str) for text in key):
        raise _Damaged(f"a row is kept under {key!r}, which are not texts")
    try:
        return (*key, *Timing.of(seconds, note, measured))
    except ValueError as error:
        raise _Damaged(str(error)) from error


def _is_broken(error: Exception, path: Path) -> bool:
    """Whether an error is the file's fault, so that it would come again."""
    if isinstance(error, sqlite3.Error):
        code: int | None = getattr(error, "sqlite_errorcode", None)
        if code is None:
            # Of the module itself: a text that is not UTF-8, or a call that is wrong.
            return isinstance(error, sqlite3.OperationalError)
        return code & 0xFF not in _OUTSIDE or (code == sqlite3.SQLITE_READONLY and _forbids_writing(path))
    return not isinstance(error, MemoryError)


def _forbids_writing(path: Path) -> bool:
    """Whether the header says that a later SQLite alone may write the file; none has ever said so."""
    try:
        with path.open("rb") as file:
            return any(version not in (1, 2) for version in file.read(_VERSIONS.stop)[_VERSIONS])
    except OSError:
        return False


def _reason(error: Exception) -> str:
    """An error in words. SQLite quotes what it found; where that is no text, Python has another error instead."""
    if isinstance(error, UnicodeDecodeError):
        return "it has bytes that are no text"
    return str(error) or type(error).__name__


def _identity(path: Path) -> tuple[int, int] | None:
    """Tells the file apart from another one of its name; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _was_moved(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", 0)
    return code == _MOVED or code & 0xFF == _GONE


def _set_aside(path: Path, opened: tuple[int, int] | None, reason: str) -> None:
    """Rename a broken file, so that a new one can take its place; one process does it.

    Args:
        opened: the identity of the file that is broken. Another one of the name is that of a process that was first.

    Raises:
        Unusable: the directory can't be written.
    """
    try:
        with _locked(path.parent):
            if opened is None or _identity(path) != opened:
                return
            name = f"{path.name}.broken-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
            # Its companions first: a journal left behind would be played back into the next file of this name.
            for end in (*_COMPANIONS, ""):
                with contextlib.suppress(FileNotFoundError):
                    path.with_name(path.name + end).rename(path.with_name(name + end))
    except OSError as refusal:
        raise Unusable(f"it is broken ({reason}) and can't be renamed: {refusal}") from refusal
    warnings.warn(
        f"gemmery: the store of timings {path} is broken ({reason}); it is now {name}, and a new one is begun",
        RuntimeWarning,
        stacklevel=2,
    )


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds a lock of the directory's, against other processes and threads."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
