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
    return read_call(text, lambda call: _bound(function, *call))


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
