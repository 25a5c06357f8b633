"""Whether an attention goes by tiles, of queries and of keys, and how these lie in memory.

In: an Attention or Attend and the operands before it. Out: what its spec says of tiles; nothing
where one goes a query at a time: of other types than halves, of heads that are too long, of one
query to the keys. Next on the walk: boxes.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from distmega.kernels.isa.opcodes import ATTENDED, Attend, Attention, ExtraOperand, Ref
from distmega.kernels.records.boxes import RecordShape, unit_of, unit_of_first
from distmega.program.dtypes import HALVES

MOST_HEAD = 256
FEW_QUERIES, MANY_QUERIES = 16, 128
"""Of a tile: what one instruction of a warp multiplies, or eight warps at once."""
MOST_KEYS, MOST_ELEMENTS = 64, 8192
"""Of a tile: its keys, and elements of these in rows as long as a power of two. Under a bias, whose
places take registers, it has half as many.
"""


@dataclass(frozen=True, slots=True)
class _Operand:
    ref: Ref
    strides: tuple[int, ...]


def head_tiles(
    one: Attention | Attend, extra: Sequence[ExtraOperand], widths: tuple[int, int]
) -> RecordShape:
    """widths: of heads of keys and of values, padded; of what is returned then also queries and
    keys of a tile. steps: strides of q, keys, values and out along rows, heads, the group or
    positions, and elements. units: of elements of a head of keys and of values, and of the first
    elements of those operands. extra: operands before the record.
    """
    operands = _operands(one, extra)
    queries = one.g * (one.m if _rows_share_keys(one, operands) else 1)
    dtypes = {operand.ref.dtype for operand in operands[:3]}
    halves = len(dtypes) == 1 and dtypes < set(HALVES)
    if queries == 1 or not halves or max(widths) > MOST_HEAD:
        return RecordShape(widths=widths)
    keys = min(MOST_KEYS, MOST_ELEMENTS // max(widths)) >> _takes(one, "bias")
    return RecordShape(
        widths=(*widths, FEW_QUERIES if queries <= FEW_QUERIES else MANY_QUERIES, keys),
        steps=tuple(step for operand in operands for step in operand.strides),
        units=(
            unit_of(one.d),
            unit_of(one.e),
            *(unit_of_first(operand.ref, operand.strides) for operand in operands),
        ),
    )


def _operands(one: Attention | Attend, extra: Sequence[ExtraOperand]) -> Sequence[_Operand]:
    """Queries, keys, values, results."""
    if isinstance(one, Attend):
        keys, values = (_Operand(given.x, given.strides[:4]) for given in extra[:2])
        return _Operand(one.q, one.q_strides), keys, values, _Operand(one.out, one.out_strides)
    k, v = (
        _Operand(ref, (one.heads * one.t * width, one.t * width, width, 1))
        for ref, width in ((one.k, one.d), (one.v, one.e))
    )
    q, out = _Operand(one.q, (*one.q_strides, 1)), _Operand(one.out, (*one.out_strides, 1))
    return q, k, v, out


def _rows_share_keys(one: Attention | Attend, operands: Sequence[_Operand]) -> bool:
    return not _takes(one, "sequences") and not any(x.strides[0] for x in operands[1:3])


def _takes(one: Attention | Attend, name: str) -> bool:
    """Whether it has one of ATTENDED that only an Attend may have."""
    return isinstance(one, Attend) and bool(one.others >> ATTENDED.index(name) & 1)
