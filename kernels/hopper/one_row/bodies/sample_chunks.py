"""Chunks in which SMs exchange numbers to find the limits of a sample: 8 flagged words of every SM.

In: the symmetric buffer and the first word of a chunk. Out: what all SMs published there. Next on
the walk: sample_all.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.hopper.plan import words
from distmega.kernels.hopper.plan.fields import CHUNK
from distmega.kernels.hopper.ptx.device import as_float
from distmega.kernels.hopper.ptx.shapes import PER_THREAD, THREADS
from distmega.kernels.hopper.ptx.spins import spin_chunks

CHUNK_WORDS = gl.constexpr(words.SAMPLE_CHUNK * words.MAX_SMS)
"""Flagged words of a chunk of every SM: pairs of an SM's words in planes of 512."""


@gluon.jit
def chunk_word(slot, sm):
    """Flagged word of slot `slot` of an SM."""
    pair = slot % CHUNK // 2
    return slot // CHUNK * CHUNK_WORDS + pair * 512 + sm * 2 + slot % 2


@gluon.jit
def read_chunk(symmetric, first, flag, alive):
    """The 8 logits of every SM that has this chunk, an SM a thread; -inf where it has none."""
    # of numbers, not of pointers: what is the same for all chunks would stay in registers
    at = symmetric + (first + 2 * gl.arange(0, THREADS, layout=PER_THREAD))
    none = float("-inf")
    num = gl.where(alive, CHUNK_WORDS, 0)
    w0, w1, w2, w3, w4, w5, w6, w7 = spin_chunks(symmetric, at, flag, num, 4)
    return (
        gl.where(alive, as_float(w0), none),
        gl.where(alive, as_float(w1), none),
        gl.where(alive, as_float(w2), none),
        gl.where(alive, as_float(w3), none),
        gl.where(alive, as_float(w4), none),
        gl.where(alive, as_float(w5), none),
        gl.where(alive, as_float(w6), none),
        gl.where(alive, as_float(w7), none),
    )


@gluon.jit
def widen(low0, high0, low1, high1):
    """Bounds of both."""
    return gl.minimum(low0, low1), gl.maximum(high0, high1)
