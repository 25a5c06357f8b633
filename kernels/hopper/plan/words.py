"""Device words of the kernel of one row: the only file that knows where a field lies.

An instruction is WORDS int32 words. One dataclass an opcode names its fields, and FIELD_WORDS says
where each lies; fields.py gives kernels the same places. Buffers that tasks exchange hold 64-bit
*flagged words*: payload in the low half, the flag of its (step, generation) in the high half, so
that a reader polls the datum itself and needs no event. A generation counts how often a buffer was
written in this step before. Next on the walk: row_plan/queues.py.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from distmega.kernels.runtime.report import REPORT_WORDS

WORDS = 16

UNIT_ROWS = 8
"""Weight rows of a tile; work is shared out in units of so many rows."""
TILE_K = 1024
"""Columns of a tile."""
SLICE_K = 64
"""Columns of a slice of a tile: 128 bytes, one row as the copy engine exchanges its parts."""
SLICES = TILE_K // SLICE_K
"""Of a tile."""
TILE_BYTES = 2 * UNIT_ROWS * TILE_K
VECTOR_MULTIPLE = 64
"""Vectors begin at multiples of so many elements of 2 bytes: those of arena.ALIGNMENT_BYTES."""
STAGE_CHUNKS = 4
"""Chunks of TILE_K columns of x that are polled and staged together."""
GROUP_UNITS = 8
"""Units of weight rows whose results are summed and written together; of several rows of x, those
that a task multiplies by one read of it.
"""
ROW_LOADS_AHEAD = 3
"""Tiles of 16 KB that an SM asks memory for at a time: more do not come sooner."""
LEAST_STAGES = ROW_LOADS_AHEAD
"""Slots of a ring, at least."""
MIN_BLOCKS = 1
"""Blocks of 128 cached positions that a split has at least, where a context is split."""
CONTINUED = -1, -1
"""Id and position of a launch that goes on from what the state says."""
MAX_SPLITS = 16
"""Splits of the context of one kv head, at most: what one combine task holds."""
ROW_PARTIAL_EXTRA = 4
"""Flagged words after the outputs of a partial: maximum, sum, two unused."""

NO_WINDOW = 2**30
"""The window of an attention whose queries see all positions."""

ROW_STATE_POSITION, ROW_STATE_EPOCH, ROW_STATE_ID = 0, 1, 2
ROW_STATE_SAMPLING, ROW_STATE_SEED = 4, 8
"""Words of the device state: position of the next step, steps run so far, the id of the next; how
ids are sampled (one_row/bodies/sample.py), f32, and the seed, int64.
"""
ROW_STATE_WORDS = 10

STAMPS = 4
"""Stamps of a traced instruction: start, inputs there, first group or blocks done, end."""

FROM_EMBEDDING, CARRY_EMBEDDED, ROW_PAIRED, LAYER_NORM, KEEP_NORMED, CARRY_TWO = 1, 2, 4, 8, 16, 32
ROW_EXPERT_ROWS, ROW_EXPERT_COLUMNS, X_PARTS, KEEP_X = 64, 128, 256, 512
"""Linear.flags: x is the table's row of the current id; what is carried is; units of two
streams take turns; the norm of x is a layer norm, else an rms norm; the SM normalises its rows of x
too, where it keeps them; the epilogue takes a second vector that the SM keeps. x is the sum of as
many parts as there are ranks; the SM adds the other ranks' to its rows of x, where it keeps them.
"""
AT_POSITION, BIASED = 4, 8
"""Pointwise.flags, besides FROM_EMBEDDING and CARRY_EMBEDDED: the table's row is that of the
position, else of the id; a bias lies behind the norm's weight.
"""
DELTA_SHIFT, ROW_MATRIX_SHIFT = 10, 24
"""Of Linear.flag_delta, 14 bits with a sign, and Linear.matrix in the word that they share with the
flags.
"""
NOTHING = -1
"""In place of an offset, where there is nothing."""
EMBEDDED = REPORT_WORDS
"""First flagged word of that row where ranks share the embedding matrix."""

GREEDY, SAMPLED, LIMITED, SEARCHED, NO_CHOICE = range(5)
"""How the kernel chooses ids, see one_row/bodies/sample.py, or that it chooses none."""
SAMPLE_CHUNK = 8
"""Numbers of an SM that are exchanged at a time to find the limits of a sample."""
SEARCH_CHUNKS = 64
"""Of them, for limits among any number of ids: two searches of up to 30 rounds, each of which
leaves a quarter of a range of float32.
"""
MAX_SMS = 256
"""SMs that exchange them or have a place in a buffer of all, at most: one a thread."""


MAX_EPILOGUES = 16
"""Opcodes below this are linears with the epilogue of that number."""


class RowOpcode(IntEnum):
    """What an instruction does that is no linear."""

    ATTENTION = 16
    COMBINE = 17
    EMBED = 18
    BARRIER = 19
    SAMPLE = 20
    ROUTE = 21
    POINTWISE = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLinear:
    """8 * num_units rows of a matrix times x, then epilogue number `opcode` of the plan.

    name: of the op, for reports. matrix: which of the weight descriptors; weight_row: row there of
    the first unit. ROW_PAIRED takes units in turn from there and from pair_row on, 8 rows of either
    stream, and counts rows of both. num_tiles_k: tiles of 1024 columns. src: first flagged word of
    x (bf16 pairs), num_src_words of them, flagged `flag_delta` generations ago. norm, bias: offsets
    in the vectors, or NOTHING; of a layer norm the bias lies behind the weight, of two streams the
    second one's bias behind the first one's, at the next multiple of VECTOR_MULTIPLE. dst: first
    flagged word of the whole output, where the epilogue publishes one; in front of it, where the
    product is summed over ranks, lie num_rows words of each rank's part; where readers add up,
    dst is of this rank's part. With X_PARTS x is such a sum: src is the first rank's part, and
    num_src_words lie between one and the next. row0: first row there;
    num_rows: of the output. keep, carry: f32 elements of what stays with this SM, that the epilogue
    writes and takes, or NOTHING; with KEEP_NORMED or KEEP_X, carry is x, of which the SM has as
    many units as of any matrix of so many rows. With CARRY_TWO, pair_row is the second vector that
    the epilogue takes.

    With ROW_EXPERT_ROWS, weight_row and pair_row are the first rows of the first expert, and row0
    tells which slots the units are of (types.ExpertShape). With ROW_EXPERT_COLUMNS, each slice of
    columns is that of its slot's expert, the matrix is RowQueues.expert_matrix, weight_row is of
    the first expert, and num_rows rows lie between an expert and the next.
    """

    opcode: int
    name: str
    generation: int
    matrix: int
    weight_row: int
    pair_row: int
    num_units: int
    num_tiles_k: int
    src: int
    num_src_words: int
    flag_delta: int
    norm: int
    bias: int
    dst: int
    row0: int
    num_rows: int
    flags: int
    keep: int
    carry: int

    @property
    def packed(self) -> int:
        """flags, flag_delta and matrix in one word."""
        delta = signed_bits(self.flag_delta, ROW_MATRIX_SHIFT - DELTA_SHIFT)
        return join_bits((self.flags, 0), (delta, DELTA_SHIFT), (self.matrix, ROW_MATRIX_SHIFT))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAttention:
    """Some queries of a kv head over one split of the context; the split that has the last block of
    positions also has the new one, and appends it to the cache.

    k_row, v_row: first row of this head in the cache matrix [rows, d]. query0: first of
    AttentionShape.num_queries query heads. window: positions that a query sees, itself included.
    src, k_src, v_src: flagged words of all queries, keys and values; partial: those of all heads'
    and splits' partials. table: of what is added to scores, f32 [positions, query heads] in the
    weights' arena, VECTOR_MULTIPLE elements of 2 bytes before it.
    """

    name: str
    generation: int
    k_row: int
    v_row: int
    head: int
    query0: int
    window: int
    split: int
    max_splits: int
    src: int
    k_src: int
    v_src: int
    partial: int
    q_norm: int
    k_norm: int
    table: int = 0
    opcode: RowOpcode = RowOpcode.ATTENTION


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCombine:
    """Sum of the splits' partials of one query head."""

    name: str
    generation: int
    head: int
    window: int
    max_splits: int
    partial: int
    dst: int
    opcode: RowOpcode = RowOpcode.COMBINE


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEmbed:
    """Words (bf16 pairs) from `column` on of the id's row, to every rank, where this rank's part
    of the embedding matrix has it: id row0 is the first of num_rows, num_words words each. Of an
    input, as if that were a matrix of one row: this rank's part of it, from word `start` to
    num_words.
    """

    row0: int
    num_rows: int
    column: int
    num_words: int
    dst: int
    start: int = 0
    name: str = ""
    generation: int = 0
    opcode: RowOpcode = RowOpcode.EMBED


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBarrier:
    """Writes this SM's two of the words from dst on, then waits until the first num_words / 2 SMs
    of this rank have written theirs; for nobody if there are none. The loader passes it by.
    """

    name: str
    generation: int
    dst: int
    num_words: int
    opcode: RowOpcode = RowOpcode.BARRIER


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSample:
    """The best candidate of logits row0 to num_rows - 1, where ids are sampled: this rank's own,
    of which the SM keeps its rows from element `logits` on, or, if rank_logits > 0, those of all
    ranks, which lie in flagged words from src on: of each rank a whole number of units, the first
    `rank_logits` rows of which are no padding, so rows are slots there. dst: first flagged word of
    what SMs exchange to find limits. The loader takes it for a linear of no units.
    """

    name: str
    generation: int
    row0: int
    num_rows: int
    src: int = 0
    rank_logits: int = 0
    dst: int = 0
    logits: int = 0
    opcode: RowOpcode = RowOpcode.SAMPLE


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRoute:
    """The choice of experts from num_words scores, f32 in flagged words from src on, for the
    instructions with ROW_EXPERT_ROWS or ROW_EXPERT_COLUMNS of this SM that follow, of which there
    is one at least. The loader waits there until it is made.
    """

    name: str
    generation: int
    src: int
    num_words: int
    opcode: RowOpcode = RowOpcode.ROUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPointwise:
    """8 * num_units rows from row0 on of formula number `number` of the plan: of x after its norm
    and of what it takes besides.

    x is a whole row: num_src_words flagged words from src on, bf16 pairs or f32 as the formula's
    spec says, flagged `flag_delta` generations ago; or the id's row, with FROM_EMBEDDING; none
    where the formula takes no x. norm: offset in the vectors of the norm's weight, or NOTHING; with
    BIASED its bias lies behind, at the next multiple of VECTOR_MULTIPLE. table: of a table in the
    weights' arena, VECTOR_MULTIPLE elements before it. dst, row0, num_rows, keep, carry, second: as
    of RowLinear. The loader passes it over.
    """

    name: str
    generation: int
    number: int
    num_units: int
    src: int
    num_src_words: int
    flag_delta: int
    flags: int
    norm: int
    eps: float
    dst: int
    row0: int
    num_rows: int
    keep: int
    carry: int
    second: int
    table: int
    opcode: RowOpcode = RowOpcode.POINTWISE

    @property
    def packed(self) -> int:
        """flags and flag_delta in one word."""
        delta = signed_bits(self.flag_delta, ROW_MATRIX_SHIFT - DELTA_SHIFT)
        return join_bits((self.flags, 0), (delta, DELTA_SHIFT), (0, ROW_MATRIX_SHIFT))

    @property
    def eps_bits(self) -> int:
        """eps as float32."""
        return bits_of(self.eps)


Instruction = (
    RowLinear
    | RowAttention
    | RowCombine
    | RowEmbed
    | RowBarrier
    | RowSample
    | RowRoute
    | RowPointwise
)

FIELD_WORDS: dict[type[Instruction], dict[str, int]] = {
    RowLinear: {
        "opcode": 0, "generation": 1, "weight_row": 2, "num_units": 3, "num_tiles_k": 4, "src": 5,
        "num_src_words": 6, "packed": 7, "norm": 8, "bias": 9, "dst": 10, "row0": 11, "keep": 12,
        "num_rows": 13, "carry": 14, "pair_row": 15,
    },
    RowAttention: {
        "opcode": 0, "generation": 1, "k_row": 2, "k_src": 3, "v_row": 4, "src": 5, "head": 6,
        "split": 7, "q_norm": 8, "k_norm": 9, "v_src": 10, "partial": 11,
        "max_splits": 12, "window": 13, "query0": 14, "table": 15,
    },
    RowCombine: {
        "opcode": 0, "generation": 1, "head": 6, "dst": 10, "partial": 11, "max_splits": 12,
        "window": 13,
    },
    RowEmbed: {
        "opcode": 0, "generation": 1, "num_words": 6, "column": 7, "dst": 10, "row0": 11,
        "num_rows": 13,
    },
    RowBarrier: {"opcode": 0, "generation": 1, "num_words": 6, "dst": 10},
    RowSample: {
        "opcode": 0, "generation": 1, "src": 5, "rank_logits": 6, "dst": 10, "row0": 11,
        "logits": 12, "num_rows": 13,
    },
    RowRoute: {"opcode": 0, "generation": 1, "src": 5, "num_words": 6},
    RowPointwise: {
        "opcode": 0, "generation": 1, "number": 2, "num_units": 3, "table": 4, "src": 5,
        "num_src_words": 6, "packed": 7, "norm": 8, "eps_bits": 9, "dst": 10, "row0": 11,
        "keep": 12, "num_rows": 13, "carry": 14, "second": 15,
    },
}  # fmt: skip
"""Word of each field. Fields that kernels read before they look at the opcode share a place."""


def pack(instruction: Instruction) -> list[int]:
    """The WORDS words of an instruction."""
    return pack_fields(instruction, FIELD_WORDS[type(instruction)])


def bits_of(value: float) -> int:
    """A float32 as the int32 of the same bits."""
    (found,) = struct.unpack("<i", struct.pack("<f", value))
    return int(found)


def pack_fields(instruction: object, field_words: Mapping[str, int]) -> list[int]:
    """WORDS words with each field at its place, zeros elsewhere."""
    words = [0] * WORDS
    for name, word in field_words.items():
        value = int(getattr(instruction, name))
        assert -(2**31) <= value < 2**31, f"{name} {value} of {instruction}"
        words[word] = value
    return words


def join_bits(*parts: tuple[int, int]) -> int:
    """A word of values that share it: each from its bit on, up to that of the next, the last up to
    bit 31, which says that a word is negative.
    """
    word, ends = 0, [*(shift for _, shift in parts[1:]), 31]
    for (value, shift), end in zip(parts, ends, strict=True):
        assert 0 <= value < 1 << (end - shift), f"{value} in {end - shift} bits of {parts}"
        word |= value << shift
    return word


def signed_bits(value: int, num: int) -> int:
    """The lowest `num` bits of a number that these hold with its sign."""
    assert -(1 << (num - 1)) <= value < 1 << (num - 1), f"{value} in {num} bits"
    return value & ((1 << num) - 1)
