"""What Gluon has no word for: polling tagged words, fences, clocks; and the tagged stores.

A tagged word is 64 bits: payload low, tag high. 64-bit accesses are single-copy atomic, so a reader
that finds the tag it expects has the payload that was stored with it; no fence is involved. All
polls are relaxed, scope gpu. Next on the walk: loader.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.hopper.fields import WORDS
from distmega.kernels.hopper.shapes import PER_THREAD

_SPIN2 = gl.constexpr("""{
.reg .pred wanted, again;
.reg .b64 a, b;
.reg .b32 ta, tb;
mov.b32 $0, 0;
mov.b32 $1, 0;
setp.ne.s32 wanted, $4, 0;
@!wanted bra DONE;
SPIN:
ld.relaxed.gpu.global.v2.b64 {a, b}, [$2];
mov.b64 {$0, ta}, a;
mov.b64 {$1, tb}, b;
setp.ne.s32 again, ta, $3;
setp.ne.or.s32 again, tb, $3, again;
@again bra SPIN;
DONE:
}""")

_SPIN4 = gl.constexpr("""{
.reg .pred wanted, again;
.reg .b64 a, b, c, d;
.reg .b32 ta, tb, tc, td;
mov.b32 $0, 0;
mov.b32 $1, 0;
mov.b32 $2, 0;
mov.b32 $3, 0;
setp.ne.s32 wanted, $6, 0;
@!wanted bra DONE;
SPIN:
ld.relaxed.gpu.global.v2.b64 {a, b}, [$4];
ld.relaxed.gpu.global.v2.b64 {c, d}, [$4 + 16];
mov.b64 {$0, ta}, a;
mov.b64 {$1, tb}, b;
mov.b64 {$2, tc}, c;
mov.b64 {$3, td}, d;
setp.ne.s32 again, ta, $5;
setp.ne.or.s32 again, tb, $5, again;
setp.ne.or.s32 again, tc, $5, again;
setp.ne.or.s32 again, td, $5, again;
@again bra SPIN;
DONE:
}""")


def _packed_asm(num_chunks: int) -> str:
    """Two words from each of num_chunks chunks of 512 words; chunk j only if $rem > 512 * j."""
    outs = 2 * num_chunks
    pointer, tag, rem = f"${outs}", f"${outs + 1}", f"${outs + 2}"
    lines = ["{", ".reg .pred again;"]
    lines += [f".reg .pred wanted{j};" for j in range(num_chunks)]
    lines += [f".reg .b64 a{j}, b{j};" for j in range(num_chunks)]
    lines += [f".reg .b32 ta{j}, tb{j};" for j in range(num_chunks)]
    for j in range(num_chunks):
        lines.append(f"setp.gt.s32 wanted{j}, {rem}, {512 * j};")
        lines.append(f"mov.b64 a{j}, {{0, {tag}}};")
        lines.append(f"mov.b64 b{j}, a{j};")
    lines.append("SPIN:")
    for j in range(num_chunks):
        lines.append(
            f"@wanted{j} ld.relaxed.gpu.global.v2.b64 {{a{j}, b{j}}}, [{pointer} + {4096 * j}];"
        )
    for j in range(num_chunks):
        lines.append(f"mov.b64 {{${2 * j}, ta{j}}}, a{j};")
        lines.append(f"mov.b64 {{${2 * j + 1}, tb{j}}}, b{j};")
    lines.append(f"setp.ne.s32 again, ta0, {tag};")
    lines.append(f"setp.ne.or.s32 again, tb0, {tag}, again;")
    for j in range(1, num_chunks):
        lines.append(f"setp.ne.or.s32 again, ta{j}, {tag}, again;")
        lines.append(f"setp.ne.or.s32 again, tb{j}, {tag}, again;")
    lines += ["@again bra SPIN;", "}"]
    return "\n".join(lines)


_SPIN_PACKED = gl.constexpr(_packed_asm(4))


@gluon.jit
def spin2(pointers, tag, wanted):
    """Two consecutive tagged words a pointer, once both carry `tag`; zeros where not wanted."""
    return gl.inline_asm_elementwise(
        _SPIN2,
        "=&r,=&r,l,r,r",
        [pointers, tag, wanted.to(gl.int32)],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def spin4(pointers, tag, wanted):
    """Four consecutive tagged words a pointer, once all carry `tag`; zeros where not wanted."""
    return gl.inline_asm_elementwise(
        _SPIN4,
        "=&r,=&r,=&r,=&r,l,r,r",
        [pointers, tag, wanted.to(gl.int32)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def spin_packed(pointers, tag, num_left):
    """Words 2 t and 2 t + 1 of each of four chunks of 512 words, for the thread pointing at word
    2 t of the first; `num_left` words from there on are valid, the rest gives zeros.
    """
    return gl.inline_asm_elementwise(
        _SPIN_PACKED,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,r,r",
        [pointers, tag, num_left],
        dtype=(gl.int32,) * 8,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def as_float(bits):
    """int32 bits as float32."""
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def low_half(bits):
    """The lower bf16 of a pair, as float32."""
    return (bits << 16).to(gl.float32, bitcast=True)


@gluon.jit
def high_half(bits):
    """The upper bf16 of a pair, as float32."""
    return (bits & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def bf16_pair(low, high):
    """Two float32 as bf16 in one int32."""
    a = low.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    b = high.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) << 16
    return a | b


@gluon.jit
def tagged(payload, tag):
    """int32 payload and tag as one 64-bit word."""
    low = payload.to(gl.int64) & 0xFFFFFFFF
    return (tag.to(gl.int64) << 32) | low


@gluon.jit
def tagged_float(value, tag):
    """float32 payload and tag as one 64-bit word."""
    return tagged(value.to(gl.int32, bitcast=True), tag)


@gluon.jit
def fence_all():
    """Orders this thread's earlier accesses, and the copy engine's later reads, at scope gpu."""
    zero = gl.full([256], 0, gl.int32, layout=PER_THREAD)
    return gl.inline_asm_elementwise(
        "fence.proxy.async.global; fence.acq_rel.gpu; mov.b32 $0, $1;",
        "=r,r",
        [zero],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def clock():
    """Nanoseconds, the same on every SM."""
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def keep(value):
    """The scalar itself, through an instruction the compiler may not drop.

    Triton 3.6 takes a value carried by a loop for dead when its only use is the bound of an inner
    loop, and keeps the first one for ever; bounds that come from prefetched words go through here.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fetch(queue, i):
    """The words of instruction i, as a tuple of scalars."""
    at = queue + i * WORDS
    return (
        gl.load(at),
        gl.load(at + 1),
        gl.load(at + 2),
        gl.load(at + 3),
        gl.load(at + 4),
        gl.load(at + 5),
        gl.load(at + 6),
        gl.load(at + 7),
        gl.load(at + 8),
        gl.load(at + 9),
        gl.load(at + 10),
        gl.load(at + 11),
        gl.load(at + 12),
        gl.load(at + 13),
        gl.load(at + 14),
        gl.load(at + 15),
    )
