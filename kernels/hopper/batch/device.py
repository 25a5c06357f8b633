"""Events of the batched kernel, and the order in which activations lie.

An event is an int32 counter that every SM counts up once a step. A wait is an acquire by one
thread and a barrier, bounded as those of ptx/spins.py; a signal is a barrier and a release, both at
scope gpu.

Activations of 16 columns and 16 sequences are one block of 512 bytes in the order in which a lane
of m16n8k16 holds its operand: column c of sequence b is element ((b % 8) * 4 + c % 8 // 2) * 8 +
c // 8 * 4 + b // 8 * 2 + c % 2. So x needs no shared memory on its way into a product. Of more
sequences each 16 have a block of their own, side by side. Next on the walk: team.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from distmega.kernels.gluon_compat import cta_barrier
from distmega.kernels.hopper.batch_plan.fields import (
    BATCH,
    BATCH_STAMPS,
    BLOCK,
    EVENT_WORDS,
    EVENTS_AT,
    HALF_CHUNK,
    X_BLOCKS,
)
from distmega.kernels.hopper.ptx.device import clock
from distmega.kernels.hopper.ptx.shapes import NUM_WARPS, PER_THREAD, SLICE_K, THREADS, X_DOT
from distmega.kernels.hopper.ptx.spins import accuse, look, look_registers


@constexpr_function
def wait_asm() -> str:
    """PTX for inline_asm_elementwise. Operands: counter, target, whether this thread waits, the
    report, the event, and the flag that a wait is reported with.
    """
    lines = [
        "{",
        ".reg .pred mine;",
        ".reg .b32 v;",
        *look_registers(),
        "mov.b32 $0, 0;",
        "mov.u32 polls, 0;",
        "setp.ne.s32 mine, $3, 0;",
        "@!mine bra DONE;",
        "SPIN:",
        # an acquiring load, since Triton's acquire is an atomic, which takes turns with the signals
        "ld.acquire.gpu.global.s32 v, [$1];",
        "sub.s32 v, v, $2;",
        "setp.lt.s32 again, v, 0;",
        "@!again bra DONE;",
        *look("$4", "SPIN"),
        # given up: how many SMs still owe it, in the place of an SM's number
        "mov.b32 word, $5;",
        "neg.s32 found, v;",
        "min.s32 found, found, 255;",
        *accuse("$4", "$6"),
        "DONE:",
        "}",
    ]
    return "\n".join(lines)


@gluon.jit
def wait_event(events, event, target, flag, RANKS: gl.constexpr):
    """Until the counter of `event` has reached `target`, or the limit; then all threads see what
    came before. events: see batch_words.EVENTS_AT. flag: of the instruction that waits, which
    stands in the report instead of the target where waits for flagged words of other ranks do too.
    """
    threads = gl.arange(0, THREADS, layout=PER_THREAD)
    counter = events + 2 * EVENTS_AT + event * EVENT_WORDS + threads * 0
    awaited = flag if RANKS > 1 else target
    # one thread polls, the others stand at the barrier: 256 pollers would slow the signals
    gl.inline_asm_elementwise(
        wait_asm(),
        "=&r,l,r,r,l,r,r",
        [counter, target, (threads == 0).to(gl.int32), events, event, awaited],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    cta_barrier()


@gluon.jit
def signal_event(events, event):
    """Counts the event up after all stores of this partition."""
    cta_barrier()
    gl.atomic_add(events + 2 * EVENTS_AT + event * EVENT_WORDS, 1, sem="release", scope="gpu")


@gluon.jit
def stamp(trace, step, num_instructions, i, WHICH: gl.constexpr):
    """The time, as stamp WHICH of instruction i of this SM, where stamps are taken. trace: as of
    run_batch_steps.
    """
    if trace is not None:
        row = (step * gl.num_programs(0) + gl.program_id(0)) * num_instructions + i
        gl.store(trace + row * BATCH_STAMPS + WHICH, clock())


@gluon.jit
def pair_index(column, b, ROWS: gl.constexpr):
    """Place of columns (column, column + 1), the first even, of sequence b, in int32 words."""
    lane = (b % 8) * 4 + column % 8 // 2
    if ROWS == BATCH:
        at = column // 16 * (BLOCK // 2) + lane * 4 + column % 16 // 8 * 2 + b // 8
    else:
        block = column // 16 * (ROWS // BATCH) + b // BATCH
        at = block * (BLOCK // 2) + lane * 4 + column % 16 // 8 * 2 + b % BATCH // 8
    return at


@gluon.jit
def of_rows(first, ROWS: gl.constexpr):
    """An offset that words give in elements of 16 rows, in those of ROWS."""
    return first if ROWS == BATCH else first * (ROWS // BATCH)


@gluon.jit
def load_x(x, chunk, half: gl.constexpr):
    """Columns 512 * half on of chunk `chunk` of x, [8 warps, 16, 64], as an operand."""
    at = x + (chunk * 2 + half) * HALF_CHUNK + gl.arange(0, HALF_CHUNK, layout=X_BLOCKS)
    return as_operand(gl.load(at, cache_modifier=".cg"))


@gluon.jit
def load_some_x(x, chunk, half: gl.constexpr, rows):
    """The same of rows whose bits are set in `rows`. Of two that a lane holds, b and b + 8, either
    both come or none; in place of others the zeros of chunk 0.
    """
    i = gl.arange(0, HALF_CHUNK, layout=X_BLOCKS)
    counts = ((rows >> (i // 32 % 8)) & 0x101) != 0
    # a mask would cost registers, 16 bits at a time; and what a thread loads is at constant
    # distances from one point (X_BLOCKS)
    own = i & 0x307
    start = gl.where(counts, chunk * (2 * HALF_CHUNK) + i - own, 0)
    at = gl.max_contiguous(gl.multiple_of(start + (half * HALF_CHUNK + own), [8]), [8])
    return as_operand(gl.load(x + at, cache_modifier=".cg"))


@gluon.jit
def as_operand(loaded):
    """Half a chunk, [8192], as an operand."""
    split = gl.reshape(loaded, [NUM_WARPS, 4, 8, 4, 2, 2, 2])
    ordered = gl.permute(split, [0, 5, 2, 1, 4, 3, 6])
    return gl.convert_layout(gl.reshape(ordered, [NUM_WARPS, BATCH, SLICE_K]), X_DOT)
