"""Experts of up to 16 rows: which units an SM has of those that are hit, and the check that tiles
are of the right ones.

In: queues, and the fused ops that they are for. Out: units of an SM for a number of experts hit, or
the first hazard in words. Which experts rows choose only the GPU knows; what is checked holds for
every number of them and, since an SM's units depend on no more than that, for every choice.
Torch-free. Next on the walk: proof.py.
"""

from collections.abc import Sequence

from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.batch_plan.words import (
    BATCH_EXPERT_COLUMNS,
    BATCH_EXPERT_ROWS,
    BATCH_PAIRED,
    BatchExperts,
    BatchLinear,
)
from distmega.kernels.hopper.plan.experts import expert_shape
from distmega.kernels.hopper.plan.types import ExpertShape, WeightMatrix, unfit
from distmega.kernels.hopper.plan.words import UNIT_ROWS
from distmega.kernels.runtime.arena import ArenaLayout
from distmega.kernels.tasks.fuse import Fused, FusedContraction

MAX_EXPERTS = 128
"""What they weigh lies in shared memory, 16 rows of all experts."""
NUM_ZERO_CHUNKS = 1
"""Of the activations, from the first on, where there are experts: read in place of rows that do not
count.
"""


def batch_expert_shape(fused: Sequence[Fused], weights: ArenaLayout) -> ExpertShape | None:
    """What the experts of all layers have in common; None without experts."""
    shape = expert_shape(fused, weights)
    if shape and shape.num_experts > MAX_EXPERTS:
        raise unfit(f"a choice of {shape.num_chosen} of {shape.num_experts} experts")
    if shape and shape.width % UNIT_ROWS:
        raise unfit(f"experts of {shape.width} rows")
    return shape


def share_of_hits(
    one: BatchExperts, shape: ExpertShape, num_hits: int, sm: int, num_sms: int
) -> range:
    """Units of an SM, counted through all experts that are hit."""
    streams = 2 if one.flags & BATCH_PAIRED else 1
    parts = num_hits * (shape.width // UNIT_ROWS)
    return range(parts * sm // num_sms * streams, parts * (sm + 1) // num_sms * streams)


def find_wrong_experts(queues: BatchQueues, fused: Sequence[Fused]) -> str:
    """The first instruction whose tiles may be of others than the experts that its x is of, or lie
    outside of its matrix; "" if there is none.

    The loader reads the choice of its own SM. It opens the place of a choice when it comes to it,
    done with the one before, and the compute warps wait for that: so what is left to check is the
    order of instructions.
    """
    ops = {op.name: op for op in fused if isinstance(op, FusedContraction)}
    shape, found = queues.experts, ""
    choices = [one for one in queues.queues[0] if isinstance(one, BatchExperts)]
    for number, one in enumerate(choices):
        if (one.choice, one.num_choices) != (number, len(choices)):
            found = found or f"{one.name!r} is choice {one.choice} of {one.num_choices}"
    for queue in queues.queues:
        last: BatchExperts | None = None
        for each in queue:
            if isinstance(each, BatchExperts):
                last = each
                found = found or _check_rows(each, shape, queues)
            elif isinstance(each, BatchLinear) and each.flags & BATCH_EXPERT_COLUMNS:
                slots = ops[each.name].experts
                before = ops[last.name].experts if last else None
                if shape is None or slots is None or before is None:
                    return f"{each.name!r} takes tiles of experts that nobody chose"
                if slots.routing != before.routing:
                    return f"{each.name!r} takes tiles of experts that {before.routing!r} chose"
                rows = min(each.num_units * UNIT_ROWS, each.num_rows - each.row0)
                assert last is not None
                matrix = queues.matrices[each.matrix]
                where = _outside(each.weight_row, each.num_rows, rows, last, shape, matrix)
                if rows > 0 and where:
                    return f"{each.name!r} takes tiles {where} those of all experts"
    return found


def _check_rows(one: BatchExperts, shape: ExpertShape | None, queues: BatchQueues) -> str:
    """Of first matrices: that SMs have each unit of each expert once, however many are hit."""
    if shape is None or not one.flags & BATCH_EXPERT_ROWS:
        return f"{one.name!r} takes tiles of experts that nobody chose"
    streams = 2 if one.flags & BATCH_PAIRED else 1
    if one.num_rows != shape.width * streams or shape.width % UNIT_ROWS:
        return f"{one.name!r} has {one.num_rows} rows of an expert of {shape.width}"
    for first in (one.weight_row, one.pair_row)[:streams]:
        matrix = queues.matrices[one.matrix]
        if where := _outside(first, shape.width, shape.width, one, shape, matrix):
            return f"{one.name!r} takes tiles {where} those of all experts"
    return ""


def _outside(
    weight_row: int,
    between: int,
    rows: int,
    choice: BatchExperts,
    shape: ExpertShape,
    matrix: WeightMatrix,
) -> str:
    """Where `rows` rows from weight_row on, `between` further for each expert before, leave the
    matrix for some expert of the rank: "in front of" or "behind" it, "" if for none.
    """
    first = weight_row + choice.first_own * between
    if first < 0:
        return "in front of"
    behind = first + (shape.num_own - 1) * between + rows
    return "behind" if behind > matrix.num_rows else ""


def find_wrong_share(queues: BatchQueues) -> str:
    """The first number of experts hit of which some unit is no SM's, or two's; "" if none."""
    shape, num_sms = queues.experts, len(queues.queues)
    for one in queues.queues[0]:
        if not isinstance(one, BatchExperts) or shape is None:
            continue
        for num_hits in range(queues.max_hits + 1):
            behind = 0
            for sm in range(num_sms):
                share = share_of_hits(one, shape, num_hits, sm, num_sms)
                if share.start != behind:
                    return f"unit {behind} of {num_hits} experts of {one.name!r} is no SM's"
                behind = share.stop
            streams = 2 if one.flags & BATCH_PAIRED else 1
            if behind != num_hits * (shape.width // UNIT_ROWS) * streams:
                return f"unit {behind} of {num_hits} experts of {one.name!r} is no SM's"
        return ""  # those of other layers have the same shape
    return ""
