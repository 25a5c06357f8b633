"""The kernel of records: each SM goes through its queue, waits, works, signals.

In: the encoded queues of a segment, the arenas of a rank, counters that only grow. Out: what the
interpreter's launch gives (cpu/interpreter.py): in launch e an event is met at e times its count.
Of an SM's threads one waits and one signals, with a barrier of all before and behind; waits are
bounded, and once one has expired no other waits. Next on the walk: runner.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, no-any-return"

import triton
from triton import language as tl

from distmega.kernels.isa.encoding import MAX_WAITS as MOST_WAITS
from distmega.kernels.isa.encoding import SIGNAL_COLUMNS, WAIT_COLUMNS
from distmega.kernels.records.attention import attend, attention
from distmega.kernels.records.points import (
    argmax_ranks,
    copy,
    embedding,
    gather,
    kv_append,
    pointwise,
    push,
    push_parts,
    rope,
    sum_ranks,
    take_shard,
)
from distmega.kernels.records.products import contract, linear
from distmega.kernels.records.rows import argmax, norm, reduce, scan, top
from distmega.kernels.records.specs import RecordSpecs
from distmega.kernels.records.timeline import NUM_STAMPS
from distmega.kernels.records.words import WORDS, opcode_of
from distmega.kernels.runtime import report as report_words

WAIT_WORDS: tl.constexpr = tl.constexpr(len(WAIT_COLUMNS))
SIGNAL_WORDS: tl.constexpr = tl.constexpr(len(SIGNAL_COLUMNS))
MAX_WAITS: tl.constexpr = tl.constexpr(MOST_WAITS)
FIRST: tl.constexpr = tl.constexpr(report_words.REPORT_FIRST)
LIMIT: tl.constexpr = tl.constexpr(report_words.REPORT_LIMIT)
ALARM: tl.constexpr = tl.constexpr(report_words.REPORT_ALARM)
NONE: tl.constexpr = tl.constexpr(report_words.NO_REPORT)
WORD_BITS: tl.constexpr = tl.constexpr(report_words.WORD_BITS)
LAST_BITS: tl.constexpr = tl.constexpr(report_words.LAST_BITS)
STAMPS: tl.constexpr = tl.constexpr(NUM_STAMPS)
THREADS: tl.constexpr = tl.constexpr(256)
"""Of an SM, at least."""


@triton.constexpr_function
def num_specs(specs: RecordSpecs):
    return len(specs.each)


@triton.constexpr_function
def spec_at(specs: RecordSpecs, nth):
    return specs.each[nth]


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


@triton.jit
def own_clock():
    """Likewise, as each thread reads it: for what one of them stores."""
    # no operand, so that each thread reads for itself; Triton has no clock
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def stamp(stamps, row, nth: tl.constexpr):
    """The time, as one of the stamps of a record, where these are taken."""
    if stamps is not None:
        tl.store(stamps + row * STAMPS + nth, own_clock())


@triton.jit
def poll(counters, at, target, report, epoch):
    """Returns once the counter number `at` has reached a target, or this wait or another has
    expired.
    """
    seen = tl.atomic_add(counters + at, 0, sem="acquire", scope="sys")
    waiting = seen - target < 0
    if waiting:
        start = clock()
        while waiting:
            seen = tl.atomic_add(counters + at, 0, sem="acquire", scope="sys")
            waiting = seen - target < 0
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
def wait(record, tables, events, epoch, report):
    """For the events that a record names."""
    num = (tl.load(record) >> 8) & MAX_WAITS
    first = tl.load(record + 3)
    for nth in range(num):
        row = tables.waits + (first + nth) * WAIT_WORDS
        at, target = tl.load(row) * events.lanes, tl.load(row + 1) * epoch
        if tl.load(row + 2) < 0:
            poll(events.counters, at + events.lane, target, report, epoch)
        else:
            for source in range(events.lanes):
                poll(events.counters, at + source, target, report, epoch)


@triton.jit
def signal(record, tables, events):
    """Of the events that a record names, here or on all ranks of the team."""
    num = (tl.load(record) >> 20) & 0xFFF
    first = tl.load(record + 4)
    for nth in range(num):
        row = tables.signals + (first + nth) * SIGNAL_WORDS
        at = tl.load(row) * events.lanes + events.lane
        if tl.load(row + 1) < 0:
            tl.atomic_add(events.counters + at, 1, sem="release", scope="gpu")
        else:
            for rank in range(events.lanes):
                counters = tl.load(events.others + rank).to(tl.pointer_type(tl.int32))
                tl.atomic_add(counters + at, 1, sem="release", scope="sys")


@triton.jit
def execute(record, arenas, member, spec: tl.constexpr):
    """One instruction, by all threads of an SM."""
    opcode: tl.constexpr = opcode_of(spec)
    if opcode == "Linear":
        linear(record, arenas, spec)
    elif opcode == "Contract":
        contract(record, arenas, spec)
    elif opcode == "Pointwise":
        pointwise(record, arenas, spec)
    elif opcode == "Reduce":
        reduce(record, arenas, spec)
    elif opcode == "Norm":
        norm(record, arenas, spec)
    elif opcode == "Scan":
        scan(record, arenas, spec)
    elif opcode == "Rope":
        rope(record, arenas, spec)
    elif opcode == "KvAppend":
        kv_append(record, arenas, spec)
    elif opcode == "Attention":
        attention(record, arenas, spec)
    elif opcode == "Attend":
        attend(record, arenas, spec)
    elif opcode == "Embedding":
        embedding(record, arenas, spec, member)
    elif opcode == "Gather":
        gather(record, arenas, spec)
    elif opcode == "Copy":
        copy(record, arenas, spec)
    elif opcode == "TakeShard":
        take_shard(record, arenas, spec, member)
    elif opcode == "Argmax":
        argmax(record, arenas, spec, member)
    elif opcode == "Top":
        top(record, arenas, spec)
    elif opcode == "Push":
        push(record, arenas, spec, member)
    elif opcode == "PushParts":
        push_parts(record, arenas, spec, member)
    elif opcode == "SumRanks":
        sum_ranks(record, arenas, spec)
    else:
        tl.static_assert(opcode == "ArgmaxRanks")
        argmax_ranks(record, arenas, spec)


@triton.jit
def run_records(tables, memory, events, member, report, longest, stamps, specs: tl.constexpr):
    """One launch, an SM a program.

    tables, memory, events, member: see arguments.py. report: int64, see runtime/report.py, bound to
    an Alarm. longest: records of the longest queue. stamps: int64 [sms, longest, NUM_STAMPS],
    nanoseconds, written by the kernel; None if none are taken. specs: RecordSpecs of the segment.
    """
    sm = tl.program_id(0)
    epoch = tl.load(events.epoch)
    # not % 2, which is -1 for the odd epochs behind 2^31
    mine = member.arenas + (epoch & 1) * events.lanes
    there = (member.coordinates, mine, events.lanes)
    own = tl.load(mine + events.lane).to(tl.pointer_type(tl.uint8))
    arenas = (memory.weights, memory.states, memory.activations, own)
    for at in range(tl.load(tables.lengths + sm)):
        record = tables.queues + (sm * longest + at) * WORDS
        stamp(stamps, sm * longest + at, 0)
        wait(record, tables, events, epoch, report)
        # what others have written is seen by all threads, since one has waited for it
        tl.debug_barrier()
        stamp(stamps, sm * longest + at, 1)
        found = tl.load(tables.numbers + sm * longest + at)
        for nth in tl.static_range(num_specs(specs)):
            if found == nth:
                execute(record, arenas, there, spec_at(specs, nth))
        # the next record, and whoever hears the signal, may read what any thread has stored
        tl.debug_barrier()
        stamp(stamps, sm * longest + at, 2)
        signal(record, tables, events)
