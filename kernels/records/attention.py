"""Bodies of attention over keys and values wherever they lie: by tiles of tensor cores of several
queries that see the same keys, else of a query at a time.

In: a record and the arenas. Out: what Attention and Attend write (isa/opcodes.py). Next on the
walk: waits.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, no-any-return"

import triton
from triton import language as tl

from distmega.kernels import powers
from distmega.kernels.isa.opcodes import ATTENDED
from distmega.kernels.records.heads import FEW_QUERIES
from distmega.kernels.records.specs import CAPPED, RecordSpec
from distmega.kernels.records.words import (
    by_strides,
    extra_operand,
    extra_stride,
    multiple,
    number,
    opcode_of,
    operand,
    read,
    real,
    type_of,
    wide_type,
    write,
)

KEYS: tl.constexpr = tl.constexpr(32)
"""Positions that an SM looks at together for a query."""
BITS = {name: bit for bit, name in enumerate(ATTENDED)}
"""Which bit of an Attend's `others` stands for what."""
STEPS = {name: 4 * n for n, name in enumerate(("q", "k", "v", "out"))}
UNITS = {name: n for n, name in enumerate(("d", "e", *STEPS))}
"""Where a spec by tiles has what of which operand, see heads.py."""
LOG2_E: tl.constexpr = tl.constexpr(powers.LOG2_E)


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
    """Below a cap, by their hyperbolic tangent."""
    limit = softcap.to(scores.dtype)
    shrunk = tl.exp(-2.0 * tl.abs(scores / limit))
    bent = (1.0 - shrunk) / (1.0 + shrunk) * limit
    return tl.where(scores < 0, -bent, bent)


@triton.jit
def blend(best, total, mixed, scores, values):
    """One block of an online softmax; scores -inf where nothing may be seen."""
    most = tl.maximum(best, tl.max(scores, 0, keep_dims=True))
    safe = tl.where(most == float("-inf"), 0.0, most)
    shrunk = tl.exp(best - safe)
    weights = tl.exp(scores - safe)
    total = total * shrunk + tl.sum(weights, 0, keep_dims=True)
    return most, total, mixed * shrunk + tl.sum(weights[:, None] * values, 0)


@triton.constexpr_function
def queries_of(spec: RecordSpec):
    return spec.widths[2]


@triton.constexpr_function
def keys_of(spec: RecordSpec):
    return spec.widths[3]


@triton.constexpr_function
def num_stages(spec: RecordSpec):
    """Tiles of keys and values, one of them at work; scores of many queries leave few registers."""
    return 4 if spec.widths[2] == FEW_QUERIES else 2


@triton.constexpr_function
def step_of(spec: RecordSpec, name, dim):
    """A stride of q, k, v or out."""
    return spec.steps[STEPS[name] + dim]


@triton.constexpr_function
def unit_of(spec: RecordSpec, name):
    """What divides the place of the first element of one of them, or the length of a head."""
    return spec.units[UNITS[name]]


@triton.constexpr_function
def rows_share_keys(spec: RecordSpec):
    return not (attends_to(spec, "sequences") or step_of(spec, "k", 0) or step_of(spec, "v", 0))


@triton.constexpr_function
def has_positions(spec: RecordSpec):
    return spec.opcode == "Attention" or attends_to(spec, "positions")


@triton.constexpr_function
def is_capped(spec: RecordSpec):
    return spec.way == CAPPED


@triton.jit
def limits(record, arenas, spec: tl.constexpr, m, there):
    """Of the positions that rows m see, the first and the one behind the last; none of those that
    are not there.
    """
    context = number(record, spec, "t")
    if not has_positions(spec):
        return m * 0, tl.where(there, context, 0)
    elif opcode_of(spec) == "Attention":
        at = operand(record, arenas, spec, "positions") + m
        return seen(record, spec, tl.load(at, mask=there, other=-1), context)
    else:
        nth: tl.constexpr = number_of(spec, "positions")
        at = extra_operand(record, arenas, spec, nth) + m * extra_stride(record, spec, nth, 0)
        return seen(record, spec, tl.load(at, mask=there, other=-1), context)


@triton.jit
def seen(record, spec: tl.constexpr, positions, context):
    here, window = positions.to(tl.int32) + 1, number(record, spec, "window")
    return tl.maximum(tl.where(window > 0, here - window, 0), 0), tl.minimum(here, context)


@triton.jit
def cache_of(record, arenas, spec: tl.constexpr, m):
    """Which cache a row sees, where rows see several."""
    if rows_share_keys(spec):
        return m.to(tl.int64) * 0
    elif attends_to(spec, "sequences"):
        nth: tl.constexpr = number_of(spec, "sequences")
        at = extra_operand(record, arenas, spec, nth) + m * extra_stride(record, spec, nth, 0)
        last = number(record, spec, "num_caches") - 1
        return tl.maximum(tl.minimum(tl.load(at).to(tl.int64), last), 0)
    else:
        return m.to(tl.int64)


@triton.jit
def keys_and_values(record, arenas, spec: tl.constexpr):
    if opcode_of(spec) == "Attention":
        k = operand(record, arenas, spec, "k", unit_of(spec, "k"))
        return k, operand(record, arenas, spec, "v", unit_of(spec, "v"))
    else:
        k = extra_operand(record, arenas, spec, 0, unit_of(spec, "k"))
        return k, extra_operand(record, arenas, spec, 1, unit_of(spec, "v"))


@triton.jit
def masked_scores(record, arenas, spec: tl.constexpr, scores, m, h, g, t, there):
    """Scores of queries (m, g) of head h with positions t, behind the cap and the bias; -inf where
    nothing may be seen.
    """
    scores *= real(record, spec, "scale")
    if is_capped(spec):
        scores = capped(scores, real(record, spec, "softcap"))
    if attends_to(spec, "bias"):
        by: tl.constexpr = number_of(spec, "bias")
        bias = extra_operand(record, arenas, spec, by) + h * extra_stride(record, spec, by, 1)
        rows = m * extra_stride(record, spec, by, 0) + g * extra_stride(record, spec, by, 2)
        at = bias + rows[:, None] + (t * extra_stride(record, spec, by, 3))[None, :]
        found = tl.load(at, mask=there, other=0)
        if masks(spec):
            there = there & (found != 0)
        else:
            scores += found.to(tl.float32)
    return tl.where(there, scores, float("-inf"))


@triton.jit
def tiled(record, arenas, spec: tl.constexpr):
    """An attention by tiles of queries, which see the same keys, and of keys: these load
    asynchronously, tiles ahead. Queries of a row lie beside each other, rows behind.
    """
    q = operand(record, arenas, spec, "q", unit_of(spec, "q"))
    out = operand(record, arenas, spec, "out", unit_of(spec, "out"))
    k, v = keys_and_values(record, arenas, spec)
    group, num_h = number(record, spec, "g"), number(record, spec, "h")
    together, turns = group, num_h * number(record, spec, "m")
    if rows_share_keys(spec):
        together, turns = group * number(record, spec, "m"), num_h
    for turn in range(turns):
        h, own = turn % num_h, turn // num_h
        which = cache_of(record, arenas, spec, own)
        keys = k + which * step_of(spec, "k", 0) + h.to(tl.int64) * step_of(spec, "k", 1)
        values = v + which * step_of(spec, "v", 0) + h.to(tl.int64) * step_of(spec, "v", 1)
        for first in range(0, together, queries_of(spec)):
            row = first + tl.arange(0, queries_of(spec))
            m, g = own + row // group, row % group
            mixed = weighted(record, arenas, spec, q, keys, values, m, h, g, row < together)
            to = out + h.to(tl.int64) * step_of(spec, "out", 1)
            to += (m * step_of(spec, "out", 0) + g * step_of(spec, "out", 2))[:, None]
            e = tl.arange(0, value_width(spec))
            in_e = e < multiple(record, spec, "e", unit_of(spec, "e"))
            mask = (row < together)[:, None] & in_e[None, :]
            write(to + (e * step_of(spec, "out", 3))[None, :], mixed, mask, spec, "out")


@triton.jit
def weighted(record, arenas, spec: tl.constexpr, q, k, v, m, h, g, there):
    """Values weighted for queries (m, g) of head h, an online softmax over tiles of keys."""
    d, e = tl.arange(0, key_width(spec)), tl.arange(0, value_width(spec))
    in_d = d < multiple(record, spec, "d", unit_of(spec, "d"))
    in_e = e < multiple(record, spec, "e", unit_of(spec, "e"))
    near = (m * step_of(spec, "q", 0) + g * step_of(spec, "q", 2))[:, None]
    near += (d * step_of(spec, "q", 3))[None, :]
    q += h.to(tl.int64) * step_of(spec, "q", 1)
    queries = tl.load(q + near, mask=there[:, None] & in_d[None, :], other=0.0)
    low, high = limits(record, arenas, spec, m, there)
    stop = tl.max(high, 0)
    start = tl.min(tl.where(high > 0, low, stop), 0)
    best = tl.full([queries_of(spec)], float("-inf"), tl.float32)
    total = tl.full([queries_of(spec)], 0.0, tl.float32)
    mixed = tl.full([queries_of(spec), value_width(spec)], 0.0, tl.float32)
    for first in tl.range(start, stop, keys_of(spec), num_stages=num_stages(spec)):
        t = first + tl.arange(0, keys_of(spec))
        at = k + (d * step_of(spec, "k", 3))[:, None] + (t * step_of(spec, "k", 2))[None, :]
        keys = tl.load(at, mask=in_d[:, None] & (t < stop)[None, :], other=0.0)
        at = v + (t * step_of(spec, "v", 2))[:, None] + (e * step_of(spec, "v", 3))[None, :]
        values = tl.load(at, mask=(t < stop)[:, None] & in_e[None, :], other=0.0)
        visible = (t[None, :] >= low[:, None]) & (t[None, :] < high[:, None])
        scores = tl.dot(queries, keys)
        scores = masked_scores(record, arenas, spec, scores, m, h, g, t, visible) * LOG2_E
        most = tl.maximum(best, tl.max(scores, 1))
        safe = tl.where(most == float("-inf"), 0.0, most)
        weights, shrunk = tl.exp2(scores - safe[:, None]), tl.exp2(best - safe)
        total = total * shrunk + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * shrunk[:, None])
        best = most
    return mixed / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def attention(record, arenas, spec: tl.constexpr):
    if by_strides(spec):
        tiled(record, arenas, spec)
    else:
        attention_of_each(record, arenas, spec)


@triton.jit
def attend(record, arenas, spec: tl.constexpr):
    if by_strides(spec):
        tiled(record, arenas, spec)
    else:
        attend_of_each(record, arenas, spec)


@triton.jit
def attention_of_each(record, arenas, spec: tl.constexpr):
    """A query at a time, over caches whose rows follow each other."""
    q, out = operand(record, arenas, spec, "q"), operand(record, arenas, spec, "out")
    k, v = operand(record, arenas, spec, "k"), operand(record, arenas, spec, "v")
    positions = operand(record, arenas, spec, "positions")
    group, num_d = number(record, spec, "g"), number(record, spec, "d")
    num_e, context, heads = (
        number(record, spec, "e"),
        number(record, spec, "t"),
        number(record, spec, "heads"),
    )
    window = number(record, spec, "window")
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
            if is_capped(spec):
                scores = capped(scores, real(record, spec, "softcap"))
            scores = tl.where(there, scores, float("-inf"))
            at = v + (cache + t)[:, None] * num_e + e[None, :]
            values = read(at, there[:, None] & (e < num_e)[None, :], spec, "v").to(wide)
            best, total, mixed = blend(best, total, mixed, scores, values)
        to = out + m * number(record, spec, "out_strides", 0)
        to += h * number(record, spec, "out_strides", 1)
        to += g * number(record, spec, "out_strides", 2)
        mixed = mixed / tl.where(total == 0.0, 1.0, total)
        write(to + e, mixed, e < num_e, spec, "out")


@triton.jit
def attend_of_each(record, arenas, spec: tl.constexpr):
    """A query at a time, over keys and values of any strides."""
    q, out = operand(record, arenas, spec, "q"), operand(record, arenas, spec, "out")
    k, v = extra_operand(record, arenas, spec, 0), extra_operand(record, arenas, spec, 1)
    group, num_d = number(record, spec, "g"), number(record, spec, "d")
    num_e, context = number(record, spec, "e"), number(record, spec, "t")
    window = number(record, spec, "window")
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
            if is_capped(spec):
                scores = capped(scores, real(record, spec, "softcap"))
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
