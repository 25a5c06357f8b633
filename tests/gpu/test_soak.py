"""Many decode steps with changing inputs: each run as the first of the same inputs, bit by bit.

The suite takes some thousands; `pytest tests/gpu/test_soak.py --soak-steps 100000` takes that many.
"""

import random

import pytest
import torch
from torch import Tensor

from distmega.models.sampling import Sampling
from tests.gpu.engines import open_engine, random_model

pytestmark = pytest.mark.gpu

VOCAB = 49152
NUM_INPUTS = 10
RUN_STEPS = 250
"""Steps of one run from an input on, in several launches."""


def run_once(engine, prompt: list[int], launches: list[int]) -> list[Tensor]:
    """Tokens of RUN_STEPS steps after the prompt, the last logits of all sequences, and both caches
    of a layer.
    """
    stepping = engine.stepping
    tokens = [engine.prefill(prompt, slot) for slot in range(engine.batch)]
    stepping.start(tokens, [len(prompt)] * engine.batch, engine._sample_inputs)
    chosen = torch.cat([stepping.run_steps(num).clone() for num in launches])
    end = len(prompt) + RUN_STEPS
    caches = [engine.tensor(f"layers.2.{which}_cache")[..., :end, :] for which in "kv"]
    # rows behind the sequences go on from whatever they had before
    logits = stepping.logits[: engine.batch].clone()
    return [chosen, logits, *(cache.clone() for cache in caches)]


def random_launches(rng: random.Random) -> list[int]:
    """RUN_STEPS as a sum of 1 to 64 steps each."""
    launches: list[int] = []
    while (left := RUN_STEPS - sum(launches)) > 0:
        launches.append(min(left, rng.randint(1, 64)))
    return launches


@pytest.mark.parametrize(
    ("model", "batch", "sampling"),
    [
        ("smollm2-135m", 1, Sampling()),
        ("smollm2-135m", 1, Sampling(temperature=15.0, top_k=40, seed=3)),
        ("smollm2-135m", 3, Sampling()),
        ("smollm2-135m", 3, Sampling(temperature=15.0, top_k=40, top_p=0.9, seed=3)),
        ("qwen3-30b-a3b", 1, Sampling()),
        ("qwen3-30b-a3b", 8, Sampling()),
    ],
    ids=["greedy", "drawn", "batch of 3", "batch of 3, drawn", "experts", "experts, batch of 8"],
)
def test_every_run_is_the_first_of_its_inputs(model, batch, sampling, request):
    source = random_model(model, num_layers=3, vocab=VOCAB)
    engine = open_engine(source, batch, sampling=sampling)
    rng = random.Random(batch)
    prompts = [
        [rng.randrange(VOCAB) for _ in range(rng.randint(1, 700))] for _ in range(NUM_INPUTS)
    ]
    first: dict[int, list[Tensor]] = {}
    num_runs = max(request.config.getoption("--soak-steps") // RUN_STEPS, 2 * NUM_INPUTS)
    for run in range(num_runs):
        number = run if run < NUM_INPUTS else rng.randrange(NUM_INPUTS)
        found = run_once(engine, prompts[number], random_launches(rng))
        for mine, expected in zip(found, first.setdefault(number, found), strict=True):
            assert torch.equal(mine, expected), (run, number)
    assert len({int(tokens[0].sum()) for tokens in first.values()}) > NUM_INPUTS // 2
    kind = sampling.method.kind
    print(f"{num_runs * RUN_STEPS} steps of {batch}, {model}, {kind}: {num_runs} runs")
