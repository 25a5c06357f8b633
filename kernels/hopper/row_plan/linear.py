"""Instructions of matrix products: the rows of a matrix, shared out; and of the choice of experts.

Next on the walk: ../one_row/bodies/linear.py.
"""

from distmega.kernels.hopper.plan.matrices import num_units, rows_of, share, tiles_k
from distmega.kernels.hopper.plan.pointwise import MAX_CARRIED
from distmega.kernels.hopper.plan.types import unfit
from distmega.kernels.hopper.plan.words import (
    CARRY_EMBEDDED,
    CARRY_TWO,
    EXPERT_COLUMNS,
    EXPERT_ROWS,
    FROM_EMBEDDING,
    KEEP_NORMED,
    LAYER_NORM,
    MAX_SMS,
    NOTHING,
    PAIRED,
    UNIT_ROWS,
    RowLinear,
    RowRoute,
)
from distmega.kernels.hopper.row_plan.choice import reserve_logits
from distmega.kernels.hopper.row_plan.draft import Made, RowDraft
from distmega.kernels.hopper.row_plan.epilogues import epilogue_number, is_weighted
from distmega.kernels.tasks.fuse import FusedContraction, FusedRouting

MAX_NORMED_UNITS = MAX_SMS // UNIT_ROWS
"""Units of a row that an SM keeps normalised, at most: an element a thread."""


def add_contraction(draft: RowDraft, nth: int, op: FusedContraction) -> None:
    """The rows of its matrix, shared out."""
    rows = rows_of(op, draft.placed)
    streams = len(op.streams)
    out_rows = rows // streams
    number = epilogue_number(draft, op)
    epilogue = draft.epilogues[number]
    size = {"nothing": 0, "numbers": rows, "pairs": out_rows // 2}[epilogue.publishes]
    kind, generation = draft.turn(draft.classes[nth])
    if op.num_ranks > 1:
        draft.reserve(f"parts of {kind}", draft.num_ranks * rows)
    if draft.is_ranked(op):
        draft.rank_logits = rows
        limit = min(rows, max(0, num_logits(draft) - draft.team_rank * rows))
        dst, generation = reserve_logits(draft, rows), draft.of_x(op).generation
    elif epilogue.gathered:
        dst, limit = draft.reserve(kind, draft.num_ranks * size) + draft.team_rank * size, rows
    else:
        dst, limit = draft.reserve(kind, size), rows
    x = draft.of_x(op)
    is_given = op.x == draft.entry
    columns = draft.length(op)
    matrix, starts = weight_rows(draft, op)
    by_rows = is_weighted(op)
    flags = FROM_EMBEDDING if is_given and draft.num_ranks == 1 else 0
    flags |= PAIRED if streams == 2 else 0
    flags |= LAYER_NORM if op.norm and op.norm.kind == "layer_norm" else 0
    if op.experts:
        flags |= EXPERT_ROWS if by_rows else EXPERT_COLUMNS
    carries = [draft.carried(op.name, name, out_rows, streams) for name in op.operands]
    if any(embedded for _, embedded in carries):
        flags |= CARRY_EMBEDDED
    carry, second = [carry for carry, _ in (*carries, *[(NOTHING, False)] * MAX_CARRIED)][:2]
    flags |= CARRY_TWO if second != NOTHING else 0
    if op.normed:
        carry = normalised(draft, op, nth)
        flags |= KEEP_NORMED
    kept = draft.keep(op, out_rows)
    if draft.is_ranked(op):
        draft.logits_at = kept
    for out in op.outs:
        draft.made[out] = Made(dst, generation, out_rows, streams, kept)
        draft.forms[out] = epilogue.publishes
    if len(op.outs) > 1:
        locate_outs(draft, op, dst, generation, 1 if epilogue.publishes == "numbers" else 2)
    num_tiles, norm = tiles_k(columns), norm_at(draft, op)
    bias = draft.placed.bias(op.streams, padded=True)
    for sm, queue in enumerate(draft.queues):
        first, last = share(rows, streams, sm, draft.num_sms)
        if first == last:
            continue
        before = 0 if by_rows else first // streams * UNIT_ROWS
        queue.append(
            RowLinear(
                opcode=number,
                name=op.name,
                generation=generation,
                matrix=matrix,
                weight_row=starts[0] + before,
                pair_row=starts[1] + before if streams == 2 else second,
                num_units=last - first,
                num_tiles_k=num_tiles,
                src=x.first,
                num_src_words=columns // 2,
                flag_delta=generation - x.generation,
                norm=norm,
                bias=bias,
                dst=dst,
                row0=first * UNIT_ROWS,
                num_rows=limit,
                flags=flags,
                keep=kept,
                carry=carry,
            )
        )


def weight_rows(draft: RowDraft, op: FusedContraction) -> tuple[int, list[int]]:
    """The number of the matrix of an op's weights, and where each stream begins there."""
    matrices = draft.placed.matrices
    block = draft.expert_matrix() if op.experts and op.experts.by == "columns" else None
    if block is not None:
        return len(matrices), draft.placed.starts(op.name, op.streams, block)
    matrix = [m.columns for m in matrices].index(draft.length(op))
    return matrix, draft.placed.starts(op.name, op.streams, matrices[matrix])


def locate_outs(
    draft: RowDraft, op: FusedContraction, dst: int, generation: int, rows: int
) -> None:
    """Where each of several results lies, one behind the other, so many rows a word."""
    for out, weight in zip(op.outs, op.streams[0].weights, strict=True):
        draft.made[out] = Made(dst, generation, 0, 0, NOTHING)
        dst += draft.placed.rows_of(weight) // rows


def norm_at(draft: RowDraft, op: FusedContraction) -> int:
    """Offset of the norm's weight; the bias of a layer norm lies behind it."""
    if op.norm is None:
        return NOTHING
    if op.norm.kind == "layer_norm":
        draft.placed.require_next(op.norm.weight, op.norm.bias)
    return draft.placed.vector(op.norm.weight)


def normalised(draft: RowDraft, op: FusedContraction, nth: int) -> int:
    """Where each SM keeps its rows of x, which it normalises there: it must have a part of the
    op, and x must be wanted by nobody afterwards.
    """
    x = draft.of_x(op)
    units, mine = num_units(x.rows), rows_of(op, draft.placed)
    if x.kept == NOTHING or x.streams != 1 or op.operands or draft.is_taken(op.x, nth):
        raise unfit(f"{op.name!r}, which normalises {op.x!r} and others take that")
    if units > MAX_NORMED_UNITS * draft.num_sms or any(
        share(x.rows, 1, sm, draft.num_sms)[0] < share(x.rows, 1, sm, draft.num_sms)[1]
        and share(mine, len(op.streams), sm, draft.num_sms)[0]
        == share(mine, len(op.streams), sm, draft.num_sms)[1]
        for sm in range(draft.num_sms)
    ):
        raise unfit(f"{op.name!r}, of which SMs that keep rows of {op.x!r} have none")
    draft.made[op.normed] = Made(0, 0, x.rows, x.streams, x.kept)
    return x.kept


def num_logits(draft: RowDraft) -> int:
    assert draft.choice is not None
    return draft.choice.num_logits


def add_routing(draft: RowDraft, op: FusedRouting) -> None:
    """Each SM that has tiles of the experts chooses them for itself."""
    scores = draft.made.get(op.scores)
    if scores is None or scores.rows != op.num_experts:
        raise unfit(f"{op.name!r}, whose scores are not one contraction's")
    users = [one for one in draft.contractions() if one.experts and one.experts.routing == op.name]
    for sm, queue in enumerate(draft.queues):
        shares = (
            share(rows_of(one, draft.placed), len(one.streams), sm, draft.num_sms) for one in users
        )
        if any(first < last for first, last in shares):
            queue.append(
                RowRoute(
                    name=op.name,
                    generation=scores.generation,
                    src=scores.first,
                    num_words=op.num_experts,
                )
            )
