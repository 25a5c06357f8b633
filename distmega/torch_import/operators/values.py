"""What a node of a captured graph stands for while a program is built.

In: tensors and numbers of torch. Out: values that rules (table.py) take and give: handles of the
program, constants that are known at capture, tensors repeated along some dims, plain numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from distmega.hostir.library.torch_types import HOLDERS, dtype_name
from distmega.program.builder import Handle
from distmega.program.dtypes import ITEM_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A tensor that is known at capture; it becomes a weight where an op reads it."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        return dtype_name(self.tensor.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """A handle repeated to a shape, which ops that broadcast read as it is."""

    source: Handle
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.source.tensor.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Foreign:
    """A tensor of an element type that programs lack, held in one that has all its values; only
    operators that stay opaque read it. dtype: torch's name of the type.
    """

    held: Handle
    dtype: str


Value = object
"""Handle, Constant, Spread, Foreign, a number, None, or a list of these."""

TensorValue = Handle | Constant | Spread
TENSORS = (Handle, Constant, Spread, Foreign)


def value_dtype(value: TensorValue) -> str:
    """Short name of a tensor's element type."""
    return value.tensor.dtype if isinstance(value, Handle) else value.dtype


def is_tensor(value: Value) -> bool:
    """Whether it is a tensor, of any type."""
    return isinstance(value, TENSORS)


def is_empty(value: Value) -> bool:
    """Whether it is a tensor without elements."""
    return isinstance(value, Constant) and value.tensor.numel() == 0


def is_foreign(value: Value) -> bool:
    """Whether it is a tensor of a type that programs lack."""
    known = isinstance(value, Constant) and value.tensor.dtype in HOLDERS
    return known or isinstance(value, Foreign)


def varies(value: Value) -> bool:
    """Whether it is a tensor that is not known at capture."""
    return isinstance(value, Handle | Spread | Foreign)


def is_float(dtype: str) -> bool:
    """Whether an element type is a floating-point one that programs hold."""
    return dtype in ITEM_BYTES and dtype not in ("i32", "i64", "bool")


def uniform_value(value: Value) -> float | int | bool | None:
    """The number that all elements of a constant are; None for another value."""
    if isinstance(value, bool | int | float):
        return value
    if not isinstance(value, Constant) or value.tensor.is_complex():
        return None
    tensor = value.tensor
    if tensor.layout is not torch.strided:
        return None
    if tensor.numel() == 0 or (
        tensor.numel() > 1 and not bool((tensor == tensor.flatten()[0]).all())
    ):
        return None
    found: float | int | bool = tensor.flatten()[0].item()
    return found


def map_values(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` of everything that is no list, tuple or mapping."""
    if isinstance(value, list | tuple):
        return [map_values(each, change) for each in value]
    if isinstance(value, dict):
        return {key: map_values(each, change) for key, each in value.items()}
    return change(value)


def any_value(value: Any, is_wanted: Callable[[Any], bool]) -> bool:
    """Whether something that is no list, tuple or mapping is as wanted."""
    found: list[bool] = []
    map_values(value, lambda each: found.append(is_wanted(each)))
    return any(found)
