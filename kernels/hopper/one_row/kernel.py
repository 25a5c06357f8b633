"""The kernel of one row: one persistent program an SM, a loader warp and eight compute warps;
several steps a launch where each chooses the token of the next.

In: queues (plan/words.py), the weight arena, the KV cache, the symmetric buffer of flagged words,
the state. Out: what SMs keep, tokens, the state advanced. It holds the bodies and epilogues that
its segment uses; its size depends neither on the number of ops nor on the context. Next on the
walk: the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from distmega.kernels.gluon_compat import cta_barrier, keep_alive
from distmega.kernels.hopper.epilogues import count
from distmega.kernels.hopper.one_row.attention import attention_task
from distmega.kernels.hopper.one_row.linear import linear_task
from distmega.kernels.hopper.one_row.loader import begin, loader
from distmega.kernels.hopper.one_row.pointwise import pointwise_task
from distmega.kernels.hopper.one_row.products import address_of, write_addresses
from distmega.kernels.hopper.one_row.route import has_experts, num_chosen, route_task
from distmega.kernels.hopper.one_row.sample import sample_task
from distmega.kernels.hopper.one_row.splits import combine_task
from distmega.kernels.hopper.one_row.team import embed_task, most_likely, pass_barrier
from distmega.kernels.hopper.plan.fields import (
    DST,
    GENERATION,
    GREEDY,
    NO_CHOICE,
    OP_ATTENTION,
    OP_BARRIER,
    OP_COMBINE,
    OP_EMBED,
    OP_POINTWISE,
    OP_ROUTE,
    OP_SAMPLE,
    OPCODE,
    SAMPLE_LOGITS,
    SAMPLED,
    STAMPS,
    STATE_EPOCH,
    STATE_POSITION,
    STATE_SAMPLING,
    STATE_SEED,
    STATE_TOKEN,
    WORDS,
)
from distmega.kernels.hopper.ptx.device import clock, fence_all, fetch, keep
from distmega.kernels.hopper.ptx.shapes import (
    GROUP_ROWS,
    NUM_WARPS,
    PLAIN,
    PLAIN2,
    SLICE_K,
    TILE_ROWS,
    TILE_SHARED,
    WORDS_A_CHUNK,
    num_halves,
)
from distmega.kernels.runtime.mbarriers import init_barriers, make_barriers


@gluon.jit
def compute(
    queue, num_instructions, num_instructions_max, num_steps, num_generations, first_token,
    first_position, state, tokens, symmetric, vectors, embed, cache, rope, kept, best_words,
    num_sms, peers, team_rank, first_id, min_blocks, eps, scale, trace, ring, squares, red,
    step_bar, slots, chosen_bar, EXPERTS: gl.constexpr, D: gl.constexpr, G: gl.constexpr,
    H: gl.constexpr, KVH: gl.constexpr, QK_NORM: gl.constexpr, ROTATED: gl.constexpr, ATTENDS:
    gl.constexpr, EPILOGUES: gl.constexpr, LAYER_NORMS: gl.constexpr, KEEPS_NORMED: gl.constexpr,
    CHOICE: gl.constexpr, HEAD_ROWS: gl.constexpr, RANKS: gl.constexpr, BARRIERS: gl.constexpr,
    STAGES: gl.constexpr, TRACE: gl.constexpr, APART: gl.constexpr, SOFTCAP: gl.constexpr,
    FORMULAS: gl.constexpr, PASSES: gl.constexpr, WIDE: gl.constexpr,
):
    """Partition of eight warps. A datum of generation g and step s is flagged
    s * num_generations + g + 1."""
    sm = gl.program_id(0)
    position0 = begin(state + STATE_POSITION, first_position)
    epoch0 = gl.load(state + STATE_EPOCH)
    token = begin(state + STATE_TOKEN, first_token)
    it = 0
    # within limits each rank samples by itself
    BESTS: gl.constexpr = 1 if CHOICE != GREEDY and CHOICE != SAMPLED else RANKS
    words = fetch(queue, 0)
    for step in range(num_steps):
        base = (epoch0 + step) * num_generations + 1
        if CHOICE != NO_CHOICE and step > 0:
            token = most_likely(symmetric, best_words, num_sms, base - 1, BESTS)
            fence_all()
            if sm == 0:
                gl.store(tokens + step - 1, token)
        mbarrier.arrive(step_bar.index(0), count=1)
        for i in range(num_instructions):
            ahead = fetch(queue, gl.where(i + 1 == num_instructions, 0, i + 1))
            flag = base + words[GENERATION]
            at = trace
            if TRACE:
                row = (step * gl.num_programs(0) + sm) * num_instructions_max + i
                at = trace + row * STAMPS
                gl.store(at, clock())
            if ATTENDS and words[OPCODE] == OP_ATTENTION:
                it = attention_task(
                    words, symmetric, vectors, cache, rope, position0 + step, flag, eps, scale,
                    min_blocks, ring, it, at, D, G, H, KVH, QK_NORM, ROTATED, STAGES, TRACE,
                    APART, SOFTCAP, WIDE,
                )
            elif ATTENDS and words[OPCODE] == OP_COMBINE:
                combine_task(words, symmetric, position0 + step, flag, min_blocks, D)
            elif BARRIERS and words[OPCODE] == OP_BARRIER:
                pass_barrier(words, symmetric, sm, flag)
            elif count(FORMULAS) > 0 and words[OPCODE] == OP_POINTWISE:
                pointwise_task(
                    words, symmetric, vectors, embed, token, position0 + step, kept, flag, FORMULAS,
                    PASSES, WIDE, RANKS,
                )
            elif RANKS > 1 and words[OPCODE] == OP_EMBED:
                embed_task(words, peers, embed, token, flag, RANKS)
            elif has_experts(EXPERTS) and words[OPCODE] == OP_ROUTE:
                route_task(words, symmetric, ring[4], slots, chosen_bar, flag, EXPERTS)
            elif CHOICE != GREEDY and CHOICE != NO_CHOICE and words[OPCODE] == OP_SAMPLE:
                # kept here, or else what follows from them takes registers from other tasks
                sample_task(
                    words, kept + words[SAMPLE_LOGITS], first_id,
                    (state + STATE_SAMPLING).to(gl.pointer_type(gl.float32), bitcast=True),
                    (state + STATE_SEED).to(gl.pointer_type(gl.int64), bitcast=True),
                    position0 + step, symmetric, peers, team_rank, words[DST], best_words, keep(sm),
                    keep(num_sms), flag, CHOICE, HEAD_ROWS, RANKS,
                )
                # again, since meanwhile these words would take registers from all tasks
                ahead = fetch(queue, gl.where(i + 1 == num_instructions, 0, i + 1))
            else:
                it = linear_task(
                    words, symmetric, vectors, embed, token, kept, flag, sm, best_words,
                    num_sms, peers, team_rank, first_id, eps, squares, red, ring, slots, it, at,
                    EXPERTS, EPILOGUES, LAYER_NORMS, KEEPS_NORMED, CHOICE, RANKS, STAGES, TRACE,
                    WIDE,
                )
            if TRACE:
                gl.store(at + STAMPS - 1, clock())
            words = ahead
    if sm == 0:
        last = (epoch0 + num_steps) * num_generations
        if CHOICE != NO_CHOICE:
            token = most_likely(symmetric, best_words, num_sms, last, BESTS)
            gl.store(tokens + num_steps - 1, token)
            gl.store(state + STATE_TOKEN, token)
        gl.store(state + STATE_POSITION, position0 + num_steps)
        gl.store(state + STATE_EPOCH, epoch0 + num_steps)


@gluon.jit(
    do_not_specialize=[
        "max_instructions",
        "num_steps",
        "num_generations",
        "first_token",
        "first_position",
        "best_words",
        "num_sms",
        "team_rank",
        "first_id",
        "min_blocks",
    ]
)
def decode(
    weights0, weights1, weights2, weights3, weights4, weights5, cache_tiles, queues, counts,
    max_instructions, num_steps,
    num_generations, first_token, first_position, state, tokens, symmetric, vectors, embed, cache,
    rope, kept, best_words, num_sms, peers, team_rank, first_id, min_blocks, eps, scale, trace,
    D: gl.constexpr, G: gl.constexpr, H: gl.constexpr,
    KVH: gl.constexpr, QK_NORM: gl.constexpr, ROTATED: gl.constexpr, ATTENDS: gl.constexpr,
    EXPERTS: gl.constexpr,
    EPILOGUES: gl.constexpr, LAYER_NORMS: gl.constexpr, KEEPS_NORMED: gl.constexpr,
    MAX_TILES_K: gl.constexpr, NUM_MATRICES: gl.constexpr, CHOICE: gl.constexpr,
    HEAD_ROWS: gl.constexpr, RANKS: gl.constexpr,
    BARRIERS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, TRACE: gl.constexpr,
    APART: gl.constexpr, SOFTCAP: gl.constexpr, FORMULAS: gl.constexpr, PASSES: gl.constexpr,
    WIDE: gl.constexpr,
):
    """num_steps decode steps at batch 1; one program an SM, all resident.

    first_token, first_position: of the first step, or -1 to go on from the state.
    weights0 to 5: NUM_MATRICES descriptors of row-major matrices, one a row length k, then that of
    the last matrices of experts, if EXPERTS, an ExpertShape or None; and others: bf16
    [k / 64, rows, 64].
    cache_tiles: descriptor of cache, bf16 [rows, d]. vectors: norm weights and biases, bf16.
    embed: bf16, this rank's part of [vocab, hidden]. queues: int32 [num_sms, max_instructions, 16].
    symmetric: int64 flagged words behind a report (ptx/spins.py), zeroed once when allocated. kept:
    f32, each element used by one SM; logits are there, the first of which is of token first_id.
    rope: f32 [t, d], cosines then sines. peers: a tuple of all ranks' symmetric buffers; this rank
    is `team_rank` of them. CHOICE: see sample.py; HEAD_ROWS: logits of an SM, at most, a
    power of two. APART: whether queries, keys and values lie apart; SOFTCAP: what scores
    are kept below, or 0. FORMULAS, PASSES: see
    pointwise.py. WIDE: whether weights of norms are f32. trace: int64 [num_steps, num_sms,
    max_instructions, STAMPS] if TRACE, nanoseconds.

    Addresses are sums of numbers, not of pointers: the compiler would keep the part of a pointer
    that is the same in all steps in registers of all tasks.
    """
    sm = gl.program_id(0)
    queue = queues + sm * max_instructions * WORDS
    num_instructions = gl.load(counts + sm)
    bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE_ROWS, SLICE_K], TILE_SHARED)
    xs = gl.allocate_shared_memory(gl.int32, [MAX_TILES_K * WORDS_A_CHUNK], PLAIN)
    red = gl.allocate_shared_memory(gl.float32, [NUM_WARPS, GROUP_ROWS], PLAIN2)
    squares = gl.allocate_shared_memory(gl.float32, [NUM_WARPS], PLAIN)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if has_experts(EXPERTS):
        chosen = gl.allocate_shared_memory(gl.int32, [2 * num_chosen(EXPERTS)], PLAIN)
    write_addresses()
    cta_barrier()
    # addresses, for PTX: of the ring, its barriers, x, and what a linear's warps add up
    ring = (
        address_of(bufs), address_of(ready), address_of(free), address_of(xs), address_of(red),
        address_of(squares),
    )  # fmt: skip
    if has_experts(EXPERTS):
        slots = address_of(chosen)
    else:
        slots: gl.constexpr = 0
    cta_barrier()
    weights = (weights0, weights1, weights2, weights3, weights4, weights5)
    init_barriers(ready, STAGES, 1)
    init_barriers(free, STAGES, NUM_WARPS)
    step_bar = make_barriers(1)
    if has_experts(EXPERTS):
        chosen_bar = make_barriers(1)
    else:
        chosen_bar: gl.constexpr = 0
    gl.warp_specialize(
        [
            (
                compute,
                (
                    queue, num_instructions, max_instructions, num_steps, num_generations,
                    first_token, first_position, state, tokens, symmetric, vectors, embed, cache,
                    rope, kept, best_words, num_sms, peers, team_rank, first_id, min_blocks,
                    eps, scale, trace, ring, squares, red,
                    step_bar, slots, chosen_bar, EXPERTS, D, G, H, KVH, QK_NORM, ROTATED, ATTENDS,
                    EPILOGUES, LAYER_NORMS, KEEPS_NORMED, CHOICE, HEAD_ROWS, RANKS, BARRIERS,
                    STAGES, TRACE, APART, SOFTCAP, FORMULAS, PASSES, WIDE,
                ),
            ),
            (
                loader,
                (
                    weights, cache_tiles, queue, num_instructions, num_steps,
                    first_position, state, min_blocks, bufs, ready, free, step_bar, slots,
                    chosen_bar, ATTENDS, EXPERTS, num_halves(D), NUM_MATRICES, STAGES, AHEAD,
                ),
            ),
        ],
        [1],
        [40],
    )
    # PTX alone, unseen by Triton, writes these: they must not lie where other things do
    keep_alive(xs)
    keep_alive(red)
    keep_alive(squares)
    if has_experts(EXPERTS):
        keep_alive(chosen)
