"""Arguments of operators of torch as JSON text, and operators by their names.

In: values of a call: numbers, texts, dtypes, lists, and tensors, which the caller stands for. Out:
JSON values, and back. Used by opaque.py and opaque_graph.py.
"""

import builtins
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from distmega.errors import ProgramError
from distmega.hostir.library.torch_types import HOLDERS, TORCH_DTYPES

DTYPES = {str(dtype): dtype for dtype in (*TORCH_DTYPES.values(), *HOLDERS)}
_FORMATS = {
    str(each): each
    for each in (torch.contiguous_format, torch.preserve_format, torch.channels_last)
}
_MODULES = {"operator": operator, "math": math, "torch": torch, "builtins": builtins}
"""Where functions of numbers are found that stand in graphs beside operators."""


def encode_value(value: object, special: Callable[[object], object]) -> object:
    """As JSON has it. special: of values that only the caller knows; None for others.

    ProgramError for a value that text can't hold.
    """
    found = special(value)
    if found is not None:
        return found
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, list | tuple):
        return [encode_value(each, special) for each in value]
    if isinstance(value, torch.dtype) and str(value) in DTYPES:
        return {"dtype": str(value)}
    if isinstance(value, torch.memory_format):
        return {"format": str(value)}
    raise ProgramError(
        f"an argument {value!r} of type {type(value).__name__}",
        expected="tensors, numbers, texts, dtypes, and lists of these",
        remedy="leave it out of the module",
    )


def encode_named(
    target: object, named: Mapping[str, object], special: Callable[[object], object]
) -> dict[str, object]:
    """Named arguments, without where and how a tensor lies in memory; who makes tensors of none
    makes them where the call's operands are.
    """
    found = {
        key: encode_value(value, special)
        for key, value in named.items()
        if not isinstance(value, torch.device | torch.layout) and key != "pin_memory"
    }
    return {**found, "device": {"device": "of operands"}} if makes_tensors(target) else found


def makes_tensors(target: object) -> bool:
    """Whether an operator takes no tensor, and where to make one."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    arguments = target._schema.arguments
    takes = any("Tensor" in str(each.type) for each in arguments)
    return not takes and any(each.name == "device" for each in arguments)


def decode_value(value: object, special: Callable[[str, Any], object]) -> Any:
    """What text stands for. special: of the kinds and contents that the caller wrote."""
    if isinstance(value, list):
        return [decode_value(each, special) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "float":
            return float(content)
        case "complex":
            return complex(*content)
        case "dtype":
            return DTYPES[content]
        case "format":
            return _FORMATS[content]
        case _:
            return special(kind, content)


def operator_name(target: object) -> str:
    """ "aten.add.Tensor" of an operator, "higher_order.cond" of one that takes functions,
    "operator.add" of a function of numbers. ProgramError for another function.
    """
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.__name__}"
    module = getattr(target, "__module__", "").removeprefix("_")
    name = f"{module}.{getattr(target, '__name__', '')}"
    if module not in _MODULES or name.count(".") != 1:
        raise ProgramError(
            f"a call of {target!r}",
            expected="an operator of torch, or a function of numbers",
            remedy="leave it out of the module",
        )
    return name


def find_operator(target: str) -> Callable[..., Any]:
    """What operator_name gave a name to; ProgramError for what this torch lacks."""
    found: Any = torch.ops
    parts = target.split(".")
    if parts[0] in _MODULES:
        found, parts = _MODULES[parts[0]], parts[1:]
    for part in parts:
        found = getattr(found, part, None)
    if found is None:
        raise ProgramError(
            f"operator {target!r}",
            expected="an operator that this torch has",
            remedy="import the library that defines it, or use the torch that captured it",
        )
    function: Callable[..., Any] = found
    return function
