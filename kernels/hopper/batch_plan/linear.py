"""Instructions of matrix products, of the form in which they take x, and of the choice of experts.

Next on the walk: ../batch/bodies/linear.py.
"""

from distmega.kernels.hopper.batch_plan.choice import add_logits, logit_rows
from distmega.kernels.hopper.batch_plan.draft import BatchDraft, Form
from distmega.kernels.hopper.batch_plan.proof import CHUNK
from distmega.kernels.hopper.batch_plan.results import (
    epilogue_number,
    keep_numbers,
    position_result,
    take_chunks,
)
from distmega.kernels.hopper.batch_plan.words import (
    BATCH_EXPERT_COLUMNS,
    BATCH_EXPERT_ROWS,
    BATCH_PAIRED,
    NORM_KINDS,
    NORMED,
    PRODUCT_TILE,
    STEP_K,
    BatchExperts,
    BatchLinear,
    BatchNorm,
    BatchProduct,
    has_whole_tiles,
    sm_of_step,
    steps_of_sm,
)
from distmega.kernels.hopper.plan.matrices import num_units, rows_of, share, tiles_k
from distmega.kernels.hopper.plan.segment import is_ranked
from distmega.kernels.hopper.plan.types import unfit
from distmega.kernels.hopper.plan.words import NOTHING, UNIT_ROWS
from distmega.kernels.tasks.fuse import FusedContraction


def add_contraction(draft: BatchDraft, now: int, op: FusedContraction) -> None:
    """The rows of its matrix, shared out; before it the form in which it takes x."""
    rows, streams = rows_of(op, draft.placed), len(op.streams)
    columns = draft.placed.columns[op.streams[0].weights[0]]
    outs = sum(map(draft.elements, op.outs))
    times = op.experts.num_chosen if op.experts else 1
    if (draft.elements(op.x), outs * streams) != (columns * times, rows):
        raise unfit(f"{op.name!r} of {draft.elements(op.x)} elements a row")
    if op.num_ranks > 1 and rows % UNIT_ROWS:
        raise unfit(f"{op.name!r}, a sum over ranks of {rows} elements")
    if draft.published(op.outs[0])[1] and len(op.outs) > 1:
        raise unfit(f"{op.name!r}, which attention reads, among others")
    common, starts = position_product(draft, now, op)
    behind = 0
    if op.experts:
        common["flags"] |= BATCH_EXPERT_COLUMNS
        behind = first_own(draft) * rows
    units = units_of_sms(draft, op)
    if draft.splits:
        add_product(draft, op, starts, common)
    if is_ranked(op, draft.choice):
        add_logits(draft, op, starts[0], common, units)
        return
    for name in op.operands:
        if name not in draft.number_of or draft.elements(name) != outs:
            raise unfit(f"{op.name!r}, which takes {name!r} of another size")
    common |= zip(("carry", "carry2"), (draft.number_of[n] for n in op.operands), strict=False)
    keeps = draft.epilogues[common["opcode"]].keeps
    common |= position_result(draft, now, op.outs, rows // streams, keeps)
    common |= draft.next_parts(rows) if op.num_ranks > 1 else {}
    common["bias"] = draft.placed.bias(op.streams, padded=True)
    for own, queue in zip(units, draft.queues, strict=True):
        first = own.start
        queue.append(
            BatchLinear(
                name=op.name,
                row0=first * UNIT_ROWS,
                num_units=len(own),
                num_rows=rows,
                weight_row=starts[0] - behind + first // streams * UNIT_ROWS,
                pair_row=starts[1] + first // 2 * UNIT_ROWS if streams == 2 else 0,
                **common,
            )
        )


def units_of_sms(draft: BatchDraft, op: FusedContraction) -> list[range]:
    """Units of the output of each SM: its share, or those of the tiles that it has multiplied."""
    rows = draft.rank_logits if is_ranked(op, draft.choice) else rows_of(op, draft.placed)
    steps = -(-draft.placed.columns[op.streams[0].weights[0]] // STEP_K)
    num_sms, units = draft.num_sms, num_units(rows)
    whole = draft.splits and has_whole_tiles(product_rows(draft, op), steps, num_sms)
    found = []
    for sm in range(num_sms):
        first, last = share(rows, len(op.streams), sm, num_sms)
        if whole:
            own = steps_of_sm(product_rows(draft, op), steps, sm, num_sms)
            ends = (n // steps * (PRODUCT_TILE // UNIT_ROWS) for n in (own.start, own.stop))
            first, last = (min(n, units) for n in ends)
        found.append(range(first, last))
    return found


def product_rows(draft: BatchDraft, op: FusedContraction) -> int:
    """Rows of the matrix of a product of more than 16 rows."""
    return logit_rows(draft) if is_ranked(op, draft.choice) else rows_of(op, draft.placed)


def add_product(
    draft: BatchDraft, op: FusedContraction, starts: list[int], common: dict[str, int]
) -> None:
    """The product of a BatchLinear or BatchLogits of more than 16 rows, whose fields `common` are;
    they become those of the instruction that adds up its parts.
    """
    rows = product_rows(draft, op)
    steps = -(-common["length"] // STEP_K)
    total, num_sms = -(-rows // PRODUCT_TILE) * steps, draft.num_sms
    most = 1
    if not has_whole_tiles(rows, steps, num_sms):
        most = max(
            sm_of_step(first + steps - 1, total, num_sms) - sm_of_step(first, total, num_sms) + 1
            for first in range(0, total, steps)
        )
    shared = {n: common[n] for n in ("matrix", "length", "src", "flags", "squares")}
    for sm, queue in enumerate(draft.queues):
        own = steps_of_sm(rows, steps, sm, num_sms)
        queue.append(
            BatchProduct(
                name=op.name,
                num_rows=rows,
                num_units=len(own),
                first_step=own.start,
                weight_row=starts[0],
                pair_row=starts[-1],
                num_tiles_k=steps,
                most_parts=most,
                **shared,
            )
        )
    common |= {"num_tiles_k": steps, "src": most}


def position_product(
    draft: BatchDraft, now: int, op: FusedContraction
) -> tuple[dict[str, int], list[int]]:
    """Fields of an instruction that say where x and the matrix lie, and the first row of each
    stream; before it the form in which it takes x.
    """
    columns = draft.placed.columns[op.streams[0].weights[0]]
    form = op.x, op.norm
    if form not in draft.chunk_of:
        add_form(draft, now, op)
    matrix = [m.columns for m in draft.placed.matrices].index(columns)
    paired = BATCH_PAIRED if len(op.streams) == 2 else 0
    fields = {
        "opcode": epilogue_number(draft, op),
        "num_tiles_k": tiles_k(columns),
        "length": columns,
        "src": draft.chunk_of[form],
        "flags": (NORMED if form in draft.slot_of else 0) | paired,
        "squares": draft.slot_of.get(form, 0),
        "matrix": matrix,
    }
    return fields, draft.placed.starts(op.name, op.streams, draft.placed.matrices[matrix])


def first_own(draft: BatchDraft) -> int:
    """Number of the first expert that the rank has."""
    shape = draft.experts
    return 0 if shape is None or shape.has_all else draft.team_rank * shape.num_own


def add_experts(draft: BatchDraft, now: int, op: FusedContraction) -> None:
    """The choice of experts, and their first matrices."""
    shape, (name,) = draft.experts, op.outs
    assert shape is not None
    assert op.experts is not None
    columns = draft.placed.columns[op.streams[0].weights[0]]
    if draft.elements(op.x) != columns or draft.published(name) != (None, True):
        raise unfit(f"{op.name!r} of {draft.elements(op.x)} elements a row")
    choices = dict(draft.scores_taken())
    scores = choices[now]
    if scores not in draft.number_of or draft.elements(scores) != shape.num_experts:
        raise unfit(f"{op.name!r}, whose experts {scores!r} chooses")
    if name in draft.taken:
        raise unfit(f"{op.name!r}, whose result others than contractions take")
    common, starts = position_product(draft, now, op)
    common["flags"] |= BATCH_EXPERT_ROWS
    draft.chunk_of[name, None] = draft.chunks.take(
        ("experts", shape.width),
        min(shape.num_own, draft.batch * shape.num_chosen) * tiles_k(shape.width),
        now,
        draft.forms[name][None],
    )
    one = BatchExperts(
        name=op.name,
        num_rows=shape.width * len(op.streams),
        weight_row=starts[0] - first_own(draft) * shape.width,
        pair_row=starts[-1] - first_own(draft) * shape.width,
        scores=draft.number_of[scores],
        dst=CHUNK * draft.chunk_of[name, None],
        choice=draft.num_choices,
        num_choices=len(choices),
        first_own=first_own(draft),
        **common,
    )
    draft.num_choices += 1
    for queue in draft.queues:
        queue.append(one)


def add_form(draft: BatchDraft, now: int, op: FusedContraction) -> None:
    """Makes x as the op takes it from the numbers that are kept of it."""
    norm, columns = op.norm, draft.elements(op.x)
    if op.x not in draft.number_of:
        raise unfit(f"{op.name!r} of {op.x!r}, which no op keeps")
    one = BatchNorm(
        name=op.name,
        num_rows=columns,
        src=draft.number_of[op.x],
        dst=CHUNK * take_chunks(draft, now, (op.x, norm), "form", columns),
        weight=draft.placed.vector(norm.weight) if norm else NOTHING,
        bias=draft.placed.vector(norm.bias) if norm and norm.bias else NOTHING,
        kind=NORM_KINDS.index(norm.kind if norm else "none"),
        keep=keep_normed(draft, now, (op.x, norm)),
    )
    for queue in draft.queues:
        queue.append(one)


def keep_normed(draft: BatchDraft, now: int, form: Form) -> int:
    """Where a form goes that is also taken as float32."""
    name = draft.normed.get(form, "")
    if name:
        draft.number_of[name] = keep_numbers(draft, now, draft.elements(name), draft.taken[name])
    return draft.number_of.get(name, NOTHING)
