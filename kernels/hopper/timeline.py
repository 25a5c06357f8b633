"""A timeline of steps: a track an SM, a span an instruction and what it spends its time on.

In: the queues of a launch and the kernel's stamps. Out: spans for distmega/trace_file.py.
Torch-free. Next on the walk: one_row/kernel.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.diagnosis import describe, describe_batch
from distmega.kernels.hopper.plan.types import RowQueues, Stamps
from distmega.kernels.hopper.plan.words import Instruction, RowAttention
from distmega.kernels.runtime.sm_spans import sm_span
from distmega.trace_file import Span


def timeline_spans(queues: RowQueues, stamps: Stamps, rank: int) -> Iterator[Span]:
    """Spans on the clock of the stamps, in microseconds: each instruction, then its parts.

    stamps: [steps][sms][instructions][STAMPS], nanoseconds on a clock that all SMs share, at least
    as many instructions as the longest queue has; 0 for a stamp that an instruction does not set.
    """
    for sm, queue in enumerate(queues.queues):
        for step, of_step in enumerate(stamps):
            for one, times in zip(queue, of_step[sm], strict=False):
                name = one.name
                task = describe(one)
                yield sm_span(rank, sm, name, times[0], times[-1], {"step": step, "task": task})
                if all(times):
                    for part, (begin, end) in zip(_parts(one), pairwise(times), strict=True):
                        yield sm_span(rank, sm, part, begin, end, {})


def batch_spans(queues: BatchQueues, stamps: Stamps, rank: int) -> Iterator[Span]:
    """As timeline_spans of the kernel of several rows; what loaders do has tracks of its own.

    stamps: [steps][sms][instructions][BATCH_STAMPS].
    """
    for sm, queue in enumerate(queues.queues):
        behind = 0
        for step, of_step in enumerate(stamps):
            for number, (one, times) in enumerate(zip(queue, of_step[sm], strict=True)):
                begin, ready, chosen, end, loaded = times
                if not begin:
                    continue  # a sample from the logits of all ranks takes none
                args: dict[str, str | int] = {
                    "step": step,
                    "task": describe_batch(queues, number, sm),
                }
                yield sm_span(rank, sm, one.name, begin, end, args)
                yield sm_span(rank, sm, "wait for all SMs", begin, ready, {})
                if chosen:
                    yield sm_span(rank, sm, "choose experts", ready, chosen, {})
                yield sm_span(rank, sm, "work", chosen or ready, end, {})
                if behind:
                    loads = sm_span(rank, sm, one.name, behind, loaded, {})
                    yield replace(loads, track=f"SM {sm} loads")
                behind = loaded


def _parts(one: Instruction) -> tuple[str, ...]:
    """What happens between an instruction's stamps."""
    if isinstance(one, RowAttention):
        return ("wait for q, k, v", "blocks", "sum and write")
    return ("wait for x", "first group", "rest and write")
