"""Values that nobody should give, and what must come of them: an error of ours, or, where the
argument's annotation allows one, what it says.
"""

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import torch

from distmega.errors import DistmegaError

MOST_CHARS = 1500
"""Of a message, however long the value."""


class Contrary:
    """Neither compares, nor counts, nor prints."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    def __bool__(self) -> bool:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("no")


ODD: dict[str, object] = {
    "None": None, "True": True, "0": 0, "-1": -1, "2^64": 2**64, "10^5000": 10**5000,
    "-10^5000": -(10**5000), "0.5": 0.5, "nan": float("nan"), "inf": float("inf"), "1j": 1j,
    "int64": np.int64(3), "float32": np.float32(0.5), "bool_": np.bool_(True),
    "array": np.arange(3), "tensor": torch.tensor(3), "tensors": torch.ones(2, 2),
    "Size": torch.Size([4, 8]), "no text": "", "space": " ", "null": "a\0b", "surrogate": "\udcff",
    "long": "a" * 10**6, "bytes": b"x", "[]": [], "[None]": [None], "()": (), "texts": ("a", "b"),
    "{}": {}, "{1: 2}": {1: 2}, "set": {1}, "range": range(3), "class": int, "function": len,
    "contrary": Contrary(), "folder": "/tmp", "path": Path("/tmp"), "dtype": torch.float32,
    "Fraction": Fraction(1, 2), "...": ...,
}  # fmt: skip


def matches(value: object, hint: Any) -> bool:
    """Whether a value is of an annotation; a whole number is a float too, True is no number."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is object or hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(matches(value, each) for each in inside)
    if origin is Literal:
        return isinstance(value, str | bool) and value in inside
    if hint is type(None) or hint is None:
        return value is None
    if hint in (int, float):
        number = type(value) is int if hint is int else isinstance(value, int | float)
        return number and not isinstance(value, bool)
    if origin in (Sequence, tuple, list):
        kinds = Sequence if origin is Sequence else (tuple, list)
        listed = isinstance(value, kinds) and not isinstance(value, str | bytes)
        return listed and all(matches(each, inside[0]) for each in value)
    return isinstance(value, Mapping if origin is Mapping else hint)


def wrongly_taken(
    make: Callable[..., object], given: Mapping[str, Any], hints: Mapping[str, Any]
) -> Iterator[str]:
    """What `make` takes that is not of the argument's annotation, and what it fails on with other
    errors than ours; each argument odd in turn, the others as given.
    """
    for name in given:
        for what, value in ODD.items():
            try:
                make(**{**given, name: value})
            except DistmegaError as error:
                if len(str(error)) > MOST_CHARS:
                    yield f"{name}={what}: a message of {len(str(error))} characters"
            except Exception as error:
                yield f"{name}={what}: {type(error).__name__}"
            else:
                if not matches(value, hints[name]):
                    yield f"{name}={what} is taken"
