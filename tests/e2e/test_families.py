"""Tiny random models of every family, saved by transformers, run on real ranks: 6 query heads over
3 kv heads, so 2 and 4 ranks pad heads. The llama has Llama 3's rope scaling, the mistral a window.
"""

from functools import cache
from pathlib import Path

import pytest
import torch

from distmega.engine.requests import EngineOptions
from tests.e2e.running import relative_error, run_measure, token_ids
from tests.e2e.targets import Logits, Measure, Measured
from tests.models.files import FAMILIES

TOLERANCE = 1e-4
NUM_TOKENS, NUM_PREFILLED, NUM_SEEDS = 100, 80, 20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@cache
def expected_logits(name: str, root: Path) -> Logits:
    """By transformers; saves the model to root/name on the way."""
    model = FAMILIES[name].build()
    model.save_pretrained(root / name)
    with torch.no_grad():
        return model(torch.tensor([token_ids(NUM_TOKENS)])).logits[0].float().numpy()


def measured(name: str, root: Path, num_ranks: int) -> Measured:
    request = Measure(
        model=str(root / name),
        ids=token_ids(NUM_TOKENS),
        num_prefilled=NUM_PREFILLED,
        num_decoded=NUM_TOKENS - NUM_PREFILLED,
        seeds=range(NUM_SEEDS) if num_ranks == 1 else (0, 1),
        options=EngineOptions(max_context=128, num_sms=4),
    )
    return run_measure(request, num_ranks)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("llama", 1), ("llama", 4), ("qwen3", 2), pytest.param("qwen3", 3, marks=pytest.mark.nightly)],
)
def test_logits_equal_transformers(name: str, num_ranks: int, root: Path) -> None:
    expected = expected_logits(name, root)
    found = measured(name, root, num_ranks)
    assert relative_error(found.prefill, expected) < TOLERANCE
    for decoded in found.decode:
        assert relative_error(decoded, expected[NUM_PREFILLED:]) < TOLERANCE
        assert (decoded == found.decode[0]).all()


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_logits_of_the_other_families(name: str, root: Path) -> None:
    expected = expected_logits(name, root)
    found = measured(name, root, 2)
    assert relative_error(found.prefill, expected) < TOLERANCE
    assert relative_error(found.decode[0], expected[NUM_PREFILLED:]) < TOLERANCE
