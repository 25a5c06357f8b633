"""What a kernel is asked to do: its extents, where its matrices lie, the queue of every SM.

Made by row_plan/queues.py, read by one_row/runner.py, which is next on the walk.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from distmega.errors import UnsupportedError, counted
from distmega.kernels.hopper.plan.words import (
    SLICE_K,
    SLICES,
    STAGE_CHUNKS,
    TILE_BYTES,
    TILE_K,
    UNIT_ROWS,
    Instruction,
    RowBarrier,
)
from distmega.kernels.tasks.fuse import FusedSample
from distmega.kernels.tasks.mode import Mode
from distmega.program.expr import Expr

HEAD_DIMS = range(8, 257, 8)
"""Elements of a head."""
ROW_MULTIPLE = 8
"""Of the elements of a row of weights: 16 bytes, as the copy engine steps."""
MAX_QUERIES = 8
"""Query heads of one attention task."""
MAX_MATRICES = 3
"""Lengths of rows of weights, where there are several rows of x."""
ROW_MATRICES = 6
"""Likewise of one row."""
ITEM_BYTES = 2
SHARED_BYTES = 227 * 1024
"""Of an SM."""


def padded_tiles_k(max_tiles_k: int) -> int:
    """Chunks of x that shared memory has room for: whole polls, and more than attention needs there
    (ptx/blocks.py).
    """
    return max(8, -(-max_tiles_k // STAGE_CHUNKS) * STAGE_CHUNKS)


def num_stages(max_tiles_k: int) -> int:
    """Ring slots that fit beside x, the reduction buffers and what the compiler needs."""
    return (SHARED_BYTES - ITEM_BYTES * TILE_K * max_tiles_k - 3072) // TILE_BYTES


Stamps = Sequence[Sequence[Sequence[Sequence[int]]]]
"""Of traced instructions: [steps][sms][instructions][stamps of each]; see timeline.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMatrix:
    """All weights of one row length: num_rows rows of `columns` elements from byte `offset` on.
    slices: of SLICE_K columns that one copy brings.
    """

    columns: int
    offset: int
    num_rows: int
    slices: int = SLICES


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Flagged words `first` to first + num_words of the symmetric buffer, in the order of
    dataflow.
    """

    name: str
    first: int
    num_words: int

    @property
    def words(self) -> range:
        return range(self.first, self.first + self.num_words)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGroups:
    """Query heads, and the kv heads that groups of them share."""

    num_heads: int
    num_kv_heads: int

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_parts(self) -> int:
        """Attention tasks that share a kv head's queries."""
        return -(-self.group // MAX_QUERIES)

    @property
    def num_queries(self) -> int:
        """Query heads of each; the last task begins early enough to have as many as the others."""
        return -(-self.group // self.num_parts)

    def first_query(self, head: int, part: int) -> int:
        """First query head of part number `part` of a kv head."""
        return head * self.group + min(part * self.num_queries, self.group - self.num_queries)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape(QueryGroups):
    """Extents that all attention ops of a segment share on one rank. rotated: whether queries and
    keys are; qk_norm: whether they are normalised before; apart: whether queries, keys and values
    lie in buffers of their own. softcap: what scores are kept below by a tanh, 0 where they
    are not. biased: whether a table of positions and heads is added to scores.
    """

    head_dim: int
    max_context: int
    qk_norm: bool
    rotated: bool
    scale: float
    apart: bool = False
    softcap: float = 0.0
    biased: bool = False

    @property
    def block_slots(self) -> int:
        """Ring slots of a block's keys and values, which are there together."""
        return 2 * -(-self.head_dim // SLICE_K)


NO_ATTENTION = AttentionShape(
    num_heads=1, num_kv_heads=1, head_dim=64, max_context=0, qk_norm=False, rotated=False, scale=1.0
)
"""What a kernel is compiled with where its segment attends to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Extents that all experts of a segment share on one rank. width: rows of an expert's first
    matrices, columns of its last one. weighing: see ops.top_k. num_own: experts that the rank has,
    all or, from its number in the team times as many on, a part.

    A slot is what one chosen expert makes: width results, in front of zeros up to a whole number of
    slices, so that a slice of the last product's x is of one expert.
    """

    num_experts: int
    num_own: int
    num_chosen: int
    width: int
    weighing: str

    @property
    def has_all(self) -> bool:
        """Whether the rank has all experts."""
        return self.num_own == self.num_experts

    @property
    def slot_slices(self) -> int:
        """Slices of a slot."""
        return -(-self.width // SLICE_K)

    @property
    def slot_units(self) -> int:
        """Units of rows of a slot."""
        return self.slot_slices * SLICE_K // UNIT_ROWS

    @property
    def columns(self) -> int:
        """Results of all slots, zeros included."""
        return self.num_chosen * self.slot_slices * SLICE_K

    @property
    def copied_slices(self) -> int:
        """What one copy brings of an expert's last matrix: parts of a tile, each of one expert."""
        return math.gcd(SLICES, self.slot_slices)


Publishes = Literal["nothing", "numbers", "pairs"]


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What follows the products of a linear: formula(products of the streams, what is carried).

    publishes: "numbers", f32, a flagged word each; "pairs" of bf16, or nothing. num_carried:
    vectors that stay with this SM and that the formula takes. summed: the product is summed over
    ranks first. ranked: an id is chosen from the results. weighted: rows are those of chosen
    experts, and what an expert weighs is the formula's last argument. gathered: every rank gets
    what is published, each rank's part behind that of the rank before. deferred: these are parts
    of a sum, which readers add up. first_carries: the first rank applies the formula to its part,
    others to theirs and zeros, so that nothing is carried where parts are added up.
    """

    num_streams: int
    formula: Expr
    publishes: Publishes
    num_carried: int
    summed: bool
    ranked: bool
    weighted: bool = False
    gathered: bool = False
    deferred: bool = False
    first_carries: bool = False


@dataclass(frozen=True, slots=True)
class Epilogues:
    """Those of a segment, as one constant of its kernel."""

    each: tuple[Epilogue, ...]


@dataclass(frozen=True, slots=True)
class RowFormula:
    """Pointwise work on rows: formula(x after its norm, what is carried, a table's row).

    norm: "rms_norm", "layer_norm" or "softmax"; "copy" where x is taken as it is, "heard"
    where all of it is waited for then; "" where no x is.
    numbers: whether x is published as f32, else in pairs of bf16; parts: whether each rank has
    published a part of it, and these are to be added up. publishes, num_carried: as of an Epilogue;
    has_table: whether the last argument is the row of a table.
    """

    norm: str
    numbers: bool
    formula: Expr
    publishes: Publishes
    num_carried: int
    has_table: bool
    parts: bool = False


@dataclass(frozen=True, slots=True)
class RowFormulas:
    """Those of a segment, as one constant of its kernel."""

    each: tuple[RowFormula, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """num elements a row of f32 from `first` on of what SMs keep: a tensor of the segment. heads,
    steps: where it is no rows but heads of these, from one row and from one head to the next.
    """

    tensor: str
    first: int
    num: int
    rows: int = 1
    heads: int = 1
    steps: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowQueues:
    """Instructions of every SM for a segment of one row. mode: with barriers where "op".

    epilogues: of linears, by opcode; formulas: of pointwise work on rows. wide_norms: whether
    weights of norms are f32. num_generations: flags of a step, more than any buffer has
    generations. num_kept: f32 elements that SMs keep; outputs: those that leave; logits_at: first
    of those that an id is chosen from. sampler: where ids are not the most likely. sm_logits:
    what one SM chooses from, at most. best, sample, num_words: first flagged word of
    the logits' maxima and of what samples exchange, count of all words; buffers: all that lies
    there, in the order of dataflow. embed: the table that `ids` look up or, without ids, the
    input of one row. experts: where there are some; expert_matrix: all last matrices of theirs.
    Names: tensors that the runner binds, "" where the segment has none.
    """

    num_ranks: int
    mode: Mode
    attention: AttentionShape | None
    epilogues: tuple[Epilogue, ...]
    formulas: tuple[RowFormula, ...]
    wide_norms: bool
    num_generations: int
    max_tiles_k: int
    eps: float
    matrices: tuple[WeightMatrix, ...]
    queues: Sequence[tuple[Instruction, ...]]
    num_kept: int
    outputs: tuple[Kept, ...]
    sampler: FusedSample | None
    rank_logits: int
    sm_logits: int
    logits_at: int
    best: int
    sample: int
    num_words: int
    buffers: tuple[Buffer, ...]
    first_id: int
    embed: str
    entry_columns: int
    rope_table: str
    ids: str
    positions: str
    chosen: str
    logits: str
    experts: ExpertShape | None = None
    expert_matrix: WeightMatrix | None = None

    @property
    def stages(self) -> int:
        """Ring slots of an SM."""
        return num_stages(padded_tiles_k(self.max_tiles_k))

    @property
    def has_barriers(self) -> bool:
        """Whether some instruction is a barrier."""
        return any(isinstance(one, RowBarrier) for queue in self.queues for one in queue)

    @property
    def num_events(self) -> int:
        """What instructions wait for: buffers whose flagged words are polled."""
        return len(self.buffers)


def unfit(found: str, *, most_rows: int = 0) -> UnsupportedError:
    """The error for a segment that the kernel can't do; most_rows: where it has more."""
    rows = f"at most {counted(most_rows, 'row')}" if most_rows else "rows"
    return UnsupportedError(
        f"the persistent kernel can't do {found}",
        expected=f"{rows} of a multiple of {ROW_MULTIPLE} elements that an SM's memory holds,"
        f" heads of a multiple of {HEAD_DIMS.step} up to {HEAD_DIMS[-1]}",
        remedy="run the segment by library ops",
    )
