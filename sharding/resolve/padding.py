"""What the padding of uneven shards holds, op by op: proof that it never reaches a real element.

Comes in: an op, the iteration axes split unevenly, and what each operand holds past their extents.
Goes out: what the results hold there, or why the split isn't exact. Used by search.py and
resolve.py; the real extent of an axis is its op's, positions past it are padding.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum

from distmega.program import expr
from distmega.program.ops.compute import ATTENTIONS
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

MASKED = frozenset({"embedding", "argmax", "sample", "gather_rows"})
"""Kinds that compare indices with the true extent, so that padding is never chosen."""

_DATA_MOVEMENT = frozenset({"slice", "concat", "reshape", "transpose", "view", "set", "reduce"})
_LINEAR_IN_FIRST = frozenset({"rms_norm", "rope", "kv_append"})
_SCALED = frozenset({"rms_norm", "layer_norm"})
"""Kinds that divide by what is zero for a row of zeros, but for their eps."""
_ATTENTION_VALUES = 2
_EMBEDDING_TABLE = 1


def additive_reads(op: Op) -> range:
    """Operands that are added to a contraction instead of multiplied: the bias."""
    return range(2, len(op.reads)) if op.kind == "linear" else range(0)


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
        if axis.role != "reduce" or op.kind in MASKED:
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
    if _zero_result(op, holders, zero):
        return Pad.ZERO
    if op.kind == "pointwise":
        tree = expr.parse(str(op.attr("expr")))
        return Pad.FINITE if expr.is_finite(tree, zero) else Pad.ANY
    return Pad.FINITE if op.kind not in _SCALED or _positive_eps(op) else Pad.ANY


def _zero_result(op: Op, holders: set[int], zero: frozenset[int]) -> bool:
    """Whether results are exactly zero in padding where operands `zero` are."""
    if op.kind == "linear":
        added = set(additive_reads(op))
        return bool(zero - added) and added <= zero
    if op.kind == "pointwise":
        return expr.is_zero(expr.parse(str(op.attr("expr"))), zero)
    if op.kind in _DATA_MOVEMENT:
        return holders == zero
    if op.kind in _LINEAR_IN_FIRST:
        return 0 in zero and (op.kind != "rms_norm" or _positive_eps(op))
    if op.kind in ATTENTIONS:
        return _ATTENTION_VALUES in zero
    return op.kind == "embedding" and _EMBEDDING_TABLE in zero


def _positive_eps(op: Op) -> bool:
    eps = op.get("eps", 0.0)
    return isinstance(eps, float) and eps > 0
