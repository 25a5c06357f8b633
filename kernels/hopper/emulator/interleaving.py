"""Who of an emulated team runs next: a seeded choice, unfair on purpose.

In: activities, which advance by one piece of work at a time or say that they can't. Out: a run to
the end of those that have one, or a CheckError that says who waits for what. A third of the seeds
picks evenly; a third starves an SM, a rank or some kind of activity for long stretches; a third
gives every activity a priority and changes a few of them on the way, so that the highest that can
run does (probabilistic concurrency testing). Next on the walk: ring.py.
"""

import random
from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Protocol

from distmega.errors import CheckError

Key = tuple[str, int, int]
"""What somebody waits for: a kind of thing, the rank, and which SM or word of it."""
RAN: Key = ("", 0, 0)
"""In place of what an activity waits for: it waits for nothing."""

Steps = Generator[Key, None, None]
"""Work with places where others may come between, and what it waits for there."""

LONGEST_STALL = 3000
"""Turns."""
NUM_CHANGES = 5
"""Of priorities in a run, about."""
TURNS = 20000
"""Of a run, about."""
MOST_PARTS = 3
"""Of what threads that no barrier joins do, in any order."""
NAMED_WAITS = 8


class Activity(Protocol):
    """rank, sm: whose it is; kind: "compute", "loader", "stores", "copies" or "host". finite:
    whether a run lasts until it ends.
    """

    rank: int
    sm: int
    kind: str
    finite: bool

    def advance(self) -> Key | None:
        """Does a piece of work and gives RAN, or says what it must wait for; None once it has
        ended.
        """
        ...

    def waits_for(self) -> str:
        """What it is blocked by, in words; "" if that says nothing."""
        ...


class Interleaving:
    """The order of one run. Activities may be added while it lasts."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.mode = ("even", "stalls", "priorities")[seed % 3]
        self.ready: list[Activity] = []
        self.blocked: dict[Key, list[Activity]] = {}
        self.priorities: dict[int, float] = {}
        self.stalled: tuple[str, int] = ("", 0)
        self.stalled_until = 0
        self.num_turns = 0
        self.num_left = 0

    def add(self, activity: Activity) -> None:
        self.ready.append(activity)
        self.priorities[id(activity)] = self.random.random()
        self.num_left += activity.finite

    def wake(self, key: Key) -> None:
        """Says that what somebody waits for may be there."""
        if key in self.blocked:
            self.ready += self.blocked.pop(key)

    def awaited(self, kind: str, rank: int) -> list[int]:
        """Of one kind: what is waited for."""
        return [which for name, where, which in self.blocked if (name, where) == (kind, rank)]

    def run(self) -> None:
        """Until all finite activities have ended. CheckError if none can go on."""
        while self.num_left:
            if not self.ready:
                raise self.deadlock()
            at = self.choose()
            activity = self.ready[at]
            self.num_turns += 1
            found = activity.advance()
            if found == RAN:
                continue
            self.ready[at] = self.ready[-1]
            self.ready.pop()
            if found is None:
                self.num_left -= activity.finite
            else:
                self.blocked.setdefault(found, []).append(activity)

    def choose(self) -> int:
        """Place in `ready` of who is next."""
        num = len(self.ready)
        if self.mode == "priorities":
            if self.random.random() < NUM_CHANGES / TURNS:
                one = self.random.choice(self.ready)
                self.priorities[id(one)] = -self.random.random()
            return max(range(num), key=lambda at: self.priorities[id(self.ready[at])])
        at = self.random.randrange(num)
        if self.mode == "even":
            return at
        if self.num_turns >= self.stalled_until:
            self.stall()
        awake = [i for i, one in enumerate(self.ready) if not self.is_stalled(one)]
        return self.random.choice(awake) if awake else at

    def stall(self) -> None:
        """Chooses who stands still next, and until when."""
        one = self.random.choice(self.ready)
        self.stalled = self.random.choice(
            (("sm", one.sm), ("rank", one.rank), (one.kind, one.sm), (one.kind, -1), ("", 0))
        )
        self.stalled_until = self.num_turns + self.random.randrange(LONGEST_STALL)

    def is_stalled(self, one: Activity) -> bool:
        what, which = self.stalled
        if what == "rank":
            return one.rank == which
        return what in ("sm", one.kind) and which in (-1, one.sm)

    def deadlock(self) -> CheckError:
        waits = [one for each in self.blocked.values() for one in each if one.finite]
        texts = [text for one in waits if (text := one.waits_for())]
        more = f"; and {len(texts) - NAMED_WAITS} more" if len(texts) > NAMED_WAITS else ""
        return CheckError(
            f"a hang: {'; '.join(texts[:NAMED_WAITS])}{more}",
            expected="every wait to be satisfied",
            remedy="see who owes what is waited for",
        )


def described(found: str, *, expected: str) -> CheckError:
    """A race that the emulator has found."""
    return CheckError(found, expected=expected, remedy="add the wait that is missing")


def shuffled(chooser: random.Random, num: int) -> Sequence[range]:
    """0 to num - 1 cut into a few ranges, in any order: threads that no barrier joins."""
    cuts = sorted({0, num, *(chooser.randrange(num + 1) for _ in range(MOST_PARTS - 1))})
    parts = [range(a, b) for a, b in pairwise(cuts)]
    chooser.shuffle(parts)
    return parts
