"""The batched decode kernel on one GPU: each sequence as transformers has it alone, and as itself
again.
"""

import pytest
import torch

from distmega.engine.engine import Engine
from tests.gpu.engines import open_engine
from tests.gpu.reference import reference_logits
from tests.gpu.test_decode import random_ids, relative_error

pytestmark = pytest.mark.gpu

NUM_DECODED = 6


@pytest.mark.parametrize("batch", [2, 5, 16])
@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.2-1b", "qwen3-0.6b"])
def test_each_sequence_equals_transformers(name: str, batch: int):
    engine = open_engine(name, batch)
    require_transformers_logits(engine, [1 + (131 * slot + 700) % 997 for slot in range(batch)])


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-8b"])
def test_long_contexts(name: str):
    engine = open_engine(name, 4, max_context=6144)
    require_transformers_logits(engine, [4096, 6100, 37, 4997])


def require_transformers_logits(engine: Engine, lengths: list[int]) -> None:
    """Sequences of these lengths, then NUM_DECODED steps together: logits within what transformers
    in bf16 errs against float32.
    """
    vocab = engine.decode_plan.config.vocab
    sequences = [random_ids(vocab, length + NUM_DECODED) for length in lengths]
    for slot, ids in enumerate(sequences):
        engine.prefill(ids[:-NUM_DECODED], slot)
    steps = zip(*(ids[-NUM_DECODED:] for ids in sequences), strict=True)
    found = torch.stack([engine.decode_step(tokens)["logits"].clone() for tokens in steps], 1)
    for slot, ids in enumerate(sequences):
        exact = reference_logits(engine, ids, torch.float32)[-NUM_DECODED:]
        halves = reference_logits(engine, ids, torch.bfloat16)[-NUM_DECODED:]
        error, limit = relative_error(found[slot].float(), exact), relative_error(halves, exact)
        print(f"{len(ids)} tokens: {error:.2e}, transformers in bf16 {limit:.2e}")
        assert error < 1.5 * limit + 1e-3, (slot, len(ids), error, limit)


def test_several_steps_a_launch_equal_single_steps():
    engine = open_engine("smollm2-135m", 5)
    prompts = [random_ids(engine.decode_plan.config.vocab, n) for n in (3, 700, 128, 129, 257)]
    stepwise = engine.generate_all(prompts, ignore_eos=True)
    together = [next(stepwise) for _ in range(40)]
    assert engine.stepping is not None
    first = tuple(engine.prefill_all(prompts))
    assert first == together[0]
    tokens = first
    for expected in together[1:]:
        tokens = tuple(engine.decode_step(tokens)["next"].tolist())
        assert tokens == expected


def test_fewer_sequences_than_slots_and_again():
    engine = open_engine("smollm2-135m", 16)
    prompts = [random_ids(engine.decode_plan.config.vocab, n) for n in (40, 2, 300)]
    first = [
        tokens
        for tokens, _ in zip(engine.generate_all(prompts, ignore_eos=True), range(30), strict=False)
    ]
    again = [
        tokens
        for tokens, _ in zip(engine.generate_all(prompts, ignore_eos=True), range(30), strict=False)
    ]
    assert first == again
    assert all(len(tokens) == 3 for tokens in first)


def test_many_steps_repeat_bit_by_bit():
    """Also the partials' sums: several SMs share each sequence and head."""
    engine = open_engine("smollm2-135m", 3, max_context=4096)
    stepping = engine.stepping
    assert stepping is not None
    runs = []
    for _ in range(3):
        stepping.start([1, 2, 3], [900, 2500, 20])
        runs.append(torch.cat([stepping.run_steps(500).clone() for _ in range(2)]))
        engine.tensor("layers.0.k_cache")[:, :, 900:].zero_()
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
