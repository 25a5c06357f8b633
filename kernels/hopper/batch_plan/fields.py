"""The places of words.py as constants that kernels can read, and the batched kernel's
layouts. Next on the walk: batch/device.py.
"""

from triton.experimental.gluon import language as gl

from distmega.kernels.hopper.batch_plan import words as batch_words
from distmega.kernels.hopper.batch_plan.words import (
    FIELD_WORDS,
    BatchAttention,
    BatchEmbed,
    BatchExperts,
    BatchGather,
    BatchHeads,
    BatchInstruction,
    BatchLinear,
    BatchLogits,
    BatchNorm,
    BatchOpcode,
    BatchPointwise,
    BatchProduct,
    BatchRows,
)
from distmega.kernels.hopper.plan import types, words


def _word(kind: type[BatchInstruction], name: str) -> gl.constexpr:
    return gl.constexpr(FIELD_WORDS[kind][name])


BATCH = gl.constexpr(batch_words.BATCH)
MAX_ROWS = gl.constexpr(batch_words.MAX_ROWS)
PRODUCT_TILE = gl.constexpr(batch_words.PRODUCT_TILE)
BLOCK = gl.constexpr(batch_words.BLOCK)
MAX_SMS = gl.constexpr(words.MAX_SMS)
EVENT_WORDS = gl.constexpr(batch_words.EVENT_WORDS)
GROUP_UNITS = gl.constexpr(words.GROUP_UNITS)
BEST_WORDS = gl.constexpr(batch_words.BEST_WORDS)
READY_WORDS = gl.constexpr(batch_words.READY_WORDS)
BATCH_PARTIAL_EXTRA = gl.constexpr(batch_words.BATCH_PARTIAL_EXTRA)
SETTINGS = gl.constexpr(batch_words.SETTINGS)
SEEDS_AT = gl.constexpr(batch_words.SEEDS_AT)
SETTINGS_AT = gl.constexpr(batch_words.SETTINGS_AT)
EVENTS_AT = gl.constexpr(batch_words.EVENTS_AT)
BATCH_STATE_EPOCH = gl.constexpr(batch_words.BATCH_STATE_EPOCH)
BATCH_STATE_HITS = gl.constexpr(batch_words.BATCH_STATE_HITS)
BATCH_STATE_POSITIONS = gl.constexpr(batch_words.BATCH_STATE_POSITIONS)
BATCH_STAMPS = gl.constexpr(batch_words.BATCH_STAMPS)
STAMP_BEGIN = gl.constexpr(batch_words.STAMP_BEGIN)
STAMP_READY = gl.constexpr(batch_words.STAMP_READY)
STAMP_CHOSEN = gl.constexpr(batch_words.STAMP_CHOSEN)
STAMP_END = gl.constexpr(batch_words.STAMP_END)
STAMP_LOADED = gl.constexpr(batch_words.STAMP_LOADED)

MAX_EPILOGUES = gl.constexpr(words.MAX_EPILOGUES)
NO_CHOICE = gl.constexpr(words.NO_CHOICE)
NORMED = gl.constexpr(batch_words.NORMED)
BATCH_PAIRED = gl.constexpr(batch_words.BATCH_PAIRED)
BATCH_EXPERT_ROWS = gl.constexpr(batch_words.BATCH_EXPERT_ROWS)
BATCH_EXPERT_COLUMNS = gl.constexpr(batch_words.BATCH_EXPERT_COLUMNS)
IN_SHIFT = gl.constexpr(batch_words.IN_SHIFT)
CARRY_SHIFT = gl.constexpr(batch_words.CARRY_SHIFT)
BLOCK_MASK = gl.constexpr(batch_words.BLOCK_MASK)
BLOCK_NUMBERS = gl.constexpr(batch_words.BATCH * batch_words.NUMBERS)
"""float32 elements of a block of numbers."""
LENGTH_SHIFT = gl.constexpr(batch_words.LENGTH_SHIFT)
BATCH_MATRIX_SHIFT = gl.constexpr(batch_words.BATCH_MATRIX_SHIFT)
SLOT_MASK = gl.constexpr(batch_words.SLOT_MASK)
LENGTH_MASK = gl.constexpr(batch_words.LENGTH_MASK)
REST_SHIFT = gl.constexpr(batch_words.REST_SHIFT)
REST_MASK = gl.constexpr(batch_words.REST_MASK)
ROW_MULTIPLE = gl.constexpr(types.ROW_MULTIPLE)
NORM_PLAIN = gl.constexpr(batch_words.NORM_KINDS.index("none"))
NORM_LAYER = gl.constexpr(batch_words.NORM_KINDS.index("layer_norm"))

OP_EMBED = gl.constexpr(int(BatchOpcode.EMBED))
OP_ATTENTION = gl.constexpr(int(BatchOpcode.ATTENTION))
OP_SAMPLE = gl.constexpr(int(BatchOpcode.SAMPLE))
OP_NORM = gl.constexpr(int(BatchOpcode.NORM))
OP_GATHER = gl.constexpr(int(BatchOpcode.GATHER))
OP_POINTWISE = gl.constexpr(int(BatchOpcode.POINTWISE))
OP_PRODUCT = gl.constexpr(int(BatchOpcode.PRODUCT))
OP_ROWS = gl.constexpr(int(BatchOpcode.ROWS))
OP_HEADS = gl.constexpr(int(BatchOpcode.HEADS))

OPCODE = _word(BatchLinear, "opcode")
NUM_ROWS = _word(BatchLinear, "num_rows")
DST = _word(BatchLinear, "dst")
SRC = _word(BatchLinear, "src")
PACKED = _word(BatchLinear, "packed")
NUM_UNITS = _word(BatchLinear, "num_units")
LIN_WEIGHT_ROW = _word(BatchLinear, "weight_row")
LIN_PAIR_ROW = _word(BatchLinear, "pair_row")
LIN_NUM_TILES_K = _word(BatchLinear, "num_tiles_k")
LIN_NEXT_NORM = _word(BatchLinear, "next_norm")
LIN_BIAS = _word(BatchLinear, "bias")
LIN_ROW0 = _word(BatchLinear, "row0")
LIN_NUMBERS = _word(BatchLinear, "numbers")
LIN_CARRY2 = _word(BatchLinear, "carry2")
PARTS_AT = _word(BatchLinear, "parts")
OWN_PART = _word(BatchLinear, "own_part")
PROD_FIRST = _word(BatchProduct, "first_step")
PROD_MOST = _word(BatchProduct, "most_parts")
EMB_FIRST_TABLE_ROW = _word(BatchEmbed, "first_table_row")
EMB_NUM_TABLE_ROWS = _word(BatchEmbed, "num_table_rows")
EMB_FIRST_COLUMN = _word(BatchEmbed, "first_column")
EMB_NUM_COLUMNS = _word(BatchEmbed, "num_columns")
EMB_FIRST_ID = _word(BatchEmbed, "first_id")
EMB_BEST = _word(BatchEmbed, "best")
GATHER_NUMBER = _word(BatchGather, "number")
GATHER_SRC = _word(BatchGather, "src")
GATHER_FIRST_COLUMN = _word(BatchGather, "first_column")
GATHER_NUM_COLUMNS = _word(BatchGather, "num_columns")
EXP_SCORES = _word(BatchExperts, "scores")
EXP_CHOICE = _word(BatchExperts, "choice")
EXP_NUM_CHOICES = _word(BatchExperts, "num_choices")
EXP_FIRST_OWN = _word(BatchExperts, "first_own")
LOGITS_FIRST_ID = _word(BatchLogits, "first_id")
LOGITS_BIAS = _word(BatchLogits, "bias")
LOGITS_TEAM_RANK = _word(BatchLogits, "team_rank")
NUM_LOGITS = _word(BatchLogits, "num_logits")
ALL_LOGITS = _word(BatchLogits, "logits")
ALL_ROW_MAXIMA = _word(BatchLogits, "row_maxima")
READY_FLAGS = _word(BatchLogits, "ready_flags")
ATT_K_ROW = _word(BatchAttention, "k_row")
ATT_V_ROW = _word(BatchAttention, "v_row")
ATT_K_SRC = _word(BatchAttention, "k_src")
ATT_V_SRC = _word(BatchAttention, "v_src")
ATT_WINDOW = _word(BatchAttention, "window")
ATT_Q_NORM = _word(BatchAttention, "q_norm")
ATT_K_NORM = _word(BatchAttention, "k_norm")
ATT_TABLE = _word(BatchAttention, "table")
ROWS_SCALE = _word(BatchRows, "scale_bits")
ROWS_SEES = _word(BatchRows, "sees")
ROWS_NUM_KEYS = _word(BatchRows, "num_keys")
ROWS_KEEP = _word(BatchRows, "keep")
ROWS_K_SRC = _word(BatchRows, "k_src")
ROWS_K_ROWS = _word(BatchRows, "k_rows")
ROWS_V_SRC = _word(BatchRows, "v_src")
ROWS_V_ROWS = _word(BatchRows, "v_rows")
ROWS_MASK = _word(BatchRows, "mask")
ROWS_HEAD_STEP = _word(BatchRows, "head_step")
ROWS_ROW_STEP = _word(BatchRows, "row_step")
ROWS_KEY_STEP = _word(BatchRows, "key_step")
HEADS_NUM_KEYS = _word(BatchHeads, "num_keys")
HEADS_K_SRC = _word(BatchHeads, "k_src")
HEADS_K_ROWS = _word(BatchHeads, "k_rows")
HEADS_V_SRC = _word(BatchHeads, "v_src")
HEADS_V_ROWS = _word(BatchHeads, "v_rows")
HEADS_K_DST = _word(BatchHeads, "k_dst")
HEADS_V_DST = _word(BatchHeads, "v_dst")
HEADS_Q_NORM = _word(BatchHeads, "q_norm")
HEADS_K_NORM = _word(BatchHeads, "k_norm")
NORM_WEIGHT = _word(BatchNorm, "weight")
NORM_BIAS = _word(BatchNorm, "bias")
NORM_KEEP = _word(BatchNorm, "keep")
NORM_KIND = _word(BatchNorm, "kind")
POINT_NUMBER = _word(BatchPointwise, "number")
POINT_LENGTH = _word(BatchPointwise, "length")
POINT_TABLE = _word(BatchPointwise, "table")
POINT_CARRY = _word(BatchPointwise, "carry")
POINT_CARRY2 = _word(BatchPointwise, "carry2")
POINT_WEIGHT = _word(BatchPointwise, "weight")
POINT_BIAS = _word(BatchPointwise, "bias")
POINT_EPS = _word(BatchPointwise, "eps_bits")
POINT_SLOT = _word(BatchPointwise, "slot")
POINT_KEEP = _word(BatchPointwise, "keep")
POINT_BY_POSITION = _word(BatchPointwise, "by_position")

HALF_CHUNK = gl.constexpr(512 * batch_words.BATCH)
"""Elements of 512 columns of x."""
X_BLOCKS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [4], [256], [512]],
        lane_bases=[[8], [16], [32], [64], [128]],
        warp_bases=[[1024], [2048], [4096]],
        block_bases=[],
        shape=[8192],
    )
)
"""[8192]: x as a product takes it, 64 columns a warp, four loads of 16 bytes a thread."""
ROUND_UNITS = gl.constexpr(4)
"""Units whose sums pass through shared memory together."""
COLUMNS = gl.constexpr(128)
"""Outputs of a unit: 16 sequences by 8 rows."""
PARTS = gl.constexpr(gl.BlockedLayout([8, 2], [1, 32], [4, 2], [1, 0]))
"""[4 units * 8 warps, 128]: each thread sums two outputs over all warps."""
ROUND = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 2], [1, 0]))
"""[4 units, 128]: two rows of one sequence a thread."""
ROUND_COLUMNS = gl.constexpr(gl.SliceLayout(0, ROUND.value))
PAIRS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 2], [1, 0]))
"""[4 units, 64]: what two neighbouring rows become when they are packed."""
TWO_STREAMS = gl.constexpr(gl.BlockedLayout([1, 2, 2], [1, 32, 1], [2, 2, 2], [2, 1, 0]))
"""[2, 128, 2 streams]."""
ROW_PAIRS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [2, 4], [1, 0]))
"""[2, 64]."""
BY_SM = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
"""[16 sequences, 256 SMs]."""
BY_EXPERT = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0]))
"""[16 sequences, experts]: those of a sequence in one warp."""
NORM_COLUMNS = gl.constexpr(gl.BlockedLayout([4], [32], [8], [0]))
"""[1024] columns of a row."""
NORM_PAIRS = gl.constexpr(gl.BlockedLayout([2], [32], [8], [0]))
"""[512]: what two neighbours become when they are packed."""
