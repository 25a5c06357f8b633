"""Where annotations could not all be followed, and which one won: lines of a plan's explanation.

Comes in: a PlanFacts. Goes out: one sentence a conflict. An annotated tensor is always held as
annotated; in conflict is an op that uses it in another way, because of another operand, or because
it can't run in the chunks asked for. Used by explain.py.
"""

from collections.abc import Iterator

from distmega.errors import counted
from distmega.program.types import accesses
from distmega.sharding.layout.placements import Layout, Partial
from distmega.sharding.plan import PlanFacts
from distmega.sharding.resolve.resolve import PlacedOp


def list_conflicts(plan: PlanFacts) -> list[str]:
    """All of them, in program order; those of devices first."""
    return [*_device_conflicts(plan), *_stream_conflicts(plan)]


def _device_conflicts(plan: PlanFacts) -> Iterator[str]:
    for step in plan.decisions if plan.annotations else ():
        for access, name in zip(accesses(step.op), (*step.reads, *step.writes), strict=True):
            asked = plan.annotations.get(access.tensor)
            if asked is None or step.op.is_view:
                continue
            used = plan.locals[name][1]
            for axis in plan.mesh.names:
                if used.at(axis) != asked.at(axis) and not isinstance(used.at(axis), Partial):
                    yield _describe(plan, step, access.tensor, asked, used, axis)


def _describe(
    plan: PlanFacts, step: PlacedOp, tensor: str, asked: Layout, used: Layout, axis: str
) -> str:
    """One operand that an op uses otherwise than its annotation says."""
    verb = "writes" if tensor in [a.tensor for a in step.op.writes] else "reads"
    divided = [option.axis for name, option in step.splits if name == axis]
    reason = f"its axis {divided[0]} is on {axis}" if divided else f"{axis} does not divide it"
    names = zip(accesses(step.op), (*step.reads, *step.writes), strict=True)
    agreeing = dict.fromkeys(
        access.tensor
        for access, name in names
        if access.tensor in plan.annotations
        and plan.annotations[access.tensor].at(axis) == plan.locals[name][1].at(axis)
        and access.tensor != tensor
    )
    blamed = f", as annotated for {', '.join(agreeing)}" if agreeing else ", as planned"
    return (
        f"{step.op.name} {verb} {tensor} [{asked}] as [{axis}={used.at(axis)}]: {reason}"
        f"{blamed if divided else ''}; {tensor} is resharded"
    )


def _stream_conflicts(plan: PlanFacts) -> Iterator[str]:
    for name, (whole, layout) in plan.locals.items():
        asked = plan.streams.get(whole)
        if asked is None or asked.ring in dict(layout.shards_of(asked.dim)):
            continue
        extent = plan.allocations[name].local_shape[asked.dim]
        chunk = -(-extent // asked.num)
        num = -(-extent // chunk)
        if num < asked.num:
            found = counted(num, "chunk")
            yield (
                f"{name} comes in {found} of dim {asked.dim}, not in {asked.num}: "
                f"{chunk} of {counted(extent, 'position')} a chunk"
            )
    for (tensor, op), reason in plan.refused_chunks.items():
        yield f"{op} does not run in the chunks of {tensor}: {reason}"
