"""Queues of the kernel of one row: which SM computes which rows of which fused op, where data lie.

In: fused ops (tasks/fuse/) in any order that follows their data, and the layouts of the weight and
state arenas. Out: a RowQueues: the instructions of every SM, sizes of what they exchange and keep,
and what the kernel is specialised for. Torch-free. Next on the walk: one_row/runner.py.

Every SM gets the same number of rows of each matrix. No event orders the tasks: a reader polls the
words it needs until they carry the flag of their step and generation. Ops of one class, like those
of equal layers, publish into one buffer in turn, its generations. That nobody overwrites what
another has yet to read follows from paths of the dataflow, which proof.py finds for each program;
where there is none, a class gets two buffers that take turns, or fewer SMs take part.

What the pointwise ops of an epilogue take besides products stays with the SM that made it, in f32:
the rows of two ops with equally many rows belong to the same SMs. Where ranks share the program,
all have the same queues, so an SM owns the same rows on each. It pushes its part of a sum over
ranks into the buffers of its likes, and each adds them up, or whoever reads them (deferred.py);
then the first rank alone carries what is added besides.

Experts of one row: there are as many slots as experts are chosen, so all tiles are known, and only
where they lie is not. Slots lie one behind the other, as rows of the first product and as columns
of the last. Every SM that has tiles of theirs chooses for itself, from scores that all poll.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from itertools import product

from distmega.kernels.hopper.plan.experts import find_wrong_slot, last_matrices
from distmega.kernels.hopper.plan.matrices import Weights, num_units, rows_of, tiles_k
from distmega.kernels.hopper.plan.pointwise import in_order
from distmega.kernels.hopper.plan.types import (
    ROW_MATRICES,
    RowQueues,
    unfit,
)
from distmega.kernels.hopper.plan.words import (
    LEAST_STAGES,
    MAX_SMS,
    STAGE_CHUNKS,
    TILE_K,
    Instruction,
    RowBarrier,
    RowLinear,
    RowSample,
)
from distmega.kernels.hopper.row_plan.attention import add_attention
from distmega.kernels.hopper.row_plan.choice import add_choice, reserve_choice, sm_logits
from distmega.kernels.hopper.row_plan.deferred import find_deferred
from distmega.kernels.hopper.row_plan.draft import RowDraft
from distmega.kernels.hopper.row_plan.embedding import add_embedding
from distmega.kernels.hopper.row_plan.epilogues import find_classes, find_epilogues
from distmega.kernels.hopper.row_plan.linear import add_contraction, add_routing
from distmega.kernels.hopper.row_plan.pointwise import add_gather, add_pointwise
from distmega.kernels.hopper.row_plan.proof import find_hazard, find_late_start
from distmega.kernels.hopper.row_plan.starts import add_starts
from distmega.kernels.runtime.arena import ArenaLayout
from distmega.kernels.tasks.fuse import (
    Fused,
    FusedAttention,
    FusedChoice,
    FusedContraction,
    FusedEmbedding,
    FusedGather,
    FusedPointwise,
    FusedRouting,
    InputNorm,
    first_that_fits,
    shown_by_views,
)
from distmega.kernels.tasks.mode import Mode
from distmega.program.types import Program, Tensor

MAX_COPIES = 2
"""Buffers of one class, at most, before each op gets its own."""


def build_queues(
    segment: Program,
    weights: ArenaLayout,
    states: ArenaLayout,
    num_sms: int,
    team_rank: int = 0,
    mode: Mode = "overlap",
    divided: Container[str] = (),
) -> RowQueues:
    """Queues for at most `num_sms` SMs of rank `team_rank` of its team. mode "op": each
    fused op waits for all SMs to be done with the one before, as with one event an op; a baseline,
    and an oracle for the results. divided: tensors of which each rank has another part.
    UnsupportedError where the kernel can't do the segment.
    """

    def build(fused: tuple[Fused, ...]) -> RowQueues:
        placed = Weights(segment, weights, ROW_MATRICES, last_matrices(fused))
        hazard = ""
        for way in _ways(fused, placed, min(num_sms, MAX_SMS)):
            draft = RowDraft(
                segment, fused, weights, states, placed, *way, team_rank, mode, divided
            )
            queues = fill_queues(draft)
            _require_slots(queues)
            if not queues.chosen and find_late_start(queues):
                queues = add_starts(queues)
            hazard = find_hazard(queues) or find_wrong_slot(queues)
            if not hazard:
                return queues
        raise unfit(f"a segment where {hazard}")

    return first_that_fits(segment, build, takes_norm)


def takes_norm(norm: InputNorm, weight: Tensor | None, length: int, is_shared: bool) -> bool:
    """Whether linears can do a norm of so many elements; `is_shared` if the SMs keep its result."""
    is_wide = weight is not None and weight.dtype == "f32"
    if norm.kind == "layer_norm":
        return bool(norm.bias) and not is_wide and tiles_k(length) <= STAGE_CHUNKS
    return not (is_wide and is_shared)


def _require_slots(queues: RowQueues) -> None:
    """UnsupportedError unless the ring has slots for its loads, and for a block of keys and values,
    beside the longest row.
    """
    row = f"a row of {TILE_K * queues.max_tiles_k} elements in an SM's memory"
    if queues.attention and queues.stages < queues.attention.block_slots:
        raise unfit(f"heads of {queues.attention.head_dim} beside {row}")
    if queues.stages < LEAST_STAGES:
        raise unfit(row)


def _ways(fused: Sequence[Fused], placed: Weights, num_sms: int) -> Iterator[tuple[int, int, bool]]:
    """SMs, buffers a class and RowDraft.hears_all to try, from the fastest on: all SMs, then no
    more than have rows in each of the larger contractions; few buffers, then one an op.
    """
    products = [op for op in fused if isinstance(op, FusedContraction)]
    chosen = {op.source for op in fused if isinstance(op, FusedChoice)}
    for op in products:
        if chosen.intersection(op.outs):  # every SM has a part in the choice of an id
            num_sms = min(num_sms, num_units(rows_of(op, placed)))
    units = {num_units(rows_of(op, placed)) for op in products}
    sizes = sorted({num_sms, *(one for one in units if one < num_sms)}, reverse=True)
    hears = (False, True) if any(isinstance(op, FusedGather) for op in fused) else (False,)
    yield from product(sizes, range(1, MAX_COPIES + 1), hears)
    yield from product(sizes, (len(fused),), hears)


def fill_queues(draft: RowDraft) -> RowQueues:
    """Goes through the ops in order, each of which adds its instructions."""
    draft.queues = [[] for _ in range(draft.num_sms)]
    draft.shown = shown_by_views(draft.segment)
    draft.inspect()
    draft.fused = tuple(in_order(op, draft.tables, draft.entry) for op in draft.fused)
    draft.deferred = find_deferred(draft)
    find_classes(draft)
    draft.epilogues = find_epilogues(draft)
    if draft.choice and not any(one.ranked for one in draft.epilogues):
        raise unfit(f"a choice from {draft.choice.source!r}")
    draft.find_lightest()
    add_embedding(draft)
    for i, op in enumerate(draft.fused):
        add_instructions(draft, i, op)
        if i + 1 < len(draft.fused) and not isinstance(draft.fused[i + 1], FusedChoice):
            add_barrier(draft, i)
    if draft.choice:
        reserve_choice(draft, draft.choice)
    return finished(draft)


def add_instructions(draft: RowDraft, i: int, op: Fused) -> None:
    """Those of op number i."""
    match op:
        case FusedContraction():
            add_contraction(draft, i, op)
        case FusedAttention():
            add_attention(draft, i, op)
        case FusedRouting():
            add_routing(draft, op)
        case FusedPointwise():
            add_pointwise(draft, i, op)
        case FusedGather():
            add_gather(draft, op)
        case FusedChoice():
            add_choice(draft, op)


def finished(draft: RowDraft) -> RowQueues:
    """The draft's queues, and all that the kernel is told of them."""
    choice, sampler = draft.choice, draft.choice.sampler if draft.choice else None
    attention = next((op for op in draft.fused if isinstance(op, FusedAttention)), None)
    return RowQueues(
        num_ranks=draft.num_ranks,
        mode=draft.mode,
        attention=draft.attention,
        epilogues=tuple(draft.epilogues),
        formulas=tuple(draft.formulas),
        wide_norms=draft.wide_norms,
        num_generations=draft.num_generations,
        max_tiles_k=max(tiles_k(draft.length(op)) for op in draft.contractions()),
        eps=draft.eps,
        matrices=draft.placed.matrices,
        queues=chosen_last(draft),
        num_kept=draft.num_kept,
        outputs=draft.outputs(),
        sampler=sampler,
        rank_logits=draft.rank_logits,
        sm_logits=sm_logits(draft, sampler) if choice else 0,
        logits_at=draft.logits_at,
        best=draft.first_of("best"),
        sample=draft.first_of("sample"),
        num_words=draft.num_words,
        buffers=tuple(draft.buffers.values()),
        first_id=draft.team_rank * draft.rank_logits,
        embed=draft.embedding.table if draft.embedding else draft.entry,
        entry_columns=draft.entry_columns(),
        rope_table=attention.table if attention else "",
        ids=draft.embedding.ids if draft.embedding else "",
        positions=draft.positions,
        chosen=choice.chosen if choice else "",
        logits=choice.logits if choice else "",
        experts=draft.experts,
        expert_matrix=draft.expert_matrix(),
    )


def chosen_last(draft: RowDraft) -> tuple[tuple[Instruction, ...], ...]:
    """The queues, in which those instructions are of the last generation of all by which an id is
    chosen: a step begins with the last flag of the one before.
    """
    last = draft.num_generations - 1

    def moved(one: Instruction) -> Instruction:
        if isinstance(one, RowSample):
            return replace(one, generation=last)
        if isinstance(one, RowLinear) and draft.epilogues[one.opcode].ranked:
            delta = one.flag_delta + last - one.generation
            return replace(one, generation=last, flag_delta=delta)
        return one

    return tuple(tuple(map(moved, queue)) for queue in draft.queues)


def add_barrier(draft: RowDraft, nth: int) -> None:
    """All SMs wait for each other, in mode "op"."""
    op = draft.fused[nth]
    if draft.mode == "op" and not isinstance(op, FusedEmbedding):
        kind, generation = draft.turn(f"barrier after {draft.classes[nth]}")
        dst = draft.reserve(kind, 2 * draft.num_sms)
        for queue in draft.queues:
            queue.append(
                RowBarrier(
                    name=op.name, generation=generation, dst=dst, num_words=2 * draft.num_sms
                )
            )
