"""The PTX of the choice of experts, run on the CPU, against torch."""

import numpy as np
import pytest
import torch

from distmega.hostir.library.experts import top_k
from distmega.kernels.hopper.ptx.route import put_asm, rank_asm, weigh_asm
from tests.kernels.ptx_warps import LANES, Warp

WARPS, SCORES, SLOTS = 8, 0, 2048


def bits(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.uint32)


def lanes(value: int) -> np.ndarray:
    return np.full(LANES, value, np.uint32)


def choose(scores: np.ndarray, num: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Experts in slots, and each thread's score and rank; as route_task."""
    shared = np.full(SLOTS + 8 * num, 0xAB, np.uint8)
    warps = [Warp(number, shared) for number in range(WARPS)]
    padded = np.full(2 * WARPS * LANES, -np.inf, np.float32)
    padded[: len(scores)] = scores
    for warp in warps:
        word = 2 * (warp.number * LANES + np.arange(LANES))
        at = (SCORES + 4 * word).astype(np.uint32)
        warp.run(put_asm(), {1: at, 2: bits(padded[word]), 3: bits(padded[word + 1])})
    own, ranks = [], []
    for warp in warps:
        operands = {2: lanes(SCORES), 3: lanes(len(scores)), 4: lanes(SLOTS)}
        found = warp.run(rank_asm(num), operands)
        own.append(found["$0"].view(np.float32))
        ranks.append(found["$1"].view(np.int32))
    for warp, x, rank in zip(warps, own, ranks, strict=True):
        warp.run(weigh_asm(num), {1: lanes(SLOTS), 2: rank.view(np.uint32), 3: bits(x)})
    slots = shared[SLOTS:].view(np.int32).reshape(num, 2)
    weights = np.ascontiguousarray(slots[:, 1]).view(np.float32)
    chosen = slots[:, 0].tolist()
    assert np.array_equal(weights, padded[chosen])
    return chosen, np.concatenate(own), np.concatenate(ranks)


SCORES_OF = {
    "random": lambda rng, n: rng.standard_normal(n),
    "few values": lambda rng, n: rng.integers(-2, 3, n),
    "equal": lambda rng, n: np.zeros(n),
    "signed zeros": lambda rng, n: np.where(rng.random(n) < 0.5, -0.0, 0.0),
    "lowest": lambda rng, n: np.full(n, -np.inf),
    "some lowest": lambda rng, n: np.where(rng.random(n) < 0.9, -np.inf, 1.0),
    "rising": lambda rng, n: np.arange(n),
}


@pytest.mark.parametrize("kind", SCORES_OF)
@pytest.mark.parametrize(("num_experts", "num"), [(128, 8), (6, 2), (64, 8), (256, 8), (4, 4)])
def test_slots_are_those_of_top_k(kind, num_experts, num):
    """Every slot is written, with an expert that there is, and each expert once."""
    scores = SCORES_OF[kind](np.random.default_rng(num_experts), num_experts).astype(np.float32)
    chosen, own, ranks = choose(scores, num)
    _, wanted = top_k(torch.from_numpy(scores)[None], num, "values")
    assert chosen == wanted[0].tolist()
    assert sorted(ranks[:num_experts]) == list(range(num_experts))
    assert (ranks[num_experts:] == num_experts).all()
    assert np.array_equal(own[:num_experts], scores)
    assert (own[num_experts:] == -np.inf).all()
