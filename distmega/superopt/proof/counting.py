"""How many exponential terms, and polynomials of which degree, a result is made of: arithmetic on
upper bounds, from which proofs take the number of their tests.

A value is N / D; N and D are sums of terms f * exp(g), f a polynomial, g a quotient of two, all of
the inputs and of square roots. Comes in: planes of upper bounds, PLANES names them. Goes out: the
same, and a Bound. Next: equivalence.py.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distmega.superopt.graph.arithmetic import Arithmetic, Array, Planes, objects
from distmega.superopt.proof.fields import P

PLANES = (
    "terms of N", "terms of D", "degree of N", "degree of D", "root degree of N",
    "root degree of D", "degree of exponents", "root degree of exponents", "has exponents",
    "name of D", "roots",
)  # fmt: skip
"""What the planes hold. Degrees of exponents count numerator and denominator. Root degree: factors
of a term that are roots, with repetition. Name of D: a residue that is the same
where D is, 1 where D is 1. Roots: which ones, as bits of a whole number.
"""

NUMBERS = len(PLANES) - 1
"""All planes but the last are float64, that one is of Python's whole numbers."""


class Counts(Arithmetic):
    """Upper bounds of what a result is made of. symbols: constants that stand for any number, so
    that they count as variables.
    """

    def __init__(self, symbols: Collection[float] = ()) -> None:
        self._symbols = frozenset(symbols)
        self._num_roots = 0
        self._rng = np.random.default_rng(0)

    def constant(self, value: float) -> Planes:
        return _planes((1,), terms=1.0, degree=float(abs(value) in self._symbols))

    def add(self, a: Planes, b: Planes) -> Planes:
        some, same = np.maximum(a[8], b[8]), a[9] == b[9]
        crossed = np.where(same, a[0] + b[0], a[0] * b[1] + b[0] * a[1])
        terms = np.where(some > 0, crossed, 1.0)
        bottom = np.where(some > 0, np.where(same, a[1], a[1] * b[1]), 1.0)
        degrees = []
        for top, below in ((2, 3), (4, 5)):
            apart = np.maximum(a[top] + b[below], b[top] + a[below])
            degrees.append(np.where(same, np.maximum(a[top], b[top]), apart))
            degrees.append(np.where(same, a[below], a[below] + b[below]))
        inner = (np.maximum(a[6], b[6]), np.maximum(a[7], b[7]), some)
        name = np.where(same, a[9], _product(a[9], b[9]))
        return _same_shape(terms, bottom, *degrees, *inner, name, a[10] | b[10])

    def mul(self, a: Planes, b: Planes) -> Planes:
        products = (a[0] * b[0], a[1] * b[1])
        sums = (x + y for x, y in zip(a[2:8], b[2:8], strict=True))
        name = _product(a[9], b[9])
        return _same_shape(*products, *sums, np.maximum(a[8], b[8]), name, a[10] | b[10])

    def div(self, a: Planes, b: Planes) -> Planes:
        name = self._rng.integers(2, P, b[0].shape).astype(np.float64)
        turned = (b[1], b[0], b[3], b[2], b[5], b[4], *b[6:9], name, b[10])
        return self.mul(a, turned)

    def exp(self, a: Planes) -> Planes:
        one, zero = np.ones_like(a[0]), np.zeros_like(a[0])
        inner = (a[2] + a[3], a[4] + a[5])
        return one, one, zero, zero, zero, zero, *inner, one, one, a[10]

    def sqrt(self, a: Planes) -> Planes:
        found = list(_planes(a[0].shape, terms=1.0, degree=0.0))
        found[4] = np.ones(a[0].shape)
        bits = [1 << (self._num_roots + index) for index in range(a[0].size)]
        self._num_roots += a[0].size
        found[10] = objects(bits).reshape(a[0].shape) | a[10]
        for plane in (6, 7, 8):
            found[plane] = a[plane]
        found[2] = a[2] + a[3]
        return tuple(found)

    def opaque(self, name: str, args: Sequence[Planes]) -> Planes:
        shape = np.broadcast_shapes(*(arg[0].shape for arg in args))
        return _planes(shape, terms=1.0, degree=1.0)

    def functions(self) -> Mapping[str, Callable[..., Planes]]:
        """As those of all arithmetic; one over a root is as good a root."""
        return {**super().functions(), "rsqrt": self.sqrt}

    def sum(self, a: Planes, dims: tuple[int, ...]) -> Planes:
        moved = [np.moveaxis(plane, dims, range(-len(dims), 0)) for plane in a]
        flat = [x.reshape(*x.shape[: x.ndim - len(dims)], -1) for x in moved]
        total: Planes = tuple(x[..., 0] for x in flat)
        for index in range(1, flat[0].shape[-1]):
            total = self.add(total, tuple(x[..., index] for x in flat))
        return total

    def extreme(self, a: Planes, dims: tuple[int, ...], combine: str) -> Planes:
        numbers = [plane.max(axis=dims) for plane in a[:NUMBERS]]
        same = a[9].max(axis=dims) == a[9].min(axis=dims)
        numbers[9] = np.where(same, numbers[9], self._rng.integers(2, P, numbers[9].shape))
        return *numbers, np.asarray(np.bitwise_or.reduce(a[10], axis=dims), dtype=object)


def _planes(shape: tuple[int, ...], terms: float, degree: float) -> Planes:
    zero = np.zeros(shape)
    counts = (zero + terms, zero + terms, zero + degree, *([zero] * 6), zero + 1.0)
    return *counts, objects([0] * math.prod(shape)).reshape(shape)


def _same_shape(*planes: Array) -> Planes:
    return tuple(np.broadcast_arrays(*planes))


def _product(a: Array, b: Array) -> Array:
    """Product of two residues, kept as float64."""
    return (a.astype(np.int64) * b.astype(np.int64) % P).astype(np.float64)


def inputs_of(shape: Sequence[int]) -> Planes:
    """Polynomials of degree 1."""
    return _planes((1, *shape), terms=1.0, degree=1.0)


@dataclass(frozen=True, slots=True)
class Bound:
    """What the difference of program and graph in one output element is at most made of.

    terms: exponential terms. degree, inner: of its coefficients and of differences of exponents.
    squares: square roots that may stand squared in one term. roots: different square roots.
    """

    terms: float
    degree: float
    inner: float
    squares: float
    roots: float


def bound_of(one: Planes, two: Planes) -> Bound:
    """The bound for the difference of two results: N1 D2 - N2 D1."""
    some = np.maximum(one[8], two[8]) > 0
    terms = np.where(some, one[0] * two[1] + two[0] * one[1], 1.0)
    degree = np.maximum(one[2] + two[3], two[2] + one[3])
    outer = np.maximum(one[4] + two[5], two[4] + one[5])
    squares = outer // 2 + (one[7] + two[7]) // 2
    roots = [int(x).bit_count() + int(y).bit_count()
             for x, y in zip(one[10].ravel(), two[10].ravel(), strict=True)]  # fmt: skip
    inner = one[6] + two[6]
    found = [float(plane.max()) for plane in (terms, degree, inner, squares)]
    return Bound(found[0], found[1], found[2], found[3], float(max(roots)))


def reject_probability(bound: Bound, p: int, q: int) -> float:
    """At least with what probability one valid test tells a wrong result from a right one.

    Given inputs where one coefficient is not zero and its exponent differs from the others mod q,
    the difference is a polynomial of `terms` terms in a random q-th root of 1, so zero for at most
    a share 1 - 1 / terms of the roots (the uncertainty principle of Z_q: a function and its Fourier
    transform, over any field that has the roots, have supports whose product is at least q). Such
    inputs are all but a share of degree / p for the coefficient, of inner / q for each of the
    others' exponents. That is the theorem of arXiv 2405.05751 (section on verification) and
    2506.04529, 1 - 1/k + o(1), with its o(1) written out. Square roots: eliminating one doubles a
    degree; our root of x squared is x or -x, by x, so a coefficient in which `squares` of them
    stand squared is the real one's for a share 2^-squares of the inputs. Assumed: coefficients
    that are not zero are none of multiples of p.
    """
    missed = missed_share(bound, p, q)
    return float(max(0.0, 1.0 - missed) / bound.terms / 2.0**bound.squares)


def missed_share(bound: Bound, p: int, q: int) -> float:
    """Share of the inputs, at most, for which reject_probability promises nothing."""
    factor = 2.0 ** (bound.roots + bound.squares)
    return float(factor * (bound.degree / p + (bound.terms - 1.0) * bound.inner / q))


def num_tests(bound: Bound, log2_bound: int, p: int, q: int) -> int:
    """Tests after which a wrong result passes with probability at most 2^-log2_bound; 0 if no
    number suffices.
    """
    chance = reject_probability(bound, p, q)
    if not 0.0 < chance < math.inf:
        return 0
    if chance >= 1.0:
        return 1
    return math.ceil(log2_bound * math.log(2.0) / -math.log1p(-chance))


NUM_SAMPLES = 4
"""How often symbols are sampled, at least."""


def num_symbol_tests(bound: Bound, log2_bound: int, p: int, q: int) -> int:
    """As num_tests, where the tests of each of NUM_SAMPLES equal parts share one sample of the
    symbols: it is a bad one for a share of at most missed_share, so that a wrong result passes a
    part with at most that probability and the one of all its tests together.
    """
    each = 2.0 ** (-log2_bound / NUM_SAMPLES) - missed_share(bound, p, q)
    chance = reject_probability(bound, p, q)
    if each <= 0.0 or not 0.0 < chance < math.inf:
        return 0
    part = 1 if chance >= 1.0 else math.ceil(math.log(each) / math.log1p(-chance))
    return NUM_SAMPLES * max(part, 1)
