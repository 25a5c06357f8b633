"""Runs queues on virtual SMs in any order that events allow, and finds races as they happen.

Comes in: Queues, symbols, tensors, a seed. Goes out: the tensors after a launch, and what ran. An
SM looks at what it awaits, then at guards, which it reads from memory as a device would, then
awaits the rest and executes. Of a region it takes the next record off the list that the routing
task wrote; an atomic head says which. Each task that runs must find all that it conflicts with
ended: else a CheckError, even where the values came out right. HangError where nobody can go on.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from distmega.errors import CheckError, HangError, ProgramError, counted
from distmega.hostir.library.torch_types import describe, fits
from distmega.kernels.events.arguments import require
from distmega.kernels.events.graph import EventGraph, EventId, TaskId
from distmega.kernels.events.queues.assign import Drain, Entry, Queues
from distmega.kernels.events.queues.reference import TileReference
from distmega.kernels.events.values import RunTime
from distmega.sharding.layout.mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """What a launch did: tensors by name; tasks in the order in which they ended, with the SM that
    ran each; how many triggers each event got.
    """

    tensors: Mapping[str, Tensor]
    ran: tuple[tuple[TaskId, int], ...]
    triggers: Mapping[EventId, int]

    def tasks(self, op: str) -> list[TaskId]:
        """Those of one op that ran, by number."""
        return sorted(task for task, _ in self.ran if task[0] == op)


def run_queues(
    queues: Queues,
    given: dict[str, Tensor],
    *,
    symbols: Mapping[str, int] | None = None,
    seed: int = 0,
) -> LaunchRecord:
    """One launch on one rank. given: inputs, weights and states by name; states left out are zero.
    symbols: values of those that the graph has. seed: which SM goes on when several can.
    """
    (launch,) = run_ranks(queues, [given], DeviceMesh(rank=1), symbols=symbols, seed=seed)
    return launch


def run_ranks(
    queues: Queues,
    given: Sequence[dict[str, Tensor]],
    mesh: DeviceMesh,
    *,
    symbols: Mapping[str, int] | None = None,
    seed: int = 0,
) -> list[LaunchRecord]:
    """One launch on every rank of a mesh of one axis, each as far ahead of the others as events
    allow. given: of each rank, in mesh order. As run_queues. ProgramError for what doesn't fit the
    program.
    """
    require(queues, Queues, "queues", "what make_queues gives")
    require(given, Sequence, "given", "tensors by name, of each rank")
    require(mesh, DeviceMesh, "mesh", "the mesh that the program was planned for")
    require(seed, int, "seed", "a whole number")
    if any(event.sources == "axis" for event in queues.graph.events):
        raise ProgramError(
            "tasks of an all-gather cut by source, on virtual SMs",
            expected="collectives in one task",
            remedy="leave its rank axis whole",
        )
    teams = {event.ranks for event in queues.graph.events if event.sources == "all"}
    if teams - {len(given)} or len(given) != len(mesh.ranks):
        raise ProgramError(
            f"tensors of {counted(len(given), 'rank')}, a mesh of {len(mesh.ranks)}",
            expected=f"{', '.join(map(str, sorted(teams)))} ranks, as the events are of",
            remedy="give each rank its tensors, on the mesh that the program was planned for",
        )
    for tensors in given:
        _require_given(queues.graph, tensors)
    order = random.Random(seed)
    machines = [
        _Machine(queues, tensors, {} if symbols is None else symbols, order, at)
        for tensors, at in zip(given, mesh.coordinates(), strict=True)
    ]
    for machine in machines:
        machine.team = machines
    left = [machine for machine in machines if not machine.ended]  # of views alone all have
    while left:
        going = next((m for m in order.sample(left, len(left)) if m.step_any()), None)
        if going is None:
            raise left[0].blocked()
        if going.ended:
            left.remove(going)
    return [machine.launch() for machine in machines]


@dataclass(slots=True)
class _Sm:
    """A virtual SM: where it is in its queue, and the task it took off a list."""

    queue: tuple[Entry | Drain, ...]
    at: int = 0
    taken: Entry | None = None


@dataclass(slots=True)
class _List:
    """Records of a region's tasks, and how many were taken."""

    records: list[Entry] = field(default_factory=list)
    written: bool = False
    head: int = 0


class _Machine:
    """The state of one launch."""

    def __init__(
        self,
        queues: Queues,
        given: dict[str, Tensor],
        symbols: Mapping[str, int],
        order: random.Random,
        at: Mapping[str, int],
    ) -> None:
        """at: the rank's coordinate."""
        self.queues, self.graph, self.symbols = queues, queues.graph, symbols
        self.graph.running(RunTime(symbols=symbols, starts=_AllRows(self.graph), at=at))
        self.team: list[_Machine] = [self]
        self.memory = TileReference(self.graph, given, at, symbols)
        self.random = order
        self.sms = [_Sm(queue) for queue in queues.sms]
        self.lists = [_List() for _ in queues.regions]
        self.writers = [self.graph.writers[region.starts] for region in queues.regions]
        self.conflicts = self.graph.conflicts
        self.counters: dict[EventId, int] = {}
        self.ran: dict[TaskId, int] = {}

    @property
    def ended(self) -> bool:
        """Whether all queues have run to their ends."""
        return all(sm.at >= len(sm.queue) for sm in self.sms)

    def launch(self) -> LaunchRecord:
        """What was done."""
        return LaunchRecord(
            tensors=self.memory.tensors, ran=tuple(self.ran.items()), triggers=self.counters
        )

    def step_any(self) -> bool:
        """Some SM goes on, if one can."""
        order = self.random.sample(range(len(self.sms)), len(self.sms))
        return any(self.step(number) for number in order)

    def step(self, number: int) -> bool:
        """One SM goes on by one task, record or guard, if it can."""
        sm = self.sms[number]
        if sm.at >= len(sm.queue):
            return False
        entry = sm.taken or sm.queue[sm.at]
        if isinstance(entry, Drain):
            return self.drain(sm, entry)
        if not all(map(self.complete, entry.first)):
            return False
        runs = sm.taken is not None or self.graph.runs(entry.task, self.known(entry.task))
        if runs:
            if not all(map(self.complete, entry.waits)):
                return False
            self.execute(entry.task, number)
        if sm.taken is None:
            sm.at += 1
        sm.taken = None
        return True

    def drain(self, sm: _Sm, entry: Drain) -> bool:
        """Takes the next record, or leaves the region when there is none."""
        if not all(map(self.complete, entry.first)):
            return False
        here = self.lists[entry.region]
        if not here.written:
            raise CheckError(
                f"the list of region {entry.region} is read before it is written",
                expected="a wait for the task that routes",
                remedy="await its event first",
            )
        if here.head == len(here.records):
            sm.at += 1
            return True
        sm.taken = here.records[here.head]
        here.head += 1
        return True

    def execute(self, task: TaskId, sm: int) -> None:
        """Runs a task and signals its events, after looking for races."""
        known = self.known(task)
        for other in self.conflicts.get(task, ()):
            if other not in self.ran and self.graph.runs(other, self.known(other)):
                raise CheckError(
                    f"race: {task[0]}[{task[1]}] ran before {other[0]}[{other[1]}]",
                    expected="what it reads to be written, what it overwrites to be read",
                    remedy="let it await an event of the earlier task",
                )
        assert self.graph.runs(task, known), task
        self.look_for_remote_races(task)
        self.memory.run(task, [rank.memory for rank in self.team])
        self.ran[task] = sm
        for event in self.graph.triggers.get(task, ()):
            own = self.graph.sources_of[event[0]] == "own"
            for rank in [self] if own else self.team:
                rank.counters[event] = rank.counters.get(event, 0) + 1
        for region, writers in enumerate(self.writers):
            if task in writers and self.ran.keys() >= {*writers}:
                self.write_list(region)

    def look_for_remote_races(self, task: TaskId) -> None:
        """A collective must find ended on every rank what it reads there. Which tasks run there
        follows from the starts that this rank knows, for all route alike.
        """
        for event in self.graph.waits.get(task, ()):
            for rank in self.team if self.graph.sources_of[event[0]] == "all" else ():
                for other in self.graph.producers[event]:
                    there = replace(self.known(other), at=rank.memory.at)
                    if other not in rank.ran and self.graph.runs(other, there):
                        raise CheckError(
                            f"race: {task[0]}[{task[1]}] ran before {other[0]}[{other[1]}] of"
                            " another rank",
                            expected="what it reads there to be written",
                            remedy="let it await the event of all ranks",
                        )

    def write_list(self, region: int) -> None:
        """The last task that routes writes the records of all tasks that run."""
        stated, here = self.queues.regions[region], self.lists[region]
        here.records = [
            entry for entry in stated.entries if self.graph.runs(entry.task, self.known(entry.task))
        ]
        here.written = True
        if len(here.records) > stated.capacity:
            raise CheckError(
                f"{counted(len(here.records), 'record')} of region {region}",
                expected=f"at most its capacity of {stated.capacity}",
                remedy="look at the starts of its groups, which do not fit its rows",
            )

    def complete(self, event: EventId) -> bool:
        """Whether an event has all its triggers."""
        return self.counters.get(event, 0) >= self.graph.num_triggers(
            event, self.known(None, event)
        )

    def known(self, task: TaskId | None, event: EventId | None = None) -> RunTime:
        """Symbols, and starts as memory holds them; CheckError where these are not yet written."""
        guards = self.graph.guards.get(task, ()) if task else ()
        names = {guard.starts for guard in guards if hasattr(guard, "starts")}
        if event is not None:
            producers = self.graph.producers[event]
            names |= {
                guard.starts
                for producer in producers
                for guard in self.graph.guards.get(producer, ())
                if hasattr(guard, "starts")
            }
        found = {}
        for name in names:
            left = [writer for writer, n in self.graph.writers[name] if (writer, n) not in self.ran]
            if left:
                raise CheckError(
                    f"{name!r} is read before {left[0]!r} has written it",
                    expected="a wait before guards and counts are read",
                    remedy="await its event first",
                )
            found[name] = self.memory.starts(name)
        return RunTime(symbols=self.symbols, starts=found, at=self.memory.at)

    def blocked(self) -> HangError:
        """Who waits for what, and who owes it."""
        lines = []
        for number, sm in enumerate(self.sms):
            if sm.at >= len(sm.queue):
                continue
            entry = sm.taken or sm.queue[sm.at]
            name = "a drain" if isinstance(entry, Drain) else f"{entry.task[0]}[{entry.task[1]}]"
            events = entry.first if isinstance(entry, Drain) else (*entry.first, *entry.waits)
            open_events = [event for event in events if not self.complete(event)]
            owed = [
                f"{task[0]}[{task[1]}]"
                for event in open_events
                for task in self.graph.producers[event]
                if task not in self.ran
            ]
            lines.append(f"SM {number}: {name} waits for {open_events}, owed by {owed[:8]}")
        return HangError(
            "; ".join(lines),
            expected="every wait to be met by tasks that run",
            remedy="look at the tasks that owe",
        )


def _require_given(graph: EventGraph, given: Mapping[str, Tensor]) -> None:
    """ProgramError for an input or weight that is missing, a tensor of another shape or dtype, and
    a name that the program has no input, weight or state of.
    """
    require(given, Mapping, "given", "tensors by name")
    known = {tensor.name: tensor for tensor in graph.program.tensors if tensor.role != "temp"}
    if unknown := [name for name in given if name not in known]:
        raise ProgramError(
            f"a tensor for {unknown[0]!r}",
            expected=f"one of {', '.join(known)}",
            remedy="give inputs, weights and states of the program by name",
        )
    for name, tensor in known.items():
        if name not in given and tensor.role != "state":
            raise ProgramError(
                f"{tensor.role} {name!r} is missing",
                expected=f"a tensor of shape {tensor.shape}",
                remedy="give all inputs and weights by name",
            )
        if name not in given:
            continue
        found = given[name]
        if isinstance(found, Tensor) and found.shape != tensor.shape:
            raise ProgramError(
                f"{tensor.role} {name!r} of shape {tuple(found.shape)}",
                expected=f"{tensor.shape}, as the program has it",
                remedy="give it in full, whatever symbols are",
            )
        if not isinstance(found, Tensor) or not fits(found, tensor):
            raise ProgramError(
                f"{tensor.role} {name!r} given as {describe(found)}",
                expected=f"{tensor.dtype}{list(tensor.shape)}, as the program has it",
                remedy="convert it",
            )


class _AllRows(dict[str, list[int]]):
    """Starts of any name, of groups without rows; only symbols are looked at."""

    def __init__(self, graph: EventGraph) -> None:
        super().__init__()
        tensors = graph.program.tensor_map()
        for grid in graph.grids:
            if grid.rows is not None:
                self[grid.rows.starts] = [0] * tensors[grid.rows.starts].shape[0]
