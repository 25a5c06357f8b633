"""A timeline of one launch of records: a track an SM, a span a record, its waits and its work.

In: encoded queues, the number of each record's spec, the kernel's stamps. Out: spans for
distmega/trace_file.py, as ../hopper/timeline.py makes them. Torch-free. Next on the walk:
runner.py.
"""

from collections.abc import Iterator, Sequence

from distmega.kernels.isa.encoding import OPCODE_MASK, Encoded, Words
from distmega.kernels.isa.events import queued_tasks
from distmega.kernels.isa.opcodes import OPCODES
from distmega.kernels.records.diagnosis import describe
from distmega.kernels.runtime.sm_spans import sm_span
from distmega.trace_file import Span

NUM_STAMPS = 3
"""Of a record: its begin, behind its waits, behind its work. It ends before it signals."""

Stamps = Sequence[Sequence[Sequence[int]]]


def record_spans(encoded: Encoded, numbers: Words, stamps: Stamps, rank: int) -> Iterator[Span]:
    """Spans on the clock of the stamps, in microseconds: each record, then its parts.

    numbers: [sms][longest queue], see specs.py. stamps: [sms][longest queue][NUM_STAMPS],
    nanoseconds on a clock that all SMs share. Of a record are told its step, always 0; its task, as
    hang reports name it; its op, its opcode and the number of its spec, -1 without work.
    """
    for one, header in queued_tasks(encoded):
        begin, ready, end = stamps[one.sm][one.position]
        opcode = int(encoded.queues[one.sm, one.position, 0]) & OPCODE_MASK
        op = encoded.names[header.group]
        args: dict[str, str | int] = {
            "step": 0,
            "task": describe(one),
            "opcode": OPCODES[opcode].__name__,
            "spec": int(numbers[one.sm, one.position]),
        }
        yield sm_span(rank, one.sm, op, begin, end, args)
        yield sm_span(rank, one.sm, "wait for events", begin, ready, {})
        yield sm_span(rank, one.sm, "work", ready, end, {})
