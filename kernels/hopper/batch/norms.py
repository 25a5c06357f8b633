"""Rows in the form in which linears of the kernel of 2 to 16 rows take them, where their writer
gives another one: after a layer norm, a second norm, or as they are.

In: float32 numbers of whole rows. Out: activations, and numbers where others take
the result too. An SM does whole rows, so that means and
squares are sums of its own. Next on the walk: attention.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.hopper.batch.device import pair_index
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
def find_scale(source, length, kind, eps):
    """What is taken off a row, and what it is multiplied by then."""
    mean = 0.0
    factor = 1.0
    inv_length = 1.0 / length.to(gl.float32)
    if kind == NORM_LAYER:
        sums = gl.zeros([AT_A_TIME], gl.float32, layout=NORM_COLUMNS)
        for first in range(0, keep(length), AT_A_TIME):
            x, _, _ = load_some(source, first, length)
            sums += x
        mean = gl.sum(sums, axis=0) * inv_length
    if kind != NORM_PLAIN:
        sums = gl.zeros([AT_A_TIME], gl.float32, layout=NORM_COLUMNS)
        for first in range(0, keep(length), AT_A_TIME):
            x, _, mine = load_some(source, first, length)
            inside = gl.where(mine, x - mean, 0.0)
            sums += inside * inside
        factor = gl.rsqrt(gl.sum(sums, axis=0) * inv_length + eps)
    return mean, factor


@gluon.jit
def norm_task(words, numbers, acts, vectors, batch, sm, num_sms, eps):
    """Every num_sms-th row from number `sm` on.

    words: int32, of the instruction. numbers: f32 [16, rows] of tensors, one behind the other; the
    rows are read there and, if words say so, the result is written. acts: int32 pairs of bf16, gets
    the result in the order of device.py. vectors: bf16, the weight arena, written by nobody.
    """
    length = words[NUM_ROWS]
    for b in range(keep(sm), keep(batch), keep(num_sms)):
        source = numbers + words[SRC] + b * length
        mean, factor = find_scale(source, length, words[NORM_KIND], eps)
        for first in range(0, keep(length), AT_A_TIME):
            x, column, mine = load_some(source, first, length)
            y = (x - mean) * factor
            weighted = mine & (words[NORM_WEIGHT] >= 0)
            weight = gl.load(vectors + words[NORM_WEIGHT] + column, mask=weighted, other=1.0)
            shifted = mine & (words[NORM_BIAS] >= 0)
            shift = gl.load(vectors + words[NORM_BIAS] + column, mask=shifted, other=0.0)
            y = y * weight.to(gl.float32) + shift.to(gl.float32)
            kept = mine & (words[NORM_KEEP] >= 0)
            gl.store(numbers + words[NORM_KEEP] + b * length + column, y, mask=kept)
            low, high = gl.split(gl.reshape(y, [AT_A_TIME // 2, 2]))
            payload = gl.convert_layout(bf16_pair(low, high), NORM_PAIRS)
            pair = first + 2 * gl.arange(0, AT_A_TIME // 2, layout=NORM_PAIRS)
            gl.store(acts + words[DST] // 2 + pair_index(pair, b), payload, mask=pair < length)
