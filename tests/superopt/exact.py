"""Arithmetic of exact fractions; at 50 digits for programs with exp, roots and the like."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np

from distmega.superopt.graph.arithmetic import Arithmetic, Planes, objects

DIGITS = 50


def wide(x: Any) -> Any:
    """A fraction at 50 digits."""
    return mpmath.mpf(x.numerator) / x.denominator if isinstance(x, Fraction) else x


class Exact(Arithmetic):
    """Fractions; one plane of objects. ZeroDivisionError where a divisor is zero, ArithmeticError
    where a result need not be rational (exp, sqrt and the like).
    """

    def constant(self, value: float) -> Planes:
        return (objects([Fraction(value)]),)

    def add(self, a: Planes, b: Planes) -> Planes:
        return (a[0] + b[0],)

    def mul(self, a: Planes, b: Planes) -> Planes:
        return (a[0] * b[0],)

    def div(self, a: Planes, b: Planes) -> Planes:
        return (a[0] / b[0],)

    def exp(self, a: Planes) -> Planes:
        return self.opaque("exp", [a])

    def sqrt(self, a: Planes) -> Planes:
        return self.opaque("sqrt", [a])

    def opaque(self, name: str, args: Sequence[Planes]) -> Planes:
        if name not in RATIONAL:
            raise ArithmeticError(f"{name} of a fraction need not be one")
        call = np.frompyfunc(RATIONAL[name], len(args), 1)
        return (np.asarray(call(*(a[0] for a in args)), dtype=object),)

    def sum(self, a: Planes, dims: tuple[int, ...]) -> Planes:
        return (np.asarray(a[0].sum(axis=dims), dtype=object),)

    def extreme(self, a: Planes, dims: tuple[int, ...], combine: str) -> Planes:
        found = a[0].max(axis=dims) if combine == "max" else a[0].min(axis=dims)
        return (np.asarray(found, dtype=object),)


RATIONAL: dict[str, Callable[..., Any]] = {
    "relu": lambda x: max(x, 0 * x), "abs": abs, "maximum": max, "minimum": min,
    "floor": lambda x: Fraction(math.floor(x)), "eq": lambda x, y: Fraction(x == y),
    "lt": lambda x, y: Fraction(x < y), "le": lambda x, y: Fraction(x <= y),
    "where": lambda x, y, z: y if x != 0 else z,
}  # fmt: skip
"""Functions of OPAQUE that give fractions of fractions."""


class Digits(Exact):
    """Fractions as long as results are; what needs exp or roots at 50 digits."""

    FUNCTIONS: dict[str, Callable[..., Any]] = {
        "exp": mpmath.exp, "sqrt": mpmath.sqrt, "log": mpmath.log, "sin": mpmath.sin,
        "cos": mpmath.cos, "erf": mpmath.erf, "pow": mpmath.power,
        "log2": lambda x: mpmath.log(x, 2), "log10": mpmath.log10,
        "gelu": lambda x: x * (1 + mpmath.erf(x / mpmath.sqrt(2))) / 2,
    }  # fmt: skip

    def opaque(self, name: str, args: Sequence[Planes]) -> Planes:
        if name not in self.FUNCTIONS:
            return super().opaque(name, args)
        call = np.frompyfunc(lambda *xs: self.FUNCTIONS[name](*map(wide, xs)), len(args), 1)
        with mpmath.workdps(DIGITS):
            return (np.asarray(call(*(a[0] for a in args)), dtype=object),)

    def add(self, a: Planes, b: Planes) -> Planes:
        return self._each(lambda x, y: x + y, a, b)

    def mul(self, a: Planes, b: Planes) -> Planes:
        return self._each(lambda x, y: x * y, a, b)

    def div(self, a: Planes, b: Planes) -> Planes:
        return self._each(lambda x, y: x / y, a, b)

    def sum(self, a: Planes, dims: tuple[int, ...]) -> Planes:
        moved = np.moveaxis(a[0], dims, range(-len(dims), 0))
        flat = moved.reshape(*moved.shape[: moved.ndim - len(dims)], -1)
        total: Planes = (flat[..., 0],)
        for index in range(1, flat.shape[-1]):
            total = self.add(total, (flat[..., index],))
        return total

    def _each(self, function: Callable[..., Any], a: Planes, b: Planes) -> Planes:
        def call(x: Any, y: Any) -> Any:
            if isinstance(x, Fraction) and isinstance(y, Fraction):
                return function(x, y)
            return function(wide(x), wide(y))

        with mpmath.workdps(DIGITS):
            return (np.asarray(np.frompyfunc(call, 2, 1)(a[0], b[0]), dtype=object),)


def random_fractions(shape: Sequence[int], rng: np.random.Generator) -> Planes:
    """One draw of fractions from -3 to 3, of tenths and sevenths, none zero."""
    size = int(np.prod((1, *shape)))
    tops, bottoms = rng.integers(1, 21, size), rng.choice([7, 10], size)
    signs = rng.choice([-1, 1], size)
    values = [Fraction(int(s * t), int(b)) for s, t, b in zip(signs, tops, bottoms, strict=True)]
    found = np.empty(size, dtype=object)
    found[:] = values
    return (found.reshape(1, *shape),)


def same(one: Planes, two: Planes) -> bool:
    """Whether results agree: fractions wholly, others to 40 digits."""
    for x, y in zip(one[0].ravel(), two[0].ravel(), strict=True):
        if isinstance(x, Fraction) and isinstance(y, Fraction):
            if x != y:
                return False
        else:
            with mpmath.workdps(DIGITS):
                if abs(wide(x) - wide(y)) > mpmath.mpf(10) ** -40 * (1 + abs(wide(x))):
                    return False
    return True
