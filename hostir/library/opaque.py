"""Operators of torch that stand in a program as they are: kind `opaque`.

Comes in: an op that names an operator and holds its arguments as JSON text, tensors as
{"tensor": place among the op's reads}. Goes out: a function of its operands. `encode_call` writes
that text. Used by ops.py, and by who captures torch modules.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distmega.errors import ProgramError
from distmega.hostir.library.pointwise import OpFunction
from distmega.hostir.library.torch_types import HOLDERS, TORCH_DTYPES, hold, unhold
from distmega.program.types import Op

_DTYPES = {str(dtype): dtype for dtype in (*TORCH_DTYPES.values(), *HOLDERS)}
_FORMATS = {
    str(each): each
    for each in (torch.contiguous_format, torch.preserve_format, torch.channels_last)
}


def encode_call(
    args: Sequence[object],
    kwargs: Mapping[str, object],
    operand_of: Callable[[object], tuple[int, str] | None],
    kept: Sequence[int] = (0,),
) -> str:
    """Arguments as text. operand_of: where a value stands among the operands, and its type where
    programs lack that one; None for no tensor. kept: places of the results that are wanted.

    Devices are left out: tensors are made where the operands are. ProgramError for a value that
    text can't hold.
    """

    def encode(value: object) -> object:
        at = operand_of(value)
        if at is not None:
            return {"held": at} if at[1] else {"tensor": at[0]}
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(value)}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            return [encode(each) for each in value]
        if isinstance(value, torch.dtype) and str(value) in _DTYPES:
            return {"dtype": str(value)}
        if isinstance(value, torch.memory_format):
            return {"format": str(value)}
        raise ProgramError(
            f"an argument {value!r} of type {type(value).__name__}",
            expected="tensors, numbers, texts, dtypes, and lists of these",
            remedy="leave it out of the module",
        )

    named = {
        key: encode(value)
        for key, value in kwargs.items()
        if not isinstance(value, torch.device | torch.layout) and key != "pin_memory"
    }
    return json.dumps([[encode(value) for value in args], named, [*kept]])


def compile_opaque(op: Op) -> OpFunction:
    """The operator bound to its arguments; ProgramError for one that torch doesn't have."""
    function = find_operator(str(op.attr("target")))
    args, kwargs, kept = json.loads(str(op.attr("call")))

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        filled = [_decode(value, operands) for value in args]
        named = {key: _decode(value, operands) for key, value in kwargs.items()}
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


def find_operator(target: str) -> Callable[..., Any]:
    """torch's operator of a name such as "aten.convolution.default"."""
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise ProgramError(
            f"operator {target!r}",
            expected="an operator that this torch has",
            remedy="import the library that defines it, or use the torch that captured it",
        )
    operator: Callable[..., Any] = found
    return operator


def _decode(value: object, operands: Sequence[Tensor]) -> object:
    if isinstance(value, list):
        return [_decode(each, operands) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "tensor":
            return operands[content]
        case "held":
            return unhold(operands[content[0]], _DTYPES[content[1]])
        case "float":
            return float(content)
        case "dtype":
            return _DTYPES[content]
        case _:
            return _FORMATS[content]
