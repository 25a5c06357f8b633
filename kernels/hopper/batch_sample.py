"""Drawing the next tokens of several sequences: the parts of sample.py, with the exchanges of all
sequences under way at once, and one SM a sequence that looks for its limits.

In: each SM's logits of all sequences, settings and seeds. Out: this SM's best candidates, in place
of its highest logits. Next on the walk: batch_kernel.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from distmega.kernels.gluon_compat import cta_barrier
from distmega.kernels.hopper.batch_fields import (
    LIN_ROW0,
    MAX_SMS,
    NUM_ROWS,
    NUM_UNITS,
    SEEDS_AT,
    SETTINGS,
    SETTINGS_AT,
    STATE_POSITIONS,
)
from distmega.kernels.hopper.device import as_float, keep, tagged_float
from distmega.kernels.hopper.fields import CHUNK, LIMITED, SEARCHED
from distmega.kernels.hopper.sample import (
    best_candidate,
    find_bound,
    load_logits,
    publish,
    publish_peaks,
    search,
)
from distmega.kernels.hopper.sample_all import cutoff_of_all
from distmega.kernels.hopper.sample_chunks import CHUNK_WORDS
from distmega.kernels.hopper.shapes import UNIT_ROWS
from distmega.kernels.hopper.spins import spin2

ANSWER_WORDS = gl.constexpr(16)
"""Tagged words before a sequence's chunks: its lower bound, highest logit and, twice, cutoff."""


@gluon.jit
def head_rows(words):
    """First row of this SM's logits and the end; found anew for each sequence, or else these stay
    in registers through other tasks.
    """
    row0 = keep(words[LIN_ROW0])
    return row0, gl.minimum(row0 + words[NUM_UNITS] * UNIT_ROWS, words[NUM_ROWS])


@constexpr_function
def sequence_words(rows: int) -> int:
    """Tagged words that find_cutoffs takes for a sequence of at most `rows` logits an SM."""
    num_words: int = ANSWER_WORDS.value + (2 + rows // CHUNK.value) * CHUNK_WORDS.value
    return num_words


@gluon.jit
def answer(exchange, place, first, second, tag):
    """Publishes two numbers."""
    gl.store(exchange + place, tagged_float(first, tag))
    gl.store(exchange + place + 1, tagged_float(second, tag))


@gluon.jit
def find_cutoffs(
    words, logits, settings, exchange, sample_words, batch, sm, num_sms, tag, ROWS: gl.constexpr
):
    """Publishes the cutoff of each of `batch` sequences, which await_cutoff reads.

    What find_cutoff does, a phase at a time for all sequences; one SM a sequence searches.
    """
    size: gl.constexpr = sequence_words(ROWS)
    for b in range(keep(batch)):
        row0, limit = head_rows(words)
        x = load_logits(row0, limit, logits + b * words[NUM_ROWS], ROWS)
        peaks = keep(sample_words) + b * size + ANSWER_WORDS
        publish_peaks(x, exchange, peaks, keep(sm), tag + b, ROWS)
    for b in range(keep(sm), keep(batch), keep(num_sms)):
        at = keep(sample_words) + b * size
        sampling = settings + b * SETTINGS
        low, highest = find_bound(sampling, exchange, at + ANSWER_WORDS, keep(num_sms), tag + b)
        answer(exchange, at, low, highest, tag + b)
    for b in range(keep(batch)):
        at = keep(sample_words) + b * size
        low, _ = await_answer(exchange, at, tag + b)
        row0, limit = head_rows(words)
        x = load_logits(row0, limit, logits + b * words[NUM_ROWS], ROWS)
        publish(x, low, exchange, at + ANSWER_WORDS + CHUNK_WORDS, keep(sm), tag + b, ROWS)
    for b in range(keep(sm), keep(batch), keep(num_sms)):
        at = keep(sample_words) + b * size
        low, highest = await_answer(exchange, at, tag + b)
        chunks = at + ANSWER_WORDS + CHUNK_WORDS
        sampling = settings + b * SETTINGS
        found = search(low, highest, sampling, exchange, chunks, keep(num_sms), tag + b, ROWS)
        answer(exchange, at + 2, found, found, tag + b)


@gluon.jit
def await_answer(exchange, place, tag):
    """The two numbers that an SM published, in every thread."""
    first, second = spin2(exchange, exchange + place, tag, place > 0)
    return as_float(first), as_float(second)


@gluon.jit
def await_cutoff(exchange, sample_words, b, tag, ROWS: gl.constexpr):
    """The cutoff of sequence b, from find_cutoffs; tag: of its first sequence."""
    size: gl.constexpr = sequence_words(ROWS)
    found, _ = await_answer(exchange, keep(sample_words) + b * size + 2, tag + b)
    return found


@gluon.jit
def draw_tokens(
    words, logits, events, sample_words, bests, best_rows, state, batch, step, sm, num_sms, tag,
    KIND: gl.constexpr, ROWS: gl.constexpr,
):
    """This SM's best candidates of all sequences, in place of its highest logits."""
    exchange = gl.multiple_of(events.to(gl.pointer_type(gl.int64), bitcast=True), 16)
    seeds = exchange + SEEDS_AT
    settings = (exchange + SETTINGS_AT).to(gl.pointer_type(gl.float32), bitcast=True)
    cta_barrier()
    if KIND == LIMITED:
        find_cutoffs(words, logits, settings, exchange, sample_words, batch, sm, num_sms, tag, ROWS)
    for b in range(keep(batch)):
        row0, limit = head_rows(words)
        x = load_logits(row0, limit, logits + b * words[NUM_ROWS], ROWS)
        if KIND == LIMITED:
            cutoff = await_cutoff(exchange, sample_words, b, tag, ROWS)
        elif KIND == SEARCHED:
            cutoff = cutoff_of_all(
                x, settings + b * SETTINGS, exchange, keep(sample_words), keep(sm), keep(num_sms),
                tag + b,
            )
        else:
            cutoff = gl.load(settings + b * SETTINGS + 1)
        position = gl.load(state + STATE_POSITIONS + b) + step
        value, row = best_candidate(
            x,
            cutoff,
            row0,
            limit,
            gl.load(settings + b * SETTINGS),
            gl.load(seeds + b),
            position,
            ROWS,
        )
        place = keep(sm)
        gl.store(bests + b * MAX_SMS + place, value)
        gl.store(best_rows + b * MAX_SMS + place, row)
