"""The seconds that a search may take.

Comes in: a number of seconds. Goes out: whether they are over, asked wherever a search can stop
and keep what it has. The clock decides nothing else, so that a search which ends within its budget
finds the same on every machine. Next: search.py.
"""

import math
import time


class Budget:
    """Begins as it is made. seconds: 0 for no end.

    was_short: whether anything was left out because they were over.
    """

    __slots__ = ("_end", "seconds", "was_short")

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.was_short = seconds, False
        self._end = time.monotonic() + seconds if seconds else math.inf

    def is_over(self) -> bool:
        """Asked where more could be done, which the caller then leaves out."""
        return self.is_past(self._end)

    def halfway(self) -> float:
        """The moment when half of what is left now is over."""
        now = time.monotonic()
        return now + (self._end - now) / 2

    def is_past(self, moment: float) -> bool:
        """As is_over, of a moment that halfway gave."""
        if time.monotonic() < moment:
            return False
        self.was_short = True
        return True
