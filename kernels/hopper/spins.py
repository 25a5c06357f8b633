"""Waiting for tagged words: polls that end, and that leave behind who waited for what.

A tagged word is 64 bits: payload low, tag high. 64-bit accesses are single-copy atomic, so a reader
that finds the tag it expects has the payload that was stored with it; no fence is involved. All
polls are relaxed, at scope gpu, or sys where peers write. A poll that lasts longer than the limit
gives up and yields zeros; once one has, every poll that looks gives up too, so that the kernel
drains. Each of them puts (tag, word, SM) into the report, of which the least stays: buffers lie in
the order of dataflow, so that is the wait on which all others hang, and the host can say who owes
it (diagnosis.py). Polls look only every CHECK_POLLS times. Next on the walk: loader.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from distmega.kernels.hopper.words import REPORT_ALARM, REPORT_FIRST, REPORT_LIMIT

CHECK_POLLS = 16
"""Polls between two looks at the report and the clock; a power of two."""

_CHUNKS, _CHUNK_WORDS = 4, 512


@constexpr_function
def look(report: str, retry: str) -> list[str]:
    """PTX after a poll that failed: to `retry`, or on to give up. Uses again, other, value, start,
    now, polls and found; polls was set to 0.
    """
    return [
        "add.s32 polls, polls, 1;",
        f"and.b32 found, polls, {CHECK_POLLS - 1};",
        "setp.ne.s32 other, found, 0;",
        f"@other bra {retry};",
        f"ld.relaxed.gpu.global.b64 value, [{report} + {8 * REPORT_FIRST}];",
        "setp.ne.s64 other, value, -1;",
        "@other bra GIVE_UP;",
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
def accuse(report: str, tag: str) -> list[str]:
    """PTX of giving up: (tag, word, found) into the report, the host's alarm."""
    return [
        "shl.b32 word, word, 8;",
        "or.b32 found, found, word;",
        f"mov.b64 value, {{found, {tag}}};",
        f"red.relaxed.gpu.global.min.u64 [{report} + {8 * REPORT_FIRST}], value;",
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
def spin_asm(num_loads: int, stride_words: int, chunk_words: int, scope: str) -> str:
    """PTX for inline_asm_elementwise: two words from a pointer on, and from every stride_words
    after it (bytes in the last operand where that is 0); load j only where the count is greater
    than j * chunk_words. Operands after the payloads: pointer, exchange, tag, count.
    """
    outs, each = 2 * num_loads, range(num_loads)
    pointer, base, tag, count, stride = (f"${outs + i}" for i in range(5))
    lines = ["{", *look_registers()]
    for j in each:
        lines += [f".reg .pred wanted{j};", f".reg .b64 a{j}, b{j}, p{j};"]
        lines += [f".reg .b32 ta{j}, tb{j};", f"setp.gt.s32 wanted{j}, {count}, {chunk_words * j};"]
        lines += [f"mov.b64 a{j}, {{0, {tag}}};", f"mov.b64 b{j}, a{j};"]
        step = f"{8 * stride_words * j}" if stride_words else stride
        before = pointer if stride_words or not j else f"p{j - 1}"
        lines.append(f"add.s64 p{j}, {before}, {step};" if j else f"mov.b64 p0, {pointer};")
    lines += ["mov.u32 polls, 0;", "SPIN:"]
    lines += [f"@wanted{j} ld.relaxed.{scope}.global.v2.b64 {{a{j}, b{j}}}, [p{j}];" for j in each]
    for j in each:
        lines.append(f"mov.b64 {{${2 * j}, ta{j}}}, a{j};")
        lines.append(f"mov.b64 {{${2 * j + 1}, tb{j}}}, b{j};")
    lines.append(f"setp.ne.s32 again, ta0, {tag};")
    lines.append(f"setp.ne.or.s32 again, tb0, {tag}, again;")
    lines += [f"setp.ne.or.s32 again, t{w}{j}, {tag}, again;" for j in each[1:] for w in "ab"]
    lines += ["@!again bra DONE;", *look(base, "SPIN"), "mov.b64 start, p0;"]
    for j in reversed(each):
        for name, after in (("b", 8), ("a", 0)):
            lines.append(f"setp.ne.s32 other, t{name}{j}, {tag};")
            lines.append(f"@other add.s64 start, p{j}, {after};")
    lines += [f"sub.s64 start, start, {base};", "shr.u64 start, start, 3;"]
    lines += ["cvt.u32.u64 word, start;", "mov.u32 found, %ctaid.x;", *accuse(base, tag)]
    return "\n".join([*lines, *(f"mov.b32 ${i}, 0;" for i in range(outs)), "DONE:", "}"])


@constexpr_function
def spin_operands(num_loads: int, stride_words: int) -> str:
    """Constraints of spin_asm."""
    return "=&r," * (2 * num_loads) + ("l,l,r,r" if stride_words else "l,l,r,r,l")


@constexpr_function
def spin_types(num_loads: int) -> tuple[gl.dtype, ...]:
    """Results of spin_asm."""
    return (gl.int32,) * (2 * num_loads)


_SPIN2 = gl.constexpr(spin_asm(1, 2, 1, "gpu"))
_SPIN4 = gl.constexpr(spin_asm(2, 2, 0, "gpu"))
_PACKED = gl.constexpr(spin_asm(_CHUNKS, _CHUNK_WORDS, _CHUNK_WORDS, "gpu"))


@gluon.jit
def spin2(exchange, pointers, tag, wanted):
    """Two consecutive tagged words a pointer, once both carry `tag`; zeros where not wanted.

    exchange: the exchange they lie in, which starts with the report.
    """
    return gl.inline_asm_elementwise(
        _SPIN2,
        spin_operands(1, 2),
        [pointers, exchange, tag, wanted.to(gl.int32)],
        dtype=spin_types(1),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def spin4(exchange, pointers, tag, wanted):
    """Four consecutive tagged words a pointer, once all carry `tag`; zeros where not wanted."""
    return gl.inline_asm_elementwise(
        _SPIN4,
        spin_operands(2, 2),
        [pointers, exchange, tag, wanted.to(gl.int32)],
        dtype=spin_types(2),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def spin_packed(exchange, pointers, tag, num_left):
    """Words 2 t and 2 t + 1 of each of four chunks of 512 words, for the thread pointing at word
    2 t of the first; `num_left` words from there on are valid, the rest gives zeros.
    """
    return gl.inline_asm_elementwise(
        _PACKED,
        spin_operands(4, 512),
        [pointers, exchange, tag, num_left],
        dtype=spin_types(4),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def spin_ranks(exchange, pointers, stride_bytes, tag, wanted, RANKS: gl.constexpr):
    """Two consecutive words of each rank's part, which peers wrote, from the first rank's on."""
    return gl.inline_asm_elementwise(
        spin_asm(RANKS, 0, 0, "sys"),
        spin_operands(RANKS, 0),
        [pointers, exchange, tag, wanted.to(gl.int32), stride_bytes],
        dtype=spin_types(RANKS),
        is_pure=False,
        pack=1,
    )
