"""Several ranks decode what one rank does, and as exactly as transformers in bf16."""

import gc
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distmega.engine import Engine
from distmega.hostir.comm import Communicator, SingleCommunicator
from distmega.models.load import open_model
from distmega.requests import EngineOptions
from distmega.sharding.mesh import DeviceMesh
from tests.gpu.reference import reference_logits
from tests.multigpu.ranks import ON_GPUS, run_ranks

HERE = "tests.multigpu.test_decode"
NUM_PREFILLED, NUM_DECODED = 130, 10
MODELS = ("smollm2-135m", "llama-3.2-1b", "qwen3-8b")


def relative_errors(found: Tensor, expected: Tensor) -> Tensor:
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)


def random_ids(vocab: int) -> list[int]:
    shape = (NUM_PREFILLED + NUM_DECODED,)
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(3)).tolist()


def open_both(comm: Communicator, model: str, **options: object) -> tuple[Engine, Engine]:
    """The model on all ranks, and on this rank alone."""
    device = str(torch.get_default_device())
    source, one = open_model(model), DeviceMesh(tp=1)
    given = EngineOptions(max_context=512, **options)
    with torch.device("cpu"):
        team = Engine(source, comm.mesh, comm, given, device=device, logits="last")
        lone = Engine(source, one, SingleCommunicator(one), given, device=device, logits="last")
    return team, lone


def decode_as_exactly(comm: Communicator, model: str, collectives: str) -> None:
    """Errors against fp32 are those of rounding to bf16; tokens that no rounding can change are
    the same; a second run gives the same bits.
    """
    team, lone = open_both(comm, model, collectives=collectives)
    assert team.uses_megakernel == (collectives != "host")
    with torch.device("cpu"):
        ids = random_ids(lone.blueprint.config.vocab)
        exact = reference_logits(lone, ids, torch.float32)
        rounded = float(relative_errors(reference_logits(lone, ids, torch.bfloat16), exact).max())
        assert float(relative_errors(team.logits(ids).float(), exact).max()) < 1.5 * rounded
        runs = []
        for engine in (team, team, lone):
            engine.prefill(ids[:NUM_PREFILLED])
            steps = [engine.decode_step([token]) for token in ids[NUM_PREFILLED:]]
            runs.append(torch.cat([step["logits"] for step in steps]).float())
    expected = exact[NUM_PREFILLED:]
    errors = [float(relative_errors(run, expected).max()) for run in runs]
    top = expected.topk(2).values
    clear = top[:, 0] - top[:, 1] > 4 * (runs[0] - expected).abs().max()
    if comm.rank == 0:
        print(f"{model} tp={comm.mesh.num_ranks} {collectives}: {errors}, bf16 {rounded:.2e}")
        print(f"{int(clear.sum())} of {len(clear)} tokens clear")
    assert max(errors) < 1.5 * rounded
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0].argmax(-1)[clear], expected.argmax(-1)[clear])
    assert len(set(comm.all_gather_object(tuple(runs[0].argmax(-1).tolist())))) == 1
    same = sum(map(int.__eq__, *(greedy_tokens(engine, ids) for engine in (team, lone))))
    if comm.rank == 0:
        print(f"{same} of 32 greedy tokens as one rank")
    del team, lone
    gc.collect()


def greedy_tokens(engine: Engine, ids: list[int]) -> list[int]:
    with torch.device("cpu"):
        return list(itertools.islice(engine.generate(ids[:NUM_PREFILLED]), 32))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("collectives", ["host", "kernel"])
@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_decode(model: str, collectives: str, device: str, num_ranks: int, tmp_path: Path):
    run_ranks(f"{HERE}:decode_as_exactly", device, num_ranks, tmp_path, model, collectives)
