"""Operators on complex numbers, which programs hold as pairs of floats.

In: a tensor of complex numbers as Foreign, its real and imaginary parts in a dim of two behind the
others. Out: rules for making, multiplying, showing and moving them, by operator; others stay
opaque. Used by ../conversion/.
"""

from collections.abc import Sequence
from typing import Any

import torch

from distmega.hostir.library.torch_types import hold
from distmega.torch_import.operators.build import Build
from distmega.torch_import.operators.table import Rule
from distmega.torch_import.operators.values import Constant, Foreign, TensorValue, Value

COMPLEX = ("torch.complex64", "torch.complex128")
"""As torch names the types."""

Pair = tuple[TensorValue, TensorValue]


def is_complex(value: Value) -> bool:
    """Whether a value is a tensor of complex numbers, or one of them."""
    if isinstance(value, Constant):
        return value.tensor.is_complex()
    return isinstance(value, complex) or (isinstance(value, Foreign) and value.dtype in COMPLEX)


def _parts(b: Build, value: Any) -> Pair:
    """Real and imaginary part; of a tensor of floats or a number, zero."""
    if isinstance(value, Constant) and value.tensor.is_complex():
        return Constant(value.tensor.real.contiguous()), Constant(value.tensor.imag.contiguous())
    if not isinstance(value, Foreign):
        return value, Constant(torch.zeros(()))
    held = value.held
    last = len(held.shape) - 1
    real, imaginary = (
        b.reshape(b.slice(held, last, part, part + 1), held.shape[:-1]) for part in (0, 1)
    )
    return real, imaginary


def _joined(b: Build, real: TensorValue, imaginary: TensorValue) -> Foreign:
    """The node's result."""
    shape = (*b.shape, 1)
    parts = [b.handle(b.reshape(b.expand(each, b.shape), shape)) for each in (real, imaginary)]
    return Foreign(b.p.concat(parts, len(b.shape), name=b.name()), b.dtype)


def _float_type(b: Build) -> str:
    """That of the parts of the node's result."""
    return "f64" if b.dtype == COMPLEX[1] else "f32"


def _polar(b: Build, **operands: TensorValue) -> Value:
    given = operands["abs"], operands["angle"]
    real, imaginary = (
        b.pointwise(f"{{0}} * {fn}({{1}})", *given, dtype=_float_type(b), shape=b.shape)
        for fn in ("cos", "sin")
    )
    return _joined(b, real, imaginary)


def _view_as_complex(b: Build, self: TensorValue) -> Value:
    return Foreign(b.handle(self), b.dtype)


def _view_as_real(b: Build, self: Value) -> Value:
    if isinstance(self, Constant):
        return Constant(hold(self.tensor))
    assert isinstance(self, Foreign), "as is_complex says"
    return self.held


def _mul(b: Build, self: Value, other: Value) -> Value:
    if any(isinstance(each, complex) for each in (self, other)):
        return NotImplemented
    texts = ("{0} * {2} - {1} * {3}", "{0} * {3} + {1} * {2}")
    operands = (*_parts(b, self), *_parts(b, other))
    real, imaginary = (
        b.pointwise(text, *operands, dtype=_float_type(b), shape=b.shape) for text in texts
    )
    return _joined(b, real, imaginary)


def _moved(b: Build, self: Value, **options: Any) -> Value:
    """Another shape of the same elements, or the same."""
    if not isinstance(self, Foreign) or self.dtype != b.dtype:
        return NotImplemented
    shape = (*b.shape, 2)
    held = b.reshape(self.held, shape)
    return Foreign(b.handle(held), self.dtype)


def _to_copy(b: Build, self: Value, **options: Any) -> Value:
    """In another type; of a real number the imaginary part is zero."""
    if isinstance(self, Foreign):
        return _moved(b, self)
    return _joined(b, *(b.cast(each, _float_type(b)) for each in _parts(b, self)))


def _expand(b: Build, self: Value, **options: Any) -> Value:
    assert isinstance(self, Foreign), "no constant: it is known"
    return Foreign(b.handle(b.expand(self.held, (*b.shape, 2))), self.dtype)


def _permute(b: Build, self: Value, dims: Sequence[int]) -> Value:
    assert isinstance(self, Foreign), "no constant: it is known"
    rank = len(dims)
    order = [*(dim % rank for dim in dims), rank]
    return Foreign(b.handle(b.transpose(self.held, order)), self.dtype)


def _transpose(b: Build, self: Value, dim0: int, dim1: int) -> Value:
    order = list(range(len(b.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(b, self, order)


COMPLEX_RULES: dict[str, Rule] = {
    "aten.polar": _polar,
    "aten.view_as_complex": _view_as_complex,
    "aten.view_as_real": _view_as_real,
    "aten._to_copy": _to_copy,
    "aten.mul": _mul,
    "aten.expand": _expand,
    "aten.permute": _permute,
    "aten.transpose": _transpose,
    **dict.fromkeys(
        (
            "aten.view", "aten._unsafe_view", "aten.reshape", "aten.unsqueeze", "aten.squeeze",
            "aten.clone", "aten.alias",
        ),
        _moved,
    ),
}  # fmt: skip
"""Operator -> its rule, where an operand or the result is complex."""
