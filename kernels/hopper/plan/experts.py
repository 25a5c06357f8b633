"""Experts of one row: what all of a segment share, and the check that tiles are of the right ones.

In: fused ops, or queues. Out: an ExpertShape; the first instruction whose tiles may be of another
expert than the one that its x and its weight are of. Which experts a row goes to only the GPU
knows, so what is checked holds for every choice. Torch-free. Next on the walk: row_plan/queues.py.
"""

from collections.abc import Sequence

from distmega.kernels.hopper.plan.types import ExpertShape, RowQueues, unfit
from distmega.kernels.hopper.plan.words import (
    MAX_SMS,
    ROW_EXPERT_COLUMNS,
    ROW_EXPERT_ROWS,
    ROW_PAIRED,
    UNIT_ROWS,
    RowLinear,
    RowRoute,
)
from distmega.kernels.runtime.arena import ArenaLayout
from distmega.kernels.tasks.fuse import Fused, FusedContraction, FusedRouting
from distmega.program.types import Op, grouped_index

MAX_EXPERTS = MAX_SMS
"""Experts that a row chooses from, at most: one a thread."""
MAX_CHOSEN = 32
"""Experts of one row, at most."""


def is_of_experts(op: Op) -> bool:
    """Whether an op chooses experts or is on rows of theirs: only kernels for GPUs do such ops."""
    return op.kind in ("top_k", "route") or grouped_index(op) is not None


def last_matrices(fused: Sequence[Fused]) -> list[str]:
    """Weights of experts whose slots are columns."""
    return [
        stream.weights[0]
        for op in fused
        if isinstance(op, FusedContraction) and op.experts and op.experts.by == "columns"
        for stream in op.streams
    ]


def expert_shape(fused: Sequence[Fused], weights: ArenaLayout) -> ExpertShape | None:
    """What the experts of all layers have in common; None without experts."""
    found: set[ExpertShape] = set()
    routings = {op.name: op for op in fused if isinstance(op, FusedRouting)}
    for op in fused:
        if not isinstance(op, FusedContraction) or op.experts is None:
            continue
        routing = routings[op.experts.routing]
        dim = 1 if op.experts.by == "rows" else 2
        for stream in op.streams:
            found.add(
                ExpertShape(
                    num_experts=routing.num_experts,
                    num_own=op.experts.num_own,
                    num_chosen=routing.num_chosen,
                    width=weights.tensors[stream.weights[0]].shape[dim],
                    weighing=routing.weighing,
                )
            )
    if len(found) > 1:
        raise unfit(f"experts of several shapes, {sorted(map(str, found))}")
    shape = found.pop() if found else None
    if shape and (
        shape.num_experts > MAX_EXPERTS or shape.num_experts % 2 or shape.num_chosen > MAX_CHOSEN
    ):
        raise unfit(f"a choice of {shape.num_chosen} of {shape.num_experts} experts")
    return shape


def find_wrong_slot(queues: RowQueues) -> str:
    """The first instruction that does not follow the choice of its experts, or whose tiles may lie
    outside of its matrix; "" if there is none.

    The loader reads a choice of its own SM, which the next one overwrites: tiles in between prove
    that it has read it, for compute warps come to the next choice with those in hand.
    """
    shape = queues.experts
    for sm, queue in enumerate(queues.queues):
        routing: RowRoute | None = None
        is_used = True
        for one in queue:
            if isinstance(one, RowRoute):
                if not is_used:
                    return f"{one.name!r} on SM {sm} overwrites a choice that nobody has read"
                routing, is_used = one, False
            elif isinstance(one, RowLinear) and one.flags & (ROW_EXPERT_ROWS | ROW_EXPERT_COLUMNS):
                if shape is None or routing is None:
                    return f"{one.name!r} on SM {sm} takes tiles of experts that nobody chose"
                if _last_row(one, shape) > _num_rows(one, queues):
                    return f"{one.name!r} on SM {sm} takes tiles behind those of all experts"
                is_used = is_used or one.num_units > 0
        if not is_used:
            return f"the last choice of SM {sm} is read by nobody"
    return ""


def _num_rows(one: RowLinear, queues: RowQueues) -> int:
    matrix = queues.matrices[one.matrix] if one.flags & ROW_EXPERT_ROWS else queues.expert_matrix
    return matrix.num_rows if matrix else 0


def _last_row(one: RowLinear, shape: ExpertShape) -> int:
    """Behind the last row that counts of the tiles of any expert."""
    last = shape.num_experts - 1
    if one.flags & ROW_EXPERT_COLUMNS:
        rows = min(one.num_units * UNIT_ROWS, one.num_rows - one.row0)
        return one.weight_row + last * one.num_rows + rows
    first = max(one.weight_row, one.pair_row if one.flags & ROW_PAIRED else 0)
    return first + last * shape.width + shape.width
