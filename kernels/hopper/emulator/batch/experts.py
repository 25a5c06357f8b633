"""Experts of up to 16 rows: their choice by the compute warps, their tiles, and what becomes of
their products.

In: an SM and a BatchExperts, or a linear with BATCH_EXPERT_COLUMNS. Out: the experts hit with their
rows in shared memory, activations. Mirrors batch/route.py and batch/bodies/experts.py. Next on the
walk: bodies.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distmega.kernels.hopper.batch_plan.experts import share_of_hits
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    BATCH_EXPERT_COLUMNS,
    BATCH_PAIRED,
    BATCH_STATE_HITS,
    BatchExperts,
    BatchLinear,
    BatchLogits,
)
from distmega.kernels.hopper.emulator.batch.sm import BatchSm
from distmega.kernels.hopper.emulator.interleaving import RAN, Steps
from distmega.kernels.hopper.emulator.numbers import Floats, evaluate, to_bf16
from distmega.kernels.hopper.emulator.sm import expert_shape_of
from distmega.kernels.hopper.plan.words import GROUP_UNITS, TILE_K, UNIT_ROWS

Tile = tuple[int, int]
"""First row of a tile, and which tile along k."""


@dataclass(frozen=True, slots=True)
class UnitGroup:
    """Units that are multiplied by one read of x, and the expert that they are of, counted through
    those that are hit.
    """

    units: range
    hit: int = 0


def route(sm: BatchSm, one: BatchExperts) -> None:
    """Chooses experts for the rows in use. A score that is no number makes all weights of its row
    none, and no expert that there isn't is chosen.
    """
    gpu, shape = sm.gpu, expert_shape_of(sm.gpu.queues)
    at = one.scores + np.arange(BATCH * shape.num_experts)
    scores = sm.load(gpu.numbers, at).reshape(BATCH, shape.num_experts)[: gpu.queues.batch]
    is_none = np.isnan(scores)
    x = np.where(is_none, -np.inf, scores).astype(np.float32)
    order = np.argsort(-x, axis=1, kind="stable")[:, : shape.num_chosen]
    chosen: npt.NDArray[np.bool_] = np.zeros((BATCH, shape.num_experts), dtype=bool)
    np.put_along_axis(chosen[: len(x)], order, values=True, axis=1)
    weights: Floats = np.zeros(chosen.shape, dtype=np.float32)
    none = np.where(is_none.any(axis=1, keepdims=True), np.nan, 0).astype(np.float32)
    if shape.weighing == "values":
        weights[: len(x)] = x + none
    else:
        with np.errstate(invalid="ignore"):  # of -inf alone
            part = np.exp(x - x.max(axis=1, keepdims=True))
        counted = part if shape.weighing == "softmax" else np.where(chosen[: len(x)], part, 0)
        total = counted.sum(axis=1, dtype=np.float32, keepdims=True) + none
        weights[: len(x)] = part / total
    own = range(one.first_own, one.first_own + shape.num_own)
    hits = np.array([e for e in np.flatnonzero(chosen.any(axis=0)) if e in own], dtype=np.int64)
    sm.hit_rows = chosen.T[hits]
    sm.hit_weights = weights.T[hits]
    sm.choose(hits.tolist())
    if sm.sm == 0:
        word = np.array([BATCH_STATE_HITS])
        sm.store(gpu.state, word, gpu.state.read(sm.compute, word) + len(hits))


def groups_of(sm: BatchSm, one: BatchLinear | BatchExperts | BatchLogits) -> Iterator[UnitGroup]:
    """Units of this SM, those that share a read of x together."""
    if not isinstance(one, BatchExperts):
        for first in range(0, one.num_units, GROUP_UNITS):
            yield UnitGroup(range(first, min(first + GROUP_UNITS, one.num_units)))
        return
    shape = expert_shape_of(sm.gpu.queues)
    share = share_of_hits(one, shape, len(sm.experts), sm.sm, sm.gpu.num_sms)
    size = shape.width // UNIT_ROWS * (2 if one.flags & BATCH_PAIRED else 1)
    first = share.start
    while first < share.stop:
        hit = first // size
        stop = min(first + GROUP_UNITS, (hit + 1) * size, share.stop)
        yield UnitGroup(range(first, stop), hit)
        first = stop


def tiles_of(
    sm: BatchSm, one: BatchLinear | BatchExperts | BatchLogits, group: UnitGroup
) -> Iterator[Tile]:
    """Tiles of a group in the order in which the loader brings them."""
    shape = sm.gpu.queues.experts
    if isinstance(one, BatchLinear) and one.flags & BATCH_EXPERT_COLUMNS:
        for expert in sm.experts:
            for k in range(one.num_tiles_k):
                for unit in group.units:
                    yield one.weight_row + expert * one.num_rows + unit * UNIT_ROWS, k
        return
    first = 0
    units = list(group.units)
    if isinstance(one, BatchExperts):
        assert shape is not None
        first = sm.experts[group.hit] * shape.width
        size = shape.width // UNIT_ROWS * (2 if one.flags & BATCH_PAIRED else 1)
        units = [unit - group.hit * size for unit in units]
    for k in range(one.num_tiles_k):
        for unit in units:
            row = one.weight_row + unit * UNIT_ROWS
            if not isinstance(one, BatchLogits) and one.flags & BATCH_PAIRED:
                row = (one.pair_row if unit % 2 else one.weight_row) + unit // 2 * UNIT_ROWS
            yield first + row, k


def num_chunks(sm: BatchSm, one: BatchLinear | BatchExperts | BatchLogits) -> int:
    """Of 1024 columns of x."""
    is_columns = isinstance(one, BatchLinear) and one.flags & BATCH_EXPERT_COLUMNS
    return one.num_tiles_k * (len(sm.experts) if is_columns else 1)


def x_of(
    sm: BatchSm, one: BatchLinear | BatchExperts | BatchLogits, group: UnitGroup, chunk: int
) -> Floats:
    """[1024, 16] of a chunk; of experts what rows that have chosen them have, and in place of
    others, but for those 8 before or behind, the zeros of the first chunk.
    """
    first, counted = one.src, None
    if isinstance(one, BatchExperts):
        counted = sm.hit_rows[group.hit]
    elif isinstance(one, BatchLinear) and one.flags & BATCH_EXPERT_COLUMNS:
        counted = sm.hit_rows[chunk // one.num_tiles_k]
    x = sm.columns((first + chunk) * TILE_K, TILE_K)
    if counted is None:
        return x
    pairs = counted | np.roll(counted, BATCH // 2)
    return np.where(pairs, x, sm.columns(0, TILE_K))


def finish_experts(sm: BatchSm, one: BatchExperts, y: Floats) -> Steps:
    """Products of this SM's units to activations, an expert's zero where a row did not choose it.
    y: [rows of all units, 16].
    """
    shape, streams = expert_shape_of(sm.gpu.queues), 2 if one.flags & BATCH_PAIRED else 1
    formula = sm.gpu.queues.epilogues.each[one.opcode].formula
    chunks = -(-shape.width // TILE_K)
    done = 0
    for group in groups_of(sm, one):
        num = len(group.units)
        units = y[done * UNIT_ROWS : (done + num) * UNIT_ROWS]
        done += num
        values = [
            np.ascontiguousarray(
                units.reshape(-1, streams, UNIT_ROWS, BATCH)[:, stream].reshape(-1, BATCH)
            )
            for stream in range(streams)
        ]
        weight = np.broadcast_to(sm.hit_weights[group.hit], values[0].shape)
        z = evaluate(formula, [*values, np.ascontiguousarray(weight)])
        z = np.where(sm.hit_rows[group.hit], z, np.float32(0))
        unit = group.units.start - group.hit * (shape.width // UNIT_ROWS) * streams
        row = unit // streams * UNIT_ROWS + np.arange(len(z))
        column = one.dst // BATCH + group.hit * chunks * TILE_K + row
        at = (column[:, None] * BATCH + np.arange(BATCH)).reshape(-1)
        sm.store(sm.gpu.acts, at, to_bf16(z).reshape(-1))
        yield RAN
