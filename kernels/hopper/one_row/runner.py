"""Runs the kernel of one row on a GPU: the queues, buffers and launches of one segment.

In: a segment, the arenas of weights and states on the GPU. Out: a KernelRunner for
hostir/run/evaluator.py, one step a launch, and `run_steps`, several steps a launch. Weights and
states are used where they lie, so library ops of the same program share them. Next on the walk:
../../runtime/relaunch.py.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from distmega.kernels.hopper import late
from distmega.kernels.hopper.one_row import kernel
from distmega.kernels.hopper.one_row.arguments import QueueMemory, RowMemory, RowSpec
from distmega.kernels.hopper.plan.encoded import encode_queues
from distmega.kernels.hopper.plan.types import (
    NO_ATTENTION,
    ROW_MATRICES,
    Epilogues,
    RowFormulas,
    RowQueues,
    Stamps,
    WeightMatrix,
    padded_tiles_k,
)
from distmega.kernels.hopper.plan.words import (
    CONTINUED,
    GREEDY,
    KEEP_NORMED,
    LAYER_NORM,
    LIMITED,
    MAX_SMS,
    MIN_BLOCKS,
    NO_CHOICE,
    ROW_LOADS_AHEAD,
    ROW_STATE_ID,
    ROW_STATE_POSITION,
    ROW_STATE_SAMPLING,
    ROW_STATE_SEED,
    ROW_STATE_WORDS,
    SAMPLED,
    SEARCHED,
    STAMPS,
)
from distmega.kernels.hopper.ptx.shapes import THREADS, TILE_SHARED, WEIGHT_SHARED
from distmega.kernels.hopper.steps import MAX_STEPS, HopperSteps, require_steps
from distmega.kernels.powers import LOG2_E
from distmega.kernels.runtime.alarm import LOCAL_LIMIT_S, Alarm
from distmega.kernels.runtime.arena import ArenaLayout
from distmega.kernels.runtime.memory import arena_views, copy_ids, packed
from distmega.kernels.runtime.relaunch import Launcher
from distmega.kernels.runtime.stepping import NO_SAMPLE_INPUTS
from distmega.kernels.runtime.symmetric import SymmetricMemory, Team
from distmega.kernels.tasks.fuse import FusedSample
from distmega.program.ops.lookups import bounded_inputs
from distmega.program.types import Program
from distmega.trace_file import Span

CACHE_ROWS = 128
"""Of what stands for the cache where there is none: a block."""


CHOICES = {"given": SAMPLED, "candidates": LIMITED, "all": SEARCHED}


def choice_of(sampler: FusedSample | None) -> int:
    """How the kernel chooses ids."""
    return CHOICES[sampler.limits] if sampler else GREEDY


def padded_logits(sm_logits: int) -> int:
    """Logits of an SM that its threads look at together."""
    return max(MAX_SMS, 1 << (sm_logits - 1).bit_length())


def most_passes(most_rows: int) -> int:
    """Rows of pointwise work that a thread has, at most, of an SM's; at least 1."""
    num_threads: int = THREADS.value
    return -(-max(most_rows, 1) // num_threads)


class RowRunner(HopperSteps):
    """The kernel of one row bound to the memory of one GPU."""

    num_stamps = STAMPS

    def __init__(
        self,
        segment: Program,
        queues: RowQueues,
        *,
        weights: ArenaLayout,
        weights_arena: Tensor,
        state_arena: Tensor,
        team: Team | None = None,
        timeout_s: float = LOCAL_LIMIT_S,
    ) -> None:
        """The arenas are uint8 tensors on the GPU that the layouts describe, weights in the order
        of plan/weight_order.py. team: the ranks that share the segment, which must all make their
        runner together. timeout_s: bound on any wait, which with a team may depend on a peer;
        without one LOCAL_LIMIT_S at most.
        """
        device = weights_arena.device
        self.segment, self.queues = segment, queues
        self._bounds = bounded_inputs(segment)
        self._encoded = encoded = encode_queues(queues)
        self._words = torch.from_numpy(encoded.words).to(device)
        self._counts = torch.from_numpy(encoded.lengths).to(device)
        views = arena_views(weights, weights_arena)
        self._unused = torch.zeros(16, device=device)
        self._rope = views[queues.rope_table] if queues.rope_table else self._unused
        self._embed = views[queues.embed] if queues.ids else self._unused.bfloat16()
        self._vectors = weights_arena.view(torch.bfloat16)
        self._shape = queues.attention or NO_ATTENTION
        self._cache = state_arena.view(torch.bfloat16)
        if queues.attention is None:
            rows = CACHE_ROWS, self._shape.head_dim
            self._cache = torch.zeros(rows, dtype=torch.bfloat16, device=device)
        matrices = [*queues.matrices, *filter(None, (queues.expert_matrix,))]
        descriptors = [describe(weights_arena, matrix) for matrix in matrices]
        self._weights = [descriptors[min(i, len(descriptors) - 1)] for i in range(ROW_MATRICES)]
        self._cache_tiles = describe_cache(self._cache, self._shape.head_dim)
        self._team = team
        self._memory, self._peers = open_symmetric(queues.num_words, team, device)
        self._symmetric = self._peers[team.team_rank if team else 0]
        self._kept = torch.zeros(max(queues.num_kept, 1), device=device)
        self.logits = self._kept[queues.logits_at :][: max(queues.rank_logits, 1)]
        self._state = torch.zeros(ROW_STATE_WORDS, dtype=torch.int32, device=device)
        self._settings = self._state[ROW_STATE_SAMPLING:][:3].view(torch.float32)
        self._seed = self._state[ROW_STATE_SEED:][:2].view(torch.int64)
        self._ids = torch.zeros(MAX_STEPS, dtype=torch.int32, device=device)
        limit_s = timeout_s if team else min(timeout_s, LOCAL_LIMIT_S)
        self._alarm = Alarm(self._symmetric, limit_s)
        self._first = CONTINUED
        self._launchers: dict[bool, Launcher] = {}
        self._no_stamps = torch.zeros(1, dtype=torch.int64, device=device)

    def _launch(self, tensors: Mapping[str, Tensor], stamps: Tensor | None) -> None:
        queues = self.queues
        if queues.ids:
            self._set_number(ROW_STATE_ID, tensors, queues.ids)
        else:  # the input is the only row of an embedding
            self._embed = packed(tensors[queues.embed])
            if queues.chosen:
                self._state[ROW_STATE_ID].zero_()  # not `= 0`, which copies from the host
        if queues.positions:
            self._set_number(ROW_STATE_POSITION, tensors, queues.positions)
        self._first = CONTINUED
        self._set_sampling(tensors)
        self._run(1, stamps)
        for kept in queues.outputs:
            values = self._kept[kept.first : kept.first + kept.num]
            tensors[kept.tensor].view(-1).copy_(values)
        if queues.chosen:
            tensors[queues.chosen].copy_(self._ids[:1])
        if queues.logits in self.segment.outputs:
            self._write_logits(tensors[queues.logits])

    def _set_number(self, at: int, tensors: Mapping[str, Tensor], name: str) -> None:
        """Word `at` of the state is the one element of an input."""
        copy_ids(tensors[name][:1], self._bounds.get(name), out=self._state[at : at + 1])

    def _write_logits(self, out: Tensor) -> None:
        """[1, num_logits] of all ranks."""
        if self._team is None:
            out[0].copy_(self.logits)
        else:
            self._team.gather(self.logits.to(out.dtype)[None], out)

    def start(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        sample_inputs: Mapping[str, Tensor] = NO_SAMPLE_INPUTS,
    ) -> None:
        """The next step appends the id to the one sequence, at its position. sample_inputs: the
        segment's inputs that say how ids are sampled, if it samples.
        """
        self._first = ids[0], positions[0]
        self._set_sampling(sample_inputs)

    def _set_sampling(self, tensors: Mapping[str, Tensor]) -> None:
        if sampler := self.queues.sampler:
            settings = tensors[sampler.sampling][0]
            self._settings[: len(settings)].copy_(settings)
            self._seed.copy_(tensors[sampler.seeds])

    def run_steps(self, num_steps: int) -> Tensor:
        """Runs steps after those before; their ids, int32 [num_steps, 1], on the GPU until the
        next call. The caller sees to it that the cache has room. Not of a pipeline's stage.
        """
        require_steps(num_steps)
        self._run(num_steps)
        return self._ids[:num_steps, None]

    def _spans(self, stamps: Stamps) -> Iterator[Span]:
        return late.timeline_spans(self.queues, stamps, self._team_rank)

    def raise_hang(self) -> None:
        """See HopperSteps."""
        if report := self._alarm.take():
            raise late.explain_hang(
                self.queues, report, limit_s=self._alarm.limit_s, rank=self._team_rank
            )

    def prepare(self) -> None:
        """See SteppingRunner."""
        self._launchers[False] = self._launcher(tracing=False)
        self._launchers[False].prepare(*self._arguments(1, None))

    def _run(self, num_steps: int, stamps: Tensor | None = None) -> None:
        self.raise_hang()
        tracing = stamps is not None
        if tracing not in self._launchers:
            self._launchers[tracing] = self._launcher(tracing)
        self._launchers[tracing](*self._arguments(num_steps, stamps))
        self._first = CONTINUED

    def _arguments(self, num_steps: int, stamps: Tensor | None) -> tuple[object, ...]:
        """Of a launch, but for constants."""
        queues = self.queues
        return (
            *self._weights,
            self._cache_tiles,
            QueueMemory(self._words, self._counts),
            self._words.shape[1],
            num_steps,
            queues.num_generations,
            *self._first,
            RowMemory(
                state=self._state,
                ids=self._ids,
                symmetric=self._symmetric,
                vectors=self._vectors,
                embed=self._embed,
                cache=self._cache,
                rope=self._rope,
                kept=self._kept,
            ),
            queues.best,
            len(queues.queues) if queues.chosen else 0,
            self._peers,
            self._team_rank,
            queues.first_id,
            MIN_BLOCKS,
            queues.eps,
            self._shape.scale * LOG2_E,
            self._no_stamps if stamps is None else stamps,
        )

    def _launcher(self, tracing: bool) -> Launcher:
        queues = self.queues
        tiles_k = padded_tiles_k(queues.max_tiles_k)
        encoded = self._encoded
        spec = RowSpec(
            head_dim=self._shape.head_dim,
            num_queries=self._shape.num_queries,
            num_heads=self._shape.num_heads,
            num_kv_heads=self._shape.num_kv_heads,
            qk_norm=self._shape.qk_norm,
            rotated=self._shape.rotated,
            attends=queues.attention is not None,
            experts=queues.experts,
            epilogues=Epilogues(queues.epilogues),
            layer_norms=bool(encoded.linear_flags & LAYER_NORM),
            keeps_normed=bool(encoded.linear_flags & KEEP_NORMED),
            max_tiles_k=tiles_k,
            num_matrices=len(queues.matrices),
            choice=choice_of(queues.sampler) if queues.chosen else NO_CHOICE,
            sm_logits=padded_logits(queues.sm_logits),
            num_ranks=queues.num_ranks,
            given=queues.num_ranks > 1 and not queues.ids,
            barriers=encoded.has_barriers,
            stages=queues.stages,
            ahead=ROW_LOADS_AHEAD,
            trace=tracing,
            apart=self._shape.apart,
            softcap=self._shape.softcap,
            biased=self._shape.biased,
            formulas=RowFormulas(queues.formulas),
            passes=most_passes(encoded.most_rows),
            wide_norms=queues.wide_norms,
        )
        return launcher_of(kernel.run_row_steps, len(queues.queues), spec)


def launcher_of(kernel: triton.JITFunction, num_sms: int, spec: object) -> Launcher:
    """Launches of a kernel whose programs, one an SM, wait for each other."""
    return Launcher(
        kernel,
        num_sms,
        {"spec": spec},
        num_warps=8,
        launch_cooperative_grid=True,
        enable_fp_fusion=True,
    )


def open_symmetric(
    num_words: int, team: Team | None, device: torch.device
) -> tuple[SymmetricMemory | None, tuple[Tensor, ...]]:
    """Flagged words of every rank, zeroed, and the memory they lie in where ranks share it."""
    if team is None:
        return None, (torch.zeros(num_words, dtype=torch.int64, device=device),)
    memory, size = team.open(8 * num_words), (num_words,)
    return memory, tuple(memory.tensor(r, size, torch.int64) for r in range(team.size))


def describe_cache(cache: Tensor, head_dim: int) -> TensorDescriptor:
    """bf16 caches [rows, head_dim], a tile being 64 columns of 128 positions."""
    rows = cache.numel() // head_dim
    matrix = cache[: rows * head_dim].view(rows, head_dim)
    return TensorDescriptor.from_tensor(matrix, [128, 64], TILE_SHARED.value)


def describe(
    arena: Tensor, matrix: WeightMatrix, block: tuple[int, int] | None = None
) -> TensorDescriptor:
    """Rows of one length as [columns / 64, rows, 64], a tile, or part of one, being slices of 8
    rows, or as many slices and rows as `block` says. Where that is no whole number, the last slice
    reaches into the next row, past the arena's last one into the memory behind it (allocate_arena);
    what it has there meets zeros of x.
    """
    columns, num_rows = matrix.columns, matrix.num_rows
    slices, rows = block or (matrix.slices, 8)
    flat = arena[matrix.offset : matrix.offset + 2 * num_rows * columns].view(torch.bfloat16)
    return TensorDescriptor(
        flat,
        [-(-columns // 64), num_rows, 64],
        [64, columns, 1],
        [slices, rows, 64],
        WEIGHT_SHARED.value,
    )
