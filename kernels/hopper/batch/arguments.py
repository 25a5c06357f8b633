"""What the kernel of several rows is given at a launch: memory, and what it is compiled for.

In: nothing. Out: BatchMemory, one argument of the kernel that holds all of its pointers, and
BatchSpec, its one constant. Numbers that change from launch to launch can't travel so: Triton makes
a constant of every 1 that stands in a tuple, and compiles for multiples of 16, whatever
do_not_specialize says of the argument. Nor can TMA descriptors, which Triton 3.6 launches only as
arguments of their own. Next on the walk: kernel.py.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from distmega.kernels.hopper.batch_plan.types import (
    BatchEpilogues,
    BatchFormulas,
    RowAttentionShapes,
    most_partial_words,
)
from distmega.kernels.hopper.batch_plan.words import BATCH
from distmega.kernels.hopper.plan.types import ExpertShape


class BatchMemory(NamedTuple):
    """Memory of one GPU. Unless it says otherwise the kernel alone writes it after the runner has
    allocated it, all zeros.

    ids: int32 [steps, 16], that each step chose.
    events: int32, what other ranks write too: a report (ptx/spins.py), seeds and settings of
    samples from the runner, a counter an instruction, flagged words of ranks, lists of samples, as
    batch_plan/words.py lays them out. The report is the host's, see alarm.py.
    acts: int32 pairs of bf16, activations in the order of device.py. What lies behind the last row
    of a tensor stays zero.
    numbers: f32 [16, rows], tensors that are kept, one behind the other.
    logits: f32 [16, rank_logits].
    sums: f32 [slots, 16, 256], each SM's part of each sequence's sum of squares.
    bests, best_rows: f32 and int32 [16, 256], each SM's highest logit and its row. The runner
    writes the ids to begin with there, and -inf elsewhere.
    partials: f32, of each SM two of a part of a sequence and head, or one of a part of the keys
    that 16 queries see: outputs, maxima and sums.
    arrivals: int32, SMs that have left a partial: of each sequence and head [rows * kv heads *
    parts], of each task of rows over rows, or of the more numerous.
    vectors: bf16, the weight arena, of which norm weights and biases are read; written by nobody.
    embed: bf16, this rank's part of the table [rows, columns], written by nobody; or the rows that
    come in, which the runner gives.
    cache: bf16, the arena of states: keys and values [rows, head_dim] of all sequences.
    rope: f32 [positions, head_dim], cosines, then sines; written by nobody.
    """

    ids: Tensor
    events: Tensor
    acts: Tensor
    numbers: Tensor
    logits: Tensor
    sums: Tensor
    bests: Tensor
    best_rows: Tensor
    partials: Tensor
    arrivals: Tensor
    vectors: Tensor
    embed: Tensor
    cache: Tensor
    rope: Tensor


class SlotRing(NamedTuple):
    """In shared memory, made by the kernel. slots: bf16 [stages, 128, 64], which the loader fills
    by the copy engine and compute warps read; ready, free: an mbarrier a slot, of bytes that came,
    and of warps that have read it.
    """

    slots: object
    ready: object
    free: object


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """What one compiled kernel is for.

    head_dim, num_queries, num_heads, num_kv_heads, num_parts: of attention: elements of a head,
    query heads of a task, query and kv heads of this rank, tasks that share a kv head. qk_norm:
    whether queries and keys are normalised; rotated: whether they are rotated; apart: whether they
    and values lie apart; softcap: what scores are kept below, if it is not 0; biased: whether a
    table is added to them. attends, normalises: whether there is attention, and rows in another
    form (norms.py). looks_up: whether ids are
    looked up in `embed`. formulas: of pointwise work on rows. wide_norms: whether weights of norms
    are f32. keeps_ids: whether tables are looked up besides. choice: how an id is chosen
    (plan/words.py). sm_logits: of an SM, at most, a power of two. whole_slices: whether rows
    of weights are, and biases of two streams lie without a gap. stages: of the ring; ahead: loads
    under way at a time, at most. rows: that it computes, 16, 32 or 64. row_attention: of
    rows over rows.
    """

    head_dim: int
    num_queries: int
    num_heads: int
    num_kv_heads: int
    num_parts: int
    qk_norm: bool
    rotated: bool
    apart: bool
    softcap: float
    attends: bool
    normalises: bool
    looks_up: bool
    epilogues: BatchEpilogues
    formulas: BatchFormulas
    wide_norms: bool
    keeps_ids: bool
    choice: int
    sm_logits: int
    whole_slices: bool
    num_ranks: int
    stages: int
    ahead: int
    experts: ExpertShape | None = None
    biased: bool = False
    rows: int = BATCH
    row_attention: RowAttentionShapes = RowAttentionShapes()

    @property
    def partial_words(self) -> int:
        """float32 words of the partials of attention of an SM."""
        return most_partial_words(self.head_dim, self.row_attention)
