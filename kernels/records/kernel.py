"""The kernel of records: each SM goes through its queue, waits, works, signals.

In: the encoded queues of a segment, the arenas of a rank, counters that only grow. Out: what the
interpreter's launch gives (cpu/interpreter.py): in launch e an event is met at e times its count.
Of an SM's threads one waits and one signals, with a barrier of all before and behind; waits are
bounded, and once one has expired no other waits. Next on the walk: runner.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201, SIM102
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, no-any-return"

import triton
from triton import language as tl

from distmega.kernels.records.attention import attend, attention
from distmega.kernels.records.elementwise import copy, pointwise
from distmega.kernels.records.points import (
    argmax_ranks,
    embedding,
    gather,
    kv_append,
    push,
    push_parts,
    rope,
    sum_ranks,
    take_shard,
)
from distmega.kernels.records.products import contract, fetch_weight, has_weight, linear
from distmega.kernels.records.rows import argmax, norm, reduce, scan, top
from distmega.kernels.records.specs import RecordSpecs
from distmega.kernels.records.timeline import NUM_STAMPS
from distmega.kernels.records.waits import num_waits, signal, wait
from distmega.kernels.records.words import WORDS, opcode_of

STAMPS: tl.constexpr = tl.constexpr(NUM_STAMPS)


@triton.constexpr_function
def num_specs(specs: RecordSpecs):
    return len(specs.each)


@triton.constexpr_function
def spec_at(specs: RecordSpecs, nth):
    return specs.each[nth]


@triton.jit
def own_clock():
    """Nanoseconds of the GPU, as each thread reads them: for what one of them stores."""
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
def execute(record, arenas, team, spec: tl.constexpr):
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
        embedding(record, arenas, spec, team)
    elif opcode == "Gather":
        gather(record, arenas, spec)
    elif opcode == "Copy":
        copy(record, arenas, spec)
    elif opcode == "TakeShard":
        take_shard(record, arenas, spec, team)
    elif opcode == "Argmax":
        argmax(record, arenas, spec, team)
    elif opcode == "Top":
        top(record, arenas, spec)
    elif opcode == "Push":
        push(record, arenas, spec, team)
    elif opcode == "PushParts":
        push_parts(record, arenas, spec, team)
    elif opcode == "SumRanks":
        sum_ranks(record, arenas, spec)
    else:
        tl.static_assert(opcode == "ArgmaxRanks")
        argmax_ranks(record, arenas, spec)


@triton.jit
def fetch_ahead(record, arenas, found, specs: tl.constexpr):
    """Asks for weights of a record that is going to wait."""
    for nth in tl.static_range(num_specs(specs)):
        if has_weight(spec_at(specs, nth)):  # a constant: others compile nothing
            if found == nth:
                fetch_weight(record, arenas, spec_at(specs, nth))


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
    team = (member.coordinates, mine, events.lanes)
    own = tl.load(mine + events.lane).to(tl.pointer_type(tl.uint8))
    arenas = (memory.weights, memory.states, memory.activations, own)
    for at in range(tl.load(tables.lengths + sm)):
        record = tables.queues + (sm * longest + at) * WORDS
        found = tl.load(tables.numbers + sm * longest + at)
        stamp(stamps, sm * longest + at, 0)
        if num_waits(record) > 0:
            fetch_ahead(record, arenas, found, specs)
            wait(record, tables, events, epoch, report)
        # what others have written is seen by all threads, since one has waited for it
        tl.debug_barrier()
        stamp(stamps, sm * longest + at, 1)
        if found >= 0:
            for nth in tl.static_range(num_specs(specs)):
                if found == nth:
                    execute(record, arenas, team, spec_at(specs, nth))
            # the next record, and whoever hears the signal, may read what any thread has stored
            tl.debug_barrier()
        stamp(stamps, sm * longest + at, 2)
        signal(record, tables, events)
