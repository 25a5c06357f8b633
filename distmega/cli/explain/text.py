"""A Report as text, the summary first, equal layers once.

Comes in: an ExplainReport. Goes out: sections of lines, of any width. A tensor is written as
bf16[8/tp, 64]: a dim of 8 that axis tp divides. Sizes are decimal, times are microseconds, both of
one rank.
"""

from collections.abc import Iterator, Sequence

from distmega.cli.explain.facts import ExplainReport, OpFacts, SegmentFacts, StageFacts, TensorFacts
from distmega.cli.explain.fold import folded_text
from distmega.errors import counted
from distmega.sharding.explain import Groups, format_bytes, format_us

Section = tuple[str, str]
"""Title and text."""


def write_report(report: ExplainReport, *, full: bool = False) -> Iterator[Section]:
    """Sections in order. full: of a report that was collected so, every choice of the plan and the
    segments op by op.
    """
    yield "summary", "\n".join(_summary(report))
    for stage in report.stages:
        several = len(report.stages) > 1
        title = f"stage {stage.index} of {len(report.stages)}: " if several else ""
        plan = stage.plan_text if full else "\n".join(_plan(stage))
        yield f"{title}plan", plan.rstrip("\n")
        yield f"{title}host program", "\n".join(_host(stage, full))
        graph = "\n".join(_graph(stage.host.segments)) or f"none: {stage.runs_as}"
        yield f"{title}task graph, as each launch runs it", graph
        yield f"{title}one rank", "\n".join(_rank(stage))


def _summary(report: ExplainReport) -> Iterator[str]:
    ranks = " x ".join(f"{axis}={size}" for axis, size in report.stages[0].ranks)
    stages = f" in each of {len(report.stages)} stages" if len(report.stages) > 1 else ""
    batch = f", {report.batch} sequences" if report.batch > 1 else ""
    layers = counted(report.num_layers, "layer")
    yield f"{report.model} ({layers}) on {ranks}{stages}{batch}, planned for {report.machine}"
    if report.memory_limit_bytes:
        yield f"  memory limit: {format_bytes(report.memory_limit_bytes)} a rank"
    for stage in report.stages:
        if len(report.stages) > 1:
            yield f"stage {stage.index}"
        yield from _cost(stage, report)


def _cost(stage: StageFacts, report: ExplainReport) -> Iterator[str]:
    time, memory = stage.time, stage.memory
    step = f"predicted: {format_us(time.total_us)} {report.step}"
    yield f"  {step}, if every op were a library call on {report.machine}, one after another"
    parts = [(word, us) for word, us in time.parts() if us > 0]
    shares = (f"{word} {format_us(us)} ({100 * us / time.total_us:.0f}%)" for word, us in parts)
    yield f"    of that: {', '.join(shares)}"
    yield f"  bound by: {stage.bound}"
    yield f"  at least: {format_us(time.least_us)}, all bytes of ops at the rate of memory"
    yield f"  decode steps: {stage.runs_as}"
    held = (f"{word} {format_bytes(size)}" for word, size in memory.parts() if size)
    yield f"  a rank holds: {format_bytes(memory.total_bytes)} = {' + '.join(held)}"
    num = counted(sum(one.communicates for one in stage.collectives), "collective")
    yield f"  a rank sends: {format_bytes(stage.sent_bytes)} in {num} {report.step}"
    yield from (f"  {note}" for note in stage.notes)


COLUMNS = ("op", "kind", "time", "bound by", "bytes", "divided", "then")


def _plan(stage: StageFacts) -> Iterator[str]:
    """The ops as a table, then what looked cheaper."""
    yield "each op on a rank: its time and bytes, how it is divided, as axis/mesh axis"
    then: dict[str, list[str]] = {}
    for one in stage.collectives:
        for name in one.reads:
            then.setdefault(name, []).append(f"{one.kind} {one.mesh_axis}")
    groups: Groups[OpFacts] = Groups()
    for op in stage.ops:
        if op.time_us == 0:  # a view
            continue
        after = tuple(text for name in op.writes for text in then.get(name, ()))
        groups.add(op.name, (op.kind, op.divided, op.num_bytes, op.bound, after), op)
    rows: list[tuple[str, ...]] = [COLUMNS]
    for group in groups:
        op = group.first
        joined = dict.fromkeys(text for name in op.writes for text in then.get(name, ()))
        times = f"{group.times} x " if group.times > 1 else ""
        rows.append(
            (
                group.name,
                op.kind,
                f"{times}{format_us(op.time_us)}",
                op.bound,
                format_bytes(op.num_bytes),
                ", ".join(op.divided) or "-",
                ", ".join(joined) or "-",
            )
        )
    yield from _table(rows)
    lost = [
        f"  {group.name} by {one.choice}: {format_us(one.change_us)} by itself, but {one.why}"
        for group in groups
        for one in group.first.rejected
        if one.change_us is not None and one.change_us < 0
    ]
    if lost:
        yield "looked cheaper, and lost"
        yield from lost
    if stage.overlaps:
        yield "matmuls and their collectives"
        yield from folded_text([f"  {text}" for text in stage.overlaps])
    yield "--full prints every choice that was rejected, and every tensor"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


def _host(stage: StageFacts, full: bool) -> Iterator[str]:
    host, lines = stage.host, stage.host.text.rstrip("\n").split("\n")
    if full:
        yield from lines
        for text in host.segment_texts:
            yield from text.rstrip("\n").split("\n")
    else:
        given = ("  input ", "  weight ", "  state ")
        shown = [_shortened(line) for line in lines if not line.startswith(given)]
        yield from folded_text(shown)
    yield (
        f"{counted(host.num_instructions, 'instruction')} a run, about"
        f" {format_us(host.host_us)} of the host, {format_us(host.replay_us)} where captured as a"
        " graph"
    )


def _shortened(line: str) -> str:
    """A launch without the list of what the kernel is given, which is all weights and states."""
    head, bracket, arguments = line.partition("(")
    if "launch " not in head or arguments.count(",") < 8:
        return line
    return f"{head}{bracket}{counted(arguments.count(',') + 1, 'tensor')})"


def _graph(segments: Sequence[SegmentFacts]) -> Iterator[str]:
    """What each segment is as tasks, equal ones once."""
    reported: dict[str, list[str]] = {}
    for segment in segments:
        tasks = ", ".join(f"{kind} {count}" for kind, count in segment.tasks)
        text = (
            f"{counted(segment.num_tasks, 'task')} of {counted(segment.num_ops, 'op')}"
            f" on {counted(segment.num_sms, 'SM')}, {counted(segment.num_events, 'event')}: {tasks}"
        )
        reported.setdefault(text, []).append(segment.name)
    for text, names in reported.items():
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
        yield f"{some}: {text}"


def _rank(stage: StageFacts) -> Iterator[str]:
    """What lies in a rank's memory, and what it says to others."""
    for role, word in (("weight", "weights"), ("state", "KV cache")):
        groups: Groups[TensorFacts] = Groups()
        for tensor in stage.tensors:
            if tensor.role == role:
                groups.add(tensor.name, (tensor.shape, tensor.axes, tensor.dtype), tensor)
        total = sum(tensor.rank_bytes for tensor in stage.tensors if tensor.role == role)
        yield f"{word}: {format_bytes(total)}"
        rows = [
            (
                group.name,
                str(group.first),
                f"{group.times} x {format_bytes(group.first.rank_bytes)}",
            )
            for group in groups
        ]
        if rows:
            yield from _table(rows)
    kinds: dict[str, list[int]] = {}
    for one in stage.collectives:
        kinds.setdefault(f"{one.kind} over {one.mesh_axis}", []).append(one.num_bytes)
    for kind, sizes in kinds.items():
        yield f"{kind}: {len(sizes)} a step, {format_bytes(sum(sizes))} sent"
