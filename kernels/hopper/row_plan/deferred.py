"""Sums over ranks that no SM adds up before readers do: each polls the parts of all ranks.

In: a draft of which the segment is known. Out: the names of such sums, and which op keeps each. An
owner that adds up rows and publishes them costs one more hop between SMs. Readers of parts save it,
and poll as many words more as there are other ranks. The first rank's part has what is carried
besides the product. So that nothing is rounded twice, its SMs keep their rows of that part in f32,
and add the other ranks' when they read all parts. Used by queues.py; next on the walk:
epilogues.py.
"""

from collections.abc import Mapping

from distmega.kernels.hopper.plan.matrices import rows_of, sms_with_rows
from distmega.kernels.hopper.row_plan.draft import POLLED_WORDS, RowDraft
from distmega.kernels.tasks.fuse import Fused, FusedContraction, FusedPointwise, taken_by
from distmega.program.expr import parse

MAX_PART_ROWS = 4096
"""Rows of the parts of all ranks together, at most: with 8192 polls cost as much as the hop."""
FORMULAS = {0: (parse("a0"),), 1: (parse("a0 + a1"), parse("a1 + a0"))}
"""Those that ranks' parts can be added up of, by the number of what is carried."""


def find_deferred(draft: RowDraft) -> Mapping[str, str]:
    """By the name of a sum's result: the op that keeps its rows, "" where nobody carries it. Empty
    where they would be less than half of all sums: a kernel that adds up in both ways is larger.
    """
    found, sums = {}, [op for op in draft.contractions() if op.num_ranks > 1]
    for op in sums:
        keeper = _keeper(draft, op) if _has_parts(draft, op) and _is_polled(draft, op) else None
        if keeper is not None:
            found[op.outs[0]] = keeper
    return found if 2 * len(found) >= len(sums) else {}


def is_deferred(draft: RowDraft, op: FusedContraction) -> bool:
    """Whether an op's result is a sum over ranks that readers add up."""
    return op.outs[0] in draft.deferred


def first_carries(draft: RowDraft, op: FusedContraction) -> bool:
    """Whether what is carried besides a product is in the first rank's part of the sum."""
    return is_deferred(draft, op) or any(name in draft.deferred for name in op.operands)


def _adds_up(op: FusedContraction) -> bool:
    """Whether an op's result is a sum over ranks of what its formula gives on each, if one alone
    has what is carried.
    """
    return (
        op.num_ranks > 1
        and len(op.outs) == len(op.streams) == 1
        and op.formula in FORMULAS.get(len(op.operands), ())
        and not any(map(any, (stream.biases for stream in op.streams)))
    )


def _has_parts(draft: RowDraft, op: FusedContraction) -> bool:
    """Whether there are parts to add up, and few enough."""
    return _adds_up(op) and op.num_ranks * rows_of(op, draft.placed) <= MAX_PART_ROWS


def _is_polled(draft: RowDraft, op: FusedContraction) -> bool:
    """Whether all that take the result poll the row and no more, or are such sums that carry it."""
    name = op.outs[0]
    if name in map(draft.storage, draft.segment.outputs):
        return False
    if any(shown.tensor == name for shown in draft.shown.values()):
        return False
    if draft.elements(name) % (2 * POLLED_WORDS):
        return False  # whole polls have pairs of four rows
    readers = [one for one in draft.fused if name in taken_by(one)]
    return any(_reads_row(one, name) for one in readers) and all(
        _reads_row(one, name)
        or (isinstance(one, FusedContraction) and one.x != name and _adds_up(one))
        for one in readers
    )


def _reads_row(one: Fused, name: str) -> bool:
    """Whether an op polls pairs of the row, and does nothing else with it."""
    match one:
        case FusedPointwise() | FusedContraction(normed=""):
            return one.x == name and name not in one.operands
    return False


def _keeper(draft: RowDraft, op: FusedContraction) -> str | None:
    """The first op that polls the result on all SMs that have rows of it, before it is carried; ""
    where nobody carries it, None where there is no such op.
    """
    name, after = op.outs[0], draft.fused[draft.fused.index(op) + 1 :]
    carried_by = (
        i
        for i, one in enumerate(after)
        if isinstance(one, FusedContraction) and name in one.operands
    )
    last = next(carried_by, None)
    if last is None:
        return ""
    owners = sms_with_rows(rows_of(op, draft.placed), 1, draft.num_sms)
    for one in after[:last]:
        if not isinstance(one, FusedContraction) or one.operands or not _reads_row(one, name):
            continue
        if owners <= sms_with_rows(rows_of(one, draft.placed), len(one.streams), draft.num_sms):
            return one.name
    return None
