"""Device words of the batched decode kernel: the only file that knows where a field of one of its
instructions lies.

An instruction is WORDS int32 words. Every SM has the same instructions in the same order, each
with its own part of the rows; instruction i waits until all SMs of the GPU have done instruction
i - 1 (over ranks, BatchDraw until all of all ranks have) and then counts up event i. Numbers are
int32 and float32 in places of their own, activations bf16 in the order of BLOCK (batch_device.py).
Next on the walk: batch_queues.py.
"""

from dataclasses import dataclass
from enum import IntEnum

from distmega.kernels.hopper.words import MAX_SMS, REPORT_WORDS, pack_fields

BATCH = 16
"""Sequences that the kernel computes, whether all are in use or not: the rows of an m16n8k16."""
BLOCK = 16 * BATCH
"""Elements of 16 columns of x, which lie together."""
EVENT_WORDS = 32
"""int32 words from one event to the next: 128 bytes."""
GROUP_UNITS = 8
"""Units of 8 weight rows that a task multiplies by one read of x."""
BEST_WORDS = 2 * BATCH
"""Tagged words of a rank's likeliest tokens: of each sequence, its logit and the token."""
TOLD_WORDS = 2 * MAX_SMS
"""Tagged words by which a rank's SMs tell that their logits are written, two an SM."""
PARTIAL_EXTRA = 16
"""float32 words after the 8 rows of outputs of a partial: 8 maxima, 8 sums."""

SETTINGS = 3
"""Numbers that say how the tokens of a sequence are drawn: see sample.py."""
SEEDS_AT, SETTINGS_AT, EVENTS_AT = REPORT_WORDS, REPORT_WORDS + BATCH, 64
"""64-bit words behind the report: a seed a sequence; its settings, as float32; the events. Behind
these lie the lists of logits that may be drawn (batch_limits.py), or the tagged words that ranks
exchange.
"""

STATE_EPOCH = 0
"""Word of the device state: steps run so far."""
STATE_POSITIONS = 32
"""Words from here on: position of each sequence's next token."""
STATE_WORDS = STATE_POSITIONS + BATCH


class Opcode(IntEnum):
    """What an instruction does; QKV to HEAD are linears with different epilogues."""

    EMBED = 0
    QKV = 1
    RESIDUAL = 2
    GATED = 3
    HEAD = 4
    ATTENTION = 5
    DRAW = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLinear:
    """8 * num_units rows of a matrix times x of all sequences, then the epilogue of the opcode.

    matrix: which of the weight descriptors; weight_row: row there of the first unit. GATED takes
    units in turn from there and from pair_row on, 8 gate rows and 8 up rows, and counts rows of
    both. num_tiles_k: tiles of 1024 columns. src: first chunk of x in the activations, a chunk
    being 1024 columns. dst: first element of the output. norm: 1 where x carries its norm's weight
    already and only the factor is missing. bias: offset in the vectors, or -1. next_norm: offset of
    the weights that the output is multiplied by for the norm after it. row0: first row of the
    output; num_rows: of the whole output. parts: first tagged word of all ranks' parts of a product
    that is summed over ranks; own_part: that of this rank's.
    """

    opcode: Opcode
    event: int
    row0: int
    num_units: int
    num_rows: int
    matrix: int = 0
    weight_row: int = 0
    pair_row: int = 0
    num_tiles_k: int = 0
    src: int = 0
    norm: int = 0
    bias: int = -1
    dst: int = 0
    next_norm: int = 0
    parts: int = 0
    own_part: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEmbed:
    """8 * num_units columns, from row0 on, of the embedding of each sequence's token, as a linear's
    num_rows rows of output.

    Where ranks share the matrix, this one has num_columns columns of num_tokens tokens, from
    first_column and first_token on, and the rest adds zeros to a sum over ranks (parts, own_part).
    The token itself is the likeliest of all ranks: best is the first tagged word of theirs, of
    which this rank's are at own_best; first_id: the token of its first logit.
    """

    event: int
    row0: int
    num_units: int
    num_rows: int
    dst: int
    next_norm: int
    parts: int = 0
    own_part: int = 0
    first_token: int = 0
    num_tokens: int = 0
    first_column: int = 0
    num_columns: int = 0
    first_id: int = 0
    best: int = 0
    own_best: int = 0
    opcode: Opcode = Opcode.EMBED


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchHead:
    """As a linear whose rows are logits, of num_rows tokens from first_id on.

    Where ranks draw within limits, what all of them need to do so lies in every rank's exchange:
    from 64-bit word `logits` on, float32, those of all num_tokens tokens, a row a sequence; from
    `highs` on, float32 [16, ranks, MAX_SMS], the highest of each SM; from `told` on, two tagged
    words an SM, MAX_SMS a rank, by which it says that its numbers are there. place: of this rank.
    """

    event: int
    row0: int
    num_units: int
    num_rows: int
    matrix: int
    weight_row: int
    num_tiles_k: int
    src: int
    norm: int
    first_id: int
    place: int = 0
    num_tokens: int = 0
    logits: int = 0
    highs: int = 0
    told: int = 0
    opcode: Opcode = Opcode.HEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDraw:
    """Draws tokens within limits from the logits of num_rows tokens; for the rest see BatchHead,
    which it follows. The loader takes it for a linear of no units.
    """

    event: int
    num_rows: int
    logits: int = 0
    highs: int = 0
    told: int = 0
    opcode: Opcode = Opcode.DRAW


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAttention:
    """This SM's share of the cached positions of all sequences and kv heads, found at run time.

    k_row, v_row: first row of this layer in the cache matrix [rows, d]. window: positions that a
    query sees, itself included. num_rows: of the qkv output. dst: first element of the attention
    output. q_norm, k_norm: offsets in the vectors.
    """

    event: int
    k_row: int
    v_row: int
    window: int
    num_rows: int
    dst: int
    q_norm: int
    k_norm: int
    opcode: Opcode = Opcode.ATTENTION


BatchInstruction = BatchLinear | BatchEmbed | BatchHead | BatchDraw | BatchAttention

PLACES: dict[type[BatchInstruction], dict[str, int]] = {
    BatchLinear: {
        "opcode": 0, "event": 1, "weight_row": 2, "num_units": 3, "num_tiles_k": 4, "src": 5,
        "norm": 6, "next_norm": 7, "parts": 8, "bias": 9, "dst": 10, "row0": 11, "own_part": 12,
        "num_rows": 13, "matrix": 14, "pair_row": 15,
    },
    BatchEmbed: {
        "opcode": 0, "event": 1, "first_token": 2, "num_units": 3, "num_tokens": 4,
        "first_column": 5, "num_columns": 6, "next_norm": 7, "parts": 8, "first_id": 9, "dst": 10,
        "row0": 11, "own_part": 12, "num_rows": 13, "best": 14, "own_best": 15,
    },
    BatchHead: {
        "opcode": 0, "event": 1, "weight_row": 2, "num_units": 3, "num_tiles_k": 4, "src": 5,
        "norm": 6, "logits": 7, "told": 8, "highs": 9, "first_id": 10, "row0": 11, "place": 12,
        "num_rows": 13, "matrix": 14, "num_tokens": 15,
    },
    BatchDraw: {"opcode": 0, "event": 1, "logits": 7, "told": 8, "highs": 9, "num_rows": 13},
    BatchAttention: {
        "opcode": 0, "event": 1, "k_row": 2, "v_row": 4, "window": 6, "q_norm": 8, "k_norm": 9,
        "dst": 10, "num_rows": 13,
    },
}  # fmt: skip
"""Word of each field. Fields that kernels read before they look at the opcode share a place."""


def pack(instruction: BatchInstruction) -> list[int]:
    """The WORDS words of an instruction."""
    return pack_fields(instruction, PLACES[type(instruction)])
