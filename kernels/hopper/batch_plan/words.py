"""Device words of the kernel of several rows: the only file that knows where a field of one of its
instructions lies.

An instruction is WORDS int32 words. Every SM has the same instructions in the same order, each
with its own part of the rows; instruction i waits until all SMs of the GPU have done instruction
i - 1 (over ranks, BatchSample until all of all ranks have) and then counts up event i. What is
taken exactly is float32 [16, rows], activations are bf16 in the order of BLOCK (batch/device.py).
Next on the walk: queues.py.
"""

from dataclasses import dataclass
from enum import IntEnum

from distmega.kernels.hopper.plan.types import ROW_MULTIPLE
from distmega.kernels.hopper.plan.words import (
    MAX_SMS,
    NOTHING,
    SLICE_K,
    bits_of,
    join_bits,
    pack_fields,
)
from distmega.kernels.runtime.report import REPORT_WORDS

BATCH = 16
"""Sequences that the kernel computes, whether all are in use or not: the rows of an m16n8k16. More
are two or four times as many (num_computed); what is said here of 16 rows is said of those, and
offsets are still those of 16 rows, which the kernel multiplies.
"""
MAX_ROWS = 64
"""Most sequences: the rows of a wgmma."""
PRODUCT_TILE = 128
"""Weight rows that a BatchProduct multiplies at a time."""
STEP_K = 128
"""Columns of a step of such a tile, two ring slots."""
WHOLE_SHARE = 0.9
"""SMs have whole tiles of a product where they then have at least this part of its steps to do at
a time: nobody waits for parts of others.
"""
BLOCK = 16 * BATCH
"""Elements of 16 columns of x, which lie together."""
EVENT_WORDS = 32
"""int32 words from one event to the next: 128 bytes."""
STAGES = 12
"""Slots of a ring: what fits beside the sums of four units."""
BATCH_LOADS_AHEAD = 4
"""Loads under way at a time, at most."""
BEST_WORDS = 2 * BATCH
"""Flagged words of a rank's most likely ids: of each sequence, its logit and the id."""
READY_WORDS = 2 * MAX_SMS
"""Flagged words by which a rank's SMs tell that their logits are written, two an SM."""
BATCH_PARTIAL_EXTRA = 16
"""float32 words after the 8 rows of outputs of a partial: 8 maxima, 8 sums."""
LEAST_KEYS = 128
"""Of a part of the keys, where several SMs share those of a head."""

SETTINGS = 3
"""Numbers that say how the ids of a sequence are sampled: see one_row/bodies/sample.py."""
SEEDS_AT, SETTINGS_AT, EVENTS_AT = REPORT_WORDS, REPORT_WORDS + BATCH, 64
"""64-bit words behind the report: a seed a sequence; its settings, as float32; the events. Behind
these lie the lists of logits that may be sampled (batch/bodies/limits.py), or the flagged words
that ranks exchange.
"""

BATCH_STATE_EPOCH = 0
"""Word of the device state: steps run so far."""
BATCH_STATE_HITS = 16
"""Word that SM 0 adds the number of experts to that rows choose, in each choice."""
BATCH_STAMPS = 5
STAMP_BEGIN, STAMP_READY, STAMP_CHOSEN, STAMP_END, STAMP_LOADED = range(BATCH_STAMPS)
"""Stamps of a traced instruction: start, all SMs done with the one before, experts chosen where it
chooses some, end; and when the loader has asked for its last tile.
"""
BATCH_STATE_POSITIONS = 32
"""Words from here on: position of each sequence's next id; behind those of 16 sequences, or of as
many as there are if more, the id of each whose rows of tables are taken in this step.
"""
BATCH_STATE_WORDS = BATCH_STATE_POSITIONS + 2 * MAX_ROWS


NORMED, BATCH_PAIRED, BATCH_EXPERT_ROWS, BATCH_EXPERT_COLUMNS = 1, 2, 4, 8
"""Flags of a linear: the factor of x's norm is multiplied into the result; units of two streams
take turns; rows, or columns, are those of the experts that rows of x choose.
"""
IN_SHIFT, REST_SHIFT, LENGTH_SHIFT, BATCH_MATRIX_SHIFT = 4, 8, 12, 26
SLOT_MASK, REST_MASK, LENGTH_MASK = 0xF, 0xF, 0x3FFF
"""Of what shares a word with the flags: where the squares of x lie; the elements of x in whole
slices of 64, and the rest in eighths of a slice; the matrix or, of an embedding, the rank's place.
"""
CARRY_SHIFT, BLOCK_MASK = 15, 0x7FFF
"""Of what shares a word with `keep`, both in blocks, counted from 1 on, 0 for nothing: `carry`."""
NUMBERS = 64
"""Rows of float32 numbers [16, rows] that lie and are looked at together."""
MAX_SLOTS = SLOT_MASK + 1
MAX_LENGTH = SLICE_K * (LENGTH_MASK + 1) - 1
"""Elements of a row."""
NORM_KINDS = ("none", "rms_norm", "layer_norm")
MAX_SHAPES = 16
"""Of attention of rows over rows in one kernel."""


def num_computed(rows: int) -> int:
    """Rows that the kernel computes where so many are in use."""
    return next(num for num in (BATCH, 2 * BATCH, MAX_ROWS) if rows <= num)


def sm_of_step(step: int, total: int, num_sms: int) -> int:
    """The SM that takes a step of a BatchProduct, of the line of `total`: equally many each."""
    return ((step + 1) * min(num_sms, total) - 1) // total


def has_whole_tiles(num_rows: int, steps: int, num_sms: int) -> bool:
    """Whether SMs have whole tiles of a product of num_rows rows, each of `steps` steps."""
    tiles = -(-num_rows // PRODUCT_TILE)
    return steps == 1 or tiles >= WHOLE_SHARE * (-(-tiles // num_sms) * num_sms)


def steps_of_sm(num_rows: int, steps: int, sm: int, num_sms: int) -> range:
    """What an SM takes of the line of all steps of a product."""
    tiles = -(-num_rows // PRODUCT_TILE)
    apiece = steps if has_whole_tiles(num_rows, steps, num_sms) else 1
    total = tiles * steps // apiece
    sharing = min(num_sms, total)
    first, last = (min(n, sharing) * total // sharing * apiece for n in (sm, sm + 1))
    return range(first, last)


class BatchOpcode(IntEnum):
    """What an instruction does that is no linear, whose opcodes are numbers of epilogues. ROWS and
    HEADS stand before those of further shapes.
    """

    ATTENTION = 16
    EMBED = 17
    SAMPLE = 18
    NORM = 19
    GATHER = 20
    POINTWISE = 22
    PRODUCT = 23
    ROWS = 32
    HEADS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLinear:
    """8 * num_units rows of a matrix times x of all sequences, then epilogue number `opcode`.

    name: of the op, for reports. matrix: which of the weight descriptors; weight_row: row there of
    the first unit. BATCH_PAIRED takes units in turn from there and from pair_row on, 8 rows of
    either stream, and counts rows of both. length: elements of x, in num_tiles_k tiles of 1024
    columns. src: first chunk of x in the activations, a chunk being 1024 columns. squares: where
    those of x lie if x carries its norm's weight already and only the factor is missing. bias:
    offset in the vectors, of two streams the second one's behind the first one's, at the next
    multiple of VECTOR_MULTIPLE. dst: first element of the output in the activations. next_norm:
    offset of the weights that the output is multiplied by there, for the norm after it. keep: first
    of the float32 numbers [16, rows] that stay of the output, for those who take it exactly; carry,
    carry2: of what the epilogue takes. row0: first row of the output; num_rows: of the whole
    output. parts: first flagged word of all ranks' parts of a product that is summed over ranks;
    own_part: that of this rank's.

    Of more than 16 rows it multiplies nothing, but adds up what the BatchProduct before it has
    left: num_tiles_k are then steps of a tile, and src parts of a tile, at most.
    """

    opcode: int
    name: str
    row0: int
    num_units: int
    num_rows: int
    matrix: int
    weight_row: int
    num_tiles_k: int
    length: int
    src: int
    pair_row: int = 0
    flags: int = 0
    squares: int = 0
    bias: int = NOTHING
    dst: int = 0
    next_norm: int = NOTHING
    keep: int = NOTHING
    carry: int = NOTHING
    carry2: int = NOTHING
    parts: int = 0
    own_part: int = 0

    @property
    def packed(self) -> int:
        """What shares a word with the flags."""
        return pack_x(self)

    @property
    def numbers(self) -> int:
        """keep and carry in one word."""
        return pack_numbers(self.keep, self.carry)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProduct:
    """Of more than 16 rows: num_units steps from first_step on of the line of all tiles of a
    matrix, PRODUCT_TILE rows each, each num_tiles_k steps of STEP_K columns. What is found of a
    tile is one of at most most_parts parts. Where that is one, an SM adds up what it has found
    itself, and waits for no other in between. weight_row, pair_row: of the first tile, half of
    which BATCH_PAIRED takes from either; src: see BatchLinear, which follows it; num_rows: of the
    whole matrix.
    """

    name: str
    num_rows: int
    num_units: int
    first_step: int
    matrix: int
    weight_row: int
    num_tiles_k: int
    length: int
    src: int
    most_parts: int
    pair_row: int = 0
    flags: int = 0
    squares: int = 0
    opcode: int = BatchOpcode.PRODUCT

    @property
    def packed(self) -> int:
        """See BatchLinear."""
        return pack_x(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEmbed:
    """8 * num_units columns, from row0 on, of the row that comes in for each sequence: of the
    table's row of its id or, where the segment has none, of the input. Written as a linear's
    num_rows rows of output.

    Where ranks share the table, this one has num_columns columns of num_table_rows rows, from
    first_column and first_table_row on, and the rest adds zeros to a sum over ranks (parts,
    own_part). The id itself is the most likely of all ranks: best is the first flagged word of
    theirs, of which those of rank number `team_rank` are this rank's; first_id: the id of its first
    logit.
    """

    name: str
    row0: int
    num_units: int
    num_rows: int
    dst: int = 0
    next_norm: int = NOTHING
    keep: int = NOTHING
    parts: int = 0
    own_part: int = 0
    first_table_row: int = 0
    num_table_rows: int = 0
    first_column: int = 0
    num_columns: int = 0
    first_id: int = 0
    best: int = 0
    team_rank: int = 0
    opcode: int = BatchOpcode.EMBED

    @property
    def packed(self) -> int:
        """The places of a linear's."""
        return join_bits((self.team_rank, BATCH_MATRIX_SHIFT))

    @property
    def numbers(self) -> int:
        """See BatchLinear."""
        return pack_numbers(self.keep, NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGather:
    """8 * num_units, from row0 on, of the num_rows columns that ranks have of each row, side by
    side. This one has num_columns of them, from first_column on, as float32 numbers [16,
    num_columns] from `src` on, and the rest adds zeros to a sum over ranks (parts, own_part). Goes
    where number `number` of BatchEpilogues.gathers says; for the rest see BatchLinear.
    """

    name: str
    number: int
    row0: int
    num_units: int
    num_rows: int
    src: int
    first_column: int
    num_columns: int
    parts: int
    own_part: int
    dst: int = 0
    next_norm: int = NOTHING
    keep: int = NOTHING
    opcode: int = BatchOpcode.GATHER

    @property
    def numbers(self) -> int:
        """See BatchLinear."""
        return pack_numbers(self.keep, NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLogits:
    """As a linear whose rows are logits, of num_rows ids from first_id on.

    Where ranks sample within limits, what all of them need to do so lies in every rank's symmetric
    buffer: from 64-bit word `logits` on, float32, all num_logits of them, a row a sequence;
    from `row_maxima` on, float32 [16, ranks, MAX_SMS], the highest of each SM; from `ready_flags`
    on, two flagged words an SM, MAX_SMS a rank, by which it says that its numbers are there.
    team_rank: of this rank. bias: offset of this rank's biases in the vectors, or NOTHING.
    """

    opcode: int
    name: str
    row0: int
    num_units: int
    num_rows: int
    matrix: int
    weight_row: int
    num_tiles_k: int
    length: int
    src: int
    flags: int
    squares: int
    first_id: int
    bias: int = NOTHING
    team_rank: int = 0
    num_logits: int = 0
    logits: int = 0
    row_maxima: int = 0
    ready_flags: int = 0

    @property
    def packed(self) -> int:
        """See BatchLinear."""
        return pack_x(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchExperts:
    """Chooses experts for each row from float32 numbers [16, num_experts] from `scores` on, and
    multiplies x by the first matrices of all that some row has chosen; SMs share the units of
    these, see plan/experts.py. Experts that are hit come in the order of their numbers; number j
    has its results from chunk j * (chunks of a row of results) behind `dst` on, zeros where a row
    did not choose it.

    num_rows: of one expert, of all streams. weight_row, pair_row: of expert 0, or where it would
    lie before those that the rank has, from number first_own on; num_rows (of a stream) lie between
    one and the next. choice: number of this choice of num_choices in a step. For the rest see
    BatchLinear.
    """

    opcode: int
    name: str
    num_rows: int
    matrix: int
    weight_row: int
    num_tiles_k: int
    length: int
    src: int
    scores: int
    dst: int
    choice: int
    num_choices: int
    first_own: int = 0
    pair_row: int = 0
    flags: int = BATCH_EXPERT_ROWS
    squares: int = 0

    @property
    def packed(self) -> int:
        """See BatchLinear."""
        return pack_x(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSample:
    """Samples ids within limits from num_rows logits a sequence; for the rest see BatchLogits,
    which it follows. The loader takes it for a linear of no units.
    """

    name: str
    num_rows: int
    logits: int = 0
    row_maxima: int = 0
    ready_flags: int = 0
    opcode: int = BatchOpcode.SAMPLE


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAttention:
    """This SM's share of the cached positions of all sequences and kv heads, found at run time.

    k_row, v_row: first row of this op in the cache matrix [rows, d]. window: positions that a query
    sees, itself included. src: first of the float32 numbers [16, num_rows] of queries, keys and
    values or, where these lie apart, of queries; k_src, v_src: then of keys and values, their heads
    alone a row. dst: first element of the output in the activations. q_norm, k_norm: offsets in the
    vectors. table: as of RowAttention.
    """

    name: str
    k_row: int
    v_row: int
    window: int
    src: int
    num_rows: int
    dst: int
    q_norm: int
    k_norm: int
    k_src: int = 0
    v_src: int = 0
    table: int = 0
    opcode: BatchOpcode = BatchOpcode.ATTENTION


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchHeads:
    """Heads of rows as a BatchRows takes them, after norms and rotation, a row and head an SM at a
    time: those of queries, then of keys and values.

    src, k_src, v_src, num_rows, k_rows, v_rows: as of BatchRows without a cache. dst, k_dst: first
    of the numbers that queries, and keys, become, rows of whole heads; of a cache its row for
    position 0 of the first key head, and v_dst likewise, num_keys rows from a head to the next.
    NOTHING where they stay what and where they are. q_norm, k_norm: weights, or NOTHING. shape: as
    of BatchRows.
    """

    name: str
    num_rows: int
    src: int
    k_src: int
    k_rows: int
    v_src: int
    v_rows: int
    num_keys: int
    dst: int = NOTHING
    k_dst: int = NOTHING
    v_dst: int = NOTHING
    q_norm: int = NOTHING
    k_norm: int = NOTHING
    shape: int = 0

    @property
    def opcode(self) -> int:
        """By the number of the shape."""
        return BatchOpcode.HEADS + self.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRows:
    """Attention of rows over num_keys keys: SM i takes every num_sms-th task of 16 queries of a kv
    head from number i on or, where there are at least twice as many SMs as tasks, part i // tasks
    of the keys of number i % tasks. Queries are rows and the query heads of a row.

    src, k_src, v_src: the float32 number that the first row's query, key and value heads begin
    with, as the kernel computes rows; num_rows, k_rows, v_rows: from one row to the next. Of a
    cache k_src and v_src are its row for position 0 of the first head. dst: first element of the
    output in the activations, NOTHING where no linear takes it; keep: the number that it begins
    with where others take it, or NOTHING. sees: 0 where each row sees all keys, else how many
    positions it sees, up to its own. mask: what scores get begins with this number, or NOTHING;
    steps between those of heads, rows and keys. shape: number of its extents.
    """

    name: str
    num_rows: int
    src: int
    k_src: int
    k_rows: int
    v_src: int
    v_rows: int
    num_keys: int
    scale: float
    dst: int = NOTHING
    keep: int = NOTHING
    sees: int = 0
    mask: int = NOTHING
    head_step: int = 0
    row_step: int = 0
    key_step: int = 0
    shape: int = 0

    @property
    def opcode(self) -> int:
        """By the number of the shape."""
        return BatchOpcode.ROWS + self.shape

    @property
    def scale_bits(self) -> int:
        """scale as float32."""
        return bits_of(self.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNorm:
    """Rows that linears take in another form than their writer gives them: SM b makes that of
    sequence b, from the num_rows numbers of each from src on, into the activations from element dst
    on; keep: where it also goes as numbers, or NOTHING. kind: of NORM_KINDS. weight, bias: offsets
    in the vectors; the bias NOTHING without one.
    """

    name: str
    num_rows: int
    src: int
    dst: int
    weight: int
    bias: int
    kind: int
    keep: int = NOTHING
    opcode: BatchOpcode = BatchOpcode.NORM


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPointwise:
    """Formula number `number` of whole rows: SM b makes that of sequence b, from the num_rows
    numbers from src on, `length` of which are normalised together, or from none where the formula
    takes no x, and from what it takes besides, from carry and carry2 on.

    weight, bias: of the norm, offsets in the vectors, or NOTHING. table: of a table of rows as long
    in the weights' arena, VECTOR_MULTIPLE elements before it, or NOTHING; by_position: whether its
    row is that of the position, else of the id. dst, next_norm, keep: as of BatchLinear; squares
    of the results are summed in slot number `slot`.
    """

    name: str
    number: int
    num_rows: int
    length: int
    src: int
    weight: int
    bias: int
    eps: float
    carry: int = NOTHING
    carry2: int = NOTHING
    table: int = NOTHING
    by_position: bool = False
    dst: int = 0
    next_norm: int = NOTHING
    slot: int = 0
    keep: int = NOTHING
    opcode: int = BatchOpcode.POINTWISE

    @property
    def eps_bits(self) -> int:
        """eps as float32."""
        return bits_of(self.eps)


BatchInstruction = (
    BatchLinear
    | BatchProduct
    | BatchExperts
    | BatchEmbed
    | BatchGather
    | BatchLogits
    | BatchSample
    | BatchAttention
    | BatchHeads
    | BatchRows
    | BatchNorm
    | BatchPointwise
)

FIELD_WORDS: dict[type[BatchInstruction], dict[str, int]] = {
    BatchLinear: {
        "opcode": 0, "carry2": 1, "weight_row": 2, "num_units": 3, "num_tiles_k": 4, "src": 5,
        "packed": 6, "next_norm": 7, "parts": 8, "bias": 9, "dst": 10, "row0": 11, "own_part": 12,
        "num_rows": 13, "numbers": 14, "pair_row": 15,
    },
    BatchProduct: {
        "opcode": 0, "first_step": 1, "weight_row": 2, "num_units": 3, "num_tiles_k": 4, "src": 5,
        "packed": 6, "most_parts": 9, "num_rows": 13, "pair_row": 15,
    },
    BatchEmbed: {
        "opcode": 0, "best": 1, "first_table_row": 2, "num_units": 3, "num_table_rows": 4,
        "first_column": 5, "packed": 6, "next_norm": 7, "parts": 8, "first_id": 9, "dst": 10,
        "row0": 11, "own_part": 12, "num_rows": 13, "numbers": 14, "num_columns": 15,
    },
    BatchGather: {
        "opcode": 0, "number": 1, "num_units": 3, "src": 4, "first_column": 5, "next_norm": 7,
        "parts": 8, "dst": 10, "row0": 11, "own_part": 12, "num_rows": 13, "numbers": 14,
        "num_columns": 15,
    },
    BatchLogits: {
        "opcode": 0, "num_logits": 1, "weight_row": 2, "num_units": 3, "num_tiles_k": 4, "src": 5,
        "packed": 6, "logits": 7, "ready_flags": 8, "row_maxima": 9, "first_id": 10, "row0": 11,
        "team_rank": 12, "num_rows": 13, "bias": 14,
    },
    BatchExperts: {
        "opcode": 0, "scores": 1, "weight_row": 2, "num_tiles_k": 4, "src": 5, "packed": 6,
        "first_own": 7, "choice": 8, "dst": 10, "num_choices": 12, "num_rows": 13, "pair_row": 15,
    },
    BatchSample: {
        "opcode": 0, "logits": 7, "ready_flags": 8, "row_maxima": 9, "num_rows": 13,
    },
    BatchAttention: {
        "opcode": 0, "k_row": 2, "v_row": 4, "src": 5, "window": 6, "q_norm": 8, "k_norm": 9,
        "dst": 10, "k_src": 11, "v_src": 12, "num_rows": 13, "table": 14,
    },
    BatchHeads: {
        "opcode": 0, "q_norm": 1, "k_norm": 2, "num_keys": 3, "src": 5, "k_src": 6, "v_src": 7,
        "k_rows": 8, "v_rows": 9, "dst": 10, "k_dst": 11, "v_dst": 12, "num_rows": 13,
    },
    BatchRows: {
        "opcode": 0, "scale_bits": 1, "sees": 2, "num_keys": 3, "keep": 4, "src": 5, "k_src": 6,
        "v_src": 7, "k_rows": 8, "v_rows": 9, "dst": 10, "mask": 11, "head_step": 12,
        "num_rows": 13, "row_step": 14, "key_step": 15,
    },
    BatchNorm: {
        "opcode": 0, "src": 5, "kind": 6, "weight": 7, "bias": 9, "dst": 10, "num_rows": 13,
        "keep": 14,
    },
    BatchPointwise: {
        "opcode": 0, "number": 1, "length": 2, "table": 3, "carry": 4, "src": 5, "carry2": 6,
        "next_norm": 7, "weight": 8, "bias": 9, "dst": 10, "eps_bits": 11, "slot": 12,
        "num_rows": 13, "keep": 14, "by_position": 15,
    },
}  # fmt: skip
"""Word of each field. Fields that kernels read before they look at the opcode share a place."""


def pack(instruction: BatchInstruction) -> list[int]:
    """The WORDS words of an instruction."""
    return pack_fields(instruction, FIELD_WORDS[type(instruction)])


def pack_x(one: BatchLinear | BatchProduct | BatchExperts | BatchLogits) -> int:
    """The word that says what x of a linear is."""
    slices, rest = divmod(one.length, SLICE_K)
    return join_bits(
        (one.flags, 0),
        (one.squares, IN_SHIFT),
        (rest // ROW_MULTIPLE, REST_SHIFT),
        (slices, LENGTH_SHIFT),
        (one.matrix, BATCH_MATRIX_SHIFT),
    )


def pack_numbers(keep: int, carry: int) -> int:
    """The word that says where numbers are kept, and where carried ones lie."""
    size = BATCH * NUMBERS
    return join_bits((keep // size + 1, 0), (carry // size + 1, CARRY_SHIFT))
