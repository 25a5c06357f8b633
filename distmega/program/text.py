"""Printed form of programs, and its parser: `parse_program(print_program(p)) == p`.

    program mlp
      input x: f32[8, 64]
      weight w: f32[256, 64]
      temp h: f32[8, 256]
      h = linear[m:8 n:256 k:64:reduce:sum] x(m, k) w(n, k) -> h(m, n)
      return h

An index prints as its axes joined by `.`, with `*stride` and `+offset` when they are not 1 and 0; a
constant as `#offset`. Groups of rows print as `group.row@place`, the place among the reads of the
vector of their starts.
"""

import math
import re
from typing import cast

from distmega.collecting import parse_literal
from distmega.errors import ParseError
from distmega.program.types import (
    Access,
    Attr,
    Axis,
    AxisRole,
    Index,
    Op,
    Program,
    Role,
    Tensor,
    accesses,
    verify_program,
)


def print_program(program: Program) -> str:
    """The readable form; one line per declared tensor and per op."""
    tensors = program.tensor_map()
    lines = [f"program {program.name}"]
    lines += [f"  {print_tensor(t)}" for t in program.tensors]
    for op in program.ops:
        assert all(access.tensor in tensors for access in accesses(op))
        lines.append(f"  {print_op(op)}")
    lines.append(f"  return {', '.join(program.outputs)}".rstrip())
    return "\n".join(lines) + "\n"


def print_tensor(tensor: Tensor) -> str:
    """A declaration: role, name, dtype and shape."""
    return f"{tensor.role} {tensor.name}: {tensor.dtype}[{', '.join(map(str, tensor.shape))}]"


def print_op(op: Op) -> str:
    """An op on one line."""
    axes = " ".join(_axis(axis) for axis in op.axes)
    reads = "".join(f" {_access(access)}" for access in op.reads)
    writes = "".join(f" {_access(access)}" for access in op.writes)
    return f"{op.name} = {op.kind}[{axes}]{reads} ->{writes}{print_attrs(op.attrs)}"


def print_attrs(attrs: tuple[tuple[str, Attr], ...]) -> str:
    """Attributes as a line's tail, " | key=value ..."; empty without any."""
    return " |" + "".join(f" {key}={value!r}" for key, value in attrs) if attrs else ""


def _axis(axis: Axis) -> str:
    text = f"{axis.name}:{axis.extent}"
    if axis.role != "parallel":
        text += f":{axis.role}"
    if axis.combine:
        text += f":{axis.combine}"
    return text + (":lookup" if axis.lookup else "")


def _access(access: Access) -> str:
    return f"{access.tensor}({', '.join(map(_index, access.dims))})"


def _index(index: Index) -> str:
    if not index.axes:
        return f"#{index.offset}"
    text = ".".join(index.axes)
    if index.stride != 1:
        text += f"*{index.stride}"
    if index.is_grouped:
        text += f"@{index.starts}"
    return text + (f"{index.offset:+d}" if index.offset else "")


_NAME = r"[\w./@#-]+"
_ACCESSES = rf"(?: {_NAME}\([^()]*\))*"
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_TENSOR = re.compile(rf"(input|weight|state|temp) ({_NAME}): (\w+)\[((?:\d+(?:, \d+)*)?)\]")
_OP = re.compile(rf"({_NAME}) = (\w+)\[([^\]]*)\]({_ACCESSES}) ->({_ACCESSES})(?: \|(.*))?")
_ACCESS = re.compile(rf" ({_NAME})\(([^()]*)\)")
_AXIS = re.compile(r"(\w+):(\d+)(?::(reduce|scatter))?(?::(sum|max|min|argmax))?(:lookup)?")
_INDEX = re.compile(r"([\w.]+)(?:\*(\d+))?(?:@(\d+))?([+-]\d+)?")
_CONSTANT = re.compile(r"#(-?\d+)")
_ATTR = re.compile(rf" (\w+)=((?:{_QUOTED}|[^'\"])*?)(?= \w+=|$)")


MAX_CHARS = 50_000_000
MAX_LINE_CHARS = 1_000_000
"""Of a text that is parsed; the program of a model of 80 layers has half a million."""
MAX_ATTR_CHARS = 200_000
MAX_ATTR_BITS = 1024
MAX_ATTR_DEPTH = 32
MAX_DIGITS = 19
_SHOWN_CHARS = 500


def bounded_lines(text: str) -> list[str]:
    """The lines that aren't empty; ParseError where the text, or one of them, is too large."""
    if not isinstance(text, str):
        raise ParseError(
            f"{type(text).__name__} in place of a text",
            expected="a program as print_program writes it",
            remedy="pass its text",
        )
    if len(text) > MAX_CHARS:
        raise _too_large(f"a text of {len(text)} characters", f"{MAX_CHARS}")
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_LINE_CHARS:
            raise _too_large(f"line {number} of {len(line)} characters", f"{MAX_LINE_CHARS}")
    return [line for line in lines if line.strip()]


def parse_number(text: str) -> int:
    """A whole number of at most MAX_DIGITS digits."""
    if len(text.lstrip("+-")) > MAX_DIGITS:
        raise _too_large(f"a number of {len(text)} digits, {text[:40]}...", f"{MAX_DIGITS} digits")
    return int(text)


def parse_program(text: str) -> Program:
    """Reads the printed form back; ParseError names the line that does not fit."""
    lines = [line.strip() for line in bounded_lines(text)]
    if not lines or not lines[0].startswith("program "):
        raise unreadable(lines[0] if lines else text)
    name = lines[0].removeprefix("program ")
    tensors, ops = [], []
    outputs: tuple[str, ...] = ()
    for line in lines[1:]:
        if line == "return" or line.startswith("return "):
            outputs = parse_names(line.removeprefix("return"))
        elif tensor := parse_tensor(line):
            tensors.append(tensor)
        else:
            ops.append(parse_op(line))
    program = Program(name=name, tensors=tuple(tensors), ops=tuple(ops), outputs=outputs)
    return verify_program(program)


def parse_names(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(part for part in text.strip().split(", ") if part)


def parse_tensor(line: str) -> Tensor | None:
    """Reads `print_tensor` back; None if the line is no declaration."""
    match = _TENSOR.fullmatch(line)
    if not match:
        return None
    role, name, dtype, shape = match.groups()
    dims = tuple(parse_number(extent) for extent in shape.split(", ") if extent)
    return Tensor(name=name, shape=dims, dtype=dtype, role=cast(Role, role))


def parse_op(line: str) -> Op:
    """Reads `print_op` back; ParseError if the line is no op."""
    match = _OP.fullmatch(line)
    if not match:
        raise unreadable(line)
    name, kind, axes, reads, writes, attrs = match.groups(default="")
    return Op(
        name=name,
        kind=kind,
        axes=tuple(map(_parse_axis, axes.split())),
        reads=tuple(_parse_access(*found) for found in _ACCESS.findall(reads)),
        writes=tuple(_parse_access(*found) for found in _ACCESS.findall(writes)),
        attrs=parse_attrs(attrs),
    )


def parse_attrs(text: str) -> tuple[tuple[str, Attr], ...]:
    """Reads the part of `print_attrs` after its bar."""
    found = list(_ATTR.finditer(text))
    if "".join(match[0] for match in found) != text:
        raise unreadable(text)
    return tuple((match[1], _parse_attr(match[2])) for match in found)


def _parse_axis(text: str) -> Axis:
    match = _AXIS.fullmatch(text)
    if not match:
        raise unreadable(text)
    name, extent, role, combine, lookup = match.groups()
    return Axis(
        name=name,
        extent=parse_number(extent),
        role=cast(AxisRole, role or "parallel"),
        combine=combine or "",
        lookup=bool(lookup),
    )


def _parse_access(tensor: str, dims: str) -> Access:
    return Access(tensor=tensor, dims=tuple(_parse_index(dim) for dim in dims.split(", ") if dim))


def _parse_index(text: str) -> Index:
    if match := _CONSTANT.fullmatch(text):
        return Index(offset=parse_number(match[1]))
    if match := _INDEX.fullmatch(text):
        axes, stride, starts, offset = match.groups()
        return Index(
            axes=tuple(axes.split(".")),
            stride=parse_number(stride or "1"),
            offset=parse_number(offset or "0"),
            starts=parse_number(starts or "-1"),
        )
    raise unreadable(text)


def _parse_attr(text: str) -> Attr:
    if len(text) > MAX_ATTR_CHARS:
        raise _too_large(f"an attribute of {len(text)} characters", f"{MAX_ATTR_CHARS}")
    try:
        value: object = parse_literal(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise unreadable(text) from error
    if not _is_attr(value, MAX_ATTR_DEPTH):
        raise unreadable(text)
    return cast(Attr, value)


def _is_attr(value: object, depth: int) -> bool:
    if isinstance(value, tuple):
        return depth > 0 and all(_is_attr(each, depth - 1) for each in value)
    if isinstance(value, int):
        return value.bit_length() <= MAX_ATTR_BITS
    return isinstance(value, str) or (isinstance(value, float) and math.isfinite(value))


def unreadable(text: str, form: str = "distmega/program/text.py") -> ParseError:
    """The error for a line that cannot be read; form: where it is said what lines there are."""
    shown = repr(text.strip()[: _SHOWN_CHARS + 1])
    return ParseError(
        f"cannot read {shown if len(text) <= _SHOWN_CHARS else shown[:_SHOWN_CHARS] + '...'}",
        expected="a line of the printed form",
        remedy=f"see {form}",
    )


def _too_large(found: str, most: str) -> ParseError:
    return ParseError(found, expected=f"at most {most}", remedy="check where the text comes from")
