"""The choice of experts of one row: which matrices the loader brings, and what each weighs.

In: flagged scores of all experts. Out: of each slot the expert and its weight, in shared memory of
the SM; the loader hears of it by an mbarrier. Every SM finds the same, for it compares the same
bits. A score that is no number makes every weight none, so that logits show it; slots name experts
all the same, each another, whatever the scores. Next on the walk: ../ptx/route.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from distmega.kernels.gluon_compat import cta_barrier
from distmega.kernels.hopper.plan.fields import (
    GUESS_COLUMNS,
    GUESS_FIRST_AT,
    GUESS_LAST_AT,
    GUESS_LAST_COLUMNS,
    GUESS_LAST_ROW,
    GUESS_LAST_ROWS,
    GUESS_NUM_ROWS,
    GUESS_PAIR_ROW,
    GUESS_PAIRED,
    GUESS_ROW0,
    GUESS_UNITS,
    GUESS_WEIGHT_ROW,
    ROUTE_NUM_WORDS,
    SRC,
)
from distmega.kernels.hopper.ptx.device import as_float, key_of, prefetch_rows
from distmega.kernels.hopper.ptx.route import put_asm, rank_asm, weigh_asm
from distmega.kernels.hopper.ptx.shapes import PER_THREAD, THREADS, UNIT_ROWS, VECTOR_MULTIPLE
from distmega.kernels.hopper.ptx.spins import spin2


@gluon.jit
def expert_of(slots, slot):
    """The expert of a slot, once the choice is made. slots: address, see route_task."""
    # impure: slots are written by PTX, of which Triton does not know, again in every layer
    return gl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];",
        "=r,r",
        [slots + 8 * slot],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def weight_of(slots, slot):
    """What the expert of a slot weighs."""
    # as expert_of
    return gl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1+4];",
        "=f,r",
        [slots + 8 * slot],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def score_key(score):
    """A key by which zeros of both signs are equal."""
    return key_of((score + 0.0).to(gl.int32, bitcast=True))


@gluon.jit
def rank_scores(words, symmetric, scores, slots, flag, EXPERTS: gl.constexpr):
    """Ranks the scores, an expert a thread, and gives those of the first ranks their slots: each
    thread's score and rank, and whether a score of its is no number.
    """
    word = 2 * gl.arange(0, THREADS, layout=PER_THREAD)
    num_left = words[ROUTE_NUM_WORDS] - word
    bits0, bits1 = spin2(symmetric, symmetric + (words[SRC] + word), flag, num_left > 0)
    low = as_float(bits0)
    high = as_float(bits1)
    is_none = (low != low) | (high != high)
    low = gl.where((low == low) & (num_left > 0), low, float("-inf"))
    high = gl.where((high == high) & (num_left > 0), high, float("-inf"))
    # into memory that linears use by address alone; all threads read it behind the barrier
    gl.inline_asm_elementwise(
        put_asm(), "=&r,r,r,r", [scores + 4 * word, score_key(low), score_key(high)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    cta_barrier()
    # a loop over scores, four a load: a tensor of all pairs of experts would not fit registers
    x, rank = gl.inline_asm_elementwise(
        rank_asm(EXPERTS.num_chosen),
        "=&f,=&r,r,r,r",
        [scores + 0 * word, words[ROUTE_NUM_WORDS] + 0 * word, slots + 0 * word],
        dtype=(gl.float32, gl.int32),
        is_pure=False,
        pack=1,
    )
    cta_barrier()
    return x, rank, is_none


@gluon.jit
def ask(weights, at, row, columns, num_rows):
    """num_rows rows from `row` on of a matrix that begins `at` multiples of VECTOR_MULTIPLE."""
    elements = at.to(gl.int64) * VECTOR_MULTIPLE + row.to(gl.int64) * columns
    prefetch_rows(weights + elements, 2 * num_rows * columns)


@gluon.jit
def guess_task(words, symmetric, weights, scores, slots, flag, EXPERTS: gl.constexpr):
    """Asks the second-level cache for tiles of the experts of the largest scores, a block of rows a
    thread, 256 of them at most. weights: the arena, bf16. scores, slots: as of route_task; the
    loader reads no slot before the choice that follows.
    """
    rank_scores(words, symmetric, scores, slots, flag, EXPERTS)
    block = gl.arange(0, THREADS, layout=PER_THREAD)
    # rows of first matrices, as the loader's unit_row finds them
    own = words[GUESS_ROW0] // UNIT_ROWS + block
    first = words[GUESS_WEIGHT_ROW] + 0 * block
    is_paired = words[GUESS_PAIRED] != 0
    first = gl.where(is_paired & (own % 2 == 1), words[GUESS_PAIR_ROW], first)
    own = gl.where(is_paired, own // 2, own)
    is_first = block < words[GUESS_UNITS]
    slot = gl.where(is_first, own // EXPERTS.slot_units, 0)
    inner = own % EXPERTS.slot_units * UNIT_ROWS
    row = first + expert_of(slots, slot) * EXPERTS.width + inner
    num_rows = gl.minimum(EXPERTS.width - inner, UNIT_ROWS)
    ask(weights, words[GUESS_FIRST_AT], row, words[GUESS_COLUMNS], gl.where(is_first, num_rows, 0))
    # rows of last matrices, of all slots' experts
    above = block // EXPERTS.num_chosen * UNIT_ROWS
    row = words[GUESS_LAST_ROW] + above
    row += expert_of(slots, block % EXPERTS.num_chosen) * words[GUESS_NUM_ROWS]
    num_rows = gl.minimum(words[GUESS_LAST_ROWS] - above, UNIT_ROWS)
    ask(weights, words[GUESS_LAST_AT], row, words[GUESS_LAST_COLUMNS], num_rows)
    cta_barrier()


@gluon.jit
def route_task(words, symmetric, scores, slots, chosen_bar, flag, EXPERTS: gl.constexpr):
    """Ranks the scores, an expert a thread. scores: address of 512 words in shared memory that
    nobody uses between tasks; slots: that of (expert, weight) of each slot; chosen_bar: passed
    once the experts are there, which may be before their weights.
    """
    x, rank, is_none = rank_scores(words, symmetric, scores, slots, flag, EXPERTS)
    mbarrier.arrive(chosen_bar.index(0), count=1)
    none = gl.where(is_none, float("nan"), 0.0)
    is_chosen = rank < EXPERTS.num_chosen
    if EXPERTS.weighing == "values":
        weight = x + gl.sum(none, axis=0)
    else:
        part = gl.exp(x - gl.max(x, axis=0))
        if EXPERTS.weighing == "softmax":
            total = gl.sum(part + none, axis=0)
        else:
            total = gl.sum(gl.where(is_chosen, part, 0.0) + none, axis=0)
        weight = part / total
    # only chosen experts have a slot to write to
    gl.inline_asm_elementwise(
        weigh_asm(EXPERTS.num_chosen), "=&r,r,r,f", [slots + 0 * rank, rank, weight],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    cta_barrier()
