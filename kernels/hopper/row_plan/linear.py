"""Instructions of matrix products: the rows of a matrix, shared out; and of the choice of experts.

Next on the walk: ../one_row/bodies/linear.py.
"""

from functools import partial

from distmega.kernels.hopper.plan.matrices import num_units, rows_of, share, sms_with_rows, tiles_k
from distmega.kernels.hopper.plan.pointwise import MAX_CARRIED
from distmega.kernels.hopper.plan.segment import is_ranked
from distmega.kernels.hopper.plan.types import Epilogue, unfit
from distmega.kernels.hopper.plan.words import (
    CARRY_EMBEDDED,
    CARRY_TWO,
    FROM_EMBEDDING,
    KEEP_NORMED,
    KEEP_X,
    LAYER_NORM,
    MAX_SMS,
    NOTHING,
    ROW_EXPERT_COLUMNS,
    ROW_EXPERT_ROWS,
    ROW_PAIRED,
    UNIT_ROWS,
    X_PARTS,
    RowLinear,
    RowRoute,
)
from distmega.kernels.hopper.row_plan.choice import reserve_logits
from distmega.kernels.hopper.row_plan.deferred import first_carries
from distmega.kernels.hopper.row_plan.draft import Made, RowDraft
from distmega.kernels.hopper.row_plan.epilogues import epilogue_number, is_weighted
from distmega.kernels.tasks.fuse import FusedContraction, FusedRouting

MAX_NORMED_UNITS = MAX_SMS // UNIT_ROWS
"""Units of a row that an SM keeps normalised, at most: an element a thread."""


def add_contraction(draft: RowDraft, nth: int, op: FusedContraction) -> None:
    """The rows of its matrix, shared out."""
    rows, streams = rows_of(op, draft.placed), len(op.streams)
    number, by_rows = epilogue_number(draft, op), is_weighted(op)
    epilogue = draft.epilogues[number]
    dst, generation, limit = reserve_results(draft, nth, op, epilogue)
    x = draft.of_x(op)
    matrix, starts = weight_rows(draft, op)
    carry, second, flags = find_carried(draft, nth, op)
    flags |= flags_of(draft, op)
    kept = note_results(draft, op, epilogue, dst, generation)
    columns = draft.length(op)
    linear = partial(
        RowLinear,
        opcode=number,
        name=op.name,
        generation=generation,
        matrix=matrix,
        num_tiles_k=tiles_k(columns),
        src=x.first,
        num_src_words=columns // 2,
        flag_delta=generation - x.generation,
        norm=norm_at(draft, op),
        bias=draft.placed.bias(op.streams, padded=True),
        dst=dst,
        num_rows=limit,
        flags=flags,
        keep=kept,
        carry=carry,
    )
    for sm, queue in enumerate(draft.queues):
        first, last = share(rows, streams, sm, draft.num_sms)
        if first == last:
            continue
        before = 0 if by_rows else first // streams * UNIT_ROWS
        queue.append(
            linear(
                weight_row=starts[0] + before,
                pair_row=starts[1] + before if streams == 2 else second,
                num_units=last - first,
                row0=first * UNIT_ROWS,
            )
        )


def reserve_results(
    draft: RowDraft, nth: int, op: FusedContraction, epilogue: Epilogue
) -> tuple[int, int, int]:
    """Words for what is published: the first one, their generation, and how many rows there are."""
    rows = rows_of(op, draft.placed)
    size = {"nothing": 0, "numbers": rows, "pairs": rows // len(op.streams) // 2}
    num_words = size[epilogue.publishes]
    kind, generation = draft.turn(draft.classes[nth])
    if epilogue.summed:
        draft.reserve(f"parts of {kind}", draft.num_ranks * rows)
    if is_ranked(op, draft.choice):
        draft.rank_logits = rows
        limit = min(rows, max(0, num_logits(draft) - draft.team_rank * rows))
        return reserve_logits(draft, rows), draft.of_x(op).generation, limit
    if epilogue.gathered:
        first = draft.reserve(kind, draft.num_ranks * num_words)
        return first + draft.team_rank * num_words, generation, rows
    return draft.reserve(kind, num_words), generation, rows


def find_carried(draft: RowDraft, nth: int, op: FusedContraction) -> tuple[int, int, int]:
    """Where the two operands lie that the epilogue takes besides, or the rows that it normalises;
    and the flags that say so.
    """
    streams = len(op.streams)
    out_rows = rows_of(op, draft.placed) // streams
    carries = [draft.carried(op.name, name, out_rows, streams) for name in op.operands]
    carry, second = [carry for carry, _ in (*carries, *[(NOTHING, False)] * MAX_CARRIED)][:2]
    flags = CARRY_EMBEDDED if any(embedded for _, embedded in carries) else 0
    flags |= CARRY_TWO if second != NOTHING else 0
    if first_carries(draft, op) and draft.team_rank > 0:
        return NOTHING, NOTHING, 0
    if draft.team_rank == 0 and draft.deferred.get(op.x) == op.name:
        return draft.of_x(op).kept, NOTHING, KEEP_X
    if op.normed:
        return normalised(draft, op, nth), second, flags | KEEP_NORMED
    return carry, second, flags


def flags_of(draft: RowDraft, op: FusedContraction) -> int:
    """Flags of what x and the matrix are."""
    flags = FROM_EMBEDDING if op.x == draft.entry and draft.num_ranks == 1 else 0
    flags |= ROW_PAIRED if len(op.streams) == 2 else 0
    flags |= LAYER_NORM if op.norm and op.norm.kind == "layer_norm" else 0
    flags |= X_PARTS if op.x in draft.deferred else 0
    if op.experts:
        flags |= ROW_EXPERT_ROWS if is_weighted(op) else ROW_EXPERT_COLUMNS
    return flags


def note_results(
    draft: RowDraft, op: FusedContraction, epilogue: Epilogue, dst: int, generation: int
) -> int:
    """Says in the draft where results lie, from word dst on; the first element that SMs keep."""
    streams = len(op.streams)
    out_rows = rows_of(op, draft.placed) // streams
    kept = draft.keep(op, out_rows)
    if is_ranked(op, draft.choice):
        draft.logits_at = kept
    if epilogue.deferred:
        dst -= draft.team_rank * out_rows // 2  # readers begin with the first rank's part
    for out in op.outs:
        draft.made[out] = Made(dst, generation, out_rows, streams, kept)
        draft.forms[out] = epilogue.publishes
    if len(op.outs) > 1:
        locate_outs(draft, op, dst, generation, 1 if epilogue.publishes == "numbers" else 2)
    return kept


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
    owners = sms_with_rows(x.rows, 1, draft.num_sms)
    has_part = owners <= sms_with_rows(mine, len(op.streams), draft.num_sms)
    if units > MAX_NORMED_UNITS * draft.num_sms or not has_part:
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
