"""The places of words.py as constants that kernels can read. Next on the walk: shapes.py."""

from triton.experimental.gluon import language as gl

from distmega.kernels.hopper import words
from distmega.kernels.hopper.words import (
    PLACES,
    Attention,
    Barrier,
    Embed,
    Instruction,
    Linear,
    Opcode,
    Sample,
)


def _place(kind: type[Instruction], name: str) -> gl.constexpr:
    return gl.constexpr(PLACES[kind][name])


WORDS = gl.constexpr(words.WORDS)
STAMPS = gl.constexpr(words.STAMPS)
STATE_POSITION = gl.constexpr(words.STATE_POSITION)
STATE_EPOCH = gl.constexpr(words.STATE_EPOCH)
STATE_TOKEN = gl.constexpr(words.STATE_TOKEN)
FROM_EMBEDDING = gl.constexpr(words.FROM_EMBEDDING)
CARRY_EMBEDDED = gl.constexpr(words.CARRY_EMBEDDED)
PAIRED = gl.constexpr(words.PAIRED)
LAYER_NORM = gl.constexpr(words.LAYER_NORM)
KEEP_NORMED = gl.constexpr(words.KEEP_NORMED)
CARRY_TWO = gl.constexpr(words.CARRY_TWO)
DELTA_SHIFT = gl.constexpr(words.DELTA_SHIFT)
MATRIX_SHIFT = gl.constexpr(words.MATRIX_SHIFT)
MAX_EPILOGUES = gl.constexpr(words.MAX_EPILOGUES)
EMBEDDED = gl.constexpr(words.EMBEDDED)
REPORT_FIRST = gl.constexpr(words.REPORT_FIRST)
NO_REPORT = gl.constexpr(words.NO_REPORT)

OP_ATTENTION = gl.constexpr(int(Opcode.ATTENTION))
OP_COMBINE = gl.constexpr(int(Opcode.COMBINE))
OP_EMBED = gl.constexpr(int(Opcode.EMBED))
OP_BARRIER = gl.constexpr(int(Opcode.BARRIER))
OP_SAMPLE = gl.constexpr(int(Opcode.SAMPLE))

OPCODE = _place(Linear, "opcode")
GENERATION = _place(Linear, "generation")
SRC = _place(Linear, "src")
DST = _place(Linear, "dst")
NUM_UNITS = _place(Linear, "num_units")
LIN_WEIGHT_ROW = _place(Linear, "weight_row")
LIN_PAIR_ROW = _place(Linear, "pair_row")
LIN_NUM_TILES_K = _place(Linear, "num_tiles_k")
LIN_NUM_SRC_WORDS = _place(Linear, "num_src_words")
LIN_NORM = _place(Linear, "norm")
LIN_BIAS = _place(Linear, "bias")
LIN_ROW0 = _place(Linear, "row0")
LIN_NUM_ROWS = _place(Linear, "num_rows")
LIN_PACKED = _place(Linear, "packed")
LIN_KEEP = _place(Linear, "keep")
LIN_CARRY = _place(Linear, "carry")
ATT_K_ROW = _place(Attention, "k_row")
ATT_V_ROW = _place(Attention, "v_row")
ATT_SPLIT = _place(Attention, "split")
ATT_QUERY0 = _place(Attention, "query0")
ATT_Q_NORM = _place(Attention, "q_norm")
ATT_K_NORM = _place(Attention, "k_norm")
EMB_ROW0 = _place(Embed, "row0")
EMB_NUM_ROWS = _place(Embed, "num_rows")
EMB_COLUMN = _place(Embed, "column")
EMB_NUM_WORDS = _place(Embed, "num_words")
BAR_NUM_WORDS = _place(Barrier, "num_words")
SAMPLE_ROW0 = _place(Sample, "row0")
SAMPLE_NUM_ROWS = _place(Sample, "num_rows")
SAMPLE_VOCAB = _place(Sample, "vocab")
HEAD = _place(Attention, "head")
PARTIAL = _place(Attention, "partial")
WINDOW = _place(Attention, "window")
MAX_SPLITS = _place(Attention, "max_splits")

GREEDY = gl.constexpr(words.GREEDY)
DRAWN = gl.constexpr(words.DRAWN)
LIMITED = gl.constexpr(words.LIMITED)
SEARCHED = gl.constexpr(words.SEARCHED)
NO_CHOICE = gl.constexpr(words.NO_CHOICE)
CHUNK = gl.constexpr(words.SAMPLE_CHUNK)
