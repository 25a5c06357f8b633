"""Drawing tokens: the generator, the limits against transformers, the distribution, and ranks."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from distmega.hostir.library.ops import run_op
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.kernels.machines import CPU
from distmega.program.builder import ProgramBuilder
from distmega.program.ops import noise, sampling
from distmega.program.ops.experts import route_values, top_k_values
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import shard
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from tests.hostir.threads import join, run_mesh

CHI2_999 = {9: 27.88, 19: 43.82, 99: 148.23}
"""Quantile 0.999 of chi-square by degrees of freedom."""


def philox_by_hand(seed: int, position: int, index: int) -> int:
    """Philox4x32-10 with Python's integers, as the paper has it."""
    counter, key = [index, position, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * counter[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * counter[2], 2**32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter[0]


def test_the_generator_gives_the_published_value():
    zero = torch.zeros(1, dtype=torch.int64)
    assert noise.philox(zero, zero, zero).item() == 0x6627E8D5


@pytest.mark.parametrize("seed", [1, 2**31, 2**32 - 1, 2**40 + 5, 2**63 - 1])
def test_the_generator_is_philox(seed: int):
    indices = torch.tensor([0, 1, 77, 151935, 2**31 - 1])
    positions = torch.tensor([0, 3, 2**20, 1, 2**31 - 1])
    found = noise.philox(torch.full_like(indices, seed), positions, indices)
    pairs = zip(positions.tolist(), indices.tolist(), strict=True)
    assert found.tolist() == [philox_by_hand(seed, *pair) for pair in pairs]


def test_noise_is_gumbel():
    indices = torch.arange(200_000)
    found = noise.gumbel(torch.tensor(5), torch.tensor(9), indices)
    assert found.mean().item() == pytest.approx(0.57722, abs=0.01)
    assert found.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.01)
    assert found.isfinite().all()


def warped(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Probabilities by transformers."""
    ids = torch.zeros(1, 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(temperature)(ids, logits)
    scores = TopKLogitsWarper(top_k)(ids, scores) if top_k else scores
    return (TopPLogitsWarper(top_p)(ids, scores) if top_p < 1 else scores).softmax(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 50, 5000])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 1.0])
def test_limits_are_those_of_transformers(temperature: float, top_k: int, top_p: float):
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1)) * 3
    settings = torch.tensor([[temperature, top_k, top_p]] * 4)
    limits = sampling.cutoff_values(logits, settings)
    expected = warped(logits, temperature, top_k, top_p) > 0
    assert ((logits >= limits[:, 1:]) == expected).all()
    assert (limits[:, 0] == settings[:, 0]).all()
    if 0 < top_k <= 50:
        candidates = sampling.top_values(logits, 4, 50)
        assert (sampling.cutoff_values(candidates, settings) == limits).all()


def test_what_equals_the_last_is_kept():
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]])
    for top_k, top_p, least in ((2, 1.0, 2.0), (5, 0.6, 2.0), (0, 0.4, 3.0), (0, 1.0, 1.0)):
        assert sampling.cutoff_values(logits, torch.tensor([[1.0, top_k, top_p]]))[0, 1] == least


def draw(logits: Tensor, settings: Tensor, seed: int, positions: Tensor) -> Tensor:
    rows = logits.expand(len(positions), -1)
    limits = sampling.cutoff_values(logits, settings).expand(len(positions), -1)
    seeds = torch.full_like(positions, seed)
    return sampling.sample_values(rows, limits, seeds, positions, 0, logits.shape[1])[1]


@pytest.mark.parametrize(
    ("vocab", "temperature", "top_k", "top_p"),
    [(10, 1.0, 0, 1.0), (100, 0.7, 0, 1.0), (100, 1.3, 20, 1.0), (1000, 2.0, 20, 1.0)],
)
def test_draws_have_the_distribution(vocab: int, temperature: float, top_k: int, top_p: float):
    """Chi-square over the positions of three seeds."""
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(2))
    expected = warped(logits, temperature, top_k, top_p)[0]
    settings, num_samples = torch.tensor([[temperature, top_k, top_p]]), 20_000
    for seed in (0, 1, 2**40):
        drawn = draw(logits, settings, seed, torch.arange(num_samples))
        counts = drawn.bincount(minlength=vocab)
        possible = expected > 0
        assert counts[~possible].sum() == 0
        wanted = expected[possible] * num_samples
        statistic = ((counts[possible] - wanted) ** 2 / wanted).sum().item()
        assert statistic < CHI2_999[int(possible.sum()) - 1]


def test_the_chi_square_test_sees_a_wrong_temperature():
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(2))
    drawn = draw(logits, torch.tensor([[0.8, 0, 1.0]]), 0, torch.arange(20_000))
    wanted = warped(logits, 0.7, 0, 1.0)[0] * 20_000
    assert ((drawn.bincount(minlength=100) - wanted) ** 2 / wanted).sum() > CHI2_999[99]


def test_temperature_zero_takes_the_largest():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))
    limits = sampling.cutoff_values(logits, torch.tensor([[0.0, 0.0, 1.0]] * 3))
    zero = torch.zeros(3, dtype=torch.int64)
    _, found = sampling.sample_values(logits, limits, zero, zero, 0, 50)
    assert (found == logits.argmax(-1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 0.9), (0, 0.5)])
def test_noise_for_all_gives_what_noise_for_the_kept_gives(
    dtype: torch.dtype, top_k: int, top_p: float
):
    """As devices other than the CPU draw, bit by bit; half types have ties."""
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(7)).to(dtype)
    limits = sampling.cutoff_values(logits, torch.tensor([[0.7, top_k, top_p]] * 3))
    seeds, positions = torch.tensor([1, 2, 2**40]), torch.tensor([0, 9, 300])
    kept = logits.float() >= limits[:, 1:]
    assert kept.sum() < kept.numel() or top_p == 1
    values = sampling.noisy_values(logits, kept, limits, seeds, positions, 64)
    assert ((values > -math.inf) == kept).all()
    expected = sampling.sample_values(logits, limits, seeds, positions, 64, 1000)
    for found, wanted in zip(sampling.argmax_values(values, 64, 1000), expected, strict=True):
        assert torch.equal(found, wanted)


def sampling_program(rows: int, vocab: int, num_top: int) -> Program:
    p = ProgramBuilder("sampling")
    x, w = p.input("x", (rows, 16)), p.weight("w", (vocab, 16))
    settings = p.input("settings", (rows, 3))
    seeds, positions = p.input("seeds", (rows,), "i64"), p.input("positions", (rows,), "i64")
    logits = p.linear(x, w, name="logits")
    candidates = p.top(logits, num_top, name="candidates") if num_top else logits
    limits = p.cutoff(candidates, settings, name="limits")
    return p.build(p.sample(logits, limits, seeds, positions, name="next"))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("num_top", [0, 4])
def test_ranks_draw_together(tp: int, num_top: int):
    """Logits and candidates divided over ranks: the tokens of one rank, by exchanging candidates
    and one pair a rank alone.
    """
    rows, vocab = 5, 64
    program = sampling_program(rows, vocab, num_top)
    generator = torch.Generator().manual_seed(4)
    tensors = {
        "x": torch.randn(rows, 16, generator=generator),
        "w": torch.randn(vocab, 16, generator=generator),
        "settings": torch.tensor([[1.0, 3.0, 0.9]] * rows),
        "seeds": torch.arange(rows),
        "positions": torch.arange(rows),
    }
    expected = dict(tensors)
    for op in program.ops:
        expected |= run_op(op, expected, {})
    pins = {"logits": shard(1, "tp")} | ({"candidates": shard(1, "tp")} if num_top else {})
    local = localize(plan_program(program, DeviceMesh(tp=tp), CPU, pins))
    host = run_passes(lower_program(local, megakernel=False, peer_memory=False))
    found = join(run_mesh(host, local, tensors), local, ["next"])["next"]
    assert (found == expected["next"]).all()
    if num_top and tp > 1:
        moved = {op.reads[0].tensor for op in local.program.ops if op.kind == "all_gather"}
        assert moved == {"candidates"}


class OnOneDevice(TorchDispatchMode):
    """Refuses tensors of the host beside those of a device, as a CUDA graph would."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        assert all(x.is_meta for x in given), func
        return func(*args, **(kwargs or {}))


def test_on_a_device_the_host_asks_and_copies_nothing():
    """Tensors of the meta device have no values that a host could ask for."""
    x, settings = torch.empty(3, 200, device="meta"), torch.empty(3, 3, device="meta")
    numbers = torch.empty(3, dtype=torch.int64, device="meta")
    ids = torch.empty(6, 2, dtype=torch.int32, device="meta")
    with OnOneDevice():
        limits = sampling.cutoff_values(x, settings)
        values = sampling.sample_values(x, limits, numbers, numbers, 64, 1000)
        routed = route_values(ids, 8, numbers[:1])
        weights, _ = top_k_values(x, 4, "softmax")
    assert limits.shape == (3, 2)
    assert [one.shape for one in values] == [(3,)] * 2
    assert [one.shape for one in routed] == [(8,), (9,), (12,), (6, 2)]
    assert weights.shape == (3, 4)
