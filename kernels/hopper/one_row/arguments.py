"""What the kernel of one row is given at a launch: memory, and what it is compiled for.

In: nothing. Out: QueueMemory and RowMemory, arguments of the kernel that hold its pointers, and
RowSpec, its one constant. Why numbers and descriptors stay arguments of their own is said in
batch/arguments.py. Next on the walk: kernel.py.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from distmega.kernels.hopper.plan.types import Epilogues, ExpertShape, RowFormulas


class QueueMemory(NamedTuple):
    """Instructions of all SMs, in memory of this GPU, which the runner writes once.

    words: int32 [num_sms, max_instructions, 16], as plan/words.py lays them out. counts: int32
    [num_sms], instructions of each.
    """

    words: Tensor
    counts: Tensor


class RowMemory(NamedTuple):
    """Memory of one GPU. Unless it says otherwise the kernel alone writes it after the runner has
    allocated it, all zeros.

    state: int32, id, position, count of steps, settings and seed of a sample, as plan/words.py
    lays them out. The runner writes it between launches, the kernel at its end.
    ids: int32 [steps], that each step chose.
    symmetric: int64, what peers write too: a report (ptx/spins.py), then flagged words, zeroed once
    when allocated. The report is the host's, see alarm.py.
    vectors: bf16, the weight arena, of which norm weights and biases are read; written by nobody.
    embed: bf16, this rank's part of the table [rows, columns], written by nobody; or the row that
    comes in, which the runner gives.
    cache: bf16, the arena of states: keys and values [rows, head_dim].
    rope: f32 [positions, head_dim], cosines, then sines; written by nobody.
    kept: f32, tensors that SMs keep, each element used by one SM; logits are among them.
    """

    state: Tensor
    ids: Tensor
    symmetric: Tensor
    vectors: Tensor
    embed: Tensor
    cache: Tensor
    rope: Tensor
    kept: Tensor


class RingAddresses(NamedTuple):
    """Addresses in shared memory, for PTX: of the ring's slots, bf16 [stages, 128, 64], which the
    loader fills by the copy engine; its mbarriers, one a slot, of bytes that came and of warps that
    have read them; x, bf16, staged by who multiplies it; sums of warps, f32 [8, 64], and of
    squares, f32 [8].
    """

    slots: object
    ready: object
    free: object
    x: object
    sums: object
    squares: object


class WarpSums(NamedTuple):
    """Shared memory that PTX writes at ring.sums and ring.squares, to be read: what each warp has
    added up of a group's rows, f32 [8, 64], and of squares of x, f32 [8].
    """

    rows: object
    squares: object


class RowTeam(NamedTuple):
    """Who else has a part in what SMs choose together, in arguments of run_row_steps: peers,
    team_rank, first_id, best_words, num_sms.
    """

    peers: object
    rank: object
    first_id: object
    best_words: object
    num_sms: object


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpec:
    """What one compiled kernel is for.

    head_dim, num_queries, num_heads, num_kv_heads: of attention: elements of a head, query heads of
    a task, query and kv heads of this rank. qk_norm: whether queries and keys are normalised;
    rotated: whether they are rotated; apart: whether they and values lie apart; softcap: what
    scores are kept below, or 0; biased: whether a table is added to them. attends: whether there is
    attention. experts: extents of experts, if there are some. layer_norms, keeps_normed: whether a
    linear does a layer norm, keeps a normalised row. wide_norms: whether weights of norms are f32.
    formulas, passes: see pointwise.py. max_tiles_k: chunks of x that shared memory has room for.
    num_matrices: descriptors in use. choice: how an id is chosen (plan/words.py). sm_logits:
    logits of an SM, at most, a power of two. given: whether ranks share a program whose row that
    comes in is an input. barriers: whether instructions wait for all SMs.
    stages: of the ring; ahead: loads under way at a time, at most. trace: whether stamps are taken.
    """

    head_dim: int
    num_queries: int
    num_heads: int
    num_kv_heads: int
    qk_norm: bool
    rotated: bool
    apart: bool
    softcap: float
    biased: bool
    attends: bool
    experts: ExpertShape | None
    epilogues: Epilogues
    layer_norms: bool
    keeps_normed: bool
    wide_norms: bool
    formulas: RowFormulas
    passes: int
    max_tiles_k: int
    num_matrices: int
    choice: int
    sm_logits: int
    num_ranks: int
    given: bool
    barriers: bool
    stages: int
    ahead: int
    trace: bool
