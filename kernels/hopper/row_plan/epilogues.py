"""Which ops write buffers in turn, which epilogues there are, and what readers poll.

In: a draft of which the segment is known, but no instruction. Ops that compute the same, like those
of equal layers, are of one class. Next on the walk: linear.py.
"""

from collections.abc import Iterator, Sequence

from distmega.kernels.hopper.plan.matrices import rows_of
from distmega.kernels.hopper.plan.pointwise import MAX_CARRIED
from distmega.kernels.hopper.plan.segment import is_ranked
from distmega.kernels.hopper.plan.types import Epilogue, Publishes, unfit
from distmega.kernels.hopper.plan.words import MAX_EPILOGUES, MAX_SMS
from distmega.kernels.hopper.row_plan.deferred import first_carries, is_deferred
from distmega.kernels.hopper.row_plan.draft import POLLED_WORDS, RowDraft
from distmega.kernels.tasks.fuse import (
    Fused,
    FusedAttention,
    FusedContraction,
    FusedGather,
    FusedPointwise,
    FusedRouting,
)

MAX_SUMMED_ROWS = POLLED_WORDS * MAX_SMS
"""Rows of a sum over ranks that an SM adds up, at most: a poll a thread."""


def find_classes(draft: RowDraft) -> None:
    """A name for each op's buffers, that of the first op that computes alike."""
    known: dict[tuple[object, ...], str] = {}
    of: dict[str, str] = {}
    for op in draft.fused:
        key = signature_of(draft, op)
        if isinstance(op, FusedAttention):
            key = "attention", of.get(draft.storage(op.q), "")
        draft.classes.append(known.setdefault(key, op.name))
        if isinstance(op, FusedContraction):
            of |= dict.fromkeys(op.outs, draft.classes[-1])
        elif isinstance(op, FusedPointwise):
            of[op.out] = draft.classes[-1]


def signature_of(draft: RowDraft, op: Fused) -> tuple[object, ...]:
    """What an op computes, its names apart."""
    if isinstance(op, FusedPointwise):
        return (
            "pointwise",
            draft.elements(op.out),
            bool(op.x),
            op.formula,
            published_form(draft, op.name, (op.out,)),
            *attention_roles(draft, (op.out,)),
        )
    if not isinstance(op, FusedContraction):
        return (type(op).__name__,)
    sizes = tuple(draft.placed.rows_of(name) for stream in op.streams for name in stream.weights)
    slots, roles = op.experts and op.experts.by, attention_roles(draft, op.outs)
    deferred = is_deferred(draft, op), first_carries(draft, op)
    ranks = op.num_ranks, is_gathered(draft, op), *deferred
    numbers = published_form(draft, op.name, op.outs, len(op.streams)) == "numbers"
    return "contraction", draft.length(op), sizes, op.formula, *ranks, numbers, slots, *roles


def attention_roles(draft: RowDraft, outs: Sequence[str]) -> Iterator[int]:
    """As what attention takes results: queries, keys or values, which are of one generation."""
    for op in draft.fused:
        if isinstance(op, FusedAttention):
            names = [draft.storage(name) for name in (op.q, op.k, op.v)]
            yield from (names.index(name) for name in outs if name in names)


def find_epilogues(draft: RowDraft) -> list[Epilogue]:
    """Those of all contractions. Ops that differ only in whether somebody polls their result
    share one.
    """
    found: dict[tuple[object, ...], Epilogue] = {}
    for op in draft.fused:
        if isinstance(op, FusedContraction):
            one = epilogue_of(draft, op)
            key = epilogue_key(one)
            if key not in found or found[key].publishes == "nothing":
                found[key] = one
    if len(found) > MAX_EPILOGUES:
        raise unfit(f"{len(found)} different epilogues")
    return list(found.values())


def epilogue_of(draft: RowDraft, op: FusedContraction) -> Epilogue:
    """What becomes of an op's products. UnsupportedError for more operands than epilogues take, for
    an id that is chosen from several products, and for sums over ranks of which rows are no whole
    polls, or an SM has more than it adds up.
    """
    if len(op.operands) > MAX_CARRIED or (op.operands and len(op.streams) > 1):
        raise unfit(f"{op.name!r}, whose epilogue takes {op.operands}")
    if is_ranked(op, draft.choice) and (len(op.streams) > 1 or op.num_ranks > 1):
        raise unfit(f"{op.name!r}, which an id is chosen from, of several products")
    deferred, rows = is_deferred(draft, op), rows_of(op, draft.placed)
    is_long = draft.most_rows(rows) > MAX_SUMMED_ROWS and not deferred
    if op.num_ranks > 1 and (rows % POLLED_WORDS or is_long):
        raise unfit(f"{op.name!r}, a sum over ranks of {rows} elements on {draft.num_sms} SMs")
    return Epilogue(
        num_streams=len(op.streams),
        formula=op.formula,
        publishes=published_form(draft, op.name, op.outs, len(op.streams)),
        num_carried=len(op.operands),
        summed=op.num_ranks > 1 and not deferred,
        ranked=is_ranked(op, draft.choice),
        weighted=is_weighted(op),
        gathered=deferred or is_gathered(draft, op),
        deferred=deferred,
        first_carries=first_carries(draft, op),
    )


def is_gathered(draft: RowDraft, op: FusedContraction) -> bool:
    """Whether all ranks get its result, side by side."""
    if not draft.gathers.keys().isdisjoint(op.outs):
        if len(op.outs) > 1 or op.num_ranks > 1 or is_weighted(op):
            raise unfit(f"{op.name!r}, a sum over ranks or of several results, gathered")
        return True
    return False


def is_weighted(op: FusedContraction) -> bool:
    """Whether its rows are those of experts, whose weights the epilogue multiplies in."""
    return op.experts is not None and op.experts.by == "rows"


def epilogue_key(one: Epilogue) -> tuple[object, ...]:
    """What ops of one epilogue have in common: all but whether somebody polls their results."""
    numbers = one.publishes == "numbers"
    kind = one.num_streams, one.formula, numbers
    over_ranks = one.summed, one.gathered, one.deferred, one.first_carries
    return *kind, *over_ranks, one.ranked, one.weighted


def epilogue_number(draft: RowDraft, op: FusedContraction) -> int:
    """The place of an op's epilogue among the draft's."""
    keys = [epilogue_key(one) for one in draft.epilogues]
    return keys.index(epilogue_key(epilogue_of(draft, op)))


def published_form(
    draft: RowDraft, name: str, outs: tuple[str, ...], num_streams: int = 1
) -> Publishes:
    """What readers of an op's results poll: attention and the choice of experts take numbers,
    contractions pairs, and pointwise work either, numbers where pairs are no whole polls.
    """
    by_attention = by_linears = by_rows = False
    gather = next((draft.gathers[out] for out in outs if out in draft.gathers), None)
    if gather is not None:
        require_only_gathered(draft, gather)
        outs = (gather.out,)
    for other in draft.fused:
        match other:
            case FusedAttention():
                attended = map(draft.storage, (other.q, other.k, other.v))
                by_attention |= bool(set(outs).intersection(attended))
            case FusedRouting():
                by_attention |= other.scores in outs
            case FusedContraction():
                by_linears |= other.x in outs
            case FusedPointwise() if other.x in outs:
                by_rows = True
                by_attention |= draft.elements(other.x) % (2 * POLLED_WORDS) != 0
    if gather is not None and not (by_attention or by_linears or by_rows):
        by_attention, by_linears = num_streams == 1, num_streams > 1
    if by_attention and (by_linears or num_streams > 1):
        raise unfit(f"{name!r}, whose readers take numbers and pairs")
    return "numbers" if by_attention else "pairs" if by_linears or by_rows else "nothing"


def require_only_gathered(draft: RowDraft, gather: FusedGather) -> None:
    """Refuses parts of a gather that others poll too, or that end within a pair."""
    others = [op for op in draft.fused if op is not gather]
    polled = {op.x for op in others if isinstance(op, FusedContraction | FusedPointwise)}
    if gather.x in polled or draft.elements(gather.x) % 2:
        raise unfit(f"{gather.name!r} of {gather.x!r}, of {draft.elements(gather.x)} elements")
