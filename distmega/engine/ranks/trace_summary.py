"""Where the time of decode steps went: the spans of a decode kernel's timeline as a table.

In: the spans of kernels/hopper/timeline.py: tasks named by their ops, "layers.3.q", and followed by
their parts. Out: text. Ops whose names differ by a number between dots are those of equal layers.
An op of a layer ends with its last task, and what it adds to the step is the time since the last
task of the op before it: `arrive` until the last of its tasks has its inputs, `work` from then on.
The other columns are medians over tasks, which overlap with other ops.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

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
            rows[re.sub(r"\.\d+\.", ".*.", name.split()[0])].append(added)
    width = max(map(len, rows))
    text = [f"us: {'op':{width}}  a step  arrive    work | a task: wait   first    rest"]
    text += [_row(f"{name:{width}}", found, len(steps)) for name, found in rows.items()]
    text.append(f"a step: {median(totals):.1f} us (stamps included), {len(totals)} steps")
    return "\n".join(text)


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
