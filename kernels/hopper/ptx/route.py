"""The PTX of the choice of experts; ../one_row/route.py says who does what.

A slot is 8 bytes of shared memory: the expert, int32, and what it weighs, f32. Next on the walk:
../one_row/splits.py.
"""

from triton.runtime.jit import constexpr_function


@constexpr_function
def put_asm() -> str:
    """Two scores to $1 on."""
    return """
        st.shared.v2.f32 [$1], {$2, $3};
        mov.b32 $0, 0;
        """


@constexpr_function
def rank_asm(num_chosen: int) -> str:
    """Of the expert of this thread, among $3 whose scores lie from $2 on: its score, -inf where
    there is no such expert, and how many are before it: those of larger scores, and of equal ones
    those of lower numbers. The first num_chosen go to the slots from $4 on.

    Scores behind the last one up to a multiple of four are -inf, and no one's number is higher.
    """
    lines = [
        "{",
        ".reg .pred more, before, lower;",
        ".reg .f32 s<4>;",
        ".reg .b32 own, at, other;",
        "mov.u32 own, %tid.x;",
        "mad.lo.u32 at, own, 4, $2;",
        "mov.f32 $0, 0fFF800000;",
        "mov.u32 $1, $3;",
        "setp.ge.u32 more, own, $3;",
        "@more bra DONE;",
        "ld.shared.f32 $0, [at];",
        "mov.u32 $1, 0;",
        "mov.u32 at, $2;",
        "mov.u32 other, 0;",
        "NEXT:",
        "ld.shared.v4.f32 {s0, s1, s2, s3}, [at];",
        "add.u32 at, at, 16;",
    ]
    for i in range(4):
        lines += [
            f"setp.gt.f32 before, s{i}, $0;",
            "@before add.u32 $1, $1, 1;",
            "setp.lt.u32 lower, other, own;",
            f"setp.eq.and.f32 before, s{i}, $0, lower;",
            "@before add.u32 $1, $1, 1;",
            "add.u32 other, other, 1;",
        ]
    lines += [
        "setp.lt.u32 more, other, $3;",
        "@more bra NEXT;",
        f"setp.lt.u32 before, $1, {num_chosen};",
        "mad.lo.u32 at, $1, 8, $4;",
        "@before st.shared.u32 [at], own;",
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
