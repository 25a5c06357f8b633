"""Rows in the form in which linears of the kernel of several rows take them, where their writer
gives another one: after a layer norm, a second norm, or as they are.

In: float32 numbers of whole rows. Out: activations, and numbers where others take
the result too. An SM does whole rows, so that means and
squares are sums of its own. Next on the walk: pointwise.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.hopper.batch.device import of_rows, pair_index
from distmega.kernels.hopper.batch_plan.fields import (
    DST,
    NORM_BIAS,
    NORM_COLUMNS,
    NORM_KEEP,
    NORM_KIND,
    NORM_LAYER,
    NORM_PAIRS,
    NORM_PLAIN,
    NORM_WEIGHT,
    NUM_ROWS,
    SRC,
)
from distmega.kernels.hopper.ptx.device import bf16_pair, keep

AT_A_TIME = gl.constexpr(1024)


@gluon.jit
def load_some(source, first, length):
    """Numbers [1024] of a row from `first` on, zeros behind its end, and which are its own."""
    column = first + gl.arange(0, AT_A_TIME, layout=NORM_COLUMNS)
    mine = column < length
    return gl.load(source + column, mask=mine, other=0.0, cache_modifier=".cg"), column, mine


@gluon.jit
def load_vector(vectors, first, column, mine, other, WIDE: gl.constexpr):
    """[1024] elements of a norm's weight or bias that begins at element `first` of 2 bytes, `other`
    where there is none. WIDE: whether they are f32.
    """
    given = mine & (first >= 0)
    if WIDE:
        at = (vectors + first).to(gl.pointer_type(gl.float32), bitcast=True) + column
    else:
        at = vectors + first + column
    return gl.load(at, mask=given, other=other)


@gluon.jit
def sum_of(source, length):
    """The sum of a row."""
    sums = gl.zeros([AT_A_TIME], gl.float32, layout=NORM_COLUMNS)
    for first in range(0, keep(length), AT_A_TIME):
        x, _, _ = load_some(source, first, length)
        sums += x
    return gl.sum(sums, axis=0)


@gluon.jit
def squares_of(source, length, off):
    """The sum of the squares of a row without `off`."""
    sums = gl.zeros([AT_A_TIME], gl.float32, layout=NORM_COLUMNS)
    for first in range(0, keep(length), AT_A_TIME):
        x, _, mine = load_some(source, first, length)
        inside = gl.where(mine, x - off, 0.0)
        sums += inside * inside
    return gl.sum(sums, axis=0)


@gluon.jit
def store_some(acts, dst, y, b, start, first, length, ROWS: gl.constexpr):
    """[1024] columns from start + first on of sequence b as bf16 pairs into the activations from
    element `dst` on; none from column start + length on.
    """
    low, high = gl.split(gl.reshape(y, [AT_A_TIME // 2, 2]))
    payload = gl.convert_layout(bf16_pair(low, high), NORM_PAIRS)
    pair = first + 2 * gl.arange(0, AT_A_TIME // 2, layout=NORM_PAIRS)
    at = acts + of_rows(dst // 2, ROWS) + pair_index(start + pair, b, ROWS)
    gl.store(at, payload, mask=pair < length)


@gluon.jit
def find_scale(source, length, kind, eps):
    """What is taken off a row, and what it is multiplied by then."""
    mean = 0.0
    factor = 1.0
    inv_length = 1.0 / length.to(gl.float32)
    if kind == NORM_LAYER:
        mean = sum_of(source, length) * inv_length
    if kind != NORM_PLAIN:
        factor = gl.rsqrt(squares_of(source, length, mean) * inv_length + eps)
    return mean, factor


@gluon.jit
def norm_task(
    words, numbers, acts, vectors, batch, sm, num_sms, eps, ROWS: gl.constexpr, WIDE: gl.constexpr
):
    """Every num_sms-th row from number `sm` on.

    words: int32, of the instruction. numbers: f32 [16, rows] of tensors, one behind the other; the
    rows are read there and, if words say so, the result is written. acts: int32 pairs of bf16, gets
    the result in the order of device.py. vectors: bf16, the weight arena, written by nobody. WIDE:
    whether weights of norms are f32.
    """
    length = words[NUM_ROWS]
    for b in range(keep(sm), keep(batch), keep(num_sms)):
        source = numbers + of_rows(words[SRC], ROWS) + b * length
        mean, factor = find_scale(source, length, words[NORM_KIND], eps)
        for first in range(0, keep(length), AT_A_TIME):
            x, column, mine = load_some(source, first, length)
            y = (x - mean) * factor
            weight = load_vector(vectors, words[NORM_WEIGHT], column, mine, 1.0, WIDE)
            shift = load_vector(vectors, words[NORM_BIAS], column, mine, 0.0, WIDE)
            y = y * weight.to(gl.float32) + shift.to(gl.float32)
            kept = mine & (words[NORM_KEEP] >= 0)
            at = numbers + of_rows(words[NORM_KEEP], ROWS) + b * length + column
            gl.store(at, y, mask=kept)
            store_some(acts, words[DST], y, b, 0, first, length, ROWS)
