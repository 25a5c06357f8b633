"""Limits of a sample among any number of ids: what sample.py can't find among a few candidates.

In: this SM's logits, the settings. Out: the cutoff, the same on every SM. All SMs narrow one range
of logits together: in each round every SM publishes, for four thresholds, how many of its logits
reach them and with what mass; the sums, in the order of SMs, say where to look next. A logit is
looked at by its own SM alone, so nothing depends on how many may be sampled. Next on the walk:
sample.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.hopper.one_row.bodies.sample_chunks import (
    CHUNK_WORDS,
    chunk_word,
    read_chunk,
    widen,
)
from distmega.kernels.hopper.plan import words
from distmega.kernels.hopper.plan.fields import CHUNK, LOG2_E
from distmega.kernels.hopper.ptx.device import flagged_float
from distmega.kernels.hopper.ptx.shapes import PER_THREAD, THREADS

ROUNDS = gl.constexpr(words.SEARCH_CHUNKS)
NEVER_SAMPLED = gl.constexpr(88.0)
"""Temperatures below the highest logit at which a mass is 0 in fp32, and far out of reach of the
noise, which spans 26. Bounds the range, whatever the lowest logit is.
"""
ALL = gl.constexpr(3e38)
"""More logits than there are."""


@gluon.jit
def add_tallies(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    """Sums of both."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@gluon.jit
def reaching(x, mass, least):
    """Which logits reach `least`, as 1.0, and their mass."""
    hit = x >= least
    return hit.to(gl.float32), gl.where(hit, mass, 0.0)


@gluon.jit
def tally_all(x, mass, t0, t1, t2, t3, symmetric, chunk_at, sm, present, flag):
    """Of all SMs' logits from each threshold on: number and mass, number and mass, ..."""
    n0, m0 = reaching(x, mass, t0)
    n1, m1 = reaching(x, mass, t1)
    n2, m2 = reaching(x, mass, t2)
    n3, m3 = reaching(x, mass, t3)
    own = gl.reduce((n0, m0, n1, m1, n2, m2, n3, m3), 0, add_tallies)
    for i in gl.static_range(CHUNK):
        gl.store(symmetric + (chunk_at + chunk_word(i, sm)), flagged_float(own[i], flag))
    found = read_chunk(symmetric, chunk_at, flag, present)
    none = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
    counted = (
        gl.where(present, found[0], none),
        gl.where(present, found[1], none),
        gl.where(present, found[2], none),
        gl.where(present, found[3], none),
        gl.where(present, found[4], none),
        gl.where(present, found[5], none),
        gl.where(present, found[6], none),
        gl.where(present, found[7], none),
    )
    return gl.reduce(counted, 0, add_tallies)


@gluon.jit
def range_of_all(x, symmetric, chunk_at, sm, present, flag):
    """Lowest and highest logit of all SMs; -inf ones are none."""
    low, high = gl.reduce((gl.where(x > float("-inf"), x, float("inf")), x), 0, widen)
    slots = gl.arange(0, CHUNK, layout=PER_THREAD)
    own = gl.where(slots % 2 == 0, low, high)
    gl.store(symmetric + (chunk_at + chunk_word(slots, sm)), flagged_float(own, flag))
    found = read_chunk(symmetric, chunk_at, flag, present)
    return gl.reduce((gl.where(present, found[0], float("inf")), found[1]), 0, widen)


@gluon.jit
def narrow(low, num, mass, high, high_num, wanted_num, wanted_mass, x, masses, symmetric, chunk_at,
           sm, present, flag):  # fmt: skip
    """The quarter of [low, high) whose lower end still reaches what is wanted: its ends, number and
    mass from the lower one on, number from the upper one on.
    """
    width = high - low
    t1 = low + width * 0.25
    t2 = low + width * 0.5
    t3 = low + width * 0.75
    n0, m0, n1, m1, n2, m2, n3, m3 = tally_all(
        x, masses, low, t1, t2, t3, symmetric, chunk_at, sm, present, flag
    )
    at1 = (n1 >= wanted_num) & (m1 >= wanted_mass)
    at2 = (n2 >= wanted_num) & (m2 >= wanted_mass)
    at3 = (n3 >= wanted_num) & (m3 >= wanted_mass)
    high = gl.where(at3, high, gl.where(at2, t3, gl.where(at1, t2, t1)))
    high_num = gl.where(at3, high_num, gl.where(at2, n3, gl.where(at1, n2, n1)))
    low = gl.where(at3, t3, gl.where(at2, t2, gl.where(at1, t1, low)))
    num = gl.where(at3, n3, gl.where(at2, n2, gl.where(at1, n1, n0)))
    mass = gl.where(at3, m3, gl.where(at2, m2, gl.where(at1, m1, m0)))
    return low, num, mass, high, high_num


@gluon.jit
def splits(low, high):
    """Whether there is a number between."""
    middle = low + (high - low) * 0.5
    return (middle > low) & (middle < high)


@gluon.jit
def cutoff_of_all(x, sampling, symmetric, first, sm, num_sms, flag):
    """The least logit that may be sampled; see ops.cutoff. first: of SEARCH_CHUNKS chunks."""
    heat = gl.maximum(gl.load(sampling), 1e-30)
    top_k = gl.load(sampling + 1)
    top_p = gl.load(sampling + 2)
    present = gl.arange(0, THREADS, layout=PER_THREAD) < num_sms
    low, highest = range_of_all(x, symmetric, first, sm, present, flag)
    masses = gl.exp2((x - highest) * (LOG2_E / heat))
    above = highest + gl.maximum(gl.abs(highest) * 1e-3, 1e-3)
    wanted = gl.where(top_k > 0.0, top_k, ALL)
    low = gl.maximum(low, highest - NEVER_SAMPLED * heat)
    high = above
    num = wanted * 2.0
    mass = wanted * 0.0
    high_num = mass
    chunk = 1
    # one round at least: several samples share the chunks, and who writes the first again must know
    # that all have read it
    while (chunk == 1) | ((num > wanted) & splits(low, high) & (chunk < ROUNDS // 2)):
        low, num, mass, high, high_num = narrow(
            low, num, mass, high, high_num, wanted, 0.0, x, masses, symmetric,
            first + chunk * CHUNK_WORDS, sm, present, flag,
        )  # fmt: skip
        chunk += 1
    if top_p < 1.0:
        least = mass * top_p
        high = above
        high_num = mass * 0.0
        while (num - high_num > 1.0) & splits(low, high) & (chunk < ROUNDS):
            low, num, mass, high, high_num = narrow(
                low, num, mass, high, high_num, 0.0, least, x, masses, symmetric,
                first + chunk * CHUNK_WORDS, sm, present, flag,
            )  # fmt: skip
            chunk += 1
    return low
