"""StoreTarget of the emulated GPUs, which notices races: flagged words, plain data, what SMs keep.

A store waits in its SM's buffer until it becomes visible, in pieces and in any order, but not
before what a fence put in front of it. Each access is held against the clocks (clocks.py):

- a flagged word is taken when it carries the flag that is waited for; one with a later flag has
  been overwritten too early;
- who overwrites a word must know that all who read it have done so;
- plain data must be visible to whoever reads them, and all their readers known to be done when they
  are written again.

What was never written is NaN. Next on the walk: interleaving.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from distmega.kernels.hopper.emulator.clocks import Agent, Clock, Snapshot
from distmega.kernels.hopper.emulator.interleaving import RAN, Interleaving, Key, described
from distmega.kernels.hopper.emulator.numbers import Floats, Indices, Words

NOBODY = -1


@dataclass(slots=True)
class PendingStore:
    """Values on their way to a memory. flag: of flagged words, else 0."""

    memory: "StoreTarget"
    at: Indices
    values: npt.NDArray[np.generic]
    flag: int
    writer: Agent
    snapshot: Snapshot
    tick: int


class StoreTarget(Protocol):
    """What stores go to."""

    def apply(self, store: PendingStore) -> None:
        """Makes the values visible."""
        ...


class StoreBuffer:
    """Stores of an SM that are not visible yet, those between two fences in any order."""

    kind, finite = "stores", False

    def __init__(self, order: Interleaving, rank: int, sm: int) -> None:
        self.order, self.rank, self.sm = order, rank, sm
        self.groups: list[list[PendingStore]] = [[]]

    def put(self, store: PendingStore) -> None:
        if len(store.at):
            self.groups[-1].append(store)
            self.order.wake(("stores", self.rank, self.sm))

    def fence(self) -> None:
        if self.groups[-1]:
            self.groups.append([])

    def is_empty(self) -> bool:
        return not any(self.groups)

    def advance(self) -> Key | None:
        """Makes a piece of one store visible."""
        while len(self.groups) > 1 and not self.groups[0]:
            self.groups.pop(0)
        group = self.groups[0]
        if not group:
            self.order.wake(("host", self.rank, 0))
            return "stores", self.rank, self.sm
        chooser = self.order.random
        store = group.pop(chooser.randrange(len(group)))
        if len(store.at) > 1 and chooser.random() < 0.3:
            cut = chooser.randrange(1, len(store.at))
            rest = PendingStore(
                store.memory, store.at[cut:], store.values[cut:], store.flag, store.writer,
                store.snapshot, store.tick,
            )  # fmt: skip
            group.append(rest)
            store.at, store.values = store.at[:cut], store.values[:cut]
        store.memory.apply(store)
        return RAN

    def flush(self, memory: StoreTarget) -> None:
        """Makes visible what goes to a memory that the SM itself is about to read."""
        for group in self.groups:
            for store in [one for one in group if one.memory is memory]:
                group.remove(store)
                memory.apply(store)

    def waits_for(self) -> str:
        return ""


class FlaggedWords:
    """The symmetric buffer of a rank: 32 bits of payload and a flag each, zero at first."""

    def __init__(
        self, order: Interleaving, rank: int, agents: Sequence[Agent], num_words: int
    ) -> None:
        """agents: the compute warps of this rank's SMs, who alone poll it."""
        self.order, self.rank, self.agents = order, rank, agents
        self.numbers = np.array([agent.number for agent in agents])
        self.payload: Words = np.zeros(num_words, dtype=np.uint32)
        self.flag = np.zeros(num_words, dtype=np.int64)
        self.writer = np.full(num_words, NOBODY, dtype=np.int64)
        """Number of the snapshot of who wrote a word last."""
        self.snapshots: list[Snapshot] = []
        self.numbered: dict[int, int] = {}
        self.last_read = np.zeros((len(agents), num_words), dtype=np.int32)

    def take(self, agent: Agent, at: Indices, flag: int, found: Words, left: Indices) -> Indices:
        """Fills `found` with the payloads at places `left` of `at` that carry the flag; gives the
        places of those that don't yet.
        """
        words = at[left]
        flags = self.flag[words]
        if (flags > flag).any():
            word = int(words[np.argmax(flags > flag)])
            raise described(
                f"{agent} waits for flag {flag} of word {word} of rank {self.rank}, which "
                f"{self.who_wrote(word)} has overwritten with flag {int(self.flag[word])}",
                expected="every reader to be done before",
            )
        here = flags == flag
        if here.any():
            got = words[here]
            found[left[here]] = self.payload[got]
            writers = np.unique(self.writer[got])
            if writers[0] == NOBODY:
                raise described(
                    f"{agent} takes word {int(got[0])} of rank {self.rank} with flag {flag}, "
                    "which nobody wrote",
                    expected="flags above that of zeroed memory",
                )
            agent.hear([self.snapshots[one] for one in writers])
            self.last_read[agent.sm, got] = agent.tick()
        rest: Indices = left[~here]
        return rest

    def is_others(self, number: int, store: PendingStore) -> bool:
        """Whether a snapshot is of another agent: an SM's own stores to a word keep their order."""
        return self.snapshots[number].agent != store.writer.number

    def who_wrote(self, word: int) -> str:
        """The last writer of a word, for messages."""
        number = int(self.writer[word])
        return f"agent {self.snapshots[number].agent}" if number >= 0 else "nobody"

    def apply(self, store: PendingStore) -> None:
        """Makes a store visible. CheckError where flags don't grow, where two agents write
        different values, and where the writer can't know that all readers are done.
        """
        old = self.flag[store.at] > store.flag
        others = [i for i in self.writer[store.at[old]] if self.is_others(i, store)]
        if others:
            word = int(store.at[old][0])
            raise described(
                f"{store.writer} writes flag {store.flag} to word {word} of rank {self.rank} "
                f"behind flag {int(self.flag[word])} of {self.who_wrote(word)}",
                expected="flags that grow",
            )
        store.at, store.values = store.at[~old], store.values[~old]
        before = self.flag[store.at]
        again = before == store.flag
        if again.any() and (self.payload[store.at[again]] != store.values[again]).any():
            word = int(store.at[again][0])
            raise described(
                f"{store.writer} and {self.who_wrote(word)} write different values with flag "
                f"{store.flag} to word {word} of rank {self.rank}",
                expected="one writer, or the same value",
            )
        fresh = store.at[~again]
        late = self.last_read[:, fresh] > store.snapshot.done[self.numbers][:, None]
        if late.any():
            sm, nth = np.argwhere(late)[0]
            raise described(
                f"{store.writer} overwrites word {int(fresh[nth])} of rank {self.rank}, flag "
                f"{store.flag}, and can't know that SM {int(sm)} has read it",
                expected="a path from every reader to the writer",
            )
        self.last_read[:, fresh] = 0
        self.payload[fresh] = store.values[~again]
        self.flag[fresh] = store.flag
        self.writer[fresh] = self.number_of(store.snapshot)
        written = set(fresh.tolist())
        for word in self.order.awaited("word", self.rank):
            if word in written:
                self.order.wake(("word", self.rank, word))

    def number_of(self, snapshot: Snapshot) -> int:
        """The number by which `writer` names a snapshot."""
        if id(snapshot) not in self.numbered:
            self.numbered[id(snapshot)] = len(self.snapshots)
            self.snapshots.append(snapshot)
        return self.numbered[id(snapshot)]


class PlainData:
    """Numbers without flags, in units that are written and read together: [units, elements]."""

    def __init__(self, name: str, rank: int, values: npt.NDArray[np.generic]) -> None:
        self.name, self.rank, self.values = name, rank, values
        self.writer = np.full(len(values), NOBODY, dtype=np.int64)
        self.tick = np.zeros(len(values), dtype=np.int32)
        self.readers: dict[int, Clock] = {}

    def read(self, agent: Agent, at: Indices, *, remember: bool = True) -> npt.NDArray[np.generic]:
        """Values of units, which must be visible. remember: whether they must not be written again
        before this is known to be done.
        """
        writers = self.writer[at]
        ticks = self.tick[at]
        known = (writers == NOBODY) | (agent.seen[writers] >= ticks) | (writers == agent.number)
        if not known.all():
            nth = int(np.argmin(known))
            raise described(
                f"{agent} reads {self.name} {int(at[nth])} of rank {self.rank}, which agent "
                f"{int(writers[nth])} wrote without a fence or a path to it",
                expected="plain data to be visible to their readers",
            )
        if remember:
            last = self.readers.setdefault(agent.number, np.zeros(len(self.values), dtype=np.int32))
            last[at] = agent.tick()
        return self.values[at]

    def apply(self, store: PendingStore) -> None:
        """Makes a store visible. CheckError where its writer can't know that a reader, or another
        writer, is done.
        """
        for number, last in self.readers.items():
            late = last[store.at] > store.snapshot.done[number]
            if number != store.writer.number and late.any():
                raise described(
                    f"{store.writer} writes {self.name} of rank {self.rank} and can't know that "
                    f"agent {number} has read it",
                    expected="a path from every reader to the writer",
                )
        others = self.writer[store.at]
        late = (others != NOBODY) & (others != store.writer.number)
        if (self.tick[store.at][late] > store.snapshot.done[others[late]]).any():
            raise described(
                f"{store.writer} and others write {self.name} of rank {self.rank}",
                expected="a path from one writer to the next",
            )
        self.values[store.at] = store.values
        self.writer[store.at] = store.writer.number
        self.tick[store.at] = store.tick


class KeptNumbers:
    """What SMs keep for themselves: each element is one SM's."""

    def __init__(self, rank: int, num: int) -> None:
        self.rank = rank
        self.values: Floats = np.full(max(num, 1), np.nan, dtype=np.float32)
        self.owner = np.full(max(num, 1), NOBODY, dtype=np.int64)

    def require(self, sm: int, at: Indices, doing: str) -> None:
        other = (self.owner[at] != sm) & ((doing == "reads") | (self.owner[at] != NOBODY))
        if other.any():
            nth = int(np.argmax(other))
            owner = int(self.owner[at[nth]])
            raise described(
                f"rank {self.rank}, SM {sm} {doing} kept element {int(at[nth])} of "
                f"{'SM ' + str(owner) if owner >= 0 else 'nobody'}",
                expected="each SM to use elements of its own",
            )

    def load(self, sm: int, at: Indices, wanted: npt.NDArray[np.bool_]) -> Floats:
        """Elements where wanted, zeros elsewhere."""
        self.require(sm, at[wanted], "reads")
        found: Floats = np.zeros(len(at), dtype=np.float32)
        found[wanted] = self.values[at[wanted]]
        return found

    def store(self, sm: int, at: Indices, values: Floats, wanted: npt.NDArray[np.bool_]) -> None:
        self.require(sm, at[wanted], "writes")
        self.owner[at[wanted]] = sm
        self.values[at[wanted]] = values[wanted]
