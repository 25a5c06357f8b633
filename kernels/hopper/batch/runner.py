"""Runs the kernel of several rows on a GPU: the queues, buffers and launches of one segment.

In: a segment of up to 64 sequences or rows, the arenas of weights and states on the GPU. Out: a
SteppingRunner, as one_row/runner.py's for one row. Next on the walk: kernel.py.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from distmega.kernels.hopper import late
from distmega.kernels.hopper.batch import kernel
from distmega.kernels.hopper.batch.arguments import BatchMemory, BatchSpec
from distmega.kernels.hopper.batch.bodies.limits import list_words
from distmega.kernels.hopper.batch_plan.proof import CHUNK
from distmega.kernels.hopper.batch_plan.types import BatchQueues, most_partial_words
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    BATCH_LOADS_AHEAD,
    BATCH_STAMPS,
    BATCH_STATE_EPOCH,
    BATCH_STATE_HITS,
    BATCH_STATE_POSITIONS,
    BATCH_STATE_WORDS,
    EVENT_WORDS,
    EVENTS_AT,
    SEEDS_AT,
    SETTINGS,
    SETTINGS_AT,
    STAGES,
    pack,
)
from distmega.kernels.hopper.one_row.runner import (
    CACHE_ROWS,
    choice_of,
    describe,
    describe_cache,
    launcher_of,
    open_symmetric,
    padded_logits,
)
from distmega.kernels.hopper.plan.encoded import pack_queues
from distmega.kernels.hopper.plan.types import NO_ATTENTION, Stamps
from distmega.kernels.hopper.plan.words import MAX_SMS, NO_CHOICE
from distmega.kernels.hopper.steps import MAX_STEPS, HopperSteps, require_steps
from distmega.kernels.powers import LOG2_E
from distmega.kernels.runtime.alarm import LOCAL_LIMIT_S, Alarm
from distmega.kernels.runtime.arena import ArenaLayout
from distmega.kernels.runtime.memory import arena_views, copy_ids, packed
from distmega.kernels.runtime.relaunch import Launcher
from distmega.kernels.runtime.stepping import NO_SAMPLE_INPUTS
from distmega.kernels.runtime.symmetric import Team
from distmega.program.ops.lookups import bounded_inputs
from distmega.program.types import Program
from distmega.trace_file import Span

HALF_TILE = 1, 64
"""Slices and rows that a load of a BatchProduct brings: half of what a ring slot has."""


class BatchRunner(HopperSteps):
    """The kernel of several rows bound to the memory of one GPU."""

    num_stamps = BATCH_STAMPS

    def __init__(
        self,
        segment: Program,
        queues: BatchQueues,
        *,
        weights: ArenaLayout,
        weights_arena: Tensor,
        state_arena: Tensor,
        team: Team | None = None,
        timeout_s: float = LOCAL_LIMIT_S,
    ) -> None:
        """As RowRunner."""
        device = weights_arena.device
        team_rank = team.team_rank if team else 0
        self.segment, self.queues = segment, queues
        self._bounds = bounded_inputs(segment)
        self._words = _encode(queues).to(device)
        views = arena_views(weights, weights_arena)
        unused = torch.zeros(16, device=device)
        self._rope = views[queues.rope_table] if queues.rope_table else unused
        self._embed = views[queues.embed] if queues.ids else unused.bfloat16()
        names = {one.tensor for one in queues.given}
        self._given_weights = {name: view for name, view in views.items() if name in names}
        self._vectors = weights_arena.view(torch.bfloat16)
        self._shape = queues.attention or NO_ATTENTION
        self._shared_cache = self._cache = state_arena.view(torch.bfloat16)
        if queues.attention is None:
            rows = CACHE_ROWS, self._shape.head_dim
            self._cache = torch.zeros(rows, dtype=torch.bfloat16, device=device)
        block = None if queues.rows == BATCH else HALF_TILE
        descriptors = [describe(weights_arena, matrix, block) for matrix in queues.matrices]
        self._weights = [descriptors[min(i, len(descriptors) - 1)] for i in range(3)]
        self._cache_tiles = describe_cache(self._cache, self._shape.head_dim)
        num_sms = len(queues.queues)

        def zeros(*extents: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(extents, dtype=dtype, device=device)

        self._team = team
        self._memory, symmetric_buffers = open_symmetric(_num_words(queues), team, device)
        self._report = symmetric_buffers[team_rank].view(torch.int32)
        self._peers = symmetric_buffers if team else None
        limit_s = timeout_s if team else min(timeout_s, LOCAL_LIMIT_S)
        self._alarm = Alarm(symmetric_buffers[team_rank], limit_s)
        num_rows = queues.rows
        self._acts = zeros(queues.num_chunks * CHUNK // 2 * num_rows // BATCH, dtype=torch.int32)
        self._numbers = zeros(max(queues.num_numbers, 1))
        self._own_logits = zeros(num_rows, max(queues.logit_rows, 1))
        self.logits = self._own_logits
        if queues.gathers:
            self.logits = _view_logits(queues, symmetric_buffers[team_rank])
        self._sums = zeros(max(queues.num_slots, 1), num_rows, MAX_SMS)
        self._bests = zeros(num_rows, MAX_SMS)
        self._bests_given = torch.full_like(self._bests, -math.inf)
        """Where ids are given: the first SM has found them."""
        self._bests_given[:, 0] = 0.0
        self._best_rows = zeros(num_rows, MAX_SMS, dtype=torch.int32)
        of_attention = num_sms * most_partial_words(self._shape.head_dim, queues.row_attention)
        self._partials = zeros(of_attention + queues.num_parts)
        tasks = [shape.num_tasks(num_rows) for shape in queues.row_attention.each]
        tasks.append(num_rows * self._shape.num_kv_heads * self._shape.num_parts)
        self._arrivals = zeros(max(tasks), dtype=torch.int32)
        self._state = zeros(BATCH_STATE_WORDS, dtype=torch.int32)
        self._ids = zeros(MAX_STEPS, num_rows, dtype=torch.int32)
        self._num_sequences = queues.batch
        self._steps = self._launcher()
        self._tracing: Launcher | None = None

    def _launch(self, tensors: Mapping[str, Tensor], stamps: Tensor | None) -> None:
        queues = self.queues
        self._num_sequences = queues.batch
        if queues.ids:
            self._set_ids(tensors[queues.ids], self._bounds.get(queues.ids))
        else:
            self._embed = packed(tensors[queues.embed])
        if queues.positions:
            bound = self._bounds.get(queues.positions)
            self._set_positions(tensors[queues.positions], bound)
        self._set_given(tensors)
        self._set_sampling(tensors)
        self._run(1, stamps)
        for kept in queues.outputs:
            rows, first = queues.rows, kept.first * queues.rows // BATCH
            values = self._numbers[first : first + rows * kept.num]
            out = tensors[kept.tensor]
            found = values.view(rows, kept.heads, -1)[: kept.rows]
            steps = kept.steps or (kept.num, found.shape[2])
            out.as_strided(found.shape, (*steps, 1)).copy_(found)
        if queues.chosen:
            tensors[queues.chosen].copy_(self._ids[0, : queues.batch])
        if queues.logits in self.segment.outputs:
            self._write_logits(tensors[queues.logits])

    def _write_logits(self, out: Tensor) -> None:
        """[batch, num_logits] of all ranks."""
        queues = self.queues
        found = self.logits[: queues.batch]
        if self._team is None or queues.gathers:
            out.copy_(found)
        else:
            padding = queues.rank_logits - queues.logit_rows
            self._team.gather(pad(found[:, : queues.logit_rows], (0, padding)).to(out.dtype), out)

    def start(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        sample_inputs: Mapping[str, Tensor] = NO_SAMPLE_INPUTS,
    ) -> None:
        """The next step appends an id to each of the first sequences, at its position.
        sample_inputs: the segment's inputs that say how ids are sampled, a row a sequence, if it
        does.
        """
        self._set_sampling(sample_inputs)
        device = self._state.device
        self._num_sequences = len(ids)
        self._set_ids(torch.tensor(ids, device=device))
        self._set_positions(torch.tensor(positions, device=device))

    def _set_sampling(self, tensors: Mapping[str, Tensor]) -> None:
        if sampler := self.queues.sampler:
            num, size = tensors[sampler.sampling].shape
            seeds = self._report[2 * SEEDS_AT : 2 * SETTINGS_AT].view(torch.int64)
            seeds[:num].copy_(tensors[sampler.seeds])
            settings = self._report[2 * SETTINGS_AT :][: BATCH * SETTINGS].view(torch.float32)
            settings.view(BATCH, SETTINGS)[:num, :size].copy_(tensors[sampler.sampling])

    def run_steps(self, num_steps: int) -> Tensor:
        """Runs steps after those before; their ids, int32 [num_steps, sequences], on the GPU
        until the next call. The caller sees to it that the caches have room.
        """
        require_steps(num_steps)
        self._run(num_steps)
        return self._ids[:num_steps, : self._num_sequences]

    @property
    def num_hits(self) -> int:
        """Experts whose weights were read: of each choice those that some row chose, over all
        choices of all steps so far.
        """
        return int(self._state[BATCH_STATE_HITS])

    def _spans(self, stamps: Stamps) -> Iterator[Span]:
        return late.batch_spans(self.queues, stamps, self._team_rank)

    def raise_hang(self) -> None:
        """See HopperSteps; events and arrivals are what they ought to be after it."""
        if report := self._alarm.take():
            events = self._report[2 * EVENTS_AT : 2 * self.queues.first_word]
            epoch, num_sms = self._state[BATCH_STATE_EPOCH], len(self.queues.queues)
            events.view(-1, EVENT_WORDS)[:, 0] = epoch * num_sms
            self._arrivals.zero_()
            raise late.explain_batch_hang(self.queues, report, self._alarm.limit_s, self._team_rank)

    def _set_ids(self, ids: Tensor, bound: int | None = None) -> None:
        """Puts the ids, below `bound`, where the kernel looks for those of the step before."""
        self._bests.copy_(self._bests_given)
        out = self._best_rows[: len(ids), 0]
        copy_ids(ids, bound, out=out)
        if not self.queues.gathers and self.queues.first_id:
            out -= self.queues.first_id

    def _set_given(self, tensors: Mapping[str, Tensor]) -> None:
        """Writes the numbers that the kernel finds where others leave theirs."""
        for given in self.queues.given:
            value = self._given_weights.get(given.tensor)
            value = tensors[given.tensor].contiguous() if value is None else value
            start = value.storage_offset() + given.behind
            value = value.as_strided(given.extents, given.steps, start)
            first = given.first
            numbers = self._numbers[first : first + value.numel()].view(given.extents)
            if value.dtype == torch.bool:
                numbers.zero_().masked_fill_(~value, -math.inf)
            else:
                numbers.copy_(value)

    def _set_positions(self, positions: Tensor, bound: int | None = None) -> None:
        first = BATCH_STATE_POSITIONS
        copy_ids(positions, bound, out=self._state[first : first + len(positions)])

    def prepare(self) -> None:
        """See SteppingRunner."""
        self._steps.prepare(*self._arguments(1, None))

    def _run(self, num_steps: int, stamps: Tensor | None = None) -> None:
        self.raise_hang()
        if stamps is None:
            self._steps(*self._arguments(num_steps, None))
            return
        if self._tracing is None:
            self._tracing = self._launcher()  # another kernel, for it is given stamps
        self._tracing(*self._arguments(num_steps, stamps))

    def _arguments(self, num_steps: int, stamps: Tensor | None) -> tuple[object, ...]:
        """Of a launch, but for constants."""
        queues = self.queues
        return (
            *self._weights,
            self._cache_tiles,
            self._words,
            self._words.shape[1],
            num_steps,
            self._state,
            self._num_sequences,
            len(queues.queues),
            self._shape.max_context,
            BatchMemory(
                ids=self._ids,
                events=self._report,
                acts=self._acts,
                numbers=self._numbers,
                logits=self._own_logits,
                sums=self._sums,
                bests=self._bests,
                best_rows=self._best_rows,
                partials=self._partials,
                arrivals=self._arrivals,
                vectors=self._vectors,
                embed=self._embed,
                cache=self._shared_cache if queues.row_attention.each else self._cache,
                rope=self._rope,
            ),
            queues.eps,
            self._shape.scale * LOG2_E,
            queues.first_list,
            self._peers,
            stamps,
        )

    def _launcher(self) -> Launcher:
        queues = self.queues
        spec = BatchSpec(
            head_dim=self._shape.head_dim,
            num_queries=self._shape.num_queries,
            num_heads=self._shape.num_heads,
            num_kv_heads=self._shape.num_kv_heads,
            num_parts=self._shape.num_parts,
            qk_norm=self._shape.qk_norm,
            rotated=self._shape.rotated,
            apart=self._shape.apart,
            softcap=self._shape.softcap,
            attends=queues.attention is not None,
            normalises=queues.normalises,
            looks_up=queues.ids != "",
            epilogues=queues.epilogues,
            formulas=queues.formulas,
            wide_norms=queues.wide_norms,
            keeps_ids=queues.keeps_ids,
            choice=choice_of(queues.sampler) if queues.chosen else NO_CHOICE,
            sm_logits=padded_logits(queues.sm_logits),
            whole_slices=queues.whole_slices,
            num_ranks=queues.num_ranks,
            stages=STAGES,
            ahead=BATCH_LOADS_AHEAD,
            experts=queues.experts,
            biased=self._shape.biased,
            rows=queues.rows,
            row_attention=queues.row_attention,
        )
        return launcher_of(kernel.run_batch_steps, len(queues.queues), spec)


def _num_words(queues: BatchQueues) -> int:
    """64-bit words of the report, the events, the lists of samples within limits, and what ranks
    exchange.
    """
    lists = BATCH * list_words(queues.num_logits) if queues.is_limited else 0
    return queues.first_list + lists


def _view_logits(queues: BatchQueues, symmetric: Tensor) -> Tensor:
    """[16, num_logits] of all ranks, in the symmetric buffer of one of them."""
    (buffer,) = (one for one in queues.buffers if one.name == "logits")
    logits = symmetric[buffer.first :].view(torch.float32)
    return logits[: BATCH * queues.num_logits].view(BATCH, queues.num_logits)


def _encode(queues: BatchQueues) -> Tensor:
    """Words [num_sms, instructions, WORDS], int32."""
    assert len({*map(len, queues.queues)}) == 1, "all SMs take part in each instruction"
    return torch.from_numpy(pack_queues(queues.queues, pack))
