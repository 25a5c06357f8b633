"""Arguments of operators of torch as JSON text, and operators by their names.

In: values of a call: numbers, texts, dtypes, lists, and tensors, which the caller stands for. Out:
JSON values, and back. Used by opaque.py and opaque_graph.py.
"""

import builtins
import json
import math
import operator
from collections.abc import Callable, Mapping
from keyword import iskeyword
from typing import Any, TypeVar

import torch

from distmega.arguments import shown
from distmega.errors import ProgramError
from distmega.hostir.library.torch_types import HOLDERS, TORCH_DTYPES

T = TypeVar("T")

DTYPES = {str(dtype): dtype for dtype in (*TORCH_DTYPES.values(), *HOLDERS)}
_FORMATS = {
    str(each): each
    for each in (
        torch.contiguous_format,
        torch.preserve_format,
        torch.channels_last,
        torch.channels_last_3d,
    )
}
_OF_NUMBERS = {
    "builtins": (
        builtins,
        ["abs", "bool", "divmod", "float", "int", "len", "max", "min", "pow", "round", "sum"],
    ),
    "math": (
        math,
        [name for name, found in vars(math).items() if name[0] != "_" and callable(found)],
    ),
    "operator": (
        operator,
        sorted({*operator.__all__} - {"attrgetter", "call", "itemgetter", "methodcaller"}),
    ),
    "torch": (torch, [name for name in dir(torch) if name.lstrip("_").startswith("sym_")]),
}
"""Functions that stand in graphs beside operators, by module: what takes numbers and lists, and
runs nothing that it is given.
"""


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
    if isinstance(value, torch.dtype):
        raise ProgramError(
            f"the type {value} of an argument",
            expected=f"a type that is held: {', '.join(DTYPES)}",
            remedy="convert to one of these in the module",
        )
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


def read_call(text: str, read: Callable[[Any], T]) -> T:
    """What `read` makes of JSON text. ProgramError for text that no capture wrote."""
    try:
        return read(json.loads(text))
    except ProgramError:
        raise
    except (
        ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
    ) as error:  # fmt: skip
        raise ProgramError(
            f"call {shown(text)} of an operator ({type(error).__name__}: {error})",
            expected="the JSON text of capture",
            remedy="capture the module again",
        ) from error


def decode_named(named: Mapping[str, object], special: Callable[[str, Any], object]) -> Any:
    """Arguments by name, which stand in code that torch writes of them."""
    if not all(key.isidentifier() and not iskeyword(key) for key in named):
        raise ValueError(f"no names {shown(sorted(named))}")
    return {key: decode_value(value, special) for key, value in named.items()}


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
    if _function_of_numbers(name) is None:
        raise ProgramError(
            f"a call of {target!r}",
            expected="an operator of torch, or a function of numbers",
            remedy="leave it out of the module",
        )
    return name


def _function_of_numbers(name: str) -> Callable[..., Any] | None:
    module, _, function = name.partition(".")
    where, names = _OF_NUMBERS.get(module, (None, ()))
    return getattr(where, function) if function in names else None


def find_operator(target: str) -> Callable[..., Any]:
    """What operator_name gave a name to; ProgramError for what this torch lacks, and for what is no
    operator: who wrote the text may call nothing else.
    """
    found: Any = _function_of_numbers(target)
    if found is None:
        found = torch.ops
        for part in target.split("."):
            found = getattr(found, part, None)
        if not isinstance(found, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
            found = None
    if found is None:
        raise ProgramError(
            f"operator {target!r}",
            expected="an operator that this torch has",
            remedy="import the library that defines it, or use the torch that captured it",
        )
    function: Callable[..., Any] = found
    return function
