"""The command's standard streams, as they come from whoever started it: open or closed, of any
encoding and width.

In: the process's streams and environment. Out: streams that can be written to, and bounded text of
files. Used by all commands.
"""

import io
import os
import re
import sys
import textwrap
from pathlib import Path

from rich.console import Console

from distmega.errors import RequestError

MIN_COLUMNS = 20
NARROWEST = 40
"""Columns in which lines are broken between words; in fewer the terminal breaks them."""
MAX_TEXT_BYTES = 2**26
"""Of a file of prompts, or of text to score."""
STDIN = Path("-")
_SHOWN_CHARS = 200
_LINE_END = re.compile(r"\r\n?|\n")


def open_streams() -> None:
    """Makes standard streams usable: what can't be encoded is replaced, all of a text is written or
    an error raised, and a width that nothing fits in is ignored. RequestError where standard output
    is closed.
    """
    for _ in range(3):  # a file that is opened later must not take the number of a closed stream
        number = os.open(os.devnull, os.O_RDWR)
        if number > 2:
            os.close(number)
            break
        os.set_inheritable(number, True)
    closed = sys.stdout is None
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  for as long as the process runs
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):
        # PYTHONUNBUFFERED: where the system takes a part of a text, Python drops the rest unsaid
        number, encoding = sys.stdout.fileno(), sys.stdout.encoding
        sys.stdout = open(number, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and (len(columns) > 6 or int(columns) < MIN_COLUMNS):
        del os.environ["COLUMNS"]
    if closed:
        raise RequestError(
            "standard output is closed",
            expected="somewhere to write to",
            remedy="redirect it to a file or to /dev/null",
        )


def open_console(*, stderr: bool = False) -> Console:
    """On standard output or error; it prints words as they are, `:x:` too, which rich makes a
    picture of.
    """
    return Console(stderr=stderr, soft_wrap=True, highlight=False, emoji=False)


def drop_output() -> None:
    """What is left to write must not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_text(path: Path) -> str:
    """The UTF-8 text of a file or of standard input, less a byte order mark; RequestError
    where it can't be read, or is longer than MAX_TEXT_BYTES.
    """
    try:
        if path == STDIN:
            data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1) if sys.stdin else b""
        else:
            with path.open("rb") as file:
                data = file.read(MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            raise ValueError(f"it has more than {MAX_TEXT_BYTES} bytes")
        return data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        shown = str(path)
        shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
        named = "standard input" if path == STDIN else f"text file {shown!r}"
        raise RequestError(
            f"{named} can't be read ({getattr(error, 'strerror', None) or error})",
            expected="a UTF-8 text file",
            remedy="check the path and the encoding",
        ) from error


def read_argument(text: str) -> str:
    """A text of the command line. Python hides bytes in it that the locale's encoding doesn't have,
    as all behind ASCII in the C locale: they are read as UTF-8; RequestError where they are not.
    """
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        pass
    try:
        return os.fsencode(text).decode()
    except UnicodeError as error:
        shown = ascii(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")
        raise RequestError(
            f"text {shown} of the command line can't be read",
            expected="text in the locale's encoding or in UTF-8",
            remedy="correct its encoding, or that of the locale",
        ) from error


def split_lines(text: str) -> list[str]:
    """Lines as files end them. `str.splitlines` also ends them inside of a text, at form feeds and
    Unicode's separators.
    """
    return _LINE_END.split(text)


def columns_of(console: Console) -> int:
    """Columns that lines should fit in: of a terminal, or of COLUMNS; 0, which is no limit, for a
    file or a pipe.
    """
    return console.width if console.is_terminal or "COLUMNS" in os.environ else 0


def say(console: Console, text: str) -> None:
    """Prints text as it is, in lines of at most columns_of(console), broken between words."""
    console.print(wrap_text(text, columns_of(console)), markup=False)


def wrap_text(text: str, width: int) -> str:
    """Lines of at most `width` columns, unless a word is longer, what follows a break indented.
    Text as it is for fewer than NARROWEST.
    """
    if width < NARROWEST:
        return text
    lines = []
    for line in text.split("\n"):
        if len(line) <= width:
            lines.append(line)
            continue
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        lines += textwrap.wrap(
            line,
            width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)
