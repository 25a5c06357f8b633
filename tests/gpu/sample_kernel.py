"""A kernel of the sampling phase alone: logits in, tokens out, on as many programs as SMs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.hopper import words
from distmega.kernels.hopper.batch_limits import draw_within
from distmega.kernels.hopper.device import fetch, tagged_float
from distmega.kernels.hopper.fields import DRAWN, SAMPLE_NUM_ROWS, SAMPLE_ROW0, SRC
from distmega.kernels.hopper.sample import sample_task, slot_numbers
from distmega.kernels.hopper.team import most_likely

BEST_WORDS = gl.constexpr(words.REPORT_WORDS)
"""Of the exchange: after the report come the SMs' candidates."""


@gluon.jit
def push_slots(words, logits, exchange, tag, ROWS: gl.constexpr):
    """Logits of an instruction's slots, which lie as they shall be read."""
    slot = slot_numbers(words[SAMPLE_ROW0], ROWS)
    wanted = slot < words[SAMPLE_NUM_ROWS]
    x = gl.load(logits + slot, mask=wanted)
    gl.store(exchange + words[SRC] + slot, tagged_float(x, tag), mask=wanted)


@gluon.jit(do_not_specialize=["first_id", "num_steps", "epoch0", "sample_words"])
def draw(
    queues, logits, first_id, sampling, seeds, exchange, tokens, num_steps, epoch0, sample_words,
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
        tag = epoch0 + step + 1
        if RANKS > 1 and KIND != DRAWN:
            push_slots(fetch(queues, (sm + 1) % num_sms), logits, exchange, tag, ROWS)
        sample_task(
            words, logits, first_id, sampling, seeds, step, exchange, (exchange,) * RANKS, 0,
            sample_words, BEST_WORDS, sm, num_sms, tag, KIND, ROWS, RANKS,
        )  # fmt: skip
        token = most_likely(exchange, BEST_WORDS, num_sms, tag, 1)
        if sm == 0:
            gl.store(tokens + step, token)


@gluon.jit(do_not_specialize=["vocab", "num_highs", "list_words", "num_steps"])
def draw_apart(
    logits, highs, sampling, seeds, lists, tokens, vocab, num_highs, list_words, num_steps,
    RANKS: gl.constexpr,
):  # fmt: skip
    """Draws as above within limits, each program alone: num_steps tokens at positions of its own.
    highs: f32 [RANKS, 256], num_highs maxima of parts a row. lists: i64 [programs, list_words].
    """
    sm = gl.program_id(0)
    for step in range(num_steps):
        position = sm * num_steps + step
        seed = gl.load(seeds)
        own = lists + sm * list_words
        token = draw_within(logits, vocab, highs, num_highs, sampling, seed, position, own, RANKS)
        gl.store(tokens + position, token)
