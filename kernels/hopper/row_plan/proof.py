"""Proof that no flagged word is overwritten before all that wait for it have read it.

In: the queues of a kernel of one row, the same on all of its ranks. Out: nothing, or the first
hazard in words. Polling a flagged word orders that word alone and no other memory, so this is
proven for each word: every reader of it is *done before* the instruction that writes its next
generation. An instruction polls the words of a phase before it writes words of that phase, and an
SM takes instructions in order. So an SM that has read a word of an instruction knows that the reads
of this phase are done, those before it on that SM, and all reads which that SM knew to be done.

SM 0 counts up the state of a launch when it is done, so it must know by then that every other SM,
its loader warp too, has read it.

Two steps are looked at, the second of which stands for all that follow: flags differ, edges do not.
Knowledge is a count of phases for each SM: of the rank itself, and of every one of its peers, which
run the same queues. Reads that an instruction may skip (splits of a short context) count as no
knowledge.
Between launches a rank waits for its own SMs, never for peers. Next on the walk: one_row/runner.py.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.words import RowAttention, RowEmbed
from distmega.kernels.hopper.row_plan.accesses import Read, Write, reads, step_reads, writes
from distmega.kernels.hopper.row_plan.periods import Kind, kind_of, kinds_in_order, shorten
from distmega.kernels.hopper.row_plan.starts import takes_tiles

Clocks = npt.NDArray[np.int32]
"""Counts of phases: [SMs] of one SM's knowledge, or [SMs, SMs] of all."""
PHASES = 2
NUM_STEPS = 2
PART = 64
"""Added to the rank whose words are a part that readers may take alone."""


def find_hazard(queues: RowQueues) -> str:
    """The first word that may be overwritten too early, is waited for in vain or is none of the
    kernel's; "" if none.
    """
    try:
        queues = shorten(queues)
        return _stray(queues) or _Proof(queues).run()
    except CycleError:
        return "SMs take the same ops in different orders"


def _stray(queues: RowQueues) -> str:
    """The first instruction that reads or writes words that the kernel hasn't."""
    words = range(queues.num_words)
    for sm, queue in enumerate(queues.queues):
        for one in queue:
            spans = [read.words for read in reads(one, queues)]
            spans += [write.words for write in writes(one, queues, sm)]
            for span in spans:
                if span and (span[0] not in words or span[-1] not in words):
                    known = f"{span.start} to {span.stop - 1} of {len(words)}"
                    return f"{one.name!r} on SM {sm} has words {known}"
    return ""


def find_late_start(queues: RowQueues) -> str:
    """An SM that may begin a launch after SM 0 has counted up its state; "" if there is none."""
    proof = _Proof(shorten(queues))
    return proof.run_step(0) or proof.late_start(0)


@dataclass(frozen=True, slots=True)
class _Task:
    """An instruction of an SM with what it reads, one object where that is equal, and writes."""

    sm: int
    i: int
    name: str
    reads: tuple[Read, ...]
    writes: tuple[Write, ...]
    given: bool
    """Whether it reads what no instruction writes."""


@dataclass(slots=True)
class _Readers:
    """Who reads words of one generation of a step: ranges that don't overlap, in order, with the
    number of phases that each SM must be past.
    """

    starts: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    needs: list[Clocks] = field(default_factory=list)


class _Proof:
    def __init__(self, queues: RowQueues) -> None:
        self.queues = queues
        self.num_sms = len(queues.queues)
        self.lengths = np.array([PHASES * len(queue) for queue in queues.queues], dtype=np.int32)
        self.rounds = list(self.find_rounds())
        self.readers = self.find_readers()
        self.first_generation, self.last_generation = self.find_generations()
        self.flag = np.zeros(queues.num_words, dtype=np.int64)
        self.writer = np.zeros(queues.num_words, dtype=np.int64)
        """Snapshot and SM of who wrote a word last: snapshot * num_sms + SM."""
        self.of_rank = np.zeros(queues.num_words, dtype=np.int8)
        shape = (self.num_sms, self.num_sms)
        self.own: Clocks = np.zeros(shape, dtype=np.int32)
        self.peer: Clocks = np.zeros(shape, dtype=np.int32)
        self.snapshots: list[tuple[Clocks, Clocks]] = []
        self.known: dict[tuple[tuple[int, int, int], ...], tuple[Clocks, Clocks]] = {}

    def find_rounds(self) -> Iterator[list[_Task]]:
        """Instructions in the order of ops, at most one of an SM in a round."""
        order: dict[Kind, list[_Task]] = {}
        known: dict[tuple[Read, ...], tuple[Read, ...]] = {}
        for sm, queue in enumerate(self.queues.queues):
            for i, one in enumerate(queue):
                polled = tuple(_joined(reads(one, self.queues)))
                task = _Task(
                    sm,
                    i,
                    one.name,
                    known.setdefault(polled, polled),
                    tuple(writes(one, self.queues, sm)),
                    isinstance(one, RowEmbed),
                )
                order.setdefault(kind_of(one), []).append(task)
        for kind in kinds_in_order(self.queues):
            tasks = order[kind]
            rounds: list[list[_Task]] = []
            counts: dict[int, int] = {}
            for task in tasks:
                number = counts[task.sm] = counts.get(task.sm, -1) + 1
                if number == len(rounds):
                    rounds.append([])
                rounds[number].append(task)
            yield from rounds

    def find_readers(self) -> dict[int, _Readers]:
        """Readers of a step by generation, their ranges cut so that none overlap. What an SM polls
        when the next step begins it has read once it is past a phase of that.
        """
        found: dict[int, list[tuple[int, int, int, int]]] = {}
        for read in step_reads(self.queues):
            found[read.generation] = [
                (read.words.start, read.words.stop, sm, int(length) + 1)
                for sm, length in enumerate(self.lengths)
                if length
            ]
        for tasks in self.rounds:
            for task in tasks:
                for read in task.reads:
                    past = PHASES * task.i + read.phase + 1
                    entry = (read.words.start, read.words.stop, task.sm, past)
                    found.setdefault(read.generation, []).append(entry)
        return {key: self.cut(entries) for key, entries in found.items()}

    def cut(self, entries: Sequence[tuple[int, int, int, int]]) -> _Readers:
        found = _Readers()
        edges = sorted({edge for start, stop, _, _ in entries for edge in (start, stop)})
        groups: dict[tuple[int, int], Clocks] = {}
        for start, stop, sm, past in entries:
            need = groups.get((start, stop))
            if need is None:
                need = groups[start, stop] = np.zeros(self.num_sms, dtype=np.int32)
            need[sm] = max(need[sm], past)
        needs: dict[int, Clocks] = {}
        for (start, stop), need in groups.items():
            for edge in edges[bisect_left(edges, start) : bisect_left(edges, stop)]:
                known = needs.get(edge)
                needs[edge] = need if known is None else np.maximum(known, need)
        for start, stop in pairwise(edges):
            if start in needs:
                found.starts.append(start)
                found.stops.append(stop)
                found.needs.append(needs[start])
        return found

    def find_generations(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Of each word: the first generation that it has in a step, and the last."""
        first = np.full(self.queues.num_words, self.queues.num_generations, dtype=np.int64)
        last = np.zeros_like(first)
        for tasks in self.rounds:
            for task in tasks:
                for write in task.writes:
                    words = slice(write.words.start, write.words.stop)
                    first[words] = np.minimum(first[words], write.generation)
                    last[words] = np.maximum(last[words], write.generation)
        return first, last

    def run(self) -> str:
        for step in range(NUM_STEPS):
            hazard = (step and self.begin(step)) or self.run_step(step) or self.late_start(step)
            if hazard:
                return hazard
        return ""

    def run_step(self, step: int) -> str:
        for tasks in self.rounds:
            for phase in range(PHASES):
                hazard = self.take(tasks, phase, step)
                if hazard:
                    return hazard
        return ""

    def late_start(self, step: int) -> str:
        """The first SM that SM 0, once done with a step, can't know to have begun it."""
        known = self.own[0].copy()
        for read in step_reads(self.queues):
            found = self.learnt((read,), step)
            if found is not None:
                np.maximum(known, found[0], out=known)
        for sm, queue in enumerate(self.queues.queues):
            first = 0
            if any(isinstance(one, RowAttention) for one in queue):  # its loader reads it too
                first = next((i for i, one in enumerate(queue) if takes_tiles(one)), len(queue))
            past = PHASES * first + 1
            if queue and (past > self.lengths[sm] or known[sm] < step * self.lengths[sm] + past):
                return f"SM 0 ends a launch before SM {sm} must have begun it"
        return ""

    def begin(self, step: int) -> str:
        """What SMs know when a step begins: who chose the id, or that a launch has ended."""
        chosen = list(step_reads(self.queues))
        if not chosen:
            ended = self.lengths * np.int32(step)
            self.own[:] = np.maximum(self.own.max(axis=0), ended)
            self.peer[:] = self.peer.max(axis=0)
        for read in chosen:
            found = self.learnt((read,), step - 1)
            if found is None:
                return "the choice of the next id waits for ever"
            np.maximum(self.own, found[0], out=self.own)
            np.maximum(self.peer, found[1], out=self.peer)
        return ""

    def take(self, tasks: Sequence[_Task], phase: int, step: int) -> str:
        """What instructions learn from what they read in a phase; checks and does what they write
        then.
        """
        sms = [task.sm for task in tasks]
        own, peer = self.own[sms], self.peer[sms]
        skipped: list[tuple[list[int], Clocks, Clocks]] = []
        waiting: list[int] = []
        for rows in _by_reads(tasks):
            now = tuple(read for read in tasks[rows[0]].reads if read.phase == phase)
            found = self.learnt(tuple(read for read in now if read.always), step)
            if found is None:
                waiting += [row for row in rows if not tasks[row].given]
                continue
            own[rows] = np.maximum(own[rows], found[0])
            peer[rows] = np.maximum(peer[rows], found[1])
            for read in now:
                more = None if read.always else self.learnt((read,), step)
                if more is not None:
                    skipped.append((rows, *more))
        if waiting:
            task = tasks[min(waiting)]
            return f"{task.name!r} on SM {task.sm} waits for ever"
        past = [step * int(self.lengths[t.sm]) + PHASES * t.i + phase + 1 for t in tasks]
        own[range(len(tasks)), sms] = past
        self.own[sms], self.peer[sms] = own, peer
        for rows, mine, theirs in skipped:  # an instruction that writes has read them
            own[rows] = np.maximum(own[rows], mine)
            peer[rows] = np.maximum(peer[rows], theirs)
        hazard = self.check(tasks, phase, step, own, peer)
        if not hazard and any(write.phase == phase for task in tasks for write in task.writes):
            self.publish(tasks, phase, step)
        return hazard

    def publish(self, tasks: Sequence[_Task], phase: int, step: int) -> None:
        snapshot = len(self.snapshots) * self.num_sms
        self.snapshots.append((self.own.copy(), self.peer.copy()))
        for task in tasks:
            for write in task.writes:
                if write.phase == phase:
                    words = slice(write.words.start, write.words.stop)
                    self.flag[words] = self.flag_of(write, step)
                    self.writer[words] = snapshot + task.sm
                    self.of_rank[words] = (write.rank or 0) + PART * write.is_part

    def flag_of(self, access: Read | Write, step: int) -> int:
        return step * self.queues.num_generations + access.generation + 1

    def learnt(self, found: Sequence[Read], step: int) -> tuple[Clocks, Clocks] | None:
        """What the writers of words knew; None if some words are of another generation."""
        key = tuple((read.words.start, read.words.stop, self.flag_of(read, step)) for read in found)
        if key not in self.known:
            ranks_of: dict[int, set[int]] = {}
            for start, stop, flag in key:
                if (self.flag[start:stop] != flag).any():
                    return None
                both = self.writer[start:stop] * (2 * PART) + self.of_rank[start:stop]
                for each in np.unique(both).tolist():
                    ranks_of.setdefault(each // (2 * PART), set()).add(each % (2 * PART))
            self.known[key] = self.knowledge(ranks_of)
        return self.known[key]

    def knowledge(self, ranks_of: Mapping[int, set[int]]) -> tuple[Clocks, Clocks]:
        """Of writers together, each with the ranks on which it wrote: of itself if that is one's
        own, of every peer if it did on all of them. Parts of some ranks alone are one's own on
        these and a peer's on others, so they say nothing.
        """
        own = np.zeros(self.num_sms, dtype=np.int32)
        peer = own.copy()
        for writer, numbers in ranks_of.items():
            parts = {number - PART for number in numbers if number >= PART}
            ranks = {number for number in numbers if number < PART}
            ranks |= parts if len(parts) == self.queues.num_ranks else set()
            snapshot, sm = divmod(writer, self.num_sms)
            mine, theirs = (clocks[sm] for clocks in self.snapshots[snapshot])
            if 0 in ranks:
                np.maximum(own, mine, out=own)
                np.maximum(peer, theirs, out=peer)
            if len(ranks - {0}) == self.queues.num_ranks - 1 > 0:
                np.maximum(peer, mine, out=peer)
                np.maximum(own, theirs, out=own)
        return own, peer

    def check(
        self, tasks: Sequence[_Task], phase: int, step: int, own: Clocks, peer: Clocks
    ) -> str:
        """The first word whose readers of the generation before may not be done."""
        wanted: dict[tuple[int, int, bool], tuple[list[int], Clocks, int]] = {}
        for row, task in enumerate(tasks):
            for write in task.writes:
                if write.phase == phase and write.rank in (None, 0):
                    pushed = write.rank is not None and self.queues.num_ranks > 1
                    for word, at_step, need in self.needs_of(write, step):
                        key = (id(need), at_step, pushed)
                        wanted.setdefault(key, ([], need, word))[0].append(row)
        for (_, at_step, pushed), (rows, need, word) in wanted.items():
            past = np.where(need > 0, need + at_step * self.lengths, 0)
            for clocks in (own, peer) if pushed else (own,):
                late = np.argwhere(clocks[rows] < past)
                if len(late):
                    row, sm = late[0]
                    task, reader = tasks[rows[row]], self.reader_of(int(sm), int(need[sm]))
                    return (
                        f"{task.name!r} on SM {task.sm} overwrites word {word} before {reader} "
                        f"on SM {sm} has read it"
                    )
        return ""

    def reader_of(self, sm: int, need: int) -> str:
        """The instruction of an SM that reads in a phase, or the beginning of the next step."""
        i, queue = (need - 1) // PHASES, self.queues.queues[sm]
        return repr(queue[i].name) if i < len(queue) else "the next step"

    def needs_of(self, write: Write, step: int) -> Iterator[tuple[int, int, Clocks]]:
        """First word, step and needs of who reads the generation that a write ends."""
        generation = write.generation - 1
        if generation < self.first_generation[write.words.start]:
            generation, step = int(self.last_generation[write.words.start]), step - 1
        readers = self.readers.get(generation)
        if step < 0 or readers is None:
            return
        for nth in range(bisect_right(readers.stops, write.words.start), len(readers.starts)):
            if readers.starts[nth] >= write.words.stop:
                break
            yield readers.starts[nth], step, readers.needs[nth]


def _by_reads(tasks: Sequence[_Task]) -> Iterator[list[int]]:
    """Rows of the tasks that read the same, which learn the same of it."""
    found: dict[int, list[int]] = {}
    for row, task in enumerate(tasks):
        found.setdefault(id(task.reads), []).append(row)
    yield from found.values()


def _joined(found: Iterator[Read]) -> Iterator[Read]:
    """Reads, those of adjacent words as one."""
    before: Read | None = None
    for read in found:
        if (
            before is not None
            and before.words.stop == read.words.start
            and (before.generation, before.always, before.phase)
            == (read.generation, read.always, read.phase)
        ):
            words = range(before.words.start, read.words.stop)
            before = Read(
                words=words, generation=read.generation, always=read.always, phase=read.phase
            )
            continue
        if before is not None:
            yield before
        before = read
    if before is not None:
        yield before
