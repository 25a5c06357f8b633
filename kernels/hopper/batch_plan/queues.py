"""Queues of the kernel of several rows: the same instructions on every SM, each for its own rows.

In: fused ops (tasks/fuse/) of that many sequences or rows, in any order that follows their data,
and the layouts of the weight and state arenas. Out: a BatchQueues. Torch-free. Next on the walk:
batch/runner.py.

Every SM takes part in every instruction, if only to count up its event, and waits for all SMs at
the one before. So a buffer may be written as soon as an instruction before has read it last, and
one is taken again by tensors that are made alike. A result is bf16 where linears take it, and
float32 where other ops or the caller do. The weight of an rms norm is multiplied in by whoever
writes x, its factor by whoever reads it; what linears take in another form, as after a layer norm,
is an instruction of its own.

Where ranks share the program, all have the same queues but for parts of tables and of logits, and
what is summed over ranks goes through two buffers in turn: an SM's next push into the same one
comes after it has received a sum from all ranks, which they began after all of their SMs had read
this one. Where no choice of an id lies between the last sum of a step and the first of the next,
the last one has a buffer of its own; where a step has one sum alone, ranks add up the rows that
come in, too. proof.py proves this and the rest for each program.

Experts: a BatchExperts chooses them for all rows, on each SM by itself from the same scores, and
does the first matrices of those that some row chose; a linear with BATCH_EXPERT_COLUMNS follows,
for which these lie side by side. Room is there for as many as rows can choose. Where there are
experts chunk 0 of the activations stays zero, in place of rows that did not choose one.

Samples within limits need all logits of a sequence: each SM, done with its logits, writes them
into every rank's memory as plain numbers, then, behind a fence, two flagged words that tell that
rank so. The sample waits for these words of all SMs of all ranks in place of the logits' event.
They stand in for the most likely ids above, too: an SM sends them when it is past all sums of the
step. No one overwrites logits that another still needs: the next step's come behind its embedding,
to which each rank adds its part only once all of its own SMs are done with the sample.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace

from distmega.kernels.hopper.batch_plan.choice import add_sample, logit_rows
from distmega.kernels.hopper.batch_plan.draft import BatchDraft
from distmega.kernels.hopper.batch_plan.linear import add_contraction, add_experts
from distmega.kernels.hopper.batch_plan.pointwise import add_entry, add_gather, add_pointwise
from distmega.kernels.hopper.batch_plan.proof import CHUNK, find_batch_hazard
from distmega.kernels.hopper.batch_plan.results import (
    entry_epilogue,
    find_epilogues,
    kept_outputs,
    position_squares,
    take_chunks,
)
from distmega.kernels.hopper.batch_plan.row_attention import (
    add_given,
    add_row_attention,
    row_attention_shapes,
)
from distmega.kernels.hopper.batch_plan.types import (
    BatchEpilogues,
    BatchFormulas,
    BatchQueues,
    is_limited,
)
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    BatchAttention,
    num_computed,
)
from distmega.kernels.hopper.plan.matrices import Weights, num_units
from distmega.kernels.hopper.plan.types import ITEM_BYTES, unfit
from distmega.kernels.hopper.plan.words import MAX_SMS, NO_WINDOW, NOTHING, UNIT_ROWS
from distmega.kernels.runtime.arena import ArenaLayout
from distmega.kernels.tasks.fuse import (
    Fused,
    FusedAttention,
    FusedChoice,
    FusedContraction,
    FusedGather,
    FusedPointwise,
    FusedRowAttention,
    WeightStream,
    first_that_fits,
    taken_by,
)
from distmega.program.types import Program


def build_batch_queues(
    segment: Program,
    weights: ArenaLayout,
    states: ArenaLayout,
    num_sms: int,
    team_rank: int = 0,
    divided: Container[str] = (),
    most_rows: int = BATCH,
) -> BatchQueues:
    """Queues for `num_sms` SMs of rank `team_rank` of its team. divided: tensors of which each rank
    has another part. most_rows: that the segment may have, at most MAX_ROWS. UnsupportedError where
    the kernel can't do the segment.
    """
    placed = Weights(segment, weights)

    def build(found: tuple[Fused, ...]) -> BatchQueues:
        fused = tuple(apart(found, segment.outputs))
        draft = BatchDraft(
            segment, fused, placed, weights, states, min(num_sms, MAX_SMS), team_rank, divided,
            most_rows=most_rows,
        )  # fmt: skip
        queues = fill_queues(draft)
        hazard = find_batch_hazard(queues, fused)
        if hazard:
            raise unfit(f"a segment where {hazard}")
        return queues

    return first_that_fits(segment, build)


def apart(fused: Sequence[Fused], outputs: Sequence[str] = ()) -> Iterator[Fused]:
    """Contractions side by side as one each, unless attention alone takes their results, and all of
    them, as each attention of the segment does. outputs: of the segment.
    """
    wanted = [(op.q, op.k, op.v) for op in fused if isinstance(op, FusedAttention)]
    made = {op.outs for op in fused if isinstance(op, FusedContraction)}
    others = {name for op in fused if not isinstance(op, FusedAttention) for name in taken_by(op)}
    others.update(outputs)
    are_joined = made.issuperset(wanted) and others.isdisjoint(
        name for ops in wanted for name in ops
    )
    joined = set(wanted) if are_joined else set()
    for op in fused:
        if not isinstance(op, FusedContraction) or len(op.outs) == 1 or op.outs in joined:
            yield op
            continue
        (stream,) = op.streams
        if len(stream.weights) < len(op.outs):
            raise unfit(f"{op.name!r}, of which attention takes columns, where others lie apart")
        for weight, bias, out in zip(stream.weights, stream.biases, op.outs, strict=True):
            alone = WeightStream(weights=(weight,), biases=(bias,))
            yield replace(op, name=out, streams=(alone,), outs=(out,))


def fill_queues(draft: BatchDraft) -> BatchQueues:
    """Goes through the ops in order, each of which adds its instructions."""
    draft.inspect()
    draft.find_uses()
    position_squares(draft)
    draft.epilogues = find_epilogues(draft)
    draft.queues = [[] for _ in range(draft.num_sms)]
    draft.reserve()
    add_given(draft)
    add_entry(draft)
    for now, op in enumerate(draft.fused):
        add_instructions(draft, now, op)
    return finished(draft)


def add_instructions(draft: BatchDraft, now: int, op: Fused) -> None:
    """Those of op number `now`."""
    match op:
        case FusedContraction() if op.experts and op.experts.by == "rows":
            add_experts(draft, now, op)
        case FusedContraction():
            add_contraction(draft, now, op)
        case FusedAttention():
            add_attention(draft, now, op)
        case FusedRowAttention():
            add_row_attention(draft, now, op)
        case FusedPointwise():
            add_pointwise(draft, now, op)
        case FusedGather():
            add_gather(draft, now, op)
        case FusedChoice() if is_limited(op.sampler):
            add_sample(draft, op)


def finished(draft: BatchDraft) -> BatchQueues:
    """The draft's queues, and all that the kernel is told of them."""
    choice = draft.choice
    attended = [op for op in draft.fused if isinstance(op, FusedAttention | FusedRowAttention)]
    first_id = draft.team_rank * draft.rank_logits
    return BatchQueues(
        num_ranks=draft.num_ranks,
        attention=draft.attention,
        epilogues=BatchEpilogues(
            tuple(draft.epilogues), entry_epilogue(draft), tuple(draft.gathers)
        ),
        formulas=BatchFormulas(tuple(draft.formulas)),
        wide_norms=draft.wide_norms,
        eps=draft.eps,
        matrices=draft.placed.matrices,
        queues=tuple(map(tuple, draft.queues)),
        batch=draft.batch,
        entry_columns=draft.elements(draft.entry),
        num_chunks=draft.chunks.size,
        num_numbers=num_computed(draft.batch) * draft.numbers.size,
        num_slots=draft.slots.size,
        outputs=kept_outputs(draft),
        sampler=choice.sampler if choice else None,
        sm_logits=UNIT_ROWS * -(-num_units(draft.rank_logits) // draft.num_sms),
        rank_logits=draft.rank_logits,
        logit_rows=logit_rows(draft),
        first_id=first_id,
        num_logits=choice.num_logits if choice else 0,
        buffers=tuple(draft.buffers),
        embed=draft.embedding.table if draft.embedding else draft.entry,
        rope_table=next((op.table for op in attended if op.table), ""),
        ids=draft.embedding.ids if draft.embedding else "",
        positions=draft.positions,
        chosen=choice.chosen if choice else "",
        logits=choice.logits if choice else "",
        experts=draft.experts,
        row_attention=row_attention_shapes(draft),
        given=tuple(draft.given.values()),
    )


def add_attention(draft: BatchDraft, now: int, op: FusedAttention) -> None:
    """Shares of the cached positions; k_row and v_row are of the first sequence and head."""
    shape = draft.attention
    assert shape is not None
    rows = [num * shape.head_dim for num in (shape.num_heads, *[shape.num_kv_heads] * 2)]
    names = op.q, op.k, op.v
    for name, num in zip(names, rows, strict=True):
        if name not in draft.number_of or draft.elements(name) != num:
            raise unfit(f"{op.name!r}, which takes {name!r} of another size")
    row_bytes, width = shape.head_dim * ITEM_BYTES, shape.num_heads * shape.head_dim
    form = op.out, None
    if op.out in draft.taken or not draft.published(op.out)[1]:
        raise unfit(f"{op.name!r}, whose result others than contractions take as it is")
    one = BatchAttention(
        name=op.name,
        k_row=draft.states.offset(op.k_cache) // row_bytes,
        v_row=draft.states.offset(op.v_cache) // row_bytes,
        window=op.window or NO_WINDOW,
        src=draft.number_of[op.q],
        k_src=draft.number_of[op.k],
        v_src=draft.number_of[op.v],
        num_rows=rows[0] if shape.apart else sum(rows),
        dst=CHUNK * take_chunks(draft, now, form, "attention", width),
        q_norm=draft.placed.vector(op.q_norm.weight) if op.q_norm else NOTHING,
        k_norm=draft.placed.vector(op.k_norm.weight) if op.k_norm else NOTHING,
        table=draft.placed.table(op.bias, "f32") if op.bias else 0,
    )
    for queue in draft.queues:
        queue.append(one)
