"""Queues with repeated parts left out: what is proven of three like layers holds for eighty.

In: the queues of a kernel of one row. Out: queues in which a run of equal parts, each one
generation further than the one before, stands MOST_PARTS times. An edge of the dataflow joins a
part with itself or the next one, so a path from a reader of a generation to the writer of the next
lies within two parts, which are alike wherever they stand; the first and the last part keep their
neighbours. Used by proof.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise

from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.words import (
    Instruction,
    RowAttention,
    RowBarrier,
    RowCombine,
    RowLinear,
    RowPointwise,
)

MOST_PARTS = 3
"""Of a run of equal parts: the first, the last and one between."""
LONGEST_PART = 64
"""Kinds of work of a part, at most."""

Kind = tuple[str, str]
"""Name of an op and the class of instructions."""


def kind_of(one: Instruction) -> Kind:
    return one.name, type(one).__name__


def kinds_in_order(queues: RowQueues) -> list[Kind]:
    """The kinds of work of all queues, each of which has some of them in this order; barriers that
    wait behind those that only write what they wait for.
    """
    before: dict[Kind, set[Kind]] = {}
    waiting, writing = (
        {
            kind_of(one)
            for queue in queues.queues
            for one in queue
            if isinstance(one, RowBarrier) and bool(one.num_words) == waits
        }
        for waits in (True, False)
    )
    before.update((kind, set(writing)) for kind in waiting)
    for queue in queues.queues:
        kinds = [kind_of(one) for one in queue]
        for kind in kinds:
            before.setdefault(kind, set())
        for first, then in pairwise(kinds):
            if first != then:
                before[then].add(first)
    return list(TopologicalSorter(before).static_order())


def shorten(queues: RowQueues) -> RowQueues:
    """The queues with at most MOST_PARTS of the longest run of equal parts."""
    order = kinds_in_order(queues)
    shapes, generations = _shapes(queues, order)
    start, length, count = _longest_run(shapes, generations)
    left_out = count - MOST_PARTS
    if left_out <= 0:
        return queues
    first_gone = start + MOST_PARTS * length
    gone = set(order[first_gone : start + count * length])
    after = set(order[start + count * length :])
    return replace(
        queues,
        num_generations=max(1, queues.num_generations - left_out),
        queues=tuple(
            tuple(
                _earlier(one, left_out) if kind_of(one) in after else one
                for one in queue
                if kind_of(one) not in gone
            )
            for queue in queues.queues
        ),
    )


def _earlier(one: Instruction, left_out: int) -> Instruction:
    """An instruction behind what is left out: of a generation, or reading one, that moved."""
    generation = _moved(one.generation, left_out)
    if isinstance(one, RowLinear | RowPointwise):
        read = _moved(one.generation - one.flag_delta, left_out)
        return replace(one, generation=generation, flag_delta=generation - read)
    return replace(one, generation=generation)


def _moved(generation: int, left_out: int) -> int:
    """Of a buffer whose generations were left out; others have fewer."""
    return generation - left_out if generation >= left_out else generation


def _shapes(queues: RowQueues, order: Sequence[Kind]) -> tuple[list[tuple[object, ...]], list[int]]:
    """Of each kind of work: what its instructions exchange on which SM, and the generation."""
    found: dict[Kind, list[object]] = {kind: [] for kind in order}
    generations: dict[Kind, int] = {}
    for sm, queue in enumerate(queues.queues):
        for one in queue:
            kind = kind_of(one)
            found[kind].append((sm, _words_of(one)))
            generations[kind] = one.generation
    return [(kind[1], *found[kind]) for kind in order], [generations[kind] for kind in order]


def _words_of(one: Instruction) -> tuple[object, ...]:
    """The fields of an instruction that decide which words it exchanges."""
    match one:
        case RowLinear():
            return (
                one.opcode, one.num_units, one.src, one.num_src_words, one.flag_delta, one.dst,
                one.row0, one.num_rows, one.flags,
            )  # fmt: skip
        case RowPointwise():
            return (
                one.number, one.num_units, one.src, one.num_src_words, one.flag_delta, one.dst,
                one.row0, one.num_rows, one.flags,
            )  # fmt: skip
        case RowAttention():
            return (
                one.head, one.query0, one.split, one.max_splits, one.src, one.k_src, one.v_src,
                one.partial,
            )  # fmt: skip
        case RowCombine():
            return one.head, one.max_splits, one.partial, one.dst
    return (replace(one, name="", generation=0),)


def _longest_run(
    shapes: Sequence[tuple[object, ...]], generations: Sequence[int]
) -> tuple[int, int, int]:
    """Start, length and number of the equal parts that together are longest."""
    known: dict[tuple[object, ...], int] = {}
    numbers = [known.setdefault(shape, len(known)) for shape in shapes]
    best = (0, 1, 1)
    for length in range(1, min(LONGEST_PART, len(numbers) // 2) + 1):
        run = 0
        for at in range(len(numbers) - length):
            same = numbers[at] == numbers[at + length]
            run = run + 1 if same and generations[at + length] == generations[at] + 1 else 0
            count = run // length + 1
            if count * length > best[1] * best[2] or best == (0, 1, 1):
                best = (at + length + 1 - count * length, length, count)
    return best
