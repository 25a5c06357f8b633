"""Whether a formula or a copy goes by boxes of two dims, and how these lie in memory.

In: a Pointwise or Copy and the operands before it. Out: what its spec says of boxes, so that loads
and stores are compiled for its very strides, as wide as they may be; nothing where one goes element
by element: of few elements, or written to places apart. Next on the walk: words.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distmega.kernels.isa.opcodes import Copy, ExtraOperand, Pointwise, Ref
from distmega.program.dtypes import FLOATS_TO_F32, item_bytes

LEAST_ELEMENTS = 256
"""Of what goes by boxes."""
BOX_BYTES = 128 * 1024
"""Of the elements of all operands of a box, wide: half of an SM's registers."""
MOST_ELEMENTS = 8192
AHEAD, STAGE_BYTES = 2, 96 * 1024
"""Boxes whose operands are on their way, at most, and what they take of an SM's shared memory."""
TRANSPOSED = 64
"""Columns of a box whose rows lie side by side in one operand and columns in the other."""
ALIGNED = 8
"""Elements of a load at most."""


@dataclass(frozen=True, slots=True)
class RecordShape:
    """How a record goes through its operands.

    widths: how much it has at a time, in powers of two. steps: strides of what goes by tiles of
    tensor cores, whole rows or boxes, so that its loads are compiled as wide as they may be; () of
    what goes by the strides in its words. units: powers of two up to ALIGNED, each of which divides
    a number of the record or the place of an operand's first element; () without steps.

    - A product: widths are rows and columns of a tile; steps those of x, w and out, two each; units
      of PRODUCT_UNITS (specs.py).
    - A norm: rows that pass together, and elements of each; steps of x, out, weight and bias; units
      of NORM_UNITS (specs.py).
    - An attention: see heads.py.
    - A formula or a copy: rows and columns of a box; boxes that are made or on their way at the
      same time; of a copy which of its dims have the rows and the columns. steps: of each operand
      along rows and columns, the written one's first. units: ALIGNED where it divides the number of
      rows (1 where none lie side by side), of columns, and the first element of each operand, else
      1.
    """

    widths: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    units: tuple[int, ...] = ()


def unit_of(number: int) -> int:
    """The largest power of two up to ALIGNED that divides a number."""
    return math.gcd(number, ALIGNED)


def padded(extent: int) -> int:
    """The least power of two that is no less."""
    return 1 << (extent - 1).bit_length()


def unit_of_first(ref: Ref, strides: Sequence[int]) -> int:
    """What divides the first element of an operand, be the task another: strides lead from one to
    the next, and elements next to each other are never parted.
    """
    return math.gcd(ALIGNED, ref.first, *(step for step in strides if step != 1))


def box_of_formula(one: Pointwise, extra: Sequence[ExtraOperand]) -> RecordShape:
    """extra: operands before the record."""
    own = (one.a0, one.a0_strides), (one.a1, one.a1_strides), (one.a2, one.a2_strides)
    fields = ((one.out, one.out_strides), *own, (one.a3, one.a3_strides))
    operands = [(ref, strides) for ref, strides in fields if ref is not None]
    operands += [(given.x, given.strides[:2]) for given in extra]
    rows, columns = one.extents
    if rows * columns < LEAST_ELEMENTS or one.out_strides[1] != 1:
        return RecordShape()
    is_transposed = any(strides[0] == 1 for _, strides in operands)
    refs = [ref for ref, _ in operands]
    height, width = _widths(rows, columns, refs)
    return RecordShape(
        widths=(height, width, _stages(height * width, refs[1:])),
        steps=tuple(step for _, strides in operands for step in strides),
        units=(
            _aligned_or_one(rows) if is_transposed else 1,
            _aligned_or_one(columns),
            *(_aligned_or_one(unit_of_first(ref, strides)) for ref, strides in operands),
        ),
    )


def box_of_copy(one: Copy) -> RecordShape:
    """Columns lie side by side where they are written, rows where they are read, if that is another
    dim; else they are the longest other dim.
    """
    dims = [dim for dim, extent in enumerate(one.extents) if extent > 1]
    columns = next((dim for dim in dims if one.dst_strides[dim] == 1), None)
    if columns is None or math.prod(one.extents) < LEAST_ELEMENTS:
        return RecordShape()
    others = [dim for dim in range(len(one.extents)) if dim != columns]
    read = [dim for dim in others if one.extents[dim] > 1 and one.src_strides[dim] == 1]
    rows = read[0] if read else max(others, key=lambda dim: one.extents[dim])
    most = TRANSPOSED if read else MOST_ELEMENTS
    num_rows, num_columns = one.extents[rows], one.extents[columns]
    height, width = _widths(num_rows, min(num_columns, most), [one.dst, one.src])
    return RecordShape(
        widths=(min(height, most), width, 1, rows, columns),
        steps=tuple(s[dim] for s in (one.dst_strides, one.src_strides) for dim in (rows, columns)),
        units=(
            _aligned_or_one(num_rows) if read else 1,
            _aligned_or_one(num_columns),
            _aligned_or_one(unit_of_first(one.dst, one.dst_strides)),
            _aligned_or_one(unit_of_first(one.src, one.src_strides)),
        ),
    )


def _widths(rows: int, columns: int, refs: Sequence[Ref]) -> tuple[int, int]:
    """Rows and columns of a box: as many elements as registers hold of all operands, those of 64
    bits with what is calculated of them.
    """
    each = sum(4 if ref.dtype in FLOATS_TO_F32 else 16 for ref in refs)
    most = min(MOST_ELEMENTS, 1 << (BOX_BYTES // each).bit_length() - 1)
    width = min(padded(columns), most)
    return min(padded(rows), most // width), width


def _stages(elements: int, read: Sequence[Ref]) -> int:
    """Boxes at the same time, as far as memory for those on their way suffices."""
    num_bytes = elements * sum(item_bytes(ref.dtype) for ref in read)
    return 1 + min(AHEAD, STAGE_BYTES // max(1, num_bytes))


def _aligned_or_one(number: int) -> int:
    """Elements that may move together: few cases, so that few specs differ in them alone."""
    return ALIGNED if number % ALIGNED == 0 else 1
