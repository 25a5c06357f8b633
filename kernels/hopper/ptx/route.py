"""The PTX of the choice of experts; ../one_row/route.py and ../batch/route.py say who does what.

A slot of one row is 8 bytes of shared memory: the expert, int32, and what it weighs, f32. Next on
the walk: ../one_row/bodies/splits.py.
"""

from triton.runtime.jit import constexpr_function

GROUP = 4
"""Scores that one load brings."""
UNROLLED = 4
"""Groups of a round: their loads and counts are under way together."""


@constexpr_function
def put_asm() -> str:
    """Two keys to $1 on."""
    return """
        st.shared.v2.b32 [$1], {$2, $3};
        mov.b32 $0, 0;
        """


@constexpr_function
def rank_asm(num_chosen: int) -> str:
    """Of the expert of this thread, among $3 whose keys lie from $2 on: its score, -inf where there
    is no such expert, and how many are before it: those of larger keys, and of equal ones those of
    lower numbers. The first num_chosen go to the slots from $4 on.

    A key is an int32 in the order of scores. Behind the last one lie the least, up to a whole
    round. Lower numbers count where their key is above this one less 1, higher ones where it is
    above this one; the group that has both is counted as higher, equal ones in it once more.
    """
    lines = [
        "{",
        ".reg .pred more, before, lower;",
        ".reg .b32 own, key, less, mine, at, group, limit, past;",
        f".reg .b32 s<{GROUP}>, c<{GROUP}>;",
        "mov.u32 own, %tid.x;",
        "mov.f32 $0, 0fFF800000;",
        "mov.u32 $1, $3;",
        "setp.ge.u32 more, own, $3;",
        "@more bra DONE;",
        "mad.lo.u32 at, own, 4, $2;",
        "ld.shared.b32 key, [at];",
        "sub.s32 less, key, 1;",
        f"div.u32 mine, own, {GROUP};",
        "mov.u32 at, $2;",
        "mov.u32 group, 0;",
        *(f"mov.u32 c{i}, 0;" for i in range(GROUP)),
        "NEXT:",
    ]
    for nth in range(UNROLLED):
        lines += [
            f"ld.shared.v4.b32 {{s0, s1, s2, s3}}, [at+{4 * GROUP * nth}];",
            "setp.lt.u32 lower, group, mine;",
            "selp.b32 limit, less, key, lower;",
        ]
        for i in range(GROUP):  # all ones where it is before: one less than none
            lines += [f"set.gt.u32.s32 past, s{i}, limit;", f"sub.u32 c{i}, c{i}, past;"]
        lines.append("add.u32 group, group, 1;")
    lines += [
        f"add.u32 at, at, {4 * GROUP * UNROLLED};",
        f"mul.lo.u32 past, group, {GROUP};",
        "setp.lt.u32 more, past, $3;",
        "@more bra NEXT;",
        "add.u32 c0, c0, c1;",
        "add.u32 c2, c2, c3;",
        "add.u32 $1, c0, c2;",
        f"mad.lo.u32 at, mine, {4 * GROUP}, $2;",
        "ld.shared.v4.b32 {s0, s1, s2, s3}, [at];",
        f"rem.u32 past, own, {GROUP};",
    ]
    for i in range(GROUP - 1):
        lines += [
            f"setp.gt.u32 lower, past, {i};",
            f"setp.eq.and.s32 before, s{i}, key, lower;",
            "@before add.u32 $1, $1, 1;",
        ]
    lines += [
        f"setp.lt.u32 before, $1, {num_chosen};",
        "mad.lo.u32 at, $1, 8, $4;",
        "@before st.shared.u32 [at], own;",
        "shr.s32 past, key, 31;",
        "and.b32 past, past, 0x7FFFFFFF;",
        "xor.b32 past, past, key;",
        "mov.b32 $0, past;",
        "DONE:",
        "}",
    ]
    return "\n".join(lines)


@constexpr_function
def weigh_asm(num_chosen: int) -> str:
    """A weight $3 to slot $2 of those from $1 on, if there is such a slot."""
    return f"""
        {{
        .reg .pred before;
        .reg .b32 at;
        setp.lt.u32 before, $2, {num_chosen};
        mad.lo.u32 at, $2, 8, $1;
        @before st.shared.f32 [at+4], $3;
        mov.b32 $0, 0;
        }}
        """


@constexpr_function
def put_if_asm() -> str:
    """A number $2 to $1 if $3."""
    return """
        {
        .reg .pred wanted;
        setp.ne.s32 wanted, $3, 0;
        @wanted st.shared.f32 [$1], $2;
        mov.b32 $0, 0;
        }
        """


@constexpr_function
def count_asm(num_experts: int) -> str:
    """Of num_experts words from $3 on, a multiple of 32, one a thread: how many are not zero, of
    all and of those before the thread's own; and that one, 0 of threads behind the last word.
    """
    blocks = range(num_experts // 32)
    lines = [
        "{",
        ".reg .pred hit, own, before;",
        f".reg .b32 lane, warp, at, word, bits<{len(blocks)}>, some;",
        "mov.u32 word, %tid.x;",
        "and.b32 lane, word, 31;",
        "shr.u32 warp, word, 5;",
        "mad.lo.u32 at, lane, 4, $3;",
        "mov.u32 $0, 0;",
        "mov.u32 $1, 0;",
        "mov.b32 $2, 0;",
    ]
    for i in blocks:
        lines += [
            f"ld.shared.b32 word, [at+{128 * i}];",
            "setp.ne.b32 hit, word, 0;",
            f"vote.sync.ballot.b32 bits{i}, hit, 0xffffffff;",
            f"popc.b32 some, bits{i};",
            "add.u32 $0, $0, some;",
            f"setp.gt.u32 before, warp, {i};",
            "@before add.u32 $1, $1, some;",
            f"setp.eq.u32 own, warp, {i};",
            "mov.u32 some, %lanemask_lt;",
            f"and.b32 some, some, bits{i};",
            "popc.b32 some, some;",
            "@own add.u32 $1, $1, some;",
            "@own mov.b32 $2, word;",
        ]
    return "\n".join([*lines, "}"])


@constexpr_function
def list_asm() -> str:
    """Puts $2 at $1 and, unless $4 is 0, behind it as word number $3 the thread's number and, in
    the lower half, $4.
    """
    return """
        {
        .reg .pred wanted;
        .reg .b32 own, at, word;
        mov.u32 own, %tid.x;
        setp.eq.u32 wanted, own, 0;
        @wanted st.shared.b32 [$1], $2;
        mad.lo.u32 at, $3, 4, $1;
        shl.b32 word, own, 16;
        or.b32 word, word, $4;
        setp.ne.b32 wanted, $4, 0;
        @wanted st.shared.b32 [at+4], word;
        mov.b32 $0, 0;
        }
        """
