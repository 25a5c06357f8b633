"""What each instruction of the kernel of several rows does, as its queue says.

In: an SM and an instruction. Out: activations, numbers, squares, logits, what ranks push. Each
mirrors a body of the kernel (batch/bodies/linear.py, batch/bodies/norms.py, batch/team.py).
Attention
over a cache of each row and samples are not here. Next on the walk: rows.py.
"""

from collections.abc import Generator, Sequence

import numpy as np

from distmega.kernels.hopper.batch_plan.types import BatchEpilogue
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    BATCH_PAIRED,
    BEST_WORDS,
    NORM_KINDS,
    NORMED,
    PRODUCT_TILE,
    STEP_K,
    BatchEmbed,
    BatchExperts,
    BatchGather,
    BatchLinear,
    BatchLogits,
    BatchNorm,
    BatchProduct,
    sm_of_step,
)
from distmega.kernels.hopper.emulator.batch.experts import (
    finish_experts,
    groups_of,
    num_chunks,
    x_of,
)
from distmega.kernels.hopper.emulator.batch.sm import BatchSm
from distmega.kernels.hopper.emulator.interleaving import RAN, Key, Steps
from distmega.kernels.hopper.emulator.numbers import (
    Floats,
    Indices,
    bits_of,
    evaluate,
    floats_of,
    normalised,
    to_bf16,
)
from distmega.kernels.hopper.plan.words import (
    MAX_SMS,
    NOTHING,
    SLICE_K,
    TILE_K,
    UNIT_ROWS,
    VECTOR_MULTIPLE,
)

COLUMNS = UNIT_ROWS * BATCH
"""Flagged words of a unit of a part of a sum."""
NO_ROW = 0x7FFFFFFF


def rows_of(one: BatchLinear | BatchLogits | BatchEmbed | BatchGather, streams: int = 1) -> Indices:
    """This SM's rows of the output."""
    row0, num_rows = one.row0 // streams, one.num_rows // streams
    stop = min(row0 + one.num_units * UNIT_ROWS // streams, num_rows)
    return np.arange(row0, max(row0, stop))


def embed(sm: BatchSm, one: BatchEmbed, ids: Sequence[int], flag: int) -> Steps:
    """This SM's columns of the row that comes in for every sequence."""
    epilogue, row = sm.gpu.queues.epilogues.entry, rows_of(one)
    given = sm.gpu.embed
    local = np.array(ids) - one.first_table_row
    if not epilogue.summed:
        y = given[np.array(ids)][:, row].T
        finish(sm, one, epilogue, row, y, one.num_rows)
        return
    column = row - one.first_column
    mine = (column >= 0) & (column < one.num_columns)
    y = np.zeros((len(row), sm.gpu.rows), dtype=np.float32)
    for b in np.flatnonzero((local >= 0) & (local < one.num_table_rows)):
        y[mine, b] = given[local[b]][column[mine]]
    push_part(sm, one, y, flag)
    yield from sum_results(sm, one, epilogue, flag)


def gather(sm: BatchSm, one: BatchGather, flag: int) -> Steps:
    """This SM's columns of what ranks have side by side."""
    row = rows_of(one)
    column = row - one.first_column
    mine = np.flatnonzero((column >= 0) & (column < one.num_columns))
    y = np.zeros((len(row), BATCH), dtype=np.float32)
    at = sm.number_indices(one.src, one.num_columns, column[mine])
    y[mine] = sm.load(sm.gpu.numbers, at).reshape(len(mine), BATCH)
    push_part(sm, one, y, flag)
    yield from sum_results(sm, one, sm.gpu.queues.epilogues.gathers[one.number], flag)


def norm_factors(sm: BatchSm, one: BatchLinear | BatchExperts | BatchLogits) -> Floats:
    """Of each row of x."""
    num = sm.gpu.rows
    factor: Floats = np.ones(num, dtype=np.float32)
    if one.flags & NORMED:
        at = one.squares * num * MAX_SMS + np.arange(num * MAX_SMS)
        squares = sm.load(sm.gpu.sums, at).reshape(num, MAX_SMS).sum(1, dtype=np.float32)
        mean = squares / np.float32(one.length) + np.float32(sm.gpu.queues.eps)
        factor = (np.float32(1.0) / np.sqrt(mean)).astype(np.float32)
    return factor


def linear(
    sm: BatchSm, one: BatchLinear | BatchExperts | BatchLogits, flag: int, factor: Floats
) -> Steps:
    """All rows of this SM, a group of units at a time; then what the epilogue says. factor: see
    norm_factors.
    """
    epilogue = sm.gpu.queues.epilogues.each[one.opcode]
    num = sm.gpu.rows
    if num > BATCH:
        assert not isinstance(one, BatchExperts), "experts have 16 rows at most"
        y = sum_of_parts(sm, one) * factor
    else:
        y = (yield from multiply(sm, one)) * factor
    yield RAN
    if isinstance(one, BatchLogits):
        write_logits(sm, one, epilogue, y)
        return
    if isinstance(one, BatchExperts):
        yield from finish_experts(sm, one, y)
        return
    streams = 2 if one.flags & BATCH_PAIRED else 1
    row, num_rows = rows_of(one, streams), one.num_rows // streams
    values = []
    for stream in range(streams):
        units = y.reshape(-1, streams, UNIT_ROWS, num)[:, stream].reshape(-1, num)
        value = units[: len(row)].copy()
        if one.bias != NOTHING:
            behind = stream * -(-num_rows // VECTOR_MULTIPLE) * VECTOR_MULTIPLE
            value += sm.gpu.elements[one.bias + behind + row][:, None]
        values.append(value)
    if epilogue.summed:
        push_part(sm, one, values[0], flag)
        yield from sum_results(sm, one, epilogue, flag)
        return
    given = [carried(sm, first, num_rows, row) for first in carries(one, epilogue)]
    finish(sm, one, epilogue, row, evaluate(epilogue.formula, [*values, *given]), num_rows)


def carries(one: BatchLinear, epilogue: BatchEpilogue) -> tuple[int, ...]:
    return (one.carry, one.carry2)[: epilogue.num_carried]


def carried(sm: BatchSm, first: int, num_rows: int, row: Indices) -> Floats:
    """An operand besides products: [rows, 16]."""
    at = sm.number_indices(first, num_rows, row)
    return sm.load(sm.gpu.numbers, at).reshape(len(row), sm.gpu.rows)


def product(sm: BatchSm, one: BatchProduct) -> Steps:
    """This SM's steps of a product of more than 16 rows: a part of each of their tiles."""
    gpu, steps, step = sm.gpu, one.num_tiles_k, one.first_step
    stop = step + one.num_units
    total = -(-one.num_rows // PRODUCT_TILE) * steps
    while step < stop:
        tile, k = divmod(step, steps)
        num = min(stop - step, steps - k)
        y: Floats = np.zeros((PRODUCT_TILE, gpu.rows), dtype=np.float32)
        for at in range(k, k + num):
            for half in range(2):
                weights = yield from sm.take()
                column = one.src * TILE_K + at * STEP_K + half * SLICE_K
                y += weights @ sm.columns(column, SLICE_K)
        first = sm_of_step(tile * steps, total, gpu.num_sms)
        part = sm.sm - first if one.most_parts > 1 else 0
        sm.store(gpu.parts, part_indices(sm, one.most_parts, tile, part), y.reshape(-1))
        step += num
        yield RAN


def part_indices(sm: BatchSm, most: int, tile: int, part: int) -> Indices:
    """Where a part of a tile lies, [128 rows, rows computed]."""
    size = PRODUCT_TILE * sm.gpu.rows
    at: Indices = (tile * most + part) * size + np.arange(size)
    return at


def sum_of_parts(sm: BatchSm, one: BatchLinear | BatchLogits) -> Floats:
    """[rows of all units, rows computed] of this SM, in the order of its units, from the parts that
    SMs have left.
    """
    gpu, steps = sm.gpu, one.num_tiles_k
    total, units = -(-one.num_rows // PRODUCT_TILE) * steps, PRODUCT_TILE // UNIT_ROWS
    y: Floats = np.zeros((one.num_units, UNIT_ROWS, gpu.rows), dtype=np.float32)
    for unit in range(one.num_units):
        tile, inner = divmod(one.row0 // UNIT_ROWS + unit, units)
        if not isinstance(one, BatchLogits) and one.flags & BATCH_PAIRED:
            inner = inner // 2 + inner % 2 * (units // 2)
        first, last = (
            sm_of_step(step, total, gpu.num_sms) for step in (tile * steps, (tile + 1) * steps - 1)
        )
        for part in range(last - first + 1 if one.src > 1 else 1):
            at = part_indices(sm, one.src, tile, part).reshape(units, -1)[inner]
            y[unit] += sm.load(gpu.parts, at).reshape(UNIT_ROWS, gpu.rows)
    return y.reshape(-1, gpu.rows)


def multiply(
    sm: BatchSm, one: BatchLinear | BatchExperts | BatchLogits
) -> Generator[Key, None, Floats]:
    """[rows of all units, 16]: tiles of a group of units come k by k."""
    groups = []
    for group in groups_of(sm, one):
        total: Floats = np.zeros((len(group.units), UNIT_ROWS, BATCH), dtype=np.float32)
        for k in range(num_chunks(sm, one)):
            x = x_of(sm, one, group, k)
            for unit in range(len(group.units)):
                tile = yield from sm.take()
                total[unit] += tile @ x
        groups.append(total.reshape(-1, BATCH))
    return np.concatenate(groups) if groups else np.zeros((0, BATCH), dtype=np.float32)


def finish(
    sm: BatchSm, one: BatchLinear | BatchEmbed | BatchGather, epilogue: BatchEpilogue,
    row: Indices, y: Floats, num_rows: int,
) -> None:  # fmt: skip
    """Results as numbers, and as x for linears; their squares."""
    gpu = sm.gpu
    if epilogue.keeps:
        sm.store(gpu.numbers, sm.number_indices(one.keep, num_rows, row), y.reshape(-1))
    num = gpu.rows
    at = ((one.dst // BATCH + row)[:, None] * num + np.arange(num)).reshape(-1)
    if epilogue.scaled:
        weight = norm_vector(sm, one.next_norm, num_rows)[row][:, None]
        sm.store(gpu.acts, at, to_bf16(y * weight).reshape(-1))
        squares = (y * y).sum(axis=0, dtype=np.float32)
        sm.store(gpu.sums, sm.own_part(epilogue.slot), squares)
    elif epilogue.publishes:
        sm.store(gpu.acts, at, to_bf16(y).reshape(-1))


def push_part(
    sm: BatchSm, one: BatchLinear | BatchEmbed | BatchGather, y: Floats, flag: int
) -> None:
    """This rank's part of a sum to every rank, in units of 8 rows, a sequence's together."""
    padded: Floats = np.zeros((one.num_units * UNIT_ROWS, BATCH), dtype=np.float32)
    padded[: len(y)] = y
    words = padded.reshape(-1, UNIT_ROWS, BATCH).transpose(0, 2, 1).reshape(-1)
    first = one.own_part + one.row0 // UNIT_ROWS * COLUMNS
    sm.publish(first + np.arange(len(words)), bits_of(words), flag, sm.gpu.peers)


def sum_results(
    sm: BatchSm, one: BatchLinear | BatchEmbed | BatchGather, epilogue: BatchEpilogue, flag: int
) -> Steps:
    """The results of this SM's rows from the sums of all ranks' parts, in rank order."""
    row, ranks = rows_of(one), sm.gpu.queues.num_ranks
    given = []
    if isinstance(one, BatchLinear):
        given = [carried(sm, first, one.num_rows, row) for first in carries(one, epilogue)]
    total: Floats = np.zeros(one.num_units * COLUMNS, dtype=np.float32)
    for rank in range(ranks):
        first = one.parts + rank * one.num_rows * BATCH + one.row0 // UNIT_ROWS * COLUMNS
        at = first + np.arange(len(total))
        part = floats_of((yield from sm.poll(at, flag, f"the sum of {one.name!r}")))
        total = part if rank == 0 else total + part
    y = total.reshape(-1, BATCH, UNIT_ROWS).transpose(0, 2, 1).reshape(-1, BATCH)[: len(row)]
    yield RAN
    y = evaluate(epilogue.formula, [np.ascontiguousarray(y), *given])
    finish(sm, one, epilogue, row, y, one.num_rows)


def norm(sm: BatchSm, one: BatchNorm) -> Steps:
    """Rows in another form: every num_sms-th from the SM's number on."""
    gpu = sm.gpu
    column = np.arange(one.num_rows)
    for b in range(sm.sm, gpu.queues.batch, gpu.num_sms):
        y = sm.load(gpu.numbers, sm.first_number(one.src) + b * one.num_rows + column)
        kind = NORM_KINDS[one.kind]
        if kind != "none":
            y = normalised(kind, y, gpu.queues.eps)
        if one.weight != NOTHING:
            y = y * norm_vector(sm, one.weight, one.num_rows)
        if one.bias != NOTHING:
            y = y + norm_vector(sm, one.bias, one.num_rows)
        y = y.astype(np.float32)
        if one.keep != NOTHING:
            sm.store(gpu.numbers, sm.first_number(one.keep) + b * one.num_rows + column, y)
        sm.store(gpu.acts, (one.dst // BATCH + column) * gpu.rows + b, to_bf16(y))
        yield RAN


def norm_vector(sm: BatchSm, first: int, num: int) -> Floats:
    """The weights of a norm, or its bias."""
    if sm.gpu.queues.wide_norms:
        return sm.gpu.floats[first // 2 : first // 2 + num]
    return sm.gpu.elements[first : first + num]


def write_logits(sm: BatchSm, one: BatchLogits, epilogue: BatchEpilogue, y: Floats) -> None:
    """Logits, and the highest of each sequence among this SM's rows with the lowest row."""
    row = rows_of(one)
    z = y[: len(row)].copy()
    if one.bias != NOTHING:
        z += sm.gpu.elements[one.bias + row][:, None]
    z = evaluate(epilogue.formula, [z])
    sm.store(sm.gpu.logits, sm.number_indices(0, one.num_rows, row), z.reshape(-1))
    best: Floats = np.full(sm.gpu.rows, -np.inf, dtype=np.float32)
    best_row = np.full(sm.gpu.rows, NO_ROW, dtype=np.int64)
    if len(row):
        best, best_row = z.max(axis=0), row[z.argmax(axis=0)]
    sm.store(sm.gpu.bests, sm.own_part(0), best)
    sm.store(sm.gpu.best_rows, sm.own_part(0), best_row)


def next_ids(
    sm: BatchSm, one: BatchEmbed, after: int, flag: int
) -> Generator[Key, None, tuple[int, ...]]:
    """[16] ids with the highest logits over all SMs, and over all ranks. after: flagged words
    behind the embedding's `best`.
    """
    gpu, at = sm.gpu, np.arange(sm.gpu.rows * MAX_SMS)
    sm.stores.flush(gpu.best_rows)
    values = sm.load(gpu.bests, at).reshape(-1, MAX_SMS)
    rows = gpu.best_rows.read(sm.compute, at).astype(np.int64).reshape(-1, MAX_SMS)
    highest = values.max(axis=1)
    lowest = np.where(values == highest[:, None], rows, NO_ROW).min(axis=1)
    lowest = np.where(lowest == NO_ROW, 0, lowest)
    ranks = gpu.queues.num_ranks
    if ranks == 1:
        return tuple(int(row_id) for row_id in lowest)
    if sm.sm == 0:
        own = one.best + one.team_rank * BEST_WORDS + after + 2 * np.arange(BATCH)
        sm.publish(own, bits_of(highest), flag, gpu.peers)
        sm.publish(own + 1, (one.first_id + lowest).astype(np.uint32), flag, gpu.peers)
    words = one.best + after + np.arange(ranks * BEST_WORDS)
    found = yield from sm.poll(words, flag, "the choice of the next ids")
    found = found.reshape(ranks, BATCH, 2)
    best = floats_of(found[..., 0]).argmax(axis=0)
    return tuple(int(found[rank, b, 1]) for b, rank in enumerate(best))
