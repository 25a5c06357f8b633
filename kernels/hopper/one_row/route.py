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
from distmega.kernels.hopper.plan.fields import ROUTE_NUM_WORDS, SRC
from distmega.kernels.hopper.ptx.device import as_float, key_of
from distmega.kernels.hopper.ptx.route import put_asm, rank_asm, weigh_asm
from distmega.kernels.hopper.ptx.shapes import PER_THREAD, THREADS
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
def route_task(words, symmetric, scores, slots, chosen_bar, flag, EXPERTS: gl.constexpr):
    """Ranks the scores, an expert a thread. scores: address of 512 words in shared memory that
    nobody uses between tasks; slots: that of (expert, weight) of each slot; chosen_bar: passed
    once the experts are there, which may be before their weights.
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
