"""Where the time of a persistent kernel went: the spans of its timeline as a table.

In: the spans of kernels/hopper/timeline.py and kernels/records/timeline.py: tasks named by their
ops, "layers.3.q", and followed by their parts, the first of which is a wait. Out: text. Ops whose
names differ by a number between dots are those of equal layers.

`summarise` is for decode steps. An op of a layer ends with its last task, and what it adds to the
step is the time since the last task of the op before it: `arrive` until the last of its tasks has
its inputs, `work` from then on. The other columns are medians over tasks, which overlap with other
ops. `summarise_sms` is for programs of any shape: how SMs spent a launch.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from distmega.errors import counted
from distmega.trace_file import Span

IDLE_US = 1.0
"""Tasks without parts that are shorter had nothing to do."""


@dataclass(slots=True)
class _Op:
    """The tasks of one op of one layer of one step on one rank, times in microseconds."""

    first_start: float = float("inf")
    last_ready: float = 0.0
    last_end: float = 0.0
    parts: list[tuple[float, ...]] = field(default_factory=list)

    def add(self, task: Span, parts: list[Span]) -> None:
        """One more task."""
        end = task.start_us + task.duration_us
        self.first_start = min(self.first_start, task.start_us)
        self.last_end = max(self.last_end, end)
        if parts:
            self.last_ready = max(self.last_ready, parts[1].start_us)
            wait, *others = (part.duration_us for part in parts)
            self.parts.append((wait, sum(others[:-1]), others[-1]))


@dataclass(frozen=True, slots=True)
class _Added:
    """What an op adds to its step: time until its inputs are there, and from then on."""

    arrive_us: float
    work_us: float
    op: _Op


def summarise(spans: Iterable[Span]) -> str:
    """The table: a row an op, medians over layers, steps and ranks; a line with the whole step."""
    steps: dict[tuple[str, int], dict[str, _Op]] = defaultdict(lambda: defaultdict(_Op))
    for task, parts in _tasks(spans):
        if parts or task.duration_us > IDLE_US:
            steps[task.process, int(task.args["step"])][task.name].add(task, parts)
    rows, totals = defaultdict[str, list[_Added]](list), list[float]()
    for ops in steps.values():
        order = sorted(ops.items(), key=lambda item: item[1].last_end)
        totals.append(order[-1][1].last_end - min(op.first_start for op in ops.values()))
        for (_, before), (name, op) in pairwise(order):
            ready = max(op.last_ready, before.last_end)
            added = _Added(ready - before.last_end, op.last_end - ready, op)
            rows[_of_all_layers(name)].append(added)
    width = max(map(len, rows))
    text = [f"us: {'op':{width}}  a step  arrive    work | a task: wait   first    rest"]
    text += [_row(f"{name:{width}}", found, len(steps)) for name, found in rows.items()]
    text.append(
        f"a step: {median(totals):.1f} us (stamps included), {counted(len(totals), 'step')}"
    )
    return "\n".join(text)


@dataclass(slots=True, kw_only=True)
class TaskSums:
    """Tasks of one sort, summed over SMs. name: of their op in all layers; opcode, spec: of their
    records, "" and -1 for a kernel of rows. most_work_us: of the longest.
    """

    name: str
    opcode: str
    spec: int
    num_tasks: int = 0
    wait_us: float = 0.0
    work_us: float = 0.0
    most_work_us: float = 0.0

    def add(self, wait_us: float, work_us: float) -> None:
        """One more task."""
        self.num_tasks += 1
        self.wait_us += wait_us
        self.work_us += work_us
        self.most_work_us = max(self.most_work_us, work_us)


def sum_tasks(spans: Iterable[Span], *, by_op: bool = True) -> list[TaskSums]:
    """The tasks by op, opcode and spec, the most work first; by_op=False: by opcode and spec, the
    names "".
    """
    found: dict[tuple[str, str, int], TaskSums] = {}
    for task, parts in _tasks(spans):
        name = _of_all_layers(task.name) if by_op else ""
        key = name, str(task.args.get("opcode", "")), int(task.args.get("spec", -1))
        sums = found.setdefault(key, TaskSums(name=key[0], opcode=key[1], spec=key[2]))
        wait_us = parts[0].duration_us if parts else 0.0
        sums.add(wait_us, task.duration_us - wait_us)
    return sorted(found.values(), key=lambda sums: -sums.work_us)


def summarise_sms(spans: Iterable[Span]) -> str:
    """How all SMs spent the time from the first begin to the last end: tables of tasks by their
    opcode and spec, then by op as well, microseconds summed over SMs; a line with the whole.
    """
    known = list(spans)
    tasks = [task for task, _ in _tasks(known)]
    by_spec, by_op = sum_tasks(known, by_op=False), sum_tasks(known)
    width = max(len("op"), *(len(sums.name) for sums in by_op))
    total_us = max(one.start_us + one.duration_us for one in tasks)
    total_us -= min(one.start_us for one in tasks)
    num_sms = len({(one.process, one.track) for one in tasks})
    wait, work = (
        sum(us) / (total_us * num_sms)
        for us in zip(*((sums.wait_us, sums.work_us) for sums in by_spec), strict=True)
    )
    return "\n".join(
        [
            f"us: {'op':{width}}  opcode       spec   tasks        wait        work   most work",
            *(_sums_row(sums, width) for sums in (*by_spec, *by_op)),
            f"a launch: {total_us:.1f} us (stamps included) on {counted(num_sms, 'SM')}, which wait"
            f" for {wait:.0%} of it, work for {work:.0%}; signals, the next record and its like: "
            f"{1 - wait - work:.0%}",
        ]
    )


def _sums_row(sums: TaskSums, width: int) -> str:
    times = f"{sums.wait_us:12.2f}{sums.work_us:12.2f}{sums.most_work_us:12.2f}"
    name = sums.name or "*"
    return f"    {name:{width}}  {sums.opcode:12} {sums.spec:4}{sums.num_tasks:8}{times}"


def _of_all_layers(name: str) -> str:
    """An op's name, equal for equal layers."""
    return re.sub(r"\.\d+\.", ".*.", name.split()[0])


def _row(name: str, found: Sequence[_Added], num_steps: int) -> str:
    a_step = sum(added.arrive_us + added.work_us for added in found) / num_steps
    arrive = median(added.arrive_us for added in found)
    work = median(added.work_us for added in found)
    tasks = [parts for added in found for parts in added.op.parts]
    each = [median(parts[i] for parts in tasks) for i in range(3)] if tasks else [0.0] * 3
    columns = [f"{value:8.2f}" for value in (a_step, arrive, work, *each)]
    return f"    {name}{''.join(columns[:3])} |    {''.join(columns[3:])}"


def _tasks(spans: Iterable[Span]) -> Iterator[tuple[Span, list[Span]]]:
    """Each task with its parts, which follow it on its track."""
    task, parts = None, list[Span]()
    for span in spans:
        if "step" not in span.args:
            if task and span.track == task.track:
                parts.append(span)
            continue
        if task:
            yield task, parts
        task, parts = span, []
    if task:
        yield task, parts
