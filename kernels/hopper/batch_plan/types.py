"""What the kernel of several sequences is asked to do: its epilogues, the queue of every SM, what
lies where.

Made by queues.py, read by batch/runner.py, which is next on the walk.
"""

from dataclasses import dataclass

from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    BATCH_PAIRED,
    BATCH_PARTIAL_EXTRA,
    EVENT_WORDS,
    EVENTS_AT,
    LEAST_KEYS,
    PRODUCT_TILE,
    BatchInstruction,
    BatchLinear,
    BatchNorm,
    BatchPointwise,
    BatchProduct,
    num_computed,
)
from distmega.kernels.hopper.plan.types import (
    MAX_QUERIES,
    AttentionShape,
    Buffer,
    ExpertShape,
    Kept,
    WeightMatrix,
)
from distmega.kernels.hopper.plan.words import NOTHING, SLICE_K, VECTOR_MULTIPLE
from distmega.kernels.tasks.fuse import FusedSample
from distmega.program.expr import Expr


@dataclass(frozen=True, slots=True)
class BatchEpilogue:
    """What follows the products of a linear: formula(products of the streams, what is carried).

    num_carried: operands that the formula takes besides products. biased: whether some linear has a
    bias. keeps: whether results are kept as float32; publishes: whether linears take them as x;
    scaled: then they are multiplied by the weight of a norm, and their squares are summed in slot
    number `slot`. summed: the product is summed over ranks first. ranked: an id is chosen from
    the results. weighted: rows are those of experts, and what one weighs is the formula's last
    argument.
    """

    num_streams: int
    formula: Expr
    num_carried: int
    biased: bool
    keeps: bool
    publishes: bool
    scaled: bool
    slot: int
    summed: bool
    ranked: bool
    weighted: bool = False


@dataclass(frozen=True, slots=True)
class BatchEpilogues:
    """Those of a segment's linears, by opcode, what becomes of the rows that come in, and of
    columns that ranks gather; as one constant of its kernel.
    """

    each: tuple[BatchEpilogue, ...]
    entry: BatchEpilogue
    gathers: tuple[BatchEpilogue, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchFormula:
    """Pointwise work on rows: formula(x after its norm, what is carried, a table's row).

    norm: "rms_norm", "layer_norm" or "softmax", "" where no x is taken. num_carried, publishes,
    scaled: as of a BatchEpilogue; has_table: whether the last argument is the row of a table.
    """

    norm: str
    formula: Expr
    num_carried: int
    has_table: bool
    publishes: bool
    scaled: bool


@dataclass(frozen=True, slots=True)
class BatchFormulas:
    """Those of a segment, as one constant of its kernel."""

    each: tuple[BatchFormula, ...]


def partial_words(head_dim: int) -> int:
    """float32 words of an SM's partials of heads of so many elements, two of 8 queries or one of
    16: outputs, maxima and sums.
    """
    return 2 * (MAX_QUERIES * SLICE_K * -(-head_dim // SLICE_K) + BATCH_PARTIAL_EXTRA)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAttentionShape:
    """Extents of attention of rows over rows of the same step, or over one cache. cached: whether
    keys and values lie in a cache, those of this step too; normed, rotated: whether queries and
    keys are first. masked: whether scores get a mask; softcap: as of AttentionShape. num_queries,
    num_keys: of each of several sequences that rows are of, which see nothing of each other, 0 of
    one; mask_step: from what scores of one sequence get to that of the next.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    softcap: float
    cached: bool
    normed: bool
    rotated: bool
    masked: bool
    num_queries: int = 0
    num_keys: int = 0
    mask_step: int = 0

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def turn_keys(self) -> int:
        """Keys that are looked at at a time."""
        return LEAST_KEYS if self.cached and self.head_dim <= SLICE_K else LEAST_KEYS // 2

    @property
    def least_turns(self) -> int:
        """Of a part of the keys."""
        return LEAST_KEYS // self.turn_keys

    @property
    def partial_words(self) -> int:
        """float32 words of a partial of 16 queries."""
        return partial_words(self.head_dim)

    def num_tasks(self, num_rows: int) -> int:
        """Of so many rows: 16 queries of a kv head each."""
        return self.num_kv_heads * -(-num_rows * self.group // BATCH)


@dataclass(frozen=True, slots=True)
class RowAttentionShapes:
    """Those of a segment, as one constant of its kernel."""

    each: tuple[RowAttentionShape, ...] = ()


def most_partial_words(head_dim: int, row_attention: RowAttentionShapes) -> int:
    """Of attention over caches of each row with heads of head_dim elements, and over rows."""
    dims = [head_dim, *(shape.head_dim for shape in row_attention.each)]
    return max(map(partial_words, dims))


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the runner writes as float32 numbers from `first` on before each launch: elements of a
    tensor from number `behind` on, those of `extents` that lie by `steps` from each other; of a
    bool 0 where it is true and -inf elsewhere. is_rows: whether they are rows as others' results.
    """

    tensor: str
    first: int
    extents: tuple[int, ...]
    steps: tuple[int, ...]
    behind: int = 0
    is_rows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchQueues:
    """Instructions of every SM, equally many, for `batch` rows on one of num_ranks ranks.

    formulas: of pointwise work on rows. wide_norms: whether weights of norms are f32. num_chunks:
    of the activations, 1024 columns each. num_numbers: float32 elements that are kept;
    num_slots: of sums of squares. outputs: what leaves, `num` elements a row. sampler: where ids
    are not the most likely. sm_logits: of an SM, at most. rank_logits: rows of this rank's part
    of what ids are chosen from, 0 where none is, of which logit_rows are no padding, from first_id
    on, of all num_logits.
    buffers: what ranks exchange, which lies behind the events. experts: extents of experts, if
    there are some; row_attention: of attention of rows over rows. given: numbers that the
    runner writes. embed: the table that `ids` look up or, without ids, the input. Names:
    tensors that the runner binds, "" where the segment has none.
    """

    num_ranks: int
    attention: AttentionShape | None
    epilogues: BatchEpilogues
    formulas: BatchFormulas
    wide_norms: bool
    eps: float
    matrices: tuple[WeightMatrix, ...]
    queues: tuple[tuple[BatchInstruction, ...], ...]
    batch: int
    entry_columns: int
    num_chunks: int
    num_numbers: int
    num_slots: int
    outputs: tuple[Kept, ...]
    sampler: FusedSample | None
    sm_logits: int
    rank_logits: int
    logit_rows: int
    first_id: int
    num_logits: int
    buffers: tuple[Buffer, ...]
    embed: str
    rope_table: str
    ids: str
    positions: str
    chosen: str
    logits: str
    experts: ExpertShape | None = None
    row_attention: RowAttentionShapes = RowAttentionShapes()
    given: tuple[Given, ...] = ()

    @property
    def num_events(self) -> int:
        """What instructions wait for: a counter each of an SM's."""
        return len(self.queues[0])

    @property
    def rows(self) -> int:
        """Rows that the kernel computes."""
        return num_computed(self.batch)

    @property
    def num_parts(self) -> int:
        """float32 elements of parts of products, those of an op at a time."""
        tiles = (
            -(-one.num_rows // PRODUCT_TILE) * one.most_parts
            for one in self.queues[0]
            if isinstance(one, BatchProduct)
        )
        return max(tiles, default=0) * PRODUCT_TILE * self.rows

    @property
    def max_hits(self) -> int:
        """Experts of this rank that rows of a step choose, at most; 0 without experts."""
        shape = self.experts
        return min(shape.num_own, self.batch * shape.num_chosen) if shape else 0

    @property
    def first_word(self) -> int:
        """The first flagged word behind the report and the events."""
        return first_word(len(self.queues[0]))

    @property
    def first_list(self) -> int:
        """The first 64-bit word behind all that, where the lists of samples within limits lie."""
        return self.first_word + sum(buffer.num_words for buffer in self.buffers)

    @property
    def is_limited(self) -> bool:
        """Whether ids are sampled within limits that are looked for."""
        return is_limited(self.sampler)

    @property
    def gathers(self) -> bool:
        """Whether each rank gets the logits of all, and chooses from them by itself."""
        return self.is_limited and self.num_ranks > 1

    @property
    def whole_slices(self) -> bool:
        """Whether rows of weights are whole slices, and biases of two streams lie without a gap."""
        return all(matrix.columns % SLICE_K == 0 for matrix in self.matrices) and not any(
            one.num_rows // 2 % VECTOR_MULTIPLE
            for one in self.queues[0]
            if isinstance(one, BatchLinear) and one.flags & BATCH_PAIRED and one.bias != NOTHING
        )

    @property
    def normalises(self) -> bool:
        """Whether some instruction takes rows in another form."""
        return any(isinstance(one, BatchNorm) for one in self.queues[0])

    @property
    def keeps_ids(self) -> bool:
        """Whether some instruction takes rows of tables of the step's ids."""
        return any(
            isinstance(one, BatchPointwise) and one.table != NOTHING and not one.by_position
            for one in self.queues[0]
        )


def first_word(num_events: int) -> int:
    """The first flagged word behind so many events."""
    return EVENTS_AT + num_events * EVENT_WORDS // 2


def is_limited(sampler: FusedSample | None) -> bool:
    """Whether it is a sample within limits that are looked for."""
    return sampler is not None and sampler.limits != "given"
