"""What was planned, on disk for the next process: plans, queues and programs of prompts.

In: a key of plain values, and what makes the value. Out: the value, from the file of an earlier
process or made now and written. A file is of one state of distmega's own files, of the versions of
Python, torch and triton, and of one kind of machine, and is read only where its whole key is the
same. Used by engine.py, opening.py, prefill.py, compiled/lowering.py and compiled/program.py; next
on the walk: decode_plan.py.
"""

import hashlib
import logging
import os
import pickle
import platform
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Generic, TypeVar, cast

from distmega import hostir, kernels, sharding
from distmega.collecting import gc_paused
from distmega.folders import cache_folder
from distmega.whole_file import remove_left_parts, replace_file

T = TypeVar("T")
F = TypeVar("F")

FOLDER: Path | None = cache_folder() / "plans"
"""Where files are; None: nothing is kept."""
MOST_FILES = 256
"""The oldest are removed beyond. An engine of 8 ranks has some 50, of up to a few MB each."""

_DIGEST_BYTES = hashlib.sha256().digest_size
"""Of what follows in a file: a damaged pickle may be that of another value."""

_log = logging.getLogger(__name__)


class _UnnamedError(Exception):
    """A value that has no place in a key."""


class KeptPlans:
    """What is kept of one engine. Nothing is where its key has a value that can't be told apart
    from others by its text, such as a module of torch.
    """

    def __init__(self, *key: object, folder: Path | None) -> None:
        """key: all that plans depend on beside distmega and the versions of libraries. folder: see
        FOLDER.
        """
        self._folder, self._key = folder, ""
        self._new: list[tuple[Path, str, object]] = []
        if folder is None:
            return
        try:
            self._key = f"{_versions()}\n{_text_of(key)}"
        except _UnnamedError as error:
            _log.debug("plans are not kept: %s", error)
            self._folder = None

    def get(self, name: str, key: object, make: Callable[[], T]) -> T:
        """The value of this name and key, which determine it together with the engine's: the one
        on disk, or what `make` gives, which is to be written for the next process.
        """
        if self._folder is None:
            return make()
        try:
            whole = f"{self._key}\n{name} {_text_of(key)}"
        except (_UnnamedError, RecursionError) as error:
            _log.debug("%s is not kept: %s", name, error)
            return make()
        path = self._folder / f"{name}-{hashlib.sha256(whole.encode()).hexdigest()[:32]}.pickle"
        found = _read(path, whole)
        if found is not None:
            return cast(T, found[0])
        made = make()
        self._new.append((path, whole, made))
        return made

    def get_folded(
        self,
        name: str,
        key: object,
        make: Callable[[], T],
        fold: Callable[[T], F],
        unfold: Callable[[F, Callable[[], T]], T],
    ) -> T:
        """As `get`, of a value that is kept in a smaller form, which `fold` gives. unfold: gives
        the value of that form, and may call what it is given for all of it, then or later.
        """
        if self._folder is None:
            return make()
        made: list[T] = []

        def whole() -> T:
            if not made:
                made.append(make())
            return made[0]

        return unfold(self.get(name, key, lambda: fold(whole())), whole)

    def write(self) -> None:
        """Writes what is new: to be called when nobody waits for this thread."""
        for path, key, value in self._new:
            _write(path, key, value)
        self._new.clear()


NOTHING_KEPT = KeptPlans(folder=None)


class ReadLater(Generic[T]):
    """A part of what is kept that few processes ask for: there it is a pickle of its own, which is
    read when it is first asked for.
    """

    __slots__ = ("_data", "_value")

    def __init__(self, value: T | None, data: bytes | None = None) -> None:
        """data: the pickle of the value, in place of it."""
        self._value, self._data = value, data

    @gc_paused
    def get(self) -> T:
        """The value."""
        data = self._data
        if data is not None:
            self._value, self._data = pickle.loads(data), None
        return cast(T, self._value)

    def __reduce__(self) -> tuple[object, ...]:
        data = self._data
        if data is None:
            data = pickle.dumps(self._value, pickle.HIGHEST_PROTOCOL)
        return ReadLater, (None, data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReadLater) and self.get() == other.get()

    def __hash__(self) -> int:
        return hash(self.get())


def open_plans(*key: object) -> KeptPlans:
    """Those of a key in this user's folder."""
    return KeptPlans(*key, folder=FOLDER)


@gc_paused
def _read(path: Path, key: str) -> tuple[object] | None:
    """What the file holds; None where there is none of this key, or one that others could have
    written: loading a pickle runs what it says.
    """
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            own = about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not own:
                _log.warning("%s may be another user's, and is not read", path)
                return None
            digest, data = file.read(_DIGEST_BYTES), file.read()
        if hashlib.sha256(data).digest() != digest:
            raise ValueError("its bytes are not those that were written")
        known, value = pickle.loads(data)
    except FileNotFoundError:
        return None
    except Exception as error:  # a damaged file raises anything
        _log.warning("%s can't be read (%s); planning anew", path, error)
        return None
    return (value,) if known == key else None


@gc_paused
def _write(path: Path, key: str, value: object) -> None:
    """Replaces the file in one step, so that no reader sees half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        data = pickle.dumps((key, value), pickle.HIGHEST_PROTOCOL)
        with replace_file(path, mode=0o600) as file:
            file.write(hashlib.sha256(data).digest())
            file.write(data)
        _remove_oldest(path.parent)
        remove_left_parts(path.parent)
    except (OSError, pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        _log.debug("%s can't be written: %s", path, error)  # or the value has no pickle


def _remove_oldest(folder: Path) -> None:
    known = sorted(folder.glob("*.pickle"), key=lambda path: path.stat().st_mtime_ns)
    for path in known[:-MOST_FILES]:
        with suppress(FileNotFoundError):  # another process may have removed it
            path.unlink()


@cache
def _versions() -> str:
    """Of all code that plans."""
    libraries = []
    for name in ("torch", "triton", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            libraries.append(f"{name} {metadata.version(name)}")
    return f"{_own_files()}, python {platform.python_version()}, {', '.join(libraries)}"


def keep_triton_key(key: object, make: Callable[[], str]) -> str:
    """What identifies Triton, which an earlier process may have found."""
    kept = open_plans("triton")
    found = kept.get("triton", key, make)
    kept.write()
    return found


def _own_files() -> str:
    """A hash of the names, sizes and times of distmega's files, as Python judges by them whether a
    module must be compiled again.
    """
    folders = [
        Path(__file__).parents[1],
        *(Path(p.__path__[0]) for p in (hostir, kernels, sharding)),
    ]
    found = sorted(line for folder in folders for line in _files_below(folder))
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def _files_below(folder: Path) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(("__pycache__", ".")):  # an editor's lock leads nowhere
                continue
            if entry.is_dir():
                yield from _files_below(Path(entry.path))
            else:
                with suppress(FileNotFoundError):  # it went meanwhile
                    about = entry.stat()
                    yield f"{entry.path} {about.st_size} {about.st_mtime_ns}"


def _text_of(value: object) -> str:
    """A text that only equal values have."""
    if value is None or isinstance(value, str | bytes | int | float):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text_of, value))})"
    if isinstance(value, Mapping):
        pairs = sorted(f"{_text_of(key)}: {_text_of(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_text_of, value)))}}}"
    if is_dataclass(value) and not isinstance(value, type):
        parts = (f"{each.name}={_text_of(getattr(value, each.name))}" for each in fields(value))
        return f"{type(value).__module__}.{type(value).__qualname__}({', '.join(parts)})"
    raise _UnnamedError(f"a {type(value).__name__} in their key")
