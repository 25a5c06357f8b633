"""From `stream` annotations to host loops: the last change of a schedule before allocations.

Comes in: a RankSchedule and the chunks that a user asked for, by tensor. Goes out: the schedule in
an order in which ops that share a loop stand together, and its StreamPlan. PlanError if an
annotation has no effect anywhere. Next: finalize.py.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from distmega.errors import PlanError, counted
from distmega.program.kinds import kind_of
from distmega.program.types import Attr, Op, Program, Tensor, accesses
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Chunks, Layout
from distmega.sharding.local_ops import LocalOps
from distmega.sharding.resolve.resolve import RankSchedule
from distmega.sharding.streams.host_loops import StreamPlan, form_loops
from distmega.sharding.streams.streams import WHOLE, ChunkPart, StreamSpread, to_root


def resolve_chunks(tensor: Tensor, layout: Layout, mesh: DeviceMesh) -> Chunks | None:
    """A user's chunks with the dim counted from the front. PlanError if they don't fit."""
    chunks = layout.chunks
    if chunks is None:
        return None
    rank = len(tensor.shape)
    found = f"stream({chunks.dim}, {chunks.num}) of {tensor.name!r} of shape {tensor.shape}"
    if not -rank <= chunks.dim < rank:
        raise PlanError(found, expected=f"a dim below {rank}", remedy="cut a dim that it has")
    if chunks.num < 1:
        raise PlanError(found, expected="at least one chunk", remedy="ask for 1 to stay whole")
    if chunks.ring and chunks.ring not in mesh.names:
        remedy = "name an axis of the mesh, or leave ring out"
        raise PlanError(f"ring {chunks.ring!r}: {found}", expected=f"axes of {mesh}", remedy=remedy)
    alone = chunks.ring and mesh.size(chunks.ring) == 1
    return replace(chunks, dim=chunks.dim % rank, ring="" if alone else chunks.ring)


def plan_streams(
    program: Program, local: LocalOps, schedule: RankSchedule, streams: Mapping[str, Chunks]
) -> tuple[RankSchedule, StreamPlan]:
    """The schedule in its final order, with its loops."""
    if not streams:
        return schedule, StreamPlan(order=tuple(range(len(schedule.steps))))
    ops = [local.op(step) for step in schedule.steps]
    tensors: dict[str, Tensor] = {}
    pins: dict[str, ChunkPart] = {}
    scattered = {
        op.reads[0].tensor: (op.attr("mesh_axis"), op.attr("dim"))
        for op in ops
        if kind_of(op).scatters_sums
    }
    for name, (whole, layout) in schedule.locals.items():
        tensors[name] = local.tensor(name)
        if whole in streams:
            part = _part(streams[whole], tensors[name].shape, layout, scattered.get(name))
            if part is not None:
                pins[name] = part
    spread = StreamSpread(ops, tensors, pins)
    plan = form_loops(ops, tensors, spread.run(), program.outputs)
    forms: dict[str, list[str]] = {whole: [] for whole in streams}
    for name in pins:
        forms[schedule.locals[name][0]].append(name)
    uses = {op.name: _uses(op, spread) for op in ops}
    refused = dict(_refusals(uses, spread))
    seen = {name for op in ops if op.is_view for name in _followed(uses[op.name], spread)}
    followed = {
        name for op in ops if not op.is_view for name in _followed(uses[op.name], spread)
    } | _looped_below(seen, ops, plan, spread)
    for whole in streams:
        wanted = [name for name in forms[whole] if pins[name] != WHOLE]
        if (wanted or not forms[whole]) and not followed.intersection(wanted):
            found = [f"{op}: {why}" for (name, op), why in refused.items() if name in wanted]
            if not wanted and whole in schedule.locals:
                found = [f"only parts of it are used, one chunk each of {streams[whole].ring}"]
            raise _no_effect(whole, found or ["no op uses it"])
    steps = tuple(schedule.steps[at] for at in plan.order)
    return replace(schedule, steps=steps), replace(plan, refused=refused)


def _uses(op: Op, spread: StreamSpread) -> dict[str, set[ChunkPart | None]]:
    """The chunks in which an op touches annotated tensors."""
    found: dict[str, set[ChunkPart | None]] = {}
    for access, part in zip_longest(accesses(op), spread.parts.get(op.name, ())):
        if access.tensor in spread.pins:
            found.setdefault(access.tensor, set()).add(part)
    return found


def _followed(uses: Mapping[str, Container[ChunkPart | None]], spread: StreamSpread) -> list[str]:
    """Tensors that an op touches in the chunks which they are annotated with."""
    return [name for name, parts in uses.items() if spread.pins[name] in parts]


def _looped_below(
    names: Iterable[str], ops: Sequence[Op], plan: StreamPlan, spread: StreamSpread
) -> set[str]:
    """Those of the tensors, which views show in chunks, whose storage ops in loops touch."""

    def root(name: str) -> str:
        return to_root(name, None, spread.views, spread.tensors)[0]

    looped = {name for loop in plan.loops for name, _ in loop.splits}
    touched = {root(a.tensor) for op in ops if op.name in looped for a in accesses(op)}
    return {name for name in names if root(name) in touched}


def _refusals(
    uses: Mapping[str, Mapping[str, Container[ChunkPart | None]]], spread: StreamSpread
) -> Iterator[tuple[tuple[str, str], str]]:
    """Why ops do not run in the chunks of tensors annotated with some, or in those in which the ops
    before them run: (tensor, op), why.

    uses: op -> annotated tensor -> the chunks in which it touches it.
    """
    for op, touched in uses.items():
        split, followed = spread.splits.get(op), _followed(touched, spread)
        for name in touched:
            if spread.pins[name] == WHOLE or name in followed:
                continue
            if split is not None:
                chosen = (
                    f"as annotated for {', '.join(followed)}" if followed else "as ops around it"
                )
                yield (
                    (name, op),
                    f"it runs in {counted(split.num_chunks, 'chunk')} of {split.axis}, {chosen}",
                )
            elif (name, op) in spread.refused:
                yield (name, op), spread.refused[name, op]
    for (name, op), why in spread.refused.items():
        if name not in spread.pins and op not in spread.splits:
            yield (name, op), why


def _part(
    chunks: Chunks, shape: Sequence[int], layout: Layout, scattered: tuple[Attr, Attr] | None
) -> ChunkPart | None:
    """How a form of a tensor comes in the chunks asked for. None where a ring's own mesh axis
    divides the dim already: such a part is one chunk of the ring.

    scattered: mesh axis and dim of the reduce-scatter that a form goes to. Around its ring each
    rank ends with its own part, around others it begins with it.
    """
    extent = shape[chunks.dim]
    if min(chunks.num, extent) == 1:
        return WHOLE
    if chunks.ring in dict(layout.shards_of(chunks.dim)):
        return None
    ends_at_home = scattered == (chunks.ring, chunks.dim)
    return ChunkPart(chunks.dim, -(-extent // chunks.num), chunks.ring, int(ends_at_home))


def _no_effect(whole: str, reasons: Sequence[str]) -> PlanError:
    """The error for chunks that no op around any form of a tensor runs in."""
    return PlanError(
        f"no op can run in the chunks asked for {whole!r} ({'; '.join(reasons)})",
        expected="a dim that an op around it runs over, chunk by chunk",
        remedy="cut another dim, or leave the annotation out",
    )
