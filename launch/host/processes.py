"""What the system says of other processes of this machine, and how a process ends with its parent.

In: a process id. Out: its state, or a thread that waits for its end. Used by launch/local.py and
launch/torchrun.py.
"""

import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path

PARENT_POLL_S = 0.5


def process_state(pid: int) -> str:
    """The state of a process as Linux names it: "R" runs, "S" sleeps, "T" is stopped, "Z" has
    ended, and nobody took note yet. Empty where there is no such process, or no /proc.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]


def end_with_parent(end: Callable[[], None]) -> None:
    """Calls `end`, in a thread of its own, once the process that started this one is gone."""
    parent = os.getppid()

    def watch() -> None:
        _await_end(parent)
        end()

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _await_end(parent: int) -> None:
    """Returns once this process has another parent than `parent`."""
    try:
        descriptor = os.pidfd_open(parent)
    except (AttributeError, OSError):  # not on this system
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        return
    if os.getppid() == parent:  # and so the descriptor is of the parent, not of a later process
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        ended.poll()
    os.close(descriptor)
