"""Experts of one row: their choice by the compute warps, and what the loader takes of them.

In: scores, and instructions with ROW_EXPERT_ROWS or ROW_EXPERT_COLUMNS. Out: slots in shared
memory, tiles of the chosen experts. Mirrors one_row/route.py and the loader. Next on the walk:
kernel.py.
"""

import numpy as np

from distmega.kernels.hopper.emulator.interleaving import RAN, Steps
from distmega.kernels.hopper.emulator.numbers import Floats, evaluate, floats_of
from distmega.kernels.hopper.emulator.sm import RowSm, expert_shape_of
from distmega.kernels.hopper.plan.words import (
    ROW_PAIRED,
    SLICE_K,
    SLICES,
    TILE_K,
    UNIT_ROWS,
    RowLinear,
    RowRoute,
)
from distmega.program.expr import Expr


def route(sm: RowSm, one: RowRoute, flag: int) -> Steps:
    """Ranks the scores; the loader may have the experts before their weights are known."""
    shape = expert_shape_of(sm.gpu.queues)
    words = one.src + np.arange(one.num_words)
    scores = floats_of((yield from sm.poll(words, flag, repr(one.name))))
    is_none = np.isnan(scores)
    x = np.where(is_none, -np.inf, scores).astype(np.float32)
    chosen = np.argsort(-x, kind="stable")[: shape.num_chosen]
    sm.choose(chosen.tolist())
    yield RAN
    none = np.float32(np.nan) if is_none.any() else np.float32(0)
    if shape.weighing == "values":
        sm.weights = x[chosen] + none
        return
    with np.errstate(invalid="ignore"):  # of -inf alone
        part = np.exp(x - x.max())
    total = (part if shape.weighing == "softmax" else part[chosen]).sum(dtype=np.float32) + none
    sm.weights = (part[chosen] / total).astype(np.float32)


def weighted(sm: RowSm, formula: Expr, row: np.ndarray, products: list[Floats]) -> Floats:
    """The formula of products of rows of chosen experts and of what these weigh; zeros in what
    stands between an expert's last row and the next slot.
    """
    shape = expert_shape_of(sm.gpu.queues)
    size = shape.slot_units * UNIT_ROWS
    slot = np.minimum(row // size, shape.num_chosen - 1)
    y = evaluate(formula, [*products, sm.weights[slot]])
    return np.where(row % size < shape.width, y, np.float32(0)).astype(np.float32)


def expert_row(sm: RowSm, one: RowLinear, unit: int) -> int:
    """First weight row of a unit with ROW_EXPERT_ROWS."""
    shape = expert_shape_of(sm.gpu.queues)
    own, first = one.row0 // UNIT_ROWS + unit, one.weight_row
    if one.flags & ROW_PAIRED:
        first = one.pair_row if own % 2 else first
        own //= 2
    slot, own = divmod(own, shape.slot_units)
    return first + sm.experts[slot] * shape.width + own * UNIT_ROWS


def load_expert_columns(sm: RowSm, one: RowLinear) -> Steps:
    """Units with ROW_EXPERT_COLUMNS: each slice of a tile is of its slot's expert."""
    shape = expert_shape_of(sm.gpu.queues)
    for unit in range(one.num_units):
        for k in range(one.num_tiles_k):
            slices = [divmod(k * SLICES + i, shape.slot_slices) for i in range(SLICES)]
            parts = [
                (sm.experts[slot], number) if slot < shape.num_chosen else None
                for slot, number in slices
            ]
            row = one.weight_row + unit * UNIT_ROWS

            def read(
                row: int = row, parts: list[tuple[int, int] | None] = parts, one: RowLinear = one
            ) -> Floats:
                return tile_of(sm, one, row, parts)

            yield from sm.ring.ask(sm.loader, read)


def tile_of(sm: RowSm, one: RowLinear, row: int, parts: list[tuple[int, int] | None]) -> Floats:
    """[UNIT_ROWS, TILE_K]: of each slice the expert and its number there; zeros for None. Where a
    row ends inside a slice, the rest is what lies behind it.
    """
    found = sm.gpu.queues.expert_matrix
    assert found is not None, "there are last matrices"
    tile: Floats = np.zeros((UNIT_ROWS, TILE_K), dtype=np.float32)
    for i, part in enumerate(parts):
        if part is None:
            continue
        expert, number = part
        first = row + expert * one.num_rows
        rows = first + np.arange(max(0, min(UNIT_ROWS, found.num_rows - first)))
        columns = number * SLICE_K + np.arange(SLICE_K)
        at = found.offset // 2 + rows[:, None] * found.columns + columns
        tile[: len(rows), i * SLICE_K : (i + 1) * SLICE_K] = sm.gpu.elements[at]
    return tile
