"""Attention of rows over rows of the same step, or over one cache, on one SM of an emulated GPU.

In: an SM and an instruction. Out: numbers, the cache, activations. It mirrors batch/bodies/rows.py.
Next on the walk: kernel.py.
"""

import numpy as np

from distmega.kernels.hopper.batch_plan.types import RowAttentionShape
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    NOTHING,
    STATE_POSITIONS,
    BatchHeads,
    BatchRows,
)
from distmega.kernels.hopper.emulator.batch.bodies import norm_vector
from distmega.kernels.hopper.emulator.batch.sm import BatchSm
from distmega.kernels.hopper.emulator.interleaving import RAN, Steps
from distmega.kernels.hopper.emulator.numbers import Floats, to_bf16


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
        at = int(gpu.state.read(sm.compute, np.array([STATE_POSITIONS + row]))[0]) + step
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
    """Every num_sms-th query head of 16 rows from the SM's number on."""
    gpu, shape, batch = sm.gpu, shape_of(sm, one), sm.gpu.queues.batch
    dim, column = shape.head_dim, np.arange(shape.head_dim)
    blocks = -(-batch // BATCH)
    for number in range(sm.sm, shape.num_heads * blocks, gpu.num_sms):
        head, block = divmod(number, blocks)
        rows = np.arange(block * BATCH, min(batch, block * BATCH + BATCH))
        at = gpu.state.read(sm.compute, STATE_POSITIONS + rows).astype(np.int64) + step
        stop, start = one.num_keys, 0
        if one.sees:
            stop = min(int(at.max()) + 1, one.num_keys)
            start = max(int(at.min()) - one.sees + 1, 0)
        if shape.num_queries:
            start = int(rows[0]) // shape.num_queries * shape.num_keys
            stop = (int(rows[-1]) // shape.num_queries + 1) * shape.num_keys
        keys = np.arange(start, stop)
        here = one.src + rows[:, None] * one.num_rows + head * dim + column
        q = to_bf16(sm.load(gpu.numbers, here.reshape(-1))).reshape(here.shape)
        kv_head = head * shape.num_kv_heads // shape.num_heads
        k = seen_heads(sm, one, one.k_src, one.k_rows, kv_head, start, stop)
        v = seen_heads(sm, one, one.v_src, one.v_rows, kv_head, start, stop)
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
            steps = head * one.head_step + own * one.row_step + own_keys * one.key_step + between
            scores = scores + sm.load(gpu.numbers, (one.mask + steps).reshape(-1)).reshape(
                steps.shape
            )
        scores = np.where(seen, scores, -np.inf)
        top = scores.max(1, keepdims=True)
        weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
        total = weights.sum(1, keepdims=True)
        mixed = to_bf16(weights.astype(np.float32)) @ v
        y: Floats = (mixed / np.where(total, total, 1)).astype(np.float32)
        columns = head * dim + column
        if one.dst != NOTHING:
            to = (one.dst // BATCH + columns) * gpu.rows + rows[:, None]
            sm.store(gpu.acts, to.reshape(-1), to_bf16(y).reshape(-1))
        if one.keep != NOTHING:
            to = one.keep + rows[:, None] * shape.num_heads * dim + columns
            sm.store(gpu.numbers, to.reshape(-1), y.reshape(-1))
        yield RAN


def seen_heads(
    sm: BatchSm, one: BatchRows, src: int, length: int, head: int, start: int, stop: int
) -> Floats:
    """[keys, head_dim]: keys, or values, `start` to `stop` of a head."""
    gpu, shape = sm.gpu, shape_of(sm, one)
    column, key = np.arange(shape.head_dim), np.arange(start, stop)[:, None]
    if shape.cached:
        at = (src + head * one.num_keys + key) * shape.head_dim + column
        return sm.load(gpu.cache, at.reshape(-1)).reshape(at.shape)
    at = src + key * length + head * shape.head_dim + column
    return to_bf16(sm.load(gpu.numbers, at.reshape(-1))).reshape(at.shape)
