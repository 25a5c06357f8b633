"""Products of more than 16 rows: weight tiles of the ring times x of all sequences, in parts.

The tiles of a matrix, 128 rows each, and their steps along k lie in one line, of which SM i of n
takes the i-th n-th, so that all SMs read equally many weights however few rows a matrix has. What
it finds for each tile is a part; the instruction behind, whose rows are shared out anew, adds the
parts of its rows up in the order of the SMs. x goes from the second-level cache into the registers
in which a wgmma takes it, in the order of device.py; the second warp group finds it in the
first-level one. Next on the walk: linear.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from distmega.kernels.gluon_compat import reinterpret
from distmega.kernels.hopper.batch_plan.fields import (
    BATCH,
    BATCH_PAIRED,
    LIN_NUM_TILES_K,
    LIN_ROW0,
    MAX_ROWS,
    NUM_ROWS,
    NUM_UNITS,
    PACKED,
    PROD_FIRST,
    PROD_MOST,
    PRODUCT_TILE,
    ROUND,
    ROUND_UNITS,
    SRC,
)
from distmega.kernels.hopper.ptx.device import keep, single
from distmega.kernels.hopper.ptx.shapes import SLICE_K, TILE_K, TILE_SHARED, UNIT_ROWS

HALF_STEP = gl.constexpr(64)
"""Columns of a ring slot."""
BLOCK_K = gl.constexpr(16)
"""Columns of x that lie together."""
PARTS_ASKED = gl.constexpr(5)
"""Parts of a sum that are asked for together."""
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]))
"""[64 sequences, 128 weight rows]: half of the rows a warp group, 16 sequences a warp."""
X_OPERAND = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
X_SLICE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [512], [1024]],
        lane_bases=[[4], [8], [16], [32], [64]],
        warp_bases=[[128], [256], [0]],
        block_bases=[],
        shape=[2048],
    )
)
"""[2048] pairs: 64 columns of x of 64 sequences as a wgmma takes them, four loads of 16 bytes a
thread.
"""


@gluon.jit
def load_slice(x, block, zero, ROWS: gl.constexpr):
    """64 columns of x, pairs in int32, from number `block` of 16 on. Of fewer rows the last are
    those of others, whose products nobody takes. zero: see product_task.
    """
    SIZE: gl.constexpr = BLOCK_K * BATCH // 2
    i = zero + gl.arange(0, MAX_ROWS * HALF_STEP // 2, layout=X_SLICE)
    first = x + block * (BLOCK_K * ROWS // 2)
    if ROWS == MAX_ROWS:
        at = first + i
    else:
        inner = i % SIZE + i // SIZE % (ROWS // BATCH) * SIZE
        inner += i // (BLOCK_K * MAX_ROWS // 2) * (BLOCK_K * ROWS // 2)
        at = first + gl.max_contiguous(gl.multiple_of(inner, [4]), [4])
    # through the first-level cache: what it may hold of before the wait for the event that x was
    # written at is gone with that wait
    return gl.load(at)


@gluon.jit
def as_operand(pairs):
    """What load_slice gives, as [64, 64] bf16."""
    low = pairs.to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    split = gl.reshape(gl.join(low, high), [4, MAX_ROWS // BATCH, 8, 4, 2, 2, 2])
    ordered = gl.permute(split, [1, 5, 2, 0, 4, 3, 6])
    return gl.convert_layout(gl.reshape(ordered, [MAX_ROWS, HALF_STEP]), X_OPERAND)


@gluon.jit
def first_sm(step, total, num_sms):
    """The SM that takes a step of the line of `total`, as batch_plan/words.py's sm_of_step."""
    return ((step + 1) * gl.minimum(num_sms, total) - 1) // total


@gluon.jit
def steps_of(words):
    """Steps of all tiles of a product."""
    return (words[NUM_ROWS] + PRODUCT_TILE - 1) // PRODUCT_TILE * words[LIN_NUM_TILES_K]


@gluon.jit
def multiply_slot(x, acc, tiles, ring, it, STAGES: gl.constexpr):
    """64 columns of x times the ring slot that `it` means, more sums. x may be loaded anew then."""
    slot = it % STAGES
    mbarrier.wait(ring.ready.index(slot), (it // STAGES) & 1)
    a = as_operand(x)
    acc = warpgroup_mma(a, tiles.index(slot).permute((1, 0)), acc, is_async=True)
    acc, a = warpgroup_mma_wait(num_outstanding=0, deps=(acc, a))
    mbarrier.arrive(ring.free.index(slot), count=1)
    return acc


@gluon.jit
def product_task(
    words, acts, parts, sm, num_sms, ring, it, ROWS: gl.constexpr, STAGES: gl.constexpr
):
    """This SM's steps of a product; returns the ring position.

    words: of the instruction. acts: as of BatchMemory, of which x is read. parts: f32 [tiles, most,
    16 units, ROWS, 8 rows], in which this SM writes the parts that are its own. sm, num_sms: of
    this GPU. it: ring slots taken before, of which a step takes two.
    """
    steps = words[LIN_NUM_TILES_K]
    total = steps_of(words)
    most = words[PROD_MOST]
    start = words[PROD_FIRST]
    left = words[NUM_UNITS]
    x = acts + words[SRC] * (TILE_K * ROWS // 2)
    tiles = reinterpret(ring.slots, gl.bfloat16, [STAGES, PRODUCT_TILE, SLICE_K], TILE_SHARED)
    # made anew, as in threads_here, or else addresses are kept from here to the next product
    zero = keep(0) * 16  # so that loads of 16 bytes stay such
    while left > 0:
        tile = start // steps
        k = start % steps
        num = gl.minimum(left, steps - k)
        acc = gl.zeros([MAX_ROWS, PRODUCT_TILE], gl.float32, layout=ACC)
        # three slots ahead: a slot's products take less time than x, which all SMs ask for
        last = (k + num - 1) * 8
        x0 = load_slice(x, k * 8, zero, ROWS)
        x1 = load_slice(x, k * 8 + 4, zero, ROWS)
        x2 = load_slice(x, gl.minimum(k * 8 + 8, last), zero, ROWS)
        x3 = load_slice(x, gl.minimum(k * 8 + 8, last) + 4, zero, ROWS)
        for s in range(keep(0), keep(num), 2):
            first = gl.minimum((k + s) * 8 + 16, last)
            acc = multiply_slot(x0, acc, tiles, ring, it, STAGES)
            x0 = load_slice(x, first, zero, ROWS)
            acc = multiply_slot(x1, acc, tiles, ring, it + 1, STAGES)
            x1 = load_slice(x, first + 4, zero, ROWS)
            it += 2
            if s + 1 < num:
                second = gl.minimum((k + s) * 8 + 24, last)
                acc = multiply_slot(x2, acc, tiles, ring, it, STAGES)
                x2 = load_slice(x, second, zero, ROWS)
                acc = multiply_slot(x3, acc, tiles, ring, it + 1, STAGES)
                x3 = load_slice(x, second + 4, zero, ROWS)
                it += 2
        part = gl.where(most == 1, 0, sm - first_sm(tile * steps, total, num_sms))
        b = zero + gl.expand_dims(gl.arange(0, MAX_ROWS, layout=gl.SliceLayout(1, ACC)), 1)
        r = gl.expand_dims(gl.arange(0, PRODUCT_TILE, layout=gl.SliceLayout(0, ACC)), 0)
        inner = r // UNIT_ROWS * (UNIT_ROWS * ROWS) + b * UNIT_ROWS + r % UNIT_ROWS
        at = parts + (tile * most + part) * (PRODUCT_TILE * ROWS) + inner
        if ROWS == MAX_ROWS:
            gl.store(at, acc)
        else:
            gl.store(at, acc, mask=(b < ROWS) & (r >= 0))
        start += num
        left -= num
    return it


@gluon.jit
def first_parts(words, parts, unit, num_sms, ROWS: gl.constexpr):
    """Where the first part of each of a round's products lies, [4 units, 8 ROWS], and how many
    there are, [4, 1]: this SM's rows from number `unit` of its units on, none behind its last.
    Units of two streams take turns here, and lie in halves of a tile there.
    """
    WIDTH: gl.constexpr = UNIT_ROWS * ROWS
    UNITS: gl.constexpr = PRODUCT_TILE // UNIT_ROWS
    steps = words[LIN_NUM_TILES_K]
    total = steps_of(words)
    most = words[SRC]
    u = gl.expand_dims(gl.arange(0, ROUND_UNITS, layout=gl.SliceLayout(1, ROUND)), 1)
    c = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ROUND)), 0)
    own = words[LIN_ROW0] // UNIT_ROWS + unit + u
    tile = own // UNITS
    inner = own % UNITS
    if (words[PACKED] & BATCH_PAIRED) != 0:
        inner = inner // 2 + inner % 2 * (UNITS // 2)
    first = first_sm(tile * steps, total, num_sms)
    num = first_sm(tile * steps + steps - 1, total, num_sms) - first + 1
    num = gl.where(most == 1, 1, num)
    num = gl.where(unit + u < words[NUM_UNITS], num, 0)
    return parts + tile * most * (PRODUCT_TILE * ROWS) + inner * WIDTH + c, num


@gluon.jit
def ask_parts(words, parts, unit, num_sms, ROWS: gl.constexpr):
    """The first parts of a round's products."""
    at, num = first_parts(words, parts, unit, num_sms, ROWS)
    asked = ()
    for i in gl.static_range(PARTS_ASKED):
        asked += single(load_part(at, i, num, ROWS))
    return asked


@gluon.jit
def sum_of_parts(words, parts, asked, unit, num_sms, ROWS: gl.constexpr):
    """[4 units, 8 ROWS] products of a round, of which ask_parts gave the first parts."""
    y = asked[0]
    for i in gl.static_range(1, PARTS_ASKED):
        y += asked[i]
    if words[SRC] > PARTS_ASKED:
        at, num = first_parts(words, parts, unit, num_sms, ROWS)
        for p in range(keep(PARTS_ASKED.value), keep(words[SRC]), PARTS_ASKED):
            more = ()
            for i in gl.static_range(PARTS_ASKED):
                more += single(load_part(at, p + i, num, ROWS))
            for i in gl.static_range(PARTS_ASKED):
                y += more[i]
    return y


@gluon.jit
def load_part(at, number, num, ROWS: gl.constexpr):
    """Part `number` of `num`, zeros where there is none."""
    mine = (number < num).broadcast_to([ROUND_UNITS, UNIT_ROWS * ROWS])
    at += number * (PRODUCT_TILE * ROWS)
    return gl.load(at, mask=mine, other=0.0, cache_modifier=".cg")
