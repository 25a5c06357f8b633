"""Several ranks decode batches in one kernel a GPU: as exactly as transformers in bf16, the same on
all ranks, the same again; and faults end in time.
"""

import gc
import importlib
import itertools
import os
import signal
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.hostir.comm.communicator import Communicator, SingleCommunicator
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    EVENT_WORDS,
    EVENTS_AT,
    FIELD_WORDS,
    BatchLinear,
    BatchLogits,
)
from distmega.models.decoder import Logits
from distmega.models.sampling import MOST_LIKELY, Sampling
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sources.load import open_model
from tests.multigpu.ranks import ON_GPUS
from tests.multigpu.test_decode import relative_errors
from tests.multigpu.test_faults import LIMIT_S, errors_of_survivors, hang_of

HERE = "tests.multigpu.test_batch"
NUM_DECODED, NUM_GREEDY = 6, 32
LENGTHS = 701, 130, 1, 257
"""Of prompts, in turn."""
STEPS_A_LAUNCH = 500
NUM_LAYERS, SM, LAYER = 2, 5, 1
MODELS = ("smollm2-135m", "llama-3.2-1b", "qwen3-0.6b")


def open_engine(
    comm: Communicator,
    model: str,
    batch: int,
    collectives: str = "kernel",
    layers: int = 0,
    max_context: int = 1024,
    timeout_s: float = 10.0,
    sampling: Sampling = MOST_LIKELY,
    logits: Logits = "last",
) -> Engine:
    """The model on all ranks; `layers`: the first ones alone."""
    device = str(torch.get_default_device())
    options = EngineOptions(
        max_context=max_context, batch=batch, collectives=collectives, timeout_s=timeout_s
    )
    source = open_model(model)
    if layers:
        source = replace(source, config=replace(source.config, num_layers=layers))
    with torch.device("cpu"):
        return Engine(
            source, comm.mesh, comm, options, device=device, logits=logits, sampling=sampling
        )


def random_ids(vocab: int, lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    with torch.device("cpu"):
        return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def decoded(engine: Engine, prompts: list[list[int]], following: list[list[int]]) -> Tensor:
    """Logits [steps, batch, vocab] of the given tokens, a step at a time, after the prompts."""
    for slot, prompt in enumerate(prompts):
        engine.prefill(prompt, slot)
    steps = zip(*following, strict=True)
    return torch.stack([engine.decode_step(tokens)["logits"].float() for tokens in steps])


def greedy_tokens(engine: Engine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return list(itertools.islice(engine.generate_all(prompts, ignore_eos=True), NUM_GREEDY))


def decode_as_exactly(comm: Communicator, model: str, batch: int) -> None:
    """Logits of every sequence err no more than those of transformers in bf16; a second run gives
    the same bits; all ranks choose the same tokens, which are those of several steps a launch.
    """
    team = open_engine(comm, model, batch)
    assert team.stepping is not None
    vocab = team.decode_plan.config.vocab
    prompts = random_ids(vocab, list(itertools.islice(itertools.cycle(LENGTHS), batch)))
    following = random_ids(vocab, [NUM_DECODED] * batch)
    found = decoded(team, prompts, following)
    assert torch.equal(found, decoded(team, prompts, following))
    greedy = greedy_tokens(team, prompts)
    assert greedy == greedy_tokens(team, prompts)
    stepwise = tuple(team.prefill_all(prompts))
    for expected in greedy:
        assert stepwise == expected
        stepwise = tuple(team.decode_step(stepwise)["next"].tolist())
    team.stepping.raise_hang()
    mine = found.cpu().numpy().tobytes(), tuple(greedy)
    assert len(set(comm.all_gather_object(mine))) == 1
    del team
    gc.collect()
    lone = open_engine(SingleCommunicator(DeviceMesh(tp=1)), model, 1, "auto")
    for slot in range(comm.rank, batch, comm.mesh.num_ranks):
        require_exact(lone, prompts[slot] + following[slot], found[:, slot])


def require_exact(lone: Engine, ids: list[int], found: Tensor) -> None:
    """Logits of the last ids against those of transformers."""
    # imports transformers, which takes seconds and other bodies' ranks do without
    reference = importlib.import_module("tests.gpu.reference")
    with torch.device("cpu"):
        exact = reference.reference_logits(lone, ids, torch.float32)[-NUM_DECODED:]
        halves = reference.reference_logits(lone, ids, torch.bfloat16)[-NUM_DECODED:]
    error = float(relative_errors(found, exact).max())
    limit = float(relative_errors(halves, exact).max())
    print(f"{len(ids)} tokens: {error:.2e}, transformers in bf16 {limit:.2e}")
    assert error < 1.5 * limit + 1e-3, (len(ids), error, limit)


@pytest.mark.parametrize("batch", [3, 16])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_batches(device: str, num_ranks: int, model: str, batch: int, run_ranks):
    run_ranks(f"{HERE}:decode_as_exactly", device, num_ranks, model, batch)


def decode_experts(comm: Communicator, way: str, batch: int) -> None:
    """A few layers of Qwen3-30B-A3B, each rank a part of every expert or some whole: logits of one
    rank, of which rounding chooses some experts otherwise; the same bits on all ranks and again.
    """
    engines = importlib.import_module("tests.gpu.engines")
    device = str(torch.get_default_device())
    with torch.device("cpu"):
        source = engines.random_model("qwen3-30b-a3b", num_layers=4, vocab=32000)
    prompts = random_ids(32000, list(itertools.islice(itertools.cycle(LENGTHS), batch)))
    following = random_ids(32000, [NUM_DECODED] * batch)
    rows = []
    for one in (SingleCommunicator(DeviceMesh(tp=1)), comm):
        options = EngineOptions(
            max_context=1024, batch=batch, experts=way if one is comm else "auto"
        )
        with torch.device("cpu"):
            engine = Engine(source, one.mesh, one, options, device=device, logits="last")
        assert engine.stepping is not None
        rows.append(decoded(engine, prompts, following))
        assert torch.equal(rows[-1], decoded(engine, prompts, following))
        engine.stepping.raise_hang()
        del engine
        gc.collect()
    errors = relative_errors(rows[1], rows[0])
    print(f"{way}, {batch} sequences: median {errors.median():.2e}, most {errors.max():.2e}")
    assert float(errors.median()) < 2e-2
    assert len(set(comm.all_gather_object(rows[1].cpu().numpy().tobytes()))) == 1


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("way", ["tensor", "expert"])
@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_batches_of_experts(device: str, num_ranks: int, way: str, batch: int, run_ranks):
    run_ranks(f"{HERE}:decode_experts", device, num_ranks, way, batch)


def keep_every_bit(comm: Communicator, num_steps: int) -> None:
    """The same steps again and again, of which only the last one's logits are compared."""
    team = open_engine(comm, "smollm2-135m", 3, layers=2)
    stepping = team.stepping
    assert stepping is not None
    first: tuple[Tensor, Tensor] | None = None
    for done in range(0, num_steps, STEPS_A_LAUNCH):
        stepping.start([1, 2, 3], [0, 20, 300])
        found = stepping.run_steps(STEPS_A_LAUNCH).clone(), stepping.logits.clone()
        first = first or found
        assert torch.equal(found[0], first[0]), f"tokens after {done} steps"
        assert torch.equal(found[1], first[1]), f"logits after {done} steps"
    assert first is not None
    assert len(set(comm.all_gather_object(tuple(first[0].flatten().tolist())))) == 1


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_fifty_thousand_steps_without_a_differing_bit(device: str, num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:keep_every_bit", device, num_ranks, 50_000)


def open_small(comm: Communicator, sampling: Sampling = MOST_LIKELY) -> Engine:
    """Two layers of Llama-3.2-1B, after a first launch, which all ranks begin together: one may
    compile for longer than the limit.
    """
    engine = open_engine(
        comm, "llama-3.2-1b", BATCH, layers=NUM_LAYERS, max_context=4096, timeout_s=LIMIT_S,
        sampling=sampling,
    )  # fmt: skip
    assert engine.stepping is not None
    engine.stepping._steps.await_prepared()
    comm.barrier()
    start(engine, 2)
    torch.cuda.synchronize()
    comm.barrier()
    return engine


def start(engine: Engine, num_steps: int) -> Tensor:
    """Queues decode steps from empty caches; their tokens."""
    assert engine.stepping is not None
    engine.stepping.start([1] * BATCH, [0] * BATCH, engine._sample_inputs)
    return engine.stepping.run_steps(num_steps)


def drop_a_part(comm: Communicator) -> None:
    """One SM of the last rank pushes none of its sum; the kernels can be used again."""
    engine, last = open_small(comm), comm.mesh.num_ranks - 1
    stepping = engine.stepping
    expected = start(engine, 8).tolist()
    number = 5 * LAYER + 3
    saved = stepping._words.clone()
    if comm.rank == last:
        stepping._words[SM, number, FIELD_WORDS[BatchLinear]["num_units"]] = 0
    start(engine, 1)
    found = hang_of(engine)
    assert f"rank {comm.rank}, SM" in found, found
    if comm.rank != last:
        owed = found.partition("owed by")[2]
        assert f"rank {last}, SM {SM}, instruction {number}, layers.{LAYER}.attn_sum, rows" in owed
        assert f"SM {SM} (instruction {number}" in found, found
        assert "of 'parts 1'" in found, found
    stepping._words.copy_(saved)
    torch.cuda.synchronize()
    comm.barrier()
    assert start(engine, 8).tolist() == expected
    stepping.raise_hang()


def drop_a_word(comm: Communicator) -> None:
    """One SM of the last rank tells none that its logits are there: all ranks name it, and the
    kernels can be used again.
    """
    sampling = Sampling(temperature=1.0, top_k=50, seed=2)
    engine, last = open_small(comm, sampling), comm.mesh.num_ranks - 1
    stepping = engine.stepping
    expected = start(engine, 8).tolist()
    head = 5 * NUM_LAYERS + 1
    saved = stepping._words.clone()
    if comm.rank == last:  # where that of SM 205 would be
        stepping._words[SM, head, FIELD_WORDS[BatchLogits]["ready_flags"]] += 2 * 200
    start(engine, 1)
    found = hang_of(engine)
    assert f"rank {comm.rank}, SM" in found, found
    assert f"(instruction {head + 1}, next) waited" in found, found
    assert "of 'ready_flags'" in found, found
    assert f"owed by rank {last}, SM {SM}, instruction {head}, logits" in found, found
    stepping._words.copy_(saved)
    torch.cuda.synchronize()
    comm.barrier()
    assert start(engine, 8).tolist() == expected
    stepping.raise_hang()


def lose_a_signal(comm: Communicator) -> None:
    """An event of rank 0 is never reached: it says so, and the others name rank 0."""
    engine, event = open_small(comm), 5 * LAYER + 4
    if comm.rank == 0:
        engine.stepping._report[2 * EVENTS_AT + event * EVENT_WORDS] -= 1
    start(engine, 1)
    found = hang_of(engine)
    if comm.rank == 0:
        assert f"for event {event} (instruction {event}, layers.{LAYER}.ffn_mixed)" in found, found
        assert "owed by rank 0, by 1 of " in found, found
    else:
        assert "rank 0, SM" in found.partition("owed by")[2], found


def die(comm: Communicator) -> None:
    """The last rank is killed with a launch of its own under way. Launches are short, since one
    that has given up takes longer over each step that is left than one that has not.
    """
    engine, last = open_small(comm), comm.mesh.num_ranks - 1
    for launch in range(200):
        start(engine, 64)
        if comm.rank == last and launch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.cuda.synchronize()
        engine.stepping.raise_hang()


@pytest.mark.parametrize("body", ["drop_a_part", "drop_a_word", "lose_a_signal"])
@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_a_fault_ends_in_time(body: str, device: str, num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:{body}", device, num_ranks)


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_a_killed_rank_is_named(device: str, num_ranks: int, run_ranks):
    errors_of_survivors(f"{HERE}:die", device, num_ranks, run_ranks)
