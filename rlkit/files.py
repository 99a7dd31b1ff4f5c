"""Files that appear whole or not at all, folders that one process holds, and a sentence where a disk refuses."""

from __future__ import annotations

import csv
import errno
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from rlkit.conf.schema import ConfigError
from rlkit.faults import Fault

try:
    import fcntl
except ImportError:  # Windows, where folders are not locked
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"


class WriteError(Fault):
    """The disk is full, the folder read-only or the like."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the operating system says of a file that cannot be written into a `WriteError` that names it."""
    try:
        yield
    except BrokenPipeError:  # of the console, whose reader has gone
        raise
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path beside `path` to write to; it takes the place of `path` where the block ends without an error.

    Raises:
        WriteError: the block or the replacement met an OSError; nothing is left beside `path`.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with writing(path):
            yield temporary
            temporary.replace(path)
    except BaseException:
        with suppress(OSError):  # a disk that can only be read says so here again
            temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text whole or not at all: a reader, or a crash, finds the old file or the new one."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Write rows as CSV, whole or not at all."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_text(path, text.getvalue())


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, where they are not there yet.

    Raises:
        WriteError: it cannot be made.
    """
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def check_place(path: Path, name: str, file: bool = True) -> None:
    """Refuse a place that cannot be written to, before the work whose result is to lie there; nothing is left.

    Args:
        path: where a file, or with `file=False` a folder, is to be written; the folders above it need not be there.
        name: of the option or key that says so.

    Raises:
        ConfigError: another thing is there, or the nearest folder that exists cannot be written to.
    """
    try:
        if file and path.exists() and not path.is_file():  # a folder, or a device, which would be replaced
            raise ConfigError(f"{name} is {path}, which is not a file")
        above = path.absolute().parents
        nearest = next(place for place in (above if file else (path, *above)) if place.exists())
    except OSError as error:  # a name that is too long, say
        raise ConfigError(f"{name} is {path}, which cannot be used: {error.strerror}") from error
    if not nearest.is_dir():
        raise ConfigError(f"{name} is {path}, but {nearest} is not a folder")
    try:
        with TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise ConfigError(f"{name} is {path}, but {nearest} cannot be written to: {error.strerror}") from error


def append(path: Path, data: bytes) -> None:
    """Add bytes to the end of a file, all of them or, where the disk refuses, none.

    Raises:
        WriteError: it does.
    """
    with writing(path), path.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            written = 0
            while written < len(data):
                written += file.write(data[written:]) or 0
        except OSError:
            with suppress(OSError):  # a pipe or a device has no size
                os.ftruncate(file.fileno(), size)
            raise


def sizes(folder: Path, patterns: Sequence[str]) -> dict[str, int]:
    """Bytes of each file of a folder that matches a pattern, by its path in the folder."""
    found = (path for pattern in patterns for path in sorted(folder.glob(pattern)))
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}


def rewind(folder: Path, patterns: Sequence[str], before: Mapping[str, int]) -> None:
    """Take files that were only added to back to the `sizes` they had; those that are newer go.

    Raises:
        WriteError: one cannot be changed.
    """
    for name, size in sizes(folder, patterns).items():
        path = folder / name
        with writing(path):
            if name not in before:
                path.unlink()
            elif size > before[name]:
                os.truncate(path, before[name])


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder: no other process may train in it meanwhile. The lock ends with the process, however that ends.

    It is a record lock, which a forked process does not inherit; a file system that has none is not locked.

    Raises:
        ConfigError: another process holds the folder.
        WriteError: it cannot be written to.
    """
    with writing(folder):
        file = (folder / LOCK).open("ab")
    with file:
        try:
            if fcntl is not None:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ConfigError(f"{folder} is the folder of a run that another process is training") from None
        yield
