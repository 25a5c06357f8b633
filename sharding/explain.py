"""The plan in words: every tensor and op, axis by axis, its cost and what was rejected and why.

Comes in: a plan. Goes out: plain text. Ops and tensors whose names differ in a number only and that
are treated the same are shown once, so a deep model reads like a shallow one.
"""

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from distmega.errors import counted
from distmega.program.dtypes import item_bytes
from distmega.program.kinds import kind_of
from distmega.program.types import Tensor, accesses
from distmega.sharding.layout.placements import (
    REPLICATE,
    Chunks,
    Layout,
    Partial,
    Placement,
    Shard,
    local_shape,
)
from distmega.sharding.local_ops import LocalOps
from distmega.sharding.overlap.pairs import OverlapChoice
from distmega.sharding.plan import PlanFacts
from distmega.sharding.resolve.conflicts import list_conflicts
from distmega.sharding.resolve.resolve import PlacedOp, Reshard, Splits
from distmega.sharding.search.whatif import Alternative, Bill, WhatIf
from distmega.sharding.streams.host_loops import HostLoop
from distmega.sharding.streams.streams import ChunkPart, operand_parts

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


_NOTE = "  (not ...: what that alone would change, with everything around it as planned)"

T = TypeVar("T")


@dataclass(slots=True)
class Group(Generic[T]):
    """Things shown once: the first of them, and the numbers in the names of all."""

    first: T
    pattern: str
    numbers: list[int]

    @property
    def name(self) -> str:
        """The common name, numbers as ranges: layers.{0-29}.wq."""
        if not self.numbers:
            return self.pattern
        return self.pattern.replace("#", f"{{{_ranges(self.numbers)}}}", 1)

    @property
    def times(self) -> int:
        return max(1, len(self.numbers))


class Groups(Generic[T]):
    """Collects things by name pattern and treatment, in order of first appearance."""

    def __init__(self) -> None:
        self.groups: dict[Hashable, Group[T]] = {}

    def add(self, name: str, treatment: Hashable, thing: T) -> None:
        number = _NUMBER.search(name)
        pattern = layer_pattern(name)
        group = self.groups.setdefault((pattern, treatment), Group(thing, pattern, []))
        if number:
            group.numbers.append(int(number[0]))

    def __iter__(self) -> Iterator[Group[T]]:
        return iter(self.groups.values())


def layer_pattern(name: str) -> str:
    """A name with the number of its layer left open."""
    return _NUMBER.sub("#", name, count=1)


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 5 as 1-3,5."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def format_bytes(count: float) -> str:
    """Bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"


def format_us(time: float) -> str:
    """Microseconds to three digits."""
    return f"{time:.0f} us" if time >= 100 else f"{time:.3g} us"


def explain_plan(plan: PlanFacts) -> str:
    """The whole text, a trailing newline included."""
    what_if = WhatIf(plan)
    lines = [*_summary(plan), "", "ops", _NOTE, *_ops(plan, what_if)]
    if opaque := _opaque(plan):
        lines += ["", "operators of torch, run whole on every rank", *opaque]
    lines += ["", "collectives", *(_collectives(plan) or ["  none"])]
    if plan.host_loops:
        lines += ["", "host loops", *_host_loops(plan)]
    if plan.overlaps:
        lines += ["", "matmuls and their collectives", *_overlaps(plan)]
    if conflicts := list_conflicts(plan):
        lines += ["", "conflicts", *_once(conflicts)]
    lines += ["", "tensors", *_tensors(plan, what_if)]
    return "\n".join(lines) + "\n"


def _summary(plan: PlanFacts) -> list[str]:
    memory = plan.memory
    used = {axis for step in plan.decisions for axis, _ in step.splits}
    idle = [f"{axis}={size}" for axis, size in plan.mesh.axes if size > 1 and axis not in used]
    num_collectives = counted(plan.num_collectives, "collective")
    lines = [
        f"plan of {plan.program.name} on {plan.mesh}, machine {plan.machine.name}",
        f"  one run on each rank: {format_us(plan.time_us)},"
        f" {format_bytes(plan.num_sent_bytes)} sent in {num_collectives}",
        f"  memory of a rank: {format_bytes(memory.total_bytes)}"
        f" = weights {format_bytes(memory.weight_bytes)}"
        f" + states {format_bytes(memory.state_bytes)}"
        f" + inputs {format_bytes(memory.input_bytes)}"
        f" + temporaries {format_bytes(memory.temp_peak_bytes)} at their peak"
        + (
            f" + peer memory {format_bytes(memory.symmetric_bytes)}"
            if memory.symmetric_bytes
            else ""
        ),
        "  residency: a matrix or state held whole is priced at three all-reduces a use",
    ]
    if idle:
        lines.append(f"  idle: {', '.join(idle)} divides no op; below stands why")
    fixed: Groups[Layout] = Groups()
    for name, layout in plan.annotations.items():
        fixed.add(name, layout, layout)
    lines += [f"  fixed: {group.name} [{group.first}]" for group in fixed]
    asked: Groups[Chunks] = Groups()
    for name, chunks in plan.streams.items():
        asked.add(name, chunks, chunks)
    return lines + [f"  fixed: {group.name} in {_chunks(group.first)}" for group in asked]


def _chunks(chunks: Chunks) -> str:
    """What a user asked for."""
    if chunks.num == 1:
        return "one chunk"
    ring = f" in ring order of {chunks.ring}" if chunks.ring else ""
    return f"{counted(chunks.num, 'chunk')} of dim {chunks.dim}{ring}"


def _once(text: Sequence[str]) -> list[str]:
    """Lines that differ in numbers of layers only, once."""
    groups: dict[str, list[str]] = {}
    for line in text:
        groups.setdefault(_NUMBER.sub("#", line), []).append(line)
    times = ((f"{len(lines)} x " if lines[1:] else "", lines[0]) for lines in groups.values())
    return [f"  {count}{first}" for count, first in times]


def _ops(plan: PlanFacts, what_if: WhatIf) -> list[str]:
    groups: Groups[PlacedOp] = Groups()
    for step in plan.decisions:
        around = tuple(plan.layouts[access.tensor] for access in accesses(step.op))
        groups.add(step.op.name, (what_if.table.class_of(step.op), step.splits, around), step)
    lines: list[str] = []
    for group in groups:
        step = group.first
        times = f"{group.times} x " if group.times > 1 else ""
        lines.append(
            f"  {group.name} = {step.op.kind} {plan.loops[step.op.name]}"
            f"  {times}{format_bytes(step.cost.num_bytes)}, {format_us(step.cost.time_us)}"
        )
        for axis, size in plan.mesh.axes:
            if size > 1:
                lines += _op_axis(what_if, step, axis, size)
    return lines


def _opaque(plan: PlanFacts) -> list[str]:
    """Operators that no other kind of op states, and how often each stands."""
    targets = (str(op.attr("target")) for op in plan.program.ops if kind_of(op).calls_torch)
    return [f"  {count} x {target}" for target, count in Counter(targets).most_common()]


def _op_axis(what_if: WhatIf, step: PlacedOp, axis: str, size: int) -> list[str]:
    """One mesh axis of one op: the choice, then the alternatives, cheapest first."""
    now = dict(step.splits).get(axis)
    chosen = what_if.chosen(step)
    word = "whole on every rank"
    if now is not None:
        extent = now.extent
        word = f"{now.axis} {extent} -> {now.chunk}"
        if now.uneven:
            word += f" ({size * now.chunk - extent} of padding)"
    lines = [f"    {axis}: {word}{_with(chosen)}"]
    found = what_if.alternatives(step, axis)
    priced = [(alt.bill.total_us, alt) for alt in found if alt.bill]
    for total_us, alt in sorted(priced, key=lambda pair: pair[0]):
        assert alt.bill is not None
        lines.append(f"      not {alt.axis or 'whole'}: {_compare(alt.bill, chosen)}")
        if total_us < chosen.total_us:
            lines.append(f"        but {what_if.why_lost(step, axis, alt)}")
    reasons: dict[str, list[str]] = {}
    for alt in found:
        if alt.bill is None:
            reasons.setdefault(alt.reason, []).append(alt.axis or "whole")
    return lines + [f"      not {', '.join(names)}: {why}" for why, names in reasons.items()]


def _with(bill: Bill) -> str:
    return f", with {', '.join(bill.movements)}" if bill.movements else ""


def _compare(other: Bill, chosen: Bill) -> str:
    """How another option's costs differ from the chosen one's."""
    parts = [
        ("op", other.op_us - chosen.op_us),
        ("collectives", other.movements_us - chosen.movements_us),
        ("residency", other.residency_us - chosen.residency_us),
    ]
    text = ", ".join(f"{name} {_signed(diff)}" for name, diff in parts if abs(diff) >= 0.005)
    total = other.total_us - chosen.total_us
    return f"{_signed(total)}{f' ({text})' if text else ''}{_with(other)}"


def _signed(time: float) -> str:
    return f"{'+' if time >= 0 else '-'}{format_us(abs(time))}"


def _collectives(plan: PlanFacts) -> list[str]:
    groups: Groups[Reshard] = Groups()
    for step in plan.reshards:
        move = step.move
        treatment = (move, step.combine, tuple(map(layer_pattern, step.reads)))
        groups.add(step.writes[0], treatment, step)
    lines = []
    for group in groups:
        step = group.first
        move = step.move
        combine = f" {step.combine}" if step.combine else ""
        copy = ", through a layout copy" if move.layout_copy else ""
        sent = f"{format_bytes(move.num_bytes)} sent, {format_us(move.time_us)}"
        what = f"{move.kind}{combine} over {move.axis}"
        lines.append(f"  {group.name} = {what}  {group.times} x {sent}{copy}")
    return lines


def _overlaps(plan: PlanFacts) -> list[str]:
    """How each pair runs, equal layers once."""
    groups: Groups[OverlapChoice] = Groups()
    for choice in plan.overlaps:
        treatment = (
            choice.way,
            choice.num_chunks,
            choice.times_us,
            layer_pattern(choice.pair.second),
        )
        groups.add(choice.pair.second, treatment, choice)
    return [f"  {group.times} x {group.first}" for group in groups]


def _host_loops(plan: PlanFacts) -> list[str]:
    """The loops, what is allocated anew in each of their iterations, and of what is allocated in
    full the parts that have gaps; equal layers once.
    """
    shapes: Groups[str] = Groups()
    for name, allocation in plan.allocations.items():
        if allocation.chunk:
            text = f"by chunk: {list(allocation.stored_shape)}"
            shapes.add(name, text, text)
    for name, shape in sorted(set(_parts_with_gaps(plan))):
        text = f"in parts with gaps: {list(shape)}"
        shapes.add(name, text, text)
    return [*_loops(plan), *(f"  {group.name} {group.first}" for group in shapes)]


def _loops(plan: PlanFacts) -> Iterator[str]:
    """Loops of the same ops, maybe of other layers, in a line."""
    found: dict[Hashable, list[HostLoop]] = {}
    for loop in plan.host_loops:
        numbers = [int(n[0]) if (n := _NUMBER.search(op)) else -1 for op, _ in loop.splits]
        first = next((n for n in numbers if n >= 0), 0)
        layers = (n - first if n >= 0 else None for n in numbers)
        ops = ((layer_pattern(op), split) for op, split in loop.splits)
        found.setdefault((*zip(ops, layers, strict=True),), []).append(loop)
    for loops in found.values():
        names: Groups[None] = Groups()
        for loop in loops:
            for position, (op, _) in enumerate(loop.splits):
                names.add(op, position, None)
        splits = zip(names, loops[0].splits, strict=True)
        text = replace(loops[0], splits=tuple((name.name, split) for name, (_, split) in splits))
        yield f"  {f'{len(loops)} x ' if loops[1:] else ''}{text}"


def _parts_with_gaps(plan: PlanFacts) -> Iterator[tuple[str, tuple[int, ...]]]:
    splits = {name: split for loop in plan.host_loops for name, split in loop.splits}
    if not splits:
        return
    local = LocalOps(plan.program.tensor_map(), plan.mesh, plan.locals)
    shapes = {
        name: Tensor(name=name, shape=allocation.local_shape, dtype="f32")
        for name, allocation in plan.allocations.items()
    }
    for op in map(local.op, plan.steps):
        parts = operand_parts(op, splits[op.name], shapes) if op.name in splits else ""
        for access, part in zip(accesses(op), parts, strict=False):
            allocation = plan.allocations[access.tensor]
            if isinstance(part, ChunkPart) and not allocation.chunk:
                seen = allocation.sliced(part.dim, part.chunk)
                if seen.has_gaps:
                    yield access.tensor, seen.local_shape


def _tensors(plan: PlanFacts, what_if: WhatIf) -> list[str]:
    users: dict[str, dict[tuple[str, Splits], PlacedOp]] = {}
    for step in plan.decisions:
        for access in accesses(step.op):
            same = layer_pattern(step.op.name), step.splits
            users.setdefault(access.tensor, {}).setdefault(same, step)
    groups: Groups[Tensor] = Groups()
    for tensor in plan.program.tensors:
        layout = plan.layouts[tensor.name]
        uses = tuple(users.get(tensor.name, {}))
        treatment = tensor.role, tensor.shape, tensor.dtype, layout, uses
        groups.add(tensor.name, treatment, tensor)
    lines: list[str] = []
    for group in groups:
        tensor = group.first
        layout = plan.layouts[tensor.name]
        local = local_shape(tensor.shape, layout)
        part = math.prod(local) * item_bytes(tensor.dtype)
        times = f"{group.times} x " if group.times > 1 else ""
        fixed = ", as annotated" if tensor.name in plan.annotations else ""
        lines.append(
            f"  {tensor.role} {group.name}: {tensor.dtype}{list(tensor.shape)} -> {list(local)}"
            f" [{layout}]{fixed}  {times}{format_bytes(part)} of {format_bytes(tensor.num_bytes)}"
        )
        for axis, size in plan.mesh.axes:
            if size > 1:
                steps = tuple(users.get(tensor.name, {}).values())
                lines += _tensor_axis(plan, what_if, tensor, steps, axis)
    return lines


def _tensor_axis(
    plan: PlanFacts, what_if: WhatIf, tensor: Tensor, users: Sequence[PlacedOp], axis: str
) -> list[str]:
    """Other placements of a tensor along a mesh axis: what its users say of each."""
    now = plan.layouts[tensor.name].at(axis)
    lines = [f"    {axis}: {now}"]
    for dim in range(-1, len(tensor.shape)):
        if not (dim < 0 and now == REPLICATE) and not (isinstance(now, Shard) and now.dim == dim):
            verdicts = [_verdict(what_if, tensor, step, axis, dim) for step in users]
            text = "; ".join(dict.fromkeys(v for v in verdicts if v))
            lines.append(f"      not {'R' if dim < 0 else f'S{dim}'}: {text or 'nothing uses it'}")
    return lines


def _verdict(what_if: WhatIf, tensor: Tensor, step: PlacedOp, axis: str, dim: int) -> str:
    """What one op says of a tensor divided along `dim` (-1: whole)."""
    op, name = step.op, layer_pattern(step.op.name)
    positions = [i for i, a in enumerate(accesses(op)) if a.tensor == tensor.name]
    found = what_if.alternatives(step, axis)
    now = dict(step.splits).get(axis)
    if now is not None and _wants((*now.reads, *now.writes)[positions[0]], dim):
        return f"{op.kind} {name} would take it"
    fitting = [alt for alt in found if alt.option is not None and _fits(alt, positions, dim)]
    priced = [alt.bill for alt in fitting if alt.bill is not None]
    if priced:
        best = min(priced, key=lambda bill: bill.total_us)
        change = best.total_us - what_if.chosen(step).total_us
        return f"{op.kind} {name} {_signed(change)}"
    names = {
        access.dims[dim].axes[0]
        for access in accesses(op)
        if access.tensor == tensor.name and dim >= 0 and access.dims[dim].axes
    }
    reasons = [f"{alt.axis}: {alt.reason}" for alt in found if alt.axis in names and alt.reason]
    return f"{op.kind} {name}: {reasons[0]}" if reasons else ""


def _fits(alt: Alternative, positions: Sequence[int], dim: int) -> bool:
    assert alt.option is not None
    placed = (*alt.option.reads, *alt.option.writes)
    return _wants(placed[positions[0]], dim)


def _wants(placement: Placement, dim: int) -> bool:
    if dim < 0:
        return placement == REPLICATE or isinstance(placement, Partial)
    return isinstance(placement, Shard) and placement.dim == dim
