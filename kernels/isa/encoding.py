"""Device words: the only file that knows how an instruction, a wait or a signal lies in memory.

In: instructions (opcodes.py) and a Header. Out: records of WORDS int32
words (one 128-byte line), and back. A record is

    word 0      opcode | number of waits << WAITS_BIT | number of signals << SIGNALS_BIT
    words 1, 2  group and task (for traces and hang reports)
    words 3, 4  FIRST_WAIT, FIRST_SIGNAL: first row in the wait table and in the signal table
    word 5      types: 6 bits an operand in field order, 0 = absent, else 1 + space * 8 + dtype
    word 31     types of the operands after the fifth, or the last field
    from 6 on   the fields of the instruction in order: a Ref takes two words (base, first), an int
                one, a float one (fp32 bits), a tuple of ints one each; unused words are 0

Waits are rows (event, count, axis): block until the counter of every rank that differs from this
one only in mesh axis `axis` (-1: this rank alone) has reached epoch * count. Signals are rows
(event, axis): add one to this rank's counter on every such rank. The constant table holds pointwise
expressions as postfix programs (pack_expression). Next on the walk: lowering.py, which chooses the
instructions of a task, then encoder.py.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from types import UnionType
from typing import NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from distmega.errors import ProgramError, UnsupportedError
from distmega.kernels.isa.opcodes import OPCODES, Instruction, Ref
from distmega.kernels.runtime.arena import Space
from distmega.program.dtypes import ITEM_BYTES
from distmega.program.expr import FUNCTIONS, Arg, Call, Const, Expr

Words = npt.NDArray[np.int32]

WORDS = 32
HEADER_WORDS = 5
WAIT_COLUMNS = ("event", "count", "axis")
SIGNAL_COLUMNS = ("event", "axis")
WAITS_BIT, SIGNALS_BIT = 8, 20
OPCODE_MASK, COUNT_MASK = 2**8 - 1, 2**12 - 1
MAX_WAITS, MAX_SIGNALS = COUNT_MASK, COUNT_MASK >> 1
"""Of a record; the sign bit of word 0 stays 0."""
FIRST_WAIT, FIRST_SIGNAL = 3, 4
DTYPES = tuple(ITEM_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What every record starts with; waits and signals are rows of the tables from `wait` and
    `signal` on.
    """

    group: int
    task: int
    wait: int = 0
    num_waits: int = 0
    signal: int = 0
    num_signals: int = 0


class Field(NamedTuple):
    """Where a field lies in a record. kind: "ref", "int" or "float"; the type of an operand is the
    TYPE_BITS of word `types` from `bit` on.
    """

    name: str
    kind: str
    start: int
    num_words: int
    is_tuple: bool
    types: int = 0
    bit: int = 0


TYPES_WORD = HEADER_WORDS
MORE_TYPES_WORD = WORDS - 1
TYPE_BITS = 6
TYPES_A_WORD = 5


@cache
def record_fields(opcode: int) -> tuple[Field, ...]:
    """Places of the fields of one instruction class, from its annotations."""
    kind = OPCODES[opcode]
    hints = get_type_hints(kind)
    fields_found: list[Field] = []
    start, num_refs = TYPES_WORD + 1, 0
    for field in fields(kind):
        hint = hints[field.name]
        is_tuple = get_origin(hint) is tuple
        if hint is Ref or isinstance(hint, UnionType):
            word, at = divmod(num_refs, TYPES_A_WORD)
            types = (TYPES_WORD, MORE_TYPES_WORD)[word]
            found = Field(field.name, "ref", start, 2, False, types, TYPE_BITS * at)
            num_refs += 1
        else:
            name = "float" if hint is float else "int"
            found = Field(field.name, name, start, len(get_args(hint)) or 1, is_tuple)
        fields_found.append(found)
        start += found.num_words
    limit = WORDS if num_refs <= TYPES_A_WORD else MORE_TYPES_WORD
    assert start <= limit, f"{kind.__name__} takes {start} words"
    return tuple(fields_found)


@cache
def base_columns(opcode: int) -> tuple[int, ...]:
    """Words of a record that hold the base of an operand."""
    return tuple(field.start for field in record_fields(opcode) if field.kind == "ref")


def pack(instruction: Instruction, header: Header) -> Words:
    """The record of an instruction; ProgramError if a size does not fit its word, UnsupportedError
    for a float that doesn't.
    """
    words = [0] * WORDS
    words[:HEADER_WORDS] = header_words(OPCODES.index(type(instruction)), header)
    for field in record_fields(OPCODES.index(type(instruction))):
        value = getattr(instruction, field.name)
        if field.kind == "ref":
            if value is not None:
                words[field.types] |= (1 + value.space * 8 + DTYPES.index(value.dtype)) << field.bit
                words[field.start : field.start + 2] = value.base, value.first
        elif field.kind == "float":
            words[field.start] = _fitting_bits(instruction, field.name, value)
        else:
            values = value if field.is_tuple else (value,)
            words[field.start : field.start + field.num_words] = values
    try:
        return np.array(words, dtype=np.int32)
    except OverflowError as error:
        raise ProgramError(
            f"{type(instruction).__name__} with a size or stride beyond int32",
            expected="less than 2**31 elements in a tensor of one rank",
            remedy="use more ranks",
        ) from error


def header_words(opcode: int, header: Header) -> tuple[int, ...]:
    """The first HEADER_WORDS words of a record."""
    if header.num_waits > MAX_WAITS or header.num_signals > MAX_SIGNALS:
        raise ProgramError(
            f"task with {header.num_waits} waits and {header.num_signals} signals",
            expected=f"at most {MAX_WAITS} and {MAX_SIGNALS}",
            remedy="use fewer, larger tasks, or one event an op",
        )
    first = opcode | header.num_waits << WAITS_BIT | header.num_signals << SIGNALS_BIT
    return first, header.group, header.task, header.wait, header.signal


def write_headers(records: Words, headers: Sequence[Header]) -> None:
    """Puts one header into each of the records [n, WORDS], which keep their opcodes."""
    opcodes = (records[:, 0] & OPCODE_MASK).tolist()
    words = [header_words(o, h) for o, h in zip(opcodes, headers, strict=True)]
    records[:, :HEADER_WORDS] = np.array(words, dtype=np.int32).reshape(-1, HEADER_WORDS)


def patch_bases(records: Words, bases: Sequence[int]) -> Words:
    """Copy of records of one group in which base i of an operand became bases[i]; absent operands
    have base 0.
    """
    patched = records.copy()
    table = np.array(bases, dtype=np.int32)
    opcodes = records[:, 0] & OPCODE_MASK
    for opcode in np.unique(opcodes).tolist():
        rows = np.flatnonzero(opcodes == opcode)
        for column in base_columns(opcode):
            patched[rows, column] = table[patched[rows, column]]
    return patched


def unpack(record: Words) -> tuple[Header, Instruction]:
    """Header and instruction of a record; inverse of pack."""
    words = record.tolist()
    opcode = words[0] & OPCODE_MASK
    return unpack_header(record), OPCODES[opcode](
        **{field.name: _unpack_field(field, words) for field in record_fields(opcode)}
    )


def unpack_header(record: Words) -> Header:
    """Header of a record; inverse of header_words."""
    counts, group, task, wait, signal = record[:HEADER_WORDS].tolist()
    return Header(
        group=group,
        task=task,
        wait=wait,
        num_waits=counts >> WAITS_BIT & COUNT_MASK,
        signal=signal,
        num_signals=counts >> SIGNALS_BIT,
    )


def _unpack_field(field: Field, words: list[int]) -> Ref | int | float | tuple[int, ...] | None:
    values = words[field.start : field.start + field.num_words]
    if field.kind == "float":
        return _bits_float(values[0])
    if field.kind == "int":
        return tuple(values) if field.is_tuple else values[0]
    code = (words[field.types] >> field.bit & 2**TYPE_BITS - 1) - 1
    if code < 0:
        return None
    return Ref(space=Space(code // 8), dtype=DTYPES[code % 8], base=values[0], first=values[1])


def describe(record: Words, names: tuple[str, ...] = ()) -> str:
    """One readable line for a record; `names` are the op names of the groups."""
    header, instruction = unpack(record)
    name = names[header.group] if names else f"group {header.group}"
    parts = [f"{name}[{header.task}] {type(instruction).__name__}"]
    for field in record_fields(OPCODES.index(type(instruction))):
        value = getattr(instruction, field.name)
        if value is not None:
            parts.append(f"{field.name}={value}".replace(", ", ","))
    if header.num_waits:
        parts.append(f"| waits {header.wait}..{header.wait + header.num_waits - 1}")
    if header.num_signals:
        parts.append(f"| signals {header.signal}..{header.signal + header.num_signals - 1}")
    return " ".join(parts)


def _fitting_bits(instruction: Instruction, name: str, value: float) -> int:
    try:
        return _float_bits(value)
    except OverflowError as error:
        raise UnsupportedError(
            f"{type(instruction).__name__} with {name}={value}",
            expected="a number that f32 holds",
            remedy="scale its operands instead, or leave the op to library ops, megakernel=False",
        ) from error


def _float_bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _bits_float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])


_CODES = (None, "arg", "const", "integer", *FUNCTIONS)
"""Words of a pointwise program: 0 ends it, 1 is followed by an argument index, 2 by the two halves
of an fp64 constant (low first), 3 by those of an i64 one, the others apply a function to the values
on the stack."""


def pack_expression(expr: Expr) -> list[int]:
    """Postfix program of a pointwise expression, as words of the constant table."""
    return [*_postfix(expr), 0]


def _postfix(expr: Expr) -> list[int]:
    match expr:
        case Arg(index):
            return [1, index]
        case Const(value):
            whole = isinstance(value, int) and -(2**63) <= value < 2**63
            halves = struct.pack("<q", value) if whole else struct.pack("<d", float(value))
            return [3 if whole else 2, *struct.unpack("<2i", halves)]
        case Call(fn, args):
            return [word for arg in args for word in _postfix(arg)] + [_CODES.index(fn)]


def unpack_expression(constants: Words, start: int) -> Expr:
    """The expression whose program starts at word `start` of the constant table; inverse of
    pack_expression.
    """
    words = iter(constants[start:].tolist())
    stack: list[Expr] = []
    while code := next(words):
        if code == 1:
            stack.append(Arg(next(words)))
        elif code in (2, 3):
            halves = struct.pack("<2i", next(words), next(words))
            stack.append(Const(struct.unpack("<d" if code == 2 else "<q", halves)[0]))
        else:
            fn = str(_CODES[code])
            num_args = FUNCTIONS[fn]
            stack[-num_args:] = [Call(fn, tuple(stack[-num_args:]))]
    assert len(stack) == 1
    return stack[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """A schedule in device words, the same for every rank.

    queues: [num_sms, longest queue, WORDS]; lengths: [num_sms]; waits, signals: rows of
    WAIT_COLUMNS and SIGNAL_COLUMNS; constants: pointwise programs. `names` (op name of each group)
    serve messages only.
    """

    queues: Words
    lengths: Words
    waits: Words
    signals: Words
    constants: Words
    num_events: int
    mesh_axes: tuple[str, ...]
    names: tuple[str, ...]

    def disassemble(self) -> str:
        """All queues as text, a line a record."""
        lines = []
        for sm, (queue, length) in enumerate(zip(self.queues, self.lengths, strict=True)):
            lines.append(f"SM {sm}")
            lines += [f"  {describe(record, self.names)}" for record in queue[:length]]
        return "\n".join(lines) + "\n"

    def fingerprint(self) -> str:
        """Stable hash of everything a kernel reads; ranks compare it before they launch
        together.
        """
        digest = hashlib.sha256(repr((self.num_events, self.mesh_axes, self.queues.shape)).encode())
        for table in (self.queues, self.lengths, self.waits, self.signals, self.constants):
            digest.update(np.ascontiguousarray(table, dtype="<i4").tobytes())
        return digest.hexdigest()[:16]
