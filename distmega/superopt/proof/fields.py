"""Arithmetic over two finite fields: Z_p for values, Z_q for what stands in exponents, q | p - 1.

A number is a residue mod p and one mod q. exp(x) is w to the x, w a q-th root of 1 in Z_p sampled
for each test: exp(x + y) = exp(x) exp(y) holds since exponents count mod q. Its result has no
residue mod q (NOTHING); an exp of that is uninterpreted. sqrt is x to the (p + 1) / 4: a root of x
or of -x, one function, which takes products to products. max is the largest in some total order,
which is sampled; other functions are random ones, equal only on equal arguments.

Comes in: planes (mod p, mod q) of int64. Goes out: the same. Next: equivalence.py.
"""

from collections.abc import Collection, Sequence
from fractions import Fraction
from functools import cache

import numpy as np

from distmega.superopt.graph.arithmetic import Arithmetic, Array, Planes

P = 2147481143
Q = 1073740571
"""The largest primes p = 2 q + 1 below 2^31 that are both 3 mod 4."""

ROOT = 4
"""Generates the q-th roots of 1 mod p."""

NOTHING = -1
"""In place of a residue mod q that does not exist."""

_HALF = 16


def power(base: Array, exponent: int, modulus: int) -> Array:
    """base to the exponent, residues mod modulus."""
    result = np.ones_like(base)
    square = base % modulus
    while exponent:
        if exponent & 1:
            result = result * square % modulus
        square = square * square % modulus
        exponent >>= 1
    return result


@cache
def _tables() -> tuple[Array, Array]:
    """ROOT to the low, and to the high, 16 bits of an exponent."""
    low, high = np.ones(1 << _HALF, np.int64), np.ones(1 << _HALF, np.int64)
    step = pow(ROOT, 1 << _HALF, P)
    for index in range(1, 1 << _HALF):
        low[index] = low[index - 1] * ROOT % P
        high[index] = high[index - 1] * step % P
    return low, high


def mixed(x: Array, seed: int) -> Array:
    """Well mixed 64-bit words of integers (the finaliser of splitmix64), as uint64."""
    with np.errstate(over="ignore"):
        z = x.astype(np.uint64) + np.uint64(seed % (1 << 64))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


class RandomFields(Arithmetic):
    """One sample of the roots and of all uninterpreted functions for `num_tests` tests.

    symbols: constants that stand for any number; each is one residue that is sampled. invalid:
    tests in which something was divided by zero, which say nothing. names: uninterpreted functions
    that were called.
    """

    def __init__(
        self, num_tests: int, rng: "np.random.Generator", symbols: Collection[float] = ()
    ) -> None:
        self._symbols = {
            value: tuple(rng.integers(1, modulus, 1, dtype=np.int64) for modulus in (P, Q))
            for value in sorted(symbols)
        }
        self._powers = rng.integers(0, Q, num_tests, dtype=np.int64)
        self._seed = int(rng.integers(0, 1 << 62))
        self.invalid = np.zeros(num_tests, bool)
        self.names: set[str] = set()

    def constant(self, value: float) -> Planes:
        if found := self._symbols.get(abs(value)):
            signed = zip(found, (P, Q), strict=True)
            return tuple(modulus - part for part, modulus in signed) if value < 0 else found
        exact = Fraction(value)
        parts = (
            exact.numerator % modulus * pow(exact.denominator, -1, modulus) % modulus
            for modulus in (P, Q)
        )
        return tuple(np.array([part], np.int64) for part in parts)

    def add(self, a: Planes, b: Planes) -> Planes:
        return (a[0] + b[0]) % P, _defined(a[1], b[1], (a[1] + b[1]) % Q)

    def sub(self, a: Planes, b: Planes) -> Planes:
        return (a[0] - b[0]) % P, _defined(a[1], b[1], (a[1] - b[1]) % Q)

    def mul(self, a: Planes, b: Planes) -> Planes:
        return a[0] * b[0] % P, _defined(a[1], b[1], a[1] * b[1] % Q)

    def div(self, a: Planes, b: Planes) -> Planes:
        self._note(b[0] == 0)
        known = b[1] != NOTHING
        self._note(known & (b[1] == 0))
        inverse = power(b[0], P - 2, P), np.where(known, power(b[1], Q - 2, Q), NOTHING)
        return self.mul(a, inverse)

    def exp(self, a: Planes) -> Planes:
        if (a[1] == NOTHING).any():
            return self.opaque("exp", [a])
        low, high = _tables()
        shape = (-1,) + (1,) * (a[1].ndim - 1)
        exponent = a[1] * self._powers.reshape(shape) % Q
        found = low[exponent & ((1 << _HALF) - 1)] * high[exponent >> _HALF] % P
        return found, np.full_like(found, NOTHING)

    def sqrt(self, a: Planes) -> Planes:
        root = np.where(a[1] == NOTHING, NOTHING, power(a[1], (Q + 1) // 4, Q))
        return power(a[0], (P + 1) // 4, P), root

    def opaque(self, name: str, args: Sequence[Planes]) -> Planes:
        if name in ("maximum", "minimum"):
            both = np.broadcast_arrays(args[0][0], args[1][0])
            other = np.broadcast_arrays(args[0][1], args[1][1])
            stacked = np.stack(both, axis=1), np.stack(other, axis=1)
            return self.extreme(stacked, (1,), name[:3])
        self.names.add(name)
        word = mixed(np.zeros(1, np.int64), self._seed ^ hash_name(name))
        for arg in args:
            word = mixed(arg[0] ^ (word & np.uint64(0x7FFFFFFF)).astype(np.int64), self._seed) ^ (
                mixed(word.astype(np.int64), 1)
            )
        values = (word >> np.uint64(1)).astype(np.int64)
        others = (mixed(values, 2) >> np.uint64(1)).astype(np.int64)
        return values % P, others % Q

    def sum(self, a: Planes, dims: tuple[int, ...]) -> Planes:
        defined = (a[1] != NOTHING).all(axis=dims)
        return a[0].sum(axis=dims) % P, np.where(defined, a[1].sum(axis=dims) % Q, NOTHING)

    def extreme(self, a: Planes, dims: tuple[int, ...], combine: str) -> Planes:
        self.names.add(combine)
        moved = [np.moveaxis(plane, dims, range(-len(dims), 0)) for plane in a]
        flat = [x.reshape(*x.shape[: x.ndim - len(dims)], -1) for x in moved]
        rank = mixed(flat[0], self._seed)
        best = rank.argmax(axis=-1) if combine == "max" else rank.argmin(axis=-1)
        first, second = (np.take_along_axis(x, best[..., None], axis=-1)[..., 0] for x in flat)
        return first, second

    def _note(self, where: Array) -> None:
        found = where.reshape(where.shape[0], -1).any(axis=1)
        self.invalid |= found


def hash_name(name: str) -> int:
    """A number of a name, the same in every process."""
    return int.from_bytes(name.encode()[:8].ljust(8, b"\0"), "little") >> 2


def _defined(a: Array, b: Array, found: Array) -> Array:
    return np.where((a == NOTHING) | (b == NOTHING), NOTHING, found)


def sample_planes(shape: Sequence[int], num_tests: int, rng: "np.random.Generator") -> Planes:
    """Independent residues mod p and mod q, as those of a random number mod p q are."""
    return tuple(
        rng.integers(0, modulus, (num_tests, *shape), dtype=np.int64) for modulus in (P, Q)
    )
