"""Waiting for events and meeting them, in the kernel of records.

In: a record's rows of waits and signals, the counters of events, the host's report. Out: a return
once all that it waits for has happened, or once a wait has expired; counters that are one higher.
One thread of an SM looks at a counter for all. Next on the walk: kernel.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, no-any-return"

import triton
from triton import language as tl

from distmega.kernels.isa import encoding
from distmega.kernels.runtime import report as report_words

WAIT_WORDS: tl.constexpr = tl.constexpr(len(encoding.WAIT_COLUMNS))
SIGNAL_WORDS: tl.constexpr = tl.constexpr(len(encoding.SIGNAL_COLUMNS))
COUNT_MASK: tl.constexpr = tl.constexpr(encoding.COUNT_MASK)
WAITS_BIT: tl.constexpr = tl.constexpr(encoding.WAITS_BIT)
FIRST_WAIT: tl.constexpr = tl.constexpr(encoding.FIRST_WAIT)
SIGNALS_BIT: tl.constexpr = tl.constexpr(encoding.SIGNALS_BIT)
FIRST_SIGNAL: tl.constexpr = tl.constexpr(encoding.FIRST_SIGNAL)
FIRST: tl.constexpr = tl.constexpr(report_words.REPORT_FIRST)
LIMIT: tl.constexpr = tl.constexpr(report_words.REPORT_LIMIT)
ALARM: tl.constexpr = tl.constexpr(report_words.REPORT_ALARM)
NONE: tl.constexpr = tl.constexpr(report_words.NO_REPORT)
WORD_BITS: tl.constexpr = tl.constexpr(report_words.WORD_BITS)
LAST_BITS: tl.constexpr = tl.constexpr(report_words.LAST_BITS)
THREADS: tl.constexpr = tl.constexpr(256)
"""Of an SM, at least."""
LOOKS = 64
"""At a counter between two at the clock."""


@triton.jit
def clock():
    """Nanoseconds of the GPU, the same for all threads: warps that read them one by one would leave
    a loop apart, and meet at barriers of different turns.
    """
    # Triton has no clock
    each = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;",
        "=l,r",
        [tl.arange(0, THREADS)],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )
    return tl.max(each, 0)


@triton.constexpr_function
def look_asm(scope):
    """PTX: 1 in all threads but the first, which looks at a counter until it has reached a target,
    for at most LOOKS times, and has 0 if it has not.
    """
    return f"""{{
        .reg .pred other;
        .reg .b32 seen, left;
        mov.u32 $0, 1;
        mov.u32 seen, %tid.x;
        setp.ne.u32 other, seen, 0;
        @other bra DONE;
        mov.u32 left, {LOOKS};
    AGAIN:
        ld.acquire.{scope}.global.s32 seen, [$1];
        sub.s32 seen, seen, $2;
        setp.ge.s32 other, seen, 0;
        @other bra DONE;
        sub.u32 left, left, 1;
        setp.ne.u32 other, left, 0;
        @other bra AGAIN;
        mov.u32 $0, 0;
    DONE:
    }}"""


@triton.jit
def reached(counter, target, scope: tl.constexpr):
    """1 if a counter reaches a target while a thread looks at it some times, else 0, for all
    threads; they see then what was stored before the signals. scope: "gpu", or "sys" where peers
    signal.
    """
    # tl.atomic_add(counter, 0) would have all SMs that wait queue up at one address, to write it
    each = tl.inline_asm_elementwise(
        look_asm(scope),
        "=&r,l,r",
        [counter.to(tl.int64) + tl.zeros([THREADS], tl.int64), target],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    return tl.min(each, 0)


@triton.jit
def poll(counter, at, target, report, epoch, scope: tl.constexpr):
    """Returns once the counter of event `at` has reached a target, or this wait or another has
    expired.
    """
    waiting = reached(counter, target, scope) == 0
    if waiting:
        start = clock()
        while waiting:
            waiting = reached(counter, target, scope) == 0
            if waiting:
                # as one thread reads it for all of them
                first = tl.atomic_add(report + FIRST, 0, sem="relaxed", scope="gpu")
                if (first != NONE) | (clock() - start > tl.load(report + LIMIT)):
                    accuse(report, epoch, at)
                    waiting = False


@triton.jit
def accuse(report, epoch, at):
    """Puts a wait into the report: events are numbered in the order of dataflow, so the least is
    the one on which the others hang. Raises the host's alarm.
    """
    flag = (epoch.to(tl.int64) & 0xFFFFFFFF) << (WORD_BITS + LAST_BITS)
    word = (tl.zeros([], tl.int64) + at) << LAST_BITS
    found = (flag | word | tl.program_id(0)).to(tl.uint64, bitcast=True)
    first = (report + FIRST).to(tl.pointer_type(tl.uint64), bitcast=True)
    tl.atomic_min(first, found, sem="relaxed", scope="gpu")
    alarm = tl.load(report + ALARM).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(alarm, 1, sem="release", scope="sys")


@triton.jit
def num_waits(record):
    """Events that a record waits for."""
    return (tl.load(record) >> WAITS_BIT) & COUNT_MASK


@triton.jit
def wait(record, tables, events, epoch, report):
    """For the events that a record names."""
    first = tl.load(record + FIRST_WAIT)
    for nth in range(num_waits(record)):
        row = tables.waits + (first + nth) * WAIT_WORDS
        at, target = tl.load(row) * events.lanes, tl.load(row + 1) * epoch
        if tl.load(row + 2) < 0:
            at += events.lane
            poll(events.counters + at, at, target, report, epoch, "gpu")
        else:
            for source in range(events.lanes):
                one = at + source
                poll(events.counters + one, one, target, report, epoch, "sys")


@triton.jit
def signal(record, tables, events):
    """Of the events that a record names, here or on all ranks of the team."""
    num = (tl.load(record) >> SIGNALS_BIT) & COUNT_MASK
    first = tl.load(record + FIRST_SIGNAL)
    for nth in range(num):
        row = tables.signals + (first + nth) * SIGNAL_WORDS
        at = tl.load(row) * events.lanes + events.lane
        if tl.load(row + 1) < 0:
            tl.atomic_add(events.counters + at, 1, sem="release", scope="gpu")
        else:
            for rank in range(events.lanes):
                counters = tl.load(events.others + rank).to(tl.pointer_type(tl.int32))
                tl.atomic_add(counters + at, 1, sem="release", scope="sys")
