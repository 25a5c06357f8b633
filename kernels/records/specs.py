"""What the kernel of records is specialised for: the sorts of instructions that a segment has.

In: encoded queues. Out: the `RecordSpec` of each record, equal ones once, and for each record the
number of its spec. A spec has what decides about code: the opcode, where operands lie and of which
type they are, a formula, a way of combining; extents, strides and bases stay in the record's
words. Next on the walk: heads.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distmega.errors import UnsupportedError
from distmega.kernels.isa import opcodes
from distmega.kernels.isa.encoding import (
    Encoded,
    Words,
    record_fields,
    unpack,
    unpack_expression,
)
from distmega.kernels.isa.opcodes import (
    COMBINES,
    OPCODES,
    SCANS,
    ExtraOperand,
    Instruction,
    Linear,
    Ref,
)
from distmega.kernels.records.boxes import (
    RecordShape,
    box_of_copy,
    box_of_formula,
    padded,
    unit_of,
    unit_of_first,
)
from distmega.kernels.records.heads import head_tiles
from distmega.program.dtypes import HALVES, INTEGER_BITS
from distmega.program.expr import Expr
from distmega.program.ops.norms import NORMS
from distmega.program.types import Op

BODIES: frozenset[type[Instruction]] = frozenset(
    {
        opcodes.Linear, opcodes.Contract, opcodes.Pointwise, opcodes.Reduce, opcodes.Norm,
        opcodes.Scan, opcodes.Rope, opcodes.KvAppend, opcodes.Attention, opcodes.Attend,
        opcodes.Embedding, opcodes.Gather, opcodes.Copy, opcodes.TakeShard, opcodes.Argmax,
        opcodes.Top, opcodes.Push, opcodes.PushParts, opcodes.SumRanks, opcodes.ArgmaxRanks,
    }
)  # fmt: skip
"""Instructions that the kernel has a body for."""
NO_WORK = (opcodes.Nop, opcodes.ExtraOperand)
LEAST_TILED = 64
"""Of a product that goes by tiles of tensor cores: elements of a sum, and rows or columns."""
LONG_SUM = 1024
"""Elements of a sum for which a tile's fewest columns are enough: 4 x 32 sums over 3072 take
an H200 23 us without loads that are ahead, a whole tile 10.
"""
LEAST_M, MOST_M = 64, 128
"""Rows of such a tile."""
LEAST_N, MOST_N = 32, 256
"""Columns of such a tile."""
MOST_UNTILED = 64
"""Rows and columns that an SM makes together of another product."""
PRODUCT_UNITS = "m", "n", "k", "x", "w", "out"
"""Of what the spec of a product by such tiles has units: numbers, then first elements."""
NORM_UNITS = "dim", "start", "count", "x", "out", "weight", "bias"
"""Of what the spec of a norm of whole rows has units, likewise."""
LEAST_PADDED = 16
"""Of what is multiplied."""
CAPPED = "capped"
MOST_ROW, ROWS_ELEMENTS = 8192, 4096
"""Elements of a row that an SM has at once, at most, and of several such rows."""
IDLE = -1
"""The spec of a record that only waits and signals."""


@dataclass(frozen=True, slots=True)
class OperandType:
    """Where an operand lies, a number of Space, and its element type."""

    space: int
    dtype: str


@dataclass(frozen=True, slots=True)
class RecordSpec:
    """What all records of one branch of the kernel share.

    operands: in the order of fields, None where there is none; extra: those of the ExtraOperands
    before. way: the name of what combines, normalises or scans, CAPPED of an attention with a soft
    cap, "" for others. formula: of a Pointwise. others: bits of what an Attend takes. widths,
    steps, units: see RecordShape.
    """

    opcode: str
    operands: tuple[OperandType | None, ...]
    extra: tuple[OperandType, ...] = ()
    way: str = ""
    formula: Expr | None = None
    widths: tuple[int, ...] = ()
    others: int = 0
    steps: tuple[int, ...] = ()
    units: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordSpecs:
    """Those of a segment, as one constant of its kernel."""

    each: tuple[RecordSpec, ...]


def find_specs(encoded: Encoded, ops: Sequence[Op] = ()) -> tuple[RecordSpecs, Words]:
    """The specs of a segment, and the number of each record's, [num_sms, longest queue].

    UnsupportedError names an instruction without a body. ops: by group, whose extents it tells.
    """
    numbers = np.full(encoded.queues.shape[:2], IDLE, dtype=np.int32)
    known: dict[RecordSpec, int] = {}
    for sm, (queue, length) in enumerate(
        zip(encoded.queues, encoded.lengths.tolist(), strict=True)
    ):
        extra: list[ExtraOperand] = []
        for at, record in enumerate(queue[:length]):
            header, instruction = unpack(record)
            if isinstance(instruction, ExtraOperand):
                extra.append(instruction)
            elif not isinstance(instruction, NO_WORK):
                if type(instruction) not in BODIES:
                    extents = ops[header.group].extents if ops else {}
                    raise _without_body(encoded.names[header.group], extents, instruction)
                spec = spec_of(instruction, extra, encoded.constants)
                numbers[sm, at] = known.setdefault(spec, len(known))
                extra = []
    return RecordSpecs(tuple(known)), numbers


def spec_of(
    instruction: Instruction, extra: Sequence[ExtraOperand], constants: Words
) -> RecordSpec:
    """The spec of an instruction; extra: the operands that stand before it."""
    operands = tuple(
        _type_of(getattr(instruction, field.name))
        for field in record_fields(OPCODES.index(type(instruction)))
        if field.kind == "ref"
    )
    formula = None
    if isinstance(instruction, opcodes.Pointwise):
        formula = unpack_expression(constants, instruction.expr)
    shape = _shape_of(instruction, extra)
    return RecordSpec(
        opcode=type(instruction).__name__,
        operands=operands,
        extra=tuple(OperandType(int(one.x.space), one.x.dtype) for one in extra),
        way=_way_of(instruction),
        formula=formula,
        widths=shape.widths,
        others=instruction.others if isinstance(instruction, opcodes.Attend) else 0,
        steps=shape.steps,
        units=shape.units,
    )


def _way_of(instruction: Instruction) -> str:
    """See RecordSpec."""
    match instruction:
        case opcodes.Reduce(combine=number) | opcodes.SumRanks(combine=number):
            return COMBINES[number]
        case opcodes.Norm(kind=number):
            return NORMS[number]
        case opcodes.Scan(kind=number):
            return SCANS[number]
        case opcodes.Attention(softcap=cap) | opcodes.Attend(softcap=cap):
            return CAPPED if cap > 0 else ""
        case _:
            return ""


def _shape_of(instruction: Instruction, extra: Sequence[ExtraOperand]) -> RecordShape:
    """Whether an instruction goes by tiles, whole rows or boxes, and by which."""
    match instruction:
        case opcodes.Norm():
            return _whole_rows(instruction)
        case opcodes.Pointwise():
            return box_of_formula(instruction, extra)
        case opcodes.Copy():
            return box_of_copy(instruction)
        case opcodes.Linear() if _by_tensor_cores(instruction):
            return _product_tiles(instruction)
        case opcodes.Linear(m=m, n=n) | opcodes.Contract(m=m, n=n):
            most = MOST_UNTILED
            return RecordShape(widths=(min(_padded(m), most), min(_padded(n), most)))
        case opcodes.Attention() | opcodes.Attend():
            return head_tiles(instruction, extra, (_padded(instruction.d), _padded(instruction.e)))
        case _:
            return RecordShape()


def _product_tiles(one: Linear) -> RecordShape:
    firsts = (ref.first for ref in (one.x, one.w, one.out))
    return RecordShape(
        widths=(_width(one.m, LEAST_M, MOST_M), _width(one.n, LEAST_N, MOST_N)),
        steps=(*one.x_strides, *one.w_strides, *one.out_strides),
        units=tuple(map(unit_of, (one.m, one.n, one.k, *firsts))),
    )


def _by_tensor_cores(one: Linear) -> bool:
    """Whether a product is large enough for tiles, of one half type, and each operand's elements
    lie side by side.
    """
    halves = one.x.dtype == one.w.dtype and one.x.dtype in HALVES
    packed = 1 in one.x_strides and 1 in one.w_strides and min(one.x_strides + one.w_strides) >= 0
    side = max(one.m, one.n)
    large = min(side, one.k) >= LEAST_TILED or (side >= LEAST_N and one.k >= LONG_SUM)
    return halves and packed and large


def _whole_rows(one: opcodes.Norm) -> RecordShape:
    """Rows that an SM has at once, and elements of each, a power of two; nothing of rows too long,
    or of whole numbers.
    """
    width = _padded(one.dim)
    if width > MOST_ROW or one.x.dtype in INTEGER_BITS:
        return RecordShape()
    return RecordShape(
        widths=(1 if one.rows == 1 else max(1, ROWS_ELEMENTS // width), width),
        steps=(*one.x_strides, *one.out_strides, *one.vector_strides),
        units=_units_of_rows(one),
    )


def _units_of_rows(one: opcodes.Norm) -> tuple[int, ...]:
    """Of NORM_UNITS."""
    strides = one.x_strides, one.out_strides, one.vector_strides[:1], one.vector_strides[1:]
    refs = one.x, one.out, one.weight, one.bias
    firsts = (
        1 if ref is None else unit_of_first(ref, steps)
        for ref, steps in zip(refs, strides, strict=True)
    )
    return (unit_of(one.dim), unit_of(one.start), unit_of(one.count), *firsts)


def _width(extent: int, least: int, most: int) -> int:
    return min(max(least, _padded(extent)), most)


def _type_of(ref: Ref | None) -> OperandType | None:
    return None if ref is None else OperandType(int(ref.space), ref.dtype)


def _padded(extent: int) -> int:
    return max(LEAST_PADDED, padded(extent))


def _without_body(
    name: str, extents: Mapping[str, int], instruction: Instruction
) -> UnsupportedError:
    done = sorted(kind.__name__ for kind in BODIES)
    shown = ", ".join(f"{axis} {extent}" for axis, extent in extents.items())
    return UnsupportedError(
        f"op {name!r}{shown and f' ({shown})'}, whose instruction {type(instruction).__name__} no"
        " kernel on GPUs has",
        expected=f"instructions among {', '.join(done)}",
        remedy="leave out megakernel=True: library ops do the others",
    )
