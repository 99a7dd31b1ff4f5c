"""Files that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path beside `path` to write to; it takes the place of `path` where the block ends without an error.

    After an error nothing is left of it.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text whole or not at all: a reader, or a crash, finds the old file or the new one."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
