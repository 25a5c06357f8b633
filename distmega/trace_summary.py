"""Where the time of decode steps went: the spans of a decode kernel's timeline as a table.

In: the spans of kernels/hopper/timeline.py, tasks named "op layer" and followed by their parts. Out:
text. An op of a layer ends with its last task, and what it adds to the step is the time since the
last task of the op before it: `arrive` until the last of its tasks has its inputs, `work` from then
on. The other columns are medians over tasks, which overlap with other ops.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

from distmega.trace_file import Span


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
            self.parts.append(tuple(part.duration_us for part in parts))


def summarise(spans: Iterable[Span]) -> str:
    """The table: a row an op, medians over layers, steps and ranks; a line with the whole step."""
    ops: dict[tuple[str, int], dict[str, _Op]] = defaultdict(lambda: defaultdict(_Op))
    for task, parts in _tasks(spans):
        if parts or task.duration_us > 1.0 or task.name.startswith(("embed", "combine")):
            ops[task.process, int(task.args["step"])][task.name].add(task, parts)
    rows: dict[str, list[tuple[float, float, _Op]]] = defaultdict(list)
    totals = []
    for found in ops.values():
        order = sorted(found.items(), key=lambda item: item[1].last_end)
        totals.append(order[-1][1].last_end - min(op.first_start for op in found.values()))
        for (_, before), (name, op) in zip(order, order[1:], strict=False):
            ready = max(op.last_ready, before.last_end)
            rows[name.split()[0]].append((ready - before.last_end, op.last_end - ready, op))
    text = ["us: op          a step  arrive    work | a task: wait   first    rest"]
    for name, found_rows in rows.items():
        arrive, work = (median(row[i] for row in found_rows) for i in range(2))
        whole = sum(row[0] + row[1] for row in found_rows) / len(totals)
        tasks = [part for *_, op in found_rows for part in op.parts]
        parts = [median(part[i] for part in tasks) for i in range(3)] if tasks else [0.0] * 3
        columns = "".join(f"{value:8.2f}" for value in (whole, arrive, work))
        text.append(f"    {name:10}{columns} |    " + "".join(f"{value:8.2f}" for value in parts))
    text.append(f"a step: {median(totals):.1f} us (stamps included), {len(totals)} steps")
    return "\n".join(text)


def _tasks(spans: Iterable[Span]) -> Iterator[tuple[Span, list[Span]]]:
    """Each task with its parts, which follow it."""
    task, parts = None, list[Span]()
    for span in spans:
        if "step" not in span.args:
            parts.append(span)
            continue
        if task:
            yield task, parts
        task, parts = span, []
    if task:
        yield task, parts
