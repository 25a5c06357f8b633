"""Attention of rows over rows of the same step, or over one cache, on one SM of an emulated GPU.

In: an SM and an instruction. Out: numbers, the cache, activations. It mirrors batch/bodies/rows.py.
Next on the walk: kernel.py.
"""

from collections.abc import Sequence

import numpy as np

from distmega.kernels.hopper.batch_plan.types import RowAttentionShape
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    BATCH_STATE_POSITIONS,
    BatchHeads,
    BatchRows,
)
from distmega.kernels.hopper.emulator.batch.bodies import norm_vector
from distmega.kernels.hopper.emulator.batch.sm import BatchSm
from distmega.kernels.hopper.emulator.interleaving import RAN, Steps
from distmega.kernels.hopper.emulator.numbers import Floats, Indices, to_bf16
from distmega.kernels.hopper.plan.words import NOTHING


def shape_of(sm: BatchSm, one: BatchHeads | BatchRows) -> RowAttentionShape:
    return sm.gpu.queues.row_attention.each[one.shape]


def prepare_heads(sm: BatchSm, one: BatchHeads, step: int) -> Steps:
    """Every num_sms-th head of all rows from the SM's number on: queries, keys, then values."""
    gpu, shape = sm.gpu, shape_of(sm, one)
    dim, heads, kv_heads = shape.head_dim, shape.num_heads, shape.num_kv_heads
    each = heads + (2 if shape.cached else 1) * kv_heads
    column = np.arange(dim)
    for number in range(sm.sm, gpu.queues.batch * each, gpu.num_sms):
        row, head = divmod(number, each)
        kind = 0 if head < heads else 1 + (head - heads) // kv_heads
        own = head if kind == 0 else (head - heads) % kv_heads
        src, length, norm = (
            (one.src, one.num_rows, one.q_norm),
            (one.k_src, one.k_rows, one.k_norm),
            (one.v_src, one.v_rows, NOTHING),
        )[kind]
        x = sm.load(gpu.numbers, src + row * length + own * dim + column)
        at = int(gpu.state.read(sm.compute, np.array([BATCH_STATE_POSITIONS + row]))[0]) + step
        if kind < 2 and shape.normed:
            factor = 1 / np.sqrt((x * x).mean(dtype=np.float32) + np.float32(gpu.queues.eps))
            x = x * factor.astype(np.float32) * norm_vector(sm, norm, dim)
        if kind < 2 and shape.rotated:
            cos, sin = np.split(gpu.rope[at], 2)
            left, right = np.split(x, 2)
            x = np.concatenate((left * cos - right * sin, right * cos + left * sin))
        if kind and shape.cached:
            first = (one.k_dst, one.v_dst)[kind - 1] + own * one.num_keys + at
            sm.store(gpu.cache, first * dim + column, to_bf16(x))
        else:
            first = one.k_dst + row * kv_heads * dim if kind else one.dst + row * heads * dim
            sm.store(gpu.numbers, first + own * dim + column, x)
        yield RAN


def attend_rows(sm: BatchSm, one: BatchRows, step: int) -> Steps:
    """Every num_sms-th task of 16 queries from the SM's number on, or its part of the keys of
    one.
    """
    gpu, shape, batch = sm.gpu, shape_of(sm, one), sm.gpu.queues.batch
    tasks, size = shape.num_tasks(batch), shape.turn_keys
    most = max(gpu.num_sms // tasks, 1)
    for number in range(sm.sm, tasks * most, gpu.num_sms):
        part, task = divmod(number, tasks)
        kv_head, block = divmod(task, tasks // shape.num_kv_heads)
        queries = block * BATCH + np.arange(BATCH)
        rows, heads = np.divmod(queries[queries < batch * shape.group], shape.group)
        heads += kv_head * shape.group
        at = gpu.state.read(sm.compute, BATCH_STATE_POSITIONS + rows).astype(np.int64) + step
        start, stop = seen_keys(one, shape, rows, at)
        turn0 = start // size
        turns = -(-stop // size) - turn0
        each = max(-(-turns // most), shape.least_turns)
        parts = max(-(-turns // each), 1)
        if part >= parts:
            continue
        begin = (turn0 + part * each) * size
        keys = np.arange(max(begin, start), min(begin + each * size, stop))
        found = attend_keys(sm, one, rows, heads, at, keys)
        if parts > 1:
            words = shape.partial_words
            own = np.concatenate([part_of.reshape(-1) for part_of in found])
            sm.store(gpu.partials, sm.sm * words + np.arange(len(own)), own)
            if not (yield from sm.arrive_last(task, parts)):
                continue
            found = joined([_partial(sm, (task + i * tasks) * words, found) for i in range(parts)])
        _, total, mixed = found
        store_rows(sm, one, rows, heads, (mixed / np.where(total, total, 1)).astype(np.float32))
        yield RAN


Partial = tuple[Floats, Floats, Floats]
"""Of queries: maxima and sums [queries, 1], unscaled outputs [queries, head_dim]."""


def seen_keys(
    one: BatchRows, shape: RowAttentionShape, rows: Indices, at: Indices
) -> tuple[int, int]:
    """The first key that some of the rows sees, and the one behind the last."""
    if shape.num_queries:
        first, last = (int(row) // shape.num_queries for row in (rows[0], rows[-1]))
        return first * shape.num_keys, (last + 1) * shape.num_keys
    if one.sees:
        return max(int(at.min()) - one.sees + 1, 0), min(int(at.max()) + 1, one.num_keys)
    return 0, one.num_keys


def attend_keys(
    sm: BatchSm, one: BatchRows, rows: Indices, heads: Indices, at: Indices, keys: Indices
) -> Partial:
    """What queries of these rows and heads, at positions `at`, see of some keys of one kv head."""
    gpu, shape = sm.gpu, shape_of(sm, one)
    dim, column = shape.head_dim, np.arange(shape.head_dim)
    here = one.src + (rows * one.num_rows + heads * dim)[:, None] + column
    q = to_bf16(sm.load(gpu.numbers, here.reshape(-1))).reshape(here.shape)
    kv_head = int(heads[0]) // shape.group
    k = seen_heads(sm, one, one.k_src, one.k_rows, kv_head, keys)
    v = seen_heads(sm, one, one.v_src, one.v_rows, kv_head, keys)
    scores = (q @ k.T) * np.float32(one.scale)
    if shape.softcap:
        scores = np.tanh(scores / shape.softcap) * np.float32(shape.softcap)
    seen = np.ones(scores.shape, dtype=np.bool_)
    if one.sees:
        seen = (keys <= at[:, None]) & (keys > at[:, None] - one.sees)
    own, own_keys, between = rows[:, None], keys, np.zeros((len(rows), 1), dtype=np.int64)
    if shape.num_queries:
        sequence = rows[:, None] // shape.num_queries
        seen = keys // shape.num_keys == sequence
        own, own_keys = own % shape.num_queries, keys % shape.num_keys
        between = sequence * shape.mask_step
    if one.mask != NOTHING:
        steps = (
            heads[:, None] * one.head_step + own * one.row_step + own_keys * one.key_step + between
        )
        mask = sm.load(gpu.numbers, (one.mask + steps).reshape(-1))
        scores = scores + mask.reshape(steps.shape)
    scores = np.where(seen, scores, -np.inf)
    top: Floats = scores.max(1, keepdims=True).astype(np.float32)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0)).astype(np.float32)
    mixed: Floats = (to_bf16(weights) @ v).astype(np.float32)
    return top, weights.sum(1, keepdims=True), mixed


def _partial(sm: BatchSm, first: int, like: Partial) -> Partial:
    """What an SM has left from an element on."""
    top, total, mixed = like
    num = len(top)
    found = sm.load(sm.gpu.partials, first + np.arange(2 * num + mixed.size))
    return (
        found[:num].reshape(top.shape),
        found[num : 2 * num].reshape(total.shape),
        found[2 * num :].reshape(mixed.shape),
    )


def joined(partials: Sequence[Partial]) -> Partial:
    """Those of parts of the keys as one."""
    top: Floats = np.max([one[0] for one in partials], axis=0)
    highest = np.where(np.isfinite(top), top, 0)
    total, mixed = np.zeros_like(top), np.zeros_like(partials[0][2])
    for own, sums, outputs in partials:
        share = np.exp(own - highest)
        total, mixed = total + sums * share, mixed + outputs * share
    return top, total, mixed


def store_rows(sm: BatchSm, one: BatchRows, rows: Indices, heads: Indices, y: Floats) -> None:
    """Outputs of queries, to where others take them from."""
    gpu, shape = sm.gpu, shape_of(sm, one)
    columns = heads[:, None] * shape.head_dim + np.arange(shape.head_dim)
    if one.dst != NOTHING:
        to = (one.dst // BATCH + columns) * gpu.rows + rows[:, None]
        sm.store(gpu.acts, to.reshape(-1), to_bf16(y).reshape(-1))
    if one.keep != NOTHING:
        to = one.keep + rows[:, None] * shape.num_heads * shape.head_dim + columns
        sm.store(gpu.numbers, to.reshape(-1), y.reshape(-1))


def seen_heads(
    sm: BatchSm, one: BatchRows, src: int, length: int, head: int, keys: Indices
) -> Floats:
    """[keys, head_dim]: some keys, or values, of a head."""
    gpu, shape = sm.gpu, shape_of(sm, one)
    column, key = np.arange(shape.head_dim), keys[:, None]
    if shape.cached:
        at = (src + head * one.num_keys + key) * shape.head_dim + column
        return sm.load(gpu.cache, at.reshape(-1)).reshape(at.shape)
    at = src + key * length + head * shape.head_dim + column
    return to_bf16(sm.load(gpu.numbers, at.reshape(-1))).reshape(at.shape)
