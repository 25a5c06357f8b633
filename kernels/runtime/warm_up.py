"""What a process's first kernels wait for, done in a thread beside the planning of what they do.

In: a GPU, and how values are kept for the next process. Out: nothing; later calls find Triton's
driver loaded and its own key known, cuBLAS with a handle, torch's kernels of a first prompt loaded.
Used by engine.py and compiled/program.py; next on the walk: relaunch.py.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from distmega.kernels.runtime.switching import short_turns

Keep = Callable[[object, Callable[[], str]], str]
"""Takes what a value depends on and what makes it: the value, kept or new."""

_begun: dict[int, list[Thread]] = {}

_log = logging.getLogger(__name__)


def begin(device: torch.device, keep: Keep) -> None:
    """Starts the threads, once for a GPU. A process that ends waits for them."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if index in _begun:
        return
    _begun[index] = [_start(index, partial(_load_torch, torch.device("cuda", index)))]
    if find_spec("triton") is not None:
        # as a whole: of threads that meet in the circle of its modules one finds half a module, and
        # what fails then leaves Triton without others
        import_module("triton")
        _begun[index] += [_start(index, _load_driver), _start(index, partial(_load_key, keep))]


def finish() -> None:
    """Waits for what was begun. Whoever compiles or captures does it first."""
    for threads in list(_begun.values()):  # an engine may begin meanwhile
        for thread in threads:
            thread.join()


def _start(index: int, work: Callable[[], None]) -> Thread:
    thread = Thread(target=_run, args=(index, work), name="warm-up")
    thread.start()
    return thread


def _run(index: int, work: Callable[[], None]) -> None:
    try:
        with short_turns():
            torch.cuda.set_device(index)
            work()
    except Exception as error:  # who needs it meets the error again, and reports it
        _log.debug("warming up: %s", error)


def _load_torch(device: torch.device) -> None:
    """Lets cuBLAS begin, and torch load the kernel that looks up rows."""
    x = torch.zeros(64, 64, dtype=torch.bfloat16, device=device)
    torch.nn.functional.linear(x, x)
    x.index_select(0, torch.zeros(len(x), dtype=torch.int64, device=device))  # few have another


def _load_key(keep: Keep) -> None:
    find_key(import_module("triton.runtime.cache"), keep)


def _load_driver() -> None:
    runtime: Any = import_module("triton.runtime")
    runtime.driver.active.utils  # noqa: B018  compiles and loads it


def find_key(module: Any, keep: Keep) -> None:
    """Spares this process the hash of all of Triton, 0.4 s of a core, that names its cache, where
    an earlier one took it of the same files. module: triton.runtime.cache.
    """
    if not hasattr(module, "triton_key"):  # another Triton
        return
    key = keep(tuple(_files_of(Path(module.__file__).parents[1])), module.triton_key)
    module.triton_key = lambda: key


def _files_of(folder: Path) -> Iterator[str]:
    """The files that Triton hashes, and when they were written."""
    folders = ("_C", "backends", "compiler", "language", "runtime")
    for path in sorted(path for name in folders for path in (folder / name).rglob("*")):
        if path.suffix in (".py", ".so"):
            about = path.stat()
            yield f"{path} {about.st_size} {about.st_mtime_ns}"
