"""What becomes of results: their epilogues, and where in an SM's or the ranks' memory they lie.

In: a draft of which it is known who takes what. Next on the walk: linear.py.
"""

from collections.abc import Sequence
from dataclasses import replace

from distmega.kernels.hopper.batch_plan.draft import BatchDraft, Form
from distmega.kernels.hopper.batch_plan.proof import CHUNK
from distmega.kernels.hopper.batch_plan.types import BatchEpilogue
from distmega.kernels.hopper.batch_plan.words import BATCH, BLOCK_MASK, MAX_SLOTS, NUMBERS
from distmega.kernels.hopper.plan.matrices import tiles_k
from distmega.kernels.hopper.plan.pointwise import MAX_CARRIED
from distmega.kernels.hopper.plan.segment import is_ranked
from distmega.kernels.hopper.plan.types import Kept, unfit
from distmega.kernels.hopper.plan.words import MAX_EPILOGUES, NOTHING
from distmega.kernels.tasks.fuse import (
    IDENTITY,
    FusedContraction,
    FusedGather,
    FusedPointwise,
    FusedRowAttention,
    taken_by,
)


def position_squares(draft: BatchDraft) -> None:
    """Where the squares of each form are summed that is written without its factor."""
    results = [
        (now, op.outs[0] if isinstance(op, FusedContraction) else op.out)
        for now, op in enumerate(draft.fused)
        if isinstance(op, FusedContraction | FusedPointwise | FusedGather)
    ]
    for now, name in ((-1, draft.entry), *results):
        norm, _ = draft.published(name)
        if norm:
            slot = draft.slots.take("", 1, now, draft.forms[name][norm])
            if slot >= MAX_SLOTS:
                raise unfit(f"{slot + 1} normed tensors at a time")
            draft.slot_of[name, norm] = slot


def epilogue_of(draft: BatchDraft, op: FusedContraction) -> BatchEpilogue:
    """What becomes of an op's products. UnsupportedError for more operands than epilogues take, and
    for an id that is chosen from what others take too.
    """
    if len(op.operands) + len(op.streams) > MAX_CARRIED + 1:  # one less where streams meet
        raise unfit(f"{op.name!r}, whose epilogue takes {op.operands}")
    norm, publishes = draft.published(op.outs[0])
    ranked = is_ranked(op, draft.choice)
    if ranked and (publishes or op.outs[0] in draft.taken or op.num_ranks > 1):
        raise unfit(f"{op.name!r}, which an id is chosen from, for other ops too")
    if ranked and (len(op.streams) > 1 or op.operands):
        raise unfit(f"{op.name!r}, which an id is chosen from, of several products")
    return BatchEpilogue(
        num_streams=len(op.streams),
        formula=op.formula,
        num_carried=len(op.operands),
        biased=any(name for stream in op.streams for name in stream.biases),
        keeps=any(name in draft.taken for name in op.outs),
        publishes=publishes,
        scaled=norm is not None,
        slot=draft.slot_of[op.outs[0], norm] if norm else 0,
        summed=op.num_ranks > 1,
        ranked=ranked,
        weighted=op.experts is not None and op.experts.by == "rows",
    )


def entry_epilogue(draft: BatchDraft) -> BatchEpilogue:
    """What becomes of the rows that come in."""
    return plain_epilogue(draft, draft.entry, summed=draft.shares_rows)


def plain_epilogue(draft: BatchDraft, name: str, *, summed: bool) -> BatchEpilogue:
    """What becomes of a tensor that is taken as it is."""
    norm, publishes = draft.published(name)
    return BatchEpilogue(
        num_streams=1,
        formula=IDENTITY,
        num_carried=0,
        biased=False,
        keeps=name in draft.taken,
        publishes=publishes,
        scaled=norm is not None,
        slot=draft.slot_of[name, norm] if norm else 0,
        summed=summed,
        ranked=False,
    )


def find_epilogues(draft: BatchDraft) -> list[BatchEpilogue]:
    """Those of all contractions, joined where they differ only in biases or in what is kept."""
    found: dict[BatchEpilogue, BatchEpilogue] = {}
    for op in draft.fused:
        if isinstance(op, FusedContraction):
            one = epilogue_of(draft, op)
            key = replace(one, biased=False, keeps=False)
            known = found.get(key, key)
            found[key] = replace(
                key, biased=known.biased or one.biased, keeps=known.keeps or one.keeps
            )
    if len(found) > MAX_EPILOGUES:
        raise unfit(f"{len(found)} different epilogues")
    return list(found.values())


def epilogue_number(draft: BatchDraft, op: FusedContraction) -> int:
    key = replace(epilogue_of(draft, op), biased=False, keeps=False)
    keys = [replace(one, biased=False, keeps=False) for one in draft.epilogues]
    return keys.index(key)


def position_result(
    draft: BatchDraft, now: int, names: Sequence[str], rows: int, keeps: bool
) -> dict[str, int]:
    """Where a result of `rows` numbers goes, of which `names` are parts: the fields of an
    instruction. What is kept may take the place of an operand that nobody takes afterwards.
    """
    found: dict[str, int] = {}
    if keeps:
        last = max(draft.taken.get(name, now) for name in names)
        found["keep"] = keep_numbers(draft, now, rows, last, last_carried(draft, now, rows))
        for name in names:
            draft.number_of[name] = found["keep"]
    norm, publishes = draft.published(names[0])
    if publishes:
        form = names[0], norm
        kind = "scaled" if norm else "as it is"
        found["dst"] = CHUNK * take_chunks(draft, now, form, kind, rows)
        if norm:
            found["next_norm"] = draft.placed.vector(norm.weight)
    return found


def keep_numbers(draft: BatchDraft, now: int, rows: int, last: int, reused: int = NOTHING) -> int:
    """First of the numbers [16, rows] of a tensor taken until `last`; see Pool.take."""
    first = draft.numbers.take("", -(-rows // NUMBERS) * NUMBERS, now, last, reused)
    if draft.numbers.size > BLOCK_MASK * NUMBERS:
        raise unfit(f"{draft.numbers.size} numbers a row that are kept")
    return BATCH * first


def last_carried(draft: BatchDraft, now: int, rows: int) -> int:
    """Where an operand lies that op number `now` takes last, or NOTHING."""
    op = draft.fused[now] if now >= 0 else None
    if isinstance(op, FusedContraction | FusedPointwise):
        names = op.operands if isinstance(op, FusedContraction) else taken_by(op)
        for name in names:
            if name in draft.tables:
                continue
            if draft.taken[name] == now and draft.elements(name) == rows:
                return draft.number_of[name] // BATCH
    return NOTHING


def take_chunks(draft: BatchDraft, now: int, form: Form, kind: str, rows: int) -> int:
    """First chunk of a form. Tensors of other sizes don't share one, since what lies behind the
    last row has to stay zero.
    """
    name, norm = form
    last = draft.forms[name][norm]
    draft.chunk_of[form] = draft.chunks.take((kind, rows), tiles_k(rows), now, last)
    return draft.chunk_of[form]


def kept_outputs(draft: BatchDraft) -> tuple[Kept, ...]:
    """Where outputs lie that no other rule brings out."""
    own = {draft.choice.chosen, draft.choice.logits} if draft.choice else set()
    found = []
    for name in draft.segment.outputs:
        if name in own:
            continue
        if name not in draft.number_of:
            raise unfit(f"output {name!r}, which no op keeps")
        op = draft.makers.get(name)
        turned = op if isinstance(op, FusedRowAttention) and op.out_steps else None
        found.append(
            Kept(
                tensor=name,
                first=draft.number_of[name],
                num=draft.elements(name),
                rows=draft.rows.get(name, draft.batch),
                heads=turned.num_heads if turned else 1,
                steps=turned.out_steps if turned else None,
            )
        )
    return tuple(found)
