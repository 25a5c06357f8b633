"""The PTX of products of weight tiles and x; one_row/bodies/products.py says who does what.

Of a tile, 16 slices of 8 rows by 64 columns, warp w takes slices w and w + 8. They are rows 0 to 7
and 8 to 15 of the left operand of m16n8k16. Of the right operand even columns hold x of slice w,
odd ones x of slice w + 8, so that the sums of row r are in elements (r, 0) and (r + 8, 1).
Next on the walk: one_row/bodies/products.py.
"""

from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from distmega.kernels.hopper.plan.words import TILE_BYTES, TILE_K
from distmega.kernels.hopper.ptx.pieces import multiply, number_operands, registers, wait, zeros

STEPS = 4
"""Products of 16 columns in a slice."""
UNIT_BYTES = 32
"""Sums of a unit: 8 rows, f32."""
HELD = 2
"""Tiles that are in registers before x is there; even."""
SETS = "ABCD"[:HELD]
NUM_TAKEN = 17 * HELD + 3
"""Results of products.take_tiles."""


@constexpr_function
def aim_asm() -> str:
    """See aim. Operands 5 to 9: the ring, x, sums, the ring's barriers, the slot.

    $0: where the thread stages x, in the order in which lanes take it as the right operand, so that
    a lane's columns are two vectors. $1: those of its lane. $2: its row of a tile for ldmatrix, the
    part of 16 bytes swizzled by the row as the copy engine left it. $3, $4: its sums, its barrier.
    """
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


@constexpr_function
def store_asm(num_chunks: int) -> str:
    """Two words of each chunk to $1 on; they belong to neighbouring lanes."""
    # a result must be there, though nobody takes it: Triton has no asm without one
    lines = ["mov.b32 $0, 0;"]
    for chunk in range(num_chunks):
        for i in (0, 1):
            lines.append(f"st.shared.b32 [$1+{2 * TILE_K * chunk + 32 * i}], ${2 + 2 * chunk + i};")
    return "\n".join(lines)


@constexpr_function
def store_operands(num_chunks: int) -> str:
    return "=&r,r" + ",r,r" * num_chunks


@constexpr_function
def weight_lines(to: str, first: int, label: str, stages: int) -> list[str]:
    """The ring's next tile into 16 registers of a name, from number `first` on, once it has landed;
    $FREE is the barrier that frees it.
    """
    # the step stands in the bits that the swizzle changes, so it goes in by xor
    lines = wait(label, "bar", "phase")
    for step in range(STEPS):
        lines += [
            f"xor.b32 at, tile, {32 * step};",
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 "
            f"{{{registers(to, first + 4 * step, 4)}}}, [at];",
        ]
    return [
        *lines,
        # barriers that free slots lie GAP behind those that say they are full; the ring ends at END
        "add.u32 $FREE, bar, $GAP;",
        f"add.u32 tile, tile, {TILE_BYTES};",
        "add.u32 bar, bar, 8;",
        "setp.eq.u32 p, bar, $END;",
        f"@p sub.u32 tile, tile, {TILE_BYTES * stages};",
        "@p mov.u32 bar, $READY;",
        "@p xor.b32 phase, phase, 1;",
    ]


@constexpr_function
def take_asm(stages: int) -> str:
    """See take_tiles. Results: registers of each set, what frees each, and tile, bar and phase of
    the next.
    """
    operands = ("TILE", "BAR", "PHASE", "LEFT", "READY", "END", "GAP")
    lines = [
        ".reg .pred p;",
        ".reg .b32 at, tile, bar, phase;",
        "mov.u32 tile, $TILE;",
        "mov.u32 bar, $BAR;",
        "mov.u32 phase, $PHASE;",
    ]
    for i in range(HELD):
        if i:  # a task of fewer tiles must not wait for the next one's
            lines += [f"setp.le.s32 p, $LEFT, {i};", "@p bra.uni TAKEN;"]
        load = weight_lines("$", 16 * i, f"WAIT{i}", stages)
        lines += [line.replace("$FREE", f"${16 * HELD + i}") for line in load]
    lines.append("TAKEN:")
    lines += [
        f"mov.b32 ${17 * HELD + i}, {name};" for i, name in enumerate(("tile", "bar", "phase"))
    ]
    text: str = number_operands(lines, operands, NUM_TAKEN)
    return text


@constexpr_function
def take_operands() -> str:
    return ",".join(["=&r"] * NUM_TAKEN + ["r"] * 7)


@constexpr_function
def take_types() -> tuple[gl.dtype, ...]:
    return (gl.int32,) * NUM_TAKEN


@constexpr_function
def refill_lines(i: int, kind: str, stages: int) -> list[str]:
    """The tile after those in registers into set i, if there is one."""
    # as soon as the set is free, HELD tiles ahead: other sets are multiplied meanwhile
    load = weight_lines(f"w{SETS[i]}", 0, f"WAIT{kind}{i}", stages)
    return [
        f"setp.le.s32 p, left, {HELD};",
        f"@p bra.uni KEEP{kind}{i};",
        *(line.replace("$FREE", f"free{SETS[i]}") for line in load),
        f"KEEP{kind}{i}:",
        "sub.s32 left, left, 1;",
    ]


@constexpr_function
def x_lines(s: str) -> list[str]:
    """The next chunk of x, the first after the last, into registers of set s."""
    # x is read again for every unit: registers for all of it are not there
    return [
        *(
            f"ld.shared.v4.b32 {{{registers(f'x{s}', 4 * half, 4)}}}, [x+{16 * half}];"
            for half in (0, 1)
        ),
        f"add.u32 x, x, {2 * TILE_K};",
        "setp.eq.u32 p, x, x_end;",
        "@p mov.u32 x, $X;",
    ]


SHARE = ("setp.ne.u32 share, far, 0;", "shfl.sync.bfly.b32 other, ss, far, 31, 0xffffffff;")
SHARED = ("@share add.f32 ss, ss, other;", "shr.u32 far, far, 1;")
"""A fifth of the sum of squares over a warp: each begins before some products and ends behind."""


@constexpr_function
def begin_lines() -> list[str]:
    """Everything before the first product."""
    return [
        ".reg .pred p, one, quarter, normed, store, share;",
        ".reg .b32 lane, at, x, x_end, tile, bar, phase, sums, left, k, far;",
        *(f".reg .b32 free{s}, w{s}<16>;" for s in SETS),
        ".reg .b32 xA<8>, xB<8>;",
        ".reg .f32 c<4>, d<4>, cA<4>, dA<4>, cB<4>, dB<4>, y, z, none, ss, other;",
        # without a norm nothing is summed: far is 0 at once
        "setp.ge.s32 normed, $NORM, 0;",
        "selp.b32 far, 16, 0, normed;",
        "mov.f32 ss, $SS;",
        *SHARE,
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
        # copies, since operands that come in may not be written
        *(f"mov.b32 w{s}{i}, $W{s}{i};" for s in SETS for i in range(16)),
        *(f"mov.b32 free{s}, $F{s};" for s in SETS),
        # lanes have staged x for each other; other warps' x is none of this one's
        "bar.warp.sync 0xffffffff;",
        *x_lines("A"),
        *SHARED,
        "setp.eq.u32 p, k, 1;",
        "@p bra.uni SINGLE;",
    ]


@constexpr_function
def general_lines(stages: int) -> list[str]:
    """Units of any number of tiles."""
    lines = [*zeros("cd"), "NEXT:"]
    for i, s in enumerate(SETS):
        mine, other = "AB"[i % 2], "BA"[i % 2]
        lines += [*x_lines(other), *SHARE]
        for step in range(STEPS):
            right = registers(f"x{mine}", 2 * step, 2)
            left = registers(f"w{s}", 4 * step, 4)
            # two chains of sums, c and d: a product need not wait for the one before
            lines.append(multiply(registers("cd"[step % 2], 0, 4), left, right))
        lines += [
            # one lane a warp: the barrier counts warps. ldmatrix is done, since products took it
            f"@one mbarrier.arrive.shared::cta.b64 _, [free{s}];",
            *SHARED,
            "sub.u32 k, k, 1;",
            "setp.ne.u32 p, k, 0;",
            f"@p bra.uni SAME{i};",
            *sum_lines("", "quarter"),
            "mov.u32 k, $TILES_K;",
            *zeros("cd"),
            f"SAME{i}:",
            "setp.le.s32 p, left, 1;",
            "@p bra.uni DONE;",
            *refill_lines(i, "G", stages),
        ]
    return [*lines, "bra.uni NEXT;"]


@constexpr_function
def sum_lines(s: str, wanted: str) -> list[str]:
    """The sums of a unit, in set s."""
    # even columns hold x of one slice, odd ones of the other: of the four only 0 and 3 match rows
    return [
        f"add.f32 y, c{s}0, c{s}3;",
        f"add.f32 z, d{s}0, d{s}3;",
        "add.f32 y, y, z;",
        f"@{wanted} st.shared.f32 [sums], y;",
        f"add.u32 sums, sums, {UNIT_BYTES};",
    ]


@constexpr_function
def single_lines(stages: int) -> list[str]:
    """Units of one tile: x stays in registers, and sums are written while the next unit is
    multiplied.
    """
    lines = [
        # the first sums stored are of no unit: the predicate store is false for all lanes
        f"sub.u32 sums, sums, {UNIT_BYTES};",
        "setp.gt.u32 store, lane, 31;",
        "mov.f32 none, 0f00000000;",
        *zeros(("cB", "dB")),
        "UNIT:",
    ]
    for i, s in enumerate(SETS):
        mine, before = "AB"[i % 2], "BA"[i % 2]
        lines += SHARE
        for step in range(STEPS):
            sums = registers(f"{'cd'[step % 2]}{mine}", 0, 4)
            text = multiply(sums, registers(f"w{s}", 4 * step, 4), registers("xA", 2 * step, 2))
            if step < 2:  # sums begin at zero without eight moves
                text = text.replace(f"{{{sums}}};", "{none, none, none, none};")
            lines.append(text)
        lines += [
            f"@one mbarrier.arrive.shared::cta.b64 _, [free{s}];",
            *sum_lines(before, "store"),
            "mov.pred store, quarter;",
            *SHARED,
            "setp.le.s32 p, left, 1;",
            f"@p bra.uni LAST{mine};",
            *refill_lines(i, "S", stages),
        ]
    return [
        *lines,
        "bra.uni UNIT;",
        "LASTA:",
        *sum_lines("A", "store"),
        "bra.uni DONE;",
        "LASTB:",
        *sum_lines("B", "store"),
    ]


@constexpr_function
def multiply_asm(stages: int) -> str:
    """See multiply_tiles. Operand 0 is 0."""
    operands = (
        *(f"W{s}{i}" for s in SETS for i in range(16)), *(f"F{s}" for s in SETS),
        "TILE", "BAR", "PHASE", "READY", "END", "GAP", "X", "SUMS", "NUM_TILES", "TILES_K", "SS",
        "SQUARES", "NORM",
    )  # fmt: skip
    lines = [
        *begin_lines(),
        *general_lines(stages),
        "SINGLE:",
        *single_lines(stages),
        "DONE:",
        # few products may have left part of the sum over the warp undone
        "setp.eq.u32 p, far, 0;",
        "@p bra.uni SUMMED;",
        *SHARE,
        *SHARED,
        "bra.uni DONE;",
        "SUMMED:",
        "setp.ge.and.s32 normed, $NORM, 0, one;",
        "mov.u32 at, %tid.x;",
        "shr.u32 at, at, 5;",
        "mad.lo.u32 at, at, 4, $SQUARES;",
        "@normed st.shared.f32 [at], ss;",
        "mov.b32 $0, 0;",
    ]
    text: str = number_operands(lines, operands, 1)
    return text


@constexpr_function
def multiply_operands() -> str:
    return "=&r" + ",r" * (NUM_TAKEN + 7) + ",f,r,r"
