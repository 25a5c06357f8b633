"""The kernel of one row on emulated GPUs: partitions of all SMs of all ranks, launch after launch.

In: queues of every rank as build_queues gives them, the arenas of weights and states, launches.
Out: what each launch leaves on each rank, as one_row/runner.py gives it; or a CheckError that names
a race or a wait that nobody satisfies. Ranks launch on their own, as their hosts do: only words of
peers hold one back. Next on the walk: bodies.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from distmega.errors import UnsupportedError
from distmega.kernels.hopper.emulator.clocks import Agent
from distmega.kernels.hopper.emulator.interleaving import RAN, Interleaving, Steps
from distmega.kernels.hopper.emulator.memory import FlaggedWords, KeptNumbers, PlainData
from distmega.kernels.hopper.emulator.numbers import Floats, Indices, numbers_of
from distmega.kernels.hopper.emulator.one_row.attention import attention, combine, load_blocks
from distmega.kernels.hopper.emulator.one_row.bodies import barrier, embed, linear
from distmega.kernels.hopper.emulator.one_row.experts import expert_row, load_expert_columns, route
from distmega.kernels.hopper.emulator.one_row.pointwise import pointwise
from distmega.kernels.hopper.emulator.one_row.sample import most_likely, push_best
from distmega.kernels.hopper.emulator.sm import RowGpu, RowSm, elements_of
from distmega.kernels.hopper.emulator.team import Agents, launch, run_hosts
from distmega.kernels.hopper.plan.encoded import pack_queues
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.words import (
    CONTINUED,
    ROW_EXPERT_COLUMNS,
    ROW_EXPERT_ROWS,
    ROW_LOADS_AHEAD,
    ROW_PAIRED,
    ROW_STATE_EPOCH,
    ROW_STATE_ID,
    ROW_STATE_POSITION,
    ROW_STATE_WORDS,
    UNIT_ROWS,
    RowAttention,
    RowBarrier,
    RowCombine,
    RowEmbed,
    RowLinear,
    RowPointwise,
    RowRoute,
    pack,
)
from distmega.kernels.runtime.arena import ArenaLayout
from distmega.kernels.runtime.memory import arena_views


@dataclass(frozen=True, slots=True, kw_only=True)
class RankArenas:
    """A rank's queues and arenas, as RowRunner takes them: uint8 tensors that the layouts
    describe.
    """

    queues: RowQueues
    weights: ArenaLayout
    weights_arena: Tensor
    state_arena: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLaunch:
    """One launch of a rank. inputs: the segment's by name, of a launch of one step; first: id
    and position, or CONTINUED.
    """

    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    num_steps: int = 1
    first: tuple[int, int] = CONTINUED


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a launch left. outputs: float32, by name; ids: that its steps chose; logits: of the
    last step, this rank's.
    """

    outputs: Mapping[str, Tensor]
    ids: tuple[int, ...]
    logits: Tensor


def emulate_rows(
    ranks: Sequence[RankArenas],
    launches: Sequence[Sequence[RowLaunch]],
    seed: int,
) -> list[list[Found]]:
    """Results [launch][rank] of launches [launch][rank] in the order that the seed gives. Caches in
    the state arenas are left as the launches leave them.
    """
    team = _Team(ranks, Interleaving(seed))
    hosts = [team.host(gpu, [each[gpu.rank] for each in launches]) for gpu in team.gpus]
    run_hosts(team.order, hosts, team.sms)
    for one, gpu in zip(ranks, team.gpus, strict=True):
        _write_back(one, gpu)
    return [[team.found[rank][nth] for rank in range(len(ranks))] for nth in range(len(launches))]


class _Team:
    """All ranks of one program."""

    def __init__(self, ranks: Sequence[RankArenas], order: Interleaving) -> None:
        self.order = order
        self.agents = Agents([len(one.queues.queues) for one in ranks])
        self.gpus = [self.gpu(rank, one) for rank, one in enumerate(ranks)]
        for gpu in self.gpus:
            gpu.peers = self.gpus
        self.found: list[list[Found]] = [[] for _ in ranks]
        self.sms = [
            [
                RowSm(gpu, sm, compute_warps, loader_warp, gpu.queues.stages, ROW_LOADS_AHEAD)
                for sm, (compute_warps, loader_warp) in enumerate(
                    zip(self.agents.computes[rank], self.agents.loaders[rank], strict=True)
                )
            ]
            for rank, gpu in enumerate(self.gpus)
        ]

    def gpu(self, rank: int, one: RankArenas) -> RowGpu:
        queues = one.queues
        pack_queues(queues.queues, pack)  # what the device reads holds all of it
        views = arena_views(one.weights, one.weights_arena)
        none: Floats = np.zeros((1, 1), dtype=np.float32)
        elements = elements_of(one.weights_arena)
        dim = queues.attention.head_dim if queues.attention else 1
        cache = numbers_of(one.state_arena) if queues.attention else none.reshape(-1)
        rows = cache[: len(cache) // dim * dim].reshape(-1, dim).copy()
        return RowGpu(
            rank=rank,
            num_sms=len(queues.queues),
            matrices=queues.matrices,
            queues=queues,
            order=self.order,
            elements=elements,
            floats=one.weights_arena[: one.weights.num_bytes // 4 * 4].view(torch.float32).numpy(),
            embed=views[queues.embed].float().numpy() if queues.ids else none,
            rope=views[queues.rope_table].float().numpy() if queues.rope_table else none,
            words=FlaggedWords(self.order, rank, self.agents.computes[rank], queues.num_words),
            kept=KeptNumbers(rank, queues.num_kept),
            state=PlainData("the state's word", rank, np.zeros(ROW_STATE_WORDS, np.int64)),
            cache=PlainData("cache row", rank, rows),
            host=self.agents.hosts[rank],
        )

    # the host

    def host(self, gpu: RowGpu, launches: Sequence[RowLaunch]) -> Steps:
        """A rank's launches, each after the one before, as runner.py makes them."""
        sms = self.sms[gpu.rank]
        for one in launches:
            yield RAN
            self.prepare(gpu, one)

            def computes(sm: int, one: RowLaunch = one) -> Steps:
                return compute(sms[sm], one)

            def loads(sm: int, one: RowLaunch = one) -> Steps:
                return loader(sms[sm], one)

            yield from launch(self.order, gpu.host, sms, (computes, loads))
            self.found[gpu.rank].append(self.read(gpu, one))

    def prepare(self, gpu: RowGpu, given: RowLaunch) -> None:
        """What the host writes before a launch of one step."""
        queues = gpu.queues
        words: dict[int, int] = {}
        if queues.ids and queues.ids in given.inputs:
            words[ROW_STATE_ID] = int(given.inputs[queues.ids].reshape(-1)[0])
        elif not queues.ids:
            gpu.embed = given.inputs[queues.embed].reshape(1, -1).float().numpy()
            if queues.chosen:
                words[ROW_STATE_ID] = 0
        if queues.positions and queues.positions in given.inputs:
            words[ROW_STATE_POSITION] = int(given.inputs[queues.positions].reshape(-1)[0])
        if (sampler := queues.sampler) and sampler.sampling in given.inputs:
            settings = given.inputs[sampler.sampling][0].float().numpy()
            gpu.settings[: len(settings)] = settings
            gpu.seed = int(given.inputs[sampler.seeds].reshape(-1)[0])
        tick = gpu.host.tick()
        for word, value in words.items():
            gpu.state.values[word] = value
            gpu.state.writer[word], gpu.state.tick[word] = gpu.host.number, tick
        gpu.host.fence()

    def read(self, gpu: RowGpu, given: RowLaunch) -> Found:
        """What the host copies after a launch."""
        queues, kept = gpu.queues, gpu.kept.values
        logits = kept[queues.logits_at : queues.logits_at + queues.rank_logits]
        return Found(
            outputs={
                one.tensor: torch.from_numpy(kept[one.first : one.first + one.num].copy())
                for one in queues.outputs
            },
            ids=tuple(gpu.ids[step] for step in range(given.num_steps)) if queues.chosen else (),
            logits=torch.from_numpy(logits.copy()),
        )


def _write_back(one: RankArenas, gpu: RowGpu) -> None:
    """Caches as the launches left them."""
    if one.queues.attention:
        values = torch.from_numpy(gpu.cache.values.reshape(-1)).bfloat16()
        one.state_arena.view(torch.bfloat16)[: len(values)] = values


def begin(agent: Agent, gpu: RowGpu, word: int, given: int) -> int:
    """What a launch begins with: given with it, or -1 for the word of the state."""
    found = int(gpu.state.read(agent, np.array([word]))[0])
    return given if given >= 0 else found


def loader(sm: RowSm, given: RowLaunch) -> Steps:
    """The loader warp: fills the ring in the order of the queue, ahead of every dependency."""
    gpu = sm.gpu
    if not sm.queue:
        return
    position0 = 0
    if any(isinstance(one, RowAttention) for one in sm.queue):
        position0 = begin(sm.loader, gpu, ROW_STATE_POSITION, given.first[1])
    yield RAN
    for step in range(given.num_steps):
        for one in sm.queue:
            if isinstance(one, RowAttention):
                yield from sm.await_step(step)
                yield from load_blocks(sm, one, position0 + step)
            elif isinstance(one, RowRoute):
                yield from sm.await_choice()
            elif isinstance(one, RowLinear):
                by_columns = one.flags & ROW_EXPERT_COLUMNS
                yield from (load_expert_columns if by_columns else load_units)(sm, one)


def load_units(sm: RowSm, one: RowLinear) -> Steps:
    """Units of a linear, those of two streams in turn, tile by tile."""
    for unit in range(one.num_units):
        row = one.weight_row + unit * UNIT_ROWS
        if one.flags & ROW_EXPERT_ROWS:
            row = expert_row(sm, one, unit)
        elif one.flags & ROW_PAIRED:
            row = (one.pair_row if unit % 2 else one.weight_row) + unit // 2 * UNIT_ROWS
        for k in range(one.num_tiles_k):

            def read(row: int = row, k: int = k) -> Floats:
                return sm.weight_tile(one.matrix, row, k)

            yield from sm.ring.ask(sm.loader, read)


def compute(sm: RowSm, given: RowLaunch) -> Steps:
    """The compute warps: the queue's instructions, step after step. A datum of generation g and
    step s is flagged s * num_generations + g + 1.
    """
    gpu, queues = sm.gpu, sm.gpu.queues
    last = sm.sm == 0
    if not sm.queue and not last:
        return  # what it reads of the state, it does not use
    position0 = begin(sm.compute, gpu, ROW_STATE_POSITION, given.first[1])
    epoch0 = begin(sm.compute, gpu, ROW_STATE_EPOCH, -1)
    row_id = begin(sm.compute, gpu, ROW_STATE_ID, given.first[0])
    yield RAN
    for step in range(given.num_steps):
        base = (epoch0 + step) * queues.num_generations + 1
        if queues.chosen and step > 0:
            row_id = yield from most_likely(sm, base - 1)
            sm.fence()
            if last:
                gpu.ids[step - 1] = row_id
        sm.arrive()
        for one in sm.queue:
            yield RAN
            flag = base + one.generation
            position = position0 + step
            match one:
                case RowAttention():
                    yield from attention(sm, one, position, flag)
                case RowCombine():
                    yield from combine(sm, one, position, flag)
                case RowBarrier():
                    yield from barrier(sm, one, flag)
                case RowEmbed():
                    embed(sm, one, row_id, flag)
                case RowPointwise():
                    yield from pointwise(sm, one, row_id, position, flag)
                case RowRoute():
                    yield from route(sm, one, flag)
                case RowLinear():
                    best, row = yield from linear(sm, one, row_id, flag)
                    if queues.epilogues[one.opcode].ranked and queues.sampler is None:
                        push_best(sm, best, queues.first_id + row, flag)
                case _:
                    raise UnsupportedError(
                        f"{type(one).__name__} {one.name!r} on an emulated GPU",
                        expected="no samples",
                        remedy="add its body to hopper/emulator",
                    )
    if last:
        num_steps = given.num_steps
        if queues.chosen:
            row_id = yield from most_likely(sm, (epoch0 + num_steps) * queues.num_generations)
            gpu.ids[num_steps - 1] = row_id
            store_state(sm, ROW_STATE_ID, row_id)
        store_state(sm, ROW_STATE_POSITION, position0 + num_steps)
        store_state(sm, ROW_STATE_EPOCH, epoch0 + num_steps)


def store_state(sm: RowSm, word: int, value: int) -> None:
    at: Indices = np.array([word])
    sm.store(sm.gpu.state, at, np.array([value]))
