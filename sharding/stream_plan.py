"""From `stream` annotations to host loops: the last change of a schedule before allocations.

Comes in: a Schedule and the chunks that a user asked for, by tensor. Goes out: the schedule in an
order in which ops that share a loop stand together, and its StreamPlan. PlanError if an annotation
has no effect anywhere. Next: finalize.py.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from distmega.errors import PlanError
from distmega.program import Attr, Program, Tensor, accesses
from distmega.sharding.host_loops import StreamPlan, form_loops
from distmega.sharding.local_ops import LocalOps
from distmega.sharding.mesh import DeviceMesh
from distmega.sharding.placements import Chunks, Layout
from distmega.sharding.resolve import Schedule
from distmega.sharding.streams import WHOLE, Part, StreamSpread


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
    program: Program, local: LocalOps, schedule: Schedule, streams: Mapping[str, Chunks]
) -> tuple[Schedule, StreamPlan]:
    """The schedule in its final order, with its loops."""
    if not streams:
        return schedule, StreamPlan(order=tuple(range(len(schedule.steps))))
    ops = [local.op(step) for step in schedule.steps]
    tensors: dict[str, Tensor] = {}
    pins: dict[str, Part] = {}
    scattered = {
        op.reads[0].tensor: (op.attr("mesh_axis"), op.attr("dim"))
        for op in ops
        if op.kind == "reduce_scatter"
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
    used: dict[str, set[Part | None]] = {name: set() for name in pins}
    for op in ops:
        for access, part in zip(accesses(op), spread.parts.get(op.name, ()), strict=False):
            if access.tensor in used:
                used[access.tensor].add(part)
    for whole in streams:
        _require_effect(whole, forms[whole], used, spread)
    steps = tuple(schedule.steps[at] for at in plan.order)
    refused = {
        (name, op): why
        for (name, op), why in spread.refused.items()
        if name in pins and op not in spread.splits
    }
    for op in ops:
        for access, part in zip(accesses(op), spread.parts.get(op.name, ()), strict=False):
            if access.tensor in pins and part not in (pins[access.tensor], None):
                refused[access.tensor, op.name] = f"it has chunks of dim {part.dim} instead"
    return replace(schedule, steps=steps), replace(plan, refused=refused)


def _part(
    chunks: Chunks, shape: Sequence[int], layout: Layout, scattered: tuple[Attr, Attr] | None
) -> Part | None:
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
    return Part(chunks.dim, -(-extent // chunks.num), chunks.ring, int(ends_at_home))


def _require_effect(
    whole: str,
    forms: Sequence[str],
    used: Mapping[str, Container[Part | None]],
    spread: StreamSpread,
) -> None:
    """PlanError if chunks were asked for and no op around any form of the tensor runs in them.

    used: the chunks in which ops use each annotated form.
    """
    wanted = {name: spread.pins[name] for name in forms if spread.pins[name] != WHOLE}
    if (forms and not wanted) or any(part in used[name] for name, part in wanted.items()):
        return
    reasons = [f"{op}: {why}" for (name, op), why in spread.refused.items() if name in wanted]
    raise PlanError(
        f"no op can run in the chunks asked for {whole!r} ({'; '.join(reasons) or 'nothing does'})",
        expected="a dim that an op around it runs over, chunk by chunk",
        remedy="cut another dim, or leave the annotation out",
    )
