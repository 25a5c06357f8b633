"""The arguments of a call: bound as the module's forward takes them, told apart, shown in messages.

In: arguments as a user gives them. Out: the same by place, or by name behind one that is left out,
and what tells one call from another. Used by captured.py.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from distmega.arguments import shown
from distmega.errors import ArgumentsError, CaptureError
from distmega.hostir.library.torch_types import NO_MEMORY, describe

Signature = tuple[tuple[object, object], ...]
"""Of each flat input its shape and type, or its class and how it prints."""
PlainKey = tuple[object, ...]
"""Of a call with tensors alone, none in a list or the like: names, shapes and types."""

_UNNAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


def forward_signature(module: object) -> inspect.Signature | None:
    """What a module's forward takes; None of what has no such signature."""
    if not isinstance(module, nn.Module):
        return None
    try:
        return inspect.signature(module.forward)
    except (TypeError, ValueError):  # of a forward that isn't Python's
        return None


def bind_arguments(
    forward: inspect.Signature | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as forward has them, whichever way they came: by place up to the first that is left
    out, the others by name in the order of its parameters; what it takes as **kwargs as given,
    since it sees the order of these. One that is its parameter's default is left out.
    ArgumentsError where the signature does not take them.
    """
    if forward is None:
        return tuple(args), dict(kwargs)
    try:
        bound = forward.bind(*args, **kwargs)
    except TypeError as error:
        words = called([word(x) for x in args], {name: word(x) for name, x in kwargs.items()})
        raise ArgumentsError(
            f"arguments {words}: {error}",
            expected=f"those of forward{_without_types(forward)}",
            remedy="give what it takes, by place or by name",
        ) from error
    needed = False
    for name, parameter in reversed([*forward.parameters.items()]):
        if name not in bound.arguments:
            continue
        value, unnamed = bound.arguments[name], parameter.kind in _UNNAMED
        movable = parameter.kind is inspect.Parameter.KEYWORD_ONLY or not needed
        if movable and _is_default(value, parameter.default):
            del bound.arguments[name]
        else:
            needed |= unnamed
    return bound.args, bound.kwargs


def signature_of(flat: Iterable[object]) -> Signature:
    """Shapes and types of the tensors among flat inputs; what else there is, as it prints.
    CaptureError for a tensor without a shape, and for what can't be printed.
    """
    return tuple(
        (_shape(x), x.dtype) if isinstance(x, Tensor) else (type(x), _printed(x)) for x in flat
    )


def plain_key(args: Sequence[object], kwargs: Mapping[str, object]) -> PlainKey | None:
    """What tells apart calls whose arguments are tensors of torch's own class; None of others. It
    takes a tenth of the time that binding and flattening the arguments does.
    """
    values = (*args, *kwargs.values()) if kwargs else args
    for x in values:
        if type(x) is not Tensor or x.is_nested:
            return None
    shapes = [(x.shape, x.dtype) for x in values]  # type: ignore[attr-defined]
    return (len(args), *kwargs, *shapes)


def positions_of(
    flat: Sequence[object], args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[int, ...] | None:
    """Where each flat input stands among the arguments of a call, those by name behind the others;
    None where they are not the same, or one stands there twice.
    """
    positions = {id(x): position for position, x in enumerate((*args, *kwargs.values()))}
    if len(positions) != len(args) + len(kwargs) or positions.keys() != {id(x) for x in flat}:
        return None
    return tuple(positions[id(x)] for x in flat)


def word(x: object) -> str:
    """An argument in a message."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    return shown(x)


def called_like(words: Sequence[str], spec: pytree.TreeSpec) -> str:
    """How a call with these arguments, one a leaf of spec, is written."""
    try:
        args, kwargs = pytree.tree_unflatten([*map(_Unquoted, words)], spec)
    except Exception:  # by a class of the caller's, of words in place of its tensors
        return ", ".join(words) or "none"
    return called([*map(str, args)], kwargs)


def called(args: Sequence[str], kwargs: Mapping[str, object]) -> str:
    """How a call is written."""
    named = (f"{name}={value}" for name, value in kwargs.items())
    return ", ".join([*args, *named]) or "none"


class _Unquoted(str):
    """Printed as it is, also inside of lists."""

    __repr__ = str.__str__


def _is_default(value: object, default: object) -> bool:
    """Whether an argument says no more than its default does."""
    if default is inspect.Parameter.empty or value is default:
        return value is default
    (mine, spec), (other, wanted) = map(pytree.tree_flatten, (value, default))
    if any(isinstance(x, Tensor) for x in (*mine, *other)) or spec != wanted:
        return False
    return signature_of(mine) == signature_of(other)


def _without_types(forward: inspect.Signature) -> inspect.Signature:
    bare = [
        each.replace(annotation=inspect.Parameter.empty) for each in forward.parameters.values()
    ]
    return forward.replace(parameters=bare, return_annotation=inspect.Signature.empty)


def _printed(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:
        raise CaptureError(
            f"an input {shown(value)}, of type {type(value).__name__}",
            expected="one that can be printed, by which inputs are told apart",
            remedy="give another, or keep it inside of the module",
        ) from error


def _shape(x: Tensor) -> tuple[int, ...]:
    try:
        return tuple(x.shape)
    except NO_MEMORY as error:  # of nested ones, and parameters of lazy modules
        raise CaptureError(
            f"{describe(x)} without a shape as an input",
            expected="dense tensors",
            remedy="pad what is nested, and call lazy modules once before",
        ) from error
