"""The places of batch_words.py as constants that kernels can read, and the batched kernel's
layouts. Next on the walk: batch_device.py.
"""

from triton.experimental.gluon import language as gl

from distmega.kernels.hopper import batch_words, words
from distmega.kernels.hopper.batch_words import (
    PLACES,
    BatchAttention,
    BatchEmbed,
    BatchHead,
    BatchInstruction,
    BatchLinear,
    BatchNorm,
    Opcode,
)


def _place(kind: type[BatchInstruction], name: str) -> gl.constexpr:
    return gl.constexpr(PLACES[kind][name])


BATCH = gl.constexpr(batch_words.BATCH)
BLOCK = gl.constexpr(batch_words.BLOCK)
MAX_SMS = gl.constexpr(words.MAX_SMS)
EVENT_WORDS = gl.constexpr(batch_words.EVENT_WORDS)
GROUP_UNITS = gl.constexpr(batch_words.GROUP_UNITS)
BEST_WORDS = gl.constexpr(batch_words.BEST_WORDS)
TOLD_WORDS = gl.constexpr(batch_words.TOLD_WORDS)
PARTIAL_EXTRA = gl.constexpr(batch_words.PARTIAL_EXTRA)
SETTINGS = gl.constexpr(batch_words.SETTINGS)
SEEDS_AT = gl.constexpr(batch_words.SEEDS_AT)
SETTINGS_AT = gl.constexpr(batch_words.SETTINGS_AT)
EVENTS_AT = gl.constexpr(batch_words.EVENTS_AT)
STATE_EPOCH = gl.constexpr(batch_words.STATE_EPOCH)
STATE_POSITIONS = gl.constexpr(batch_words.STATE_POSITIONS)

MAX_EPILOGUES = gl.constexpr(words.MAX_EPILOGUES)
NO_CHOICE = gl.constexpr(words.NO_CHOICE)
NORMED = gl.constexpr(batch_words.NORMED)
PAIRED = gl.constexpr(batch_words.PAIRED)
IN_SHIFT = gl.constexpr(batch_words.IN_SHIFT)
CARRY_SHIFT = gl.constexpr(batch_words.CARRY_SHIFT)
BLOCK_MASK = gl.constexpr(batch_words.BLOCK_MASK)
BLOCK_NUMBERS = gl.constexpr(batch_words.BATCH * batch_words.NUMBERS)
"""float32 elements of a block of numbers."""
LENGTH_SHIFT = gl.constexpr(batch_words.LENGTH_SHIFT)
MATRIX_SHIFT = gl.constexpr(batch_words.MATRIX_SHIFT)
SLOT_MASK = gl.constexpr(batch_words.SLOT_MASK)
LENGTH_MASK = gl.constexpr(batch_words.LENGTH_MASK)
NORM_PLAIN = gl.constexpr(batch_words.NORM_KINDS.index("none"))
NORM_LAYER = gl.constexpr(batch_words.NORM_KINDS.index("layer_norm"))

OP_EMBED = gl.constexpr(int(Opcode.EMBED))
OP_ATTENTION = gl.constexpr(int(Opcode.ATTENTION))
OP_DRAW = gl.constexpr(int(Opcode.DRAW))
OP_NORM = gl.constexpr(int(Opcode.NORM))

OPCODE = _place(BatchLinear, "opcode")
NUM_ROWS = _place(BatchLinear, "num_rows")
DST = _place(BatchLinear, "dst")
SRC = _place(BatchLinear, "src")
PACKED = _place(BatchLinear, "packed")
NUM_UNITS = _place(BatchLinear, "num_units")
LIN_WEIGHT_ROW = _place(BatchLinear, "weight_row")
LIN_PAIR_ROW = _place(BatchLinear, "pair_row")
LIN_NUM_TILES_K = _place(BatchLinear, "num_tiles_k")
LIN_NEXT_NORM = _place(BatchLinear, "next_norm")
LIN_BIAS = _place(BatchLinear, "bias")
LIN_ROW0 = _place(BatchLinear, "row0")
LIN_NUMBERS = _place(BatchLinear, "numbers")
LIN_CARRY2 = _place(BatchLinear, "carry2")
PARTS_AT = _place(BatchLinear, "parts")
OWN_PART = _place(BatchLinear, "own_part")
EMB_FIRST_TOKEN = _place(BatchEmbed, "first_token")
EMB_NUM_TOKENS = _place(BatchEmbed, "num_tokens")
EMB_FIRST_COLUMN = _place(BatchEmbed, "first_column")
EMB_NUM_COLUMNS = _place(BatchEmbed, "num_columns")
EMB_FIRST_ID = _place(BatchEmbed, "first_id")
EMB_BEST = _place(BatchEmbed, "best")
HEAD_FIRST_ID = _place(BatchHead, "first_id")
HEAD_PLACE = _place(BatchHead, "place")
HEAD_NUM_TOKENS = _place(BatchHead, "num_tokens")
ALL_LOGITS = _place(BatchHead, "logits")
ALL_HIGHS = _place(BatchHead, "highs")
TOLD = _place(BatchHead, "told")
ATT_K_ROW = _place(BatchAttention, "k_row")
ATT_V_ROW = _place(BatchAttention, "v_row")
ATT_WINDOW = _place(BatchAttention, "window")
ATT_Q_NORM = _place(BatchAttention, "q_norm")
ATT_K_NORM = _place(BatchAttention, "k_norm")
NORM_WEIGHT = _place(BatchNorm, "weight")
NORM_BIAS = _place(BatchNorm, "bias")
NORM_KEEP = _place(BatchNorm, "keep")
NORM_KIND = _place(BatchNorm, "kind")

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
GATE_UP = gl.constexpr(gl.BlockedLayout([1, 2, 2], [1, 32, 1], [2, 2, 2], [2, 1, 0]))
"""[2, 128, gate or up]."""
GATE_PAIRS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [2, 4], [1, 0]))
"""[2, 64]."""
BY_SM = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
"""[16 sequences, 256 SMs]."""
NORM_COLUMNS = gl.constexpr(gl.BlockedLayout([4], [32], [8], [0]))
"""[1024] columns of a row."""
NORM_PAIRS = gl.constexpr(gl.BlockedLayout([2], [32], [8], [0]))
"""[512]: what two neighbours become when they are packed."""
