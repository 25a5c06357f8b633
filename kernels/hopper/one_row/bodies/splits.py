"""Sums of attention over the splits of a query head.

In: flagged words of each split. Out: flagged words of the attention output (bf16 pairs). Next on
the walk: kernel.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.hopper.one_row.loader import num_active_splits
from distmega.kernels.hopper.plan.fields import DST, HEAD, MAX_SPLITS, PARTIAL, WINDOW
from distmega.kernels.hopper.ptx.device import as_float, bf16_pair, flagged
from distmega.kernels.hopper.ptx.shapes import (
    FOUR_SPLITS,
    ROW_PARTIAL_EXTRA,
    is_padded,
    padded_half,
)
from distmega.kernels.hopper.ptx.spins import spin_partials


@gluon.jit
def combine_task(
    words,
    symmetric,
    position,
    flag,
    min_blocks,
    D: gl.constexpr,
):
    """Output of one query head from the partials of its splits, in split order: a thread holds two
    columns of four splits.

    words: int32, of the instruction. symmetric: int64, this rank's flagged words behind the report;
    reads those of partials, which attention_task wrote, and writes bf16 pairs of the output.
    position: of the step; flag: of what is read and written; min_blocks: as of run_row_steps.
    """
    active = num_active_splits(position, words[WINDOW], words[MAX_SPLITS], min_blocks)
    stride: gl.constexpr = D + ROW_PARTIAL_EXTRA
    fours = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, FOUR_SPLITS)), 1) * 4
    COLUMNS: gl.constexpr = padded_half(D)
    pair = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, FOUR_SPLITS)), 0)
    first = words[PARTIAL] + (words[HEAD] * words[MAX_SPLITS] + fours) * stride + pair * 0
    num_left = active - fours + pair * 0
    if is_padded(D):
        num_left = gl.where(pair * 2 < D, num_left, 0)
    p = spin_partials(
        symmetric, symmetric + (first + pair * 2), symmetric + (first + D), flag, num_left, D
    )
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
    total = gl.sum(sums, axis=0)
    inv = gl.where(total > 0, 1.0 / total, 0.0)  # 0 where a wait was given up: no NaN in the cache
    payload = bf16_pair(gl.sum(low, axis=0) * inv, gl.sum(high, axis=0) * inv)
    at = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, FOUR_SPLITS))
    to = symmetric + (words[DST] + words[HEAD] * (D // 2) + at)
    if is_padded(D):
        gl.store(to, flagged(payload, flag), mask=at * 2 < D)
    else:
        gl.store(to, flagged(payload, flag))
