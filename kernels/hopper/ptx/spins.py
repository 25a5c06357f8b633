"""Waiting for flagged words: polls that end, and that leave behind who waited for what.

A flagged word is 64 bits: payload low, flag high. 64-bit accesses are single-copy atomic, so a
reader that finds the flag it expects has the payload that was stored with it; no fence is involved.
All polls are relaxed, at scope gpu, or sys where peers write. A poll that lasts longer than the
limit gives up and yields zeros; once one has, every poll that looks gives up too, so that the
kernel drains. Each of them puts (flag, word, SM) into the report, of which the least stays: buffers
lie in the order of dataflow, so that is the wait on which all others hang, and the host can say who
owes it (diagnosis.py). Polls look only every CHECK_POLLS times. Next on the walk:
one_row/loader.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from distmega.kernels.hopper.plan.words import ROW_PARTIAL_EXTRA, TILE_K
from distmega.kernels.runtime.report import REPORT_ALARM, REPORT_FIRST, REPORT_LIMIT

CHECK_POLLS = 16
"""Polls between two looks at the report and the clock; a power of two."""

CHUNK_WORDS = TILE_K // 2
"""Flagged words of a chunk of x: two a thread."""


@constexpr_function
def look(report: str, retry: str) -> list[str]:
    """PTX after a poll that failed: to `retry`, or on to give up. Uses again, other, value, start,
    now, polls and found; polls was set to 0.
    """
    return [
        # a look costs two loads: most polls go without
        "add.s32 polls, polls, 1;",
        f"and.b32 found, polls, {CHECK_POLLS - 1};",
        "setp.ne.s32 other, found, 0;",
        f"@other bra {retry};",
        # whoever gave up before has written here: what this poll waits for may never come
        f"ld.relaxed.gpu.global.b64 value, [{report} + {8 * REPORT_FIRST}];",
        "setp.ne.s64 other, value, -1;",
        "@other bra GIVE_UP;",
        # the wait counts from its first look: a clock read before the loop all would pay for
        "mov.u64 now, %globaltimer;",
        f"setp.eq.s32 other, polls, {CHECK_POLLS};",
        "@other mov.u64 start, now;",
        "sub.s64 now, now, start;",
        f"ld.relaxed.gpu.global.b64 value, [{report} + {8 * REPORT_LIMIT}];",
        "setp.le.s64 other, now, value;",
        f"@other bra {retry};",
        "GIVE_UP:",
    ]


@constexpr_function
def accuse(report: str, flag: str) -> list[str]:
    """PTX of giving up: (flag, word, found) into the report, the host's alarm."""
    return [
        # flag high, then word, then SM, so that the least of all is the first in the dataflow
        "shl.b32 word, word, 8;",
        "or.b32 found, found, word;",
        f"mov.b64 value, {{found, {flag}}};",
        f"red.relaxed.gpu.global.min.u64 [{report} + {8 * REPORT_FIRST}], value;",
        # the alarm is memory of the host, which looks at the report once it sees it: fence between
        f"ld.relaxed.gpu.global.b64 start, [{report} + {8 * REPORT_ALARM}];",
        "fence.acq_rel.sys;",
        "st.relaxed.sys.global.u32 [start], 1;",
    ]


@constexpr_function
def look_registers() -> list[str]:
    """What look and accuse use."""
    return [
        ".reg .pred again, other;",
        ".reg .b64 value, start, now;",
        ".reg .b32 polls, word, found;",
    ]


@constexpr_function
def poll_asm(loads: tuple[tuple[int, int, int], ...], scope: str, flag: str) -> list[str]:
    """The loads, then what sets `again` if a word of theirs has another flag."""
    each = range(len(loads))
    # 16 bytes a load are two words; relaxed, since plain loads may be kept in a register. All are
    # on their way before the first flag is compared
    lines = [
        f"@wanted{j} ld.relaxed.{scope}.global.v2.b64 {{a{j}, b{j}}}, "
        f"[p{loads[j][0]} + {8 * loads[j][1]}];"
        for j in each
    ]
    for j in each:
        lines.append(f"mov.b64 {{${2 * j}, ta{j}}}, a{j};")
        lines.append(f"mov.b64 {{${2 * j + 1}, tb{j}}}, b{j};")
    lines.append(f"setp.ne.s32 again, ta0, {flag};")
    lines.append(f"setp.ne.or.s32 again, tb0, {flag}, again;")
    return lines + [
        f"setp.ne.or.s32 again, t{w}{j}, {flag}, again;" for j in each[1:] for w in "ab"
    ]


@constexpr_function
def spin_asm(loads: tuple[tuple[int, int, int], ...], scope: str, strided: bool) -> str:
    """PTX for inline_asm_elementwise: two words a load, (which pointer, words after it, least
    count), wanted where the count is greater. Operands after the payloads: exchange, flag, count,
    then the pointers; or the first pointer and the bytes from one to the next, if strided.
    """
    outs, each = 2 * len(loads), range(len(loads))
    base, flag, count = (f"${outs + i}" for i in range(3))
    pointers = range(1 + max(load[0] for load in loads))
    lines = ["{", *look_registers(), *(f".reg .b64 p{i};" for i in pointers)]
    for i in pointers:
        add = f"add.s64 p{i}, p{i - 1}, ${outs + 4};" if strided and i else ""
        lines.append(add or f"mov.b64 p{i}, ${outs + 3 + i};")
    for j in each:
        lines += [f".reg .pred wanted{j};", f".reg .b64 a{j}, b{j};", f".reg .b32 ta{j}, tb{j};"]
        lines += [f"setp.gt.s32 wanted{j}, {count}, {loads[j][2]};"]
        # words that are not wanted are never loaded: zeros with the right flag stand for them
        lines += [f"mov.b64 a{j}, {{0, {flag}}};", f"mov.b64 b{j}, a{j};"]
    lines += [
        "mov.u32 polls, 0;",
        "SPIN:",
        *poll_asm(loads, scope, flag),
        "@!again bra DONE;",
        *look(base, "SPIN"),
        # given up: which word it was, the first with another flag, so the last of this loop
        "mov.b64 start, p0;",
    ]
    for j in reversed(each):
        for more in (1, 0):
            lines.append(f"setp.ne.s32 other, t{'ab'[more]}{j}, {flag};")
            lines.append(f"@other add.s64 start, p{loads[j][0]}, {8 * (loads[j][1] + more)};")
    lines += [f"sub.s64 start, start, {base};", "shr.u64 start, start, 3;"]
    lines += ["cvt.u32.u64 word, start;", "mov.u32 found, %ctaid.x;", *accuse(base, flag)]
    # zeros, so that the kernel drains with numbers that do no harm
    return "\n".join([*lines, *(f"mov.b32 ${i}, 0;" for i in range(outs)), "DONE:", "}"])


@constexpr_function
def chunk_loads(num_chunks: int) -> tuple[tuple[int, int, int], ...]:
    """Two words of each chunk, of those that the count reaches."""
    return tuple((0, CHUNK_WORDS * j, CHUNK_WORDS * j) for j in range(num_chunks))


@constexpr_function
def row_loads(head_dim: int, size: int) -> tuple[tuple[int, int, int], ...]:
    """So many words of either half of a row."""
    return tuple((0, after + i, 0) for after in (0, head_dim // 2) for i in range(0, size, 2))


@constexpr_function
def partial_loads(head_dim: int) -> tuple[tuple[int, int, int], ...]:
    """Two words at either pointer, of four rows."""
    return tuple((i, j * (head_dim + ROW_PARTIAL_EXTRA), j) for j in range(4) for i in (0, 1))


@constexpr_function
def rank_loads(num_ranks: int) -> tuple[tuple[int, int, int], ...]:
    """Two words at each pointer."""
    return tuple((rank, 0, 0) for rank in range(num_ranks))


@constexpr_function
def part_loads(num_ranks: int, num_chunks: int) -> tuple[tuple[int, int, int], ...]:
    """Two words of each chunk at each pointer, of those that the count reaches."""
    return tuple(
        (rank, behind, least)
        for rank in range(num_ranks)
        for _, behind, least in chunk_loads(num_chunks)
    )


@constexpr_function
def spin_operands(num_loads: int, num_pointers: int) -> str:
    """Constraints of spin_asm; num_pointers: with the stride, if strided."""
    return "=&r," * (2 * num_loads) + "l,r,r" + ",l" * num_pointers


@constexpr_function
def spin_types(num_loads: int) -> tuple[gl.dtype, ...]:
    """Results of spin_asm."""
    return (gl.int32,) * (2 * num_loads)


@constexpr_function
def scope_of(num_writers: int) -> str:
    """The scope of polls of words that so many GPUs write."""
    return "sys" if num_writers > 1 else "gpu"


@gluon.jit
def spin2(symmetric, pointers, flag, wanted, WRITERS: gl.constexpr = 1):
    """Two consecutive flagged words a pointer, once both carry `flag`; zeros where not wanted.

    symmetric: the symmetric buffer they lie in, which starts with the report. WRITERS: GPUs that
    may write such words.
    """
    # Triton has no relaxed loads: it may keep what a plain one read in a register for ever
    return gl.inline_asm_elementwise(
        spin_asm(chunk_loads(1), scope_of(WRITERS), False),
        spin_operands(1, 1),
        [symmetric, flag, wanted.to(gl.int32), pointers],
        dtype=spin_types(1),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def spin_chunks(symmetric, pointers, flag, num_left, NUM: gl.constexpr, WRITERS: gl.constexpr = 1):
    """Words 2 t and 2 t + 1 of each of NUM chunks of 512 words, for the thread pointing at word
    2 t of the first; `num_left` words from there on are valid, the rest gives zeros. WRITERS:
    GPUs that may write such words.
    """
    # all chunks in one loop: one round trip, however many they are
    return gl.inline_asm_elementwise(
        spin_asm(chunk_loads(NUM), scope_of(WRITERS), False),
        spin_operands(NUM, 1),
        [symmetric, flag, num_left, pointers],
        dtype=spin_types(NUM),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def spin_parts(
    symmetric, pointers, stride_bytes, flag, num_left, NUM: gl.constexpr, RANKS: gl.constexpr
):
    """As spin_chunks of each rank's part, which peers wrote, from the first rank's on."""
    # all parts in one loop, as chunks are: one round trip
    return gl.inline_asm_elementwise(
        spin_asm(part_loads(RANKS, NUM), "sys", True),
        spin_operands(RANKS * NUM, 2),
        [symmetric, flag, num_left, pointers, stride_bytes],
        dtype=spin_types(RANKS * NUM),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def spin_rows(symmetric, pointers, flag, wanted, D: gl.constexpr, SIZE: gl.constexpr):
    """SIZE words of either half of a row of D words, from the pointer and from d / 2 later on."""
    # both halves of a row at once, since a rotation takes a column of each
    return gl.inline_asm_elementwise(
        spin_asm(row_loads(D, SIZE), "gpu", False),
        spin_operands(SIZE, 1),
        [symmetric, flag, wanted.to(gl.int32), pointers],
        dtype=spin_types(SIZE),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def spin_partials(symmetric, pointers, scales, flag, num_left, D: gl.constexpr):
    """Of each of four splits' partials: two outputs from `pointers` on, maximum and sum at
    `scales`; words of the first split, of which `num_left` are valid, the rest gives zeros.
    """
    # four splits in one loop: their words come in one round trip
    return gl.inline_asm_elementwise(
        spin_asm(partial_loads(D), "gpu", False),
        spin_operands(8, 2),
        [symmetric, flag, num_left, pointers, scales],
        dtype=spin_types(8),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def spin_ranks(symmetric, pointers, stride_bytes, flag, wanted, RANKS: gl.constexpr):
    """Two consecutive words of each rank's part, which peers wrote, from the first rank's on."""
    # by a stride, since an address a rank would take two registers of each thread
    return gl.inline_asm_elementwise(
        spin_asm(rank_loads(RANKS), "sys", True),
        spin_operands(RANKS, 2),
        [symmetric, flag, wanted.to(gl.int32), pointers, stride_bytes],
        dtype=spin_types(RANKS),
        is_pure=False,
        pack=1,
    )
