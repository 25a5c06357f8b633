"""The kernel of one row: one persistent program an SM, a loader warp and eight compute warps;
several steps a launch where each chooses the id of the next.

In: queues (plan/words.py), the weight arena, the KV cache, the symmetric buffer of flagged words,
the state. Out: what SMs keep, ids, the state advanced. It holds the bodies and epilogues that
its segment uses; its size depends neither on the number of ops nor on the context. Next on the
walk: the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from distmega.kernels.gluon_compat import cta_barrier, keep_alive
from distmega.kernels.hopper.epilogues import count
from distmega.kernels.hopper.one_row.arguments import RingAddresses, RowTeam, WarpSums
from distmega.kernels.hopper.one_row.bodies.attention import attention_task
from distmega.kernels.hopper.one_row.bodies.linear import linear_task
from distmega.kernels.hopper.one_row.bodies.pointwise import pointwise_task
from distmega.kernels.hopper.one_row.bodies.products import address_of, write_addresses
from distmega.kernels.hopper.one_row.bodies.sample import sample_task
from distmega.kernels.hopper.one_row.bodies.splits import combine_task
from distmega.kernels.hopper.one_row.loader import begin, loader
from distmega.kernels.hopper.one_row.route import route_task
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
    ROW_STATE_EPOCH,
    ROW_STATE_ID,
    ROW_STATE_POSITION,
    ROW_STATE_SAMPLING,
    ROW_STATE_SEED,
    SAMPLE_LOGITS,
    SAMPLED,
    STAMPS,
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
)
from distmega.kernels.runtime.mbarriers import init_barriers, make_barriers


@gluon.jit
def compute(
    queue, num_instructions, num_instructions_max, num_steps, num_generations, first_row_id,
    first_position, memory, team, min_blocks, eps, scale, trace, ring, sums, step_bar, slots,
    chosen_bar, spec: gl.constexpr,
):
    """Partition of eight warps. A datum of generation g and step s is flagged
    s * num_generations + g + 1."""
    RANKS: gl.constexpr = spec.num_ranks
    CHOICE: gl.constexpr = spec.choice
    TRACE: gl.constexpr = spec.trace
    EXPERTS: gl.constexpr = spec.experts
    FORMULAS: gl.constexpr = spec.formulas
    sm = gl.program_id(0)
    position0 = begin(memory.state + ROW_STATE_POSITION, first_position)
    epoch0 = gl.load(memory.state + ROW_STATE_EPOCH)
    row_id = begin(memory.state + ROW_STATE_ID, first_row_id)
    it = 0
    # within limits each rank samples by itself
    BESTS: gl.constexpr = 1 if CHOICE != GREEDY and CHOICE != SAMPLED else RANKS
    words = fetch(queue, 0)
    for step in range(num_steps):
        base = (epoch0 + step) * num_generations + 1
        if CHOICE != NO_CHOICE and step > 0:
            row_id = most_likely(
                memory.symmetric, team.best_words, team.num_sms, base - 1, BESTS
            )
            fence_all()
            if sm == 0:
                gl.store(memory.ids + step - 1, row_id)
        mbarrier.arrive(step_bar.index(0), count=1)
        for i in range(num_instructions):
            ahead = fetch(queue, gl.where(i + 1 == num_instructions, 0, i + 1))
            flag = base + words[GENERATION]
            at = trace
            if TRACE:
                row = (step * gl.num_programs(0) + sm) * num_instructions_max + i
                at = trace + row * STAMPS
                gl.store(at, clock())
            if spec.attends and words[OPCODE] == OP_ATTENTION:
                it = attention_task(
                    words, memory, position0 + step, flag, eps, scale, min_blocks, ring, it, at,
                    spec,
                )
            elif spec.attends and words[OPCODE] == OP_COMBINE:
                combine_task(
                    words, memory.symmetric, position0 + step, flag, min_blocks, spec.head_dim
                )
            elif spec.barriers and words[OPCODE] == OP_BARRIER:
                pass_barrier(words, memory.symmetric, sm, flag)
            elif count(FORMULAS) > 0 and words[OPCODE] == OP_POINTWISE:
                pointwise_task(
                    words, memory.symmetric, memory.vectors, memory.embed, row_id, position0 + step,
                    memory.kept, flag, FORMULAS, spec.passes, spec.wide_norms, RANKS,
                )
            elif RANKS > 1 and words[OPCODE] == OP_EMBED:
                embed_task(words, team.peers, memory.embed, row_id, flag, RANKS)
            elif EXPERTS is not None and words[OPCODE] == OP_ROUTE:
                route_task(words, memory.symmetric, ring.sums, slots, chosen_bar, flag, EXPERTS)
            elif CHOICE != GREEDY and CHOICE != NO_CHOICE and words[OPCODE] == OP_SAMPLE:
                # kept here, or else what follows from them takes registers from other tasks
                settings, seed = memory.state + ROW_STATE_SAMPLING, memory.state + ROW_STATE_SEED
                sample_task(
                    words, memory.kept + words[SAMPLE_LOGITS], team.first_id,
                    settings.to(gl.pointer_type(gl.float32), bitcast=True),
                    seed.to(gl.pointer_type(gl.int64), bitcast=True),
                    position0 + step, memory.symmetric, team.peers, team.rank, words[DST],
                    team.best_words, keep(sm), keep(team.num_sms), flag, CHOICE, spec.sm_logits,
                    RANKS,
                )
                # again, since meanwhile these words would take registers from all tasks
                ahead = fetch(queue, gl.where(i + 1 == num_instructions, 0, i + 1))
            else:
                it = linear_task(
                    words, memory, team, row_id, flag, sm, eps, sums, ring, slots, it, at, spec
                )
            if TRACE:
                gl.store(at + STAMPS - 1, clock())
            words = ahead
    if sm == 0:
        last = (epoch0 + num_steps) * num_generations
        if CHOICE != NO_CHOICE:
            row_id = most_likely(memory.symmetric, team.best_words, team.num_sms, last, BESTS)
            gl.store(memory.ids + num_steps - 1, row_id)
            gl.store(memory.state + ROW_STATE_ID, row_id)
        gl.store(memory.state + ROW_STATE_POSITION, position0 + num_steps)
        gl.store(memory.state + ROW_STATE_EPOCH, epoch0 + num_steps)


@gluon.jit(
    do_not_specialize=[
        "max_instructions",
        "num_steps",
        "num_generations",
        "first_row_id",
        "first_position",
        "best_words",
        "num_sms",
        "team_rank",
        "first_id",
        "min_blocks",
    ]
)
def run_row_steps(
    weights0, weights1, weights2, weights3, weights4, weights5, cache_tiles, queues,
    max_instructions, num_steps, num_generations, first_row_id, first_position, memory, best_words,
    num_sms, peers, team_rank, first_id, min_blocks, eps, scale, trace, spec: gl.constexpr,
):
    """num_steps steps of one row; one program an SM, all resident.

    weights0 to 5: descriptors of row-major matrices in the weight arena, read alone:
    spec.num_matrices of them, one a row length k, then that of the last matrices of experts, if
    there are some; and others: bf16 [k / 64, rows, 64]. cache_tiles: descriptor of memory.cache,
    bf16 [rows, head_dim]. queues, memory: see QueueMemory, RowMemory. max_instructions: of an SM,
    as many as queues.words has room for. num_generations: flags of a step. first_row_id,
    first_position: of the first step, or -1 to go on from memory.state; nobody looks whether the
    table has the row. best_words: the first flagged word of the SMs' candidates for an id, num_sms:
    SMs that have one. peers: a tuple of int64, the flagged words of all ranks, in memory that all
    can write; this rank is `team_rank` of them, and the first of its logits is of id first_id.
    min_blocks: of 128 positions that a split has, at least. eps: of norms; scale: of attention,
    times log2(e). trace: int64 [num_steps, num_sms, max_instructions, STAMPS], nanoseconds, written
    by the kernel if spec.trace.

    Addresses are sums of numbers, not of pointers: the compiler would keep the part of a pointer
    that is the same in all steps in registers of all tasks.
    """
    sm = gl.program_id(0)
    EXPERTS: gl.constexpr = spec.experts
    queue = queues.words + sm * max_instructions * WORDS
    num_instructions = gl.load(queues.counts + sm)
    bufs = gl.allocate_shared_memory(gl.bfloat16, [spec.stages, TILE_ROWS, SLICE_K], TILE_SHARED)
    xs = gl.allocate_shared_memory(gl.int32, [spec.max_tiles_k * WORDS_A_CHUNK], PLAIN)
    red = gl.allocate_shared_memory(gl.float32, [NUM_WARPS, GROUP_ROWS], PLAIN2)
    squares = gl.allocate_shared_memory(gl.float32, [NUM_WARPS], PLAIN)
    ready = gl.allocate_shared_memory(gl.int64, [spec.stages, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [spec.stages, 1], mbarrier.MBarrierLayout())
    if EXPERTS is not None:
        chosen = gl.allocate_shared_memory(gl.int32, [2 * EXPERTS.num_chosen], PLAIN)
    write_addresses()
    cta_barrier()
    # addresses, for PTX: of the ring, its barriers, x, and what a linear's warps add up
    ring = RingAddresses(
        address_of(bufs), address_of(ready), address_of(free), address_of(xs), address_of(red),
        address_of(squares),
    )  # fmt: skip
    if EXPERTS is not None:
        slots = address_of(chosen)
    else:
        slots: gl.constexpr = 0  # type: ignore[no-redef]
    cta_barrier()
    sums = WarpSums(red, squares)
    team = RowTeam(peers, team_rank, first_id, best_words, num_sms)
    weights = (weights0, weights1, weights2, weights3, weights4, weights5)
    init_barriers(ready, spec.stages, 1)
    init_barriers(free, spec.stages, NUM_WARPS)
    step_bar = make_barriers(1)
    if EXPERTS is not None:
        chosen_bar = make_barriers(1)
    else:
        chosen_bar: gl.constexpr = 0  # type: ignore[no-redef]
    gl.warp_specialize(
        [
            (
                compute,
                (
                    queue, num_instructions, max_instructions, num_steps, num_generations,
                    first_row_id, first_position, memory, team, min_blocks, eps, scale, trace, ring,
                    sums, step_bar, slots, chosen_bar, spec,
                ),
            ),
            (
                loader,
                (
                    weights, cache_tiles, queue, num_instructions, num_steps, first_position,
                    memory.state, min_blocks, bufs, ready, free, step_bar, slots, chosen_bar, spec,
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
    if EXPERTS is not None:
        keep_alive(chosen)
