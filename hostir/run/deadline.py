"""How long what was queued on a GPU may take: nobody else watches the collectives of a graph.

Comes in: a mark behind each call. Goes out: HangError where it is waited for, in time. A host that
never waits so, and hangs in torch.cuda.synchronize, is ended by a thread, one for all programs, as
torch's watchdog ends one that waits for a collective outside of graphs. Used by
distmega/compiled/program.py, and by engine.py, opening.py, prefill.py and library_steps.py of
distmega/engine/.
"""

import logging
import os
import threading
import time
from typing import Protocol

import torch

from distmega.errors import HangError
from distmega.hostir.comm.waits import late_error

logger = logging.getLogger(__name__)

HUNG = 86
"""Exit status of such a process. It is not aborted: a core of all that a GPU maps takes minutes."""
MARGIN_S = 5.0
"""What a graph may take beside its waits for other ranks."""
GRACE_S = 10.0
"""How much longer the thread waits than `wait` does."""
IDLE_S = 60.0
"""How long the thread stays behind the last call: to start it takes a call 0.2 to 0.5 ms."""


class Reached(Protocol):
    """What can be waited for: an event, or what tells as one does."""

    def query(self) -> bool:
        """Whether it is reached."""


def ends_within(done: Reached, limit_s: float) -> bool:
    """Whether an event is reached in time; returns as soon as it is."""
    deadline = time.monotonic() + limit_s
    while not done.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(0)
    return True


def await_event(done: Reached, limit_s: float, what: str) -> None:
    """Returns once an event is reached; HangError where that takes longer than the limit. what: is
    waited for, such as "a prompt of rank 1".
    """
    if not ends_within(done, limit_s):
        raise hang_error(what, limit_s)


def await_queued(limit_s: float, what: str) -> None:
    """As await_event, for all that was queued on the current stream."""
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    await_event(done, limit_s, what)


def hang_error(what: str, limit_s: float) -> HangError:
    """What to raise where something has taken longer than its limit."""
    return late_error(f"{what}: still under way after {limit_s:g} s")


def graph_limit_s(timeout_s: float) -> float:
    """How long a graph may take whose waits for other ranks take `timeout_s` each, at most."""
    return 2 * timeout_s + MARGIN_S


class _Watcher:
    """The thread that looks at all deadlines whose calls are not known to have ended. It ends once
    there have been none for a while.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: set[Deadline] = set()
        self._thread: threading.Thread | None = None

    def watch(self, deadline: "Deadline") -> None:
        """Looks at a deadline until it has no marks."""
        with self._lock:
            deadline.is_watched = True
            self._watched.add(deadline)
            if self._thread is None or not self._thread.is_alive():  # as in a fork
                self._thread = threading.Thread(
                    target=self._run, name="distmega-watch", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        watched, last = self._drop_idle(), time.monotonic()
        while watched or not self._ends(idle_s=time.monotonic() - last):
            time.sleep(min([1.0, *(each.limit_s / 4 for each in watched)]))
            for each in watched:
                try:
                    each.look(time.monotonic())
                except Exception:  # of a GPU that has failed: others are watched on
                    logger.exception("%s: no longer watched", each.what)
                    each.forget()
            if watched:
                last = time.monotonic()
            watched = self._drop_idle()

    def _drop_idle(self) -> "list[Deadline]":
        """The deadlines that have marks."""
        with self._lock:
            for deadline in [*self._watched]:
                deadline.is_watched = False  # first, so that either `note` sees this or this a mark
                if deadline.has_marks:
                    deadline.is_watched = True
                else:
                    self._watched.discard(deadline)
            return [*self._watched]

    def _ends(self, idle_s: float) -> bool:
        """Whether the thread ends, which has had nothing to look at for so long."""
        with self._lock:
            if self._watched or idle_s < IDLE_S:
                return False
            self._thread = None
            return True


_watcher = _Watcher()


class Deadline:
    """Bounds the calls of one program on one GPU. is_watched: by the thread of all deadlines."""

    def __init__(self, what: str, limit_s: float) -> None:
        """what: for messages, such as "calls of program 'mlp' on rank 1"."""
        self.what, self.limit_s = what, limit_s
        self._events = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._marks: tuple[tuple[torch.cuda.Event, float], ...] = ()
        """A call and the latest one behind it, if there are any, and when they were queued."""
        self.is_watched = False

    @property
    def has_marks(self) -> bool:
        """Whether calls are under way, as far as anybody has asked."""
        return bool(self._marks)

    def forget(self) -> None:
        """Nobody asks for the calls so far any more."""
        self._marks = ()

    def note(self, stream: torch.cuda.Stream | None = None) -> None:
        """A call has been queued on a stream, by default the current one, which torch takes long to
        tell.
        """
        marked, (one, other) = self._marks[:1], self._events
        event = other if marked and marked[0][0] is one else one
        self._marks = marked  # before the event stands for this call: see look
        event.record(stream)
        self._marks = *marked, (event, time.monotonic())
        if not self.is_watched:
            _watcher.watch(self)

    def wait(self) -> None:
        """Returns once all that was queued on the current stream has ended; HangError if that
        takes longer than the limit.
        """
        try:
            await_queued(self.limit_s, self.what)
        finally:
            self.forget()

    def look(self, now: float) -> None:
        """Ends the process if a marked call is still under way long behind its limit."""
        marks = self._marks
        if not marks or now < marks[0][1] + self.limit_s + GRACE_S:
            return
        # asked only now: a question may spoil a capture that is under way elsewhere
        reached = marks[0][0].query()  # type: ignore[no-untyped-call]
        if self._marks is not marks:  # calls go on, and the event may stand for a later one by now
            return
        if not reached:
            logger.critical("%s", hang_error(self.what, self.limit_s))
            os._exit(HUNG)
        self._marks = marks[1:]
