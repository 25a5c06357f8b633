"""The kernel of several rows on emulated GPUs, as one_row/kernel.py has that of one row.

In: queues of every rank as build_batch_queues gives them, the arena of weights, launches. Out: what
each launch leaves on each rank, or a CheckError. Programs without samples and
attention over a cache of each row. Next on
the walk: bodies.py.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from distmega.errors import UnsupportedError
from distmega.kernels.hopper.batch_plan.types import BatchQueues, most_partial_words
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    BATCH_LOADS_AHEAD,
    BATCH_PAIRED,
    BATCH_STATE_EPOCH,
    BATCH_STATE_HITS,
    BATCH_STATE_POSITIONS,
    BATCH_STATE_WORDS,
    BEST_WORDS,
    PRODUCT_TILE,
    STAGES,
    STEP_K,
    BatchEmbed,
    BatchExperts,
    BatchGather,
    BatchHeads,
    BatchLinear,
    BatchLogits,
    BatchNorm,
    BatchPointwise,
    BatchProduct,
    BatchRows,
    pack,
)
from distmega.kernels.hopper.emulator.batch.bodies import (
    embed,
    gather,
    linear,
    next_ids,
    norm,
    norm_factors,
    product,
)
from distmega.kernels.hopper.emulator.batch.experts import groups_of, route, tiles_of
from distmega.kernels.hopper.emulator.batch.pointwise import pointwise
from distmega.kernels.hopper.emulator.batch.rows import attend_rows, prepare_heads
from distmega.kernels.hopper.emulator.batch.sm import Arrivals, BatchGpu, BatchSm, Event
from distmega.kernels.hopper.emulator.interleaving import RAN, Interleaving, Key, Steps
from distmega.kernels.hopper.emulator.memory import FlaggedWords, PlainData
from distmega.kernels.hopper.emulator.numbers import Floats, numbers_of
from distmega.kernels.hopper.emulator.sm import elements_of
from distmega.kernels.hopper.emulator.team import Agents, launch, run_hosts
from distmega.kernels.hopper.plan.encoded import pack_queues
from distmega.kernels.hopper.plan.types import Kept
from distmega.kernels.hopper.plan.words import MAX_SMS, SLICE_K, TILE_K
from distmega.kernels.runtime.arena import ArenaLayout
from distmega.kernels.runtime.memory import arena_views

NO_STATES = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchArenas:
    """A rank's queues, weights and states: uint8, as layouts describe. states: those that nobody
    appends to, by name.
    """

    queues: BatchQueues
    weights: ArenaLayout
    weights_arena: Tensor
    state_arena: Tensor = NO_STATES
    states: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLaunch:
    """One launch of a rank. inputs: the segment's by name, or none to go on from the ids."""

    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    num_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFound:
    """What a launch left. outputs: float32 [rows, n], by name; ids: of each step, a row each;
    num_hits: experts that rows chose, of all choices so far.
    """

    outputs: Mapping[str, Tensor]
    ids: tuple[tuple[int, ...], ...]
    num_hits: int = 0


def emulate_batch(
    ranks: Sequence[BatchArenas],
    launches: Sequence[Sequence[BatchLaunch]],
    seed: int,
) -> list[list[BatchFound]]:
    """Results [launch][rank] of launches [launch][rank] in the order that the seed gives."""
    order = Interleaving(seed)
    agents = Agents([len(one.queues.queues) for one in ranks])
    gpus = [_gpu(rank, one, order, agents) for rank, one in enumerate(ranks)]
    for gpu in gpus:
        gpu.peers = gpus
    sms = [
        [
            BatchSm(gpu, sm, compute_warps, loader_warp, STAGES, BATCH_LOADS_AHEAD)
            for sm, (compute_warps, loader_warp) in enumerate(
                zip(agents.computes[gpu.rank], agents.loaders[gpu.rank], strict=True)
            )
        ]
        for gpu in gpus
    ]
    found: list[list[BatchFound]] = [[] for _ in ranks]
    hosts = [
        _host(gpu, sms[gpu.rank], [each[gpu.rank] for each in launches], found[gpu.rank])
        for gpu in gpus
    ]
    run_hosts(order, hosts, sms)
    return [[found[rank][nth] for rank in range(len(ranks))] for nth in range(len(launches))]


def _gpu(rank: int, one: BatchArenas, order: Interleaving, agents: Agents) -> BatchGpu:
    queues, num = one.queues, agents.num
    pack_queues(queues.queues, pack)  # what the device reads holds all of it
    views = arena_views(one.weights, one.weights_arena)
    none: Floats = np.zeros((1, 1), dtype=np.float32)
    elements = elements_of(one.weights_arena)

    def data(name: str, size: int, value: float) -> PlainData:
        return PlainData(name, rank, np.full(max(size, 1), value, dtype=np.float32))

    rows, shapes = queues.rows, queues.row_attention
    num_partials = len(queues.queues) * most_partial_words(0, shapes)
    num_tasks = max((shape.num_tasks(rows) for shape in shapes.each), default=0)
    best_rows = np.zeros(rows * MAX_SMS, dtype=np.int64)
    return BatchGpu(
        rank=rank,
        num_sms=len(queues.queues),
        matrices=queues.matrices,
        queues=queues,
        order=order,
        elements=elements,
        floats=one.weights_arena.view(torch.float32).numpy(),
        given={**views, **one.states},
        embed=views[queues.embed].float().numpy() if queues.ids else none,
        rope=views[queues.rope_table].float().numpy() if queues.rope_table else none,
        words=FlaggedWords(order, rank, agents.computes[rank], queues.first_list),
        state=PlainData("the state's word", rank, np.zeros(BATCH_STATE_WORDS, np.int64)),
        cache=PlainData("cached element", rank, numbers_of(one.state_arena).copy()),
        host=agents.hosts[rank],
        events=[Event(order, rank, number, num) for number in range(len(queues.queues[0]))],
        acts=data("activation", queues.num_chunks * TILE_K * rows, 0.0),
        numbers=data("number", queues.num_numbers, np.nan),
        sums=data("square", queues.num_slots * rows * MAX_SMS, 0.0),
        logits=data("logit", rows * queues.logit_rows, np.nan),
        bests=data("best logit", rows * MAX_SMS, -np.inf),
        parts=data("part", queues.num_parts, np.nan),
        partials=data("partial", num_partials, np.nan),
        arrivals=[Arrivals(order, rank, number, num) for number in range(num_tasks)],
        best_rows=PlainData("best row", rank, best_rows),
    )


def _host(
    gpu: BatchGpu, sms: Sequence[BatchSm], launches: Sequence[BatchLaunch], found: list[BatchFound]
) -> Steps:
    """A rank's launches, each after the one before, as batch/runner.py makes them."""
    queues = gpu.queues
    for one in launches:
        yield RAN
        _prepare(gpu, one)

        def computes(sm: int, one: BatchLaunch = one) -> Steps:
            return compute(sms[sm], one.num_steps)

        def loads(sm: int, one: BatchLaunch = one) -> Steps:
            return loader(sms[sm], one.num_steps)

        yield from launch(gpu.order, gpu.host, sms, (computes, loads))
        outputs = {}
        for kept in queues.outputs:
            first = kept.first * gpu.rows // BATCH
            values = gpu.numbers.values[first : first + gpu.rows * kept.num]
            rows = values.reshape(gpu.rows, kept.num)[: kept.rows].astype(np.float32)
            outputs[kept.tensor] = turned(torch.from_numpy(rows), kept)
        ids = (gpu.ids[step][: queues.batch] for step in range(one.num_steps))
        found.append(
            BatchFound(
                outputs=outputs,
                ids=tuple(ids) if queues.chosen else (),
                num_hits=int(gpu.state.values[BATCH_STATE_HITS]),
            )
        )


def turned(rows: Tensor, kept: Kept) -> Tensor:
    """What a launch leaves of rows: these, or in the order that their heads have in the tensor."""
    if kept.steps is None:
        return rows
    heads = rows.view(len(rows), kept.heads, -1)
    out = torch.empty_like(rows)
    out.as_strided(heads.shape, (*kept.steps, 1)).copy_(heads)
    return out


def _prepare(gpu: BatchGpu, given: BatchLaunch) -> None:
    """What the host writes before a launch."""
    queues = gpu.queues
    if queues.ids and queues.ids in given.inputs:
        ids = given.inputs[queues.ids].reshape(-1).numpy()
        best = np.full((gpu.rows, MAX_SMS), -np.inf)
        best[:, 0] = 0.0
        rows = gpu.best_rows.values.reshape(gpu.rows, MAX_SMS).copy()
        rows[: len(ids), 0] = ids - queues.first_id
        tick = gpu.host.tick()
        for memory, values in ((gpu.bests, best), (gpu.best_rows, rows)):
            memory.values[:] = values.reshape(-1)
            memory.writer[:], memory.tick[:] = gpu.host.number, tick
    elif not queues.ids:
        gpu.embed = given.inputs[queues.embed].reshape(queues.batch, -1).float().numpy()
    if queues.positions in given.inputs:
        positions = given.inputs[queues.positions].reshape(-1).numpy()
        at = BATCH_STATE_POSITIONS + np.arange(len(positions))
        gpu.state.values[at] = positions
        gpu.state.writer[at], gpu.state.tick[at] = gpu.host.number, gpu.host.tick()
    for each in queues.given:
        value = gpu.given[each.tensor] if each.tensor in gpu.given else given.inputs[each.tensor]
        start = value.storage_offset() + each.behind
        value = value.as_strided(each.extents, each.steps, start)
        if value.dtype == torch.bool:
            value = torch.zeros(value.shape).masked_fill(~value, -np.inf)
        at = each.first + np.arange(value.numel())
        gpu.numbers.values[at] = value.reshape(-1).float().numpy()
        gpu.numbers.writer[at], gpu.numbers.tick[at] = gpu.host.number, gpu.host.tick()
    gpu.host.tick()
    gpu.host.fence()


def loader(sm: BatchSm, num_steps: int) -> Steps:
    """The loader warp: groups of units, each group tile by tile along k."""
    for _ in range(num_steps):
        for one in sm.queue:
            if isinstance(one, BatchProduct):
                yield from load_steps(sm, one)
            if not isinstance(one, BatchLinear | BatchExperts | BatchLogits) or sm.gpu.rows > BATCH:
                continue
            if isinstance(one, BatchExperts):
                sm.open_choice()
                yield from sm.await_choice()
            for group in groups_of(sm, one):
                for row, k in tiles_of(sm, one, group):

                    def read(matrix: int = one.matrix, row: int = row, k: int = k) -> Floats:
                        return sm.weight_tile(matrix, row, k)

                    yield from sm.ring.ask(sm.loader, read)


def load_steps(sm: BatchSm, one: BatchProduct) -> Steps:
    """The steps of a product of more than 16 rows, two ring slots each."""
    paired = bool(one.flags & BATCH_PAIRED)
    for step in range(one.first_step, one.first_step + one.num_units):
        tile, k = divmod(step, one.num_tiles_k)
        size = PRODUCT_TILE // 2 if paired else PRODUCT_TILE
        first = one.weight_row + tile * size
        second = one.pair_row + tile * size if paired else first + PRODUCT_TILE // 2
        for half in range(STEP_K // SLICE_K):
            column = k * STEP_K + half * SLICE_K

            def read(rows: tuple[int, int] = (first, second), column: int = column) -> Floats:
                blocks = [sm.weight_block(one.matrix, row, column) for row in rows]
                return np.concatenate(blocks)

            yield from sm.ring.ask(sm.loader, read)


def compute(sm: BatchSm, num_steps: int) -> Steps:
    """The compute warps: each instruction once all SMs are done with the one before. What
    instruction i of step s exchanges over ranks is flagged s * instructions + i + 1.
    """
    gpu, queues = sm.gpu, sm.gpu.queues
    epoch0 = int(gpu.state.read(sm.compute, np.array([BATCH_STATE_EPOCH]))[0])
    num, num_sms = len(sm.queue), gpu.num_sms
    yield RAN
    for step in range(num_steps):
        for i, one in enumerate(sm.queue):
            before = (i or num) - 1
            factor, is_own = None, False
            if gpu.rows > BATCH and isinstance(one, BatchLinear | BatchLogits):
                # of a sum known before the products are
                factor, is_own = norm_factors(sm, one), one.src == 1
            if not is_own:
                yield from sm.await_event(before, (epoch0 + step + (i > 0)) * num_sms)
            flag = (epoch0 + step) * num + i + 1
            match one:
                case BatchEmbed():
                    chosen = tuple(b if b < queues.batch else 0 for b in range(queues.rows))
                    if queues.ids:
                        chosen = yield from next_ids(sm, one, 0, flag)
                        if sm.sm == 0 and step:
                            gpu.ids[step - 1] = chosen
                    if sm.sm == 0 and queues.keeps_ids:
                        at = BATCH_STATE_POSITIONS + queues.rows + np.arange(queues.rows)
                        sm.store(gpu.state, at, np.array(chosen))
                    yield from embed(sm, one, chosen, flag)
                case BatchGather():
                    yield from gather(sm, one, flag)
                case BatchNorm():
                    yield from norm(sm, one)
                case BatchHeads():
                    yield from prepare_heads(sm, one, step)
                case BatchRows():
                    yield from attend_rows(sm, one, step)
                case BatchPointwise():
                    yield from pointwise(sm, one, step)
                case BatchExperts():
                    yield from sm.await_opened()
                    route(sm, one)
                    yield RAN
                    yield from linear(sm, one, flag, norm_factors(sm, one))
                case BatchProduct():
                    yield from product(sm, one)
                case BatchLinear() | BatchLogits():
                    known = norm_factors(sm, one) if factor is None else factor
                    yield from linear(sm, one, flag, known)
                case _:
                    raise UnsupportedError(
                        f"{type(one).__name__} {one.name!r} on an emulated GPU",
                        expected="no attention over a cache of each row and no samples",
                        remedy="add its body to hopper/emulator",
                    )
            yield RAN
            sm.signal(i)
    if sm.sm == 0:
        yield from end(sm, epoch0, num_steps)


def end(sm: BatchSm, epoch0: int, num_steps: int) -> Generator[Key, None, None]:
    """SM 0, once all are done: the last ids, the state."""
    gpu, num = sm.gpu, len(sm.queue)
    yield from sm.await_event(num - 1, (epoch0 + num_steps) * gpu.num_sms)
    (first,) = (one for one in sm.queue if isinstance(one, BatchEmbed))
    if gpu.queues.chosen:
        after = gpu.queues.num_ranks * BEST_WORDS
        flag = (epoch0 + num_steps) * num
        gpu.ids[num_steps - 1] = yield from next_ids(sm, first, after, flag)
    at = BATCH_STATE_POSITIONS + np.arange(gpu.rows)
    sm.store(gpu.state, at, gpu.state.read(sm.compute, at) + num_steps)
    sm.store(gpu.state, np.array([BATCH_STATE_EPOCH]), np.array([epoch0 + num_steps]))
