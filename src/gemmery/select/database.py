"""The store's SQLite file: reading, writing, and the repair of a broken file.

Imported only if there is a file or something to write. A connection exists for one short transaction, so that none is
carried across a fork or shared by threads. The journal is SQLite's default rollback journal: unlike a write-ahead log,
it works on network file systems and in read-only directories.
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
#: The number of columns in the key.
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
#: Seconds to wait for other processes, for writers and for readers; a reader can do without the data.
_READ_WAIT, _WRITE_WAIT = 0.5, 60.0
#: SQLite's primary codes for errors outside of the file: permissions, locks, memory, the disk. All other errors mean a
#: broken file, since the statements here are few, and right for the store's tables.
_OUTSIDE = (
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_ABORT, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS, sqlite3.SQLITE_AUTH,
)  # fmt: skip
#: The header's bytes for the versions that may write and read the database: 1, or 2 with a write-ahead log.
_VERSIONS = slice(18, 20)
#: SQLite's errors if another process has set the file aside since it was opened here: SQLITE_READONLY_DBMOVED, or an
#: input/output error if there is no new file yet. Nothing was written, and the next attempt opens the new file.
_MOVED, _GONE = 1032, 10
#: Attempts at a transaction.
_ATTEMPTS = 5
#: Suffixes of the names of files that belong to a database.
_COMPANIONS = ("-journal", "-wal", "-shm")


class Unusable(OSError):
    """The file cannot be read or written, for now or at all."""


class _Damaged(Exception):
    """The database is not the store's, or has values that the store never writes."""


def select(path: Path, **wanted: str) -> list[Row]:
    """The rows whose columns have the wanted values; none if the file is missing, empty or was broken.

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
        # Takes the write lock at the start: two readers that both wanted to write next would block each other.
        connection.execute("BEGIN IMMEDIATE")
        if not _has_tables(connection):
            connection.execute(_CREATE)
        # Rows that are out of order raise no error, but rows written among them would not be found again.
        elif (said := connection.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
            raise _Damaged(said)
        connection.executemany(_INSERT + _IF_NEWER if if_newer else _INSERT, rows)
        connection.execute("COMMIT")

    _run(path, "rwc", _WRITE_WAIT, write)


def _run(path: Path, mode: str, wait: float, work: Callable[[sqlite3.Connection], _T]) -> _T:
    """Run work on a new connection. If the file is broken, it is set aside, and the work begins again."""
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
    """Whether the database is the store's; False if it is new and empty. Raises _Damaged for any other.

    Within a transaction: a file that another process fills between the two questions would look like neither.
    """
    columns = tuple(row[1] for row in connection.execute("PRAGMA table_info(timings)"))
    if columns == COLUMNS:
        return True
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise _Damaged("its tables are not those of a store of timings")
    return False


def _checked(row: Row) -> Row:
    """Checks that a row has texts and a timing, since SQLite keeps any value in any column."""
    *key, seconds, note, measured = row
    if not all(isinstance(text, str) for text in key):
        raise _Damaged(f"a row is kept under {key!r}, which are not texts")
    try:
        return (*key, *Timing.of(seconds, note, measured))
    except ValueError as error:
        raise _Damaged(str(error)) from error


def _is_broken(error: Exception, path: Path) -> bool:
    """Whether the file is the cause of an error, so that it would occur again."""
    if isinstance(error, sqlite3.Error):
        code: int | None = getattr(error, "sqlite_errorcode", None)
        if code is None:
            # An error of the module itself: a text that is not UTF-8, or a wrong call.
            return isinstance(error, sqlite3.OperationalError)
        return code & 0xFF not in _OUTSIDE or (code == sqlite3.SQLITE_READONLY and _forbids_writing(path))
    return not isinstance(error, MemoryError)


def _forbids_writing(path: Path) -> bool:
    """Whether only a later SQLite may write the file, by its header. So far, no version requires this."""
    try:
        with path.open("rb") as file:
            return any(version not in (1, 2) for version in file.read(_VERSIONS.stop)[_VERSIONS])
    except OSError:
        return False


def _reason(error: Exception) -> str:
    """An error in words. SQLite quotes the data; if that is not a text, Python raises another error instead."""
    if isinstance(error, UnicodeDecodeError):
        return "it has bytes that are not text"
    return str(error) or type(error).__name__


def _identity(path: Path) -> tuple[int, int] | None:
    """An identity of the file, which differs from that of another file of this name; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _was_moved(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", 0)
    return code == _MOVED or code & 0xFF == _GONE


def _set_aside(path: Path, opened: tuple[int, int] | None, reason: str) -> None:
    """Rename a broken file, so that a new one can take its place. Only one process does this.

    Args:
        opened: the identity of the broken file. If it has changed, another process was first.

    Raises:
        Unusable: the directory can't be written.
    """
    try:
        with _locked(path.parent):
            if opened is None or _identity(path) != opened:
                return
            name = f"{path.name}.broken-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
            # Its companions come first: a journal that remained would be applied to the next file of this name.
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
