"""The places of words.py as constants that kernels can read. Next on the walk: ptx/shapes.py."""

from triton.experimental.gluon import language as gl

from distmega.kernels import powers
from distmega.kernels.hopper.plan import words
from distmega.kernels.hopper.plan.words import (
    FIELD_WORDS,
    Instruction,
    RowAttention,
    RowBarrier,
    RowEmbed,
    RowLinear,
    RowOpcode,
    RowPointwise,
    RowRoute,
    RowSample,
)
from distmega.kernels.runtime import report


def _word(kind: type[Instruction], name: str) -> gl.constexpr:
    return gl.constexpr(FIELD_WORDS[kind][name])


WORDS = gl.constexpr(words.WORDS)
LOG2_E = gl.constexpr(powers.LOG2_E)
STAMPS = gl.constexpr(words.STAMPS)
ROW_STATE_POSITION = gl.constexpr(words.ROW_STATE_POSITION)
ROW_STATE_EPOCH = gl.constexpr(words.ROW_STATE_EPOCH)
ROW_STATE_ID = gl.constexpr(words.ROW_STATE_ID)
ROW_STATE_SAMPLING = gl.constexpr(words.ROW_STATE_SAMPLING)
ROW_STATE_SEED = gl.constexpr(words.ROW_STATE_SEED)
FROM_EMBEDDING = gl.constexpr(words.FROM_EMBEDDING)
CARRY_EMBEDDED = gl.constexpr(words.CARRY_EMBEDDED)
ROW_PAIRED = gl.constexpr(words.ROW_PAIRED)
LAYER_NORM = gl.constexpr(words.LAYER_NORM)
KEEP_NORMED = gl.constexpr(words.KEEP_NORMED)
CARRY_TWO = gl.constexpr(words.CARRY_TWO)
ROW_EXPERT_ROWS = gl.constexpr(words.ROW_EXPERT_ROWS)
ROW_EXPERT_COLUMNS = gl.constexpr(words.ROW_EXPERT_COLUMNS)
X_PARTS = gl.constexpr(words.X_PARTS)
KEEP_X = gl.constexpr(words.KEEP_X)
AT_POSITION = gl.constexpr(words.AT_POSITION)
BIASED = gl.constexpr(words.BIASED)
DELTA_SHIFT = gl.constexpr(words.DELTA_SHIFT)
ROW_MATRIX_SHIFT = gl.constexpr(words.ROW_MATRIX_SHIFT)
MAX_EPILOGUES = gl.constexpr(words.MAX_EPILOGUES)
EMBEDDED = gl.constexpr(words.EMBEDDED)
REPORT_FIRST = gl.constexpr(report.REPORT_FIRST)
NO_REPORT = gl.constexpr(report.NO_REPORT)

OP_ATTENTION = gl.constexpr(int(RowOpcode.ATTENTION))
OP_COMBINE = gl.constexpr(int(RowOpcode.COMBINE))
OP_EMBED = gl.constexpr(int(RowOpcode.EMBED))
OP_BARRIER = gl.constexpr(int(RowOpcode.BARRIER))
OP_SAMPLE = gl.constexpr(int(RowOpcode.SAMPLE))
OP_ROUTE = gl.constexpr(int(RowOpcode.ROUTE))
OP_POINTWISE = gl.constexpr(int(RowOpcode.POINTWISE))

OPCODE = _word(RowLinear, "opcode")
GENERATION = _word(RowLinear, "generation")
SRC = _word(RowLinear, "src")
DST = _word(RowLinear, "dst")
NUM_UNITS = _word(RowLinear, "num_units")
LIN_WEIGHT_ROW = _word(RowLinear, "weight_row")
LIN_PAIR_ROW = _word(RowLinear, "pair_row")
LIN_NUM_TILES_K = _word(RowLinear, "num_tiles_k")
LIN_NUM_SRC_WORDS = _word(RowLinear, "num_src_words")
LIN_NORM = _word(RowLinear, "norm")
LIN_BIAS = _word(RowLinear, "bias")
LIN_ROW0 = _word(RowLinear, "row0")
LIN_NUM_ROWS = _word(RowLinear, "num_rows")
LIN_PACKED = _word(RowLinear, "packed")
LIN_KEEP = _word(RowLinear, "keep")
LIN_CARRY = _word(RowLinear, "carry")
ATT_K_ROW = _word(RowAttention, "k_row")
ATT_V_ROW = _word(RowAttention, "v_row")
ATT_K_SRC = _word(RowAttention, "k_src")
ATT_V_SRC = _word(RowAttention, "v_src")
ATT_SPLIT = _word(RowAttention, "split")
ATT_QUERY0 = _word(RowAttention, "query0")
ATT_Q_NORM = _word(RowAttention, "q_norm")
ATT_K_NORM = _word(RowAttention, "k_norm")
ATT_TABLE = _word(RowAttention, "table")
POINT_NUMBER = _word(RowPointwise, "number")
POINT_EPS = _word(RowPointwise, "eps_bits")
POINT_SECOND = _word(RowPointwise, "second")
POINT_TABLE = _word(RowPointwise, "table")
EMB_ROW0 = _word(RowEmbed, "row0")
EMB_NUM_ROWS = _word(RowEmbed, "num_rows")
EMB_COLUMN = _word(RowEmbed, "column")
EMB_NUM_WORDS = _word(RowEmbed, "num_words")
BAR_NUM_WORDS = _word(RowBarrier, "num_words")
SAMPLE_ROW0 = _word(RowSample, "row0")
SAMPLE_NUM_ROWS = _word(RowSample, "num_rows")
SAMPLE_RANK_LOGITS = _word(RowSample, "rank_logits")
SAMPLE_LOGITS = _word(RowSample, "logits")
ROUTE_NUM_WORDS = _word(RowRoute, "num_words")
HEAD = _word(RowAttention, "head")
PARTIAL = _word(RowAttention, "partial")
WINDOW = _word(RowAttention, "window")
MAX_SPLITS = _word(RowAttention, "max_splits")

GREEDY = gl.constexpr(words.GREEDY)
SAMPLED = gl.constexpr(words.SAMPLED)
LIMITED = gl.constexpr(words.LIMITED)
SEARCHED = gl.constexpr(words.SEARCHED)
NO_CHOICE = gl.constexpr(words.NO_CHOICE)
CHUNK = gl.constexpr(words.SAMPLE_CHUNK)
