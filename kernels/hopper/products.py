"""Products of weight tiles and x in PTX: what a linear task does from the poll of x to its sums.

In: words of x in registers, weight tiles in the ring. Out: each warp's sums of its columns, in
shared memory. A warp stages the 128 columns of a chunk that it multiplies itself, releases a tile
alone, and loads the next tile while it multiplies one: no barrier but that before the sums are
added up. Gluon would put two barriers into the work on a tile, and copy each register of x.

Of a tile, 16 slices of 8 rows by 64 columns, warp w takes slices w and w + 8. They are rows 0 to 7
and 8 to 15 of the left operand of m16n8k16. Of the right operand even columns hold x of slice w,
odd ones x of slice w + 8, so that the sums of row r are in elements (r, 0) and (r + 8, 1).
Next on the walk: linear.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from distmega.kernels.gluon_compat import reinterpret
from distmega.kernels.hopper.ptx import multiply, number_operands, registers, wait, zeros
from distmega.kernels.hopper.shapes import PER_THREAD, PLAIN, THREADS
from distmega.kernels.hopper.words import TILE_BYTES, TILE_K

CHUNK_BYTES = gl.constexpr(2 * TILE_K)
"""Of x in shared memory: [8 warps, 2 slices, 4, 8] pairs of columns, a lane's eight together."""
STEPS = 4
"""Products of 16 columns in a slice."""
UNIT_BYTES = 32
"""Sums of a unit: 8 rows, f32."""


@gluon.jit
def write_addresses():
    """Writes into every 8 bytes of shared memory their own address; the last 15 bytes may go
    without, for no store reaches past the end.
    """
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


@constexpr_function
def aim_asm() -> str:
    """See aim. Operands 5 to 9: the ring, x, sums, the ring's barriers, the slot."""
    return f"""
        {{
        .reg .b32 lane, warp, at, part;
        mov.u32 lane, %tid.x;
        shr.u32 warp, lane, 5;
        and.b32 lane, lane, 31;
        mad.lo.u32 $0, warp, 256, $6;
        shr.u32 at, lane, 4;
        mad.lo.u32 $0, at, 128, $0;
        and.b32 at, lane, 1;
        mad.lo.u32 $0, at, 64, $0;
        and.b32 at, lane, 14;
        mad.lo.u32 $0, at, 2, $0;
        mad.lo.u32 $1, warp, 256, $6;
        and.b32 at, lane, 4;
        mad.lo.u32 $1, at, 32, $1;
        and.b32 at, lane, 3;
        mad.lo.u32 $1, at, 32, $1;
        mad.lo.u32 $2, warp, 1024, $5;
        mad.lo.u32 $2, $9, {TILE_BYTES}, $2;
        and.b32 at, lane, 8;
        mad.lo.u32 $2, at, 1024, $2;
        and.b32 at, lane, 7;
        mad.lo.u32 $2, at, 128, $2;
        shr.u32 part, lane, 4;
        xor.b32 part, part, at;
        mad.lo.u32 $2, part, 16, $2;
        shr.u32 at, lane, 2;
        mad.lo.u32 $3, at, 4, $7;
        mad.lo.u32 $3, warp, 256, $3;
        mad.lo.u32 $4, $9, 8, $8;
        }}
        """


@gluon.jit
def aim(places, slot):
    """Addresses in shared memory for each thread: where it stages its first word of x (the second
    being 32 bytes further), its part of x, its row of the ring's slot, its sums of a group, and the
    slot's barrier.

    They are found at this point, and not later: before x is waited for. places: see kernel.decode.
    """
    bufs, ready, _, xs, sums, _ = places
    return gl.inline_asm_elementwise(
        aim_asm(),
        "=&r,=&r,=&r,=&r,=&r,r,r,r,r,r",
        [bufs + gl.full([THREADS], 0, gl.int32, layout=PER_THREAD), xs, sums, ready, slot],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@constexpr_function
def store_asm(num_chunks: int) -> str:
    """Two words of each chunk to $1 on; they belong to neighbouring lanes."""
    lines = ["mov.b32 $0, 0;"]
    for chunk in range(num_chunks):
        for i in (0, 1):
            lines.append(f"st.shared.b32 [$1+{2 * TILE_K * chunk + 32 * i}], ${2 + 2 * chunk + i};")
    return "\n".join(lines)


@constexpr_function
def store_operands(num_chunks: int) -> str:
    return "=&r,r" + ",r,r" * num_chunks


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
    gl.inline_asm_elementwise(
        store_asm(NUM), store_operands(NUM), args, dtype=gl.int32, is_pure=False, pack=1
    )


@constexpr_function
def weight_lines(s: str, label: str, stages: int) -> list[str]:
    """The ring's next tile into registers of set s, once it has landed."""
    lines = wait(label, "bar", "phase")
    for step in range(STEPS):
        lines += [
            f"xor.b32 at, tile, {32 * step};",
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 "
            f"{{{registers(f'w{s}', 4 * step, 4)}}}, [at];",
        ]
    return [
        *lines,
        f"add.u32 free{s}, bar, $GAP;",
        f"add.u32 tile, tile, {TILE_BYTES};",
        "add.u32 bar, bar, 8;",
        "setp.eq.u32 p, bar, $END;",
        f"@p sub.u32 tile, tile, {TILE_BYTES * stages};",
        "@p mov.u32 bar, $READY;",
        "@p xor.b32 phase, phase, 1;",
    ]


@constexpr_function
def x_lines(s: str) -> list[str]:
    """The next chunk of x, the first after the last, into registers of set s."""
    return [
        *(
            f"ld.shared.v4.b32 {{{registers(f'x{s}', 4 * half, 4)}}}, [x+{16 * half}];"
            for half in (0, 1)
        ),
        f"add.u32 x, x, {2 * TILE_K};",
        "setp.eq.u32 p, x, x_end;",
        "@p mov.u32 x, $X;",
    ]


@constexpr_function
def product_lines(s: str) -> list[str]:
    """The products of set s; the tile is free then. After a unit's last, its sums are written."""
    lines = [
        multiply(
            registers("cd"[step % 2], 0, 4),
            registers(f"w{s}", 4 * step, 4),
            registers(f"x{s}", 2 * step, 2),
        )
        for step in range(STEPS)
    ]
    return [
        *lines,
        f"@one mbarrier.arrive.shared::cta.b64 _, [free{s}];",
        "sub.u32 k, k, 1;",
        "setp.ne.u32 p, k, 0;",
        f"@p bra.uni SAME{s};",
        "add.f32 y, c0, c3;",
        "add.f32 z, d0, d3;",
        "add.f32 y, y, z;",
        "@quarter st.shared.f32 [sums], y;",
        f"add.u32 sums, sums, {UNIT_BYTES};",
        "mov.u32 k, $TILES_K;",
        *zeros("cd"),
        f"SAME{s}:",
    ]


@constexpr_function
def begin_lines() -> list[str]:
    """Everything before the first tile."""
    return [
        ".reg .pred p, more, one, quarter, normed, store;",
        ".reg .b32 lane, at, x, x_end, tile, bar, phase, sums, left, k;",
        ".reg .b32 freeA, freeB, wA<16>, wB<16>, xA<8>, xB<8>;",
        ".reg .f32 c<4>, d<4>, cA<4>, dA<4>, cB<4>, dB<4>, y, z, none;",
        "mov.u32 lane, %laneid;",
        "setp.eq.u32 one, lane, 0;",
        "and.b32 at, lane, 3;",
        "setp.eq.u32 quarter, at, 0;",
        "mov.u32 x, $X;",
        f"mad.lo.u32 x_end, $TILES_K, {2 * TILE_K}, x;",
        "mov.u32 sums, $SUMS;",
        "mov.u32 tile, $TILE;",
        "mov.u32 bar, $BAR;",
        "mov.u32 phase, $PHASE;",
        "mov.u32 left, $NUM_TILES;",
        "mov.u32 k, $TILES_K;",
        "mov.f32 y, $SS;",
        "setp.ge.s32 normed, $NORM, 0;",
        "bar.warp.sync 0xffffffff;",
    ]


@constexpr_function
def square_lines() -> list[str]:
    """The sum of squares over the warp, while the first tile is on its way to registers."""
    lines = ["@!normed bra.uni BEGIN;"]
    for far in (16, 8, 4, 2, 1):
        lines += [f"shfl.sync.bfly.b32 z, y, {far}, 31, 0xffffffff;", "add.f32 y, y, z;"]
    return [
        *lines,
        "mov.u32 at, %tid.x;",
        "shr.u32 at, at, 5;",
        "mad.lo.u32 at, at, 4, $SQUARES;",
        "@one st.shared.f32 [at], y;",
        "BEGIN:",
    ]


@constexpr_function
def general_lines(stages: int) -> list[str]:
    """Units of any number of tiles, the first of which is in set A."""
    return [
        *x_lines("A"),
        "LOOP:",
        "setp.gt.s32 more, left, 1;",
        "@!more bra.uni PRODUCTA;",
        *weight_lines("B", "WAIT1", stages),
        *x_lines("B"),
        "PRODUCTA:",
        *product_lines("A"),
        "@!more bra.uni DONE;",
        "setp.gt.s32 more, left, 2;",
        "@!more bra.uni PRODUCTB;",
        *weight_lines("A", "WAIT2", stages),
        *x_lines("A"),
        "PRODUCTB:",
        *product_lines("B"),
        "sub.s32 left, left, 2;",
        "@more bra.uni LOOP;",
    ]


@constexpr_function
def unit_lines(s: str) -> list[str]:
    """The products of a unit of one tile, in set s; and the sums of the unit before."""
    before = "AB"[s == "A"]
    lines = []
    for step in range(STEPS):
        sums = registers(f"{'cd'[step % 2]}{s}", 0, 4)
        text = multiply(sums, registers(f"w{s}", 4 * step, 4), registers("xA", 2 * step, 2))
        lines.append(
            text if step > 1 else text.replace(f"{{{sums}}};", "{none, none, none, none};")
        )
    return [*lines, f"@one mbarrier.arrive.shared::cta.b64 _, [free{s}];", *sum_lines(before)]


@constexpr_function
def sum_lines(s: str) -> list[str]:
    """The sums of a unit of one tile, in set s, if there was one."""
    return [
        f"add.f32 y, c{s}0, c{s}3;",
        f"add.f32 z, d{s}0, d{s}3;",
        "add.f32 y, y, z;",
        "@store st.shared.f32 [sums], y;",
        f"add.u32 sums, sums, {UNIT_BYTES};",
    ]


@constexpr_function
def single_lines(stages: int) -> list[str]:
    """Units of one tile, the first of which is in set A: x stays in registers, and sums are written
    while the next unit is multiplied.
    """
    return [
        *x_lines("A"),
        f"sub.u32 sums, sums, {UNIT_BYTES};",
        "setp.gt.u32 store, lane, 31;",
        "mov.f32 none, 0f00000000;",
        *zeros(("cB", "dB")),
        "NEXT:",
        "setp.gt.s32 more, left, 1;",
        "@!more bra.uni UNITA;",
        *weight_lines("B", "WAIT3", stages),
        "UNITA:",
        *unit_lines("A"),
        "mov.pred store, quarter;",
        "@!more bra.uni LASTA;",
        "setp.gt.s32 more, left, 2;",
        "@!more bra.uni UNITB;",
        *weight_lines("A", "WAIT4", stages),
        "UNITB:",
        *unit_lines("B"),
        "sub.s32 left, left, 2;",
        "@more bra.uni NEXT;",
        *sum_lines("B"),
        "bra.uni DONE;",
        "LASTA:",
        *sum_lines("A"),
    ]


@constexpr_function
def multiply_asm(stages: int) -> str:
    """See multiply_tiles. Operand 0 is 0."""
    operands = (
        "TILE", "BAR", "READY", "END", "GAP", "X", "SUMS", "NUM_TILES", "TILES_K", "PHASE", "SS",
        "SQUARES", "NORM",
    )  # fmt: skip
    lines = [
        *begin_lines(),
        *weight_lines("A", "WAIT0", stages),
        *square_lines(),
        "setp.eq.u32 p, k, 1;",
        "@p bra.uni SINGLE;",
        *zeros("cd"),
        *general_lines(stages),
        "bra.uni DONE;",
        "SINGLE:",
        *single_lines(stages),
        "DONE:",
        "mov.b32 $0, 0;",
    ]
    text: str = number_operands(lines, operands, 1)
    return text


@gluon.jit
def multiply_tiles(
    places, aims, num_tiles, num_tiles_k, phase, ss, norm, STAGES: gl.constexpr
):  # fmt: skip
    """The ring's next num_tiles tiles times x, num_tiles_k to a unit of 8 rows; each warp's sums of
    its units go to shared memory, and its sum of ss, unless norm is negative. aims: see aim; phase:
    of the slot there.
    """
    _, ready, free, _, _, squares = places
    _, x, tile, sums, bar = aims
    gl.inline_asm_elementwise(
        multiply_asm(STAGES),
        "=&r" + ",r" * 10 + ",f,r,r",
        [
            tile, bar, ready, ready + 8 * STAGES, free - ready, x, sums, num_tiles, num_tiles_k,
            phase, ss, squares, norm,
        ],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )  # fmt: skip
