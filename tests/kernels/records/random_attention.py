"""Programs of attention of any shape: heads, groups, windows, soft caps, biases and strides by
chance, which are the same again for a seed.
"""

from collections.abc import Sequence
from random import Random

from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.ops.attention import biased_attention
from distmega.program.types import Program

LATE = 150
"""Positions of caches."""
SEQUENCES = 3


def random_attention(seed: int, dtype: str) -> Program:
    """Over caches that rows share, of their own, of their sequences or under a bias; or over all
    keys, under a mask or none.
    """
    chance, p = Random(seed), ProgramBuilder(f"attention_{seed}")
    kinds = _over_caches, _of_own_caches, _packed, _biased, _masked, _joint
    return p.build(*kinds[seed % len(kinds)](p, dtype, chance))


def _width(chance: Random) -> int:
    return chance.choice((8, 16, 24, 40, 64, 80, 128))


def _limits(chance: Random) -> tuple[int, float]:
    """A window and a soft cap, each as often none as any."""
    window = chance.choice((0, chance.randint(1, LATE)))
    return window, chance.choice((0.0, chance.uniform(1.0, 9.0)))


def _queries(
    p: ProgramBuilder, dtype: str, chance: Random, rows: Sequence[int]
) -> tuple[Handle, Handle]:
    shape = chance.choice(rows), chance.choice((1, 2)), chance.choice((1, 3, 4)), _width(chance)
    return p.input("q", shape, dtype), p.input("late", shape[:1], "i64")


def _caches(
    p: ProgramBuilder, dtype: str, chance: Random, front: tuple[int, ...], d: int
) -> tuple[Handle, Handle]:
    """Keys and values of as many positions as `late` says at most."""
    k, v = (
        p.state("k", (*front, LATE, d), dtype),
        p.state("v", (*front, LATE, _width(chance)), dtype),
    )
    return k, v


def _over_caches(p: ProgramBuilder, dtype: str, chance: Random) -> Sequence[Handle]:
    q, positions = _queries(p, dtype, chance, (1, 5, 17, 40, 150))
    k, v = _caches(p, dtype, chance, q.shape[1:2], q.shape[3])
    window, softcap = _limits(chance)
    return [p.attention(q, k, v, positions, q.shape[3] ** -0.5, window, softcap=softcap)]


def _of_own_caches(p: ProgramBuilder, dtype: str, chance: Random) -> Sequence[Handle]:
    q, positions = _queries(p, dtype, chance, (1, 2, 5))
    k, v = _caches(p, dtype, chance, q.shape[:2], q.shape[3])
    window, softcap = _limits(chance)
    return [p.attention(q, k, v, positions, q.shape[3] ** -0.5, window, softcap=softcap)]


def _packed(p: ProgramBuilder, dtype: str, chance: Random) -> Sequence[Handle]:
    q, positions = _queries(p, dtype, chance, (3, 9))
    k, v = _caches(p, dtype, chance, (SEQUENCES, *q.shape[1:2]), q.shape[3])
    packed = p.input("sequences", q.shape[:1], "i64"), p.input("starts", (SEQUENCES + 1,), "i64")
    return [p.attention(q, k, v, positions, q.shape[3] ** -0.5, packed=packed)]


def _biased(p: ProgramBuilder, dtype: str, chance: Random) -> Sequence[Handle]:
    q, positions = _queries(p, dtype, chance, (1, 6, 33))
    k, v = _caches(p, dtype, chance, q.shape[1:2], q.shape[3])
    bias = p.weight("bias", (k.shape[1], *q.shape[1:3]))
    window = _limits(chance)[0]
    return [p.op(biased_attention, q, k, v, positions, bias, scale=0.3, window=window)]


def _masked(p: ProgramBuilder, dtype: str, chance: Random) -> Sequence[Handle]:
    b, h, g = chance.choice((1, 2)), chance.choice((1, 2)), chance.choice((1, 3))
    m, t = chance.choice((1, 20, 70, 140)), chance.randint(1, LATE)
    d, e = _width(chance), _width(chance)
    q = p.input("q", (b, h * g, m, d), dtype)
    k, v = p.input("k", (b, h, t, d), dtype), p.input("v", (b, h, t, e), dtype)
    whole = [chance.choice((1, extent)) for extent in (b, h * g, m, t)]
    mask = p.input("mask", tuple(whole), chance.choice(("bool", "f32", dtype)))
    return [p.attend(q, k, v, mask, d**-0.5, softcap=_limits(chance)[1])]


def _joint(p: ProgramBuilder, dtype: str, chance: Random) -> Sequence[Handle]:
    """Queries, keys and values that lie side by side in one tensor, and keys by columns."""
    m, h, d = chance.choice((3, 48, 130)), chance.choice((1, 3)), _width(chance)
    x = p.input("x", (m, 3, h, d), dtype)
    parts = (p.slice(x, 1, n, n + 1, view=True) for n in range(3))
    q, k, v = (p.transpose(part, (1, 2, 0, 3), view=True) for part in parts)
    by_columns = p.transpose(p.input("turned", (1, h, d, m), dtype), (0, 1, 3, 2), view=True)
    return [p.attend(q, keys, v, None, d**-0.5) for keys in (k, by_columns)]
