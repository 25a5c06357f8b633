"""What each instruction of the kernel of one row does, as its queue says: a function an opcode.

In: an SM and an instruction. Out: flagged words, kept numbers, the cache. Each mirrors a body of
the kernel (linear.py, team.py, attention.py, splits.py); the places where it yields are those where
other SMs may come between. Next on the walk: kernel.py.
"""

from collections.abc import Generator

import numpy as np

from distmega.kernels.hopper.emulator.interleaving import RAN, Key, Steps, shuffled
from distmega.kernels.hopper.emulator.numbers import (
    Floats,
    Words,
    bits_of,
    evaluate,
    floats_of,
    halves_of,
    pairs_of,
    to_bf16,
)
from distmega.kernels.hopper.emulator.one_row.experts import weighted
from distmega.kernels.hopper.emulator.sm import Mask, RowSm
from distmega.kernels.hopper.plan.types import Epilogue, RowFormula
from distmega.kernels.hopper.plan.words import (
    CARRY_EMBEDDED,
    CARRY_TWO,
    EMBEDDED,
    FROM_EMBEDDING,
    GROUP_UNITS,
    KEEP_NORMED,
    KEEP_X,
    LAYER_NORM,
    NOTHING,
    ROW_PAIRED,
    TILE_K,
    UNIT_ROWS,
    VECTOR_MULTIPLE,
    X_PARTS,
    RowBarrier,
    RowEmbed,
    RowLinear,
    RowPointwise,
)

GROUP_ROWS = GROUP_UNITS * UNIT_ROWS
NONE: Floats = np.zeros(0, dtype=np.float32)


def next_vector(num: int) -> int:
    """How far behind a vector of `num` elements the next one begins."""
    return -(-num // VECTOR_MULTIPLE) * VECTOR_MULTIPLE


def norm_vector(sm: RowSm, first: int, num: int, *, behind: bool = False) -> Floats:
    """The weights of a norm, or the vector behind them."""
    if not sm.gpu.queues.wide_norms:
        first += next_vector(num) if behind else 0
        return sm.gpu.elements[first : first + num]
    first += next_vector(2 * num) if behind else 0
    return sm.gpu.floats[first // 2 : first // 2 + num]


def embed(sm: RowSm, one: RowEmbed, row_id: int, flag: int) -> None:
    """Pushes a part of the id's row, if this rank holds it, to every rank."""
    local = row_id - one.row0
    if not 0 <= local < one.num_rows:
        return
    at = np.arange(one.column, min(one.column + 256, one.num_words))
    row = sm.gpu.embed[local]
    sm.publish(one.dst + at, pairs_of(row[2 * at], row[2 * at + 1]), flag, sm.gpu.peers)


def barrier(sm: RowSm, one: RowBarrier, flag: int) -> Steps:
    """Waits until all SMs that it is to wait for have come to theirs."""
    at = one.dst + 2 * sm.sm + np.arange(2)
    sm.publish(at, np.full(2, sm.sm, dtype=np.uint32), flag)
    yield RAN
    words = one.dst + np.arange(one.num_words)
    yield from sm.poll(words, flag, f"the barrier behind {one.name!r}")


def linear(
    sm: RowSm, one: RowLinear, row_id: int, flag: int
) -> Generator[Key, None, tuple[float, int]]:
    """Stages x, multiplies a group of units at a time, writes what the epilogue says; gives the
    highest result of a ranked one, and its row.
    """
    epilogue = sm.gpu.queues.epilogues[one.opcode]
    limit = min(one.row0 + one.num_units * UNIT_ROWS, one.num_rows)
    best, best_row = -np.inf, 0
    x, factor = NONE, 1.0
    for group in range(0, one.num_units, GROUP_UNITS):
        row0 = one.row0 + group * UNIT_ROWS
        row = row0 + np.arange(GROUP_ROWS)
        wanted = row < limit
        bias = bias_of(sm, one, group, row, wanted)
        given = yield from carried(sm, one, epilogue, row_id, row, wanted, flag)
        if group == 0:
            before = flag - one.flag_delta
            x, factor = yield from stage(sm, one, row_id, before)
        y = yield from multiply(sm, one, x, min(one.num_units - group, GROUP_UNITS))
        yield RAN
        y = (y * np.float32(factor) + bias).astype(np.float32)
        if epilogue.summed:
            if epilogue.first_carries:
                y = evaluate(epilogue.formula, [y, *given])
            push_partial(sm, one, row, wanted, y, flag)
        elif epilogue.num_streams == 2:
            pairs = y.reshape(GROUP_UNITS // 2, 2, UNIT_ROWS)
            streams = [np.ascontiguousarray(pairs[:, i]).reshape(-1) for i in (0, 1)]
            half = row0 // 2 + np.arange(GROUP_ROWS // 2)
            mixed = result(sm, epilogue, half, streams)
            write(sm, one, epilogue, half, limit // 2, mixed, flag)
        else:
            y = result(sm, epilogue, row, [y, *given])
            if not epilogue.ranked:
                write(sm, one, epilogue, row, limit, y, flag)
                continue
            sm.gpu.kept.store(sm.sm, one.keep + row, y, wanted)
            for at in np.flatnonzero(wanted & (y > best)):
                if y[at] > best:
                    best, best_row = float(y[at]), int(row[at])
    if epilogue.summed:
        yield from sum_partials(sm, one, epilogue, limit, flag)
    return best, best_row


def result(sm: RowSm, epilogue: Epilogue, row: np.ndarray, args: list[Floats]) -> Floats:
    """Rows of the formula, of experts with what these weigh."""
    if epilogue.weighted:
        return weighted(sm, epilogue.formula, row, args[: epilogue.num_streams])
    return evaluate(epilogue.formula, args)


def bias_of(sm: RowSm, one: RowLinear, group: int, row: np.ndarray, wanted: Mask) -> Floats:
    """Biases of the rows of a group, of two streams in turn; zeros where there are none."""
    found: Floats = np.zeros(len(row), dtype=np.float32)
    if one.bias == NOTHING:
        return found
    at = row
    if one.flags & ROW_PAIRED:
        unit = group + np.arange(len(row)) // UNIT_ROWS
        own = one.row0 // 2 + unit // 2 * UNIT_ROWS + row % UNIT_ROWS
        at = own + unit % 2 * next_vector(one.num_rows // 2)
    found[wanted] = sm.gpu.elements[one.bias + at[wanted]]
    return found


def carried(
    sm: RowSm,
    one: RowLinear,
    epilogue: Epilogue,
    row_id: int,
    row: np.ndarray,
    wanted: Mask,
    flag: int,
) -> Generator[Key, None, list[Floats]]:
    """The operands besides products, as the SM keeps them or the given row has them."""
    if (epilogue.summed and not epilogue.first_carries) or epilogue.num_streams == 2:
        return []
    first: Floats = np.zeros(len(row), dtype=np.float32)
    if one.flags & CARRY_EMBEDDED and epilogue.deferred:
        first[wanted] = yield from given_row(sm, one, row[wanted], flag)
    elif one.flags & CARRY_EMBEDDED:
        first[wanted] = sm.gpu.embed[row_id][row[wanted]]
    elif one.carry != NOTHING and not one.flags & (KEEP_NORMED | KEEP_X):
        first = sm.gpu.kept.load(sm.sm, one.carry + row, wanted)
    if epilogue.num_carried < 2:
        return [first]
    is_two = wanted & bool(one.flags & CARRY_TWO)
    return [first, sm.gpu.kept.load(sm.sm, one.pair_row + row, is_two)]


def given_row(
    sm: RowSm, one: RowLinear, row: np.ndarray, flag: int
) -> Generator[Key, None, Floats]:
    """Rows of what comes in, where ranks share the program: an input, or pushed by those that have
    a part of the id's row.
    """
    found: Floats = np.zeros(0, dtype=np.float32)
    if not sm.gpu.queues.ids:
        found = sm.gpu.embed[0][row]
        return found
    words = np.unique(EMBEDDED + row // 4 * 2)
    words = np.stack((words, words + 1), axis=-1).reshape(-1)
    pairs = yield from sm.poll(words, flag - one.generation, repr(one.name))
    if len(row):
        found = halves_of(pairs)[row - 2 * (int(words[0]) - EMBEDDED)]
    return found


def stage(
    sm: RowSm, one: RowLinear, row_id: int, flag: int
) -> Generator[Key, None, tuple[Floats, float]]:
    """x in bf16, zeros behind its end; the factor that its folded norm leaves for the products."""
    length = 2 * one.num_src_words
    if one.flags & FROM_EMBEDDING:
        row = sm.gpu.embed[row_id][:length]
    else:
        row = yield from published_row(sm, one, flag)
    factor = 1.0
    if one.flags & LAYER_NORM:
        row = layer_norm(sm, one, row)
    elif one.norm != NOTHING:
        mean = np.float32(np.sum(row * row, dtype=np.float32) / length)
        factor = float(np.float32(1.0) / np.sqrt(mean + np.float32(sm.gpu.queues.eps)))
        row = to_bf16(row * norm_vector(sm, one.norm, length))
        if one.flags & KEEP_NORMED:
            keep_normed(sm, one, 0.0, factor, has_bias=False)
    x: Floats = np.zeros(one.num_tiles_k * TILE_K, dtype=np.float32)
    x[:length] = row
    return x, factor


def published_row(sm: RowSm, one: RowLinear, flag: int) -> Generator[Key, None, Floats]:
    """x from flagged words, or all ranks' parts of it added up in rank order; the SM adds those of
    other ranks to its rows where it keeps them.
    """
    ranks = sm.gpu.queues.num_ranks if one.flags & X_PARTS else 1
    words = one.src + np.arange(ranks * one.num_src_words)
    found = halves_of((yield from sm.poll(words, flag, repr(one.name))))
    if ranks == 1:
        return found
    parts = found.reshape(ranks, 2 * one.num_src_words)
    if one.flags & KEEP_X:
        at, wanted = one.carry + (own := own_rows(sm, one)), np.full(len(own), True)
        kept = sm.gpu.kept.load(sm.sm, at, wanted)
        for part in parts[1:]:
            kept = kept + part[own]
        sm.gpu.kept.store(sm.sm, at, kept, wanted)
    return to_bf16(added_up(found, ranks))


def added_up(found: Floats, num_ranks: int) -> Floats:
    """The sum of ranks' parts, one behind the other, in rank order."""
    first, *others = found.reshape(num_ranks, -1)
    total: Floats = first
    for part in others:
        total = total + part
    return total


def own_rows(sm: RowSm, one: RowLinear) -> np.ndarray:
    """Rows of x that this SM keeps."""
    num_rows = 2 * one.num_src_words
    units = -(-num_rows // UNIT_ROWS)
    first, last = (units * each // sm.gpu.num_sms * UNIT_ROWS for each in (sm.sm, sm.sm + 1))
    return np.arange(first, min(last, num_rows))


def layer_norm(sm: RowSm, one: RowLinear, row: Floats) -> Floats:
    """The row after its layer norm, the mean taken off before squares are summed."""
    length = len(row)
    mean = np.float32(row.sum(dtype=np.float32) / np.float32(length))
    inside = row - mean
    square = np.float32((inside * inside).sum(dtype=np.float32) / np.float32(length))
    factor = float(np.float32(1.0) / np.sqrt(square + np.float32(sm.gpu.queues.eps)))
    scale = sm.gpu.elements[one.norm : one.norm + length]
    behind = one.norm + next_vector(length)
    shift = sm.gpu.elements[behind : behind + length]
    if one.flags & KEEP_NORMED:
        keep_normed(sm, one, float(mean), factor, has_bias=True)
    return to_bf16(inside * np.float32(factor) * scale + shift)


def keep_normed(sm: RowSm, one: RowLinear, mean: float, factor: float, *, has_bias: bool) -> None:
    """Normalises this SM's rows of x where it keeps them."""
    row = own_rows(sm, one)
    wanted = np.full(len(row), True)
    y = (sm.gpu.kept.load(sm.sm, one.carry + row, wanted) - np.float32(mean)) * np.float32(factor)
    y = y * sm.gpu.elements[one.norm + row]
    if has_bias:
        y = y + sm.gpu.elements[one.norm + next_vector(2 * one.num_src_words) + row]
    sm.gpu.kept.store(sm.sm, one.carry + row, y, wanted)


def multiply(sm: RowSm, one: RowLinear, x: Floats, num: int) -> Generator[Key, None, Floats]:
    """Products of the ring's next units with x, NaN behind them."""
    y: Floats = np.full(GROUP_ROWS, np.nan, dtype=np.float32)
    for unit in range(num):
        total: Floats = np.zeros(UNIT_ROWS, dtype=np.float32)
        for k in range(one.num_tiles_k):
            tile = yield from sm.take()
            total = total + tile @ x[k * TILE_K : (k + 1) * TILE_K]
        y[unit * UNIT_ROWS : (unit + 1) * UNIT_ROWS] = total
    return y


def write(
    sm: RowSm, one: RowLinear, epilogue: Epilogue, row: np.ndarray, limit: int, y: Floats, flag: int
) -> None:
    """Results of rows below the limit to where they are kept and polled."""
    wanted = row < limit
    if one.keep != NOTHING:
        sm.gpu.kept.store(sm.sm, one.keep + row, y, wanted)
    publish_rows(sm, one, epilogue, row[wanted], y[wanted], flag)


def publish_rows(
    sm: RowSm, one: RowLinear | RowPointwise, epilogue: Epilogue | RowFormula, row: np.ndarray,
    y: Floats, flag: int,
) -> None:  # fmt: skip
    """Results as numbers, or as pairs of bf16; to all ranks where these gather them."""
    gathered = isinstance(epilogue, Epilogue) and epilogue.gathered
    gpus = sm.gpu.peers if gathered else ()
    if epilogue.publishes == "numbers":
        sm.publish(one.dst + row, bits_of(y), flag, gpus)
    elif epilogue.publishes == "pairs":
        num = len(row) // 2 * 2
        sm.publish(one.dst + row[:num:2] // 2, pairs_of(y[:num:2], y[1:num:2]), flag, gpus)


def push_partial(
    sm: RowSm, one: RowLinear, row: np.ndarray, wanted: Mask, y: Floats, flag: int
) -> None:
    """Rows of this rank's product into its part of every rank's partial sums."""
    ranks = sm.gpu.queues.num_ranks
    first = one.dst + (sm.gpu.rank - ranks) * one.num_rows
    sm.publish(first + row[wanted], bits_of(y[wanted]), flag, sm.gpu.peers)


def sum_partials(sm: RowSm, one: RowLinear, epilogue: Epilogue, limit: int, flag: int) -> Steps:
    """This SM's rows: the ranks' products in rank order, then the formula. No barrier stands
    between a thread's poll, of two rows, and its store.
    """
    ranks = sm.gpu.queues.num_ranks
    for part in shuffled(sm.gpu.order.random, (limit - one.row0) // 2):
        row = one.row0 + np.arange(2 * part.start, 2 * part.stop)
        wanted = np.full(len(row), True)
        given: Floats = np.zeros(len(row), dtype=np.float32)
        if one.carry != NOTHING and not epilogue.first_carries:
            given = sm.gpu.kept.load(sm.sm, one.carry + row, wanted)
        if one.flags & CARRY_EMBEDDED:
            given = yield from given_row(sm, one, row, flag)
        operands = [given]
        if epilogue.num_carried == 2:
            operands.append(sm.gpu.kept.load(sm.sm, one.pair_row + row, wanted))
        total: Floats = np.zeros(len(row), dtype=np.float32)
        for rank in range(ranks):
            at = one.dst + (rank - ranks) * one.num_rows + row
            found: Words = yield from sm.poll(at, flag, f"the sum of {one.name!r}")
            total = floats_of(found) if rank == 0 else total + floats_of(found)
        yield RAN
        y = total if epilogue.first_carries else evaluate(epilogue.formula, [total, *operands])
        if one.keep != NOTHING:
            sm.gpu.kept.store(sm.sm, one.keep + row, y, wanted)
        publish_rows(sm, one, epilogue, row, y, flag)
