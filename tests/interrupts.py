"""Children that SIGINT ends, however the tests were started."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[None]:
    """Processes started inside end on SIGINT, even if a shell runs the tests in its background,
    where they ignore it, as their children would.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
