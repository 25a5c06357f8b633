"""The kernel of several rows: one persistent program an SM, a loader warp and eight compute warps;
several steps a launch where each chooses the ids of the next.

In: queues (batch_plan/words.py), the weight arena, the KV caches, positions. Out: numbers that are
kept, ids, logits of the last step, the state advanced. It holds the bodies and epilogues that its
segment uses; its size depends neither on the number of ops nor on the context, nor on how many of
the 16, 32 or 64 rows are in use. RANKS GPUs share a program as in one_row/kernel.py. Next on the
walk: the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from distmega.kernels.gluon_compat import cta_barrier, keep_alive, reinterpret
from distmega.kernels.hopper.batch.arguments import SlotRing
from distmega.kernels.hopper.batch.bodies.attention import (
    attention_task,
    count_blocks,
    first_piece,
    first_piece_of_many,
)
from distmega.kernels.hopper.batch.bodies.experts import is_of_rows
from distmega.kernels.hopper.batch.bodies.limits import sample_within_limits
from distmega.kernels.hopper.batch.bodies.linear import (
    embed_task,
    finish_task,
    gather_task,
    linear_task,
    next_ids,
    sum_factor,
)
from distmega.kernels.hopper.batch.bodies.norms import norm_task
from distmega.kernels.hopper.batch.bodies.pointwise import pointwise_task
from distmega.kernels.hopper.batch.bodies.products import product_task
from distmega.kernels.hopper.batch.bodies.rows import attend_rows
from distmega.kernels.hopper.batch.bodies.sample import sample_ids
from distmega.kernels.hopper.batch.device import signal_event, stamp, wait_event
from distmega.kernels.hopper.batch.loader import loader
from distmega.kernels.hopper.batch.route import Choice, padded, route_task
from distmega.kernels.hopper.batch.team import as_floats, hear_ranks, push_logits, symmetric_of
from distmega.kernels.hopper.batch_plan.fields import (
    ALL_LOGITS,
    ALL_ROW_MAXIMA,
    ATT_WINDOW,
    BATCH,
    BATCH_STATE_EPOCH,
    BATCH_STATE_POSITIONS,
    BEST_WORDS,
    BY_SM,
    MAX_EPILOGUES,
    NO_CHOICE,
    OP_ATTENTION,
    OP_EMBED,
    OP_GATHER,
    OP_NORM,
    OP_POINTWISE,
    OP_PRODUCT,
    OP_ROWS,
    OP_SAMPLE,
    OPCODE,
    SRC,
    STAMP_BEGIN,
    STAMP_CHOSEN,
    STAMP_END,
    STAMP_READY,
)
from distmega.kernels.hopper.epilogues import count, count_gathers, field
from distmega.kernels.hopper.one_row.bodies.products import address_of, write_addresses
from distmega.kernels.hopper.plan.fields import GREEDY, SAMPLED, WORDS
from distmega.kernels.hopper.ptx.device import fence_all, fetch, keep
from distmega.kernels.hopper.ptx.shapes import (
    MMA_M,
    NUM_WARPS,
    PLAIN,
    PLAIN2,
    PLAIN3,
    SLICE_K,
    TILE_ROWS,
    TILE_SHARED,
    UNIT_ROWS,
    num_halves,
)
from distmega.kernels.runtime.mbarriers import make_barriers


@gluon.jit
def write_ids(ids, step, chosen, ROWS: gl.constexpr):
    """[ROWS] ids of a step to row `step` of int32 [steps, ROWS]."""
    b = gl.arange(0, ROWS, layout=gl.SliceLayout(1, BY_SM))
    gl.store(ids + step * ROWS + b, chosen)


@gluon.jit
def sample_from_all(
    queue, num_instructions, memory, peers, sample_words, state, batch, step, sm, num_sms, flag,
    RANKS: gl.constexpr,
):
    """The last instruction, a sample within limits, where ranks share the program: its logits
    to every rank, then ids from those of all. It waits for words of all SMs in place of an
    event.
    """
    # or else what follows from them stays in registers, see threads_here
    sm = keep(sm)
    batch = keep(batch)
    num_sms = keep(num_sms)
    num_instructions = keep(num_instructions)
    push_logits(
        fetch(queue, num_instructions - 2), memory.logits, memory.bests, memory.events, peers,
        batch, sm, flag, RANKS,
    )
    words = fetch(queue, num_instructions - 1)
    symmetric = symmetric_of(memory.events)
    hear_ranks(words, symmetric, num_sms, flag, RANKS)
    sample_within_limits(
        words, as_floats(symmetric, words[ALL_LOGITS]), as_floats(symmetric, words[ALL_ROW_MAXIMA]),
        memory.events, sample_words, memory.bests, memory.best_rows, state, batch, step, sm,
        num_sms, RANKS,
    )
    signal_event(memory.events, num_instructions - 1)


@gluon.jit
def rows_given(batch, ROWS: gl.constexpr):
    """[ROWS]: the row of the input for each sequence; the first one for those not in use."""
    b = gl.arange(0, ROWS, layout=gl.SliceLayout(1, BY_SM))
    return gl.where(b < batch, b, 0)


@gluon.jit
def parts_of(partials, num_sms, spec: gl.constexpr):
    """Where the parts of products lie, behind the partials of attention."""
    return partials + num_sms * spec.partial_words


@gluon.jit
def is_own_sum(words):
    """Whether an instruction adds up parts that are this SM's own, of whole tiles."""
    return (words[OPCODE] < MAX_EPILOGUES) & (words[SRC] == 1)


@gluon.jit
def is_logits(words, EPILOGUES: gl.constexpr):
    """Whether ids are chosen from the result of a linear."""
    found = words[OPCODE] < 0
    for i in gl.static_range(count(EPILOGUES)):
        if field(EPILOGUES, i, "ranked"):
            found = words[OPCODE] == i
    return found


@gluon.jit
def compute(
    queue, num_instructions, num_steps, state, batch, num_sms, max_context, memory, eps, scale,
    sample_words, peers, trace, red, qs, ml, scratch, ring, step_bar, experts_at, opened_bar,
    chosen_bar, spec: gl.constexpr,
):
    """Partition of eight warps. With several ranks what instruction i of step s exchanges is
    flagged s * num_instructions + i + 1.
    """
    RANKS: gl.constexpr = spec.num_ranks
    ROWS: gl.constexpr = spec.rows
    EPILOGUES: gl.constexpr = spec.epilogues
    FORMULAS: gl.constexpr = spec.formulas
    EXPERTS: gl.constexpr = spec.experts
    ATTENDED: gl.constexpr = spec.row_attention
    CHOICE: gl.constexpr = spec.choice
    HEADS: gl.constexpr = spec.num_kv_heads * spec.num_parts
    LIMITED: gl.constexpr = CHOICE > SAMPLED and CHOICE < NO_CHOICE
    GATHERS: gl.constexpr = RANKS > 1 and LIMITED
    sm = gl.program_id(0)
    epoch0 = gl.load(state + BATCH_STATE_EPOCH)
    it = 0
    flag = 0
    words = fetch(queue, 0)
    for step in range(num_steps):
        if GATHERS:
            words = fetch(queue, 0)
        window = 0
        total = 0
        sequence = 0
        head = 0
        block = 0
        left = 0
        start = 0
        for i in range(num_instructions - 1 if GATHERS else num_instructions):
            following = gl.where(i + 1 == num_instructions, 0, i + 1)
            stamp(trace, step, num_instructions, i, STAMP_BEGIN)
            if EXPERTS is None:
                ahead = fetch(queue, following)
            else:
                # no registers to keep the next one in; this one comes while it waits
                words = fetch(queue, i)
                ahead = words
            epoch = epoch0 + step + gl.where(i > 0, 1, 0)
            before = gl.where(i > 0, i, num_instructions) - 1
            if RANKS > 1:
                flag = (epoch0 + step) * num_instructions + i + 1
            if ROWS > BATCH:
                factor = sum_factor(words, memory, eps, spec)
            if ROWS > BATCH and is_own_sum(words):
                cta_barrier()
            else:
                wait_event(memory.events, before, epoch * num_sms, flag, RANKS)
            stamp(trace, step, num_instructions, i, STAMP_READY)
            if spec.attends and words[OPCODE] == OP_ATTENTION:
                if words[ATT_WINDOW] != window:
                    window = words[ATT_WINDOW]
                    if ROWS > BATCH:
                        total, sequence, head, block, left, start = first_piece_of_many(
                            state, batch, step, window, sm, num_sms, HEADS, ROWS, NUM_WARPS
                        )
                    else:
                        total = count_blocks(state, batch, step, window, HEADS)
                        sequence, head, block, left, start = first_piece(
                            state, batch, step, window, total, sm, num_sms, HEADS
                        )
                it = attention_task(
                    words, memory, state, batch, step, sm, num_sms, max_context, eps, scale, qs, ml,
                    scratch, ring, it, sequence, head, block, left, start, total, spec,
                )
                if ROWS > BATCH:
                    ahead = fetch(queue, following)  # again: no registers to keep it in meanwhile
            elif words[OPCODE] == OP_EMBED:
                fence_all()
                mbarrier.arrive(step_bar.index(0), count=1)
                if spec.looks_up:
                    chosen = next_ids(words, memory, peers, 0, sm, flag, CHOICE, RANKS, ROWS)
                    if (sm == 0) & (step > 0):
                        write_ids(memory.ids, step - 1, chosen, ROWS)
                    if spec.keeps_ids:  # noqa: SIM102  a constant
                        if sm == 0:
                            write_ids(state + (BATCH_STATE_POSITIONS + ROWS), 0, chosen, ROWS)
                else:
                    chosen = rows_given(batch, ROWS)
                embed_task(
                    words, chosen, memory, peers, sm, flag, EPILOGUES, RANKS, ROWS, spec.wide_norms
                )
            elif count(ATTENDED) > 0 and words[OPCODE] >= OP_ROWS:
                attend_rows(
                    words, memory, red, state, batch, step, sm, num_sms, eps, ATTENDED, ROWS,
                    spec.wide_norms,
                )
                ahead = fetch(queue, following)  # again: no registers to keep it in meanwhile
            elif spec.normalises and words[OPCODE] == OP_NORM:
                norm_task(
                    words, memory.numbers, memory.acts, memory.vectors, batch, sm, num_sms, eps,
                    ROWS, spec.wide_norms,
                )
            elif count_gathers(EPILOGUES) > 0 and words[OPCODE] == OP_GATHER:
                gather_task(words, memory, peers, sm, flag, EPILOGUES, RANKS, spec.wide_norms)
            elif count(FORMULAS) > 0 and words[OPCODE] == OP_POINTWISE:
                pointwise_task(
                    words, memory, state, batch, step, sm, num_sms, FORMULAS, ROWS, spec.wide_norms
                )
            elif LIMITED and RANKS == 1 and words[OPCODE] == OP_SAMPLE:
                sample_within_limits(
                    words, memory.logits, memory.bests, memory.events, sample_words, memory.bests,
                    memory.best_rows, state, batch, step, sm, num_sms, RANKS,
                )
                ahead = fetch(queue, following)  # again: no registers to keep it in meanwhile
            elif ROWS > BATCH and words[OPCODE] == OP_PRODUCT:
                it = product_task(
                    words, memory.acts, parts_of(memory.partials, num_sms, spec), sm, num_sms, ring,
                    it, ROWS, spec.stages,
                )
                ahead = fetch(queue, following)  # again: no registers to keep it in meanwhile
            elif ROWS > BATCH:
                finish_task(
                    words, memory, parts_of(memory.partials, num_sms, spec), factor,
                    step + 1 == num_steps, sm, num_sms, spec,
                )
            else:
                if EXPERTS is not None:  # noqa: SIM102  a constant
                    if is_of_rows(words):
                        route_task(
                            words, memory.numbers, state, batch, step, sm, experts_at, opened_bar,
                            chosen_bar, EXPERTS, RANKS,
                        )
                        stamp(trace, step, num_instructions, i, STAMP_CHOSEN)
                it = linear_task(
                    words, queue, i, memory, peers, sm, num_sms, eps, red, ring, it, flag,
                    experts_at, spec,
                )
                if CHOICE == SAMPLED and is_logits(words, EPILOGUES):
                    sample_ids(
                        words, memory.logits, memory.events, memory.bests, memory.best_rows, state,
                        batch, step, sm, spec.sm_logits, RANKS,
                    )
                    ahead = fetch(queue, following)  # again: no registers to keep it in meanwhile
            if RANKS > 1 and CHOICE > GREEDY and CHOICE < NO_CHOICE:
                ahead = fetch(queue, following)  # here: no registers to keep it in before
            stamp(trace, step, num_instructions, i, STAMP_END)
            signal_event(memory.events, i)
            words = ahead
        if GATHERS:
            sample_from_all(
                queue, num_instructions, memory, peers, sample_words, state, batch, step, sm,
                num_sms, (epoch0 + step + 1) * keep(num_instructions), RANKS,
            )
    if sm == 0:
        if RANKS > 1:
            flag = (epoch0 + num_steps) * num_instructions
        wait_event(memory.events, num_instructions - 1, (epoch0 + num_steps) * num_sms, flag, RANKS)
        if CHOICE != NO_CHOICE:
            # in words of their own: the next launch's first must not overwrite what no one has read
            after = RANKS * BEST_WORDS
            if EXPERTS is not None and RANKS > 1:
                words = fetch(queue, 0)  # those of the last instruction until here
            chosen = next_ids(words, memory, peers, after, sm, flag, CHOICE, RANKS, ROWS)
            write_ids(memory.ids, num_steps - 1, chosen, ROWS)
        b = gl.arange(0, ROWS, layout=gl.SliceLayout(1, BY_SM))
        position = gl.load(state + BATCH_STATE_POSITIONS + b)
        gl.store(state + BATCH_STATE_POSITIONS + b, position + num_steps)
        gl.store(state + BATCH_STATE_EPOCH, epoch0 + num_steps)


@gluon.jit(
    do_not_specialize=[
        "num_instructions",
        "num_steps",
        "batch",
        "num_sms",
        "max_context",
        "sample_words",
    ]
)
def run_batch_steps(
    weights0, weights1, weights2, cache_tiles, queues, num_instructions, num_steps, state, batch,
    num_sms, max_context, memory, eps, scale, sample_words, peers, trace, spec: gl.constexpr,
):
    """num_steps steps of `batch` sequences; one program an SM, all resident.

    weights0 to 2: descriptors of row-major matrices in the weight arena, one a row length k: bf16
    [k / 64, rows, 64], read alone. cache_tiles: descriptor of memory.cache, bf16 [rows, head_dim].
    queues: int32 [num_sms, num_instructions, 16], from the runner (batch_plan/words.py). state:
    int32, positions of the sequences and a count of steps; the runner writes it between launches,
    the kernel at its end. max_context: cached positions of a sequence and head. memory: see
    BatchMemory. eps: of norms; scale: of attention, times log2(e). sample_words: the first 64-bit
    word of events where lists of samples lie. peers: a tuple of the events of all ranks, as int64,
    in memory that all can write; None for one rank. trace: int64 [num_steps, num_sms,
    num_instructions, BATCH_STAMPS], nanoseconds, written by the kernel; None if none are taken.
    spec: BatchSpec.
    """
    EXPERTS: gl.constexpr = spec.experts
    sm = gl.program_id(0)
    queue = queues + sm * num_instructions * WORDS
    slots = gl.allocate_shared_memory(gl.bfloat16, [spec.stages, TILE_ROWS, SLICE_K], TILE_SHARED)
    red = gl.allocate_shared_memory(gl.float32, [4 * NUM_WARPS, MMA_M, UNIT_ROWS], PLAIN3)
    scratch = reinterpret(red, gl.float32, [NUM_WARPS, UNIT_ROWS, 64], PLAIN3)
    qs = gl.allocate_shared_memory(gl.bfloat16, [num_halves(spec.head_dim), MMA_M, 64], PLAIN2)
    ml = gl.allocate_shared_memory(gl.float32, [2, NUM_WARPS, MMA_M], PLAIN2)
    if EXPERTS is not None:
        weighed = gl.allocate_shared_memory(gl.float32, [BATCH * padded(EXPERTS)], PLAIN)
        hits = gl.allocate_shared_memory(gl.int32, [2 * padded(EXPERTS)], PLAIN)
        write_addresses()
        cta_barrier()
        experts_at = Choice(address_of(weighed), address_of(hits))
        cta_barrier()
        opened_bar = make_barriers(1)
        chosen_bar = make_barriers(1)
    else:
        experts_at: gl.constexpr = 0  # type: ignore[no-redef]
        opened_bar: gl.constexpr = 0  # type: ignore[no-redef]
        chosen_bar: gl.constexpr = 0  # type: ignore[no-redef]
    ring = SlotRing(slots, make_barriers(spec.stages), make_barriers(spec.stages))
    step_bar = make_barriers(1)
    gl.warp_specialize(
        [
            (
                compute,
                (
                    queue, num_instructions, num_steps, state, batch, num_sms, max_context, memory,
                    eps, scale, sample_words, peers, trace, red, qs, ml, scratch, ring, step_bar,
                    experts_at, opened_bar, chosen_bar, spec,
                ),
            ),
            (
                loader,
                (
                    (weights0, weights1, weights2), cache_tiles, queue, num_instructions, num_steps,
                    state, batch, num_sms, max_context, trace, ring, step_bar, experts_at,
                    opened_bar, chosen_bar, spec,
                ),
            ),
        ], [1], [40],
    )
    if EXPERTS is not None:
        # PTX alone writes these, unseen by Triton
        keep_alive(weighed)
        keep_alive(hits)
