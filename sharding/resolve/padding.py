"""What the padding of uneven shards holds, op by op: proof that it never reaches a real element.

Comes in: an op, the iteration axes split unevenly, and what each operand holds past their extents.
Goes out: what the results hold there, or why the split isn't exact. Used by search.py and
resolve.py; the real extent of an axis is its op's, positions past it are padding.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum

from distmega.program.kinds import kind_of
from distmega.program.types import Op


class Pad(IntEnum):
    """Content of padding; each value includes those below it."""

    ZERO = 0
    FINITE = 1
    ANY = 2

    def __str__(self) -> str:
        return self.name.lower()


AxisPads = Mapping[str, Pad]
"""Padding by iteration axis, of one operand; axes that are not padded are absent."""


def additive_reads(op: Op) -> range:
    """Operands that are added to a contraction instead of multiplied: the bias."""
    first = kind_of(op).added_from
    return range(0) if first is None else range(first, len(op.reads))


def inexact_reason(
    op: Op, uneven: Sequence[str], reads: Sequence[AxisPads], index_reads: Sequence[int]
) -> str:
    """Why splitting the `uneven` axes would let padding reach a result; empty if it can't.

    index_reads: operands that hold positions to look up, whose padding must be a valid position.
    """
    for i in index_reads:
        if any(pad != Pad.ZERO for pad in reads[i].values()):
            return f"padding of the positions {op.reads[i].tensor} could be looked up"
    for name in uneven:
        axis = op.axis(name)
        if axis.role != "reduce" or kind_of(op).masks_padding:
            continue
        if axis.combine != "sum":
            return f"a {axis.combine} over zero padding of {name} isn't exact"
        added = additive_reads(op)
        pads = [pads[name] for i, pads in enumerate(reads) if name in pads and i not in added]
        if pads and (min(pads) != Pad.ZERO or max(pads) == Pad.ANY):
            return f"padding of {name} isn't provably zero"
    return ""


def result_pads(op: Op, uneven: Sequence[str], reads: Sequence[AxisPads]) -> AxisPads:
    """What results hold past the extents of the uneven parallel axes."""
    return {
        name: _result_pad(op, name, reads) for name in uneven if op.axis(name).role == "parallel"
    }


def _result_pad(op: Op, name: str, reads: Sequence[AxisPads]) -> Pad:
    if any(pad == Pad.ANY for pads in reads for pad in pads.values()):
        return Pad.ANY
    holders = {i for i, pads in enumerate(reads) if name in pads}
    zero = frozenset(i for i in holders if reads[i][name] == Pad.ZERO)
    kind = kind_of(op)
    if kind.zero_where(op, holders, zero):
        return Pad.ZERO
    return Pad.FINITE if kind.finite_where(op, zero) else Pad.ANY
