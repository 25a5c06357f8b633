"""A kernel of the sampling phase alone: logits in, tokens out, on as many programs as SMs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.hopper.batch.bodies.limits import sample_within
from distmega.kernels.hopper.one_row.bodies.sample import sample_task, slot_numbers
from distmega.kernels.hopper.one_row.team import most_likely
from distmega.kernels.hopper.plan.fields import SAMPLE_NUM_ROWS, SAMPLE_ROW0, SAMPLED, SRC
from distmega.kernels.hopper.ptx.device import fetch, flagged_float
from distmega.kernels.runtime.report import REPORT_WORDS

BEST_WORDS = gl.constexpr(REPORT_WORDS)
"""Of the exchange: after the report come the SMs' candidates."""


@gluon.jit
def push_slots(words, logits, symmetric, flag, ROWS: gl.constexpr):
    """Logits of an instruction's slots, which lie as they shall be read."""
    slot = slot_numbers(words[SAMPLE_ROW0], ROWS)
    wanted = slot < words[SAMPLE_NUM_ROWS]
    x = gl.load(logits + slot, mask=wanted)
    gl.store(symmetric + words[SRC] + slot, flagged_float(x, flag), mask=wanted)


@gluon.jit(do_not_specialize=["first_id", "num_steps", "epoch0", "sample_words"])
def sample(
    queues, logits, first_id, sampling, seeds, symmetric, tokens, num_steps, epoch0, sample_words,
    KIND: gl.constexpr, ROWS: gl.constexpr, RANKS: gl.constexpr,
):  # fmt: skip
    """Draws num_steps tokens at positions 0, 1, ... from the same logits. queues: an instruction
    SAMPLE of each SM. RANKS: of which this is the first and pushes to none but itself; for limits
    it has the logits of all of them, which other SMs push than those that draw from them.
    """
    sm = gl.program_id(0)
    num_sms = gl.num_programs(0)
    words = fetch(queues, sm)
    for step in range(num_steps):
        flag = epoch0 + step + 1
        if RANKS > 1 and KIND != SAMPLED:
            push_slots(fetch(queues, (sm + 1) % num_sms), logits, symmetric, flag, ROWS)
        sample_task(
            words, logits, first_id, sampling, seeds, step, symmetric, (symmetric,) * RANKS, 0,
            sample_words, BEST_WORDS, sm, num_sms, flag, KIND, ROWS, RANKS,
        )  # fmt: skip
        token = most_likely(symmetric, BEST_WORDS, num_sms, flag, 1)
        if sm == 0:
            gl.store(tokens + step, token)


@gluon.jit(do_not_specialize=["vocab", "num_row_maxima", "list_words", "num_steps"])
def sample_apart(
    logits, row_maxima, sampling, seeds, lists, tokens, vocab, num_row_maxima, list_words,
    num_steps, RANKS: gl.constexpr,
):  # fmt: skip
    """Draws as above within limits, each program alone: num_steps tokens at positions of its own.
    row_maxima: f32 [RANKS, 256], num_row_maxima maxima of parts a row. lists: i64 [programs,
    list_words].
    """
    sm = gl.program_id(0)
    for step in range(num_steps):
        position = sm * num_steps + step
        seed = gl.load(seeds)
        own = lists + sm * list_words
        token = sample_within(
            logits, vocab, row_maxima, num_row_maxima, sampling, seed, position, own, RANKS
        )
        gl.store(tokens + position, token)
