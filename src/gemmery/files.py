"""Files that users name: written completely or not at all, and JSON whose errors name the file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class WriteError(OSError):
    """A file that can't be written; what was there before is still there.

    Args:
        message: names the file, and the reason.
        number: the operating system's for the reason, if it gave one.
    """

    def __init__(self, message: str, number: int | None = None) -> None:
        # Not both to OSError, which would put the number first.
        super().__init__(message)
        self.errno = number


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A new file beside `path`, which takes its place at the end of the `with`.

    If the work fails, or the disk is full, `path` does not change. Permissions of a file that is replaced are kept,
    and a link goes on to lead to the same place. A device or a pipe, such as /dev/stdout, is written to directly.

    Yields:
        Where to write. Its name ends as that of `path` does.

    Raises:
        WriteError: the file can't be made, written or put in its place.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder) / "x.txt") as part:
        ...         _ = part.write_text("whole")
        ...     [(file.name, file.read_text()) for file in Path(folder).iterdir()]
        [('x.txt', 'whole')]
    """
    path = Path(path)
    if _is_stream(path):
        with _named(path):
            yield path
        return
    place = Path(os.path.realpath(path))
    part = place.with_name(f".{secrets.token_hex(8)}.part{place.suffix}")
    with _named(path):
        if place.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        try:
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            # The writer may create a new file, with other permissions.
            mode = (place if place.exists() else part).stat().st_mode
            yield part
            part.chmod(mode & 0o7777)
            _flush(part)
            part.replace(place)
        finally:
            part.unlink(missing_ok=True)


def _is_stream(path: Path) -> bool:
    """Whether a path leads to a device, a pipe or an open file, which nothing can take the place of."""
    # /dev/stdout can lead to a plain file, with what else a shell writes to it.
    return path.absolute().is_relative_to("/dev") or (path.exists() and not (path.is_file() or path.is_dir()))


def _flush(path: Path) -> None:
    """Wait until a file is on the disk: some file systems tell only then that there is no room."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors name `path`, even if they are of another file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise WriteError(f"{path} can't be written: {reason}", error.errno) from error


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file by text in UTF-8, or leave it as it was.

    Raises:
        WriteError: it can't be written.
    """
    if _is_stream(Path(path)):
        with _named(Path(path)), open(path, "a", encoding="utf-8") as stream:
            stream.write(text)
        return
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], values: object, *, ensure_ascii: bool = True) -> None:
    """Replace a file by plain values as JSON, or leave it as it was.

    Raises:
        WriteError: it can't be written.
    """
    write_text(path, json.dumps(values, indent=1, ensure_ascii=ensure_ascii) + "\n")


def check_place(path: str | os.PathLike[str]) -> None:
    """Ask, before the work, whether a file can be written.

    Raises:
        WriteError: there is no such directory, or no permission.

    Example:
        >>> check_place("absent/x.json")
        Traceback (most recent call last):
        gemmery.files.WriteError: there is no directory ...absent
    """
    path = Path(path)
    place = Path(os.path.realpath(path))
    if not place.parent.is_dir():
        raise WriteError(f"there is no directory {path.absolute().parent}")
    if place.is_dir():
        raise WriteError(f"{path} is a directory; give a file")
    is_stream = _is_stream(path)
    if not os.access(place if is_stream else place.parent, os.W_OK):
        what = path if is_stream else path.absolute().parent
        raise WriteError(f"{path} can't be written: no permission to write to {what}")


def read_json(path: Path) -> Any:
    """The values of a file of JSON.

    Raises:
        OSError: the file can't be read.
        ValueError: it is not JSON; the message names it.
    """
    return parse_json(path.read_bytes(), str(path))


def parse_json(text: str | bytes, where: str) -> Any:
    """The values of a JSON text.

    Args:
        text: in UTF-8, if it is bytes.
        where: what the text is, for errors.

    Raises:
        ValueError: it is not JSON, or has what can't be kept: nesting that exhausts the stack, numbers of thousands of
            digits, halves of surrogate pairs.

    Example:
        >>> parse_json('{"a": 1', "x.json")
        Traceback (most recent call last):
        ValueError: x.json: not JSON: Expecting ',' delimiter: line 1 column 8 (char 7)
    """
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        values = json.loads(decoded)
        if "\\u" in decoded:
            # Escapes can make half of a pair, which no file and no database takes.
            json.dumps(values, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError(f"{where}: not JSON: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    return values
