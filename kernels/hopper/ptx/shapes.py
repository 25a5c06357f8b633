"""Sizes and register layouts that the kernel's parts share.

A weight tile is UNIT_ROWS rows by TILE_K columns, stored as SLICES slices of SLICE_K columns (128
bytes, one swizzle row), so that one bulk copy brings a tile and each slice is one batch of an
m16n8k16 product. Next on the walk: device.py.
"""

from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from distmega.kernels.hopper.plan import words

NUM_WARPS = gl.constexpr(8)
THREADS = gl.constexpr(256)
UNIT_ROWS = gl.constexpr(words.UNIT_ROWS)
SLICES = gl.constexpr(words.SLICES)
SLICE_K = gl.constexpr(words.SLICE_K)
TILE_K = gl.constexpr(words.TILE_K)
TILE_ROWS = gl.constexpr(128)
"""Rows of 64 elements in a ring slot: 16 slices of 8 weight rows, or 128 cached positions."""
TILE_BYTES = gl.constexpr(words.TILE_BYTES)
MMA_M = gl.constexpr(16)
"""Rows of x in one product: the batch, or the queries of a group."""

WORDS_A_CHUNK = gl.constexpr(512)
"""Flagged words (bf16 pairs) in TILE_K elements of x."""
STAGE_CHUNKS = gl.constexpr(words.STAGE_CHUNKS)
VECTOR_MULTIPLE = gl.constexpr(words.VECTOR_MULTIPLE)
ROW_PARTIAL_EXTRA = gl.constexpr(words.ROW_PARTIAL_EXTRA)
"""Words after the d outputs of a partial: maximum, sum, two unused."""

TILE_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
WEIGHT_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
"""A tile of weights [slices, rows, 64] has the bytes of a ring slot [128, 64]."""
MMA3 = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]))
X_DOT = gl.constexpr(gl.DotOperandLayout(0, MMA3.value, 2))
W_DOT = gl.constexpr(gl.DotOperandLayout(1, MMA3.value, 2))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
PLAIN3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))

PER_THREAD = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
"""[256]: one element a thread."""
TWOS = gl.constexpr(gl.BlockedLayout([2], [32], [8], [0]))
REDUCE = gl.constexpr(gl.BlockedLayout([8, 2], [1, 32], [1, 8], [1, 0]))
"""[8 warps, 64 rows]: each thread sums two rows over all warps; they are TWOS then."""
EVERY_WARP = gl.constexpr(gl.BlockedLayout([8], [32], [8], [0]))
"""[8]: one number a warp, all of them in every thread."""
GROUP_UNITS = gl.constexpr(words.GROUP_UNITS)
GROUP_ROWS = gl.constexpr(64)
TWO_STREAMS = gl.constexpr(gl.BlockedLayout([1, 1, 2], [4, 8, 1], [8, 1, 1], [2, 1, 0]))
"""[4, 8 rows, 2 streams]: both streams of a row in one thread."""

Q_DOT = gl.constexpr(gl.DotOperandLayout(0, MMA3.value, 2))
KV_DOT = gl.constexpr(gl.DotOperandLayout(1, MMA3.value, 2))
QUERY = gl.constexpr(gl.SliceLayout(2, MMA3.value))
"""[8 warps, 16 queries]: maxima and sums of the online softmax."""
POSITIONS = gl.constexpr(16)
"""Cached positions of a block that one warp attends to."""
GROUP_LIMIT = gl.constexpr(8)
"""Query heads a kv head, at most."""
PAIR_OUT = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0]))
"""[8 queries, 32 pairs]."""
FOUR_SPLITS = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [1, 8], [1, 0]))
"""[4 fours of splits, pairs of columns]: the fours of a pair in one warp."""
PART_COLUMNS = gl.constexpr(128)
"""Columns of a head that eight warps have, 16 each."""
WARP_SUM = gl.constexpr(gl.BlockedLayout([8, 1, 2], [1, 1, 32], [1, 8, 1], [2, 1, 0]))
"""[8 warps, 8 queries, 64]: each thread sums two columns over all warps."""


@constexpr_function
def num_halves(head_dim: int) -> int:
    """Ring slots that a block of keys takes: 64 columns a slot, zeros past the last."""
    return -(-head_dim // 64)


@constexpr_function
def num_parts(head_dim: int) -> int:
    """Times that eight warps have 16 columns each of a head's outputs."""
    parts: int = -(-head_dim // PART_COLUMNS.value)
    return parts


@constexpr_function
def padded_half(head_dim: int) -> int:
    """Columns that threads hold of either half of a head: a power of two, zeros past the last."""
    return 32 if head_dim <= 64 else 64 if head_dim <= 128 else 128


@constexpr_function
def padded_columns(head_dim: int) -> int:
    """Columns of the slots of a block of keys, up to a power of two."""
    columns: int = 2 * padded_half(head_dim)
    return columns


@constexpr_function
def is_padded(head_dim: int) -> bool:
    """Whether there are such zeros."""
    return head_dim not in (64, 128, 256)


@constexpr_function
def head_rows(columns: int, size: int) -> gl.BlockedLayout:
    """[8 or 16, columns] with `size` consecutive columns a thread and each row inside one warp."""
    lanes = min(columns // size, 32)
    return gl.BlockedLayout([1, size], [32 // lanes, lanes], [8, 1], [1, 0])
