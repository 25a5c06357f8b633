"""Typed access to the loose mappings that models come with: config.json and GGUF metadata in,
checked values out.

Every complaint names the file, the key and the value. Used by huggingface/config.py, gguf/config.py
and the tokenizers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from distmega.errors import ModelError

T = TypeVar("T")


class Fields:
    """A mapping read from `where`; each method gives a value of its type, `default` where absent or
    null.
    """

    def __init__(self, data: Mapping[str, object], where: str) -> None:
        self.data = data
        self.where = where

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, most: int = 2**40) -> int:
        """A whole number up to `most`; ModelError when absent without default, or another value."""
        value = self._value(key, default, "a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > most:
            raise self.bad(key, f"a whole number of at most {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number, neither infinite nor NaN."""
        value = self._value(key, default, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
            raise self.bad(key, "a number below 1e30")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(key, default, "a string")
        if not isinstance(value, str):
            raise self.bad(key, "a string")
        return value

    def mapping(self, key: str) -> "Fields":
        """A nested mapping, empty when absent."""
        value = self.data.get(key)
        if value is None:
            return Fields({}, f"{self.where}, {key}")
        if not isinstance(value, dict):
            raise self.bad(key, "an object")
        return Fields(value, f"{self.where}, {key}")

    def sequence(self, key: str, kind: type[T]) -> list[T]:
        """A list whose elements are all of `kind`; ModelError when absent."""
        value = self._value(key, None, f"a list of {kind.__name__}")
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self.bad(key, f"a list of {kind.__name__}")
        return value

    def token_ids(self, *keys: str) -> tuple[int, ...]:
        """Token ids under these keys, each one number or a list, without repeats and in order;
        absent keys give none.
        """
        ids: list[int] = []
        for key in keys:
            value = self.data.get(key)
            if value is not None:
                ids += self.sequence(key, int) if isinstance(value, list) else [self.integer(key)]
        return tuple(dict.fromkeys(ids))

    def bad(self, key: str, expected: str) -> ModelError:
        """The error for a value that does not fit."""
        found = f"{key} is {str(self.data.get(key))[:80]!r} in {self.where}"
        return ModelError(found, expected=expected, remedy="correct the file or download it again")

    def _value(self, key: str, default: object, expected: str) -> object:
        value = self.data.get(key)
        if value is not None:
            return value
        if default is None:
            remedy = "add it, or download the file again"
            raise ModelError(
                f"{key!r} is missing in {self.where}", expected=expected, remedy=remedy
            )
        return default


MAX_TEXT_BYTES = 2**28
"""Of a JSON file or a template; the largest tokenizer.json in use has 2^25."""


def require_target(path: Path) -> None:
    """ModelError for a link to what is not there, as caches have them whose files were removed, and
    for what is in a folder of someone else's.
    """
    try:
        leads_nowhere = path.is_symlink() and not path.exists()
    except PermissionError as error:
        raise ModelError(
            f"{path} can't be looked at ({error.strerror})",
            expected="a path that may be read",
            remedy="check its permissions, and those of the folders that it is in",
        ) from error
    if leads_nowhere:
        raise ModelError(
            f"{path} is a link to {path.readlink()}, which is not there",
            expected="what it links to",
            remedy="download it again, or copy a folder of links with what they link to (cp -rL)",
        )


def require_file(path: Path) -> None:
    """ModelError for what is there and no file: reading a pipe or a device might never end."""
    require_target(path)
    if path.exists() and not path.is_file():
        raise ModelError(
            f"{path} is not a file", expected="a regular file", remedy="check the path"
        )


def read_text(path: Path) -> str:
    """The UTF-8 text of a model's file; ModelError when it can't be read."""
    require_file(path)
    try:
        if (num_bytes := path.stat().st_size) > MAX_TEXT_BYTES:
            raise ModelError(
                f"{path} of {num_bytes} bytes",
                expected=f"at most {MAX_TEXT_BYTES}",
                remedy="download the file again",
            )
        return path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or "unreadable"
        raise ModelError(
            f"{path}: {reason}", expected="a readable file", remedy="check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{path} is not UTF-8 ({error})",
            expected="UTF-8 text",
            remedy="convert it, or download the file again",
        ) from error


def read_json(path: Path) -> Fields:
    """The object that a JSON file holds; ModelError when it can't be read."""
    return parse_json(read_text(path), path)


def parse_json(text: str, path: Path) -> Fields:
    """The object that the text of a file is; ModelError when it is none."""
    remedy = "download the file again"
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} is not JSON ({error})", expected="a JSON object", remedy=remedy
        ) from error
    if not isinstance(data, dict):
        raise ModelError(
            f"{path} holds a {type(data).__name__}", expected="a JSON object", remedy=remedy
        )
    return Fields(data, str(path))
