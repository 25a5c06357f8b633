"""The PTX that lists the experts of 2 to 16 rows, run on the CPU by warps."""

import numpy as np
import pytest

from distmega.kernels.hopper.ptx.route import count_asm, list_asm, put_if_asm
from tests.kernels.ptx_warps import LANES, Warp

WARPS = 8


def bits(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.uint32)


def lanes(value: int) -> np.ndarray:
    return np.full(LANES, value, np.uint32)


@pytest.mark.parametrize("num_experts", [32, 64, 128])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_experts_that_are_hit_are_listed_in_order(num_experts, share):
    """Each with its rows, behind how many they are; in the place where the rows of all were."""
    rng = np.random.default_rng(num_experts)
    rows = np.where(rng.random(num_experts) < share, rng.integers(1, 1 << 16, num_experts), 0)
    shared = np.full(4 * (2 * num_experts), 0xAB, np.uint8)
    shared[4 : 4 + 4 * num_experts] = rows.astype(np.uint32).view(np.uint8)
    warps = [Warp(number, shared) for number in range(WARPS)]
    counted = [warp.run(count_asm(num_experts), {3: lanes(4)}) for warp in warps]
    for warp, found in zip(warps, counted, strict=True):
        operands = {i + 2: found[f"${i}"] for i in range(3)}
        warp.run(list_asm(), {1: lanes(0), **operands})
    (hits,) = np.nonzero(rows)
    words = shared.view(np.uint32)
    assert words[0] == len(hits)
    found = words[1 : 1 + len(hits)]
    assert (found >> 16).tolist() == hits.tolist()
    assert (found & 0xFFFF).tolist() == rows[hits].tolist()


def test_a_weight_is_put_where_it_is_wanted():
    shared = np.full(4 * LANES, 0xAB, np.uint8)
    wanted = np.arange(LANES) % 3 == 0
    at, values = 4 * np.arange(LANES), bits(np.arange(LANES))
    Warp(0, shared).run(put_if_asm(), {1: at, 2: values, 3: wanted})
    words = shared.view(np.uint32)
    assert np.array_equal(words[wanted], values[wanted])
    assert (words[~wanted] == 0xABABABAB).all()
