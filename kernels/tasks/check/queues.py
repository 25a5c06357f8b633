"""Queue checker: proves that queues of tasks can't deadlock, wait in vain or race.

In: launches of explicit tasks (names, waits, signals, regions) on all ranks. Out: nothing, or a
CheckError that names tasks and ranks.

1. TaskRun: a task may start when the one before it in its queue is done and its counters stand high
   enough. Counters only rise, so if one order of steps gets stuck, every order does.
2. Clocks: what is complete when a task starts, by queues, by launches and by waits. A wait for
   count n is taken to guarantee the first n signals of the run; that is sound if each later signal
   of that counter comes after all of these, or after the wait, which is checked. (Take the first
   wait of a real execution that some later signal let through too early: all waits before it kept
   what they guarantee, so the later signal came after the ones it stood in for.)
3. Races: two tasks that touch an element, one of them writing, must be ordered by the clocks;
   which comes first is for the caller to demand (schedule.py does).

schedule.py lays out a Schedule for it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from distmega.errors import CheckError, counted
from distmega.kernels.tasks.regions import Region, regions_meet

Ints = npt.NDArray[np.int64]
Clock = npt.NDArray[np.int16] | npt.NDArray[np.int32]
EventKey = tuple[int, int]
"""(rank, event): a counter in that rank's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRegion:
    """A region of a tensor in one rank's memory."""

    rank: int
    tensor: str
    region: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedTask:
    """A task as the checker sees it. waits: (event of its own rank, count to reach, all launches
    counted); signals: (rank, event) to add one to.
    """

    name: str
    waits: tuple[tuple[int, int], ...] = ()
    signals: tuple[EventKey, ...] = ()
    reads: tuple[MemoryRegion, ...] = ()
    writes: tuple[MemoryRegion, ...] = ()


Queues = Sequence[Sequence[CheckedTask]]
"""The queues of one rank in one launch, one an SM."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskRun:
    """All tasks of all launches, numbered by launch, rank, queue and place.

    queue: numbered over all ranks; position: place in the queue over all launches. clocks: for each
    task and queue, how many tasks of the queue are known to be complete when the task starts.
    """

    tasks: tuple[CheckedTask, ...]
    rank: tuple[int, ...]
    queue: Ints
    position: Ints
    clocks: Clock

    def locate(self, task: int) -> str:
        """Name, rank and queue of a task, for messages."""
        return f"{self.tasks[task].name!r} (rank {self.rank[task]}, queue {self.queue[task]})"


def check_queues(launches: Sequence[Sequence[Queues]]) -> None:
    """Checks launches[i][rank]: a rank's queues start when its queues of launch i - 1 are done, and
    know nothing of other ranks but through signals. Raises CheckError.
    """
    run = run_queues(launches)
    touched: dict[tuple[int, str], list[tuple[int, Region, bool]]] = defaultdict(list)
    for number, task in enumerate(run.tasks):
        for memories, write in ((task.reads, False), (task.writes, True)):
            for memory in memories:
                touched[memory.rank, memory.tensor].append((number, memory.region, write))
    for (rank, tensor), found in touched.items():
        for nth, (later, region, write) in enumerate(found):
            for earlier, other, wrote in found[:nth]:
                if earlier != later and (write or wrote) and regions_meet(region, other):
                    pair = np.array([earlier]), np.array([later])
                    check_ordered(run, *pair, f"{tensor!r} of rank {rank}")


def run_queues(launches: Sequence[Sequence[Queues]]) -> TaskRun:
    """Runs the queues to the end and computes clocks; raises CheckError for a deadlock, for waits
    nobody satisfies, for signals beyond what is waited for, and for waits that pass too early.
    """
    return _Runner(launches).finish()


def check_ordered(run: TaskRun, one: Ints, other: Ints, what: str) -> None:
    """Raises CheckError unless each task of `one` is ordered with its partner in `other`."""
    holds = _precedes(run, one, other) | _precedes(run, other, one)
    if not holds.all():
        at = int(np.argmin(holds))
        raise CheckError(
            f"race on {what}: {run.locate(int(one[at]))} need not come before "
            f"{run.locate(int(other[at]))}",
            expected="a chain of queues, signals and waits from the one to the other",
            remedy="make the later task wait for an event of the earlier",
        )


def _precedes(run: TaskRun, first: Ints, then: Ints) -> npt.NDArray[np.bool_]:
    known: npt.NDArray[np.bool_] = run.clocks[then, run.queue[first]] > run.position[first]
    return known


class _Runner:
    """State of a run: heads of queues, counters, and who is blocked on which counter."""

    def __init__(self, launches: Sequence[Sequence[Queues]]) -> None:
        self.num_ranks = max((len(ranks) for ranks in launches), default=0)
        self.width = max((len(queues) for ranks in launches for queues in ranks), default=0)
        self.num_queues = self.num_ranks * self.width
        self.tasks: list[CheckedTask] = []
        self.rank: list[int] = []
        self.queue: list[int] = []
        self.position: list[int] = []
        self.lists = [self._number(ranks) for ranks in launches]
        self.num_done = 0
        self.short = max(self.position, default=0) + 1 < 2**15
        self.clocks: Clock = self._zeros(len(self.tasks), self.num_queues)
        self.known: Clock = self._zeros(self.num_queues, self.num_queues)
        self.heads = [0] * self.num_queues
        self.launch = [0] * self.num_ranks
        self.left = [self._size(rank) for rank in range(self.num_ranks)]
        self.counter: dict[EventKey, int] = defaultdict(int)
        self.heard: dict[EventKey, Clock] = {}
        self.snapshot: dict[tuple[EventKey, int], Clock] = {}
        self.blocked: dict[EventKey, list[int]] = defaultdict(list)
        self.triggers: dict[EventKey, list[int]] = defaultdict(list)
        self.waiters: dict[EventKey, dict[int, list[int]]] = defaultdict(dict)
        for number, task in enumerate(self.tasks):
            for event, count in task.waits:
                key = (self.rank[number], event)
                self.waiters[key].setdefault(count, []).append(number)

    def _number(self, ranks: Sequence[Queues]) -> list[list[int]]:
        """Numbers the tasks of one launch; gives the numbers in each queue of all ranks."""
        lists: list[list[int]] = [[] for _ in range(self.num_queues)]
        lengths: dict[int, int] = defaultdict(int)
        for queue in self.queue:
            lengths[queue] += 1
        for rank, queues in enumerate(ranks):
            for queue, tasks in enumerate(queues, start=rank * self.width):
                lists[queue] = list(range(len(self.tasks), len(self.tasks) + len(tasks)))
                self.tasks += tasks
                self.rank += [rank] * len(tasks)
                self.queue += [queue] * len(tasks)
                self.position += range(lengths[queue], lengths[queue] + len(tasks))
        return lists

    def _zeros(self, *shape: int) -> Clock:
        """Clocks in half the memory where queues are short enough."""
        return np.zeros(shape, dtype=np.int16) if self.short else np.zeros(shape, dtype=np.int32)

    def finish(self) -> TaskRun:
        """Runs all there is; checks counters against waits."""
        self._check_counts()
        ready = list(range(self.num_queues))
        for rank in range(self.num_ranks):
            ready += self._next_launch(rank)
        while ready:
            ready += self._advance(ready.pop())
        if self.num_done < len(self.tasks):
            raise self._deadlock()
        self._check_early()
        return self._result()

    def _result(self) -> TaskRun:
        return TaskRun(
            tasks=tuple(self.tasks),
            rank=tuple(self.rank),
            queue=np.array(self.queue, dtype=np.int64),
            position=np.array(self.position, dtype=np.int64),
            clocks=self.clocks,
        )

    def _locate(self, task: int) -> str:
        return self._result().locate(task)

    def _size(self, rank: int) -> int:
        lists = self.lists[self.launch[rank]] if self.launch[rank] < len(self.lists) else []
        return sum(map(len, lists[rank * self.width : (rank + 1) * self.width]))

    def _next_launch(self, rank: int) -> Iterable[int]:
        """Moves a rank on while its launch is done; gives its queues."""
        mine = range(rank * self.width, (rank + 1) * self.width)
        while self.left[rank] == 0 and self.launch[rank] < len(self.lists):
            self.launch[rank] += 1
            self.left[rank] = self._size(rank)
            for queue in mine:
                self.heads[queue] = 0
            self.known[mine] = self.known[mine].max(axis=0, initial=0)
        return mine

    def _advance(self, queue: int) -> list[int]:
        """Runs one queue until it blocks or ends; gives the queues that may go on because of it."""
        rank = queue // self.width
        woken: list[int] = []
        while self.launch[rank] < len(self.lists):
            tasks = self.lists[self.launch[rank]][queue]
            if self.heads[queue] >= len(tasks):
                break
            number = tasks[self.heads[queue]]
            missing = self._missing(number)
            if missing is not None:
                self.blocked[missing].append(queue)
                break
            self._step(number, queue, woken)
            self.left[rank] -= 1
            if self.left[rank] == 0:
                woken += self._next_launch(rank)
        return woken

    def _missing(self, number: int) -> EventKey | None:
        rank = self.rank[number]
        for event, count in self.tasks[number].waits:
            if self.counter[rank, event] < count:
                return rank, event
        return None

    def _step(self, number: int, queue: int, woken: list[int]) -> None:
        task, rank, known = self.tasks[number], self.rank[number], self.known[queue]
        for event, count in task.waits:
            np.maximum(known, self.snapshot[(rank, event), count], out=known)
        self.clocks[number] = known
        self.num_done += 1
        self.heads[queue] += 1
        known[queue] = self.position[number] + 1
        for key in task.signals:
            self.counter[key] += 1
            self.triggers[key].append(number)
            heard = self.heard.setdefault(key, self._zeros(self.num_queues))
            np.maximum(heard, known, out=heard)
            if self.counter[key] in self.waiters[key]:
                self.snapshot[key, self.counter[key]] = heard.copy()
                woken += self.blocked.pop(key, [])

    def _check_counts(self) -> None:
        """Every counter must be able to reach what is waited for, and no more than that."""
        signalled: dict[EventKey, int] = defaultdict(int)
        source: dict[EventKey, int] = {}
        for number, task in enumerate(self.tasks):
            for key in task.signals:
                signalled[key] += 1
                source[key] = number
        for key, counts in self.waiters.items():
            if max(counts) > signalled[key]:
                raise CheckError(
                    f"{self._locate(counts[max(counts)][0])} waits for"
                    f" {counted(max(counts), 'signal')} of event {key[1]}",
                    expected=f"at most {signalled[key]}, which is all that rank {key[0]} gets",
                    remedy="correct the count, or add the missing signal",
                )
        for key, total in signalled.items():
            most = max(self.waiters[key]) if self.waiters.get(key) else 0
            if total > most:
                raise CheckError(
                    f"event {key[1]} of rank {key[0]} gets {counted(total, 'signal')}, one of them"
                    f" from {self._locate(source[key])}",
                    expected=f"{most}, the most that is waited for",
                    remedy="correct the count, or drop the signal",
                )

    def _check_early(self) -> None:
        """No signal may let a wait pass in place of one that the wait is meant for."""
        for key, triggers in self.triggers.items():
            for count, waiters in self.waiters[key].items():
                if count == len(triggers):
                    continue
                needed = self._zeros(self.num_queues)
                for number in triggers[:count]:
                    queue = self.queue[number]
                    needed[queue] = max(needed[queue], self.position[number] + 1)
                later = np.array(triggers[count:])
                known = self.clocks[later]
                early = (known < needed).any(axis=1)
                for waiter in waiters:
                    at = self.queue[waiter]
                    early &= known[:, at] <= self.position[waiter]
                if early.any():
                    raise CheckError(
                        f"a signal of {self._locate(int(later[early][0]))} can let "
                        f"{self._locate(waiters[0])} pass before the {count} it waits for",
                        expected="signals of one counter in the order of launches",
                        remedy="give each source rank a counter of its own",
                    )

    def _deadlock(self) -> CheckError:
        """Follows who owes whom from a blocked task until a task comes again."""
        owed: dict[EventKey, int] = {}
        done = {number for triggers in self.triggers.values() for number in triggers}
        for number, task in enumerate(self.tasks):
            if number not in done:
                for key in task.signals:
                    owed.setdefault(key, number)
        number = next(n for n in range(len(self.tasks)) if self._is_blocked(n))
        path: list[int] = []
        while number not in path:
            path.append(number)
            missing = self._missing(number)
            assert missing is not None, "only blocked tasks are followed"
            number = self._blocker(owed[missing])
        cycle = [*path[path.index(number) :], number]
        parts = []
        for waiting, head in pairwise(cycle):
            missing = self._missing(waiting)
            assert missing is not None, "only blocked tasks are followed"
            owing = owed[missing]
            behind = "" if owing == head else f", which stands behind {self._locate(head)}"
            waits = f"{self._locate(waiting)} waits for event {missing[1]}"
            parts.append(f"{waits} of {self._locate(owing)}{behind}")
        return CheckError(
            f"deadlock: {'; '.join(parts)}",
            expected="queues in an order that the tasks of all ranks can follow",
            remedy="put producers before consumers in every queue",
        )

    def _is_blocked(self, number: int) -> bool:
        queue = self.queue[number]
        launch = self.launch[self.rank[number]]
        tasks = self.lists[launch][queue] if launch < len(self.lists) else []
        return self.heads[queue] < len(tasks) and tasks[self.heads[queue]] == number

    def _blocker(self, number: int) -> int:
        """The blocked head of a queue that must move before a task can run."""
        rank, queue = self.rank[number], self.queue[number]
        tasks = self.lists[self.launch[rank]][queue]
        if number in tasks:
            return tasks[self.heads[queue]]
        return next(
            n for n in range(len(self.tasks)) if self.rank[n] == rank and self._is_blocked(n)
        )
