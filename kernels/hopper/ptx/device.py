"""What Gluon has no word for: fences, clocks, halves of pairs; and making flagged words.

Next on the walk: spins.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from distmega.kernels.hopper.plan.fields import WORDS
from distmega.kernels.hopper.ptx.shapes import PER_THREAD


@gluon.jit
def as_float(bits):
    """int32 bits as float32."""
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def bits_of(value):
    """float32 as int32 bits."""
    return value.to(gl.int32, bitcast=True)


@gluon.jit
def low_half(bits):
    """The lower bf16 of a pair, as float32."""
    return (bits << 16).to(gl.float32, bitcast=True)


@gluon.jit
def high_half(bits):
    """The upper bf16 of a pair, as float32."""
    return (bits & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def key_of(bits):
    """int32 in the order of the float32 whose bits these are; the same again gives the bits."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def bf16_pair(low, high):
    """Two float32 as bf16 in one int32."""
    # Gluon has no pair of bf16 in an int32: one instruction converts and packs both
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def flagged(payload, flag):
    """int32 payload and flag as one 64-bit word."""
    low = payload.to(gl.int64) & 0xFFFFFFFF
    return (flag.to(gl.int64) << 32) | low


@gluon.jit
def flagged_float(value, flag):
    """float32 payload and flag as one 64-bit word."""
    return flagged(bits_of(value), flag)


@gluon.jit
def fence_all():
    """Orders this thread's earlier accesses, and the copy engine's later reads, at scope gpu."""
    zero = gl.full([256], 0, gl.int32, layout=PER_THREAD)
    # two fences, since the copy engine reads by a proxy of its own
    return gl.inline_asm_elementwise(
        "fence.proxy.async.global; fence.acq_rel.gpu; mov.b32 $0, $1;",
        "=r,r",
        [zero],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def join_lanes():
    """Brings the lanes of each warp together again. Stands right behind a store of some lanes that
    ends a way to a barrier of warps: ptxas may make a branch of such a store, straight to the
    barrier, and the warp comes there in two parts. Where ways meet it does not help: ptxas takes
    it for needless there and drops it before it makes the branch.
    """
    # impure, so that it stays where it stands; Gluon has barriers of whole groups of warps alone
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def clock():
    """Nanoseconds, the same on every SM."""
    # cycle counters of SMs differ; impure, so that it stays where it stands
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def keep(value):
    """The scalar itself, through an instruction the compiler may not drop.

    Triton 3.6 takes a value carried by a loop for dead when its only use is the bound of an inner
    loop, and keeps the first one for ever; bounds that come from prefetched words go through here.
    """
    # impure, so that it is neither dropped nor moved
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@constexpr_function
def _prefetch():
    """Operands: an address, whether it is wanted."""
    return """{
    .reg .pred wanted;
    setp.ne.s32 wanted, $2, 0;
    @wanted prefetch.global.L2 [$1];
    mov.b32 $0, 0;
    }"""


@gluon.jit
def prefetch(pointers, wanted):
    """Brings what is wanted of these places into the second-level cache; nothing waits for it."""
    # Gluon prefetches tiles of tensor descriptors alone
    gl.inline_asm_elementwise(
        _prefetch(),
        "=r,l,r",
        [pointers, wanted.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def single(value):
    """A tuple of it alone."""
    return (value,)


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
