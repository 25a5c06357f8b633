"""Bodies of attention: of a query at a time over keys and values wherever they lie.

In: a record and the arenas. Out: what Attention and Attend write (isa/opcodes.py). Next on the
walk: kernel.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, no-any-return"

import triton
from triton import language as tl

from distmega.kernels.isa.opcodes import ATTENDED
from distmega.kernels.records.specs import RecordSpec
from distmega.kernels.records.words import (
    extra_operand,
    extra_stride,
    number,
    operand,
    read,
    real,
    type_of,
    wide_type,
    write,
)

KEYS: tl.constexpr = tl.constexpr(32)
"""Positions that an SM looks at together."""
BITS = {name: bit for bit, name in enumerate(ATTENDED)}
"""Which bit of an Attend's `others` stands for what."""


@triton.constexpr_function
def key_width(spec: RecordSpec):
    return spec.widths[0]


@triton.constexpr_function
def value_width(spec: RecordSpec):
    return spec.widths[1]


@triton.constexpr_function
def attends_to(spec: RecordSpec, name):
    """Whether an Attend has one of ATTENDED."""
    return bool(spec.others >> BITS[name] & 1)


@triton.constexpr_function
def number_of(spec: RecordSpec, name):
    """Which operand before the record that is."""
    return 2 + sum(spec.others >> bit & 1 for bit in range(BITS[name]))


@triton.constexpr_function
def masks(spec: RecordSpec):
    """Whether the bias of an Attend says what may be seen."""
    return type_of(spec, number_of(spec, "bias")).dtype == "bool"


@triton.jit
def capped(scores, softcap):
    """Below a cap, where there is one."""
    limit = tl.where(softcap > 0, softcap, 1.0).to(scores.dtype)
    shrunk = tl.exp(-2.0 * tl.abs(scores / limit))
    bent = (1.0 - shrunk) / (1.0 + shrunk) * limit
    return tl.where(softcap > 0, tl.where(scores < 0, -bent, bent), scores)


@triton.jit
def blend(best, total, mixed, scores, values):
    """One block of an online softmax; scores -inf where nothing may be seen."""
    most = tl.maximum(best, tl.max(scores, 0, keep_dims=True))
    safe = tl.where(most == float("-inf"), 0.0, most)
    shrunk = tl.exp(best - safe)
    weights = tl.exp(scores - safe)
    total = total * shrunk + tl.sum(weights, 0, keep_dims=True)
    return most, total, mixed * shrunk + tl.sum(weights[:, None] * values, 0)


@triton.jit
def attention(record, arenas, spec: tl.constexpr):
    q, out = operand(record, arenas, spec, "q"), operand(record, arenas, spec, "out")
    k, v = operand(record, arenas, spec, "k"), operand(record, arenas, spec, "v")
    positions = operand(record, arenas, spec, "positions")
    group, num_d = number(record, spec, "g"), number(record, spec, "d")
    num_e, context, heads = (
        number(record, spec, "e"),
        number(record, spec, "t"),
        number(record, spec, "heads"),
    )
    window, softcap = number(record, spec, "window"), real(record, spec, "softcap")
    num_h = number(record, spec, "h")
    d, e = tl.arange(0, key_width(spec)), tl.arange(0, value_width(spec))
    wide: tl.constexpr = wide_type(spec, "q")
    for row in range(number(record, spec, "m") * num_h * group):
        g, h, m = row % group, row // group % num_h, row // (group * num_h)
        near = q + m * number(record, spec, "q_strides", 0)
        near += h * number(record, spec, "q_strides", 1) + g * number(record, spec, "q_strides", 2)
        query = read(near + d, d < num_d, spec, "q")
        here = tl.load(positions + m).to(tl.int32)
        stop = tl.minimum(here + 1, context)
        start = tl.maximum(tl.where(window > 0, here + 1 - window, 0), 0)
        cache = m.to(tl.int64) * heads * context + h * context
        best = tl.full([1], float("-inf"), wide)
        total, mixed = tl.full([1], 0.0, wide), tl.full([value_width(spec)], 0.0, wide)
        for first in range(start, stop, KEYS):
            t = first + tl.arange(0, KEYS)
            there = t < stop
            at = k + (cache + t)[:, None] * num_d + d[None, :]
            keys = read(at, there[:, None] & (d < num_d)[None, :], spec, "k").to(wide)
            scores = tl.sum(keys * query[None, :], 1) * real(record, spec, "scale").to(wide)
            scores = tl.where(there, capped(scores, softcap), float("-inf"))
            at = v + (cache + t)[:, None] * num_e + e[None, :]
            values = read(at, there[:, None] & (e < num_e)[None, :], spec, "v").to(wide)
            best, total, mixed = blend(best, total, mixed, scores, values)
        to = out + m * number(record, spec, "out_strides", 0)
        to += h * number(record, spec, "out_strides", 1)
        to += g * number(record, spec, "out_strides", 2)
        mixed = mixed / tl.where(total == 0.0, 1.0, total)
        write(to + e, mixed, e < num_e, spec, "out")


@triton.jit
def attend(record, arenas, spec: tl.constexpr):
    q, out = operand(record, arenas, spec, "q"), operand(record, arenas, spec, "out")
    k, v = extra_operand(record, arenas, spec, 0), extra_operand(record, arenas, spec, 1)
    group, num_d = number(record, spec, "g"), number(record, spec, "d")
    num_e, context = number(record, spec, "e"), number(record, spec, "t")
    window, softcap = number(record, spec, "window"), real(record, spec, "softcap")
    num_h = number(record, spec, "h")
    d, e = tl.arange(0, key_width(spec)), tl.arange(0, value_width(spec))
    wide: tl.constexpr = wide_type(spec, "q")
    for row in range(number(record, spec, "m") * num_h * group):
        g, h, m = row % group, row // group % num_h, row // (group * num_h)
        near = q + m * number(record, spec, "q_strides", 0)
        near += h * number(record, spec, "q_strides", 1) + g * number(record, spec, "q_strides", 2)
        query = read(near + d * number(record, spec, "q_strides", 3), d < num_d, spec, "q")
        start, stop, which = context * 0, context, m.to(tl.int64)
        if attends_to(spec, "positions"):
            nth: tl.constexpr = number_of(spec, "positions")
            positions = extra_operand(record, arenas, spec, nth)
            here = tl.load(positions + m * extra_stride(record, spec, nth, 0)).to(tl.int32)
            stop = tl.minimum(here + 1, context)
            start = tl.maximum(tl.where(window > 0, here + 1 - window, 0), 0)
        if attends_to(spec, "sequences"):
            of: tl.constexpr = number_of(spec, "sequences")
            sequences = extra_operand(record, arenas, spec, of)
            which = tl.load(sequences + m * extra_stride(record, spec, of, 0)).to(tl.int64)
            which = tl.maximum(tl.minimum(which, number(record, spec, "num_caches") - 1), 0)
        keys_at = (
            k + which * extra_stride(record, spec, 0, 0) + h * extra_stride(record, spec, 0, 1)
        )
        values_at = (
            v + which * extra_stride(record, spec, 1, 0) + h * extra_stride(record, spec, 1, 1)
        )
        best = tl.full([1], float("-inf"), wide)
        total, mixed = tl.full([1], 0.0, wide), tl.full([value_width(spec)], 0.0, wide)
        for first in range(start, stop, KEYS):
            t = first + tl.arange(0, KEYS)
            there = t < stop
            at = keys_at + (t * extra_stride(record, spec, 0, 2))[:, None]
            at += (d * extra_stride(record, spec, 0, 3))[None, :]
            keys = read(at, there[:, None] & (d < num_d)[None, :], spec, 0).to(wide)
            scores = tl.sum(keys * query[None, :], 1) * real(record, spec, "scale").to(wide)
            scores = capped(scores, softcap)
            if attends_to(spec, "bias"):
                by: tl.constexpr = number_of(spec, "bias")
                bias = extra_operand(record, arenas, spec, by)
                bias += m * extra_stride(record, spec, by, 0)
                bias += h * extra_stride(record, spec, by, 1)
                bias += g * extra_stride(record, spec, by, 2)
                found = read(bias + t * extra_stride(record, spec, by, 3), there, spec, by)
                if masks(spec):
                    there = there & (found != 0)
                else:
                    scores = scores + found.to(wide)
            scores = tl.where(there, scores, float("-inf"))
            at = values_at + (t * extra_stride(record, spec, 1, 2))[:, None]
            at += (e * extra_stride(record, spec, 1, 3))[None, :]
            values = read(at, there[:, None] & (e < num_e)[None, :], spec, 1).to(wide)
            best, total, mixed = blend(best, total, mixed, scores, values)
        to = out + m * number(record, spec, "out_strides", 0)
        to += h * number(record, spec, "out_strides", 1)
        to += g * number(record, spec, "out_strides", 2)
        mixed = mixed / tl.where(total == 0.0, 1.0, total)
        write(to + e * number(record, spec, "out_strides", 3), mixed, e < num_e, spec, "out")
