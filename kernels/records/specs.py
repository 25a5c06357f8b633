"""What the kernel of records is specialised for: the sorts of instructions that a segment has.

In: encoded queues. Out: the `RecordSpec` of each record, equal ones once, and for each record the
number of its spec. A spec has what decides about code: the opcode, where operands lie and of which
type they are, a formula, a way of combining; extents, strides and bases stay in the record's
words. Next on the walk: heads.py.
"""

import math
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
    NORMS,
    OPCODES,
    SCANS,
    ExtraOperand,
    Instruction,
    Linear,
    Ref,
)
from distmega.kernels.records.boxes import (
    ALIGNED,
    RecordShape,
    box_of_copy,
    box_of_formula,
    unit_of_first,
)
from distmega.kernels.records.heads import head_tiles
from distmega.program.dtypes import HALVES, INTEGER_BITS
from distmega.program.expr import Expr
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
MOST_TILED = 64
"""Rows and columns of a product that an SM makes together, at most."""
LEAST_TILED, LEAST_N, MOST_M, MOST_N = 64, 32, 128, 256
"""Rows, or columns, and sums of those by tensor cores, at least; columns of their tiles, at least;
rows and columns of these, at most.
"""
CAPPED = "capped"
MOST_ROW, ROWS_ELEMENTS = 8192, 4096
"""Elements of a row that an SM has at once, at most, and of several such rows."""
UNITED = "dim", "start", "count", "x", "out", "weight", "bias"
"""Of what a norm's spec has units."""
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
    cap, "" for others. formula: of a Pointwise. widths: powers of two at least as large as the rows
    that stay in registers as a whole; rows and columns of the tiles of a product; behind those of
    heads, queries and keys of the tiles of an attention; rows of a norm that pass together, and how
    long they are; of formulas and copies see boxes.py. others: bits of what an Attend takes.
    steps: strides of what is made by tiles of tensor cores, whole rows or boxes, so that its loads
    are compiled as wide as they may be; () for others. units: of a product so made, powers of two
    that divide its m, n, k and the first elements of x, w and out; of an attention see heads.py, of
    a norm UNITED, of formulas and copies boxes.py.
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
    """By what an instruction goes: tiles, rows, boxes."""
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
            return RecordShape(widths=(min(_padded(m), MOST_TILED), min(_padded(n), MOST_TILED)))
        case opcodes.Attention() | opcodes.Attend():
            return head_tiles(instruction, extra, (_padded(instruction.d), _padded(instruction.e)))
        case _:
            return RecordShape()


def _product_tiles(one: Linear) -> RecordShape:
    firsts = (ref.first for ref in (one.x, one.w, one.out))
    return RecordShape(
        widths=(_width(one.m, LEAST_TILED, MOST_M), _width(one.n, LEAST_N, MOST_N)),
        steps=(*one.x_strides, *one.w_strides, *one.out_strides),
        units=tuple(map(_unit, (one.m, one.n, one.k, *firsts))),
    )


def _by_tensor_cores(one: Linear) -> bool:
    """Whether a product is large enough for tiles, of one half type, and each operand's elements
    lie side by side.
    """
    halves = one.x.dtype == one.w.dtype and one.x.dtype in HALVES
    packed = 1 in one.x_strides and 1 in one.w_strides and min(one.x_strides + one.w_strides) >= 0
    return halves and packed and min(max(one.m, one.n), one.k) >= LEAST_TILED


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
    """What divides each of UNITED."""
    strides = one.x_strides, one.out_strides, one.vector_strides[:1], one.vector_strides[1:]
    refs = one.x, one.out, one.weight, one.bias
    firsts = (
        1 if ref is None else unit_of_first(ref, steps)
        for ref, steps in zip(refs, strides, strict=True)
    )
    return (_unit(one.dim), _unit(one.start), _unit(one.count), *firsts)


def _width(extent: int, least: int, most: int) -> int:
    return min(max(least, _padded(extent)), most)


def _unit(number: int) -> int:
    """The largest power of two up to ALIGNED that divides a number."""
    return math.gcd(number, ALIGNED)


def _type_of(ref: Ref | None) -> OperandType | None:
    return None if ref is None else OperandType(int(ref.space), ref.dtype)


def _padded(extent: int) -> int:
    return max(16, 1 << (extent - 1).bit_length())


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
