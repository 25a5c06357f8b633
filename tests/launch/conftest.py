"""Every launcher test leaves no child process and no shared memory behind."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

GONE_S = 10.0


def children() -> set[int]:
    """Processes that this one started; what they started is ended with them, or is Ray's own."""
    return {child.pid for child in psutil.Process().children()}


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def wait_until(condition: Callable[[], bool], limit_s: float = GONE_S) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def is_gone(pid: int) -> bool:
    """Whether the process has ended; a zombie has, its parent just has not looked yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    children_before, memory_before = children(), shared_memory()
    yield
    assert wait_until(lambda: children() <= children_before), "a process is left"
    assert wait_until(lambda: shared_memory() <= memory_before), "shared memory is left"
