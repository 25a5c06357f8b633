"""Events between copy engines and a kernel: int32 words in local memory.

An arrival word has one writer, a copy engine of one peer or its kernel, and becomes 1 when its data
lies there. A count, on which this GPU's copy engines wait, is of tiles stored. Streams set both to
0 after the call. Words that a peer's kernel has pushed, and words of a rank for itself, which are
of its programs, for slices of a tile that another program has computed, are set to 0 by who has
waited for them. The kernel releases and acquires at scope sys.
Next: kernel.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.gluon_compat import cta_barrier

MAX_POLLS = gl.constexpr(1 << 24)
"""Polls of a debug build before it gives up: more seconds than a peer needs to compile a kernel."""


@gluon.jit
def wait_event(events, index, stuck, debug: gl.constexpr):
    """Returns when events[index] is not 0, with all that was written before it visible.

    In a debug build the wait is bounded: on expiry it leaves index + 1 in `stuck`, int32 [1] of
    local memory, and goes on.
    """
    found = gl.atomic_add(events + index, 0, sem="acquire", scope="sys")
    if debug:
        polls = 0
        while (found == 0) & (polls < MAX_POLLS):
            found = gl.atomic_add(events + index, 0, sem="acquire", scope="sys")
            polls += 1
        if found == 0:
            gl.store(stuck, index + 1)
    else:
        while found == 0:
            found = gl.atomic_add(events + index, 0, sem="acquire", scope="sys")


@gluon.jit
def clear_event(events, index):
    """Of a word for which this partition alone has waited, for the next call."""
    gl.atomic_xchg(events + index, 0, sem="relaxed", scope="gpu")


@gluon.jit
def count_event(counts, index):
    """Adds to a word after all that this partition has seen written."""
    cta_barrier()
    gl.atomic_add(counts + index, 1, sem="release", scope="sys")


@gluon.jit
def count_at_peers(words, rank, num_ranks: gl.constexpr):
    """As count_event, in a word of each other rank; words: int64 [num_ranks], their addresses."""
    cta_barrier()
    for other in range(num_ranks - 1):
        word = gl.load(words + other + (other >= rank).to(gl.int32)).to(gl.pointer_type(gl.int32))
        gl.atomic_add(word, 1, sem="release", scope="sys")


@gluon.jit
def finish_stores():
    """Waits until this thread's TMA stores have been written, not only read; orders them before
    its next release.
    """
    # Triton waits for stores by .read alone, which says that shared memory is free, not that others
    # may look; and TMA writes by a proxy of its own, which a release does not order
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def before_tma_reads():
    """Orders what was acquired before TMA loads that this thread starts."""
    # an acquire orders plain loads; TMA reads by a proxy of its own, which Gluon fences in shared
    # memory alone
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
