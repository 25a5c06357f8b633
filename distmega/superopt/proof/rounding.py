"""Half floats as a GPU would compute them, each with a bound of its rounding error.

A value is what f32 arithmetic gives, rounded to the tensor's type where it is stored; beside it
runs a bound of how far it can be from the exact one (a running error analysis: each op adds its own
rounding to what its operands' errors become). Comes in: planes (float32 values, float64 bounds).
Goes out: the same; an overflow is inf or nan, as on a GPU. Next: equivalence.py.
"""

from collections.abc import Sequence

import numpy as np

from distmega.superopt.graph.arithmetic import FLOAT_FUNCTIONS, Arithmetic, Array, Planes

UNIT = 2.0**-24
"""Relative rounding error of f32."""

FUNCTION_ULPS = 4.0
"""Rounding errors that a GPU's exp, tanh and the like make at once."""

STORED_UNIT = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 0.0, "f64": 0.0}
"""Relative rounding error of a stored element, at most: of 8 bits, 11 and more."""

TINY = 2.0**-126
"""What an underflow of f32 loses at most."""

STORED_TINY = {"bf16": TINY, "f16": 2.0**-25, "f32": 0.0, "f64": 0.0}
"""What a stored element loses at most where it is too small for the type's precision: f16 has steps
of 2^-24 below 2^-14.
"""


class Rounded(Arithmetic):
    """f32 values with bounds."""

    overflows = True

    def constant(self, value: float) -> Planes:
        exact = np.array([value], np.float64)
        return exact.astype(np.float32), np.abs(exact.astype(np.float32) - exact)

    def add(self, a: Planes, b: Planes) -> Planes:
        return _rounded(a[0] + b[0], a[1] + b[1])

    def mul(self, a: Planes, b: Planes) -> Planes:
        error = np.abs(_wide(a[0])) * b[1] + np.abs(_wide(b[0])) * a[1] + a[1] * b[1]
        return _rounded(a[0] * b[0], error)

    def div(self, a: Planes, b: Planes) -> Planes:
        value = a[0] / b[0]
        margin = np.abs(_wide(b[0])) - b[1]
        error = (a[1] + np.abs(_wide(value)) * b[1]) / np.where(margin > 0, margin, np.nan)
        return _rounded(value, np.where(margin > 0, error, np.inf))

    def exp(self, a: Planes) -> Planes:
        value = np.exp(a[0])
        with np.errstate(over="ignore"):
            error = _wide(value) * np.expm1(np.minimum(a[1], 700.0))
        return _rounded(value, error, FUNCTION_ULPS)

    def sqrt(self, a: Planes) -> Planes:
        return self._near("sqrt", [a])

    def sigmoid(self, a: Planes) -> Planes:
        return self._near("sigmoid", [a])

    def tanh(self, a: Planes) -> Planes:
        return self._near("tanh", [a])

    def opaque(self, name: str, args: Sequence[Planes]) -> Planes:
        return self._near(name, args)

    def sum(self, a: Planes, dims: tuple[int, ...]) -> Planes:
        count = int(np.prod([a[0].shape[dim] for dim in dims]))
        size = np.abs(_wide(a[0])).sum(axis=dims)
        error = a[1].sum(axis=dims) + count * UNIT * size
        return a[0].sum(axis=dims), error

    def contract(self, a: Planes, b: Planes, dims: tuple[int, ...]) -> Planes:
        count = int(np.prod([max(a[0].shape[dim], b[0].shape[dim]) for dim in dims]))
        x, y = np.abs(_wide(a[0])), np.abs(_wide(b[0]))
        error = _contract(x, b[1] + count * UNIT * y, dims) + _contract(a[1], y + b[1], dims)
        return _contract(a[0], b[0], dims), error

    def extreme(self, a: Planes, dims: tuple[int, ...], combine: str) -> Planes:
        value = a[0].max(axis=dims) if combine == "max" else a[0].min(axis=dims)
        return value, a[1].max(axis=dims)

    def store(self, a: Planes, dtype: str) -> Planes:
        lost = STORED_UNIT[dtype] * np.abs(_wide(a[0])) + STORED_TINY[dtype]
        return round_to(a[0], dtype), a[1] + lost

    def _near(self, name: str, args: Sequence[Planes]) -> Planes:
        """A function, and by how much it moves at the ends of its operands' ranges."""
        call = FLOAT_FUNCTIONS[name]
        wide = [_wide(arg[0]) for arg in args]
        value = call(*wide)
        error = np.zeros_like(value)
        for index, arg in enumerate(args):
            for sign in (-1.0, 1.0):
                moved = list(wide)
                moved[index] = moved[index] + sign * arg[1]
                if name == "sqrt":
                    moved[index] = np.maximum(moved[index], 0.0)
                error = np.maximum(error, np.abs(call(*moved) - value))
        return _rounded(value.astype(np.float32), 2.0 * error, FUNCTION_ULPS)


def _wide(x: Array) -> Array:
    return x.astype(np.float64)


def _contract(a: Array, b: Array, dims: tuple[int, ...]) -> Array:
    """The sum over dims of a * b, both with all dims, by a matrix product."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    one = [letters[n] for n in range(a.ndim) if a.shape[n] > 1]
    two = [letters[n] for n in range(b.ndim) if b.shape[n] > 1]
    out = [letters[n] for n in range(a.ndim) if n not in dims]
    known = [letter for letter in out if letter in one or letter in two]
    found = np.einsum(
        f"{''.join(one)},{''.join(two)}->{''.join(known)}",
        a.reshape([e for e in a.shape if e > 1]),
        b.reshape([e for e in b.shape if e > 1]),
        optimize=True,
    )
    shape = [max(a.shape[n], b.shape[n]) for n in range(a.ndim) if n not in dims]
    return np.asarray(found).reshape(shape)


def _rounded(value: Array, error: Array, ulps: float = 1.0) -> Planes:
    return value, error + ulps * UNIT * np.abs(_wide(value)) + TINY


def round_to(x: Array, dtype: str) -> Array:
    """f32 values as a type holds them, to nearest even."""
    if dtype == "f16":
        return x.astype(np.float16).astype(np.float32)
    if dtype != "bf16":
        return x
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    kept = np.where(np.isfinite(x), rounded & np.uint32(0xFFFF0000), bits)
    return kept.astype(np.uint32).view(np.float32).reshape(x.shape)
