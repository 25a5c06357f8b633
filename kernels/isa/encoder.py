"""Encodes a schedule: from tasks in queues to the words that interpreters and GPU kernels read.

In: a Schedule and the SegmentLayout of its segment. Out: `Encoded`, the same words on every rank.
Groups that differ only in addresses and names (the layers of a model) are lowered once, and share
their records but for the base words. Next on the walk: interpreter.py, which runs the words.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from distmega.errors import CheckError, counted
from distmega.kernels.isa.encoding import (
    SIGNAL_COLUMNS,
    WAIT_COLUMNS,
    WORDS,
    Encoded,
    Header,
    Words,
    pack,
    pack_expression,
    patch_bases,
    write_headers,
)
from distmega.kernels.isa.lowering import lower_group
from distmega.kernels.runtime.arena import ALIGNMENT_BYTES, Operand, SegmentLayout
from distmega.kernels.tasks.types import Schedule, ScheduledTask, TaskGroup, TaskSignal, TaskWait
from distmega.program import expr
from distmega.program.kinds import kind_of
from distmega.program.types import accesses

MeshAxes = Sequence[tuple[str, int]]
"""Name and size of each mesh axis, as DeviceMesh.axes has them."""


class Records(NamedTuple):
    """Records of a group, task after task: those of task t are rows starts[t] to starts[t + 1]."""

    words: Words
    starts: tuple[int, ...]


class Constants:
    """The constant table under construction: each distinct pointwise expression once."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self._starts: dict[str, int] = {}

    def intern(self, text: str) -> int:
        """First word of the program of an expression."""
        if text not in self._starts:
            self._starts[text] = len(self.words)
            self.words += pack_expression(expr.parse(text))
        return self._starts[text]


class EventAxes:
    """Which ranks trigger each event: this rank alone (-1), or all of its team along a mesh
    axis.
    """

    def __init__(self, schedule: Schedule, mesh_axes: MeshAxes) -> None:
        self._mesh_axes = mesh_axes
        groups = schedule.graph.groups
        names = [name for name, _ in mesh_axes]
        self.of_group = [
            names.index(str(group.op.attr("mesh_axis"))) if group.all_ranks else -1
            for group in groups
        ]
        self._of_event: dict[int, int] = {}
        for task in (task for queue in schedule.queues for task in queue):
            for signal in task.signals:
                axis = self.of_group[task.group] if signal.all_ranks else -1
                if self._of_event.setdefault(signal.event, axis) != axis:
                    raise CheckError(
                        f"event {signal.event} is triggered over different teams",
                        expected="triggers from this rank alone, or from one team",
                        remedy="give each producer group events of its own",
                    )

    def wait_row(self, wait: TaskWait) -> tuple[int, int, int]:
        """Row of the wait table: the count is per source rank."""
        axis = self._of_event.get(wait.event, -1)
        num_sources = self._mesh_axes[axis][1] if axis >= 0 else 1
        if wait.count % num_sources:
            raise CheckError(
                f"wait for {counted(wait.count, 'trigger')} of event {wait.event} from"
                f" {counted(num_sources, 'rank')}",
                expected="the same number from each rank of the team",
                remedy="count the triggers of a task on all ranks",
            )
        return wait.event, wait.count // num_sources, axis


class RowTable:
    """A table of waits or signals under construction; equal lists share their rows."""

    def __init__(self, num_columns: int) -> None:
        self.rows: list[tuple[int, ...]] = []
        self._num_columns = num_columns
        self._starts: dict[tuple[tuple[int, ...], ...], int] = {}

    def intern(self, rows: tuple[tuple[int, ...], ...]) -> int:
        """First row of this list; 0 for an empty one."""
        if not rows:
            return 0
        if rows not in self._starts:
            self._starts[rows] = len(self.rows)
            self.rows += rows
        return self._starts[rows]

    def table(self) -> Words:
        """The table as an array."""
        return np.array(self.rows, dtype=np.int32).reshape(-1, self._num_columns)


def encode(schedule: Schedule, layout: SegmentLayout, mesh_axes: MeshAxes = ()) -> Encoded:
    """Device words of a schedule.

    Raises UnsupportedError for an op without instructions or a float beyond its word, ProgramError
    for a size or stride beyond it, CheckError for waits that no team of ranks can satisfy.
    """
    constants = Constants()
    records = _encode_groups(schedule.graph.groups, layout.operands, mesh_axes, constants)
    axes = EventAxes(schedule, mesh_axes)
    waits, signals = RowTable(len(WAIT_COLUMNS)), RowTable(len(SIGNAL_COLUMNS))
    queues = [_encode_queue(queue, records, axes, waits, signals) for queue in schedule.queues]
    words = np.zeros((len(queues), max(map(len, queues), default=0), WORDS), dtype=np.int32)
    for sm, queue in enumerate(queues):
        words[sm, : len(queue)] = queue
    return Encoded(
        queues=words,
        lengths=np.array([len(queue) for queue in queues], dtype=np.int32),
        waits=waits.table(),
        signals=signals.table(),
        constants=np.array(constants.words, dtype=np.int32),
        num_events=schedule.num_events,
        mesh_axes=tuple(name for name, _ in mesh_axes),
        names=tuple(group.op.name for group in schedule.graph.groups),
    )


def _encode_groups(
    groups: Sequence[TaskGroup],
    operands: Mapping[str, Operand],
    mesh_axes: MeshAxes,
    constants: Constants,
) -> list[Records]:
    names = tuple(name for name, _ in mesh_axes)
    known: dict[Hashable, Records] = {}
    records = []
    for group in groups:
        located = [operands[access.tensor] for access in accesses(group.op)]
        key = _signature(group, located)
        if key not in known:
            has_formula = kind_of(group.op).is_elementwise
            position = constants.intern(str(group.op.attr("expr"))) if has_formula else 0
            known[key] = _pack_group(group, located, names, position)
        bases = [0, *(position.offset_bytes // ALIGNMENT_BYTES for position in located)]
        shared = known[key]
        records.append(Records(patch_bases(shared.words, bases), shared.starts))
    return records


def _signature(group: TaskGroup, located: Sequence[Operand]) -> Hashable:
    """Equal for groups whose records differ in base addresses only."""
    op = group.op
    geometry = tuple((p.space, p.dtype, p.first, p.shape, p.strides) for p in located)
    indices = tuple(access.dims for access in accesses(op))
    return op.kind, op.axes, len(op.reads), indices, op.attrs, group.splits, geometry


def _pack_group(
    group: TaskGroup, located: Sequence[Operand], mesh_axes: tuple[str, ...], expression: int
) -> Records:
    starts, rows = [0], []
    for instructions in lower_group(group, located, mesh_axes, expression):
        rows += [pack(instruction, Header(group=0, task=0)) for instruction in instructions]
        starts.append(len(rows))
    return Records(np.stack(rows), tuple(starts))


def _encode_queue(
    queue: Sequence[ScheduledTask],
    records: Sequence[Records],
    axes: EventAxes,
    waits: RowTable,
    signals: RowTable,
) -> Words:
    """Records of a queue. A task of several records waits at the first of them and signals at the
    last.
    """
    parts: list[Words] = []
    headers: list[Header] = []
    for task in queue:
        words, starts = records[task.group]
        start, stop = starts[task.task : task.task + 2]
        wait_rows = tuple(axes.wait_row(wait) for wait in task.waits)
        signal_rows = tuple(
            _signal_row(signal, axes.of_group[task.group]) for signal in task.signals
        )
        parts.append(words[start:stop])
        for row in range(start, stop):
            num_waits = len(wait_rows) if row == start else 0
            num_signals = len(signal_rows) if row == stop - 1 else 0
            headers.append(
                Header(
                    group=task.group,
                    task=task.task,
                    wait=waits.intern(wait_rows) if num_waits else 0,
                    num_waits=num_waits,
                    signal=signals.intern(signal_rows) if num_signals else 0,
                    num_signals=num_signals,
                )
            )
    encoded = np.concatenate([*parts, np.zeros((0, WORDS), dtype=np.int32)])
    write_headers(encoded, headers)
    return encoded


def _signal_row(signal: TaskSignal, axis: int) -> tuple[int, int]:
    return signal.event, axis if signal.all_ranks else -1
