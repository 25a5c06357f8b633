"""Files that are written whole or not at all: a path in, a file to write to out. The folder of a
file that a user names is there before; nobody makes it for a name that may be mistyped.

Used by whoever writes a file that others read: reports and pages, timelines, rules, rates, choices
of kernels, kept plans and records.
"""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from distmega.errors import RequestError, argument

LEFT_S = 3600.0
"""Age of a part from which nobody writes to it any more."""


@contextmanager
def replace_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write bytes to, which takes the place of `path` once the block has ended: readers
    see all of the old one or all of the new one, and an error leaves the old one. A link stays and
    leads to the new file; what is no regular file, as a pipe or a device, is written to as it is.
    mode: permissions of the new file, before the umask. OSError where it can't be written.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as there:  # a folder raises
            yield there
        return
    path = path.resolve()
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as new:
            yield new
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Writes the file anew with a text in UTF-8, as replace_file does."""
    with replace_file(path) as file:
        file.write(text.encode())


def remove_left_parts(folder: Path) -> None:
    """Removes what replace_file left in a folder where its process was killed."""
    for part in folder.glob(f".{'?' * 16}.part"):
        with suppress(FileNotFoundError):  # another process may have removed it
            if part.stat().st_mtime < time.time() - LEFT_S:
                part.unlink()


def require_writable(path: Path) -> None:
    """OSError where replace_file could not begin to write `path`: for long work, before it is done.
    What is there stays as it is.
    """
    if path.exists() and not path.is_file():
        path.open("ab").close()  # a folder raises
        return
    part = path.resolve().with_name(f".{secrets.token_hex(8)}.part")
    part.touch(exist_ok=False)
    part.unlink()


@contextmanager
def naming_unwritable(path: Path, name: str) -> Iterator[None]:
    """RequestError where the file can't be written that the argument `name` is for."""
    try:
        yield
    except (OSError, ValueError) as error:  # no path may have a null character
        raise RequestError(
            f"file {str(path)!r:.200} can't be written ({getattr(error, 'strerror', error)})",
            expected="a path in a folder that is there and may be written, with room for the file",
            remedy=f"make the folder, or give another {argument(name)}",
        ) from error
