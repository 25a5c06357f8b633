"""Several ranks draw tokens in the decode kernel, of one sequence and of several."""

import itertools
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from distmega.engine.engine import Engine
from distmega.hostir.comm.communicator import Communicator, SingleCommunicator
from distmega.kernels.hopper.batch_plan.words import BATCH
from distmega.models.decoder import Logits
from distmega.models.sampling import Sampling
from distmega.program.ops import sampling as drawing
from distmega.sharding.layout.mesh import DeviceMesh
from tests.multigpu.ranks import ON_GPUS
from tests.multigpu.test_batch import open_engine, random_ids

HERE = "tests.multigpu.test_sampling"
NUM_SAMPLED = 8
LENGTHS = 3, 40, 130
"""Of prompts."""
LIMITS = [(3, 0, 1.0), (1, 0, 1.0), (3, 0, 0.9), (1, 0, 0.9), (3, 50, 0.9), (1, 50, 0.9)]
"""Batch, top-k and top-p."""
TEMPERATURES = {0: 15.0, 50: 40.0}
"""By top-k: the most likely token of the random model has some percent of the probability, as its
logits have a deviation of 24.
"""


def open_sampling(
    comm: Communicator, batch: int, sampling: Sampling, logits: Logits = "none"
) -> Engine:
    """A small model; on GPUs one that the decode kernel takes."""
    on_gpu = torch.get_default_device().type == "cuda"
    model = "smollm2-135m" if on_gpu else "tiny-llama"
    return open_engine(comm, model, batch, max_context=256, sampling=sampling, logits=logits)


def drawn(engine: Engine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return list(itertools.islice(engine.generate_all(prompts, ignore_eos=True), NUM_SAMPLED))


def sample_as_asked(logits: Tensor, sampling: Sampling, positions: list[int]) -> tuple[int, ...]:
    """The tokens that the logits of each sequence, its seed and its position give."""
    num, vocab = logits.shape
    settings = torch.tensor([sampling.settings] * num)
    limits = (
        drawing.cutoff_values(logits, settings) if sampling.method.kind == "limited" else settings
    )
    seeds = torch.tensor([sampling.seed_of(sequence) for sequence in range(num)])
    _, found = drawing.sample_values(logits, limits, seeds, torch.tensor(positions), 0, vocab)
    return tuple(found.tolist())


def all_logits(engine: Engine, told: Tensor) -> Tensor:
    """What tokens of a step were drawn from: where the kernel draws, all ranks' logits before they
    are rounded to those that it gives.
    """
    if engine.stepping is None:
        return told
    num, vocab = told.shape
    found = engine.stepping.logits.cpu().view(num if num == 1 else BATCH, -1)[:num]
    if found.shape[1] < vocab:
        parts = [torch.tensor(part) for part in engine.comm.all_gather_object(found.tolist())]
        found = torch.cat(parts, dim=1)[:, :vocab].to(found.dtype)
    assert torch.equal(found.to(told), told)
    return found.to(told.device)


def sample_from_logits(comm: Communicator, batch: int, top_k: int, top_p: float) -> None:
    """The same tokens from what each rank has of the logits, where that is enough, as from all of
    them; the same on all ranks and again.
    """
    sampling = Sampling(temperature=TEMPERATURES[top_k], top_k=top_k, top_p=top_p, seed=5)
    team = open_sampling(comm, batch, sampling)
    assert team.uses_megakernel
    assert len(team.decode_plan.host.segments) == 1
    assert (team.stepping is not None) == (team.device.type == "cuda")
    prompts = random_ids(team.decode_plan.config.vocab, list(LENGTHS[:batch]))
    found = drawn(team, prompts)
    assert found == drawn(team, prompts)
    team = open_sampling(comm, batch, sampling, "last")
    tokens = tuple(team.prefill_all(prompts))
    for number, expected in enumerate(found):
        assert tokens == expected, f"token {number}"
        outputs = team.decode_step(tokens)
        tokens = tuple(outputs["next"].tolist())
        positions = [len(prompt) + number for prompt in prompts]
        logits = all_logits(team, outputs["logits"])
        assert tokens == sample_as_asked(logits, sampling, positions)
    assert len(set(itertools.chain(*found))) > NUM_SAMPLED // 2
    assert len(set(comm.all_gather_object(tuple(found)))) == 1


@pytest.mark.parametrize(("batch", "top_k", "top_p"), LIMITS)
@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_draws_are_those_of_the_kernel_logits(
    device: str, num_ranks: int, batch: int, top_k: int, top_p: float, run_ranks
):
    run_ranks(f"{HERE}:sample_from_logits", device, num_ranks, batch, top_k, top_p)


def sample_as_the_kernel(comm: Communicator, batch: int) -> None:
    """On CPUs, whose kernels can draw: library ops give the same tokens, and those of one rank."""
    sampling = Sampling(temperature=1.0, seed=5)
    with patch("distmega.engine.decode_planner.samples_apart", return_value=True):
        sample_from_logits(comm, batch, 0, 1.0)
        apart = open_sampling(comm, batch, sampling)
    lone = open_sampling(SingleCommunicator(DeviceMesh(tp=1)), batch, sampling)
    prompts = random_ids(lone.decode_plan.config.vocab, list(LENGTHS[:batch]))
    found = [drawn(one, prompts) for one in (apart, open_sampling(comm, batch, sampling), lone)]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("batch", [1, 3])
def test_draws_are_those_of_a_kernel_and_of_one_rank(batch: int, run_ranks):
    run_ranks(f"{HERE}:sample_as_the_kernel", "cpu", 2, batch)
