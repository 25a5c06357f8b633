"""A kernel of the sampling phase alone: logits in, tokens out, on as many programs as SMs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.hopper import words
from distmega.kernels.hopper.batch_limits import draw_within
from distmega.kernels.hopper.sample import sample_task
from distmega.kernels.hopper.team import most_likely

BEST_WORDS = gl.constexpr(words.REPORT_WORDS)
"""Of the exchange: after the report come the SMs' candidates."""


@gluon.jit(do_not_specialize=["vocab", "rows_a_sm", "num_steps", "epoch0", "sample_words"])
def draw(
    logits, sampling, seeds, exchange, tokens, vocab, rows_a_sm, num_steps, epoch0, sample_words,
    KIND: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Draws num_steps tokens at positions 0, 1, ... from the same logits."""
    sm = gl.program_id(0)
    num_sms = gl.num_programs(0)
    row0 = sm * rows_a_sm
    limit = gl.minimum(row0 + rows_a_sm, vocab)
    for step in range(num_steps):
        tag = epoch0 + step + 1
        sample_task(
            row0, limit, logits, sampling, seeds, step, exchange, sample_words, BEST_WORDS, sm,
            num_sms, tag, KIND, ROWS,
        )  # fmt: skip
        token = most_likely(exchange, BEST_WORDS, num_sms, tag, 1)
        if sm == 0:
            gl.store(tokens + step, token)


@gluon.jit(do_not_specialize=["vocab", "num_highs", "list_words", "num_steps"])
def draw_apart(
    logits, highs, sampling, seeds, lists, tokens, vocab, num_highs, list_words, num_steps
):  # fmt: skip
    """Draws as above within limits, each program alone: num_steps tokens at positions of its own.
    highs: f32 [num_highs], maxima of parts. lists: i64 [programs, list_words].
    """
    sm = gl.program_id(0)
    for step in range(num_steps):
        position = sm * num_steps + step
        seed = gl.load(seeds)
        own = lists + sm * list_words
        token = draw_within(logits, vocab, highs, num_highs, sampling, seed, position, own)
        gl.store(tokens + position, token)
