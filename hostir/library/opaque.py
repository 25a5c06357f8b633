"""Operators of torch that stand in a program as they are: kind `opaque`.

Comes in: an op that names an operator and holds its arguments as JSON text, tensors as
{"tensor": place among the op's reads}, or several operators with such text (opaque_graph.py). Goes
out: a function of its operands. `encode_call` writes that text. Used by ops.py, and by who captures
torch modules.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distmega.hostir.library.opaque_graph import is_graph, open_graph
from distmega.hostir.library.opaque_text import (
    DTYPES,
    decode_named,
    decode_value,
    encode_named,
    encode_value,
    find_operator,
    read_call,
)
from distmega.hostir.library.pointwise import OpFunction
from distmega.hostir.library.torch_types import hold, unhold
from distmega.program.types import Op


def encode_call(
    args: Sequence[object],
    kwargs: Mapping[str, object],
    given: Callable[[object], object],
    kept: Sequence[int] = (0,),
    target: object = None,
) -> str:
    """Arguments as text. given: what stands for a tensor: {"tensor": place among the operands},
    {"held": [place, type]} where programs lack its type, {"empty": [shape, type]} of one without
    elements; None for no tensor. kept: places of the results that are wanted. target: the operator,
    if it may make tensors of none.

    Devices are left out: tensors are made where the operands are. ProgramError for a value that
    text can't hold.
    """
    named = encode_named(target, kwargs, given)
    return json.dumps([[encode_value(value, given) for value in args], named, [*kept]])


def compile_opaque(op: Op) -> OpFunction:
    """The operators bound to their arguments; ProgramError for one that torch doesn't have, and for
    text that encode_call did not write.
    """
    text = str(op.attr("call"))
    if is_graph(text):
        graph = open_graph(text)
        return lambda operands: tuple(_owned(hold(x), operands) for x in graph(operands))
    function = find_operator(str(op.attr("target")))

    def read(call: Any) -> OpFunction:
        args, kwargs, kept = call
        _check(args, kwargs, kept, len(op.reads), _num_results(function))
        return _bound(function, args, kwargs, kept)

    return read_call(text, read)


def _num_results(function: Callable[..., Any]) -> int | None:
    """How many results each call of a function has; None where that isn't known before."""
    if not isinstance(function, torch._ops.OpOverload):
        return None
    results = function._schema.returns
    is_list = any(isinstance(each.type, torch.ListType) for each in results)
    return None if is_list else len(results)


def _check(args: Any, kwargs: Any, kept: Any, num_operands: int, num_results: int | None) -> None:
    """Raises, for what encode_call did not write, an error that read_call makes a ProgramError."""

    def special(kind: str, content: Any) -> object:
        match kind:
            case "device":
                return None
            case "tensor":
                return _position(content, num_operands)
            case "held":
                position, dtype = content
                return _position(position, num_operands), DTYPES[dtype]
            case "empty":
                shape, dtype = content
                return [_position(extent) for extent in shape], DTYPES[dtype]
            case _:
                raise ValueError(f"nothing of kind {kind!r}")

    if not isinstance(args, list) or not isinstance(kept, list):
        raise TypeError("arguments and results are lists")
    decode_value(args, special)
    decode_named(kwargs, special)
    for number in kept:
        _position(number, num_results)


def _position(number: object, end: int | None = None) -> int:
    """A number from 0 on, below `end` if there is one; IndexError for anything else."""
    if type(number) is not int or number < 0 or (end is not None and number >= end):
        raise IndexError(f"position {number!r} of {end}")
    return number


def _bound(
    function: Callable[..., Any],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    kept: Sequence[int],
) -> OpFunction:
    """A call of the function with those arguments; of its results those that are kept."""

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        def special(kind: str, content: Any) -> object:
            if kind == "device":
                return operands[0].device if operands else None
            if kind == "tensor":
                return operands[content]
            if kind == "empty":
                shape, dtype = content
                return torch.empty(shape, dtype=DTYPES[dtype], device=operands[0].device)
            return unhold(operands[content[0]], DTYPES[content[1]])

        filled = [decode_value(value, special) for value in args]
        named = decode_named(kwargs, special)
        found = function(*filled, **named)
        several = found if isinstance(found, tuple | list) else (found,)
        return tuple(_owned(hold(several[operand_of]), operands) for operand_of in kept)

    return run


def _owned(result: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """The result in storage of its own, row-major."""
    shared = {x.untyped_storage().data_ptr() for x in operands}
    if result.untyped_storage().data_ptr() in shared:
        return result.clone(memory_format=torch.contiguous_format)
    return result.contiguous()
