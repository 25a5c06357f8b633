"""Gumbel noise by a counter-based generator, Philox4x32-10: the same whoever computes it.

In: seeds, positions and indices, i64 tensors that broadcast. Out: numbers keyed by the seed and
counted by position and index, on any number of ranks. By methods of tensors alone; on a GPU nothing
asks the device for a number or copies one to it, so that a CUDA graph can hold these functions.
Used by sampling.py.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

MASK = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def gumbel(seeds: Any, positions: Any, indices: Any) -> Any:
    """Standard Gumbel noise, float64: -log(-log(1 - u)).

    u = (r + 1/2) / 2^32, r being the first Philox word of counter (index, position, 0, 0) and key
    seed. Small u are exact in fp32 too, so a kernel in fp32 has the same large values.
    """
    u = (philox(seeds, positions, indices).double() + 0.5) * 2.0**-32
    return -(-(-u).log1p()).log()


def philox(seeds: Any, positions: Any, indices: Any) -> Any:
    """First word, as i64, of Philox4x32-10 at counter (index, position, 0, 0) with key seed.

    Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
    """
    shape = _broadcast(seeds.shape, positions.shape, indices.shape)
    counter, others, keys = (indices.new_zeros(2, *shape) for _ in range(3))
    counter[0], others[0], keys[0], keys[1] = indices, positions, seeds, seeds >> 32
    multipliers, weyl = (_pair(keys, *numbers) for numbers in (MULTIPLIERS, WEYL))
    for _ in range(ROUNDS):
        # products wrap to 64 bits, which keeps all of them
        products = (counter * multipliers).flip(0)
        counter = ((products >> 32) ^ others ^ keys) & MASK
        others, keys = products, keys + weyl
    return counter[0]


def _broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape of tensors of these shapes together."""
    dims = zip_longest(*map(reversed, shapes), fillvalue=1)
    return tuple(next((n for n in extents if n != 1), 1) for extents in dims)[::-1]


def _pair(like: Any, first: int, second: int) -> Any:
    """Two numbers along the first dim of `like`, filled in on its device."""
    found = like.new_empty(2, *[1] * (like.dim() - 1))
    found[0].fill_(first)
    found[1].fill_(second)
    return found
