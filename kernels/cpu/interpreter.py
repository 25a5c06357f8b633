"""Interpreter: runs the encoded queues of a rank on virtual SMs, in any order that the events
allow.

In: encoded words, the rank's memory, and peers. Out: the effect of a launch. Virtual SMs share one
thread; a step executes the next instruction of an SM whose waits are met. `Order` decides which SM:
round robin, or a seeded choice that lets SMs race ahead of each other. Events are int32 counters
that only grow: in launch (epoch) e an event is met at e * count. When no SM can go on, the counters
are polled, since peers may be running, and after `timeout_s` a HangError says who waits for what
and who owes it. `interpret_ranks` runs all ranks of a mesh in one thread, and so finds hangs that
depend on their speeds. Next on the walk: megakernel.py.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from distmega.errors import HangError, RankFailure
from distmega.kernels.cpu.peer import Peers
from distmega.kernels.isa.encoding import Encoded, Header, Words, unpack
from distmega.kernels.isa.events import name_task, tasks_signalling
from distmega.kernels.isa.memory import RankMemory
from distmega.kernels.isa.opcodes import ExtraOperand, Instruction, touches_peers
from distmega.kernels.isa.reference import Run, bind

SPIN_POLLS = 100
SLEEP_S = 50e-6
"""Polls of the counters that only yield the CPU, before each further one sleeps this long."""

MAX_REPORTED = 8
"""Blocked SMs and owing tasks that a HangError lists."""


class WaitFor(NamedTuple):
    """A wait, resolved: every counter at `positions` has to reach epoch * count; `sources` are the
    ranks that count there.
    """

    event: int
    triggers: int
    positions: tuple[int, ...]
    sources: tuple[int, ...]


class BoundInstruction(NamedTuple):
    """An instruction of a queue, bound: what runs in launches of each parity, and the counters it
    adds to.
    """

    waits: tuple[WaitFor, ...]
    runs: tuple[Run, ...]
    signals: tuple[tuple[memoryview, int], ...]
    group: int
    task: int


class Order:
    """Chooses SMs, or ranks: in turn without a seed, else at random, with a bias that also samples
    from the seed.
    """

    def __init__(self, seed: int | None) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._stickiness = self._random.choice((0.0, 0.5, 0.95)) if self._random else 1.0
        self._last = 0

    def candidates(self, num: int) -> Sequence[int]:
        """Numbers below `num` in the order to try: the first that can go on does."""
        if self._random is None:
            return [*range(self._last, num), *range(min(self._last, num))]
        order = self._random.sample(range(num), num)
        if self._last < num and self._random.random() < self._stickiness:
            order.insert(0, self._last)
        return order

    def chose(self, choice: int) -> None:
        """Tells what went on."""
        self._last = choice


class RankInterpreter:
    """One rank's queues, bound to its memory. `memories`: one for each copy of the peer arena, used
    in turn by launches.
    """

    def __init__(
        self,
        encoded: Encoded,
        *,
        rank: int,
        teams: Sequence[Sequence[int]],
        memories: Sequence[RankMemory],
        peers: Peers,
        seed: int | None = None,
    ) -> None:
        """teams: for each mesh axis, the ranks of this rank's team, in order."""
        self.rank = rank
        self.epoch = 0
        self._encoded = encoded
        self._teams = teams
        self._peers = peers
        self._counters = peers.counters[rank]
        self._order = Order(seed)
        self._queues = [
            self._bind_queue(queue[:length], memories)
            for queue, length in zip(encoded.queues, encoded.lengths.tolist(), strict=True)
        ]
        self._next = list(map(len, self._queues))
        self._num_left = 0

    @property
    def done(self) -> bool:
        """Whether the current launch has run to its end."""
        return self._num_left == 0

    def reseed(self, seed: int | None) -> None:
        """From the next step on, interleave SMs at random as `seed` says, or in turn."""
        self._order = Order(seed)

    def start(self) -> None:
        """Begins the next launch. RankFailure after one that failed, where peers counted on it."""
        if not self.done:
            raise RankFailure(
                f"a launch on rank {self.rank} after one that failed",
                expected="launches that end on all ranks of the team",
                remedy="compile the program again, on all ranks",
            )
        self.epoch += 1
        self._next = [0] * len(self._queues)
        self._num_left = sum(map(len, self._queues))

    def step(self) -> bool:
        """Executes one instruction, if some SM can go on; says whether one could."""
        for sm in self._order.candidates(len(self._queues)):
            at = self._next[sm]
            if at < len(self._queues[sm]) and self._met(self._queues[sm][at]):
                self._execute(sm)
                self._order.chose(sm)
                return True
        return False

    def run(self, timeout_s: float) -> None:
        """Runs the started launch to its end; HangError if nothing can go on for `timeout_s`."""
        try:
            while not self.done:
                if not self.step():
                    self._await_progress(timeout_s)
        except Exception:
            if len(self._peers.lanes) == 1:
                self._abandon()
            raise

    def _abandon(self) -> None:
        """Ends a launch in which an instruction failed: counts the others as if they had run, so
        that the next launch finds the counters as it must.
        """
        for sm, queue in enumerate(self._queues):
            for step in queue[self._next[sm] :]:
                self._signal_events(step)
            self._next[sm] = len(queue)
        self._num_left = 0

    def blocked(self) -> HangError:
        """What every SM waits for, and who owes it."""
        lines = []
        for sm, (at, queue) in enumerate(zip(self._next, self._queues, strict=True)):
            if at < len(queue):
                lines.append(self._describe(sm, queue[at]))
        more = f" and {len(lines) - MAX_REPORTED} more" if len(lines) > MAX_REPORTED else ""
        return HangError(
            "; ".join(lines[:MAX_REPORTED]) + more,
            expected="every wait to be met by the tasks that owe it",
            remedy="look at the ranks and tasks that owe; a dead rank stops its whole team",
        )

    def _bind_queue(self, records: Words, memories: Sequence[RankMemory]) -> list[BoundInstruction]:
        """Records in order; operands belong to the instruction behind them."""
        steps: list[BoundInstruction] = []
        operands: list[ExtraOperand] = []
        for record in records:
            header, instruction = unpack(record)
            steps.append(self._bind(header, instruction, operands, memories))
            operands = [*operands, instruction] if isinstance(instruction, ExtraOperand) else []
        return steps

    def _bind(
        self,
        header: Header,
        instruction: Instruction,
        operands: Sequence[ExtraOperand],
        memories: Sequence[RankMemory],
    ) -> BoundInstruction:
        others = () if isinstance(instruction, ExtraOperand) else operands
        used = memories if any(map(touches_peers, (instruction, *others))) else memories[:1]
        return BoundInstruction(
            waits=tuple(
                map(self._wait, self._rows(self._encoded.waits, header.wait, header.num_waits))
            ),
            runs=tuple(bind(instruction, memory, others) for memory in used),
            signals=tuple(
                position
                for row in self._rows(self._encoded.signals, header.signal, header.num_signals)
                for position in self._signal(row)
            ),
            group=header.group,
            task=header.task,
        )

    def _rows(self, table: Words, start: int, num: int) -> list[list[int]]:
        rows: list[list[int]] = table[start : start + num].tolist()
        return rows

    def _ranks(self, axis: int) -> Sequence[int]:
        return (self.rank,) if axis < 0 else self._teams[axis]

    def _position(self, event: int, source: int) -> int:
        return event * len(self._peers.lanes) + self._peers.lanes[source]

    def _wait(self, row: Sequence[int]) -> WaitFor:
        event, count, axis = row
        sources = tuple(self._ranks(axis))
        positions = tuple(self._position(event, source) for source in sources)
        return WaitFor(event, count, positions, sources)

    def _signal(self, row: Sequence[int]) -> list[tuple[memoryview, int]]:
        event, axis = row
        position = self._position(event, self.rank)
        return [(self._peers.counters[rank], position) for rank in self._ranks(axis)]

    def _met(self, step: BoundInstruction) -> bool:
        counters, epoch = self._counters, self.epoch
        for wait in step.waits:
            target = epoch * wait.triggers
            for position in wait.positions:
                if counters[position] < target:
                    return False
        return True

    def _execute(self, sm: int) -> None:
        step = self._queues[sm][self._next[sm]]
        step.runs[self.epoch % len(step.runs)]()
        self._signal_events(step)
        self._next[sm] += 1
        self._num_left -= 1

    @staticmethod
    def _signal_events(step: BoundInstruction) -> None:
        for counters, position in step.signals:
            counters[position] += 1

    def _await_progress(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        num_polls = 0
        while not any(self._met(step) for step in self._heads()):
            num_polls += 1
            if num_polls <= SPIN_POLLS:
                os.sched_yield()
                continue
            if time.monotonic() > deadline:
                raise self.blocked()
            time.sleep(SLEEP_S)

    def _heads(self) -> list[BoundInstruction]:
        return [
            queue[at] for at, queue in zip(self._next, self._queues, strict=True) if at < len(queue)
        ]

    def _describe(self, sm: int, step: BoundInstruction) -> str:
        parts = []
        for wait in step.waits:
            target = self.epoch * wait.triggers
            for position, source in zip(wait.positions, wait.sources, strict=True):
                if (count := self._counters[position]) < target:
                    parts.append(
                        f"event {wait.event}, at {count} of {target} from rank {source}, "
                        f"owed by {self._owing(wait.event, source)}"
                    )
        task = name_task(self._encoded, step.group, step.task)
        return f"rank {self.rank} SM {sm}: {task} waits for {', '.join(parts)}"

    def _owing(self, event: int, source: int) -> str:
        """Tasks that signal the event; on this rank, those that have not run. All ranks have the
        same queues.
        """
        owing = [
            f"{one.name} on SM {one.sm}"
            for one in tasks_signalling(self._encoded, event)
            if source != self.rank or one.position >= self._next[one.sm]
        ]
        more = f" and {len(owing) - MAX_REPORTED} more" if len(owing) > MAX_REPORTED else ""
        return f"rank {source}: {', '.join(owing[:MAX_REPORTED]) or 'no task that is left'}{more}"


def interpret_ranks(
    ranks: Sequence[RankInterpreter],
    *,
    num_launches: int = 1,
    seed: int | None = None,
    before: Callable[[int, int], None] = lambda rank, launch: None,
    after: Callable[[int, int], None] = lambda rank, launch: None,
) -> None:
    """Runs `num_launches` launches on all ranks in this thread, each rank as far ahead of the
    others as events allow.

    before, after: called with (place in `ranks`, launch from 0) around each launch of a rank.
    Raises HangError once no rank can go on.
    """
    order = Order(seed)
    launched = [0] * len(ranks)

    def advance(position: int) -> bool:
        rank = ranks[position]
        if not rank.done:
            moved = rank.step()
        elif moved := launched[position] < num_launches:
            before(position, launched[position])
            rank.start()
            launched[position] += 1
        if moved and rank.done:
            after(position, launched[position] - 1)
        return moved

    while True:
        moved = next(
            (position for position in order.candidates(len(ranks)) if advance(position)), None
        )
        if moved is None:
            break
        order.chose(moved)
    for rank in ranks:
        if not rank.done:
            raise rank.blocked()
