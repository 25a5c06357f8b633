"""Sums of attention: of a split's warps, and of the splits of a query head.

In: what each warp has of its 16 positions a block. Out: tagged words of the attention output (bf16
pairs), by way of tagged words of each split where there are several. Next on the walk: kernel.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.hopper.device import as_float, bf16_pair, tagged, tagged_float
from distmega.kernels.hopper.fields import ATT_QUERY0, DST, HEAD, MAX_SPLITS, PARTIAL, WINDOW
from distmega.kernels.hopper.loader import num_active_splits
from distmega.kernels.hopper.shapes import (
    FOUR_SPLITS,
    GROUP_LIMIT,
    NUM_WARPS,
    PAIR_OUT,
    PARTIAL_EXTRA,
    WARP_SUM,
)
from distmega.kernels.hopper.spins import spin_partials


@gluon.jit
def own_rows(o):
    """[8 warps, 8 queries, 64] of the 16 rows of a product."""
    split: gl.constexpr = [NUM_WARPS, 2, GROUP_LIMIT, 64]
    low, _ = gl.split(gl.permute(gl.reshape(o, split), [0, 2, 3, 1]))
    return low


@gluon.jit
def write_rows(
    words,
    exchange,
    o0,
    o1,
    m,
    l,
    ml,
    scratch,
    scratch1,
    tag,
    active,
    split,
    D: gl.constexpr,
    G: gl.constexpr,
):
    """Sums over the warps; final bf16 pairs when one split is active, else a partial. scratch,
    scratch1: of either half of the columns.
    """
    ml.index(0).store(m)
    ml.index(1).store(l)
    scratch.store(own_rows(o0))
    if D == 128:
        scratch1.store(own_rows(o1))
    slim: gl.constexpr = gl.SliceLayout(2, WARP_SUM)
    m = ml.index(0).slice(0, GROUP_LIMIT, dim=1).load(slim)
    highest = gl.max(m, axis=0)
    weight = gl.exp2(m - gl.expand_dims(highest, 0))
    sums = gl.sum(weight * ml.index(1).slice(0, GROUP_LIMIT, dim=1).load(slim), axis=0)
    weight = gl.expand_dims(weight, 2)
    write_columns(words, exchange, scratch, weight, highest, sums, tag, active, split, 0, D, G)
    if D == 128:
        write_columns(words, exchange, scratch1, weight, highest, sums, tag, active, split, 1, D, G)


@gluon.jit
def write_columns(
    words,
    exchange,
    scratch,
    weight,
    highest,
    sums,
    tag,
    active,
    split,
    h: gl.constexpr,
    D: gl.constexpr,
    G: gl.constexpr,
):
    """Half h of the columns, 64 of them, from the warps' sums and their weights."""
    y = gl.sum(scratch.load(WARP_SUM) * weight, axis=0)
    OUT: gl.constexpr = gl.SliceLayout(0, WARP_SUM)
    sums = gl.convert_layout(sums, gl.SliceLayout(1, OUT))
    highest = gl.convert_layout(highest, gl.SliceLayout(1, OUT))
    r = gl.arange(0, GROUP_LIMIT, layout=gl.SliceLayout(1, OUT))
    query = words[ATT_QUERY0] + r
    if active == 1:
        y = y / gl.expand_dims(sums, 1)
        a, b = gl.split(gl.reshape(y, [GROUP_LIMIT, 32, 2]))
        payload = gl.convert_layout(bf16_pair(a, b), PAIR_OUT)
        own = gl.arange(0, GROUP_LIMIT, layout=gl.SliceLayout(1, PAIR_OUT))
        pair = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, PAIR_OUT)), 0)
        final = words[DST] + h * 32 + gl.expand_dims((words[ATT_QUERY0] + own) * (D // 2), 1)
        inside = (gl.expand_dims(own, 1) < G) & (pair >= 0)
        gl.store(exchange + final + pair, tagged(payload, tag), mask=inside)
    else:
        stride: gl.constexpr = D + PARTIAL_EXTRA
        row = exchange + words[PARTIAL] + (query * words[MAX_SPLITS] + split) * stride
        c = gl.arange(0, 64, layout=gl.SliceLayout(0, OUT))
        mask = gl.expand_dims(r < G, 1) & gl.expand_dims(c >= 0, 0)
        at = gl.expand_dims(row, 1) + gl.expand_dims(c, 0) + h * 64
        gl.store(at, tagged_float(y, tag), mask=mask)
        if h == 0:
            gl.store(row + D, tagged_float(highest, tag), mask=r < G)
            gl.store(row + D + 1, tagged_float(sums, tag), mask=r < G)


@gluon.jit
def combine_task(
    words,
    exchange,
    position,
    tag,
    min_blocks,
    D: gl.constexpr,
):
    """Output of one query head from the partials of its splits, in split order."""
    active = num_active_splits(position, words[WINDOW], words[MAX_SPLITS], min_blocks)
    if active > 1:
        combine_splits(words, exchange, active, tag, D)


@gluon.jit
def combine_splits(words, exchange, active, tag, D: gl.constexpr):
    """The sum itself: a thread holds two columns of four splits."""
    stride: gl.constexpr = D + PARTIAL_EXTRA
    fours = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, FOUR_SPLITS)), 1) * 4
    pair = gl.expand_dims(gl.arange(0, D // 2, layout=gl.SliceLayout(0, FOUR_SPLITS)), 0)
    row = exchange + words[PARTIAL] + (words[HEAD] * words[MAX_SPLITS] + fours) * stride + pair * 0
    p = spin_partials(exchange, row + pair * 2, row + D, tag, active - fours + pair * 0, D)
    m0 = gl.where(fours < active, as_float(p[2]), float("-inf"))
    m1 = gl.where(fours + 1 < active, as_float(p[6]), float("-inf"))
    m2 = gl.where(fours + 2 < active, as_float(p[10]), float("-inf"))
    m3 = gl.where(fours + 3 < active, as_float(p[14]), float("-inf"))
    highest = gl.max(gl.maximum(gl.maximum(m0, m1), gl.maximum(m2, m3)), axis=0)
    highest = gl.expand_dims(highest, 0)
    e0 = gl.exp2(m0 - highest)
    e1 = gl.exp2(m1 - highest)
    e2 = gl.exp2(m2 - highest)
    e3 = gl.exp2(m3 - highest)
    sums = e0 * as_float(p[3]) + e1 * as_float(p[7]) + e2 * as_float(p[11]) + e3 * as_float(p[15])
    low = e0 * as_float(p[0]) + e1 * as_float(p[4]) + e2 * as_float(p[8]) + e3 * as_float(p[12])
    high = e0 * as_float(p[1]) + e1 * as_float(p[5]) + e2 * as_float(p[9]) + e3 * as_float(p[13])
    inv = 1.0 / gl.sum(sums, axis=0)
    payload = bf16_pair(gl.sum(low, axis=0) * inv, gl.sum(high, axis=0) * inv)
    at = gl.arange(0, D // 2, layout=gl.SliceLayout(0, FOUR_SPLITS))
    gl.store(exchange + words[DST] + words[HEAD] * (D // 2) + at, tagged(payload, tag))
