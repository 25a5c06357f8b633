"""The choice of experts of up to 16 rows: which the loader brings, which rows are theirs, and what
they weigh.

In: float32 scores of all rows, behind an event. Out, in shared memory of the SM: the experts that
some row has chosen and the rank has, in the order of their numbers, each with its rows as 16 bits,
and what each weighs in each row. Every SM finds the same, for it compares the same bits. A score
that is no number makes every weight of its row none, so that logits show it; experts are those that
there are all the same. Next on the walk: ../ptx/route.py.

The loader opens the place of a choice once it is done with the one before, and hears by another
mbarrier that the choice is there.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.runtime.jit import constexpr_function

from distmega.kernels.gluon_compat import cta_barrier
from distmega.kernels.hopper.batch.team import threads_here
from distmega.kernels.hopper.batch_plan.fields import (
    BATCH,
    BATCH_STATE_HITS,
    BY_EXPERT,
    EXP_CHOICE,
    EXP_FIRST_OWN,
    EXP_NUM_CHOICES,
    EXP_SCORES,
)
from distmega.kernels.hopper.ptx.device import keep, key_of
from distmega.kernels.hopper.ptx.route import count_asm, list_asm, put_if_asm

LOWEST = gl.constexpr(-(2**31))
"""Below the key of any score."""


class Choice(NamedTuple):
    """Addresses in shared memory. weights: f32 [experts, 16], of a row's experts; hits: int32, how
    many experts are hit, then of each, in a word, its number and, in the lower half, its rows.
    Before that, behind the first word, the rows of each expert.
    """

    weights: object
    hits: object


@constexpr_function
def padded(experts):
    """Experts that threads look at: a power of two, whole warps of them."""
    return max(32, 1 << (experts.num_experts - 1).bit_length())


@gluon.jit
def read_word(at):
    """A word of shared memory that a choice has written."""
    # impure: PTX writes it, of which Triton does not know, again in every layer
    return gl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def count_hits(chosen):
    """How many experts are hit. chosen: a Choice, as below."""
    return read_word(chosen.hits)


@gluon.jit
def expert_of_hit(chosen, hit):
    """Number of an expert that is hit."""
    return read_word(chosen.hits + 4 + 4 * hit) >> 16


@gluon.jit
def rows_of_hit(chosen, hit):
    """Rows that chose an expert that is hit: bit b is row b."""
    return read_word(chosen.hits + 4 + 4 * hit) & 0xFFFF


@gluon.jit
def weights_of(chosen, expert, b):
    """What an expert weighs in rows b that have chosen it."""
    # as read_word
    return gl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];",
        "=f,r",
        [chosen.weights + 64 * expert + 4 * b],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def number_of_choice(words, step):
    """How many choices of the launch came before this one."""
    return step * words[EXP_NUM_CHOICES] + words[EXP_CHOICE]


@gluon.jit
def take_highest(key, e, NUM: gl.constexpr):
    """Keys [16, experts], the NUM highest of each row made LOWEST; of equal ones the first."""
    for _ in range(NUM):
        highest = gl.expand_dims(gl.max(key, axis=1), 1)
        first = gl.min(gl.where(key == highest, e, 0x7FFFFFFF), axis=1)
        key = gl.where(e == gl.expand_dims(first, 1), LOWEST, key)
    return key


@gluon.jit
def route_task(
    words,
    numbers,
    state,
    batch,
    step,
    sm,
    chosen,
    opened_bar,
    chosen_bar,
    EXPERTS: gl.constexpr,
    RANKS: gl.constexpr,
):
    """Chooses for each of `batch` rows. chosen: a Choice; opened_bar: of the loader, passed once
    that may be written; chosen_bar: of this choice. state: see batch_words.BATCH_STATE_HITS.
    """
    NUM: gl.constexpr = EXPERTS.num_experts
    # or else what follows from them stays in registers, see threads_here
    batch = keep(batch)
    weights = keep(chosen.weights)
    hits = keep(chosen.hits)
    b = gl.expand_dims(gl.arange(0, BATCH, layout=gl.SliceLayout(1, BY_EXPERT)), 1)
    e = gl.expand_dims(gl.arange(0, padded(EXPERTS), layout=gl.SliceLayout(0, BY_EXPERT)), 0)
    if RANKS > 1:
        b += keep(0)  # as above: anew in each choice
        e += keep(0)
    used = (b < batch) & (e < NUM)
    at = numbers + words[EXP_SCORES] + b * NUM + e
    given = gl.load(at, mask=used, other=float("-inf"), cache_modifier=".cg")
    x = gl.where((given == given) & (given != 0.0), given, 0.0)
    x = gl.where(given == given, x, float("-inf"))
    # whole numbers in the order of the scores: a warp compares those by one instruction
    key = gl.where(used, key_of(x.to(gl.int32, bitcast=True)), LOWEST)
    is_chosen = used & (take_highest(key, e, EXPERTS.num_chosen) == LOWEST)
    none = gl.sum(gl.where(given == given, 0.0, float("nan")), axis=1)
    if EXPERTS.weighing == "values":
        weight = x + gl.expand_dims(none, 1)
    else:
        part = gl.exp(x - gl.expand_dims(gl.max(x, axis=1), 1))
        if EXPERTS.weighing == "softmax":
            total = gl.sum(part, axis=1) + none
        else:
            total = gl.sum(gl.where(is_chosen, part, 0.0), axis=1) + none
        weight = part / gl.expand_dims(total, 1)
    rows = gl.sum(gl.where(is_chosen, 1 << b, 0), axis=0)
    mbarrier.wait(opened_bar.index(0), number_of_choice(words, step) & 1)
    # by address, as all of a choice: what lies there changes while Triton sees no store
    gl.inline_asm_elementwise(
        put_if_asm(), "=&r,r,f,r", [weights + 64 * e + 4 * b, weight, is_chosen.to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    column = gl.arange(0, padded(EXPERTS), layout=gl.SliceLayout(0, BY_EXPERT))
    if not EXPERTS.has_all:
        own = column - words[EXP_FIRST_OWN]
        rows = gl.where((own >= 0) & (own < EXPERTS.num_own), rows, 0)
    gl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.b32 $0, 0;", "=&r,r,r", [hits + 4 + 4 * column, rows],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    cta_barrier()
    num_hits, before, own = gl.inline_asm_elementwise(
        count_asm(padded(EXPERTS)), "=&r,=&r,=&r,r", [hits + 4 + threads_here() * 0],
        dtype=(gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    cta_barrier()
    gl.inline_asm_elementwise(
        list_asm(), "=&r,r,r,r,r", [hits + before * 0, num_hits, before, own], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    cta_barrier()
    mbarrier.arrive(chosen_bar.index(0), count=1)
    if sm == 0:
        # waits for nothing
        gl.atomic_add(state + BATCH_STATE_HITS, count_hits(chosen), sem="relaxed")
