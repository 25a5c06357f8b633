"""The PTX of attention on a block of 128 cached positions. Who does what says
one_row/bodies/blocks.py.

Shared memory, from the queries on: 8 queries [2 slices, or 4, 4, 8] pairs of columns, a lane's
eight together; weights of two blocks in turn [8 warps, 32 lanes, 2] pairs of positions, each two
the right operand of a product; of two blocks in turn [8 warps, 8 queries], maximum and sum, f32. Of
a ring slot, rows are positions of 128 bytes, whose parts of 16 are swizzled. Next on the walk:
one_row/bodies/blocks.py.
"""

from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from distmega.kernels.hopper.plan.words import TILE_BYTES
from distmega.kernels.hopper.ptx.pieces import (
    multiply,
    next_slot,
    number_operands,
    registers,
    wait,
    zeros,
)
from distmega.kernels.powers import LOG2_E

WEIGHTS_BYTES = 2048
SUMS_BYTES = 512
POSITIONS = 128
FAR = {64: 16, 128: 128, 256: 256}
"""Bytes from a column of the first half of a query to that of the second, by head dim."""
LOWEST = "0fFF800000"
"""Minus infinity."""


@constexpr_function
def query_bytes(halves: int) -> int:
    """From a query to the next."""
    return 256 if halves <= 2 else 512


@constexpr_function
def weights_at(halves: int) -> int:
    """Bytes from the queries to the weights of the first block."""
    start: int = 8 * query_bytes(halves)
    return start


@constexpr_function
def sums_at(halves: int) -> int:
    """Bytes from the queries to the maxima and sums of the first block."""
    start: int = weights_at(halves) + 2 * WEIGHTS_BYTES
    return start


@constexpr_function
def block_bytes(halves: int) -> int:
    """Of all that attention has there."""
    whole: int = sums_at(halves) + 2 * SUMS_BYTES
    return whole


@constexpr_function
def aim_asm(halves: int) -> str:
    """See blocks.aim_block. Operands 8: the ring, 9: queries, 10: number of the last query.

    Lanes of rows past the last query take the last again, so that none reads what is not there. $0
    to $7 are in the order of aim_block; parts of 16 bytes of keys and values are swizzled by the
    row, as the copy engine left them.
    """
    return f"""
        {{
        .reg .b32 lane, warp, row, at, part;
        mov.u32 lane, %tid.x;
        shr.u32 warp, lane, 5;
        and.b32 lane, lane, 31;
        shr.u32 row, lane, 2;
        min.u32 at, row, $10;
        mad.lo.u32 $0, at, {query_bytes(halves)}, $9;
        and.b32 at, lane, 3;
        mad.lo.u32 $0, at, 32, $0;
        mad.lo.u32 $1, warp, 2048, $8;
        and.b32 at, lane, 15;
        mad.lo.u32 $1, at, 128, $1;
        shr.u32 part, lane, 4;
        and.b32 at, lane, 7;
        xor.b32 part, part, at;
        mad.lo.u32 $1, part, 16, $1;
        mad.lo.u32 $2, lane, 8, $9;
        add.u32 $2, $2, {weights_at(halves)};
        mad.lo.u32 $3, warp, 256, $2;
        mad.lo.u32 $4, warp, 64, $9;
        mad.lo.u32 $4, lane, 16, $4;
        add.u32 $4, $4, {sums_at(halves)};
        mad.lo.u32 $5, row, 8, $9;
        add.u32 $5, $5, {sums_at(halves)};
        mad.lo.u32 $7, warp, 16, row;
        shr.u32 part, lane, 4;
        mad.lo.u32 part, part, 8, at;
        mad.lo.u32 $6, part, 128, $8;
        shl.b32 part, warp, 1;
        and.b32 part, part, 6;
        shr.u32 row, lane, 3;
        and.b32 row, row, 1;
        add.u32 part, part, row;
        xor.b32 part, part, at;
        mad.lo.u32 $6, part, 16, $6;
        }}
        """


@constexpr_function
def query_lines(half: int) -> list[str]:
    """A lane's part of 64 columns of its query: eight of the registers q0 to q15."""
    return [
        f"ld.shared.v4.b32 {{{registers('q', half % 2 * 8 + 4 * i, 4)}}}, "
        f"[$QUERY+{128 * half + 16 * i}];"
        for i in (0, 1)
    ]


@constexpr_function
def key_lines(halves: int, stages: int) -> list[str]:
    """Scores of a warp's 16 positions, keys as the left operand: c0 to c3."""
    # queries first: they lie in shared memory already, while keys may still be on their way
    lines = [line for half in range(min(halves, 2)) for line in query_lines(half)]
    for half in range(halves):
        lines += [
            *(query_lines(half) if half > 1 else []),
            *(next_slot(stages) if half else []),
            "mad.lo.u32 bar, slot, 8, $READY;",
            *wait(f"WAIT{half}", "bar", "phase"),
            f"mad.lo.u32 tile, slot, {TILE_BYTES}, $KEYS;",
        ]
        for step in range(4):
            lines += [
                f"xor.b32 at, tile, {32 * step};",
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {k0, k1, k2, k3}, [at];",
                multiply(
                    registers("cd"[step % 2], 0, 4),
                    registers("k", 0, 4),
                    registers("q", half % 2 * 8 + 2 * step, 2),
                ),
            ]
        lines += [
            # once the keys are in registers the loader may fill the slot
            "mad.lo.u32 bar, slot, 8, $FREE;",
            "@one mbarrier.arrive.shared::cta.b64 _, [bar];",
        ]
    # two chains, c and d: a product need not wait for the one before
    return [*zeros("cd"), *lines, *(f"add.f32 c{i}, c{i}, d{i};" for i in range(4))]


@constexpr_function
def over_rows(operation: str, name: str) -> list[str]:
    """Two registers of a name, summed or else over the warp's rows of lanes."""
    lines = []
    # lanes 4 apart have the same queries, two each: three steps are all eight rows
    for far in (4, 8, 16):
        lines += [f"shfl.sync.bfly.b32 n{i}, {name}{i}, {far}, 31, 0xffffffff;" for i in (0, 1)]
        lines += [f"{operation}.f32 {name}{i}, {name}{i}, n{i};" for i in (0, 1)]
    return lines


@constexpr_function
def cap_lines(softcap: float) -> list[str]:
    """Scores c0 to c3, times log2(e), as softcap * tanh(score / softcap), times that too. tanh(x)
    is 1 - 2 / (1 + exp(2 x)); an exponential beyond all numbers leaves 1, one below them -1.
    """
    if not softcap:
        return []
    inner, outer = 2.0 / softcap, softcap * LOG2_E
    lines = []
    for i in range(4):
        lines += [
            f"mul.f32 c{i}, c{i}, {inner:.9e};",
            f"ex2.approx.ftz.f32 c{i}, c{i};",
            f"add.f32 c{i}, c{i}, {1.0:.9e};",
            f"rcp.approx.ftz.f32 c{i}, c{i};",
            f"fma.rn.f32 c{i}, c{i}, {-2.0 * outer:.9e}, {outer:.9e};",
        ]
    return lines


@constexpr_function
def weight_lines(softcap: float, biased: bool) -> list[str]:
    """Scores c0 to c3 as weights relative to the warp's maximum, into shared memory with it."""
    lines = [f"mad.lo.u32 at, $BLOCK, {POSITIONS}, $PLACE;"]
    for i in (0, 1):
        lines += [
            f"setp.ge.s32 seen{i}, at, $FIRST;",
            f"setp.le.and.s32 seen{i}, at, $POSITION, seen{i};",
            "add.u32 at, at, 8;",
        ]
    capped = cap_lines(softcap)
    num = len(capped) // 4
    for i in range(4):
        lines += [
            f"mul.f32 c{i}, c{i}, $SCALE;",
            *capped[num * i : num * i + num],
            *([f"fma.rn.f32 c{i}, $BIAS{i}, {LOG2_E:.9e}, c{i};"] if biased else []),
            f"selp.f32 c{i}, c{i}, {LOWEST}, seen{i // 2};",
        ]
    lines += ["max.f32 m0, c0, c2;", "max.f32 m1, c1, c3;", *over_rows("max", "m")]
    # a warp that sees nothing: minus infinity from itself would be no number
    for i in (0, 1):
        lines += [f"setp.eq.f32 p, m{i}, {LOWEST};", f"selp.f32 n{i}, 0f00000000, m{i}, p;"]
    for i in range(4):
        lines += [f"sub.f32 c{i}, c{i}, n{i % 2};", f"ex2.approx.ftz.f32 c{i}, c{i};"]
    return [
        *lines,
        # sums of a product are not as its right operand lies: rows and columns change places
        "cvt.rn.bf16x2.f32 b0, c1, c0;",
        "cvt.rn.bf16x2.f32 b1, c3, c2;",
        "movmatrix.sync.aligned.m8n8.trans.b16 b0, b0;",
        "movmatrix.sync.aligned.m8n8.trans.b16 b1, b1;",
        f"mad.lo.u32 at, $TURN, {WEIGHTS_BYTES}, $WEIGHTS;",
        "st.shared.v2.b32 [at], {b0, b1};",
        "add.f32 l0, c0, c2;",
        "add.f32 l1, c1, c3;",
        *over_rows("add", "l"),
        # after over_rows all lanes have them; the first four are two queries each
        "setp.lt.u32 p, lane, 4;",
        f"mad.lo.u32 at, $TURN, {SUMS_BYTES}, $SUMS;",
        "@p st.shared.v4.f32 [at], {m0, l0, m1, l1};",
    ]


@constexpr_function
def score_asm(halves: int, stages: int, softcap: float = 0.0, biased: bool = False) -> str:
    """See blocks.score_block. Operand 0 is 0."""
    operands = (
        "READY", "FREE", "QUERY", "KEYS", "WEIGHTS", "SUMS", "PLACE", "TURN", "SLOT", "PHASE",
        "BLOCK", "FIRST", "POSITION", "SCALE", *(f"BIAS{i}" for i in range(4 * biased)),
    )  # fmt: skip
    lines = [
        ".reg .pred p, one, seen0, seen1;",
        ".reg .b32 lane, at, slot, phase, tile, bar, b0, b1, q<16>, k<4>;",
        ".reg .f32 c<4>, d<4>, m0, m1, n0, n1, l0, l1;",
        "mov.u32 lane, %laneid;",
        "setp.eq.u32 one, lane, 0;",
        "mov.u32 slot, $SLOT;",
        "mov.u32 phase, $PHASE;",
        *key_lines(halves, stages),
        *weight_lines(softcap, biased),
        "mov.b32 $0, 0;",
    ]
    text: str = number_operands(lines, operands, 1)
    return text


@constexpr_function
def factor_lines() -> list[str]:
    """The warps' weights b0 to b15, made relative to the highest maximum; the new sum."""
    # every warp takes all warps' weights: it adds up columns of its own over all positions
    lines = [f"mad.lo.u32 at, $TURN, {SUMS_BYTES}, $SUMS;"]
    lines += [f"ld.shared.v2.f32 {{m{w}, l{w}}}, [at+{64 * w}];" for w in range(8)]
    lines.append(f"mad.lo.u32 at, $TURN, {WEIGHTS_BYTES}, $WEIGHTS;")
    for w in range(8):
        lines.append(f"ld.shared.v2.b32 {{{registers('b', 2 * w, 2)}}}, [at+{256 * w}];")
    lines.append("max.f32 high, $M, m0;")
    lines += [f"max.f32 high, high, m{w};" for w in range(1, 8)]
    for name, value in (("alpha", "$M"), *((f"m{w}", f"m{w}") for w in range(8))):
        lines += [f"sub.f32 {name}, {value}, high;", f"ex2.approx.ftz.f32 {name}, {name};"]
    # weights are bf16 already, so factors are too: a pair an instruction
    for w in range(8):
        lines.append(f"cvt.rn.bf16x2.f32 both, m{w}, m{w};")
        lines += [f"mul.rn.bf16x2 b{i}, b{i}, both;" for i in (2 * w, 2 * w + 1)]
    lines.append("mul.f32 sum, $L, alpha;")
    return [*lines, *(f"fma.rn.f32 sum, m{w}, l{w}, sum;" for w in range(8))]


@constexpr_function
def num_outputs(halves: int) -> int:
    """Of a thread: four of each 128 columns."""
    return 4 * -(-halves // 2)


@constexpr_function
def value_operands(halves: int) -> str:
    """Constraints of value_asm: outputs, maximum and sum, out and in; what it reads besides."""
    num = num_outputs(halves) + 2
    return ",".join(["=&f"] * num + ["f"] * num + ["r"] * 8)


@constexpr_function
def value_types(halves: int) -> tuple[gl.dtype, ...]:
    """Results of value_asm."""
    types: tuple[gl.dtype, ...] = (gl.float32,) * (num_outputs(halves) + 2)
    return types


@constexpr_function
def part_lines(part: int, halves: int, stages: int) -> list[str]:
    """Adds weighted values of a warp's 16 of 128 columns to c0 to c3 and d0 to d3: the lower warps
    have the first 64, the upper ones the others, in the slot behind, if there is one. slot is that
    of the part's first tile before, the warp's own afterwards.
    """
    number = str(part or "")
    lines = [
        *(["@upper bra.uni FREE;"] if 2 * part + 1 == halves else []),
        # the upper warps' slot stays ahead from part to part
        *(["@!upper bra.uni LOAD;", *next_slot(stages)] if part == 0 and halves > 1 else []),
        f"LOAD{number}:",
        "mad.lo.u32 bar, slot, 8, $READY;",
        *wait(f"WAIT{number}", "bar", "phase"),
        f"mad.lo.u32 tile, slot, {TILE_BYTES}, $VALUES;",
    ]
    for step in range(8):
        row = f"[tile+{2048 * step}]"
        lines += [
            f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{v0, v1, v2, v3}}, {row};",
            multiply(
                registers("cd"[step % 2], 0, 4), registers("v", 0, 4), registers("b", 2 * step, 2)
            ),
        ]
    return lines


@constexpr_function
def sum_lines(part: int) -> list[str]:
    """The part's outputs: those before, times alpha, and what it adds."""
    lines = []
    for i in range(4):
        out = 4 * part + i
        lines += [f"add.f32 c{i}, c{i}, d{i};", f"fma.rn.f32 ${out}, $IN{out}, a{i % 2}, c{i};"]
    return lines


@constexpr_function
def value_asm(halves: int, stages: int) -> str:
    """See blocks.add_values. The first operands: outputs, maximum, sum.

    Every warp frees the tiles of all halves, though it reads some at most and waits for those
    alone. It is not early: before the barrier in front, all warps freed whatever was in those
    slots, so that a warp arrives once in a phase.
    """
    num = num_outputs(halves)
    operands = (
        *(f"IN{i}" for i in range(num)), "M", "L", "READY", "FREE", "WEIGHTS", "SUMS", "VALUES",
        "TURN", "SLOT", "PHASE",
    )  # fmt: skip
    lines = [
        ".reg .pred p, one, upper;",
        ".reg .b32 lane, at, slot, phase, tile, bar, both, b<16>, v<4>;",
        ".reg .f32 c<4>, d<4>, m<8>, l<8>, high, alpha, a0, a1, sum;",
        "mov.u32 at, %tid.x;",
        "setp.gt.u32 upper, at, 127;",
        "mov.u32 lane, %laneid;",
        "setp.eq.u32 one, lane, 0;",
        *factor_lines(),
        *zeros("cd"),
        # alpha of queries 2 c and 2 c + 1 from a lane of theirs
        "shl.b32 at, lane, 3;",
        "shfl.sync.idx.b32 a0, alpha, at, 31, 0xffffffff;",
        "add.u32 at, at, 4;",
        "shfl.sync.idx.b32 a1, alpha, at, 31, 0xffffffff;",
        "mov.u32 slot, $SLOT;",
        "mov.u32 phase, $PHASE;",
    ]
    for part in range(num // 4):
        if part:
            lines += [*sum_lines(part - 1), *zeros("cd"), *next_slot(stages), *next_slot(stages)]
        lines += part_lines(part, halves, stages)
    lines += ["FREE:", "mov.u32 slot, $SLOT;"]
    for half in range(halves):
        lines += [
            *(next_slot(stages) if half else []),
            "mad.lo.u32 bar, slot, 8, $FREE;",
            "@one mbarrier.arrive.shared::cta.b64 _, [bar];",
        ]
    lines += [*sum_lines(num // 4 - 1), f"mov.f32 ${num}, high;", f"mov.f32 ${num + 1}, sum;"]
    text: str = number_operands(lines, operands, num + 2)
    return text


@constexpr_function
def stage_asm(head_dim: int, size: int) -> str:
    """See blocks.stage_queries. Operands after `size` results: so many addresses, all alike, of the
    first half; if heads are padded, as many of the second; then the pairs of `size` columns of
    either half.
    """
    apart = head_dim not in FAR
    lines = ["{", ".reg .pred p;", f"setp.ne.s32 p, ${size}, -1;"]
    # by PTX, since Triton would find the addresses after the queries have come
    for number in (0, 1):
        to, after = size * (1 + apart * number), 0 if apart else FAR[head_dim] * number
        for i in range(size // 2):
            pair = (2 + apart) * size + number * (size // 2) + i
            lines.append(f"@p st.shared.b32 [${to}+{after + 32 * i}], ${pair};")
    return "\n".join([*lines, *(f"mov.b32 ${i}, 0;" for i in range(size)), "}"])


@constexpr_function
def insert_asm(head_dim: int, size: int) -> str:
    """See blocks.insert_new. Operands after `size` results, so many of each: where either half
    goes, a barrier and its phase for each; then the pairs of `size` columns of either half.
    """
    to0, to1, bar0, phase0, bar1, phase1 = (f"${size * (1 + i)}" for i in range(6))
    pairs = [f"${7 * size + i}" for i in range(size)]
    kind = "b32" if size == 2 else "v2.b32"
    first, second = (", ".join(pairs[i : i + size // 2]) for i in (0, size // 2))
    two = head_dim != 64
    # no .uni: lanes of other rows are not here
    apart = [wait("FIRST", bar0, phase0), wait("SECOND", bar1, phase1) if two else []]
    wait0, wait1 = ([line.replace(".uni", "") for line in lines] for lines in apart)
    return "\n".join(
        [
            "{",
            ".reg .pred p;",
            ".reg .b32 at;",
            f"setp.eq.s32 p, {to0}, -1;",
            "@p bra DONE;",
            *wait0,
            f"st.shared.{kind} [{to0}], {{{first}}};",
            f"xor.b32 at, {to0}, 64;",
            *wait1,
            f"st.shared.{kind} [{to1 if two else 'at'}], {{{second}}};",
            # the copy engine wrote the tile and will write it again, by a proxy of its own
            "fence.proxy.async.shared::cta;",
            "DONE:",
            *(f"mov.b32 ${i}, 0;" for i in range(size)),
            "}",
        ]
    )


@constexpr_function
def row_operands(size: int, num_addresses: int) -> str:
    """Constraints of stage_asm and insert_asm."""
    return ",".join(["=&r"] * size + ["r"] * (num_addresses * size + size))
