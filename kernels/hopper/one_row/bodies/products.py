"""Products of weight tiles and x: what a linear task does from the poll of x to its sums, in PTX.

In: words of x in registers, weight tiles in the ring. Out: each warp's sums of its columns, in
shared memory. A warp stages the 128 columns of a chunk that it multiplies itself, releases a tile
alone, has the first tiles in registers before x is there, and loads the others while it multiplies:
no barrier but that before the sums are added up. Gluon would put two barriers into the work on a
tile, and copy each register of x. Next on the walk: linear.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.gluon_compat import reinterpret
from distmega.kernels.hopper.plan.words import TILE_K
from distmega.kernels.hopper.ptx.products import (
    aim_asm,
    multiply_asm,
    multiply_operands,
    store_asm,
    store_operands,
    take_asm,
    take_operands,
    take_types,
)
from distmega.kernels.hopper.ptx.shapes import PER_THREAD, PLAIN, THREADS

CHUNK_BYTES = gl.constexpr(2 * TILE_K)
"""Of x in shared memory: [8 warps, 2 slices, 4, 8] pairs of columns, a lane's eight together."""


@gluon.jit
def write_addresses():
    """Writes into every 8 bytes of shared memory their own address; the last 15 bytes may go
    without, for no store reaches past the end.
    """
    # Triton says nowhere where a buffer lies: so memory holds its own address (see address_of)
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred more;
        .reg .b32 at, next, end;
        mov.u32 at, global_smem;
        mov.u32 end, %dynamic_smem_size;
        add.u32 end, at, end;
        sub.u32 end, end, 15;
        shl.b32 $0, $1, 4;
        add.u32 at, at, $0;
        WRITE:
        setp.lt.u32 more, at, end;
        add.u32 next, at, 8;
        @more st.shared.v4.b32 [at], {at, at, next, next};
        add.u32 at, at, 4096;
        @more bra WRITE;
        }
        """,
        "=&r,r",
        [gl.arange(0, THREADS, layout=PER_THREAD)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def address_of(buffer):
    """Of a buffer that nothing was written to since write_addresses. PTX may use the buffer up to
    where keep_alive names it: Triton, which sees no more of it, would give its memory away.
    """
    labels = reinterpret(buffer, gl.int32, [1], PLAIN).load(PER_THREAD)
    return gl.sum(labels, axis=0)


@gluon.jit
def own_word():
    """First of the two words of a chunk of x that a thread stages: [256]."""
    thread = gl.arange(0, THREADS, layout=PER_THREAD)
    return thread // 32 * 32 + thread % 32 // 16 * 256 + thread % 16 * 2


@gluon.jit
def aim(ring, slot):
    """Addresses in shared memory for each thread: where it stages its first word of x (the second
    being 32 bytes further), its part of x, its row of the ring's slot, its sums of a group, and the
    slot's barrier.

    They are found at this point, and not later: before x is waited for. ring: RingAddresses.
    """
    bufs, ready, _, xs, sums, _ = ring
    # one impure block: else addresses are computed where they are used, behind the poll
    return gl.inline_asm_elementwise(
        aim_asm(),
        "=&r,=&r,=&r,=&r,=&r,r,r,r,r,r",
        [bufs + gl.full([THREADS], 0, gl.int32, layout=PER_THREAD), xs, sums, ready, slot],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def store_x(at, pairs, NUM: gl.constexpr):
    """A thread's pairs of columns of NUM chunks of x into shared memory."""
    if NUM == 1:
        args = [at, pairs[0], pairs[1]]
    elif NUM == 2:
        args = [at, pairs[0], pairs[1], pairs[2], pairs[3]]
    else:
        args = [
            at, pairs[0], pairs[1], pairs[2], pairs[3], pairs[4], pairs[5], pairs[6], pairs[7],
        ]  # fmt: skip
    # behind a store of Triton's all warps meet; here a warp reads what it wrote itself
    gl.inline_asm_elementwise(
        store_asm(NUM), store_operands(NUM), args, dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def take_tiles(ring, aims, num_tiles, phase, STAGES: gl.constexpr):
    """The ring's next tiles in registers, HELD of them or all, while x is on its way. aims: see
    aim; phase: of the slot there. To be given to multiply_tiles, which frees their slots.
    """
    _, ready, free, _, _, _ = ring
    _, _, tile, _, bar = aims
    # tiles in registers before x comes; a load of Triton's would be moved behind the poll
    return gl.inline_asm_elementwise(
        take_asm(STAGES),
        take_operands(),
        [tile, bar, phase, num_tiles, ready, ready + 8 * STAGES, free - ready],
        dtype=take_types(),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def multiply_tiles(
    ring, aims, taken, num_tiles, num_tiles_k, ss, norm, STAGES: gl.constexpr
):  # fmt: skip
    """The ring's next num_tiles tiles times x, num_tiles_k to a unit of 8 rows; each warp's sums of
    its units go to shared memory, and its sum of ss, unless norm is negative. aims: see aim; taken:
    the first of the tiles, see take_tiles.
    """
    _, ready, free, _, _, squares = ring
    _, x, _, sums, _ = aims
    rest = (
        ready, ready + 8 * STAGES, free - ready, x, sums, num_tiles, num_tiles_k, ss, squares, norm,
    )  # fmt: skip
    # no barrier of all warps from the first product to the last, and no copy of a register of x
    gl.inline_asm_elementwise(
        multiply_asm(STAGES),
        multiply_operands(),
        taken + rest,
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
