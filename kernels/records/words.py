"""Reading a record in a kernel: numbers, operands, elements.

In: a pointer to the record's words and its spec, a constexpr. Out: extents and strides as numbers,
operands as pointers of their type, elements in the type in which they are computed with: f32 for
half types, i64 for whole numbers, else their own. Next on the walk: bodies.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, no-any-return"

import triton
from triton import language as tl

from distmega.kernels.isa.encoding import WORDS as RECORD_WORDS
from distmega.kernels.isa.encoding import record_fields
from distmega.kernels.isa.opcodes import OPCODES
from distmega.kernels.records.specs import RecordSpec
from distmega.kernels.runtime.arena import ALIGNMENT_BYTES
from distmega.program.dtypes import INTEGER_BITS

WORDS: tl.constexpr = tl.constexpr(RECORD_WORDS)
BASE_BYTES: tl.constexpr = tl.constexpr(ALIGNMENT_BYTES)
"""What the base of an operand counts."""

TYPES = {
    "f64": tl.float64, "f32": tl.float32, "bf16": tl.bfloat16, "f16": tl.float16,
    "i64": tl.int64, "i32": tl.int32, "bool": tl.int8,
}  # fmt: skip

INTEGERS = tuple(INTEGER_BITS)
"""Types that hold whole numbers."""

FIRST_WORDS = {
    (kind.__name__, field.name): field.start
    for opcode, kind in enumerate(OPCODES)
    for field in record_fields(opcode)
}
"""Opcode and field -> the word of a record where it begins."""
OPERANDS = {
    (kind.__name__, field.name): nth
    for opcode, kind in enumerate(OPCODES)
    for nth, field in enumerate(one for one in record_fields(opcode) if one.kind == "ref")
}
"""Opcode and field -> which of the operands it is."""


@triton.constexpr_function
def word_of(opcode, field):
    """The word of a field in a record."""
    return FIRST_WORDS[opcode, field]


@triton.constexpr_function
def type_of(spec: RecordSpec, field):
    """Of an operand, None where there is none; field: its name, or the number of one before."""
    if isinstance(field, int):
        return spec.extra[field]
    return spec.operands[OPERANDS[spec.opcode, field]]


@triton.constexpr_function
def has(spec: RecordSpec, field):
    """Whether a record has an operand."""
    return type_of(spec, field) is not None


@triton.constexpr_function
def space_of(spec: RecordSpec, field):
    return type_of(spec, field).space


@triton.constexpr_function
def element_type(spec: RecordSpec, field):
    """As it lies in memory."""
    return TYPES[type_of(spec, field).dtype]


@triton.constexpr_function
def wide_type(spec: RecordSpec, field):
    """In which an element is computed with."""
    dtype = type_of(spec, field).dtype
    if dtype in INTEGERS:
        return tl.int64
    return tl.float64 if dtype == "f64" else tl.float32


@triton.constexpr_function
def is_bool(spec: RecordSpec, field):
    return type_of(spec, field).dtype == "bool"


@triton.constexpr_function
def extra_back(spec: RecordSpec, number):
    """Words from the record back to that of an operand before it."""
    return (len(spec.extra) - number) * RECORD_WORDS


@triton.constexpr_function
def opcode_of(spec: RecordSpec):
    return spec.opcode


@triton.constexpr_function
def way_of(spec: RecordSpec):
    return spec.way


@triton.constexpr_function
def by_strides(spec: RecordSpec):
    """Whether a record goes by tiles, whole rows or boxes, which are compiled for its strides."""
    return bool(spec.steps)


@triton.jit
def number(record, spec: tl.constexpr, field: tl.constexpr, nth: tl.constexpr = 0):
    """A number of a record, or one of several in a field."""
    return tl.load(record + (word_of(opcode_of(spec), field) + nth))


@triton.jit
def multiple(
    record, spec: tl.constexpr, name: tl.constexpr, unit: tl.constexpr, nth: tl.constexpr = 0
):
    """A number of the record that `unit` divides; the compiler sees that masks of so many elements
    do not part what is loaded at once.
    """
    return number(record, spec, name, nth) // unit * unit


@triton.jit
def real(record, spec: tl.constexpr, field: tl.constexpr):
    """A float of a record."""
    return number(record, spec, field).to(tl.float32, bitcast=True)


@triton.jit
def typed(arena, word, dtype: tl.constexpr, unit: tl.constexpr = 1):
    """The first element of an operand whose two words begin at `word`; unit: a power of two that
    divides its place, as the compiler is to know.
    """
    base = tl.load(word).to(tl.int64) * BASE_BYTES
    pointer = (arena + base).to(tl.pointer_type(dtype), bitcast=True)
    return pointer + tl.load(word + 1) // unit * unit


@triton.jit
def operand(record, arenas, spec: tl.constexpr, field: tl.constexpr, unit: tl.constexpr = 1):
    """Pointer to the first element of an operand; unit: as of `typed`."""
    word = record + word_of(opcode_of(spec), field)
    return typed(arenas[space_of(spec, field)], word, element_type(spec, field), unit)


@triton.jit
def extra_operand(record, arenas, spec: tl.constexpr, nth: tl.constexpr, unit: tl.constexpr = 1):
    """Likewise of operand number `nth` of those before the record."""
    word = record - extra_back(spec, nth) + word_of("ExtraOperand", "x")
    return typed(arenas[space_of(spec, nth)], word, element_type(spec, nth), unit)


@triton.jit
def extra_stride(record, spec: tl.constexpr, nth: tl.constexpr, dim: tl.constexpr):
    """A stride of such an operand."""
    return tl.load(record - extra_back(spec, nth) + word_of("ExtraOperand", "strides") + dim)


@triton.jit
def read(pointers, mask, spec: tl.constexpr, field: tl.constexpr, other=0):
    """Elements, wide."""
    found = tl.load(pointers, mask=mask, other=other)
    if is_bool(spec, field):
        found = (found != 0).to(tl.int8)
    return found.to(wide_type(spec, field))


@triton.jit
def write(pointers, values, mask, spec: tl.constexpr, field: tl.constexpr):
    """Stores elements in the type of their operand; any but zero is true."""
    if is_bool(spec, field):
        tl.store(pointers, (values != 0).to(tl.int8), mask=mask)
    else:
        tl.store(pointers, values.to(element_type(spec, field)), mask=mask)
