"""What numbers a graph is run over: float64 here, residues of two primes in proof/fields.py, half
floats with a bound of their rounding in proof/rounding.py, counts of terms in proof/counting.py.

Comes in: arrays of shape [samples, ...], several planes of them where a number needs several parts.
Goes out: the same. A program and a graph that are run over one arithmetic on the same samples can
be compared. Next: proof/reference.py for programs, interpret.py for graphs.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmega.program import expr

Array = NDArray[Any]
Planes = tuple[Array, ...]
"""One number a place, in one or several arrays of the same shape [samples, ...]."""

OPAQUE = (
    "relu", "gelu", "abs", "log", "sin", "cos", "maximum", "minimum", "pow", "erf", "floor",
    "eq", "lt", "le", "where", "log2", "log10",
)  # fmt: skip
"""Functions that finite fields don't have: there they are uninterpreted, as max and min are."""

LARGEST_POWER = 8
"""Powers up to this whole one are products."""


class Arithmetic(ABC):
    """Operations on planes; binary ones broadcast. Positions of `dims` count the samples' dim.

    overflows: whether large numbers are lost, so that a softmax is taken less its largest score.
    """

    overflows = False

    @abstractmethod
    def constant(self, value: float) -> Planes:
        """The number, of shape [1]."""

    @abstractmethod
    def add(self, a: Planes, b: Planes) -> Planes:
        """a + b."""

    @abstractmethod
    def mul(self, a: Planes, b: Planes) -> Planes:
        """a * b."""

    @abstractmethod
    def div(self, a: Planes, b: Planes) -> Planes:
        """a / b."""

    @abstractmethod
    def exp(self, a: Planes) -> Planes:
        """e to the a."""

    @abstractmethod
    def sqrt(self, a: Planes) -> Planes:
        """The root that is not negative."""

    @abstractmethod
    def opaque(self, name: str, args: Sequence[Planes]) -> Planes:
        """A function of OPAQUE, or one that this arithmetic does not have."""

    @abstractmethod
    def sum(self, a: Planes, dims: tuple[int, ...]) -> Planes:
        """Sums dims away."""

    @abstractmethod
    def extreme(self, a: Planes, dims: tuple[int, ...], combine: str) -> Planes:
        """The largest (combine "max") or the least ("min") along dims."""

    def sub(self, a: Planes, b: Planes) -> Planes:
        """a - b."""
        return self.add(a, self.mul(self.constant(-1.0), b))

    def contract(self, a: Planes, b: Planes, dims: tuple[int, ...]) -> Planes:
        """The sum over dims of a * b."""
        return self.sum(self.mul(a, b), dims)

    def store(self, a: Planes, dtype: str) -> Planes:
        """What is left of a number in memory of a type."""
        return a

    def sigmoid(self, a: Planes) -> Planes:
        """1 / (1 + exp(-a))."""
        one = self.constant(1.0)
        return self.div(one, self.add(one, self.exp(self.mul(self.constant(-1.0), a))))

    def tanh(self, a: Planes) -> Planes:
        """1 - 2 / (1 + exp(2 a))."""
        one, two = self.constant(1.0), self.constant(2.0)
        return self.sub(one, self.div(two, self.add(one, self.exp(self.mul(two, a)))))

    def functions(self) -> Mapping[str, Callable[..., Planes]]:
        """expr.FUNCTIONS over this arithmetic."""
        one = self.constant(1.0)
        exact: dict[str, Callable[..., Planes]] = {
            "add": self.add, "sub": self.sub, "mul": self.mul, "div": self.div,
            "exp": self.exp, "sqrt": self.sqrt, "sigmoid": self.sigmoid, "tanh": self.tanh,
            "rsqrt": lambda a: self.div(one, self.sqrt(a)),
            "neg": lambda a: self.mul(self.constant(-1.0), a),
            "silu": lambda a: self.mul(a, self.sigmoid(a)),
        }  # fmt: skip
        return exact | {name: self._opaque(name) for name in OPAQUE}

    def _opaque(self, name: str) -> Callable[..., Planes]:
        return lambda *args: self.opaque(name, args)

    def evaluate(self, tree: expr.Expr, args: Sequence[Planes]) -> Planes:
        """Value of a pointwise expression over operands that broadcast. Its constants have as many
        dims as these, of extent 1: what is computed of one alone may differ from sample to sample.
        """
        shape = (1,) * max((arg[0].ndim for arg in args), default=1)

        def lift(value: float) -> Planes:
            return tuple(plane.reshape(shape) for plane in self.constant(value))

        return expr.evaluate(without_powers(tree), args, self.functions(), lift)


def without_powers(tree: expr.Expr) -> expr.Expr:
    """The expression with powers of small whole numbers as products and powers of half as roots."""
    if not isinstance(tree, expr.Call):
        return tree
    args = tuple(map(without_powers, tree.args))
    if tree.fn == "pow" and isinstance(args[1], expr.Const):
        base, power = args[0], float(args[1].value)
        if abs(power) == 0.5:
            return expr.Call("sqrt" if power > 0 else "rsqrt", (base,))
        if power.is_integer() and 1 <= abs(power) <= LARGEST_POWER:
            product = base
            for _ in range(int(abs(power)) - 1):
                product = expr.Call("mul", (product, base))
            return product if power > 0 else expr.Call("div", (expr.Const(1.0), product))
    return expr.Call(tree.fn, args)


def objects(values: Sequence[Any]) -> Array:
    """An array of one dim that holds Python objects."""
    found = np.empty(len(values), dtype=object)
    found[:] = list(values)
    return found


_erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x: Array) -> Array:
    """x times the share of a normal distribution below it, in float64."""
    return np.asarray(0.5 * x * (1.0 + _erf(np.asarray(x, np.float64) / math.sqrt(2.0))))


def _where(x: Array, y: Array, z: Array) -> Array:
    return np.asarray(np.where(x != 0, y, z))


FLOAT_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "relu": lambda x: np.maximum(x, 0.0), "gelu": gelu, "abs": np.abs, "log": np.log,
    "sin": np.sin, "cos": np.cos, "maximum": np.maximum, "minimum": np.minimum, "pow": np.power,
    "exp": np.exp, "sqrt": np.sqrt, "tanh": np.tanh,
    "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)), "erf": _erf, "floor": np.floor,
    "eq": lambda x, y: np.where(x == y, 1.0, 0.0), "lt": lambda x, y: np.where(x < y, 1.0, 0.0),
    "le": lambda x, y: np.where(x <= y, 1.0, 0.0),
    "where": _where, "log2": np.log2, "log10": np.log10,
}  # fmt: skip
"""Functions on float arrays, by the names of expr.FUNCTIONS."""


class Float(Arithmetic):
    """float64; one plane."""

    overflows = True

    def constant(self, value: float) -> Planes:
        return (np.array([value], dtype=np.float64),)

    def add(self, a: Planes, b: Planes) -> Planes:
        return (a[0] + b[0],)

    def sub(self, a: Planes, b: Planes) -> Planes:
        return (a[0] - b[0],)

    def mul(self, a: Planes, b: Planes) -> Planes:
        return (a[0] * b[0],)

    def div(self, a: Planes, b: Planes) -> Planes:
        return (a[0] / b[0],)

    def exp(self, a: Planes) -> Planes:
        return (np.exp(a[0]),)

    def sqrt(self, a: Planes) -> Planes:
        return (np.sqrt(a[0]),)

    def opaque(self, name: str, args: Sequence[Planes]) -> Planes:
        return (FLOAT_FUNCTIONS[name](*(a[0] for a in args)),)

    def sum(self, a: Planes, dims: tuple[int, ...]) -> Planes:
        return (a[0].sum(axis=dims),)

    def extreme(self, a: Planes, dims: tuple[int, ...], combine: str) -> Planes:
        return (a[0].max(axis=dims) if combine == "max" else a[0].min(axis=dims),)
