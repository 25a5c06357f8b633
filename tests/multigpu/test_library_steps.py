"""Several ranks decode more sequences than a kernel takes, by a graph of library ops: the logits of
one rank, the same tokens on all of them, and a rank that does not come is told of.
"""

import itertools
import time

import pytest
import torch

from distmega.engine.engine import Engine
from distmega.engine.library_steps import LibrarySteps
from distmega.errors import HangError
from distmega.hostir.comm.communicator import Communicator, SingleCommunicator
from distmega.hostir.ir.nodes import FusedMatmul
from distmega.hostir.run.deadline import graph_limit_s
from distmega.models.sampling import Sampling
from distmega.sharding.layout.mesh import DeviceMesh
from tests.multigpu.ranks import ON_GPUS
from tests.multigpu.test_batch import decoded, open_engine, random_ids
from tests.multigpu.test_decode import relative_errors

HERE = "tests.multigpu.test_library_steps"
NUM_LAYERS, NUM_DECODED, NUM_GREEDY = 2, 4, 20
TIMEOUT_S = 0.5


def steps_of(engine: Engine) -> LibrarySteps:
    """What runs its decode steps."""
    assert isinstance(engine.stepping, LibrarySteps)
    return engine.stepping


def decode_as_one_rank(comm: Communicator, model: str, batch: int, collectives: str) -> None:
    team = open_engine(comm, model, batch, collectives, layers=NUM_LAYERS)
    vocab = team.decode_plan.config.vocab
    prompts = random_ids(vocab, [1 + (131 * slot) % 300 for slot in range(batch)])
    following = random_ids(vocab, [NUM_DECODED] * batch)
    found = decoded(team, prompts, following)
    assert torch.equal(found, decoded(team, prompts, following))
    host = steps_of(team).host
    sums = [node for node in host.body if isinstance(node, FusedMatmul)]
    assert len(sums) == (0 if collectives == "host" else 2 * NUM_LAYERS)
    steps = team.generate_all(prompts[:-1], ignore_eos=True)
    together = list(itertools.islice(steps, NUM_GREEDY))
    steps.close()
    assert steps_of(team)._graph is not None
    tokens = tuple(team.prefill_all(prompts[:-1]))
    for expected in together:
        assert tokens == expected
        tokens = tuple(team.decode_step(tokens)["next"].tolist())[: batch - 1]
    mine = found.cpu().numpy().tobytes(), tuple(together)
    assert len(set(comm.all_gather_object(mine))) == 1
    del team
    lone = open_engine(SingleCommunicator(DeviceMesh(tp=1)), model, batch, "auto", NUM_LAYERS)
    error = float(relative_errors(found, decoded(lone, prompts, following)).max())
    print(f"{model}, {batch} sequences: {error:.2e}")
    assert error < 3e-2


@pytest.mark.parametrize(
    ("model", "batch", "collectives"),
    [("llama-3.2-1b", 33, "auto"), ("qwen3-8b", 64, "auto"), ("qwen3-0.6b", 20, "host")],
)
@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_many_sequences(
    device: str, num_ranks: int, model: str, batch: int, collectives: str, run_ranks
):
    run_ranks(f"{HERE}:decode_as_one_rank", device, num_ranks, model, batch, collectives)


def sample_alike(comm: Communicator) -> None:
    """All ranks draw the same tokens, and draw them again."""
    sampling = Sampling(temperature=1.0, top_k=50, top_p=0.9, seed=5)
    team = open_engine(comm, "llama-3.2-1b", 17, "auto", NUM_LAYERS, sampling=sampling)
    prompts = random_ids(team.decode_plan.config.vocab, [5 + slot for slot in range(17)])
    runs = [
        list(itertools.islice(team.generate_all(prompts, 9, ignore_eos=True), 9)) for _ in range(2)
    ]
    assert steps_of(team)._graph is not None
    assert runs[0] == runs[1]
    assert len(set(comm.all_gather_object(tuple(runs[0])))) == 1


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_sampled_tokens(device: str, num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:sample_alike", device, num_ranks)


def come_late(comm: Communicator) -> None:
    """The last rank takes its steps once the others have given up; then all go on together."""
    team = open_engine(comm, "llama-3.2-1b", 20, "auto", NUM_LAYERS, timeout_s=TIMEOUT_S)
    limit_s = graph_limit_s(TIMEOUT_S)
    prompts = random_ids(team.decode_plan.config.vocab, [9] * 20)
    expected = list(team.generate_all(prompts, 4, ignore_eos=True))
    steps = steps_of(team)
    steps.start(expected[0], [9] * 20)
    comm.barrier()
    begun = time.monotonic()
    if comm.rank == comm.mesh.num_ranks - 1:
        time.sleep(limit_s + 2)
    rows = steps.run_steps(3)
    done = torch.cuda.Event()
    done.record()
    if comm.rank != comm.mesh.num_ranks - 1:
        with pytest.raises(HangError, match=f"rank {comm.rank}: still under way after 6 s"):
            steps.await_launch(done)
        assert time.monotonic() - begun >= limit_s
        with pytest.raises(HangError, match="after 0 s"):
            steps.await_launch(done)
    assert [tuple(row) for row in rows.tolist()] == expected[1:]
    comm.barrier()


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_a_rank_that_does_not_come_is_told_of(device: str, num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:come_late", device, num_ranks)
